//! `config.pbtxt` text to [`ModelConfig`] and back.

use std::sync::LazyLock;

use miette::Diagnostic;
use prost::Message;
use prost_reflect::text_format::{FormatOptions, ParseError};
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};

use crate::FILE_DESCRIPTOR_SET;
use crate::inference::ModelConfig;

/// A text that is no [`ModelConfig`]. Lines and columns count from 1, columns in characters.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PbtxtError {
    #[error("line {line} column {column}: {reason}")]
    Syntax { line: usize, column: usize, reason: String },
    #[error("{reason}")]
    Schema { reason: String },
}

static MODEL_CONFIG: LazyLock<Result<MessageDescriptor, PbtxtError>> = LazyLock::new(|| {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).map_err(|error| schema(&error))?;
    pool.get_message_by_name("inference.ModelConfig")
        .ok_or_else(|| schema(&"the descriptor set has no inference.ModelConfig"))
});

/// Parses the text of a `config.pbtxt`. A field that does not exist, or is set twice, is an error.
///
/// # Errors
/// `Syntax` with the place at which the text stops making sense.
pub fn parse_model_config(text: &str) -> Result<ModelConfig, PbtxtError> {
    let (strict, added) = with_list_colons(text);
    let message =
        DynamicMessage::parse_text_format(descriptor()?, &strict).map_err(|error| located(&error, text, &added))?;
    message.transcode_to().map_err(|error| schema(&error))
}

/// The text form of `config`, one field a line.
///
/// # Errors
/// `Schema` if the committed descriptors do not fit the generated code, which a test rules out.
pub fn print_model_config(config: &ModelConfig) -> Result<String, PbtxtError> {
    let bytes = config.encode_to_vec();
    let message = DynamicMessage::decode(descriptor()?, bytes.as_slice()).map_err(|error| schema(&error))?;
    Ok(message.to_text_format_with_options(&FormatOptions::new().pretty(true)))
}

fn descriptor() -> Result<MessageDescriptor, PbtxtError> {
    MODEL_CONFIG.as_ref().cloned().map_err(|error| schema(error))
}

fn schema(error: &dyn std::fmt::Display) -> PbtxtError {
    PbtxtError::Schema { reason: error.to_string() }
}

/// Writes `input: [` where the text has `input [`, as protobuf's own parser allows for lists of messages and ours does not.
/// Returns the text and the byte offsets in it of the colons that were added.
fn with_list_colons(text: &str) -> (String, Vec<usize>) {
    let mut strict = String::with_capacity(text.len() + 16);
    let mut added = Vec::new();
    let mut quote = None;
    let mut escaped = false;
    let mut in_comment = false;
    // Whether the last thing outside comments and white space was a name that does not follow a colon.
    let mut after_name = false;
    let mut after_colon = false;
    let mut in_word = false;
    for c in text.chars() {
        let was_in_word = std::mem::replace(&mut in_word, false);
        if in_comment {
            in_comment = c != '\n';
        } else if let Some(open) = quote {
            if escaped {
                escaped = false;
            } else if c == '\\' {
                escaped = true;
            } else if c == open {
                quote = None;
            }
        } else if c.is_ascii_alphanumeric() || c == '_' {
            if !was_in_word {
                after_name = !after_colon && !c.is_ascii_digit();
                after_colon = false;
            }
            in_word = true;
        } else if c == '#' {
            in_comment = true;
        } else if !c.is_whitespace() {
            if c == '[' && after_name {
                added.push(strict.len());
                strict.push(':');
            }
            if c == '"' || c == '\'' {
                quote = Some(c);
            }
            after_name = false;
            after_colon = c == ':';
        }
        strict.push(c);
    }
    (strict, added)
}

/// The parser labels its errors with byte offsets; one without a label ran into the end of the text.
fn located(error: &ParseError, text: &str, added: &[usize]) -> PbtxtError {
    let labels = error.labels().and_then(|mut labels| labels.next());
    let offset = labels.map_or(text.len(), |label| {
        let strict_offset = label.offset();
        let shift = added.iter().filter(|colon| **colon < strict_offset).count();
        (strict_offset - shift).min(text.len())
    });
    let before = &text[..text.floor_char_boundary(offset)];
    let line_at = before.rfind('\n').map_or(0, |newline| newline + 1);
    let line = before.matches('\n').count() + 1;
    let column = before[line_at..].chars().count() + 1;
    PbtxtError::Syntax { line, column, reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        parse_model_config(text).unwrap_err().to_string()
    }

    #[test]
    fn reads_what_triton_writes() {
        let config = parse_model_config(
            r#"
            name: "llm"  # a comment
            backend: "drafthorse"
            model_transaction_policy { decoupled: true }
            input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
                    { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
            instance_group [ { count: 1 kind: KIND_MODEL } ]
            parameters { key: "block_size" value { string_value: "32" } }
            parameters: { key: "quant_type", value: { string_value: 'weight_only_'"int8" } }
            dynamic_batching { default_queue_policy { max_queue_size: 7 } }
            "#,
        )
        .unwrap();
        assert_eq!((config.name.as_str(), config.input.len()), ("llm", 2));
        assert!(config.input[1].optional);
        assert_eq!(config.parameters["block_size"].string_value, "32");
        assert_eq!(config.parameters["quant_type"].string_value, "weight_only_int8");
    }

    #[test]
    fn says_where_the_text_stops_making_sense() {
        let said = refused("name: \"m\"\n  bakend: \"x\"\n");
        assert!(said.starts_with("line 2 column 3: "), "{said}");
        assert!(said.contains("bakend"), "{said}");
        let said = refused("name: \"é\" max_batch_size: \"many\"");
        assert!(said.starts_with("line 1 column 27: "), "{said}");
        let said = refused("input [ { name: \"a\"\n");
        assert!(said.starts_with("line 2 column 1: "), "{said}");
        let said = refused("input [ { name: \"a [\" } ] output [ { nam: 1 } ]");
        assert!(said.starts_with("line 1 column 38: "), "{said}");
        let said = refused("name: \"a\"\nname: \"b\"");
        assert!(said.starts_with("line 2 column 7: "), "{said}");
        let said = refused("input { data_type: TYPE_FLOAT }");
        assert!(said.starts_with("line 1 column 20: "), "{said}");
    }

    #[test]
    fn what_is_not_served_is_an_unknown_field() {
        let said = refused("ensemble_scheduling { }");
        assert!(said.contains("ensemble_scheduling"), "{said}");
    }

    #[test]
    fn printed_text_parses_to_the_same_config() {
        let text = "name: \"a\\\"b\" max_batch_size: 4 parameters { key: \"k\" value { string_value: \"v\" } }";
        let config = parse_model_config(text).unwrap();
        assert_eq!(parse_model_config(&print_model_config(&config).unwrap()).unwrap(), config);
    }
}
