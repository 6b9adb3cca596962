//! Weights in blocks of 16 outputs.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::{Format, PAD, Scales};
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::{KernelError, Result};
use crate::pool::{SharedMut, parallel_for};
use crate::simd::{LANES, Level};
use crate::tensor::Tensor;

/// A weight `[outputs, inputs]`, `[ceil(outputs / 16)]` blocks of `[padded inputs / F::LINE]` lines.
pub(crate) struct Packed<F: Format> {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// Lines of a block.
    pub(super) num_lines: usize,
    lines: Tensor,
    pub(super) scales: Option<Scales>,
    /// Blocks that a product has read.
    #[cfg(test)]
    pub(crate) read: std::sync::Mutex<std::collections::BTreeSet<usize>>,
    _format: std::marker::PhantomData<F>,
}

impl<F: Format> Packed<F> {
    /// A weight of zeros.
    ///
    /// # Errors
    /// `OutOfMemory`, `NotOnDevice` on a GPU: the layout is the CPU kernels' own.
    pub(crate) fn new(device: &Device, outputs: usize, inputs: usize, scales: Option<Scales>) -> Result<Self> {
        if *device != Device::Cpu {
            return Err(KernelError::NotOnDevice { op: F::OP, device: "a GPU" });
        }
        let num_lines = inputs.next_multiple_of(PAD) / F::LINE;
        let lines =
            Tensor::lazy_zeros(device, "weight", [outputs.div_ceil(LANES), num_lines, F::LINE_BYTES], DType::U8)?;
        Ok(Packed {
            outputs,
            inputs,
            num_lines,
            lines,
            scales,
            #[cfg(test)]
            read: std::sync::Mutex::default(),
            _format: std::marker::PhantomData,
        })
    }

    /// Overwrites rows from `first` on.
    ///
    /// # Errors
    /// `NotMultiple` if `values` are no whole rows, `Value` if they pass the last row.
    pub(crate) fn write_rows(&mut self, first: usize, values: &[F::Value]) -> Result<()> {
        let num_rows = self.whole_rows("values", first, values.len())?;
        let (inputs, block_bytes) = (self.inputs, self.block_bytes());
        let lines = SharedMut::new(self.lines.as_mut_slice::<u8>());
        // One task a block: rows of the same block share lines.
        let first_block = first / LANES;
        parallel_for((first + num_rows).div_ceil(LANES) - first_block, &|i| {
            let block = first_block + i;
            // SAFETY: each block comes once.
            let lines = unsafe { lines.slice(block * block_bytes..(block + 1) * block_bytes) };
            for row in (block * LANES).max(first)..(block * LANES + LANES).min(first + num_rows) {
                let values = &values[(row - first) * inputs..][..inputs];
                for (line, values) in lines.chunks_mut(F::LINE_BYTES).zip(values.chunks(F::LINE)) {
                    F::encode(line, row % LANES, values);
                }
            }
        });
        Ok(())
    }

    /// Overwrites rows and their scales from `first` on.
    ///
    /// # Errors
    /// As [`write_rows`](Self::write_rows) and [`Scales::write_rows`].
    pub(crate) fn write_scaled_rows(
        &mut self,
        first: usize,
        values: &[F::Value],
        scales: &[f32],
        offsets: &[f32],
    ) -> Result<()> {
        let num_rows = self.whole_rows("q", first, values.len())?;
        if let Some(own) = &mut self.scales {
            own.write_rows(F::OP, first, num_rows, scales, offsets)?;
        }
        self.write_rows(first, values)
    }

    /// The number of rows in `len` values, checked to lie inside the weight.
    fn whole_rows(&self, what: &'static str, first: usize, len: usize) -> Result<usize> {
        if !len.is_multiple_of(self.inputs) {
            return Err(KernelError::NotMultiple { op: F::OP, what, size: len, of: self.inputs });
        }
        let num_rows = len / self.inputs;
        if first + num_rows > self.outputs {
            let got = (first + num_rows) as i64;
            return Err(KernelError::Value { op: F::OP, arg: "last row", got, want: "at most the weight's outputs" });
        }
        Ok(num_rows)
    }

    /// The values of a row before scaling, as they are multiplied.
    pub(crate) fn raw_row(&self, row: usize) -> impl Iterator<Item = f32> + '_ {
        let block = &self.lines.as_slice::<u8>()[row / LANES * self.block_bytes()..][..self.block_bytes()];
        let lines = block.chunks(F::LINE_BYTES);
        lines.flat_map(move |line| (0..F::LINE).map(move |j| F::value(line, row % LANES, j))).take(self.inputs)
    }

    /// Dequantizes a row.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not `inputs` long.
    pub(crate) fn read_row<T: Float>(&self, row: usize, out: &mut [T]) {
        assert!(row < self.outputs, "row {row} of {}", self.outputs);
        assert!(out.len() == self.inputs, "a row of {} read into {}", self.inputs, out.len());
        let group = self.scales.as_ref().map_or(self.inputs, |scales| scales.group);
        let mut values = self.raw_row(row);
        for (g, out) in out.chunks_mut(group).enumerate() {
            // Minus zero adds nothing, not even to a zero's sign.
            let (scale, offset) = self.scales.as_ref().map_or((1.0, -0.0), |scales| scales.get(row, g));
            for (out, value) in out.iter_mut().zip(&mut values) {
                *out = T::from_f32(scale.mul_add(value, offset));
            }
        }
    }

    /// `[outputs, inputs]`.
    pub(crate) fn dims(&self) -> [usize; 2] {
        [self.outputs, self.inputs]
    }

    /// Groups of a row; 1 without scales.
    pub(super) fn num_groups(&self) -> usize {
        self.scales.as_ref().map_or(1, |scales| scales.num_groups)
    }

    /// [`Scales::expand`], if there are any.
    pub(super) fn expand_scales(
        &self,
        level: Level,
        groups: Range<usize>,
        blocks: Range<usize>,
        to: &mut [MaybeUninit<f32>],
    ) {
        if let Some(scales) = &self.scales {
            scales.expand(level, groups, blocks, to);
        }
    }

    /// Remembers what a product reads.
    #[cfg(test)]
    pub(super) fn note_read(&self, blocks: &Range<usize>) {
        self.read.lock().unwrap().extend(blocks.clone());
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.num_lines * F::LINE_BYTES
    }

    /// The first line of a block.
    pub(super) fn block(&self, block: usize) -> *const u8 {
        self.lines.as_slice::<u8>()[block * self.block_bytes()..].as_ptr()
    }

    /// Bytes of weights and scales.
    pub(crate) fn size_bytes(&self) -> usize {
        self.lines.size_bytes() + self.scales.as_ref().map_or(0, Scales::size_bytes)
    }

    pub(crate) fn device(&self) -> &Device {
        self.lines.device()
    }
}
