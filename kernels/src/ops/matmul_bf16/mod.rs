//! x
pub mod cuda;
