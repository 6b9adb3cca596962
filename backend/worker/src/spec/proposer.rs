//! The seam for draft methods.

use std::ops::Range;
use std::time::Duration;

use drafthorse_control::Slot;
use drafthorse_kernels::Tensor;
use drafthorse_model::Forward;

use crate::error::Result;
use crate::graphs::Graphs;
use crate::inputs::PlannedRow;
use crate::slots::Slots;
use crate::spec::Forced;

/// One sequence of the step that has just been verified; those that failed are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProposeRow {
    pub slot: Slot,
    /// Its rows of [`Propose::hidden`] that hold: those of rejected drafts are left out.
    pub hidden: Range<usize>,
    /// False while the prompt is unfinished, and when the sequence has ended: fill the drafter's KV cache, propose nothing.
    pub wants_drafts: bool,
    /// Its blocks may be found by other sequences, but it does not go on.
    pub ended: bool,
    /// Drafts that were verified in this step, and those of them that held.
    pub num_drafts: usize,
    pub num_held: usize,
    /// Most drafts that can be of use: more would lie past the sequence's end, or its request wants no more.
    pub room: usize,
}

/// What a proposer works with.
pub struct Propose<'a> {
    pub rows: &'a [ProposeRow],
    /// Histories to read, drafts to write. A slot named in `rows` holds no drafts at first.
    pub slots: &'a mut Slots,
    /// What a drafter reads of the target, a row for each token: its last hidden states, or those that were tapped side by side.
    pub hidden: &'a Tensor,
    /// What was picked on the device of the step's logits, if all of it is still there.
    pub picked: Option<&'a Tensor>,
    /// Time and tokens of the step, if it ran no prompts.
    pub decode: Option<(Duration, usize)>,
    /// What a drafter's model is handed; its batch is still the target's.
    pub forward: Forward<'a>,
    pub(crate) graphs: &'a mut Graphs,
}

/// A step that the device still runs.
pub struct Unseen<'a> {
    pub(crate) rows: &'a [PlannedRow],
    pub slots: &'a Slots,
    /// As in [`Propose`], and what is picked of the step's logits, `[tokens]`.
    pub hidden: &'a Tensor,
    pub picked: &'a Tensor,
    pub(crate) forced: Option<Forced>,
    pub max_model_len: usize,
    pub forward: Forward<'a>,
    pub(crate) graphs: &'a mut Graphs,
}

/// A step that the proposer takes no part in.
pub struct PassedOver<'a> {
    pub(crate) rows: &'a [PlannedRow],
    pub slots: &'a Slots,
}

/// Guesses the tokens that follow each row's history.
///
/// Runs on every rank alike: equal rows must give equal drafts, since no rank sends its drafts to another.
pub trait Proposer: Send {
    /// The most drafts it ever proposes for one row. The scheduler reserves KV blocks for that many.
    fn max_drafts(&self) -> usize;

    /// True if it reads the accepted tokens on the host: then no step may run ahead of its result, but where it [has no use](Self::has_use)
    /// for any row of it.
    fn needs_host_tokens(&self) -> bool;

    /// False if it will make no drafts for the sequence in `slot`, as things stand, and needs nothing of its next row, with which it
    /// `begins` or goes on. A step of such rows alone may be [passed over](Self::pass_over).
    fn has_use(&self, _slot: Slot, _begins: bool) -> bool {
        true
    }

    /// The step is about to be given to the device, its sequences still stand before it; [`propose`](Self::propose) will not follow.
    fn pass_over(&mut self, _step: &PassedOver<'_>) {}

    /// A step that was passed over is done. Its time and tokens as in [`Propose::decode`].
    fn passed(&mut self, _step: &PassedOver<'_>, _decode: Option<(Duration, usize)>) {}

    /// May put the making of drafts on the device's stream behind a step that verifies drafts, of which as many hold as will; then
    /// [`propose`](Self::propose) follows for the same step.
    ///
    /// # Errors
    /// As [`propose`](Self::propose).
    fn propose_unseen(&mut self, _step: &mut Unseen<'_>) -> Result<()> {
        Ok(())
    }

    /// Writes drafts to the slots of `step.rows` through [`Slots::draft`], at most
    /// [`max_drafts`](Self::max_drafts) and at most `room` each. None is a valid guess.
    ///
    /// # Errors
    /// If the drafter's model fails: that ends the group.
    fn propose(&mut self, step: &mut Propose<'_>) -> Result<()>;

    /// Drafts that stay on the device, if there are such: until they are [collected](Self::collect) a slot has in the place of each
    /// [`sampled_by`](drafthorse_kernels::ops::feed_tokens::sampled_by) its row there.
    fn on_device(&self) -> Option<&Tensor> {
        None
    }

    /// Whether the device still makes drafts, which the next step will be given without waiting for them.
    ///
    /// # Errors
    /// `Kernel` if the device has failed.
    fn is_waited_for(&self) -> Result<bool> {
        Ok(false)
    }

    /// Puts the drafts in place that were still on their way from the device when [`propose`](Self::propose) returned. Until then a slot
    /// has as many as there will be.
    ///
    /// # Errors
    /// As [`propose`](Self::propose).
    fn collect(&mut self, _slots: &mut Slots) -> Result<()> {
        Ok(())
    }

    /// Forgets what it has measured: until now kernels and libraries were loaded.
    fn warmed_up(&mut self) {}
}
