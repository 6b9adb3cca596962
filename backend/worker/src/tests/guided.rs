//! Grammars, allowed tokens and bad words: what comes, where it ends, and that drafts change none of it.

use std::sync::Arc;

use drafthorse_control::{FinishReason, Grammar, RowError, SamplingParams, TokenId};

use super::engine::{Engine, Job, Outcome, Schedule};
use super::fake::VOCAB;
use super::fake_engine;
use super::verifying::with_drafts;
use crate::grammar::{Grammars, Matcher, TokenBytes};
use crate::spec::Ngram;

const END: TokenId = 0;

/// An end, then the printable characters and the line break, one a token.
pub(crate) fn token_bytes() -> TokenBytes {
    let mut tokens = TokenBytes::new(vec![END]);
    tokens.push_special(b"<|end|>");
    (b' '..=b'~').chain([b'\n']).for_each(|byte| tokens.push(&[byte]));
    assert_eq!(tokens.len(), VOCAB);
    tokens
}

fn token(c: char) -> TokenId {
    if c == '\n' { 96 } else { c as TokenId - 31 }
}

fn text(tokens: &[TokenId]) -> String {
    let char_of = |&token: &TokenId| match token {
        END => '$',
        96 => '\n',
        token => char::from(token as u8 + 31),
    };
    tokens.iter().map(char_of).collect()
}

// The model is lost after a comma, so there are none in these.
fn grammars() -> [Grammar; 5] {
    [
        Grammar::Regex("[a-f]{3,9}x?".into()),
        Grammar::Regex("(yes|no|maybe)".into()),
        Grammar::Regex("(a|bc)*".into()),
        Grammar::JsonSchema(
            r#"{"type":"object","properties":{"k":{"enum":["one","two","three"]}},"required":["k"],"additionalProperties":false}"#
                .into(),
        ),
        Grammar::Lark("start: part+\npart: \"(\" part? \")\" | /[0-9]/".into()),
    ]
}

fn jobs() -> Vec<Job> {
    let sampling = |i: u64| SamplingParams {
        temperature: [0.0, 0.8, 1.5][i as usize % 3],
        seed: i,
        max_tokens: 30,
        stop_tokens: vec![END],
        ..SamplingParams::default()
    };
    (0..20)
        .map(|i| Job {
            prompt: (0..3 + i as TokenId % 5).map(|j| 14 + (i as TokenId * 7 + j * 3) % 80).collect(),
            sampling: sampling(i),
            grammar: Some(grammars()[i as usize % 5].clone()),
            ..Job::default()
        })
        .collect()
}

/// True if the grammar lets `tokens` come and stop there.
fn matches(grammar: &Grammar, tokens: &[TokenId]) -> bool {
    let compiled = Grammars::new(token_bytes()).compile(grammar).unwrap();
    let (output, ended) = match tokens.split_last() {
        Some((&END, output)) => (output, true),
        _ => (tokens, false),
    };
    let Ok(mut matcher) = Matcher::new(&compiled, output) else { return false };
    if ended { matcher.num_allowed(&[END as i32]) == 1 } else { matcher.is_done() }
}

#[test]
fn what_comes_matches_and_ends_where_the_grammar_does() {
    let outcomes = fake_engine(None).serve(&jobs(), Schedule::together());
    for (job, outcome) in jobs().iter().zip(&outcomes) {
        let grammar = job.grammar.as_ref().unwrap();
        assert_eq!(outcome.error, None, "{grammar:?}");
        match outcome.ended {
            Some(FinishReason::Stop) => {
                assert!(matches(grammar, &outcome.tokens), "{grammar:?}: {}", text(&outcome.tokens));
            }
            _ => assert_eq!(outcome.tokens.len(), 30, "{grammar:?}: {}", text(&outcome.tokens)),
        }
    }
    let stopped = outcomes.iter().filter(|outcome| outcome.ended == Some(FinishReason::Stop)).count();
    assert!(stopped >= 14, "{stopped} of 20 stopped");
    assert!(["yes", "no", "maybe"].contains(&&*text(&outcomes[1].tokens)), "{}", text(&outcomes[1].tokens));
}

#[test]
fn drafts_chunks_company_and_preemptions_change_no_token() {
    let jobs = jobs();
    let alone = fake_engine(None).serve(&jobs, Schedule::alone());
    assert_eq!(fake_engine(None).serve(&jobs, Schedule::together()), alone);
    let (all, all_steps, all_held) = with_drafts(&jobs, &alone, Schedule::together(), |_| 4);
    assert_eq!(all, alone);
    assert!(all_held > 0.5, "{all_held} in {all_steps} steps");
    let mut lookup: Engine = fake_engine(Some(Box::new(Ngram { max_n: 2, max_drafts: 5 })));
    assert_eq!(lookup.serve(&jobs, Schedule::together()), alone);
    assert!(lookup.num_held > 0);
    for seed in 0..10 {
        assert_eq!(fake_engine(None).serve(&jobs, Schedule::wild(seed)), alone, "seed {seed}");
        assert_eq!(lookup.serve(&jobs, Schedule::wild(seed)), alone, "seed {seed}, with lookup");
        let (part, ..) = with_drafts(&jobs, &alone, Schedule::wild(seed), |len| len * 7 % 5);
        assert_eq!(part, alone, "seed {seed}, with drafts");
    }
}

