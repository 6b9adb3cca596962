//! What a drafter's passes take.

use drafthorse_kernels::ops::sample;
use drafthorse_kernels::{DType, Device};
use drafthorse_model::StepSize;

use super::Drafter;

/// What bounds a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftSizes {
    pub max_drafts: usize,
    /// Fewer drafts, or none, where they do not pay.
    pub adaptive: bool,
    /// Tokens of a step of the target.
    pub max_tokens: usize,
    pub max_seqs: usize,
    /// Blocks of one sequence, and of the cache.
    pub max_blocks_per_seq: usize,
    pub num_blocks: usize,
    /// Rows whose logits are held at once.
    pub chunk_rows: usize,
    pub max_kv_len: usize,
    /// Width of its own hidden states, and of the target's.
    pub hidden: usize,
    /// Width of what it reads of the target.
    pub features: usize,
    pub dtype: DType,
}

impl DraftSizes {
    /// Each sequence of a step may bring one entry more, after the block it begins with.
    pub(super) fn max_pass_tokens(&self) -> usize {
        self.max_tokens + self.max_seqs
    }

    pub(super) fn step(&self) -> StepSize {
        let logit_rows = self.chunk_rows.min(self.max_seqs);
        StepSize { tokens: self.max_pass_tokens(), seqs: self.max_seqs, logit_rows, max_kv_len: self.max_kv_len }
    }

    /// Most bytes of workspace that proposing takes, the target's hidden states included.
    pub fn workspace_bytes(&self, device: &Device, drafter: &Drafter) -> usize {
        let rows_of = |width: usize, rows: usize| (rows * width * self.dtype.bytes()).next_multiple_of(64);
        let rows = |rows| rows_of(self.hidden, rows);
        let step = self.step();
        let pick = match device {
            Device::Cpu => sample::workspace_bytes(drafter.num_tokens),
            Device::Cuda(_) => sample::gpu_workspace_bytes(step.logit_rows),
        };
        let run = drafter.model.workspace_bytes(step);
        rows(self.max_tokens) + rows(self.max_seqs) + rows_of(self.features, self.max_pass_tokens()) + run + pick
    }
}
