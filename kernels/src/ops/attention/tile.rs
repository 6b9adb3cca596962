//! The fast path's arithmetic: a tile of queries that read the same keys, sixteen lanes at a time.
//!
//! Rows of a tile are (token, head of the group) pairs in that order, so what a row sees never shrinks along the tile. For each
//! span of keys a tile computes scores, exponentials and weighted values; a few rows at a time share what is loaded of K and V.
//! Every row's arithmetic is that of the reference, whatever the tile.

use std::ops::Range;

use half::bf16;

use super::{Heads, MAX_HEAD_DIM, SPAN, SPLIT, Seq};
use crate::dtype::Float;
use crate::math;
use crate::simd::{F32x16, Kernel, LANES};

/// Most rows of a tile: enough that a span of K and V is loaded from the second cache level for much arithmetic, few enough
/// that it and the tile nearly stay in the first.
pub(super) const TILE_ROWS: usize = 24;

/// Rows that share what is loaded: at two registers a row these fill AVX2's sixteen, but for the loads.
const SHARED_ROWS: usize = 6;

/// What a tile works on and leaves behind. Rows are `head_dim` apart in `q`, `acc` and `total`, and [`SPAN`] in `weights`.
#[repr(align(64))]
pub(super) struct Scratch {
    q: [f32; TILE_ROWS * MAX_HEAD_DIM],
    weights: [f32; TILE_ROWS * SPAN],
    /// The split that was walked last.
    pub(super) split: Sums,
    /// The splits merged so far.
    pub(super) total: Sums,
    /// Keys that each row sees, in all and of the span.
    visible: [usize; TILE_ROWS],
    count: [usize; TILE_ROWS],
}

/// For each row the largest score, the sum of exponentials relative to it, and the values weighed by them.
pub(super) struct Sums {
    pub(super) max: [f32; TILE_ROWS],
    pub(super) sum: [f32; TILE_ROWS],
    pub(super) acc: [f32; TILE_ROWS * MAX_HEAD_DIM],
}

impl Scratch {
    pub(super) const NEW: Scratch = Scratch {
        q: [0.0; TILE_ROWS * MAX_HEAD_DIM],
        weights: [0.0; TILE_ROWS * SPAN],
        split: Sums::NEW,
        total: Sums::NEW,
        visible: [0; TILE_ROWS],
        count: [0; TILE_ROWS],
    };
}

impl Sums {
    const NEW: Sums = Sums { max: [0.0; TILE_ROWS], sum: [0.0; TILE_ROWS], acc: [0.0; TILE_ROWS * MAX_HEAD_DIM] };

    /// Rows that have seen nothing.
    #[inline(always)]
    fn clear(&mut self, rows: Range<usize>, head_dim: usize) {
        self.max[rows.clone()].fill(f32::NEG_INFINITY);
        self.sum[rows.clone()].fill(0.0);
        self.acc[rows.start * head_dim..rows.end * head_dim].fill(0.0);
    }

    /// Copies rows out: for each its values, its maximum and its sum.
    pub(super) fn store(&self, num_rows: usize, head_dim: usize, part: &mut [f32]) {
        for (row, part) in part.chunks_exact_mut(head_dim + 2).take(num_rows).enumerate() {
            part[..head_dim].copy_from_slice(&self.acc[row * head_dim..][..head_dim]);
            part[head_dim..].copy_from_slice(&[self.max[row], self.sum[row]]);
        }
    }
}

/// Adds what a split saw: maximum, sum and values, of one row.
#[inline(always)]
fn merge(max: &mut f32, sum: &mut f32, acc: &mut [f32], split_max: f32, split_sum: f32, split_acc: &[f32]) {
    let new_max = if split_max > *max { split_max } else { *max };
    let (old, new) = (math::exp(*max - new_max), math::exp(split_max - new_max));
    *max = new_max;
    *sum = split_sum.mul_add(new, *sum * old);
    for (acc, &split) in acc.iter_mut().zip(split_acc) {
        *acc = split.mul_add(new, *acc * old);
    }
}

