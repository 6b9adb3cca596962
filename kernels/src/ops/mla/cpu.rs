//! The reference: one query and one head at a time, as the contract says it.

use super::Mla;
use crate::dtype::Float;
use crate::math;
use crate::ops::attention::{FirstKey, SPAN};
use crate::tensor::Tensor;

pub(super) fn mla<T: Float, C: Float, W: Float>(call: &Mla<'_>, y: &mut Tensor) {
    let dims = call.weight.dims();
    let (cache, block_size) = (call.cache.as_slice::<C>(), call.cache.dims()[1]);
    for seq in (0..call.ragged.num_seqs()).map(|s| call.ragged.seq(s, block_size)) {
        let absorbs = call.form.absorbs(seq.num_tokens);
        for (token, visible) in (seq.first_token..).zip(seq.kv_len - seq.num_tokens + 1..=seq.kv_len) {
            let entry = |position: usize| -> Vec<f32> {
                let block = seq.blocks[position / block_size] as usize;
                let at = (block * block_size + position % block_size) * dims.latent();
                cache[at..at + dims.latent()].iter().map(|x| x.to_f32()).collect()
            };
            for head in 0..dims.num_heads {
                let q = &call.q.as_slice::<T>()[(token * dims.num_heads + head) * dims.query()..][..dims.query()];
                let q: Vec<f32> = q.iter().map(|q| q.to_f32() * call.scale).collect();
                let up = |x: &[f32], from: usize, count: usize| -> Vec<f32> {
                    let up: &[W] = call.weight.up(head);
                    let column = |d: usize| {
                        x.iter().enumerate().map(move |(r, x): (usize, &f32)| (x, up[r * dims.expanded() + d].to_f32()))
                    };
                    (from..from + count).map(|d| column(d).fold(0.0, |sum, (x, w)| x.mul_add(w, sum))).collect()
                };
                let down = |r: usize| {
                    let down: &[W] = call.weight.down(head);
                    (0..dims.nope).fold(0.0, |sum: f32, d| q[d].mul_add(down[d * dims.rank + r].to_f32(), sum))
                };
                let query: Vec<f32> = match absorbs {
                    true => (0..dims.rank).map(down).chain(q[dims.nope..].iter().copied()).collect(),
                    false => q.clone(),
                };
                let key_value = |position| {
                    let entry = entry(position);
                    if absorbs {
                        return (entry.clone(), entry[..dims.rank].to_vec());
                    }
                    let (latent, turned) = entry.split_at(dims.rank);
                    ([&up(latent, 0, dims.nope), turned].concat(), up(latent, dims.nope, dims.value))
                };
                let left_out = usize::from(call.first_key == FirstKey::LeftOut);
                let result = softmax(&query, visible, left_out, &key_value);
                let result = if absorbs { up(&result, dims.nope, dims.value) } else { result };
                let y = &mut y.as_mut_slice::<T>()[(token * dims.num_heads + head) * dims.value..][..dims.value];
                y.iter_mut().zip(result).for_each(|(y, value)| *y = T::from_f32(value));
            }
        }
    }
}

fn softmax(
    query: &[f32],
    visible: usize,
    left_out: usize,
    key_value: &dyn Fn(usize) -> (Vec<f32>, Vec<f32>),
) -> Vec<f32> {
    let (mut max, mut sum, mut acc) = (f32::NEG_INFINITY, 0.0f32, Vec::new());
    for first in (0..visible).step_by(SPAN) {
        let span: Vec<_> = (first..visible.min(first + SPAN)).map(key_value).collect();
        acc.resize(span[0].1.len(), 0.0);
        let score = |(j, (key, _)): (usize, &(Vec<f32>, Vec<f32>))| {
            if first + j < left_out {
                return f32::NEG_INFINITY;
            }
            let mut lanes = [0.0; math::LANES];
            for (i, (q, k)) in query.iter().zip(key).enumerate() {
                lanes[i % math::LANES] = q.mul_add(*k, lanes[i % math::LANES]);
            }
            math::fold(lanes)
        };
        let scores: Vec<f32> = span.iter().enumerate().map(score).collect();
        let new_max = scores.iter().fold(max, |max, &score| max.max(score));
        let correction = math::exp(max - new_max);
        max = new_max;
        let weights: Vec<f32> = scores.iter().map(|score| math::exp(score - max)).collect();
        let mut lanes = [0.0; math::LANES];
        for (j, weight) in weights.iter().enumerate() {
            lanes[j % math::LANES] += weight;
        }
        sum = sum.mul_add(correction, math::fold(lanes));
        for (d, acc) in acc.iter_mut().enumerate() {
            *acc *= correction;
            for (j, weight) in weights.iter().enumerate().skip(left_out.saturating_sub(first)) {
                *acc = weight.mul_add(span[j].1[d], *acc);
            }
        }
    }
    let inverse = 1.0 / sum;
    acc.into_iter().map(|acc| acc * inverse).collect()
}
