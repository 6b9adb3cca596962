//! Named tensors in and out: checks what a request carries, and writes responses in the form that the request had.
//!
//! A tensor's elements travel either typed, in the tensor's own `contents`, or raw, as bytes beside all tensors: little-endian, and an
//! element of BYTES is its length in four bytes, then itself.

use bytes::{BufMut, Bytes, BytesMut};
use drafthorse_proto::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use drafthorse_proto::inference::model_infer_response::InferOutputTensor;
use drafthorse_proto::inference::{DataType, InferTensorContents, ModelInferRequest};

use crate::error::{Result, ServerError};
use crate::repository::dialect::{INPUTS, OUTPUTS, TensorSpec, wire_name};

/// How elements travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Typed,
    Raw,
}

/// The one element of an input.
#[derive(Clone, Debug, PartialEq)]
pub enum Element {
    Bool(bool),
    Bytes(Bytes),
}

/// A request's inputs, checked.
#[derive(Debug)]
pub struct Inputs {
    elements: Vec<(&'static str, Element)>,
    pub form: Form,
}

/// The elements of an output, one a sequence.
#[derive(Clone, Debug, PartialEq)]
pub enum Elements {
    Strings(Vec<String>),
    Floats(Vec<f32>),
    Counts(Vec<u32>),
}

/// An output of a response.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub name: &'static str,
    pub elements: Elements,
}

impl Inputs {
    /// Checks and takes the inputs of `request`, which `model` is to answer; with `batched` a tensor has a batch dimension in front.
    ///
    /// # Errors
    /// `BadInput` naming the tensor, and `Unsupported` for shared memory.
    pub fn decode(request: &mut ModelInferRequest, model: &str, batched: bool) -> Result<Self> {
        let raw = std::mem::take(&mut request.raw_input_contents);
        let tensors = std::mem::take(&mut request.inputs);
        let form = if raw.is_empty() { Form::Typed } else { Form::Raw };
        if form == Form::Raw
            && let Some(typed) = tensors.iter().find(|tensor| tensor.contents.is_some())
        {
            return Err(bad(&typed.name, "has contents, which must not be given beside raw_input_contents"));
        }
        let mut elements: Vec<(&'static str, Element)> = Vec::with_capacity(tensors.len());
        let mut entries = raw.iter();
        for tensor in &tensors {
            let spec = find(INPUTS, &tensor.name, "input", model)?;
            if elements.iter().any(|(name, _)| *name == spec.name) {
                return Err(bad(&tensor.name, "is given twice"));
            }
            if tensor.parameters.keys().any(|key| key.starts_with("shared_memory")) {
                return Err(ServerError::unsupported(format!("input '{}' in shared memory", tensor.name)));
            }
            check_type(tensor, spec, model)?;
            check_shape(tensor, spec, model, batched)?;
            let element = match form {
                Form::Typed => typed_element(tensor, spec)?,
                Form::Raw => {
                    let entry =
                        entries.next().ok_or_else(|| bad(&tensor.name, "has no entry in raw_input_contents"))?;
                    raw_element(entry, spec)?
                }
            };
            elements.push((spec.name, element));
        }
        if entries.len() > 0 {
            let reason = format!("has {} entries for {} inputs", raw.len(), tensors.len());
            return Err(ServerError::bad_input("raw_input_contents", reason));
        }
        for spec in INPUTS.iter().filter(|spec| !spec.optional) {
            if !elements.iter().any(|(name, _)| *name == spec.name) {
                let given: Vec<&str> = elements.iter().map(|(name, _)| *name).collect();
                let reason = format!("is missing: model '{model}' got inputs [{}]", given.join(", "));
                return Err(bad(spec.name, &reason));
            }
        }
        Ok(Inputs { elements, form })
    }

    /// A BOOL input.
    pub fn flag(&self, name: &str) -> Option<bool> {
        self.elements.iter().find_map(|(have, element)| match element {
            Element::Bool(value) if *have == name => Some(*value),
            _ => None,
        })
    }

    /// A BYTES input, as text.
    ///
    /// # Errors
    /// `BadInput` with the place at which it stops being UTF-8.
    pub fn text(&self, name: &str) -> Result<Option<&str>> {
        let bytes = self.elements.iter().find_map(|(have, element)| match element {
            Element::Bytes(bytes) if *have == name => Some(bytes),
            _ => None,
        });
        let Some(bytes) = bytes else { return Ok(None) };
        std::str::from_utf8(bytes)
            .map(Some)
            .map_err(|error| bad(name, &format!("is not UTF-8 from byte {} on", error.valid_up_to())))
    }
}

/// Checks the outputs that a request asks for. Empty: all.
///
/// # Errors
/// `BadInput` for a name that is no output, `Unsupported` for shared memory and classification.
pub fn requested_outputs(outputs: &[InferRequestedOutputTensor], model: &str) -> Result<Vec<&'static str>> {
    let mut names = Vec::with_capacity(outputs.len());
    for output in outputs {
        let spec = find(OUTPUTS, &output.name, "output", model)?;
        for key in output.parameters.keys() {
            if key.starts_with("shared_memory") || key == "classification" {
                return Err(ServerError::unsupported(format!("{key} for output '{}'", output.name)));
            }
        }
        names.push(spec.name);
    }
    Ok(names)
}

