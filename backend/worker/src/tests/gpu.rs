//! A rank on a GPU: recorded steps against steps op by op, and a real checkpoint against the CPU.

use std::path::Path;

use drafthorse_control::{Grammar, Logprobs, SamplingParams, TokenId, Wants};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;

use super::ahead::serve_ahead;
use super::engine::{Engine, Job, Schedule, small};
use crate::config::{ActivationDtype, DeviceKind, WorkerConfig};
use crate::graphs::SIZES;
use crate::rank::spawn;
use crate::spec::SpeculateConfig;

/// The folder of a checkpoint, for the tests that want a real one, and that of an MTP module for it.
pub(super) const CHECKPOINT: &str = "DRAFTHORSE_TEST_CHECKPOINT";
pub(super) const DRAFT: &str = "DRAFTHORSE_TEST_DRAFT";

pub(super) fn on_gpu(dir: &Path) -> WorkerConfig {
    WorkerConfig {
        model_dir: dir.into(),
        device: DeviceKind::Cuda(0),
        block_size: 16,
        kv_cache_bytes: 256 << 20,
        ..small()
    }
}

fn engine(dir: &Path, change: impl FnOnce(&mut WorkerConfig)) -> Engine {
    let mut config = on_gpu(dir);
    change(&mut config);
    Engine::new(spawn(config, Box::new(|_| {})).unwrap())
}

fn jobs(vocab: TokenId, max_tokens: u32) -> Vec<Job> {
    let mut rng = StdRng::seed_from_u64(78);
    (0..8u64)
        .map(|i| Job {
            prompt: (0..3 + i as usize * 9).map(|_| rng.random_range(0..vocab)).collect(),
            sampling: SamplingParams {
                temperature: [0.0, 0.9][i as usize % 2],
                top_p: 0.95,
                top_k: 40,
                seed: i,
                max_tokens: max_tokens + 3 * i as u32,
                ..SamplingParams::default()
            },
            ..Job::default()
        })
        .collect()
}

/// A folder with the config of a small Llama for so many positions, whose weights are made up.
pub(super) fn made_up(positions: u32) -> TempDir {
    made_up_with(positions, "{}")
}

