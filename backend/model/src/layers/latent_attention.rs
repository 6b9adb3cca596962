//! Multi-head latent attention (MLA): a token's cache entry is one latent for all heads.
//!
//! Source: DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1.

use std::sync::Arc;

use drafthorse_kernels::DType;
use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::attention::FirstKey;
use drafthorse_kernels::ops::mla::{
    Form, Mla, MlaDims, MlaWeight, Pairs, dtype_for, latent_write, mla, workspace_bytes,
};
use drafthorse_kernels::ops::rope::RopeTable;

use super::attention::SelfAttention;
use super::linear::Linear;
use super::norm::RmsNorm;
use crate::config::MlaConfig;
use crate::error::{ModelError, Result};
use crate::forward::Forward;
use crate::kv_cache::KvLayer;
use crate::models::{StepSize, tensor_bytes};
use crate::quant::Part;
use crate::weights::{Loader, Shard};

/// The norms of latents have an epsilon of their own, whatever the config's is.
const EPS: f32 = 1e-6;

/// One layer's attention on one rank: an equal share of the heads. Latents are alike on every rank.
pub(crate) struct LatentAttention {
    query: Query,
    /// To a latent and the part of the key that turns.
    latent: Linear,
    latent_norm: Tensor,
    /// From latents to keys and values.
    weight: MlaWeight,
    output: Linear,
    rope: Arc<RopeTable>,
    pairs: Pairs,
    scale: f32,
    form: Form,
    first_key: FirstKey,
    /// Where its latents are in the cache.
    kv_layer: usize,
    /// Scratch memory of the op, by the number of tokens.
    device: drafthorse_kernels::Device,
}

/// From hidden states to queries: at once, or through few dimensions.
struct Query {
    low: Option<LowRank>,
    up: Linear,
}

/// To few dimensions, and their norm.
struct LowRank {
    down: Linear,
    norm: RmsNorm,
}

impl Query {
    fn load(at: &Loader<'_>, mla: &MlaConfig) -> Result<Self> {
        let config = at.config();
        let hidden = config.hidden_size;
        let out_features = config.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim);
        let part = |name, out_features, shard| [Part { at: at.at(name), out_features, shard }];
        let Some(rank) = mla.q_lora_rank else {
            let up = Linear::column(&part("q_proj", out_features, Shard::Out), hidden, false)?;
            return Ok(Query { low: None, up });
        };
        let down = Linear::column(&part("q_a_proj", rank, Shard::Replicated), hidden, config.o_bias)?;
        let norm = RmsNorm::of_width(&at.at("q_a_layernorm"), rank, EPS)?;
        let up = Linear::column(&part("q_b_proj", out_features, Shard::Out), rank, false)?;
        Ok(Query { low: Some(LowRank { down, norm }), up })
    }

    /// `[tokens, this rank's heads * (nope + rope)]`.
    fn forward(&self, x: &Tensor, cx: &Forward<'_>) -> Result<Tensor> {
        let (tokens, _) = x.rows_cols();
        // First: it outlives the call.
        let mut q = self.up.output(tokens, x.dtype(), cx)?;
        match &self.low {
            None => self.up.forward(x, &mut q, cx)?,
            Some(LowRank { down, norm }) => {
                let mut low = down.output(tokens, x.dtype(), cx)?;
                let mut normed = down.output(tokens, x.dtype(), cx)?;
                down.forward(x, &mut low, cx)?;
                norm.forward(&low, &mut normed)?;
                self.up.forward(&normed, &mut q, cx)?;
            }
        }
        Ok(q)
    }

    /// Scratch memory that [`forward`](Self::forward) takes besides its result.
    fn workspace_bytes(&self, tokens: usize, element_bytes: usize) -> usize {
        let low = self.low.as_ref().map_or(0, |low| {
            let width = tensor_bytes(tokens * low.down.out_features(), element_bytes);
            2 * width + low.down.workspace_bytes(tokens)
        });
        low + self.up.workspace_bytes(tokens)
    }
}

