//! Linear layers over ranks: replicated, column-parallel, row-parallel, and several that are multiplied as one.
//!
//! After a column-parallel layer each rank holds a part of the output; a row-parallel one takes such a part in and sums over
//! ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

use drafthorse_kernels::ops::add_bias::add_bias;
use drafthorse_kernels::{DType, Tensor};

use crate::error::Result;
use crate::forward::Forward;
use crate::quant::{Activation, Part, QuantScheme, QuantWeight, SpreadNorm};
use crate::weights::{Loader, Shard};

/// `y = x @ weightᵀ + bias`.
pub(crate) struct Linear {
    weight: Box<dyn QuantWeight>,
    /// f32, this rank's part of the outputs.
    bias: Option<Tensor>,
    /// The outputs are to be summed over ranks.
    sums_over_ranks: bool,
}

impl Linear {
    /// Each rank makes a part of the outputs.
    pub(crate) fn column(parts: &[Part<'_>], in_features: usize, has_bias: bool) -> Result<Self> {
        let bias = if has_bias { Some(merged_bias(parts)?) } else { None };
        let scheme = &parts[0].at.context().schemes.linear;
        Ok(Linear { weight: load_weight(&**scheme, parts, in_features)?, bias, sums_over_ranks: false })
    }

    /// Each rank takes in a part of the inputs; the outputs are alike on all.
    pub(crate) fn row(at: Loader<'_>, out_features: usize, in_features: usize, has_bias: bool) -> Result<Self> {
        let bias = match has_bias {
            true => Some(at.vector("bias", out_features, Shard::Replicated)?),
            false => None,
        };
        let sums_over_ranks = at.place().world > 1;
        let scheme = &at.context().schemes.linear;
        let parts = [Part { at, out_features, shard: Shard::In }];
        Ok(Linear { weight: load_weight(&**scheme, &parts, in_features)?, bias, sums_over_ranks })
    }

    /// As [`row`](Self::row), of which the caller sums the outputs over ranks.
    pub(crate) fn row_partial(at: Loader<'_>, out_features: usize, in_features: usize) -> Result<Self> {
        let row = Linear::row(at, out_features, in_features, false)?;
        Ok(Linear { sums_over_ranks: false, ..row })
    }

    #[cfg(test)]
    pub(super) fn map_weight(self, map: &dyn Fn(Box<dyn QuantWeight>) -> Box<dyn QuantWeight>) -> Self {
        Linear { weight: map(self.weight), ..self }
    }

    #[cfg(test)]
    pub(super) fn size_bytes(&self) -> usize {
        self.weight.size_bytes()
    }

    /// `x` is `[tokens, this rank's inputs]`, `y` is `[tokens, this rank's outputs]`.
    pub(crate) fn forward(&self, x: &Tensor, y: &mut Tensor, cx: &Forward<'_>) -> Result<()> {
        self.weight.matmul(&Activation::from(x), y, cx.workspace)?;
        if self.sums_over_ranks {
            cx.comm.all_reduce(y)?;
        }
        // After the sum, or the bias would count once for each rank.
        if let Some(bias) = &self.bias {
            add_bias(y, bias)?;
        }
        Ok(())
    }

    /// Kernels that share a normalisation, where there are some for so many rows and nothing else comes after the product.
    pub(crate) fn spread_norm(&self, tokens: usize) -> Option<&dyn SpreadNorm> {
        if self.bias.is_some() || self.sums_over_ranks { None } else { self.weight.spread_norm(tokens) }
    }

    /// `silu(first half) * second half` of the outputs, of a column-parallel layer. `false`, and nothing done, where it takes two passes.
    pub(crate) fn gated(&self, x: &Tensor, y: &mut Tensor) -> Result<bool> {
        if self.bias.is_some() { Ok(false) } else { self.weight.gated(&Activation::from(x), y) }
    }

    /// A tensor for this layer's output.
    pub(crate) fn output(&self, tokens: usize, dtype: DType, cx: &Forward<'_>) -> Result<Tensor> {
        cx.take([tokens, self.weight.dims()[0]], dtype)
    }

    /// Of this rank.
    pub(crate) fn out_features(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Scratch memory that [`forward`](Self::forward) takes.
    pub(crate) fn workspace_bytes(&self, tokens: usize) -> usize {
        self.weight.workspace_bytes(tokens)
    }
}

/// One weight out of `parts`, counted.
pub(crate) fn load_weight(
    scheme: &dyn QuantScheme,
    parts: &[Part<'_>],
    in_features: usize,
) -> Result<Box<dyn QuantWeight>> {
    let weight = scheme.load_merged(parts, in_features)?;
    parts[0].at.context().count_weight(weight.size_bytes());
    Ok(weight)
}

/// The parts' biases, one after the other.
fn merged_bias(parts: &[Part<'_>]) -> Result<Tensor> {
    let mut values = Vec::new();
    for part in parts {
        let bias = part.at.vector("bias", part.out_features, part.shard)?;
        values.extend(bias.to_vec::<f32>()?);
    }
    Ok(Tensor::from_slice(parts[0].at.device(), "bias", &values, [values.len()])?)
}
