//! Llama 2 and 3, SmolLM2, and with biases on q, k and v also Qwen2: pre-norm decoder, grouped-query attention, gated MLP.
//!
//! Source: Touvron et al. 2023, arXiv:2307.09288; Llama team 2024, arXiv:2407.21783; weight names as in the published checkpoints.

use std::sync::Arc;

use drafthorse_kernels::ops::rope::RopeTable;
use drafthorse_kernels::{DType, Tensor};

use super::model::{Ends, Model, StepSize, tensor_bytes};
use crate::error::Result;
use crate::forward::Forward;
use crate::kv_cache::KvLayer;
use crate::layers::{Attention, Embedding, GatedMlp, LmHead, RmsNorm, Spread};
use crate::quant::SpreadNorm;
use crate::weights::Loader;

/// `LlamaForCausalLM` and its kin.
pub(crate) struct Llama {
    embed: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: LmHead,
    hidden_size: usize,
    /// Bytes of one activation.
    element_bytes: usize,
}

/// One layer of it, which drafters have too.
pub(crate) struct DecoderLayer {
    input_norm: RmsNorm,
    attention: Attention,
    post_norm: RmsNorm,
    mlp: GatedMlp,
}

impl Llama {
    /// Loads this rank's shard.
    pub(crate) fn load(loader: &Loader<'_>) -> Result<Box<dyn Model>> {
        let config = loader.config();
        let model = loader.at("model");
        let rope = loader.rope_table()?;
        let layers = (0..config.num_layers).map(|i| DecoderLayer::load(&model.at(&format!("layers.{i}")), i, &rope));
        let layers = layers.collect::<Result<_>>()?;
        let (embed, lm_head) = Embedding::load_with_head(model.at("embed_tokens"), loader.at("lm_head"))?;
        Ok(Box::new(Llama {
            embed,
            layers,
            norm: RmsNorm::load(&model.at("norm"))?,
            lm_head,
            hidden_size: config.hidden_size,
            element_bytes: loader.dtype().bytes(),
        }))
    }
}

impl DecoderLayer {
    /// `index` counts the model's layers from 0.
    pub(crate) fn load(at: &Loader<'_>, index: usize, rope: &Arc<RopeTable>) -> Result<Self> {
        Ok(DecoderLayer {
            input_norm: RmsNorm::load(&at.at("input_layernorm"))?,
            attention: Attention::load(&at.at("self_attn"), index, rope)?,
            post_norm: RmsNorm::load(&at.at("post_attention_layernorm"))?,
            mlp: GatedMlp::load(&at.at("mlp"))?,
        })
    }

    /// No query sees the key at position 0 from now on: nothing is written there.
    pub(crate) fn leave_out_first_key(&mut self) {
        self.attention.leave_out_first_key();
    }

    /// `x` becomes what [`forward`](Self::forward) takes, if this is the first layer.
    pub(crate) fn begin(&self, residual: &Tensor, x: &mut Tensor) -> Result<()> {
        self.input_norm.forward(residual, x)
    }

    pub(crate) fn kv_layer(&self) -> KvLayer {
        self.attention.kv_layer()
    }

    /// Scratch memory that [`forward`](Self::forward) takes.
    pub(crate) fn workspace_bytes(&self, step: StepSize, element_bytes: usize) -> usize {
        let attention = self.attention.workspace_bytes(step, element_bytes);
        attention.max(self.mlp.workspace_bytes(step.tokens, element_bytes))
    }

    /// `x` goes in normalised and comes out as what the next norm adds; `residual` gathers all layers.
    pub(crate) fn forward(&self, x: &mut Tensor, residual: &mut Tensor, cx: &mut Forward<'_>) -> Result<()> {
        self.attention.forward(x, cx)?;
        self.post_norm.add(x, residual)?;
        self.mlp.forward(x, cx)
    }

