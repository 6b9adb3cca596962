//! The reference.

use super::{LogprobsOut, MAX_TOP};
use crate::math;

pub(super) fn logprobs(logits: &[f32], vocab: usize, ids: &[i32], top: usize, out: &mut LogprobsOut<'_>) {
    let rows = logits.chunks_exact(vocab.max(1)).zip(ids);
    let (logprob, rank) = (out.logprob.as_mut_slice::<f32>(), out.rank.as_mut_slice::<i32>());
    let (top_ids, top_logprobs) = (out.top_ids.as_mut_slice::<i32>(), out.top_logprobs.as_mut_slice::<f32>());
    for (row, (logits, &id)) in rows.enumerate() {
        let normalizer = normalizer(logits);
        let of = |token: usize| (f64::from(logits[token]) - normalizer) as f32;
        (logprob[row], rank[row]) = match usize::try_from(id) {
            Ok(token) if !normalizer.is_nan() => (of(token), rank_of(logits, token)),
            _ => (f32::NAN, 0),
        };
        let slots = row * top..(row + 1) * top;
        let (top_ids, top_logprobs) = (&mut top_ids[slots.clone()], &mut top_logprobs[slots]);
        if normalizer.is_nan() {
            top_ids.fill(-1);
            top_logprobs.fill(f32::NAN);
            continue;
        }
        likeliest(logits, top_ids);
        for (logprob, &id) in top_logprobs.iter_mut().zip(top_ids.iter()) {
            *logprob = of(id as usize);
        }
    }
}

/// ln of the sum of all e^logit; NaN if the row has no meaning.
fn normalizer(logits: &[f32]) -> f64 {
    let mut max = f32::NEG_INFINITY;
    let mut poison = 0.0;
    for &logit in logits {
        max = if logit > max { logit } else { max };
        // NaN stays, and inf becomes it; -inf is a mask.
        poison += if logit == f32::NEG_INFINITY { 0.0 } else { logit * 0.0 };
    }
    if max == f32::NEG_INFINITY || poison.is_nan() {
        return f64::NAN;
    }
    let mut lanes = [0.0f64; math::LANES];
    for chunk in logits.chunks(math::LANES) {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(math::exp(logit - max));
        }
    }
    f64::from(max) + lanes.iter().sum::<f64>().ln()
}

fn rank_of(logits: &[f32], token: usize) -> i32 {
    let own = logits[token];
    let likelier = logits.iter().filter(|&&logit| logit > own).count();
    let before = logits[..token].iter().filter(|&&logit| logit == own).count();
    (1 + likelier + before) as i32
}

/// Fills `top` with the likeliest tokens. Most tokens fail the first comparison, so this is one pass.
fn likeliest(logits: &[f32], top: &mut [i32]) {
    let mut best = [(f32::NEG_INFINITY, -1i32); MAX_TOP];
    let best = &mut best[..top.len()];
    let Some(last) = best.len().checked_sub(1) else { return };
    for (token, &logit) in logits.iter().enumerate() {
        if logit > best[last].0 || best[last].1 < 0 {
            let at = best.partition_point(|&(other, token)| token >= 0 && other >= logit);
            best[at..].rotate_right(1);
            best[at] = (logit, token as i32);
        }
    }
    for (top, &(_, token)) in top.iter_mut().zip(best.iter()) {
        *top = token;
    }
}
