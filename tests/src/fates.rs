//! What is done to random requests besides letting them run.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use drafthorse_control::FinishReason;
use drafthorse_engine::{Engine, Event, EventSink, RequestId};

/// How a request is meant to end; numbers are tokens heard before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fate {
    Ends,
    /// Before it is begun.
    TimesOut,
    CancelledAfter(usize),
    /// As by a stop string.
    FinishedAfter(usize),
    /// Its receiver is lost.
    DeafAfter(usize),
}

impl Fate {
    /// Sends a request's events on, and `None` instead of all that a lost receiver would have heard.
    pub fn sink(self, id: u64, sender: Sender<(u64, Option<Event>)>) -> EventSink {
        let mut heard = 0;
        Box::new(move |event| {
            if let (Event::Tokens(tokens), Fate::DeafAfter(after)) = (&event, self) {
                heard += tokens.ids.len();
                if heard >= after {
                    let _ = sender.send((id, None));
                    return false;
                }
            }
            sender.send((id, Some(event))).is_ok()
        })
    }

    /// Does what is due once so many tokens of the request were heard.
    pub fn act(self, engine: &Engine, id: u64, heard: usize) {
        match self {
            Fate::CancelledAfter(after) if heard >= after => engine.cancel(RequestId(id)),
            Fate::FinishedAfter(after) if heard >= after => engine.finish(RequestId(id), FinishReason::Stop, after),
            _ => {}
        }
    }
}

/// Waits until nothing runs and every block is free: a step in flight may hold blocks for a moment longer than its requests live.
///
/// # Panics
/// If blocks are still held after ten seconds.
pub fn wait_until_idle(engine: &Engine) {
    let begun = Instant::now();
    while engine.stats().free_blocks < engine.stats().total_blocks || !engine.is_idle() {
        assert!(begun.elapsed() < Duration::from_secs(10), "blocks have leaked: {:?}", engine.stats());
        std::thread::yield_now();
    }
}
