//! The page of `/metrics`, in Prometheus' text format.

use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use drafthorse_control::FinishReason;
use drafthorse_engine::{DRAFT_PLACES, STEP_TIME_BOUNDS_MS, Stats};

use super::{Failure, Histogram, ModelMetrics};

/// What the page shows of one model.
#[derive(Clone, Copy, Debug)]
pub struct ModelView<'a> {
    pub name: &'a str,
    pub version: &'a str,
    pub metrics: &'a ModelMetrics,
    pub engine: Stats,
}

/// A family of one number per model: name, kind, help, value.
type Family = (&'static str, &'static str, &'static str, fn(&ModelView<'_>) -> f64);

const TRITON: [Family; 9] = [
    ("nv_inference_request_success", "counter", "Requests that ended well", |m| m.metrics.success.count() as f64),
    ("nv_inference_count", "counter", "Inferences", |m| m.metrics.success.count() as f64),
    ("nv_inference_exec_count", "counter", "Steps of the engine", |m| m.engine.steps as f64),
    ("nv_inference_request_duration_us", "counter", "Time of requests", |m| m.metrics.success.micros() as f64),
    ("nv_inference_queue_duration_us", "counter", "Time in the queue", |m| m.metrics.queue.micros() as f64),
    ("nv_inference_compute_input_duration_us", "counter", "Time from text to tokens", |m| {
        m.metrics.compute_input.micros() as f64
    }),
    ("nv_inference_compute_infer_duration_us", "counter", "Time in the engine", |m| {
        m.metrics.compute_infer.micros() as f64
    }),
    ("nv_inference_compute_output_duration_us", "counter", "Time from tokens to text", |m| {
        m.metrics.compute_output.micros() as f64
    }),
    ("nv_inference_pending_request_count", "gauge", "Requests that wait", |m| m.engine.waiting as f64),
];

const VLLM: [Family; 11] = [
    ("vllm:num_requests_running", "gauge", "Requests in the batch", |m| m.engine.running as f64),
    ("vllm:num_requests_waiting", "gauge", "Requests that wait", |m| m.engine.waiting as f64),
    ("vllm:kv_cache_usage_perc", "gauge", "Part of the KV cache in use, 1 is all of it", |m| {
        let total = m.engine.total_blocks.max(1);
        total.saturating_sub(m.engine.free_blocks) as f64 / total as f64
    }),
    ("vllm:prompt_tokens_total", "counter", "Prompt tokens", |m| load(&m.metrics.prompt_tokens)),
    ("vllm:generation_tokens_total", "counter", "Output tokens", |m| load(&m.metrics.output_tokens)),
    ("vllm:num_preemptions_total", "counter", "Sequences that lost their blocks to others", |m| {
        m.engine.preemptions as f64
    }),
    ("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache", |m| {
        m.engine.prefix_queries as f64
    }),
    ("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found there", |m| m.engine.prefix_hits as f64),
    ("vllm:spec_decode_num_drafts_total", "counter", "Times that drafts of a sequence were verified", |m| {
        m.engine.draft_rows as f64
    }),
    ("vllm:spec_decode_num_draft_tokens_total", "counter", "Drafts that were verified", |m| {
        m.engine.drafts_verified as f64
    }),
    ("vllm:spec_decode_num_accepted_tokens_total", "counter", "Drafts that held", |m| m.engine.drafts_accepted as f64),
];

const OURS: [Family; 9] = [
    ("drafthorse_kv_blocks", "gauge", "Blocks of the KV cache", |m| m.engine.total_blocks as f64),
    ("drafthorse_kv_blocks_used", "gauge", "Blocks that sequences hold", |m| {
        m.engine.total_blocks.saturating_sub(m.engine.free_blocks) as f64
    }),
    ("drafthorse_kv_blocks_cached", "gauge", "Blocks that a prompt can find", |m| m.engine.cached_blocks as f64),
    ("drafthorse_tokens_computed_total", "counter", "Tokens run through the model, drafts too", |m| {
        m.engine.computed_tokens as f64
    }),
    ("drafthorse_drafts_verified_total", "counter", "Drafts that were verified", |m| m.engine.drafts_verified as f64),
    ("drafthorse_drafts_accepted_total", "counter", "Drafts that held", |m| m.engine.drafts_accepted as f64),
    ("drafthorse_sample_seconds_total", "counter", "Time of sampling and verifying", |m| {
        m.engine.sample_time.as_secs_f64()
    }),
    ("drafthorse_propose_seconds_total", "counter", "Time of making drafts", |m| m.engine.propose_time.as_secs_f64()),
    ("drafthorse_scheduler_seconds_total", "counter", "Time of the engine thread between steps", |m| {
        m.engine.scheduler_time.as_secs_f64()
    }),
];

