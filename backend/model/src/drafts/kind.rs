//! The table of kinds of drafters.

use super::names::Names;
use super::{eagle, eagle3, mtp};
use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::forward::Forward;
use crate::models::{Ends, Model};
use crate::weights::{Checkpoint, Loader};
use drafthorse_kernels::Tensor;

/// One kind of drafter.
pub(super) struct Kind {
    /// `speculate_method`.
    pub method: &'static str,
    /// What messages call it.
    pub title: &'static str,
    /// The tensor it is known by.
    pub sign: &'static str,
    /// Where a checkpoint has its parts; `None` if it holds no drafter of this kind.
    pub names: fn(&Checkpoint) -> Option<Names>,
    /// The base's layers whose inputs it reads side by side, in this order; none: it reads the base's last hidden state.
    ///
    /// # Errors
    /// `Unsupported` if its config asks for what is not implemented, or for layers that the base has not.
    pub taps: fn(&ModelConfig, Base<'_>) -> Result<Vec<usize>>,
    pub load: fn(&Loader<'_>, &Names, &Shared<'_>) -> Result<Box<dyn Model>>,
    /// Its config says how long the texts were that it was trained on, not how long they may be: drafts may be of less use beyond.
    pub outlasts_training: bool,
}

/// A kind is known by its tensors: of several that fit, the first counts.
pub(super) const KINDS: &[Kind] = &[mtp::KIND, eagle3::KIND, eagle::KIND];

/// The model that a drafter drafts for.
#[derive(Clone, Copy)]
pub struct Base<'a> {
    pub model: &'a dyn Model,
    pub config: &'a ModelConfig,
}

/// What a drafter is made from besides its checkpoint.
pub(super) struct Shared<'a> {
    /// The base's, for what the drafter has not of its own.
    pub ends: Option<&'a Ends>,
    /// Size of the draft vocabulary.
    pub num_tokens: usize,
    /// Hidden states of the base that it reads of each token.
    pub num_parts: usize,
}

/// The hidden states that a drafter is given, one row for each token of the batch.
///
/// # Errors
/// `BatchMismatch` if there are not as many.
pub(super) fn given<'a>(cx: &Forward<'a>) -> Result<&'a Tensor> {
    let (got, want) = (cx.target_hidden.map_or(0, |hidden| hidden.rows_cols().0), cx.batch.num_tokens());
    let given = cx.target_hidden.filter(|_| got == want);
    given.ok_or(ModelError::BatchMismatch { what: "number of the target's hidden states", got, want })
}
