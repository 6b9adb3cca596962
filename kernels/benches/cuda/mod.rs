//! The table: one line a shape.

mod experts;
mod layer;
mod timing;

use drafthorse_kernels::ops::attention::{Heads, Ragged, attention};
use drafthorse_kernels::ops::matmul_bf16::cuda::{By, matmul_by};
use drafthorse_kernels::ops::rms_norm::add_rms_norm;
use drafthorse_kernels::ops::sample::{SampleRows, sample};
use drafthorse_kernels::ops::silu_mul::silu_mul;
use drafthorse_kernels::{DType, Device, Result, Tensor, Workspace};
use timing::{Random, Timer};

/// Bytes a second that a plain sum reads on an H200: the floor of whatever only reads.
pub const READ: f64 = 4.39e12;

/// More than the 60 MB of L2, so that nothing is found there twice.
const ROTATE_BYTES: usize = 400 << 20;

pub fn run() -> Result<()> {
    let is_deterministic = std::env::args().any(|arg| arg == "--deterministic");
    let device = if is_deterministic { Device::cuda_deterministic(0)? } else { Device::cuda(0)? };
    let Device::Cuda(gpu) = &device else { unreachable!("Device::cuda makes one") };
    println!("# {}, {} multiprocessors", gpu.name(), gpu.num_multiprocessors());
    println!("{:<18} {:<28} {:>9} {:>8} {:>7}  baseline", "op", "shape", "us", "GB/s", "floor");
    let only = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let wanted = |name: &str| only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    let mut random = Random::new(&device)?;
    if wanted("matmul") {
        matmuls(&device, &mut random)?;
    }
    if wanted("attention") {
        attentions(&device, &mut random)?;
    }
    if wanted("prefill") {
        prefills(&device, &mut random)?;
    }
    if wanted("sample") {
        samples(&device, &mut random)?;
    }
    if wanted("small") {
        small(&device, &mut random)?;
    }
    if wanted("experts") {
        experts::run(&device, &mut random)?;
    }
    if wanted("layers") {
        layer::run(&device, &mut random)?;
    }
    Ok(())
}

fn line(op: &str, shape: &str, us: f64, bytes: f64, baseline: &str) {
    let rate = bytes / us / 1e3;
    println!("{op:<18} {shape:<28} {us:>9.2} {rate:>8.0} {:>6.1}%  {baseline}", rate * 1e9 / READ * 100.0);
}

fn matmuls(device: &Device, random: &mut Random) -> Result<()> {
    let Device::Cuda(gpu) = device else { unreachable!("the bench runs on a GPU") };
    let timer = Timer::new(gpu)?;
    let shapes = [
        ("qkv", 6144, 4096),
        ("o", 4096, 4096),
        ("gate_up", 28_672, 4096),
        ("down", 4096, 14_336),
        ("lm_head", 128_256, 4096),
    ];
    for (name, out, inner) in shapes {
        let copies = (ROTATE_BYTES / (out * inner * 2)).clamp(2, 16);
        let weights: Vec<Tensor> = (0..copies).map(|_| random.tensor([out, inner])).collect::<Result<_>>()?;
        let many = if gpu.is_deterministic() { &[256, 512, 4096][..] } else { &[] };
        for &rows in [1, 8, 16, 32, 64, 128].iter().chain(many) {
            let x = random.tensor([rows, inner])?;
            let mut y = Tensor::zeros(device, "y", [rows, out], DType::BF16)?;
            let mut by = |by| timer.each(copies, |i| matmul_by(by, gpu, &x, &weights[i], &mut y));
            let library = by(By::Library)?;
            let us = match gpu.is_deterministic() {
                true => by(By::Fixed)?,
                false if rows <= 8 => by(By::FewRows)?,
                false => library,
            };
            let bytes = 2.0 * (out * inner + rows * (inner + out)) as f64;
            let shape = format!("{name} m={rows} n={out} k={inner}");
            line("matmul", &shape, us, bytes, &format!("{library:.1} us cublaslt"));
        }
    }
    Ok(())
}

