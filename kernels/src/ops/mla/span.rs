//! One span of keys for many rows: scores, exponentials, weighted values.
//!
//! Rows are queries of one sequence in an order in which what they see never shrinks. Keys and values are rows of one memory: latents in
//! the cache, or what was expanded of them. A row's arithmetic does not depend on the rows beside it.

use super::products::{columns, scores};
use crate::ops::attention::{CacheElement, SPAN, exponentiate, share};
use crate::simd::{F32x16, Kernel};

/// Rows that are taken through a span together: as many as let the span's keys be read from the nearest cache.
pub(super) const TILE_ROWS: usize = 16;

/// Queries, and what they have gathered: slices of scratch memory, one row after the other.
pub(super) struct Rows<'a> {
    /// `[rows, dim]`, scaled.
    pub q: &'a mut [f32],
    /// `[rows, value_dim]`.
    pub acc: &'a mut [f32],
    /// `[rows]`: the largest score.
    pub max: &'a mut [f32],
    /// `[rows]`: the sum of exponentials relative to it.
    pub sum: &'a mut [f32],
    /// `[TILE_ROWS, SPAN]`.
    pub weights: &'a mut [f32],
    pub dim: usize,
    pub value_dim: usize,
    /// Keys that row 0 sees, less one for each row of its group before it.
    pub sees: usize,
    /// Neighbouring rows that see the same, and where in its group row 0 is.
    pub group: usize,
    pub offset: usize,
}

impl Rows<'_> {
    pub(super) fn len(&self) -> usize {
        self.max.len()
    }

    /// Rows that have seen nothing.
    pub(super) fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Keys that a row sees.
    #[inline(always)]
    pub(super) fn visible(&self, row: usize) -> usize {
        self.sees + (self.offset + row) / self.group
    }
}

/// Most runs of a span: blocks hold at least 16 tokens.
const MAX_RUNS: usize = SPAN / 16;

/// Keys of a span, and their values: rows of memory in runs of equal length.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a, C> {
    /// Each `[run_len, stride]`; a row begins with its key.
    pub runs: [&'a [C]; MAX_RUNS],
    pub run_len: usize,
    pub stride: usize,
    /// Where a row's value begins.
    pub value_at: usize,
}

/// Adds the keys from position `first` on, at most [`SPAN`], to all rows that see the first of them.
///
/// Needs as many keys as the last row sees.
pub(super) struct Span<'a, 'b, C> {
    pub keys: Keys<'a, C>,
    pub first: usize,
    /// Keys at the start of the span that are not seen.
    pub left_out: usize,
    pub rows: &'a mut Rows<'b>,
}

impl<C: CacheElement> Kernel for Span<'_, '_, C> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let Span { keys, first, left_out, rows } = self;
        let num_rows = rows.len();
        let mut row = 0;
        while row < num_rows && rows.visible(row) <= first {
            row += 1;
        }
        while row < num_rows {
            let num = TILE_ROWS.min(num_rows - row);
            // SAFETY: the caller promises the instructions; rows from `row` on see a key of the span.
            unsafe { tile::<V, C>(&keys, first, left_out, rows, row, num) }
            row += num;
        }
    }
}

/// [`Span`] for `num` rows from `row` on, at most [`TILE_ROWS`].
///
/// # Safety
/// The CPU must have the instructions of `V`; each of the rows sees the key at `first`.
#[inline(always)]
unsafe fn tile<V: F32x16, C: CacheElement>(
    keys: &Keys<'_, C>,
    first: usize,
    left_out: usize,
    rows: &mut Rows<'_>,
    row: usize,
    num: usize,
) {
    let (dim, value_dim, run_len) = (rows.dim, rows.value_dim, keys.run_len);
    let mut counts = [0; TILE_ROWS];
    for i in 0..num {
        counts[i] = (rows.visible(row + i) - first).min(SPAN);
    }
    let seen = counts[num - 1];
    let q = &rows.q[row * dim..(row + num) * dim];
    for (run, at) in (0..seen).step_by(run_len).enumerate() {
        let num_keys = run_len.min(seen - at);
        let run = &keys.runs[run][..num_keys * keys.stride];
        let out = &mut rows.weights[at..];
        // SAFETY: `num` rows of q, `num_keys` keys of a stride, `num` rows of weights that hold a span.
        unsafe {
            scores::<V, C>(
                num,
                (q.as_ptr(), dim),
                (run.as_ptr(), keys.stride),
                num_keys,
                dim,
                (out.as_mut_ptr(), SPAN),
            );
        }
    }
    for i in 0..num {
        let weights = &mut rows.weights[i * SPAN..][..SPAN];
        weights[..left_out].fill(f32::NEG_INFINITY);
        let correction = exponentiate(weights, counts[i], &mut rows.max[row + i], &mut rows.sum[row + i]);
        if correction != 1.0 {
            for acc in &mut rows.acc[(row + i) * value_dim..][..value_dim] {
                *acc *= correction;
            }
        }
    }
    for (run, at) in (0..seen).step_by(run_len).enumerate() {
        let run = &keys.runs[run][keys.value_at..];
        let of_run = |count: usize| count.clamp(at, at + run_len) - at;
        let start = of_run(left_out);
        let mut i = 0;
        while i < num {
            let together = share(num - i);
            // What all of them see first, then what later ones see beyond: each row's chain stays in order.
            let common = of_run(counts[i]).max(start);
            for (from, rows_from, count) in
                std::iter::once((start, i, together)).chain((i + 1..i + together).map(|later| (common, later, 1)))
            {
                let end = if count == 1 { of_run(counts[rows_from]) } else { common };
                if end <= from {
                    continue;
                }
                let weights = rows.weights[rows_from * SPAN + at + from..].as_ptr();
                let values = run[from * keys.stride..(end - 1) * keys.stride + value_dim].as_ptr();
                let acc = &mut rows.acc[(row + rows_from) * value_dim..][..count * value_dim];
                // SAFETY: `end - from` weights of each row and as many values, `count` rows of acc.
                unsafe {
                    columns::<V, C, true>(
                        count,
                        (weights, SPAN),
                        (values, keys.stride),
                        end - from,
                        (acc.as_mut_ptr(), value_dim),
                        value_dim,
                    );
                }
            }
            i += together;
        }
    }
}
