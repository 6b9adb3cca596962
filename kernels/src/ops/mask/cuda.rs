//! Launches `mask.cu`.

use super::{OP, num_words};
use crate::device::cuda::{CudaDevice, Launch};
use crate::error::Result;
use crate::tensor::Tensor;

const THREADS: usize = 256;
/// Tokens of one thread.
const EACH: usize = 4;

pub(super) fn mask(device: &CudaDevice, logits: &mut Tensor, masks: &Tensor, bits: &Tensor) -> Result<()> {
    let (num_rows, vocab) = logits.rows_cols();
    let words = num_words(vocab);
    let args = [logits.into(), masks.into(), bits.into(), (vocab as u32).into(), (words as u32).into()];
    // SAFETY: `mod.rs` checked the shapes; that masks are rows of `bits` is the caller's word.
    unsafe { Launch::new([vocab.div_ceil(EACH * THREADS), num_rows], THREADS as u32).run(device, OP, "mask", &args) }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::super::{mask, num_words};
    use crate::device::Device;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, rng};

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(12));
        for (vocab, masks) in [
            (33, vec![1, -1, -1, 2, 0]),
            (1000, vec![0; 3]),
            (49_152, (0..64).map(|row| row % 5 - 1).collect()),
            (128_256, vec![-1, 0, 1]),
        ] {
            let num_rows = masks.len();
            let num_masks = masks.iter().max().unwrap() + 1;
            let logits: Vec<f32> = (0..num_rows * vocab).map(|_| rng.random_range(-9.0..9.0)).collect();
            // Of every other mask most words are all ones or all zeros, as those of grammars are.
            let word = |at: usize, any: i32| [any, [-1, 0, 0, any][any as usize % 4]][at / num_words(vocab) % 2];
            let bits: Vec<i32> = (0..num_masks as usize * num_words(vocab)).map(|at| word(at, rng.random())).collect();
            let run = |device: &Device| {
                let mut logits = Tensor::from_slice(device, "logits", &logits, [num_rows, vocab]).unwrap();
                let masks = Tensor::from_slice(device, "masks", &masks, [num_rows]).unwrap();
                let bits = Tensor::from_slice(device, "bits", &bits, [num_masks as usize, num_words(vocab)]).unwrap();
                mask(&mut logits, &masks, &bits).unwrap();
                logits.to_vec::<f32>().unwrap()
            };
            assert!(run(&gpu) == run(&Device::Cpu), "{num_rows} rows of {vocab}");
        }
    }
}
