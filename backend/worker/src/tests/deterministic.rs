//! A deterministic rank on a GPU: the same bits alone and in any batch, however prompts are cut, with any proposer, after any prefix hit.

use std::path::Path;

use drafthorse_control::{Admit, BlockId, Logprobs, Row, SamplingParams, Slot, Step, TokenId, Wants};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::ahead::serve_ahead;
use super::engine::{Engine, Job, Outcome, Schedule};
use super::gpu::{CHECKPOINT, DRAFT, made_up, on_gpu};
use crate::config::WorkerConfig;
use crate::rank::spawn;
use crate::spec::SpeculateConfig;

/// Sequences that run together.
const TOGETHER: u32 = 32;
/// Tokens of a step.
const MOST_TOKENS: u32 = 2048;

fn config(dir: &Path) -> WorkerConfig {
    WorkerConfig {
        deterministic: true,
        max_num_seqs: TOGETHER,
        max_num_batched_tokens: MOST_TOKENS,
        kv_cache_bytes: 2 << 30,
        ..on_gpu(dir)
    }
}

fn engine(config: WorkerConfig) -> Engine {
    let mut engine = Engine::new(spawn(config, Box::new(|_| {})).unwrap());
    (engine.max_seqs, engine.max_tokens) = (TOGETHER, MOST_TOKENS as usize);
    engine
}

/// Short prompts and some of up to `longest` tokens, greedy and sampled.
fn jobs(vocab: TokenId, longest: usize) -> Vec<Job> {
    let mut rng = StdRng::seed_from_u64(79);
    (0..u64::from(TOGETHER))
        .map(|i| {
            let len = if i % 4 == 3 { longest * (i as usize + 1) / TOGETHER as usize } else { 3 + i as usize * 5 };
            // Repetitions, so that n-grams are found.
            let words: Vec<TokenId> = (0..17).map(|_| rng.random_range(0..vocab)).collect();
            Job {
                prompt: (0..len)
                    .map(|at| if at % 3 == 0 { rng.random_range(0..vocab) } else { words[at % 17] })
                    .collect(),
                sampling: SamplingParams {
                    temperature: [0.0, 0.9][i as usize % 2],
                    top_p: 0.95,
                    top_k: [0, 40][i as usize / 2 % 2],
                    seed: i,
                    max_tokens: 6 + i as u32 / 2,
                    ..SamplingParams::default()
                },
                ..Job::default()
            }
        })
        .collect()
}

/// The jobs with the log-probabilities of all tokens, prompts' too: a difference in any logit that matters shows in them.
fn told(jobs: &[Job]) -> Vec<Job> {
    let mut jobs = jobs.to_vec();
    for job in &mut jobs {
        job.wants = Wants { logprobs: Logprobs::Top(20), prompt_logprobs: Logprobs::Top(20) };
    }
    jobs
}

/// Fails with the first sequence that differs, and where.
fn assert_same(label: &str, got: &[Outcome], want: &[Outcome]) {
    assert_eq!(got.len(), want.len(), "{label}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.error.is_none(), "{label}: sequence {i}: {:?}", got.error);
        let same = got.tokens.iter().zip(&want.tokens).take_while(|(got, want)| got == want).count();
        assert!(same == want.tokens.len() && got.tokens.len() == same, "{label}: sequence {i} differs at token {same}");
        for (what, got, want) in
            [("prompt", &got.prompt_logprobs, &want.prompt_logprobs), ("answer", &got.logprobs, &want.logprobs)]
        {
            let same = got.iter().zip(want).take_while(|(got, want)| got == want).count();
            assert!(
                same == want.len() && got.len() == same,
                "{label}: log-probabilities of sequence {i}'s {what} differ at {same}: {:?}, expected {:?}",
                got.get(same).map(|at| at.token),
                want.get(same).map(|at| at.token)
            );
        }
    }
}

/// All ways to run the jobs. Texts without drafts, to compare others with.
fn check(config: &WorkerConfig, jobs: &[Job]) -> Vec<Outcome> {
    let schedules = [
        ("together", Schedule::together()),
        ("together again", Schedule::together()),
        ("chunks of up to 200", Schedule { max_chunk: 200, preempt: 0.01, ..wild(1) }),
    ];
    let mut plain = Vec::new();
    for (what, jobs) in [("tokens", jobs.to_vec()), ("log-probabilities", told(jobs))] {
        let mut engine = engine(config.clone());
        let want = engine.serve(&jobs, Schedule::alone());
        assert!(want.iter().all(|outcome| outcome.error.is_none() && !outcome.tokens.is_empty()));
        if plain.is_empty() {
            // By now decoding steps are recorded.
            assert_same(&format!("{what}, alone again"), &engine.serve(&jobs, Schedule::alone()), &want);
        }
        for (label, schedule) in schedules {
            assert_same(&format!("{what}, {label}"), &engine.serve(&jobs, schedule), &want);
        }
        if plain.is_empty() {
            plain = want;
        } else {
            let tokens =
                |outcomes: &[Outcome]| outcomes.iter().map(|outcome| outcome.tokens.clone()).collect::<Vec<_>>();
            assert!(tokens(&plain) == tokens(&want), "asking for log-probabilities changes tokens");
        }
    }
    let few = &jobs[..8];
    let ahead = serve_ahead(spawn(config.clone(), Box::new(|_| {})).unwrap(), few, 5);
    for (i, (tokens, want)) in ahead.iter().zip(&plain).enumerate() {
        assert!(*tokens == want.tokens, "two steps in flight: sequence {i} differs");
    }
    plain
}

