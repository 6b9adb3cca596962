//! What came of a step's rows: tokens that hold, ends, errors, and the drafts that follow.
//!
//! Verification is sampling: at every position the target's token is sampled as if there were no drafts, and a draft holds
//! if it is that token. So the tokens are the same with any proposer and with none, but for the lossy rules of `spec::verify`, which take
//! drafts that were not sampled.

use std::time::Duration;

use drafthorse_control::{FinishReason, RowError, RowResult, TokenId};
use drafthorse_kernels::Tensor;
use drafthorse_model::Forward;

use crate::error::Result;
use crate::features::Features;
use crate::inputs::{LogitsOf, PlannedRow};
use crate::runner::Runner;
use crate::slots::SlotState;
use crate::spec::{Propose, ProposeRow};

impl Runner {
    /// Takes over the tokens that hold, moves every sequence on, and keeps their last rows of `hidden`.
    pub(crate) fn verify(&mut self, hidden: &Tensor, results: &mut [RowResult]) -> Result<()> {
        self.kept_rows.clear();
        for (index, result) in results.iter_mut().enumerate() {
            let row = self.inputs.rows[index].clone();
            if row.is_inert() {
                continue;
            }
            result.error = self.slots.state(row.slot).refused.clone();
            self.collect_prompt_logprobs(&row, result);
            let drafts_held = self.accept(&row, result);
            let computed = row.num_known() + drafts_held;
            let state = self.slots.state_mut(row.slot);
            state.num_computed += computed;
            state.ended |= result.ended.is_some() || result.error.is_some();
            self.slots.cut_drafts(row.slot, 0);
            // Only the first log-probability of a prompt's next chunk is made from it.
            if !row.wants_token {
                self.kept_rows.push(((row.tokens.start + computed - 1) as u32, row.slot.0));
            }
        }
        self.slots.keep_hidden(hidden, &self.kept_rows)
    }

    /// Takes over the tokens of a plain step, whose sequences were moved on when it was given to the device.
    pub(crate) fn settle(&mut self, results: &mut [RowResult]) {
        for (index, result) in results.iter_mut().enumerate() {
            let row = self.inputs.rows[index].clone();
            // Ended by the step before, or another sequence has its slot by now: nobody waits for its token.
            let lives = self.slots.try_state(row.slot).is_some_and(|state| state.serial == row.serial && !state.ended);
            if row.is_inert() || !lives {
                continue;
            }
            let state = self.slots.state_mut(row.slot);
            if state.refused.is_some() {
                (result.error, state.ended) = (state.refused.clone(), true);
            }
            if !row.wants_token || state.ended {
                continue;
            }
            self.slots.state_mut(row.slot).num_sampling -= 1;
            self.accept(&row, result);
            self.slots.state_mut(row.slot).ended = result.ended.is_some() || result.error.is_some();
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
        let by_rule = self.sampler.held_by_rule(row, &self.slots);
        let mut held = 0;
        for index in row.logits.clone() {
            let LogitsOf::Next { after_drafts } = self.inputs.logits[index].of else { continue };
            if result.error.is_some() {
                break;
            }
            if let Some(error) = self.sampler.mask_error(index) {
                result.error = Some(error.clone());
                break;
            }
            let Some(sampled) = self.sampler.token(index) else {
                let position = self.inputs.logits[index].position as u32;
                result.error = Some(RowError::NotFinite { position });
                break;
            };
            held = after_drafts;
            let draft = self.slots.drafts(row.slot).get(after_drafts).filter(|_| after_drafts < row.num_drafts);
            let draft = draft.map(|&draft| draft as TokenId);
            let state = self.slots.state_mut(row.slot);
            let (token, draft_holds) = match (self.forced, draft) {
                (Some(forced), Some(draft)) if forced.holds(state.sampling.seed, state.tokens.len()) => (draft, true),
                (None, Some(draft)) if by_rule.is_some_and(|held| after_drafts < held) => (draft, true),
                (None, draft) if by_rule.is_none() => (sampled, draft == Some(sampled)),
                _ => (sampled, false),
            };
            result.error = state.accept(token).err();
            result.accepted.push(token);
            result.logprobs.extend(self.sampler.logprobs(index).cloned());
            result.ended = ends(state, token, self.max_model_len).filter(|_| result.error.is_none());
            if result.ended.is_some() || !draft_holds {
                break;
            }
        }
        held
    }

    /// Lets the proposer look at every sequence that did not fail. Forward and sampling `took` this long.
    pub(crate) fn propose(&mut self, hidden: &Tensor, took: Duration, results: &mut [RowResult]) -> Result<()> {
        let Some(proposer) = &mut self.proposer else { return Ok(()) };
        self.propose_rows.clear();
        for (row, result) in self.inputs.rows.iter().zip(&*results) {
            let state = self.slots.state(row.slot);
            if row.is_inert() || result.error.is_some() {
                continue;
            }
            let held = row.num_known() + result.accepted.len().saturating_sub(1);
            self.propose_rows.push(ProposeRow {
                slot: row.slot,
                hidden: row.tokens.start..row.tokens.start + held,
                wants_drafts: row.wants_token && !state.ended,
                num_drafts: row.num_drafts,
                num_held: result.accepted.len().saturating_sub(1).min(row.num_drafts),
                ended: state.ended,
                // The last token that may come is always sampled, not drafted.
                room: state.room(self.max_model_len).saturating_sub(1).min(state.max_drafts()),
            });
        }
        let is_decode = self.inputs.rows.iter().all(|row| row.is_inert() || row.decodes());
        proposer.propose(&mut Propose {
            rows: &self.propose_rows,
            slots: &mut self.slots,
            hidden: self.features.as_ref().map_or(hidden, Features::tensor),
            picked: Some(self.sampler.picked()).filter(|picked| self.inputs.logits.len() <= picked.dims()[0]),
            decode: is_decode.then(|| (took, self.inputs.num_tokens())),
            graphs: &mut self.graphs,
            forward: Forward {
                batch: &self.batch,
                kv: &mut self.kv,
                workspace: &self.workspace,
                comm: &*self.comm,
                target_hidden: Some(hidden),
                taps: &mut [],
            },
        })?;
        if self.propose_rows.iter().any(|row| self.slots.state(row.slot).matcher.is_some()) {
            proposer.collect(&mut self.slots)?;
        }
        for row in &self.propose_rows {
            self.slots.cut_drafts(row.slot, if row.wants_drafts { row.room } else { 0 });
            self.slots.cut_refused_drafts(row.slot);
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
    if state.sampling.stop_tokens.contains(&token) || state.is_complete() {
        return Some(FinishReason::Stop);
    }
    (state.room(max_model_len) == 0).then_some(FinishReason::Length)
}
