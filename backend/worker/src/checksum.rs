//! A hash of a step's tokens: ranks whose hashes differ have drifted apart.

use drafthorse_control::TokenId;

/// FNV-1a over 64 bits, a word at a time. Lists are hashed with their lengths, so that a token cannot move between rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checksum(u64);

impl Default for Checksum {
    fn default() -> Self {
        Checksum(0xcbf2_9ce4_8422_2325)
    }
}

impl Checksum {
    pub fn add(&mut self, tokens: &[TokenId]) {
        self.word(tokens.len() as u64);
        for &token in tokens {
            self.word(token.into());
        }
    }

    pub fn add_drafts(&mut self, drafts: &[i32]) {
        self.word(drafts.len() as u64);
        for &draft in drafts {
            self.word(draft as u64);
        }
    }

    pub fn value(self) -> u64 {
        self.0
    }

    fn word(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01b3);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(accepted: &[TokenId], drafts: &[i32]) -> u64 {
        let mut checksum = Checksum::default();
        checksum.add(accepted);
        checksum.add_drafts(drafts);
        checksum.value()
    }

    #[test]
    fn tokens_their_order_and_their_lists_count() {
        let all = [of(&[1, 2], &[]), of(&[2, 1], &[]), of(&[1], &[2]), of(&[], &[1, 2]), of(&[1, 2, 0], &[])];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b), "{i}");
        }
    }
}
