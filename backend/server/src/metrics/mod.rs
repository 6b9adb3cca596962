//! What is counted per model, and the Prometheus page that shows it.
//!
//! Counters are atomics: whoever ends a request adds to them, nobody waits. Names are those that dashboards know: `nv_inference_*`
//! as Triton counts, `vllm:*` as vLLM does, `drafthorse_*` for what only we have. Times are summed in nanoseconds.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use drafthorse_control::FinishReason;
use drafthorse_engine::Usage;

use crate::error::ServerError;

mod page;

pub use page::{ModelView, router, write_page};

/// Bounds of times that a request takes as a whole, in seconds.
const REQUEST_SECONDS: [f64; 16] =
    [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0];
/// Bounds of times to the first token, in seconds.
const FIRST_TOKEN_SECONDS: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0];
/// Bounds of times between tokens, in seconds.
const NEXT_TOKEN_SECONDS: [f64; 14] =
    [0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.75, 2.5];
/// Bounds of numbers of tokens.
const TOKENS: [f64; 15] =
    [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0];

/// Why a request failed, as Triton sorts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Not taken: the queue is full, the wait was too long, the server is exiting.
    Rejected,
    /// The caller went away.
    Canceled,
    /// The engine or a rank.
    Backend,
    /// The request itself.
    Other,
}

impl Failure {
    pub const ALL: [Failure; 4] = [Failure::Rejected, Failure::Canceled, Failure::Backend, Failure::Other];

    pub const fn name(self) -> &'static str {
        match self {
            Failure::Rejected => "REJECTED",
            Failure::Canceled => "CANCELED",
            Failure::Backend => "BACKEND",
            Failure::Other => "OTHER",
        }
    }
}

impl From<&ServerError> for Failure {
    fn from(error: &ServerError) -> Self {
        match error {
            ServerError::Overloaded { .. } | ServerError::QueueTimeout { .. } | ServerError::Exiting => {
                Failure::Rejected
            }
            ServerError::Cancelled => Failure::Canceled,
            ServerError::Failed { .. } | ServerError::EngineStopped { .. } | ServerError::Internal { .. } => {
                Failure::Backend
            }
            _ => Failure::Other,
        }
    }
}

/// A number of things and the time they took together.
#[derive(Debug, Default)]
pub struct Sum {
    count: AtomicU64,
    nanos: AtomicU64,
}

impl Sum {
    fn add(&self, time: Duration) {
        self.count.fetch_add(1, Relaxed);
        self.nanos.fetch_add(nanos(time), Relaxed);
    }

    pub fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    pub fn nanos(&self) -> u64 {
        self.nanos.load(Relaxed)
    }

    fn micros(&self) -> u64 {
        self.nanos() / 1000
    }
}

/// How many observations fell below each bound.
#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    /// One more than bounds; not cumulative.
    counts: Box<[AtomicU64]>,
    /// Nanoseconds, or tokens.
    sum: AtomicU64,
    /// Sum of one unit on the page.
    unit: f64,
}

impl Histogram {
    fn of_seconds(bounds: &'static [f64]) -> Self {
        Self::new(bounds, 1e9)
    }

    fn of_tokens() -> Self {
        Self::new(&TOKENS, 1.0)
    }

    fn new(bounds: &'static [f64], unit: f64) -> Self {
        Histogram {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
            unit,
        }
    }

    fn observe(&self, time: Duration) {
        self.add(nanos(time));
    }

    fn add(&self, value: u64) {
        let bucket = self.bounds.partition_point(|&bound| bound * self.unit < value as f64);
        self.counts[bucket].fetch_add(1, Relaxed);
        self.sum.fetch_add(value, Relaxed);
    }
}

