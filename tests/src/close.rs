//! How far numbers may be from a golden: all bounds in one place.

/// f32 activations against transformers in f32.
pub const F32: f64 = 1e-4;
/// bf16 activations against transformers in f32, by [`Distance::difference`]: single logits may be further off.
pub const BF16: f64 = 1e-3;
/// Log-probabilities of the sample model, absolute.
pub const LOGPROB: f64 = 2e-3;
/// Below this margin between the two best tokens, in log-probability, either may be picked.
pub const NEAR_TIE: f64 = 0.05;

/// Two lists of numbers, compared.
#[derive(Clone, Copy, Debug)]
pub struct Distance {
    /// `1 - 2xy / (x² + y²)`.
    pub difference: f64,
    /// The largest absolute difference over the largest absolute value wanted.
    pub relative: f64,
}

/// Compares; a NaN anywhere is infinitely far.
///
/// # Panics
/// If there are not as many numbers on both sides, or none.
pub fn distance(got: &[f32], want: &[f32]) -> Distance {
    assert!(!want.is_empty() && got.len() == want.len(), "{} numbers, {} wanted", got.len(), want.len());
    if got.iter().chain(want).any(|x| !x.is_finite()) {
        return Distance { difference: f64::INFINITY, relative: f64::INFINITY };
    }
    let pairs = || got.iter().zip(want).map(|(&x, &y)| (f64::from(x), f64::from(y)));
    let (product, squares) = pairs().fold((0.0, 0.0), |(xy, sum), (x, y)| (xy + x * y, sum + x * x + y * y));
    let largest = pairs().map(|(_, y)| y.abs()).fold(0.0, f64::max);
    let apart = pairs().map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
    Distance {
        difference: if squares == 0.0 { 0.0 } else { 1.0 - 2.0 * product / squares },
        relative: if apart == 0.0 { 0.0 } else { apart / largest },
    }
}

/// # Panics
/// If the relative distance is over `bound`.
pub fn assert_close(what: &str, got: &[f32], want: &[f32], bound: f64) {
    let distance = distance(got, want);
    assert!(distance.relative <= bound, "{what}: {distance:?}, at most {bound:e} relative");
}

/// `log(softmax(logits))`, summed in f64.
pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - largest).exp()).sum();
    let log_sum = f64::from(largest) + sum.ln();
    logits.iter().map(|&x| f64::from(x) - log_sum).collect()
}

/// The index of the largest; the lowest of several.
pub fn argmax(row: &[f32]) -> usize {
    let better = |best: usize, i: usize| if row[i] > row[best] { i } else { best };
    (0..row.len()).reduce(better).expect("a row is not empty")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_see_what_is_wrong() {
        assert_eq!(distance(&[1.0, -2.0], &[1.0, -2.0]).relative, 0.0);
        assert_eq!(distance(&[1.0, -1.0], &[1.0, -2.0]).relative, 0.5);
        assert!(distance(&[2.0, -4.0], &[1.0, -2.0]).difference > 0.1, "a wrong scale is a difference");
        assert!(distance(&[f32::NAN], &[1.0]).relative > 1.0);
        assert!(distance(&[1.0], &[0.0]).relative.is_infinite());
    }

    #[test]
    fn probabilities_sum_to_one() {
        let sum: f64 = log_softmax(&[3.0, -1.0, 0.5]).iter().map(|x| x.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-12);
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }
}
