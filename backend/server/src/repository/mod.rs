//! The model repository: what lies on disk, what its configs mean, and what is loaded.

pub mod dialect;
pub mod draft;
pub mod layout;
pub mod model_config;
mod models;

pub use layout::{Found, ModelDir};
pub use model_config::Role;
pub use models::{IndexEntry, Model, Repository};
