//! A drafter with a KV cache of its own, for the fake model.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use drafthorse_control::{ChannelLink, Ready, TokenId};
use drafthorse_kernels::{DType, Tensor};
use drafthorse_model::{Forward, KvLayer, Model, Result, StepSize};

use super::engine::{Engine, small};
use super::fake::{self, HIDDEN, POISON, VOCAB, logit, mix};
use super::rank;
use crate::config::WorkerConfig;
use crate::load::Network;
use crate::spec::{Drafter, SpeculateConfig};

pub(super) const DRAFTS: u32 = 3;

/// The fake model's hidden state at i + 1 is a hash of that at i and of token i + 1, which are just what a drafter is given: so it
/// can be right always. It reads back all entries from slot 1 on, and each must follow from the one before.
#[derive(Default)]
pub(super) struct FakeDrafter {
    /// Layers whose inputs it is given side by side; all are the hidden state in disguise.
    pub taps: Vec<usize>,
    /// After one history in so many it is wrong on purpose; 0: never.
    pub wrong_every: u64,
    /// How long a pass takes at least, and a step of the target.
    pub takes: Duration,
    pub target_takes: Duration,
    /// Entries that did not follow.
    pub torn: Arc<AtomicUsize>,
    pub passes: Arc<AtomicUsize>,
}

impl FakeDrafter {
    /// The hidden states that it is given of the target or, one each, of itself.
    fn hidden(&self, given: &Tensor) -> Vec<f32> {
        let (_, width) = given.rows_cols();
        let mut hidden = Vec::new();
        for row in given.as_slice::<f32>().chunks(width) {
            if width == HIDDEN {
                hidden.extend(row);
                continue;
            }
            assert_eq!(width, self.taps.len() * HIDDEN);
            let of_layer = |(columns, &layer): (&[f32], &usize)| -> Vec<f32> {
                columns.iter().map(|column| column - fake::tapped(layer)).collect()
            };
            let of_layers: Vec<Vec<f32>> = row.chunks(HIDDEN).zip(&self.taps).map(of_layer).collect();
            self.torn.fetch_add(usize::from(of_layers.iter().any(|parts| *parts != of_layers[0])), Relaxed);
            hidden.extend(&of_layers[0]);
        }
        hidden
    }

    fn follow(hidden: u64, token: TokenId) -> u64 {
        mix(hidden ^ u64::from(token + 1))
    }
}

fn parts(hash: u64) -> [f32; HIDDEN] {
    [0, 16, 32, 48].map(|shift| (hash >> shift & 0xffff) as f32)
}

fn whole(parts: &[f32]) -> u64 {
    parts.iter().rev().fold(0, |hash, &part| hash << 16 | part as u64)
}

impl Model for FakeDrafter {
    fn forward(&self, cx: &mut Forward<'_>) -> Result<Tensor> {
        let (batch, given) = (cx.batch, cx.target_hidden.expect("a drafter is given hidden states"));
        let given = self.hidden(given);
        self.passes.fetch_add(1, Relaxed);
        std::thread::sleep(self.takes);
        let mut hidden = cx.take([batch.num_tokens(), HIDDEN], DType::F32)?;
        let block_size = cx.kv.layout().block_size;
        let [k, v] = cx.kv.heads(1)?;
        let (k, v) = (k.as_mut_slice::<f32>(), v.as_mut_slice::<f32>());
        let sequences = batch.sequences();
        let ragged = sequences.ragged();
        let (ids, positions) = (batch.token_ids(), batch.positions());
        let (ids, positions) = (ids.as_slice::<i32>(), positions.as_slice::<i32>());
        let (_, width) = ragged.block_tables.rows_cols();
        for (seq, bounds) in ragged.cu_tokens.as_slice::<i32>().windows(2).enumerate() {
            let table = &ragged.block_tables.as_slice::<i32>()[seq * width..(seq + 1) * width];
            let place =
                |position: usize| HIDDEN * (table[position / block_size] as usize * block_size + position % block_size);
            let rows = bounds[0] as usize..bounds[1] as usize;
            for row in rows.clone() {
                let at = place(positions[row] as usize);
                k[at] = ids[row] as f32;
                v[at..at + HIDDEN].copy_from_slice(&given[row * HIDDEN..][..HIDDEN]);
            }
            for row in rows {
                let last = positions[row] as usize;
                let entry = |position| (whole(&v[place(position)..][..HIDDEN]), k[place(position)] as TokenId);
                let follows = |position| {
                    let (hidden, token) = entry(position);
                    entry(position + 1).0 == FakeDrafter::follow(hidden, token)
                };
                let torn = (1..last).filter(|&position| !follows(position)).count();
                self.torn.fetch_add(torn, Relaxed);
                let (before, token) = entry(last);
                let out = &mut hidden.as_mut_slice::<f32>()[row * HIDDEN..][..HIDDEN];
                out.copy_from_slice(&parts(if torn == 0 { FakeDrafter::follow(before, token) } else { 4321 }));
            }
        }
        Ok(hidden)
    }

