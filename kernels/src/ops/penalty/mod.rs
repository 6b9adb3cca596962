//! Biases and penalties on the logits of tokens that stand in a sequence.
//!
//! Order and meaning as in vLLM: bias first, then repetition, frequency and presence. Works on one row at a time, from lists on the
//! host of the few tokens concerned; rows without any cost nothing.

mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

const OP: &str = "penalty";

/// A token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCount {
    pub token: u32,
    /// How often it stands in the output; 0 if in the prompt alone.
    pub num_output: u32,
}

/// How much what was said before counts against being said again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 changes nothing.
    pub repetition: f32,
    /// Subtracted once from the logit of each token in the output.
    pub presence: f32,
    /// Subtracted from a token's logit for every time it stands in the output.
    pub frequency: f32,
}

impl Penalties {
    /// Changes nothing.
    pub const NONE: Penalties = Penalties { repetition: 1.0, presence: 0.0, frequency: 0.0 };
}

/// Changes one row of logits, `[vocab]` f32 on the host.
///
/// `seen` has every distinct token of prompt and output once; `bias` is added to single tokens and may name one twice.
///
/// # Errors
/// `Value` if a token is outside the row; nothing is then written.
pub fn penalty(logits: &mut [f32], penalties: Penalties, seen: &[TokenCount], bias: &[(u32, f32)]) -> Result<()> {
    check(logits.len(), seen, bias)?;
    for &(token, bias) in bias {
        logits[token as usize] += bias;
    }
    if penalties == Penalties::NONE {
        return Ok(());
    }
    for &TokenCount { token, num_output } in seen {
        let logit = &mut logits[token as usize];
        *logit = if *logit > 0.0 { *logit / penalties.repetition } else { *logit * penalties.repetition };
        *logit -= penalties.frequency * num_output as f32;
        if num_output > 0 {
            *logit -= penalties.presence;
        }
    }
    Ok(())
}

/// [`penalty`] on a row where it lies: `logits` is `[1, vocab]` f32.
///
/// # Errors
/// As [`penalty`]; `DType`, `OutOfMemory`.
pub fn penalize(logits: &mut Tensor, penalties: Penalties, seen: &[TokenCount], bias: &[(u32, f32)]) -> Result<()> {
    logits.expect_dtype(OP, "logits", DType::F32)?;
    match logits.device().clone() {
        Device::Cpu => penalty(logits.as_mut_slice(), penalties, seen, bias),
        Device::Cuda(device) => {
            check(logits.shape().num_elements(), seen, bias)?;
            cuda::penalty(&device, logits, penalties, seen, bias)
        }
    }
}

fn check(vocab: usize, seen: &[TokenCount], bias: &[(u32, f32)]) -> Result<()> {
    let mut tokens = seen.iter().map(|seen| seen.token).chain(bias.iter().map(|&(token, _)| token));
    match tokens.find(|&token| token as usize >= vocab) {
        None => Ok(()),
        Some(token) => {
            Err(KernelError::Value { op: OP, arg: "token", got: token.into(), want: "a token of the vocabulary" })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits `[2, -2, 1, 0]`; token 0 in the prompt, 1 twice in the output, 2 once.
    fn after(penalties: Penalties, bias: &[(u32, f32)]) -> [f32; 4] {
        let mut logits = [2.0, -2.0, 1.0, 0.0];
        let seen = [(0, 0), (1, 2), (2, 1)].map(|(token, num_output)| TokenCount { token, num_output });
        penalty(&mut logits, penalties, &seen, bias).unwrap();
        logits
    }

    #[test]
    fn each_penalty_alone() {
        assert_eq!(after(Penalties::NONE, &[]), [2.0, -2.0, 1.0, 0.0]);
        assert_eq!(after(Penalties { repetition: 2.0, ..Penalties::NONE }, &[]), [1.0, -4.0, 0.5, 0.0]);
        assert_eq!(after(Penalties { presence: 0.5, ..Penalties::NONE }, &[]), [2.0, -2.5, 0.5, 0.0]);
        assert_eq!(after(Penalties { frequency: 0.5, ..Penalties::NONE }, &[]), [2.0, -3.0, 0.5, 0.0]);
    }

    #[test]
    fn bias_comes_before_penalties() {
        let doubled = Penalties { repetition: 2.0, ..Penalties::NONE };
        assert_eq!(after(doubled, &[(0, -3.0), (3, 1.0), (3, 1.0)]), [-2.0, -4.0, 0.5, 2.0]);
        assert_eq!(after(Penalties::NONE, &[(1, f32::NEG_INFINITY)])[1], f32::NEG_INFINITY);
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_named() {
        let err = penalty(&mut [0.0; 4], Penalties::NONE, &[], &[(4, 1.0)]).unwrap_err();
        assert_eq!(err.to_string(), "penalty: token is 4, expected a token of the vocabulary");
    }
}
