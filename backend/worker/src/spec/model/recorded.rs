//! Drafts of sequences that are all alike, on a GPU: their passes are recorded as one and replayed.
//!
//! After a step of one token and d drafts for each of its sequences, the first pass takes all d + 1 hidden states of each as they lie there,
//! those of drafts that did not hold too: what they write is behind the sequence's end, sees nothing that counts, and is overwritten by the
//! passes that follow. So the pass has the same shape whatever held, and only the row to go on from differs, and where later passes stand.
//! The device finds that itself, so the passes are given to it right behind the step, before the host has seen what held.

use drafthorse_control::Slot;
use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::feed_tokens::sampled_by;
use drafthorse_kernels::ops::gather_rows::gather_rows;
use drafthorse_kernels::ops::map_tokens::map_tokens;
use drafthorse_kernels::ops::sample;
use drafthorse_model::{BatchInputs, Forward, LaterSteps};

use super::ModelProposer;
use super::on_device::OnDevice;
use crate::error::Result;
use crate::graphs::{Graphs, Part};
use crate::slots::Slots;
use crate::spec::Forced;
use crate::spec::proposer::{Propose, Unseen};

/// What the sequences of a step have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alike {
    num_seqs: usize,
    /// Tokens of each in the step.
    each: usize,
    /// Drafts that each gets.
    drafts: usize,
}

/// One of them.
struct Followed {
    slot: Slot,
    /// Where its first token in the step stands.
    first: usize,
    /// Drafts of the step that hold, if that is known.
    held: Option<usize>,
}

impl ModelProposer {
    /// Gives the drafts that follow a step to the device before the step's tokens are seen, if all its sequences are alike and will want
    /// them however many of their drafts hold.
    pub(super) fn follow_unseen(&mut self, step: &mut Unseen<'_>) -> Result<()> {
        let (Some(first), Some(drafts)) = (step.rows.first(), self.most) else { return Ok(()) };
        let alike = Alike { num_seqs: step.rows.len(), each: first.num_drafts + 1, drafts };
        let all_go_on = step.rows.iter().all(|row| {
            let state = step.slots.state(row.slot);
            let is_written = self.written[row.slot.0 as usize] == state.num_computed + 1;
            let wants_all = state.max_drafts() >= drafts && row.wants_token;
            // The last token that may come is not drafted.
            let has_room = state.room(step.max_model_len) > alike.each + drafts;
            is_written && wants_all && has_room && row.tokens.len() == alike.each
        });
        let followed = step.rows.iter().map(|row| {
            let state = step.slots.state(row.slot);
            let holds = |forced: Forced| {
                let is_held = |draft: &usize| forced.holds(state.sampling.seed, state.tokens.len() + draft);
                (0..row.num_drafts).take_while(is_held).count()
            };
            Followed { slot: row.slot, first: state.num_computed, held: step.forced.map(holds) }
        });
        let followed: Vec<Followed> = followed.collect();
        if all_go_on && self.can_follow(alike, &followed, step.hidden, step.slots, step.graphs) {
            let Unseen { hidden, picked, forward, graphs, slots, .. } = step;
            self.follow(alike, &followed, hidden, picked, forward, graphs, slots)?;
            if let Some(on_device) = &mut self.on_device {
                on_device.ask()?;
            }
            self.ahead = Some(alike);
        }
        Ok(())
    }

    /// Likewise, once the host knows what held; [`plan`](Self::plan) has been.
    pub(super) fn follow_seen(&mut self, step: &mut Propose<'_>) -> Result<Option<Alike>> {
        let (Some(first), Some(chain), Some(picked)) = (step.rows.first(), self.chains.first(), step.picked) else {
            return Ok(None);
        };
        let alike = Alike { num_seqs: step.rows.len(), each: first.num_drafts + 1, drafts: chain.most };
        let lies_there = step.rows.iter().enumerate().all(|(index, row)| {
            row.num_drafts + 1 == alike.each
                && row.hidden.start == index * alike.each
                // Not a prompt's.
                && row.hidden.len() <= alike.each
        });
        let goes_on = self.chains.len() == alike.num_seqs && self.chains.iter().all(|chain| chain.most == alike.drafts);
        let followed = step.rows.iter().map(|row| {
            let held = row.hidden.len() - 1;
            Followed {
                slot: row.slot,
                first: step.slots.state(row.slot).num_computed - row.hidden.len(),
                held: Some(held),
            }
        });
        let followed: Vec<Followed> = followed.collect();
        // One entry for each token that was verified: those before it are written.
        let entries = |index: usize| self.pass.cu_tokens.get(index + 1).map(|end| end - self.pass.cu_tokens[index]);
        let whole = step.rows.iter().enumerate().all(|(index, row)| entries(index) == Some(row.hidden.len() as i32));
        if !(lies_there && goes_on && whole && self.pass.from_blocks.is_empty()) {
            return Ok(None);
        }
        let can = self.can_follow(alike, &followed, step.hidden, step.slots, step.graphs);
        if can {
            let Propose { hidden, forward, graphs, slots, .. } = step;
            self.follow(alike, &followed, hidden, picked, forward, graphs, slots)?;
        }
        Ok(can.then_some(alike))
    }

