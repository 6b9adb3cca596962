//! The protocol's messages as JSON: tensors in and out, parameters, configs and statistics.

use std::collections::HashMap;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use drafthorse_proto::inference::infer_parameter::ParameterChoice;
use drafthorse_proto::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use drafthorse_proto::inference::{
    DataType, InferParameter, ModelConfig, ModelInferRequest, ModelInferResponse, ModelMetadataResponse,
    ModelStatistics, StatisticDuration,
};
use serde_json::{Map, Value, json};

use super::body::BODY;
use crate::error::{Result, ServerError};

/// The parameter that says how many bytes of an input follow the JSON.
const BINARY_DATA_SIZE: &str = "binary_data_size";
/// The parameters that ask for one output, or all, behind the JSON.
const BINARY_DATA: &str = "binary_data";
const BINARY_DATA_OUTPUT: &str = "binary_data_output";

/// A request read from JSON, and which outputs it wants as bytes.
pub(super) struct JsonRequest {
    pub(super) request: ModelInferRequest,
    pub(super) binary: Binary,
}

/// The outputs that go behind the JSON as bytes.
#[derive(Debug, Default)]
pub(super) struct Binary {
    all: bool,
    by_name: HashMap<String, bool>,
}

impl Binary {
    fn wants(&self, name: &str) -> bool {
        self.by_name.get(name).copied().unwrap_or(self.all)
    }
}

/// An inference request; `binary` is what follows the JSON in the body.
///
/// # Errors
/// `BadInput` naming the field.
pub(super) fn read_request(
    model: String,
    version: String,
    mut body: Map<String, Value>,
    mut binary: Bytes,
) -> Result<JsonRequest> {
    let id = match body.remove("id") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(id)) => id,
        Some(_) => return Err(ServerError::bad_input("id", "must be a string")),
    };
    let mut parameters = read_parameters(body.remove("parameters"))?;
    let (inputs, outputs) = (body.remove("inputs"), body.remove("outputs"));
    // The path has them.
    body.retain(|key, _| key != "model_name" && key != "model_version");
    if let Some(key) = body.keys().find(|key| parameters.contains_key(*key)) {
        return Err(ServerError::bad_input(key, "stands in the body and in its parameters: give it once"));
    }
    if let Some((key, _)) = body.iter().find(|(_, value)| value.is_array() || value.is_object()) {
        return Err(ServerError::bad_input(
            key,
            "is no field of an inference request, which has inputs, outputs, parameters and id",
        ));
    }
    // A parameter beside the others, if there is one of that name; else it is warned of with them.
    body.retain(|_, value| !value.is_null());
    parameters.extend(read_parameters(Some(Value::Object(body)))?);
    let mut wanted = Binary { all: flag(&parameters, BINARY_DATA_OUTPUT), ..Binary::default() };
    let mut request =
        ModelInferRequest { model_name: model, model_version: version, id, parameters, ..ModelInferRequest::default() };
    for input in list(inputs, "inputs")? {
        let (tensor, raw) = read_input(&input, &mut binary)?;
        request.inputs.push(tensor);
        request.raw_input_contents.push(raw);
    }
    if !binary.is_empty() {
        return Err(ServerError::bad_input(BODY, format!("unexpected additional input data: {} bytes", binary.len())));
    }
    if let Some(outputs) = outputs {
        for output in list(Some(outputs), "outputs")? {
            let name = string(&output, "name", "outputs")?;
            let mut parameters = read_parameters(output.get("parameters").cloned())?;
            if let Some(parameter) = parameters.remove(BINARY_DATA) {
                let wants = parameter.parameter_choice == Some(ParameterChoice::BoolParam(true));
                wanted.by_name.insert(name.clone(), wants);
            }
            request.outputs.push(InferRequestedOutputTensor { name, parameters });
        }
    }
    Ok(JsonRequest { request, binary: wanted })
}

fn read_input(input: &Value, binary: &mut Bytes) -> Result<(InferInputTensor, Bytes)> {
    let name = string(input, "name", "inputs")?;
    let bad = |reason: &str| ServerError::bad_input(format!("input '{name}'"), reason);
    let datatype = string(input, "datatype", &format!("input '{name}'"))?;
    let shape = input["shape"].as_array().and_then(|dims| dims.iter().map(Value::as_i64).collect::<Option<Vec<i64>>>());
    let shape = shape.ok_or_else(|| bad("shape must be a list of whole numbers"))?;
    let mut parameters = read_parameters(input.get("parameters").cloned())?;
    let raw = match (parameters.remove(BINARY_DATA_SIZE).and_then(|p| p.parameter_choice), input.get("data")) {
        (Some(_), Some(_)) => return Err(bad("has both data and binary_data_size")),
        (Some(ParameterChoice::Int64Param(size)), None) => {
            let size = usize::try_from(size).map_err(|_| bad("binary_data_size must not be negative"))?;
            if size > binary.len() {
                let missing = size - binary.len();
                return Err(bad(&format!("unexpected size, expecting {missing} additional bytes behind the JSON")));
            }
            binary.split_to(size)
        }
        (Some(_), None) => return Err(bad("binary_data_size must be a whole number")),
        (None, None) => return Err(bad("has no data")),
        (None, Some(data)) => {
            let mut raw = BytesMut::new();
            write_elements(data, &datatype, &mut raw).map_err(|reason| bad(&reason))?;
            raw.freeze()
        }
    };
    Ok((InferInputTensor { name, datatype, shape, parameters, contents: None }, raw))
}

