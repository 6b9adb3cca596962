//! Launches `copy_rows.cu`.

use super::OP;
use crate::device::cuda::{Arg, CudaDevice, Launch};
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

/// Bytes one thread copies of a row.
const PIECE: usize = 16;
const THREADS: usize = 256;
/// Pairs that fit into a launch's arguments.
const MOST_PAIRS: usize = 256;

pub(super) fn copy(device: &CudaDevice, x: &Tensor, y: &mut Tensor) -> Result<()> {
    // SAFETY: both are tensors of as many bytes, and `&mut y` excludes that they overlap.
    unsafe { device.copy(y.device_address() as *mut u8, x.device_address() as *const u8, x.size_bytes()) }
}

/// `x` and `y` are addresses of tensors whose rows are `row_bytes` long and include those of the pairs.
pub(super) fn copy_rows(device: &CudaDevice, x: u64, y: u64, row_bytes: usize, pairs: &[(u32, u32)]) -> Result<()> {
    if !row_bytes.is_multiple_of(PIECE) {
        return Err(KernelError::NotMultiple { op: OP, what: "bytes of a row", size: row_bytes, of: PIECE });
    }
    let pieces = row_bytes / PIECE;
    for pairs in pairs.chunks(MOST_PAIRS) {
        let mut list = [0u32; 1 + 2 * MOST_PAIRS];
        list[0] = pairs.len() as u32;
        for (entry, &(from, to)) in list[1..].chunks_mut(2).zip(pairs) {
            (entry[0], entry[1]) = (from, to);
        }
        let args = [x.into(), y.into(), (pieces as u32).into(), Arg::Struct(&list)];
        // SAFETY: `mod.rs` checked that the rows are inside the tensors.
        unsafe { Launch::new(pieces.div_ceil(THREADS), THREADS as u32).run(device, OP, "copy_rows", &args)? };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{copy, copy_rows, copy_rows_from};
    use crate::device::Device;
    use crate::testing::{gpu, random, rng, tensor};
    use half::bf16;

    #[test]
    #[ignore = "needs a GPU"]
    fn rows_go_where_the_reference_puts_them() {
        let (gpu, mut rng) = (gpu(), rng(6));
        let (rows, cols) = (300, 2056);
        let (x, y) = (random(&mut rng, rows * cols, 1.0), random(&mut rng, rows * cols, 1.0));
        let pairs: Vec<(u32, u32)> = (0..290u32).map(|i| (i * 7 % 300, (i * 11 + 3) % 300)).collect();
        let run = |device: &Device| {
            let (x, mut y) = (tensor(device, &x, [rows, cols]), tensor(device, &y, [rows, cols]));
            copy_rows_from(&x, &mut y, &pairs).unwrap();
            let from = y.to_vec::<bf16>().unwrap();
            copy_rows(&mut y, &pairs).unwrap();
            let within = y.to_vec::<bf16>().unwrap();
            copy(&x, &mut y).unwrap();
            (from, within, y.to_vec::<bf16>().unwrap())
        };
        assert!(run(&gpu) == run(&Device::Cpu));
    }
}
