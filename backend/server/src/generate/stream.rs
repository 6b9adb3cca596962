//! The engine's events of one request to chunks of text.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use drafthorse_control::{FinishReason, TokenId, TokenLogprobs};
use drafthorse_engine::{Event, Finished, RequestId, Tokens};
use drafthorse_worker::grammar::Compiled;
use futures::{Stream, StreamExt};
use tokio::sync::mpsc::UnboundedReceiver;

use super::model::ServedModel;
use super::request::{Chunk, Finish, StopCause, Whole};
use crate::error::{Result, ServerError};
use crate::metrics::{Failure, Spent};
use crate::text::{Detokenizer, StopStrings};

/// What a running request consists of.
pub(super) struct Started {
    pub(super) model: Arc<ServedModel>,
    pub(super) id: RequestId,
    pub(super) events: UnboundedReceiver<(Instant, Event)>,
    pub(super) detokenizer: Detokenizer,
    pub(super) stop: StopStrings,
    pub(super) stop_strings: Vec<String>,
    pub(super) keep_stop_token: bool,
    pub(super) stop_tokens: Vec<TokenId>,
    pub(super) max_tokens: usize,
    pub(super) min_tokens: usize,
    pub(super) prompt_tokens: usize,
    pub(super) warnings: Vec<String>,
    pub(super) arrived: Instant,
    /// Time from text to tokens.
    pub(super) encoding: Duration,
    /// Held so that it stays compiled.
    pub(super) _grammar: Option<Arc<Compiled>>,
}

/// One answer on its way: a stream of chunks, the last of which says how it ended. Dropping it cancels the request.
pub struct Generation {
    of: Started,
    /// Output tokens seen.
    num_tokens: usize,
    /// Bytes of text seen, held or not.
    text_bytes: usize,
    /// Tokens whose text is not all out, the oldest first.
    held: VecDeque<HeldToken>,
    /// Output tokens handed out, and where their text ends.
    num_released: usize,
    released_end: usize,
    /// The last chunk: the text has ended, and waits for the engine to say how.
    last: Option<Chunk>,
    cause: Option<StopCause>,
    ended: bool,
    first_token: Option<Instant>,
    last_tokens: Instant,
    decoding: Duration,
}

struct HeldToken {
    id: TokenId,
    logprobs: Option<TokenLogprobs>,
    /// Where its text ends in the whole text; `None` while that is inside a character.
    text_end: Option<usize>,
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Generation({} of {:?}, {} tokens)", self.of.id, self.of.model, self.num_tokens)
    }
}

impl Generation {
    pub(super) fn new(of: Started) -> Self {
        let last_tokens = of.arrived;
        Generation {
            of,
            num_tokens: 0,
            text_bytes: 0,
            held: VecDeque::new(),
            num_released: 0,
            released_end: 0,
            last: None,
            cause: None,
            ended: false,
            first_token: None,
            last_tokens,
            decoding: Duration::ZERO,
        }
    }

    pub fn prompt_tokens(&self) -> usize {
        self.of.prompt_tokens
    }

    /// What of the request's parameters was passed over.
    pub fn warnings(&self) -> &[String] {
        &self.of.warnings
    }

    pub fn model(&self) -> &Arc<ServedModel> {
        &self.of.model
    }

    /// The whole answer at once.
    ///
    /// # Errors
    /// As the stream's.
    pub async fn whole(mut self) -> Result<Whole> {
        let mut all = Chunk::default();
        while let Some(chunk) = self.next().await {
            all.append(chunk?);
        }
        all.into_whole().ok_or_else(|| ServerError::internal("the answer has no end"))
    }

    /// Its first token has come, if it has not ended without one.
    pub(super) fn has_begun(&self) -> bool {
        self.first_token.is_some() || self.ended
    }

    /// What an event gives to hand out, if anything.
    fn take_event(&mut self, at: Instant, event: Event) -> Option<Result<Chunk>> {
        match event {
            Event::Tokens(tokens) => self.take_tokens(at, tokens).map(Ok),
            Event::Finished(finished) => Some(Ok(self.end(finished))),
            Event::Failed(error) => Some(Err(self.fail(error.into()))),
        }
    }

    fn take_tokens(&mut self, at: Instant, tokens: Tokens) -> Option<Chunk> {
        if self.last.is_some() {
            // Steps that were on their way when the stop string was found.
            return None;
        }
        let started = Instant::now();
        self.count(at, tokens.ids.len());
        let mut chunk = Chunk { prompt_logprobs: tokens.prompt_logprobs, ..Chunk::default() };
        let mut logprobs = tokens.logprobs.into_iter();
        let mut text_ends = false;
        for id in tokens.ids {
            text_ends = self.take_token(id, logprobs.next(), &mut chunk);
            if text_ends {
                break;
            }
        }
        self.decoding += started.elapsed();
        if text_ends {
            // How it ended follows at once, and goes out with the text rather than in a chunk of its own.
            self.last = Some(chunk);
            return None;
        }
        let empty = chunk.text.is_empty() && chunk.token_ids.is_empty() && chunk.prompt_logprobs.is_empty();
        (!empty).then_some(chunk)
    }

