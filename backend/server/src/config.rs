//! What an operator may set for the process: flags, and `DRAFTHORSE_*` in the environment.
//!
//! Triton's names are aliases where they differ, so that a container made for it starts. What is set per model is in
//! [`settings`](crate::settings).

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::error::nearest_hint;
use crate::settings::{SETTINGS, SettingFlags, environment_name, parse_bool};

/// Who decides which models are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ModelControlMode {
    /// All models of the repository, at start.
    #[default]
    None,
    /// Those of `--load-model`, and what RepositoryModelLoad asks for.
    Explicit,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line an event, for people.
    #[default]
    #[value(alias = "default", alias = "ISO8601", alias = "iso8601")]
    Text,
    /// A JSON object an event.
    Json,
}

/// Settings of the process, given to `drafthorse serve`.
#[derive(Clone, Debug, Args)]
pub struct ServerConfig {
    /// A folder of models in Triton's layout, or one checkpoint in Hugging Face's; may be repeated
    #[arg(
        long,
        alias = "model-store",
        env = "DRAFTHORSE_MODEL_REPOSITORY",
        value_name = "DIR",
        required = true,
        value_delimiter = ','
    )]
    pub model_repository: Vec<PathBuf>,

    /// The name to serve a model under that is a plain checkpoint folder; default the folder's name
    #[arg(long, env = "DRAFTHORSE_MODEL_NAME", value_name = "NAME")]
    pub model_name: Option<String>,

    /// The address to listen on; 0.0.0.0 for all
    #[arg(long, env = "DRAFTHORSE_HOST", default_value = "127.0.0.1")]
    pub host: IpAddr,

    /// The HTTP port: KServe v2, generate, OpenAI; 0 takes a free one
    #[arg(long, env = "DRAFTHORSE_HTTP_PORT", default_value_t = 8000)]
    pub http_port: u16,

    /// The gRPC port: KServe v2; 0 takes a free one
    #[arg(long, env = "DRAFTHORSE_GRPC_PORT", default_value_t = 8001)]
    pub grpc_port: u16,

    /// The port of Prometheus metrics; 0 takes a free one
    #[arg(long, env = "DRAFTHORSE_METRICS_PORT", default_value_t = 8002)]
    pub metrics_port: u16,

    /// An address for HTTP alone
    #[arg(long, env = "DRAFTHORSE_HTTP_ADDRESS", value_name = "HOST")]
    pub http_address: Option<IpAddr>,

    /// An address for gRPC alone
    #[arg(long, env = "DRAFTHORSE_GRPC_ADDRESS", value_name = "HOST")]
    pub grpc_address: Option<IpAddr>,

    /// An address for metrics alone
    #[arg(long, env = "DRAFTHORSE_METRICS_ADDRESS", value_name = "HOST")]
    pub metrics_address: Option<IpAddr>,

    #[arg(long, env = "DRAFTHORSE_ALLOW_HTTP", value_name = "BOOL", num_args = 0..=1, default_value = "true",
          default_missing_value = "true", value_parser = parse_bool, action = clap::ArgAction::Set)]
    pub allow_http: bool,

    #[arg(long, env = "DRAFTHORSE_ALLOW_GRPC", value_name = "BOOL", num_args = 0..=1, default_value = "true",
          default_missing_value = "true", value_parser = parse_bool, action = clap::ArgAction::Set)]
    pub allow_grpc: bool,

    #[arg(long, env = "DRAFTHORSE_ALLOW_METRICS", value_name = "BOOL", num_args = 0..=1, default_value = "true",
          default_missing_value = "true", value_parser = parse_bool, action = clap::ArgAction::Set)]
    pub allow_metrics: bool,

    /// Who decides which models are loaded
    #[arg(long, env = "DRAFTHORSE_MODEL_CONTROL_MODE", value_enum, default_value = "none", value_name = "MODE")]
    pub model_control_mode: ModelControlMode,

    /// With --model-control-mode=explicit: a model to load at start, * for all; may be repeated
    #[arg(long, value_name = "NAME")]
    pub load_model: Vec<String>,

    /// End the process if a model fails to load
    #[arg(long, env = "DRAFTHORSE_EXIT_ON_ERROR", value_name = "BOOL", num_args = 0..=1, default_value = "false",
          default_missing_value = "true", value_parser = parse_bool, action = clap::ArgAction::Set)]
    pub exit_on_error: bool,

    /// Be ready only when every model is; otherwise as soon as the server answers
    #[arg(long, env = "DRAFTHORSE_STRICT_READINESS", value_name = "BOOL", num_args = 0..=1, default_value = "true",
          default_missing_value = "true", value_parser = parse_bool, action = clap::ArgAction::Set)]
    pub strict_readiness: bool,

    /// Seconds that requests in flight get to finish after SIGTERM
    #[arg(
        long,
        alias = "exit-timeout",
        env = "DRAFTHORSE_EXIT_TIMEOUT_SECS",
        default_value_t = 30,
        value_name = "SECONDS"
    )]
    pub exit_timeout_secs: u64,

    /// The server's name in its metadata
    #[arg(long, alias = "server-id", env = "DRAFTHORSE_ID", default_value = "drafthorse")]
    pub id: String,

    /// Largest HTTP body in bytes
    #[arg(long, env = "DRAFTHORSE_HTTP_MAX_INPUT_SIZE", default_value_t = 64 << 20, value_name = "BYTES")]
    pub http_max_input_size: usize,

    /// Largest gRPC message in bytes
    #[arg(long, env = "DRAFTHORSE_GRPC_MAX_INPUT_SIZE", default_value_t = 64 << 20, value_name = "BYTES")]
    pub grpc_max_input_size: usize,

    /// Milliseconds without a frame after which a gRPC connection is pinged
    #[arg(long, env = "DRAFTHORSE_GRPC_KEEPALIVE_TIME", default_value_t = 7_200_000, value_name = "MS")]
    pub grpc_keepalive_time: u64,

    /// Milliseconds that a ping may go unanswered
    #[arg(long, env = "DRAFTHORSE_GRPC_KEEPALIVE_TIMEOUT", default_value_t = 20_000, value_name = "MS")]
    pub grpc_keepalive_timeout: u64,

    /// Threads of the CPU kernels; default one a core
    #[arg(long, env = "DRAFTHORSE_NUM_THREADS", value_name = "N")]
    pub num_threads: Option<usize>,

    #[command(flatten)]
    pub log: LogConfig,

    #[command(flatten)]
    pub settings: SettingFlags,
}

