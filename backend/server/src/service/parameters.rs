//! A request's parameters: those with a meaning of their own, and the rest, which are sampling parameters.

use std::collections::HashMap;
use std::time::Duration;

use drafthorse_proto::inference::InferParameter;
use drafthorse_proto::inference::infer_parameter::ParameterChoice;
use serde_json::{Map, Value};

use crate::error::{Result, ServerError};

/// The only parameter of its prefix that a caller may set.
const EMPTY_FINAL: &str = "triton_enable_empty_final_response";

/// What the parameters of a request say.
#[derive(Debug, Default, PartialEq)]
pub struct Parameters {
    /// 1 goes first; 0 is the model's default.
    pub priority: u32,
    /// How long the request may wait for its first step.
    pub queue_timeout: Option<Duration>,
    /// Everything else.
    pub sampling: Map<String, Value>,
}

impl Parameters {
    /// Reads and checks all parameters.
    ///
    /// # Errors
    /// `BadInput` naming the parameter.
    pub fn read(parameters: &HashMap<String, InferParameter>) -> Result<Self> {
        let mut read = Parameters::default();
        for (name, parameter) in parameters {
            let choice = parameter.parameter_choice.as_ref();
            let expected = |types: &str| bad(name, &format!("has the wrong type, expected {types}"));
            match name.as_str() {
                "priority" => {
                    read.priority = priority(choice).ok_or_else(|| expected("uint64 or an int64 of at least 0"))?;
                }
                "timeout" => {
                    let Some(ParameterChoice::Int64Param(micros)) = choice else { return Err(expected("int64")) };
                    let micros = u64::try_from(*micros).map_err(|_| bad(name, "must not be negative"))?;
                    read.queue_timeout = (micros > 0).then(|| Duration::from_micros(micros));
                }
                // One request is one prompt; there are no sequences of requests to keep apart.
                "sequence_id" => match choice {
                    Some(ParameterChoice::Int64Param(_) | ParameterChoice::StringParam(_)) => {}
                    _ => return Err(expected("int64 or string")),
                },
                // The empty final response never comes: the last content is always marked as final.
                "sequence_start" | "sequence_end" | "binary_data_output" | EMPTY_FINAL => match choice {
                    Some(ParameterChoice::BoolParam(_)) => {}
                    _ => return Err(expected("bool")),
                },
                "headers" => {}
                _ if name.starts_with("triton_") => return Err(bad(name, "is reserved: no such parameter")),
                _ => {
                    let value = value(choice).ok_or_else(|| expected("bool, int64, double or string"))?;
                    read.sampling.insert(name.clone(), value);
                }
            }
        }
        Ok(read)
    }
}

fn bad(name: &str, reason: &str) -> ServerError {
    ServerError::bad_input(format!("parameter '{name}'"), reason)
}

fn priority(choice: Option<&ParameterChoice>) -> Option<u32> {
    match choice {
        // Levels beyond any that a model has mean its default.
        Some(ParameterChoice::Uint64Param(level)) => Some(u32::try_from(*level).unwrap_or(0)),
        Some(ParameterChoice::Int64Param(level)) if *level >= 0 => Some(u32::try_from(*level).unwrap_or(0)),
        _ => None,
    }
}

fn value(choice: Option<&ParameterChoice>) -> Option<Value> {
    match choice? {
        ParameterChoice::BoolParam(value) => Some(Value::from(*value)),
        ParameterChoice::Int64Param(value) => Some(Value::from(*value)),
        ParameterChoice::DoubleParam(value) => serde_json::Number::from_f64(*value).map(Value::Number),
        ParameterChoice::StringParam(value) => Some(Value::from(value.as_str())),
        ParameterChoice::Uint64Param(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, ParameterChoice)]) -> String {
        let parameter = |choice: &ParameterChoice| InferParameter { parameter_choice: Some(choice.clone()) };
        let map = pairs.iter().map(|(name, choice)| ((*name).to_owned(), parameter(choice))).collect();
        match Parameters::read(&map) {
            Ok(read) => format!("{} {:?} {}", read.priority, read.queue_timeout, Value::Object(read.sampling)),
            Err(error) => format!("{:?} {error}", error.code()),
        }
    }

    #[test]
    fn known_ones_are_taken_and_the_rest_are_for_sampling() {
        use ParameterChoice::{BoolParam, DoubleParam, Int64Param, StringParam, Uint64Param};
        assert_eq!(read(&[("priority", Uint64Param(2)), (EMPTY_FINAL, BoolParam(true))]), "2 None {}");
        assert_eq!(read(&[("timeout", Int64Param(1500))]), "0 Some(1.5ms) {}");
        assert_eq!(read(&[("temperature", DoubleParam(0.5))]), "0 None {\"temperature\":0.5}");
        assert_eq!(read(&[("max_tokens", StringParam("8".into()))]), "0 None {\"max_tokens\":\"8\"}");
        for (name, choice, said) in [
            ("foo", Uint64Param(1), "parameter 'foo': has the wrong type, expected bool, int64, double or string"),
            ("triton_foo", BoolParam(true), "parameter 'triton_foo': is reserved: no such parameter"),
            (
                EMPTY_FINAL,
                Int64Param(1),
                "parameter 'triton_enable_empty_final_response': has the wrong type, expected bool",
            ),
            (
                "priority",
                Int64Param(-1),
                "parameter 'priority': has the wrong type, expected uint64 or an int64 of at least 0",
            ),
            ("timeout", Int64Param(-1), "parameter 'timeout': must not be negative"),
        ] {
            assert_eq!(read(&[(name, choice)]), format!("InvalidArgument {said}"));
        }
        let unset = HashMap::from([("x".to_owned(), InferParameter::default())]);
        assert!(Parameters::read(&unset).is_err());
    }
}
