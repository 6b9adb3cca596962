//! Launches `copy_columns.cu`.

use super::OP;
use crate::device::cuda::{CudaDevice, Launch};
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

/// Bytes one thread copies at a time.
const PIECE: usize = 16;

pub(super) fn copy_columns(device: &CudaDevice, x: &Tensor, y: &mut Tensor, first: usize) -> Result<()> {
    let ((tokens, cols), (_, width)) = (x.rows_cols(), y.rows_cols());
    let pieces = |what, columns: usize| match columns * x.dtype().bytes() {
        size if size.is_multiple_of(PIECE) => Ok((size / PIECE) as u32),
        size => Err(KernelError::NotMultiple { op: OP, what, size, of: PIECE }),
    };
    let of_x = pieces("bytes of a row of x", cols)?;
    let (of_y, first) = (pieces("bytes of a row of y", width)?, pieces("bytes before the first column", first)?);
    let args = [x.into(), y.into(), of_x.into(), of_y.into(), first.into()];
    let threads = of_x.next_multiple_of(32).min(1024);
    // SAFETY: `mod.rs` checked the shapes.
    unsafe { Launch::new(tokens, threads).run(device, OP, "copy_columns", &args) }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::copy_columns;
    use crate::device::Device;
    use crate::testing::{gpu, random, rng, tensor};

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(16));
        for (tokens, cols, parts) in [(1, 8, 2), (5, 576, 3), (3, 16_384, 3)] {
            let x = random(&mut rng, tokens * cols, 1.0);
            let y = random(&mut rng, tokens * cols * parts, 1.0);
            let run = |device: &Device| {
                let mut y = tensor(device, &y, [tokens, cols * parts]);
                copy_columns(&tensor(device, &x, [tokens, cols]), &mut y, cols).unwrap();
                y.to_vec::<bf16>().unwrap()
            };
            assert!(run(&gpu) == run(&Device::Cpu), "{tokens} x {cols}");
        }
    }
}
