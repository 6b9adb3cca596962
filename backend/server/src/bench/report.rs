//! What a bench prints.

use std::fmt;

use serde::Serialize;

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `engine` or `grpc`.
    pub client: &'static str,
    /// From the start of the server in this process until the model took requests.
    pub ready_seconds: f64,
    pub weight_bytes: u64,
    /// Of them, what every decoding step must read.
    pub floor_bytes: u64,
    /// Bytes a second, as given or measured.
    pub bandwidth: Option<f64>,
    pub decode: Vec<Decode>,
    pub first_token: Vec<FirstToken>,
    pub throughput: Option<Throughput>,
    /// Memory of this process once the model was loaded.
    pub resident_bytes: Option<u64>,
}

/// `batch` requests that decode together.
#[derive(Clone, Debug, Serialize)]
pub struct Decode {
    pub batch: u32,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    pub tpot_ms: f64,
    /// Of all requests together.
    pub tokens_per_second: f64,
    /// Time that reading the weights takes at best, over the time per token.
    pub share_of_floor: Option<f64>,
    /// Of a decoding step on the device; the host gap is what the time per token has beside it.
    pub device_ms: Option<f64>,
    pub host_gap_us: Option<f64>,
    /// Until all of them had their first token, and were done.
    pub first_tokens_ms: f64,
}

/// One prompt alone.
#[derive(Clone, Debug, Serialize)]
pub struct FirstToken {
    pub tokens: u32,
    pub ms: f64,
    pub device_ms: Option<f64>,
}

/// Many requests at once, from the first one's start to the last one's end.
#[derive(Clone, Debug, Serialize)]
pub struct Throughput {
    pub requests: u32,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    pub seconds: f64,
    pub tokens_per_second: f64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        write!(
            f,
            "client {}, ready after {:.2} s, weights {:.2} GB",
            self.client,
            self.ready_seconds,
            gb(self.weight_bytes)
        )?;
        if let Some(bandwidth) = self.bandwidth {
            let floor = self.floor_bytes as f64 / bandwidth * 1e3;
            write!(f, ", floor {:.2} GB at {:.0} GB/s: {floor:.3} ms", gb(self.floor_bytes), bandwidth / 1e9)?;
        }
        if let Some(bytes) = self.resident_bytes {
            write!(f, ", resident {:.2} GB", gb(bytes))?;
        }
        writeln!(f, "\n")?;
        if !self.decode.is_empty() {
            let head = ["batch", "TPOT ms", "tokens/s", "of floor", "device ms", "host gap us", "first tokens ms"];
            writeln!(
                f,
                "{:>8} {:>10} {:>10} {:>9} {:>10} {:>12} {:>16}",
                head[0], head[1], head[2], head[3], head[4], head[5], head[6]
            )?;
        }
        let shown = |value: Option<f64>, digits: usize| value.map_or("-".into(), |value| format!("{value:.digits$}"));
        for line in &self.decode {
            writeln!(
                f,
                "{:>8} {:>10.3} {:>10.0} {:>9} {:>10} {:>12} {:>16.2}",
                line.batch,
                line.tpot_ms,
                line.tokens_per_second,
                shown(line.share_of_floor, 3),
                shown(line.device_ms, 3),
                shown(line.host_gap_us, 0),
                line.first_tokens_ms
            )?;
        }
        for line in &self.first_token {
            let (tokens, ms, device) = (line.tokens, line.ms, shown(line.device_ms, 2));
            writeln!(f, "first token of {tokens} tokens alone: {ms:.2} ms, device {device} ms")?;
        }
        if let Some(Throughput { requests, prompt_tokens, output_tokens, seconds, tokens_per_second }) = self.throughput
        {
            writeln!(
                f,
                "{requests} requests of {prompt_tokens} and {output_tokens} tokens: {seconds:.2} s, {tokens_per_second:.0} output tokens/s"
            )?;
        }
        Ok(())
    }
}
