//! A model that serves: its engine, and what turns text into tokens for it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use drafthorse_control::{Logprobs, SamplingParams, TokenId, Wants};
use drafthorse_engine::{Engine, Request, RequestId};
use tokio::sync::mpsc;

use super::defaults::GenerationDefaults;
use super::request::{Dialect, GenerateRequest, Prompt};
use super::stream::{Generation, Started};
use crate::error::{Result, ServerError};
use crate::metrics::{Failure, ModelMetrics, ModelView};
use crate::params::GenerateParams;
use crate::text::{ChatTemplate, Detokenizer, StopStrings, Tokenizer};

/// Temperatures below are 0: dividing by them would leave nothing but infinities.
const MIN_TEMPERATURE: f32 = 1e-5;

/// Tokens of an answer that sets no limit, but for chat.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// The part of a checkpoint that is about text.
#[derive(Debug)]
pub struct ModelText {
    pub tokenizer: Tokenizer,
    pub chat_template: Option<ChatTemplate>,
    pub defaults: GenerationDefaults,
}

impl ModelText {
    /// Reads tokenizer, chat template and generation config of a checkpoint folder.
    ///
    /// # Errors
    /// With the path of the file that is missing or broken.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let tokenizer = Tokenizer::from_dir(dir)?;
        let chat_template = ChatTemplate::from_dir(dir)?;
        let defaults = GenerationDefaults::from_dir(dir, &tokenizer)?;
        Ok(ModelText { tokenizer, chat_template, defaults })
    }
}

impl ModelText {
    /// For made-up weights: every token is a number, and none ends a text.
    ///
    /// # Errors
    /// With the path of `config.json`, if it does not say how large the vocabulary is.
    pub fn made_up(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = std::fs::read(&path).map_err(|source| ServerError::Read { path: path.clone(), source })?;
        let config: serde_json::Value = serde_json::from_slice(&text)
            .map_err(|error| ServerError::BadFile { path: path.clone(), reason: error.to_string() })?;
        let Some(size) = config["vocab_size"].as_u64().and_then(|size| u32::try_from(size).ok()) else {
            return Err(ServerError::BadFile { path, reason: "vocab_size is no number".into() });
        };
        let defaults = GenerationDefaults::default();
        Ok(ModelText { tokenizer: Tokenizer::of_numbers(size)?, chat_template: None, defaults })
    }
}

/// One version of a model, ready for requests.
pub struct ServedModel {
    name: String,
    version: u64,
    text: ModelText,
    engine: Engine,
    pub metrics: ModelMetrics,
    /// Seconds since 1970.
    created: u64,
    next_id: AtomicU64,
}

impl std::fmt::Debug for ServedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ServedModel({} version {})", self.name, self.version)
    }
}

