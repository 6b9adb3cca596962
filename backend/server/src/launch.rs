//! From a checkpoint folder to a model that answers: settings, the rank, the engine over it, and the text around them.

use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use drafthorse_control::Link;
use drafthorse_engine::{Engine, EngineConfig};
use drafthorse_proto::inference::ModelConfig;
use drafthorse_proto::inference::model_config::SchedulingChoice;
use drafthorse_proto::inference::model_instance_group::Kind;
use drafthorse_worker::{ActivationDtype, DeviceKind, MlaForm, Progress, SpeculateConfig, WorkerConfig};
use tracing::{debug, info, warn};

use crate::config::ServerConfig;
use crate::error::{Result, ServerError};
use crate::generate::{ModelText, ServedModel};
use crate::repository::{ModelDir, draft};
use crate::settings::{Settings, Source};

/// Time between two log lines about the same checkpoint being read.
const PROGRESS_EVERY: Duration = Duration::from_secs(2);

/// Loads version `version` of a model from the checkpoint in `path`. Blocks until it can take requests.
///
/// # Errors
/// A setting that cannot work, or what is wrong with the checkpoint.
pub fn load(dir: &ModelDir, version: u64, path: &Path, config: &ServerConfig) -> Result<ServedModel> {
    let settings = settings(&dir.config, config)?;
    for resolved in settings.iter().filter(|resolved| resolved.source != Source::Default) {
        info!(model = dir.name, setting = resolved.name, value = resolved.value, from = %resolved.source, "set");
    }
    settings.notices().iter().for_each(|notice| warn!(model = dir.name, "{notice}"));
    check_device(&dir.config, &settings)?;
    let mut worker = worker_config(&settings, path, config.num_threads)?;
    let engine_config = engine_config(&settings, &dir.config)?;
    let text = match is_made_up(&settings)? && !path.join("tokenizer.json").is_file() {
        true => ModelText::made_up(path)?,
        false => ModelText::from_dir(path)?,
    };
    worker.grammars.clone_from(&text.grammars);

    let failed = |error: &dyn std::error::Error| ServerError::CannotStart { reason: chain(error) };
    let (ready, link) = drafthorse_worker::spawn(worker, log_progress(dir.name.clone())).map_err(|e| failed(&e))?;
    let links: Vec<Box<dyn Link>> = vec![Box::new(link)];
    let engine = Engine::start(engine_config, ready, links).map_err(|e| failed(&e))?;
    let strict = settings.parse_bool("strict_parameters")?;
    let rule = settings.text("speculate_verify");
    Ok(ServedModel::new(&dir.name, version, text, engine).with_strict_parameters(strict).with_verify_rule(rule))
}

/// Every setting of a model, with its source.
///
/// # Errors
/// `UnknownSetting` for a parameter that does not exist.
pub fn settings(model: &ModelConfig, config: &ServerConfig) -> Result<Settings> {
    Settings::resolve(&model.parameters, &config.settings, |name| std::env::var(name).ok())
}

