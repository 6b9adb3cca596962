//! The engine thread: owns all scheduling state, talks to the ranks, and is talked to by channel.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use drafthorse_control::FinishReason;

use crate::error::{EngineError, Result};
use crate::executor::Executor;
use crate::request::{ById, Event, Outlet, Request, RequestId};
use crate::scheduler::{Events, Scheduler};
use crate::stats::Shared;

/// What others ask of the engine thread.
pub(crate) enum Command {
    /// The request's own sink is in the outlet.
    Submit(Box<Request>, Outlet),
    Cancel(RequestId),
    Finish {
        id: RequestId,
        reason: FinishReason,
        num_tokens: usize,
    },
    Stop,
}

pub(crate) struct Driver {
    pub(crate) commands: Receiver<Command>,
    pub(crate) scheduler: Scheduler,
    pub(crate) executor: Executor,
    /// Steps in flight at most.
    pub(crate) pipeline_depth: usize,
    pub(crate) shared: Arc<Shared>,
    pub(crate) outlets: ById<Outlet>,
    pub(crate) events: Events,
}

impl Driver {
    /// Runs until it is stopped or a rank is lost; then every request fails with the reason.
    pub(crate) fn run(mut self) {
        let reason = match self.run_steps() {
            Ok(()) => "it was told to stop".to_owned(),
            Err(err) => {
                tracing::error!(error = %err, requests = self.outlets.len(), "engine lost");
                err.to_string()
            }
        };
        self.shared.stop(&reason);
        // Dropping an outlet fails its request.
    }

    fn run_steps(&mut self) -> Result<()> {
        while self.take_commands() {
            self.plan_and_send()?;
            if self.executor.in_flight() > 0 {
                let result = self.executor.recv()?;
                let begun = Instant::now();
                tracing::trace!(
                    step = result.id,
                    forward_ms = result.timing.forward.as_secs_f64() * 1e3,
                    sample_ms = result.timing.sample.as_secs_f64() * 1e3,
                    propose_ms = result.timing.propose.as_secs_f64() * 1e3,
                    "step done"
                );
                self.scheduler.commit(result, begun, &mut self.events)?;
                self.deliver();
                self.shared.scheduler_took(begun.elapsed());
            } else if !self.scheduler.is_idle() {
                return Err(self.scheduler.stuck());
            }
        }
        Ok(())
    }

    fn plan_and_send(&mut self) -> Result<()> {
        while self.executor.in_flight() < self.scheduler.depth(self.pipeline_depth) {
            let begun = Instant::now();
            self.scheduler.expire(begun, &mut self.events);
            let Some(step) = self.scheduler.plan(begun) else { break };
            tracing::trace!(
                step = step.id,
                rows = step.rows.len(),
                tokens = step.rows.iter().map(|row| row.num_tokens).sum::<u32>(),
                admitted = step.admit.len(),
                "step planned"
            );
            self.shared.scheduler_took(begun.elapsed());
            self.executor.send(&step)?;
        }
        self.deliver();
        Ok(())
    }

    /// Takes what has been asked; waits only when nothing runs. False if the engine is to stop.
    fn take_commands(&mut self) -> bool {
        if self.scheduler.is_idle() && self.executor.in_flight() == 0 {
            match self.commands.recv() {
                Ok(Command::Stop) | Err(_) => return false,
                Ok(command) => self.obey(command),
            }
        }
        loop {
            match self.commands.try_recv() {
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return false,
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    fn obey(&mut self, command: Command) {
        let now = Instant::now();
        match command {
            Command::Submit(request, mut outlet) => {
                let id = request.id;
                match self.scheduler.add(*request, now) {
                    Ok(()) => {
                        self.outlets.insert(id, outlet);
                    }
                    Err(err) => {
                        outlet.send(Event::Failed(err));
                    }
                }
            }
            Command::Cancel(id) => self.scheduler.cancel(id, EngineError::Cancelled, &mut self.events),
            Command::Finish { id, reason, num_tokens } => {
                self.scheduler.finish(id, reason, num_tokens, now, &mut self.events);
            }
            Command::Stop => {}
        }
    }

    /// Hands events to their sinks; a sink without a receiver cancels its request.
    fn deliver(&mut self) {
        // Before the events, so that who has the last one sees its blocks free.
        self.scheduler.publish();
        let mut gone = Vec::new();
        for (id, event) in self.events.drain(..) {
            let Some(outlet) = self.outlets.get_mut(&id) else { continue };
            let is_last = event.is_last();
            log_end(id, &event);
            let listens = outlet.send(event);
            if is_last || !listens {
                self.outlets.remove(&id).into_iter().for_each(Outlet::abandon);
            }
            if !is_last && !listens {
                gone.push(id);
            }
        }
        for id in gone {
            self.scheduler.cancel(id, EngineError::Cancelled, &mut self.events);
            self.events.clear();
            self.scheduler.publish();
        }
    }
}

fn log_end(id: RequestId, event: &Event) {
    match event {
        Event::Tokens(_) => {}
        Event::Finished(finished) => tracing::debug!(
            request = %id,
            reason = finished.reason.name(),
            prompt_tokens = finished.usage.prompt_tokens,
            output_tokens = finished.usage.output_tokens,
            cached_tokens = finished.usage.cached_tokens,
            total_ms = finished.timing.total.as_millis() as u64,
            "request finished"
        ),
        Event::Failed(err) => tracing::debug!(request = %id, error = %err, "request failed"),
    }
}
