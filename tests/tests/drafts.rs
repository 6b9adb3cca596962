//! An MTP module against one that is written out in torch: the same logits over given hidden states, and drafting on by itself.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use drafthorse_kernels::{Device, Solo, Tensor, Workspace};
use drafthorse_model::{
    Base, Batch, BatchInputs, BatchLimits, Draft, Forward, KvCache, KvLayout, LoadOptions, StepSize, load, load_draft,
};
use drafthorse_tests::close::{self, assert_close, distance};
use drafthorse_tests::families::{self, Family};
use drafthorse_tests::tiny::{Golden, VOCAB};
use safetensors::SafeTensors;
use safetensors::tensor::serialize_to_file;
use serde_json::{Value, json};
use tempfile::TempDir;

const HIDDEN: usize = 64;
const BLOCK_SIZE: usize = 16;

/// One of `goldens/drafts`.
fn golden(name: &str) -> Vec<u8> {
    let path = format!("goldens/drafts/{name}.safetensors");
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

fn floats(golden: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    golden.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn ints(golden: &SafeTensors<'_>, name: &str) -> Vec<i32> {
    golden.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
}

/// The module as a checkpoint of its own, with its config changed.
fn checkpoint(golden: &SafeTensors<'_>, change: impl FnOnce(&mut Value)) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Golden::read("tied").config;
    change(&mut config);
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let of_module = golden.tensors().into_iter().filter(|(name, _)| name.starts_with("model."));
    serialize_to_file(of_module, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

/// A module, and one sequence of it.
struct Runner {
    draft: Draft,
    kv: KvCache,
    batch: Batch,
    workspace: Workspace,
}

impl Runner {
    fn new(base: &Path, draft: &Path) -> Self {
        let options = LoadOptions::default();
        let base = load(base, &options).unwrap();
        let draft = load_draft(draft, Base { model: &*base.model, config: &base.config }, &options).unwrap();
        let layers = base.model.kv_layers().into_iter().chain(draft.model.kv_layers()).collect();
        let layout = KvLayout { layers, last_hidden: 0, block_size: BLOCK_SIZE, dtype: options.dtype };
        let limits =
            BatchLimits { max_tokens: 64, max_seqs: 1, max_blocks_per_seq: 4, max_logit_rows: 0, max_later: 0 };
        let step = StepSize { tokens: 64, seqs: 1, logit_rows: 64, max_kv_len: 64 };
        Runner {
            kv: KvCache::new(&Device::Cpu, layout, 4).unwrap(),
            batch: Batch::new(&Device::Cpu, limits).unwrap(),
            workspace: Workspace::new(&Device::Cpu, draft.model.workspace_bytes(step)).unwrap(),
            draft,
        }
    }

    /// Pairs of tokens and hidden states from `position` on: the module's own hidden states, and logits.
    fn step(&mut self, tokens: &[i32], hidden: &[f32], position: usize) -> (Vec<f32>, Vec<f32>) {
        let end = position + tokens.len();
        let positions: Vec<i32> = (position as i32..end as i32).collect();
        let inputs = BatchInputs {
            token_ids: tokens,
            positions: &positions,
            cu_tokens: &[0, tokens.len() as i32],
            kv_lens: &[end as i32],
            block_tables: &[&[2, 0, 3]],
            logit_rows: &[],
        };
        self.batch.set(&inputs).unwrap();
        let hidden = Tensor::from_slice(&Device::Cpu, "hidden", hidden, [tokens.len(), HIDDEN]).unwrap();
        let mut cx = Forward {
            batch: &self.batch,
            kv: &mut self.kv,
            workspace: &self.workspace,
            comm: &Solo::default(),
            target_hidden: Some(&hidden),
            taps: &mut [],
        };
        let out = self.draft.model.forward(&mut cx).unwrap();
        let logits = self.draft.model.logits(&out, &mut cx).unwrap();
        (out.to_vec().unwrap(), logits.to_vec().unwrap())
    }
}

/// All logits: over the golden's pairs in chunks, then of the drafts that follow. Everything stands `shift` positions too far.
fn logits(golden: &[u8], base: &Path, draft: &Path, shift: usize) -> Vec<f32> {
    let golden = SafeTensors::deserialize(golden).unwrap();
    let (tokens, hidden) = (ints(&golden, "tokens"), floats(&golden, "hidden"));
    let mut runner = Runner::new(base, draft);
    let (mut all, mut own) = (Vec::new(), Vec::new());
    let mut at = 1;
    for len in [17, 1, 21] {
        let before = &hidden[(at - 1) * HIDDEN..(at - 1 + len) * HIDDEN];
        let (out, logits) = runner.step(&tokens[at..at + len], before, at + shift);
        all.extend(logits);
        own = out[(len - 1) * HIDDEN..].to_vec();
        at += len;
    }
    for draft in ints(&golden, "drafts") {
        let (out, logits) = runner.step(&[draft], &own, at + shift);
        all.extend(logits);
        (own, at) = (out, at + 1);
    }
    all
}

fn wanted(golden: &[u8]) -> Vec<f32> {
    let golden = SafeTensors::deserialize(golden).unwrap();
    let want = [floats(&golden, "logits"), floats(&golden, "chain")].concat();
    assert_eq!(want.len(), (39 + 3) * VOCAB);
    want
}

/// Logits of the module with a Llama layer.
fn llama(change: impl FnOnce(&mut Value), shift: usize) -> Vec<f32> {
    let bytes = golden("mtp");
    let base = Golden::read("tied").checkpoint(|_| ());
    let draft = checkpoint(&SafeTensors::deserialize(&bytes).unwrap(), change);
    logits(&bytes, base.path(), draft.path(), shift)
}

#[test]
fn logits_of_pairs_and_of_drafts_equal_those_of_torch() {
    assert_close("mtp", &llama(|_| (), 0), &wanted(&golden("mtp")), close::F32);
}

#[test]
fn the_golden_fails_without_its_features() {
    let want = wanted(&golden("mtp"));
    let far = |got: Vec<f32>| distance(&got, &want).relative;
    assert!(far(llama(|config| config["rms_norm_eps"] = 0.1.into(), 0)) > 100.0 * close::F32);
    assert!(far(llama(|config| config["rope_theta"] = 100.0.into(), 0)) > 100.0 * close::F32);
    // One position too far, and a key is seen of which nothing was written.
    assert!(far(llama(|_| (), 1)) > 100.0 * close::F32);
}

type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

/// DeepSeek's module, as it lies in the base's checkpoint: names, shapes, numbers.
fn deepseek_module(golden: &[u8]) -> Tensors {
    let (_, head) = SafeTensors::read_metadata(golden).unwrap();
    let shapes = &head.metadata().as_ref().unwrap()["tensors"];
    let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_str(shapes).unwrap();
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let values = families::values(&name, shape.iter().product());
        (name, shape, values)
    };
    shapes.into_iter().map(tensor).collect()
}

/// The module as PaddleNLP has it apart: other names, linear layers turned, one layer in the config.
fn as_paddle(tensors: Tensors) -> Tensors {
    let renamed = |(name, shape, values): (String, Vec<usize>, Vec<f32>)| {
        let name = name.strip_prefix("model.layers.3.").unwrap();
        let at = match name {
            "shared_head.norm.weight" => "norm.weight".to_owned(),
            "enorm.weight" | "hnorm.weight" | "eh_proj.weight" => name.to_owned(),
            _ => format!("layers.0.{name}"),
        };
        let name = format!("deepseek_v3_mtp.{at}");
        match shape[..] {
            [rows, cols] => {
                let turned = (0..rows * cols).map(|i| values[i % rows * cols + i / rows]).collect();
                (name, vec![cols, rows], turned)
            }
            _ => (name, shape, values),
        }
    };
    tensors.into_iter().map(renamed).collect()
}

/// Logits of DeepSeek's module, in the base's checkpoint and apart.
fn deepseek(change: impl Fn(&mut Value), tensor: impl Fn(&str, &mut [f32])) -> [Vec<f32>; 2] {
    let bytes = golden("deepseek");
    let family = Family::read("deepseek_v3");
    let mut config = family.config.clone();
    config["num_nextn_predict_layers"] = json!(1);
    change(&mut config);
    let mut module = deepseek_module(&bytes);
    module.iter_mut().for_each(|(name, _, values)| tensor(name, values));
    let of_base = family
        .shapes
        .iter()
        .map(|(name, shape)| (name.clone(), shape.clone(), families::values(name, shape.iter().product())));
    let base = families::write(&config, of_base.chain(module.clone()));
    let inside = logits(&bytes, base.path(), base.path(), 0);
    config["num_hidden_layers"] = json!(1);
    let apart = families::write(&config, as_paddle(module).into_iter());
    [inside, logits(&bytes, base.path(), apart.path(), 0)]
}

#[test]
fn deepseek_s_module_has_the_logits_of_torch_by_both_names() {
    let [inside, apart] = deepseek(|_| (), |_, _| ());
    assert_close("deepseek's mtp", &inside, &wanted(&golden("deepseek")), close::F32);
    assert!(inside == apart, "two names of one module");
}

#[test]
fn deepseek_s_golden_fails_without_its_features() {
    let want = wanted(&golden("deepseek"));
    let check = |what: &str, got: [Vec<f32>; 2]| {
        let far = distance(&got[0], &want).relative;
        assert!(far > 100.0 * close::F32, "without {what} only {far:e} away");
    };
    check("routed scaling", deepseek(|config| config["routed_scaling_factor"] = json!(1.0), |_, _| ()));
    check("mscale_all_dim", deepseek(|config| config["rope_scaling"]["mscale_all_dim"] = json!(0.5), |_, _| ()));
    let without = |part: &'static str, number: f32| {
        let tensor = move |name: &str, values: &mut [f32]| {
            if name.contains(part) {
                values.fill(number);
            }
        };
        deepseek(|_| (), tensor)
    };
    for (part, number) in [("enorm", 1.0), ("hnorm", 1.0), ("shared_head.norm", 1.0), ("e_score_correction_bias", 0.0)]
    {
        check(part, without(part, number));
    }
}
