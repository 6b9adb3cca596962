//! Multi-head latent attention: one latent a token stands for the keys and values of all heads.
//!
//! Source: DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1. A token's entry in the cache is its normalised latent
//! `c`, `rank` numbers, and a part of its key that has a rotary position and serves all heads, `rope` numbers. The key of head h is
//! `[c · K_h | rope part]` and its value `c · V_h`; `K_h` and `V_h` are the two parts of the checkpoint's `kv_b_proj`.
//!
//! The same attention has two [`Form`]s. Expanded, keys and values of a head are made from the latents: much work for each key, little
//! for each query, so good for prompts. Absorbed, `K_h` multiplies the query and `V_h` the result, and latents are keys and values as
//! they are: good for few queries, and all heads read the same memory. The two differ in rounding alone, by less than 1e-3.
//!
//! Keys are walked in spans of [`SPAN`](super::attention) positions with an online softmax, as in [`attention`](super::attention). A
//! query's bits depend on its form, its position and what stands before it; not on its chunk, other sequences, blocks or threads.

#[cfg(test)]
mod cpu;
mod plan;
mod products;
mod span;
#[cfg(test)]
mod tests;
mod weight;
mod write;

pub use plan::workspace_bytes;
pub use weight::{MlaWeight, dtype_for};
pub use write::{Pairs, latent_write};

use crate::device::Device;
use crate::error::{KernelError, Result};
use crate::ops::attention::{FirstKey, Ragged};
use crate::pool;
use crate::simd::{LANES, Level};
use crate::tensor::Tensor;
use crate::with_float;
use crate::workspace::Workspace;

const OP: &str = "mla";

/// Most query tokens of a sequence that are a decoding step: a token, and drafts to verify.
pub const DECODE_TOKENS: usize = 8;

/// The sizes of one layer on one rank; all multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaDims {
    pub num_heads: usize,
    /// `kv_lora_rank`: numbers of a latent.
    pub rank: usize,
    /// `qk_nope_head_dim`: numbers of a head's query and key that have no position.
    pub nope: usize,
    /// `qk_rope_head_dim`: those that have one.
    pub rope: usize,
    /// `v_head_dim`: numbers of a head's value.
    pub value: usize,
}

impl MlaDims {
    /// Numbers of a token in the cache.
    pub fn latent(self) -> usize {
        self.rank + self.rope
    }

    /// Numbers of a head's query.
    pub fn query(self) -> usize {
        self.nope + self.rope
    }

    /// Rows of a head in `kv_b_proj`.
    pub fn expanded(self) -> usize {
        self.nope + self.value
    }

    pub(crate) fn check(self, op: &'static str) -> Result<()> {
        for (what, size) in [
            ("kv_lora_rank", self.rank),
            ("qk_nope_head_dim", self.nope),
            ("qk_rope_head_dim", self.rope),
            ("v_head_dim", self.value),
        ] {
            if size == 0 || !size.is_multiple_of(LANES) {
                return Err(KernelError::NotMultiple { op, what, size, of: LANES });
            }
        }
        Ok(())
    }
}

/// How keys and values come from latents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Made for every span and head.
    Expanded,
    /// Never made: their weights multiply the query and the result.
    #[default]
    Absorbed,
    /// Absorbed where a sequence has at most [`DECODE_TOKENS`] tokens in this step, expanded where it has more. Bits then depend on how
    /// a prompt was cut into chunks.
    ByPhase,
}

impl Form {
    /// Whether a sequence with so many tokens in this step is absorbed.
    pub(crate) fn absorbs(self, num_tokens: usize) -> bool {
        match self {
            Form::Expanded => false,
            Form::Absorbed => true,
            Form::ByPhase => num_tokens <= DECODE_TOKENS,
        }
    }
}

/// What [`mla`] reads.
#[derive(Clone, Copy)]
pub struct Mla<'a> {
    pub form: Form,
    /// Whether queries see the key at position 0.
    pub first_key: FirstKey,
    pub q: &'a Tensor,
    pub cache: &'a Tensor,
    pub weight: &'a MlaWeight,
    pub ragged: &'a Ragged<'a>,
    /// Multiplies scores.
    pub scale: f32,
}