impl ServedModel {
    pub fn new(name: impl Into<String>, version: u64, text: ModelText, engine: Engine) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let metrics = ModelMetrics::default();
        ServedModel { name: name.into(), version, text, engine, metrics, created, next_id: AtomicU64::new(1) }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn version(&self) -> u64 {
        self.version
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.text.tokenizer
    }

    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.text.chat_template.as_ref()
    }

    pub fn defaults(&self) -> &GenerationDefaults {
        &self.text.defaults
    }

    /// When it was loaded, in seconds since 1970.
    pub fn created(&self) -> u64 {
        self.created
    }

    /// Most tokens of prompt and answer together: what the model and the KV cache hold.
    pub fn max_len(&self) -> usize {
        let limits = self.engine.limits();
        limits.max_model_len.min(limits.max_kv_tokens)
    }

    /// What the metrics page shows of it.
    pub fn view<'a>(&'a self, version: &'a str) -> ModelView<'a> {
        ModelView { name: &self.name, version, metrics: &self.metrics, engine: self.engine.stats() }
    }

    /// Starts a request. Its answer comes as a stream; dropping that cancels it.
    ///
    /// # Errors
    /// If it can never run, or the engine takes none now. What goes wrong later is in the stream.
    pub async fn generate(self: &Arc<Self>, request: GenerateRequest) -> Result<Generation> {
        let arrived = Instant::now();
        let result = self.start(request, arrived).await;
        if let Err(error) = &result {
            self.metrics.failed(Failure::from(error), arrived.elapsed());
        }
        result
    }

    async fn start(self: &Arc<Self>, request: GenerateRequest, arrived: Instant) -> Result<Generation> {
        request.params.check()?;
        let prompt = self.prompt_tokens(request.prompt).await?;
        let encoding = arrived.elapsed();
        let prompt_tokens = prompt.len();
        let params = request.params;
        let sampling = self.sampling(&params, request.dialect, prompt_tokens)?;
        let wants = Wants { logprobs: wanted(params.logprobs), prompt_logprobs: wanted(params.prompt_logprobs) };

        let id = RequestId(self.next_id.fetch_add(1, Relaxed));
        let (sender, events) = mpsc::unbounded_channel();
        let stop_tokens = sampling.stop_tokens.clone();
        let (max_tokens, min_tokens) = (sampling.max_tokens as usize, sampling.min_tokens as usize);
        // At most `max_tokens` events, so the channel needs no bound of its own.
        let sink = Box::new(move |event| sender.send((Instant::now(), event)).is_ok());
        let mut engine_request = Request::new(id, prompt, sampling, sink);
        engine_request.wants = wants;
        engine_request.priority = params.priority;
        engine_request.queue_timeout = request.queue_timeout;
        engine_request.deadline = request.timeout.map(|timeout| arrived + timeout);
        self.engine.submit(engine_request)?;
        let detokenizer: Detokenizer = self.text.tokenizer.detokenizer(!params.keep_special_tokens);
        let stop = StopStrings::new(&params.stop, params.include_stop_str_in_output);
        Ok(Generation::new(Started {
            model: Arc::clone(self),
            id,
            events,
            detokenizer,
            stop,
            stop_strings: params.stop,
            keep_stop_token: params.include_stop_str_in_output,
            stop_tokens,
            max_tokens,
            min_tokens,
            prompt_tokens,
            warnings: params.warnings,
            arrived,
            encoding,
        }))
    }

    async fn prompt_tokens(&self, prompt: Prompt) -> Result<Vec<TokenId>> {
        let (text, add_special_tokens) = match prompt {
            Prompt::Tokens(tokens) => return self.check_prompt(tokens),
            Prompt::Text(text) => (text, true),
            Prompt::Rendered(text) => (text, false),
        };
        // Megabytes too much need not be cut into tokens to know it.
        let fewest = self.text.tokenizer.fewest_tokens(text.len());
        if fewest >= self.max_len() {
            let max = self.max_len();
            let reason =
                format!("has at least {fewest} tokens, the model takes at most {max} with at least one for the answer");
            return Err(ServerError::bad_input("prompt", reason));
        }
        let tokens = self.text.tokenizer.encode(text, add_special_tokens).await?;
        self.check_prompt(tokens)
    }

    fn check_prompt(&self, tokens: Vec<TokenId>) -> Result<Vec<TokenId>> {
        if tokens.is_empty() {
            return Err(ServerError::bad_input("prompt", "is empty, the model needs at least one token to continue"));
        }
        if tokens.len() >= self.max_len() {
            return Err(ServerError::PromptTooLong { tokens: tokens.len(), max: self.max_len() });
        }
        Ok(tokens)
    }

    /// Fills in what the request left open.
    fn sampling(&self, params: &GenerateParams, dialect: Dialect, prompt_tokens: usize) -> Result<SamplingParams> {
        let vocab_size = self.engine.limits().vocab_size;
        let biased = params.logit_bias.iter().map(|(id, _)| ("logit_bias", id));
        let mut named = params.stop_token_ids.iter().map(|id| ("stop_token_ids", id)).chain(biased);
        if let Some((field, id)) = named.find(|(_, id)| **id >= vocab_size) {
            return Err(ServerError::bad_input(field, format!("has token {id}, the vocabulary has {vocab_size}")));
        }

        let silent = GenerationDefaults::default();
        let defaults = if dialect == Dialect::Tensors { &silent } else { &self.text.defaults };
        let temperature = params.temperature.or(defaults.temperature).unwrap_or(1.0);
        let mut stop_tokens = params.stop_token_ids.clone();
        if !params.ignore_eos {
            stop_tokens.extend(self.text.defaults.end_tokens.iter().filter(|&&id| id < vocab_size));
        }
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        let room = (self.max_len() - prompt_tokens) as u32;
        let silent_max = if dialect == Dialect::Chat { room } else { DEFAULT_MAX_TOKENS.max(params.min_tokens) };
        let max_tokens = params.max_tokens.unwrap_or(silent_max).min(room);
        Ok(SamplingParams {
            temperature: if temperature < MIN_TEMPERATURE { 0.0 } else { temperature },
            top_k: params.top_k.or(defaults.top_k).unwrap_or(0),
            top_p: params.top_p.or(defaults.top_p).unwrap_or(1.0),
            min_p: params.min_p.or(defaults.min_p).unwrap_or(0.0),
            repetition_penalty: params.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            presence_penalty: params.presence_penalty.unwrap_or(0.0),
            frequency_penalty: params.frequency_penalty.unwrap_or(0.0),
            logit_bias: params.logit_bias.clone(),
            seed: params.seed.unwrap_or_else(fresh_seed),
            max_tokens,
            min_tokens: params.min_tokens.min(max_tokens),
            stop_tokens,
        })
    }
}

fn wanted(top: Option<u32>) -> Logprobs {
    top.map_or(Logprobs::None, Logprobs::Top)
}

fn fresh_seed() -> u64 {
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    // Folded, for a few bits of each half are fixed.
    high ^ low.rotate_left(32)
}
