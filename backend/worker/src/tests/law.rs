//! The law of sampling: many draws through the sampler, against probabilities worked out by hand, setting by setting.

#![allow(clippy::print_stdout, reason = "the p-values are what this test is about; `--nocapture` shows them")]

use drafthorse_control::{Admit, BlockId, SamplingParams, Slot, TokenId};
use drafthorse_kernels::{DType, Device, Tensor, Workspace};

use crate::inputs::{Inputs, LogitRow, LogitsOf, PlannedRow};
use crate::sampler::Sampler;
use crate::slots::{SlotSizes, Slots};

const VOCAB: usize = 12;
const ROWS: usize = 32;
const DRAWS: usize = 32_000;
/// Five in the prompt, then the output.
const TOKENS: [TokenId; 9] = [0, 1, 2, 2, 9, 3, 4, 4, 7];
const NUM_PROMPT: usize = 5;

/// No two alike.
fn logits() -> Vec<f32> {
    let weights = [30.0f32, 18.0, 14.0, 11.0, 8.0, 6.0, 4.5, 3.0, 2.2, 1.6, 1.1, 0.6];
    weights.iter().map(|weight| weight.ln()).collect()
}

/// How often each token was picked.
fn counts(sampling: &SamplingParams) -> Vec<usize> {
    let device = &Device::Cpu;
    let sizes = SlotSizes {
        num_slots: 1,
        max_blocks: 1,
        block_size: 16,
        num_blocks: 1,
        max_model_len: 64,
        max_drafts: 1,
        vocab_size: VOCAB,
        hidden: 4,
        dtype: DType::F32,
    };
    let mut slots = Slots::new(device, sizes).unwrap();
    let admit = Admit {
        slot: Slot(0),
        tokens: TOKENS.to_vec(),
        num_prompt: NUM_PROMPT as u32,
        num_cached: 0,
        blocks: vec![BlockId(0)],
        sampling: sampling.clone(),
        grammar: None,
        fork_of: None,
        adapter: None,
    };
    slots.admit(1, &admit).unwrap();
    let mut sampler = Sampler::new(device, ROWS, ROWS, VOCAB).unwrap();
    let workspace = Workspace::new(device, Sampler::workspace_bytes(device, ROWS, VOCAB)).unwrap();
    let mut inputs = Inputs::default();
    inputs.rows.extend((0..ROWS).map(|i| PlannedRow {
        slot: Slot(0),
        serial: 1,
        tokens: i..i + 1,
        num_drafts: 0,
        wants_token: true,
        logits: i..i + 1,
    }));
    let mut counts = vec![0; VOCAB];
    for first in (0..DRAWS).step_by(ROWS) {
        let of = LogitsOf::Next { after_drafts: 0 };
        inputs.logits =
            (first..first + ROWS).map(|position| LogitRow { slot: Slot(0), position, of, logprobs: None }).collect();
        sampler.begin();
        sampler.fill_masks(&inputs.rows, &inputs.logits, &mut slots);
        let values: Vec<f32> = (0..ROWS).flat_map(|_| logits()).collect();
        let mut rows = Tensor::from_slice(device, "logits", &values, [ROWS, VOCAB]).unwrap();
        sampler.sample(&inputs.logits, &mut rows, &slots, &workspace).unwrap();
        (0..ROWS).for_each(|row| counts[sampler.token(row).unwrap() as usize] += 1);
    }
    counts
}

/// The law of the token after [`TOKENS`].
fn law(sampling: &SamplingParams) -> Vec<f64> {
    let (prompt, output) = TOKENS.split_at(NUM_PROMPT);
    law_after(&logits(), prompt, output, sampling)
}

