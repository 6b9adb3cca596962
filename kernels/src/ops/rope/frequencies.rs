//! What each pair of dimensions turns by per position, under every way of stretching the context.
//!
//! The formulas are those that checkpoints' `rope_scaling` settings mean (transformers, `modeling_rope_utils`), rounded to f32
//! where they are there, so that long contexts turn by the same angles.
//! Sources: Su et al. 2021, arXiv:2104.09864; YaRN: Peng et al. 2023, arXiv:2309.00071; Llama 3.1's own by wavelength.

use std::f64::consts::PI;

use super::{RopeParams, RopeScaling};

/// Inverse frequencies of one sequence length.
pub(super) struct Frequencies {
    /// Radians per position, one for each of the `rotary_dim / 2` pairs.
    pub(super) inverse: Vec<f32>,
    /// Multiplies cosine and sine.
    pub(super) amplitude: f32,
}

/// The frequencies that hold for a token at `position`.
pub(super) fn frequencies(params: &RopeParams, position: usize) -> Frequencies {
    let plain = |theta: f64| -> Vec<f32> { pair_powers(theta, params.rotary_dim).map(|power| 1.0 / power).collect() };
    let (inverse, amplitude) = match &params.scaling {
        RopeScaling::None => (plain(params.theta), 1.0),
        RopeScaling::Linear { factor } => {
            let factor = *factor as f32;
            (plain(params.theta).into_iter().map(|inverse| inverse / factor).collect(), 1.0)
        }
        RopeScaling::Dynamic { factor, original_max_positions } => {
            let original = *original_max_positions as f64;
            let stretch = factor * original.max((position + 1) as f64) / original - (factor - 1.0);
            let dim = params.rotary_dim as f64;
            (plain(params.theta * stretch.powf(dim / (dim - 2.0))), 1.0)
        }
        RopeScaling::Llama3 { .. } => {
            (plain(params.theta).into_iter().map(|i| llama3(&params.scaling, i)).collect(), 1.0)
        }
        RopeScaling::Yarn { .. } => yarn(params),
    };
    Frequencies { inverse, amplitude }
}

/// theta^(2i / dim) for every pair i.
fn pair_powers(theta: f64, dim: usize) -> impl Iterator<Item = f32> {
    (0..dim / 2).map(move |pair| {
        let exponent = (2 * pair) as f32 / dim as f32;
        theta.powf(exponent.into()) as f32
    })
}

/// Long waves are slowed by the factor, short ones kept, those between blended.
fn llama3(scaling: &RopeScaling, inverse: f32) -> f32 {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } = *scaling else {
        return inverse;
    };
    let original = original_max_positions as f64;
    let (factor, low, high) = (factor as f32, low_freq_factor, high_freq_factor);
    let wavelength = (2.0 * PI) as f32 / inverse;
    if f64::from(wavelength) > original / low {
        inverse / factor
    } else if f64::from(wavelength) < original / high {
        inverse
    } else {
        let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
        (1.0 - smooth) * inverse / factor + smooth * inverse
    }
}

