//! From logits to tokens and log-probabilities, a chunk of rows at a time.
//!
//! Biases and penalties change the logits before a token is picked; log-probabilities are always the model's own, of the
//! logits as they came. The random number of a token belongs to its seed and its place in the sequence.

use drafthorse_control::{RankedToken, SamplingParams, TokenId, TokenLogprobs};
use drafthorse_kernels::ops::gather_rows::gather_rows;
use drafthorse_kernels::ops::logprobs::{self, LogprobsOut};
use drafthorse_kernels::ops::penalty::{Penalties, TokenCount, penalty};
use drafthorse_kernels::ops::sample::{self, SampleRows};
use drafthorse_kernels::{DType, Device, Tensor, Workspace};

use crate::error::Result;
use crate::inputs::{LogitRow, LogitsOf};
use crate::slots::{SlotState, Slots, count};

/// Rows whose logits are held at once. A row of them is as wide as the vocabulary, so this bounds what a step takes; enough
/// rows for the head's product to be quick.
pub(crate) const LOGIT_ROWS: usize = 32;

/// Picks tokens; keeps what came of a step until the next begins.
pub(crate) struct Sampler {
    params: RowParams,
    ids: Tensor,
    /// One per row of the step; -1 where the logits were not finite.
    tokens: Vec<i32>,
    logprobs: Vec<Option<TokenLogprobs>>,
    /// A row's tokens with its drafts, and its biases with its masks; kept for their memory.
    seen: Vec<TokenCount>,
    bias: Vec<(TokenId, f32)>,
}

/// [`SampleRows`], on the host and on the device.
struct RowParams {
    host: Vec<HostParams>,
    floats: Vec<f32>,
    ints: Vec<i32>,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
}

#[derive(Clone, Copy)]
struct HostParams {
    temperature: f32,
    top_k: i32,
    top_p: f32,
    min_p: f32,
    seed: u64,
    position: i32,
}

impl Sampler {
    pub fn new(device: &Device, max_rows: usize) -> Result<Self> {
        Ok(Sampler {
            params: RowParams::new(device)?,
            ids: Tensor::zeros(device, "sampled tokens", [LOGIT_ROWS], DType::I32)?,
            tokens: Vec::with_capacity(max_rows),
            logprobs: Vec::with_capacity(max_rows),
            seen: Vec::new(),
            bias: Vec::new(),
        })
    }

    /// Most bytes of workspace that a chunk takes besides its logits.
    pub fn workspace_bytes(vocab_size: usize) -> usize {
        let tensor = |elements: usize| (elements * 4).next_multiple_of(64);
        let own_logits = tensor(LOGIT_ROWS * vocab_size);
        let lists = 4 * tensor(LOGIT_ROWS) + 2 * tensor(LOGIT_ROWS * logprobs::MAX_TOP);
        own_logits + lists + sample::workspace_bytes(vocab_size)
    }

    /// Forgets the step before.
    pub fn begin(&mut self) {
        self.tokens.clear();
        self.logprobs.clear();
    }

    /// The token of row `index` of the step, or `None` if its logits were not finite.
    pub fn token(&self, index: usize) -> Option<TokenId> {
        TokenId::try_from(self.tokens[index]).ok()
    }

    /// The log-probabilities of row `index`, if it wanted them.
    pub fn logprobs(&self, index: usize) -> Option<&TokenLogprobs> {
        self.logprobs[index].as_ref()
    }

