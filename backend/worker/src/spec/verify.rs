//! Which drafts hold, by the name that settings use.
//!
//! `exact` is the rule of this server: a draft holds if it is the token that was sampled in its place, so no text depends on drafts. The
//! other two are PaddleNLP's, for those who want its texts or its numbers of accepted drafts. They are *lossy*: a draft may hold that
//! would not have been sampled, so that answers are drawn from another law than the model's, at temperature 0, too, by the window. As
//! there, tokens are then sampled from `speculate_max_candidate_len` at most, with drafts or without.
//!
//! Source: PaddleNLP's operator `speculate_verify` and, of the window, the one before it, by what they do.

use drafthorse_control::{SamplingParams, TokenId};

use super::SpeculateConfig;

/// How drafts are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verify {
    Exact,
    /// A draft holds if it is the likeliest token.
    Top1 {
        candidates: usize,
    },
    /// A draft holds if it is one of the likeliest tokens that make up `top_p`. One that is not holds if it is the second likeliest and
    /// the next `window` drafts are all the likeliest; then these hold, too, and no more.
    TopPWindow {
        candidates: usize,
        window: usize,
    },
}

/// The table: a rule's name, and the rule.
const RULES: &[(&str, fn(&SpeculateConfig) -> Verify)] = &[
    ("exact", |_| Verify::Exact),
    ("paddle_top1", |config| Verify::Top1 { candidates: config.max_candidate_len as usize }),
    ("paddle_topp_window", |config| Verify::TopPWindow {
        candidates: config.max_candidate_len as usize,
        window: config.verify_window as usize,
    }),
];

/// The names that `speculate_verify` may have.
pub fn verify_rules() -> impl Iterator<Item = &'static str> {
    RULES.iter().map(|(name, _)| *name)
}

/// The rule of this name.
pub(super) fn named(config: &SpeculateConfig) -> Option<Verify> {
    RULES.iter().find(|(name, _)| *name == config.verify).map(|(_, rule)| rule(config))
}

/// The likeliest tokens at one place of a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranked {
    /// In order, the likeliest first; two at least, if there are two.
    tokens: Vec<TokenId>,
    /// The first of them that are candidates.
    num_candidates: usize,
}

impl Ranked {
    /// `logits` are those that the token is sampled from: penalties and masks are in them.
    pub fn of(logits: &[f32], sampling: &SamplingParams, most: usize) -> Self {
        let mut best: Vec<(f32, TokenId)> = Vec::with_capacity(most.max(2) + 1);
        for (token, &logit) in (0..).zip(logits) {
            // Of equals the first one is the likelier, as for the sampler.
            let at = best.partition_point(|(other, _)| *other >= logit);
            if logit.is_finite() && at < most.max(2) {
                best.insert(at, (logit, token));
                best.truncate(most.max(2));
            }
        }
        let Some(&(max, _)) = best.first() else { return Ranked::default() };
        let tokens = best.iter().map(|(_, token)| *token).collect();
        if sampling.temperature == 0.0 {
            return Ranked { tokens, num_candidates: 1 };
        }
        let weight = |logit: f32| f64::from((logit - max) / sampling.temperature).exp();
        let total: f64 = logits.iter().filter(|logit| logit.is_finite()).map(|&logit| weight(logit)).sum();
        let top_k = if sampling.top_k == 0 { most } else { most.min(sampling.top_k as usize) };
        let (mut num_candidates, mut sum) = (0, 0.0);
        for &(logit, _) in best.iter().take(top_k) {
            let below = weight(logit) < f64::from(sampling.min_p);
            if sum >= f64::from(sampling.top_p) || below {
                break;
            }
            sum += weight(logit) / total;
            num_candidates += 1;
        }
        Ranked { tokens, num_candidates }
    }

    fn is_candidate(&self, draft: TokenId) -> bool {
        self.tokens[..self.num_candidates].contains(&draft)
    }

    fn is_nth(&self, n: usize, draft: TokenId) -> bool {
        self.tokens.get(n) == Some(&draft)
    }
}

impl Verify {
    /// The most tokens that one is sampled from, if the rule bounds them: it is lossy then.
    pub fn candidates(self) -> Option<usize> {
        match self {
            Verify::Exact => None,
            Verify::Top1 { candidates } | Verify::TopPWindow { candidates, .. } => Some(candidates),
        }
    }

