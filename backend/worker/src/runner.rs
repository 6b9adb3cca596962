//! One step on one rank: release, copies, admit, forward, sample, verify, propose, in that order.
//!
//! A plain step, one whose tokens are picked from the logits as they are or by masks, is *launched*, that is given to the device, and
//! *finished* when its tokens are wanted. The next plain step may be launched in between: it takes the tokens that it does not know from
//! the device, so a GPU is never idle while the host thinks. If it has masks, which depend on those tokens, it is given the device up to
//! its logits, and the rest when they are known. Every other step is run to its end when it is launched, as is any while drafts are made.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use drafthorse_control::{
    Admit, BlockId, Logprobs, Row, RowResult, SamplingParams, Slot, Step, StepResult, Timing, Wants,
};
use drafthorse_kernels::device::Stopwatch;
use drafthorse_kernels::ops::copy_rows::copy;
use drafthorse_kernels::ops::gather_rows::gather_rows;
use drafthorse_kernels::{Communicator, DType, Tensor, Workspace};
use drafthorse_model::{Batch, Forward, KvCache, Model};

use crate::checksum::Checksum;
use crate::error::{Result, WorkerError};
use crate::features::Features;
use crate::graphs::{Graphs, Part};
use crate::inputs::{Inputs, LogitRow, LogitsOf, PlannedRow};
use crate::sampler::Sampler;
use crate::slots::{SlotState, Slots, changes_logits};
use crate::spec::{Forced, PassedOver, ProposeRow, Proposer};

/// Steps that a rank has at once at most: one that the device runs, and one behind it.
pub(crate) const MAX_IN_FLIGHT: usize = 2;

/// Enough for the library for products of many rows to be used.
const WARM_UP_TOKENS: usize = 16;

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
    /// Which drafts hold, if that is not for the target to say.
    pub forced: Option<Forced>,
    /// What the proposer reads of the target, if not its last hidden states.
    pub features: Option<Features>,
    /// The rows that the proposer is shown, kept from step to step.
    pub propose_rows: Vec<ProposeRow>,
    /// Rows of hidden states and the slots that keep them, likewise.
    pub kept_rows: Vec<(u32, u32)>,
    pub graphs: Graphs,
    pub max_model_len: usize,
    pub vocab_size: usize,
    /// Width and type of hidden states.
    pub hidden: (usize, DType),
    /// The step launched last; 0 before the first.
    pub last_step: u64,
    pub in_flight: VecDeque<InFlight>,
    /// By the step's number, if the device's time is wanted.
    pub stopwatches: Option<[Stopwatch; MAX_IN_FLIGHT]>,
    /// When the last step was finished.
    pub finished: Instant,
}

/// A step that was launched and is not finished.
pub(crate) struct InFlight {
    step: u64,
    launched: Instant,
    rows: Vec<PlannedRow>,
    logits: Vec<LogitRow>,
    work: Work,
    /// Its tokens, if it is a plain step without prompts that takes as long as others like it.
    decode_tokens: Option<usize>,
}

pub(crate) enum Work {
    /// The device has it, or it had none.
    Plain,
    /// The device has it up to its logits: not the oldest step in flight, whose tokens decide what may come next.
    Unpicked {
        /// The rows that it is padded to, if it is replayed.
        replay: Option<usize>,
        /// None if the recorded rest knows where they are.
        logits: Option<Tensor>,
    },
    /// Done.
    Done(Vec<RowResult>, Timing),
}

impl InFlight {
    /// Where its tokens arrive, and which stopwatch is its.
    fn place(&self) -> usize {
        self.step as usize % MAX_IN_FLIGHT
    }
}

