//! Drafts by a model of the target's hidden states: an MTP module, several tokens deep by reusing it.
//!
//! The drafter's entry at KV slot p comes from token p and the target's hidden state at p - 1; slot 0 has none. After every step one
//! ragged pass writes the entries of all tokens that have been verified, whatever was drafted there, from the target's hidden states;
//! so the first draft comes of it too. Further drafts are made from the drafter's own output, onto slots that the next pass overwrites.
//! An entry depends on nothing behind its own block, so blocks that are found again hold it, with the hidden state of their last token
//! for the entry that follows.
//!
//! On a GPU a draft goes into the next pass without the host having seen it; all of them come back together, while the engine plans the
//! step that verifies them.

use std::time::Instant;

use drafthorse_control::{SamplingParams, Slot};
use drafthorse_kernels::device::Readback;
use drafthorse_kernels::ops::copy_rows::{copy_rows, copy_rows_from};
use drafthorse_kernels::ops::feed_tokens::sampled_by;
use drafthorse_kernels::ops::map_tokens::map_tokens;
use drafthorse_kernels::ops::sample;
use drafthorse_kernels::{DType, Device, Tensor};
use drafthorse_model::{Batch, BatchInputs, BatchLimits, Forward, Model, StepSize};

use super::policy::{Holds, MAX_DRAFTS, Policy};
use super::proposer::{Propose, ProposeRow, Proposer};
use crate::error::Result;
use crate::row_params::RowParams;
use crate::slots::Slots;

/// A drafter's model, loaded.
pub(crate) struct Drafter {
    pub model: Box<dyn Model>,
    /// Draft token to token, if they differ.
    pub tokens: Option<Vec<u32>>,
    /// Size of the vocabulary it drafts from.
    pub num_tokens: usize,
    pub weight_bytes: u64,
}

/// What bounds a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MtpSizes {
    pub max_drafts: usize,
    /// Fewer drafts, or none, where they do not pay.
    pub adaptive: bool,
    /// Tokens of a step of the target.
    pub max_tokens: usize,
    pub max_seqs: usize,
    /// Blocks of one sequence, and of the cache.
    pub max_blocks_per_seq: usize,
    pub num_blocks: usize,
    /// Rows whose logits are held at once.
    pub chunk_rows: usize,
    pub max_kv_len: usize,
    pub hidden: usize,
    pub dtype: DType,
}

pub(crate) struct Mtp {
    drafter: Drafter,
    sizes: MtpSizes,
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
    holds: Vec<Holds>,
    /// Most drafts of each sequence of this step; `None`: they do not pay, and nothing is written for them.
    most: Option<usize>,
    pass: Pass,
    chains: Vec<Chain>,
}

/// Drafts that stay on the device until all are made.
struct OnDevice {
    /// Draft token to token, `[draft tokens]`, if they differ.
    tokens: Option<Tensor>,
    /// `[max drafts * max seqs]`: the first of each chain, then the second of those that have one, and so on.
    drafts: Tensor,
    on_host: Readback<i32>,
    max_seqs: usize,
    /// Drafts that are on their way, by slot, as places in `drafts`.
    coming: Vec<(Slot, Places)>,
}

/// Of a chain's drafts; as many as it has mean something.
type Places = [u32; MAX_DRAFTS];

/// One pass of the drafter, on the host.
#[derive(Default)]
struct Pass {
    slots: Vec<Slot>,
    token_ids: Vec<i32>,
    positions: Vec<i32>,
    cu_tokens: Vec<i32>,
    kv_lens: Vec<i32>,
    /// Rows of the step's hidden states, or of the blocks', and the pass's rows that read them.
    from_step: Vec<(u32, u32)>,
    from_blocks: Vec<(u32, u32)>,
    /// Rows of the step's hidden states that blocks keep.
    kept: Vec<(u32, u32)>,
}

