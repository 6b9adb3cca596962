//! Unpacked weights of one block, small enough for the L1 cache.

use std::marker::PhantomData;

use super::Format;
use crate::simd::{F32x16, Kernel, LANES};

/// A panel as a format: lines of four inputs in f32, multiplied by what `F`'s activations are divided by.
pub(super) struct Panel<F>(PhantomData<F>);

// SAFETY: decode reads 64 of the line's 256 bytes for each of four inputs.
unsafe impl<F: Format> Format for Panel<F> {
    type Value = f32;

    const OP: &'static str = F::OP;
    const LINE: usize = 4;
    const LINE_BYTES: usize = 4 * LANES * 4;

    fn encode(line: &mut [u8], lane: usize, values: &[f32]) {
        for (j, value) in values.iter().enumerate() {
            line[(j * LANES + lane) * 4..][..4].copy_from_slice(&value.to_le_bytes());
        }
    }

    fn value(line: &[u8], lane: usize, j: usize) -> f32 {
        let at = (j * LANES + lane) * 4;
        f32::from_le_bytes([line[at], line[at + 1], line[at + 2], line[at + 3]])
    }

    #[inline(always)]
    unsafe fn decode<V: F32x16>(line: *const u8, j: usize) -> V {
        // SAFETY: the caller gives a whole line.
        unsafe { V::load(line.cast::<f32>().add(j * LANES)) }
    }
}

/// Fills a panel: `to[k][16]` from `num_lines` lines.
pub(super) struct Unpack<F> {
    pub(super) lines: *const u8,
    pub(super) num_lines: usize,
    pub(super) to: *mut f32,
    pub(super) _format: PhantomData<F>,
}

impl<F: Format> Kernel for Unpack<F> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        for i in 0..self.num_lines {
            // SAFETY: whoever made this gave `num_lines` lines and room for their inputs.
            unsafe {
                let line = self.lines.add(i * F::LINE_BYTES);
                V::prefetch(line.wrapping_add(1024));
                for j in 0..F::LINE {
                    F::decode::<V>(line, j).store(self.to.add((i * F::LINE + j) * LANES));
                }
            }
        }
    }
}
