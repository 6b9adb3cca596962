//! Which tokens may be picked at each row of a step, as bits: what grammars, lists of allowed tokens, bad words and `min_tokens` leave.
//!
//! Filled on the host while a device runs the forward pass. A row after drafts has the mask of the place that they lead to, so
//! that what is verified is what would have been picked without them. On the device masks have one place, which a recorded step reads.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use drafthorse_control::{RowError, Slot};
use drafthorse_kernels::device::{Staged, Staging};
use drafthorse_kernels::ops::mask;
use drafthorse_kernels::{DType, Device, Tensor, pool};

use crate::error::Result;
use crate::grammar::Matcher;
use crate::inputs::{LogitRow, PlannedRow};
use crate::slots::{SlotState, Slots};

/// The masks of a step.
pub(crate) struct Masks {
    /// Rows of the step that have one, in ascending order.
    rows: Vec<usize>,
    /// `[rows, words]`.
    bits: Vec<u32>,
    words: usize,
    /// Rows at which nothing can be picked, in ascending order, and why.
    errors: Vec<(usize, RowError)>,
    staging: Staging,
    /// `[chunk rows]`: each row's mask, -1 for none.
    of_row: Staged,
    /// `[chunk rows, words]`.
    staged_bits: Staged,
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
    /// For chunks of `chunk_rows` rows.
    pub fn new(device: &Device, chunk_rows: usize, vocab_size: usize) -> Result<Self> {
        let words = mask::num_words(vocab_size);
        let bytes = |elements: usize| (elements * DType::I32.bytes()).next_multiple_of(64);
        let staging = Staging::new(device, bytes(chunk_rows) + bytes(chunk_rows * words))?;
        Ok(Masks {
            rows: Vec::new(),
            bits: Vec::new(),
            words,
            errors: Vec::new(),
            of_row: staging.tensor([chunk_rows], DType::I32)?,
            staged_bits: staging.tensor([chunk_rows, words], DType::I32)?,
            staging,
        })
    }

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

    /// Fills the masks of a step's rows. What each sequence has of tokens is known; those that have ended want none.
    pub fn fill(&mut self, planned: &[PlannedRow], logits: &[LogitRow], slots: &mut Slots) {
        self.clear();
        let mut shares: Vec<(Slot, Range<usize>)> = Vec::new();
        for row in planned.iter().filter(|row| row.wants_token) {
            let state = slots.state(row.slot);
            if state.is_masked() && !state.ended {
                let rows = row.logits.end - 1 - row.num_drafts..row.logits.end;
                self.rows.extend(rows.clone());
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
                let position = logits[row].position as u32;
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

    /// Whether any of the rows has one.
    pub fn any(&self, rows: Range<usize>) -> bool {
        !self.within(rows).is_empty()
    }

    /// Of `self.rows`, those in a range of the step's rows.
    fn within(&self, rows: Range<usize>) -> Range<usize> {
        let at = |row: usize| self.rows.partition_point(|&masked| masked < row);
        at(rows.start)..at(rows.end)
    }

    /// Sends the masks of a chunk's rows, and none for as many more as it is padded with.
    ///
    /// # Errors
    /// `Kernel` if the device fails.
    pub fn send(&mut self, rows: Range<usize>, num_padded: usize) -> Result<()> {
        let masked = self.within(rows.clone());
        let of_row = self.staging.elements::<i32>(&mut self.of_row, 0..num_padded)?;
        of_row.fill(-1);
        for (number, &row) in (0..).zip(&self.rows[masked.clone()]) {
            of_row[row - rows.start] = number;
        }
        let bits = &self.bits[masked.start * self.words..masked.end * self.words];
        let staged = self.staging.elements::<i32>(&mut self.staged_bits, 0..bits.len())?;
        for (staged, &word) in staged.iter_mut().zip(bits) {
            *staged = word as i32;
        }
        Ok(self.staging.send()?)
    }

    /// Masks `logits`, `[rows, vocab]`, with what was sent last for as many rows.
    ///
    /// # Errors
    /// `Kernel` if the device fails.
    pub fn apply(&self, logits: &mut Tensor) -> Result<()> {
        let (num_rows, _) = logits.rows_cols();
        Ok(mask::mask(logits, &self.of_row.rows(0..num_rows), &self.staged_bits)?)
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
