//! Few rows by `few_rows.cu`, many by cuBLASLt; on a deterministic device all by `fixed_product.cu`.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::{Squares, fixed};
use crate::device::Device;
use crate::device::cuda::{CudaDevice, Launch, Product};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::{Tensor, ViewMut};

const OP: &str = "matmul_bf16";

/// Elements of `in` that a warp takes a turn.
const STEP: usize = 64;
const WARPS: usize = 8;
/// Rows that `few_rows.cu` takes at most.
const MOST_ROWS: usize = 8;
const DEPTH: usize = 4;
const TURN_BYTES: usize = 16 * STEP * 2;
/// Outputs whose squares are summed by one block.
const SQUARES: usize = 16;

/// Who multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    FewRows,
    Library,
    /// In one order for any number of rows; of a deterministic device.
    Fixed,
}

impl By {
    /// The fastest for so many rows, as measured: `benches/RESULTS.md`.
    pub fn rows(device: &CudaDevice, rows: usize, inner: usize) -> Self {
        match device.is_deterministic() {
            true => By::Fixed,
            false if rows <= MOST_ROWS && inner.is_multiple_of(STEP) => By::FewRows,
            false => By::Library,
        }
    }
}

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

    pub(super) fn gpu(&self) -> &Arc<CudaDevice> {
        &self.gpu
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
    matmul_by(By::rows(device, rows, inner), device, x, weight, y)
}

/// [`matmul`] by whom the caller chooses.
///
/// # Errors
/// As [`matmul`]; `Value` if there are more rows than who was chosen takes, or the device is not deterministic.
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
    if by == By::Fixed {
        let want = "on a deterministic device";
        let parts = device.parts().ok_or(KernelError::Value { op: OP, arg: "order", got: 0, want })?;
        return fixed::matmul(device, parts, x, weight, y);
    }
    if by == By::Library && rows > 0 {
        let product = Product { rows, out, inner, y: y.dtype() };
        // SAFETY: the shapes were checked.
        return unsafe { device.blas_matmul(product, x.device_address(), weight.device_address(), y.device_address()) };
    }
    own(store, device, x, None, weight, y)
}

/// [`matmul`] of rows that have yet to be normalised; `rows` and `in` as [`By::FewRows`] takes them.
///
/// # Errors
/// As [`matmul`].
pub fn matmul_normed(
    device: &CudaDevice,
    x: &Tensor,
    squares: Squares<'_>,
    weight: &Tensor,
    y: &mut Tensor,
) -> Result<()> {
    let store = if y.dtype() == DType::F32 { Store::F32 } else { Store::Bf16 };
    let ((rows, _), (out, _)) = (x.rows_cols(), weight.rows_cols());
    y.expect_shape(OP, "y", [rows, out])?;
    normed(store, device, x, squares, weight, y)
}

/// [`gated`] of rows that have yet to be normalised.
///
/// # Errors
/// As [`matmul`].
pub fn gated_normed(
    device: &CudaDevice,
    x: &Tensor,
    squares: Squares<'_>,
    weight: &Tensor,
    y: &mut Tensor,
) -> Result<()> {
    let ((rows, _), (out, _)) = (x.rows_cols(), weight.rows_cols());
    y.expect_shape(OP, "y", [rows, out / 2])?;
    normed(Store::Gated, device, x, squares, weight, y)
}

fn normed(
    store: Store,
    device: &CudaDevice,
    x: &Tensor,
    squares: Squares<'_>,
    weight: &Tensor,
    y: &mut Tensor,
) -> Result<()> {
    x.expect_dtype(OP, "x", DType::BF16)?;
    let ((rows, inner), (out, _)) = (x.rows_cols(), weight.rows_cols());
    weight.expect_shape(OP, "weight", [out, inner])?;
    squares.parts.expect_shape(OP, "squares", [rows, inner / SQUARES])?;
    squares.parts.expect_dtype(OP, "squares", DType::F32)?;
    own(store, device, x, Some(squares), weight, y)
}