    /// In the order of its own tokens, which are the others turned round.
    fn logits(&self, hidden: &Tensor, cx: &mut Forward<'_>) -> Result<Tensor> {
        let (rows, _) = hidden.rows_cols();
        let mut logits = cx.take([rows, VOCAB], DType::F32)?;
        let parts = hidden.as_slice::<f32>().chunks(HIDDEN);
        for (parts, logits) in parts.zip(logits.as_mut_slice::<f32>().chunks_mut(VOCAB)) {
            let hash = whole(parts);
            for (index, value) in logits.iter_mut().enumerate() {
                let token = VOCAB - 1 - index;
                *value = if token == POISON as usize { -100.0 } else { logit(hash, token) };
            }
            if is_wrong(hash, self.wrong_every) {
                logits.rotate_left(1);
            }
        }
        Ok(logits)
    }

    fn kv_layers(&self) -> Vec<KvLayer> {
        vec![KvLayer::Heads { num_kv_heads: 1, head_dim: HIDDEN }]
    }

    fn workspace_bytes(&self, step: StepSize) -> usize {
        let round = |bytes: usize| bytes.next_multiple_of(64);
        round(step.tokens * HIDDEN * 4) + round(step.logit_rows * VOCAB * 4)
    }
}

pub(super) fn is_wrong(hash: u64, every: u64) -> bool {
    every > 0 && (hash >> 7).is_multiple_of(every)
}

/// An engine over the fake model with its drafter, and the drafter's count of torn entries.
pub(super) fn drafting_engine(wrong_every: u64) -> (Engine, Arc<AtomicUsize>) {
    tapping_engine(wrong_every, Vec::new())
}

/// The same whose drafter reads the inputs of several layers.
pub(super) fn tapping_engine(wrong_every: u64, taps: Vec<usize>) -> (Engine, Arc<AtomicUsize>) {
    let model = FakeDrafter { taps, wrong_every, ..FakeDrafter::default() };
    let torn = model.torn.clone();
    (Engine::new(drafting_rank(model, small(), false)), torn)
}

/// A rank over the fake model with a drafter.
pub(super) fn drafting_rank(drafter: FakeDrafter, config: WorkerConfig, adaptive: bool) -> (Ready, ChannelLink) {
    let network = move || {
        let target = fake::FakeModel { takes: drafter.target_takes };
        let (taps, tokens) = (drafter.taps.clone(), Some((0..VOCAB as u32).rev().collect()));
        let drafter = Drafter { model: Box::new(drafter), tokens, num_tokens: VOCAB, taps, weight_bytes: 0 };
        Network { model: Box::new(target), drafter: Some(drafter), ..fake::network() }
    };
    let speculate =
        SpeculateConfig { method: "mtp".into(), max_draft_token_num: DRAFTS, adaptive, ..SpeculateConfig::default() };
    rank(WorkerConfig { speculate, ..config }, network, None)
}
