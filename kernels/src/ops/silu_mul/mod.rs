//! The gate of a gated MLP: `silu(gate) * up`.
//!
//! Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).

mod cpu;
mod cuda;

use crate::device::Device;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "silu_mul";

/// `y = silu(gate_up[:, ..inner]) * gate_up[:, inner..]`, with `silu(x) = x / (1 + e^-x)`.
///
/// | argument  | shape                 | dtype        | |
/// |-----------|-----------------------|--------------|-|
/// | `gate_up` | `[tokens, 2 * inner]` | f32 or bf16  | read |
/// | `y`       | `[tokens, inner]`     | as `gate_up` | written |
///
/// Arithmetic in f32, one rounding at the store.
///
/// # Errors
/// `Shape` or `DType` if the two do not agree.
pub fn silu_mul(gate_up: &Tensor, y: &mut Tensor) -> Result<()> {
    let (num_tokens, inner) = y.rows_cols();
    y.expect_shape(OP, "y", [num_tokens, inner])?;
    y.expect_dtype(OP, "y", gate_up.dtype())?;
    gate_up.expect_shape(OP, "gate_up", [num_tokens, 2 * inner])?;
    match y.device().clone() {
        Device::Cpu => with_float!(OP, "y", y.dtype(), T => {
            cpu::silu_mul::<T>(gate_up.as_slice(), y.as_mut_slice(), inner);
        }),
        Device::Cuda(device) => cuda::silu_mul(&device, gate_up, y)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn gates_one_half_by_the_other() {
        let gate_up = [0.0f32, 1.0, 3.0, 5.0, -1.0, 40.0, 2.0, 0.5];
        let gate_up = Tensor::from_slice(&Device::Cpu, "gate_up", &gate_up, [2, 4]).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [2, 2], DType::F32).unwrap();
        silu_mul(&gate_up, &mut y).unwrap();
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let want = [0.0, silu(1.0) * 5.0, silu(-1.0) * 2.0, 20.0];
        for (y, want) in y.as_slice::<f32>().iter().zip(want) {
            assert!((f64::from(*y) - want).abs() < 1e-6, "{y} {want}");
        }
    }

    #[test]
    fn names_what_does_not_fit() {
        let gate_up = Tensor::zeros(&Device::Cpu, "gate_up", [2, 5], DType::F32).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [2, 2], DType::F32).unwrap();
        let err = silu_mul(&gate_up, &mut y).unwrap_err();
        assert_eq!(err.to_string(), "silu_mul: gate_up has shape [2, 5], expected [2, 4]");
    }
}
