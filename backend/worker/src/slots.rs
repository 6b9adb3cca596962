//! What a rank remembers of each running sequence: its tokens, how far its KV reaches, its block table and its drafts.
//!
//! Block tables, drafts and last hidden rows are arrays over all slots, where a step's inputs are made from them and a
//! proposer writes them; hidden rows lie on the device. The tokens stay on the host: results carry them up, and prompt lookup
//! searches them.

use std::sync::Arc;

use drafthorse_control::{Admit, BlockId, RowError, SamplingParams, Slot, TokenId};
use drafthorse_kernels::ops::copy_rows::{copy_rows, copy_rows_from};
use drafthorse_kernels::ops::mask;
use drafthorse_kernels::ops::penalty::{Penalties, TokenCount};
use drafthorse_kernels::{DType, Device, Tensor};

use crate::error::{Result, WorkerError};
use crate::grammar::{Grammars, Matcher};

/// Sizes of the slot table, fixed at load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotSizes {
    pub num_slots: usize,
    /// Blocks in a full block table.
    pub max_blocks: usize,
    pub block_size: usize,
    /// Blocks of the KV cache.
    pub num_blocks: usize,
    /// Tokens of a full sequence.
    pub max_model_len: usize,
    pub max_drafts: usize,
    pub vocab_size: usize,
    pub hidden: usize,
    pub dtype: DType,
}

/// All slots of a rank.
pub struct Slots {
    sizes: SlotSizes,
    /// Sequences admitted so far.
    num_admitted: u64,
    states: Vec<Option<SlotState>>,
    /// `[slots, max_blocks]`; entries past a slot's `num_blocks` mean nothing.
    block_tables: Tensor,
    /// `[slots, max_drafts]`, guesses for the tokens after the last one.
    drafts: Tensor,
    /// `[slots]`.
    num_drafts: Tensor,
    /// `[slots, hidden]`, the target's hidden state of the last token whose KV holds.
    last_hidden: Tensor,
    /// What compiles grammars, if the model's tokens are known.
    grammars: Option<Arc<Grammars>>,
}

/// One sequence, on the host.
#[derive(Debug)]
pub(crate) struct SlotState {
    /// No two sequences of a rank have the same.
    pub serial: u64,
    /// Prompt and verified output. The KV of the last one is not computed yet once the prompt is done.
    pub tokens: Vec<TokenId>,
    /// Where the output begins.
    pub num_prompt: usize,
    /// Leading tokens whose KV holds, or will once the steps in flight have run.
    pub num_computed: usize,
    /// Tokens after `tokens` that steps in flight sample: none or one when a step is planned.
    pub num_sampling: usize,
    /// The row of the last step's samples that the latest of them comes from.
    pub sampled_by: usize,
    /// Of them, those that another sequence computed.
    pub num_cached: usize,
    pub num_blocks: usize,
    pub sampling: SamplingParams,
    /// The distinct tokens of `tokens`, in order, if penalties need them.
    pub seen: Vec<TokenCount>,
    /// Where its grammar stands after `tokens`, if it has one.
    pub matcher: Option<Box<Matcher>>,
    /// A bit for each token that may be picked, if only some may.
    pub allowed: Option<Vec<u32>>,
    /// Why it cannot run: its first row says so.
    pub refused: Option<RowError>,
    /// Set once it ended or failed: rows that were on their way by then are inert.
    pub ended: bool,
}

impl SlotState {
    /// Takes over a token that was sampled.
    ///
    /// # Errors
    /// If its grammar cannot follow.
    pub fn accept(&mut self, token: TokenId) -> Result<(), RowError> {
        let position = self.tokens.len() as u32;
        self.tokens.push(token);
        if self.penalties() != Penalties::NONE {
            count(&mut self.seen, token, 1);
        }
        match &mut self.matcher {
            None => Ok(()),
            Some(matcher) => matcher.accept(token).map_err(|reason| RowError::Grammar { position, reason }),
        }
    }

