//! Launches `logprobs.cu`.

use super::{LogprobsOut, OP};
use crate::device::cuda::{CudaDevice, Launch};
use crate::error::Result;
use crate::tensor::Tensor;

const THREADS: u32 = 1024;

pub(super) fn logprobs(
    device: &CudaDevice,
    logits: &Tensor,
    ids: &Tensor,
    top: usize,
    out: &mut LogprobsOut<'_>,
) -> Result<()> {
    let (num_rows, vocab) = logits.rows_cols();
    let args = [
        logits.into(),
        ids.into(),
        (&*out.logprob).into(),
        (&*out.rank).into(),
        (&*out.top_ids).into(),
        (&*out.top_logprobs).into(),
        (vocab as u32).into(),
        (top as u32).into(),
    ];
    // SAFETY: `mod.rs` checked the shapes; the kernel takes ids outside the vocabulary for none.
    unsafe { Launch::new(num_rows, THREADS).run(device, OP, "logprobs", &args) }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::super::{LogprobsOut, logprobs};
    use crate::device::Device;
    use crate::dtype::DType;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, rng};

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(10));
        for (rows, vocab, top) in [(4, 7, 5), (5, 1003, 0), (6, 49_152, 20)] {
            let mut logits: Vec<f32> = (0..rows * vocab).map(|_| rng.random_range(-40i32..40) as f32 * 0.25).collect();
            logits[1] = f32::NAN;
            logits[vocab + 1] = f32::NEG_INFINITY;
            let ids: Vec<i32> = (0..rows as i32).map(|i| if i == 2 { -1 } else { (i * 37) % vocab as i32 }).collect();
            let run = |device: &Device| {
                let logits = Tensor::from_slice(device, "logits", &logits, [rows, vocab]).unwrap();
                let ids = Tensor::from_slice(device, "ids", &ids, [rows]).unwrap();
                let mut logprob = Tensor::zeros(device, "l", [rows], DType::F32).unwrap();
                let mut rank = Tensor::zeros(device, "r", [rows], DType::I32).unwrap();
                let mut top_ids = Tensor::zeros(device, "t", [rows, top], DType::I32).unwrap();
                let mut top_logprobs = Tensor::zeros(device, "p", [rows, top], DType::F32).unwrap();
                let mut out = LogprobsOut {
                    logprob: &mut logprob,
                    rank: &mut rank,
                    top_ids: &mut top_ids,
                    top_logprobs: &mut top_logprobs,
                };
                logprobs(&logits, &ids, &mut out).unwrap();
                let mut values = logprob.to_vec::<f32>().unwrap();
                values.extend(top_logprobs.to_vec::<f32>().unwrap());
                (values, rank.to_vec::<i32>().unwrap(), top_ids.to_vec::<i32>().unwrap())
            };
            let ((got, got_rank, got_top), (want, want_rank, want_top)) = (run(&gpu), run(&Device::Cpu));
            assert_eq!(got_rank, want_rank);
            assert_eq!(got_top, want_top);
            for (got, want) in got.iter().zip(&want) {
                let equal = got == want || (got.is_nan() && want.is_nan());
                assert!(equal || (got - want).abs() < 1e-5, "{got} {want}");
            }
        }
    }
}
