use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::dtype::DType;
use crate::ops::kv_write::kv_write;

const WORKSPACE: usize = 4 << 20;

/// Sequences whose keys and values lie in one cache, in blocks that were given out at random.
struct Cached {
    heads: Heads,
    dtype: DType,
    /// Of each sequence, all rows of `qkv`, `[tokens, cols]`.
    qkv: Vec<Vec<f32>>,
    tables: Vec<Vec<i32>>,
    k: Tensor,
    v: Tensor,
}

/// How many of a sequence's tokens are there, and how many of them run in this step.
type Part = (usize, usize);

impl Cached {
    /// Nothing written yet: the cache is full of NaN, which nothing may read.
    fn new(heads: Heads, block_size: usize, dtype: DType, cache: DType, lens: &[usize], seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let cols = heads.qkv_cols();
        let qkv = lens.iter().map(|len| (0..len * cols).map(|_| rng.random_range(-2.0f32..2.0)).collect()).collect();
        let num_blocks: usize = lens.iter().map(|len| len.div_ceil(block_size)).sum::<usize>() + 3;
        let mut free: Vec<i32> = (0..num_blocks as i32).collect();
        let tables = lens
            .iter()
            .map(|len| {
                (0..len.div_ceil(block_size)).map(|_| free.swap_remove(rng.random_range(0..free.len()))).collect()
            })
            .collect();
        let shape = [num_blocks, heads.num_kv_heads, block_size, heads.head_dim];
        let nan = |cache| {
            let mut tensor = Tensor::zeros(&Device::Cpu, "cache", shape, cache).unwrap();
            match cache {
                DType::F32 => tensor.as_mut_slice::<f32>().fill(f32::NAN),
                _ => tensor.as_mut_slice::<bf16>().fill(bf16::NAN),
            }
            tensor
        };
        Cached { heads, dtype, qkv, tables, k: nan(cache), v: nan(cache) }
    }

    /// The step's tensors: qkv, positions, cu_tokens, kv_lens, block tables.
    fn batch(&self, parts: &[(usize, Part)]) -> [Tensor; 5] {
        let cols = self.heads.qkv_cols();
        let width = self.tables.iter().map(Vec::len).max().unwrap_or(0);
        let (mut qkv, mut positions, mut cu, mut lens, mut tables) = (vec![], vec![], vec![0], vec![], vec![]);
        for &(s, (len, num)) in parts {
            qkv.extend_from_slice(&self.qkv[s][(len - num) * cols..len * cols]);
            positions.extend((len - num..len).map(|position| position as i32));
            cu.push(cu[cu.len() - 1] + num as i32);
            lens.push(len as i32);
            tables.extend((0..width).map(|i| self.tables[s].get(i).copied().unwrap_or(-1)));
        }
        let device = &Device::Cpu;
        let ints = |values: &[i32]| Tensor::from_slice(device, "ints", values, [values.len()]).unwrap();
        let rows = positions.len();
        let qkv = match self.dtype {
            DType::F32 => Tensor::from_slice(device, "qkv", &qkv, [rows, cols]).unwrap(),
            _ => {
                let qkv: Vec<bf16> = qkv.iter().map(|&value| bf16::from_f32(value)).collect();
                Tensor::from_slice(device, "qkv", &qkv, [rows, cols]).unwrap()
            }
        };
        let tables = Tensor::from_slice(device, "tables", &tables, [parts.len(), width]).unwrap();
        [qkv, ints(&positions), ints(&cu), ints(&lens), tables]
    }

    /// Runs a step through the public functions. The bits of `[tokens, heads, head_dim]`.
    fn step(&mut self, parts: &[(usize, Part)]) -> Vec<u32> {
        self.run(parts, true, |qkv, k, v, ragged, heads, scale, y, workspace| {
            attention(qkv, k, v, ragged, heads, scale, y, workspace).unwrap();
        })
    }

