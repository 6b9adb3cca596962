//! What the tests share: tiny models with goldens, a model without a server around it, and the bounds.

#![forbid(unsafe_code)]

pub mod close;
pub mod drafts;
pub mod families;
pub mod fates;
pub mod pairs;
pub mod runner;
pub mod sample;
pub mod tiny;
