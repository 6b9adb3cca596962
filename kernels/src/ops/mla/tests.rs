use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::dtype::DType;
use crate::ops::rope::{RopeParams, RopeScaling, RopeTable};

/// Sequences whose latents lie in one cache, in blocks that were given out at random.
struct Cached {
    dims: MlaDims,
    dtype: DType,
    weight: MlaWeight,
    /// Of each sequence, all rows of queries and of latents with key parts.
    q: Vec<Vec<f32>>,
    kv: Vec<Vec<f32>>,
    norm: Tensor,
    tables: Vec<Vec<i32>>,
    cache: Tensor,
    rope: RopeTable,
    pairs: Pairs,
}

/// How many of a sequence's tokens are there, and how many of them run in this step.
type Part = (usize, usize);

const SMALL: MlaDims = MlaDims { num_heads: 3, rank: 48, nope: 32, rope: 16, value: 16 };
const EPS: f32 = 1e-6;

impl Cached {
    /// Nothing written yet: the cache is full of NaN, which nothing may read.
    fn new(dims: MlaDims, block_size: usize, [dtype, cache, weights]: [DType; 3], lens: &[usize], seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut random =
            |len: usize, width: f32| -> Vec<f32> { (0..len).map(|_| rng.random_range(-width..width)).collect() };
        let q = lens.iter().map(|len| random(len * dims.num_heads * dims.query(), 2.0)).collect();
        let kv = lens.iter().map(|len| random(len * dims.latent(), 3.0)).collect();
        let norm = random(dims.rank, 1.0).iter().map(|x| 1.0 + 0.5 * x).collect::<Vec<_>>();
        let mut weight = MlaWeight::new(&Device::Cpu, dims, weights).unwrap();
        weight.write_rows(0, &random(dims.num_heads * dims.expanded() * dims.rank, 0.3)).unwrap();
        let num_blocks: usize = lens.iter().map(|len| len.div_ceil(block_size)).sum::<usize>() + 3;
        let mut free: Vec<i32> = (0..num_blocks as i32).collect();
        let mut take = |_| free.swap_remove(rng.random_range(0..free.len()));
        let tables = lens.iter().map(|len| (0..len.div_ceil(block_size)).map(&mut take).collect()).collect();
        let mut tensor = Tensor::zeros(&Device::Cpu, "cache", [num_blocks, block_size, dims.latent()], cache).unwrap();
        match cache {
            DType::F32 => tensor.as_mut_slice::<f32>().fill(f32::NAN),
            _ => tensor.as_mut_slice::<bf16>().fill(bf16::NAN),
        }
        let params = RopeParams {
            head_dim: dims.rope,
            rotary_dim: dims.rope,
            theta: 10_000.0,
            max_positions: 1024,
            scaling: RopeScaling::None,
        };
        Cached {
            dims,
            dtype,
            weight,
            q,
            kv,
            norm: Tensor::from_slice(&Device::Cpu, "norm", &norm, [dims.rank]).unwrap(),
            tables,
            cache: tensor,
            rope: RopeTable::new(&Device::Cpu, &params).unwrap(),
            pairs: Pairs::Interleaved,
        }
    }

    fn floats(&self, values: &[f32], rows: usize) -> Tensor {
        let shape = [rows, values.len() / rows.max(1)];
        let rounded: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
        match self.dtype {
            DType::F32 => Tensor::from_slice(&Device::Cpu, "floats", values, shape).unwrap(),
            _ => Tensor::from_slice(&Device::Cpu, "floats", &rounded, shape).unwrap(),
        }
    }

