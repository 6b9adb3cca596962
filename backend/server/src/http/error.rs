//! Errors as the two families of routes write them: KServe's `{"error": text}` and OpenAI's object.

use axum::Json;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::body::BODY;
use crate::error::ServerError;

/// An error of a KServe route.
#[derive(Debug)]
pub(super) struct KserveError(pub(super) ServerError);

impl From<ServerError> for KserveError {
    fn from(error: ServerError) -> Self {
        KserveError(error)
    }
}

impl IntoResponse for KserveError {
    fn into_response(self) -> Response {
        (self.0.http_status(), Json(json!({"error": self.0.to_string()}))).into_response()
    }
}

/// An error of an OpenAI route.
#[derive(Debug)]
pub(super) struct OpenAiError {
    pub(super) error: ServerError,
    /// What the route calls the prompt.
    pub(super) prompt: &'static str,
}

impl From<ServerError> for OpenAiError {
    fn from(error: ServerError) -> Self {
        OpenAiError { error, prompt: "prompt" }
    }
}

impl OpenAiError {
    pub(super) fn body(&self) -> Value {
        let (param, code) = match &self.error {
            // The body as a whole is no parameter.
            ServerError::BadInput { field, .. } | ServerError::BadJson { field, .. } if field == BODY => (None, None),
            ServerError::BadInput { field, .. } | ServerError::BadJson { field, .. } => (Some(field.as_str()), None),
            ServerError::PromptTooLong { .. } => (Some(self.prompt), Some("context_length_exceeded")),
            ServerError::UnknownModel { .. } | ServerError::UnknownVersion { .. } => {
                (Some("model"), Some("model_not_found"))
            }
            ServerError::Unsupported { field, .. } => (field.as_deref(), None),
            _ => (None, None),
        };
        error_object(self.status(), &self.error.to_string(), param, code)
    }

    /// Clients of this API try again after 501 as after any 5xx, and would be told the same.
    fn status(&self) -> StatusCode {
        match &self.error {
            ServerError::Unsupported { .. } => StatusCode::BAD_REQUEST,
            error => error.http_status(),
        }
    }
}

impl IntoResponse for OpenAiError {
    fn into_response(self) -> Response {
        (self.status(), Json(self.body())).into_response()
    }
}

fn error_object(status: StatusCode, message: &str, param: Option<&str>, code: Option<&str>) -> Value {
    let kind = match status {
        StatusCode::NOT_FOUND => "not_found_error",
        status if status.is_client_error() => "invalid_request_error",
        StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
        _ => "server_error",
    };
    json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
}

/// What there is no handler for, in the manner of the routes nearby.
pub(super) fn plain(status: StatusCode, uri: &Uri, message: &str) -> Response {
    let openai = uri.path().starts_with("/v1") || uri.path().starts_with("/openai");
    let body = if openai { error_object(status, message, None, None) } else { json!({"error": message}) };
    (status, Json(body)).into_response()
}