    /// Picks the tokens of the step's next rows from `logits`, `[rows, vocab]`, which are changed.
    ///
    /// # Errors
    /// `Kernel` if the memory plan was too small.
    pub fn sample(
        &mut self,
        rows: &[LogitRow],
        logits: &mut Tensor,
        slots: &Slots,
        workspace: &Workspace,
    ) -> Result<()> {
        let first = self.tokens.len();
        let told = Told::before(rows, logits, workspace)?;
        self.params.begin();
        for (index, row) in rows.iter().enumerate() {
            match row.of {
                // Its token is known; the likeliest is the cheapest to pick and is not looked at.
                LogitsOf::Prompt { .. } => self.params.push(&SamplingParams::default(), row.position),
                LogitsOf::Next { after_drafts } => {
                    let state = slots.state(row.slot);
                    self.params.push(&state.sampling, row.position);
                    let drafts = &slots.drafts(row.slot)[..after_drafts];
                    self.adjust(state, drafts, &mut logits.rows_mut(index..index + 1))?;
                }
            }
        }
        self.params.send()?;
        let mut ids = self.ids.rows_mut(0..rows.len());
        self.params.with(rows.len(), |params| sample::sample(logits, params, &mut ids, workspace))?;
        self.tokens.extend_from_slice(ids.as_slice::<i32>());
        self.logprobs.resize(self.tokens.len(), None);
        if let Some(told) = told {
            told.tell(rows, &self.tokens[first..], &mut self.logprobs[first..], workspace)?;
        }
        Ok(())
    }

    /// Biases, masks and penalties on one row that comes after some drafts.
    fn adjust(&mut self, state: &SlotState, drafts: &[i32], logits: &mut Tensor) -> Result<()> {
        let sampling = &state.sampling;
        self.bias.clear();
        self.bias.extend_from_slice(&sampling.logit_bias);
        if state.num_output() + drafts.len() < sampling.min_tokens as usize {
            self.bias.extend(sampling.stop_tokens.iter().map(|&token| (token, f32::NEG_INFINITY)));
        }
        self.seen.clear();
        let penalties = state.penalties();
        if penalties != Penalties::NONE {
            self.seen.extend_from_slice(&state.seen);
            for &draft in drafts {
                count(&mut self.seen, draft as TokenId, 1);
            }
        }
        if !self.bias.is_empty() || !self.seen.is_empty() {
            penalty(logits.as_mut_slice(), penalties, &self.seen, &self.bias)?;
        }
        Ok(())
    }
}

impl RowParams {
    fn new(device: &Device) -> Result<Self> {
        let tensor = |what, dtype| Tensor::zeros(device, what, [LOGIT_ROWS], dtype);
        Ok(RowParams {
            host: Vec::with_capacity(LOGIT_ROWS),
            floats: Vec::with_capacity(LOGIT_ROWS),
            ints: Vec::with_capacity(2 * LOGIT_ROWS),
            temperature: tensor("temperatures", DType::F32)?,
            top_k: tensor("top_k", DType::I32)?,
            top_p: tensor("top_p", DType::F32)?,
            min_p: tensor("min_p", DType::F32)?,
            seed: Tensor::zeros(device, "seeds", [LOGIT_ROWS, 2], DType::I32)?,
            position: tensor("positions", DType::I32)?,
        })
    }

    fn begin(&mut self) {
        self.host.clear();
    }

    fn push(&mut self, sampling: &SamplingParams, position: usize) {
        self.host.push(HostParams {
            temperature: sampling.temperature,
            top_k: i32::try_from(sampling.top_k).unwrap_or(i32::MAX),
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            position: position as i32,
        });
    }

    /// Copies the rows to the device.
    fn send(&mut self) -> Result<()> {
        let rows = 0..self.host.len();
        let floats: [(&mut Tensor, fn(&HostParams) -> f32); 3] = [
            (&mut self.temperature, |row| row.temperature),
            (&mut self.top_p, |row| row.top_p),
            (&mut self.min_p, |row| row.min_p),
        ];
        for (tensor, of) in floats {
            self.floats.clear();
            self.floats.extend(self.host.iter().map(of));
            tensor.rows_mut(rows.clone()).copy_from_slice(&self.floats)?;
        }
        let ints: [(&mut Tensor, fn(&HostParams) -> i32); 2] =
            [(&mut self.top_k, |row| row.top_k), (&mut self.position, |row| row.position)];
        for (tensor, of) in ints {
            self.ints.clear();
            self.ints.extend(self.host.iter().map(of));
            tensor.rows_mut(rows.clone()).copy_from_slice(&self.ints)?;
        }
        self.ints.clear();
        self.ints.extend(self.host.iter().flat_map(|row| [row.seed as i32, (row.seed >> 32) as i32]));
        self.seed.rows_mut(rows).copy_from_slice(&self.ints)?;
        Ok(())
    }

