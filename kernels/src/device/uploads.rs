//! Weights on their way to a device: pieces of them are read into a few buffers in turn, so that one is filled while another is sent.

use std::cell::Cell;
use std::ops::Range;

use super::Device;
use super::cuda::{Event, Pinned};
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

/// One is filled and one is sent; one more keeps both at it when they take turns unevenly.
const BUFFERS: usize = 3;

/// Buffers for pieces: page-locked for a GPU, so that copies run beside the host; one plain buffer for the CPU.
pub struct Uploads {
    device: Device,
    buffers: Vec<Buffer>,
    next: usize,
}

enum Buffer {
    Host(Vec<u8>),
    Pinned { bytes: Pinned<u8>, sent: Event, in_flight: Cell<bool> },
}

/// A piece, to be filled and then sent.
pub struct Upload<'a> {
    buffer: &'a mut Buffer,
    len: usize,
}

impl Uploads {
    pub fn new(device: &Device) -> Self {
        Uploads { device: device.clone(), buffers: Vec::new(), next: 0 }
    }

    /// A piece of `len` bytes, whatever they are. Waits until what was sent from its buffer has arrived.
    ///
    /// # Errors
    /// `Driver`, also if a copy before failed.
    pub fn piece(&mut self, len: usize) -> Result<Upload<'_>> {
        let index = self.next;
        match &self.device {
            Device::Cpu => {
                if self.buffers.is_empty() {
                    self.buffers.push(Buffer::Host(Vec::new()));
                }
                if let Buffer::Host(bytes) = &mut self.buffers[0] {
                    bytes.resize(bytes.len().max(len), 0);
                }
            }
            Device::Cuda(gpu) => {
                if let Some(buffer) = self.buffers.get(index) {
                    buffer.wait()?;
                }
                let fits =
                    |buffer: &Buffer| matches!(buffer, Buffer::Pinned { bytes, .. } if bytes.as_slice().len() >= len);
                if !self.buffers.get(index).is_some_and(fits) {
                    let sent = Event::new(gpu)?;
                    let made = Buffer::Pinned { bytes: Pinned::zeroed(gpu, len)?, sent, in_flight: Cell::new(false) };
                    match self.buffers.get_mut(index) {
                        Some(buffer) => *buffer = made,
                        None => self.buffers.push(made),
                    }
                }
                self.next = (index + 1) % BUFFERS;
            }
        }
        Ok(Upload { buffer: &mut self.buffers[index], len })
    }
}

impl Buffer {
    fn wait(&self) -> Result<()> {
        match self {
            Buffer::Pinned { sent, in_flight, .. } if in_flight.replace(false) => sent.wait(),
            _ => Ok(()),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Its memory must outlive the copy; an error has no one to go to.
        let _ = self.wait();
    }
}

impl Upload<'_> {
    pub fn bytes(&self) -> &[u8] {
        match &*self.buffer {
            Buffer::Host(bytes) => &bytes[..self.len],
            Buffer::Pinned { bytes, .. } => &bytes.as_slice()[..self.len],
        }
    }

    /// The bytes, to fill.
    ///
    /// # Panics
    /// If some have been sent.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut *self.buffer {
            Buffer::Host(bytes) => &mut bytes[..self.len],
            Buffer::Pinned { bytes, in_flight, .. } => {
                assert!(!in_flight.get(), "a piece is changed while it is sent");
                &mut bytes.as_mut_slice()[..self.len]
            }
        }
    }

    /// Bytes `range`, in native order, become the elements of `to`. A GPU may still be copying when this returns; what its stream
    /// runs next sees them.
    ///
    /// # Errors
    /// `Value` if `to` is not as many bytes, `Driver`.
    ///
    /// # Panics
    /// If the range is outside the piece, or `to` is on another device.
    pub fn send(&self, range: Range<usize>, to: &mut Tensor) -> Result<()> {
        let from = &self.bytes()[range];
        if from.len() != to.size_bytes() {
            let want = "the bytes of the tensor";
            return Err(KernelError::Value { op: "upload", arg: "bytes", got: from.len() as i64, want });
        }
        let address = to.device_address() as *mut u8;
        match (&*self.buffer, to.device()) {
            (Buffer::Host(_), Device::Cpu) => {
                // SAFETY: the tensor is as many bytes of host memory, which `&mut` makes ours, and any bytes are values of an `Element`.
                unsafe { address.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
                Ok(())
            }
            (Buffer::Pinned { sent, in_flight, .. }, Device::Cuda(gpu)) => {
                // SAFETY: the tensor is as many bytes of the device's memory; the buffer is neither changed nor freed before the event.
                unsafe { gpu.write_later(address, from)? };
                sent.record()?;
                in_flight.set(true);
                Ok(())
            }
            _ => panic!("a piece for one device is sent to another"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::testing::gpu;

    /// Sends 7 pieces of growing and shrinking length into the rows of one tensor.
    fn sent(device: &Device) -> Vec<i32> {
        let mut uploads = Uploads::new(device);
        let mut to = Tensor::zeros(device, "t", [7, 50_000], DType::I32).unwrap();
        for (i, rows) in [(0..1), (1..4), (4..5), (5..7)].into_iter().enumerate() {
            let mut piece = uploads.piece(rows.len() * 200_000).unwrap();
            for (j, word) in piece.bytes_mut().chunks_mut(4).enumerate() {
                word.copy_from_slice(&((i * 1_000_000 + j) as i32).to_ne_bytes());
            }
            for (at, row) in rows.enumerate() {
                piece.send(at * 200_000..(at + 1) * 200_000, &mut to.rows_mut(row..row + 1)).unwrap();
            }
        }
        to.to_vec().unwrap()
    }

    #[test]
    fn pieces_arrive_whole() {
        let values = sent(&Device::Cpu);
        assert_eq!([values[0], values[49_999], values[50_000], values[4 * 50_000]], [0, 49_999, 1_000_000, 2_000_000]);
        assert_eq!(values[7 * 50_000 - 1], 3_099_999);
        let mut uploads = Uploads::new(&Device::Cpu);
        let mut small = Tensor::zeros(&Device::Cpu, "t", [2], DType::I32).unwrap();
        let error = uploads.piece(12).unwrap().send(0..12, &mut small).unwrap_err();
        assert_eq!(error.to_string(), "upload: bytes is 12, expected the bytes of the tensor");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn pieces_arrive_whole_on_a_gpu() {
        assert!(sent(&gpu()) == sent(&Device::Cpu));
    }
}
