//! Structural tags: text that is free until a trigger comes, from which on one of some tags must follow, with JSON inside.
//!
//! `{"structures": [{"begin": "<f=a>", "schema": {…}, "end": "</f>"}, …], "triggers": ["<f="]}`, as OpenAI-like servers take it. Each
//! `begin` starts with a trigger. As a grammar: any number of "text up to the first trigger, and what may follow it", then text
//! without one.

use drafthorse_control::Grammar;
use drafthorse_worker::grammar::WHITESPACE;
use serde_json::{Map, Value, json};

use super::field::{Field, shown};
use super::gbnf::terminal_of;
use super::guided::Guided;
use crate::error::{Result, ServerError};

/// Structures, and triggers, that one request may have.
const MAX_TAGS: usize = 256;

/// The constraint, with each schema a part that is compiled alone first, so that its faults are told by its name.
///
/// # Errors
/// `BadInput` with the field inside `field` that does not fit.
pub(super) fn parse(field: &str, value: &Value) -> Result<Guided> {
    let Value::Object(fields) = value else {
        return Err(Field { key: field, value }.must("an object with structures and triggers"));
    };
    for (name, value) in fields {
        match name.as_str() {
            "structures" | "triggers" => {}
            "type" if value == "structural_tag" => {}
            "format" => {
                let reason = "is not supported: give structures and triggers";
                return Err(ServerError::bad_input(format!("{field}.format"), reason));
            }
            name => return Err(ServerError::bad_input(format!("{field}.{name}"), "is no part of a structural tag")),
        }
    }
    let triggers = triggers(field, fields)?;
    // What may follow each trigger, in Lark.
    let mut ways: Vec<Vec<String>> = vec![Vec::new(); triggers.len()];
    let mut parts = Vec::new();
    for (number, structure) in list(field, fields, "structures")?.iter().enumerate() {
        let key = format!("{field}.structures[{number}]");
        let Value::Object(structure) = structure else {
            return Err(Field { key: &key, value: structure }.must("an object with begin, schema and end"));
        };
        if let Some(name) = structure.keys().find(|name| !["begin", "schema", "end"].contains(&name.as_str())) {
            return Err(ServerError::bad_input(
                format!("{key}.{name}"),
                "is no part of a structure: begin, schema, end",
            ));
        }
        let text = |name: &str| match structure.get(name) {
            Some(Value::String(text)) => Ok(text.as_str()),
            Some(value) => Err(Field { key: &format!("{key}.{name}"), value }.must("a text")),
            None => Err(ServerError::bad_input(format!("{key}.{name}"), "is missing")),
        };
        let (begin, end) = (text("begin")?, text("end")?);
        let Some(trigger) = triggers.iter().position(|trigger| begin.starts_with(trigger)) else {
            let reason = format!("starts with none of the triggers, is {}", shown(&json!(begin)));
            return Err(ServerError::bad_input(format!("{key}.begin"), reason));
        };
        let schema = schema(&format!("{key}.schema"), structure.get("schema"))?;
        let rest = terminal_of(&begin[triggers[trigger].len()..]);
        ways[trigger].push(format!("{rest} %json {schema} {}", terminal_of(end)));
        parts.push((format!("{key}.schema"), Grammar::JsonSchema(schema)));
    }
    if let Some(unused) = ways.iter().position(Vec::is_empty) {
        let reason = format!("no structure's begin starts with it, which is {}", shown(&json!(triggers[unused])));
        return Err(ServerError::bad_input(format!("{field}.triggers[{unused}]"), reason));
    }
    Ok(Guided { field: field.into(), grammar: Grammar::Lark(lark(&triggers, &ways)), parts })
}

fn lark(triggers: &[&str], ways: &[Vec<String>]) -> String {
    let mut text = String::from("start: tag* TEXT?\ntag:");
    for (number, ways) in ways.iter().enumerate() {
        let bar = if number == 0 { "" } else { " |" };
        text += &format!("{bar} until{number} ({})", ways.join(" | "));
    }
    // Lazy: it ends with the first trigger.
    for (number, trigger) in triggers.iter().enumerate() {
        text += &format!("\nuntil{number}[lazy]: /(?s:.)*/ {}", terminal_of(trigger));
    }
    let any: Vec<String> = triggers.iter().map(|trigger| terminal_of(trigger)).collect();
    text + &format!("\nTEXT: /(?s:.)+/ & ~(/(?s:.)*/ ({}) /(?s:.)*/)\n", any.join(" | "))
}

fn list<'a>(field: &str, fields: &'a Map<String, Value>, name: &str) -> Result<&'a [Value]> {
    let key = format!("{field}.{name}");
    let value = fields.get(name).ok_or_else(|| ServerError::bad_input(&key, "is missing"))?;
    let list = value.as_array().map(Vec::as_slice);
    let fits = |list: &&[Value]| (1..=MAX_TAGS).contains(&list.len());
    list.filter(fits).ok_or_else(|| Field { key: &key, value }.must(&format!("a list of 1 to {MAX_TAGS} entries")))
}

/// Texts of which none lies in another: else the first to end would hide the other.
fn triggers<'a>(field: &str, fields: &'a Map<String, Value>) -> Result<Vec<&'a str>> {
    let mut triggers: Vec<&str> = Vec::new();
    for (number, value) in list(field, fields, "triggers")?.iter().enumerate() {
        let key = format!("{field}.triggers[{number}]");
        let text = value.as_str().filter(|text| !text.is_empty());
        let text = text.ok_or_else(|| Field { key: &key, value }.must("a text that is not empty"))?;
        if let Some(other) = triggers.iter().position(|other| other.contains(text) || text.contains(other)) {
            let reason = format!("and triggers[{other}] lie in one another: keep the shorter one");
            return Err(ServerError::bad_input(key, reason));
        }
        triggers.push(text);
    }
    Ok(triggers)
}

/// A schema's text; any JSON where there is none.
fn schema(key: &str, value: Option<&Value>) -> Result<String> {
    let mut keys = match value {
        None | Some(Value::Null | Value::Bool(true)) => Map::new(),
        Some(Value::Object(keys)) => keys.clone(),
        Some(value) => return Err(Field { key, value }.must("a JSON schema, an object")),
    };
    keys.entry("x-guidance").or_insert_with(|| json!({"whitespace_pattern": WHITESPACE}));
    Ok(Value::Object(keys).to_string())
}