    /// [`forward`](Self::forward) with norms that are spread over the products around them; `next` is that of the layer after.
    fn forward_spread(
        &self,
        x: &mut Tensor,
        spread: &mut Spread<'_>,
        next: Option<&RmsNorm>,
        [attention, mlp]: [[&dyn SpreadNorm; 2]; 2],
        cx: &mut Forward<'_>,
    ) -> Result<()> {
        self.attention.forward_spread(x, spread, &self.post_norm, attention, cx)?;
        self.mlp.forward_spread(x, spread, next, mlp, cx)
    }

    fn spread_norm(&self, tokens: usize) -> Option<[[&dyn SpreadNorm; 2]; 2]> {
        Some([self.attention.spread_norm(tokens)?, self.mlp.spread_norm(tokens)?])
    }
}

impl Model for Llama {
    fn forward(&self, cx: &mut Forward<'_>) -> Result<Tensor> {
        // In this order, since `x` is what outlives the call: memory is given back from the top.
        let mut x = self.embed.output(cx)?;
        let mut residual = self.embed.output(cx)?;
        self.embed.forward(&mut residual, cx)?;
        let (tokens, _) = x.rows_cols();
        let spread_norms: Option<Vec<_>> = self.layers.iter().map(|layer| layer.spread_norm(tokens)).collect();
        let Some(spread_norms) = spread_norms else {
            for (i, layer) in self.layers.iter().enumerate() {
                match i {
                    0 => layer.begin(&residual, &mut x)?,
                    _ => layer.input_norm.add(&mut x, &mut residual)?,
                }
                cx.tap(i, &residual)?;
                layer.forward(&mut x, &mut residual, cx)?;
            }
            self.norm.add(&mut x, &mut residual)?;
            return Ok(x);
        };
        let squares = cx.take([tokens, self.hidden_size / 16], DType::F32)?;
        let mut spread = Spread { residual: &mut residual, squares, eps: None };
        for (i, (layer, kernels)) in self.layers.iter().zip(spread_norms).enumerate() {
            if i == 0 {
                layer.input_norm.forward(spread.residual, &mut x)?;
            }
            cx.tap(i, spread.residual)?;
            let next = self.layers.get(i + 1).map(|layer| &layer.input_norm);
            layer.forward_spread(&mut x, &mut spread, next, kernels, cx)?;
        }
        drop(spread);
        self.norm.add(&mut x, &mut residual)?;
        Ok(x)
    }

    fn logits(&self, hidden: &Tensor, cx: &mut Forward<'_>) -> Result<Tensor> {
        self.lm_head.forward(hidden, cx)
    }

    fn kv_layers(&self) -> Vec<KvLayer> {
        self.layers.iter().map(DecoderLayer::kv_layer).collect()
    }

    fn workspace_bytes(&self, step: StepSize) -> usize {
        let hidden = |rows| tensor_bytes(rows * self.hidden_size, self.element_bytes);
        let of_layer = |layer: &DecoderLayer| layer.workspace_bytes(step, self.element_bytes);
        let layers = self.layers.iter().map(of_layer).max().unwrap_or(0);
        let head = hidden(step.logit_rows) + self.lm_head.workspace_bytes(step.logit_rows);
        // The squares of spread norms, in f32.
        let squares = tensor_bytes(step.tokens * self.hidden_size / 16, 4);
        hidden(step.tokens) + head.max(hidden(step.tokens) + squares + layers)
    }

    fn ends(&self) -> Option<Ends> {
        Some(Ends { table: self.embed.weight(), head: self.lm_head.weight() })
    }
}

#[cfg(test)]
mod tests {
    use drafthorse_kernels::{DType, Device};
    use safetensors::tensor::Dtype;

    use super::super::reference;
    use crate::LoadOptions;
    use crate::testing::{Rig, Tiny, options, relative_error};

    const TOKENS: [i32; 40] = [
        3, 14, 15, 9, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71, 69, 39, 0, 37, 51, 5, 82,
        9, 74, 44, 59, 23, 7, 81, 64, 6, 28, 62,
    ];

    /// How far the f32 logits of a config are from those in f64.
    fn error(dtype: Dtype, changes: &str) -> f32 {
        let tiny = Tiny::new(dtype, changes);
        let dir = tiny.write();
        let got = Rig::new(dir.path(), &options(DType::F32, "none"), TOKENS.len()).step(&TOKENS, 0);
        relative_error(&got, &reference::logits(&tiny, &TOKENS))
    }

