//! Medians of graph replays, and random tensors that are cheap to make.

use std::sync::Arc;

use drafthorse_kernels::device::CudaDevice;
use drafthorse_kernels::device::cuda::{Event, Graph};
use drafthorse_kernels::{Device, Result, Shape, Tensor};
use half::bf16;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// Launches in one graph: enough that a replay's own cost is lost in them.
const PER_GRAPH: usize = 32;
const WARM_UPS: usize = 5;
const REPLAYS: usize = 41;

pub struct Timer {
    gpu: Arc<CudaDevice>,
}

impl Timer {
    pub fn new(gpu: &Arc<CudaDevice>) -> Result<Self> {
        Ok(Timer { gpu: gpu.clone() })
    }

    /// Microseconds of one `op(i)`, i running through `0..copies`.
    pub fn each(&self, copies: usize, mut op: impl FnMut(usize) -> Result<()>) -> Result<f64> {
        let launches = PER_GRAPH.next_multiple_of(copies);
        Ok(self.whole(|| (0..launches).try_for_each(|i| op(i % copies)))? / launches as f64)
    }

    /// Microseconds of all that `work` launches, once.
    pub fn whole(&self, work: impl FnMut() -> Result<()>) -> Result<f64> {
        Ok(self.alone_and_in_a_row(work)?.0)
    }

    /// [`whole`](Self::whole), and as many without a pause: as steps follow each other in a server.
    pub fn alone_and_in_a_row(&self, mut work: impl FnMut() -> Result<()>) -> Result<(f64, f64)> {
        work()?; // loads kernels and makes plans, which a capture must not
        self.gpu.synchronize()?;
        let graph = Graph::capture(&self.gpu, work)?;
        let (begin, end) = (Event::timed(&self.gpu)?, Event::timed(&self.gpu)?);
        for _ in 0..WARM_UPS {
            graph.launch()?;
        }
        let mut times = Vec::with_capacity(REPLAYS);
        for _ in 0..REPLAYS {
            begin.record()?;
            graph.launch()?;
            end.record()?;
            times.push(begin.until(&end)?.as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        begin.record()?;
        for _ in 0..REPLAYS {
            graph.launch()?;
        }
        end.record()?;
        Ok((times[REPLAYS / 2], begin.until(&end)?.as_secs_f64() * 1e6 / REPLAYS as f64))
    }
}

/// Random bf16 from a pool of 64 MB, each tensor beginning elsewhere in it.
pub struct Random {
    device: Device,
    pool: Vec<bf16>,
    rng: StdRng,
}

impl Random {
    pub fn new(device: &Device) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(1);
        let pool = (0..32 << 20).map(|_| bf16::from_f32(rng.random_range(-0.05f32..0.05))).collect();
        Ok(Random { device: device.clone(), pool, rng })
    }

    pub fn tensor(&mut self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        let values = self.values(shape.num_elements());
        Tensor::from_slice(&self.device, "random", &values, shape)
    }

    pub fn values(&mut self, len: usize) -> Vec<bf16> {
        let mut values = Vec::with_capacity(len);
        while values.len() < len {
            let from = self.rng.random_range(0..self.pool.len() / 2);
            let take = (len - values.len()).min(self.pool.len() - from);
            values.extend_from_slice(&self.pool[from..from + take]);
        }
        values
    }

    /// About normal, of deviation 2.3.
    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| (0..4).map(|_| self.rng.random_range(-2.0f32..2.0)).sum()).collect()
    }

    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        values.shuffle(&mut self.rng);
    }
}
