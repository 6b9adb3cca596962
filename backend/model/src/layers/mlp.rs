//! The gated MLP: `down(silu(gate(x)) * up(x))`.
//!
//! Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).

use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::silu_mul::silu_mul;

use super::linear::Linear;
use crate::error::Result;
use crate::forward::Forward;
use crate::models::tensor_bytes;
use crate::quant::Part;
use crate::weights::{Loader, Shard};

/// Gate and up are one weight, so that the input is read once.
pub(crate) struct GatedMlp {
    gate_up: Linear,
    down: Linear,
    /// Width between the two, on this rank.
    intermediate: usize,
}

impl GatedMlp {
    pub(crate) fn load(at: &Loader<'_>) -> Result<Self> {
        let config = at.config();
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let part = |name| Part { at: at.at(name), out_features: intermediate, shard: Shard::Out };
        Ok(GatedMlp {
            gate_up: Linear::column(&[part("gate_proj"), part("up_proj")], hidden, config.mlp_bias)?,
            down: Linear::row(at.at("down_proj"), hidden, intermediate, config.mlp_bias)?,
            intermediate: intermediate / at.place().world,
        })
    }

    /// `x` becomes the MLP of `x`.
    pub(crate) fn forward(&self, x: &mut Tensor, cx: &Forward<'_>) -> Result<()> {
        let (tokens, _) = x.rows_cols();
        let mut gate_up = self.gate_up.output(tokens, x.dtype(), cx)?;
        let mut gated = cx.take([tokens, self.intermediate], x.dtype())?;
        if !self.gate_up.gated(x, &mut gated)? {
            self.gate_up.forward(x, &mut gate_up, cx)?;
            silu_mul(&gate_up, &mut gated)?;
        }
        self.down.forward(&gated, x, cx)
    }

    /// Scratch memory that [`forward`](Self::forward) takes.
    pub(crate) fn workspace_bytes(&self, tokens: usize, element_bytes: usize) -> usize {
        let gate_up = tensor_bytes(tokens * 2 * self.intermediate, element_bytes);
        let gated = tensor_bytes(tokens * self.intermediate, element_bytes);
        gate_up + gated + self.gate_up.workspace_bytes(tokens).max(self.down.workspace_bytes(tokens))
    }
}
