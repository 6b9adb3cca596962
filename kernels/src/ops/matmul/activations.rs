//! Activations as the tiles read them: all rows of a tile side by side for each input.

use std::ops::Range;

use super::{Format, MAX_ROWS, PAD, Packed};
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::pool::{SharedMut, parallel_for};
use crate::simd::LANES;
use crate::tensor::Tensor;
use crate::workspace::Workspace;

/// Elements below which packing is not worth waking another thread.
const PARALLEL_ELEMENTS: usize = 32 * 1024;

/// Packed activations, and the sums of their groups where the weight has offsets.
pub(super) struct Activations {
    padded: usize,
    num_sums: usize,
    values: Tensor,
    sums: Tensor,
}

impl Activations {
    /// Rows side by side in tiles of all of `x`.
    ///
    /// # Errors
    /// `WorkspaceFull`.
    pub(super) fn pack<T: Float, F: Format>(x: &[T], weight: &Packed<F>, workspace: &Workspace) -> Result<Self> {
        let inputs = weight.inputs;
        let num_rows = x.len() / inputs;
        let mut activations = Activations::take(num_rows, weight, workspace)?;
        let packer = activations.packer(weight);
        let pack = |tile: usize| {
            // SAFETY: tiles are disjoint ranges of rows, and each comes once.
            unsafe { packer.tile::<T, F>(tile_rows(num_rows, tile), |row| &x[row * inputs..][..inputs]) };
        };
        if num_rows * activations.padded < PARALLEL_ELEMENTS {
            (0..num_tiles(num_rows)).for_each(pack);
        } else {
            parallel_for(num_tiles(num_rows), &pack);
        }
        Ok(activations)
    }

    /// As [`pack`](Self::pack), with tiles of each group apart. Row `i` is `row(i)`; groups are the ranges `group(0..num_groups)`, which
    /// must not overlap.
    ///
    /// # Errors
    /// `WorkspaceFull`.
    pub(super) fn pack_groups<'x, T: Float, F: Format>(
        num_rows: usize,
        row: &(dyn Fn(usize) -> &'x [T] + Sync),
        num_groups: usize,
        group: &(dyn Fn(usize) -> Range<usize> + Sync),
        weight: &Packed<F>,
        workspace: &Workspace,
    ) -> Result<Self> {
        let mut activations = Activations::take(num_rows, weight, workspace)?;
        let packer = activations.packer(weight);
        let pack = |i: usize| {
            let rows = group(i);
            for tile in 0..num_tiles(rows.len()) {
                // SAFETY: groups do not overlap, the tiles of one neither, and each comes once.
                unsafe { packer.tile::<T, F>(tile_of(&rows, tile), row) };
            }
        };
        if num_rows * activations.padded < PARALLEL_ELEMENTS {
            (0..num_groups).for_each(pack);
        } else {
            parallel_for(num_groups, &pack);
        }
        Ok(activations)
    }

    fn take<F: Format>(num_rows: usize, weight: &Packed<F>, workspace: &Workspace) -> Result<Self> {
        let padded = weight.inputs.next_multiple_of(PAD);
        let num_sums = weight.scales.as_ref().filter(|_| F::OFFSET).map_or(0, |scales| scales.num_groups);
        let values = workspace.take([num_rows, padded], DType::F32)?;
        let sums = workspace.take([num_rows, num_sums], DType::F32)?;
        Ok(Activations { padded, num_sums, values, sums })
    }

    fn packer<F: Format>(&mut self, weight: &Packed<F>) -> Packer {
        Packer {
            values: SharedMut::new(self.values.as_mut_slice::<f32>()),
            sums: SharedMut::new(self.sums.as_mut_slice::<f32>()),
            padded: self.padded,
            num_sums: self.num_sums,
            group: weight.scales.as_ref().map_or(weight.inputs, |scales| scales.group),
        }
    }

    /// Values and group sums of the tile with these rows.
    pub(super) fn tile(&self, rows: &Range<usize>) -> (*const f32, *const f32) {
        let values = &self.values.as_slice::<f32>()[rows.start * self.padded..];
        let sums = &self.sums.as_slice::<f32>()[rows.start * self.num_sums..];
        (values.as_ptr(), sums.as_ptr())
    }
}

