//! Launching a kernel: its grid, its arguments, and whether it may begin before the kernel ahead of it has ended.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::CudaDevice;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

/// A value passed to a kernel: an address or a number by its bits, or a struct of 4-byte numbers.
#[derive(Clone, Copy)]
pub(crate) enum Arg<'a> {
    Word([u8; 8]),
    Struct(&'a [u32]),
}

impl Arg<'_> {
    fn address(&self) -> *mut c_void {
        match self {
            Arg::Word(bits) => bits.as_ptr().cast_mut().cast(),
            Arg::Struct(numbers) => numbers.as_ptr().cast_mut().cast(),
        }
    }
}

macro_rules! arg_from {
    ($($number:ty),*) => {$(
        impl From<$number> for Arg<'_> {
            fn from(value: $number) -> Self {
                let mut bits = [0; 8];
                bits[..size_of::<$number>()].copy_from_slice(&value.to_ne_bytes());
                Arg::Word(bits)
            }
        }
    )*};
}
arg_from!(u32, i32, u64, f32);

impl From<&Tensor> for Arg<'_> {
    fn from(tensor: &Tensor) -> Self {
        Arg::from(tensor.device_address())
    }
}

impl From<&mut Tensor> for Arg<'_> {
    fn from(tensor: &mut Tensor) -> Self {
        Arg::from(tensor.device_address())
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub grid: [u32; 3],
    pub block: u32,
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    /// The kernel may start while the one ahead of it still runs: it must wait (`griddepcontrol.wait`) before it reads what others
    /// write. Everything that may be overlapped so says `griddepcontrol.launch_dependents` itself.
    pub overlap: bool,
}

impl Launch {
    pub(crate) fn new(grid: impl Into<Grid>, block: u32) -> Self {
        Launch { grid: grid.into().0, block, shared_bytes: 0, overlap: true }
    }

    pub(crate) fn shared_bytes(mut self, bytes: usize) -> Self {
        self.shared_bytes = bytes as u32;
        self
    }

    /// Launches `kernel` of `source` on the device's stream. A grid with no blocks is no launch.
    ///
    /// # Errors
    /// `NoKernel`, `Launch`.
    ///
    /// # Safety
    /// `args` must be what the kernel takes, in order, and the addresses among them must hold what it reads and writes until the
    /// stream has passed it.
    pub(crate) unsafe fn run(
        self,
        device: &CudaDevice,
        source: &'static str,
        kernel: &'static str,
        args: &[Arg<'_>],
    ) -> Result<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        let function = device.function(source, kernel)?;
        device.bind()?;
        let mut pointers = [std::ptr::null_mut::<c_void>(); 24];
        assert!(args.len() <= pointers.len(), "{kernel} takes more than {} arguments", pointers.len());
        for (pointer, arg) in pointers.iter_mut().zip(args) {
            *pointer = arg.address();
        }
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: device.stream(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(self.overlap),
        };
        // SAFETY: the caller's promise for the arguments; config and attribute outlive the call, which copies them.
        unsafe { sys::cuLaunchKernelEx(&raw const config, function.0, pointers.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(|source| KernelError::Launch { op: kernel, source })
    }
}

/// Blocks in up to three dimensions.
pub(crate) struct Grid([u32; 3]);

impl From<usize> for Grid {
    fn from(x: usize) -> Self {
        Grid([x as u32, 1, 1])
    }
}

impl From<[usize; 2]> for Grid {
    fn from([x, y]: [usize; 2]) -> Self {
        Grid([x as u32, y as u32, 1])
    }
}

impl From<[usize; 3]> for Grid {
    fn from([x, y, z]: [usize; 3]) -> Self {
        Grid([x as u32, y as u32, z as u32])
    }
}
