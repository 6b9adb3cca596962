//! Grouped-query attention with rotary positions over the paged KV cache.
//!
//! Source: Ainslie et al. 2023, arXiv:2305.13245.

use std::sync::Arc;

use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::attention::{Heads, rope_attention, rope_attention_after_first, workspace_bytes};
use drafthorse_kernels::ops::rms_norm::rms_norm_heads;
use drafthorse_kernels::ops::rope::RopeTable;

use super::linear::Linear;
use super::norm::{RmsNorm, Spread};
use crate::error::{ModelError, Result};
use crate::forward::Forward;
use crate::kv_cache::KvLayer;
use crate::models::{StepSize, tensor_bytes};
use crate::quant::{Part, SpreadNorm};
use crate::weights::{Loader, Shard};

/// What looks at other tokens: the first half of a layer.
pub(crate) trait SelfAttention: Send {
    /// `x` becomes the attention of `x`; what it keeps of it goes to the cache first, so a token sees itself.
    fn forward(&self, x: &mut Tensor, cx: &mut Forward<'_>) -> Result<()>;

    /// Itself with norms spread over its products, where there are kernels for it and so many rows.
    fn spread_norm(&self, _tokens: usize) -> Option<SpreadAttention<'_>> {
        None
    }

    /// No query sees the key at position 0 from now on.
    fn leave_out_first_key(&mut self);

    fn kv_layer(&self) -> KvLayer;

    /// Scratch memory that [`forward`](Self::forward) takes.
    fn workspace_bytes(&self, step: StepSize, element_bytes: usize) -> usize;
}

/// What families differ in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionKind {
    /// Biases on the projections to q, k and v.
    pub(crate) qkv_bias: bool,
    /// A bias on the projection out.
    pub(crate) o_bias: bool,
    /// Each head of q and k is normalised before it is turned.
    pub(crate) qk_norm: bool,
}

/// One layer's attention on one rank: an equal share of the query heads, and the KV heads those read.
pub(crate) struct Attention {
    qkv: Linear,
    output: Linear,
    qk_norm: Option<QkNorm>,
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

/// The weights of norms, `[head_dim]` f32.
struct QkNorm {
    q: Tensor,
    k: Tensor,
    eps: f32,
}

impl QkNorm {
    fn load(at: &Loader<'_>) -> Result<Self> {
        let weight = |name| at.at(name).vector("weight", at.config().head_dim, Shard::Replicated);
        Ok(QkNorm { q: weight("q_norm")?, k: weight("k_norm")?, eps: at.config().rms_norm_eps })
    }
}

impl Attention {
    /// `layer` counts the model's layers from 0.
    pub(crate) fn load(at: &Loader<'_>, layer: usize, kind: AttentionKind) -> Result<Self> {
        Attention::of_inputs(at, layer, kind, at.config().hidden_size)
    }

