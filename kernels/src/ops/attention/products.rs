//! The products inside attention: a few rows at a time, against vectors of sixteen keys or dimensions.

use std::ops::Range;

use half::bf16;

use super::{MAX_HEAD_DIM, SPAN};
use crate::dtype::Float;
use crate::simd::{F32x16, LANES};

/// Rows that share what is loaded: at two registers a row these fill AVX2's sixteen, but for the loads.
const SHARED_ROWS: usize = 6;

/// Floats from one row of queries to the next: known at compile time, so that a row costs no address arithmetic, and no multiple
/// of the distance at which addresses compete for a place in the cache.
pub(super) const Q_STRIDE: usize = MAX_HEAD_DIM + 16;

/// An element of the cache.
pub(crate) trait CacheElement: Float {
    /// # Safety
    /// As [`F32x16::load`].
    unsafe fn load<V: F32x16>(from: *const Self) -> V;
}

impl CacheElement for f32 {
    #[inline(always)]
    unsafe fn load<V: F32x16>(from: *const f32) -> V {
        // SAFETY: passed on to the caller.
        unsafe { V::load(from) }
    }
}

impl CacheElement for bf16 {
    #[inline(always)]
    unsafe fn load<V: F32x16>(from: *const bf16) -> V {
        let mut wide = [0.0; LANES];
        // SAFETY: sixteen elements are there, as the caller promises, and sixteen in the array.
        unsafe {
            let narrow = from.cast::<[u16; LANES]>().read_unaligned();
            for i in 0..LANES {
                wide[i] = f32::from_bits(u32::from(narrow[i]) << 16);
            }
            V::load(wide.as_ptr())
        }
    }
}

/// How many of the rows left share what is loaded: such that none is left alone, and only some numbers need to be compiled.
#[inline(always)]
pub(crate) fn share(left: usize) -> usize {
    match left {
        0..=4 => left,
        5 => 3,
        7 | 8 => 4,
        _ => SHARED_ROWS,
    }
}

/// `scores[m][j] = q[m] · k[j]` for `num` rows and `keys` keys.
///
/// # Safety
/// The CPU must have the instructions of `V`. Rows of q are [`Q_STRIDE`] apart, rows of scores [`SPAN`]; dimension d of key j is
/// `k[d * block_size + slot + j]`; `keys` is a multiple of 16.
#[inline(always)]
pub(super) unsafe fn scores_of<V: F32x16, C: CacheElement>(
    num: usize,
    q: &[f32],
    k: &[C],
    slot: usize,
    block_size: usize,
    dim: usize,
    keys: usize,
    scores: &mut [f32],
) {
    let (q, k, scores) = (q.as_ptr(), k.as_ptr(), scores.as_mut_ptr());
    let mut at = 0;
    while at < keys {
        let left = (keys - at) / LANES;
        // SAFETY: passed on to the caller.
        unsafe {
            let (k, scores) = (k.add(slot + at), scores.add(at));
            // Few rows take several vectors of keys, so that enough sums are in flight; many do where registers allow.
            at += LANES
                * match (num, left) {
                    (1, 4..) => products::<V, C, 1, 4, false>(q, Q_STRIDE, k, block_size, dim, scores, SPAN),
                    (2, 2..) => products::<V, C, 2, 2, false>(q, Q_STRIDE, k, block_size, dim, scores, SPAN),
                    (3, 2..) => products::<V, C, 3, 2, false>(q, Q_STRIDE, k, block_size, dim, scores, SPAN),
                    (1, _) => products::<V, C, 1, 1, false>(q, Q_STRIDE, k, block_size, dim, scores, SPAN),
                    (2, _) => products::<V, C, 2, 1, false>(q, Q_STRIDE, k, block_size, dim, scores, SPAN),
                    (3, _) => products::<V, C, 3, 1, false>(q, Q_STRIDE, k, block_size, dim, scores, SPAN),
                    (4, 2..) if V::FIT >= 16 => {
                        products::<V, C, 4, 2, false>(q, Q_STRIDE, k, block_size, dim, scores, SPAN)
                    }
                    (6, 2..) if V::FIT >= 16 => {
                        products::<V, C, 6, 2, false>(q, Q_STRIDE, k, block_size, dim, scores, SPAN)
                    }
                    (4, _) => products::<V, C, 4, 1, false>(q, Q_STRIDE, k, block_size, dim, scores, SPAN),
                    _ => products::<V, C, 6, 1, false>(q, Q_STRIDE, k, block_size, dim, scores, SPAN),
                };
        }
    }
}

