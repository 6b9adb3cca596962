//! A model's `config.pbtxt`: what is missing is filled in, what cannot be served is refused.

use drafthorse_proto::inference::model_config::SchedulingChoice;
use drafthorse_proto::inference::model_instance_group::Kind;
use drafthorse_proto::inference::model_version_policy::{Latest, PolicyChoice};
use drafthorse_proto::inference::{
    DataType, ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput, ModelTransactionPolicy, ModelVersionPolicy,
};
use tracing::warn;

use super::dialect::{INPUTS, OUTPUTS, TensorSpec, wire_name};

/// Names of backends whose tensors are spoken here.
const BACKENDS: &[&str] = &["drafthorse", "vllm"];

/// The parameter that tells a draft from a model that is served.
const ROLE: &str = "role";

/// What a model is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Answers requests.
    Served,
    /// Makes drafts for another model.
    Draft,
}

/// The role that a config gives its model.
///
/// # Errors
/// With the value, if it is none.
pub fn role(config: &ModelConfig) -> Result<Role, String> {
    match config.parameters.get(ROLE).map(|parameter| parameter.string_value.as_str()) {
        None | Some("base") => Ok(Role::Served),
        Some("draft") => Ok(Role::Draft),
        Some(other) => Err(format!("parameter role is '{other}', must be base or draft")),
    }
}

/// Fills in what `config` leaves out and checks the rest, for the model in folder `name`.
///
/// # Errors
/// What is wrong, naming the field.
pub fn complete(mut config: ModelConfig, name: &str) -> Result<ModelConfig, String> {
    if config.name.is_empty() {
        config.name = name.to_owned();
    }
    if config.name != name {
        return Err(format!("name is '{}', but the model's folder is '{name}'", config.name));
    }
    if config.backend.is_empty() {
        config.backend = BACKENDS[0].to_owned();
    }
    if !BACKENDS.contains(&config.backend.as_str()) {
        return Err(format!("backend is '{}', must be {}", config.backend, BACKENDS.join(" or ")));
    }
    if !(config.platform.is_empty() || BACKENDS.contains(&config.platform.as_str())) {
        return Err(format!("platform is '{}', must be left out", config.platform));
    }
    if config.max_batch_size < 0 {
        return Err(format!("max_batch_size is {}, must not be negative", config.max_batch_size));
    }
    if config.response_cache.is_some_and(|cache| cache.enable) {
        return Err("response_cache is not supported: sampled answers differ from request to request".into());
    }
    if !config.model_warmup.is_empty() {
        return Err("model_warmup is not supported: a model is ready when it is loaded".into());
    }
    role(&config)?;
    config
        .version_policy
        .get_or_insert_with(ModelVersionPolicy::default)
        .policy_choice
        .get_or_insert(PolicyChoice::Latest(Latest { num_versions: 1 }));
    config.model_transaction_policy.get_or_insert(ModelTransactionPolicy { decoupled: true });
    complete_instances(&mut config)?;
    complete_inputs(&mut config)?;
    complete_outputs(&mut config)?;
    check_queue(&config)?;
    for (given, field) in [
        (config.optimization.is_some(), "optimization"),
        (!config.cc_model_filenames.is_empty(), "cc_model_filenames"),
        (!config.default_model_filename.is_empty(), "default_model_filename"),
        (!config.metric_tags.is_empty(), "metric_tags"),
        (config.model_metrics.is_some(), "model_metrics"),
    ] {
        if given {
            warn!(model = name, field, "this part of config.pbtxt changes nothing here");
        }
    }
    Ok(config)
}

fn complete_instances(config: &mut ModelConfig) -> Result<(), String> {
    if config.instance_group.is_empty() {
        let group = ModelInstanceGroup {
            name: config.name.clone(),
            count: 1,
            kind: Kind::Model.into(),
            ..ModelInstanceGroup::default()
        };
        config.instance_group.push(group);
    }
    for group in &mut config.instance_group {
        // Unset is one.
        group.count = if group.count == 0 { 1 } else { group.count };
        if group.count != 1 {
            return Err(format!("instance_group count is {}, must be 1: one engine batches all requests", group.count));
        }
    }
    match config.instance_group.len() {
        1 => Ok(()),
        groups => Err(format!("there are {groups} instance_groups, must be 1: one engine batches all requests")),
    }
}

/// Inputs that are written down must be ones we have, with their type and rank; those left out are added.
fn complete_inputs(config: &mut ModelConfig) -> Result<(), String> {
    for given in &config.input {
        check_tensor("input", INPUTS, &given.name, given.data_type, &given.dims)?;
    }
    for (at, given) in config.input.iter().enumerate() {
        if config.input[..at].iter().any(|earlier| earlier.name == given.name) {
            return Err(format!("input '{}' is listed twice", given.name));
        }
    }
    for spec in INPUTS {
        match config.input.iter_mut().find(|given| given.name == spec.name) {
            Some(given) => given.optional = spec.optional,
            None => config.input.push(ModelInput {
                name: spec.name.into(),
                data_type: spec.data_type.into(),
                dims: spec.dims.to_vec(),
                optional: spec.optional,
                ..ModelInput::default()
            }),
        }
    }
    Ok(())
}