/// Writes outputs as tensors and, if `form` is raw, their bytes; with `batched` a tensor has a batch dimension of 1 in front.
pub fn encode(outputs: Vec<Output>, form: Form, batched: bool) -> (Vec<InferOutputTensor>, Vec<Bytes>) {
    let mut tensors = Vec::with_capacity(outputs.len());
    let mut raw = Vec::new();
    for output in outputs {
        let len = output.elements.len() as i64;
        let mut tensor = InferOutputTensor {
            name: output.name.into(),
            datatype: wire_name(output.elements.data_type()).into(),
            shape: if batched { vec![1, len] } else { vec![len] },
            ..InferOutputTensor::default()
        };
        match form {
            Form::Typed => tensor.contents = Some(output.elements.into_contents()),
            Form::Raw => raw.push(output.elements.to_raw()),
        }
        tensors.push(tensor);
    }
    (tensors, raw)
}

impl Elements {
    fn len(&self) -> usize {
        match self {
            Elements::Strings(strings) => strings.len(),
            Elements::Floats(floats) => floats.len(),
            Elements::Counts(counts) => counts.len(),
        }
    }

    fn data_type(&self) -> DataType {
        match self {
            Elements::Strings(_) => DataType::TypeString,
            Elements::Floats(_) => DataType::TypeFp32,
            Elements::Counts(_) => DataType::TypeUint32,
        }
    }

    fn into_contents(self) -> InferTensorContents {
        let mut contents = InferTensorContents::default();
        match self {
            Elements::Strings(strings) => contents.bytes_contents = strings.into_iter().map(Bytes::from).collect(),
            Elements::Floats(floats) => contents.fp32_contents = floats,
            Elements::Counts(counts) => contents.uint_contents = counts,
        }
        contents
    }

    fn to_raw(&self) -> Bytes {
        let mut raw = BytesMut::new();
        match self {
            Elements::Strings(strings) => {
                for string in strings {
                    raw.put_u32_le(string.len() as u32);
                    raw.put_slice(string.as_bytes());
                }
            }
            Elements::Floats(floats) => floats.iter().for_each(|value| raw.put_f32_le(*value)),
            Elements::Counts(counts) => counts.iter().for_each(|value| raw.put_u32_le(*value)),
        }
        raw.freeze()
    }
}

fn bad(input: &str, reason: &str) -> ServerError {
    ServerError::bad_input(format!("input '{input}'"), reason)
}

fn find<'a>(specs: &'a [TensorSpec], name: &str, kind: &str, model: &str) -> Result<&'a TensorSpec> {
    specs.iter().find(|spec| spec.name == name).ok_or_else(|| {
        let known: Vec<&str> = specs.iter().map(|spec| spec.name).collect();
        let reason = format!("is unexpected for model '{model}', which has {}", known.join(", "));
        ServerError::bad_input(format!("{kind} '{name}'"), reason)
    })
}

