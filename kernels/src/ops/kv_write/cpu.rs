//! The reference, and all there is: a step writes few bytes.

use super::KeyLayout;
use crate::dtype::Float;
use crate::ops::attention::{Heads, Ragged};
use crate::tensor::Tensor;

pub(super) fn kv_write<T: Float, C: Float>(
    qkv: &[T],
    k: &mut Tensor,
    v: &mut Tensor,
    positions: &[i32],
    ragged: &Ragged<'_>,
    heads: Heads,
) {
    let Heads { num_heads, num_kv_heads, head_dim } = heads;
    let block_size = k.dims()[2];
    let layout = KeyLayout { block_size };
    let (k, v) = (k.as_mut_slice::<C>(), v.as_mut_slice::<C>());
    for seq in (0..ragged.num_seqs()).map(|s| ragged.seq(s, block_size)) {
        for token in seq.first_token..seq.first_token + seq.num_tokens {
            let position = positions[token] as usize;
            let (block, slot) = (seq.blocks[position / block_size] as usize, position % block_size);
            let kv = &qkv[token * heads.qkv_cols() + num_heads * head_dim..][..2 * num_kv_heads * head_dim];
            for head in 0..num_kv_heads {
                let base = (block * num_kv_heads + head) * block_size * head_dim;
                let (key, value) =
                    (&kv[head * head_dim..][..head_dim], &kv[(num_kv_heads + head) * head_dim..][..head_dim]);
                for (d, key) in key.iter().enumerate() {
                    k[base + layout.at(slot, d)] = C::from_f32(key.to_f32());
                }
                for (d, value) in value.iter().enumerate() {
                    v[base + slot * head_dim + d] = C::from_f32(value.to_f32());
                }
            }
        }
    }
}
