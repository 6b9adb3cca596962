//! Router logits to experts.

use super::{Groups, cuda, permute};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::math;
use crate::ops::rows;
use crate::pool::SharedMut;
use crate::simd::{F32x16, Kernel, LANES, Level};
use crate::tensor::Tensor;

const OP: &str = "moe_route";

/// Most experts of a layer.
pub const MAX_EXPERTS: usize = 1024;

/// Added to a sum of weights before they are divided by it, as DeepSeek does: all of them may be zero.
const TINY: f32 = 1e-20;

/// How a router chooses.
///
/// | family               | `scoring`   | `groups`                 | correction bias | `normalize`      | `scale` |
/// |----------------------|-------------|--------------------------|-----------------|------------------|---------|
/// | Mixtral              | `Softmax`   | none                     | none            | yes              | 1       |
/// | Qwen2-MoE, Qwen3-MoE | `Softmax`   | none                     | none            | `norm_topk_prob` | 1       |
/// | DeepSeek V2          | `Softmax`   | best expert of a group   | none            | `norm_topk_prob` | `routed_scaling_factor` |
/// | DeepSeek V3, R1      | `Sigmoid`   | sum of the two best      | yes             | `norm_topk_prob` | `routed_scaling_factor` |
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    pub num_experts: usize,
    pub top_k: usize,
    pub scoring: Scoring,
    /// First some groups of neighbouring experts are chosen, then experts out of these.
    pub groups: Option<TopGroups>,
    /// Weights of the chosen are divided by their sum.
    pub normalize: bool,
    /// What weights are multiplied with in the end.
    pub scale: f32,
}

/// What makes logits scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Over all experts of a token.
    Softmax,
    /// Of each expert alone.
    Sigmoid,
}

/// A choice of groups before that of experts.
///
/// Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.2.2, and arXiv:2412.19437, section 2.1.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopGroups {
    pub num_groups: usize,
    /// Groups that are chosen.
    pub top_k: usize,
    pub score: GroupScore,
}

/// What a group of experts counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    Max,
    /// The sum of its two best.
    TopTwo,
}

impl Router {
    /// # Errors
    /// `Value` or `NotMultiple` if the numbers do not go together.
    pub fn check(&self) -> Result<()> {
        let value = |arg, got: usize, want| Err(KernelError::Value { op: OP, arg, got: got as i64, want });
        if self.num_experts == 0 || self.num_experts > MAX_EXPERTS {
            return value("number of experts", self.num_experts, "1 to 1024");
        }
        let mut choice = self.num_experts;
        if let Some(TopGroups { num_groups, top_k, .. }) = self.groups {
            if num_groups == 0 || !self.num_experts.is_multiple_of(num_groups) {
                let (what, size) = ("number of experts", self.num_experts);
                return Err(KernelError::NotMultiple { op: OP, what, size, of: num_groups });
            }
            if top_k == 0 || top_k > num_groups {
                return value("number of chosen groups", top_k, "1 up to the number of groups");
            }
            choice = top_k * (self.num_experts / num_groups);
        }
        if self.top_k == 0 || self.top_k > choice {
            return value("number of chosen experts", self.top_k, "1 up to the experts that can be chosen");
        }
        Ok(())
    }
}

/// Each token's experts, the best first, and what each counts.
///
/// | argument  | shape               | dtype | |
/// |-----------|---------------------|-------|-|
/// | `logits`  | `[tokens, experts]` | f32   | read; becomes the scores |
/// | `bias`    | `[experts]`         | f32   | read: added to scores for choosing, not to weights |
/// | `ids`     | `[tokens, top_k]`   | i32   | written |
/// | `weights` | `[tokens, top_k]`   | f32   | written |
///
/// Of equal scores the lower expert is better. Logits that are not finite make weights that are not, of some experts.
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree, those of [`Router::check`].
pub fn route(
    logits: &mut Tensor,
    bias: Option<&Tensor>,
    router: &Router,
    ids: &mut Tensor,
    weights: &mut Tensor,
) -> Result<()> {
    check(logits, bias, router, ids, weights)?;
    if let Device::Cuda(device) = logits.device().clone() {
        return cuda::route(&device, logits, bias, router, ids, weights, None);
    }
    let Router { num_experts, top_k, .. } = *router;
    let bias = bias.map(Tensor::as_slice::<f32>);
    let (ids, weights) = (SharedMut::new(ids.as_mut_slice()), SharedMut::new(weights.as_mut_slice()));
    rows::parallel(logits.as_mut_slice::<f32>(), num_experts, &|first, logits| {
        let chosen = first * top_k..(first + logits.len() / num_experts) * top_k;
        // SAFETY: pieces of logits are different rows, so these are too.
        let (ids, weights) = unsafe { (ids.slice(chosen.clone()), weights.slice(chosen)) };
        // SAFETY: the level is this CPU's own.
        unsafe { Level::best().run(Route { logits, bias, router, ids, weights }) }
    });
    Ok(())
}

