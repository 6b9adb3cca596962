//! 8-bit weights, quantized while they load: symmetric, one scale an output channel or one for each group of inputs.
//!
//! `w = scale * q`, `scale = max |w| / 127` over the channel or group, q rounded to nearest. Scales of groups are rounded to
//! f16 first, so that the kernel keeps them in 16 bits.

use drafthorse_kernels::ops::matmul_int8::Int8Weight;
use half::f16;

use super::GroupSize;
use super::scheme::{Part, QuantScheme, QuantWeight};
use super::stream::{Codes, RowCodes, pieces};
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
        for piece in pieces {
            let at = &piece.part.at;
            let Some(stored) = at.floats("weight", &[piece.part.out_features, in_features]) else { continue };
            at.stream("weight", in_features, stored.bytes(), &piece.slice, &mut |rows| {
                codes.encode(&rows, stored, group, &|row, codes| encode(row, group, codes));
                Ok(weight.write_rows(piece.first_row + rows.first, &codes.values, &codes.scales)?)
            })?;
        }
        Ok(Box::new(weight))
    }
}

fn encode(row: &[f32], group: usize, codes: &mut RowCodes<'_, i8>) {
    let is_grouped = group < row.len();
    let groups = row.chunks(group).zip(codes.values.chunks_mut(group));
    for ((weights, values), scale) in groups.zip(codes.scales.iter_mut()) {
        let largest = weights.iter().fold(0.0f32, |max, w| max.max(w.abs()));
        *scale = largest / 127.0;
        if is_grouped {
            *scale = f16::from_f32(*scale).to_f32();
        }
        let inverse = if *scale > 0.0 { 1.0 / *scale } else { 0.0 };
        for (q, w) in values.iter_mut().zip(weights) {
            // A scale that was rounded down would take the largest weight to 128: the cast stops at 127.
            *q = (w * inverse).round_ties_even().max(-127.0) as i8;
        }
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
        assert_eq!(scales.map(|scale| f16::from_f32(scale).to_f32()), scales);
        assert_eq!((values[31], values[32]), (127, -127));
    }

    #[test]
    fn a_row_of_zeros_stays_zero() {
        let (mut values, mut scales, mut offsets) = ([1i8; 4], [1.0], [0.0]);
        encode(&[0.0; 4], 4, &mut RowCodes { values: &mut values, scales: &mut scales, offsets: &mut offsets });
        assert_eq!((values, scales), ([0; 4], [0.0]));
    }
}