impl LatentAttention {
    /// `layer` counts the model's layers from 0.
    pub(crate) fn load(at: &Loader<'_>, layer: usize, mla: &MlaConfig) -> Result<Self> {
        let config = at.config();
        let (hidden, world) = (config.hidden_size, at.place().world);
        if !config.num_heads.is_multiple_of(world) {
            let (name, what, why) = (at.path().to_owned(), "num_attention_heads", "the number of ranks");
            return Err(ModelError::NotMultiple { name, what, size: config.num_heads, of: world, why });
        }
        let (width, bias) = (mla.kv_lora_rank + mla.qk_rope_head_dim, config.o_bias);
        let latent = Part { at: at.at("kv_a_proj_with_mqa"), out_features: width, shard: Shard::Replicated };
        Ok(LatentAttention {
            query: Query::load(at, mla)?,
            latent: Linear::column(&[latent], hidden, bias)?,
            latent_norm: at.at("kv_a_layernorm").vector("weight", mla.kv_lora_rank, Shard::Replicated)?,
            weight: load_expansion(&at.at("kv_b_proj"), mla.dims(config.num_heads / world))?,
            output: Linear::row(at.at("o_proj"), hidden, config.num_heads * mla.v_head_dim, bias)?,
            rope: at.rope_table()?,
            pairs: mla.pairs,
            scale: mla.scale,
            form: at.context().mla_form,
            first_key: FirstKey::Seen,
            kv_layer: at.context().first_kv_layer + layer,
            device: at.device().clone(),
        })
    }

    fn dims(&self) -> MlaDims {
        self.weight.dims()
    }

    /// All heads' outputs, `[tokens, heads * value]`.
    fn attend(&self, x: &Tensor, cx: &mut Forward<'_>) -> Result<Tensor> {
        let (tokens, _) = x.rows_cols();
        let dims = self.dims();
        // First: it outlives the call.
        let mut attended = cx.take([tokens, dims.num_heads * dims.value], x.dtype())?;
        let mut q = self.query.forward(x, cx)?;
        let mut latents = self.latent.output(tokens, x.dtype(), cx)?;
        self.latent.forward(x, &mut latents, cx)?;
        let sequences = cx.batch.sequences();
        let ragged = sequences.ragged();
        let positions = cx.batch.positions();
        let cache = cx.kv.latents(self.kv_layer)?;
        let (norm, rope) = (&self.latent_norm, &self.rope);
        latent_write(&mut q, &latents, norm, EPS, cache, &positions, rope, self.pairs, &ragged, dims)?;
        let call = Mla {
            form: self.form,
            first_key: self.first_key,
            q: &q,
            cache,
            weight: &self.weight,
            ragged: &ragged,
            scale: self.scale,
        };
        mla(call, &mut attended, cx.workspace)?;
        Ok(attended)
    }
}

impl SelfAttention for LatentAttention {
    fn forward(&self, x: &mut Tensor, cx: &mut Forward<'_>) -> Result<()> {
        let attended = self.attend(x, cx)?;
        self.output.forward(&attended, x, cx)
    }

    fn leave_out_first_key(&mut self) {
        self.first_key = FirstKey::LeftOut;
    }

    fn kv_layer(&self) -> KvLayer {
        KvLayer::Latent { width: self.dims().latent() }
    }

    fn workspace_bytes(&self, step: StepSize, element_bytes: usize) -> usize {
        let (dims, tokens) = (self.dims(), step.tokens);
        let rows = |width: usize| tensor_bytes(tokens * width, element_bytes);
        let op = workspace_bytes(&self.device, dims, tokens);
        let latents = rows(dims.latent()) + self.latent.workspace_bytes(tokens).max(op);
        let query =
            rows(dims.num_heads * dims.query()) + self.query.workspace_bytes(tokens, element_bytes).max(latents);
        rows(dims.num_heads * dims.value) + query.max(self.output.workspace_bytes(tokens))
    }
}

/// The weight that is multiplied in two ways, so that it is kept as floats whatever the others are: in bf16 if that holds it.
fn load_expansion(at: &Loader<'_>, dims: MlaDims) -> Result<MlaWeight> {
    let out_features = at.config().num_heads * dims.expanded();
    let part = Part { at: at.clone(), out_features, shard: Shard::Out };
    let stored = at.context().schemes.floats.load(part, dims.rank)?;
    if at.is_checking() {
        let weight = MlaWeight::new(at.device(), dims, DType::BF16)?;
        at.context().count_weight(weight.size_bytes());
        return Ok(weight);
    }
    let values = stored.dequantize()?;
    drop(stored);
    let values = values.as_slice::<f32>();
    let dtype = if at.dtype() == DType::BF16 { DType::BF16 } else { dtype_for(values) };
    let mut weight = MlaWeight::new(at.device(), dims, dtype)?;
    weight.write_rows(0, values)?;
    at.context().count_weight(weight.size_bytes());
    Ok(weight)
}
