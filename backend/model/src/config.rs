//! A checkpoint's `config.json`: the numbers a network is built from.
//!
//! Keys that are not used here are ignored, since published files hold dozens. A value that would change the result in a way
//! that is not implemented is refused with its key, what it is and what it may be.

mod mla;
mod quantization;

use std::fmt;
use std::path::{Path, PathBuf};

use drafthorse_kernels::DType;
use drafthorse_kernels::ops::rope::{RopeParams, RopeScaling};
use serde::Deserialize;
use serde_json::{Map, Value};

pub use self::mla::MlaConfig;
pub use self::quantization::StoredQuantization;
use crate::error::{ModelError, Result};
use crate::keys::Keys;
use crate::kv_cache::KvLayer;

/// What every decoder needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `architectures[0]`, like `LlamaForCausalLM`.
    pub architecture: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Width of the gated MLP between its two projections.
    pub intermediate_size: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Positions the network was trained for: the longest sequence.
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    pub rope: RopeParams,
    /// The head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Biases on the projections to q, k and v.
    pub qkv_bias: bool,
    /// A bias on the projection out of the attention.
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// Attention over latents, if it is of that kind.
    pub mla: Option<MlaConfig>,
    /// Tokens that end a text, as the checkpoint has them. May be empty.
    pub eos_token_ids: Vec<u32>,
    pub bos_token_id: Option<u32>,
    /// What the weights are said to be stored in. The tensors themselves decide.
    pub dtype: Option<DType>,
    /// How the weights are quantized in the checkpoint.
    pub quantization: Option<StoredQuantization>,
    /// Tokens that a token looks back on, itself among them, where that is less than the context. No longer sequence is possible.
    pub sliding_window: Option<usize>,
    /// What the family alone knows.
    pub keys: Keys,
}

/// `config.json` as it is written; only the keys that matter here.
#[derive(Deserialize)]
#[serde(expecting = "an object of settings")]
struct Raw {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f32>,
    hidden_act: Option<String>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Map<String, Value>>,
    rope_parameters: Option<Map<String, Value>>,
    partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    eos_token_id: Option<OneOrMany>,
    bos_token_id: Option<u32>,
    torch_dtype: Option<String>,
    dtype: Option<String>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    layer_types: Option<Vec<String>>,
    quantization_config: Option<StoredQuantization>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl ModelConfig {
    /// Reads `config.json` in a checkpoint's folder.
    ///
    /// # Errors
    /// `Read` or `Json` if it is not there or not JSON, `MissingKey`, and `Unsupported` for a value that is not implemented.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|source| ModelError::Read { path: path.clone(), source })?;
        ModelConfig::parse(&text, path)
    }

    /// `path` is where `text` came from, for messages.
    pub(crate) fn parse(text: &str, path: PathBuf) -> Result<Self> {
        let mut json = serde_json::Deserializer::from_str(text);
        let raw: Result<Raw, _> = serde_path_to_error::deserialize(&mut json);
        let raw = raw.map_err(|error| {
            let key = match error.path().to_string() {
                // It is nowhere in particular.
                key if matches!(&*key, "." | "?") => String::new(),
                key => format!(", {key}"),
            };
            ModelError::Json { path: path.clone(), key, source: error.into_inner() }
        })?;
        let all = serde_json::from_str(text);
        raw.check(Keys::new(all.map_err(|source| ModelError::Json { path, key: String::new(), source })?))
    }

    /// What each layer keeps of a token, over all ranks.
    pub fn kv_layer(&self) -> KvLayer {
        match &self.mla {
            Some(mla) => mla.kv_layer(),
            None => KvLayer::Heads { num_kv_heads: self.num_kv_heads, head_dim: self.head_dim },
        }
    }

    /// Bytes that a token takes in the KV cache, in all layers.
    pub fn kv_bytes_per_token(&self, dtype: DType) -> usize {
        self.num_layers * self.kv_layer().token_bytes(dtype)
    }

    /// Refuses a sliding window that sequences of at most `longest` tokens could outgrow.
    ///
    /// # Errors
    /// `Unsupported`.
    pub(crate) fn check_window(&self, longest: Option<usize>) -> Result<()> {
        match self.sliding_window {
            Some(window) if longest.is_none_or(|longest| longest > window) => {
                let supported = format!("null, use_sliding_window false, or a max_model_len of at most {window}");
                Err(unsupported("sliding_window", &window, supported))
            }
            _ => Ok(()),
        }
    }

