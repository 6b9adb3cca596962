//! Few rows by `few_rows.cu`, many by cuBLASLt. `mid_rows.cu` is not yet as fast as either and is chosen by name alone.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use crate::device::Device;
use crate::device::cuda::{CudaDevice, Launch, Product};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::{Tensor, ViewMut};

const OP: &str = "matmul_bf16";

/// Elements of `in` that both kernels take a turn.
const STEP: usize = 64;
const WARPS: usize = 8;
const DEPTH: usize = 4;
const TURN_BYTES: usize = 16 * STEP * 2;

/// Who multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    FewRows,
    MidRows,
    Library,
}

impl By {
    /// The fastest for so many rows, as measured: `benches/RESULTS.md`.
    pub fn rows(rows: usize, inner: usize) -> Self {
        if rows <= 8 && inner.is_multiple_of(STEP) { By::FewRows } else { By::Library }
    }
}

/// Rows of `mid_rows.cu`'s kernels, their stages, and their names by [`Store`].
const MID_ROWS: [(usize, usize, [&str; 3]); 5] = [
    (8, 6, ["mid_rows_8_bf16", "mid_rows_8_f32", "mid_rows_8_gated"]),
    (16, 6, ["mid_rows_16_bf16", "mid_rows_16_f32", "mid_rows_16_gated"]),
    (32, 5, ["mid_rows_32_bf16", "mid_rows_32_f32", "mid_rows_32_gated"]),
    (64, 4, ["mid_rows_64_bf16", "mid_rows_64_f32", "mid_rows_64_gated"]),
    (128, 3, ["mid_rows_128_bf16", "mid_rows_128_f32", "mid_rows_128_gated"]),
];
/// Outputs of one of its tiles.
const MID_OUT: usize = 128;

/// What is stored of the outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    Bf16,
    F32,
    /// `silu(first half) * second half` in bf16.
    Gated,
}

/// A weight in rows, `[out, in]`.
pub(super) struct Rows {
    gpu: Arc<CudaDevice>,
    tensor: Tensor,
}

impl Rows {
    pub(super) fn new(gpu: &Arc<CudaDevice>, out: usize, inputs: usize) -> Result<Self> {
        let tensor = Tensor::zeros(&Device::Cuda(gpu.clone()), "weight", [out, inputs], DType::BF16)?;
        Ok(Rows { gpu: gpu.clone(), tensor })
    }

    pub(super) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub(super) fn dims(&self) -> [usize; 2] {
        let (out, inputs) = self.tensor.rows_cols();
        [out, inputs]
    }

    pub(super) fn rows_mut(&mut self, rows: Range<usize>) -> ViewMut<'_> {
        self.tensor.rows_mut(rows)
    }

    pub(super) fn write(&mut self, first: usize, values: &[bf16]) -> Result<()> {
        let [out, inputs] = self.dims();
        if !values.len().is_multiple_of(inputs) {
            return Err(KernelError::NotMultiple { op: OP, what: "values", size: values.len(), of: inputs });
        }
        let end = first + values.len() / inputs;
        if end > out {
            let want = "at most the weight's outputs";
            return Err(KernelError::Value { op: OP, arg: "last row", got: end as i64, want });
        }
        self.tensor.rows_mut(first..end).copy_from_slice(values)
    }

    pub(super) fn read(&self, row: usize, to: &mut [f32]) {
        let values: Vec<bf16> = self.tensor.rows(row..row + 1).to_vec().expect("the device answers");
        assert!(to.len() == values.len(), "a row of {} read into {}", values.len(), to.len());
        for (to, value) in to.iter_mut().zip(values) {
            *to = value.to_f32();
        }
    }

    pub(super) fn matmul(&self, x: &Tensor, y: &mut Tensor) -> Result<()> {
        matmul(&self.gpu, x, &self.tensor, y)
    }

    pub(super) fn gated(&self, x: &Tensor, y: &mut Tensor) -> Result<bool> {
        gated(&self.gpu, x, &self.tensor, y)
    }
}

/// `y = x weightᵀ`; x `[rows, in]` bf16, weight `[out, in]` bf16, y `[rows, out]` bf16 or f32.
///
/// # Errors
/// `Shape` or `DType` if the arguments do not agree, `Launch`, `Blas`.
pub fn matmul(device: &CudaDevice, x: &Tensor, weight: &Tensor, y: &mut Tensor) -> Result<()> {
    let (rows, inner) = x.rows_cols();
    matmul_by(By::rows(rows, inner), device, x, weight, y)
}

