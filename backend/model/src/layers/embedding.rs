//! The embedding table and the head, which may be one weight.

use std::sync::Arc;

use drafthorse_kernels::{DType, Tensor};

use super::linear::load_weight;
use crate::error::Result;
use crate::forward::Forward;
use crate::quant::{Activation, Part, QuantWeight};
use crate::weights::{Loader, Shard};

/// Token ids to hidden states. Whole on every rank: a lookup needs no collective.
pub(crate) struct Embedding {
    weight: Arc<dyn QuantWeight>,
    hidden: usize,
    dtype: DType,
}

/// Hidden states to logits of this rank's part of the vocabulary.
pub(crate) struct LmHead {
    weight: Arc<dyn QuantWeight>,
}

impl Embedding {
    /// The table at `table` and the head at `head`, or the head made of the table if the config ties them.
    ///
    /// Alone, a rank then keeps one weight for both. One of many keeps the whole table and, apart from it, its part of the head.
    pub(crate) fn load_with_head<'a>(table: Loader<'a>, head: Loader<'a>) -> Result<(Self, LmHead)> {
        let config = table.config();
        let (vocab, hidden, dtype) = (config.vocab_size, config.hidden_size, table.dtype());
        let schemes = table.context().schemes;
        let is_tied = config.tie_word_embeddings;
        let part = |at: Loader<'a>, shard| [Part { at, out_features: vocab, shard }];

        if is_tied && table.place().world == 1 {
            let weight: Arc<dyn QuantWeight> =
                load_weight(&*schemes.head, &part(table, Shard::Replicated), hidden)?.into();
            return Ok((Embedding { weight: weight.clone(), hidden, dtype }, LmHead { weight }));
        }
        let head = if is_tied { table.clone() } else { head };
        let head = load_weight(&*schemes.head, &part(head, Shard::Out), hidden)?.into();
        let table = load_weight(&*schemes.embedding, &part(table, Shard::Replicated), hidden)?.into();
        Ok((Embedding { weight: table, hidden, dtype }, LmHead { weight: head }))
    }

    /// The table at `table`, or if none is there that of another model.
    pub(crate) fn load_or_share(table: Loader<'_>, shared: Option<&Arc<dyn QuantWeight>>) -> Result<Self> {
        let config = table.config();
        let (vocab, hidden, dtype) = (config.vocab_size, config.hidden_size, table.dtype());
        let schemes = table.context().schemes;
        let weight = match shared {
            Some(shared) if !table.contains("weight") => shared.clone(),
            _ => {
                let part = [Part { at: table, out_features: vocab, shard: Shard::Replicated }];
                load_weight(&*schemes.embedding, &part, hidden)?.into()
            }
        };
        Ok(Embedding { weight, hidden, dtype })
    }

    pub(crate) fn weight(&self) -> Arc<dyn QuantWeight> {
        self.weight.clone()
    }

    /// The batch's tokens, `[tokens, hidden]`.
    pub(crate) fn forward(&self, y: &mut Tensor, cx: &Forward<'_>) -> Result<()> {
        self.weight.gather(&cx.batch.token_ids(), y)
    }

    /// A tensor for hidden states.
    pub(crate) fn output(&self, cx: &Forward<'_>) -> Result<Tensor> {
        cx.take([cx.batch.num_tokens(), self.hidden], self.dtype)
    }
}

impl LmHead {
    /// The head of `num_tokens` tokens at `head`, or if none is there that of another model.
    pub(crate) fn load_or_share(
        head: Loader<'_>,
        num_tokens: usize,
        shared: Option<&Arc<dyn QuantWeight>>,
    ) -> Result<Self> {
        let (hidden, schemes) = (head.config().hidden_size, head.context().schemes);
        let weight = match shared {
            Some(shared) if !head.contains("weight") => shared.clone(),
            _ => {
                let part = [Part { at: head, out_features: num_tokens, shard: Shard::Replicated }];
                load_weight(&*schemes.head, &part, hidden)?.into()
            }
        };
        Ok(LmHead { weight })
    }

    pub(crate) fn weight(&self) -> Arc<dyn QuantWeight> {
        self.weight.clone()
    }

    /// f32 `[rows, vocab / world]`.
    pub(crate) fn forward(&self, hidden: &Tensor, cx: &Forward<'_>) -> Result<Tensor> {
        let (rows, _) = hidden.rows_cols();
        let mut logits = cx.take([rows, self.weight.dims()[0]], DType::F32)?;
        self.weight.matmul(&Activation::from(hidden), &mut logits, cx.workspace)?;
        Ok(logits)
    }

    /// Scratch memory that [`forward`](Self::forward) takes, its result too.
    pub(crate) fn workspace_bytes(&self, rows: usize) -> usize {
        let [vocab, _] = self.weight.dims();
        crate::models::tensor_bytes(rows * vocab, DType::F32.bytes()) + self.weight.workspace_bytes(rows)
    }
}
