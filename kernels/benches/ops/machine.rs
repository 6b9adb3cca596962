//! What this machine can do at best, measured: reading memory, and multiplying.

use std::fmt;
use std::hint::black_box;
use std::time::Instant;

use drafthorse_kernels::pool::{num_threads, parallel_for};

/// Far more than any cache.
const READ_BYTES: usize = 512 << 20;
/// Read or multiplied in one run: short, so that some run is not disturbed.
const RUN_BYTES: usize = 16 << 20;
const FMA_ROUNDS: usize = 100_000;
const NUM_RUNS: usize = 96;

pub struct Machine {
    cpu: String,
    read_bytes_per_second: f64,
    flop_per_second: f64,
}

impl Machine {
    /// Takes the best of a few runs on all threads of the pool.
    pub fn measure() -> Self {
        let memory: Vec<u64> = (0..READ_BYTES as u64 / 8).collect();
        let best = |work: &dyn Fn(usize)| {
            let runs = (0..NUM_RUNS).map(|run| {
                let start = Instant::now();
                work(run);
                start.elapsed().as_secs_f64()
            });
            runs.fold(f64::INFINITY, f64::min)
        };
        let pieces = num_threads() * 4;
        let piece = RUN_BYTES / 8 / pieces;
        let read = best(&|run| {
            let memory = &memory[run % (READ_BYTES / RUN_BYTES) * RUN_BYTES / 8..];
            parallel_for(pieces, &|i| {
                black_box(sum(&memory[i * piece..][..piece]));
            });
        });
        let fma = best(&|_| {
            parallel_for(num_threads(), &|_| {
                black_box(multiply());
            });
        });
        let flop = (num_threads() * FMA_ROUNDS * CHAINS * LANES * 2) as f64;
        Machine { cpu: cpu_name(), read_bytes_per_second: RUN_BYTES as f64 / read, flop_per_second: flop / fma }
    }

    /// The time below which `bytes` cannot be read or `flop` not be computed.
    pub fn least_seconds(&self, bytes: f64, flop: f64) -> f64 {
        (bytes / self.read_bytes_per_second).max(flop / self.flop_per_second)
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (read, flop) = (self.read_bytes_per_second / 1e9, self.flop_per_second / 1e9);
        write!(f, "{}, {} threads: reads {read:.1} GB/s, multiplies {flop:.1} GFLOP/s", self.cpu, num_threads())
    }
}

fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(|| std::env::consts::ARCH.into(), |(_, name)| name.trim().into())
}

/// Many sums side by side, so that loads are what takes the time.
fn sum(memory: &[u64]) -> u64 {
    let mut sums = [0u64; 32];
    for numbers in memory.chunks_exact(32) {
        for (sum, number) in sums.iter_mut().zip(numbers) {
            *sum = sum.wrapping_add(*number);
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}

/// Independent chains of fused multiply-adds, enough to hide their latency.
const CHAINS: usize = 12;

#[cfg(target_arch = "x86_64")]
const LANES: usize = 8;
#[cfg(not(target_arch = "x86_64"))]
const LANES: usize = 4;

#[cfg(target_arch = "x86_64")]
fn multiply() -> f32 {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    fn chains() -> f32 {
        let (a, b) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(0.001)));
        let mut sums = [_mm256_set1_ps(1.0); CHAINS];
        for _ in 0..FMA_ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        let all = sums.into_iter().fold(_mm256_setzero_ps(), |all, sum| _mm256_add_ps(all, sum));
        _mm256_cvtss_f32(all)
    }
    assert!(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"), "this bench needs AVX2 and FMA");
    // SAFETY: both features were found just now.
    unsafe { chains() }
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply() -> f32 {
    let (a, b) = (black_box(0.999f32), black_box(0.001f32));
    let mut sums = [[1.0f32; LANES]; CHAINS];
    for _ in 0..FMA_ROUNDS {
        for sum in sums.iter_mut().flatten() {
            *sum = sum.mul_add(a, b);
        }
    }
    sums.iter().flatten().sum()
}
