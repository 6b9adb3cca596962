//! The reference, and all a CPU needs.

use crate::dtype::Float;
use crate::tensor::Tensor;

pub(super) fn copy_columns<T: Float>(x: &Tensor, y: &mut Tensor, first: usize) {
    let ((_, cols), (_, width)) = (x.rows_cols(), y.rows_cols());
    let rows = x.as_slice::<T>().chunks(cols.max(1));
    for (y, x) in y.as_mut_slice::<T>().chunks_mut(width.max(1)).zip(rows) {
        y[first..first + cols].copy_from_slice(x);
    }
}
