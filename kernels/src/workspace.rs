//! Scratch memory for a step: planned once, never grown.
//!
//! Tensors are taken from the top of one buffer and give their bytes back when dropped; the top then falls to the end of the
//! highest tensor still alive. The same sequence of takes and drops yields the same addresses, which captured graphs rely on.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::{Buffer, Device};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::{Owner, Shape, Tensor};

/// Tensors start on cache lines, so that vector loads need no prologue and threads share no line.
const ALIGN: usize = 64;

/// Most tensors alive at once; reserved at the start so that taking one never allocates.
const MAX_LIVE: usize = 256;

/// A bump arena of fixed size on one device.
pub struct Workspace {
    arena: Arc<Arena>,
    device: Device,
}

struct Arena {
    buffer: Buffer,
    capacity: usize,
    state: Mutex<State>,
}

struct State {
    /// End of each tensor in the order taken; `None` once dropped. Ends grow along the list.
    ends: Vec<Option<usize>>,
    top: usize,
    high_water: usize,
}

/// A tensor's claim on its part of the arena.
pub(crate) struct Lease {
    arena: Arc<Arena>,
    index: usize,
}

impl Workspace {
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(device: &Device, capacity: usize) -> Result<Self> {
        let buffer = device.alloc("workspace", capacity)?;
        let state = Mutex::new(State { ends: Vec::with_capacity(MAX_LIVE), top: 0, high_water: 0 });
        Ok(Workspace { arena: Arc::new(Arena { buffer, capacity, state }), device: device.clone() })
    }

    /// Takes a tensor whose elements are whatever was there before.
    ///
    /// # Errors
    /// `WorkspaceFull` if the plan was too small.
    pub fn take(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        let wanted = shape.num_elements() * dtype.bytes();
        let mut state = self.arena.lock();
        let start = state.top;
        let end = start + wanted.next_multiple_of(ALIGN);
        if end > self.arena.capacity || state.ends.len() == MAX_LIVE {
            return Err(KernelError::WorkspaceFull { capacity: self.arena.capacity, used: start, wanted });
        }
        state.ends.push(Some(end));
        state.top = end;
        state.high_water = state.high_water.max(end);
        let lease = Lease { arena: self.arena.clone(), index: state.ends.len() - 1 };
        drop(state);
        // SAFETY: start..end lies inside the buffer, is aligned, and belongs to this lease alone until it drops: every other
        // live lease ends at or before `start`, and later ones begin at or after `end`.
        unsafe {
            let address = self.arena.buffer.address().add(start);
            Ok(Tensor::from_raw(address, shape, dtype, self.device.clone(), Owner::Lease(lease)))
        }
    }

    /// Where the first tensor lies.
    pub(crate) fn device_address(&self) -> u64 {
        self.arena.buffer.address().as_ptr() as u64
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Most bytes ever taken at once: what the plan should have been.
    pub fn high_water_bytes(&self) -> usize {
        self.arena.lock().high_water
    }

    pub fn capacity_bytes(&self) -> usize {
        self.arena.capacity
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workspace of {} bytes on {}", self.arena.capacity, self.device)
    }
}

impl Arena {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while the lock is held, and the state is valid between any two statements.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.arena.lock();
        state.ends[self.index] = None;
        while let Some(None) = state.ends.last() {
            state.ends.pop();
        }
        state.top = state.ends.last().copied().flatten().unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(tensor: &Tensor) -> usize {
        tensor.as_slice::<f32>().as_ptr() as usize
    }

    #[test]
    fn memory_returns_once_everything_above_is_gone() {
        let workspace = Workspace::new(&Device::Cpu, 1024).unwrap();
        let a = workspace.take([16], DType::F32).unwrap();
        let b = workspace.take([16], DType::F32).unwrap();
        let c = workspace.take([16], DType::F32).unwrap();
        let (at_b, at_c) = (address(&b), address(&c));
        drop(b);
        let d = workspace.take([16], DType::F32).unwrap();
        assert!(address(&d) > at_c, "b's hole lies under c, which lives");
        drop(d);
        drop(c);
        assert_eq!(address(&workspace.take([16], DType::F32).unwrap()), at_b, "the top fell back to a");
        drop(a);
        assert_eq!(workspace.high_water_bytes(), 256);
    }

    #[test]
    fn a_full_workspace_says_so() {
        let workspace = Workspace::new(&Device::Cpu, 128).unwrap();
        let _a = workspace.take([16], DType::F32).unwrap();
        let err = workspace.take([32], DType::F32).unwrap_err();
        assert_eq!(err.to_string(), "workspace holds 128 bytes, 64 are taken and 128 more were asked for");
    }
}
