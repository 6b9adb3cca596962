//! Causal attention over a paged KV cache, for prompts, chunks of prompts, single tokens and drafts alike.
//!
//! Keys are walked in spans of [`SPAN`] positions with an online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al.
//! 2022, arXiv:2205.14135), and splits of [`SPLIT`] positions are merged in order (Dao 2023, "Flash-Decoding"). Spans and splits
//! begin at multiples of their length in the sequence, so a query's bits depend on its position and on what stands before it;
//! not on the chunk it came in, on other sequences, on block size, on which blocks were given, or on threads.

#[cfg(test)]
mod cpu;
mod cuda;
mod fixed;
mod products;
mod ragged;
#[cfg(test)]
mod tests;
mod tile;
mod tiled;

pub(crate) use products::{CacheElement, products, share};
pub use ragged::{Heads, Ragged};
pub(crate) use ragged::{Seq, check_cache};
pub(crate) use tile::exponentiate;

use crate::device::Device;
use crate::error::{KernelError, Result};
use crate::ops::rope::RopeTable;
use crate::ops::rope_kv_write::rope_kv_write;
use crate::pool;
use crate::simd::Level;
use crate::tensor::Tensor;
use crate::with_float;
use crate::workspace::Workspace;

const OP: &str = "attention";

/// Positions whose scores are exponentiated together.
pub(crate) const SPAN: usize = 64;

/// Positions that are summed up apart from others.
pub(crate) const SPLIT: usize = 256;

/// What [`attention`] takes from the workspace of a CPU at most.
pub const WORKSPACE_BYTES: usize = 1 << 20;

/// What [`attention`] and [`rope_attention`] take from the workspace at most.
pub fn workspace_bytes(device: &Device, heads: Heads) -> usize {
    match device {
        Device::Cpu => WORKSPACE_BYTES,
        Device::Cuda(device) => cuda::workspace_bytes(device, heads),
    }
}

/// Largest head.
pub(crate) const MAX_HEAD_DIM: usize = 256;

/// `y[t, h] = softmax(scale * q[t, h] · k) v` over the keys at and before token t's position.
///
/// | argument    | shape | dtype | |
/// |-------------|-------|-------|-|
/// | `qkv`       | `[tokens, (num_heads + 2 * num_kv_heads) * head_dim]` | f32 or bf16 | queries read |
/// | `k`, `v`    | `[blocks, num_kv_heads, block_size, head_dim]`, as [`kv_write`](super::kv_write::kv_write) left them, this step's tokens included | f32 or bf16 | read |
/// | `ragged`    | see [`Ragged`] | i32 | read |
/// | `y`         | `[tokens, num_heads * head_dim]` | as `qkv` | written |
/// | `workspace` | takes at most [`workspace_bytes`] | | |
///
/// `head_dim` is a multiple of 8 up to 256, `block_size` 16, 32, 64 or 128. Arithmetic in f32; for one query and head, with
/// positions j of a span, then spans of a split, then splits:
///
/// - `s[j]` is a chain of fused multiply-adds over dimensions in order, of `scale * q` (rounded) and `k[j]`;
/// - `m' = max(m, s)`, `c = exp(m - m')`, `p[j] = exp(s[j] - m')`;
/// - `l = fma(l, c, sum of p)`, the sum as in [`math`](crate::math); `acc = acc * c`, then a chain over j of `p[j]` and `v[j]`;
/// - of splits `M' = max(M, m)`, `A = exp(M - M')`, `B = exp(m - M')`, `L = fma(l, B, L * A)`, `O = fma(acc, B, O * A)`;
/// - `y = O * (1 / L)`.
///
/// # Errors
/// `Shape`, `DType`, `NotMultiple`, and `Value` if `ragged` points outside the tensors; nothing is then written.
pub fn attention(
    qkv: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ragged: &Ragged<'_>,
    heads: Heads,
    scale: f32,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    attention_from(FirstKey::Seen, qkv, k, v, ragged, heads, scale, y, workspace)
}

/// Whether queries see the key at position 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstKey {
    Seen,
    /// Nothing was written there: a drafter takes a token and the hidden state before it, which the first token has not.
    LeftOut,
}

