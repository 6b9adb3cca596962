//! Probes.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;

use crate::app::App;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v2/health/live", get(live))
        .route("/v2/health/ready", get(ready))
        .route("/health", get(health))
        .route("/health/live", get(live))
        .route("/health/ready", get(health))
        .route("/ping", get(health))
}

async fn live(State(app): State<Arc<App>>) -> StatusCode {
    if app.live() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// As Triton: 400 and no body while it is not.
async fn ready(State(app): State<Arc<App>>) -> StatusCode {
    if app.ready() { StatusCode::OK } else { StatusCode::BAD_REQUEST }
}

/// As vLLM and load balancers have it.
async fn health(State(app): State<Arc<App>>) -> StatusCode {
    if app.ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}
