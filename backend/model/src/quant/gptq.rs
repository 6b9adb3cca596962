//! GPTQ checkpoints: 4-bit weights with zero points, in the order of their inputs.
//!
//! Source: Frantar et al. 2022, arXiv:2210.17323. See [`columns`](super::columns) for the tensors. Of zero points the first version of the
//! format stores one less, modulo 16. With `desc_act` the inputs of a group are not neighbours, which the kernels' groups are.

use super::columns::{Columns, Packing};
use crate::config::StoredQuantization;
use crate::error::Result;

pub(super) const NAME: &str = "gptq";

/// # Errors
/// `Unsupported`, naming the key of `quantization_config`.
pub(super) fn scheme(stored: &StoredQuantization) -> Result<Columns> {
    stored.expect("bits", &stored.bits.unwrap_or(4).to_string(), &["4"])?;
    stored.expect("desc_act", &stored.desc_act.unwrap_or(false).to_string(), &["false"])?;
    let format = stored.checkpoint_format.as_deref().unwrap_or("gptq");
    stored.expect("checkpoint_format", format, &["gptq", "gptq_v2"])?;
    let zero_offset = if format == "gptq" { 1 } else { 0 };
    let packing = Packing { words_of_inputs: true, order: [0, 1, 2, 3, 4, 5, 6, 7], zero_offset };
    Ok(Columns { name: NAME, group: Columns::group(stored)?, packing })
}
