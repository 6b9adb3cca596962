//! All decoder layers and the head of a Llama-shaped model, one graph: what a decode step costs without sampling.

use drafthorse_kernels::ops::attention::{Heads, Ragged, rope_attention};
use drafthorse_kernels::ops::matmul_bf16::Squares;
use drafthorse_kernels::ops::matmul_bf16::cuda::{add_norm, gated_normed, matmul, matmul_normed};
use drafthorse_kernels::ops::rms_norm::add_rms_norm;
use drafthorse_kernels::ops::rope::{RopeParams, RopeScaling, RopeTable};
use drafthorse_kernels::ops::silu_mul::silu_mul;
use drafthorse_kernels::{DType, Device, Result, Tensor, Workspace};

use super::READ;
use super::timing::{Random, Timer};

struct Shape {
    name: &'static str,
    layers: usize,
    hidden: usize,
    inner: usize,
    vocab: usize,
    heads: Heads,
    /// TPOT of vLLM 0.24 at 1, 8, 32 and 128 sequences, ms.
    vllm: [f64; 4],
}

struct Layer {
    qkv: Tensor,
    o: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norms: [Tensor; 2],
    k: Tensor,
    v: Tensor,
}

const CONTEXT: usize = 256;
const BLOCK: usize = 64;

pub fn run(device: &Device, random: &mut Random) -> Result<()> {
    let shapes = [
        Shape {
            name: "smol135m",
            layers: 30,
            hidden: 576,
            inner: 1536,
            vocab: 49_152,
            heads: Heads { num_heads: 9, num_kv_heads: 3, head_dim: 64 },
            vllm: [1.774, 2.013, 2.552, 4.163],
        },
        Shape {
            name: "llama8b",
            layers: 32,
            hidden: 4096,
            inner: 14_336,
            vocab: 128_256,
            heads: Heads { num_heads: 32, num_kv_heads: 8, head_dim: 128 },
            vllm: [4.863, 5.033, 5.514, 7.191],
        },
    ];
    for shape in shapes {
        decode(device, random, &shape)?;
    }
    Ok(())
}

