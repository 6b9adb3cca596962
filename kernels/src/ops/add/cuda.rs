//! Launches `add.cu`.

use super::OP;
use crate::device::cuda::{CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

pub(super) fn add(device: &CudaDevice, y: &mut Tensor, x: &Tensor) -> Result<()> {
    let kernel = match y.dtype() {
        DType::BF16 => "add_bf16",
        DType::F32 => "add_f32",
        dtype => return Err(KernelError::DType { op: OP, arg: "y", dtype }),
    };
    let (rows, cols) = y.rows_cols();
    let threads = cols.next_multiple_of(32).clamp(32, 1024) as u32;
    let args = [y.into(), x.into(), (cols as u32).into()];
    // SAFETY: `mod.rs` checked the shapes.
    unsafe { Launch::new(rows, threads).run(device, OP, kernel, &args) }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::add;
    use crate::device::Device;
    use crate::testing::{gpu, random, rng, tensor};

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(15));
        for (rows, cols) in [(1, 8), (13, 1111), (3, 4096)] {
            let (x, y) = (random(&mut rng, rows * cols, 3.0), random(&mut rng, rows * cols, 0.5));
            let run = |device: &Device| {
                let mut y = tensor(device, &y, [rows, cols]);
                add(&mut y, &tensor(device, &x, [rows, cols])).unwrap();
                y.to_vec::<bf16>().unwrap()
            };
            assert!(run(&gpu) == run(&Device::Cpu), "{rows} x {cols}");
        }
    }
}