    /// True if nothing may follow by its grammar.
    pub fn is_complete(&self) -> bool {
        self.matcher.as_ref().is_some_and(|matcher| matcher.is_done())
    }

    /// Whether only some tokens may be picked, so that its rows need masks.
    pub fn is_masked(&self) -> bool {
        self.matcher.is_some() || self.allowed.is_some() || takes_tokens_out(&self.sampling, self.num_output())
    }

    /// Tokens that must not follow `drafts`: an end before `min_tokens`, the last of bad words.
    pub fn banned(&self, drafts: &[i32]) -> impl Iterator<Item = TokenId> {
        let too_early = self.num_output() + drafts.len() < self.sampling.min_tokens as usize;
        let ends = self.sampling.stop_tokens.iter().filter(move |_| too_early).copied();
        // The token that stands `back` places before the next one, if that is output.
        let before_next = |back: usize| match drafts.len().checked_sub(back) {
            Some(index) => Some(drafts[index] as TokenId),
            None => self.output().len().checked_sub(back - drafts.len()).map(|index| self.output()[index]),
        };
        let bad = self.sampling.bad_words.iter().filter_map(move |word| {
            let (&last, before) = word.split_last()?;
            let stands = before.iter().rev().zip(1..).all(|(&token, back)| before_next(back) == Some(token));
            stands.then_some(last)
        });
        ends.chain(bad)
    }

    fn output(&self) -> &[TokenId] {
        &self.tokens[self.num_prompt..]
    }

    pub fn penalties(&self) -> Penalties {
        penalties(&self.sampling)
    }

    /// Whether biases, penalties or a limit that must see the logits apply to the next token.
    pub fn changes_logits(&self) -> bool {
        changes_logits(&self.sampling)
    }

    pub fn num_output(&self) -> usize {
        self.tokens.len() - self.num_prompt
    }

    /// Most drafts that its request wants in a step.
    pub fn max_drafts(&self) -> usize {
        self.sampling.max_drafts.map_or(usize::MAX, |most| most as usize)
    }

    /// Output tokens that may still come before `max_tokens` or `max_model_len` ends the sequence.
    pub fn room(&self, max_model_len: usize) -> usize {
        let by_tokens = (self.sampling.max_tokens as usize).saturating_sub(self.num_output());
        by_tokens.min(max_model_len.saturating_sub(self.tokens.len()))
    }
}

impl SlotSizes {
    /// Bytes of all slots together.
    pub fn bytes(&self) -> u64 {
        let row = 4 * (self.max_blocks + self.max_drafts.max(1) + 1) + self.hidden * self.dtype.bytes();
        (self.num_slots * (row + 4 * self.max_model_len)) as u64
    }
}

impl Slots {
    pub(crate) fn new(device: &Device, sizes: SlotSizes) -> Result<Self> {
        let SlotSizes { num_slots, max_blocks, max_drafts, hidden, dtype, .. } = sizes;
        Ok(Slots {
            sizes,
            num_admitted: 0,
            states: (0..num_slots).map(|_| None).collect(),
            block_tables: Tensor::zeros(&Device::Cpu, "block tables", [num_slots, max_blocks], DType::I32)?,
            drafts: Tensor::zeros(&Device::Cpu, "drafts", [num_slots, max_drafts.max(1)], DType::I32)?,
            num_drafts: Tensor::zeros(&Device::Cpu, "draft counts", [num_slots], DType::I32)?,
            last_hidden: Tensor::zeros(device, "last hidden rows", [num_slots, hidden], dtype)?,
            grammars: None,
        })
    }

    pub(crate) fn with_grammars(self, grammars: Option<Arc<Grammars>>) -> Self {
        Slots { grammars, ..self }
    }

    /// Prompt and verified output of a running sequence, and where the output begins in it.
    ///
    /// # Panics
    /// If the slot is empty: proposers are handed taken slots only.
    pub fn history(&self, slot: Slot) -> (&[TokenId], usize) {
        let state = self.states[slot.0 as usize].as_ref().expect("rows name taken slots");
        (&state.tokens, state.num_prompt)
    }

