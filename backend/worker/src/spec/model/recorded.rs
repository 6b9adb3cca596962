//! Drafts of sequences that are all alike, on a GPU: their passes are recorded as one and replayed.
//!
//! After a step of one token and d drafts for each of its sequences, the first pass takes all d + 1 hidden states of each as they lie there,
//! those of drafts that did not hold too: what they write is behind the sequence's end, sees nothing that counts, and is overwritten by the
//! passes that follow. So the pass has the same shape whatever held, and only the row to go on from differs.

use drafthorse_kernels::ops::feed_tokens::sampled_by;
use drafthorse_kernels::ops::gather_rows::gather_rows;
use drafthorse_kernels::ops::sample;
use drafthorse_model::{BatchInputs, LaterSteps};

use super::ModelProposer;
use super::on_device::OnDevice;
use crate::error::Result;
use crate::graphs::Part;
use crate::spec::proposer::Propose;

/// A step whose sequences are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alike {
    num_seqs: usize,
    /// Tokens of each in the step.
    each: usize,
    /// Drafts that each gets.
    drafts: usize,
}

impl ModelProposer {
    /// What makes the drafts of this step a matter for a recording; [`plan`](Self::plan) has been.
    pub(super) fn alike(&self, step: &Propose<'_>) -> Option<Alike> {
        let (first, chain) = (step.rows.first()?, self.chains.first()?);
        let alike = Alike { num_seqs: step.rows.len(), each: first.num_drafts + 1, drafts: chain.most };
        let num_tokens = alike.num_seqs * alike.each;
        let lies_there = step.rows.iter().enumerate().all(|(index, row)| {
            let entries = self.pass.cu_tokens.get(index + 1).map(|end| end - self.pass.cu_tokens[index]);
            row.num_drafts + 1 == alike.each
                // Not a prompt's.
                && row.hidden.len() <= alike.each
                && row.hidden.start == index * alike.each
                && entries == Some(row.hidden.len() as i32)
                && step.slots.state(row.slot).num_computed - row.hidden.len() + alike.each
                    < step.slots.blocks(row.slot).len() * step.slots.block_size()
        });
        let goes_on = self.chains.len() == alike.num_seqs && self.chains.iter().all(|chain| chain.most == alike.drafts);
        let has_rows = step.hidden.rows_cols().0 >= num_tokens && self.pass.from_blocks.is_empty();
        (lies_there && goes_on && has_rows && self.on_device.is_some() && step.graphs.takes_drafted(num_tokens))
            .then_some(alike)
    }

    /// Makes the drafts of all chains.
    pub(super) fn run_recorded(&mut self, alike: Alike, step: &mut Propose<'_>) -> Result<()> {
        self.set_batch(alike, step)?;
        let Alike { num_seqs, each, drafts } = alike;
        let ModelProposer { drafter, batch, greedy, ids, on_device, .. } = self;
        let Some(OnDevice { tokens, drafts: made, max_seqs, coming, .. }) = on_device else { return Ok(()) };
        let Propose { hidden: of_step, forward, graphs, slots, .. } = step;
        let workspace = forward.workspace;
        let of_step = &of_step.rows(0..num_seqs * each);
        let part = Part::Drafts { each, drafts, from: of_step.device_address() };
        graphs.run(num_seqs, part, || {
            batch.turn_to(0);
            let mut cx = super::with_parts(forward, batch, of_step);
            let all = drafter.model.forward(&mut cx)?;
            let mut hidden = workspace.take([num_seqs, all.rows_cols().1], all.dtype())?;
            gather_rows(&all, &batch.logit_rows(), &mut hidden)?;
            for draft in 0..drafts {
                if draft > 0 {
                    batch.turn_to(draft);
                    batch.feed_tokens(made)?;
                    hidden = drafter.model.forward(&mut super::with_parts(forward, batch, &hidden))?;
                }
                let logits = drafter.model.logits(&hidden, &mut super::with_parts(forward, batch, of_step))?;
                let ids = &mut ids.rows_mut(0..num_seqs);
                greedy.with(num_seqs, |params| sample::sample(&logits, params, ids, workspace))?;
                let first = draft * *max_seqs;
                OnDevice::keep_ids(ids, tokens.as_ref(), &mut made.rows_mut(first..first + num_seqs))?;
            }
            Ok(())
        })?;
        for (index, chain) in self.chains.drain(..).enumerate() {
            let mut places = chain.places;
            for (draft, place) in places[..drafts].iter_mut().enumerate() {
                *place = (draft * *max_seqs + index) as u32;
            }
            slots.draft(chain.slot, |_, waiting| {
                waiting.iter_mut().zip(places).take(drafts).for_each(|(id, place)| *id = sampled_by(place as usize));
                drafts
            });
            coming.push((chain.slot, places));
        }
        Ok(())
    }

    /// The first pass, and those that make a draft of a draft.
    fn set_batch(&mut self, alike: Alike, step: &Propose<'_>) -> Result<()> {
        let Alike { num_seqs, each, drafts } = alike;
        let max_seqs = self.sizes.max_seqs;
        let inputs = &mut self.recorded;
        inputs.clear();
        for (index, row) in step.rows.iter().enumerate() {
            let state = step.slots.state(row.slot);
            let (computed, held) = (state.num_computed, row.hidden.len());
            let start = computed - held + 1;
            inputs.token_ids.extend(state.tokens[start..=computed].iter().map(|&token| token as i32));
            inputs.token_ids.resize((index + 1) * each, 0);
            inputs.positions.extend((start as i32..).take(each));
            inputs.cu_tokens.push(((index + 1) * each) as i32);
            inputs.kv_lens.push((start + each) as i32);
            inputs.rows.push((index * each + held - 1) as i32);
            inputs.next.push(computed as i32 + 1);
        }
        for draft in 1..drafts {
            inputs.later.extend((0..num_seqs).map(|index| sampled_by((draft - 1) * max_seqs + index)));
        }
        let block_tables: Vec<&[i32]> = step.rows.iter().map(|row| step.slots.blocks(row.slot)).collect();
        let first = BatchInputs {
            token_ids: &inputs.token_ids,
            positions: &inputs.positions,
            cu_tokens: &inputs.cu_tokens,
            kv_lens: &inputs.kv_lens,
            block_tables: &block_tables,
            logit_rows: &inputs.rows,
        };
        Ok(self.batch.set_with_later(&first, LaterSteps { token_ids: &inputs.later, positions: &inputs.next })?)
    }
}

/// Inputs of such passes, kept for their memory.
#[derive(Default)]
pub(super) struct Inputs {
    token_ids: Vec<i32>,
    positions: Vec<i32>,
    cu_tokens: Vec<i32>,
    kv_lens: Vec<i32>,
    /// Row of the first pass that each sequence goes on from.
    rows: Vec<i32>,
    /// Where each sequence's first draft stands.
    next: Vec<i32>,
    /// Tokens of the passes after the first.
    later: Vec<i32>,
}

impl Inputs {
    fn clear(&mut self) {
        for list in [
            &mut self.token_ids,
            &mut self.positions,
            &mut self.cu_tokens,
            &mut self.kv_lens,
            &mut self.rows,
            &mut self.next,
            &mut self.later,
        ] {
            list.clear();
        }
        self.cu_tokens.push(0);
    }
}
