//! What all services share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::config::ServerConfig;
use crate::error::{Result, ServerError};
use crate::repository::Repository;

/// The process: its settings, its models, and whether it is on its way out.
#[derive(Debug)]
pub struct App {
    pub config: Arc<ServerConfig>,
    pub repository: Arc<Repository>,
    exiting: CancellationToken,
    closing: CancellationToken,
    in_flight: Arc<InFlight>,
}

#[derive(Debug, Default)]
struct InFlight {
    requests: AtomicUsize,
    ended: Notify,
}

/// Held while a request is answered; the process waits for it when it exits.
#[derive(Debug)]
pub struct Admission(Arc<InFlight>);

impl Drop for Admission {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, SeqCst);
        self.0.ended.notify_waiters();
    }
}

impl App {
    pub fn new(config: Arc<ServerConfig>, repository: Arc<Repository>) -> Self {
        App {
            config,
            repository,
            exiting: CancellationToken::new(),
            closing: CancellationToken::new(),
            in_flight: Arc::default(),
        }
    }

    /// The process takes requests.
    pub fn live(&self) -> bool {
        !self.exiting.is_cancelled()
    }

    /// The process takes requests, and every model that should be served is.
    pub fn ready(&self) -> bool {
        self.live() && (!self.config.strict_readiness || self.repository.ready())
    }

    /// Counts an inference request in, until the admission is dropped.
    ///
    /// # Errors
    /// `Exiting` if the process is on its way out.
    pub fn admit(&self) -> Result<Admission> {
        self.in_flight.requests.fetch_add(1, SeqCst);
        let admission = Admission(self.in_flight.clone());
        // After counting, so that whoever begins to exit sees either the count or a refusal.
        if self.live() { Ok(admission) } else { Err(ServerError::Exiting) }
    }

    /// Stops admitting. Whoever asks is still answered: that it is not ready, or that it is exiting.
    pub fn begin_exit(&self) {
        self.exiting.cancel();
    }

    /// Stops listening.
    pub fn close(&self) {
        self.closing.cancel();
    }

    /// Cancelled when the process stops listening.
    pub fn closing(&self) -> &CancellationToken {
        &self.closing
    }

    /// Cancelled when the process begins to exit.
    pub fn exiting(&self) -> &CancellationToken {
        &self.exiting
    }

    /// Requests admitted and not ended.
    pub fn num_in_flight(&self) -> usize {
        self.in_flight.requests.load(SeqCst)
    }

    /// Returns when no request is in flight.
    pub async fn drained(&self) {
        loop {
            let ended = self.in_flight.ended.notified();
            tokio::pin!(ended);
            // Listening starts before the count is read, so no end is missed.
            ended.as_mut().enable();
            if self.num_in_flight() == 0 {
                return;
            }
            ended.await;
        }
    }
}
