//! Launches `rms_norm.cu` and `rms_norm_heads.cu`.

use super::OP;
use crate::device::cuda::{CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::ops::attention::Heads;
use crate::tensor::Tensor;

/// Elements one thread loads at a time: 16 bytes of bf16.
const VECTOR: usize = 8;
/// Threads of a block that takes several heads.
const HEADS_THREADS: usize = 256;

pub(super) fn rms_norm(device: &CudaDevice, x: &Tensor, weight: &Tensor, eps: f32, y: &mut Tensor) -> Result<()> {
    let (launch, hidden) = plan(x, weight)?;
    let args = [x.into(), weight.into(), y.into(), hidden.into(), eps.into()];
    // SAFETY: `mod.rs` checked the shapes.
    unsafe { launch.run(device, OP, "rms_norm_bf16", &args) }
}

pub(super) fn add_rms_norm(
    device: &CudaDevice,
    x: &mut Tensor,
    residual: &mut Tensor,
    weight: &Tensor,
    eps: f32,
) -> Result<()> {
    let (launch, hidden) = plan(x, weight)?;
    let args = [x.into(), residual.into(), weight.into(), hidden.into(), eps.into()];
    // SAFETY: `mod.rs` checked the shapes.
    unsafe { launch.run(device, OP, "add_rms_norm_bf16", &args) }
}

pub(super) fn rms_norm_pair(
    device: &CudaDevice,
    a: &Tensor,
    b: &Tensor,
    weights: [&Tensor; 2],
    eps: f32,
    y: &mut Tensor,
) -> Result<()> {
    let (rows, _) = a.rows_cols();
    let (launch, hidden) = plan_blocks(a, weights[0], 2 * rows)?;
    let args = [
        a.into(),
        b.into(),
        weights[0].into(),
        weights[1].into(),
        y.into(),
        (rows as u32).into(),
        hidden.into(),
        eps.into(),
    ];
    // SAFETY: `pair.rs` checked the shapes.
    unsafe { launch.run(device, OP, "rms_norm_pair_bf16", &args) }
}

pub(super) fn rms_norm_heads(
    device: &CudaDevice,
    qkv: &mut Tensor,
    weights: [&Tensor; 2],
    eps: f32,
    heads: Heads,
) -> Result<()> {
    qkv.expect_dtype(OP, "qkv", DType::BF16)?;
    let Heads { num_heads, num_kv_heads, head_dim } = heads;
    if !head_dim.is_multiple_of(VECTOR) {
        return Err(KernelError::NotMultiple { op: OP, what: "head_dim", size: head_dim, of: VECTOR });
    }
    let (tokens, _) = qkv.rows_cols();
    // Threads of a head: at most a warp, whose sums need no shared memory.
    let group = (head_dim / VECTOR).next_power_of_two().min(32);
    let blocks = (tokens * (num_heads + num_kv_heads)).div_ceil(HEADS_THREADS / group);
    let [n_tokens, n_heads, n_kv_heads, dim] =
        [tokens, num_heads, num_kv_heads, head_dim].map(|number| (number as u32).into());
    let [q_weight, k_weight] = weights.map(Into::into);
    let shift = group.ilog2().into();
    let args = [qkv.into(), q_weight, k_weight, n_tokens, n_heads, n_kv_heads, dim, shift, eps.into()];
    // SAFETY: `heads.rs` checked the shapes.
    unsafe { Launch::new(blocks, HEADS_THREADS as u32).run(device, "rms_norm_heads", "rms_norm_heads_bf16", &args) }
}

/// One block a row, and the length of a row.
fn plan(x: &Tensor, weight: &Tensor) -> Result<(Launch, u32)> {
    plan_blocks(x, weight, x.rows_cols().0)
}

fn plan_blocks(x: &Tensor, weight: &Tensor, blocks: usize) -> Result<(Launch, u32)> {
    x.expect_dtype(OP, "x", DType::BF16)?;
    weight.expect_dtype(OP, "weight", DType::F32)?;
    let (_, hidden) = x.rows_cols();
    if !hidden.is_multiple_of(VECTOR) {
        return Err(KernelError::NotMultiple { op: OP, what: "hidden", size: hidden, of: VECTOR });
    }
    let threads = (hidden / VECTOR).next_multiple_of(32).min(1024) as u32;
    Ok((Launch::new(blocks, threads), hidden as u32))
}

#[cfg(test)]
mod tests {
    use super::super::{add_rms_norm, rms_norm};
    use crate::device::Device;
    use crate::tensor::Tensor;
    use crate::testing::{BF16_BOUND, assert_close, gpu, random, rng, tensor};
    use half::bf16;

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(1));
        for (rows, hidden) in [(1, 8), (1, 576), (3, 4096), (64, 7168), (5, 16_384)] {
            let (x, r) = (random(&mut rng, rows * hidden, 2.0), random(&mut rng, rows * hidden, 3.0));
            let weight: Vec<f32> = random(&mut rng, hidden, 1.5).iter().map(|w| w.to_f32()).collect();
            let run = |device: &Device| {
                let weight = Tensor::from_slice(device, "weight", &weight, [hidden]).unwrap();
                let (mut y, mut residual) = (tensor(device, &x, [rows, hidden]), tensor(device, &r, [rows, hidden]));
                add_rms_norm(&mut y, &mut residual, &weight, 1e-5).unwrap();
                let mut plain = tensor(device, &r, [rows, hidden]);
                rms_norm(&tensor(device, &x, [rows, hidden]), &weight, 1e-5, &mut plain).unwrap();
                [&y, &residual, &plain].map(|tensor| tensor.to_vec::<bf16>().unwrap())
            };
            let (got, want) = (run(&gpu), run(&Device::Cpu));
            let label = format!("{rows} x {hidden}");
            assert_eq!(got[1], want[1], "{label}: residuals are rounded sums, so equal");
            assert_close(&label, &got[0], &want[0], BF16_BOUND);
            assert_close(&label, &got[2], &want[2], BF16_BOUND);
        }
    }
}
