//! The decoder layer of EAGLE heads: a Llama's, but for what it looks at.

use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::add::add;

use crate::error::{ModelError, Result};
use crate::forward::Forward;
use crate::kv_cache::KvLayer;
use crate::layers::{Attention, AttentionKind, FeedForward, GatedMlp, RmsNorm, SelfAttention};
use crate::models::StepSize;
use crate::weights::Loader;

pub(super) struct HeadLayer {
    attention: Attention,
    post_norm: RmsNorm,
    mlp: GatedMlp,
}

impl HeadLayer {
    /// The layer at `at`, whose attention takes inputs of this width. Its tensors tell its biases: configs of heads are copied from those
    /// of their bases.
    pub fn load(at: &Loader<'_>, inputs: usize) -> Result<Self> {
        let config = at.config();
        if config.mla.is_some() {
            let (key, value) = ("kv_lora_rank".to_owned(), "set".to_owned());
            let supported = "heads whose layer is a Llama's".to_owned();
            return Err(ModelError::Unsupported { key, value, supported });
        }
        let attention = at.at("self_attn");
        let kind = AttentionKind {
            qkv_bias: attention.contains("q_proj.bias"),
            o_bias: attention.contains("o_proj.bias"),
            qk_norm: attention.contains("q_norm.weight"),
        };
        let mut attention = Attention::of_inputs(&attention, 0, kind, inputs)?;
        attention.leave_out_first_key();
        Ok(HeadLayer {
            attention,
            post_norm: RmsNorm::load(&at.at("post_attention_layernorm"))?,
            mlp: GatedMlp::load(&at.at("mlp"), config.intermediate_size)?,
        })
    }

    /// `x` becomes the attention of `input`.
    pub fn attend(&self, input: &Tensor, x: &mut Tensor, cx: &mut Forward<'_>) -> Result<()> {
        self.attention.forward_to(input, x, cx)
    }

    /// Adds what was attended to, and then the MLP of that, to `residual`: the layer's output. `x` is used up.
    pub fn finish(&self, x: &mut Tensor, residual: &mut Tensor, cx: &mut Forward<'_>) -> Result<()> {
        self.post_norm.add(x, residual)?;
        self.mlp.forward(x, cx)?;
        Ok(add(residual, x)?)
    }

    pub fn kv_layer(&self) -> KvLayer {
        self.attention.kv_layer()
    }

    /// Scratch memory that either half takes.
    pub fn workspace_bytes(&self, step: StepSize, element_bytes: usize) -> usize {
        let attention = self.attention.workspace_bytes(step, element_bytes);
        attention.max(self.mlp.workspace_bytes(step.tokens, element_bytes))
    }
}