/// `residual += x weightᵀ`, `y = residual * norm`, and `squares[row, i]` is the sum of squares of outputs 16 i to 16 i + 15.
///
/// # Errors
/// As [`matmul`].
pub fn add_norm(
    device: &CudaDevice,
    x: &Tensor,
    weight: &Tensor,
    residual: &mut Tensor,
    norm: &Tensor,
    y: &mut Tensor,
    squares: &mut Tensor,
) -> Result<()> {
    let ((rows, inner), (out, _)) = (x.rows_cols(), weight.rows_cols());
    weight.expect_shape(OP, "weight", [out, inner])?;
    for (arg, tensor) in [("x", x), ("residual", &*residual), ("y", &*y)] {
        tensor.expect_dtype(OP, arg, DType::BF16)?;
    }
    residual.expect_shape(OP, "residual", [rows, out])?;
    y.expect_shape(OP, "y", [rows, out])?;
    norm.expect_shape(OP, "norm", [out])?;
    norm.expect_dtype(OP, "norm", DType::F32)?;
    squares.expect_shape(OP, "squares", [rows, out / SQUARES])?;
    squares.expect_dtype(OP, "squares", DType::F32)?;
    check_rows(rows)?;
    for (what, size, of) in [("out", out, SQUARES), ("in", inner, STEP)] {
        if !size.is_multiple_of(of) {
            return Err(KernelError::NotMultiple { op: OP, what, size, of });
        }
    }
    if rows == 0 {
        return Ok(());
    }
    let [n_rows, n_out, n_in] = [rows, out, inner].map(|number| (number as u32).into());
    let (residual, squares) = (residual.into(), squares.into());
    let args = [x.into(), weight.into(), y.into(), residual, norm.into(), squares, n_rows, n_out, n_in];
    // SAFETY: the shapes were checked.
    unsafe { launch(out).run(device, "few_rows", "few_rows_8_add", &args) }
}

/// Whether [`add_norm`], [`matmul_normed`] and [`gated_normed`] all take such a product.
pub(super) fn spreads_norm(device: &CudaDevice, rows: usize, out: usize, inner: usize) -> bool {
    !device.is_deterministic() && rows <= MOST_ROWS && out.is_multiple_of(SQUARES) && inner.is_multiple_of(STEP)
}

/// `y = silu(x gateᵀ) * (x upᵀ)`, `weight` being gate and below it up, `[2 * inner, in]`; both products are rounded to bf16 first.
/// `false` and nothing done if there is no kernel for the shape.
///
/// # Errors
/// As [`matmul`].
pub fn gated(device: &CudaDevice, x: &Tensor, weight: &Tensor, y: &mut Tensor) -> Result<bool> {
    let ((rows, inner), (out, _)) = (x.rows_cols(), weight.rows_cols());
    let by = By::rows(device, rows, inner);
    let is_few = match by {
        By::FewRows => true,
        By::Fixed => rows <= fixed::MOST_GATED && inner.is_multiple_of(fixed::VECTOR),
        By::Library => false,
    };
    if !is_few || !out.is_multiple_of(16) {
        return Ok(false);
    }
    x.expect_dtype(OP, "x", DType::BF16)?;
    weight.expect_dtype(OP, "weight", DType::BF16)?;
    weight.expect_shape(OP, "weight", [out, inner])?;
    y.expect_shape(OP, "y", [rows, out / 2])?;
    y.expect_dtype(OP, "y", DType::BF16)?;
    match by {
        By::Fixed => fixed::gated(device, x, weight, y)?,
        _ => own(Store::Gated, device, x, None, weight, y)?,
    }
    Ok(true)
}

/// By our own kernel; all but the number of rows is checked.
fn own(
    store: Store,
    device: &CudaDevice,
    x: &Tensor,
    squares: Option<Squares<'_>>,
    weight: &Tensor,
    y: &mut Tensor,
) -> Result<()> {
    let ((rows, inner), (out, _)) = (x.rows_cols(), weight.rows_cols());
    if rows == 0 {
        return Ok(());
    }
    check_rows(rows)?;
    if !inner.is_multiple_of(STEP) {
        return Err(KernelError::NotMultiple { op: OP, what: "in", size: inner, of: STEP });
    }
    let [n_rows, n_out, n_in] = [rows, out, inner].map(|number| (number as u32).into());
    let kernel = ["few_rows_8_bf16", "few_rows_8_f32", "few_rows_8_gated"][store as usize];
    let (parts, eps) = squares.map_or((0, 0.0), |squares| (squares.parts.device_address(), squares.eps));
    let args = [x.into(), weight.into(), y.into(), parts.into(), eps.into(), n_rows, n_out, n_in];
    // SAFETY: the shapes were checked.
    unsafe { launch(out).run(device, "few_rows", kernel, &args) }
}

fn check_rows(rows: usize) -> Result<()> {
    if rows > MOST_ROWS {
        return Err(KernelError::Value { op: OP, arg: "rows", got: rows as i64, want: "at most 8" });
    }
    Ok(())
}

