//! A rank without a model. The next token is a hash of all tokens before it, read back from its own KV blocks through the
//! block table, so a block that was given to two sequences, or reused too early, shows in the text.

use std::collections::HashMap;
use std::time::Duration;

use drafthorse_control::{
    Admit, BlockId, FinishReason, Logprobs, RankEnd, RankedToken, Ready, Row, RowError, RowResult, SamplingParams,
    Slot, Step, StepResult, Timing, TokenId, TokenLogprobs,
};

pub(crate) const VOCAB_SIZE: u32 = 1000;

/// A prompt that begins with it fails at its first output token.
pub(crate) const POISON: TokenId = 666;

pub(crate) fn next_token(history: impl IntoIterator<Item = TokenId>) -> TokenId {
    let hash = history.into_iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, token| {
        (hash ^ u64::from(token)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    });
    (hash % u64::from(VOCAB_SIZE)) as TokenId
}

/// The output of a prompt that runs alone.
pub(crate) fn text(prompt: &[TokenId], sampling: &SamplingParams) -> (Vec<TokenId>, FinishReason) {
    let mut tokens = prompt.to_vec();
    loop {
        let token = next_token(tokens.iter().copied());
        tokens.push(token);
        let num_output = tokens.len() - prompt.len();
        if let Some(reason) = ended(token, num_output, sampling) {
            return (tokens.split_off(prompt.len()), reason);
        }
    }
}

fn ended(token: TokenId, num_output: usize, sampling: &SamplingParams) -> Option<FinishReason> {
    if num_output >= sampling.min_tokens as usize && sampling.stop_tokens.contains(&token) {
        Some(FinishReason::Stop)
    } else if num_output >= sampling.max_tokens as usize {
        Some(FinishReason::Length)
    } else {
        None
    }
}

pub(crate) fn ready(num_blocks: u32, block_size: u32) -> Ready {
    Ready {
        num_blocks,
        block_size,
        max_model_len: 4096,
        vocab_size: VOCAB_SIZE,
        max_drafts: 0,
        draft_slots: 0,
        needs_host_tokens: false,
        pipeline_depth: 1,
        weight_bytes: 0,
        kv_bytes: 0,
        workspace_bytes: 0,
    }
}

pub(crate) struct FakeRank {
    block_size: usize,
    max_drafts: usize,
    slots: HashMap<Slot, FakeSlot>,
    /// What stands at each place of each block: a position and its token.
    kv: Vec<Option<(usize, TokenId)>>,
    /// How many block tables each block stands in.
    holders: Vec<usize>,
    last_step: u64,
    /// What a step takes, and each of its tokens.
    pub(crate) step_time: Duration,
    pub(crate) token_time: Duration,
}

struct FakeSlot {
    tokens: Vec<TokenId>,
    num_prompt: usize,
    num_computed: usize,
    blocks: Vec<BlockId>,
    drafts: Vec<TokenId>,
    sampling: SamplingParams,
    has_ended: bool,
}

impl FakeRank {
    pub(crate) fn new(ready: &Ready) -> Self {
        FakeRank {
            block_size: ready.block_size as usize,
            max_drafts: ready.max_drafts as usize,
            slots: HashMap::new(),
            kv: vec![None; (ready.num_blocks * ready.block_size) as usize],
            holders: vec![0; ready.num_blocks as usize],
            last_step: 0,
            step_time: Duration::ZERO,
            token_time: Duration::ZERO,
        }
    }

    /// Answers steps until the engine is gone.
    pub(crate) fn serve(mut self, end: &RankEnd) {
        while let Some(step) = end.recv() {
            end.send(Ok(self.run(&step)));
        }
    }

    /// Runs a step, and panics if it breaks what a rank may rely on.
    pub(crate) fn run(&mut self, step: &Step) -> StepResult {
        assert_eq!(step.id, self.last_step + 1, "steps count up");
        self.last_step = step.id;
        for slot in &step.release {
            let slot = self.slots.remove(slot).expect("only a taken slot is released");
            self.hold(&slot.blocks, false);
        }
        for admit in &step.admit {
            self.admit(admit);
        }
        let rows: Vec<RowResult> = step.rows.iter().map(|row| self.run_row(row)).collect();
        let num_tokens: u32 = step.rows.iter().map(|row| row.num_tokens).sum();
        let forward = self.step_time + self.token_time * num_tokens;
        StepResult { id: step.id, rows, checksum: 0, timing: Timing { forward, ..Timing::default() } }
    }

