//! Who asks: the engine's own handle, or gRPC streams.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drafthorse_control::{SamplingParams, TokenId};
use drafthorse_engine::{Event, Request, RequestId, Stats};
use drafthorse_proto::GrpcInferenceServiceClient;
use drafthorse_proto::inference::ModelInferRequest;
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint};

use crate::load::{Parameters, kserve};
use crate::repository::Model;

/// Streams that share a connection.
const STREAMS_A_CONNECTION: usize = 64;

/// Who asks.
pub(super) struct Client {
    model: Arc<Model>,
    /// Where gRPC listens; `None` for the engine.
    grpc: Option<Endpoint>,
    last_id: u64,
}

/// What one run took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    /// From before the first request to after the last answer.
    pub wall: Duration,
    /// Until the last of the first tokens.
    pub first: Duration,
    /// Output tokens of all requests.
    pub tokens: usize,
    /// Steps of the engine, and what the device was busy with them.
    pub steps: u64,
    pub device: Duration,
}

impl Client {
    pub(super) fn engine(model: &Arc<Model>) -> Self {
        // Ids above those that the server counts up from 1.
        Client { model: model.clone(), grpc: None, last_id: 1 << 32 }
    }

    pub(super) async fn grpc(address: SocketAddr, model: &Arc<Model>) -> Result<Self, String> {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| error.to_string())?;
        let endpoint = endpoint.tcp_nodelay(true);
        endpoint.connect().await.map_err(|error| format!("cannot connect to {address}: {error}"))?;
        Ok(Client { grpc: Some(endpoint), ..Client::engine(model) })
    }

    pub(super) fn vocab_size(&self) -> u32 {
        self.model.served.engine().limits().vocab_size
    }

    /// Sends a request for each prompt, all at once, and waits for `output` tokens of each.
    pub(super) async fn run(&mut self, prompts: Vec<Vec<TokenId>>, output: u32) -> Result<Times, String> {
        let before = self.model.served.engine().stats();
        let mut times = match self.grpc.clone() {
            None => self.run_by_engine(prompts, output).await?,
            Some(endpoint) => self.run_by_grpc(&endpoint, prompts, output).await?,
        };
        let Stats { steps, device_time, .. } = self.model.served.engine().stats();
        times.steps = steps - before.steps;
        times.device = device_time - before.device_time;
        Ok(times)
    }

    async fn run_by_engine(&mut self, prompts: Vec<Vec<TokenId>>, output: u32) -> Result<Times, String> {
        let sampling = SamplingParams { max_tokens: output, ..SamplingParams::default() };
        let engine = self.model.served.engine();
        let (sender, mut told) = mpsc::unbounded_channel();
        let num_requests = prompts.len();
        let started = Instant::now();
        for prompt in prompts {
            self.last_id += 1;
            let sender = sender.clone();
            let mut has_begun = false;
            let sink = Box::new(move |event: Event| match event {
                Event::Tokens(_) if has_begun => true,
                Event::Tokens(_) => {
                    has_begun = true;
                    sender.send(Ok((Instant::now(), None))).is_ok()
                }
                Event::Finished(finished) => {
                    sender.send(Ok((Instant::now(), Some(finished.usage.output_tokens)))).is_ok()
                }
                Event::Failed(error) => sender.send(Err(error.to_string())).is_ok(),
            });
            let request = Request::new(RequestId(self.last_id), prompt, sampling.clone(), sink);
            engine.submit(request).map_err(|error| error.to_string())?;
        }
        let (mut times, mut ended) = (Times::default(), 0);
        while ended < num_requests {
            let (at, tokens) = told.recv().await.ok_or("the engine has stopped")??;
            match tokens {
                None => times.first = times.first.max(at - started),
                Some(tokens) => {
                    ended += 1;
                    times.tokens += tokens as usize;
                    times.wall = times.wall.max(at - started);
                }
            }
        }
        Ok(times)
    }

    async fn run_by_grpc(&self, endpoint: &Endpoint, prompts: Vec<Vec<TokenId>>, output: u32) -> Result<Times, String> {
        let mut connections = Vec::new();
        for _ in 0..prompts.len().div_ceil(STREAMS_A_CONNECTION) {
            let channel = endpoint.connect().await.map_err(|error| error.to_string())?;
            connections.push(GrpcInferenceServiceClient::new(channel));
        }
        let name = self.model.name();
        let requests: Vec<_> = {
            let text = |prompt| self.model.served.tokenizer().decode(prompt, false);
            prompts.iter().map(|prompt| kserve::request(name, text(prompt), output, &[], &Parameters::new())).collect()
        };
        let mut running = tokio::task::JoinSet::new();
        let started = Instant::now();
        for (i, request) in requests.into_iter().enumerate() {
            running.spawn(stream(connections[i / STREAMS_A_CONNECTION].clone(), request, started));
        }
        let mut times = Times::default();
        while let Some(ended) = running.join_next().await {
            let one = ended.map_err(|error| error.to_string())??;
            times.first = times.first.max(one.first);
            times.wall = times.wall.max(one.wall);
        }
        times.tokens = prompts.len() * output as usize;
        Ok(times)
    }
}

/// One request on a stream of its own, to its end.
async fn stream(
    mut client: GrpcInferenceServiceClient<Channel>,
    request: ModelInferRequest,
    started: Instant,
) -> Result<Times, String> {
    let responses = client.model_stream_infer(tokio_stream::iter([request])).await;
    let mut responses = responses.map_err(|status| status.to_string())?.into_inner();
    let mut times = Times::default();
    while let Some(response) = responses.message().await.map_err(|status| status.to_string())? {
        if !response.error_message.is_empty() {
            return Err(response.error_message);
        }
        times.wall = started.elapsed();
        if times.first.is_zero() {
            times.first = times.wall;
        }
    }
    Ok(times)
}
