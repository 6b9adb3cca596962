//! A drafter with a KV cache of its own: it knows what comes as long as every entry it reads is the right one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use drafthorse_control::{Admit, BlockId, Row, SamplingParams, Slot, Step, TokenId, Wants};
use drafthorse_kernels::{DType, Tensor};
use drafthorse_model::{Forward, KvLayer, Model, Result, StepSize};

use super::engine::{Engine, Job, Schedule, small};
use super::fake::{self, HIDDEN, POISON, VOCAB, hash, logit, mix};
use super::serving::mixed_jobs;
use super::{fake_engine, rank};
use crate::config::WorkerConfig;
use crate::spec::{Drafter, SpeculateConfig};

const DRAFTS: u32 = 3;

/// The fake model's hidden state at i + 1 is a hash of that at i and of token i + 1, which are just what a drafter is given: so it
/// can be right always. It reads back all entries from slot 1 on, and each must follow from the one before.
struct FakeDrafter {
    /// Layers whose inputs it is given side by side; all are the hidden state in disguise.
    taps: Vec<usize>,
    /// After one history in so many it is wrong on purpose; 0: never.
    wrong_every: u64,
    /// Entries that did not follow.
    torn: Arc<AtomicUsize>,
}

impl FakeDrafter {
    /// The hidden states that it is given of the target or, one each, of itself.
    fn hidden(&self, given: &Tensor) -> Vec<f32> {
        let (_, width) = given.rows_cols();
        let mut hidden = Vec::new();
        for row in given.as_slice::<f32>().chunks(width) {
            if width == HIDDEN {
                hidden.extend(row);
                continue;
            }
            assert_eq!(width, self.taps.len() * HIDDEN);
            let of_layer = |(columns, &layer): (&[f32], &usize)| -> Vec<f32> {
                columns.iter().map(|column| column - fake::tapped(layer)).collect()
            };
            let of_layers: Vec<Vec<f32>> = row.chunks(HIDDEN).zip(&self.taps).map(of_layer).collect();
            self.torn.fetch_add(usize::from(of_layers.iter().any(|parts| *parts != of_layers[0])), Relaxed);
            hidden.extend(&of_layers[0]);
        }
        hidden
    }

    fn follow(hidden: u64, token: TokenId) -> u64 {
        mix(hidden ^ u64::from(token + 1))
    }
}

fn parts(hash: u64) -> [f32; HIDDEN] {
    [0, 16, 32, 48].map(|shift| (hash >> shift & 0xffff) as f32)
}

fn whole(parts: &[f32]) -> u64 {
    parts.iter().rev().fold(0, |hash, &part| hash << 16 | part as u64)
}

impl Model for FakeDrafter {
    fn forward(&self, cx: &mut Forward<'_>) -> Result<Tensor> {
        let (batch, given) = (cx.batch, cx.target_hidden.expect("a drafter is given hidden states"));
        let given = self.hidden(given);
        let mut hidden = cx.take([batch.num_tokens(), HIDDEN], DType::F32)?;
        let block_size = cx.kv.layout().block_size;
        let [k, v] = cx.kv.heads(1)?;
        let (k, v) = (k.as_mut_slice::<f32>(), v.as_mut_slice::<f32>());
        let sequences = batch.sequences();
        let ragged = sequences.ragged();
        let (ids, positions) = (batch.token_ids(), batch.positions());
        let (ids, positions) = (ids.as_slice::<i32>(), positions.as_slice::<i32>());
        let (_, width) = ragged.block_tables.rows_cols();
        for (seq, bounds) in ragged.cu_tokens.as_slice::<i32>().windows(2).enumerate() {
            let table = &ragged.block_tables.as_slice::<i32>()[seq * width..(seq + 1) * width];
            let place =
                |position: usize| HIDDEN * (table[position / block_size] as usize * block_size + position % block_size);
            let rows = bounds[0] as usize..bounds[1] as usize;
            for row in rows.clone() {
                let at = place(positions[row] as usize);
                k[at] = ids[row] as f32;
                v[at..at + HIDDEN].copy_from_slice(&given[row * HIDDEN..][..HIDDEN]);
            }
            for row in rows {
                let last = positions[row] as usize;
                let entry = |position| (whole(&v[place(position)..][..HIDDEN]), k[place(position)] as TokenId);
                let follows = |position| {
                    let (hidden, token) = entry(position);
                    entry(position + 1).0 == FakeDrafter::follow(hidden, token)
                };
                let torn = (1..last).filter(|&position| !follows(position)).count();
                self.torn.fetch_add(torn, Relaxed);
                let (before, token) = entry(last);
                let out = &mut hidden.as_mut_slice::<f32>()[row * HIDDEN..][..HIDDEN];
                out.copy_from_slice(&parts(if torn == 0 { FakeDrafter::follow(before, token) } else { 4321 }));
            }
        }
        Ok(hidden)
    }

