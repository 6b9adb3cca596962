//! The worker through its link, driven by a small engine of dice.

mod ahead;
mod chains;
mod deterministic;
mod drafting;
mod eagle;
mod engine;
mod failing;
mod fake;
mod fake_drafter;
mod gpu;
mod guided;
mod law;
mod llama;
mod lossy;
mod resting;
mod serving;
mod sharing;
mod verifying;

use drafthorse_control::{ChannelLink, Ready};
use drafthorse_kernels::Device;

use crate::config::WorkerConfig;
use crate::load::{Network, assemble};
use crate::rank::spawn_with;
use crate::spec::Proposer;
use engine::{Engine, small};

/// A rank that runs `network`, with the proposer that `propose` makes.
fn rank(
    config: WorkerConfig,
    network: impl FnOnce() -> Network + Send + 'static,
    proposer: Option<Box<dyn Proposer>>,
) -> (Ready, ChannelLink) {
    spawn_with(move || assemble(&config, &Device::Cpu, network(), proposer, &|_| {})).unwrap()
}

/// An engine over a rank of the fake model.
fn fake_engine(proposer: Option<Box<dyn Proposer>>) -> Engine {
    Engine::new(rank(small(), fake::network, proposer))
}
