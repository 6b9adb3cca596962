//! Requests to the router, answered by a scripted model.

mod refusals;

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use futures::StreamExt;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::router;
use crate::app::App;
use crate::config::ServerConfig;
use crate::generate::{ServedModel, scripted};
use crate::metrics::Failure;
use crate::repository::Repository;

struct Door {
    app: Arc<App>,
}

struct Reply {
    status: u16,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Door {
    /// A server whose one model, `llm`, answers with `text`.
    fn to(text: &str) -> Self {
        Door::at_once(text, 1)
    }

    /// As [`to`](Self::to), so many tokens a step, all but one of them drafts.
    fn at_once(text: &str, tokens_per_step: usize) -> Self {
        Door::of(scripted::model(text, tokens_per_step))
    }

    fn of(model: Arc<ServedModel>) -> Self {
        let flags = ["--model-repository=none", "--http-max-input-size=100000"];
        let config = Arc::new(ServerConfig::parse(flags).unwrap());
        let repository = Repository::serving_only(config.clone(), model);
        Door { app: Arc::new(App::new(config, repository)) }
    }

    async fn send(&self, request: Request<Body>) -> Reply {
        let response = router(&self.app).oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = to_bytes(body, usize::MAX).await.unwrap().to_vec();
        Reply { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    async fn get(&self, path: &str) -> Reply {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    async fn post(&self, path: &str, body: impl ToString) -> Reply {
        self.send(Request::post(path).body(Body::from(body.to_string())).unwrap()).await
    }

    /// `status error` of a request that is refused.
    async fn refused(&self, path: &str, body: impl ToString) -> String {
        let reply = self.post(path, body).await;
        let json = reply.json();
        let error = &json["error"];
        format!("{} {}", reply.status, error["message"].as_str().or(error.as_str()).unwrap_or("no error"))
    }
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{}", self.text()))
    }

    fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    /// The events of a stream, `[DONE]` as a string.
    fn events(&self) -> Vec<Value> {
        assert_eq!(self.headers["content-type"], "text/event-stream; charset=utf-8");
        let text = self.text();
        let events =
            text.strip_suffix("\n\n").unwrap().split("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
        events.map(|event| serde_json::from_str(event).unwrap_or_else(|_| Value::from(event))).collect()
    }
}

const CHAT: &str = "/v1/chat/completions";
const GENERATE: &str = "/v2/models/llm/generate";
const STREAM: &str = "/v2/models/llm/generate_stream";

#[tokio::test]
async fn probes_and_metadata() {
    let door = Door::to("x");
    for path in [
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/llm/ready",
        "/v2/models/llm/versions/1/ready",
        "/health",
        "/ping",
    ] {
        let reply = door.get(path).await;
        assert_eq!((reply.status, reply.body.len()), (200, 0), "{path}");
    }
    let unknown = door.get("/v2/models/no/ready").await;
    assert_eq!((unknown.status, unknown.json()), (400, json!({"error": "Model version not ready"})));
    assert_eq!(door.get("/v2").await.json()["name"], "drafthorse");
    assert_eq!(door.get("/v2/").await.status, 200);
    assert_eq!(door.get("/v2/models").await.json(), json!({"models": ["llm"]}));
    let metadata = door.get("/v2/models/llm").await.json();
    assert_eq!((&metadata["versions"], &metadata["inputs"][0]["name"]), (&json!(["1"]), &json!("text_input")));
    assert_eq!(metadata["inputs"][0]["datatype"], "BYTES");
    let config = door.get("/v2/models/llm/config").await.json();
    assert_eq!(config["model_transaction_policy"], json!({"decoupled": true}));
    assert_eq!(config["input"][0]["data_type"], "TYPE_STRING");
    let index = door.post("/v2/repository/index", "").await.json();
    assert_eq!(index, json!([{"name": "llm", "version": "1", "state": "READY", "reason": ""}]));
    let load = door.refused("/v2/repository/models/llm/load", "").await;
    assert_eq!(load, "503 explicit model load and unload need --model-control-mode=explicit");
    door.app.begin_exit();
    assert_eq!(door.get("/v2/health/live").await.status, 503);
    assert_eq!(door.get("/v2/health/ready").await.status, 400);
    assert_eq!(door.refused(GENERATE, json!({"text_input": "a"})).await, "503 the server is exiting");
}

#[tokio::test]
async fn what_is_not_there_is_said_as_the_routes_nearby_say_it() {
    let door = Door::to("x");
    let reply = door.get("/v3").await;
    assert_eq!((reply.status, reply.json()), (404, json!({"error": "no route GET /v3"})));
    let reply = door.get("/v1/nothing").await;
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (404, &json!("not_found_error")));
    let reply = door.get(GENERATE).await;
    assert_eq!(
        (reply.status, reply.json()),
        (405, json!({"error": "method GET is not allowed for /v2/models/llm/generate"}))
    );
    let unknown = "404 request for unknown model: 'no' is not found";
    assert_eq!(door.refused("/v2/models/no/generate", json!({"text_input": "a"})).await, unknown);
    assert_eq!(door.refused("/v2/models/no/infer", json!({"inputs": []})).await, unknown);
    assert_eq!(
        door.refused(CHAT, json!({"model": "no", "messages": [{"role": "user", "content": "x"}]})).await,
        unknown
    );
}

#[tokio::test]
async fn generate_answers_flat_json() {
    let door = Door::to("b\"🦀");
    let plain = door.post(GENERATE, json!({"text_input": "a", "id": "7"})).await;
    assert_eq!(plain.json(), json!({"id": "7", "model_name": "llm", "model_version": "1", "text_output": "ab\"🦀"}));
    let text = async |body: Value| door.post(GENERATE, body).await.json()["text_output"].clone();
    assert_eq!(
        text(json!({"text_input": "a", "parameters": {"max_tokens": "1"}, "exclude_input_in_output": true})).await,
        "b"
    );
    assert_eq!(
        text(json!({"text_input": "a", "max_tokens": 1, "bad_words": "", "exclude_input_in_output": "true"})).await,
        "b"
    );
    assert_eq!(text(json!({"text_input": ["a"], "sampling_parameters": "{\"stop\": [\"🦀\"]}"})).await, "ab\"");
    assert_eq!(
        text(json!({"text_input": "a", "stream": true})).await,
        "ab\"🦀",
        "gathered, with the prompt as any answer that is no stream"
    );
    let all =
        json!({"text_input": "a", "return_finish_reason": true, "return_num_output_tokens": true, "max_token": 3});
    let all = door.post("/v2/models/llm/versions/1/generate", all).await.json();
    assert_eq!((&all["finish_reason"], &all["num_output_tokens"]), (&json!("stop"), &json!(7)));
    assert_eq!(all["warnings"], json!(["max_token: no such parameter; did you mean max_tokens?"]));
    let drafts =
        door.post("/v2/models/llm/generate", json!({"text_input": "a", "return_acceptance": true})).await.json();
    assert_eq!((&drafts["acceptance_rate"], &drafts["total_draft_tokens"]), (&json!(0.0), &json!(0)), "none were made");
    assert_eq!((&drafts["total_accepted_draft_tokens"], &all["acceptance_rate"]), (&json!(0), &json!(null)));
}

#[tokio::test]
async fn a_request_may_have_fewer_drafts_or_none() {
    let door = Door::at_once("abcdefgh", 4);
    let generate = async |more: Value| {
        let mut body = json!({"text_input": "x", "return_acceptance": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = door.post(GENERATE, body).await.json();
        (answer["text_output"].clone(), answer["total_draft_tokens"].as_u64())
    };
    // Nine tokens with the end: one, and then as many at once as drafts are wanted, and one.
    assert_eq!(generate(json!({})).await, (json!("xabcdefgh"), Some(6)));
    assert_eq!(generate(json!({"speculate_max_draft_token_num": 1})).await, (json!("xabcdefgh"), Some(4)));
    for none in [json!({"speculate_max_draft_token_num": 0}), json!({"speculate_method": "none"})] {
        assert_eq!(generate(none).await, (json!("xabcdefgh"), Some(0)));
    }
    assert_eq!(
        door.refused(GENERATE, json!({"text_input": "x", "speculate_max_draft_token_num": 4})).await,
        "400 speculate_max_draft_token_num: must be at most 3, the model's own number, is 4"
    );

    let chat = async |more: Value| {
        let mut body = json!({"model": "llm", "messages": [{"role": "user", "content": "x"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = door.post(CHAT, body).await.json();
        (answer["choices"][0]["message"]["content"].clone(), answer["usage"]["completion_tokens_details"].clone())
    };
    let (text, details) = chat(json!({})).await;
    assert_eq!((&text, &details["accepted_prediction_tokens"]), (&json!("abcdefgh"), &json!(6)));
    assert_eq!(chat(json!({"speculate_method": "none"})).await, (text, Value::Null));
}

#[tokio::test]
async fn a_lossy_rule_has_no_log_probabilities_of_what_was_sampled() {
    let door = Door::of(Arc::new(scripted::made("ab", 2).with_verify_rule("paddle_top1")));
    let said = "needs log-probabilities of what was sampled: not with speculate_verify paddle_top1";
    let refused = async |body: Value| door.refused(GENERATE, body).await;
    assert_eq!(refused(json!({"text_input": "x", "logprobs": 1})).await, format!("400 logprobs: {said}"));
    assert_eq!(refused(json!({"text_input": "x", "best_of": 2})).await, format!("400 best_of: {said}"));
    assert_eq!(door.post(GENERATE, json!({"text_input": "x"})).await.json()["text_output"], "xab");
    assert_eq!(Door::to("ab").post(GENERATE, json!({"text_input": "x", "logprobs": 1})).await.status, 200);
}

#[tokio::test]
async fn generate_stream_is_events_without_done() {
    let door = Door::to("a🦀");
    let body = json!({"text_input": "hi", "return_num_output_tokens": true});
    let reply = door.post(STREAM, &body).await;
    assert_eq!(reply.status, 200);
    let events = reply.events();
    let texts: Vec<&str> = events.iter().map(|event| event["text_output"].as_str().unwrap()).collect();
    assert_eq!(texts, ["a", "🦀", ""]);
    let tokens: u64 = events.iter().map(|event| event["num_output_tokens"].as_u64().unwrap()).sum();
    assert_eq!(tokens, 6);
    let whole = door.post(STREAM, json!({"text_input": "hi", "stream": false})).await.events();
    assert_eq!(whole.len(), 1);
    assert_eq!(whole[0]["text_output"], "hia🦀");
    let reply = door.post(STREAM, "{\"text_input\": ").await;
    assert_eq!(reply.status, 400);
    assert_eq!(
        reply.events(),
        [json!({"error": "body is not valid JSON at line 1 column 15: EOF while parsing a value"})]
    );
    assert_eq!(door.post("/v2/models/no/generate_stream", body).await.status, 404);
}

#[tokio::test]
async fn what_is_wrong_with_a_request_is_named() {
    let door = Door::to("x");
    let refused = async |body: Value| door.refused(GENERATE, body).await;
    assert_eq!(
        refused(json!({"text_input": "a", "max_tokens": -1})).await,
        "400 max_tokens: must be at least 1, is -1"
    );
    assert_eq!(
        refused(json!({"text_input": "a", "temperature": "NaN"})).await,
        "400 temperature: must be 0 or more, is \"NaN\""
    );
    assert_eq!(refused(json!({"text_input": 5})).await, "400 input 'text_input': data must be strings");
    assert_eq!(
        refused(json!({"text_input": "a", "stream": 5})).await,
        "400 input 'stream': data must be true or false"
    );
    assert_eq!(refused(json!({"text_input": "a", "id": 5})).await, "400 id: must be a string");
    assert_eq!(refused(json!({"text_input": "a", "parameters": []})).await, "400 parameters: must be an object");
    assert_eq!(refused(json!([])).await, "400 body: must be a JSON object");
    let too_long = "400 prompt has 300 tokens, the model takes at most 256 with at least one for the answer";
    assert_eq!(refused(json!({"text_input": "a".repeat(300)})).await, too_long);
    assert_eq!(
        refused(json!({"text_input": "a".repeat(100_000)})).await,
        "413 the request is larger than 100000 bytes"
    );
    let not_utf8 =
        door.send(Request::post(GENERATE).body(Body::from(&b"{\"text_input\": \"\xff\"}"[..])).unwrap()).await;
    assert_eq!(not_utf8.status, 400);
    assert!(not_utf8.text().contains("body is not valid JSON at line 1 column 17"), "{}", not_utf8.text());
}

#[tokio::test]
async fn infer_takes_json_tensors_and_answers_in_json() {
    let door = Door::to("b");
    let infer = "/v2/models/llm/infer";
    let text = json!({"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [["a"]]});
    let reply = door.post(infer, json!({"id": "x", "inputs": [text], "parameters": {"max_tokens": 1}})).await;
    let output = json!({"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["ab"]});
    assert_eq!(reply.json(), json!({"model_name": "llm", "model_version": "1", "id": "x", "outputs": [output]}));
    let refused = async |input: Value| door.refused(infer, json!({"inputs": [input]})).await;
    let with = |key: &str, value: Value| {
        let mut input = text.clone();
        input[key] = value;
        input
    };
    assert_eq!(refused(with("data", json!([null]))).await, "400 input 'text_input': data must be strings");
    assert_eq!(refused(with("data", Value::Null)).await, "400 input 'text_input': data must be strings");
    assert_eq!(
        refused(with("shape", json!("1"))).await,
        "400 input 'text_input': shape must be a list of whole numbers"
    );
    assert_eq!(
        refused(with("datatype", json!("INT32"))).await,
        "400 input 'text_input': data-type is 'INT32', but model 'llm' expects 'BYTES'"
    );
    assert!(
        refused(with("name", json!("other"))).await.starts_with("400 input 'other': is unexpected for model 'llm'")
    );
    assert_eq!(door.refused(infer, json!({})).await, "400 inputs: is missing");
}

#[tokio::test]
async fn infer_takes_binary_tensors_behind_the_json() {
    let door = Door::to("b");
    let send = async |json: &Value, length: &str, behind: &[u8]| {
        let body = [json.to_string().as_bytes(), behind].concat();
        let length = if length.is_empty() { json.to_string().len().to_string() } else { length.into() };
        let request = Request::post("/v2/models/llm/infer").header("Inference-Header-Content-Length", length);
        door.send(request.body(Body::from(body)).unwrap()).await
    };
    let json = json!({
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}],
        "parameters": {"binary_data_output": true},
    });
    let reply = send(&json, "", b"\x01\0\0\0a").await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.headers["content-type"], "application/octet-stream");
    let length: usize = reply.headers["inference-header-content-length"].to_str().unwrap().parse().unwrap();
    let head: Value = serde_json::from_slice(&reply.body[..length]).unwrap();
    assert_eq!(head["outputs"][0]["parameters"], json!({"binary_data_size": 6}));
    assert_eq!(&reply.body[length..], b"\x02\0\0\0ab");
    let error = async |length: &str, behind: &[u8]| send(&json, length, behind).await.json()["error"].clone();
    assert_eq!(
        error("", b"\x01\0\0\0").await,
        "input 'text_input': unexpected size, expecting 1 additional bytes behind the JSON"
    );
    assert_eq!(error("", b"\x01\0\0\0ab").await, "body: unexpected additional input data: 1 bytes");
    assert_eq!(error("999", b"").await, "inference header size: should be in range (0, 142), got: 999");
}

#[tokio::test]
async fn chat_goes_through_the_template() {
    let door = Door::to("hello");
    let messages =
        json!([{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]);
    let chat = json!({"model": "llm", "messages": messages, "max_completion_tokens": 3, "user": "me", "n": 1});
    let reply = door.post("/openai/v1/chat/completions", &chat).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let answer = reply.json();
    assert_eq!(answer["object"], "chat.completion");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let message = json!({"role": "assistant", "content": "hel", "refusal": null});
    let choice =
        json!({"index": 0, "message": message, "logprobs": null, "finish_reason": "length", "stop_reason": null});
    assert_eq!(answer["choices"], json!([choice]));
    // <system>s<user>u
    assert_eq!(answer["usage"]["prompt_tokens"], 16);
    assert_eq!((&answer["usage"]["completion_tokens"], &answer["usage"]["total_tokens"]), (&json!(3), &json!(19)));
    assert_eq!(door.get("/v1/models").await.json()["data"][0]["id"], "llm");
    assert_eq!(door.get("/v1/models/llm").await.json()["max_model_len"], 256);
    assert_eq!(door.get("/v1/models/no").await.status, 404);
}

#[tokio::test]
async fn chat_streams_deltas_usage_and_done() {
    let door = Door::to("ab");
    let messages = json!([{"role": "user", "content": "u"}]);
    let chat = json!({"model": "llm", "messages": messages, "stream": true, "stream_options": {"include_usage": true}});
    let mut events = door.post(CHAT, &chat).await.events();
    assert_eq!(events.pop().unwrap(), "[DONE]");
    let usage = events.pop().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(3)));
    assert!(events.iter().all(|event| event["object"] == "chat.completion.chunk" && event["usage"].is_null()));
    let deltas: Vec<Value> = events.iter().map(|event| event["choices"][0]["delta"].clone()).collect();
    assert_eq!(
        deltas,
        [json!({"role": "assistant", "content": ""}), json!({"content": "a"}), json!({"content": "b"}), json!({})]
    );
    let reasons: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["finish_reason"]).collect();
    assert_eq!(reasons, [&Value::Null, &Value::Null, &Value::Null, &json!("stop")]);
}

#[tokio::test]
async fn several_choices_have_numbers_in_every_form() {
    let door = Door::to("ab");
    let messages = json!([{"role": "user", "content": "u"}]);
    let chat = json!({"model": "llm", "messages": messages, "n": 2, "stream": true, "stream_options": {"include_usage": true}});
    let mut events = door.post(CHAT, &chat).await.events();
    assert_eq!(events.pop().unwrap(), "[DONE]");
    let usage = events.pop().unwrap()["usage"].clone();
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(7), &json!(6)));
    for index in [0, 1] {
        let of_index = events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index);
        let text: String = of_index.filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(text, "ab");
    }

    let body = json!({"model": "llm", "prompt": ["x", "y"], "n": 2, "echo": true});
    let answer = door.post("/v1/completions", &body).await.json();
    let choices: Vec<(&Value, &Value)> =
        answer["choices"].as_array().unwrap().iter().map(|choice| (&choice["index"], &choice["text"])).collect();
    let want = [(0, "xab"), (1, "xab"), (2, "yab"), (3, "yab")].map(|(index, text)| (json!(index), json!(text)));
    assert_eq!(choices, want.iter().map(|(index, text)| (index, text)).collect::<Vec<_>>());
    assert_eq!((&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]), (&json!(2), &json!(12)));

    let reply = door.post(GENERATE, json!({"text_input": "a", "parameters": {"n": 3}})).await;
    assert_eq!(reply.json()["text_output"], json!(["aab", "aab", "aab"]));
    let best = door.post(GENERATE, json!({"text_input": "a", "parameters": {"best_of": 3}})).await;
    assert_eq!(best.json()["text_output"], "aab");
}

#[tokio::test]
async fn a_completion_may_begin_with_its_prompt_and_what_the_model_made_of_it() {
    let door = Door::to("ab");
    let body = json!({"model": "llm", "prompt": "xyz", "echo": true, "logprobs": 1, "max_tokens": 2, "n": 2});
    let answer = door.post("/v1/completions", &body).await.json();
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], "xyzab");
        let logprobs = &choice["logprobs"];
        assert_eq!(logprobs["tokens"], json!(["x", "y", "z", "a", "b"]));
        assert_eq!(logprobs["token_logprobs"], json!([null, -0.5, -0.5, -0.5, -0.5]));
        assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3, 4]));
        assert_eq!((&logprobs["top_logprobs"][0], &logprobs["top_logprobs"][2]["z"]), (&Value::Null, &json!(-0.5)));
    }
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = door.post("/v1/completions", &streamed).await.events();
    let tokens: Vec<&Value> = events
        .iter()
        .filter(|event| event["choices"][0]["index"] == 1)
        .flat_map(|event| event["choices"][0]["logprobs"]["tokens"].as_array().unwrap())
        .collect();
    assert_eq!(tokens, ["x", "y", "z", "a", "b"]);

    let mut alone = body.clone();
    alone["max_tokens"] = 0.into();
    let answer = door.post("/v1/completions", &alone).await.json();
    let choice = &answer["choices"][1];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("xyz"), &json!("length")));
    assert_eq!(choice["logprobs"]["tokens"], json!(["x", "y", "z"]));
    assert_eq!((&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]), (&json!(3), &json!(0)));
    alone["stream"] = true.into();
    let refused = door.refused("/v1/completions", alone.clone()).await;
    assert_eq!(refused, "400 stream: must be false where max_tokens is 0");
    (alone["stream"], alone["echo"]) = (false.into(), false.into());
    let refused = door.refused("/v1/completions", alone).await;
    assert_eq!(refused, "400 max_tokens: must be at least 1, is 0");

    let messages = json!([{"role": "user", "content": "u"}]);
    let chat = json!({"model": "llm", "messages": messages, "max_tokens": 1, "prompt_logprobs": 0});
    let told = door.post(CHAT, chat).await.json()["prompt_logprobs"].clone();
    assert_eq!((told.as_array().unwrap().len(), &told[0]), (7, &Value::Null));
    assert_eq!(told[6], json!({"117": {"logprob": -0.5, "rank": 1, "decoded_token": "u"}}));
    let body = json!({"model": "llm", "prompt": "xy", "prompt_logprobs": 0, "max_tokens": 1});
    let told = door.post("/v1/completions", body).await.json()["choices"][0]["prompt_logprobs"].clone();
    assert_eq!(told, json!([null, {"121": {"logprob": -0.5, "rank": 1, "decoded_token": "y"}}]));
}

