//! What an operator should know of settings that load and yet do not do what they say.

use super::{Resolved, SETTINGS, Settings, Source};

/// The methods that make drafts.
const ANY_METHOD: &[&str] = &["inference_with_reference", "ngram", "mtp", "eagle"];
/// Those that run a model for it.
const BY_MODEL: &[&str] = &["mtp", "eagle"];
const BY_NGRAM: &[&str] = &["inference_with_reference", "ngram"];
const LOSSY: &[&str] = &["paddle_top1", "paddle_topp_window"];

/// A setting, and the one beside it that must have one of some values, or it changes nothing. A lossy `speculate_verify` without a method
/// is not among them: it is refused when the model loads.
const NEEDS: &[(&str, &str, &[&str])] = &[
    ("speculate_max_draft_token_num", "speculate_method", ANY_METHOD),
    ("speculate_draft_token_bound", "speculate_method", ANY_METHOD),
    ("speculate_adaptive", "speculate_method", BY_MODEL),
    ("speculate_forced_acceptance", "speculate_method", ANY_METHOD),
    ("draft_model_name_or_path", "speculate_method", BY_MODEL),
    ("draft_model_quant_type", "speculate_method", BY_MODEL),
    ("speculate_max_ngram_size", "speculate_method", BY_NGRAM),
    ("speculate_verify_window", "speculate_verify", &["paddle_topp_window"]),
    ("speculate_max_candidate_len", "speculate_verify", LOSSY),
];

impl Settings {
    /// A line for each value that was given and has lost to `config.pbtxt`, and for each that changes nothing beside the others.
    pub fn notices(&self) -> Vec<String> {
        let overruled = self.iter().filter_map(overruled);
        let idle = NEEDS.iter().filter_map(|&(name, by, values)| self.idle(name, by, values));
        overruled.chain(idle).collect()
    }

    fn idle(&self, name: &str, by: &str, values: &[&str]) -> Option<String> {
        let given = self.iter().find(|resolved| resolved.name == name && resolved.source != Source::Default)?;
        let setting = SETTINGS.iter().find(|setting| setting.name == name)?;
        let value = self.text(by);
        let says_nothing = given.value == setting.default || values.contains(&value);
        (!says_nothing).then(|| {
            format!("{name} is '{}' ({}), which changes nothing while {by} is '{value}'", given.value, given.source)
        })
    }
}

fn overruled(resolved: &Resolved) -> Option<String> {
    let (given, by) = resolved.overruled.as_ref()?;
    let Resolved { name, value, source, .. } = resolved;
    Some(format!("{name} is '{value}' ({source}), which wins over '{given}' ({by})"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use drafthorse_proto::inference::ModelParameter;

    use super::super::SettingFlags;
    use super::*;

    fn notices(file: &[(&str, &str)], flags: &[(&str, &str)], environment: &[(&str, &str)]) -> Vec<String> {
        let parameter = |value: &str| ModelParameter { string_value: value.into() };
        let file: HashMap<_, _> = file.iter().map(|(name, value)| ((*name).to_owned(), parameter(value))).collect();
        let flags = SettingFlags::from_pairs(flags.iter().copied());
        let variable =
            |wanted: &str| environment.iter().find(|(name, _)| *name == wanted).map(|(_, value)| (*value).to_owned());
        Settings::resolve(&file, &flags, variable).unwrap().notices()
    }

    #[test]
    fn a_flag_that_loses_to_the_file_is_told_with_both_values() {
        let file = [("max_num_seqs", "64"), ("block_size", "32"), ("max_waiting", "9")];
        assert_eq!(
            notices(&file, &[("max_num_seqs", "8"), ("block_size", " 32 ")], &[("DRAFTHORSE_MAX_WAITING", "7")]),
            [
                "max_num_seqs is '64' (config.pbtxt), which wins over '8' (flag)",
                "max_waiting is '9' (config.pbtxt), which wins over '7' (environment)",
            ]
        );
        assert!(notices(&[], &[("max_num_seqs", "8")], &[("DRAFTHORSE_MAX_NUM_SEQS", "7")]).is_empty());
    }

    #[test]
    fn what_belongs_to_drafts_is_told_to_change_nothing_where_none_are_made() {
        let idle = |flags: &[(&str, &str)]| notices(&[], flags, &[]);
        assert_eq!(
            idle(&[("draft_model_quant_type", "weight_only_int8"), ("speculate_max_draft_token_num", "5")]),
            [
                "speculate_max_draft_token_num is '5' (flag), which changes nothing while speculate_method is 'none'",
                "draft_model_quant_type is 'weight_only_int8' (flag), which changes nothing while speculate_method is 'none'",
            ]
        );
        assert_eq!(
            idle(&[
                ("speculate_method", "ngram"),
                ("draft_model_name_or_path", "mtp"),
                ("speculate_verify_window", "3")
            ]),
            [
                "draft_model_name_or_path is 'mtp' (flag), which changes nothing while speculate_method is 'ngram'",
                "speculate_verify_window is '3' (flag), which changes nothing while speculate_verify is 'exact'",
            ]
        );
        assert!(idle(&[("speculate_max_draft_token_num", "3"), ("speculate_verify", "exact")]).is_empty(), "defaults");
        let all =
            [("speculate_method", "mtp"), ("speculate_verify", "paddle_topp_window"), ("speculate_verify_window", "3")];
        assert!(idle(&all).is_empty());
    }

    #[test]
    fn the_table_has_names_of_settings() {
        let known = |name: &str| SETTINGS.iter().any(|setting| setting.name == name);
        assert!(NEEDS.iter().all(|(name, by, _)| known(name) && known(by)));
    }
}
