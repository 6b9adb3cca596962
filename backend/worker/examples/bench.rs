//! The bench of a rank alone, for machines where the server's binary is too much to carry:
//! `bench DIR [cpu|cuda] [random] [eager] [deterministic] [context N] [batches N,N] [prefill N,N]`, JSON on standard output.

#![expect(clippy::print_stdout, reason = "this is its result")]

use drafthorse_worker::bench::{BenchConfig, run};
use drafthorse_worker::{ActivationDtype, DeviceKind, WorkerConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("the first argument is a checkpoint's folder")?;
    let worker = WorkerConfig { model_dir: dir.into(), dtype: ActivationDtype::Bfloat16, ..WorkerConfig::default() };
    let mut config = BenchConfig { worker, ..BenchConfig::default() };
    while let Some(arg) = args.next() {
        let mut numbers = || -> Result<Vec<u32>, Box<dyn std::error::Error>> {
            let list = args.next().ok_or("a list of numbers is missing")?;
            Ok(list.split(',').map(str::parse).collect::<Result<_, _>>()?)
        };
        match arg.as_str() {
            "cpu" => config.worker.device = DeviceKind::Cpu,
            "cuda" => {
                config.worker.device = DeviceKind::Cuda(0);
                config.worker.memory_fraction = 0.9;
                config.worker.block_size = 64;
                config.worker.max_num_batched_tokens = 8192;
            }
            "random" => config.worker.random_weights = true,
            "eager" => config.worker.eager = true,
            "deterministic" => config.worker.deterministic = true,
            "context" => config.decode_context = numbers()?[0],
            "batches" => config.decode_batches = numbers()?,
            "prefill" => config.prefill_tokens = numbers()?,
            other => return Err(format!("{other} is no argument").into()),
        }
    }
    println!("{}", serde_json::to_string_pretty(&run(&config, &|_| {})?)?);
    Ok(())
}