fn wild(seed: u64) -> Schedule {
    Schedule { skip: 0.1, max_running: TOGETHER as usize, ..Schedule::wild(seed) }
}

fn check_drafted(config: &WorkerConfig, speculate: SpeculateConfig, jobs: &[Job], plain: &[Outcome]) {
    let method = speculate.method.clone();
    let mut engine = engine(WorkerConfig { speculate, ..config.clone() });
    let (mut drafts, mut held) = (0, 0);
    let chunked = Schedule { max_chunk: 200, preempt: 0.01, ..wild(4) };
    for (label, schedule) in [("together", Schedule::together()), ("chunked", chunked)] {
        assert_same(&format!("{method}, {label}"), &engine.serve(jobs, schedule), plain);
        (drafts, held) = (engine.num_drafts, engine.num_held);
    }
    assert!(drafts > 0, "there were no drafts");
    println!("{method}: {held} of {drafts} drafts held, all texts the same");
}

/// A sequence that finds its first blocks computed by another goes on as one that computes them itself.
fn check_prefix_hits(config: &WorkerConfig, prompt: &[TokenId]) {
    let mut engine = engine(config.clone());
    let block_size = config.block_size as usize;
    let blocks_each = (prompt.len() + 40).div_ceil(block_size) as u32;
    let sampling = SamplingParams { max_tokens: 20, ..SamplingParams::default() };
    let row = |slot: u32, num_tokens: usize| Row {
        slot: Slot(slot),
        num_tokens: num_tokens as u32,
        num_drafts: 0,
        new_blocks: Vec::new(),
        wants: Wants { logprobs: Logprobs::Top(20), ..Wants::default() },
    };
    let mut id = 0;
    let mut run = |slot: u32, num_cached: usize, blocks: Vec<u32>| {
        let admit = Admit {
            slot: Slot(slot),
            tokens: prompt.to_vec(),
            num_prompt: prompt.len() as u32,
            num_cached: num_cached as u32,
            blocks: blocks.into_iter().map(BlockId).collect(),
            sampling: sampling.clone(),
            grammar: None,
            fork_of: None,
            adapter: None,
        };
        let mut told = Vec::new();
        let mut admit = vec![admit];
        for num_tokens in [prompt.len() - num_cached].into_iter().chain([1; 19]) {
            id += 1;
            let rows = vec![row(slot, num_tokens)];
            let result =
                engine.step(&Step { id, admit: std::mem::take(&mut admit), rows, ..Step::default() }).remove(0);
            told.push((result.accepted, result.logprobs));
        }
        told
    };
    let own = |slot: u32, first: u32| (slot * blocks_each + first..(slot + 1) * blocks_each).collect::<Vec<_>>();
    let cold = run(0, 0, own(0, 0));
    for (slot, num_blocks) in [(1, 1), (2, prompt.len() / block_size / 2), (3, (prompt.len() - 1) / block_size)] {
        let blocks = [(0..num_blocks as u32).collect(), own(slot, num_blocks as u32)].concat();
        assert!(run(slot, num_blocks * block_size, blocks) == cold, "after a hit of {num_blocks} blocks");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn texts_are_the_same_alone_and_in_any_batch() {
    let dir = made_up(4096);
    let config = WorkerConfig { random_weights: true, ..config(dir.path()) };
    let jobs = jobs(1000, 1300);
    let plain = check(&config, &jobs);
    let ngram = SpeculateConfig { method: "ngram".into(), max_draft_token_num: 4, ..SpeculateConfig::default() };
    check_drafted(&config, ngram, &jobs, &plain);
    check_prefix_hits(&config, &jobs[31].prompt);
}

#[test]
#[ignore = "needs a GPU, and the folder of a checkpoint in DRAFTHORSE_TEST_CHECKPOINT"]
fn texts_of_a_checkpoint_are_the_same_alone_and_in_any_batch() {
    let dir = std::env::var_os(CHECKPOINT).expect("DRAFTHORSE_TEST_CHECKPOINT names a folder");
    let config = config(Path::new(&dir));
    let jobs = jobs(40_000, 1300);
    let plain = check(&config, &jobs);
    let ngram = SpeculateConfig { method: "ngram".into(), max_draft_token_num: 4, ..SpeculateConfig::default() };
    check_drafted(&config, ngram, &jobs, &plain);
    if let Some(draft) = std::env::var_os(DRAFT) {
        let mtp = SpeculateConfig {
            method: "mtp".into(),
            max_draft_token_num: 3,
            adaptive: false,
            draft_dir: Some(draft.into()),
            ..SpeculateConfig::default()
        };
        check_drafted(&config, mtp, &jobs, &plain);
    }
    check_prefix_hits(&config, &jobs[31].prompt);
}
