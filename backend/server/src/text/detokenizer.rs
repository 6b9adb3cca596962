//! Tokens to text, one at a time.
//!
//! What has been handed out stands: a piece never ends inside a character, and all pieces together are the text of all
//! tokens, byte for byte. The work for a token does not grow with the tokens before it.

use std::sync::Arc;

use drafthorse_control::TokenId;

use super::vocabulary::{Joining, Kind, Vocabulary};

/// One sequence's text, as far as it is certain.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    vocabulary: Arc<Vocabulary>,
    skip_special_tokens: bool,
    /// Bytes that are not text yet: the start of a character, or a run of byte tokens that may still turn out broken.
    held: Vec<u8>,
    /// No token has left its text yet.
    at_start: bool,
    /// How many characters may still be taken from the front.
    to_strip: usize,
}

impl Detokenizer {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, skip_special_tokens: bool) -> Self {
        let to_strip = match vocabulary.joining {
            Joining::Pieces { strip: Some((_, most)), .. } => most,
            _ => 0,
        };
        Detokenizer { vocabulary, skip_special_tokens, held: Vec::new(), at_start: true, to_strip }
    }

    /// Appends to `text` what `token` makes certain: often its own text, nothing, or what was held before too.
    pub fn push(&mut self, token: TokenId, text: &mut String) {
        let vocabulary = Arc::clone(&self.vocabulary);
        let kind = vocabulary.kind(token);
        if kind == Kind::Missing || (kind == Kind::Special && self.skip_special_tokens) {
            return;
        }
        let bytes = vocabulary.bytes(token);
        let Joining::Pieces { separator, space, .. } = vocabulary.joining else {
            self.held.extend_from_slice(bytes);
            take_text(&mut self.held, text);
            return;
        };
        let first = std::mem::replace(&mut self.at_start, false);
        if kind == Kind::Byte {
            self.held.extend_from_slice(bytes);
            return;
        }
        self.end_run(text);
        if !first {
            self.append(separator, text);
        }
        // Token texts come from JSON strings, so they are text.
        let piece = std::str::from_utf8(bytes).unwrap_or_default();
        let Some((mark, first_loses_it)) = space else { return self.append(piece, text) };
        for c in piece.chars() {
            match c == mark {
                true if first && first_loses_it => {}
                true => text.push(' '),
                false => text.push(c),
            }
        }
    }

    /// True if some of what was pushed waits for further tokens.
    pub fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// Appends what was held: no token comes any more.
    pub fn finish(&mut self, text: &mut String) {
        match self.vocabulary.joining {
            Joining::Bytes => {
                text.push_str(&String::from_utf8_lossy(&self.held));
                self.held.clear();
            }
            Joining::Pieces { .. } => self.end_run(text),
        }
    }

    /// The byte tokens of a run, now that it is whole.
    fn end_run(&mut self, text: &mut String) {
        if self.held.is_empty() {
            return;
        }
        let run = std::mem::take(&mut self.held);
        match std::str::from_utf8(&run) {
            Ok(run) => self.append(run, text),
            Err(_) => run.iter().for_each(|_| self.append("\u{FFFD}", text)),
        }
    }

    fn append(&mut self, mut piece: &str, text: &mut String) {
        if self.to_strip > 0
            && let Joining::Pieces { strip: Some((content, _)), .. } = self.vocabulary.joining
        {
            while self.to_strip > 0 && !piece.is_empty() {
                match piece.strip_prefix(content) {
                    Some(rest) => (piece, self.to_strip) = (rest, self.to_strip - 1),
                    None => self.to_strip = 0,
                }
            }
        }
        text.push_str(piece);
    }
}

/// Moves all characters that are whole from `bytes` to `text`, with U+FFFD for bytes that can be none. What stays is the start of
/// a character, at most three bytes.
fn take_text(bytes: &mut Vec<u8>, text: &mut String) {
    let mut rest = bytes.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                return bytes.clear();
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                let Some(broken) = error.error_len() else {
                    let taken = bytes.len() - after.len();
                    bytes.drain(..taken);
                    return;
                };
                text.push('\u{FFFD}');
                rest = &after[broken..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tokenizer::Tokenizer;
    use super::super::tokenizer::tests::{byte_level, metaspace, sentence_piece, word_level};
    use super::*;

    /// The pieces that the tokens leave one by one, and the last what was held.
    fn pieces(tokenizer: &Tokenizer, ids: &[TokenId], skip_special_tokens: bool) -> Vec<String> {
        let mut detokenizer = tokenizer.detokenizer(skip_special_tokens);
        let mut pieces: Vec<String> = ids
            .iter()
            .map(|&id| {
                let mut piece = String::new();
                detokenizer.push(id, &mut piece);
                piece
            })
            .collect();
        let mut last = String::new();
        detokenizer.finish(&mut last);
        pieces.push(last);
        pieces
    }

    #[test]
    fn an_emoji_split_over_four_tokens_comes_whole() {
        let tokenizer = byte_level();
        // The bytes of 🦀, each a token of its own, between two letters.
        let ids: Vec<TokenId> = "a🦀b".bytes().map(TokenId::from).collect();
        assert_eq!(pieces(&tokenizer, &ids, true), ["a", "", "", "", "🦀", "b", ""]);
        assert_eq!(pieces(&tokenizer, &ids[..3], true), ["a", "", "", "\u{FFFD}"], "cut off inside it");
    }

    #[test]
    fn a_true_replacement_character_passes() {
        let tokenizer = byte_level();
        let ids: Vec<TokenId> = "x\u{FFFD}y".bytes().map(TokenId::from).collect();
        assert_eq!(pieces(&tokenizer, &ids, true).concat(), "x\u{FFFD}y");
        assert_eq!(pieces(&tokenizer, &[0xE2, 0x41], true), ["", "\u{FFFD}A", ""], "a broken character is replaced");
    }

    #[test]
    fn special_tokens_are_left_out_or_kept() {
        let tokenizer = byte_level();
        let end = tokenizer.token_to_id("<|end|>").unwrap();
        let ids = [u32::from(b'a'), end, u32::from(b'b'), 9999];
        assert_eq!(pieces(&tokenizer, &ids, true).concat(), "ab", "an id that is no token leaves nothing");
        assert_eq!(pieces(&tokenizer, &ids, false).concat(), "a<|end|>b");
    }

    #[test]
    fn a_run_of_byte_tokens_waits_for_its_end() {
        let tokenizer = sentence_piece();
        let id = |token: &str| tokenizer.token_to_id(token).unwrap();
        let crab: Vec<TokenId> = "🦀".bytes().map(|byte| id(&format!("<0x{byte:02X}>"))).collect();
        let ids = [&[id("▁a")], &crab[..], &[id("b")]].concat();
        assert_eq!(pieces(&tokenizer, &ids, true), ["a", "", "", "", "", "🦀b", ""]);
        assert_eq!(
            pieces(&tokenizer, &[&crab[1..], &[id("▁a")]].concat(), true).concat(),
            "\u{FFFD}\u{FFFD}\u{FFFD} a"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// Whatever the tokens: the pieces joined are what the tokenizers crate says of all of them at once.
        #[test]
        fn pieces_are_the_whole_text(ids in prop::collection::vec(0u32..330, 0..60), skip in any::<bool>()) {
            for tokenizer in [byte_level(), sentence_piece(), metaspace(), word_level()] {
                prop_assert_eq!(pieces(&tokenizer, &ids, skip).concat(), tokenizer.decode_at_once(&ids, skip));
            }
        }
    }
}
