//! Tiny models of every kind against transformers: the same logits, and other ones when the kind is taken away.

#![allow(clippy::unwrap_used, clippy::needless_pass_by_value, reason = "helpers of tests fail as tests do")]

use drafthorse_kernels::DType;
use drafthorse_model::LoadOptions;
use drafthorse_tests::close::{self, assert_close, distance};
use drafthorse_tests::runner::Runner;
use drafthorse_tests::tiny::{self, Golden};
use serde_json::{Value, json};

fn logits(golden: &Golden, options: LoadOptions<'_>, change: impl FnOnce(&mut Value)) -> Vec<f32> {
    let folder = golden.checkpoint(change);
    let mut runner = Runner::load(folder.path(), &options, golden.tokens.len()).unwrap();
    runner.run(&golden.tokens).unwrap()
}

#[test]
fn logits_equal_those_of_transformers() {
    let cases = tiny::cases();
    assert!(cases.len() >= 12, "{cases:?}");
    for name in cases {
        let golden = Golden::read(&name);
        assert_eq!(golden.logits.len(), golden.tokens.len() * tiny::VOCAB);
        assert_close(&name, &logits(&golden, LoadOptions::default(), |_| ()), &golden.logits, close::F32);
    }
}

#[test]
fn activations_in_bf16_stay_near() {
    for name in tiny::cases() {
        let golden = Golden::read(&name);
        let options = LoadOptions { dtype: DType::BF16, ..LoadOptions::default() };
        let got = logits(&golden, options, |_| ());
        let distance = distance(&got, &golden.logits);
        assert!(distance.difference < close::BF16, "{name}: {distance:?}");
        assert!(distance.relative > close::F32, "{name}: bf16 rounds");
    }
}

#[test]
fn every_golden_fails_without_its_feature() {
    let without = |name: &str, change: Value| {
        let golden = Golden::read(name);
        let got = logits(&golden, LoadOptions::default(), |config| {
            for (key, value) in change.as_object().unwrap() {
                config[key] = value.clone();
            }
        });
        let far = distance(&got, &golden.logits).relative;
        assert!(far > 100.0 * close::F32, "{name} with {change} is only {far:e} away");
    };
    without("untied", json!({"tie_word_embeddings": true}));
    without("tied", json!({"tie_word_embeddings": false}));
    without("attention_bias", json!({"attention_bias": false}));
    without("mlp_bias", json!({"mlp_bias": false}));
    // Without a bias on its q, k and v; and with one on its output.
    without("qwen2", json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}));
    without("qwen2", json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": true}));
    without("norm_eps", json!({"rms_norm_eps": 1e-5}));
    without("rope_theta", json!({"rope_theta": 10000.0}));
    for name in ["rope_linear", "rope_llama3", "rope_yarn", "rope_yarn_betas"] {
        without(name, json!({"rope_scaling": null}));
    }
    without("rope_dynamic", json!({"rope_scaling": null, "max_position_embeddings": 128}));
    without("rope_yarn", json!({"rope_scaling": scaling("rope_yarn", json!({"attention_factor": 1.0}))}));
    without("rope_yarn_betas", json!({"rope_scaling": scaling("rope_yarn_betas", json!({"beta_fast": 32.0}))}));
    without("rope_llama3", json!({"rope_scaling": scaling("rope_llama3", json!({"low_freq_factor": 2.0}))}));
}

/// A golden's `rope_scaling` with some numbers changed.
fn scaling(name: &str, change: Value) -> Value {
    let mut scaling = Golden::read(name).config["rope_scaling"].clone();
    for (key, value) in change.as_object().unwrap() {
        scaling[key] = value.clone();
    }
    scaling
}

#[test]
fn a_prompt_cut_into_chunks_gives_the_same_bits() {
    for name in tiny::cases() {
        let golden = Golden::read(&name);
        let folder = golden.checkpoint(|_| ());
        for dtype in [DType::F32, DType::BF16] {
            let options = LoadOptions { dtype, ..LoadOptions::default() };
            let mut runner = Runner::load(folder.path(), &options, golden.tokens.len()).unwrap();
            let whole = runner.run(&golden.tokens).unwrap();
            for lengths in [&[1][..], &[7, 16, 1, 1, 40, 3], &[33]] {
                runner.reset();
                let parts = runner.run_in_chunks(&golden.tokens, lengths).unwrap();
                assert!(parts == whole, "{name}, {dtype:?}, chunks of {lengths:?}");
            }
        }
    }
}
