//! Every token's text, laid out once at load, and the rule that joins tokens to text.
//!
//! The rule is read from the `decoder` of `tokenizer.json`. Two families cover what language models use: byte-level BPE,
//! whose tokens are bytes, and SentencePiece's, whose tokens are text with a mark for the space and single bytes for what
//! the vocabulary lacks.

use drafthorse_control::TokenId;
use serde_json::Value;
use tokenizers::Tokenizer;

/// What each token stands for.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    /// All tokens' bytes, one after another.
    bytes: Vec<u8>,
    /// Where each token's bytes end.
    ends: Vec<u32>,
    kinds: Vec<Kind>,
    pub(crate) joining: Joining,
    longest: usize,
}

/// How a token takes part in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No token has this id: it leaves no trace in the text.
    Missing,
    Plain,
    /// Left out when special tokens are skipped.
    Special,
    /// Stands for one byte in the middle of text tokens.
    Byte,
}

/// How tokens become a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Joining {
    /// Bytes one after another; what is not UTF-8 becomes U+FFFD.
    Bytes,
    /// Texts one after another; a run of byte tokens is text if the whole run is UTF-8, else one U+FFFD a byte.
    Pieces {
        /// Stands between two tokens.
        separator: &'static str,
        /// The character that means a space, and whether the first token loses its own.
        space: Option<(char, bool)>,
        /// Taken from the front of the text: the character, and how often at most.
        strip: Option<(char, usize)>,
    },
}

/// What the `decoder` of a `tokenizer.json` says.
#[derive(Debug)]
struct Rule {
    joining: Joining,
    /// Replaced in each token's own text.
    replace: Vec<(String, String)>,
    /// Tokens such as `<0x0A>` are bytes.
    byte_fallback: bool,
}

impl Vocabulary {
    /// # Errors
    /// With the name of a decoder that is not known here.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Result<Self, String> {
        let decoder = serde_json::to_value(tokenizer.get_decoder()).map_err(|error| error.to_string())?;
        let rule = Rule::read(&decoder)?;
        let size = tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let added = tokenizer.get_added_vocabulary();
        let mut vocabulary = Vocabulary {
            bytes: Vec::new(),
            ends: Vec::with_capacity(size),
            kinds: Vec::with_capacity(size),
            joining: rule.joining.clone(),
            longest: 1,
        };
        for id in 0..size as TokenId {
            let start = vocabulary.bytes.len();
            let kind = match tokenizer.id_to_token(id) {
                None => Kind::Missing,
                Some(token) => {
                    let byte = rule.append(&token, &mut vocabulary.bytes);
                    match (added.is_special_token(&token), byte) {
                        (true, _) => Kind::Special,
                        (false, true) => Kind::Byte,
                        (false, false) => Kind::Plain,
                    }
                }
            };
            vocabulary.kinds.push(kind);
            vocabulary.ends.push(vocabulary.bytes.len() as u32);
            vocabulary.longest = vocabulary.longest.max(vocabulary.bytes.len() - start);
        }
        Ok(vocabulary)
    }

    pub(crate) fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Bytes of the longest token.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    pub(crate) fn kind(&self, id: TokenId) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Missing)
    }

    /// The token's bytes; with a space's mark where the joining has one.
    pub(crate) fn bytes(&self, id: TokenId) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }
}

