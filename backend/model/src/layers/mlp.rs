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
#[cfg(test)]
use crate::quant::QuantWeight;
use crate::quant::{Part, SpreadNorm};
use crate::weights::{Loader, Shard};

/// What looks at each token alone: the second half of a layer.
pub(crate) trait FeedForward: Send {
    /// `x` becomes what the layer makes of `x`.
    fn forward(&self, x: &mut Tensor, cx: &Forward<'_>) -> Result<()>;

    /// Itself with norms spread over its products, where there are kernels for it and so many rows.
    fn spread_norm(&self, _tokens: usize) -> Option<SpreadMlp<'_>> {
        None
    }

    /// Scratch memory that [`forward`](Self::forward) takes.
    fn workspace_bytes(&self, tokens: usize, element_bytes: usize) -> usize;
}

/// Gate and up are one weight, so that the input is read once.
pub(crate) struct GatedMlp {
    gate_up: Linear,
    down: Linear,
    /// Width between the two, on this rank.
    intermediate: usize,
}

impl GatedMlp {
    /// `intermediate` is the width between gate, up and down over all ranks.
    pub(crate) fn load(at: &Loader<'_>, intermediate: usize) -> Result<Self> {
        let (hidden, has_bias) = (at.config().hidden_size, at.config().mlp_bias);
        let down = Linear::row(at.at("down_proj"), hidden, intermediate, has_bias)?;
        GatedMlp::with_down(at, intermediate, down, has_bias)
    }

    /// One without biases, whose outputs are left for the caller to sum over ranks.
    pub(crate) fn load_partial(at: &Loader<'_>, intermediate: usize) -> Result<Self> {
        let down = Linear::row_partial(at.at("down_proj"), at.config().hidden_size, intermediate)?;
        GatedMlp::with_down(at, intermediate, down, false)
    }

    fn with_down(at: &Loader<'_>, intermediate: usize, down: Linear, has_bias: bool) -> Result<Self> {
        let hidden = at.config().hidden_size;
        let part = |name| Part { at: at.at(name), out_features: intermediate, shard: Shard::Out };
        let gate_up = Linear::column(&[part("gate_proj"), part("up_proj")], hidden, has_bias)?;
        Ok(GatedMlp { gate_up, down, intermediate: intermediate / at.place().world })
    }

    /// The same with `map` over its weights.
    #[cfg(test)]
    pub(super) fn map_weights(self, map: &dyn Fn(Box<dyn QuantWeight>) -> Box<dyn QuantWeight>) -> Self {
        GatedMlp { gate_up: self.gate_up.map_weight(map), down: self.down.map_weight(map), ..self }
    }

    #[cfg(test)]
    pub(super) fn size_bytes(&self) -> usize {
        self.gate_up.size_bytes() + self.down.size_bytes()
    }

    /// `y` becomes the MLP of `x`.
    pub(crate) fn forward_to(&self, x: &Tensor, y: &mut Tensor, cx: &Forward<'_>) -> Result<()> {
        self.down.forward(&self.gate(x, cx)?, y, cx)
    }

    /// `silu(gate(x)) * up(x)`.
    fn gate(&self, x: &Tensor, cx: &Forward<'_>) -> Result<Tensor> {
        let (tokens, _) = x.rows_cols();
        // First: it outlives the call.
        let mut gated = cx.take([tokens, self.intermediate], x.dtype())?;
        if !self.gate_up.gated(x, &mut gated)? {
            let mut gate_up = self.gate_up.output(tokens, x.dtype(), cx)?;
            self.gate_up.forward(x, &mut gate_up, cx)?;
            silu_mul(&gate_up, &mut gated)?;
        }
        Ok(gated)
    }
}

impl FeedForward for GatedMlp {
    fn forward(&self, x: &mut Tensor, cx: &Forward<'_>) -> Result<()> {
        self.down.forward(&self.gate(x, cx)?, x, cx)
    }

    fn spread_norm(&self, tokens: usize) -> Option<SpreadMlp<'_>> {
        Some(SpreadMlp { mlp: self, gate_up: self.gate_up.spread_norm(tokens)?, down: self.down.spread_norm(tokens)? })
    }

    fn workspace_bytes(&self, tokens: usize, element_bytes: usize) -> usize {
        let gate_up = tensor_bytes(tokens * 2 * self.intermediate, element_bytes);
        let gated = tensor_bytes(tokens * self.intermediate, element_bytes);
        gated + (gate_up + self.gate_up.workspace_bytes(tokens)).max(self.down.workspace_bytes(tokens))
    }
}

/// An MLP whose norm is spread over its products.
pub(crate) struct SpreadMlp<'a> {
    mlp: &'a GatedMlp,
    gate_up: &'a dyn SpreadNorm,
    down: &'a dyn SpreadNorm,
}

impl SpreadMlp<'_> {
    /// [`FeedForward::forward`] of what has yet to be normalised; its result goes to the residual stream, and `x` becomes the input of
    /// what comes after the norm `next`. Without one, `x` becomes the result.
    pub(crate) fn forward(
        &self,
        x: &mut Tensor,
        spread: &mut Spread<'_>,
        next: Option<&RmsNorm>,
        cx: &Forward<'_>,
    ) -> Result<()> {
        let Some(squares) = spread.pending() else { return self.mlp.forward(x, cx) };
        let mut gated = cx.take([x.rows_cols().0, self.mlp.intermediate], x.dtype())?;
        self.gate_up.gated(x, squares, &mut gated)?;
        match next {
            Some(next) => spread.add(&gated, self.down, next, x),
            None => self.mlp.down.forward(&gated, x, cx),
        }
    }
}