    /// Whether the passes can be recorded, and have room for what they write, were all drafts of the step to hold.
    fn can_follow(&self, alike: Alike, rows: &[Followed], hidden: &Tensor, slots: &Slots, graphs: &Graphs) -> bool {
        let num_tokens = alike.num_seqs * alike.each;
        let has_room =
            |row: &Followed| row.first + alike.each + alike.drafts <= slots.blocks(row.slot).len() * slots.block_size();
        alike.drafts > 0
            && self.on_device.is_some()
            && graphs.takes_drafted(num_tokens)
            && hidden.rows_cols().0 >= num_tokens
            && rows.iter().all(has_room)
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of two kinds of step")]
    fn follow(
        &mut self,
        alike: Alike,
        rows: &[Followed],
        hidden: &Tensor,
        picked: &Tensor,
        forward: &mut Forward<'_>,
        graphs: &mut Graphs,
        slots: &Slots,
    ) -> Result<()> {
        self.set_batch(alike, rows, slots)?;
        let Alike { num_seqs, each, drafts } = alike;
        let (of_step, fed) = (&hidden.rows(0..num_seqs * each), forward.batch.token_ids());
        let (fed, picked) = (&fed.rows(0..num_seqs * each), &picked.rows(0..num_seqs * each));
        let ModelProposer { drafter, batch, greedy, ids, on_device, .. } = self;
        let Some(OnDevice { tokens, drafts: made, max_seqs, .. }) = on_device else { return Ok(()) };
        let workspace = forward.workspace;
        let part = Part::Drafts { each, drafts, from: of_step.device_address() };
        graphs.run(num_seqs, part, || {
            batch.turn_to(0);
            batch.follow_drafts(fed, picked)?;
            let all = drafter.model.forward(&mut super::with_parts(forward, batch, of_step))?;
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
                map_tokens(ids, tokens.as_ref(), &mut made.rows_mut(first..first + num_seqs))?;
            }
            Ok(())
        })
    }

    /// Says of every sequence that gets drafts where the device has them.
    pub(super) fn hand_over(&mut self, alike: Alike, step: &mut Propose<'_>) {
        let Some(OnDevice { max_seqs, coming, .. }) = &mut self.on_device else { return };
        for chain in self.chains.drain(..) {
            let row = step.rows.iter().find(|row| row.slot == chain.slot).expect("chains are made of rows");
            let seq = row.hidden.start / alike.each;
            let mut places = chain.places;
            for (draft, place) in places[..alike.drafts].iter_mut().enumerate() {
                *place = (draft * *max_seqs + seq) as u32;
            }
            step.slots.draft(chain.slot, |_, waiting| {
                let drafts = waiting.iter_mut().zip(places).take(alike.drafts);
                drafts.for_each(|(id, place)| *id = sampled_by(place as usize));
                alike.drafts
            });
            coming.push((chain.slot, places));
        }
    }

    /// The first pass, and those that make a draft of a draft, as if no draft of the step held.
    fn set_batch(&mut self, alike: Alike, rows: &[Followed], slots: &Slots) -> Result<()> {
        let Alike { num_seqs, each, drafts } = alike;
        let max_seqs = self.sizes.max_seqs;
        let inputs = &mut self.recorded;
        inputs.clear();
        // What was picked takes their place.
        inputs.token_ids.resize(num_seqs * each, 0);
        for (index, row) in rows.iter().enumerate() {
            inputs.positions.extend((row.first as i32 + 1..).take(each));
            inputs.cu_tokens.push(((index + 1) * each) as i32);
            inputs.kv_lens.push((row.first + each) as i32 + 1);
            inputs.held.push(row.held.map_or(-1, |held| held as i32));
            inputs.next.push(row.first as i32 + 2);
        }
        for draft in 1..drafts {
            inputs.later.extend((0..num_seqs).map(|index| sampled_by((draft - 1) * max_seqs + index)));
        }
        let block_tables: Vec<&[i32]> = rows.iter().map(|row| slots.blocks(row.slot)).collect();
        let first = BatchInputs {
            token_ids: &inputs.token_ids,
            positions: &inputs.positions,
            cu_tokens: &inputs.cu_tokens,
            kv_lens: &inputs.kv_lens,
            block_tables: &block_tables,
            logit_rows: &inputs.held,
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
    /// Drafts of each sequence that hold, -1 where the device is to find it; it makes them rows of the first pass.
    held: Vec<i32>,
    /// Where each sequence's second draft would be made, if no draft of the step held.
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
            &mut self.held,
            &mut self.next,
            &mut self.later,
        ] {
            list.clear();
        }
        self.cu_tokens.push(0);
    }
}
