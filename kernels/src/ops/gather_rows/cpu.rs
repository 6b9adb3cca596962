//! The reference, and all a CPU needs.

use super::OP;
use crate::dtype::Float;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

pub(super) fn gather_rows<T: Float>(x: &Tensor, rows: &Tensor, y: &mut Tensor) -> Result<()> {
    let (tokens, cols) = x.rows_cols();
    let x = x.as_slice::<T>();
    for (y, &row) in y.as_mut_slice::<T>().chunks_mut(cols.max(1)).zip(rows.as_slice::<i32>()) {
        let inside = usize::try_from(row).ok().filter(|&row| row < tokens);
        let row = inside.ok_or(KernelError::Value { op: OP, arg: "rows", got: row.into(), want: "rows of x" })?;
        y.copy_from_slice(&x[row * cols..][..cols]);
    }
    Ok(())
}
