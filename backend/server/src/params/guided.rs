//! What an answer must match, under vLLM's names and OpenAI's.
//!
//! Here only its form is looked at; whether a schema, a regular expression or a grammar is one, its compiler says.

use std::borrow::Cow;

use drafthorse_control::Grammar;
use drafthorse_worker::grammar::MAX_GRAMMAR_BYTES;
use serde_json::{Value, json};

use super::field::{Field, shown};
use super::{gbnf, tags};
use crate::error::{Result, ServerError, nearest_hint};

/// A constraint, and the field that it came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guided {
    pub field: String,
    pub grammar: Grammar,
    /// Grammars inside it and their fields, which must be right by themselves.
    pub parts: Vec<(String, Grammar)>,
}

/// Parameters that hold several kinds, one of which may be set.
const NESTED: [&str; 2] = ["structured_outputs", "guided_decoding"];
/// The kinds of constraint, and with `guided_` in front parameters of their own.
const KINDS: [&str; 5] = ["json", "regex", "choice", "grammar", "json_object"];
/// A kind that has no `guided_` form.
const TAG: &str = "structural_tag";
/// What else stands beside a kind and changes nothing here.
const WITHOUT_EFFECT: [&str; 5] =
    ["backend", "backend_options", "disable_fallback", "disable_any_whitespace", "disable_additional_properties"];

pub(super) fn is_known(key: &str) -> bool {
    key == "response_format" || key == TAG || NESTED.contains(&key) || kind_of(key).is_some()
}

fn kind_of(key: &str) -> Option<&str> {
    key.strip_prefix("guided_").filter(|kind| KINDS.contains(kind))
}

/// Sets the constraint that a parameter asks for, if any.
///
/// # Errors
/// `BadInput` with the field if it is of no form that is known, or if there is a constraint already.
pub(super) fn set(guided: &mut Option<Guided>, key: &str, value: &Value) -> Result<()> {
    if let Some(kind) = kind_of(key) {
        return add(guided, key, grammar(key, kind, value)?);
    }
    let value = &*object(key, value)?;
    let Value::Object(fields) = value else {
        return Err(ServerError::bad_input(key, format!("must be an object, is {}", shown(value))));
    };
    match key {
        "response_format" => return response_format(guided, value),
        TAG => return add_whole(guided, tags::parse(key, value)?),
        _ => {}
    }
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        let field = format!("{key}.{name}");
        match name.as_str() {
            kind if KINDS.contains(&kind) => add(guided, &field, grammar(&field, kind, value)?)?,
            "whitespace_pattern" => {}
            TAG => {
                let parsed = object(&field, value)?;
                add_whole(guided, tags::parse(&field, &parsed)?)?;
            }
            name if WITHOUT_EFFECT.contains(&name) || name.starts_with('_') => {}
            name => {
                let reason = format!("no such constraint{}", nearest_hint(name, KINDS));
                return Err(ServerError::bad_input(field, reason));
            }
        }
    }
    match fields.get("whitespace_pattern").filter(|pattern| !pattern.is_null()) {
        Some(pattern) => set_whitespace(guided, &format!("{key}.whitespace_pattern"), pattern),
        None => Ok(()),
    }
}

/// OpenAI's form.
fn response_format(guided: &mut Option<Guided>, format: &Value) -> Result<()> {
    let schema = &format["json_schema"]["schema"];
    match format["type"].as_str() {
        Some("text") => Ok(()),
        Some("json_object") => add(guided, "response_format", Some(any_object())),
        Some("json_schema") if schema.is_null() => {
            Err(ServerError::bad_input("response_format.json_schema.schema", "is missing"))
        }
        Some("json_schema") => {
            let field = "response_format.json_schema.schema";
            add(guided, field, grammar(field, "json", schema)?)
        }
        Some(TAG) => add_whole(guided, tags::parse("response_format", format)?),
        _ => {
            let reason =
                format!("must be text, json_object, json_schema or structural_tag, is {}", shown(&format["type"]));
            Err(ServerError::bad_input("response_format.type", reason))
        }
    }
}