    /// Makes it take sequences of `positions` tokens too, whatever it was trained on. Whether that is more.
    pub(crate) fn allow_positions(&mut self, positions: usize) -> bool {
        // Dynamic scaling would derive other angles.
        let is_fixed = !matches!(self.rope.scaling, RopeScaling::Dynamic { .. });
        let is_more = is_fixed && positions > self.max_position_embeddings;
        if is_more {
            self.max_position_embeddings = positions;
            self.rope.max_positions = positions;
        }
        is_more
    }

    /// Makes the rotary table no longer than `max` positions. The model's context stays what it is.
    pub(crate) fn limit_positions(&mut self, max: Option<usize>) {
        // Dynamic scaling derives its angles from the length of the table.
        if let Some(max) = max
            && !matches!(self.rope.scaling, RopeScaling::Dynamic { .. })
        {
            self.rope.max_positions = self.rope.max_positions.min(max);
        }
    }
}

/// Far above every model there is, and low enough that no product of sizes overflows.
fn largest(key: &str) -> usize {
    match key {
        "vocab_size" | "intermediate_size" => 1 << 24,
        "hidden_size" => 1 << 20,
        "max_position_embeddings" => u32::MAX as usize,
        _ => 1 << 16,
    }
}

/// A refusal of `key`'s value.
fn unsupported(key: impl Into<String>, value: &dyn fmt::Display, supported: impl Into<String>) -> ModelError {
    ModelError::Unsupported { key: key.into(), value: value.to_string(), supported: supported.into() }
}

impl Raw {
    fn check(self, keys: Keys) -> Result<ModelConfig> {
        let need = |key, value: Option<usize>| match value {
            None => Err(ModelError::MissingKey { key }),
            Some(0) => Err(unsupported(key, &0, "1 and more")),
            Some(value) if value > largest(key) => Err(unsupported(key, &value, format!("1 to {}", largest(key)))),
            Some(value) => Ok(value),
        };
        let architecture = self.architectures.as_ref().and_then(|names| names.first());
        let architecture = architecture.ok_or(ModelError::MissingKey { key: "architectures" })?.clone();
        let hidden_size = need("hidden_size", self.hidden_size)?;
        let num_heads = need("num_attention_heads", self.num_attention_heads)?;
        let num_kv_heads = need("num_key_value_heads", self.num_key_value_heads.or(Some(num_heads)))?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            let supported = format!("a divisor of num_attention_heads, which is {num_heads}");
            return Err(unsupported("num_key_value_heads", &num_kv_heads, supported));
        }
        if self.head_dim.is_none() && MlaConfig::turned(&keys)?.is_none() && !hidden_size.is_multiple_of(num_heads) {
            let supported = format!("a divisor of hidden_size, which is {hidden_size}, or head_dim given");
            return Err(unsupported("num_attention_heads", &num_heads, supported));
        }
        // Of a head that attends over latents only a part turns, and its sizes are keys of their own.
        let turned = MlaConfig::turned(&keys)?;
        let head_dim = need("head_dim", turned.or(self.head_dim).or(Some(hidden_size / num_heads)))?;
        if !head_dim.is_multiple_of(2) {
            return Err(unsupported("head_dim", &head_dim, "even numbers"));
        }
        if let Some(eps) = self.rms_norm_eps
            && !(0.0..1.0).contains(&eps)
        {
            return Err(unsupported("rms_norm_eps", &eps, "0 up to below 1"));
        }
        self.check_activation()?;
        self.check_layer_types()?;
        let sliding_window = self.window();
        let max_position_embeddings = need("max_position_embeddings", self.max_position_embeddings.or(Some(2048)))?;
        let rope = self.rope(head_dim, max_position_embeddings)?;
        let mla = MlaConfig::of(&keys, &rope.scaling)?;
        // Qwen2's q, k and v have biases by definition, whatever its config says.
        let is_qwen2 = self.model_type.as_deref() == Some("qwen2");
        let attention_bias = self.attention_bias.unwrap_or(false);

