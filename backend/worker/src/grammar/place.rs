//! Where in a JSON schema the compiler found its error: it says what is wrong, and seldom where.
//!
//! Each part is compiled alone, from the whole down to the smallest that still gives the same error.

use std::fmt::Display;

use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value};

/// Parts that are looked at before the search ends where it is.
const MAX_TRIES: usize = 200;

/// Keys whose value is a schema, a list of schemas, or an object of schemas by name.
const ONE: [&str; 7] = ["items", "additionalProperties", "not", "if", "then", "else", "contains"];
const LIST: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
/// Named schemas that parts may refer to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// The place that `error` is about, a JSON pointer; `None` if that is the whole schema.
pub(super) fn of_error(factory: &ParserFactory, text: &str, error: &impl Display) -> Option<String> {
    let Ok(Value::Object(whole)) = serde_json::from_str(text) else { return None };
    let reason = format!("{error:#}");
    let mut search = Search { factory, whole: &whole, reason: first_line(&reason), tries: 0 };
    let mut place = String::new();
    let mut part = &whole;
    while let Some((step, inner)) = search.step(part) {
        place.push_str(&step);
        part = inner;
    }
    (!place.is_empty()).then_some(place)
}

struct Search<'a> {
    factory: &'a ParserFactory,
    whole: &'a Map<String, Value>,
    reason: &'a str,
    tries: usize,
}

impl<'a> Search<'a> {
    /// The first part of `part` that gives the same error alone, and the way to it.
    fn step(&mut self, part: &'a Map<String, Value>) -> Option<(String, &'a Map<String, Value>)> {
        for (key, value) in part {
            let key = key.as_str();
            let inner: Vec<(String, &Value)> = match value {
                Value::Object(_) if ONE.contains(&key) => vec![(format!("/{key}"), value)],
                Value::Array(list) if LIST.contains(&key) => {
                    list.iter().enumerate().map(|(index, value)| (format!("/{key}/{index}"), value)).collect()
                }
                Value::Object(named) if NAMED.contains(&key) => {
                    named.iter().map(|(name, value)| (format!("/{key}/{}", escaped(name)), value)).collect()
                }
                _ => continue,
            };
            for (step, value) in inner {
                let Value::Object(schema) = value else { continue };
                if self.fails_alike(schema) {
                    return Some((step, schema));
                }
            }
        }
        None
    }

    fn fails_alike(&mut self, part: &Map<String, Value>) -> bool {
        self.tries += 1;
        if self.tries > MAX_TRIES {
            return false;
        }
        let mut alone = part.clone();
        for key in DEFINITIONS {
            if let Some(definitions) = self.whole.get(key) {
                alone.entry(key).or_insert_with(|| definitions.clone());
            }
        }
        let parser = self.factory.create_parser(TopLevelGrammar::from_json_schema(Value::Object(alone)));
        parser.is_err_and(|error| first_line(&format!("{error:#}")) == self.reason)
    }
}

/// A name in a JSON pointer (RFC 6901).
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
