//! Takes tokens out of some rows of logits: those whose bit is not set get -inf.

mod cpu;
mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

const OP: &str = "mask";

/// Words of 32 bits, the lowest first, that have a bit for each token.
pub const fn num_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

/// `logits[row, token] = -inf` where the mask of the row has no bit for the token; rows without a mask stay as they are.
///
/// | argument | shape | dtype | |
/// |----------|-------|-------|-|
/// | `logits` | `[rows, vocab]` | f32 | changed in place |
/// | `masks`  | `[rows]` | i32 | read: the row of `bits` that is the row's mask; less than 0: it has none |
/// | `bits`   | `[masks, words]`, see [`num_words`] | i32, as bits | read |
///
/// # Errors
/// `DType`, `Shape`.
///
/// # Panics
/// On the CPU, if a mask is not in `bits`. On a GPU nothing checks that.
pub fn mask(logits: &mut Tensor, masks: &Tensor, bits: &Tensor) -> Result<()> {
    let (num_rows, vocab) = logits.rows_cols();
    logits.expect_dtype(OP, "logits", DType::F32)?;
    masks.expect_shape(OP, "masks", [num_rows])?;
    masks.expect_dtype(OP, "masks", DType::I32)?;
    let (num_masks, _) = bits.rows_cols();
    bits.expect_shape(OP, "bits", [num_masks, num_words(vocab)])?;
    bits.expect_dtype(OP, "bits", DType::I32)?;
    match logits.device().clone() {
        Device::Cpu => cpu::mask(logits.as_mut_slice(), vocab, masks.as_slice(), bits.as_slice()),
        Device::Cuda(device) => return cuda::mask(&device, logits, masks, bits),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(masks: &[i32], bits: &[i32]) -> Result<Vec<f32>> {
        let logits: Vec<f32> = (0..3 * 34).map(|i| i as f32).collect();
        let mut logits = Tensor::from_slice(&Device::Cpu, "logits", &logits, [3, 34])?;
        let masks = Tensor::from_slice(&Device::Cpu, "masks", masks, [masks.len()])?;
        let bits = Tensor::from_slice(&Device::Cpu, "bits", bits, [2, bits.len() / 2])?;
        mask(&mut logits, &masks, &bits)?;
        Ok(logits.as_slice().to_vec())
    }

    #[test]
    fn tokens_without_a_bit_are_taken_out_of_their_row_alone() {
        let got = masked(&[1, -1, 0], &[1 << 31, 0b10, -1, 0]).unwrap();
        for (i, logit) in got.into_iter().enumerate() {
            let kept = match i / 34 {
                0 => i % 34 < 32,
                1 => true,
                _ => [31, 33].contains(&(i % 34)),
            };
            assert_eq!(logit, if kept { i as f32 } else { f32::NEG_INFINITY }, "{i}");
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let said = |masks: &[i32], bits: &[i32]| masked(masks, bits).unwrap_err().to_string();
        assert!(said(&[0], &[0; 4]).contains("masks"), "{}", said(&[0], &[0; 4]));
        assert!(said(&[0; 3], &[0; 2]).contains("bits"), "{}", said(&[0; 3], &[0; 2]));
    }
}
