//! Host memory, aligned for the widest vectors and for whole cache lines.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::MmapMut;

use crate::error::{KernelError, Result};

/// Start of every buffer: a cache line, and an AVX-512 vector.
pub(crate) const ALIGN: usize = 64;

/// Least distance of two bytes that surely lie on different pages.
const PAGE: usize = 4096;

/// What one thread touches in less time than it takes to start another.
const TOUCH_ALONE: usize = 16 << 20;

/// From this size on a buffer is a mapping of its own: it takes huge pages, and no more memory than its size, which an allocator's
/// heap would round up to what suits it.
const OWN_MAPPING: usize = 1 << 20;

/// A block of zeroed host memory that is all there: no page is left to be found, and cleared, by the step that first writes to it.
/// (A step that came upon fresh huge pages of every layer's KV cache took twice its time.)
#[derive(Debug)]
pub(crate) struct HostBuffer {
    address: NonNull<u8>,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Heap(Layout),
    Mapped(#[expect(dead_code, reason = "held until the buffer goes")] MmapMut),
}

// SAFETY: the buffer is plain memory with one owner; who may read or write it is decided by the tensors over it.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// # Errors
    /// `OutOfMemory`.
    pub(crate) fn zeroed(what: &'static str, bytes: usize) -> Result<Self> {
        HostBuffer::new(what, bytes, true)
    }

    /// One whose pages come as they are written to, if it is large: for what is written before any step, or never, and then costs nothing.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(crate) fn lazy(what: &'static str, bytes: usize) -> Result<Self> {
        HostBuffer::new(what, bytes, false)
    }

    fn new(what: &'static str, bytes: usize, is_there: bool) -> Result<Self> {
        let oom = || KernelError::OutOfMemory { what, wanted: bytes, free: 0 };
        if bytes >= OWN_MAPPING {
            return Self::mapped(bytes, is_there).map_err(|_| oom());
        }
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).map_err(|_| oom())?;
        // SAFETY: the layout's size is at least one byte.
        let address = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(oom)?;
        // SAFETY: the memory is ours alone, as long as that, and holds zeros.
        touch_pages(unsafe { std::slice::from_raw_parts_mut(address.as_ptr(), layout.size()) });
        Ok(HostBuffer { address, memory: Memory::Heap(layout) })
    }

    fn mapped(bytes: usize, is_there: bool) -> std::io::Result<Self> {
        let mut mapping = MmapMut::map_anon(bytes)?;
        // A kernel without huge pages does without.
        #[cfg(target_os = "linux")]
        let _ = mapping.advise(Advice::HugePage);
        if is_there {
            touch(&mut mapping);
        }
        let address = NonNull::new(mapping.as_mut_ptr()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(HostBuffer { address, memory: Memory::Mapped(mapping) })
    }

    pub(crate) fn address(&self) -> NonNull<u8> {
        self.address
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let Memory::Heap(layout) = self.memory {
            // SAFETY: allocated with this very layout in `zeroed`, freed once.
            unsafe { dealloc(self.address.as_ptr(), layout) }
        }
    }
}

/// Writes to every page, on as many threads as pay.
fn touch(bytes: &mut [u8]) {
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

/// Writes to every page. Volatile, since a zero over a zero would be left out.
fn touch_pages(bytes: &mut [u8]) {
    for byte in bytes.iter_mut().step_by(PAGE) {
        // SAFETY: a reference is valid to write through.
        unsafe { std::ptr::write_volatile(byte, 0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of these bytes' pages those that have memory, as Linux tells: 8 bytes a page, the highest bit set for one that is there.
    #[cfg(target_os = "linux")]
    fn pages_there(address: *const u8, len: usize) -> usize {
        use std::os::unix::fs::FileExt;
        let (first, last) = (address as usize / PAGE, (address as usize + len - 1) / PAGE);
        let mut pages = vec![0; (last - first + 1) * 8];
        std::fs::File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut pages, first as u64 * 8).unwrap();
        pages.chunks(8).filter(|page| page[7] & 0x80 != 0).count()
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn every_page_is_there_before_the_first_step() {
        for bytes in [1, PAGE, 3 * PAGE + 1, OWN_MAPPING, 5 * TOUCH_ALONE + 12_345] {
            let buffer = HostBuffer::zeroed("test", bytes).unwrap();
            assert!(pages_there(buffer.address.as_ptr(), bytes) >= bytes.div_ceil(PAGE), "{bytes} bytes");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_is_lazy_costs_nothing_before_it_is_written() {
        let bytes = 5 * OWN_MAPPING;
        let mut buffer = HostBuffer::lazy("test", bytes).unwrap();
        assert_eq!(pages_there(buffer.address.as_ptr(), bytes), 0);
        // SAFETY: the first byte of what is ours alone.
        unsafe { *buffer.address.as_mut() = 1 };
        assert!(pages_there(buffer.address.as_ptr(), bytes) > 0);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn touching_brings_every_page() {
        let mut mapping = MmapMut::map_anon(5 * TOUCH_ALONE + 12_345).unwrap();
        let (address, len) = (mapping.as_ptr(), mapping.len());
        assert_eq!(pages_there(address, len), 0);
        touch(&mut mapping);
        assert_eq!(pages_there(address, len), len.div_ceil(PAGE));
    }
}
