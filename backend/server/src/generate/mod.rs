//! The one path from a text request to the engine and back, used by every door.
//!
//! ```text
//! GenerateRequest -> tokens -> engine::Request == engine thread ==> Event -> text, stop strings -> Chunk
//! ```
//!
//! Dropping a [`Generation`] cancels it. All requests are counted here, so that no door forgets to.

mod choices;
mod defaults;
mod guided;
pub mod logprobs;
mod model;
mod prepare;
mod request;
#[cfg(test)]
pub(crate) mod scripted;
mod stream;

pub use choices::{Answer, Choices};
pub use defaults::GenerationDefaults;
pub use model::{ModelText, ServedModel};
pub use request::{Chunk, Dialect, Finish, GenerateRequest, Prompt, StopCause, Whole};
pub use stream::Generation;
