//! Products with int4 weights: unsigned nibbles with a scale, and maybe a zero point or minimum, for each group of a row.
//!
//! The AWQ, GPTQ and GGUF (Q4_0, Q4_1) formats all map to it exactly.

use super::matmul::{self, Format, Groups, Packed, Rows, Scales};
use crate::device::Device;
use crate::error::{KernelError, Result};
use crate::simd::F32x16;
use crate::tensor::Tensor;
use crate::workspace::Workspace;

pub use super::matmul::Offset;

/// A weight `[out, in]` of int4, scales and offsets, laid out for the device it is on: `w = scale * q + offset`, q in 0..=15,
/// the offset one of [`Offset`]; symmetric weights are `scale * (q - 8)`.
pub struct Int4Weight {
    packed: Packed<Int4>,
}

impl Int4Weight {
    /// A weight of zeros. `group` is how many inputs share a scale: 32, 64 or 128, or `None` for all of a row.
    ///
    /// # Errors
    /// `Value` for another group, `NotMultiple` if it does not divide `inputs`, `OutOfMemory`.
    pub fn new(device: &Device, out: usize, inputs: usize, group: Option<usize>, offset: Offset) -> Result<Self> {
        let scales = Scales::new(device, Int4::OP, out, inputs, group, offset, Int4::CENTER)?;
        Ok(Int4Weight { packed: Packed::new(device, out, inputs, Some(scales))? })
    }

    /// Overwrites whole rows from `first` on: `q` is `[rows, in]`, one value a byte; `scales` is `[rows, groups]`, and so is
    /// `offsets`, zero points or minima, which is empty if symmetric. Both are kept in f16 while all are exact in it, else in
    /// f32.
    ///
    /// # Errors
    /// `NotMultiple` if `q` is no whole rows, `Value` if they pass the last row or a q is above 15, `Shape` if `scales` or
    /// `offsets` do not go with them.
    pub fn write_rows(&mut self, first: usize, q: &[u8], scales: &[f32], offsets: &[f32]) -> Result<()> {
        if let Some(&q) = q.iter().find(|&&q| q > 15) {
            let (op, arg, want) = (Int4::OP, "q", "at most 15");
            return Err(KernelError::Value { op, arg, got: q.into(), want });
        }
        self.packed.write_scaled_rows(first, q, scales, offsets)
    }

    /// Dequantizes a row.
    ///
    /// # Panics
    /// If there is no such row, or `to` is not as long as one.
    pub fn read_row(&self, row: usize, to: &mut [f32]) {
        self.packed.read_row(row, to);
    }

    /// `[out, in]`.
    pub fn dims(&self) -> [usize; 2] {
        self.packed.dims()
    }

    /// Memory it takes.
    pub fn size_bytes(&self) -> usize {
        self.packed.size_bytes()
    }

    pub fn device(&self) -> &Device {
        self.packed.device()
    }
}

/// `y = x @ weightᵀ`.
///
/// | argument | shape         | dtype     | |
/// |----------|---------------|-----------|-|
/// | `x`      | `[rows, in]`  | f32, bf16 | read |
/// | `weight` | `[out, in]`   | int4      | read |
/// | `y`      | `[rows, out]` | f32, bf16 | written |
///
/// Sums of `x * q` in f32 for each group in the order of its inputs, then scaled and added up (see
/// [`matmul`](super::matmul)); takes [`workspace_bytes`](super::matmul::workspace_bytes).
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree, `WorkspaceFull`.
pub fn matmul(x: &Tensor, weight: &Int4Weight, y: &mut Tensor, workspace: &Workspace) -> Result<()> {
    matmul::matmul(x, &weight.packed, y, workspace)
}

/// `y[i] = x[row of pair i] @ (its expert's part of weight)ᵀ`: products of a mixture of experts (see [`moe`](super::moe)).
///
/// | argument | shape                    | dtype     | |
/// |----------|--------------------------|-----------|-|
/// | `x`      | `[rows, in]`             | f32, bf16 | read: a row for each token or each pair, as `rows` says |
/// | `weight` | `[experts * inner, in]`  | int4      | read, of the experts that were chosen |
/// | `y`      | `[pairs, inner]`         | f32, bf16 | written, in the order of `groups.pairs` |
///
/// Each row has the bits of [`matmul`] with its expert alone; takes
/// [`matmul_workspace_bytes`](super::moe::matmul_workspace_bytes).
///
/// # Errors
/// As [`matmul`], `NotMultiple` if experts do not divide the weight.
pub fn matmul_experts(
    x: &Tensor,
    rows: Rows,
    weight: &Int4Weight,
    groups: &Groups,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    matmul::matmul_grouped(x, rows, &weight.packed, groups, y, workspace)
}

/// `y[i] = weight[ids[i]]`, dequantized: the embedding of a tied head.
///
/// | argument | shape       | dtype     | |
/// |----------|-------------|-----------|-|
/// | `weight` | `[out, in]` | int4      | read |
/// | `ids`    | `[rows]`    | i32       | read |
/// | `y`      | `[rows, in]`| f32, bf16 | written |
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree, `Value` if an id is no row.
pub fn gather(weight: &Int4Weight, ids: &Tensor, y: &mut Tensor) -> Result<()> {
    matmul::gather(&weight.packed, ids, y)
}

/// Lines of 16 words, each the nibbles of eight inputs, the first in the lowest bits.
pub(crate) struct Int4;

// SAFETY: decode reads the line's 64 bytes.
unsafe impl Format for Int4 {
    type Value = u8;

    const OP: &'static str = "matmul_int4";
    const SCALED: bool = true;
    const OFFSET: bool = true;
    const LINE: usize = 8;
    const CENTER: f32 = 8.0;

