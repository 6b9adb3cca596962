//! Text to tokens, by the checkpoint's own `tokenizer.json`.
//!
//! Special tokens written in a prompt's text count as special tokens, as they do for the checkpoint's authors: chat templates rest
//! on it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use drafthorse_control::TokenId;
use drafthorse_worker::grammar::TokenBytes;
use tokio::sync::Semaphore;

use super::detokenizer::Detokenizer;
use super::vocabulary::{Joining, Kind, Vocabulary};
use crate::error::{Result, ServerError};

/// Longer texts are encoded on the blocking pool, so that no stream waits for them. Bytes; about a millisecond's work.
const INLINE_BYTES: usize = 2048;

/// Long texts encoded at once: one leaves cores for everything else.
const MAX_LONG_ENCODINGS: usize = 1;

/// A model's tokenizer; cheap to clone.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    vocabulary: Arc<Vocabulary>,
    long_encodings: Arc<Semaphore>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model directory.
    ///
    /// # Errors
    /// With the file's path, if it is missing, broken, or has a decoder that is not known here; with what to do, if the directory has a
    /// tokenizer of another kind instead.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        match other_kind(dir) {
            Some((file, kind)) if !path.exists() => {
                let shown = dir.display();
                Err(bad_file(
                    &file,
                    format!(
                        "the tokenizer is {kind}, and there is no tokenizer.json beside it; convert it with Python's transformers: \
                     AutoTokenizer.from_pretrained(\"{shown}\").save_pretrained(\"{shown}\")"
                    ),
                ))
            }
            _ => Self::from_file(&path),
        }
    }

    /// As [`from_dir`](Self::from_dir), for a file of any name.
    pub fn from_file(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|source| ServerError::Read { path: path.into(), source })?;
        Self::from_bytes(&bytes).map_err(|reason| bad_file(path, reason))
    }

    /// Tokens that are their own numbers, with spaces between them.
    ///
    /// # Errors
    /// `Internal`, which cannot be.
    pub fn of_numbers(size: u32) -> Result<Self> {
        let vocabulary: serde_json::Map<String, serde_json::Value> =
            (0..size).map(|id| (id.to_string(), id.into())).collect();
        let tokenizer = serde_json::json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [],
            "normalizer": null,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": null,
            "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"},
        });
        Self::from_bytes(tokenizer.to_string().as_bytes()).map_err(ServerError::internal)
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| error.to_string())?;
        // Both are for training batches; here a prompt is what it is.
        inner.with_truncation(None).map_err(|error| error.to_string())?;
        inner.with_padding(None);
        let vocabulary = Arc::new(Vocabulary::new(&inner)?);
        let long_encodings = Arc::new(Semaphore::new(MAX_LONG_ENCODINGS));
        Ok(Tokenizer { inner: Arc::new(inner), vocabulary, long_encodings })
    }

    /// The tokens of `text`; `add_special_tokens` puts those around it that the checkpoint wants around plain text.
    ///
    /// # Errors
    /// `Internal` if the tokenizer fails, which no text should make it do.
    pub async fn encode(&self, text: Arc<str>, add_special_tokens: bool) -> Result<Vec<TokenId>> {
        if text.len() <= INLINE_BYTES {
            return self.encode_now(&text, add_special_tokens);
        }
        let turn = Arc::clone(&self.long_encodings).acquire_owned().await.map_err(ServerError::internal)?;
        let tokenizer = self.clone();
        tokio::task::spawn_blocking(move || {
            let _turn = turn;
            tokenizer.encode_now(&text, add_special_tokens)
        })
        .await
        .map_err(ServerError::internal)?
    }

    /// As [`encode`](Self::encode), on this thread however long it takes.
    pub fn encode_now(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>> {
        let encoding = self.inner.encode_fast(text, add_special_tokens).map_err(ServerError::internal)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// A text of so many bytes has at least this many tokens. Low by a factor of four, for normalizers may shorten the text.
    pub fn fewest_tokens(&self, text_bytes: usize) -> usize {
        text_bytes / self.vocabulary.longest() / 4
    }

    /// The text of a new sequence.
    pub fn detokenizer(&self, skip_special_tokens: bool) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.vocabulary), skip_special_tokens)
    }

    /// The text of all `tokens`.
    pub fn decode(&self, tokens: &[TokenId], skip_special_tokens: bool) -> String {
        let mut detokenizer = self.detokenizer(skip_special_tokens);
        let mut text = String::new();
        for &token in tokens {
            detokenizer.push(token, &mut text);
        }
        detokenizer.finish(&mut text);
        text
    }

    /// One token alone, for a list of log-probabilities: its bytes where they are known, and their text.
    pub fn token_text(&self, token: TokenId) -> (String, &[u8]) {
        let bytes = self.vocabulary.bytes(token);
        (self.decode(&[token], false), bytes)
    }

    /// The bytes of every token, for grammars; `end_tokens` are no text. `None` if tokens do not simply follow one another.
    pub fn token_bytes(&self, end_tokens: &[TokenId]) -> Option<TokenBytes> {
        let mark = match self.vocabulary.joining {
            Joining::Bytes => None,
            Joining::Pieces { separator: "", space, .. } => space.map(|(mark, _)| mark),
            Joining::Pieces { .. } => return None,
        };
        let mut table = TokenBytes::new(end_tokens.to_vec());
        for id in 0..self.vocabulary.len() as TokenId {
            let bytes = self.vocabulary.bytes(id);
            match (self.vocabulary.kind(id), mark) {
                (Kind::Special, _) => table.push_special(bytes),
                _ if end_tokens.contains(&id) => table.push_special(bytes),
                (Kind::Plain, Some(mark)) => match std::str::from_utf8(bytes) {
                    Ok(text) => table.push(text.replace(mark, " ").as_bytes()),
                    Err(_) => table.push(bytes),
                },
                _ => table.push(bytes),
            }
        }
        Some(table)
    }

    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        self.inner.token_to_id(token)
    }

    /// One more than the highest id.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }
}

