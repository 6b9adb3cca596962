//! Qwen2-MoE: Qwen2's attention, and of many narrow experts each token goes through a few, and through one that is shared.
//!
//! Source: Qwen team 2024, arXiv:2407.10671, section 2.2.2.

use drafthorse_kernels::ops::moe::{Router, Scoring};

use super::decoder::{Decoder, DecoderLayer};
use super::model::Model;
use crate::error::Result;
use crate::keys::Keys;
use crate::layers::{Attention, AttentionKind, Experts, FeedForward, GatedMlp, SharedExpert, SparseMlp};
use crate::weights::Loader;

/// `Qwen2MoeForCausalLM`.
pub(super) fn load(loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    let keys = &loader.config().keys;
    let shared = SharedExpert {
        name: "shared_expert",
        intermediate: keys.size("shared_expert_intermediate_size")?,
        gate: Some("shared_expert_gate"),
    };
    let experts = Experts { shared: Some(shared), ..experts(keys)? };
    let qkv_bias = keys.flag("qkv_bias")?.unwrap_or(true);
    Decoder::load(loader, |at, i| {
        let kind = AttentionKind { qkv_bias, o_bias: false, qk_norm: false };
        DecoderLayer::new(at, Attention::load(&at.at("self_attn"), i, kind)?, mlp(&at.at("mlp"), i, &experts)?)
    })
}

/// The experts of Qwen's families, but for what they share.
pub(super) fn experts(keys: &Keys) -> Result<Experts> {
    Ok(Experts {
        router: Router {
            // As transformers 5 writes it, then as checkpoints from before have it.
            num_experts: match keys.count("num_local_experts")? {
                Some(_) => keys.size("num_local_experts")?,
                None => keys.size("num_experts")?,
            },
            top_k: keys.size("num_experts_per_tok")?,
            scoring: Scoring::Softmax,
            groups: None,
            normalize: keys.flag("norm_topk_prob")?.unwrap_or(false),
            scale: 1.0,
        },
        has_correction_bias: false,
        intermediate: keys.size("moe_intermediate_size")?,
        projections: Experts::PROJECTIONS,
        shared: None,
    })
}

/// Experts in each `decoder_sparse_step`-th layer, but for `mlp_only_layers`; a plain MLP in the others.
pub(super) fn mlp(at: &Loader<'_>, layer: usize, experts: &Experts) -> Result<Box<dyn FeedForward>> {
    let keys = &at.config().keys;
    let step = keys.count("decoder_sparse_step")?.unwrap_or(1);
    let is_sparse = step > 0 && (layer + 1).is_multiple_of(step) && !keys.indices("mlp_only_layers")?.contains(&layer);
    Ok(match is_sparse {
        true => Box::new(SparseMlp::load(at, experts)?),
        false => Box::new(GatedMlp::load(at, at.config().intermediate_size)?),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_number_of_experts_has_two_names() {
        let num_experts = |name: &str| {
            let mut keys = json!({"num_experts_per_tok": 2, "moe_intermediate_size": 8});
            keys[name] = 4.into();
            let Value::Object(keys) = keys else { unreachable!("it is an object") };
            experts(&Keys::new(keys)).map(|experts| experts.router.num_experts)
        };
        assert_eq!(num_experts("num_experts").unwrap(), 4);
        assert_eq!(num_experts("num_local_experts").unwrap(), 4);
        assert_eq!(num_experts("n_experts").unwrap_err().to_string(), "config.json has no num_experts");
    }
}
