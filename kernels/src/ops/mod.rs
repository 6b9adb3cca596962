//! One folder an op: its contract and dispatch in `mod.rs`, the plain reference in `cpu.rs`, faster versions beside it.

pub mod add_bias;
pub mod attention;
pub mod concat;
pub mod copy_rows;
pub mod embed;
pub mod feed_tokens;
pub mod gather_rows;
pub mod kv_write;
pub mod logprobs;
pub mod map_tokens;
pub mod mask;
pub mod matmul;
pub mod matmul_bf16;
pub mod matmul_f32;
pub mod matmul_fp8;
pub mod matmul_int4;
pub mod matmul_int8;
pub mod mla;
pub mod moe;
pub mod penalty;
pub mod rms_norm;
pub mod rope;
pub mod rope_kv_write;
mod rows;
pub mod sample;
pub mod silu_mul;
pub mod typical;
