//! While drafts do not pay, steps run ahead as without a drafter.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use drafthorse_control::{Admit, BlockId, ChannelLink, Link, Ready, Row, SamplingParams, Slot, Step, TokenId, Wants};

use super::engine::{Engine, Job, Schedule, small};
use super::fake_drafter::{DRAFTS, FakeDrafter, drafting_rank};
use super::fake_engine;
use crate::config::WorkerConfig;

/// Whose drafts are never right and take far longer than a step.
fn useless() -> FakeDrafter {
    FakeDrafter { wrong_every: 1, takes: Duration::from_millis(3), ..FakeDrafter::default() }
}

fn two_at_once() -> WorkerConfig {
    WorkerConfig { pipeline_depth: Some(2), ..small() }
}

fn admit(slot: u32, prompt: &[TokenId], num_cached: u32, blocks: Vec<u32>, max_tokens: u32) -> Admit {
    Admit {
        slot: Slot(slot),
        tokens: prompt.to_vec(),
        num_prompt: prompt.len() as u32,
        num_cached,
        blocks: blocks.into_iter().map(BlockId).collect(),
        sampling: SamplingParams { max_tokens, ..SamplingParams::default() },
        grammar: None,
        fork_of: None,
        adapter: None,
    }
}

/// A decode row is planned with as many drafts as there may be.
fn row(slot: u32, num_tokens: usize, num_drafts: u32) -> Row {
    let num_tokens = num_tokens as u32 + num_drafts;
    Row { slot: Slot(slot), num_tokens, num_drafts, new_blocks: Vec::new(), wants: Wants::default() }
}

/// Runs all jobs at once with two steps in flight. Their tokens, and how many of the steps in which all of them ran were not run to their
/// ends at once.
fn serve((ready, mut link): (Ready, ChannelLink), jobs: &[Job]) -> (Vec<Vec<TokenId>>, usize) {
    assert_eq!(ready.pipeline_depth, 2);
    let longest = jobs.iter().map(|job| job.prompt.len() as u32 + job.sampling.max_tokens).max().unwrap();
    let blocks_each = longest.div_ceil(ready.block_size);
    let mut first = Step { id: 1, ..Step::default() };
    for (slot, job) in (0..).zip(jobs) {
        let blocks = (slot * blocks_each..(slot + 1) * blocks_each).collect();
        first.admit.push(admit(slot, &job.prompt, 0, blocks, job.sampling.max_tokens));
        first.rows.push(row(slot, job.prompt.len(), 0));
    }
    link.send(&first).unwrap();
    let mut in_flight = VecDeque::from([1]);
    let mut tokens = vec![Vec::new(); jobs.len()];
    let (mut id, mut num_plain) = (1, 0);
    let mut ended = 0;
    while ended < jobs.len() {
        while in_flight.len() < 2 {
            id += 1;
            let rows = (0..jobs.len() as u32).map(|slot| row(slot, 1, DRAFTS)).collect();
            link.send(&Step { id, rows, ..Step::default() }).unwrap();
            in_flight.push_back(id);
        }
        let result = link.recv().unwrap();
        assert_eq!(in_flight.pop_front(), Some(result.id));
        num_plain += usize::from(result.timing.sample.is_zero() && ended == 0);
        for (tokens, row) in tokens.iter_mut().zip(result.rows) {
            tokens.extend(row.accepted);
            ended += usize::from(row.ended.is_some());
        }
    }
    (tokens, num_plain)
}

#[test]
fn steps_run_ahead_once_drafts_are_given_up() {
    let job = |i: u32| Job {
        prompt: (0..3 + 5 * i).map(|at| 20 + at * 7 % 40).collect(),
        sampling: SamplingParams { max_tokens: 70, ..SamplingParams::default() },
        ..Job::default()
    };
    let jobs = [job(0), job(1)];
    let want = fake_engine(None).serve(&jobs, Schedule::alone());
    let drafter = useless();
    let passes = drafter.passes.clone();
    let (tokens, num_plain) = serve(drafting_rank(drafter, two_at_once(), true), &jobs);
    assert!(tokens.iter().zip(&want).all(|(tokens, want)| *tokens == want.tokens));
    assert!((20..69).contains(&num_plain), "{num_plain} of 70 steps ran ahead, {} passes", passes.load(Relaxed));
    // Where drafts pay none does.
    let (tokens, num_plain) = serve(drafting_rank(useless(), two_at_once(), false), &jobs);
    assert!(tokens.iter().zip(&want).all(|(tokens, want)| *tokens == want.tokens));
    assert_eq!(num_plain, 0);
}

#[test]
fn blocks_written_without_drafts_are_not_taken_for_others() {
    // Always right, but too slow; how slow for more than one is not known before it is tried.
    let (takes, target_takes) = (Duration::from_millis(10), Duration::from_millis(2));
    let drafter = FakeDrafter { takes, target_takes, ..FakeDrafter::default() };
    let (passes, torn) = (drafter.passes.clone(), drafter.torn.clone());
    let mut engine = Engine::new(drafting_rank(drafter, two_at_once(), true));
    let mut id = 0;
    let mut step = |admit: Vec<Admit>, rows: Vec<Row>, release: Vec<u32>| {
        id += 1;
        let before = passes.load(Relaxed);
        let release = release.into_iter().map(Slot).collect();
        let results = engine.step(&Step { id, admit, rows, release, ..Step::default() });
        (results, passes.load(Relaxed) - before)
    };
    let (a, b): (Vec<TokenId>, Vec<TokenId>) = ((20..34).collect(), (40..54).collect());
    // The first leaves whole blocks, and ends.
    let (results, passed) = step(vec![admit(0, &a, 0, (0..5).collect(), 1)], vec![row(0, 14, 0)], vec![]);
    assert!(results[0].ended.is_some() && passed > 0);
    // Another, elsewhere, shows that drafts do not pay for one.
    let long = admit(1, &[30, 31], 0, (20..45).collect(), 90);
    step(vec![long], vec![row(1, 2, 0)], vec![0]);
    let decode = || row(1, 1, DRAFTS);
    let without = (0..20).map(|_| step(vec![], vec![decode()], vec![]).1).skip(10).all(|passed| passed == 0);
    assert!(without, "drafts are still made");
    // A third writes other tokens to the first's blocks. For two drafts may pay.
    let third = admit(0, &b, 0, (0..6).collect(), 9);
    assert_eq!(step(vec![third], vec![decode(), row(0, 14, 0)], vec![]).1, 0);
    // What goes on behind those blocks gets no drafts, for they have no entries of it; one with blocks of its own does.
    let found = admit(2, &[&b[..8], &[60, 61]].concat(), 8, vec![0, 1, 10, 11, 12, 13], 9);
    assert_eq!(step(vec![found], vec![decode(), row(0, 1, DRAFTS), row(2, 2, 0)], vec![]).1, 0);
    let own = admit(3, &[60, 61], 0, vec![14, 15, 16, 17], 9);
    let rows = vec![decode(), row(0, 1, DRAFTS), row(2, 1, DRAFTS), row(3, 2, 0)];
    assert!(step(vec![own], rows, vec![]).1 > 0, "none is looked at");
    assert_eq!(torn.load(Relaxed), 0);
}
