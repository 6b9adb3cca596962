//! Scales and offsets of groups of weights: `w = scale * q + offset`.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::f16;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::simd::{F32x16, Kernel, LANES, Level};
use crate::tensor::Tensor;

/// What is added to `scale * q`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offset {
    /// Nothing is stored; the middle of q's range stands for zero.
    Symmetric,
    /// A `q` that stands for zero, per group: `w = scale * (q - zero)`.
    ZeroPoint,
    /// A weight that `q = 0` stands for, per group: `w = scale * q + min`.
    Min,
}

/// Numbers of one group of one block when expanded: 16 scales, 16 offsets.
pub(super) const EXPANDED: usize = 2 * LANES;

/// A record for each block of 16 outputs and each group: 16 scales, then 16 zero points or minima where they are stored.
pub(crate) struct Scales {
    /// Inputs that share a scale.
    pub(super) group: usize,
    pub(super) num_groups: usize,
    layout: Layout,
    outputs: usize,
    records: Tensor,
}

/// How to read a record.
#[derive(Clone, Copy, Debug)]
struct Layout {
    offset: Offset,
    /// Minus the q that stands for zero if symmetric.
    minus_center: f32,
    /// Whether numbers are f16, as they stay while all are exact in it.
    half: bool,
}

impl Layout {
    /// Numbers of a record.
    const fn numbers(self) -> usize {
        match self.offset {
            Offset::Symmetric => LANES,
            Offset::ZeroPoint | Offset::Min => 2 * LANES,
        }
    }

    const fn bytes(self) -> usize {
        self.numbers() * if self.half { 2 } else { 4 }
    }

    /// The scales and offsets of 16 outputs.
    ///
    /// # Safety
    /// `record` must point to a record of this layout, and the CPU must have the instructions of `V`.
    #[inline(always)]
    unsafe fn load<V: F32x16>(self, record: *const u8) -> (V, V) {
        // SAFETY: passed on to the caller.
        unsafe {
            let scale = self.number::<V>(record, 0);
            let offset = match self.offset {
                Offset::Symmetric => scale.mul(V::splat(self.minus_center)),
                Offset::ZeroPoint => scale.mul(self.number::<V>(record, LANES)).mul(V::splat(-1.0)),
                Offset::Min => self.number::<V>(record, LANES),
            };
            (scale, offset)
        }
    }

    /// Sixteen numbers of a record, from number `at` on.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    #[inline(always)]
    unsafe fn number<V: F32x16>(self, record: *const u8, at: usize) -> V {
        // SAFETY: passed on to the caller.
        unsafe { if self.half { V::load_f16(record.add(at * 2)) } else { V::load(record.add(at * 4).cast()) } }
    }
}

/// Reads records into f32, `[groups][blocks]` of 16 scales and 16 offsets.
struct Expand {
    layout: Layout,
    /// The first group's record of the first block.
    records: *const u8,
    block_bytes: usize,
    num_groups: usize,
    num_blocks: usize,
    to: *mut f32,
}

impl Kernel for Expand {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        for group in 0..self.num_groups {
            for block in 0..self.num_blocks {
                // SAFETY: `Scales::expand` gave records of these groups and blocks, and room for what they hold.
                unsafe {
                    let record = self.records.add(block * self.block_bytes + group * self.layout.bytes());
                    // The same place in the next blocks, as their weights are asked for.
                    V::prefetch(record.wrapping_add(self.num_blocks * self.block_bytes));
                    let (scale, offset) = self.layout.load::<V>(record);
                    let to = self.to.add((group * self.num_blocks + block) * EXPANDED);
                    scale.store(to);
                    offset.store(to.add(LANES));
                }
            }
        }
    }
}

impl Scales {
    /// Scales of zero. `group` is `None` for one scale a row; `center` is the q that stands for zero if symmetric.
    ///
    /// # Errors
    /// `Value` if the group is not 32, 64 or 128, `NotMultiple` if it does not divide `inputs`, `OutOfMemory`.
    pub(crate) fn new(
        device: &Device,
        op: &'static str,
        outputs: usize,
        inputs: usize,
        group: Option<usize>,
        offset: Offset,
        center: f32,
    ) -> Result<Self> {
        if let Some(group) = group {
            if ![32, 64, 128].contains(&group) {
                return Err(KernelError::Value { op, arg: "group", got: group as i64, want: "32, 64 or 128" });
            }
            if !inputs.is_multiple_of(group) {
                return Err(KernelError::NotMultiple { op, what: "in", size: inputs, of: group });
            }
        }
        let group = group.unwrap_or(inputs).max(1);
        let layout = Layout { offset, minus_center: -center, half: true };
        let num_groups = inputs.div_ceil(group);
        let records = Self::records(device, outputs, num_groups, layout)?;
        Ok(Scales { group, num_groups, layout, outputs, records })
    }

