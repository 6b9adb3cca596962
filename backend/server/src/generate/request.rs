//! What a door asks, and what it gets.

use std::sync::Arc;
use std::time::Duration;

use drafthorse_control::{FinishReason, TokenId, TokenLogprobs};
use drafthorse_engine::{RequestTiming, Usage};

use crate::params::GenerateParams;

/// What is to be continued.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Plain text: gets the special tokens that the checkpoint puts around text.
    Text(Arc<str>),
    /// A rendered chat template, which has its special tokens already.
    Rendered(Arc<str>),
    Tokens(Vec<TokenId>),
}

impl Prompt {
    pub fn text(text: impl Into<Arc<str>>) -> Self {
        Prompt::Text(text.into())
    }
}

/// Whose defaults hold where a request is silent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// Triton's vLLM backend: 16 tokens, temperature 1.
    #[default]
    Tensors,
    /// OpenAI's completions: 16 tokens, sampling as the checkpoint's `generation_config.json`.
    Completions,
    /// OpenAI's chat: to the end of the context, sampling as the checkpoint's `generation_config.json`.
    Chat,
}

/// One prompt and how to continue it.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    pub prompt: Prompt,
    pub params: GenerateParams,
    pub dialect: Dialect,
    /// How long it may wait for its first step; without it the model's setting holds.
    pub queue_timeout: Option<Duration>,
    /// How long it may take altogether.
    pub timeout: Option<Duration>,
}

impl GenerateRequest {
    pub fn new(prompt: Prompt, params: GenerateParams, dialect: Dialect) -> Self {
        GenerateRequest { prompt, params, dialect, queue_timeout: None, timeout: None }
    }
}

/// The next piece of an answer. All chunks' texts joined are the text, and so are their tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// Whole characters, and no part of a stop string.
    pub text: String,
    /// Tokens all of whose text has been handed out with this chunk.
    pub token_ids: Vec<TokenId>,
    /// One per token, if wanted.
    pub logprobs: Vec<TokenLogprobs>,
    /// Those of the prompt after its first token, if wanted.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Set on the last chunk alone.
    pub finish: Option<Finish>,
}

impl Chunk {
    /// Takes over what comes after it.
    pub(super) fn append(&mut self, next: Chunk) {
        self.text.push_str(&next.text);
        self.token_ids.extend(next.token_ids);
        self.logprobs.extend(next.logprobs);
        self.prompt_logprobs.extend(next.prompt_logprobs);
        self.finish = next.finish;
    }

    /// All chunks in one; `None` if the last was not among them.
    pub(super) fn into_whole(self) -> Option<Whole> {
        let Chunk { text, token_ids, logprobs, prompt_logprobs, finish } = self;
        Some(Whole { text, token_ids, logprobs, prompt_logprobs, finish: finish? })
    }
}

/// How an answer ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    pub reason: FinishReason,
    /// What stopped it, if not one of the model's own end tokens.
    pub cause: Option<StopCause>,
    /// Output tokens as far as the text goes.
    pub usage: Usage,
    pub timing: RequestTiming,
}

/// What of the request stopped it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    Text(String),
    Token(TokenId),
}

/// An answer from its first chunk to its last.
#[derive(Clone, Debug, PartialEq)]
pub struct Whole {
    pub text: String,
    pub token_ids: Vec<TokenId>,
    pub logprobs: Vec<TokenLogprobs>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    pub finish: Finish,
}

impl Whole {
    /// The log-probability of all its tokens together, as far as they have one.
    pub fn cumulative_logprob(&self) -> f64 {
        self.logprobs.iter().map(|entry| f64::from(entry.token.logprob)).sum()
    }
}

impl From<Whole> for Chunk {
    fn from(whole: Whole) -> Self {
        let Whole { text, token_ids, logprobs, prompt_logprobs, finish } = whole;
        Chunk { text, token_ids, logprobs, prompt_logprobs, finish: Some(finish) }
    }
}
