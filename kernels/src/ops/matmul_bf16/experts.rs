//! Launches `expert_products.cu`: products of a mixture of experts. The host knows how many pairs there are, not whose they are.

use std::sync::atomic::Ordering;

use super::super::matmul::{Groups, Rows};
use crate::device::cuda::{CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

const OP: &str = "matmul_experts";

/// Elements of a 16-byte access.
const VECTOR: usize = 8;
/// As in `ordered_product.cuh`: parts that are summed apart, bytes of a row in a turn, outputs of a tile, turns on their way.
const PARTS: usize = 4;
const ROW_BYTES: usize = 128;
const OUT: usize = 128;
const STAGES: usize = 4;
const WGMMA_STAGES: usize = 6;
const TILE_THREADS: u32 = 256;
/// Inputs of an expert that are few.
const SHORT: usize = 1024;

/// A kernel of `expert_products.cu`. All give the same bits.
pub(super) struct Kernel {
    /// Rows of one expert that a block takes at most.
    pub(super) rows: usize,
    /// Outputs of the weight that it takes.
    outputs: usize,
    /// Turns of each warp that are on their way; of a tile 0.
    depth: usize,
    /// Turns that a tile has room for.
    stages: usize,
    source: &'static str,
    /// By [`Store`].
    pub(super) names: [&'static str; 2],
}

const fn kernel(rows: usize, outputs: usize, depth: usize, names: [&'static str; 2]) -> Kernel {
    Kernel { rows, outputs, depth, stages: STAGES, source: "expert_products", names }
}

const KERNELS: [Kernel; 5] = [
    kernel(8, 32, 3, ["experts_8", "experts_8_gated"]),
    kernel(16, 32, 3, ["experts_16", "experts_16_gated"]),
    kernel(32, OUT, 0, ["experts_32", "experts_32_gated"]),
    kernel(64, OUT, 0, ["experts_64", "experts_64_gated"]),
    // On Hopper alone.
    Kernel {
        stages: WGMMA_STAGES,
        source: "expert_products_wgmma",
        ..kernel(128, OUT, 0, ["experts_128_wgmma", "experts_128_wgmma_gated"])
    },
];

/// Those of them that a GPU has.
pub(super) fn kernels(device: &CudaDevice) -> &'static [Kernel] {
    &KERNELS[..KERNELS.len() - usize::from(!device.is_hopper())]
}

/// What becomes of the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Store {
    Plain,
    /// `silu(first half) * second half` of an expert's outputs.
    Gated,
}

/// Of [`kernels`], for an expert's mean number of rows, of which some have more, and are then several blocks', and its weight `[out, in]`.
fn fastest(device: &CudaDevice, pairs: usize, num_experts: usize, out: usize, inner: usize) -> usize {
    let mean = pairs as f64 / num_experts as f64;
    // Of so few turns each warp of a kernel of few rows has hardly more than are on their way: a block is at its beginning and its end most of its
    // time, so a large one is better, if there is one for each multiprocessor.
    let is_short = inner <= SHORT && num_experts.min(pairs) * (out / OUT) >= device.num_multiprocessors() as usize;
    match mean {
        ..=16.0 if is_short => 2,
        ..=1.5 => 0,
        ..=16.0 => 1,
        ..=24.0 => 2,
        49.0.. if device.is_hopper() => 4,
        _ => 3,
    }
}

/// Pieces of up to `most` rows that pairs fall into at most, whatever their experts are.
fn most_pieces(pairs: usize, num_experts: usize, most: usize) -> usize {
    (pairs + (most - 1) * num_experts.min(pairs)) / most
}

/// `y[i] = x[row of pair i] @ (its expert's rows of weight)ᵀ`; x and y bf16, weight `[experts * out, in]`.
pub(super) fn matmul(
    device: &CudaDevice,
    x: &Tensor,
    rows: Rows,
    weight: &Tensor,
    groups: &Groups,
    store: Store,
    y: &mut Tensor,
) -> Result<()> {
    let (experts, (outputs, inner)) = (groups.num_experts().max(1), weight.rows_cols());
    let by = fastest(device, groups.num_pairs(), experts, outputs / experts, inner);
    matmul_by(by, device, x, rows, weight, groups, store, y)
}

/// [`matmul`] by one of [`kernels`].
#[expect(clippy::too_many_arguments, reason = "the op's own and whom it is done by")]
pub(super) fn matmul_by(
    by: usize,
    device: &CudaDevice,
    x: &Tensor,
    rows: Rows,
    weight: &Tensor,
    groups: &Groups,
    store: Store,
    y: &mut Tensor,
) -> Result<()> {
    let (pairs, experts) = (groups.num_pairs(), groups.num_experts().max(1));
    let (outputs, inner) = weight.rows_cols();
    let multiples = [("out", outputs, experts), ("in", inner, VECTOR)];
    for (what, size, of) in multiples {
        if !size.is_multiple_of(of) {
            return Err(KernelError::NotMultiple { op: OP, what, size, of });
        }
    }
    let out = outputs / experts;
    if store == Store::Gated && !out.is_multiple_of(2) {
        return Err(KernelError::NotMultiple { op: OP, what: "an expert's out", size: out, of: 2 });
    }
    let stored = if store == Store::Gated { out / 2 } else { out };
    let num_rows = if rows == Rows::OfTokens { pairs / groups.top_k.max(1) } else { pairs };
    x.expect_dtype(OP, "x", DType::BF16)?;
    x.expect_shape(OP, "x", [num_rows, inner])?;
    y.expect_dtype(OP, "y", DType::BF16)?;
    y.expect_shape(OP, "y", [pairs, stored])?;

    let Kernel { rows: most, outputs: block_out, depth, stages, source, names } = kernels(device)[by];
    let (threads, turns) = if depth > 0 { (32 * PARTS as u32, PARTS * depth) } else { (TILE_THREADS, stages) };
    // wgmma's tiles begin at a multiple of 1024 bytes.
    let shared_bytes = turns * (block_out + most) * ROW_BYTES + if stages == WGMMA_STAGES { 1024 } else { 0 };
    // Gated, half of a block's outputs are stored.
    let block_stored = if store == Store::Gated { block_out / 2 } else { block_out };
    let blocks = stored.div_ceil(block_stored) * most_pieces(pairs, experts, most);
    let are_sorted = groups.is_sorted.load(Ordering::Relaxed);
    let of_tokens = if rows == Rows::OfTokens { groups.pairs.device_address() } else { 0 };
    let [n_experts, top_k, n_out, n_in] = [experts, groups.top_k, out, inner].map(|number| (number as u32).into());
    let offsets = (&groups.offsets).into();
    let sorted = u32::from(are_sorted).into();
    let args = [x.into(), weight.into(), y.into(), offsets, of_tokens.into(), n_experts, top_k, n_out, n_in, sorted];
    let launch = Launch::new(blocks, threads).shared_bytes(shared_bytes);
    // SAFETY: the shapes were checked; the groups are as `permute` left them: pairs of x's tokens, offsets up to their number. If they are
    // said to be sorted, a kernel was launched behind `permute` that let no other begin before it had waited.
    unsafe { launch.run(device, source, names[store as usize], &args)? };
    // This one did, too.
    groups.is_sorted.store(blocks > 0, Ordering::Relaxed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use rand::RngExt;
    use rand::rngs::StdRng;

    use super::super::cuda::matmul as dense;
    use super::*;
    use crate::device::Device;
    use crate::ops::moe::{Router, Scoring, assign, combine, permute};
    use crate::ops::silu_mul::silu_mul;
    use crate::testing::{assert_close, deterministic_gpu, gpu, random, rng, tensor};
    use crate::workspace::Workspace;

    /// Tokens, choices of each, experts, outputs and inputs of one.
    type Case = [usize; 5];

    const CASES: [Case; 11] = [
        [1, 1, 1, 16, 64],
        [1, 8, 128, 64, 128],
        [3, 2, 8, 48, 200],
        [9, 4, 60, 130, 64],
        [40, 2, 8, 256, 320],
        [150, 4, 6, 72, 136],
        [500, 2, 5, 384, 512],
        [64, 8, 128, 96, 768],
        [1100, 1, 3, 130, 72],
        // More turns than are ever on their way.
        [40, 2, 4, 144, 2056],
        [300, 2, 3, 144, 1032],
    ];

    /// Choices of which one expert has many, some none, and those of a token are not all different.
    fn choices(rng: &mut StdRng, [tokens, top_k, experts, ..]: Case) -> Vec<i32> {
        let choose = |_| match rng.random_range(0..4) {
            0 => experts / 2,
            _ => rng.random_range(0..experts) / 2 * 2,
        };
        (0..tokens * top_k).map(choose).map(|expert| expert as i32).collect()
    }

    fn grouped(gpu: &Device, ids: &[i32], [tokens, top_k, experts, ..]: Case) -> (Groups, Workspace) {
        let workspace = Workspace::new(gpu, Groups::bytes(tokens, top_k, experts)).unwrap();
        let mut groups = Groups::take(&workspace, tokens, top_k, experts).unwrap();
        permute(&Tensor::from_slice(gpu, "ids", ids, [tokens, top_k]).unwrap(), &mut groups).unwrap();
        (groups, workspace)
    }

    #[test]
    fn pieces_are_never_more_than_blocks() {
        let mut rng = rng(61);
        for [tokens, top_k, experts, ..] in CASES.into_iter().chain([[4096, 8, 128, 0, 0], [7, 2, 64, 0, 0]]) {
            for most in [8, 16, 32, 64, 128] {
                for spread in [1, 2, experts] {
                    let mut rows = vec![0usize; experts];
                    (0..tokens * top_k).for_each(|_| rows[rng.random_range(0..spread.min(experts))] += 1);
                    let pieces: usize = rows.iter().map(|rows| rows.div_ceil(most)).sum();
                    assert!(pieces <= most_pieces(tokens * top_k, experts, most), "{rows:?} by {most}");
                }
                // The most there can be: one row more than whole pieces for each.
                let rows = (experts - 1) * (most + 1) + 1;
                assert_eq!(most_pieces(rows, experts, most), 2 * experts - 1);
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn every_kernel_has_the_bits_of_each_expert_alone() {
        let (gpu, mut rng) = (deterministic_gpu(), rng(62));
        let Device::Cuda(device) = &gpu else { unreachable!("it is one") };
        for case in CASES {
            let [tokens, top_k, experts, out, inner] = case;
            let num_pairs = tokens * top_k;
            let ids = choices(&mut rng, case);
            let (groups, _workspace) = grouped(&gpu, &ids, case);
            let pairs = groups.pairs.to_vec::<i32>().unwrap();
            let weights = random(&mut rng, experts * out * inner, 0.3);
            let weight = tensor(&gpu, &weights, [experts * out, inner]);
            let x = random(&mut rng, tokens * inner, 1.0);
            let spread: Vec<bf16> =
                pairs.iter().flat_map(|&pair| &x[pair as usize / top_k * inner..][..inner]).copied().collect();
            let (of_tokens, of_pairs) = (tensor(&gpu, &x, [tokens, inner]), tensor(&gpu, &spread, [num_pairs, inner]));

            // Each expert with all rows.
            let mut want = vec![bf16::NAN; num_pairs * out];
            for expert in 0..experts {
                let weight = tensor(&gpu, &weights[expert * out * inner..][..out * inner], [out, inner]);
                let mut y = tensor(&gpu, &vec![bf16::NAN; tokens * out], [tokens, out]);
                dense(device, &of_tokens, &weight, &mut y).unwrap();
                let y = y.to_vec::<bf16>().unwrap();
                for (want, &pair) in want.chunks_mut(out).zip(&pairs) {
                    if ids[pair as usize] as usize == expert {
                        want.copy_from_slice(&y[pair as usize / top_k * out..][..out]);
                    }
                }
            }
            assert!(want.iter().all(|y| y.is_finite()));
            let mut gates = tensor(&gpu, &vec![bf16::NAN; num_pairs * (out / 2)], [num_pairs, out / 2]);
            let is_gated = (out / 2).is_multiple_of(8);
            if is_gated {
                silu_mul(&tensor(&gpu, &want, [num_pairs, out]), &mut gates).unwrap();
            }
            let gates = gates.to_vec::<bf16>().unwrap();

            for (by, Kernel { names: [name, _], .. }) in kernels(device).iter().enumerate() {
                for (rows, x) in [(Rows::OfTokens, &of_tokens), (Rows::OfPairs, &of_pairs)] {
                    let label = format!("{case:?}, {name}, {rows:?}");
                    let run = |store, out: usize| {
                        let mut y = tensor(&gpu, &vec![bf16::NAN; num_pairs * out], [num_pairs, out]);
                        matmul_by(by, device, x, rows, &weight, &groups, store, &mut y).unwrap();
                        y.to_vec::<bf16>().unwrap()
                    };
                    let differs = |got: &[bf16], want: &[bf16]| {
                        got.iter().zip(want).position(|(got, want)| got.to_bits() != want.to_bits())
                    };
                    let got = run(Store::Plain, out);
                    let at = differs(&got, &want);
                    assert!(at.is_none(), "{label}: {at:?} is {} for {}", got[at.unwrap_or(0)], want[at.unwrap_or(0)]);
                    if is_gated {
                        let got = run(Store::Gated, out / 2);
                        let at = differs(&got, &gates);
                        let (got, want) = (got[at.unwrap_or(0)], gates[at.unwrap_or(0)]);
                        assert!(at.is_none(), "{label}, gated: {at:?} is {got} for {want}");
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn experts_equal_sums_in_double() {
        let (gpu, mut rng) = (gpu(), rng(63));
        let Device::Cuda(device) = &gpu else { unreachable!("it is one") };
        for case in CASES {
            let [tokens, top_k, experts, out, inner] = case;
            let ids = choices(&mut rng, case);
            let (groups, _workspace) = grouped(&gpu, &ids, case);
            let (x, weights) = (random(&mut rng, tokens * inner, 1.0), random(&mut rng, experts * out * inner, 1.0));
            let mut want = Vec::new();
            for pair in groups.pairs.to_vec::<i32>().unwrap() {
                let x = &x[pair as usize / top_k * inner..][..inner];
                let weight = &weights[ids[pair as usize] as usize * out * inner..][..out * inner];
                want.extend(weight.chunks(inner).map(|weight| {
                    x.iter().zip(weight).map(|(x, weight)| x.to_f64() * weight.to_f64()).sum::<f64>() as f32
                }));
            }
            let (x, weight) = (tensor(&gpu, &x, [tokens, inner]), tensor(&gpu, &weights, [experts * out, inner]));
            let mut y = tensor(&gpu, &vec![bf16::NAN; tokens * top_k * out], [tokens * top_k, out]);
            matmul(device, &x, Rows::OfTokens, &weight, &groups, Store::Plain, &mut y).unwrap();
            assert_close(&format!("{case:?}"), &y.to_vec::<bf16>().unwrap(), &want, crate::testing::BF16_BOUND);
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn recorded_layers_follow_what_is_chosen_anew() {
        let (gpu, mut rng) = (gpu(), rng(64));
        let Device::Cuda(device) = &gpu else { unreachable!("it is one") };
        for (tokens, top_k, num_experts, hidden, inner) in
            [(1, 8, 128, 256, 96), (8, 8, 128, 512, 96), (48, 2, 8, 512, 256), (300, 4, 16, 128, 64)]
        {
            let (scoring, groups) = (Scoring::Softmax, None);
            let router = Router { num_experts, top_k, scoring, groups, normalize: true, scale: 1.0 };
            let pairs = tokens * top_k;
            let mut matrix = |rows, cols, scale| tensor(&gpu, &random(&mut rng, rows * cols, scale), [rows, cols]);
            let (gate_up, down) =
                (matrix(num_experts * 2 * inner, hidden, 0.2), matrix(num_experts * hidden, inner, 0.2));
            let zeros = |shape: [usize; 2], dtype| Tensor::zeros(&gpu, "t", shape, dtype).unwrap();
            let (mut ids, mut weights) = (zeros([tokens, top_k], DType::I32), zeros([tokens, top_k], DType::F32));
            let workspace = Workspace::new(&gpu, Groups::bytes(tokens, top_k, num_experts)).unwrap();
            let mut groups = Groups::take(&workspace, tokens, top_k, num_experts).unwrap();
            let (mut gated, mut out) = (zeros([pairs, inner], DType::BF16), zeros([pairs, hidden], DType::BF16));
            // Apart: no kernel begins before the one ahead has ended.
            let mut layer = |x: &Tensor, logits: &mut Tensor, y: &mut Tensor, apart: bool| -> Result<()> {
                let end = || if apart { device.synchronize() } else { Ok(()) };
                assign(logits, None, &router, &mut ids, &mut weights, &mut groups)?;
                end()?;
                matmul(device, x, Rows::OfTokens, &gate_up, &groups, Store::Gated, &mut gated)?;
                end()?;
                matmul(device, &gated, Rows::OfPairs, &down, &groups, Store::Plain, &mut out)?;
                end()?;
                combine(&out, &groups, &weights, None, y)
            };
            let mut recording = None;
            // Layers behind each other: x, logits and y of each.
            let mut all: Vec<[Tensor; 3]> = (0..5)
                .map(|_| {
                    let x = tensor(&gpu, &random(&mut rng, tokens * hidden, 1.0), [tokens, hidden]);
                    [x, zeros([tokens, num_experts], DType::F32), zeros([tokens, hidden], DType::BF16)]
                })
                .collect();
            for round in 0..3 {
                let scores: Vec<Vec<f32>> = all
                    .iter()
                    .map(|_| (0..tokens * num_experts).map(|_| rng.random_range(-3.0..3.0)).collect())
                    .collect();
                let give = |all: &mut [[Tensor; 3]]| {
                    for ([_, logits, y], scores) in all.iter_mut().zip(&scores) {
                        logits.copy_from_slice(scores).unwrap();
                        y.copy_from_slice(&vec![bf16::NAN; tokens * hidden]).unwrap();
                    }
                };
                let results =
                    |all: &[[Tensor; 3]]| -> Vec<Vec<bf16>> { all.iter().map(|[.., y]| y.to_vec().unwrap()).collect() };
                give(&mut all);
                all.iter_mut().for_each(|[x, logits, y]| layer(x, logits, y, true).unwrap());
                let want = results(&all);
                assert!(want[0] != want[1] && want.iter().flatten().all(|y| y.is_finite()));
                let recording = recording.get_or_insert_with(|| {
                    gpu.record(|| all.iter_mut().try_for_each(|[x, logits, y]| layer(x, logits, y, false))).unwrap()
                });
                for _ in 0..3 {
                    give(&mut all);
                    recording.replay().unwrap();
                    assert!(results(&all) == want, "{tokens} tokens, {top_k} of {num_experts} experts, round {round}");
                }
            }
        }
    }
}
