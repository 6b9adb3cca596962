//! Launches `decode.cu` for sequences of few query tokens in the step; for the others `prefill_wgmma.cu` on Hopper, else `prefill.cu`.
//! On a deterministic device neither: see `fixed.rs`.

use super::fixed;
use super::{FirstKey, Heads, OP, Ragged};
use crate::device::cuda::{Arg, COUNTERS, CudaDevice, Launch, TensorMap};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::ops::rope::RopeTable;
use crate::tensor::Tensor;
use crate::workspace::Workspace;

/// Query rows (tokens times heads of a KV head) of the two decode kernels.
pub(super) const ROWS: [usize; 2] = [16, 32];
const WARPS: usize = 4;
const KEYS: usize = 16;
/// Stages with one and with two blocks a multiprocessor.
const STAGES: [usize; 2] = [4, 3];

/// Query rows of a block of the prefill kernels, and keys of one of its two stages.
const PREFILL_ROWS: usize = 128;
const PREFILL_KEYS: usize = 64;

/// Query rows of a tile of the Hopper kernel, keys of one of its two stages, and threads of a block.
const WGMMA_ROWS: usize = 128;
const WGMMA_KEYS: usize = 128;
const WGMMA_THREADS: u32 = 3 * 128;

/// What a launch takes from the workspace: two parts a block, of outputs, maxima and sums in f32.
pub(super) fn workspace_bytes(device: &CudaDevice, heads: Heads) -> usize {
    if device.is_deterministic() {
        return fixed::workspace_bytes(device, heads);
    }
    2 * STAGES.len() * device.num_multiprocessors() as usize * ROWS[1] * (heads.head_dim + 2) * 4 + 128
}

/// Whether one launch takes a step of so many query tokens a sequence, and writes the cache on the way.
pub(super) fn is_decode(device: &CudaDevice, max_tokens_per_seq: usize, heads: Heads) -> bool {
    !device.is_deterministic() && max_tokens_per_seq * heads.group() <= ROWS[1]
}

/// The step's keys and values are in the cache.
pub(super) fn attention(
    device: &CudaDevice,
    first: FirstKey,
    qkv: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ragged: &Ragged<'_>,
    heads: Heads,
    scale: f32,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    if device.is_deterministic() {
        return fixed::attention(device, first, qkv, k, v, ragged, heads, scale, y, workspace);
    }
    if is_decode(device, ragged.max_tokens_per_seq, heads) {
        return decode(device, first, qkv, k, v, None, ragged, heads, scale, y, workspace);
    }
    prefill(device, first, qkv, k, v, ragged, heads, scale, y)?;
    if ragged.num_seqs() > 1 {
        // The sequences that prefill leaves out; the kernel leaves out the others.
        decode(device, first, qkv, k, v, None, ragged, heads, scale, y, workspace)?;
    }
    Ok(())
}

/// The first position whose key is seen.
pub(super) fn position(first: FirstKey) -> Arg<'static> {
    u32::from(first == FirstKey::LeftOut).into()
}