fn one(job: Job) -> Outcome {
    fake_engine(None).serve(&[job], Schedule::alone()).remove(0)
}

#[test]
fn an_end_comes_only_where_the_grammar_may_end_and_the_sequence_lets_it() {
    let job = |stop_tokens, min_tokens| Job {
        prompt: vec![20, 21],
        // Nothing is as likely as the end.
        sampling: SamplingParams {
            logit_bias: vec![(END, 90.0)],
            max_tokens: 12,
            stop_tokens,
            min_tokens,
            ..SamplingParams::default()
        },
        grammar: Some(Grammar::Regex("[a-c]{2,6}".into())),
        ..Job::default()
    };
    let len_and_end = |outcome: Outcome| (outcome.tokens.len(), outcome.tokens.last() == Some(&END), outcome.ended);
    let stop = Some(FinishReason::Stop);
    assert_eq!(len_and_end(one(job(vec![END], 0))), (3, true, stop), "as soon as it may");
    assert_eq!(len_and_end(one(job(vec![END], 4))), (5, true, stop), "not before min_tokens");
    assert_eq!(len_and_end(one(job(vec![], 0))), (6, false, stop), "never, and then the grammar is over");
}

#[test]
fn a_grammar_that_fails_takes_only_its_own_sequence_down() {
    let plain = Job {
        prompt: vec![30, 31],
        sampling: SamplingParams { max_tokens: 6, ..SamplingParams::default() },
        ..Job::default()
    };
    let with = |grammar: Grammar, allowed_tokens: Vec<TokenId>| Job {
        grammar: Some(grammar),
        sampling: SamplingParams { allowed_tokens, ..plain.sampling.clone() },
        ..plain.clone()
    };
    let broken = with(Grammar::Regex("(".into()), vec![]);
    let starved = with(Grammar::Regex("ab+".into()), vec![token('a'), token('c')]);
    let outcomes = fake_engine(None).serve(&[broken, plain.clone(), starved], Schedule::together());
    assert!(
        matches!(&outcomes[0].error, Some(RowError::Grammar { position: 2, reason }) if reason.contains("unclosed"))
    );
    assert_eq!(outcomes[1].tokens.len(), 6);
    assert_eq!(
        (text(&outcomes[2].tokens), &outcomes[2].error),
        ("a".into(), &Some(RowError::GrammarDeadEnd { position: 3 }))
    );
}

#[test]
fn only_allowed_tokens_come_and_no_bad_word_does() {
    let allowed: Vec<TokenId> = [10, 11, 12, 40, 41].into();
    let jobs: Vec<Job> = (0..6)
        .map(|i| Job {
            prompt: vec![50 + i, 3, 10, 11],
            sampling: SamplingParams {
                temperature: [0.0, 1.0][i as usize % 2],
                seed: i.into(),
                max_tokens: 40,
                allowed_tokens: allowed.clone(),
                bad_words: if i < 3 { vec![] } else { vec![vec![41], vec![10, 11], vec![12, 12, 40]] },
                ..SamplingParams::default()
            },
            ..Job::default()
        })
        .collect();
    let plain = fake_engine(None).serve(&jobs, Schedule::together());
    let has = |outcome: &Outcome, word: &[TokenId]| outcome.tokens.windows(word.len()).any(|at| at == word);
    for (i, outcome) in plain.iter().enumerate() {
        assert_eq!(outcome.tokens.len(), 40);
        assert!(outcome.tokens.iter().all(|token| allowed.contains(token)), "{i}: {:?}", outcome.tokens);
        for word in [&[41][..], &[10, 11], &[12, 12, 40]] {
            assert!(i < 3 || !has(outcome, word), "{i}: {:?}", outcome.tokens);
        }
    }
    assert!(
        plain[..3].iter().any(|outcome| has(outcome, &[41]))
            && plain[..3].iter().any(|outcome| has(outcome, &[10, 11]))
    );
    for num_right in [|_| 4, |len| len % 5] {
        let (drafted, ..) = with_drafts(&jobs, &plain, Schedule::together(), num_right);
        assert_eq!(drafted, plain);
    }
    let mut lookup = fake_engine(Some(Box::new(Ngram { max_n: 2, max_drafts: 4 })));
    assert_eq!(lookup.serve(&jobs, Schedule::wild(4)), plain);
    assert!(lookup.num_held > 0);
}

#[test]
fn a_rank_without_token_bytes_says_so() {
    let (ready, link) = super::rank(
        crate::config::WorkerConfig { grammars: None, ..super::engine::small() },
        super::fake::network,
        None,
    );
    let job = Job { prompt: vec![5], grammar: Some(Grammar::Regex("a".into())), ..Job::default() };
    let outcome = Engine::new((ready, link)).serve(&[job], Schedule::alone()).remove(0);
    let said = outcome.error.unwrap().to_string();
    assert_eq!(said, "the grammar failed at position 1: this rank does not know the bytes of tokens");
}

pub(crate) fn shared() -> Option<Arc<Grammars>> {
    Some(Arc::new(Grammars::new(token_bytes())))
}
