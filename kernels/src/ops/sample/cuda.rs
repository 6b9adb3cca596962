//! Launches `sample_cluster.cu` for few rows on Hopper, `sample.cu` for others.

use super::{OP, SampleRows};
use crate::device::cuda::{CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;
use crate::workspace::Workspace;

const THREADS: u32 = 1024;
/// Blocks that share a row at most; a warp reads what they found.
const MOST_PARTS: usize = 32;
/// Logits that are worth a block of their own.
const PART: usize = 4096;
/// Rows that are worth eight blocks each: about as many clusters run at once on 132 multiprocessors.
const FEW_ROWS: usize = 16;
/// Blocks of a row in `sample_cluster.cu`, and dynamic shared memory that each may ask for beside its own.
const CLUSTER: usize = 8;
const MOST_SHARED: usize = 216 << 10;
/// Weights are summed as integers that a larger vocabulary might overflow.
const MOST_VOCAB: usize = 1 << 18;

/// What rows take of the workspace at most.
pub(super) fn workspace_bytes(num_rows: usize) -> usize {
    (num_rows * MOST_PARTS * 8).next_multiple_of(64)
}

pub(super) fn sample(
    device: &CudaDevice,
    logits: &Tensor,
    rows: &SampleRows<'_>,
    ids: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    let (num_rows, vocab) = logits.rows_cols();
    if vocab > MOST_VOCAB {
        return Err(KernelError::Value { op: OP, arg: "vocab", got: vocab as i64, want: "at most 262144 on a GPU" });
    }
    if device.is_hopper() && num_rows <= FEW_ROWS {
        return sample_cluster(device, logits, rows, ids);
    }
    // About two blocks a multiprocessor.
    let shares = (2 * device.num_multiprocessors() as usize).div_ceil(num_rows.max(1));
    let parts = vocab.div_ceil(PART).min(shares).clamp(1, MOST_PARTS);
    let mut partials = workspace.take([num_rows * parts, 2], DType::I32)?;
    let args = [
        logits.into(),
        rows.temperature.into(),
        rows.top_k.into(),
        rows.top_p.into(),
        rows.min_p.into(),
        rows.seed.into(),
        rows.position.into(),
        ids.into(),
        (&mut partials).into(),
        device.counters().into(),
        (vocab as u32).into(),
    ];
    // SAFETY: `mod.rs` checked the shapes, and there is a counter for as many rows as a grid has.
    unsafe { Launch::new([parts, num_rows], THREADS).run(device, OP, "sample", &args) }
}

fn sample_cluster(device: &CudaDevice, logits: &Tensor, rows: &SampleRows<'_>, ids: &mut Tensor) -> Result<()> {
    let (num_rows, vocab) = logits.rows_cols();
    // A block's weights, and its logits if they fit beside them.
    let run_bytes = vocab.div_ceil(CLUSTER).next_multiple_of(4) * size_of::<f32>();
    let keeps_logits = 2 * run_bytes <= MOST_SHARED;
    let args = [
        logits.into(),
        rows.temperature.into(),
        rows.top_k.into(),
        rows.top_p.into(),
        rows.min_p.into(),
        rows.seed.into(),
        rows.position.into(),
        ids.into(),
        (vocab as u32).into(),
        u32::from(keeps_logits).into(),
    ];
    let launch = Launch::new([CLUSTER, num_rows], THREADS).shared_bytes(run_bytes * (1 + usize::from(keeps_logits)));
    // SAFETY: `mod.rs` checked the shapes.
    unsafe { launch.run(device, "sample_cluster", "sample_cluster", &args) }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::super::{SampleRows, sample};
    use crate::device::Device;
    use crate::dtype::DType;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, rng};
    use crate::workspace::Workspace;

    /// Ids of `rows` rows of `vocab` logits, each row with other parameters.
    fn ids(device: &Device, logits: &[f32], rows: usize, vocab: usize, params: &[(f32, i32, f32, f32)]) -> Vec<i32> {
        let f32s = |values: Vec<f32>| Tensor::from_slice(device, "f", &values, [rows]).unwrap();
        let i32s = |values: Vec<i32>| Tensor::from_slice(device, "i", &values, [rows]).unwrap();
        let of = |i: usize| params[i % params.len()];
        let seeds: Vec<i32> = (0..2 * rows as i32).map(|i| i.wrapping_mul(0x9e37_79b9u32 as i32)).collect();
        let all = SampleRows {
            temperature: &f32s((0..rows).map(|i| of(i).0).collect()),
            top_k: &i32s((0..rows).map(|i| of(i).1).collect()),
            top_p: &f32s((0..rows).map(|i| of(i).2).collect()),
            min_p: &f32s((0..rows).map(|i| of(i).3).collect()),
            seed: &Tensor::from_slice(device, "seed", &seeds, [rows, 2]).unwrap(),
            position: &i32s((0..rows as i32).collect()),
        };
        let logits = Tensor::from_slice(device, "logits", logits, [rows, vocab]).unwrap();
        let workspace =
            Workspace::new(device, super::workspace_bytes(rows) + super::super::workspace_bytes(vocab)).unwrap();
        let mut ids = Tensor::zeros(device, "ids", [rows], DType::I32).unwrap();
        sample(&logits, &all, &mut ids, &workspace).unwrap();
        ids.to_vec().unwrap()
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn picks_what_the_reference_picks() {
        let (gpu, mut rng) = (gpu(), rng(9));
        let params = [
            (0.0, 0, 1.0, 0.0),
            (1.0, 0, 1.0, 0.0),
            (0.7, 50, 1.0, 0.0),
            (1.0, 0, 0.9, 0.0),
            (1.3, 40, 0.95, 0.02),
            (0.3, 1, 0.5, 0.0),
            (5.0, 1000, 0.99, 0.0),
            (100.0, 0, 0.5, 0.0),
            (0.01, 7, 0.1, 0.5),
        ];
        // On Hopper few rows and many have kernels of their own.
        let shapes = [
            (9, 5, true),
            (18, 5, true),
            (16, 1003, false),
            (36, 1003, true),
            (90, 49_152, false),
            (9, 128_256, false),
            (9, 128_256, true),
            (27, 128_256, false),
            (18, 128_256, true),
        ];
        for (rows, vocab, quarters) in shapes {
            // In quarters there are many ties.
            let logits: Vec<f32> = (0..rows * vocab)
                .map(|_| {
                    let logit = (0..4).map(|_| rng.random_range(-4.0f32..4.0)).sum::<f32>();
                    if quarters { (logit * 4.0).round() / 4.0 } else { logit }
                })
                .collect();
            let mut logits = logits;
            logits[vocab / 2] = f32::NAN;
            logits[vocab + 1] = f32::INFINITY;
            logits[2 * vocab..3 * vocab].fill(f32::NEG_INFINITY);
            logits[3 * vocab..3 * vocab + vocab / 2].fill(f32::NEG_INFINITY);
            let got = ids(&gpu, &logits, rows, vocab, &params);
            let want = ids(&Device::Cpu, &logits, rows, vocab, &params);
            assert_eq!(got[..3], [-1; 3]);
            assert_eq!(got, want, "{rows} rows of {vocab}");
        }
    }
}
