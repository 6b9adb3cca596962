//! Llama 2 and 3, SmolLM2, and with biases on q, k and v also Qwen2: grouped-query attention, gated MLP.
//!
//! Source: Touvron et al. 2023, arXiv:2307.09288; Llama team 2024, arXiv:2407.21783; weight names as in the published checkpoints.

use super::decoder::{Decoder, DecoderLayer};
use super::model::Model;
use crate::error::Result;
use crate::layers::{Attention, AttentionKind, GatedMlp};
use crate::weights::Loader;

/// `LlamaForCausalLM` and its kin.
pub(super) fn load(loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    Decoder::load(loader, layer)
}

/// Layer `index`, counted from 0.
pub(super) fn layer(at: &Loader<'_>, index: usize) -> Result<DecoderLayer> {
    let config = at.config();
    let kind = AttentionKind { qkv_bias: config.qkv_bias, o_bias: config.o_bias, qk_norm: false };
    let attention = Attention::load(&at.at("self_attn"), index, kind)?;
    DecoderLayer::new(at, attention, Box::new(GatedMlp::load(&at.at("mlp"), config.intermediate_size)?))
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