fn attentions(device: &Device, random: &mut Random) -> Result<()> {
    let Device::Cuda(gpu) = device else { unreachable!("the bench runs on a GPU") };
    let timer = Timer::new(gpu)?;
    let workspace = Workspace::new(device, 96 << 20)?;
    let heads = Heads { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
    let block_size = 64;
    // us of FA3 at 1, 2 and 4 query tokens; not measured at short contexts, which is where answers begin.
    let shapes = [
        (1, 256, [f64::NAN; 3]),
        (8, 256, [f64::NAN; 3]),
        (32, 256, [f64::NAN; 3]),
        (128, 256, [f64::NAN; 3]),
        (1, 2048, [18.5, 18.4, 18.8]),
        (1, 16_384, [33.1, 34.0, 34.3]),
        (16, 2048, [45.6, 45.9, 46.2]),
        (64, 4096, [263.6, 266.6, 264.4]),
        (128, 2048, [262.2, 265.7, 268.1]),
        (128, 8192, [953.6, 960.3, 962.4]),
    ];
    for (seqs, context, baselines) in shapes {
        let max_blocks = context / block_size;
        let blocks_each = seqs * max_blocks;
        let cache_bytes = blocks_each * heads.num_kv_heads * block_size * heads.head_dim * 4;
        let copies = (ROTATE_BYTES / cache_bytes).clamp(1, 256);
        let shape = [blocks_each * copies, heads.num_kv_heads, block_size, heads.head_dim];
        let (k, v) = (random.tensor(shape)?, random.tensor(shape)?);
        let tables = (0..copies)
            .map(|copy| {
                let mut table: Vec<i32> = (0..blocks_each).map(|i| (copy * blocks_each + i) as i32).collect();
                random.shuffle(&mut table);
                Tensor::from_slice(device, "tables", &table, [seqs, max_blocks])
            })
            .collect::<Result<Vec<_>>>()?;
        for (q, baseline) in [1, 2, 4].into_iter().zip(baselines) {
            let cu: Vec<i32> = (0..=seqs).map(|s| (s * q) as i32).collect();
            let cu_tokens = Tensor::from_slice(device, "cu", &cu, [seqs + 1])?;
            let kv_lens = Tensor::from_slice(device, "lens", &vec![context as i32; seqs], [seqs])?;
            let qkv = random.tensor([seqs * q, heads.qkv_cols()])?;
            let mut y = Tensor::zeros(device, "y", [seqs * q, heads.num_heads * heads.head_dim], DType::BF16)?;
            let us = timer.each(copies, |i| {
                let ragged = Ragged {
                    cu_tokens: &cu_tokens,
                    kv_lens: &kv_lens,
                    block_tables: &tables[i],
                    max_tokens_per_seq: q,
                    max_kv_len: context,
                };
                attention(&qkv, &k, &v, &ragged, heads, 0.088, &mut y, &workspace)
            })?;
            line(
                "attention",
                &format!("b={seqs} ctx={context} q={q}"),
                us,
                cache_bytes as f64,
                &if baseline.is_nan() { String::new() } else { format!("{baseline} us fa3") },
            );
        }
    }
    Ok(())
}

fn prefills(device: &Device, random: &mut Random) -> Result<()> {
    let Device::Cuda(gpu) = device else { unreachable!("the bench runs on a GPU") };
    let timer = Timer::new(gpu)?;
    let workspace = Workspace::new(device, 96 << 20)?;
    let heads = Heads { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
    // TFLOP/s of FA3.
    for (tokens, fa3) in [(1024, 252.0), (4096, 567.0), (16_384, 709.0)] {
        let max_blocks = tokens / 64;
        let shape = [max_blocks, heads.num_kv_heads, 64, heads.head_dim];
        let (k, v) = (random.tensor(shape)?, random.tensor(shape)?);
        let mut blocks: Vec<i32> = (0..max_blocks as i32).collect();
        random.shuffle(&mut blocks);
        let block_tables = Tensor::from_slice(device, "tables", &blocks, [1, max_blocks])?;
        let cu_tokens = Tensor::from_slice(device, "cu", &[0, tokens as i32], [2])?;
        let kv_lens = Tensor::from_slice(device, "lens", &[tokens as i32], [1])?;
        let ragged = Ragged {
            cu_tokens: &cu_tokens,
            kv_lens: &kv_lens,
            block_tables: &block_tables,
            max_tokens_per_seq: tokens,
            max_kv_len: tokens,
        };
        let qkv = random.tensor([tokens, heads.qkv_cols()])?;
        let mut y = Tensor::zeros(device, "y", [tokens, heads.num_heads * heads.head_dim], DType::BF16)?;
        let us = timer.each(1, |_| attention(&qkv, &k, &v, &ragged, heads, 0.088, &mut y, &workspace))?;
        let flop = 2.0 * (tokens * tokens * heads.num_heads * heads.head_dim) as f64;
        println!(
            "{:<18} {:<28} {us:>9.1} {:>8.0} TFLOP/s  {fa3} fa3",
            "prefill",
            format!("s={tokens}"),
            flop / us / 1e6
        );
    }
    Ok(())
}

fn samples(device: &Device, random: &mut Random) -> Result<()> {
    let Device::Cuda(gpu) = device else { unreachable!("the bench runs on a GPU") };
    let timer = Timer::new(gpu)?;
    let workspace = Workspace::new(device, 1 << 20)?;
    let vocab = 128_256;
    for rows in [1, 8, 128] {
        let logits: Vec<f32> = random.normals(rows * vocab);
        let logits = Tensor::from_slice(device, "logits", &logits, [rows, vocab])?;
        let f32s = |value: f32| Tensor::from_slice(device, "f", &vec![value; rows], [rows]);
        let i32s = |value: i32| Tensor::from_slice(device, "i", &vec![value; rows], [rows]);
        let seed = Tensor::zeros(device, "seed", [rows, 2], DType::I32)?;
        let mut ids = Tensor::zeros(device, "ids", [rows], DType::I32)?;
        for (label, temperature, top_k, top_p) in [
            ("greedy", 0.0, 0, 1.0),
            ("t=1", 1.0, 0, 1.0),
            ("t=1 top_p=0.9", 1.0, 0, 0.9),
            ("t=0.7 k=50 p=0.95", 0.7, 50, 0.95),
        ] {
            let all = SampleRows {
                temperature: &f32s(temperature)?,
                top_k: &i32s(top_k)?,
                top_p: &f32s(top_p)?,
                min_p: &f32s(0.0)?,
                seed: &seed,
                position: &i32s(5)?,
            };
            let us = timer.each(1, |_| sample(&logits, &all, &mut ids, &workspace))?;
            line("sample", &format!("{rows}x{vocab} {label}"), us, (rows * vocab * 4) as f64, "");
        }
    }
    Ok(())
}

fn small(device: &Device, random: &mut Random) -> Result<()> {
    let Device::Cuda(gpu) = device else { unreachable!("the bench runs on a GPU") };
    let timer = Timer::new(gpu)?;
    for rows in [1, 32, 128, 4096] {
        let weight = Tensor::from_slice(device, "weight", &[1.0f32; 4096], [4096])?;
        let (mut x, mut residual) = (random.tensor([rows, 4096])?, random.tensor([rows, 4096])?);
        let us = timer.each(1, |_| add_rms_norm(&mut x, &mut residual, &weight, 1e-5))?;
        line("add_rms_norm", &format!("{rows}x4096"), us, (rows * 4096 * 8) as f64, "");
        let gate_up = random.tensor([rows, 28_672])?;
        let mut y = Tensor::zeros(device, "y", [rows, 14_336], DType::BF16)?;
        let us = timer.each(1, |_| silu_mul(&gate_up, &mut y))?;
        line("silu_mul", &format!("{rows}x14336"), us, (rows * 14_336 * 6) as f64, "");
    }
    Ok(())
}