fn launch(out: usize) -> Launch {
    Launch::new(out.div_ceil(16), 32 * WARPS as u32).shared_bytes(WARPS * DEPTH * TURN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::rms_norm::add_rms_norm;
    use crate::ops::silu_mul::silu_mul;
    use crate::testing::{BF16_BOUND, assert_close, deterministic_gpu, gpu, random, rng, tensor};

    #[test]
    #[ignore = "needs a GPU"]
    fn a_gated_product_is_the_product_and_then_the_gate() {
        let mut rng = rng(12);
        for (gpu, rows) in [(gpu(), &[1, 5, 8][..]), (deterministic_gpu(), &[1, 5, 8, 9, 16])] {
            let Device::Cuda(device) = &gpu else { unreachable!("it is one") };
            for (half, inner) in [(8, 64), (1536, 576), (520, if device.is_deterministic() { 1000 } else { 1024 })] {
                for &rows in rows {
                    let x = tensor(&gpu, &random(&mut rng, rows * inner, 1.0), [rows, inner]);
                    let weight = tensor(&gpu, &random(&mut rng, 2 * half * inner, 0.3), [2 * half, inner]);
                    let mut both = tensor(&gpu, &vec![bf16::NAN; rows * 2 * half], [rows, 2 * half]);
                    matmul(device, &x, &weight, &mut both).unwrap();
                    let mut want = tensor(&gpu, &vec![bf16::NAN; rows * half], [rows, half]);
                    silu_mul(&both, &mut want).unwrap();
                    let mut y = tensor(&gpu, &vec![bf16::NAN; rows * half], [rows, half]);
                    assert!(gated(device, &x, &weight, &mut y).unwrap());
                    let (label, [y, want]) =
                        (format!("{rows} x {half} x {inner}"), [y, want].map(|y| y.to_vec::<bf16>().unwrap()));
                    assert_close(&label, &y, &want, BF16_BOUND);
                    let bits = |y: &[bf16]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
                    assert!(!device.is_deterministic() || bits(&y) == bits(&want), "{label}");
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_norm_spread_over_two_products_is_the_norm_between_them() {
        let (gpu, mut rng) = (gpu(), rng(13));
        let Device::Cuda(device) = &gpu else { unreachable!("gpu() returns one") };
        for (inner, hidden, out) in [(64, 64, 48), (1536, 576, 960), (128, 4096, 520), (64, 16_384, 40)] {
            for rows in [1, 3, 8] {
                let mut matrix =
                    |rows, cols, spread| tensor(&gpu, &random(&mut rng, rows * cols, spread), [rows, cols]);
                let (x, residual) = (matrix(rows, inner, 1.0), matrix(rows, hidden, 3.0).to_vec::<bf16>().unwrap());
                let (first, second) = (matrix(hidden, inner, 0.5), matrix(2 * out, hidden, 0.1));
                let norm: Vec<f32> = random(&mut rng, hidden, 1.5).iter().map(|w| w.to_f32()).collect();
                let norm = Tensor::from_slice(&gpu, "norm", &norm, [hidden]).unwrap();
                let empty = |cols| tensor(&gpu, &vec![bf16::NAN; rows * cols], [rows, cols]);

                let (mut sum, mut y) = (tensor(&gpu, &residual, [rows, hidden]), empty(hidden));
                matmul(device, &x, &first, &mut y).unwrap();
                add_rms_norm(&mut y, &mut sum, &norm, 1e-5).unwrap();
                let (mut plain, mut gates) = (empty(2 * out), empty(out));
                matmul(device, &y, &second, &mut plain).unwrap();
                gated(device, &y, &second, &mut gates).unwrap();

                let (mut spread_sum, mut y) = (tensor(&gpu, &residual, [rows, hidden]), empty(hidden));
                let mut parts =
                    Tensor::from_slice(&gpu, "parts", &vec![f32::NAN; rows * hidden / 16], [rows, hidden / 16])
                        .unwrap();
                add_norm(device, &x, &first, &mut spread_sum, &norm, &mut y, &mut parts).unwrap();
                let squares = Squares { parts: &parts, eps: 1e-5 };
                let (mut spread_plain, mut spread_gates) = (empty(2 * out), empty(out));
                matmul_normed(device, &y, squares, &second, &mut spread_plain).unwrap();
                gated_normed(device, &y, squares, &second, &mut spread_gates).unwrap();

                let label = format!("{rows} x {inner} x {hidden} x {out}");
                for (got, want) in [(&spread_sum, &sum), (&spread_plain, &plain), (&spread_gates, &gates)] {
                    assert_close(&label, &got.to_vec::<bf16>().unwrap(), &want.to_vec::<bf16>().unwrap(), BF16_BOUND);
                }
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
                for (by, most) in [(By::FewRows, MOST_ROWS), (By::Library, usize::MAX)] {
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
