//! The tensors of a checkpoint by name, over one or several files.
//!
//! Files are read at positions, not mapped: no unsafe here, and a file that shrinks under us is an error instead of a signal.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::Deserialize;

use super::header::{StoredDtype, TensorInfo, read_header};
use super::loader::LoadProgress;
use crate::error::{ModelError, Result, ShardProblem, TensorProblem};

const ONE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Most surplus tensors that a warning spells out.
const MAX_NAMED: usize = 8;

/// A checkpoint whose headers have been read and found whole.
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Shard>,
    /// Name to shard and place in it.
    tensors: BTreeMap<String, (usize, TensorInfo)>,
    total_bytes: u64,
    read_bytes: AtomicU64,
    /// While set, tensors are looked at and none is read.
    checking: AtomicBool,
    /// Every tensor is there, of any shape, in bf16, and made up.
    random: bool,
    seen: Mutex<Seen>,
    /// Tensors that are in no file: made from others.
    made: BTreeMap<String, Vec<u8>>,
}

struct Shard {
    path: PathBuf,
    file: File,
}

/// What a model asked for.
#[derive(Default)]
struct Seen {
    names: BTreeSet<String>,
    problems: Vec<TensorProblem>,
    /// The problems as text, so that each is listed once.
    noted: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the files that `model.safetensors.index.json` lists, and checks their headers.
    ///
    /// # Errors
    /// `NoWeights`, `Read`, `Json`, and `Shard` naming the file that is not whole.
    pub fn open(dir: &Path) -> Result<Self> {
        let index = dir.join(INDEX);
        let mut checkpoint = Checkpoint::empty(dir, false);
        if index.is_file() {
            checkpoint.add_indexed(&index)?;
        } else if dir.join(ONE_FILE).is_file() {
            checkpoint.add(dir.join(ONE_FILE), |_| true)?;
        } else {
            return Err(ModelError::NoWeights { dir: dir.to_owned() });
        }
        Ok(checkpoint)
    }

    /// A checkpoint of made-up weights: any tensor is there, bf16, of whatever shape is asked for. Vectors named like norms are ones.
    pub(crate) fn random() -> Self {
        Checkpoint::empty(Path::new(""), true)
    }

    fn empty(dir: &Path, random: bool) -> Self {
        Checkpoint {
            dir: dir.to_owned(),
            shards: Vec::new(),
            tensors: BTreeMap::new(),
            total_bytes: 0,
            read_bytes: AtomicU64::new(0),
            checking: AtomicBool::new(false),
            random,
            seen: Mutex::default(),
            made: BTreeMap::new(),
        }
    }

