//! One rank: slots, batches, sampling, verification and proposers.
//!
//! A rank runs the steps it is sent and never decides what runs. It knows slots and tokens, not requests or text.

#![forbid(unsafe_code)]

pub mod bench;
mod checksum;
mod config;
mod drafted;
mod error;
mod features;
pub mod grammar;
mod graphs;
mod inputs;
mod load;
mod masks;
mod memory;
mod rank;
mod row_params;
mod runner;
mod sampler;
mod slots;
pub mod spec;
#[cfg(test)]
mod tests;
mod verify;

pub use config::{ActivationDtype, DeviceKind, WorkerConfig};
pub use drafthorse_model::MlaForm;
pub use error::{Result, WorkerError};
pub use load::Progress;
pub use memory::{MemoryPlan, Part};
pub use rank::spawn;
pub use slots::Slots;
pub use spec::SpeculateConfig;
