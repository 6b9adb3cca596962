//! Where in its grammar one sequence stands.

use std::fmt;

use drafthorse_control::TokenId;

use super::compile::Compiled;

/// Walks a grammar with the output of a sequence.
pub(crate) struct Matcher {
    inner: llguidance::Matcher,
    end_tokens: Vec<TokenId>,
    /// The grammar has end tokens among others where its text may not end.
    ends_among_others: bool,
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Matcher").field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}

impl Matcher {
    /// Where `output`, which the grammar has led to, leaves it.
    ///
    /// # Errors
    /// What the grammar has against the output.
    pub fn new(compiled: &Compiled, output: &[TokenId]) -> Result<Self, String> {
        let mut matcher = Matcher {
            inner: compiled.start(),
            end_tokens: compiled.end_tokens().to_vec(),
            ends_among_others: compiled.ends_among_others(),
        };
        for &token in output {
            matcher.accept(token)?;
        }
        Ok(matcher)
    }

    /// Takes over the next token. An end token is not for the grammar.
    ///
    /// # Errors
    /// If the grammar does not have it here, or has become too costly to go on.
    pub fn accept(&mut self, token: TokenId) -> Result<(), String> {
        if self.is_end(token) {
            return Ok(());
        }
        self.inner.consume_token(token).map_err(|error| first_line(&error))
    }

    /// True if nothing may follow but the end.
    pub fn is_done(&self) -> bool {
        self.inner.is_stopped()
    }

    /// How many of `drafts` the grammar lets follow, one after the other. An end may be the last.
    pub fn num_allowed(&mut self, drafts: &[i32]) -> usize {
        let mut num_consumed = 0;
        let mut num_allowed = 0;
        for &draft in drafts {
            let token = draft as TokenId;
            if self.is_end(token) {
                num_allowed += usize::from(self.may_end());
                break;
            }
            if self.is_done() || !self.step(token) {
                break;
            }
            num_consumed += 1;
            num_allowed += 1;
        }
        self.step_back(num_consumed);
        num_allowed
    }

    /// Fills the masks of the next token and of those after each of `drafts`: `masks` has `1 + drafts` rows of `words` words, all
    /// bits set. Rows that cannot be come to, for a draft before them is refused or the last, stay as they are. Then it stands
    /// where it stood.
    ///
    /// # Errors
    /// If the grammar has become too costly to go on, with the row that it happened at.
    pub fn fill(&mut self, drafts: &[i32], words: usize, masks: &mut [u32]) -> Result<(), (usize, String)> {
        let mut num_consumed = 0;
        let mut result = Ok(());
        for (index, row) in masks.chunks_mut(words).enumerate() {
            match self.inner.compute_mask() {
                Ok(mask) => {
                    let mask = mask.as_slice();
                    let known = mask.len().min(words);
                    row[..known].copy_from_slice(&mask[..known]);
                    row[known..].fill(0);
                    // The answer would end there, and match nothing.
                    if self.ends_among_others && !self.may_end() {
                        for end in &self.end_tokens {
                            if let Some(word) = row.get_mut(*end as usize / 32) {
                                *word &= !(1 << (end % 32));
                            }
                        }
                    }
                }
                Err(_) if self.may_end() => row.fill(0),
                Err(error) => {
                    result = Err((index, first_line(&error)));
                    break;
                }
            }
            let Some(&draft) = drafts.get(index) else { break };
            let token = draft as TokenId;
            if self.is_end(token) || !self.step(token) {
                break;
            }
            num_consumed += 1;
            if self.is_done() {
                break;
            }
        }
        self.step_back(num_consumed);
        result
    }

    pub fn end_tokens(&self) -> &[TokenId] {
        &self.end_tokens
    }

    fn is_end(&self, token: TokenId) -> bool {
        self.end_tokens.contains(&token)
    }

    fn may_end(&mut self) -> bool {
        self.inner.is_accepting().unwrap_or(false)
    }

    /// False if the grammar does not have `token` here.
    fn step(&mut self, token: TokenId) -> bool {
        self.inner.try_consume_tokens(&[token]).is_ok_and(|consumed| consumed == 1)
    }

    fn step_back(&mut self, num_tokens: usize) {
        // An error stays with the matcher and comes out with its next mask.
        let _ = self.inner.rollback(num_tokens);
    }
}

fn first_line(error: &impl fmt::Display) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
