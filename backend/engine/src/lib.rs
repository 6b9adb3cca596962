//! Decides what runs next: requests, sequences, KV blocks, the scheduler, and the thread that drives the ranks.
//!
//! ```text
//! submit -> queue -> plan -> Step == Link ==> ranks
//!   sink <- events <- commit <- StepResult <==
//! ```
//!
//! Nothing here knows a device, a model or text. One thread owns all state; [`Engine`] is the handle that talks to it.

#![forbid(unsafe_code)]

mod block_manager;
mod config;
mod driver;
mod engine;
mod error;
mod executor;
mod pace;
mod prefix_cache;
mod request;
mod scheduler;
mod sequence;
mod stats;
#[cfg(test)]
mod testing;

pub use config::{ConfigError, EngineConfig};
pub use engine::{Engine, Limits};
pub use error::{EngineError, Result};
pub use request::{Event, EventSink, Finished, Request, RequestId, RequestTiming, Tokens, Usage};
pub use stats::{DRAFT_PLACES, STEP_TIME_BOUNDS_MS, Stats};
