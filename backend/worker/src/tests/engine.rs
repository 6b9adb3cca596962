//! The smallest of engines: random chunks, random blocks, random preemptions, over a real link.

use drafthorse_control::{
    Admit, BlockId, ChannelLink, FinishReason, Grammar, Link, Ready, Row, RowError, RowResult, SamplingParams, Slot,
    Step, TokenId, TokenLogprobs, Wants,
};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use crate::config::WorkerConfig;

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Job {
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
    pub grammar: Option<Grammar>,
    pub wants: Wants,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub tokens: Vec<TokenId>,
    pub logprobs: Vec<TokenLogprobs>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    pub ended: Option<FinishReason>,
    pub error: Option<RowError>,
}

/// How jobs are scheduled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    pub seed: u64,
    /// Most tokens of a prompt chunk.
    pub max_chunk: usize,
    /// Probability that a running sequence is thrown out, or sits a step out.
    pub preempt: f64,
    pub skip: f64,
    /// Most sequences at once.
    pub max_running: usize,
}

impl Schedule {
    /// Whole prompts, no disturbance, one sequence after the other.
    pub fn alone() -> Self {
        Schedule { seed: 0, max_chunk: usize::MAX, preempt: 0.0, skip: 0.0, max_running: 1 }
    }

    /// All at once.
    pub fn together() -> Self {
        Schedule { max_running: usize::MAX, ..Schedule::alone() }
    }

    /// Everything that may happen, by the dice of `seed`.
    pub fn wild(seed: u64) -> Self {
        Schedule { seed, max_chunk: 7, preempt: 0.1, skip: 0.2, max_running: 5 }
    }
}

/// A worker's settings small enough for many steps.
pub(crate) fn small() -> WorkerConfig {
    WorkerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 256,
        block_size: 4,
        kv_cache_bytes: 1 << 20,
        grammars: super::guided::shared(),
        ..WorkerConfig::default()
    }
}

/// Drives one worker.
pub(crate) struct Engine {
    link: ChannelLink,
    ready: Ready,
    /// Slots, and tokens of a step.
    pub max_seqs: u32,
    pub max_tokens: usize,
    next_step: u64,
    /// Sequences admitted and not yet released, from one call to the next.
    stale: Vec<Slot>,
    pub num_steps: usize,
    /// Drafts that were planned, and that held.
    pub num_drafts: usize,
    pub num_held: usize,
    /// Of the last step's tokens, and of the drafts that are there for the next.
    pub checksum: u64,
}

struct Running {
    job: usize,
    slot: Slot,
    blocks: Vec<BlockId>,
    num_known: usize,
    num_computed: usize,
    num_drafts: usize,
    admitted: bool,
}

impl Engine {
    pub fn new((ready, link): (Ready, ChannelLink)) -> Self {
        let WorkerConfig { max_num_seqs: max_seqs, max_num_batched_tokens, .. } = small();
        let max_tokens = max_num_batched_tokens as usize;
        let (num_steps, num_drafts, num_held, checksum) = (0, 0, 0, 0);
        let stale = Vec::new();
        Engine { link, ready, max_seqs, max_tokens, next_step: 1, stale, num_steps, num_drafts, num_held, checksum }
    }

