//! `drafthorse flags MODEL`.

use drafthorse::ServerConfig;
use drafthorse::launch;
use drafthorse::repository::layout;

use super::print;

/// Takes the flags of `serve`, so that it shows what `serve` would do.
#[derive(clap::Args)]
pub struct FlagsArgs {
    /// The model's name
    model: String,
    #[command(flatten)]
    config: ServerConfig,
}

/// Prints a line a setting: name, value, source.
pub fn flags(args: &FlagsArgs) -> Result<(), String> {
    let config = &args.config;
    let found = layout::find(&config.model_repository, config.model_name.as_deref(), &args.model);
    let dir = found.map_err(|error| error.to_string())?.model?;
    let settings = launch::settings(&dir.config, config).map_err(|error| error.to_string())?;
    let mut text = format!("{:<30} {:<18} {}\n", "setting", "value", "source");
    for resolved in settings.iter() {
        let value = if resolved.value.is_empty() { "-" } else { &resolved.value };
        text.push_str(&format!("{:<30} {value:<18} {}\n", resolved.name, resolved.source));
    }
    for notice in settings.notices() {
        text.push_str(&format!("warning: {notice}\n"));
    }
    print(&text)?;
    // Prints first, so that the wrong value is seen among the others.
    for path in dir.versions.values() {
        launch::worker_config(&settings, path, config.num_threads).map_err(|error| error.to_string())?;
    }
    launch::engine_config(&settings, &dir.config).map_err(|error| error.to_string())?;
    Ok(())
}
