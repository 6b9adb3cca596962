//! Drafts of a model with a KV cache of its own: it knows what comes as long as every entry it reads is the right one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use drafthorse_control::{Admit, BlockId, Row, SamplingParams, Slot, Step, TokenId, Wants};

use super::engine::{Engine, Job, Schedule};
use super::fake::{POISON, hash};
use super::fake_drafter::{DRAFTS, drafting_engine, is_wrong, tapping_engine};
use super::fake_engine;
use super::serving::mixed_jobs;

/// The mixed jobs, each the likeliest tokens alone.
fn greedy_jobs() -> Vec<Job> {
    let mut jobs = mixed_jobs();
    for job in &mut jobs {
        let sampling = &job.sampling;
        let (max_tokens, logit_bias) = (sampling.max_tokens, sampling.logit_bias.clone());
        job.sampling = SamplingParams { max_tokens, logit_bias, ..SamplingParams::default() };
    }
    jobs
}

#[test]
fn a_drafter_that_knows_the_target_is_always_right() {
    let jobs = greedy_jobs();
    let plain = fake_engine(None).serve(&jobs, Schedule::alone());
    let (mut engine, torn) = drafting_engine(0);
    assert_eq!(engine.serve(&jobs, Schedule::alone()), plain);
    assert_eq!(engine.num_held, engine.num_drafts);
    // One step for the prompt and its token, then all drafts and one more at a time.
    let steps = |job: &Job| 1 + (job.sampling.max_tokens as usize - 1).div_ceil(DRAFTS as usize + 1);
    assert_eq!(engine.num_steps, jobs.iter().map(steps).sum::<usize>());
    for schedule in (0..20).map(Schedule::wild).chain([Schedule::together()]) {
        assert_eq!(engine.serve(&jobs, schedule), plain, "{schedule:?}");
        assert_eq!(engine.num_held, engine.num_drafts, "{schedule:?}");
    }
    assert_eq!(torn.load(Relaxed), 0);
}

#[test]
fn drafts_that_were_wrong_leave_nothing_behind() {
    let jobs = greedy_jobs();
    let plain = fake_engine(None).serve(&jobs, Schedule::alone());
    for wrong_every in [1, 2, 3, 7] {
        let (mut engine, torn) = drafting_engine(wrong_every);
        assert_eq!(engine.serve(&jobs, Schedule::alone()), plain);
        let mut steps = 0;
        for (job, outcome) in jobs.iter().zip(&plain) {
            let all = [&job.prompt[..], &outcome.tokens].concat();
            let mut len = job.prompt.len() + 1;
            steps += 1;
            while len < all.len() {
                let most = (DRAFTS as usize).min(all.len() - len - 1);
                let right = |drafted: &usize| !is_wrong(hash(all[..len + drafted].iter().copied()), wrong_every);
                len += 1 + (0..most).take_while(right).count();
                steps += 1;
            }
        }
        assert_eq!(engine.num_steps, steps, "wrong once in {wrong_every}");
        for seed in 0..8 {
            assert_eq!(engine.serve(&jobs, Schedule::wild(seed)), plain, "seed {seed}");
        }
        assert_eq!(torn.load(Relaxed), 0, "wrong once in {wrong_every}");
    }
}

#[test]
fn sampled_text_with_penalties_and_log_probabilities_is_that_without_drafts() {
    let jobs = mixed_jobs();
    let plain = fake_engine(None).serve(&jobs, Schedule::alone());
    for wrong_every in [0, 2] {
        let (mut engine, torn) = drafting_engine(wrong_every);
        for schedule in (0..20).map(Schedule::wild).chain([Schedule::alone(), Schedule::together()]) {
            assert_eq!(engine.serve(&jobs, schedule), plain, "{schedule:?}");
        }
        assert!(engine.num_held > 0 && engine.num_held < engine.num_drafts);
        assert_eq!(torn.load(Relaxed), 0);
    }
}

