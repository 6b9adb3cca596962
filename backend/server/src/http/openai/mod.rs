//! OpenAI's API: models, chat completions and completions, under `/v1` and `/openai/v1`.

mod answer;
mod chat;
mod completions;
mod logprobs;
mod request;

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use super::error::OpenAiError;
use crate::app::App;
use crate::generate::ServedModel;

/// Relative to their prefix.
pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/models", get(models))
        .route("/models/{model}", get(model))
        .route("/chat/completions", post(chat::chat_completions))
        .route("/completions", post(completions::completions))
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let mut models: Vec<Arc<ServedModel>> = Vec::new();
    for model in app.repository.serving() {
        // The latest version answers to the name.
        models.retain(|listed| listed.name() != model.served.name());
        models.push(Arc::clone(&model.served));
    }
    Json(json!({"object": "list", "data": models.iter().map(|model| card(model)).collect::<Vec<_>>()}))
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, OpenAiError> {
    let model = app.repository.model(&name, "")?;
    Ok(Json(card(&model.served)))
}

fn card(model: &ServedModel) -> Value {
    json!({
        "id": model.name(),
        "object": "model",
        "created": model.created(),
        "owned_by": "drafthorse",
        "root": model.name(),
        "parent": null,
        "max_model_len": model.max_len(),
    })
}
