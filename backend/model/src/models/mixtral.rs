//! Mixtral: Mistral's attention, and of eight experts each token goes through two.
//!
//! Source: Jiang et al. 2024, arXiv:2401.04088.

use drafthorse_kernels::ops::moe::{Router, Scoring};

use super::decoder::{Decoder, DecoderLayer};
use super::model::Model;
use crate::error::Result;
use crate::layers::{Attention, AttentionKind, Experts, SparseMlp};
use crate::weights::Loader;

/// `MixtralForCausalLM`.
pub(super) fn load(loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    let keys = &loader.config().keys;
    let experts = Experts {
        router: Router {
            num_experts: keys.size("num_local_experts")?,
            top_k: keys.size("num_experts_per_tok")?,
            scoring: Scoring::Softmax,
            groups: None,
            normalize: true,
            scale: 1.0,
        },
        has_correction_bias: false,
        intermediate: loader.config().intermediate_size,
        projections: ["w1", "w3", "w2"],
        shared: None,
    };
    Decoder::load(loader, |at, i| {
        let kind = AttentionKind { qkv_bias: false, o_bias: false, qk_norm: false };
        let attention = Attention::load(&at.at("self_attn"), i, kind)?;
        DecoderLayer::new(at, attention, Box::new(SparseMlp::load(&at.at("block_sparse_moe"), &experts)?))
    })
}
