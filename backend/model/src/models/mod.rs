//! The table of architectures.

mod decoder;
mod deepseek;
#[cfg(test)]
mod families;
mod llama;
mod mistral;
mod mixtral;
mod model;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
#[cfg(test)]
mod reference;

pub(crate) use decoder::DecoderLayer;
pub(crate) use model::tensor_bytes;
pub use model::{Ends, Model, StepSize};

use crate::error::{ModelError, Result};
use crate::weights::Loader;

type Build = fn(&Loader<'_>) -> Result<Box<dyn Model>>;

/// `architectures[0]` of `config.json` to what builds it.
const ARCHITECTURES: &[(&str, Build)] = &[
    ("DeepseekV2ForCausalLM", deepseek::load),
    ("DeepseekV3ForCausalLM", deepseek::load),
    ("LlamaForCausalLM", llama::load),
    ("MistralForCausalLM", mistral::load),
    ("MixtralForCausalLM", mixtral::load),
    ("Qwen2ForCausalLM", llama::load),
    ("Qwen2MoeForCausalLM", qwen2_moe::load),
    ("Qwen3ForCausalLM", qwen3::load),
    ("Qwen3MoeForCausalLM", qwen3_moe::load),
];

/// The decoder layer at `at` as drafters for models of this kind have it, the first of theirs in the KV cache.
pub(crate) fn draft_layer(at: &Loader<'_>) -> Result<DecoderLayer> {
    match at.config().mla {
        Some(_) => deepseek::draft_layer(at),
        None => llama::layer(at, 0),
    }
}

/// What builds `architecture`.
///
/// # Errors
/// `UnknownArchitecture`, naming the table.
pub(crate) fn builder(architecture: &str) -> Result<Build> {
    let found = ARCHITECTURES.iter().find(|(name, _)| *name == architecture).map(|&(_, build)| build);
    found.ok_or_else(|| {
        let supported = ARCHITECTURES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        ModelError::UnknownArchitecture { name: architecture.to_owned(), supported }
    })
}