/// A file that other programs read tokenizers from, and what it is.
fn other_kind(dir: &Path) -> Option<(PathBuf, &'static str)> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.sort_unstable();
    files.into_iter().find_map(|file| {
        let kind = match file.file_name()?.to_str()? {
            // Llama 3 has its ranks under the name that Llama 2 had its sentencepiece model under.
            "tokenizer.model" if is_tiktoken(&file) => "a tiktoken file of ranks",
            "tokenizer.model" | "spiece.model" | "sentencepiece.bpe.model" => "a sentencepiece model",
            "tiktoken.model" => "a tiktoken file of ranks",
            // Mistral's own names; `.v3` and later stand for its versions.
            "tekken.json" => "Mistral's tekken.json",
            name if name.starts_with("tokenizer.model.v") || name.starts_with("tokenizer.mm.model.") => {
                "a sentencepiece model"
            }
            name if name.ends_with(".tiktoken") => "a tiktoken file of ranks",
            _ => return None,
        };
        Some((file, kind))
    })
}

/// Whether the first line is base64, a space and a number.
fn is_tiktoken(path: &Path) -> bool {
    let mut start = [0; 256];
    let length = std::fs::File::open(path).and_then(|mut file| std::io::Read::read(&mut file, &mut start)).unwrap_or(0);
    let text = String::from_utf8_lossy(&start[..length]);
    let line = text.lines().next().and_then(|line| line.split_once(' '));
    line.is_some_and(|(_, rank)| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()))
}

