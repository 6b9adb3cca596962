//! The inner loop: a few rows of activations times a few blocks of 16 outputs, accumulators in registers.

use std::marker::PhantomData;

use super::Format;
use crate::simd::{F32x16, Kernel, LANES, Level};

/// Blocks of a tile at most.
pub(super) const MAX_BLOCKS: usize = 4;

/// Numbers that a tile puts out at most.
pub(super) const MAX_OUT: usize = super::MAX_ROWS * 2 * LANES;

/// Where a tile's operands lie. Pointers stand at the first input of the tile.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Lines of the first block.
    pub(super) lines: *const u8,
    /// Bytes from a block's lines to the next block's.
    pub(super) block_bytes: usize,
    /// Bytes ahead of a line at which memory is asked for.
    pub(super) prefetch: usize,
    /// `[inputs][rows]`.
    pub(super) x: *const f32,
    /// 1 if the format has no scales.
    pub(super) num_groups: usize,
    /// At least 1.
    pub(super) lines_per_group: usize,
    /// `[groups][blocks]` of 16 scales and 16 offsets, if the format has scales.
    pub(super) scales: *const f32,
    /// Sums of x, `[groups][rows]`, if the format has offsets.
    pub(super) sums: *const f32,
    /// `[rows][blocks][16]`.
    pub(super) out: *mut f32,
    /// Whether `out` holds nothing yet; else it is added to.
    pub(super) fresh: bool,
}

/// Runs a tile of `rows` rows and `blocks` blocks.
///
/// # Safety
/// The tile's pointers must be good for that many rows and blocks, and the level available.
pub(super) unsafe fn run<F: Format>(level: Level, rows: usize, blocks: usize, tile: Tile) {
    macro_rules! instantiate {
        ($($rows:literal x $blocks:literal),*) => {
            match (rows, blocks) {
                // SAFETY: passed on to the caller.
                $(($rows, $blocks) => unsafe { level.run(Fixed::<F, $rows, $blocks>(tile, PhantomData)) },)*
                _ => unreachable!("no tile of {rows} rows and {blocks} blocks"),
            }
        };
    }
    instantiate!(1 x 1, 1 x 2, 1 x 3, 1 x 4, 2 x 1, 2 x 2, 3 x 1, 3 x 2, 4 x 1, 4 x 2, 5 x 1, 5 x 2, 6 x 1, 6 x 2);
}

/// How many of `remaining` blocks the next tile of `rows` rows takes.
pub(super) fn num_blocks(level: Level, rows: usize, remaining: usize) -> usize {
    // As even as can be: one block alone is too little to hide the latency of its additions.
    remaining.div_ceil(remaining.div_ceil(most_blocks(level.fit(), rows)))
}

/// Blocks of the largest tile of `rows` rows, if the registers hold `fit` times sixteen f32: five eighths of them accumulate,
/// the others hold operands.
const fn most_blocks(fit: usize, rows: usize) -> usize {
    match (fit * 5 / 8 / rows, rows) {
        (MAX_BLOCKS.., 1) => MAX_BLOCKS,
        (2.., _) => 2,
        _ => 1,
    }
}

/// A tile whose size the compiler knows.
struct Fixed<F, const ROWS: usize, const BLOCKS: usize>(Tile, PhantomData<F>);

