//! The server through its front door: a tonic client, tiny models, bad input, broken checkpoints, cancels.

#![allow(clippy::unwrap_used, clippy::needless_pass_by_value, reason = "helpers of tests fail as tests do")]

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use drafthorse::ServerConfig;
use drafthorse::serve::Server;
use drafthorse_engine::Stats;
use drafthorse_proto::GrpcInferenceServiceClient;
use drafthorse_proto::inference::infer_parameter::ParameterChoice;
use drafthorse_proto::inference::model_infer_request::InferInputTensor;
use drafthorse_proto::inference::{
    InferTensorContents, ModelInferRequest, ModelStreamInferResponse, RepositoryIndexRequest,
};
use drafthorse_tests::tiny;
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

/// A running server over a repository of its own; the folder goes when it does.
struct Fixture {
    server: Server,
    client: GrpcInferenceServiceClient<Channel>,
    failed: Vec<String>,
    _repository: TempDir,
}

/// Serves a whole model named `tiny` and whatever `more` puts beside it.
async fn serve(more: impl FnOnce(&Path)) -> Fixture {
    let repository = tempfile::tempdir().unwrap();
    add_model(repository.path(), "tiny");
    more(repository.path());
    let flags = ["--model-repository", repository.path().to_str().unwrap()];
    let ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--num-threads=2", "--kv-cache-bytes=4M"];
    let config = ServerConfig::parse(flags.iter().chain(&ports)).unwrap();
    let mut server = Server::start(config).await.unwrap();
    let failed = server.loaded().await;
    let address = format!("http://{}", server.grpc.unwrap());
    let channel = Endpoint::from_shared(address).unwrap().connect().await.unwrap();
    let client = GrpcInferenceServiceClient::new(channel);
    Fixture { server, client, failed, _repository: repository }
}

fn add_model(repository: &Path, name: &str) {
    let version = repository.join(name).join("1");
    fs::create_dir_all(&version).unwrap();
    tiny::write_model(&version);
}

fn bytes(name: &str, value: &str) -> InferInputTensor {
    let contents = InferTensorContents { bytes_contents: vec![value.to_owned().into()], ..Default::default() };
    InferInputTensor {
        name: name.into(),
        datatype: "BYTES".into(),
        shape: vec![1],
        contents: Some(contents),
        ..Default::default()
    }
}

fn boolean(name: &str, value: bool) -> InferInputTensor {
    let contents = InferTensorContents { bool_contents: vec![value], ..Default::default() };
    InferInputTensor { datatype: "BOOL".into(), contents: Some(contents), ..bytes(name, "") }
}

fn request(id: &str, prompt: &str, stream: bool, parameters: &str) -> ModelInferRequest {
    ModelInferRequest {
        model_name: "tiny".into(),
        id: id.into(),
        inputs: vec![
            bytes("text_input", prompt),
            boolean("stream", stream),
            boolean("exclude_input_in_output", true),
            bytes("sampling_parameters", parameters),
        ],
        ..Default::default()
    }
}

