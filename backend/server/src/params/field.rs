//! One parameter's value: what it may be, and what is said of one that is not.

use drafthorse_control::TokenId;
use serde_json::Value;

use super::BadWord;
use crate::error::{Result, ServerError};

/// Most stop strings of a request.
const MAX_STOP_STRINGS: usize = 16;
/// Bytes of the longest stop string.
const MAX_STOP_BYTES: usize = 1024;
pub(super) const MAX_STOP_TOKENS: usize = 256;
const MAX_LOGIT_BIASES: usize = 1024;
const MAX_BAD_WORDS: usize = 256;
/// Bytes or tokens of the longest bad word.
const MAX_BAD_WORD_BYTES: usize = 256;
const MAX_ALLOWED_TOKENS: usize = 1 << 20;
/// Most likeliest tokens that come with each token.
const MAX_LOGPROBS: u32 = 20;

/// One parameter as it came.
pub(super) struct Field<'a> {
    pub(super) key: &'a str,
    pub(super) value: &'a Value,
}

impl Field<'_> {
    pub(super) fn must(&self, must: &str) -> ServerError {
        ServerError::bad_input(self.key, format!("must be {must}, is {}", shown(self.value)))
    }

    /// Of one item of a list or object, such as `stop_token_ids[3]`.
    fn item_must(&self, place: impl std::fmt::Display, must: &str, item: &Value) -> ServerError {
        ServerError::bad_input(format!("{}[{place}]", self.key), format!("must be {must}, is {}", shown(item)))
    }

    /// Each item read; `must` says what one has to be.
    fn items<T>(&self, items: &[Value], must: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Vec<T>> {
        let read = |(place, item)| read(item).ok_or_else(|| self.item_must(place, must, item));
        items.iter().enumerate().map(read).collect()
    }

    pub(super) fn number(&self, must: &str) -> Result<f64> {
        number(self.value).ok_or_else(|| self.must(must))
    }

    pub(super) fn float(&self, must: &str, holds: impl Fn(f64) -> bool) -> Result<f32> {
        let float = self.number(&format!("a number {must}"))?;
        // What is finite in 64 bits may not be in 32.
        if (float as f32).is_finite() && holds(float) { Ok(float as f32) } else { Err(self.must(must)) }
    }

    pub(super) fn penalty(&self) -> Result<f32> {
        self.float("in [-2, 2]", |penalty| (-2.0..=2.0).contains(&penalty))
    }

    pub(super) fn integer(&self, min: i64, max: i64) -> Result<i64> {
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

    pub(super) fn boolean(&self) -> Result<bool> {
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
    pub(super) fn seed(&self) -> Result<Option<u64>> {
        let must = "a whole number of at most 64 bits";
        let seed = integer(self.value).ok_or_else(|| self.must(must))?;
        let bits = u64::try_from(seed).ok().or_else(|| i64::try_from(seed).ok().map(i64::cast_unsigned));
        let bits = bits.ok_or_else(|| self.must(must))?;
        Ok(Some(bits).filter(|_| seed != -1))
    }

    /// `false` and `true` are what OpenAI's chat sends: none, and the token's own alone.
    pub(super) fn logprobs(&self) -> Result<Option<u32>> {
        match self.value {
            Value::Bool(wanted) => Ok(wanted.then_some(0)),
            _ => self.integer(0, i64::from(MAX_LOGPROBS)).map(|top| Some(top as u32)),
        }
    }

    pub(super) fn stop_strings(&self) -> Result<Vec<String>> {
        let must = "a string or a list of strings";
        let strings: Vec<String> = match self.value {
            Value::String(stop) => vec![stop.clone()],
            Value::Array(stops) => self.items(stops, "a string", |stop| stop.as_str().map(String::from))?,
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

    /// Texts, or lists of token ids, that must not come.
    pub(super) fn bad_words(&self) -> Result<Vec<BadWord>> {
        let must = "a string, a list of strings, or a list of lists of token ids";
        let one = |item: &Value| match item {
            Value::String(text) => Some(BadWord::Text(text.clone())),
            Value::Array(ids) => {
                ids.iter().map(|id| TokenId::try_from(integer(id)?).ok()).collect::<Option<_>>().map(BadWord::Tokens)
            }
            _ => None,
        };
        let words: Vec<BadWord> = match self.value {
            // TensorRT-LLM's clients write no bad words so.
            Value::String(text) if text.is_empty() => Vec::new(),
            Value::String(text) => vec![BadWord::Text(text.clone())],
            Value::Array(items) => self.items(items, "a string or a list of token ids", one)?,
            _ => return Err(self.must(must)),
        };
        if words.len() > MAX_BAD_WORDS {
            let reason = format!("has {} entries, at most {MAX_BAD_WORDS} may be given", words.len());
            return Err(ServerError::bad_input(self.key, reason));
        }
        let fits = |word: &BadWord| match word {
            BadWord::Text(text) => !text.trim().is_empty() && text.len() <= MAX_BAD_WORD_BYTES,
            BadWord::Tokens(ids) => (1..=MAX_BAD_WORD_BYTES).contains(&ids.len()),
        };
        if !words.iter().all(fits) {
            let reason = format!("has an entry that is empty or all white space, or longer than {MAX_BAD_WORD_BYTES}");
            return Err(ServerError::bad_input(self.key, reason));
        }
        Ok(words)
    }

    pub(super) fn allowed_token_ids(&self) -> Result<Vec<TokenId>> {
        let mut ids = self.token_ids(MAX_ALLOWED_TOKENS)?;
        if ids.is_empty() {
            return Err(ServerError::bad_input(self.key, "is empty, which would allow nothing"));
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    pub(super) fn token_ids(&self, max: usize) -> Result<Vec<TokenId>> {
        let must = "a list of token ids";
        let ids = self.value.as_array().ok_or_else(|| self.must(must))?;
        if ids.len() > max {
            return Err(ServerError::bad_input(self.key, format!("has {} ids, at most {max} may be given", ids.len())));
        }
        self.items(ids, "a token id", |id| TokenId::try_from(integer(id)?).ok())
    }

    pub(super) fn logit_bias(&self) -> Result<Vec<(TokenId, f32)>> {
        let must = "an object of token ids and numbers in [-100, 100]";
        let biases = self.value.as_object().ok_or_else(|| self.must(must))?;
        if biases.len() > MAX_LOGIT_BIASES {
            let reason = format!("has {} entries, at most {MAX_LOGIT_BIASES} may be given", biases.len());
            return Err(ServerError::bad_input(self.key, reason));
        }
        let pairs = biases.iter().map(|(id, bias)| {
            let token = id.trim().parse().map_err(|_| {
                ServerError::bad_input(
                    self.key,
                    format!("must have token ids as keys, one is {}", shown(&id.as_str().into())),
                )
            })?;
            let in_range = number(bias).filter(|bias| (-100.0..=100.0).contains(bias));
            Ok((token, in_range.ok_or_else(|| self.item_must(id, "a number in [-100, 100]", bias))? as f32))
        });
        let mut pairs: Vec<(TokenId, f32)> = pairs.collect::<Result<_>>()?;
        pairs.sort_by_key(|(token, _)| *token);
        if let Some(twice) = pairs.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(ServerError::bad_input(self.key, format!("names token {} twice", twice[0].0)));
        }
        Ok(pairs)
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
pub(super) fn shown(value: &Value) -> String {
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
