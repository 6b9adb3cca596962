//! [`rope`](super::rope) and [`kv_write`](super::kv_write) in one pass, as every decoder layer has them.

mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::attention::{Heads, Ragged, check_cache};
use crate::ops::kv_write::kv_write;
use crate::ops::rope::{RopeTable, rope};
use crate::tensor::Tensor;

const OP: &str = "rope_kv_write";

/// Turns queries in place, and writes turned keys and values to their tokens' places in the cache.
///
/// | argument    | shape | dtype | |
/// |-------------|-------|-------|-|
/// | `qkv`       | `[tokens, (num_heads + 2 * num_kv_heads) * head_dim]` | f32 or bf16 | queries updated, keys and values read; what is left in the keys' place is the device's own |
/// | `k`, `v`    | `[blocks, num_kv_heads, block_size, head_dim]` | f32 or bf16 | written where `positions` say |
/// | `positions` | `[tokens]` | i32 | read |
/// | `ragged`    | see [`Ragged`] | i32 | read |
///
/// # Errors
/// `Shape`, `DType`, `NotMultiple`, and on the CPU `Value` if `ragged` or a position points outside the cache.
pub fn rope_kv_write(
    qkv: &mut Tensor,
    k: &mut Tensor,
    v: &mut Tensor,
    positions: &Tensor,
    table: &RopeTable,
    ragged: &Ragged<'_>,
    heads: Heads,
) -> Result<()> {
    match qkv.device() {
        Device::Cpu => {
            rope(qkv, positions, table, heads)?;
            kv_write(qkv, k, v, positions, ragged, heads)
        }
        Device::Cuda(device) => {
            let device = device.clone();
            heads.check(OP)?;
            let (num_tokens, _) = qkv.rows_cols();
            qkv.expect_shape(OP, "qkv", [num_tokens, heads.qkv_cols()])?;
            positions.expect_dtype(OP, "positions", DType::I32)?;
            positions.expect_shape(OP, "positions", [num_tokens])?;
            check_cache(OP, k, v, heads)?;
            ragged.check(OP)?;
            cuda::rope_kv_write(&device, qkv, k, v, positions, table, ragged, heads)
        }
    }
}
