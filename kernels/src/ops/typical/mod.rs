//! Takes untypical tokens out of some rows of logits: those whose surprise is far from the mean get -inf.
//!
//! Source: Meister et al. 2022, "Locally Typical Sampling", arXiv:2202.00666.

mod cpu;
mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

const OP: &str = "typical";

/// A row to be changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TypicalRow {
    pub row: usize,
    /// Divides the logits before anything is weighed; above 0.
    pub temperature: f32,
    /// The mass that is kept, in (0, 1).
    pub typical_p: f32,
}

/// Keeps, in each of `rows`, the tokens whose surprise is closest to the mean surprise, until they weigh `typical_p` together.
///
/// | argument | shape | dtype | |
/// |----------|-------|-------|-|
/// | `logits` | `[rows, vocab]` | f32 | changed in place: -inf for what goes |
/// | `rows`   | each once | on the host | read |
///
/// With `p = softmax(logits / temperature)`, surprise `s = -ln p` and mean `H = sum p s`, a token stays if those with smaller
/// `|s - H|` weigh less than `typical_p`: at least one stays, ties stay together. A row with a NaN, +inf, or nothing but -inf is left
/// as it is, for sampling to report.
///
/// # Errors
/// `DType`; `Value` if a row is outside `logits`.
pub fn typical(logits: &mut Tensor, rows: &[TypicalRow]) -> Result<()> {
    logits.expect_dtype(OP, "logits", DType::F32)?;
    let (num_rows, vocab) = logits.rows_cols();
    if let Some(outside) = rows.iter().find(|row| row.row >= num_rows) {
        return Err(KernelError::Value { op: OP, arg: "rows", got: outside.row as i64, want: "rows of logits" });
    }
    match logits.device().clone() {
        Device::Cpu => {
            let logits = logits.as_mut_slice();
            for row in rows {
                cpu::typical(&mut logits[row.row * vocab..][..vocab], row.temperature, row.typical_p);
            }
            Ok(())
        }
        Device::Cuda(device) => cuda::typical(&device, logits, rows),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which of some tokens with these probabilities stay.
    fn kept(probabilities: &[f64], temperature: f32, typical_p: f32) -> Vec<usize> {
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32 * temperature + 3.0).collect();
        let mut logits = Tensor::from_slice(&Device::Cpu, "logits", &logits, [1, logits.len()]).unwrap();
        typical(&mut logits, &[TypicalRow { row: 0, temperature, typical_p }]).unwrap();
        let logits = logits.as_slice::<f32>();
        (0..logits.len()).filter(|&token| logits[token] > f32::NEG_INFINITY).collect()
    }

    #[test]
    fn the_most_typical_are_not_always_the_likeliest() {
        // The mean surprise is 1.33 nats; the tokens' are 0.69, 1.61, 1.90, 2.30 and 3.00.
        let probabilities = [0.5, 0.2, 0.15, 0.1, 0.05];
        assert_eq!(kept(&probabilities, 1.0, 0.1), [1]);
        assert_eq!(kept(&probabilities, 1.0, 0.2), [1]);
        assert_eq!(kept(&probabilities, 1.0, 0.21), [1, 2]);
        assert_eq!(kept(&probabilities, 1.0, 0.36), [0, 1, 2]);
        assert_eq!(kept(&probabilities, 2.0, 0.71), [0, 1, 2], "the mass is that at the row's temperature");
        assert_eq!(kept(&probabilities, 1.0, 0.99), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn ties_stay_together_and_what_was_out_stays_out() {
        assert_eq!(kept(&[0.25; 4], 1.0, 0.3), [0, 1, 2, 3]);
        assert_eq!(kept(&[0.5, 0.0, 0.5], 1.0, 0.2), [0, 2]);
    }

    #[test]
    fn other_rows_and_lost_ones_stay_as_they_are() {
        let lost = [f32::NAN, 1.0, f32::NEG_INFINITY, f32::NEG_INFINITY, 2.0, 1.0];
        let mut logits = Tensor::from_slice(&Device::Cpu, "logits", &lost, [3, 2]).unwrap();
        let row = |row| TypicalRow { row, temperature: 1.0, typical_p: 0.1 };
        typical(&mut logits, &[row(0), row(1)]).unwrap();
        assert_eq!(format!("{:?}", logits.as_slice::<f32>()), "[NaN, 1.0, -inf, -inf, 2.0, 1.0]");
        let err = typical(&mut logits, &[row(3)]).unwrap_err().to_string();
        assert_eq!(err, "typical: rows is 3, expected rows of logits");
    }
}
