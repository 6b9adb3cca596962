//! A tensor into some columns of another: what puts hidden states of several layers side by side.

mod cpu;
mod cuda;

use crate::device::Device;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "copy_columns";

/// `y[t, first..first + n] = x[t]`.
///
/// | argument | shape           | dtype       | |
/// |----------|-----------------|-------------|-|
/// | `x`      | `[tokens, n]`   | f32 or bf16 | read |
/// | `y`      | `[tokens, any]` | as `x`      | written in these columns |
///
/// # Errors
/// `Shape`, `DType`, `Value` if `y` has not these columns; on a GPU `NotMultiple` unless they begin and end at multiples of 16 bytes in both.
pub fn copy_columns(x: &Tensor, y: &mut Tensor, first: usize) -> Result<()> {
    let ((tokens, cols), (_, width)) = (x.rows_cols(), y.rows_cols());
    y.expect_shape(OP, "y", [tokens, width])?;
    y.expect_dtype(OP, "y", x.dtype())?;
    if first + cols > width {
        return Err(KernelError::Value {
            op: OP,
            arg: "first",
            got: first as i64,
            want: "a column of y, with all of x after it",
        });
    }
    match x.device().clone() {
        Device::Cpu => with_float!(OP, "x", x.dtype(), T => cpu::copy_columns::<T>(x, y, first)),
        Device::Cuda(device) => cuda::copy_columns(&device, x, y, first)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_written_and_no_others() {
        let x = Tensor::from_slice(&Device::Cpu, "x", &[1.0f32, 2.0, 3.0, 4.0], [2, 2]).unwrap();
        let mut y = Tensor::from_slice(&Device::Cpu, "y", &[-1.0f32; 10], [2, 5]).unwrap();
        copy_columns(&x, &mut y, 3).unwrap();
        copy_columns(&x, &mut y, 0).unwrap();
        assert_eq!(y.as_slice::<f32>(), [1.0, 2.0, -1.0, 1.0, 2.0, 3.0, 4.0, -1.0, 3.0, 4.0]);
        let refused = copy_columns(&x, &mut y, 4).unwrap_err().to_string();
        assert_eq!(refused, "copy_columns: first is 4, expected a column of y, with all of x after it");
    }
}
