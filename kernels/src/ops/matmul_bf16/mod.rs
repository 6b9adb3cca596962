//! Products with bf16 weights.

pub mod cuda;
mod experts;
mod fixed;

use std::ops::Range;

use half::bf16;

use super::matmul::{self, Format, Groups, Packed, Rows};
use crate::device::{CudaDevice, Device};
use crate::error::{KernelError, Result};
use crate::simd::F32x16;
use crate::tensor::{Tensor, ViewMut};
use crate::workspace::Workspace;

/// A weight `[out, in]`, laid out for the device it is on.
pub struct Bf16Weight {
    form: Form,
}

enum Form {
    /// On the CPU.
    Packed(Packed<Bf16>),
    /// On a GPU: plain rows.
    Rows(cuda::Rows),
}

impl Bf16Weight {
    /// A weight of zeros.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(device: &Device, out: usize, inputs: usize) -> Result<Self> {
        let form = match device {
            Device::Cpu => Form::Packed(Packed::new(device, out, inputs, None)?),
            Device::Cuda(gpu) => Form::Rows(cuda::Rows::new(gpu, out, inputs)?),
        };
        Ok(Bf16Weight { form })
    }

    /// Overwrites whole rows from `first` on.
    ///
    /// # Errors
    /// `NotMultiple` if `values` are no whole rows, `Value` if they pass the last row.
    pub fn write_rows(&mut self, first: usize, values: &[bf16]) -> Result<()> {
        match &mut self.form {
            Form::Packed(packed) => packed.write_rows(first, values),
            Form::Rows(rows) => rows.write(first, values),
        }
    }

    /// Whole rows as they lie on a GPU, to be sent there; `None` on the CPU, where weights are packed.
    ///
    /// # Panics
    /// If the range is outside the weight.
    pub fn device_rows(&mut self, rows: Range<usize>) -> Option<ViewMut<'_>> {
        match &mut self.form {
            Form::Packed(_) => None,
            Form::Rows(weight) => Some(weight.rows_mut(rows)),
        }
    }

    /// Copies a row out.
    ///
    /// # Panics
    /// If there is no such row, or `to` is not as long as one; on a GPU also if the device fails.
    pub fn read_row(&self, row: usize, to: &mut [f32]) {
        match &self.form {
            Form::Packed(packed) => packed.read_row(row, to),
            Form::Rows(rows) => rows.read(row, to),
        }
    }

    /// `[out, in]`.
    pub fn dims(&self) -> [usize; 2] {
        match &self.form {
            Form::Packed(packed) => packed.dims(),
            Form::Rows(rows) => rows.dims(),
        }
    }

    /// Memory it takes.
    pub fn size_bytes(&self) -> usize {
        match &self.form {
            Form::Packed(packed) => packed.size_bytes(),
            Form::Rows(rows) => rows.tensor().size_bytes(),
        }
    }

    fn on_gpu(&self) -> Result<&cuda::Rows> {
        match &self.form {
            Form::Rows(rows) => Ok(rows),
            Form::Packed(_) => Err(KernelError::Value { op: "matmul_bf16", arg: "device", got: 0, want: "a GPU" }),
        }
    }

    pub fn device(&self) -> &Device {
        match &self.form {
            Form::Packed(packed) => packed.device(),
            Form::Rows(rows) => rows.tensor().device(),
        }
    }
}

/// `y = x @ weightᵀ`.
///
/// | argument | shape         | dtype     | |
/// |----------|---------------|-----------|-|
/// | `x`      | `[rows, in]`  | f32, bf16 | read |
/// | `weight` | `[out, in]`   | bf16      | read |
/// | `y`      | `[rows, out]` | f32, bf16 | written |
///
/// Sums in f32, in the order of the inputs (see [`matmul`](super::matmul)); takes
/// [`workspace_bytes`](super::matmul::workspace_bytes).
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree, `WorkspaceFull`.
pub fn matmul(x: &Tensor, weight: &Bf16Weight, y: &mut Tensor, workspace: &Workspace) -> Result<()> {
    match &weight.form {
        Form::Packed(packed) => matmul::matmul(x, packed, y, workspace),
        Form::Rows(rows) => rows.matmul(x, y),
    }
}

