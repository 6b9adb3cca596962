//! Guided decoding: what the output of a sequence must match, token by token.
//!
//! A rank knows the bytes of each token, never text: [`TokenBytes`] is the table, [`Grammars`] compiles a grammar against it once for
//! all sequences that use it, and a matcher beside each slot says at every position which tokens may come. The parsing is
//! llguidance's: an Earley parser over a lexer of regular expressions, both lazy.

#[cfg(test)]
mod bench;
mod compile;
mod ends;
mod lark;
mod matcher;
mod place;
#[cfg(test)]
mod tests;
mod tokens;

pub use compile::{Compiled, GrammarError, Grammars, MAX_GRAMMAR_BYTES, WHITESPACE};
pub(crate) use matcher::Matcher;
pub use tokens::TokenBytes;
