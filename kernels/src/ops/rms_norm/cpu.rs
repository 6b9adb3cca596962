//! The reference.

use crate::dtype::Float;
use crate::math;

pub(super) fn rms_norm<T: Float, W: Float>(x: &[T], weight: &[W], eps: f32, y: &mut [T]) {
    let hidden = weight.len().max(1);
    for (x, y) in x.chunks_exact(hidden).zip(y.chunks_exact_mut(hidden)) {
        let scale = scale(x, eps);
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = T::from_f32(x.to_f32() * scale * w.to_f32());
        }
    }
}

pub(super) fn add_rms_norm<T: Float, W: Float>(x: &mut [T], residual: &mut [T], weight: &[W], eps: f32) {
    for (x, residual) in x.iter().zip(residual.iter_mut()) {
        *residual = T::from_f32(residual.to_f32() + x.to_f32());
    }
    rms_norm(residual, weight, eps, x);
}

/// One over the root mean square.
fn scale<T: Float>(x: &[T], eps: f32) -> f32 {
    1.0 / (math::sum_squares(x) / x.len() as f32 + eps).sqrt()
}