/// The same with changes over the config.
fn made_up_with(positions: u32, changes: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 1000,
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": positions, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    });
    let changes: serde_json::Map<_, _> = serde_json::from_str(changes).unwrap();
    config.as_object_mut().unwrap().extend(changes);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

#[test]
#[ignore = "needs a GPU"]
fn recorded_steps_give_the_bits_of_steps_op_by_op() {
    let dir = made_up(512);
    let random = |eager| engine(dir.path(), |config| (config.random_weights, config.eager) = (true, eager));
    let jobs = jobs(1000, 20);
    let op_by_op = random(true).serve(&jobs, Schedule::together());
    assert!(op_by_op.iter().all(|outcome| outcome.tokens.len() >= 20 && outcome.error.is_none()));
    assert_ne!(op_by_op[0].tokens[..8], op_by_op[2].tokens[..8]);
    let mut recorded = random(false);
    assert_eq!(recorded.serve(&jobs, Schedule::together()), op_by_op);
    // Now every size is recorded.
    assert_eq!(recorded.serve(&jobs, Schedule::together()), op_by_op);
    assert_eq!(recorded.serve(&jobs, Schedule::wild(1)), random(true).serve(&jobs, Schedule::wild(1)));
}

#[test]
#[ignore = "needs a GPU"]
fn families_whose_layers_choose_are_recorded_as_others_are() {
    for changes in [
        r#"{"architectures": ["Qwen3ForCausalLM"], "head_dim": 128}"#,
        r#"{"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}"#,
        r#"{"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 96,
            "shared_expert_intermediate_size": 200}"#,
        r#"{"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 96,
            "norm_topk_prob": true}"#,
    ] {
        let dir = made_up_with(512, changes);
        let random = |eager| engine(dir.path(), |config| (config.random_weights, config.eager) = (true, eager));
        let jobs = jobs(1000, 20);
        let op_by_op = random(true).serve(&jobs, Schedule::together());
        assert!(op_by_op.iter().all(|outcome| outcome.tokens.len() >= 20 && outcome.error.is_none()), "{changes}");
        assert_ne!(op_by_op[0].tokens[..8], op_by_op[2].tokens[..8], "{changes}");
        let mut recorded = random(false);
        for run in 0..3 {
            assert!(recorded.serve(&jobs, Schedule::together()) == op_by_op, "{changes}: run {run}");
        }
        assert!(recorded.serve(&jobs, Schedule::wild(1)) == random(true).serve(&jobs, Schedule::wild(1)), "{changes}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_size_gives_the_same_bits_recorded_op_by_op_and_again() {
    let dir = made_up(512);
    let random = |eager| {
        let change = |config: &mut WorkerConfig| {
            (config.random_weights, config.eager) = (true, eager);
            (config.max_num_seqs, config.max_num_batched_tokens) = (512, 4096);
        };
        let mut engine = engine(dir.path(), change);
        (engine.max_seqs, engine.max_tokens) = (512, 4096);
        engine
    };
    let (mut recorded, mut op_by_op) = (random(false), random(true));
    for size in SIZES.into_iter().chain(SIZES.into_iter().skip(2).map(|size| size - 1)) {
        let job = |i: usize| Job {
            prompt: (0..1 + i % 7).map(|at| (i * 37 + at * 11) as TokenId % 1000).collect(),
            sampling: SamplingParams {
                temperature: [0.0, 0.8][i % 2],
                seed: i as u64,
                max_tokens: 6,
                ..SamplingParams::default()
            },
            ..Job::default()
        };
        let jobs: Vec<Job> = (0..size).map(job).collect();
        let want = op_by_op.serve(&jobs, Schedule::together());
        assert!(want.iter().all(|outcome| outcome.tokens.len() == 6 && outcome.error.is_none()));
        for run in 0..3 {
            assert!(recorded.serve(&jobs, Schedule::together()) == want, "{size} sequences, run {run}");
        }
        assert!(op_by_op.serve(&jobs, Schedule::together()) == want, "{size} sequences, op by op again");
    }
    println!("sizes {SIZES:?}: recorded steps, steps op by op and second runs have the same bits");
}

#[test]
#[ignore = "needs a GPU"]
fn steps_with_masks_are_recorded_too_and_run_ahead() {
    let dir = made_up(512);
    // All but those that want penalties or log-probabilities.
    let jobs: Vec<Job> = super::ahead::jobs(1000)
        .into_iter()
        .enumerate()
        .filter(|(i, _)| ![2, 5].contains(i))
        .map(|(_, job)| job)
        .collect();
    let random = |eager| {
        let change = |config: &mut WorkerConfig| (config.random_weights, config.eager) = (true, eager);
        engine(dir.path(), change)
    };
    let want = random(true).serve(&jobs, Schedule::together());
    let allowed = |job: &Job, token: TokenId| match &job.grammar {
        // Tokens of the letters; see `guided::token_bytes`.
        Some(Grammar::Regex(regex)) if regex.starts_with('[') => (66..=71).contains(&token),
        Some(_) => (89..=91).contains(&token),
        None if job.sampling.allowed_tokens.is_empty() => token >= 40 || job.sampling.bad_words.is_empty(),
        None => job.sampling.allowed_tokens.contains(&token),
    };
    for (job, outcome) in jobs.iter().zip(&want) {
        assert!(outcome.error.is_none() && !outcome.tokens.is_empty(), "{outcome:?}");
        assert!(outcome.tokens.iter().all(|&token| allowed(job, token)), "{:?} of {job:?}", outcome.tokens);
    }
    let mut recorded = random(false);
    for run in 0..3 {
        assert_eq!(recorded.serve(&jobs, Schedule::together()), want, "run {run}");
    }
    let ahead = |eager| {
        let config = WorkerConfig { eager, random_weights: true, ..on_gpu(dir.path()) };
        serve_ahead(spawn(config, Box::new(|_| {})).unwrap(), &jobs, 11)
    };
    let got = ahead(false);
    assert_eq!(ahead(true), got);
    for (job, tokens) in jobs.iter().zip(&got) {
        assert!(!tokens.is_empty() && tokens.iter().all(|&token| allowed(job, token)), "{tokens:?} of {job:?}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_step_behind_another_takes_its_tokens_from_the_device() {
    let dir = made_up(512);
    let jobs = super::ahead::jobs(1000);
    let config = WorkerConfig { random_weights: true, ..on_gpu(dir.path()) };
    let ahead = |seed| serve_ahead(spawn(config.clone(), Box::new(|_| {})).unwrap(), &jobs, seed);
    let first = ahead(1);
    assert!(first.iter().all(|tokens| !tokens.is_empty()));
    assert_eq!(ahead(1), first, "the same steps, another run");
    let (ready, link) = spawn(config.clone(), Box::new(|_| {})).unwrap();
    let one_by_one = Engine::new((ready, link)).serve(&jobs, Schedule::alone());
    // Other batches round otherwise, so near-ties may fall otherwise, and all that follows them.
    let alike = first.iter().zip(&one_by_one).filter(|(tokens, outcome)| tokens[..1] == outcome.tokens[..1]).count();
    assert!(alike + 2 >= jobs.len(), "{alike} of {} first tokens alike", jobs.len());
}

#[test]
#[ignore = "needs a GPU, and the folder of a checkpoint in DRAFTHORSE_TEST_CHECKPOINT"]
fn a_checkpoint_goes_on_as_on_the_cpu() {
    let dir = std::env::var_os(CHECKPOINT).expect("DRAFTHORSE_TEST_CHECKPOINT names a folder");
    let dir = Path::new(&dir);
    let mut jobs: Vec<Job> = jobs(40_000, 48).into_iter().step_by(2).collect();
    let on_gpu = engine(dir, |_| {}).serve(&jobs, Schedule::together());
    for job in &mut jobs {
        job.wants = Wants { logprobs: Logprobs::Top(5), ..Wants::default() };
    }
    let told = engine(dir, |_| {}).serve(&jobs, Schedule::together());
    let cpu = |config: &mut WorkerConfig| {
        (config.device, config.dtype) = (DeviceKind::Cpu, ActivationDtype::Bfloat16);
    };
    let on_cpu = engine(dir, cpu).serve(&jobs, Schedule::together());
    let mut agreed = 0;
    for (i, want) in on_cpu.iter().enumerate() {
        for got in [&on_gpu[i], &told[i]] {
            let same = want.tokens.iter().zip(&got.tokens).take_while(|(want, got)| want == got).count();
            agreed += same;
            if same < want.tokens.len() {
                let at = &want.logprobs[same];
                let found = at.top.iter().find(|top| top.token == got.tokens[same]);
                let lost = found.map_or(f32::INFINITY, |top| at.token.logprob - top.logprob);
                assert!(
                    lost < 0.2,
                    "sequence {i} leaves the CPU's after {same} tokens for one that is {lost} less likely"
                );
            }
        }
        let logprobs =
            told[i].logprobs.iter().zip(&want.logprobs).take_while(|(got, want)| got.token.token == want.token.token);
        for (got, want) in logprobs {
            let apart = (got.token.logprob - want.token.logprob).abs();
            assert!(apart < 0.3, "log-probability {} on the GPU, {} on the CPU", got.token.logprob, want.token.logprob);
        }
    }
    println!("{agreed} tokens alike of {}", 2 * on_cpu.iter().map(|outcome| outcome.tokens.len()).sum::<usize>());
    assert!(agreed > 0);
}

#[test]
#[ignore = "needs a GPU, and the folders of a checkpoint and of a draft for it in DRAFTHORSE_TEST_CHECKPOINT and DRAFTHORSE_TEST_DRAFT"]
fn a_checkpoint_with_drafts_goes_on_as_without() {
    let folder = |name| std::env::var_os(name).unwrap_or_else(|| panic!("{name} names a folder"));
    let (dir, draft) = (folder(CHECKPOINT), folder(DRAFT));
    let mut jobs: Vec<Job> = jobs(40_000, 60);
    for job in &mut jobs {
        job.sampling.temperature = 0.0;
    }
    let run = |device, num_drafts, eager| {
        let change = |config: &mut WorkerConfig| {
            (config.device, config.dtype, config.eager) = (device, ActivationDtype::Bfloat16, eager);
            if num_drafts > 0 {
                config.speculate = SpeculateConfig {
                    method: "mtp".into(),
                    max_draft_token_num: num_drafts,
                    adaptive: false,
                    draft_dir: Some(draft.clone().into()),
                    ..SpeculateConfig::default()
                };
            }
        };
        let mut engine = engine(Path::new(&dir), change);
        let outcomes = engine.serve(&jobs, Schedule::together());
        (outcomes, engine.num_held as f64 / engine.num_drafts.max(1) as f64)
    };
    let (plain, _) = run(DeviceKind::Cuda(0), 0, false);
    let (_, held_on_cpu) = run(DeviceKind::Cpu, 3, false);
    let (_, held_op_by_op) = run(DeviceKind::Cuda(0), 3, true);
    for num_drafts in [1, 3] {
        let (drafted, held) = run(DeviceKind::Cuda(0), num_drafts, false);
        let mut alike = 0;
        for (drafted, plain) in drafted.iter().zip(&plain) {
            assert!(drafted.error.is_none() && drafted.tokens.len() == plain.tokens.len());
            alike += drafted.tokens.iter().zip(&plain.tokens).take_while(|(drafted, plain)| drafted == plain).count();
        }
        let all: usize = plain.iter().map(|outcome| outcome.tokens.len()).sum();
        println!(
            "{num_drafts} drafts: {alike} tokens of {all} before the first that differs, {held:.3} of the drafts held"
        );
        // More rows are rounded otherwise, so that near-ties may fall otherwise, and all that follows them.
        assert!(alike * 2 > all, "{alike} of {all} tokens");
        assert!(num_drafts == 1 || (held - held_on_cpu).abs() < 0.1, "{held} held, on the CPU {held_on_cpu}");
        let apart = (held - held_op_by_op).abs();
        assert!(num_drafts == 1 || apart < 0.03, "{held} held, with passes run op by op {held_op_by_op}");
    }
}
