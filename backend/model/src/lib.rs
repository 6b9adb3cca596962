//! Checkpoints, quantization schemes, layers, architectures and the paged KV cache.
//!
//! [`load`] turns a folder in Hugging Face layout into a [`Model`]; a [`Forward`] hands it a [`Batch`], the [`KvCache`] and a
//! workspace, and it answers with hidden states and logits. Sequences, sampling and requests are unknown on this floor.

#![forbid(unsafe_code)]

mod batch;
mod config;
pub mod drafts;
mod error;
mod forward;
mod keys;
mod kv_cache;
mod layers;
mod load;
mod models;
pub mod quant;
#[cfg(test)]
mod testing;
pub mod weights;

pub use batch::{Batch, BatchInputs, BatchLimits, LaterSteps, Sequences};
pub use config::{MlaConfig, ModelConfig, StoredQuantization};
pub use drafthorse_kernels::ops::mla::Form as MlaForm;
pub use drafts::{Base, Draft, load_draft};
pub use error::{ModelError, Result, ShardProblem, TensorProblem};
pub use forward::{Forward, Tap};
pub use keys::Keys;
pub use kv_cache::{KvCache, KvLayer, KvLayout};
pub use load::{LoadOptions, Loaded, load};
pub use models::{Ends, Model, StepSize};
pub use quant::{Activation, ActivationFormat, GroupSize, QuantScheme, QuantType, QuantWeight};
pub use weights::{Checkpoint, LoadProgress, Place};
