//! Launches `fixed_product.cu`: products of a deterministic device.

use crate::device::cuda::{CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

const OP: &str = "matmul_bf16";

/// Elements of a 16-byte access.
pub(super) const VECTOR: usize = 8;
/// Parts that are summed apart and then added, bytes of a row in a turn, and outputs of a tile.
const PARTS: usize = 4;
const ROW_BYTES: usize = 128;
const OUT: usize = 128;
/// Turns on their way of a warp with a part of its own, and of a block with a tile.
const DEPTH: usize = 6;
const STAGES: usize = 4;
const TILE_THREADS: u32 = 256;

/// A kernel, by its most rows in a block. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    Few(usize),
    Tile(usize),
}

/// For so many rows.
fn kernel(rows: usize) -> Kernel {
    match rows {
        0..=8 => Kernel::Few(8),
        9..=16 => Kernel::Few(16),
        17..=32 => Kernel::Tile(32),
        33..=64 => Kernel::Tile(64),
        _ => Kernel::Tile(128),
    }
}

/// Most rows of a product with the gate in it.
pub(super) const MOST_GATED: usize = 16;

/// `y = silu(x gateᵀ) * (x upᵀ)` of at most [`MOST_GATED`] rows; `cuda.rs` checked types and shapes.
pub(super) fn gated(device: &CudaDevice, x: &Tensor, weight: &Tensor, y: &mut Tensor) -> Result<()> {
    let ((rows, inner), (out, _)) = (x.rows_cols(), weight.rows_cols());
    let (most, name) = if rows <= 8 { (8, "fixed_few_8_gated") } else { (16, "fixed_few_16_gated") };
    let [n_rows, n_out, n_in] = [rows, out, inner].map(|number| (number as u32).into());
    let args = [x.into(), weight.into(), y.into(), n_rows, n_out, n_in];
    // SAFETY: the shapes were checked.
    unsafe { few(out, most).run(device, "fixed_product", name, &args) }
}

fn few(out: usize, most: usize) -> Launch {
    Launch::new(out.div_ceil(16), 32 * PARTS as u32).shared_bytes(PARTS * DEPTH * (16 + most) * ROW_BYTES)
}