    fn admit(&mut self, admit: &Admit) {
        assert_eq!(admit.blocks.len() * self.block_size, admit.num_cached as usize, "cached tokens fill their blocks");
        assert!(admit.num_cached < admit.tokens.len() as u32, "one token at least must run");
        self.hold(&admit.blocks, true);
        let slot = FakeSlot {
            tokens: admit.tokens.clone(),
            num_prompt: admit.num_prompt as usize,
            num_computed: admit.num_cached as usize,
            blocks: admit.blocks.clone(),
            drafts: Vec::new(),
            sampling: admit.sampling.clone(),
            has_ended: false,
        };
        assert!(self.slots.insert(admit.slot, slot).is_none(), "slot {} is taken", admit.slot);
    }

    fn hold(&mut self, blocks: &[BlockId], held: bool) {
        for block in blocks {
            let holders = &mut self.holders[block.0 as usize];
            *holders = if held { *holders + 1 } else { *holders - 1 };
        }
    }

    fn run_row(&mut self, row: &Row) -> RowResult {
        self.hold(&row.new_blocks, true);
        let slot = self.slots.get_mut(&row.slot).expect("a row's slot is taken");
        slot.blocks.extend_from_slice(&row.new_blocks);
        if slot.has_ended {
            return RowResult::default();
        }
        let start = slot.num_computed;
        let known_end = start + (row.num_tokens - row.num_drafts) as usize;
        assert!(
            known_end <= slot.tokens.len(),
            "row of {} tokens, {} known",
            row.num_tokens,
            slot.tokens.len() - start
        );
        let yields = known_end == slot.tokens.len();
        slot.drafts.truncate(if yields { row.num_drafts as usize } else { 0 });
        let run: Vec<TokenId> = slot.tokens[start..known_end].iter().chain(&slot.drafts).copied().collect();
        for (position, &token) in (start..).zip(&run) {
            let block = slot.blocks.get(position / self.block_size).expect("blocks are reserved for all tokens");
            assert_eq!(self.holders[block.0 as usize], 1, "only one sequence writes block {block}");
            let place = block.0 as usize * self.block_size + position % self.block_size;
            self.kv[place] = Some((position, token));
        }

        let mut result = RowResult::default();
        if row.wants.prompt_logprobs != Logprobs::None {
            let prompt = start.max(1)..known_end.min(slot.num_prompt);
            result.prompt_logprobs = prompt.map(|position| logprobs(slot.tokens[position])).collect();
        }
        if !yields {
            slot.num_computed = known_end;
            return result;
        }
        if slot.tokens[0] == POISON {
            slot.has_ended = true;
            result.error = Some(RowError::NotFinite { position: known_end as u32 });
            return result;
        }
        for num_held in 0..=slot.drafts.len() {
            let history = (0..known_end + num_held).map(|position| {
                let block = slot.blocks[position / self.block_size].0 as usize;
                let entry = self.kv[block * self.block_size + position % self.block_size];
                let (written_at, token) = entry.expect("KV is written before it is read");
                assert_eq!(written_at, position, "KV of another position");
                token
            });
            let token = next_token(history);
            slot.tokens.push(token);
            result.accepted.push(token);
            result.ended = ended(token, slot.tokens.len() - slot.num_prompt, &slot.sampling);
            if result.ended.is_some() || slot.drafts.get(num_held) != Some(&token) {
                break;
            }
        }
        if row.wants.logprobs != Logprobs::None {
            result.logprobs = result.accepted.iter().map(|&token| logprobs(token)).collect();
        }
        slot.num_computed = slot.tokens.len() - 1;
        slot.has_ended = result.ended.is_some();
        let most = slot.sampling.max_drafts.map_or(self.max_drafts, |most| self.max_drafts.min(most as usize));
        slot.drafts = if slot.has_ended { Vec::new() } else { drafts(&slot.tokens, most) };
        result.num_drafts = slot.drafts.len() as u32;
        result
    }
}

/// Up to `max` guesses, some of which hold.
fn drafts(tokens: &[TokenId], max: usize) -> Vec<TokenId> {
    let mut tokens = tokens.to_vec();
    let len = tokens.len();
    for _ in 0..max {
        let token = next_token(tokens.iter().copied());
        match token % 5 {
            0 => tokens.push((token + 1) % VOCAB_SIZE),
            1 if tokens.len() > len => break,
            _ => tokens.push(token),
        }
    }
    tokens.split_off(len)
}

fn logprobs(token: TokenId) -> TokenLogprobs {
    TokenLogprobs { token: RankedToken { token, logprob: -1.0, rank: 1 }, top: Vec::new() }
}
