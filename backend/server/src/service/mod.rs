//! The gRPC services: inference (KServe v2 with Triton's extensions), health and reflection.

pub(crate) mod admin;
pub mod health;
pub(crate) mod infer;
mod parameters;
mod stream;
pub mod tensors;

use std::sync::Arc;
use std::time::Duration;

use drafthorse_proto::inference::{
    CudaSharedMemoryRegisterRequest, CudaSharedMemoryRegisterResponse, CudaSharedMemoryStatusRequest,
    CudaSharedMemoryStatusResponse, CudaSharedMemoryUnregisterRequest, CudaSharedMemoryUnregisterResponse,
    LogSettingsRequest, LogSettingsResponse, ModelConfigRequest, ModelConfigResponse, ModelInferRequest,
    ModelInferResponse, ModelMetadataRequest, ModelMetadataResponse, ModelReadyRequest, ModelReadyResponse,
    ModelStatisticsRequest, ModelStatisticsResponse, ModelStreamInferResponse, RepositoryIndexRequest,
    RepositoryIndexResponse, RepositoryModelLoadRequest, RepositoryModelLoadResponse, RepositoryModelUnloadRequest,
    RepositoryModelUnloadResponse, ServerLiveRequest, ServerLiveResponse, ServerMetadataRequest,
    ServerMetadataResponse, ServerReadyRequest, ServerReadyResponse, SystemSharedMemoryRegisterRequest,
    SystemSharedMemoryRegisterResponse, SystemSharedMemoryStatusRequest, SystemSharedMemoryStatusResponse,
    SystemSharedMemoryUnregisterRequest, SystemSharedMemoryUnregisterResponse, TraceSettingRequest,
    TraceSettingResponse,
};
use drafthorse_proto::{FILE_DESCRIPTOR_SET, GrpcInferenceService, GrpcInferenceServiceServer};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::CompressionEncoding;
use tonic::metadata::MetadataMap;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use crate::app::App;
use crate::error::{Result, ServerError};

pub use admin::EXTENSIONS;

/// Largest message that goes out.
const MAX_MESSAGE: usize = i32::MAX as usize;

/// Responses of one stream that may wait for a slow client before its requests do.
const STREAM_CAPACITY: usize = 64;

/// `inference.GRPCInferenceService`.
#[derive(Clone, Debug)]
struct InferenceService {
    app: Arc<App>,
}

/// All gRPC services over `app`.
///
/// # Errors
/// `Internal` if the committed descriptors do not decode, which a test rules out.
pub fn routes(app: &Arc<App>, health: tonic_health::server::HealthReporter) -> Result<Routes> {
    let inference = GrpcInferenceServiceServer::new(InferenceService { app: app.clone() })
        .max_decoding_message_size(app.config.grpc_max_input_size)
        .max_encoding_message_size(MAX_MESSAGE)
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Deflate);
    let health_service = tonic_health::server::HealthService::from_health_reporter(health);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    Ok(Routes::new(inference)
        .add_service(tonic_health::pb::health_server::HealthServer::new(health_service))
        .add_service(reflection().build_v1().map_err(ServerError::internal)?)
        .add_service(reflection().build_v1alpha().map_err(ServerError::internal)?))
}

/// The time that the caller gives, less a little: what it gets is our answer, not the transport's, which says `CANCELLED`.
fn deadline(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let count: u64 = digits.parse().ok()?;
    let timeout = match unit {
        "H" => Duration::from_secs(count.checked_mul(3600)?),
        "M" => Duration::from_secs(count.checked_mul(60)?),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    };
    Some(timeout - (timeout / 20).min(Duration::from_millis(5)))
}

fn unsupported<T>(what: &str) -> Result<Response<T>, Status> {
    Err(ServerError::unsupported(what).into())
}

#[tonic::async_trait]
impl GrpcInferenceService for InferenceService {
    async fn server_live(&self, _: Request<ServerLiveRequest>) -> Result<Response<ServerLiveResponse>, Status> {
        if self.app.live() {
            Ok(Response::new(ServerLiveResponse { live: true }))
        } else {
            Err(ServerError::Exiting.into())
        }
    }

    async fn server_ready(&self, _: Request<ServerReadyRequest>) -> Result<Response<ServerReadyResponse>, Status> {
        if !self.app.live() {
            return Err(ServerError::Exiting.into());
        }
        Ok(Response::new(ServerReadyResponse { ready: self.app.ready() }))
    }

    async fn model_ready(&self, request: Request<ModelReadyRequest>) -> Result<Response<ModelReadyResponse>, Status> {
        Ok(Response::new(ModelReadyResponse { ready: admin::model_ready(&self.app, &request.into_inner())? }))
    }

    async fn server_metadata(
        &self,
        _: Request<ServerMetadataRequest>,
    ) -> Result<Response<ServerMetadataResponse>, Status> {
        Ok(Response::new(admin::server_metadata(&self.app)))
    }

