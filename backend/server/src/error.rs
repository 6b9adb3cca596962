//! Everything that can go wrong in the server, and the one place that turns it into gRPC and HTTP codes.

use std::net::SocketAddr;
use std::path::PathBuf;

use axum::http::StatusCode;
use drafthorse_control::RowError;
use drafthorse_engine::EngineError;
use drafthorse_proto::PbtxtError;
use tonic::{Code, Status};

/// What a caller, or the operator, is told.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    // A request that cannot be answered as it stands.
    #[error("{field}: {reason}")]
    BadInput { field: String, reason: String },
    #[error("{field} is not valid JSON at line {line} column {column}: {reason}")]
    BadJson { field: String, line: usize, column: usize, reason: String },
    /// `at_least` if the tokens were not counted, for there are too many by their bytes alone.
    #[error("prompt has {}{tokens} tokens, the model takes at most {max} with at least one for the answer", if *at_least { "at least " } else { "" })]
    PromptTooLong { tokens: usize, at_least: bool, max: usize },
    #[error("the request is larger than {max} bytes")]
    TooLarge { max: usize },

    // What the request names is not here, or not now.
    #[error("request for unknown model: '{name}' is not found")]
    UnknownModel { name: String },
    #[error("request for unknown model: '{name}' version {version} is not found")]
    UnknownVersion { name: String, version: String },
    #[error("model '{name}' is not ready: {reason}")]
    NotReady { name: String, reason: String },
    #[error("{waiting} requests are waiting, at most {max} may")]
    Overloaded { waiting: usize, max: usize },
    #[error("grammars of other requests are still being compiled after {seconds} s; try again")]
    CompilersBusy { seconds: u64 },
    #[error("the request waited longer than its queue timeout of {micros} us")]
    QueueTimeout { micros: u64 },
    #[error("the request's deadline has passed")]
    DeadlineExceeded,
    #[error("the server is exiting")]
    Exiting,
    #[error("the engine has stopped: {reason}")]
    EngineStopped { reason: String },
    /// `field` of the request, if it is one.
    #[error("{what} is not supported")]
    Unsupported { what: String, field: Option<String> },
    #[error("explicit model load and unload need --model-control-mode=explicit")]
    NotExplicit,
    #[error("the request was cancelled")]
    Cancelled,
    /// What the request asks for cannot be met any more: its grammar or its allowed tokens leave nothing to say.
    #[error("generation failed: {reason}")]
    DeadEnd { reason: String },
    /// One sequence failed while the others live.
    #[error("generation failed: {reason}")]
    Failed { reason: String },
    #[error("internal error: {reason}")]
    Internal { reason: String },

    // A model, or the server, that cannot start.
    #[error("load failed for model '{name}': {reason}")]
    LoadFailed { name: String, reason: String },
    /// What the worker or the engine says of a checkpoint or a setting.
    #[error("{reason}")]
    CannotStart { reason: String },
    #[error("setting {name} is {got}, must be {must}")]
    BadSetting { name: String, got: String, must: String },
    #[error("unknown setting {name}{hint}")]
    UnknownSetting { name: String, hint: String },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: {reason}", path.display())]
    BadFile { path: PathBuf, reason: String },
    #[error("{}: {source}", path.display())]
    Pbtxt { path: PathBuf, source: PbtxtError },
    #[error("cannot listen on {address}: {source}")]
    Bind { address: SocketAddr, source: std::io::Error },
    #[error("{what} server: {reason}")]
    Serve { what: &'static str, reason: String },
}

/// This crate's result.
pub type Result<T, E = ServerError> = std::result::Result<T, E>;

impl ServerError {
    /// A value of the request that is wrong: the field as the caller wrote it, and what is wrong with it.
    pub fn bad_input(field: impl Into<String>, reason: impl Into<String>) -> Self {
        ServerError::BadInput { field: field.into(), reason: reason.into() }
    }

    /// A JSON text that does not parse, with the position at which it stopped making sense.
    pub fn bad_json(field: impl Into<String>, error: &serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        let text = error.to_string();
        // serde_json ends its messages with the position, which stands in front here.
        let reason = text.split(" at line ").next().unwrap_or(&text).to_string();
        ServerError::BadJson { field: field.into(), line, column, reason }
    }

    /// Something this server does not do.
    pub fn unsupported(what: impl Into<String>) -> Self {
        ServerError::Unsupported { what: what.into(), field: None }
    }

    /// A field of the request that asks for something this server does not do.
    pub fn unsupported_field(field: impl Into<String>, what: impl Into<String>) -> Self {
        ServerError::Unsupported { what: what.into(), field: Some(field.into()) }
    }

    /// The same of a field that the caller knows by another name.
    #[must_use]
    pub fn renamed(mut self, from: &str, to: &str) -> Self {
        if let ServerError::BadInput { field, .. } | ServerError::BadJson { field, .. } = &mut self
            && field == from
        {
            to.clone_into(field);
        }
        self
    }

    pub fn internal(reason: impl std::fmt::Display) -> Self {
        ServerError::Internal { reason: reason.to_string() }
    }

