//! One step on one rank: release, copies, admit, forward, sample, verify, propose, in that order.
//!
//! Verification is sampling: at every position the target's token is sampled as if there were no drafts, and a draft holds
//! if it is that token. So the tokens are the same with any proposer and with none.

use std::time::Instant;

use drafthorse_control::{FinishReason, RowError, RowResult, Step, StepResult, Timing, TokenId};
use drafthorse_kernels::ops::copy_rows::copy;
use drafthorse_kernels::ops::gather_rows::gather_rows;
use drafthorse_kernels::{Communicator, Tensor, Workspace};
use drafthorse_model::{Batch, Forward, KvCache, Model};

use crate::checksum::Checksum;
use crate::error::{Result, WorkerError};
use crate::graphs::Graphs;
use crate::inputs::{Inputs, LogitsOf, PlannedRow};
use crate::sampler::Sampler;
use crate::slots::{SlotState, Slots};
use crate::spec::{Propose, ProposeRow, Proposer};

/// Everything a rank runs steps with.
pub(crate) struct Runner {
    pub model: Box<dyn Model>,
    pub kv: KvCache,
    pub workspace: Workspace,
    pub comm: Box<dyn Communicator>,
    pub batch: Batch,
    pub inputs: Inputs,
    pub slots: Slots,
    pub sampler: Sampler,
    pub proposer: Option<Box<dyn Proposer>>,
    /// The rows that the proposer is shown, kept from step to step.
    pub propose_rows: Vec<ProposeRow>,
    /// Rows of hidden states and the slots that keep them, likewise.
    pub kept_rows: Vec<(u32, u32)>,
    pub graphs: Graphs,
    pub max_model_len: usize,
    /// The step run last; 0 before the first.
    pub last_step: u64,
}

impl Runner {
    /// Runs `step` and answers it.
    ///
    /// # Errors
    /// Whatever ends the group: a step out of order or outside its contract, a device that fails.
    pub fn run(&mut self, step: &Step) -> Result<StepResult> {
        self.prepare(step)?;
        let mut results = vec![RowResult::default(); step.rows.len()];
        let mut timing = Timing::default();
        if self.batch.num_tokens() > 0 {
            let started = Instant::now();
            if let Some(size) = self.inputs.replay.filter(|_| self.proposer.is_none()) {
                self.replay(size)?;
                timing.forward = started.elapsed();
                self.verify(None, &mut results)?;
                timing.sample = started.elapsed() - timing.forward;
            } else {
                let hidden = self.forward()?;
                timing.forward = started.elapsed();
                self.sample(&hidden)?;
                self.verify(Some(&hidden), &mut results)?;
                timing.sample = started.elapsed() - timing.forward;
                self.propose(&hidden, &mut results)?;
                timing.propose = started.elapsed() - timing.forward - timing.sample;
            }
        }
        let mut checksum = Checksum::default();
        for (row, result) in step.rows.iter().zip(&results) {
            checksum.add(&result.accepted);
            checksum.add_drafts(self.slots.drafts(row.slot));
        }
        Ok(StepResult { id: step.id, rows: results, checksum: checksum.value(), timing })
    }

    /// Slots, KV blocks and the batch as the step wants them.
    fn prepare(&mut self, step: &Step) -> Result<()> {
        let want = self.last_step + 1;
        if step.id != want {
            return Err(WorkerError::OutOfStep { got: step.id, want });
        }
        self.last_step = step.id;
        for &slot in &step.release {
            self.slots.release(step.id, slot)?;
        }
        if !step.copies.is_empty() {
            let copies: Vec<_> = step.copies.iter().map(|(from, to)| (from.0, to.0)).collect();
            self.kv.copy_blocks(&copies)?;
        }
        for admit in &step.admit {
            self.slots.admit(step.id, admit)?;
        }
        self.inputs.build(step, &mut self.slots, &mut self.batch, &self.graphs)
    }

    /// A whole decoding step that was padded to `size`, from a recording once there is one. Nobody looks at its hidden states.
    fn replay(&mut self, size: usize) -> Result<()> {
        let Runner { model, kv, workspace, comm, batch, inputs, slots, sampler, graphs, .. } = self;
        sampler.begin();
        sampler.prepare(&inputs.logits, size, slots)?;
        graphs.run(size, || {
            let mut cx = Forward { batch, kv, workspace, comm: &**comm, target_hidden: None, taps: &mut [] };
            let hidden = model.forward(&mut cx)?;
            let logits = model.logits(&hidden, &mut cx)?;
            sampler.pick(&logits, workspace)
        })?;
        sampler.collect(inputs.logits.len())
    }

    /// The hidden states of the batch, `[tokens, hidden]`.
    fn forward(&mut self) -> Result<Tensor> {
        let mut cx = Forward {
            batch: &self.batch,
            kv: &mut self.kv,
            workspace: &self.workspace,
            comm: &*self.comm,
            target_hidden: None,
            taps: &mut [],
        };
        Ok(self.model.forward(&mut cx)?)
    }

