//! The plain reference: sorts the tokens by how untypical they are.

/// Changes one row.
pub(super) fn typical(logits: &mut [f32], temperature: f32, typical_p: f32) {
    let max = logits.iter().fold(f32::NEG_INFINITY, |max, &logit| if max.is_nan() { max } else { logit.max(max) });
    if !max.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
        return;
    }
    let (max, temperature) = (f64::from(max), f64::from(temperature));
    let scaled = |logit: f32| (f64::from(logit) - max) / temperature;
    let total: f64 = logits.iter().map(|&logit| scaled(logit).exp()).sum();
    let log_total = total.ln();
    let mean: f64 = logits
        .iter()
        .map(|&logit| (scaled(logit).exp() / total, log_total - scaled(logit)))
        .filter(|&(p, _)| p > 0.0)
        .map(|(p, surprise)| p * surprise)
        .sum();

    // Distances are rounded to f32, so that tokens of equal logits, and those that only rounding tells apart, are ties.
    let distance = |logit: f32| (log_total - scaled(logit) - mean).abs() as f32;
    let mut order: Vec<(f32, f64)> = logits
        .iter()
        .filter(|&&logit| logit > f32::NEG_INFINITY)
        .map(|&logit| (distance(logit), scaled(logit).exp() / total))
        .collect();
    order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let mut mass = 0.0;
    let mut limit = f32::INFINITY;
    for group in order.chunk_by(|a, b| a.0 == b.0) {
        limit = group[0].0;
        mass += group.iter().map(|(_, p)| p).sum::<f64>();
        // Sums of probabilities are off by this much.
        if mass >= f64::from(typical_p) - 1e-7 {
            break;
        }
    }
    for logit in logits {
        if distance(*logit) > limit {
            *logit = f32::NEG_INFINITY;
        }
    }
}
