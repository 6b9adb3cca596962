//! State and results in, steps out: continuous batching with chunked prefill over paged KV blocks.
//!
//! A sequence waits (ordered by priority, then arrival), runs (holds a slot and blocks), and ends. A step is planned in
//! two passes: one row for every running sequence that decodes, then chunks of prompts, under way and new, as far as there is time.
//! Admission takes the blocks of the whole prompt at once and only if they are there, so a prompt never gets stuck half
//! way. A decoding sequence takes blocks as it grows; when none are left the last in order loses its slot and blocks and is
//! computed again later, from the tokens it has, with the same random numbers, so its text stays the same.
//!
//! No clock is read here and nothing waits: times come in as arguments.

mod commit;
mod plan;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use drafthorse_control::{BlockId, FinishReason, Ready, Slot};

use crate::block_manager::BlockManager;
use crate::config::EngineConfig;
use crate::error::{EngineError, Result};
use crate::pace::Pace;
use crate::request::{ById, Event, Request, RequestId, Usage};
use crate::sequence::{Key, Rules, Sequence, Sequences};
use crate::stats::{Shared, add};

/// One step without drafts may be for measuring; after so many in a row the next are taken to have none either.
const UNDRAFTED_STEPS: u32 = 2;

/// Who is told what.
pub(crate) type Events = Vec<(RequestId, Event)>;

pub(crate) struct Scheduler {
    max_num_batched_tokens: usize,
    max_drafts: u32,
    /// Drafts are made on the host, from the tokens of the step before.
    needs_host_tokens: bool,
    /// Steps in a row that decoded and left no drafts.
    undrafted_steps: u32,
    /// Tokens past a row's own whose KV blocks it gets too, if there are any.
    draft_slots: usize,
    enable_prefix_caching: bool,
    default_priority: u32,
    queue_timeout: Option<Duration>,

    sequences: Sequences,
    by_id: ById<Key>,
    waiting: BTreeSet<Key>,
    /// In order, so that the last one is the first to lose its blocks.
    running: Vec<Key>,
    limits: BinaryHeap<Reverse<Limit>>,

    blocks: BlockManager,
    free_slots: Vec<Slot>,
    /// Slots to be released with the next step.
    released: Vec<Slot>,

    last_step: u64,
    in_flight: VecDeque<PlannedStep>,
    pace: Pace,
    shared: Arc<Shared>,
}

/// What was asked of the ranks and has not come back.
struct PlannedStep {
    id: u64,
    rows: Vec<PlannedRow>,
    decode_tokens: usize,
    chunk_tokens: usize,
}

struct PlannedRow {
    key: Key,
    /// For a chunk, the tokens before it.
    start: usize,
    num_tokens: usize,
    num_drafts: usize,
    /// False for a chunk that is not the last of its prompt.
    yields: bool,
}

/// A moment at which a sequence may have to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Limit {
    at: Instant,
    key: Key,
    /// How long it may wait for its first step, if that is the limit; else its deadline.
    queue: Option<Duration>,
}

impl Scheduler {
    /// `ready` holds for all ranks: the fewest blocks, the shortest sequences.
    pub(crate) fn new(config: &EngineConfig, ready: &Ready, shared: Arc<Shared>) -> Self {
        let scheduler = Scheduler {
            max_num_batched_tokens: config.max_num_batched_tokens as usize,
            max_drafts: ready.max_drafts,
            needs_host_tokens: ready.needs_host_tokens,
            undrafted_steps: 0,
            draft_slots: ready.draft_slots as usize,
            enable_prefix_caching: config.enable_prefix_caching,
            default_priority: config.default_priority,
            queue_timeout: config.queue_timeout(),
            sequences: Sequences::default(),
            by_id: ById::default(),
            waiting: BTreeSet::new(),
            running: Vec::new(),
            limits: BinaryHeap::new(),
            blocks: BlockManager::new(ready.num_blocks, ready.block_size),
            free_slots: (0..config.max_num_seqs).rev().map(Slot).collect(),
            released: Vec::new(),
            last_step: 0,
            in_flight: VecDeque::new(),
            pace: Pace::new(config.max_step_time()),
            shared,
        };
        scheduler.publish();
        scheduler
    }

    /// Puts a request in the queue; [`Limits`](crate::Limits) have been checked.
    ///
    /// # Errors
    /// `DuplicateId`.
    pub(crate) fn add(&mut self, request: Request, now: Instant) -> Result<()> {
        if self.by_id.contains_key(&request.id) {
            return Err(EngineError::DuplicateId { id: request.id.0 });
        }
        let priority = if request.priority == 0 { self.default_priority } else { request.priority };
        let num_prompt = request.prompt.len();
        let sequence = Sequence {
            id: request.id,
            max_len: num_prompt + request.sampling.max_tokens as usize,
            num_prompt,
            root: self.blocks.cache.root(request.cache_salt, request.adapter),
            keys: Vec::new(),
            tokens: request.prompt,
            rules: Box::new(Rules { sampling: request.sampling, grammar: request.grammar, adapter: request.adapter }),
            wants: request.wants,
            slot: None,
            blocks: Vec::new(),
            num_known: 0,
            num_planned: 0,
            num_computed: 0,
            num_remembered: 0,
            rows_in_flight: 0,
            min_new: 0,
            max_new: 0,
            held_drafts: 0,
            prompt_logprobs_sent: 0,
            usage: Usage::default(),
            arrived: now,
            admitted: None,
            first_token: None,
        };
        let key = self.sequences.insert(priority, sequence);
        self.by_id.insert(request.id, key);
        self.waiting.insert(key);
        if let Some(at) = request.deadline {
            self.limits.push(Reverse(Limit { at, key, queue: None }));
        }
        let queue = request.queue_timeout.or(self.queue_timeout);
        if let Some(at) = queue.and_then(|queue| now.checked_add(queue)) {
            self.limits.push(Reverse(Limit { at, key, queue }));
        }
        Ok(())
    }

