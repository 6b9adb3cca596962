//! Grouped-query attention with rotary positions over the paged KV cache.
//!
//! Source: Ainslie et al. 2023, arXiv:2305.13245.

use std::sync::Arc;

use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::attention::{Heads, rope_attention, rope_attention_after_first, workspace_bytes};
use drafthorse_kernels::ops::rope::RopeTable;

use super::linear::Linear;
use super::norm::{RmsNorm, Spread};
use crate::error::{ModelError, Result};
use crate::forward::Forward;
use crate::kv_cache::KvLayer;
use crate::models::{StepSize, tensor_bytes};
use crate::quant::{Part, SpreadNorm};
use crate::weights::{Loader, Shard};

/// One layer's attention on one rank: an equal share of the query heads, and the KV heads those read.
pub(crate) struct Attention {
    qkv: Linear,
    output: Linear,
    rope: Arc<RopeTable>,
    heads: Heads,
    scale: f32,
    /// Where its K and V are in the cache.
    kv_layer: usize,
    /// Position 0 has a key.
    has_first_key: bool,
    /// Scratch memory of the op.
    op_workspace_bytes: usize,
}

impl Attention {
    /// `layer` counts the model's layers from 0.
    pub(crate) fn load(at: &Loader<'_>, layer: usize, rope: &Arc<RopeTable>) -> Result<Self> {
        let config = at.config();
        let (hidden, head_dim, world) = (config.hidden_size, config.head_dim, at.place().world);
        if !config.num_heads.is_multiple_of(world) {
            let (name, what, why) = (at.path().to_owned(), "num_attention_heads", "the number of ranks");
            return Err(ModelError::NotMultiple { name, what, size: config.num_heads, of: world, why });
        }
        let kv_shard = Shard::of_kv_heads(config.num_kv_heads, world)?;
        let part = |name, heads, shard| Part { at: at.at(name), out_features: heads * head_dim, shard };
        let qkv = [
            part("q_proj", config.num_heads, Shard::Out),
            part("k_proj", config.num_kv_heads, kv_shard),
            part("v_proj", config.num_kv_heads, kv_shard),
        ];
        let heads =
            Heads { num_heads: config.num_heads / world, num_kv_heads: (config.num_kv_heads / world).max(1), head_dim };
        Ok(Attention {
            qkv: Linear::column(&qkv, hidden, config.qkv_bias)?,
            output: Linear::row(at.at("o_proj"), hidden, config.num_heads * head_dim, config.o_bias)?,
            rope: rope.clone(),
            heads,
            scale: 1.0 / (head_dim as f32).sqrt(),
            kv_layer: at.context().first_kv_layer + layer,
            has_first_key: true,
            op_workspace_bytes: workspace_bytes(at.device(), heads),
        })
    }

    /// No query sees the key at position 0 from now on.
    pub(crate) fn leave_out_first_key(&mut self) {
        self.has_first_key = false;
    }

    /// `x` becomes the attention of `x`; its K and V go to the cache first, so a token sees itself.
    pub(crate) fn forward(&self, x: &mut Tensor, cx: &mut Forward<'_>) -> Result<()> {
        let mut qkv = self.qkv.output(x.rows_cols().0, x.dtype(), cx)?;
        self.qkv.forward(x, &mut qkv, cx)?;
        let attended = self.attend(&mut qkv, cx)?;
        self.output.forward(&attended, x, cx)
    }

    /// [`forward`](Self::forward) of what may have yet to be normalised; its result goes to the residual stream, and `x` becomes the input
    /// of what comes after the norm `next`.
    pub(crate) fn forward_spread(
        &self,
        x: &mut Tensor,
        spread: &mut Spread<'_>,
        next: &RmsNorm,
        [qkv_kernels, output_kernels]: [&dyn SpreadNorm; 2],
        cx: &mut Forward<'_>,
    ) -> Result<()> {
        let mut qkv = self.qkv.output(x.rows_cols().0, x.dtype(), cx)?;
        match spread.pending() {
            Some(squares) => qkv_kernels.matmul(x, squares, &mut qkv)?,
            None => self.qkv.forward(x, &mut qkv, cx)?,
        }
        let attended = self.attend(&mut qkv, cx)?;
        spread.add(&attended, output_kernels, next, x)
    }

    /// What [`forward_spread`](Self::forward_spread) needs, where there is such for so many rows.
    pub(crate) fn spread_norm(&self, tokens: usize) -> Option<[&dyn SpreadNorm; 2]> {
        Some([self.qkv.spread_norm(tokens)?, self.output.spread_norm(tokens)?])
    }

    /// All heads' outputs, `[tokens, heads * head_dim]`.
    fn attend(&self, qkv: &mut Tensor, cx: &mut Forward<'_>) -> Result<Tensor> {
        let (tokens, _) = qkv.rows_cols();
        let batch = cx.batch;
        let sequences = batch.sequences();
        let ragged = sequences.ragged();
        let [k, v] = cx.kv.layer(self.kv_layer)?;
        let mut attended = cx.workspace.take([tokens, self.heads.num_heads * self.heads.head_dim], qkv.dtype())?;
        let (positions, heads, scale) = (batch.positions(), self.heads, self.scale);
        let attend = if self.has_first_key { rope_attention } else { rope_attention_after_first };
        attend(qkv, k, v, &positions, &self.rope, &ragged, heads, scale, &mut attended, cx.workspace)?;
        Ok(attended)
    }

    pub(crate) fn kv_layer(&self) -> KvLayer {
        KvLayer { num_kv_heads: self.heads.num_kv_heads, head_dim: self.heads.head_dim }
    }

    /// Scratch memory that [`forward`](Self::forward) takes.
    pub(crate) fn workspace_bytes(&self, step: StepSize, element_bytes: usize) -> usize {
        let Heads { num_heads, num_kv_heads, head_dim } = self.heads;
        let qkv = tensor_bytes(step.tokens * (num_heads + 2 * num_kv_heads) * head_dim, element_bytes);
        let attended = tensor_bytes(step.tokens * num_heads * head_dim, element_bytes);
        let after = self.output.workspace_bytes(step.tokens).max(self.op_workspace_bytes);
        qkv + self.qkv.workspace_bytes(step.tokens).max(attended + after)
    }
}
