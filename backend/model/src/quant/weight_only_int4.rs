//! 4-bit weights, quantized while they load: asymmetric, a scale and a minimum for each group of neighbouring inputs.
//!
//! `w = scale * q + min`, q from 0 to 15. Rounding to the span of a group is good, but not best: a few narrower and wider grids
//! are tried, for each the least squares scale and minimum of its codes are taken, and the grid with the least squared error
//! stays. Both numbers are rounded to f16 before the last codes are chosen, so that the kernel may keep them in 16 bits.

use drafthorse_kernels::ops::matmul_int4::{Int4Weight, Offset};

use super::GroupSize;
use super::scheme::{Part, QuantScheme, QuantWeight};
use super::search::{limit, round, sum, to_f16};
use super::stream::{Codes, RowCodes, floats, pieces};
use crate::error::Result;

/// Steps that a group's span is first cut into. 15 is the plain choice; more clips the outermost weights.
const STEPS: [f32; 4] = [15.0, 14.5, 16.0, 17.0];

pub(super) struct WeightOnlyInt4 {
    pub(super) group: GroupSize,
}

impl WeightOnlyInt4 {
    pub(super) const NAME: &'static str = "weight_only_int4";
}

impl QuantScheme for WeightOnlyInt4 {
    fn name(&self) -> &'static str {
        WeightOnlyInt4::NAME
    }

    fn load_merged(&self, parts: &[Part<'_>], in_features: usize) -> Result<Box<dyn QuantWeight>> {
        let (pieces, [out, inputs]) = pieces(parts, in_features, 1)?;
        let at = &parts[0].at;
        let group = self.group.checked(at.path(), inputs)?;
        let mut weight = Int4Weight::new(at.device(), out, inputs, (group < inputs).then_some(group), Offset::Min)?;
        let mut codes = Codes::new();
        for (piece, stored) in pieces.into_iter().zip(floats(parts, in_features)) {
            let (at, Some(stored)) = (&piece.part.at, stored) else { continue };
            at.stream("weight", in_features, stored.bytes(), &piece.slice, &mut |rows| {
                codes.encode(&rows, stored, group, &|row, codes| encode(row, group, codes));
                let first = piece.first_row + rows.first;
                Ok(weight.write_rows(first, &codes.values, &codes.scales, &codes.offsets)?)
            })?;
        }
        Ok(Box::new(weight))
    }
}

fn encode(row: &[f32], group: usize, codes: &mut RowCodes<'_, u8>) {
    let groups = row.chunks(group).zip(codes.values.chunks_mut(group));
    for ((weights, values), (scale, min)) in groups.zip(codes.scales.iter_mut().zip(codes.offsets.iter_mut())) {
        (*scale, *min) = encode_group(weights, values);
    }
}

/// Scale and minimum of one group; its codes go to `values`.
fn encode_group(weights: &[f32], values: &mut [u8]) -> (f32, f32) {
    let low = weights.iter().copied().fold(f32::INFINITY, f32::min);
    let high = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let span = high - low;
    let mut best = Grid { scale: to_f16(span / 15.0), min: to_f16(low) };
    if best.scale > 0.0 {
        let mut least = best.squared_error(weights);
        for steps in STEPS {
            let Some(grid) = (Grid { scale: span / steps, min: low }).least_squares(weights) else { continue };
            let error = grid.squared_error(weights);
            if error < least {
                (best, least) = (grid, error);
            }
        }
    } else {
        best.scale = 0.0;
    }
    let inverse = best.inverse();
    for (value, &w) in values.iter_mut().zip(weights) {
        *value = best.code(w, inverse) as u8;
    }
    (best.scale, best.min)
}

/// The sixteen numbers `scale * q + min`.
#[derive(Clone, Copy)]
struct Grid {
    scale: f32,
    min: f32,
}

impl Grid {
    fn inverse(self) -> f32 {
        if self.scale > 0.0 { 1.0 / self.scale } else { 0.0 }
    }

