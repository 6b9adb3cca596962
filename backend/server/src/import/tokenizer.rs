//! A file's byte-pair vocabulary as Hugging Face's `tokenizer.json` and `tokenizer_config.json`.
//!
//! GGUF keeps tokens, merges and the *name* of the rule that cuts text into words; the rules themselves are those of the
//! published tokenizers: GPT-2 (Radford et al. 2019), SmolLM2 (GPT-2 with every digit a word), Llama 3, Qwen2.

use std::str::FromStr;

use serde_json::{Map, Value as Json, json};
use tokenizers::Tokenizer;

use super::config::SpecialIds;
use super::error::{ImportError, Result};
use super::gguf::{Head, required};

/// Words of Llama 3: contractions, letters with one leading mark, up to three digits, marks, line ends, spaces.
const LLAMA3_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words of Qwen2: Llama 3's, with every digit a word.
const QWEN2_WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// GGUF's kinds of token that matter here; the others are plain text.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// How text is cut into words before merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Words {
    Gpt2,
    SmolLm,
    Llama3,
    Qwen2,
}

impl Words {
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "gpt-2" => Some(Words::Gpt2),
            "smollm" => Some(Words::SmolLm),
            "llama-bpe" => Some(Words::Llama3),
            "qwen2" => Some(Words::Qwen2),
            _ => None,
        }
    }

    fn pre_tokenizer(self) -> Json {
        let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        let split =
            |pattern| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let sequence = |first| json!({"type": "Sequence", "pretokenizers": first});
        match self {
            Words::Gpt2 => bytes(true),
            Words::SmolLm => sequence(json!([{"type": "Digits", "individual_digits": true}, bytes(true)])),
            Words::Llama3 => sequence(json!([split(LLAMA3_WORDS), bytes(false)])),
            Words::Qwen2 => sequence(json!([split(QWEN2_WORDS), bytes(false)])),
        }
    }
}

/// The vocabulary and its files.
#[derive(Debug)]
pub struct ImportedTokenizer {
    pub ids: SpecialIds,
    /// `tokenizer.json`, loaded once to see that it works.
    pub tokenizer: String,
    pub tokenizer_config: Json,
}

impl ImportedTokenizer {
    /// Builds both files; `max_length` is the model's context.
    pub fn from_head(head: &Head, max_length: u32) -> Result<Self> {
        let key = "tokenizer.ggml.model";
        let model = required(key, head.text(key)?)?;
        if model != "gpt2" {
            let must = "gpt2: only byte-level BPE is imported".into();
            return Err(ImportError::Key { key: key.into(), got: format!("{model:?}"), must });
        }
        let key = "tokenizer.ggml.pre";
        let name = required(key, head.text(key)?)?;
        let words = Words::from_name(name).ok_or_else(|| ImportError::Key {
            key: key.into(),
            got: format!("{name:?}"),
            must: "smollm, gpt-2, llama-bpe or qwen2".into(),
        })?;
        let vocabulary = Vocabulary::from_head(head)?;
        let ids = SpecialIds::from_head(head, vocabulary.tokens, |id| vocabulary.kind(id) == CONTROL)?;
        let add_bos = head.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(words == Words::Llama3);

        let tokenizer = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": vocabulary.added(),
            "normalizer": if words == Words::Qwen2 { json!({"type": "NFC"}) } else { Json::Null },
            "pre_tokenizer": words.pre_tokenizer(),
            "post_processor": post_processor(add_bos.then_some(ids.bos).flatten(), vocabulary.tokens),
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": words == Words::Llama3,
                "vocab": vocabulary.ids()?,
                "merges": vocabulary.merges()?,
            },
        })
        .to_string();
        Tokenizer::from_str(&tokenizer).map_err(|err| ImportError::Tokenizer { reason: err.to_string() })?;

        let text = |id: Option<u32>| id.map(|id| vocabulary.tokens[id as usize].as_str());
        let tokenizer_config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": false,
            "add_bos_token": add_bos,
            "added_tokens_decoder": vocabulary.added_by_id(),
            "bos_token": text(ids.bos),
            "eos_token": text(ids.eos),
            "pad_token": text(ids.pad),
            "unk_token": text(ids.unk),
            "chat_template": head.text("tokenizer.chat_template")?,
            "clean_up_tokenization_spaces": false,
            "model_max_length": max_length,
        });
        Ok(ImportedTokenizer { ids, tokenizer, tokenizer_config })
    }
}