/// Where tiles go.
struct Packer {
    values: SharedMut<f32>,
    sums: SharedMut<f32>,
    padded: usize,
    num_sums: usize,
    /// Inputs that share a sum.
    group: usize,
}

impl Packer {
    /// Packs the tile of `rows`; `row` gives the inputs of each.
    ///
    /// # Safety
    /// No two calls at a time may have a row in common.
    unsafe fn tile<'x, T: Float, F: Format>(&self, rows: Range<usize>, row: impl Fn(usize) -> &'x [T]) {
        // SAFETY: the caller's promise.
        let (values, sums) = unsafe {
            let values = self.values.slice(rows.start * self.padded..rows.end * self.padded);
            (values, self.sums.slice(rows.start * self.num_sums..rows.end * self.num_sums))
        };
        let num_rows = rows.len();
        // A tile has at most so many; the rest repeat the first and are not read.
        let x: [&[T]; MAX_ROWS] = std::array::from_fn(|r| row(rows.start + if r < num_rows { r } else { 0 }));
        interleave::<T, F>(&x[..num_rows], values);
        for (r, x) in x[..num_rows].iter().enumerate() {
            for (g, x) in x.chunks(self.group).enumerate().take(self.num_sums) {
                sums[g * num_rows + r] = lane_sum(x);
            }
        }
    }
}

/// Bytes of workspace that packing takes.
pub(super) fn pack_bytes(num_rows: usize, inputs: usize) -> usize {
    let values = num_rows * inputs.next_multiple_of(PAD) * 4;
    // The smallest group is 32.
    let sums = num_rows * inputs.div_ceil(32) * 4;
    values.next_multiple_of(64) + sums.next_multiple_of(64)
}

pub(super) fn num_tiles(num_rows: usize) -> usize {
    num_rows.div_ceil(MAX_ROWS)
}

/// The rows of a tile: as even as can be, since a tile of one or two rows costs as much as one of four.
pub(super) fn tile_rows(num_rows: usize, tile: usize) -> Range<usize> {
    let tiles = num_tiles(num_rows);
    tile * num_rows / tiles..(tile + 1) * num_rows / tiles
}

/// The rows of tile `tile` of a group that has the rows `group`.
pub(super) fn tile_of(group: &Range<usize>, tile: usize) -> Range<usize> {
    let rows = tile_rows(group.len(), tile);
    group.start + rows.start..group.start + rows.end
}

/// `to[k][row] = from[row][k]`, scaled as the format asks, zeros in the padding.
fn interleave<T: Float, F: Format>(from: &[&[T]], to: &mut [f32]) {
    match from.len() {
        1 => interleave_rows::<T, F, 1>(from, to),
        2 => interleave_rows::<T, F, 2>(from, to),
        3 => interleave_rows::<T, F, 3>(from, to),
        4 => interleave_rows::<T, F, 4>(from, to),
        5 => interleave_rows::<T, F, 5>(from, to),
        _ => interleave_rows::<T, F, MAX_ROWS>(from, to),
    }
}

fn interleave_rows<T: Float, F: Format, const ROWS: usize>(from: &[&[T]], to: &mut [f32]) {
    let inputs = from[0].len();
    let rows: [&[T]; ROWS] = std::array::from_fn(|r| &from[r][..inputs]);
    let mut to = to.chunks_exact_mut(PAD * ROWS);
    for (at, to) in (0..inputs / PAD).map(|i| i * PAD).zip(&mut to) {
        for r in 0..ROWS {
            let x = &rows[r][at..at + PAD];
            for j in 0..PAD {
                to[j * ROWS + r] = x[j].to_f32() * F::X_SCALES[j];
            }
        }
    }
    // What is left if inputs are padded.
    let rest = inputs / PAD * PAD;
    for to in to {
        to.fill(0.0);
        for r in 0..ROWS {
            for (j, x) in rows[r][rest..].iter().enumerate() {
                to[j * ROWS + r] = x.to_f32() * F::X_SCALES[j];
            }
        }
    }
}

/// The sum of `x`: sixteen sums of every sixteenth element, then halves added to halves.
pub(super) fn lane_sum<T: Float>(x: &[T]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for x in x.chunks(LANES) {
        for (lane, &x) in lanes.iter_mut().zip(x) {
            *lane += x.to_f32();
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}