/// A count by the place of a draft, from 0: name, help, which.
type DraftFamily = (&'static str, &'static str, fn(&Stats) -> &[u64; DRAFT_PLACES]);

const DRAFT_FAMILIES: [DraftFamily; 2] = [
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "Drafts that held", |stats| &stats.accepted_at),
    ("drafthorse_drafts_verified_per_pos_total", "Drafts that were verified", |stats| &stats.verified_at),
];

/// A histogram per model: name, help, which.
type HistogramFamily = (&'static str, &'static str, fn(&ModelMetrics) -> &Histogram);

const HISTOGRAMS: [HistogramFamily; 8] = [
    ("vllm:time_to_first_token_seconds", "Time to the first token", |m| &m.first_token),
    ("vllm:time_per_output_token_seconds", "Time between tokens", |m| &m.next_token),
    ("vllm:inter_token_latency_seconds", "Time between tokens", |m| &m.next_token),
    ("vllm:request_time_per_output_token_seconds", "A request's mean time between tokens", |m| &m.output_token),
    ("vllm:e2e_request_latency_seconds", "Time of requests", |m| &m.request),
    ("vllm:request_queue_time_seconds", "Time in the queue", |m| &m.queue_time),
    ("vllm:request_prompt_tokens", "Prompt tokens of a request", |m| &m.prompt_len),
    ("vllm:request_generation_tokens", "Output tokens of a request", |m| &m.output_len),
];

/// The whole page.
pub fn write_page(models: &[ModelView<'_>]) -> String {
    let mut page = Page { out: String::new() };
    for (name, kind, help, value) in TRITON.iter().chain(&OURS) {
        page.family(name, kind, help);
        for model in models {
            page.sample(name, &own_labels(model), value(model));
        }
    }
    page.family("nv_inference_request_failure", "counter", "Requests that failed");
    for model in models {
        for failure in Failure::ALL {
            let labels = [("reason", failure.name()), ("model", model.name), ("version", model.version)];
            page.sample("nv_inference_request_failure", &labels, model.metrics.failures(failure) as f64);
        }
    }
    for (name, kind, help, value) in &VLLM {
        page.family(name, kind, help);
        for model in models {
            page.sample(name, &vllm_labels(model), value(model));
        }
    }
    for (name, help, counts) in DRAFT_FAMILIES {
        page.family(name, "counter", help);
        for model in models {
            let [model_name, engine] = vllm_labels(model);
            for (place, &count) in counts(&model.engine).iter().enumerate().filter(|(_, count)| **count > 0) {
                page.sample(name, &[model_name, engine, ("position", &place.to_string())], count as f64);
            }
        }
    }
    page.family("vllm:request_success_total", "counter", "Requests that ended well");
    for model in models {
        for reason in [FinishReason::Stop, FinishReason::Length] {
            let [model_name, engine] = vllm_labels(model);
            let labels = [model_name, engine, ("finished_reason", reason.name())];
            page.sample("vllm:request_success_total", &labels, load(&model.metrics.finished[reason as usize]));
        }
    }
    for (name, help, which) in &HISTOGRAMS {
        page.family(name, "histogram", help);
        for model in models {
            let histogram = which(model.metrics);
            let counts: Vec<u64> = histogram.counts.iter().map(|count| count.load(Relaxed)).collect();
            let sum = load(&histogram.sum) / histogram.unit;
            page.histogram(name, &vllm_labels(model), histogram.bounds.iter().copied(), &counts, sum);
        }
    }
    page.family("drafthorse_step_seconds", "histogram", "Time of a step on rank 0");
    for model in models {
        let bounds = STEP_TIME_BOUNDS_MS.iter().map(|&ms| ms as f64 / 1000.0);
        let sum = model.engine.step_time.as_secs_f64();
        page.histogram("drafthorse_step_seconds", &own_labels(model), bounds, &model.engine.step_time_buckets, sum);
    }
    if let Some(bytes) = resident_bytes() {
        page.family("process_resident_memory_bytes", "gauge", "Resident memory of the process");
        page.sample("process_resident_memory_bytes", &[], bytes);
    }
    page.out
}

/// Serves `/metrics`; `write` makes the page.
pub fn router<F>(write: F) -> axum::Router
where
    F: Fn() -> String + Clone + Send + Sync + 'static,
{
    let content_type = [(http::header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    axum::Router::new().route("/metrics", axum::routing::get(move || std::future::ready((content_type, write()))))
}

fn own_labels<'a>(model: &ModelView<'a>) -> [(&'static str, &'a str); 2] {
    [("model", model.name), ("version", model.version)]
}

fn vllm_labels<'a>(model: &ModelView<'a>) -> [(&'static str, &'a str); 2] {
    [("model_name", model.name), ("engine", "0")]
}

fn load(counter: &AtomicU64) -> f64 {
    counter.load(Relaxed) as f64
}

struct Page {
    out: String,
}

// Writing to a string cannot fail.
impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.out.push_str(name);
        for (at, (label, text)) in labels.iter().enumerate() {
            let open = if at == 0 { '{' } else { ',' };
            let _ = write!(self.out, "{open}{label}=\"{}\"", Escaped(text));
        }
        let close = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.out, "{close} {value}");
    }

    fn histogram(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        bounds: impl Iterator<Item = f64>,
        counts: &[u64],
        sum: f64,
    ) {
        let bounds = bounds.map(|bound| bound.to_string()).chain(["+Inf".to_string()]);
        let mut below = 0;
        for (bound, count) in bounds.zip(counts) {
            below += count;
            let labels: Vec<_> = labels.iter().copied().chain([("le", bound.as_str())]).collect();
            self.sample(&format!("{name}_bucket"), &labels, below as f64);
        }
        self.sample(&format!("{name}_sum"), labels, sum);
        self.sample(&format!("{name}_count"), labels, below as f64);
    }
}

