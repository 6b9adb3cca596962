//! Takes tokens out of some rows of logits: those whose bit is not set get -inf.

mod cpu;
mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;
use crate::workspace::Workspace;

const OP: &str = "mask";

/// Words of 32 bits, the lowest first, that have a bit for each token.
pub const fn num_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

/// What [`mask`] takes from the workspace of a GPU at most.
pub const fn workspace_bytes(num_rows: usize, vocab: usize) -> usize {
    (4 * num_rows * num_words(vocab)).next_multiple_of(64) + (4 * num_rows).next_multiple_of(64)
}

/// `logits[rows[i], token] = -inf` where `bits[i]` has no bit for the token; other rows stay as they are.
///
/// | argument    | shape | dtype | |
/// |-------------|-------|-------|-|
/// | `logits`    | `[rows, vocab]` | f32 | changed in place |
/// | `rows`      | `[masked]`, each row once | on the host | read |
/// | `bits`      | `[masked, words]`, see [`num_words`] | on the host | read |
/// | `workspace` | takes at most [`workspace_bytes`] on a GPU, nothing on the CPU | | |
///
/// # Errors
/// `DType`; `Value` if a row is outside `logits`, or the bits are not as many as the rows need; `WorkspaceFull`.
pub fn mask(logits: &mut Tensor, rows: &[i32], bits: &[u32], workspace: &Workspace) -> Result<()> {
    logits.expect_dtype(OP, "logits", DType::F32)?;
    let (num_rows, vocab) = logits.rows_cols();
    if let Some(&row) = rows.iter().find(|&&row| row < 0 || row as usize >= num_rows) {
        return Err(KernelError::Value { op: OP, arg: "rows", got: row.into(), want: "rows of logits" });
    }
    if bits.len() != rows.len() * num_words(vocab) {
        return Err(KernelError::Value { op: OP, arg: "bits", got: bits.len() as i64, want: "words for each row" });
    }
    match logits.device().clone() {
        Device::Cpu => cpu::mask(logits.as_mut_slice(), vocab, rows, bits),
        Device::Cuda(device) => return cuda::mask(&device, logits, rows, bits, workspace),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(rows: &[i32], bits: &[u32]) -> Result<Vec<f32>> {
        let logits: Vec<f32> = (0..3 * 34).map(|i| i as f32).collect();
        let mut logits = Tensor::from_slice(&Device::Cpu, "logits", &logits, [3, 34])?;
        mask(&mut logits, rows, bits, &Workspace::new(&Device::Cpu, 64)?)?;
        Ok(logits.as_slice().to_vec())
    }

    #[test]
    fn tokens_without_a_bit_are_taken_out_of_their_row_alone() {
        let got = masked(&[2, 0], &[1 << 31, 0b10, u32::MAX, 0]).unwrap();
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
        let said = |rows: &[i32], bits: &[u32]| masked(rows, bits).unwrap_err().to_string();
        assert_eq!(said(&[3], &[0, 0]), "mask: rows is 3, expected rows of logits");
        assert_eq!(said(&[0], &[0]), "mask: bits is 1, expected words for each row");
    }
}