/// [`attention`], with the key at position 0 or as if it were not there. Left out, its score is minus infinity, and its value, which must
/// be finite, has no weight; the query at position 0 then has no result.
///
/// # Errors
/// As [`attention`].
pub fn attention_from(
    first: FirstKey,
    qkv: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ragged: &Ragged<'_>,
    heads: Heads,
    scale: f32,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    heads.check(OP)?;
    if heads.head_dim > MAX_HEAD_DIM {
        return Err(KernelError::Value { op: OP, arg: "head_dim", got: heads.head_dim as i64, want: "at most 256" });
    }
    let (num_tokens, _) = qkv.rows_cols();
    qkv.expect_shape(OP, "qkv", [num_tokens, heads.qkv_cols()])?;
    y.expect_shape(OP, "y", [num_tokens, heads.num_heads * heads.head_dim])?;
    y.expect_dtype(OP, "y", qkv.dtype())?;
    let (num_blocks, block_size) = check_cache(OP, k, v, heads)?;
    ragged.check(OP)?;
    match qkv.device() {
        Device::Cpu => {
            ragged.check_values(OP, num_tokens, num_blocks, block_size)?;
            with_float!(OP, "qkv", qkv.dtype(), T => with_float!(OP, "k", k.dtype(), C => {
                let (level, num_threads) = (Level::best(), pool::num_threads());
                tiled::attention::<T, C>(qkv, k, v, ragged, heads, first, scale, y, workspace, level, num_threads)?;
            }));
        }
        Device::Cuda(device) => cuda::attention(device, first, qkv, k, v, ragged, heads, scale, y, workspace)?,
    }
    Ok(())
}

/// [`rope_kv_write`], then [`attention`]: what a decoder layer does between its two products.
///
/// On a GPU a step of few query tokens a sequence is one launch, which leaves `qkv` as it was; otherwise the two ops.
///
/// # Errors
/// Those of the two.
pub fn rope_attention(
    qkv: &mut Tensor,
    k: &mut Tensor,
    v: &mut Tensor,
    positions: &Tensor,
    table: &RopeTable,
    ragged: &Ragged<'_>,
    heads: Heads,
    scale: f32,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    rope_attention_from(FirstKey::Seen, qkv, k, v, positions, table, ragged, heads, scale, y, workspace)
}

/// [`rope_attention`], with or without the key at position 0.
pub(crate) fn rope_attention_from(
    first: FirstKey,
    qkv: &mut Tensor,
    k: &mut Tensor,
    v: &mut Tensor,
    positions: &Tensor,
    table: &RopeTable,
    ragged: &Ragged<'_>,
    heads: Heads,
    scale: f32,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    if let Device::Cuda(device) = qkv.device().clone()
        && cuda::is_decode(&device, ragged.max_tokens_per_seq, heads)
    {
        heads.check(OP)?;
        let (num_tokens, _) = qkv.rows_cols();
        qkv.expect_shape(OP, "qkv", [num_tokens, heads.qkv_cols()])?;
        y.expect_shape(OP, "y", [num_tokens, heads.num_heads * heads.head_dim])?;
        y.expect_dtype(OP, "y", qkv.dtype())?;
        check_cache(OP, k, v, heads)?;
        ragged.check(OP)?;
        return cuda::decode(&device, first, qkv, k, v, Some(table), ragged, heads, scale, y, workspace);
    }
    rope_kv_write(qkv, k, v, positions, table, ragged, heads)?;
    attention_from(first, qkv, k, v, ragged, heads, scale, y, workspace)
}

/// [`rope_attention`] without the key at position 0, for drafters; see [`FirstKey`].
///
/// # Errors
/// As [`rope_attention`].
pub fn rope_attention_after_first(
    qkv: &mut Tensor,
    k: &mut Tensor,
    v: &mut Tensor,
    positions: &Tensor,
    table: &RopeTable,
    ragged: &Ragged<'_>,
    heads: Heads,
    scale: f32,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    rope_attention_from(FirstKey::LeftOut, qkv, k, v, positions, table, ragged, heads, scale, y, workspace)
}
