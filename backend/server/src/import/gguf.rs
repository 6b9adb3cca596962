//! Reads GGUF: a head of keys and tensor places, then the tensors' bytes.
//!
//! Every length, count, offset and alignment comes from the file, so each is held against the file's size before it is
//! used: no number in a broken file makes this allocate more than a few times the file's own size.
//! Source: the GGUF specification, versions 2 and 3 (little-endian).

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::dequant::TensorType;
use super::error::{ImportError, Result};

/// Where a file does not say its alignment.
const DEFAULT_ALIGNMENT: u64 = 32;
/// More than any vocabulary has.
const MAX_ARRAY_LEN: u64 = 1 << 24;
/// GGML's own limit.
const MAX_DIMS: u32 = 4;
/// The least that one tensor's place takes in the head: name length, rank, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;
/// The least that one key takes: name length, value type, one byte of value.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;

/// A value of the head.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Ints(Vec<i64>),
    Floats(Vec<f64>),
    Texts(Vec<String>),
}

/// Where a tensor stands, and as what.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    pub name: String,
    /// Outermost first, as in Hugging Face checkpoints: `[out, in]`.
    pub shape: Vec<u64>,
    pub kind: TensorType,
    /// From the start of the file.
    pub offset: u64,
    pub num_bytes: u64,
}

impl TensorInfo {
    /// Elements of the innermost dimension: a row holds whole blocks.
    pub fn row_len(&self) -> u64 {
        self.shape.last().copied().unwrap_or(1)
    }

    pub fn row_bytes(&self) -> u64 {
        self.row_len() / self.kind.block_len() as u64 * self.kind.block_bytes() as u64
    }

    pub fn num_rows(&self) -> u64 {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }
}

/// The head of a file.
#[derive(Debug, Default)]
pub struct Head {
    keys: HashMap<String, Value>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

/// An open file.
#[derive(Debug)]
pub struct Gguf {
    pub head: Head,
    path: PathBuf,
    file: File,
}

impl Gguf {
    /// Reads the head, and checks that all tensors lie inside the file.
    pub fn open(path: &Path) -> Result<Self> {
        let read_error = |source| ImportError::Read { path: path.into(), source };
        let file = File::open(path).map_err(read_error)?;
        let len = file.metadata().map_err(read_error)?.len();
        let head = Head::read(BufReader::new(&file), len, path)?;
        Ok(Gguf { head, path: path.into(), file })
    }

    /// Fills `bytes` from `start` bytes into `tensor`; the caller stays inside it.
    pub fn read(&mut self, tensor: &TensorInfo, start: u64, bytes: &mut [u8]) -> Result<()> {
        debug_assert!(start + bytes.len() as u64 <= tensor.num_bytes);
        self.file
            .seek(SeekFrom::Start(tensor.offset + start))
            .and_then(|_| self.file.read_exact(bytes))
            .map_err(|source| ImportError::Read { path: self.path.clone(), source })
    }
}

impl Head {
    /// Reads a head from the start of a file of `len` bytes; `path` is for errors.
    pub fn read(input: impl Read, len: u64, path: &Path) -> Result<Self> {
        let mut reader = Reader { input, at: 0, len, path };
        let magic = reader.bytes(4.min(len), "the magic number")?;
        if magic != b"GGUF" {
            return Err(ImportError::NotGguf { magic });
        }
        let version = reader.u32("the version")?;
        if !(2..=3).contains(&version) {
            let got = if version.swap_bytes() <= 3 { "big-endian".into() } else { version.to_string() };
            return Err(reader.malformed(4, "the version", got, "2 or 3, little-endian"));
        }
        let num_tensors = reader.count("the number of tensors", MIN_TENSOR_BYTES)?;
        let num_keys = reader.count("the number of keys", MIN_KEY_BYTES)?;

        let mut head = Head::default();
        for _ in 0..num_keys {
            let at = reader.at;
            let key = reader.text("a key")?;
            let value = reader.value(&key)?;
            if head.keys.insert(key.clone(), value).is_some() {
                return Err(reader.malformed(at, "a key", format!("{key} again"), "given once"));
            }
        }
        for _ in 0..num_tensors {
            let at = reader.at;
            let tensor = reader.tensor()?;
            if head.by_name.insert(tensor.name.clone(), head.tensors.len()).is_some() {
                return Err(reader.malformed(at, "a tensor's name", format!("{} again", tensor.name), "given once"));
            }
            head.tensors.push(tensor);
        }

        let alignment = match head.keys.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(&Value::Int(n)) if n > 0 && (n as u64).is_power_of_two() && n <= 1 << 20 => n as u64,
            Some(other) => {
                return Err(ImportError::Key {
                    key: "general.alignment".into(),
                    got: describe(other),
                    must: "a power of two up to 1048576".into(),
                });
            }
        };
        let data_start = reader.at.next_multiple_of(alignment);
        for tensor in &mut head.tensors {
            place(tensor, data_start, alignment, len)?;
        }
        Ok(head)
    }

    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// Keys that start with `prefix`.
    pub fn keys_under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        self.keys.keys().map(String::as_str).filter(move |key| key.starts_with(prefix))
    }

    /// A key that may be absent, as `pick` takes it; `must` says what it takes.
    fn find<'a, T>(&'a self, key: &str, must: &str, pick: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.keys.get(key) {
            None => Ok(None),
            Some(value) => pick(value).map(Some).ok_or_else(|| ImportError::Key {
                key: key.into(),
                got: describe(value),
                must: must.into(),
            }),
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.find(key, "a text", |value| if let Value::Text(text) = value { Some(text.as_str()) } else { None })
    }

    /// A count or an id.
    pub fn uint(&self, key: &str) -> Result<Option<u32>> {
        self.find(key, "an integer from 0 to 4294967295", |value| match *value {
            Value::Int(n) => u32::try_from(n).ok(),
            _ => None,
        })
    }

    /// A number, as the shortest decimal that names it: 1e-5 stored in 32 bits comes back as 1e-5.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.find(key, "a finite number", |value| match *value {
            Value::Int(n) => Some(n as f64),
            Value::Float(x) if x.is_finite() => Some(x),
            _ => None,
        })
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.find(key, "true or false", |value| if let Value::Bool(b) = *value { Some(b) } else { None })
    }

    pub fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        self.find(key, "a list of texts", |value| if let Value::Texts(v) = value { Some(v.as_slice()) } else { None })
    }

    pub fn ints(&self, key: &str) -> Result<Option<&[i64]>> {
        self.find(key, "a list of integers", |value| if let Value::Ints(v) = value { Some(v.as_slice()) } else { None })
    }
}

