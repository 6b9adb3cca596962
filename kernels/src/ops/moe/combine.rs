//! Experts' outputs back in the order of tokens.

use super::{Groups, cuda};
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::math;
use crate::ops::rows;
use crate::simd::{F32x16, Kernel, LANES, Level};
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "moe_combine";

/// What every token goes through besides its experts.
#[derive(Clone, Copy, Debug)]
pub struct Shared<'a> {
    /// `[tokens, hidden]`, of the dtype of `x`.
    pub x: &'a Tensor,
    /// `[tokens, 1]` f32: its sigmoid is what `x` counts; without, 1.
    pub gate: Option<&'a Tensor>,
}

/// `y[t] = sum over choices of weights[t][choice] * x[its place]`, in the order of choices, then what is shared.
///
/// | argument  | shape             | dtype       | |
/// |-----------|-------------------|-------------|-|
/// | `x`       | `[pairs, hidden]` | f32 or bf16 | read: in the order of `groups.pairs` |
/// | `weights` | `[tokens, top_k]` | f32         | read |
/// | `shared`  | see [`Shared`]    |             | read |
/// | `y`       | `[tokens, hidden]`| as `x`      | written |
///
/// Sums in f32, one rounding at the store.
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree; on a GPU `DType` unless they are bf16, `NotMultiple` unless `hidden` is a multiple of 8.
pub fn combine(
    x: &Tensor,
    groups: &Groups,
    weights: &Tensor,
    shared: Option<Shared<'_>>,
    y: &mut Tensor,
) -> Result<()> {
    let (tokens, hidden) = y.rows_cols();
    let top_k = groups.top_k;
    y.expect_shape(OP, "y", [tokens, hidden])?;
    x.expect_shape(OP, "x", [tokens * top_k, hidden])?;
    x.expect_dtype(OP, "x", y.dtype())?;
    groups.places.expect_shape(OP, "places", [tokens * top_k])?;
    weights.expect_shape(OP, "weights", [tokens, top_k])?;
    weights.expect_dtype(OP, "weights", DType::F32)?;
    if let Some(Shared { x, gate }) = shared {
        x.expect_shape(OP, "shared", [tokens, hidden])?;
        x.expect_dtype(OP, "shared", y.dtype())?;
        if let Some(gate) = gate {
            gate.expect_shape(OP, "gate", [tokens, 1])?;
            gate.expect_dtype(OP, "gate", DType::F32)?;
        }
    }
    if let Device::Cuda(device) = y.device().clone() {
        return cuda::combine(&device, x, groups, weights, shared, y);
    }
    let (places, weights) = (groups.places.as_slice::<i32>(), weights.as_slice::<f32>());
    let gate = shared.and_then(|shared| shared.gate).map(Tensor::as_slice::<f32>);
    with_float!(OP, "y", y.dtype(), T => {
        let (x, shared) = (x.as_slice::<T>(), shared.map(|shared| shared.x.as_slice::<T>()));
        rows::parallel(y.as_mut_slice::<T>(), hidden, &|first, y| {
            // SAFETY: the level is this CPU's own.
            unsafe { Level::best().run(Combine { x, places, weights, top_k, shared, gate, first, y, hidden }) }
        });
    });
    Ok(())
}

/// Tokens from `first` on.
struct Combine<'a, T> {
    x: &'a [T],
    places: &'a [i32],
    weights: &'a [f32],
    top_k: usize,
    shared: Option<&'a [T]>,
    gate: Option<&'a [f32]>,
    first: usize,
    y: &'a mut [T],
    hidden: usize,
}

impl<T: Float> Kernel for Combine<'_, T> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        for (token, y) in (self.first..).zip(self.y.chunks_mut(self.hidden)) {
            let choices = token * self.top_k..(token + 1) * self.top_k;
            let (places, weights) = (&self.places[choices.clone()], &self.weights[choices]);
            let shared = self.shared.map(|shared| &shared[token * self.hidden..][..self.hidden]);
            let counts = self.gate.map_or(1.0, |gate| math::sigmoid(gate[token]));
            for (column, y) in (0..self.hidden).step_by(LANES).zip(y.chunks_mut(LANES)) {
                let mut sums = [0.0f32; LANES];
                for (&place, &weight) in places.iter().zip(weights) {
                    add(&mut sums, weight, &self.x[place as usize * self.hidden + column..][..y.len()]);
                }
                if let Some(shared) = shared {
                    add(&mut sums, counts, &shared[column..][..y.len()]);
                }
                for (y, sum) in y.iter_mut().zip(sums) {
                    *y = T::from_f32(sum);
                }
            }
        }
    }
}

