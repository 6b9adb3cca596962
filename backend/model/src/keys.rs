//! Settings that only some families have.

use serde_json::{Map, Value};

use crate::error::{ModelError, Result};

/// All of `config.json`, to be asked for by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Keys(Map<String, Value>);

impl Keys {
    pub(crate) fn new(all: Map<String, Value>) -> Self {
        Keys(all)
    }

    /// A number of things, at least 1.
    ///
    /// # Errors
    /// `MissingKey`, `Unsupported`.
    pub fn size(&self, key: &'static str) -> Result<usize> {
        match self.count(key)? {
            None => Err(ModelError::MissingKey { key }),
            Some(0) => Err(refused(key, &Value::from(0), "1 and more")),
            Some(size) => Ok(size),
        }
    }

    /// A number of things that may be 0, or not there.
    ///
    /// # Errors
    /// `Unsupported`.
    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        let whole = |value: &Value| value.as_u64().and_then(|value| usize::try_from(value).ok());
        self.get(key).map(|value| whole(value).ok_or_else(|| refused(key, value, "whole numbers from 0"))).transpose()
    }

    /// # Errors
    /// `Unsupported`.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.get(key).map(|value| value.as_f64().ok_or_else(|| refused(key, value, "numbers"))).transpose()
    }

    /// # Errors
    /// `Unsupported`.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key).map(|value| value.as_bool().ok_or_else(|| refused(key, value, "true, false"))).transpose()
    }

    /// One of the names in `table`, as what it stands for.
    ///
    /// # Errors
    /// `Unsupported`, naming the table.
    pub fn one_of<T: Copy>(&self, key: &str, table: &[(&str, T)]) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match table.iter().find(|(name, _)| value.as_str() == Some(name)) {
            Some(&(_, meaning)) => Ok(Some(meaning)),
            None => {
                let names: Vec<&str> = table.iter().map(|(name, _)| *name).collect();
                Err(refused(key, value, &names.join(", ")))
            }
        }
    }

    /// A list of whole numbers; empty if it is not there.
    ///
    /// # Errors
    /// `Unsupported`.
    pub fn indices(&self, key: &str) -> Result<Vec<usize>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let indices: Option<Vec<usize>> = value.as_array().and_then(|all| {
            all.iter().map(|index| index.as_u64().and_then(|index| usize::try_from(index).ok())).collect()
        });
        indices.ok_or_else(|| refused(key, value, "a list of layers, counted from 0"))
    }

    /// The settings in the table `key`; none if it is not there, or no table.
    pub fn table(&self, key: &str) -> Keys {
        Keys(self.get(key).and_then(Value::as_object).cloned().unwrap_or_default())
    }

    /// What is there, unless null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }
}

fn refused(key: &str, value: &Value, supported: &str) -> ModelError {
    // A name without quotes, as in other messages.
    let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    ModelError::Unsupported { key: key.to_owned(), value, supported: supported.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(json: &str) -> Keys {
        Keys::new(serde_json::from_str(json).unwrap())
    }

    #[test]
    fn what_is_there_is_read_and_null_is_not_there() {
        let keys = keys(
            r#"{"n": 8, "zero": 0, "x": 2.5, "yes": true, "list": [0, 3], "none": null, "how": "softmax",
                "inner": {"n": 5}}"#,
        );
        assert_eq!(keys.size("n").unwrap(), 8);
        assert_eq!((keys.count("zero").unwrap(), keys.count("none").unwrap()), (Some(0), None));
        assert_eq!((keys.number("x").unwrap(), keys.number("n").unwrap()), (Some(2.5), Some(8.0)));
        assert_eq!((keys.flag("yes").unwrap(), keys.flag("no").unwrap()), (Some(true), None));
        assert_eq!((keys.indices("list").unwrap(), keys.indices("none").unwrap()), (vec![0, 3], vec![]));
        assert_eq!(keys.one_of("how", &[("sigmoid", 1), ("softmax", 2)]).unwrap(), Some(2));
        let inner = keys.table("inner");
        assert_eq!((inner.count("n").unwrap(), keys.table("list")), (Some(5), Keys::default()));
    }

    #[test]
    fn what_is_of_another_kind_is_refused_by_name() {
        let keys = keys(r#"{"n": -8, "zero": 0, "x": "2.5", "yes": 1, "list": [0, -3], "how": "tanh"}"#);
        let text = |err: ModelError| err.to_string();
        assert_eq!(text(keys.size("n").unwrap_err()), "config.json: n is -8, supported: whole numbers from 0");
        assert_eq!(text(keys.size("zero").unwrap_err()), "config.json: zero is 0, supported: 1 and more");
        assert_eq!(text(keys.size("m").unwrap_err()), "config.json has no m");
        assert_eq!(text(keys.number("x").unwrap_err()), "config.json: x is 2.5, supported: numbers");
        assert_eq!(text(keys.flag("yes").unwrap_err()), "config.json: yes is 1, supported: true, false");
        assert_eq!(
            text(keys.indices("list").unwrap_err()),
            "config.json: list is [0,-3], supported: a list of layers, counted from 0"
        );
        let refused = keys.one_of("how", &[("sigmoid", 1), ("softmax", 2)]).unwrap_err();
        assert_eq!(text(refused), "config.json: how is tanh, supported: sigmoid, softmax");
    }
}