/// How the process logs; to standard error.
#[derive(Clone, Debug, Args)]
pub struct LogConfig {
    /// How log lines look
    #[arg(long, env = "DRAFTHORSE_LOG_FORMAT", value_enum, default_value = "text", value_name = "FORMAT")]
    pub log_format: LogFormat,

    /// What is logged: error, warn, info, debug or trace, also per module as in `info,drafthorse=debug`
    #[arg(long, env = "DRAFTHORSE_LOG_LEVEL", default_value = "info", value_name = "FILTER")]
    pub log_level: String,
}

impl ServerConfig {
    /// Where HTTP, gRPC and metrics listen; `None` for what is not allowed.
    pub fn addresses(&self) -> [Option<SocketAddr>; 3] {
        let address = |allowed: bool, own: Option<IpAddr>, port: u16| {
            allowed.then(|| SocketAddr::new(own.unwrap_or(self.host), port))
        };
        [
            address(self.allow_http, self.http_address, self.http_port),
            address(self.allow_grpc, self.grpc_address, self.grpc_port),
            address(self.allow_metrics, self.metrics_address, self.metrics_port),
        ]
    }

    /// Parses flags as `drafthorse serve` does, for tests and for programs that embed the server.
    ///
    /// # Errors
    /// What clap says.
    pub fn parse<I, T>(flags: I) -> Result<Self, clap::Error>
    where
        I: IntoIterator<Item = T>,
        T: Into<OsString> + Clone,
    {
        let command = <Self as Args>::augment_args(clap::Command::new("serve").no_binary_name(true));
        let matches = command.try_get_matches_from(flags.into_iter().map(|flag| with_dashes(flag.into())))?;
        <Self as clap::FromArgMatches>::from_arg_matches(&matches)
    }
}

/// Variables that are read elsewhere: by the CPU kernels, and when building.
const READ_ELSEWHERE: [&str; 4] =
    ["DRAFTHORSE_SIMD", "DRAFTHORSE_CUDA_ARCHS", "DRAFTHORSE_REQUIRE_NVCC", "DRAFTHORSE_TOOLCHAIN_DIR"];

