//! AWQ checkpoints: 4-bit weights with zero points, as AutoAWQ's `gemm` version stores them.
//!
//! Source: Lin et al. 2023, arXiv:2306.00978. See [`columns`](super::columns) for the tensors. A word's values are the outputs 0, 2, 4, 6,
//! 1, 3, 5, 7 of eight, in `qweight` and in `qzeros`.

use super::columns::{Columns, Packing};
use crate::config::StoredQuantization;
use crate::error::Result;

pub(super) const NAME: &str = "awq";

const PACKING: Packing = Packing { words_of_inputs: false, order: [0, 2, 4, 6, 1, 3, 5, 7], zero_offset: 0 };

/// # Errors
/// `Unsupported`, naming the key of `quantization_config`.
pub(super) fn scheme(stored: &StoredQuantization) -> Result<Columns> {
    stored.expect("bits", &stored.bits.unwrap_or(4).to_string(), &["4"])?;
    stored.expect("zero_point", &stored.zero_point.unwrap_or(true).to_string(), &["true"])?;
    stored.expect("version", &stored.version.as_deref().unwrap_or("gemm").to_lowercase(), &["gemm"])?;
    Ok(Columns { name: NAME, group: Columns::group(stored)?, packing: PACKING })
}
