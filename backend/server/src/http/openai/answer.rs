//! Answers of both completions routes: gathered into one object, or as events while they come.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use drafthorse_engine::Usage;
use futures::stream::SelectAll;
use futures::{Stream, StreamExt};
use serde_json::{Value, json};

use super::super::error::OpenAiError;
use super::super::sse;
use super::request::Streaming;
use crate::app::Admission;
use crate::error::{Result, ServerError};
use crate::generate::{Choices, Chunk, Finish, ServedModel, StopCause};

/// How one of the routes writes a choice.
pub(super) trait Form: Send + 'static {
    /// The object's name, of the whole answer and of a chunk.
    const OBJECT: [&'static str; 2];

    /// A choice of the whole answer: what `chunk` has of text and log-probabilities.
    fn choice(&mut self, index: usize, chunk: &Chunk) -> Value;

    /// Whether the output is not told, though the engine made some.
    fn is_prompt_alone(&self) -> bool {
        false
    }

    /// What the whole answer says of its prompt, beside the choices.
    fn prompt_logprobs(&mut self) -> Option<Value> {
        None
    }

    /// The choices of the events that a chunk makes; `first` if it is the first of its choice.
    fn deltas(&mut self, index: usize, chunk: &Chunk, first: bool) -> Vec<Value>;
}

/// What all parts of an answer begin with.
struct Head {
    id: String,
    created: u64,
    model: String,
}

impl Head {
    fn new(prefix: &str, model: &ServedModel) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Head { id: format!("{prefix}-{}", uuid::Uuid::new_v4().simple()), created, model: model.name().into() }
    }

    fn object(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": Value::Array(choices)})
    }
}

/// Answers with the choices of each prompt, numbered from the first prompt's first to the last one's last.
///
/// # Errors
/// As the choices'. Of a stream only what goes wrong before its first chunk.
pub(super) async fn answer<F: Form>(
    prefix: &str,
    model: &Arc<ServedModel>,
    prompts: Vec<Choices>,
    form: F,
    streaming: Streaming,
    admission: Admission,
) -> Result<Response> {
    let head = Head::new(prefix, model);
    if streaming.stream {
        let events = Box::pin(stream(head, prompts, form, streaming.include_usage, admission)).await?;
        return Ok(sse::response(StatusCode::OK, events));
    }
    let _admission = admission;
    Ok(Json(whole(&head, prompts, form).await?).into_response())
}

async fn whole<F: Form>(head: &Head, prompts: Vec<Choices>, mut form: F) -> Result<Value> {
    let mut choices = Vec::new();
    let mut usage = Usage::default();
    let mut warnings = Vec::new();
    for prompt in prompts {
        warnings = prompt.warnings().to_vec();
        let answer = prompt.whole().await?;
        add_usage(&mut usage, &answer.usage);
        for whole in answer.choices {
            let mut chunk = Chunk::from(whole);
            if form.is_prompt_alone() {
                chunk = Chunk { prompt_logprobs: chunk.prompt_logprobs, ..Chunk::default() };
            }
            let mut choice = form.choice(choices.len(), &chunk);
            match form.is_prompt_alone() {
                true => (choice["finish_reason"], choice["stop_reason"]) = (json!("length"), Value::Null),
                false => add_finish(&mut choice, chunk.finish.as_ref()),
            }
            choices.push(choice);
        }
    }
    if form.is_prompt_alone() {
        usage = Usage { prompt_tokens: usage.prompt_tokens, cached_tokens: usage.cached_tokens, ..Usage::default() };
    }
    let mut object = head.object(F::OBJECT[0], choices);
    object["usage"] = usage_json(&usage);
    if let Some(logprobs) = form.prompt_logprobs() {
        object["prompt_logprobs"] = logprobs;
    }
    if !warnings.is_empty() {
        object["warnings"] = json!(warnings);
    }
    Ok(object)
}