    /// Runs all jobs to their ends.
    pub fn serve(&mut self, jobs: &[Job], schedule: Schedule) -> Vec<Outcome> {
        let mut rng = StdRng::seed_from_u64(schedule.seed);
        let mut outcomes = vec![Outcome::default(); jobs.len()];
        let mut waiting: Vec<usize> = (0..jobs.len()).rev().collect();
        let mut running: Vec<Running> = Vec::new();
        let mut free_blocks: Vec<BlockId> = (0..self.ready.num_blocks).map(BlockId).collect();
        free_blocks.shuffle(&mut rng);
        let mut free_slots: Vec<Slot> = (0..self.max_seqs).map(Slot).collect();
        while !(waiting.is_empty() && running.is_empty()) {
            let mut step = Step { id: self.next_step, release: std::mem::take(&mut self.stale), ..Step::default() };
            free_slots.retain(|slot| !step.release.contains(slot));
            free_slots.extend(&step.release);
            running.retain_mut(|run| {
                let goes = !rng.random_bool(schedule.preempt);
                if !goes {
                    if run.admitted {
                        step.release.push(run.slot);
                    }
                    free_slots.push(run.slot);
                    free_blocks.append(&mut run.blocks);
                    waiting.push(run.job);
                }
                goes
            });
            while running.len() < schedule.max_running && !waiting.is_empty() && !free_slots.is_empty() {
                let job = waiting.pop().unwrap();
                let slot = free_slots.remove(rng.random_range(0..free_slots.len()));
                let num_known = jobs[job].prompt.len() + outcomes[job].tokens.len();
                running.push(Running {
                    job,
                    slot,
                    blocks: vec![],
                    num_known,
                    num_computed: 0,
                    num_drafts: 0,
                    admitted: false,
                });
            }
            let mut planned = Vec::new();
            let mut left = self.max_tokens;
            for (index, run) in running.iter_mut().enumerate() {
                if rng.random_bool(schedule.skip) {
                    continue;
                }
                let missing = run.num_known - run.num_computed;
                let chunk = match missing {
                    1 => 1,
                    _ => rng.random_range(1..=missing.min(schedule.max_chunk)).max(missing.min(schedule.max_chunk) / 2),
                };
                let chunk = if schedule.skip == 0.0 { missing.min(schedule.max_chunk) } else { chunk };
                let num_drafts = if chunk == missing { run.num_drafts } else { 0 };
                if chunk + num_drafts > left {
                    continue;
                }
                left -= chunk + num_drafts;
                if !run.admitted {
                    run.admitted = true;
                    let job = &jobs[run.job];
                    step.admit.push(Admit {
                        slot: run.slot,
                        tokens: [&job.prompt[..], &outcomes[run.job].tokens].concat(),
                        num_prompt: job.prompt.len() as u32,
                        num_cached: 0,
                        blocks: vec![],
                        sampling: job.sampling.clone(),
                        grammar: job.grammar.clone(),
                        fork_of: None,
                        adapter: None,
                    });
                }
                // Room for the drafter's entries too; an engine short of blocks gives less.
                let spare = match schedule.skip == 0.0 {
                    true => self.ready.draft_slots as usize,
                    false => rng.random_range(0..=self.ready.draft_slots as usize),
                };
                let wanted = (run.num_computed + chunk + num_drafts + spare).div_ceil(self.ready.block_size as usize);
                let new = free_blocks.split_off(free_blocks.len() - wanted.saturating_sub(run.blocks.len()));
                run.blocks.extend(&new);
                // What a preempted sequence was told before it need not be told again.
                let mut wants = jobs[run.job].wants;
                if outcomes[run.job].prompt_logprobs.len() + 1 >= jobs[run.job].prompt.len() {
                    wants.prompt_logprobs = Default::default();
                } else if run.num_computed == 0 {
                    outcomes[run.job].prompt_logprobs.clear();
                }
                step.rows.push(Row {
                    slot: run.slot,
                    num_tokens: (chunk + num_drafts) as u32,
                    num_drafts: num_drafts as u32,
                    new_blocks: new,
                    wants,
                });
                planned.push((index, chunk));
            }
            let result = self.step(&step);
            for ((row, result), (index, chunk)) in step.rows.iter().zip(result).zip(planned) {
                let run = &mut running[index];
                self.num_drafts += row.num_drafts as usize;
                self.num_held += result.accepted.len().saturating_sub(1);
                assert!(result.accepted.len() <= row.num_drafts as usize + 1);
                run.num_computed += chunk + result.accepted.len().saturating_sub(1);
                run.num_known += result.accepted.len();
                run.num_drafts = result.num_drafts as usize;
                let outcome = &mut outcomes[run.job];
                outcome.tokens.extend(result.accepted);
                outcome.logprobs.extend(result.logprobs);
                outcome.prompt_logprobs.extend(result.prompt_logprobs);
                (outcome.ended, outcome.error) = (result.ended, result.error);
            }
            running.retain_mut(|run| {
                let outcome = &outcomes[run.job];
                let goes = outcome.ended.is_none() && outcome.error.is_none();
                if !goes {
                    self.stale.push(run.slot);
                    free_blocks.append(&mut run.blocks);
                }
                goes
            });
        }
        outcomes
    }

    /// Sends a step as it is and waits for its rows.
    pub fn step(&mut self, step: &Step) -> Vec<RowResult> {
        self.try_step(step).unwrap()
    }

    /// As [`step`](Self::step), or what the rank died of.
    pub fn try_step(&mut self, step: &Step) -> Result<Vec<RowResult>, String> {
        self.link.send(step).map_err(|error| error.to_string())?;
        let result = self.link.recv().map_err(|error| error.to_string())?;
        assert_eq!(result.id, step.id);
        self.next_step += 1;
        self.num_steps += 1;
        self.checksum = result.checksum;
        Ok(result.rows)
    }
}
