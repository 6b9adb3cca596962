//! A model that serves: its engine, and what turns text into tokens for it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use drafthorse_control::Logprobs;
use drafthorse_engine::{Engine, Request, RequestId};
use drafthorse_worker::grammar::Grammars;
use tokio::sync::{Semaphore, mpsc};

use super::choices::Choices;
use super::defaults::GenerationDefaults;
use super::prepare::Prepared;
use super::request::GenerateRequest;
use super::stream::{Generation, Started};
use crate::error::{Result, ServerError};
use crate::metrics::{Failure, ModelMetrics, ModelView};
use crate::text::{ChatTemplate, Detokenizer, StopStrings, Tokenizer};

/// Grammars compiled at once: one more may wait for one that takes long.
const MAX_COMPILING: usize = 2;

/// The rule by which no text depends on drafts.
const EXACT: &str = "exact";

/// The part of a checkpoint that is about text.
#[derive(Debug)]
pub struct ModelText {
    pub tokenizer: Tokenizer,
    pub chat_template: Option<ChatTemplate>,
    pub defaults: GenerationDefaults,
    /// What compiles grammars for its tokens; `None` if they do not make text one after the other.
    pub grammars: Option<Arc<Grammars>>,
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
        Ok(ModelText::new(tokenizer, chat_template, defaults))
    }

    pub fn new(tokenizer: Tokenizer, chat_template: Option<ChatTemplate>, defaults: GenerationDefaults) -> Self {
        let grammars = tokenizer.token_bytes(&defaults.end_tokens).map(|tokens| Arc::new(Grammars::new(tokens)));
        ModelText { tokenizer, chat_template, defaults, grammars }
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
        Ok(ModelText::new(Tokenizer::of_numbers(size)?, None, defaults))
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
    /// Refuse parameters that are not known.
    strict: bool,
    /// How drafts are verified, if by a rule that takes others than would have been sampled.
    lossy_rule: Option<String>,
    /// Grammars compiled at once.
    pub(super) compiling: Arc<Semaphore>,
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
        ServedModel {
            name: name.into(),
            version,
            text,
            engine,
            metrics,
            created,
            next_id: AtomicU64::new(1),
            strict: false,
            lossy_rule: None,
            compiling: Arc::new(Semaphore::new(MAX_COMPILING)),
        }
    }

    /// Whether parameters that are not known are refused rather than warned of.
    #[must_use]
    pub fn with_strict_parameters(self, strict: bool) -> Self {
        ServedModel { strict, ..self }
    }

    /// By what rule drafts are verified, a `speculate_verify`.
    #[must_use]
    pub fn with_verify_rule(self, rule: &str) -> Self {
        ServedModel { lossy_rule: (rule != EXACT).then(|| rule.to_owned()), ..self }
    }

    pub(super) fn lossy_rule(&self) -> Option<&str> {
        self.lossy_rule.as_deref()
    }

    pub fn is_strict(&self) -> bool {
        self.strict
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

    pub(super) fn grammars(&self) -> Option<&Arc<Grammars>> {
        self.text.grammars.as_ref()
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

    /// Starts a request of one choice. Its answer comes as a stream; dropping that cancels it.
    ///
    /// # Errors
    /// If it can never run, or the engine takes none now. What goes wrong later is in the stream.
    pub async fn generate(self: &Arc<Self>, request: GenerateRequest) -> Result<Generation> {
        let arrived = Instant::now();
        let started = async { self.start(&self.prepare(request, arrived).await?, 0) };
        self.counted(started.await, arrived)
    }

    /// Starts a request of any number of choices.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub async fn generate_choices(self: &Arc<Self>, request: GenerateRequest) -> Result<Choices> {
        let arrived = Instant::now();
        let started = async { Choices::start(self, self.prepare(request, arrived).await?) };
        self.counted(started.await, arrived)
    }

    fn counted<T>(&self, result: Result<T>, arrived: Instant) -> Result<T> {
        if let Err(error) = &result {
            self.metrics.failed(Failure::from(error), arrived.elapsed());
        }
        result
    }

    /// Hands choice `index` of a request to the engine.
    ///
    /// # Errors
    /// If it can never run, or the engine takes none now.
    pub(super) fn start(self: &Arc<Self>, prepared: &Prepared, index: u32) -> Result<Generation> {
        let params = &prepared.params;
        let mut sampling = prepared.sampling.clone();
        sampling.seed = choice_seed(sampling.seed, index);
        let id = RequestId(self.next_id.fetch_add(1, Relaxed));
        let (sender, events) = mpsc::unbounded_channel();
        let stop_tokens = sampling.stop_tokens.clone();
        let (max_tokens, min_tokens) = (sampling.max_tokens as usize, sampling.min_tokens as usize);
        // At most `max_tokens` events, so the channel needs no bound of its own.
        let sink = Box::new(move |event| sender.send((Instant::now(), event)).is_ok());
        let mut request = Request::new(id, prepared.prompt.to_vec(), sampling, sink);
        request.grammar = params.guided.as_ref().map(|guided| guided.grammar.clone());
        request.wants = prepared.wants;
        if index > 0 {
            // Told once is enough; and without them what is cached need not be run again.
            request.wants.prompt_logprobs = Logprobs::None;
        }
        request.priority = params.priority;
        request.queue_timeout = prepared.queue_timeout;
        request.deadline = prepared.timeout.map(|timeout| prepared.arrived + timeout);
        self.engine.submit(request)?;
        let detokenizer: Detokenizer = self.text.tokenizer.detokenizer(!params.keep_special_tokens);
        let stop = StopStrings::new(&params.stop, params.include_stop_str_in_output);
        Ok(Generation::new(Started {
            model: Arc::clone(self),
            id,
            events,
            detokenizer,
            stop,
            stop_strings: params.stop.clone(),
            keep_stop_token: params.include_stop_str_in_output,
            stop_tokens,
            max_tokens,
            min_tokens,
            prompt_tokens: prepared.prompt.len(),
            warnings: params.warnings.clone(),
            arrived: prepared.arrived,
            encoding: prepared.encoding,
            _grammar: prepared.grammar.clone(),
        }))
    }
}

/// The seed of a choice. The first has the request's own, so that it is the answer of a request for one; the others' are words of
/// SplitMix64 (Steele et al. 2014) that starts there.
fn choice_seed(seed: u64, index: u32) -> u64 {
    if index == 0 {
        return seed;
    }
    let mut word = seed.wrapping_add(u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}
