//! Tokens, ends and log-probabilities, alone and in any company.

use drafthorse_control::{FinishReason, Logprobs, RowError, SamplingParams, TokenId, Wants};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::engine::{Engine, Job, Outcome, Schedule, small};
use super::fake::{self, CONTEXT, POISON, VOCAB, argmax, logits_after};
use super::{fake_engine, rank};
use crate::config::WorkerConfig;

fn prompt(seed: u64, len: usize) -> Vec<TokenId> {
    let mut rng = StdRng::seed_from_u64(seed);
    let tokens = std::iter::repeat_with(|| rng.random_range(0..VOCAB as TokenId));
    tokens.filter(|&token| token != POISON).take(len).collect()
}

/// Never picks the token that poisons the fake model.
fn greedy(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, logit_bias: vec![(POISON, -100.0)], ..SamplingParams::default() }
}

/// Jobs of every kind: lengths, ways to sample, penalties, log-probabilities.
pub(super) fn mixed_jobs() -> Vec<Job> {
    (0..12u64)
        .map(|i| Job {
            prompt: prompt(i, 1 + (i as usize * 5) % 23),
            sampling: SamplingParams {
                temperature: [0.0, 0.7, 1.3][i as usize % 3],
                top_k: [0, 5][i as usize % 2],
                top_p: [1.0, 0.9][i as usize / 2 % 2],
                min_p: [0.0, 0.05][i as usize / 4 % 2],
                typical_p: [1.0, 0.8, 1.0][i as usize / 2 % 3],
                repetition_penalty: [1.0, 1.2][i as usize / 3 % 2],
                presence_penalty: [0.0, 0.5][i as usize / 5 % 2],
                frequency_penalty: [0.0, 0.3][i as usize / 6 % 2],
                seed: 1000 + i,
                min_tokens: i as u32 % 4,
                stop_tokens: vec![2, 3, 5],
                ..greedy(20 + i as u32)
            },
            grammar: None,
            wants: Wants {
                logprobs: if i % 4 == 1 { Logprobs::Top(i as u32 % 3) } else { Logprobs::None },
                prompt_logprobs: if i % 5 == 2 { Logprobs::Top(2) } else { Logprobs::None },
            },
        })
        .collect()
}

#[test]
fn greedy_tokens_equal_a_recompute_of_the_whole_history() {
    let mut engine = fake_engine(None);
    for seed in 0..5 {
        let prompt = prompt(seed, 3 + 9 * seed as usize);
        let mut history = prompt.clone();
        for _ in 0..30 {
            let mut logits = logits_after(&history);
            logits[POISON as usize] -= 100.0;
            history.push(argmax(&logits));
        }
        let job = Job { prompt: prompt.clone(), sampling: greedy(30), ..Job::default() };
        let outcome = engine.serve(&[job], Schedule::alone()).remove(0);
        assert_eq!(outcome.tokens, history[prompt.len()..]);
        assert_eq!(outcome.ended, Some(FinishReason::Length));
    }
}

#[test]
fn chunks_company_and_preemption_change_no_bit() {
    let jobs = mixed_jobs();
    let alone = fake_engine(None).serve(&jobs, Schedule::alone());
    assert!(alone.iter().all(|outcome| outcome.ended.is_some()));
    assert!(alone.iter().any(|outcome| outcome.ended == Some(FinishReason::Stop)));
    let mut engine = fake_engine(None);
    assert_eq!(engine.serve(&jobs, Schedule::together()), alone);
    for seed in 0..30 {
        assert_eq!(engine.serve(&jobs, Schedule::wild(seed)), alone, "seed {seed}");
    }
}

#[test]
fn another_seed_picks_other_tokens_and_the_same_seed_the_same() {
    let serve = |seed| {
        let sampling = SamplingParams { temperature: 1.5, seed, ..greedy(20) };
        fake_engine(None).serve(&[Job { prompt: prompt(1, 4), sampling, ..Job::default() }], Schedule::alone())
    };
    assert_eq!(serve(7), serve(7));
    assert_ne!(serve(7)[0].tokens, serve(8)[0].tokens);
}

/// Ends of a sequence whose greedy tokens are known.
fn ends(change: impl FnOnce(&mut SamplingParams, &[TokenId])) -> (Vec<TokenId>, Option<FinishReason>, Vec<TokenId>) {
    let mut engine = fake_engine(None);
    let mut serve = |sampling| {
        engine.serve(&[Job { prompt: prompt(3, 6), sampling, ..Job::default() }], Schedule::alone()).remove(0)
    };
    let free = serve(greedy(12)).tokens;
    let mut sampling = greedy(12);
    change(&mut sampling, &free);
    let Outcome { tokens, ended, .. } = serve(sampling);
    (tokens, ended, free)
}

#[test]
fn a_stop_token_ends_a_sequence_and_is_its_last() {
    let (tokens, ended, free) = ends(|sampling, free| sampling.stop_tokens = vec![free[4], free[7]]);
    let first = free.iter().position(|token| *token == free[4] || *token == free[7]).unwrap();
    assert_eq!(tokens, free[..=first]);
    assert_eq!(ended, Some(FinishReason::Stop));
}

#[test]
fn no_stop_token_is_picked_before_min_tokens() {
    let (tokens, ended, free) = ends(|sampling, free| {
        sampling.stop_tokens = vec![free[0]];
        sampling.min_tokens = 3;
    });
    assert_ne!(tokens[0], free[0], "masked, not ignored");
    assert!(!tokens[..3].contains(&free[0]));
    assert!(ended.is_some());
}

