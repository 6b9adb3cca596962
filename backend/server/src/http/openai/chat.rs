//! Chat completions: messages through the checkpoint's template.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::super::body::Body;
use super::super::error::OpenAiError;
use super::answer::{Form, answer};
use super::logprobs;
use super::request::Fields;
use crate::app::App;
use crate::error::{Result, ServerError};
use crate::generate::logprobs::of_prompt;
use crate::generate::{Chunk, Dialect, GenerateRequest, Prompt, ServedModel};
use crate::text::chat::Chat;

pub(super) async fn chat_completions(State(app): State<Arc<App>>, body: Body) -> Result<Response, OpenAiError> {
    let fields = Fields::new(body.object()?);
    let words = fields.words("messages");
    Box::pin(complete(&app, fields)).await.map_err(words)
}

async fn complete(app: &App, mut fields: Fields) -> Result<Response> {
    let admission = app.admit()?;
    let model = fields.model(app)?;
    let streaming = fields.stream()?;
    let chat = chat(&mut fields)?;
    let wants_logprobs = fields.flag("logprobs")?;
    let top_logprobs = fields.take("top_logprobs");
    if top_logprobs.is_some() && !wants_logprobs {
        return Err(ServerError::bad_input("top_logprobs", "needs logprobs to be true"));
    }
    let mut params = fields.params()?;
    if wants_logprobs {
        // It has the range of the parameter that it fills in, but a name of its own.
        params.set("logprobs", &top_logprobs.unwrap_or(json!(0))).map_err(|error| match error {
            ServerError::BadInput { reason, .. } => ServerError::bad_input("top_logprobs", reason),
            other => other,
        })?;
    }
    let prompt = Prompt::Rendered(render(&model, chat).await?.into());
    if streaming.stream {
        params.check_stream()?;
    }
    let wants_prompt_logprobs = params.prompt_logprobs.is_some();
    let choices = model.generate_choices(GenerateRequest::new(prompt, params, Dialect::Chat)).await?;
    let form = ChatForm { model: Arc::clone(&model), wants_logprobs, wants_prompt_logprobs, prompt_logprobs: None };
    answer("chatcmpl", &model, vec![choices], form, streaming, admission).await
}

/// The conversation as the model's template has it. A template may take long, so it does not run where others' streams do.
async fn render(model: &Arc<ServedModel>, chat: Chat) -> Result<String> {
    let model = Arc::clone(model);
    let rendering = tokio::task::spawn_blocking(move || match model.chat_template() {
        Some(template) => template.render(&chat),
        None => {
            let reason = "the model has no chat template: send a prompt to /v1/completions instead";
            Err(ServerError::bad_input("messages", reason))
        }
    });
    rendering.await.map_err(ServerError::internal)?
}

fn chat(fields: &mut Fields) -> Result<Chat> {
    let messages = match fields.take("messages") {
        Some(Value::Array(messages)) if !messages.is_empty() => messages,
        Some(Value::Array(_)) => return Err(ServerError::bad_input("messages", "must not be empty")),
        Some(_) => return Err(ServerError::bad_input("messages", "must be a list")),
        None => return Err(ServerError::bad_input("messages", "is missing")),
    };
    let add_generation_prompt = match fields.take("add_generation_prompt") {
        None => true,
        Some(Value::Bool(add)) => add,
        Some(_) => return Err(ServerError::bad_input("add_generation_prompt", "must be true or false")),
    };
    if fields.flag("continue_final_message")? {
        return Err(ServerError::unsupported_field("continue_final_message", "parameter continue_final_message"));
    }
    if fields.take("chat_template").is_some() {
        return Err(ServerError::unsupported_field("chat_template", "a chat_template of the request's own"));
    }
    let variables = match fields.take("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(variables)) => variables,
        Some(_) => return Err(ServerError::bad_input("chat_template_kwargs", "must be an object")),
    };
    if let Some(name) = OF_THE_REQUEST.into_iter().find(|name| variables.contains_key(*name)) {
        let reason = format!("is a field of the request itself: a template takes {name} from there");
        return Err(ServerError::bad_input(format!("chat_template_kwargs.{name}"), reason));
    }
    Ok(Chat { messages, tools: None, documents: fields.take("documents"), add_generation_prompt, variables })
}

/// Variables of a template that no others may stand for.
const OF_THE_REQUEST: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

struct ChatForm {
    model: Arc<ServedModel>,
    wants_logprobs: bool,
    wants_prompt_logprobs: bool,
    /// As the answer has them beside its choices.
    prompt_logprobs: Option<Value>,
}

impl ChatForm {
    fn logprobs(&self, chunk: &Chunk) -> Value {
        if self.wants_logprobs { logprobs::of_chat(self.model.tokenizer(), &chunk.logprobs) } else { Value::Null }
    }
}

impl Form for ChatForm {
    const OBJECT: [&'static str; 2] = ["chat.completion", "chat.completion.chunk"];

    fn choice(&mut self, index: usize, chunk: &Chunk) -> Value {
        if self.wants_prompt_logprobs {
            self.prompt_logprobs = Some(of_prompt(self.model.tokenizer(), &chunk.prompt_logprobs));
        }
        let message = json!({"role": "assistant", "content": chunk.text, "refusal": null});
        json!({"index": index, "message": message, "logprobs": self.logprobs(chunk)})
    }

    fn prompt_logprobs(&mut self) -> Option<Value> {
        self.prompt_logprobs.take()
    }

    fn deltas(&mut self, index: usize, chunk: &Chunk, first: bool) -> Vec<Value> {
        let choice = |delta: Value, logprobs: Value| json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null});
        let mut choices = Vec::with_capacity(3);
        if first {
            choices.push(choice(json!({"role": "assistant", "content": ""}), Value::Null));
        }
        if !chunk.text.is_empty() || (self.wants_logprobs && !chunk.logprobs.is_empty()) {
            choices.push(choice(json!({"content": chunk.text}), self.logprobs(chunk)));
        }
        if chunk.finish.is_some() {
            choices.push(choice(json!({}), Value::Null));
        }
        choices
    }
}
