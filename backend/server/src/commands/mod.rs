//! What each subcommand does. Errors are texts here: they are printed and the process ends.

mod bench;
mod bench_serve;
mod flags;
mod rank_bench;
mod serve;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

pub use bench::{BenchArgs, bench};
use drafthorse::import::ImportArgs;
pub use flags::{FlagsArgs, flags};
use indicatif::{ProgressBar, ProgressStyle};
pub use serve::serve;

/// Runs `drafthorse import`.
pub fn import(args: ImportArgs) -> Result<(), String> {
    let dir = args.dir.clone();
    drafthorse::import::run(args).map_err(|error| with_causes(&error))?;
    print(&format!("wrote the checkpoint to {}\n", dir.display()))
}

pub fn version() -> Result<(), String> {
    print(&format!("drafthorse {}\n", env!("CARGO_PKG_VERSION")))
}

/// Writes to standard output; a reader that has gone away is no error.
fn print(text: &str) -> Result<(), String> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(format!("cannot write: {error}")),
        _ => Ok(()),
    }
}

/// Says why the process ends.
pub fn fail(reason: &str) -> ExitCode {
    // Nothing can be done if this cannot be written either.
    let _ = writeln!(std::io::stderr(), "drafthorse: {reason}");
    ExitCode::FAILURE
}

fn progress_bar() -> Result<ProgressBar, String> {
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}").map_err(|error| error.to_string())?;
    bar.set_style(style);
    bar.enable_steady_tick(Duration::from_millis(200));
    Ok(bar)
}

/// An error and what caused it, on one line.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
