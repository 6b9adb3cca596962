//! Answers that must match something, and several answers to one prompt, on a tiny model and on the sample model.

#![allow(clippy::unwrap_used, clippy::needless_pass_by_value, reason = "helpers of tests fail as tests do")]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use drafthorse::ServerConfig;
use drafthorse::generate::{Answer, Dialect, GenerateRequest, Prompt, ServedModel, Whole};
use drafthorse::params::GenerateParams;
use drafthorse::serve::Server;
use drafthorse_control::FinishReason;
use drafthorse_tests::{sample, tiny};
use serde_json::{Value, json};
use tempfile::TempDir;

struct Served {
    model: Arc<ServedModel>,
    _server: Server,
    _repository: TempDir,
}

/// Serves the model that `put` puts into a folder.
async fn serve(put: impl FnOnce(&Path), speculate: &str) -> Served {
    let repository = tempfile::tempdir().unwrap();
    let folder = repository.path().join("llm");
    std::fs::create_dir_all(&folder).unwrap();
    put(&folder.join("1"));
    let flags = ["--model-repository", repository.path().to_str().unwrap(), "--speculate-method", speculate];
    let more = ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--num-threads=2", "--kv-cache-bytes=64M"];
    let mut server = Server::start(ServerConfig::parse(flags.iter().chain(&more)).unwrap()).await.unwrap();
    assert_eq!(server.loaded().await, Vec::<String>::new());
    let model = Arc::clone(&server.app.repository.model("llm", "").unwrap().served);
    Served { model, _server: server, _repository: repository }
}

async fn tiny(speculate: &str) -> Served {
    let put = |folder: &Path| {
        std::fs::create_dir(folder).unwrap();
        tiny::write_model(folder);
    };
    serve(put, speculate).await
}

async fn sample(speculate: &str) -> Option<Served> {
    let weights = sample::folder_or_say_why_not()?.canonicalize().unwrap();
    Some(serve(|folder| std::os::unix::fs::symlink(weights, folder).unwrap(), speculate).await)
}

impl Served {
    async fn answer(&self, prompt: &str, params: Value) -> Answer {
        let params = GenerateParams::from_map(params.as_object().unwrap()).unwrap();
        let prompt = match self.model.chat_template().filter(|_| self.model.max_len() > 1000) {
            Some(_) => {
                Prompt::Rendered(format!("<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n").into())
            }
            None => Prompt::text(prompt),
        };
        let request = GenerateRequest::new(prompt, params, Dialect::Tensors);
        self.model.generate_choices(request).await.unwrap().whole().await.unwrap()
    }

    async fn one(&self, prompt: &str, params: Value) -> Whole {
        self.answer(prompt, params).await.choices.remove(0)
    }
}

fn with(mut params: Value, more: Value) -> Value {
    params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    params
}