#[test]
fn a_drafter_of_several_layers_is_given_them_side_by_side() {
    let jobs = greedy_jobs();
    let plain = fake_engine(None).serve(&jobs, Schedule::alone());
    for (wrong_every, taps) in [(0, vec![2, 3, 5]), (3, vec![1, 7])] {
        let (mut engine, torn) = tapping_engine(wrong_every, taps);
        for schedule in (0..12).map(Schedule::wild).chain([Schedule::alone(), Schedule::together()]) {
            assert_eq!(engine.serve(&jobs, schedule), plain, "{schedule:?}");
        }
        assert!((engine.num_held == engine.num_drafts) == (wrong_every == 0));
        assert_eq!(torn.load(Relaxed), 0);
    }
    let jobs = mixed_jobs();
    let plain = fake_engine(None).serve(&jobs, Schedule::alone());
    let (mut engine, torn) = tapping_engine(2, vec![2, 3, 5]);
    for seed in 0..6 {
        assert_eq!(engine.serve(&jobs, Schedule::wild(seed)), plain, "seed {seed}");
    }
    assert_eq!(torn.load(Relaxed), 0);
}

/// A sequence in `slot` that begins with `blocks`, of which `num_cached` tokens are computed.
fn admit(slot: u32, tokens: &[TokenId], num_cached: u32, blocks: &[u32]) -> Admit {
    Admit {
        slot: Slot(slot),
        tokens: tokens.to_vec(),
        num_prompt: tokens.len() as u32,
        num_cached,
        blocks: blocks.iter().copied().map(BlockId).collect(),
        sampling: SamplingParams { max_tokens: 40, logit_bias: vec![(POISON, -100.0)], ..SamplingParams::default() },
        grammar: None,
        fork_of: None,
        adapter: None,
    }
}

fn row(slot: u32, num_tokens: u32, num_drafts: u32, new_blocks: &[u32]) -> Row {
    let new_blocks = new_blocks.iter().copied().map(BlockId).collect();
    Row { slot: Slot(slot), num_tokens, num_drafts, new_blocks, wants: Wants::default() }
}

#[test]
fn blocks_that_are_found_again_go_on_with_their_entries() {
    for engine in [drafting_engine(0), tapping_engine(0, vec![2, 3, 5])] {
        go_on_with_blocks(engine);
    }
}

fn go_on_with_blocks((mut engine, torn): (Engine, Arc<AtomicUsize>)) {
    let prompt: Vec<TokenId> = (20..34).collect();
    let first = Step {
        id: 1,
        admit: vec![admit(0, &prompt, 0, &[0, 1, 2, 3, 4, 5])],
        rows: vec![row(0, 14, 0, &[])],
        ..Step::default()
    };
    let mut text = prompt.clone();
    text.extend(&engine.step(&first)[0].accepted);
    let second = Step { id: 2, rows: vec![row(0, 4, 3, &[])], ..Step::default() };
    text.extend(&engine.step(&second)[0].accepted);
    assert_eq!(text.len(), 19);

    // The first sequence has 18 tokens computed; another continues its first 8, one all four of its whole blocks.
    let mut id = 2;
    for (slot, num_cached, blocks) in [(1, 8, [0, 1, 10, 11, 12, 13, 14]), (2, 16, [0, 1, 2, 3, 20, 21, 22])] {
        let tokens = &text[..num_cached as usize + 2];
        let mut steps = Vec::new();
        id += 1;
        let admit = admit(slot, tokens, num_cached, &blocks);
        steps.push(Step { id, admit: vec![admit], rows: vec![row(slot, 2, 0, &[])], ..Step::default() });
        id += 1;
        steps.push(Step { id, rows: vec![row(slot, 4, 3, &[])], ..Step::default() });
        let accepted: Vec<usize> = steps.iter().map(|step| engine.step(step)[0].accepted.len()).collect();
        assert_eq!(accepted, [1, 4], "all drafts hold from the first on");
    }
    assert_eq!(torn.load(Relaxed), 0);
}

#[test]
fn what_ended_leaves_whole_blocks_too() {
    let (mut engine, torn) = drafting_engine(0);
    let prompt: Vec<TokenId> = (20..27).collect();
    let mut ends = admit(0, &prompt, 0, &[0, 1, 2]);
    ends.sampling.max_tokens = 1;
    let result = engine.step(&Step { id: 1, admit: vec![ends], rows: vec![row(0, 7, 0, &[])], ..Step::default() });
    assert!(result[0].ended.is_some());
    let next = admit(1, &[&prompt[..], &[50, 51]].concat(), 4, &[0, 10, 11, 12, 13]);
    let step =
        Step { id: 2, release: vec![Slot(0)], admit: vec![next], rows: vec![row(1, 5, 0, &[])], ..Step::default() };
    engine.step(&step);
    assert_eq!(engine.step(&Step { id: 3, rows: vec![row(1, 4, 3, &[])], ..Step::default() })[0].accepted.len(), 4);
    assert_eq!(torn.load(Relaxed), 0);
}
