//! Plays scripts on a scheduler and a fake rank.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drafthorse_control::{FinishReason, Logprobs, Ready, SamplingParams, Step, TokenId, Wants};

use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::request::{Event, Finished, Request, RequestId};
use crate::scheduler::{Events, Scheduler};
use crate::stats::{Shared, Stats};
use crate::testing::{FakeRank, ready, text};

/// A scheduler and a fake rank that runs its steps.
pub(super) struct Player {
    scheduler: Scheduler,
    rank: FakeRank,
    shared: Arc<Shared>,
    depth: usize,
    now: Instant,
    sent: VecDeque<Step>,
    events: Events,
    requests: HashMap<RequestId, Played>,
    /// Who holds each slot.
    holders: HashMap<u32, char>,
    log: String,
}

struct Played {
    prompt: Vec<TokenId>,
    sampling: SamplingParams,
    output: Vec<TokenId>,
    wants_logprobs: bool,
    num_logprobs: usize,
    num_prompt_logprobs: usize,
    end: Option<Result<Finished, String>>,
}

/// Plays a script and prints each step on a line: `name:tokens` for a chunk of a prompt, `name:1+drafts` for a decode, `-name`
/// for a slot that is released; below it the requests that ended.
///
/// `setup` is a list of `blocks=` `size=` (of a block) `seqs=` `tokens=` (of a step) `drafts=` `depth=` `host=1` (drafts are made
/// on the host) `ms=` (of a step) `token_ms=` `step_ms=` (the bound) `cache=0`. The script's commands are
/// - `add NAME PROMPT+MAX`, and any of `p=PRIORITY` `queue=MS` `deadline=MS` `like=NAME` (the same prompt, as far as it goes) `salt=` `stop=N` (its Nth
///   output token is a stop token) `logprobs`
/// - `step N`: plan and commit N times, with as many steps in flight as `depth`; `plan`, `commit`: one of the two
/// - `cancel NAME`, `finish NAME TOKENS`, `sleep MS`
/// - `run`: to the end, without printing the steps
/// - `blocks`: prints free and cached blocks
///
/// Whatever the script, each text must be what it is alone, and all blocks free at the end.
pub(super) fn play(setup: &str, script: &str) -> String {
    let mut player = Player::new(setup);
    for command in script.split(';') {
        player.play_command(command);
    }
    player.finish();
    player.log
}

fn number(text: &str) -> u32 {
    text.parse().unwrap_or_else(|_| panic!("{text} is not a number"))
}

impl Player {
    pub(super) fn new(setup: &str) -> Self {
        let mut config = EngineConfig { max_num_seqs: 4, max_num_batched_tokens: 1000, ..EngineConfig::default() };
        let mut ready: Ready = ready(100, 4);
        let mut times = [Duration::ZERO; 2];
        for (name, value) in setup.split_whitespace().filter_map(|word| word.split_once('=')) {
            let value = number(value);
            match name {
                "blocks" => ready.num_blocks = value,
                "size" => ready.block_size = value,
                "drafts" => ready.max_drafts = value,
                "depth" => ready.pipeline_depth = value,
                "host" => ready.needs_host_tokens = value != 0,
                "seqs" => config.max_num_seqs = value,
                "tokens" => config.max_num_batched_tokens = value,
                "step_ms" => config.max_step_time_ms = value,
                "cache" => config.enable_prefix_caching = value != 0,
                "ms" => times[0] = Duration::from_millis(value.into()),
                "token_ms" => times[1] = Duration::from_millis(value.into()),
                _ => panic!("unknown setup {name}"),
            }
        }
        let shared = Arc::new(Shared::default());
        let mut scheduler = Scheduler::new(&config.validate().unwrap(), &ready, shared.clone());
        let mut rank = FakeRank::new(&ready);
        [rank.step_time, rank.token_time] = times;
        // Else the first chunk is a careful one; that is pace.rs's to test.
        scheduler.pace.measure(0, 1000, times[0] + times[1] * 1000);
        Player {
            scheduler,
            rank,
            shared,
            depth: ready.pipeline_depth as usize,
            now: Instant::now(),
            sent: VecDeque::new(),
            events: Vec::new(),
            requests: HashMap::new(),
            holders: HashMap::new(),
            log: String::new(),
        }
    }