/// `y = x weightᵀ`; `cuda.rs` checked types and shapes.
pub(super) fn matmul(device: &CudaDevice, parts: u64, x: &Tensor, weight: &Tensor, y: &mut Tensor) -> Result<()> {
    let ((rows, inner), (out, _)) = (x.rows_cols(), weight.rows_cols());
    if !inner.is_multiple_of(VECTOR) {
        return Err(KernelError::NotMultiple { op: OP, what: "in", size: inner, of: VECTOR });
    }
    let in_f32 = y.dtype() == DType::F32;
    let numbers = [rows, out, inner].map(|number| (number as u32).into());
    let [n_rows, n_out, n_in] = numbers;
    match kernel(rows) {
        Kernel::Few(most) => {
            let name = match (most, in_f32) {
                (8, false) => "fixed_few_8_bf16",
                (8, true) => "fixed_few_8_f32",
                (_, false) => "fixed_few_16_bf16",
                (_, true) => "fixed_few_16_f32",
            };
            let args = [x.into(), weight.into(), y.into(), n_rows, n_out, n_in];
            // SAFETY: the shapes were checked.
            unsafe { few(out, most).run(device, "fixed_product", name, &args) }
        }
        Kernel::Tile(most) => {
            let name = match (most, in_f32) {
                (32, false) => "fixed_tile_32_bf16",
                (32, true) => "fixed_tile_32_f32",
                (64, false) => "fixed_tile_64_bf16",
                (64, true) => "fixed_tile_64_f32",
                (_, false) => "fixed_tile_128_bf16",
                (_, true) => "fixed_tile_128_f32",
            };
            let tiles = out.div_ceil(OUT) * rows.div_ceil(most);
            // So there are no more tiles than `parts` has room for.
            let is_split = 2 * tiles <= device.num_multiprocessors() as usize;
            let args = [x.into(), weight.into(), y.into(), parts.into(), device.counters().into(), n_rows, n_out, n_in];
            let launch = Launch::new([tiles, if is_split { PARTS } else { 1 }], TILE_THREADS)
                .shared_bytes(STAGES * (OUT + most) * ROW_BYTES);
            // SAFETY: the shapes were checked.
            unsafe { launch.run(device, "fixed_product", name, &args) }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::cuda::matmul;
    use crate::device::Device;
    use crate::tensor::Tensor;
    use crate::testing::{BF16_BOUND, assert_close, deterministic_gpu, random, rng, tensor};

    /// Outputs and inputs of Llama-8B's products, of SmolLM2-135M's, and odd ones.
    const SHAPES: [[usize; 2]; 10] = [
        [6144, 4096],
        [4096, 14_336],
        [128_256, 4096],
        [960, 576],
        [576, 1536],
        [49_152, 576],
        [161, 1000],
        [24, 64],
        [300, 136],
        [16, 8],
    ];

    /// Random numbers take longer than products, so that rows begin at different places of fewer of them.
    fn weight(gpu: &Device, out: usize, inner: usize) -> Tensor {
        let values = random(&mut rng(20), inner + 65_537, 0.5);
        let mut weight: Vec<bf16> = Vec::with_capacity(out * inner);
        for row in 0..out {
            let first = row * 7919 % 65_537;
            weight.extend_from_slice(&values[first..first + inner]);
        }
        tensor(gpu, &weight, [out, inner])
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn products_do_not_depend_on_the_number_of_rows() {
        let (gpu, mut rng) = (deterministic_gpu(), rng(21));
        let Device::Cuda(device) = &gpu else { unreachable!("it is one") };
        for [out, inner] in SHAPES {
            let most = 300;
            let x = random(&mut rng, most * inner, 1.0);
            let weight = weight(&gpu, out, inner);
            let product = |first: usize, rows: usize| -> Vec<f32> {
                let x = tensor(&gpu, &x[first * inner..][..rows * inner], [rows, inner]);
                let mut y = Tensor::from_slice(&gpu, "y", &vec![f32::NAN; rows * out], [rows, out]).unwrap();
                matmul(device, &x, &weight, &mut y).unwrap();
                let in_f32 = y.to_vec::<f32>().unwrap();
                if rows * out < 1 << 20 {
                    let mut y = tensor(&gpu, &vec![bf16::NAN; rows * out], [rows, out]);
                    matmul(device, &x, &weight, &mut y).unwrap();
                    let rounded = y.to_vec::<bf16>().unwrap();
                    let is_rounded = |(y, in_f32): (&bf16, &f32)| y.to_bits() == bf16::from_f32(*in_f32).to_bits();
                    assert!(rounded.iter().zip(&in_f32).all(is_rounded), "{rows} rows of [{out}, {inner}] in bf16");
                }
                in_f32
            };
            let all = product(0, most);
            assert!(all.iter().all(|y| y.is_finite()));
            // Each number of rows where that is quick; where not, those at which another kernel or another cut begins.
            let every: Vec<usize> = (1..=most).collect();
            let few = [1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 299];
            let fewer = [1, 9, 17, 33, 65, 129];
            let numbers = match out * inner {
                0..=200_000 => &every[..],
                200_001..=100_000_000 => &few[..],
                _ => &fewer[..],
            };
            for &rows in numbers {
                // They need not be the first.
                for first in [0, most - rows] {
                    let y = product(first, rows);
                    let want = &all[first * out..][..rows * out];
                    if let Some(at) = y.iter().zip(want).position(|(y, want)| y.to_bits() != want.to_bits()) {
                        let (row, output) = (at / out, at % out);
                        panic!(
                            "{rows} rows from {first} of [{out}, {inner}]: row {row}, output {output} is {}, {} in {most} rows",
                            y[at], want[at]
                        );
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn products_in_a_fixed_order_equal_sums_in_double() {
        let (gpu, mut rng) = (deterministic_gpu(), rng(22));
        let Device::Cuda(device) = &gpu else { unreachable!("it is one") };
        for [out, inner] in [[16, 64], [161, 576], [96, 1536], [40, 4096], [24, 14_336], [300, 512], [131, 200], [3, 8]]
        {
            for rows in [1, 9, 17, 40, 100, 150, 300] {
                let (x, weight) = (random(&mut rng, rows * inner, 1.0), random(&mut rng, out * inner, 1.0));
                let mut want = vec![0.0f32; rows * out];
                for (i, want) in want.iter_mut().enumerate() {
                    let (x, w) = (&x[i / out * inner..][..inner], &weight[i % out * inner..][..inner]);
                    *want = x.iter().zip(w).map(|(x, w)| x.to_f64() * w.to_f64()).sum::<f64>() as f32;
                }
                let (x, weight) = (tensor(&gpu, &x, [rows, inner]), tensor(&gpu, &weight, [out, inner]));
                let label = format!("{rows} x {out} x {inner}");
                let mut y = tensor(&gpu, &vec![bf16::NAN; rows * out], [rows, out]);
                matmul(device, &x, &weight, &mut y).unwrap();
                assert_close(&label, &y.to_vec::<bf16>().unwrap(), &want, BF16_BOUND);
                let mut in_f32 = Tensor::from_slice(&gpu, "y", &vec![f32::NAN; rows * out], [rows, out]).unwrap();
                matmul(device, &x, &weight, &mut in_f32).unwrap();
                assert_close(&label, &in_f32.to_vec::<f32>().unwrap(), &want, 1e-5);
            }
        }
    }
}
