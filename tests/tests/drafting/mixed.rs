//! Five hundred random requests of every kind with drafts by a model. The text of each must be what it is alone without drafts, and
//! each step must bring what it brings if all that came before is computed anew; nothing may be left behind.

use std::collections::HashMap;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use drafthorse_control::{FinishReason, Grammar, SamplingParams, TokenId};
use drafthorse_engine::{Engine, EngineError, Event, Request, RequestId, Stats};
use drafthorse_tests::fates::{Fate, wait_until_idle};
use drafthorse_tests::pairs::{self, Pair};
use drafthorse_tests::tiny::{END, VOCAB};
use drafthorse_worker::SpeculateConfig;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::recompute::Recompute;
use super::{Answer, MANY_BLOCKS, drafts, engine};

const REQUESTS: u64 = 500;
/// Different ones; the same come again, so that prefixes are found.
const JOBS: usize = 96;
const MAX_WAITING: usize = 20;
const NUM_DRAFTS: u32 = 3;
/// Fewer blocks than eight sequences want.
const FEW_BLOCKS: u64 = 8;

struct Job {
    prompt: Vec<TokenId>,
    sampling: SamplingParams,
    grammar: Option<Grammar>,
    /// Alone, without drafts.
    answer: Answer,
    /// Tokens of each step with drafts, and how many drafts it verified.
    steps: Vec<(usize, usize)>,
}

/// Every kind in turn, at few beginnings that are longer than a block. Three in a row ask the same with other seeds, as choices do.
fn job(number: usize, random: &mut StdRng) -> Job {
    let kind = number / 3 % 8;
    // What wants no drafts leaves none for others that begin alike, so it has a beginning of its own.
    let family = if kind == 6 { 7 } else { random.random_range(0..4u32) };
    let mut prompt: Vec<TokenId> = (0..random.random_range(1..34)).map(|i| 1 + (family * 31 + i * 7) % 90).collect();
    prompt.extend((0..random.random_range(0..8)).map(|_| random.random_range(1..VOCAB as u32)));
    let plain = SamplingParams {
        temperature: if random.random_bool(0.5) { 0.0 } else { random.random_range(0.2..0.9) },
        seed: random.random(),
        max_tokens: random.random_range(1..48),
        stop_tokens: vec![END],
        ..SamplingParams::default()
    };
    let some_tokens = |random: &mut StdRng| (0..6).map(|_| random.random_range(0..VOCAB as u32)).collect::<Vec<_>>();
    let mut grammar = None;
    let sampling = match kind {
        0 => SamplingParams { temperature: 0.0, ..plain },
        1 => SamplingParams { top_p: 0.9, top_k: 20, ..plain },
        2 => SamplingParams { repetition_penalty: 1.05, presence_penalty: 0.2, frequency_penalty: 0.1, ..plain },
        3 => {
            let stop_tokens = [some_tokens(random), vec![END]].concat();
            SamplingParams { stop_tokens, min_tokens: 5.min(plain.max_tokens), ..plain }
        }
        4 => {
            let logit_bias = some_tokens(random).into_iter().zip([-100.0, 2.0, 1.0, -1.0, 3.0, -2.0]).collect();
            SamplingParams { logit_bias, ..plain }
        }
        5 => {
            grammar = Some(match number % 4 {
                0 => Grammar::Regex("[a-z]{3,30}!?".into()),
                1 => Grammar::Regex("(yes|no|maybe)( [A-Z]+)*".into()),
                2 => Grammar::JsonSchema(
                    r#"{"type":"object","properties":{"k":{"type":"string"}},"required":["k"]}"#.into(),
                ),
                _ => Grammar::Lark("start: part+\npart: \"(\" part? \")\" | /[0-9]/".into()),
            });
            plain
        }
        6 => SamplingParams { max_drafts: Some(0), ..plain },
        _ => {
            let bad_words = some_tokens(random).chunks(2).map(<[_]>::to_vec).collect();
            SamplingParams { max_drafts: Some(1 + number as u32 % 2), bad_words, ..plain }
        }
    };
    Job { prompt, sampling, grammar, answer: Answer::default(), steps: Vec::new() }
}

