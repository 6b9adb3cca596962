//! The reference, and all a CPU needs.

use half::bf16;

use super::OP;
use crate::dtype::{DType, Element};
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

pub(super) fn copy(x: &Tensor, y: &mut Tensor) -> Result<()> {
    match x.dtype() {
        DType::F32 => y.copy_from_slice(x.as_slice::<f32>()),
        DType::BF16 => y.copy_from_slice(x.as_slice::<bf16>()),
        DType::I32 => y.copy_from_slice(x.as_slice::<i32>()),
        dtype => Err(KernelError::DType { op: OP, arg: "x", dtype }),
    }
}

pub(super) fn copy_rows(x: &mut Tensor, pairs: &[(u32, u32)]) -> Result<()> {
    match x.dtype() {
        DType::F32 => copy_rows_of::<f32>(x, pairs),
        DType::BF16 => copy_rows_of::<bf16>(x, pairs),
        DType::I32 => copy_rows_of::<i32>(x, pairs),
        dtype => return Err(KernelError::DType { op: OP, arg: "x", dtype }),
    }
    Ok(())
}

fn copy_rows_of<T: Element>(x: &mut Tensor, pairs: &[(u32, u32)]) {
    let len = x.shape().num_elements() / x.dims()[0].max(1);
    let elements = x.as_mut_slice::<T>();
    for &(from, to) in pairs {
        let (from, to) = (from as usize * len, to as usize * len);
        elements.copy_within(from..from + len, to);
    }
}
