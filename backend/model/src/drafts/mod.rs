//! Drafters: small models that guess what the target says next. They take the target's hidden states in, and lie in further layers of
//! its KV cache.

mod load;
mod mtp;
mod naming;
#[cfg(test)]
mod tests;

pub use load::{Base, Draft, load_draft};
