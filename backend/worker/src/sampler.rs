//! From logits to tokens and log-probabilities, a chunk of rows at a time.
//!
//! Biases and penalties change the logits before a token is picked; log-probabilities are always the model's own, of the
//! logits as they came. The random number of a token belongs to its seed and its place in the sequence.

use drafthorse_control::{RankedToken, RowError, SamplingParams, TokenId, TokenLogprobs};
use drafthorse_kernels::device::Readback;
use drafthorse_kernels::ops::gather_rows::gather_rows;
use drafthorse_kernels::ops::logprobs::{self, LogprobsOut};
use drafthorse_kernels::ops::penalty::{Penalties, TokenCount, penalize};
use drafthorse_kernels::ops::sample;
use drafthorse_kernels::ops::typical::{TypicalRow, typical};
use drafthorse_kernels::{DType, Device, Tensor, Workspace};

use crate::error::Result;
use crate::inputs::{LogitRow, LogitsOf, PlannedRow};
use crate::masks::Masks;
use crate::row_params::RowParams;
use crate::slots::{SlotState, Slots, count};
use crate::spec::{Ranked, Verify};

/// Rows whose logits are held at once. A row of them is as wide as the vocabulary, so this bounds what a step takes; enough
/// rows for the head's product to be quick.
pub(crate) fn logit_rows(device: &Device) -> usize {
    match device {
        Device::Cpu => 32,
        Device::Cuda(_) => 512,
    }
}

/// Picks tokens; keeps what came of a step until the next begins.
pub(crate) struct Sampler {
    params: RowParams,
    ids: Tensor,
    /// In turn, since a step may be given to the device before the tokens of the one before have been looked at.
    ids_on_host: [Readback<i32>; 2],
    /// One per row of the step; -1 where the logits were not finite.
    tokens: Vec<i32>,
    logprobs: Vec<Option<TokenLogprobs>>,
    /// How drafts are verified. A lossy rule needs to know what is likeliest in the place of each.
    verify: Verify,
    /// One per row of the step, if it is the place of a draft and the rule is lossy.
    ranked: Vec<Option<Ranked>>,
    masks: Masks,
    typical: Vec<TypicalRow>,
    /// A row's tokens with its drafts; kept for its memory.
    seen: Vec<TokenCount>,
}

impl Sampler {
    /// For chunks of `chunk_rows` rows, and steps of `max_rows`.
    pub fn new(device: &Device, chunk_rows: usize, max_rows: usize, vocab_size: usize) -> Result<Self> {
        Ok(Sampler {
            params: RowParams::new(device, chunk_rows)?,
            ids: Tensor::zeros(device, "sampled tokens", [chunk_rows], DType::I32)?,
            ids_on_host: [Readback::new(device, chunk_rows)?, Readback::new(device, chunk_rows)?],
            tokens: Vec::with_capacity(max_rows),
            logprobs: Vec::with_capacity(max_rows),
            verify: Verify::Exact,
            ranked: Vec::new(),
            masks: Masks::new(device, chunk_rows, vocab_size)?,
            typical: Vec::new(),
            seen: Vec::new(),
        })
    }

    /// For drafts that are verified by another rule.
    pub fn with_rule(self, verify: Verify) -> Self {
        Sampler { verify, ..self }
    }

    /// Most bytes of workspace that a chunk takes besides its logits.
    pub fn workspace_bytes(device: &Device, chunk_rows: usize, vocab_size: usize) -> usize {
        let tensor = |elements: usize| (elements * 4).next_multiple_of(64);
        let own_logits = tensor(chunk_rows * vocab_size);
        let lists = 4 * tensor(chunk_rows) + 2 * tensor(chunk_rows * logprobs::MAX_TOP);
        let of_op = match device {
            Device::Cpu => sample::workspace_bytes(vocab_size),
            Device::Cuda(_) => sample::gpu_workspace_bytes(chunk_rows),
        };
        own_logits + lists + of_op
    }

    /// Rows of a chunk.
    pub fn chunk_rows(&self) -> usize {
        self.ids.dims()[0]
    }

    /// Forgets the tokens of the step before.
    pub fn begin(&mut self) {
        self.tokens.clear();
        self.logprobs.clear();
        self.ranked.clear();
    }

