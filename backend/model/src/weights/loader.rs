//! A place in a checkpoint, and what is read there.
//!
//! Tensors are streamed in pieces of whole rows through a few reused buffers, so loading needs little more memory than the weights.
//! On the way to a GPU the next piece is read while the one before is sent.

use std::cell::{Cell, OnceCell, RefCell};
use std::sync::{Arc, Mutex};

use drafthorse_kernels::device::{Upload, Uploads};
use drafthorse_kernels::ops::mla::Form;
use drafthorse_kernels::ops::rope::RopeTable;
use drafthorse_kernels::pool::parallel_chunks;
use drafthorse_kernels::{DType, Device, Tensor};
use half::{bf16, f16};

use super::header::StoredDtype;
use super::reader::Checkpoint;
use super::shard::{Place, Shard, Slice};
use crate::config::ModelConfig;
use crate::error::{ModelError, Result, TensorProblem};
use crate::quant::Schemes;

/// A piece of a tensor in memory: large enough for a disk and for all threads to share, small beside any weight.
fn piece_bytes(device: &Device) -> usize {
    match device {
        Device::Cpu => 8 << 20,
        Device::Cuda(_) => 32 << 20,
    }
}

/// Where a model is built that is only looked at: nothing is written there, so it costs nothing.
static NOWHERE: Device = Device::Cpu;

/// What one thread reads at a time.
const READ_BYTES: usize = 1 << 20;

/// How far a load has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    pub read_bytes: u64,
    /// Bytes of the whole checkpoint; a rank of many reads fewer.
    pub total_bytes: u64,
}

/// All that is the same at every place of a checkpoint.
pub(crate) struct LoadContext<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) config: &'a ModelConfig,
    pub(crate) schemes: &'a Schemes,
    pub(crate) device: &'a Device,
    /// Of activations: f32 or bf16.
    pub(crate) dtype: DType,
    pub(crate) place: Place,
    /// Index of the model's first layer in the KV cache; above 0 for drafters.
    pub(crate) first_kv_layer: usize,
    pub(crate) progress: Option<&'a dyn Fn(LoadProgress)>,
    /// How attention over latents is computed.
    pub(crate) mla_form: Form,
    uploads: RefCell<Option<Uploads>>,
    weight_bytes: Cell<usize>,
    /// Made once for all layers: while the checkpoint is looked at, and when it is read.
    rope: [OnceCell<Arc<RopeTable>>; 2],
}

impl<'a> LoadContext<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        config: &'a ModelConfig,
        schemes: &'a Schemes,
        device: &'a Device,
        dtype: DType,
    ) -> Self {
        LoadContext {
            checkpoint,
            config,
            schemes,
            device,
            dtype,
            place: Place::ALONE,
            first_kv_layer: 0,
            progress: None,
            mla_form: Form::default(),
            uploads: RefCell::default(),
            weight_bytes: Cell::new(0),
            rope: Default::default(),
        }
    }

    /// Looks up everything that `build` asks for and reads nothing, then lets it load.
    ///
    /// # Errors
    /// All tensors that are missing or misshapen at once, and whatever `build` returns.
    pub(crate) fn checked<T>(&'a self, build: impl Fn(&Loader<'a>) -> Result<T>) -> Result<T> {
        self.checkpoint.set_checking(true);
        build(&self.root())?;
        self.checkpoint.verdict()?;
        self.checkpoint.set_checking(false);
        // Before much has been read in vain.
        if let Some((free, _)) = self.device.memory_bytes()?
            && self.weight_bytes.get() > free
        {
            return Err(ModelError::TooLarge { wanted: self.weight_bytes.get(), free });
        }
        self.weight_bytes.set(0);
        build(&self.root())
    }

    /// The checkpoint's root.
    pub(crate) fn root(&'a self) -> Loader<'a> {
        Loader { context: self, path: String::new() }
    }

    pub(crate) fn weight_bytes(&self) -> usize {
        self.weight_bytes.get()
    }

    pub(crate) fn count_weight(&self, bytes: usize) {
        self.weight_bytes.set(self.weight_bytes.get() + bytes);
    }
}

/// A place in a checkpoint, like `model.layers.3.mlp`, on one rank.
#[derive(Clone)]
pub struct Loader<'a> {
    context: &'a LoadContext<'a>,
    path: String,
}

/// A tensor of floats that is there and has the right shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    F32,
    F16,
    BF16,
}

/// Some rows of a tensor, as they are stored.
pub struct Rows<'a> {
    /// Index of the first of them within this rank's slice.
    pub first: usize,
    pub num_rows: usize,
    pub cols: usize,
    pub bytes: &'a [u8],
    /// What holds `bytes` as its first.
    pub upload: &'a Upload<'a>,
}

