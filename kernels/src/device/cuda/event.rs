//! Marks in a stream, to time what lies between two of them.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{result, sys};

use super::CudaDevice;
use crate::error::{KernelError, Result};

/// A point in a device's stream.
pub struct Event {
    device: Arc<CudaDevice>,
    event: sys::CUevent,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// # Errors
    /// `Driver`.
    pub fn new(device: &Arc<CudaDevice>) -> Result<Self> {
        device.bind()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|source| KernelError::Driver { what: "cuEventCreate", source })?;
        Ok(Event { device: device.clone(), event })
    }

    /// Marks the end of the work given to the stream so far.
    ///
    /// # Errors
    /// `Driver`.
    pub fn record(&self) -> Result<()> {
        // SAFETY: event and stream live.
        unsafe { result::event::record(self.event, self.device.stream()) }
            .map_err(|source| KernelError::Driver { what: "cuEventRecord", source })
    }

    /// Waits until the stream has passed this mark.
    ///
    /// # Errors
    /// `Driver`, also if work before the mark failed.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event lives.
        unsafe { result::event::synchronize(self.event) }
            .map_err(|source| KernelError::Driver { what: "cuEventSynchronize", source })
    }

    /// Device time from this mark to `end`; waits for `end`.
    ///
    /// # Errors
    /// `Driver`.
    pub fn until(&self, end: &Event) -> Result<Duration> {
        end.wait()?;
        // SAFETY: both events live and have been recorded.
        let millis = unsafe { result::event::elapsed(self.event, end.event) }
            .map_err(|source| KernelError::Driver { what: "cuEventElapsedTime", source })?;
        Ok(Duration::from_secs_f64(f64::from(millis) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}
