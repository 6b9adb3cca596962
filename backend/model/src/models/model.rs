//! The seam for architectures.

use std::sync::Arc;

use drafthorse_kernels::Tensor;

use crate::error::Result;
use crate::forward::Forward;
use crate::kv_cache::KvLayer;
use crate::quant::QuantWeight;

/// The largest step that a memory plan must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    pub tokens: usize,
    pub seqs: usize,
    pub logit_rows: usize,
    /// Tokens of the longest sequence.
    pub max_kv_len: usize,
}

/// One rank's shard of a network. A drafter (MTP, EAGLE) is a model too; it also reads [`Forward::target_hidden`].
///
/// A row's result must not depend on which other rows are in the batch, nor on how its prompt was cut into chunks.
pub trait Model: Send {
    /// Runs the batch and writes its K and V. `[tokens, hidden]` after the final norm, the same bits on every rank.
    fn forward(&self, cx: &mut Forward<'_>) -> Result<Tensor>;

    /// The logits of some rows of `hidden`: f32 `[rows, vocab / world]`, this rank's part of the vocabulary.
    fn logits(&self, hidden: &Tensor, cx: &mut Forward<'_>) -> Result<Tensor>;

    /// What each of its layers keeps in the KV cache.
    fn kv_layers(&self) -> Vec<KvLayer>;

    /// Most bytes of workspace that [`forward`](Self::forward) and then [`logits`](Self::logits) take at once.
    fn workspace_bytes(&self, step: StepSize) -> usize;

    /// What a drafter may share; `None` if there is nothing of the kind.
    fn ends(&self) -> Option<Ends> {
        None
    }
}

/// The weights that tokens enter a network through and leave it by. Tied, they are one.
#[derive(Clone)]
pub struct Ends {
    /// `[vocab, hidden]`.
    pub table: Arc<dyn QuantWeight>,
    /// `[vocab, hidden]`.
    pub head: Arc<dyn QuantWeight>,
}

/// What a tensor takes of a workspace, which starts each on a cache line.
pub(crate) fn tensor_bytes(num_elements: usize, element_bytes: usize) -> usize {
    (num_elements * element_bytes).next_multiple_of(64)
}
