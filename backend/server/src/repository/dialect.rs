//! The tensors that text generation is asked with and answered in: those of Triton's vLLM backend.

use drafthorse_proto::inference::DataType;

/// A tensor that a request may carry, or a response.
#[derive(Debug)]
pub struct TensorSpec {
    pub name: &'static str,
    pub data_type: DataType,
    /// -1 is any size.
    pub dims: &'static [i64],
    pub optional: bool,
}

const fn input(name: &'static str, data_type: DataType) -> TensorSpec {
    TensorSpec { name, data_type, dims: &[1], optional: true }
}

const fn output(name: &'static str, data_type: DataType, dims: &'static [i64]) -> TensorSpec {
    TensorSpec { name, data_type, dims, optional: false }
}

pub const TEXT_INPUT: &str = "text_input";
pub const STREAM: &str = "stream";
pub const SAMPLING_PARAMETERS: &str = "sampling_parameters";
pub const EXCLUDE_INPUT: &str = "exclude_input_in_output";
pub const RETURN_FINISH_REASON: &str = "return_finish_reason";
pub const RETURN_CUMULATIVE_LOGPROB: &str = "return_cumulative_logprob";
pub const RETURN_LOGPROBS: &str = "return_logprobs";
pub const RETURN_NUM_INPUT_TOKENS: &str = "return_num_input_tokens";
pub const RETURN_NUM_OUTPUT_TOKENS: &str = "return_num_output_tokens";

pub const RETURN_ACCEPTANCE: &str = "return_acceptance";

pub const TEXT_OUTPUT: &str = "text_output";
pub const FINISH_REASON: &str = "finish_reason";
pub const CUMULATIVE_LOGPROB: &str = "cumulative_logprob";
pub const LOGPROBS: &str = "logprobs";
/// Of the prompt's tokens, where the parameter of that name asks for them; as vLLM writes them, and not in streams.
pub const PROMPT_LOGPROBS: &str = "prompt_logprobs";
pub const NUM_INPUT_TOKENS: &str = "num_input_tokens";
pub const NUM_OUTPUT_TOKENS: &str = "num_output_tokens";
/// Told with the last response: the share of drafts that held, how many did, and how many there were.
pub const ACCEPTANCE_RATE: &str = "acceptance_rate";
pub const ACCEPTED_DRAFTS: &str = "total_accepted_draft_tokens";
pub const DRAFTS: &str = "total_draft_tokens";

/// What a request may carry.
pub const INPUTS: &[TensorSpec] = &[
    TensorSpec { name: TEXT_INPUT, data_type: DataType::TypeString, dims: &[1], optional: false },
    input(STREAM, DataType::TypeBool),
    input(SAMPLING_PARAMETERS, DataType::TypeString),
    input(EXCLUDE_INPUT, DataType::TypeBool),
    input(RETURN_FINISH_REASON, DataType::TypeBool),
    input(RETURN_CUMULATIVE_LOGPROB, DataType::TypeBool),
    input(RETURN_LOGPROBS, DataType::TypeBool),
    input(RETURN_NUM_INPUT_TOKENS, DataType::TypeBool),
    input(RETURN_NUM_OUTPUT_TOKENS, DataType::TypeBool),
    input(RETURN_ACCEPTANCE, DataType::TypeBool),
];

/// What a response may carry. One element a sequence, so that a request for several has them side by side.
pub const OUTPUTS: &[TensorSpec] = &[
    output(TEXT_OUTPUT, DataType::TypeString, &[-1]),
    output(FINISH_REASON, DataType::TypeString, &[-1]),
    output(CUMULATIVE_LOGPROB, DataType::TypeFp32, &[-1]),
    output(LOGPROBS, DataType::TypeString, &[-1]),
    output(PROMPT_LOGPROBS, DataType::TypeString, &[-1]),
    output(NUM_INPUT_TOKENS, DataType::TypeUint32, &[1]),
    output(NUM_OUTPUT_TOKENS, DataType::TypeUint32, &[-1]),
    output(ACCEPTANCE_RATE, DataType::TypeFp32, &[-1]),
    output(ACCEPTED_DRAFTS, DataType::TypeUint32, &[-1]),
    output(DRAFTS, DataType::TypeUint32, &[-1]),
];

/// A data type's name on the wire.
pub const fn wire_name(data_type: DataType) -> &'static str {
    match data_type {
        DataType::TypeInvalid => "<invalid>",
        DataType::TypeBool => "BOOL",
        DataType::TypeUint8 => "UINT8",
        DataType::TypeUint16 => "UINT16",
        DataType::TypeUint32 => "UINT32",
        DataType::TypeUint64 => "UINT64",
        DataType::TypeInt8 => "INT8",
        DataType::TypeInt16 => "INT16",
        DataType::TypeInt32 => "INT32",
        DataType::TypeInt64 => "INT64",
        DataType::TypeFp16 => "FP16",
        DataType::TypeFp32 => "FP32",
        DataType::TypeFp64 => "FP64",
        DataType::TypeString => "BYTES",
        DataType::TypeBf16 => "BF16",
    }
}
