//! `quantization_config` of a checkpoint that is stored quantized.

use std::fmt;

use serde::Deserialize;

use super::unsupported;
use crate::error::{ModelError, Result};

/// What methods store of themselves; which keys a method needs and what they may be is for its scheme to say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct StoredQuantization {
    #[serde(rename = "quant_method")]
    pub method: String,
    /// Neighbouring inputs that share one scale, -1 for all of a row.
    pub group_size: Option<i64>,
    /// Layers stored unquantized, by name or a part of it.
    #[serde(default, rename = "modules_to_not_convert", deserialize_with = "names_or_null")]
    pub unquantized: Vec<String>,
    pub bits: Option<i64>,
    pub zero_point: Option<bool>,
    pub version: Option<String>,
    pub desc_act: Option<bool>,
    pub checkpoint_format: Option<String>,
    pub fmt: Option<String>,
    pub activation_scheme: Option<String>,
    /// Rows and columns that share one scale.
    pub weight_block_size: Option<Vec<i64>>,
}

fn names_or_null<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

impl StoredQuantization {
    /// # Errors
    /// `Unsupported` if the value of `key` is none of these.
    pub(crate) fn expect(&self, key: &str, value: &str, supported: &[&str]) -> Result<()> {
        if supported.contains(&value) { Ok(()) } else { Err(self.refuse(key, &value, &supported.join(", "))) }
    }

    pub(crate) fn refuse(&self, key: &str, value: &dyn fmt::Display, supported: &str) -> ModelError {
        unsupported(format!("quantization_config.{key}"), value, supported)
    }

    /// Whether every name of `unquantized` is that of a layer, or a part of one's; `tensors` are the checkpoint's.
    ///
    /// # Errors
    /// `Unsupported`, with the first name that leaves out nothing.
    pub(crate) fn check_names(&self, tensors: &[&str]) -> Result<()> {
        // A tied head has no tensor, and is often named all the same.
        let is_known = |name: &str| name.starts_with("lm_head") || tensors.iter().any(|tensor| tensor.contains(name));
        match self.unquantized.iter().find(|name| name.is_empty() || !is_known(name)) {
            None => Ok(()),
            Some(name) => {
                let example = tensors.iter().find_map(|tensor| tensor.strip_suffix(".weight")).unwrap_or("lm_head");
                let supported = format!("names of the checkpoint's layers or parts of them, like {example}");
                Err(self.refuse("modules_to_not_convert", name, &supported))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> StoredQuantization {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn names_that_leave_out_nothing_are_refused() {
        let tensors = ["model.layers.0.mlp.gate.weight", "model.norm.weight"];
        let check = |names: &str| {
            let stored = parse(&format!(r#"{{"quant_method": "fp8", "modules_to_not_convert": {names}}}"#));
            stored.check_names(&tensors).map_or_else(|err| err.to_string(), |()| "fine".into())
        };
        for fine in ["null", "[]", r#"["lm_head"]"#, r#"["mlp.gate"]"#, r#"["model.layers.0.mlp.gate"]"#] {
            assert_eq!(check(fine), "fine", "{fine}");
        }
        assert_eq!(
            check(r#"["mlp.gate", "mlp.grate"]"#),
            "config.json: quantization_config.modules_to_not_convert is mlp.grate, supported: names of the checkpoint's \
             layers or parts of them, like model.layers.0.mlp.gate"
        );
    }
}
