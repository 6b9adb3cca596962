//! The inference protocol (KServe v2 with Triton's extensions), its generated Rust, and `config.pbtxt` text.
//!
//! `src/generated/` is committed; `tests/generated.rs` fails when it differs from `inference/*.proto`, and
//! `UPDATE=1 cargo test -p drafthorse-proto` rewrites it.

#![forbid(unsafe_code)]

mod pbtxt;

/// The generated messages, client and server.
#[allow(clippy::all, clippy::pedantic, unused_qualifications, missing_docs)]
pub mod inference {
    include!("generated/inference.rs");
}

/// The protos as an encoded `FileDescriptorSet`, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/inference.bin");

pub use inference::grpc_inference_service_client::GrpcInferenceServiceClient;
pub use inference::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
pub use pbtxt::{PbtxtError, parse_model_config, print_model_config};