/// An element of the cache.
pub(super) trait CacheElement: Float {
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

/// What all tiles of a call share.
#[derive(Clone, Copy)]
pub(super) struct Layer<'a, T, C> {
    pub qkv: &'a [T],
    pub k: &'a [C],
    pub v: &'a [C],
    pub block_size: usize,
    pub heads: Heads,
    pub scale: f32,
}

/// Some queries of one sequence that read one KV head.
#[derive(Clone)]
pub(super) struct Tile<'a> {
    pub seq: Seq<'a>,
    pub kv_head: usize,
    /// Of the sequence's (token, head of the group) pairs.
    pub rows: Range<usize>,
}

impl Tile<'_> {
    /// The token of the batch and the query head that a row is.
    #[inline(always)]
    pub(super) fn place(&self, row: usize, heads: Heads) -> (usize, usize) {
        let (row, group) = (self.rows.start + row, heads.group());
        (self.seq.first_token + row / group, self.kv_head * group + row % group)
    }

    /// Keys that a row sees.
    #[inline(always)]
    pub(super) fn visible(&self, row: usize, heads: Heads) -> usize {
        self.seq.kv_len - self.seq.num_tokens + (self.rows.start + row) / heads.group() + 1
    }
}

/// Walks `splits` for every row of a tile and merges them into `scratch.total`; the last one is left in `scratch.split`.
///
/// Needs what the tile sees to be in the block table and the cache, and at most [`TILE_ROWS`] rows.
pub(super) struct Walk<'a, T, C> {
    pub layer: Layer<'a, T, C>,
    pub tile: Tile<'a>,
    pub splits: Range<usize>,
    pub scratch: &'a mut Scratch,
}

impl<T: Float, C: CacheElement> Kernel for Walk<'_, T, C> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let Walk { layer, tile, splits, scratch } = self;
        let (heads, dim, num_rows) = (layer.heads, layer.heads.head_dim, tile.rows.len());
        for row in 0..num_rows {
            let (token, head) = tile.place(row, heads);
            let q = &layer.qkv[token * heads.qkv_cols() + head * dim..][..dim];
            for (to, q) in scratch.q[row * dim..][..dim].iter_mut().zip(q) {
                *to = q.to_f32() * layer.scale;
            }
            scratch.visible[row] = tile.visible(row, heads);
        }
        scratch.total.clear(0..num_rows, dim);
        for split in splits {
            let start = split * SPLIT;
            let first_row = first_that_sees(&scratch.visible[..num_rows], start);
            scratch.split.clear(first_row..num_rows, dim);
            let end = scratch.visible[num_rows - 1].min(start + SPLIT);
            for first in (start..end).step_by(SPAN) {
                let first_row = first_that_sees(&scratch.visible[..num_rows], first);
                // SAFETY: the caller promises the instructions; rows from `first_row` on see a key of the span.
                unsafe { span::<V, T, C>(&layer, &tile, scratch, first_row..num_rows, first) }
            }
            for row in first_row..num_rows {
                let (total, part) = (&mut scratch.total, &scratch.split);
                let acc = row * dim..(row + 1) * dim;
                let (max, sum) = (&mut total.max[row], &mut total.sum[row]);
                merge(max, sum, &mut total.acc[acc.clone()], part.max[row], part.sum[row], &part.acc[acc]);
            }
        }
    }
}

/// Merges the splits of a tile, in order, from what [`Sums::store`] kept of each, `part_len` apart.
pub(super) struct Join<'a> {
    pub tile: &'a Tile<'a>,
    pub heads: Heads,
    pub parts: &'a [f32],
    pub part_len: usize,
    pub total: &'a mut Sums,
}

impl Kernel for Join<'_> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let Join { tile, heads, parts, part_len, total } = self;
        let (dim, num_rows) = (heads.head_dim, tile.rows.len());
        total.clear(0..num_rows, dim);
        for row in 0..num_rows {
            for split in 0..tile.visible(row, heads).div_ceil(SPLIT) {
                let part = &parts[split * part_len + row * (dim + 2)..][..dim + 2];
                let acc = &mut total.acc[row * dim..][..dim];
                merge(&mut total.max[row], &mut total.sum[row], acc, part[dim], part[dim + 1], &part[..dim]);
            }
        }
    }
}

