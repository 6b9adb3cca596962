//! A tiny DeepSeek-V3 of two plain layers and two with experts, and its module for drafts, through the front door.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::fs;
use std::path::Path;

use drafthorse::ServerConfig;
use drafthorse::serve::Server;
use drafthorse_proto::GrpcInferenceServiceClient;
use drafthorse_proto::inference::model_infer_request::InferInputTensor;
use drafthorse_proto::inference::{InferTensorContents, ModelInferRequest};
use drafthorse_tests::{pairs, tiny};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

/// Writes the model with its module, and a tokenizer with one character a token.
fn write_model(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    tiny::write_model(dir);
    pairs::write_deepseek(dir, tiny::END);
}

struct Fixture {
    server: Server,
    client: GrpcInferenceServiceClient<Channel>,
    _repository: TempDir,
}

/// Serves the model as it is, with its module's drafts, and with keys and values expanded.
async fn serve() -> Fixture {
    let repository = tempfile::tempdir().unwrap();
    for (name, parameters) in [
        ("plain", vec![]),
        ("drafting", vec![("speculate_method", "mtp"), ("speculate_adaptive", "false")]),
        ("expanded", vec![("mla_use_matrix_absorption", "false")]),
    ] {
        write_model(&repository.path().join(name).join("1"));
        let parameters: String = parameters
            .iter()
            .map(|(key, value)| format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }}\n"))
            .collect();
        fs::write(repository.path().join(name).join("config.pbtxt"), format!("name: \"{name}\"\n{parameters}"))
            .unwrap();
    }
    let flags = ["--model-repository", repository.path().to_str().unwrap()];
    let ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--num-threads=2", "--kv-cache-bytes=4M"];
    let config = ServerConfig::parse(flags.iter().chain(&ports)).unwrap();
    let mut server = Server::start(config).await.unwrap();
    assert_eq!(server.loaded().await, Vec::<String>::new());
    let channel = Endpoint::from_shared(format!("http://{}", server.grpc.unwrap())).unwrap().connect().await.unwrap();
    Fixture { server, client: GrpcInferenceServiceClient::new(channel), _repository: repository }
}

fn text(name: &str, value: String) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: "BYTES".into(),
        shape: vec![1],
        contents: Some(InferTensorContents { bytes_contents: vec![value.into()], ..Default::default() }),
        ..Default::default()
    }
}

fn request(model: &str, i: usize, temperature: f32) -> ModelInferRequest {
    let prompt: String = (0..1 + 5 * i).map(|j| char::from(b'!' + (7 * i + 11 * j) as u8 % 90)).collect();
    let parameters =
        format!(r#"{{"temperature": {temperature}, "seed": {i}, "max_tokens": {}, "ignore_eos": true}}"#, 12 + i);
    ModelInferRequest {
        model_name: model.into(),
        id: i.to_string(),
        inputs: vec![text("text_input", prompt), text("sampling_parameters", parameters)],
        ..Default::default()
    }
}

impl Fixture {
    /// What a model answers to sixteen requests: one after the other, or on sixteen streams at once.
    async fn answers(&self, model: &str, temperature: f32, at_once: bool) -> Vec<String> {
        let requests: Vec<_> = (0..16).map(|i| request(model, i, temperature)).collect();
        let answer = |request| {
            let mut client = self.client.clone();
            async move {
                let stream = client.model_stream_infer(tokio_stream::iter([request])).await.unwrap();
                let mut stream = stream.into_inner();
                let mut text = String::new();
                while let Some(response) = stream.message().await.unwrap() {
                    assert_eq!(response.error_message, "");
                    for output in response.infer_response.unwrap().outputs {
                        if output.name == "text_output" {
                            let piece = &output.contents.unwrap().bytes_contents[0];
                            text.push_str(std::str::from_utf8(piece).unwrap());
                        }
                    }
                }
                text
            }
        };
        let mut answers = Vec::new();
        if !at_once {
            for request in requests {
                answers.push(answer(request).await);
            }
            return answers;
        }
        let running: Vec<_> = requests.into_iter().map(|request| tokio::spawn(answer(request))).collect();
        for answer in running {
            answers.push(answer.await.unwrap());
        }
        answers
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_may_have_fewer_drafts_or_none_and_the_same_text() {
    let fixture = serve().await;
    let answer = async |more: &str| {
        let mut asked = request("drafting", 3, 0.0);
        asked.inputs[1] =
            text("sampling_parameters", format!(r#"{{"temperature": 0, "max_tokens": 30, "ignore_eos": true{more}}}"#));
        asked.inputs.push(InferInputTensor {
            name: "return_acceptance".into(),
            datatype: "BOOL".into(),
            shape: vec![1],
            contents: Some(InferTensorContents { bool_contents: vec![true], ..Default::default() }),
            ..Default::default()
        });
        let response = fixture.client.clone().model_infer(asked).await?.into_inner();
        let contents = |name: &str| {
            let output = response.outputs.iter().find(|output| output.name == name).unwrap();
            output.contents.clone().unwrap()
        };
        Ok::<_, tonic::Status>((
            contents("text_output").bytes_contents[0].clone(),
            contents("total_draft_tokens").uint_contents[0],
        ))
    };
    let (said, drafts) = answer("").await.unwrap();
    let (said_with_one, fewer) = answer(r#", "speculate_max_draft_token_num": 1"#).await.unwrap();
    assert!(0 < fewer && fewer < 30 && 30 < drafts, "{fewer} and {drafts} drafts");
    assert_eq!(said_with_one, said);
    for none in [r#", "speculate_max_draft_token_num": 0"#, r#", "speculate_method": "none""#] {
        assert_eq!(answer(none).await.unwrap(), (said.clone(), 0), "{none}");
    }
    let refused = answer(r#", "speculate_max_draft_token_num": 4"#).await.unwrap_err();
    assert_eq!(refused.message(), "speculate_max_draft_token_num: must be at most 3, the model's own number, is 4");
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert!(fixture.server.shutdown().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_streams_at_once_get_the_text_of_each_alone_with_drafts_and_without() {
    let fixture = serve().await;
    let greedy = fixture.answers("plain", 0.0, false).await;
    assert!(greedy.iter().all(|text| text.len() >= 12) && greedy.iter().any(|text| text != &greedy[0]), "{greedy:?}");
    assert_eq!(fixture.answers("plain", 0.0, true).await, greedy);
    assert_eq!(fixture.answers("drafting", 0.0, true).await, greedy, "greedy text with drafts");
    let stats = fixture.server.app.repository.model("drafting", "").unwrap().served.engine().stats();
    assert!(stats.drafts_verified > 0, "no drafts were made");

    let sampled = fixture.answers("plain", 0.9, false).await;
    assert_ne!(sampled, greedy);
    assert_eq!(fixture.answers("plain", 0.9, true).await, sampled);
    assert_eq!(fixture.answers("drafting", 0.9, true).await, sampled, "sampled text with drafts");
    // The other form differs in rounding alone, and is as good alone as in company.
    let expanded = fixture.answers("expanded", 0.0, false).await;
    assert_eq!(fixture.answers("expanded", 0.0, true).await, expanded);
    let same = expanded.iter().zip(&greedy).filter(|(a, b)| a == b).count();
    assert!(same >= 14, "{same} of 16 texts are the same");
    assert!(fixture.server.shutdown().await);
}
