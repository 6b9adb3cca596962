//! A link to a rank that is a thread of this process.

use std::sync::mpsc;

use crate::{Link, LinkError, Step, StepResult};

/// The engine's end.
#[derive(Debug)]
pub struct ChannelLink {
    rank: u32,
    steps: mpsc::Sender<Step>,
    results: mpsc::Receiver<Result<StepResult, String>>,
}

/// The rank's end.
#[derive(Debug)]
pub struct RankEnd {
    steps: mpsc::Receiver<Step>,
    results: mpsc::Sender<Result<StepResult, String>>,
}

/// A pair of ends for `rank`.
pub fn channel(rank: u32) -> (ChannelLink, RankEnd) {
    let (step_sender, step_receiver) = mpsc::channel();
    let (result_sender, result_receiver) = mpsc::channel();
    (
        ChannelLink { rank, steps: step_sender, results: result_receiver },
        RankEnd { steps: step_receiver, results: result_sender },
    )
}

impl Link for ChannelLink {
    fn send(&mut self, step: &Step) -> Result<(), LinkError> {
        self.steps.send(step.clone()).map_err(|_| LinkError::Closed { rank: self.rank })
    }

    fn recv(&mut self) -> Result<StepResult, LinkError> {
        let rank = self.rank;
        let result = self.results.recv().map_err(|_| LinkError::Closed { rank })?;
        result.map_err(|reason| LinkError::Failed { rank, reason })
    }
}

impl RankEnd {
    /// The next step, or `None` once the engine is gone.
    pub fn recv(&self) -> Option<Step> {
        self.steps.recv().ok()
    }

    /// The next step if it has come.
    pub fn try_recv(&self) -> Option<Step> {
        self.steps.try_recv().ok()
    }

    /// Answers the oldest step, or says why this rank has failed. Lost if the engine is gone.
    pub fn send(&self, result: Result<StepResult, String>) {
        let _ = self.results.send(result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_fails_or_stops_is_named() {
        let (mut link, rank) = channel(3);
        link.send(&Step { id: 1, ..Step::default() }).unwrap();
        let step = rank.recv().unwrap();
        rank.send(Ok(StepResult { id: step.id, ..StepResult::default() }));
        assert_eq!(link.recv().unwrap().id, 1);
        rank.send(Err("out of memory".into()));
        assert_eq!(link.recv().unwrap_err().to_string(), "rank 3 failed: out of memory");
        drop(rank);
        assert_eq!(link.recv().unwrap_err().to_string(), "rank 3 has stopped");
    }
}
