//! Devices, tensors, ops and collectives. The only crate that knows CUDA exists.
//!
//! An op is a function that writes to outputs passed in; after a model has loaded nothing here allocates. Every op has a plain
//! CPU reference in its folder, which is the truth that faster versions are held to.

pub mod comm;
pub mod device;
pub mod dtype;
pub mod error;
pub mod math;
pub mod ops;
pub mod pool;
mod simd;
pub mod tensor;
#[cfg(test)]
mod testing;
pub mod workspace;

pub use comm::{Communicator, Solo};
pub use device::Device;
pub use dtype::{DType, Element, Float};
pub use error::{KernelError, Result};
pub use tensor::{Shape, Tensor, View, ViewMut};
pub use workspace::Workspace;