    /// How many steps may be in flight, of `most` at most: one while it may bring drafts that the next should verify.
    pub(crate) fn depth(&self, most: usize) -> usize {
        let awaits_drafts = self.needs_host_tokens && self.undrafted_steps < UNDRAFTED_STEPS;
        if awaits_drafts { 1 } else { most }
    }

    /// True if there is no sequence. Steps may still be in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Ends a request with `reason`; nothing if it has ended. Its blocks are free once no step in flight can write them.
    pub(crate) fn cancel(&mut self, id: RequestId, reason: EngineError, events: &mut Events) {
        if let Some(&key) = self.by_id.get(&id) {
            add(&self.shared.counters.cancelled, 1);
            self.fail(key, reason, events);
        }
    }

    /// Ends a request as a success after its first `num_tokens` output tokens; nothing if it has ended.
    pub(crate) fn finish(
        &mut self,
        id: RequestId,
        reason: FinishReason,
        num_tokens: usize,
        now: Instant,
        events: &mut Events,
    ) {
        if let Some(&key) = self.by_id.get(&id) {
            self.end(key, reason, num_tokens, now, events);
        }
    }

    /// Ends what has waited or run too long.
    pub(crate) fn expire(&mut self, now: Instant, events: &mut Events) {
        while let Some(&Reverse(limit)) = self.limits.peek()
            && limit.at <= now
        {
            self.limits.pop();
            let Some(sequence) = self.sequences.get(limit.key) else { continue };
            match limit.queue {
                Some(_) if sequence.admitted.is_some() => continue,
                Some(queue) => {
                    let waited = now.saturating_duration_since(sequence.arrived);
                    add(&self.shared.counters.failed, 1);
                    self.fail(limit.key, EngineError::QueueTimeout { waited, limit: queue }, events);
                }
                None => {
                    add(&self.shared.counters.failed, 1);
                    self.fail(limit.key, EngineError::DeadlineExceeded, events);
                }
            }
        }
        // Limits of sequences that ended in time, once they are most of the heap.
        if self.limits.len() > 64 + 4 * self.by_id.len() {
            self.limits.retain(|Reverse(limit)| self.sequences.get(limit.key).is_some());
        }
    }

    /// What to say when nothing is in flight and nothing can be planned though there is work.
    pub(crate) fn stuck(&self) -> EngineError {
        EngineError::Stuck { running: self.running.len(), waiting: self.waiting.len(), free: self.blocks.num_free() }
    }

    /// Makes the numbers of [`Stats`](crate::Stats) visible.
    pub(crate) fn publish(&self) {
        self.shared.running.store(self.running.len(), Relaxed);
        self.shared.total_blocks.store(self.blocks.num_blocks(), Relaxed);
        self.shared.free_blocks.store(self.blocks.num_free(), Relaxed);
        self.shared.cached_blocks.store(self.blocks.cache.len(), Relaxed);
    }

    fn end(&mut self, key: Key, reason: FinishReason, num_tokens: usize, now: Instant, events: &mut Events) {
        if let Some(sequence) = self.remove(key) {
            add(&self.shared.counters.finished, 1);
            events.push((sequence.id, Event::Finished(sequence.finished(reason, num_tokens, now))));
        }
    }

    fn fail(&mut self, key: Key, reason: EngineError, events: &mut Events) {
        if let Some(sequence) = self.remove(key) {
            events.push((sequence.id, Event::Failed(reason)));
        }
    }

    fn remove(&mut self, key: Key) -> Option<Sequence> {
        let mut sequence = self.sequences.remove(key)?;
        self.by_id.remove(&sequence.id);
        self.waiting.remove(&key);
        if let Ok(at) = self.running.binary_search(&key) {
            self.running.remove(at);
        }
        self.vacate(sequence.leave_slot());
        Some(sequence)
    }

    /// Takes the slot and blocks of the last running sequence and puts it back in the queue.
    fn preempt_last(&mut self) {
        let Some(key) = self.running.pop() else { return };
        let Some(sequence) = self.sequences.get_mut(key) else { return };
        sequence.usage.preemptions += 1;
        let left = sequence.leave_slot();
        add(&self.shared.counters.preemptions, 1);
        self.waiting.insert(key);
        self.vacate(left);
    }

    fn vacate(&mut self, (slot, blocks): (Option<Slot>, Vec<BlockId>)) {
        if let Some(slot) = slot {
            self.released.push(slot);
            self.free_slots.push(slot);
        }
        self.blocks.free(blocks, self.in_flight.back().map(|step| step.id));
    }
}
