//! What an operator may set for one model, and where each value came from.
//!
//! A parameter in the model's `config.pbtxt` wins over a command-line flag, a flag over the environment, that over the default.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;

use clap::{Arg, ArgAction, ArgMatches, Command};
use drafthorse_proto::inference::ModelParameter;

use crate::error::{Result, ServerError, nearest_hint};

mod notices;

/// One row of the table of settings.
#[derive(Debug)]
pub struct Setting {
    /// As in `config.pbtxt`; the flag has dashes, the environment variable is `DRAFTHORSE_` and capitals.
    pub name: &'static str,
    pub default: &'static str,
    /// The default on a GPU, where it is another.
    pub on_gpu: &'static str,
    pub help: &'static str,
}

const fn setting(name: &'static str, default: &'static str, help: &'static str) -> Setting {
    Setting { name, default, on_gpu: default, help }
}

impl Setting {
    const fn on_gpu(self, default: &'static str) -> Setting {
        Setting { on_gpu: default, ..self }
    }
}

/// Every setting of a model. An empty default means that it follows from the model or the machine.
pub const SETTINGS: &[Setting] = &[
    setting("device", "auto", "auto, cpu, cuda or cuda:N, the GPU of that number; auto is the CPU"),
    setting("dtype", "auto", "auto, float32 or bfloat16: activations and KV cache; auto is float32 on a CPU"),
    setting("quant_type", "none", "none, weight_only_int8 or weight_only_int4: how weights are quantized at load"),
    setting(
        "weightonly_group_size",
        "",
        "weights that share a scale: 32, 64, 128, or -1 for a whole row; default by quant_type",
    ),
    setting(
        "mla_use_matrix_absorption",
        "always",
        "with latent attention, multiply queries instead of expanding keys: true while decoding, false never, always also in \
         prompts; with true a text may depend on how its prompt was cut",
    ),
    setting("load_format", "auto", "auto, or dummy: weights are made up, for measuring; then no tokenizer is needed"),
    setting("max_num_seqs", "64", "most sequences in one step").on_gpu("512"),
    setting("max_num_batched_tokens", "512", "most tokens in one step, over all sequences").on_gpu("8192"),
    setting("max_model_len", "", "most tokens of a prompt and its output; default the model's context"),
    setting("block_size", "16", "tokens in a block of KV cache, a power of two").on_gpu("64"),
    setting("kv_cache_bytes", "512M", "size of the KV cache; K, M and G stand for powers of 1024"),
    setting(
        "memory_fraction",
        "0.9",
        "share of a GPU's memory that the model may take, the KV cache what is left of it; 0: as kv_cache_bytes says",
    ),
    setting("eager", "false", "run decoding steps on a GPU op by op, not as recorded graphs"),
    setting(
        "deterministic",
        "false",
        "on a GPU, texts whose bits no other request, cut of a prompt or draft changes, as they always are on a CPU; slower",
    ),
    setting("time_device", "false", "measure how long a GPU is busy with each step"),
    setting("memory_bytes", "", "bound on weights, workspace and KV cache together; default none"),
    setting("max_step_time_ms", "100", "longest step while a stream is decoding; prompts are cut so that it holds")
        .on_gpu("30"),
    setting("max_waiting", "1024", "requests that may wait for a slot; further ones are refused"),
    setting("queue_timeout_ms", "", "longest wait for a request's first step; default none"),
    setting("default_priority", "8", "level of requests that name none; 1 goes first"),
    setting("enable_prefix_caching", "true", "reuse the KV of prompts that begin alike"),
    setting("strict_parameters", "false", "refuse requests with parameters that are not known, instead of a warning"),
    setting("tensor_parallel_size", "1", "ranks that share each layer"),
    setting("speculate_method", "none", "none, ngram (inference_with_reference), mtp or eagle: how drafts are made"),
    setting("speculate_max_draft_token_num", "3", "most drafts a sequence gets in one step"),
    setting("speculate_draft_token_bound", "5", "what speculate_max_draft_token_num may be, 1 to 7"),
    setting("speculate_adaptive", "true", "with mtp and eagle: fewer drafts, or none, where they do not pay"),
    setting(
        "speculate_forced_acceptance",
        "",
        "for benches alone: the share of drafts, 0 to 1, that hold whatever the model says; its text then means nothing",
    ),
    setting(
        "draft_model_name_or_path",
        "",
        "with mtp and eagle, the draft: a folder, or a model beside this one; default the model of the method's name, for mtp else what is in the \
         checkpoint",
    ),
    setting("draft_model_quant_type", "none", "as quant_type, for the draft"),
    setting(
        "return_full_hidden_states",
        "false",
        "accepted for PaddleNLP's command lines: mtp and eagle have them without it",
    ),
    setting("speculate_max_ngram_size", "3", "longest n-gram that is looked up"),
    setting(
        "speculate_verify",
        "exact",
        "which drafts hold: exact, no text depends on drafts; paddle_top1 and paddle_topp_window are lossy, as PaddleNLP's",
    ),
    setting(
        "speculate_verify_window",
        "2",
        "with paddle_topp_window: drafts after the second likeliest that must be the likeliest",
    ),
    setting("speculate_max_candidate_len", "5", "with a lossy rule: most tokens that one is picked from"),
];

