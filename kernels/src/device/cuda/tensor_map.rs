//! Descriptions of matrices for Hopper's tile copies (`cuda/tma.cuh`).

use cudarc::driver::sys;

use super::{Arg, failed};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

/// Columns of a tile: 128 bytes of bf16, which is as far as the swizzle reaches.
const COLS: usize = 64;

/// A matrix and the tiles that kernels take from it.
#[derive(Clone, Copy)]
pub(crate) struct TensorMap([u32; 32]);

impl TensorMap {
    /// Tiles of 64 columns and `tile_rows` rows of a contiguous bf16 tensor whose last dimension is the columns, swizzled by 128 bytes;
    /// zeros where a tile reaches past the end.
    ///
    /// # Errors
    /// `DType`, `Driver` if the columns are no multiple of 8 or `tile_rows` exceeds 256.
    pub(crate) fn new(op: &'static str, arg: &'static str, tensor: &Tensor, tile_rows: usize) -> Result<Self> {
        tensor.expect_dtype(op, arg, DType::BF16)?;
        let (rows, cols) = tensor.rows_cols();
        let mut map = std::mem::MaybeUninit::<sys::CUtensorMap>::uninit();
        let (dims, strides) = ([cols as u64, rows as u64], [cols as u64 * 2]);
        let (tile, steps) = ([COLS as u32, tile_rows as u32], [1; 2]);
        // SAFETY: the map is written and all arrays hold as many numbers as the rank says; the address is only noted down.
        let map = unsafe {
            sys::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                tensor.device_address() as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
            .result()
            .map_err(failed("cuTensorMapEncodeTiled"))?;
            map.assume_init()
        };
        let mut words = [0; 32];
        for (pair, word) in words.chunks_exact_mut(2).zip(map.opaque) {
            pair.copy_from_slice(&[word as u32, (word >> 32) as u32]);
        }
        Ok(TensorMap(words))
    }
}

impl<'a> From<&'a TensorMap> for Arg<'a> {
    fn from(map: &'a TensorMap) -> Self {
        Arg::Struct(&map.0)
    }
}
