//! Root-mean-square normalisation with a weight.

use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::matmul_bf16::Squares;
use drafthorse_kernels::ops::rms_norm::{add_rms_norm, rms_norm, rms_norm_pair};

use crate::error::Result;
use crate::quant::SpreadNorm;
use crate::weights::{Loader, Shard};

/// `x / sqrt(mean(x²) + eps) * weight`, alike on every rank.
pub(crate) struct RmsNorm {
    /// `[hidden]` f32.
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    pub(crate) fn load(at: &Loader<'_>) -> Result<Self> {
        let weight = at.vector("weight", at.config().hidden_size, Shard::Replicated)?;
        Ok(RmsNorm { weight, eps: at.config().rms_norm_eps })
    }

    /// One of another width than hidden states have.
    pub(crate) fn of_width(at: &Loader<'_>, width: usize, eps: f32) -> Result<Self> {
        Ok(RmsNorm { weight: at.vector("weight", width, Shard::Replicated)?, eps })
    }

    /// `y = norm(x)`.
    pub(crate) fn forward(&self, x: &Tensor, y: &mut Tensor) -> Result<()> {
        Ok(rms_norm(x, &self.weight, self.eps, y)?)
    }

    /// `y = [norm(x) ; other's norm(z)]`, both with this norm's epsilon.
    pub(crate) fn pair(&self, x: &Tensor, other: &RmsNorm, z: &Tensor, y: &mut Tensor) -> Result<()> {
        Ok(rms_norm_pair(x, z, [&self.weight, &other.weight], self.eps, y)?)
    }

    /// `residual += x`, then `x = norm(residual)`.
    pub(crate) fn add(&self, x: &mut Tensor, residual: &mut Tensor) -> Result<()> {
        Ok(add_rms_norm(x, residual, &self.weight, self.eps)?)
    }
}

/// The residual stream while its normalisations are spread over the products around them (`SpreadNorm`): layers then take and leave an
/// `x` that has yet to be divided.
pub(crate) struct Spread<'a> {
    pub(crate) residual: &'a mut Tensor,
    /// `[tokens, hidden / 16]` f32.
    pub(crate) squares: Tensor,
    /// Of the norm that `x` has yet to be divided by; none if it was normalised whole.
    pub(crate) eps: Option<f32>,
}

impl Spread<'_> {
    /// What `x` has yet to be divided by.
    pub(crate) fn pending(&self) -> Option<Squares<'_>> {
        self.eps.map(|eps| Squares { parts: &self.squares, eps })
    }

    /// `residual += x @ weightᵀ`; `y` becomes the next layer's input.
    pub(crate) fn add(&mut self, x: &Tensor, weight: &dyn SpreadNorm, next: &RmsNorm, y: &mut Tensor) -> Result<()> {
        weight.add_norm(x, self.residual, &next.weight, y, &mut self.squares)?;
        self.eps = Some(next.eps);
        Ok(())
    }
}
