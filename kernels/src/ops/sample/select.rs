//! The fast path: no sorting, and a closer look only at tokens that may be kept.

use super::philox::uniform;
use super::{FAILED, RowParams};
use crate::math;
use crate::simd::{F32x16, Kernel};

/// Tokens that are summed up, and passed over, together.
const GROUP: usize = 64;

/// What a row needs besides its logits.
pub(super) struct Scratch<'a> {
    /// `[vocab]`: exp((logit - max) / temperature), or 0 below `min_p`.
    pub weights: &'a mut [f32],
    /// `[vocab]`: tokens that may be kept, in order.
    pub tokens: &'a mut [i32],
    /// Twice `[vocab / 64]`, rounded up: the largest weight of each group of tokens, and room to sort in.
    pub largest: &'a mut [f32],
}

impl Scratch<'_> {
    /// Elements of `largest`.
    pub(super) fn num_largest(vocab: usize) -> usize {
        2 * vocab.div_ceil(GROUP)
    }
}

/// Samples one row.
pub(super) struct Sample<'a, 'b> {
    pub logits: &'a [f32],
    pub row: RowParams,
    pub scratch: &'a mut Scratch<'b>,
    pub id: &'a mut i32,
}

impl Kernel for Sample<'_, '_> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let max = math::largest(self.logits);
        *self.id = if max.is_nan() {
            FAILED
        } else if self.row.temperature == 0.0 {
            first_of(self.logits, max)
        } else {
            sample(self.logits, max, self.row, self.scratch)
        };
    }
}

#[inline(always)]
fn first_of(logits: &[f32], max: f32) -> i32 {
    for (group, logits) in logits.chunks(GROUP).enumerate() {
        let mut found = false;
        for &logit in logits {
            found |= logit == max;
        }
        if found {
            return (group * GROUP + logits.iter().position(|&logit| logit == max).unwrap_or(0)) as i32;
        }
    }
    FAILED
}

#[inline(always)]
fn sample(logits: &[f32], max: f32, row: RowParams, scratch: &mut Scratch<'_>) -> i32 {
    let Scratch { weights, tokens, largest } = scratch;
    let num_groups = logits.len().div_ceil(GROUP);
    let (largest, room) = largest.split_at_mut(num_groups);
    let total = weigh(logits, max, row, weights, largest);
    let u = uniform(row.seed, row.position as u32);
    let top_k = row.top_k.max(0) as usize;
    let by_rank = top_k > 0 && top_k < logits.len();
    let by_mass = row.top_p < 1.0;
    if !by_rank && !by_mass {
        return pick(weights, u * total);
    }

    // A weight below which nothing is kept. Of the k likeliest tokens none weighs less than the k-th of the groups' largest; and
    // all tokens lighter than their average share of what top_p leaves out weigh no more than that together.
    let mut floor = f32::MIN_POSITIVE;
    if by_rank && top_k <= num_groups {
        room[..num_groups].copy_from_slice(largest);
        let (_, kth, _) = room[..num_groups].select_nth_unstable_by(top_k - 1, |a, b| b.total_cmp(a));
        floor = floor.max(*kth);
    } else if !by_rank {
        let left_out = (1.0 - f64::from(row.top_p)) * total / logits.len() as f64;
        // A little less: both this and the sums are rounded.
        floor = floor.max((left_out * (1.0 - 1e-6)) as f32);
    }
    let mut num = 0;
    for (group, weights) in weights.chunks(GROUP).enumerate() {
        if largest[group] >= floor {
            for (i, &weight) in weights.iter().enumerate() {
                tokens[num] = (group * GROUP + i) as i32;
                num += usize::from(weight >= floor);
            }
        }
    }
    let mut kept = &mut tokens[..num];
    let mut total = total;
    if by_rank {
        if num > top_k {
            let cut = cut(logits, kept, top_k as f64, |_| 1.0);
            kept = retain(kept, |token| key(logits[token]) >= cut);
        }
        total = kept.iter().map(|&token| f64::from(weights[token as usize])).sum();
    }
    if by_mass {
        // The likeliest is kept whatever the limit.
        let limit = (f64::from(row.top_p) * total).max(f64::MIN_POSITIVE);
        let cut = cut(logits, kept, limit, |token| f64::from(weights[token]));
        kept = retain(kept, |token| key(logits[token]) >= cut);
    }

    // Move the kept weights together; no token moves up.
    for (i, &token) in kept.iter().enumerate() {
        weights[i] = weights[token as usize];
    }
    let weights = &weights[..kept.len()];
    let mut total = 0.0;
    for group in weights.chunks(GROUP) {
        total += sum(group);
    }
    match usize::try_from(pick(weights, u * total)) {
        Ok(i) => kept[i],
        Err(_) => FAILED,
    }
}

