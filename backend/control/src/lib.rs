//! What the engine tells the ranks, what they answer, and the links that carry both.
//!
//! Everything here is plain data. Text, devices and requests are unknown on this floor.

#![forbid(unsafe_code)]

mod channel;
mod ids;
mod link;
mod message;
mod params;
mod step;

pub use channel::{ChannelLink, RankEnd, channel};
pub use ids::{AdapterId, BlockId, Slot, TokenId};
pub use link::{Link, LinkError};
pub use message::Ready;
pub use params::{FinishReason, Grammar, SamplingParams};
pub use step::{
    Admit, Logprobs, RankedToken, Row, RowError, RowResult, Step, StepResult, Timing, TokenLogprobs, Wants,
};