    // A nibble is not shifted down before it becomes a float: activations are divided by 16^j instead, which is exact. The
    // last one stands where the sign would be and is shifted by one place.
    const X_SCALES: [f32; 8] = {
        let mut scales = [1.0; 8];
        let mut j = 1;
        while j < 8 {
            scales[j] = if j == 7 { scales[6] } else { scales[j - 1] / 16.0 };
            j += 1;
        }
        scales
    };

    fn encode(line: &mut [u8], lane: usize, values: &[u8]) {
        let word = values.iter().enumerate().fold(0u32, |word, (j, &q)| word | u32::from(q) << (4 * j));
        line[lane * 4..][..4].copy_from_slice(&word.to_le_bytes());
    }

    fn value(line: &[u8], lane: usize, j: usize) -> f32 {
        f32::from(line[lane * 4 + j / 2] >> (j % 2 * 4) & 0xF)
    }

    #[inline(always)]
    unsafe fn decode<V: F32x16, const J: usize>(line: *const u8) -> V {
        // SAFETY: the caller gives a whole line.
        unsafe {
            let words = V::load_words(line);
            if const { J == 7 } {
                V::masked(V::shift_4(words), 0xF << 24)
            } else {
                V::masked(words, const { 0xF << (4 * J % 32) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::dtype::DType;
    use crate::ops::matmul::testing::{self, random};

    const OFFSETS: [Offset; 3] = [Offset::Symmetric, Offset::ZeroPoint, Offset::Min];

    struct Plain {
        q: Vec<u8>,
        scales: Vec<f32>,
        offsets: Vec<f32>,
    }

    /// A weight, and what was written to it.
    fn weight(out: usize, inputs: usize, group: Option<usize>, offset: Offset, half: bool) -> (Int4Weight, Plain) {
        let q: Vec<u8> = random(out * inputs, 5).into_iter().map(|v| ((v + 1.0) * 8.0) as u8).collect();
        let num_groups = out * inputs / group.unwrap_or(inputs);
        let round = |s: f32| if half { f16::from_f32(s).to_f32() } else { s };
        let scales: Vec<f32> = random(num_groups, 6).into_iter().map(|s| round(s * 0.1)).collect();
        let offsets: Vec<f32> = match offset {
            Offset::Symmetric => Vec::new(),
            Offset::ZeroPoint => random(num_groups, 8).into_iter().map(|v| ((v + 1.0) * 8.0).floor()).collect(),
            Offset::Min => random(num_groups, 9).into_iter().map(round).collect(),
        };
        let mut weight = Int4Weight::new(&Device::Cpu, out, inputs, group, offset).unwrap();
        weight.write_rows(0, &q, &scales, &offsets).unwrap();
        (weight, Plain { q, scales, offsets })
    }

    #[test]
    fn every_path_has_the_bits_of_the_reference() {
        for offset in OFFSETS {
            for (out, inputs, group, half) in [
                (1, 1, None, true),
                (17, 33, None, false),
                (100, 576, None, true),
                (33, 32, Some(32), true),
                (40, 576, Some(64), false),
                (16, 640, Some(128), true),
                (48, 1536, Some(32), true),
            ] {
                testing::check(&weight(out, inputs, group, offset, half).0.packed);
            }
        }
    }

    #[test]
    fn rows_are_what_the_offset_says() {
        for offset in OFFSETS {
            let (weight, Plain { q, scales, offsets }) = weight(20, 64, Some(32), offset, true);
            let ids = Tensor::from_slice(&Device::Cpu, "ids", &[19, 3], [2]).unwrap();
            let mut y = Tensor::zeros(&Device::Cpu, "y", [2, 64], DType::F32).unwrap();
            gather(&weight, &ids, &mut y).unwrap();
            for (y, row) in y.as_slice::<f32>().chunks(64).zip([19, 3]) {
                for k in 0..64 {
                    let (group, q) = (row * 2 + k / 32, f32::from(q[row * 64 + k]));
                    let want = match offset {
                        Offset::Symmetric => scales[group] * (q - 8.0),
                        Offset::ZeroPoint => scales[group] * (q - offsets[group]),
                        Offset::Min => scales[group] * q + offsets[group],
                    };
                    assert_eq!(y[k], want, "{offset:?}");
                }
            }
        }
    }

    #[test]
    fn a_group_of_q4_1_costs_five_bits_a_weight() {
        let (weight, _) = weight(64, 576, Some(32), Offset::Min, true);
        assert_eq!(weight.size_bytes() * 8, 64 * 576 * 5);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let new = |inputs, group| {
            let weight = Int4Weight::new(&Device::Cpu, 4, inputs, Some(group), Offset::Min);
            weight.err().unwrap().to_string()
        };
        assert_eq!(new(96, 64), "matmul_int4: in is 96, not a multiple of 64");
        assert_eq!(new(96, 16), "matmul_int4: group is 16, expected 32, 64 or 128");
        let mut weight = Int4Weight::new(&Device::Cpu, 4, 64, Some(32), Offset::Min).unwrap();
        let mut write = |first, q: &[u8], scales: &[f32], offsets: &[f32]| {
            weight.write_rows(first, q, scales, offsets).unwrap_err().to_string()
        };
        assert_eq!(write(0, &[1; 64], &[1.0; 2], &[]), "matmul_int4: offsets has shape [0], expected [2]");
        assert_eq!(write(0, &[1; 64], &[1.0; 3], &[1.0; 2]), "matmul_int4: scales has shape [3], expected [2]");
        assert_eq!(write(0, &[16; 64], &[1.0; 2], &[1.0; 2]), "matmul_int4: q is 16, expected at most 15");
        assert_eq!(
            write(4, &[1; 64], &[1.0; 2], &[1.0; 2]),
            "matmul_int4: last row is 5, expected at most the weight's outputs"
        );
    }
}