/// [`matmul`] and [`silu_mul`](super::silu_mul::silu_mul) in one pass, where there is a kernel for it; else `false`, and nothing is done.
///
/// | argument | shape         | dtype | |
/// |----------|---------------|-------|-|
/// | `x`      | `[rows, in]`  | bf16  | read |
/// | `weight` | `[2 * inner, in]`, gate above up | bf16 | read |
/// | `y`      | `[rows, inner]` | bf16 | written: both products are rounded to bf16 before the gate |
///
/// # Errors
/// As [`matmul`].
pub fn gated(x: &Tensor, weight: &Bf16Weight, y: &mut Tensor) -> Result<bool> {
    match &weight.form {
        Form::Packed(_) => Ok(false),
        Form::Rows(rows) => rows.gated(x, y),
    }
}

/// What rows have yet to be normalised by: their products are divided by the root of the mean of these squares.
#[derive(Clone, Copy, Debug)]
pub struct Squares<'a> {
    /// `[rows, width / 16]` f32: sums of squares of each row's elements before they were multiplied with the norm's weight.
    pub parts: &'a Tensor,
    pub eps: f32,
}

/// Whether [`add_norm`] can put so many rows through this weight, and [`matmul_normed`] and [`gated_normed`] too.
pub fn spreads_norm(weight: &Bf16Weight, rows: usize) -> bool {
    let [out, inputs] = weight.dims();
    matches!(&weight.form, Form::Rows(weight) if cuda::spreads_norm(weight.gpu(), rows, out, inputs))
}

/// [`matmul`] and the half of [`add_rms_norm`](super::rms_norm::add_rms_norm) that needs no sum over a row, where [`spreads_norm`].
///
/// | argument   | shape             | dtype | |
/// |------------|-------------------|-------|-|
/// | `x`        | `[rows, in]`      | bf16  | read |
/// | `weight`   | `[out, in]`       | bf16  | read |
/// | `residual` | `[rows, out]`     | bf16  | gains the products, rounded |
/// | `norm`     | `[out]`           | f32   | read |
/// | `y`        | `[rows, out]`     | bf16  | written: `residual * norm` |
/// | `squares`  | `[rows, out / 16]`| f32   | written, for [`Squares`] |
///
/// # Errors
/// As [`matmul`], `Value` where not [`spreads_norm`].
pub fn add_norm(
    x: &Tensor,
    weight: &Bf16Weight,
    residual: &mut Tensor,
    norm: &Tensor,
    y: &mut Tensor,
    squares: &mut Tensor,
) -> Result<()> {
    let rows = weight.on_gpu()?;
    cuda::add_norm(rows.gpu(), x, rows.tensor(), residual, norm, y, squares)
}

/// [`matmul`] of the rest of the normalisation of `x`, where [`spreads_norm`].
///
/// # Errors
/// As [`add_norm`].
pub fn matmul_normed(x: &Tensor, squares: Squares<'_>, weight: &Bf16Weight, y: &mut Tensor) -> Result<()> {
    let rows = weight.on_gpu()?;
    cuda::matmul_normed(rows.gpu(), x, squares, rows.tensor(), y)
}

/// [`gated`] of the rest of the normalisation of `x`, where [`spreads_norm`].
///
/// # Errors
/// As [`add_norm`].
pub fn gated_normed(x: &Tensor, squares: Squares<'_>, weight: &Bf16Weight, y: &mut Tensor) -> Result<()> {
    let rows = weight.on_gpu()?;
    cuda::gated_normed(rows.gpu(), x, squares, rows.tensor(), y)
}

