//! What can go wrong below the model: one enum, each variant carrying what a reader of the log needs.

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::DriverError;

use crate::dtype::DType;
use crate::tensor::Shape;

/// An operation on a device that did not happen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The caller broke an op's contract. Always a bug in the model code, never in the request.
    #[error("{op}: {arg} has shape {got}, expected {want}")]
    Shape { op: &'static str, arg: &'static str, got: Shape, want: Shape },

    #[error("{op}: {what} is {size}, not a multiple of {of}")]
    NotMultiple { op: &'static str, what: &'static str, size: usize, of: usize },

    #[error("{op}: {arg} is {got}, expected {want}")]
    Value { op: &'static str, arg: &'static str, got: i64, want: &'static str },

    #[error("{op}: {arg} is {dtype}, for which there is no kernel on this device")]
    DType { op: &'static str, arg: &'static str, dtype: DType },

    /// `wanted` and `free` are bytes.
    #[error("cannot allocate {wanted} bytes for {what}, {free} bytes free")]
    OutOfMemory { what: &'static str, wanted: usize, free: usize },

    /// The memory plan was too small: a bug in the plan, found by the first step of that size.
    #[error("workspace holds {capacity} bytes, {used} are taken and {wanted} more were asked for")]
    WorkspaceFull { capacity: usize, used: usize, wanted: usize },

    #[error("{op}: there is no version for {device}")]
    NotOnDevice { op: &'static str, device: &'static str },

    #[error("no CUDA driver: {reason}; install the driver, or pass --device cpu")]
    NoDriver { reason: String },

    #[error("there is no GPU number {ordinal}, {found} are visible (CUDA_VISIBLE_DEVICES)")]
    NoDevice { ordinal: usize, found: usize },

    #[error(
        "{op}: kernel {kernel} does not load on this GPU ({reason}): build with DRAFTHORSE_CUDA_ARCHS naming its architecture"
    )]
    NoKernel { op: &'static str, kernel: &'static str, reason: String },

    #[error(
        "{name} has compute capability {major}.{minor}, the kernels are built for {built}: build with DRAFTHORSE_CUDA_ARCHS={major}{minor}, or pass --device cpu"
    )]
    OtherGpu { name: String, major: u32, minor: u32, built: String },

    #[error("the GPU is lost: {what} failed, and nothing on it can be used until the process starts again")]
    GpuLost {
        what: &'static str,
        #[source]
        source: DriverError,
    },

    #[error("{what} failed")]
    Driver {
        what: &'static str,
        #[source]
        source: DriverError,
    },

    #[error("{what} failed")]
    Blas {
        what: &'static str,
        #[source]
        source: CublasError,
    },

    #[error("{op}: launch failed")]
    Launch {
        op: &'static str,
        #[source]
        source: DriverError,
    },

    #[error("built without CUDA kernels: set NVCC to a compiler and rebuild, or pass --device cpu")]
    NoFatbin,
}

/// This crate's result.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;