/// Fills `weights`, and `largest` by group. The sum of all.
#[inline(always)]
fn weigh(logits: &[f32], max: f32, row: RowParams, weights: &mut [f32], largest: &mut [f32]) -> f64 {
    let mut total = 0.0;
    for (group, largest) in largest.iter_mut().enumerate() {
        let start = group * GROUP;
        let end = logits.len().min(start + GROUP);
        let mut in_group = [f32::NEG_INFINITY; GROUP];
        in_group[..end - start].copy_from_slice(&logits[start..end]);
        let mut lanes = [0.0; math::LANES];
        for i in 0..GROUP {
            let weight = math::exp((in_group[i] - max) / row.temperature);
            in_group[i] = if weight >= row.min_p { weight } else { 0.0 };
        }
        for chunk in in_group.as_chunks::<{ math::LANES }>().0 {
            for i in 0..math::LANES {
                lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
            }
        }
        *largest = lanes.into_iter().fold(0.0, f32::max);
        weights[start..end].copy_from_slice(&in_group[..end - start]);
        total += sum(&in_group);
    }
    total
}

/// The sum of at most a group.
#[inline(always)]
fn sum(weights: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0f64; LANES];
    let (chunks, rest) = weights.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] += f64::from(chunk[i]);
        }
    }
    for (lane, &weight) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(weight);
    }
    for width in [4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// The first token at which the sum of weights exceeds `target`; the last of any weight if rounding keeps it below.
#[inline(always)]
fn pick(weights: &[f32], target: f64) -> i32 {
    let mut before = 0.0;
    for (group, in_group) in weights.chunks(GROUP).enumerate() {
        let end = before + sum(in_group);
        if end > target {
            let mut sum = before;
            let mut last = None;
            for (i, &weight) in in_group.iter().enumerate() {
                sum += f64::from(weight);
                if weight > 0.0 {
                    last = Some(group * GROUP + i);
                }
                if sum > target {
                    break;
                }
            }
            return last.map_or(FAILED, |token| token as i32);
        }
        before = end;
    }
    weights.iter().rposition(|&weight| weight > 0.0).map_or(FAILED, |token| token as i32)
}

/// Keeps the tokens that `keep` says, in order, at the front.
#[inline(always)]
fn retain(tokens: &mut [i32], keep: impl Fn(usize) -> bool) -> &mut [i32] {
    let mut num = 0;
    for i in 0..tokens.len() {
        let token = tokens[i];
        tokens[num] = token;
        num += usize::from(keep(token as usize));
    }
    &mut tokens[..num]
}

/// An integer that is larger the larger a logit is, and equal for equal ones.
#[inline(always)]
fn key(logit: f32) -> u32 {
    // Adding zero makes one of the two zeros.
    let bits = (logit + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// The smallest key among `tokens` than which the likelier ones have less than `limit` of mass together.
///
/// Finds it eleven bits at a time, the upper ones first, through sums by their value.
#[inline(always)]
fn cut(logits: &[f32], tokens: &[i32], limit: f64, mass: impl Fn(usize) -> f64) -> u32 {
    const WIDTHS: [u32; 3] = [11, 11, 10];
    // Two of each, taken in turn: many tokens in a row add to one of few, and need not wait for each other.
    let mut sums = [[0.0f64; 2]; 1 << 11];
    let (mut known, mut num_known) = (0u32, 0u32);
    let mut above = 0.0;
    for width in WIDTHS {
        let shift = 32 - num_known - width;
        let sums = &mut sums[..1 << width];
        sums.fill([0.0; 2]);
        for (i, &token) in tokens.iter().enumerate() {
            let key = key(logits[token as usize]);
            // All of the known upper bits agree; at first there are none.
            if (u64::from(key ^ known)) >> (shift + width) == 0 {
                sums[(key >> shift) as usize & ((1 << width) - 1)][i % 2] += mass(token as usize);
            }
        }
        let mut found = None;
        for (value, [even, odd]) in sums.iter().enumerate().rev() {
            let sum = even + odd;
            if above + sum >= limit {
                found = Some(value);
                break;
            }
            above += sum;
        }
        // All together are below the limit: keep all.
        let Some(value) = found else { return 0 };
        known |= (value as u32) << shift;
        num_known += width;
    }
    known
}
