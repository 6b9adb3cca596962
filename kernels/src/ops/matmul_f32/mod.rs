//! Products with f32 weights: for checkpoints that bf16 would round.

use super::matmul::{self, Format, Groups, Packed, Rows};
use crate::device::Device;
use crate::error::Result;
use crate::simd::{F32x16, LANES};
use crate::tensor::Tensor;
use crate::workspace::Workspace;

/// A weight `[out, in]`, laid out for the device it is on.
pub struct F32Weight {
    packed: Packed<F32>,
}

impl F32Weight {
    /// A weight of zeros.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(device: &Device, out: usize, inputs: usize) -> Result<Self> {
        Ok(F32Weight { packed: Packed::new(device, out, inputs, None)? })
    }

    /// Overwrites whole rows from `first` on.
    ///
    /// # Errors
    /// `NotMultiple` if `values` are no whole rows, `Value` if they pass the last row.
    pub fn write_rows(&mut self, first: usize, values: &[f32]) -> Result<()> {
        self.packed.write_rows(first, values)
    }

    /// Copies a row out.
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
/// | `weight` | `[out, in]`   | f32       | read |
/// | `y`      | `[rows, out]` | f32, bf16 | written |
///
/// Sums in f32, in the order of the inputs (see [`matmul`](super::matmul)); takes
/// [`workspace_bytes`](super::matmul::workspace_bytes).
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree, `WorkspaceFull`.
pub fn matmul(x: &Tensor, weight: &F32Weight, y: &mut Tensor, workspace: &Workspace) -> Result<()> {
    matmul::matmul(x, &weight.packed, y, workspace)
}

/// `y[i] = x[row of pair i] @ (its expert's part of weight)ᵀ`: products of a mixture of experts (see [`moe`](super::moe)).
///
/// | argument | shape                    | dtype     | |
/// |----------|--------------------------|-----------|-|
/// | `x`      | `[rows, in]`             | f32, bf16 | read: a row for each token or each pair, as `rows` says |
/// | `weight` | `[experts * inner, in]`  | f32       | read, of the experts that were chosen |
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
    weight: &F32Weight,
    groups: &Groups,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    matmul::matmul_grouped(x, rows, &weight.packed, groups, y, workspace)
}

/// `y[i] = weight[ids[i]]`: the embedding of a tied head.
///
/// | argument | shape       | dtype     | |
/// |----------|-------------|-----------|-|
/// | `weight` | `[out, in]` | f32       | read |
/// | `ids`    | `[rows]`    | i32       | read |
/// | `y`      | `[rows, in]`| f32, bf16 | written |
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree, `Value` if an id is no row.
pub fn gather(weight: &F32Weight, ids: &Tensor, y: &mut Tensor) -> Result<()> {
    matmul::gather(&weight.packed, ids, y)
}

/// Lines of one input.
pub(crate) struct F32;

// SAFETY: decode reads the line's 64 bytes.
unsafe impl Format for F32 {
    type Value = f32;

    const OP: &'static str = "matmul_f32";
    const SCALED: bool = false;
    const OFFSET: bool = false;
    const LINE: usize = 1;
    const LINE_BYTES: usize = LANES * 4;

    fn encode(line: &mut [u8], lane: usize, values: &[f32]) {
        if let [value] = values {
            line[lane * 4..][..4].copy_from_slice(&value.to_le_bytes());
        }
    }

    fn value(line: &[u8], lane: usize, _: usize) -> f32 {
        let at = lane * 4;
        f32::from_le_bytes([line[at], line[at + 1], line[at + 2], line[at + 3]])
    }

    #[inline(always)]
    unsafe fn decode<V: F32x16, const J: usize>(line: *const u8) -> V {
        // SAFETY: the caller gives a whole line.
        unsafe { V::load(line.cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::ops::matmul::testing::{self, random};

    fn weight(out: usize, inputs: usize) -> (F32Weight, Vec<f32>) {
        let values = random(out * inputs, 11);
        let mut weight = F32Weight::new(&Device::Cpu, out, inputs).unwrap();
        weight.write_rows(0, &values).unwrap();
        (weight, values)
    }

    #[test]
    fn every_path_has_the_bits_of_the_reference() {
        for (out, inputs) in [(1, 1), (16, 8), (17, 33), (100, 576)] {
            testing::check(&weight(out, inputs).0.packed);
        }
    }

    #[test]
    fn rows_come_back_as_written() {
        let (whole, values) = weight(20, 50);
        let ids = Tensor::from_slice(&Device::Cpu, "ids", &[19, 0], [2]).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [2, 50], DType::F32).unwrap();
        gather(&whole, &ids, &mut y).unwrap();
        assert_eq!(y.as_slice::<f32>()[..50], values[19 * 50..]);
        assert_eq!(y.as_slice::<f32>()[50..], values[..50]);
        let mut read = [0.0; 50];
        whole.read_row(7, &mut read);
        assert_eq!(read, values[7 * 50..8 * 50]);
    }
}
