//! Qwen3-MoE: Qwen3's attention, and of many narrow experts each token goes through a few; none is shared.
//!
//! Source: Qwen team 2025, arXiv:2505.09388.

use super::decoder::{Decoder, DecoderLayer};
use super::model::Model;
use super::qwen2_moe::{experts, mlp};
use crate::error::Result;
use crate::layers::{Attention, AttentionKind};
use crate::weights::Loader;

/// `Qwen3MoeForCausalLM`.
pub(super) fn load(loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    let experts = experts(&loader.config().keys)?;
    Decoder::load(loader, |at, i| {
        let config = at.config();
        let kind = AttentionKind { qkv_bias: config.qkv_bias, o_bias: config.o_bias, qk_norm: true };
        DecoderLayer::new(at, Attention::load(&at.at("self_attn"), i, kind)?, mlp(&at.at("mlp"), i, &experts)?)
    })
}
