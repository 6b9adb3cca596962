//! Launches `moe_route.cu`, `moe_permute.cu` and `moe_combine.cu`.

use std::sync::atomic::Ordering;

use super::{GroupScore, Groups, Router, Scoring, Shared};
use crate::device::cuda::{Arg, CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

const WARP: usize = 32;
/// Tokens of a block that routes, a warp each.
const ROUTE_WARPS: usize = 4;
/// Pairs that the block which routes them also sorts, at most.
const FEW_PAIRS: usize = 64;
/// Threads of a block at most.
const PERMUTE_THREADS: usize = 1024;
const COMBINE_THREADS: usize = 256;
/// Elements one thread loads at a time: 16 bytes of bf16.
const VECTOR: usize = 8;

/// `route.rs` checked the arguments. Sorts the pairs into `groups`, too.
pub(super) fn assign(
    device: &CudaDevice,
    logits: &mut Tensor,
    bias: Option<&Tensor>,
    router: &Router,
    ids: &mut Tensor,
    weights: &mut Tensor,
    groups: &mut Groups,
) -> Result<()> {
    if logits.rows_cols().0 <= ROUTE_WARPS && groups.num_pairs() <= FEW_PAIRS {
        return route(device, logits, bias, router, ids, weights, Some(groups));
    }
    route(device, logits, bias, router, ids, weights, None)?;
    permute(device, ids, groups)
}

/// `route.rs` checked the arguments; with `sorted`, that there is one block.
pub(super) fn route(
    device: &CudaDevice,
    logits: &mut Tensor,
    bias: Option<&Tensor>,
    router: &Router,
    ids: &mut Tensor,
    weights: &mut Tensor,
    sorted: Option<&mut Groups>,
) -> Result<()> {
    let (tokens, _) = logits.rows_cols();
    let Router { num_experts, top_k, scoring, groups, normalize, scale } = *router;
    let (num_groups, top_groups, top_two) =
        groups.map_or((0, 0, false), |of| (of.num_groups, of.top_k, of.score == GroupScore::TopTwo));
    let numbers = [
        num_experts as u32,
        top_k as u32,
        u32::from(scoring == Scoring::Sigmoid),
        num_groups as u32,
        top_groups as u32,
        u32::from(top_two),
        u32::from(normalize),
        scale.to_bits(),
    ];
    let bias = bias.map_or(0, Tensor::device_address);
    let [pairs, places, offsets] = sorted.map_or([0; 3], |groups| {
        groups.is_sorted.store(false, Ordering::Relaxed);
        [&groups.pairs, &groups.places, &groups.offsets].map(Tensor::device_address)
    });
    let args = [
        logits.into(),
        bias.into(),
        ids.into(),
        weights.into(),
        pairs.into(),
        places.into(),
        offsets.into(),
        (tokens as u32).into(),
        Arg::Struct(&numbers),
    ];
    let launch = Launch::new(tokens.div_ceil(ROUTE_WARPS), (ROUTE_WARPS * WARP) as u32)
        .shared_bytes(ROUTE_WARPS * (top_k + 2 * num_experts + num_groups) * 4);
    // SAFETY: the shapes were checked, and the router's numbers go together.
    unsafe { launch.run(device, "moe_route", "moe_route", &args) }
}

/// `permute.rs` checked the arguments.
pub(super) fn permute(device: &CudaDevice, ids: &Tensor, groups: &mut Groups) -> Result<()> {
    let (num_pairs, num_experts) = (groups.num_pairs(), groups.num_experts());
    let threads = num_pairs.next_multiple_of(WARP).clamp(WARP, PERMUTE_THREADS) as u32;
    let Groups { pairs, places, offsets, is_sorted, .. } = groups;
    is_sorted.store(false, Ordering::Relaxed);
    let counts = [num_pairs, num_experts].map(|number| (number as u32).into());
    let args = [ids.into(), pairs.into(), places.into(), offsets.into(), counts[0], counts[1]];
    // SAFETY: the shapes were checked, and the kernel takes no id for an expert that is none.
    unsafe { Launch::new(num_experts, threads).run(device, "moe_permute", "moe_permute", &args) }
}

/// `combine.rs` checked the arguments, but that they are bf16.
pub(super) fn combine(
    device: &CudaDevice,
    x: &Tensor,
    groups: &Groups,
    weights: &Tensor,
    shared: Option<Shared<'_>>,
    y: &mut Tensor,
) -> Result<()> {
    const OP: &str = "moe_combine";
    y.expect_dtype(OP, "y", DType::BF16)?;
    let (tokens, hidden) = y.rows_cols();
    if !hidden.is_multiple_of(VECTOR) {
        return Err(KernelError::NotMultiple { op: OP, what: "hidden", size: hidden, of: VECTOR });
    }
    let threads = (hidden / VECTOR).next_multiple_of(WARP).min(COMBINE_THREADS);
    let gate = shared.and_then(|shared| shared.gate).map_or(0, Tensor::device_address);
    let shared = shared.map_or(0, |shared| shared.x.device_address());
    let [top_k, n_hidden] = [groups.top_k, hidden].map(|number| (number as u32).into());
    let places = (&groups.places).into();
    let args = [x.into(), places, weights.into(), shared.into(), gate.into(), y.into(), top_k, n_hidden];
    let launch = Launch::new([tokens, (hidden / VECTOR).div_ceil(threads)], threads as u32);
    // SAFETY: the shapes were checked; places are rows of x, as `permute` left them.
    unsafe { launch.run(device, "moe_combine", "moe_combine_bf16", &args) }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use rand::rngs::StdRng;
    use rand::{RngExt, seq::SliceRandom};

    use super::super::{TopGroups, assign, combine, permute};
    use super::*;
    use crate::device::Device;
    use crate::testing::{gpu, random, rng, tensor};
    use crate::workspace::Workspace;

    fn floats(rng: &mut StdRng, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| rng.random_range(-scale..scale)).collect()
    }

    /// Each token's choices, all different; the more there are, the fewer experts have most of them.
    fn choices(rng: &mut StdRng, tokens: usize, top_k: usize, num_experts: usize) -> Vec<i32> {
        let mut experts: Vec<i32> = (0..num_experts as i32).collect();
        let choose = |token: usize| {
            let open = if token.is_multiple_of(3) { num_experts } else { (num_experts / 2).max(top_k) };
            experts[..open].shuffle(rng);
            experts[..top_k].to_vec()
        };
        (0..tokens).flat_map(choose).collect()
    }

    /// Ids, weights and scores; then pairs, places and offsets.
    fn routed(device: &Device, logits: &[f32], bias: Option<&[f32]>, router: &Router) -> [Vec<u32>; 6] {
        let (experts, top_k) = (router.num_experts, router.top_k);
        let tokens = logits.len() / experts;
        let mut logits = Tensor::from_slice(device, "logits", logits, [tokens, experts]).unwrap();
        let bias = bias.map(|bias| Tensor::from_slice(device, "bias", bias, [experts]).unwrap());
        let mut ids = Tensor::from_slice(device, "ids", &vec![-1; tokens * top_k], [tokens, top_k]).unwrap();
        let mut weights = Tensor::from_slice(device, "w", &vec![f32::NAN; tokens * top_k], [tokens, top_k]).unwrap();
        let workspace = Workspace::new(device, Groups::bytes(tokens, top_k, experts)).unwrap();
        let mut groups = Groups::take(&workspace, tokens, top_k, experts).unwrap();
        assign(&mut logits, bias.as_ref(), router, &mut ids, &mut weights, &mut groups).unwrap();
        let bits = |tensor: &Tensor| tensor.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
        let numbers = |tensor: &Tensor| tensor.to_vec::<i32>().unwrap().into_iter().map(|i| i as u32).collect();
        let Groups { pairs, places, offsets, .. } = &groups;
        [numbers(&ids), bits(&weights), bits(&logits), numbers(pairs), numbers(places), numbers(offsets)]
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn routes_to_the_bits_of_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(51));
        let groups = |num_groups, top_k, score| Some(TopGroups { num_groups, top_k, score });
        let router = |num_experts, top_k| Router {
            num_experts,
            top_k,
            scoring: Scoring::Softmax,
            groups: None,
            normalize: true,
            scale: 1.0,
        };
        for (router, has_bias) in [
            (router(8, 2), false),
            (Router { normalize: false, ..router(60, 4) }, false),
            (router(128, 8), false),
            (Router { groups: groups(8, 3, GroupScore::Max), scale: 16.0, ..router(64, 6) }, false),
            (
                Router {
                    scoring: Scoring::Sigmoid,
                    groups: groups(8, 4, GroupScore::TopTwo),
                    scale: 2.5,
                    ..router(256, 8)
                },
                true,
            ),
            (Router { scoring: Scoring::Sigmoid, ..router(5, 5) }, true),
            (Router { groups: groups(40, 33, GroupScore::TopTwo), ..router(40, 33) }, true),
            (router(1024, 40), false),
            (router(1, 1), false),
        ] {
            let experts = router.num_experts;
            let bias = has_bias.then(|| floats(&mut rng, experts, 0.3));
            for tokens in [1, 2, 4, 5, 33, 200] {
                let mut logits = floats(&mut rng, tokens * experts, 4.0);
                // Equal ones: the lower expert is better.
                logits[experts - 1] = logits[0];
                let want = routed(&Device::Cpu, &logits, bias.as_deref(), &router);
                assert_eq!(routed(&gpu, &logits, bias.as_deref(), &router), want, "{tokens} tokens, {router:?}");
                // A token of no meaning has experts, and spoils no other.
                let broken = tokens / 2;
                let values = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
                for (i, logit) in logits[broken * experts..][..experts].iter_mut().enumerate() {
                    *logit = values[i % 7 % 4];
                }
                let [ids, weights, ..] = routed(&gpu, &logits, bias.as_deref(), &router);
                for (t, ids) in ids.chunks(router.top_k).enumerate() {
                    let of_token = t * router.top_k..(t + 1) * router.top_k;
                    if t != broken {
                        assert_eq!((ids, &weights[of_token.clone()]), (&want[0][of_token.clone()], &want[1][of_token]));
                        continue;
                    }
                    let mut chosen = ids.to_vec();
                    chosen.sort_unstable();
                    chosen.dedup();
                    assert_eq!(chosen.len(), router.top_k, "{ids:?} of {router:?}");
                    assert!(chosen.iter().all(|&id| (id as usize) < experts), "{ids:?} of {router:?}");
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn permutes_as_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(52));
        for (tokens, top_k, experts) in [
            (0, 2, 3),
            (1, 1, 1),
            (1, 8, 128),
            (3, 2, 8),
            (7, 4, 60),
            (33, 8, 128),
            (257, 2, 8),
            (1000, 5, 9),
            (8192, 8, 128),
            (100, 8, 1024),
        ] {
            let ids = choices(&mut rng, tokens, top_k, experts);
            let run = |device: &Device| {
                let workspace = Workspace::new(device, Groups::bytes(tokens, top_k, experts)).unwrap();
                let mut groups = Groups::take(&workspace, tokens, top_k, experts).unwrap();
                permute(&Tensor::from_slice(device, "ids", &ids, [tokens, top_k]).unwrap(), &mut groups).unwrap();
                [&groups.pairs, &groups.places, &groups.offsets].map(|tensor| tensor.to_vec::<i32>().unwrap())
            };
            let (got, want) = (run(&gpu), run(&Device::Cpu));
            for (what, (got, want)) in ["pairs", "places", "offsets"].iter().zip(got.iter().zip(&want)) {
                assert!(got == want, "{what} of {tokens} tokens, {top_k} of {experts} experts");
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn combines_to_the_bits_of_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(53));
        for (tokens, top_k, experts, hidden) in
            [(1, 1, 1, 8), (1, 8, 128, 2048), (5, 2, 8, 4096), (70, 6, 64, 520), (300, 4, 60, 3584)]
        {
            let ids = choices(&mut rng, tokens, top_k, experts);
            let x = random(&mut rng, tokens * top_k * hidden, 2.0);
            let shared = random(&mut rng, tokens * hidden, 2.0);
            let (weights, gate) = (floats(&mut rng, tokens * top_k, 1.0), floats(&mut rng, tokens, 3.0));
            for (has_shared, has_gate) in [(false, false), (true, false), (true, true)] {
                let run = |device: &Device| {
                    let workspace = Workspace::new(device, Groups::bytes(tokens, top_k, experts)).unwrap();
                    let mut groups = Groups::take(&workspace, tokens, top_k, experts).unwrap();
                    permute(&Tensor::from_slice(device, "ids", &ids, [tokens, top_k]).unwrap(), &mut groups).unwrap();
                    let weights = Tensor::from_slice(device, "weights", &weights, [tokens, top_k]).unwrap();
                    let gate = Tensor::from_slice(device, "gate", &gate, [tokens, 1]).unwrap();
                    let (x, shared) =
                        (tensor(device, &x, [tokens * top_k, hidden]), tensor(device, &shared, [tokens, hidden]));
                    let shared = has_shared.then_some(Shared { x: &shared, gate: has_gate.then_some(&gate) });
                    let mut y = tensor(device, &vec![bf16::NAN; tokens * hidden], [tokens, hidden]);
                    combine(&x, &groups, &weights, shared, &mut y).unwrap();
                    y.to_vec::<bf16>().unwrap()
                };
                let label = format!("{tokens} tokens of {hidden}, {top_k} of {experts}, {has_shared} {has_gate}");
                assert!(run(&gpu) == run(&Device::Cpu), "{label}");
            }
        }
    }
}
