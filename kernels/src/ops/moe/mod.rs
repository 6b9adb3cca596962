//! Mixtures of experts: each token goes through a few of many MLPs.
//!
//! Source: Shazeer et al. 2017, arXiv:1701.06538. A layer is these steps, all of whose sizes follow from the number of tokens:
//!
//! | step                  | does |
//! |-----------------------|------|
//! | [`route`]             | router logits to each token's experts, and what each counts |
//! | [`permute`]           | the pairs of a token and its choice, in the order of experts; [`assign`] is both |
//! | `matmul_experts`      | in the folder of each weight format: rows times their own expert's part of one stacked weight |
//! | `silu_mul`, and again | on a GPU in one with the product before it: `gated_experts` |
//! | [`combine`]           | back to the order of tokens, weighted and summed, with what all tokens go through |
//!
//! The weights of all experts are one weight, `[experts * out, in]`, so that any format serves; those that no token chose are not
//! read. A token's result does not depend on other tokens: its sums have their own order, and every row is multiplied by itself.

mod combine;
mod cuda;
mod permute;
mod route;

pub use combine::{Shared, combine};
pub use permute::permute;
pub use route::{GroupScore, MAX_EXPERTS, Router, Scoring, TopGroups, assign, route};

pub use super::matmul::{Groups, Rows};
use crate::device::Device;

/// Bytes of workspace that a grouped product of `pairs` rows takes, whatever the format.
pub fn matmul_workspace_bytes(device: &Device, pairs: usize, inputs: usize, num_experts: usize) -> usize {
    match device {
        Device::Cpu => super::matmul::workspace_bytes(pairs, inputs) + Groups::matmul_bytes(num_experts),
        Device::Cuda(_) => 0,
    }
}