/// The settings that a rank is made with.
///
/// # Errors
/// `BadSetting`, for a value that is no number or no known word; what the number may be, the worker checks.
pub fn worker_config(settings: &Settings, path: &Path, num_threads: Option<usize>) -> Result<WorkerConfig> {
    const COUNT: &str = "a number above 0";
    let device = device(settings)?;
    let dtype = settings.choose(
        "dtype",
        &[
            ("auto", ActivationDtype::Float32),
            ("float32", ActivationDtype::Float32),
            ("bfloat16", ActivationDtype::Bfloat16),
        ],
    )?;
    if settings.parse::<u32>("tensor_parallel_size", COUNT)? != 1 {
        return Err(settings.bad("tensor_parallel_size", "1: this build runs one rank"));
    }
    let quant_type = settings.text("quant_type");
    let kv_cache_bytes = settings.parse_bytes("kv_cache_bytes")?;
    Ok(WorkerConfig {
        model_dir: path.into(),
        device,
        dtype,
        quant_group_size: settings.parse_optional("weightonly_group_size", "-1, 32, 64 or 128")?,
        quant_type: (quant_type != "none").then(|| quant_type.to_owned()),
        mla_form: settings.choose(
            "mla_use_matrix_absorption",
            &[("always", MlaForm::Absorbed), ("true", MlaForm::ByPhase), ("false", MlaForm::Expanded)],
        )?,
        max_num_seqs: settings.parse("max_num_seqs", COUNT)?,
        max_num_batched_tokens: settings.parse("max_num_batched_tokens", COUNT)?,
        max_model_len: settings.parse_optional("max_model_len", COUNT)?,
        block_size: settings.parse("block_size", COUNT)?,
        kv_cache_bytes: kv_cache_bytes.ok_or_else(|| settings.bad("kv_cache_bytes", "a number of bytes like 512M"))?,
        memory_bytes: settings.parse_bytes("memory_bytes")?,
        memory_fraction: match device {
            DeviceKind::Cpu => 0.0,
            DeviceKind::Cuda(_) => settings.parse("memory_fraction", "a share of a GPU's memory, 0 to 1")?,
        },
        random_weights: is_made_up(settings)?,
        eager: settings.parse_bool("eager")?,
        deterministic: settings.parse_bool("deterministic")?,
        pipeline_depth: None,
        time_device: settings.parse_bool("time_device")?,
        num_threads,
        speculate: SpeculateConfig {
            method: settings.text("speculate_method").to_owned(),
            max_draft_token_num: settings.parse("speculate_max_draft_token_num", COUNT)?,
            max_ngram_size: settings.parse("speculate_max_ngram_size", COUNT)?,
            draft_token_bound: settings.parse("speculate_draft_token_bound", COUNT)?,
            adaptive: settings.parse_bool("speculate_adaptive")?,
            forced_acceptance: settings.parse_optional("speculate_forced_acceptance", "a share, 0 to 1")?,
            draft_dir: draft::folder(settings, path)?,
            verify: settings.text("speculate_verify").to_owned(),
            verify_window: settings.parse("speculate_verify_window", COUNT)?,
            max_candidate_len: settings.parse("speculate_max_candidate_len", COUNT)?,
            draft_quant_type: Some(settings.text("draft_model_quant_type"))
                .filter(|name| !matches!(*name, "" | "none"))
                .map(str::to_owned),
        },
        grammars: None,
    })
}

fn is_made_up(settings: &Settings) -> Result<bool> {
    settings.choose("load_format", &[("auto", false), ("dummy", true)])
}

/// `auto` is the CPU as long as not every scheme has kernels for a GPU.
fn device(settings: &Settings) -> Result<DeviceKind> {
    let name = settings.text("device");
    let ordinal = match name {
        "auto" | "cpu" => return Ok(DeviceKind::Cpu),
        "cuda" => Some(0),
        _ => name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok()),
    };
    ordinal.map(DeviceKind::Cuda).ok_or_else(|| settings.bad("device", "auto, cpu, cuda or cuda: and a number"))
}

/// The settings that an engine is made with. What `dynamic_batching` says of the queue wins over the settings.
///
/// # Errors
/// As [`worker_config`].
pub fn engine_config(settings: &Settings, model: &ModelConfig) -> Result<EngineConfig> {
    const COUNT: &str = "a number above 0";
    let mut config = EngineConfig {
        max_num_seqs: settings.parse("max_num_seqs", COUNT)?,
        max_num_batched_tokens: settings.parse("max_num_batched_tokens", COUNT)?,
        max_step_time_ms: settings.parse("max_step_time_ms", COUNT)?,
        max_waiting: settings.parse("max_waiting", "a number")?,
        default_priority: settings.parse("default_priority", COUNT)?,
        queue_timeout_ms: settings.parse_optional("queue_timeout_ms", COUNT)?,
        enable_prefix_caching: settings.parse_bool("enable_prefix_caching")?,
        ..EngineConfig::default()
    };
    if let Some(SchedulingChoice::DynamicBatching(batching)) = &model.scheduling_choice {
        if batching.default_priority_level > 0 {
            config.default_priority = u32::try_from(batching.default_priority_level).unwrap_or(u32::MAX);
        }
        if let Some(policy) = &batching.default_queue_policy {
            if policy.max_queue_size > 0 {
                config.max_waiting = policy.max_queue_size;
            }
            if policy.default_timeout_microseconds > 0 {
                let millis = policy.default_timeout_microseconds.div_ceil(1000);
                config.queue_timeout_ms = Some(u32::try_from(millis).unwrap_or(u32::MAX));
            }
        }
    }
    Ok(config)
}

