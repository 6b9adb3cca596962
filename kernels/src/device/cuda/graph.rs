//! A recorded sequence of launches that is replayed at the cost of one.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::{CudaDevice, failed};
use crate::error::{KernelError, Result};

/// Launches captured from a device's stream. Replays use the addresses and numbers of the capture.
pub struct Graph {
    device: Arc<CudaDevice>,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` launches, without running it.
    ///
    /// # Errors
    /// `work`'s own error, or `Driver` if it did what cannot be captured (allocate, synchronise, load a kernel).
    pub fn capture<E: From<KernelError>>(
        device: &Arc<CudaDevice>,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let driver = failed;
        device.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the device; capture is ended below whatever `work` returns.
        unsafe {
            result::stream::begin_capture(device.stream(), mode).map_err(driver("cuStreamBeginCapture"))?;
            let worked = work();
            let graph = result::stream::end_capture(device.stream());
            worked?;
            let graph = graph.map_err(driver("cuStreamEndCapture"))?;
            let mut executable = std::ptr::null_mut();
            sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0)
                .result()
                .map_err(driver("cuGraphInstantiate"))?;
            Ok(Graph { device: device.clone(), graph, executable })
        }
    }

    /// Puts one replay on the device's stream.
    ///
    /// # Errors
    /// `Driver`.
    pub fn launch(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the executable graph lives as long as `self`.
        unsafe { result::graph::launch(self.executable, self.device.stream()) }.map_err(failed("cuGraphLaunch"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        // SAFETY: made in `capture`, destroyed once, no replay is running.
        unsafe {
            let _ = result::graph::exec_destroy(self.executable);
            let _ = result::graph::destroy(self.graph);
        }
    }
}
