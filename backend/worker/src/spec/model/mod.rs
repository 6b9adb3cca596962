//! Drafts by a model of the target's hidden states: an MTP module or an EAGLE head, several tokens deep by reusing it.
//!
//! The drafter's entry at KV slot p comes from token p and the target's hidden state at p - 1; slot 0 has none. After every step one
//! ragged pass writes the entries of all tokens that have been verified, whatever was drafted there, from the target's hidden states;
//! so the first draft comes of it too. Further drafts are made from the drafter's own output, onto slots that the next pass overwrites.
//! An entry depends on nothing behind its own block, so blocks that are found again hold it, with the hidden state of their last token
//! for the entry that follows. Of a drafter that reads hidden states of several layers, all of them are meant; its own output is but one.
//!
//! On a GPU a draft goes into the next pass without the host having seen it; all of them come back together, while the engine plans the
//! step that verifies them.

mod on_device;
mod plan;
mod recorded;
mod sizes;

use std::time::{Duration, Instant};

use drafthorse_control::{SamplingParams, Slot};
use drafthorse_kernels::device::Readback;
use drafthorse_kernels::ops::copy_rows::copy_rows_from;
use drafthorse_kernels::ops::sample;
use drafthorse_kernels::{DType, Device, Tensor};
use drafthorse_model::{Batch, BatchInputs, BatchLimits, Forward, Model};

use self::on_device::OnDevice;
use self::plan::{Chain, Pass};
use self::recorded::Alike;
pub(crate) use self::sizes::DraftSizes;
use super::policy::{Held, Holds, Policy};
use super::proposer::{PassedOver, Propose, ProposeRow, Proposer, Unseen};
use crate::error::Result;
use crate::inputs::PlannedRow;
use crate::row_params::RowParams;
use crate::slots::Slots;

/// A drafter's model, loaded.
pub(crate) struct Drafter {
    pub model: Box<dyn Model>,
    /// Draft token to token, if they differ.
    pub tokens: Option<Vec<u32>>,
    /// Size of the vocabulary it drafts from.
    pub num_tokens: usize,
    /// Layers of the target whose inputs it reads side by side; none: it reads the target's last hidden state.
    pub taps: Vec<usize>,
    pub weight_bytes: u64,
}

pub(crate) struct ModelProposer {
    drafter: Drafter,
    sizes: DraftSizes,
    batch: Batch,
    greedy: RowParams,
    ids: Tensor,
    ids_on_host: Readback<i32>,
    /// Where the host is not told of each draft before the next.
    on_device: Option<OnDevice>,
    /// By slot: entries up to here hold. Behind the sequence's own KV, it has none that can be used.
    written: Vec<usize>,
    /// By block: all its entries hold, and the hidden state of its last token is kept.
    whole: Vec<bool>,
    policy: Policy,
    /// By slot: how its drafts have done.
    holds: Vec<Held>,
    /// Most drafts of each sequence of this step; `None`: they do not pay, and nothing is written for them.
    most: Option<usize>,
    pass: Pass,
    chains: Vec<Chain>,
    recorded: recorded::Inputs,
    /// The drafts of this step have been given to the device before its tokens were seen.
    ahead: Option<Alike>,
}

impl ModelProposer {
    pub fn new(device: &Device, drafter: Drafter, sizes: DraftSizes) -> Result<Self> {
        let limits = BatchLimits {
            max_tokens: sizes.max_pass_tokens(),
            max_seqs: sizes.max_seqs,
            max_blocks_per_seq: sizes.max_blocks_per_seq,
            max_logit_rows: sizes.max_seqs,
            max_later: sizes.max_drafts.saturating_sub(1),
        };
        let chunk_rows = sizes.step().logit_rows;
        let mut greedy = RowParams::new(device, chunk_rows)?;
        for _ in 0..chunk_rows {
            greedy.push(&SamplingParams::default(), 0);
        }
        greedy.send()?;
        let policy = match device {
            Device::Cpu => Policy::new(sizes.max_drafts, sizes.adaptive, 0.4, 0),
            // Each shape is run op by op, then recorded.
            Device::Cuda(_) => Policy::new(sizes.max_drafts, sizes.adaptive, 0.02, 2),
        };
        Ok(ModelProposer {
            holds: vec![policy.holds(); sizes.max_seqs],
            policy,
            most: Some(sizes.max_drafts),
            batch: Batch::new(device, limits)?,
            greedy,
            ids: Tensor::zeros(device, "drafts picked", [chunk_rows], DType::I32)?,
            ids_on_host: Readback::new(device, chunk_rows)?,
            written: vec![0; sizes.max_seqs],
            whole: vec![false; sizes.num_blocks],
            pass: Pass::default(),
            recorded: recorded::Inputs::default(),
            ahead: None,
            chains: Vec::with_capacity(sizes.max_seqs),
            on_device: if *device == Device::Cpu { None } else { Some(OnDevice::new(device, &drafter, sizes)?) },
            drafter,
            sizes,
        })
    }

