//! Few rows by `few_rows.cu`, many by cuBLASLt.

use std::sync::Arc;

use half::bf16;

use crate::device::Device;
use crate::device::cuda::{CudaDevice, Launch, Product};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

const OP: &str = "matmul_bf16";

/// Elements of `in` a warp takes a turn.
const STEP: usize = 64;
const WARPS: usize = 8;
const DEPTH: usize = 4;
const TURN_BYTES: usize = 16 * STEP * 2;

/// Most rows that stream the weights faster by our own kernel than by the library.
const FEW_ROWS: usize = 8;

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
}

/// `y = x weightᵀ`; x `[rows, in]` bf16, weight `[out, in]` bf16, y `[rows, out]` bf16 or f32.
pub fn matmul(device: &CudaDevice, x: &Tensor, weight: &Tensor, y: &mut Tensor) -> Result<()> {
    x.expect_dtype(OP, "x", DType::BF16)?;
    weight.expect_dtype(OP, "weight", DType::BF16)?;
    let ((rows, inner), (out, _)) = (x.rows_cols(), weight.rows_cols());
    weight.expect_shape(OP, "weight", [out, inner])?;
    y.expect_shape(OP, "y", [rows, out])?;
    if rows == 0 {
        return Ok(());
    }
    if rows > FEW_ROWS || !inner.is_multiple_of(STEP) {
        let product = Product { rows, out, inner, y: y.dtype() };
        // SAFETY: the shapes were checked.
        return unsafe { device.blas_matmul(product, x.device_address(), weight.device_address(), y.device_address()) };
    }
    let kernel = match y.dtype() {
        DType::BF16 => "few_rows_8_bf16",
        DType::F32 => "few_rows_8_f32",
        dtype => return Err(KernelError::DType { op: OP, arg: "y", dtype }),
    };
    let args = [x.into(), weight.into(), y.into(), (rows as u32).into(), (out as u32).into(), (inner as u32).into()];
    let launch = Launch::new(out.div_ceil(16), 32 * WARPS as u32).shared_bytes(WARPS * DEPTH * TURN_BYTES);
    // SAFETY: the shapes were checked.
    unsafe { launch.run(device, "few_rows", kernel, &args) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{BF16_BOUND, assert_close, gpu, random, rng, tensor};

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_sums_in_double() {
        let (gpu, mut rng) = (gpu(), rng(4));
        let Device::Cuda(device) = &gpu else { unreachable!("gpu() returns one") };
        for (out, inner) in [(16, 64), (960, 576), (576, 1536), (40, 4096), (24, 14_336)] {
            for rows in [1, 2, 7, 8, 9, 16, 17, 32, 33, 100] {
                let (x, weight) = (random(&mut rng, rows * inner, 1.0), random(&mut rng, out * inner, 1.0));
                let mut want = vec![0.0f32; rows * out];
                for (i, want) in want.iter_mut().enumerate() {
                    let (x, w) = (&x[i / out * inner..][..inner], &weight[i % out * inner..][..inner]);
                    *want = x.iter().zip(w).map(|(x, w)| x.to_f64() * w.to_f64()).sum::<f64>() as f32;
                }
                let (x, weight) = (tensor(&gpu, &x, [rows, inner]), tensor(&gpu, &weight, [out, inner]));
                let label = format!("{rows} x {out} x {inner}");
                let mut y = tensor(&gpu, &vec![bf16::NAN; rows * out], [rows, out]);
                matmul(device, &x, &weight, &mut y).unwrap();
                assert_close(&label, &y.to_vec::<bf16>().unwrap(), &want, BF16_BOUND);
                let mut y = Tensor::from_slice(&gpu, "y", &vec![f32::NAN; rows * out], [rows, out]).unwrap();
                matmul(device, &x, &weight, &mut y).unwrap();
                assert_close(&label, &y.to_vec::<f32>().unwrap(), &want, 1e-5);
            }
        }
    }
}
