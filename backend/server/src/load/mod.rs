//! A load generator: sends requests to a server at random moments, as many users would, and says how long they waited.
//!
//! The load is open: a request leaves at its moment whether or not others have ended, as long as [`Load::max_concurrency`] allows.
//! Moments are a Poisson process, lengths are drawn, and the same seed draws the same load again.

mod draw;
pub(crate) mod kserve;
mod openai;
mod plot;
mod report;
mod summary;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use draw::Dice;
pub use draw::Lengths;
pub use report::html;
pub use summary::{Percentiles, Summary};

/// What to send where.
#[derive(Clone, Debug)]
pub struct Load {
    pub target: Target,
    pub model: String,
    pub requests: u32,
    /// Requests a second; `None` sends all at once.
    pub rate: Option<f64>,
    pub max_concurrency: Option<u32>,
    /// Tokens of prompts, about: each word of a prompt is one token of most tokenizers.
    pub prompt_tokens: Lengths,
    /// Tokens of answers, exactly: no answer ends earlier where the server knows `ignore_eos`.
    pub output_tokens: Lengths,
    /// One more prompt of so many tokens, so long after the first request.
    pub long_prompt: Option<(u32, Duration)>,
    /// More sampling parameters of every request, or others than it has: `temperature`, `guided_regex`.
    pub parameters: Parameters,
    pub seed: u64,
}

/// By name.
pub type Parameters = serde_json::Map<String, serde_json::Value>;

/// Where requests go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// KServe v2 over gRPC with the tensors of Triton's vLLM backend, at `host:port`.
    Kserve(String),
    /// OpenAI's completions over HTTP, at `http://host:port/v1`.
    OpenAi(String),
}

impl Target {
    /// `grpc://HOST:PORT`, or the `http://HOST:PORT[/v1]` of an OpenAI API.
    ///
    /// # Errors
    /// For anything else, TLS among it.
    pub fn parse(url: &str) -> Result<Self, String> {
        let url = url.trim_end_matches('/');
        match url.split_once("://") {
            Some(("grpc", address)) if !address.is_empty() => Ok(Target::Kserve(address.to_owned())),
            Some(("http", address)) if address.contains('/') => Ok(Target::OpenAi(url.to_owned())),
            Some(("http", address)) if !address.is_empty() => Ok(Target::OpenAi(format!("{url}/v1"))),
            _ => Err(format!("{url:?} must be grpc://HOST:PORT or http://HOST:PORT/v1")),
        }
    }
}

/// One request as it is sent.
#[derive(Clone, Debug)]
struct Ask {
    model: String,
    prompt: String,
    output_tokens: u32,
    parameters: Arc<Parameters>,
}

/// What came of a request. Times count from the first request's.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// How long after its moment it left: not zero when the generator is the slow one, or the concurrency is used up.
    pub late: Duration,
    pub sent: Duration,
    /// When tokens came, and how many at once.
    pub chunks: Vec<(Duration, u32)>,
    pub ended: Duration,
    /// As the server counted them, if it did.
    pub prompt_tokens: Option<u32>,
    pub output_tokens: u32,
    pub is_long: bool,
    pub error: Option<String>,
}

/// Where the answer's parts go as they come.
struct Listener {
    started: Instant,
    outcome: Outcome,
}

impl Listener {
    fn tokens(&mut self, count: u32) {
        if count > 0 {
            self.outcome.chunks.push((self.started.elapsed(), count));
            self.outcome.output_tokens += count;
        }
    }
}

/// How many have ended, of how many.
pub type Progress<'a> = &'a dyn Fn(u64, u64);

/// Sends the load and waits for every answer.
///
/// # Errors
/// If the server cannot be reached at all. Failed requests are outcomes.
pub async fn run(load: &Load, progress: Progress<'_>) -> Result<Vec<Outcome>, String> {
    let client = Client::connect(&load.target).await?;
    let mut dice = Dice::new(load.seed);
    let parameters = Arc::new(load.parameters.clone());
    let mut asks = Vec::new();
    let mut at = Duration::ZERO;
    for _ in 0..load.requests {
        asks.push((at, false, dice.ask(load, &parameters)));
        at += load.rate.map_or(Duration::ZERO, |rate| dice.gap(rate));
    }
    if let Some((tokens, at)) = load.long_prompt {
        let (model, prompt) = (load.model.clone(), dice.prompt(tokens));
        asks.push((at, true, Ask { model, prompt, output_tokens: 1, parameters }));
        asks.sort_by_key(|(at, ..)| *at);
    }
    let total = asks.len() as u64;
    let permits = load.max_concurrency.map(|max| Arc::new(Semaphore::new(max as usize)));
    let (sender, mut ended) = mpsc::unbounded_channel();
    let mut running = JoinSet::new();
    let started = Instant::now();
    running.spawn(async move {
        let mut sent = JoinSet::new();
        for (at, is_long, ask) in asks {
            tokio::time::sleep_until((started + at).into()).await;
            let permit = match &permits {
                // The semaphore is never closed.
                Some(permits) => Arc::clone(permits).acquire_owned().await.ok(),
                None => None,
            };
            let (client, sender) = (client.clone(), sender.clone());
            sent.spawn(async move {
                let now = started.elapsed();
                let outcome = Outcome { late: now.saturating_sub(at), sent: now, is_long, ..Outcome::default() };
                let mut listener = Listener { started, outcome };
                let answered = client.send(&ask, &mut listener).await;
                listener.outcome.ended = started.elapsed();
                listener.outcome.error = answered.err();
                drop(permit);
                // The receiver outlives all of us.
                let _ = sender.send(listener.outcome);
            });
        }
        while sent.join_next().await.is_some() {}
    });
    let mut outcomes = Vec::new();
    while let Some(outcome) = ended.recv().await {
        outcomes.push(outcome);
        progress(outcomes.len() as u64, total);
    }
    Ok(outcomes)
}

#[derive(Clone)]
enum Client {
    Kserve(kserve::Client),
    OpenAi(Box<openai::Client>),
}

impl Client {
    async fn connect(target: &Target) -> Result<Self, String> {
        match target {
            Target::Kserve(address) => Ok(Client::Kserve(kserve::Client::connect(address).await?)),
            Target::OpenAi(url) => Ok(Client::OpenAi(Box::new(openai::Client::new(url)?))),
        }
    }

    async fn send(&self, ask: &Ask, listener: &mut Listener) -> Result<(), String> {
        match self {
            Client::Kserve(client) => client.send(ask, listener).await,
            Client::OpenAi(client) => client.send(ask, listener).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_scheme_and_an_address() {
        let show = |url: &str| Target::parse(url).map_or_else(|why| why, |target| format!("{target:?}"));
        assert_eq!(show("grpc://localhost:8001"), r#"Kserve("localhost:8001")"#);
        assert_eq!(show("http://localhost:8000"), r#"OpenAi("http://localhost:8000/v1")"#);
        assert_eq!(show("http://localhost:8000/v1/"), r#"OpenAi("http://localhost:8000/v1")"#);
        assert_eq!(show("http://host/openai/v1"), r#"OpenAi("http://host/openai/v1")"#);
        assert_eq!(show("https://x"), r#""https://x" must be grpc://HOST:PORT or http://HOST:PORT/v1"#);
        assert_eq!(show("localhost:8001"), r#""localhost:8001" must be grpc://HOST:PORT or http://HOST:PORT/v1"#);
    }
}
