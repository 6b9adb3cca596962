//! Decoding steps of a few sizes, recorded once and replayed: a step then costs the host one launch.
//!
//! A size is recorded when it comes for the second time. The first time its ops run one by one, which loads kernels and makes plans
//! that a recording must find; so starting up costs nothing.

use std::collections::BTreeMap;

use drafthorse_kernels::Device;
use drafthorse_kernels::device::Recording;

use crate::error::Result;

/// Rows that steps are padded to. The next size costs at most a third more rows, and above 8 rows, where rows begin to cost, a quarter
/// to a half of that in time; each recording takes a few megabytes.
pub(crate) const SIZES: [usize; 19] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512];

/// What of a step is recorded as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Whole,
    /// Up to the logits, so that masks may come while it runs.
    Forward,
    /// Up to the logits of all tokens, so many of each sequence, or to what is picked from them as they are: what verifies drafts.
    Drafted {
        each: usize,
        picks: bool,
    },
    /// What makes so many drafts for each sequence after a step of so many tokens each, whose hidden states are at this address.
    Drafts {
        each: usize,
        drafts: usize,
        from: u64,
    },
    /// What then picks tokens, by masks. After each `Forward` of its size, so that both are recorded in the same step, and the logits
    /// that one leaves are those that the other reads.
    Pick,
}

/// What has been recorded, by size.
pub(crate) struct Graphs {
    device: Device,
    eager: bool,
    /// `None`: came once.
    recordings: BTreeMap<(usize, Part), Option<Recording>>,
    /// Where recorded parts leave what others read.
    left: BTreeMap<(usize, Part), Left>,
}

/// Addresses of a step's hidden states and logits.
pub(crate) type Left = [u64; 2];

/// Tokens up to which steps with drafts are recorded: few sequences wait for the host more than for the device.
const MOST_DRAFTED: usize = 32;

impl Graphs {
    /// With `eager` steps are padded alike, but nothing is recorded.
    pub fn new(device: &Device, eager: bool) -> Self {
        Graphs { device: device.clone(), eager, recordings: BTreeMap::new(), left: BTreeMap::new() }
    }

    /// Whether anything is recorded.
    pub fn records(&self) -> bool {
        self.device != Device::Cpu && !self.eager
    }

    /// Whether steps of so many tokens with drafts among them are recorded.
    pub fn takes_drafted(&self, num_tokens: usize) -> bool {
        self.records() && num_tokens <= MOST_DRAFTED
    }

    /// Where the part left its results when it was recorded.
    pub fn left(&self, size: usize, part: Part) -> Option<Left> {
        self.left.get(&(size, part)).copied()
    }

    /// Notes where a part, that was not replayed, leaves its results.
    pub fn note_left(&mut self, size: usize, part: Part, left: Left) {
        self.left.insert((size, part), left);
    }

    /// The size that a step of so many rows is padded to, if such steps are replayed on this device. At most `max_rows`.
    pub fn size(&self, num_rows: usize, max_rows: usize) -> Option<usize> {
        let on_gpu = self.device != Device::Cpu;
        SIZES.into_iter().find(|&size| num_rows > 0 && size >= num_rows).filter(|&size| on_gpu && size <= max_rows)
    }

    /// Whether a part of a step will take as long again as it takes now: it is replayed, or never recorded.
    pub fn is_settled(&self, size: usize, part: Part) -> bool {
        !self.records() || matches!(self.recordings.get(&(size, part)), Some(Some(_)))
    }

    /// Runs the ops of a part of a step padded to `size`. Once they are recorded `work` is not called.
    ///
    /// # Errors
    /// `work`'s own, or `Kernel` if the device fails.
    pub fn run(&mut self, size: usize, part: Part, mut work: impl FnMut() -> Result<()>) -> Result<()> {
        if self.eager {
            return work();
        }
        match self.recordings.get_mut(&(size, part)) {
            None => {
                work()?;
                self.recordings.insert((size, part), None);
            }
            Some(Some(recording)) => recording.replay()?,
            Some(none) => {
                let recording = self.device.record(work)?;
                recording.replay()?;
                *none = Some(recording);
            }
        }
        Ok(())
    }
}
