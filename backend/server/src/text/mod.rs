//! Text to tokens and tokens to text. Nothing below the server knows text.

pub mod chat;
pub mod detokenizer;
mod jinja;
pub mod stop;
pub mod tokenizer;
mod vocabulary;

pub use chat::ChatTemplate;
pub use detokenizer::Detokenizer;
pub use stop::{StopMatch, StopStrings};
pub use tokenizer::Tokenizer;
