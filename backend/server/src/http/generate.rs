//! Triton's generate routes: flat JSON in, flat JSON or a stream of events out.
//!
//! Keys that name a tensor become tensors. Everything else, on top or in `parameters`, is a sampling parameter, so that both
//! vLLM's form and TensorRT-LLM's flat `max_tokens` work.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use bytes::Bytes;
use drafthorse_proto::inference::{DataType, ModelInferRequest};
use futures::{Stream, StreamExt};
use serde_json::{Map, Value, json};

use super::body::Body;
use super::error::KserveError;
use super::json::{read_request, response_flat};
use super::kserve::Named;
use super::sse;
use crate::app::{Admission, App};
use crate::error::{Result, ServerError};
use crate::generate::{Choices, Chunk};
use crate::params::{Given, object};
use crate::repository::dialect::{INPUTS, SAMPLING_PARAMETERS, STREAM, wire_name};
use crate::service::infer::{Answer, Call};

/// Request parameters that are no sampling parameters.
const REQUEST_PARAMETERS: [&str; 6] =
    ["priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "triton_enable_empty_final_response"];

pub(super) fn routes() -> Router<Arc<App>> {
    let router = Router::new();
    ["/v2/models/{model}", "/v2/models/{model}/versions/{version}"].into_iter().fold(router, |router, model| {
        router
            .route(&format!("{model}/generate"), post(generate))
            .route(&format!("{model}/generate_stream"), post(generate_stream))
    })
}

async fn generate(State(app): State<Arc<App>>, Path(named): Path<Named>, body: Body) -> Result<Response, KserveError> {
    let mut flat = Flat::read(body.object()?)?;
    // One response is all there can be: a stream is gathered. The prompt is left out only where that is asked for.
    if flat.tensors.get(STREAM) == Some(&Value::Bool(true)) {
        flat.tensors.insert(STREAM.into(), false.into());
    }
    let _admission = app.admit()?;
    let mut call = Call::read(&app, flat.request(&app, named)?)?;
    let response = Box::pin(call.whole()).await?;
    Ok(Json(with_warnings(response_flat(response), &call.request.params.warnings)).into_response())
}

async fn generate_stream(State(app): State<Arc<App>>, Path(named): Path<Named>, body: Body) -> Response {
    match Box::pin(start_stream(&app, named, body)).await {
        Ok(events) => sse::response(StatusCode::OK, events),
        Err(error) => {
            let event = sse::event(&json!({"error": error.to_string()}));
            sse::response(error.http_status(), futures::stream::iter([event]))
        }
    }
}

/// The events of a stream that has had its first chunk: until then an error is the response's status.
async fn start_stream(app: &App, named: Named, body: Body) -> Result<impl Stream<Item = Bytes> + Send + 'static> {
    let mut flat = Flat::read(body.object()?)?;
    flat.tensors.entry(STREAM).or_insert(true.into());
    let admission = app.admit()?;
    let mut call = Call::read(app, flat.request(app, named)?)?;
    if !call.stream {
        let response = call.whole().await?;
        let event = with_warnings(response_flat(response), &call.request.params.warnings);
        return Ok(futures::stream::iter([sse::event(&event)]).left_stream());
    }
    let mut choices = call.model.served.generate_choices(call.request).await?;
    let Some(first) = choices.next().await else { return Err(ServerError::internal("the answer has no end")) };
    let stream = Events { choices, answer: call.answer, next: Some(first?), _admission: admission };
    Ok(futures::stream::unfold(Some(stream), Events::next).right_stream())
}

struct Events {
    choices: Choices,
    answer: Answer,
    next: Option<(usize, Chunk)>,
    _admission: Admission,
}

impl Events {
    async fn next(events: Option<Self>) -> Option<(Bytes, Option<Self>)> {
        let mut events = events?;
        let item = match events.next.take() {
            Some(first) => Ok(first),
            None => events.choices.next().await?,
        };
        match item {
            Ok((index, chunk)) => {
                let prompt_tokens = events.choices.prompt_tokens();
                let flat = response_flat(events.answer.chunk(index, chunk, prompt_tokens));
                let warnings = if events.answer.is_over() { events.choices.warnings() } else { &[] };
                Some((sse::event(&with_warnings(flat, warnings)), Some(events)))
            }
            Err(error) => Some((sse::event(&json!({"error": error.to_string()})), None)),
        }
    }
}

