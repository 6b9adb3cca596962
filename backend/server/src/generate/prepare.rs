//! From a request as it came to what the engine takes: tokens, and every parameter filled in.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drafthorse_control::{Logprobs, SamplingParams, TokenId, Wants};
use drafthorse_worker::grammar::Compiled;

use super::defaults::GenerationDefaults;
use super::model::ServedModel;
use super::request::{Dialect, GenerateRequest, Prompt};
use crate::error::{Result, ServerError};
use crate::params::{BadWord, GenerateParams, MAX_DRAFTS, Truncate};

/// Temperatures below are 0: dividing by them would leave nothing but infinities.
const MIN_TEMPERATURE: f32 = 1e-5;

/// Tokens of an answer that sets no limit, but for chat.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// A request, ready to be handed to the engine once a choice.
pub(super) struct Prepared {
    pub(super) prompt: Arc<[TokenId]>,
    pub(super) params: GenerateParams,
    /// That of the first choice.
    pub(super) sampling: SamplingParams,
    pub(super) wants: Wants,
    pub(super) grammar: Option<Arc<Compiled>>,
    pub(super) queue_timeout: Option<Duration>,
    pub(super) timeout: Option<Duration>,
    pub(super) arrived: Instant,
    /// Time from text to tokens.
    pub(super) encoding: Duration,
}

impl ServedModel {
    /// # Errors
    /// If the request can never run.
    pub(super) async fn prepare(&self, request: GenerateRequest, arrived: Instant) -> Result<Prepared> {
        let GenerateRequest { prompt, params, dialect, queue_timeout, timeout } = request;
        params.check()?;
        self.check_choices(1, &params)?;
        if self.is_strict() {
            params.check_strict()?;
        }
        let grammar = match &params.guided {
            Some(guided) => Some(self.compile(guided).await?),
            None => None,
        };
        let encoding = Instant::now();
        let prompt = self.prompt_tokens(prompt, &params).await?;
        let encoding = encoding.elapsed();
        let sampling = self.sampling(&params, dialect, prompt.len())?;
        let mut wants = Wants { logprobs: wanted(params.logprobs), prompt_logprobs: wanted(params.prompt_logprobs) };
        if params.num_candidates() > params.n && wants.logprobs == Logprobs::None {
            // Which are best is a matter of their log-probabilities.
            wants.logprobs = Logprobs::Top(0);
        }
        if let (Some(rule), true) = (self.lossy_rule(), wants.logprobs != Logprobs::None) {
            let field = if params.logprobs.is_some() { "logprobs" } else { "best_of" };
            let reason = format!("needs log-probabilities of what was sampled: not with speculate_verify {rule}");
            return Err(ServerError::bad_input(field, reason));
        }
        Ok(Prepared {
            prompt: prompt.into(),
            params,
            sampling,
            wants,
            grammar,
            queue_timeout,
            timeout,
            arrived,
            encoding,
        })
    }

    /// # Errors
    /// `BadInput` if a request for so many prompts asks for more choices than can ever run and wait at once.
    pub fn check_choices(&self, num_prompts: usize, params: &GenerateParams) -> Result<()> {
        let limits = self.engine().limits();
        let most = limits.max_num_seqs + limits.max_waiting;
        let per_prompt = params.num_candidates() as usize;
        let choices = num_prompts.saturating_mul(per_prompt);
        if choices <= most {
            return Ok(());
        }
        let field = match (per_prompt, params.best_of) {
            (1, _) => "prompt",
            (_, None) => "n",
            (_, Some(_)) => "best_of",
        };
        let reason =
            format!("asks for {choices} choices with {num_prompts} prompts, at most {most} can run and wait at once");
        Err(ServerError::bad_input(field, reason))
    }

    async fn prompt_tokens(&self, prompt: Prompt, params: &GenerateParams) -> Result<Vec<TokenId>> {
        let (text, add_special_tokens) = match prompt {
            Prompt::Tokens(tokens) => return self.check_prompt(tokens, params),
            Prompt::Text(text) => (text, true),
            Prompt::Rendered(text) => (text, false),
        };
        // Megabytes too much need not be cut into tokens to know it.
        let fewest = self.tokenizer().fewest_tokens(text.len());
        if fewest >= self.max_len() && params.truncate_prompt_tokens.is_none() {
            return Err(ServerError::PromptTooLong { tokens: fewest, at_least: true, max: self.max_len() });
        }
        let tokens = self.tokenizer().encode(text, add_special_tokens).await?;
        self.check_prompt(tokens, params)
    }