    fn records(device: &Device, outputs: usize, num_groups: usize, layout: Layout) -> Result<Tensor> {
        Tensor::lazy_zeros(device, "scales", [outputs.div_ceil(LANES), num_groups, layout.bytes()], DType::U8)
    }

    /// Overwrites rows from `first` on; `offsets` is empty if they are not stored.
    ///
    /// # Errors
    /// `Value` if lengths disagree, `OutOfMemory` when the first scale comes that f16 cannot hold.
    pub(crate) fn write_rows(
        &mut self,
        op: &'static str,
        first: usize,
        num_rows: usize,
        scales: &[f32],
        offsets: &[f32],
    ) -> Result<()> {
        let want = num_rows * self.num_groups;
        let want_offsets = if self.layout.offset == Offset::Symmetric { 0 } else { want };
        for (arg, got, want) in [("scales", scales.len(), want), ("offsets", offsets.len(), want_offsets)] {
            if got != want {
                return Err(KernelError::Shape { op, arg, got: [got].into(), want: [want].into() });
            }
        }
        if self.layout.half && !scales.iter().chain(offsets).all(|&number| exact_in_f16(number)) {
            self.widen()?;
        }
        for (i, &scale) in scales.iter().enumerate() {
            let (row, group) = (first + i / self.num_groups, i % self.num_groups);
            self.set(row, group, 0, scale);
            if let Some(&offset) = offsets.get(i) {
                self.set(row, group, LANES, offset);
            }
        }
        Ok(())
    }

    /// The scale of a row's group, and what to add after scaling.
    pub(crate) fn get(&self, row: usize, group: usize) -> (f32, f32) {
        let scale = self.number(row, group, 0);
        let offset = match self.layout.offset {
            Offset::Symmetric => scale * self.layout.minus_center,
            Offset::ZeroPoint => -(scale * self.number(row, group, LANES)),
            Offset::Min => self.number(row, group, LANES),
        };
        (scale, offset)
    }

    /// Reads the scales and offsets of some groups and blocks into f32, `[groups][blocks]` of [`EXPANDED`].
    ///
    /// # Panics
    /// If there are no such groups or blocks, or `to` is too small.
    pub(super) fn expand(&self, level: Level, groups: Range<usize>, blocks: Range<usize>, to: &mut [MaybeUninit<f32>]) {
        let (bytes, block_bytes) = (self.layout.bytes(), self.num_groups * self.layout.bytes());
        assert!(groups.end <= self.num_groups && groups.len() * blocks.len() * EXPANDED <= to.len());
        let records = &self.records.as_slice::<u8>()[blocks.start * block_bytes..blocks.end * block_bytes];
        let expand = Expand {
            layout: self.layout,
            records: records[groups.start * bytes..].as_ptr(),
            block_bytes,
            num_groups: groups.len(),
            num_blocks: blocks.len(),
            to: to.as_mut_ptr().cast(),
        };
        // SAFETY: the level is available; reads and writes are inside what was checked above.
        unsafe { level.run(expand) }
    }

    pub(super) fn size_bytes(&self) -> usize {
        self.records.size_bytes()
    }

    /// Goes over from f16 to f32.
    fn widen(&mut self) -> Result<()> {
        let layout = Layout { half: false, ..self.layout };
        let mut records = Self::records(self.records.device(), self.outputs, self.num_groups, layout)?;
        let narrow = self.records.as_slice::<u8>().chunks_exact(2);
        for (wide, narrow) in records.as_mut_slice::<u8>().chunks_exact_mut(4).zip(narrow) {
            let number = f16::from_le_bytes([narrow[0], narrow[1]]).to_f32();
            wide.copy_from_slice(&number.to_le_bytes());
        }
        (self.layout, self.records) = (layout, records);
        Ok(())
    }

    /// Where a number starts, in numbers.
    fn at(&self, row: usize, group: usize, part: usize) -> usize {
        (row / LANES * self.num_groups + group) * self.layout.numbers() + part + row % LANES
    }

    fn number(&self, row: usize, group: usize, part: usize) -> f32 {
        let (at, bytes) = (self.at(row, group, part), self.records.as_slice::<u8>());
        if self.layout.half {
            f16::from_le_bytes([bytes[at * 2], bytes[at * 2 + 1]]).to_f32()
        } else {
            let at = at * 4;
            f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        }
    }

    fn set(&mut self, row: usize, group: usize, part: usize, number: f32) {
        let (at, half) = (self.at(row, group, part), self.layout.half);
        let bytes = self.records.as_mut_slice::<u8>();
        if half {
            bytes[at * 2..][..2].copy_from_slice(&f16::from_f32(number).to_le_bytes());
        } else {
            bytes[at * 4..][..4].copy_from_slice(&number.to_le_bytes());
        }
    }
}

fn exact_in_f16(number: f32) -> bool {
    f16::from_f32(number).to_f32().to_bits() == number.to_bits()
}
