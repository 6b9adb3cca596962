//! Parameters of one request that came by two ways.

use std::collections::HashSet;
use std::fmt;

use serde::Deserializer as _;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::field::shown;
use crate::error::{Result, ServerError};

/// What came by one way, and what that way is called in messages.
#[derive(Debug)]
pub struct Given {
    pub map: Map<String, Value>,
    pub place: &'static str,
}

impl Given {
    /// All parameters of both. `null` says nothing; numbers may stand in strings.
    ///
    /// # Errors
    /// `BadInput` naming a parameter that has two values: neither is passed over.
    pub fn and(self, other: Given) -> Result<Map<String, Value>> {
        let mut all = self.map;
        for (key, value) in other.map {
            match all.get(&key) {
                Some(first) if !first.is_null() && !value.is_null() => {
                    if !same(first, &value) {
                        let (first, value) = (shown(first), shown(&value));
                        let reason =
                            format!("is {first} in {} and {value} in {}: give it once", self.place, other.place);
                        return Err(ServerError::bad_input(key, reason));
                    }
                }
                Some(_) if value.is_null() => {}
                _ => _ = all.insert(key, value),
            }
        }
        Ok(all)
    }
}

fn same(a: &Value, b: &Value) -> bool {
    let text = |value: &Value| match value {
        Value::String(text) => text.trim().to_owned(),
        other => other.to_string(),
    };
    let number = |value: &Value| text(value).parse::<f64>().ok();
    a == b || text(a) == text(b) || number(a).is_some_and(|a| number(b) == Some(a))
}

/// The first key that an object in JSON has twice; of the two values only the last would count. Looks at the object itself alone.
pub fn key_given_twice(json: &[u8]) -> Option<String> {
    struct Keys;
    impl<'de> Visitor<'de> for Keys {
        type Value = Option<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut seen = HashSet::new();
            let mut twice = None;
            while let Some((key, _)) = map.next_entry::<String, IgnoredAny>()? {
                if !seen.insert(key.clone()) {
                    twice.get_or_insert(key);
                }
            }
            Ok(twice)
        }
    }
    serde_json::Deserializer::from_slice(json).deserialize_map(Keys).ok().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn both(one: Value, other: Value) -> String {
        let given = |value: Value, place| Given { map: value.as_object().unwrap().clone(), place };
        match given(one, "sampling_parameters").and(given(other, "the request's parameters")) {
            Ok(all) => Value::Object(all).to_string(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_key_that_comes_twice_is_found() {
        let twice = |json: &str| key_given_twice(json.as_bytes());
        assert_eq!(twice(r#"{"n": 1, "seed": {"n": [2, "n"]}}"#), None);
        assert_eq!(twice(r#"{"n": 1, "seed": 2, "n": 1}"#), Some("n".into()));
        assert_eq!((twice("[1]"), twice("{"), twice("null")), (None, None, None));
    }

    #[test]
    fn what_came_by_two_ways_is_one_and_two_values_are_refused() {
        assert_eq!(both(json!({"n": 1}), json!({"seed": 7})), r#"{"n":1,"seed":7}"#);
        assert_eq!(both(json!({"max_tokens": "8"}), json!({"max_tokens": 8.0})), r#"{"max_tokens":"8"}"#);
        assert_eq!(both(json!({"stop": ["a"]}), json!({"stop": "[\"a\"]"})), r#"{"stop":["a"]}"#);
        assert_eq!(both(json!({"seed": null, "n": 2}), json!({"seed": 7, "n": null})), r#"{"seed":7,"n":2}"#);
        assert_eq!(
            both(json!({"temperature": 0.5}), json!({"temperature": "0.7"})),
            "temperature: is 0.5 in sampling_parameters and \"0.7\" in the request's parameters: give it once"
        );
    }
}