    /// The target's hidden state of each slot's last computed token, `[slots, hidden]`.
    pub fn last_hidden(&self) -> &Tensor {
        &self.last_hidden
    }

    /// Lets `write` fill the slot's drafts from its history (tokens, where the output begins); it returns how many it wrote.
    ///
    /// # Panics
    /// As [`history`](Self::history), and if more were written than fit.
    pub fn draft(&mut self, slot: Slot, write: impl FnOnce((&[TokenId], usize), &mut [i32]) -> usize) {
        let index = slot.0 as usize;
        let width = self.sizes.max_drafts;
        let state = self.states[index].as_ref().expect("rows name taken slots");
        let mut row = self.drafts.rows_mut(index..index + 1);
        let num_drafts = write((&state.tokens, state.num_prompt), &mut row.as_mut_slice::<i32>()[..width]);
        assert!(num_drafts <= width, "{num_drafts} drafts written, at most {width} fit");
        let drafts = &row.as_slice::<i32>()[..num_drafts];
        // Below 0 they stand for what the device has.
        debug_assert!(drafts.iter().all(|&draft| draft < self.sizes.vocab_size as i32), "{drafts:?}");
        self.num_drafts.as_mut_slice::<i32>()[index] = num_drafts as i32;
    }

    /// Puts other drafts in the place of those that the slot has.
    pub(crate) fn replace_drafts(&mut self, slot: Slot, drafts: impl Iterator<Item = i32>) {
        let at = slot.0 as usize * self.sizes.max_drafts.max(1);
        let num_drafts = self.num_drafts.as_slice::<i32>()[slot.0 as usize] as usize;
        for (place, draft) in self.drafts.as_mut_slice::<i32>()[at..at + num_drafts].iter_mut().zip(drafts) {
            *place = draft;
        }
    }

    pub(crate) fn block_size(&self) -> usize {
        self.sizes.block_size
    }

    pub(crate) fn drafts(&self, slot: Slot) -> &[i32] {
        let index = slot.0 as usize;
        let at = index * self.sizes.max_drafts.max(1);
        &self.drafts.as_slice::<i32>()[at..at + self.num_drafts.as_slice::<i32>()[index] as usize]
    }

    /// Forgets all but the first `keep` drafts.
    pub(crate) fn cut_drafts(&mut self, slot: Slot, keep: usize) {
        let num_drafts = &mut self.num_drafts.as_mut_slice::<i32>()[slot.0 as usize];
        *num_drafts = (*num_drafts).min(keep as i32);
    }

    /// Forgets the drafts that the slot's grammar would refuse.
    pub(crate) fn cut_refused_drafts(&mut self, slot: Slot) {
        let drafts = self.drafts(slot).to_vec();
        let matcher = self.states[slot.0 as usize].as_mut().and_then(|state| state.matcher.as_mut());
        if let Some(matcher) = matcher.filter(|_| !drafts.is_empty()) {
            let num_allowed = matcher.num_allowed(&drafts);
            self.cut_drafts(slot, num_allowed);
        }
    }

    /// Keeps rows of `hidden` as the last of sequences: `(row, slot)`.
    pub(crate) fn keep_hidden(&mut self, hidden: &Tensor, rows: &[(u32, u32)]) -> Result<()> {
        Ok(copy_rows_from(hidden, &mut self.last_hidden, rows)?)
    }

    pub(crate) fn blocks(&self, slot: Slot) -> &[i32] {
        let index = slot.0 as usize;
        let num_blocks = self.states[index].as_ref().map_or(0, |state| state.num_blocks);
        let at = index * self.sizes.max_blocks;
        &self.block_tables.as_slice::<i32>()[at..at + num_blocks]
    }

