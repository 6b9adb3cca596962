//! `drafthorse bench --rank`: a rank alone.

use drafthorse::bench::Plan;
use drafthorse::settings::Settings;
use drafthorse_worker::bench::{BenchConfig, BenchReport};
use drafthorse_worker::{Progress, WorkerConfig};
use indicatif::ProgressBar;

use super::with_causes;

/// Measures what of `plan` a rank can do alone.
pub fn run(worker: WorkerConfig, plan: &Plan, bar: &ProgressBar) -> Result<BenchReport, String> {
    let config = BenchConfig {
        worker,
        prefill_tokens: plan.first_token.clone(),
        decode_batches: plan.batches.clone(),
        decode_context: plan.prompt_tokens,
        decode_steps: plan.output_tokens,
        repeats: plan.repeats,
    };
    let shown = bar.clone();
    let progress = move |progress: Progress| match progress {
        Progress::Weights { done, total } => {
            shown.set_message("reading weights");
            shown.set_length(total);
            shown.set_position(done);
        }
        Progress::Planned(_) => shown.set_message("measuring"),
    };
    drafthorse_worker::bench::run(&config, &progress).map_err(|error| with_causes(&error))
}

/// The report as a table, or as JSON.
pub fn show(report: &BenchReport, settings: &Settings, json: bool) -> Result<String, String> {
    if json {
        return Ok(serde_json::to_string_pretty(report).map_err(|error| error.to_string())? + "\n");
    }
    Ok(table(report, settings))
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