/// Parameters of `config.pbtxt` that say what a model is, not how it runs.
pub const MODEL_PARAMETERS: &[&str] = &["role"];

/// Which place a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Parameter,
    Flag,
    Environment,
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Source::Parameter => "config.pbtxt",
            Source::Flag => "flag",
            Source::Environment => "environment",
            Source::Default => "default",
        })
    }
}

/// One setting's value and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    pub name: &'static str,
    pub value: String,
    pub source: Source,
    /// What a flag or the environment says otherwise, where `config.pbtxt` wins.
    pub overruled: Option<(String, Source)>,
}

/// All settings of one model, as text.
#[derive(Clone, Debug)]
pub struct Settings {
    resolved: Vec<Resolved>,
}

impl Settings {
    /// Looks each setting up, in order of precedence.
    ///
    /// # Errors
    /// `UnknownSetting` with the nearest name, for a parameter that is in no table.
    pub fn resolve(
        parameters: &HashMap<String, ModelParameter>,
        flags: &SettingFlags,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let known = || SETTINGS.iter().map(|setting| setting.name).chain(MODEL_PARAMETERS.iter().copied());
        for name in parameters.keys() {
            if !known().any(|known| known == name) {
                return Err(ServerError::UnknownSetting { name: name.clone(), hint: nearest_hint(name, known()) });
            }
        }
        let resolve = |setting: &Setting, on_gpu: bool| {
            let parameter = parameters.get(setting.name).map(|parameter| parameter.string_value.trim().to_owned());
            let flag = flags.values.get(setting.name).map(|value| (value.trim().to_owned(), Source::Flag));
            let given = flag.or_else(|| {
                let value = environment(&environment_name(setting.name))?;
                Some((value.trim().to_owned(), Source::Environment))
            });
            let default = if on_gpu { setting.on_gpu } else { setting.default };
            let (value, source, overruled) = match (parameter, given) {
                (Some(value), given) => {
                    let overruled = given.filter(|(given, _)| *given != value);
                    (value, Source::Parameter, overruled)
                }
                (None, Some((value, source))) => (value, source, None),
                (None, None) => (default.to_owned(), Source::Default, None),
            };
            Resolved { name: setting.name, value, source, overruled }
        };
        let device =
            SETTINGS.iter().find(|setting| setting.name == "device").map(|device| resolve(device, false).value);
        let on_gpu = device.is_some_and(|device| device.starts_with("cuda"));
        Ok(Settings { resolved: SETTINGS.iter().map(|setting| resolve(setting, on_gpu)).collect() })
    }

    pub fn iter(&self) -> impl Iterator<Item = &Resolved> {
        self.resolved.iter()
    }

    /// The text of a setting of the table.
    pub fn text(&self, name: &str) -> &str {
        self.resolved.iter().find(|resolved| resolved.name == name).map_or("", |resolved| &resolved.value)
    }

    /// A number or a bool.
    ///
    /// # Errors
    /// `BadSetting` with the value as it was written.
    pub fn parse<T: FromStr>(&self, name: &str, must: &str) -> Result<T> {
        let text = self.text(name);
        text.parse().map_err(|_| self.bad(name, must))
    }

    /// As [`parse`](Self::parse); `None` where nothing is written.
    pub fn parse_optional<T: FromStr>(&self, name: &str, must: &str) -> Result<Option<T>> {
        if self.text(name).is_empty() { Ok(None) } else { self.parse(name, must).map(Some) }
    }

    /// `true`, `false`, `1` or `0`.
    pub fn parse_bool(&self, name: &str) -> Result<bool> {
        parse_bool(self.text(name)).map_err(|must| self.bad(name, &must))
    }

    /// Bytes, possibly with `K`, `M` or `G` behind.
    pub fn parse_bytes(&self, name: &str) -> Result<Option<u64>> {
        let text = self.text(name);
        if text.is_empty() {
            return Ok(None);
        }
        parse_bytes(text).map(Some).ok_or_else(|| self.bad(name, "a number of bytes like 512M"))
    }

    /// One of a few words.
    pub fn choose<T: Copy>(&self, name: &str, choices: &[(&str, T)]) -> Result<T> {
        let text = self.text(name);
        let chosen = choices.iter().find(|(word, _)| *word == text);
        chosen.map(|(_, value)| *value).ok_or_else(|| {
            let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
            self.bad(name, &words.join(" or "))
        })
    }

    /// The error for a setting whose value cannot work.
    pub fn bad(&self, name: &str, must: &str) -> ServerError {
        ServerError::BadSetting { name: name.into(), got: format!("'{}'", self.text(name)), must: must.into() }
    }
}

/// Settings given on the command line: those of every model whose `config.pbtxt` does not say otherwise.
#[derive(Clone, Debug, Default)]
pub struct SettingFlags {
    values: BTreeMap<&'static str, String>,
}