    /// All tensors, in the order of their names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(crate) fn shape_of(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|(_, info)| info.shape.as_slice())
    }

    /// All bytes of a tensor; it is then known to be used.
    ///
    /// # Errors
    /// `Read`, or `Tensors` if it is missing.
    pub(crate) fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let len = self.find(name).map_or(0, |info| info.bytes);
        let mut bytes = vec![0; len as usize];
        self.read(name, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Adds a tensor that is in no file, in bf16 if that holds every value, else in f32.
    pub(crate) fn put_floats(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let fits = values.iter().all(|value| value.to_bits() & 0xFFFF == 0);
        let bytes: Vec<u8> = match fits {
            true => values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect(),
            false => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        };
        self.put(name, if fits { StoredDtype::BF16 } else { StoredDtype::F32 }, shape.to_vec(), bytes);
    }

    /// Makes a matrix its own transpose.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes).
    pub(crate) fn transpose(&mut self, name: &str) -> Result<()> {
        let bytes = self.bytes(name)?;
        let Some((_, info)) = self.tensors.get(name) else { return Ok(()) };
        let &[rows, cols] = info.shape.as_slice() else { return Ok(()) };
        let (dtype, element) = (info.dtype, bytes.len() / (rows * cols).max(1));
        let mut turned = vec![0; bytes.len()];
        for row in 0..rows {
            for col in 0..cols {
                let (from, to) = ((row * cols + col) * element, (col * rows + row) * element);
                turned[to..to + element].copy_from_slice(&bytes[from..from + element]);
            }
        }
        self.put(name, dtype, vec![cols, rows], turned);
        Ok(())
    }

    fn put(&mut self, name: &str, dtype: StoredDtype, shape: Vec<usize>, bytes: Vec<u8>) {
        let info = TensorInfo { dtype, shape, offset: 0, bytes: bytes.len() as u64 };
        self.tensors.insert(name.to_owned(), (usize::MAX, info));
        self.made.insert(name.to_owned(), bytes);
    }

    /// The error of a tensor that is stored as something of no use.
    pub(crate) fn refuse_dtype(&self, name: &str, got: StoredDtype, want: &'static str) -> ModelError {
        let problem = TensorProblem::Dtype { name: name.to_owned(), got: got.name(), want };
        ModelError::Tensors { dir: self.dir.clone(), problems: vec![problem] }
    }

    pub(super) fn is_random(&self) -> bool {
        self.random
    }

    fn add_indexed(&mut self, index: &Path) -> Result<()> {
        let read_error = |source| ModelError::Read { path: index.to_owned(), source };
        let text = std::fs::read_to_string(index).map_err(read_error)?;
        let json_error = |source| ModelError::Json { path: index.to_owned(), key: String::new(), source };
        let Index { weight_map } = serde_json::from_str(&text).map_err(json_error)?;
        let is_inside = |file: &str| {
            let mut parts = Path::new(file).components().peekable();
            parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
        };
        if let Some((name, file)) = weight_map.iter().find(|(_, file)| !is_inside(file)) {
            let problem = ShardProblem::Outside { name: name.clone(), file: file.clone() };
            return Err(ModelError::Shard { path: index.to_owned(), problem });
        }
        let files: BTreeSet<&String> = weight_map.values().collect();
        for file in files {
            self.add(self.dir.join(file), |name| weight_map.get(name) == Some(file))?;
        }
        for (name, file) in weight_map {
            if !self.tensors.contains_key(&name) {
                let path = self.dir.join(file);
                return Err(ModelError::Shard { path, problem: ShardProblem::NotInShard { name } });
            }
        }
        Ok(())
    }

    fn add(&mut self, path: PathBuf, listed: impl Fn(&str) -> bool) -> Result<()> {
        let file = File::open(&path).map_err(|source| ModelError::Read { path: path.clone(), source })?;
        let shard = self.shards.len();
        for (name, info) in read_header(&file, &path)? {
            if !listed(&name) {
                continue;
            }
            self.total_bytes += info.bytes;
            self.tensors.insert(name, (shard, info));
        }
        self.shards.push(Shard { path, file });
        Ok(())
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    pub(super) fn progress(&self) -> LoadProgress {
        LoadProgress { read_bytes: self.read_bytes.load(Ordering::Relaxed), total_bytes: self.total_bytes }
    }

    /// Whether a tensor of this name is there, without asking for it.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// What a tensor is stored in, without asking for it.
    pub(crate) fn dtype_of(&self, name: &str) -> Option<StoredDtype> {
        self.tensors.get(name).map(|(_, info)| info.dtype)
    }

    /// Looks up a tensor and remembers that the model has it.
    pub(super) fn find(&self, name: &str) -> Option<&TensorInfo> {
        let found = self.tensors.get(name).map(|(_, info)| info);
        if found.is_some() {
            self.seen().names.insert(name.to_owned());
        }
        found
    }

    /// Remembers that tensors are someone else's: those whose names are `theirs`.
    pub(crate) fn set_aside(&self, theirs: impl Fn(&str) -> bool) {
        self.seen().names.extend(self.tensors.keys().filter(|name| theirs(name)).cloned());
    }

    /// Notes that a tensor is not as it should be.
    pub(crate) fn note(&self, problem: TensorProblem) {
        let mut seen = self.seen();
        if seen.noted.insert(problem.to_string()) {
            seen.problems.push(problem);
        }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        // Nothing panics while the lock is held.
        self.seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// While `checking`, tensors are looked up and none is read.
    pub(crate) fn set_checking(&self, checking: bool) {
        self.checking.store(checking, Ordering::Relaxed);
    }

    pub(super) fn is_checking(&self) -> bool {
        self.checking.load(Ordering::Relaxed)
    }

    /// Every problem noted so far as one error; surplus tensors are only warned about.
    ///
    /// # Errors
    /// `Tensors`.
    pub(crate) fn verdict(&self) -> Result<()> {
        let seen = self.seen();
        if !seen.problems.is_empty() {
            return Err(ModelError::Tensors { dir: self.dir.clone(), problems: seen.problems.clone() });
        }
        let surplus: Vec<&str> =
            self.tensors.keys().filter(|name| !seen.names.contains(*name)).map(String::as_str).collect();
        if !surplus.is_empty() {
            let names = surplus[..surplus.len().min(MAX_NAMED)].join(", ");
            tracing::warn!(count = surplus.len(), names, "the checkpoint has tensors that the model does not use");
        }
        Ok(())
    }

    /// Reads `into.len()` bytes of the tensor, from its byte `start`.
    ///
    /// # Errors
    /// `Read`.
    pub(super) fn read(&self, name: &str, start: u64, into: &mut [u8]) -> Result<()> {
        if self.random {
            make_up(name, start, into);
            return Ok(());
        }
        if let Some(bytes) = self.made.get(name) {
            into.copy_from_slice(&bytes[start as usize..start as usize + into.len()]);
            return Ok(());
        }
        let Some((shard, info)) = self.tensors.get(name) else {
            let problems = vec![TensorProblem::Missing { name: name.to_owned() }];
            return Err(ModelError::Tensors { dir: self.dir.clone(), problems });
        };
        debug_assert!(start + into.len() as u64 <= info.bytes, "{name}: read beyond its end");
        let shard = &self.shards[*shard];
        let read = shard.file.read_exact_at(into, info.offset + start);
        read.map_err(|source| ModelError::Read { path: shard.path.clone(), source })?;
        self.read_bytes.fetch_add(into.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// Random bf16, as many negative as positive, between 2^-7 and 2^-3 in size: such that no activation overflows or dies out.
fn make_up(name: &str, start: u64, into: &mut [u8]) {
    let is_norm = name.contains("norm");
    // FNV-1a of the name, then splitmix64.
    let mut state = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    state ^= start.wrapping_mul(0xd6e8_feb8_6659_fd93);
    for eight in into.chunks_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        for (two, bits) in eight.chunks_mut(2).zip([0, 16, 32, 48].map(|shift| (mixed >> shift) as u16)) {
            let exponent = 120 + (bits >> 7 & 3);
            let value = if is_norm { 0x3f80 } else { bits & 0x8000 | exponent << 7 | bits & 0x7f };
            two.copy_from_slice(&value.to_le_bytes()[..two.len()]);
        }
    }
}
