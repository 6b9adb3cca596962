//! Checks, and the split of a product over threads, rows and blocks.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::activations::{Activations, num_tiles, pack_bytes, tile_of};
use super::panel::{PANEL_LINE, Panel, Unpack};
use super::scales::EXPANDED;
use super::tile::{self, Rescale, Tile};
use super::{Format, Packed};
use crate::dtype::{DType, Float};
use crate::error::{KernelError, Result};
use crate::pool::{SharedMut, num_threads, parallel_for};
use crate::simd::{LANES, Level};
use crate::tensor::Tensor;
use crate::with_float;
use crate::workspace::Workspace;

/// Up to this many tiles of rows, weights are multiplied straight from their packed form, which is unpacked anew for each tile.
const FEW_TILES: usize = 2;

/// Inputs of a panel: 12 KiB, so that two threads on a core with 32 KiB of L1 cache both have theirs in it.
const PANEL_INPUTS: usize = 192;
/// Blocks in panels at a time, at most.
const PANEL_BLOCKS: usize = 2;
/// Tiles that go over a panel in turn: their activations stay in the L2 cache.
const PANEL_TILES: usize = 32;

/// Groups of a panel at most; the smallest group is 32.
const PANEL_GROUPS: usize = PANEL_INPUTS / 32;

/// Groups whose scales few rows read at a time: 8 KiB for a tile's blocks.
const EXPANDED_GROUPS: usize = 16;

/// Bytes of workspace that a matmul of `num_rows` rows and `inputs` inputs takes, whatever the format.
pub fn workspace_bytes(num_rows: usize, inputs: usize) -> usize {
    pack_bytes(num_rows, inputs)
}

/// `y = x @ weightᵀ`; the contract is in the ops' folders.
pub(crate) fn matmul<F: Format>(x: &Tensor, weight: &Packed<F>, y: &mut Tensor, workspace: &Workspace) -> Result<()> {
    matmul_at(Level::best(), x, weight, y, workspace)
}

/// [`matmul`] with given instructions, which must be available.
pub(crate) fn matmul_at<F: Format>(
    level: Level,
    x: &Tensor,
    weight: &Packed<F>,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    let (num_rows, _) = x.rows_cols();
    x.expect_shape(F::OP, "x", [num_rows, weight.inputs])?;
    y.expect_shape(F::OP, "y", [num_rows, weight.outputs])?;
    if num_rows == 0 {
        return Ok(());
    }
    let activations = with_float!(F::OP, "x", x.dtype(), T => Activations::pack(x.as_slice::<T>(), weight, workspace)?);
    with_float!(F::OP, "y", y.dtype(), T => {
        let y = SharedMut::new(y.as_mut_slice::<T>());
        let (rows, outputs) = (0..num_rows, 0..weight.outputs);
        Product { level, activations: &activations, weight, y: &y, rows, outputs }.run();
    });
    Ok(())
}

/// `y[i] = weight[ids[i]]`.
pub(crate) fn gather<F: Format>(weight: &Packed<F>, ids: &Tensor, y: &mut Tensor) -> Result<()> {
    const WANT: &str = "a row of the weight";
    let (_, num_ids) = ids.rows_cols();
    ids.expect_dtype(F::OP, "ids", DType::I32)?;
    ids.expect_shape(F::OP, "ids", [num_ids])?;
    y.expect_shape(F::OP, "y", [num_ids, weight.inputs])?;
    let ids = ids.as_slice::<i32>();
    if let Some(&id) = ids.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= weight.outputs)) {
        return Err(KernelError::Value { op: F::OP, arg: "id", got: i64::from(id), want: WANT });
    }
    with_float!(F::OP, "y", y.dtype(), T => {
        for (&id, y) in ids.iter().zip(y.as_mut_slice::<T>().chunks_mut(weight.inputs)) {
            weight.read_row(id as usize, y);
        }
    });
    Ok(())
}

/// Some rows of activations times some rows of a weight.
pub(super) struct Product<'a, F: Format, T> {
    pub(super) level: Level,
    pub(super) activations: &'a Activations,
    pub(super) weight: &'a Packed<F>,
    /// `[rows of the activations, outputs.len()]`.
    pub(super) y: &'a SharedMut<T>,
    /// Tiled from its start.
    pub(super) rows: Range<usize>,
    /// Need not begin or end with a block.
    pub(super) outputs: Range<usize>,
}

