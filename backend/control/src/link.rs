//! The seam between the engine and a rank.

use crate::{Step, StepResult};

/// Carries steps to one rank and its results back, in order.
pub trait Link: Send {
    /// Sends the next step; returns once it is on its way.
    ///
    /// # Errors
    /// If the rank is gone: the group has ended.
    fn send(&mut self, step: &Step) -> Result<(), LinkError>;

    /// Waits for the result of the oldest step not yet answered.
    ///
    /// # Errors
    /// As [`send`](Self::send), or if the rank reports a failure of its own.
    fn recv(&mut self) -> Result<StepResult, LinkError>;
}

/// The rank at the other end is lost, and its group with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    #[error("rank {rank} has stopped")]
    Closed { rank: u32 },
    #[error("rank {rank} failed: {reason}")]
    Failed { rank: u32, reason: String },
    #[error("rank {rank} answered step {got}, expected {want}")]
    OutOfStep { rank: u32, got: u64, want: u64 },
}