/// `instance_group` may name a device; it must be the one that is used.
fn check_device(model: &ModelConfig, settings: &Settings) -> Result<()> {
    let on_gpu = model.instance_group.iter().any(|group| group.kind == i32::from(Kind::Gpu));
    if on_gpu && !settings.text("device").starts_with("cuda") {
        let reason =
            "instance_group asks for KIND_GPU, but the model runs on the CPU; KIND_MODEL leaves it open".into();
        return Err(ServerError::CannotStart { reason });
    }
    Ok(())
}

/// Tells the log how far loading has come, not more often than a reader wants.
fn log_progress(model: String) -> Box<dyn Fn(Progress) + Send> {
    let last = Mutex::new(Instant::now());
    Box::new(move |progress| match progress {
        Progress::Weights { done, total } => {
            let Ok(mut last) = last.lock() else { return };
            if last.elapsed() >= PROGRESS_EVERY {
                *last = Instant::now();
                let percent = done * 100 / total.max(1);
                info!(model, percent, total_mb = total >> 20, "reading weights");
            }
        }
        Progress::Planned(plan) => {
            debug!(model, num_blocks = plan.num_blocks, kv_bytes = plan.kv_bytes, "memory planned");
        }
    })
}

/// An error and its causes, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::settings::SettingFlags;
    use drafthorse_proto::parse_model_config;

    fn configs(text: &str) -> Result<(WorkerConfig, EngineConfig)> {
        let model = parse_model_config(text).unwrap();
        let settings = Settings::resolve(&model.parameters, &SettingFlags::default(), |_| None)?;
        Ok((worker_config(&settings, Path::new("m"), None)?, engine_config(&settings, &model)?))
    }

    fn parameter(name: &str, value: &str) -> String {
        format!("parameters {{ key: \"{name}\" value {{ string_value: \"{value}\" }} }}")
    }

    #[test]
    fn the_defaults_are_those_of_worker_and_engine() {
        let (worker, engine) = configs("").unwrap();
        let expected = WorkerConfig::default();
        assert_eq!(engine, EngineConfig::default());
        assert_eq!(
            (worker.max_num_seqs, worker.max_num_batched_tokens, worker.block_size, worker.kv_cache_bytes),
            (expected.max_num_seqs, expected.max_num_batched_tokens, expected.block_size, expected.kv_cache_bytes)
        );
    }

    #[test]
    fn the_queue_policy_reaches_the_engine() {
        let (_, engine) = configs(
            "dynamic_batching { priority_levels: 4 default_priority_level: 2
             default_queue_policy { max_queue_size: 7 default_timeout_microseconds: 1500 } }",
        )
        .unwrap();
        assert_eq!((engine.default_priority, engine.max_waiting, engine.queue_timeout_ms), (2, 7, Some(2)));
    }

    #[test]
    fn a_deterministic_worker_is_asked_for_by_flag_or_parameter() {
        let by_flags = |flags: &[&str]| {
            let flags = ["--model-repository=m"].iter().chain(flags).copied();
            let settings = ServerConfig::parse(flags).unwrap().settings;
            let settings = Settings::resolve(&HashMap::new(), &settings, |_| None).unwrap();
            Ok::<_, ServerError>(worker_config(&settings, Path::new("m"), None)?.deterministic)
        };
        assert!(!by_flags(&[]).unwrap());
        assert!(by_flags(&["--deterministic"]).unwrap());
        assert!(by_flags(&["--deterministic", "--eager"]).unwrap());
        assert!(by_flags(&["--deterministic", "true"]).unwrap());
        assert!(!by_flags(&["--deterministic=false"]).unwrap());
        let said = by_flags(&["--deterministic=always"]).unwrap_err().to_string();
        assert_eq!(said, "setting deterministic is 'always', must be true, false, 1 or 0");
        let (worker, _) = configs(&parameter("deterministic", "true")).unwrap();
        assert!(worker.deterministic);
    }

    #[test]
    fn what_this_build_cannot_do_is_refused() {
        let refused = |name: &str, value: &str| configs(&parameter(name, value)).unwrap_err().to_string();
        assert_eq!(
            refused("device", "cuda:x"),
            "setting device is 'cuda:x', must be auto, cpu, cuda or cuda: and a number"
        );
        assert_eq!(
            refused("tensor_parallel_size", "2"),
            "setting tensor_parallel_size is '2', must be 1: this build runs one rank"
        );
        assert_eq!(refused("max_num_seqs", "-1"), "setting max_num_seqs is '-1', must be a number above 0");
    }
}