    /// The sequence in `slot`, which a row of `step` names.
    pub(crate) fn get_mut(&mut self, step: u64, slot: Slot) -> Result<&mut SlotState> {
        let num_slots = self.states.len();
        let bad = |must: String| WorkerError::Step { step, slot, field: "slot", got: slot.0.into(), must };
        let state = self.states.get_mut(slot.0 as usize).ok_or_else(|| bad(format!("below {num_slots}")))?;
        state.as_mut().ok_or_else(|| bad("taken by a sequence".into()))
    }

    /// The sequence in a slot, if there is such a slot and it is taken.
    pub(crate) fn try_state(&self, slot: Slot) -> Option<&SlotState> {
        self.states.get(slot.0 as usize)?.as_ref()
    }

    /// The sequence in a slot that the step's rows have named before.
    pub(crate) fn state(&self, slot: Slot) -> &SlotState {
        self.states[slot.0 as usize].as_ref().expect("checked when the batch was built")
    }

    /// As [`state`](Self::state), to change.
    pub(crate) fn state_mut(&mut self, slot: Slot) -> &mut SlotState {
        self.states[slot.0 as usize].as_mut().expect("checked when the batch was built")
    }

    pub(crate) fn release(&mut self, step: u64, slot: Slot) -> Result<()> {
        self.get_mut(step, slot)?;
        self.states[slot.0 as usize] = None;
        self.num_drafts.as_mut_slice::<i32>()[slot.0 as usize] = 0;
        Ok(())
    }

    /// Puts a sequence into an empty slot.
    ///
    /// # Errors
    /// `Step` if the slot is taken or the sequence cannot run, `Unsupported` if it wants what this worker lacks.
    pub(crate) fn admit(&mut self, step: u64, admit: &Admit) -> Result<()> {
        let slot = admit.slot;
        let bad = |field, got: usize, must: String| WorkerError::Step { step, slot, field, got: got as u64, must };
        let num_slots = self.states.len();
        match self.states.get(slot.0 as usize) {
            None => return Err(bad("slot", slot.0 as usize, format!("below {num_slots}"))),
            Some(Some(_)) => return Err(bad("slot", slot.0 as usize, "empty before a sequence is admitted".into())),
            Some(None) => {}
        }
        if admit.adapter.is_some() {
            return Err(WorkerError::Unsupported { step, slot, feature: "an adapter" });
        }
        let SlotSizes { max_model_len, block_size, vocab_size, .. } = self.sizes;
        let num_tokens = admit.tokens.len();
        let (num_prompt, num_cached) = (admit.num_prompt as usize, admit.num_cached as usize);
        if num_tokens == 0 || num_tokens >= max_model_len {
            return Err(bad("tokens", num_tokens, format!("1 to {}", max_model_len - 1)));
        }
        if num_prompt == 0 || num_prompt > num_tokens {
            return Err(bad("num_prompt", num_prompt, format!("1 to the {num_tokens} tokens")));
        }
        // The last token must run: its hidden state is what the next one is sampled from.
        if num_cached >= num_tokens || num_cached > admit.blocks.len() * block_size {
            let must = format!("below the {num_tokens} tokens and inside {} blocks", admit.blocks.len());
            return Err(bad("num_cached", num_cached, must));
        }
        if let Some(&token) = admit.tokens.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(bad("token", token as usize, format!("below {vocab_size}")));
        }

