//! Root-mean-square normalisation, alone and with the residual add that precedes it.
//!
//! Source: Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4.

mod cpu;
mod cuda;
mod heads;
mod pair;

pub use heads::rms_norm_heads;
pub use pair::rms_norm_pair;

use crate::device::Device;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "rms_norm";

/// `y = x / sqrt(mean(x²) + eps) * weight`, row by row.
///
/// | argument | shape            | dtype       | |
/// |----------|------------------|-------------|-|
/// | `x`      | `[rows, hidden]` | f32 or bf16 | read |
/// | `weight` | `[hidden]`       | f32 or bf16 | read |
/// | `y`      | as `x`           | as `x`      | written |
///
/// Arithmetic in f32, one rounding at the store.
///
/// # Errors
/// `Shape` or `DType` if the three do not agree.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32, y: &mut Tensor) -> Result<()> {
    let (_, hidden) = x.rows_cols();
    weight.expect_shape(OP, "weight", [hidden])?;
    y.expect_shape(OP, "y", x.shape())?;
    y.expect_dtype(OP, "y", x.dtype())?;
    match x.device().clone() {
        Device::Cpu => with_float!(OP, "x", x.dtype(), T => with_float!(OP, "weight", weight.dtype(), W => {
            cpu::rms_norm::<T, W>(x.as_slice(), weight.as_slice(), eps, y.as_mut_slice());
        })),
        Device::Cuda(device) => cuda::rms_norm(&device, x, weight, eps, y)?,
    }
    Ok(())
}

/// `residual += x`, then `x = residual / sqrt(mean(residual²) + eps) * weight`, row by row.
///
/// | argument   | shape            | dtype       | |
/// |------------|------------------|-------------|-|
/// | `x`        | `[rows, hidden]` | f32 or bf16 | read, then written |
/// | `residual` | as `x`           | as `x`      | updated |
/// | `weight`   | `[hidden]`       | f32 or bf16 | read |
///
/// The sum is rounded to the dtype before it is normalised: the next layer reads the rounded residual too.
///
/// # Errors
/// `Shape` or `DType` if the three do not agree.
pub fn add_rms_norm(x: &mut Tensor, residual: &mut Tensor, weight: &Tensor, eps: f32) -> Result<()> {
    let (_, hidden) = x.rows_cols();
    residual.expect_shape(OP, "residual", x.shape())?;
    residual.expect_dtype(OP, "residual", x.dtype())?;
    weight.expect_shape(OP, "weight", [hidden])?;
    match x.device().clone() {
        Device::Cpu => with_float!(OP, "x", x.dtype(), T => with_float!(OP, "weight", weight.dtype(), W => {
            cpu::add_rms_norm::<T, W>(x.as_mut_slice(), residual.as_mut_slice(), weight.as_slice(), eps);
        })),
        Device::Cuda(device) => cuda::add_rms_norm(&device, x, residual, weight, eps)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use half::bf16;

    fn tensor(values: &[f32], shape: [usize; 2]) -> Tensor {
        Tensor::from_slice(&Device::Cpu, "x", values, shape).unwrap()
    }

    #[test]
    fn normalises_by_the_root_mean_square() {
        let weight = Tensor::from_slice(&Device::Cpu, "weight", &[1.0f32, 10.0], [2]).unwrap();
        let x = tensor(&[3.0, 4.0, 0.0, -2.0], [2, 2]);
        let mut y = tensor(&[0.0; 4], [2, 2]);
        rms_norm(&x, &weight, 0.0, &mut y).unwrap();
        // rms([3, 4]) = sqrt(12.5), rms([0, -2]) = sqrt(2)
        let (a, b) = (1.0 / 12.5f32.sqrt(), 1.0 / 2.0f32.sqrt());
        assert_eq!(y.as_slice::<f32>(), [3.0 * a, 4.0 * a * 10.0, 0.0, -2.0 * b * 10.0]);
    }

    #[test]
    fn normalises_the_sum() {
        let mut x = tensor(&[1.0, 2.0], [1, 2]);
        let mut residual = tensor(&[2.0, 2.0], [1, 2]);
        let weight = Tensor::from_slice(&Device::Cpu, "weight", &[1.0, 10.0].map(bf16::from_f32), [2]).unwrap();
        add_rms_norm(&mut x, &mut residual, &weight, 1.5).unwrap();
        assert_eq!(residual.as_slice::<f32>(), [3.0, 4.0]);
        let scale = 1.0 / (12.5f32 + 1.5).sqrt();
        assert_eq!(x.as_slice::<f32>(), [3.0 * scale, 4.0 * scale * 10.0]);
    }

    #[test]
    fn in_bf16_what_is_normalised_is_the_rounded_sum() {
        let bf = |values: &[f32]| {
            let values: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
            Tensor::from_slice(&Device::Cpu, "x", &values, [1, values.len()]).unwrap()
        };
        let weight = Tensor::from_slice(&Device::Cpu, "weight", &[1.0f32, 1.0], [2]).unwrap();
        // 256 + 1 rounds to 256 in bf16.
        let (mut x, mut residual) = (bf(&[1.0, 0.0]), bf(&[256.0, 1.0]));
        add_rms_norm(&mut x, &mut residual, &weight, 0.0).unwrap();
        let (mut y, sum) = (bf(&[0.0, 0.0]), bf(&[256.0, 1.0]));
        rms_norm(&sum, &weight, 0.0, &mut y).unwrap();
        assert_eq!(residual.as_slice::<bf16>(), sum.as_slice::<bf16>());
        assert_eq!(x.as_slice::<bf16>(), y.as_slice::<bf16>());
    }

    #[test]
    fn names_the_argument_that_does_not_fit() {
        let (mut x, mut residual) = (tensor(&[0.0; 4], [2, 2]), tensor(&[0.0; 4], [2, 2]));
        let weight = Tensor::zeros(&Device::Cpu, "weight", [3], DType::F32).unwrap();
        let err = add_rms_norm(&mut x, &mut residual, &weight, 1e-6).unwrap_err();
        assert_eq!(err.to_string(), "rms_norm: weight has shape [3], expected [2]");
    }
}
