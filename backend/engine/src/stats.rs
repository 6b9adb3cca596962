//! Counters that the engine thread writes and anyone may read, without a lock on the path of a step.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use drafthorse_control::Timing;

/// Upper bounds of the step time buckets, in milliseconds; one more bucket takes what is longer.
pub const STEP_TIME_BOUNDS_MS: [u64; 10] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

/// Drafts of one row that are told apart; no proposer makes more.
pub const DRAFT_PLACES: usize = 8;

/// A moment's view of the engine. Totals count up from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that hold a slot.
    pub running: usize,
    /// Requests without one: not yet begun, or preempted.
    pub waiting: usize,
    pub total_blocks: usize,
    /// Blocks no sequence holds; cached ones that can be evicted among them.
    pub free_blocks: usize,
    /// Blocks that a prompt can find, in use or not.
    pub cached_blocks: usize,
    pub steps: u64,
    /// Time rank 0 spent on all steps.
    pub step_time: Duration,
    /// Time its GPU was busy with them, if that is measured.
    pub device_time: Duration,
    /// Steps by time, see [`STEP_TIME_BOUNDS_MS`]; not cumulative.
    pub step_time_buckets: [u64; STEP_TIME_BOUNDS_MS.len() + 1],
    /// Processor time of the engine thread between steps: planning, committing, delivering.
    pub scheduler_time: Duration,
    /// Prompt tokens of all admitted requests.
    pub prompt_tokens: u64,
    /// Tokens run through the model: chunks, decodes and drafts.
    pub computed_tokens: u64,
    pub output_tokens: u64,
    pub drafts_verified: u64,
    pub drafts_accepted: u64,
    /// Rows that verified drafts.
    pub draft_rows: u64,
    /// By place: rows that verified a draft there, and where it held.
    pub verified_at: [u64; DRAFT_PLACES],
    pub accepted_at: [u64; DRAFT_PLACES],
    /// Time rank 0 spent on sampling and verifying, and on making drafts.
    pub sample_time: Duration,
    pub propose_time: Duration,
    pub preemptions: u64,
    /// Prompt tokens looked up in the prefix cache, and found there.
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub finished: u64,
    /// Failed requests, cancelled ones not among them.
    pub failed: u64,
    pub cancelled: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        /// The totals of [`Stats`], as the engine thread adds to them.
        #[derive(Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            fn read_into(&self, stats: &mut Stats) {
                $(stats.$name = self.$name.load(Relaxed);)*
            }
        }
    };
}

counters!(
    steps,
    prompt_tokens,
    computed_tokens,
    output_tokens,
    drafts_verified,
    drafts_accepted,
    draft_rows,
    preemptions,
    prefix_queries,
    prefix_hits,
    finished,
    failed,
    cancelled
);

/// Adds to a counter of which the engine thread is the only writer.
pub(crate) fn add(counter: &AtomicU64, n: usize) {
    counter.store(counter.load(Relaxed) + n as u64, Relaxed);
}

fn read(counters: &[AtomicU64; DRAFT_PLACES]) -> [u64; DRAFT_PLACES] {
    std::array::from_fn(|at| counters[at].load(Relaxed))
}

/// What the engine thread and its callers share.
#[derive(Default)]
pub(crate) struct Shared {
    /// Requests submitted and not ended.
    live: AtomicUsize,
    pub(crate) draining: AtomicBool,
    pub(crate) running: AtomicUsize,
    pub(crate) total_blocks: AtomicUsize,
    pub(crate) free_blocks: AtomicUsize,
    pub(crate) cached_blocks: AtomicUsize,
    pub(crate) counters: Counters,
    verified_at: [AtomicU64; DRAFT_PLACES],
    accepted_at: [AtomicU64; DRAFT_PLACES],
    step_nanos: AtomicU64,
    device_nanos: AtomicU64,
    sample_nanos: AtomicU64,
    propose_nanos: AtomicU64,
    step_time_buckets: [AtomicU64; STEP_TIME_BOUNDS_MS.len() + 1],
    scheduler_nanos: AtomicU64,
    end: Mutex<End>,
}

#[derive(Default)]
struct End {
    reason: Option<String>,
    on_stop: Vec<Box<dyn FnOnce(&str) + Send>>,
}

impl Shared {
    /// Counts a request in, unless `max` are live already: then their number.
    pub(crate) fn try_begin_request(&self, max: usize) -> Result<(), usize> {
        self.live.fetch_update(SeqCst, SeqCst, |live| (live < max).then_some(live + 1)).map(|_| ())
    }

    pub(crate) fn request_ended(&self) {
        self.live.fetch_sub(1, SeqCst);
    }

    pub(crate) fn live(&self) -> usize {
        self.live.load(SeqCst)
    }