/// The first row that sees the key at `position`, and with it all after it.
#[inline(always)]
fn first_that_sees(visible: &[usize], position: usize) -> usize {
    let mut row = 0;
    while row < visible.len() && visible[row] <= position {
        row += 1;
    }
    row
}

/// Adds the keys from `first` on, at most [`SPAN`], to `scratch.split`.
///
/// # Safety
/// The CPU must have the instructions of `V`; every row of `rows` sees the key at `first`.
#[inline(always)]
unsafe fn span<V: F32x16, T: Float, C: CacheElement>(
    layer: &Layer<'_, T, C>,
    tile: &Tile<'_>,
    scratch: &mut Scratch,
    rows: Range<usize>,
    first: usize,
) {
    let (dim, block_size) = (layer.heads.head_dim, layer.block_size);
    // Keys that lie side by side in one block.
    let run = SPAN.min(block_size);
    let base = |position: usize| {
        let block = tile.seq.blocks[position / block_size] as usize;
        (block * layer.heads.num_kv_heads + tile.kv_head) * block_size * dim
    };
    for row in rows.clone() {
        scratch.count[row] = (scratch.visible[row] - first).min(SPAN);
    }

    let seen = scratch.count[rows.end - 1];
    for at in (0..seen).step_by(run) {
        let slot = (first + at) % block_size;
        let k = &layer.k[base(first + at)..][..block_size * dim];
        let mut row = rows.start;
        while row < rows.end {
            let num = SHARED_ROWS.min(rows.end - row);
            let keys = scratch.count[row + num - 1].saturating_sub(at).min(run).next_multiple_of(LANES);
            let q = &scratch.q[row * dim..(row + num) * dim];
            let scores = &mut scratch.weights[row * SPAN + at..];
            // SAFETY: `num` rows of q; of k, from `slot` on, `keys` lanes a dimension, as slot + run is within the block; of the
            // scores, `keys` for each of `num` rows, as at + run <= SPAN.
            unsafe { scores_of::<V, C>(num, q, k, slot, block_size, dim, keys, scores) }
            row += num;
        }
    }

    for row in rows.clone() {
        let weights = &mut scratch.weights[row * SPAN..][..SPAN];
        let correction =
            exponentiate(weights, scratch.count[row], &mut scratch.split.max[row], &mut scratch.split.sum[row]);
        if correction != 1.0 {
            for acc in &mut scratch.split.acc[row * dim..][..dim] {
                *acc *= correction;
            }
        }
    }

    for at in (0..seen).step_by(run) {
        let slot = (first + at) % block_size;
        let v = &layer.v[base(first + at) + slot * dim..][..run * dim];
        let mut row = rows.start;
        while row < rows.end {
            let num = SHARED_ROWS.min(rows.end - row);
            // Rows see ever more keys: those that all of them see first, then those that fewer do.
            let (mut done, mut from) = (0, row);
            while from < row + num {
                let keys = scratch.count[from].saturating_sub(at).min(run);
                if keys > done {
                    let num = row + num - from;
                    let weights = &scratch.weights[from * SPAN + at..];
                    let acc = &mut scratch.split.acc[from * dim..(from + num) * dim];
                    // SAFETY: `keys` weights of each of `num` rows, `keys` values, `num` rows of acc.
                    unsafe { values_of::<V, C>(num, weights, v, done..keys, dim, acc) }
                    done = keys;
                }
                from += 1;
            }
            row += num;
        }
    }
}

/// Turns the first `count` scores into exp(score - max), the others into 0; updates maximum and sum. What the values gathered
/// so far are to be multiplied by.
#[inline(always)]
fn exponentiate(scores: &mut [f32], count: usize, max: &mut f32, sum: &mut f32) -> f32 {
    let (chunks, _) = scores[..count.next_multiple_of(LANES)].as_chunks_mut::<LANES>();
    if let Some(last) = chunks.last_mut() {
        for i in 0..LANES {
            last[i] = if i < (count - 1) % LANES + 1 { last[i] } else { f32::NEG_INFINITY };
        }
    }
    let mut lanes = [*max; LANES];
    for chunk in chunks.iter() {
        for i in 0..LANES {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
        }
    }
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] = if lanes[i + width] > lanes[i] { lanes[i + width] } else { lanes[i] };
        }
    }
    let new_max = lanes[0];
    let correction = math::exp(*max - new_max);
    let mut lanes = [0.0; LANES];
    for chunk in chunks.iter_mut() {
        for i in 0..LANES {
            chunk[i] = math::exp(chunk[i] - new_max);
            lanes[i] += chunk[i];
        }
    }
    *max = new_max;
    *sum = sum.mul_add(correction, math::fold(lanes));
    correction
}

