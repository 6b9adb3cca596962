//! `drafthorse bench MODEL`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use drafthorse::bench::{self, Plan, Workload};
use drafthorse::config::ServerConfig;
use drafthorse::launch;
use drafthorse::repository::layout::{self, Found};
use drafthorse::settings::{SettingFlags, Settings};
use drafthorse_worker::bench::bandwidth;

use super::bench_serve::{BenchServeArgs, bench_serve};
use super::{print, progress_bar, rank_bench};

/// Measures through the engine, or with --grpc through the server; with --rank a rank alone.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: Option<BenchCommand>,

    /// A checkpoint folder, a model of a repository (its latest version is taken), or a repository with one model
    #[arg(value_name = "DIR", required_unless_present = "random_weights")]
    model: Option<PathBuf>,

    /// Instead of a model: a config.json whose weights are made up
    #[arg(long, value_name = "SHAPE.json", conflicts_with = "model")]
    random_weights: Option<PathBuf>,

    /// Ask through gRPC, on streams
    #[arg(long, conflicts_with = "rank")]
    grpc: bool,

    /// Requests that run together
    #[arg(long, value_delimiter = ',', default_value = "1,8", value_name = "N")]
    batches: Vec<u32>,

    /// Tokens of each prompt
    #[arg(long, default_value_t = 128, value_name = "N")]
    prompt_tokens: u32,

    /// Tokens that the time per token is taken over
    #[arg(long, default_value_t = 64, value_name = "N")]
    output_tokens: u32,

    /// Prompts whose first token is timed
    #[arg(long, value_delimiter = ',', default_value = "512", value_name = "N")]
    first_token: Vec<u32>,

    /// Many requests at once: how many, tokens of their prompts, and of their answers, such as 2048x128x128
    #[arg(long, value_name = "NxPxO", value_parser = workload)]
    throughput: Option<Workload>,

    /// How often each is timed; the median is reported
    #[arg(long, default_value_t = 3, value_name = "N")]
    repeats: u32,

    /// What the device's memory is read with at best; default is measured by copying, on a GPU
    #[arg(long, value_name = "GB/s")]
    bandwidth: Option<f64>,

    /// A rank alone, without engine and text: steps from their order to their result
    #[arg(long)]
    rank: bool,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,

    /// Threads of the CPU kernels; default one a core
    #[arg(long, env = "DRAFTHORSE_NUM_THREADS", value_name = "N")]
    num_threads: Option<usize>,

    #[command(flatten)]
    settings: SettingFlags,
}

#[derive(clap::Subcommand)]
enum BenchCommand {
    /// Send a load to a running server and tell how long answers took
    Serve(BenchServeArgs),
}

/// Loads the model, measures it, prints the report.
pub fn bench(args: &BenchArgs) -> Result<(), String> {
    if let Some(BenchCommand::Serve(args)) = &args.command {
        return bench_serve(args);
    }
    let made_up = args.random_weights.as_deref().map(MadeUp::new).transpose()?;
    let (checkpoint, parameters) = match (&made_up, &args.model) {
        (Some(made_up), _) => (made_up.dir.clone(), Parameters::new()),
        (None, Some(model)) => find_checkpoint(model)?,
        (None, None) => return Err("no model is named".into()),
    };
    let mut flags = args.settings.clone();
    if made_up.is_some() {
        flags.set_default("load_format", "dummy");
    }
    let plan = Plan {
        grpc: args.grpc,
        batches: args.batches.clone(),
        prompt_tokens: args.prompt_tokens,
        output_tokens: args.output_tokens.max(1),
        first_token: args.first_token.clone(),
        throughput: args.throughput,
        repeats: args.repeats,
        bandwidth: args.bandwidth.map(|gb| gb * 1e9),
    };
    for (name, value) in plan.settings() {
        flags.set_default(name, &value);
    }
    for (name, parameter) in &parameters {
        flags.set(name, &parameter.string_value);
    }
    let settings = Settings::resolve(&parameters, &flags, |name| std::env::var(name).ok());
    let settings = settings.map_err(|error| error.to_string())?;
    let worker = launch::worker_config(&settings, &checkpoint, args.num_threads).map_err(|error| error.to_string())?;
    let bar = progress_bar()?;
    if args.rank {
        let report = rank_bench::run(worker, &plan, &bar);
        bar.finish_and_clear();
        return print(&rank_bench::show(&report?, &settings, args.json)?);
    }
    let measured = bandwidth(worker.device).map_err(|error| super::with_causes(&error))?;
    let plan = Plan { bandwidth: plan.bandwidth.or(measured), ..plan };
    let mut config = ServerConfig::parse(
        ["--http-port=0", "--grpc-port=0", "--allow-metrics=false", "--model-repository"]
            .map(Into::into)
            .into_iter()
            .chain([checkpoint.clone().into_os_string()]),
    )
    .map_err(|error| error.to_string())?;
    config.settings = flags;
    config.num_threads = args.num_threads;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the runtime: {error}"))?;
    let progress = |what: &str, done: u64, total: u64| {
        bar.set_message(what.to_owned());
        bar.set_length(total);
        bar.set_position(done);
    };
    let report = runtime.block_on(bench::run(config, &plan, &checkpoint, &progress));
    bar.finish_and_clear();
    let report = report?;
    let text = if args.json {
        serde_json::to_string_pretty(&report).map_err(|error| error.to_string())? + "\n"
    } else {
        report.to_string()
    };
    print(&text)
}

fn workload(text: &str) -> Result<Workload, String> {
    let numbers: Option<Vec<u32>> = text.split('x').map(|number| number.parse().ok().filter(|&n| n > 0)).collect();
    match numbers.as_deref() {
        Some(&[requests, prompt_tokens, output_tokens]) => Ok(Workload { requests, prompt_tokens, output_tokens }),
        _ => Err("must be three numbers above 0, such as 2048x128x128".into()),
    }
}

/// A checkpoint folder with nothing but a config; goes when this does.
struct MadeUp {
    dir: PathBuf,
}

impl MadeUp {
    fn new(shape: &Path) -> Result<Self, String> {
        let text = std::fs::read(shape).map_err(|error| format!("cannot read {}: {error}", shape.display()))?;
        let dir = std::env::temp_dir().join(format!("drafthorse-bench-{}", std::process::id()));
        let written = std::fs::create_dir_all(&dir).and_then(|()| std::fs::write(dir.join("config.json"), text));
        written.map_err(|error| format!("cannot write {}: {error}", dir.display()))?;
        Ok(MadeUp { dir })
    }
}

impl Drop for MadeUp {
    fn drop(&mut self) {
        // A folder of one small file is left where even that fails.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

type Parameters = HashMap<String, drafthorse_proto::inference::ModelParameter>;

fn find_checkpoint(model: &Path) -> Result<(PathBuf, Parameters), String> {
    let scanned = layout::scan(&[model.to_owned()], None);
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
        [] => Err(format!("{} holds no model with weights", model.display())),
        several => {
            let names: Vec<&str> = several.iter().map(|found| found.name.as_str()).collect();
            Err(format!("{} has several models, name one's folder: {}", model.display(), names.join(", ")))
        }
    }
}
