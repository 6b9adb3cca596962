//! Steps of a rank that drafts: the target over tokens and drafts, its tokens, and what comes of them.
//!
//! On a GPU a step whose sequences have as many drafts each is recorded, up to the logits or, if tokens are picked from those as they are, up
//! to the tokens. It takes its drafts from the device: they may be made there while the host already launches it.

use std::time::Instant;

use drafthorse_control::{RowResult, Step, Timing};
use drafthorse_kernels::{DType, Tensor};
use drafthorse_model::Forward;

use crate::error::Result;
use crate::features::Features;
use crate::graphs::Part;
use crate::inputs::PlannedRow;
use crate::runner::{Runner, Work};
use crate::spec::Unseen;

/// How far the device has been brought, and where its results are.
struct Forwarded {
    /// `[tokens, hidden]`.
    hidden: Tensor,
    logits: Logits,
}

enum Logits {
    NotYet,
    /// Of all tokens, `[tokens, vocab]`.
    Of(Tensor),
    /// Tokens have been picked from them.
    Picked,
}

impl Runner {
    /// Any step that cannot wait to be finished, to its results.
    pub(crate) fn run_to_its_end(&mut self, step: &Step) -> Result<Work> {
        let mut results = vec![RowResult::default(); step.rows.len()];
        let mut timing = Timing::default();
        let started = Instant::now();
        if self.batch.num_tokens() > 0 {
            let Forwarded { hidden, logits } = self.forward()?;
            timing.forward = started.elapsed();
            match logits {
                Logits::NotYet => self.collect_and_sample(&hidden, None)?,
                Logits::Of(logits) => self.collect_and_sample(&hidden, Some(logits))?,
                Logits::Picked => self.take_picked(&hidden)?,
            }
            self.verify(&hidden, &mut results)?;
            timing.sample = started.elapsed() - timing.forward;
            self.propose(&hidden, started.elapsed(), &mut results)?;
            timing.propose = started.elapsed() - timing.forward - timing.sample;
        }
        Ok(Work::Done(results, timing))
    }

    /// Gives the device the batch, and what follows from its hidden states as far as that is recorded.
    fn forward(&mut self) -> Result<Forwarded> {
        let part = self.recorded_as();
        let Runner { model, kv, workspace, comm, batch, graphs, sampler, inputs, slots, proposer, features, .. } = self;
        let drafts = proposer.as_ref().and_then(|proposer| proposer.on_device());
        let Some((size, part)) = part else {
            if let Some(drafts) = drafts {
                batch.feed_tokens(drafts)?;
            }
            let mut tap = features.as_mut().map(Features::tap);
            let taps = tap.as_mut_slice();
            let mut cx = Forward { batch, kv, workspace, comm: &**comm, target_hidden: None, taps };
            return Ok(Forwarded { hidden: model.forward(&mut cx)?, logits: Logits::NotYet });
        };
        let tokens = batch.num_tokens();
        let picks = matches!(part, Part::Drafted { picks: true, .. });
        if picks {
            sampler.prepare(&inputs.logits, tokens, slots)?;
        }
        let mut made = None;
        graphs.run(size, part, || {
            if let Some(drafts) = drafts {
                batch.feed_tokens(drafts)?;
            }
            let mut tap = features.as_mut().map(Features::tap);
            let taps = tap.as_mut_slice();
            let mut cx = Forward { batch, kv, workspace, comm: &**comm, target_hidden: None, taps };
            let hidden = model.forward(&mut cx)?;
            let logits = model.logits(&hidden, &mut cx)?;
            if picks {
                sampler.pick(&logits, workspace)?;
            }
            made = Some((hidden, logits));
            Ok(())
        })?;
        let (hidden, logits) = match made {
            Some((hidden, logits)) => {
                graphs.note_left(size, part, [hidden.device_address(), logits.device_address()]);
                (hidden, logits)
            }
            None => {
                // The workspace gives the same places again for the same takes.
                let hidden = workspace.take([tokens, self.hidden.0], self.hidden.1)?;
                let logits = workspace.take([tokens, self.vocab_size], DType::F32)?;
                let places = [hidden.device_address(), logits.device_address()];
                assert!(graphs.left(size, part) == Some(places), "a recorded step has left its results elsewhere");
                (hidden, logits)
            }
        };
        Ok(Forwarded { hidden, logits: if picks { Logits::Picked } else { Logits::Of(logits) } })
    }

    /// What the step is recorded as, if each of its rows has as many tokens as the others, all but one of them drafts.
    fn recorded_as(&self) -> Option<(usize, Part)> {
        let inputs = &self.inputs;
        let each = inputs.rows.first().map_or(0, |row| row.tokens.len());
        let tokens = self.batch.num_tokens();
        let is_alike = |row: &PlannedRow| row.tokens.len() == each && row.num_drafts + 1 == each && row.wants_token;
        let is_whole = each > 0 && inputs.rows.iter().all(is_alike) && inputs.logits.len() == inputs.rows.len() * each;
        let part = Part::Drafted { each, picks: inputs.picks_as_they_are };
        match inputs.replay {
            // Without drafts, padded as all such steps are.
            Some(size) if is_whole && self.graphs.records() => Some((size, part)),
            _ => (is_whole && each > 1 && self.graphs.takes_drafted(tokens)).then_some((inputs.rows.len(), part)),
        }
    }

    /// The drafts' tokens, that were on their way, and those picked by a recorded step; the next drafts may be on their way by then.
    fn take_picked(&mut self, hidden: &Tensor) -> Result<()> {
        let num_rows = self.inputs.logits.len();
        self.sampler.begin();
        self.sampler.clear_masks();
        self.sampler.ask(0, num_rows)?;
        self.collect_drafts()?;
        if let Some(proposer) = &mut self.proposer {
            proposer.propose_unseen(&mut Unseen {
                rows: &self.inputs.rows,
                slots: &self.slots,
                hidden: self.features.as_ref().map_or(hidden, Features::tensor),
                picked: self.sampler.picked(),
                forced: self.forced,
                max_model_len: self.max_model_len,
                graphs: &mut self.graphs,
                forward: Forward {
                    batch: &self.batch,
                    kv: &mut self.kv,
                    workspace: &self.workspace,
                    comm: &*self.comm,
                    target_hidden: Some(hidden),
                    taps: &mut [],
                },
            })?;
        }
        self.sampler.take(0)
    }

    fn collect_and_sample(&mut self, hidden: &Tensor, logits: Option<Tensor>) -> Result<()> {
        self.collect_drafts()?;
        self.sample(hidden, logits)
    }

    /// Puts the drafts in place that were made on the device for this step.
    pub(crate) fn collect_drafts(&mut self) -> Result<()> {
        match &mut self.proposer {
            Some(proposer) => proposer.collect(&mut self.slots),
            None => Ok(()),
        }
    }

    /// Whether the device makes drafts, and the next step should be there when it is done.
    pub(crate) fn is_drafting(&self) -> Result<bool> {
        self.proposer.as_ref().map_or(Ok(false), |proposer| proposer.is_waited_for())
    }
}
