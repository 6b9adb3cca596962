//! The sample model that `make model` fetches, and what transformers says of it.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The folder of the sample model with its blocks kept, as it was imported; else a sentence why a test cannot have it.
///
/// # Errors
/// If `make model` was not run, or another model stands there.
pub fn folder() -> Result<PathBuf, String> {
    let folder = root().join("model_repository/llm/1");
    let config = fs::read_to_string(folder.join("config.json"))
        .map_err(|_| "skipped: no model in model_repository/llm/1, run `make model` first".to_owned())?;
    let config: Value = serde_json::from_str(&config).map_err(|err| format!("skipped: its config.json: {err}"))?;
    let facts = [&config["hidden_size"], &config["num_hidden_layers"], &config["quantization_config"]["quant_method"]];
    if facts != [&Value::from(576), &Value::from(30), &Value::from("gguf_blocks")] {
        return Err("skipped: model_repository/llm/1 holds another model than `make model` puts there".into());
    }
    Ok(folder)
}

/// The same for a test that passes without it, but not in silence: the harness hides what passing tests print, not this.
pub fn folder_or_say_why_not() -> Option<PathBuf> {
    folder().map_err(|reason| writeln!(std::io::stderr(), "{reason}")).ok()
}

/// A prompt and what follows it.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub text: String,
    pub ids: Vec<u32>,
    /// The five best tokens after the prompt, and their log-probabilities.
    pub top: Vec<(u32, f64)>,
    /// What comes by always taking the best, up to 64 tokens or an end.
    pub greedy_ids: Vec<u32>,
    pub greedy_text: String,
    /// Of each of those, how much better it was than the next, in log-probability.
    pub margins: Vec<f64>,
}

/// The prompts of `goldens/sample.json`.
///
/// # Panics
/// If the golden is not one of `make.py`.
pub fn prompts() -> Vec<Prompt> {
    let entries = golden("sample.json");
    let ids = |value: &Value| numbers(value).into_iter().map(|id| id as u32).collect::<Vec<_>>();
    let text = |value: &Value| value.as_str().expect("a golden's texts are texts").to_owned();
    let prompts = entries["prompts"].as_array().expect("a list of prompts").iter();
    let prompts = prompts.map(|entry| Prompt {
        text: text(&entry["prompt"]),
        ids: ids(&entry["prompt_ids"]),
        top: ids(&entry["top_ids"]).into_iter().zip(numbers(&entry["top_logprobs"])).collect(),
        greedy_ids: ids(&entry["greedy_ids"]),
        greedy_text: text(&entry["greedy_text"]),
        margins: numbers(&entry["greedy_margins"]),
    });
    prompts.collect()
}

/// Texts that the sample model wrote at temperature 1, in tokens: 2,048 positions with a token after them.
///
/// # Panics
/// If the golden is not one of `make.py`.
pub fn quality_texts() -> Vec<Vec<u32>> {
    let entries = golden("quality.json");
    let texts = entries["texts"].as_array().expect("a list of texts").iter();
    texts.map(|text| numbers(text).into_iter().map(|id| id as u32).collect()).collect()
}

fn golden(name: &str) -> Value {
    let path = root().join("tests/goldens").join(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|err| panic!("{}: {err}", path.display()));
    serde_json::from_str(&text).expect("a golden is JSON")
}

fn numbers(value: &Value) -> Vec<f64> {
    let numbers = value.as_array().expect("a list of numbers").iter();
    numbers.map(|number| number.as_f64().expect("a list of numbers")).collect()
}
