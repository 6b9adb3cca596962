//! All ranks as one: the same step to each, one answer back.

use std::collections::VecDeque;

use drafthorse_control::{Link, LinkError, Step, StepResult};

use crate::error::{EngineError, Result};

/// The links, rank 0 first.
pub(crate) struct Executor {
    links: Vec<Box<dyn Link>>,
    in_flight: VecDeque<u64>,
}

impl Executor {
    pub(crate) fn new(links: Vec<Box<dyn Link>>) -> Self {
        Executor { links, in_flight: VecDeque::new() }
    }

    /// Steps sent and not answered.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Sends `step` to every rank, the far ones first: rank 0 is nearest and would only wait for them.
    ///
    /// # Errors
    /// If a rank is gone.
    pub(crate) fn send(&mut self, step: &Step) -> Result<()> {
        for link in self.links.iter_mut().rev() {
            link.send(step)?;
        }
        self.in_flight.push_back(step.id);
        Ok(())
    }

    /// Waits for the oldest step and answers with rank 0's result.
    ///
    /// # Errors
    /// If a rank is gone, answers out of order, or picked other tokens than rank 0.
    pub(crate) fn recv(&mut self) -> Result<StepResult> {
        let want = self.in_flight.pop_front().unwrap_or_default();
        let mut answer: Option<StepResult> = None;
        for (rank, link) in self.links.iter_mut().enumerate() {
            let result = link.recv()?;
            if result.id != want {
                return Err(LinkError::OutOfStep { rank: rank as u32, got: result.id, want }.into());
            }
            match &answer {
                None => answer = Some(result),
                Some(first) if first.checksum != result.checksum => {
                    return Err(EngineError::RanksDiffer { rank, step: want });
                }
                Some(_) => {}
            }
        }
        answer.ok_or(EngineError::NoRanks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drafthorse_control::channel;

    /// Sends step 1 to ranks that answer with these ids and checksums.
    fn run(answers: &[(u64, u64)]) -> String {
        let (links, ends): (Vec<_>, Vec<_>) = (0..answers.len() as u32).map(channel).unzip();
        let links = links.into_iter().map(|link| Box::new(link) as Box<dyn Link>).collect();
        let mut executor = Executor::new(links);
        executor.send(&Step { id: 1, ..Step::default() }).unwrap();
        assert_eq!(executor.in_flight(), 1);
        for (end, &(id, checksum)) in ends.iter().zip(answers) {
            assert_eq!(end.recv().unwrap().id, 1);
            end.send(Ok(StepResult { id, checksum, ..StepResult::default() }));
        }
        match executor.recv() {
            Ok(result) => format!("step {} checksum {}", result.id, result.checksum),
            Err(err) => err.to_string(),
        }
    }

    #[test]
    fn ranks_that_agree_are_one() {
        assert_eq!(run(&[(1, 5)]), "step 1 checksum 5");
        assert_eq!(run(&[(1, 5), (1, 5)]), "step 1 checksum 5");
    }

    #[test]
    fn names_the_rank_that_drifted_or_lost_count() {
        assert_eq!(run(&[(1, 5), (1, 5), (1, 6)]), "rank 2 and rank 0 have drifted apart in step 1");
        assert_eq!(run(&[(1, 5), (2, 5)]), "rank 1 answered step 2, expected 1");
    }
}