/// [`matmul`] by whom the caller chooses.
///
/// # Errors
/// As [`matmul`]; `Value` if there are more rows than who was chosen takes.
pub fn matmul_by(by: By, device: &CudaDevice, x: &Tensor, weight: &Tensor, y: &mut Tensor) -> Result<()> {
    x.expect_dtype(OP, "x", DType::BF16)?;
    weight.expect_dtype(OP, "weight", DType::BF16)?;
    let ((rows, inner), (out, _)) = (x.rows_cols(), weight.rows_cols());
    weight.expect_shape(OP, "weight", [out, inner])?;
    y.expect_shape(OP, "y", [rows, out])?;
    let store = match y.dtype() {
        DType::BF16 => Store::Bf16,
        DType::F32 => Store::F32,
        dtype => return Err(KernelError::DType { op: OP, arg: "y", dtype }),
    };
    if by == By::Library && rows > 0 {
        let product = Product { rows, out, inner, y: y.dtype() };
        // SAFETY: the shapes were checked.
        return unsafe { device.blas_matmul(product, x.device_address(), weight.device_address(), y.device_address()) };
    }
    own(by, store, device, x, weight, y)
}

/// `y = silu(x gateᵀ) * (x upᵀ)`, `weight` being gate and below it up, `[2 * inner, in]`; both products are rounded to bf16 first.
/// `false` and nothing done if there is no kernel for the shape.
///
/// # Errors
/// As [`matmul`].
pub fn gated(device: &CudaDevice, x: &Tensor, weight: &Tensor, y: &mut Tensor) -> Result<bool> {
    let (rows, inner) = x.rows_cols();
    gated_by(By::rows(rows, inner), device, x, weight, y)
}

/// [`gated`] by whom the caller chooses.
///
/// # Errors
/// As [`matmul_by`].
pub fn gated_by(by: By, device: &CudaDevice, x: &Tensor, weight: &Tensor, y: &mut Tensor) -> Result<bool> {
    let ((rows, inner), (out, _)) = (x.rows_cols(), weight.rows_cols());
    if by == By::Library || !out.is_multiple_of(16) {
        return Ok(false);
    }
    x.expect_dtype(OP, "x", DType::BF16)?;
    weight.expect_dtype(OP, "weight", DType::BF16)?;
    weight.expect_shape(OP, "weight", [out, inner])?;
    y.expect_shape(OP, "y", [rows, out / 2])?;
    y.expect_dtype(OP, "y", DType::BF16)?;
    own(by, Store::Gated, device, x, weight, y)?;
    Ok(true)
}

