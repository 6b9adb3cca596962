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
    pub(super) num_rows: usize,
    padded: usize,
    num_sums: usize,
    values: Tensor,
    sums: Tensor,
}

impl Activations {
    /// # Errors
    /// `WorkspaceFull`.
    pub(super) fn pack<T: Float, F: Format>(x: &[T], weight: &Packed<F>, workspace: &Workspace) -> Result<Self> {
        let inputs = weight.inputs;
        let padded = inputs.next_multiple_of(PAD);
        let num_rows = x.len() / inputs;
        let group = weight.scales.as_ref().map_or(inputs, |scales| scales.group);
        let num_sums = weight.scales.as_ref().filter(|_| F::OFFSET).map_or(0, |scales| scales.num_groups);
        let mut values = workspace.take([num_rows, padded], DType::F32)?;
        let mut sums = workspace.take([num_rows, num_sums], DType::F32)?;
        let all_values = SharedMut::new(values.as_mut_slice::<f32>());
        let all_sums = SharedMut::new(sums.as_mut_slice::<f32>());
        let pack = |tile: usize| {
            let rows = tile_rows(num_rows, tile);
            // SAFETY: tiles are disjoint ranges of rows, and each comes once.
            let (values, sums) = unsafe {
                let values = all_values.slice(rows.start * padded..rows.end * padded);
                (values, all_sums.slice(rows.start * num_sums..rows.end * num_sums))
            };
            let x = &x[rows.start * inputs..rows.end * inputs];
            interleave::<T, F>(x, inputs, rows.len(), values);
            for (r, x) in x.chunks(inputs).enumerate() {
                for (g, x) in x.chunks(group).enumerate().take(num_sums) {
                    sums[g * rows.len() + r] = lane_sum(x);
                }
            }
        };
        if num_rows * padded < PARALLEL_ELEMENTS {
            (0..num_tiles(num_rows)).for_each(pack);
        } else {
            parallel_for(num_tiles(num_rows), &pack);
        }
        Ok(Activations { num_rows, padded, num_sums, values, sums })
    }

    /// Values and group sums of the tile with these rows.
    pub(super) fn tile(&self, rows: &Range<usize>) -> (*const f32, *const f32) {
        let values = &self.values.as_slice::<f32>()[rows.start * self.padded..];
        let sums = &self.sums.as_slice::<f32>()[rows.start * self.num_sums..];
        (values.as_ptr(), sums.as_ptr())
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

/// `to[k][row] = from[row][k]`, scaled as the format asks, zeros in the padding.
fn interleave<T: Float, F: Format>(from: &[T], inputs: usize, num_rows: usize, to: &mut [f32]) {
    match num_rows {
        1 => interleave_rows::<T, F, 1>(from, inputs, to),
        2 => interleave_rows::<T, F, 2>(from, inputs, to),
        3 => interleave_rows::<T, F, 3>(from, inputs, to),
        4 => interleave_rows::<T, F, 4>(from, inputs, to),
        5 => interleave_rows::<T, F, 5>(from, inputs, to),
        _ => interleave_rows::<T, F, MAX_ROWS>(from, inputs, to),
    }
}

fn interleave_rows<T: Float, F: Format, const ROWS: usize>(from: &[T], inputs: usize, to: &mut [f32]) {
    let rows: [&[T]; ROWS] = std::array::from_fn(|r| &from[r * inputs..(r + 1) * inputs]);
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