#[inline(always)]
fn add<T: Float>(sums: &mut [f32; LANES], weight: f32, x: &[T]) {
    for (sum, x) in sums.iter_mut().zip(x) {
        *sum = weight.mul_add(x.to_f32(), *sum);
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::matmul::testing::random;
    use crate::ops::moe::permute;
    use crate::workspace::Workspace;

    const TOP_K: usize = 3;
    const EXPERTS: usize = 7;

    fn tensor<T: crate::dtype::Element>(values: &[T], shape: [usize; 2]) -> Tensor {
        Tensor::from_slice(&Device::Cpu, "t", values, shape).unwrap()
    }

    /// Of tokens that chose experts by their number.
    fn groups(tokens: usize) -> Groups {
        let workspace = Workspace::new(&Device::Cpu, Groups::bytes(tokens, TOP_K, EXPERTS)).unwrap();
        let ids: Vec<i32> =
            (0..tokens as i32).flat_map(|t| (0..TOP_K as i32).map(move |j| (t * 5 + j * 2) % EXPERTS as i32)).collect();
        let mut groups = Groups::take(&workspace, tokens, TOP_K, EXPERTS).unwrap();
        permute(&tensor(&ids, [tokens, TOP_K]), &mut groups).unwrap();
        groups
    }

    #[test]
    fn tokens_get_what_their_experts_say() {
        for (tokens, hidden) in [(1, 8), (5, 33), (40, 640)] {
            let groups = groups(tokens);
            let (x, weights) = (random(tokens * TOP_K * hidden, 1), random(tokens * TOP_K, 2));
            let (shared, gate) = (random(tokens * hidden, 3), random(tokens, 4));
            let run = |shared: Option<Shared<'_>>| {
                let mut y = tensor(&vec![f32::NAN; tokens * hidden], [tokens, hidden]);
                let (x, weights) = (tensor(&x, [tokens * TOP_K, hidden]), tensor(&weights, [tokens, TOP_K]));
                combine(&x, &groups, &weights, shared, &mut y).unwrap();
                y.to_vec::<f32>().unwrap()
            };
            let places = groups.places.as_slice::<i32>();
            let want = |counts: &dyn Fn(usize) -> f32| -> Vec<f32> {
                let one = |i: usize| {
                    let (t, h) = (i / hidden, i % hidden);
                    let pairs = t * TOP_K..(t + 1) * TOP_K;
                    let sum = pairs.fold(0.0f32, |sum, p| weights[p].mul_add(x[places[p] as usize * hidden + h], sum));
                    counts(t).mul_add(shared[i], sum)
                };
                (0..tokens * hidden).map(one).collect()
            };
            let shared_x = tensor(&shared, [tokens, hidden]);
            let shared_gate = tensor(&gate, [tokens, 1]);
            assert_eq!(run(None), want(&|_| 0.0));
            assert_eq!(run(Some(Shared { x: &shared_x, gate: None })), want(&|_| 1.0));
            let gated = run(Some(Shared { x: &shared_x, gate: Some(&shared_gate) }));
            assert_eq!(gated, want(&|t| 1.0 / (1.0 + math::exp(-gate[t]))));
        }
    }

    #[test]
    fn bf16_rounds_once() {
        let groups = groups(2);
        let x: Vec<bf16> = random(2 * TOP_K * 16, 1).into_iter().map(bf16::from_f32).collect();
        let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let weights = tensor(&random(2 * TOP_K, 2), [2, TOP_K]);
        let (mut y, mut want) = (tensor(&[bf16::NAN; 32], [2, 16]), tensor(&[f32::NAN; 32], [2, 16]));
        combine(&tensor(&x, [2 * TOP_K, 16]), &groups, &weights, None, &mut y).unwrap();
        combine(&tensor(&wide, [2 * TOP_K, 16]), &groups, &weights, None, &mut want).unwrap();
        let want: Vec<bf16> = want.as_slice::<f32>().iter().map(|&y| bf16::from_f32(y)).collect();
        assert_eq!(y.as_slice::<bf16>(), want);
    }
}
