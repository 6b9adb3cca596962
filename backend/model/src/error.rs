//! What can go wrong with a checkpoint or a model: each variant says what was found and what would do.

use std::fmt;
use std::path::PathBuf;

use drafthorse_kernels::KernelError;

/// Most problems of one kind that a message spells out; the rest are counted.
const MAX_NAMED: usize = 8;

/// A model that cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },

    #[error("{} has no model.safetensors and no model.safetensors.index.json", dir.display())]
    NoWeights { dir: PathBuf },

    /// `key` is where in it, after a comma, or nothing.
    #[error("{}{key} is not valid JSON for its purpose", path.display())]
    Json {
        path: PathBuf,
        key: String,
        #[source]
        source: serde_json::Error,
    },

    #[error("{}: {problem}", path.display())]
    Shard { path: PathBuf, problem: ShardProblem },

    /// Everything that the model wants and the checkpoint has not, in one message.
    #[error("{}: {}", dir.display(), Listed(problems))]
    Tensors { dir: PathBuf, problems: Vec<TensorProblem> },

    /// Bytes.
    #[error("the weights want {wanted} bytes, {free} of the GPU's memory are free; quant_type makes them smaller")]
    TooLarge { wanted: usize, free: usize },

    #[error("config.json has no {key}")]
    MissingKey { key: &'static str },

    #[error("config.json: {key} is {value}, supported: {supported}")]
    Unsupported { key: String, value: String, supported: String },

    /// A drafter reads the base's hidden states and proposes its tokens.
    #[error("draft {}: {key} is {got}, the base has {want}: it is a draft for another model", dir.display())]
    OtherBase { dir: PathBuf, key: &'static str, got: usize, want: usize },

    #[error("{} has no tensor {sign}: it is not {kind}", dir.display())]
    NoDraft { dir: PathBuf, kind: &'static str, sign: &'static str },

    /// A kind of drafter belongs to one `speculate_method`.
    #[error("draft {}: it is {kind}, which speculate_method {for_method} is for, not {method}", dir.display())]
    OtherDraft { dir: PathBuf, kind: &'static str, for_method: &'static str, method: String },

    /// `index` is the draft token.
    #[error("{name}[{index}] stands for token {token}, expected 0 to below {vocab_size}")]
    DraftToken { name: String, index: usize, token: i64, vocab_size: usize },

    #[error("{setting} is {value}, supported: {supported}")]
    Setting { setting: &'static str, value: String, supported: &'static str },

    #[error("architecture {name} is unknown, supported: {supported}")]
    UnknownArchitecture { name: String, supported: String },

    #[error("quantization {name} is unknown, supported: {supported}")]
    UnknownQuantization { name: String, supported: String },

    #[error("the checkpoint is quantized as {stored}, it cannot be quantized again as {wanted}")]
    AlreadyQuantized { stored: String, wanted: String },

    /// A dimension that cannot be cut into equal parts: over ranks, or into quantization groups.
    #[error("{name}: {what} is {size}, not a multiple of {of} ({why})")]
    NotMultiple { name: String, what: &'static str, size: usize, of: usize, why: &'static str },

    #[error("batch: {what} is {got}, at most {max}")]
    BatchTooLarge { what: &'static str, got: usize, max: usize },

    #[error("batch: {what} is {got}, expected {want}")]
    BatchMismatch { what: &'static str, got: usize, want: usize },

    #[error("{what} is {got}, below {limit} is possible")]
    OutOfRange { what: &'static str, got: usize, limit: usize },

    #[error("KV layer {layer} keeps {got}, the model reads {want} of it")]
    KvKind { layer: usize, got: &'static str, want: &'static str },

    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// This crate's result.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

/// Why a `.safetensors` file cannot be what it says it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardProblem {
    #[error("the file is empty")]
    Empty,
    #[error("the file has {size} bytes, its header ends at {needed}: it is truncated")]
    HeaderTruncated { size: u64, needed: u64 },
    #[error("the header would be {size} bytes, at most {max} are read")]
    HeaderTooLarge { size: u64, max: u64 },
    #[error("the header is not a table of tensors: {reason}")]
    HeaderMalformed { reason: String },
    #[error("the file has {size} bytes, its tensors end at {needed}: it is truncated")]
    DataTruncated { size: u64, needed: u64 },
    #[error("the file has {size} bytes, its tensors end at {needed}: something follows them")]
    DataSurplus { size: u64, needed: u64 },
    #[error("tensor {name} has dtype {dtype}, which is not known")]
    UnknownDtype { name: String, dtype: String },
    #[error("tensor {name} lies at bytes {start}..{end}, its shape {shape:?} needs {needed}")]
    WrongSize { name: String, start: u64, end: u64, shape: Vec<usize>, needed: u64 },
    #[error("tensor {second} begins at byte {at}, inside {first}")]
    Overlap { first: String, second: String, at: u64 },
    #[error("no tensor covers bytes {start}..{end}")]
    Hole { start: u64, end: u64 },
    #[error("tensor {name} is said to be here by the index, it is not")]
    NotInShard { name: String },
    #[error("the index puts tensor {name} into {file}, which is not inside the checkpoint's folder")]
    Outside { name: String, file: String },
}

/// A tensor that is not as the model needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorProblem {
    Missing {
        name: String,
    },
    Shape {
        name: String,
        got: Vec<usize>,
        want: Vec<usize>,
    },
    Dtype {
        name: String,
        got: &'static str,
        want: &'static str,
    },
    /// Tensors that are multiplied as one must be stored as one.
    Mixed {
        name: String,
        got: &'static str,
        others: &'static str,
    },
}

impl fmt::Display for TensorProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TensorProblem::Missing { name } => write!(f, "{name} is missing"),
            TensorProblem::Shape { name, got, want } => write!(f, "{name} has shape {got:?}, expected {want:?}"),
            TensorProblem::Dtype { name, got, want } => write!(f, "{name} has dtype {got}, expected {want}"),
            TensorProblem::Mixed { name, got, others } => {
                write!(f, "{name} has dtype {got}, those it is multiplied with as one have {others}")
            }
        }
    }
}

/// Problems separated by `; `, the first few of them.
struct Listed<'a>(&'a [TensorProblem]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().take(MAX_NAMED).enumerate() {
            write!(f, "{}{problem}", if i == 0 { "" } else { "; " })?;
        }
        match self.0.len().saturating_sub(MAX_NAMED) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}
