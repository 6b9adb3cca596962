//! Tiny models of every family: `goldens/families/NAME.safetensors` has what went into transformers and what came out.
//!
//! Of the weights only names and shapes are there. Their numbers are made from their names, here and in `goldens/families.py` alike.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::Value;
use tempfile::TempDir;

/// Around what a tensor's numbers lie, and how far to both sides, by a part of its name. The first that fits holds.
const SPREADS: [(&str, f32, f32); 5] =
    [("norm", 1.0, 0.35), ("bias", 0.0, 0.5), ("embed_tokens", 0.0, 1.7), ("fc.weight", 0.0, 0.15), ("", 0.0, 0.35)];

/// One of `goldens/families`.
pub struct Family {
    pub name: String,
    pub config: Value,
    pub tokens: Vec<u32>,
    /// `[tokens, vocab]`: all at once.
    pub logits: Vec<f32>,
    /// `[the last tokens, vocab]`: one by one after the others, with transformers' cache.
    pub decode: Vec<f32>,
    /// `[rows, vocab]`: a batch of sequences cut out of the tokens one after the other, of these lengths.
    pub ragged: Vec<f32>,
    pub ragged_lens: Vec<usize>,
    /// Its tensors.
    pub shapes: BTreeMap<String, Vec<usize>>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/families")
}

/// Names of all cases.
///
/// # Panics
/// If the goldens are not there.
pub fn cases() -> Vec<String> {
    let files = fs::read_dir(folder()).expect("goldens stand beside the tests");
    let name = |file: fs::DirEntry| Some(file.file_name().to_str()?.strip_suffix(".safetensors")?.to_owned());
    let mut names: Vec<_> = files.filter_map(|file| name(file.ok()?)).collect();
    names.sort_unstable();
    names
}

impl Family {
    /// # Panics
    /// If the golden is not there, or not one of `make.py`.
    pub fn read(name: &str) -> Self {
        let path = folder().join(format!("{name}.safetensors"));
        let bytes = fs::read(&path).unwrap_or_else(|err| panic!("{}: {err}", path.display()));
        let tensors = SafeTensors::deserialize(&bytes).expect("a golden is a safetensors file");
        let (_, head) = SafeTensors::read_metadata(&bytes).expect("its head was just read");
        let metadata = head.metadata().as_ref().expect("a golden says what it is");
        let words = |name: &str| -> Vec<[u8; 4]> {
            tensors.tensor(name).expect("a golden has tokens and logits").data().as_chunks().0.to_vec()
        };
        let floats = |name| words(name).into_iter().map(f32::from_le_bytes).collect();
        Family {
            name: name.into(),
            config: serde_json::from_str(&metadata["config"]).expect("a golden's config is JSON"),
            tokens: words("tokens").into_iter().map(u32::from_le_bytes).collect(),
            logits: floats("logits"),
            decode: floats("decode"),
            ragged: floats("ragged"),
            ragged_lens: serde_json::from_str(&metadata["ragged"]).expect("lengths are JSON"),
            shapes: serde_json::from_str(&metadata["tensors"]).expect("shapes are JSON"),
        }
    }

    pub fn vocab(&self) -> usize {
        self.logits.len() / self.tokens.len()
    }

    /// Its checkpoint in a new folder, in f32.
    pub fn checkpoint(&self) -> TempDir {
        self.changed(|_| (), |_, _| ())
    }

    /// Its checkpoint with another config, and other numbers in some tensors: `tensor` gets each one's name and numbers.
    ///
    /// # Panics
    /// If the folder cannot be written.
    pub fn changed(&self, config: impl FnOnce(&mut Value), tensor: impl Fn(&str, &mut [f32])) -> TempDir {
        let mut changed = self.config.clone();
        config(&mut changed);
        let tensors = self.shapes.iter().map(|(name, shape)| {
            let mut values = values(name, shape.iter().product());
            tensor(name, &mut values);
            (name.clone(), shape.clone(), values)
        });
        write(&changed, tensors)
    }
}

/// A checkpoint of these tensors in a new folder, in f32.
///
/// # Panics
/// If the folder cannot be written.
pub fn write(config: &Value, tensors: impl Iterator<Item = (String, Vec<usize>, Vec<f32>)>) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    write_into(folder.path(), config, tensors);
    folder
}

/// [`write`] into a folder that is there.
///
/// # Panics
/// If it cannot be written.
pub fn write_into(folder: &Path, config: &Value, tensors: impl Iterator<Item = (String, Vec<usize>, Vec<f32>)>) {
    let bytes = |values: Vec<f32>| -> Vec<u8> { values.into_iter().flat_map(f32::to_le_bytes).collect() };
    let tensors: Vec<_> = tensors.map(|(name, shape, values)| (name, shape, bytes(values))).collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
        (name, view.expect("as many numbers as the shape says"))
    });
    serialize_to_file(views, None, &folder.join("model.safetensors")).expect("a checkpoint can be written");
    fs::write(folder.join("config.json"), config.to_string()).expect("a config can be written");
}

/// A tensor's numbers, made from its name: FNV-1a, then splitmix64, of which 24 bits count.
///
/// # Panics
/// Never: some spread fits any name.
pub fn values(name: &str, count: usize) -> Vec<f32> {
    let (_, center, width) = SPREADS.into_iter().find(|(part, ..)| name.contains(part)).expect("the last fits all");
    let state = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let value = |i: usize| {
        let mixed = state.wrapping_add((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let unit = ((mixed ^ (mixed >> 31)) >> 40) as f32 / 8_388_608.0 - 1.0;
        center + width * unit
    };
    (0..count).map(value).collect()
}
