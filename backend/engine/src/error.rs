//! What the engine refuses, and what can end a request or the engine.

use std::time::Duration;

use drafthorse_control::{LinkError, RowError, TokenId};

use crate::config::ConfigError;

/// Why a request was refused or failed, or why the engine stopped.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// `max` is the most prompt tokens that leave room for one token of output.
    #[error("prompt has {tokens} tokens, the model takes at most {max}")]
    PromptTooLong { tokens: usize, max: usize },
    #[error("max_tokens is 0, must be at least 1")]
    NoOutput,
    #[error("prompt has {prompt} tokens and max_tokens is {max_tokens}, the model takes at most {max} together")]
    TooManyTokens { prompt: usize, max_tokens: usize, max: usize },
    #[error("prompt and max_tokens are {tokens} tokens together, the KV cache holds {max}")]
    CacheTooSmall { tokens: usize, max: usize },
    #[error("prompt token {token} is outside the vocabulary of {vocab_size}")]
    UnknownToken { token: TokenId, vocab_size: u32 },
    #[error("request {id} is running already")]
    DuplicateId { id: u64 },
    #[error("{waiting} requests are waiting, at most {max} may")]
    Overloaded { waiting: usize, max: usize },
    #[error("the engine takes no new requests, it is shutting down")]
    Draining,
    #[error("the request was cancelled")]
    Cancelled,
    #[error("the request waited {waited:?} in the queue, its limit is {limit:?}")]
    QueueTimeout { waited: Duration, limit: Duration },
    #[error("the request's deadline has passed")]
    DeadlineExceeded,
    /// One sequence failed, the others go on.
    #[error(transparent)]
    Row(#[from] RowError),
    /// A rank answered a row with a number of tokens that it cannot have; its sequence fails.
    #[error("a row of at most {max} tokens came back with {got}")]
    BadRow { got: usize, max: usize },

    #[error("the engine has stopped: {reason}")]
    Stopped { reason: String },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("no ranks to run on")]
    NoRanks,
    #[error("the KV cache has {num_blocks} blocks of {block_size} tokens, needs at least one")]
    NoCache { num_blocks: u32, block_size: u32 },
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("rank {rank} and rank 0 have drifted apart in step {step}")]
    RanksDiffer { rank: usize, step: u64 },
    #[error("step {step} came back with {got} rows, expected {want}")]
    BadResult { step: u64, got: usize, want: usize },
    /// A broken invariant of the scheduler; stopping is better than hanging.
    #[error("nothing can run: {running} sequences running, {waiting} waiting, {free} blocks free")]
    Stuck { running: usize, waiting: usize, free: usize },
    #[error("cannot start the engine thread")]
    Thread(#[source] std::io::Error),
}

/// This crate's result.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;