fn complete_outputs(config: &mut ModelConfig) -> Result<(), String> {
    for given in &config.output {
        check_tensor("output", OUTPUTS, &given.name, given.data_type, &given.dims)?;
    }
    for spec in OUTPUTS {
        match config.output.iter_mut().find(|given| given.name == spec.name) {
            // The responses' true shape, whatever was written.
            Some(given) => given.dims = spec.dims.to_vec(),
            None => config.output.push(ModelOutput {
                name: spec.name.into(),
                data_type: spec.data_type.into(),
                dims: spec.dims.to_vec(),
                ..ModelOutput::default()
            }),
        }
    }
    Ok(())
}

fn check_tensor(kind: &str, specs: &[TensorSpec], name: &str, data_type: i32, dims: &[i64]) -> Result<(), String> {
    let Some(spec) = specs.iter().find(|spec| spec.name == name) else {
        let known: Vec<&str> = specs.iter().map(|spec| spec.name).collect();
        return Err(format!("{kind} '{name}' is unknown, must be one of {}", known.join(", ")));
    };
    let given = DataType::try_from(data_type).unwrap_or(DataType::TypeInvalid);
    if given != spec.data_type {
        let (given, wanted) = (given.as_str_name(), spec.data_type.as_str_name());
        return Err(format!("{kind} '{name}' has data_type {given}, must be {wanted} ({})", wire_name(spec.data_type)));
    }
    if dims.len() != spec.dims.len() || dims.iter().any(|dim| !matches!(dim, -1 | 1)) {
        return Err(format!("{kind} '{name}' has dims {dims:?}, must be {:?}", spec.dims));
    }
    Ok(())
}

fn check_queue(config: &ModelConfig) -> Result<(), String> {
    let Some(SchedulingChoice::DynamicBatching(batching)) = &config.scheduling_choice else { return Ok(()) };
    if batching.default_priority_level > batching.priority_levels {
        return Err(format!(
            "dynamic_batching default_priority_level is {}, must be 1 to priority_levels, {}",
            batching.default_priority_level, batching.priority_levels
        ));
    }
    if batching.priority_levels > 0 && batching.default_priority_level == 0 {
        return Err("dynamic_batching has priority_levels but no default_priority_level".into());
    }
    if !batching.priority_queue_policy.is_empty() {
        return Err("dynamic_batching priority_queue_policy is not supported, default_queue_policy is".into());
    }
    if batching.preserve_ordering {
        return Err("dynamic_batching preserve_ordering is not supported: requests end when they end".into());
    }
    if !batching.preferred_batch_size.is_empty() || batching.max_queue_delay_microseconds > 0 {
        warn!(
            model = config.name,
            "preferred_batch_size and max_queue_delay change nothing: requests join at every step"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use drafthorse_proto::parse_model_config;

    fn completed(text: &str) -> Result<ModelConfig, String> {
        complete(parse_model_config(text).unwrap(), "llm")
    }

    fn refused(text: &str) -> String {
        completed(text).unwrap_err()
    }

    #[test]
    fn an_empty_file_is_completed() {
        let config = completed("").unwrap();
        assert_eq!((config.name.as_str(), config.backend.as_str()), ("llm", "drafthorse"));
        assert!(config.model_transaction_policy.unwrap().decoupled);
        assert!(!config.input[0].optional && config.input[1..].iter().all(|input| input.optional));
        assert_eq!(config.output.len(), OUTPUTS.len());
        assert_eq!(config.instance_group[0].count, 1);
    }

    #[test]
    fn what_is_written_stays() {
        let config = completed("model_transaction_policy { decoupled: false } max_batch_size: 4").unwrap();
        assert!(!config.model_transaction_policy.unwrap().decoupled);
        assert_eq!(config.max_batch_size, 4);
    }

    #[test]
    fn what_cannot_be_served_is_refused_by_name() {
        for (text, said) in [
            ("name: \"x\"", "name is 'x', but the model's folder is 'llm'"),
            ("backend: \"onnxruntime\"", "backend is 'onnxruntime', must be drafthorse or vllm"),
            ("max_batch_size: -1", "max_batch_size is -1, must not be negative"),
            (
                "input [ { name: \"text_input\" data_type: TYPE_INT32 dims: [1] } ]",
                "input 'text_input' has data_type TYPE_INT32, must be TYPE_STRING (BYTES)",
            ),
            (
                "input [ { name: \"stream\" data_type: TYPE_BOOL dims: [1, 1] } ]",
                "input 'stream' has dims [1, 1], must be [1]",
            ),
            (
                "instance_group [ { count: 2 } ]",
                "instance_group count is 2, must be 1: one engine batches all requests",
            ),
            (
                "parameters { key: \"role\" value { string_value: \"boss\" } }",
                "parameter role is 'boss', must be base or draft",
            ),
            (
                "dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
                "dynamic_batching default_priority_level is 3, must be 1 to priority_levels, 2",
            ),
            (
                "response_cache { enable: true }",
                "response_cache is not supported: sampled answers differ from request to request",
            ),
        ] {
            assert_eq!(refused(text), said);
        }
        assert!(
            refused("output [ { name: \"text\" data_type: TYPE_STRING dims: [1] } ]")
                .starts_with("output 'text' is unknown")
        );
    }
}