/// The probabilities of what follows `prompt` and `output`, written out in the order that the sampler documents: bias, penalties, what is shut out, temperature,
/// typical, min_p, top_k, top_p.
pub(super) fn law_after(logits: &[f32], prompt: &[TokenId], output: &[TokenId], sampling: &SamplingParams) -> Vec<f64> {
    let mut logits: Vec<f64> = logits.iter().copied().map(f64::from).collect();
    let vocab = logits.len();
    for &(token, bias) in &sampling.logit_bias {
        logits[token as usize] += f64::from(bias);
    }
    for token in 0..vocab {
        let in_output = output.iter().filter(|&&t| t as usize == token).count() as f64;
        let logit = &mut logits[token];
        if in_output > 0.0 || prompt.contains(&(token as TokenId)) {
            let penalty = f64::from(sampling.repetition_penalty);
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        *logit -= f64::from(sampling.frequency_penalty) * in_output;
        *logit -= f64::from(sampling.presence_penalty) * in_output.min(1.0);
        let token = token as TokenId;
        let too_early = output.len() < sampling.min_tokens as usize && sampling.stop_tokens.contains(&token);
        let shut_out = !sampling.allowed_tokens.is_empty() && !sampling.allowed_tokens.contains(&token);
        let completes = |word: &Vec<TokenId>| {
            let (last, before) = word.split_last().unwrap();
            *last == token && output.ends_with(before)
        };
        if too_early || shut_out || sampling.bad_words.iter().any(completes) {
            *logit = f64::NEG_INFINITY;
        }
    }
    let softmax = |logits: &[f64]| {
        let weights: Vec<f64> = logits.iter().map(|logit| (logit / f64::from(sampling.temperature)).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / total).collect::<Vec<f64>>()
    };
    let mut p = softmax(&logits);
    let order = |p: &[f64], key: &dyn Fn(f64) -> f64| {
        let mut order: Vec<usize> = (0..p.len()).filter(|&token| p[token] > 0.0).collect();
        order.sort_by(|&a, &b| key(p[a]).total_cmp(&key(p[b])));
        order
    };
    // Keeps tokens in `order` until they weigh `mass` of what there is.
    let keep = |p: &mut Vec<f64>, order: Vec<usize>, mass: f64| {
        let total: f64 = p.iter().sum();
        let mut sum = 0.0;
        for token in order {
            if sum >= mass * total {
                p[token] = 0.0;
            } else {
                sum += p[token];
            }
        }
    };
    if sampling.typical_p < 1.0 {
        let mean: f64 = p.iter().filter(|&&p| p > 0.0).map(|p| -p * p.ln()).sum();
        let by_distance = order(&p, &|p| (-p.ln() - mean).abs());
        keep(&mut p, by_distance, f64::from(sampling.typical_p));
    }
    let largest = p.iter().copied().fold(0.0, f64::max);
    for p in &mut p {
        if *p < f64::from(sampling.min_p) * largest {
            *p = 0.0;
        }
    }
    if sampling.top_k > 0 {
        order(&p, &|p| -p).into_iter().skip(sampling.top_k as usize).for_each(|token| p[token] = 0.0);
    }
    let by_mass = order(&p, &|p| -p);
    keep(&mut p, by_mass, f64::from(sampling.top_p));
    let total: f64 = p.iter().sum();
    p.into_iter().map(|p| p / total).collect()
}

/// How likely chi-square is at least as large as that of `counts`, if they follow `law`. 0 if something impossible was picked.
pub(super) fn p_value(counts: &[usize], law: &[f64]) -> f64 {
    let draws: usize = counts.iter().sum();
    let mut chi_square = 0.0;
    let mut freedom = -1i32;
    for (&count, p) in counts.iter().zip(law) {
        if *p == 0.0 {
            if count > 0 {
                return 0.0;
            }
            continue;
        }
        let expected = draws as f64 * p;
        chi_square += (count as f64 - expected).powi(2) / expected;
        freedom += 1;
    }
    if freedom == 0 { 1.0 } else { (1.0 - chi_square_below(chi_square, freedom)).max(0.0) }
}

/// The distribution function of chi-square: its density in the root of the argument, which is smooth, summed by Simpson's rule.
fn chi_square_below(x: f64, freedom: i32) -> f64 {
    const STEPS: usize = 20_000;
    let half = f64::from(freedom) / 2.0;
    // The logarithm of gamma of a whole or a half number: of many degrees of freedom gamma itself is past any f64.
    let (mut at, mut ln_gamma) = if freedom % 2 == 0 { (1.0, 0.0) } else { (0.5, std::f64::consts::PI.ln() / 2.0) };
    while at < half {
        ln_gamma += f64::ln(at);
        at += 1.0;
    }
    let scale = 2f64.ln() * (1.0 - half) - ln_gamma;
    let power = |u: f64| if freedom == 1 { 0.0 } else { f64::from(freedom - 1) * u.ln() };
    let density = |u: f64| (scale + power(u) - u * u / 2.0).exp();
    let step = x.sqrt() / STEPS as f64;
    let sum: f64 = (0..=STEPS)
        .map(|i| {
            let weight = if i == 0 || i == STEPS { 1.0 } else { 2.0 + 2.0 * (i % 2) as f64 };
            weight * density(i as f64 * step)
        })
        .sum();
    sum * step / 3.0
}

#[test]
fn the_p_value_is_that_of_the_tables() {
    for (x, freedom, p) in
        [(3.841, 1, 0.05), (5.991, 2, 0.05), (11.07, 5, 0.05), (24.725, 11, 0.01), (553.127, 500, 0.05)]
    {
        let got = 1.0 - chi_square_below(x, freedom);
        assert!((got - p).abs() < 1e-4, "chi-square {x} of {freedom}: {got}, not {p}");
    }
}

#[test]
fn draws_follow_the_law_of_every_setting() {
    let plain = SamplingParams { temperature: 1.0, seed: 20, ..SamplingParams::default() };
    let cases: Vec<(&str, SamplingParams)> = vec![
        ("temperature 1", plain.clone()),
        ("temperature 0.5", SamplingParams { temperature: 0.5, ..plain.clone() }),
        ("temperature 2", SamplingParams { temperature: 2.0, ..plain.clone() }),
        ("top_k 3", SamplingParams { top_k: 3, ..plain.clone() }),
        ("top_p 0.6", SamplingParams { top_p: 0.6, ..plain.clone() }),
        ("top_p 0.95", SamplingParams { top_p: 0.95, ..plain.clone() }),
        ("min_p 0.11", SamplingParams { min_p: 0.11, ..plain.clone() }),
        ("typical_p 0.3", SamplingParams { typical_p: 0.3, ..plain.clone() }),
        ("typical_p 0.9", SamplingParams { typical_p: 0.9, temperature: 1.4, ..plain.clone() }),
        ("repetition_penalty 1.5", SamplingParams { repetition_penalty: 1.5, ..plain.clone() }),
        ("presence_penalty 0.8", SamplingParams { presence_penalty: 0.8, ..plain.clone() }),
        ("frequency_penalty 0.6", SamplingParams { frequency_penalty: 0.6, ..plain.clone() }),
        ("frequency_penalty -0.6", SamplingParams { frequency_penalty: -0.6, ..plain.clone() }),
        ("logit_bias", SamplingParams { logit_bias: vec![(11, 3.0), (0, -1.0)], ..plain.clone() }),
        ("allowed_tokens", SamplingParams { allowed_tokens: vec![2, 5, 11], ..plain.clone() }),
        ("bad_words", SamplingParams { bad_words: vec![vec![1], vec![4, 7, 0], vec![7, 3, 2]], ..plain.clone() }),
        ("min_tokens", SamplingParams { min_tokens: 5, stop_tokens: vec![0, 4], ..plain.clone() }),
        (
            "all together",
            SamplingParams {
                temperature: 1.3,
                top_k: 7,
                top_p: 0.93,
                min_p: 0.05,
                typical_p: 0.95,
                repetition_penalty: 1.2,
                presence_penalty: 0.3,
                frequency_penalty: 0.2,
                logit_bias: vec![(8, 1.5)],
                bad_words: vec![vec![7, 1]],
                ..plain.clone()
            },
        ),
    ];
    for (name, sampling) in &cases {
        let p = p_value(&counts(sampling), &law(sampling));
        println!("{name:24} p = {p:.4}");
        // One in ten thousand would be chance; the seed is fixed.
        assert!(p > 1e-4, "{name}: p = {p:e}, {:?} of {DRAWS}, expected {:?}", counts(sampling), law(sampling));
    }
    // The test can tell a law from one that is a little different.
    let off = SamplingParams { temperature: 1.05, ..plain.clone() };
    let p = p_value(&counts(&off), &law(&plain));
    assert!(p < 1e-4, "temperature 1.05 passes for 1: p = {p}");
}
