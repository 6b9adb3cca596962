//! From a request's tensors to a generation, and from its chunks to responses.

use std::collections::HashMap;
use std::sync::Arc;

use drafthorse_control::{FinishReason, TokenLogprobs};
use drafthorse_engine::Usage;
use drafthorse_proto::inference::infer_parameter::ParameterChoice;
use drafthorse_proto::inference::{InferParameter, ModelInferRequest, ModelInferResponse};

use super::parameters::Parameters;
use super::tensors::{Elements, Form, Inputs, Output, encode, requested_outputs};
use crate::app::App;
use crate::error::{Result, ServerError};
use crate::generate::{Chunk, Dialect, GenerateRequest, Prompt, logprobs};
use crate::params::{GenerateParams, Given, object};
use crate::repository::Model;
use crate::repository::dialect::{
    ACCEPTANCE_RATE, ACCEPTED_DRAFTS, CUMULATIVE_LOGPROB, DRAFTS, EXCLUDE_INPUT, FINISH_REASON, LOGPROBS,
    NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS, PROMPT_LOGPROBS, RETURN_ACCEPTANCE, RETURN_CUMULATIVE_LOGPROB,
    RETURN_FINISH_REASON, RETURN_LOGPROBS, RETURN_NUM_INPUT_TOKENS, RETURN_NUM_OUTPUT_TOKENS, SAMPLING_PARAMETERS,
    STREAM, TEXT_INPUT, TEXT_OUTPUT,
};

/// The response parameter that marks the last response of a request.
pub const FINAL: &str = "triton_final_response";

/// The response parameter that says which of the request's parameters were passed over.
const WARNINGS: &str = "warnings";

/// What vLLM's backend says of a sequence that goes on.
const NOT_FINISHED: &str = "None";

/// A request that has been understood.
pub struct Call {
    pub model: Arc<Model>,
    pub stream: bool,
    pub request: GenerateRequest,
    pub answer: Answer,
}

/// How the responses to a request look, and what has been sent of them.
pub struct Answer {
    model: Arc<Model>,
    id: String,
    form: Form,
    /// Names of the outputs that the caller wants, in the order of the model's outputs.
    outputs: Vec<&'static str>,
    /// What of the request's parameters was passed over; told with the last response.
    warnings: Vec<String>,
    /// The caller asked for log-probabilities of tokens, not only for their sum.
    lists_logprobs: bool,
    /// What has been told of each choice.
    told: Vec<Told>,
}

#[derive(Clone, Debug)]
struct Told {
    /// Put in front of the first text.
    echo: Option<Arc<str>>,
    cumulative_logprob: f64,
    finish: &'static str,
}

/// Answers a request that has one response.
///
/// # Errors
/// Whatever is wrong with the request, or went wrong.
pub async fn answer_once(app: &App, request: ModelInferRequest) -> Result<ModelInferResponse> {
    let _admission = app.admit()?;
    let mut call = Call::read(app, request)?;
    if call.stream {
        let reason = "is true, but ModelInfer has one response: use ModelStreamInfer, or leave it out";
        return Err(ServerError::bad_input(format!("input '{STREAM}'"), reason));
    }
    call.whole().await
}

