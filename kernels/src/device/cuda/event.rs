//! Marks in a stream, to time what lies between two of them.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{result, sys};

use super::{CudaDevice, failed};
use crate::error::Result;

/// A point in a device's stream.
pub struct Event {
    device: Arc<CudaDevice>,
    event: sys::CUevent,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// A mark that can be waited for; recording it costs least.
    ///
    /// # Errors
    /// `Driver`.
    pub fn new(device: &Arc<CudaDevice>) -> Result<Self> {
        Event::with(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// A mark for [`until`](Self::until) too.
    ///
    /// # Errors
    /// `Driver`.
    pub fn timed(device: &Arc<CudaDevice>) -> Result<Self> {
        Event::with(device, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(device: &Arc<CudaDevice>, flags: sys::CUevent_flags) -> Result<Self> {
        device.bind()?;
        let event = result::event::create(flags).map_err(failed("cuEventCreate"))?;
        Ok(Event { device: device.clone(), event })
    }

    /// Marks the end of the work given to the stream so far.
    ///
    /// # Errors
    /// `Driver`.
    pub fn record(&self) -> Result<()> {
        // SAFETY: event and stream live.
        unsafe { result::event::record(self.event, self.device.stream()) }.map_err(failed("cuEventRecord"))
    }

    /// Waits until the stream has passed this mark.
    ///
    /// # Errors
    /// `Driver`, also if work before the mark failed.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event lives.
        unsafe { result::event::synchronize(self.event) }.map_err(failed("cuEventSynchronize"))
    }

    /// Whether the stream has passed this mark.
    ///
    /// # Errors
    /// `Driver`, also if work before the mark failed.
    pub fn is_past(&self) -> Result<bool> {
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.event) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => answer.result().map(|()| true).map_err(failed("cuEventQuery")),
        }
    }

    /// Device time from this mark to `end`, both [timed](Self::timed); waits for `end`.
    ///
    /// # Errors
    /// `Driver`.
    pub fn until(&self, end: &Event) -> Result<Duration> {
        end.wait()?;
        // SAFETY: both events live and have been recorded.
        let millis = unsafe { result::event::elapsed(self.event, end.event) }.map_err(failed("cuEventElapsedTime"))?;
        Ok(Duration::from_secs_f64(f64::from(millis) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}
