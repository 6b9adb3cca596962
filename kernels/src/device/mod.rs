//! Where tensors live and ops run. Closed on purpose: ops are what grows, so each op matches on the device itself.

mod cpu;

use std::fmt;

pub(crate) use cpu::HostBuffer;

use crate::error::Result;

/// A place for memory and work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// The host: its memory, and the process-wide [`pool`](crate::pool) of threads.
    Cpu,
}

impl Device {
    /// Zeroed memory, owned by what is returned.
    pub(crate) fn alloc(&self, what: &'static str, bytes: usize) -> Result<HostBuffer> {
        match self {
            Device::Cpu => HostBuffer::zeroed(what, bytes),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
        }
    }
}
