//! The kernels' weights as [`QuantWeight`]s: all have the same functions.

use drafthorse_kernels::ops::matmul::workspace_bytes;
use drafthorse_kernels::ops::matmul_bf16::{self, Bf16Weight, Squares};
use drafthorse_kernels::ops::matmul_f32::{self, F32Weight};
use drafthorse_kernels::ops::matmul_fp8::{self, Fp8Weight};
use drafthorse_kernels::ops::matmul_int4::{self, Int4Weight};
use drafthorse_kernels::ops::matmul_int8::{self, Int8Weight};
use drafthorse_kernels::ops::moe::{Groups, Rows, matmul_workspace_bytes};
use drafthorse_kernels::{DType, Device, Tensor, Workspace};

use super::scheme::{Activation, ActivationFormat, QuantWeight, SpreadNorm};
use crate::error::Result;

macro_rules! quant_weight {
    ($weight:ty, $op:ident $(, $gated:path, $gated_experts:path, $spreads:path)?) => {
        impl QuantWeight for $weight {
            fn activation(&self) -> ActivationFormat {
                ActivationFormat::Float
            }

            fn matmul(&self, x: &Activation<'_>, y: &mut Tensor, workspace: &Workspace) -> Result<()> {
                Ok($op::matmul(x.values, self, y, workspace)?)
            }

            $(fn gated(&self, x: &Activation<'_>, y: &mut Tensor) -> Result<bool> {
                Ok($gated(x.values, self, y)?)
            }

            fn gated_experts(
                &self,
                x: &Activation<'_>,
                rows: Rows,
                groups: &Groups,
                y: &mut Tensor,
            ) -> Result<bool> {
                Ok($gated_experts(x.values, rows, self, groups, y)?)
            }

            fn spread_norm(&self, tokens: usize) -> Option<&dyn SpreadNorm> {
                $spreads(self, tokens).then_some(self)
            })?

            fn matmul_experts(
                &self,
                x: &Activation<'_>,
                rows: Rows,
                groups: &Groups,
                y: &mut Tensor,
                workspace: &Workspace,
            ) -> Result<()> {
                Ok($op::matmul_experts(x.values, rows, self, groups, y, workspace)?)
            }

            fn gather(&self, ids: &Tensor, y: &mut Tensor) -> Result<()> {
                Ok($op::gather(self, ids, y)?)
            }

            fn dequantize(&self) -> Result<Tensor> {
                dense(self.dims(), |row, to| self.read_row(row, to))
            }

            fn dims(&self) -> [usize; 2] {
                self.dims()
            }

            fn size_bytes(&self) -> usize {
                self.size_bytes()
            }

            fn workspace_bytes(&self, tokens: usize) -> usize {
                let [_, inputs] = self.dims();
                workspace_bytes(tokens, inputs)
            }

            fn experts_workspace_bytes(&self, pairs: usize, num_experts: usize) -> usize {
                let [_, inputs] = self.dims();
                matmul_workspace_bytes(self.device(), pairs, inputs, num_experts)
            }
        }
    };
}

quant_weight!(Bf16Weight, matmul_bf16, matmul_bf16::gated, matmul_bf16::gated_experts, matmul_bf16::spreads_norm);
quant_weight!(F32Weight, matmul_f32);
quant_weight!(Fp8Weight, matmul_fp8);
quant_weight!(Int8Weight, matmul_int8);
quant_weight!(Int4Weight, matmul_int4);

impl SpreadNorm for Bf16Weight {
    fn add_norm(
        &self,
        x: &Tensor,
        residual: &mut Tensor,
        norm: &Tensor,
        y: &mut Tensor,
        squares: &mut Tensor,
    ) -> Result<()> {
        Ok(matmul_bf16::add_norm(x, self, residual, norm, y, squares)?)
    }

    fn matmul(&self, x: &Tensor, squares: Squares<'_>, y: &mut Tensor) -> Result<()> {
        Ok(matmul_bf16::matmul_normed(x, squares, self, y)?)
    }

    fn gated(&self, x: &Tensor, squares: Squares<'_>, y: &mut Tensor) -> Result<()> {
        Ok(matmul_bf16::gated_normed(x, squares, self, y)?)
    }
}

/// All rows on the host.
fn dense([out, inputs]: [usize; 2], read_row: impl Fn(usize, &mut [f32])) -> Result<Tensor> {
    let mut dense = Tensor::zeros(&Device::Cpu, "dequantized weight", [out, inputs], DType::F32)?;
    for (i, row) in dense.as_mut_slice::<f32>().chunks_mut(inputs).enumerate() {
        read_row(i, row);
    }
    Ok(dense)
}
