//! The seam for collectives between ranks.

use crate::error::Result;
use crate::tensor::Tensor;

/// A buffer that every rank has made known to every other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferHandle(pub u32);

/// What one rank asks of all.
///
/// Every rank must make the same calls in the same order. A result must be the same bits on every rank: sampling, routing
/// and proposing on each rank rest on that.
pub trait Communicator: Send {
    fn rank(&self) -> u32;

    fn world(&self) -> u32;

    /// Makes `buffer` known to the other ranks, once, at load.
    fn register(&mut self, buffer: &Tensor) -> Result<BufferHandle>;

    /// `x` becomes the sum of all ranks' `x`.
    fn all_reduce(&self, x: &mut Tensor) -> Result<()>;

    /// `y[r]` becomes rank `r`'s `x`.
    fn all_gather(&self, x: &Tensor, y: &mut Tensor) -> Result<()>;

    /// `y[r]` becomes rank `r`'s `x[rank]`.
    fn all_to_all(&self, x: &Tensor, y: &mut Tensor) -> Result<()>;

    /// The all-reduce that ends a row-parallel layer, with the add and norm that follow it.
    fn all_reduce_add_rms_norm(&self, x: &mut Tensor, norm: &mut dyn FnMut(&mut Tensor) -> Result<()>) -> Result<()> {
        self.all_reduce(x)?;
        norm(x)
    }
}

/// One rank alone.
#[derive(Debug, Default)]
pub struct Solo {
    registered: u32,
}

impl Communicator for Solo {
    fn rank(&self) -> u32 {
        0
    }

    fn world(&self) -> u32 {
        1
    }

    fn register(&mut self, _: &Tensor) -> Result<BufferHandle> {
        self.registered += 1;
        Ok(BufferHandle(self.registered - 1))
    }

    fn all_reduce(&self, _: &mut Tensor) -> Result<()> {
        Ok(())
    }

    fn all_gather(&self, x: &Tensor, y: &mut Tensor) -> Result<()> {
        copy(x, y)
    }

    fn all_to_all(&self, x: &Tensor, y: &mut Tensor) -> Result<()> {
        copy(x, y)
    }
}

/// `y` becomes `x`; both hold the same number of f32 elements.
fn copy(x: &Tensor, y: &mut Tensor) -> Result<()> {
    y.expect_dtype("all_gather", "y", x.dtype())?;
    y.expect_shape("all_gather", "y", x.shape())?;
    match x.dtype().bytes() {
        4 => y.copy_from_slice(x.as_slice::<f32>()),
        _ => y.copy_from_slice(x.as_slice::<half::bf16>()),
    }
}