/// `y[i] = x[row of pair i] @ (its expert's part of weight)ᵀ`: products of a mixture of experts (see [`moe`](super::moe)).
///
/// | argument | shape                    | dtype     | |
/// |----------|--------------------------|-----------|-|
/// | `x`      | `[rows, in]`             | f32, bf16 | read: a row for each token or each pair, as `rows` says |
/// | `weight` | `[experts * inner, in]`  | bf16      | read, of the experts that were chosen |
/// | `y`      | `[pairs, inner]`         | f32, bf16 | written, in the order of `groups.pairs` |
///
/// Each row has the bits of [`matmul`] with its expert alone, on a GPU of a deterministic one; takes
/// [`matmul_workspace_bytes`](super::moe::matmul_workspace_bytes) on the CPU.
///
/// # Errors
/// As [`matmul`], `NotMultiple` if experts do not divide the weight; on a GPU `DType` unless `x` and `y` are bf16, `NotMultiple` unless `in`
/// is a multiple of 8.
pub fn matmul_experts(
    x: &Tensor,
    rows: Rows,
    weight: &Bf16Weight,
    groups: &Groups,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    match &weight.form {
        Form::Packed(packed) => matmul::matmul_grouped(x, rows, packed, groups, y, workspace),
        Form::Rows(weight) => experts::matmul(weight.gpu(), x, rows, weight.tensor(), groups, experts::Store::Plain, y),
    }
}

/// [`matmul_experts`] and [`silu_mul`](super::silu_mul::silu_mul) in one pass, to the same bits, where there is a kernel for it; else `false`, and
/// nothing is done. Each expert's part of the weight is gate above up; `y` is `[pairs, inner / 2]`.
///
/// # Errors
/// As [`matmul_experts`].
pub fn gated_experts(x: &Tensor, rows: Rows, weight: &Bf16Weight, groups: &Groups, y: &mut Tensor) -> Result<bool> {
    match &weight.form {
        Form::Packed(_) => Ok(false),
        Form::Rows(weight) => {
            experts::matmul(weight.gpu(), x, rows, weight.tensor(), groups, experts::Store::Gated, y).map(|()| true)
        }
    }
}

/// The kernels that [`experts_by`] has on a GPU, in its order, and the rows of one expert that a block of each takes.
pub fn expert_kernels(device: &CudaDevice) -> Vec<(&'static str, usize)> {
    experts::kernels(device).iter().map(|kernel| (kernel.names[0], kernel.rows)).collect()
}

/// [`matmul_experts`], or [`gated_experts`], by one of [`expert_kernels`]; for benches.
///
/// # Errors
/// As [`matmul_experts`], `Value` on the CPU.
pub fn experts_by(
    by: usize,
    x: &Tensor,
    rows: Rows,
    weight: &Bf16Weight,
    groups: &Groups,
    is_gated: bool,
    y: &mut Tensor,
) -> Result<()> {
    let weight = weight.on_gpu()?;
    let store = if is_gated { experts::Store::Gated } else { experts::Store::Plain };
    experts::matmul_by(by, weight.gpu(), x, rows, weight.tensor(), groups, store, y)
}

/// `y[i] = weight[ids[i]]`: the embedding of a tied head.
///
/// | argument | shape       | dtype     | |
/// |----------|-------------|-----------|-|
/// | `weight` | `[out, in]` | bf16      | read |
/// | `ids`    | `[rows]`    | i32       | read |
/// | `y`      | `[rows, in]`| f32, bf16 | written |
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree, `Value` if an id is no row.
pub fn gather(weight: &Bf16Weight, ids: &Tensor, y: &mut Tensor) -> Result<()> {
    match &weight.form {
        Form::Packed(packed) => matmul::gather(packed, ids, y),
        Form::Rows(rows) => super::embed::embed(rows.tensor(), ids, y),
    }
}

/// Lines of 16 words, each the bf16 of two inputs, the first in the low half.
pub(crate) struct Bf16;

// SAFETY: decode reads the line's 64 bytes.
unsafe impl Format for Bf16 {
    type Value = bf16;

    const OP: &'static str = "matmul_bf16";
    const SCALED: bool = false;
    const OFFSET: bool = false;
    const LINE: usize = 2;

