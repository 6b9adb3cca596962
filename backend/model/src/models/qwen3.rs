//! Qwen3: Llama whose query and key heads are each normalised before they are turned.
//!
//! Source: Qwen team 2025, arXiv:2505.09388.

use super::decoder::{Decoder, DecoderLayer};
use super::model::Model;
use crate::error::Result;
use crate::layers::{Attention, AttentionKind, GatedMlp};
use crate::weights::Loader;

/// `Qwen3ForCausalLM`.
pub(super) fn load(loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    Decoder::load(loader, |at, i| {
        let config = at.config();
        let kind = AttentionKind { qkv_bias: config.qkv_bias, o_bias: config.o_bias, qk_norm: true };
        let attention = Attention::load(&at.at("self_attn"), i, kind)?;
        DecoderLayer::new(at, attention, Box::new(GatedMlp::load(&at.at("mlp"), config.intermediate_size)?))
    })
}
