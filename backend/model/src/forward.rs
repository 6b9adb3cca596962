//! What every layer is handed during a step.
//!
//! This file imports no layer: layers import it.

use drafthorse_kernels::ops::copy_columns::copy_columns;
use drafthorse_kernels::ops::gather_rows::gather_rows;
use drafthorse_kernels::{Communicator, DType, Shape, Tensor, Workspace};

use crate::batch::Batch;
use crate::error::Result;
use crate::kv_cache::KvCache;

/// Inputs of layers that are kept side by side for a drafter (EAGLE-3 reads three of them).
pub struct Tap<'a> {
    /// Decoder layers from 0; their number: what leaves the last one.
    pub layers: &'a [usize],
    /// `[at least tokens, layers * hidden]`: the residual stream as it enters each layer goes to its first rows, in this order.
    pub output: &'a mut Tensor,
}

/// One step's surroundings.
pub struct Forward<'a> {
    pub batch: &'a Batch,
    pub kv: &'a mut KvCache,
    pub workspace: &'a Workspace,
    pub comm: &'a dyn Communicator,
    /// For drafters: the target's hidden states of the same tokens, `[tokens, hidden]`.
    pub target_hidden: Option<&'a Tensor>,
    pub taps: &'a mut [Tap<'a>],
}

impl Forward<'_> {
    /// Scratch memory, given back when the tensor drops. Its elements are not set.
    ///
    /// # Errors
    /// If the memory plan was too small.
    pub fn take(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        Ok(self.workspace.take(shape, dtype)?)
    }

    /// The rows of `hidden` whose logits the batch wants, `[logit rows, hidden]`.
    ///
    /// # Errors
    /// If the memory plan was too small, or a row is outside `hidden`.
    pub fn wanted_rows(&self, hidden: &Tensor) -> Result<Tensor> {
        let (_, width) = hidden.rows_cols();
        let mut wanted = self.take([self.batch.num_logit_rows(), width], hidden.dtype())?;
        gather_rows(hidden, &self.batch.logit_rows(), &mut wanted)?;
        Ok(wanted)
    }

    /// Keeps `residual` for whoever taps `layer`.
    pub(crate) fn tap(&mut self, layer: usize, residual: &Tensor) -> Result<()> {
        let (rows, width) = residual.rows_cols();
        for tap in self.taps.iter_mut() {
            for (index, _) in tap.layers.iter().enumerate().filter(|(_, tapped)| **tapped == layer) {
                copy_columns(residual, &mut tap.output.rows_mut(0..rows), index * width)?;
            }
        }
        Ok(())
    }
}