/// Ways to sample that every constraint is tried with.
fn samplings() -> [Value; 4] {
    [
        json!({"temperature": 0}),
        json!({"temperature": 0.8, "seed": 1}),
        json!({"temperature": 1.2, "top_p": 0.95, "seed": 2}),
        json!({"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2}),
    ]
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "role": {"enum": ["user", "admin"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "required": ["name", "age", "role", "tags"],
        "additionalProperties": false,
    })
}

/// That `text` is what [`person`] asks for.
fn check_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
    let person = value.as_object().unwrap();
    let keys: Vec<&String> = person.keys().collect();
    assert_eq!(keys, ["name", "age", "role", "tags"], "{text}");
    let name = person["name"].as_str().unwrap().chars().count();
    let tags = person["tags"].as_array().unwrap();
    assert!((1..=12).contains(&name), "{text}");
    assert!(person["age"].as_u64().is_some_and(|age| age <= 150), "{text}");
    assert!(["user", "admin"].contains(&person["role"].as_str().unwrap()), "{text}");
    assert!(tags.len() <= 3 && tags.iter().all(|tag| tag.as_str().unwrap().chars().count() <= 8), "{text}");
}

/// Answers under every constraint, checked; in order, so that those of two servers can be compared.
async fn guided_answers(served: &Served, prompt: &str) -> Vec<String> {
    let mut texts = Vec::new();
    for sampling in samplings() {
        let ask = async |constraint: Value, max_tokens: u32| {
            let params = with(with(sampling.clone(), constraint), json!({"max_tokens": max_tokens}));
            served.one(prompt, params).await
        };
        let choice = ask(json!({"guided_choice": ["positive", "negative", "neither (nor)"]}), 40).await;
        assert!(["positive", "negative", "neither (nor)"].contains(&&*choice.text), "{:?}", choice.text);
        assert_eq!(choice.finish.reason, FinishReason::Stop);

        let regex = ask(json!({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2,5}!"}}), 40).await;
        let (digits, rest) = regex.text.split_once('-').unwrap();
        let letters = rest.strip_suffix('!').unwrap();
        assert!(digits.len() == 3 && digits.bytes().all(|b| b.is_ascii_digit()), "{:?}", regex.text);
        assert!(
            (2..=5).contains(&letters.len()) && letters.bytes().all(|b| b.is_ascii_lowercase()),
            "{:?}",
            regex.text
        );

        // White space as a model likes it may take its time, so it gets none here.
        let schema = ask(json!({"guided_json": person(), "guided_whitespace_pattern": " ?"}), 110).await;
        assert_eq!(schema.finish.reason, FinishReason::Stop, "{:?}", schema.text);
        check_person(&schema.text);

        let grammar = "start: \"[\" (/[a-z]+/ (\", \" /[a-z]+/){0,2})? \"]\"";
        let list = ask(json!({"guided_grammar": grammar}), 60).await;
        let is_over = list.finish.reason == FinishReason::Stop;
        assert!(list.text.starts_with('[') && list.text.ends_with(']') == is_over, "{:?}", list.text);
        texts.extend([choice.text, regex.text, schema.text, list.text]);
    }
    texts
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tiny_models_answers_match_with_and_without_speculation() {
    let plain = guided_answers(&tiny("none").await, "Give me").await;
    assert_eq!(guided_answers(&tiny("ngram").await, "Give me").await, plain);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sample_models_answers_match_with_and_without_speculation() {
    let Some(served) = sample("none").await else { return };
    let prompt = "Describe a user of a web site as JSON.";
    let plain = guided_answers(&served, prompt).await;
    let Some(drafting) = sample("ngram").await else { return };
    assert_eq!(guided_answers(&drafting, prompt).await, plain);
    // A real model's JSON with white space as it likes it, and an object of its own making.
    let free = json!({"temperature": 0, "max_tokens": 200, "response_format": {"type": "json_schema",
        "json_schema": {"name": "person", "schema": person()}}});
    check_person(&served.one(prompt, free).await.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_have_seeds_of_their_own_and_come_again() {
    let served = tiny("none").await;
    let prompt = "The prompt is longer than a block.";
    let params = json!({"temperature": 1.0, "seed": 7, "max_tokens": 20, "ignore_eos": true, "logprobs": 0});
    let texts = async |more: Value| {
        let answer = served.answer(prompt, with(params.clone(), more)).await;
        answer.choices.into_iter().map(|choice| (choice.text.clone(), choice.cumulative_logprob())).collect::<Vec<_>>()
    };
    let one = texts(json!({})).await;
    let four = texts(json!({"n": 4})).await;
    assert_eq!(one[0], four[0], "the first of several is the one of one");
    assert_eq!(four, texts(json!({"n": 4})).await);
    assert_eq!(four[..2], texts(json!({"n": 2})).await);
    for (i, choice) in four.iter().enumerate() {
        assert!(four[..i].iter().all(|other| other.0 != choice.0), "{four:?}");
    }
    let mut ranked = four.clone();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    assert_eq!(texts(json!({"n": 2, "best_of": 4})).await, ranked[..2]);
    let answer = served.answer(prompt, with(params, json!({"n": 3}))).await;
    let cached: Vec<u32> = answer.choices.iter().map(|choice| choice.finish.usage.cached_tokens).collect();
    assert_eq!((answer.usage.prompt_tokens, answer.usage.output_tokens), (34, 60));
    assert_eq!(cached[1..], [32, 32], "full blocks are not computed twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn words_that_are_shut_out_do_not_come() {
    let served = tiny("ngram").await;
    let params = json!({"temperature": 0, "max_tokens": 30, "ignore_eos": true});
    let plain = served.one("ab", params.clone()).await.text;
    let word: String = plain.chars().skip(3).take(2).collect();
    let without = served.one("ab", with(params.clone(), json!({"bad_words": [word]}))).await.text;
    assert!(plain.contains(&word) && !without.contains(&word), "{word:?}: {plain:?}, {without:?}");
    let allowed = served.one("ab", with(params, json!({"allowed_token_ids": [40, 41, 42]}))).await;
    assert!(allowed.token_ids.iter().all(|id| (40..43).contains(id)), "{:?}", allowed.token_ids);
}

/// A grammar of a test: its text in GBNF comes from it, and so does the judgement of what matches.
enum Part {
    Literal(&'static str),
    /// One of these characters.
    Class(&'static str),
    Sequence(Vec<Part>),
    Either(Vec<Part>),
    Optional(Box<Part>),
    Some(Box<Part>),
    /// `root` again, in parentheses.
    Again,
}

impl Part {
    fn random(rng: &mut impl FnMut(usize) -> usize, depth: usize) -> Part {
        let several = |rng: &mut _| (0..2).map(|_| Part::random(rng, depth - 1)).collect();
        match rng(if depth == 0 { 2 } else { 7 }) {
            0 => Part::Literal(["ab", "a", "(b", "x\"y"][rng(4)]),
            1 => Part::Class(["abc", "(]", "0123456789"][rng(3)]),
            2 => Part::Sequence(several(rng)),
            3 => Part::Either(several(rng)),
            4 => Part::Optional(Box::new(Part::random(rng, depth - 1))),
            5 => Part::Some(Box::new(Part::random(rng, depth - 1))),
            _ => Part::Again,
        }
    }

    fn gbnf(&self) -> String {
        let joined = |parts: &[Part], by: &str| parts.iter().map(Part::gbnf).collect::<Vec<_>>().join(by);
        match self {
            Part::Literal(text) => format!("\"{}\"", text.replace('"', "\\\"")),
            Part::Class(chars) => format!("[{}]", chars.replace(']', "\\]").replace("0123456789", "0-9")),
            Part::Sequence(parts) => joined(parts, " "),
            Part::Either(ways) => format!("({})", joined(ways, "\n  | ")),
            Part::Optional(part) => format!("({})?", part.gbnf()),
            Part::Some(part) => format!("({})+", part.gbnf()),
            Part::Again => "\"<\" root \">\"".into(),
        }
    }

    /// Where a match that begins at `at` may end.
    fn ends(&self, root: &Part, text: &[u8], at: usize) -> BTreeSet<usize> {
        let then = |ends: BTreeSet<usize>, part: &Part| -> BTreeSet<usize> {
            ends.iter().flat_map(|&at| part.ends(root, text, at)).collect()
        };
        match self {
            Part::Literal(literal) if text[at..].starts_with(literal.as_bytes()) => [at + literal.len()].into(),
            Part::Class(chars) if text.get(at).is_some_and(|c| chars.as_bytes().contains(c)) => [at + 1].into(),
            Part::Literal(_) | Part::Class(_) => BTreeSet::new(),
            Part::Sequence(parts) => parts.iter().fold([at].into(), then),
            Part::Either(ways) => ways.iter().flat_map(|way| way.ends(root, text, at)).collect(),
            Part::Optional(part) => {
                let mut ends = part.ends(root, text, at);
                ends.insert(at);
                ends
            }
            Part::Some(part) => {
                let (mut all, mut new) = (BTreeSet::new(), part.ends(root, text, at));
                while !new.is_subset(&all) {
                    all.extend(&new);
                    new = then(new, part);
                }
                all
            }
            Part::Again if text.get(at) == Some(&b'<') => {
                let inner = root.ends(root, text, at + 1);
                inner.into_iter().filter(|&end| text.get(end) == Some(&b'>')).map(|end| end + 1).collect()
            }
            Part::Again => BTreeSet::new(),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_match_random_grammars_in_gbnf() {
    let served = tiny("none").await;
    let mut state = 12345_u64;
    let mut rng = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let (mut over, mut again) = (0, 0);
    for round in 0..60 {
        // A way without recursion, so that there is an end.
        let root = Part::Either(vec![Part::random(&mut rng, 3), Part::Class("abc")]);
        let gbnf = format!("root ::= {} end # {round}\nend ::= \"\"", root.gbnf());
        let params = json!({"guided_grammar": gbnf, "temperature": 1.3, "seed": round, "max_tokens": 90});
        let answer = served.one("Give me", params).await;
        if answer.finish.reason == FinishReason::Stop {
            over += 1;
            again += usize::from(answer.text.contains('<'));
            let ends = root.ends(&root, answer.text.as_bytes(), 0);
            assert!(ends.contains(&answer.text.len()), "{:?} is not of\n{gbnf}", answer.text);
        }
    }
    assert!(over > 40 && again > 3, "{over} answers ended, {again} recurred");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_json_by_a_grammar_in_gbnf() {
    let served = tiny("ngram").await;
    let gbnf = r#"
        root   ::= object   # white space only after commas
        value  ::= object | array | string | number | ("true" | "false" | "null")
        object ::= "{" (string ":" value ("," " "? string ":" value)*)? "}"
        array  ::=
          "[" (
            value ("," " "? value)*
          )? "]"
        string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})){0,4} "\""
        number ::= "-"? ("0" | [1-9] [0-9]{0,3}) ("." [0-9]{1,3})? ([eE] [-+]? [0-9])?"#;
    let mut over = 0;
    for seed in 0..20 {
        let params = json!({"guided_grammar": gbnf, "temperature": 1.0, "seed": seed, "max_tokens": 100});
        let answer = served.one("Give me", params).await;
        assert!(answer.text.starts_with('{'), "{:?}", answer.text);
        if answer.finish.reason == FinishReason::Stop {
            over += 1;
            let parsed: Result<Value, _> = serde_json::from_str(&answer.text);
            // Half of a surrogate pair is JSON by the grammar and not to serde_json.
            assert!(parsed.is_ok() || answer.text.contains("\\u"), "{:?}: {parsed:?}", answer.text);
        }
    }
    assert!(over > 5, "{over} answers ended");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tag_is_followed_once_its_trigger_has_come() {
    let served = tiny("none").await;
    let tag = json!({"triggers": ["e", "!"], "structures": [
        {"begin": "ex=", "schema": {"type": "integer", "minimum": 0, "maximum": 99}, "end": ";"},
        {"begin": "ey", "schema": {"enum": ["no"]}, "end": ""},
        {"begin": "!", "schema": {"type": "boolean"}, "end": "e"}]});
    let ways = [("ex=", ";"), ("ey", ""), ("!", "e")];
    let (mut tags, mut free) = (0, 0);
    for seed in 0..20 {
        let params = json!({"structural_tag": tag, "temperature": 1.3, "seed": seed, "max_tokens": 100});
        let text = served.one("Give me", params).await.text;
        let mut rest = text.as_str();
        while let Some(trigger) = rest.find(['e', '!']) {
            free += trigger;
            rest = &rest[trigger..];
            let Some((begin, end)) = ways.iter().find(|(begin, _)| rest.starts_with(begin)) else {
                // Cut off by max_tokens.
                assert!(
                    rest.len() < 3 && ways.iter().any(|(begin, _)| begin.starts_with(rest)),
                    "{rest:?} in {text:?}"
                );
                break;
            };
            let inside = rest[begin.len()..].trim_start();
            let digits = inside.find(|c: char| !c.is_ascii_digit()).unwrap_or(inside.len());
            let value = match *begin {
                "ex=" => {
                    [&inside[..digits]].into_iter().find(|digits| digits.parse().is_ok_and(|number: u32| number < 100))
                }
                "ey" => ["\"no\""].into_iter().find(|value| inside.starts_with(value)),
                _ => ["true", "false"].into_iter().find(|value| inside.starts_with(value)),
            };
            let after = value.map(|value| inside[value.len()..].trim_start());
            let Some(next) = after.and_then(|after| after.strip_prefix(end)) else {
                // Cut off, too.
                assert!(inside.len() < 6 || after == Some(""), "{inside:?} in {text:?}");
                break;
            };
            tags += 1;
            rest = next;
        }
    }
    assert!(tags > 5 && free > 50, "{tags} tags, {free} free characters before them");
}
