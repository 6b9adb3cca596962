//! Speed of the matmuls, one line a shape: the median and the least time, and, of the latter, what it moves and
//! computes and its share of what this machine can.
//!
//! `cargo bench -p drafthorse-kernels --bench ops -- [WORDS]` runs the lines that contain all words. Weights are random; a
//! line goes over as many copies of its weight as do not fit any cache, as the layers of a model would.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a bench prints, and may stop at an error")]

mod latents;
mod machine;
mod steps;

use std::time::{Duration, Instant};

use drafthorse_kernels::ops::matmul::{Offset, workspace_bytes};
use drafthorse_kernels::ops::matmul_bf16::{self, Bf16Weight};
use drafthorse_kernels::ops::matmul_int4::{self, Int4Weight};
use drafthorse_kernels::ops::matmul_int8::{self, Int8Weight};
use drafthorse_kernels::{DType, Device, Tensor, Workspace};
use half::{bf16, f16};
use machine::Machine;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Weights of a line together: four times a large L3 cache.
const ROTATED_BYTES: usize = 128 << 20;

/// SmolLM2-135M, `[out, in]`: the linears of a layer, of which there are 30, and the head.
const LAYER: [(&str, usize, usize); 4] =
    [("qkv", 960, 576), ("o", 576, 576), ("gate_up", 3072, 576), ("down", 576, 1536)];
const NUM_LAYERS: usize = 30;
const HEAD: (&str, usize, usize) = ("head", 49152, 576);

const FORMATS: [Format; 6] = [
    Format::Bf16,
    Format::Int8 { group: None },
    Format::Int8 { group: Some(32) },
    Format::Int4 { group: 32, offset: Offset::Min },
    Format::Int4 { group: 64, offset: Offset::Symmetric },
    Format::Int4 { group: 128, offset: Offset::ZeroPoint },
];

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let machine = Machine::measure();
    println!("{machine}");
    println!(
        "{:26} {:30} {:>10} {:>10} {:>8} {:>8} {:>9}",
        "op", "shape", "us", "least us", "GB/s", "GFLOP/s", "roofline"
    );
    let wanted = |line: &str| words.iter().all(|word| line.contains(word.as_str()));
    for format in FORMATS {
        for (name, out, inputs) in LAYER.into_iter().chain([HEAD]) {
            for num_rows in [1, 2, 4, 8, 16, 64, 512] {
                let shape = format!("{name} m={num_rows} n={out} k={inputs}");
                if wanted(&format!("{} {shape}", format.name())) && (name != "head" || num_rows <= 8) {
                    let copies = ROTATED_BYTES.div_ceil(format.random(1, inputs).size_bytes() * out).clamp(1, 256);
                    let weights: Vec<Weight> = (0..copies).map(|_| format.random(out, inputs)).collect();
                    let calls: Vec<Call<'_>> = weights.iter().map(|w| Call::new(w, num_rows)).collect();
                    report(&machine, &format.name(), &shape, &calls, false);
                }
            }
        }
        for num_rows in [1, 8, 512] {
            let shape = format!("model m={num_rows}");
            if wanted(&format!("{} {shape}", format.name())) {
                let layers = std::iter::repeat_n(LAYER, NUM_LAYERS).flatten();
                let weights: Vec<Weight> = layers.map(|(_, out, inputs)| format.random(out, inputs)).collect();
                let head = format.random(HEAD.1, HEAD.2);
                // A prompt wants the logits of its last token alone.
                let head_rows = if num_rows > 8 { 1 } else { num_rows };
                let linears = weights.iter().map(|w| Call::new(w, num_rows));
                let calls: Vec<Call<'_>> = linears.chain([Call::new(&head, head_rows)]).collect();
                report(&machine, &format.name(), &shape, &calls, true);
            }
        }
    }
    steps::lines(&machine, &wanted);
    latents::lines(&machine, &wanted);
}

