//! The reference: sorts the vocabulary, then applies the law sentence by sentence.

use super::philox::uniform;
use super::{FAILED, RowParams};
use crate::math;

/// One row's token, or [`FAILED`].
pub(super) fn sample(logits: &[f32], row: RowParams) -> i32 {
    let mut max = f32::NEG_INFINITY;
    let mut likeliest = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return FAILED;
        }
        if logit > max {
            (max, likeliest) = (logit, i);
        }
    }
    if max == f32::NEG_INFINITY {
        return FAILED;
    }
    if row.temperature == 0.0 {
        return likeliest as i32;
    }

    let weights = weights(logits, max, row.temperature);
    let kept = kept(logits, &weights, row);
    let total: f64 = kept.iter().map(|&i| f64::from(weights[i])).sum();
    let target = uniform(row.seed, row.position as u32) * total;
    let mut sum = 0.0;
    for &i in &kept {
        sum += f64::from(weights[i]);
        if sum > target {
            return i as i32;
        }
    }
    // Rounding left the target at the very end.
    kept.last().map_or(FAILED, |&i| i as i32)
}

/// exp((logit - max) / temperature): 1 for the likeliest.
pub(super) fn weights(logits: &[f32], max: f32, temperature: f32) -> Vec<f32> {
    logits.iter().map(|logit| math::exp((logit - max) / temperature)).collect()
}

/// The tokens that may be picked, in vocabulary order.
pub(super) fn kept(logits: &[f32], weights: &[f32], row: RowParams) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).filter(|&i| weights[i] > 0.0 && weights[i] >= row.min_p).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    if row.top_k > 0 && (row.top_k as usize) < order.len() {
        let last = logits[order[row.top_k as usize - 1]];
        order.retain(|&i| logits[i] >= last);
    }
    if row.top_p < 1.0 {
        let limit = f64::from(row.top_p) * order.iter().map(|&i| f64::from(weights[i])).sum::<f64>();
        let (mut sum, mut end) = (0.0, 0);
        while end < order.len() && (end == 0 || sum < limit) {
            let tie = logits[order[end]];
            while end < order.len() && logits[order[end]] == tie {
                sum += f64::from(weights[order[end]]);
                end += 1;
            }
        }
        order.truncate(end);
    }
    order.sort_unstable();
    order
}
