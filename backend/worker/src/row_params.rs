//! How the rows of a chunk are sampled, on the host and on the device.

use drafthorse_control::SamplingParams;
use drafthorse_kernels::device::{Staged, Staging};
use drafthorse_kernels::ops::sample::SampleRows;
use drafthorse_kernels::{DType, Device};

use crate::error::Result;

/// [`SampleRows`], filled row by row.
pub(crate) struct RowParams {
    host: Vec<HostParams>,
    staging: Staging,
    temperature: Staged,
    top_k: Staged,
    top_p: Staged,
    min_p: Staged,
    position: Staged,
    /// `[rows, 2]`.
    seed: Staged,
}

#[derive(Clone, Copy)]
struct HostParams {
    temperature: f32,
    top_k: i32,
    top_p: f32,
    min_p: f32,
    seed: u64,
    position: i32,
}

impl RowParams {
    pub fn new(device: &Device, max_rows: usize) -> Result<Self> {
        let staging = Staging::new(device, 7 * (4 * max_rows).next_multiple_of(64))?;
        let tensor = |dtype| staging.tensor([max_rows], dtype);
        Ok(RowParams {
            host: Vec::with_capacity(max_rows),
            temperature: tensor(DType::F32)?,
            top_k: tensor(DType::I32)?,
            top_p: tensor(DType::F32)?,
            min_p: tensor(DType::F32)?,
            position: tensor(DType::I32)?,
            seed: staging.tensor([max_rows, 2], DType::I32)?,
            staging,
        })
    }

    /// Forgets the rows before.
    pub fn begin(&mut self) {
        self.host.clear();
    }

    /// Adds a row.
    pub fn push(&mut self, sampling: &SamplingParams, position: usize) {
        self.host.push(HostParams {
            temperature: sampling.temperature,
            top_k: i32::try_from(sampling.top_k).unwrap_or(i32::MAX),
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            position: position as i32,
        });
    }

    /// Bounds the last row to the `most` likeliest tokens.
    pub fn keep_at_most(&mut self, most: usize) {
        let most = i32::try_from(most).unwrap_or(i32::MAX);
        if let Some(row) = self.host.last_mut() {
            row.top_k = if row.top_k == 0 { most } else { row.top_k.min(most) };
        }
    }

    /// Copies the rows to the device.
    pub fn send(&mut self) -> Result<()> {
        let num_rows = self.host.len();
        let floats: [(&mut Staged, fn(&HostParams) -> f32); 3] = [
            (&mut self.temperature, |row| row.temperature),
            (&mut self.top_p, |row| row.top_p),
            (&mut self.min_p, |row| row.min_p),
        ];
        for (staged, of) in floats {
            for (value, row) in self.staging.elements(staged, 0..num_rows)?.iter_mut().zip(&self.host) {
                *value = of(row);
            }
        }
        let ints: [(&mut Staged, fn(&HostParams) -> i32); 2] =
            [(&mut self.top_k, |row| row.top_k), (&mut self.position, |row| row.position)];
        for (staged, of) in ints {
            for (value, row) in self.staging.elements(staged, 0..num_rows)?.iter_mut().zip(&self.host) {
                *value = of(row);
            }
        }
        let seeds = self.staging.elements::<i32>(&mut self.seed, 0..2 * num_rows)?;
        for (seed, row) in seeds.chunks_mut(2).zip(&self.host) {
            (seed[0], seed[1]) = (row.seed as i32, (row.seed >> 32) as i32);
        }
        Ok(self.staging.send()?)
    }

    /// The first `num_rows` rows on the device, for one call.
    pub fn with<T>(&self, num_rows: usize, call: impl FnOnce(&SampleRows<'_>) -> T) -> T {
        let rows = 0..num_rows;
        call(&SampleRows {
            temperature: &self.temperature.rows(rows.clone()),
            top_k: &self.top_k.rows(rows.clone()),
            top_p: &self.top_p.rows(rows.clone()),
            min_p: &self.min_p.rows(rows.clone()),
            seed: &self.seed.rows(rows.clone()),
            position: &self.position.rows(rows),
        })
    }
}
