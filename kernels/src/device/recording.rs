//! Work that is recorded once and replayed at the cost of one launch.

use super::Device;
use super::cuda::Graph;
use crate::error::{KernelError, Result};

/// Ops in the order they were given, with the addresses and numbers they were given.
pub struct Recording {
    graph: Graph,
}

impl Device {
    /// Records the ops of `work` without running them. All of them must have run before with these shapes: what is loaded or
    /// planned at a first use cannot be recorded.
    ///
    /// # Errors
    /// `work`'s own, `NotOnDevice` on the CPU, `Driver` if the work is of a kind that cannot be recorded.
    pub fn record<E: From<KernelError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Recording, E> {
        match self {
            Device::Cpu => Err(KernelError::NotOnDevice { op: "record", device: "the CPU" }.into()),
            Device::Cuda(device) => Ok(Recording { graph: Graph::capture(device, work)? }),
        }
    }
}

impl Recording {
    /// Runs the ops after all work given to the device before.
    ///
    /// # Errors
    /// `Driver`.
    pub fn replay(&self) -> Result<()> {
        self.graph.launch()
    }
}