    /// The code a gRPC caller gets.
    pub fn code(&self) -> Code {
        match self {
            ServerError::BadInput { .. }
            | ServerError::BadJson { .. }
            | ServerError::PromptTooLong { .. }
            | ServerError::TooLarge { .. }
            | ServerError::DeadEnd { .. }
            | ServerError::LoadFailed { .. }
            | ServerError::CannotStart { .. }
            | ServerError::BadSetting { .. }
            | ServerError::UnknownSetting { .. }
            | ServerError::BadFile { .. }
            | ServerError::Pbtxt { .. } => Code::InvalidArgument,
            ServerError::UnknownModel { .. } | ServerError::UnknownVersion { .. } => Code::NotFound,
            ServerError::NotReady { .. }
            | ServerError::Overloaded { .. }
            | ServerError::CompilersBusy { .. }
            | ServerError::QueueTimeout { .. }
            | ServerError::Exiting
            | ServerError::EngineStopped { .. }
            | ServerError::NotExplicit => Code::Unavailable,
            ServerError::Unsupported { .. } => Code::Unimplemented,
            ServerError::Cancelled => Code::Cancelled,
            ServerError::DeadlineExceeded => Code::DeadlineExceeded,
            ServerError::Failed { .. }
            | ServerError::Internal { .. }
            | ServerError::Read { .. }
            | ServerError::Bind { .. }
            | ServerError::Serve { .. } => Code::Internal,
        }
    }

    /// The code an HTTP caller gets.
    pub fn http_status(&self) -> StatusCode {
        if let ServerError::TooLarge { .. } = self {
            return StatusCode::PAYLOAD_TOO_LARGE;
        }
        match self.code() {
            Code::InvalidArgument => StatusCode::BAD_REQUEST,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            // What proxies log for a client that went away.
            Code::Cancelled => StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
            Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl From<ServerError> for Status {
    fn from(error: ServerError) -> Self {
        Status::new(error.code(), error.to_string())
    }
}

impl From<EngineError> for ServerError {
    /// What the engine refuses is the caller's business; what stops it is the operator's, and the caller is told so.
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::EmptyPrompt => ServerError::bad_input("prompt", "must not be empty"),
            // The engine counts without the first token of the answer.
            EngineError::PromptTooLong { tokens, max } => {
                ServerError::PromptTooLong { tokens, at_least: false, max: max + 1 }
            }
            EngineError::NoOutput => ServerError::bad_input("max_tokens", "is 0, must be at least 1"),
            EngineError::TooManyTokens { .. } | EngineError::CacheTooSmall { .. } => {
                ServerError::bad_input("max_tokens", error.to_string())
            }
            EngineError::UnknownToken { .. } => ServerError::bad_input("prompt", error.to_string()),
            EngineError::Overloaded { waiting, max } => ServerError::Overloaded { waiting, max },
            EngineError::QueueTimeout { limit, .. } => ServerError::QueueTimeout { micros: limit.as_micros() as u64 },
            EngineError::DeadlineExceeded => ServerError::DeadlineExceeded,
            EngineError::Draining => ServerError::Exiting,
            EngineError::Cancelled => ServerError::Cancelled,
            EngineError::Row(RowError::GrammarDeadEnd { .. } | RowError::Grammar { .. }) => {
                ServerError::DeadEnd { reason: error.to_string() }
            }
            EngineError::Row(_) | EngineError::BadRow { .. } => ServerError::Failed { reason: error.to_string() },
            EngineError::DuplicateId { .. } => ServerError::internal(error),
            EngineError::Stopped { reason } => ServerError::EngineStopped { reason },
            EngineError::Config(_)
            | EngineError::NoRanks
            | EngineError::NoCache { .. }
            | EngineError::Link(_)
            | EngineError::RanksDiffer { .. }
            | EngineError::BadResult { .. }
            | EngineError::Stuck { .. }
            | EngineError::Thread(_) => ServerError::EngineStopped { reason: error.to_string() },
        }
    }
}

/// `; did you mean X?` when one of `known` is near `name`, else the whole list.
pub fn nearest_hint<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    let near = known.iter().map(|k| (strsim::jaro_winkler(name, k), *k)).max_by(|a, b| a.0.total_cmp(&b.0));
    match near {
        Some((likeness, near)) if likeness > 0.8 => format!("; did you mean {near}?"),
        _ => format!("; known are {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_was_wrong_and_with_which_codes() {
        let said = |error: ServerError| {
            let http = error.http_status().as_u16();
            let status = Status::from(error);
            format!("{:?} {http} {}", status.code(), status.message())
        };
        let too_long = ServerError::PromptTooLong { tokens: 9000, at_least: false, max: 8192 };
        assert_eq!(
            said(too_long),
            "InvalidArgument 400 prompt has 9000 tokens, the model takes at most 8192 with at least one for the answer"
        );
        assert_eq!(
            said(ServerError::Overloaded { waiting: 9, max: 8 }),
            "Unavailable 503 9 requests are waiting, at most 8 may"
        );
        assert_eq!(
            said(ServerError::UnknownModel { name: "m".into() }),
            "NotFound 404 request for unknown model: 'm' is not found"
        );
        assert_eq!(said(ServerError::Cancelled), "Cancelled 499 the request was cancelled");
        assert_eq!(
            said(EngineError::Row(RowError::GrammarDeadEnd { position: 3 }).into()),
            "InvalidArgument 400 generation failed: no token is left to pick at position 3: the grammar or the allowed tokens leave none"
        );
        assert_eq!(
            said(EngineError::Row(RowError::NotFinite { position: 3 }).into()),
            "Internal 500 generation failed: the model's logits are not finite at position 3"
        );
    }

    #[test]
    fn json_errors_carry_their_position_once() {
        let broken = serde_json::from_str::<serde_json::Value>("{\n \"a\": }").unwrap_err();
        assert_eq!(
            ServerError::bad_json("sampling_parameters", &broken).to_string(),
            "sampling_parameters is not valid JSON at line 2 column 7: expected value"
        );
    }

    #[test]
    fn a_typo_is_met_with_the_nearest_name() {
        assert_eq!(nearest_hint("max_token", ["top_k", "max_tokens"]), "; did you mean max_tokens?");
        assert_eq!(nearest_hint("zzz", ["top_k", "top_p"]), "; known are top_k, top_p");
    }
}