impl<F: Format, const ROWS: usize, const BLOCKS: usize> Kernel for Fixed<F, ROWS, BLOCKS> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        // Tiles that are never planned for these instructions need no code. Here and below `const` keeps what is not used from
        // ever being compiled.
        if const { BLOCKS > most_blocks(V::FIT, ROWS) } {
            return;
        }
        let tile = self.0;
        let (mut lines, mut x, mut scales, mut x_sums) = (tile.lines, tile.x, tile.scales, tile.sums);
        let mut fresh = tile.fresh;
        // SAFETY: the caller's pointers are good for ROWS x BLOCKS, `num_groups * lines_per_group` lines and as many inputs.
        unsafe {
            for _ in 0..tile.num_groups {
                let mut sums = [[V::zero(); BLOCKS]; ROWS];
                if const { !F::SCALED } && !fresh {
                    for r in 0..ROWS {
                        for b in 0..BLOCKS {
                            sums[r][b] = V::load(tile.out.add((r * BLOCKS + b) * LANES));
                        }
                    }
                }
                let mut remaining = tile.lines_per_group;
                loop {
                    if const { F::PREFETCH } {
                        for b in 0..BLOCKS {
                            V::prefetch(lines.wrapping_add(b * tile.block_bytes + tile.prefetch));
                        }
                    }
                    // Written out, so that the compiler knows an input's place in the line.
                    lines = input::<V, F, 0, ROWS, BLOCKS>(lines, tile.block_bytes, x, &mut sums);
                    lines = input::<V, F, 1, ROWS, BLOCKS>(lines, tile.block_bytes, x, &mut sums);
                    lines = input::<V, F, 2, ROWS, BLOCKS>(lines, tile.block_bytes, x, &mut sums);
                    lines = input::<V, F, 3, ROWS, BLOCKS>(lines, tile.block_bytes, x, &mut sums);
                    lines = input::<V, F, 4, ROWS, BLOCKS>(lines, tile.block_bytes, x, &mut sums);
                    lines = input::<V, F, 5, ROWS, BLOCKS>(lines, tile.block_bytes, x, &mut sums);
                    lines = input::<V, F, 6, ROWS, BLOCKS>(lines, tile.block_bytes, x, &mut sums);
                    lines = input::<V, F, 7, ROWS, BLOCKS>(lines, tile.block_bytes, x, &mut sums);
                    lines = lines.add(F::LINE_BYTES);
                    x = x.add(F::LINE * ROWS);
                    remaining -= 1;
                    if remaining == 0 {
                        break;
                    }
                }
                for r in 0..ROWS {
                    for b in 0..BLOCKS {
                        let out = tile.out.add((r * BLOCKS + b) * LANES);
                        let mut acc = sums[r][b];
                        if const { F::SCALED } {
                            let before = if fresh { V::zero() } else { V::load(out) };
                            acc = V::load(scales.add(b * 2 * LANES)).mul_add(acc, before);
                        }
                        if const { F::OFFSET } {
                            acc = V::load(scales.add((b * 2 + 1) * LANES)).mul_add(V::splat(*x_sums.add(r)), acc);
                        }
                        acc.store(out);
                    }
                }
                fresh = false;
                scales = scales.wrapping_add(BLOCKS * 2 * LANES);
                x_sums = x_sums.wrapping_add(ROWS);
            }
        }
    }
}

/// Adds the products of input `J` of a line, if lines have so many. Returns `lines`.
///
/// # Safety
/// As [`Fixed::run`].
#[inline(always)]
unsafe fn input<V: F32x16, F: Format, const J: usize, const ROWS: usize, const BLOCKS: usize>(
    lines: *const u8,
    block_bytes: usize,
    x: *const f32,
    sums: &mut [[V; BLOCKS]; ROWS],
) -> *const u8 {
    if const { J >= F::LINE } {
        return lines;
    }
    // SAFETY: passed on to the caller.
    unsafe {
        if const { BLOCKS == 1 } {
            let weights = F::decode::<V, J>(lines);
            for r in 0..ROWS {
                sums[r][0] = V::splat(*x.add(J * ROWS + r)).mul_add(weights, sums[r][0]);
            }
        } else {
            let mut xs = [V::zero(); ROWS];
            for r in 0..ROWS {
                xs[r] = V::splat(*x.add(J * ROWS + r));
            }
            for b in 0..BLOCKS {
                let weights = F::decode::<V, J>(lines.add(b * block_bytes));
                for r in 0..ROWS {
                    sums[r][b] = xs[r].mul_add(weights, sums[r][b]);
                }
            }
        }
        // The next input is not begun before this one is done. Else the compiler would read all that a line needs at once, and
        // for want of registers put it, or the sums, on the stack.
        let mut lines = lines;
        for r in 0..ROWS {
            for b in 0..BLOCKS {
                (sums[r][b], lines) = sums[r][b].before(lines);
            }
        }
        lines
    }
}

/// Scales the sums of rows that are one group, as a tile does at a group's end.
pub(super) struct Rescale {
    pub(super) rows: usize,
    pub(super) num_blocks: usize,
    pub(super) offset: bool,
    /// As [`Tile::scales`].
    pub(super) scales: *const f32,
    /// As [`Tile::sums`].
    pub(super) sums: *const f32,
    /// `[rows][blocks][16]`.
    pub(super) out: *mut f32,
}

impl Kernel for Rescale {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        for r in 0..self.rows {
            for b in 0..self.num_blocks {
                // SAFETY: the caller's pointers are good for these rows and blocks.
                unsafe {
                    let scales = self.scales.add(b * 2 * LANES);
                    let out = self.out.add((r * self.num_blocks + b) * LANES);
                    let mut acc = V::load(scales).mul_add(V::load(out), V::zero());
                    if self.offset {
                        acc = V::load(scales.add(LANES)).mul_add(V::splat(*self.sums.add(r)), acc);
                    }
                    acc.store(out);
                }
            }
        }
    }
}
