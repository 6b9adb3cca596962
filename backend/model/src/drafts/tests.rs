use std::collections::BTreeMap;

use drafthorse_kernels::{DType, Device, Solo, Tensor, Workspace};
use safetensors::tensor::Dtype;
use serde_json::{Map, Value};
use tempfile::TempDir;

use super::{Base, Draft, load_draft};
use crate::testing::{Stored, Tiny, options, random, write_safetensors};
use crate::{Batch, BatchInputs, BatchLimits, Forward, KvCache, KvLayout, LoadOptions, StepSize};

const HIDDEN: usize = 64;
const VOCAB: usize = 90;
const BLOCK_SIZE: usize = 16;

/// A base and an MTP module for it, apart.
struct Pair {
    base: Tiny,
    draft: Tiny,
}

impl Pair {
    fn new() -> Self {
        let base = Tiny::new(Dtype::F32, r#"{"tie_word_embeddings": true}"#);
        let one_layer = Tiny::new(Dtype::F32, r#"{"num_hidden_layers": 1, "tie_word_embeddings": true}"#);
        let mut tensors = BTreeMap::new();
        let mut add = |name: &str, tensor: Stored| tensors.insert(format!("model.layers.2.{name}"), tensor);
        for (name, tensor) in &one_layer.tensors {
            if let Some(name) = name.strip_prefix("model.layers.0.") {
                let shifted: Vec<f32> = tensor.values().iter().map(|v| v * 0.9).collect();
                add(name, Stored::floats(Dtype::F32, &tensor.shape, &shifted));
            }
        }
        let floats = |shape: &[usize], center: f32, width: f32, seed: u64| {
            let values = random(shape.iter().product(), seed);
            let values: Vec<f32> = values.iter().map(|v| center + width * v).collect();
            Stored::floats(Dtype::F32, shape, &values)
        };
        add("enorm.weight", floats(&[HIDDEN], 1.0, 0.5, 100));
        add("hnorm.weight", floats(&[HIDDEN], 1.0, 0.5, 101));
        add("eh_proj.weight", floats(&[HIDDEN, 2 * HIDDEN], 0.0, 0.3, 102));
        add("shared_head.norm.weight", floats(&[HIDDEN], 1.0, 0.5, 103));
        let config = Map::from_iter(one_layer.config);
        Pair { base, draft: Tiny { config, tensors } }
    }

    /// The logits of a sequence, in chunks of the given lengths, with another choice of blocks for each.
    fn logits(&self, chunks: &[usize], quant: &str) -> Vec<f32> {
        let (base, draft) = (self.base.write(), self.draft.write());
        let base = crate::load(base.path(), &options(DType::F32, "none")).unwrap();
        let options = LoadOptions { quant: Some(quant.into()), ..LoadOptions::default() };
        let draft = load_draft(draft.path(), Base { model: &*base.model, config: &base.config }, &options).unwrap();
        let layers = base.model.kv_layers().into_iter().chain(draft.model.kv_layers()).collect();
        run(&draft, layers, chunks)
    }

    fn refusal(&self) -> String {
        let (base, draft) = (self.base.write(), self.draft.write());
        let base = crate::load(base.path(), &LoadOptions::default()).unwrap();
        let said = |dir: &TempDir| {
            let loaded =
                load_draft(dir.path(), Base { model: &*base.model, config: &base.config }, &LoadOptions::default());
            loaded
                .err()
                .map_or("loaded".into(), |err| err.to_string().replace(&dir.path().display().to_string(), "DIR"))
        };
        said(&draft)
    }
}

const TOKENS: [i32; 24] = [3, 14, 15, 9, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71, 69, 39];

fn run(draft: &Draft, layers: Vec<crate::KvLayer>, chunks: &[usize]) -> Vec<f32> {
    let cpu = &Device::Cpu;
    let layout = KvLayout { layers, last_hidden: 0, block_size: BLOCK_SIZE, dtype: DType::F32 };
    let mut kv = KvCache::new(cpu, layout, 4).unwrap();
    let longest = TOKENS.len();
    let limits =
        BatchLimits { max_tokens: longest, max_seqs: 1, max_blocks_per_seq: 4, max_logit_rows: longest, max_later: 0 };
    let mut batch = Batch::new(cpu, limits).unwrap();
    let step = StepSize { tokens: longest, seqs: 1, logit_rows: longest, max_kv_len: 64 };
    // As large as planned: a pass that needs more fails.
    let workspace = Workspace::new(cpu, draft.model.workspace_bytes(step)).unwrap();
    let hidden = random(longest * HIDDEN, 7);
    let mut logits = Vec::new();
    let mut first = 0;
    for &len in chunks {
        let rows: Vec<i32> = (0..len as i32).collect();
        // Position 0 has no pair.
        let positions: Vec<i32> = rows.iter().map(|row| row + first as i32 + 1).collect();
        let kv_len = (first + len + 1) as i32;
        batch
            .set(&BatchInputs {
                token_ids: &TOKENS[first..first + len],
                positions: &positions,
                cu_tokens: &[0, len as i32],
                kv_lens: &[kv_len],
                block_tables: &[&[3, 1]],
                logit_rows: &rows,
            })
            .unwrap();
        let hidden =
            Tensor::from_slice(cpu, "hidden", &hidden[first * HIDDEN..(first + len) * HIDDEN], [len, HIDDEN]).unwrap();
        let (comm, target_hidden) = (Solo::default(), Some(&hidden));
        let mut cx =
            Forward { batch: &batch, kv: &mut kv, workspace: &workspace, comm: &comm, target_hidden, taps: &mut [] };
        let out = draft.model.forward(&mut cx).unwrap();
        let wanted = cx.wanted_rows(&out).unwrap();
        logits.extend(draft.model.logits(&wanted, &mut cx).unwrap().to_vec::<f32>().unwrap());
        first += len;
    }
    logits
}

#[test]
fn chunks_give_the_bits_of_the_whole() {
    let pair = Pair::new();
    let whole = pair.logits(&[24], "none");
    assert!(whole.iter().all(|logit| logit.is_finite()) && whole.len() == 24 * VOCAB);
    for chunks in [[23, 1].as_slice(), &[1; 24], &[7, 9, 1, 7]] {
        assert_eq!(pair.logits(chunks, "none"), whole, "{chunks:?}");
    }
    assert_ne!(pair.logits(&[24], "weight_only_int8"), whole);
}

#[test]
fn paddle_names_and_turned_weights_are_the_same_module() {
    let pair = Pair::new();
    let mut paddle = Pair::new();
    paddle.draft.tensors = pair
        .draft
        .tensors
        .iter()
        .map(|(name, tensor)| {
            let name = name.strip_prefix("model.layers.2.").unwrap();
            let at = match name {
                "shared_head.norm.weight" => "norm.weight".to_owned(),
                "enorm.weight" | "hnorm.weight" | "eh_proj.weight" => name.to_owned(),
                _ => format!("layers.0.{name}"),
            };
            let tensor = match tensor.shape[..] {
                [rows, cols] => {
                    let values = tensor.values();
                    let turned: Vec<f32> = (0..rows * cols).map(|i| values[i % rows * cols + i / rows]).collect();
                    Stored::floats(Dtype::F32, &[cols, rows], &turned)
                }
                _ => tensor.clone(),
            };
            (format!("deepseek_v3_mtp.{at}"), tensor)
        })
        .collect();
    let want = pair.logits(&[24], "none");
    assert_eq!(paddle.logits(&[24], "none"), want);

    // An embedding and a head of its own, which are the base's: the same again.
    let table = pair.base.tensors["model.embed_tokens.weight"].clone();
    let values = table.values();
    let turned: Vec<f32> = (0..VOCAB * HIDDEN).map(|i| values[i % VOCAB * HIDDEN + i / VOCAB]).collect();
    paddle.draft.tensors.insert("deepseek_v3_mtp.embed_tokens.weight".into(), table.clone());
    paddle.draft.tensors.insert("lm_head.weight".into(), Stored::floats(Dtype::F32, &[HIDDEN, VOCAB], &turned));
    assert_eq!(paddle.logits(&[24], "none"), want);
    let mut own = Pair::new();
    own.draft.tensors.insert("model.layers.2.embed_tokens.weight".into(), table.clone());
    own.draft.tensors.insert("model.layers.2.shared_head.head.weight".into(), table.clone());
    assert_eq!(own.logits(&[24], "none"), want);
    let half: Vec<f32> = values.iter().map(|v| v * 0.5).collect();
    own.draft
        .tensors
        .insert("model.layers.2.shared_head.head.weight".into(), Stored::floats(Dtype::F32, &table.shape, &half));
    assert_eq!(own.logits(&[24], "none"), want.iter().map(|logit| logit * 0.5).collect::<Vec<_>>());
}

/// `d2t` of these tokens.
fn differences(tokens: &[i64]) -> Stored {
    let bytes = (0..).zip(tokens).flat_map(|(index, token): (i64, _)| (token - index).to_le_bytes()).collect();
    Stored { dtype: Dtype::I64, shape: vec![tokens.len()], bytes }
}

#[test]
fn a_cut_vocabulary_has_the_rows_of_the_base_s_head() {
    let mut pair = Pair::new();
    let whole = pair.logits(&[24], "none");
    let tokens = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89];
    pair.draft.tensors.insert("d2t".into(), differences(&tokens));
    let want: Vec<f32> = whole.chunks(VOCAB).flat_map(|row| tokens.map(|token| row[token as usize])).collect();
    assert_eq!(pair.logits(&[24], "none"), want);
    pair.draft.tensors.insert("d2t".into(), differences(&[1, 90]));
    assert_eq!(pair.refusal(), "a token of d2t is 90, below 90 is possible");
}

#[test]
fn what_does_not_fit_the_base_is_named() {
    let changed = |key: &str, value: u64| {
        let mut pair = Pair::new();
        pair.draft.config.insert(key.into(), Value::from(value));
        pair.refusal()
    };
    let other = "it is a draft for another model";
    assert_eq!(changed("vocab_size", 91), format!("draft DIR: vocab_size is 91, the base has 90: {other}"));
    assert_eq!(changed("hidden_size", 128), format!("draft DIR: hidden_size is 128, the base has 64: {other}"));
    let mut pair = Pair::new();
    pair.draft.tensors.remove("model.layers.2.enorm.weight");
    pair.draft.tensors.remove("model.layers.2.mlp.up_proj.weight");
    assert_eq!(
        pair.refusal(),
        "DIR: model.layers.2.mlp.up_proj.weight is missing; model.layers.2.enorm.weight is missing"
    );
    pair.draft = pair.base.clone();
    assert_eq!(pair.refusal(), "DIR has no tensor NAME.eh_proj.weight: it is no MTP module");
}

#[test]
fn a_module_may_lie_in_the_base_s_own_folder() {
    let pair = Pair::new();
    let dir = pair.base.write();
    let all = pair.base.tensors.clone().into_iter().chain(pair.draft.tensors.clone()).collect();
    write_safetensors(&dir.path().join("model.safetensors"), &all);
    let base = crate::load(dir.path(), &LoadOptions::default()).unwrap();
    let draft = load_draft(dir.path(), Base { model: &*base.model, config: &base.config }, &LoadOptions::default());
    let layers = base.model.kv_layers().into_iter().chain(draft.as_ref().unwrap().model.kv_layers()).collect();
    // The table is found under the base's name by nobody: it is shared.
    assert_eq!(run(&draft.unwrap(), layers, &[24]), pair.logits(&[24], "none"));
}
