//! The fast path's arithmetic: a tile of queries that read the same keys, sixteen lanes at a time.
//!
//! Rows of a tile are (token, head of the group) pairs in that order, so what a row sees never shrinks along the tile. For each
//! span of keys a tile computes scores, exponentials and weighted values; a few rows at a time share what is loaded of K and V.
//! Every row's arithmetic is that of the reference, whatever the tile.

use std::ops::Range;

use super::products::{CacheElement, Q_STRIDE, scores_of, share, values_of};
use super::{FirstKey, Heads, MAX_HEAD_DIM, SPAN, SPLIT, Seq};
use crate::dtype::Float;
use crate::math;
use crate::simd::{F32x16, Kernel, LANES};

/// Most rows of a tile: enough that a span of K and V is loaded from the second cache level for much arithmetic, few enough
/// that it and the tile nearly stay in the first.
pub(super) const TILE_ROWS: usize = 24;

/// A tile of at most this many rows waits for memory.
const FEW_ROWS: usize = 12;

const CACHE_LINE: usize = 64;

/// What a tile works on and leaves behind. Rows are [`Q_STRIDE`] apart in `q`, [`SPAN`] in `weights`, and `head_dim` in [`Sums`].
#[repr(align(64))]
pub(super) struct Scratch {
    q: [f32; TILE_ROWS * Q_STRIDE],
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
        q: [0.0; TILE_ROWS * Q_STRIDE],
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

/// What all tiles of a call share.
#[derive(Clone, Copy)]
pub(super) struct Layer<'a, C> {
    pub k: &'a [C],
    pub v: &'a [C],
    pub block_size: usize,
    pub heads: Heads,
    pub first_key: FirstKey,
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

    /// Puts the scaled queries where [`Walk`] reads them.
    pub(super) fn load<T: Float>(&self, qkv: &[T], heads: Heads, scale: f32, scratch: &mut Scratch) {
        for row in 0..self.rows.len() {
            let (token, head) = self.place(row, heads);
            let q = &qkv[token * heads.qkv_cols() + head * heads.head_dim..][..heads.head_dim];
            for (to, q) in scratch.q[row * Q_STRIDE..].iter_mut().zip(q) {
                *to = q.to_f32() * scale;
            }
        }
    }

    /// Keys that a row sees.
    #[inline(always)]
    pub(super) fn visible(&self, row: usize, heads: Heads) -> usize {
        self.seq.kv_len - self.seq.num_tokens + (self.rows.start + row) / heads.group() + 1
    }
}

/// Walks `splits` for every row of a tile and merges them into `scratch.total`; the last one is left in `scratch.split`.
///
/// Needs the tile's queries in `scratch`, what it sees in block table and cache, and at most [`TILE_ROWS`] rows.
pub(super) struct Walk<'a, C> {
    pub layer: Layer<'a, C>,
    pub tile: Tile<'a>,
    pub splits: Range<usize>,
    pub scratch: &'a mut Scratch,
}

impl<C: CacheElement> Kernel for Walk<'_, C> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let Walk { layer, tile, splits, scratch } = self;
        let (heads, dim, num_rows) = (layer.heads, layer.heads.head_dim, tile.rows.len());
        for row in 0..num_rows {
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
                unsafe { span::<V, C>(&layer, &tile, scratch, first_row..num_rows, first) }
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
unsafe fn span<V: F32x16, C: CacheElement>(
    layer: &Layer<'_, C>,
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
    // Few rows are done with the keys sooner than memory brings more: ask for the values while scores are computed.
    let few = rows.len() <= FEW_ROWS;
    if few {
        for at in (0..seen).step_by(run) {
            let v = &layer.v[base(first + at) + (first + at) % block_size * dim..][..run * dim];
            // SAFETY: the CPU has the instructions of `V`.
            unsafe { prefetch::<V, C>(v, dim, dim) }
        }
    }
    for at in (0..seen).step_by(run) {
        let slot = (first + at) % block_size;
        let k = &layer.k[base(first + at)..][..block_size * dim];
        let mut row = rows.start;
        while row < rows.end {
            let num = share(rows.end - row);
            let keys = scratch.count[row + num - 1].saturating_sub(at).min(run).next_multiple_of(LANES);
            let q = &scratch.q[row * Q_STRIDE..(row + num) * Q_STRIDE];
            let scores = &mut scratch.weights[row * SPAN + at..];
            // SAFETY: `num` rows of q; of k, from `slot` on, `keys` lanes a dimension, as slot + run is within the block; of the
            // scores, `keys` for each of `num` rows, as at + run <= SPAN.
            unsafe { scores_of::<V, C>(num, q, k, slot, block_size, dim, keys, scores) }
            row += num;
        }
    }

    if few {
        // And for the next keys while values are weighed.
        let next = first + SPAN;
        for at in (next..scratch.visible[rows.end - 1].min(next + SPAN)).step_by(run) {
            let k = &layer.k[base(at)..][..block_size * dim];
            // SAFETY: as above.
            unsafe { prefetch::<V, C>(&k[at % block_size..], block_size, run) }
        }
    }
    let left_out = usize::from(first == 0 && layer.first_key == FirstKey::LeftOut);
    for row in rows.clone() {
        let weights = &mut scratch.weights[row * SPAN..][..SPAN];
        weights[..left_out].fill(f32::NEG_INFINITY);
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
            let num = share(rows.end - row);
            // Rows see ever more keys: those that all of them see first, then those that fewer do.
            let (mut done, mut from) = (if at == 0 { left_out } else { 0 }, row);
            while from < row + num {
                let keys = scratch.count[from].saturating_sub(at).min(run);
                if keys > done {
                    let mut first = from;
                    while first < row + num {
                        let num = share(row + num - first);
                        let weights = &scratch.weights[first * SPAN + at..];
                        let acc = &mut scratch.split.acc[first * dim..(first + num) * dim];
                        // SAFETY: `keys` weights of each of `num` rows, `keys` values, `num` rows of acc.
                        unsafe { values_of::<V, C>(num, weights, v, done..keys, dim, acc) }
                        first += num;
                    }
                    done = keys;
                }
                from += 1;
            }
            row += num;
        }
    }
}

/// Asks for `cols` elements of each row, `stride` apart.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(always)]
unsafe fn prefetch<V: F32x16, C: CacheElement>(x: &[C], stride: usize, cols: usize) {
    for row in x.chunks(stride) {
        let row = &row[..cols.min(row.len())];
        for line in (0..row.len()).step_by(CACHE_LINE / size_of::<C>()) {
            // SAFETY: passed on to the caller; a prefetch may be of any address.
            unsafe { V::prefetch(row[line..].as_ptr().cast()) }
        }
    }
}

/// Turns the first `count` scores into exp(score - max), the others into 0; updates maximum and sum. What the values gathered
/// so far are to be multiplied by.
#[inline(always)]
pub(crate) fn exponentiate(scores: &mut [f32], count: usize, max: &mut f32, sum: &mut f32) -> f32 {
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
