//! The products inside: a few rows against rows of memory, sixteen lanes at a time.

use crate::ops::attention::{CacheElement, products, share};
use crate::simd::{F32x16, LANES};

/// Where rows begin, and how many elements apart.
pub(super) type Rows<P> = (P, usize);

/// `c[m][..cols] (+)= sum over i of a[m][i] * b[i][..cols]`, chains in the order of i, for `num` rows.
///
/// # Safety
/// The CPU must have the instructions of `V`; rows of a, b and c hold `count`, `cols` and `cols` elements, and there are `num`,
/// `count` and `num` of them; `cols` is a multiple of 16.
#[inline(always)]
pub(super) unsafe fn columns<V: F32x16, C: CacheElement, const ADD: bool>(
    num: usize,
    (a, of_a): Rows<*const f32>,
    (b, of_b): Rows<*const C>,
    count: usize,
    (c, of_c): Rows<*mut f32>,
    cols: usize,
) {
    let mut row = 0;
    while row < num {
        let together = share(num - row);
        let mut col = 0;
        while col < cols {
            let left = (cols - col) / LANES;
            // SAFETY: passed on to the caller.
            unsafe {
                let (a, b, c) = (a.add(row * of_a), b.add(col), c.add(row * of_c + col));
                col += LANES
                    * match (together, left) {
                        (1, 4..) => products::<V, C, 1, 4, ADD>(a, of_a, b, of_b, count, c, of_c),
                        (2, 2..) => products::<V, C, 2, 2, ADD>(a, of_a, b, of_b, count, c, of_c),
                        (3, 2..) => products::<V, C, 3, 2, ADD>(a, of_a, b, of_b, count, c, of_c),
                        (1, _) => products::<V, C, 1, 1, ADD>(a, of_a, b, of_b, count, c, of_c),
                        (2, _) => products::<V, C, 2, 1, ADD>(a, of_a, b, of_b, count, c, of_c),
                        (3, _) => products::<V, C, 3, 1, ADD>(a, of_a, b, of_b, count, c, of_c),
                        (4, 2..) if V::FIT >= 16 => products::<V, C, 4, 2, ADD>(a, of_a, b, of_b, count, c, of_c),
                        (6, 2..) if V::FIT >= 16 => products::<V, C, 6, 2, ADD>(a, of_a, b, of_b, count, c, of_c),
                        (4, _) => products::<V, C, 4, 1, ADD>(a, of_a, b, of_b, count, c, of_c),
                        _ => products::<V, C, 6, 1, ADD>(a, of_a, b, of_b, count, c, of_c),
                    };
            }
        }
        row += together;
    }
}

/// `out[m][j] = q[m] · k[j]` over `dim` elements in partial sums, for `num` rows of q and `keys` of k.
///
/// # Safety
/// The CPU must have the instructions of `V`; rows of q and k hold `dim` elements, a multiple of 16, and rows of out `keys`.
#[inline(always)]
pub(super) unsafe fn scores<V: F32x16, C: CacheElement>(
    num: usize,
    (q, of_q): Rows<*const f32>,
    (k, of_k): Rows<*const C>,
    keys: usize,
    dim: usize,
    (out, of_out): Rows<*mut f32>,
) {
    // A few keys stay in the nearest cache for all rows, and so do the rows.
    let mut key = 0;
    while key < keys {
        let left = keys - key;
        let some = match left {
            4.. if V::FIT >= 16 || num == 1 => 4,
            2.. if V::FIT < 16 && num > 1 => 2,
            _ => 1,
        };
        let mut row = 0;
        while row < num {
            // SAFETY: passed on to the caller.
            unsafe {
                let (q, k, out) = ((q.add(row * of_q), of_q), (k.add(key * of_k), of_k), out.add(row * of_out + key));
                row += match (num - row, some) {
                    (4.., 4) if V::FIT >= 16 => dots::<V, C, 4, 4>(q, k, dim, (out, of_out)),
                    (4.., 1) if V::FIT >= 16 => dots::<V, C, 4, 1>(q, k, dim, (out, of_out)),
                    (2.., 2) => dots::<V, C, 2, 2>(q, k, dim, (out, of_out)),
                    (2.., 1) => dots::<V, C, 2, 1>(q, k, dim, (out, of_out)),
                    (_, 4) => dots::<V, C, 1, 4>(q, k, dim, (out, of_out)),
                    (_, 2) => dots::<V, C, 1, 2>(q, k, dim, (out, of_out)),
                    _ => dots::<V, C, 1, 1>(q, k, dim, (out, of_out)),
                };
            }
        }
        key += some;
    }
}

/// [`scores`] of M rows and P keys. Returns M.
///
/// # Safety
/// As [`scores`].
#[inline(always)]
unsafe fn dots<V: F32x16, C: CacheElement, const M: usize, const P: usize>(
    (q, of_q): Rows<*const f32>,
    (k, of_k): Rows<*const C>,
    dim: usize,
    (out, of_out): Rows<*mut f32>,
) -> usize {
    // SAFETY: as the caller promises.
    unsafe {
        let mut sums = [[V::zero(); P]; M];
        let mut at = 0;
        while at < dim {
            let mut keys = [V::zero(); P];
            for p in 0..P {
                keys[p] = C::load::<V>(k.add(p * of_k + at));
            }
            for m in 0..M {
                let q = V::load(q.add(m * of_q + at));
                for p in 0..P {
                    sums[m][p] = q.mul_add(keys[p], sums[m][p]);
                }
            }
            at += LANES;
        }
        for m in 0..M {
            for p in 0..P {
                *out.add(m * of_out + p) = sums[m][p].fold();
            }
        }
    }
    M
}
