//! Log-probabilities in the two forms that OpenAI's routes have.

use drafthorse_control::{RankedToken, TokenId, TokenLogprobs};
use serde_json::{Map, Value, json};

use crate::generate::logprobs::LOWEST;
use crate::text::Tokenizer;

/// Chat's `logprobs` of some tokens.
pub(super) fn of_chat(tokenizer: &Tokenizer, tokens: &[TokenLogprobs]) -> Value {
    let entry = |ranked: &RankedToken| {
        let (text, bytes) = tokenizer.token_text(ranked.token);
        json!({"token": text, "logprob": ranked.logprob.max(LOWEST), "bytes": bytes})
    };
    let content = tokens.iter().map(|logprobs| {
        let mut token = entry(&logprobs.token);
        token["top_logprobs"] = logprobs.top.iter().map(entry).collect();
        token
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

/// Completions' `logprobs` of some tokens, the first of which stands `offset` characters into the text. Before them the prompt's
/// first token, which has none, if it is given.
pub(super) fn of_completion(
    tokenizer: &Tokenizer,
    first: Option<TokenId>,
    tokens: &[TokenLogprobs],
    mut offset: usize,
) -> Value {
    let mut texts = Vec::with_capacity(tokens.len() + 1);
    let mut logprobs: Vec<Value> = Vec::with_capacity(tokens.len() + 1);
    let mut tops: Vec<Value> = Vec::with_capacity(tokens.len() + 1);
    let mut offsets = Vec::with_capacity(tokens.len() + 1);
    if let Some(first) = first {
        let (text, _) = tokenizer.token_text(first);
        offsets.push(offset);
        offset += text.chars().count();
        texts.push(text);
        logprobs.push(Value::Null);
        tops.push(Value::Null);
    }
    for token in tokens {
        let (text, _) = tokenizer.token_text(token.token.token);
        offsets.push(offset);
        offset += text.chars().count();
        texts.push(text);
        logprobs.push(token.token.logprob.max(LOWEST).into());
        // The token itself is always among them, likely or not.
        let listed = token.top.iter().chain([&token.token]);
        let top: Map<String, Value> =
            listed.map(|ranked| (tokenizer.token_text(ranked.token).0, ranked.logprob.max(LOWEST).into())).collect();
        tops.push(Value::Object(top));
    }
    json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
}