    /// Takes in how the last drafts did, and decides on the next.
    fn learn(&mut self, step: &Propose<'_>) {
        let drafts = |row: &&ProposeRow| !row.ended && step.slots.state(row.slot).max_drafts() > 0;
        let running = || step.rows.iter().filter(drafts);
        for row in running() {
            let holds = &mut self.holds[row.slot.0 as usize];
            let state = step.slots.state(row.slot);
            if state.num_computed - row.hidden.len() == state.num_cached {
                *holds = self.policy.holds();
            }
            self.policy.learn_held(holds, row.num_drafts, row.num_held);
        }
        self.decide(step.decode, running().map(|row| row.slot));
    }

    /// Decides on the drafts of those that run, after a step that took so long for so many tokens if it ran no prompts.
    fn decide(&mut self, decode: Option<(Duration, usize)>, running: impl Iterator<Item = Slot>) {
        if let Some((took, num_tokens)) = decode {
            self.policy.learn_step(num_tokens, took);
        }
        let mut mean = Holds::default();
        let mut num_seqs = 0;
        for slot in running {
            let holds = self.holds[slot.0 as usize].holds;
            mean.iter_mut().zip(holds).for_each(|(mean, holds)| *mean += holds);
            num_seqs += 1;
        }
        mean.iter_mut().for_each(|mean| *mean /= num_seqs.max(1) as f32);
        self.most = if num_seqs == 0 { Some(0) } else { self.policy.drafts(num_seqs, &mean) };
    }

    /// Runs the pass and puts the last row of every chain into `hidden`.
    fn run(&mut self, step: &mut Propose<'_>, input: &Tensor, hidden: &mut Tensor) -> Result<()> {
        let block_tables: Vec<&[i32]> = self.pass.slots.iter().map(|&slot| step.slots.blocks(slot)).collect();
        self.batch.set(&BatchInputs {
            token_ids: &self.pass.token_ids,
            positions: &self.pass.positions,
            cu_tokens: &self.pass.cu_tokens,
            kv_lens: &self.pass.kv_lens,
            block_tables: &block_tables,
            logit_rows: &[],
        })?;
        if let Some(on_device) = &self.on_device {
            self.batch.feed_tokens(&on_device.drafts)?;
        }
        let out = self.drafter.model.forward(&mut with(step, &self.batch, input))?;
        let last: Vec<(u32, u32)> = (0..).zip(&self.chains).map(|(to, chain)| (chain.row, to)).collect();
        Ok(copy_rows_from(&out, hidden, &last)?)
    }

    /// Picks the next draft of every chain.
    fn pick(&mut self, step: &mut Propose<'_>, hidden: &Tensor) -> Result<()> {
        let chunk_rows = self.sizes.step().logit_rows;
        for first in (0..self.chains.len()).step_by(chunk_rows) {
            let rows = first..self.chains.len().min(first + chunk_rows);
            let num_rows = rows.len();
            let wanted = hidden.rows(rows.clone());
            let logits = self.drafter.model.logits(&wanted, &mut with(step, &self.batch, hidden))?;
            let (ids, workspace) = (&mut self.ids.rows_mut(0..num_rows), step.forward.workspace);
            self.greedy.with(num_rows, |params| sample::sample(&logits, params, ids, workspace))?;
            if let Some(on_device) = &mut self.on_device {
                on_device.keep(first, ids, &mut self.chains[rows])?;
                continue;
            }
            let ids = self.ids_on_host.read(ids)?;
            for (chain, &id) in self.chains[rows].iter_mut().zip(ids) {
                chain.draft = match (&self.drafter.tokens, usize::try_from(id)) {
                    (Some(tokens), Ok(id)) => tokens[id] as i32,
                    _ => id,
                };
            }
        }
        Ok(())
    }
}

impl Proposer for ModelProposer {
    fn max_drafts(&self) -> usize {
        self.sizes.max_drafts
    }

    fn needs_host_tokens(&self) -> bool {
        true
    }

