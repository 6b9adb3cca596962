//! A model alone: no engine, no sampling. Tokens in, logits out.

use std::path::Path;

use drafthorse_kernels::{Device, Solo, Workspace};
use drafthorse_model::{
    Batch, BatchInputs, BatchLimits, Forward, KvCache, KvLayout, LoadOptions, Model, Result, StepSize, load,
};

const BLOCK_SIZE: usize = 16;
/// Sequences of a batch at most.
const MAX_SEQS: usize = 8;

/// A loaded model with room for one sequence, another after its prefix, or a batch of short ones.
pub struct Runner {
    model: Box<dyn Model>,
    kv: KvCache,
    batch: Batch,
    workspace: Workspace,
    /// Those of the sequence, then others: not in order, as after a while of serving.
    blocks: Vec<i32>,
    /// Blocks of the longest sequence.
    blocks_per_seq: usize,
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
        let blocks_per_seq = max_len.div_ceil(BLOCK_SIZE);
        let num_blocks = 2 * blocks_per_seq + MAX_SEQS;
        let layout = KvLayout { layers: model.kv_layers(), last_hidden: 0, block_size: BLOCK_SIZE, dtype };
        let limits = BatchLimits {
            max_tokens: max_len,
            max_seqs: MAX_SEQS,
            max_blocks_per_seq: blocks_per_seq,
            max_logit_rows: max_len,
            max_later: 0,
        };
        let step = StepSize { tokens: max_len, seqs: MAX_SEQS, logit_rows: max_len, max_kv_len: max_len };
        Ok(Runner {
            kv: KvCache::new(&Device::Cpu, layout, num_blocks)?,
            batch: Batch::new(&Device::Cpu, limits)?,
            workspace: Workspace::new(&Device::Cpu, model.workspace_bytes(step))?,
            model,
            blocks: (0..num_blocks as i32).rev().collect(),
            blocks_per_seq,
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
        let blocks = self.blocks[..self.blocks_per_seq].to_vec();
        let logits = self.step(&[(self.len, tokens, &blocks)])?;
        self.len += tokens.len();
        Ok(logits)
    }

    /// Runs `tokens` of another sequence, which begins with the first `prefix` tokens run before: their blocks are shared, as a prefix
    /// cache does. `prefix` must be whole blocks.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_after_prefix(&mut self, prefix: usize, tokens: &[u32]) -> Result<Vec<f32>> {
        assert!(prefix.is_multiple_of(BLOCK_SIZE), "a prefix of {prefix}");
        let (shared, others) = self.blocks.split_at(self.blocks_per_seq);
        let shared = &shared[..prefix / BLOCK_SIZE];
        let blocks = [shared, &others[..self.blocks_per_seq - shared.len()]].concat();
        self.step(&[(prefix, tokens, &blocks)])
    }

    /// Runs whole sequences in one step. The logits of each token, one sequence after the other.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_batch(&mut self, sequences: &[&[u32]]) -> Result<Vec<f32>> {
        let mut blocks = self.blocks.clone();
        let with_blocks: Vec<_> = sequences
            .iter()
            .map(|tokens| (0, *tokens, blocks.split_off(blocks.len() - tokens.len().div_ceil(BLOCK_SIZE))))
            .collect();
        let sequences: Vec<_> =
            with_blocks.iter().map(|(first, tokens, blocks)| (*first, *tokens, &blocks[..])).collect();
        self.step(&sequences)
    }

    /// One step of sequences: tokens run before, tokens to run, blocks.
    fn step(&mut self, sequences: &[(usize, &[u32], &[i32])]) -> Result<Vec<f32>> {
        let (mut ids, mut positions, mut cu_tokens, mut kv_lens) = (Vec::new(), Vec::new(), vec![0], Vec::new());
        for &(first, tokens, _) in sequences {
            ids.extend(tokens.iter().map(|&token| token as i32));
            positions.extend((first..first + tokens.len()).map(|position| position as i32));
            cu_tokens.push(ids.len() as i32);
            kv_lens.push((first + tokens.len()) as i32);
        }
        let used = |&(first, tokens, blocks): &(usize, &[u32], &'_ [i32])| -> Vec<i32> {
            blocks[..(first + tokens.len()).div_ceil(BLOCK_SIZE)].to_vec()
        };
        let tables: Vec<Vec<i32>> = sequences.iter().map(used).collect();
        let tables: Vec<&[i32]> = tables.iter().map(Vec::as_slice).collect();
        self.batch.set(&BatchInputs {
            token_ids: &ids,
            positions: &positions,
            cu_tokens: &cu_tokens,
            kv_lens: &kv_lens,
            block_tables: &tables,
            logit_rows: &(0..ids.len() as i32).collect::<Vec<_>>(),
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
