//! The engine as its callers meet it: a thread, a channel to a fake rank, sinks.

use std::collections::HashMap;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use drafthorse_control::{ChannelLink, RankEnd, SamplingParams, TokenId, channel};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::request::Event;
use crate::testing::{FakeRank, POISON, VOCAB_SIZE, ready, text};

/// An engine over one rank that is this test, or a thread that serves.
fn start(config: EngineConfig, ready: &Ready) -> (Engine, RankEnd) {
    let (link, end): (ChannelLink, RankEnd) = channel(0);
    (Engine::start(config, ready.clone(), vec![Box::new(link)]).unwrap(), end)
}

fn serve(config: EngineConfig, ready: &Ready) -> Engine {
    let (engine, end) = start(config, ready);
    let rank = FakeRank::new(ready);
    thread::spawn(move || rank.serve(&end));
    engine
}

fn max_tokens(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ..SamplingParams::default() }
}

/// Submits a prompt and answers its events.
fn submit(engine: &Engine, id: u64, prompt: &[TokenId], sampling: SamplingParams) -> Result<Receiver<Event>> {
    let (sender, events) = mpsc::channel();
    let sink = Box::new(move |event| sender.send(event).is_ok());
    engine.submit(Request::new(RequestId(id), prompt.to_vec(), sampling, sink))?;
    Ok(events)
}

/// All tokens, and how it ended. Waits for the last event and sees that none follows.
fn listen(events: &Receiver<Event>) -> (Vec<TokenId>, String) {
    let mut ids = Vec::new();
    let mut end = None;
    for event in events {
        assert!(end.is_none(), "an event after the last one");
        match event {
            Event::Tokens(tokens) => ids.extend(tokens.ids),
            Event::Finished(finished) => {
                end = Some(format!("{} {}", finished.reason.name(), finished.usage.output_tokens));
            }
            Event::Failed(err) => end = Some(err.to_string()),
        }
    }
    (ids, end.expect("a last event"))
}

/// Runs one request to its end.
fn run(engine: &Engine, id: u64, prompt: &[TokenId], sampling: SamplingParams) -> (Vec<TokenId>, String) {
    match submit(engine, id, prompt, sampling) {
        Ok(events) => listen(&events),
        Err(err) => (Vec::new(), err.to_string()),
    }
}

#[test]
fn streams_tokens_then_says_how_it_ended_and_what_it_used() {
    let engine = serve(EngineConfig::default(), &ready(16, 4));
    let (alone, _) = text(&[1, 2, 3], &max_tokens(5));
    assert_eq!(run(&engine, 1, &[1, 2, 3], max_tokens(5)), (alone.clone(), "length 5".into()));

    let sampling = SamplingParams { stop_tokens: vec![alone[1]], ..max_tokens(5) };
    assert_eq!(run(&engine, 1, &[1, 2, 3], sampling), (alone[..2].to_vec(), "stop 2".into()));

    let stats = engine.stats();
    assert_eq!((stats.finished, stats.prompt_tokens, stats.output_tokens, stats.failed), (2, 6, 7, 0));
    assert_eq!((stats.running, stats.waiting, stats.free_blocks, stats.total_blocks), (0, 0, 16, 16));
    assert_eq!(stats.step_time_buckets.iter().sum::<u64>(), stats.steps);
}

#[test]
fn refuses_what_can_never_run() {
    let ready = Ready { max_model_len: 100, ..ready(16, 4) };
    let (engine, _end) = start(EngineConfig::default(), &ready);
    let refused = |prompt: &[TokenId], tokens| run(&engine, 1, prompt, max_tokens(tokens)).1;
    assert_eq!(refused(&[], 1), "the prompt is empty");
    assert_eq!(refused(&[1], 0), "max_tokens is 0, must be at least 1");
    assert_eq!(refused(&[1; 100], 1), "prompt has 100 tokens, the model takes at most 99");
    let together = "prompt has 60 tokens and max_tokens is 41, the model takes at most 100 together";
    assert_eq!(refused(&[1; 60], 41), together);
    assert_eq!(refused(&[1; 60], 5), "prompt and max_tokens are 65 tokens together, the KV cache holds 64");
    assert_eq!(refused(&[1, VOCAB_SIZE], 1), "prompt token 1000 is outside the vocabulary of 1000");
    assert!(engine.is_idle());
}