    fn has_use(&self, slot: Slot, begins: bool) -> bool {
        // What has lost its entries, or never had any, gets none.
        self.most.is_some() && (begins || self.written[slot.0 as usize] > 0)
    }

    fn pass_over(&mut self, step: &PassedOver<'_>) {
        for row in step.rows.iter().filter(|row| !row.is_inert()) {
            let state = step.slots.state(row.slot);
            if state.num_computed == state.num_cached {
                self.holds[row.slot.0 as usize] = self.policy.holds();
            }
            self.leave_out(row, step.slots);
        }
    }

    fn passed(&mut self, step: &PassedOver<'_>, decode: Option<(Duration, usize)>) {
        let drafts = |row: &&PlannedRow| {
            let state = step.slots.try_state(row.slot).filter(|state| state.serial == row.serial && !state.ended);
            !row.is_inert() && state.is_some_and(|state| state.max_drafts() > 0)
        };
        self.decide(decode, step.rows.iter().filter(drafts).map(|row| row.slot));
    }

    fn propose_unseen(&mut self, step: &mut Unseen<'_>) -> Result<()> {
        self.follow_unseen(step)
    }

    fn propose(&mut self, step: &mut Propose<'_>) -> Result<()> {
        let started = Instant::now();
        let ahead = self.ahead.take();
        // What was made ahead followed from what had been learnt before.
        if ahead.is_none() {
            self.learn(step);
        }
        let planned = self.most;
        self.plan(step);
        if ahead.is_some() {
            self.learn(step);
        }
        let num_chains = self.chains.len();
        let num_tokens = self.pass.token_ids.len();
        let (workspace, (_, width), dtype) = (step.forward.workspace, step.hidden.rows_cols(), step.hidden.dtype());
        let recorded = match ahead {
            Some(alike) => Some(alike),
            None => self.follow_seen(step)?,
        };
        if let Some(alike) = recorded {
            self.hand_over(alike, step);
        }
        let mut hidden = workspace.take([self.chains.len(), self.sizes.hidden], dtype)?;
        if num_tokens > 0 && recorded.is_none() {
            let mut input = workspace.take([num_tokens, width], dtype)?;
            copy_rows_from(step.hidden, &mut input, &self.pass.from_step)?;
            copy_rows_from(step.forward.kv.last_hidden(), &mut input, &self.pass.from_blocks)?;
            self.run(step, &input, &mut hidden)?;
        }
        copy_rows_from(step.hidden, step.forward.kv.last_hidden(), &self.pass.kept)?;
        while !self.chains.is_empty() {
            self.pick(step, &hidden)?;
            self.extend(step, &mut hidden)?;
            let num_chains = self.chains.len();
            if num_chains > 0 {
                let mut input = workspace.take([num_chains, self.sizes.hidden], dtype)?;
                copy_rows_from(&hidden, &mut input, &(0..num_chains as u32).map(|row| (row, row)).collect::<Vec<_>>())?;
                self.run(step, &input, &mut hidden)?;
            }
        }
        if let (Some(most), true, true) = (planned, step.decode.is_some(), num_chains == step.rows.len()) {
            self.policy.learn_proposal(num_chains, most, started.elapsed());
        }
        match &mut self.on_device {
            Some(on_device) if ahead.is_none() && !on_device.coming.is_empty() => on_device.ask(),
            _ => Ok(()),
        }
    }

    fn on_device(&self) -> Option<&Tensor> {
        self.on_device.as_ref().map(|on_device| &on_device.drafts)
    }

    fn is_waited_for(&self) -> Result<bool> {
        self.on_device.as_ref().map_or(Ok(false), OnDevice::is_waited_for)
    }

    fn collect(&mut self, slots: &mut Slots) -> Result<()> {
        self.on_device.as_mut().map_or(Ok(()), |on_device| on_device.take(slots))
    }

    fn warmed_up(&mut self) {
        self.policy.forget();
    }
}

/// What the drafter's model is handed.
fn with<'a>(step: &'a mut Propose<'_>, batch: &'a Batch, target_hidden: &'a Tensor) -> Forward<'a> {
    with_parts(&mut step.forward, batch, target_hidden)
}

fn with_parts<'a>(of_step: &'a mut Forward<'_>, batch: &'a Batch, target_hidden: &'a Tensor) -> Forward<'a> {
    Forward {
        batch,
        kv: of_step.kv,
        workspace: of_step.workspace,
        comm: of_step.comm,
        target_hidden: Some(target_hidden),
        taps: &mut [],
    }
}
