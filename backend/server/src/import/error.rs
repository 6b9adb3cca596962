//! Why a file was not imported.

use std::io;
use std::path::PathBuf;

/// An import that did not happen; nothing is left behind under the final names.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },

    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },

    /// `magic` is what stands where `GGUF` should.
    #[error("not a GGUF file: it begins with {}, not with \"GGUF\"", magic.escape_ascii())]
    NotGguf { magic: Vec<u8> },

    /// The bytes promised by the file's head are not there, as after a download that broke off.
    #[error("the file is cut off: {what} needs {needed} bytes at byte {offset}, and the file ends at byte {len}")]
    Truncated { what: String, offset: u64, needed: u64, len: u64 },

    #[error("{what} at byte {offset} is {got}, must be {must}")]
    Malformed { what: String, offset: u64, got: String, must: String },

    #[error("the file has no key {key}")]
    MissingKey { key: String },

    #[error("key {key} is {got}, must be {must}")]
    Key { key: String, got: String, must: String },

    #[error("the file has no tensor {name}")]
    MissingTensor { name: String },

    #[error("tensor {name} has no place in a {architecture} model")]
    SurplusTensor { name: String, architecture: &'static str },

    #[error("tensor {name} has shape {got:?}, expected {want:?}")]
    TensorShape { name: String, got: Vec<u64>, want: Vec<u64> },

    #[error("no tensor is Q4_0, Q4_1 or Q8_0: leave out --keep-quant, or import another file")]
    NothingToKeep,

    /// The tokens and merges do not make a tokenizer; `reason` is the tokenizer library's.
    #[error("the file's tokenizer does not work: {reason}")]
    Tokenizer { reason: String },

    #[error("{} exists: import into an empty folder, or replace it with --force", path.display())]
    Exists { path: PathBuf },

    /// A sharded checkpoint cannot be replaced by one file: its index would still name the shards.
    #[error("{} belongs to another checkpoint: remove it, or import into an empty folder", path.display())]
    OtherCheckpoint { path: PathBuf },
}

/// This module's result.
pub type Result<T, E = ImportError> = std::result::Result<T, E>;