    fn run(
        &mut self,
        parts: &[(usize, Part)],
        write: bool,
        attend: impl FnOnce(&Tensor, &Tensor, &Tensor, &Ragged<'_>, Heads, f32, &mut Tensor, &Workspace),
    ) -> Vec<u32> {
        let [qkv, positions, cu_tokens, kv_lens, block_tables] = &self.batch(parts);
        let max_tokens_per_seq = parts.iter().map(|part| part.1.1).max().unwrap_or(0);
        let max_kv_len = parts.iter().map(|part| part.1.0).max().unwrap_or(0);
        let ragged = Ragged { cu_tokens, kv_lens, block_tables, max_tokens_per_seq, max_kv_len };
        if write {
            kv_write(qkv, &mut self.k, &mut self.v, positions, &ragged, self.heads).unwrap();
        }
        let (rows, cols) = (positions.dims()[0], self.heads.num_heads * self.heads.head_dim);
        let mut y = Tensor::zeros(&Device::Cpu, "y", [rows, cols], self.dtype).unwrap();
        let workspace = Workspace::new(&Device::Cpu, WORKSPACE).unwrap();
        let scale = 1.0 / (self.heads.head_dim as f32).sqrt();
        attend(qkv, &self.k, &self.v, &ragged, self.heads, scale, &mut y, &workspace);
        match self.dtype {
            DType::F32 => y.as_slice::<f32>().iter().map(|y| y.to_bits()).collect(),
            _ => y.as_slice::<bf16>().iter().map(|y| y.to_f32().to_bits()).collect(),
        }
    }
}

fn heads(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Heads {
    Heads { num_heads, num_kv_heads, head_dim }
}

fn assert_same(got: &[u32], want: &[u32], label: &str) {
    assert_eq!(got.len(), want.len(), "{label}");
    if let Some(at) = (0..got.len()).find(|&i| got[i] != want[i]) {
        panic!("{label}: element {at} is {}, expected {}", f32::from_bits(got[at]), f32::from_bits(want[at]));
    }
}

#[test]
fn weighs_values_by_the_softmax_of_scores() {
    let heads = heads(1, 1, 8);
    let mut cached = Cached::new(heads, 16, DType::F32, DType::F32, &[2], 1);
    // Queries are (1, 0...), keys (0, ...) and (ln 3, ...), values 4 and 8; the scale is undone in q.
    let scale = 8f32.sqrt();
    let row = |q: f32, k: f32, v: f32| [[q, 0., 0., 0., 0., 0., 0., 0.], [k; 8], [v; 8]].concat();
    cached.qkv[0] = [row(scale, 0.0, 4.0), row(scale, 3f32.ln(), 8.0)].concat();
    let y: Vec<f32> = cached.step(&[(0, (2, 2))]).into_iter().map(f32::from_bits).collect();
    for (y, want) in y.iter().zip([[4.0; 8], [4.0 * 0.25 + 8.0 * 0.75; 8]].concat()) {
        assert!((y - want).abs() < 1e-5, "{y}, expected {want}");
    }
}

#[test]
fn agrees_with_f64() {
    let heads = heads(4, 2, 24);
    let mut cached = Cached::new(heads, 16, DType::F32, DType::F32, &[300], 2);
    let got = cached.step(&[(0, (300, 300))]);
    let (cols, dim) = (heads.qkv_cols(), heads.head_dim);
    let at = |token: usize, col: usize| f64::from(cached.qkv[0][token * cols + col]);
    for token in [0, 1, 15, 63, 64, 255, 256, 299] {
        for head in 0..4 {
            let (k, v) = ((4 + head / 2) * dim, (6 + head / 2) * dim);
            let score =
                |j| (0..dim).map(|d| at(token, head * dim + d) * at(j, k + d)).sum::<f64>() / (dim as f64).sqrt();
            let weights: Vec<f64> = (0..=token).map(|j| score(j).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..dim {
                let want = weights.iter().enumerate().map(|(j, w)| w * at(j, v + d)).sum::<f64>() / total;
                let y = f32::from_bits(got[(token * 4 + head) * dim + d]);
                assert!((f64::from(y) - want).abs() < 2e-6, "token {token} head {head}: {y}, expected {want}");
            }
        }
    }
}

#[test]
fn every_level_gives_the_bits_of_the_reference() {
    let shapes = [
        (heads(9, 3, 64), 16, [70, 5, 300]),
        (heads(8, 1, 16), 32, [33, 129, 1]),
        (heads(2, 2, 24), 64, [258, 64, 40]),
        (heads(5, 1, 8), 128, [130, 17, 2]),
        (heads(32, 1, 40), 16, [20, 3, 65]),
        (heads(2, 1, 256), 64, [65, 2, 3]),
    ];
    let dtypes = [(DType::F32, DType::F32), (DType::F32, DType::BF16), (DType::BF16, DType::BF16)];
    for (seed, (heads, block_size, lens)) in shapes.into_iter().enumerate() {
        for (dtype, cache) in dtypes {
            let mut cached = Cached::new(heads, block_size, dtype, cache, &lens, seed as u64);
            let prefill: Vec<(usize, Part)> = lens.iter().map(|&len| (len, len)).enumerate().collect();
            cached.step(&prefill);
            // A prompt, a chunk at its end, single tokens; the second without the long prompt, so that splits come in.
            let mixed = [(0, (lens[0], lens[0])), (1, (lens[1], 1)), (2, (lens[2], lens[2].min(7)))];
            let decode = [(2, (lens[2], 1)), (0, (lens[0], 2.min(lens[0])))];
            let seen = [(&mixed[..], FirstKey::Seen), (&decode[..], FirstKey::Seen)];
            // A query at position 0 sees nothing then.
            let not_first = [(0, (lens[0], lens[0] - 1)), (1, (lens[1], 1)), (2, (lens[2], 1))];
            let left_out = [(&not_first[..2], FirstKey::LeftOut), (&not_first[..1], FirstKey::LeftOut)];
            for (parts, first) in seen.into_iter().chain(left_out) {
                let want = cached.run(parts, false, |qkv, k, v, ragged, heads, scale, y, _| match (dtype, cache) {
                    (DType::F32, DType::F32) => cpu::attention::<f32, f32>(qkv, k, v, ragged, heads, first, scale, y),
                    (DType::F32, _) => cpu::attention::<f32, bf16>(qkv, k, v, ragged, heads, first, scale, y),
                    _ => cpu::attention::<bf16, bf16>(qkv, k, v, ragged, heads, first, scale, y),
                });
                for level in Level::available() {
                    for threads in [1, 64] {
                        let got = cached.run(parts, false, |q, k, v, ragged, heads, scale, y, space| {
                            let run = match (dtype, cache) {
                                (DType::F32, DType::F32) => tiled::attention::<f32, f32>,
                                (DType::F32, _) => tiled::attention::<f32, bf16>,
                                _ => tiled::attention::<bf16, bf16>,
                            };
                            run(q, k, v, ragged, heads, first, scale, y, space, level, threads).unwrap();
                        });
                        let label = format!(
                            "{heads:?}, block size {block_size}, {dtype}, cache {cache}, {level:?}, {threads}, {first:?}"
                        );
                        assert_same(&got, &want, &label);
                    }
                }
            }
        }
    }
}

#[test]
fn the_first_key_can_be_left_out_whatever_stands_there() {
    let heads = heads(9, 3, 64);
    let attend = |first_values: f32, first: FirstKey| {
        let mut cached = Cached::new(heads, 16, DType::F32, DType::F32, &[300], 4);
        cached.qkv[0][..heads.qkv_cols()].fill(first_values);
        cached.step(&[(0, (300, 300))]);
        cached.run(&[(0, (300, 299))], false, |qkv, k, v, ragged, heads, scale, y, workspace| {
            attention_from(first, qkv, k, v, ragged, heads, scale, y, workspace).unwrap();
        })
    };
    let want = attend(0.5, FirstKey::LeftOut);
    assert!(want.iter().all(|&y| f32::from_bits(y).is_finite()));
    assert_same(&attend(f32::NAN, FirstKey::LeftOut), &want, "no number there");
    assert_ne!(attend(0.5, FirstKey::Seen), want);
    // A query at position 1 sees its own value alone.
    let cols = heads.qkv_cols();
    let cached = Cached::new(heads, 16, DType::F32, DType::F32, &[300], 4);
    let value = &cached.qkv[0][2 * cols - 3 * 64..][..64];
    assert!(want[..64].iter().zip(value).all(|(&y, value)| (f32::from_bits(y) - value).abs() < 1e-6));
}

#[test]
fn whole_prompts_chunks_and_single_tokens_give_the_same_bits() {
    for (heads, block_size, cache) in
        [(heads(9, 3, 64), 16, DType::F32), (heads(4, 4, 32), 64, DType::BF16), (heads(6, 1, 40), 128, DType::F32)]
    {
        let len = 600;
        let cols = heads.num_heads * heads.head_dim;
        let new = |seed| Cached::new(heads, block_size, DType::F32, cache, &[len], seed);
        let whole = new(5).step(&[(0, (len, len))]);
        // The same numbers, other blocks.
        let mut chunked = Cached { qkv: new(5).qkv, ..new(6) };
        let mut single = Cached { qkv: new(5).qkv, ..new(7) };
        let mut done = 0;
        for chunk in [1, 3, 64, 200, 65, 8, 128, 131] {
            let got = chunked.step(&[(0, (done + chunk, chunk))]);
            assert_same(&got, &whole[done * cols..(done + chunk) * cols], &format!("chunk of {chunk} at {done}"));
            done += chunk;
        }
        assert_eq!(done, len);
        for position in 0..len {
            let got = single.step(&[(0, (position + 1, 1))]);
            assert_same(&got, &whole[position * cols..(position + 1) * cols], &format!("token {position}"));
        }
        for last in 1..=8 {
            let got = single.step(&[(0, (len, last))]);
            assert_same(&got, &whole[(len - last) * cols..], &format!("the last {last}"));
        }
    }
}

#[test]
fn a_sequence_does_not_see_its_neighbours() {
    let heads = heads(9, 3, 64);
    let lens = [40, 700, 1, 90];
    let mut cached = Cached::new(heads, 16, DType::F32, DType::F32, &lens, 8);
    let parts: Vec<(usize, Part)> = lens.iter().map(|&len| (len, len)).enumerate().collect();
    let together = cached.step(&parts);
    let cols = heads.num_heads * heads.head_dim;
    let mut start = 0;
    for (s, &len) in lens.iter().enumerate() {
        let alone = cached.step(&[(s, (len, len))]);
        assert_same(&together[start * cols..(start + len) * cols], &alone, &format!("sequence {s}"));
        start += len;
    }
    // Sequences without tokens are passed over.
    let got = cached.step(&[(0, (40, 0)), (1, (700, 1)), (2, (1, 0))]);
    let last = (40 + 700 - 1) * cols;
    assert_same(&got, &together[last..last + cols], "beside empty ones");
}

#[test]
fn what_points_outside_is_named() {
    let heads = heads(2, 1, 8);
    let mut cached = Cached::new(heads, 16, DType::F32, DType::F32, &[20], 9);
    let mut fails = |change: &dyn Fn(&mut [Tensor; 5])| {
        let mut batch = cached.batch(&[(0, (20, 20))]);
        change(&mut batch);
        let [qkv, positions, cu_tokens, kv_lens, block_tables] = &batch;
        let ragged = Ragged { cu_tokens, kv_lens, block_tables, max_tokens_per_seq: 20, max_kv_len: 20 };
        kv_write(qkv, &mut cached.k, &mut cached.v, positions, &ragged, heads).unwrap_err().to_string()
    };
    let set = |tensor: &mut Tensor, at: usize, value: i32| tensor.as_mut_slice::<i32>()[at] = value;
    let table = fails(&|batch| set(&mut batch[4], 1, 99));
    assert_eq!(table, "kv_write: block_tables is 99, expected a block of the cache");
    let length = fails(&|batch| set(&mut batch[3], 0, 19));
    assert_eq!(length, "kv_write: kv_lens is 19, expected at least the tokens of this step");
    let position = fails(&|batch| set(&mut batch[1], 3, 20));
    assert_eq!(position, "kv_write: positions is 20, expected below the sequence's kv_len");
    let tokens = fails(&|batch| set(&mut batch[2], 1, 18));
    assert_eq!(tokens, "kv_write: cu_tokens is 18, expected the number of tokens at the end");
}
