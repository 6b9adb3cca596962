//! EAGLE heads of random weights for tiny random bases from checkpoints on disk: the text is that without drafts.

use std::path::Path;

use drafthorse_control::{Admit, BlockId, Row, SamplingParams, Slot, Step, TokenId, Wants};
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::engine::{Engine, Job, Schedule, small};
use crate::config::{ActivationDtype, DeviceKind, WorkerConfig};
use crate::rank::spawn;
use crate::spec::SpeculateConfig;

const VOCAB: usize = 101;
/// Width of hidden states, four heads wide; and one whose heads a GPU has kernels for.
const HIDDEN: usize = 32;
const GPU_HIDDEN: usize = 256;
const LAYERS: usize = 7;
const BLOCK: usize = 16;

fn config(family: &str, hidden: usize, layers: usize) -> Value {
    json!({
        "architectures": [if family == "qwen2" { "Qwen2ForCausalLM" } else { "LlamaForCausalLM" }], "model_type": family,
        "hidden_act": "silu", "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": hidden * 3 / 2,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": false, "eos_token_id": 2,
    })
}

/// Names and shapes of a layer whose attention takes this many inputs.
fn layer(at: &str, hidden: usize, inputs: usize, kv: usize, has_bias: bool) -> Vec<(String, Vec<usize>)> {
    let mut shapes = vec![
        ("post_attention_layernorm.weight", vec![hidden]),
        ("self_attn.q_proj.weight", vec![hidden, inputs]),
        ("self_attn.k_proj.weight", vec![kv, inputs]),
        ("self_attn.v_proj.weight", vec![kv, inputs]),
        ("self_attn.o_proj.weight", vec![hidden, hidden]),
        ("mlp.gate_proj.weight", vec![hidden * 3 / 2, hidden]),
        ("mlp.up_proj.weight", vec![hidden * 3 / 2, hidden]),
        ("mlp.down_proj.weight", vec![hidden, hidden * 3 / 2]),
    ];
    if has_bias {
        shapes.push(("self_attn.q_proj.bias", vec![hidden]));
        shapes.push(("self_attn.k_proj.bias", vec![kv]));
        shapes.push(("self_attn.v_proj.bias", vec![kv]));
    }
    shapes.into_iter().map(|(name, shape)| (format!("{at}.{name}"), shape)).collect()
}

fn base(family: &str, hidden: usize) -> TempDir {
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
        ("lm_head.weight".to_owned(), vec![VOCAB, hidden]),
    ];
    for index in 0..LAYERS {
        let at = format!("model.layers.{index}");
        shapes.push((format!("{at}.input_layernorm.weight"), vec![hidden]));
        shapes.extend(layer(&at, hidden, hidden, hidden / 2, family == "qwen2"));
    }
    write(&config(family, hidden, LAYERS), shapes, None, 7)
}

/// EAGLE-1 with a bias, for any base.
fn eagle(hidden: usize) -> TempDir {
    let mut shapes = vec![("fc.weight".to_owned(), vec![hidden, 2 * hidden]), ("fc.bias".to_owned(), vec![hidden])];
    shapes.extend(layer("layers.0", hidden, hidden, hidden / 2, false));
    write(&config("llama", hidden, 1), shapes, None, 8)
}

/// EAGLE-3 of two tokens in three, with their rows of the base's head.
fn eagle3(hidden: usize) -> TempDir {
    let tokens: Vec<i64> = (0..VOCAB as i64).filter(|token| token % 3 > 0).collect();
    let mut shapes = vec![
        ("fc.weight".to_owned(), vec![hidden, 3 * hidden]),
        ("midlayer.input_layernorm.weight".to_owned(), vec![hidden]),
        ("midlayer.hidden_norm.weight".to_owned(), vec![hidden]),
        ("norm.weight".to_owned(), vec![hidden]),
    ];
    shapes.extend(layer("midlayer", hidden, 2 * hidden, hidden, false));
    let mut config = config("llama", hidden, 1);
    config["num_key_value_heads"] = 4.into();
    config["draft_vocab_size"] = tokens.len().into();
    // Trained on less than the base takes.
    config["max_position_embeddings"] = 64.into();
    write(&config, shapes, Some(&tokens), 9)
}

