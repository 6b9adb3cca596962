//! How many drafts hold, on the device: a drafter's passes may then follow the step that verifies its drafts without the host between.

mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

const OP: &str = "held_drafts";

/// A step that verified drafts, and what goes on from it. Sequence `s` of `seqs` had `each` tokens in it: its last one, then its drafts.
pub struct HeldDrafts<'a> {
    /// `[seqs * each]`: the tokens of the step.
    pub fed: &'a Tensor,
    /// `[seqs * each]`: the target's token after each of them.
    pub picked: &'a Tensor,
    /// `[seqs * each]`, written: what follows each, a draft where it holds and else what was picked; after the first that does not hold
    /// it means nothing.
    pub tokens: &'a mut Tensor,
    /// `[seqs]`, read and written: -1 becomes `s * each` and the number of leading drafts that equal what was picked before them. A
    /// number from 0 on says how many hold, whatever was picked.
    pub rows: &'a mut Tensor,
    /// `[any number * seqs]`, read and written: places that lie behind as many tokens more as drafts of their sequence hold.
    pub later: [&'a mut Tensor; 2],
}

/// Looks which drafts hold and brings forward what depends on it. All tensors are i32.
///
/// # Errors
/// `DType`, `Shape`, `Launch`.
pub fn held_drafts(step: &mut HeldDrafts<'_>) -> Result<()> {
    let (tokens, seqs) = (step.fed.shape().num_elements(), step.rows.shape().num_elements());
    let each = tokens.checked_div(seqs).unwrap_or(0);
    for (arg, tensor, len) in [
        ("fed", step.fed, seqs * each),
        ("picked", step.picked, seqs * each),
        ("tokens", &*step.tokens, seqs * each),
        ("rows", &*step.rows, seqs),
    ] {
        tensor.expect_dtype(OP, arg, DType::I32)?;
        tensor.expect_shape(OP, arg, [len])?;
    }
    for later in &step.later {
        let len = later.shape().num_elements();
        later.expect_dtype(OP, "later", DType::I32)?;
        later.expect_shape(OP, "later", [len])?;
        if seqs > 0 && !len.is_multiple_of(seqs) {
            return Err(KernelError::Value { op: OP, arg: "later", got: len as i64, want: "a multiple of seqs" });
        }
    }
    match step.fed.device().clone() {
        Device::Cpu => {
            on_cpu(step, seqs, each);
            Ok(())
        }
        Device::Cuda(device) => cuda::held_drafts(&device, step, seqs, each),
    }
}

fn on_cpu(step: &mut HeldDrafts<'_>, seqs: usize, each: usize) {
    let (fed, picked) = (step.fed.as_slice::<i32>(), step.picked.as_slice::<i32>());
    for seq in 0..seqs {
        let of_seq = seq * each..(seq + 1) * each;
        let (fed, picked) = (&fed[of_seq.clone()], &picked[of_seq.clone()]);
        let row = &mut step.rows.as_mut_slice::<i32>()[seq];
        let held = match usize::try_from(*row) {
            Ok(told) => told,
            Err(_) => fed[1..].iter().zip(picked).take_while(|(draft, picked)| draft == picked).count(),
        };
        *row = (seq * each + held) as i32;
        for (i, token) in step.tokens.as_mut_slice::<i32>()[of_seq].iter_mut().enumerate() {
            *token = if i < held && i + 1 < each { fed[i + 1] } else { picked[i] };
        }
        for later in &mut step.later {
            later.as_mut_slice::<i32>().iter_mut().skip(seq).step_by(seqs).for_each(|place| *place += held as i32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_drafts_hold_and_move_all_that_follows() {
        let vector = |values: &[i32]| Tensor::from_slice(&Device::Cpu, "v", values, [values.len()]).unwrap();
        // The first draft of the second sequence does not hold; the third is told that two do.
        let fed = vector(&[5, 6, 7, 8, 1, 2, 3, 4, 9, 8, 7, 6]);
        let picked = vector(&[6, 7, 0, 1, 3, 3, 4, 5, 1, 1, 1, 1]);
        let (mut tokens, mut rows) = (vector(&[-7; 12]), vector(&[-1, -1, 2]));
        let (mut positions, mut kv_lens) = (vector(&[10, 20, 30, 11, 21, 31]), vector(&[11, 21, 31]));
        held_drafts(&mut HeldDrafts {
            fed: &fed,
            picked: &picked,
            tokens: &mut tokens,
            rows: &mut rows,
            later: [&mut positions, &mut kv_lens],
        })
        .unwrap();
        assert_eq!(rows.as_slice::<i32>(), [2, 4, 10]);
        assert_eq!(tokens.as_slice::<i32>(), [6, 7, 0, 1, 3, 3, 4, 5, 8, 7, 1, 1]);
        assert_eq!(positions.as_slice::<i32>(), [12, 20, 32, 13, 21, 33]);
        assert_eq!(kv_lens.as_slice::<i32>(), [13, 21, 33]);
    }
}
