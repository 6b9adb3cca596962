//! Host memory, aligned for the widest vectors and for whole cache lines.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::error::{KernelError, Result};

/// Start of every buffer: a cache line, and an AVX-512 vector.
pub(crate) const ALIGN: usize = 64;

/// A block of zeroed host memory. Pages that were never written cost no physical memory.
#[derive(Debug)]
pub(crate) struct HostBuffer {
    address: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the buffer is plain memory with one owner; who may read or write it is decided by the tensors over it.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    pub(crate) fn zeroed(what: &'static str, bytes: usize) -> Result<Self> {
        let oom = || KernelError::OutOfMemory { what, wanted: bytes, free: 0 };
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).map_err(|_| oom())?;
        // SAFETY: the layout's size is at least one byte.
        let address = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(oom)?;
        Ok(HostBuffer { address, layout })
    }

    pub(crate) fn address(&self) -> NonNull<u8> {
        self.address
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this very layout in `zeroed`, freed once.
        unsafe { dealloc(self.address.as_ptr(), self.layout) }
    }
}
