//! The reference, compiled for the CPU's vectors; rows over its threads.

use super::{LogprobsOut, MAX_TOP};
use crate::math;
use crate::pool::{SharedMut, parallel_for};
use crate::simd::{F32x16, Kernel, Level};

pub(super) fn logprobs(logits: &[f32], vocab: usize, ids: &[i32], top: usize, out: &mut LogprobsOut<'_>) {
    let logprob = SharedMut::new(out.logprob.as_mut_slice::<f32>());
    let rank = SharedMut::new(out.rank.as_mut_slice::<i32>());
    let top_ids = SharedMut::new(out.top_ids.as_mut_slice::<i32>());
    let top_logprobs = SharedMut::new(out.top_logprobs.as_mut_slice::<f32>());
    parallel_for(ids.len(), &|i| {
        // SAFETY: each index has its own elements and comes once; the tensors are borrowed until all are done. The level is
        // this CPU's own.
        unsafe {
            Level::best().run(Row {
                logits: &logits[i * vocab..][..vocab],
                id: ids[i],
                logprob: &mut logprob.slice(i..i + 1)[0],
                rank: &mut rank.slice(i..i + 1)[0],
                top_ids: top_ids.slice(i * top..(i + 1) * top),
                top_logprobs: top_logprobs.slice(i * top..(i + 1) * top),
            });
        }
    });
}

struct Row<'a> {
    logits: &'a [f32],
    id: i32,
    logprob: &'a mut f32,
    rank: &'a mut i32,
    top_ids: &'a mut [i32],
    top_logprobs: &'a mut [f32],
}

impl Kernel for Row<'_> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let normalizer = normalizer(self.logits);
        if normalizer.is_nan() {
            (*self.logprob, *self.rank) = (f32::NAN, 0);
            self.top_ids.fill(-1);
            self.top_logprobs.fill(f32::NAN);
            return;
        }
        let of = |token: usize| (f64::from(self.logits[token]) - normalizer) as f32;
        (*self.logprob, *self.rank) = match usize::try_from(self.id) {
            Ok(token) => (of(token), rank_of(self.logits, token)),
            Err(_) => (f32::NAN, 0),
        };
        likeliest(self.logits, self.top_ids);
        for (logprob, &id) in self.top_logprobs.iter_mut().zip(self.top_ids.iter()) {
            *logprob = of(id as usize);
        }
    }
}

/// ln of the sum of all e^logit; NaN if the row has no meaning.
#[inline(always)]
fn normalizer(logits: &[f32]) -> f64 {
    let max = math::largest(logits);
    let mut lanes = [0.0f64; math::LANES];
    let (chunks, rest) = logits.as_chunks::<{ math::LANES }>();
    for chunk in chunks {
        for i in 0..math::LANES {
            lanes[i] += f64::from(math::exp(chunk[i] - max));
        }
    }
    for (lane, &logit) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(math::exp(logit - max));
    }
    f64::from(max) + lanes.iter().sum::<f64>().ln()
}

#[inline(always)]
fn rank_of(logits: &[f32], token: usize) -> i32 {
    let own = logits[token];
    let mut likelier = 0u32;
    for &logit in logits {
        likelier += u32::from(logit > own);
    }
    let before = logits[..token].iter().filter(|&&logit| logit == own).count();
    1 + likelier as i32 + before as i32
}

/// Fills `top` with the likeliest tokens: one pass, in which nearly all groups fail the first comparison.
#[inline(always)]
fn likeliest(logits: &[f32], top: &mut [i32]) {
    const GROUP: usize = 64;
    let mut best = [(f32::NEG_INFINITY, -1i32); MAX_TOP];
    let best = &mut best[..top.len()];
    let Some(last) = best.len().checked_sub(1) else { return };
    for (group, in_group) in logits.chunks(GROUP).enumerate() {
        let mut enters = best[last].1 < 0;
        for &logit in in_group {
            enters |= logit > best[last].0;
        }
        if !enters {
            continue;
        }
        for (i, &logit) in in_group.iter().enumerate() {
            if logit > best[last].0 || best[last].1 < 0 {
                let at = best.partition_point(|&(other, token)| token >= 0 && other >= logit);
                best[at..].rotate_right(1);
                best[at] = (logit, (group * GROUP + i) as i32);
            }
        }
    }
    for (top, &(_, token)) in top.iter_mut().zip(best.iter()) {
        *top = token;
    }
}
