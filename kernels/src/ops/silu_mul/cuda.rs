//! Launches `silu_mul.cu`.

use super::OP;
use crate::device::cuda::{CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

const THREADS: usize = 256;

pub(super) fn silu_mul(device: &CudaDevice, gate_up: &Tensor, y: &mut Tensor) -> Result<()> {
    y.expect_dtype(OP, "y", DType::BF16)?;
    let (rows, inner) = y.rows_cols();
    if !inner.is_multiple_of(8) {
        return Err(KernelError::NotMultiple { op: OP, what: "inner", size: inner, of: 8 });
    }
    let grid = [rows, (inner / 8).div_ceil(THREADS)];
    let args = [gate_up.into(), y.into(), (inner as u32).into()];
    // SAFETY: `mod.rs` checked the shapes.
    unsafe { Launch::new(grid, THREADS as u32).run(device, OP, "silu_mul_bf16", &args) }
}

#[cfg(test)]
mod tests {
    use super::super::silu_mul;
    use crate::device::Device;
    use crate::testing::{BF16_BOUND, assert_close, gpu, random, rng, tensor};
    use half::bf16;

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(2));
        for (rows, inner) in [(1, 8), (2, 1536), (33, 14_336)] {
            let gate_up = random(&mut rng, rows * 2 * inner, 6.0);
            let run = |device: &Device| {
                let mut y = tensor(device, &vec![bf16::NAN; rows * inner], [rows, inner]);
                silu_mul(&tensor(device, &gate_up, [rows, 2 * inner]), &mut y).unwrap();
                y.to_vec::<bf16>().unwrap()
            };
            assert_close(&format!("{rows} x {inner}"), &run(&gpu), &run(&Device::Cpu), BF16_BOUND);
        }
    }
}
