//! Adds a bias to every row: what follows a linear layer that has one.

mod cpu;
mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "add_bias";

/// `y[t] += bias`, the sum in f32, rounded to `y`'s dtype.
///
/// | argument | shape            | dtype       | |
/// |----------|------------------|-------------|-|
/// | `y`      | `[tokens, cols]` | f32 or bf16 | updated |
/// | `bias`   | `[cols]`         | f32         | read |
///
/// # Errors
/// `Shape`, `DType`.
pub fn add_bias(y: &mut Tensor, bias: &Tensor) -> Result<()> {
    let (_, cols) = y.rows_cols();
    bias.expect_shape(OP, "bias", [cols])?;
    bias.expect_dtype(OP, "bias", DType::F32)?;
    match y.device().clone() {
        Device::Cpu => with_float!(OP, "y", y.dtype(), T => cpu::add_bias::<T>(y, bias)),
        Device::Cuda(device) => cuda::add_bias(&device, y, bias)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn every_row_gets_the_bias_once() {
        let mut y = Tensor::from_slice(&Device::Cpu, "y", &[1.0f32, 2.0, 3.0, 4.0], [2, 2]).unwrap();
        let bias = Tensor::from_slice(&Device::Cpu, "bias", &[0.5f32, -1.0], [2]).unwrap();
        add_bias(&mut y, &bias).unwrap();
        assert_eq!(y.as_slice::<f32>(), [1.5, 1.0, 3.5, 3.0]);
    }

    #[test]
    fn the_sum_is_rounded_to_nearest_once() {
        // 1 + 2^-8 + 2^-9: above the middle between 1 and the next bf16, 1 + 2^-7.
        let mut y = Tensor::from_slice(&Device::Cpu, "y", &[bf16::ONE], [1, 1]).unwrap();
        let bias = Tensor::from_slice(&Device::Cpu, "bias", &[0.00390625f32 + 0.001953125], [1]).unwrap();
        add_bias(&mut y, &bias).unwrap();
        assert_eq!(y.as_slice::<bf16>(), [bf16::from_f32(1.0078125)]);
    }
}