#[test]
fn refuses_a_setting_that_cannot_work() {
    let fail = |config, ready, links| Engine::start(config, ready, links).err().unwrap().to_string();
    let config = EngineConfig { max_num_seqs: 0, ..EngineConfig::default() };
    assert_eq!(fail(config, ready(1, 4), vec![]), "max_num_seqs is 0, must be at least 1");
    assert_eq!(fail(EngineConfig::default(), ready(1, 4), vec![]), "no ranks to run on");
    let no_blocks = "the KV cache has 0 blocks of 4 tokens, needs at least one";
    assert_eq!(fail(EngineConfig::default(), ready(0, 4), vec![Box::new(channel(0).0)]), no_blocks);
}

#[test]
fn a_full_queue_refuses_and_takes_again() {
    let config = EngineConfig { max_num_seqs: 1, max_waiting: 2, ..EngineConfig::default() };
    let ready = ready(16, 4);
    let (engine, end) = start(config, &ready);
    let events: Vec<_> = (1..=3).map(|id| submit(&engine, id, &[1], max_tokens(1)).unwrap()).collect();
    assert_eq!(run(&engine, 4, &[1], max_tokens(1)).1, "2 requests are waiting, at most 2 may");
    let rank = FakeRank::new(&ready);
    let rank = thread::spawn(move || rank.serve(&end));
    assert_eq!(listen(&events[0]).1, "length 1");
    assert_eq!(run(&engine, 5, &[1], max_tokens(1)).1, "length 1");
    drop(engine);
    rank.join().unwrap();
}

#[test]
fn an_id_names_one_request_at_a_time() {
    let ready = ready(16, 4);
    let (engine, end) = start(EngineConfig::default(), &ready);
    let first = submit(&engine, 7, &[1], max_tokens(2)).unwrap();
    let step = end.recv().unwrap();
    let second = submit(&engine, 7, &[1], max_tokens(2)).unwrap();
    let mut rank = FakeRank::new(&ready);
    end.send(Ok(rank.run(&step)));
    assert_eq!(listen(&second).1, "request 7 is running already");
    thread::spawn(move || rank.serve(&end));
    assert_eq!(listen(&first).1, "length 2");
    assert_eq!(run(&engine, 7, &[1], max_tokens(1)).1, "length 1");
}

#[test]
fn a_cancel_takes_effect_with_the_step_in_flight() {
    let ready = ready(16, 4);
    let (engine, end) = start(EngineConfig::default(), &ready);
    let mut rank = FakeRank::new(&ready);
    let events = submit(&engine, 1, &[1, 2], max_tokens(9)).unwrap();
    let step = end.recv().unwrap();
    engine.cancel(RequestId(1));
    end.send(Ok(rank.run(&step)));
    let (tokens, last) = listen(&events);
    assert_eq!((tokens.len(), last.as_str()), (1, "the request was cancelled"));
    let stats = engine.stats();
    assert_eq!((stats.free_blocks, stats.cancelled, stats.failed), (16, 1, 0));
    assert!(engine.is_idle());
    engine.cancel(RequestId(1));
}

#[test]
fn a_sink_without_a_receiver_cancels() {
    let ready = ready(16, 4);
    let (engine, end) = start(EngineConfig::default(), &ready);
    let mut rank = FakeRank::new(&ready);
    drop(submit(&engine, 1, &[1, 2], max_tokens(9)).unwrap());
    let step = end.recv().unwrap();
    end.send(Ok(rank.run(&step)));
    assert_eq!(run_with(&engine, &end, &mut rank, 2), "length 1");
    let stats = engine.stats();
    assert_eq!((stats.free_blocks, stats.cancelled, stats.finished), (16, 1, 1));
}

/// Runs a request of one token on a rank that is this thread.
fn run_with(engine: &Engine, end: &RankEnd, rank: &mut FakeRank, id: u64) -> String {
    let events = submit(engine, id, &[3], max_tokens(1)).unwrap();
    let step = end.recv().unwrap();
    assert_eq!(step.rows.len(), 1, "nothing else runs");
    end.send(Ok(rank.run(&step)));
    listen(&events).1
}

