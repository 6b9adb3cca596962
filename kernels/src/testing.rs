//! What the tests of kernels against their references share.

use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::device::Device;
use crate::dtype::Float;
use crate::tensor::{Shape, Tensor};

/// Ops on a GPU may differ from the reference by this much of its norm: bf16 keeps 8 bits.
pub(crate) const BF16_BOUND: f64 = 6e-3;

/// The first GPU. Tests that ask are `#[ignore]`d, so a machine without one runs none of them.
pub(crate) fn gpu() -> Device {
    Device::cuda(0).expect("this test needs a GPU")
}

/// The first GPU, with results that no other row changes.
pub(crate) fn deterministic_gpu() -> Device {
    Device::cuda_deterministic(0).expect("this test needs a GPU")
}

pub(crate) fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// Uniform in (-scale, scale), rounded to bf16.
pub(crate) fn random(rng: &mut StdRng, len: usize, scale: f32) -> Vec<bf16> {
    (0..len).map(|_| bf16::from_f32(rng.random_range(-scale..scale))).collect()
}

pub(crate) fn tensor(device: &Device, values: &[bf16], shape: impl Into<Shape>) -> Tensor {
    Tensor::from_slice(device, "test", values, shape).unwrap()
}

/// Fails unless ‖got - want‖ <= bound ‖want‖.
pub(crate) fn assert_close<A: Float, B: Float>(label: &str, got: &[A], want: &[B], bound: f64) {
    assert_eq!(got.len(), want.len(), "{label}");
    let (mut difference, mut norm) = (0.0f64, 0.0f64);
    for (got, want) in got.iter().zip(want) {
        let (got, want) = (f64::from(got.to_f32()), f64::from(want.to_f32()));
        difference += (got - want).powi(2);
        norm += want.powi(2);
    }
    let error = (difference / norm.max(1e-30)).sqrt();
    assert!(error <= bound, "{label}: differs by {error:.2e} of the norm, at most {bound:.0e} is allowed");
}
