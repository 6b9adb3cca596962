//! A model alone: one sequence, no engine, no sampling. Tokens in, logits out.

use std::path::Path;

use drafthorse_kernels::{Device, Solo, Workspace};
use drafthorse_model::{
    Batch, BatchInputs, BatchLimits, Forward, KvCache, KvLayout, LoadOptions, Model, Result, StepSize, load,
};

const BLOCK_SIZE: usize = 16;

/// A loaded model with room for one sequence.
pub struct Runner {
    model: Box<dyn Model>,
    kv: KvCache,
    batch: Batch,
    workspace: Workspace,
    /// The sequence's blocks: not in order, as after a while of serving.
    blocks: Vec<i32>,
    len: usize,
}

impl Runner {
    /// Loads the checkpoint in `dir`; at most `max_len` tokens can be run.
    ///
    /// # Errors
    /// Whatever is wrong with the checkpoint.
    pub fn load(dir: &Path, options: &LoadOptions<'_>, max_len: usize) -> Result<Self> {
        let dtype = options.dtype;
        let model = load(dir, options)?.model;
        let num_blocks = max_len.div_ceil(BLOCK_SIZE);
        let layout = KvLayout { layers: model.kv_layers(), last_hidden: 0, block_size: BLOCK_SIZE, dtype };
        let limits =
            BatchLimits { max_tokens: max_len, max_seqs: 1, max_blocks_per_seq: num_blocks, max_logit_rows: max_len };
        let step = StepSize { tokens: max_len, seqs: 1, logit_rows: max_len, max_kv_len: max_len };
        Ok(Runner {
            kv: KvCache::new(&Device::Cpu, layout, num_blocks)?,
            batch: Batch::new(&Device::Cpu, limits)?,
            workspace: Workspace::new(&Device::Cpu, model.workspace_bytes(step))?,
            model,
            blocks: (0..num_blocks as i32).rev().collect(),
            len: 0,
        })
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.len = 0;
    }

    /// Runs `tokens` after those run before. The logits of each, `[tokens, vocab]`.
    ///
    /// # Errors
    /// If the tokens do not fit, or the model fails.
    pub fn run(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let count = tokens.len() as i32;
        let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let end = self.len + tokens.len();
        let positions: Vec<i32> = (self.len as i32..end as i32).collect();
        self.batch.set(&BatchInputs {
            token_ids: &ids,
            positions: &positions,
            cu_tokens: &[0, count],
            kv_lens: &[end as i32],
            block_tables: &[&self.blocks[..end.div_ceil(BLOCK_SIZE)]],
            logit_rows: &(0..count).collect::<Vec<_>>(),
        })?;
        let mut forward = Forward {
            batch: &self.batch,
            kv: &mut self.kv,
            workspace: &self.workspace,
            comm: &Solo::default(),
            target_hidden: None,
            taps: &mut [],
        };
        let hidden = self.model.forward(&mut forward)?;
        let logits = self.model.logits(&hidden, &mut forward)?;
        self.len = end;
        Ok(logits.as_slice().to_vec())
    }

    /// Runs `tokens` in chunks of these lengths, the last of which repeats.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_in_chunks(&mut self, tokens: &[u32], lengths: &[usize]) -> Result<Vec<f32>> {
        let mut logits = Vec::new();
        let mut rest = tokens;
        let last = lengths.last().copied().unwrap_or(1);
        for len in lengths.iter().copied().chain(std::iter::repeat(last)) {
            let (chunk, after) = rest.split_at(len.min(rest.len()));
            if chunk.is_empty() {
                break;
            }
            logits.extend(self.run(chunk)?);
            rest = after;
        }
        Ok(logits)
    }
}
