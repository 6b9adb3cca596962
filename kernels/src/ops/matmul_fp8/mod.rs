//! Products with 8-bit floats (e4m3): one scale for each group of a row. Activations stay as they are.
//!
//! Source: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433: four bits of exponent from 7, three of mantissa, no
//! infinities; the codes 127 and 255 are no numbers.

use super::matmul::{self, Format, Groups, Offset, Packed, Rows, Scales};
use crate::device::Device;
use crate::error::{KernelError, Result};
use crate::simd::{F32x16, LANES};
use crate::tensor::Tensor;
use crate::workspace::Workspace;

/// Half of what [`F32x16::load_e4m3`] leaves to multiply with; the scales have it, and the activations the other half.
const HALF: f32 = f32::from_bits((127 + 60) << 23);

/// A weight `[out, in]` of e4m3 and scales, laid out for the device it is on: `w = scale * q`.
pub struct Fp8Weight {
    packed: Packed<Fp8>,
    /// Reused when rows are written.
    scales: Vec<f32>,
}

impl Fp8Weight {
    /// A weight of zeros. `group` is how many inputs share a scale: 32, 64 or 128, or `None` for all of a row.
    ///
    /// # Errors
    /// `Value` for another group, `NotMultiple` if it does not divide `inputs`, `OutOfMemory`.
    pub fn new(device: &Device, out: usize, inputs: usize, group: Option<usize>) -> Result<Self> {
        let scales = Scales::new(device, Fp8::OP, out, inputs, group, Offset::Symmetric, Fp8::CENTER)?;
        Ok(Fp8Weight { packed: Packed::new(device, out, inputs, Some(scales))?, scales: Vec::new() })
    }

    /// Overwrites whole rows from `first` on: `q` is `[rows, in]`, codes of e4m3; `scales` is `[rows, groups]`.
    ///
    /// # Errors
    /// `NotMultiple` if `q` is no whole rows, `Value` if they pass the last row or a code is no number, `Shape` if `scales` does not go
    /// with them.
    pub fn write_rows(&mut self, first: usize, q: &[u8], scales: &[f32]) -> Result<()> {
        if let Some(&q) = q.iter().find(|&&q| q & 0x7F == 0x7F) {
            let (op, arg, want) = (Fp8::OP, "q", "a number: 127 and 255 are none");
            return Err(KernelError::Value { op, arg, got: q.into(), want });
        }
        self.scales.clear();
        self.scales.extend(scales.iter().map(|scale| scale * HALF));
        self.packed.write_scaled_rows(first, q, &self.scales, &[])
    }

    /// Dequantizes a row: code times scale, rounded once.
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
/// | `weight` | `[out, in]`   | e4m3      | read |
/// | `y`      | `[rows, out]` | f32, bf16 | written |
///
/// Sums of `x * q` in f32 for each group in the order of its inputs, then scaled and added up (see
/// [`matmul`](super::matmul)); takes [`workspace_bytes`](super::matmul::workspace_bytes).
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree, `WorkspaceFull`.
pub fn matmul(x: &Tensor, weight: &Fp8Weight, y: &mut Tensor, workspace: &Workspace) -> Result<()> {
    matmul::matmul(x, &weight.packed, y, workspace)
}

/// `y[i] = x[row of pair i] @ (its expert's part of weight)ᵀ`: products of a mixture of experts (see [`moe`](super::moe)).
///
/// | argument | shape                    | dtype     | |
/// |----------|--------------------------|-----------|-|
/// | `x`      | `[rows, in]`             | f32, bf16 | read: a row for each token or each pair, as `rows` says |
/// | `weight` | `[experts * inner, in]`  | e4m3      | read, of the experts that were chosen |
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
    weight: &Fp8Weight,
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
/// | `weight` | `[out, in]` | e4m3      | read |
/// | `ids`    | `[rows]`    | i32       | read |
/// | `y`      | `[rows, in]`| f32, bf16 | written |
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree, `Value` if an id is no row.
pub fn gather(weight: &Fp8Weight, ids: &Tensor, y: &mut Tensor) -> Result<()> {
    matmul::gather(&weight.packed, ids, y)
}

/// Lines of four inputs, each 16 bytes.
pub(crate) struct Fp8;

// SAFETY: decode reads 16 of the line's 64 bytes for each of four inputs.
unsafe impl Format for Fp8 {
    type Value = u8;

    const OP: &'static str = "matmul_fp8";
    const SCALED: bool = true;
    const OFFSET: bool = false;
    const LINE: usize = 4;
    const X_SCALES: [f32; 8] = [HALF; 8];