fn bad_file(path: &Path, reason: String) -> ServerError {
    ServerError::BadFile { path: PathBuf::from(path), reason }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    impl Tokenizer {
        /// What the tokenizers crate says.
        pub(crate) fn decode_at_once(&self, ids: &[TokenId], skip_special_tokens: bool) -> String {
            self.inner.decode(ids, skip_special_tokens).unwrap()
        }
    }

    /// A tokenizer with these tokens in order of their ids, then `<|start|>` and `<|end|>`, which are special.
    fn build(model: &str, tokens: &[String], merges: &[(&str, &str)], pre: Value, decoder: &Value) -> Tokenizer {
        let mut vocab: serde_json::Map<String, Value> =
            tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
        let special = ["<|start|>", "<|end|>"].iter().enumerate().map(|(at, content)| {
            json!({"id": tokens.len() + at, "content": content, "special": true, "single_word": false,
                   "lstrip": false, "rstrip": false, "normalized": false})
        });
        let added: Vec<Value> = special.collect();
        if model == "WordLevel" {
            vocab.insert("<unk>".into(), json!(tokens.len() + 2));
        }
        let merges: Vec<String> = merges.iter().map(|(a, b)| format!("{a} {b}")).collect();
        let model = match model {
            "WordLevel" => json!({"type": model, "vocab": vocab, "unk_token": "<unk>"}),
            _ => json!({"type": model, "vocab": vocab, "merges": merges, "dropout": null, "unk_token": null,
                        "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                        "byte_fallback": decoder["type"] == "Sequence"}),
        };
        let mut file = json!({"version": "1.0", "truncation": {"max_length": 5, "strategy": "LongestFirst", "stride": 0,
            "direction": "Right"}, "padding": null, "added_tokens": added, "normalizer": null, 
            "post_processor": null, "decoder": decoder, "model": model});
        file["pre_tokenizer"] = pre;
        Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap()
    }

    /// Each byte is the token of its value, and a few words have tokens above 255.
    pub(crate) fn byte_level() -> Tokenizer {
        let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let mut others = 0x100..;
        let char_of = |byte: u8| if printable(byte) { u32::from(byte) } else { others.next().unwrap() };
        let bytes = (0..=255).map(char_of).map(|code| char::from_u32(code).unwrap().to_string());
        let merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("ð", "Ł")];
        let words = merges.iter().map(|(a, b)| format!("{a}{b}"));
        let tokens: Vec<String> = bytes.chain(words).collect();
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        build("BPE", &tokens, &merges, byte_level.clone(), &byte_level)
    }

    fn pieces_with_bytes() -> Vec<String> {
        let pieces = ["▁", "a", "b", "▁a", "▁▁", "c▁", "é", "字", "<0xZZ>", "x y", "<unk>"].map(String::from);
        pieces.into_iter().chain((0..=255).map(|byte| format!("<0x{byte:02X}>"))).collect()
    }

    /// As Llama 2's.
    pub(crate) fn sentence_piece() -> Tokenizer {
        let decoder = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        build("BPE", &pieces_with_bytes(), &[], Value::Null, &decoder)
    }

    pub(crate) fn metaspace() -> Tokenizer {
        let space = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        build("BPE", &pieces_with_bytes(), &[("▁", "a")], space.clone(), &space)
    }

    /// Words with spaces between them.
    pub(crate) fn word_level() -> Tokenizer {
        let words = ["to", "be", "or", "not"].map(String::from);
        build("WordLevel", &words, &[], json!({"type": "Whitespace"}), &Value::Null)
    }

    #[test]
    fn encodes_and_decodes() {
        let tokenizer = byte_level();
        let hello = tokenizer.token_to_id("hello").unwrap();
        let end = tokenizer.token_to_id("<|end|>").unwrap();
        assert_eq!(tokenizer.encode_now("hello!<|end|>", true).unwrap(), [hello, u32::from(b'!'), end]);
        let text = "hello wörld 🦀\n\t字 1234 and longer than five tokens";
        let ids = tokenizer.encode_now(text, true).unwrap();
        assert_eq!(tokenizer.decode(&ids, true), text, "nothing is cut off");
        assert_eq!(tokenizer.token_text(hello), ("hello".to_string(), "hello".as_bytes()));
        assert_eq!(tokenizer.token_text(0xF0), ("\u{FFFD}".to_string(), &[0xF0][..]));
    }

    #[tokio::test]
    async fn a_long_text_is_encoded_as_a_short_one_is() {
        let tokenizer = byte_level();
        let text: Arc<str> = "hello 🦀 world ".repeat(1000).into();
        assert!(text.len() > INLINE_BYTES);
        let ids = tokenizer.encode(Arc::clone(&text), true).await.unwrap();
        assert_eq!(ids, tokenizer.encode_now(&text, true).unwrap());
        assert!(tokenizer.fewest_tokens(text.len()) <= ids.len());
    }

    #[test]
    fn a_tokenizer_of_another_kind_is_refused_with_what_to_do() {
        let refusal = |file: &str, content: &[u8]| {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(file), content).unwrap();
            let error = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
            error.replace(&dir.path().display().to_string(), "DIR")
        };
        let want = |file: &str, kind: &str| {
            format!(
                "DIR/{file}: the tokenizer is {kind}, and there is no tokenizer.json beside it; convert it with Python's \
                 transformers: AutoTokenizer.from_pretrained(\"DIR\").save_pretrained(\"DIR\")"
            )
        };
        let (pieces, ranks) = ("a sentencepiece model", "a tiktoken file of ranks");
        assert_eq!(refusal("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0"), want("tokenizer.model", pieces));
        assert_eq!(refusal("tokenizer.model", b"IQ== 0\nIg== 1\n"), want("tokenizer.model", ranks));
        assert_eq!(refusal("qwen.tiktoken", b"IQ== 0\n"), want("qwen.tiktoken", ranks));
        assert_eq!(refusal("tokenizer.model.v3", b"\n\x0e\n\x05<unk>"), want("tokenizer.model.v3", pieces));
        assert_eq!(refusal("tekken.json", b"{}"), want("tekken.json", "Mistral's tekken.json"));
        // With a tokenizer.json beside it, it does no harm.
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.model"), "pieces").unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
        assert!(Tokenizer::from_dir(dir.path()).unwrap_err().to_string().contains("tokenizer.json: EOF"));
    }

    #[test]
    fn a_broken_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let missing = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
        assert!(missing.contains("tokenizer.json: No such file"), "{missing}");
        std::fs::write(dir.path().join("tokenizer.json"), "{\"version\": ").unwrap();
        let broken = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
        assert!(broken.contains("tokenizer.json: EOF while parsing"), "{broken}");
    }
}
