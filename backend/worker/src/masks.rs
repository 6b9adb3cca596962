//! Which tokens may be picked at each row of a step, as bits: what grammars and lists of allowed tokens leave.
//!
//! Filled on the host while a device runs the forward pass. A row after drafts has the mask of the place that they lead to, so
//! that what is verified is what would have been picked without them.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use drafthorse_control::{RowError, Slot};
use drafthorse_kernels::ops::mask;
use drafthorse_kernels::{Tensor, Workspace, pool};

use crate::error::Result;
use crate::grammar::Matcher;
use crate::inputs::Inputs;
use crate::slots::{SlotState, Slots};

/// The masks of a step.
#[derive(Debug, Default)]
pub(crate) struct Masks {
    /// Rows of the step that have one, in ascending order.
    rows: Vec<i32>,
    /// `[rows, words]`.
    bits: Vec<u32>,
    words: usize,
    /// Rows at which nothing can be picked, in ascending order, and why.
    errors: Vec<(usize, RowError)>,
    /// Rows of a chunk, counted from its first.
    in_chunk: Vec<i32>,
}

/// One sequence's share.
struct Task<'a> {
    slot: Slot,
    state: &'a SlotState,
    matcher: Option<Box<Matcher>>,
    drafts: Vec<i32>,
    /// Its first row in the step.
    first: usize,
    bits: &'a mut [u32],
    errors: Vec<(usize, Trouble)>,
}

enum Trouble {
    DeadEnd,
    Failed(String),
}

impl Masks {
    pub fn clear(&mut self) {
        self.rows.clear();
        self.bits.clear();
        self.errors.clear();
    }

    /// Why nothing can be picked at row `index` of the step.
    pub fn error(&self, index: usize) -> Option<&RowError> {
        let at = self.errors.binary_search_by_key(&index, |(row, _)| *row).ok()?;
        Some(&self.errors[at].1)
    }

    /// Fills the masks of a step's rows, of `vocab_size` tokens.
    pub fn fill(&mut self, inputs: &Inputs, vocab_size: usize, slots: &mut Slots) {
        self.clear();
        self.words = mask::num_words(vocab_size);
        let mut shares: Vec<(Slot, Range<usize>)> = Vec::new();
        for row in inputs.rows.iter().filter(|row| row.wants_token) {
            if slots.state(row.slot).is_masked() {
                let rows = row.logits.end - 1 - row.num_drafts..row.logits.end;
                self.rows.extend(rows.clone().map(|row| row as i32));
                shares.push((row.slot, rows));
            }
        }
        if shares.is_empty() {
            return;
        }
        self.bits.resize(self.rows.len() * self.words, u32::MAX);

        let matchers: Vec<_> = shares.iter().map(|(slot, _)| slots.state_mut(*slot).matcher.take()).collect();
        let mut rest = &mut self.bits[..];
        let mut tasks: Vec<Mutex<Task<'_>>> = Vec::with_capacity(shares.len());
        for ((slot, rows), matcher) in shares.into_iter().zip(matchers) {
            let (bits, after) = std::mem::take(&mut rest).split_at_mut(rows.len() * self.words);
            rest = after;
            let drafts = slots.drafts(slot)[..rows.len() - 1].to_vec();
            let state = slots.state(slot);
            tasks.push(Mutex::new(Task { slot, state, matcher, drafts, first: rows.start, bits, errors: Vec::new() }));
        }
        let words = self.words;
        // Each is locked by the one thread that runs it.
        pool::parallel_for(tasks.len(), &|i| tasks[i].lock().unwrap_or_else(PoisonError::into_inner).run(words));

        let mut used = Vec::with_capacity(tasks.len());
        for task in tasks {
            let task = task.into_inner().unwrap_or_else(PoisonError::into_inner);
            used.push((task.slot, task.matcher));
            for (after, trouble) in task.errors {
                let row = task.first + after;
                let position = inputs.logits[row].position as u32;
                let error = match trouble {
                    Trouble::DeadEnd => RowError::GrammarDeadEnd { position },
                    Trouble::Failed(reason) => RowError::Grammar { position, reason },
                };
                self.errors.push((row, error));
            }
        }
        for (slot, matcher) in used {
            slots.state_mut(slot).matcher = matcher;
        }
    }

    /// Masks the rows of a chunk, `logits` `[chunk, vocab]`, whose first is row `first` of the step.
    ///
    /// # Errors
    /// `Kernel` if the memory plan was too small.
    pub fn apply(&mut self, first: usize, logits: &mut Tensor, workspace: &Workspace) -> Result<()> {
        let (num_rows, _) = logits.rows_cols();
        let at = |row: usize| self.rows.partition_point(|&masked| (masked as usize) < row);
        let masked = at(first)..at(first + num_rows);
        if masked.is_empty() {
            return Ok(());
        }
        self.in_chunk.clear();
        self.in_chunk.extend(self.rows[masked.clone()].iter().map(|&row| row - first as i32));
        let bits = &self.bits[masked.start * self.words..masked.end * self.words];
        Ok(mask::mask(logits, &self.in_chunk, bits, workspace)?)
    }
}

impl Task<'_> {
    fn run(&mut self, words: usize) {
        let sampling = &self.state.sampling;
        let mut ends = &[][..];
        if let Some(matcher) = &mut self.matcher {
            if let Err((after, reason)) = matcher.fill(&self.drafts, words, self.bits) {
                self.errors.push((after, Trouble::Failed(reason)));
                return;
            }
            ends = matcher.end_tokens();
        }
        for (after, row) in self.bits.chunks_mut(words).enumerate() {
            let mut forbid = |token: u32| {
                if let Some(word) = row.get_mut(token as usize / 32) {
                    *word &= !(1 << (token % 32));
                }
            };
            // Where the grammar may end it allows all end tokens; this sequence may have to go on past them.
            ends.iter().filter(|end| !sampling.stop_tokens.contains(end)).for_each(|&end| forbid(end));
            self.state.banned(&self.drafts[..after]).for_each(forbid);
            if let Some(allowed) = &self.state.allowed {
                row.iter_mut().zip(allowed).for_each(|(word, allowed)| *word &= allowed);
            }
            if row.iter().all(|&word| word == 0) {
                self.errors.push((after, Trouble::DeadEnd));
            }
        }
    }
}
