//! The reference, and all a CPU needs.

use crate::dtype::Float;
use crate::tensor::Tensor;

pub(super) fn concat<T: Float>(a: &Tensor, b: &Tensor, y: &mut Tensor) {
    let (_, cols) = a.rows_cols();
    let width = cols.max(1);
    let rows = a.as_slice::<T>().chunks(width).zip(b.as_slice::<T>().chunks(width));
    for (y, (a, b)) in y.as_mut_slice::<T>().chunks_mut(2 * width).zip(rows) {
        y[..a.len()].copy_from_slice(a);
        y[a.len()..].copy_from_slice(b);
    }
}
