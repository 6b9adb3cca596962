//! Drafters alone: `goldens/drafts` has what goes in and what comes out of modules that are written out in torch.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use drafthorse_kernels::{DType, Device, Solo, Tensor, Workspace};
use drafthorse_model::{
    Base, Batch, BatchInputs, BatchLimits, Draft, Forward, KvCache, KvLayout, LoadOptions, Model, Result, StepSize,
    Tap, load, load_draft,
};
use safetensors::SafeTensors;
use serde_json::Value;

/// Width of all hidden states here.
pub const HIDDEN: usize = 64;
const BLOCK_SIZE: usize = 16;
/// Room for tokens.
const MOST: usize = 64;
/// The blocks of the one sequence, not in order.
const BLOCKS: [i32; 3] = [2, 0, 3];

/// A drafter with its base, and one sequence of both.
pub struct Drafting {
    base: Box<dyn Model>,
    draft: Draft,
    kv: KvCache,
    batch: Batch,
    workspace: Workspace,
}

impl Drafting {
    /// Loads the base in one folder, and for it the drafter for `method` in the other.
    ///
    /// # Errors
    /// Whatever is wrong with the draft.
    ///
    /// # Panics
    /// If the base cannot be loaded.
    pub fn load(base: &Path, draft: &Path, method: &str) -> Result<Self> {
        let options = LoadOptions::default();
        let base = load(base, &options).expect("a base that can be loaded");
        let draft = load_draft(draft, method, Base { model: &*base.model, config: &base.config }, &options)?;
        let layers = base.model.kv_layers().into_iter().chain(draft.model.kv_layers()).collect();
        let layout = KvLayout { layers, last_hidden: 0, block_size: BLOCK_SIZE, dtype: options.dtype };
        let limits =
            BatchLimits { max_tokens: MOST, max_seqs: 1, max_blocks_per_seq: 4, max_logit_rows: 0, max_later: 0 };
        let step = StepSize { tokens: MOST, seqs: 1, logit_rows: MOST, max_kv_len: MOST };
        let workspace_bytes = base.model.workspace_bytes(step).max(draft.model.workspace_bytes(step));
        Ok(Drafting {
            kv: KvCache::new(&Device::Cpu, layout, 4)?,
            batch: Batch::new(&Device::Cpu, limits)?,
            workspace: Workspace::new(&Device::Cpu, workspace_bytes)?,
            base: base.model,
            draft,
        })
    }

    /// Draft token to the base's.
    pub fn token(&self, draft: usize) -> i32 {
        self.draft.tokens.as_ref().map_or(draft as i32, |tokens| tokens[draft] as i32)
    }

    /// What the drafter reads of the base after each of these tokens: its last hidden states, or those it taps side by side, in the order
    /// that `order` makes of them. The base runs the tokens in chunks of 7.
    ///
    /// # Panics
    /// If the model fails.
    pub fn features(&mut self, tokens: &[i32], order: impl Fn(&mut Vec<&[f32]>)) -> Vec<f32> {
        let mut features = Vec::new();
        for (index, chunk) in tokens.chunks(7).enumerate() {
            let first = 7 * index;
            self.set(chunk, first);
            let layers = &self.draft.taps[..];
            // More rows than tokens, as a worker has it.
            let shape = [chunk.len() + 2, layers.len() * HIDDEN];
            let mut tapped = Tensor::zeros(&Device::Cpu, "taps", shape, DType::F32).expect("it is small");
            let mut taps = [Tap { layers, output: &mut tapped }];
            let comm = Solo::default();
            let mut cx = Forward {
                batch: &self.batch,
                kv: &mut self.kv,
                workspace: &self.workspace,
                comm: &comm,
                target_hidden: None,
                taps: &mut taps,
            };
            let last = self.base.forward(&mut cx).expect("a base that runs");
            let rows = if layers.is_empty() { last.as_slice::<f32>() } else { tapped.as_slice() };
            for row in rows.chunks(HIDDEN * layers.len().max(1)).take(chunk.len()) {
                let mut parts: Vec<&[f32]> = row.chunks(HIDDEN).collect();
                order(&mut parts);
                features.extend(parts.concat());
            }
        }
        features
    }

