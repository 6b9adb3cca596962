//! The reference: one query and one head at a time, as the contract says it.

use super::{FirstKey, Heads, Ragged, SPAN, SPLIT, Seq};
use crate::dtype::Float;
use crate::math;
use crate::ops::kv_write::KeyLayout;
use crate::tensor::Tensor;

/// An online softmax over some positions, and the values it weighs.
struct Running {
    max: f32,
    sum: f32,
    acc: Vec<f32>,
}

impl Running {
    fn new(head_dim: usize) -> Self {
        Running { max: f32::NEG_INFINITY, sum: 0.0, acc: vec![0.0; head_dim] }
    }
}

pub(super) fn attention<T: Float, C: Float>(
    qkv: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ragged: &Ragged<'_>,
    heads: Heads,
    first_key: FirstKey,
    scale: f32,
    y: &mut Tensor,
) {
    let block_size = k.dims()[2];
    let dim = heads.head_dim;
    for seq in (0..ragged.num_seqs()).map(|s| ragged.seq(s, block_size)) {
        for i in 0..seq.num_tokens {
            let token = seq.first_token + i;
            let visible = seq.kv_len - seq.num_tokens + i + 1;
            for head in 0..heads.num_heads {
                let q = &qkv.as_slice::<T>()[token * heads.qkv_cols() + head * dim..][..dim];
                let q: Vec<f32> = q.iter().map(|q| q.to_f32() * scale).collect();
                let cache = Cache::<C> {
                    k: k.as_slice(),
                    v: v.as_slice(),
                    seq,
                    heads,
                    block_size,
                    head: head / heads.group(),
                    left_out: usize::from(first_key == FirstKey::LeftOut),
                };
                let mut total = Running::new(dim);
                for first in (0..visible).step_by(SPLIT) {
                    let split = cache.split(&q, first, visible.min(first + SPLIT));
                    merge(&mut total, &split);
                }
                let inverse = 1.0 / total.sum;
                let y = &mut y.as_mut_slice::<T>()[(token * heads.num_heads + head) * dim..][..dim];
                for (y, acc) in y.iter_mut().zip(&total.acc) {
                    *y = T::from_f32(acc * inverse);
                }
            }
        }
    }
}

fn merge(total: &mut Running, split: &Running) {
    let max = total.max.max(split.max);
    let (old, new) = (math::exp(total.max - max), math::exp(split.max - max));
    total.max = max;
    total.sum = split.sum.mul_add(new, total.sum * old);
    for (total, &split) in total.acc.iter_mut().zip(&split.acc) {
        *total = split.mul_add(new, *total * old);
    }
}

/// One KV head of one sequence.
struct Cache<'a, C> {
    k: &'a [C],
    v: &'a [C],
    seq: Seq<'a>,
    heads: Heads,
    block_size: usize,
    head: usize,
    /// Keys at the start that are not seen.
    left_out: usize,
}

impl<C: Float> Cache<'_, C> {
    /// Where the block of `position` begins in `k` and `v`, and the position in it.
    fn find(&self, position: usize) -> (usize, usize) {
        let block = self.seq.blocks[position / self.block_size] as usize;
        let base = (block * self.heads.num_kv_heads + self.head) * self.block_size * self.heads.head_dim;
        (base, position % self.block_size)
    }

    fn score(&self, q: &[f32], position: usize) -> f32 {
        let (base, slot) = self.find(position);
        let layout = KeyLayout { block_size: self.block_size };
        q.iter().enumerate().fold(0.0, |sum, (d, q)| q.mul_add(self.k[base + layout.at(slot, d)].to_f32(), sum))
    }

    fn value(&self, position: usize, d: usize) -> f32 {
        let (base, slot) = self.find(position);
        self.v[base + slot * self.heads.head_dim + d].to_f32()
    }

    fn split(&self, q: &[f32], first: usize, end: usize) -> Running {
        let mut run = Running::new(q.len());
        for first in (first..end).step_by(SPAN) {
            let score = |j| if j < self.left_out { f32::NEG_INFINITY } else { self.score(q, j) };
            let scores: Vec<f32> = (first..end.min(first + SPAN)).map(score).collect();
            let max = scores.iter().fold(run.max, |max, &score| max.max(score));
            let correction = math::exp(run.max - max);
            run.max = max;
            let mut lanes = [0.0; math::LANES];
            let weights: Vec<f32> = scores.iter().map(|score| math::exp(score - max)).collect();
            for (j, weight) in weights.iter().enumerate() {
                lanes[j % math::LANES] += weight;
            }
            run.sum = run.sum.mul_add(correction, math::fold(lanes));
            for (d, acc) in run.acc.iter_mut().enumerate() {
                *acc *= correction;
                for (j, weight) in weights.iter().enumerate().skip(self.left_out.saturating_sub(first)) {
                    *acc = weight.mul_add(self.value(first + j, d), *acc);
                }
            }
        }
        run
    }
}