/// What to warn of: variables of the environment that begin like ours and set nothing, for they are likely misspelt. Those
/// that Kubernetes sets for a service called drafthorse are left out.
pub fn unknown_variables(names: impl IntoIterator<Item = String>) -> Vec<String> {
    let command = <ServerConfig as Args>::augment_args(clap::Command::new("serve"));
    let flags = command.get_arguments().filter_map(|flag| Some(flag.get_env()?.to_str()?.to_owned()));
    let settings = SETTINGS.iter().map(|setting| environment_name(setting.name));
    let known: Vec<String> = flags.chain(settings).chain(READ_ELSEWHERE.map(str::to_owned)).collect();
    let of_kubernetes = |name: &str| name.contains("_SERVICE_") || name.contains("_PORT_") || name == "DRAFTHORSE_PORT";
    let unknown = names.into_iter().filter(|name| name.starts_with("DRAFTHORSE_") && !known.contains(name));
    let unknown = unknown.filter(|name| !of_kubernetes(name));
    unknown
        .map(|name| format!("{name} sets nothing{}", nearest_hint(&name, known.iter().map(String::as_str))))
        .collect()
}

/// `--model_repository=DIR` is `--model-repository=DIR`.
pub fn with_dashes(argument: OsString) -> OsString {
    let Some(text) = argument.to_str() else { return argument };
    if !text.starts_with("--") {
        return argument;
    }
    let (name, value) = text.split_at(text.find('=').unwrap_or(text.len()));
    format!("{}{value}", name.replace('_', "-")).into()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::settings::Settings;

    #[test]
    fn takes_the_arguments_of_kserves_triton_runtime() {
        let config = ServerConfig::parse([
            "--model-store=/mnt/models",
            "--grpc_port=9000",
            "--http-port",
            "8080",
            "--allow-grpc=true",
            "--allow_metrics=0",
            "--exit-on-error",
            "--block_size=32",
            "--log-format=ISO8601",
        ])
        .unwrap();
        assert_eq!(config.model_repository, [PathBuf::from("/mnt/models")]);
        let [http, grpc, metrics] = config.addresses();
        assert_eq!((http.unwrap().port(), grpc.unwrap().port(), metrics), (8080, 9000, None));
        assert!(config.exit_on_error && config.strict_readiness);
        assert_eq!(config.log.log_format, LogFormat::Text);
    }

    #[test]
    fn flags_of_speculation_may_be_spelt_as_paddlenlp_spells_them() {
        let names = SETTINGS.iter().map(|setting| setting.name);
        let names: Vec<&str> = names.filter(|name| name.contains("speculate") || name.contains("draft")).collect();
        assert!(names.len() > 8, "{names:?}");
        for name in names.into_iter().chain(["return_full_hidden_states"]) {
            let (underscores, dashes) = (format!("--{name}=1"), format!("--{}=1", name.replace('_', "-")));
            let value = |flag: &str| {
                let config = ServerConfig::parse(["--model-repository=m", flag]).unwrap();
                let settings = Settings::resolve(&HashMap::new(), &config.settings, |_| None).unwrap();
                settings.text(name).to_owned()
            };
            assert_eq!((value(&underscores), value(&dashes)), ("1".into(), "1".into()), "{name}");
        }
    }

    #[test]
    fn a_misspelt_variable_is_noticed() {
        let warned = |names: &[&str]| unknown_variables(names.iter().map(|name| (*name).to_owned()));
        assert_eq!(
            warned(&["DRAFTHORSE_HTP_PORT", "DRAFTHORSE_MAX_NUM_SEQ", "HOME"]),
            [
                "DRAFTHORSE_HTP_PORT sets nothing; did you mean DRAFTHORSE_HTTP_PORT?",
                "DRAFTHORSE_MAX_NUM_SEQ sets nothing; did you mean DRAFTHORSE_MAX_NUM_SEQS?",
            ]
        );
        let fine = ["DRAFTHORSE_HOST", "DRAFTHORSE_BLOCK_SIZE", "DRAFTHORSE_SIMD"];
        let kubernetes = ["DRAFTHORSE_PORT", "DRAFTHORSE_SERVICE_HOST", "DRAFTHORSE_PORT_8001_TCP_ADDR"];
        assert!(warned(&[fine, kubernetes].concat()).is_empty());
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        let refused = |flags: &[&str]| ServerConfig::parse(flags.iter().copied()).unwrap_err().to_string();
        let said = refused(&["--model-repository=m", "--grpc-prt=1"]);
        assert!(said.contains("unexpected argument '--grpc-prt'") && said.contains("--grpc-port"), "{said}");
        let said = refused(&["--model-repository=m", "--allow-grpc=maybe"]);
        assert!(said.contains("true, false, 1 or 0"), "{said}");
        let said = refused(&["--model-repository=m", "--model-control-mode=poll"]);
        assert!(said.contains("possible values: none, explicit"), "{said}");
        assert!(refused(&[]).contains("--model-repository"));
    }
}
