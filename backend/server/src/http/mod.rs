//! The HTTP doors: KServe v2 REST with Triton's generate routes, OpenAI's API, health, and the metrics page.
//!
//! A client that closes its connection drops the handler or the response's stream, and with it the generation, which cancels it.

mod body;
mod error;
mod generate;
mod health;
mod json;
mod kserve;
mod openai;
mod sse;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, StatusCode, Uri};
use axum::response::Response;
use tower_http::decompression::RequestDecompressionLayer;

use crate::app::App;

/// All routes of the HTTP port.
pub fn router(app: &Arc<App>) -> Router {
    let openai = openai::routes();
    Router::new()
        .merge(health::routes())
        .merge(kserve::routes())
        .merge(generate::routes())
        .nest("/v1", openai.clone())
        .nest("/openai/v1", openai)
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(DefaultBodyLimit::max(app.config.http_max_input_size))
        .layer(RequestDecompressionLayer::new())
        .with_state(Arc::clone(app))
}

async fn not_found(method: Method, uri: Uri) -> Response {
    error::plain(StatusCode::NOT_FOUND, &uri, &format!("no route {method} {}", uri.path()))
}

async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    let message = format!("method {method} is not allowed for {}", uri.path());
    error::plain(StatusCode::METHOD_NOT_ALLOWED, &uri, &message)
}
