//! `drafthorse bench serve URL`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use drafthorse::load::{self, Lengths, Load, Parameters, Summary, Target};

use super::print;

/// Sends a load to a running server, Poisson arrivals by default, and prints how long answers took
#[derive(clap::Args)]
pub struct BenchServeArgs {
    /// grpc://HOST:PORT of a KServe v2 server with the tensors of Triton's vLLM backend, or http://HOST:PORT/v1 of an OpenAI API
    #[arg(value_name = "URL", value_parser = Target::parse)]
    target: Target,

    /// The model's name there
    #[arg(long, default_value = "llm", value_name = "NAME")]
    model: String,

    /// Requests to send
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,

    /// Requests a second, at random moments of that mean; inf sends all at once
    #[arg(long, default_value = "inf", value_name = "N", value_parser = rate)]
    rate: f64,

    /// Requests under way at most; others wait for their turn
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_concurrency: Option<u32>,

    /// Tokens of prompts: a number, a range such as 64-256, or exp:128 for a mean
    #[arg(long, default_value = "128", value_name = "LENGTHS")]
    prompt_tokens: Lengths,

    /// Tokens of answers, likewise
    #[arg(long, default_value = "128", value_name = "LENGTHS")]
    output_tokens: Lengths,

    /// One more prompt, of so many tokens, so many seconds after the first request: what does it do to the others?
    #[arg(long, value_name = "TOKENS@SECONDS", value_parser = long_prompt)]
    long_prompt: Option<(u32, Duration)>,

    /// Sampling parameters of every request besides greedy, such as {"guided_regex": "[a-z ]+"}
    #[arg(long, default_value = "{}", value_name = "JSON", value_parser = parameters)]
    parameters: Parameters,

    /// Draws the same load again
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,

    /// Write a page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Sends the load and prints its summary.
pub fn bench_serve(args: &BenchServeArgs) -> Result<(), String> {
    let load = Load {
        target: args.target.clone(),
        model: args.model.clone(),
        requests: args.requests,
        rate: args.rate.is_finite().then_some(args.rate),
        max_concurrency: args.max_concurrency,
        prompt_tokens: args.prompt_tokens,
        output_tokens: args.output_tokens,
        long_prompt: args.long_prompt,
        parameters: args.parameters.clone(),
        seed: args.seed,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the runtime: {error}"))?;
    let bar = super::progress_bar()?;
    bar.set_message("requests");
    let progress = |done: u64, total: u64| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let outcomes = runtime.block_on(load::run(&load, &progress));
    bar.finish_and_clear();
    let outcomes = outcomes?;
    let summary = Summary::of(&outcomes);
    if let Some(file) = &args.html {
        let command: Vec<String> = std::env::args().collect();
        write(file, &load::html(&load, &outcomes, &summary, &command.join(" ")))?;
    }
    if args.json {
        print(&(serde_json::to_string_pretty(&summary).map_err(|error| error.to_string())? + "\n"))?;
    } else {
        print(&summary.to_string())?;
    }
    if summary.failed == summary.requests { Err("no request was answered".into()) } else { Ok(()) }
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    std::fs::write(file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))
}

fn parameters(text: &str) -> Result<Parameters, String> {
    serde_json::from_str(text).map_err(|error| format!("must be a JSON object: {error}"))
}

fn rate(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|&rate: &f64| rate > 0.0).ok_or_else(|| "must be a number above 0, or inf".into())
}

fn long_prompt(text: &str) -> Result<(u32, Duration), String> {
    let (tokens, seconds) = text.split_once('@').unwrap_or((text, "0"));
    let tokens = tokens.parse().ok().filter(|&tokens: &u32| tokens > 0);
    let seconds = seconds.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    tokens.zip(seconds).ok_or_else(|| "must be tokens and seconds, such as 4096@5".into())
}
