//! The plain reference; whole words of tokens that stay or go are passed over or filled at once.

pub(super) fn mask(logits: &mut [f32], vocab: usize, rows: &[i32], bits: &[u32]) {
    for (&row, bits) in rows.iter().zip(bits.chunks_exact(super::num_words(vocab))) {
        let logits = &mut logits[row as usize * vocab..][..vocab];
        for (logits, &word) in logits.chunks_mut(32).zip(bits) {
            match word {
                u32::MAX => {}
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