fn check_type(tensor: &InferInputTensor, spec: &TensorSpec, model: &str) -> Result<()> {
    let expected = wire_name(spec.data_type);
    if tensor.datatype == expected {
        return Ok(());
    }
    let given = if tensor.datatype.is_empty() { "<invalid>" } else { &tensor.datatype };
    Err(bad(&tensor.name, &format!("data-type is '{given}', but model '{model}' expects '{expected}'")))
}

/// Every input has one element, so a shape can only be right or wrong: nothing is multiplied or allocated by it.
fn check_shape(tensor: &InferInputTensor, spec: &TensorSpec, model: &str, batched: bool) -> Result<()> {
    let expected = if batched { [&[1], spec.dims].concat() } else { spec.dims.to_vec() };
    if tensor.shape == expected {
        return Ok(());
    }
    let reason = match tensor.shape.as_slice() {
        [] => format!("has no shape, model '{model}' expects {expected:?}"),
        [batch, rest @ ..] if batched && rest == spec.dims && *batch > 1 => {
            format!("has a batch of {batch} for model '{model}': send each prompt as a request, they run together")
        }
        shape => format!("unexpected shape for model '{model}': expected {expected:?}, got {shape:?}"),
    };
    Err(bad(&tensor.name, &reason))
}

fn typed_element(tensor: &InferInputTensor, spec: &TensorSpec) -> Result<Element> {
    let Some(contents) = &tensor.contents else { return Err(no_data(&tensor.name)) };
    let lists = [
        ("BOOL", contents.bool_contents.len()),
        ("INT32", contents.int_contents.len()),
        ("INT64", contents.int64_contents.len()),
        ("UINT32", contents.uint_contents.len()),
        ("UINT64", contents.uint64_contents.len()),
        ("FP32", contents.fp32_contents.len()),
        ("FP64", contents.fp64_contents.len()),
        ("BYTES", contents.bytes_contents.len()),
    ];
    let expected = wire_name(spec.data_type);
    if let Some((kind, _)) = lists.iter().find(|(kind, len)| *len > 0 && *kind != expected) {
        return Err(bad(&tensor.name, &format!("has contents of type {kind}, its data-type is {expected}")));
    }
    let count = contents.bool_contents.len() + contents.bytes_contents.len();
    if count == 0 {
        return Err(no_data(&tensor.name));
    }
    let element = match spec.data_type {
        DataType::TypeBool => contents.bool_contents.first().map(|value| Element::Bool(*value)),
        _ => contents.bytes_contents.first().map(|bytes| Element::Bytes(bytes.clone())),
    };
    match element {
        Some(element) if count == 1 => Ok(element),
        _ => Err(bad(&tensor.name, &format!("has {count} elements, its shape says 1"))),
    }
}

fn raw_element(entry: &Bytes, spec: &TensorSpec) -> Result<Element> {
    if spec.data_type == DataType::TypeBool {
        return match entry.as_ref() {
            [byte] => Ok(Element::Bool(*byte != 0)),
            bytes => Err(bad(spec.name, &format!("raw entry has {} bytes, a BOOL has 1", bytes.len()))),
        };
    }
    let Some((length, rest)) = entry.split_first_chunk::<4>() else {
        return Err(bad(
            spec.name,
            &format!("raw entry has {} bytes, the length of a string alone has 4", entry.len()),
        ));
    };
    let length = u32::from_le_bytes(*length) as usize;
    if rest.len() < length {
        let reason = format!("incomplete string: {length} bytes are announced and {} are there", rest.len());
        return Err(bad(spec.name, &reason));
    }
    if rest.len() > length {
        let reason = format!("raw entry has {} bytes after its one string", rest.len() - length);
        return Err(bad(spec.name, &reason));
    }
    Ok(Element::Bytes(entry.slice(4..)))
}

fn no_data(name: &str) -> ServerError {
    bad(name, "has no data, neither in its contents nor in raw_input_contents")
}

#[cfg(test)]
mod tests;