fn decode(device: &Device, random: &mut Random, shape: &Shape) -> Result<()> {
    let Device::Cuda(gpu) = device else { unreachable!("the bench runs on a GPU") };
    let timer = Timer::new(gpu)?;
    let workspace = Workspace::new(device, 96 << 20)?;
    let &Shape { hidden, inner, heads, .. } = shape;
    let most = 128;
    let max_blocks = CONTEXT / BLOCK;
    let norm = || Tensor::from_slice(device, "norm", &vec![1.0f32; hidden], [hidden]);
    let cache = [most * max_blocks, heads.num_kv_heads, BLOCK, heads.head_dim];
    let layers = (0..shape.layers)
        .map(|_| {
            Ok(Layer {
                qkv: random.tensor([heads.qkv_cols(), hidden])?,
                o: random.tensor([hidden, heads.num_heads * heads.head_dim])?,
                gate_up: random.tensor([2 * inner, hidden])?,
                down: random.tensor([hidden, inner])?,
                norms: [norm()?, norm()?],
                k: random.tensor(cache)?,
                v: random.tensor(cache)?,
            })
        })
        .collect::<Result<Vec<_>>>();
    let mut layers = layers?;
    let head = random.tensor([shape.vocab, hidden])?;
    let weight_bytes: usize =
        layers.iter().map(|l| [&l.qkv, &l.o, &l.gate_up, &l.down].map(Tensor::size_bytes).iter().sum::<usize>()).sum();
    let weight_bytes = weight_bytes + head.size_bytes();
    let params = RopeParams {
        head_dim: heads.head_dim,
        rotary_dim: heads.head_dim,
        theta: 500_000.0,
        max_positions: CONTEXT,
        scaling: RopeScaling::None,
    };
    let table = RopeTable::new(device, &params)?;
    for (seqs, vllm) in [1, 8, 32, 128].into_iter().zip(shape.vllm) {
        let mut blocks: Vec<i32> = (0..(seqs * max_blocks) as i32).collect();
        random.shuffle(&mut blocks);
        let block_tables = Tensor::from_slice(device, "tables", &blocks, [seqs, max_blocks])?;
        let cu: Vec<i32> = (0..=seqs as i32).collect();
        let cu_tokens = Tensor::from_slice(device, "cu", &cu, [seqs + 1])?;
        let kv_lens = Tensor::from_slice(device, "lens", &vec![CONTEXT as i32; seqs], [seqs])?;
        let positions = Tensor::from_slice(device, "positions", &vec![CONTEXT as i32 - 1; seqs], [seqs])?;
        let ragged = Ragged {
            cu_tokens: &cu_tokens,
            kv_lens: &kv_lens,
            block_tables: &block_tables,
            max_tokens_per_seq: 1,
            max_kv_len: CONTEXT,
        };
        let (mut x, mut residual) = (random.tensor([seqs, hidden])?, random.tensor([seqs, hidden])?);
        let empty = |cols, dtype| Tensor::zeros(device, "scratch", [seqs, cols], dtype);
        let mut qkv = empty(heads.qkv_cols(), DType::BF16)?;
        let mut attended = empty(heads.num_heads * heads.head_dim, DType::BF16)?;
        let mut gate_up = empty(2 * inner, DType::BF16)?;
        let mut gated = empty(inner, DType::BF16)?;
        let mut squares = empty(hidden / 16, DType::F32)?;
        let mut logits = empty(shape.vocab, DType::F32)?;
        let (us, in_a_row) = timer.alone_and_in_a_row(|| {
            let spreads = seqs <= 8 && !gpu.is_deterministic();
            for (i, layer) in layers.iter_mut().enumerate() {
                let parts = Squares { parts: &squares, eps: 1e-5 };
                if i == 0 || !spreads {
                    add_rms_norm(&mut x, &mut residual, &layer.norms[0], 1e-5)?;
                    matmul(gpu, &x, &layer.qkv, &mut qkv)?;
                } else {
                    matmul_normed(gpu, &x, parts, &layer.qkv, &mut qkv)?;
                }
                let Layer { k, v, .. } = layer;
                rope_attention(&mut qkv, k, v, &positions, &table, &ragged, heads, 0.088, &mut attended, &workspace)?;
                if spreads {
                    add_norm(gpu, &attended, &layer.o, &mut residual, &layer.norms[1], &mut x, &mut squares)?;
                    let parts = Squares { parts: &squares, eps: 1e-5 };
                    gated_normed(gpu, &x, parts, &layer.gate_up, &mut gated)?;
                    if i + 1 == shape.layers {
                        matmul(gpu, &gated, &layer.down, &mut x)?;
                    } else {
                        add_norm(gpu, &gated, &layer.down, &mut residual, &layer.norms[0], &mut x, &mut squares)?;
                    }
                    continue;
                }
                matmul(gpu, &attended, &layer.o, &mut x)?;
                add_rms_norm(&mut x, &mut residual, &layer.norms[1], 1e-5)?;
                matmul(gpu, &x, &layer.gate_up, &mut gate_up)?;
                silu_mul(&gate_up, &mut gated)?;
                matmul(gpu, &gated, &layer.down, &mut x)?;
            }
            add_rms_norm(&mut x, &mut residual, &layers[0].norms[0], 1e-5)?;
            matmul(gpu, &x, &head, &mut logits)
        })?;
        let kv_bytes = seqs * CONTEXT * heads.num_kv_heads * heads.head_dim * 4 * shape.layers;
        let floor = (weight_bytes + kv_bytes) as f64 / READ * 1e6;
        println!(
            "{:<18} {:<28} {us:>9.1} {:>8.0} {:>6.1}%  {in_a_row:.1} in a row; {vllm} ms vllm 0.24",
            "layers + head",
            format!("{} b={seqs} ctx={CONTEXT}", shape.name),
            (weight_bytes + kv_bytes) as f64 / us / 1e3,
            floor / us * 100.0
        );
    }
    Ok(())
}
