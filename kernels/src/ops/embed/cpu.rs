//! The reference.

use crate::dtype::Float;

pub(super) fn embed<W: Float, T: Float>(table: &[W], ids: &[i32], y: &mut [T], hidden: usize) {
    for (y, &id) in y.chunks_exact_mut(hidden.max(1)).zip(ids) {
        let row = &table[id as usize * hidden..][..hidden];
        for (y, w) in y.iter_mut().zip(row) {
            *y = T::from_f32(w.to_f32());
        }
    }
}