/// Takes what a key must have.
pub fn required<T>(key: &str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| ImportError::MissingKey { key: key.into() })
}

/// A value in an error message: its kind, and itself if short.
fn describe(value: &Value) -> String {
    match value {
        Value::Int(n) => n.to_string(),
        Value::Float(x) => x.to_string(),
        Value::Bool(b) => b.to_string(),
        Value::Text(text) if text.len() <= 40 => format!("{text:?}"),
        Value::Text(text) => format!("a text of {} bytes", text.len()),
        Value::Ints(list) => format!("a list of {} integers", list.len()),
        Value::Floats(list) => format!("a list of {} numbers", list.len()),
        Value::Texts(list) => format!("a list of {} texts", list.len()),
    }
}

/// Turns an offset within the data into one within the file, and checks that the tensor ends inside it.
fn place(tensor: &mut TensorInfo, data_start: u64, alignment: u64, len: u64) -> Result<()> {
    let what = || format!("tensor {}", tensor.name);
    if !tensor.offset.is_multiple_of(alignment) {
        return Err(ImportError::Malformed {
            what: format!("the offset of {}", what()),
            offset: data_start,
            got: tensor.offset.to_string(),
            must: format!("a multiple of {alignment}"),
        });
    }
    let offset = data_start.saturating_add(tensor.offset);
    if offset.saturating_add(tensor.num_bytes) > len {
        return Err(ImportError::Truncated { what: what(), offset, needed: tensor.num_bytes, len });
    }
    tensor.offset = offset;
    Ok(())
}

/// The head as it is read: a position, and the size that bounds all that is asked for.
struct Reader<'a, R> {
    input: R,
    at: u64,
    len: u64,
    path: &'a Path,
}

