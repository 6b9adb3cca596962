//! From a step and the slots to a batch: which tokens run where, and whose logits are wanted.
//!
//! The buffers are kept from step to step; a step grows none of them.

use std::ops::Range;

use drafthorse_control::{Logprobs, Row, Slot, Step, TokenId};
use drafthorse_kernels::ops::feed_tokens::sampled_by;
use drafthorse_model::{Batch, BatchInputs};

use crate::error::{Result, WorkerError};
use crate::graphs::Graphs;
use crate::slots::Slots;

/// What a row of the step became.
#[derive(Clone, Debug)]
pub(crate) struct PlannedRow {
    pub slot: Slot,
    /// The sequence that was in the slot.
    pub serial: u64,
    /// Its tokens in the batch: what is known, then drafts. Empty if the sequence had ended: the row is inert.
    pub tokens: Range<usize>,
    pub num_drafts: usize,
    /// Its known tokens end where the sequence does, so that a token follows.
    pub wants_token: bool,
    /// Its [`LogitRow`]s: prompt tokens first, then the token and one after each draft.
    pub logits: Range<usize>,
}

impl PlannedRow {
    pub fn is_inert(&self) -> bool {
        self.tokens.is_empty()
    }

    pub fn num_known(&self) -> usize {
        self.tokens.len() - self.num_drafts
    }

    /// Runs no prompt: the newest token, and drafts after it.
    pub fn decodes(&self) -> bool {
        self.wants_token && self.num_known() == 1
    }
}

/// One row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogitRow {
    pub slot: Slot,
    /// Sequence index of the token that the logits are of.
    pub position: usize,
    pub of: LogitsOf,
    /// `Some(n)`: with log-probabilities, and those of the `n` likeliest tokens.
    pub logprobs: Option<u32>,
}

/// Why logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogitsOf {
    /// A token of the prompt, whose log-probability is wanted. `from_slot`: the hidden state before it is the slot's last
    /// one, from the chunk before.
    Prompt { token: TokenId, from_slot: bool },
    /// The token after this many drafts.
    Next { after_drafts: usize },
}

/// A step's inputs on the host.
#[derive(Debug, Default)]
pub(crate) struct Inputs {
    pub rows: Vec<PlannedRow>,
    pub logits: Vec<LogitRow>,
    /// Each of `logits` gives a token as it is or by a mask, with no draft before it and nothing told of it.
    pub is_plain: bool,
    /// Some of them may be by a mask.
    pub is_masked: bool,
    /// Each of `logits` gives a token as it is, drafts before it or not, and nothing is told of it.
    pub picks_as_they_are: bool,
    /// The rows that the batch was padded to, if the step can be replayed from a recording.
    pub replay: Option<usize>,
    token_ids: Vec<i32>,
    positions: Vec<i32>,
    cu_tokens: Vec<i32>,
    kv_lens: Vec<i32>,
    /// For each of `logits`, the batch's token whose hidden state it is made from.
    logit_rows: Vec<i32>,
}

impl Inputs {
    pub fn new(max_tokens: usize, max_seqs: usize) -> Self {
        Inputs {
            rows: Vec::with_capacity(max_seqs),
            logits: Vec::with_capacity(max_tokens),
            is_plain: false,
            is_masked: false,
            picks_as_they_are: false,
            replay: None,
            token_ids: Vec::with_capacity(max_tokens),
            positions: Vec::with_capacity(max_tokens),
            cu_tokens: Vec::with_capacity(max_seqs + 1),
            kv_lens: Vec::with_capacity(max_seqs),
            logit_rows: Vec::with_capacity(max_tokens),
        }
    }

