//! How a sequence's tokens are picked, and what ends it.

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// How tokens are picked from the logits of one sequence. Validated by the server; ranks trust it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divides the logits; 0 picks the likeliest token.
    pub temperature: f32,
    /// Keep the `top_k` likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the likeliest tokens until their probabilities add up to `top_p`; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than `min_p` times the likeliest; 0 drops none.
    pub min_p: f32,
    /// Keep the tokens whose surprise is closest to the mean, until their probabilities add up to `typical_p`; 1 keeps all.
    pub typical_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token in the output.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for every time it stands in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// If not empty, the only tokens that may be picked, in ascending order.
    pub allowed_tokens: Vec<TokenId>,
    /// Token sequences that the output must not contain: the last token of each is not picked after the others. None is empty.
    pub bad_words: Vec<Vec<TokenId>>,
    /// Key of the counter-based random numbers; the counter is the position in the sequence.
    pub seed: u64,
    /// Output tokens after which the sequence ends with [`FinishReason::Length`]; at least 1.
    pub max_tokens: u32,
    /// Output tokens before which no stop token can be picked.
    pub min_tokens: u32,
    /// Tokens that end the sequence with [`FinishReason::Stop`], the model's own end tokens among them unless ignored.
    pub stop_tokens: Vec<TokenId>,
    /// Most drafts in a step, if the rank makes more; 0 makes none. They change no token, only how many come at once.
    pub max_drafts: Option<u32>,
}

impl Default for SamplingParams {
    /// Greedy, 16 tokens, nothing stops it.
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_tokens: Vec::new(),
            bad_words: Vec::new(),
            seed: 0,
            max_tokens: 16,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            max_drafts: None,
        }
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// A stop token, a stop string or the end of a grammar.
    Stop,
    /// `max_tokens`, or the end of the context.
    Length,
}

impl FinishReason {
    /// The name clients know.
    pub const fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// What the output must match; the server has parsed and bounded it, each rank compiles its own matcher.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Grammar {
    /// A JSON schema, as JSON text.
    JsonSchema(String),
    Regex(String),
    /// A context-free grammar in Lark syntax.
    Lark(String),
}