#[tokio::test]
async fn chat_refuses_by_name() {
    let door = Door::to("x");
    let refused = async |more: Value| {
        let mut chat = json!({"model": "llm", "messages": [{"role": "user", "content": "u"}]});
        chat.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        door.refused(CHAT, chat).await
    };
    assert_eq!(refused(json!({"messages": []})).await, "400 messages: must not be empty");
    assert_eq!(refused(json!({"messages": null})).await, "400 messages: is missing");
    assert_eq!(refused(json!({"messages": [{"content": "u"}]})).await, "400 messages[0].role: must be a string");
    assert_eq!(
        refused(json!({"messages": [{"role": "user", "content": null}]})).await,
        "400 messages[0].content: is missing, must be a string or a list of text parts"
    );
    assert_eq!(refused(json!({"tools": [{"type": "function"}]})).await, "400 parameter tools is not supported");
    assert_eq!(
        refused(json!({"response_format": {"type": "xml"}})).await,
        "400 response_format.type: must be text, json_object, json_schema or structural_tag, is \"xml\""
    );
    let schema = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strin"}}});
    assert_eq!(
        refused(json!({"response_format": schema})).await,
        "400 response_format.json_schema.schema: Invalid type: strin"
    );
    assert_eq!(
        refused(json!({"n": 2, "temperature": 0})).await,
        "400 n: must be 1 at temperature 0, where all choices are the same, is 2"
    );
    assert_eq!(
        refused(json!({"best_of": 2, "stream": true})).await,
        "400 best_of: must be n, which is 1, for a stream, is 2: which are best is known at the end"
    );
    assert_eq!(refused(json!({"top_logprobs": 2})).await, "400 top_logprobs: needs logprobs to be true");
    assert_eq!(
        refused(json!({"logprobs": true, "top_logprobs": 21})).await,
        "400 top_logprobs: must be at most 20, is 21"
    );
    assert_eq!(refused(json!({"stream_options": {}})).await, "400 stream_options: needs stream to be true");
    assert_eq!(refused(json!({"max_tokens": 0})).await, "400 max_tokens: must be at least 1, is 0");
    let error = door.post(CHAT, "{").await.json()["error"].clone();
    assert_eq!((&error["type"], &error["param"]), (&json!("invalid_request_error"), &Value::Null));
    let tools =
        json!({"model": "llm", "messages": [{"role": "user", "content": "u"}], "tools": [{"type": "function"}]});
    let error = door.post(CHAT, tools).await.json()["error"].clone();
    assert_eq!((&error["type"], &error["param"]), (&json!("invalid_request_error"), &json!("tools")));
}

