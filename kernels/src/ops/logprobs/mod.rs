//! Log-probabilities of given and of the likeliest tokens.

mod cpu;
mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

const OP: &str = "logprobs";

/// Most likeliest tokens of a row.
pub const MAX_TOP: usize = 32;

/// What [`logprobs`] writes.
#[derive(Debug)]
pub struct LogprobsOut<'a> {
    /// `[rows]` f32: of the given token.
    pub logprob: &'a mut Tensor,
    /// `[rows]` i32: 1 plus the number of likelier tokens, and of equally likely ones with a lower index.
    pub rank: &'a mut Tensor,
    /// `[rows, top]` i32: the likeliest tokens, the likeliest first, of equals the lower index first. `top` may be 0.
    pub top_ids: &'a mut Tensor,
    /// `[rows, top]` f32: theirs.
    pub top_logprobs: &'a mut Tensor,
}

/// The log-softmax of each row, at a given token and at the likeliest ones.
///
/// | argument | shape | dtype | |
/// |----------|-------|-------|-|
/// | `logits` | `[rows, vocab]` | f32 | read |
/// | `ids`    | `[rows]` | i32 | read; a negative one yields NaN and rank 0 |
/// | `out`    | see [`LogprobsOut`] | f32 and i32 | written |
///
/// `logit - max - ln(sum of exp(logit - max))`, the sum and the logarithm in f64. A row with NaN or +inf, or with nothing but
/// -inf, yields NaN and rank 0, and its likeliest tokens are -1.
///
/// # Errors
/// `Shape` or `DType` if the arguments do not agree, `Value` if `top` is over [`MAX_TOP`] or the vocabulary, or on the CPU an id
/// outside it, which on a GPU counts as a negative one.
pub fn logprobs(logits: &Tensor, ids: &Tensor, out: &mut LogprobsOut<'_>) -> Result<()> {
    let (num_rows, vocab) = logits.rows_cols();
    let (_, top) = out.top_ids.rows_cols();
    logits.expect_shape(OP, "logits", [num_rows, vocab])?;
    logits.expect_dtype(OP, "logits", DType::F32)?;
    for (arg, tensor, dtype) in
        [("ids", ids, DType::I32), ("logprob", out.logprob, DType::F32), ("rank", out.rank, DType::I32)]
    {
        tensor.expect_shape(OP, arg, [num_rows])?;
        tensor.expect_dtype(OP, arg, dtype)?;
    }
    out.top_ids.expect_shape(OP, "top_ids", [num_rows, top])?;
    out.top_ids.expect_dtype(OP, "top_ids", DType::I32)?;
    out.top_logprobs.expect_shape(OP, "top_logprobs", [num_rows, top])?;
    out.top_logprobs.expect_dtype(OP, "top_logprobs", DType::F32)?;
    if top > MAX_TOP.min(vocab) {
        return Err(KernelError::Value { op: OP, arg: "top", got: top as i64, want: "at most 32, and the vocabulary" });
    }
    match logits.device() {
        Device::Cpu => {
            let ids = ids.as_slice::<i32>();
            if let Some(&id) = ids.iter().find(|&&id| id >= 0 && id as usize >= vocab) {
                return Err(KernelError::Value {
                    op: OP,
                    arg: "ids",
                    got: id.into(),
                    want: "a token of the vocabulary",
                });
            }
            cpu::logprobs(logits.as_slice(), vocab, ids, top, out);
        }
        Device::Cuda(device) => cuda::logprobs(device, logits, ids, top, out)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The token's own log-probability and rank, and the top list.
    fn run(logits: &[f32], id: i32, top: usize) -> (f32, i32, Vec<(i32, f32)>) {
        let device = Device::Cpu;
        let logits = Tensor::from_slice(&device, "logits", logits, [1, logits.len()]).unwrap();
        let ids = Tensor::from_slice(&device, "ids", &[id], [1]).unwrap();
        let mut logprob = Tensor::zeros(&device, "logprob", [1], DType::F32).unwrap();
        let mut rank = Tensor::zeros(&device, "rank", [1], DType::I32).unwrap();
        let mut top_ids = Tensor::zeros(&device, "top_ids", [1, top], DType::I32).unwrap();
        let mut top_logprobs = Tensor::zeros(&device, "top_logprobs", [1, top], DType::F32).unwrap();
        let mut out = LogprobsOut {
            logprob: &mut logprob,
            rank: &mut rank,
            top_ids: &mut top_ids,
            top_logprobs: &mut top_logprobs,
        };
        logprobs(&logits, &ids, &mut out).unwrap();
        let top =
            top_ids.as_slice::<i32>().iter().copied().zip(top_logprobs.as_slice::<f32>().iter().copied()).collect();
        (logprob.as_slice::<f32>()[0], rank.as_slice::<i32>()[0], top)
    }

    #[test]
    fn probabilities_of_a_known_row() {
        // e^logit are 1, 2, 4, 1 of 8.
        let logits = [0.0, 2f32.ln(), 4f32.ln(), 0.0];
        let (logprob, rank, top) = run(&logits, 1, 3);
        assert!((logprob - 0.25f32.ln()).abs() < 1e-6);
        assert_eq!(rank, 2);
        let want = [(2, 0.5f32), (1, 0.25), (0, 0.125)];
        for ((id, logprob), (want_id, p)) in top.into_iter().zip(want) {
            assert_eq!(id, want_id);
            assert!((logprob - p.ln()).abs() < 1e-6);
        }
        assert_eq!(run(&logits, 0, 0).1, 3, "of equals the lower index comes first");
        assert_eq!(run(&logits, 3, 0).1, 4);
    }

    #[test]
    fn agrees_with_sorting() {
        use rand::{RngExt, SeedableRng};
        let mut rng = rand::rngs::StdRng::seed_from_u64(3);
        for vocab in [1usize, 5, 31, 64, 1000, 5003] {
            // Few distinct values: many ties.
            let logits: Vec<f32> = (0..vocab).map(|_| rng.random_range(-40i32..40) as f32 * 0.25).collect();
            let top = vocab.min(MAX_TOP);
            let id = rng.random_range(0..vocab);
            let (own, rank, likeliest) = run(&logits, id as i32, top);
            let mut order: Vec<usize> = (0..vocab).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
            let want = |i: usize| f64::from(logits[i]) - total.ln();
            assert_eq!(rank as usize, 1 + order.iter().position(|&i| i == id).unwrap());
            assert!((f64::from(own) - want(id)).abs() < 1e-5);
            for (got, &i) in likeliest.iter().zip(&order) {
                assert_eq!(got.0 as usize, i);
                assert!((f64::from(got.1) - want(i)).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn masked_tokens_are_impossible_and_bad_rows_say_so() {
        let inf = f32::INFINITY;
        let (logprob, rank, top) = run(&[1.0, -inf, 1.0], 1, 2);
        assert_eq!((logprob, rank), (-inf, 3));
        assert_eq!(top.iter().map(|top| top.0).collect::<Vec<_>>(), [0, 2]);
        for bad in [[f32::NAN, 1.0], [inf, 1.0], [-inf, -inf]] {
            let (logprob, rank, top) = run(&bad, 1, 1);
            assert!(logprob.is_nan());
            assert_eq!((rank, top[0].0), (0, -1));
        }
        assert!(run(&[0.0, 1.0], -1, 1).0.is_nan());
        assert_eq!(run(&[0.0, 1.0], -1, 1).2[0].0, 1, "the likeliest tokens of a row need no id");
    }
}
