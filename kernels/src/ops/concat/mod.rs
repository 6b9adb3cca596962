//! Rows side by side: what a drafter's input layer reads, the embedding of a token and the hidden state before it.

mod cpu;
mod cuda;

use crate::device::Device;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "concat";

/// `y[t] = [a[t] ; b[t]]`.
///
/// | argument | shape          | dtype       | |
/// |----------|----------------|-------------|-|
/// | `a`, `b` | `[tokens, n]`  | f32 or bf16 | read |
/// | `y`      | `[tokens, 2n]` | as `a`      | written |
///
/// # Errors
/// `Shape`, `DType`; on a GPU `NotMultiple` if a row is not a multiple of 16 bytes.
pub fn concat(a: &Tensor, b: &Tensor, y: &mut Tensor) -> Result<()> {
    let (tokens, cols) = a.rows_cols();
    b.expect_shape(OP, "b", [tokens, cols])?;
    b.expect_dtype(OP, "b", a.dtype())?;
    y.expect_shape(OP, "y", [tokens, 2 * cols])?;
    y.expect_dtype(OP, "y", a.dtype())?;
    match a.device().clone() {
        Device::Cpu => with_float!(OP, "a", a.dtype(), T => cpu::concat::<T>(a, b, y)),
        Device::Cuda(device) => return cuda::concat(&device, a, b, y),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn each_row_is_a_then_b() {
        let tensor = |values: &[f32]| Tensor::from_slice(&Device::Cpu, "x", values, [2, 2]).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [2, 4], DType::F32).unwrap();
        concat(&tensor(&[1.0, 2.0, 3.0, 4.0]), &tensor(&[5.0, 6.0, 7.0, 8.0]), &mut y).unwrap();
        assert_eq!(y.as_slice::<f32>(), [1.0, 2.0, 5.0, 6.0, 3.0, 4.0, 7.0, 8.0]);
    }
}
