//! Launches `held_drafts.cu`.

use super::{HeldDrafts, OP};
use crate::device::cuda::{CudaDevice, Launch};
use crate::error::Result;

const THREADS: u32 = 128;

pub(super) fn held_drafts(device: &CudaDevice, step: &mut HeldDrafts<'_>, seqs: usize, each: usize) -> Result<()> {
    let [positions, kv_lens] = &mut step.later;
    let lens = [positions.shape().num_elements() as u32, kv_lens.shape().num_elements() as u32];
    let args = [
        step.fed.into(),
        step.picked.into(),
        (&mut *step.tokens).into(),
        (&mut *step.rows).into(),
        (&mut **positions).into(),
        (&mut **kv_lens).into(),
        (seqs as u32).into(),
        (each as u32).into(),
        lens[0].into(),
        lens[1].into(),
    ];
    // SAFETY: all are vectors of i32 of the lengths that were checked, and a thread stays inside its sequence's part of each.
    unsafe { Launch::new(1, THREADS).run(device, OP, "held_drafts", &args) }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::super::{HeldDrafts, held_drafts};
    use crate::device::Device;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, rng};

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(23));
        for (seqs, each, num_later) in [(1, 1, 0), (1, 4, 2), (8, 4, 2), (5, 6, 4), (300, 2, 1)] {
            // Of two tokens, so that some drafts hold.
            let mut random = |len: usize, below: i32| (0..len).map(|_| rng.random_range(0..below)).collect::<Vec<_>>();
            let (fed, picked) = (random(seqs * each, 2), random(seqs * each, 2));
            let told: Vec<i32> = random(seqs, 2 * each as i32).iter().map(|told| told - each as i32).collect();
            let rows: Vec<i32> = told.iter().map(|told| (*told).max(-1)).collect();
            let (positions, kv_lens) = (random(num_later * seqs, 900), random(num_later * seqs, 900));
            let run = |device: &Device| {
                let vector = |values: &[i32]| Tensor::from_slice(device, "v", values, [values.len()]).unwrap();
                let mut out = [&vec![-7; seqs * each], &rows, &positions, &kv_lens].map(|values| vector(values));
                let [tokens, rows, positions, kv_lens] = &mut out;
                let (fed, picked) = (vector(&fed), vector(&picked));
                held_drafts(&mut HeldDrafts { fed: &fed, picked: &picked, tokens, rows, later: [positions, kv_lens] })
                    .unwrap();
                out.map(|tensor| tensor.to_vec::<i32>().unwrap())
            };
            assert_eq!(run(&gpu), run(&Device::Cpu), "{seqs} sequences of {each}");
        }
    }
}
