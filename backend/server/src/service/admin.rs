//! Everything but inference: readiness, metadata, config, statistics and the repository.

use drafthorse_proto::inference::model_metadata_response::TensorMetadata;
use drafthorse_proto::inference::repository_index_response::ModelIndex;
use drafthorse_proto::inference::{
    DataType, InferStatistics, ModelConfigRequest, ModelConfigResponse, ModelMetadataRequest, ModelMetadataResponse,
    ModelReadyRequest, ModelStatistics, ModelStatisticsRequest, ModelStatisticsResponse, RepositoryIndexRequest,
    RepositoryIndexResponse, RepositoryModelLoadRequest, RepositoryModelUnloadRequest, ServerMetadataResponse,
    StatisticDuration,
};

use crate::app::App;
use crate::error::{Result, ServerError};
use crate::metrics::Sum;
use crate::repository::Model;
use crate::repository::dialect::wire_name;

/// The protocol's extensions that work here.
pub const EXTENSIONS: &[&str] = &["model_repository", "model_configuration", "parameters", "statistics"];

pub fn server_metadata(app: &App) -> ServerMetadataResponse {
    ServerMetadataResponse {
        name: app.config.id.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        extensions: EXTENSIONS.iter().map(|name| (*name).to_owned()).collect(),
    }
}

/// A model that does not exist is not ready; only a version that is no number is an error.
pub fn model_ready(app: &App, request: &ModelReadyRequest) -> Result<bool> {
    match app.repository.model(&request.name, &request.version) {
        Ok(_) => Ok(app.live()),
        Err(error @ ServerError::BadInput { .. }) => Err(error),
        Err(_) => Ok(false),
    }
}

pub fn model_metadata(app: &App, request: &ModelMetadataRequest) -> Result<ModelMetadataResponse> {
    let model = app.repository.model(&request.name, &request.version)?;
    let config = &model.config;
    let tensor = |name: &str, data_type: i32, dims: &[i64]| TensorMetadata {
        name: name.into(),
        datatype: wire_name(DataType::try_from(data_type).unwrap_or(DataType::TypeInvalid)).into(),
        shape: if config.max_batch_size > 0 { [&[-1], dims].concat() } else { dims.to_vec() },
    };
    let platform = if config.platform.is_empty() { &config.backend } else { &config.platform };
    Ok(ModelMetadataResponse {
        name: model.name().into(),
        versions: app.repository.versions(model.name()).iter().map(u64::to_string).collect(),
        platform: platform.clone(),
        inputs: config.input.iter().map(|input| tensor(&input.name, input.data_type, &input.dims)).collect(),
        outputs: config.output.iter().map(|output| tensor(&output.name, output.data_type, &output.dims)).collect(),
    })
}

pub fn model_config(app: &App, request: &ModelConfigRequest) -> Result<ModelConfigResponse> {
    let model = app.repository.model(&request.name, &request.version)?;
    Ok(ModelConfigResponse { config: Some(model.config.as_ref().clone()) })
}

pub fn model_statistics(app: &App, request: &ModelStatisticsRequest) -> Result<ModelStatisticsResponse> {
    let models = if request.name.is_empty() {
        app.repository.serving()
    } else {
        vec![app.repository.model(&request.name, &request.version)?]
    };
    Ok(ModelStatisticsResponse { model_stats: models.iter().map(|model| statistics(model)).collect() })
}

fn statistics(model: &Model) -> ModelStatistics {
    let metrics = &model.served.metrics;
    let duration = |sum: &Sum| Some(StatisticDuration { count: sum.count(), ns: sum.nanos() });
    ModelStatistics {
        name: model.name().into(),
        version: model.version.to_string(),
        last_inference: metrics.last_request_ms(),
        inference_count: metrics.success.count(),
        // One request is one execution: how many share a step changes from step to step.
        execution_count: metrics.success.count(),
        inference_stats: Some(InferStatistics {
            success: duration(&metrics.success),
            fail: duration(&metrics.fail),
            queue: duration(&metrics.queue),
            compute_input: duration(&metrics.compute_input),
            compute_infer: duration(&metrics.compute_infer),
            compute_output: duration(&metrics.compute_output),
            cache_hit: Some(StatisticDuration::default()),
            cache_miss: Some(StatisticDuration::default()),
        }),
        ..ModelStatistics::default()
    }
}

pub fn repository_index(app: &App, request: &RepositoryIndexRequest) -> Result<RepositoryIndexResponse> {
    if !request.repository_name.is_empty() {
        return Err(ServerError::unsupported("repository_name"));
    }
    let models = app.repository.index(request.ready).into_iter().map(|entry| ModelIndex {
        name: entry.name,
        version: entry.version,
        state: entry.state.into(),
        reason: entry.reason,
    });
    Ok(RepositoryIndexResponse { models: models.collect() })
}

pub async fn load(app: &App, request: &RepositoryModelLoadRequest) -> Result<()> {
    let name = model_name(&request.repository_name, &request.model_name)?;
    if let Some(parameter) = request.parameters.keys().next() {
        return Err(ServerError::unsupported(format!("parameter '{parameter}' of a load request")));
    }
    app.repository.load(name).await
}

pub fn unload(app: &App, request: &RepositoryModelUnloadRequest) -> Result<()> {
    let name = model_name(&request.repository_name, &request.model_name)?;
    // No model depends on another, so unload_dependents has nothing to do.
    app.repository.unload(name)
}

/// KServe's copy of the protocol writes the model's name where Triton's has the repository's.
fn model_name<'a>(repository_name: &'a str, model_name: &'a str) -> Result<&'a str> {
    match (repository_name, model_name) {
        ("", "") => Err(ServerError::bad_input("model_name", "must not be empty")),
        (name, "") | ("", name) => Ok(name),
        _ => Err(ServerError::unsupported("repository_name")),
    }
}