/// The events of an answer, once the first chunk is there: until then an error is the response's status.
async fn stream<F: Form>(
    head: Head,
    prompts: Vec<Choices>,
    form: F,
    include_usage: bool,
    admission: Admission,
) -> Result<impl Stream<Item = Bytes> + Send + 'static> {
    // All prompts have as many.
    let per_prompt = prompts.first().map_or(1, Choices::num_choices);
    let begun = vec![false; prompts.len() * per_prompt];
    let warnings = prompts.first().map_or_else(Vec::new, |choices| choices.warnings().to_vec());
    let mut chunks = SelectAll::new();
    for (prompt, choices) in prompts.into_iter().enumerate() {
        let first = prompt * per_prompt;
        chunks.push(Box::pin(choices.map(move |item| item.map(|(index, chunk)| (first + index, chunk)))));
    }
    let first = match chunks.next().await {
        Some(item) => item?,
        None => return Err(ServerError::internal("the answer has no end")),
    };
    let usage = Usage::default();
    let events = Events {
        head,
        form,
        include_usage,
        begun,
        warnings,
        per_prompt,
        usage,
        next: Some(first),
        _admission: admission,
    };
    let state = Some((events, chunks));
    Ok(futures::stream::unfold(state, |state| async {
        let (mut events, mut chunks) = state?;
        let item = match events.next.take() {
            Some(first) => Some(Ok(first)),
            None => chunks.next().await,
        };
        match item {
            Some(Ok((index, chunk))) => Some((events.chunk(index, &chunk), Some((events, chunks)))),
            Some(Err(error)) => Some((failed(error), None)),
            None => Some((events.last(), None)),
        }
    }))
}

struct Events<F> {
    head: Head,
    form: F,
    include_usage: bool,
    /// Whether each choice has had its first chunk.
    begun: Vec<bool>,
    /// What of the request's parameters was passed over; told with the first event.
    warnings: Vec<String>,
    /// Choices of each prompt.
    per_prompt: usize,
    usage: Usage,
    next: Option<(usize, Chunk)>,
    _admission: Admission,
}

impl<F: Form> Events<F> {
    fn chunk(&mut self, index: usize, chunk: &Chunk) -> Bytes {
        let first = !std::mem::replace(&mut self.begun[index], true);
        let mut choices = self.form.deltas(index, chunk, first);
        if let (Some(finish), Some(choice)) = (&chunk.finish, choices.last_mut()) {
            // A prompt counts once, with its first choice.
            let is_first = index.is_multiple_of(self.per_prompt);
            let of_others = Usage { output_tokens: finish.usage.output_tokens, ..Usage::default() };
            add_usage(&mut self.usage, if is_first { &finish.usage } else { &of_others });
            add_finish(choice, Some(finish));
        }
        let mut bytes = BytesMut::new();
        for choice in choices {
            let mut object = self.head.object(F::OBJECT[1], vec![choice]);
            if self.include_usage {
                object["usage"] = Value::Null;
            }
            if !self.warnings.is_empty() {
                object["warnings"] = json!(std::mem::take(&mut self.warnings));
            }
            bytes.put(sse::event(&object));
        }
        bytes.freeze()
    }

    fn last(&self) -> Bytes {
        let mut bytes = BytesMut::new();
        if self.include_usage {
            let mut object = self.head.object(F::OBJECT[1], Vec::new());
            object["usage"] = usage_json(&self.usage);
            bytes.put(sse::event(&object));
        }
        bytes.put(sse::done());
        bytes.freeze()
    }
}

fn failed(error: ServerError) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put(sse::event(&OpenAiError::from(error).body()));
    bytes.put(sse::done());
    bytes.freeze()
}

fn add_finish(choice: &mut Value, finish: Option<&Finish>) {
    let Some(finish) = finish else { return };
    choice["finish_reason"] = finish.reason.name().into();
    choice["stop_reason"] = match &finish.cause {
        None => Value::Null,
        Some(StopCause::Text(text)) => text.as_str().into(),
        Some(StopCause::Token(id)) => (*id).into(),
    };
}

fn add_usage(sum: &mut Usage, usage: &Usage) {
    sum.prompt_tokens += usage.prompt_tokens;
    sum.output_tokens += usage.output_tokens;
    sum.cached_tokens += usage.cached_tokens;
    sum.drafts_verified += usage.drafts_verified;
    sum.drafts_accepted += usage.drafts_accepted;
}

fn usage_json(usage: &Usage) -> Value {
    let mut json = json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    });
    // OpenAI's fields for predicted outputs.
    if usage.drafts_verified > 0 {
        json["completion_tokens_details"] = json!({
            "accepted_prediction_tokens": usage.drafts_accepted,
            "rejected_prediction_tokens": usage.drafts_verified - usage.drafts_accepted,
        });
    }
    json
}
