//! Messages to a prompt, by the checkpoint's own chat template.

use std::path::Path;

use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value, json};

use super::jinja::{RAISED, environment, fuel, text_bytes, without_generation_blocks};
use crate::error::{Result, ServerError};

/// The name of the template that is used when the caller names none.
const DEFAULT: &str = "default";

/// The name of the template for requests with tools, where a checkpoint has one.
const TOOL_USE: &str = "tool_use";

/// A model's chat templates.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    /// `bos_token` and the like, which templates print.
    special_tokens: Map<String, Value>,
}

/// What a template is rendered with.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    pub messages: Vec<Value>,
    pub tools: Option<Value>,
    pub documents: Option<Value>,
    /// End with what opens the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables, `chat_template_kwargs` of a request.
    pub variables: Map<String, Value>,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`; `None` if the model has neither.
    ///
    /// # Errors
    /// With the file's path, if it cannot be read or its template does not parse.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>> {
        let config_path = dir.join("tokenizer_config.json");
        let bad = |path: &Path, reason: String| ServerError::BadFile { path: path.into(), reason };
        let config: Value = match std::fs::read(&config_path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| bad(&config_path, error.to_string()))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Value::Null,
            Err(source) => return Err(ServerError::Read { path: config_path, source }),
        };
        let special_tokens = special_tokens(&config);
        let file = dir.join("chat_template.jinja");
        if file.exists() {
            let source =
                std::fs::read_to_string(&file).map_err(|source| ServerError::Read { path: file.clone(), source })?;
            return ChatTemplate::new(vec![(DEFAULT.into(), source)], special_tokens)
                .map(Some)
                .map_err(|reason| bad(&file, reason));
        }
        let templates = named_templates(&config["chat_template"]);
        if templates.is_empty() {
            return Ok(None);
        }
        ChatTemplate::new(templates, special_tokens).map(Some).map_err(|reason| bad(&config_path, reason))
    }

    /// Templates by name; one of them alone, or the one named `default`, is used for everything.
    fn new(mut templates: Vec<(String, String)>, special_tokens: Map<String, Value>) -> Result<Self, String> {
        if let [(name, _)] = &mut templates[..] {
            *name = DEFAULT.into();
        }
        let mut env = environment();
        for (name, source) in templates {
            let source = without_generation_blocks(&source);
            env.add_template_owned(name.clone(), source).map_err(|error| format!("chat template {name}: {error}"))?;
        }
        env.get_template(DEFAULT).map_err(|_| "none of the chat templates is named default".to_string())?;
        Ok(ChatTemplate { env, special_tokens })
    }

    /// The prompt of a conversation.
    ///
    /// # Errors
    /// `BadInput` if a message is no message, the template refuses it, or fails.
    pub fn render(&self, chat: &Chat) -> Result<String> {
        let messages = chat.messages.iter().enumerate().map(|(at, message)| plain_message(at, message));
        let messages: Vec<Value> = messages.collect::<Result<_>>()?;
        let mut variables = self.special_tokens.clone();
        variables.insert("messages".into(), Value::Array(messages));
        variables.insert("tools".into(), json!(chat.tools));
        variables.insert("documents".into(), json!(chat.documents));
        variables.insert("add_generation_prompt".into(), Value::Bool(chat.add_generation_prompt));
        variables.extend(chat.variables.clone());

        let mut env = self.env.clone();
        env.set_fuel(Some(fuel(variables.values().map(text_bytes).sum())));
        let with_tools = env.get_template(TOOL_USE).ok().filter(|_| chat.tools.is_some());
        let template = match with_tools {
            Some(template) => template,
            None => env.get_template(DEFAULT).map_err(ServerError::internal)?,
        };
        let rendered = template.render(Serde(&variables)).or_else(|error| {
            // Most templates want text where a message that only calls tools has none.
            match error.kind() != ErrorKind::OutOfFuel && without_nulls(&mut variables) {
                true => template.render(Serde(&variables)),
                false => Err(error),
            }
        });
        rendered.map_err(|error| match error.detail() {
            _ if error.kind() == ErrorKind::OutOfFuel => ServerError::bad_input(
                "messages",
                "the chat template took too many steps or too much memory and was stopped",
            ),
            Some(detail) if detail.starts_with(RAISED) => ServerError::bad_input("messages", detail),
            _ => ServerError::bad_input("messages", format!("the chat template failed: {error}")),
        })
    }
}

/// Makes contents that are null empty texts; false if there are none.
fn without_nulls(variables: &mut Map<String, Value>) -> bool {
    let messages = variables.get_mut("messages").and_then(Value::as_array_mut);
    let mut found = false;
    for content in messages.into_iter().flatten().filter_map(|message| message.get_mut("content")) {
        if content.is_null() {
            *content = "".into();
            found = true;
        }
    }
    found
}

/// `name_token: text` of the tokens that `tokenizer_config.json` names.
fn special_tokens(config: &Value) -> Map<String, Value> {
    let Some(config) = config.as_object() else { return Map::new() };
    let tokens = config.iter().filter(|(key, _)| key.ends_with("_token"));
    tokens
        .filter_map(|(key, value)| {
            let text = value.as_str().or_else(|| value["content"].as_str())?;
            Some((key.clone(), Value::String(text.into())))
        })
        .collect()
}

/// A template, or a list of `{"name": .., "template": ..}`.
fn named_templates(chat_template: &Value) -> Vec<(String, String)> {
    if let Some(source) = chat_template.as_str() {
        return vec![(DEFAULT.into(), source.into())];
    }
    let named = chat_template.as_array().into_iter().flatten();
    named.filter_map(|entry| Some((entry["name"].as_str()?.into(), entry["template"].as_str()?.into()))).collect()
}

/// A message as templates expect it: text parts joined, arguments of tool calls as objects.
fn plain_message(at: usize, message: &Value) -> Result<Value> {
    let bad = |field: String, reason: &str| ServerError::bad_input(format!("messages[{at}]{field}"), reason);
    let Some(message) = message.as_object() else { return Err(bad(String::new(), "must be an object")) };
    if message.get("role").and_then(Value::as_str).is_none() {
        return Err(bad(".role".into(), "must be a string"));
    }
    let mut message = message.clone();
    match message.get("content") {
        Some(Value::String(_)) => {}
        // An assistant that has said nothing, or called tools.
        None | Some(Value::Null) if message["role"] == "assistant" => {
            message.insert("content".into(), Value::Null);
        }
        None | Some(Value::Null) => {
            return Err(bad(".content".into(), "is missing, must be a string or a list of text parts"));
        }
        Some(Value::Array(parts)) => {
            let mut texts = Vec::with_capacity(parts.len());
            for (part_at, part) in parts.iter().enumerate() {
                let kind = part["type"].as_str().unwrap_or("text");
                match (kind, part["text"].as_str().or(part.as_str())) {
                    ("text" | "input_text", Some(text)) => texts.push(text),
                    ("text" | "input_text", None) => {
                        return Err(bad(format!(".content[{part_at}].text"), "must be a string"));
                    }
                    _ => {
                        let reason = format!("type {kind} is not supported, the model takes text only");
                        return Err(bad(format!(".content[{part_at}]"), &reason));
                    }
                }
            }
            let text = texts.join("\n");
            message.insert("content".into(), Value::String(text));
        }
        Some(_) => return Err(bad(".content".into(), "must be a string or a list of text parts")),
    }
    if let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
        for call in calls {
            let arguments = call.pointer("/function/arguments").and_then(Value::as_str);
            // What is not JSON is left to the template as it stands.
            if let Some(parsed) = arguments.and_then(|text| serde_json::from_str(text).ok()) {
                call["function"]["arguments"] = parsed;
            }
        }
    }
    Ok(Value::Object(message))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn template(source: &str) -> ChatTemplate {
        let tokens = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": true});
        ChatTemplate::new(vec![("any".into(), source.into())], special_tokens(&tokens)).unwrap()
    }

    fn chat(messages: Value) -> Chat {
        let Value::Array(messages) = messages else { panic!("a list is wanted") };
        Chat { messages, add_generation_prompt: true, ..Chat::default() }
    }

    /// The prompt, or the error's text.
    fn render(template: &str, chat: &Chat) -> String {
        self::template(template).render(chat).unwrap_or_else(|error| error.to_string())
    }

    const CHATML: &str = "{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}";

    #[test]
    fn blocks_leave_no_lines_behind() {
        let chat = chat(json!([{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Ho"}]));
        assert_eq!(
            render(CHATML, &chat),
            "<|im_start|>system\nBe kind.<|im_end|>\n\n<|im_start|>user\nHi<|im_end|>\n\n<|im_start|>assistant\nHo<|im_end|>\n\n\
             <|im_start|>assistant\n\n"
        );
    }

    #[test]
    fn speaks_the_python_that_templates_use() {
        let one = chat(json!([{"role": "user", "content": "a b"}]));
        let said = |template: &str| render(template, &one);
        assert_eq!(said("{{ bos_token }}{{ eos_token }}{{ pad_token }}"), "<s></s>");
        assert_eq!(said("{{ messages[0]['content'].split(' ')[-1].strip() }}"), "b");
        assert_eq!(
            said("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"),
            "1"
        );
        assert_eq!(said("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"), "01");
        assert_eq!(said("{{ true }} {{ none }} {{ messages[1:] | length }} {{ tools is none }}"), "True None 0 True");
        assert_eq!(said("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('y') }}"), "<y>");
        assert_eq!(said("{{ strftime_now('%Y') | length }}"), "4");
        assert_eq!(said("{{ messages[0].get('name', 'nobody') }}{{ messages[0].items() | list | length }}"), "nobody2");
        assert_eq!(said("{% generation %}x{% endgeneration %}"), "x");
        assert_eq!(
            said("{{ raise_exception('no system role') }}"),
            "messages: refused by the chat template: no system role"
        );
        assert!(said("{{ messages[0].content.nothing() }}").starts_with("messages: the chat template failed: "));
    }

    #[test]
    fn a_template_without_an_end_is_stopped() {
        let one = chat(json!([{"role": "user", "content": "a b"}]));
        let began = std::time::Instant::now();
        let said = |template: &str| render(template, &one);
        let stopped = "messages: the chat template took too many steps or too much memory and was stopped";
        let loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
        assert_eq!(said(loops), stopped);
        // Deep, and with many calls at each depth.
        assert_eq!(
            said("{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(16) }}"),
            stopped
        );
        for template in [
            "{% for i in range(1000000000) %}x{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
            "{% include 'default' %}",
        ] {
            let said = said(template);
            assert!(said.starts_with("messages: the chat template failed: "), "{template}: {said}");
        }
        assert!(began.elapsed().as_secs() < 60, "{:?}", began.elapsed());
        // What grows by doubling, or has itself in it many times over, before it is printed.
        let lists = "{% set ns = namespace(x=['a'], s='abcdefgh') %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
        let texts = "{% set s = 'x' * 1000000 %}{% set l = [s] * 100000 %}";
        for (begin, doing) in [
            (
                "{% set ns = namespace(s='abcdefgh') %}",
                "{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            ),
            (
                "{% set ns = namespace(s='abcdefgh') %}",
                "{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            ),
            ("", "{% macro d(s, n) %}{% if n %}{{ d(s ~ s, n - 1) }}{% endif %}{% endmacro %}{{ d('abcdefgh', 40) }}"),
            ("{% set s = 'x' * 100000 %}", "{% for i in range(100000) %}{{ s }}{% endfor %}"),
            (lists, "{{ ns.x }}"),
            (lists, "{{ ns.x | string | length }}"),
            (lists, "{{ ns.x | tojson | length }}"),
            (lists, "{{ '{}'.format(ns.x) | length }}"),
            (texts, "{{ ''.join(l) | length }}"),
            (texts, "{{ l | join | length }}"),
            (texts, "{{ l | join(', ') | length }}"),
            (texts, "{{ s.replace('x', s) | length }}"),
            (texts, "{{ s | replace('x', s) | length }}"),
            (texts, "{{ ('{0}' * 100000).format(s) | length }}"),
            ("", "{{ '{:90000000000}'.format(1) | length }}"),
            ("{% set s = '\\n' * 60000000 %}", "{{ s.splitlines() | length }}"),
            ("{% set s = 'a ' * 30000000 %}", "{{ s.split(' ') | length }}"),
        ] {
            let said = said(&format!("{begin}{doing}"));
            assert!(said == stopped, "{doing}: {}", &said[..said.len().min(200)]);
        }
        // What one rendering used up, the next has again.
        assert_eq!(said("{% for i in range(50000) %}{% endfor %}b"), "b");
    }

    #[test]
    fn a_long_conversation_may_cost_more_than_a_short_one() {
        let words = "word ".repeat(100_000);
        let long = chat(json!([{"role": "user", "content": words}]));
        let template = "{% for i in range(50) %}{{ messages[0].content | trim | length }}{% endfor %}";
        assert_eq!(render(template, &long).len(), 50 * 6);
        let made = "{% set s = 'word ' * 100000 %}{% for i in range(50) %}{{ s | trim | length }}{% endfor %}";
        let short = chat(json!([{"role": "user", "content": "x"}]));
        assert!(render(made, &short).ends_with("was stopped"));
    }

    #[test]
    fn tojson_is_pythons() {
        let mut chat = chat(json!([{"role": "user", "content": "x"}]));
        chat.tools =
            Some(json!([{"name": "get", "a": {"é\"": [1, 2.0, 1e-7, 1e20, null, true], "e": {}}, "<&'>": "\n\u{1}"}]));
        assert_eq!(
            render("{{ tools | tojson }}", &chat),
            r#"[{"name": "get", "a": {"é\"": [1, 2.0, 1e-07, 1e+20, null, true], "e": {}}, "<&'>": "\n\u0001"}]"#
        );
        chat.tools = Some(json!({"b": [1, {}], "a": "é🦀"}));
        assert_eq!(
            render("{{ tools | tojson(indent=2) }}", &chat),
            "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": \"é🦀\"\n}"
        );
        assert_eq!(
            render("{{ tools | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}", &chat),
            r#"{"a":"\u00e9\ud83e\udd80","b":[1,{}]}"#
        );
    }

    #[test]
    fn parts_and_tool_calls_become_what_templates_expect() {
        let parts =
            json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]);
        assert_eq!(render("{{ messages[0].content }}", &chat(parts)), "a\nb");
        let calls = json!([{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{\"x\": 1}"}}]}]);
        assert_eq!(render("{{ messages[0].tool_calls[0].function.arguments.x }}", &chat(calls)), "1");
        let bad = |messages: Value| render("", &chat(messages));
        assert_eq!(bad(json!([{"content": "x"}])), "messages[0].role: must be a string");
        assert_eq!(bad(json!(["x"])), "messages[0]: must be an object");
        assert_eq!(
            bad(json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])),
            "messages[0].content[0]: type image_url is not supported, the model takes text only"
        );
    }

    #[test]
    fn the_template_is_found_in_either_file() {
        let dir = tempfile::tempdir().unwrap();
        let render = |tools: Option<Value>| {
            let template = ChatTemplate::from_dir(dir.path());
            template
                .map(|template| template.map(|template| template.render(&Chat { tools, ..Chat::default() }).unwrap()))
        };
        assert_eq!(render(None).unwrap(), None);
        let config = json!({"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]});
        std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        assert_eq!(render(None).unwrap().unwrap(), "plain");
        assert_eq!(render(Some(json!([]))).unwrap().unwrap(), "tools");
        std::fs::write(dir.path().join("chat_template.jinja"), "file").unwrap();
        assert_eq!(render(None).unwrap().unwrap(), "file");
        std::fs::write(dir.path().join("chat_template.jinja"), "{% if %}").unwrap();
        let error = render(None).unwrap_err().to_string();
        assert!(error.contains("chat_template.jinja: chat template default: syntax error"), "{error}");
    }
}
