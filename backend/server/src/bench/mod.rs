//! Measures a served model: time per token by batch, time to the first token, and many requests at once; through the engine alone or
//! through gRPC.
//!
//! All requests of a batch start together, greedy, each with a prompt of its own random tokens, and none ends early. The time per
//! token is (time for n + 1 tokens - time for 1 token) / n, so it has no prefill in it; each is the median of some runs.

mod client;
mod report;

use std::path::Path;
use std::time::Duration;

use drafthorse_control::TokenId;
use serde_json::Value;

use crate::config::ServerConfig;
use crate::serve::Server;
use client::{Client, Times};
pub use report::{Decode, FirstToken, Report, Throughput};

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Through gRPC, on streams of a client in this process; else by the engine's own handle.
    pub grpc: bool,
    pub batches: Vec<u32>,
    pub prompt_tokens: u32,
    /// Tokens that a time per token is taken over.
    pub output_tokens: u32,
    /// Prompts whose first token is timed, alone.
    pub first_token: Vec<u32>,
    pub throughput: Option<Workload>,
    pub repeats: u32,
    /// Bytes a second that the device's memory is read with at best.
    pub bandwidth: Option<f64>,
}

/// Many requests at once.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    pub requests: u32,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
}

impl Plan {
    /// The settings that the plan needs where nobody has said otherwise: `(name, value)`.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let largest = self.batches.iter().copied().max().unwrap_or(1);
        let waiting = self.throughput.map_or(0, |workload| workload.requests);
        let mut settings = vec![("time_device", "true".into()), ("max_waiting", waiting.max(1024).to_string())];
        if largest > 64 {
            settings.push(("max_num_seqs", largest.max(512).to_string()));
        }
        settings
    }

    fn num_runs(&self) -> u64 {
        let measured = self.batches.len() + self.first_token.len();
        (measured as u64) * (u64::from(self.repeats.max(1)) + 1) + u64::from(self.throughput.is_some())
    }
}

/// How far a bench has come: what is measured, runs done, and runs in all.
pub type Progress<'a> = &'a dyn Fn(&str, u64, u64);

/// Starts a server, measures its one model, and stops it.
///
/// # Errors
/// Why the model did not load, or a request failed.
pub async fn run(
    config: ServerConfig,
    plan: &Plan,
    checkpoint: &Path,
    progress: Progress<'_>,
) -> Result<Report, String> {
    let started = std::time::Instant::now();
    progress("loading", 0, plan.num_runs());
    let mut server = Server::start(config).await.map_err(|error| error.to_string())?;
    server.loaded().await;
    let Some(model) = server.app.repository.serving().into_iter().next() else {
        let reasons = server.app.repository.index(false).into_iter().map(|entry| entry.reason);
        return Err(reasons.collect::<Vec<_>>().join("; "));
    };
    let ready = started.elapsed();
    let client = match (plan.grpc, server.grpc) {
        (true, Some(address)) => Client::grpc(address, &model).await?,
        _ => Client::engine(&model),
    };
    let mut bench = Bench { client, plan, progress, runs: 0, seed: 0 };
    let (floor_bytes, weight_bytes) = floor_bytes(checkpoint, model.served.engine().weight_bytes());
    let mut report = Report {
        client: if plan.grpc { "grpc" } else { "engine" },
        ready_seconds: ready.as_secs_f64(),
        weight_bytes,
        floor_bytes,
        bandwidth: plan.bandwidth,
        decode: Vec::new(),
        first_token: Vec::new(),
        throughput: None,
        resident_bytes: resident_bytes(),
    };
    for &batch in &plan.batches {
        report.decode.push(bench.decode(batch, floor_bytes).await?);
    }
    for &tokens in &plan.first_token {
        report.first_token.push(bench.first_token(tokens).await?);
    }
    if let Some(workload) = plan.throughput {
        report.throughput = Some(bench.throughput(workload).await?);
    }
    drop(bench);
    drop(model);
    server.shutdown().await;
    Ok(report)
}

struct Bench<'a> {
    client: Client,
    plan: &'a Plan,
    progress: Progress<'a>,
    runs: u64,
    /// Of the last prompts: none comes twice, so that none is found in a cache.
    seed: u64,
}

