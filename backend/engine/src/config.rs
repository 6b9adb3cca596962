//! What an operator may set for one model's engine, read once and never changed.

use std::time::Duration;

use serde::Deserialize;

/// Engine settings. Every default suits a small model on a CPU.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Most sequences in one step; ranks have as many slots.
    pub max_num_seqs: u32,
    /// Most tokens in one step, over all sequences; sizes the workspace. Usually the time bound below is reached first.
    pub max_num_batched_tokens: u32,
    /// How long a step may take while a stream is decoding, in milliseconds; prompts are cut so that it holds.
    /// With no stream to disturb a step may take ten times that.
    pub max_step_time_ms: u32,
    /// Requests that may wait beyond those that have a slot; further ones are refused.
    pub max_waiting: u32,
    /// The level of requests that name none; level 1 goes first.
    pub default_priority: u32,
    /// How long a request may wait for its first step if it does not say, in milliseconds; without it, for ever.
    pub queue_timeout_ms: Option<u32>,
    /// Keep the KV of finished sequences and reuse it for prompts that begin alike.
    pub enable_prefix_caching: bool,
    /// Steps in flight at once, at most what the ranks allow; without it, what they allow.
    pub pipeline_depth: Option<u32>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            max_step_time_ms: 100,
            max_waiting: 1024,
            default_priority: 8,
            queue_timeout_ms: None,
            enable_prefix_caching: true,
            pipeline_depth: None,
        }
    }
}

/// A setting that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("{field} is {got}, must be at least {min}")]
    TooSmall { field: &'static str, got: u32, min: u32 },
    #[error("max_num_batched_tokens is {tokens}, fewer than the {seqs} of max_num_seqs")]
    BatchTooSmall { tokens: u32, seqs: u32 },
}

impl EngineConfig {
    /// Checks what the types cannot say. [`Engine::start`](crate::Engine::start) does it too.
    ///
    /// # Errors
    /// The first setting that cannot work.
    pub fn validate(self) -> Result<Self, ConfigError> {
        let at_least_one = [
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_step_time_ms", self.max_step_time_ms),
            ("default_priority", self.default_priority),
            ("queue_timeout_ms", self.queue_timeout_ms.unwrap_or(1)),
            ("pipeline_depth", self.pipeline_depth.unwrap_or(1)),
        ];
        for (field, got) in at_least_one {
            if got == 0 {
                return Err(ConfigError::TooSmall { field, got, min: 1 });
            }
        }
        // Every running sequence gets its token in every step.
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(ConfigError::BatchTooSmall { tokens: self.max_num_batched_tokens, seqs: self.max_num_seqs });
        }
        Ok(self)
    }

    pub(crate) fn max_step_time(&self) -> Duration {
        Duration::from_millis(self.max_step_time_ms.into())
    }

    pub(crate) fn queue_timeout(&self) -> Option<Duration> {
        self.queue_timeout_ms.map(|ms| Duration::from_millis(ms.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str) -> String {
        match serde_json::from_str::<EngineConfig>(json) {
            Err(err) => err.to_string(),
            Ok(config) => config.validate().map_or_else(|err| err.to_string(), |_| "fine".into()),
        }
    }

    #[test]
    fn refuses_what_cannot_work() {
        assert_eq!(check("{}"), "fine");
        assert_eq!(
            check(r#"{"max_num_seqs": 512, "max_num_batched_tokens": 256}"#),
            "max_num_batched_tokens is 256, fewer than the 512 of max_num_seqs"
        );
        assert_eq!(check(r#"{"max_step_time_ms": 0}"#), "max_step_time_ms is 0, must be at least 1");
        assert_eq!(check(r#"{"queue_timeout_ms": 0}"#), "queue_timeout_ms is 0, must be at least 1");
        assert!(check(r#"{"max_seqs": 1}"#).starts_with("unknown field `max_seqs`, expected one of `max_num_seqs`"));
        assert!(check(r#"{"max_num_seqs": -1}"#).starts_with("invalid value: integer `-1`"));
    }
}
