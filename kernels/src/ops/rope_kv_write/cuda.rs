//! Launches `rope_kv_write.cu`.

use super::OP;
use crate::device::cuda::{CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::ops::attention::{Heads, Ragged};
use crate::ops::rope::RopeTable;
use crate::tensor::Tensor;

pub(super) fn rope_kv_write(
    device: &CudaDevice,
    qkv: &mut Tensor,
    k: &mut Tensor,
    v: &mut Tensor,
    positions: &Tensor,
    table: &RopeTable,
    ragged: &Ragged<'_>,
    heads: Heads,
) -> Result<()> {
    qkv.expect_dtype(OP, "qkv", DType::BF16)?;
    k.expect_dtype(OP, "k", DType::BF16)?;
    table.expect_whole_heads(OP, heads)?;
    let (max_positions, _) = table.cos_sin().rows_cols();
    if !heads.head_dim.is_multiple_of(16) {
        return Err(KernelError::NotMultiple { op: OP, what: "head_dim", size: heads.head_dim, of: 16 });
    }
    let (num_tokens, _) = qkv.rows_cols();
    let (_, max_blocks) = ragged.block_tables.rows_cols();
    let numbers = [
        ragged.num_seqs(),
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        k.dims()[2],
        max_blocks,
        max_positions,
    ];
    let [seqs, num_heads, num_kv_heads, head_dim, block_size, max_blocks, max_positions] =
        numbers.map(|number| (number as u32).into());
    let args = [
        qkv.into(),
        k.into(),
        v.into(),
        positions.into(),
        table.cos_sin().into(),
        ragged.cu_tokens.into(),
        ragged.block_tables.into(),
        seqs,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        max_blocks,
        max_positions,
    ];
    // SAFETY: `mod.rs` checked the shapes. Positions and block tables are the worker's own, planned by the block manager; the kernel
    // skips positions past the table.
    unsafe { Launch::new(num_tokens, 128).run(device, OP, "rope_kv_write_bf16", &args) }
}
