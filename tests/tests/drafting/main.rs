//! Drafts by models, engine and rank as they are served: what a step brings, and that no text depends on it.

#![allow(clippy::unwrap_used, clippy::needless_pass_by_value, reason = "helpers of tests fail as tests do")]
#![allow(
    clippy::print_stdout,
    reason = "what was seen and how often is what these tests are about; `--nocapture` shows it"
)]

mod copies;
mod mixed;
mod recompute;
mod sample;

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use drafthorse_control::{ChannelLink, FinishReason, Ready, SamplingParams, TokenId};
use drafthorse_engine::{Engine, EngineConfig, Event, Request, RequestId, Usage};
use drafthorse_tests::pairs::Pair;
use drafthorse_tests::tiny::{END, VOCAB};
use drafthorse_worker::grammar::{Grammars, TokenBytes};
use drafthorse_worker::{SpeculateConfig, WorkerConfig};

const MAX_SEQS: u32 = 8;
const MAX_BATCHED: u32 = 64;
const MAX_LEN: u32 = 96;
/// Enough for all at once, and what is cached beside them.
const MANY_BLOCKS: u64 = 200;

/// An end, then the printable characters, one a token.
fn grammars() -> Arc<Grammars> {
    let mut tokens = TokenBytes::new(vec![END]);
    tokens.push_special(b"<|end|>");
    (b' '..=b'~').for_each(|byte| tokens.push(&[byte]));
    assert_eq!(tokens.len(), VOCAB);
    Arc::new(Grammars::new(tokens))
}

/// `num_drafts` drafts a step by the pair's drafter.
fn drafts(pair: &Pair, num_drafts: u32, adaptive: bool) -> SpeculateConfig {
    SpeculateConfig {
        method: "mtp".into(),
        max_draft_token_num: num_drafts,
        adaptive,
        draft_dir: pair.draft_dir(),
        ..SpeculateConfig::default()
    }
}

/// A rank with so many blocks of KV cache.
fn rank(pair: &Pair, speculate: SpeculateConfig, num_blocks: u64) -> (Ready, ChannelLink) {
    let config = WorkerConfig {
        model_dir: pair.base.path().into(),
        max_num_seqs: MAX_SEQS,
        max_num_batched_tokens: MAX_BATCHED,
        max_model_len: Some(MAX_LEN),
        block_size: 16,
        kv_cache_bytes: 4 << 20,
        speculate,
        grammars: Some(grammars()),
        ..WorkerConfig::default()
    };
    let spawn = |config| drafthorse_worker::spawn(config, Box::new(|_| {})).unwrap();
    let (ready, _) = spawn(config.clone());
    let block_bytes = ready.kv_bytes / u64::from(ready.num_blocks);
    let (ready, link) = spawn(WorkerConfig { kv_cache_bytes: num_blocks * block_bytes, ..config });
    assert_eq!(u64::from(ready.num_blocks), num_blocks);
    (ready, link)
}

fn engine(pair: &Pair, speculate: SpeculateConfig, num_blocks: u64) -> Engine {
    let (ready, link) = rank(pair, speculate, num_blocks);
    let config =
        EngineConfig { max_num_seqs: MAX_SEQS, max_num_batched_tokens: MAX_BATCHED, ..EngineConfig::default() };
    Engine::start(config, ready, vec![Box::new(link)]).unwrap()
}

/// What came of a request.
#[derive(Clone, Debug, Default)]
struct Answer {
    text: Vec<TokenId>,
    /// Tokens of each step that brought any.
    steps: Vec<usize>,
    reason: Option<FinishReason>,
    usage: Usage,
}

/// Runs all `requests` at once to their ends.
fn answers(engine: &Engine, requests: impl IntoIterator<Item = (Vec<TokenId>, SamplingParams)>) -> Vec<Answer> {
    let (sender, events) = mpsc::channel();
    let mut answers = Vec::new();
    for (id, (prompt, sampling)) in (0..).zip(requests) {
        let sender = sender.clone();
        let sink = move |event| sender.send((id, event)).is_ok();
        engine.submit(Request::new(RequestId(id as u64), prompt, sampling, Box::new(sink))).unwrap();
        answers.push(Answer::default());
    }
    while answers.iter().any(|answer| answer.reason.is_none()) {
        let (id, event): (usize, Event) = events.recv_timeout(Duration::from_secs(60)).expect("the engine hangs");
        let answer = &mut answers[id];
        match event {
            Event::Tokens(tokens) => {
                answer.steps.push(tokens.ids.len());
                answer.text.extend(tokens.ids);
            }
            Event::Finished(finished) => (answer.reason, answer.usage) = (Some(finished.reason), finished.usage),
            Event::Failed(error) => panic!("request {id}: {error}"),
        }
    }
    answers
}
