//! Root-mean-square normalisation with a weight.

use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::rms_norm::{add_rms_norm, rms_norm};

use crate::error::Result;
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

    /// `y = norm(x)`.
    pub(crate) fn forward(&self, x: &Tensor, y: &mut Tensor) -> Result<()> {
        Ok(rms_norm(x, &self.weight, self.eps, y)?)
    }

    /// `residual += x`, then `x = norm(residual)`.
    pub(crate) fn add(&self, x: &mut Tensor, residual: &mut Tensor) -> Result<()> {
        Ok(add_rms_norm(x, residual, &self.weight, self.eps)?)
    }
}
