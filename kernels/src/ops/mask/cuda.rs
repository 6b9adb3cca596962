//! Launches `mask.cu`.

use super::{OP, num_words};
use crate::device::cuda::{CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::workspace::Workspace;

const THREADS: usize = 256;

pub(super) fn mask(
    device: &CudaDevice,
    logits: &mut Tensor,
    rows: &[i32],
    bits: &[u32],
    workspace: &Workspace,
) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let (_, vocab) = logits.rows_cols();
    let words = num_words(vocab);
    let mut bits_there = workspace.take([rows.len(), words], DType::I32)?;
    let mut rows_there = workspace.take([rows.len()], DType::I32)?;
    let bits: Vec<i32> = bits.iter().map(|&word| word as i32).collect();
    bits_there.copy_from_slice(&bits)?;
    rows_there.copy_from_slice(rows)?;
    let blocks = vocab.div_ceil(THREADS);
    let args =
        [logits.into(), (&rows_there).into(), (&bits_there).into(), (vocab as u32).into(), (words as u32).into()];
    // SAFETY: `mod.rs` checked rows and bits against the logits; the lists stay in the workspace until the stream has passed.
    unsafe { Launch::new([blocks, rows.len()], THREADS as u32).run(device, OP, "mask", &args) }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::super::{mask, num_words, workspace_bytes};
    use crate::device::Device;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, rng};
    use crate::workspace::Workspace;

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(12));
        for (num_rows, vocab, rows) in [(5, 33, vec![4, 0]), (64, 49_152, vec![63, 1, 7]), (3, 128_256, vec![1])] {
            let logits: Vec<f32> = (0..num_rows * vocab).map(|_| rng.random_range(-9.0..9.0)).collect();
            let bits: Vec<u32> = (0..rows.len() * num_words(vocab)).map(|_| rng.random()).collect();
            let run = |device: &Device| {
                let mut logits = Tensor::from_slice(device, "logits", &logits, [num_rows, vocab]).unwrap();
                let workspace = Workspace::new(device, workspace_bytes(rows.len(), vocab)).unwrap();
                mask(&mut logits, &rows, &bits, &workspace).unwrap();
                logits.to_vec::<f32>().unwrap()
            };
            assert!(run(&gpu) == run(&Device::Cpu), "{num_rows} rows of {vocab}");
        }
    }
}