impl Runner {
    /// Gives `step` to the device. With a step in flight only if [`may_launch`](Self::may_launch) says so.
    ///
    /// # Errors
    /// Whatever ends the group: a step out of order or outside its contract, a device that fails.
    pub fn launch(&mut self, step: &Step) -> Result<()> {
        let launched = Instant::now();
        let place = step.id as usize % MAX_IN_FLIGHT;
        if let Some(stopwatches) = &self.stopwatches {
            stopwatches[place].begin()?;
        }
        self.prepare(step)?;
        let is_plain = self.inputs.is_plain
            && self.inputs.logits.len() <= self.sampler.chunk_rows()
            && self
                .inputs
                .rows
                .iter()
                .all(|row| row.num_drafts == 0 && (row.is_inert() || !self.may_draft(row.slot, false)));
        let decode_tokens = self.decode_tokens();
        let work = match is_plain {
            true if self.batch.num_tokens() > 0 => self.enqueue(place)?,
            true => {
                self.sampler.ask(place, 0)?;
                Work::Plain
            }
            false => self.run_to_its_end(step)?,
        };
        if let (Some(stopwatches), Work::Plain | Work::Done(..)) = (&self.stopwatches, &work) {
            stopwatches[place].end()?;
        }
        let (rows, logits) = (std::mem::take(&mut self.inputs.rows), std::mem::take(&mut self.inputs.logits));
        self.in_flight.push_back(InFlight { step: step.id, launched, rows, logits, work, decode_tokens });
        if self.in_flight.len() == 1 { self.pick_by_masks() } else { Ok(()) }
    }

    /// Whether the proposer has use for the next row of the sequence in `slot`, which `is_admitted` only with that row, or is there.
    fn may_draft(&self, slot: Slot, is_admitted: bool) -> bool {
        let begins = |state: &SlotState| state.num_computed == state.num_cached;
        let begins = is_admitted || self.slots.try_state(slot).is_none_or(begins);
        self.proposer.as_ref().is_some_and(|proposer| proposer.has_use(slot, begins))
    }

    /// Of the batch, if it is plain, without prompts, and will take as long the next time.
    fn decode_tokens(&self) -> Option<usize> {
        let Inputs { rows, replay, is_masked, .. } = &self.inputs;
        let is_decode = rows.iter().all(|row| row.is_inert() || row.decodes());
        let part = if *is_masked { Part::Forward } else { Part::Whole };
        let is_settled = replay.is_none_or(|size| self.graphs.is_settled(size, part));
        (is_decode && is_settled).then(|| self.inputs.num_tokens())
    }

    /// Whether `step` can be launched now. One of which something must be known that a step in flight will tell cannot.
    pub fn may_launch(&self, step: &Step) -> bool {
        let Some(before) = self.in_flight.back() else { return true };
        let is_plain = |row: &Row| {
            let admitted = step.admit.iter().find(|admit| admit.slot == row.slot);
            let changed = match admitted {
                Some(admit) => changes_logits(&admit.sampling),
                None => self.slots.try_state(row.slot).is_none_or(SlotState::changes_logits),
            };
            let tells = row.wants.logprobs != Logprobs::None || row.wants.prompt_logprobs != Logprobs::None;
            // So many drafts at most: there may be none.
            let has_drafts = row.num_drafts > 0 && admitted.is_none() && !self.slots.drafts(row.slot).is_empty();
            !has_drafts && !self.may_draft(row.slot, admitted.is_some()) && !tells && !changed
        };
        // A sequence that loses its slot is still told the token that is being sampled for it.
        let is_told = |slot: &Slot| {
            let ended = self.slots.try_state(*slot).is_none_or(|state| state.ended);
            !ended && before.rows.iter().any(|row| row.slot == *slot && row.wants_token)
        };
        self.in_flight.len() < MAX_IN_FLIGHT
            && matches!(before.work, Work::Plain)
            && step.rows.len() <= self.sampler.chunk_rows()
            && !step.release.iter().any(is_told)
            && step.rows.iter().all(is_plain)
    }

    /// Whether the oldest step in flight would be finished at once.
    ///
    /// # Errors
    /// `Kernel` if the device has failed.
    pub fn is_done(&self) -> Result<bool> {
        match self.in_flight.front() {
            Some(oldest) if matches!(oldest.work, Work::Plain) => self.sampler.has_come(oldest.place()),
            _ => Ok(true),
        }
    }