    /// How many of `drafts` hold; `ranked` has what was likeliest in the place of each. Not for the exact rule, which asks the sampler.
    pub fn held(self, drafts: &[TokenId], ranked: &[&Ranked]) -> usize {
        let is_likeliest = |at: usize| ranked[at].is_nth(0, drafts[at]);
        let Verify::TopPWindow { window, .. } = self else {
            return (0..drafts.len()).take_while(|&at| is_likeliest(at)).count();
        };
        let held = (0..drafts.len()).take_while(|&at| ranked[at].is_candidate(drafts[at])).count();
        let after = held + 1..held + 1 + window;
        let by_window =
            after.end <= drafts.len() && ranked[held].is_nth(1, drafts[held]) && after.clone().all(is_likeliest);
        if by_window { after.end } else { held }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probabilities 0.4, 0.3, 0.2 and 0.1 of tokens 7, 5, 3 and 1 of nine.
    fn logits() -> Vec<f32> {
        let mut logits = vec![f32::NEG_INFINITY; 9];
        for (token, p) in [(7, 0.4f32), (5, 0.3), (3, 0.2), (1, 0.1)] {
            logits[token] = p.ln() + 2.0;
        }
        logits
    }

    fn ranked(change: impl Fn(&mut SamplingParams), most: usize) -> String {
        let mut sampling = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
        change(&mut sampling);
        let Ranked { tokens, num_candidates } = Ranked::of(&logits(), &sampling, most);
        format!("{:?} {:?}", &tokens[..num_candidates], &tokens[num_candidates..])
    }

    #[test]
    fn candidates_are_the_likeliest_that_make_up_top_p() {
        assert_eq!(ranked(|_| (), 5), "[7, 5, 3, 1] []", "all");
        assert_eq!(ranked(|_| (), 3), "[7, 5, 3] []", "as many as are allowed");
        assert_eq!(ranked(|s| s.top_p = 0.65, 5), "[7, 5] [3, 1]", "0.4 and 0.3 are enough");
        assert_eq!(ranked(|s| s.top_p = 0.75, 5), "[7, 5, 3] [1]", "0.7 is not");
        assert_eq!(ranked(|s| s.top_p = 0.1, 1), "[7] [5]", "the second is always known");
        assert_eq!(ranked(|s| s.top_k = 2, 5), "[7, 5] [3, 1]");
        assert_eq!(ranked(|s| s.min_p = 0.6, 5), "[7, 5] [3, 1]", "0.3 is at least 0.6 of 0.4, 0.2 is not");
        assert_eq!(ranked(|s| s.temperature = 0.0, 5), "[7] [5, 3, 1]");
        // The squares 16, 9, 4 and 1 of 30: 0.53, 0.3, 0.13 and 0.03.
        assert_eq!(ranked(|s| (s.temperature, s.top_p) = (0.5, 0.8), 5), "[7, 5] [3, 1]");
        assert_eq!(ranked(|s| (s.temperature, s.top_p) = (0.5, 0.85), 5), "[7, 5, 3] [1]");
        assert_eq!(Ranked::of(&[f32::NAN; 3], &SamplingParams::default(), 5), Ranked::default());
        assert_eq!(
            Ranked::of(&[1.0, 2.0, 2.0], &SamplingParams::default(), 5).tokens,
            [1, 2, 0],
            "the first of equals"
        );
    }

    /// Drafts that hold, of which each is written as its place among the likeliest: at every place three of five are candidates.
    fn held(rule: Verify, places: &str) -> usize {
        let ranked = Ranked { tokens: vec![10, 11, 12, 13, 14], num_candidates: 3 };
        held_among(rule, &ranked, places)
    }

    fn held_among(rule: Verify, ranked: &Ranked, places: &str) -> usize {
        let drafts: Vec<TokenId> = places.bytes().map(|place| TokenId::from(10 + place - b'1')).collect();
        rule.held(&drafts, &vec![ranked; drafts.len()])
    }

    #[test]
    fn by_top1_the_likeliest_hold_up_to_the_first_that_is_not() {
        let rule = Verify::Top1 { candidates: 5 };
        for (places, want) in [("", 0), ("111", 3), ("112", 2), ("121", 1), ("211", 0), ("9", 0)] {
            assert_eq!(held(rule, places), want, "{places}");
        }
    }

    #[test]
    fn by_the_window_candidates_hold_and_the_second_if_the_next_are_the_likeliest() {
        let rule = Verify::TopPWindow { candidates: 5, window: 2 };
        for (places, want) in [("", 0), ("123", 3), ("1231", 4), ("1241", 2), ("4111", 0), ("31411", 2)] {
            assert_eq!(held(rule, places), want, "{places}");
        }
        // Where top_p takes the likeliest alone, the second holds by the two after it, and nothing after those.
        let one = Ranked { tokens: vec![10, 11, 12], num_candidates: 1 };
        for (places, want) in [
            ("1", 1),
            ("2", 0),
            ("21", 0),
            ("211", 3),
            ("2111", 3),
            ("212", 0),
            ("1211", 4),
            ("12111", 4),
            ("121", 1),
            ("3111", 0),
        ] {
            assert_eq!(held_among(rule, &one, places), want, "{places}");
        }
        let wider = Verify::TopPWindow { candidates: 5, window: 3 };
        assert_eq!([held_among(wider, &one, "211"), held_among(wider, &one, "21111")], [0, 4]);
    }
}
