//! Picks one token a row from its logits.
//!
//! The random number of a row belongs to its seed and its position in the sequence alone, so a token is the same whatever batch
//! it is sampled in, on every rank, and whether it was drafted or not.

#[cfg(test)]
mod cpu;
mod cuda;
mod philox;
mod select;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::pool::{self, SharedMut};
use crate::simd::Level;
use crate::tensor::Tensor;
use crate::workspace::Workspace;

use select::{Sample, Scratch};

const OP: &str = "sample";

/// The id of a row that could not be sampled.
pub const FAILED: i32 = -1;

/// How each row is sampled; tensors of `[rows]` unless said otherwise.
#[derive(Clone, Copy, Debug)]
pub struct SampleRows<'a> {
    /// f32, divides the logits; 0 picks the likeliest token, the lowest of several. Finite.
    pub temperature: &'a Tensor,
    /// i32; 0 keeps all.
    pub top_k: &'a Tensor,
    /// f32 in (0, 1]; 1 keeps all.
    pub top_p: &'a Tensor,
    /// f32 in [0, 1]; 0 keeps all.
    pub min_p: &'a Tensor,
    /// `[rows, 2]` i32: the low and the high half of a 64-bit seed.
    pub seed: &'a Tensor,
    /// i32: where in its sequence the token will stand.
    pub position: &'a Tensor,
}

/// One row of [`SampleRows`] on the host.
#[derive(Clone, Copy, Debug)]
struct RowParams {
    temperature: f32,
    top_k: i32,
    top_p: f32,
    min_p: f32,
    seed: [u32; 2],
    position: i32,
}

/// Samples every row.
///
/// | argument    | shape | dtype | |
/// |-------------|-------|-------|-|
/// | `logits`    | `[rows, vocab]` | f32 | read; -inf where a token may not be picked |
/// | `rows`      | see [`SampleRows`] | f32 and i32 | read |
/// | `ids`       | `[rows]` | i32 | written |
/// | `workspace` | takes at most [`workspace_bytes`] | | |
///
/// At temperature 0 the likeliest token. Else, with weights `w = exp((logit - max) / temperature)` (f32, summed in f64), in
/// vLLM's order:
///
/// 1. `min_p` keeps tokens with `w >= min_p`, as the likeliest has weight 1;
/// 2. `top_k` keeps tokens than which fewer than `top_k` are likelier: ties with the last one stay, all of them;
/// 3. `top_p` keeps tokens than which the likelier ones of those left weigh less than `top_p` of their sum: ties stay together;
/// 4. the first token in vocabulary order at which the sum of kept weights exceeds `u` times their total, `u` in [0, 1) being the
///    Philox4x32-10 number with the seed as key and the position as counter.
///
/// A row with a NaN, with +inf, or with nothing but -inf gets id -1; other rows are not touched by it.
///
/// # Errors
/// `Shape` or `DType` if the arguments do not agree, `WorkspaceFull`.
pub fn sample(logits: &Tensor, rows: &SampleRows<'_>, ids: &mut Tensor, workspace: &Workspace) -> Result<()> {
    let (num_rows, vocab) = logits.rows_cols();
    logits.expect_shape(OP, "logits", [num_rows, vocab])?;
    logits.expect_dtype(OP, "logits", DType::F32)?;
    rows.check(num_rows)?;
    ids.expect_shape(OP, "ids", [num_rows])?;
    ids.expect_dtype(OP, "ids", DType::I32)?;
    match logits.device() {
        Device::Cpu => sample_rows(logits.as_slice(), vocab, rows, ids.as_mut_slice(), workspace),
        Device::Cuda(device) => cuda::sample(device, logits, rows, ids, workspace),
    }
}

/// Rows over the threads, each thread with scratch of its own.
fn sample_rows(
    logits: &[f32],
    vocab: usize,
    rows: &SampleRows<'_>,
    ids: &mut [i32],
    workspace: &Workspace,
) -> Result<()> {
    let num_largest = Scratch::num_largest(vocab);
    let num_threads = pool::num_threads().min(ids.len());
    let mut weights = workspace.take([num_threads, vocab], DType::F32)?;
    let mut largest = workspace.take([num_threads, num_largest], DType::F32)?;
    let mut tokens = workspace.take([num_threads, vocab], DType::I32)?;
    let (weights, largest, tokens) = (
        SharedMut::new(weights.as_mut_slice::<f32>()),
        SharedMut::new(largest.as_mut_slice::<f32>()),
        SharedMut::new(tokens.as_mut_slice::<i32>()),
    );
    let (num_rows, next, ids) = (ids.len(), AtomicUsize::new(0), SharedMut::new(ids));
    pool::parallel_for(num_threads, &|thread| {
        // SAFETY: one part for each index, which comes once; what they are parts of is borrowed until all are done.
        let mut scratch = unsafe {
            Scratch {
                weights: weights.slice(thread * vocab..(thread + 1) * vocab),
                largest: largest.slice(thread * num_largest..(thread + 1) * num_largest),
                tokens: tokens.slice(thread * vocab..(thread + 1) * vocab),
            }
        };
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= num_rows {
                break;
            }
            // SAFETY: each row is claimed once.
            let id = unsafe { &mut ids.slice(i..i + 1)[0] };
            let logits = &logits[i * vocab..][..vocab];
            // SAFETY: the level is this CPU's own.
            unsafe { Level::best().run(Sample { logits, row: rows.row(i), scratch: &mut scratch, id }) }
        }
    });
    Ok(())
}

/// What [`sample`] takes from the workspace at most.
pub fn workspace_bytes(vocab: usize) -> usize {
    let thread = 2 * vocab + Scratch::num_largest(vocab);
    pool::num_threads() * thread * size_of::<f32>() + 3 * 64
}

/// What [`sample`] takes from the workspace of a GPU at most.
pub fn gpu_workspace_bytes(num_rows: usize) -> usize {
    cuda::workspace_bytes(num_rows)
}

impl SampleRows<'_> {
    fn check(&self, num_rows: usize) -> Result<()> {
        let floats = [("temperature", self.temperature), ("top_p", self.top_p), ("min_p", self.min_p)];
        let ints = [("top_k", self.top_k), ("position", self.position)];
        for (dtype, (arg, tensor)) in floats.map(|f| (DType::F32, f)).into_iter().chain(ints.map(|i| (DType::I32, i))) {
            tensor.expect_shape(OP, arg, [num_rows])?;
            tensor.expect_dtype(OP, arg, dtype)?;
        }
        self.seed.expect_shape(OP, "seed", [num_rows, 2])?;
        self.seed.expect_dtype(OP, "seed", DType::I32)
    }

    /// Row `i` of tensors on the host.
    fn row(&self, i: usize) -> RowParams {
        let seed = self.seed.as_slice::<i32>();
        RowParams {
            temperature: self.temperature.as_slice()[i],
            top_k: self.top_k.as_slice()[i],
            top_p: self.top_p.as_slice()[i],
            min_p: self.min_p.as_slice()[i],
            seed: [seed[2 * i] as u32, seed[2 * i + 1] as u32],
            position: self.position.as_slice()[i],
        }
    }
}
