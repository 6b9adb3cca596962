//! The reference.

use super::frequencies::frequencies;
use super::{RopeParams, RopeScaling};
use crate::dtype::Float;
use crate::ops::attention::Heads;
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
    let half = rotary_dim / 2;
    let turned = (heads.num_heads + heads.num_kv_heads) * heads.head_dim;
    for (row, &position) in qkv.chunks_exact_mut(heads.qkv_cols()).zip(positions) {
        let (cos, sin) = table.as_slice::<f32>()[position as usize * rotary_dim..][..rotary_dim].split_at(half);
        for head in row[..turned].chunks_exact_mut(heads.head_dim) {
            let (first, second) = head[..rotary_dim].split_at_mut(half);
            for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                let (x, y) = (a.to_f32(), b.to_f32());
                *a = T::from_f32(x * c - y * s);
                *b = T::from_f32(y * c + x * s);
            }
        }
    }
}
