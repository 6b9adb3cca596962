//! What decoders are made of. Layers know ranks and schemes; models do not.

mod attention;
mod embedding;
mod latent_attention;
mod linear;
mod mlp;
mod moe;
mod norm;

pub(crate) use attention::{Attention, AttentionKind, SelfAttention, SpreadAttention};
pub(crate) use embedding::{Embedding, LmHead};
pub(crate) use latent_attention::LatentAttention;
pub(crate) use linear::Linear;
pub(crate) use mlp::{FeedForward, GatedMlp, SpreadMlp};
pub(crate) use moe::{Experts, SharedExpert, SparseMlp};
pub(crate) use norm::{RmsNorm, Spread};
