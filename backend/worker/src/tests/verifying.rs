//! Drafts change how many steps it takes, never a token.

use std::collections::HashMap;

use drafthorse_control::TokenId;

use super::engine::{Job, Outcome, Schedule};
use super::fake_engine;
use super::serving::mixed_jobs;
use crate::error::Result;
use crate::spec::{Ngram, Propose, Proposer};

/// Knows the continuations, and gets some of them wrong on purpose.
struct Scripted {
    /// By prompt: what follows it.
    outputs: HashMap<Vec<TokenId>, Vec<TokenId>>,
    max_drafts: usize,
    /// How many of the drafts after a history of this length are right.
    num_right: fn(usize) -> usize,
}

impl Proposer for Scripted {
    fn max_drafts(&self) -> usize {
        self.max_drafts
    }

    fn needs_host_tokens(&self) -> bool {
        true
    }

    fn propose(&mut self, step: &mut Propose<'_>) -> Result<()> {
        for row in step.rows.iter().filter(|row| row.wants_drafts) {
            let (outputs, num_right) = (&self.outputs, self.num_right);
            step.slots.draft(row.slot, |(tokens, num_prompt), drafts| {
                let (prompt, output) = tokens.split_at(num_prompt);
                let rest = &outputs[prompt][output.len()..];
                for (index, draft) in drafts.iter_mut().enumerate() {
                    let right = rest.get(index).copied().unwrap_or(1);
                    let wrong = u32::from(index >= num_right(tokens.len()));
                    *draft = ((right + wrong) % 97) as i32;
                }
                drafts.len()
            });
        }
        Ok(())
    }
}

/// The outcomes with a scripted proposer, how many steps it took, and the share of drafts that held.
pub(super) fn with_drafts(
    jobs: &[Job],
    plain: &[Outcome],
    schedule: Schedule,
    num_right: fn(usize) -> usize,
) -> (Vec<Outcome>, usize, f64) {
    let outputs = jobs.iter().map(|job| job.prompt.clone()).zip(plain.iter().map(|o| o.tokens.clone())).collect();
    let mut engine = fake_engine(Some(Box::new(Scripted { outputs, max_drafts: 4, num_right })));
    let outcomes = engine.serve(jobs, schedule);
    (outcomes, engine.num_steps, engine.num_held as f64 / engine.num_drafts.max(1) as f64)
}

#[test]
fn tokens_and_logprobs_are_the_same_whatever_share_of_the_drafts_holds() {
    let jobs = mixed_jobs();
    let mut engine = fake_engine(None);
    let plain = engine.serve(&jobs, Schedule::together());
    let plain_steps = engine.num_steps;

    let (all, all_steps, all_held) = with_drafts(&jobs, &plain, Schedule::together(), |_| 4);
    assert_eq!(all, plain);
    assert!(all_held > 0.8, "{all_held}: ends cut the last drafts");
    assert!(all_steps * 3 < plain_steps, "{all_steps} steps with drafts, {plain_steps} without");

    let (none, none_steps, none_held) = with_drafts(&jobs, &plain, Schedule::together(), |_| 0);
    assert_eq!(none, plain);
    assert_eq!((none_steps, none_held), (plain_steps, 0.0));

    let (part, _, part_held) = with_drafts(&jobs, &plain, Schedule::together(), |len| len % 5);
    assert_eq!(part, plain);
    assert!(part_held > 0.2 && part_held < 0.8, "{part_held}");

    for seed in 0..20 {
        let (wild, ..) = with_drafts(&jobs, &plain, Schedule::wild(seed), |len| len * 7 % 5);
        assert_eq!(wild, plain, "seed {seed}");
    }
}

#[test]
fn prompt_lookup_drafts_hold_where_text_repeats_and_change_no_token() {
    let mut jobs = mixed_jobs();
    for job in &mut jobs {
        // A strong pull to few tokens makes text that repeats itself.
        job.sampling.logit_bias.extend((20..24).map(|token| (token, 9.0)));
        job.sampling.temperature = 0.0;
        job.sampling.max_tokens = 60;
    }
    let mut engine = fake_engine(None);
    let plain = engine.serve(&jobs, Schedule::together());
    let plain_steps = engine.num_steps;
    let mut engine = fake_engine(Some(Box::new(Ngram { max_n: 3, max_drafts: 5 })));
    assert_eq!(engine.serve(&jobs, Schedule::together()), plain);
    assert!(engine.num_held > 0 && engine.num_steps < plain_steps);
    for seed in 0..10 {
        assert_eq!(engine.serve(&jobs, Schedule::wild(seed)), plain, "seed {seed}");
    }
}

#[test]
fn no_draft_is_made_for_a_place_past_the_end() {
    let mut jobs = mixed_jobs();
    for job in &mut jobs {
        job.sampling.max_tokens = 2;
        job.sampling.stop_tokens.clear();
    }
    let plain = fake_engine(None).serve(&jobs, Schedule::together());
    let outputs = jobs.iter().map(|job| job.prompt.clone()).zip(plain.iter().map(|o| o.tokens.clone())).collect();
    let mut engine = fake_engine(Some(Box::new(Scripted { outputs, max_drafts: 4, num_right: |_| 4 })));
    assert_eq!(engine.serve(&jobs, Schedule::together()), plain);
    // The second token is the last: it is sampled after the first, and nothing can follow it.
    assert_eq!(engine.num_drafts, 0);
}
