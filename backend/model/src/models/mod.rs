//! The table of architectures.

mod llama;
mod model;
#[cfg(test)]
mod reference;

pub(crate) use llama::DecoderLayer;
use llama::Llama;
pub(crate) use model::tensor_bytes;
pub use model::{Ends, Model, StepSize};

use crate::error::{ModelError, Result};
use crate::weights::Loader;

type Build = fn(&Loader<'_>) -> Result<Box<dyn Model>>;

/// `architectures[0]` of `config.json` to what builds it.
const ARCHITECTURES: [(&str, Build); 2] = [("LlamaForCausalLM", Llama::load), ("Qwen2ForCausalLM", Llama::load)];

/// What builds `architecture`.
///
/// # Errors
/// `UnknownArchitecture`, naming the table.
pub(crate) fn builder(architecture: &str) -> Result<Build> {
    let found = ARCHITECTURES.iter().find(|(name, _)| *name == architecture).map(|&(_, build)| build);
    found.ok_or_else(|| {
        let supported = ARCHITECTURES.map(|(name, _)| name).join(", ");
        ModelError::UnknownArchitecture { name: architecture.to_owned(), supported }
    })
}
