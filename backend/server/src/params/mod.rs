//! Parameters of a generation as callers write them: one parser and one set of checks for every door.
//!
//! Names and meanings are vLLM's. Numbers may come as strings (`"temperature": "0.1"`), as load generators write them. A parameter
//! that is not given stays open: the model's defaults fill it in (see [`crate::generate`]).

mod field;
mod gbnf;
mod guided;
mod merge;
mod tags;
#[cfg(test)]
mod tests;

use drafthorse_control::TokenId;
use serde_json::{Map, Value};

use crate::error::{Result, ServerError, nearest_hint};
use field::{Field, MAX_STOP_TOKENS, shown};
pub use guided::Guided;
pub use merge::{Given, key_given_twice};

/// Most choices of a request, those that `best_of` drops among them.
const MAX_CHOICES: u32 = 128;

/// The parameter that bounds drafts.
pub(crate) const MAX_DRAFTS: &str = "speculate_max_draft_token_num";

/// What must not come in an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BadWord {
    /// With and without a space before it.
    Text(String),
    Tokens(Vec<TokenId>),
}

/// How a long prompt is cut, from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncate {
    /// To what the model holds beside the answer.
    ToFit,
    /// To so many tokens at most, and to fit.
    ToLast(u32),
}

/// What a caller set. `None` is for the model to decide.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateParams {
    /// Choices. The first has the seed itself, choice `i` a seed of its own that follows from it and from `i`.
    pub n: u32,
    /// Choices that are made, of which the `n` likeliest are the answer.
    pub best_of: Option<u32>,
    pub temperature: Option<f32>,
    /// 0 keeps all.
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub typical_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Vec<(TokenId, f32)>,
    pub bad_words: Vec<BadWord>,
    /// In ascending order; empty allows all.
    pub allowed_token_ids: Vec<TokenId>,
    /// What the answer must match.
    pub guided: Option<Guided>,
    pub truncate_prompt_tokens: Option<Truncate>,
    /// Without it each request draws its own.
    pub seed: Option<u64>,
    pub max_tokens: Option<u32>,
    pub min_tokens: u32,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<TokenId>,
    /// Go on past the model's own end tokens.
    pub ignore_eos: bool,
    /// Log-probabilities of each token, and of so many likeliest ones.
    pub logprobs: Option<u32>,
    pub prompt_logprobs: Option<u32>,
    /// Leave special tokens in the text.
    pub keep_special_tokens: bool,
    pub include_stop_str_in_output: bool,
    /// 1 goes first; 0 is the model's default level.
    pub priority: u32,
    /// Most drafts in a step, if the model makes more.
    pub max_drafts: Option<u32>,
    /// Make no drafts, whatever [`max_drafts`](Self::max_drafts) says.
    pub no_drafts: bool,
    /// What was not understood and passed over, a sentence each.
    pub warnings: Vec<String>,
}

impl Default for GenerateParams {
    /// One choice, and the model decides.
    fn default() -> Self {
        GenerateParams {
            n: 1,
            best_of: None,
            temperature: None,
            top_k: None,
            top_p: None,
            min_p: None,
            typical_p: None,
            repetition_penalty: None,
            presence_penalty: None,
            frequency_penalty: None,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            allowed_token_ids: Vec::new(),
            guided: None,
            truncate_prompt_tokens: None,
            seed: None,
            max_tokens: None,
            min_tokens: 0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            keep_special_tokens: false,
            include_stop_str_in_output: false,
            priority: 0,
            max_drafts: None,
            no_drafts: false,
            warnings: Vec::new(),
        }
    }
}

/// What is known, in the order that messages list it.
const KNOWN: [&str; 40] = [
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "guided_decoding",
    "guided_whitespace_pattern",
    "structured_outputs",
    "response_format",
    "structural_tag",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "priority",
    MAX_DRAFTS,
    "speculate_method",
    "spaces_between_special_tokens",
    "detokenize",
    "guided_decoding_backend",
];

/// What vLLM has and this server has not, refused by name: passing over it would change the answer.
const NOT_SUPPORTED: [&str; 8] = [
    "json_schema",
    "lora_name",
    "lora_request",
    "use_beam_search",
    "beam_width",
    "logits_processors",
    "extra_args",
    "length_penalty",
];

