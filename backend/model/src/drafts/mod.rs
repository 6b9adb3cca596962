//! Drafters: small models that guess what the target says next. They take the target's hidden states in, and lie in further layers of
//! its KV cache.

mod eagle;
mod eagle3;
mod head_layer;
mod kind;
mod load;
mod mtp;
mod names;
#[cfg(test)]
mod tests;

pub use kind::Base;
pub use load::{Draft, load_draft};
