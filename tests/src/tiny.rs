//! Tiny random models: `goldens/tiny.safetensors` has the weights of all of them, a case has a config, tokens and logits.
//!
//! A case's checkpoint is those of the shared tensors that its config asks for, so that a test may edit the config and see
//! what changes.

use std::path::{Path, PathBuf};
use std::{fs, iter};

use safetensors::SafeTensors;
use safetensors::tensor::{TensorView, serialize_to_file};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Vocabulary of the tiny models: an end, then the printable ASCII characters.
pub const VOCAB: usize = 96;
/// The token that ends a text, `<|end|>`.
pub const END: u32 = 0;

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens")
}

/// One of `goldens/NAME.safetensors`.
pub struct Golden {
    pub name: String,
    pub config: Value,
    pub tokens: Vec<u32>,
    /// `[tokens, vocab]`, from transformers in f32.
    pub logits: Vec<f32>,
}

impl Golden {
    /// # Panics
    /// If the golden is not there, or not one of `make.py`.
    pub fn read(name: &str) -> Self {
        let path = goldens().join(format!("{name}.safetensors"));
        let bytes = fs::read(&path).unwrap_or_else(|err| panic!("{}: {err}", path.display()));
        let tensors = SafeTensors::deserialize(&bytes).expect("a golden is a safetensors file");
        let (_, head) = SafeTensors::read_metadata(&bytes).expect("its head was just read");
        let metadata = head.metadata().as_ref().expect("a golden names its makers");
        let words =
            |name| tensors.tensor(name).expect("a golden has tokens and logits").data().as_chunks::<4>().0.to_vec();
        Golden {
            name: name.into(),
            config: serde_json::from_str(&metadata["config"]).expect("a golden's config is JSON"),
            tokens: words("tokens").into_iter().map(u32::from_le_bytes).collect(),
            logits: words("logits").into_iter().map(f32::from_le_bytes).collect(),
        }
    }

    /// Its checkpoint in a new folder, with `change` made to the config.
    pub fn checkpoint(&self, change: impl FnOnce(&mut Value)) -> TempDir {
        let mut config = self.config.clone();
        change(&mut config);
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        write_checkpoint(folder.path(), &config);
        folder
    }
}

/// Names of all cases.
pub fn cases() -> Vec<String> {
    let names = fs::read_dir(goldens()).expect("goldens stand beside the tests").filter_map(|entry| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        name.strip_suffix(".safetensors").filter(|name| *name != "tiny").map(str::to_owned)
    });
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    names
}

/// Writes `config.json` and `model.safetensors`, in f32.
///
/// # Panics
/// If the folder cannot be written.
pub fn write_checkpoint(dir: &Path, config: &Value) {
    let flag = |name: &str| config[name].as_bool().unwrap_or(false);
    let is_qwen2 = config["model_type"] == "qwen2";
    let is_wanted = |name: &str| match name {
        "lm_head.weight" => !flag("tie_word_embeddings"),
        _ if !name.ends_with(".bias") => true,
        _ if name.contains(".mlp.") => flag("mlp_bias"),
        _ if name.contains(".o_proj.") => flag("attention_bias") && !is_qwen2,
        _ => flag("attention_bias") || is_qwen2,
    };
    let bytes = fs::read(goldens().join("tiny.safetensors")).expect("the weights are committed");
    let weights = SafeTensors::deserialize(&bytes).expect("the weights are a safetensors file");
    let wanted: Vec<(String, TensorView<'_>)> =
        weights.tensors().into_iter().filter(|(name, _)| is_wanted(name)).collect();
    serialize_to_file(wanted, None, &dir.join("model.safetensors")).expect("a checkpoint can be written");
    fs::write(dir.join("config.json"), config.to_string()).expect("a config can be written");
}

/// The config of a plain tiny model that ends with [`END`] and takes 128 tokens.
pub fn config() -> Value {
    let mut config = Golden::read("untied").config;
    config["eos_token_id"] = END.into();
    config
}

/// Writes a whole model as a server loads it: weights, config, a tokenizer with one character a token, a chat template.
///
/// # Panics
/// If the folder cannot be written.
pub fn write_model(dir: &Path) {
    write_checkpoint(dir, &config());
    // In byte-level BPE a space is written as another letter.
    let characters = (' '..='~').map(|c| if c == ' ' { 'Ġ' } else { c }.to_string());
    let vocab: serde_json::Map<String, Value> =
        iter::once("<|end|>".to_owned()).chain(characters).enumerate().map(|(id, token)| (token, id.into())).collect();
    assert_eq!(vocab.len(), VOCAB);
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let end = json!({"id": END, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    let template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}";
    let tokenizer_config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>",
        "chat_template": template, "clean_up_tokenization_spaces": false, "model_max_length": 128});
    for (name, value) in [
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", json!({"eos_token_id": END})),
    ] {
        fs::write(dir.join(name), value.to_string()).expect("a model can be written");
    }
}
