//! Device memory, and host memory that the device can read while the host goes on.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::{CudaDevice, Launch, failed};
use crate::dtype::Element;
use crate::error::{KernelError, Result};

/// Zeroed device memory.
#[derive(Debug)]
pub(crate) struct CudaBuffer {
    device: Arc<CudaDevice>,
    address: sys::CUdeviceptr,
}

impl CudaBuffer {
    pub(crate) fn zeroed(device: &Arc<CudaDevice>, what: &'static str, bytes: usize) -> Result<Self> {
        let (free, _) = device.memory_bytes()?;
        let wanted = bytes.max(1);
        let oom = |_| KernelError::OutOfMemory { what, wanted, free };
        // SAFETY: the context is current (`memory_bytes` bound it), and the range set to zero is what was just allocated.
        let address = unsafe {
            let address = result::malloc_sync(wanted).map_err(oom)?;
            result::memset_d8_async(address, 0, wanted, device.stream()).map_err(failed("cuMemsetD8Async"))?;
            address
        };
        Ok(CudaBuffer { device: device.clone(), address })
    }

    pub(crate) fn address(&self) -> NonNull<u8> {
        NonNull::new(self.address as *mut u8).expect("the driver never returns address 0")
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        // SAFETY: allocated in `zeroed`, freed once, and no work on the stream is left that could touch it.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

impl CudaDevice {
    /// Copies `bytes` bytes from the host; returns when `from` may be reused.
    ///
    /// # Safety
    /// `to` must be the start of as many bytes of this device's memory.
    pub(crate) unsafe fn write(&self, to: *mut u8, from: &[u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise; pageable memory is staged by the driver before the call returns, pinned memory is waited for.
        unsafe { result::memcpy_htod_async(to as sys::CUdeviceptr, from, self.stream) }
            .map_err(failed("cuMemcpyHtoDAsync"))?;
        self.synchronize()
    }

    /// Puts a copy from page-locked memory on the stream.
    ///
    /// # Safety
    /// `to` must be the start of as many bytes of this device's memory, and `from` must stay as it is until the stream has passed.
    pub(crate) unsafe fn write_later(&self, to: *mut u8, from: &[u8]) -> Result<()> {
        if is_small(from.as_ptr(), to, from.len()) {
            // SAFETY: the caller's promise; page-locked memory has the same address on the device.
            return unsafe { self.transfer(from.as_ptr() as u64, to as u64, from.len()) };
        }
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_htod_async(to as sys::CUdeviceptr, from, self.stream) }
            .map_err(failed("cuMemcpyHtoDAsync"))
    }

    /// Puts a copy from place to place of this device's memory on the stream.
    ///
    /// # Safety
    /// Both must be the start of `bytes` bytes of this device's memory, which do not overlap.
    pub(crate) unsafe fn copy(&self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_dtod_async(to as sys::CUdeviceptr, from as sys::CUdeviceptr, bytes, self.stream) }
            .map_err(failed("cuMemcpyDtoDAsync"))
    }

    /// Puts a copy to page-locked memory on the stream.
    ///
    /// # Safety
    /// `from` must be the start of `to.len()` bytes of this device's memory, and `to` must be left alone until the stream has passed.
    pub(crate) unsafe fn read_later(&self, from: *const u8, to: &mut [u8]) -> Result<()> {
        self.bind()?;
        if is_small(from, to.as_ptr(), to.len()) {
            // SAFETY: as above.
            return unsafe { self.transfer(from as u64, to.as_mut_ptr() as u64, to.len()) };
        }
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_dtoh_async(to, from as sys::CUdeviceptr, self.stream) }
            .map_err(failed("cuMemcpyDtoHAsync"))
    }

    /// Puts a small copy on the stream that no copy engine has a part in.
    ///
    /// # Safety
    /// Both must be the start of `bytes` bytes that this device can address, and must be left alone until the stream has passed.
    unsafe fn transfer(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        const THREADS: usize = 128;
        let blocks = bytes.div_ceil(16 * THREADS);
        // SAFETY: the caller's promise.
        unsafe {
            let launch = Launch::new(blocks, THREADS as u32);
            launch.run(self, "transfer", "transfer", &[from.into(), to.into(), (bytes as u32).into()])
        }
    }

    /// Copies to the host, after all work before it.
    ///
    /// # Safety
    /// `from` must be the start of `to.len()` bytes of this device's memory.
    pub(crate) unsafe fn read(&self, from: *const u8, to: &mut [u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise; `to` outlives the copy, which is waited for.
        unsafe { result::memcpy_dtoh_async(to, from as sys::CUdeviceptr, self.stream) }
            .map_err(failed("cuMemcpyDtoHAsync"))?;
        self.synchronize()
    }
}

/// Whether a copy is better made by a kernel: a copy engine begins later, but is faster from some size on.
fn is_small(from: *const u8, to: *const u8, bytes: usize) -> bool {
    const MOST: usize = 256 << 10;
    bytes <= MOST && bytes.is_multiple_of(4) && (from as usize | to as usize).is_multiple_of(16)
}

/// Page-locked host memory: copies to and from it run beside the host.
pub struct Pinned<T: Element> {
    address: NonNull<T>,
    len: usize,
    _device: Arc<CudaDevice>,
}

// SAFETY: plain numbers with one owner.
unsafe impl<T: Element> Send for Pinned<T> {}

impl<T: Element> Pinned<T> {
    /// `len` elements, zero.
    ///
    /// # Errors
    /// `Driver` if the host has not enough memory to lock.
    pub fn zeroed(device: &Arc<CudaDevice>, len: usize) -> Result<Self> {
        device.bind()?;
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: the memory is ours, large enough, and zero is a value of every `Element`.
        unsafe {
            let address = result::malloc_host(bytes, 0).map_err(failed("cuMemHostAlloc"))?.cast::<u8>();
            address.write_bytes(0, bytes);
            let address = NonNull::new(address.cast()).expect("the driver never returns address 0");
            Ok(Pinned { address, len, _device: device.clone() })
        }
    }

    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `len` elements were allocated and set.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and `&mut self` excludes others.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.len) }
    }
}

impl<T: Element> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `malloc_host`, freed once.
        let _ = unsafe { result::free_host(self.address.as_ptr().cast()) };
    }
}
