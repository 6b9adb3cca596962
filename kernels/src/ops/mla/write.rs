//! What comes before: queries turn, and latents go into the paged cache.

use super::{MlaDims, check_cache};
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::{KernelError, Result};
use crate::math;
use crate::ops::attention::Ragged;
use crate::ops::rope::RopeTable;
use crate::ops::rows;
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "latent_write";

/// Which dimensions turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// Dimension `2i` with `2i + 1`, as DeepSeek's checkpoints have them.
    Interleaved,
    /// Dimension `i` with `i + rope / 2`.
    Halves,
}

/// Turns the queries' rotary parts in place, and writes each token's normalised latent and turned key part to its place in the cache.
///
/// | argument    | shape | dtype | |
/// |-------------|-------|-------|-|
/// | `q`         | `[tokens, num_heads * (nope + rope)]` | f32 or bf16 | rotary parts updated |
/// | `kv`        | `[tokens, rank + rope]`: latents before their norm, key parts | as `q` | read |
/// | `norm`      | `[rank]` | f32 | read |
/// | `cache`     | `[blocks, block_size, rank + rope]` | f32 or bf16, not necessarily that of `q` | written where `positions` say |
/// | `positions` | `[tokens]`: index of each token in its sequence | i32 | read |
/// | `ragged`    | see [`Ragged`] | i32 | read |
///
/// The norm is that of [`rms_norm`](crate::ops::rms_norm::rms_norm), the turn that of [`rope`](crate::ops::rope::rope), both rounded to
/// the dtype of `q` before the cache's.
///
/// # Errors
/// `Shape`, `DType`, `NotMultiple`, and `Value` if `ragged` or a position points outside the cache or the table; nothing is then
/// written. `NotOnDevice` on a GPU.
pub fn latent_write(
    q: &mut Tensor,
    kv: &Tensor,
    norm: &Tensor,
    eps: f32,
    cache: &mut Tensor,
    positions: &Tensor,
    table: &RopeTable,
    pairs: Pairs,
    ragged: &Ragged<'_>,
    dims: MlaDims,
) -> Result<()> {
    dims.check(OP)?;
    let (num_tokens, _) = q.rows_cols();
    q.expect_shape(OP, "q", [num_tokens, dims.num_heads * dims.query()])?;
    kv.expect_shape(OP, "kv", [num_tokens, dims.latent()])?;
    kv.expect_dtype(OP, "kv", q.dtype())?;
    norm.expect_shape(OP, "norm", [dims.rank])?;
    norm.expect_dtype(OP, "norm", DType::F32)?;
    positions.expect_dtype(OP, "positions", DType::I32)?;
    positions.expect_shape(OP, "positions", [num_tokens])?;
    let (num_blocks, block_size) = check_cache(OP, cache, dims)?;
    let (_, rotary_dim) = table.cos_sin().rows_cols();
    if rotary_dim != dims.rope {
        let got = rotary_dim as i64;
        return Err(KernelError::Value { op: OP, arg: "rotary_dim", got, want: "the layer's qk_rope_head_dim" });
    }
    ragged.check(OP)?;
    if *q.device() != Device::Cpu {
        return Err(KernelError::NotOnDevice { op: OP, device: "a GPU" });
    }
    ragged.check_values(OP, num_tokens, num_blocks, block_size)?;
    let positions = positions.as_slice::<i32>();
    let limit = table.max_positions();
    for seq in (0..ragged.num_seqs()).map(|s| ragged.seq(s, block_size)) {
        let own = &positions[seq.first_token..][..seq.num_tokens];
        if let Some(&position) = own.iter().find(|&&p| p < 0 || p as usize >= seq.kv_len.min(limit)) {
            let want = "below the sequence's kv_len and in the rope table";
            return Err(KernelError::Value { op: OP, arg: "positions", got: position.into(), want });
        }
    }
    let turn = Turn { cos_sin: table.cos_sin().as_slice(), pairs, rope: dims.rope };
    with_float!(OP, "q", q.dtype(), T => {
        turn_queries::<T>(q.as_mut_slice(), positions, turn, dims);
        let (kv, norm) = (kv.as_slice::<T>(), norm.as_slice::<f32>());
        with_float!(OP, "cache", cache.dtype(), C => {
            write::<T, C>(kv, norm, eps, cache.as_mut_slice(), positions, turn, ragged, block_size, dims);
        });
    });
    Ok(())
}

/// How a rotary part turns.
#[derive(Clone, Copy)]
struct Turn<'a> {
    /// `[positions, rope]`: cosines, then sines.
    cos_sin: &'a [f32],
    pairs: Pairs,
    rope: usize,
}

impl Turn<'_> {
    /// `x` is one rotary part.
    fn turn<T: Float>(self, x: &mut [T], position: i32) {
        let half = self.rope / 2;
        let (cos, sin) = self.cos_sin[position as usize * self.rope..][..self.rope].split_at(half);
        for i in 0..half {
            let (a, b) = match self.pairs {
                Pairs::Interleaved => (2 * i, 2 * i + 1),
                Pairs::Halves => (i, i + half),
            };
            let (first, second) = (x[a].to_f32(), x[b].to_f32());
            x[a] = T::from_f32(first * cos[i] - second * sin[i]);
            x[b] = T::from_f32(second * cos[i] + first * sin[i]);
        }
    }
}

fn turn_queries<T: Float>(q: &mut [T], positions: &[i32], turn: Turn<'_>, dims: MlaDims) {
    let cols = dims.num_heads * dims.query();
    rows::parallel(q, cols, &|first, q| {
        for (row, &position) in q.chunks_exact_mut(cols).zip(&positions[first..]) {
            for head in row.chunks_exact_mut(dims.query()) {
                turn.turn(&mut head[dims.nope..], position);
            }
        }
    });
}

fn write<T: Float, C: Float>(
    kv: &[T],
    norm: &[f32],
    eps: f32,
    cache: &mut [C],
    positions: &[i32],
    turn: Turn<'_>,
    ragged: &Ragged<'_>,
    block_size: usize,
    dims: MlaDims,
) {
    let width = dims.latent();
    for seq in (0..ragged.num_seqs()).map(|s| ragged.seq(s, block_size)) {
        for token in seq.first_token..seq.first_token + seq.num_tokens {
            let position = positions[token] as usize;
            let (block, slot) = (seq.blocks[position / block_size] as usize, position % block_size);
            let entry = &mut cache[(block * block_size + slot) * width..][..width];
            let (latent, key) = kv[token * width..][..width].split_at(dims.rank);
            let scale = 1.0 / (math::sum_squares(latent) / dims.rank as f32 + eps).sqrt();
            for ((to, x), weight) in entry.iter_mut().zip(latent).zip(norm) {
                *to = C::from_f32(T::from_f32(x.to_f32() * scale * weight).to_f32());
            }
            let mut turned = [T::from_f32(0.0); MAX_ROPE];
            let turned = &mut turned[..dims.rope];
            turned.copy_from_slice(key);
            turn.turn(turned, position as i32);
            for (to, x) in entry[dims.rank..].iter_mut().zip(&*turned) {
                *to = C::from_f32(x.to_f32());
            }
        }
    }
}

/// Largest rotary part.
pub(super) const MAX_ROPE: usize = 256;
