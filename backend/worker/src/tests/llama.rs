//! A tiny random Llama from a checkpoint on disk, against a forward pass written out in plain loops.

use std::collections::HashMap;
use std::path::Path;

use drafthorse_control::{SamplingParams, TokenId};
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::engine::{Engine, Job, Schedule, small};
use super::fake::argmax;
use crate::bench::{self, BenchConfig};
use crate::config::WorkerConfig;
use crate::load::Progress;
use crate::rank::spawn;
use crate::spec::SpeculateConfig;

const VOCAB: usize = 101;
const HIDDEN: usize = 32;
const INTER: usize = 48;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;
const LAYERS: usize = 2;
const THETA: f32 = 10_000.0;
const EPS: f32 = 1e-5;

type Weights = HashMap<String, Vec<f32>>;

/// Names and shapes of a Llama with a tied head.
fn shapes() -> Vec<(String, Vec<usize>)> {
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.k_proj", vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.v_proj", vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HEADS * HEAD_DIM]),
            ("mlp.gate_proj", vec![INTER, HIDDEN]),
            ("mlp.up_proj", vec![INTER, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INTER]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    shapes
}

/// Writes a checkpoint and returns its weights, rounded to bf16 as they are stored.
fn checkpoint(dir: &Path, seed: u64) -> Weights {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": 128, "rms_norm_eps": EPS, "rope_theta": THETA, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "eos_token_id": 2,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut rng = StdRng::seed_from_u64(seed);
    let mut weights = Weights::new();
    let mut stored = Vec::new();
    for (name, shape) in shapes() {
        let spread = if name.contains("norm") { 0.5..1.5 } else { -0.5..0.5f32 };
        let values: Vec<bf16> =
            (0..shape.iter().product()).map(|_| bf16::from_f32(rng.random_range(spread.clone()))).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        weights.insert(name.clone(), values.iter().map(|value| value.to_f32()).collect());
        stored.push((name, shape, bytes));
    }
    let views = stored
        .iter()
        .map(|(name, shape, bytes)| (name.clone(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    weights
}

fn matmul(x: &[f32], weight: &[f32]) -> Vec<f32> {
    weight.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn norm(x: &[f32], weight: &[f32]) -> Vec<f32> {
    let mean_square = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    let scale = 1.0 / (mean_square + EPS).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

fn rotate(heads: &mut [f32], position: usize) {
    for head in heads.chunks_mut(HEAD_DIM) {
        let half = HEAD_DIM / 2;
        for i in 0..half {
            let angle = position as f32 / THETA.powf(2.0 * i as f32 / HEAD_DIM as f32);
            let (sin, cos) = angle.sin_cos();
            let (a, b) = (head[i], head[i + half]);
            (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
        }
    }
}

/// The logits after `tokens`, with no cache and no cleverness.
fn logits_after(weights: &Weights, tokens: &[TokenId]) -> Vec<f32> {
    let embedding = &weights["model.embed_tokens.weight"];
    let mut stream: Vec<Vec<f32>> =
        tokens.iter().map(|&token| embedding[token as usize * HIDDEN..][..HIDDEN].to_vec()).collect();
    for layer in 0..LAYERS {
        let weight = |name: &str| &weights[&format!("model.layers.{layer}.{name}.weight")];
        let (mut queries, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (position, x) in stream.iter().enumerate() {
            let x = norm(x, weight("input_layernorm"));
            let (mut q, mut k) = (matmul(&x, weight("self_attn.q_proj")), matmul(&x, weight("self_attn.k_proj")));
            rotate(&mut q, position);
            rotate(&mut k, position);
            queries.push(q);
            keys.push(k);
            values.push(matmul(&x, weight("self_attn.v_proj")));
        }
        for (position, x) in stream.iter_mut().enumerate() {
            let mut mixed = Vec::new();
            for head in 0..HEADS {
                let kv = head / (HEADS / KV_HEADS) * HEAD_DIM..(head / (HEADS / KV_HEADS) + 1) * HEAD_DIM;
                let q = &queries[position][head * HEAD_DIM..(head + 1) * HEAD_DIM];
                let scores: Vec<f32> = keys[..=position]
                    .iter()
                    .map(|k| k[kv.clone()].iter().zip(q).map(|(k, q)| k * q).sum::<f32>() / (HEAD_DIM as f32).sqrt())
                    .map(f32::exp)
                    .collect();
                let total: f32 = scores.iter().sum();
                for i in kv.clone() {
                    mixed.push(scores.iter().zip(&values).map(|(score, v)| score / total * v[i]).sum());
                }
            }
            for (x, out) in x.iter_mut().zip(matmul(&mixed, weight("self_attn.o_proj"))) {
                *x += out;
            }
            let y = norm(x, weight("post_attention_layernorm"));
            let gate = matmul(&y, weight("mlp.gate_proj"));
            let up = matmul(&y, weight("mlp.up_proj"));
            let inner: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            for (x, out) in x.iter_mut().zip(matmul(&inner, weight("mlp.down_proj"))) {
                *x += out;
            }
        }
    }
    matmul(&norm(&stream[tokens.len() - 1], &weights["model.norm.weight"]), embedding)
}

fn jobs() -> Vec<Job> {
    let mut rng = StdRng::seed_from_u64(77);
    (0..8u64)
        .map(|i| Job {
            prompt: (0..1 + i as usize * 4).map(|_| rng.random_range(0..VOCAB as TokenId)).collect(),
            sampling: SamplingParams {
                temperature: [0.0, 0.9][i as usize % 2],
                top_p: 0.95,
                seed: i,
                max_tokens: 24,
                ..SamplingParams::default()
            },
            ..Job::default()
        })
        .collect()
}

fn engine(dir: &Path, change: impl FnOnce(&mut WorkerConfig)) -> Engine {
    let mut config = WorkerConfig { model_dir: dir.into(), block_size: 16, ..small() };
    change(&mut config);
    Engine::new(spawn(config, Box::new(|_| {})).unwrap())
}

#[test]
fn greedy_tokens_are_those_of_the_written_out_forward_pass() {
    let dir = tempfile::tempdir().unwrap();
    let weights = checkpoint(dir.path(), 1);
    let outcomes = engine(dir.path(), |_| {}).serve(&jobs(), Schedule::together());
    for (job, outcome) in jobs().iter().zip(outcomes).step_by(2) {
        let mut history = job.prompt.clone();
        for &token in &outcome.tokens {
            let logits = logits_after(&weights, &history);
            let best = argmax(&logits);
            // Sums in another order: a near-tie may fall either way.
            let lost = logits[best as usize] - logits[token as usize];
            assert!(lost < 1e-3, "{token} after {history:?}, want {best}, which is {lost} likelier");
            history.push(token);
        }
    }
}

#[test]
fn a_real_model_gives_the_same_bits_in_chunks_in_company_and_with_drafts() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path(), 2);
    let jobs = jobs();
    let alone = engine(dir.path(), |_| {}).serve(&jobs, Schedule::alone());
    let mut plain = engine(dir.path(), |_| {});
    assert_eq!(plain.serve(&jobs, Schedule::together()), alone);
    let drafts = SpeculateConfig {
        method: "ngram".into(),
        max_draft_token_num: 4,
        max_ngram_size: 2,
        ..SpeculateConfig::default()
    };
    let mut drafting = engine(dir.path(), |config| config.speculate = drafts);
    assert_eq!(drafting.serve(&jobs, Schedule::together()), alone);
    for seed in 0..3 {
        assert_eq!(plain.serve(&jobs, Schedule::wild(seed)), alone, "seed {seed}");
        assert_eq!(drafting.serve(&jobs, Schedule::wild(seed)), alone, "seed {seed}, with drafts");
    }
    assert!(drafting.num_held > 0);
}

/// Writes an MTP module for the base in `base`, whose first layer it has with other numbers in front.
fn draft_checkpoint(dir: &Path, base: &Path, seed: u64) {
    std::fs::copy(base.join("config.json"), dir.join("config.json")).unwrap();
    let mut rng = StdRng::seed_from_u64(seed);
    let own = [
        ("enorm", vec![HIDDEN]),
        ("hnorm", vec![HIDDEN]),
        ("shared_head.norm", vec![HIDDEN]),
        ("eh_proj", vec![HIDDEN, 2 * HIDDEN]),
    ];
    let of_layer = shapes().into_iter().filter_map(|(name, shape)| {
        let name = name.strip_prefix("model.layers.1.")?.strip_suffix(".weight")?.to_owned();
        Some((name, shape))
    });
    let stored: Vec<(String, Vec<usize>, Vec<u8>)> = own
        .map(|(name, shape)| (name.to_owned(), shape))
        .into_iter()
        .chain(of_layer)
        .map(|(name, shape)| {
            let spread = if name.contains("norm") { 0.5..1.5 } else { -0.5..0.5f32 };
            let values = (0..shape.iter().product()).map(|_| bf16::from_f32(rng.random_range(spread.clone())));
            let bytes = values.flat_map(bf16::to_le_bytes).collect();
            (format!("model.layers.{LAYERS}.{name}.weight"), shape, bytes)
        })
        .collect();
    let views = stored
        .iter()
        .map(|(name, shape, bytes)| (name.clone(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}

#[test]
fn a_real_model_gives_the_same_bits_with_a_draft_model() {
    let (dir, draft) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    checkpoint(dir.path(), 2);
    draft_checkpoint(draft.path(), dir.path(), 5);
    let jobs = jobs();
    let alone = engine(dir.path(), |_| {}).serve(&jobs, Schedule::alone());
    for (adaptive, quant) in [(false, None), (false, Some("weight_only_int8")), (true, None)] {
        let speculate = SpeculateConfig {
            method: "mtp".into(),
            max_draft_token_num: 3,
            adaptive,
            draft_dir: Some(draft.path().into()),
            draft_quant_type: quant.map(str::to_owned),
            ..SpeculateConfig::default()
        };
        let mut drafting = engine(dir.path(), |config| config.speculate = speculate);
        assert_eq!(drafting.serve(&jobs, Schedule::together()), alone);
        for seed in 0..5 {
            assert_eq!(drafting.serve(&jobs, Schedule::wild(seed)), alone, "seed {seed}");
        }
        assert!(adaptive || drafting.num_drafts > 0);
    }
}

#[test]
fn a_draft_that_cannot_be_used_says_what_to_do() {
    let (dir, draft) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    checkpoint(dir.path(), 2);
    let refused = |draft_dir: Option<&Path>| {
        let draft_dir = draft_dir.map(Into::into);
        let speculate = SpeculateConfig { method: "mtp".into(), draft_dir, ..SpeculateConfig::default() };
        let config = WorkerConfig { model_dir: dir.path().into(), block_size: 16, speculate, ..small() };
        let error = spawn(config, Box::new(|_| {})).map(|_| ()).unwrap_err();
        crate::error::chain(&error).replace(&draft.path().display().to_string(), "DRAFT")
    };
    assert_eq!(
        refused(None),
        "speculate_method is mtp, must be none without a draft: draft_model_name_or_path names none, and the checkpoint has none in it"
    );
    let without = "the draft model cannot be used; speculate_method none serves without it";
    assert_eq!(
        refused(Some(draft.path())),
        format!("{without}: cannot read DRAFT/config.json: No such file or directory (os error 2)")
    );
    draft_checkpoint(draft.path(), dir.path(), 5);
    let config = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
    std::fs::write(draft.path().join("config.json"), config.replace("\"vocab_size\":101", "\"vocab_size\":102"))
        .unwrap();
    assert_eq!(
        refused(Some(draft.path())),
        format!("{without}: draft DRAFT: vocab_size is 102, the base has 101: it is a draft for another model")
    );
}

#[test]
fn loading_tells_its_progress_and_a_bench_stays_inside_the_plan() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path(), 3);
    let (sender, told) = std::sync::mpsc::channel();
    let config = BenchConfig {
        worker: WorkerConfig { model_dir: dir.path().into(), block_size: 16, ..small() },
        prefill_tokens: vec![100],
        decode_batches: vec![1, 6],
        decode_context: 40,
        decode_steps: 5,
        repeats: 1,
    };
    let report = bench::run(&config, &move |progress| sender.send(progress).unwrap()).unwrap();
    let told: Vec<Progress> = told.iter().collect();
    assert!(matches!(told[..], [.., Progress::Weights { done, total }, Progress::Planned(_)] if done == total));
    assert!(report.workspace_used_bytes <= report.workspace_bytes);
    assert_eq!((report.prefill[0].tokens, report.decode[1].batch), (100, 6));
    assert!(report.decode.iter().all(|line| line.tokens_per_second > 0.0 && line.median_step_ms > 0.0));

    let too_long = BenchConfig { decode_context: 126, ..config };
    let error = bench::run(&too_long, &|_| {}).unwrap_err().to_string();
    assert!(error.starts_with("decode_batches is 1 sequences of 132 tokens"), "{error}");
}
