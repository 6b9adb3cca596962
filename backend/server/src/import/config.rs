//! A file's keys as Hugging Face's `config.json` and `generation_config.json`.

use std::f64::consts::PI;

use serde_json::{Value as Json, json};

use super::error::{ImportError, Result};
use super::gguf::{Head, required};

/// Context that Llama 3.1 and 3.2 were trained on before their frequencies were stretched, and where the stretch begins and
/// ends; GGUF keeps the stretched frequencies only, which [`llama3_scaling`] checks against these.
const LLAMA3_ORIGINAL_CONTEXT: f64 = 8192.0;
const LLAMA3_LOW_FREQ_FACTOR: f64 = 1.0;
const LLAMA3_HIGH_FREQ_FACTOR: f64 = 4.0;

/// Tokens that end a turn in chat templates; a file often names only one end, in `eos_token_id`.
const TURN_ENDS: [&str; 2] = ["<|im_end|>", "<|eot_id|>"];

/// A family that can be imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Llama,
    Qwen2,
}

impl Architecture {
    /// Its name in GGUF, and the prefix of its keys.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen2 => "qwen2",
        }
    }
}

/// What shapes the tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub architecture: Architecture,
    pub num_layers: usize,
    pub hidden: u64,
    pub intermediate: u64,
    pub num_heads: u64,
    pub num_kv_heads: u64,
    pub head_dim: u64,
    pub vocab: u64,
    /// No output matrix: the embedding is used again.
    pub tied: bool,
    pub attention_bias: bool,
    pub mlp_bias: bool,
    pub max_positions: u32,
    norm_eps: f64,
    rope_theta: f64,
    rope_scaling: Json,
}

impl Config {
    /// Reads the keys. `rope_freqs` are the values of the tensor of that name, if the file has one.
    pub fn from_head(head: &Head, rope_freqs: Option<&[f32]>) -> Result<Self> {
        let key = "general.architecture";
        let architecture = match required(key, head.text(key)?)? {
            "llama" => Architecture::Llama,
            "qwen2" => Architecture::Qwen2,
            other => {
                return Err(ImportError::Key {
                    key: key.into(),
                    got: format!("{other:?}"),
                    must: "llama or qwen2".into(),
                });
            }
        };
        let prefix = architecture.name();
        let find = |name: &str| head.uint(&format!("{prefix}.{name}"));
        let need = |name: &str| positive(head, &format!("{prefix}.{name}"));

        if let Some(experts @ 1..) = find("expert_count")? {
            let (key, must) = (format!("{prefix}.expert_count"), "absent: models with experts are not imported".into());
            return Err(ImportError::Key { key, got: experts.to_string(), must });
        }
        let hidden = need("embedding_length")?;
        let num_heads = need("attention.head_count")?;
        let num_kv_heads = find("attention.head_count_kv")?.unwrap_or(num_heads);
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            let (key, must) = (format!("{prefix}.attention.head_count_kv"), format!("a divisor of {num_heads}"));
            return Err(ImportError::Key { key, got: num_kv_heads.to_string(), must });
        }
        let head_dim = find("attention.key_length")?.unwrap_or(hidden / num_heads);
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            let (key, must) = (format!("{prefix}.attention.key_length"), "an even number above 0".into());
            return Err(ImportError::Key { key, got: head_dim.to_string(), must });
        }
        for name in ["attention.value_length", "rope.dimension_count"] {
            if let Some(got) = find(name)?.filter(|&got| got != head_dim) {
                let must = format!("{head_dim}, the size of a head");
                return Err(ImportError::Key { key: format!("{prefix}.{name}"), got: got.to_string(), must });
            }
        }
        let embedding = "token_embd.weight";
        let embedding = head.tensor(embedding).ok_or_else(|| ImportError::MissingTensor { name: embedding.into() })?;
        let rope_theta = head.float(&format!("{prefix}.rope.freq_base"))?.unwrap_or(10_000.0);
        Ok(Config {
            architecture,
            num_layers: need("block_count")? as usize,
            hidden: hidden.into(),
            intermediate: need("feed_forward_length")?.into(),
            num_heads: num_heads.into(),
            num_kv_heads: num_kv_heads.into(),
            head_dim: head_dim.into(),
            vocab: embedding.shape[0],
            tied: head.tensor("output.weight").is_none(),
            attention_bias: head.tensor("blk.0.attn_q.bias").is_some(),
            mlp_bias: head.tensor("blk.0.ffn_gate.bias").is_some(),
            max_positions: need("context_length")?,
            norm_eps: {
                let key = format!("{prefix}.attention.layer_norm_rms_epsilon");
                required(&key, head.float(&key)?)?
            },
            rope_theta,
            rope_scaling: rope_scaling(head, prefix, rope_theta, head_dim, rope_freqs)?,
        })
    }

    /// `config.json`. `kept` names the tensors left in bf16 when the others keep their blocks.
    pub fn to_json(&self, ids: &SpecialIds, kept: Option<&[String]>) -> Json {
        let (class, model_type) = match self.architecture {
            Architecture::Llama => ("LlamaForCausalLM", "llama"),
            Architecture::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
        };
        let mut config = json!({
            "architectures": [class],
            "model_type": model_type,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
            "initializer_range": 0.02,
            "use_cache": true,
            "torch_dtype": "bfloat16",
            "bos_token_id": ids.bos,
            "eos_token_id": ids.eos,
            "pad_token_id": ids.pad,
        });
        match self.architecture {
            Architecture::Llama => {
                config["attention_bias"] = self.attention_bias.into();
                config["mlp_bias"] = self.mlp_bias.into();
            }
            Architecture::Qwen2 => config["use_sliding_window"] = false.into(),
        }
        if let Some(kept) = kept {
            config["quantization_config"] = json!({
                "quant_method": "gguf_blocks",
                "group_size": 32,
                "modules_to_not_convert": kept,
            });
        }
        config
    }
}

