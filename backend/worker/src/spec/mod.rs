//! Draft methods, by the name that settings use.

mod ngram;
mod proposer;

pub use ngram::Ngram;
pub use proposer::{Propose, ProposeRow, Proposer};

use crate::error::{Result, WorkerError};

/// How drafts are made, as an operator sets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeculateConfig {
    /// `speculate_method`; one of [`methods`].
    pub method: String,
    /// `speculate_max_draft_token_num`.
    pub max_draft_token_num: u32,
    /// `speculate_max_ngram_size`.
    pub max_ngram_size: u32,
}

impl Default for SpeculateConfig {
    fn default() -> Self {
        SpeculateConfig { method: "none".into(), max_draft_token_num: 1, max_ngram_size: 1 }
    }
}

/// Makes a proposer.
type Make = fn(&SpeculateConfig) -> Option<Box<dyn Proposer>>;

/// The table: a method's name, and how its proposer is made.
const METHODS: &[(&str, Make)] = &[("none", |_| None), ("inference_with_reference", ngram), ("ngram", ngram)];

/// The names that `speculate_method` may have.
pub fn methods() -> impl Iterator<Item = &'static str> {
    METHODS.iter().map(|(name, _)| *name)
}

/// The proposer that `config` asks for, if any.
///
/// # Errors
/// `Setting` if the method is unknown or a number cannot work.
pub(crate) fn proposer(config: &SpeculateConfig) -> Result<Option<Box<dyn Proposer>>> {
    let setting = |field, got: &dyn ToString, must: String| WorkerError::Setting { field, got: got.to_string(), must };
    let Some((_, make)) = METHODS.iter().find(|(name, _)| *name == config.method) else {
        let names: Vec<_> = methods().collect();
        return Err(setting("speculate_method", &config.method, format!("one of {}", names.join(", "))));
    };
    let drafts = config.max_draft_token_num;
    if !(1..=MAX_DRAFTS).contains(&drafts) {
        return Err(setting("speculate_max_draft_token_num", &drafts, format!("1 to {MAX_DRAFTS}")));
    }
    if config.max_ngram_size == 0 {
        return Err(setting("speculate_max_ngram_size", &config.max_ngram_size, "at least 1".into()));
    }
    Ok(make(config))
}

/// Attention verifies up to this many drafts and the token before them as one small tile.
const MAX_DRAFTS: u32 = 7;

fn ngram(config: &SpeculateConfig) -> Option<Box<dyn Proposer>> {
    Some(Box::new(Ngram { max_n: config.max_ngram_size as usize, max_drafts: config.max_draft_token_num as usize }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(method: &str, max_draft_token_num: u32) -> String {
        match proposer(&SpeculateConfig { method: method.into(), max_draft_token_num, max_ngram_size: 2 }) {
            Ok(None) => "none".into(),
            Ok(Some(proposer)) => format!("{} drafts", proposer.max_drafts()),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_method_is_found_by_its_name() {
        assert_eq!(made("none", 1), "none");
        assert_eq!(made("ngram", 3), "3 drafts");
        assert_eq!(made("inference_with_reference", 5), "5 drafts");
        assert_eq!(
            made("medusa", 1),
            "speculate_method is medusa, must be one of none, inference_with_reference, ngram"
        );
        assert_eq!(made("ngram", 8), "speculate_max_draft_token_num is 8, must be 1 to 7");
    }
}
