//! Puts this step's keys and values into the paged cache.

mod cpu;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::ops::attention::{Heads, Ragged, check_cache};
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "kv_write";

/// Where a block keeps its keys on the CPU: dimension by dimension, so that the scores of neighbouring keys lie side by side in
/// a vector. Values lie token by token. A block is copied or moved as a whole; only `kv_write` and `attention` look inside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyLayout {
    pub block_size: usize,
}

impl KeyLayout {
    /// Offset of dimension `d` of the key in `slot`, from the start of the head's part of the block.
    #[inline(always)]
    pub(crate) fn at(self, slot: usize, d: usize) -> usize {
        d * self.block_size + slot
    }
}

/// Writes the keys and values of `qkv` to their tokens' places.
///
/// | argument    | shape | dtype | |
/// |-------------|-------|-------|-|
/// | `qkv`       | `[tokens, (num_heads + 2 * num_kv_heads) * head_dim]` | f32 or bf16 | keys and values read |
/// | `k`, `v`    | `[blocks, num_kv_heads, block_size, head_dim]` | f32 or bf16, not necessarily that of `qkv` | written where `positions` say; a block's inside is the device's own |
/// | `positions` | `[tokens]`: index of each token in its sequence | i32 | read |
/// | `ragged`    | see [`Ragged`] | i32 | read |
///
/// # Errors
/// `Shape`, `DType`, `NotMultiple`, and `Value` if `ragged` or a position points outside the cache; nothing is then written.
pub fn kv_write(
    qkv: &Tensor,
    k: &mut Tensor,
    v: &mut Tensor,
    positions: &Tensor,
    ragged: &Ragged<'_>,
    heads: Heads,
) -> Result<()> {
    heads.check(OP)?;
    let (num_tokens, _) = qkv.rows_cols();
    qkv.expect_shape(OP, "qkv", [num_tokens, heads.qkv_cols()])?;
    positions.expect_dtype(OP, "positions", DType::I32)?;
    positions.expect_shape(OP, "positions", [num_tokens])?;
    let (num_blocks, block_size) = check_cache(OP, k, v, heads)?;
    ragged.check(OP)?;
    match qkv.device() {
        Device::Cpu => {
            ragged.check_values(OP, num_tokens, num_blocks, block_size)?;
            let positions = positions.as_slice::<i32>();
            for seq in (0..ragged.num_seqs()).map(|s| ragged.seq(s, block_size)) {
                let own = &positions[seq.first_token..][..seq.num_tokens];
                if let Some(&position) = own.iter().find(|&&p| p < 0 || p as usize >= seq.kv_len) {
                    let want = "below the sequence's kv_len";
                    return Err(KernelError::Value { op: OP, arg: "positions", got: position.into(), want });
                }
            }
            with_float!(OP, "qkv", qkv.dtype(), T => with_float!(OP, "k", k.dtype(), C => {
                cpu::kv_write::<T, C>(qkv.as_slice(), k, v, positions, ragged, heads);
            }));
        }
        Device::Cuda(_) => return Err(KernelError::NotOnDevice { op: OP, device: "a GPU" }),
    }
    Ok(())
}