    /// In the order of its own tokens, which are the others turned round.
    fn logits(&self, hidden: &Tensor, cx: &mut Forward<'_>) -> Result<Tensor> {
        let (rows, _) = hidden.rows_cols();
        let mut logits = cx.take([rows, VOCAB], DType::F32)?;
        let parts = hidden.as_slice::<f32>().chunks(HIDDEN);
        for (parts, logits) in parts.zip(logits.as_mut_slice::<f32>().chunks_mut(VOCAB)) {
            let hash = whole(parts);
            for (index, value) in logits.iter_mut().enumerate() {
                let token = VOCAB - 1 - index;
                *value = if token == POISON as usize { -100.0 } else { logit(hash, token) };
            }
            if is_wrong(hash, self.wrong_every) {
                logits.rotate_left(1);
            }
        }
        Ok(logits)
    }

    fn kv_layers(&self) -> Vec<KvLayer> {
        vec![KvLayer::Heads { num_kv_heads: 1, head_dim: HIDDEN }]
    }

    fn workspace_bytes(&self, step: StepSize) -> usize {
        let round = |bytes: usize| bytes.next_multiple_of(64);
        round(step.tokens * HIDDEN * 4) + round(step.logit_rows * VOCAB * 4)
    }
}

fn is_wrong(hash: u64, every: u64) -> bool {
    every > 0 && (hash >> 7).is_multiple_of(every)
}

/// An engine over the fake model with its drafter, and the drafter's count of torn entries.
fn drafting_engine(wrong_every: u64) -> (Engine, Arc<AtomicUsize>) {
    tapping_engine(wrong_every, Vec::new())
}

/// The same whose drafter reads the inputs of several layers.
fn tapping_engine(wrong_every: u64, taps: Vec<usize>) -> (Engine, Arc<AtomicUsize>) {
    let torn = Arc::new(AtomicUsize::new(0));
    let model = FakeDrafter { taps: taps.clone(), wrong_every, torn: torn.clone() };
    let network = move || {
        let tokens = Some((0..VOCAB as u32).rev().collect());
        let drafter = Drafter { model: Box::new(model), tokens, num_tokens: VOCAB, taps, weight_bytes: 0 };
        crate::load::Network { drafter: Some(drafter), ..fake::network() }
    };
    let speculate = SpeculateConfig {
        method: "mtp".into(),
        max_draft_token_num: DRAFTS,
        adaptive: false,
        ..SpeculateConfig::default()
    };
    (Engine::new(rank(WorkerConfig { speculate, ..small() }, network, None)), torn)
}

/// The mixed jobs, each the likeliest tokens alone.
fn greedy_jobs() -> Vec<Job> {
    let mut jobs = mixed_jobs();
    for job in &mut jobs {
        let sampling = &job.sampling;
        let (max_tokens, logit_bias) = (sampling.max_tokens, sampling.logit_bias.clone());
        job.sampling = SamplingParams { max_tokens, logit_bias, ..SamplingParams::default() };
    }
    jobs
}

