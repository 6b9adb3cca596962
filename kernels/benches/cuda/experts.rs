//! A layer of experts of Qwen3-30B-A3B's shape, step by step. The floor is that of the weights that are touched; where there are many tokens
//! cuBLASLt's product of as many rows with one weight stands beside.

use drafthorse_kernels::ops::attention::Heads;
use drafthorse_kernels::ops::matmul_bf16::cuda::{By, matmul_by};
use drafthorse_kernels::ops::matmul_bf16::{
    Bf16Weight, expert_kernels, experts_by, gated_experts, matmul, matmul_experts,
};
use drafthorse_kernels::ops::moe::{Groups, Router, Rows, Scoring, assign, combine, permute, route};
use drafthorse_kernels::ops::rms_norm::rms_norm_heads;
use drafthorse_kernels::{DType, Device, Result, Tensor, Workspace};

use super::line;
use super::timing::{Random, Timer};

const HIDDEN: usize = 2048;
const INNER: usize = 768;
const EXPERTS: usize = 128;
const TOP_K: usize = 8;
/// Choices that take turns, so that no expert is found in L2 because it was chosen just before.
const COPIES: usize = 8;

/// What a step of so many tokens chose.
struct Chosen {
    ids: Tensor,
    groups: Groups,
    /// Experts that have a token.
    num_touched: usize,
}

impl Chosen {
    fn new(device: &Device, random: &mut Random, workspace: &Workspace, tokens: usize) -> Result<Self> {
        let mut experts: Vec<i32> = (0..EXPERTS as i32).collect();
        let mut ids = Vec::with_capacity(tokens * TOP_K);
        for _ in 0..tokens {
            random.shuffle(&mut experts);
            ids.extend_from_slice(&experts[..TOP_K]);
        }
        let num_touched = experts.iter().filter(|expert| ids.contains(expert)).count();
        let ids = Tensor::from_slice(device, "ids", &ids, [tokens, TOP_K])?;
        let mut groups = Groups::take(workspace, tokens, TOP_K, EXPERTS)?;
        permute(&ids, &mut groups)?;
        Ok(Chosen { ids, groups, num_touched })
    }
}

