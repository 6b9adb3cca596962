//! The truth: one output at a time, in the order of its inputs.

use super::activations::lane_sum;
use super::{Format, Packed};
use crate::dtype::Float;

/// `y[row][output]` in f32, before rounding to y's dtype.
pub(crate) fn matmul<F: Format, T: Float>(x: &[T], weight: &Packed<F>) -> Vec<f32> {
    let mut y = Vec::new();
    for x in x.chunks(weight.inputs) {
        for output in 0..weight.outputs {
            y.push(dot(x, weight, output));
        }
    }
    y
}

fn dot<F: Format, T: Float>(x: &[T], weight: &Packed<F>, output: usize) -> f32 {
    let q: Vec<f32> = weight.raw_row(output).collect();
    let chain = |x: &[T], q: &[f32]| x.iter().zip(q).fold(0.0f32, |sum, (x, &q)| x.to_f32().mul_add(q, sum));
    let Some(scales) = &weight.scales else { return chain(x, &q) };
    let groups = x.chunks(scales.group).zip(q.chunks(scales.group)).enumerate();
    groups.fold(0.0, |acc, (group, (x, q))| {
        let (scale, offset) = scales.get(output, group);
        let acc = scale.mul_add(chain(x, q), acc);
        if F::OFFSET { offset.mul_add(lane_sum(x), acc) } else { acc }
    })
}