    /// Works out which tokens each row of a step may have, while the device still runs the model.
    pub fn fill_masks(&mut self, planned: &[PlannedRow], logits: &[LogitRow], slots: &mut Slots) {
        self.masks.fill(planned, logits, slots);
    }

    /// All rows may have all tokens.
    pub fn clear_masks(&mut self) {
        self.masks.clear();
    }

    /// Sends the masks of a plain step's `num_rows` rows, padded to `num_padded`, to be applied by [`pick_masked`](Self::pick_masked).
    ///
    /// # Errors
    /// `Kernel` if the device fails.
    pub fn send_masks(&mut self, num_rows: usize, num_padded: usize) -> Result<()> {
        self.masks.send(0..num_rows, num_padded)
    }

    /// Why no token can be picked at row `index` of the step, if its grammar says so.
    pub fn mask_error(&self, index: usize) -> Option<&RowError> {
        self.masks.error(index)
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
                    if let Some(most) = self.verify.candidates() {
                        self.params.keep_at_most(most);
                    }
                    let drafts = &slots.drafts(row.slot)[..after_drafts];
                    self.adjust(state, drafts, &mut logits.rows_mut(index..index + 1))?;
                }
            }
        }
        let in_step = first..first + rows.len();
        if self.masks.any(in_step.clone()) {
            self.masks.send(in_step, rows.len())?;
            self.masks.apply(logits)?;
        }
        self.take_out_untypical(rows, logits, slots)?;
        self.rank_places_of_drafts(rows, logits, slots);
        self.params.send()?;
        self.pick(logits, workspace)?;
        self.collect(rows.len())?;
        if let Some(told) = told {
            told.tell(rows, &self.tokens[first..], &mut self.logprobs[first..], workspace)?;
        }
        Ok(())
    }

    /// Sends what the rows of a decoding step are sampled with, and as much for the rows that it is padded with.
    ///
    /// # Errors
    /// `Kernel` if the device fails.
    pub fn prepare(&mut self, rows: &[LogitRow], num_padded: usize, slots: &Slots) -> Result<()> {
        self.params.begin();
        for row in rows {
            self.params.push(&slots.state(row.slot).sampling, row.position);
        }
        for _ in rows.len()..num_padded {
            self.params.push(&SamplingParams::default(), 0);
        }
        self.params.send()
    }

    /// Puts the choice of tokens on the device's stream; parameters have been sent.
    ///
    /// # Errors
    /// `Kernel` if the memory plan was too small.
    pub fn pick(&mut self, logits: &Tensor, workspace: &Workspace) -> Result<()> {
        let (num_rows, _) = logits.rows_cols();
        let mut ids = self.ids.rows_mut(0..num_rows);
        Ok(self.params.with(num_rows, |params| sample::sample(logits, params, &mut ids, workspace))?)
    }

    /// [`pick`](Self::pick), of tokens that the masks sent last leave.
    ///
    /// # Errors
    /// As [`pick`](Self::pick).
    pub fn pick_masked(&mut self, logits: &mut Tensor, workspace: &Workspace) -> Result<()> {
        self.masks.apply(logits)?;
        self.pick(logits, workspace)
    }

    /// Waits for the tokens of the next `num_rows` rows of the step.
    fn collect(&mut self, num_rows: usize) -> Result<()> {
        self.ask(0, num_rows)?;
        self.take(0)
    }

    /// What was picked last, on the device.
    pub fn picked(&self) -> &Tensor {
        &self.ids
    }

    /// Asks for the tokens of `num_rows` rows that were just picked, to be [taken](Self::take). There are two places, 0 and 1.
    ///
    /// # Errors
    /// `Kernel` if the device fails.
    pub fn ask(&mut self, place: usize, num_rows: usize) -> Result<()> {
        Ok(self.ids_on_host[place].begin(&self.ids.rows(0..num_rows))?)
    }

    /// Whether what was asked for has come.
    ///
    /// # Errors
    /// `Kernel` if the device failed.
    pub fn has_come(&self, place: usize) -> Result<bool> {
        Ok(self.ids_on_host[place].is_done()?)
    }

    /// Waits for what was asked for: tokens of the step's next rows.
    ///
    /// # Errors
    /// `Kernel` if the device failed.
    pub fn take(&mut self, place: usize) -> Result<()> {
        self.tokens.extend_from_slice(self.ids_on_host[place].wait()?);
        self.logprobs.resize(self.tokens.len(), None);
        Ok(())
    }

    /// After everything else that changes logits, before the other limits on what is kept.
    fn take_out_untypical(&mut self, rows: &[LogitRow], logits: &mut Tensor, slots: &Slots) -> Result<()> {
        let wanted = rows.iter().enumerate().filter_map(|(row, of)| {
            let SamplingParams { temperature, typical_p, .. } = slots.state(of.slot).sampling;
            let samples = matches!(of.of, LogitsOf::Next { .. }) && temperature > 0.0 && typical_p < 1.0;
            samples.then_some(TypicalRow { row, temperature, typical_p })
        });
        self.typical.clear();
        self.typical.extend(wanted);
        Ok(typical(logits, &self.typical)?)
    }

    /// For a lossy rule, which runs on the CPU: the logits are looked at as they are.
    fn rank_places_of_drafts(&mut self, rows: &[LogitRow], logits: &Tensor, slots: &Slots) {
        let Some(most) = self.verify.candidates() else { return };
        let (_, vocab) = logits.rows_cols();
        let ranked = rows.iter().zip(logits.as_slice::<f32>().chunks(vocab)).map(|(row, logits)| match row.of {
            LogitsOf::Next { after_drafts } if after_drafts < slots.drafts(row.slot).len() => {
                Some(Ranked::of(logits, &slots.state(row.slot).sampling, most))
            }
            _ => None,
        });
        self.ranked.extend(ranked);
    }

    /// How many of a row's drafts hold whatever was sampled, if the rule is lossy.
    pub fn held_by_rule(&self, row: &PlannedRow, slots: &Slots) -> Option<usize> {
        self.verify.candidates()?;
        let drafts: Vec<TokenId> =
            slots.drafts(row.slot)[..row.num_drafts].iter().map(|&draft| draft as TokenId).collect();
        // The last rows of a sequence are those of its drafts and of the token after them.
        let first = row.logits.end.saturating_sub(row.num_drafts + 1);
        let ranked: Vec<&Ranked> = self.ranked[first..].iter().take(row.num_drafts).flatten().collect();
        Some(self.verify.held(&drafts, &ranked))
    }

    /// Biases and penalties on one row that comes after some drafts.
    fn adjust(&mut self, state: &SlotState, drafts: &[i32], logits: &mut Tensor) -> Result<()> {
        let bias = &state.sampling.logit_bias;
        self.seen.clear();
        let penalties = state.penalties();
        if penalties != Penalties::NONE {
            self.seen.extend_from_slice(&state.seen);
            for &draft in drafts {
                count(&mut self.seen, draft as TokenId, 1);
            }
        }
        if !bias.is_empty() || !self.seen.is_empty() {
            penalize(logits, penalties, &self.seen, bias)?;
        }
        Ok(())
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
        indices.copy_from_slice(&told.map(|(index, _)| index).collect::<Vec<i32>>())?;
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
        let given = told().map(|(row, &sampled)| match row.of {
            LogitsOf::Prompt { token, .. } => token as i32,
            LogitsOf::Next { .. } => sampled,
        });
        let given: Vec<i32> = given.collect();
        ids.copy_from_slice(&given)?;
        let mut written = LogprobsOut {
            logprob: &mut logprob,
            rank: &mut rank,
            top_ids: &mut top_ids,
            top_logprobs: &mut top_logprobs,
        };
        logprobs::logprobs(&self.logits, &ids, &mut written)?;

        let (logprob, rank) = (logprob.to_vec::<f32>()?, rank.to_vec::<i32>()?);
        let (top_ids, top_logprobs) = (top_ids.to_vec::<i32>()?, top_logprobs.to_vec::<f32>()?);
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
                token: RankedToken {
                    token: given[index] as TokenId,
                    logprob: logprob[index],
                    rank: rank[index] as u32,
                },
                top: top.collect(),
            });
        }
        Ok(())
    }
}
