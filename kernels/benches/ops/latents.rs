//! Attention over latents, of a quarter of DeepSeek-V3's heads, in both its forms.

use drafthorse_kernels::ops::attention::{FirstKey, Ragged};
use drafthorse_kernels::ops::mla::{Form, Mla, MlaDims, MlaWeight, mla, workspace_bytes};
use drafthorse_kernels::{DType, Device, Tensor, Workspace};

use crate::machine::Machine;
use crate::steps::{floats, ints, report};

const DIMS: MlaDims = MlaDims { num_heads: 32, rank: 512, nope: 128, rope: 64, value: 128 };
const BLOCK_SIZE: usize = 64;

/// Prints every line that is wanted.
pub fn lines(machine: &Machine, wanted: &dyn Fn(&str) -> bool) {
    for (num_seqs, tokens, kv_len) in
        [(1, 1, 512), (1, 1, 4096), (8, 1, 512), (1, 8, 512), (1, 256, 256), (1, 1024, 1024)]
    {
        for (name, form) in [("absorbed", Form::Absorbed), ("expanded", Form::Expanded)] {
            let (op, shape) = (format!("mla {name}"), format!("seqs={num_seqs} tokens={tokens} kv={kv_len}"));
            if wanted(&format!("{op} {shape}")) {
                attend(machine, &op, &shape, form, [num_seqs, tokens, kv_len]);
            }
        }
    }
}

fn attend(machine: &Machine, op: &str, shape: &str, form: Form, [num_seqs, tokens, kv_len]: [usize; 3]) {
    let blocks = kv_len.div_ceil(BLOCK_SIZE);
    let tables = ints(&(0..(num_seqs * blocks) as i32).rev().collect::<Vec<_>>());
    let tables = Tensor::from_slice(&Device::Cpu, "tables", tables.as_slice::<i32>(), [num_seqs, blocks]).unwrap();
    let cache = floats([num_seqs * blocks * BLOCK_SIZE, DIMS.latent()]);
    let cache_shape = [num_seqs * blocks, BLOCK_SIZE, DIMS.latent()];
    let cache = Tensor::from_slice(&Device::Cpu, "cache", cache.as_slice::<f32>(), cache_shape).unwrap();
    let mut weight = MlaWeight::new(&Device::Cpu, DIMS, DType::BF16).unwrap();
    weight.write_rows(0, floats([DIMS.num_heads * DIMS.expanded(), DIMS.rank]).as_slice()).unwrap();
    let lens = ints(&vec![kv_len as i32; num_seqs]);
    let cu_tokens = ints(&(0..=num_seqs).map(|s| (s * tokens) as i32).collect::<Vec<_>>());
    let ragged = Ragged {
        cu_tokens: &cu_tokens,
        kv_lens: &lens,
        block_tables: &tables,
        max_tokens_per_seq: tokens,
        max_kv_len: kv_len,
    };
    let rows = num_seqs * tokens;
    let q = floats([rows, DIMS.num_heads * DIMS.query()]);
    let mut y = floats([rows, DIMS.num_heads * DIMS.value]);
    let workspace = Workspace::new(&Device::Cpu, workspace_bytes(&Device::Cpu, DIMS, rows)).unwrap();
    let seen: usize = (kv_len - tokens + 1..=kv_len).sum::<usize>() * num_seqs;
    let heads = DIMS.num_heads;
    let flop = match form {
        Form::Expanded => {
            2 * seen * heads * (DIMS.query() + DIMS.value) + 2 * num_seqs * kv_len * heads * DIMS.rank * DIMS.expanded()
        }
        _ => 2 * seen * heads * (DIMS.latent() + DIMS.rank) + 2 * rows * heads * DIMS.rank * DIMS.expanded(),
    };
    let bytes = num_seqs * kv_len * DIMS.latent() * 4 + 2 * heads * DIMS.rank * DIMS.expanded();
    report(machine, op, shape, bytes, flop, || {
        let (q, cache, weight, ragged) = (&q, &cache, &weight, &ragged);
        let call = Mla { form, first_key: FirstKey::Seen, q, cache, weight, ragged, scale: 0.07 };
        mla(call, &mut y, &workspace).unwrap();
    });
}
