//! DeepSeek V2, V3 and R1: attention over latents; the first layers have a plain MLP, the others many experts and some that are shared.
//!
//! Source: DeepSeek-AI 2024, arXiv:2405.04434 (V2) and arXiv:2412.19437 (V3). A checkpoint's layers past `num_hidden_layers` are modules
//! for drafts (multi-token prediction), which [`drafts`](crate::drafts) loads.

use drafthorse_kernels::ops::moe::{GroupScore, Router, Scoring, TopGroups};

use super::decoder::{Decoder, DecoderLayer};
use super::model::Model;
use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::keys::Keys;
use crate::layers::{Experts, FeedForward, GatedMlp, LatentAttention, SharedExpert, SparseMlp};
use crate::weights::Loader;

/// `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM`.
pub(super) fn load(loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    set_aside_modules(loader)?;
    Decoder::load(loader, layer)
}

/// Layer `index`, counted from 0.
fn layer(at: &Loader<'_>, index: usize) -> Result<DecoderLayer> {
    layer_of(at, index, is_sparse(&at.config().keys, index)?)
}

/// The layer of a module for drafts. Its config may be that of the base, or say that there is but one layer.
pub(super) fn draft_layer(at: &Loader<'_>) -> Result<DecoderLayer> {
    layer_of(at, 0, at.contains("mlp.gate.weight"))
}

fn layer_of(at: &Loader<'_>, index: usize, is_sparse: bool) -> Result<DecoderLayer> {
    let config = at.config();
    let mla = config.mla.as_ref().ok_or(ModelError::MissingKey { key: "kv_lora_rank" })?;
    let attention = LatentAttention::load(&at.at("self_attn"), index, mla)?;
    let mlp = at.at("mlp");
    let mlp: Box<dyn FeedForward> = match experts_of(config)? {
        Some(experts) if is_sparse => Box::new(SparseMlp::load(&mlp, &experts)?),
        _ => Box::new(GatedMlp::load(&mlp, config.intermediate_size)?),
    };
    DecoderLayer::new(at, attention, mlp)
}

/// Whether layer `index` has experts.
fn is_sparse(keys: &Keys, index: usize) -> Result<bool> {
    let (dense, step) = (keys.count("first_k_dense_replace")?, keys.count("moe_layer_freq")?);
    Ok(index >= dense.unwrap_or(0) && index.is_multiple_of(step.unwrap_or(1).max(1)))
}

/// The experts of all layers that have some.
fn experts_of(config: &ModelConfig) -> Result<Option<Experts>> {
    let keys = &config.keys;
    let Some(num_experts) = keys.count("n_routed_experts")? else { return Ok(None) };
    let is_v2 = config.architecture.contains("V2");
    let (scoring, method) =
        if is_v2 { (Scoring::Softmax, Method::Greedy) } else { (Scoring::Sigmoid, Method::NoAuxTc) };
    let scoring = keys
        .one_of("scoring_func", &[("softmax", Scoring::Softmax), ("sigmoid", Scoring::Sigmoid)])?
        .unwrap_or(scoring);
    let method = keys.one_of("topk_method", &Method::ALL)?.unwrap_or(method);
    let groups = method.score().map(|score| -> Result<TopGroups> {
        Ok(TopGroups { num_groups: keys.size("n_group")?, top_k: keys.size("topk_group")?, score })
    });
    let intermediate = keys.size("moe_intermediate_size")?;
    let shared = keys.count("n_shared_experts")?.filter(|&num| num > 0).map(|num| SharedExpert {
        name: "shared_experts",
        intermediate: num * intermediate,
        gate: None,
    });
    Ok(Some(Experts {
        router: Router {
            num_experts,
            top_k: keys.size("num_experts_per_tok")?,
            scoring,
            groups: groups.transpose()?,
            // V2's weights are never divided by their sum, whatever its config says.
            normalize: !is_v2 && keys.flag("norm_topk_prob")?.unwrap_or(true),
            scale: keys.number("routed_scaling_factor")?.unwrap_or(1.0) as f32,
        },
        has_correction_bias: method == Method::NoAuxTc,
        intermediate,
        projections: Experts::PROJECTIONS,
        shared,
    }))
}

/// `topk_method`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Greedy,
    GroupLimitedGreedy,
    /// Experts are chosen by score and a bias that balances their load, which does not count afterwards.
    NoAuxTc,
}

impl Method {
    const ALL: [(&'static str, Method); 3] = [
        ("greedy", Method::Greedy),
        ("group_limited_greedy", Method::GroupLimitedGreedy),
        ("noaux_tc", Method::NoAuxTc),
    ];

    /// What groups are chosen by, if they are.
    fn score(self) -> Option<GroupScore> {
        match self {
            Method::Greedy => None,
            Method::GroupLimitedGreedy => Some(GroupScore::Max),
            Method::NoAuxTc => Some(GroupScore::TopTwo),
        }
    }
}

/// The layers past the last are known: they are for drafts, and not surplus.
fn set_aside_modules(loader: &Loader<'_>) -> Result<()> {
    let config = loader.config();
    let modules = config.keys.count("num_nextn_predict_layers")?.unwrap_or(0);
    for index in config.num_layers..config.num_layers + modules {
        let module = format!("model.layers.{index}.");
        loader.context().checkpoint.set_aside(|name| name.starts_with(&module));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use drafthorse_kernels::DType;

    use crate::LoadOptions;
    use crate::testing::Rig;

    const CONFIG: &str = r#"{"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 90, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 128, "q_lora_rank": 40, "kv_lora_rank": 48, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 16, "n_group": 4,
        "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 24}"#;

    #[test]
    fn a_model_of_made_up_weights_runs_within_the_workspace_that_is_planned() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
        let tokens: Vec<i32> = (0..100).map(|i| i * 7 % 90).collect();
        for dtype in [DType::F32, DType::BF16] {
            let options = LoadOptions { dtype, random_weights: true, ..LoadOptions::default() };
            // The rig's workspace is as large as planned: a step that needs more fails.
            let mut rig = Rig::new(dir.path(), &options, tokens.len());
            let whole = rig.step(&tokens, 0);
            assert!(whole.iter().all(|logit| logit.is_finite()) && whole.iter().any(|&logit| logit != whole[0]));
            assert_eq!(rig.chunked(&tokens, &[64, 1, 35]), whole);
            let planned = rig.workspace.capacity_bytes();
            assert!(rig.workspace.high_water_bytes() > planned / 2, "{planned} planned");
        }
    }
}
