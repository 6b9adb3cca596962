//! Tiny bases with drafters for them that are right often, or always: what random drafters never are.
//!
//! Their numbers are made from their names, as those of [`families`](crate::families).

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::families::{Family, values, write_into};

/// The first token of every prompt of [`copied`]: wherever it stands, no other token sees it.
pub const UNSEEN: u32 = 1;

const HIDDEN: usize = 64;
const HEAD_DIM: usize = 16;

/// Layers of [`deepseek_tensors`]; its module is one more.
pub const DEEPSEEK_LAYERS: usize = 4;

/// Name, shape, numbers.
pub type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

/// A base, and where its drafter is.
#[derive(Debug)]
pub struct Pair {
    pub base: TempDir,
    /// `None`: in the base's own checkpoint.
    draft: Option<TempDir>,
}

impl Pair {
    /// The drafter's folder, if it has one of its own.
    pub fn draft_dir(&self) -> Option<PathBuf> {
        self.draft.as_ref().map(|folder| folder.path().into())
    }
}

fn made(shapes: impl IntoIterator<Item = (String, Vec<usize>)>, change: impl Fn(&str, &mut [f32])) -> Tensors {
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let mut numbers = values(&name, shape.iter().product());
        change(&name, &mut numbers);
        (name, shape, numbers)
    };
    shapes.into_iter().map(tensor).collect()
}

fn folder(config: &Value, tensors: Tensors) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    write_into(folder.path(), config, tensors.into_iter());
    folder
}

/// What a module has besides its layer, if the module is layer `layer`.
fn of_module(layer: usize) -> Vec<(String, Vec<usize>)> {
    let at = |name| format!("model.layers.{layer}.{name}.weight");
    vec![
        (at("enorm"), vec![HIDDEN]),
        (at("hnorm"), vec![HIDDEN]),
        (at("eh_proj"), vec![HIDDEN, 2 * HIDDEN]),
        (at("shared_head.norm"), vec![HIDDEN]),
    ]
}

/// `[I | 0]` with `noise` of random numbers in it: little else than the token's embedding goes into the layer.
fn pass_embedding(numbers: &mut [f32], noise: f32) {
    for (row, numbers) in numbers.chunks_mut(2 * HIDDEN).enumerate() {
        numbers.iter_mut().for_each(|number| *number *= noise);
        numbers[row] += 1.0;
    }
}

/// A base of one Llama layer, and a drafter that is a copy of it, to the last bit.
///
/// An embedding has elements of -1 and 1 alone, and the norms' epsilon vanishes beside their mean square 1: `enorm` with weights of 1
/// gives the embedding as it is. `eh_proj` is `[I | 0]`, so the drafter's layer, its last norm and the head see what the base's see. One
/// thing differs: the drafter has no key of the first token. So nobody may see that one in the base either: one element of every query
/// is 16, and it meets a key that is -64 for [`UNSEEN`] and 0 for all others, in dimensions that hardly turn with the position. The
/// score is 256 below the others, whose distances are some tens, and e to the power of less than -88 is 0 in 32 bits.
pub fn copied() -> Pair {
    let family = Family::read("llama3");
    let mut config = family.config.clone();
    config["num_hidden_layers"] = json!(1);
    config["rope_scaling"] = Value::Null;
    // The last of eight pairs turns by 1e-8 a position.
    config["rope_theta"] = json!(1e9);
    config["rms_norm_eps"] = json!(1e-12);
    let change = |name: &str, numbers: &mut [f32]| {
        // The slow pair of each head; all else of its rows is 0.
        let mut slow = |first: &[f32]| {
            for head in numbers.chunks_mut(HEAD_DIM * HIDDEN) {
                for row in [HEAD_DIM / 2 - 1, HEAD_DIM - 1] {
                    head[row * HIDDEN..][..HIDDEN].fill(0.0);
                }
                head[(HEAD_DIM / 2 - 1) * HIDDEN..][..first.len()].copy_from_slice(first);
            }
        };
        match name.rsplit('.').nth(1) {
            Some("q_proj") => slow(&[16.0]),
            Some("k_proj") => slow(&[-32.0, -32.0]),
            // The first two elements come through it as they are.
            Some("input_layernorm") => numbers[..2].fill(1.0),
            Some("embed_tokens") => {
                for (token, row) in (0..).zip(numbers.chunks_mut(HIDDEN)) {
                    row.iter_mut().for_each(|number| *number = number.signum());
                    row[..2].copy_from_slice(&[1.0, if token == UNSEEN { 1.0 } else { -1.0 }]);
                }
            }
            _ => {}
        }
    };
    let shapes = family.shapes.into_iter().filter(|(name, _)| !name.contains("layers.1."));
    let base = made(shapes, change);
    let mut draft = made(of_module(1), |name, numbers| match name {
        "model.layers.1.enorm.weight" => numbers.fill(1.0),
        "model.layers.1.eh_proj.weight" => pass_embedding(numbers, 0.0),
        _ => {}
    });
    for (name, shape, numbers) in &base {
        let copy = match name.strip_prefix("model.layers.0.") {
            Some(part) => format!("model.layers.1.{part}"),
            None if name == "model.norm.weight" => "model.layers.1.shared_head.norm.weight".into(),
            None => continue,
        };
        draft.retain(|(other, ..)| *other != copy);
        draft.push((copy, shape.clone(), numbers.clone()));
    }
    Pair { draft: Some(folder(&config, draft)), base: folder(&config, base) }
}

