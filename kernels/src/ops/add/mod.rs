//! Adds one tensor to another: the end of a residual layer that no norm follows.

mod cpu;
mod cuda;

use crate::device::Device;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "add";

/// `y += x`, the sum in f32, rounded to `y`'s dtype.
///
/// | argument | shape          | dtype       | |
/// |----------|----------------|-------------|-|
/// | `y`      | `[rows, cols]` | f32 or bf16 | updated |
/// | `x`      | as `y`         | as `y`      | read |
///
/// # Errors
/// `Shape`, `DType`.
pub fn add(y: &mut Tensor, x: &Tensor) -> Result<()> {
    x.expect_shape(OP, "x", y.shape())?;
    x.expect_dtype(OP, "x", y.dtype())?;
    match y.device().clone() {
        Device::Cpu => with_float!(OP, "y", y.dtype(), T => cpu::add::<T>(y, x)),
        Device::Cuda(device) => cuda::add(&device, y, x)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn sums_are_rounded_to_nearest_once() {
        let tensor = |values: &[bf16]| Tensor::from_slice(&Device::Cpu, "x", values, [2, 1]).unwrap();
        // 1 + 2^-8 + 2^-9 is above the middle between 1 and the next bf16, 1 + 2^-7.
        let mut y = tensor(&[1.0, -2.0].map(bf16::from_f32));
        add(&mut y, &tensor(&[0.005859375, 2.5].map(bf16::from_f32))).unwrap();
        assert_eq!(y.as_slice::<bf16>(), [1.0078125, 0.5].map(bf16::from_f32));
        let wide = Tensor::from_slice(&Device::Cpu, "x", &[bf16::ONE; 2], [1, 2]).unwrap();
        assert_eq!(add(&mut y, &wide).unwrap_err().to_string(), "add: x has shape [1, 2], expected [2, 1]");
    }
}
