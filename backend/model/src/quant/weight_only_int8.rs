//! 8-bit weights, quantized while they load: symmetric, one scale an output channel.
//!
//! `w = scale * q`, `scale = max |w| / 127` over the channel, q rounded to nearest.

use drafthorse_kernels::ops::matmul_int8::Int8Weight;

use super::scheme::{Part, QuantScheme, QuantWeight};
use super::stream::{Codes, RowCodes, pieces};
use crate::error::Result;

pub(super) struct WeightOnlyInt8;

impl WeightOnlyInt8 {
    pub(super) const NAME: &'static str = "weight_only_int8";
}

impl QuantScheme for WeightOnlyInt8 {
    fn name(&self) -> &'static str {
        WeightOnlyInt8::NAME
    }

    fn load_merged(&self, parts: &[Part<'_>], in_features: usize) -> Result<Box<dyn QuantWeight>> {
        let (pieces, [out, inputs]) = pieces(parts, in_features, 1)?;
        let mut weight = Int8Weight::new(parts[0].at.device(), out, inputs, None)?;
        let mut codes = Codes::new();
        for piece in pieces {
            let at = &piece.part.at;
            let Some(stored) = at.floats("weight", &[piece.part.out_features, in_features]) else { continue };
            at.stream("weight", in_features, stored.bytes(), &piece.slice, &mut |rows| {
                codes.encode(&rows, stored, rows.cols, &encode);
                Ok(weight.write_rows(piece.first_row + rows.first, &codes.values, &codes.scales)?)
            })?;
        }
        Ok(Box::new(weight))
    }
}

/// One channel.
fn encode(row: &[f32], codes: RowCodes<'_, i8>) {
    let scale = row.iter().fold(0.0f32, |max, w| max.max(w.abs())) / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    codes.scales[0] = scale;
    for (q, w) in codes.values.iter_mut().zip(row) {
        *q = (w * inverse).round_ties_even() as i8;
    }
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
            encode(&row, RowCodes { values: &mut values, scales: &mut scales, offsets: &mut offsets });
            for (q, w) in values.iter().zip(&row) {
                let error = (f32::from(*q) * scales[0] - w).abs();
                assert!(error <= scales[0] * 0.5001, "{w} became {q} * {}", scales[0]);
            }
            assert!(values.iter().any(|q| q.abs() == 127), "the largest weight has the largest code");
        }
    }

    #[test]
    fn a_row_of_zeros_stays_zero() {
        let (mut values, mut scales, mut offsets) = ([1i8; 4], [1.0], [0.0]);
        encode(&[0.0; 4], RowCodes { values: &mut values, scales: &mut scales, offsets: &mut offsets });
        assert_eq!((values, scales), ([0; 4], [0.0]));
    }
}
