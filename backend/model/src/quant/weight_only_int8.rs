//! 8-bit weights, quantized while they load: symmetric, one scale for each group of inputs or one an output channel.
//!
//! `w = scale * q`, q rounded to nearest. A channel's scale is `max |w| / 127`. A group's is that or a little more, whichever
//! leaves the least squared error: weights that were quantized before lie on a grid, and some scale meets it nearly. It is
//! rounded to f16 first, so that the kernel keeps it in 16 bits.

use drafthorse_kernels::ops::matmul_int8::Int8Weight;

use super::GroupSize;
use super::scheme::{Part, QuantScheme, QuantWeight};
use super::search::{limit, round, sum, to_f16};
use super::stream::{Codes, RowCodes, floats, pieces};
use crate::error::Result;

pub(super) struct WeightOnlyInt8 {
    pub(super) group: GroupSize,
}

impl WeightOnlyInt8 {
    pub(super) const NAME: &'static str = "weight_only_int8";
}

impl QuantScheme for WeightOnlyInt8 {
    fn name(&self) -> &'static str {
        WeightOnlyInt8::NAME
    }

    fn load_merged(&self, parts: &[Part<'_>], in_features: usize) -> Result<Box<dyn QuantWeight>> {
        let (pieces, [out, inputs]) = pieces(parts, in_features, 1)?;
        let at = &parts[0].at;
        let group = self.group.checked(at.path(), inputs)?;
        let mut weight = Int8Weight::new(at.device(), out, inputs, (group < inputs).then_some(group))?;
        let mut codes = Codes::new();
        for (piece, stored) in pieces.into_iter().zip(floats(parts, in_features)) {
            let (at, Some(stored)) = (&piece.part.at, stored) else { continue };
            at.stream("weight", in_features, stored.bytes(), &piece.slice, &mut |rows| {
                codes.encode(&rows, stored, group, &|row, codes| encode(row, group, codes));
                Ok(weight.write_rows(piece.first_row + rows.first, &codes.values, &codes.scales)?)
            })?;
        }
        Ok(Box::new(weight))
    }
}

/// Scales that are tried for a group: each this part wider than the one before.
const WIDER: f32 = 1.0 / 32.0;
const NUM_SCALES: usize = 7;

fn encode(row: &[f32], group: usize, codes: &mut RowCodes<'_, i8>) {
    let groups = row.chunks(group).zip(codes.values.chunks_mut(group));
    for ((weights, values), scale) in groups.zip(codes.scales.iter_mut()) {
        let largest = weights.iter().fold(0.0f32, |max, w| max.max(w.abs()));
        *scale = if group < row.len() { group_scale(weights, largest / 127.0) } else { largest / 127.0 };
        let inverse = inverse(*scale);
        for (q, w) in values.iter_mut().zip(weights) {
            *q = code(*w, inverse) as i8;
        }
    }
}

/// The best of the scales from `plain` up.
fn group_scale(weights: &[f32], plain: f32) -> f32 {
    let squared_error = |scale: f32| {
        let inverse = inverse(scale);
        sum(weights, |w| (code(w, inverse) * scale - w).powi(2))
    };
    let scales = (0..NUM_SCALES).map(|i| to_f16(plain * (1.0 + WIDER * i as f32)));
    let (mut best, mut least) = (0.0, f32::INFINITY);
    for scale in scales {
        let error = squared_error(scale);
        if error < least {
            (best, least) = (scale, error);
        }
    }
    best
}

fn inverse(scale: f32) -> f32 {
    if scale > 0.0 { 1.0 / scale } else { 0.0 }
}

/// The nearest code, as a whole number. A scale that was rounded down would take the largest weight past 127.
#[inline(always)]
fn code(w: f32, inverse: f32) -> f32 {
    limit(round(w * inverse), -127.0, 127.0)
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use super::*;

    #[test]
    fn a_code_is_within_half_a_step_of_its_weight() {
        let mut rng = StdRng::seed_from_u64(7);
        for scale in [1e-3f32, 0.2, 30.0] {
            let row: Vec<f32> = (0..96).map(|_| rng.random_range(-scale..scale)).collect();
            let (mut values, mut scales, mut offsets) = ([0i8; 96], [0.0], [0.0]);
            encode(&row, 96, &mut RowCodes { values: &mut values, scales: &mut scales, offsets: &mut offsets });
            for (q, w) in values.iter().zip(&row) {
                let error = (f32::from(*q) * scales[0] - w).abs();
                assert!(error <= scales[0] * 0.5001, "{w} became {q} * {}", scales[0]);
            }
            assert!(values.iter().any(|q| q.abs() == 127), "the largest weight has the largest code");
        }
    }

    #[test]
    fn a_group_has_a_scale_of_its_own_in_16_bits() {
        let row: Vec<f32> = (0..64).map(|i| if i < 32 { 0.01 * i as f32 } else { -3.0 }).collect();
        let (mut values, mut scales, mut offsets) = ([0i8; 64], [0.0; 2], [0.0; 2]);
        encode(&row, 32, &mut RowCodes { values: &mut values, scales: &mut scales, offsets: &mut offsets });
        assert_eq!(scales.map(to_f16), scales);
        for (q, w) in values.iter().zip(&row) {
            let scale = scales[usize::from(*w < 0.0)];
            assert!((f32::from(*q) * scale - w).abs() <= scale * 0.51, "{w} became {q} * {scale}");
        }
    }

    #[test]
    fn weights_that_lie_on_a_grid_are_met_better_than_by_the_plain_scale() {
        let mut rng = StdRng::seed_from_u64(3);
        let (mut searched, mut plain) = (0.0, 0.0);
        for _ in 0..50 {
            let (step, min) = (rng.random_range(0.01f32..0.02), rng.random_range(-0.15f32..-0.1));
            let row: Vec<f32> = (0..32).map(|i| min + step * ((i * 7) % 16) as f32).collect();
            let error = |scale: f32| row.iter().map(|&w| (code(w, inverse(scale)) * scale - w).powi(2)).sum::<f32>();
            let largest = row.iter().fold(0.0f32, |max, w| max.max(w.abs()));
            searched += error(group_scale(&row, largest / 127.0));
            plain += error(to_f16(largest / 127.0));
        }
        assert!(searched < 0.9 * plain, "{searched} against {plain}");
    }

    #[test]
    fn a_row_of_zeros_stays_zero() {
        let (mut values, mut scales, mut offsets) = ([1i8; 4], [1.0], [0.0]);
        encode(&[0.0; 4], 4, &mut RowCodes { values: &mut values, scales: &mut scales, offsets: &mut offsets });
        assert_eq!((values, scales), ([0; 4], [0.0]));
    }
}