impl SettingFlags {
    /// Flags as a test or another program gives them.
    pub fn from_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let known = |name: &str| SETTINGS.iter().find(|setting| setting.name == name).map(|setting| setting.name);
        let values = pairs.into_iter().filter_map(|(name, value)| Some((known(name)?, value.to_owned()))).collect();
        SettingFlags { values }
    }
}

impl SettingFlags {
    /// As if the flag had been given.
    pub fn set(&mut self, name: &str, value: &str) {
        if let Some(setting) = SETTINGS.iter().find(|setting| setting.name == name) {
            self.values.insert(setting.name, value.to_owned());
        }
    }

    /// As if the flag had been given, unless it was.
    pub fn set_default(&mut self, name: &str, value: &str) {
        if !self.values.contains_key(name) {
            self.set(name, value);
        }
    }
}

impl clap::Args for SettingFlags {
    fn augment_args(command: Command) -> Command {
        SETTINGS.iter().fold(command, |command, setting| {
            let default = if setting.default.is_empty() { "" } else { setting.default };
            let on_gpu = if setting.on_gpu == default { "".into() } else { format!(", on a GPU {}", setting.on_gpu) };
            let help =
                if default.is_empty() { setting.help.into() } else { format!("{} [{default}{on_gpu}]", setting.help) };
            let is_bool = matches!(setting.default, "true" | "false");
            let arg = Arg::new(setting.name)
                .long(setting.name.replace('_', "-"))
                .value_name("VALUE")
                .action(ArgAction::Set)
                .help_heading("Settings of every model")
                .help(help);
            // A flag alone is true.
            command.arg(if is_bool { arg.num_args(0..=1).default_missing_value("true") } else { arg })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for SettingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = SettingFlags::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for setting in SETTINGS {
            if let Some(value) = matches.get_one::<String>(setting.name) {
                self.values.insert(setting.name, value.clone());
            }
        }
        Ok(())
    }
}

/// The environment variable of a setting.
pub fn environment_name(setting: &str) -> String {
    format!("DRAFTHORSE_{}", setting.to_ascii_uppercase())
}

/// Triton's ways to write a bool, and Python's.
pub fn parse_bool(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "on" | "yes" => Ok(true),
        "false" | "0" | "off" | "no" => Ok(false),
        _ => Err("true, false, 1 or 0".into()),
    }
}

fn parse_bytes(text: &str) -> Option<u64> {
    let digits_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    let shift = match unit.trim().to_ascii_uppercase().trim_end_matches('B').trim_end_matches('I') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(pairs: &[(&str, &str)]) -> HashMap<String, ModelParameter> {
        let parameter = |value: &str| ModelParameter { string_value: value.into() };
        pairs.iter().map(|(key, value)| ((*key).to_owned(), parameter(value))).collect()
    }

    #[test]
    fn the_file_wins_over_the_flag_over_the_environment_over_the_default() {
        let flags = SettingFlags::from_pairs([("block_size", "32"), ("max_num_seqs", "8")]);
        let environment = |name: &str| match name {
            "DRAFTHORSE_MAX_NUM_SEQS" => Some("4".into()),
            "DRAFTHORSE_MAX_WAITING" => Some("9".into()),
            _ => None,
        };
        let settings = Settings::resolve(&parameters(&[("block_size", "64")]), &flags, environment).unwrap();
        let shown: Vec<String> = ["block_size", "max_num_seqs", "max_waiting", "max_step_time_ms"]
            .iter()
            .filter_map(|name| settings.iter().find(|resolved| resolved.name == *name))
            .map(|resolved| format!("{} {} {}", resolved.name, resolved.value, resolved.source))
            .collect();
        assert_eq!(
            shown,
            [
                "block_size 64 config.pbtxt",
                "max_num_seqs 8 flag",
                "max_waiting 9 environment",
                "max_step_time_ms 100 default"
            ]
        );
    }

    #[test]
    fn a_parameter_that_does_not_exist_is_refused_with_the_nearest_name() {
        let refused = |name: &str| {
            Settings::resolve(&parameters(&[(name, "1")]), &SettingFlags::default(), |_| None).unwrap_err().to_string()
        };
        assert_eq!(refused("max_num_seq"), "unknown setting max_num_seq; did you mean max_num_seqs?");
        assert!(refused("zz").starts_with("unknown setting zz; known are device, dtype"));
    }

    #[test]
    fn a_value_that_does_not_fit_is_shown() {
        let pairs =
            [("max_num_seqs", "many"), ("dtype", "float16"), ("kv_cache_bytes", "2x"), ("memory_bytes", "3GiB")];
        let settings = Settings::resolve(&parameters(&pairs), &SettingFlags::default(), |_| None).unwrap();
        let said = settings.parse::<u32>("max_num_seqs", "a number").unwrap_err().to_string();
        assert_eq!(said, "setting max_num_seqs is 'many', must be a number");
        let said = settings.choose("dtype", &[("float32", ()), ("bfloat16", ())]).unwrap_err().to_string();
        assert_eq!(said, "setting dtype is 'float16', must be float32 or bfloat16");
        assert!(settings.parse_bytes("kv_cache_bytes").is_err());
        assert_eq!(settings.parse_bytes("memory_bytes").unwrap(), Some(3 << 30));
    }
}
