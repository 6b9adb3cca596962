//! Launches `fixed_decode.cu` and `fixed_prefill.cu`: attention on a deterministic device.

use super::cuda::{ROWS, head_dim, position, row_bytes};
use super::{FirstKey, Heads, OP, Ragged};
use crate::device::cuda::{Arg, COUNTERS, CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;
use crate::workspace::Workspace;

/// Chains of a unit, a warp each in decode; keys of a chain's turn; stages with one and with two blocks a multiprocessor.
const CHAINS: usize = 4;
const KEYS: usize = 16;
const DECODE_STAGES: [usize; 2] = [4, 3];

const PREFILL_WARPS: usize = 8;
const PREFILL_ROWS: usize = 16 * PREFILL_WARPS;
const PREFILL_STAGES: usize = 4;
/// Turns of a chain in a stage.
const PREFILL_TURNS: usize = 4;

/// What units of pairs that several blocks share may leave for each other. More units than this holds are not shared.
const PARTS_BYTES: usize = 64 << 20;

/// Units whose outputs, maxima and sums, of `rows` query rows, are kept.
fn capacity(rows: usize, heads: Heads) -> usize {
    PARTS_BYTES / (rows * (heads.head_dim + 2) * 4)
}

/// Blocks of a decode launch at most.
fn most_blocks(device: &CudaDevice) -> usize {
    DECODE_STAGES.len() * device.num_multiprocessors() as usize
}

/// What a launch takes from the workspace.
pub(super) fn workspace_bytes(device: &CudaDevice, heads: Heads) -> usize {
    PARTS_BYTES + most_blocks(device) * ROWS[1] * heads.head_dim * 4 + 128
}

/// The step's queries are turned, its keys and values in the cache.
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
    qkv.expect_dtype(OP, "qkv", DType::BF16)?;
    k.expect_dtype(OP, "k", DType::BF16)?;
    let most_rows = ragged.max_tokens_per_seq * heads.group();
    if most_rows > ROWS[1] {
        prefill(device, first, qkv, k, v, ragged, heads, scale, y)?;
        if ragged.num_seqs() == 1 {
            return Ok(());
        }
    }
    decode(device, first, qkv, k, v, ragged, heads, scale, y, workspace)
}

