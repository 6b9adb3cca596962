//! A step's inputs on the device: allocated once at the largest size, overwritten before every step.

use std::ops::Range;

use drafthorse_kernels::device::{Staged, Staging};
use drafthorse_kernels::ops::attention::Ragged;
use drafthorse_kernels::ops::feed_tokens::feed_tokens;
use drafthorse_kernels::ops::held_drafts::{HeldDrafts, held_drafts};
use drafthorse_kernels::{DType, Device, Tensor, View};

use crate::error::{ModelError, Result};

/// The largest step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Tokens of all sequences together.
    pub max_tokens: usize,
    pub max_seqs: usize,
    /// KV blocks of one sequence: the width of the block tables.
    pub max_blocks_per_seq: usize,
    /// Rows that logits are computed for.
    pub max_logit_rows: usize,
    /// Steps of one token a sequence that are known with the step itself; see [`Batch::set_with_later`].
    pub max_later: usize,
}

/// A step's inputs on the host. Sequence `s` owns tokens `cu_tokens[s]..cu_tokens[s + 1]`.
#[derive(Clone, Copy, Debug)]
pub struct BatchInputs<'a> {
    /// `[tokens]`; what is sampled by a step in flight stands as [`sampled_by`](drafthorse_kernels::ops::feed_tokens::sampled_by).
    pub token_ids: &'a [i32],
    /// `[tokens]`: each token's index in its sequence.
    pub positions: &'a [i32],
    /// `[seqs + 1]`, from 0 up to the number of tokens.
    pub cu_tokens: &'a [i32],
    /// `[seqs]`: tokens whose KV is in the cache once this step has run.
    pub kv_lens: &'a [i32],
    /// `[seqs]`: the blocks that hold each sequence's KV, in order.
    pub block_tables: &'a [&'a [i32]],
    /// Tokens of the batch whose logits are wanted.
    pub logit_rows: &'a [i32],
}

/// Steps that follow a step, all of one token for each of its sequences, whose positions are known before it is run.
#[derive(Clone, Copy, Debug)]
pub struct LaterSteps<'a> {
    /// `[later steps * seqs]`, as those of the step.
    pub token_ids: &'a [i32],
    /// `[seqs]`: where the tokens of the first of them stand; each step after it goes on by one.
    pub positions: &'a [i32],
}

/// A step's inputs on the device.
pub struct Batch {
    limits: BatchLimits,
    staging: Staging,
    token_ids: Staged,
    positions: Staged,
    cu_tokens: Staged,
    kv_lens: Staged,
    logit_rows: Staged,
    /// Last, since it is the longest: what a step does not use of it is not sent.
    block_tables: Staged,
    /// `cu_tokens` of all later steps.
    counting: Tensor,
    num_logit_rows: usize,
    /// The step and its later steps: what of the arrays is theirs.
    step: Window,
    num_later: usize,
    /// What is looked at.
    window: Window,
}

/// The part of a batch's arrays that one step reads.
#[derive(Clone, Copy, Default)]
struct Window {
    first_token: usize,
    first_seq: usize,
    num_tokens: usize,
    num_seqs: usize,
    is_later: bool,
    max_tokens_per_seq: usize,
    max_kv_len: usize,
}

impl Batch {
    /// # Errors
    /// If the device is out of memory.
    pub fn new(device: &Device, limits: BatchLimits) -> Result<Self> {
        let later = limits.max_later * limits.max_seqs;
        let (tokens, seqs) = (limits.max_tokens + later, limits.max_seqs + later);
        let lengths = [tokens, tokens, limits.max_seqs + 1, seqs, limits.max_logit_rows];
        let table = limits.max_seqs * limits.max_blocks_per_seq;
        let bytes = |len: usize| (len * DType::I32.bytes()).next_multiple_of(64);
        let staging = Staging::new(device, lengths.into_iter().chain([table]).map(bytes).sum())?;
        let vector = |len: usize| staging.tensor([len], DType::I32);
        let counting: Vec<i32> = if later > 0 { (0..=limits.max_seqs as i32).collect() } else { Vec::new() };
        Ok(Batch {
            token_ids: vector(tokens)?,
            positions: vector(tokens)?,
            cu_tokens: vector(limits.max_seqs + 1)?,
            kv_lens: vector(seqs)?,
            logit_rows: vector(limits.max_logit_rows)?,
            block_tables: staging.tensor([limits.max_seqs, limits.max_blocks_per_seq], DType::I32)?,
            counting: Tensor::from_slice(device, "numbers of sequences", &counting, [counting.len()])?,
            staging,
            limits,
            num_logit_rows: 0,
            step: Window::default(),
            num_later: 0,
            window: Window::default(),
        })
    }