impl Call {
    /// Checks everything that can be checked without the engine.
    ///
    /// # Errors
    /// `UnknownModel`, `NotReady`, `BadInput` naming the field, and the like.
    pub fn read(app: &App, mut request: ModelInferRequest) -> Result<Self> {
        let model = app.repository.model(&request.model_name, &request.model_version)?;
        let batched = model.config.max_batch_size > 0;
        let parameters = Parameters::read(&request.parameters)?;
        let inputs = Inputs::decode(&mut request, model.name(), batched)?;
        let requested = requested_outputs(&request.outputs, model.name())?;

        let stream = inputs.flag(STREAM).unwrap_or(false);
        if stream && !model.decoupled() {
            let reason = "is true, but the model's transaction policy is not decoupled: it has one response a request";
            return Err(ServerError::bad_input(format!("input '{STREAM}'"), reason));
        }
        let exclude_input = inputs.flag(EXCLUDE_INPUT);
        if stream && exclude_input == Some(false) {
            let reason = "is false, which does not go with stream: deltas never repeat the prompt";
            return Err(ServerError::bad_input(format!("input '{EXCLUDE_INPUT}'"), reason));
        }
        let prompt: Arc<str> = inputs.text(TEXT_INPUT)?.unwrap_or_default().into();
        if prompt.is_empty() {
            return Err(ServerError::bad_input(format!("input '{TEXT_INPUT}'"), "the prompt is empty"));
        }
        let sampling = match inputs.text(SAMPLING_PARAMETERS)? {
            Some(json) => {
                let tensor = Given { map: object(SAMPLING_PARAMETERS, json)?, place: SAMPLING_PARAMETERS };
                tensor.and(Given { map: parameters.sampling, place: "the request's parameters" })?
            }
            None => parameters.sampling,
        };
        let mut params = GenerateParams::from_map(&sampling)?;
        match (params.priority, parameters.priority) {
            (_, 0) => {}
            (0, level) => params.priority = level,
            (first, second) if first == second => {}
            (first, second) => {
                let reason = format!("is {first} among the sampling parameters and {second} beside them: give it once");
                return Err(ServerError::bad_input("priority", reason));
            }
        }
        if stream {
            params.check_stream()?;
        }
        let lists_logprobs = params.logprobs.is_some();
        if inputs.flag(RETURN_CUMULATIVE_LOGPROB) == Some(true) {
            params.logprobs.get_or_insert(0);
        }
        let asked = |by: &str| inputs.flag(by) == Some(true);
        let outputs = [
            (TEXT_OUTPUT, true),
            (FINISH_REASON, asked(RETURN_FINISH_REASON)),
            (CUMULATIVE_LOGPROB, asked(RETURN_CUMULATIVE_LOGPROB)),
            (LOGPROBS, asked(RETURN_LOGPROBS)),
            // Whoever sets the parameter has asked.
            (PROMPT_LOGPROBS, params.prompt_logprobs.is_some()),
            (NUM_INPUT_TOKENS, asked(RETURN_NUM_INPUT_TOKENS)),
            (NUM_OUTPUT_TOKENS, asked(RETURN_NUM_OUTPUT_TOKENS)),
            (ACCEPTANCE_RATE, asked(RETURN_ACCEPTANCE)),
            (ACCEPTED_DRAFTS, asked(RETURN_ACCEPTANCE)),
            (DRAFTS, asked(RETURN_ACCEPTANCE)),
        ];
        let wanted = |name: &&str| requested.is_empty() || requested.contains(name);
        let outputs = outputs.iter().filter(|(_, asked)| *asked).map(|(name, _)| *name).filter(wanted).collect();
        let echo = (!stream && exclude_input != Some(true)).then(|| prompt.clone());
        let told = Told { echo, cumulative_logprob: 0.0, finish: NOT_FINISHED };
        let told = vec![told; params.n as usize];
        let mut generate = GenerateRequest::new(Prompt::Text(prompt), params, Dialect::Tensors);
        generate.queue_timeout = parameters.queue_timeout;
        let answer = Answer {
            model: model.clone(),
            id: request.id,
            form: inputs.form,
            outputs,
            warnings: generate.params.warnings.clone(),
            lists_logprobs,
            told,
        };
        Ok(Call { model, stream, request: generate, answer })
    }

    /// The one response of a request that does not stream.
    ///
    /// # Errors
    /// As the generation's.
    pub async fn whole(&mut self) -> Result<ModelInferResponse> {
        let choices = self.model.served.generate_choices(self.request.clone()).await?;
        let prompt_tokens = choices.prompt_tokens();
        let answer = Box::pin(choices.whole()).await?;
        let chunks: Vec<Chunk> = answer.choices.into_iter().map(Chunk::from).collect();
        Ok(self.answer.response(&chunks, prompt_tokens))
    }
}

