//! Some rows of a tensor, in any order: the hidden states whose logits are wanted.

mod cpu;
mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "gather_rows";

/// `y[i] = x[rows[i]]`.
///
/// | argument | shape            | dtype       | |
/// |----------|------------------|-------------|-|
/// | `x`      | `[tokens, cols]` | f32 or bf16 | read |
/// | `rows`   | `[wanted]`       | i32         | read |
/// | `y`      | `[wanted, cols]` | as `x`      | written |
///
/// # Errors
/// `Shape`, `DType`; on the CPU also `Value` if a row is outside `x`, which on a GPU yields the first row.
pub fn gather_rows(x: &Tensor, rows: &Tensor, y: &mut Tensor) -> Result<()> {
    let (_, cols) = x.rows_cols();
    let (wanted, _) = y.rows_cols();
    rows.expect_shape(OP, "rows", [wanted])?;
    rows.expect_dtype(OP, "rows", DType::I32)?;
    y.expect_shape(OP, "y", [wanted, cols])?;
    y.expect_dtype(OP, "y", x.dtype())?;
    match x.device() {
        Device::Cpu => with_float!(OP, "x", x.dtype(), T => cpu::gather_rows::<T>(x, rows, y)),
        Device::Cuda(device) => cuda::gather_rows(device, x, rows, y),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(of: &[i32]) -> Tensor {
        Tensor::from_slice(&Device::Cpu, "rows", of, [of.len()]).unwrap()
    }

    #[test]
    fn rows_come_in_the_order_asked_for() {
        let x = Tensor::from_slice(&Device::Cpu, "x", &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [3, 2]).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [2, 2], DType::F32).unwrap();
        gather_rows(&x, &rows(&[2, 0]), &mut y).unwrap();
        assert_eq!(y.as_slice::<f32>(), [5.0, 6.0, 1.0, 2.0]);
    }

    #[test]
    fn a_row_outside_is_named() {
        let x = Tensor::from_slice(&Device::Cpu, "x", &[1.0f32, 2.0], [1, 2]).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [1, 2], DType::F32).unwrap();
        for outside in [1, -1] {
            let err = gather_rows(&x, &rows(&[outside]), &mut y).unwrap_err();
            assert_eq!(err.to_string(), format!("gather_rows: rows is {outside}, expected rows of x"));
        }
    }
}