    fn encode(line: &mut [u8], lane: usize, values: &[bf16]) {
        for (j, value) in values.iter().enumerate() {
            line[lane * 4 + j * 2..][..2].copy_from_slice(&value.to_le_bytes());
        }
    }

    fn value(line: &[u8], lane: usize, j: usize) -> f32 {
        let at = lane * 4 + j * 2;
        bf16::from_le_bytes([line[at], line[at + 1]]).to_f32()
    }

    #[inline(always)]
    unsafe fn decode<V: F32x16, const J: usize>(line: *const u8) -> V {
        // SAFETY: the caller gives a whole line.
        unsafe {
            let words = V::load_words(line);
            if J == 0 { V::bf16_low(words) } else { V::bf16_high(words) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::ops::matmul::testing::{self, random};

    fn weight(out: usize, inputs: usize) -> (Bf16Weight, Vec<bf16>) {
        let values: Vec<bf16> = random(out * inputs, 7).into_iter().map(bf16::from_f32).collect();
        let mut weight = Bf16Weight::new(&Device::Cpu, out, inputs).unwrap();
        weight.write_rows(0, &values).unwrap();
        (weight, values)
    }

    #[test]
    fn every_path_has_the_bits_of_the_reference() {
        for (out, inputs) in [(1, 1), (16, 8), (17, 33), (100, 576), (48, 1536)] {
            let (weight, _) = weight(out, inputs);
            let Form::Packed(packed) = &weight.form else { unreachable!("made on the CPU") };
            testing::check(packed);
        }
    }

    #[test]
    fn rows_come_back_as_written_in_any_order() {
        let (whole, values) = weight(40, 50);
        let mut pieces = Bf16Weight::new(&Device::Cpu, 40, 50).unwrap();
        for (first, last) in [(30, 40), (0, 1), (1, 30)] {
            pieces.write_rows(first, &values[first * 50..last * 50]).unwrap();
        }
        let ids = Tensor::from_slice(&Device::Cpu, "ids", &[39, 0, 17], [3]).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [3, 50], DType::BF16).unwrap();
        gather(&pieces, &ids, &mut y).unwrap();
        for (i, row) in [39, 0, 17].into_iter().enumerate() {
            let want = &values[row * 50..][..50];
            assert_eq!(&y.as_slice::<bf16>()[i * 50..][..50], want);
            let mut read = [0.0; 50];
            whole.read_row(row, &mut read);
            assert_eq!(read, *want.iter().map(|v| v.to_f32()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let (mut weight, values) = weight(4, 8);
        let workspace = Workspace::new(&Device::Cpu, 1 << 16).unwrap();
        let tensor = |shape: [usize; 2], dtype| Tensor::zeros(&Device::Cpu, "t", shape, dtype).unwrap();
        let product = |x: [usize; 2], y: [usize; 2], dtype| {
            matmul(&tensor(x, dtype), &weight, &mut tensor(y, DType::F32), &workspace).unwrap_err().to_string()
        };
        assert_eq!(product([2, 9], [2, 4], DType::F32), "matmul_bf16: x has shape [2, 9], expected [2, 8]");
        assert_eq!(product([2, 8], [2, 5], DType::F32), "matmul_bf16: y has shape [2, 5], expected [2, 4]");
        let err = "matmul_bf16: x is int32, for which there is no kernel on this device";
        assert_eq!(product([2, 8], [2, 4], DType::I32), err);
        let err = weight.write_rows(1, &values).unwrap_err();
        assert_eq!(err.to_string(), "matmul_bf16: last row is 5, expected at most the weight's outputs");
        let err = weight.write_rows(0, &values[1..]).unwrap_err();
        assert_eq!(err.to_string(), "matmul_bf16: values is 31, not a multiple of 8");
        let ids = Tensor::from_slice(&Device::Cpu, "ids", &[0, 4], [2]).unwrap();
        let err = gather(&weight, &ids, &mut tensor([2, 8], DType::F32)).unwrap_err();
        assert_eq!(err.to_string(), "matmul_bf16: id is 4, expected a row of the weight");
    }
}