fn positive(head: &Head, key: &str) -> Result<u32> {
    match required(key, head.uint(key)?)? {
        0 => Err(ImportError::Key { key: key.into(), got: "0".into(), must: "above 0".into() }),
        number => Ok(number),
    }
}

/// `rope_scaling` as transformers names it; null where positions are not stretched.
fn rope_scaling(head: &Head, prefix: &str, theta: f64, head_dim: u32, rope_freqs: Option<&[f32]>) -> Result<Json> {
    let scaling = format!("{prefix}.rope.scaling.");
    let key = |name: &str| format!("{scaling}{name}");
    let read = ["type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow"];
    if let Some(unknown) = head.keys_under(&scaling).find(|found| !read.contains(&&found[scaling.len()..])) {
        let must = format!("absent: only {} are understood", read.join(", "));
        return Err(ImportError::Key { key: unknown.into(), got: "given".into(), must });
    }
    let old_linear = format!("{prefix}.rope.scale_linear");
    let factor = head.float(&key("factor"))?;
    let kind = match (head.text(&key("type"))?, head.float(&old_linear)?) {
        (Some(kind), _) => kind,
        (None, Some(factor)) if factor != 1.0 => return Ok(json!({"rope_type": "linear", "factor": factor})),
        (None, _) => "none",
    };
    let factor = || required(&key("factor"), factor);
    match (kind, rope_freqs) {
        ("none", None) => Ok(Json::Null),
        ("none", Some(stretch)) => llama3_scaling(stretch, theta, head_dim),
        ("linear", None) => Ok(json!({"rope_type": "linear", "factor": factor()?})),
        ("yarn", None) => {
            let original = key("original_context_length");
            let mut yarn = json!({
                "rope_type": "yarn",
                "factor": factor()?,
                "original_max_position_embeddings": positive(head, &original)?,
            });
            for (name, key) in [("beta_fast", key("yarn_beta_fast")), ("beta_slow", key("yarn_beta_slow"))] {
                if let Some(beta) = head.float(&key)? {
                    yarn[name] = beta.into();
                }
            }
            Ok(yarn)
        }
        (other, _) => Err(ImportError::Key {
            key: key("type"),
            got: format!("{other:?}{}", if rope_freqs.is_some() { " beside rope_freqs.weight" } else { "" }),
            must: "none, linear or yarn".into(),
        }),
    }
}

/// Finds Llama 3's scaling again from the stretch of each frequency, `[head_dim / 2]`, which is all that GGUF keeps of it.
fn llama3_scaling(stretch: &[f32], theta: f64, head_dim: u32) -> Result<Json> {
    let factor = stretch.iter().copied().fold(1.0, f32::max);
    if factor == 1.0 {
        return Ok(Json::Null);
    }
    let expected = |i: usize| {
        let wavelength = 2.0 * PI * theta.powf(2.0 * i as f64 / f64::from(head_dim));
        let turns = LLAMA3_ORIGINAL_CONTEXT / wavelength;
        let smooth = (turns - LLAMA3_LOW_FREQ_FACTOR) / (LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR);
        let smooth = smooth.clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / f64::from(factor) + smooth)
    };
    let follows = |(i, &got): (usize, &f32)| (f64::from(got) / expected(i) - 1.0).abs() < 1e-3;
    if stretch.len() as u32 != head_dim / 2 || !stretch.iter().enumerate().all(follows) {
        return Err(ImportError::Key {
            key: "rope_freqs.weight".into(),
            got: format!("a stretch of up to {factor} of its own"),
            must: "Llama 3's, with low and high factors 1 and 4 over 8192 positions".into(),
        });
    }
    Ok(json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_CONTEXT as u32,
    }))
}

/// Tokens with a meaning of their own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpecialIds {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub pad: Option<u32>,
    pub unk: Option<u32>,
    /// All that end an answer, `eos` first.
    pub ends: Vec<u32>,
}

impl SpecialIds {
    /// Reads the ids, each checked against `tokens`; `is_control` tells which tokens are never text.
    pub fn from_head(head: &Head, tokens: &[String], is_control: impl Fn(usize) -> bool) -> Result<Self> {
        let id = |name: &str| -> Result<Option<u32>> {
            let key = format!("tokenizer.ggml.{name}_token_id");
            match head.uint(&key)? {
                Some(id) if id as usize >= tokens.len() => {
                    let must = format!("below {}, the number of tokens", tokens.len());
                    Err(ImportError::Key { key, got: id.to_string(), must })
                }
                found => Ok(found),
            }
        };
        let eos = id("eos")?;
        let turn_ends =
            tokens.iter().enumerate().filter(|(i, text)| TURN_ENDS.contains(&text.as_str()) && is_control(*i));
        let turn_ends: Vec<_> = turn_ends.map(|(i, _)| i as u32).collect();
        let mut ends = Vec::new();
        for end in [eos, id("eot")?, id("eom")?].into_iter().flatten().chain(turn_ends) {
            if !ends.contains(&end) {
                ends.push(end);
            }
        }
        Ok(SpecialIds { bos: id("bos")?, eos, pad: id("padding")?, unk: id("unknown")?, ends })
    }

    /// `generation_config.json`. GGUF says nothing on temperatures, so neither does this.
    pub fn to_generation_config(&self) -> Json {
        let ends = match self.ends.as_slice() {
            [] => Json::Null,
            [one] => json!(one),
            several => json!(several),
        };
        json!({"bos_token_id": self.bos, "eos_token_id": ends, "pad_token_id": self.pad})
    }
}