    fn encode(line: &mut [u8], lane: usize, values: &[u8]) {
        for (j, value) in values.iter().enumerate() {
            line[j * LANES + lane] = *value;
        }
    }

    fn value(line: &[u8], lane: usize, j: usize) -> f32 {
        let code = line[j * LANES + lane];
        f32::from_bits(u32::from(code & 0x80) << 24 | u32::from(code & 0x7F) << 20) * HALF
    }

    #[inline(always)]
    unsafe fn decode<V: F32x16, const J: usize>(line: *const u8) -> V {
        // SAFETY: the caller gives a whole line.
        unsafe { V::load_e4m3(line.add(J * LANES)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::ops::matmul::testing::{self, random};

    /// What a code stands for, by the definition.
    fn number(code: u8) -> f32 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        let size = match exponent {
            0 => mantissa / 8.0 * 2f32.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
        };
        if code & 0x80 == 0 { size } else { -size }
    }

    fn codes(len: usize) -> Vec<u8> {
        let code = |v: f32| ((v + 1.0) * 128.0) as u8;
        random(len, 5).into_iter().map(|v| if code(v) & 0x7F == 0x7F { 3 } else { code(v) }).collect()
    }

    fn weight(out: usize, inputs: usize, group: Option<usize>) -> (Fp8Weight, Vec<u8>, Vec<f32>) {
        let q = codes(out * inputs);
        let scales: Vec<f32> = random(out * inputs / group.unwrap_or(inputs), 6).iter().map(|s| s * 1e-3).collect();
        let mut weight = Fp8Weight::new(&Device::Cpu, out, inputs, group).unwrap();
        weight.write_rows(0, &q, &scales).unwrap();
        (weight, q, scales)
    }

    #[test]
    fn every_path_has_the_bits_of_the_reference() {
        for (out, inputs, group) in
            [(1, 1, None), (17, 33, None), (100, 576, None), (40, 576, Some(64)), (16, 640, Some(128))]
        {
            testing::check(&weight(out, inputs, group).0.packed);
        }
    }

    #[test]
    fn all_codes_are_what_they_stand_for() {
        let all: Vec<u8> = (0..=255).filter(|code| code & 0x7F != 0x7F).collect();
        for scale in [1.0, 1e-4, 0.37, 3e4] {
            let mut weight = Fp8Weight::new(&Device::Cpu, 1, all.len(), None).unwrap();
            weight.write_rows(0, &all, &[scale]).unwrap();
            let mut row = vec![0.0; all.len()];
            weight.read_row(0, &mut row);
            for (&code, got) in all.iter().zip(row) {
                assert_eq!(got.to_bits(), (number(code) * scale).to_bits(), "code {code}, scale {scale}");
            }
        }
    }

    #[test]
    fn rows_are_scale_times_q_and_products_of_them() {
        let (weight, q, scales) = weight(20, 256, Some(128));
        let ids = Tensor::from_slice(&Device::Cpu, "ids", &[19, 3], [2]).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [2, 256], DType::F32).unwrap();
        gather(&weight, &ids, &mut y).unwrap();
        for (y, row) in y.as_slice::<f32>().chunks(256).zip([19, 3]) {
            for k in 0..256 {
                assert_eq!(y[k], scales[row * 2 + k / 128] * number(q[row * 256 + k]));
            }
        }
        let values = random(256, 9);
        let x = Tensor::from_slice(&Device::Cpu, "x", &values, [1, 256]).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [1, 20], DType::F32).unwrap();
        let workspace = Workspace::new(&Device::Cpu, 1 << 16).unwrap();
        matmul(&x, &weight, &mut y, &workspace).unwrap();
        for (row, y) in y.as_slice::<f32>().iter().enumerate() {
            let term =
                |k: usize| f64::from(values[k] * scales[row * 2 + k / 128]) * f64::from(number(q[row * 256 + k]));
            let want: f64 = (0..256).map(term).sum();
            assert!((f64::from(*y) - want).abs() < 1e-4, "{row}: {y}, expected {want}");
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let mut weight = Fp8Weight::new(&Device::Cpu, 4, 64, Some(32)).unwrap();
        let mut write = |q: &[u8], scales: &[f32]| weight.write_rows(0, q, scales).unwrap_err().to_string();
        assert_eq!(write(&[255; 64], &[1.0; 2]), "matmul_fp8: q is 255, expected a number: 127 and 255 are none");
        assert_eq!(write(&[1; 64], &[1.0; 3]), "matmul_fp8: scales has shape [3], expected [2]");
        assert_eq!(write(&[1; 60], &[1.0; 2]), "matmul_fp8: q is 60, not a multiple of 64");
    }
}
