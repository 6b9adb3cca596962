//! Launches `concat.cu`.

use super::OP;
use crate::device::cuda::{CudaDevice, Launch};
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

/// Bytes one thread copies at a time.
const PIECE: usize = 16;

pub(super) fn concat(device: &CudaDevice, a: &Tensor, b: &Tensor, y: &mut Tensor) -> Result<()> {
    let (tokens, cols) = a.rows_cols();
    let row_bytes = cols * a.dtype().bytes();
    if !row_bytes.is_multiple_of(PIECE) {
        return Err(KernelError::NotMultiple { op: OP, what: "bytes of a row", size: row_bytes, of: PIECE });
    }
    let pieces = row_bytes / PIECE;
    let args = [a.into(), b.into(), y.into(), (pieces as u32).into()];
    let threads = (2 * pieces).next_multiple_of(32).min(1024) as u32;
    // SAFETY: `mod.rs` checked the shapes.
    unsafe { Launch::new(tokens, threads).run(device, OP, "concat", &args) }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::concat;
    use crate::device::Device;
    use crate::testing::{gpu, random, rng, tensor};

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(14));
        for (tokens, cols) in [(1, 8), (5, 576), (3, 4096), (2, 16_384)] {
            let (a, b) = (random(&mut rng, tokens * cols, 1.0), random(&mut rng, tokens * cols, 1.0));
            let run = |device: &Device| {
                let (a, b) = (tensor(device, &a, [tokens, cols]), tensor(device, &b, [tokens, cols]));
                let mut y = tensor(device, &vec![bf16::NAN; 2 * tokens * cols], [tokens, 2 * cols]);
                concat(&a, &b, &mut y).unwrap();
                y.to_vec::<bf16>().unwrap()
            };
            assert!(run(&gpu) == run(&Device::Cpu), "{tokens} x {cols}");
        }
    }
}