impl Rule {
    fn read(decoder: &Value) -> Result<Self, String> {
        let mut rule = Rule {
            joining: Joining::Pieces { separator: "", space: None, strip: None },
            replace: Vec::new(),
            byte_fallback: false,
        };
        let steps = match decoder["type"].as_str() {
            None => {
                rule.joining = Joining::Pieces { separator: " ", space: None, strip: None };
                return Ok(rule);
            }
            Some("Sequence") => decoder["decoders"].as_array().cloned().unwrap_or_default(),
            Some(_) => vec![decoder.clone()],
        };
        let mut fused = false;
        for (at, step) in steps.iter().enumerate() {
            let kind = step["type"].as_str().unwrap_or_default();
            match (kind, &mut rule.joining) {
                ("ByteLevel", _) if steps.len() == 1 => rule.joining = Joining::Bytes,
                ("Metaspace", Joining::Pieces { space, .. }) if steps.len() == 1 => {
                    let mark = step["replacement"].as_str().and_then(|mark| mark.chars().next()).unwrap_or('\u{2581}');
                    *space = Some((mark, step["prepend_scheme"] != "never"));
                }
                ("Replace", _) if !rule.byte_fallback && !fused => {
                    let (from, to) = (step["pattern"]["String"].as_str(), step["content"].as_str());
                    let (Some(from), Some(to)) = (from, to) else {
                        return Err("decoder Replace with a pattern that is not a string is not supported".into());
                    };
                    rule.replace.push((from.into(), to.into()));
                }
                ("ByteFallback", _) if !fused => rule.byte_fallback = true,
                ("Fuse", _) => fused = true,
                ("Strip", Joining::Pieces { strip, .. })
                    if fused && at + 1 == steps.len() && step["stop"].as_u64().unwrap_or(0) == 0 =>
                {
                    let content = step["content"].as_str().and_then(|content| content.chars().next());
                    *strip = content.map(|content| (content, step["start"].as_u64().unwrap_or(0) as usize));
                }
                _ => return Err(format!("decoder {kind} is not supported at place {} of {}", at + 1, steps.len())),
            }
        }
        Ok(rule)
    }

    /// Appends the token's bytes; true if it is a byte token.
    fn append(&self, token: &str, bytes: &mut Vec<u8>) -> bool {
        if self.joining == Joining::Bytes {
            let start = bytes.len();
            for c in token.chars() {
                let Some(byte) = byte_of(c) else {
                    // An added token: it stands in the vocabulary as it is.
                    bytes.truncate(start);
                    bytes.extend_from_slice(token.as_bytes());
                    break;
                };
                bytes.push(byte);
            }
            return false;
        }
        let mut text = token.to_string();
        for (from, to) in &self.replace {
            text = text.replace(from, to);
        }
        let byte = if self.byte_fallback { byte_token(&text) } else { None };
        match byte {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(text.as_bytes()),
        }
        byte.is_some()
    }
}

/// The byte of a token such as `<0x0A>`.
fn byte_token(token: &str) -> Option<u8> {
    if token.len() != 6 {
        return None;
    }
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(hex, 16).ok()
}

/// The byte that a character of a byte-level token stands for.
///
/// Source: GPT-2's encoder. Printable characters of Latin-1 stand for themselves, the other bytes for U+0100 and up in order.
fn byte_of(c: char) -> Option<u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(c) {
        code @ 0..=0xFF => Some(code as u8).filter(|&byte| printable(byte)),
        code @ 0x100..=0x143 => (0..=255).filter(|&byte| !printable(byte)).nth(code as usize - 0x100),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_has_one_character() {
        let mut seen: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
        assert_eq!(byte_of('▁'), None);
    }

    #[test]
    fn a_decoder_that_is_not_known_is_refused_by_name() {
        let read = |json: &str| Rule::read(&serde_json::from_str(json).unwrap()).map(|rule| rule.joining);
        let word_piece = read(r#"{"type": "WordPiece", "prefix": "", "cleanup": true}"#).unwrap_err();
        assert_eq!(word_piece, "decoder WordPiece is not supported at place 1 of 1");
        let strip = r#"{"type":"Sequence","decoders":[{"type":"Strip","content":" ","start":1,"stop":0}]}"#;
        assert_eq!(read(strip).unwrap_err(), "decoder Strip is not supported at place 1 of 1");
        assert_eq!(read(r#"{"type": "ByteLevel"}"#).unwrap(), Joining::Bytes);
    }
}
