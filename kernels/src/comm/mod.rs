//! Collectives between the ranks of a model.

mod communicator;

pub use communicator::{Communicator, Solo};
