//! Copies of whole rows: a tensor onto another, and rows onto rows of the same tensor.

mod cpu;
mod cuda;

use crate::device::Device;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

const OP: &str = "copy_rows";

/// `y` becomes `x`.
///
/// | argument | shape  | dtype             | |
/// |----------|--------|-------------------|-|
/// | `x`      | any    | f32, bf16 or i32  | read |
/// | `y`      | as `x` | as `x`            | written |
///
/// # Errors
/// `Shape` or `DType` if the two differ.
pub fn copy(x: &Tensor, y: &mut Tensor) -> Result<()> {
    y.expect_shape(OP, "y", x.shape())?;
    y.expect_dtype(OP, "y", x.dtype())?;
    match x.device() {
        Device::Cpu => cpu::copy(x, y),
        Device::Cuda(device) => cuda::copy(device, x, y),
    }
}

/// Row `to` becomes row `from`, for each pair in order. A row is all that one index of the outermost dimension spans.
///
/// | argument | shape         | dtype            | |
/// |----------|---------------|------------------|-|
/// | `x`      | `[rows, ...]` | f32, bf16 or i32 | read and written |
/// | `pairs`  | any number    | `(from, to)`     | read |
///
/// # Errors
/// `Value` if a row is outside `x`, `DType`.
pub fn copy_rows(x: &mut Tensor, pairs: &[(u32, u32)]) -> Result<()> {
    let rows = x.dims().first().copied().unwrap_or(0);
    for &(from, to) in pairs {
        let row = from.max(to);
        if row as usize >= rows {
            return Err(KernelError::Value { op: OP, arg: "pairs", got: row.into(), want: "rows of x" });
        }
    }
    match x.device() {
        Device::Cpu => cpu::copy_rows(x, pairs),
        Device::Cuda(device) => {
            let (at, row_bytes) = (x.device_address(), x.size_bytes() / rows.max(1));
            cuda::copy_rows(device, at, at, row_bytes, pairs)
        }
    }
}

/// Row `to` of `y` becomes row `from` of `x`, for each pair in order.
///
/// | argument | shape         | dtype            | |
/// |----------|---------------|------------------|-|
/// | `x`      | `[rows, ...]` | f32, bf16 or i32 | read |
/// | `y`      | `[any, ...]`, rows as those of `x` | as `x` | written where pairs say |
/// | `pairs`  | any number    | `(from, to)`     | read |
///
/// # Errors
/// `Value` if a row is outside its tensor, `Shape`, `DType`.
pub fn copy_rows_from(x: &Tensor, y: &mut Tensor, pairs: &[(u32, u32)]) -> Result<()> {
    let num_rows = |tensor: &Tensor| tensor.dims().first().copied().unwrap_or(0);
    let (from, to) = (num_rows(x), num_rows(y));
    x.rows(0..0).expect_shape(OP, "x", y.rows(0..0).shape())?;
    y.expect_dtype(OP, "y", x.dtype())?;
    if let Some(&(row, _)) = pairs.iter().find(|pair| pair.0 as usize >= from) {
        return Err(KernelError::Value { op: OP, arg: "pairs", got: row.into(), want: "rows of x" });
    }
    if let Some(&(_, row)) = pairs.iter().find(|pair| pair.1 as usize >= to) {
        return Err(KernelError::Value { op: OP, arg: "pairs", got: row.into(), want: "rows of y" });
    }
    match x.device() {
        Device::Cpu => pairs.iter().try_for_each(|&(from, to)| {
            let (from, to) = (from as usize, to as usize);
            cpu::copy(&x.rows(from..from + 1), &mut y.rows_mut(to..to + 1))
        }),
        Device::Cuda(device) => {
            let row_bytes = x.size_bytes() / from.max(1);
            cuda::copy_rows(device, x.device_address(), y.device_address(), row_bytes, pairs)
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn pairs_are_copied_in_order() {
        let values = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].map(bf16::from_f32);
        let mut x = Tensor::from_slice(&Device::Cpu, "x", &values, [3, 1, 2]).unwrap();
        copy_rows(&mut x, &[(0, 2), (1, 0), (2, 1)]).unwrap();
        assert_eq!(x.as_slice::<bf16>(), [3.0, 4.0, 1.0, 2.0, 1.0, 2.0].map(bf16::from_f32));
        assert_eq!(copy_rows(&mut x, &[(0, 3)]).unwrap_err().to_string(), "copy_rows: pairs is 3, expected rows of x");
    }

    #[test]
    fn a_copy_has_the_shape_and_dtype_of_its_source() {
        let x = Tensor::from_slice(&Device::Cpu, "x", &[1.5f32, -2.0], [2]).unwrap();
        let mut y = Tensor::from_slice(&Device::Cpu, "y", &[0.5f32, 0.25], [2]).unwrap();
        copy(&x, &mut y).unwrap();
        assert_eq!(y.as_slice::<f32>(), [1.5, -2.0]);
        let mut wide = Tensor::from_slice(&Device::Cpu, "y", &[0.5f32, 0.25, 1.0], [3]).unwrap();
        assert_eq!(copy(&x, &mut wide).unwrap_err().to_string(), "copy_rows: y has shape [3], expected [2]");
    }
}