/// Sequences of more query rows than there is a kernel for are left out.
fn decode(
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
    let tiles = if ragged.max_tokens_per_seq * heads.group() <= ROWS[0] { 1 } else { 2 };
    let pairs = ragged.num_seqs() * heads.num_kv_heads;
    let multiprocessors = device.num_multiprocessors() as usize;
    let each = if tiles == 1 && heads.head_dim != 96 && pairs > multiprocessors { 2 } else { 1 };
    let kernel = match (heads.head_dim, tiles, each) {
        (64, 1, 2) => "fixed_decode_64_1_2",
        (64, 1, _) => "fixed_decode_64_1_1",
        (64, ..) => "fixed_decode_64_2_1",
        (96, 1, _) => "fixed_decode_96_1_1",
        (96, ..) => "fixed_decode_96_2_1",
        (128, 1, 2) => "fixed_decode_128_1_2",
        (128, 1, _) => "fixed_decode_128_1_1",
        (128, ..) => "fixed_decode_128_2_1",
        (got, ..) => return Err(head_dim(got)),
    };
    if pairs > COUNTERS {
        return Err(KernelError::Value { op: OP, arg: "seqs * kv_heads", got: pairs as i64, want: "at most 262144" });
    }
    let (rows, blocks) = (16 * tiles, each * multiprocessors);
    let capacity = capacity(rows, heads);
    let mut parts = workspace.take([capacity + blocks, rows, heads.head_dim], DType::F32)?;
    let mut maxima_sums = workspace.take([capacity, rows, 2], DType::F32)?;
    let (_, max_blocks) = ragged.block_tables.rows_cols();
    let numbers = [ragged.num_seqs(), heads.num_heads, heads.num_kv_heads, k.dims()[2], max_blocks];
    let [seqs, num_heads, num_kv_heads, block_size, max_blocks] = numbers.map(|number| Arg::from(number as u32));
    let [cu_tokens, kv_lens, block_tables] = [ragged.cu_tokens, ragged.kv_lens, ragged.block_tables].map(Arg::from);
    let (parts, maxima_sums, counters) = ((&mut parts).into(), (&mut maxima_sums).into(), device.counters().into());
    #[rustfmt::skip]
    let args = [
        qkv.into(), k.into(), v.into(), cu_tokens, kv_lens, block_tables, y.into(), parts, maxima_sums, counters,
        seqs, num_heads, num_kv_heads, block_size, max_blocks, position(first), (capacity as u32).into(),
        (scale * std::f32::consts::LOG2_E).into(),
    ];
    let shared = CHAINS * DECODE_STAGES[each - 1] * 2 * KEYS * row_bytes(heads);
    let launch = Launch::new(blocks, 32 * CHAINS as u32).shared_bytes(shared);
    // SAFETY: `mod.rs` checked the shapes; lengths and block tables are the worker's own, planned by the block manager.
    unsafe { launch.run(device, "fixed_decode", kernel, &args) }
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
    let kernel = match heads.head_dim {
        64 => "fixed_prefill_64",
        96 => "fixed_prefill_96",
        128 => "fixed_prefill_128",
        got => return Err(head_dim(got)),
    };
    let (_, max_blocks) = ragged.block_tables.rows_cols();
    // One sequence has no other launch; of several, those of few rows have their own.
    let least_rows = if ragged.num_seqs() > 1 { ROWS[1] + 1 } else { 1 };
    let numbers = [heads.num_heads, heads.num_kv_heads, k.dims()[2], max_blocks, least_rows];
    let [num_heads, num_kv_heads, block_size, max_blocks, least_rows] = numbers.map(|number| Arg::from(number as u32));
    let [cu_tokens, kv_lens, block_tables] = [ragged.cu_tokens, ragged.kv_lens, ragged.block_tables].map(Arg::from);
    #[rustfmt::skip]
    let args = [
        qkv.into(), k.into(), v.into(), cu_tokens, kv_lens, block_tables, y.into(),
        num_heads, num_kv_heads, block_size, max_blocks, least_rows, position(first), (scale * std::f32::consts::LOG2_E).into(),
    ];
    let tiles = (ragged.max_tokens_per_seq * heads.group()).div_ceil(PREFILL_ROWS);
    // Stages, and what came of each row's units so far.
    let shared = PREFILL_STAGES * PREFILL_TURNS * 2 * KEYS * row_bytes(heads) + PREFILL_ROWS * heads.head_dim * 4;
    let launch =
        Launch::new([heads.num_kv_heads, ragged.num_seqs(), tiles], 32 * PREFILL_WARPS as u32).shared_bytes(shared);
    // SAFETY: as in `decode`.
    unsafe { launch.run(device, "fixed_prefill", kernel, &args) }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::iter;

    use half::bf16;
    use rand::RngExt;
    use rand::rngs::StdRng;
    use rand::seq::SliceRandom;

    use super::super::cuda::tests::check_on;
    use super::super::{FirstKey, Heads, Ragged, attention_from, rope_attention_from, workspace_bytes};
    use crate::device::Device;
    use crate::ops::rope::{RopeParams, RopeScaling, RopeTable};
    use crate::ops::rope_kv_write::rope_kv_write;
    use crate::tensor::Tensor;
    use crate::testing::{deterministic_gpu, random, rng, tensor};
    use crate::workspace::Workspace;

    const LLAMA_8B: Heads = Heads { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
    const SMOL: Heads = Heads { num_heads: 9, num_kv_heads: 3, head_dim: 64 };
    const ODD: Heads = Heads { num_heads: 4, num_kv_heads: 4, head_dim: 96 };

    #[test]
    #[ignore = "needs a GPU"]
    fn attention_in_a_fixed_order_equals_the_reference() {
        let gpu = deterministic_gpu();
        let check = |first, heads, block_size, lens: &[_]| check_on(&gpu, first, heads, block_size, lens);
        check(FirstKey::Seen, LLAMA_8B, 64, &[(70, 33), (0, 1), (500, 2), (63, 65), (0, 9), (1030, 1)]);
        check(FirstKey::Seen, SMOL, 16, &[(15, 200), (16, 1), (0, 43), (300, 11), (600, 1)]);
        check(FirstKey::Seen, ODD, 128, &[(100, 129), (7, 3)]);
        check(FirstKey::Seen, LLAMA_8B, 16, &[(63, 1), (64, 1), (0, 1), (513, 1), (1, 1)]);
        for heads in [LLAMA_8B, SMOL, ODD] {
            check(FirstKey::LeftOut, heads, 64, &[(1, 1), (130, 1), (9, 1)]);
            check(FirstKey::LeftOut, heads, 64, &[(1, 150), (40, 90), (1, 2)]);
        }
    }

    /// Sequences in one cache, their queries turned, and what each query's attention was when it came first.
    struct Cached {
        gpu: Device,
        heads: Heads,
        workspace: Workspace,
        k: Tensor,
        v: Tensor,
        /// Of each sequence, turned rows of `qkv`, and its blocks.
        qkv: Vec<Vec<bf16>>,
        tables: Vec<Vec<i32>>,
        seen: HashMap<(usize, usize), Vec<bf16>>,
    }

    /// Tokens `len - num..len` of a sequence.
    type Part = (usize, usize, usize);

    fn ints(gpu: &Device, values: &[i32]) -> Tensor {
        Tensor::from_slice(gpu, "ints", values, [values.len()]).unwrap()
    }

    impl Cached {
        fn new(heads: Heads, block_size: usize, lens: &[usize], rng: &mut StdRng) -> Self {
            let gpu = deterministic_gpu();
            let num_blocks: usize = lens.iter().map(|len| len.div_ceil(block_size)).sum();
            let mut free: Vec<i32> = (0..num_blocks as i32).collect();
            free.shuffle(rng);
            let shape = [num_blocks, heads.num_kv_heads, block_size, heads.head_dim];
            let poison = vec![bf16::NAN; shape.iter().product()];
            let (mut k, mut v) = (tensor(&gpu, &poison, shape), tensor(&gpu, &poison, shape));
            let longest = lens.iter().copied().max().unwrap();
            let params = RopeParams {
                head_dim: heads.head_dim,
                rotary_dim: heads.head_dim,
                theta: 10_000.0,
                max_positions: longest,
                scaling: RopeScaling::None,
            };
            let table = RopeTable::new(&gpu, &params).unwrap();
            let (mut tables, mut qkv) = (Vec::new(), Vec::new());
            let values = random(rng, heads.qkv_cols() * 509, 2.0);
            for &len in lens {
                let blocks = free.split_off(free.len() - len.div_ceil(block_size));
                let start: usize = rng.random_range(0..values.len());
                let rows: Vec<bf16> =
                    values.iter().copied().cycle().skip(start).step_by(7).take(len * heads.qkv_cols()).collect();
                let mut rows = tensor(&gpu, &rows, [len, heads.qkv_cols()]);
                let positions = ints(&gpu, &(0..len as i32).collect::<Vec<_>>());
                let ragged = Ragged {
                    cu_tokens: &ints(&gpu, &[0, len as i32]),
                    kv_lens: &ints(&gpu, &[len as i32]),
                    block_tables: &Tensor::from_slice(&gpu, "blocks", &blocks, [1, blocks.len()]).unwrap(),
                    max_tokens_per_seq: len,
                    max_kv_len: len,
                };
                rope_kv_write(&mut rows, &mut k, &mut v, &positions, &table, &ragged, heads).unwrap();
                qkv.push(rows.to_vec().unwrap());
                tables.push(blocks);
            }
            let workspace = Workspace::new(&gpu, workspace_bytes(&gpu, heads)).unwrap();
            Cached { gpu, heads, workspace, k, v, qkv, tables, seen: HashMap::new() }
        }

        /// Fails if a query of the step has another result than the first time it came.
        fn step(&mut self, parts: &[Part]) {
            let (cols, width) = (self.heads.qkv_cols(), self.heads.num_heads * self.heads.head_dim);
            let max_blocks = self.tables.iter().map(Vec::len).max().unwrap();
            let (mut qkv, mut cu, mut lens, mut tables) = (Vec::new(), vec![0], Vec::new(), Vec::new());
            for &(seq, len, num) in parts {
                qkv.extend_from_slice(&self.qkv[seq][(len - num) * cols..len * cols]);
                cu.push(cu[cu.len() - 1] + num as i32);
                lens.push(len as i32);
                tables.extend(self.tables[seq].iter().copied().chain(iter::repeat(0)).take(max_blocks));
            }
            let gpu = &self.gpu;
            let tokens = cu[cu.len() - 1] as usize;
            let ragged = Ragged {
                cu_tokens: &ints(gpu, &cu),
                kv_lens: &ints(gpu, &lens),
                block_tables: &Tensor::from_slice(gpu, "blocks", &tables, [parts.len(), max_blocks]).unwrap(),
                max_tokens_per_seq: parts.iter().map(|part| part.2).max().unwrap(),
                max_kv_len: parts.iter().map(|part| part.1).max().unwrap(),
            };
            let qkv = tensor(gpu, &qkv, [tokens, cols]);
            let mut y = tensor(gpu, &vec![bf16::NAN; tokens * width], [tokens, width]);
            let scale = 1.0 / (self.heads.head_dim as f32).sqrt();
            let (k, v, heads) = (&self.k, &self.v, self.heads);
            attention_from(FirstKey::Seen, &qkv, k, v, &ragged, heads, scale, &mut y, &self.workspace).unwrap();
            let y = y.to_vec::<bf16>().unwrap();
            let mut rows = y.chunks(width);
            for &(seq, len, num) in parts {
                for position in len - num..len {
                    let row = rows.next().unwrap();
                    assert!(row.iter().all(|y| y.is_finite()), "sequence {seq}, position {position} of {parts:?}");
                    let first = self.seen.entry((seq, position)).or_insert_with(|| row.to_vec());
                    let same = row.iter().zip(&*first).take_while(|(y, want)| y.to_bits() == want.to_bits()).count();
                    assert!(
                        same == width,
                        "{heads:?}: element {same} of position {position} of sequence {seq} differs in {parts:?}"
                    );
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn attention_does_not_depend_on_the_batch_or_on_chunks() {
        for (heads, block_size) in [(LLAMA_8B, 64), (SMOL, 16), (ODD, 32)] {
            let mut rng = rng(23);
            let lens = [300, 1200, 70, 17, 560];
            let mut cached = Cached::new(heads, block_size, &lens, &mut rng);
            let whole: Vec<Part> = lens.iter().enumerate().map(|(seq, &len)| (seq, len, len)).collect();
            cached.step(&whole);
            for &part in &whole {
                cached.step(&[part]);
            }
            for (seq, &len) in lens.iter().enumerate() {
                // In chunks, and the last ones as drafts.
                let mut done = 0;
                while done < len {
                    let most = [3, 40, 500][rng.random_range(0..3)];
                    let num = rng.random_range(1..=most).min(len - done);
                    done += num;
                    cached.step(&[(seq, done, num)]);
                }
                for num in 1..=9.min(len) {
                    cached.step(&[(seq, len, num)]);
                }
            }
            // Any tokens of any sequences beside each other: single ones, then drafts, then with chunks among them.
            for (most, rounds) in [(1, 8), (4, 6), (9, 6), (200, 5)] {
                for _ in 0..rounds {
                    let parts: Vec<Part> = (0..rng.random_range(1..=160))
                        .map(|_| {
                            let seq = rng.random_range(0..lens.len());
                            let len = rng.random_range(1..=lens[seq]);
                            let num = rng.random_range(1..=most).min(len);
                            (seq, len, num)
                        })
                        .collect();
                    cached.step(&parts);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn attention_over_long_contexts_does_not_depend_on_the_batch() {
        for heads in [LLAMA_8B, SMOL] {
            let mut rng = rng(24);
            let mut cached = Cached::new(heads, 64, &[20_000, 9000], &mut rng);
            for len in [512, 513, 8193, 12_345, 16_385, 20_000] {
                let alone = [(0, len, 1)];
                cached.step(&alone);
                cached.step(&[(0, len, 2)]);
                cached.step(&[(0, len, 300)]);
                // Others beside it: a few, many, and so many that units are not shared.
                for others in [1, 40, 200] {
                    let mut parts: Vec<Part> = (0..others).map(|_| (1, rng.random_range(1..=9000), 1)).collect();
                    parts.extend(alone);
                    cached.step(&parts);
                }
                cached.step(&[(0, len, 1); 150]);
                cached.step(&[(0, len, 70), (1, 8000, 3), (0, len, 5), (1, 9000, 1)]);
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_prompt_in_chunks_leaves_the_same_cache_and_results() {
        let gpu = deterministic_gpu();
        let heads = LLAMA_8B;
        let (len, block_size, mut rng) = (900, 64, rng(25));
        let rows = random(&mut rng, len * heads.qkv_cols(), 2.0);
        let params = RopeParams {
            head_dim: 128,
            rotary_dim: 128,
            theta: 10_000.0,
            max_positions: len,
            scaling: RopeScaling::None,
        };
        let table = RopeTable::new(&gpu, &params).unwrap();
        let num_blocks = len.div_ceil(block_size);
        let workspace = Workspace::new(&gpu, workspace_bytes(&gpu, heads)).unwrap();
        let run = |chunks: &[usize]| {
            let shape = [num_blocks, heads.num_kv_heads, block_size, heads.head_dim];
            let zeros = vec![bf16::ZERO; shape.iter().product()];
            let (mut k, mut v) = (tensor(&gpu, &zeros, shape), tensor(&gpu, &zeros, shape));
            let blocks: Vec<i32> = (0..num_blocks as i32).collect();
            let block_tables = Tensor::from_slice(&gpu, "blocks", &blocks, [1, num_blocks]).unwrap();
            let (mut out, mut done) = (Vec::new(), 0);
            for &num in chunks {
                let cols = heads.qkv_cols();
                let mut qkv = tensor(&gpu, &rows[done * cols..(done + num) * cols], [num, cols]);
                let positions = ints(&gpu, &(done as i32..(done + num) as i32).collect::<Vec<_>>());
                let mut y = tensor(&gpu, &vec![bf16::NAN; num * 4096], [num, 4096]);
                done += num;
                let ragged = Ragged {
                    cu_tokens: &ints(&gpu, &[0, num as i32]),
                    kv_lens: &ints(&gpu, &[done as i32]),
                    block_tables: &block_tables,
                    max_tokens_per_seq: num,
                    max_kv_len: done,
                };
                rope_attention_from(
                    FirstKey::Seen,
                    &mut qkv,
                    &mut k,
                    &mut v,
                    &positions,
                    &table,
                    &ragged,
                    heads,
                    0.088,
                    &mut y,
                    &workspace,
                )
                .unwrap();
                out.extend(y.to_vec::<bf16>().unwrap());
            }
            assert_eq!(done, len);
            [out, k.to_vec().unwrap(), v.to_vec().unwrap()]
                .map(|all| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        };
        let whole = run(&[900]);
        let ones = [1; 900];
        for chunks in [&[899, 1][..], &[1, 899], &[8, 9, 10, 300, 4, 569], &[512, 388], &ones] {
            assert!(run(chunks) == whole, "{} chunks: {:?} ...", chunks.len(), &chunks[..2]);
        }
    }
}
