//! The reference.

use crate::dtype::Float;
use crate::math;

pub(super) fn silu_mul<T: Float>(gate_up: &[T], y: &mut [T], inner: usize) {
    let inner = inner.max(1);
    for (gate_up, y) in gate_up.chunks_exact(2 * inner).zip(y.chunks_exact_mut(inner)) {
        let (gate, up) = gate_up.split_at(inner);
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            *y = T::from_f32(math::silu(gate.to_f32()) * up.to_f32());
        }
    }
}