        Ok(ModelConfig {
            architecture,
            vocab_size: need("vocab_size", self.vocab_size)?,
            hidden_size,
            intermediate_size: need("intermediate_size", self.intermediate_size)?,
            num_layers: need("num_hidden_layers", self.num_hidden_layers)?,
            num_heads,
            num_kv_heads,
            head_dim,
            max_position_embeddings: rope.max_positions,
            rms_norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            rope,
            mla,
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(false),
            qkv_bias: is_qwen2 || attention_bias,
            o_bias: !is_qwen2 && attention_bias,
            mlp_bias: self.mlp_bias.unwrap_or(false),
            eos_token_ids: match self.eos_token_id {
                None => Vec::new(),
                Some(OneOrMany::One(id)) => vec![id],
                Some(OneOrMany::Many(ids)) => ids,
            },
            bos_token_id: self.bos_token_id,
            dtype: self.dtype.or(self.torch_dtype).as_deref().and_then(float_dtype),
            sliding_window,
            quantization: self.quantization_config,
            keys,
        })
    }

    fn check_activation(&self) -> Result<()> {
        match self.hidden_act.as_deref() {
            None | Some("silu" | "swish") => Ok(()),
            Some(other) => Err(unsupported("hidden_act", &other, "silu")),
        }
    }

    /// Layers of other kinds than full attention are not implemented.
    fn check_layer_types(&self) -> Result<()> {
        let is_known = |kind: &str| match kind {
            "full_attention" | "attention" => true,
            // Its window is in `sliding_window`.
            "sliding_attention" => self.sliding_window.is_some(),
            _ => false,
        };
        match self.layer_types.iter().flatten().find(|kind| !is_known(kind)) {
            Some(kind) => {
                Err(unsupported("layer_types", kind, "full_attention, sliding_attention with a sliding_window"))
            }
            None => Ok(()),
        }
    }

    /// A window that no sequence outgrows does nothing.
    fn window(&self) -> Option<usize> {
        let in_use = self.use_sliding_window.unwrap_or(true);
        let smaller = |window: &usize| self.max_position_embeddings.is_none_or(|max| *window < max);
        self.sliding_window.filter(|window| in_use && smaller(window))
    }

    /// Rotary embedding, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before).
    fn rope(&self, head_dim: usize, max_positions: usize) -> Result<RopeParams> {
        let empty = Map::new();
        let (key, table) = match (&self.rope_parameters, &self.rope_scaling) {
            (Some(table), _) => ("rope_parameters", table),
            (None, Some(table)) => ("rope_scaling", table),
            (None, None) => ("rope_scaling", &empty),
        };
        let rope = RopeTable { key, table };
        let theta = rope.number("rope_theta")?.or(self.rope_theta).unwrap_or(10_000.0);
        if !(theta > 0.0 && theta.is_finite()) {
            return Err(unsupported("rope_theta", &theta, "numbers above 0"));
        }
        let partial = rope.number("partial_rotary_factor")?.or(self.partial_rotary_factor).unwrap_or(1.0);
        let rotary_dim = (head_dim as f64 * partial) as usize;
        if rotary_dim == 0 || rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            return Err(unsupported(
                "partial_rotary_factor",
                &partial,
                "an even part of head_dim, above 0 and up to 1",
            ));
        }
        let scaling = rope.scaling(max_positions)?;
        // Here the key says where the trained positions end; dynamic scaling goes on from there, up to its factor.
        let max_positions = match scaling {
            RopeScaling::Dynamic { factor, original_max_positions } => {
                max_positions.max((original_max_positions as f64 * factor) as usize)
            }
            _ => max_positions,
        };
        Ok(RopeParams { head_dim, rotary_dim, theta, max_positions, scaling })
    }
}

/// One of the two spellings of a rope table.
struct RopeTable<'a> {
    key: &'static str,
    table: &'a Map<String, Value>,
}