    async fn model_metadata(
        &self,
        request: Request<ModelMetadataRequest>,
    ) -> Result<Response<ModelMetadataResponse>, Status> {
        Ok(Response::new(admin::model_metadata(&self.app, &request.into_inner())?))
    }

    async fn model_config(
        &self,
        request: Request<ModelConfigRequest>,
    ) -> Result<Response<ModelConfigResponse>, Status> {
        Ok(Response::new(admin::model_config(&self.app, &request.into_inner())?))
    }

    async fn model_statistics(
        &self,
        request: Request<ModelStatisticsRequest>,
    ) -> Result<Response<ModelStatisticsResponse>, Status> {
        Ok(Response::new(admin::model_statistics(&self.app, &request.into_inner())?))
    }

    async fn model_infer(&self, request: Request<ModelInferRequest>) -> Result<Response<ModelInferResponse>, Status> {
        let deadline = deadline(request.metadata());
        let answer = Box::pin(infer::answer_once(&self.app, request.into_inner()));
        let response = match deadline {
            None => answer.await,
            Some(deadline) => {
                tokio::time::timeout(deadline, answer).await.unwrap_or(Err(ServerError::DeadlineExceeded))
            }
        };
        Ok(Response::new(response?))
    }

    type ModelStreamInferStream = ReceiverStream<Result<ModelStreamInferResponse, Status>>;

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<ModelInferRequest>>,
    ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
        let (responses, receiver) = mpsc::channel(STREAM_CAPACITY);
        let ends_on_error = stream::ends_on_error(request.metadata());
        tokio::spawn(stream::answer(self.app.clone(), request.into_inner(), ends_on_error, responses));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn repository_index(
        &self,
        request: Request<RepositoryIndexRequest>,
    ) -> Result<Response<RepositoryIndexResponse>, Status> {
        Ok(Response::new(admin::repository_index(&self.app, &request.into_inner())?))
    }

    async fn repository_model_load(
        &self,
        request: Request<RepositoryModelLoadRequest>,
    ) -> Result<Response<RepositoryModelLoadResponse>, Status> {
        Box::pin(admin::load(&self.app, &request.into_inner())).await?;
        Ok(Response::new(RepositoryModelLoadResponse {}))
    }

    async fn repository_model_unload(
        &self,
        request: Request<RepositoryModelUnloadRequest>,
    ) -> Result<Response<RepositoryModelUnloadResponse>, Status> {
        admin::unload(&self.app, &request.into_inner())?;
        Ok(Response::new(RepositoryModelUnloadResponse {}))
    }

    async fn system_shared_memory_status(
        &self,
        _: Request<SystemSharedMemoryStatusRequest>,
    ) -> Result<Response<SystemSharedMemoryStatusResponse>, Status> {
        unsupported("system shared memory")
    }

    async fn system_shared_memory_register(
        &self,
        _: Request<SystemSharedMemoryRegisterRequest>,
    ) -> Result<Response<SystemSharedMemoryRegisterResponse>, Status> {
        unsupported("system shared memory")
    }

    async fn system_shared_memory_unregister(
        &self,
        _: Request<SystemSharedMemoryUnregisterRequest>,
    ) -> Result<Response<SystemSharedMemoryUnregisterResponse>, Status> {
        unsupported("system shared memory")
    }

    async fn cuda_shared_memory_status(
        &self,
        _: Request<CudaSharedMemoryStatusRequest>,
    ) -> Result<Response<CudaSharedMemoryStatusResponse>, Status> {
        unsupported("CUDA shared memory")
    }

    async fn cuda_shared_memory_register(
        &self,
        _: Request<CudaSharedMemoryRegisterRequest>,
    ) -> Result<Response<CudaSharedMemoryRegisterResponse>, Status> {
        unsupported("CUDA shared memory")
    }

    async fn cuda_shared_memory_unregister(
        &self,
        _: Request<CudaSharedMemoryUnregisterRequest>,
    ) -> Result<Response<CudaSharedMemoryUnregisterResponse>, Status> {
        unsupported("CUDA shared memory")
    }

    async fn trace_setting(&self, _: Request<TraceSettingRequest>) -> Result<Response<TraceSettingResponse>, Status> {
        unsupported("TraceSetting")
    }

    async fn log_settings(&self, _: Request<LogSettingsRequest>) -> Result<Response<LogSettingsResponse>, Status> {
        unsupported("LogSettings")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_a_little_before_the_callers() {
        let read = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            deadline(&metadata).map(|time| time.as_micros())
        };
        assert_eq!(read("2S"), Some(1_995_000));
        assert_eq!(read("100u"), Some(95));
        assert_eq!(read("200000000n"), Some(195_000));
        assert_eq!(read("1H"), Some(3_599_995_000));
        for text in ["", "S", "12", "12x", "-1S", "99999999999999999999H"] {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(deadline(&MetadataMap::new()), None);
    }
}
