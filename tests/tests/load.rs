//! Ten thousand random requests on a tiny model, engine and rank as they are served: cancels, timeouts, stops, lost receivers,
//! too few blocks, drafts. No text may differ from what it is alone, and nothing may be left behind.

#![allow(clippy::unwrap_used, clippy::needless_pass_by_value, reason = "helpers of tests fail as tests do")]

use std::collections::HashMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use drafthorse_control::{FinishReason, SamplingParams, TokenId};
use drafthorse_engine::{Engine, EngineConfig, EngineError, Event, Request, RequestId};
use drafthorse_tests::fates::{Fate, wait_until_idle};
use drafthorse_tests::tiny::{self, END, VOCAB};
use drafthorse_worker::{SpeculateConfig, WorkerConfig};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const REQUESTS: u64 = 10_000;
/// Different ones; the same come again and again, so that prefixes are found.
const JOBS: usize = 150;
const MAX_WAITING: usize = 24;

/// Fewer blocks than eight sequences want.
const BLOCK_SIZE: u32 = 16;
const NUM_BLOCKS: u64 = 7;

fn serve(speculate: SpeculateConfig, num_blocks: u64) -> (Engine, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    tiny::write_model(dir.path());
    let config = WorkerConfig {
        model_dir: dir.path().into(),
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: Some(64),
        block_size: BLOCK_SIZE,
        kv_cache_bytes: 0,
        speculate,
        ..WorkerConfig::default()
    };
    // K and V of 2 layers, 2 heads of 16 elements, f32.
    let block_bytes = 2 * 2 * 2 * 16 * 4 * u64::from(BLOCK_SIZE);
    let config = WorkerConfig { kv_cache_bytes: num_blocks * block_bytes, ..config };
    let (ready, link) = drafthorse_worker::spawn(config, Box::new(|_| {})).unwrap();
    assert_eq!(u64::from(ready.num_blocks), num_blocks);
    let config = EngineConfig { max_num_seqs: 8, max_num_batched_tokens: 64, ..EngineConfig::default() };
    (Engine::start(config, ready, vec![Box::new(link)]).unwrap(), dir)
}

#[derive(Clone)]
struct Job {
    prompt: Vec<TokenId>,
    sampling: SamplingParams,
    /// What it says alone.
    text: Vec<TokenId>,
}

/// Few beginnings, so that prefixes are shared; greedy and seeded, some with penalties.
fn job(random: &mut StdRng) -> Job {
    let family = random.random_range(0..4u32);
    let mut prompt: Vec<TokenId> = (0..random.random_range(1..26)).map(|i| 1 + (family * 31 + i * 7) % 90).collect();
    prompt.extend((0..random.random_range(0..6)).map(|_| random.random_range(1..VOCAB as u32)));
    let sampling = SamplingParams {
        temperature: if random.random_bool(0.5) { 0.0 } else { random.random_range(0.2..1.5) },
        top_p: if random.random_bool(0.5) { 1.0 } else { 0.9 },
        frequency_penalty: if random.random_bool(0.3) { 0.5 } else { 0.0 },
        seed: random.random(),
        max_tokens: random.random_range(1..34),
        stop_tokens: vec![END],
        ..SamplingParams::default()
    };
    Job { prompt, sampling, text: Vec::new() }
}

fn fate(random: &mut StdRng) -> Fate {
    let after = random.random_range(1..10);
    match random.random_range(0..20) {
        0..3 => Fate::CancelledAfter(after),
        3..5 => Fate::FinishedAfter(after),
        5..7 => Fate::DeafAfter(after),
        7 => Fate::TimesOut,
        _ => Fate::Ends,
    }
}

fn submit(engine: &Engine, id: u64, job: &Job, fate: Fate, priority: u32, sender: Sender<(u64, Option<Event>)>) {
    let mut request = Request::new(RequestId(id), job.prompt.clone(), job.sampling.clone(), fate.sink(id, sender));
    request.priority = priority;
    if fate == Fate::TimesOut {
        request.queue_timeout = Some(Duration::from_micros(u64::from(job.sampling.max_tokens) * 40));
    }
    engine.submit(request).unwrap();
}

