//! What decoders are made of. Layers know ranks and schemes; models do not.

mod attention;
mod embedding;
mod linear;
mod mlp;
mod norm;

pub(crate) use attention::Attention;
pub(crate) use embedding::{Embedding, LmHead};
pub(crate) use linear::Linear;
pub(crate) use mlp::GatedMlp;
pub(crate) use norm::{RmsNorm, Spread};
