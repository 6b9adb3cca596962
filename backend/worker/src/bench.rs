//! Prefill and decode speed of a model, without engine, network or text.
//!
//! Sequences are random tokens of a fixed seed, greedy, with nothing that ends them; a step is measured from the
//! [`Step`] to its result.

use std::time::{Duration, Instant};

use drafthorse_control::{Admit, BlockId, Ready, Row, SamplingParams, Slot, Step, TokenId, Wants};
use drafthorse_kernels::device::Stopwatch;
use drafthorse_kernels::ops::copy_rows::copy;
use drafthorse_kernels::{DType, Tensor};
use serde::Serialize;

use crate::config::{DeviceKind, WorkerConfig};
use crate::error::{Result, WorkerError};
use crate::load::{Progress, load};
use crate::runner::Runner;
use crate::spec::SpeculateConfig;

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchConfig {
    /// `max_num_seqs` is raised to the largest batch.
    pub worker: WorkerConfig,
    /// Tokens of the prompts whose prefill is timed; each length is a line.
    pub prefill_tokens: Vec<u32>,
    /// Sequences that decode together; each number is a line.
    pub decode_batches: Vec<u32>,
    /// Tokens of a sequence before its decoding is timed.
    pub decode_context: u32,
    /// Decode steps timed for each batch.
    pub decode_steps: u32,
    /// Each prefill is timed this often, and the median is reported.
    pub repeats: u32,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    pub load_seconds: f64,
    pub weight_bytes: u64,
    pub workspace_bytes: u64,
    /// Most of the workspace that was ever taken.
    pub workspace_used_bytes: u64,
    pub kv_bytes: u64,
    pub prefill: Vec<Prefill>,
    pub decode: Vec<Decode>,
}

/// One prompt alone, in chunks of at most `max_num_batched_tokens`, and its first token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prefill {
    pub tokens: u32,
    pub median_ms: f64,
    pub tokens_per_second: f64,
}

/// `batch` sequences, a token each a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decode {
    pub batch: u32,
    /// Tokens of each sequence when the timing began.
    pub context: u32,
    pub steps: u32,
    pub median_step_ms: f64,
    /// Of all sequences together, by the total time.
    pub tokens_per_second: f64,
}

impl Default for BenchConfig {
    fn default() -> Self {
        BenchConfig {
            worker: WorkerConfig::default(),
            prefill_tokens: vec![512],
            decode_batches: vec![1, 8],
            decode_context: 128,
            decode_steps: 64,
            repeats: 3,
        }
    }
}

/// Loads the model and measures it, on the calling thread.
///
/// # Errors
/// As loading; `Setting` if the sequences do not fit the model or its KV cache.
pub fn run(config: &BenchConfig, progress: &(dyn Fn(Progress) + Send)) -> Result<BenchReport> {
    let started = Instant::now();
    let mut worker = config.worker.clone();
    // Of random tokens no draft holds.
    worker.speculate = SpeculateConfig::default();
    let largest = config.decode_batches.iter().copied().max().unwrap_or(1);
    worker.max_num_seqs = worker.max_num_seqs.max(largest);
    worker.max_num_batched_tokens = worker.max_num_batched_tokens.max(worker.max_num_seqs);
    let (runner, ready) = load(&worker, progress)?;
    let load_seconds = started.elapsed().as_secs_f64();

    let chunk = worker.max_num_batched_tokens;
    let Ready { block_size, vocab_size, .. } = ready;
    let pipeline_depth = ready.pipeline_depth as usize;
    let mut bench = Bench { runner, block_size, vocab_size, chunk, pipeline_depth, next_step: 1 };
    let fits = |field, tokens: u32, seqs: u32| {
        let blocks = u64::from(tokens.div_ceil(ready.block_size)) * u64::from(seqs);
        if tokens > 0 && seqs > 0 && tokens < ready.max_model_len && blocks <= u64::from(ready.num_blocks) {
            return Ok(());
        }
        let must = format!(
            "positive, less than {} tokens a sequence, and inside {} blocks of {} tokens",
            ready.max_model_len, ready.num_blocks, ready.block_size
        );
        Err(WorkerError::Setting { field, got: format!("{seqs} sequences of {tokens} tokens"), must })
    };
    let mut prefill = Vec::new();
    for &tokens in &config.prefill_tokens {
        fits("prefill_tokens", tokens, 1)?;
        prefill.push(bench.prefill(tokens, config.repeats.max(1))?);
    }
    let mut decode = Vec::new();
    for &batch in &config.decode_batches {
        fits("decode_batches", config.decode_context + config.decode_steps + 1, batch)?;
        decode.push(bench.decode(batch, config.decode_context, config.decode_steps)?);
    }
    Ok(BenchReport {
        load_seconds,
        weight_bytes: ready.weight_bytes,
        workspace_bytes: ready.workspace_bytes,
        workspace_used_bytes: bench.runner.workspace.high_water_bytes() as u64,
        kv_bytes: ready.kv_bytes,
        prefill,
        decode,
    })
}

