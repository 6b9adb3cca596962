//! Which entries a pass writes, and which sequences get drafts of it.

use drafthorse_control::Slot;
use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::copy_rows::copy_rows;

use super::ModelProposer;
use crate::error::Result;
use crate::inputs::PlannedRow;
use crate::slots::Slots;
use crate::spec::policy::MAX_DRAFTS;
use crate::spec::proposer::{Propose, ProposeRow};

/// Of a chain's drafts; as many as it has mean something.
pub(super) type Places = [u32; MAX_DRAFTS];

/// One pass of the drafter, on the host.
#[derive(Default)]
pub(super) struct Pass {
    pub(super) slots: Vec<Slot>,
    pub(super) token_ids: Vec<i32>,
    pub(super) positions: Vec<i32>,
    pub(super) cu_tokens: Vec<i32>,
    pub(super) kv_lens: Vec<i32>,
    /// Rows of the step's hidden states, or of the blocks', and the pass's rows that read them.
    pub(super) from_step: Vec<(u32, u32)>,
    pub(super) from_blocks: Vec<(u32, u32)>,
    /// Rows of the step's hidden states that blocks keep.
    pub(super) kept: Vec<(u32, u32)>,
}

/// A sequence that gets drafts.
pub(super) struct Chain {
    pub(super) slot: Slot,
    /// Its row of the pass that was run last.
    pub(super) row: u32,
    /// Where the token of that row stands.
    pub(super) position: usize,
    pub(super) num_drafts: usize,
    pub(super) most: usize,
    /// Its newest draft, or on a device what stands for it.
    pub(super) draft: i32,
    pub(super) places: Places,
}

impl ModelProposer {
    /// The pass over all that was verified, and the sequences that get drafts of it.
    pub(super) fn plan(&mut self, step: &Propose<'_>) {
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
        // What wants no drafts leaves entries of its prompt alone, for others that begin with it.
        if self.most.is_none() || (state.max_drafts() == 0 && first >= state.num_prompt) {
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

    /// A sequence's tokens run without entries, and so will those after them.
    pub(super) fn leave_out(&mut self, row: &PlannedRow, slots: &Slots) {
        let (blocks, block_size) = (slots.blocks(row.slot), slots.block_size());
        let first = slots.state(row.slot).num_computed;
        self.written[row.slot.0 as usize] = 0;
        for block in first / block_size..(first + row.num_known()) / block_size {
            self.whole[blocks[block] as usize] = false;
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

    /// Hands the newest drafts over, and plans a pass over those that another one follows.
    pub(super) fn extend(&mut self, step: &mut Propose<'_>, hidden: &mut Tensor) -> Result<()> {
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
                drafts[chain.num_drafts] = chain.draft;
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