/// One model's counters.
#[derive(Debug)]
pub struct ModelMetrics {
    /// Requests that ended well, with the time from their arrival.
    pub success: Sum,
    /// All failures, with their time.
    pub fail: Sum,
    /// Waiting for the first step.
    pub queue: Sum,
    /// Text to tokens.
    pub compute_input: Sum,
    /// In the engine, from the first step.
    pub compute_infer: Sum,
    /// Tokens to text.
    pub compute_output: Sum,
    /// Responses of streams, with the time since the one before.
    pub responses: Sum,
    failures: [AtomicU64; Failure::ALL.len()],
    finished: [AtomicU64; 2],
    prompt_tokens: AtomicU64,
    output_tokens: AtomicU64,
    last_request_ms: AtomicU64,
    first_token: Histogram,
    next_token: Histogram,
    /// A request's mean time for an output token after the first.
    output_token: Histogram,
    request: Histogram,
    queue_time: Histogram,
    prompt_len: Histogram,
    output_len: Histogram,
}

impl Default for ModelMetrics {
    fn default() -> Self {
        ModelMetrics {
            success: Sum::default(),
            fail: Sum::default(),
            queue: Sum::default(),
            compute_input: Sum::default(),
            compute_infer: Sum::default(),
            compute_output: Sum::default(),
            responses: Sum::default(),
            failures: Default::default(),
            finished: Default::default(),
            prompt_tokens: AtomicU64::new(0),
            output_tokens: AtomicU64::new(0),
            last_request_ms: AtomicU64::new(0),
            first_token: Histogram::of_seconds(&FIRST_TOKEN_SECONDS),
            next_token: Histogram::of_seconds(&NEXT_TOKEN_SECONDS),
            output_token: Histogram::of_seconds(&NEXT_TOKEN_SECONDS),
            request: Histogram::of_seconds(&REQUEST_SECONDS),
            queue_time: Histogram::of_seconds(&FIRST_TOKEN_SECONDS),
            prompt_len: Histogram::of_tokens(),
            output_len: Histogram::of_tokens(),
        }
    }
}

/// Where the time of a request that ended well has gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// From its arrival to its end.
    pub total: Duration,
    pub encoding: Duration,
    pub queued: Duration,
    /// From submission to the end, the queue not counted.
    pub running: Duration,
    pub decoding: Duration,
    /// From arrival to the first token.
    pub first_token: Duration,
}

impl ModelMetrics {
    /// A request ended well.
    pub fn succeeded(&self, reason: FinishReason, usage: &Usage, spent: &Spent) {
        self.success.add(spent.total);
        self.queue.add(spent.queued);
        self.compute_input.add(spent.encoding);
        self.compute_infer.add(spent.running);
        self.compute_output.add(spent.decoding);
        self.finished[reason as usize].fetch_add(1, Relaxed);
        self.request.observe(spent.total);
        self.queue_time.observe(spent.queued);
        self.prompt_len.add(usage.prompt_tokens.into());
        self.output_len.add(usage.output_tokens.into());
        if usage.output_tokens > 1 {
            let after_first = spent.total.saturating_sub(spent.first_token);
            self.output_token.observe(after_first / (usage.output_tokens - 1));
        }
        self.touch();
    }

    /// A request failed, `time` after it arrived.
    pub fn failed(&self, failure: Failure, time: Duration) {
        self.fail.add(time);
        self.failures[failure as usize].fetch_add(1, Relaxed);
        self.touch();
    }

    /// The prompt has run: its first output token came `time` after the request.
    pub fn first_token(&self, time: Duration, prompt_tokens: usize, tokens: usize) {
        self.first_token.observe(time);
        self.prompt_tokens.fetch_add(prompt_tokens as u64, Relaxed);
        self.output_tokens.fetch_add(tokens as u64, Relaxed);
        self.responses.add(time);
    }

    /// Further output tokens came, `time` after those before.
    pub fn next_tokens(&self, time: Duration, tokens: usize) {
        self.next_token.observe(time);
        self.output_tokens.fetch_add(tokens as u64, Relaxed);
        self.responses.add(time);
    }

    pub fn failures(&self, failure: Failure) -> u64 {
        self.failures[failure as usize].load(Relaxed)
    }

    /// Milliseconds since 1970 at which the last request ended; 0 if there was none.
    pub fn last_request_ms(&self) -> u64 {
        self.last_request_ms.load(Relaxed)
    }

    fn touch(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_request_ms.store(now.as_millis() as u64, Relaxed);
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