/// A sequence that gets drafts.
struct Chain {
    slot: Slot,
    /// Its row of the pass that was run last.
    row: u32,
    /// Where the token of that row stands.
    position: usize,
    num_drafts: usize,
    most: usize,
    /// Its newest draft, or on a device what stands for it.
    draft: i32,
    places: Places,
}

impl MtpSizes {
    /// Each sequence of a step may bring one entry more, after the block it begins with.
    fn max_pass_tokens(&self) -> usize {
        self.max_tokens + self.max_seqs
    }

    fn step(&self) -> StepSize {
        let logit_rows = self.chunk_rows.min(self.max_seqs);
        StepSize { tokens: self.max_pass_tokens(), seqs: self.max_seqs, logit_rows, max_kv_len: self.max_kv_len }
    }

    /// Most bytes of workspace that proposing takes, the target's hidden states included.
    pub fn workspace_bytes(&self, device: &Device, drafter: &Drafter) -> usize {
        let rows = |rows: usize| (rows * self.hidden * self.dtype.bytes()).next_multiple_of(64);
        let step = self.step();
        let pick = match device {
            Device::Cpu => sample::workspace_bytes(drafter.num_tokens),
            Device::Cuda(_) => sample::gpu_workspace_bytes(step.logit_rows),
        };
        let run = drafter.model.workspace_bytes(step);
        rows(self.max_tokens) + rows(self.max_seqs) + rows(self.max_pass_tokens()) + run + pick
    }
}

impl Mtp {
    pub fn new(device: &Device, drafter: Drafter, sizes: MtpSizes) -> Result<Self> {
        let limits = BatchLimits {
            max_tokens: sizes.max_pass_tokens(),
            max_seqs: sizes.max_seqs,
            max_blocks_per_seq: sizes.max_blocks_per_seq,
            max_logit_rows: 0,
        };
        let chunk_rows = sizes.step().logit_rows;
        let mut greedy = RowParams::new(device, chunk_rows)?;
        for _ in 0..chunk_rows {
            greedy.push(&SamplingParams::default(), 0);
        }
        greedy.send()?;
        let token_share = if *device == Device::Cpu { 0.4 } else { 0.02 };
        let policy = Policy::new(sizes.max_drafts, sizes.adaptive, token_share);
        Ok(Mtp {
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
            chains: Vec::with_capacity(sizes.max_seqs),
            on_device: if *device == Device::Cpu { None } else { Some(OnDevice::new(device, &drafter, sizes)?) },
            drafter,
            sizes,
        })
    }

    /// Takes in how the last drafts did, and decides on the next.
    fn learn(&mut self, step: &Propose<'_>) {
        if let Some((took, num_tokens)) = step.decode {
            self.policy.learn_step(num_tokens, took);
        }
        let running = || step.rows.iter().filter(|row| !row.ended);
        let mut mean = Holds::default();
        for row in running() {
            let holds = &mut self.holds[row.slot.0 as usize];
            let state = step.slots.state(row.slot);
            if state.num_computed - row.hidden.len() == state.num_cached {
                *holds = self.policy.holds();
            }
            self.policy.learn_held(holds, row.num_drafts, row.num_held);
            mean.iter_mut().zip(holds).for_each(|(mean, holds)| *mean += *holds);
        }
        let num_seqs = running().count();
        mean.iter_mut().for_each(|mean| *mean /= num_seqs.max(1) as f32);
        self.most = if num_seqs == 0 { Some(0) } else { self.policy.drafts(num_seqs, &mean) };
    }

    /// The pass over all that was verified, and the sequences that get drafts of it.
    fn plan(&mut self, step: &Propose<'_>) {
        self.pass.clear();
        self.chains.clear();
        for row in step.rows {
            self.plan_row(row, step);
        }
    }

