//! A model for tests that is no model: whatever the prompt, its rank answers with the tokens of a fixed text.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

use drafthorse_control::{
    Admit, FinishReason, Logprobs, RankEnd, RankedToken, Ready, Row, RowResult, Slot, Step, StepResult, TokenId,
    TokenLogprobs, channel,
};
use drafthorse_engine::{Engine, EngineConfig};

use super::{GenerationDefaults, ModelText, ServedModel};
use crate::text::ChatTemplate;
use crate::text::chat::tests::template;
use crate::text::tokenizer::tests::byte_level;

/// The context of the model.
pub(crate) const MAX_LEN: usize = 256;

const BLOCK_SIZE: u32 = 16;

/// A model that answers with `text`, a token a byte, `tokens_per_step` at once, and then with its end token. Must not be empty.
pub(crate) fn model(text: &str, tokens_per_step: usize) -> Arc<ServedModel> {
    Arc::new(made(text, tokens_per_step))
}

/// [`model`], to be changed.
pub(crate) fn made(text: &str, tokens_per_step: usize) -> ServedModel {
    let tokenizer = byte_level();
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    let script: Vec<TokenId> = text.bytes().map(TokenId::from).chain([end]).collect();
    let (link, rank) = channel(0);
    thread::spawn(move || Rank { script, tokens_per_step, slots: HashMap::new() }.run(&rank));
    let max_drafts = tokens_per_step as u32 - 1;
    let ready = Ready {
        num_blocks: 64,
        block_size: BLOCK_SIZE,
        max_model_len: MAX_LEN as u32,
        vocab_size: tokenizer.vocab_size() as u32,
        max_drafts,
        draft_slots: 0,
        needs_host_tokens: false,
        pipeline_depth: 1,
        weight_bytes: 0,
        kv_bytes: 0,
        workspace_bytes: 0,
    };
    let config = EngineConfig { max_num_seqs: 8, ..EngineConfig::default() };
    let engine = Engine::start(config, ready, vec![Box::new(link)]).unwrap();
    let chat_template: Option<ChatTemplate> =
        Some(template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"));
    let defaults = GenerationDefaults { end_tokens: vec![end], ..GenerationDefaults::default() };
    ServedModel::new("llm", 1, ModelText::new(tokenizer, chat_template, defaults), engine)
}

struct Rank {
    script: Vec<TokenId>,
    tokens_per_step: usize,
    slots: HashMap<Slot, Sequence>,
}

struct Sequence {
    admit: Admit,
    /// Known tokens, and those of them that have run.
    num_known: usize,
    num_run: usize,
    num_drafts: usize,
    ended: bool,
}

impl Rank {
    fn run(mut self, end: &RankEnd) {
        while let Some(step) = end.recv() {
            end.send(Ok(self.step(step)));
        }
    }

    fn step(&mut self, step: Step) -> StepResult {
        for slot in &step.release {
            self.slots.remove(slot);
        }
        for admit in step.admit {
            let (num_known, num_run) = (admit.tokens.len(), admit.num_cached as usize);
            self.slots.insert(admit.slot, Sequence { admit, num_known, num_run, num_drafts: 0, ended: false });
        }
        let rows = step.rows.iter().map(|row| self.row(row)).collect();
        StepResult { id: step.id, rows, ..StepResult::default() }
    }

    fn row(&mut self, row: &Row) -> RowResult {
        let sequence = self.slots.get_mut(&row.slot).unwrap();
        let mut result = RowResult::default();
        if sequence.ended {
            return result;
        }
        let ranked = |token, rank| RankedToken { token, logprob: -(rank as f32) / 2.0, rank };
        if row.wants.prompt_logprobs != Logprobs::None {
            let end = (sequence.num_run + row.num_tokens as usize).min(sequence.admit.num_prompt as usize);
            let told = sequence.admit.tokens[sequence.num_run.max(1).min(end)..end].iter();
            result.prompt_logprobs =
                told.map(|&token| TokenLogprobs { token: ranked(token, 1), top: vec![] }).collect();
        }
        let num_drafts = (row.num_drafts as usize).min(sequence.num_drafts);
        sequence.num_run += row.num_tokens as usize - row.num_drafts as usize;
        if sequence.num_run < sequence.num_known {
            return result;
        }
        let sampling = &sequence.admit.sampling;
        for _ in 0..=num_drafts {
            let num_output = sequence.num_known - sequence.admit.num_prompt as usize;
            let token = self.script[num_output.min(self.script.len() - 1)];
            result.accepted.push(token);
            sequence.num_known += 1;
            if let Logprobs::Top(top) = row.wants.logprobs {
                let top = (1..=top).map(|rank| ranked(TokenId::from(b'a') + rank, rank)).collect();
                result.logprobs.push(TokenLogprobs { token: ranked(token, 1), top });
            }
            if sampling.stop_tokens.contains(&token) {
                result.ended = Some(FinishReason::Stop);
            } else if num_output + 1 == sampling.max_tokens as usize || sequence.num_known >= MAX_LEN {
                result.ended = Some(FinishReason::Length);
            }
            if result.ended.is_some() {
                sequence.ended = true;
                return result;
            }
        }
        // All drafts held, so all but the last token have run.
        sequence.num_run = sequence.num_known - 1;
        sequence.num_drafts = self.tokens_per_step - 1;
        result.num_drafts = sequence.num_drafts as u32;
        result
    }
}
