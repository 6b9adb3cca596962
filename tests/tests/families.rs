//! Tiny models of every family against transformers: the table in `PARITY.md`.
//!
//! `DRAFTHORSE_PARITY=write cargo test -p drafthorse-tests --test families` writes it anew.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::fmt::Write;
use std::path::Path;

use drafthorse_kernels::DType;
use drafthorse_model::LoadOptions;
use drafthorse_tests::close::{self, distance};
use drafthorse_tests::families::{self, Family};
use drafthorse_tests::runner::Runner;
use drafthorse_tests::tiny::{self, Golden};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Tokens of the goldens that are prefilled before the others are decoded.
const PREFILL: usize = 64;

/// What a family is nothing without: keys of its config changed, or tensors whose name has a part filled with a number.
struct Feature {
    family: &'static str,
    name: &'static str,
    config: &'static str,
    tensors: Option<(&'static str, f32)>,
}

const fn key(family: &'static str, name: &'static str, config: &'static str) -> Feature {
    Feature { family, name, config, tensors: None }
}

const fn tensor(family: &'static str, name: &'static str, part: &'static str, number: f32) -> Feature {
    Feature { family, name, config: "{}", tensors: Some((part, number)) }
}

/// DeepSeek's rope scaling with one of its two numbers out of use.
macro_rules! without_all_dim {
    ($mscale:literal) => {
        concat!(
            r#"{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": "#,
            $mscale,
            r#", "mscale_all_dim": 0.0, "attention_factor": 1.0}}"#
        )
    };
}

macro_rules! without_mscale {
    ($all:literal) => {
        concat!(
            r#"{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": "#,
            $all,
            r#", "mscale_all_dim": "#,
            $all,
            "}}"
        )
    };
}

/// A line for each.
const FEATURES: &[Feature] = &[
    key("deepseek_v2", "mscale_all_dim", without_all_dim!("1.0")),
    key("deepseek_v2", "mscale", without_mscale!("0.707")),
    key("deepseek_v2", "routed scaling", r#"{"routed_scaling_factor": 1.0}"#),
    key("deepseek_v2", "a choice of groups", r#"{"topk_group": 4}"#),
    key("deepseek_v2", "softmax over experts", r#"{"scoring_func": "sigmoid"}"#),
    tensor("deepseek_v2", "the shared experts", "shared_experts.down_proj", 0.0),
    key("deepseek_v2_lite", "rope scaling", r#"{"rope_scaling": null}"#),
    key("deepseek_v2_lite", "a third expert", r#"{"num_experts_per_tok": 2}"#),
    tensor("deepseek_v2_lite", "the norm of latents", "kv_a_layernorm", 1.0),
    key("deepseek_v3", "rope scaling", r#"{"rope_scaling": null}"#),
    key("deepseek_v3", "mscale_all_dim", without_all_dim!("1.0")),
    key("deepseek_v3", "interleaved pairs", r#"{"rope_interleave": false}"#),
    key("deepseek_v3", "routed scaling", r#"{"routed_scaling_factor": 1.0}"#),
    key("deepseek_v3", "weights that sum to 1", r#"{"norm_topk_prob": false}"#),
    key("deepseek_v3", "a choice of groups", r#"{"topk_group": 4}"#),
    key("deepseek_v3", "sigmoids of experts", r#"{"scoring_func": "softmax"}"#),
    tensor("deepseek_v3", "the correction bias", "e_score_correction_bias", 0.0),
    tensor("deepseek_v3", "the shared experts", "shared_experts.down_proj", 0.0),
    tensor("deepseek_v3", "the norm of latents", "kv_a_layernorm", 1.0),
    tensor("deepseek_v3", "the norm of queries", "q_a_layernorm", 1.0),
    tensor("deepseek_v3", "norms before layers", "input_layernorm", 1.0),
    key("mixtral", "a second expert", r#"{"num_experts_per_tok": 1}"#),
    key("mixtral_linear", "rope scaling", r#"{"rope_scaling": null}"#),
    key("qwen2_moe", "weights that do not sum to 1", r#"{"norm_topk_prob": true}"#),
    key("qwen2_moe", "a third expert", r#"{"num_experts_per_tok": 2}"#),
    tensor("qwen2_moe", "biases on q, k and v", ".bias", 0.0),
    tensor("qwen2_moe", "the gate of what is shared", "shared_expert_gate", 0.0),
    tensor("qwen2_moe", "the shared expert", "shared_expert.down_proj", 0.0),
    key("mistral", "its rope base", r#"{"rope_theta": 10000.0}"#),
    tensor("qwen3", "the weights of q's norm", "q_norm", 1.0),
    tensor("qwen3", "the weights of k's norm", "k_norm", 1.0),
    key("qwen3", "norms of q and k", r#"{"architectures": ["LlamaForCausalLM"]}"#),
    key("qwen3_yarn", "rope scaling", r#"{"rope_scaling": null}"#),
    key(
        "qwen3_yarn",
        "the attention factor of YaRN",
        r#"{"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 32, "attention_factor": 1.0}}"#,
    ),
    key("qwen3_moe", "weights that sum to 1", r#"{"norm_topk_prob": false}"#),
    tensor("qwen3_moe", "the weights of norms of q and k", "_norm", 1.0),
    key("llama3", "rope scaling", r#"{"rope_scaling": null}"#),
    tensor("llama_bias", "biases on q, k, v and the output", ".bias", 0.0),
    tensor("llama_bias", "the bias on the output", "o_proj.bias", 0.0),
    tensor("qwen2", "biases on q, k and v", ".bias", 0.0),
];

fn runner(folder: &TempDir, dtype: DType, family: &Family) -> Runner {
    let options = LoadOptions { dtype, ..LoadOptions::default() };
    Runner::load(folder.path(), &options, family.tokens.len()).unwrap()
}

/// The sequences of the ragged batch.
fn ragged(family: &Family) -> Vec<&[u32]> {
    let mut rest = &family.tokens[..];
    let cut = |&len: &usize| {
        let (sequence, after) = rest.split_at(len);
        rest = after;
        sequence
    };
    family.ragged_lens.iter().map(cut).collect()
}

/// Largest relative differences to transformers, of all tokens at once, of those decoded one by one, of a ragged batch.
fn differences(family: &Family) -> [f64; 3] {
    let mut runner = runner(&family.checkpoint(), DType::F32, family);
    let whole = runner.run(&family.tokens).unwrap();
    runner.reset();
    runner.run(&family.tokens[..PREFILL]).unwrap();
    let decoded = runner.run_in_chunks(&family.tokens[PREFILL..], &[1]).unwrap();
    let batch = runner.run_batch(&ragged(family)).unwrap();
    [(&whole, &family.logits), (&decoded, &family.decode), (&batch, &family.ragged)]
        .map(|(got, want)| distance(got, want).relative)
}

/// How far off a family is without a feature.
fn without(feature: &Feature) -> f64 {
    let family = Family::read(feature.family);
    let changes: Value = serde_json::from_str(feature.config).unwrap();
    let change = |config: &mut Value| {
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
    };
    let folder = family.changed(change, |name, values| {
        if let Some((part, number)) = feature.tensors
            && name.contains(part)
        {
            values.fill(number);
        }
    });
    let got = runner(&folder, DType::F32, &family).run(&family.tokens).unwrap();
    distance(&got, &family.logits).relative
}

/// `PARITY.md`.
fn table() -> String {
    let mut text = String::from(
        "# Parity with transformers\n\n\
         Largest difference of f32 logits, as a part of the largest logit, on tiny random models (`goldens/families.py`); 1e-4 is allowed.\n\
         Written by `DRAFTHORSE_PARITY=write cargo test -p drafthorse-tests --test families`.\n\n\
         | model | prefill | decode with cache | ragged batch | chunks, prefix hit, batch against alone |\n\
         |---|---|---|---|---|\n",
    );
    for name in families::cases() {
        let family = Family::read(&name);
        let [prefill, decode, batch] = differences(&family);
        for difference in [prefill, decode, batch] {
            assert!(difference <= close::F32, "{name}: {difference:e}");
        }
        same_bits(&family);
        writeln!(text, "| {name} | {prefill:.0e} | {decode:.0e} | {batch:.0e} | same bits |").unwrap();
    }
    for name in tiny::cases() {
        let golden = Golden::read(&name);
        let folder = golden.checkpoint(|_| ());
        let mut runner = Runner::load(folder.path(), &LoadOptions::default(), golden.tokens.len()).unwrap();
        let prefill = distance(&runner.run(&golden.tokens).unwrap(), &golden.logits).relative;
        assert!(prefill <= close::F32, "{name}: {prefill:e}");
        writeln!(text, "| tiny {name} | {prefill:.0e} | | | see parity.rs |").unwrap();
    }
    text.push_str("\nWith something left out, which each model must show at a hundred times the bound or more:\n\n");
    text.push_str("| model | without | difference |\n|---|---|---|\n");
    for feature in FEATURES {
        let far = without(feature);
        assert!(far > 100.0 * close::F32, "{} without {} is only {far:e} away", feature.family, feature.name);
        writeln!(text, "| {} | {} | {far:.2} |", feature.family, feature.name).unwrap();
    }
    text.push_str(MISTRAL);
    text
}

/// What a family costs, of `git show --stat`.
const MISTRAL: &str = "
## What a family takes

Mistral, as it was added: a file, its `mod` and its line in the table.

    backend/model/src/models/mistral.rs        |  19 +++++++++++++++++++
    backend/model/src/models/mod.rs            |   2 ++
    tests/goldens/families.py                  |   1 +
    tests/goldens/families/mistral.safetensors | Bin 0 -> 76000 bytes
    tests/tests/families.rs                    |   1 +
";

#[test]
fn every_family_has_the_logits_of_transformers_and_the_table_is_kept() {
    let cases = families::cases();
    for name in &cases {
        let has_feature = FEATURES.iter().any(|feature| feature.family == name);
        assert!(has_feature, "no feature says what {name} is for");
    }
    let table = table();
    println!("{table}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("PARITY.md");
    if std::env::var("DRAFTHORSE_PARITY").is_ok_and(|what| what == "write") {
        std::fs::write(&path, &table).unwrap();
    }
    // Last digits may differ from one CPU to the next; models and checks may not.
    let kept = std::fs::read_to_string(&path).unwrap();
    let rows = |text: &str| -> Vec<String> {
        let names = text.lines().filter(|line| line.starts_with('|')).map(|line| {
            line.split('|').map(str::trim).filter(|cell| cell.parse::<f64>().is_err()).collect::<Vec<_>>().join("|")
        });
        names.collect()
    };
    assert_eq!(rows(&table), rows(&kept), "PARITY.md is of other models or checks");
}

/// However a prompt is cut, whatever it shares, whoever is in the batch: the bits are those of the whole, alone.
fn same_bits(family: &Family) {
    let folder = family.checkpoint();
    for dtype in [DType::F32, DType::BF16] {
        let mut runner = runner(&folder, dtype, family);
        let whole = runner.run(&family.tokens).unwrap();
        let vocab = family.vocab();
        assert!(whole.iter().all(|logit| logit.is_finite()));
        let hit = runner.run_after_prefix(32, &family.tokens[32..]).unwrap();
        assert!(hit == whole[32 * vocab..], "{}, {dtype}: after a prefix hit", family.name);
        for lengths in [&[1][..], &[7, 16, 1, 1, 40, 3], &[33]] {
            runner.reset();
            let parts = runner.run_in_chunks(&family.tokens, lengths).unwrap();
            assert!(parts == whole, "{}, {dtype}: chunks of {lengths:?}", family.name);
        }
        let sequences = ragged(family);
        let batch = runner.run_batch(&sequences).unwrap();
        let alone: Vec<f32> = sequences.iter().flat_map(|sequence| runner.run_batch(&[sequence]).unwrap()).collect();
        assert!(batch == alone, "{}, {dtype}: a batch", family.name);
    }
}

#[test]
fn quantized_experts_stay_near() {
    for name in
        families::cases().iter().filter(|name| name.contains("moe") || name.contains("deepseek") || *name == "mixtral")
    {
        let family = Family::read(name);
        let folder = family.checkpoint();
        let error = |quant: &str| {
            let options = LoadOptions { quant: Some(quant.into()), ..LoadOptions::default() };
            let mut runner = Runner::load(folder.path(), &options, family.tokens.len()).unwrap();
            distance(&runner.run(&family.tokens).unwrap(), &family.logits).difference
        };
        let (int8, int4) = (error("weight_only_int8"), error("weight_only_int4"));
        assert!(int8 > 1e-9 && int8 < 0.05 && int8 < int4 && int4 < 0.6, "{name}: int8 {int8:e}, int4 {int4:e}");
    }
}

#[test]
fn an_expert_that_is_missing_is_named() {
    let family = Family::read("mixtral");
    let folder = family.changed(|config| config["num_local_experts"] = json!(9), |_, _| ());
    let Err(err) = Runner::load(folder.path(), &LoadOptions::default(), 8) else { panic!("nine experts of eight") };
    let message = err.to_string();
    let missing = "model.layers.0.block_sparse_moe.gate.weight has shape [8, 64], expected [9, 64]; \
                   model.layers.0.block_sparse_moe.experts.8.w1.weight is missing";
    assert!(message.contains(missing), "{message}");
}