    pub(super) fn play_command(&mut self, command: &str) {
        let words: Vec<&str> = command.split_whitespace().collect();
        match words[..] {
            ["add", name, size, ref options @ ..] => self.add(name, size, options),
            ["step", count] => (0..number(count)).for_each(|_| self.step()),
            ["plan"] => _ = self.plan(),
            ["commit"] => self.commit(),
            ["cancel", name] => self.scheduler.cancel(id(name), EngineError::Cancelled, &mut self.events),
            ["finish", name, tokens] => {
                let num_tokens = number(tokens) as usize;
                self.scheduler.finish(id(name), FinishReason::Stop, num_tokens, self.now, &mut self.events);
            }
            ["sleep", ms] => self.now += Duration::from_millis(number(ms).into()),
            ["run"] => self.run(),
            ["blocks"] => {
                let stats = self.stats();
                writeln!(self.log, "{} free, {} cached", stats.free_blocks, stats.cached_blocks).unwrap();
            }
            _ => panic!("cannot play {command}"),
        }
        self.deliver();
    }

    pub(super) fn can_plan(&self) -> bool {
        self.sent.len() < self.scheduler.depth(self.depth)
    }

    pub(super) fn knows(&self, name: &str) -> bool {
        self.requests.contains_key(&id(name))
    }

    fn stats(&self) -> Stats {
        self.scheduler.publish();
        self.shared.read()
    }

    fn add(&mut self, name: &str, size: &str, options: &[&str]) {
        let (num_prompt, max_tokens) = size.split_once('+').unwrap();
        let sampling = SamplingParams { max_tokens: number(max_tokens), ..SamplingParams::default() };
        let (mut like, mut stop) = (name, None);
        let mut request = Request::new(id(name), Vec::new(), sampling, Box::new(|_| true));
        for option in options {
            match option.split_once('=').unwrap_or((option, "")) {
                ("p", level) => request.priority = number(level),
                ("queue", ms) => request.queue_timeout = Some(Duration::from_millis(number(ms).into())),
                ("deadline", ms) => request.deadline = Some(self.now + Duration::from_millis(number(ms).into())),
                ("stop", nth) => stop = Some(number(nth)),
                ("drafts", most) => request.sampling.max_drafts = Some(number(most)),
                ("salt", salt) => request.cache_salt = number(salt).into(),
                ("like", other) => like = other,
                ("logprobs", _) => {
                    request.wants = Wants { logprobs: Logprobs::Top(0), prompt_logprobs: Logprobs::Top(0) }
                }
                _ => panic!("unknown option {option}"),
            }
        }
        let letter = u32::from(like.as_bytes()[0] - b'a');
        request.prompt = (0..number(num_prompt)).map(|at| letter * 31 + at % 31).collect();
        if let Some(nth) = stop {
            let (output, _) = text(&request.prompt, &request.sampling);
            request.sampling.stop_tokens = vec![output[nth as usize - 1]];
        }
        let played = Played {
            prompt: request.prompt.clone(),
            sampling: request.sampling.clone(),
            output: Vec::new(),
            wants_logprobs: request.wants != Wants::default(),
            num_logprobs: 0,
            num_prompt_logprobs: 0,
            end: None,
        };
        self.scheduler.add(request, self.now).unwrap();
        self.requests.insert(id(name), played);
    }

    fn plan(&mut self) -> bool {
        self.scheduler.expire(self.now, &mut self.events);
        self.deliver();
        let Some(step) = self.scheduler.plan(self.now) else { return false };
        self.print(&step);
        self.sent.push_back(step);
        true
    }

