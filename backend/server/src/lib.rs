//! The drafthorse server: gRPC and HTTP services over a Triton-style model repository.
//!
//! A request comes in through [`service`] (gRPC) or [`http`], both hand it to [`generate`], which turns text into tokens for the
//! engine and tokens back into text. [`repository`] knows which models there are, [`launch`] brings one up.

#![forbid(unsafe_code)]

pub mod app;
pub mod bench;
pub mod config;
pub mod error;
pub mod generate;
pub mod http;
pub mod import;
pub mod launch;
pub mod load;
pub mod metrics;
pub mod params;
pub mod repository;
pub mod serve;
pub mod service;
pub mod settings;
pub mod text;

pub use app::App;
pub use config::ServerConfig;
pub use error::{Result, ServerError};
