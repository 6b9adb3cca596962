//! The bytes of every token, as a grammar reads them.

use drafthorse_control::TokenId;

/// In front of the name of a special token, so that no grammar takes it for text: no UTF-8 has this byte.
const SPECIAL: u8 = 0xFF;

/// A token-bytes table, in order of the ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenBytes {
    words: Vec<Vec<u8>>,
    end_tokens: Vec<TokenId>,
}

impl TokenBytes {
    /// `end_tokens` are those that end a text: a grammar allows them where the text may end.
    pub fn new(end_tokens: Vec<TokenId>) -> Self {
        TokenBytes { words: Vec::new(), end_tokens }
    }

    /// The next token is text. Without any bytes it never comes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.words.push(bytes.to_vec());
    }

    /// The next token is no text: only a grammar that names it lets it come.
    pub fn push_special(&mut self, name: &[u8]) {
        let mut word = vec![SPECIAL];
        word.extend_from_slice(name);
        self.words.push(if name.is_empty() { Vec::new() } else { word });
    }

    pub fn len(&self) -> usize {
        self.words.len()
    }

    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    pub fn end_tokens(&self) -> &[TokenId] {
        &self.end_tokens
    }

    pub(super) fn words(&self) -> &[Vec<u8>] {
        &self.words
    }
}
