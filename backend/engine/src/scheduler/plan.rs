//! What runs next.

use std::time::Instant;

use drafthorse_control::{Admit, BlockId, Logprobs, Row, Step};

use super::{PlannedRow, PlannedStep, Scheduler};
use crate::sequence::{Key, Sequence};
use crate::stats::add;

/// A step in the making.
#[derive(Default)]
struct Draft {
    admit: Vec<Admit>,
    rows: Vec<Row>,
    planned: Vec<PlannedRow>,
    tokens_left: usize,
    chunk_tokens_left: usize,
    decode_tokens: usize,
    chunk_tokens: usize,
    /// Another prompt will fill the step up.
    others_follow: bool,
    /// Blocks that rows left out of this step wait for; later rows must not take them.
    blocks_owed: usize,
}

impl Scheduler {
    /// The next step, or `None` if nothing can run before a result has come.
    pub(crate) fn plan(&mut self, now: Instant) -> Option<Step> {
        let mut draft = Draft {
            rows: Vec::with_capacity(self.running.len()),
            planned: Vec::with_capacity(self.running.len()),
            tokens_left: self.max_num_batched_tokens,
            ..Draft::default()
        };
        self.plan_decodes(&mut draft);
        let chunk_tokens = self.pace.chunk_tokens(draft.decode_tokens > 0);
        draft.chunk_tokens_left = chunk_tokens.min(draft.tokens_left);
        self.plan_prompts(&mut draft, now);
        if draft.rows.is_empty() {
            return None;
        }

        self.last_step += 1;
        let id = self.last_step;
        self.in_flight.push_back(PlannedStep {
            id,
            rows: draft.planned,
            decode_tokens: draft.decode_tokens,
            chunk_tokens: draft.chunk_tokens,
        });
        let release = std::mem::take(&mut self.released);
        Some(Step { id, release, copies: Vec::new(), admit: draft.admit, rows: draft.rows })
    }

    /// A row for every running sequence past its prompt, in order, as far as there are blocks.
    fn plan_decodes(&mut self, draft: &mut Draft) {
        let mut at = 0;
        // Preemption shortens the list from its end, where no row has been planned yet.
        while at < self.running.len() {
            let key = self.running[at];
            at += 1;
            let Some(sequence) = self.sequences.get(key) else { continue };
            let Some(max_drafts) = sequence.max_drafts(self.max_drafts) else { continue };
            // All that follow get their one token first.
            let spare_tokens = draft.tokens_left.saturating_sub(1 + self.running.len() - at);
            let Some((num_drafts, new_blocks)) = self.grow(at, key, max_drafts.min(spare_tokens), draft) else {
                continue;
            };
            self.push_row(draft, key, 1 + num_drafts, num_drafts, new_blocks);
        }
    }

    /// Blocks for the next decode row of `running[at - 1]`, and the drafts that it has room for. Others behind it lose
    /// theirs if there are none; `None` if it has to wait for blocks.
    fn grow(&mut self, at: usize, key: Key, max_drafts: usize, draft: &mut Draft) -> Option<(usize, Vec<BlockId>)> {
        let sequence = self.sequences.get(key)?;
        let (kv_len, max_len, num_blocks) = (sequence.kv_len(), sequence.max_len, sequence.blocks.len());
        let need = self.blocks.blocks_for(kv_len).saturating_sub(num_blocks);
        loop {
            let free = self.blocks.num_free().saturating_sub(draft.blocks_owed);
            if need <= free {
                // Drafts are dropped before anyone is preempted for them.
                let room = (num_blocks + free) * self.blocks.block_size() - kv_len;
                let num_drafts = max_drafts.min(room);
                let with_slots = (kv_len + num_drafts + self.draft_slots).min(max_len);
                let count = self.blocks.blocks_for(with_slots.max(kv_len + num_drafts)).saturating_sub(num_blocks);
                return Some((num_drafts, self.blocks.allocate(count.min(free))?));
            }
            let free_soon = self.blocks.num_free() + self.blocks.num_in_flight();
            if draft.blocks_owed + need <= free_soon || self.running.len() == at {
                draft.blocks_owed += need;
                return None;
            }
            self.preempt_last();
        }
    }

