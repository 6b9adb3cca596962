//! The fast path's plan: which rows are taken together, and by which thread.
//!
//! Expanded, a task is one head and many queries of a sequence, so that what is made of a span serves all of them. Absorbed, queries come
//! in waves: heads multiply them with their keys' weight, tiles of (token, head) rows walk the latents, heads multiply the results.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::products::columns;
use super::span::{Keys, Rows, Span, TILE_ROWS};
use super::{Mla, MlaDims};
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::ops::attention::{CacheElement, FirstKey, SPAN, Seq};
use crate::pool::{self, SharedMut};
use crate::simd::{F32x16, Kernel, Level};
use crate::tensor::Tensor;
use crate::workspace::Workspace;

/// Tokens whose absorbed queries are held at once.
const WAVE: usize = 64;

/// Rows that walk the latents together: half of them as large as the nearest cache.
const WALK_ROWS: usize = 8;

/// Queries of a head that an expanded span serves at once.
const EXPAND_ROWS: usize = 512;

/// What [`mla`](super::mla) takes from the workspace at most, for a step of `num_tokens` tokens.
pub fn workspace_bytes(device: &Device, dims: MlaDims, num_tokens: usize) -> usize {
    match device {
        Device::Cpu => {
            let floats = |len: usize| (len * size_of::<f32>()).next_multiple_of(64);
            floats(wave_len(dims, num_tokens)) + floats(pool::num_threads() * slot_len(dims, num_tokens))
        }
        Device::Cuda(_) => 0,
    }
}

/// Numbers of a wave.
fn wave_len(dims: MlaDims, num_tokens: usize) -> usize {
    num_tokens.min(WAVE) * dims.num_heads * dims.latent()
}

/// Numbers that a thread works on.
fn slot_len(dims: MlaDims, num_tokens: usize) -> usize {
    let rows = num_tokens.min(EXPAND_ROWS);
    let weights = TILE_ROWS * SPAN;
    let expanded = rows * (dims.query() + dims.value + 2) + weights + SPAN * (dims.rank + dims.query() + dims.value);
    let absorbed = TILE_ROWS * (dims.latent() + dims.rank + 2) + weights;
    let by_head = TILE_ROWS * dims.nope.max(dims.value);
    expanded.max(absorbed).max(by_head).next_multiple_of(16)
}

pub(super) fn mla<T: Float, C: CacheElement, W: CacheElement>(
    call: &Mla<'_>,
    y: &mut Tensor,
    workspace: &Workspace,
    level: Level,
    num_threads: usize,
) -> Result<()> {
    let dims = call.weight.dims();
    let (num_tokens, _) = call.q.rows_cols();
    let slot_len = slot_len(dims, num_tokens);
    let mut slots = workspace.take([num_threads * slot_len], DType::F32)?;
    let mut wave = workspace.take([wave_len(dims, num_tokens)], DType::F32)?;
    let step = Step::<T, C> {
        call,
        dims,
        level,
        num_threads,
        block_size: call.cache.dims()[1],
        q: call.q.as_slice(),
        cache: call.cache.as_slice(),
        y: SharedMut::new(y.as_mut_slice()),
        slots: SharedMut::new(slots.as_mut_slice()),
        slot_len,
    };
    step.expand_all::<W>();
    step.absorb_all::<W>(wave.as_mut_slice());
    Ok(())
}

/// What all tasks share.
struct Step<'a, T, C> {
    call: &'a Mla<'a>,
    dims: MlaDims,
    level: Level,
    num_threads: usize,
    block_size: usize,
    q: &'a [T],
    cache: &'a [C],
    y: SharedMut<T>,
    slots: SharedMut<f32>,
    slot_len: usize,
}

/// Neighbouring tokens of a sequence in a wave.
#[derive(Clone, Copy)]
struct Segment<'a> {
    seq: Seq<'a>,
    /// Of the sequence's tokens in this step.
    first: usize,
    count: usize,
    /// Where the first stands in the wave.
    at: usize,
}

