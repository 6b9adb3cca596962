//! One folder an op: its contract and dispatch in `mod.rs`, the plain reference in `cpu.rs`, faster versions beside it.

pub mod add_bias;
pub mod copy_rows;
pub mod gather_rows;