    /// True if nothing comes after this token.
    fn take_token(&mut self, id: TokenId, logprobs: Option<TokenLogprobs>, chunk: &mut Chunk) -> bool {
        self.num_tokens += 1;
        self.held.push_back(HeldToken { id, logprobs, text_end: None });
        let stops = self.num_tokens > self.of.min_tokens && self.of.stop_tokens.binary_search(&id).is_ok();
        let mut piece = String::new();
        if !stops || self.of.keep_stop_token {
            self.of.detokenizer.push(id, &mut piece);
        }
        if self.take_text(&piece, chunk) {
            let num_tokens = self.num_released;
            self.of.model.engine().finish(self.of.id, FinishReason::Stop, num_tokens);
            return true;
        }
        if stops && !self.of.model.defaults().end_tokens.contains(&id) {
            self.cause = Some(StopCause::Token(id));
        }
        stops || self.num_tokens == self.of.max_tokens
    }

    /// Passes text on to the stop strings, and what they let through to the chunk. True if one was found.
    fn take_text(&mut self, piece: &str, chunk: &mut Chunk) -> bool {
        self.text_bytes += piece.len();
        if !self.of.detokenizer.is_holding() {
            self.settle();
        }
        if self.num_tokens <= self.of.min_tokens {
            self.of.stop.pass(piece, &mut chunk.text);
        } else if let Some(found) = self.of.stop.push(piece, &mut chunk.text) {
            self.cause = Some(StopCause::Text(self.of.stop_strings[found.index].clone()));
            self.settle();
            self.release(found.text_bytes, chunk);
            if self.released_end < found.text_bytes {
                // The next tokens' text is kept in part.
                let partly = self.held.front().and_then(|token| token.text_end).unwrap_or(self.text_bytes);
                self.release(partly, chunk);
            }
            self.held.clear();
            return true;
        }
        self.release(self.of.stop.num_released(), chunk);
        false
    }

    /// All characters are whole: the text of all tokens so far ends here.
    fn settle(&mut self) {
        for token in self.held.iter_mut().rev().take_while(|token| token.text_end.is_none()) {
            token.text_end = Some(self.text_bytes);
        }
    }

    /// Hands out the tokens whose text ends within the first `text_bytes`.
    fn release(&mut self, text_bytes: usize, chunk: &mut Chunk) {
        while let Some(end) = self.held.front().and_then(|token| token.text_end).filter(|&end| end <= text_bytes)
            && let Some(token) = self.held.pop_front()
        {
            self.num_released += 1;
            self.released_end = end;
            chunk.token_ids.push(token.id);
            chunk.logprobs.extend(token.logprobs);
        }
    }

    /// The last chunk, with what was still held.
    fn end(&mut self, finished: Finished) -> Chunk {
        let mut chunk = self.last.take().unwrap_or_default();
        if !matches!(self.cause, Some(StopCause::Text(_))) {
            let mut piece = String::new();
            self.of.detokenizer.finish(&mut piece);
            if !self.take_text(&piece, &mut chunk) {
                self.of.stop.finish(&mut chunk.text);
                self.release(self.text_bytes, &mut chunk);
            }
        }
        let Finished { mut reason, mut usage, timing } = finished;
        if let Some(StopCause::Text(_)) = self.cause {
            // The engine may have come to an end of its own before it heard of the stop string.
            reason = FinishReason::Stop;
            usage.output_tokens = self.num_released as u32;
        }
        self.ended = true;
        let spent = Spent {
            total: self.of.arrived.elapsed(),
            encoding: self.of.encoding,
            queued: timing.queued,
            running: timing.total.saturating_sub(timing.queued),
            decoding: self.decoding,
            first_token: self.first_token.map_or(Duration::ZERO, |at| at.duration_since(self.of.arrived)),
        };
        self.of.model.metrics.succeeded(reason, &usage, &spent);
        chunk.finish = Some(Finish { reason, cause: self.cause.take(), usage, timing });
        chunk
    }

    fn fail(&mut self, error: ServerError) -> ServerError {
        self.ended = true;
        self.of.model.metrics.failed(Failure::from(&error), self.of.arrived.elapsed());
        error
    }

    fn count(&mut self, at: Instant, num_tokens: usize) {
        if num_tokens == 0 {
            return;
        }
        let metrics = &self.of.model.metrics;
        let time = at.duration_since(self.last_tokens);
        match self.first_token {
            Some(_) => metrics.next_tokens(time, num_tokens),
            None => {
                metrics.first_token(time, self.of.prompt_tokens, num_tokens);
                self.first_token = Some(at);
            }
        }
        self.last_tokens = at;
    }
}

impl Stream for Generation {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if self.ended {
                return Poll::Ready(None);
            }
            let Some((at, event)) = ready!(self.of.events.poll_recv(cx)) else {
                let reason = self.of.model.engine().stopped().unwrap_or_else(|| "it dropped the request".into());
                return Poll::Ready(Some(Err(self.fail(ServerError::EngineStopped { reason }))));
            };
            if let Some(item) = self.take_event(at, event) {
                return Poll::Ready(Some(item));
            }
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            self.of.model.engine().cancel(self.of.id);
            self.of.model.metrics.failed(Failure::Canceled, self.of.arrived.elapsed());
        }
    }
}

#[cfg(test)]
mod tests;
