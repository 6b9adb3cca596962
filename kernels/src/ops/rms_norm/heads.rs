//! Normalisation of each query and key head by itself.
//!
//! Source: Henry et al. 2020, arXiv:2010.04245 (query-key normalization), with a root mean square in place of the norm, as Qwen3 has it.

use super::{OP, cuda};
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::math;
use crate::ops::attention::Heads;
use crate::ops::rows;
use crate::simd::{F32x16, Kernel, Level};
use crate::tensor::Tensor;
use crate::with_float;

/// Each head of q and of k becomes its own [`rms_norm`](super::rms_norm); v stays.
///
/// | argument   | shape                           | dtype       | |
/// |------------|---------------------------------|-------------|-|
/// | `qkv`      | `[tokens, (q + 2 kv heads) * d]`| f32 or bf16 | q and k updated |
/// | `q_weight` | `[d]`                           | f32         | read |
/// | `k_weight` | `[d]`                           | f32         | read |
///
/// Arithmetic in f32, one rounding at the store.
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree; on a GPU `DType` unless `qkv` is bf16, `NotMultiple` unless `d` is a multiple of 8.
pub fn rms_norm_heads(qkv: &mut Tensor, q_weight: &Tensor, k_weight: &Tensor, eps: f32, heads: Heads) -> Result<()> {
    let (tokens, _) = qkv.rows_cols();
    heads.check(OP)?;
    qkv.expect_shape(OP, "qkv", [tokens, heads.qkv_cols()])?;
    for (arg, weight) in [("q_weight", q_weight), ("k_weight", k_weight)] {
        weight.expect_shape(OP, arg, [heads.head_dim])?;
        weight.expect_dtype(OP, arg, DType::F32)?;
    }
    if let Device::Cuda(device) = qkv.device().clone() {
        return cuda::rms_norm_heads(&device, qkv, [q_weight, k_weight], eps, heads);
    }
    let weights = [q_weight.as_slice::<f32>(), k_weight.as_slice::<f32>()];
    with_float!(OP, "qkv", qkv.dtype(), T => {
        rows::parallel(qkv.as_mut_slice::<T>(), heads.qkv_cols(), &|_, qkv| {
            // SAFETY: the level is this CPU's own.
            unsafe { Level::best().run(NormHeads { qkv, weights, eps, heads }) }
        });
    });
    Ok(())
}

struct NormHeads<'a, T> {
    qkv: &'a mut [T],
    weights: [&'a [f32]; 2],
    eps: f32,
    heads: Heads,
}

impl<T: Float> Kernel for NormHeads<'_, T> {
    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let Heads { num_heads, num_kv_heads, head_dim } = self.heads;
        let [q_weight, k_weight] = self.weights;
        for row in self.qkv.chunks_exact_mut(self.heads.qkv_cols()) {
            for (i, head) in row.chunks_exact_mut(head_dim).take(num_heads + num_kv_heads).enumerate() {
                let weight = if i < num_heads { q_weight } else { k_weight };
                let scale = 1.0 / (math::sum_squares(head) / head_dim as f32 + self.eps).sqrt();
                for (x, weight) in head.iter_mut().zip(weight) {
                    *x = T::from_f32(x.to_f32() * scale * weight);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::rms_norm;
    use super::*;
    use crate::ops::matmul::testing::random;
    use crate::testing;

    #[test]
    fn each_head_of_q_and_k_is_normalised_alone_and_v_stays() {
        let heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 24 };
        let (tokens, cols) = (3, heads.qkv_cols());
        let tensor = |values: &[f32], shape: [usize; 2]| Tensor::from_slice(&Device::Cpu, "t", values, shape).unwrap();
        let vector = |seed| Tensor::from_slice(&Device::Cpu, "w", &random(24, seed), [24]).unwrap();
        let (values, q_weight, k_weight) = (random(tokens * cols, 1), vector(2), vector(3));
        let mut qkv = tensor(&values, [tokens, cols]);
        rms_norm_heads(&mut qkv, &q_weight, &k_weight, 1e-3, heads).unwrap();
        let normed = [&q_weight, &k_weight].map(|weight| {
            let mut y = tensor(&values, [tokens * 8, 24]);
            rms_norm(&tensor(&values, [tokens * 8, 24]), weight, 1e-3, &mut y).unwrap();
            y.to_vec::<f32>().unwrap()
        });
        for (i, got) in qkv.as_slice::<f32>().chunks(24).enumerate() {
            let want = match i % 8 {
                0..4 => &normed[0],
                4..6 => &normed[1],
                _ => &values,
            };
            assert_eq!(got, &want[i * 24..][..24], "head {i}");
        }
        let err = rms_norm_heads(&mut qkv, &tensor(&[1.0; 8], [2, 4]), &k_weight, 1e-3, heads).unwrap_err();
        assert_eq!(err.to_string(), "rms_norm: q_weight has shape [2, 4], expected [24]");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn on_a_gpu_equals_the_reference_and_leaves_values_alone() {
        let (gpu, mut rng) = (testing::gpu(), testing::rng(41));
        for (num_heads, num_kv_heads, head_dim) in
            [(32, 8, 128), (16, 2, 64), (5, 1, 96), (4, 4, 256), (3, 1, 8), (2, 1, 520)]
        {
            let heads = Heads { num_heads, num_kv_heads, head_dim };
            for tokens in [1, 3, 130] {
                let label = format!("{tokens} tokens of {heads:?}");
                let cols = heads.qkv_cols();
                let values = testing::random(&mut rng, tokens * cols, 3.0);
                let mut weight =
                    || -> Vec<f32> { testing::random(&mut rng, head_dim, 1.5).into_iter().map(bf16::to_f32).collect() };
                let weights = [weight(), weight()];
                let run = |device: &Device| {
                    let [q, k] = [0, 1].map(|i| Tensor::from_slice(device, "weight", &weights[i], [head_dim]).unwrap());
                    let mut qkv = testing::tensor(device, &values, [tokens, cols]);
                    rms_norm_heads(&mut qkv, &q, &k, 1e-6, heads).unwrap();
                    qkv.to_vec::<bf16>().unwrap()
                };
                let (got, want) = (run(&gpu), run(&Device::Cpu));
                testing::assert_close(&label, &got, &want, testing::BF16_BOUND);
                let first_value = (num_heads + num_kv_heads) * head_dim;
                for (got, values) in got.chunks(cols).zip(values.chunks(cols)) {
                    assert_eq!(got[first_value..], values[first_value..], "{label}: values");
                }
            }
        }
    }
}