/// `y[t, h] = softmax(scale * q[t, h] · k_h) v_h` over the keys at and before token t's position.
///
/// | argument    | shape | dtype | |
/// |-------------|-------|-------|-|
/// | `q`         | `[tokens, num_heads * (nope + rope)]`, turned | f32 or bf16 | read |
/// | `cache`     | `[blocks, block_size, rank + rope]`, as [`latent_write`] left it, this step's tokens included | f32 or bf16 | read |
/// | `weight`    | see [`MlaWeight`] | f32 or bf16 | read |
/// | `ragged`    | see [`Ragged`] | i32 | read |
/// | `y`         | `[tokens, num_heads * value]` | as `q` | written |
/// | `workspace` | takes at most [`workspace_bytes`] | | |
///
/// `block_size` is 16, 32, 64 or 128. Arithmetic in f32, for one query and head; `q'` is `scale * q`, rounded:
///
/// - expanded, query `q'`, `k[j] = [c[j] · K | r[j]]` and `v[j] = c[j] · V`, chains of fused multiply-adds over the latent in order;
/// - absorbed, query `[q'_nope · K | q'_rope]`, the chain over `nope` in order, `k[j] = [c[j] | r[j]]`, `v[j] = c[j]`;
/// - `s[j]` is the product of query and `k[j]` in partial sums, as in [`math`](crate::math);
/// - span by span `m' = max(m, s)`, `f = exp(m - m')`, `p[j] = exp(s[j] - m')`, `l = fma(l, f, sum of p)`, `acc = acc * f`, then a chain
///   over j of `p[j]` and `v[j]`;
/// - expanded `y = acc * (1 / l)`; absorbed `y = (acc * (1 / l)) · V`, a chain over the latent in order.
///
/// # Errors
/// `Shape`, `DType`, `NotMultiple`, and `Value` if `ragged` points outside the tensors; nothing is then written. `NotOnDevice` on a GPU.
pub fn mla(call: Mla<'_>, y: &mut Tensor, workspace: &Workspace) -> Result<()> {
    let dims = call.weight.dims();
    dims.check(OP)?;
    let (num_tokens, _) = call.q.rows_cols();
    call.q.expect_shape(OP, "q", [num_tokens, dims.num_heads * dims.query()])?;
    y.expect_shape(OP, "y", [num_tokens, dims.num_heads * dims.value])?;
    y.expect_dtype(OP, "y", call.q.dtype())?;
    let (num_blocks, block_size) = check_cache(OP, call.cache, dims)?;
    call.ragged.check(OP)?;
    match call.q.device() {
        Device::Cpu => {
            call.ragged.check_values(OP, num_tokens, num_blocks, block_size)?;
            let (level, threads) = (Level::best(), pool::num_threads());
            with_float!(OP, "q", call.q.dtype(), T => with_float!(OP, "cache", call.cache.dtype(), C => {
                with_float!(OP, "weight", call.weight.dtype(), W => {
                    plan::mla::<T, C, W>(&call, y, workspace, level, threads)?;
                });
            }));
        }
        Device::Cuda(_) => return Err(KernelError::NotOnDevice { op: OP, device: "a GPU" }),
    }
    Ok(())
}

/// The shape of a layer's latents, checked: `[blocks, block_size, rank + rope]`. Blocks and tokens of one.
fn check_cache(op: &'static str, cache: &Tensor, dims: MlaDims) -> Result<(usize, usize)> {
    let &[num_blocks, block_size, _] = cache.dims() else {
        return Err(KernelError::Shape { op, arg: "cache", got: cache.shape(), want: [0, 0, dims.latent()].into() });
    };
    cache.expect_shape(op, "cache", [num_blocks, block_size, dims.latent()])?;
    if !(block_size.is_power_of_two() && (16..=128).contains(&block_size)) {
        return Err(KernelError::Value { op, arg: "block size", got: block_size as i64, want: "16, 32, 64 or 128" });
    }
    Ok((num_blocks, block_size))
}