/// Elements as raw contents; nested lists are flattened. Other types than text generation has are left for the tensor checks,
/// which refuse them by name.
fn write_elements(data: &Value, datatype: &str, raw: &mut BytesMut) -> Result<(), String> {
    match (data, datatype) {
        (Value::Array(elements), _) => elements.iter().try_for_each(|element| write_elements(element, datatype, raw)),
        (Value::String(text), "BYTES") => {
            raw.put_u32_le(text.len() as u32);
            raw.put_slice(text.as_bytes());
            Ok(())
        }
        (_, "BYTES") => Err("data must be strings".into()),
        (Value::Bool(value), "BOOL") => {
            raw.put_u8(u8::from(*value));
            Ok(())
        }
        (_, "BOOL") => Err("data must be true or false".into()),
        _ => Ok(()),
    }
}

/// A request's or tensor's parameters.
///
/// # Errors
/// `BadInput` for a value that is a list, an object or null.
pub(super) fn read_parameters(value: Option<Value>) -> Result<HashMap<String, InferParameter>> {
    let map = match value {
        None => return Ok(HashMap::new()),
        Some(Value::Object(map)) => map,
        Some(_) => return Err(ServerError::bad_input("parameters", "must be an object")),
    };
    let parameters = map.into_iter().map(|(name, value)| {
        let choice = match &value {
            Value::Bool(value) => ParameterChoice::BoolParam(*value),
            Value::String(value) => ParameterChoice::StringParam(value.clone()),
            Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(value), _) => ParameterChoice::Int64Param(value),
                (None, Some(value)) => ParameterChoice::DoubleParam(value),
                (None, None) => return Err(ServerError::bad_input(format!("parameter '{name}'"), "is out of range")),
            },
            _ => {
                let reason = "must be a number, a string, true or false";
                return Err(ServerError::bad_input(format!("parameter '{name}'"), reason));
            }
        };
        Ok((name, InferParameter { parameter_choice: Some(choice) }))
    });
    parameters.collect()
}

fn parameters_json(parameters: HashMap<String, InferParameter>) -> Map<String, Value> {
    let value = |parameter: InferParameter| match parameter.parameter_choice {
        Some(ParameterChoice::BoolParam(value)) => value.into(),
        Some(ParameterChoice::Int64Param(value)) => value.into(),
        Some(ParameterChoice::Uint64Param(value)) => value.into(),
        Some(ParameterChoice::DoubleParam(value)) => value.into(),
        Some(ParameterChoice::StringParam(value)) => value.into(),
        None => Value::Null,
    };
    parameters.into_iter().map(|(name, parameter)| (name, value(parameter))).collect()
}