    /// Becomes the batch that `inputs` describe.
    ///
    /// # Errors
    /// `BatchTooLarge` beyond a limit, `BatchMismatch` if the parts do not fit together. The batch is then empty.
    pub fn set(&mut self, inputs: &BatchInputs<'_>) -> Result<()> {
        self.set_padded(inputs, inputs.kv_lens.len())
    }

    /// As [`set`](Self::set), and if each sequence has one token, as many more as make `num_seqs`: they belong to no sequence, write no KV,
    /// and their results mean nothing. So that steps of few sizes serve for all.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    pub fn set_padded(&mut self, inputs: &BatchInputs<'_>, num_seqs: usize) -> Result<()> {
        self.fill(inputs, num_seqs, LaterSteps { token_ids: &[], positions: &[] })
    }

    /// As [`set`](Self::set), and all steps of `later` with it, which [`turn_to`](Self::turn_to) turns to.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    pub fn set_with_later(&mut self, inputs: &BatchInputs<'_>, later: LaterSteps<'_>) -> Result<()> {
        self.fill(inputs, inputs.kv_lens.len(), later)
    }

    /// Becomes later step `step` of the batch that was set, from 1, or with 0 that batch.
    ///
    /// # Panics
    /// If there is no such step.
    pub fn turn_to(&mut self, step: usize) {
        assert!(step <= self.num_later, "later step {step} of {}", self.num_later);
        let first = self.step;
        self.window = match step.checked_sub(1) {
            None => first,
            Some(before) => Window {
                first_token: first.num_tokens + before * first.num_seqs,
                first_seq: first.num_seqs + before * first.num_seqs,
                num_tokens: first.num_seqs,
                is_later: true,
                max_tokens_per_seq: 1,
                max_kv_len: first.max_kv_len + step,
                ..first
            },
        };
    }

    fn fill(&mut self, inputs: &BatchInputs<'_>, num_seqs: usize, later: LaterSteps<'_>) -> Result<()> {
        (self.step, self.window, self.num_logit_rows, self.num_later) = (Window::default(), Window::default(), 0, 0);
        let num_later = self.check(inputs, later)?;
        let padding = num_seqs - inputs.kv_lens.len();
        let (num_tokens, num_logit_rows) = (inputs.token_ids.len() + padding, inputs.logit_rows.len() + padding);
        self.check_at_most("number of tokens", num_tokens, self.limits.max_tokens)?;
        self.check_at_most("number of sequences", num_seqs, self.limits.max_seqs)?;
        self.check_at_most("number of logit rows", num_logit_rows, self.limits.max_logit_rows)?;

        let last = inputs.cu_tokens.last().copied().unwrap_or(0);
        for (staged, values, len, pad) in [
            (&mut self.token_ids, inputs.token_ids, num_tokens, 0),
            (&mut self.positions, inputs.positions, num_tokens, 0),
            (&mut self.cu_tokens, inputs.cu_tokens, num_seqs + 1, last),
            (&mut self.kv_lens, inputs.kv_lens, num_seqs, 0),
            (&mut self.logit_rows, inputs.logit_rows, num_logit_rows, 0),
        ] {
            let (given, padded) = self.staging.elements(staged, 0..len)?.split_at_mut(values.len());
            given.copy_from_slice(values);
            padded.fill(pad);
        }
        let tokens = num_tokens..num_tokens + later.token_ids.len();
        self.staging.elements(&mut self.token_ids, tokens)?.copy_from_slice(later.token_ids);
        for step in 0..num_later {
            let go_on = |into: &mut [i32], by: usize| {
                into.iter_mut().zip(later.positions).for_each(|(into, from)| *into = from + by as i32);
            };
            let (tokens, seqs) = (num_tokens + step * num_seqs, num_seqs + step * num_seqs);
            go_on(self.staging.elements(&mut self.positions, tokens..tokens + num_seqs)?, step);
            go_on(self.staging.elements(&mut self.kv_lens, seqs..seqs + num_seqs)?, step + 1);
        }
        let width = self.limits.max_blocks_per_seq;
        let used = inputs.block_tables.len() * width;
        let tables = self.staging.elements(&mut self.block_tables, 0..used)?;
        for (padded, blocks) in tables.chunks_mut(width.max(1)).zip(inputs.block_tables) {
            padded[..blocks.len()].copy_from_slice(blocks);
            // A stale id beyond the sequence's blocks must not look like one of them.
            padded[blocks.len()..].fill(0);
        }
        self.staging.send()?;

        let lengths = inputs.cu_tokens.windows(2).map(|pair| pair[1] - pair[0]);
        self.step = Window {
            num_tokens,
            num_seqs,
            max_tokens_per_seq: lengths.max().unwrap_or(0) as usize,
            max_kv_len: inputs.kv_lens.iter().copied().max().unwrap_or(0) as usize,
            ..Window::default()
        };
        (self.window, self.num_logit_rows, self.num_later) = (self.step, num_logit_rows, num_later);
        Ok(())
    }

    /// How many later steps there are.
    fn check(&self, inputs: &BatchInputs<'_>, later: LaterSteps<'_>) -> Result<usize> {
        let equal = |what, got: usize, want: usize| {
            if got == want { Ok(()) } else { Err(ModelError::BatchMismatch { what, got, want }) }
        };
        let (tokens, seqs) = (inputs.token_ids.len(), inputs.kv_lens.len());
        self.check_at_most("number of tokens", tokens, self.limits.max_tokens)?;
        self.check_at_most("number of sequences", seqs, self.limits.max_seqs)?;
        self.check_at_most("number of logit rows", inputs.logit_rows.len(), self.limits.max_logit_rows)?;
        for blocks in inputs.block_tables {
            self.check_at_most("number of blocks of a sequence", blocks.len(), self.limits.max_blocks_per_seq)?;
        }
        equal("number of positions", inputs.positions.len(), tokens)?;
        equal("number of cumulative tokens", inputs.cu_tokens.len(), seqs + 1)?;
        equal("number of block tables", inputs.block_tables.len(), seqs)?;
        equal("last of the cumulative tokens", inputs.cu_tokens.last().map_or(0, |&last| last as usize), tokens)?;
        if later.token_ids.is_empty() {
            return Ok(0);
        }
        let num_later = later.token_ids.len() / seqs.max(1);
        equal("number of positions of later steps", later.positions.len(), seqs)?;
        equal("number of tokens of later steps", later.token_ids.len(), num_later * seqs)?;
        self.check_at_most("number of later steps", num_later, self.limits.max_later)?;
        Ok(num_later)
    }

    fn check_at_most(&self, what: &'static str, got: usize, max: usize) -> Result<()> {
        if got <= max { Ok(()) } else { Err(ModelError::BatchTooLarge { what, got, max }) }
    }

    pub fn limits(&self) -> BatchLimits {
        self.limits
    }

    pub fn num_tokens(&self) -> usize {
        self.window.num_tokens
    }

    pub fn num_seqs(&self) -> usize {
        self.window.num_seqs
    }

    pub fn num_logit_rows(&self) -> usize {
        self.num_logit_rows
    }

    /// Ids that stand for what the step before samples become its tokens; see [`feed_tokens`](drafthorse_kernels::ops::feed_tokens).
    ///
    /// # Errors
    /// If the device fails.
    pub fn feed_tokens(&mut self, sampled: &Tensor) -> Result<()> {
        let tokens = self.window.tokens();
        Ok(feed_tokens(&mut self.token_ids.rows_mut(tokens), sampled)?)
    }

    /// Makes the step that was set, and its later steps, those that go on after a step of as many tokens that verified drafts: `fed` to
    /// it, and `picked` by it, both `[tokens]`. For each sequence `logit_rows` has -1 or the number of drafts that hold, and becomes the
    /// row of the first token that is no draft; later steps were set as if none held. See
    /// [`held_drafts`](drafthorse_kernels::ops::held_drafts).
    ///
    /// # Errors
    /// If the numbers differ, or the device fails.
    pub fn follow_drafts(&mut self, fed: &Tensor, picked: &Tensor) -> Result<()> {
        let Window { num_tokens, num_seqs, .. } = self.step;
        let later = self.num_later * num_seqs;
        Ok(held_drafts(&mut HeldDrafts {
            fed,
            picked,
            tokens: &mut self.token_ids.rows_mut(0..num_tokens),
            rows: &mut self.logit_rows.rows_mut(0..self.num_logit_rows),
            later: [
                &mut self.positions.rows_mut(num_tokens..num_tokens + later),
                &mut self.kv_lens.rows_mut(num_seqs..num_seqs + later),
            ],
        })?)
    }

    /// `[tokens]`.
    pub fn token_ids(&self) -> View<'_> {
        self.token_ids.rows(self.window.tokens())
    }

    /// `[tokens]`.
    pub fn positions(&self) -> View<'_> {
        self.positions.rows(self.window.tokens())
    }

    /// `[logit rows]`, of the step that was set.
    pub fn logit_rows(&self) -> View<'_> {
        self.logit_rows.rows(0..self.num_logit_rows)
    }

    /// How the tokens belong to sequences, and those to KV blocks.
    pub fn sequences(&self) -> Sequences<'_> {
        let Window { first_seq, num_seqs, is_later, max_tokens_per_seq, max_kv_len, .. } = self.window;
        let cu_tokens = if is_later { &self.counting } else { &*self.cu_tokens };
        Sequences {
            cu_tokens: cu_tokens.rows(0..num_seqs + 1),
            kv_lens: self.kv_lens.rows(first_seq..first_seq + num_seqs),
            block_tables: self.block_tables.rows(0..num_seqs),
            max_tokens_per_seq,
            max_kv_len,
        }
    }
}

