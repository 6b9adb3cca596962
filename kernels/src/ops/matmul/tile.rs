//! The inner loop: a few rows of activations times a few blocks of 16 outputs, accumulators in registers.

use std::marker::PhantomData;

use super::Format;
use super::scales::Layout;
use crate::simd::{F32x16, Kernel, LANES, Level};

/// Where a tile's operands lie. All pointers stand at the first input of the tile.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Lines of the first block.
    pub(super) lines: *const u8,
    /// Bytes from a block's lines to the next block's.
    pub(super) block_bytes: usize,
    /// Bytes ahead of a line at which memory is asked for; 0 if all is near.
    pub(super) prefetch: usize,
    /// `[inputs][rows]`.
    pub(super) x: *const f32,
    pub(super) num_groups: usize,
    pub(super) lines_per_group: usize,
    /// Whether `out` holds the begun sum of the only group, and not what earlier groups add up to.
    pub(super) resumes: bool,
    /// How a group's sum becomes part of an output; without it the sum is the output.
    pub(super) scales: Option<TileScales>,
    /// `[rows][blocks][16]`, added to.
    pub(super) out: *mut f32,
}

#[derive(Clone, Copy)]
pub(super) struct TileScales {
    pub(super) layout: Layout,
    /// Records of the first block.
    pub(super) records: *const u8,
    pub(super) block_bytes: usize,
    /// `[groups][rows]`, if the layout has an offset.
    pub(super) sums: *const f32,
}

/// Runs a tile of `rows` rows and `blocks` blocks.
///
/// # Safety
/// The tile's pointers must be good for that many rows and blocks, and the level available.
pub(super) unsafe fn run<F: Format>(level: Level, rows: usize, blocks: usize, tile: Tile) {
    macro_rules! instantiate {
        ($(($r:literal, $b:literal)),*) => {
            match (rows, blocks) {
                // SAFETY: passed on to the caller.
                $(($r, $b) => unsafe { level.run(Fixed::<F, $r, $b>(tile, PhantomData)) },)*
                _ => unreachable!("no tile of {rows} rows and {blocks} blocks"),
            }
        };
    }
    instantiate!(
        (1, 1),
        (1, 2),
        (1, 3),
        (1, 4),
        (1, 8),
        (2, 1),
        (2, 2),
        (2, 3),
        (2, 4),
        (3, 1),
        (3, 2),
        (4, 1),
        (4, 2),
        (5, 1),
        (5, 2),
        (6, 1),
        (6, 2)
    );
}

/// How many of `remaining` blocks the next tile of `rows` rows takes.
pub(super) fn num_blocks(level: Level, rows: usize, remaining: usize) -> usize {
    let (per_block, registers) = level.registers();
    // Three quarters of the registers accumulate, the others hold operands.
    let most = match (registers * 3 / 4) / (rows * per_block) {
        _ if rows > 2 && per_block == 4 => 1,
        n if n >= 8 && rows == 1 => 8,
        n if rows <= 2 => n.min(4),
        n => n.min(2),
    };
    let most = most.max(1);
    if most == 8 && remaining >= 8 {
        return 8;
    }
    remaining.div_ceil(remaining.div_ceil(most.min(4)))
}

/// A tile whose size the compiler knows.
struct Fixed<F, const ROWS: usize, const BLOCKS: usize>(Tile, PhantomData<F>);

impl<F: Format, const ROWS: usize, const BLOCKS: usize> Kernel for Fixed<F, ROWS, BLOCKS> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let tile = self.0;
        let (mut lines, mut x) = (tile.lines, tile.x);
        // SAFETY: the caller's pointers are good for ROWS x BLOCKS, `num_groups * lines_per_group` lines and as many inputs.
        unsafe {
            for group in 0..tile.num_groups {
                let mut sums = [[V::zero(); BLOCKS]; ROWS];
                if tile.resumes {
                    for r in 0..ROWS {
                        for b in 0..BLOCKS {
                            sums[r][b] = V::load(tile.out.add((r * BLOCKS + b) * LANES));
                        }
                    }
                }
                for _ in 0..tile.lines_per_group {
                    if tile.prefetch > 0 {
                        for b in 0..BLOCKS {
                            V::prefetch(lines.wrapping_add(b * tile.block_bytes + tile.prefetch));
                        }
                    }
                    for j in 0..F::LINE {
                        let mut weights = [V::zero(); BLOCKS];
                        for b in 0..BLOCKS {
                            weights[b] = F::decode::<V>(lines.add(b * tile.block_bytes), j);
                        }
                        for r in 0..ROWS {
                            let x = V::splat(*x.add(j * ROWS + r));
                            for b in 0..BLOCKS {
                                sums[r][b] = x.mul_add(weights[b], sums[r][b]);
                            }
                        }
                    }
                    lines = lines.add(F::LINE_BYTES);
                    x = x.add(F::LINE * ROWS);
                }
                let Some(scales) = tile.scales else {
                    for r in 0..ROWS {
                        for b in 0..BLOCKS {
                            sums[r][b].store(tile.out.add((r * BLOCKS + b) * LANES));
                        }
                    }
                    continue;
                };
                for b in 0..BLOCKS {
                    let record = b * scales.block_bytes + group * scales.layout.bytes();
                    let (scale, offset) = scales.layout.load::<V>(scales.records.add(record));
                    for r in 0..ROWS {
                        let out = tile.out.add((r * BLOCKS + b) * LANES);
                        let before = if tile.resumes { V::zero() } else { V::load(out) };
                        let mut acc = scale.mul_add(sums[r][b], before);
                        if scales.layout.has_offset() {
                            acc = offset.mul_add(V::splat(*scales.sums.add(group * ROWS + r)), acc);
                        }
                        acc.store(out);
                    }
                }
            }
        }
    }
}