impl Answer {
    /// The response that carries a chunk of one choice; the others say nothing in it.
    pub fn chunk(&mut self, index: usize, chunk: Chunk, prompt_tokens: usize) -> ModelInferResponse {
        let mut chunks = vec![Chunk::default(); self.told.len()];
        chunks[index] = chunk;
        self.response(&chunks, prompt_tokens)
    }

    /// All choices have ended.
    pub fn is_over(&self) -> bool {
        self.told.iter().all(|told| told.finish != NOT_FINISHED)
    }

    /// The response that carries `chunks`, one a choice. Each output has as many elements.
    pub fn response(&mut self, chunks: &[Chunk], prompt_tokens: usize) -> ModelInferResponse {
        let mut texts = Vec::with_capacity(chunks.len());
        for (told, chunk) in self.told.iter_mut().zip(chunks) {
            told.cumulative_logprob += chunk.logprobs.iter().map(|entry| f64::from(entry.token.logprob)).sum::<f64>();
            if let Some(finish) = &chunk.finish {
                told.finish = FinishReason::name(finish.reason);
            }
            texts.push(match told.echo.take() {
                Some(prompt) => format!("{prompt}{}", chunk.text),
                None => chunk.text.clone(),
            });
        }
        // Until a sequence has ended it is not known.
        let usage = |chunk: &Chunk| chunk.finish.as_ref().map_or_else(Usage::default, |finish| finish.usage);
        let tokenizer = self.model.served.tokenizer();
        let output = |name: &'static str| {
            let elements = match name {
                FINISH_REASON => Elements::Strings(self.told.iter().map(|told| told.finish.to_owned()).collect()),
                CUMULATIVE_LOGPROB => {
                    Elements::Floats(self.told.iter().map(|told| told.cumulative_logprob as f32).collect())
                }
                LOGPROBS => Elements::Strings(chunks.iter().map(|chunk| self.logprobs_json(&chunk.logprobs)).collect()),
                PROMPT_LOGPROBS => Elements::Strings(
                    chunks
                        .iter()
                        .map(|chunk| logprobs::of_prompt(tokenizer, &chunk.prompt_logprobs).to_string())
                        .collect(),
                ),
                NUM_INPUT_TOKENS => Elements::Counts(vec![prompt_tokens as u32]),
                NUM_OUTPUT_TOKENS => {
                    Elements::Counts(chunks.iter().map(|chunk| chunk.token_ids.len() as u32).collect())
                }
                ACCEPTANCE_RATE => {
                    let rate = |usage: Usage| usage.drafts_accepted as f32 / usage.drafts_verified.max(1) as f32;
                    Elements::Floats(chunks.iter().map(|chunk| rate(usage(chunk))).collect())
                }
                ACCEPTED_DRAFTS => Elements::Counts(chunks.iter().map(|chunk| usage(chunk).drafts_accepted).collect()),
                DRAFTS => Elements::Counts(chunks.iter().map(|chunk| usage(chunk).drafts_verified).collect()),
                _ => Elements::Strings(std::mem::take(&mut texts)),
            };
            Output { name, elements }
        };
        let outputs = self.outputs.iter().copied().map(output).collect();
        let mut parameters = HashMap::new();
        if self.is_over() && !self.warnings.is_empty() {
            let warnings = ParameterChoice::StringParam(self.warnings.join("; "));
            parameters.insert(WARNINGS.into(), InferParameter { parameter_choice: Some(warnings) });
        }
        let (outputs, raw_output_contents) = encode(outputs, self.form, self.model.config.max_batch_size > 0);
        ModelInferResponse {
            model_name: self.model.name().into(),
            model_version: self.model.version.to_string(),
            id: self.id.clone(),
            parameters,
            outputs,
            raw_output_contents,
        }
    }

    /// A list with an object a token: ids to their log-probability, rank and text; `null` if the request did not ask for any.
    fn logprobs_json(&self, tokens: &[TokenLogprobs]) -> String {
        if !self.lists_logprobs {
            return "null".into();
        }
        logprobs::of_output(self.model.served.tokenizer(), tokens).to_string()
    }
}

/// A response's parameter.
pub fn bool_parameter(value: bool) -> InferParameter {
    InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(value)) }
}