impl Window {
    fn tokens(&self) -> Range<usize> {
        self.first_token..self.first_token + self.num_tokens
    }
}

/// The ragged part of a batch, as views; [`ragged`](Self::ragged) is what ops take.
pub struct Sequences<'a> {
    cu_tokens: View<'a>,
    kv_lens: View<'a>,
    block_tables: View<'a>,
    max_tokens_per_seq: usize,
    max_kv_len: usize,
}

impl Sequences<'_> {
    pub fn ragged(&self) -> Ragged<'_> {
        Ragged {
            cu_tokens: &self.cu_tokens,
            kv_lens: &self.kv_lens,
            block_tables: &self.block_tables,
            max_tokens_per_seq: self.max_tokens_per_seq,
            max_kv_len: self.max_kv_len,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch() -> Batch {
        let limits = BatchLimits { max_tokens: 4, max_seqs: 2, max_blocks_per_seq: 3, max_logit_rows: 2, max_later: 2 };
        Batch::new(&Device::Cpu, limits).unwrap()
    }

    #[test]
    fn views_show_the_step_that_was_set_last() {
        let mut batch = batch();
        let inputs = BatchInputs {
            token_ids: &[5, 6, 7, 8],
            positions: &[0, 1, 2, 9],
            cu_tokens: &[0, 3, 4],
            kv_lens: &[3, 10],
            block_tables: &[&[4, 2, 1], &[3]],
            logit_rows: &[2, 3],
        };
        batch.set(&inputs).unwrap();
        let sequences = batch.sequences();
        let ragged = sequences.ragged();
        assert_eq!(ragged.block_tables.as_slice::<i32>(), [4, 2, 1, 3, 0, 0]);
        assert_eq!((ragged.max_tokens_per_seq, ragged.max_kv_len), (3, 10));

        let one = BatchInputs {
            token_ids: &[9],
            positions: &[10],
            cu_tokens: &[0, 1],
            kv_lens: &[11],
            block_tables: &[&[3]],
            logit_rows: &[0],
        };
        batch.set(&one).unwrap();
        assert_eq!(batch.token_ids().as_slice::<i32>(), [9]);
        assert_eq!(batch.sequences().ragged().block_tables.as_slice::<i32>(), [3, 0, 0]);
    }

    #[test]
    fn later_steps_go_on_where_each_sequence_ends() {
        let mut batch = batch();
        let inputs = BatchInputs {
            token_ids: &[5, 6, 7, 8],
            positions: &[3, 4, 8, 9],
            cu_tokens: &[0, 2, 4],
            kv_lens: &[5, 10],
            block_tables: &[&[4, 2], &[3, 1, 5]],
            logit_rows: &[0, 3],
        };
        let later = LaterSteps { token_ids: &[-1, -2, -3, -4], positions: &[4, 10] };
        batch.set_with_later(&inputs, later).unwrap();
        assert_eq!(batch.positions().as_slice::<i32>(), [3, 4, 8, 9]);
        let mut seen = Vec::new();
        for step in [2, 1] {
            batch.turn_to(step);
            let sequences = batch.sequences();
            let ragged = sequences.ragged();
            let of = |view: &Tensor| view.as_slice::<i32>().to_vec();
            assert_eq!(of(ragged.cu_tokens), [0, 1, 2]);
            assert_eq!(of(ragged.block_tables), [4, 2, 0, 3, 1, 5]);
            seen.push((of(&batch.token_ids()), of(&batch.positions()), of(ragged.kv_lens)));
        }
        assert_eq!(seen[0], (vec![-3, -4], vec![5, 11], vec![6, 12]));
        assert_eq!(seen[1], (vec![-1, -2], vec![4, 10], vec![5, 11]));
        batch.turn_to(0);
        assert_eq!(batch.token_ids().as_slice::<i32>(), [5, 6, 7, 8]);

        let mut refused = |later: LaterSteps<'_>| batch.set_with_later(&inputs, later).unwrap_err().to_string();
        let three = LaterSteps { token_ids: &[0; 6], ..later };
        assert_eq!(refused(three), "batch: number of later steps is 3, at most 2");
        let odd = LaterSteps { token_ids: &[0; 3], ..later };
        assert_eq!(refused(odd), "batch: number of tokens of later steps is 3, expected 2");
        let none = LaterSteps { positions: &[], ..later };
        assert_eq!(refused(none), "batch: number of positions of later steps is 0, expected 2");
    }

    #[test]
    fn what_does_not_fit_is_refused_and_leaves_no_batch() {
        let good = BatchInputs {
            token_ids: &[1],
            positions: &[0],
            cu_tokens: &[0, 1],
            kv_lens: &[1],
            block_tables: &[&[0]],
            logit_rows: &[0],
        };
        let mut batch = batch();
        let mut refused = |inputs: BatchInputs<'_>| {
            batch.set(&good).unwrap();
            let text = batch.set(&inputs).unwrap_err().to_string();
            assert_eq!(batch.num_tokens(), 0);
            text
        };
        assert_eq!(refused(BatchInputs { token_ids: &[1; 5], ..good }), "batch: number of tokens is 5, at most 4");
        assert_eq!(
            refused(BatchInputs { block_tables: &[&[0; 4]], ..good }),
            "batch: number of blocks of a sequence is 4, at most 3"
        );
        assert_eq!(
            refused(BatchInputs { cu_tokens: &[0, 2], ..good }),
            "batch: last of the cumulative tokens is 2, expected 1"
        );
        assert_eq!(refused(BatchInputs { positions: &[], ..good }), "batch: number of positions is 0, expected 1");
    }
}
