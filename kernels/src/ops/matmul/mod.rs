//! What the matmuls of all weight formats share: `y = x @ weightᵀ` on the CPU.
//!
//! **Bits.** Each output is one chain in the order of the inputs k, whatever the instructions, the number of rows or threads:
//!
//! ```text
//! for each group:  sum = fma(x[k], q[k], sum) over the group's k, from 0
//!                  acc = fma(scale, sum, acc), then acc = fma(offset, sum of the group's x, acc)
//! ```
//!
//! Without scales there is one group and `acc = sum`. The sum of a group's x is that of `lane_sum`. So a row's result is the
//! same alone and in any batch, and every path equals the plain one in `reference.rs`.
//!
//! **Layout.** Outputs lie in blocks of 16, one a vector lane ([`Packed`]); a block's lines follow each other in k. Few rows
//! read each line once and multiply it straight from its packed form: that is as fast as the memory delivers. Many rows first
//! unpack a panel of one block into the L1 cache, then multiply it with all rows ([`run`]).
//!
//! **Groups.** Where each row has a part of the weight of its own ([`Groups`]: experts), rows of one part are tiled together. The
//! chains are the same, so a row does not know with which others it was tiled.
//!
//! **Adding a format**: a folder `matmul_NAME` with a [`Format`] in it.

mod activations;
mod format;
mod grouped;
mod packed;
mod panel;
#[cfg(test)]
mod reference;
mod run;
mod scales;
mod tile;

pub(crate) use format::Format;
pub(crate) use grouped::matmul_grouped;
pub use grouped::{Groups, Rows};
pub(crate) use packed::Packed;
#[cfg(test)]
pub(crate) use run::matmul_at;
pub use run::workspace_bytes;
pub(crate) use run::{gather, matmul};
pub use scales::Offset;
pub(crate) use scales::Scales;

#[cfg(test)]
pub(crate) mod testing;

/// Rows of one tile at most: 6 x 16 accumulators leave AVX registers for a weight and an activation.
const MAX_ROWS: usize = 6;

/// Inputs are padded with zeros to a multiple of this, so that every format's lines are whole.
const PAD: usize = 8;