impl<'a> Loader<'a> {
    /// A place below this one; `name` may hold dots.
    pub fn at(&self, name: &str) -> Loader<'a> {
        let dot = if self.path.is_empty() || name.is_empty() { "" } else { "." };
        Loader { context: self.context, path: format!("{}{dot}{name}", self.path) }
    }

    /// Where this is, as tensors are named.
    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn config(&self) -> &'a ModelConfig {
        self.context.config
    }

    /// Where weights go.
    pub fn device(&self) -> &'a Device {
        if self.context.checkpoint.is_checking() { &NOWHERE } else { self.context.device }
    }

    /// What activations are stored in.
    pub fn dtype(&self) -> DType {
        self.context.dtype
    }

    pub fn place(&self) -> Place {
        self.context.place
    }

    /// The cosines and sines that the config asks for.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub(crate) fn rope_table(&self) -> Result<Arc<RopeTable>> {
        let cached = &self.context.rope[usize::from(self.context.checkpoint.is_checking())];
        if let Some(table) = cached.get() {
            return Ok(table.clone());
        }
        let table = Arc::new(RopeTable::new(self.device(), &self.config().rope)?);
        self.context.count_weight(table.size_bytes());
        Ok(cached.get_or_init(|| table).clone())
    }

    /// Whether tensors are only looked at, and nothing is read.
    pub(crate) fn is_checking(&self) -> bool {
        self.context.checkpoint.is_checking()
    }

    pub(crate) fn context(&self) -> &'a LoadContext<'a> {
        self.context
    }

    /// Whether a tensor of this name is here; asking does not make it the model's.
    pub fn contains(&self, tensor: &str) -> bool {
        self.context.checkpoint.contains(self.at(tensor).path())
    }

    /// Makes a tensor the model's, if it is here, though nothing in it is needed.
    pub(crate) fn take_note(&self, tensor: &str) {
        let _ = self.context.checkpoint.find(self.at(tensor).path());
    }

    /// What a tensor is stored in; asking does not make it the model's.
    pub(crate) fn dtype_of(&self, tensor: &str) -> Option<StoredDtype> {
        self.context.checkpoint.dtype_of(self.at(tensor).path())
    }

    /// The dtype of a tensor of floats. Missing, of another shape or of another kind, it is noted, and `None`.
    pub fn floats(&self, tensor: &str, shape: &[usize]) -> Option<Stored> {
        let info = self.stored(tensor, shape)?;
        match info {
            StoredDtype::F32 => Some(Stored::F32),
            StoredDtype::F16 => Some(Stored::F16),
            StoredDtype::BF16 => Some(Stored::BF16),
            other => {
                self.note_dtype(tensor, other, "F32, F16 or BF16");
                None
            }
        }
    }

    /// Looks for a tensor stored as `want` exactly. What is wrong is noted, and the answer false.
    pub(crate) fn expect(&self, tensor: &str, shape: &[usize], want: StoredDtype) -> bool {
        match self.stored(tensor, shape) {
            None => false,
            Some(dtype) if dtype == want => true,
            Some(other) => {
                self.note_dtype(tensor, other, want.name());
                false
            }
        }
    }

    /// Notes that a tensor is stored as `got`, and those that it is multiplied with as one as `others`.
    pub(crate) fn note_mixed(&self, tensor: &str, got: Stored, others: Stored) {
        let problem = TensorProblem::Mixed { name: self.at(tensor).path, got: got.name(), others: others.name() };
        self.context.checkpoint.note(problem);
    }

    fn stored(&self, tensor: &str, shape: &[usize]) -> Option<StoredDtype> {
        let name = self.at(tensor).path;
        if self.context.checkpoint.is_random() {
            return Some(StoredDtype::BF16);
        }
        let Some(info) = self.context.checkpoint.find(&name) else {
            self.context.checkpoint.note(TensorProblem::Missing { name });
            return None;
        };
        if info.shape != shape {
            let (got, want) = (info.shape.clone(), shape.to_vec());
            self.context.checkpoint.note(TensorProblem::Shape { name, got, want });
            return None;
        }
        Some(info.dtype)
    }

    fn note_dtype(&self, tensor: &str, got: StoredDtype, want: &'static str) {
        let problem = TensorProblem::Dtype { name: self.at(tensor).path, got: got.name(), want };
        self.context.checkpoint.note(problem);
    }

    /// Streams `slice` of a tensor `[rows, row_bytes / element]` to `each`, some rows at a time and in order.
    ///
    /// `cols` counts elements of `element_bytes` bytes in a whole row; the tensor must have been found before. Reads nothing
    /// while the checkpoint is only being checked.
    ///
    /// # Errors
    /// `Read`, or what `each` returns.
    pub(crate) fn stream(
        &self,
        tensor: &str,
        cols: usize,
        element_bytes: usize,
        slice: &Slice,
        each: &mut dyn FnMut(Rows<'_>) -> Result<()>,
    ) -> Result<()> {
        let checkpoint = self.context.checkpoint;
        if checkpoint.is_checking() || slice.rows.is_empty() || slice.cols.is_empty() {
            return Ok(());
        }
        let name = self.at(tensor).path;
        let row_bytes = cols * element_bytes;
        let wanted = slice.cols.start * element_bytes..slice.cols.end * element_bytes;
        let rows_a_piece = (piece_bytes(self.device()) / row_bytes).clamp(1, slice.rows.len());
        let mut uploads = self.context.uploads.take().unwrap_or_else(|| Uploads::new(self.device()));

        for start in slice.rows.clone().step_by(rows_a_piece) {
            let num_rows = rows_a_piece.min(slice.rows.end - start);
            let mut upload = uploads.piece(num_rows * row_bytes)?;
            let piece = upload.bytes_mut();
            read_parallel(checkpoint, &name, (start * row_bytes) as u64, piece)?;
            if wanted.len() < row_bytes {
                for row in 0..num_rows {
                    let from = row * row_bytes;
                    piece.copy_within(from + wanted.start..from + wanted.end, row * wanted.len());
                }
            }
            let (first, cols) = (start - slice.rows.start, slice.cols.len());
            each(Rows { first, num_rows, cols, bytes: &upload.bytes()[..num_rows * wanted.len()], upload: &upload })?;
            if let Some(progress) = self.context.progress {
                progress(checkpoint.progress());
            }
        }
        self.context.uploads.replace(Some(uploads));
        Ok(())
    }

    /// This rank's part of a vector of floats, as f32 on the device: a norm's weight, a bias.
    ///
    /// # Errors
    /// `Read`, `NotMultiple`, out of memory. A vector that is not there is noted, and zeros.
    pub fn vector(&self, tensor: &str, len: usize, shard: Shard) -> Result<Tensor> {
        let Slice { rows, .. } = shard.slice(self.at(tensor).path(), len, 1, 1, self.place())?;
        let mut values = vec![0.0; rows.len()];
        if let Some(stored) = self.floats(tensor, &[len]) {
            let slice = Slice { rows: rows.clone(), cols: 0..1 };
            self.stream(tensor, 1, stored.bytes(), &slice, &mut |piece| {
                stored.to_f32(piece.bytes, &mut values[piece.first..][..piece.num_rows]);
                Ok(())
            })?;
        }
        self.context.count_weight(values.len() * size_of::<f32>());
        Ok(Tensor::from_slice(self.device(), "vector", &values, [values.len()])?)
    }
}