fn prefill(
    device: &CudaDevice,
    first: FirstKey,
    qkv: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ragged: &Ragged<'_>,
    heads: Heads,
    scale: f32,
    y: &mut Tensor,
) -> Result<()> {
    qkv.expect_dtype(OP, "qkv", DType::BF16)?;
    k.expect_dtype(OP, "k", DType::BF16)?;
    let (_, max_blocks) = ragged.block_tables.rows_cols();
    let block_size = k.dims()[2];
    // One sequence has no other launch; of several, those of few rows have their own.
    let least_rows = if ragged.num_seqs() > 1 { ROWS[1] + 1 } else { 1 };
    let numbers = [ragged.num_seqs(), heads.num_heads, heads.num_kv_heads, block_size, max_blocks, least_rows];
    let [seqs, num_heads, num_kv_heads, n_block_size, max_blocks, least_rows] =
        numbers.map(|number| Arg::from(number as u32));
    let (ragged_args, scale) =
        ([ragged.cu_tokens, ragged.kv_lens, ragged.block_tables].map(Arg::from), scale * std::f32::consts::LOG2_E);
    let [cu_tokens, kv_lens, block_tables] = ragged_args;
    let (qkv, k_arg, v_arg, y) = (Arg::from(qkv), Arg::from(k), Arg::from(v), Arg::from(y));
    let most_rows = ragged.max_tokens_per_seq * heads.group();

    if device.is_hopper() && block_size.is_power_of_two() && matches!(heads.head_dim, 64 | 128) {
        let kernel = if heads.head_dim == 64 { "prefill_wgmma_64" } else { "prefill_wgmma_128" };
        let tile_rows = block_size.min(WGMMA_KEYS);
        let (k_map, v_map) = (TensorMap::new(OP, "k", k, tile_rows)?, TensorMap::new(OP, "v", v, tile_rows)?);
        let counter = device.counters().into();
        #[rustfmt::skip]
        let args = [
            (&k_map).into(), (&v_map).into(), qkv, k_arg, v_arg, cu_tokens, kv_lens, block_tables, y, counter,
            seqs, num_heads, num_kv_heads, n_block_size, max_blocks, least_rows, position(first), scale.into(),
        ];
        let most_tiles = most_rows.div_ceil(WGMMA_ROWS) * ragged.num_seqs() * heads.num_kv_heads;
        // Two tiles of queries, two of keys and two of values; one more KiB, since tiles begin at whole ones.
        let shared = 2 * (WGMMA_ROWS + 2 * WGMMA_KEYS) * heads.head_dim * 2 + 1024;
        let launch = Launch::new(most_tiles.min(device.num_multiprocessors() as usize), WGMMA_THREADS);
        // SAFETY: `mod.rs` checked the shapes; lengths and block tables are the worker's own, planned by the block manager.
        return unsafe { launch.shared_bytes(shared).run(device, "prefill_wgmma", kernel, &args) };
    }

    let kernel = match heads.head_dim {
        64 => "prefill_64",
        96 => "prefill_96",
        128 => "prefill_128",
        got => return Err(head_dim(got)),
    };
    #[rustfmt::skip]
    let args = [
        qkv, k_arg, v_arg, cu_tokens, kv_lens, block_tables, y,
        num_heads, num_kv_heads, n_block_size, max_blocks, least_rows, position(first), scale.into(),
    ];
    let launch =
        Launch::new([heads.num_kv_heads, ragged.num_seqs(), most_rows.div_ceil(PREFILL_ROWS)], 32 * WARPS as u32)
            .shared_bytes((PREFILL_ROWS + 4 * PREFILL_KEYS) * row_bytes(heads));
    // SAFETY: as above.
    unsafe { launch.run(device, "prefill", kernel, &args) }
}

/// Bytes of a row of queries, keys or values in shared memory.
pub(super) fn row_bytes(heads: Heads) -> usize {
    if heads.head_dim <= 64 { 128 } else { 256 }
}

pub(super) fn head_dim(got: usize) -> KernelError {
    KernelError::Value { op: OP, arg: "head_dim", got: got as i64, want: "64, 96 or 128 on a GPU" }
}