#[test]
fn a_row_that_fails_takes_no_other_with_it() {
    let engine = serve(EngineConfig::default(), &ready(16, 4));
    let good = submit(&engine, 1, &[1, 2], max_tokens(6)).unwrap();
    let bad = submit(&engine, 2, &[POISON, 2], max_tokens(6)).unwrap();
    assert_eq!(listen(&bad).1, "the model's logits are not finite at position 2");
    assert_eq!(listen(&good).1, "length 6");
    assert_eq!(engine.stats().failed, 1);
}

#[test]
fn a_lost_rank_fails_every_request_with_the_reason() {
    let (engine, end) = start(EngineConfig::default(), &ready(16, 4));
    let (sender, reasons) = mpsc::channel();
    engine.on_stop(move |reason| sender.send(reason.to_owned()).unwrap());
    let events: Vec<_> = (1..=2).map(|id| submit(&engine, id, &[1], max_tokens(5)).unwrap()).collect();
    end.recv().unwrap();
    assert_eq!(engine.stopped(), None);
    end.send(Err("the device is gone".into()));
    for events in events {
        assert_eq!(listen(&events).1, "the engine has stopped: rank 0 failed: the device is gone");
    }
    assert_eq!(reasons.recv().unwrap(), "rank 0 failed: the device is gone");
    assert!(engine.is_idle());
    assert_eq!(run(&engine, 3, &[1], max_tokens(5)).1, "the engine has stopped: rank 0 failed: the device is gone");
}

#[test]
fn an_engine_that_is_dropped_or_panics_fails_its_requests() {
    let (engine, end) = start(EngineConfig::default(), &ready(16, 4));
    let events = submit(&engine, 1, &[1], max_tokens(5)).unwrap();
    end.recv().unwrap();
    drop(end);
    drop(engine);
    assert!(listen(&events).1.starts_with("the engine has stopped: "));

    let engine = serve(EngineConfig::default(), &ready(16, 4));
    let sink = Box::new(|_| panic!("a sink's own fault"));
    let events = submit(&engine, 1, &[1], max_tokens(15)).unwrap();
    engine.submit(Request::new(RequestId(2), vec![1], max_tokens(2), sink)).unwrap();
    assert!(listen(&events).1.starts_with("the engine has stopped: the engine thread "));
}

#[test]
fn draining_lets_running_requests_end() {
    let ready = ready(16, 4);
    let (engine, end) = start(EngineConfig::default(), &ready);
    let events = submit(&engine, 1, &[1], max_tokens(5)).unwrap();
    engine.drain();
    assert_eq!(run(&engine, 2, &[1], max_tokens(5)).1, "the engine takes no new requests, it is shutting down");
    assert!(!engine.is_idle());
    let rank = FakeRank::new(&ready);
    thread::spawn(move || rank.serve(&end));
    assert_eq!(listen(&events).1, "length 5");
    assert!(engine.is_idle());
}

/// What the load below does to a request besides letting it run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Ends,
    Poisoned,
    TimesOut,
    CancelledAfter(usize),
    FinishedAfter(usize),
    DeafAfter(usize),
}

struct Loaded {
    alone: Vec<TokenId>,
    output: Vec<TokenId>,
    fate: Fate,
}

