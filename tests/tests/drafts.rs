//! An MTP module against one that is written out in torch: the same logits over given hidden states, and drafting on by itself.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::fs;
use std::path::Path;

use drafthorse_kernels::{Device, Solo, Tensor, Workspace};
use drafthorse_model::{
    Base, Batch, BatchInputs, BatchLimits, Draft, Forward, KvCache, KvLayout, LoadOptions, StepSize, load, load_draft,
};
use drafthorse_tests::close::{self, assert_close, distance};
use drafthorse_tests::tiny::{Golden, VOCAB};
use safetensors::SafeTensors;
use safetensors::tensor::serialize_to_file;
use serde_json::Value;
use tempfile::TempDir;

const HIDDEN: usize = 64;
const BLOCK_SIZE: usize = 16;

fn golden() -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/drafts/mtp.safetensors")).unwrap()
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
        let limits = BatchLimits { max_tokens: 64, max_seqs: 1, max_blocks_per_seq: 4, max_logit_rows: 0 };
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

/// All logits: over the golden's pairs in chunks, then of the drafts that follow.
fn logits(change: impl FnOnce(&mut Value), shift: usize) -> Vec<f32> {
    let bytes = golden();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let (tokens, hidden) = (ints(&golden, "tokens"), floats(&golden, "hidden"));
    let base = Golden::read("tied").checkpoint(|_| ());
    let mut runner = Runner::new(base.path(), checkpoint(&golden, change).path());
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

fn wanted() -> Vec<f32> {
    let bytes = golden();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    [floats(&golden, "logits"), floats(&golden, "chain")].concat()
}

#[test]
fn logits_of_pairs_and_of_drafts_equal_those_of_torch() {
    let want = wanted();
    assert_eq!(want.len(), (39 + 3) * VOCAB);
    assert_close("mtp", &logits(|_| (), 0), &want, close::F32);
}

#[test]
fn the_golden_fails_without_its_features() {
    let want = wanted();
    let far = |got: Vec<f32>| distance(&got, &want).relative;
    assert!(far(logits(|config| config["rms_norm_eps"] = 0.1.into(), 0)) > 100.0 * close::F32);
    assert!(far(logits(|config| config["rope_theta"] = 100.0.into(), 0)) > 100.0 * close::F32);
    // One position too far, and a key is seen of which nothing was written.
    assert!(far(logits(|_| (), 1)) > 100.0 * close::F32);
}
