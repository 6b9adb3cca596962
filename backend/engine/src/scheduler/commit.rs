//! What came of it.

use std::time::Instant;

use drafthorse_control::{FinishReason, RowResult, StepResult};

use super::{Events, PlannedRow, PlannedStep, Scheduler};
use crate::error::{EngineError, Result};
use crate::request::{Event, Tokens};
use crate::sequence::Key;
use crate::stats::add;

impl Scheduler {
    /// Takes the result of the oldest step in flight.
    ///
    /// # Errors
    /// If it does not fit that step: rank 0 has lost its way.
    pub(crate) fn commit(&mut self, result: StepResult, now: Instant, events: &mut Events) -> Result<()> {
        let want = self.in_flight.front().map_or(0, |step| step.rows.len());
        let fits = self.in_flight.front().is_some_and(|step| step.id == result.id);
        let Some(step) = self.in_flight.pop_front().filter(|_| fits && want == result.rows.len()) else {
            return Err(EngineError::BadResult { step: result.id, got: result.rows.len(), want });
        };
        let timing = result.timing;
        let time = timing.forward + timing.sample + timing.propose;
        let decode_tokens = step.decode_tokens - self.drafts_not_there(&step);
        self.pace.measure(decode_tokens, step.chunk_tokens, time);
        add(&self.shared.counters.computed_tokens, decode_tokens + step.chunk_tokens);
        if step.rows.iter().any(|row| row.yields) {
            let has_drafts = result.rows.iter().any(|row| row.num_drafts > 0);
            self.undrafted_steps = if has_drafts { 0 } else { self.undrafted_steps.saturating_add(1) };
        }
        self.shared.step_took(&timing);
        for (row, result) in step.rows.iter().zip(result.rows) {
            self.commit_row(row, result, now, events);
        }
        self.blocks.step_done(step.id);
        Ok(())
    }

    /// Drafts that the step was planned with before it was known that the rank holds fewer.
    fn drafts_not_there(&self, step: &PlannedStep) -> usize {
        let held = |row: &PlannedRow| self.sequences.get(row.key).map_or(0, |sequence| sequence.held_drafts as usize);
        step.rows.iter().map(|row| row.num_drafts.saturating_sub(held(row))).sum()
    }

    fn commit_row(&mut self, row: &PlannedRow, result: RowResult, now: Instant, events: &mut Events) {
        // Ended in the step before, or cancelled: the row was inert, or its tokens are nobody's.
        let Some(sequence) = self.sequences.get_mut(row.key) else { return };
        sequence.rows_in_flight -= 1;
        let max_accepted = if row.yields { 1 + row.num_drafts } else { 0 };
        sequence.max_new -= max_accepted;
        sequence.min_new -= usize::from(row.yields);

        if let Some(error) = result.error {
            add(&self.shared.counters.failed, 1);
            return self.fail(row.key, EngineError::Row(error), events);
        }
        let got = result.accepted.len();
        if got > max_accepted || (got == 0 && row.yields && result.ended.is_none()) {
            add(&self.shared.counters.failed, 1);
            return self.fail(row.key, EngineError::BadRow { got, max: max_accepted }, events);
        }

        let verified = row.num_drafts.min(sequence.held_drafts as usize);
        let accepted = got.saturating_sub(1).min(verified);
        sequence.usage.drafts_verified += verified as u32;
        sequence.usage.drafts_accepted += accepted as u32;
        sequence.held_drafts = result.num_drafts;
        self.shared.verified(verified, accepted);
        add(&self.shared.counters.output_tokens, got);

        // Computed again after a preemption, a prompt brings what was delivered before.
        let first = row.start.saturating_sub(1);
        let sent = sequence.prompt_logprobs_sent;
        let mut prompt_logprobs = result.prompt_logprobs;
        if !prompt_logprobs.is_empty() {
            prompt_logprobs.drain(..sent.saturating_sub(first).min(prompt_logprobs.len()));
            sequence.prompt_logprobs_sent += prompt_logprobs.len();
        }

        sequence.tokens.extend_from_slice(&result.accepted);
        let (num_tokens, num_output) = (sequence.tokens.len(), sequence.tokens.len() - sequence.num_prompt);
        // Without a slot it was preempted meanwhile, and its blocks are given away.
        if sequence.slot.is_some() {
            sequence.num_computed = if row.yields { num_tokens - 1 } else { row.start + row.num_tokens };
        }
        if got > 0 && sequence.first_token.is_none() {
            sequence.first_token = Some(now);
        }
        let reached_max = num_tokens >= sequence.max_len;
        let id = sequence.id;
        self.remember(row.key);

        if got > 0 || !prompt_logprobs.is_empty() {
            let tokens = Tokens { ids: result.accepted, logprobs: result.logprobs, prompt_logprobs };
            events.push((id, Event::Tokens(tokens)));
        }
        if let Some(reason) = result.ended.or(reached_max.then_some(FinishReason::Length)) {
            self.end(row.key, reason, num_output, now, events);
        }
    }

    /// Offers the blocks that are now full of verified tokens to the prefix cache.
    fn remember(&mut self, key: Key) {
        let Some(sequence) = self.sequences.get_mut(key) else { return };
        let full_blocks = sequence.num_computed / self.blocks.block_size();
        if !self.enable_prefix_caching || full_blocks <= sequence.num_remembered {
            return;
        }
        self.blocks.extend_keys(sequence.root, &mut sequence.keys, &sequence.tokens);
        for at in sequence.num_remembered..full_blocks {
            self.blocks.remember(&sequence.blocks, at, sequence.keys[at]);
        }
        sequence.num_remembered = full_blocks;
    }
}
