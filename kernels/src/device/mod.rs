//! Where tensors live and ops run. Closed on purpose: ops are what grows, so each op matches on the device itself.

mod cpu;
pub mod cuda;
mod recording;
mod staging;
mod stopwatch;
mod uploads;

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use cpu::HostBuffer;
use cuda::CudaBuffer;
pub use cuda::CudaDevice;
pub use recording::Recording;
pub use staging::{Readback, Staged, Staging};
pub use stopwatch::Stopwatch;
pub use uploads::{Upload, Uploads};

use crate::error::Result;

/// A place for memory and work.
#[derive(Clone, Debug)]
pub enum Device {
    /// The host: its memory, and the process-wide [`pool`](crate::pool) of threads.
    Cpu,
    /// One NVIDIA GPU and the one stream that all of its ops run on, in order.
    Cuda(Arc<CudaDevice>),
}

/// Memory on a device, freed when dropped.
#[derive(Debug)]
pub(crate) enum Buffer {
    Host(HostBuffer),
    Cuda(CudaBuffer),
}

impl Buffer {
    pub(crate) fn address(&self) -> NonNull<u8> {
        match self {
            Buffer::Host(buffer) => buffer.address(),
            Buffer::Cuda(buffer) => buffer.address(),
        }
    }
}

impl Device {
    /// GPU number `ordinal` of this process.
    ///
    /// # Errors
    /// `NoFatbin`, `NoDriver`, `NoDevice` or `Driver`, each saying what to do.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        let gpu = Arc::new(CudaDevice::new(ordinal, false)?);
        gpu.load_blas_soon();
        Ok(Device::Cuda(gpu))
    }

    /// GPU number `ordinal`, whose ops keep the CPU's promise: what comes of a row never depends on how many rows there are, on how a prompt is
    /// cut, or on what else is in a batch. Products and attention then have kernels of their own, which add in one order and are slower.
    ///
    /// # Errors
    /// As [`cuda`](Self::cuda).
    pub fn cuda_deterministic(ordinal: usize) -> Result<Self> {
        Ok(Device::Cuda(Arc::new(CudaDevice::new(ordinal, true)?)))
    }

    /// Zeroed memory, owned by what is returned.
    pub(crate) fn alloc(&self, what: &'static str, bytes: usize) -> Result<Buffer> {
        match self {
            Device::Cpu => HostBuffer::zeroed(what, bytes).map(Buffer::Host),
            Device::Cuda(device) => CudaBuffer::zeroed(device, what, bytes).map(Buffer::Cuda),
        }
    }

    /// As [`alloc`](Self::alloc), on the CPU without memory before it is written to.
    pub(crate) fn alloc_lazy(&self, what: &'static str, bytes: usize) -> Result<Buffer> {
        match self {
            Device::Cpu => HostBuffer::lazy(what, bytes).map(Buffer::Host),
            Device::Cuda(_) => self.alloc(what, bytes),
        }
    }

    /// Bytes of its memory, free now and in all; `None` for the CPU, whose memory is not ours to share out.
    ///
    /// # Errors
    /// `Driver`.
    pub fn memory_bytes(&self) -> Result<Option<(usize, usize)>> {
        match self {
            Device::Cpu => Ok(None),
            Device::Cuda(device) => device.memory_bytes().map(Some),
        }
    }

    /// Waits until all work given to the device is done.
    ///
    /// # Errors
    /// `Driver` if any of it failed.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Device::Cpu => Ok(()),
            Device::Cuda(device) => device.synchronize(),
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Device::Cpu, Device::Cpu) => true,
            (Device::Cuda(a), Device::Cuda(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl Eq for Device {}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(device) => write!(f, "cuda:{}", device.ordinal()),
        }
    }
}