/// With `rope`, queries and keys are turned and the cache is written on the way; without, both was done.
///
/// Sequences of more query rows than there is a kernel for are left out.
pub(super) fn decode(
    device: &CudaDevice,
    first: FirstKey,
    qkv: &Tensor,
    k: &Tensor,
    v: &Tensor,
    rope: Option<&RopeTable>,
    ragged: &Ragged<'_>,
    heads: Heads,
    scale: f32,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    qkv.expect_dtype(OP, "qkv", DType::BF16)?;
    k.expect_dtype(OP, "k", DType::BF16)?;
    if let Some(table) = rope {
        table.expect_whole_heads(OP, heads)?;
    }
    let rows = ragged.max_tokens_per_seq * heads.group();
    let tiles = if rows <= ROWS[0] { 1 } else { 2 };
    let pairs = ragged.num_seqs() * heads.num_kv_heads;
    let multiprocessors = device.num_multiprocessors() as usize;
    // Where each block puts several pairs together, a second one keeps the memory busy meanwhile.
    let has_second = tiles == 1 && heads.head_dim != 96;
    let each = if has_second && pairs > multiprocessors { 2 } else { 1 };
    let kernel = match (heads.head_dim, tiles, each) {
        (64, 1, 2) => "decode_64_1_2",
        (64, 1, _) => "decode_64_1_1",
        (64, ..) => "decode_64_2_1",
        (96, 1, _) => "decode_96_1_1",
        (96, ..) => "decode_96_2_1",
        (128, 1, 2) => "decode_128_1_2",
        (128, 1, _) => "decode_128_1_1",
        (128, ..) => "decode_128_2_1",
        (got, ..) => return Err(head_dim(got)),
    };
    if pairs > COUNTERS {
        return Err(KernelError::Value { op: OP, arg: "seqs * kv_heads", got: pairs as i64, want: "at most 262144" });
    }
    let blocks = each * multiprocessors;
    let mut parts = workspace.take([2 * blocks, 16 * tiles, heads.head_dim], DType::F32)?;
    let mut maxima_sums = workspace.take([2 * blocks, 16 * tiles, 2], DType::F32)?;
    let (_, max_blocks) = ragged.block_tables.rows_cols();
    let numbers = [ragged.num_seqs(), heads.num_heads, heads.num_kv_heads, k.dims()[2], max_blocks];
    let [seqs, num_heads, num_kv_heads, block_size, max_blocks] = numbers.map(|number| (number as u32).into());
    let args = [
        qkv.into(),
        k.into(),
        v.into(),
        rope.map_or(0, |table| table.cos_sin().device_address()).into(),
        ragged.cu_tokens.into(),
        ragged.kv_lens.into(),
        ragged.block_tables.into(),
        y.into(),
        (&mut parts).into(),
        (&mut maxima_sums).into(),
        device.counters().into(),
        seqs,
        num_heads,
        num_kv_heads,
        block_size,
        max_blocks,
        position(first),
        (scale * std::f32::consts::LOG2_E).into(),
    ];
    let shared = WARPS * STAGES[each - 1] * 2 * KEYS * row_bytes(heads);
    // SAFETY: `mod.rs` checked the shapes; lengths and block tables are the worker's own, planned by the block manager.
    unsafe { Launch::new(blocks, 32 * WARPS as u32).shared_bytes(shared).run(device, "decode", kernel, &args) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::{FirstKey, Heads, Ragged, attention_from, rope_attention_from};
    use crate::device::Device;
    use crate::dtype::DType;
    use crate::ops::rope::{RopeParams, RopeScaling, RopeTable};
    use crate::ops::rope_kv_write::rope_kv_write;
    use crate::tensor::Tensor;
    use crate::testing::{assert_close, gpu, random, rng, tensor};
    use crate::workspace::Workspace;
    use half::bf16;
    use rand::RngExt;
    use rand::seq::SliceRandom;

    /// Rounded probabilities and outputs: two roundings to 8 bits.
    const BOUND: f64 = 1e-2;

    /// Caches filled with `past` tokens of each sequence, then one step of `new` more; twice on the GPU.
    fn check(heads: Heads, block_size: usize, lens: &[(usize, usize)]) {
        check_from(FirstKey::Seen, heads, block_size, lens);
    }

    /// [`check`], with or without the key at position 0.
    fn check_from(first: FirstKey, heads: Heads, block_size: usize, lens: &[(usize, usize)]) {
        check_on(&gpu(), first, heads, block_size, lens);
    }

    /// [`check_from`] on this GPU.
    pub fn check_on(gpu: &Device, first: FirstKey, heads: Heads, block_size: usize, lens: &[(usize, usize)]) {
        let mut rng = rng(5);
        let seqs = lens.len();
        let longest = lens.iter().map(|(past, new)| past + new).max().unwrap();
        let max_blocks = longest.div_ceil(block_size) + 1;
        let mut blocks: Vec<i32> = (0..(seqs * max_blocks) as i32).collect();
        blocks.shuffle(&mut rng);
        let past: Vec<(usize, usize)> = lens.iter().map(|&(past, _)| (0, past)).collect();
        let steps: Vec<Vec<(usize, usize)>> = vec![past, lens.to_vec()];
        let inputs: Vec<Vec<bf16>> = steps
            .iter()
            .map(|step| random(&mut rng, step.iter().map(|s| s.1).sum::<usize>() * heads.qkv_cols(), 2.0))
            .collect();
        let seed: u64 = rng.random();
        let run = |device: &Device| -> (Vec<bf16>, Vec<bf16>) {
            let workspace = Workspace::new(device, 72 << 20).unwrap();
            let params = RopeParams {
                head_dim: heads.head_dim,
                rotary_dim: heads.head_dim,
                theta: 10_000.0,
                max_positions: longest,
                scaling: RopeScaling::None,
            };
            let table = RopeTable::new(device, &params).unwrap();
            // What was never written must not matter: it is NaN.
            let shape = [seqs * max_blocks, heads.num_kv_heads, block_size, heads.head_dim];
            let poison = vec![bf16::NAN; shape.iter().product()];
            let (mut k, mut v) = (tensor(device, &poison, shape), tensor(device, &poison, shape));
            let block_tables = Tensor::from_slice(device, "blocks", &blocks, [seqs, max_blocks]).unwrap();
            let mut out = (Vec::new(), Vec::new());
            for (step, input) in steps.iter().zip(&inputs) {
                let tokens: usize = step.iter().map(|s| s.1).sum();
                let mut cu = vec![0];
                cu.extend(step.iter().scan(0, |sum, s| {
                    *sum += s.1 as i32;
                    Some(*sum)
                }));
                let kv_lens: Vec<i32> = step.iter().map(|(past, new)| (past + new) as i32).collect();
                let positions: Vec<i32> =
                    step.iter().flat_map(|&(past, new)| past as i32..(past + new) as i32).collect();
                let cu_tokens = Tensor::from_slice(device, "cu", &cu, [seqs + 1]).unwrap();
                let kv_lens = Tensor::from_slice(device, "lens", &kv_lens, [seqs]).unwrap();
                let positions = Tensor::from_slice(device, "positions", &positions, [tokens]).unwrap();
                let max_tokens_per_seq = step.iter().map(|s| s.1).max().unwrap();
                let ragged = Ragged {
                    cu_tokens: &cu_tokens,
                    kv_lens: &kv_lens,
                    block_tables: &block_tables,
                    max_tokens_per_seq,
                    max_kv_len: longest,
                };
                let mut qkv = tensor(device, input, [tokens, heads.qkv_cols()]);
                rope_kv_write(&mut qkv, &mut k, &mut v, &positions, &table, &ragged, heads).unwrap();
                if step == steps.last().unwrap() {
                    let mut y =
                        Tensor::zeros(device, "y", [tokens, heads.num_heads * heads.head_dim], DType::BF16).unwrap();
                    let scale = 1.0 / (heads.head_dim as f32).sqrt();
                    attention_from(first, &qkv, &k, &v, &ragged, heads, scale, &mut y, &workspace).unwrap();
                    out.0 = y.to_vec().unwrap();
                    let mut again = tensor(device, input, [tokens, heads.qkv_cols()]);
                    let mut fused = tensor(device, &vec![bf16::NAN; out.0.len()], y.shape());
                    rope_attention_from(
                        first, &mut again, &mut k, &mut v, &positions, &table, &ragged, heads, scale, &mut fused,
                        &workspace,
                    )
                    .unwrap();
                    assert_close("in one launch", &fused.to_vec::<bf16>().unwrap(), &out.0, BOUND);
                    attention_from(first, &qkv, &k, &v, &ragged, heads, scale, &mut y, &workspace).unwrap();
                    out.1 = y.to_vec().unwrap();
                }
            }
            out
        };
        let (once, again) = run(gpu);
        assert!(once == again, "{heads:?} {lens:?}: two runs differ (seed {seed})");
        let (want, _) = run(&Device::Cpu);
        assert_close(&format!("{heads:?} block {block_size} {lens:?}"), &once, &want, BOUND);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn prefill_equals_the_reference() {
        let llama8b = Heads { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
        let smol = Heads { num_heads: 9, num_kv_heads: 3, head_dim: 64 };
        let odd = Heads { num_heads: 4, num_kv_heads: 4, head_dim: 96 };
        for block_size in [16, 64, 128] {
            check(llama8b, block_size, &[(0, 300)]);
            check(llama8b, block_size, &[(70, 33), (0, 1), (500, 2), (63, 65), (0, 9)]);
            check(smol, block_size, &[(15, 200), (16, 1), (0, 43), (300, 11)]);
            check(odd, block_size, &[(100, 129), (7, 3)]);
        }
        check(odd, 64, &[(0, 33)]);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn the_first_key_can_be_left_out() {
        let llama8b = Heads { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
        let smol = Heads { num_heads: 9, num_kv_heads: 3, head_dim: 64 };
        let odd = Heads { num_heads: 4, num_kv_heads: 4, head_dim: 96 };
        for heads in [llama8b, smol, odd] {
            check_from(FirstKey::LeftOut, heads, 64, &[(1, 1), (130, 1), (9, 1)]);
            check_from(FirstKey::LeftOut, heads, 16, &[(1, 4), (3, 1), (200, 3)]);
            check_from(FirstKey::LeftOut, heads, 64, &[(1, 150), (40, 90), (1, 2)]);
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn decode_equals_the_reference() {
        let llama8b = Heads { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
        let smol = Heads { num_heads: 9, num_kv_heads: 3, head_dim: 64 };
        let odd = Heads { num_heads: 4, num_kv_heads: 4, head_dim: 96 };
        for block_size in [16, 64, 128] {
            check(llama8b, block_size, &[(0, 1)]);
            check(llama8b, block_size, &[(2047, 1)]);
            check(llama8b, block_size, &[(63, 1), (64, 1), (0, 1), (500, 1), (1, 1)]);
            check(smol, block_size, &[(15, 4), (16, 1), (300, 5), (63, 2)]);
            check(odd, block_size, &[(100, 8), (7, 3)]);
        }
        check(llama8b, 64, &[(3000, 8), (10, 4), (64, 1)]);
        check(llama8b, 64, &(0..140).map(|i| (i * 7 % 301, 1)).collect::<Vec<_>>());
    }
}