/// A label's value, with what the format gives a meaning escaped.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '\\' => f.write_str("\\\\"),
            '"' => f.write_str("\\\""),
            '\n' => f.write_str("\\n"),
            c => f.write_char(c),
        })
    }
}

/// Linux says it in pages of 4 KiB; elsewhere it is left out.
fn resident_bytes() -> Option<f64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some((pages * 4096) as f64)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use drafthorse_engine::Usage;

    use super::super::Spent;
    use super::*;

    #[test]
    fn a_request_shows_on_the_page() {
        let metrics = ModelMetrics::default();
        metrics.first_token(Duration::from_millis(30), 7, 1);
        metrics.next_tokens(Duration::from_millis(12), 2);
        let usage = Usage { prompt_tokens: 7, output_tokens: 3, ..Usage::default() };
        let spent = Spent { total: Duration::from_millis(42), queued: Duration::from_micros(1500), ..Spent::default() };
        metrics.succeeded(FinishReason::Length, &usage, &spent);
        metrics.failed(Failure::Canceled, Duration::from_secs(1));
        let engine = Stats { total_blocks: 8, free_blocks: 6, running: 2, ..Stats::default() };
        let page = write_page(&[ModelView { name: "a\"b", version: "1", metrics: &metrics, engine }]);
        for line in [
            "nv_inference_request_success{model=\"a\\\"b\",version=\"1\"} 1",
            "nv_inference_request_failure{reason=\"CANCELED\",model=\"a\\\"b\",version=\"1\"} 1",
            "nv_inference_request_failure{reason=\"REJECTED\",model=\"a\\\"b\",version=\"1\"} 0",
            "nv_inference_queue_duration_us{model=\"a\\\"b\",version=\"1\"} 1500",
            "# TYPE vllm:time_to_first_token_seconds histogram",
            "vllm:time_to_first_token_seconds_bucket{model_name=\"a\\\"b\",engine=\"0\",le=\"0.02\"} 0",
            "vllm:time_to_first_token_seconds_bucket{model_name=\"a\\\"b\",engine=\"0\",le=\"0.04\"} 1",
            "vllm:time_to_first_token_seconds_bucket{model_name=\"a\\\"b\",engine=\"0\",le=\"+Inf\"} 1",
            "vllm:time_to_first_token_seconds_sum{model_name=\"a\\\"b\",engine=\"0\"} 0.03",
            "vllm:prompt_tokens_total{model_name=\"a\\\"b\",engine=\"0\"} 7",
            "vllm:generation_tokens_total{model_name=\"a\\\"b\",engine=\"0\"} 3",
            "vllm:kv_cache_usage_perc{model_name=\"a\\\"b\",engine=\"0\"} 0.25",
            "vllm:num_requests_running{model_name=\"a\\\"b\",engine=\"0\"} 2",
            "vllm:request_success_total{model_name=\"a\\\"b\",engine=\"0\",finished_reason=\"length\"} 1",
            "drafthorse_kv_blocks_used{model=\"a\\\"b\",version=\"1\"} 2",
        ] {
            assert!(page.lines().any(|shown| shown == line), "{line}\nis not in\n{page}");
        }
    }
}
