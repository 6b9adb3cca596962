use super::super::request::{Dialect, GenerateRequest, Prompt};
use super::super::scripted::{MAX_LEN, model};
use super::*;
use crate::params::GenerateParams;

fn request(prompt: &str, params: &str) -> GenerateRequest {
    let params = GenerateParams::from_json("params", params).unwrap();
    GenerateRequest::new(Prompt::text(prompt), params, Dialect::Tensors)
}

/// The chunks of the model's answer: `text` of each, then `reason cause output_tokens`.
async fn chunks(model: &Arc<ServedModel>, params: &str) -> String {
    let mut generation = model.generate(request("hi", params)).await.unwrap();
    let mut log = Vec::new();
    let mut num_tokens = 0;
    while let Some(chunk) = generation.next().await {
        let chunk = chunk.unwrap();
        num_tokens += chunk.token_ids.len();
        log.push(chunk.text);
        if let Some(finish) = chunk.finish {
            assert_eq!(finish.usage.output_tokens as usize, num_tokens, "usage counts what was handed out");
            assert_eq!(finish.usage.prompt_tokens, 2);
            let cause = match finish.cause {
                None => String::new(),
                Some(StopCause::Text(text)) => format!(" {text:?}"),
                Some(StopCause::Token(id)) => format!(" token {id}"),
            };
            log.push(format!("{}{cause} {num_tokens}", finish.reason.name()));
        }
    }
    log.join("|")
}