/// [`route`] and [`permute`], on a GPU in one kernel where there are few tokens.
///
/// # Errors
/// As both.
pub fn assign(
    logits: &mut Tensor,
    bias: Option<&Tensor>,
    router: &Router,
    ids: &mut Tensor,
    weights: &mut Tensor,
    groups: &mut Groups,
) -> Result<()> {
    if let Device::Cuda(device) = logits.device().clone() {
        check(logits, bias, router, ids, weights)?;
        permute::check(ids, groups)?;
        groups.offsets.expect_shape(OP, "offsets", [router.num_experts + 1])?;
        return cuda::assign(&device, logits, bias, router, ids, weights, groups);
    }
    route(logits, bias, router, ids, weights)?;
    permute(ids, groups)
}

fn check(logits: &Tensor, bias: Option<&Tensor>, router: &Router, ids: &Tensor, weights: &Tensor) -> Result<()> {
    let (tokens, _) = logits.rows_cols();
    let Router { num_experts, top_k, .. } = *router;
    router.check()?;
    logits.expect_shape(OP, "logits", [tokens, num_experts])?;
    logits.expect_dtype(OP, "logits", DType::F32)?;
    ids.expect_shape(OP, "ids", [tokens, top_k])?;
    ids.expect_dtype(OP, "ids", DType::I32)?;
    weights.expect_shape(OP, "weights", [tokens, top_k])?;
    weights.expect_dtype(OP, "weights", DType::F32)?;
    if let Some(bias) = bias {
        bias.expect_shape(OP, "bias", [num_experts])?;
        bias.expect_dtype(OP, "bias", DType::F32)?;
    }
    Ok(())
}

struct Route<'a> {
    logits: &'a mut [f32],
    bias: Option<&'a [f32]>,
    router: &'a Router,
    ids: &'a mut [i32],
    weights: &'a mut [f32],
}

impl Kernel for Route<'_> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let Router { num_experts, top_k, scoring, normalize, scale, .. } = *self.router;
        let chosen = self.ids.chunks_exact_mut(top_k).zip(self.weights.chunks_exact_mut(top_k));
        for (scores, (ids, weights)) in self.logits.chunks_exact_mut(num_experts).zip(chosen) {
            match scoring {
                Scoring::Softmax => softmax(scores),
                Scoring::Sigmoid => scores.iter_mut().for_each(|score| *score = math::sigmoid(*score)),
            }
            choose(scores, self.bias, self.router, ids);
            let mut sum = 0.0;
            for (weight, &id) in weights.iter_mut().zip(ids.iter()) {
                *weight = scores[id as usize];
                sum += *weight;
            }
            let divisor = if normalize { sum + TINY } else { 1.0 };
            for weight in weights {
                *weight = *weight / divisor * scale;
            }
        }
    }
}

#[inline(always)]
fn softmax(row: &mut [f32]) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut lanes = [0.0; LANES];
    for chunk in row.chunks_mut(LANES) {
        for (value, lane) in chunk.iter_mut().zip(&mut lanes) {
            *value = math::exp(*value - largest);
            *lane += *value;
        }
    }
    let sum = math::fold(lanes);
    row.iter_mut().for_each(|value| *value /= sum);
}

/// Writes the best experts by score and bias, the best first.
#[inline(always)]
fn choose(scores: &[f32], bias: Option<&[f32]>, router: &Router, ids: &mut [i32]) {
    let mut taken = Marks::default();
    let choice = |expert: usize| scores[expert] + bias.map_or(0.0, |bias| bias[expert]);
    if let Some(groups) = router.groups {
        let size = router.num_experts / groups.num_groups;
        let mut closed = Marks::default();
        for _ in 0..groups.top_k {
            let score = |group: usize| {
                let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
                for expert in group * size..(group + 1) * size {
                    let score = choice(expert);
                    if score > first {
                        (first, second) = (score, first);
                    } else if score > second {
                        second = score;
                    }
                }
                match groups.score {
                    GroupScore::TopTwo if size > 1 => first + second,
                    _ => first,
                }
            };
            closed.set(best(groups.num_groups, &closed, score));
        }
        for expert in 0..router.num_experts {
            if !closed.has(expert / size) {
                taken.set(expert);
            }
        }
    }
    for id in ids {
        let expert = best(router.num_experts, &taken, choice);
        taken.set(expert);
        *id = expert as i32;
    }
}

