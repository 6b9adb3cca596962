//! The seam for weight formats.

use drafthorse_kernels::ops::matmul_bf16::Squares;
use drafthorse_kernels::ops::moe::{Groups, Rows};
use drafthorse_kernels::{Tensor, Workspace};

use crate::error::Result;
use crate::weights::{Loader, Shard};

/// How a weight wants its inputs. The layer before it (norm, activation, attention) makes them so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ActivationFormat {
    /// The model's own activations, f32 or bf16, without scales.
    Float,
}

/// The inputs of a linear layer, in the format its weight asked for.
#[derive(Clone, Copy, Debug)]
pub struct Activation<'a> {
    /// `[tokens, in]`.
    pub values: &'a Tensor,
    /// What `values` are to be multiplied with, where the format has scales.
    pub scales: Option<&'a Tensor>,
}

impl<'a> From<&'a Tensor> for Activation<'a> {
    fn from(values: &'a Tensor) -> Self {
        Activation { values, scales: None }
    }
}

/// One of the checkpoint's layers that are multiplied as one: its place, and the part this rank holds.
pub struct Part<'a> {
    /// Where its tensors are, like `model.layers.0.self_attn.q_proj`.
    pub at: Loader<'a>,
    /// Rows of the whole weight.
    pub out_features: usize,
    pub shard: Shard,
}

/// How the tensors of one linear layer are stored, and multiplied.
///
/// A scheme reads row by row, so that no second copy of a weight exists while it loads.
pub trait QuantScheme: Send + Sync {
    /// Its name in settings and `config.json`.
    fn name(&self) -> &'static str;

    /// Reads this rank's rows of every part, one part below the other, as one weight `[sum of out, in]`.
    ///
    /// # Errors
    /// If a shard would cut through weights that share one scale, or the device is out of memory. A tensor that is missing or
    /// has another shape is noted with the checkpoint, which reports all of them at once; the weight is then zeros.
    fn load_merged(&self, parts: &[Part<'_>], in_features: usize) -> Result<Box<dyn QuantWeight>>;

    /// Reads this rank's rows of one layer, as one weight `[out, in]`.
    ///
    /// # Errors
    /// As [`load_merged`](Self::load_merged).
    fn load(&self, part: Part<'_>, in_features: usize) -> Result<Box<dyn QuantWeight>> {
        self.load_merged(&[part], in_features)
    }
}

/// Products that share a normalisation, so that nothing stands between them: one adds to the residual and gathers squares, the next
/// divides by their mean. What is between is `[tokens, width]` residual times the norm's weight.
pub trait SpreadNorm {
    /// `residual += x @ weightᵀ`, `y = residual * norm`, and the squares of `residual` in parts, `[tokens, out / 16]` f32.
    fn add_norm(
        &self,
        x: &Tensor,
        residual: &mut Tensor,
        norm: &Tensor,
        y: &mut Tensor,
        squares: &mut Tensor,
    ) -> Result<()>;

    /// As [`QuantWeight::matmul`], of rows that have yet to be divided.
    fn matmul(&self, x: &Tensor, squares: Squares<'_>, y: &mut Tensor) -> Result<()>;

    /// As [`QuantWeight::gated`], of rows that have yet to be divided.
    fn gated(&self, x: &Tensor, squares: Squares<'_>, y: &mut Tensor) -> Result<()>;
}

/// One linear layer's weight on the device, `[out, in]`, laid out as its kernel wants it.
pub trait QuantWeight: Send + Sync {
    /// The format [`matmul`](Self::matmul) takes its inputs in.
    fn activation(&self) -> ActivationFormat;

    /// `y = x @ weightᵀ`; `x` is `[tokens, in]`, `y` is `[tokens, out]`, f32 or bf16.
    fn matmul(&self, x: &Activation<'_>, y: &mut Tensor, workspace: &Workspace) -> Result<()>;

    /// `y[i] = x[row of pair i] @ (its expert's part of the weight)ᵀ`, the weight being those of all experts, one below the other. `x` is
    /// `[tokens or pairs, in]`, as `rows` says, `y` is `[pairs, out / experts]`; see [`drafthorse_kernels::ops::moe`].
    fn matmul_experts(
        &self,
        x: &Activation<'_>,
        rows: Rows,
        groups: &Groups,
        y: &mut Tensor,
        workspace: &Workspace,
    ) -> Result<()>;

    /// [`matmul_experts`](Self::matmul_experts) and the gate in one pass, each expert's part of the weight being gate above up; `false`, and
    /// nothing done, where there is no kernel for it.
    fn gated_experts(&self, _x: &Activation<'_>, _rows: Rows, _groups: &Groups, _y: &mut Tensor) -> Result<bool> {
        Ok(false)
    }

    /// `y = silu(x @ gateᵀ) * (x @ upᵀ)` in one pass, `weight` being gate above up; `false`, and nothing done, where there is no
    /// kernel for it.
    fn gated(&self, _x: &Activation<'_>, _y: &mut Tensor) -> Result<bool> {
        Ok(false)
    }

    /// Kernels that share a normalisation, where there are some for so many rows.
    fn spread_norm(&self, _tokens: usize) -> Option<&dyn SpreadNorm> {
        None
    }

    /// `y[t] = weight[ids[t]]`: an embedding lookup, so that a tied head needs no second copy.
    fn gather(&self, ids: &Tensor, y: &mut Tensor) -> Result<()>;

    /// The weight as its kernel sees it, `[out, in]` f32: what references multiply and tests compare.
    fn dequantize(&self) -> Result<Tensor>;

    /// `[out, in]` of what this rank holds.
    fn dims(&self) -> [usize; 2];

    /// Device memory it takes.
    fn size_bytes(&self) -> usize;

    /// Scratch memory that [`matmul`](Self::matmul) takes for `tokens` rows.
    fn workspace_bytes(&self, tokens: usize) -> usize;

    /// Scratch memory that [`matmul_experts`](Self::matmul_experts) takes for so many pairs.
    fn experts_workspace_bytes(&self, pairs: usize, num_experts: usize) -> usize;
}
