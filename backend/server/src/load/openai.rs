//! Requests to OpenAI's completions, streamed as server-sent events. Without TLS.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Request, Uri};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

use super::{Ask, Listener};

/// Of an answer that is no stream, this much is shown.
const SHOWN_BYTES: usize = 300;

#[derive(Clone)]
pub(super) struct Client {
    http: HttpClient<HttpConnector, Full<Bytes>>,
    completions: Uri,
}

impl Client {
    pub(super) fn new(url: &str) -> Result<Self, String> {
        let completions = format!("{url}/completions").parse().map_err(|error| format!("{url}: {error}"))?;
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Ok(Client { http: HttpClient::builder(TokioExecutor::new()).build(connector), completions })
    }

    pub(super) async fn send(&self, ask: &Ask, listener: &mut Listener) -> Result<(), String> {
        let mut body = json!({
            "model": ask.model,
            "prompt": ask.prompt,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        for (name, value) in &*ask.parameters {
            body[name] = value.clone();
        }
        let request = Request::post(self.completions.clone()).header(CONTENT_TYPE, "application/json");
        let request = request.body(Full::from(body.to_string())).map_err(|error| error.to_string())?;
        let response = self.http.request(request).await.map_err(|error| format!("{}: {error}", self.completions))?;
        let status = response.status();
        let mut body = response.into_body();
        if !status.is_success() {
            let body = body.collect().await.map_err(|error| error.to_string())?.to_bytes();
            return Err(format!("{status}: {}", String::from_utf8_lossy(&body[..body.len().min(SHOWN_BYTES)])));
        }
        let mut events = Events::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| error.to_string())?;
            let Some(data) = frame.data_ref() else { continue };
            for event in events.take(data) {
                hear(&event, listener)?;
            }
        }
        Ok(())
    }
}

/// Counts a chunk with text as a token, until the usage at the end says how many there were.
fn hear(event: &str, listener: &mut Listener) -> Result<(), String> {
    if event == "[DONE]" {
        return Ok(());
    }
    let event: Value = serde_json::from_str(event).map_err(|error| format!("{event:?}: {error}"))?;
    if let Some(error) = event.get("error") {
        return Err(error.to_string());
    }
    if event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
        listener.tokens(1);
    }
    let count = |name: &str| event["usage"][name].as_u64().map(|count| count as u32);
    if let Some(tokens) = count("completion_tokens") {
        listener.outcome.output_tokens = tokens;
    }
    listener.outcome.prompt_tokens = count("prompt_tokens").or(listener.outcome.prompt_tokens);
    Ok(())
}

/// The `data` lines of a stream that is cut anywhere.
#[derive(Default)]
struct Events {
    rest: Vec<u8>,
}

impl Events {
    fn take(&mut self, data: &[u8]) -> Vec<String> {
        self.rest.extend_from_slice(data);
        let Some(end) = self.rest.iter().rposition(|&byte| byte == b'\n') else { return Vec::new() };
        let rest = self.rest.split_off(end + 1);
        let lines = std::mem::replace(&mut self.rest, rest);
        let lines = String::from_utf8_lossy(&lines);
        let data = lines.lines().filter_map(|line| line.strip_prefix("data:"));
        data.map(|data| data.trim().to_owned()).filter(|data| !data.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::load::Outcome;

    #[test]
    fn events_are_whole_wherever_the_stream_is_cut() {
        let stream = "data: {\"a\": \"é\"}\r\n\r\n: a comment\n\ndata: [DONE]\n\n".as_bytes();
        for cut in 0..stream.len() {
            let mut events = Events::default();
            let mut all = events.take(&stream[..cut]);
            all.extend(events.take(&stream[cut..]));
            assert_eq!(all, ["{\"a\": \"é\"}", "[DONE]"], "cut at {cut}");
        }
    }

    #[test]
    fn tokens_are_counted_by_chunk_and_corrected_by_usage() {
        let mut listener = Listener { started: Instant::now(), outcome: Outcome::default() };
        for event in [
            r#"{"choices": [{"text": "a"}]}"#,
            r#"{"choices": [{"text": ""}]}"#,
            r#"{"choices": [{"text": "b"}]}"#,
            r#"{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}"#,
            "[DONE]",
        ] {
            hear(event, &mut listener).unwrap();
        }
        let outcome = listener.outcome;
        assert_eq!((outcome.chunks.len(), outcome.output_tokens, outcome.prompt_tokens), (2, 3, Some(4)));
    }
}
