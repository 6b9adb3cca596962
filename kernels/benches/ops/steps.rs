//! The ops between the matmuls: attention, norms, rope and gates as in a layer of SmolLM2-135M, and sampling of its vocabulary.

use std::time::{Duration, Instant};

use drafthorse_kernels::ops::attention::{self, Heads, Ragged, attention};
use drafthorse_kernels::ops::kv_write::kv_write;
use drafthorse_kernels::ops::rms_norm::add_rms_norm;
use drafthorse_kernels::ops::rope::{RopeParams, RopeScaling, RopeTable, rope};
use drafthorse_kernels::ops::sample::{self, SampleRows, sample};
use drafthorse_kernels::ops::silu_mul::silu_mul;
use drafthorse_kernels::{DType, Device, Tensor, Workspace};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::machine::Machine;

const HEADS: Heads = Heads { num_heads: 9, num_kv_heads: 3, head_dim: 64 };
const BLOCK_SIZE: usize = 64;
const HIDDEN: usize = 576;
const INNER: usize = 1536;
const VOCAB: usize = 49_152;

/// Prints every line that is wanted.
pub fn lines(machine: &Machine, wanted: &dyn Fn(&str) -> bool) {
    for (num_seqs, tokens, kv_len) in
        [(1, 1, 128), (1, 1, 512), (1, 1, 1024), (1, 1, 4096), (8, 1, 512), (1, 512, 512), (1, 2048, 2048)]
    {
        for cache in [DType::F32, DType::BF16] {
            let op = format!("attention {cache}");
            let shape = format!("seqs={num_seqs} tokens={tokens} kv={kv_len}");
            if wanted(&format!("{op} {shape}")) {
                attend(machine, &op, &shape, [num_seqs, tokens, kv_len], cache);
            }
        }
    }
    for rows in [1, 8, 512] {
        let cols = HEADS.qkv_cols();
        let line = |op: &str| wanted(&format!("{op} rows={rows}"));
        let shape = format!("rows={rows}");
        if line("add_rms_norm") {
            let (mut x, mut residual, weight) = (floats([rows, HIDDEN]), floats([rows, HIDDEN]), floats([1, HIDDEN]));
            let weight = Tensor::from_slice(&Device::Cpu, "weight", weight.as_slice::<f32>(), [HIDDEN]).unwrap();
            let bytes = 16 * rows * HIDDEN;
            let run = || add_rms_norm(&mut x, &mut residual, &weight, 1e-5).unwrap();
            report(machine, "add_rms_norm", &shape, bytes, 0, run);
        }
        if line("rope") {
            let scaling = RopeScaling::None;
            let params = RopeParams { head_dim: 64, rotary_dim: 64, theta: 1e4, max_positions: 1024, scaling };
            let table = RopeTable::new(&Device::Cpu, &params).unwrap();
            let (mut qkv, positions) = (floats([rows, cols]), ints(&(0..rows as i32).collect::<Vec<_>>()));
            report(machine, "rope", &shape, 8 * rows * cols, 0, || rope(&mut qkv, &positions, &table, HEADS).unwrap());
        }
        if line("silu_mul") {
            let (gate_up, mut y) = (floats([rows, 2 * INNER]), floats([rows, INNER]));
            report(machine, "silu_mul", &shape, 12 * rows * INNER, 0, || silu_mul(&gate_up, &mut y).unwrap());
        }
    }
    for (name, temperature, top_k, top_p, min_p) in [
        ("greedy", 0.0, 0, 1.0, 0.0),
        ("plain", 1.0, 0, 1.0, 0.0),
        ("top_k=50", 1.0, 50, 1.0, 0.0),
        ("top_p=0.95", 1.0, 0, 0.95, 0.0),
        ("top_k=50 top_p=0.95", 0.8, 50, 0.95, 0.0),
        ("min_p=0.05", 1.0, 0, 1.0, 0.05),
    ] {
        for (logits, spread) in [("flat", 1.0), ("peaked", 4.0)] {
            for rows in [1, 8] {
                let shape = format!("{name} {logits} rows={rows}");
                if wanted(&format!("sample {shape}")) {
                    sampling(machine, &shape, rows, spread, [temperature, top_p, min_p], top_k);
                }
            }
        }
    }
}