    fn set(&mut self, tokens: &[i32], position: usize) {
        let end = position + tokens.len();
        let positions: Vec<i32> = (position as i32..end as i32).collect();
        let inputs = BatchInputs {
            token_ids: tokens,
            positions: &positions,
            cu_tokens: &[0, tokens.len() as i32],
            kv_lens: &[end as i32],
            block_tables: &[&BLOCKS],
            logit_rows: &[],
        };
        self.batch.set(&inputs).expect("a sequence that fits");
    }

    /// Pairs of tokens and hidden states, a row each of any width, from `position` on: the drafter's own hidden states, and logits.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn step(&mut self, tokens: &[i32], hidden: &[f32], position: usize) -> (Vec<f32>, Vec<f32>) {
        self.set(tokens, position);
        let shape = [tokens.len(), hidden.len() / tokens.len()];
        let hidden = Tensor::from_slice(&Device::Cpu, "hidden", hidden, shape).expect("whole rows");
        let comm = Solo::default();
        let mut cx = Forward {
            batch: &self.batch,
            kv: &mut self.kv,
            workspace: &self.workspace,
            comm: &comm,
            target_hidden: Some(&hidden),
            taps: &mut [],
        };
        let out = self.draft.model.forward(&mut cx).expect("a draft that runs");
        let logits = self.draft.model.logits(&out, &mut cx).expect("a head that runs");
        (out.as_slice().to_vec(), logits.as_slice().to_vec())
    }

    /// Logits of all pairs of token i + 1 and row i of `features`, in chunks, and of the drafts that follow, each from what came before.
    /// Everything stands `shift` positions too far.
    ///
    /// # Panics
    /// As [`step`](Self::step).
    pub fn logits(&mut self, tokens: &[i32], features: &[f32], drafts: &[i32], shift: usize) -> Vec<f32> {
        let width = features.len() / tokens.len();
        let (mut all, mut own) = (Vec::new(), Vec::new());
        let mut at = 1;
        for len in [17, 1, tokens.len() - 19] {
            let (out, logits) =
                self.step(&tokens[at..at + len], &features[(at - 1) * width..(at - 1 + len) * width], at + shift);
            all.extend(logits);
            own = out[(len - 1) * HIDDEN..].to_vec();
            at += len;
        }
        for &draft in drafts {
            let (out, logits) = self.step(&[draft], &own, at + shift);
            all.extend(logits);
            (own, at) = (out, at + 1);
        }
        all
    }
}

/// One of `goldens/drafts`.
pub struct DraftGolden {
    bytes: Vec<u8>,
    about: BTreeMap<String, String>,
}

impl DraftGolden {
    /// # Panics
    /// If it is not there.
    pub fn read(name: &str) -> Self {
        let path = format!("goldens/drafts/{name}.safetensors");
        let bytes = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect("goldens stand beside the tests");
        let (_, head) = SafeTensors::read_metadata(&bytes).expect("a golden is a safetensors file");
        let about = head.metadata().iter().flatten().map(|(key, value)| (key.clone(), value.clone())).collect();
        DraftGolden { bytes, about }
    }

    /// # Panics
    /// Never: it was read.
    pub fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("its head was read")
    }

    /// A tensor of four bytes a number.
    fn words(&self, name: &str) -> Vec<[u8; 4]> {
        self.tensors().tensor(name).expect("goldens have what tests ask for").data().as_chunks().0.to_vec()
    }

    /// # Panics
    /// If there is no such tensor.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.words(name).into_iter().map(f32::from_le_bytes).collect()
    }

    /// # Panics
    /// As [`floats`](Self::floats).
    pub fn ints(&self, name: &str) -> Vec<i32> {
        self.words(name).into_iter().map(i32::from_le_bytes).collect()
    }

    /// What its metadata says, as JSON.
    ///
    /// # Panics
    /// If it says nothing of it.
    pub fn about(&self, key: &str) -> Value {
        serde_json::from_str(&self.about[key]).expect("goldens are made by make.py")
    }

    /// Logits of the pairs, then of the drafts.
    pub fn wanted(&self) -> Vec<f32> {
        [self.floats("logits"), self.floats("chain")].concat()
    }
}