    /// Waits for the oldest step in flight and answers it.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    ///
    /// # Panics
    /// If no step is in flight.
    pub fn finish(&mut self) -> Result<StepResult> {
        let mut oldest = self.in_flight.pop_front().expect("a step was launched");
        std::mem::swap(&mut self.inputs.rows, &mut oldest.rows);
        std::mem::swap(&mut self.inputs.logits, &mut oldest.logits);
        let place = oldest.place();
        let (rows, mut timing) = match oldest.work {
            Work::Done(rows, timing) => (rows, timing),
            Work::Unpicked { .. } => unreachable!("the oldest step is picked when it becomes that"),
            Work::Plain => {
                let mut results = vec![RowResult::default(); self.inputs.rows.len()];
                self.sampler.begin();
                self.sampler.take(place)?;
                self.settle(&mut results);
                // Before the one ahead of it was finished, this one was waiting.
                let forward = oldest.launched.max(self.finished).elapsed();
                if let Some(proposer) = &mut self.proposer {
                    let step = PassedOver { rows: &self.inputs.rows, slots: &self.slots };
                    proposer.passed(&step, oldest.decode_tokens.map(|num_tokens| (forward, num_tokens)));
                }
                (results, Timing { forward, ..Timing::default() })
            }
        };
        self.finished = Instant::now();
        timing.device = match &self.stopwatches {
            Some(stopwatches) => stopwatches[place].elapsed()?,
            None => Duration::ZERO,
        };
        let mut checksum = Checksum::default();
        for (row, result) in self.inputs.rows.iter().zip(&rows) {
            checksum.add(&result.accepted);
            // Drafts of a step to come are not this step's; with a proposer there is none.
            checksum.add_drafts(self.slots.drafts(row.slot));
        }
        self.pick_by_masks()?;
        Ok(StepResult { id: oldest.step, rows, checksum: checksum.value(), timing })
    }

    /// Gives the device the rest of the oldest step in flight, if it waits for its masks: the tokens they depend on are known.
    fn pick_by_masks(&mut self) -> Result<()> {
        let Runner { in_flight, sampler, slots, workspace, graphs, stopwatches, .. } = self;
        sampler.clear_masks();
        let Some(oldest) = in_flight.front_mut() else { return Ok(()) };
        let place = oldest.place();
        let Work::Unpicked { replay, logits } = &mut oldest.work else { return Ok(()) };
        let num_rows = oldest.logits.len();
        sampler.fill_masks(&oldest.rows, &oldest.logits, slots);
        sampler.send_masks(num_rows, replay.unwrap_or(num_rows))?;
        let mut pick = || {
            let logits = logits.as_mut().expect("until the pick is recorded, the forward pass is not replayed");
            sampler.pick_masked(logits, workspace)
        };
        match replay {
            Some(size) => graphs.run(*size, Part::Pick, pick)?,
            None => pick()?,
        }
        sampler.ask(place, num_rows)?;
        if let Some(stopwatches) = stopwatches {
            stopwatches[place].end()?;
        }
        oldest.work = Work::Plain;
        Ok(())
    }

    /// Runs a short prompt and a token after it, as step 1 to 3, and forgets them: kernels and libraries are loaded, and plans made,
    /// before anyone waits for it.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn warm_up(&mut self) -> Result<()> {
        let most = self.batch.limits().max_tokens.min(self.max_model_len.saturating_sub(2));
        let num_tokens = most.min(WARM_UP_TOKENS).min(self.slots.block_size() - 1) as u32;
        if num_tokens == 0 {
            return Ok(());
        }
        let slot = Slot(0);
        let admit = Admit {
            slot,
            tokens: vec![0; num_tokens as usize],
            num_prompt: num_tokens,
            num_cached: 0,
            blocks: vec![BlockId(0)],
            sampling: SamplingParams::default(),
            grammar: None,
            fork_of: None,
            adapter: None,
        };
        let row = |num_tokens| Row { slot, num_tokens, num_drafts: 0, new_blocks: Vec::new(), wants: Wants::default() };
        for step in [
            Step { id: 1, admit: vec![admit], rows: vec![row(num_tokens)], ..Step::default() },
            Step { id: 2, rows: vec![row(1)], ..Step::default() },
            Step { id: 3, release: vec![slot], ..Step::default() },
        ] {
            self.launch(&step)?;
            self.finish()?;
        }
        self.last_step = 0;
        if let Some(proposer) = &mut self.proposer {
            proposer.collect(&mut self.slots)?;
            proposer.warmed_up();
        }
        Ok(())
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

