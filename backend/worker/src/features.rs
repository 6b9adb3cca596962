//! What a drafter reads of each token that the target has run.

use drafthorse_kernels::{DType, Device, Tensor};
use drafthorse_model::Tap;

use crate::error::Result;

/// Hidden states of several layers side by side, for a drafter that reads them instead of the last one. They stay where they are, so that a
/// recorded step finds them.
pub(crate) struct Features {
    layers: Vec<usize>,
    /// `[tokens of the largest step, layers * hidden]`.
    tensor: Tensor,
}

impl Features {
    /// `None` if no layers are tapped.
    pub fn new(
        device: &Device,
        layers: Vec<usize>,
        max_tokens: usize,
        hidden: usize,
        dtype: DType,
    ) -> Result<Option<Self>> {
        if layers.is_empty() {
            return Ok(None);
        }
        let tensor = Tensor::zeros(device, "tapped hidden states", [max_tokens, layers.len() * hidden], dtype)?;
        Ok(Some(Features { layers, tensor }))
    }

    /// Bytes that [`new`](Self::new) takes.
    pub fn bytes(num_layers: usize, max_tokens: usize, hidden: usize, dtype: DType) -> usize {
        max_tokens * num_layers * hidden * dtype.bytes()
    }

    /// Has the target's next pass write them.
    pub fn tap(&mut self) -> Tap<'_> {
        Tap { layers: &self.layers, output: &mut self.tensor }
    }

    /// Those of the last pass, in its first rows.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}
