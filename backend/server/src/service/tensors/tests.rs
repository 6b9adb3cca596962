use super::*;

/// A request in a line: `name TYPE shape data`, where data is `raw:..`, `bytes:..`, `bool:..`, `int:..` or `-`; commas separate
/// inputs. In raw data `\xNN` is a byte.
fn request(text: &str) -> ModelInferRequest {
    let mut request = ModelInferRequest::default();
    for line in text.split(", ").filter(|line| !line.is_empty()) {
        let parts: Vec<&str> = line.splitn(4, ' ').collect();
        let shape = parts[2].trim_matches(|c| c == '[' || c == ']');
        let mut tensor = InferInputTensor {
            name: parts[0].into(),
            datatype: parts[1].trim_matches('\'').into(),
            shape: shape.split(';').filter(|dim| !dim.is_empty()).map(|dim| dim.parse().unwrap()).collect(),
            ..InferInputTensor::default()
        };
        let mut contents = InferTensorContents::default();
        match parts[3].split_once(':') {
            Some(("raw", bytes)) => request.raw_input_contents.push(unescape(bytes)),
            Some(("bytes", value)) => contents.bytes_contents = value.split('|').map(|v| v.to_owned().into()).collect(),
            Some(("bool", value)) => contents.bool_contents = vec![value == "true"],
            Some(("int", value)) => contents.int_contents = vec![value.parse().unwrap()],
            _ => {}
        }
        if contents != InferTensorContents::default() {
            tensor.contents = Some(contents);
        }
        request.inputs.push(tensor);
    }
    request
}

