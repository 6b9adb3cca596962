use std::collections::BTreeMap;

use drafthorse_kernels::{DType, Device, Solo, Tensor, Workspace};
use half::bf16;
use safetensors::tensor::Dtype;
use serde_json::{Map, Value};
use tempfile::TempDir;

use super::{Base, Draft, load_draft};
use crate::testing::{Stored, Tiny, options, random, relative_error, write_safetensors};
use crate::{Batch, BatchInputs, BatchLimits, Forward, KvCache, KvLayout, LoadOptions, Model, StepSize, Tap};

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
        let draft =
            load_draft(draft.path(), "mtp", Base { model: &*base.model, config: &base.config }, &options).unwrap();
        let layers = base.model.kv_layers().into_iter().chain(draft.model.kv_layers()).collect();
        run(&draft, layers, chunks)
    }

    fn refusal(&self) -> String {
        let (base, draft) = (self.base.write(), self.draft.write());
        let base = crate::load(base.path(), &LoadOptions::default()).unwrap();
        let said = |dir: &TempDir| {
            let loaded = load_draft(
                dir.path(),
                "mtp",
                Base { model: &*base.model, config: &base.config },
                &LoadOptions::default(),
            );
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
    assert_eq!(pair.refusal(), "d2t[1] stands for token 90, expected 0 to below 90");
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
    assert_eq!(pair.refusal(), "DIR has no tensor NAME.eh_proj.weight: it is not an MTP module");
}

#[test]
fn a_module_may_lie_in_the_base_s_own_folder() {
    let pair = Pair::new();
    let dir = pair.base.write();
    let all = pair.base.tensors.clone().into_iter().chain(pair.draft.tensors.clone()).collect();
    write_safetensors(&dir.path().join("model.safetensors"), &all);
    let base = crate::load(dir.path(), &LoadOptions::default()).unwrap();
    let draft =
        load_draft(dir.path(), "mtp", Base { model: &*base.model, config: &base.config }, &LoadOptions::default());
    let layers = base.model.kv_layers().into_iter().chain(draft.as_ref().unwrap().model.kv_layers()).collect();
    // The table is found under the base's name by nobody: it is shared.
    assert_eq!(run(&draft.unwrap(), layers, &[24]), pair.logits(&[24], "none"));
}

const EAGLE_BASE: &str = r#"{"num_hidden_layers": 4, "head_dim": 64, "max_position_embeddings": 64}"#;

/// A head of random numbers; EAGLE-3 if it reads three layers' hidden states.
fn head(base: &Tiny, reads: usize) -> Tiny {
    let changes = r#"{"num_hidden_layers": 1, "head_dim": 64, "tie_word_embeddings": true,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}"#;
    let mut head = Tiny { config: Tiny::new(Dtype::BF16, changes).config, tensors: BTreeMap::new() };
    let at = if reads == 3 { "midlayer" } else { "layers.0" };
    let mut add = |name: String, shape: &[usize], center: f32, width: f32| {
        let seed = 200 + head.tensors.len() as u64;
        let values: Vec<f32> = random(shape.iter().product(), seed).iter().map(|v| center + width * v).collect();
        head.tensors.insert(name, Stored::floats(Dtype::BF16, shape, &values));
    };
    for (name, tensor) in &base.tensors {
        let Some(name) = name.strip_prefix("model.layers.0.") else { continue };
        let is_input = ["q_proj", "k_proj", "v_proj"].iter().any(|part| name.contains(part));
        let (shape, center, width): (Vec<usize>, _, _) = match tensor.shape[..] {
            [outputs, inputs] if is_input && reads == 3 => (vec![outputs, 2 * inputs], 0.0, 0.3),
            [outputs, inputs] => (vec![outputs, inputs], 0.0, 0.4),
            _ => (vec![HIDDEN], 1.0, 0.5),
        };
        add(format!("{at}.{name}"), &shape, center, width);
    }
    if reads == 3 {
        add(format!("{at}.hidden_norm.weight"), &[HIDDEN], 1.0, 0.5);
        add("norm.weight".into(), &[HIDDEN], 1.0, 0.5);
    }
    add("fc.weight".into(), &[HIDDEN, reads.max(2) * HIDDEN], 0.0, 0.2);
    head
}

/// What a head reads of the base, and its logits: after a prompt, and after its own output of the last row.
fn eagle(device: &Device, base: &TempDir, head: &TempDir) -> [Vec<f32>; 3] {
    let options = LoadOptions { device: device.clone(), dtype: DType::BF16, ..LoadOptions::default() };
    let base = crate::load(base.path(), &options).unwrap();
    let draft = load_draft(head.path(), "eagle", Base { model: &*base.model, config: &base.config }, &options).unwrap();
    let layers = base.model.kv_layers().into_iter().chain(draft.model.kv_layers()).collect();
    let layout = KvLayout { layers, last_hidden: 0, block_size: BLOCK_SIZE, dtype: DType::BF16 };
    let mut kv = KvCache::new(device, layout, 4).unwrap();
    let len = TOKENS.len();
    let limits = BatchLimits { max_tokens: len, max_seqs: 1, max_blocks_per_seq: 4, max_logit_rows: len, max_later: 0 };
    let mut batch = Batch::new(device, limits).unwrap();
    let step = StepSize { tokens: len, seqs: 1, logit_rows: len, max_kv_len: 64 };
    let bytes = base.model.workspace_bytes(step).max(draft.model.workspace_bytes(step));
    let workspace = Workspace::new(device, bytes + 2 * len * HIDDEN * 2).unwrap();
    let comm = Solo::default();
    let mut tapped = Tensor::zeros(device, "taps", [len, draft.taps.len() * HIDDEN], DType::BF16).unwrap();
    let mut run =
        |model: &dyn Model, tokens: &[i32], first: usize, given: Option<&Tensor>, tapped: Option<&mut Tensor>| {
            let end = (first + tokens.len()) as i32;
            let positions: Vec<i32> = (first as i32..end).collect();
            batch
                .set(&BatchInputs {
                    token_ids: tokens,
                    positions: &positions,
                    cu_tokens: &[0, tokens.len() as i32],
                    kv_lens: &[end],
                    block_tables: &[&[3, 1]],
                    logit_rows: &[],
                })
                .unwrap();
            let mut taps: Vec<Tap<'_>> = tapped.into_iter().map(|output| Tap { layers: &draft.taps, output }).collect();
            let (batch, kv, workspace) = (&batch, &mut kv, &workspace);
            let mut cx = Forward { batch, kv, workspace, comm: &comm, target_hidden: given, taps: &mut taps };
            let out = model.forward(&mut cx).unwrap();
            let logits = model.logits(&out, &mut cx).unwrap();
            (out, logits.to_vec::<f32>().unwrap())
        };
    let (hidden, _) = run(&*base.model, &TOKENS, 0, None, Some(&mut tapped));
    let features = if draft.taps.is_empty() { &hidden } else { &tapped };
    let values = features.to_vec::<bf16>().unwrap().into_iter().map(bf16::to_f32).collect();
    let (own, logits) = run(&*draft.model, &TOKENS[1..], 1, Some(&features.rows(0..len - 1)), None);
    let (_, after) = run(&*draft.model, &[7], len, Some(&own.rows(len - 2..len - 1)), None);
    [values, logits, after]
}

#[test]
#[ignore = "needs a GPU"]
fn a_gpu_taps_and_drafts_as_the_cpu() {
    let base = Tiny::new(Dtype::BF16, EAGLE_BASE);
    for reads in [1, 3] {
        let (base_dir, head_dir) = (base.write(), head(&base, reads).write());
        let want = eagle(&Device::Cpu, &base_dir, &head_dir);
        let got = eagle(&Device::cuda(0).unwrap(), &base_dir, &head_dir);
        for (what, (got, want)) in ["features", "logits", "after its own"].iter().zip(got.iter().zip(&want)) {
            let error = relative_error(got, want);
            assert!(error < 0.1, "{reads}: {what}: {error}");
        }
    }
}

#[test]
fn heads_of_bf16_run_within_the_workspace_that_is_planned() {
    let base = Tiny::new(Dtype::BF16, EAGLE_BASE);
    for reads in [1, 3] {
        let [features, logits, after] = eagle(&Device::Cpu, &base.write(), &head(&base, reads).write());
        assert_eq!((features.len(), logits.len(), after.len()), (24 * reads * HIDDEN, 23 * VOCAB, VOCAB));
        assert!(logits.iter().chain(&after).all(|logit| logit.is_finite()));
        assert!(logits[..VOCAB] != logits[VOCAB..2 * VOCAB]);
    }
}
