//! Unpacked weights of one block, small enough for the L1 cache.

use std::marker::PhantomData;

use super::Format;
use crate::simd::{F32x16, Kernel, LANES};

/// Inputs of a panel's line.
pub(super) const PANEL_LINE: usize = 4;

/// A panel as a format: lines of four inputs in f32, multiplied by what the activations of the format it came from are
/// divided by. `SCALED` and `OFFSET` are of that format, or false where scales come after the last panel.
pub(super) struct Panel<const SCALED: bool, const OFFSET: bool>;

// SAFETY: decode reads 64 of the line's 256 bytes for each of four inputs.
unsafe impl<const SCALED: bool, const OFFSET: bool> Format for Panel<SCALED, OFFSET> {
    type Value = f32;

    const OP: &'static str = "matmul";
    const SCALED: bool = SCALED;
    const OFFSET: bool = OFFSET;
    const PREFETCH: bool = false;
    const LINE: usize = PANEL_LINE;
    const LINE_BYTES: usize = PANEL_LINE * LANES * 4;

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
    unsafe fn decode<V: F32x16, const J: usize>(line: *const u8) -> V {
        // SAFETY: the caller gives a whole line.
        unsafe { V::load(line.cast::<f32>().add(J * LANES)) }
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
                let to = self.to.add(i * F::LINE * LANES);
                unpack::<V, F, 0>(line, to);
                unpack::<V, F, 1>(line, to);
                unpack::<V, F, 2>(line, to);
                unpack::<V, F, 3>(line, to);
                unpack::<V, F, 4>(line, to);
                unpack::<V, F, 5>(line, to);
                unpack::<V, F, 6>(line, to);
                unpack::<V, F, 7>(line, to);
            }
        }
    }
}

/// Writes out input `J` of a line, if lines have so many.
///
/// # Safety
/// `line` must point to a line, `to` to room for its inputs, and the CPU must have the instructions of `V`.
#[inline(always)]
unsafe fn unpack<V: F32x16, F: Format, const J: usize>(line: *const u8, to: *mut f32) {
    if const { J < F::LINE } {
        // SAFETY: passed on to the caller.
        unsafe { F::decode::<V, J>(line).store(to.add(J * LANES)) }
    }
}