impl RopeTable<'_> {
    fn scaling(&self, max_positions: usize) -> Result<RopeScaling> {
        let kind = self.table.get("rope_type").or_else(|| self.table.get("type"));
        let kind = match kind {
            None | Some(Value::Null) => "default",
            Some(Value::String(kind)) => kind.as_str(),
            Some(other) => return Err(self.refuse("rope_type", other, "a name")),
        };
        let original = self.number("original_max_position_embeddings")?.map_or(max_positions, |n| n as usize);
        Ok(match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: self.needed("factor")? },
            "dynamic" => RopeScaling::Dynamic { factor: self.needed("factor")?, original_max_positions: original },
            "llama3" => RopeScaling::Llama3 {
                factor: self.needed("factor")?,
                low_freq_factor: self.needed("low_freq_factor")?,
                high_freq_factor: self.needed("high_freq_factor")?,
                original_max_positions: original,
            },
            "yarn" => RopeScaling::Yarn {
                factor: self.needed("factor")?,
                original_max_positions: original,
                beta_fast: self.number("beta_fast")?.unwrap_or(32.0),
                beta_slow: self.number("beta_slow")?.unwrap_or(1.0),
                attention_factor: self.number("attention_factor")?,
                mscale: self.number_or_zero("mscale")?,
                mscale_all_dim: self.number_or_zero("mscale_all_dim")?,
                truncate: self.table.get("truncate").and_then(Value::as_bool).unwrap_or(true),
            },
            other => return Err(self.refuse("rope_type", &other, "default, linear, dynamic, llama3, yarn")),
        })
    }

    fn number(&self, name: &str) -> Result<Option<f64>> {
        match self.table.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) if number > 0.0 => Ok(Some(number)),
                _ => Err(self.refuse(name, value, "numbers above 0")),
            },
        }
    }

    /// Where 0 means as much as silence.
    fn number_or_zero(&self, name: &str) -> Result<Option<f64>> {
        match self.table.get(name).and_then(Value::as_f64) {
            Some(0.0) => Ok(None),
            _ => self.number(name),
        }
    }

    fn needed(&self, name: &str) -> Result<f64> {
        self.number(name)?.ok_or_else(|| self.refuse(name, &"missing", "numbers above 0"))
    }

    fn refuse(&self, name: &str, value: &dyn fmt::Display, supported: &str) -> ModelError {
        unsupported(format!("{}.{name}", self.key), value, supported)
    }
}