/// The first of the best that are not taken. At least one must be free.
#[inline(always)]
fn best(count: usize, taken: &Marks, score: impl Fn(usize) -> f32) -> usize {
    let mut best: Option<(usize, f32)> = None;
    for i in 0..count {
        if taken.has(i) {
            continue;
        }
        let score = score(i);
        if best.is_none_or(|(_, least)| score > least) {
            best = Some((i, score));
        }
    }
    best.map_or(0, |(i, _)| i)
}

/// A set of numbers below [`MAX_EXPERTS`].
#[derive(Default)]
struct Marks([u64; MAX_EXPERTS / 64]);

impl Marks {
    #[inline(always)]
    fn has(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }

    #[inline(always)]
    fn set(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::matmul::testing::random;

    fn router(num_experts: usize, top_k: usize, scoring: Scoring) -> Router {
        Router { num_experts, top_k, scoring, groups: None, normalize: false, scale: 1.0 }
    }

    /// Ids and weights of rows of logits.
    fn routed(logits: &[f32], bias: Option<&[f32]>, router: &Router) -> (Vec<i32>, Vec<f32>) {
        let (experts, top_k) = (router.num_experts, router.top_k);
        let tokens = logits.len() / experts;
        let mut logits = Tensor::from_slice(&Device::Cpu, "logits", logits, [tokens, experts]).unwrap();
        let bias = bias.map(|bias| Tensor::from_slice(&Device::Cpu, "bias", bias, [experts]).unwrap());
        let mut ids = Tensor::zeros(&Device::Cpu, "ids", [tokens, top_k], DType::I32).unwrap();
        let mut weights = Tensor::zeros(&Device::Cpu, "weights", [tokens, top_k], DType::F32).unwrap();
        route(&mut logits, bias.as_ref(), router, &mut ids, &mut weights).unwrap();
        (ids.to_vec().unwrap(), weights.to_vec().unwrap())
    }

    /// The same in f64 by sorting.
    fn reference(logits: &[f32], bias: Option<&[f32]>, router: &Router) -> (Vec<i32>, Vec<f64>) {
        let scores: Vec<f64> = match router.scoring {
            Scoring::Softmax => {
                let exps: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp()).collect();
                let sum: f64 = exps.iter().sum();
                exps.iter().map(|e| e / sum).collect()
            }
            Scoring::Sigmoid => logits.iter().map(|&x| 1.0 / (1.0 + (-f64::from(x)).exp())).collect(),
        };
        let choice: Vec<f64> = (0..scores.len()).map(|e| scores[e] + bias.map_or(0.0, |b| f64::from(b[e]))).collect();
        let sorted = |of: &[f64]| {
            let mut order: Vec<usize> = (0..of.len()).collect();
            order.sort_by(|&a, &b| of[b].total_cmp(&of[a]));
            order
        };
        let mut order = sorted(&choice);
        if let Some(groups) = router.groups {
            let size = scores.len() / groups.num_groups;
            let score = |group: &[f64]| {
                let order = sorted(group);
                let count = if groups.score == GroupScore::TopTwo { 2.min(size) } else { 1 };
                order[..count].iter().map(|&i| group[i]).sum::<f64>()
            };
            let of_groups: Vec<f64> = choice.chunks(size).map(score).collect();
            let open = &sorted(&of_groups)[..groups.top_k];
            order.retain(|expert| open.contains(&(expert / size)));
        }
        order.truncate(router.top_k);
        let sum: f64 = order.iter().map(|&e| scores[e]).sum();
        let divisor = if router.normalize { sum } else { 1.0 };
        let weights = order.iter().map(|&e| scores[e] / divisor * f64::from(router.scale)).collect();
        (order.iter().map(|&e| e as i32).collect(), weights)
    }

