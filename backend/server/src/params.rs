//! Parameters of a generation as callers write them: one parser and one set of checks for every door.
//!
//! Names and meanings are vLLM's. Numbers may come as strings (`"temperature": "0.1"`), as load generators write them. A parameter
//! that is not given stays open: the model's defaults fill it in (see [`crate::generate`]).

use drafthorse_control::TokenId;
use serde_json::{Map, Value};

use crate::error::{Result, ServerError, nearest_hint};

/// Most stop strings of a request.
const MAX_STOP_STRINGS: usize = 16;
/// Bytes of the longest stop string.
const MAX_STOP_BYTES: usize = 1024;
const MAX_STOP_TOKENS: usize = 256;
const MAX_LOGIT_BIASES: usize = 1024;
/// Most likeliest tokens that come with each token.
const MAX_LOGPROBS: u32 = 20;

/// What a caller set. `None` is for the model to decide.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateParams {
    pub temperature: Option<f32>,
    /// 0 keeps all.
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Vec<(TokenId, f32)>,
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
    /// What was not understood and passed over, a sentence each.
    pub warnings: Vec<String>,
}

/// What is known, in the order that messages list it.
const KNOWN: [&str; 23] = [
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
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
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "priority",
    "spaces_between_special_tokens",
    "detokenize",
];

/// What vLLM has and this server has not, refused by name: passing over it would change the answer.
const NOT_SUPPORTED: [&str; 21] = [
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "guided_decoding",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "structured_outputs",
    "structural_tag",
    "json_schema",
    "lora_name",
    "lora_request",
    "use_beam_search",
    "beam_width",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
    "truncate_prompt_tokens",
    "extra_args",
    "length_penalty",
];

impl GenerateParams {
    /// Parses a JSON object, the `sampling_parameters` of vLLM's tensors; `field` is its name in messages.
    ///
    /// # Errors
    /// `BadJson` with the position; otherwise as [`from_map`](Self::from_map).
    pub fn from_json(field: &str, text: &str, strict: bool) -> Result<Self> {
        let value: Value = serde_json::from_str(text).map_err(|error| ServerError::bad_json(field, &error))?;
        match value {
            Value::Object(map) => Self::from_map(&map, strict),
            Value::Null => Ok(Self::default()),
            other => Err(ServerError::bad_input(field, format!("must be a JSON object, is {}", shown(&other)))),
        }
    }

