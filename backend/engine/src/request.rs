//! What a caller asks of the engine, and what it is told.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drafthorse_control::{AdapterId, FinishReason, Grammar, SamplingParams, TokenId, TokenLogprobs, Wants};

use crate::error::EngineError;
use crate::stats::Shared;

/// A request, named by its caller; unique among those that have not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A map that each step looks into for each request, so with a hash that costs one multiplication. Ids are made by the
/// server, mostly by counting, not by clients.
pub(crate) type ById<T> = HashMap<RequestId, T, BuildHasherDefault<IdHasher>>;

#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    /// Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): the map takes its bits from both ends.
    fn write_u64(&mut self, id: u64) {
        let product = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }
}

/// Where a request's events go. Runs on the engine thread, so it must never block; a channel that can hold `max_tokens`
/// events will do. `false` says that nobody listens any more, which cancels the request.
pub type EventSink = Box<dyn FnMut(Event) -> bool + Send>;

/// One prompt to be continued.
pub struct Request {
    pub id: RequestId,
    /// At least one token, all inside the vocabulary.
    pub prompt: Vec<TokenId>,
    /// `max_tokens` counts output alone; prompt and output together must fit the model and the KV cache.
    pub sampling: SamplingParams,
    pub grammar: Option<Grammar>,
    pub adapter: Option<AdapterId>,
    /// Log-probabilities that events must carry.
    pub wants: Wants,
    /// 1 goes first; 0 is the engine's default level.
    pub priority: u32,
    /// How long it may wait for its first step; without it the engine's default holds.
    pub queue_timeout: Option<Duration>,
    /// When it must have ended.
    pub deadline: Option<Instant>,
    /// Requests share cached prefixes only with requests of the same salt.
    pub cache_salt: u64,
    pub sink: EventSink,
}

impl Request {
    /// A request of the default priority, without a time limit, that wants tokens alone.
    pub fn new(id: RequestId, prompt: Vec<TokenId>, sampling: SamplingParams, sink: EventSink) -> Self {
        Request {
            id,
            prompt,
            sampling,
            grammar: None,
            adapter: None,
            wants: Wants::default(),
            priority: 0,
            queue_timeout: None,
            deadline: None,
            cache_salt: 0,
            sink,
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("id", &self.id)
            .field("prompt_tokens", &self.prompt.len())
            .field("sampling", &self.sampling)
            .field("priority", &self.priority)
            .finish_non_exhaustive()
    }
}

/// What a request's sink receives: any number of `Tokens`, then exactly one `Finished` or `Failed`.
#[derive(Debug)]
pub enum Event {
    Tokens(Tokens),
    Finished(Finished),
    Failed(EngineError),
}

impl Event {
    /// True if no event follows.
    pub fn is_last(&self) -> bool {
        !matches!(self, Event::Tokens(_))
    }
}

/// What one step added to a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tokens {
    /// Verified output tokens, a stop token among them; empty if only `prompt_logprobs` came.
    pub ids: Vec<TokenId>,
    /// One per token of `ids`, if wanted.
    pub logprobs: Vec<TokenLogprobs>,
    /// The next prompt tokens' (the first prompt token has none), if wanted; all come before the first output token's.
    pub prompt_logprobs: Vec<TokenLogprobs>,
}

/// How a request ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    pub reason: FinishReason,
    pub usage: Usage,
    pub timing: RequestTiming,
}

/// What a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// Prompt tokens whose KV was found in the prefix cache.
    pub cached_tokens: u32,
    /// Drafts that were verified, and those of them that held.
    pub drafts_verified: u32,
    pub drafts_accepted: u32,
    /// Times it lost its blocks to others and was computed again.
    pub preemptions: u32,
}

/// When things happened, counted from submission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestTiming {
    /// Until its first step was planned.
    pub queued: Duration,
    pub first_token: Duration,
    pub total: Duration,
}

/// The engine's hold on a sink: counts the request as live, and sees that it gets its last event whatever happens.
pub(crate) struct Outlet {
    sink: EventSink,
    shared: Arc<Shared>,
    ended: bool,
    /// True while the sink runs: one that panics is not called again.
    calling: bool,
}

impl Outlet {
    pub(crate) fn new(sink: EventSink, shared: Arc<Shared>) -> Self {
        Outlet { sink, shared, ended: false, calling: false }
    }

    /// False if the receiver is gone.
    pub(crate) fn send(&mut self, event: Event) -> bool {
        if event.is_last() {
            self.end();
        }
        self.calling = true;
        let listens = (self.sink)(event);
        self.calling = false;
        listens
    }

    /// No event is owed: the caller was refused, or listens no more.
    pub(crate) fn abandon(mut self) {
        self.end();
    }

    /// Before the last event, so that a caller who has it can submit again at once.
    fn end(&mut self) {
        if !self.ended {
            self.ended = true;
            self.shared.request_ended();
        }
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        if !self.ended {
            self.end();
            if self.calling {
                return;
            }
            let reason = self.shared.stopped().unwrap_or_else(|| "the engine thread has ended".into());
            (self.sink)(Event::Failed(EngineError::Stopped { reason }));
        }
    }
}