#[test]
fn a_drafter_that_knows_the_target_is_always_right() {
    let jobs = greedy_jobs();
    let plain = fake_engine(None).serve(&jobs, Schedule::alone());
    let (mut engine, torn) = drafting_engine(0);
    assert_eq!(engine.serve(&jobs, Schedule::alone()), plain);
    assert_eq!(engine.num_held, engine.num_drafts);
    // One step for the prompt and its token, then all drafts and one more at a time.
    let steps = |job: &Job| 1 + (job.sampling.max_tokens as usize - 1).div_ceil(DRAFTS as usize + 1);
    assert_eq!(engine.num_steps, jobs.iter().map(steps).sum::<usize>());
    for schedule in (0..20).map(Schedule::wild).chain([Schedule::together()]) {
        assert_eq!(engine.serve(&jobs, schedule), plain, "{schedule:?}");
        assert_eq!(engine.num_held, engine.num_drafts, "{schedule:?}");
    }
    assert_eq!(torn.load(Relaxed), 0);
}

#[test]
fn drafts_that_were_wrong_leave_nothing_behind() {
    let jobs = greedy_jobs();
    let plain = fake_engine(None).serve(&jobs, Schedule::alone());
    for wrong_every in [1, 2, 3, 7] {
        let (mut engine, torn) = drafting_engine(wrong_every);
        assert_eq!(engine.serve(&jobs, Schedule::alone()), plain);
        let mut steps = 0;
        for (job, outcome) in jobs.iter().zip(&plain) {
            let all = [&job.prompt[..], &outcome.tokens].concat();
            let mut len = job.prompt.len() + 1;
            steps += 1;
            while len < all.len() {
                let most = (DRAFTS as usize).min(all.len() - len - 1);
                let right = |drafted: &usize| !is_wrong(hash(all[..len + drafted].iter().copied()), wrong_every);
                len += 1 + (0..most).take_while(right).count();
                steps += 1;
            }
        }
        assert_eq!(engine.num_steps, steps, "wrong once in {wrong_every}");
        for seed in 0..8 {
            assert_eq!(engine.serve(&jobs, Schedule::wild(seed)), plain, "seed {seed}");
        }
        assert_eq!(torn.load(Relaxed), 0, "wrong once in {wrong_every}");
    }
}

#[test]
fn sampled_text_with_penalties_and_log_probabilities_is_that_without_drafts() {
    let jobs = mixed_jobs();
    let plain = fake_engine(None).serve(&jobs, Schedule::alone());
    for wrong_every in [0, 2] {
        let (mut engine, torn) = drafting_engine(wrong_every);
        for schedule in (0..20).map(Schedule::wild).chain([Schedule::alone(), Schedule::together()]) {
            assert_eq!(engine.serve(&jobs, schedule), plain, "{schedule:?}");
        }
        assert!(engine.num_held > 0 && engine.num_held < engine.num_drafts);
        assert_eq!(torn.load(Relaxed), 0);
    }
}

#[test]
fn a_drafter_of_several_layers_is_given_them_side_by_side() {
    let jobs = greedy_jobs();
    let plain = fake_engine(None).serve(&jobs, Schedule::alone());
    for (wrong_every, taps) in [(0, vec![2, 3, 5]), (3, vec![1, 7])] {
        let (mut engine, torn) = tapping_engine(wrong_every, taps);
        for schedule in (0..12).map(Schedule::wild).chain([Schedule::alone(), Schedule::together()]) {
            assert_eq!(engine.serve(&jobs, schedule), plain, "{schedule:?}");
        }
        assert!((engine.num_held == engine.num_drafts) == (wrong_every == 0));
        assert_eq!(torn.load(Relaxed), 0);
    }
    let jobs = mixed_jobs();
    let plain = fake_engine(None).serve(&jobs, Schedule::alone());
    let (mut engine, torn) = tapping_engine(2, vec![2, 3, 5]);
    for seed in 0..6 {
        assert_eq!(engine.serve(&jobs, Schedule::wild(seed)), plain, "seed {seed}");
    }
    assert_eq!(torn.load(Relaxed), 0);
}

