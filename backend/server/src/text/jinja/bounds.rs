//! What one rendering may cost: its fuel, which pays for steps and for data, by the size of what is rendered.
//!
//! The engine charges its operators and filters ahead of what they make. What it does not is here: containers that are printed, which
//! may hold one another many times over, JSON, and methods of Python's.

use std::fmt::{self, Write};

use minijinja::filters;
use minijinja::value::{Kwargs, StringInput, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Fuel of a rendering of next to nothing: 32 MB of data, or so many steps, of which a template takes tens for a message.
const LEAST_FUEL: u64 = 500_000;
/// However large the conversation is: 640 MB.
const MOST_FUEL: u64 = 10_000_000;
/// Fuel for a byte of the conversation: a short message has some twenty, and of a long one 64 cost one whenever it is copied.
const FUEL_PER_BYTE: u64 = 2;
/// Bytes that the engine's fuel pays for.
const BYTES_PER_FUEL: u64 = 64;
/// Bytes of text that one of a printed container counts for.
const PRINTED_COST: u64 = 16;
/// Bytes of a value in a list.
const VALUE_BYTES: u64 = 32;

/// The fuel for a conversation of so many bytes.
pub(in super::super) fn fuel(conversation_bytes: usize) -> u64 {
    (conversation_bytes as u64).saturating_mul(FUEL_PER_BYTE).saturating_add(LEAST_FUEL).min(MOST_FUEL)
}

/// Bytes of text in a JSON value.
pub(in super::super) fn text_bytes(value: &serde_json::Value) -> usize {
    match value {
        serde_json::Value::String(text) => text.len(),
        serde_json::Value::Array(items) => items.iter().map(text_bytes).sum(),
        serde_json::Value::Object(map) => map.iter().map(|(key, value)| key.len() + text_bytes(value)).sum(),
        _ => 0,
    }
}

fn bytes_left(state: &State) -> u64 {
    state.fuel_levels().map_or(u64::MAX, |(_, left)| left.saturating_mul(BYTES_PER_FUEL))
}

/// An error if `bytes` are more than the rendering may still make.
fn ensure(state: &State, bytes: u64) -> Result<(), Error> {
    if bytes < bytes_left(state) { Ok(()) } else { Err(Error::from(ErrorKind::OutOfFuel)) }
}

/// A text that takes no more than it may.
struct Bounded {
    text: String,
    left: u64,
}

impl Write for Bounded {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        self.left = self.left.checked_sub(part.len() as u64).ok_or(fmt::Error)?;
        self.text.push_str(part);
        Ok(())
    }
}

impl std::io::Write for Bounded {
    fn write(&mut self, part: &[u8]) -> std::io::Result<usize> {
        let left = self.left.checked_sub(part.len() as u64);
        self.left = left.ok_or_else(|| std::io::Error::other("too large"))?;
        Ok(part.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A value as it is printed. Of a container each byte costs as much as several of a text, for it is slow.
pub(super) fn printed(state: &State, value: &Value) -> Result<String, Error> {
    let mut bounded = Bounded { text: String::new(), left: bytes_left(state) / PRINTED_COST };
    match write!(bounded, "{value}") {
        Ok(()) => {
            state.consume_fuel(bounded.text.len() as u64 * PRINTED_COST / BYTES_PER_FUEL)?;
            Ok(bounded.text)
        }
        Err(fmt::Error) => Err(Error::from(ErrorKind::OutOfFuel)),
    }
}

/// A value as JSON, which is many times as large as its text.
pub(super) fn json(state: &State, value: &Value) -> Result<serde_json::Value, Error> {
    let mut bounded = Bounded { text: String::new(), left: bytes_left(state) / VALUE_BYTES };
    serde_json::to_writer(&mut bounded, value).map_err(|error| match error.is_io() {
        true => Error::from(ErrorKind::OutOfFuel),
        false => Error::new(ErrorKind::BadSerialization, "tojson: not JSON").with_source(error),
    })?;
    serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "tojson: not JSON").with_source(error))
}

fn printed_bytes(state: &State, value: &Value) -> Result<u64, Error> {
    match value.as_str() {
        Some(text) => Ok(text.len() as u64),
        None => Ok(printed(state, value)?.len() as u64),
    }
}

/// The engine's filter, once it is known what it makes.
pub(super) fn join(
    state: &mut State,
    value: &Value,
    joiner: Option<StringInput<'_>>,
    attribute: Option<&str>,
    keywords: Kwargs,
) -> Result<Value, Error> {
    let named = match attribute {
        Some(name) => Some(name.to_owned()),
        None if keywords.has("attribute") => keywords.peek::<Option<String>>("attribute")?,
        None => None,
    };
    ensure_items(state, value, 0, |item| match &named {
        Some(name) => item.get_attr(name),
        None => Ok(item),
    })?;
    filters::join(state, value, joiner, attribute, keywords)
}

/// An error if the items of `value`, each with so many bytes more, are too much.
fn ensure_items(
    state: &State,
    value: &Value,
    more: usize,
    part: impl Fn(Value) -> Result<Value, Error>,
) -> Result<(), Error> {
    let mut sum = 0u64;
    for item in value.try_iter().into_iter().flatten() {
        state.consume_fuel(1)?;
        sum = sum.saturating_add(printed_bytes(state, &part(item)?)?).saturating_add(more as u64);
        ensure(state, sum)?;
    }
    Ok(())
}

/// The filter `string`.
pub(super) fn string(state: &mut State, value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => printed(state, value).map(Value::from),
        _ => filters::string(state, value),
    }
}

/// Python's methods, once it is known what they make.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match (name, args) {
            ("join", [items, ..]) => ensure_items(state, items, text.len(), Ok)?,
            ("format", _) => {
                let mut longest = largest_number(text);
                for arg in args {
                    longest = longest.max(printed_bytes(state, arg)?);
                }
                let fields = text.matches('{').count() as u64;
                ensure(state, fields.saturating_mul(longest).saturating_add(text.len() as u64))?;
            }
            ("split" | "rsplit" | "splitlines", _) => {
                let parts = match args.first().and_then(Value::as_str).filter(|separator| !separator.is_empty()) {
                    Some(separator) => text.matches(separator).count(),
                    None => text.matches(char::is_whitespace).count(),
                };
                ensure(state, (parts as u64).saturating_mul(VALUE_BYTES))?;
            }
            _ => {}
        }
    }
    unknown_method_callback(state, value, name, args)
}

/// The largest number in a text: a width, of a format.
fn largest_number(text: &str) -> u64 {
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.map(|digits| digits.parse().unwrap_or(u64::MAX)).max().unwrap_or(0)
}
