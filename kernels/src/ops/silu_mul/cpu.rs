//! The reference, compiled for the CPU's vectors and spread over its threads.

use crate::dtype::Float;
use crate::math;
use crate::ops::rows;
use crate::simd::{F32x16, Kernel, Level};

pub(super) fn silu_mul<T: Float>(gate_up: &[T], y: &mut [T], inner: usize) {
    rows::parallel(y, inner, &|first, y| {
        let gate_up = &gate_up[first * 2 * inner..][..2 * y.len()];
        // SAFETY: the level is this CPU's own.
        unsafe { Level::best().run(SiluMul { gate_up, y, inner }) }
    });
}

struct SiluMul<'a, T> {
    gate_up: &'a [T],
    y: &'a mut [T],
    inner: usize,
}

impl<T: Float> Kernel for SiluMul<'_, T> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let rows = self.gate_up.chunks_exact(2 * self.inner).zip(self.y.chunks_exact_mut(self.inner));
        for (gate_up, y) in rows {
            let (gate, up) = gate_up.split_at(self.inner);
            for i in 0..y.len() {
                y[i] = T::from_f32(math::silu(gate[i].to_f32()) * up[i].to_f32());
            }
        }
    }
}
