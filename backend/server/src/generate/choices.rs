//! The choices of one request: several answers to one prompt, which is computed once.
//!
//! The first choice runs alone until its first token is there: then the prompt's full blocks are in the prefix cache, and the
//! others find them. Without a prefix cache each computes the prompt for itself.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use drafthorse_control::{TokenId, TokenLogprobs};
use drafthorse_engine::Usage;
use futures::{Stream, StreamExt};

use super::model::ServedModel;
use super::prepare::Prepared;
use super::request::{Chunk, Whole};
use super::stream::Generation;
use crate::error::{Result, ServerError};

/// Answers on their way: a stream of chunks, each with the number of its choice. Dropping it cancels them.
pub struct Choices {
    model: Arc<ServedModel>,
    prepared: Prepared,
    /// Those that were started, by number; `None` once one has ended.
    running: Vec<Option<Generation>>,
    /// Where to look first, so that none is left behind.
    turn: usize,
    /// What the first choice was told of the prompt, for the others' first chunks.
    prompt_logprobs: Vec<TokenLogprobs>,
    begun: Vec<bool>,
}

/// All choices of a request, from their first chunks to their last.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// In order of their numbers; of `best_of`, the likeliest first.
    pub choices: Vec<Whole>,
    /// The prompt once, and what all choices have taken, those that were dropped among them.
    pub usage: Usage,
}

impl std::fmt::Debug for Choices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Choices({} of {:?})", self.prepared.params.num_candidates(), self.model)
    }
}

impl Choices {
    pub(super) fn start(model: &Arc<ServedModel>, prepared: Prepared) -> Result<Self> {
        let first = model.start(&prepared, 0)?;
        let begun = vec![false; prepared.params.num_candidates() as usize];
        Ok(Choices {
            model: Arc::clone(model),
            prepared,
            running: vec![Some(first)],
            turn: 0,
            prompt_logprobs: Vec::new(),
            begun,
        })
    }

    /// Choices of the answer.
    pub fn num_choices(&self) -> usize {
        self.prepared.params.n as usize
    }

    /// The prompt's tokens, one at least.
    pub fn prompt(&self) -> &[TokenId] {
        &self.prepared.prompt
    }

    pub fn prompt_tokens(&self) -> usize {
        self.prepared.prompt.len()
    }

    /// What of the request's parameters was passed over.
    pub fn warnings(&self) -> &[String] {
        &self.prepared.params.warnings
    }

    fn num_candidates(&self) -> usize {
        self.prepared.params.num_candidates() as usize
    }

    /// All answers at once.
    ///
    /// # Errors
    /// As the stream's.
    pub async fn whole(mut self) -> Result<Answer> {
        let (n, candidates) = (self.num_choices(), self.num_candidates());
        let tells_logprobs = self.prepared.params.logprobs.is_some();
        let mut gathered = vec![Chunk::default(); candidates];
        while let Some(item) = self.next().await {
            let (index, chunk) = item?;
            gathered[index].append(chunk);
        }
        let choices: Option<Vec<Whole>> = gathered.into_iter().map(Chunk::into_whole).collect();
        let mut choices = choices.ok_or_else(|| ServerError::internal("the answer has no end"))?;
        let mut usage = choices[0].finish.usage;
        for choice in &choices[1..] {
            usage.output_tokens += choice.finish.usage.output_tokens;
        }
        if candidates > n {
            // Stable: of equal ones the first.
            choices.sort_by(|a, b| b.cumulative_logprob().total_cmp(&a.cumulative_logprob()));
            choices.truncate(n);
            if !tells_logprobs {
                choices.iter_mut().for_each(|choice| choice.logprobs.clear());
            }
        }
        Ok(Answer { choices, usage })
    }