/// A checkpoint of random numbers, with `d2t` of the draft tokens.
fn write(config: &Value, shapes: Vec<(String, Vec<usize>)>, tokens: Option<&[i64]>, seed: u64) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let hidden = config["hidden_size"].as_u64().unwrap();
    let mut rng = StdRng::seed_from_u64(seed);
    let mut stored: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, shape) in shapes {
        let spread = match name.rsplit('.').nth(1) {
            Some(part) if part.contains("norm") => 0.5..1.5,
            // Layers add so little to an embedding that a head which sees little else is right now and then.
            Some("o_proj" | "down_proj") => -0.04..0.04f32,
            Some("q_proj" | "k_proj" | "v_proj") if name.starts_with("midlayer") => -0.04..0.04,
            Some("fc") => -0.1..0.1,
            Some("embed_tokens") => -2.0..2.0,
            _ => -0.5..0.5,
        };
        // Sums over more inputs stay as large.
        let share = match shape[..] {
            [_, _] if !name.contains("embed_tokens") => (HIDDEN as f32 / hidden as f32).sqrt(),
            _ => 1.0,
        };
        let mut random = || share * rng.random_range(spread.clone());
        let mut values: Vec<f32> = (0..shape.iter().product()).map(|_| random()).collect();
        // EAGLE-1's input is the embedding, EAGLE-3's attention a token's look at itself.
        let diagonal = match &name[..] {
            "fc.weight" if shape[1] == 2 * shape[0] => 1.0,
            "midlayer.self_attn.q_proj.weight" | "midlayer.self_attn.o_proj.weight" => 4.0,
            "midlayer.self_attn.k_proj.weight" | "midlayer.self_attn.v_proj.weight" => 1.0,
            _ => 0.0,
        };
        if let [_, inputs] = shape[..] {
            values.chunks_mut(inputs).enumerate().for_each(|(row, values)| values[row % inputs] += diagonal);
        }
        let bytes = values.into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes());
        stored.push((name, Dtype::BF16, shape, bytes.collect()));
    }
    if let Some(tokens) = tokens {
        let differences = (0..).zip(tokens).flat_map(|(index, token): (i64, _)| (token - index).to_le_bytes());
        stored.push(("d2t".into(), Dtype::I64, vec![tokens.len()], differences.collect()));
        stored.push(("t2d".into(), Dtype::BOOL, vec![VOCAB], vec![1; VOCAB]));
    }
    let views = stored
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

/// Greedy and sampled with seeds, some with penalties.
fn jobs() -> Vec<Job> {
    let mut rng = StdRng::seed_from_u64(78);
    (0..8u64)
        .map(|i| Job {
            prompt: (0..1 + i as usize * 4).map(|_| rng.random_range(0..VOCAB as TokenId)).collect(),
            sampling: SamplingParams {
                temperature: [0.0, 0.9][i as usize % 2],
                top_p: 0.95,
                repetition_penalty: if i % 4 == 3 { 1.2 } else { 1.0 },
                seed: i,
                max_tokens: 24,
                ..SamplingParams::default()
            },
            ..Job::default()
        })
        .collect()
}

fn worker(base: &Path, head: Option<&Path>, adaptive: bool, quant: Option<&str>) -> WorkerConfig {
    let mut config = WorkerConfig { model_dir: base.into(), block_size: BLOCK as u32, ..small() };
    if let Some(head) = head {
        config.speculate = SpeculateConfig {
            method: "eagle".into(),
            max_draft_token_num: 3,
            adaptive,
            draft_dir: Some(head.into()),
            draft_quant_type: quant.map(str::to_owned),
            ..SpeculateConfig::default()
        };
    }
    config
}

fn engine(config: WorkerConfig) -> Engine {
    Engine::new(spawn(config, Box::new(|_| {})).unwrap())
}

#[test]
fn text_is_the_same_with_a_head_in_any_company() {
    let heads = [eagle(HIDDEN), eagle3(HIDDEN)];
    for family in ["llama", "qwen2"] {
        let base = base(family, HIDDEN);
        let alone = engine(worker(base.path(), None, false, None)).serve(&jobs(), Schedule::alone());
        assert!(alone.iter().all(|outcome| outcome.error.is_none()) && alone[0].tokens != alone[2].tokens);
        for (kind, head) in ["eagle", "eagle3"].into_iter().zip(&heads) {
            let settings = [(false, None), (false, Some("weight_only_int8")), (true, None)];
            for (adaptive, quant) in settings.into_iter().take(if family == "llama" { 3 } else { 1 }) {
                let mut drafting = engine(worker(base.path(), Some(head.path()), adaptive, quant));
                for schedule in [Schedule::together(), Schedule::wild(1), Schedule::wild(2)] {
                    assert_eq!(drafting.serve(&jobs(), schedule), alone, "{family} {adaptive} {quant:?} {schedule:?}");
                }
                let (num_held, num_drafts) = (drafting.num_held, drafting.num_drafts);
                println!("{family} {kind} {adaptive} {quant:?}: {num_held} of {num_drafts} drafts held");
                assert!(adaptive || num_drafts > 300);
                assert!(adaptive || num_held > 20, "right now and then");
            }
        }
    }
}

/// Each step's tokens of one sequence, with the sum over them and the drafts that follow: its first `num_cached` tokens are found in
/// `blocks`.
fn run(
    engine: &mut Engine,
    id: &mut u64,
    slot: u32,
    tokens: &[TokenId],
    num_cached: usize,
    blocks: &[u32],
) -> Vec<(Vec<TokenId>, u64)> {
    let admit = Admit {
        slot: Slot(slot),
        tokens: tokens.to_vec(),
        num_prompt: tokens.len() as u32,
        num_cached: num_cached as u32,
        blocks: blocks.iter().copied().map(BlockId).collect(),
        sampling: SamplingParams { max_tokens: 12, ..SamplingParams::default() },
        grammar: None,
        fork_of: None,
        adapter: None,
    };
    let row = |num_tokens, num_drafts| Row {
        slot: Slot(slot),
        num_tokens,
        num_drafts,
        new_blocks: Vec::new(),
        wants: Wants::default(),
    };
    let mut accepted = Vec::new();
    let mut step =
        Step { admit: vec![admit], rows: vec![row((tokens.len() - num_cached) as u32, 0)], ..Step::default() };
    loop {
        *id += 1;
        step.id = *id;
        let result = engine.step(&step).remove(0);
        accepted.push((result.accepted, engine.checksum));
        if result.ended.is_some() {
            break;
        }
        step = Step { rows: vec![row(1 + result.num_drafts, result.num_drafts)], ..Step::default() };
    }
    *id += 1;
    engine.step(&Step { id: *id, release: vec![Slot(slot)], ..Step::default() });
    accepted
}