pub fn run(device: &Device, random: &mut Random) -> Result<()> {
    let Device::Cuda(gpu) = device else { unreachable!("the bench runs on a GPU") };
    let timer = Timer::new(gpu)?;
    heads(device, random, &timer)?;
    let mut weight = |out, inner| -> Result<Bf16Weight> {
        let mut weight = Bf16Weight::new(device, EXPERTS * out, inner)?;
        for expert in 0..EXPERTS {
            weight.write_rows(expert * out, &random.values(out * inner))?;
        }
        Ok(weight)
    };
    let (gate_up, down) = (weight(2 * INNER, HIDDEN)?, weight(HIDDEN, INNER)?);
    let mut gate = Bf16Weight::new(device, EXPERTS, HIDDEN)?;
    gate.write_rows(0, &random.values(EXPERTS * HIDDEN))?;
    let scoring = Scoring::Softmax;
    let router = Router { num_experts: EXPERTS, top_k: TOP_K, scoring, groups: None, normalize: true, scale: 1.0 };
    for tokens in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096] {
        let pairs = tokens * TOP_K;
        let zeros = |shape: [usize; 2], dtype| Tensor::zeros(device, "t", shape, dtype);
        let workspace = Workspace::new(device, (2 * COPIES + 1) * Groups::bytes(tokens, TOP_K, EXPERTS))?;
        let mut all =
            (0..COPIES).map(|_| Chosen::new(device, random, &workspace, tokens)).collect::<Result<Vec<_>>>()?;
        let touched = all.iter().map(|chosen| chosen.num_touched).sum::<usize>() as f64 / COPIES as f64;
        let mut logits = Tensor::from_slice(device, "logits", &random.normals(tokens * EXPERTS), [tokens, EXPERTS])?;
        let (mut ids, mut weights) = (zeros([tokens, TOP_K], DType::I32)?, zeros([tokens, TOP_K], DType::F32)?);
        let (x, mut y) = (random.tensor([tokens, HIDDEN])?, zeros([tokens, HIDDEN], DType::BF16)?);
        let mut gated = random.tensor([pairs, INNER])?;
        let mut out = zeros([pairs, HIDDEN], DType::BF16)?;
        let shape = format!("t={tokens} {touched:.0} experts");

        let us = timer.each(1, |_| route(&mut logits, None, &router, &mut ids, &mut weights))?;
        line("moe route", &shape, us, (tokens * (EXPERTS + TOP_K) * 8) as f64, "");
        let us = timer.each(COPIES, |i| {
            let Chosen { ids, groups, .. } = &mut all[i];
            permute(ids, groups)
        })?;
        line("moe permute", &shape, us, (pairs * 12) as f64, "");

        let mut scratch = Groups::take(&workspace, tokens, TOP_K, EXPERTS)?;
        let us = timer.each(1, |_| assign(&mut logits, None, &router, &mut ids, &mut weights, &mut scratch))?;
        line("moe assign", &shape, us, (tokens * (EXPERTS + TOP_K) * 8) as f64, "");

        let rate = |us: f64, width: usize| format!("{:.0} TFLOP/s", 2e-6 * (pairs * width) as f64 / us);
        let library = |out_features, inner, us: f64, random: &mut Random| -> Result<String> {
            let rate = rate(us, out_features * inner);
            if tokens < 512 {
                return Ok(rate);
            }
            let (x, one) = (random.tensor([pairs, inner])?, random.tensor([out_features, inner])?);
            let mut y = zeros([pairs, out_features], DType::BF16)?;
            let us = timer.each(1, |_| matmul_by(By::Library, gpu, &x, &one, &mut y))?;
            Ok(format!("{rate}, {us:.1} us cublaslt"))
        };
        let bytes = |width: usize, activations: usize| 2.0 * (touched * width as f64 + activations as f64);
        // Weights that are known before the kernel ahead has ended are asked for ahead, but not right behind `permute`.
        let us = timer.each(COPIES, |i| {
            let Chosen { ids, groups, .. } = &mut all[i];
            permute(ids, groups)?;
            gated_experts(&x, Rows::OfTokens, &gate_up, groups, &mut gated).map(|_| ())
        })?;
        let moved = bytes(2 * INNER * HIDDEN, tokens * HIDDEN + pairs * INNER);
        line("moe permute gate_up", &shape, us, moved, &library(2 * INNER, HIDDEN, us, random)?);
        let us = timer
            .each(COPIES, |i| matmul_experts(&gated, Rows::OfPairs, &down, &all[i].groups, &mut out, &workspace))?;
        let moved = bytes(INNER * HIDDEN, pairs * (INNER + HIDDEN));
        line("moe down", &shape, us, moved, &library(HIDDEN, INNER, us, random)?);
        let mean = pairs as f64 / EXPERTS as f64;
        for (by, (name, rows)) in expert_kernels(gpu).into_iter().enumerate() {
            if (rows as f64) < mean.min(64.0) || rows as f64 > 32.0f64.max(mean * 4.0) {
                continue;
            }
            let us = timer.each(COPIES, |i| {
                let Chosen { ids, groups, .. } = &mut all[i];
                permute(ids, groups)?;
                experts_by(by, &x, Rows::OfTokens, &gate_up, groups, true, &mut gated)
            })?;
            line(
                &format!(" permute gate_up {name}"),
                &shape,
                us,
                bytes(2 * INNER * HIDDEN, tokens * HIDDEN + pairs * INNER),
                &rate(us, 2 * INNER * HIDDEN),
            );
            let us = timer
                .each(COPIES, |i| experts_by(by, &gated, Rows::OfPairs, &down, &all[i].groups, false, &mut out))?;
            line(
                &format!(" down {name}"),
                &shape,
                us,
                bytes(INNER * HIDDEN, pairs * (INNER + HIDDEN)),
                &rate(us, INNER * HIDDEN),
            );
        }
        let us = timer.each(COPIES, |i| combine(&out, &all[i].groups, &weights, None, &mut y))?;
        line("moe combine", &shape, us, 2.0 * ((pairs + tokens) * HIDDEN) as f64, "");

        let us = timer.each(COPIES, |i| {
            let Chosen { ids: own_ids, groups, .. } = &mut all[i];
            route(&mut logits, None, &router, &mut ids, &mut weights)?;
            permute(own_ids, groups)?;
            gated_experts(&x, Rows::OfTokens, &gate_up, groups, &mut gated)?;
            matmul_experts(&gated, Rows::OfPairs, &down, groups, &mut out, &workspace)?;
            combine(&out, groups, &weights, None, &mut y)
        })?;
        line("moe", &shape, us, bytes(3 * INNER * HIDDEN, 2 * tokens * HIDDEN), &rate(us, 3 * INNER * HIDDEN));

        // With the router's own product, as a model has it: each copy has tokens of its own, whose choices are the same in every replay.
        let xs = (0..COPIES).map(|_| random.tensor([tokens, HIDDEN])).collect::<Result<Vec<_>>>()?;
        let mut own =
            (0..COPIES).map(|_| Groups::take(&workspace, tokens, TOP_K, EXPERTS)).collect::<Result<Vec<_>>>()?;
        let us = timer.each(COPIES, |i| matmul(&xs[i], &gate, &mut logits, &workspace))?;
        line("moe router", &shape, us, (2 * EXPERTS * HIDDEN) as f64, "");
        let us = timer.each(COPIES, |i| {
            matmul(&xs[i], &gate, &mut logits, &workspace)?;
            assign(&mut logits, None, &router, &mut ids, &mut weights, &mut own[i])?;
            gated_experts(&xs[i], Rows::OfTokens, &gate_up, &own[i], &mut gated)?;
            matmul_experts(&gated, Rows::OfPairs, &down, &own[i], &mut out, &workspace)?;
            combine(&out, &own[i], &weights, None, &mut y)
        })?;
        let touched =
            own.iter().map(num_touched).collect::<Result<Vec<_>>>()?.iter().sum::<usize>() as f64 / COPIES as f64;
        let moved = 2.0 * (touched * (3 * INNER * HIDDEN) as f64 + (2 * tokens * HIDDEN + EXPERTS * HIDDEN) as f64);
        let shape = format!("t={tokens} {touched:.0} experts");
        line("moe with router", &shape, us, moved, &rate(us, 3 * INNER * HIDDEN));
    }
    Ok(())
}

/// Experts that have a token.
fn num_touched(groups: &Groups) -> Result<usize> {
    Ok(groups.offsets.to_vec::<i32>()?.windows(2).filter(|ends| ends[0] < ends[1]).count())
}

fn heads(device: &Device, random: &mut Random, timer: &Timer) -> Result<()> {
    let heads = Heads { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
    let weight = Tensor::from_slice(device, "weight", &random.normals(heads.head_dim), [heads.head_dim])?;
    for tokens in [1, 32, 128, 4096] {
        let copies = if tokens < 4096 { 1 } else { 5 };
        let mut qkv = (0..copies).map(|_| random.tensor([tokens, heads.qkv_cols()])).collect::<Result<Vec<_>>>()?;
        let us = timer.each(copies, |i| rms_norm_heads(&mut qkv[i], &weight, &weight, 1e-6, heads))?;
        let normed = (heads.num_heads + heads.num_kv_heads) * heads.head_dim;
        line("rms_norm_heads", &format!("t={tokens} heads=32+8 d=128"), us, (4 * tokens * normed) as f64, "");
    }
    Ok(())
}