    #[test]
    fn every_family_s_choice_is_that_of_its_paper() {
        let groups = |num_groups, top_k, score| Some(TopGroups { num_groups, top_k, score });
        let base = router(64, 6, Scoring::Softmax);
        let bias: Vec<f32> = random(256, 9).iter().map(|b| b * 0.3).collect();
        for (router, bias) in [
            (Router { num_experts: 8, top_k: 2, normalize: true, ..base }, None),
            (Router { num_experts: 60, top_k: 4, ..base }, None),
            (Router { num_experts: 128, top_k: 8, normalize: true, ..base }, None),
            (Router { groups: groups(8, 3, GroupScore::Max), scale: 16.0, ..base }, None),
            (
                Router {
                    num_experts: 256,
                    top_k: 8,
                    scoring: Scoring::Sigmoid,
                    groups: groups(8, 4, GroupScore::TopTwo),
                    normalize: true,
                    scale: 2.5,
                },
                Some(&bias[..]),
            ),
            (Router { num_experts: 5, top_k: 5, scoring: Scoring::Sigmoid, ..base }, Some(&bias[..5])),
            (Router { num_experts: 1, top_k: 1, ..base }, None),
        ] {
            let experts = router.num_experts;
            let logits: Vec<f32> = random(33 * experts, 4).iter().map(|x| x * 4.0).collect();
            let (ids, weights) = routed(&logits, bias, &router);
            for (t, logits) in logits.chunks(experts).enumerate() {
                let of_token = t * router.top_k..(t + 1) * router.top_k;
                let (want_ids, want) = reference(logits, bias, &router);
                assert_eq!(ids[of_token.clone()], want_ids, "token {t} of {router:?}");
                for (got, want) in weights[of_token.clone()].iter().zip(want) {
                    assert!((f64::from(*got) - want).abs() < 2e-6 * want.abs(), "{got} {want} of {router:?}");
                }
                let alone = routed(logits, bias, &router);
                assert_eq!((alone.0.as_slice(), alone.1.as_slice()), (&ids[of_token.clone()], &weights[of_token]));
            }
        }
    }

    #[test]
    fn the_bias_chooses_and_does_not_count() {
        let router = router(4, 1, Scoring::Sigmoid);
        let logits = [0.0, 2.0, 1.0, -1.0];
        assert_eq!(routed(&logits, None, &router).0, [1]);
        let (ids, weights) = routed(&logits, Some(&[0.0, 0.0, 0.0, 5.0]), &router);
        assert_eq!((ids, weights), (vec![3], vec![math::sigmoid(-1.0)]));
    }

    #[test]
    fn equal_scores_go_to_the_lower_expert() {
        let (ids, weights) = routed(&[1.0; 6], None, &router(6, 3, Scoring::Softmax));
        assert_eq!(ids, [0, 1, 2]);
        assert!(weights.iter().all(|w| (w - 1.0 / 6.0).abs() < 1e-7));
    }

    #[test]
    fn a_token_of_no_meaning_has_experts_and_spoils_no_other() {
        let plain: Vec<f32> = random(3 * 8, 1);
        let mut broken = plain.clone();
        broken[8..16].fill(f32::NAN);
        let router = router(8, 2, Scoring::Softmax);
        let ((ids, weights), (want_ids, want)) = (routed(&broken, None, &router), routed(&plain, None, &router));
        assert!(ids.iter().all(|id| (0..8).contains(id)) && ids[2] != ids[3]);
        assert!(weights[2].is_nan() && weights[3].is_nan());
        for kept in [0..2, 4..6] {
            assert_eq!((&ids[kept.clone()], &weights[kept.clone()]), (&want_ids[kept.clone()], &want[kept]));
        }
    }

    #[test]
    fn numbers_that_do_not_go_together_are_named() {
        let base = router(8, 2, Scoring::Softmax);
        let groups = |num_groups, top_k| Some(TopGroups { num_groups, top_k, score: GroupScore::Max });
        let refusal = |router: Router| router.check().unwrap_err().to_string();
        assert_eq!(
            refusal(Router { top_k: 9, ..base }),
            "moe_route: number of chosen experts is 9, expected 1 up to the experts that can be chosen"
        );
        assert_eq!(
            refusal(Router { top_k: 3, groups: groups(4, 1), ..base }),
            "moe_route: number of chosen experts is 3, expected 1 up to the experts that can be chosen"
        );
        assert_eq!(
            refusal(Router { groups: groups(3, 1), ..base }),
            "moe_route: number of experts is 8, not a multiple of 3"
        );
        assert_eq!(
            refusal(Router { groups: groups(4, 5), ..base }),
            "moe_route: number of chosen groups is 5, expected 1 up to the number of groups"
        );
        assert_eq!(
            refusal(Router { num_experts: 2048, ..base }),
            "moe_route: number of experts is 2048, expected 1 to 1024"
        );
    }
}
