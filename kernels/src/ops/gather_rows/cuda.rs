//! Launches `gather_rows.cu`.

use super::OP;
use crate::device::cuda::{CudaDevice, Launch};
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

/// Bytes one thread copies at a time.
const PIECE: usize = 16;

pub(super) fn gather_rows(device: &CudaDevice, x: &Tensor, rows: &Tensor, y: &mut Tensor) -> Result<()> {
    let (tokens, cols) = x.rows_cols();
    let (wanted, _) = y.rows_cols();
    let row_bytes = cols * x.dtype().bytes();
    if !row_bytes.is_multiple_of(PIECE) {
        return Err(KernelError::NotMultiple { op: OP, what: "bytes of a row", size: row_bytes, of: PIECE });
    }
    if tokens == 0 && wanted > 0 {
        return Err(KernelError::Value { op: OP, arg: "rows", got: 0, want: "rows of x" });
    }
    let pieces = row_bytes / PIECE;
    let args = [x.into(), rows.into(), y.into(), (tokens as u32).into(), (pieces as u32).into()];
    let threads = pieces.next_multiple_of(32).min(1024) as u32;
    // SAFETY: `mod.rs` checked the shapes; the kernel keeps rows inside x.
    unsafe { Launch::new(wanted, threads).run(device, OP, "gather_rows", &args) }
}

#[cfg(test)]
mod tests {
    use super::super::gather_rows;
    use crate::device::Device;
    use crate::dtype::DType;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, random, rng, tensor};
    use half::bf16;

    #[test]
    #[ignore = "needs a GPU"]
    fn rows_come_in_the_order_asked_for() {
        let (gpu, mut rng) = (gpu(), rng(7));
        let (tokens, cols, wanted) = (90, 4104, [89, 0, 17, 17, 3]);
        let x = random(&mut rng, tokens * cols, 1.0);
        let run = |device: &Device| {
            let rows = Tensor::from_slice(device, "rows", &wanted, [5]).unwrap();
            let mut y = Tensor::zeros(device, "y", [5, cols], DType::BF16).unwrap();
            gather_rows(&tensor(device, &x, [tokens, cols]), &rows, &mut y).unwrap();
            y.to_vec::<bf16>().unwrap()
        };
        assert!(run(&gpu) == run(&Device::Cpu));
    }
}
