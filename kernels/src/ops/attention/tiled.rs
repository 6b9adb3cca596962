//! The fast path's plan: tiles over the threads, and for few tokens with long contexts also splits.

use std::cell::RefCell;
use std::ops::Range;

use super::products::CacheElement;
use super::tile::{Join, Layer, Scratch, TILE_ROWS, Tile, Walk};
use super::{FirstKey, Heads, Ragged, SPLIT, WORKSPACE_BYTES};
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::pool::{self, SharedMut};
use crate::simd::Level;
use crate::tensor::Tensor;
use crate::workspace::Workspace;

/// Tiles a thread should have before splits are worth their merging.
const TILES_PER_THREAD: usize = 4;

thread_local! {
    /// One a thread, so that a task neither allocates nor clears it.
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch::NEW) };
}

pub(super) fn attention<T: Float, C: CacheElement>(
    qkv: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ragged: &Ragged<'_>,
    heads: Heads,
    first_key: FirstKey,
    scale: f32,
    y: &mut Tensor,
    workspace: &Workspace,
    level: Level,
    num_threads: usize,
) -> Result<()> {
    let block_size = k.dims()[2];
    let layer = Layer { k: k.as_slice::<C>(), v: v.as_slice::<C>(), block_size, heads, first_key };
    let qkv = qkv.as_slice::<T>();
    let num_seqs = ragged.num_seqs();
    // Where each sequence's tiles begin; one KV head has all of them.
    let mut starts = workspace.take([num_seqs + 1], DType::I32)?;
    let starts = starts.as_mut_slice::<i32>();
    let mut num_tiles = 0;
    let (mut num_splits, mut max_rows) = (0, 0);
    for s in 0..num_seqs {
        let seq = ragged.seq(s, block_size);
        starts[s] = num_tiles as i32;
        num_tiles += (seq.num_tokens * heads.group()).div_ceil(TILE_ROWS);
        max_rows = max_rows.max(seq.num_tokens * heads.group()).min(TILE_ROWS);
        num_splits = num_splits.max(seq.kv_len.div_ceil(SPLIT));
    }
    starts[num_seqs] = num_tiles as i32;
    let tile = |index: usize| {
        let (at, kv_head) = (index / heads.num_kv_heads, index % heads.num_kv_heads);
        let s = starts.partition_point(|&start| start as usize <= at) - 1;
        let seq = ragged.seq(s, block_size);
        let first = (at - starts[s] as usize) * TILE_ROWS;
        Tile { seq, kv_head, rows: first..(seq.num_tokens * heads.group()).min(first + TILE_ROWS) }
    };
    let num_tasks = num_tiles * heads.num_kv_heads;

    // A task's share of `parts`: for each row the values, the maximum and the sum.
    let part_len = max_rows * (heads.head_dim + 2);
    let parts_bytes = num_tasks * num_splits * part_len * size_of::<f32>();
    let room = WORKSPACE_BYTES.saturating_sub((num_seqs + 1) * size_of::<i32>() + 128);
    let few = num_threads > 1 && num_tasks < TILES_PER_THREAD * num_threads;

    let out = SharedMut::new(y.as_mut_slice::<T>());
    let put = |tile: &Tile<'_>, scratch: &Scratch| {
        let dim = heads.head_dim;
        for row in 0..tile.rows.len() {
            let (token, head) = tile.place(row, heads);
            let start = (token * heads.num_heads + head) * dim;
            // SAFETY: a row of a tile is a token and head of its own, and y is borrowed until the end.
            let y = unsafe { out.slice(start..start + dim) };
            let inverse = 1.0 / scratch.total.sum[row];
            for (y, acc) in y.iter_mut().zip(&scratch.total.acc[row * dim..][..dim]) {
                *y = T::from_f32(acc * inverse);
            }
        }
    };

    if !(few && num_splits > 1 && parts_bytes <= room) {
        pool::parallel_for(num_tasks, &|index| {
            // The last tiles of a prompt see most: begin with them, so that no thread ends with a long one.
            let tile = tile(num_tasks - 1 - index);
            let splits = 0..tile.visible(tile.rows.len() - 1, heads).div_ceil(SPLIT);
            SCRATCH.with_borrow_mut(|scratch| {
                tile.load(qkv, heads, scale, scratch);
                walk(level, layer, &tile, splits, scratch);
                put(&tile, scratch);
            });
        });
        return Ok(());
    }

    let mut parts = workspace.take([num_tasks * num_splits * part_len], DType::F32)?;
    let parts = parts.as_mut_slice::<f32>();
    let shared = SharedMut::new(parts);
    pool::parallel_for(num_tasks * num_splits, &|index| {
        let (task, split) = (index / num_splits, index % num_splits);
        let tile = tile(task);
        if tile.visible(tile.rows.len() - 1, heads) <= split * SPLIT {
            return;
        }
        // SAFETY: each index has its own part, and `parts` is borrowed until all are done.
        let part = unsafe { shared.slice(index * part_len..(index + 1) * part_len) };
        SCRATCH.with_borrow_mut(|scratch| {
            tile.load(qkv, heads, scale, scratch);
            walk(level, layer, &tile, split..split + 1, scratch);
            scratch.split.store(tile.rows.len(), heads.head_dim, part);
        });
    });
    let parts = &*parts;
    pool::parallel_for(num_tasks, &|task| {
        let tile = tile(task);
        let parts = &parts[task * num_splits * part_len..][..num_splits * part_len];
        SCRATCH.with_borrow_mut(|scratch| {
            let join = Join { tile: &tile, heads, parts, part_len, total: &mut scratch.total };
            // SAFETY: `level` is of this CPU.
            unsafe { level.run(join) }
            put(&tile, scratch);
        });
    });
    Ok(())
}

fn walk<C: CacheElement>(
    level: Level,
    layer: Layer<'_, C>,
    tile: &Tile<'_>,
    splits: Range<usize>,
    scratch: &mut Scratch,
) {
    // SAFETY: `level` is of this CPU, and `attention` has checked shapes, lengths and block tables.
    unsafe { level.run(Walk { layer, tile: tile.clone(), splits, scratch }) }
}