/// How much the layers of [`llama`] and [`deepseek`] add to an embedding: little enough for a drafter with other layers to be right
/// now and then.
const DEPTH: f32 = 0.03;
/// And how much of the hidden state before it a drafter takes.
const NOISE: f32 = 0.05;

fn shallow(name: &str, numbers: &mut [f32]) {
    match name.rsplit('.').nth(1) {
        Some("o_proj" | "down_proj") => numbers.iter_mut().for_each(|number| *number *= DEPTH),
        Some("enorm" | "hnorm") => numbers.fill(1.0),
        Some("eh_proj") => pass_embedding(numbers, NOISE),
        _ => {}
    }
}

/// A base of two Llama layers, and a module with a layer of its own that is right now and then.
pub fn llama() -> Pair {
    let Family { config, shapes, .. } = Family::read("llama3");
    let of_layer = shapes.iter().filter_map(|(name, shape)| Some((name.strip_prefix("model.layers.1.")?, shape)));
    let of_layer = of_layer.map(|(part, shape)| (format!("model.layers.2.{part}"), shape.clone()));
    let draft = made(of_layer.chain(of_module(2)), shallow);
    let base = made(shapes.clone(), shallow);
    Pair { draft: Some(folder(&config, draft)), base: folder(&config, base) }
}

/// A DeepSeek-V3 with a module that is right now and then, in its own checkpoint.
pub fn deepseek() -> Pair {
    let (config, tensors) = deepseek_tensors(shallow);
    Pair { base: folder(&config, tensors), draft: None }
}

/// A DeepSeek-V3 of two plain layers and two with experts, and its module: config and tensors, their numbers changed by `change`.
pub fn deepseek_tensors(change: impl Fn(&str, &mut [f32])) -> (Value, Tensors) {
    let Family { mut config, shapes, .. } = Family::read("deepseek_v3");
    config["num_hidden_layers"] = json!(DEEPSEEK_LAYERS);
    config["first_k_dense_replace"] = json!(2);
    config["num_nextn_predict_layers"] = json!(1);
    // The golden's first layer is plain, its last has experts.
    let of_layer = |layer: usize| {
        let like = if layer < 2 { "model.layers.0." } else { "model.layers.2." };
        let of_like = shapes.iter().filter_map(move |(name, shape)| Some((name.strip_prefix(like)?, shape)));
        of_like.map(move |(name, shape)| (format!("model.layers.{layer}.{name}"), shape.clone()))
    };
    let ends = shapes.iter().filter(|(name, _)| !name.contains("layers"));
    let ends = ends.map(|(name, shape)| (name.clone(), shape.clone()));
    let all = ends.chain((0..=DEEPSEEK_LAYERS).flat_map(of_layer)).chain(of_module(DEEPSEEK_LAYERS));
    (config, made(all, change))
}

/// [`deepseek_tensors`] as they are, written into a folder; texts end with `end`.
pub fn write_deepseek(dir: &Path, end: u32) {
    let (mut config, tensors) = deepseek_tensors(|_, _| ());
    config["eos_token_id"] = json!(end);
    write_into(dir, &config, tensors.into_iter());
}