/// A JSON object in a text, the `sampling_parameters` of vLLM's tensors; `null` is an empty one. `field` is its name in messages.
///
/// # Errors
/// `BadJson` with the position, or `BadInput` if it is no object, or has a key twice.
pub fn object(field: &str, text: &str) -> Result<Map<String, Value>> {
    match serde_json::from_str(text).map_err(|error| ServerError::bad_json(field, &error))? {
        Value::Object(map) => match key_given_twice(text.as_bytes()) {
            Some(key) => Err(ServerError::bad_input(field, format!("has {key} twice"))),
            None => Ok(map),
        },
        Value::Null => Ok(Map::new()),
        other => Err(ServerError::bad_input(field, format!("must be a JSON object, is {}", shown(&other)))),
    }
}

impl GenerateParams {
    /// Parses a JSON object; `field` is its name in messages.
    ///
    /// # Errors
    /// As [`object`] and [`from_map`](Self::from_map).
    #[cfg(test)]
    pub fn from_json(field: &str, text: &str) -> Result<Self> {
        Self::from_map(&object(field, text)?)
    }

    /// Reads all keys of `map`. A key that is not known is noted in [`warnings`](Self::warnings), for a strict model to refuse;
    /// `null` says nothing.
    ///
    /// # Errors
    /// `BadInput` with the field, its value and its limit; `Unsupported` for what is known and not there yet.
    pub fn from_map(map: &Map<String, Value>) -> Result<Self> {
        let mut params = GenerateParams::default();
        for (key, value) in map {
            if !params.set(key, value)? {
                params.warnings.push(format!("{key}: no such parameter{}", nearest_hint(key, KNOWN)));
            }
        }
        if let Some(pattern) = map.get("guided_whitespace_pattern").filter(|pattern| !pattern.is_null()) {
            guided::set_whitespace(&mut params.guided, "guided_whitespace_pattern", pattern)?;
        }
        params.check()?;
        Ok(params)
    }