/// `scores[m][j] = q[m] · k[j]` for `num` rows and `keys` keys.
///
/// # Safety
/// The CPU must have the instructions of `V`. Rows of q are `dim` apart, rows of scores [`SPAN`]; dimension d of key j is
/// `k[d * block_size + slot + j]`; `keys` is a multiple of 16.
#[inline(always)]
unsafe fn scores_of<V: F32x16, C: CacheElement>(
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
            // Few rows take several vectors of keys, so that enough sums are in flight.
            at += LANES
                * match (num, left) {
                    (1, 4..) => products::<V, C, 1, 4>(q, dim, k, block_size, dim, scores, SPAN, false),
                    (1, 2..) => products::<V, C, 1, 2>(q, dim, k, block_size, dim, scores, SPAN, false),
                    (2, 2..) => products::<V, C, 2, 2>(q, dim, k, block_size, dim, scores, SPAN, false),
                    (3, 2..) => products::<V, C, 3, 2>(q, dim, k, block_size, dim, scores, SPAN, false),
                    (1, _) => products::<V, C, 1, 1>(q, dim, k, block_size, dim, scores, SPAN, false),
                    (2, _) => products::<V, C, 2, 1>(q, dim, k, block_size, dim, scores, SPAN, false),
                    (3, _) => products::<V, C, 3, 1>(q, dim, k, block_size, dim, scores, SPAN, false),
                    (4, _) => products::<V, C, 4, 1>(q, dim, k, block_size, dim, scores, SPAN, false),
                    (5, _) => products::<V, C, 5, 1>(q, dim, k, block_size, dim, scores, SPAN, false),
                    _ => products::<V, C, 6, 1>(q, dim, k, block_size, dim, scores, SPAN, false),
                };
        }
    }
}

/// `acc[m] += weights[m][j] * v[j]` for `num` rows and the keys j of `keys`, in order.
///
/// # Safety
/// The CPU must have the instructions of `V`. Rows of weights are [`SPAN`] apart, those of v and acc `dim`.
#[inline(always)]
unsafe fn values_of<V: F32x16, C: CacheElement>(
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
                    (1, 4..) => products::<V, C, 1, 4>(w, SPAN, v, dim, count, acc, dim, true),
                    (1, 2..) => products::<V, C, 1, 2>(w, SPAN, v, dim, count, acc, dim, true),
                    (2, 2..) => products::<V, C, 2, 2>(w, SPAN, v, dim, count, acc, dim, true),
                    (3, 2..) => products::<V, C, 3, 2>(w, SPAN, v, dim, count, acc, dim, true),
                    (1, _) => products::<V, C, 1, 1>(w, SPAN, v, dim, count, acc, dim, true),
                    (2, _) => products::<V, C, 2, 1>(w, SPAN, v, dim, count, acc, dim, true),
                    (3, _) => products::<V, C, 3, 1>(w, SPAN, v, dim, count, acc, dim, true),
                    (4, _) => products::<V, C, 4, 1>(w, SPAN, v, dim, count, acc, dim, true),
                    (5, _) => products::<V, C, 5, 1>(w, SPAN, v, dim, count, acc, dim, true),
                    _ => products::<V, C, 6, 1>(w, SPAN, v, dim, count, acc, dim, true),
                };
        }
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
unsafe fn products<V: F32x16, C: CacheElement, const M: usize, const P: usize>(
    a: *const f32,
    a_stride: usize,
    b: *const C,
    b_stride: usize,
    count: usize,
    c: *mut f32,
    c_stride: usize,
    add: bool,
) -> usize {
    const { assert!(M <= SHARED_ROWS) };
    // SAFETY: as the caller promises.
    unsafe {
        let mut sums = [[V::zero(); P]; M];
        if add {
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
