//! What a rank tells the leader when it has loaded its shard.

use serde::{Deserialize, Serialize};

/// A rank is ready for its first step. The leader takes the smallest number of blocks over all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Blocks of KV cache the rank has room for.
    pub num_blocks: u32,
    /// Tokens in a block.
    pub block_size: u32,
    /// Most tokens of one sequence, prompt and output together.
    pub max_model_len: u32,
    pub vocab_size: u32,
    /// Most drafts a row may get; 0 without a proposer.
    pub max_drafts: u32,
    /// KV slots after a row's own that making its next drafts writes: blocks for them are of use.
    pub draft_slots: u32,
    /// True if drafts are made on the host from accepted tokens, so that steps cannot run ahead while there are any.
    pub needs_host_tokens: bool,
    /// Steps that may be in flight.
    pub pipeline_depth: u32,
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    pub workspace_bytes: u64,
}