/// A response with raw contents as JSON, and the bytes that follow it.
pub(super) fn response_json(response: ModelInferResponse, binary: &Binary) -> (Value, Bytes) {
    let mut behind = BytesMut::new();
    let outputs = response.outputs.into_iter().zip(response.raw_output_contents).map(|(tensor, raw)| {
        let mut output = json!({"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape});
        if binary.wants(&tensor.name) {
            output["parameters"] = json!({BINARY_DATA_SIZE: raw.len()});
            behind.put_slice(&raw);
        } else {
            output["data"] = elements_json(&tensor.datatype, raw);
        }
        output
    });
    let outputs: Vec<Value> = outputs.collect();
    let mut json = Map::new();
    json.insert("model_name".into(), response.model_name.into());
    json.insert("model_version".into(), response.model_version.into());
    if !response.id.is_empty() {
        json.insert("id".into(), response.id.into());
    }
    if !response.parameters.is_empty() {
        json.insert("parameters".into(), Value::Object(parameters_json(response.parameters)));
    }
    json.insert("outputs".into(), Value::Array(outputs));
    (Value::Object(json), behind.freeze())
}

/// A response with raw contents as a flat object: a key an output, its element alone if there is one.
pub(super) fn response_flat(response: ModelInferResponse) -> Map<String, Value> {
    let mut flat = Map::new();
    if !response.id.is_empty() {
        flat.insert("id".into(), response.id.into());
    }
    flat.insert("model_name".into(), response.model_name.into());
    flat.insert("model_version".into(), response.model_version.into());
    for (tensor, raw) in response.outputs.into_iter().zip(response.raw_output_contents) {
        let value = match elements_json(&tensor.datatype, raw) {
            Value::Array(mut elements) if elements.len() == 1 => elements.remove(0),
            elements => elements,
        };
        flat.insert(tensor.name, value);
    }
    flat
}

/// Raw contents of our own making: of the types that outputs have.
fn elements_json(datatype: &str, mut raw: Bytes) -> Value {
    let mut elements = Vec::new();
    while raw.len() >= 4 {
        elements.push(match datatype {
            "BYTES" => {
                let len = (raw.get_u32_le() as usize).min(raw.len());
                String::from_utf8_lossy(&raw.split_to(len)).into()
            }
            "FP32" => raw.get_f32_le().into(),
            _ => raw.get_u32_le().into(),
        });
    }
    Value::Array(elements)
}

fn flag(parameters: &HashMap<String, InferParameter>, name: &str) -> bool {
    let choice = parameters.get(name).and_then(|parameter| parameter.parameter_choice.as_ref());
    choice == Some(&ParameterChoice::BoolParam(true))
}

fn list(value: Option<Value>, field: &str) -> Result<Vec<Value>> {
    match value {
        Some(Value::Array(items)) => Ok(items),
        None => Err(ServerError::bad_input(field, "is missing")),
        Some(_) => Err(ServerError::bad_input(field, "must be a list")),
    }
}

fn string(object: &Value, key: &str, of: &str) -> Result<String> {
    object[key].as_str().map(String::from).ok_or_else(|| ServerError::bad_input(of, format!("{key} must be a string")))
}

pub(super) fn metadata_json(metadata: ModelMetadataResponse) -> Value {
    let tensors = |tensors: Vec<drafthorse_proto::inference::model_metadata_response::TensorMetadata>| {
        let tensors = tensors.into_iter();
        tensors.map(|t| json!({"name": t.name, "datatype": t.datatype, "shape": t.shape})).collect::<Vec<_>>()
    };
    json!({
        "name": metadata.name,
        "versions": metadata.versions,
        "platform": metadata.platform,
        "inputs": tensors(metadata.inputs),
        "outputs": tensors(metadata.outputs),
    })
}

pub(super) fn config_json(config: &ModelConfig) -> Value {
    let data_type = |data_type: i32| DataType::try_from(data_type).unwrap_or(DataType::TypeInvalid).as_str_name();
    let inputs = config.input.iter().map(|input| {
        let data_type = data_type(input.data_type);
        json!({"name": input.name, "data_type": data_type, "dims": input.dims, "optional": input.optional})
    });
    let outputs = config
        .output
        .iter()
        .map(|output| json!({"name": output.name, "data_type": data_type(output.data_type), "dims": output.dims}));
    let groups = config.instance_group.iter().map(|group| {
        json!({"name": group.name, "kind": group.kind().as_str_name(), "count": group.count, "gpus": group.gpus})
    });
    let mut parameters: Vec<_> = config.parameters.iter().collect();
    parameters.sort_by_key(|(name, _)| name.as_str());
    let parameters =
        parameters.into_iter().map(|(name, parameter)| (name.clone(), json!({"string_value": parameter.string_value})));
    let decoupled = config.model_transaction_policy.is_some_and(|policy| policy.decoupled);
    json!({
        "name": config.name,
        "platform": config.platform,
        "backend": config.backend,
        "max_batch_size": config.max_batch_size,
        "input": inputs.collect::<Vec<_>>(),
        "output": outputs.collect::<Vec<_>>(),
        "instance_group": groups.collect::<Vec<_>>(),
        "parameters": parameters.collect::<Map<_, _>>(),
        "model_transaction_policy": {"decoupled": decoupled},
    })
}

pub(super) fn statistics_json(statistics: &ModelStatistics) -> Value {
    let duration = |duration: Option<StatisticDuration>| {
        let duration = duration.unwrap_or_default();
        json!({"count": duration.count, "ns": duration.ns})
    };
    let of = statistics.inference_stats.unwrap_or_default();
    json!({
        "name": statistics.name,
        "version": statistics.version,
        "last_inference": statistics.last_inference,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {
            "success": duration(of.success),
            "fail": duration(of.fail),
            "queue": duration(of.queue),
            "compute_input": duration(of.compute_input),
            "compute_infer": duration(of.compute_infer),
            "compute_output": duration(of.compute_output),
            "cache_hit": duration(of.cache_hit),
            "cache_miss": duration(of.cache_miss),
        },
        "response_stats": {},
        "batch_stats": [],
    })
}
