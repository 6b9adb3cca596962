//! What a mask costs, over the sample model's vocabulary.
//!
//! `cargo test --release -p drafthorse-worker --lib a_mask_costs -- --ignored --nocapture`; `DRAFTHORSE_TOKENIZER` names another
//! `tokenizer.json` of byte-level BPE.

#![allow(clippy::print_stdout, reason = "a bench prints")]

use std::collections::HashMap;
use std::time::Instant;

use drafthorse_control::{Grammar, TokenId};
use serde_json::Value;

use super::{Grammars, Matcher, TokenBytes};

const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../model_repository/llm/1/tokenizer.json");

const PEOPLE: &str = r#"{"type": "array", "items": {"type": "object", "required": ["name", "age", "role"], "additionalProperties": false,
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "role": {"enum": ["user", "admin"]}}}}"#;
const TEXT: &str = r#"[{"name": "Ada Lovelace", "age": 36, "role": "admin"}, {"name": "Jean-Luc \"Le Grand\" O'Neill", "age": 104,
  "role": "user"}, {"name": "Zoë Washington-Smith the younger, of London", "age": 7, "role": "user"}]"#;

/// The bytes of each token of a byte-level BPE vocabulary; the end of a text is token 0.
fn vocabulary(tokenizer: &Value) -> TokenBytes {
    // Printable bytes stand for themselves, the others in order for the characters from 256 on.
    let printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut bytes: HashMap<char, u8> = HashMap::new();
    let mut others = 256..;
    for byte in 0..256_u32 {
        let code = if printable(&byte) { byte } else { others.next().unwrap() };
        bytes.insert(char::from_u32(code).unwrap(), byte as u8);
    }
    let words = tokenizer["model"]["vocab"].as_object().unwrap();
    let mut by_id = vec![""; words.len()];
    words.iter().for_each(|(word, id)| by_id[id.as_u64().unwrap() as usize] = word);
    let special: Vec<&Value> =
        tokenizer["added_tokens"].as_array().unwrap().iter().map(|token| &token["content"]).collect();
    let mut tokens = TokenBytes::new(vec![0]);
    for word in by_id {
        match word.chars().map(|c| bytes.get(&c).copied()).collect::<Option<Vec<u8>>>() {
            Some(word_bytes) if !special.iter().any(|special| *special == word) => tokens.push(&word_bytes),
            _ => tokens.push_special(word.as_bytes()),
        }
    }
    tokens
}

/// The longest tokens first.
fn tokenize(tokens: &TokenBytes, mut text: &[u8]) -> Vec<TokenId> {
    let ids: HashMap<&[u8], usize> =
        tokens.words().iter().enumerate().map(|(id, word)| (word.as_slice(), id)).collect();
    let mut out = Vec::new();
    while !text.is_empty() {
        let length = (1..=text.len().min(32)).rev().find(|&length| ids.contains_key(&text[..length])).unwrap();
        out.push(ids[&text[..length]] as TokenId);
        text = &text[length..];
    }
    out
}

#[test]
#[ignore = "prints times"]
fn a_mask_costs() {
    let path = std::env::var("DRAFTHORSE_TOKENIZER").unwrap_or(TOKENIZER.into());
    let tokenizer = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let tokens = vocabulary(&serde_json::from_slice(&tokenizer).unwrap());
    let words = tokens.len().div_ceil(32);
    let free: String = "the quick brown fox jumps over the lazy dog and ".repeat(3);
    let text = tokenize(&tokens, TEXT.as_bytes());
    let letters = tokenize(&tokens, free.as_bytes());
    let grammars = Grammars::new(tokens);
    println!("grammar      rows  compile_us  mean_us  p50_us  p99_us  longest_us   (first time; then again)");
    for (name, grammar, text) in [
        ("json schema", Grammar::JsonSchema(PEOPLE.into()), &text),
        ("any json", Grammar::JsonSchema(r#"{"type": "array"}"#.into()), &text),
        ("regex", Grammar::Regex("[a-z ]*".into()), &letters),
    ] {
        let begun = Instant::now();
        let compiled = grammars.compile(&grammar).unwrap();
        let compiling = begun.elapsed().as_secs_f64() * 1e6;
        // A second sequence of one grammar starts as the first did: nothing is remembered between them but the compiled grammar.
        for _ in 0..2 {
            let mut matcher = Matcher::new(&compiled, &[]).unwrap();
            let mut mask = vec![u32::MAX; words];
            let mut times = Vec::new();
            for &token in text {
                let begun = Instant::now();
                matcher.fill(&[], words, &mut mask).unwrap();
                times.push(begun.elapsed().as_secs_f64() * 1e6);
                assert_eq!(mask[token as usize / 32] >> (token % 32) & 1, 1, "token {token} may come");
                matcher.accept(token).unwrap();
            }
            let mean = times.iter().sum::<f64>() / times.len() as f64;
            times.sort_by(f64::total_cmp);
            let at = |share: usize| times[(times.len() - 1) * share / 100];
            println!(
                "{name:11} {:5} {compiling:11.0} {mean:8.2} {:7.2} {:7.2} {:11.2}",
                times.len(),
                at(50),
                at(99),
                at(100)
            );
        }
    }
}