/// The white space between the parts of a JSON text, a regular expression.
///
/// # Errors
/// `BadInput` if there is no schema that it could belong to.
pub(super) fn set_whitespace(guided: &mut Option<Guided>, field: &str, pattern: &Value) -> Result<()> {
    let Some(text) = pattern.as_str() else {
        return Err(ServerError::bad_input(field, format!("must be a text, is {}", shown(pattern))));
    };
    if let Some(Guided { grammar: Grammar::JsonSchema(schema), .. }) = guided
        && let Ok(Value::Object(mut keys)) = serde_json::from_str(schema)
    {
        keys.insert("x-guidance".into(), json!({"whitespace_pattern": text}));
        *schema = Value::Object(keys).to_string();
        return Ok(());
    }
    Err(ServerError::bad_input(field, "needs a JSON schema"))
}

fn add(guided: &mut Option<Guided>, field: &str, grammar: Option<Grammar>) -> Result<()> {
    match grammar {
        Some(grammar) => add_whole(guided, Guided { field: field.into(), grammar, parts: Vec::new() }),
        None => Ok(()),
    }
}

fn add_whole(guided: &mut Option<Guided>, new: Guided) -> Result<()> {
    if let Some(other) = guided {
        let reason = format!("does not go with {}: the answer can follow only one", other.field);
        return Err(ServerError::bad_input(new.field, reason));
    }
    *guided = Some(new);
    Ok(())
}

/// In a tensor's parameters an object comes as text.
fn object<'a>(key: &str, value: &'a Value) -> Result<Cow<'a, Value>> {
    match value {
        Value::String(text) => match serde_json::from_str(text) {
            Ok(parsed) => Ok(Cow::Owned(parsed)),
            Err(error) => Err(ServerError::bad_json(key, &error)),
        },
        value => Ok(Cow::Borrowed(value)),
    }
}

/// `None` if the value says that there is none.
fn grammar(field: &str, kind: &str, value: &Value) -> Result<Option<Grammar>> {
    let given = Field { key: field, value };
    let text = || match value {
        Value::String(text) if !text.is_empty() => Ok(text.clone()),
        _ => Err(given.must("a text that is not empty")),
    };
    Ok(Some(match kind {
        "json" => match value {
            Value::String(text) => Grammar::JsonSchema(text.clone()),
            Value::Object(_) | Value::Bool(true) => Grammar::JsonSchema(value.to_string()),
            _ => return Err(given.must("a JSON schema, as an object or as text")),
        },
        "regex" => Grammar::Regex(text()?),
        "grammar" => Grammar::Lark(lark(field, text()?)?),
        "choice" => Grammar::Regex(choice(&given)?),
        _ => {
            if !given.boolean()? {
                return Ok(None);
            }
            any_object()
        }
    }))
}

/// A grammar in Lark as it is, one in GBNF turned into Lark.
fn lark(field: &str, text: String) -> Result<String> {
    if !gbnf::is_gbnf(&text) {
        return Ok(text);
    }
    if text.len() > MAX_GRAMMAR_BYTES {
        let reason = format!("has {} bytes, at most {MAX_GRAMMAR_BYTES} may be given", text.len());
        return Err(ServerError::bad_input(field, reason));
    }
    gbnf::to_lark(&text).map_err(|fault| ServerError::bad_input(field, fault.to_string()))
}

fn any_object() -> Grammar {
    Grammar::JsonSchema(json!({"type": "object"}).to_string())
}

/// A regular expression for one of some texts.
fn choice(given: &Field<'_>) -> Result<String> {
    let must = "a list of texts, one at least";
    let texts = given.value.as_array().filter(|texts| !texts.is_empty()).ok_or_else(|| given.must(must))?;
    let texts: Option<Vec<String>> = texts.iter().map(|text| text.as_str().map(escaped)).collect();
    Ok(format!("(?:{})", texts.ok_or_else(|| given.must(must))?.join("|")))
}

/// A text as the regular expression that matches it alone.
fn escaped(text: &str) -> String {
    const MEANING: &str = r"\.+*?()|[]{}^$#&-";
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if MEANING.contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}
