//! Two tensors normalised side by side: what a drafter's input layer reads, a token's embedding and the hidden state before it.

use super::{OP, cpu, cuda};
use crate::device::Device;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::with_float;

/// `y[t] = [norm(a[t]) ; norm(b[t])]`, each as [`rms_norm`](super::rms_norm) with its own weight, to the same bits.
///
/// | argument  | shape             | dtype       | |
/// |-----------|-------------------|-------------|-|
/// | `a`, `b`  | `[rows, hidden]`  | f32 or bf16 | read |
/// | `weights` | `[hidden]` each   | f32 or bf16, both alike | read, that of `a` first |
/// | `y`       | `[rows, 2 * hidden]` | as `a`   | written |
///
/// # Errors
/// `Shape` or `DType` if they do not agree.
pub fn rms_norm_pair(a: &Tensor, b: &Tensor, weights: [&Tensor; 2], eps: f32, y: &mut Tensor) -> Result<()> {
    let (rows, hidden) = a.rows_cols();
    b.expect_shape(OP, "b", a.shape())?;
    b.expect_dtype(OP, "b", a.dtype())?;
    for weight in weights {
        weight.expect_shape(OP, "weights", [hidden])?;
        weight.expect_dtype(OP, "weights", weights[0].dtype())?;
    }
    y.expect_shape(OP, "y", [rows, 2 * hidden])?;
    y.expect_dtype(OP, "y", a.dtype())?;
    match a.device().clone() {
        Device::Cpu => with_float!(OP, "a", a.dtype(), T => with_float!(OP, "weights", weights[0].dtype(), W => {
            let halves = y.as_mut_slice::<T>().chunks_exact_mut(hidden);
            let inputs = a.as_slice::<T>().chunks_exact(hidden).zip(b.as_slice::<T>().chunks_exact(hidden));
            let inputs = inputs.flat_map(|(a, b)| [(a, weights[0]), (b, weights[1])]);
            for ((x, weight), half) in inputs.zip(halves) {
                cpu::rms_norm::<T, W>(x, weight.as_slice(), eps, half);
            }
        })),
        Device::Cuda(device) => return cuda::rms_norm_pair(&device, a, b, weights, eps, y),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::rms_norm;
    use super::*;
    use crate::testing::{gpu, random, rng, tensor};

    /// Halves of the pair against the norms alone.
    fn check(device: &Device, rows: usize, hidden: usize) {
        let mut rng = rng(31);
        let mut input = |scale| tensor(device, &random(&mut rng, rows * hidden, scale), [rows, hidden]);
        let (a, b) = (input(2.0), input(0.5));
        let mut weight = || -> Vec<f32> { random(&mut rng, hidden, 1.5).iter().map(|w| w.to_f32()).collect() };
        let weights = [weight(), weight()].map(|w| Tensor::from_slice(device, "weight", &w, [hidden]).unwrap());
        let mut y = tensor(device, &vec![bf16::NAN; rows * 2 * hidden], [rows, 2 * hidden]);
        rms_norm_pair(&a, &b, [&weights[0], &weights[1]], 1e-5, &mut y).unwrap();
        let y = y.to_vec::<bf16>().unwrap();
        for (half, (x, weight)) in [&a, &b].into_iter().zip(&weights).enumerate() {
            let mut alone = tensor(device, &vec![bf16::NAN; rows * hidden], [rows, hidden]);
            rms_norm(x, weight, 1e-5, &mut alone).unwrap();
            let alone = alone.to_vec::<bf16>().unwrap();
            for (row, want) in alone.chunks(hidden).enumerate() {
                let at = row * 2 * hidden + half * hidden;
                assert_eq!(y[at..at + hidden], *want, "half {half} of row {row}, {rows} x {hidden}");
            }
        }
    }

    #[test]
    fn halves_have_the_bits_of_the_norms_alone() {
        check(&Device::Cpu, 3, 40);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_pair_on_the_gpu_has_the_bits_of_the_norms_alone() {
        for (rows, hidden) in [(1, 576), (4, 4096), (70, 16_384)] {
            check(&gpu(), rows, hidden);
        }
    }
}