/// `count` random requests against few blocks, with cancels, timeouts and lost receivers: every text is what it is alone,
/// and nothing is left behind.
fn load(count: u64, ready: &Ready, seed: u64) -> Stats {
    let config =
        EngineConfig { max_num_seqs: 8, max_num_batched_tokens: 32, max_waiting: 8, ..EngineConfig::default() };
    let engine = serve(config, ready);
    let mut random = StdRng::seed_from_u64(seed);
    let (sender, events) = mpsc::channel();
    let mut requests: HashMap<u64, Loaded> = HashMap::new();
    let mut next_id = 1;
    while next_id <= count || !requests.is_empty() {
        if next_id <= count && requests.len() < 14 {
            let (request, loaded) = draw(&mut random, next_id, sender.clone());
            engine.submit(request).unwrap();
            requests.insert(next_id, loaded);
            next_id += 1;
            continue;
        }
        let (id, event): (u64, Option<Event>) = events.recv().unwrap();
        let request = requests.get_mut(&id).expect("an event after the last one");
        match event {
            Some(Event::Tokens(tokens)) => {
                request.output.extend(tokens.ids);
                assert!(request.alone.starts_with(&request.output), "request {id} strays from its text");
                let len = request.output.len();
                match request.fate {
                    Fate::CancelledAfter(after) if len >= after => engine.cancel(RequestId(id)),
                    Fate::FinishedAfter(after) if len >= after => {
                        engine.finish(RequestId(id), FinishReason::Stop, after);
                    }
                    _ => {}
                }
                continue;
            }
            Some(Event::Finished(finished)) => {
                let len = finished.usage.output_tokens as usize;
                match request.fate {
                    Fate::FinishedAfter(after) if finished.reason == FinishReason::Stop && len == after => {}
                    _ => assert_eq!(request.output, request.alone, "request {id}, {:?}", request.fate),
                }
            }
            Some(Event::Failed(EngineError::Row(_))) => assert_eq!(request.fate, Fate::Poisoned),
            Some(Event::Failed(EngineError::QueueTimeout { .. })) => assert_eq!(request.fate, Fate::TimesOut),
            Some(Event::Failed(EngineError::Cancelled)) => assert!(matches!(request.fate, Fate::CancelledAfter(_))),
            Some(Event::Failed(err)) => panic!("request {id} failed: {err}"),
            None => assert!(matches!(request.fate, Fate::DeafAfter(_))),
        }
        requests.remove(&id);
    }
    // A step in flight may hold blocks for a moment longer.
    let begun = std::time::Instant::now();
    while engine.stats().free_blocks < engine.stats().total_blocks || !engine.is_idle() {
        assert!(begun.elapsed() < Duration::from_secs(10), "blocks have leaked: {:?}", engine.stats());
        thread::yield_now();
    }
    engine.stats()
}

fn draw(random: &mut StdRng, id: u64, sender: Sender<(u64, Option<Event>)>) -> (Request, Loaded) {
    let family: TokenId = random.random_range(0..4);
    let mut prompt: Vec<TokenId> = (0..random.random_range(1..30)).map(|at| family * 100 + at).collect();
    prompt.extend((0..random.random_range(0..8)).map(|_| random.random_range(0..VOCAB_SIZE)));
    let mut sampling = max_tokens(random.random_range(1..24));
    let after = random.random_range(1..12);
    let fate = match random.random_range(0..20) {
        0..3 => Fate::CancelledAfter(after),
        3..5 => Fate::FinishedAfter(after),
        5..7 => Fate::DeafAfter(after),
        7 => Fate::TimesOut,
        8 => Fate::Poisoned,
        _ => Fate::Ends,
    };
    if fate == Fate::Poisoned {
        prompt[0] = POISON;
    } else if random.random_bool(0.2) {
        let (output, _) = text(&prompt, &sampling);
        sampling.stop_tokens = vec![output[random.random_range(0..output.len())]];
    }
    let (alone, _) = text(&prompt, &sampling);
    let mut heard = 0;
    let sink = move |event: Event| {
        if let (Event::Tokens(tokens), Fate::DeafAfter(after)) = (&event, fate) {
            heard += tokens.ids.len();
            if heard >= after {
                sender.send((id, None)).unwrap();
                return false;
            }
        }
        sender.send((id, Some(event))).is_ok()
    };
    let mut request = Request::new(RequestId(id), prompt, sampling, Box::new(sink));
    request.priority = random.random_range(0..4);
    if fate == Fate::TimesOut {
        request.queue_timeout = Some(Duration::from_micros(random.random_range(0..500)));
    }
    (request, Loaded { alone, output: Vec::new(), fate })
}

#[test]
fn two_thousand_random_requests_leave_nothing_behind() {
    let few_blocks = ready(20, 4);
    for (depth, drafts) in [(1, 0), (1, 3), (2, 0), (2, 3)] {
        let ready = Ready { pipeline_depth: depth, max_drafts: drafts, ..few_blocks.clone() };
        let stats = load(500, &ready, u64::from(10 * depth + drafts));
        assert!(stats.preemptions > 5, "{stats:?}");
        assert!(stats.prefix_hits > 100, "{stats:?}");
        assert_eq!(stats.drafts_accepted > 0, drafts > 0, "{stats:?}");
        assert!(stats.cancelled > 0 && stats.failed > 0, "{stats:?}");
    }
}