    /// Of the step, without what the batch was padded with.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Appends the step's new blocks to the slots' tables and fills `batch`.
    ///
    /// # Errors
    /// `Step` if a row does not fit its sequence, `Model` if the step is larger than the batch was made for.
    pub fn build(&mut self, step: &Step, slots: &mut Slots, batch: &mut Batch, graphs: &Graphs) -> Result<()> {
        self.clear();
        for row in &step.rows {
            slots.append_blocks(step.id, row.slot, &row.new_blocks)?;
            let planned = self.plan(step.id, row, slots)?;
            self.rows.push(planned);
        }
        // The one list that cannot be kept: it borrows the slots' tables.
        let running = self.rows.iter().filter(|row| !row.is_inert());
        let block_tables: Vec<&[i32]> = running.map(|row| slots.blocks(row.slot)).collect();
        let inputs = BatchInputs {
            token_ids: &self.token_ids,
            positions: &self.positions,
            cu_tokens: &self.cu_tokens,
            kv_lens: &self.kv_lens,
            block_tables: &block_tables,
            logit_rows: &self.logit_rows,
        };
        let limits = batch.limits();
        let max_rows = limits.max_seqs.min(limits.max_tokens).min(limits.max_logit_rows);
        let may_be_masked = |row: &LogitRow| slots.state(row.slot).is_masked();
        let is_as_it_is = |row: &LogitRow| is_picked_as_it_is(row, slots);
        let follows_no_draft = |row: &LogitRow| row.of == LogitsOf::Next { after_drafts: 0 };
        self.picks_as_they_are = self.logits.iter().all(is_as_it_is);
        self.is_plain = self.picks_as_they_are && self.logits.iter().all(follows_no_draft);
        self.is_masked = self.logits.iter().any(may_be_masked);
        self.picks_as_they_are &= !self.is_masked;
        let decodes = self.is_plain && self.logits.len() == self.token_ids.len();
        self.replay = graphs.size(self.logits.len(), max_rows).filter(|_| decodes);
        match self.replay {
            Some(size) => batch.set_padded(&inputs, size)?,
            None => batch.set(&inputs)?,
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.logits.clear();
        self.token_ids.clear();
        self.positions.clear();
        self.cu_tokens.clear();
        self.cu_tokens.push(0);
        self.kv_lens.clear();
        self.logit_rows.clear();
    }

    fn plan(&mut self, step: u64, row: &Row, slots: &mut Slots) -> Result<PlannedRow> {
        let slot = row.slot;
        let first = self.token_ids.len();
        let first_logits = self.logits.len();
        let bad = |field, got: usize, must: String| WorkerError::Step { step, slot, field, got: got as u64, must };
        if self.rows.iter().any(|earlier| earlier.slot == slot) {
            return Err(bad("rows", 2, "one a slot".into()));
        }
        let block_size = slots.block_size();
        let state = slots.get_mut(step, slot)?;
        if state.ended {
            return Ok(PlannedRow {
                slot,
                serial: state.serial,
                tokens: first..first,
                num_drafts: 0,
                wants_token: false,
                logits: first_logits..first_logits,
            });
        }

        let (num_tokens, planned_drafts) = (row.num_tokens as usize, row.num_drafts as usize);
        let from = state.num_computed;
        let left = state.tokens.len() + state.num_sampling - from;
        let num_known = num_tokens.saturating_sub(planned_drafts);
        if num_known == 0 || num_known > left {
            return Err(bad("num_tokens less num_drafts", num_known, format!("1 to {left}, what is not computed yet")));
        }
        let wants_token = num_known == left;
        if planned_drafts > 0 && !wants_token {
            return Err(bad("num_drafts", planned_drafts, "0 in a chunk that does not end the sequence".into()));
        }

        let known_end = from + num_known;
        let seen = known_end.min(state.tokens.len());
        self.token_ids.extend(state.tokens[from..seen].iter().map(|&token| token as i32));
        if known_end > seen {
            self.token_ids.push(sampled_by(state.sampled_by));
        }
        let (num_prompt, num_cached, num_blocks) = (state.num_prompt, state.num_cached, state.num_blocks);
        let serial = state.serial;
        if let Logprobs::Top(top) = row.wants.prompt_logprobs {
            if from == num_cached && from > 0 && from < num_prompt {
                return Err(bad("num_cached", num_cached, "0 if prompt log-probabilities are wanted".into()));
            }
            for position in from.max(1)..known_end.min(num_prompt) {
                let of = LogitsOf::Prompt { token: state.tokens[position], from_slot: position == from };
                self.logits.push(LogitRow { slot, position, of, logprobs: Some(top) });
                self.logit_rows.push((first + position.saturating_sub(from + 1)) as i32);
            }
        }

        // Planned before the rank's drafts were known: fewer may be there.
        let drafts = if wants_token { slots.drafts(slot) } else { &[] };
        let drafts = &drafts[..drafts.len().min(planned_drafts)];
        let num_drafts = drafts.len();
        self.token_ids.extend_from_slice(drafts);
        let kv_len = known_end + num_drafts;
        if kv_len > num_blocks * block_size {
            return Err(bad("KV length", kv_len, format!("at most {block_size} in each of its {num_blocks} blocks")));
        }
        self.positions.extend(from as i32..kv_len as i32);
        self.kv_lens.push(kv_len as i32);
        let end = self.token_ids.len();
        self.cu_tokens.push(end as i32);
        if wants_token {
            let logprobs = match row.wants.logprobs {
                Logprobs::None => None,
                Logprobs::Top(top) => Some(top),
            };
            for after_drafts in 0..=num_drafts {
                let position = known_end + after_drafts;
                self.logits.push(LogitRow { slot, position, of: LogitsOf::Next { after_drafts }, logprobs });
                self.logit_rows.push((first + num_known - 1 + after_drafts) as i32);
            }
        }
        Ok(PlannedRow {
            slot,
            serial,
            tokens: first..end,
            num_drafts,
            wants_token,
            logits: first_logits..self.logits.len(),
        })
    }
}

/// But for masks.
fn is_picked_as_it_is(row: &LogitRow, slots: &Slots) -> bool {
    let is_next = matches!(row.of, LogitsOf::Next { .. });
    is_next && row.logprobs.is_none() && !slots.state(row.slot).changes_logits()
}
