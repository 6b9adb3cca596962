//! The plain reference; whole words of tokens that stay or go are passed over or filled at once.

pub(super) fn mask(logits: &mut [f32], vocab: usize, masks: &[i32], bits: &[i32]) {
    let words = super::num_words(vocab);
    for (logits, &mask) in logits.chunks_mut(vocab.max(1)).zip(masks) {
        let Ok(mask) = usize::try_from(mask) else { continue };
        for (logits, &word) in logits.chunks_mut(32).zip(&bits[mask * words..(mask + 1) * words]) {
            match word {
                -1 => {}
                0 => logits.fill(f32::NEG_INFINITY),
                _ => {
                    for (i, logit) in logits.iter_mut().enumerate() {
                        if word >> i & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}