    /// Writes a step's latents, and gives `attend` the queries. What it leaves in y, as bits.
    fn run(&mut self, parts: &[(usize, Part)], attend: impl FnOnce(Mla<'_>, &mut Tensor)) -> Vec<u32> {
        let dims = self.dims;
        let width = self.tables.iter().map(Vec::len).max().unwrap_or(0);
        let (mut q, mut kv, mut positions, mut cu, mut lens, mut tables) =
            (vec![], vec![], vec![], vec![0], vec![], vec![]);
        for &(s, (len, num)) in parts {
            let cols = dims.num_heads * dims.query();
            q.extend_from_slice(&self.q[s][(len - num) * cols..len * cols]);
            kv.extend_from_slice(&self.kv[s][(len - num) * dims.latent()..len * dims.latent()]);
            positions.extend((len - num..len).map(|position| position as i32));
            cu.push(cu[cu.len() - 1] + num as i32);
            lens.push(len as i32);
            tables.extend((0..width).map(|i| self.tables[s].get(i).copied().unwrap_or(-1)));
        }
        let ints = |values: &[i32]| Tensor::from_slice(&Device::Cpu, "ints", values, [values.len()]).unwrap();
        let rows = positions.len();
        let (mut q, kv) = (self.floats(&q, rows), self.floats(&kv, rows));
        let (positions, cu_tokens, kv_lens) = (ints(&positions), ints(&cu), ints(&lens));
        let block_tables = Tensor::from_slice(&Device::Cpu, "tables", &tables, [parts.len(), width]).unwrap();
        let ragged = Ragged {
            cu_tokens: &cu_tokens,
            kv_lens: &kv_lens,
            block_tables: &block_tables,
            max_tokens_per_seq: parts.iter().map(|part| part.1.1).max().unwrap_or(0),
            max_kv_len: parts.iter().map(|part| part.1.0).max().unwrap_or(0),
        };
        let (cache, norm, rope, pairs) = (&mut self.cache, &self.norm, &self.rope, self.pairs);
        latent_write(&mut q, &kv, norm, EPS, cache, &positions, rope, pairs, &ragged, dims).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [rows, dims.num_heads * dims.value], self.dtype).unwrap();
        let call = Mla {
            form: Form::Absorbed,
            first_key: FirstKey::Seen,
            q: &q,
            cache: &self.cache,
            weight: &self.weight,
            ragged: &ragged,
            scale: 1.0 / (dims.query() as f32).sqrt(),
        };
        attend(call, &mut y);
        match self.dtype {
            DType::F32 => y.as_slice::<f32>().iter().map(|y| y.to_bits()).collect(),
            _ => y.as_slice::<bf16>().iter().map(|y| y.to_f32().to_bits()).collect(),
        }
    }

    /// A step through the public functions, with a workspace of just what is planned.
    fn step(&mut self, form: Form, parts: &[(usize, Part)]) -> Vec<u32> {
        let tokens = parts.iter().map(|part| part.1.1).sum();
        let workspace = Workspace::new(&Device::Cpu, workspace_bytes(&Device::Cpu, self.dims, tokens)).unwrap();
        self.run(parts, |call, y| mla(Mla { form, ..call }, y, &workspace).unwrap())
    }
}

const ALL_F32: [DType; 3] = [DType::F32; 3];
const FORMS: [Form; 3] = [Form::Expanded, Form::Absorbed, Form::ByPhase];

fn assert_same(got: &[u32], want: &[u32], label: &str) {
    assert_eq!(got.len(), want.len(), "{label}");
    if let Some(at) = (0..got.len()).find(|&i| got[i] != want[i]) {
        panic!("{label}: element {at} is {}, expected {}", f32::from_bits(got[at]), f32::from_bits(want[at]));
    }
}

/// The largest difference, as a part of the largest value wanted.
fn apart(got: &[u32], want: &[u32]) -> f32 {
    let floats = |bits: &[u32]| -> Vec<f32> { bits.iter().map(|&bits| f32::from_bits(bits)).collect() };
    let (got, want) = (floats(got), floats(want));
    let largest = want.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    got.iter().zip(&want).fold(0.0f32, |max, (a, b)| max.max((a - b).abs())) / largest
}