    /// Gives a plain step to the device, decodes from a recording once there is one, and moves its sequences on as if it had run.
    fn enqueue(&mut self, place: usize) -> Result<Work> {
        let num_rows = self.inputs.logits.len();
        // Drafts that nobody verifies may still be on their way.
        self.collect_drafts()?;
        if let Some(proposer) = &mut self.proposer {
            proposer.pass_over(&PassedOver { rows: &self.inputs.rows, slots: &self.slots });
        }
        self.kept_rows.clear();
        for row in self.inputs.rows.iter().filter(|row| !row.is_inert()) {
            self.slots.cut_drafts(row.slot, 0);
            self.kept_rows.push((row.tokens.end as u32 - 1, row.slot.0));
        }
        let Runner { model, kv, workspace, comm, batch, inputs, slots, sampler, graphs, .. } = self;
        let (replay, is_masked) = (inputs.replay, inputs.is_masked);
        let mut unpicked = None;
        if let Some(size) = replay {
            sampler.prepare(&inputs.logits, size, slots)?;
            graphs.run(size, if is_masked { Part::Forward } else { Part::Whole }, || {
                batch.feed_tokens(sampler.picked())?;
                let mut cx = Forward { batch, kv, workspace, comm: &**comm, target_hidden: None, taps: &mut [] };
                let hidden = model.forward(&mut cx)?;
                let logits = model.logits(&hidden, &mut cx)?;
                if is_masked {
                    unpicked = Some(logits);
                    return Ok(());
                }
                sampler.pick(&logits, workspace)
            })?;
        } else {
            batch.feed_tokens(sampler.picked())?;
            let mut cx = Forward { batch, kv, workspace, comm: &**comm, target_hidden: None, taps: &mut [] };
            let hidden = model.forward(&mut cx)?;
            if num_rows > 0 {
                sampler.prepare(&inputs.logits, num_rows, slots)?;
                let (_, width) = hidden.rows_cols();
                let mut wanted = workspace.take([num_rows, width], hidden.dtype())?;
                gather_rows(&hidden, &batch.logit_rows(), &mut wanted)?;
                let mut cx = Forward { batch, kv, workspace, comm: &**comm, target_hidden: None, taps: &mut [] };
                let logits = model.logits(&wanted, &mut cx)?;
                match is_masked {
                    true => unpicked = Some(logits),
                    false => sampler.pick(&logits, workspace)?,
                }
            }
            slots.keep_hidden(&hidden, &self.kept_rows)?;
        }
        if !is_masked {
            sampler.ask(place, num_rows)?;
        }
        for row in inputs.rows.iter().filter(|row| !row.is_inert()) {
            let state = slots.state_mut(row.slot);
            state.num_computed += row.num_known();
            if row.wants_token {
                (state.num_sampling, state.sampled_by) = (state.num_sampling + 1, row.logits.start);
            }
        }
        Ok(if is_masked { Work::Unpicked { replay, logits: unpicked } } else { Work::Plain })
    }

    /// Logits of the rows that want them, as many at a time as the workspace is planned for; then tokens and
    /// log-probabilities, which the sampler keeps. `logits` are those of all rows, if they are there already.
    pub(crate) fn sample(&mut self, hidden: &Tensor, logits: Option<Tensor>) -> Result<()> {
        let rows = &self.inputs.logits;
        self.sampler.begin();
        self.sampler.fill_masks(&self.inputs.rows, &self.inputs.logits, &mut self.slots);
        if let Some(mut logits) = logits {
            // The step may have been padded.
            let logits = &mut logits.rows_mut(0..rows.len());
            return self.sampler.sample(rows, logits, &self.slots, &self.workspace);
        }
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
}