/// By one of our own kernels; all but the number of rows is checked.
fn own(by: By, store: Store, device: &CudaDevice, x: &Tensor, weight: &Tensor, y: &mut Tensor) -> Result<()> {
    let ((rows, inner), (out, _)) = (x.rows_cols(), weight.rows_cols());
    if rows == 0 {
        return Ok(());
    }
    if !inner.is_multiple_of(STEP) {
        return Err(KernelError::NotMultiple { op: OP, what: "in", size: inner, of: STEP });
    }
    let [n_rows, n_out, n_in] = [rows, out, inner].map(|number| (number as u32).into());
    let too_many = |want| KernelError::Value { op: OP, arg: "rows", got: rows as i64, want };
    if by == By::FewRows {
        if rows > 8 {
            return Err(too_many("at most 8"));
        }
        let kernel = ["few_rows_8_bf16", "few_rows_8_f32", "few_rows_8_gated"][store as usize];
        let args = [x.into(), weight.into(), y.into(), n_rows, n_out, n_in];
        let launch = Launch::new(out.div_ceil(16), 32 * WARPS as u32).shared_bytes(WARPS * DEPTH * TURN_BYTES);
        // SAFETY: the shapes were checked.
        return unsafe { launch.run(device, "few_rows", kernel, &args) };
    }
    let kernel = MID_ROWS.into_iter().find(|&(most, ..)| rows <= most);
    let (most, stages, kernels) = kernel.ok_or_else(|| too_many("at most 128"))?;
    let args =
        [x.into(), weight.into(), y.into(), device.scratch().into(), device.counters().into(), n_rows, n_out, n_in];
    // One more KiB, since tiles begin at whole ones.
    let shared = stages * (MID_OUT + most) * STEP * 2 + 1024;
    let launch = Launch::new(device.num_multiprocessors() as usize, 32 * WARPS as u32).shared_bytes(shared);
    // SAFETY: the shapes were checked; scratch has two tiles for each block, and a counter for as many tiles as there may be outputs.
    unsafe { launch.run(device, "mid_rows", kernels[store as usize], &args) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::silu_mul::silu_mul;
    use crate::testing::{BF16_BOUND, assert_close, gpu, random, rng, tensor};

    #[test]
    #[ignore = "needs a GPU"]
    fn a_gated_product_is_the_product_and_then_the_gate() {
        let (gpu, mut rng) = (gpu(), rng(12));
        let Device::Cuda(device) = &gpu else { unreachable!("gpu() returns one") };
        for (half, inner) in [(8, 64), (1536, 576), (520, 1024)] {
            for rows in [1, 5, 9, 32, 50, 128] {
                let x = tensor(&gpu, &random(&mut rng, rows * inner, 1.0), [rows, inner]);
                let weight = tensor(&gpu, &random(&mut rng, 2 * half * inner, 0.3), [2 * half, inner]);
                let mut both = tensor(&gpu, &vec![bf16::NAN; rows * 2 * half], [rows, 2 * half]);
                matmul(device, &x, &weight, &mut both).unwrap();
                let mut want = tensor(&gpu, &vec![bf16::NAN; rows * half], [rows, half]);
                silu_mul(&both, &mut want).unwrap();
                let mut y = tensor(&gpu, &vec![bf16::NAN; rows * half], [rows, half]);
                let by = if rows <= 8 { By::FewRows } else { By::MidRows };
                assert!(gated_by(by, device, &x, &weight, &mut y).unwrap());
                let label = format!("{rows} x {half} x {inner}");
                assert_close(&label, &y.to_vec::<bf16>().unwrap(), &want.to_vec::<bf16>().unwrap(), BF16_BOUND);
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_sums_in_double() {
        let (gpu, mut rng) = (gpu(), rng(4));
        let Device::Cuda(device) = &gpu else { unreachable!("gpu() returns one") };
        for (out, inner) in [(16, 64), (161, 576), (96, 1536), (40, 4096), (24, 14_336), (300, 512)] {
            for rows in [1, 7, 8, 9, 16, 17, 33, 64, 100, 128, 150] {
                let (x, weight) = (random(&mut rng, rows * inner, 1.0), random(&mut rng, out * inner, 1.0));
                let mut want = vec![0.0f32; rows * out];
                for (i, want) in want.iter_mut().enumerate() {
                    let (x, w) = (&x[i / out * inner..][..inner], &weight[i % out * inner..][..inner]);
                    *want = x.iter().zip(w).map(|(x, w)| x.to_f64() * w.to_f64()).sum::<f64>() as f32;
                }
                let (x, weight) = (tensor(&gpu, &x, [rows, inner]), tensor(&gpu, &weight, [out, inner]));
                let label = format!("{rows} x {out} x {inner}");
                let mut y = tensor(&gpu, &vec![bf16::NAN; rows * out], [rows, out]);
                let mut in_f32 = Tensor::from_slice(&gpu, "y", &vec![f32::NAN; rows * out], [rows, out]).unwrap();
                for (by, most) in [(By::FewRows, 8), (By::MidRows, 128), (By::Library, usize::MAX)] {
                    if rows > most {
                        continue;
                    }
                    let label = format!("{label} {by:?}");
                    matmul_by(by, device, &x, &weight, &mut y).unwrap();
                    assert_close(&label, &y.to_vec::<bf16>().unwrap(), &want, BF16_BOUND);
                    matmul_by(by, device, &x, &weight, &mut in_f32).unwrap();
                    assert_close(&label, &in_f32.to_vec::<f32>().unwrap(), &want, 1e-5);
                    in_f32.copy_from_slice(&vec![f32::NAN; rows * out]).unwrap();
                    y.copy_from_slice(&vec![bf16::NAN; rows * out]).unwrap();
                }
            }
        }
    }
}