/// One sequence in f64 without a cache: latents are normalised, keys and values made, queries and keys turned.
fn in_f64(cached: &Cached, tokens: usize) -> Vec<f64> {
    let dims = cached.dims;
    let turn = |x: &mut [f64], position: usize| {
        for i in 0..dims.rope / 2 {
            let angle = position as f64 * 10_000f64.powf(-2.0 * i as f64 / dims.rope as f64);
            let (a, b) = (x[2 * i], x[2 * i + 1]);
            (x[2 * i], x[2 * i + 1]) = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin());
        }
    };
    let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| f64::from(x)).collect() };
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let norm = wide(cached.norm.as_slice());
    let mut latents: Vec<Vec<f64>> = cached.kv[0].chunks(dims.latent()).map(wide).collect();
    for (position, latent) in latents.iter_mut().enumerate() {
        let squares = dot(&latent[..dims.rank], &latent[..dims.rank]) / dims.rank as f64;
        latent[..dims.rank].iter_mut().zip(&norm).for_each(|(x, w)| *x *= w / (squares + f64::from(EPS)).sqrt());
        turn(&mut latent[dims.rank..], position);
    }
    let mut y = Vec::new();
    for token in 0..tokens {
        for head in 0..dims.num_heads {
            let mut q = wide(&cached.q[0][(token * dims.num_heads + head) * dims.query()..][..dims.query()]);
            turn(&mut q[dims.nope..], token);
            let up = wide(cached.weight.up::<f32>(head));
            let made = |latent: &[f64], d: usize| -> f64 {
                (0..dims.rank).map(|r| latent[r] * up[r * dims.expanded() + d]).sum()
            };
            let score = |j: usize| {
                let mut key: Vec<f64> = (0..dims.nope).map(|d| made(&latents[j], d)).collect();
                key.extend_from_slice(&latents[j][dims.rank..]);
                (dot(&q, &key) / (dims.query() as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = (0..=token).map(score).collect();
            let total: f64 = weights.iter().sum();
            for d in dims.nope..dims.expanded() {
                let value: f64 = weights.iter().zip(&latents).map(|(w, latent)| w * made(latent, d)).sum();
                y.push(value / total);
            }
        }
    }
    y
}

#[test]
fn both_forms_agree_with_f64() {
    let mut cached = Cached::new(SMALL, 16, ALL_F32, &[90], 2);
    let want: Vec<u32> = in_f64(&cached, 90).into_iter().map(|y| (y as f32).to_bits()).collect();
    for form in FORMS {
        let apart = apart(&cached.step(form, &[(0, (90, 90))]), &want);
        assert!(apart < 2e-6, "{form:?}: {apart}");
    }
}

#[test]
fn every_level_gives_the_bits_of_the_reference() {
    let shapes = [
        (SMALL, 16, [66, 5, 70]),
        (MlaDims { num_heads: 20, rank: 32, nope: 16, rope: 32, value: 48 }, 64, [20, 66, 1]),
        (MlaDims { num_heads: 2, rank: 512, nope: 128, rope: 64, value: 128 }, 32, [9, 2, 1]),
    ];
    let dtypes = [ALL_F32, [DType::F32, DType::BF16, DType::BF16], [DType::BF16, DType::BF16, DType::F32]];
    for (seed, (dims, block_size, lens)) in shapes.into_iter().enumerate() {
        for dtypes in dtypes {
            let mut cached = Cached::new(dims, block_size, dtypes, &lens, seed as u64);
            let prefill: Vec<(usize, Part)> = lens.iter().map(|&len| (len, len)).enumerate().collect();
            cached.step(Form::Absorbed, &prefill);
            // A prompt, a single token, a few.
            let mixed = [(0, (lens[0], lens[0] - 1)), (1, (lens[1], 1)), (2, (lens[2], lens[2].min(7)))];
            for form in FORMS {
                for (first_key, parts) in [(FirstKey::Seen, &mixed[..]), (FirstKey::LeftOut, &mixed[..2])] {
                    let want = cached.run(parts, |call, y| match dtypes {
                        ALL_F32 => cpu::mla::<f32, f32, f32>(&Mla { form, first_key, ..call }, y),
                        [DType::F32, ..] => cpu::mla::<f32, bf16, bf16>(&Mla { form, first_key, ..call }, y),
                        _ => cpu::mla::<bf16, bf16, f32>(&Mla { form, first_key, ..call }, y),
                    });
                    for level in Level::available() {
                        for threads in if level == Level::Portable { 64..=64 } else { 1..=2 } {
                            let workspace = Workspace::new(&Device::Cpu, 200 << 20).unwrap();
                            let got = cached.run(parts, |call, y| {
                                let run = match dtypes {
                                    ALL_F32 => plan::mla::<f32, f32, f32>,
                                    [DType::F32, ..] => plan::mla::<f32, bf16, bf16>,
                                    _ => plan::mla::<bf16, bf16, f32>,
                                };
                                run(&Mla { form, first_key, ..call }, y, &workspace, level, threads).unwrap();
                            });
                            let label =
                                format!("{dims:?}, {block_size}, {dtypes:?}, {form:?}, {first_key:?}, {level:?}");
                            assert_same(&got, &want, &label);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn absorbed_is_within_a_thousandth_of_expanded() {
    // As wide as DeepSeek-V3's heads; both ways of keeping numbers.
    let dims = MlaDims { num_heads: 2, rank: 512, nope: 128, rope: 64, value: 128 };
    for (dtypes, bound) in [(ALL_F32, 1e-5), ([DType::F32, DType::BF16, DType::BF16], 1e-5)] {
        let mut cached = Cached::new(dims, 64, dtypes, &[200], 3);
        let expanded = cached.step(Form::Expanded, &[(0, (200, 200))]);
        let apart = apart(&cached.step(Form::Absorbed, &[(0, (200, 200))]), &expanded);
        assert!(apart > 0.0 && apart < bound, "{dtypes:?}: {apart}");
    }
}

#[test]
fn whole_prompts_chunks_and_single_tokens_give_the_same_bits() {
    let (dims, len) = (SMALL, 200);
    let cols = dims.num_heads * dims.value;
    for (form, block_size) in [(Form::Expanded, 16), (Form::Absorbed, 16), (Form::Absorbed, 128)] {
        let new = |seed| Cached::new(dims, block_size, ALL_F32, &[len], seed);
        let whole = new(5).step(form, &[(0, (len, len))]);
        // The same numbers, other blocks.
        let mut chunked = new(5);
        chunked.tables[0].reverse();
        let mut done = 0;
        for chunk in [1, 3, 64, 66, 8, 58] {
            let got = chunked.step(form, &[(0, (done + chunk, chunk))]);
            assert_same(&got, &whole[done * cols..(done + chunk) * cols], &format!("{form:?}: {chunk} at {done}"));
            done += chunk;
        }
        assert_eq!(done, len);
        for last in 1..=8 {
            let got = chunked.step(form, &[(0, (len, last))]);
            assert_same(&got, &whole[(len - last) * cols..], &format!("{form:?}: the last {last}"));
        }
    }
}

#[test]
fn a_sequence_does_not_see_its_neighbours() {
    let lens = [40, 150, 1, 90];
    for form in FORMS {
        let mut cached = Cached::new(SMALL, 16, ALL_F32, &lens, 8);
        // More tokens than a wave holds, and sequences of every kind.
        let parts = [(0, (40, 40)), (1, (150, 150)), (2, (1, 1)), (3, (90, 8))];
        cached.step(form, &[(3, (90, 90))]);
        let together = cached.step(form, &parts);
        let cols = SMALL.num_heads * SMALL.value;
        let mut start = 0;
        for (s, (len, num)) in parts {
            let alone = cached.step(form, &[(s, (len, num))]);
            assert_same(&together[start * cols..(start + num) * cols], &alone, &format!("{form:?}: sequence {s}"));
            start += num;
        }
        // Sequences without tokens are passed over.
        let got = cached.step(form, &[(0, (40, 0)), (3, (90, 8)), (2, (1, 0))]);
        assert_same(&got, &together[(start - 8) * cols..], "beside empty ones");
    }
}

#[test]
fn by_phase_is_one_of_the_two_for_each_sequence() {
    let cols = SMALL.num_heads * SMALL.value;
    let mut cached = Cached::new(SMALL, 16, ALL_F32, &[60, 50], 9);
    let whole = [(0, (60, 60)), (1, (50, 50))];
    cached.step(Form::Absorbed, &whole);
    let mixed = [(0, (60, 9)), (1, (50, 8))];
    let [expanded, absorbed, by_phase] = FORMS.map(|form| cached.step(form, &mixed));
    assert_ne!(expanded, absorbed);
    assert_same(&by_phase[..9 * cols], &expanded[..9 * cols], "nine tokens");
    assert_same(&by_phase[9 * cols..], &absorbed[9 * cols..], "eight tokens");
}

#[test]
fn the_first_key_can_be_left_out_whatever_stands_there() {
    for form in [Form::Expanded, Form::Absorbed] {
        let attend = |first: f32, first_key| {
            let mut cached = Cached::new(SMALL, 16, ALL_F32, &[90], 4);
            cached.kv[0][..SMALL.latent()].fill(first);
            cached.step(form, &[(0, (90, 90))]);
            let workspace = Workspace::new(&Device::Cpu, 8 << 20).unwrap();
            cached.run(&[(0, (90, 89))], |call, y| mla(Mla { form, first_key, ..call }, y, &workspace).unwrap())
        };
        let want = attend(0.5, FirstKey::LeftOut);
        assert!(want.iter().all(|&y| f32::from_bits(y).is_finite()));
        assert_same(&attend(f32::NAN, FirstKey::LeftOut), &want, "no number there");
        assert_ne!(attend(0.5, FirstKey::Seen), want);
    }
}

#[test]
fn pairs_are_neighbours_or_halves() {
    let mut cached = Cached::new(SMALL, 16, ALL_F32, &[20], 6);
    let interleaved = cached.step(Form::Absorbed, &[(0, (20, 20))]);
    cached.pairs = Pairs::Halves;
    assert!(apart(&cached.step(Form::Absorbed, &[(0, (20, 20))]), &interleaved) > 1e-3);
    // The same numbers in the other order.
    let half = SMALL.rope / 2;
    let reorder = |x: &mut [f32]| {
        let pairs: Vec<f32> = x.to_vec();
        (0..half).for_each(|i| (x[i], x[i + half]) = (pairs[2 * i], pairs[2 * i + 1]));
    };
    cached.q[0].chunks_exact_mut(SMALL.query()).for_each(|head| reorder(&mut head[SMALL.nope..]));
    cached.kv[0].chunks_exact_mut(SMALL.latent()).for_each(|entry| reorder(&mut entry[SMALL.rank..]));
    assert!(apart(&cached.step(Form::Absorbed, &[(0, (20, 20))]), &interleaved) < 1e-6);
}

#[test]
fn what_does_not_fit_is_named() {
    let odd = MlaDims { nope: 24, ..SMALL };
    let refused = MlaWeight::new(&Device::Cpu, odd, DType::F32).err().unwrap().to_string();
    assert_eq!(refused, "mla: qk_nope_head_dim is 24, not a multiple of 16");
    let mut weight = MlaWeight::new(&Device::Cpu, SMALL, DType::F32).unwrap();
    let rows = SMALL.num_heads * SMALL.expanded();
    let past = weight.write_rows(rows, &[0.0; 48]).unwrap_err().to_string();
    assert_eq!(past, format!("mla: last row is {}, expected at most the weight's rows", rows + 1));
    let mut cached = Cached::new(SMALL, 16, ALL_F32, &[20], 9);
    let mut fails = |change: &dyn Fn(&mut Mla<'_>, &mut Tensor)| {
        let mut message = String::new();
        let workspace = Workspace::new(&Device::Cpu, 8 << 20).unwrap();
        cached.run(&[(0, (20, 20))], |mut call, y| {
            change(&mut call, y);
            message = mla(call, y, &workspace).unwrap_err().to_string();
        });
        message
    };
    let short = fails(&|_, y| *y = Tensor::zeros(&Device::Cpu, "y", [20, 47], DType::F32).unwrap());
    assert_eq!(short, "mla: y has shape [20, 47], expected [20, 48]");
    let table = Tensor::from_slice(&Device::Cpu, "tables", &[99, 0], [1, 2]).unwrap();
    let lens = Tensor::from_slice(&Device::Cpu, "lens", &[20], [1]).unwrap();
    let cu = Tensor::from_slice(&Device::Cpu, "cu", &[0, 20], [2]).unwrap();
    let ragged =
        Ragged { cu_tokens: &cu, kv_lens: &lens, block_tables: &table, max_tokens_per_seq: 20, max_kv_len: 20 };
    let mut message = String::new();
    let workspace = Workspace::new(&Device::Cpu, 8 << 20).unwrap();
    cached.run(&[(0, (20, 20))], |call, y| {
        message = mla(Mla { ragged: &ragged, ..call }, y, &workspace).unwrap_err().to_string();
    });
    assert_eq!(message, "mla: block_tables is 99, expected a block of the cache");
}
