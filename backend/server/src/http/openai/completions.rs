//! Completions: plain prompts, as text or tokens, one or several.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use drafthorse_control::TokenId;
use serde_json::{Value, json};

use super::super::body::Body;
use super::super::error::OpenAiError;
use super::answer::{Form, answer};
use super::logprobs;
use super::request::Fields;
use crate::app::App;
use crate::error::{Result, ServerError};
use crate::generate::logprobs::of_prompt;
use crate::generate::{Chunk, Dialect, GenerateRequest, Prompt, ServedModel};

/// Most prompts of a request.
const MAX_PROMPTS: usize = 64;

pub(super) async fn completions(State(app): State<Arc<App>>, body: Body) -> Result<Response, OpenAiError> {
    let fields = Fields::new(body.object()?);
    let words = fields.words("prompt");
    Box::pin(complete(&app, fields)).await.map_err(words)
}

async fn complete(app: &App, mut fields: Fields) -> Result<Response> {
    let admission = app.admit()?;
    let model = fields.model(app)?;
    let streaming = fields.stream()?;
    let prompts = prompts(fields.take("prompt"))?;
    let echo = fields.flag("echo")?;
    // As those ask who want the log-probabilities of a text.
    let is_prompt_alone = echo && fields.wants_no_output();
    if is_prompt_alone && streaming.stream {
        return Err(ServerError::bad_input("stream", "must be false where max_tokens is 0"));
    }
    let mut params = fields.params()?;
    if streaming.stream {
        params.check_stream()?;
    }
    model.check_choices(prompts.len(), &params)?;
    let wants_logprobs = params.logprobs.is_some();
    let wants_prompt_logprobs = params.prompt_logprobs.is_some();
    let echoes_logprobs = echo && wants_logprobs;
    if echoes_logprobs && !wants_prompt_logprobs {
        params.prompt_logprobs = params.logprobs;
    }
    let mut choices = Vec::with_capacity(prompts.len() * params.n as usize);
    let mut answers = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let text = match &prompt {
            Prompt::Text(text) | Prompt::Rendered(text) if echo => text.to_string(),
            Prompt::Tokens(tokens) if echo => model.tokenizer().decode(tokens, true),
            _ => String::new(),
        };
        // They run side by side; if one is refused, the others end with the answer.
        let request = GenerateRequest::new(prompt, params.clone(), Dialect::Completions);
        let answer = model.generate_choices(request).await?;
        let first_token = answer.prompt().first().copied().filter(|_| echoes_logprobs);
        choices.extend((0..params.n).map(|_| Choice { echo: text.clone(), num_chars: 0, first_token }));
        answers.push(answer);
    }
    let form = CompletionForm {
        model: Arc::clone(&model),
        wants_logprobs,
        echoes_logprobs,
        wants_prompt_logprobs,
        is_prompt_alone,
        choices,
    };
    answer("cmpl", &model, answers, form, streaming, admission).await
}

/// A text, a list of texts, a list of tokens, or a list of such lists.
fn prompts(prompt: Option<Value>) -> Result<Vec<Prompt>> {
    let bad = |reason: &str| ServerError::bad_input("prompt", reason);
    let must = "must be a string, a list of strings, a list of token ids, or a list of such lists";
    let prompts = match prompt {
        None => return Err(bad("is missing")),
        Some(Value::String(text)) => vec![Prompt::text(text)],
        Some(Value::Array(items)) => match items.first() {
            None => return Err(bad("must not be empty")),
            Some(Value::Number(_)) => vec![tokens(&items).ok_or_else(|| bad(must))?],
            Some(_) => {
                let prompt = |item: &Value| match item {
                    Value::String(text) => Some(Prompt::text(text.as_str())),
                    Value::Array(ids) => tokens(ids),
                    _ => None,
                };
                items.iter().map(prompt).collect::<Option<Vec<_>>>().ok_or_else(|| bad(must))?
            }
        },
        Some(_) => return Err(bad(must)),
    };
    if prompts.len() > MAX_PROMPTS {
        return Err(bad(&format!("has {} prompts, at most {MAX_PROMPTS} may be given", prompts.len())));
    }
    Ok(prompts)
}

fn tokens(ids: &[Value]) -> Option<Prompt> {
    let id = |id: &Value| id.as_u64().and_then(|id| TokenId::try_from(id).ok());
    ids.iter().map(id).collect::<Option<_>>().map(Prompt::Tokens)
}

struct Choice {
    /// Put in front of the first text.
    echo: String,
    /// Characters of the answer so far, where log-probabilities say a token stands.
    num_chars: usize,
    /// The prompt's first token, which has no log-probability, until it was told.
    first_token: Option<TokenId>,
}

struct CompletionForm {
    model: Arc<ServedModel>,
    wants_logprobs: bool,
    /// Those of the prompt stand among those of the answer.
    echoes_logprobs: bool,
    /// Those of the prompt stand beside the answer.
    wants_prompt_logprobs: bool,
    is_prompt_alone: bool,
    choices: Vec<Choice>,
}

impl Form for CompletionForm {
    const OBJECT: [&'static str; 2] = ["text_completion", "text_completion"];

    fn is_prompt_alone(&self) -> bool {
        self.is_prompt_alone
    }

    fn choice(&mut self, index: usize, chunk: &Chunk) -> Value {
        let choice = &mut self.choices[index];
        let text = std::mem::take(&mut choice.echo) + &chunk.text;
        let tokenizer = self.model.tokenizer();
        let logprobs = if self.echoes_logprobs {
            let all = [&chunk.prompt_logprobs[..], &chunk.logprobs].concat();
            logprobs::of_completion(tokenizer, choice.first_token.take(), &all, choice.num_chars)
        } else if self.wants_logprobs {
            logprobs::of_completion(tokenizer, None, &chunk.logprobs, choice.num_chars)
        } else {
            Value::Null
        };
        choice.num_chars += text.chars().count();
        let mut answer = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": null});
        if self.wants_prompt_logprobs {
            answer["prompt_logprobs"] = of_prompt(tokenizer, &chunk.prompt_logprobs);
        }
        answer
    }

    fn deltas(&mut self, index: usize, chunk: &Chunk, first: bool) -> Vec<Value> {
        let has_logprobs = self.wants_logprobs && !chunk.logprobs.is_empty()
            || self.echoes_logprobs && !chunk.prompt_logprobs.is_empty();
        let says = !chunk.text.is_empty() || has_logprobs || chunk.finish.is_some();
        let echoes = first && !self.choices[index].echo.is_empty();
        if says || echoes { vec![self.choice(index, chunk)] } else { Vec::new() }
    }
}
