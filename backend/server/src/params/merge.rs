//! Parameters of one request that came by two ways.

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
