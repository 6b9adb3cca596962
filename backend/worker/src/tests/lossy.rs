//! PaddleNLP's rules: what holds by them, token by token, told without a rank.

use drafthorse_control::{Grammar, SamplingParams, TokenId};

use super::engine::{Engine, Job, Outcome, Schedule, small};
use super::fake::{self, POISON, argmax, logits_after};
use super::rank;
use crate::config::WorkerConfig;
use crate::error::Result;
use crate::spec::{Propose, Proposer, SpeculateConfig};

const DRAFTS: usize = 3;

/// Knows what is likely, and drafts the token of this place among the likeliest at each of its drafts.
struct Nth([usize; DRAFTS]);

/// Tokens after `history`, the likeliest first; never the one that the model is lost after.
fn ranked(history: &[TokenId]) -> Vec<TokenId> {
    let mut logits = logits_after(history);
    logits[POISON as usize] = -100.0;
    let mut tokens = Vec::new();
    for _ in 0..8 {
        tokens.push(argmax(&logits));
        logits[*tokens.last().unwrap() as usize] = f32::NEG_INFINITY;
    }
    tokens
}

/// What a proposer of these places drafts after `history`.
fn drafted(history: &[TokenId], places: [usize; DRAFTS]) -> Vec<TokenId> {
    let mut all = history.to_vec();
    places.iter().for_each(|&place| all.push(ranked(&all)[place]));
    all.split_off(history.len())
}

impl Proposer for Nth {
    fn max_drafts(&self) -> usize {
        DRAFTS
    }

    fn needs_host_tokens(&self) -> bool {
        true
    }

    fn propose(&mut self, step: &mut Propose<'_>) -> Result<()> {
        for row in step.rows.iter().filter(|row| row.wants_drafts) {
            step.slots.draft(row.slot, |(tokens, _), drafts| {
                let made = drafted(tokens, self.0);
                drafts.iter_mut().zip(made).for_each(|(draft, made)| *draft = made as i32);
                drafts.len()
            });
        }
        Ok(())
    }
}

fn engine(rule: &str, places: [usize; DRAFTS]) -> Engine {
    let speculate = SpeculateConfig { verify: rule.into(), ..SpeculateConfig::default() };
    Engine::new(rank(WorkerConfig { speculate, ..small() }, fake::network, Some(Box::new(Nth(places)))))
}

const MAX_TOKENS: u32 = 25;

fn jobs(change: impl Fn(&mut SamplingParams)) -> Vec<Job> {
    let job = |i: u32| {
        let mut sampling = SamplingParams {
            temperature: 1.0,
            seed: i.into(),
            max_tokens: MAX_TOKENS,
            logit_bias: vec![(POISON, -100.0)],
            ..SamplingParams::default()
        };
        change(&mut sampling);
        Job { prompt: (0..3 + i).map(|j| 20 + (i * 7 + j * 3) % 60).collect(), sampling, ..Job::default() }
    };
    (0..6).map(job).collect()
}

/// Runs the jobs and checks of each answer that in every whole step the first `num_held` drafts hold and a candidate follows.
fn check(rule: &str, places: [usize; DRAFTS], num_held: usize, change: impl Fn(&mut SamplingParams)) {
    let jobs = jobs(change);
    let mut engine = engine(rule, places);
    let outcomes = engine.serve(&jobs, Schedule::alone());
    for (job, outcome) in jobs.iter().zip(&outcomes) {
        assert_eq!((outcome.tokens.len(), &outcome.error), (MAX_TOKENS as usize, &None));
        let all = [&job.prompt[..], &outcome.tokens].concat();
        let mut len = job.prompt.len() + 1;
        // At the end fewer drafts are made than these rules are about.
        while len + DRAFTS < all.len() {
            let drafts = drafted(&all[..len], places);
            assert_eq!(all[len..len + num_held], drafts[..num_held], "{rule}, {places:?}");
            len += num_held;
            // Tokens as likely as the fifth are picked from, too.
            let (logits, likely) = (logits_after(&all[..len]), ranked(&all[..len]));
            let [logit, fifth] = [all[len], likely[4]].map(|token| logits[token as usize]);
            assert!(logit >= fifth, "{logit} is picked, the fifth candidate has {fifth}");
            len += 1;
        }
    }
    let steps = outcomes.len() * (1 + (MAX_TOKENS as usize - 1).div_ceil(num_held + 1));
    assert!(engine.num_steps.abs_diff(steps) <= outcomes.len(), "{} steps for about {steps}", engine.num_steps);
    // In company, cut and begun anew, too, where the drafts are those of the same places.
    assert_eq!(self::engine(rule, places).serve(&jobs, Schedule::together()), outcomes);
}

#[test]
fn by_top1_the_likeliest_hold_whatever_is_sampled() {
    check("paddle_top1", [0, 0, 0], 3, |_| ());
    check("paddle_top1", [0, 0, 1], 2, |_| ());
    check("paddle_top1", [0, 1, 0], 1, |_| ());
    check("paddle_top1", [1, 0, 0], 0, |_| ());
}

#[test]
fn by_the_window_candidates_hold_and_the_second_by_those_after_it() {
    let narrow = |sampling: &mut SamplingParams| sampling.top_p = 0.001;
    check("paddle_topp_window", [0, 4, 2], 3, |_| ());
    check("paddle_topp_window", [0, 5, 0], 1, |_| ());
    check("paddle_topp_window", [0, 0, 0], 3, narrow);
    check("paddle_topp_window", [1, 0, 0], 3, narrow);
    check("paddle_topp_window", [1, 0, 1], 0, narrow);
    check("paddle_topp_window", [0, 1, 0], 1, narrow);
    check("paddle_topp_window", [2, 0, 0], 0, narrow);
}

#[test]
fn greedy_text_is_another_by_the_window_alone() {
    let greedy = |sampling: &mut SamplingParams| sampling.temperature = 0.0;
    let tokens = |rule| engine(rule, [1, 0, 0]).serve(&jobs(greedy), Schedule::alone());
    let exact: Vec<Outcome> = tokens("exact");
    assert_eq!(tokens("paddle_top1"), exact);
    let windowed = tokens("paddle_topp_window");
    assert!(windowed.iter().zip(&exact).all(|(windowed, exact)| windowed.tokens != exact.tokens));
}

#[test]
fn what_a_grammar_or_a_limit_forbids_never_holds() {
    let mut jobs = jobs(|sampling| sampling.stop_tokens = (0..40).collect());
    for job in &mut jobs[..3] {
        job.grammar = Some(Grammar::Regex("[a-f]{3,9}x?".into()));
    }
    for rule in ["paddle_top1", "paddle_topp_window"] {
        for outcome in engine(rule, [0, 0, 0]).serve(&jobs, Schedule::together()) {
            assert_eq!(outcome.error, None);
            let stops = outcome.tokens.iter().filter(|&&token| token < 40).count();
            assert!(stops <= 1 && outcome.tokens[..outcome.tokens.len() - 1].iter().all(|&token| token >= 40));
        }
        let guided = engine(rule, [0, 0, 0]).serve(&jobs[..3], Schedule::together());
        let letter = |token: &TokenId| char::from(*token as u8 + 31);
        assert!(guided.iter().all(|outcome| {
            outcome
                .tokens
                .iter()
                .filter(|&&token| token >= 40)
                .all(|token| ('a'..='f').contains(&letter(token)) || letter(token) == 'x')
        }));
    }
}
