//! Checkpoints: files, the tensors in them, and which part of a tensor a rank reads.

mod header;
mod loader;
mod reader;
mod shard;

pub(crate) use header::StoredDtype;
pub(crate) use loader::LoadContext;
pub use loader::{LoadProgress, Loader, Rows, Stored};
pub use reader::Checkpoint;
pub use shard::{Place, Shard, Slice};
