//! The gated MLP: `down(silu(gate(x)) * up(x))`.
//!
//! Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).

use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::silu_mul::silu_mul;

use super::linear::Linear;
use super::norm::{RmsNorm, Spread};
use crate::error::Result;
use crate::forward::Forward;
use crate::models::tensor_bytes;
use crate::quant::{Part, SpreadNorm};
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

    /// [`forward`](Self::forward) of what has yet to be normalised; its result goes to the residual stream, and `x` becomes the input of
    /// what comes after the norm `next`. Without one, `x` becomes the result.
    pub(crate) fn forward_spread(
        &self,
        x: &mut Tensor,
        spread: &mut Spread<'_>,
        next: Option<&RmsNorm>,
        [gate_up_kernels, down_kernels]: [&dyn SpreadNorm; 2],
        cx: &Forward<'_>,
    ) -> Result<()> {
        let Some(squares) = spread.pending() else { return self.forward(x, cx) };
        let mut gated = cx.take([x.rows_cols().0, self.intermediate], x.dtype())?;
        gate_up_kernels.gated(x, squares, &mut gated)?;
        match next {
            Some(next) => spread.add(&gated, down_kernels, next, x),
            None => self.down.forward(&gated, x, cx),
        }
    }

    /// What [`forward_spread`](Self::forward_spread) needs, where there is such for so many rows.
    pub(crate) fn spread_norm(&self, tokens: usize) -> Option<[&dyn SpreadNorm; 2]> {
        Some([self.gate_up.spread_norm(tokens)?, self.down.spread_norm(tokens)?])
    }

    /// Scratch memory that [`forward`](Self::forward) takes.
    pub(crate) fn workspace_bytes(&self, tokens: usize, element_bytes: usize) -> usize {
        let gate_up = tensor_bytes(tokens * 2 * self.intermediate, element_bytes);
        let gated = tensor_bytes(tokens * self.intermediate, element_bytes);
        gate_up + gated + self.gate_up.workspace_bytes(tokens).max(self.down.workspace_bytes(tokens))
    }
}
