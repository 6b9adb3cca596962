//! `grpc.health.v1`: serving as long as the server is ready.

use std::sync::Arc;

use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::app::App;

/// The services whose health can be asked; the empty name is the whole server.
const SERVICES: [&str; 2] = ["", "inference.GRPCInferenceService"];

/// Sets what is asked first, before anyone can ask.
pub async fn begin(app: &App, health: &HealthReporter) {
    set(health, app.ready()).await;
}

/// Keeps `health` as the readiness of `app`, until the process exits.
pub async fn follow(app: Arc<App>, health: HealthReporter) {
    let mut changes = app.repository.watch_ready();
    let mut told = None;
    loop {
        let ready = app.ready();
        // Watchers hear of changes alone.
        if told.replace(ready) != Some(ready) {
            set(&health, ready).await;
        }
        if !app.live() {
            return;
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = app.exiting().cancelled() => {}
        }
    }
}

async fn set(health: &HealthReporter, ready: bool) {
    let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
    for service in SERVICES {
        health.set_service_status(service, status).await;
    }
}