    /// One whose inputs are of another width than hidden states, for [`forward_to`](Self::forward_to).
    pub(crate) fn of_inputs(at: &Loader<'_>, layer: usize, kind: AttentionKind, inputs: usize) -> Result<Self> {
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
            qkv: Linear::column(&qkv, inputs, kind.qkv_bias)?,
            output: Linear::row(at.at("o_proj"), hidden, config.num_heads * head_dim, kind.o_bias)?,
            qk_norm: if kind.qk_norm { Some(QkNorm::load(at)?) } else { None },
            rope: at.rope_table()?,
            heads,
            scale: 1.0 / (head_dim as f32).sqrt(),
            kv_layer: at.context().first_kv_layer + layer,
            has_first_key: true,
            op_workspace_bytes: workspace_bytes(at.device(), heads),
        })
    }

    /// `y` becomes the attention of `x`.
    pub(crate) fn forward_to(&self, x: &Tensor, y: &mut Tensor, cx: &mut Forward<'_>) -> Result<()> {
        let mut qkv = self.qkv.output(x.rows_cols().0, x.dtype(), cx)?;
        self.qkv.forward(x, &mut qkv, cx)?;
        let attended = self.attend(&mut qkv, cx)?;
        self.output.forward(&attended, y, cx)
    }

    /// All heads' outputs, `[tokens, heads * head_dim]`.
    fn attend(&self, qkv: &mut Tensor, cx: &mut Forward<'_>) -> Result<Tensor> {
        let (tokens, _) = qkv.rows_cols();
        let batch = cx.batch;
        let sequences = batch.sequences();
        let ragged = sequences.ragged();
        let [k, v] = cx.kv.heads(self.kv_layer)?;
        let mut attended = cx.workspace.take([tokens, self.heads.num_heads * self.heads.head_dim], qkv.dtype())?;
        let (positions, heads, scale) = (batch.positions(), self.heads, self.scale);
        if let Some(norm) = &self.qk_norm {
            rms_norm_heads(qkv, &norm.q, &norm.k, norm.eps, heads)?;
        }
        let attend = if self.has_first_key { rope_attention } else { rope_attention_after_first };
        attend(qkv, k, v, &positions, &self.rope, &ragged, heads, scale, &mut attended, cx.workspace)?;
        Ok(attended)
    }
}

impl SelfAttention for Attention {
    fn forward(&self, x: &mut Tensor, cx: &mut Forward<'_>) -> Result<()> {
        let mut qkv = self.qkv.output(x.rows_cols().0, x.dtype(), cx)?;
        self.qkv.forward(x, &mut qkv, cx)?;
        let attended = self.attend(&mut qkv, cx)?;
        self.output.forward(&attended, x, cx)
    }

    fn spread_norm(&self, tokens: usize) -> Option<SpreadAttention<'_>> {
        let (qkv, output) = (self.qkv.spread_norm(tokens)?, self.output.spread_norm(tokens)?);
        Some(SpreadAttention { attention: self, qkv, output })
    }

    fn leave_out_first_key(&mut self) {
        self.has_first_key = false;
    }

    fn kv_layer(&self) -> KvLayer {
        KvLayer::Heads { num_kv_heads: self.heads.num_kv_heads, head_dim: self.heads.head_dim }
    }

    fn workspace_bytes(&self, step: StepSize, element_bytes: usize) -> usize {
        let Heads { num_heads, num_kv_heads, head_dim } = self.heads;
        let qkv = tensor_bytes(step.tokens * (num_heads + 2 * num_kv_heads) * head_dim, element_bytes);
        let attended = tensor_bytes(step.tokens * num_heads * head_dim, element_bytes);
        let after = self.output.workspace_bytes(step.tokens).max(self.op_workspace_bytes);
        qkv + self.qkv.workspace_bytes(step.tokens).max(attended + after)
    }
}

/// An attention whose norms are spread over its products.
pub(crate) struct SpreadAttention<'a> {
    attention: &'a Attention,
    qkv: &'a dyn SpreadNorm,
    output: &'a dyn SpreadNorm,
}

impl SpreadAttention<'_> {
    /// [`SelfAttention::forward`] of what may have yet to be normalised; its result goes to the residual stream, and `x` becomes the
    /// input of what comes after the norm `next`.
    pub(crate) fn forward(
        &self,
        x: &mut Tensor,
        spread: &mut Spread<'_>,
        next: &RmsNorm,
        cx: &mut Forward<'_>,
    ) -> Result<()> {
        let mut qkv = self.attention.qkv.output(x.rows_cols().0, x.dtype(), cx)?;
        match spread.pending() {
            Some(squares) => self.qkv.matmul(x, squares, &mut qkv)?,
            None => self.attention.qkv.forward(x, &mut qkv, cx)?,
        }
        let attended = self.attention.attend(&mut qkv, cx)?;
        spread.add(&attended, self.output, next, x)
    }
}
