//! Products with int8 weights: symmetric, one scale a row or one for each group of a row.

use super::matmul::{self, Format, Groups, Offset, Packed, Rows, Scales};
use crate::device::Device;
use crate::error::Result;
use crate::simd::{F32x16, LANES};
use crate::tensor::Tensor;
use crate::workspace::Workspace;

/// A weight `[out, in]` of int8 and scales, laid out for the device it is on: `w = scale * q`.
pub struct Int8Weight {
    packed: Packed<Int8>,
}

impl Int8Weight {
    /// A weight of zeros. `group` is how many inputs share a scale: 32, 64 or 128, or `None` for all of a row.
    ///
    /// # Errors
    /// `Value` for another group, `NotMultiple` if it does not divide `inputs`, `OutOfMemory`.
    pub fn new(device: &Device, out: usize, inputs: usize, group: Option<usize>) -> Result<Self> {
        let scales = Scales::new(device, Int8::OP, out, inputs, group, Offset::Symmetric, Int8::CENTER)?;
        Ok(Int8Weight { packed: Packed::new(device, out, inputs, Some(scales))? })
    }

    /// Overwrites whole rows from `first` on: `q` is `[rows, in]`, `scales` `[rows, groups]`. Scales are kept in f16 while
    /// all are exact in it, else in f32.
    ///
    /// # Errors
    /// `NotMultiple` if `q` is no whole rows, `Value` if they pass the last row, `Shape` if `scales` does not go with them.
    pub fn write_rows(&mut self, first: usize, q: &[i8], scales: &[f32]) -> Result<()> {
        self.packed.write_scaled_rows(first, q, scales, &[])
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
/// | `weight` | `[out, in]`   | int8      | read |
/// | `y`      | `[rows, out]` | f32, bf16 | written |
///
/// Sums of `x * q` in f32 for each group in the order of its inputs, then scaled and added up (see
/// [`matmul`](super::matmul)); takes [`workspace_bytes`](super::matmul::workspace_bytes).
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree, `WorkspaceFull`.
pub fn matmul(x: &Tensor, weight: &Int8Weight, y: &mut Tensor, workspace: &Workspace) -> Result<()> {
    matmul::matmul(x, &weight.packed, y, workspace)
}

/// `y[i] = x[row of pair i] @ (its expert's part of weight)ᵀ`: products of a mixture of experts (see [`moe`](super::moe)).
///
/// | argument | shape                    | dtype     | |
/// |----------|--------------------------|-----------|-|
/// | `x`      | `[rows, in]`             | f32, bf16 | read: a row for each token or each pair, as `rows` says |
/// | `weight` | `[experts * inner, in]`  | int8      | read, of the experts that were chosen |
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
    weight: &Int8Weight,
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
/// | `weight` | `[out, in]` | int8      | read |
/// | `ids`    | `[rows]`    | i32       | read |
/// | `y`      | `[rows, in]`| f32, bf16 | written |
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree, `Value` if an id is no row.
pub fn gather(weight: &Int8Weight, ids: &Tensor, y: &mut Tensor) -> Result<()> {
    matmul::gather(&weight.packed, ids, y)
}

/// Lines of four inputs, each 16 bytes.
pub(crate) struct Int8;

// SAFETY: decode reads 16 of the line's 64 bytes for each of four inputs.
unsafe impl Format for Int8 {
    type Value = i8;

    const OP: &'static str = "matmul_int8";
    const SCALED: bool = true;
    const OFFSET: bool = false;
    const LINE: usize = 4;

    fn encode(line: &mut [u8], lane: usize, values: &[i8]) {
        for (j, value) in values.iter().enumerate() {
            line[j * LANES + lane] = value.cast_unsigned();
        }
    }

    fn value(line: &[u8], lane: usize, j: usize) -> f32 {
        f32::from(line[j * LANES + lane].cast_signed())
    }

    #[inline(always)]
    unsafe fn decode<V: F32x16, const J: usize>(line: *const u8) -> V {
        // SAFETY: the caller gives a whole line.
        unsafe { V::load_i8(line.add(J * LANES)) }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::dtype::DType;
    use crate::ops::matmul::testing::{self, random};

    struct Plain {
        q: Vec<i8>,
        scales: Vec<f32>,
    }

    /// A weight, and what was written to it.
    fn weight(out: usize, inputs: usize, group: Option<usize>, half: bool) -> (Int8Weight, Plain) {
        let q: Vec<i8> = random(out * inputs, 5).into_iter().map(|v| (v * 128.0).floor() as i8).collect();
        let scales = random(out * inputs / group.unwrap_or(inputs), 6).into_iter();
        let scales: Vec<f32> = scales.map(|s| if half { f16::from_f32(s * 0.1).to_f32() } else { s * 0.1 }).collect();
        let mut weight = Int8Weight::new(&Device::Cpu, out, inputs, group).unwrap();
        weight.write_rows(0, &q, &scales).unwrap();
        (weight, Plain { q, scales })
    }

    #[test]
    fn every_path_has_the_bits_of_the_reference() {
        for (out, inputs, group) in [
            (1, 1, None),
            (17, 33, None),
            (100, 576, None),
            (33, 32, Some(32)),
            (40, 576, Some(64)),
            (16, 640, Some(128)),
            (48, 1536, Some(32)),
        ] {
            testing::check(&weight(out, inputs, group, true).0.packed);
            testing::check(&weight(out, inputs, group, false).0.packed);
        }
    }

    #[test]
    fn rows_are_scale_times_q() {
        let (weight, Plain { q, scales }) = weight(20, 64, Some(32), false);
        let ids = Tensor::from_slice(&Device::Cpu, "ids", &[19, 3], [2]).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [2, 64], DType::F32).unwrap();
        gather(&weight, &ids, &mut y).unwrap();
        for (y, row) in y.as_slice::<f32>().chunks(64).zip([19, 3]) {
            for k in 0..64 {
                assert_eq!(y[k], scales[row * 2 + k / 32] * f32::from(q[row * 64 + k]));
            }
        }
    }

    #[test]
    fn scales_stay_f16_until_one_is_not_exact() {
        let (mut weight, Plain { q, scales }) = weight(16, 32, Some(32), true);
        let half = weight.size_bytes();
        let mut before = [0.0; 32];
        weight.read_row(0, &mut before);
        weight.write_rows(15, &q[..32], &[0.1]).unwrap();
        assert_eq!(weight.size_bytes(), half + 16 * 2);
        let mut after = [0.0; 32];
        weight.read_row(0, &mut after);
        assert_eq!(before, after, "rows written before keep their scales");
        weight.read_row(15, &mut after);
        assert_eq!(after[3], 0.1 * f32::from(q[3]));
        assert_eq!(before[3], scales[0] * f32::from(q[3]));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let new = |inputs, group| Int8Weight::new(&Device::Cpu, 4, inputs, Some(group)).err().unwrap().to_string();
        assert_eq!(new(96, 64), "matmul_int8: in is 96, not a multiple of 64");
        assert_eq!(new(96, 48), "matmul_int8: group is 48, expected 32, 64 or 128");
        let mut weight = Int8Weight::new(&Device::Cpu, 4, 64, Some(32)).unwrap();
        let err = weight.write_rows(0, &[1; 64], &[1.0]).unwrap_err();
        assert_eq!(err.to_string(), "matmul_int8: scales has shape [1], expected [2]");
    }
}
