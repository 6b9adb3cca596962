//! One check for all formats.

use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::{Format, Packed, matmul_at, reference, workspace_bytes};
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::simd::Level;
use crate::tensor::Tensor;
use crate::workspace::Workspace;

/// Numbers in -1..1.
pub(crate) fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0f32..1.0)).collect()
}

/// All instructions, all ways to tile rows, both dtypes: the bits of the reference, and no row knows of the others.
pub(crate) fn check<F: Format>(weight: &Packed<F>) {
    const MOST: usize = 64;
    let [out, inputs] = weight.dims();
    let workspace = Workspace::new(&Device::Cpu, workspace_bytes(MOST, inputs)).unwrap();
    let mut x = random(MOST * inputs, 3);
    // A broken row is its own affair. The last one is in no product but that of all rows.
    x[(MOST - 1) * inputs] = f32::NAN;
    x[MOST * inputs - 1] = f32::INFINITY;
    let narrow: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    check_dtype(weight, &x, &workspace, out, inputs, f32::to_bits);
    check_dtype(weight, &narrow, &workspace, out, inputs, |y| u32::from(y.to_bits()));
}

fn check_dtype<T: Float, F: Format>(
    weight: &Packed<F>,
    x: &[T],
    workspace: &Workspace,
    out: usize,
    inputs: usize,
    bits: impl Fn(T) -> u32,
) {
    let want = reference::matmul(x, weight);
    for num_rows in [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 64] {
        let x = Tensor::from_slice(&Device::Cpu, "x", &x[..num_rows * inputs], [num_rows, inputs]).unwrap();
        let want = &want[..num_rows * out];
        for level in Level::available() {
            let mut y = Tensor::zeros(&Device::Cpu, "y", [num_rows, out], T::DTYPE).unwrap();
            matmul_at(level, &x, weight, &mut y, workspace).unwrap();
            for (i, (&y, &want)) in y.as_slice::<T>().iter().zip(want).enumerate() {
                let same = bits(y) == bits(T::from_f32(want)) || want.is_nan() && y.to_f32().is_nan();
                assert!(same, "{level:?}, {num_rows} rows, {out}x{inputs}: {i} is {}, not {want}", y.to_f32());
            }
            let mut y = Tensor::zeros(&Device::Cpu, "y", [num_rows, out], DType::F32).unwrap();
            matmul_at(level, &x, weight, &mut y, workspace).unwrap();
            let same = y
                .as_slice::<f32>()
                .iter()
                .zip(want)
                .all(|(y, want)| y.to_bits() == want.to_bits() || want.is_nan() && y.is_nan());
            assert!(same, "{level:?}, {num_rows} rows, {out}x{inputs} to f32");
        }
    }
}