fn sampled(seed: usize, max_tokens: usize) -> String {
    format!(r#"{{"temperature": 0.9, "seed": {seed}, "max_tokens": {max_tokens}, "ignore_eos": true}}"#)
}

impl Fixture {
    async fn infer(&self, request: ModelInferRequest) -> Result<String, Status> {
        let response = self.client.clone().model_infer(request).await?.into_inner();
        let output = response.outputs.iter().find(|output| output.name == "text_output").unwrap();
        Ok(String::from_utf8(output.contents.clone().unwrap().bytes_contents[0].to_vec()).unwrap())
    }

    /// The code and message of a request that must fail.
    async fn refusal(&self, request: ModelInferRequest) -> (Code, String) {
        let status = self.infer(request).await.unwrap_err();
        (status.code(), status.message().to_owned())
    }

    /// All responses to requests sent on one stream.
    async fn stream(&self, requests: Vec<ModelInferRequest>) -> Vec<ModelStreamInferResponse> {
        let mut responses = Vec::new();
        let sent = tokio_stream::iter(requests);
        let mut stream = self.client.clone().model_stream_infer(sent).await.unwrap().into_inner();
        while let Some(response) = stream.message().await.unwrap() {
            responses.push(response);
        }
        responses
    }

    fn engine_stats(&self) -> Stats {
        self.server.app.repository.model("tiny", "").unwrap().served.engine().stats()
    }
}

/// The text of one request among a stream's responses, and how many of them said they were the last.
fn text_of(responses: &[ModelStreamInferResponse], id: &str) -> (String, usize) {
    let mut text = String::new();
    let mut finals = 0;
    for response in responses.iter().filter_map(|r| r.infer_response.as_ref()).filter(|response| response.id == id) {
        for output in response.outputs.iter().filter(|output| output.name == "text_output") {
            text += std::str::from_utf8(&output.contents.as_ref().unwrap().bytes_contents[0]).unwrap();
        }
        let last = response.parameters.get("triton_final_response").and_then(|p| p.parameter_choice.clone());
        finals += usize::from(last == Some(ParameterChoice::BoolParam(true)));
    }
    (text, finals)
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_streams_at_once_are_what_each_is_alone() {
    let server = serve(|_| ()).await;
    let prompts: Vec<String> = (0..64).map(|i| format!("{i}: {}", "abcdefgh".repeat(i % 9))).collect();
    let requests = |stream| {
        let requests = prompts.iter().enumerate().map(move |(i, prompt)| {
            let parameters = if i % 3 == 0 { r#"{"temperature": 0, "max_tokens": 20}"#.into() } else { sampled(i, 20) };
            request(&i.to_string(), prompt, stream, &parameters)
        });
        requests.collect::<Vec<_>>()
    };
    let together = server.stream(requests(true)).await;
    for (i, alone) in requests(false).into_iter().enumerate() {
        let text = server.infer(alone).await.unwrap();
        assert_eq!(text_of(&together, &i.to_string()), (text, 1), "request {i}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_request_is_named_and_others_on_its_stream_go_on() {
    let server = serve(|_| ()).await;
    let unknown = ModelInferRequest { model_name: "nobody".into(), ..request("bad", "Hi", true, "{}") };
    let responses = server
        .stream(vec![
            request("a", "Hello", true, &sampled(1, 12)),
            unknown,
            request("b", "World", true, &sampled(2, 12)),
        ])
        .await;
    let errors: Vec<&str> = responses.iter().map(|r| r.error_message.as_str()).filter(|m| !m.is_empty()).collect();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].contains("nobody"), "{errors:?}");
    for id in ["a", "b"] {
        let (text, finals) = text_of(&responses, id);
        assert!(!text.is_empty() && finals == 1, "{id}: {text:?}, {finals} finals");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_has_a_code_and_names_the_field() {
    let server = serve(|_| ()).await;
    let good = || request("x", "Hi", false, "{}");
    let with = |change: &dyn Fn(&mut ModelInferRequest)| {
        let mut request = good();
        change(&mut request);
        request
    };
    let parameters = |json: &str| request("x", "Hi", false, json);
    let cases: Vec<(&str, ModelInferRequest, Code, &[&str])> = vec![
        (
            "wrong dtype",
            with(&|r| r.inputs[0].datatype = "INT32".into()),
            Code::InvalidArgument,
            &["text_input", "INT32"],
        ),
        ("wrong shape", with(&|r| r.inputs[0].shape = vec![2]), Code::InvalidArgument, &["text_input"]),
        ("huge shape", with(&|r| r.inputs[0].shape = vec![1 << 62]), Code::InvalidArgument, &["text_input"]),
        ("negative shape", with(&|r| r.inputs[0].shape = vec![-1]), Code::InvalidArgument, &["text_input"]),
        ("missing tensor", with(&|r| drop(r.inputs.remove(0))), Code::InvalidArgument, &["text_input"]),
        ("unknown tensor", with(&|r| r.inputs.push(bytes("text_inptu", "a"))), Code::InvalidArgument, &["text_inptu"]),
        ("twice", with(&|r| r.inputs.push(bytes("text_input", "a"))), Code::InvalidArgument, &["text_input"]),
        (
            "both forms",
            with(&|r| r.raw_input_contents.push(vec![0; 4].into())),
            Code::InvalidArgument,
            &["raw_input_contents"],
        ),
        ("stream by the unary call", request("x", "Hi", true, "{}"), Code::InvalidArgument, &["stream"]),
        ("unknown model", with(&|r| r.model_name = "nobody".into()), Code::NotFound, &["nobody"]),
        ("unknown version", with(&|r| r.model_version = "9".into()), Code::NotFound, &["9"]),
        ("no version", with(&|r| r.model_version = "abc".into()), Code::InvalidArgument, &["abc"]),
        ("empty prompt", request("x", "", false, "{}"), Code::InvalidArgument, &["text_input"]),
        ("long prompt", request("x", &"y".repeat(500), false, "{}"), Code::InvalidArgument, &["500", "128"]),
        ("10 MB prompt", request("x", &"y".repeat(10 << 20), false, "{}"), Code::InvalidArgument, &["128"]),
        ("no tokens", parameters(r#"{"max_tokens": 0}"#), Code::InvalidArgument, &["max_tokens", "0"]),
        ("cold", parameters(r#"{"temperature": -0.1}"#), Code::InvalidArgument, &["temperature", "-0.1"]),
        ("not a number", parameters(r#"{"temperature": "nan"}"#), Code::InvalidArgument, &["temperature"]),
        ("half a JSON", parameters(r#"{"max_tokens": "#), Code::InvalidArgument, &["sampling_parameters", "line 1"]),
        ("a list", parameters("[1]"), Code::InvalidArgument, &["sampling_parameters"]),
    ];
    for (name, request, code, needles) in cases {
        let (got, message) = server.refusal(request).await;
        assert_eq!(got, code, "{name}: {message}");
        for needle in needles {
            assert!(message.contains(needle), "{name}: '{needle}' is not in: {message}");
        }
    }
    assert!(!server.infer(request("x", "Hi", false, &sampled(1, 8))).await.unwrap().is_empty(), "the server lives");
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_raw_bytes_are_refused() {
    let server = serve(|_| ()).await;
    let raw = |entries: Vec<Vec<u8>>| {
        let mut request = request("x", "Hi", false, "{}");
        request.inputs.truncate(1);
        request.inputs[0].contents = None;
        ModelInferRequest { raw_input_contents: entries.into_iter().map(Into::into).collect(), ..request }
    };
    for (name, entries) in [
        ("no data", vec![]),
        ("half a length", vec![vec![2, 0]]),
        ("a length past the end", vec![vec![255, 0, 0, 0, b'h', b'i']]),
        ("two elements", vec![b"\x01\0\0\0a\x01\0\0\0b".to_vec()]),
        ("a surplus entry", vec![b"\x02\0\0\0hi".to_vec(), vec![]]),
        ("invalid UTF-8", vec![b"\x02\0\0\0\xff\xfe".to_vec()]),
    ] {
        let (code, message) = server.refusal(raw(entries)).await;
        assert_eq!(code, Code::InvalidArgument, "{name}: {message}");
    }
    let answered = server.client.clone().model_infer(raw(vec![b"\x02\0\0\0hi".to_vec()])).await.unwrap().into_inner();
    assert_eq!(answered.raw_output_contents.len(), answered.outputs.len(), "raw in, raw out");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_stream_frees_its_blocks() {
    let server = serve(|_| ()).await;
    let endless = request("long", "abc", true, r#"{"max_tokens": 120, "ignore_eos": true, "temperature": 0}"#);
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    sender.send(endless).await.unwrap();
    let requests = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut stream = server.client.clone().model_stream_infer(Request::new(requests)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    drop(stream);
    drop(sender);
    let dropped = Instant::now();
    // A step in flight may hold its blocks for a moment longer.
    let holds = |stats: &Stats| stats.running > 0 || stats.free_blocks + stats.cached_blocks < stats.total_blocks;
    while holds(&server.engine_stats()) {
        assert!(dropped.elapsed() < Duration::from_secs(5), "the request still runs: {:?}", server.engine_stats());
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_checkpoint_is_unavailable_with_its_reason_and_the_server_lives() {
    let mut server = serve(|repository| {
        let broken: [(&str, &dyn Fn(&Path)); 6] = [
            ("truncated", &|dir| {
                let weights = fs::read(dir.join("model.safetensors")).unwrap();
                fs::write(dir.join("model.safetensors"), &weights[..weights.len() / 2]).unwrap();
            }),
            ("empty", &|dir| fs::write(dir.join("model.safetensors"), b"").unwrap()),
            ("no_tokenizer", &|dir| fs::remove_file(dir.join("tokenizer.json")).unwrap()),
            ("wrong_shape", &|dir| edit_config(dir, r#""intermediate_size":"#, r#""intermediate_size":8"#)),
            ("unknown_architecture", &|dir| edit_config(dir, "LlamaForCausalLM", "LlamoForCausalLM")),
            ("no_config", &|dir| fs::remove_file(dir.join("config.json")).unwrap()),
        ];
        for (name, damage) in broken {
            add_model(repository, name);
            damage(&repository.join(name).join("1"));
        }
    })
    .await;
    let mut failed = std::mem::take(&mut server.failed);
    failed.sort();
    assert_eq!(failed, ["empty", "no_config", "no_tokenizer", "truncated", "unknown_architecture", "wrong_shape"]);
    let index = server.client.clone().repository_index(RepositoryIndexRequest::default()).await.unwrap().into_inner();
    for (name, needle) in [
        ("truncated", "model.safetensors"),
        ("empty", "model.safetensors"),
        ("no_tokenizer", "tokenizer"),
        ("wrong_shape", "shape"),
        ("unknown_architecture", "LlamoForCausalLM"),
        ("no_config", "config.json"),
    ] {
        let model = index.models.iter().find(|model| model.name == name).unwrap();
        assert_eq!(model.state, "UNAVAILABLE", "{name}");
        assert!(model.reason.contains(needle), "{name}: '{needle}' is not in: {}", model.reason);
    }
    assert!(!server.infer(request("x", "Hi", false, &sampled(1, 8))).await.unwrap().is_empty());
    assert!(server.server.shutdown().await);
}

/// Replaces `from` in `config.json`; a number after it is replaced with it.
fn edit_config(dir: &Path, from: &str, to: &str) {
    let path = dir.join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    let at = text.find(from).unwrap_or_else(|| panic!("no {from} in {text}"));
    let rest = text[at + from.len()..].trim_start_matches(|c: char| c.is_ascii_digit() && from.ends_with(':'));
    fs::write(path, format!("{}{to}{rest}", &text[..at])).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_lets_requests_in_flight_finish() {
    let server = serve(|_| ()).await;
    let client = server.client.clone();
    let running = request("last", "abc", false, r#"{"max_tokens": 100, "ignore_eos": true, "temperature": 0}"#);
    let answer = tokio::spawn(async move { client.clone().model_infer(running).await });
    while server.engine_stats().running == 0 {
        tokio::task::yield_now().await;
    }
    assert!(server.server.shutdown().await, "drained");
    assert!(answer.await.unwrap().is_ok());
}
