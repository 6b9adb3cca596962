//! The `drafthorse` binary.

#![forbid(unsafe_code)]

mod commands;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use drafthorse::config::with_dashes;
use drafthorse::import::ImportArgs;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// An inference server for large language models: KServe v2 gRPC, HTTP and OpenAI over a Triton-style model repository.
#[derive(Parser)]
#[command(name = "drafthorse", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the models of a repository
    Serve(Box<drafthorse::ServerConfig>),
    /// Turn a GGUF file into a checkpoint that can be served
    Import(ImportArgs),
    /// Measure a model on this machine: prefill and decode, tokens a second
    Bench(Box<commands::BenchArgs>),
    /// Print every setting of a model, its value and where it came from
    Flags(Box<commands::FlagsArgs>),
    /// Print the version
    Version,
}

fn main() -> ExitCode {
    let cli = Cli::parse_from(std::env::args_os().map(with_dashes));
    let done = match cli.command {
        Command::Serve(config) => commands::serve(*config),
        Command::Import(args) => commands::import(args),
        Command::Bench(args) => commands::bench(&args),
        Command::Flags(args) => commands::flags(&args),
        Command::Version => commands::version(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => commands::fail(&reason),
    }
}
