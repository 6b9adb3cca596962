//! The reference, compiled for the CPU's vectors and spread over its threads.

use super::frequencies::frequencies;
use super::{RopeParams, RopeScaling};
use crate::dtype::Float;
use crate::ops::attention::Heads;
use crate::ops::rows;
use crate::simd::{F32x16, Kernel, Level};
use crate::tensor::Tensor;

pub(super) fn fill_table(params: &RopeParams, cos_sin: &mut [f32]) {
    let half = params.rotary_dim / 2;
    if half == 0 {
        return;
    }
    let by_position = matches!(params.scaling, RopeScaling::Dynamic { .. });
    let mut current = frequencies(params, 0);
    for (position, row) in cos_sin.chunks_exact_mut(params.rotary_dim).enumerate() {
        if by_position {
            current = frequencies(params, position);
        }
        let (cos, sin) = row.split_at_mut(half);
        for ((cos, sin), inverse) in cos.iter_mut().zip(sin).zip(&current.inverse) {
            // The angle is rounded to f32, as it was when the model was trained; its sine is then exact.
            let angle = f64::from(position as f32 * inverse);
            *cos = angle.cos() as f32 * current.amplitude;
            *sin = angle.sin() as f32 * current.amplitude;
        }
    }
}

pub(super) fn rope<T: Float>(qkv: &mut [T], positions: &[i32], table: &Tensor, heads: Heads) {
    let (_, rotary_dim) = table.rows_cols();
    rows::parallel(qkv, heads.qkv_cols(), &|first, qkv| {
        let rope = Rope { qkv, positions: &positions[first..], table: table.as_slice(), rotary_dim, heads };
        // SAFETY: the level is this CPU's own.
        unsafe { Level::best().run(rope) }
    });
}

struct Rope<'a, T> {
    qkv: &'a mut [T],
    positions: &'a [i32],
    table: &'a [f32],
    rotary_dim: usize,
    heads: Heads,
}

impl<T: Float> Kernel for Rope<'_, T> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let (half, head_dim) = (self.rotary_dim / 2, self.heads.head_dim);
        let turned = (self.heads.num_heads + self.heads.num_kv_heads) * head_dim;
        for (row, &position) in self.qkv.chunks_exact_mut(self.heads.qkv_cols()).zip(self.positions) {
            let (cos, sin) = self.table[position as usize * self.rotary_dim..][..self.rotary_dim].split_at(half);
            for head in row[..turned].chunks_exact_mut(head_dim) {
                let (first, second) = head[..self.rotary_dim].split_at_mut(half);
                for i in 0..half {
                    let (x, y) = (first[i].to_f32(), second[i].to_f32());
                    first[i] = T::from_f32(x * cos[i] - y * sin[i]);
                    second[i] = T::from_f32(y * cos[i] + x * sin[i]);
                }
            }
        }
    }
}
