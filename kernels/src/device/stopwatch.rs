//! How long a device was busy with some of its work.

use std::time::Duration;

use super::Device;
use super::cuda::Event;
use crate::error::Result;

/// Two marks around work given to a device.
pub struct Stopwatch {
    begin: Event,
    end: Event,
}

impl Stopwatch {
    /// `None` for the CPU, whose work is done when it was given.
    ///
    /// # Errors
    /// `Driver`.
    pub fn new(device: &Device) -> Result<Option<Self>> {
        match device {
            Device::Cpu => Ok(None),
            Device::Cuda(gpu) => Ok(Some(Stopwatch { begin: Event::timed(gpu)?, end: Event::timed(gpu)? })),
        }
    }

    /// Work given from now on counts.
    ///
    /// # Errors
    /// `Driver`.
    pub fn begin(&self) -> Result<()> {
        self.begin.record()
    }

    /// Work given from now on counts no more.
    ///
    /// # Errors
    /// `Driver`.
    pub fn end(&self) -> Result<()> {
        self.end.record()
    }

    /// Device time between the two; waits for the second.
    ///
    /// # Errors
    /// `Driver`, also if the work failed.
    pub fn elapsed(&self) -> Result<Duration> {
        self.begin.until(&self.end)
    }
}