    /// Sets one parameter; false if there is none of that name.
    ///
    /// # Errors
    /// As [`from_map`](Self::from_map). [`check`](Self::check) finds what only several together can have wrong.
    pub fn set(&mut self, key: &str, value: &Value) -> Result<bool> {
        if NOT_SUPPORTED.contains(&key) {
            let neutral = match value {
                Value::Null | Value::Bool(false) => true,
                // TensorRT-LLM's clients write no bad words so.
                Value::String(text) => text.is_empty(),
                Value::Array(items) => items.is_empty(),
                other => key == "length_penalty" && other.as_f64() == Some(1.0),
            };
            return if neutral {
                Ok(true)
            } else {
                Err(ServerError::unsupported_field(key, format!("parameter {key}")))
            };
        }
        if value.is_null() {
            return Ok(KNOWN.contains(&key));
        }
        let field = Field { key, value };
        match key {
            "n" => self.n = field.integer(1, i64::from(MAX_CHOICES))? as u32,
            "best_of" => self.best_of = Some(field.integer(1, i64::from(MAX_CHOICES))? as u32),
            "temperature" => self.temperature = Some(field.float("0 or more", |t| t >= 0.0)?),
            "top_p" => self.top_p = Some(field.float("in (0, 1]", |p| p > 0.0 && p <= 1.0)?),
            "min_p" => self.min_p = Some(field.float("in [0, 1]", |p| (0.0..=1.0).contains(&p))?),
            "typical_p" => self.typical_p = Some(field.float("in (0, 1]", |p| p > 0.0 && p <= 1.0)?),
            // -1 is vLLM's way to say all.
            "top_k" => self.top_k = Some(field.integer(-1, i64::from(i32::MAX))?.max(0) as u32),
            "max_tokens" => self.max_tokens = Some(field.integer(1, i64::from(i32::MAX))? as u32),
            "min_tokens" => self.min_tokens = field.integer(0, i64::from(i32::MAX))? as u32,
            "stop" => self.stop = field.stop_strings()?,
            "stop_token_ids" => self.stop_token_ids = field.token_ids(MAX_STOP_TOKENS)?,
            "ignore_eos" => self.ignore_eos = field.boolean()?,
            "seed" => self.seed = field.seed()?,
            "presence_penalty" => self.presence_penalty = Some(field.penalty()?),
            "frequency_penalty" => self.frequency_penalty = Some(field.penalty()?),
            // Logits are multiplied or divided by it, and stay finite so.
            "repetition_penalty" => {
                self.repetition_penalty = Some(field.float("in [0.01, 100]", |p| (0.01..=100.0).contains(&p))?);
            }
            "logit_bias" => self.logit_bias = field.logit_bias()?,
            "bad_words" => self.bad_words = field.bad_words()?,
            "allowed_token_ids" => self.allowed_token_ids = field.allowed_token_ids()?,
            "truncate_prompt_tokens" => {
                self.truncate_prompt_tokens = Some(match field.integer(-1, i64::from(i32::MAX))? {
                    -1 => Truncate::ToFit,
                    0 => return Err(field.must("-1, for as many as fit, or at least 1")),
                    last => Truncate::ToLast(last as u32),
                });
            }
            // Read with the grammar that it belongs to.
            "guided_whitespace_pattern" => {}
            // There is one.
            "guided_decoding_backend" => {}
            _ if guided::is_known(key) => guided::set(&mut self.guided, key, value)?,
            "logprobs" => self.logprobs = field.logprobs()?,
            "prompt_logprobs" => self.prompt_logprobs = field.logprobs()?,
            "skip_special_tokens" => self.keep_special_tokens = !field.boolean()?,
            "include_stop_str_in_output" => self.include_stop_str_in_output = field.boolean()?,
            "priority" => self.priority = field.integer(0, i64::from(u32::MAX))? as u32,
            MAX_DRAFTS => self.max_drafts = Some(field.integer(0, i64::from(i32::MAX))? as u32),
            "speculate_method" => match value.as_str() {
                Some("none") => self.no_drafts = true,
                _ => {
                    return Err(field.must("none, which turns drafts off: how they are made is a setting of the model"));
                }
            },
            "spaces_between_special_tokens" => {
                field.boolean()?;
            }
            "detokenize" => {
                if !field.boolean()? {
                    return Err(ServerError::unsupported_field(key, "parameter detokenize=false"));
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// What the parameters say against each other.
    ///
    /// # Errors
    /// `BadInput` if `min_tokens` is above `max_tokens`, `best_of` is below `n`, or there are several choices at temperature 0.
    pub fn check(&self) -> Result<()> {
        let bad = |field: &str, reason: String| Err(ServerError::bad_input(field, reason));
        if let Some(max) = self.max_tokens.filter(|&max| self.min_tokens > max) {
            return bad("min_tokens", format!("must be at most max_tokens, which is {max}, is {}", self.min_tokens));
        }
        if let Some(best_of) = self.best_of.filter(|&best_of| best_of < self.n) {
            return bad("best_of", format!("must be at least n, which is {}, is {best_of}", self.n));
        }
        if self.num_candidates() > 1 && self.temperature == Some(0.0) {
            return self.check_greedy();
        }
        Ok(())
    }

    /// # Errors
    /// `BadInput` if there are several choices: at temperature 0 they would be the same.
    pub fn check_greedy(&self) -> Result<()> {
        let (field, count) = if self.n > 1 { ("n", self.n) } else { ("best_of", self.num_candidates()) };
        if count == 1 {
            return Ok(());
        }
        let reason = format!("must be 1 at temperature 0, where all choices are the same, is {count}");
        Err(ServerError::bad_input(field, reason))
    }

    /// What cannot be streamed.
    ///
    /// # Errors
    /// `BadInput` if `best_of` is above `n`, or if log-probabilities of the prompt are wanted.
    pub fn check_stream(&self) -> Result<()> {
        if self.prompt_logprobs.is_some() {
            return Err(ServerError::bad_input(
                "prompt_logprobs",
                "does not go with a stream, where they have no place",
            ));
        }
        if self.num_candidates() == self.n {
            return Ok(());
        }
        let (n, best_of) = (self.n, self.num_candidates());
        let reason = format!("must be n, which is {n}, for a stream, is {best_of}: which are best is known at the end");
        Err(ServerError::bad_input("best_of", reason))
    }

    /// Refuses what was only warned of.
    ///
    /// # Errors
    /// `BadInput` with the first parameter that is not known.
    pub fn check_strict(&self) -> Result<()> {
        match self.warnings.first().and_then(|warning| warning.split_once(": ")) {
            Some((field, reason)) => Err(ServerError::bad_input(field, reason)),
            None => Ok(()),
        }
    }

    /// Choices that are made.
    pub fn num_candidates(&self) -> u32 {
        self.best_of.unwrap_or(self.n)
    }
}