#[test]
fn a_prefix_that_is_found_gets_the_drafts_of_one_that_was_computed() {
    let base = base("llama", HIDDEN);
    for head in [eagle(HIDDEN), eagle3(HIDDEN)] {
        let mut engine = engine(worker(base.path(), Some(head.path()), false, None));
        let prompt: Vec<TokenId> = (20..70).collect();
        let mut id = 0;
        let own: Vec<u32> = (0..8).collect();
        let whole = run(&mut engine, &mut id, 0, &prompt, 0, &own);
        // The drafts are the same, step by step, only if the head's entries and what it goes on from are.
        for (num_cached, others) in [(16, 10..20), (32, 20..30), (48, 30..40)] {
            let shared = &own[..num_cached / BLOCK];
            let blocks: Vec<u32> = shared.iter().copied().chain(others).take(8).collect();
            assert_eq!(run(&mut engine, &mut id, 1, &prompt, num_cached, &blocks), whole, "{num_cached} found");
        }
    }
}

#[test]
fn what_cannot_be_used_says_how_the_base_is_served() {
    let (base, head, mtp) = (base("llama", HIDDEN), eagle3(HIDDEN), base("llama", HIDDEN));
    let refused = |head: Option<&Path>, method: &str| {
        let mut config = worker(base.path(), Some(Path::new("")), false, None);
        config.speculate =
            SpeculateConfig { method: method.into(), draft_dir: head.map(Into::into), ..config.speculate };
        let error = spawn(config, Box::new(|_| {})).map(|_| ()).unwrap_err();
        let dir = head.map(|head| head.display().to_string()).unwrap_or_default();
        crate::error::chain(&error).replace(&dir, "HEAD")
    };
    let without = "the draft model cannot be used; speculate_method none serves without it";
    assert_eq!(
        refused(Some(head.path()), "mtp"),
        format!("{without}: draft HEAD: it is an EAGLE-3 head, which speculate_method eagle is for, not mtp")
    );
    assert_eq!(
        refused(Some(mtp.path()), "eagle"),
        format!("{without}: HEAD has no tensor fc.weight: it is not an EAGLE head")
    );
    let error = spawn(
        WorkerConfig {
            speculate: SpeculateConfig { method: "eagle".into(), ..SpeculateConfig::default() },
            ..worker(base.path(), None, false, None)
        },
        Box::new(|_| {}),
    );
    assert_eq!(
        error.map(|_| ()).unwrap_err().to_string(),
        "draft_model_name_or_path is not given, must be the folder of an EAGLE head; speculate_method none serves without one"
    );
}

#[test]
#[ignore = "needs a GPU"]
fn a_gpu_goes_on_as_without_a_head() {
    let base = base("llama", GPU_HIDDEN);
    let mut jobs = jobs();
    jobs.iter_mut().for_each(|job| job.sampling = SamplingParams { max_tokens: 40, ..SamplingParams::default() });
    let on = |device, head: Option<&Path>, eager| {
        // In a fixed order of additions, so that the text is the same to the last token.
        let config = WorkerConfig { device, eager, deterministic: true, ..worker(base.path(), head, false, None) };
        let config = WorkerConfig { kv_cache_bytes: 64 << 20, dtype: ActivationDtype::Bfloat16, ..config };
        let mut engine = engine(config);
        (engine.serve(&jobs, Schedule::together()), engine.num_drafts, engine.num_held)
    };
    let gpu = DeviceKind::Cuda(0);
    let (plain, ..) = on(gpu, None, false);
    for head in [eagle(GPU_HIDDEN), eagle3(GPU_HIDDEN)] {
        let head = Some(head.path());
        let (drafted, num_drafts, num_held) = on(gpu, head, false);
        assert_eq!(drafted, plain);
        assert_eq!(on(gpu, head, true), (drafted, num_drafts, num_held), "recorded and op by op");
        let (_, drafts_on_cpu, held_on_cpu) = on(DeviceKind::Cpu, head, false);
        println!("{num_held} of {num_drafts} drafts held, on the CPU {held_on_cpu} of {drafts_on_cpu}");
        let share = |held: usize, drafts: usize| held as f64 / drafts as f64;
        let apart = (share(num_held, num_drafts) - share(held_on_cpu, drafts_on_cpu)).abs();
        assert!(num_held > 20 && apart < 0.03, "{apart}");
    }
}
