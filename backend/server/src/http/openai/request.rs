//! What the bodies of both completions routes have in common.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::app::App;
use crate::error::{Result, ServerError};
use crate::generate::ServedModel;
use crate::params::GenerateParams;

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
        let include_usage = options.is_some_and(|options| options["include_usage"] == true);
        Ok(Streaming { stream, include_usage })
    }

    /// What is left, with the names of OpenAI's that differ; `None` of `logprobs` stands for what the route has taken itself.
    ///
    /// # Errors
    /// As [`GenerateParams::from_map`], and for what needs a feature that is not there.
    pub(super) fn params(mut self) -> Result<GenerateParams> {
        if let Some(max_tokens) = self.take("max_completion_tokens") {
            self.body.insert("max_tokens".into(), max_tokens);
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
                return Err(ServerError::unsupported(format!("parameter {key}")));
            }
        }
        // Without tools there is nothing to choose.
        self.take("tool_choice");
        self.take("function_call");
        GenerateParams::from_map(&self.body)
    }
}

/// How an answer is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streaming {
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}
