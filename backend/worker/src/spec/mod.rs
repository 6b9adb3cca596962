//! Draft methods, by the name that settings use.

mod forced;
mod model;
mod ngram;
mod policy;
mod proposer;
mod verify;

use std::path::PathBuf;

pub(crate) use forced::Forced;
pub(crate) use model::{DraftSizes, Drafter, ModelProposer};
pub use ngram::Ngram;
pub use proposer::{PassedOver, Propose, ProposeRow, Proposer, Unseen};
pub use verify::verify_rules;
pub(crate) use verify::{Ranked, Verify};

use crate::error::{Result, WorkerError};

/// How drafts are made, as an operator sets it.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeculateConfig {
    /// `speculate_method`; one of [`methods`].
    pub method: String,
    /// `speculate_max_draft_token_num`.
    pub max_draft_token_num: u32,
    /// `speculate_max_ngram_size`.
    pub max_ngram_size: u32,
    /// `speculate_draft_token_bound`: what `max_draft_token_num` may be.
    pub draft_token_bound: u32,
    /// `speculate_adaptive`: fewer drafts or none where they do not pay.
    pub adaptive: bool,
    /// `speculate_forced_acceptance`, for benches alone: the share of drafts that hold whatever the target says.
    pub forced_acceptance: Option<f32>,
    /// `draft_model_name_or_path`, as a folder. `None`: the drafter is part of the base's checkpoint, where its method knows such.
    pub draft_dir: Option<PathBuf>,
    /// `draft_model_quant_type`. `None` keeps what the drafter's checkpoint has.
    pub draft_quant_type: Option<String>,
    /// `speculate_verify`; one of [`verify_rules`]. All but `exact` are lossy.
    pub verify: String,
    /// `speculate_verify_window`, of `paddle_topp_window`.
    pub verify_window: u32,
    /// `speculate_max_candidate_len`, of all lossy rules.
    pub max_candidate_len: u32,
}

impl Default for SpeculateConfig {
    fn default() -> Self {
        SpeculateConfig {
            method: "none".into(),
            max_draft_token_num: 1,
            max_ngram_size: 1,
            draft_token_bound: 5,
            adaptive: true,
            forced_acceptance: None,
            draft_dir: None,
            draft_quant_type: None,
            verify: "exact".into(),
            verify_window: 2,
            max_candidate_len: 5,
        }
    }
}

/// What makes the drafts of a method.
pub(crate) enum Method {
    None,
    /// Needs no model.
    Host(Box<dyn Proposer>),
    /// A model that is loaded after the base.
    Model,
}

/// The table: a method's name, and what makes its drafts.
const METHODS: &[(&str, fn(&SpeculateConfig) -> Method)] = &[
    ("none", |_| Method::None),
    ("inference_with_reference", ngram),
    ("ngram", ngram),
    ("mtp", |_| Method::Model),
    (EAGLE, |_| Method::Model),
];

/// Its heads are no part of any base's checkpoint.
const EAGLE: &str = "eagle";

/// The names that `speculate_method` may have.
pub fn methods() -> impl Iterator<Item = &'static str> {
    METHODS.iter().map(|(name, _)| *name)
}

/// The method that `config` asks for.
///
/// # Errors
/// `Setting` if it is unknown or a number cannot work.
pub(crate) fn method(config: &SpeculateConfig) -> Result<Method> {
    let setting = |field, got: &dyn ToString, must: String| WorkerError::Setting { field, got: got.to_string(), must };
    let Some((_, make)) = METHODS.iter().find(|(name, _)| *name == config.method) else {
        let names: Vec<_> = methods().collect();
        return Err(setting("speculate_method", &config.method, format!("one of {}", names.join(", "))));
    };
    if config.method == EAGLE && config.draft_dir.is_none() {
        let must = "the folder of an EAGLE head; speculate_method none serves without one".into();
        return Err(setting("draft_model_name_or_path", &"not given", must));
    }
    let (drafts, bound) = (config.max_draft_token_num, config.draft_token_bound);
    if !(1..=MAX_DRAFTS).contains(&bound) {
        return Err(setting("speculate_draft_token_bound", &bound, format!("1 to {MAX_DRAFTS}")));
    }
    if !(1..=bound).contains(&drafts) {
        let must = match bound {
            MAX_DRAFTS => format!("1 to {MAX_DRAFTS}"),
            _ => format!("1 to {bound}; speculate_draft_token_bound allows up to {MAX_DRAFTS}"),
        };
        return Err(setting("speculate_max_draft_token_num", &drafts, must));
    }
    if let Some(share) = config.forced_acceptance.filter(|share| Forced::new(*share).is_none()) {
        return Err(setting("speculate_forced_acceptance", &share, "0 to 1".into()));
    }
    if config.max_ngram_size == 0 {
        return Err(setting("speculate_max_ngram_size", &config.max_ngram_size, "at least 1".into()));
    }
    Ok(make(config))
}

