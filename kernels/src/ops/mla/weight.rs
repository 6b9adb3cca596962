//! `kv_b_proj`, laid out for both forms.

use half::bf16;

use super::{MlaDims, OP};
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;
use crate::with_float;

/// The weight `[num_heads * (nope + value), rank]` that makes keys and values of latents, in f32 or bf16.
///
/// Keys' rows are kept twice: as they are for absorbed queries, and with the values' turned around for expansion. So it takes one and
/// a half times what the checkpoint's weight does, at `nope = value`.
pub struct MlaWeight {
    dims: MlaDims,
    /// `[num_heads, nope, rank]`.
    down: Tensor,
    /// `[num_heads, rank, nope + value]`.
    up: Tensor,
}

impl MlaWeight {
    /// A weight of zeros.
    ///
    /// # Errors
    /// `NotMultiple` for sizes that have no kernel, `DType` if it is neither f32 nor bf16, `OutOfMemory`, `NotOnDevice` on a GPU.
    pub fn new(device: &Device, dims: MlaDims, dtype: DType) -> Result<Self> {
        dims.check(OP)?;
        if *device != Device::Cpu {
            return Err(KernelError::NotOnDevice { op: OP, device: "a GPU" });
        }
        if !matches!(dtype, DType::F32 | DType::BF16) {
            return Err(KernelError::DType { op: OP, arg: "weight", dtype });
        }
        let down = Tensor::zeros(device, "keys' weight", [dims.num_heads, dims.nope, dims.rank], dtype)?;
        let up = Tensor::zeros(device, "latents' weight", [dims.num_heads, dims.rank, dims.expanded()], dtype)?;
        Ok(MlaWeight { dims, down, up })
    }

    /// Overwrites whole rows of `kv_b_proj` from `first` on, rounded to the weight's dtype.
    ///
    /// # Errors
    /// `NotMultiple` if `values` are no whole rows, `Value` if they pass the last row.
    pub fn write_rows(&mut self, first: usize, values: &[f32]) -> Result<()> {
        let dims = self.dims;
        if !values.len().is_multiple_of(dims.rank) {
            return Err(KernelError::NotMultiple { op: OP, what: "values", size: values.len(), of: dims.rank });
        }
        let end = first + values.len() / dims.rank;
        if end > dims.num_heads * dims.expanded() {
            let want = "at most the weight's rows";
            return Err(KernelError::Value { op: OP, arg: "last row", got: end as i64, want });
        }
        with_float!(OP, "weight", self.dtype(), W => self.write::<W>(first, values));
        Ok(())
    }

    fn write<W: Float>(&mut self, first: usize, values: &[f32]) {
        let dims = self.dims;
        for (row, values) in (first..).zip(values.chunks_exact(dims.rank)) {
            let (head, part) = (row / dims.expanded(), row % dims.expanded());
            let up = &mut self.up.as_mut_slice::<W>()[head * dims.rank * dims.expanded()..];
            for (r, &value) in values.iter().enumerate() {
                up[r * dims.expanded() + part] = W::from_f32(value);
            }
            if part < dims.nope {
                let down = &mut self.down.as_mut_slice::<W>()[(head * dims.nope + part) * dims.rank..][..dims.rank];
                down.iter_mut().zip(values).for_each(|(to, &value)| *to = W::from_f32(value));
            }
        }
    }

    pub fn dims(&self) -> MlaDims {
        self.dims
    }

    pub fn dtype(&self) -> DType {
        self.down.dtype()
    }

    /// Memory it takes.
    pub fn size_bytes(&self) -> usize {
        self.down.size_bytes() + self.up.size_bytes()
    }

    /// A head's keys: `[nope, rank]`.
    pub(super) fn down<W: Float>(&self, head: usize) -> &[W] {
        let len = self.dims.nope * self.dims.rank;
        &self.down.as_slice::<W>()[head * len..][..len]
    }

    /// A head's keys and values, turned around: `[rank, nope + value]`.
    pub(super) fn up<W: Float>(&self, head: usize) -> &[W] {
        let len = self.dims.rank * self.dims.expanded();
        &self.up.as_slice::<W>()[head * len..][..len]
    }
}

/// What a weight may be kept in without loss: bf16 if all values fit.
pub fn dtype_for(values: &[f32]) -> DType {
    let fits = values.iter().all(|&value| bf16::from_f32(value).to_f32().to_bits() == value.to_bits());
    if fits { DType::BF16 } else { DType::F32 }
}
