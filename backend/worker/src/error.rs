//! What can go wrong on a rank. All of it ends the group; what fails a single row travels in its result instead.

use drafthorse_control::{RowError, Slot};
use drafthorse_kernels::KernelError;
use drafthorse_model::ModelError;

use crate::memory::Part;

/// A rank that did not load, or cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    #[error("{field} is {got}, must be {must}")]
    Setting { field: &'static str, got: String, must: String },

    #[error("{what} ({})", crate::memory::list(parts))]
    Memory { what: String, parts: Vec<Part> },

    #[error("step {got} came, expected step {want}")]
    OutOfStep { got: u64, want: u64 },

    /// The engine broke the contract of a step.
    #[error("step {step}, slot {slot}: {field} is {got}, must be {must}")]
    Step { step: u64, slot: Slot, field: &'static str, got: u64, must: String },

    #[error("step {step}, slot {slot}: {feature} is not supported by this worker")]
    Unsupported { step: u64, slot: Slot, feature: &'static str },

    /// A row failed where there is no request to tell: in a bench.
    #[error(transparent)]
    Row(RowError),

    #[error("the draft model cannot be used; speculate_method none serves without it")]
    Draft(#[source] ModelError),

    #[error(transparent)]
    Model(#[from] ModelError),

    #[error(transparent)]
    Kernel(#[from] KernelError),

    #[error("the rank panicked: {reason}")]
    Panicked { reason: String },

    #[error("cannot start the rank's thread")]
    Thread(#[source] std::io::Error),
}

/// This crate's result.
pub type Result<T, E = WorkerError> = std::result::Result<T, E>;

/// An error and all its causes on one line, each said once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string();
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        source = cause.source();
    }
    line
}