        let most = num_tokens + (admit.sampling.max_tokens as usize).min(max_model_len - num_tokens);
        let mut tokens = Vec::with_capacity(most);
        tokens.extend_from_slice(&admit.tokens);
        self.num_admitted += 1;
        let mut state = SlotState {
            serial: self.num_admitted,
            tokens,
            num_prompt,
            num_computed: num_cached,
            num_sampling: 0,
            sampled_by: 0,
            num_cached,
            num_blocks: 0,
            sampling: admit.sampling.clone(),
            seen: Vec::new(),
            matcher: None,
            allowed: allowed_bits(&admit.sampling, vocab_size),
            refused: None,
            ended: false,
        };
        match self.matcher(admit) {
            Ok(matcher) => state.matcher = matcher,
            Err(reason) => state.refused = Some(RowError::Grammar { position: num_tokens as u32, reason }),
        }
        if state.penalties() != Penalties::NONE {
            for (index, &token) in admit.tokens.iter().enumerate() {
                count(&mut state.seen, token, u32::from(index >= num_prompt));
            }
        }
        self.states[slot.0 as usize] = Some(state);
        self.append_blocks(step, slot, &admit.blocks)?;
        if let Some(parent) = admit.fork_of {
            self.get_mut(step, parent)?;
            copy_rows(&mut self.last_hidden, &[(parent.0, slot.0)])?;
        }
        Ok(())
    }

    /// Where the sequence's grammar stands after what it has of output.
    fn matcher(&self, admit: &Admit) -> Result<Option<Box<Matcher>>, String> {
        let Some(grammar) = &admit.grammar else { return Ok(None) };
        let grammars = self.grammars.as_ref().ok_or("this rank does not know the bytes of tokens")?;
        let compiled = grammars.compile(grammar).map_err(|error| error.to_string())?;
        let output = &admit.tokens[admit.num_prompt as usize..];
        Ok(Some(Box::new(Matcher::new(&compiled, output)?)))
    }

    /// Appends to the slot's block table.
    pub(crate) fn append_blocks(&mut self, step: u64, slot: Slot, blocks: &[BlockId]) -> Result<()> {
        let SlotSizes { max_blocks, num_blocks, .. } = self.sizes;
        if let Some(block) = blocks.iter().find(|block| block.0 as usize >= num_blocks) {
            let must = format!("below {num_blocks}");
            return Err(WorkerError::Step { step, slot, field: "block", got: block.0.into(), must });
        }
        let state = self.get_mut(step, slot)?;
        let (from, to) = (state.num_blocks, state.num_blocks + blocks.len());
        if to > max_blocks {
            let must = format!("at most {max_blocks}");
            return Err(WorkerError::Step { step, slot, field: "blocks", got: to as u64, must });
        }
        state.num_blocks = to;
        let at = slot.0 as usize * max_blocks;
        let entries = &mut self.block_tables.as_mut_slice::<i32>()[at + from..at + to];
        for (entry, block) in entries.iter_mut().zip(blocks) {
            *entry = block.0 as i32;
        }
        Ok(())
    }
}

/// Whether logits are changed, other than by masks, before a token is picked.
pub(crate) fn changes_logits(sampling: &SamplingParams) -> bool {
    !sampling.logit_bias.is_empty() || sampling.typical_p < 1.0 || penalties(sampling) != Penalties::NONE
}

/// Whether bad words or `min_tokens` may take tokens out after `num_output` others.
fn takes_tokens_out(sampling: &SamplingParams, num_output: usize) -> bool {
    let may_be_too_early = num_output < sampling.min_tokens as usize && !sampling.stop_tokens.is_empty();
    !sampling.bad_words.is_empty() || may_be_too_early
}

fn penalties(sampling: &SamplingParams) -> Penalties {
    Penalties {
        repetition: sampling.repetition_penalty,
        presence: sampling.presence_penalty,
        frequency: sampling.frequency_penalty,
    }
}

/// A bit for each token that `sampling` allows; `None` if it allows all.
fn allowed_bits(sampling: &SamplingParams, vocab_size: usize) -> Option<Vec<u32>> {
    if sampling.allowed_tokens.is_empty() {
        return None;
    }
    let mut bits = vec![0; mask::num_words(vocab_size)];
    for &token in sampling.allowed_tokens.iter().filter(|&&token| (token as usize) < vocab_size) {
        bits[token as usize / 32] |= 1 << (token % 32);
    }
    Some(bits)
}

/// Counts a token that stands in the prompt (0) or in the output (1). `seen` stays in the order of tokens.
pub(crate) fn count(seen: &mut Vec<TokenCount>, token: TokenId, num_output: u32) {
    match seen.binary_search_by_key(&token, |seen| seen.token) {
        Ok(at) => seen[at].num_output += num_output,
        Err(at) => seen.insert(at, TokenCount { token, num_output }),
    }
}