    /// A row verified some drafts, of which the first `accepted` held.
    pub(crate) fn verified(&self, verified: usize, accepted: usize) {
        add(&self.counters.drafts_verified, verified);
        add(&self.counters.drafts_accepted, accepted);
        add(&self.counters.draft_rows, usize::from(verified > 0));
        self.verified_at.iter().take(verified).for_each(|counter| add(counter, 1));
        self.accepted_at.iter().take(accepted).for_each(|counter| add(counter, 1));
    }

    pub(crate) fn step_took(&self, timing: &Timing) {
        let (time, device) = (timing.forward + timing.sample + timing.propose, timing.device);
        add(&self.sample_nanos, timing.sample.as_nanos() as usize);
        add(&self.propose_nanos, timing.propose.as_nanos() as usize);
        let bucket = STEP_TIME_BOUNDS_MS.partition_point(|&bound| Duration::from_millis(bound) < time);
        add(&self.step_time_buckets[bucket], 1);
        add(&self.step_nanos, time.as_nanos() as usize);
        add(&self.device_nanos, device.as_nanos() as usize);
        add(&self.counters.steps, 1);
    }

    pub(crate) fn scheduler_took(&self, time: Duration) {
        add(&self.scheduler_nanos, time.as_nanos() as usize);
    }

    pub(crate) fn read(&self) -> Stats {
        let running = self.running.load(Relaxed);
        let mut stats = Stats {
            running,
            waiting: self.live().saturating_sub(running),
            total_blocks: self.total_blocks.load(Relaxed),
            free_blocks: self.free_blocks.load(Relaxed),
            cached_blocks: self.cached_blocks.load(Relaxed),
            step_time: Duration::from_nanos(self.step_nanos.load(Relaxed)),
            verified_at: read(&self.verified_at),
            accepted_at: read(&self.accepted_at),
            sample_time: Duration::from_nanos(self.sample_nanos.load(Relaxed)),
            propose_time: Duration::from_nanos(self.propose_nanos.load(Relaxed)),
            device_time: Duration::from_nanos(self.device_nanos.load(Relaxed)),
            scheduler_time: Duration::from_nanos(self.scheduler_nanos.load(Relaxed)),
            ..Stats::default()
        };
        for (bucket, counter) in stats.step_time_buckets.iter_mut().zip(&self.step_time_buckets) {
            *bucket = counter.load(Relaxed);
        }
        self.counters.read_into(&mut stats);
        stats
    }

    /// Why the engine has stopped, if it has.
    pub(crate) fn stopped(&self) -> Option<String> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).reason.clone()
    }

    /// The first reason counts.
    pub(crate) fn stop(&self, reason: &str) {
        let callbacks = {
            let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
            if end.reason.is_some() {
                return;
            }
            end.reason = Some(reason.to_owned());
            std::mem::take(&mut end.on_stop)
        };
        for callback in callbacks {
            callback(reason);
        }
    }

    /// Calls back when the engine stops, or now if it has.
    pub(crate) fn on_stop(&self, callback: Box<dyn FnOnce(&str) + Send>) {
        let reason = {
            let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
            match &end.reason {
                Some(reason) => reason.clone(),
                None => return end.on_stop.push(callback),
            }
        };
        callback(&reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_counted_in_the_bucket_whose_bound_it_reaches() {
        let shared = Shared::default();
        for ms in [0, 1, 3, 100, 5000] {
            shared.step_took(&Timing { forward: Duration::from_millis(ms), ..Timing::default() });
        }
        let stats = shared.read();
        assert_eq!(stats.step_time_buckets, [2, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]);
        assert_eq!((stats.steps, stats.step_time), (5, Duration::from_millis(5104)));
    }

    #[test]
    fn drafts_are_counted_by_their_place() {
        let shared = Shared::default();
        for (verified, accepted) in [(3, 3), (3, 1), (2, 0), (0, 0)] {
            shared.verified(verified, accepted);
        }
        let stats = shared.read();
        assert_eq!((stats.drafts_verified, stats.drafts_accepted, stats.draft_rows), (8, 4, 3));
        assert_eq!(
            (stats.verified_at[..4].to_vec(), stats.accepted_at[..4].to_vec()),
            (vec![3, 3, 2, 0], vec![2, 1, 1, 0])
        );
    }

    #[test]
    fn the_first_reason_to_stop_counts_and_latecomers_hear_it() {
        let (sender, heard) = std::sync::mpsc::channel();
        let hear = || {
            let sender = sender.clone();
            Box::new(move |reason: &str| sender.send(reason.to_owned()).unwrap())
        };
        let shared = Shared::default();
        shared.on_stop(hear());
        assert_eq!(shared.stopped(), None);
        shared.stop("rank 1 has stopped");
        shared.stop("dropped");
        shared.on_stop(hear());
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), ["rank 1 has stopped", "rank 1 has stopped"]);
    }
}
