//! What is wrong with a request, and the parameter that is named for it.

use super::*;

const COMPLETIONS: &str = "/v1/completions";

/// A body that is right, with `more` in it.
fn body(path: &str, more: &Value) -> Value {
    let mut body = match path {
        CHAT => json!({"model": "llm", "messages": [{"role": "user", "content": "u"}]}),
        COMPLETIONS => json!({"model": "llm", "prompt": "u"}),
        _ => json!({"text_input": "u"}),
    };
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn an_error_of_openais_routes_names_the_parameter_of_the_body() {
    let door = Door::to("x");
    let wrong = async |path: &str, more: Value, param: &str, said: &str| {
        let reply = door.post(path, body(path, &more)).await;
        let error = reply.json()["error"].clone();
        assert_eq!((reply.status, &error["param"]), (400, &json!(param)), "{path} {param}: {error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(said), "{path} {param}: {message}");
        assert_eq!(error["type"], "invalid_request_error", "{path} {param}");
    };
    // Alike on both routes.
    for path in [CHAT, COMPLETIONS] {
        for (more, param, said) in [
            (json!({"model": 5}), "model", "must be a string"),
            (json!({"stream": "yes"}), "stream", "must be true or false"),
            (json!({"stream_options": {}}), "stream_options", "needs stream"),
            (json!({"stream_options": 1}), "stream_options", "must be an object"),
            (
                json!({"stream": true, "stream_options": {"include_usage": "yes"}}),
                "stream_options.include_usage",
                "must be true or false",
            ),
            (
                json!({"stream": true, "stream_options": {"continuous_usage_stats": true}}),
                "stream_options.continuous_usage_stats",
                "is not supported",
            ),
            (json!({"temperature": -1}), "temperature", "must be 0 or more, is -1"),
            (json!({"temperature": {}}), "temperature", "must be a number 0 or more, is an object"),
            (json!({"top_p": 0}), "top_p", "must be in (0, 1], is 0"),
            (json!({"n": 0}), "n", "must be at least 1, is 0"),
            (json!({"n": 2, "best_of": 1}), "best_of", "must be at least n"),
            (json!({"max_tokens": 0}), "max_tokens", "must be at least 1"),
            (json!({"max_completion_tokens": 0}), "max_completion_tokens", "max_completion_tokens: must be at least 1"),
            (json!({"max_completion_tokens": "x"}), "max_completion_tokens", "must be a whole number"),
            (json!({"max_tokens": 1000}), "max_tokens", "max_tokens: is 1000, the model takes at most 256 with"),
            (
                json!({"max_completion_tokens": 1000}),
                "max_completion_tokens",
                "is 1000, the model takes at most 256 with",
            ),
            (json!({"max_completion_tokens": 1, "max_tokens": 2}), "max_completion_tokens", "and 2 in max_tokens"),
            (json!({"min_tokens": 5, "max_tokens": 2}), "min_tokens", "must be at most max_tokens"),
            (json!({"stop": [""]}), "stop", "has an empty string"),
            (json!({"stop_token_ids": [1, "x"]}), "stop_token_ids[1]", "must be a token id"),
            (json!({"stop_token_ids": [100_000]}), "stop_token_ids", "has token 100000"),
            (json!({"logit_bias": {"1": 200}}), "logit_bias[1]", "must be a number in [-100, 100]"),
            (json!({"response_format": {"type": "xml"}}), "response_format.type", "must be text"),
            (json!({"guided_regex": "("}), "guided_regex", "unclosed group"),
            (json!({"guided_regex": "a", "guided_choice": ["b"]}), "guided_choice", "does not go with guided_regex"),
            (json!({"structured_outputs": {"json": 5}}), "structured_outputs.json", "must be a JSON schema"),
            (json!({"structured_outputs": {"jsn": {}}}), "structured_outputs.jsn", "no such constraint"),
            (
                json!({"guided_grammar": "start: b"}),
                "guided_grammar",
                "line 1 column 8: there is no rule or terminal b",
            ),
            (json!({"use_beam_search": true}), "use_beam_search", "is not supported"),
            (json!({"detokenize": false}), "detokenize", "is not supported"),
            (json!({"logits_processors": ["x"]}), "logits_processors", "is not supported"),
            (json!({"suffix": "x"}), "suffix", "is not supported"),
            (json!({"tool_choice": "required"}), "tool_choice", "needs tools"),
            (json!({"function_call": {"name": "f"}}), "function_call", "needs tools"),
            (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens", "must be -1"),
            (json!({"speculate_max_draft_token_num": 9}), "speculate_max_draft_token_num", "must be at most"),
            (json!({"prompt_logprobs": 0, "stream": true}), "prompt_logprobs", "does not go with a stream"),
        ] {
            wrong(path, more, param, said).await;
        }
    }
    for (more, param, said) in [
        (json!({"messages": [{"role": "user"}]}), "messages[0].content", "is missing"),
        (json!({"messages": [{"role": "user", "content": "y".repeat(300)}]}), "messages", "prompt has 306 tokens"),
        (json!({"messages": [{"role": "user", "content": "y".repeat(20_000)}]}), "messages", "prompt has at least"),
        (json!({"max_tokens": 255}), "max_tokens", "max_tokens: is 255, which with the prompt's"),
        (json!({"chat_template": "{{ x }}"}), "chat_template", "a chat_template of the request's own"),
        (json!({"chat_template_kwargs": []}), "chat_template_kwargs", "must be an object"),
        (json!({"continue_final_message": true}), "continue_final_message", "is not supported"),
        (json!({"add_generation_prompt": 1}), "add_generation_prompt", "must be true or false"),
        (json!({"logprobs": 2}), "logprobs", "must be true or false"),
        (json!({"top_logprobs": 2}), "top_logprobs", "needs logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs", "must be at most 20"),
    ] {
        wrong(CHAT, more, param, said).await;
    }
    for (more, param, said) in [
        (json!({"prompt": null}), "prompt", "is missing"),
        (json!({"prompt": null, "echo": true}), "prompt", "is missing"),
        (json!({"prompt": ""}), "prompt", "is empty"),
        (json!({"prompt": [1, "x"]}), "prompt", "must be a string"),
        (json!({"prompt": [100_000]}), "prompt", "outside the vocabulary"),
        (json!({"prompt": "y".repeat(300)}), "prompt", "prompt has 300 tokens"),
        (json!({"prompt": "y".repeat(20_000)}), "prompt", "prompt has at least"),
        (json!({"prompt": vec!["u"; 64], "n": 100}), "n", "asks for 6400 choices with 64 prompts, at most 1032 can"),
        (json!({"prompt": vec!["u"; 64], "best_of": 17}), "best_of", "asks for 1088 choices"),
        (json!({"echo": "yes"}), "echo", "must be true or false"),
        (json!({"logprobs": 21}), "logprobs", "must be at most 20"),
    ] {
        wrong(COMPLETIONS, more, param, said).await;
    }
}

#[tokio::test]
async fn a_prompt_that_is_too_long_has_openais_code_for_it_and_a_broken_body_no_parameter() {
    let door = Door::to("x");
    for length in [300, 20_000] {
        let error = door.post(COMPLETIONS, json!({"prompt": "y".repeat(length)})).await.json()["error"].clone();
        assert_eq!((&error["param"], &error["code"]), (&json!("prompt"), &json!("context_length_exceeded")), "{error}");
    }
    for broken in ["{", "[]", ""] {
        for path in [CHAT, COMPLETIONS] {
            let reply = door.post(path, broken).await;
            let error = reply.json()["error"].clone();
            assert_eq!((reply.status, &error["param"]), (400, &Value::Null), "{path} {broken}: {error}");
        }
    }
    let twice = door.post(COMPLETIONS, r#"{"prompt": "u", "max_tokens": 1, "max_tokens": 2}"#).await;
    let error = &twice.json()["error"];
    assert_eq!((&error["param"], &error["message"]), (&json!("max_tokens"), &json!("max_tokens: is given twice")));
    let unknown = door.post(COMPLETIONS, json!({"model": "no", "prompt": "u"})).await;
    let error = &unknown.json()["error"];
    assert_eq!((unknown.status, &error["param"], &error["code"]), (404, &json!("model"), &json!("model_not_found")));
}

#[tokio::test]
async fn parameters_that_come_by_two_ways_count_all_and_two_values_are_refused() {
    let door = Door::to("abcd");
    let text = async |more: Value| {
        let reply = door.post(GENERATE, body(GENERATE, &more)).await;
        reply.json()["text_output"].as_str().map(str::to_owned).unwrap_or_else(|| reply.text())
    };
    assert_eq!(text(json!({"sampling_parameters": "{\"max_tokens\": 3}", "stop": ["b"]})).await, "ua");
    assert_eq!(text(json!({"sampling_parameters": {"max_tokens": 3}, "parameters": {"stop": ["b"]}})).await, "ua");
    assert_eq!(text(json!({"sampling_parameters": {"max_tokens": 3}, "max_tokens": "3"})).await, "uabc");
    assert_eq!(text(json!({"sampling_parameters": ["{\"max_tokens\": 3}"]})).await, "uabc");
    let refused = async |more: Value| door.refused(GENERATE, body(GENERATE, &more)).await;
    assert_eq!(
        refused(json!({"sampling_parameters": {"max_tokens": 3}, "max_tokens": 4})).await,
        "400 max_tokens: is 3 in sampling_parameters and 4 in the body: give it once"
    );
    assert_eq!(
        refused(json!({"max_tokens": 3, "parameters": {"max_tokens": 4}})).await,
        "400 max_tokens: is 3 in the body and 4 in its parameters: give it once"
    );
    assert_eq!(
        refused(json!({"sampling_parameters": ["{}"], "max_tokens": 4})).await,
        "400 sampling_parameters: must be an object, or a text that holds one, where parameters stand beside it"
    );
    assert_eq!(
        refused(json!({"sampling_parameters": "{\"n\": 1, \"n\": 2}"})).await,
        "400 sampling_parameters: has n twice"
    );
    assert_eq!(
        refused(json!({"sampling_parameters": {"priority": 2}, "priority": 3})).await,
        "400 priority: is 2 among the sampling parameters and 3 beside them: give it once"
    );
    // As the protocol's own form has it: a tensor, and the request's parameters.
    let infer = async |parameters: Value| {
        let input = |name: &str, text: &str| json!({"name": name, "datatype": "BYTES", "shape": [1], "data": [text]});
        let inputs = [input("text_input", "u"), input("sampling_parameters", "{\"max_tokens\": 3}")];
        let reply = door.post("/v2/models/llm/infer", json!({"inputs": inputs, "parameters": parameters})).await;
        let json = reply.json();
        let text = json["outputs"][0]["data"][0].as_str().or(json["error"].as_str()).unwrap_or("nothing");
        (reply.status, text.to_owned(), json["parameters"]["warnings"].clone())
    };
    assert_eq!(infer(json!({"stop": "b"})).await, (200, "ua".into(), Value::Null));
    let warning = json!("color: no such parameter");
    let (status, text, warnings) = infer(json!({"color": "red"})).await;
    assert_eq!((status, &*text), (200, "uabc"));
    assert!(warnings.as_str().unwrap().starts_with(warning.as_str().unwrap()), "{warnings}");
    assert_eq!(
        infer(json!({"max_tokens": 9})).await,
        (
            400,
            "max_tokens: is 3 in sampling_parameters and 9 in the request's parameters: give it once".into(),
            Value::Null
        )
    );
}

#[tokio::test]
async fn a_field_beside_those_of_an_inference_request_is_a_parameter_or_refused() {
    let door = Door::to("abcd");
    let infer = async |more: Value| {
        let mut body = json!({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["u"]}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let json = door.post("/v2/models/llm/infer", body).await.json();
        let warnings = json["parameters"]["warnings"].as_str().unwrap_or("no warnings");
        let text = json["outputs"][0]["data"][0].as_str().or(json["error"].as_str()).unwrap_or("nothing");
        format!("{text}, {}", warnings.split(';').next().unwrap())
    };
    assert_eq!(infer(json!({"model_name": "llm", "model_version": null})).await, "uabcd, no warnings");
    assert_eq!(infer(json!({"max_tokens": 2})).await, "uab, no warnings");
    assert_eq!(infer(json!({"color": "red"})).await, "uabcd, color: no such parameter");
    assert_eq!(
        infer(json!({"max_tokens": 2, "parameters": {"max_tokens": 3}})).await,
        "max_tokens: stands in the body and in its parameters: give it once, no warnings"
    );
    assert_eq!(
        infer(json!({"sampling_parameters": {"max_tokens": 2}})).await,
        "sampling_parameters: is no field of an inference request, which has inputs, outputs, parameters and id, no warnings"
    );
}

#[tokio::test]
async fn an_unknown_parameter_is_told_in_a_stream_and_refused_by_its_own_name_if_strict() {
    let door = Door::to("ab");
    for path in [CHAT, COMPLETIONS] {
        let events = door.post(path, body(path, &json!({"stream": true, "max_token": 3}))).await.events();
        let told: Vec<&Value> = events.iter().filter_map(|event| event.get("warnings")).collect();
        assert_eq!(told, [&json!(["max_token: no such parameter; did you mean max_tokens?"])], "{path}");
    }
    let door = Door::of(Arc::new(scripted::made("ab", 1).with_strict_parameters(true)));
    for (path, key) in [(CHAT, "prompt"), (COMPLETIONS, "messages"), (CHAT, "max_token")] {
        let reply = door.post(path, body(path, &json!({key: "x"}))).await;
        let error = reply.json()["error"].clone();
        assert_eq!((reply.status, &error["param"]), (400, &json!(key)), "{error}");
        assert!(error["message"].as_str().unwrap().starts_with(&format!("{key}: no such parameter")), "{error}");
    }
}
