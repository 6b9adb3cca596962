//! Elementary functions and sums whose bits are part of the contract.
//!
//! Each is written in additions, multiplications and fused multiply-adds alone, so that a scalar loop and vectors of any width
//! give the same bits, on any CPU. Sums go through [`LANES`] partial sums, element `i` into partial sum `i % LANES`, and then
//! through [`fold`]: the order depends on the length of the row and on nothing else.

use crate::dtype::Float;

/// Partial sums of a row. The widest vectors hold this many f32; narrower ones use several.
pub const LANES: usize = 16;

/// Above this the result is infinity: 2^128 cannot be stored.
const EXP_MAX: f32 = 88.5;

/// Below this the result would be subnormal, and is zero.
const EXP_MIN: f32 = -87.336;

/// 1.5 * 2^23, which makes an addition round to an integer, plus the exponent's bias.
const ROUND: f32 = 12_582_912.0 + 127.0;

/// ln 2 as f32, and what that leaves out.
const LN_2_HIGH: f32 = std::f32::consts::LN_2;
const LN_2_LOW: f32 = -1.904_654_3e-9;

/// (e^r - 1 - r - r²/2) / r³ on |r| <= ln 2 / 2, fitted to the least relative error of e^r, 4e-9.
const EXP_C3: f32 = 0.166_665_35;
const EXP_C4: f32 = 0.041_667_238;
const EXP_C5: f32 = 0.008_367_483;
const EXP_C6: f32 = 0.001_386_378_3;

/// e^x to about one unit in the last place; 0 below -87.336, infinity above 88.38, NaN of NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = if x > EXP_MAX { EXP_MAX } else { x };
    // x = n ln 2 + r. The low bits of `rounded` hold n + 127, the exponent of 2^n.
    let rounded = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, clamped));
    let mut e = EXP_C6.mul_add(r, EXP_C5);
    e = e.mul_add(r, EXP_C4);
    e = e.mul_add(r, EXP_C3);
    e = e.mul_add(r, 0.5);
    e = e.mul_add(r, 1.0);
    e = e.mul_add(r, 1.0);
    let power = f32::from_bits(rounded.to_bits() << 23);
    if x < EXP_MIN { 0.0 } else { e * power }
}

/// x / (1 + e^-x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The sum of the partial sums: halves are added until one is left.
#[inline(always)]
pub fn fold(mut lanes: [f32; LANES]) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// The sum of squares of a row.
#[inline(always)]
pub fn sum_squares<T: Float>(x: &[T]) -> f32 {
    let mut lanes = [0.0; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for i in 0..LANES {
            let value = chunk[i].to_f32();
            lanes[i] = value.mul_add(value, lanes[i]);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(chunks.remainder()) {
        let value = value.to_f32();
        *lane = value.mul_add(value, *lane);
    }
    fold(lanes)
}

/// The largest of a row of logits, of which -inf are masked; NaN if the row has no meaning: NaN or +inf in it, or nothing but
/// -inf.
#[inline(always)]
pub fn largest(logits: &[f32]) -> f32 {
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut bad = [false; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            max[i] = if chunk[i] > max[i] { chunk[i] } else { max[i] };
            bad[i] |= chunk[i].is_nan() | (chunk[i] == f32::INFINITY);
        }
    }
    for (i, &logit) in rest.iter().enumerate() {
        max[i] = if logit > max[i] { logit } else { max[i] };
        bad[i] |= logit.is_nan() | (logit == f32::INFINITY);
    }
    let largest = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
    if largest == f32::NEG_INFINITY || bad.contains(&true) { f32::NAN } else { largest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        for i in 0..2_000_000 {
            let x = -87.3 + i as f32 * (175.6 / 2_000_000.0);
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - want).abs() / want);
        }
        assert!(worst < 1.5e-7, "{worst}");
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn silu_against_f64() {
        for i in -4000..4000 {
            let x = i as f32 * 0.01;
            let want = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            assert!((f64::from(silu(x)) - want).abs() <= 3e-7 * want.abs(), "{x}");
        }
        assert_eq!(silu(-100.0), 0.0);
        assert_eq!(silu(100.0), 100.0);
    }

    #[test]
    fn the_largest_of_a_row_with_meaning() {
        let inf = f32::INFINITY;
        for len in [1, 16, 17, 40] {
            for at in 0..len {
                let mut row = vec![-inf; len];
                row[at] = -3.0;
                assert_eq!(largest(&row), -3.0, "{len} {at}");
                for bad in [f32::NAN, inf, -inf] {
                    row[at] = bad;
                    assert!(largest(&row).is_nan(), "{len} {at} {bad}");
                }
            }
        }
    }

    #[test]
    fn sums_take_every_element_once() {
        for len in [0, 1, 15, 16, 17, 40] {
            let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
            assert_eq!(sum_squares(&x), x.iter().map(|x| x * x).sum::<f32>(), "{len}");
        }
    }
}
