//! The reference, and all there is; KV heads over the threads.

use super::KeyLayout;
use crate::dtype::Float;
use crate::ops::attention::{Heads, Ragged};
use crate::pool::{SharedMut, parallel_for};
use crate::tensor::Tensor;

/// Fewer tokens are written sooner than a thread is woken.
const MIN_TOKENS: usize = 16;

pub(super) fn kv_write<T: Float, C: Float>(
    qkv: &[T],
    k: &mut Tensor,
    v: &mut Tensor,
    positions: &[i32],
    ragged: &Ragged<'_>,
    heads: Heads,
) {
    let block_size = k.dims()[2];
    let (k, v) = (SharedMut::new(k.as_mut_slice::<C>()), SharedMut::new(v.as_mut_slice::<C>()));
    let write = |head| write_head(qkv, &k, &v, block_size, positions, ragged, heads, head);
    if positions.len() < MIN_TOKENS {
        (0..heads.num_kv_heads).for_each(write);
    } else {
        parallel_for(heads.num_kv_heads, &write);
    }
}

/// Writes one head of every token; no two heads share an element.
fn write_head<T: Float, C: Float>(
    qkv: &[T],
    k: &SharedMut<C>,
    v: &SharedMut<C>,
    block_size: usize,
    positions: &[i32],
    ragged: &Ragged<'_>,
    heads: Heads,
    head: usize,
) {
    let Heads { num_heads, num_kv_heads, head_dim } = heads;
    let layout = KeyLayout { block_size };
    for seq in (0..ragged.num_seqs()).map(|s| ragged.seq(s, block_size)) {
        for token in seq.first_token..seq.first_token + seq.num_tokens {
            let position = positions[token] as usize;
            let (block, slot) = (seq.blocks[position / block_size] as usize, position % block_size);
            let base = (block * num_kv_heads + head) * block_size * head_dim;
            // SAFETY: this head's part of a block, which no other task writes; the tensors are borrowed until all are done.
            let (k, v) = unsafe {
                let part = base..base + block_size * head_dim;
                (k.slice(part.clone()), v.slice(part))
            };
            let of_token = &qkv[token * heads.qkv_cols()..][..heads.qkv_cols()];
            let key = &of_token[(num_heads + head) * head_dim..][..head_dim];
            let value = &of_token[(num_heads + num_kv_heads + head) * head_dim..][..head_dim];
            for (d, key) in key.iter().enumerate() {
                k[layout.at(slot, d)] = C::from_f32(key.to_f32());
            }
            for (to, value) in v[slot * head_dim..][..head_dim].iter_mut().zip(value) {
                *to = C::from_f32(value.to_f32());
            }
        }
    }
}