    /// The next chunk of a choice that has one.
    fn poll_running(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(usize, Chunk)>>> {
        let num_running = self.running.len();
        let mut all_ended = true;
        for step in 0..num_running {
            let index = (self.turn + step) % num_running;
            let Some(generation) = &mut self.running[index] else { continue };
            match Pin::new(generation).poll_next(cx) {
                Poll::Ready(Some(Ok(chunk))) => {
                    self.turn = index + 1;
                    return Poll::Ready(Some(Ok((index, chunk))));
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
                Poll::Ready(None) => self.running[index] = None,
                Poll::Pending => all_ended = false,
            }
        }
        if all_ended { Poll::Ready(None) } else { Poll::Pending }
    }

    /// Starts the other choices, if the time has come. True if it did.
    fn start_others(&mut self) -> Result<bool> {
        let candidates = self.num_candidates();
        let prompt_is_computed = self.running[0].as_ref().is_none_or(Generation::has_begun);
        if self.running.len() == candidates || !prompt_is_computed {
            return Ok(false);
        }
        for index in 1..candidates {
            let generation = self.model.start(&self.prepared, index as u32)?;
            self.running.push(Some(generation));
        }
        Ok(true)
    }
}

impl Stream for Choices {
    type Item = Result<(usize, Chunk)>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut polled = self.poll_running(cx);
        match self.start_others() {
            Ok(false) => {}
            // If there is a chunk the others are polled with the next call.
            Ok(true) => {
                if !matches!(polled, Poll::Ready(Some(_))) {
                    polled = self.poll_running(cx);
                }
            }
            Err(error) => polled = Poll::Ready(Some(Err(error))),
        }
        if let Poll::Ready(Some(Ok((index, chunk)))) = &mut polled {
            let first = !std::mem::replace(&mut self.begun[*index], true);
            match index {
                0 => self.prompt_logprobs.extend_from_slice(&chunk.prompt_logprobs),
                _ if first => chunk.prompt_logprobs.clone_from(&self.prompt_logprobs),
                _ => {}
            }
        }
        if let Poll::Ready(Some(Err(_))) = polled {
            // One that failed takes all with it: half an answer is none.
            self.running.iter_mut().for_each(|generation| *generation = None);
            while self.running.len() < self.num_candidates() {
                self.running.push(None);
            }
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::{Dialect, GenerateRequest, Prompt};
    use super::super::scripted::model;
    use super::*;
    use crate::params::GenerateParams;

    async fn choices(model: &Arc<ServedModel>, prompt: &str, params: &str) -> Choices {
        let params = GenerateParams::from_json("params", params).unwrap();
        model.generate_choices(GenerateRequest::new(Prompt::text(prompt), params, Dialect::Tensors)).await.unwrap()
    }

    #[tokio::test]
    async fn the_prompt_is_computed_once_and_counts_once() {
        let model = model("abc", 1);
        let prompt = "y".repeat(50);
        let answer = choices(&model, &prompt, r#"{"n": 3}"#).await.whole().await.unwrap();
        let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.text).collect();
        assert_eq!(texts, ["abc"; 3]);
        assert_eq!((answer.usage.prompt_tokens, answer.usage.output_tokens), (50, 12));
        let cached: Vec<u32> = answer.choices.iter().map(|choice| choice.finish.usage.cached_tokens).collect();
        assert_eq!(cached, [0, 48, 48], "three blocks of 16 are found");
        let stats = model.engine().stats();
        // Twice the two tokens past the last full block; and of each answer of four the last does not run.
        assert_eq!(stats.computed_tokens, 50 + 2 * 2 + 3 * 3);
    }

    #[tokio::test]
    async fn choices_stream_side_by_side_once_the_first_has_begun() {
        let model = model("abc", 1);
        let mut stream = choices(&model, "hi", r#"{"n": 2}"#).await;
        let mut texts = [String::new(), String::new()];
        let mut finals = [0, 0];
        let mut order = Vec::new();
        while let Some(item) = stream.next().await {
            let (index, chunk) = item.unwrap();
            texts[index] += &chunk.text;
            finals[index] += usize::from(chunk.finish.is_some());
            order.push(index);
        }
        assert_eq!((texts, finals, order[0]), (["abc".to_owned(), "abc".to_owned()], [1, 1], 0));
    }

    #[tokio::test]
    async fn the_best_of_several_are_kept_and_all_are_counted() {
        let model = model("abc", 1);
        let answer = choices(&model, "hi", r#"{"n": 2, "best_of": 4}"#).await.whole().await.unwrap();
        assert_eq!((answer.choices.len(), answer.usage.output_tokens), (2, 16));
        assert!(answer.choices.iter().all(|choice| choice.logprobs.is_empty()), "nobody asked for them");
        let answer = choices(&model, "hi", r#"{"best_of": 2, "logprobs": 1}"#).await.whole().await.unwrap();
        assert_eq!((answer.choices[0].logprobs.len(), answer.choices[0].cumulative_logprob()), (4, -2.0));
    }

    #[tokio::test]
    async fn one_that_fails_takes_all_with_it_and_dropping_cancels_all() {
        let model = model(&"x".repeat(200), 1);
        let mut stream = choices(&model, "hi", r#"{"n": 3, "max_tokens": 200}"#).await;
        for _ in 0..10 {
            stream.next().await.unwrap().unwrap();
        }
        drop(stream);
        let mut stream = choices(&model, "hi", r#"{"n": 3, "max_tokens": 200}"#).await;
        stream.next().await.unwrap().unwrap();
        model.engine().stop();
        let mut errors = 0;
        while let Some(item) = stream.next().await {
            errors += usize::from(item.is_err());
        }
        assert_eq!(errors, 1);
    }
}
