//! Writes `model.safetensors`, a few rows at a time: memory stays small whatever the model's size.

use std::collections::{BTreeSet, HashMap};
use std::io::Write;

use half::bf16;
use serde_json::{Map, Value as Json, json};

use super::blocks::{self, Part};
use super::dequant::{TensorType, dequantize};
use super::error::Result;
use super::gguf::Gguf;
use super::layout::{Move, deinterleave};

/// Bytes of the source read at a time, about: whole heads or rows are taken.
const CHUNK_BYTES: u64 = 1 << 20;

/// One tensor of the checkpoint.
struct Output<'a> {
    source: &'a Move<'a>,
    /// None for bf16 values, else what is kept of the blocks.
    part: Option<Part>,
}

impl Output<'_> {
    fn name(&self) -> String {
        let field = match self.part {
            None => self.source.field,
            Some(Part::Codes) => "qweight",
            Some(Part::Scales) => "scales",
            Some(Part::Mins) => "mins",
        };
        format!("{}.{field}", self.source.module)
    }

    fn dtype(&self) -> &'static str {
        match (self.part, self.source.from.kind) {
            (None, _) => "BF16",
            (Some(Part::Codes), TensorType::Q8_0) => "I8",
            (Some(Part::Codes), _) => "U8",
            (Some(_), _) => "F16",
        }
    }

    fn shape(&self) -> Vec<u64> {
        let mut shape = self.source.from.shape.clone();
        if let (Some(part), Some(columns)) = (self.part, shape.last_mut()) {
            // All kept parts but 16-bit ones have one byte an element.
            let bytes = *columns / 32 * blocks::part_bytes(self.source.from.kind, part) as u64;
            *columns = if part == Part::Codes { bytes } else { bytes / 2 };
        }
        shape
    }

    fn num_bytes(&self) -> u64 {
        let element_bytes = if matches!(self.part, Some(Part::Codes)) { 1 } else { 2 };
        self.shape().iter().product::<u64>() * element_bytes
    }
}

/// All tensors to write.
pub struct Checkpoint<'a> {
    outputs: Vec<Output<'a>>,
    head_dim: usize,
}

impl<'a> Checkpoint<'a> {
    /// Plans the file. With `keep`, matrices whose blocks can be kept are not turned into bf16.
    pub fn new(moves: &'a [Move<'a>], head_dim: u64, keep: bool) -> Self {
        let kept = if keep { kept_modules(moves) } else { BTreeSet::new() };
        let parts = |source: &'a Move<'a>| {
            let parts: Vec<_> = match kept.contains(source.module.as_str()) && source.field == "weight" {
                true => blocks::parts(source.from.kind).iter().map(|&part| Some(part)).collect(),
                false => vec![None],
            };
            parts.into_iter().map(move |part| Output { source, part })
        };
        let mut outputs: Vec<_> = moves.iter().flat_map(parts).collect();
        // Two-byte elements first, so that all of them are aligned.
        outputs.sort_by_key(|output| output.part == Some(Part::Codes));
        Checkpoint { outputs, head_dim: head_dim as usize }
    }

    /// Whether any blocks are kept.
    pub fn keeps_blocks(&self) -> bool {
        self.outputs.iter().any(|output| output.part.is_some())
    }

    /// Matrices in bf16 beside others that keep their blocks.
    pub fn converted_modules(&self) -> Vec<String> {
        let is_converted = |output: &&Output<'_>| output.part.is_none() && output.source.from.shape.len() == 2;
        self.outputs.iter().filter(is_converted).map(|output| output.source.module.clone()).collect()
    }

    /// Bytes that [`write`](Self::write) reports through `progress`, all in all.
    pub fn num_bytes(&self) -> u64 {
        self.outputs.iter().map(Output::num_bytes).sum()
    }

    /// The head of the file: its length in eight bytes, JSON, spaces up to a multiple of eight.
    fn head(&self) -> Vec<u8> {
        let mut entries = Map::new();
        entries.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut at = 0;
        for output in &self.outputs {
            let end = at + output.num_bytes();
            let place = json!({"dtype": output.dtype(), "shape": output.shape(), "data_offsets": [at, end]});
            entries.insert(output.name(), place);
            at = end;
        }
        let mut json = Json::Object(entries).to_string().into_bytes();
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut head = (json.len() as u64).to_le_bytes().to_vec();
        head.append(&mut json);
        head
    }

    /// Writes the whole file; `failed` names the file in an error.
    pub fn write(
        &self,
        gguf: &mut Gguf,
        out: &mut impl Write,
        failed: impl Fn(std::io::Error) -> super::error::ImportError,
        mut progress: impl FnMut(u64),
    ) -> Result<()> {
        out.write_all(&self.head()).map_err(&failed)?;
        let (mut stored, mut values, mut converted) = (Vec::new(), Vec::new(), Vec::new());
        for output in &self.outputs {
            let (source, tensor) = (output.source, output.source.from);
            // A vector is one row; a bias of q or k in rotary order has rows of one element.
            let (num_rows, row_bytes) = match tensor.shape.len() {
                1 if source.interleaved => (tensor.row_len(), tensor.num_bytes / tensor.row_len()),
                _ => (tensor.num_rows(), tensor.row_bytes()),
            };
            let unit = if source.interleaved { self.head_dim as u64 } else { 1 };
            let chunk_rows = (CHUNK_BYTES / row_bytes).max(1).next_multiple_of(unit);
            for first in (0..num_rows).step_by(chunk_rows as usize) {
                let rows = chunk_rows.min(num_rows - first);
                stored.resize((rows * row_bytes) as usize, 0);
                gguf.read(tensor, first * row_bytes, &mut stored)?;
                if source.interleaved {
                    deinterleave(&mut stored, self.head_dim, row_bytes as usize);
                }
                converted.clear();
                match output.part {
                    Some(part) => blocks::extract(tensor.kind, part, &stored, &mut converted),
                    None => {
                        let num_blocks = stored.len() / tensor.kind.block_bytes();
                        values.resize(num_blocks * tensor.kind.block_len(), 0.0);
                        dequantize(tensor.kind, &stored, &mut values);
                        converted.extend(values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()));
                    }
                }
                out.write_all(&converted).map_err(&failed)?;
                progress(converted.len() as u64);
            }
        }
        Ok(())
    }
}

/// Modules whose blocks stay: those of a kind that can be kept, and that all modules multiplied together with them share.
fn kept_modules<'a>(moves: &'a [Move<'a>]) -> BTreeSet<&'a str> {
    let weights = || moves.iter().filter(|source| source.field == "weight" && source.from.shape.len() == 2);
    let mut kinds: HashMap<&str, Vec<TensorType>> = HashMap::new();
    for source in weights() {
        kinds.entry(&source.group).or_default().push(source.from.kind);
    }
    let alike = |source: &&Move<'_>| {
        source.group.is_empty() || kinds[source.group.as_str()].iter().all(|&kind| kind == source.from.kind)
    };
    let keepable = |source: &&Move<'_>| !blocks::parts(source.from.kind).is_empty();
    weights().filter(keepable).filter(alike).map(|source| source.module.as_str()).collect()
}