fn unescape(text: &str) -> Bytes {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("\\x") {
        bytes.extend_from_slice(&rest.as_bytes()[..at]);
        bytes.push(u8::from_str_radix(&rest[at + 2..at + 4], 16).unwrap());
        rest = &rest[at + 4..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    bytes.into()
}

fn decoded(text: &str, batched: bool) -> String {
    match Inputs::decode(&mut request(text), "m", batched) {
        Err(error) => format!("{:?} {error}", error.code()),
        Ok(inputs) => match inputs.text("text_input") {
            Ok(prompt) => format!("{:?} {:?} stream={:?}", inputs.form, prompt.unwrap_or("-"), inputs.flag("stream")),
            Err(error) => format!("{:?} {error}", error.code()),
        },
    }
}

#[test]
fn typed_and_raw_inputs_are_read() {
    assert_eq!(decoded("text_input BYTES [1] bytes:hi", false), "Typed \"hi\" stream=None");
    assert_eq!(
        decoded("text_input BYTES [1] raw:\\x02\\x00\\x00\\x00hi, stream BOOL [1] raw:\\x01", false),
        "Raw \"hi\" stream=Some(true)"
    );
    assert_eq!(
        decoded("stream BOOL [1] bool:true, text_input BYTES [1] bytes:", false),
        "Typed \"\" stream=Some(true)"
    );
    assert_eq!(decoded("text_input BYTES [1;1] bytes:hi", true), "Typed \"hi\" stream=None");
    assert_eq!(decoded("text_input BYTES [1] raw:\\x03\\x00\\x00\\x00a\\x00b", false), "Raw \"a\\0b\" stream=None");
}

#[test]
fn what_is_wrong_is_said_of_the_tensor() {
    for (text, said) in [
        ("", "input 'text_input': is missing: model 'm' got inputs []"),
        ("stream BOOL [1] bool:true", "input 'text_input': is missing: model 'm' got inputs [stream]"),
        (
            "text_input BYTES [1] bytes:a, stream BOOL [1] raw:\\x01",
            "input 'text_input': has contents, which must not be given beside raw_input_contents",
        ),
        ("text_input INT32 [1] bytes:a", "input 'text_input': data-type is 'INT32', but model 'm' expects 'BYTES'"),
        ("text_input '' [1] bytes:a", "input 'text_input': data-type is '<invalid>', but model 'm' expects 'BYTES'"),
        ("text_input BYTES [1] int:7", "input 'text_input': has contents of type INT32, its data-type is BYTES"),
        (
            "text_input BYTES [1] -",
            "input 'text_input': has no data, neither in its contents nor in raw_input_contents",
        ),
        ("text_input BYTES [1] bytes:a|b", "input 'text_input': has 2 elements, its shape says 1"),
        ("text_input BYTES [0] bytes:a", "input 'text_input': unexpected shape for model 'm': expected [1], got [0]"),
        ("text_input BYTES [-1] bytes:a", "input 'text_input': unexpected shape for model 'm': expected [1], got [-1]"),
        (
            "text_input BYTES [8589934592;8589934592] bytes:a",
            "input 'text_input': unexpected shape for model 'm': expected [1], got [8589934592, 8589934592]",
        ),
        ("text_input BYTES [] bytes:a", "input 'text_input': has no shape, model 'm' expects [1]"),
        (
            "text_input BYTES [1] raw:\\x02\\x00",
            "input 'text_input': raw entry has 2 bytes, the length of a string alone has 4",
        ),
        (
            "text_input BYTES [1] raw:\\xff\\x00\\x00\\x00hi",
            "input 'text_input': incomplete string: 255 bytes are announced and 2 are there",
        ),
        (
            "text_input BYTES [1] raw:\\x01\\x00\\x00\\x00hi",
            "input 'text_input': raw entry has 1 bytes after its one string",
        ),
        ("text_input BYTES [1] raw:\\x02\\x00\\x00\\x00\\xff\\xfe", "input 'text_input': is not UTF-8 from byte 0 on"),
        (
            "text_input BYTES [1] raw:\\x00\\x00\\x00\\x00, stream BOOL [1] raw:ab",
            "input 'stream': raw entry has 2 bytes, a BOOL has 1",
        ),
        ("text_input BYTES [1] bytes:a, text_input BYTES [1] bytes:b", "input 'text_input': is given twice"),
        (
            "text_input BYTES [1] raw:\\x00\\x00\\x00\\x00, stream BOOL [1] -",
            "input 'stream': has no entry in raw_input_contents",
        ),
    ] {
        assert_eq!(decoded(text, false), format!("InvalidArgument {said}"), "{text}");
    }
    let unknown = decoded("prompt BYTES [1] bytes:a", false);
    assert!(
        unknown.starts_with("InvalidArgument input 'prompt': is unexpected for model 'm', which has text_input, "),
        "{unknown}"
    );
    let batch = decoded("text_input BYTES [3;1] bytes:a", true);
    assert!(
        batch.ends_with("has a batch of 3 for model 'm': send each prompt as a request, they run together"),
        "{batch}"
    );
}

#[test]
fn surplus_raw_entries_are_refused() {
    let mut surplus = request("text_input BYTES [1] raw:\\x00\\x00\\x00\\x00");
    surplus.raw_input_contents.push(Bytes::new());
    let error = Inputs::decode(&mut surplus, "m", false).unwrap_err();
    assert_eq!(error.to_string(), "raw_input_contents: has 2 entries for 1 inputs");
}

#[test]
fn outputs_are_written_in_the_form_of_the_request() {
    let outputs = || {
        vec![
            Output { name: "text_output", elements: Elements::Strings(vec!["hé".into()]) },
            Output { name: "num_output_tokens", elements: Elements::Counts(vec![258]) },
        ]
    };
    let (tensors, raw) = encode(outputs(), Form::Raw, false);
    assert_eq!(raw, [Bytes::from_static(b"\x03\0\0\0h\xc3\xa9"), Bytes::from_static(b"\x02\x01\0\0")]);
    assert!(tensors.iter().all(|tensor| tensor.contents.is_none() && tensor.shape == [1]));
    let (tensors, raw) = encode(outputs(), Form::Typed, true);
    assert!(raw.is_empty());
    assert_eq!(tensors[0].shape, [1, 1]);
    assert_eq!(tensors[0].contents.as_ref().unwrap().bytes_contents[0], "hé");
    assert_eq!((tensors[1].datatype.as_str(), tensors[1].contents.as_ref().unwrap().uint_contents[0]), ("UINT32", 258));
}

#[test]
fn an_output_must_exist() {
    let output = |name: &str| InferRequestedOutputTensor { name: name.into(), ..Default::default() };
    assert_eq!(requested_outputs(&[output("text_output")], "m").unwrap(), ["text_output"]);
    let error = requested_outputs(&[output("text")], "m").unwrap_err().to_string();
    assert!(error.starts_with("output 'text': is unexpected for model 'm', which has text_output, "), "{error}");
}