fn with_warnings(mut flat: Map<String, Value>, warnings: &[String]) -> Value {
    if !warnings.is_empty() {
        flat.insert("warnings".into(), json!(warnings));
    }
    Value::Object(flat)
}

/// A body of these routes, sorted.
struct Flat {
    id: Value,
    /// By the name of the tensor.
    tensors: Map<String, Value>,
    /// `priority` and the like.
    parameters: Map<String, Value>,
    sampling: Map<String, Value>,
}

impl Flat {
    fn read(mut body: Map<String, Value>) -> Result<Self> {
        let id = body.remove("id").unwrap_or_default();
        let nested = match body.remove("parameters") {
            None => Map::new(),
            Some(Value::Object(nested)) => nested,
            Some(_) => return Err(ServerError::bad_input("parameters", "must be an object")),
        };
        let mut flat = Flat { id, tensors: Map::new(), parameters: Map::new(), sampling: Map::new() };
        let on_top = Given { map: body, place: "the body" };
        for (key, value) in on_top.and(Given { map: nested, place: "its parameters" })? {
            let tensor = INPUTS.iter().find(|input| input.name == key);
            if let Some(tensor) = tensor {
                let value = match (tensor.data_type, value) {
                    // Load generators write flags as text.
                    (DataType::TypeBool, Value::String(text)) if text.eq_ignore_ascii_case("true") => true.into(),
                    (DataType::TypeBool, Value::String(text)) if text.eq_ignore_ascii_case("false") => false.into(),
                    (_, value) => value,
                };
                flat.tensors.insert(key, value);
                continue;
            }
            let into = if REQUEST_PARAMETERS.contains(&key.as_str()) || key.starts_with("triton_") {
                &mut flat.parameters
            } else {
                &mut flat.sampling
            };
            into.insert(key, value);
        }
        Ok(flat)
    }

    /// The request in the protocol's form.
    fn request(mut self, app: &App, named: Named) -> Result<ModelInferRequest> {
        let batched = app.repository.model(&named.model, &named.version)?.config.max_batch_size > 0;
        let given = match self.tensors.get(SAMPLING_PARAMETERS) {
            None | Some(Value::Null) => Some(Map::new()),
            // An object where JSON text is meant.
            Some(Value::Object(given)) => Some(given.clone()),
            Some(Value::String(json)) => Some(object(SAMPLING_PARAMETERS, json)?),
            // A list of one text, and what is no text at all.
            Some(_) => None,
        };
        let beside = Given { map: std::mem::take(&mut self.sampling), place: "the body" };
        match given {
            Some(map) => {
                let all = Given { map, place: SAMPLING_PARAMETERS }.and(beside)?;
                let json = (!all.is_empty()).then(|| Value::Object(all).to_string().into());
                self.tensors.insert(SAMPLING_PARAMETERS.into(), json.unwrap_or_default());
            }
            None if beside.map.is_empty() => {}
            None => {
                let reason = "must be an object, or a text that holds one, where parameters stand beside it";
                return Err(ServerError::bad_input(SAMPLING_PARAMETERS, reason));
            }
        }
        let inputs = INPUTS.iter().filter_map(|input| {
            let data = self.tensors.remove(input.name).filter(|data| !data.is_null())?;
            let len = data.as_array().map_or(1, Vec::len);
            let shape = if batched { json!([1, len]) } else { json!([len]) };
            Some(json!({"name": input.name, "datatype": wire_name(input.data_type), "shape": shape, "data": data}))
        });
        let mut body = Map::new();
        body.insert("inputs".into(), inputs.collect());
        body.insert("id".into(), self.id);
        body.insert("parameters".into(), Value::Object(self.parameters));
        Ok(read_request(named.model, named.version, body, Bytes::new())?.request)
    }
}
