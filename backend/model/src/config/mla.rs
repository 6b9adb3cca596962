//! Multi-head latent attention, as `config.json` has it.

use drafthorse_kernels::ops::mla::{MlaDims, Pairs};
use drafthorse_kernels::ops::rope::RopeScaling;

use super::unsupported;
use crate::error::Result;
use crate::keys::Keys;
use crate::kv_cache::KvLayer;

/// Sizes that the kernels take.
const LANES: usize = 16;

/// What attention over latents needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaConfig {
    /// Width between the two parts of the queries' projection; `None`: it has one part.
    pub q_lora_rank: Option<usize>,
    /// Numbers of a latent.
    pub kv_lora_rank: usize,
    /// Numbers of a head's query and key without and with a position, and of its value.
    pub qk_nope_head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub v_head_dim: usize,
    /// Which dimensions turn together.
    pub pairs: Pairs,
    /// What scores are multiplied with.
    pub scale: f32,
}

/// One over the square root of a query's width. Where YaRN stretches positions, scores are sharpened by the square of
/// `0.1 * mscale_all_dim * ln(factor) + 1`; what cosines and sines are multiplied with comes to that.
///
/// Source: Peng et al. 2023, arXiv:2309.00071, section 3.4; the two `mscale`s are DeepSeek's.
fn scale(width: usize, scaling: &RopeScaling) -> f32 {
    let mscale = match *scaling {
        RopeScaling::Yarn { factor, mscale_all_dim: Some(all), .. } if factor > 1.0 => 0.1 * all * factor.ln() + 1.0,
        _ => 1.0,
    };
    ((width as f64).powf(-0.5) * mscale * mscale) as f32
}

impl MlaConfig {
    /// The part of a head that turns, of a model that has latents.
    pub(super) fn turned(keys: &Keys) -> Result<Option<usize>> {
        keys.count("kv_lora_rank")?.map(|_| keys.size("qk_rope_head_dim")).transpose()
    }

    /// What `config.json` says, if it names `kv_lora_rank`.
    pub(super) fn of(keys: &Keys, scaling: &RopeScaling) -> Result<Option<Self>> {
        if keys.count("kv_lora_rank")?.is_none() {
            return Ok(None);
        }
        let size = |key| match keys.size(key)? {
            size if size.is_multiple_of(LANES) => Ok(size),
            size => Err(unsupported(key, &size, "multiples of 16")),
        };
        let q_lora_rank = keys.count("q_lora_rank")?;
        if q_lora_rank == Some(0) {
            return Err(unsupported("q_lora_rank", &0, "null, 1 and more"));
        }
        let (nope, rope) = (size("qk_nope_head_dim")?, size("qk_rope_head_dim")?);
        Ok(Some(MlaConfig {
            q_lora_rank,
            kv_lora_rank: size("kv_lora_rank")?,
            qk_nope_head_dim: nope,
            qk_rope_head_dim: rope,
            v_head_dim: size("v_head_dim")?,
            pairs: if keys.flag("rope_interleave")?.unwrap_or(true) { Pairs::Interleaved } else { Pairs::Halves },
            scale: scale(nope + rope, scaling),
        }))
    }

    /// Those of some of the heads.
    pub fn dims(&self, num_heads: usize) -> MlaDims {
        MlaDims {
            num_heads,
            rank: self.kv_lora_rank,
            nope: self.qk_nope_head_dim,
            rope: self.qk_rope_head_dim,
            value: self.v_head_dim,
        }
    }

    /// What a layer keeps of a token, on each rank.
    pub fn kv_layer(&self) -> KvLayer {
        KvLayer::Latent { width: self.kv_lora_rank + self.qk_rope_head_dim }
    }
}

#[cfg(test)]
mod tests {
    use drafthorse_kernels::DType;

    use crate::config::ModelConfig;

    /// The keys that DeepSeek-V3 and R1 are published with, those that size a layer and its positions.
    const PUBLISHED: &str = r#"{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu",
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"},
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128]}}"#;

    #[test]
    fn a_token_of_deepseek_v3_takes_70_kb_and_scores_are_sharpened() {
        let config = ModelConfig::parse(PUBLISHED, "config.json".into()).unwrap();
        assert_eq!(config.kv_bytes_per_token(DType::BF16), 61 * 576 * 2);
        let mla = config.mla.unwrap();
        let mscale = 0.1 * 40f32.ln() + 1.0;
        assert!((mla.scale - mscale * mscale / 192f32.sqrt()).abs() < 1e-7);
        assert_eq!((config.rope.head_dim, config.rope.rotary_dim), (64, 64));
    }

    #[test]
    fn sizes_without_kernels_are_refused_by_name() {
        let refusal = |from: &str, to: &str| {
            ModelConfig::parse(&PUBLISHED.replace(from, to), "config.json".into()).unwrap_err().to_string()
        };
        assert_eq!(
            refusal(r#""qk_nope_head_dim": 128"#, r#""qk_nope_head_dim": 100"#),
            "config.json: qk_nope_head_dim is 100, supported: multiples of 16"
        );
        assert_eq!(
            refusal(r#""q_lora_rank": 1536"#, r#""q_lora_rank": 0"#),
            "config.json: q_lora_rank is 0, supported: null, 1 and more"
        );
        assert_eq!(refusal(r#""v_head_dim": 128,"#, ""), "config.json has no v_head_dim");
    }
}