#[test]
fn a_stop_token_at_the_last_place_is_a_stop() {
    let (tokens, ended, free) = ends(|sampling, free| {
        let last = free.len() - 1;
        let first = free.iter().position(|token| *token == free[last]).unwrap();
        sampling.max_tokens = first as u32 + 1;
        sampling.stop_tokens = vec![free[last]];
    });
    assert_eq!(tokens, free[..tokens.len()]);
    assert_eq!(ended, Some(FinishReason::Stop));
}

#[test]
fn a_sequence_ends_where_the_context_does() {
    let mut engine = fake_engine(None);
    let job = Job { prompt: prompt(5, CONTEXT - 4), sampling: greedy(100), ..Job::default() };
    let outcome = engine.serve(&[job], Schedule::alone()).remove(0);
    assert_eq!((outcome.tokens.len(), outcome.ended), (4, Some(FinishReason::Length)));

    let config = WorkerConfig { max_model_len: Some(20), ..small() };
    let mut engine = Engine::new(rank(config, fake::network, None));
    let job = Job { prompt: prompt(5, 12), sampling: greedy(100), ..Job::default() };
    assert_eq!(engine.serve(&[job], Schedule::together())[0].tokens.len(), 8);
}

#[test]
fn a_row_whose_logits_are_not_finite_fails_alone() {
    let mut jobs = mixed_jobs();
    let alone = fake_engine(None).serve(&jobs, Schedule::alone());
    jobs[4].prompt = [prompt(4, 9), vec![POISON]].concat();
    let mut engine = fake_engine(None);
    for schedule in [Schedule::together(), Schedule::wild(3)] {
        let mut outcomes = engine.serve(&jobs, schedule);
        assert_eq!(outcomes[4].error, Some(RowError::NotFinite { position: 10 }));
        assert_eq!((outcomes[4].ended, outcomes[4].tokens.len()), (None, 0));
        outcomes[4] = alone[4].clone();
        assert_eq!(outcomes, alone);
    }
}

/// Log-probabilities in f64, and each token's place.
fn log_softmax(logits: &[f32]) -> Vec<(f64, u32)> {
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    // Of equals the lower index comes first.
    let place = |at: usize| {
        let before = |&(other, &logit): &(usize, &f32)| logit > logits[at] || (logit == logits[at] && other < at);
        1 + logits.iter().enumerate().filter(before).count() as u32
    };
    (0..logits.len()).map(|at| (f64::from(logits[at]) - sum.ln(), place(at))).collect()
}

#[test]
fn log_probabilities_are_the_models_own_whatever_is_done_to_the_logits() {
    let prompt = prompt(8, 11);
    let wants = Wants { logprobs: Logprobs::Top(3), prompt_logprobs: Logprobs::Top(1) };
    let sampling =
        SamplingParams { temperature: 0.8, top_k: 20, repetition_penalty: 1.5, presence_penalty: 1.0, ..greedy(8) };
    let job = Job { prompt: prompt.clone(), sampling, wants, ..Job::default() };
    let schedule = Schedule { max_chunk: 4, ..Schedule::alone() };
    let outcome = fake_engine(None).serve(&[job], schedule).remove(0);

    let all = [&prompt[..], &outcome.tokens].concat();
    assert_eq!(outcome.prompt_logprobs.len(), prompt.len() - 1);
    assert_eq!(outcome.logprobs.len(), outcome.tokens.len());
    let told = outcome.prompt_logprobs.iter().chain(&outcome.logprobs);
    for (position, told) in (1..).zip(told) {
        let want = log_softmax(&logits_after(&all[..position]));
        assert_eq!(told.token.token, all[position]);
        assert_eq!(told.top.len(), if position < prompt.len() { 1 } else { 3 });
        for ranked in told.top.iter().chain([&told.token]) {
            let (logprob, place) = want[ranked.token as usize];
            assert!((f64::from(ranked.logprob) - logprob).abs() < 1e-4, "{ranked:?} at {position}, want {logprob}");
            assert_eq!(ranked.rank, place);
        }
        let places: Vec<u32> = told.top.iter().map(|ranked| ranked.rank).collect();
        assert!(places.is_sorted() && places[0] == 1);
    }
}

#[test]
fn penalties_and_biases_move_tokens() {
    let mut engine = fake_engine(None);
    let mut serve = |change: fn(&mut SamplingParams)| {
        let mut sampling = greedy(60);
        change(&mut sampling);
        engine.serve(&[Job { prompt: prompt(3, 6), sampling, ..Job::default() }], Schedule::alone()).remove(0).tokens
    };
    let distinct = |tokens: &[TokenId]| {
        let mut tokens = tokens.to_vec();
        tokens.sort_unstable();
        tokens.dedup();
        tokens.len()
    };
    let free = serve(|_| {});
    assert!(distinct(&free) < 60);
    assert_eq!(distinct(&serve(|sampling| sampling.presence_penalty = 100.0)), 60, "no token twice");
    assert_eq!(distinct(&serve(|sampling| sampling.frequency_penalty = 100.0)), 60);
    assert!(distinct(&serve(|sampling| sampling.repetition_penalty = 3.0)) > distinct(&free));
    assert_eq!(serve(|sampling| sampling.logit_bias.push((42, 100.0))), [42; 60]);
}
