//! What each step of a sequence brings, told by a rank that begins anew before each: the text so far is one prompt, and its drafter's
//! entries come of one pass.

use std::ops::Range;

use drafthorse_control::{
    Admit, BlockId, ChannelLink, Grammar, Link, Row, RowResult, SamplingParams, Slot, Step, TokenId, Wants,
};
use drafthorse_tests::pairs::Pair;

use super::{MANY_BLOCKS, MAX_LEN, drafts, rank};

pub struct Recompute {
    link: ChannelLink,
    block_size: u32,
    last_step: u64,
}

impl Recompute {
    pub fn new(pair: &Pair, num_drafts: u32) -> Self {
        let (ready, link) = rank(pair, drafts(pair, num_drafts, false), MANY_BLOCKS);
        Recompute { link, block_size: ready.block_size, last_step: 0 }
    }

    /// The tokens of each step by which `text` follows `prompt`, and how many drafts each of them verified.
    pub fn steps(
        &mut self,
        prompt: &[TokenId],
        text: &[TokenId],
        sampling: &SamplingParams,
        grammar: Option<&Grammar>,
    ) -> Vec<(usize, usize)> {
        let all = [prompt, text].concat();
        let mut steps = vec![(1, 0)];
        let mut len = prompt.len() + 1;
        while len < all.len() {
            let (got, num_drafts) = self.step_after(&all[..len], prompt.len(), sampling, grammar);
            assert_eq!(got, all[len..len + got.len()], "after {len} tokens");
            len += got.len();
            steps.push((got.len(), num_drafts));
        }
        steps
    }

    /// What follows `tokens` in one step with drafts, and how many of those there were.
    fn step_after(
        &mut self,
        tokens: &[TokenId],
        num_prompt: usize,
        sampling: &SamplingParams,
        grammar: Option<&Grammar>,
    ) -> (Vec<TokenId>, usize) {
        let (last, before) = tokens.split_last().unwrap();
        let slot = Slot(0);
        let admit = Admit {
            slot,
            tokens: before.to_vec(),
            num_prompt: num_prompt as u32,
            num_cached: 0,
            blocks: (0..MAX_LEN.div_ceil(self.block_size) + 1).map(BlockId).collect(),
            sampling: sampling.clone(),
            grammar: grammar.cloned(),
            fork_of: None,
            adapter: None,
        };
        let row = |tokens: Range<usize>, num_drafts: usize| Row {
            slot,
            num_tokens: tokens.len() as u32,
            num_drafts: num_drafts as u32,
            new_blocks: vec![],
            wants: Wants::default(),
        };
        // As much of it at a time as a step takes.
        let chunk = super::MAX_BATCHED as usize;
        let mut result = RowResult::default();
        let mut admit = vec![admit];
        for first in (0..before.len()).step_by(chunk) {
            let rows = vec![row(first..before.len().min(first + chunk), 0)];
            result = self.run(Step { admit: std::mem::take(&mut admit), rows, ..Step::default() });
        }
        assert_eq!(result.accepted, [*last]);
        let num_drafts = result.num_drafts as usize;
        let result = self.run(Step { rows: vec![row(0..1 + num_drafts, num_drafts)], ..Step::default() });
        self.run(Step { release: vec![slot], ..Step::default() });
        (result.accepted, num_drafts)
    }

    fn run(&mut self, step: Step) -> RowResult {
        self.last_step += 1;
        self.link.send(&Step { id: self.last_step, ..step }).unwrap();
        self.link.recv().unwrap().rows.pop().unwrap_or_default()
    }
}