fn attend(machine: &Machine, op: &str, shape: &str, [num_seqs, tokens, kv_len]: [usize; 3], cache: DType) {
    let blocks = kv_len.div_ceil(BLOCK_SIZE);
    let tables: Vec<i32> = (0..(num_seqs * blocks) as i32).rev().collect();
    let tables = Tensor::from_slice(&Device::Cpu, "tables", &tables, [num_seqs, blocks]).unwrap();
    let cache_shape = [num_seqs * blocks, HEADS.num_kv_heads, BLOCK_SIZE, HEADS.head_dim];
    // As many layers as a model has: what a step reads is then in no cache, as in a model.
    let mut layers: Vec<[Tensor; 2]> = (0..30)
        .map(|_| ["k", "v"].map(|what| Tensor::zeros(&Device::Cpu, what, cache_shape, cache).unwrap()))
        .collect();
    let lens = ints(&vec![kv_len as i32; num_seqs]);
    let cu = |tokens: usize| ints(&(0..=num_seqs).map(|s| (s * tokens) as i32).collect::<Vec<_>>());
    let ragged = |cu_tokens, max_tokens_per_seq| Ragged {
        cu_tokens,
        kv_lens: &lens,
        block_tables: &tables,
        max_tokens_per_seq,
        max_kv_len: kv_len,
    };
    let (whole, step) = (cu(kv_len), cu(tokens));
    let all = floats([num_seqs * kv_len, HEADS.qkv_cols()]);
    let positions = ints(&(0..num_seqs * kv_len).map(|i| (i % kv_len) as i32).collect::<Vec<_>>());
    for [k, v] in &mut layers {
        kv_write(&all, k, v, &positions, &ragged(&whole, kv_len), HEADS).unwrap();
    }

    let qkv = floats([num_seqs * tokens, HEADS.qkv_cols()]);
    let mut y = floats([num_seqs * tokens, HEADS.num_heads * HEADS.head_dim]);
    let workspace = Workspace::new(&Device::Cpu, attention::WORKSPACE_BYTES).unwrap();
    let seen: usize = (kv_len - tokens + 1..=kv_len).sum::<usize>() * num_seqs;
    let flop = 4 * seen * HEADS.num_heads * HEADS.head_dim;
    let bytes = 2 * num_seqs * kv_len * HEADS.num_kv_heads * HEADS.head_dim * cache.bytes();
    let mut next = (0..layers.len()).cycle();
    report(machine, op, shape, bytes, flop, || {
        let [k, v] = &layers[next.next().unwrap()];
        attention(&qkv, k, v, &ragged(&step, tokens), HEADS, 0.125, &mut y, &workspace).unwrap();
    });
}

fn sampling(
    machine: &Machine,
    shape: &str,
    rows: usize,
    spread: f32,
    [temperature, top_p, min_p]: [f32; 3],
    top_k: i32,
) {
    let mut rng = StdRng::seed_from_u64(3);
    // Sums of uniform numbers are near enough to normal ones.
    let logits: Vec<f32> = (0..rows * VOCAB).map(|_| (0..6).map(|_| rng.random_range(-spread..spread)).sum()).collect();
    let logits = Tensor::from_slice(&Device::Cpu, "logits", &logits, [rows, VOCAB]).unwrap();
    let each = |value: f32| Tensor::from_slice(&Device::Cpu, "values", &vec![value; rows], [rows]).unwrap();
    let (temperature, top_p, min_p) = (each(temperature), each(top_p), each(min_p));
    let (top_k, mut ids) = (ints(&vec![top_k; rows]), ints(&vec![0; rows]));
    let seed = Tensor::from_slice(&Device::Cpu, "seed", &vec![7; 2 * rows], [rows, 2]).unwrap();
    let workspace = Workspace::new(&Device::Cpu, sample::workspace_bytes(VOCAB)).unwrap();
    let mut step = 0;
    report(machine, "sample", shape, 4 * rows * VOCAB, 0, || {
        step += 1;
        let position = ints(&vec![step; rows]);
        let rows = SampleRows {
            temperature: &temperature,
            top_k: &top_k,
            top_p: &top_p,
            min_p: &min_p,
            seed: &seed,
            position: &position,
        };
        sample(&logits, &rows, &mut ids, &workspace).unwrap();
    });
}

pub fn floats(shape: [usize; 2]) -> Tensor {
    let mut rng = StdRng::seed_from_u64(2);
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| rng.random_range(-1.0..1.0)).collect();
    Tensor::from_slice(&Device::Cpu, "floats", &values, shape).unwrap()
}

pub fn ints(values: &[i32]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, "ints", values, [values.len()]).unwrap()
}

/// Times `run` and prints the line.
pub fn report(machine: &Machine, op: &str, shape: &str, bytes: usize, flop: usize, mut run: impl FnMut()) {
    let started = Instant::now();
    let mut times = Vec::new();
    while started.elapsed() < Duration::from_millis(600) || times.len() < 40 {
        let start = Instant::now();
        run();
        times.push(start.elapsed());
    }
    // The first ones bring in pages.
    let times = &mut times[30..];
    times.sort_unstable();
    let (median, least) = (times[times.len() / 2].as_secs_f64(), times[0].as_secs_f64());
    let share = machine.least_seconds(bytes as f64, flop as f64) / least * 100.0;
    let (us, least_us) = (median * 1e6, least * 1e6);
    let (gb, gflop) = (bytes as f64 / least / 1e9, flop as f64 / least / 1e9);
    println!("{op:26} {shape:30} {us:10.1} {least_us:10.1} {gb:8.1} {gflop:8.1} {share:8.0}%");
}
