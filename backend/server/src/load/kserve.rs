//! Requests over gRPC, with the tensors of Triton's vLLM backend.

use drafthorse_proto::GrpcInferenceServiceClient;
use drafthorse_proto::inference::model_infer_request::InferInputTensor;
use drafthorse_proto::inference::{InferTensorContents, ModelInferRequest, ModelInferResponse};
use serde_json::json;
use tonic::transport::{Channel, Endpoint};

use super::{Ask, Listener, Parameters};
use crate::repository::dialect::{EXCLUDE_INPUT, SAMPLING_PARAMETERS, STREAM, TEXT_INPUT};

/// Inputs that ask for counts.
const COUNTS: [&str; 2] = ["return_num_input_tokens", "return_num_output_tokens"];

#[derive(Clone)]
pub(super) struct Client {
    service: GrpcInferenceServiceClient<Channel>,
}

impl Client {
    pub(super) async fn connect(address: &str) -> Result<Self, String> {
        let endpoint =
            Endpoint::from_shared(format!("http://{address}")).map_err(|error| format!("{address}: {error}"))?;
        let channel = endpoint.tcp_nodelay(true).connect().await;
        let channel = channel.map_err(|error| {
            let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            format!("cannot connect to {address}: {why}")
        })?;
        Ok(Client { service: GrpcInferenceServiceClient::new(channel) })
    }

    /// One request on a stream of its own.
    pub(super) async fn send(&self, ask: &Ask, listener: &mut Listener) -> Result<(), String> {
        let mut service = self.service.clone();
        let request = request(&ask.model, ask.prompt.clone(), ask.output_tokens, &COUNTS, &ask.parameters);
        let answers = service.model_stream_infer(tokio_stream::iter([request])).await;
        let mut answers = answers.map_err(|status| status.to_string())?.into_inner();
        while let Some(answer) = answers.message().await.map_err(|status| status.to_string())? {
            if !answer.error_message.is_empty() {
                return Err(answer.error_message);
            }
            let Some(response) = answer.infer_response else { continue };
            // A server that does not count sends a token at a time.
            let has_text = response.outputs.iter().any(|output| output.name == "text_output");
            listener.tokens(number(&response, "num_output_tokens").unwrap_or(has_text.into()));
            let prompt_tokens = number(&response, "num_input_tokens");
            listener.outcome.prompt_tokens = prompt_tokens.or(listener.outcome.prompt_tokens);
        }
        Ok(())
    }
}

/// A streamed request for `output_tokens` greedy tokens, without the prompt in them; `flags` are inputs that are true, `parameters`
/// change how it is sampled.
pub(crate) fn request(
    model: &str,
    prompt: String,
    output_tokens: u32,
    flags: &[&str],
    parameters: &Parameters,
) -> ModelInferRequest {
    let tensor = |name: &str, datatype: &str, contents| InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: vec![1],
        contents: Some(contents),
        ..InferInputTensor::default()
    };
    let text = |name: &str, value: String| {
        let contents = InferTensorContents { bytes_contents: vec![value.into()], ..InferTensorContents::default() };
        tensor(name, "BYTES", contents)
    };
    let yes = |name: &str| {
        tensor(name, "BOOL", InferTensorContents { bool_contents: vec![true], ..InferTensorContents::default() })
    };
    let mut all = json!({"temperature": 0, "max_tokens": output_tokens, "ignore_eos": true});
    for (name, value) in parameters {
        all[name] = value.clone();
    }
    let mut inputs = vec![text(TEXT_INPUT, prompt), text(SAMPLING_PARAMETERS, all.to_string())];
    inputs.extend([STREAM, EXCLUDE_INPUT].iter().chain(flags).map(|name| yes(name)));
    ModelInferRequest { model_name: model.into(), inputs, ..ModelInferRequest::default() }
}

/// The first element of an output of whole numbers.
fn number(response: &ModelInferResponse, name: &str) -> Option<u32> {
    let at = response.outputs.iter().position(|output| output.name == name)?;
    let contents = response.outputs[at].contents.as_ref();
    let typed = contents.and_then(|contents| contents.uint_contents.first().copied());
    typed.or_else(|| Some(u32::from_le_bytes(response.raw_output_contents.get(at)?.get(..4)?.try_into().ok()?)))
}