impl Bench<'_> {
    async fn decode(&mut self, batch: u32, floor_bytes: u64) -> Result<Decode, String> {
        let Plan { prompt_tokens, output_tokens, repeats, bandwidth, .. } = *self.plan;
        let what = format!("{batch} at once");
        // Not counted: loads kernels, makes plans, records steps.
        self.times(&what, batch, prompt_tokens, 4).await?;
        let (mut tpots, mut prefills, mut busy) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..repeats.max(1) {
            let one = self.times(&what, batch, prompt_tokens, 1).await?;
            self.runs -= 1;
            let all = self.times(&what, batch, prompt_tokens, output_tokens + 1).await?;
            let decoding = all.wall.saturating_sub(one.wall);
            tpots.push(decoding / output_tokens);
            prefills.push(one.wall);
            let steps = all.steps.saturating_sub(one.steps).max(1);
            busy.push(all.device.saturating_sub(one.device) / steps as u32);
        }
        let (tpot, busy) = (median(&mut tpots), median(&mut busy));
        let floor = bandwidth.map(|bandwidth| floor_bytes as f64 / bandwidth);
        Ok(Decode {
            batch,
            prompt_tokens,
            output_tokens,
            tpot_ms: millis(tpot),
            tokens_per_second: f64::from(batch) / tpot.as_secs_f64(),
            share_of_floor: floor.map(|floor| floor / tpot.as_secs_f64()),
            device_ms: (!busy.is_zero()).then(|| millis(busy)),
            host_gap_us: (!busy.is_zero()).then_some((tpot.as_secs_f64() - busy.as_secs_f64()) * 1e6),
            first_tokens_ms: millis(median(&mut prefills)),
        })
    }

    async fn first_token(&mut self, tokens: u32) -> Result<FirstToken, String> {
        let what = format!("first token of {tokens}");
        self.times(&what, 1, tokens, 1).await?;
        let (mut times, mut busy) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.repeats.max(1) {
            let one = self.times(&what, 1, tokens, 1).await?;
            times.push(one.first);
            busy.push(one.device);
        }
        let busy = median(&mut busy);
        let device_ms = (!busy.is_zero()).then(|| millis(busy));
        Ok(FirstToken { tokens, ms: millis(median(&mut times)), device_ms })
    }

    async fn throughput(&mut self, workload: Workload) -> Result<Throughput, String> {
        let Workload { requests, prompt_tokens, output_tokens } = workload;
        let times = self.times(&format!("{requests} requests"), requests, prompt_tokens, output_tokens).await?;
        let seconds = times.wall.as_secs_f64();
        let tokens_per_second = times.tokens as f64 / seconds;
        Ok(Throughput { requests, prompt_tokens, output_tokens, seconds, tokens_per_second })
    }

    /// One run of `requests` requests at once.
    async fn times(&mut self, what: &str, requests: u32, prompt: u32, output: u32) -> Result<Times, String> {
        (self.progress)(what, self.runs, self.plan.num_runs());
        self.runs += 1;
        let prompts: Vec<Vec<TokenId>> = (0..requests).map(|_| self.prompt(prompt)).collect();
        self.client.run(prompts, output).await
    }

    fn prompt(&mut self, tokens: u32) -> Vec<TokenId> {
        self.seed += 1;
        let vocab_size = self.client.vocab_size();
        // splitmix64
        let mut state = self.seed.wrapping_mul(0x5851_f42d_4c95_7f2d);
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        };
        (0..tokens).map(|_| (next() % u64::from(vocab_size)) as TokenId).collect()
    }
}

/// Bytes of weights that every decoding step must read, and of all weights: a table of embeddings that is no head is not read.
fn floor_bytes(checkpoint: &Path, weight_bytes: u64) -> (u64, u64) {
    let config = std::fs::read(checkpoint.join("config.json")).ok();
    let config: Value = config.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    let number = |name: &str| config[name].as_u64().unwrap_or(0);
    let table = match config["tie_word_embeddings"].as_bool() {
        Some(true) => 0,
        _ => number("vocab_size") * number("hidden_size") * 2,
    };
    (weight_bytes.saturating_sub(table), weight_bytes)
}

/// Of this process, as far as the system says.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