/// One after the other, without drafts, blocks enough.
fn alone(jobs: &mut [Job]) {
    let (engine, _dir) = serve(SpeculateConfig::default(), 64);
    for (id, job) in jobs.iter_mut().enumerate() {
        let (sender, events) = mpsc::channel();
        submit(&engine, id as u64, job, Fate::Ends, 1, sender);
        for (_, event) in events {
            match event {
                Some(Event::Tokens(tokens)) => job.text.extend(tokens.ids),
                Some(Event::Finished(_)) => break,
                other => panic!("job {id}: {other:?}"),
            }
        }
    }
}

struct Running {
    job: usize,
    fate: Fate,
    output: Vec<TokenId>,
}

#[derive(Debug, Default)]
struct Seen {
    ended: u32,
    cancelled: u32,
    timed_out: u32,
    deaf: u32,
}

/// Takes the next event and says whether its request is over.
fn hear(engine: &Engine, jobs: &[Job], id: u64, event: Option<Event>, running: &mut Running, seen: &mut Seen) -> bool {
    let text = &jobs[running.job].text;
    match event {
        Some(Event::Tokens(tokens)) => {
            running.output.extend(tokens.ids);
            assert!(text.starts_with(&running.output), "request {id} strays from what job {} says alone", running.job);
            running.fate.act(engine, id, running.output.len());
            return false;
        }
        Some(Event::Finished(finished)) => {
            seen.ended += 1;
            let len = finished.usage.output_tokens as usize;
            let cut = running.fate == Fate::FinishedAfter(len) && finished.reason == FinishReason::Stop;
            assert!(cut || running.output == *text, "request {id}, {:?}", running.fate);
        }
        Some(Event::Failed(EngineError::QueueTimeout { .. })) => {
            seen.timed_out += 1;
            assert_eq!(running.fate, Fate::TimesOut);
        }
        Some(Event::Failed(EngineError::Cancelled)) => {
            seen.cancelled += 1;
            assert!(matches!(running.fate, Fate::CancelledAfter(_)));
        }
        Some(Event::Failed(error)) => panic!("request {id} failed: {error}"),
        None => {
            seen.deaf += 1;
            assert!(matches!(running.fate, Fate::DeafAfter(_)));
        }
    }
    true
}

fn load(
    engine: &Engine,
    jobs: &[Job],
    events: &Receiver<(u64, Option<Event>)>,
    sender: &Sender<(u64, Option<Event>)>,
) -> Seen {
    let mut random = StdRng::seed_from_u64(2);
    let mut running: HashMap<u64, Running> = HashMap::new();
    let (mut next_id, mut seen) = (0, Seen::default());
    while next_id < REQUESTS || !running.is_empty() {
        if next_id < REQUESTS && running.len() < MAX_WAITING {
            let (job, fate) = (random.random_range(0..jobs.len()), fate(&mut random));
            running.insert(next_id, Running { job, fate, output: Vec::new() });
            submit(engine, next_id, &jobs[job], fate, random.random_range(0..4), sender.clone());
            next_id += 1;
            continue;
        }
        let (id, event) = events.recv_timeout(Duration::from_secs(60)).expect("the engine hangs");
        let request = running.get_mut(&id).expect("an event after the last one");
        if hear(engine, jobs, id, event, request, &mut seen) {
            running.remove(&id);
        }
    }
    seen
}

#[test]
fn ten_thousand_random_requests_say_what_each_says_alone_and_leave_nothing_behind() {
    let mut random = StdRng::seed_from_u64(1);
    let mut jobs: Vec<Job> = (0..JOBS).map(|_| job(&mut random)).collect();
    alone(&mut jobs);
    #[allow(clippy::needless_update, reason = "methods bring settings of their own")]
    let speculate = SpeculateConfig {
        method: "inference_with_reference".into(),
        max_draft_token_num: 3,
        max_ngram_size: 2,
        ..SpeculateConfig::default()
    };
    let (engine, _dir) = serve(speculate, NUM_BLOCKS);
    let (sender, events) = mpsc::channel();
    let seen = load(&engine, &jobs, &events, &sender);

    wait_until_idle(&engine);
    let stats = engine.stats();
    println!("{seen:?} {stats:?}");
    assert!(seen.ended > 5000 && seen.cancelled > 200 && seen.timed_out > 20 && seen.deaf > 200, "{seen:?}");
    assert!(stats.preemptions > 5 && stats.prefix_hits > 1000 && stats.drafts_accepted > 100, "{stats:?}");
}