fn yarn(params: &RopeParams) -> (Vec<f32>, f32) {
    let RopeScaling::Yarn {
        factor,
        original_max_positions,
        beta_fast,
        beta_slow,
        attention_factor,
        mscale,
        mscale_all_dim,
        truncate,
    } = params.scaling
    else {
        return (Vec::new(), 1.0);
    };
    let mscale_of = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let amplitude = attention_factor.unwrap_or_else(|| match (mscale, mscale_all_dim) {
        (Some(one), Some(all)) if one != 0.0 && all != 0.0 => mscale_of(one) / mscale_of(all),
        _ => mscale_of(1.0),
    });

    // The pair, as a fraction, that makes `rotations` full turns over the original context.
    let dim = params.rotary_dim as f64;
    let pair_with = |rotations: f64| {
        dim * (original_max_positions as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * params.theta.ln())
    };
    let (mut low, mut high) = (pair_with(beta_fast), pair_with(beta_slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }

    let inverse = pair_powers(params.theta, params.rotary_dim).enumerate().map(|(pair, power)| {
        let ramp = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let keep = 1.0 - ramp;
        1.0 / (factor as f32 * power) * (1.0 - keep) + 1.0 / power * keep
    });
    (inverse.collect(), amplitude as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with values that transformers 5.17 computed: (pair, inverse frequency) of a 64-dimensional head.
    fn check(theta: f64, scaling: RopeScaling, position: usize, amplitude: f32, want: [(usize, f32); 6]) {
        let params = RopeParams { head_dim: 64, rotary_dim: 64, theta, max_positions: 8192, scaling };
        let got = frequencies(&params, position);
        let label = format!("{:?}", params.scaling);
        assert!((got.amplitude - amplitude).abs() < 1e-6, "{label}: amplitude {}", got.amplitude);
        for (pair, want) in want {
            let got = got.inverse[pair];
            assert!((got - want).abs() <= 2e-7 * want, "{label}: pair {pair} is {got}, expected {want}");
        }
    }

    const PLAIN: [(usize, f32); 6] =
        [(0, 1.0), (1, 0.749_894_2), (8, 0.1), (16, 0.01), (24, 0.001), (31, 0.000_133_352_15)];

    fn yarn(factor: f64, original_max_positions: usize) -> RopeScaling {
        RopeScaling::Yarn {
            factor,
            original_max_positions,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        }
    }

    #[test]
    fn plain_and_linear() {
        check(10_000.0, RopeScaling::None, 5, 1.0, PLAIN);
        check(10_000.0, RopeScaling::Linear { factor: 4.0 }, 5, 1.0, PLAIN.map(|(pair, want)| (pair, want / 4.0)));
    }

    #[test]
    fn dynamic_leaves_the_original_context_alone() {
        let scaling = RopeScaling::Dynamic { factor: 2.0, original_max_positions: 2048 };
        check(10_000.0, scaling.clone(), 99, 1.0, PLAIN);
        check(10_000.0, scaling.clone(), 2047, 1.0, PLAIN);
        let stretched = [
            (0, 1.0),
            (1, 0.734_160_06),
            (8, 0.084_396_794),
            (16, 0.007_122_819),
            (24, 0.000_601_143_05),
            (31, 6.910_557e-5),
        ];
        check(10_000.0, scaling, 2999, 1.0, stretched);
    }

    #[test]
    fn llama3_slows_long_waves() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        };
        let want = [
            (0, 1.0),
            (1, 0.663_601_3),
            (8, 0.037_606_03),
            (16, 0.000_524_846),
            (24, 6.647_869_7e-6),
            (31, 3.767_322_6e-7),
        ];
        check(500_000.0, scaling, 5, 1.0, want);
    }

    #[test]
    fn yarn_blends_by_rotations() {
        let want = [(0, 1.0), (1, 0.749_894_2), (8, 0.1), (16, 0.005_384_615), (24, 0.000_25), (31, 3.333_803_8e-5)];
        check(10_000.0, yarn(4.0, 2048), 5, 1.138_629_4, want);
    }

    #[test]
    fn yarn_amplitude_from_its_settings() {
        let want = [(0, 1.0), (1, 0.749_894_2), (8, 0.1), (16, 0.005_500_000_4), (24, 2.5e-5), (31, 3.333_803_5e-6)];
        let mut scaling = yarn(40.0, 4096);
        if let RopeScaling::Yarn { mscale, mscale_all_dim, .. } = &mut scaling {
            (*mscale, *mscale_all_dim) = (Some(1.0), Some(0.5));
        }
        check(10_000.0, scaling.clone(), 5, 1.155_722, want);
        if let RopeScaling::Yarn { attention_factor, .. } = &mut scaling {
            *attention_factor = Some(0.7);
        }
        check(10_000.0, scaling, 5, 0.7, want);
    }

    #[test]
    fn yarn_without_truncation() {
        let mut scaling = yarn(32.0, 4096);
        if let RopeScaling::Yarn { truncate, .. } = &mut scaling {
            *truncate = false;
        }
        let want = [
            (0, 1.0),
            (1, 0.689_044_3),
            (8, 0.050_813_273),
            (16, 0.000_456_483_92),
            (24, 4.099_978_5e-6),
            (31, 3.023_511_4e-7),
        ];
        check(150_000.0, scaling, 5, 1.346_573_6, want);
    }

    #[test]
    fn a_partial_head_has_fewer_pairs() {
        let scaling = RopeScaling::Linear { factor: 2.0 };
        let params = RopeParams { head_dim: 64, rotary_dim: 32, theta: 10_000.0, max_positions: 8, scaling };
        let got = frequencies(&params, 0).inverse;
        assert_eq!(got.len(), 16);
        // transformers 5.17, partial_rotary_factor 0.5
        for (pair, want) in [(0, 0.5), (1, 0.281_170_67), (4, 0.05), (8, 0.005), (12, 0.000_5), (15, 8.891_397e-5)] {
            assert!((got[pair] - want).abs() <= 2e-7 * want, "pair {pair} is {}", got[pair]);
        }
    }
}
