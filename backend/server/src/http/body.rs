//! Request bodies, read whole.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::{Result, ServerError};
use crate::params::key_given_twice;

/// What a body as a whole is called in messages.
pub(super) const BODY: &str = "body";

/// Time that a client has to send a body.
const BODY_TIME: Duration = Duration::from_secs(60);

/// A body, or why there is none; each family of routes says that in its own way.
#[derive(Debug)]
pub(super) struct Body(Result<Bytes>);

impl FromRequest<std::sync::Arc<App>> for Body {
    type Rejection = std::convert::Infallible;

    async fn from_request(request: Request, app: &std::sync::Arc<App>) -> Result<Self, Self::Rejection> {
        let read = tokio::time::timeout(BODY_TIME, Bytes::from_request(request, app)).await;
        let Ok(read) = read else {
            let reason = format!("did not come within {} s", BODY_TIME.as_secs());
            return Ok(Body(Err(ServerError::bad_input(BODY, reason))));
        };
        let bytes = read.map_err(|rejection| {
            let reason = rejection.body_text();
            match rejection.into_response().status() {
                StatusCode::PAYLOAD_TOO_LARGE => ServerError::TooLarge { max: app.config.http_max_input_size },
                _ => ServerError::bad_input(BODY, reason),
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
    /// `BadJson` with the position, `BadInput` for other JSON, and for a key that comes twice.
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
        Ok(Value::Object(map)) => match key_given_twice(bytes) {
            Some(key) => Err(ServerError::bad_input(key, "is given twice")),
            None => Ok(map),
        },
        Ok(_) => Err(ServerError::bad_input(BODY, "must be a JSON object")),
        Err(error) => Err(ServerError::bad_json(BODY, &error)),
    }
}