    fn plan_row(&mut self, row: &ProposeRow, step: &Propose<'_>) {
        let (state, blocks, block_size) =
            (step.slots.state(row.slot), step.slots.blocks(row.slot), step.slots.block_size());
        let (computed, slot) = (state.num_computed, row.slot.0 as usize);
        let first = computed - row.hidden.len();
        if first == state.num_cached {
            self.written[slot] = self.entries_of_prefix(&blocks[..first / block_size], first, block_size);
        }
        if self.most.is_none() {
            self.written[slot] = 0;
        }
        let start = self.written[slot];
        let holds = start >= first.max(1);
        for position in (first..computed).filter(|position| (position + 1) % block_size == 0) {
            let block = blocks[position / block_size];
            self.whole[block as usize] = holds;
            self.pass.kept.push(((row.hidden.start + position - first) as u32, block as u32));
        }
        // The last of them waits if its block is not there yet; it is that block's first.
        let kv_room = blocks.len() * block_size;
        let end = (computed + 1).min(kv_room);
        if !holds || start >= end {
            return;
        }

        let pass = &mut self.pass;
        for position in start..end {
            let to = pass.token_ids.len() as u32;
            if position > first {
                pass.from_step.push(((row.hidden.start + position - 1 - first) as u32, to));
            } else {
                pass.from_blocks.push((blocks[(position - 1) / block_size] as u32, to));
            }
            pass.token_ids.push(state.tokens[position] as i32);
            pass.positions.push(position as i32);
        }
        pass.end_sequence(row.slot, end);
        self.written[slot] = end;
        let most = row.room.min(self.most.unwrap_or(0)).min(kv_room + 1 - end);
        if row.wants_drafts && end == computed + 1 && most > 0 {
            let row_of_pass = pass.token_ids.len() as u32 - 1;
            let (slot, position) = (row.slot, end - 1);
            let places = Places::default();
            self.chains.push(Chain { slot, row: row_of_pass, position, num_drafts: 0, most, draft: -1, places });
        }
    }

    /// How far the entries reach of a sequence that begins with `blocks`, computed before, up to position `first`.
    fn entries_of_prefix(&self, blocks: &[i32], first: usize, block_size: usize) -> usize {
        if !blocks.iter().all(|&block| self.whole[block as usize]) {
            return 0;
        }
        // A block that is copied half full holds the entry of the next token too: it is the same in both.
        let copied = first > 0 && !first.is_multiple_of(block_size);
        first.max(1) + usize::from(copied)
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

    /// Hands the newest drafts over, and plans a pass over those that another one follows.
    fn extend(&mut self, step: &mut Propose<'_>, hidden: &mut Tensor) -> Result<()> {
        let mut moves = Vec::new();
        let mut row = 0;
        self.pass.clear();
        let on_device = &mut self.on_device;
        self.chains.retain_mut(|chain| {
            row += 1;
            // No number came of it: there is nothing to go on with.
            if chain.draft < 0 && on_device.is_none() {
                return false;
            }
            step.slots.draft(chain.slot, |_, drafts| {
                drafts[chain.num_drafts] = chain.draft.max(0);
                chain.num_drafts + 1
            });
            chain.num_drafts += 1;
            if chain.num_drafts == chain.most {
                if let Some(on_device) = on_device {
                    on_device.coming.push((chain.slot, chain.places));
                }
                return false;
            }
            chain.position += 1;
            let to = self.pass.token_ids.len() as u32;
            if row - 1 != to {
                moves.push((row - 1, to));
            }
            chain.row = to;
            self.pass.token_ids.push(chain.draft);
            self.pass.positions.push(chain.position as i32);
            self.pass.end_sequence(chain.slot, chain.position + 1);
            true
        });
        Ok(copy_rows(hidden, &moves)?)
    }
}

impl OnDevice {
    fn new(device: &Device, drafter: &Drafter, sizes: MtpSizes) -> Result<Self> {
        let tokens = drafter.tokens.as_ref().map(|tokens| {
            let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
            Tensor::from_slice(device, "draft tokens", &tokens, [tokens.len()])
        });
        let most = sizes.max_drafts * sizes.max_seqs;
        Ok(OnDevice {
            tokens: tokens.transpose()?,
            drafts: Tensor::zeros(device, "drafts", [most], DType::I32)?,
            on_host: Readback::new(device, most)?,
            max_seqs: sizes.max_seqs,
            coming: Vec::with_capacity(sizes.max_seqs),
        })
    }