/// A sequence in `slot` that begins with `blocks`, of which `num_cached` tokens are computed.
fn admit(slot: u32, tokens: &[TokenId], num_cached: u32, blocks: &[u32]) -> Admit {
    Admit {
        slot: Slot(slot),
        tokens: tokens.to_vec(),
        num_prompt: tokens.len() as u32,
        num_cached,
        blocks: blocks.iter().copied().map(BlockId).collect(),
        sampling: SamplingParams { max_tokens: 40, logit_bias: vec![(POISON, -100.0)], ..SamplingParams::default() },
        grammar: None,
        fork_of: None,
        adapter: None,
    }
}

fn row(slot: u32, num_tokens: u32, num_drafts: u32, new_blocks: &[u32]) -> Row {
    let new_blocks = new_blocks.iter().copied().map(BlockId).collect();
    Row { slot: Slot(slot), num_tokens, num_drafts, new_blocks, wants: Wants::default() }
}

#[test]
fn blocks_that_are_found_again_go_on_with_their_entries() {
    for engine in [drafting_engine(0), tapping_engine(0, vec![2, 3, 5])] {
        go_on_with_blocks(engine);
    }
}

fn go_on_with_blocks((mut engine, torn): (Engine, Arc<AtomicUsize>)) {
    let prompt: Vec<TokenId> = (20..34).collect();
    let first = Step {
        id: 1,
        admit: vec![admit(0, &prompt, 0, &[0, 1, 2, 3, 4, 5])],
        rows: vec![row(0, 14, 0, &[])],
        ..Step::default()
    };
    let mut text = prompt.clone();
    text.extend(&engine.step(&first)[0].accepted);
    let second = Step { id: 2, rows: vec![row(0, 4, 3, &[])], ..Step::default() };
    text.extend(&engine.step(&second)[0].accepted);
    assert_eq!(text.len(), 19);

    // The first sequence has 18 tokens computed; another continues its first 8, one all four of its whole blocks.
    let mut id = 2;
    for (slot, num_cached, blocks) in [(1, 8, [0, 1, 10, 11, 12, 13, 14]), (2, 16, [0, 1, 2, 3, 20, 21, 22])] {
        let tokens = &text[..num_cached as usize + 2];
        let mut steps = Vec::new();
        id += 1;
        let admit = admit(slot, tokens, num_cached, &blocks);
        steps.push(Step { id, admit: vec![admit], rows: vec![row(slot, 2, 0, &[])], ..Step::default() });
        id += 1;
        steps.push(Step { id, rows: vec![row(slot, 4, 3, &[])], ..Step::default() });
        let accepted: Vec<usize> = steps.iter().map(|step| engine.step(step)[0].accepted.len()).collect();
        assert_eq!(accepted, [1, 4], "all drafts hold from the first on");
    }
    assert_eq!(torn.load(Relaxed), 0);
}

#[test]
fn what_ended_leaves_whole_blocks_too() {
    let (mut engine, torn) = drafting_engine(0);
    let prompt: Vec<TokenId> = (20..27).collect();
    let mut ends = admit(0, &prompt, 0, &[0, 1, 2]);
    ends.sampling.max_tokens = 1;
    let result = engine.step(&Step { id: 1, admit: vec![ends], rows: vec![row(0, 7, 0, &[])], ..Step::default() });
    assert!(result[0].ended.is_some());
    let next = admit(1, &[&prompt[..], &[50, 51]].concat(), 4, &[0, 10, 11, 12, 13]);
    let step =
        Step { id: 2, release: vec![Slot(0)], admit: vec![next], rows: vec![row(1, 5, 0, &[])], ..Step::default() };
    engine.step(&step);
    assert_eq!(engine.step(&Step { id: 3, rows: vec![row(1, 4, 3, &[])], ..Step::default() })[0].accepted.len(), 4);
    assert_eq!(torn.load(Relaxed), 0);
}
