//! Inference with reference: what followed the last few output tokens where they stood before, in the prompt or the output.
//!
//! Source: Yang et al. 2023, "Inference with Reference", arXiv:2304.04487. Good at code, quotes and summaries; costs no
//! device time. The order of the search is the one that users of `inference_with_reference` know: the longest n-gram
//! first; for each length the prompt before the output; in both the earliest place.

use drafthorse_control::TokenId;

use super::proposer::{Propose, Proposer};
use crate::error::Result;

/// Tokens of a decode step, drafts included, beyond which rows get fewer drafts or none.
const MAX_STEP_TOKENS: usize = 128;

/// Looks up the last `max_n` output tokens, then fewer, down to one. The pattern never reaches into the prompt.
#[derive(Clone, Debug)]
pub struct Ngram {
    pub max_n: usize,
    pub max_drafts: usize,
}

impl Proposer for Ngram {
    fn max_drafts(&self) -> usize {
        self.max_drafts
    }

    fn needs_host_tokens(&self) -> bool {
        true
    }

    fn propose(&mut self, step: &mut Propose<'_>) -> Result<()> {
        // A step with a prompt in it is long anyway; only pure decode steps are kept short.
        let all_decode = step.rows.iter().all(|row| row.wants_drafts || row.ended);
        let mut used = 0;
        for (index, row) in step.rows.iter().enumerate() {
            used += usize::from(!row.ended);
            let rows_left = step.rows.len() - index - 1;
            let mut most = self.max_drafts.min(row.room);
            if all_decode {
                most = most.min(MAX_STEP_TOKENS.saturating_sub(used + rows_left));
            }
            if !row.wants_drafts || most == 0 {
                continue;
            }
            step.slots.draft(row.slot, |(tokens, num_prompt), drafts| {
                let found = self.lookup(tokens, num_prompt);
                let num_drafts = found.len().min(most);
                for (draft, &token) in drafts.iter_mut().zip(&found[..num_drafts]) {
                    *draft = token as i32;
                }
                used += num_drafts;
                num_drafts
            });
        }
        Ok(())
    }
}

impl Ngram {
    /// What followed the pattern where it was found first; empty if it was not.
    fn lookup<'a>(&self, tokens: &'a [TokenId], num_prompt: usize) -> &'a [TokenId] {
        let (prompt, output) = tokens.split_at(num_prompt);
        for n in (1..=self.max_n.min(output.len())).rev() {
            let pattern = &output[output.len() - n..];
            for text in [prompt, output] {
                if let Some(at) = text.windows(n).position(|window| window == pattern)
                    && at + n < text.len()
                {
                    return &text[at + n..];
                }
            }
        }
        &[]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One token a letter, prompt and output apart by `|`, so that a test reads as text.
    fn lookup(text: &str) -> String {
        let (prompt, output) = text.split_once('|').unwrap();
        let tokens: Vec<TokenId> = prompt.chars().chain(output.chars()).map(|c| c as TokenId).collect();
        let ngram = Ngram { max_n: 3, max_drafts: 4 };
        let found = ngram.lookup(&tokens, prompt.chars().count());
        found.iter().map(|&token| char::from_u32(token).unwrap()).collect()
    }

    #[test]
    fn proposes_what_followed_the_longest_pattern() {
        assert_eq!(lookup("the cat sat|on the"), " cat sat", "three letters, in the prompt");
        assert_eq!(lookup("xc1 abc2|abc"), "2", "three letters before one");
        assert_eq!(lookup("xab1 yab2|ab"), "1 yab2", "the earliest place wins");
        assert_eq!(lookup("ab1|ab2 ab"), "1", "the prompt comes before the output");
        assert_eq!(lookup("xyz|ab2 ab"), "2 ab", "then the output");
        assert_eq!(lookup("xyz|aaaa"), "a", "a place may overlap the end");
        assert_eq!(lookup("xyz|abc"), "", "nothing repeats");
        assert_eq!(lookup("abcab|"), "", "a pattern never reaches into the prompt");
        assert_eq!(lookup("bab1|b"), "ab1", "one letter of output looks for one letter");
        assert_eq!(lookup("xyb|ab2b"), "2b", "a find at the prompt's end has nothing after it, the output has");
    }
}
