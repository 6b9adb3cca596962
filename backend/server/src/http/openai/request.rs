//! What the bodies of both completions routes have in common.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::super::error::OpenAiError;
use crate::app::App;
use crate::error::{Result, ServerError};
use crate::generate::ServedModel;
use crate::params::{GenerateParams, Given};

const PROMPT: &str = "prompt";
const MAX_TOKENS: &str = "max_tokens";
/// OpenAI's newer name for it.
const MAX_COMPLETION_TOKENS: &str = "max_completion_tokens";

/// Keys that clients send and that change nothing here.
const WITHOUT_EFFECT: [&str; 9] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "request_id",
    "stream_options",
    "parallel_tool_calls",
];

/// A body whose keys are taken one by one; what is left at the end are generation parameters.
pub(super) struct Fields {
    body: Map<String, Value>,
}

impl Fields {
    pub(super) fn new(body: Map<String, Value>) -> Self {
        Fields { body }
    }

    /// Takes a key; `null` is as good as none.
    pub(super) fn take(&mut self, key: &str) -> Option<Value> {
        self.body.shift_remove(key).filter(|value| !value.is_null())
    }

    pub(super) fn flag(&mut self, key: &str) -> Result<bool> {
        match self.take(key) {
            None => Ok(false),
            Some(Value::Bool(value)) => Ok(value),
            Some(_) => Err(ServerError::bad_input(key, "must be true or false")),
        }
    }

    /// Whether no token of output is asked for. The engine makes one at least, so from now on it is that.
    pub(super) fn wants_no_output(&mut self) -> bool {
        let mut wants_none = false;
        for key in [MAX_TOKENS, MAX_COMPLETION_TOKENS] {
            if let Some(most) = self.body.get_mut(key).filter(|most| **most == 0) {
                *most = 1.into();
                wants_none = true;
            }
        }
        wants_none
    }

    /// The model that is asked for; may be left out where there is only one.
    pub(super) fn model(&mut self, app: &App) -> Result<Arc<ServedModel>> {
        match self.take("model") {
            Some(Value::String(name)) => Ok(Arc::clone(&app.repository.model(&name, "")?.served)),
            Some(_) => Err(ServerError::bad_input("model", "must be a string")),
            None => {
                let serving = app.repository.serving();
                match serving.as_slice() {
                    [only] => Ok(Arc::clone(&only.served)),
                    _ => Err(ServerError::bad_input("model", "is missing, and there is not just one model")),
                }
            }
        }
    }

    /// Whether to stream, and whether the stream ends with a chunk of usage.
    pub(super) fn stream(&mut self) -> Result<Streaming> {
        let stream = self.flag("stream")?;
        let options = self.take("stream_options");
        match &options {
            None | Some(Value::Object(_)) => {}
            Some(_) => return Err(ServerError::bad_input("stream_options", "must be an object")),
        }
        if options.is_some() && !stream {
            return Err(ServerError::bad_input("stream_options", "needs stream to be true"));
        }
        let mut include_usage = false;
        for (key, value) in options.as_ref().and_then(Value::as_object).into_iter().flatten() {
            let field = format!("stream_options.{key}");
            let wanted = match value {
                Value::Null => false,
                Value::Bool(wanted) => *wanted,
                _ => return Err(ServerError::bad_input(field, "must be true or false")),
            };
            match key.as_str() {
                "include_usage" => include_usage = wanted,
                // Deltas have no padding to leave out.
                "include_obfuscation" => {}
                _ if !wanted => {}
                _ => return Err(ServerError::unsupported_field(&field, &field)),
            }
        }
        Ok(Streaming { stream, include_usage })
    }

    /// An error in the words of this body: what the prompt, and most tokens of the answer, are called in it.
    pub(super) fn words(&self, prompt: &'static str) -> impl Fn(ServerError) -> OpenAiError + use<> {
        let max_tokens = if self.body.contains_key(MAX_COMPLETION_TOKENS) { MAX_COMPLETION_TOKENS } else { MAX_TOKENS };
        // A parameter of that name is meant itself.
        let named = if self.body.contains_key(PROMPT) { PROMPT } else { prompt };
        move |error| {
            let error = error.renamed(PROMPT, named).renamed(MAX_TOKENS, max_tokens);
            OpenAiError { error, prompt }
        }
    }

    /// What is left, with the names of OpenAI's that differ; `None` of `logprobs` stands for what the route has taken itself.
    ///
    /// # Errors
    /// As [`GenerateParams::from_map`], and for what needs a feature that is not there.
    pub(super) fn params(mut self) -> Result<GenerateParams> {
        if let Some(max_tokens) = self.take(MAX_COMPLETION_TOKENS) {
            let newer = Map::from_iter([(MAX_TOKENS.to_owned(), max_tokens)]);
            let newer = Given { map: newer, place: MAX_COMPLETION_TOKENS };
            self.body = newer.and(Given { map: self.body, place: MAX_TOKENS })?;
        }
        for key in WITHOUT_EFFECT {
            self.body.shift_remove(key);
        }
        for key in [
            "tools",
            "functions",
            "suffix",
            "audio",
            "modalities",
            "reasoning_effort",
            "web_search_options",
            "prediction",
        ] {
            let value = self.take(key);
            let neutral = match &value {
                None => true,
                Some(Value::Array(items)) => items.is_empty() || (key == "modalities" && items == &["text"]),
                Some(Value::String(text)) => text.is_empty(),
                Some(_) => false,
            };
            if !neutral {
                return Err(ServerError::unsupported_field(key, format!("parameter {key}")));
            }
        }
        // Without tools there is nothing to choose.
        for key in ["tool_choice", "function_call"] {
            match self.take(key) {
                None => {}
                Some(Value::String(choice)) if choice == "none" || choice == "auto" => {}
                Some(_) => return Err(ServerError::bad_input(key, "needs tools, which are not supported")),
            }
        }
        GenerateParams::from_map(&self.body)
    }
}

/// How an answer is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streaming {
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}