    /// Logits of the rows that want them, as many at a time as the workspace is planned for; then tokens and
    /// log-probabilities, which the sampler keeps.
    fn sample(&mut self, hidden: &Tensor) -> Result<()> {
        let rows = &self.inputs.logits;
        self.sampler.begin();
        let (_, width) = hidden.rows_cols();
        let mut next = 0;
        while next < rows.len() {
            let chunk = &rows[next..rows.len().min(next + self.sampler.chunk_rows())];
            let mut wanted = self.workspace.take([chunk.len(), width], hidden.dtype())?;
            gather_rows(hidden, &self.batch.logit_rows().rows(next..next + chunk.len()), &mut wanted)?;
            for (index, row) in chunk.iter().enumerate() {
                if let LogitsOf::Prompt { from_slot: true, .. } = row.of {
                    let slot = row.slot.0 as usize;
                    copy(&self.slots.last_hidden().rows(slot..slot + 1), &mut wanted.rows_mut(index..index + 1))?;
                }
            }
            let mut cx = Forward {
                batch: &self.batch,
                kv: &mut self.kv,
                workspace: &self.workspace,
                comm: &*self.comm,
                target_hidden: None,
                taps: &mut [],
            };
            let mut logits = self.model.logits(&wanted, &mut cx)?;
            self.sampler.sample(chunk, &mut logits, &self.slots, &self.workspace)?;
            next += chunk.len();
        }
        Ok(())
    }

    /// Takes over the tokens that hold and moves every sequence on. Without `hidden`, no slot keeps its last row of it.
    fn verify(&mut self, hidden: Option<&Tensor>, results: &mut [RowResult]) -> Result<()> {
        self.kept_rows.clear();
        for (index, result) in results.iter_mut().enumerate() {
            let row = self.inputs.rows[index].clone();
            if row.is_inert() {
                continue;
            }
            self.collect_prompt_logprobs(&row, result);
            let drafts_held = self.accept(&row, result);
            let computed = row.num_known() + drafts_held;
            let state = self.slots.state_mut(row.slot);
            state.num_computed += computed;
            state.ended |= result.ended.is_some() || result.error.is_some();
            self.slots.cut_drafts(row.slot, 0);
            self.kept_rows.push(((row.tokens.start + computed - 1) as u32, row.slot.0));
        }
        match hidden {
            Some(hidden) => self.slots.keep_hidden(hidden, &self.kept_rows),
            None => Ok(()),
        }
    }

    fn collect_prompt_logprobs(&self, row: &PlannedRow, result: &mut RowResult) {
        for index in row.logits.clone() {
            let wanted = self.inputs.logits[index];
            let LogitsOf::Prompt { .. } = wanted.of else { continue };
            match self.sampler.logprobs(index).filter(|logprobs| !logprobs.token.logprob.is_nan()) {
                Some(logprobs) => result.prompt_logprobs.push(logprobs.clone()),
                None => result.error = Some(RowError::NotFinite { position: wanted.position as u32 }),
            }
        }
    }

    /// Appends the sampled tokens up to the first that is no draft, or that ends the sequence. How many drafts held.
    fn accept(&mut self, row: &PlannedRow, result: &mut RowResult) -> usize {
        let mut held = 0;
        for index in row.logits.clone() {
            let LogitsOf::Next { after_drafts } = self.inputs.logits[index].of else { continue };
            if result.error.is_some() {
                break;
            }
            let Some(token) = self.sampler.token(index) else {
                let position = self.inputs.logits[index].position as u32;
                result.error = Some(RowError::NotFinite { position });
                break;
            };
            held = after_drafts;
            let draft = self.slots.drafts(row.slot).get(after_drafts).filter(|_| after_drafts < row.num_drafts);
            let draft_holds = draft.is_some_and(|&draft| draft as TokenId == token);
            let state = self.slots.state_mut(row.slot);
            state.accept(token);
            result.accepted.push(token);
            result.logprobs.extend(self.sampler.logprobs(index).cloned());
            result.ended = ends(state, token, self.max_model_len);
            if result.ended.is_some() || !draft_holds {
                break;
            }
        }
        held
    }

    /// Lets the proposer look at every sequence that goes on.
    fn propose(&mut self, hidden: &Tensor, results: &mut [RowResult]) -> Result<()> {
        let Some(proposer) = &mut self.proposer else { return Ok(()) };
        self.propose_rows.clear();
        for (row, result) in self.inputs.rows.iter().zip(&*results) {
            let state = self.slots.state(row.slot);
            if row.is_inert() || state.ended {
                continue;
            }
            let held = row.num_known() + result.accepted.len().saturating_sub(1);
            self.propose_rows.push(ProposeRow {
                slot: row.slot,
                hidden: row.tokens.start..row.tokens.start + held,
                wants_drafts: row.wants_token,
                // The last token that may come is always sampled, not drafted.
                room: state.room(self.max_model_len).saturating_sub(1),
            });
        }
        proposer.propose(&mut Propose {
            rows: &self.propose_rows,
            slots: &mut self.slots,
            hidden,
            forward: Forward {
                batch: &self.batch,
                kv: &mut self.kv,
                workspace: &self.workspace,
                comm: &*self.comm,
                target_hidden: Some(hidden),
                taps: &mut [],
            },
        })?;
        for row in &self.propose_rows {
            self.slots.cut_drafts(row.slot, if row.wants_drafts { row.room } else { 0 });
        }
        for (row, result) in self.inputs.rows.iter().zip(results) {
            result.num_drafts = self.slots.drafts(row.slot).len() as u32;
        }
        Ok(())
    }
}

/// Whether `token`, just appended, ends its sequence. A stop token is more than the length it comes at.
fn ends(state: &SlotState, token: TokenId, max_model_len: usize) -> Option<FinishReason> {
    // Before min_tokens they are masked, so that one here may stop.
    if state.sampling.stop_tokens.contains(&token) {
        return Some(FinishReason::Stop);
    }
    (state.room(max_model_len) == 0).then_some(FinishReason::Length)
}
