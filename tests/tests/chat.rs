//! Chat templates against transformers, byte for byte: stand-ins for those of well known models, by `goldens/chat.py`.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::path::Path;

use drafthorse::text::ChatTemplate;
use drafthorse::text::chat::Chat;
use serde_json::{Map, Value, json};

/// Stands in the goldens where the template printed the day they were made.
const DATE: &str = "\0date";

/// `goldens/chat/NAME.jinja` as a checkpoint has it.
fn template(name: &str) -> ChatTemplate {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/chat").join(format!("{name}.jinja"));
    of_source(&std::fs::read_to_string(source).unwrap())
}

fn of_source(source: &str) -> ChatTemplate {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    let tokens = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}});
    std::fs::write(dir.path().join("tokenizer_config.json"), tokens.to_string()).unwrap();
    ChatTemplate::from_dir(dir.path()).unwrap().unwrap()
}

fn today() -> String {
    of_source("{{ strftime_now('%d %b %Y') }}").render(&Chat::default()).unwrap()
}

fn rendered(case: &Value) -> String {
    let chat = Chat {
        messages: case["messages"].as_array().unwrap().clone(),
        tools: Some(case["tools"].clone()).filter(|tools| !tools.is_null()),
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
        variables: case["variables"].as_object().cloned().unwrap_or_else(Map::new),
        ..Chat::default()
    };
    template(case["template"].as_str().unwrap()).render(&chat).unwrap_or_else(|error| error.to_string())
}

#[test]
fn templates_give_what_transformers_makes_of_them() {
    let goldens = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/chat.json")).unwrap();
    let goldens: Value = serde_json::from_slice(&goldens).unwrap();
    let cases = goldens["cases"].as_array().unwrap();
    assert!(cases.len() >= 50);
    for case in cases {
        let before = today();
        let got = rendered(case);
        let want = |today: &str| match case["text"].as_str() {
            Some(text) => text.replace(DATE, today),
            None => format!("messages: refused by the chat template: {}", case["refused"].as_str().unwrap()),
        };
        // At midnight the day may have changed in between.
        assert!(got == want(&before) || got == want(&today()), "{case}\n\n{got:?}\n\n{:?}", want(&before));
    }
}
