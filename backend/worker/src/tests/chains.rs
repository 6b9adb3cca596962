//! The law of whole answers with drafts: of many, token after token, against the product of the laws that each token has after
//! those before it.

#![allow(clippy::print_stdout, reason = "the p-values are what this test is about; `--nocapture` shows them")]

use drafthorse_control::{SamplingParams, TokenId};

use super::engine::{Job, Schedule};
use super::fake::{hash, logits_after};
use super::fake_engine;
use super::law::{law_after, p_value};
use crate::error::Result;
use crate::spec::{Propose, Proposer};

/// Tokens that may come, and of each answer.
const VOCAB: usize = 8;
const LENGTH: usize = 3;
const PROMPT: [TokenId; 4] = [3, 40, 5, 3];

/// Drafts whatever its dice say, which is right now and then.
struct Dice;

impl Proposer for Dice {
    fn max_drafts(&self) -> usize {
        LENGTH - 1
    }

    fn needs_host_tokens(&self) -> bool {
        true
    }

    fn propose(&mut self, step: &mut Propose<'_>) -> Result<()> {
        for row in step.rows.iter().filter(|row| row.wants_drafts) {
            step.slots.draft(row.slot, |(tokens, _), drafts| {
                let dice = hash(tokens.iter().copied());
                drafts.iter_mut().enumerate().for_each(|(i, draft)| *draft = (dice >> (8 * i) & 0x7) as i32);
                drafts.len()
            });
        }
        Ok(())
    }
}

/// How often each answer came, by its tokens as digits, and the share of drafts that held.
fn counts(sampling: &SamplingParams, num_answers: usize) -> (Vec<usize>, f64) {
    let mut engine = fake_engine(Some(Box::new(Dice)));
    let mut counts = vec![0; VOCAB.pow(LENGTH as u32)];
    for first in (0..num_answers).step_by(1000) {
        let jobs: Vec<Job> = (first..num_answers.min(first + 1000))
            .map(|i| Job {
                prompt: PROMPT.to_vec(),
                sampling: SamplingParams { seed: i as u64, ..sampling.clone() },
                ..Job::default()
            })
            .collect();
        for outcome in engine.serve(&jobs, Schedule::together()) {
            assert_eq!(outcome.tokens.len(), LENGTH, "{:?}", outcome.error);
            counts[outcome.tokens.iter().fold(0, |place, &token| place * VOCAB + token as usize)] += 1;
        }
    }
    (counts, engine.num_held as f64 / engine.num_drafts as f64)
}

/// Tokens of the answer with this place among the counts.
fn answer(place: usize) -> [TokenId; LENGTH] {
    std::array::from_fn(|i| (place / VOCAB.pow((LENGTH - 1 - i) as u32) % VOCAB) as TokenId)
}

/// The law of the next token after `output`.
fn next(output: &[TokenId], sampling: &SamplingParams) -> Vec<f64> {
    law_after(&logits_after(&[&PROMPT, output].concat()), &PROMPT, output, sampling)
}

/// The probability of every answer.
fn law(sampling: &SamplingParams) -> Vec<f64> {
    let of_answer =
        |tokens: [TokenId; LENGTH]| (0..LENGTH).map(|i| next(&tokens[..i], sampling)[tokens[i] as usize]).product();
    (0..VOCAB.pow(LENGTH as u32)).map(|place| of_answer(answer(place))).collect()
}

/// The law of answers from a verifier that takes a draft with the probability that it has, and else samples as if there had
/// been no draft: what is left out is that the draft was refused.
fn broken_law(sampling: &SamplingParams) -> Vec<f64> {
    let of_next = |output: &[TokenId], token: usize| {
        let p = next(output, sampling);
        let draft = (hash([&PROMPT, output].concat()) & 0x7) as usize;
        (1.0 - p[draft]) * p[token] + if token == draft { p[draft] } else { 0.0 }
    };
    let of_answer =
        |tokens: [TokenId; LENGTH]| (0..LENGTH).map(|i| of_next(&tokens[..i], tokens[i] as usize)).product();
    (0..VOCAB.pow(LENGTH as u32)).map(|place| of_answer(answer(place))).collect()
}

/// Rare answers put together, so that each count is large enough for chi-square.
fn together(counts: &[usize], law: &[f64]) -> (Vec<usize>, Vec<f64>) {
    let num_answers: usize = counts.iter().sum();
    let (mut grouped, mut of_law) = (vec![0], vec![0.0]);
    for (&count, &p) in counts.iter().zip(law) {
        if p == 0.0 || p * num_answers as f64 >= 10.0 {
            grouped.push(count);
            of_law.push(p);
        } else {
            grouped[0] += count;
            of_law[0] += p;
        }
    }
    (grouped, of_law)
}

fn check(num_answers: usize) {
    let plain = SamplingParams {
        temperature: 1.0,
        allowed_tokens: (0..VOCAB as TokenId).collect(),
        max_tokens: LENGTH as u32,
        ..SamplingParams::default()
    };
    let cases = [
        ("temperature 1", plain.clone()),
        ("top_p 0.9", SamplingParams { top_p: 0.9, ..plain.clone() }),
        (
            "penalties",
            SamplingParams {
                repetition_penalty: 1.3,
                presence_penalty: 0.4,
                frequency_penalty: 0.5,
                temperature: 1.5,
                ..plain.clone()
            },
        ),
    ];
    for (name, sampling) in &cases {
        let (counts, held) = counts(sampling, num_answers);
        let of_law = |law: &[f64]| {
            let (counts, law) = together(&counts, law);
            p_value(&counts, &law)
        };
        let (p, p_broken) = (of_law(&law(sampling)), of_law(&broken_law(sampling)));
        println!(
            "{name:16} {} draws, {held:.2} of the drafts held: p = {p:.4}, broken {p_broken:e}",
            num_answers * LENGTH
        );
        assert!(held > 0.05 && held < 0.6, "{held}");
        // One in ten thousand would be chance; the seeds are fixed.
        assert!(p > 1e-4, "{name}: p = {p:e}");
        assert!(p_broken < 1e-4, "{name}: answers pass for those of a broken verifier, p = {p_broken}");
    }
}

#[test]
fn answers_with_drafts_follow_the_law_of_answers() {
    check(10_000);
}

#[test]
#[ignore = "takes a minute: a million draws of each case"]
fn answers_with_drafts_follow_the_law_of_answers_in_a_million_draws() {
    check(333_334);
}
