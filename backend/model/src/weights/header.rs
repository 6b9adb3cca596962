//! The header of a `.safetensors` file, read and checked before a byte of its tensors is.
//!
//! Layout: 8 bytes little-endian length, that many bytes of JSON, then the tensors' bytes, which must follow one another without
//! holes. Format: <https://github.com/huggingface/safetensors#format>.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::{ModelError, Result, ShardProblem};

/// Bytes before the header: its length.
const LENGTH_BYTES: u64 = 8;

/// The format's own bound on a header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// What a stored tensor's elements are; what of these can be loaded is for the schemes to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoredDtype {
    F64,
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
}

impl StoredDtype {
    const ALL: [StoredDtype; 15] = [
        StoredDtype::F64,
        StoredDtype::F32,
        StoredDtype::F16,
        StoredDtype::BF16,
        StoredDtype::F8E4M3,
        StoredDtype::F8E5M2,
        StoredDtype::I64,
        StoredDtype::I32,
        StoredDtype::I16,
        StoredDtype::I8,
        StoredDtype::U64,
        StoredDtype::U32,
        StoredDtype::U16,
        StoredDtype::U8,
        StoredDtype::Bool,
    ];

    /// The name in headers.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            StoredDtype::F64 => "F64",
            StoredDtype::F32 => "F32",
            StoredDtype::F16 => "F16",
            StoredDtype::BF16 => "BF16",
            StoredDtype::F8E4M3 => "F8_E4M3",
            StoredDtype::F8E5M2 => "F8_E5M2",
            StoredDtype::I64 => "I64",
            StoredDtype::I32 => "I32",
            StoredDtype::I16 => "I16",
            StoredDtype::I8 => "I8",
            StoredDtype::U64 => "U64",
            StoredDtype::U32 => "U32",
            StoredDtype::U16 => "U16",
            StoredDtype::U8 => "U8",
            StoredDtype::Bool => "BOOL",
        }
    }

    pub(crate) const fn bytes(self) -> usize {
        match self {
            StoredDtype::F64 | StoredDtype::I64 | StoredDtype::U64 => 8,
            StoredDtype::F32 | StoredDtype::I32 | StoredDtype::U32 => 4,
            StoredDtype::F16 | StoredDtype::BF16 | StoredDtype::I16 | StoredDtype::U16 => 2,
            _ => 1,
        }
    }

    fn named(name: &str) -> Option<Self> {
        StoredDtype::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

/// Where a tensor is in its file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TensorInfo {
    pub(crate) dtype: StoredDtype,
    pub(crate) shape: Vec<usize>,
    /// From the start of the file.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// Reads and checks the header of `file`. `path` is for messages.
///
/// # Errors
/// `Read`, or `Shard` with what is wrong.
pub(crate) fn read_header(file: &File, path: &Path) -> Result<BTreeMap<String, TensorInfo>> {
    let read_error = |source| ModelError::Read { path: path.to_owned(), source };
    let broken = |problem| ModelError::Shard { path: path.to_owned(), problem };
    let size = file.metadata().map_err(read_error)?.len();
    if size == 0 {
        return Err(broken(ShardProblem::Empty));
    }
    if size < LENGTH_BYTES {
        return Err(broken(ShardProblem::HeaderTruncated { size, needed: LENGTH_BYTES }));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact_at(&mut length, 0).map_err(read_error)?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(broken(ShardProblem::HeaderTooLarge { size: header_bytes, max: MAX_HEADER_BYTES }));
    }
    let data_start = LENGTH_BYTES + header_bytes;
    if size < data_start {
        return Err(broken(ShardProblem::HeaderTruncated { size, needed: data_start }));
    }
    let mut header = vec![0; header_bytes as usize];
    file.read_exact_at(&mut header, LENGTH_BYTES).map_err(read_error)?;
    check(&header, data_start, size).map_err(broken)
}

/// The tensors of a header. `size` is the whole file's.
fn check(header: &[u8], data_start: u64, size: u64) -> Result<BTreeMap<String, TensorInfo>, ShardProblem> {
    let malformed = |err: serde_json::Error| ShardProblem::HeaderMalformed { reason: err.to_string() };
    let entries: BTreeMap<String, Value> = serde_json::from_slice(header).map_err(malformed)?;
    let mut tensors = BTreeMap::new();
    for (name, entry) in entries {
        if name == "__metadata__" {
            continue;
        }
        let Entry { dtype, shape, data_offsets: [start, end] } = serde_json::from_value(entry)
            .map_err(|err| ShardProblem::HeaderMalformed { reason: format!("tensor {name}: {err}") })?;
        let Some(dtype) = StoredDtype::named(&dtype) else { return Err(ShardProblem::UnknownDtype { name, dtype }) };
        let needed = shape.iter().try_fold(dtype.bytes() as u64, |bytes, &dim| bytes.checked_mul(dim as u64));
        let needed = needed.unwrap_or(u64::MAX);
        if end.checked_sub(start) != Some(needed) {
            return Err(ShardProblem::WrongSize { name, start, end, shape, needed });
        }
        tensors.insert(name, TensorInfo { dtype, shape, offset: start, bytes: needed });
    }

    let mut in_file_order: Vec<_> = tensors.iter().collect();
    in_file_order.sort_by_key(|(_, info)| (info.offset, info.bytes));
    let mut covered = 0;
    let mut last = "";
    for (name, info) in in_file_order {
        if info.offset < covered {
            let (first, second) = (last.to_owned(), name.clone());
            return Err(ShardProblem::Overlap { first, second, at: info.offset });
        }
        if info.offset > covered {
            return Err(ShardProblem::Hole { start: covered, end: info.offset });
        }
        covered += info.bytes;
        last = name;
    }
    let needed = data_start.saturating_add(covered);
    if needed > size {
        return Err(ShardProblem::DataTruncated { size, needed });
    }
    if needed < size {
        return Err(ShardProblem::DataSurplus { size, needed });
    }
    for info in tensors.values_mut() {
        info.offset += data_start;
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// What is wrong with a file of this header and so many bytes of data.
    fn problem(header: &str, data_bytes: usize) -> String {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(vec![7; data_bytes]);
        problem_of(&file)
    }

    fn problem_of(bytes: &[u8]) -> String {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        match read_header(&file, Path::new("m.safetensors")) {
            Ok(tensors) => format!("{} tensors", tensors.len()),
            Err(err) => err.to_string().replace("m.safetensors: ", ""),
        }
    }

    #[test]
    fn a_whole_file_is_read() {
        let header = r#"{"__metadata__": {"format": "pt"}, "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
            "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "e": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}}"#;
        assert_eq!(problem(header, 16), "3 tensors");
    }

    #[test]
    fn a_broken_file_is_told_from_a_short_one() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"a": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}}}"#)
        };
        let header = one("F32", "[2]", "[0, 8]");
        let end = 8 + header.len() + 8;
        assert_eq!(problem_of(&[]), "the file is empty");
        assert_eq!(problem_of(&[1, 0, 0]), "the file has 3 bytes, its header ends at 8: it is truncated");
        assert_eq!(
            problem_of(&[9, 0, 0, 0, 0, 0, 0, 0]),
            "the file has 8 bytes, its header ends at 17: it is truncated"
        );
        assert_eq!(
            problem_of(&[255; 16]),
            "the header would be 18446744073709551615 bytes, at most 100000000 are read"
        );
        assert_eq!(
            problem(&header, 7),
            format!("the file has {} bytes, its tensors end at {end}: it is truncated", end - 1)
        );
        assert_eq!(
            problem(&header, 9),
            format!("the file has {} bytes, its tensors end at {end}: something follows them", end + 1)
        );
        assert!(problem("{\"a\": ", 0).starts_with("the header is not a table of tensors: EOF"));
        assert!(problem("{\"a\": {\"dtype\": \"F32\"}}", 0).contains("tensor a: missing field `shape`"));
        assert_eq!(problem(&one("F4", "[2]", "[0, 8]"), 8), "tensor a has dtype F4, which is not known");
        assert_eq!(problem(&one("F32", "[3]", "[0, 8]"), 8), "tensor a lies at bytes 0..8, its shape [3] needs 12");
        assert!(problem(&one("F32", "[3]", "[8, 0]"), 8).starts_with("tensor a lies at bytes 8..0"));
        let vast = "[4294967296, 4294967296, 4294967296]";
        assert!(problem(&one("F32", vast, "[0, 8]"), 8).contains("needs 18446744073709551615"));
        assert_eq!(problem(&one("F32", "[1]", "[4, 8]"), 8), "no tensor covers bytes 0..4");
        let overlap = r#"{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}"#;
        assert_eq!(problem(overlap, 12), "tensor b begins at byte 4, inside a");
    }
}