#[tokio::test]
async fn text_streams_until_the_end_token() {
    let model = model("ab🦀c", 1);
    assert_eq!(chunks(&model, "{}").await, "a|b|🦀|c||stop 8");
    assert_eq!(
        chunks(&model, r#"{"skip_special_tokens": false}"#).await,
        "a|b|🦀|c||stop 8",
        "a stop token is no text"
    );
    assert_eq!(
        chunks(&model, r#"{"skip_special_tokens": false, "include_stop_str_in_output": true}"#).await,
        "a|b|🦀|c|<|end|>|stop 8"
    );
    assert_eq!(chunks(&model, r#"{"max_tokens": 2}"#).await, "a|b|length 2");
    assert_eq!(chunks(&model, r#"{"max_tokens": 4}"#).await, "a|b|\u{FFFD}|length 4", "cut off inside a character");
    assert_eq!(chunks(&model, r#"{"max_tokens": 10, "ignore_eos": true}"#).await, "a|b|🦀|c||||length 10");
    assert_eq!(chunks(&model, r#"{"stop_token_ids": [98]}"#).await, "a||stop token 98 2");
}

#[tokio::test]
async fn a_stop_string_ends_the_text_however_tokens_cut_it() {
    for tokens_per_step in [1, 3] {
        let model = model("one two🦀 three", tokens_per_step);
        let whole = async |params: &str| {
            let whole = model.generate(request("hi", params)).await.unwrap().whole().await.unwrap();
            (whole.text, whole.token_ids.len(), whole.finish.cause)
        };
        let stopped =
            |text: &str, num_tokens, by: &str| (text.to_string(), num_tokens, Some(StopCause::Text(by.into())));
        assert_eq!(whole(r#"{"stop": " two"}"#).await, stopped("one", 3, " two"));
        assert_eq!(whole(r#"{"stop": ["three", "🦀"]}"#).await, stopped("one two", 7, "🦀"));
        assert_eq!(whole(r#"{"stop": "o", "include_stop_str_in_output": true}"#).await, stopped("o", 1, "o"));
        assert_eq!(whole(r#"{"stop": "o"}"#).await, stopped("", 0, "o"));
        assert_eq!(whole(r#"{"stop": "o", "min_tokens": 2}"#).await, stopped("one tw", 6, "o"));
        assert_eq!(
            whole(r#"{"stop": "threes", "max_tokens": 99}"#).await,
            ("one two🦀 three".into(), 18, None),
            "held to the end"
        );
    }
}

#[tokio::test]
async fn no_chunk_has_a_part_of_a_stop_string() {
    let model = model("ab STOxy STOP z", 1);
    assert_eq!(chunks(&model, r#"{"stop": "STOP", "max_tokens": 99}"#).await, "a|b| |STOx|y| ||stop \"STOP\" 9");
}

#[tokio::test]
async fn logprobs_come_with_their_tokens() {
    let model = model("abcd", 2);
    let whole = model.generate(request("hi", r#"{"logprobs": 2, "stop": "c"}"#)).await.unwrap().whole().await.unwrap();
    assert_eq!(whole.text, "ab");
    let tokens: Vec<TokenId> = whole.logprobs.iter().map(|logprobs| logprobs.token.token).collect();
    assert_eq!(tokens, whole.token_ids);
    assert_eq!(whole.logprobs[0].top.len(), 2);
}

#[tokio::test]
async fn dropping_the_stream_cancels() {
    let model = model(&"x".repeat(MAX_LEN), 1);
    let mut generation = model.generate(request("hi", r#"{"max_tokens": 250}"#)).await.unwrap();
    generation.next().await.unwrap().unwrap();
    drop(generation);
    // The next request has its slot only after the engine heard of the cancel, for commands are taken in order.
    let next = model.generate(request("hi", r#"{"max_tokens": 1}"#)).await.unwrap().whole().await.unwrap();
    assert_eq!(next.text, "x");
    let stats = model.engine().stats();
    assert_eq!((stats.cancelled, stats.finished, stats.running), (1, 1, 0));
    assert_eq!(stats.free_blocks, stats.total_blocks);
    assert_eq!(model.metrics.failures(Failure::Canceled), 1);
    assert_eq!(model.metrics.success.count(), 1);
}

#[tokio::test]
async fn what_can_never_run_is_refused_with_the_reason() {
    let model = model("x", 1);
    let refused = async |prompt: String, params: &str| {
        model.generate(request(&prompt, params)).await.map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(refused(String::new(), "{}").await, "prompt: is empty, the model needs at least one token to continue");
    let too_long = "prompt has 256 tokens, the model takes at most 256 with at least one for the answer";
    assert_eq!(refused("y".repeat(256), "{}").await, too_long);
    let far_too_long = refused("y".repeat(10 << 20), "{}").await;
    assert!(
        far_too_long.starts_with("prompt has at least 291271 tokens, the model takes at most 256 "),
        "{far_too_long}"
    );
    assert_eq!(
        refused("hi".into(), r#"{"stop_token_ids": [100000]}"#).await,
        "stop_token_ids: has token 100000, the vocabulary has 265"
    );
    assert_eq!(model.metrics.failures(Failure::Other), 4);
}

#[tokio::test]
async fn an_answer_fills_the_context_at_most() {
    let model = model(&"x".repeat(MAX_LEN), 1);
    let long = "y".repeat(250);
    let error = model.generate(request(&long, r#"{"max_tokens": 100}"#)).await.unwrap_err().to_string();
    assert!(
        error.starts_with("max_tokens: is 100, which with the prompt's 250 tokens is more than the 256"),
        "{error}"
    );
    let mut asked = request(&long, r#"{"max_tokens": 6}"#);
    let whole = model.generate(asked.clone()).await.unwrap().whole().await.unwrap();
    assert_eq!((whole.text.len(), whole.finish.reason), (6, FinishReason::Length));
    asked.params = GenerateParams::default();
    asked.prompt = Prompt::text("hi");
    assert_eq!(model.generate(asked.clone()).await.unwrap().whole().await.unwrap().text.len(), 16);
    asked.dialect = Dialect::Chat;
    assert_eq!(model.generate(asked).await.unwrap().whole().await.unwrap().text.len(), MAX_LEN - 2);
}

#[tokio::test]
async fn a_prompt_is_cut_from_its_beginning_where_that_is_asked_for() {
    let model = model(&"x".repeat(MAX_LEN), 1);
    for (params, kept) in [
        (r#"{"truncate_prompt_tokens": 7}"#, 7),
        (r#"{"truncate_prompt_tokens": -1, "max_tokens": 56}"#, 200),
        (r#"{"truncate_prompt_tokens": 240, "max_tokens": 56}"#, 200),
        (r#"{"truncate_prompt_tokens": -1}"#, 255),
    ] {
        let generation = model.generate(request(&"y".repeat(300), params)).await.unwrap();
        assert_eq!(generation.prompt_tokens(), kept, "{params}");
    }
}

#[tokio::test]
async fn what_is_not_known_is_refused_by_a_strict_model() {
    let asked = request("hi", r#"{"max_token": 5}"#);
    assert_eq!(model("x", 1).generate(asked.clone()).await.unwrap().warnings().len(), 1);
    let strict = Arc::into_inner(model("x", 1)).unwrap().with_strict_parameters(true);
    let error = Arc::new(strict).generate(asked).await.unwrap_err().to_string();
    assert_eq!(error, "max_token: no such parameter; did you mean max_tokens?");
}

#[tokio::test]
async fn a_grammar_is_looked_at_before_anything_runs() {
    let model = model("x", 1);
    let refused = async |params: &str| model.generate(request("hi", params)).await.unwrap_err().to_string();
    assert_eq!(
        refused(r#"{"structured_outputs": {"json": {"properties": {"a": {"type": "strin"}}}}}"#).await,
        "structured_outputs.json: at /properties/a: Invalid type: strin"
    );
    assert_eq!(
        refused(r#"{"guided_json": "{\"type\": \n1x}"}"#).await,
        "guided_json: is not valid JSON at line 2 column 2: expected `,` or `}`"
    );
    assert_eq!(
        refused(r#"{"guided_regex": "a("}"#).await,
        "guided_regex: character 2 of the regular expression: unclosed group"
    );
    let tag = r#"{"triggers": ["<"], "structures": [{"begin": "<", "schema": {"properties": {"a": {"type": "strin"}}}, "end": ""}]}"#;
    assert_eq!(
        refused(&format!(r#"{{"structural_tag": {tag}}}"#)).await,
        "structural_tag.structures[0].schema: at /properties/a: Invalid type: strin"
    );
}

#[tokio::test]
async fn an_engine_that_stops_fails_its_requests() {
    let model = model(&"x".repeat(MAX_LEN), 1);
    let mut generation = model.generate(request("hi", r#"{"max_tokens": 200}"#)).await.unwrap();
    model.engine().stop();
    let error = loop {
        if let Err(error) = generation.next().await.unwrap() {
            break error;
        }
    };
    assert_eq!(error.to_string(), "the engine has stopped: it was told to stop");
    assert!(generation.next().await.is_none());
    assert_eq!(model.metrics.failures(Failure::Backend), 1);
}