/// `acc[m] += weights[m][j] * v[j]` for `num` rows and the keys j of `keys`, in order.
///
/// # Safety
/// The CPU must have the instructions of `V`. Rows of weights are [`SPAN`] apart, those of v and acc `dim`.
#[inline(always)]
pub(super) unsafe fn values_of<V: F32x16, C: CacheElement>(
    num: usize,
    weights: &[f32],
    v: &[C],
    keys: Range<usize>,
    dim: usize,
    acc: &mut [f32],
) {
    let (w, count) = (weights[keys.start..].as_ptr(), keys.len());
    let (values, sums) = (v[keys.start * dim..].as_ptr(), acc.as_mut_ptr());
    let mut d = 0;
    while d + LANES <= dim {
        let left = (dim - d) / LANES;
        // SAFETY: passed on to the caller.
        unsafe {
            let (v, acc) = (values.add(d), sums.add(d));
            d += LANES
                * match (num, left) {
                    (1, 4..) => products::<V, C, 1, 4, true>(w, SPAN, v, dim, count, acc, dim),
                    (2, 2..) => products::<V, C, 2, 2, true>(w, SPAN, v, dim, count, acc, dim),
                    (3, 2..) => products::<V, C, 3, 2, true>(w, SPAN, v, dim, count, acc, dim),
                    (1, _) => products::<V, C, 1, 1, true>(w, SPAN, v, dim, count, acc, dim),
                    (2, _) => products::<V, C, 2, 1, true>(w, SPAN, v, dim, count, acc, dim),
                    (3, _) => products::<V, C, 3, 1, true>(w, SPAN, v, dim, count, acc, dim),
                    (4, 2..) if V::FIT >= 16 => products::<V, C, 4, 2, true>(w, SPAN, v, dim, count, acc, dim),
                    (6, 2..) if V::FIT >= 16 => products::<V, C, 6, 2, true>(w, SPAN, v, dim, count, acc, dim),
                    (4, _) => products::<V, C, 4, 1, true>(w, SPAN, v, dim, count, acc, dim),
                    _ => products::<V, C, 6, 1, true>(w, SPAN, v, dim, count, acc, dim),
                };
        }
    }
    if d == dim {
        return;
    }
    // A head of an odd number of eights.
    for m in 0..num {
        for j in keys.clone() {
            let weight = weights[m * SPAN + j];
            for d in d..dim {
                let acc = &mut acc[m * dim + d];
                *acc = weight.mul_add(v[j * dim + d].to_f32(), *acc);
            }
        }
    }
}

/// `c[m][lane] (+)= sum over i of a[m][i] * b[i][lane]`, a chain in the order of i, for M rows and P vectors of lanes. Returns P.
///
/// # Safety
/// The CPU must have the instructions of `V`; rows of a, b and c begin `stride` apart and hold what is read and written.
#[inline(always)]
pub(crate) unsafe fn products<V: F32x16, C: CacheElement, const M: usize, const P: usize, const ADD: bool>(
    a: *const f32,
    a_stride: usize,
    b: *const C,
    b_stride: usize,
    count: usize,
    c: *mut f32,
    c_stride: usize,
) -> usize {
    const { assert!(M <= SHARED_ROWS) };
    // SAFETY: as the caller promises.
    unsafe {
        let mut sums = [[V::zero(); P]; M];
        if ADD {
            for m in 0..M {
                for p in 0..P {
                    sums[m][p] = V::load(c.add(m * c_stride + p * LANES));
                }
            }
        }
        for i in 0..count {
            let mut vectors = [V::zero(); P];
            for p in 0..P {
                vectors[p] = C::load::<V>(b.add(i * b_stride + p * LANES));
            }
            for m in 0..M {
                let a = V::splat(*a.add(m * a_stride + i));
                for p in 0..P {
                    sums[m][p] = a.mul_add(vectors[p], sums[m][p]);
                }
            }
        }
        for m in 0..M {
            for p in 0..P {
                sums[m][p].store(c.add(m * c_stride + p * LANES));
            }
        }
    }
    P
}
