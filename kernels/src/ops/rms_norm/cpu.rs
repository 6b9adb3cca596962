//! The reference, compiled for the CPU's vectors and spread over its threads.

use crate::dtype::Float;
use crate::math;
use crate::ops::rows;
use crate::simd::{F32x16, Kernel, Level};

pub(super) fn rms_norm<T: Float, W: Float>(x: &[T], weight: &[W], eps: f32, y: &mut [T]) {
    rows::parallel(y, weight.len(), &|first, y| {
        let x = &x[first * weight.len()..][..y.len()];
        // SAFETY: the level is this CPU's own.
        unsafe { Level::best().run(RmsNorm { x, weight, eps, y }) }
    });
}

pub(super) fn add_rms_norm<T: Float, W: Float>(x: &mut [T], residual: &mut [T], weight: &[W], eps: f32) {
    rows::parallel_pairs(x, residual, weight.len(), &|x, residual| {
        // SAFETY: the level is this CPU's own.
        unsafe { Level::best().run(AddRmsNorm { x, residual, weight, eps }) }
    });
}

struct RmsNorm<'a, T, W> {
    x: &'a [T],
    weight: &'a [W],
    eps: f32,
    y: &'a mut [T],
}

impl<T: Float, W: Float> Kernel for RmsNorm<'_, T, W> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let hidden = self.weight.len();
        for (x, y) in self.x.chunks_exact(hidden).zip(self.y.chunks_exact_mut(hidden)) {
            normalize(x, self.weight, self.eps, y);
        }
    }
}

struct AddRmsNorm<'a, T, W> {
    x: &'a mut [T],
    residual: &'a mut [T],
    weight: &'a [W],
    eps: f32,
}

impl<T: Float, W: Float> Kernel for AddRmsNorm<'_, T, W> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let hidden = self.weight.len();
        for (x, residual) in self.x.chunks_exact_mut(hidden).zip(self.residual.chunks_exact_mut(hidden)) {
            for i in 0..hidden {
                residual[i] = T::from_f32(residual[i].to_f32() + x[i].to_f32());
            }
            normalize(residual, self.weight, self.eps, x);
        }
    }
}

#[inline(always)]
fn normalize<T: Float, W: Float>(x: &[T], weight: &[W], eps: f32, y: &mut [T]) {
    // One over the root mean square.
    let scale = 1.0 / (math::sum_squares(x) / x.len() as f32 + eps).sqrt();
    for i in 0..y.len() {
        y[i] = T::from_f32(x[i].to_f32() * scale * weight[i].to_f32());
    }
}