fn float_dtype(name: &str) -> Option<DType> {
    match name.trim_start_matches("torch.") {
        "float32" => Some(DType::F32),
        "float16" => Some(DType::F16),
        "bfloat16" => Some(DType::BF16),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small config with `changes` laid over it; a null takes a key away.
    fn parse(changes: &str) -> Result<ModelConfig> {
        let base = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
            "hidden_act": "silu", "max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1,
            "transformers_version": "5.17", "pretraining_tp": 1}"#;
        let mut config: Map<String, Value> = serde_json::from_str(base).unwrap();
        config.extend(serde_json::from_str::<Map<String, Value>>(changes).unwrap());
        ModelConfig::parse(&Value::from(config).to_string(), PathBuf::from("config.json"))
    }

    fn refusal(changes: &str) -> String {
        parse(changes).unwrap_err().to_string()
    }

    #[test]
    fn what_is_silent_gets_the_family_s_defaults() {
        let config = parse(r#"{"num_key_value_heads": null, "rms_norm_eps": null, "eos_token_id": null}"#).unwrap();
        assert_eq!((config.num_kv_heads, config.head_dim, config.rms_norm_eps), (4, 16, 1e-6));
        assert!(!config.tie_word_embeddings && !config.qkv_bias && !config.mlp_bias);
        assert!(config.eos_token_ids.is_empty());
        assert_eq!((config.rope.theta, &config.rope.scaling), (10_000.0, &RopeScaling::None));
    }

    #[test]
    fn both_spellings_of_rope_and_dtype_mean_the_same() {
        let old = parse(
            r#"{"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"}"#,
        );
        let new = parse(
            r#"{"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000}, "dtype": "bfloat16"}"#,
        );
        let (old, mut new) = (old.unwrap(), new.unwrap());
        new.keys = old.keys.clone();
        assert_eq!(old, new);
        assert_eq!((new.rope.theta, new.dtype), (5e5, Some(DType::BF16)));
        assert_eq!(new.rope.scaling, RopeScaling::Linear { factor: 2.0 });
    }

    #[test]
    fn every_rope_type_is_read() {
        let scaling = |text: &str| parse(&format!(r#"{{"rope_scaling": {text}}}"#)).unwrap().rope.scaling;
        assert_eq!(
            scaling(r#"{"rope_type": "dynamic", "factor": 4}"#),
            RopeScaling::Dynamic { factor: 4.0, original_max_positions: 256 }
        );
        let stretched = parse(r#"{"rope_scaling": {"rope_type": "dynamic", "factor": 4}}"#).unwrap();
        assert_eq!((stretched.max_position_embeddings, stretched.rope.max_positions), (1024, 1024));
        let llama3 = r#"{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128}"#;
        assert_eq!(
            scaling(llama3),
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_positions: 128
            }
        );
        let RopeScaling::Yarn { factor, beta_fast, beta_slow, attention_factor, .. } =
            scaling(r#"{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}"#)
        else {
            panic!("not yarn")
        };
        assert_eq!((factor, beta_fast, beta_slow, attention_factor), (4.0, 32.0, 1.0, None));
        assert_eq!(scaling(r#"{"rope_type": "default"}"#), RopeScaling::None);
    }

    #[test]
    fn what_is_not_implemented_is_refused_by_name() {
        assert_eq!(
            refusal(r#"{"rope_scaling": {"type": "su"}}"#),
            "config.json: rope_scaling.rope_type is su, supported: default, linear, dynamic, llama3, yarn"
        );
        assert_eq!(
            refusal(r#"{"rope_parameters": {"rope_type": "linear"}}"#),
            "config.json: rope_parameters.factor is missing, supported: numbers above 0"
        );
        assert_eq!(refusal(r#"{"hidden_act": "gelu"}"#), "config.json: hidden_act is gelu, supported: silu");
        assert_eq!(
            refusal(r#"{"num_key_value_heads": 3}"#),
            "config.json: num_key_value_heads is 3, supported: a divisor of num_attention_heads, which is 4"
        );
        assert_eq!(
            refusal(r#"{"num_attention_heads": 6, "num_key_value_heads": 6}"#),
            "config.json: num_attention_heads is 6, supported: a divisor of hidden_size, which is 64, or head_dim given"
        );
        assert_eq!(
            refusal(r#"{"layer_types": ["full_attention", "chunked_attention"]}"#),
            "config.json: layer_types is chunked_attention, supported: full_attention, sliding_attention with a sliding_window"
        );
        assert_eq!(refusal(r#"{"vocab_size": null}"#), "config.json has no vocab_size");
        for (key, most) in [
            ("hidden_size", 1 << 20),
            ("vocab_size", 1 << 24),
            ("intermediate_size", 1 << 24),
            ("num_hidden_layers", 1 << 16),
            ("head_dim", 1 << 16),
            ("max_position_embeddings", 4294967295_usize),
        ] {
            let said = |value: usize| format!("config.json: {key} is {value}, supported: 1 to {most}");
            for value in [most + 1, 1 << 62] {
                assert_eq!(refusal(&format!(r#"{{"{key}": {value}}}"#)), said(value));
            }
        }
        assert_eq!(
            refusal(r#"{"num_hidden_layers": 0}"#),
            "config.json: num_hidden_layers is 0, supported: 1 and more"
        );
    }

    #[test]
    fn a_window_is_refused_unless_no_sequence_outgrows_it() {
        let outcome = |changes: &str, max| match parse(changes).unwrap().check_window(max) {
            Ok(()) => "fits".to_owned(),
            Err(err) => err.to_string(),
        };
        let refused = "config.json: sliding_window is 128, supported: null, use_sliding_window false, or a max_model_len of at most 128";
        assert_eq!(outcome(r#"{"sliding_window": 128}"#, None), refused);
        assert_eq!(outcome(r#"{"sliding_window": 128, "layer_types": ["sliding_attention"]}"#, Some(129)), refused);
        assert_eq!(outcome(r#"{"sliding_window": 128}"#, Some(128)), "fits");
        assert_eq!(outcome(r#"{"sliding_window": 128, "use_sliding_window": false}"#, None), "fits");
        assert_eq!(outcome(r#"{"sliding_window": 256}"#, None), "fits");
    }

    #[test]
    fn qwen2_has_biases_on_q_k_and_v_alone() {
        let config = parse(r#"{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}"#).unwrap();
        assert!(config.qkv_bias && !config.o_bias);
        let config = parse(r#"{"attention_bias": true}"#).unwrap();
        assert!(config.qkv_bias && config.o_bias);
    }

    #[test]
    fn end_tokens_may_be_one_or_many() {
        assert_eq!(parse("{}").unwrap().eos_token_ids, [2]);
        assert_eq!(parse(r#"{"eos_token_id": [3, 4]}"#).unwrap().eos_token_ids, [3, 4]);
    }

    #[test]
    fn broken_json_says_where() {
        use std::error::Error;
        let err = ModelConfig::parse("{\n  \"vocab_size\": \"many\"}", PathBuf::from("m/config.json")).unwrap_err();
        assert_eq!(err.to_string(), "m/config.json, vocab_size is not valid JSON for its purpose");
        assert!(err.source().unwrap().to_string().contains("line 2"));
        let err = ModelConfig::parse("{", PathBuf::from("m/config.json")).unwrap_err();
        assert_eq!(err.to_string(), "m/config.json is not valid JSON for its purpose");
    }
}