impl<'a, T: Float, C: CacheElement> Step<'a, T, C> {
    /// Runs tasks on all threads, each with a slot of scratch memory.
    fn each(&self, num_tasks: usize, task: &(dyn Fn(usize, &mut [f32]) + Sync)) {
        let next = AtomicUsize::new(0);
        pool::parallel_for(self.num_threads.min(num_tasks), &|worker| {
            // SAFETY: each worker comes once, and the slots are borrowed until all are done.
            let slot = unsafe { self.slots.slice(worker * self.slot_len..(worker + 1) * self.slot_len) };
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= num_tasks {
                    break;
                }
                task(index, slot);
            }
        });
    }

    /// Sequences that have tokens in this step, and take this form.
    fn seqs(&self, absorbed: bool) -> impl Iterator<Item = Seq<'a>> {
        let (call, block_size) = (self.call, self.block_size);
        let seqs = (0..call.ragged.num_seqs()).map(move |s| call.ragged.seq(s, block_size));
        seqs.filter(move |seq| seq.num_tokens > 0 && call.form.absorbs(seq.num_tokens) == absorbed)
    }

    fn left_out(&self, first: usize) -> usize {
        usize::from(first == 0 && self.call.first_key == FirstKey::LeftOut)
    }

    /// A head's part of a token's query, scaled.
    fn load_query(&self, token: usize, head: usize, part: Range<usize>, to: &mut [f32]) {
        let q = &self.q[(token * self.dims.num_heads + head) * self.dims.query()..][..self.dims.query()];
        to.iter_mut().zip(&q[part]).for_each(|(to, q)| *to = q.to_f32() * self.call.scale);
    }

    fn put(&self, token: usize, head: usize, values: impl Iterator<Item = f32>) {
        let start = (token * self.dims.num_heads + head) * self.dims.value;
        // SAFETY: each token and head is one task's, and y is borrowed until all are done.
        let y = unsafe { self.y.slice(start..start + self.dims.value) };
        y.iter_mut().zip(values).for_each(|(y, value)| *y = T::from_f32(value));
    }

    /// A token's entry in the cache.
    fn entry(&self, seq: &Seq<'_>, position: usize) -> &'a [C] {
        let block = seq.blocks[position / self.block_size] as usize;
        let width = self.dims.latent();
        &self.cache[(block * self.block_size + position % self.block_size) * width..][..width]
    }

    fn expand_all<W: CacheElement>(&self) {
        let tasks_of = |seq: &Seq<'_>| seq.num_tokens.div_ceil(EXPAND_ROWS) * self.dims.num_heads;
        let num_tasks = self.seqs(false).map(|seq| tasks_of(&seq)).sum();
        self.each(num_tasks, &|mut index, slot| {
            for seq in self.seqs(false) {
                if index < tasks_of(&seq) {
                    let (first, head) = (index / self.dims.num_heads * EXPAND_ROWS, index % self.dims.num_heads);
                    self.expand::<W>(&seq, head, first..seq.num_tokens.min(first + EXPAND_ROWS), slot);
                    return;
                }
                index -= tasks_of(&seq);
            }
        });
    }

    /// One head of some of a sequence's tokens in this step.
    fn expand<W: CacheElement>(&self, seq: &Seq<'_>, head: usize, tokens: Range<usize>, mut slot: &mut [f32]) {
        let (dims, num_rows) = (self.dims, tokens.len());
        let width = dims.query() + dims.value;
        let latents = part(&mut slot, SPAN * dims.rank);
        let made = part(&mut slot, SPAN * width);
        let mut rows = Rows {
            q: part(&mut slot, num_rows * dims.query()),
            acc: part(&mut slot, num_rows * dims.value),
            max: part(&mut slot, num_rows),
            sum: part(&mut slot, num_rows),
            weights: part(&mut slot, TILE_ROWS * SPAN),
            dim: dims.query(),
            value_dim: dims.value,
            sees: seq.kv_len - seq.num_tokens + tokens.start + 1,
            group: 1,
            offset: 0,
        };
        rows.clear();
        let first_token = seq.first_token + tokens.start;
        for (row, q) in rows.q.chunks_exact_mut(dims.query()).enumerate() {
            self.load_query(first_token + row, head, 0..dims.query(), q);
        }
        let up = self.call.weight.up::<W>(head);
        let end = rows.visible(num_rows - 1);
        for first in (0..end).step_by(SPAN) {
            let num_keys = SPAN.min(end - first);
            for j in 0..num_keys {
                let entry = self.entry(seq, first + j);
                let latent = &mut latents[j * dims.rank..][..dims.rank];
                latent.iter_mut().zip(entry).for_each(|(to, x)| *to = x.to_f32());
                let key = &mut made[j * width + dims.nope..][..dims.rope];
                key.iter_mut().zip(&entry[dims.rank..]).for_each(|(to, x)| *to = x.to_f32());
            }
            for (from, to, cols) in [(0, 0, dims.nope), (dims.nope, dims.query(), dims.value)] {
                self.product(Product {
                    rows: num_keys,
                    a: latents,
                    of_a: dims.rank,
                    b: &up[from..],
                    of_b: dims.expanded(),
                    count: dims.rank,
                    c: &mut made[to..],
                    of_c: width,
                    cols,
                });
            }
            let keys = Keys { runs: [&*made, &[], &[], &[]], run_len: SPAN, stride: width, value_at: dims.query() };
            let left_out = self.left_out(first);
            // SAFETY: `level` is of this CPU.
            unsafe { self.level.run(Span { keys, first, left_out, rows: &mut rows }) }
        }
        for row in 0..num_rows {
            let inverse = 1.0 / rows.sum[row];
            self.put(first_token + row, head, rows.acc[row * dims.value..].iter().map(|acc| acc * inverse));
        }
    }

    fn absorb_all<W: CacheElement>(&self, wave: &mut [f32]) {
        let empty = Seq { first_token: 0, num_tokens: 0, kv_len: 0, blocks: &[] };
        let mut segments = [Segment { seq: empty, first: 0, count: 0, at: 0 }; WAVE];
        let (mut num_segments, mut num_tokens) = (0, 0);
        for seq in self.seqs(true) {
            let mut first = 0;
            while first < seq.num_tokens {
                let count = (seq.num_tokens - first).min(WAVE - num_tokens);
                segments[num_segments] = Segment { seq, first, count, at: num_tokens };
                (num_segments, num_tokens, first) = (num_segments + 1, num_tokens + count, first + count);
                if num_tokens == WAVE {
                    self.absorb::<W>(&segments[..num_segments], num_tokens, wave);
                    (num_segments, num_tokens) = (0, 0);
                }
            }
        }
        if num_tokens > 0 {
            self.absorb::<W>(&segments[..num_segments], num_tokens, wave);
        }
    }

    /// One wave, `[heads, tokens, latent]`.
    fn absorb<W: CacheElement>(&self, segments: &[Segment<'_>], num_tokens: usize, wave: &mut [f32]) {
        let (dims, width) = (self.dims, self.dims.latent());
        let of_head = num_tokens * width;
        let wave = SharedMut::new(wave);
        let token_of = |at: usize| {
            let segment = &segments[segments.partition_point(|segment| segment.at <= at) - 1];
            segment.seq.first_token + segment.first + at - segment.at
        };
        self.each(dims.num_heads, &|head, slot| {
            // SAFETY: each head comes once, and the wave is borrowed until all are done.
            let queries = unsafe { wave.slice(head * of_head..(head + 1) * of_head) };
            for (tile, queries) in queries.chunks_mut(TILE_ROWS * width).enumerate() {
                let rows = queries.len() / width;
                for row in 0..rows {
                    let token = token_of(tile * TILE_ROWS + row);
                    self.load_query(token, head, 0..dims.nope, &mut slot[row * dims.nope..][..dims.nope]);
                    let turned = &mut queries[row * width + dims.rank..][..dims.rope];
                    self.load_query(token, head, dims.nope..dims.query(), turned);
                }
                self.product(Product {
                    rows,
                    a: slot,
                    of_a: dims.nope,
                    b: self.call.weight.down::<W>(head),
                    of_b: dims.rank,
                    count: dims.nope,
                    c: queries,
                    of_c: width,
                    cols: dims.rank,
                });
            }
        });

        // Few rows are cut into smaller tiles, so that all threads have some.
        let most = (num_tokens * dims.num_heads).div_ceil(2 * self.num_threads).clamp(4, WALK_ROWS);
        let tiles_of = |segment: &Segment<'_>| (segment.count * dims.num_heads).div_ceil(most);
        let num_tiles = segments.iter().map(tiles_of).sum();
        self.each(num_tiles, &|mut index, slot| {
            for segment in segments {
                if index < tiles_of(segment) {
                    let first = index * most;
                    let rows = first..(segment.count * dims.num_heads).min(first + most);
                    self.walk(segment, rows, num_tokens, &wave, slot);
                    return;
                }
                index -= tiles_of(segment);
            }
        });

        self.each(dims.num_heads, &|head, slot| {
            // SAFETY: as above.
            let results = unsafe { wave.slice(head * of_head..(head + 1) * of_head) };
            for (tile, results) in results.chunks(TILE_ROWS * width).enumerate() {
                let rows = results.len() / width;
                self.product(Product {
                    rows,
                    a: results,
                    of_a: width,
                    b: &self.call.weight.up::<W>(head)[dims.nope..],
                    of_b: dims.expanded(),
                    count: dims.rank,
                    c: slot,
                    of_c: dims.value,
                    cols: dims.value,
                });
                for row in 0..rows {
                    let values = slot[row * dims.value..].iter().copied();
                    self.put(token_of(tile * TILE_ROWS + row), head, values);
                }
            }
        });
    }

    /// Walks the latents for some (token, head) pairs of a segment; their results take the place of their queries in the wave.
    fn walk(
        &self,
        segment: &Segment<'_>,
        pairs: Range<usize>,
        num_tokens: usize,
        wave: &SharedMut<f32>,
        mut slot: &mut [f32],
    ) {
        let (dims, width, num_rows) = (self.dims, self.dims.latent(), pairs.len());
        let seq = &segment.seq;
        let place = |row: usize| {
            let (at, head) = (segment.at + (pairs.start + row) / dims.num_heads, (pairs.start + row) % dims.num_heads);
            (head * num_tokens + at) * width
        };
        let mut rows = Rows {
            q: part(&mut slot, num_rows * width),
            acc: part(&mut slot, num_rows * dims.rank),
            max: part(&mut slot, num_rows),
            sum: part(&mut slot, num_rows),
            weights: part(&mut slot, TILE_ROWS * SPAN),
            dim: width,
            value_dim: dims.rank,
            sees: seq.kv_len - seq.num_tokens + segment.first + pairs.start / dims.num_heads + 1,
            group: dims.num_heads,
            offset: pairs.start % dims.num_heads,
        };
        rows.clear();
        for (row, q) in rows.q.chunks_exact_mut(width).enumerate() {
            // SAFETY: each pair is one tile's, and the wave is borrowed until all are done.
            q.copy_from_slice(unsafe { wave.slice(place(row)..place(row) + width) });
        }
        let run_len = SPAN.min(self.block_size);
        let end = rows.visible(num_rows - 1);
        for first in (0..end).step_by(SPAN) {
            let mut runs: [&[C]; SPAN / 16] = [&[]; SPAN / 16];
            for (run, at) in runs.iter_mut().zip((first..end.min(first + SPAN)).step_by(run_len)) {
                let block = seq.blocks[at / self.block_size] as usize;
                let start = (block * self.block_size + at % self.block_size) * width;
                *run = &self.cache[start..start + run_len * width];
            }
            let keys = Keys { runs, run_len, stride: width, value_at: 0 };
            let left_out = self.left_out(first);
            // SAFETY: `level` is of this CPU.
            unsafe { self.level.run(Span { keys, first, left_out, rows: &mut rows }) }
        }
        for row in 0..num_rows {
            let inverse = 1.0 / rows.sum[row];
            // SAFETY: as above.
            let result = unsafe { wave.slice(place(row)..place(row) + dims.rank) };
            for (to, acc) in result.iter_mut().zip(&rows.acc[row * dims.rank..]) {
                *to = acc * inverse;
            }
        }
    }

    fn product<B: CacheElement>(&self, product: Product<'_, B>) {
        // SAFETY: `level` is of this CPU.
        unsafe { self.level.run(product) }
    }
}

/// The next `len` numbers of a slot.
fn part<'a>(slot: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (part, rest) = std::mem::take(slot).split_at_mut(len);
    *slot = rest;
    part
}

/// `c = a @ b`: `[rows, count]` times `[count, cols]`, rows apart as `of_a`, `of_b` and `of_c` say.
struct Product<'a, B> {
    rows: usize,
    a: &'a [f32],
    of_a: usize,
    b: &'a [B],
    of_b: usize,
    count: usize,
    c: &'a mut [f32],
    of_c: usize,
    cols: usize,
}

impl<B: CacheElement> Kernel for Product<'_, B> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let Product { rows, a, of_a, b, of_b, count, c, of_c, cols } = self;
        let last = |rows: usize, stride: usize, len: usize| (rows.max(1) - 1) * stride + len;
        let a = a[..last(rows, of_a, count)].as_ptr();
        let b = b[..last(count, of_b, cols)].as_ptr();
        let c = c[..last(rows, of_c, cols)].as_mut_ptr();
        // SAFETY: the slices hold those rows, as was just seen; the caller promises the instructions.
        unsafe { columns::<V, B, false>(rows, (a, of_a), (b, of_b), count, (c, of_c), cols) }
    }
}