/// Times `calls`, each on its own or all in a row, and prints the line.
fn report(machine: &Machine, op: &str, shape: &str, calls: &[Call<'_>], as_one: bool) {
    let mut calls: Vec<Prepared<'_>> = calls.iter().map(Call::prepare).collect();
    let flop: f64 = calls.iter().map(|call| call.flop).sum();
    let bytes: f64 = calls.iter().map(|call| call.bytes).sum();
    let start = Instant::now();
    let mut rounds = Vec::new();
    let mut times = Vec::new();
    while start.elapsed() < Duration::from_millis(1500) || rounds.len() < 4 {
        let round = Instant::now();
        for call in &mut calls {
            let start = Instant::now();
            call.run();
            times.push(start.elapsed());
        }
        rounds.push(round.elapsed());
    }
    // The first round brings in pages.
    let (times, per) = if as_one { (&mut rounds[1..], 1.0) } else { (&mut times[calls.len()..], calls.len() as f64) };
    times.sort_unstable();
    let (median, least) = (times[times.len() / 2].as_secs_f64(), times[0].as_secs_f64());
    let (flop, bytes) = (flop / per, bytes / per);
    let share = machine.least_seconds(bytes, flop) / least * 100.0;
    let (us, least_us, gb, gflop) = (median * 1e6, least * 1e6, bytes / least / 1e9, flop / least / 1e9);
    println!("{op:26} {shape:30} {us:10.1} {least_us:10.1} {gb:8.1} {gflop:8.1} {share:8.0}%");
}

/// A kind of weight.
#[derive(Clone, Copy)]
enum Format {
    Bf16,
    Int8 { group: Option<usize> },
    Int4 { group: usize, offset: Offset },
}

enum Weight {
    Bf16(Bf16Weight),
    Int8(Int8Weight),
    Int4(Int4Weight),
}

impl Format {
    fn name(self) -> String {
        match self {
            Format::Bf16 => "matmul_bf16".into(),
            Format::Int8 { group: None } => "matmul_int8 row".into(),
            Format::Int8 { group: Some(group) } => format!("matmul_int8 g{group}"),
            Format::Int4 { group, offset } => format!("matmul_int4 g{group} {offset:?}").to_lowercase(),
        }
    }

    /// A random weight.
    fn random(self, out: usize, inputs: usize) -> Weight {
        let mut rng = StdRng::seed_from_u64(1);
        let mut numbers = |len: usize, scale: f32| -> Vec<f32> {
            (0..len).map(|_| f16::from_f32(rng.random_range(-scale..scale)).to_f32()).collect()
        };
        match self {
            Format::Bf16 => {
                let mut weight = Bf16Weight::new(&Device::Cpu, out, inputs).unwrap();
                let row: Vec<bf16> = numbers(inputs, 0.05).into_iter().map(bf16::from_f32).collect();
                (0..out).for_each(|i| weight.write_rows(i, &row).unwrap());
                Weight::Bf16(weight)
            }
            Format::Int8 { group } => {
                let mut weight = Int8Weight::new(&Device::Cpu, out, inputs, group).unwrap();
                let row: Vec<i8> = numbers(inputs, 127.0).into_iter().map(|q| q as i8).collect();
                let scales = numbers(inputs / group.unwrap_or(inputs), 1e-3);
                (0..out).for_each(|i| weight.write_rows(i, &row, &scales).unwrap());
                Weight::Int8(weight)
            }
            Format::Int4 { group, offset } => {
                let inputs_padded = inputs.next_multiple_of(group);
                let mut weight = Int4Weight::new(&Device::Cpu, out, inputs_padded, Some(group), offset).unwrap();
                let row: Vec<u8> = numbers(inputs_padded, 8.0).into_iter().map(|q| (q + 8.0) as u8).collect();
                let scales = numbers(inputs_padded / group, 1e-2);
                let offsets = if offset == Offset::Symmetric { Vec::new() } else { scales.clone() };
                (0..out).for_each(|i| weight.write_rows(i, &row, &scales, &offsets).unwrap());
                Weight::Int4(weight)
            }
        }
    }
}

impl Weight {
    fn size_bytes(&self) -> usize {
        match self {
            Weight::Bf16(weight) => weight.size_bytes(),
            Weight::Int8(weight) => weight.size_bytes(),
            Weight::Int4(weight) => weight.size_bytes(),
        }
    }

    fn dims(&self) -> [usize; 2] {
        match self {
            Weight::Bf16(weight) => weight.dims(),
            Weight::Int8(weight) => weight.dims(),
            Weight::Int4(weight) => weight.dims(),
        }
    }

    fn matmul(&self, x: &Tensor, y: &mut Tensor, workspace: &Workspace) {
        match self {
            Weight::Bf16(weight) => matmul_bf16::matmul(x, weight, y, workspace).unwrap(),
            Weight::Int8(weight) => matmul_int8::matmul(x, weight, y, workspace).unwrap(),
            Weight::Int4(weight) => matmul_int4::matmul(x, weight, y, workspace).unwrap(),
        }
    }
}

struct Call<'a> {
    weight: &'a Weight,
    num_rows: usize,
}

/// A call with its tensors.
struct Prepared<'a> {
    weight: &'a Weight,
    x: Tensor,
    y: Tensor,
    workspace: Workspace,
    bytes: f64,
    flop: f64,
}

impl<'a> Call<'a> {
    fn new(weight: &'a Weight, num_rows: usize) -> Self {
        Call { weight, num_rows }
    }

    fn prepare(&self) -> Prepared<'a> {
        let ([out, inputs], num_rows) = (self.weight.dims(), self.num_rows);
        let mut rng = StdRng::seed_from_u64(2);
        let x: Vec<f32> = (0..num_rows * inputs).map(|_| rng.random_range(-1.0..1.0)).collect();
        Prepared {
            weight: self.weight,
            x: Tensor::from_slice(&Device::Cpu, "x", &x, [num_rows, inputs]).unwrap(),
            y: Tensor::zeros(&Device::Cpu, "y", [num_rows, out], DType::F32).unwrap(),
            workspace: Workspace::new(&Device::Cpu, workspace_bytes(num_rows, inputs)).unwrap(),
            bytes: (self.weight.size_bytes() + 4 * num_rows * (inputs + out)) as f64,
            flop: 2.0 * (num_rows * inputs * out) as f64,
        }
    }
}

impl Prepared<'_> {
    fn run(&mut self) {
        self.weight.matmul(&self.x, &mut self.y, &self.workspace);
    }
}