/// All jobs, with what each says alone, and in which steps.
fn jobs(pair: &Pair) -> Vec<Job> {
    let mut random = StdRng::seed_from_u64(1);
    let mut jobs: Vec<Job> = Vec::new();
    for number in 0..JOBS {
        let mut made = job(number, &mut random);
        if let (Some(first), false) = (jobs.last(), number % 3 == 0) {
            let SamplingParams { seed, temperature, .. } = made.sampling;
            made.prompt.clone_from(&first.prompt);
            made.grammar.clone_from(&first.grammar);
            made.sampling = SamplingParams { seed, temperature, ..first.sampling.clone() };
        }
        jobs.push(made);
    }
    let plain = engine(pair, SpeculateConfig::default(), MANY_BLOCKS);
    let mut recompute = Recompute::new(pair, NUM_DRAFTS);
    for (id, job) in (0..).zip(&mut jobs) {
        let (sender, events) = mpsc::channel();
        submit(&plain, id, job, Fate::Ends, sender);
        for (_, event) in events {
            match event {
                Some(Event::Tokens(tokens)) => job.answer.text.extend(tokens.ids),
                Some(Event::Finished(finished)) => job.answer.reason = Some(finished.reason),
                other => panic!("job {id}: {other:?}"),
            }
        }
        job.steps = recompute.steps(&job.prompt, &job.answer.text, &job.sampling, job.grammar.as_ref());
    }
    jobs
}

fn fate(random: &mut StdRng) -> Fate {
    let after = random.random_range(1..12);
    match random.random_range(0..20) {
        0..3 => Fate::CancelledAfter(after),
        3..6 => Fate::FinishedAfter(after),
        6 => Fate::DeafAfter(after),
        _ => Fate::Ends,
    }
}

fn submit(engine: &Engine, id: u64, job: &Job, fate: Fate, sender: Sender<(u64, Option<Event>)>) {
    let mut request = Request::new(RequestId(id), job.prompt.clone(), job.sampling.clone(), fate.sink(id, sender));
    request.grammar.clone_from(&job.grammar);
    engine.submit(request).unwrap();
}

#[derive(Debug, Default)]
struct Seen {
    ended: u32,
    cut: u32,
    cancelled: u32,
    deaf: u32,
    /// Steps of all drafts, by how many held.
    held: [u32; NUM_DRAFTS as usize + 1],
    /// Sequences that a stop token ended while drafts were left.
    stopped_inside: u32,
}

struct Running {
    job: usize,
    fate: Fate,
    output: Vec<TokenId>,
    steps: usize,
}

/// Takes the next event and says whether its request is over. `exact`: each step must bring what it brings computed anew.
fn hear(
    engine: &Engine,
    job: &Job,
    id: u64,
    event: Option<Event>,
    run: &mut Running,
    exact: bool,
    seen: &mut Seen,
) -> bool {
    let Answer { text, reason, .. } = &job.answer;
    match event {
        Some(Event::Tokens(tokens)) => {
            let (got, num_drafts) = job.steps.get(run.steps).copied().unwrap_or_default();
            if exact {
                assert_eq!(
                    tokens.ids.len(),
                    got,
                    "request {id}, job {}, step {} of {:?}",
                    run.job,
                    run.steps,
                    job.steps
                );
                if num_drafts == NUM_DRAFTS as usize {
                    seen.held[got - 1] += 1;
                }
                let stops = job.sampling.stop_tokens.contains(tokens.ids.last().unwrap());
                seen.stopped_inside += u32::from(stops && got > 1 && got <= num_drafts);
            }
            run.steps += 1;
            run.output.extend(tokens.ids);
            assert!(text.starts_with(&run.output), "request {id} strays from what job {} says alone", run.job);
            run.fate.act(engine, id, run.output.len());
            return false;
        }
        Some(Event::Finished(finished)) => {
            let len = finished.usage.output_tokens as usize;
            let is_whole = run.output == *text && Some(finished.reason) == *reason;
            let is_cut = run.fate == Fate::FinishedAfter(len) && finished.reason == FinishReason::Stop;
            assert!(is_whole || is_cut, "request {id}, {:?}", run.fate);
            seen.ended += u32::from(is_whole);
            seen.cut += u32::from(is_cut && !is_whole);
        }
        Some(Event::Failed(EngineError::Cancelled)) => {
            assert!(matches!(run.fate, Fate::CancelledAfter(_)));
            seen.cancelled += 1;
        }
        Some(Event::Failed(error)) => panic!("request {id} failed: {error}"),
        None => {
            assert!(matches!(run.fate, Fate::DeafAfter(_)));
            seen.deaf += 1;
        }
    }
    true
}

