//! Each op on a GPU: microseconds, bytes a second, and the share of the floor, at the shapes of served models.
//!
//! Run `cargo bench -p drafthorse-kernels --bench cuda`, or copy the binary to the machine with the GPU. Times are medians of graph
//! replays between events; weights and caches rotate through more memory than the L2 holds. Data are random. With `--deterministic` on a
//! device whose sums have one order.

#![allow(clippy::print_stdout, reason = "the table is what a bench is for")]

#[path = "cuda/mod.rs"]
mod cuda;

fn main() {
    if let Err(err) = cuda::run() {
        println!("{err}");
        std::process::exit(1);
    }
}
