//! The thread of a rank: loads, says that it is ready, then runs step after step until its link is gone.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;

use drafthorse_control::{ChannelLink, RankEnd, Ready, Step, StepResult, channel};
use tracing::{error, info};

use crate::config::WorkerConfig;
use crate::error::{Result, WorkerError, chain};
use crate::load::{Progress, load};
use crate::runner::Runner;

/// Loads a model on a thread of its own and returns once it is ready. The thread ends when the link is dropped.
///
/// `progress` is called on that thread while it loads.
///
/// # Errors
/// Whatever kept the model from loading. A failure after that travels through the link and ends the thread.
pub fn spawn(config: WorkerConfig, progress: Box<dyn Fn(Progress) + Send>) -> Result<(Ready, ChannelLink)> {
    spawn_with(move || load(&config, &*progress))
}

/// [`spawn`], whatever the runner is made from.
pub(crate) fn spawn_with(
    make: impl FnOnce() -> Result<(Runner, Ready)> + Send + 'static,
) -> Result<(Ready, ChannelLink)> {
    let (link, end) = channel(0);
    let (ready_sender, ready_receiver) = mpsc::channel();
    let rank = move || {
        let made = catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|panic| Err(panicked(&*panic)));
        // If nobody waits for the answer any more, dropping the runner is all there is to do.
        match made {
            Err(error) => drop(ready_sender.send(Err(error))),
            Ok((runner, ready)) => {
                if ready_sender.send(Ok(ready)).is_ok() {
                    serve(runner, &end);
                }
            }
        }
    };
    thread::Builder::new().name("rank-0".into()).spawn(rank).map_err(WorkerError::Thread)?;
    let ready = ready_receiver.recv().map_err(|_| WorkerError::Panicked { reason: "no answer".into() })??;
    Ok((ready, link))
}

fn serve(mut runner: Runner, end: &RankEnd) {
    let mut next = None;
    loop {
        // Without a step in flight there is nothing to do but wait for one, awake if the device has drafts for it soon.
        if next.is_none() {
            next = end.try_recv();
            let is_idle = next.is_none() && runner.in_flight.is_empty();
            match is_idle.then(|| runner.is_drafting()) {
                Some(Ok(true)) => {
                    thread::yield_now();
                    continue;
                }
                // If the device has failed, the next step will say so.
                Some(_) => match end.recv() {
                    Some(step) => next = Some(step),
                    None => break,
                },
                None => {}
            }
        }
        let turn = catch_unwind(AssertUnwindSafe(|| turn(&mut runner, &mut next)));
        match turn.unwrap_or_else(|panic| Err(panicked(&*panic))) {
            Ok(Some(result)) => end.send(Ok(result)),
            Ok(None) => {}
            Err(error) => {
                let reason = chain(&error);
                error!(step = runner.last_step, reason, "rank failed");
                end.send(Err(reason));
                return;
            }
        }
    }
    let (used, planned) = (runner.workspace.high_water_bytes(), runner.workspace.capacity_bytes());
    info!(steps = runner.last_step, workspace_used = used, workspace_planned = planned, "rank stopped");
}

/// Launches the next step if it may be, else finishes the oldest in flight if it is done or stands in the next one's way.
fn turn(runner: &mut Runner, next: &mut Option<Step>) -> Result<Option<StepResult>> {
    match next.take() {
        Some(step) if runner.may_launch(&step) => runner.launch(&step).map(|()| None),
        Some(step) => {
            *next = Some(step);
            runner.finish().map(Some)
        }
        None if runner.is_done()? => runner.finish().map(Some),
        None => {
            // The next step may come before this one is done, and must not be late.
            thread::yield_now();
            Ok(None)
        }
    }
}

/// What a panic said.
fn panicked(panic: &(dyn Any + Send)) -> WorkerError {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    WorkerError::Panicked { reason: text.unwrap_or("without a message").into() }
}
