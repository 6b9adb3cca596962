//! ModelStreamInfer: many requests on one stream, each answered as its tokens come, told apart by their ids.
//!
//! A request that fails is answered in band and the stream goes on, unless the call's metadata asks for the gRPC status. The last
//! response of each request, content or error, is marked final, and only that.

use std::sync::Arc;

use drafthorse_proto::inference::infer_parameter::ParameterChoice;
use drafthorse_proto::inference::{InferParameter, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse};
use futures::StreamExt;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinError, JoinSet};
use tonic::metadata::MetadataMap;
use tonic::{Code, Status, Streaming};

use super::infer::{Call, FINAL, bool_parameter};
use crate::app::App;
use crate::error::{Result, ServerError};

/// Request metadata: an error ends the stream with its gRPC status.
const GRPC_ERROR: &str = "triton_grpc_error";
/// Response parameter beside an error message: the name of its gRPC code.
const ERROR_CODE: &str = "error_code";

type Responses = mpsc::Sender<Result<ModelStreamInferResponse, Status>>;

pub fn ends_on_error(metadata: &MetadataMap) -> bool {
    metadata
        .get(GRPC_ERROR)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.eq_ignore_ascii_case("true"))
}

/// Answers all requests of a stream; returns when the last is answered or the client is gone.
pub async fn answer(
    app: Arc<App>,
    mut requests: Streaming<ModelInferRequest>,
    ends_on_error: bool,
    responses: Responses,
) {
    // Dropped with whatever still runs when the stream ends early, which cancels it.
    let mut running: JoinSet<Result<(), Status>> = JoinSet::new();
    let mut last_turn: Option<oneshot::Receiver<()>> = None;
    let mut exiting = false;
    loop {
        tokio::select! {
            () = responses.closed() => return,
            () = app.exiting().cancelled() => {
                exiting = true;
                break;
            }
            Some(ended) = running.join_next() => {
                if let Some(status) = failure(ended) {
                    let _ = responses.send(Err(status)).await;
                    return;
                }
            }
            request = requests.message() => match request {
                Ok(Some(request)) => {
                    let (done, next_turn) = oneshot::channel();
                    let turn = Turn { before: last_turn.replace(next_turn), _done: done };
                    running.spawn(answer_one(app.clone(), request, turn, ends_on_error, responses.clone()));
                }
                Ok(None) => break,
                Err(status) => {
                    let _ = responses.send(Err(status)).await;
                    return;
                }
            }
        }
    }
    loop {
        let ended = tokio::select! {
            () = responses.closed() => return,
            ended = running.join_next() => ended,
        };
        let Some(ended) = ended else { break };
        if let Some(status) = failure(ended) {
            let _ = responses.send(Err(status)).await;
            return;
        }
    }
    if exiting {
        // A client that has more to ask must go elsewhere.
        let _ = responses.send(Err(ServerError::Exiting.into())).await;
    }
}

/// The place of a request among those of its stream, for models whose responses keep the order of the requests.
struct Turn {
    before: Option<oneshot::Receiver<()>>,
    /// Dropped when this request has been answered.
    _done: oneshot::Sender<()>,
}

impl Turn {
    async fn wait(&mut self) {
        if let Some(before) = self.before.take() {
            // Either way the one before has ended.
            let _ = before.await;
        }
    }
}

fn failure(ended: Result<Result<(), Status>, JoinError>) -> Option<Status> {
    match ended {
        Ok(Ok(())) => None,
        Ok(Err(status)) => Some(status),
        Err(panic) => Some(ServerError::internal(panic).into()),
    }
}

async fn answer_one(
    app: Arc<App>,
    request: ModelInferRequest,
    mut turn: Turn,
    ends_on_error: bool,
    responses: Responses,
) -> Result<(), Status> {
    let failed_response = ModelInferResponse {
        model_name: request.model_name.clone(),
        model_version: request.model_version.clone(),
        id: request.id.clone(),
        ..ModelInferResponse::default()
    };
    let Err(error) = Box::pin(try_answer(&app, request, &mut turn, &responses)).await else { return Ok(()) };
    let status = Status::from(error);
    if ends_on_error {
        return Err(status);
    }
    let model = app.repository.model(&failed_response.model_name, &failed_response.model_version);
    if model.is_ok_and(|model| !model.decoupled()) {
        turn.wait().await;
    }
    let _ = responses.send(Ok(error_response(failed_response, &status))).await;
    Ok(())
}

async fn try_answer(app: &App, request: ModelInferRequest, turn: &mut Turn, responses: &Responses) -> Result<()> {
    let _admission = app.admit()?;
    let mut call = Call::read(app, request)?;
    if !call.stream {
        let response = call.whole().await;
        if !call.model.decoupled() {
            turn.wait().await;
        }
        send(responses, response?, true).await;
        return Ok(());
    }
    let mut choices = call.model.served.generate_choices(call.request).await?;
    let prompt_tokens = choices.prompt_tokens();
    while let Some(item) = choices.next().await {
        let (index, chunk) = item?;
        let response = call.answer.chunk(index, chunk, prompt_tokens);
        if !send(responses, response, call.answer.is_over()).await {
            return Ok(());
        }
    }
    Ok(())
}

/// False if the client is gone.
async fn send(responses: &Responses, mut response: ModelInferResponse, is_final: bool) -> bool {
    response.parameters.insert(FINAL.into(), bool_parameter(is_final));
    let message = ModelStreamInferResponse { error_message: String::new(), infer_response: Some(response) };
    responses.send(Ok(message)).await.is_ok()
}

fn error_response(mut response: ModelInferResponse, status: &Status) -> ModelStreamInferResponse {
    let code = InferParameter { parameter_choice: Some(ParameterChoice::StringParam(code_name(status.code()).into())) };
    response.parameters.insert(FINAL.into(), bool_parameter(true));
    response.parameters.insert(ERROR_CODE.into(), code);
    ModelStreamInferResponse { error_message: status.message().into(), infer_response: Some(response) }
}

/// A code's name as gRPC's documents write it, for those that this server answers with.
fn code_name(code: Code) -> &'static str {
    match code {
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::NotFound => "NOT_FOUND",
        Code::Unavailable => "UNAVAILABLE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Cancelled => "CANCELLED",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        _ => "INTERNAL",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_in_band_is_final_and_names_its_code() {
        let response = ModelInferResponse { id: "bad".into(), ..ModelInferResponse::default() };
        let status = Status::from(ServerError::UnknownModel { name: "x".into() });
        let message = error_response(response, &status);
        assert_eq!(message.error_message, "request for unknown model: 'x' is not found");
        let response = message.infer_response.unwrap();
        assert_eq!((response.id.as_str(), response.parameters[FINAL].clone()), ("bad", bool_parameter(true)));
        let code = ParameterChoice::StringParam("NOT_FOUND".into());
        assert_eq!(response.parameters[ERROR_CODE].parameter_choice, Some(code));
    }

    #[test]
    fn the_status_is_asked_for_by_metadata() {
        let with = |value: &'static str| {
            let mut metadata = MetadataMap::new();
            metadata.insert(GRPC_ERROR, value.parse().unwrap());
            ends_on_error(&metadata)
        };
        assert!(with("true") && with("True") && !with("false") && !ends_on_error(&MetadataMap::new()));
    }
}
