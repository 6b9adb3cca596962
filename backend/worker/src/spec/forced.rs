//! Drafts that hold because it was said so: what a step costs can then be measured whatever the weights are.

/// A setting for benches alone: the text is no longer the target's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Forced {
    /// Share of drafts that hold, of those that all before them held.
    share: f32,
}

impl Forced {
    /// `None` if `share` is no share.
    pub fn new(share: f32) -> Option<Self> {
        (0.0..=1.0).contains(&share).then_some(Forced { share })
    }

    /// Whether the draft for `position` of the sequence with this seed holds: the same on every rank.
    pub fn holds(self, seed: u64, position: usize) -> bool {
        // splitmix64's finalizer: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
        let mut mixed = seed ^ (position as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let share = ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1u64 << 24) as f32;
        share < self.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_drafts_holds() {
        for share in [0.0, 0.25, 0.7, 1.0] {
            let forced = Forced::new(share).unwrap();
            let held = (0..20_000).filter(|&position| forced.holds(7, position)).count() as f32 / 20_000.0;
            assert!((held - share).abs() < 0.012, "{share}: {held}");
            assert!([0.0, 1.0].contains(&share) <= (held == share), "{share}: {held}");
        }
        assert!([-0.1, 1.1, f32::NAN].into_iter().all(|share| Forced::new(share).is_none()));
    }
}