    /// Chunks of prompts, under way and new. Of the time the first in order of those under way has half at least, those behind it have the rest:
    /// new ones, then the shortest. So a long prompt neither waits for ever nor keeps short ones waiting. New ones of a better priority come before.
    fn plan_prompts(&mut self, draft: &mut Draft, now: Instant) {
        let Some(first) = self.running.iter().copied().find(|key| self.tokens_to_run(*key) > 0) else {
            return self.plan_admissions(draft, now, None);
        };
        draft.others_follow = true;
        self.plan_admissions(draft, now, Some(first.priority));
        // If it takes less than half, that is all there is to share.
        let firsts = draft.chunk_tokens_left.div_ceil(2);
        draft.others_follow = self.tokens_to_run(first) > firsts;
        if draft.others_follow {
            draft.chunk_tokens_left -= firsts;
        } else {
            self.plan_chunk(draft, first, Vec::new());
        }
        // Those that are admitted in this step have had their share.
        let is_behind = |key: &Key| *key > first && self.tokens_to_run(*key) > 0;
        let mut behind: Vec<Key> = self.running.iter().copied().filter(is_behind).collect();
        self.plan_admissions(draft, now, None);
        behind.sort_by_key(|key| self.tokens_to_run(*key));
        behind.into_iter().for_each(|key| self.plan_chunk(draft, key, Vec::new()));
        if std::mem::take(&mut draft.others_follow) {
            draft.chunk_tokens_left += firsts;
            self.plan_chunk(draft, first, Vec::new());
        }
    }

    /// Of its prompt, or of what it had before it was preempted.
    fn tokens_to_run(&self, key: Key) -> usize {
        self.sequences.get(key).map_or(0, |sequence| sequence.num_known - sequence.num_planned)
    }

    /// New sequences in order, while there are slots, time, and blocks for the whole prompt; only those of a better priority
    /// than `than`, if that is given. Nobody overtakes: a long prompt would wait for ever.
    fn plan_admissions(&mut self, draft: &mut Draft, now: Instant, than: Option<u32>) {
        while draft.chunk_tokens_left > 0 && draft.blocks_owed == 0 && !self.free_slots.is_empty() {
            let Some(&key) = self.waiting.first().filter(|key| than.is_none_or(|than| key.priority < than)) else {
                return;
            };
            let Some(new_blocks) = self.admit(draft, key, now) else { return };
            self.plan_chunk(draft, key, new_blocks);
        }
    }

    /// Gives a waiting sequence a slot and the blocks of all its tokens; answers those that hold no cached tokens, or
    /// `None` if it must wait.
    fn admit(&mut self, draft: &mut Draft, key: Key, now: Instant) -> Option<Vec<BlockId>> {
        let sequence = self.sequences.get_mut(key)?;
        // Preempted, and a row in flight still brings tokens.
        if sequence.rows_in_flight > 0 {
            return None;
        }
        let num_tokens = sequence.tokens.len();
        let block_size = self.blocks.block_size();
        let cached_blocks = if self.enable_prefix_caching && !wants_prompt_logprobs(sequence) {
            self.blocks.extend_keys(sequence.root, &mut sequence.keys, &sequence.tokens);
            // The last token must run, or there would be no logits.
            let full_blocks = (num_tokens - 1) / block_size;
            self.blocks.cache.find(&sequence.keys[..full_blocks.min(sequence.keys.len())])
        } else {
            Vec::new()
        };

        let with_slots = (num_tokens + self.draft_slots).min(sequence.max_len).max(num_tokens);
        let new_blocks = self.blocks.blocks_for(with_slots) - cached_blocks.len();
        // One more block for each that runs, so that they can grow for a while before someone is preempted.
        let headroom = self.running.len();
        if new_blocks + self.blocks.count_free(&cached_blocks) + headroom > self.blocks.num_free() {
            return None;
        }
        self.blocks.share(&cached_blocks);
        let new_blocks = self.blocks.allocate(new_blocks)?;
        let slot = self.free_slots.pop()?;

        let num_cached = cached_blocks.len() * block_size;
        if sequence.admitted.is_none() {
            sequence.admitted = Some(now);
            sequence.usage.cached_tokens = num_cached as u32;
            add(&self.shared.counters.prompt_tokens, num_tokens);
            if self.enable_prefix_caching {
                add(&self.shared.counters.prefix_queries, num_tokens);
                add(&self.shared.counters.prefix_hits, num_cached);
            }
        }
        sequence.slot = Some(slot);
        sequence.blocks.clone_from(&cached_blocks);
        sequence.num_known = num_tokens;
        sequence.num_planned = num_cached;
        sequence.num_computed = num_cached;
        sequence.num_remembered = cached_blocks.len();
        draft.admit.push(Admit {
            slot,
            tokens: sequence.tokens.clone(),
            num_prompt: sequence.num_prompt as u32,
            num_cached: num_cached as u32,
            blocks: cached_blocks,
            sampling: sequence.rules.sampling.clone(),
            grammar: sequence.rules.grammar.clone(),
            fork_of: None,
            adapter: sequence.rules.adapter,
        });
        self.waiting.remove(&key);
        let at = self.running.partition_point(|other| *other < key);
        self.running.insert(at, key);
        Some(new_blocks)
    }