/// Fills `piece` from the tensor's byte `start` on, on all threads of the pool.
fn read_parallel(checkpoint: &Checkpoint, name: &str, start: u64, piece: &mut [u8]) -> Result<()> {
    let failed: Mutex<Option<ModelError>> = Mutex::new(None);
    parallel_chunks(piece, READ_BYTES, &|i, chunk| {
        if let Err(err) = checkpoint.read(name, start + (i * READ_BYTES) as u64, chunk)
            && let Ok(mut failed) = failed.lock()
        {
            *failed = Some(err);
        }
    });
    match failed.into_inner() {
        Ok(Some(err)) => Err(err),
        _ => Ok(()),
    }
}

impl Stored {
    /// As headers have it.
    pub const fn name(self) -> &'static str {
        match self {
            Stored::F32 => StoredDtype::F32.name(),
            Stored::F16 => StoredDtype::F16.name(),
            Stored::BF16 => StoredDtype::BF16.name(),
        }
    }

    pub const fn bytes(self) -> usize {
        match self {
            Stored::F32 => 4,
            Stored::F16 | Stored::BF16 => 2,
        }
    }

    /// Every stored value, exactly.
    pub fn to_f32(self, bytes: &[u8], values: &mut [f32]) {
        match self {
            Stored::F32 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
            Stored::F16 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f16::from_le_bytes(*bytes).to_f32();
                }
            }
            Stored::BF16 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
                }
            }
        }
    }

    /// Every stored value, rounded to nearest, ties to even.
    pub fn to_bf16(self, bytes: &[u8], values: &mut [bf16]) {
        match self {
            Stored::F32 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = bf16::from_f32(f32::from_le_bytes(*bytes));
                }
            }
            Stored::F16 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = bf16::from_f32(f16::from_le_bytes(*bytes).to_f32());
                }
            }
            Stored::BF16 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = bf16::from_le_bytes(*bytes);
                }
            }
        }
    }
}
