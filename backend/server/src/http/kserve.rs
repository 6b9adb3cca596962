//! KServe v2 REST: metadata, configs, statistics, the repository, and inference with JSON or binary tensors.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::{BufMut, Bytes, BytesMut};
use drafthorse_proto::inference::{
    ModelConfigRequest, ModelMetadataRequest, ModelReadyRequest, ModelStatisticsRequest, RepositoryIndexRequest,
    RepositoryModelLoadRequest, RepositoryModelUnloadRequest,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::body::{Body, object};
use super::error::KserveError;
use super::json::{config_json, metadata_json, read_parameters, read_request, response_json, statistics_json};
use crate::app::App;
use crate::error::{Result, ServerError};
use crate::service::{admin, infer};

/// Bytes of JSON at the front of a body that has binary tensors behind it.
const JSON_LENGTH: &str = "inference-header-content-length";

type Answer<T = Json<Value>> = Result<T, KserveError>;

/// The part of a path that names a model.
#[derive(Debug, Deserialize)]
pub(super) struct Named {
    pub(super) model: String,
    /// Empty is the latest.
    #[serde(default)]
    pub(super) version: String,
}

pub(super) fn routes() -> Router<Arc<App>> {
    let router = Router::new()
        .route("/v2", get(server_metadata))
        .route("/v2/", get(server_metadata))
        .route("/v2/models", get(models))
        .route("/v2/models/stats", get(all_statistics))
        .route("/v2/repository/index", post(index))
        .route("/v2/repository/models/{model}/load", post(load))
        .route("/v2/repository/models/{model}/unload", post(unload));
    ["/v2/models/{model}", "/v2/models/{model}/versions/{version}"].into_iter().fold(router, |router, model| {
        router
            .route(model, get(model_metadata))
            .route(&format!("{model}/ready"), get(model_ready))
            .route(&format!("{model}/config"), get(model_config))
            .route(&format!("{model}/stats"), get(model_statistics))
            .route(&format!("{model}/infer"), post(model_infer))
    })
}

async fn server_metadata(State(app): State<Arc<App>>) -> Json<Value> {
    let metadata = admin::server_metadata(&app);
    Json(json!({"name": metadata.name, "version": metadata.version, "extensions": metadata.extensions}))
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let mut names: Vec<String> = app.repository.serving().iter().map(|model| model.name().to_owned()).collect();
    names.dedup();
    Json(json!({"models": names}))
}

async fn model_metadata(State(app): State<Arc<App>>, Path(named): Path<Named>) -> Answer {
    let request = ModelMetadataRequest { name: named.model, version: named.version };
    Ok(Json(metadata_json(admin::model_metadata(&app, &request)?)))
}

/// As Triton: no body when it is, 400 when it is not, whatever the reason.
async fn model_ready(State(app): State<Arc<App>>, Path(named): Path<Named>) -> Answer<Response> {
    let request = ModelReadyRequest { name: named.model, version: named.version };
    if admin::model_ready(&app, &request)? {
        return Ok(StatusCode::OK.into_response());
    }
    Ok((StatusCode::BAD_REQUEST, Json(json!({"error": "Model version not ready"}))).into_response())
}

async fn model_config(State(app): State<Arc<App>>, Path(named): Path<Named>) -> Answer {
    let request = ModelConfigRequest { name: named.model, version: named.version };
    Ok(Json(config_json(&admin::model_config(&app, &request)?.config.unwrap_or_default())))
}

async fn all_statistics(State(app): State<Arc<App>>) -> Answer {
    statistics(&app, &ModelStatisticsRequest::default())
}

async fn model_statistics(State(app): State<Arc<App>>, Path(named): Path<Named>) -> Answer {
    statistics(&app, &ModelStatisticsRequest { name: named.model, version: named.version })
}

fn statistics(app: &App, request: &ModelStatisticsRequest) -> Answer {
    let statistics = admin::model_statistics(app, request)?.model_stats;
    Ok(Json(json!({"model_stats": statistics.iter().map(statistics_json).collect::<Vec<_>>()})))
}

async fn index(State(app): State<Arc<App>>, body: Body) -> Answer {
    let body = body.object_or_empty()?;
    let ready = match body.get("ready") {
        None => false,
        Some(Value::Bool(ready)) => *ready,
        Some(_) => return Err(ServerError::bad_input("ready", "must be true or false").into()),
    };
    let index = admin::repository_index(&app, &RepositoryIndexRequest { ready, ..RepositoryIndexRequest::default() })?;
    let line = |model: &drafthorse_proto::inference::repository_index_response::ModelIndex| json!({"name": model.name, "version": model.version, "state": model.state, "reason": model.reason});
    Ok(Json(index.models.iter().map(line).collect()))
}

async fn load(State(app): State<Arc<App>>, Path(named): Path<Named>, body: Body) -> Answer<StatusCode> {
    let parameters = body.object_or_empty()?.remove("parameters");
    if let Some(parameter) = read_parameters(parameters)?.into_keys().next() {
        return Err(ServerError::unsupported(format!("parameter '{parameter}' of a load request")).into());
    }
    let request = RepositoryModelLoadRequest { model_name: named.model, ..RepositoryModelLoadRequest::default() };
    Box::pin(admin::load(&app, &request)).await?;
    Ok(StatusCode::OK)
}

async fn unload(State(app): State<Arc<App>>, Path(named): Path<Named>, body: Body) -> Answer<StatusCode> {
    body.object_or_empty()?;
    let request = RepositoryModelUnloadRequest { model_name: named.model, ..RepositoryModelUnloadRequest::default() };
    admin::unload(&app, &request)?;
    Ok(StatusCode::OK)
}

async fn model_infer(
    State(app): State<Arc<App>>,
    Path(named): Path<Named>,
    headers: HeaderMap,
    body: Body,
) -> Answer<Response> {
    let (json, binary) = split(&headers, body.bytes()?)?;
    let read = read_request(named.model, named.version, object(&json)?, binary)?;
    let response = Box::pin(infer::answer_once(&app, read.request)).await?;
    let (json, binary) = response_json(response, &read.binary);
    if binary.is_empty() {
        return Ok(Json(json).into_response());
    }
    let json = json.to_string();
    let mut body = BytesMut::with_capacity(json.len() + binary.len());
    body.put_slice(json.as_bytes());
    body.put_slice(&binary);
    let headers = [
        (HeaderName::from_static(JSON_LENGTH), json.len().to_string()),
        (header::CONTENT_TYPE, "application/octet-stream".to_string()),
    ];
    Ok((headers, body.freeze()).into_response())
}

/// The JSON of a body, and what follows it.
fn split(headers: &HeaderMap, mut body: Bytes) -> Result<(Bytes, Bytes)> {
    let Some(length) = headers.get(JSON_LENGTH) else { return Ok((body, Bytes::new())) };
    let given = length.to_str().unwrap_or_default();
    match given.parse::<usize>() {
        Ok(0) => Err(ServerError::unsupported("a request without JSON (Inference-Header-Content-Length: 0)")),
        Ok(length) if length <= body.len() => {
            let json = body.split_to(length);
            Ok((json, body))
        }
        _ => {
            let reason = format!("should be in range (0, {}), got: {given}", body.len());
            Err(ServerError::bad_input("inference header size", reason))
        }
    }
}
