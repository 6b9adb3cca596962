//! A request while it is in the engine.
//!
//! What is *committed* (tokens that came back, KV that is verified) and what is *planned* (rows of steps in flight) are kept
//! apart: a row is planned before it is known how many of its drafts hold, so between the two a length is a range.

use std::time::Instant;

use drafthorse_control::{AdapterId, BlockId, FinishReason, Grammar, SamplingParams, Slot, TokenId, Wants};

use crate::prefix_cache::PrefixKey;
use crate::request::{Finished, RequestId, RequestTiming, Usage};

/// Names a sequence. Orders by who goes first: the lower priority level, then the earlier arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) priority: u32,
    /// Counts up, so no two sequences ever have the same key.
    pub(crate) arrival: u64,
    index: u32,
}

/// What only admission reads.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) sampling: SamplingParams,
    pub(crate) grammar: Option<Grammar>,
    pub(crate) adapter: Option<AdapterId>,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    /// The prompt and all committed output.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) num_prompt: usize,
    /// Prompt and `max_tokens`.
    pub(crate) max_len: usize,
    pub(crate) wants: Wants,
    /// Apart, so that what each step reads lies close together.
    pub(crate) rules: Box<Rules>,

    /// The key before the first block, and those of the full blocks so far as they were needed.
    pub(crate) root: PrefixKey,
    pub(crate) keys: Vec<PrefixKey>,

    /// Set while it runs.
    pub(crate) slot: Option<Slot>,
    /// The block table; empty while it waits.
    pub(crate) blocks: Vec<BlockId>,
    /// Tokens that are known since it took its slot, and those of them that are planned to be run; decoding begins when
    /// they are equal.
    pub(crate) num_known: usize,
    pub(crate) num_planned: usize,
    /// Leading tokens whose KV is verified.
    pub(crate) num_computed: usize,
    /// Leading blocks that were offered to the prefix cache.
    pub(crate) num_remembered: usize,

    pub(crate) rows_in_flight: usize,
    /// Tokens that those rows add at least, and at most, if the sequence does not end.
    pub(crate) min_new: usize,
    pub(crate) max_new: usize,
    /// Drafts that the rank held after the last committed row.
    pub(crate) held_drafts: u32,
    /// Prompt tokens whose log-probabilities were delivered; the first has none.
    pub(crate) prompt_logprobs_sent: usize,

    pub(crate) usage: Usage,
    pub(crate) arrived: Instant,
    /// When its first step was planned.
    pub(crate) admitted: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
}

impl Sequence {
    pub(crate) fn is_prefilling(&self) -> bool {
        self.num_planned < self.num_known
    }

    /// The most drafts its next row may verify, if that is a decode row: `None` for a prompt that is unfinished and for a
    /// sequence that the rows in flight will end.
    pub(crate) fn max_drafts(&self, max_drafts: u32) -> Option<usize> {
        let max_drafts = self.rules.sampling.max_drafts.unwrap_or(max_drafts).min(max_drafts);
        let min_len = self.tokens.len() + self.min_new;
        if self.is_prefilling() || min_len >= self.max_len {
            return None;
        }
        // What the rank holds is known only if no row is in flight.
        let held = if self.rows_in_flight == 0 { self.held_drafts } else { max_drafts };
        // A draft is of use only if another token may follow it.
        let room = (self.max_len - 1).saturating_sub(self.tokens.len() + self.max_new);
        Some(room.min(held.min(max_drafts) as usize))
    }

    /// The most tokens whose KV its next decode row may write or read, without drafts. A sequence that has reached its
    /// last token has ended and writes nothing.
    pub(crate) fn kv_len(&self) -> usize {
        (self.tokens.len() + self.max_new).min(self.max_len - 1)
    }

    /// Forgets all that stands in the KV cache. What rows in flight bring is still taken.
    pub(crate) fn leave_slot(&mut self) -> (Option<Slot>, Vec<BlockId>) {
        self.num_planned = 0;
        self.num_computed = 0;
        self.num_remembered = 0;
        self.held_drafts = 0;
        (self.slot.take(), std::mem::take(&mut self.blocks))
    }

    /// How it ended, with at most `output_tokens` tokens of output.
    pub(crate) fn finished(&self, reason: FinishReason, output_tokens: usize, now: Instant) -> Finished {
        let output_tokens = output_tokens.min(self.tokens.len() - self.num_prompt);
        let since_arrival = |at: Option<Instant>| at.unwrap_or(now).saturating_duration_since(self.arrived);
        Finished {
            reason,
            usage: Usage { prompt_tokens: self.num_prompt as u32, output_tokens: output_tokens as u32, ..self.usage },
            timing: RequestTiming {
                queued: since_arrival(self.admitted),
                first_token: since_arrival(self.first_token),
                total: since_arrival(None),
            },
        }
    }
}

/// All sequences, found by key in constant time. A key outlives its sequence and then finds nothing.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    entries: Vec<Option<(u64, Sequence)>>,
    vacant: Vec<u32>,
    arrivals: u64,
}

impl Sequences {
    pub(crate) fn insert(&mut self, priority: u32, sequence: Sequence) -> Key {
        self.arrivals += 1;
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.entries[index as usize] = Some((self.arrivals, sequence));
        Key { priority, arrival: self.arrivals, index }
    }

    pub(crate) fn get(&self, key: Key) -> Option<&Sequence> {
        match self.entries.get(key.index as usize) {
            Some(Some((arrival, sequence))) if *arrival == key.arrival => Some(sequence),
            _ => None,
        }
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut Sequence> {
        match self.entries.get_mut(key.index as usize) {
            Some(Some((arrival, sequence))) if *arrival == key.arrival => Some(sequence),
            _ => None,
        }
    }

    pub(crate) fn remove(&mut self, key: Key) -> Option<Sequence> {
        self.get(key)?;
        self.vacant.push(key.index);
        self.entries[key.index as usize].take().map(|(_, sequence)| sequence)
    }
}