#[tokio::test]
async fn logprobs_have_the_form_of_their_route() {
    let door = Door::to("ab");
    let chat =
        json!({"messages": [{"role": "user", "content": "u"}], "logprobs": true, "top_logprobs": 1, "max_tokens": 1});
    let logprobs = door.post(CHAT, chat).await.json()["choices"][0]["logprobs"].clone();
    let b = json!({"token": "b", "logprob": -0.5, "bytes": [98]});
    assert_eq!(logprobs["content"], json!([{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [b]}]));
    let completion = json!({"prompt": "u", "logprobs": 1, "max_tokens": 2});
    let logprobs = door.post("/v1/completions", completion).await.json()["choices"][0]["logprobs"].clone();
    let tops = json!([{"b": -0.5, "a": -0.5}, {"b": -0.5}]);
    assert_eq!(
        logprobs,
        json!({"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.5], "top_logprobs": tops, "text_offset": [0, 1]})
    );
}

#[tokio::test]
async fn completions_take_several_prompts_of_text_or_tokens() {
    let door = Door::to("xyz");
    let texts = async |prompt: Value, more: Value| {
        let mut body = json!({"model": "llm", "prompt": prompt, "max_tokens": 2});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = door.post("/v1/completions", body).await.json();
        assert_eq!(answer["object"], "text_completion", "{answer}");
        let choices = answer["choices"].as_array().unwrap().clone();
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(texts(json!("a"), json!({})).await, ["xy"]);
    assert_eq!(texts(json!(["a", "b"]), json!({"echo": true})).await, ["axy", "bxy"]);
    assert_eq!(texts(json!([97, 98]), json!({"echo": true})).await, ["abxy"]);
    assert_eq!(texts(json!([[97], "b"]), json!({})).await, ["xy", "xy"]);
    assert_eq!(texts(json!("a"), json!({"max_tokens": null, "stop": "z"})).await, ["xy"]);
    let stream = json!({"prompt": ["a", "b"], "max_tokens": 2, "stream": true, "echo": true});
    let events = door.post("/v1/completions", stream).await.events();
    let mut of = [String::new(), String::new()];
    for choice in events.iter().filter_map(|event| event.get("choices")).map(|choices| &choices[0]) {
        of[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
    }
    assert_eq!(of, ["axy", "bxy"]);
    let refused = async |prompt: Value| door.refused("/v1/completions", json!({"prompt": prompt})).await;
    assert_eq!(refused(json!(null)).await, "400 prompt: is missing");
    assert_eq!(refused(json!([])).await, "400 prompt: must not be empty");
    assert_eq!(refused(json!("")).await, "400 prompt: is empty, the model needs at least one token to continue");
    assert_eq!(refused(json!([100_000])).await, "400 prompt: prompt token 100000 is outside the vocabulary of 265");
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_its_request() {
    let door = Door::to(&"x".repeat(scripted::MAX_LEN));
    let body = json!({"text_input": "a", "max_tokens": 250}).to_string();
    let response = router(&door.app).oneshot(Request::post(STREAM).body(Body::from(body)).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let mut events = response.into_body().into_data_stream();
    events.next().await.unwrap().unwrap();
    assert_eq!(door.app.num_in_flight(), 1);
    drop(events);
    assert_eq!(door.app.num_in_flight(), 0);
    // A further request is answered after the cancel has been obeyed.
    assert_eq!(door.post(GENERATE, json!({"text_input": "a", "max_tokens": 1})).await.status, 200);
    let model = door.app.repository.model("llm", "").unwrap();
    assert_eq!(model.served.metrics.failures(Failure::Canceled), 1);
    let stats = model.served.engine().stats();
    assert_eq!((stats.cancelled, stats.free_blocks), (1, stats.total_blocks));
    let statistics = door.get("/v2/models/llm/stats").await.json();
    let inference = &statistics["model_stats"][0]["inference_stats"];
    assert_eq!((&inference["success"]["count"], &inference["fail"]["count"]), (&json!(1), &json!(1)));
}

#[tokio::test]
async fn variables_of_a_template_do_not_stand_for_the_messages() {
    let door = Door::to("ok");
    let chat = |kwargs: Value| {
        let messages = json!([{"role": "user", "content": "hi"}]);
        let body = json!({"model": "llm", "messages": messages, "chat_template_kwargs": kwargs});
        door.post("/v1/chat/completions", body)
    };
    let reply = chat(json!({"messages": []})).await;
    let error = &reply.json()["error"];
    assert_eq!((reply.status, &error["param"]), (400, &json!("chat_template_kwargs.messages")), "{error}");
    assert_eq!(chat(json!({"enable_thinking": false})).await.status, 200);
}
