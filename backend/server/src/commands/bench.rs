//! `drafthorse bench MODEL`.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use drafthorse::launch;
use drafthorse::repository::layout::{self, Found};
use drafthorse::settings::{SettingFlags, Settings};
use drafthorse_worker::Progress;
use drafthorse_worker::bench::{BenchConfig, BenchReport, run};
use indicatif::{ProgressBar, ProgressStyle};

use super::{print, with_causes};

#[derive(clap::Args)]
pub struct BenchArgs {
    /// A checkpoint folder, a model of a repository (its latest version is taken), or a repository with one model
    #[arg(value_name = "DIR")]
    model: PathBuf,

    /// Tokens of the prompts whose prefill is timed
    #[arg(long, value_delimiter = ',', default_value = "512", value_name = "N")]
    prefill_tokens: Vec<u32>,

    /// Sequences that decode together
    #[arg(long, value_delimiter = ',', default_value = "1,8", value_name = "N")]
    decode_batches: Vec<u32>,

    /// Tokens of a sequence before its decoding is timed
    #[arg(long, default_value_t = 128, value_name = "N")]
    decode_context: u32,

    /// Decode steps timed for each batch
    #[arg(long, default_value_t = 64, value_name = "N")]
    decode_steps: u32,

    /// How often each prefill is timed; the median is reported
    #[arg(long, default_value_t = 3, value_name = "N")]
    repeats: u32,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,

    /// Threads of the CPU kernels; default one a core
    #[arg(long, env = "DRAFTHORSE_NUM_THREADS", value_name = "N")]
    num_threads: Option<usize>,

    #[command(flatten)]
    settings: SettingFlags,
}

/// Loads the model, measures it, prints the report.
pub fn bench(args: &BenchArgs) -> Result<(), String> {
    let (checkpoint, parameters) = find_checkpoint(args)?;
    let settings = Settings::resolve(&parameters, &args.settings, |name| std::env::var(name).ok());
    let settings = settings.map_err(|error| error.to_string())?;
    let worker = launch::worker_config(&settings, &checkpoint, args.num_threads).map_err(|error| error.to_string())?;
    let config = BenchConfig {
        worker,
        prefill_tokens: args.prefill_tokens.clone(),
        decode_batches: args.decode_batches.clone(),
        decode_context: args.decode_context,
        decode_steps: args.decode_steps,
        repeats: args.repeats,
    };
    let bar = progress_bar();
    let shown = bar.clone();
    let progress = move |progress: Progress| match progress {
        Progress::Weights { done, total } => {
            shown.set_message("reading weights");
            shown.set_length(total);
            shown.set_position(done);
        }
        Progress::Planned(_) => shown.set_message("measuring"),
    };
    let report = run(&config, &progress).map_err(|error| with_causes(&error));
    bar.finish_and_clear();
    let report = report?;
    let text = if args.json {
        serde_json::to_string_pretty(&report).map_err(|error| error.to_string())? + "\n"
    } else {
        table(&report, &settings)
    };
    print(&text)
}

type Parameters = HashMap<String, drafthorse_proto::inference::ModelParameter>;

fn find_checkpoint(args: &BenchArgs) -> Result<(PathBuf, Parameters), String> {
    let scanned = layout::scan(std::slice::from_ref(&args.model), None);
    let mut found = scanned.map_err(|error| error.to_string())?;
    // A draft beside the model is no choice to be made.
    found.retain(|found| found.model.as_ref().map_or(true, |dir| !dir.versions.is_empty()));
    // A model's own folder, without a config.pbtxt, looks like a repository of its versions.
    if !found.is_empty() && found.iter().all(|found| found.name.parse::<u64>().is_ok()) {
        found.sort_by_key(|found| found.name.parse::<u64>().unwrap_or(0));
        found.drain(..found.len() - 1);
    }
    match found.as_slice() {
        [Found { model: Ok(dir), .. }] => {
            let (_, checkpoint) = dir.versions.last_key_value().ok_or("the model has no version")?;
            Ok((checkpoint.clone(), dir.config.parameters.clone()))
        }
        [Found { model: Err(reason), .. }] => Err(reason.clone()),
        several => {
            let names: Vec<&str> = several.iter().map(|found| found.name.as_str()).collect();
            Err(format!("{} has several models, name one's folder: {}", args.model.display(), names.join(", ")))
        }
    }
}

fn progress_bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn table(report: &BenchReport, settings: &Settings) -> String {
    let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
    let mut text = format!(
        "load {:.2} s, weights {}, workspace {} ({} used), KV cache {}, dtype {}, quant_type {}\n\n",
        report.load_seconds,
        mb(report.weight_bytes),
        mb(report.workspace_bytes),
        mb(report.workspace_used_bytes),
        mb(report.kv_bytes),
        settings.text("dtype"),
        settings.text("quant_type"),
    );
    text.push_str(&format!("{:<10} {:>14} {:>12} {:>14}\n", "what", "shape", "ms", "tokens/s"));
    for line in &report.prefill {
        let shape = format!("{} tokens", line.tokens);
        text.push_str(&format!(
            "{:<10} {shape:>14} {:>12.2} {:>14.1}\n",
            "prefill", line.median_ms, line.tokens_per_second
        ));
    }
    for line in &report.decode {
        let shape = format!("batch {}", line.batch);
        let (ms, rate) = (line.median_step_ms, line.tokens_per_second);
        text.push_str(&format!("{:<10} {shape:>14} {ms:>12.2} {rate:>14.1}\n", "decode"));
    }
    text
}