    fn commit(&mut self) {
        let Some(step) = self.sent.pop_front() else { return };
        let result = self.rank.run(&step);
        self.now += result.timing.forward;
        self.scheduler.commit(result, self.now, &mut self.events).unwrap();
        self.deliver();
    }

    fn step(&mut self) {
        while self.can_plan() && self.plan() {}
        self.commit();
    }

    fn run(&mut self) {
        let log = self.log.len();
        let mut steps = 0;
        while !self.scheduler.is_idle() || !self.sent.is_empty() {
            self.step();
            steps += 1;
            assert!(steps < 10_000, "no progress: {}", self.scheduler.stuck());
        }
        let ends: String =
            self.log[log..].lines().filter(|line| line.starts_with("   ")).map(|line| format!("{line}\n")).collect();
        self.log.truncate(log);
        self.log += &ends;
    }

    pub(super) fn finish(&mut self) {
        let log = self.log.len();
        self.run();
        self.log.truncate(log);
        let stats = self.stats();
        assert_eq!((stats.running, stats.free_blocks), (0, stats.total_blocks), "a block or a slot has leaked");
        for (id, request) in &self.requests {
            assert!(request.end.is_some(), "request {} was forgotten", name(*id));
        }
    }

    fn print(&mut self, step: &Step) {
        write!(self.log, "{}", step.id).unwrap();
        for slot in &step.release {
            write!(self.log, "  -{}", self.holders[&slot.0]).unwrap();
        }
        for admit in &step.admit {
            let mut running = self.scheduler.running.iter().filter_map(|&key| self.scheduler.sequences.get(key));
            let holder = running.find(|sequence| sequence.slot == Some(admit.slot)).unwrap();
            self.holders.insert(admit.slot.0, name(holder.id));
        }
        for row in &step.rows {
            write!(self.log, "  {}:{}", self.holders[&row.slot.0], row.num_tokens - row.num_drafts).unwrap();
            if row.num_drafts > 0 {
                write!(self.log, "+{}", row.num_drafts).unwrap();
            }
            let admit = step.admit.iter().find(|admit| admit.slot == row.slot);
            if let Some(admit) = admit.filter(|admit| admit.num_cached > 0) {
                write!(self.log, "({} cached)", admit.num_cached).unwrap();
            }
        }
        self.log.push('\n');
    }

    fn deliver(&mut self) {
        for (id, event) in std::mem::take(&mut self.events) {
            let request = self.requests.get_mut(&id).unwrap();
            assert!(request.end.is_none(), "an event after the last one");
            let end = match event {
                Event::Tokens(tokens) => {
                    request.output.extend(tokens.ids);
                    request.num_logprobs += tokens.logprobs.len();
                    for logprobs in tokens.prompt_logprobs {
                        request.num_prompt_logprobs += 1;
                        assert_eq!(logprobs.token.token, request.prompt[request.num_prompt_logprobs], "in order");
                    }
                    continue;
                }
                Event::Finished(finished) => Ok(finished),
                Event::Failed(err) => Err(err.to_string()),
            };
            let (alone, _) = text(&request.prompt, &request.sampling);
            assert!(alone.starts_with(&request.output), "{} said {:?}, alone {alone:?}", name(id), request.output);
            let message = match &end {
                Ok(finished) => {
                    let num_tokens = finished.usage.output_tokens as usize;
                    assert!(num_tokens <= request.output.len());
                    if request.wants_logprobs {
                        assert_eq!(request.num_logprobs, request.output.len());
                        assert_eq!(request.num_prompt_logprobs, request.prompt.len() - 1);
                    }
                    format!("{} {}", finished.reason.name(), num_tokens)
                }
                Err(message) => message.clone(),
            };
            writeln!(self.log, "   {} {message}", name(id)).unwrap();
            request.end = Some(end);
        }
    }
}

fn id(name: &str) -> RequestId {
    RequestId(name.as_bytes()[0].into())
}

fn name(id: RequestId) -> char {
    id.0 as u8 as char
}
