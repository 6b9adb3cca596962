//! The handle that the server holds.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use drafthorse_control::{FinishReason, Link, Ready};

use crate::config::EngineConfig;
use crate::driver::{Command, Driver};
use crate::error::{EngineError, Result};
use crate::executor::Executor;
use crate::request::{ById, Outlet, Request, RequestId};
use crate::scheduler::Scheduler;
use crate::stats::{Shared, Stats};

/// One model's engine: a thread that batches requests and drives the ranks.
///
/// All methods may be called from any thread and none waits for a step, but [`stop`](Self::stop) and dropping it do.
pub struct Engine {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    limits: Limits,
    weight_bytes: u64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What bounds a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens of prompt and output together.
    pub max_model_len: usize,
    /// Tokens that the KV cache holds.
    pub max_kv_tokens: usize,
    pub vocab_size: u32,
    /// Most drafts of a sequence in one step; 0 if none are made.
    pub max_drafts: u32,
    pub max_num_seqs: usize,
    pub max_waiting: usize,
}

impl Engine {
    /// Starts the engine thread over `links`, one for each rank, rank 0 first; `ready` is the least that all ranks can do.
    ///
    /// # Errors
    /// A setting that cannot work, no ranks, no KV cache, or no thread.
    #[expect(clippy::needless_pass_by_value, reason = "a caller is done with it")]
    pub fn start(config: EngineConfig, ready: Ready, links: Vec<Box<dyn Link>>) -> Result<Engine> {
        let config = config.validate()?;
        if links.is_empty() {
            return Err(EngineError::NoRanks);
        }
        if ready.num_blocks == 0 || ready.block_size == 0 {
            return Err(EngineError::NoCache { num_blocks: ready.num_blocks, block_size: ready.block_size });
        }
        let limits = Limits {
            max_model_len: ready.max_model_len as usize,
            max_kv_tokens: ready.num_blocks as usize * ready.block_size as usize,
            vocab_size: ready.vocab_size,
            max_drafts: ready.max_drafts,
            max_num_seqs: config.max_num_seqs as usize,
            max_waiting: config.max_waiting as usize,
        };
        let shared = Arc::new(Shared::default());
        let (commands, receiver) = mpsc::channel();
        let driver = Driver {
            commands: receiver,
            scheduler: Scheduler::new(&config, &ready, shared.clone()),
            executor: Executor::new(links),
            pipeline_depth: pipeline_depth(&config, &ready),
            shared: shared.clone(),
            outlets: ById::default(),
            events: Vec::new(),
        };
        tracing::info!(
            num_blocks = ready.num_blocks,
            block_size = ready.block_size,
            max_num_seqs = config.max_num_seqs,
            max_num_batched_tokens = config.max_num_batched_tokens,
            pipeline_depth = driver.pipeline_depth,
            "engine started"
        );
        let guard = StopGuard(shared.clone());
        let thread = thread::Builder::new()
            .name("engine".into())
            .spawn(move || {
                let _guard = guard;
                driver.run();
            })
            .map_err(EngineError::Thread)?;
        let weight_bytes = ready.weight_bytes;
        Ok(Engine { commands, shared, limits, weight_bytes, thread: Mutex::new(Some(thread)) })
    }

    /// Puts a request in the queue. From then on its sink gets its events, the last one always.
    ///
    /// # Errors
    /// Without any event, if the request can never run, too many wait, or the engine takes none.
    pub fn submit(&self, mut request: Request) -> Result<()> {
        self.limits.check(&request)?;
        if self.shared.draining.load(SeqCst) {
            return Err(EngineError::Draining);
        }
        if let Some(reason) = self.shared.stopped() {
            return Err(EngineError::Stopped { reason });
        }
        let Limits { max_num_seqs, max_waiting, .. } = self.limits;
        self.shared
            .try_begin_request(max_num_seqs + max_waiting)
            .map_err(|live| EngineError::Overloaded { waiting: live - max_num_seqs, max: max_waiting })?;
        let sink = std::mem::replace(&mut request.sink, Box::new(|_| false));
        let outlet = Outlet::new(sink, self.shared.clone());
        match self.commands.send(Command::Submit(Box::new(request), outlet)) {
            Ok(()) => Ok(()),
            Err(mpsc::SendError(command)) => {
                if let Command::Submit(_, outlet) = command {
                    outlet.abandon();
                }
                Err(EngineError::Stopped { reason: self.shared.stopped().unwrap_or_default() })
            }
        }
    }

    /// Ends a request with [`EngineError::Cancelled`]; nothing if it has ended. Its blocks are free again after the steps
    /// in flight.
    pub fn cancel(&self, id: RequestId) {
        // An engine that has stopped has no requests.
        let _ = self.commands.send(Command::Cancel(id));
    }

    /// Ends a request as a success, as if its output had been the first `num_tokens` tokens: for stop strings, which only
    /// the server can see. Nothing if it has ended.
    pub fn finish(&self, id: RequestId, reason: FinishReason, num_tokens: usize) {
        let _ = self.commands.send(Command::Finish { id, reason, num_tokens });
    }

    pub fn stats(&self) -> Stats {
        self.shared.read()
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Bytes of the model's weights, as the ranks said.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Takes no new requests; those it has go on. Done when [`is_idle`](Self::is_idle).
    pub fn drain(&self) {
        self.shared.draining.store(true, SeqCst);
    }

    /// True if no request is waiting or running.
    pub fn is_idle(&self) -> bool {
        self.shared.live() == 0
    }

    /// Why the engine has stopped, or `None` while it runs.
    pub fn stopped(&self) -> Option<String> {
        self.shared.stopped()
    }

    /// Calls `callback` with the reason when the engine stops, on its thread; at once if it has.
    pub fn on_stop(&self, callback: impl FnOnce(&str) + Send + 'static) {
        self.shared.on_stop(Box::new(callback));
    }

    /// Fails all requests, lets the ranks go, and waits for the thread: no longer than a step takes.
    pub fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic there has failed the requests already.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Limits {
    /// # Errors
    /// What is wrong with a request that can never run.
    pub fn check(&self, request: &Request) -> Result<()> {
        let prompt = request.prompt.len();
        let max_tokens = request.sampling.max_tokens as usize;
        let total = prompt.saturating_add(max_tokens);
        if prompt == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if max_tokens == 0 {
            return Err(EngineError::NoOutput);
        }
        if prompt >= self.max_model_len {
            return Err(EngineError::PromptTooLong { tokens: prompt, max: self.max_model_len.saturating_sub(1) });
        }
        if total > self.max_model_len {
            return Err(EngineError::TooManyTokens { prompt, max_tokens, max: self.max_model_len });
        }
        if total > self.max_kv_tokens {
            return Err(EngineError::CacheTooSmall { tokens: total, max: self.max_kv_tokens });
        }
        match request.prompt.iter().find(|token| **token >= self.vocab_size) {
            Some(&token) => Err(EngineError::UnknownToken { token, vocab_size: self.vocab_size }),
            None => Ok(()),
        }
    }
}

fn pipeline_depth(config: &EngineConfig, ready: &Ready) -> usize {
    let allowed = ready.pipeline_depth.max(1);
    config.pipeline_depth.map_or(allowed, |depth| depth.min(allowed)) as usize
}

/// Says that the engine has stopped even if its thread panics.
struct StopGuard(Arc<Shared>);

impl Drop for StopGuard {
    fn drop(&mut self) {
        self.0.stop("the engine thread panicked");
    }
}

#[cfg(test)]
mod tests;
