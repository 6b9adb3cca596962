//! Drafts that the host sees once all of them are made.

use drafthorse_control::Slot;
use drafthorse_kernels::device::Readback;
use drafthorse_kernels::ops::feed_tokens::sampled_by;
use drafthorse_kernels::ops::map_tokens::map_tokens;
use drafthorse_kernels::{DType, Device, Tensor};

use super::plan::{Chain, Places};
use super::{DraftSizes, Drafter};
use crate::error::Result;
use crate::slots::Slots;

/// Drafts that stay on the device until all are made.
pub(super) struct OnDevice {
    /// Draft token to token, `[draft tokens]`, if they differ.
    pub(super) tokens: Option<Tensor>,
    /// `[max drafts * max seqs]`: the first of each chain, then the second of those that have one, and so on.
    pub(super) drafts: Tensor,
    on_host: Readback<i32>,
    /// The drafts were asked for, and have not been taken.
    is_asked: bool,
    pub(super) max_seqs: usize,
    /// Drafts that are on their way, by slot, as places in `drafts`.
    pub(super) coming: Vec<(Slot, Places)>,
}

impl OnDevice {
    pub(super) fn new(device: &Device, drafter: &Drafter, sizes: DraftSizes) -> Result<Self> {
        let tokens = drafter.tokens.as_ref().map(|tokens| {
            let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
            Tensor::from_slice(device, "draft tokens", &tokens, [tokens.len()])
        });
        let most = sizes.max_drafts * sizes.max_seqs;
        Ok(OnDevice {
            tokens: tokens.transpose()?,
            drafts: Tensor::zeros(device, "drafts", [most], DType::I32)?,
            on_host: Readback::new(device, most)?,
            is_asked: false,
            max_seqs: sizes.max_seqs,
            coming: Vec::with_capacity(sizes.max_seqs),
        })
    }

    /// Asks for all drafts, as the device has them once all work before has run.
    pub(super) fn ask(&mut self) -> Result<()> {
        self.is_asked = true;
        Ok(self.on_host.begin(&self.drafts)?)
    }

    /// Whether drafts that were asked for have not come yet.
    pub(super) fn is_waited_for(&self) -> Result<bool> {
        Ok(self.is_asked && !self.on_host.is_done()?)
    }

    /// Puts the drafts that were asked for in their places.
    pub(super) fn take(&mut self, slots: &mut Slots) -> Result<()> {
        if std::mem::take(&mut self.is_asked) {
            let drafts = self.on_host.wait()?;
            for (slot, places) in self.coming.drain(..) {
                slots.replace_drafts(slot, places.iter().map(|&place| drafts[place as usize]));
            }
        }
        Ok(())
    }

    /// Keeps the drafts that were picked as `ids` for some chains, of which `first` come before.
    pub(super) fn keep(&mut self, first: usize, ids: &Tensor, chains: &mut [Chain]) -> Result<()> {
        let Some(chain) = chains.first() else { return Ok(()) };
        let first = chain.num_drafts * self.max_seqs + first;
        map_tokens(ids, self.tokens.as_ref(), &mut self.drafts.rows_mut(first..first + chains.len()))?;
        for (place, chain) in (first..).zip(chains) {
            chain.places[chain.num_drafts] = place as u32;
            chain.draft = sampled_by(place);
        }
        Ok(())
    }
}
