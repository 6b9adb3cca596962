//! Log-probabilities as vLLM writes them: an object a token, of ids to log-probability, rank and text.

use drafthorse_control::TokenLogprobs;
use serde_json::{Map, Value, json};

use crate::text::Tokenizer;

/// JSON has no infinity; this is what OpenAI writes for a token that cannot come.
pub const LOWEST: f32 = -9999.0;

/// Those of an answer's tokens.
pub fn of_output(tokenizer: &Tokenizer, tokens: &[TokenLogprobs]) -> Value {
    tokens.iter().map(|token| of_token(tokenizer, token)).collect()
}

/// Those of a prompt's tokens, the first of which has none: `null`.
pub fn of_prompt(tokenizer: &Tokenizer, tokens: &[TokenLogprobs]) -> Value {
    std::iter::once(Value::Null).chain(tokens.iter().map(|token| of_token(tokenizer, token))).collect()
}

fn of_token(tokenizer: &Tokenizer, token: &TokenLogprobs) -> Value {
    let ranked = std::iter::once(&token.token).chain(&token.top);
    let object: Map<String, Value> = ranked
        .map(|ranked| {
            let (text, _) = tokenizer.token_text(ranked.token);
            let logprob = ranked.logprob.max(LOWEST);
            (ranked.token.to_string(), json!({"logprob": logprob, "rank": ranked.rank, "decoded_token": text}))
        })
        .collect();
    Value::Object(object)
}