    /// The nearest code, as a whole number.
    #[inline(always)]
    fn code(self, w: f32, inverse: f32) -> f32 {
        round(limit((w - self.min) * inverse, 0.0, 15.0))
    }

    fn squared_error(self, weights: &[f32]) -> f32 {
        let inverse = self.inverse();
        sum(weights, |w| {
            let error = self.scale * self.code(w, inverse) + self.min - w;
            error * error
        })
    }

    /// The scale and minimum that fit best the weights that have their codes from this grid. None if all codes are equal.
    fn least_squares(self, weights: &[f32]) -> Option<Grid> {
        let inverse = self.inverse();
        let n = weights.len() as f32;
        let codes = sum(weights, |w| self.code(w, inverse));
        let squares = sum(weights, |w| self.code(w, inverse) * self.code(w, inverse));
        let products = sum(weights, |w| self.code(w, inverse) * (w - self.min));
        let offsets = sum(weights, |w| w - self.min);
        let determinant = n * squares - codes * codes;
        if determinant <= 0.0 {
            return None;
        }
        let scale = to_f16((n * products - codes * offsets) / determinant);
        let min = to_f16(self.min + (offsets - scale * codes) / n);
        (scale > 0.0).then_some(Grid { scale, min })
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use super::*;

    /// Sums of two uniform numbers: more in the middle than at the ends, as weights are.
    fn weights(len: usize, seed: u64) -> Vec<f32> {
        let mut rng = StdRng::seed_from_u64(seed);
        (0..len).map(|_| rng.random_range(-0.1f32..0.1) + rng.random_range(-0.1f32..0.12)).collect()
    }

    fn squared_error(weights: &[f32], values: &[u8], scale: f32, min: f32) -> f32 {
        weights.iter().zip(values).map(|(w, &q)| (scale * f32::from(q) + min - w).powi(2)).sum()
    }

    #[test]
    fn a_code_is_the_nearest_of_the_grid() {
        for seed in 0..20 {
            let weights = weights(64, seed);
            let mut values = [99u8; 64];
            let (scale, min) = encode_group(&weights, &mut values);
            assert_eq!((scale, min), (to_f16(scale), to_f16(min)), "both fit in 16 bits");
            for (&q, &w) in values.iter().zip(&weights) {
                let inside = (min..=min + 15.0 * scale).contains(&w);
                let error = (scale * f32::from(q) + min - w).abs();
                assert!(q <= 15 && (error <= scale * 0.501 || !inside), "{w} became {q} of {scale} and {min}");
            }
        }
    }

    #[test]
    fn searching_is_better_than_the_span_of_the_group() {
        for seed in 0..20 {
            let weights = weights(128, seed);
            let mut values = [0u8; 128];
            let (scale, min) = encode_group(&weights, &mut values);
            let low = weights.iter().copied().fold(f32::INFINITY, f32::min);
            let high = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let plain = Grid { scale: to_f16((high - low) / 15.0), min: to_f16(low) };
            assert!(squared_error(&weights, &values, scale, min) <= plain.squared_error(&weights) * 1.0001);
        }
    }

    #[test]
    fn what_is_on_a_grid_already_is_kept_exactly() {
        let (scale, min) = (to_f16(0.013), to_f16(-0.09));
        let codes: Vec<u8> = (0..32).map(|i| (i * 7 % 16) as u8).collect();
        let weights: Vec<f32> = codes.iter().map(|&q| scale * f32::from(q) + min).collect();
        let mut values = [0u8; 32];
        assert_eq!(encode_group(&weights, &mut values), (scale, min));
        assert_eq!(values.as_slice(), codes);
    }

    #[test]
    fn equal_weights_are_their_own_minimum() {
        let mut values = [9u8; 32];
        assert_eq!(encode_group(&[0.25; 32], &mut values), (0.0, 0.25));
        assert_eq!(values, [0; 32]);
    }
}