    /// Reads all keys of `map`. A key that is not known is refused if `strict`, else noted in
    /// [`warnings`](Self::warnings); `null` says nothing.
    ///
    /// # Errors
    /// `BadInput` with the field, its value and its limit; `Unsupported` for what is known and not there yet.
    pub fn from_map(map: &Map<String, Value>, strict: bool) -> Result<Self> {
        let mut params = GenerateParams::default();
        for (key, value) in map {
            if params.set(key, value)? {
                continue;
            }
            let hint = nearest_hint(key, KNOWN);
            if strict {
                return Err(ServerError::bad_input(key, format!("no such parameter{hint}")));
            }
            params.warnings.push(format!("{key}: no such parameter{hint}"));
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
            return if neutral { Ok(true) } else { Err(ServerError::unsupported(format!("parameter {key}"))) };
        }
        if value.is_null() {
            return Ok(KNOWN.contains(&key));
        }
        let field = Field { key, value };
        match key {
            "n" | "best_of" => {
                if field.integer(1, i64::from(u32::MAX))? != 1 {
                    return Err(ServerError::unsupported(format!("parameter {key} above 1")));
                }
            }
            "temperature" => self.temperature = Some(field.float("0 or more", |t| t >= 0.0)?),
            "top_p" => self.top_p = Some(field.float("in (0, 1]", |p| p > 0.0 && p <= 1.0)?),
            "min_p" => self.min_p = Some(field.float("in [0, 1]", |p| (0.0..=1.0).contains(&p))?),
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
            "repetition_penalty" => self.repetition_penalty = Some(field.float("above 0", |p| p > 0.0)?),
            "logit_bias" => self.logit_bias = field.logit_bias()?,
            "logprobs" => self.logprobs = field.logprobs()?,
            "prompt_logprobs" => self.prompt_logprobs = field.logprobs()?,
            "skip_special_tokens" => self.keep_special_tokens = !field.boolean()?,
            "include_stop_str_in_output" => self.include_stop_str_in_output = field.boolean()?,
            "priority" => self.priority = field.integer(0, i64::from(u32::MAX))? as u32,
            "spaces_between_special_tokens" => {
                field.boolean()?;
            }
            "detokenize" => {
                if !field.boolean()? {
                    return Err(ServerError::unsupported("parameter detokenize=false"));
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// What the parameters say against each other.
    ///
    /// # Errors
    /// `BadInput` if `min_tokens` is above `max_tokens`.
    pub fn check(&self) -> Result<()> {
        match self.max_tokens {
            Some(max) if self.min_tokens > max => {
                let reason = format!("must be at most max_tokens, which is {max}, is {}", self.min_tokens);
                Err(ServerError::bad_input("min_tokens", reason))
            }
            _ => Ok(()),
        }
    }
}

/// One parameter as it came.
struct Field<'a> {
    key: &'a str,
    value: &'a Value,
}

impl Field<'_> {
    fn must(&self, must: &str) -> ServerError {
        ServerError::bad_input(self.key, format!("must be {must}, is {}", shown(self.value)))
    }

    fn number(&self, must: &str) -> Result<f64> {
        number(self.value).ok_or_else(|| self.must(must))
    }

    fn float(&self, must: &str, holds: impl Fn(f64) -> bool) -> Result<f32> {
        let float = self.number(&format!("a number {must}"))?;
        // What is finite in 64 bits may not be in 32.
        if (float as f32).is_finite() && holds(float) { Ok(float as f32) } else { Err(self.must(must)) }
    }

    fn penalty(&self) -> Result<f32> {
        self.float("in [-2, 2]", |penalty| (-2.0..=2.0).contains(&penalty))
    }

    fn integer(&self, min: i64, max: i64) -> Result<i64> {
        let must = if max >= i64::from(i32::MAX) {
            format!("a whole number of at least {min}")
        } else {
            format!("a whole number from {min} to {max}")
        };
        let integer = integer(self.value).ok_or_else(|| self.must(&must))?;
        match i64::try_from(integer) {
            Ok(integer) if (min..=max).contains(&integer) => Ok(integer),
            _ if integer > i128::from(max) => Err(self.must(&format!("at most {max}"))),
            _ => Err(self.must(&format!("at least {min}"))),
        }
    }

    fn boolean(&self) -> Result<bool> {
        match self.value {
            Value::Bool(is) => Ok(*is),
            Value::String(text) if text.eq_ignore_ascii_case("true") || text == "1" => Ok(true),
            Value::String(text) if text.eq_ignore_ascii_case("false") || text == "0" => Ok(false),
            other => match other.as_i64() {
                Some(0) => Ok(false),
                Some(1) => Ok(true),
                _ => Err(self.must("true or false")),
            },
        }
    }

    /// Any 64 bits; -1 asks for a fresh one, as with vLLM.
    fn seed(&self) -> Result<Option<u64>> {
        let must = "a whole number of at most 64 bits";
        let seed = integer(self.value).ok_or_else(|| self.must(must))?;
        let bits = u64::try_from(seed).ok().or_else(|| i64::try_from(seed).ok().map(i64::cast_unsigned));
        let bits = bits.ok_or_else(|| self.must(must))?;
        Ok(Some(bits).filter(|_| seed != -1))
    }

    /// `false` and `true` are what OpenAI's chat sends: none, and the token's own alone.
    fn logprobs(&self) -> Result<Option<u32>> {
        match self.value {
            Value::Bool(wanted) => Ok(wanted.then_some(0)),
            _ => self.integer(0, i64::from(MAX_LOGPROBS)).map(|top| Some(top as u32)),
        }
    }

    fn stop_strings(&self) -> Result<Vec<String>> {
        let must = "a string or a list of strings";
        let strings: Vec<String> = match self.value {
            Value::String(stop) => vec![stop.clone()],
            Value::Array(stops) => stops
                .iter()
                .map(|stop| stop.as_str().map(String::from))
                .collect::<Option<_>>()
                .ok_or_else(|| self.must(must))?,
            _ => return Err(self.must(must)),
        };
        if strings.len() > MAX_STOP_STRINGS {
            let reason = format!("has {} strings, at most {MAX_STOP_STRINGS} may be given", strings.len());
            return Err(ServerError::bad_input(self.key, reason));
        }
        if strings.iter().any(String::is_empty) {
            return Err(ServerError::bad_input(self.key, "has an empty string, which would stop everything"));
        }
        if let Some(long) = strings.iter().map(String::len).find(|&len| len > MAX_STOP_BYTES) {
            let reason = format!("has a string of {long} bytes, each may have {MAX_STOP_BYTES}");
            return Err(ServerError::bad_input(self.key, reason));
        }
        Ok(strings)
    }

    fn token_ids(&self, max: usize) -> Result<Vec<TokenId>> {
        let must = "a list of token ids";
        let ids = self.value.as_array().ok_or_else(|| self.must(must))?;
        if ids.len() > max {
            return Err(ServerError::bad_input(self.key, format!("has {} ids, at most {max} may be given", ids.len())));
        }
        let ids = ids.iter().map(|id| TokenId::try_from(integer(id)?).ok()).collect::<Option<_>>();
        ids.ok_or_else(|| self.must(must))
    }

    fn logit_bias(&self) -> Result<Vec<(TokenId, f32)>> {
        let must = "an object of token ids and numbers in [-100, 100]";
        let biases = self.value.as_object().ok_or_else(|| self.must(must))?;
        if biases.len() > MAX_LOGIT_BIASES {
            let reason = format!("has {} entries, at most {MAX_LOGIT_BIASES} may be given", biases.len());
            return Err(ServerError::bad_input(self.key, reason));
        }
        let pairs = biases.iter().map(|(id, bias)| {
            let bias = number(bias).filter(|bias| (-100.0..=100.0).contains(bias))?;
            Some((id.trim().parse().ok()?, bias as f32))
        });
        pairs.collect::<Option<_>>().ok_or_else(|| self.must(must))
    }
}

/// A number, or a string that holds one.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    }
}

/// A whole number, written as one, as a float without fraction, or in a string.
fn integer(value: &Value) -> Option<i128> {
    let whole = |float: f64| (float.fract() == 0.0 && float.abs() < 1e18).then_some(float as i128);
    match value {
        Value::Number(number) => {
            let exact = number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from));
            exact.or_else(|| number.as_f64().and_then(whole))
        }
        Value::String(text) => text.trim().parse().ok().or_else(|| text.trim().parse().ok().and_then(whole)),
        _ => None,
    }
}

