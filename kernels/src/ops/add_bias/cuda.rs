//! Launches `add_bias.cu`.

use super::OP;
use crate::device::cuda::{CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

pub(super) fn add_bias(device: &CudaDevice, y: &mut Tensor, bias: &Tensor) -> Result<()> {
    let kernel = match y.dtype() {
        DType::BF16 => "add_bias_bf16",
        DType::F32 => "add_bias_f32",
        dtype => return Err(KernelError::DType { op: OP, arg: "y", dtype }),
    };
    let (tokens, cols) = y.rows_cols();
    let threads = cols.next_multiple_of(32).clamp(32, 1024) as u32;
    let args = [y.into(), bias.into(), (cols as u32).into()];
    // SAFETY: `mod.rs` checked the shapes.
    unsafe { Launch::new(tokens, threads).run(device, OP, kernel, &args) }
}

#[cfg(test)]
mod tests {
    use super::super::add_bias;
    use crate::device::Device;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, random, rng, tensor};
    use half::bf16;

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(8));
        let (tokens, cols) = (13, 1111);
        let y = random(&mut rng, tokens * cols, 3.0);
        let bias: Vec<f32> = random(&mut rng, cols, 0.5).iter().map(|b| b.to_f32() * 1.01).collect();
        let run = |device: &Device| {
            let bias = Tensor::from_slice(device, "bias", &bias, [cols]).unwrap();
            let mut y = tensor(device, &y, [tokens, cols]);
            add_bias(&mut y, &bias).unwrap();
            y.to_vec::<bf16>().unwrap()
        };
        assert!(run(&gpu) == run(&Device::Cpu));
    }
}