/// How the drafts that `config` asks for are verified.
///
/// # Errors
/// `Setting` if the rule is unknown or a number cannot work.
pub(crate) fn verify_rule(config: &SpeculateConfig) -> Result<Verify> {
    let setting = |field, got: &dyn ToString, must: String| WorkerError::Setting { field, got: got.to_string(), must };
    let Some(rule) = verify::named(config) else {
        let names: Vec<_> = verify_rules().collect();
        return Err(setting("speculate_verify", &config.verify, format!("one of {}", names.join(", "))));
    };
    if !(1..=MAX_CANDIDATES).contains(&config.max_candidate_len) {
        let must = format!("1 to {MAX_CANDIDATES}");
        return Err(setting("speculate_max_candidate_len", &config.max_candidate_len, must));
    }
    // A wider window would never be full.
    if !(1..MAX_DRAFTS).contains(&config.verify_window) {
        let must = format!("1 to {}", MAX_DRAFTS - 1);
        return Err(setting("speculate_verify_window", &config.verify_window, must));
    }
    Ok(rule)
}

/// Most tokens that a lossy rule picks from.
const MAX_CANDIDATES: u32 = 64;

/// Attention verifies up to this many drafts and the token before them as one small tile.
const MAX_DRAFTS: u32 = 7;

fn ngram(config: &SpeculateConfig) -> Method {
    let (max_n, max_drafts) = (config.max_ngram_size as usize, config.max_draft_token_num as usize);
    Method::Host(Box::new(Ngram { max_n, max_drafts }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(name: &str, max_draft_token_num: u32, draft_token_bound: u32) -> String {
        let config = SpeculateConfig {
            method: name.into(),
            max_draft_token_num,
            max_ngram_size: 2,
            draft_token_bound,
            ..SpeculateConfig::default()
        };
        match method(&config) {
            Ok(Method::None) => "none".into(),
            Ok(Method::Host(proposer)) => format!("{} drafts", proposer.max_drafts()),
            Ok(Method::Model) => "a model".into(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_method_is_found_by_its_name() {
        assert_eq!(made("none", 1, 5), "none");
        assert_eq!(made("ngram", 3, 5), "3 drafts");
        assert_eq!(made("inference_with_reference", 7, 7), "7 drafts");
        assert_eq!(made("mtp", 3, 5), "a model");
        assert_eq!(
            made("medusa", 1, 5),
            "speculate_method is medusa, must be one of none, inference_with_reference, ngram, mtp, eagle"
        );
        assert_eq!(
            made("eagle", 1, 5),
            "draft_model_name_or_path is not given, must be the folder of an EAGLE head; speculate_method none serves without one"
        );
        assert_eq!(
            made("ngram", 6, 5),
            "speculate_max_draft_token_num is 6, must be 1 to 5; speculate_draft_token_bound allows up to 7"
        );
        assert_eq!(made("ngram", 8, 7), "speculate_max_draft_token_num is 8, must be 1 to 7");
        assert_eq!(made("ngram", 1, 8), "speculate_draft_token_bound is 8, must be 1 to 7");
    }

    #[test]
    fn a_rule_is_found_by_its_name_and_exact_is_the_default() {
        let rule = |change: fn(&mut SpeculateConfig)| {
            let mut config = SpeculateConfig::default();
            change(&mut config);
            verify_rule(&config).map_err(|error| error.to_string())
        };
        assert_eq!(rule(|_| ()), Ok(Verify::Exact));
        assert_eq!(rule(|c| c.verify = "paddle_top1".into()), Ok(Verify::Top1 { candidates: 5 }));
        assert_eq!(
            rule(|c| c.verify = "paddle_topp_window".into()),
            Ok(Verify::TopPWindow { candidates: 5, window: 2 })
        );
        let refused = |change| rule(change).unwrap_err();
        assert_eq!(
            refused(|c| c.verify = "greedy".into()),
            "speculate_verify is greedy, must be one of exact, paddle_top1, paddle_topp_window"
        );
        assert_eq!(refused(|c| c.verify_window = 7), "speculate_verify_window is 7, must be 1 to 6");
        assert_eq!(refused(|c| c.max_candidate_len = 0), "speculate_max_candidate_len is 0, must be 1 to 64");
    }
}
