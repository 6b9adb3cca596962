//! Small inputs of a step: filled on the host, sent to the device in one copy; and small results on their way back.

use std::ops::{Deref, DerefMut, Range};

use super::Device;
use super::cuda::{Event, Pinned};
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::tensor::{Shape, Tensor};
use crate::workspace::Workspace;

/// A run of device memory that tensors are taken from once, and its mirror on the host.
///
/// On the CPU the tensors themselves are written, and there is nothing to send.
pub struct Staging {
    arena: Workspace,
    mirror: Option<Mirror>,
}

struct Mirror {
    bytes: Pinned<u8>,
    /// End of what was written since the last copy.
    written: usize,
    /// The end of the last copy, until which the mirror must stay as it is.
    sent: Event,
    in_flight: bool,
}

/// A tensor of a [`Staging`].
pub struct Staged {
    tensor: Tensor,
    /// Of its first byte in the staging.
    offset: usize,
}

impl Deref for Staged {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

/// For ops; what the host fills goes by way of the staging.
impl DerefMut for Staged {
    fn deref_mut(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

impl Staging {
    /// Room for tensors of `bytes` bytes in all, each rounded up to 64.
    ///
    /// # Errors
    /// `OutOfMemory`, `Driver`.
    pub fn new(device: &Device, bytes: usize) -> Result<Self> {
        let mirror = match device {
            Device::Cpu => None,
            Device::Cuda(gpu) => Some(Mirror {
                bytes: Pinned::zeroed(gpu, bytes)?,
                written: 0,
                sent: Event::new(gpu)?,
                in_flight: false,
            }),
        };
        Ok(Staging { arena: Workspace::new(device, bytes)?, mirror })
    }

    /// The next tensor, zero. Those that are written to their end every time had better come first: a copy goes from the start to the
    /// last element written.
    ///
    /// # Errors
    /// `WorkspaceFull` if the staging was made too small.
    pub fn tensor(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Staged> {
        let tensor = self.arena.take(shape, dtype)?;
        let offset = (tensor.device_address() - self.arena.device_address()) as usize;
        Ok(Staged { tensor, offset })
    }

    /// Elements `range` of a tensor of this staging, to fill; they reach the device with [`send`](Self::send).
    ///
    /// # Errors
    /// `Driver`, if the copy before failed.
    ///
    /// # Panics
    /// If the range is outside the tensor, or `T` is not its dtype.
    pub fn elements<'a, T: Element>(&'a mut self, of: &'a mut Staged, range: Range<usize>) -> Result<&'a mut [T]> {
        assert!(of.dtype() == T::DTYPE, "staged tensor of {} filled as {}", of.dtype(), T::DTYPE);
        assert!(range.end <= of.shape().num_elements(), "elements {range:?} of a staged tensor {}", of.shape());
        let Some(mirror) = &mut self.mirror else { return Ok(&mut of.tensor.as_mut_slice::<T>()[range]) };
        if mirror.in_flight {
            mirror.sent.wait()?;
            mirror.in_flight = false;
        }
        let at = of.offset + range.start * size_of::<T>();
        let end = of.offset + range.end * size_of::<T>();
        mirror.written = mirror.written.max(end);
        let bytes = &mut mirror.bytes.as_mut_slice()[at..end];
        // SAFETY: staged tensors start at multiples of 64 bytes of page-locked memory, so `at` is aligned for `T`; any bytes are values of
        // an `Element`, and the borrow of `self` excludes others.
        Ok(unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), range.len()) })
    }

    /// Fills the first elements of a tensor of this staging.
    ///
    /// # Errors
    /// As [`elements`](Self::elements).
    ///
    /// # Panics
    /// As [`elements`](Self::elements).
    pub fn fill<T: Element>(&mut self, of: &mut Staged, values: &[T]) -> Result<()> {
        self.elements(of, 0..values.len())?.copy_from_slice(values);
        Ok(())
    }