    /// Keeps the drafts that were picked as `ids` for some chains, of which `first` come before.
    fn keep(&mut self, first: usize, ids: &Tensor, chains: &mut [Chain]) -> Result<()> {
        let Some(chain) = chains.first() else { return Ok(()) };
        let first = chain.num_drafts * self.max_seqs + first;
        map_tokens(ids, self.tokens.as_ref(), &mut self.drafts.rows_mut(first..first + chains.len()))?;
        for (place, chain) in (first..).zip(chains) {
            chain.places[chain.num_drafts] = place as u32;
            chain.draft = sampled_by(place);
        }
        Ok(())
    }
}

impl Pass {
    fn clear(&mut self) {
        self.slots.clear();
        self.token_ids.clear();
        self.positions.clear();
        self.cu_tokens.clear();
        self.cu_tokens.push(0);
        self.kv_lens.clear();
        self.from_step.clear();
        self.from_blocks.clear();
        self.kept.clear();
    }

    /// All tokens since the sequence before are this one's.
    fn end_sequence(&mut self, slot: Slot, kv_len: usize) {
        self.slots.push(slot);
        self.cu_tokens.push(self.token_ids.len() as i32);
        self.kv_lens.push(kv_len as i32);
    }
}

impl Proposer for Mtp {
    fn max_drafts(&self) -> usize {
        self.sizes.max_drafts
    }

    fn needs_host_tokens(&self) -> bool {
        true
    }

    fn propose(&mut self, step: &mut Propose<'_>) -> Result<()> {
        let started = Instant::now();
        self.learn(step);
        self.plan(step);
        let num_chains = self.chains.len();
        let num_tokens = self.pass.token_ids.len();
        let (workspace, (_, width), dtype) = (step.forward.workspace, step.hidden.rows_cols(), step.hidden.dtype());
        let mut hidden = workspace.take([self.chains.len(), width], dtype)?;
        if num_tokens > 0 {
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
                let mut input = workspace.take([num_chains, width], dtype)?;
                copy_rows_from(&hidden, &mut input, &(0..num_chains as u32).map(|row| (row, row)).collect::<Vec<_>>())?;
                self.run(step, &input, &mut hidden)?;
            }
        }
        if let (Some(most), true, true) = (self.most, step.decode.is_some(), num_chains == step.rows.len()) {
            self.policy.learn_proposal(num_chains, most, started.elapsed());
        }
        if let Some(OnDevice { drafts, on_host, coming, .. }) = &mut self.on_device
            && !coming.is_empty()
        {
            on_host.begin(drafts)?;
        }
        Ok(())
    }

    fn collect(&mut self, slots: &mut Slots) -> Result<()> {
        let Some(OnDevice { on_host, coming, .. }) = &mut self.on_device else { return Ok(()) };
        if coming.is_empty() {
            return Ok(());
        }
        let drafts = on_host.wait()?;
        for (slot, places) in coming.drain(..) {
            slots.replace_drafts(slot, places.iter().map(|&place| drafts[place as usize]));
        }
        Ok(())
    }

    fn warmed_up(&mut self) {
        self.policy.forget();
    }
}

/// What the drafter's model is handed.
fn with<'a>(step: &'a mut Propose<'_>, batch: &'a Batch, target_hidden: &'a Tensor) -> Forward<'a> {
    Forward {
        batch,
        kv: step.forward.kv,
        workspace: step.forward.workspace,
        comm: step.forward.comm,
        target_hidden: Some(target_hidden),
        taps: &mut [],
    }
}
