//! A model that is all history: a token's hidden state is a hash of every token up to it, which it reads back from the paged
//! KV cache through the block tables. Any mix-up of slots, blocks, positions or drafts changes what it says.

use std::time::Duration;

use drafthorse_control::TokenId;
use drafthorse_kernels::{DType, Tensor};
use drafthorse_model::{Forward, KvLayer, Model, Result, StepSize};

use crate::load::Network;

pub(crate) const VOCAB: usize = 97;
pub(crate) const HIDDEN: usize = 4;
pub(crate) const CONTEXT: usize = 256;

/// The model's logits are not finite after this token.
pub(crate) const POISON: TokenId = 13;

#[derive(Default)]
pub(crate) struct FakeModel {
    /// How long a step takes at least.
    pub takes: Duration,
}

pub(crate) fn network() -> Network {
    Network {
        model: Box::new(FakeModel::default()),
        vocab_size: VOCAB,
        hidden: HIDDEN,
        context: CONTEXT,
        weight_bytes: 0,
        drafter: None,
    }
}

/// By how much what enters a layer is more than the last hidden state, which is below 2^16.
pub(crate) fn tapped(layer: usize) -> f32 {
    65_536.0 * layer as f32
}

/// The hash of a history.
pub(crate) fn hash(tokens: impl IntoIterator<Item = TokenId>) -> u64 {
    tokens.into_iter().fold(1, |hash, token| mix(hash ^ u64::from(token + 1)))
}

pub(crate) fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word ^ (word >> 29)
}

/// Between -4 and 4, on a grid fine enough that ties are rare.
pub(crate) fn logit(hash: u64, token: usize) -> f32 {
    (mix(hash.wrapping_add(token as u64 * 0x1234_5679)) % 80_001) as f32 / 10_000.0 - 4.0
}

/// What the model says after `history`, told without a KV cache.
pub(crate) fn logits_after(history: &[TokenId]) -> Vec<f32> {
    let hash = hash(history.iter().copied());
    (0..VOCAB).map(|token| logit(hash, token)).collect()
}

/// Index of the largest; the lowest of equals.
pub(crate) fn argmax(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = token;
        }
    }
    best as TokenId
}

impl Model for FakeModel {
    fn forward(&self, cx: &mut Forward<'_>) -> Result<Tensor> {
        std::thread::sleep(self.takes);
        let batch = cx.batch;
        let mut hidden = cx.take([batch.num_tokens(), HIDDEN], DType::F32)?;
        let block_size = cx.kv.layout().block_size;
        let [k, v] = cx.kv.heads(0)?;
        let (k, v) = (k.as_mut_slice::<f32>(), v.as_mut_slice::<f32>());
        let sequences = batch.sequences();
        let ragged = sequences.ragged();
        let (ids, positions) = (batch.token_ids(), batch.positions());
        let (ids, positions) = (ids.as_slice::<i32>(), positions.as_slice::<i32>());
        let (_, width) = ragged.block_tables.rows_cols();
        for (seq, bounds) in ragged.cu_tokens.as_slice::<i32>().windows(2).enumerate() {
            let table = &ragged.block_tables.as_slice::<i32>()[seq * width..(seq + 1) * width];
            let place = |position: usize| table[position / block_size] as usize * block_size + position % block_size;
            for row in bounds[0] as usize..bounds[1] as usize {
                let position = positions[row] as usize;
                k[place(position)] = ids[row] as f32;
                v[place(position)] = position as f32;
            }
            for row in bounds[0] as usize..bounds[1] as usize {
                let history = (0..=positions[row] as usize).map(|position| {
                    let at = place(position);
                    // A block that another sequence wrote has the wrong positions sooner or later.
                    if v[at] as usize == position { k[at] as TokenId } else { TokenId::MAX - 1 }
                });
                let mut hash = hash(history);
                if ids[row] as TokenId == POISON {
                    hash = u64::MAX;
                }
                for part in &mut hidden.as_mut_slice::<f32>()[row * HIDDEN..(row + 1) * HIDDEN] {
                    *part = (hash & 0xffff) as f32;
                    hash >>= 16;
                }
            }
        }
        for tap in cx.taps.iter_mut() {
            let width = tap.layers.len() * HIDDEN;
            let rows = tap.output.as_mut_slice::<f32>().chunks_mut(width);
            for (row, hidden) in rows.zip(hidden.as_slice::<f32>().chunks(HIDDEN)) {
                for (columns, &layer) in row.chunks_mut(HIDDEN).zip(tap.layers) {
                    columns.iter_mut().zip(hidden).for_each(|(column, part)| *column = part + tapped(layer));
                }
            }
        }
        let kv_end = ragged.kv_lens.as_slice::<i32>().iter().max();
        assert_eq!(kv_end.copied().unwrap_or(0) as usize, ragged.max_kv_len);
        Ok(hidden)
    }

    fn logits(&self, hidden: &Tensor, cx: &mut Forward<'_>) -> Result<Tensor> {
        let (rows, _) = hidden.rows_cols();
        let mut logits = cx.take([rows, VOCAB], DType::F32)?;
        let parts = hidden.as_slice::<f32>().chunks(HIDDEN);
        for (parts, logits) in parts.zip(logits.as_mut_slice::<f32>().chunks_mut(VOCAB)) {
            let hash = parts.iter().rev().fold(0u64, |hash, &part| hash << 16 | part as u64);
            for (token, value) in logits.iter_mut().enumerate() {
                *value = if hash == u64::MAX { f32::NAN } else { logit(hash, token) };
            }
        }
        Ok(logits)
    }

    fn kv_layers(&self) -> Vec<KvLayer> {
        vec![KvLayer::Heads { num_kv_heads: 1, head_dim: 1 }]
    }

    fn workspace_bytes(&self, step: StepSize) -> usize {
        let round = |bytes: usize| bytes.next_multiple_of(64);
        round(step.tokens * HIDDEN * 4) + round(step.logit_rows * VOCAB * 4)
    }
}