    /// The first `num_rows` rows on the device, for one call.
    fn with<T>(&self, num_rows: usize, call: impl FnOnce(&SampleRows<'_>) -> T) -> T {
        let rows = 0..num_rows;
        call(&SampleRows {
            temperature: &self.temperature.rows(rows.clone()),
            top_k: &self.top_k.rows(rows.clone()),
            top_p: &self.top_p.rows(rows.clone()),
            min_p: &self.min_p.rows(rows.clone()),
            seed: &self.seed.rows(rows.clone()),
            position: &self.position.rows(rows),
        })
    }
}

/// The rows of a chunk whose log-probabilities are wanted, with their logits as the model gave them.
struct Told {
    /// `[told, vocab]`.
    logits: Tensor,
    /// Most likeliest tokens that any of them wants.
    top: usize,
}

impl Told {
    /// Keeps the logits of the rows that want it, before they are changed.
    fn before(rows: &[LogitRow], logits: &Tensor, workspace: &Workspace) -> Result<Option<Self>> {
        let (_, vocab) = logits.rows_cols();
        let num_told = rows.iter().filter(|row| row.logprobs.is_some()).count();
        let Some(top) = rows.iter().filter_map(|row| row.logprobs).max() else { return Ok(None) };
        let mut kept = workspace.take([num_told, vocab], DType::F32)?;
        let mut indices = workspace.take([num_told], DType::I32)?;
        let told = (0..).zip(rows).filter(|(_, row)| row.logprobs.is_some());
        for (entry, (index, _)) in indices.as_mut_slice::<i32>().iter_mut().zip(told) {
            *entry = index;
        }
        gather_rows(logits, &indices, &mut kept)?;
        Ok(Some(Told { logits: kept, top: (top as usize).min(logprobs::MAX_TOP).min(vocab) }))
    }

    /// Writes the log-probabilities of the rows that want them. `tokens` are what was sampled, row by row.
    fn tell(
        &self,
        rows: &[LogitRow],
        tokens: &[i32],
        out: &mut [Option<TokenLogprobs>],
        workspace: &Workspace,
    ) -> Result<()> {
        let (num_told, _) = self.logits.rows_cols();
        let mut ids = workspace.take([num_told], DType::I32)?;
        let mut logprob = workspace.take([num_told], DType::F32)?;
        let mut rank = workspace.take([num_told], DType::I32)?;
        let mut top_ids = workspace.take([num_told, self.top], DType::I32)?;
        let mut top_logprobs = workspace.take([num_told, self.top], DType::F32)?;
        let told = || rows.iter().zip(tokens).filter(|(row, _)| row.logprobs.is_some());
        for (id, (row, &sampled)) in ids.as_mut_slice::<i32>().iter_mut().zip(told()) {
            *id = match row.of {
                LogitsOf::Prompt { token, .. } => token as i32,
                LogitsOf::Next { .. } => sampled,
            };
        }
        let mut written = LogprobsOut {
            logprob: &mut logprob,
            rank: &mut rank,
            top_ids: &mut top_ids,
            top_logprobs: &mut top_logprobs,
        };
        logprobs::logprobs(&self.logits, &ids, &mut written)?;

        let (ids, logprob, rank) = (ids.as_slice::<i32>(), logprob.as_slice::<f32>(), rank.as_slice::<i32>());
        let (top_ids, top_logprobs) = (top_ids.as_slice::<i32>(), top_logprobs.as_slice::<f32>());
        let wanted = rows.iter().zip(out).filter_map(|(row, out)| Some((row.logprobs?, out)));
        for (index, (num_top, out)) in wanted.enumerate() {
            let at = index * self.top;
            let num_top = self.top.min(num_top as usize);
            let top = (1..).zip(at..at + num_top).map(|(rank, at)| RankedToken {
                token: top_ids[at] as TokenId,
                logprob: top_logprobs[at],
                rank,
            });
            *out = Some(TokenLogprobs {
                token: RankedToken { token: ids[index] as TokenId, logprob: logprob[index], rank: rank[index] as u32 },
                top: top.collect(),
            });
        }
        Ok(())
    }
}