/// A value in a message: short, whatever was sent.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::String(text) => format!("{text:?}"),
        Value::Array(items) => return format!("a list of {}", items.len()),
        Value::Object(_) => return "an object".into(),
        other => other.to_string(),
    };
    match text.char_indices().nth(64) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<GenerateParams> {
        GenerateParams::from_json("sampling_parameters", json, false)
    }

    /// The error's text.
    fn refused(json: &str) -> String {
        parse(json).unwrap_err().to_string()
    }

    #[test]
    fn numbers_may_be_strings() {
        let params = parse(
            r#"{"n": "1", "temperature": "0.1", "top_p": "0.9", "top_k": "-1", "max_tokens": "32", "min_tokens": 4.0,
               "ignore_eos": "True", "seed": "-3", "stop": "END", "stop_token_ids": ["7", 8], "logit_bias": {"5": "-1.5"},
               "logprobs": 2, "skip_special_tokens": "false", "min_p": null, "length_penalty": 1.0}"#,
        );
        let want = GenerateParams {
            temperature: Some(0.1),
            top_p: Some(0.9),
            top_k: Some(0),
            max_tokens: Some(32),
            min_tokens: 4,
            ignore_eos: true,
            seed: Some((-3i64).cast_unsigned()),
            stop: vec!["END".into()],
            stop_token_ids: vec![7, 8],
            logit_bias: vec![(5, -1.5)],
            logprobs: Some(2),
            keep_special_tokens: true,
            ..GenerateParams::default()
        };
        assert_eq!(params.unwrap(), want);
        assert_eq!(parse(r#"{"seed": 18446744073709551615}"#).unwrap().seed, Some(u64::MAX));
        assert_eq!(parse(r#"{"seed": -1}"#).unwrap().seed, None, "a fresh one");
        assert_eq!(parse("null").unwrap(), GenerateParams::default());
    }

    #[test]
    fn a_value_out_of_range_is_named_with_its_limit() {
        assert_eq!(refused(r#"{"temperature": -1}"#), "temperature: must be 0 or more, is -1");
        assert_eq!(refused(r#"{"temperature": "NaN"}"#), r#"temperature: must be 0 or more, is "NaN""#);
        assert_eq!(refused(r#"{"temperature": "warm"}"#), r#"temperature: must be a number 0 or more, is "warm""#);
        assert_eq!(refused(r#"{"temperature": 1e300}"#), "temperature: must be 0 or more, is 1e+300");
        assert_eq!(refused(r#"{"top_p": 0}"#), "top_p: must be in (0, 1], is 0");
        assert_eq!(refused(r#"{"top_p": 1.5}"#), "top_p: must be in (0, 1], is 1.5");
        assert_eq!(refused(r#"{"top_k": -2}"#), "top_k: must be at least -1, is -2");
        assert_eq!(refused(r#"{"min_p": 2}"#), "min_p: must be in [0, 1], is 2");
        assert_eq!(refused(r#"{"max_tokens": 0}"#), "max_tokens: must be at least 1, is 0");
        assert_eq!(refused(r#"{"max_tokens": "-1"}"#), r#"max_tokens: must be at least 1, is "-1""#);
        assert_eq!(refused(r#"{"max_tokens": 1.5}"#), "max_tokens: must be a whole number of at least 1, is 1.5");
        assert_eq!(refused(r#"{"max_tokens": 9999999999}"#), "max_tokens: must be at most 2147483647, is 9999999999");
        assert_eq!(
            refused(r#"{"min_tokens": 9, "max_tokens": 8}"#),
            "min_tokens: must be at most max_tokens, which is 8, is 9"
        );
        assert_eq!(refused(r#"{"presence_penalty": 3}"#), "presence_penalty: must be in [-2, 2], is 3");
        assert_eq!(refused(r#"{"repetition_penalty": 0}"#), "repetition_penalty: must be above 0, is 0");
        assert_eq!(refused(r#"{"logprobs": 21}"#), "logprobs: must be at most 20, is 21");
        assert_eq!(refused(r#"{"stop": [""]}"#), "stop: has an empty string, which would stop everything");
        assert_eq!(refused(r#"{"stop": 3}"#), "stop: must be a string or a list of strings, is 3");
        assert_eq!(
            refused(r#"{"stop_token_ids": [-1]}"#),
            "stop_token_ids: must be a list of token ids, is a list of 1"
        );
        assert_eq!(
            refused(r#"{"logit_bias": {"1": 101}}"#),
            "logit_bias: must be an object of token ids and numbers in [-100, 100], is an object"
        );
        assert_eq!(refused(r#"{"ignore_eos": "maybe"}"#), r#"ignore_eos: must be true or false, is "maybe""#);
        let many = serde_json::json!({"stop": vec!["x"; 17]}).to_string();
        assert_eq!(refused(&many), "stop: has 17 strings, at most 16 may be given");
    }

    #[test]
    fn broken_json_is_refused_with_its_position() {
        assert_eq!(
            refused("{\"max_tokens\": 1,\n x}"),
            "sampling_parameters is not valid JSON at line 2 column 2: key must be a string"
        );
        assert_eq!(
            refused(r#"{"temperature": NaN}"#),
            "sampling_parameters is not valid JSON at line 1 column 17: expected value"
        );
        assert_eq!(refused("[1]"), "sampling_parameters: must be a JSON object, is a list of 1");
    }

    #[test]
    fn a_typo_is_noted_or_refused_when_strict() {
        let json = r#"{"max_token": 5, "top_p": 0.5}"#;
        let params = parse(json).unwrap();
        assert_eq!((params.top_p, params.max_tokens), (Some(0.5), None));
        assert_eq!(params.warnings, ["max_token: no such parameter; did you mean max_tokens?"]);
        let strict = GenerateParams::from_json("sampling_parameters", json, true).unwrap_err();
        assert_eq!(strict.to_string(), "max_token: no such parameter; did you mean max_tokens?");
    }

    #[test]
    fn what_is_not_there_yet_is_refused_by_name() {
        assert_eq!(refused(r#"{"n": 2}"#), "parameter n above 1 is not supported");
        assert_eq!(refused(r#"{"best_of": 4}"#), "parameter best_of above 1 is not supported");
        assert_eq!(refused(r#"{"guided_json": {}}"#), "parameter guided_json is not supported");
        assert_eq!(refused(r#"{"lora_name": "x"}"#), "parameter lora_name is not supported");
        assert!(parse(r#"{"use_beam_search": false, "guided_json": null, "bad_words": []}"#).is_ok());
    }
}