/// Bytes a second that a GPU's memory takes part in copies with, read and written: about what it is read with. `None` for the CPU.
///
/// # Errors
/// If there is no such GPU, or no room for 2 GiB.
pub fn bandwidth(device: DeviceKind) -> Result<Option<f64>> {
    const ELEMENTS: usize = 1 << 28;
    let device = device.open(false)?;
    let Some(stopwatch) = Stopwatch::new(&device)? else { return Ok(None) };
    let from = Tensor::zeros(&device, "copied", [ELEMENTS], DType::I32)?;
    let mut to = Tensor::zeros(&device, "copy", [ELEMENTS], DType::I32)?;
    let mut times = Vec::new();
    for _ in 0..7 {
        stopwatch.begin()?;
        copy(&from, &mut to)?;
        stopwatch.end()?;
        times.push(stopwatch.elapsed()?);
    }
    Ok(Some(2.0 * from.size_bytes() as f64 / median(&mut times).as_secs_f64()))
}

/// The simplest of schedulers: sequence `i` has slot `i` and its own stretch of blocks.
struct Bench {
    runner: Runner,
    block_size: u32,
    vocab_size: u32,
    chunk: u32,
    pipeline_depth: usize,
    next_step: u64,
}

impl Bench {
    fn prefill(&mut self, tokens: u32, repeats: u32) -> Result<Prefill> {
        let mut times = Vec::new();
        // The first run touches fresh pages; it is not counted.
        for _ in 0..=repeats {
            let started = Instant::now();
            self.start(0, tokens, tokens)?;
            times.push(started.elapsed());
            self.release(1)?;
        }
        let median = median(&mut times[1..]);
        Ok(Prefill {
            tokens,
            median_ms: median.as_secs_f64() * 1e3,
            tokens_per_second: f64::from(tokens) / median.as_secs_f64(),
        })
    }

    fn decode(&mut self, batch: u32, context: u32, steps: u32) -> Result<Decode> {
        let reserved = context + steps + 1;
        for slot in 0..batch {
            self.start(slot, context, reserved)?;
        }
        let rows: Vec<Row> = (0..batch).map(|slot| row(slot, 1, Vec::new())).collect();
        let mut times = Vec::new();
        // As many steps in flight as an engine would have.
        let mut last = Instant::now();
        for _ in 0..steps {
            self.launch(Step { rows: rows.clone(), ..Step::default() })?;
            if self.runner.in_flight.len() < self.pipeline_depth {
                continue;
            }
            self.finish()?;
            times.push(last.elapsed());
            last = Instant::now();
        }
        while !self.runner.in_flight.is_empty() {
            self.finish()?;
            times.push(last.elapsed());
            last = Instant::now();
        }
        self.release(batch)?;
        let total: Duration = times.iter().sum();
        Ok(Decode {
            batch,
            context,
            steps,
            median_step_ms: median(&mut times).as_secs_f64() * 1e3,
            tokens_per_second: f64::from(batch) * f64::from(steps) / total.as_secs_f64(),
        })
    }

    /// Admits a sequence of `tokens` random tokens, with blocks for `reserved`, and runs its prompt.
    fn start(&mut self, slot: u32, tokens: u32, reserved: u32) -> Result<()> {
        let blocks_each = reserved.div_ceil(self.block_size);
        let admit = Admit {
            slot: Slot(slot),
            tokens: random_tokens(u64::from(slot), tokens, self.vocab_size),
            num_prompt: tokens,
            num_cached: 0,
            blocks: (slot * blocks_each..(slot + 1) * blocks_each).map(BlockId).collect(),
            sampling: SamplingParams { max_tokens: u32::MAX, ..SamplingParams::default() },
            grammar: None,
            fork_of: None,
            adapter: None,
        };
        let mut admit = vec![admit];
        let mut left = tokens;
        while left > 0 {
            let num_tokens = left.min(self.chunk);
            let rows = vec![row(slot, num_tokens, Vec::new())];
            self.step(Step { admit: std::mem::take(&mut admit), rows, ..Step::default() })?;
            left -= num_tokens;
        }
        Ok(())
    }

    fn release(&mut self, num_slots: u32) -> Result<()> {
        self.step(Step { release: (0..num_slots).map(Slot).collect(), ..Step::default() })
    }

    fn step(&mut self, step: Step) -> Result<()> {
        self.launch(step)?;
        self.finish()
    }

    fn launch(&mut self, mut step: Step) -> Result<()> {
        step.id = self.next_step;
        self.next_step += 1;
        self.runner.launch(&step)
    }

    fn finish(&mut self) -> Result<()> {
        let result = self.runner.finish()?;
        match result.rows.into_iter().find_map(|row| row.error) {
            Some(error) => Err(WorkerError::Row(error)),
            None => Ok(()),
        }
    }
}

fn row(slot: u32, num_tokens: u32, new_blocks: Vec<BlockId>) -> Row {
    Row { slot: Slot(slot), num_tokens, num_drafts: 0, new_blocks, wants: Wants::default() }
}

/// The same tokens for the same seed: splitmix64.
fn random_tokens(seed: u64, count: u32, vocab_size: u32) -> Vec<TokenId> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    (0..count).map(|_| (next() % u64::from(vocab_size)) as TokenId).collect()
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