impl<R: Read> Reader<'_, R> {
    fn malformed(&self, offset: u64, what: &str, got: impl Into<String>, must: impl Into<String>) -> ImportError {
        ImportError::Malformed { what: what.into(), offset, got: got.into(), must: must.into() }
    }

    fn need(&self, needed: u64, what: &str) -> Result<()> {
        if needed > self.len - self.at {
            return Err(ImportError::Truncated { what: what.into(), offset: self.at, needed, len: self.len });
        }
        Ok(())
    }

    fn bytes(&mut self, num_bytes: u64, what: &str) -> Result<Vec<u8>> {
        self.need(num_bytes, what)?;
        let mut bytes = vec![0; num_bytes as usize];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        self.need(N as u64, what)?;
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        let read_error = |source| ImportError::Read { path: self.path.into(), source };
        self.input.read_exact(bytes).map_err(read_error)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A number of things of at least `min_bytes` each, all of which must still fit into the file.
    fn count(&mut self, what: &str, min_bytes: u64) -> Result<u64> {
        let at = self.at;
        let count = self.u64(what)?;
        let most = (self.len - self.at) / min_bytes;
        if count > most {
            return Err(self.malformed(at, what, count.to_string(), format!("at most {most} in a file of this size")));
        }
        Ok(count)
    }

    fn text(&mut self, what: &str) -> Result<String> {
        let num_bytes = self.u64(what)?;
        let at = self.at;
        let bytes = self.bytes(num_bytes, what)?;
        String::from_utf8(bytes).map_err(|_| self.malformed(at, what, "not UTF-8", "UTF-8"))
    }

    fn value(&mut self, key: &str) -> Result<Value> {
        let what = format!("the value of {key}");
        let at = self.at;
        match self.u32(&what)? {
            8 => Ok(Value::Text(self.text(&what)?)),
            9 => self.list(&what),
            kind => self.scalar(kind, at, &what),
        }
    }

    fn scalar(&mut self, kind: u32, at: u64, what: &str) -> Result<Value> {
        Ok(match kind {
            0 => Value::Int(u8::from_le_bytes(self.array(what)?).into()),
            1 => Value::Int(i8::from_le_bytes(self.array(what)?).into()),
            2 => Value::Int(u16::from_le_bytes(self.array(what)?).into()),
            3 => Value::Int(i16::from_le_bytes(self.array(what)?).into()),
            4 => Value::Int(u32::from_le_bytes(self.array(what)?).into()),
            5 => Value::Int(i32::from_le_bytes(self.array(what)?).into()),
            6 => Value::Float(shortest(f32::from_le_bytes(self.array(what)?))),
            7 => Value::Bool(self.array::<1>(what)?[0] != 0),
            10 => {
                let number = self.u64(what)?;
                Value::Int(
                    i64::try_from(number).map_err(|_| self.malformed(at, what, number.to_string(), "below 2^63"))?,
                )
            }
            11 => Value::Int(i64::from_le_bytes(self.array(what)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            _ => return Err(self.malformed(at, what, format!("of unknown type {kind}"), "of type 0 to 12")),
        })
    }

    fn list(&mut self, what: &str) -> Result<Value> {
        let at = self.at;
        let kind = self.u32(what)?;
        let min_bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            _ => return Err(self.malformed(at, what, format!("a list of type {kind}"), "a list of numbers or texts")),
        };
        let count_at = self.at;
        let count = self.count(what, min_bytes)?;
        if count > MAX_ARRAY_LEN {
            let got = format!("a list of {count}");
            return Err(self.malformed(count_at, what, got, format!("at most {MAX_ARRAY_LEN} long")));
        }
        // Lists grow as they are read: the count alone never allocates.
        if kind == 8 {
            let mut texts = Vec::new();
            for _ in 0..count {
                texts.push(self.text(what)?);
            }
            return Ok(Value::Texts(texts));
        }
        let (mut ints, mut floats) = (Vec::new(), Vec::new());
        for _ in 0..count {
            match self.scalar(kind, at, what)? {
                Value::Float(x) => floats.push(x),
                Value::Bool(b) => ints.push(i64::from(b)),
                Value::Int(n) => ints.push(n),
                _ => unreachable!("the types of numbers were checked"),
            }
        }
        Ok(if matches!(kind, 6 | 12) { Value::Floats(floats) } else { Value::Ints(ints) })
    }

    /// One tensor's place, its offset still counted from the start of the data.
    fn tensor(&mut self) -> Result<TensorInfo> {
        let name = self.text("a tensor's name")?;
        let what = format!("tensor {name}");
        let at = self.at;
        let num_dims = self.u32(&what)?;
        if !(1..=MAX_DIMS).contains(&num_dims) {
            return Err(self.malformed(at, &what, format!("of {num_dims} dimensions"), "of 1 to 4"));
        }
        let mut shape = Vec::new();
        for _ in 0..num_dims {
            shape.push(self.u64(&what)?);
        }
        // The file has the innermost dimension first.
        shape.reverse();
        let kind_at = self.at;
        let id = self.u32(&what)?;
        let Some(kind) = TensorType::from_id(id) else {
            return Err(self.malformed(kind_at, &what, format!("of type {id}"), TensorType::names()));
        };
        let offset = self.u64(&what)?;

        let row_len = shape[shape.len() - 1];
        let num_elements = shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
        let num_bytes = num_elements
            .filter(|&n| n > 0 && row_len.is_multiple_of(kind.block_len() as u64))
            .and_then(|n| (n / kind.block_len() as u64).checked_mul(kind.block_bytes() as u64));
        let Some(num_bytes) = num_bytes else {
            let must = format!("not empty, with rows of whole blocks of {}", kind.block_len());
            return Err(self.malformed(at, &what, format!("{} of shape {shape:?}", kind.name()), must));
        };
        Ok(TensorInfo { name, shape, kind, offset, num_bytes })
    }
}

/// The `f64` with the shortest decimal that rounds to `x`.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}