impl<F: Format, T: Float> Product<'_, F, T> {
    fn run(&self) {
        let (blocks, threads) = (self.blocks().len(), num_threads());
        let tiles = num_tiles(self.rows.len());
        if tiles <= FEW_TILES {
            // A chunk a thread while weights are small; more when a thread that is held up would be waited for.
            let per_thread = (self.weight.size_bytes() / (threads * 256 * 1024)).clamp(1, 8);
            let chunks = (threads * per_thread).min(blocks);
            parallel_for(chunks, &|i| self.few_rows(even(blocks, chunks, i)));
        } else {
            let row_chunks = tiles.div_ceil(PANEL_TILES);
            let chunks = (threads * 12).div_ceil(row_chunks).min(blocks);
            parallel_for(row_chunks * chunks, &|i| {
                self.many_rows(even(tiles, row_chunks, i / chunks), even(blocks, chunks, i % chunks));
            });
        }
    }

    /// Blocks that hold the outputs.
    pub(super) fn blocks(&self) -> Range<usize> {
        self.outputs.start / LANES..self.outputs.end.div_ceil(LANES)
    }

    /// All rows times `blocks`, on this thread.
    pub(super) fn run_blocks(&self, blocks: Range<usize>) {
        let tiles = num_tiles(self.rows.len());
        if tiles <= FEW_TILES {
            return self.few_rows(blocks);
        }
        let row_chunks = tiles.div_ceil(PANEL_TILES);
        for i in 0..row_chunks {
            self.many_rows(even(tiles, row_chunks, i), blocks.clone());
        }
    }

    /// All rows times `blocks`, each tile reading the packed lines.
    fn few_rows(&self, blocks: Range<usize>) {
        #[cfg(test)]
        self.weight.note_read(&blocks);
        let tiles = num_tiles(self.rows.len());
        let most_rows = self.tile_rows(tiles - 1).len();
        let num_groups = self.weight.num_groups();
        let lines_per_group = self.weight.num_lines / num_groups;
        let parts = num_groups.div_ceil(EXPANDED_GROUPS);
        let block_bytes = self.weight.block_bytes();

        let mut scales = [MaybeUninit::<f32>::uninit(); EXPANDED_GROUPS * tile::MAX_BLOCKS * EXPANDED];
        let mut first = blocks.start;
        while first < blocks.end {
            let num_blocks = tile::num_blocks(self.level, most_rows, blocks.end - first);
            // The same place in the next blocks, unless that is so far that it would push out what is in use, or not ours.
            let ahead = num_blocks * block_bytes;
            let is_last = first + num_blocks == self.blocks().end;
            let prefetch = if ahead <= 128 * 1024 && !is_last { ahead } else { 2048 };
            let mut outs = [MaybeUninit::<[f32; tile::MAX_OUT]>::uninit(); FEW_TILES];
            for part in 0..parts {
                let groups = even(num_groups, parts, part);
                self.weight.expand_scales(self.level, groups.clone(), first..first + num_blocks, &mut scales);
                for (i, out) in outs[..tiles].iter_mut().enumerate() {
                    let rows = self.tile_rows(i);
                    let (x, sums) = self.activations.tile(&rows);
                    let skipped = groups.start * lines_per_group;
                    // SAFETY: the weight holds these blocks and groups, the activations these rows; `out` has room for any tile.
                    unsafe {
                        let tile = Tile {
                            lines: self.weight.block(first).add(skipped * F::LINE_BYTES),
                            block_bytes,
                            prefetch,
                            x: x.add(skipped * F::LINE * rows.len()),
                            num_groups: groups.len(),
                            lines_per_group,
                            scales: scales.as_ptr().cast(),
                            sums: sums.wrapping_add(groups.start * rows.len()),
                            out: out.as_mut_ptr().cast(),
                            fresh: part == 0,
                        };
                        tile::run::<F>(self.level, rows.len(), num_blocks, tile);
                    }
                }
            }
            for (i, out) in outs[..tiles].iter().enumerate() {
                let rows = self.tile_rows(i);
                // SAFETY: the tile has written what these rows and blocks take.
                let out = unsafe { std::slice::from_raw_parts(out.as_ptr().cast(), rows.len() * num_blocks * LANES) };
                self.store(rows, first, num_blocks, out);
            }
            first += num_blocks;
        }
    }

    /// Tiles `tiles` times `blocks`, through panels.
    fn many_rows(&self, tiles: Range<usize>, blocks: Range<usize>) {
        #[cfg(test)]
        self.weight.note_read(&blocks);
        let num_groups = self.weight.num_groups();
        let inputs = self.weight.num_lines * F::LINE;
        // A panel holds whole groups, or a part of the only one.
        let grouped = num_groups > 1;
        let unit = if grouped { inputs / num_groups } else { super::PAD };
        let units = inputs / unit;
        let parts = units.div_ceil(PANEL_INPUTS / unit);
        let most_rows = tiles.clone().map(|tile| self.tile_rows(tile).len()).max().unwrap_or(1);

        let mut panel = MaybeUninit::<[f32; PANEL_INPUTS * LANES * PANEL_BLOCKS]>::uninit();
        let mut scales = [MaybeUninit::<f32>::uninit(); PANEL_GROUPS * PANEL_BLOCKS * EXPANDED];
        let mut outs = [MaybeUninit::<[f32; tile::MAX_OUT]>::uninit(); PANEL_TILES];
        let mut first = blocks.start;
        while first < blocks.end {
            let num_blocks = tile::num_blocks(self.level, most_rows, blocks.end - first).min(PANEL_BLOCKS);
            for part in 0..parts {
                let units = even(units, parts, part);
                let inputs = units.start * unit..units.end * unit;
                let groups = if grouped { units } else { 0..1 };
                self.weight.expand_scales(self.level, groups.clone(), first..first + num_blocks, &mut scales);
                let panel_at = panel.as_mut_ptr().cast::<f32>();
                for b in 0..num_blocks {
                    // SAFETY: the line of the first input is in the block, and the panel has room for `inputs`.
                    unsafe {
                        self.level.run(Unpack::<F> {
                            lines: self.weight.block(first + b).add(inputs.start / F::LINE * F::LINE_BYTES),
                            num_lines: inputs.len() / F::LINE,
                            to: panel_at.add(b * inputs.len() * LANES),
                            _format: PhantomData,
                        });
                    }
                }
                for (i, out) in tiles.clone().zip(&mut outs) {
                    let rows = self.tile_rows(i);
                    let (x, sums) = self.activations.tile(&rows);
                    // SAFETY: as in `few_rows`; the panel was filled above for these inputs and blocks.
                    unsafe {
                        let tile = Tile {
                            lines: panel_at.cast(),
                            block_bytes: inputs.len() * LANES * 4,
                            prefetch: 0,
                            x: x.add(inputs.start * rows.len()),
                            num_groups: groups.len(),
                            lines_per_group: inputs.len() / groups.len() / PANEL_LINE,
                            scales: scales.as_ptr().cast(),
                            sums: sums.wrapping_add(groups.start * rows.len()),
                            out: out.as_mut_ptr().cast(),
                            fresh: part == 0,
                        };
                        match (F::SCALED && grouped, F::OFFSET) {
                            (false, _) => tile::run::<Panel<false, false>>(self.level, rows.len(), num_blocks, tile),
                            (true, false) => tile::run::<Panel<true, false>>(self.level, rows.len(), num_blocks, tile),
                            (true, true) => tile::run::<Panel<true, true>>(self.level, rows.len(), num_blocks, tile),
                        }
                    }
                }
            }
            for (i, out) in tiles.clone().zip(&mut outs) {
                let rows = self.tile_rows(i);
                // SAFETY: the tile has written what these rows and blocks take.
                let out =
                    unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast(), rows.len() * num_blocks * LANES) };
                if F::SCALED && !grouped {
                    let (_, sums) = self.activations.tile(&rows);
                    let (rows, scales, out) = (rows.len(), scales.as_ptr().cast(), out.as_mut_ptr());
                    // SAFETY: the level is available; `out` holds these rows and blocks, `scales` the blocks.
                    unsafe { self.level.run(Rescale { rows, num_blocks, offset: F::OFFSET, scales, sums, out }) };
                }
                self.store(rows, first, num_blocks, out);
            }
            first += num_blocks;
        }
    }

    fn tile_rows(&self, tile: usize) -> Range<usize> {
        tile_of(&self.rows, tile)
    }

    /// Rounds `out[row][block][16]` to where it belongs in y; lanes outside the outputs are dropped.
    fn store(&self, rows: Range<usize>, first_block: usize, num_blocks: usize, out: &[f32]) {
        let (first_lane, width) = (first_block * LANES, self.outputs.len());
        let start = first_lane.max(self.outputs.start);
        let end = (first_lane + num_blocks * LANES).min(self.outputs.end);
        for (row, out) in rows.zip(out.chunks(num_blocks * LANES)) {
            let at = row * width + start - self.outputs.start;
            // SAFETY: tasks own different rows or outputs, so no two write the same part.
            let y = unsafe { self.y.slice(at..at + end - start) };
            for (y, &value) in y.iter_mut().zip(&out[start - first_lane..]) {
                *y = T::from_f32(value);
            }
        }
    }
}

/// Part `i` of `total` cut into `parts` as even as can be.
pub(super) fn even(total: usize, parts: usize, i: usize) -> Range<usize> {
    i * total / parts..(i + 1) * total / parts
}