    fn check_prompt(&self, mut tokens: Vec<TokenId>, params: &GenerateParams) -> Result<Vec<TokenId>> {
        if tokens.is_empty() {
            return Err(ServerError::bad_input("prompt", "is empty, the model needs at least one token to continue"));
        }
        let max = self.max_len();
        if let Some(truncate) = params.truncate_prompt_tokens {
            let answer = params.max_tokens.map_or(1, |tokens| tokens as usize);
            let fits = max.saturating_sub(answer).max(1);
            let keep = match truncate {
                Truncate::ToFit => fits,
                Truncate::ToLast(last) => fits.min(last as usize),
            };
            tokens.drain(..tokens.len().saturating_sub(keep));
        }
        if tokens.len() >= max {
            return Err(ServerError::PromptTooLong { tokens: tokens.len(), at_least: false, max });
        }
        match params.max_tokens {
            Some(answer) if answer as usize >= max => {
                let reason = format!("is {answer}, the model takes at most {max} with at least one for the prompt");
                Err(ServerError::bad_input("max_tokens", reason))
            }
            Some(answer) if tokens.len() + answer as usize > max => {
                let reason = format!(
                    "is {answer}, which with the prompt's {} tokens is more than the {max} that the model takes; \
                     truncate_prompt_tokens would cut the prompt",
                    tokens.len()
                );
                Err(ServerError::bad_input("max_tokens", reason))
            }
            _ => Ok(tokens),
        }
    }

    /// Fills in what the request left open.
    fn sampling(&self, params: &GenerateParams, dialect: Dialect, prompt_tokens: usize) -> Result<SamplingParams> {
        let vocab_size = self.engine().limits().vocab_size;
        let bad_words = self.bad_words(&params.bad_words)?;
        let stops = params.stop_token_ids.iter().map(|id| ("stop_token_ids", id));
        let biased = params.logit_bias.iter().map(|(id, _)| ("logit_bias", id));
        let allowed = params.allowed_token_ids.iter().map(|id| ("allowed_token_ids", id));
        let bad = bad_words.iter().flatten().map(|id| ("bad_words", id));
        if let Some((field, id)) = stops.chain(biased).chain(allowed).chain(bad).find(|(_, id)| **id >= vocab_size) {
            return Err(ServerError::bad_input(field, format!("has token {id}, the vocabulary has {vocab_size}")));
        }

        let silent = GenerationDefaults::default();
        let defaults = if dialect == Dialect::Tensors { &silent } else { self.defaults() };
        let temperature = params.temperature.or(defaults.temperature).unwrap_or(1.0);
        let temperature = if temperature < MIN_TEMPERATURE { 0.0 } else { temperature };
        if temperature == 0.0 {
            params.check_greedy()?;
        }
        let mut stop_tokens = params.stop_token_ids.clone();
        if !params.ignore_eos {
            stop_tokens.extend(self.defaults().end_tokens.iter().filter(|&&id| id < vocab_size));
        }
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        let room = (self.max_len() - prompt_tokens) as u32;
        let silent_max = if dialect == Dialect::Chat { room } else { DEFAULT_MAX_TOKENS.max(params.min_tokens) };
        let max_tokens = params.max_tokens.unwrap_or(silent_max).min(room);
        Ok(SamplingParams {
            temperature,
            top_k: params.top_k.or(defaults.top_k).unwrap_or(0),
            top_p: params.top_p.or(defaults.top_p).unwrap_or(1.0),
            min_p: params.min_p.or(defaults.min_p).unwrap_or(0.0),
            typical_p: params.typical_p.unwrap_or(1.0),
            repetition_penalty: params.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            presence_penalty: params.presence_penalty.unwrap_or(0.0),
            frequency_penalty: params.frequency_penalty.unwrap_or(0.0),
            logit_bias: params.logit_bias.clone(),
            allowed_tokens: params.allowed_token_ids.clone(),
            bad_words,
            seed: params.seed.unwrap_or_else(fresh_seed),
            max_tokens,
            min_tokens: params.min_tokens.min(max_tokens),
            stop_tokens,
            max_drafts: self.max_drafts(params)?,
        })
    }

    /// A request may lower the number of drafts, or make none.
    fn max_drafts(&self, params: &GenerateParams) -> Result<Option<u32>> {
        let most = self.engine().limits().max_drafts;
        match params.max_drafts {
            Some(drafts) if drafts > most => {
                let of_model = if most == 0 { "the model makes none" } else { "the model's own number" };
                Err(ServerError::bad_input(MAX_DRAFTS, format!("must be at most {most}, {of_model}, is {drafts}")))
            }
            _ if params.no_drafts => Ok(Some(0)),
            drafts => Ok(drafts),
        }
    }

    /// Bad words as tokens. A text counts as it is, and with a space before it if that, too, is a word of as many tokens.
    fn bad_words(&self, words: &[BadWord]) -> Result<Vec<Vec<TokenId>>> {
        let mut sequences: Vec<Vec<TokenId>> = Vec::with_capacity(2 * words.len());
        for word in words {
            match word {
                BadWord::Tokens(ids) => sequences.push(ids.clone()),
                BadWord::Text(text) => {
                    let text = text.trim_start();
                    let plain = self.tokenizer().encode_now(text, false)?;
                    let spaced = self.tokenizer().encode_now(&format!(" {text}"), false)?;
                    let counts = spaced.len() == plain.len() && spaced.first() != plain.first();
                    sequences.push(plain);
                    sequences.extend(counts.then_some(spaced));
                }
            }
        }
        sequences.retain(|sequence| !sequence.is_empty());
        Ok(sequences)
    }
}

fn wanted(top: Option<u32>) -> Logprobs {
    top.map_or(Logprobs::None, Logprobs::Top)
}

fn fresh_seed() -> u64 {
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    // Folded, for a few bits of each half are fixed.
    high ^ low.rotate_left(32)
}
