//! `drafthorse serve`.

use std::io::IsTerminal;
use std::net::SocketAddr;

use drafthorse::config::{LogConfig, LogFormat, unknown_variables};
use drafthorse::serve::Server;
use drafthorse::{ServerConfig, ServerError};
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;

/// Serves until SIGTERM or SIGINT, or until no model is left.
pub fn serve(config: ServerConfig) -> Result<(), String> {
    start_log(&config.log)?;
    let variables = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    unknown_variables(variables).iter().for_each(|warning| warn!("{warning}"));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the runtime: {error}"))?;
    let result = runtime.block_on(run(config));
    // Whatever still blocks, a load for instance, must not keep the process.
    runtime.shutdown_background();
    result
}

fn start_log(config: &LogConfig) -> Result<(), String> {
    let filter = EnvFilter::try_new(&config.log_level)
        .map_err(|error| ServerError::BadSetting {
            name: "log_level".into(),
            got: format!("'{}'", config.log_level),
            must: format!("a filter like info or warn,drafthorse=debug ({error})"),
        })
        .map_err(|error| error.to_string())?;
    let colours = std::io::stderr().is_terminal();
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr);
    match config.log_format {
        LogFormat::Text => builder.with_target(false).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

async fn run(config: ServerConfig) -> Result<(), String> {
    let exit_on_error = config.exit_on_error;
    // Before anything else, so that a signal during start ends the process as it should.
    let listen = |kind| signal(kind).map_err(|error| format!("cannot listen for signals: {error}"));
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let mut server = Server::start(config).await.map_err(|error| error.to_string())?;
    banner(&server);

    let mut loading = true;
    let mut ready = server.app.repository.watch_ready();
    let lost_all = loop {
        tokio::select! {
            _ = terminate.recv() => break false,
            _ = interrupt.recv() => break false,
            failed = server.loaded(), if loading => {
                loading = false;
                if !failed.is_empty() && exit_on_error {
                    server.shutdown().await;
                    return Err(format!("failed to load {}", failed.join(", ")));
                }
                say_what_to_do(&server);
            }
            Ok(()) = ready.changed() => {}
        }
        // An engine that has died leaves a model that was served; one that never loaded leaves the server up.
        if !loading && server.app.repository.lost_all() {
            break true;
        }
    };
    info!("stopping; a second signal ends it at once");
    tokio::select! {
        _ = server.shutdown() => {}
        _ = terminate.recv() => return Err("ended by a second signal, requests in flight are lost".into()),
        _ = interrupt.recv() => return Err("ended by a second signal, requests in flight are lost".into()),
    }
    if lost_all {
        error!("no model is left");
        return Err("no model is left: every engine has stopped".into());
    }
    info!("stopped");
    Ok(())
}

fn banner(server: &Server) {
    let show = |address: Option<SocketAddr>| address.map_or("off".to_owned(), |address| address.to_string());
    info!(
        version = env!("CARGO_PKG_VERSION"),
        http = show(server.http),
        grpc = show(server.grpc),
        metrics = show(server.metrics),
        "drafthorse is listening"
    );
}

fn say_what_to_do(server: &Server) {
    let serving = server.app.repository.serving();
    let Some(model) = serving.first() else {
        info!("no model is ready; RepositoryIndex has the reasons");
        return;
    };
    if let Some(http) = server.http {
        let name = model.name();
        info!(
            "try: curl http://{http}/v2/models/{name}/generate -d '{{\"text_input\": \"Hello\", \"max_tokens\": 16}}'"
        );
    }
}