    #[test]
    fn logits_are_those_of_the_paper() {
        for (dtype, changes) in [
            (Dtype::F32, "{}"),
            (Dtype::F16, r#"{"tie_word_embeddings": true}"#),
            (Dtype::BF16, r#"{"num_key_value_heads": 4, "head_dim": 24, "rope_theta": 1000.0}"#),
            (Dtype::BF16, r#"{"attention_bias": true, "mlp_bias": true, "num_key_value_heads": 1}"#),
            (Dtype::BF16, r#"{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}"#),
        ] {
            let error = error(dtype, changes);
            assert!(error < 1e-5, "{changes}: {error}");
        }
    }

    #[test]
    fn a_prompt_in_chunks_gives_the_bits_of_the_whole() {
        let dir = Tiny::new(Dtype::BF16, r#"{"tie_word_embeddings": true}"#).write();
        for dtype in [DType::F32, DType::BF16] {
            for quant in ["none", "weight_only_int8", "weight_only_int4"] {
                let mut rig = Rig::new(dir.path(), &options(dtype, quant), TOKENS.len());
                let whole = rig.step(&TOKENS, 0);
                assert!(whole.iter().all(|logit| logit.is_finite()));
                for chunks in [[39, 1].as_slice(), &[1; 40], &[7, 9, 1, 3, 20], &[16, 16, 8]] {
                    assert_eq!(rig.chunked(&TOKENS, chunks), whole, "{dtype} {quant} {chunks:?}");
                }
            }
        }
    }

    #[test]
    fn rounding_to_bf16_stays_near_and_int4_is_coarser_than_int8() {
        let tiny = Tiny::new(Dtype::BF16, "{}");
        let (dir, want) = (tiny.write(), reference::logits(&tiny, &TOKENS));
        let error = |dtype, quant| {
            let got = Rig::new(dir.path(), &options(dtype, quant), TOKENS.len()).step(&TOKENS, 0);
            relative_error(&got, &want)
        };
        let (bf16, int8, int4) =
            (error(DType::BF16, "none"), error(DType::F32, "weight_only_int8"), error(DType::F32, "weight_only_int4"));
        assert!(bf16 > 1e-5 && bf16 < 0.1, "{bf16}");
        assert!(int8 > 1e-5 && int8 < 0.1 && int8 < int4 / 2.0 && int4 < 1.0, "{int8} {int4}");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_gpu_gives_the_logits_of_the_cpu() {
        for changes in
            [r#"{"head_dim": 64, "tie_word_embeddings": true}"#, r#"{"head_dim": 128, "attention_bias": true}"#]
        {
            let dir = Tiny::new(Dtype::BF16, changes).write();
            let on = |device| {
                let options = LoadOptions { device, dtype: DType::BF16, ..LoadOptions::default() };
                Rig::new(dir.path(), &options, TOKENS.len())
            };
            let want = on(Device::Cpu).step(&TOKENS, 0);
            let mut gpu = on(Device::cuda(0).unwrap());
            for chunks in [[40].as_slice(), &[39, 1], &[1; 40], &[7, 9, 1, 3, 20]] {
                let error = relative_error(&gpu.chunked(&TOKENS, chunks), &want);
                assert!(error < 0.05, "{changes} {chunks:?}: {error}");
            }
        }
    }

    #[test]
    fn the_planned_workspace_is_what_a_step_takes() {
        let dir = Tiny::new(Dtype::BF16, "{}").write();
        for dtype in [DType::F32, DType::BF16] {
            // The rig's workspace is as large as planned: a step that needs more fails.
            let mut rig = Rig::new(dir.path(), &options(dtype, "none"), TOKENS.len());
            rig.step(&TOKENS, 0);
            let (planned, taken) = (rig.workspace.capacity_bytes(), rig.workspace.high_water_bytes());
            let slack = planned - taken;
            assert!(slack <= drafthorse_kernels::ops::attention::WORKSPACE_BYTES, "{planned} planned, {taken} taken");
        }
    }
}
