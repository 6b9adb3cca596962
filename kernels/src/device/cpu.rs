//! Host memory, aligned for the widest vectors and for whole cache lines.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::error::{KernelError, Result};

/// Start of every buffer: a cache line, and an AVX-512 vector.
pub(crate) const ALIGN: usize = 64;

/// Least distance of two bytes that surely lie on different pages.
const PAGE: usize = 4096;

/// What one thread touches in less time than it takes to start another.
const TOUCH_ALONE: usize = 16 << 20;

/// A block of zeroed host memory that is all there: no page is left to be found, and cleared, by the step that first writes to it.
/// (A step that came upon fresh huge pages of every layer's KV cache took twice its time.)
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
        let mut buffer = HostBuffer { address, layout };
        buffer.touch();
        Ok(buffer)
    }

    /// Writes to every page, on as many threads as pay.
    fn touch(&mut self) {
        // SAFETY: the memory is ours alone, as long as that, and holds zeros.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.layout.size()) };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(bytes.len() / TOUCH_ALONE).max(1);
        let share = bytes.len().div_ceil(threads).next_multiple_of(PAGE);
        std::thread::scope(|scope| {
            let mut shares = bytes.chunks_mut(share);
            let own = shares.next();
            for share in shares {
                scope.spawn(|| touch_pages(share));
            }
            own.map(touch_pages);
        });
    }

    pub(crate) fn address(&self) -> NonNull<u8> {
        self.address
    }
}

fn touch_pages(bytes: &mut [u8]) {
    for byte in bytes.iter_mut().step_by(PAGE) {
        // SAFETY: a reference is valid to write through; volatile, since a zero over a zero would be left out.
        unsafe { std::ptr::write_volatile(byte, 0) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this very layout in `zeroed`, freed once.
        unsafe { dealloc(self.address.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of the buffer that have memory, as Linux tells: 8 bytes a page, the highest bit set for one that is there.
    #[cfg(target_os = "linux")]
    fn pages_there(buffer: &HostBuffer) -> usize {
        use std::os::unix::fs::FileExt;
        let first = buffer.address.as_ptr() as usize / PAGE;
        let last = (buffer.address.as_ptr() as usize + buffer.layout.size() - 1) / PAGE;
        let mut pages = vec![0; (last - first + 1) * 8];
        std::fs::File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut pages, first as u64 * 8).unwrap();
        pages.chunks(8).filter(|page| page[7] & 0x80 != 0).count()
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn every_page_is_there_before_the_first_step() {
        for bytes in [1, PAGE, 3 * PAGE + 1, 5 * TOUCH_ALONE + 12_345] {
            let buffer = HostBuffer::zeroed("test", bytes).unwrap();
            assert!(pages_there(&buffer) >= bytes.div_ceil(PAGE), "{bytes} bytes");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn touching_brings_every_page() {
        // At this alignment Rust asks for pages that read as zeros and are not there yet, as the binary's allocator does at any.
        let layout = Layout::from_size_align(5 * TOUCH_ALONE + 12_345, 16).unwrap();
        // SAFETY: the size is not zero.
        let address = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        let mut buffer = HostBuffer { address, layout };
        let before = pages_there(&buffer);
        buffer.touch();
        let all = layout.size().div_ceil(PAGE);
        assert!(before < all && pages_there(&buffer) >= all, "{before} of {all} were there");
    }
}
