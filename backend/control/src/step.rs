//! What the engine tells every rank to run next, and what rank 0 answers.
//!
//! A step is a value: replaying the same steps from the same weights gives the same tokens on every rank.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{AdapterId, BlockId, FinishReason, Grammar, SamplingParams, Slot, TokenId};

/// One forward pass over a batch of sequences.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Counts up from 1; ranks refuse a step out of order.
    pub id: u64,
    /// Slots to empty before anything else.
    pub release: Vec<Slot>,
    /// Blocks to copy, (from, to), before the step runs: copy-on-write for sequences that share a prompt.
    pub copies: Vec<(BlockId, BlockId)>,
    /// Sequences that take a slot.
    pub admit: Vec<Admit>,
    /// One per sequence that runs, in batch order.
    pub rows: Vec<Row>,
}

/// A sequence that enters a slot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Admit {
    pub slot: Slot,
    /// The prompt, and after a preemption what had been generated. Also the part whose KV is cached: proposers look back into it.
    pub tokens: Vec<TokenId>,
    /// Where the output begins in `tokens`: penalties, `min_tokens` and the random counter need it.
    pub num_prompt: u32,
    /// Leading tokens whose KV is in `blocks` already.
    pub num_cached: u32,
    /// The block table to begin with: the blocks of the cached tokens.
    pub blocks: Vec<BlockId>,
    /// How its tokens are picked; the seed in it makes every rank pick the same.
    pub sampling: SamplingParams,
    pub grammar: Option<Grammar>,
    /// The slot whose sequence this one continues: they share the prompt's blocks.
    pub fork_of: Option<Slot>,
    pub adapter: Option<AdapterId>,
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub slot: Slot,
    /// Tokens to run: a chunk of what is known, or 1 + `num_drafts` when decoding.
    pub num_tokens: u32,
    /// How many of them are drafts to verify, at most: the rank has them from the step before.
    pub num_drafts: u32,
    /// KV blocks appended to the slot's block table.
    pub new_blocks: Vec<BlockId>,
    pub wants: Wants,
}

/// What a row's result must carry besides tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wants {
    pub logprobs: Logprobs,
    /// The same for every prompt token of the chunk after the first of the prompt.
    pub prompt_logprobs: Logprobs,
}

/// How many log-probabilities a token comes with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Logprobs {
    #[default]
    None,
    /// The token's own, and those of this many likeliest tokens.
    Top(u32),
}

/// What came of a [`Step`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    pub id: u64,
    /// One per row, in the same order.
    pub rows: Vec<RowResult>,
    /// Hash of all accepted tokens and drafts: ranks that differ have drifted apart.
    pub checksum: u64,
    pub timing: Timing,
}

/// Where a step's time went on rank 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    pub forward: Duration,
    pub sample: Duration,
    pub propose: Duration,
    /// How long a GPU was busy with it, if that is measured.
    pub device: Duration,
}

/// What came of a [`Row`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RowResult {
    /// Verified tokens: none while the prompt is unfinished or when the sequence had ended, else 1..=`num_drafts` + 1.
    pub accepted: Vec<TokenId>,
    /// Drafts that the rank now holds for the next step.
    pub num_drafts: u32,
    /// Set by the step in which the sequence ends; its later rows are inert and their results empty.
    pub ended: Option<FinishReason>,
    /// One per accepted token, if the row wanted them.
    pub logprobs: Vec<TokenLogprobs>,
    /// One per prompt token of the chunk that has a token before it, if the row wanted them.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// The row failed alone: its sequence has ended, the group lives.
    pub error: Option<RowError>,
}

/// The log-probabilities at one position.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// The token that stands there.
    pub token: RankedToken,
    /// The likeliest tokens, the likeliest first.
    pub top: Vec<RankedToken>,
}

/// A token, its log-probability, and its place among all tokens; the likeliest has rank 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankedToken {
    pub token: TokenId,
    pub logprob: f32,
    pub rank: u32,
}

/// Why one row failed while the others lived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum RowError {
    #[error("the model's logits are not finite at position {position}")]
    NotFinite { position: u32 },
    #[error("no token is left to pick at position {position}: the grammar or the allowed tokens leave none")]
    GrammarDeadEnd { position: u32 },
    /// A grammar that is too costly to go on with, or that the rank cannot take.
    #[error("the grammar failed at position {position}: {reason}")]
    Grammar { position: u32, reason: String },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decode_step_is_a_few_bytes_a_row() {
        let row =
            |slot| Row { slot: Slot(slot), num_tokens: 1, num_drafts: 0, new_blocks: vec![], wants: Wants::default() };
        let step = Step { id: 70_000, rows: (0..64).map(row).collect(), ..Step::default() };
        let bytes = postcard::to_stdvec(&step).unwrap();
        assert!(bytes.len() <= 16 + 64 * 6, "{} bytes", bytes.len());
        assert_eq!(postcard::from_bytes::<Step>(&bytes).unwrap(), step);
    }
}
