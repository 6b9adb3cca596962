//! Request bodies, read whole.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::{Result, ServerError};

/// A body, or why there is none; each family of routes says that in its own way.
#[derive(Debug)]
pub(super) struct Body(Result<Bytes>);

impl FromRequest<std::sync::Arc<App>> for Body {
    type Rejection = std::convert::Infallible;

    async fn from_request(request: Request, app: &std::sync::Arc<App>) -> Result<Self, Self::Rejection> {
        let bytes = Bytes::from_request(request, app).await.map_err(|rejection| {
            let reason = rejection.body_text();
            match rejection.into_response().status() {
                StatusCode::PAYLOAD_TOO_LARGE => ServerError::TooLarge { max: app.config.http_max_input_size },
                _ => ServerError::bad_input("body", reason),
            }
        });
        Ok(Body(bytes))
    }
}

impl Body {
    pub(super) fn bytes(self) -> Result<Bytes> {
        self.0
    }

    /// The body as a JSON object.
    ///
    /// # Errors
    /// `BadJson` with the position, `BadInput` for other JSON.
    pub(super) fn object(self) -> Result<Map<String, Value>> {
        object(&self.0?)
    }

    /// As [`object`](Self::object), but an empty body is an empty object.
    pub(super) fn object_or_empty(self) -> Result<Map<String, Value>> {
        let bytes = self.0?;
        if bytes.is_empty() { Ok(Map::new()) } else { object(&bytes) }
    }
}

/// Bytes as a JSON object; see [`Body::object`].
pub(super) fn object(bytes: &[u8]) -> Result<Map<String, Value>> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ServerError::bad_input("body", "must be a JSON object")),
        Err(error) => Err(ServerError::bad_json("body", &error)),
    }
}
