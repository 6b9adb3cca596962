//! Mistral: Llama without biases, and in its first version with a window that [`ModelConfig`](crate::ModelConfig) refuses to outgrow.
//!
//! Source: Jiang et al. 2023, arXiv:2310.06825.

use super::decoder::{Decoder, DecoderLayer};
use super::model::Model;
use crate::error::Result;
use crate::layers::{Attention, AttentionKind, GatedMlp};
use crate::weights::Loader;

/// `MistralForCausalLM`.
pub(super) fn load(loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    Decoder::load(loader, |at, i| {
        let kind = AttentionKind { qkv_bias: false, o_bias: false, qk_norm: false };
        let attention = Attention::load(&at.at("self_attn"), i, kind)?;
        let mlp = GatedMlp::load(&at.at("mlp"), at.config().intermediate_size)?;
        DecoderLayer::new(at, attention, Box::new(mlp))
    })
}