    fn plan_chunk(&mut self, draft: &mut Draft, key: Key, new_blocks: Vec<BlockId>) {
        let mut num_tokens = self.tokens_to_run(key);
        if draft.others_follow {
            num_tokens = num_tokens.min(draft.chunk_tokens_left);
        } else if num_tokens > draft.chunk_tokens_left {
            num_tokens = in_whole_tiles(draft.decode_tokens + draft.chunk_tokens, draft.chunk_tokens_left);
            // What would be left of the time is part of a tile that costs more.
            draft.chunk_tokens_left = num_tokens;
        }
        if num_tokens > 0 {
            draft.chunk_tokens_left -= num_tokens;
            self.push_row(draft, key, num_tokens, 0, new_blocks);
        }
    }

    fn push_row(
        &mut self,
        draft: &mut Draft,
        key: Key,
        num_tokens: usize,
        num_drafts: usize,
        new_blocks: Vec<BlockId>,
    ) {
        let Some(sequence) = self.sequences.get_mut(key) else { return };
        let Some(slot) = sequence.slot else { return };
        let mut wants = sequence.wants;
        let start = sequence.num_planned;
        if sequence.is_prefilling() {
            sequence.num_planned += num_tokens;
            draft.chunk_tokens += num_tokens;
        } else {
            draft.decode_tokens += num_tokens;
            wants.prompt_logprobs = Logprobs::None;
        }
        let yields = !sequence.is_prefilling();
        if yields {
            sequence.min_new += 1;
            sequence.max_new += 1 + num_drafts;
        }
        sequence.rows_in_flight += 1;
        sequence.blocks.extend_from_slice(&new_blocks);
        draft.tokens_left -= num_tokens;
        draft.planned.push(PlannedRow { key, start, num_tokens, num_drafts, yields });
        draft.rows.push(Row { slot, num_tokens: num_tokens as u32, num_drafts: num_drafts as u32, new_blocks, wants });
    }
}

/// Rows that products of many rows take at a time: a tile that is not full costs what a full one costs.
const TILE: usize = 128;

/// Of at most `num_tokens` tokens of a prompt beside so many others, as many as make whole tiles with them, if those are several.
fn in_whole_tiles(others: usize, num_tokens: usize) -> usize {
    let all = others + num_tokens;
    match num_tokens.saturating_sub(all % TILE) {
        0 => num_tokens,
        whole if all >= 2 * TILE => whole,
        _ => num_tokens,
    }
}

/// True while log-probabilities of prompt tokens are owed: they come from running the prompt.
fn wants_prompt_logprobs(sequence: &Sequence) -> bool {
    sequence.wants.prompt_logprobs != Logprobs::None && sequence.prompt_logprobs_sent + 1 < sequence.num_prompt
}