    /// Puts one copy of all that was written on the device's stream.
    ///
    /// # Errors
    /// `Driver`.
    pub fn send(&mut self) -> Result<()> {
        let (Some(mirror), Device::Cuda(gpu)) = (&mut self.mirror, self.arena.device()) else { return Ok(()) };
        if mirror.written > 0 {
            // SAFETY: the arena is as large as the mirror, which is not written again before the event that follows the copy.
            unsafe {
                gpu.write_later(self.arena.device_address() as *mut u8, &mirror.bytes.as_slice()[..mirror.written])?;
            };
            mirror.sent.record()?;
            (mirror.written, mirror.in_flight) = (0, true);
        }
        Ok(())
    }
}

/// A place on the host for small results.
pub struct Readback<T: Element> {
    place: Place<T>,
}

enum Place<T: Element> {
    Host(Vec<T>),
    Pinned { elements: Pinned<T>, len: usize, arrived: Event },
}

impl<T: Element> Readback<T> {
    /// Room for `len` elements.
    ///
    /// # Errors
    /// `Driver` if the host has not enough memory to lock.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        let place = match device {
            Device::Cpu => Place::Host(Vec::with_capacity(len)),
            Device::Cuda(gpu) => {
                Place::Pinned { elements: Pinned::zeroed(gpu, len)?, len: 0, arrived: Event::new(gpu)? }
            }
        };
        Ok(Readback { place })
    }

    /// Asks for the elements of `from` as they are once all work before has run. What was asked for before must have been
    /// [waited for](Self::wait).
    ///
    /// # Errors
    /// `Driver`.
    ///
    /// # Panics
    /// If `from` is larger than the place, or of another dtype.
    pub fn begin(&mut self, from: &Tensor) -> Result<()> {
        assert!(from.dtype() == T::DTYPE, "tensor of {} read as {}", from.dtype(), T::DTYPE);
        match (&mut self.place, from.device()) {
            (Place::Pinned { elements, len, arrived }, Device::Cuda(gpu)) => {
                *len = from.shape().num_elements();
                let room = &mut elements.as_mut_slice()[..*len];
                // SAFETY: `from` holds these bytes, any of which are values of an `Element`; nobody looks at the room before the event.
                unsafe {
                    let bytes = std::slice::from_raw_parts_mut(room.as_mut_ptr().cast::<u8>(), from.size_bytes());
                    gpu.read_later(from.device_address() as *const u8, bytes)?;
                }
                arrived.record()
            }
            (Place::Host(host), _) => {
                host.clear();
                host.extend_from_slice(from.as_slice());
                Ok(())
            }
            (Place::Pinned { .. }, Device::Cpu) => unreachable!("results come from the device the place was made for"),
        }
    }

    /// Whether [`wait`](Self::wait) would return at once.
    ///
    /// # Errors
    /// `Driver`, also if the work before failed.
    pub fn is_done(&self) -> Result<bool> {
        match &self.place {
            Place::Host(_) => Ok(true),
            Place::Pinned { arrived, .. } => arrived.is_past(),
        }
    }

    /// What was asked for.
    ///
    /// # Errors
    /// `Driver`, also if the work before failed.
    pub fn wait(&mut self) -> Result<&[T]> {
        match &self.place {
            Place::Host(host) => Ok(host),
            Place::Pinned { elements, len, arrived } => {
                arrived.wait()?;
                Ok(&elements.as_slice()[..*len])
            }
        }
    }

    /// [`begin`](Self::begin) and [`wait`](Self::wait).
    ///
    /// # Errors
    /// As both.
    ///
    /// # Panics
    /// As [`begin`](Self::begin).
    pub fn read(&mut self, from: &Tensor) -> Result<&[T]> {
        self.begin(from)?;
        self.wait()
    }
}

impl<T: Element> Drop for Readback<T> {
    fn drop(&mut self) {
        // The place must outlive a copy into it; an error has no one to go to.
        let _ = self.wait();
    }
}
