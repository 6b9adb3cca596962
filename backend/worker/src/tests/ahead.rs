//! Two steps in flight: the second is planned, and on a GPU runs, before the tokens of the first are known.

use std::collections::VecDeque;

use drafthorse_control::{
    Admit, BlockId, ChannelLink, Grammar, Link, Logprobs, Ready, Row, SamplingParams, Slot, Step, TokenId, Wants,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::engine::{Engine, Job, Schedule, small};
use super::fake;
use super::rank;
use crate::config::WorkerConfig;

struct Sequence {
    /// The prompt and what came back.
    tokens: Vec<TokenId>,
    /// Tokens planned to run since it took its slot; 0 without one.
    planned: usize,
    /// Rows in flight that will give a token.
    owed: usize,
    ended: bool,
}

/// Runs all jobs at once, each in the slot and the blocks of its number. By the dice of `seed` rows are left out and sequences lose
/// their slots while a row of theirs is in flight.
pub(super) fn serve_ahead((ready, mut link): (Ready, ChannelLink), jobs: &[Job], seed: u64) -> Vec<Vec<TokenId>> {
    assert_eq!(ready.pipeline_depth, 2);
    let mut rng = StdRng::seed_from_u64(seed);
    let longest = jobs.iter().map(|job| job.prompt.len() as u32 + job.sampling.max_tokens).max().unwrap();
    let blocks_each = longest.div_ceil(ready.block_size);
    let new = |job: &Job| Sequence { tokens: job.prompt.clone(), planned: 0, owed: 0, ended: false };
    let mut sequences: Vec<Sequence> = jobs.iter().map(new).collect();
    let mut in_flight: VecDeque<Vec<(usize, bool)>> = VecDeque::new();
    let mut release = Vec::new();
    let mut id = 0;
    loop {
        while in_flight.len() < 2 {
            let mut step = Step { release: std::mem::take(&mut release), ..Step::default() };
            let mut rows = Vec::new();
            for (index, (sequence, job)) in sequences.iter_mut().zip(jobs).enumerate() {
                let slot = Slot(index as u32);
                let known = sequence.tokens.len() + sequence.owed;
                let finished = known >= job.prompt.len() + job.sampling.max_tokens as usize;
                if sequence.ended || finished || rng.random_bool(0.2) {
                    continue;
                }
                let num_tokens = match sequence.planned {
                    0 if sequence.owed > 0 => continue,
                    0 => {
                        step.admit.push(Admit {
                            slot,
                            tokens: sequence.tokens.clone(),
                            num_prompt: job.prompt.len() as u32,
                            num_cached: 0,
                            blocks: (0..blocks_each).map(|i| BlockId(index as u32 * blocks_each + i)).collect(),
                            sampling: job.sampling.clone(),
                            grammar: job.grammar.clone(),
                            fork_of: None,
                            adapter: None,
                        });
                        rng.random_range(1..=known)
                    }
                    planned => rng.random_range(1..=known - planned),
                };
                sequence.planned += num_tokens;
                let yields = sequence.planned == known;
                sequence.owed += usize::from(yields);
                rows.push((index, yields));
                let wants = job.wants;
                step.rows.push(Row { slot, num_tokens: num_tokens as u32, num_drafts: 0, new_blocks: vec![], wants });
                if rng.random_bool(0.05) {
                    release.push(slot);
                    sequence.planned = 0;
                }
            }
            if step.rows.is_empty() && sequences.iter().all(|sequence| sequence.ended || sequence.owed > 0) {
                release.append(&mut step.release);
                break;
            }
            id += 1;
            link.send(&Step { id, ..step }).unwrap();
            in_flight.push_back(rows);
        }
        let Some(rows) = in_flight.pop_front() else { break };
        let result = link.recv().unwrap();
        for ((index, yields), row) in rows.into_iter().zip(result.rows) {
            let sequence = &mut sequences[index];
            let lives = !sequence.ended && row.error.is_none();
            assert_eq!(row.accepted.len(), usize::from(yields && lives), "sequence {index}");
            sequence.owed -= usize::from(yields);
            sequence.tokens.extend(row.accepted);
            sequence.ended |= row.ended.is_some() || row.error.is_some();
        }
    }
    sequences.into_iter().zip(jobs).map(|(sequence, job)| sequence.tokens[job.prompt.len()..].to_vec()).collect()
}

/// Jobs of every kind: greedy, sampled, with stop tokens, by masks, and with penalties or log-probabilities, which cannot run ahead.
pub(super) fn jobs(vocab: TokenId) -> Vec<Job> {
    let mut rng = StdRng::seed_from_u64(5);
    let job = |i: u64| Job {
        prompt: (0..1 + i * 3).map(|_| rng.random_range(0..vocab)).collect(),
        sampling: SamplingParams {
            temperature: [0.0, 0.9][i as usize % 2],
            seed: i,
            max_tokens: 10 + 3 * i as u32,
            stop_tokens: if i == 3 { (0..vocab / 8).collect() } else { vec![] },
            presence_penalty: if i == 5 { 0.5 } else { 0.0 },
            min_tokens: if i == 6 { 4 } else { 0 },
            bad_words: if i == 1 { (0..40).map(|t| vec![t]).chain([vec![50, 51]]).collect() } else { vec![] },
            allowed_tokens: if i == 0 { (20..60).collect() } else { vec![] },
            ..SamplingParams::default()
        },
        grammar: [4, 7].contains(&i).then(|| Grammar::Regex(["[a-f]{3,30}", "(xy|z)+"][i as usize % 2].into())),
        wants: Wants { logprobs: if i == 2 { Logprobs::Top(2) } else { Logprobs::None }, ..Wants::default() },
    };
    (0..8).map(job).collect()
}

#[test]
fn a_step_behind_another_gives_the_tokens_of_steps_one_by_one() {
    let run = |pipeline_depth, jobs: &[Job]| {
        let config = WorkerConfig { pipeline_depth: Some(pipeline_depth), ..small() };
        let rank = rank(config, fake::network, None);
        match pipeline_depth {
            1 => Engine::new(rank).serve(jobs, Schedule::alone()).into_iter().map(|outcome| outcome.tokens).collect(),
            _ => serve_ahead(rank, jobs, jobs.len() as u64),
        }
    };
    let jobs = jobs(fake::VOCAB as TokenId);
    let want: Vec<Vec<TokenId>> = run(1, &jobs);
    assert!(want[3].len() < jobs[3].sampling.max_tokens as usize, "no stop token came");
    assert_eq!(run(2, &jobs), want);
    assert_eq!(run(2, &jobs[..2]), want[..2], "some by masks");
    let plain = [jobs[3].clone(), jobs[6].clone(), jobs[4].clone()];
    assert_eq!(run(2, &plain), [3, 6, 4].map(|i| want[i].clone()));
}

#[test]
fn a_grammar_that_is_refused_ends_its_sequence_alone_while_others_run_ahead() {
    let mut jobs = jobs(fake::VOCAB as TokenId);
    let want = serve_ahead(rank(WorkerConfig { pipeline_depth: Some(2), ..small() }, fake::network, None), &jobs, 3);
    jobs[4].grammar = Some(Grammar::Regex("(".into()));
    let got = serve_ahead(rank(WorkerConfig { pipeline_depth: Some(2), ..small() }, fake::network, None), &jobs, 3);
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert_eq!(got, if i == 4 { &[][..] } else { want }, "sequence {i}");
    }
}