/// Runs [`REQUESTS`] random ones of `jobs`, siblings together, until all is idle and every block free again.
fn mix(engine: &Engine, jobs: &[Job], exact: bool) -> (Seen, Stats) {
    let mut random = StdRng::seed_from_u64(2);
    let (sender, events) = mpsc::channel();
    let mut running: HashMap<u64, Running> = HashMap::new();
    let (mut next_id, mut seen) = (0, Seen::default());
    while next_id < REQUESTS || !running.is_empty() {
        if next_id < REQUESTS && running.len() < MAX_WAITING {
            let first = random.random_range(0..jobs.len());
            let siblings = if random.random_bool(0.3) { first / 3 * 3..first / 3 * 3 + 3 } else { first..first + 1 };
            for job in siblings {
                let fate = fate(&mut random);
                running.insert(next_id, Running { job, fate, output: Vec::new(), steps: 0 });
                submit(engine, next_id, &jobs[job], fate, sender.clone());
                next_id += 1;
            }
            continue;
        }
        let (id, event) = events.recv_timeout(Duration::from_secs(60)).expect("the engine hangs");
        let run = running.get_mut(&id).expect("an event after the last one");
        if hear(engine, &jobs[run.job], id, event, run, exact, &mut seen) {
            running.remove(&id);
        }
    }
    wait_until_idle(engine);
    let stats = engine.stats();
    assert!(seen.ended > 250 && seen.cancelled > 20 && seen.cut > 20 && seen.deaf > 5, "{seen:?}");
    assert!(stats.prefix_hits > 1000, "{stats:?}");
    (seen, stats)
}

fn check(pair: &Pair) {
    let jobs = jobs(pair);
    let reached = |reason| jobs.iter().filter(|job| job.answer.reason == Some(reason)).count();
    assert!(reached(FinishReason::Stop) > 10 && reached(FinishReason::Length) > 10, "no text ends so");

    let (seen, stats) = mix(&engine(pair, drafts(pair, NUM_DRAFTS, false), MANY_BLOCKS), &jobs, true);
    assert_eq!(stats.preemptions, 0, "with blocks enough");
    assert!(seen.held.iter().all(|&steps| steps > 10), "some number of drafts never holds: {seen:?}");
    assert!(seen.stopped_inside > 0, "no text stops inside a run: {seen:?}");

    let (_, stats) = mix(&engine(pair, drafts(pair, NUM_DRAFTS, false), FEW_BLOCKS), &jobs, false);
    assert!(stats.preemptions > 0 && stats.drafts_accepted > 100, "{stats:?}");

    let (_, stats) = mix(&engine(pair, drafts(pair, NUM_DRAFTS, true), FEW_BLOCKS), &jobs, false);
    assert!(stats.drafts_verified > 0, "{stats:?}");
}

#[test]
fn five_hundred_random_requests_with_a_llamas_module() {
    check(&pairs::llama());
}

#[test]
fn five_hundred_random_requests_with_a_deepseeks_module() {
    check(&pairs::deepseek());
}
