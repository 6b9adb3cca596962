//! Arithmetic of searches for the best scale, in a form that the compiler turns into vectors.

use half::f16;

/// `value` rounded to a whole number; good up to four million on both sides of zero.
#[inline(always)]
pub(super) fn round(value: f32) -> f32 {
    // Adding and taking away 1.5 * 2^23 leaves no room for a fraction: two instructions that any vector unit has.
    const WHOLE: f32 = 12_582_912.0;
    (value + WHOLE) - WHOLE
}

/// `value` cut to `low..=high`: written so that it is one vector instruction a side, which `clamp` with its care for NaN is not.
#[inline(always)]
pub(super) fn limit(value: f32, low: f32, high: f32) -> f32 {
    let value = if value > low { value } else { low };
    if value < high { value } else { high }
}

/// The sum of `f` over `weights` in eight lanes, so that the compiler can use vectors.
#[inline(always)]
pub(super) fn sum(weights: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let (eights, rest) = weights.as_chunks::<8>();
    let mut lanes = [0.0f32; 8];
    for eight in eights {
        for (lane, &w) in lanes.iter_mut().zip(eight) {
            *lane += f(w);
        }
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|&w| f(w)).sum::<f32>()
}

/// Rounded to what the kernels keep in 16 bits.
pub(super) fn to_f16(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
}
