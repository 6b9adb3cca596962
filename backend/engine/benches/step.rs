//! What the engine thread costs per step, over ranks that take no time: planning, committing and delivering.
//!
//! `us/step` is wall time of planning, committing and delivering; `cpu_us/step` is the engine thread's processor time for
//! all it does, this bench's rank included, and does not suffer from other processes.
//!
//! `cargo bench -p drafthorse-engine`

#![allow(clippy::print_stdout, reason = "a bench prints")]

use std::collections::VecDeque;
use std::sync::mpsc;

use drafthorse_control::{Link, LinkError, Ready, RowResult, SamplingParams, Step, StepResult, TokenId};
use drafthorse_engine::{Engine, EngineConfig, Event, Request, RequestId, Stats};

const PROMPT_TOKENS: usize = 16;
const OUTPUT_TOKENS: u32 = 512;

/// A rank that answers every row with a token at once.
#[derive(Default)]
struct Instant {
    results: VecDeque<StepResult>,
}

impl Link for Instant {
    fn send(&mut self, step: &Step) -> Result<(), LinkError> {
        let rows = step.rows.iter().map(|_| RowResult { accepted: vec![7], ..RowResult::default() }).collect();
        self.results.push_back(StepResult { id: step.id, rows, ..StepResult::default() });
        Ok(())
    }

    fn recv(&mut self) -> Result<StepResult, LinkError> {
        self.results.pop_front().ok_or(LinkError::Closed { rank: 0 })
    }
}

/// Runs `num_seqs` requests side by side to their end.
fn run(num_seqs: u32, enable_prefix_caching: bool) -> Result<(Stats, f64), Box<dyn std::error::Error>> {
    let config = EngineConfig {
        max_num_seqs: num_seqs,
        max_num_batched_tokens: num_seqs * PROMPT_TOKENS as u32,
        enable_prefix_caching,
        ..EngineConfig::default()
    };
    let block_size = 16;
    let ready = Ready {
        num_blocks: num_seqs * (PROMPT_TOKENS as u32 + OUTPUT_TOKENS + block_size) / block_size + num_seqs,
        block_size,
        max_model_len: 4096,
        vocab_size: 1 << 20,
        max_drafts: 0,
        draft_slots: 0,
        needs_host_tokens: false,
        pipeline_depth: 1,
        weight_bytes: 0,
        kv_bytes: 0,
        workspace_bytes: 0,
    };
    let engine = Engine::start(config, ready, vec![Box::<Instant>::default()])?;
    let (sender, ends) = mpsc::channel();
    for id in 0..num_seqs {
        let prompt: Vec<TokenId> = (0..PROMPT_TOKENS as u32).map(|at| id * 16 + at).collect();
        let sampling = SamplingParams { max_tokens: OUTPUT_TOKENS, ..SamplingParams::default() };
        let sender = sender.clone();
        let sink = move |event: Event| !event.is_last() || sender.send(()).is_ok();
        engine.submit(Request::new(RequestId(id.into()), prompt, sampling, Box::new(sink)))?;
    }
    for _ in 0..num_seqs {
        ends.recv()?;
    }
    Ok((engine.stats(), engine_cpu_nanos().unwrap_or(f64::NAN)))
}

/// The processor time of this process' engine thread, where the system tells.
fn engine_cpu_nanos() -> Option<f64> {
    for task in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
        let read = |file| std::fs::read_to_string(task.path().join(file)).ok();
        if read("comm")?.trim() == "engine" {
            return read("schedstat")?.split_whitespace().next()?.parse().ok();
        }
    }
    None
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("sequences  prefix_cache  steps  us/step  cpu_us/step  cpu_ns/sequence  target_us");
    for num_seqs in [1, 8, 64, 256, 1024] {
        for enable_prefix_caching in [true, false] {
            let mut runs = Vec::new();
            for _ in 0..5 {
                let (stats, cpu_nanos) = run(num_seqs, enable_prefix_caching)?;
                let steps = stats.steps as f64;
                runs.push((cpu_nanos / 1e3 / steps, stats.scheduler_time.as_secs_f64() * 1e6 / steps, stats.steps));
            }
            runs.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (cpu_micros, micros, steps) = runs[2];
            let rows = f64::from(num_seqs) * f64::from(OUTPUT_TOKENS) / steps as f64;
            println!(
                "{num_seqs:9}  {:>12}  {steps:5}  {micros:7.1}  {cpu_micros:11.1}  {:15.0}  {:9.1}",
                if enable_prefix_caching { "on" } else { "off" },
                cpu_micros * 1e3 / rows,
                20.0 + 0.2 * rows,
            );
        }
    }
    Ok(())
}