/// With `bos`, puts it before every text.
fn post_processor(bos: Option<u32>, tokens: &[String]) -> Json {
    let Some(id) = bos else { return Json::Null };
    let token = &tokens[id as usize];
    let (bos, a, b) = (
        json!({"SpecialToken": {"id": token, "type_id": 0}}),
        json!({"Sequence": {"id": "A", "type_id": 0}}),
        json!({"Sequence": {"id": "B", "type_id": 0}}),
    );
    json!({
        "type": "TemplateProcessing",
        "single": [bos, a],
        "pair": [bos, a, bos, b],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    })
}

/// Tokens by id, and how they are used.
struct Vocabulary<'a> {
    tokens: &'a [String],
    kinds: &'a [i64],
    pairs: &'a [String],
}

impl<'a> Vocabulary<'a> {
    fn from_head(head: &'a Head) -> Result<Self> {
        let key = "tokenizer.ggml.tokens";
        let tokens = required(key, head.texts(key)?)?;
        let key = "tokenizer.ggml.token_type";
        let kinds = head.ints(key)?.unwrap_or_default();
        if !kinds.is_empty() && kinds.len() != tokens.len() {
            let must = format!("one for each of {} tokens", tokens.len());
            return Err(ImportError::Key { key: key.into(), got: format!("a list of {}", kinds.len()), must });
        }
        let key = "tokenizer.ggml.merges";
        Ok(Vocabulary { tokens, kinds, pairs: required(key, head.texts(key)?)? })
    }

    fn kind(&self, id: usize) -> i64 {
        self.kinds.get(id).copied().unwrap_or_default()
    }

    /// Token to id. Unused ones are left out: they only fill the embedding up to a round number.
    fn ids(&self) -> Result<Map<String, Json>> {
        let mut ids = Map::new();
        for (id, token) in self.tokens.iter().enumerate().filter(|(id, _)| self.kind(*id) != UNUSED) {
            if let Some(first) = ids.insert(token.clone(), id.into()) {
                return Err(ImportError::Key {
                    key: "tokenizer.ggml.tokens".into(),
                    got: format!("{token:?} as {first} and as {id}"),
                    must: "a list without repetition".into(),
                });
            }
        }
        Ok(ids)
    }

    /// Pairs to merge, the first first. A token never holds a space: byte-level BPE writes it as another letter.
    fn merges(&self) -> Result<Vec<[&str; 2]>> {
        let split = |pair: &'a String| match pair.split_once(' ') {
            Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => Ok([left, right]),
            _ => Err(ImportError::Key {
                key: "tokenizer.ggml.merges".into(),
                got: format!("{pair:?} at one place"),
                must: "pairs of tokens with a space between".into(),
            }),
        };
        self.pairs.iter().map(split).collect()
    }

    /// Tokens that are found in the text before it is cut into words.
    fn added_tokens(&self) -> impl Iterator<Item = (usize, Json)> {
        let special = |id: usize| match self.kind(id) {
            CONTROL => Some(true),
            USER_DEFINED => Some(false),
            _ => None,
        };
        self.tokens.iter().enumerate().filter_map(move |(id, token)| {
            let facts = json!({"content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special(id)?});
            Some((id, facts))
        })
    }

    fn added(&self) -> Vec<Json> {
        let with_id = |(id, mut facts): (usize, Json)| {
            facts["id"] = id.into();
            facts
        };
        self.added_tokens().map(with_id).collect()
    }

    fn added_by_id(&self) -> Map<String, Json> {
        self.added_tokens().map(|(id, facts)| (id.to_string(), facts)).collect()
    }
}
