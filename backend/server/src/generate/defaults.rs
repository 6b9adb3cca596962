//! What a checkpoint says about how it wants to be sampled and where it ends.

use std::path::Path;

use drafthorse_control::TokenId;
use serde_json::Value;

use crate::error::{Result, ServerError};
use crate::params::GenerateParams;
use crate::text::Tokenizer;

/// Read from `generation_config.json`, `config.json` and `tokenizer_config.json`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Tokens that end a text, in ascending order.
    pub end_tokens: Vec<TokenId>,
}

impl GenerationDefaults {
    /// Files that are missing say nothing.
    ///
    /// # Errors
    /// With the file's path, if one is broken or has a value that no request may have.
    pub fn from_dir(dir: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let generation_path = dir.join("generation_config.json");
        let generation = read_json(&generation_path)?;
        let config = read_json(&dir.join("config.json"))?;
        let tokenizer_config = read_json(&dir.join("tokenizer_config.json"))?;

        let mut params = GenerateParams::default();
        for key in ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"] {
            params
                .set(key, &generation[key])
                .map_err(|error| ServerError::BadFile { path: generation_path.clone(), reason: error.to_string() })?;
        }
        let named =
            tokenizer_config["eos_token"].as_str().or_else(|| tokenizer_config["eos_token"]["content"].as_str());
        let mut end_tokens: Vec<TokenId> = named.and_then(|token| tokenizer.token_to_id(token)).into_iter().collect();
        // The generation config is the more careful of the two; multimodal checkpoints nest the other.
        let listed = [&generation["eos_token_id"], &config["eos_token_id"], &config["text_config"]["eos_token_id"]];
        end_tokens.extend(listed.into_iter().find(|ids| !ids.is_null()).into_iter().flat_map(token_ids));
        end_tokens.sort_unstable();
        end_tokens.dedup();
        let GenerateParams { temperature, top_k, top_p, min_p, repetition_penalty, .. } = params;
        Ok(GenerationDefaults { temperature, top_k, top_p, min_p, repetition_penalty, end_tokens })
    }
}

fn token_ids(value: &Value) -> Vec<TokenId> {
    let id = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    match value {
        Value::Array(ids) => ids.iter().filter_map(id).collect(),
        value => id(value).into_iter().collect(),
    }
}

/// `Null` if there is no such file.
fn read_json(path: &Path) -> Result<Value> {
    match std::fs::read(path) {
        Ok(text) => serde_json::from_slice(&text)
            .map_err(|error| ServerError::BadFile { path: path.into(), reason: error.to_string() }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Value::Null),
        Err(source) => Err(ServerError::Read { path: path.into(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::tests::byte_level;

    /// The defaults of a checkpoint with these files, or the error's text.
    fn read(files: &[(&str, &str)]) -> Result<GenerationDefaults, String> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        GenerationDefaults::from_dir(dir.path(), &byte_level()).map_err(|error| error.to_string())
    }

    #[test]
    fn end_tokens_come_from_wherever_they_are_named() {
        let end = byte_level().token_to_id("<|end|>").unwrap();
        let tokenizer_config = ("tokenizer_config.json", r#"{"eos_token": {"content": "<|end|>"}}"#);
        let config = ("config.json", r#"{"eos_token_id": 2}"#);
        let generation = (
            "generation_config.json",
            r#"{"eos_token_id": [5, 4], "temperature": 0.6, "top_k": 20, "do_sample": true}"#,
        );
        assert_eq!(read(&[]).unwrap(), GenerationDefaults::default());
        assert_eq!(read(&[tokenizer_config, config]).unwrap().end_tokens, [2, end]);
        let all = read(&[tokenizer_config, config, generation]).unwrap();
        assert_eq!(all.end_tokens, [4, 5, end], "the generation config wins over the model's");
        assert_eq!((all.temperature, all.top_k, all.top_p), (Some(0.6), Some(20), None));
    }

    #[test]
    fn a_broken_file_is_named() {
        let broken = read(&[("generation_config.json", "{")]).unwrap_err();
        assert!(broken.contains("generation_config.json: EOF"), "{broken}");
        let wrong = read(&[("generation_config.json", r#"{"top_p": 7}"#)]).unwrap_err();
        assert!(wrong.ends_with("generation_config.json: top_p: must be in (0, 1], is 7"), "{wrong}");
    }
}
