//! How many drafts pay, measured while running.
//!
//! With b sequences and k drafts each, a step takes T(b (1 + k)) and the drafts P(b, k), and E(k) tokens a sequence come of it; without
//! drafts it takes T(b) for one. What was not measured yet is guessed from what was; a guess is tried if it is not clearly bad. Where
//! drafts are made, one step in [`PLAIN_EVERY`] goes without them, so that T(b) is known.
//!
//! Times are a rank's own: ranks that share a model must be told what to do by one of them.

use std::time::Duration;

/// More drafts than anyone makes.
pub(crate) const MAX_DRAFTS: usize = 8;

/// Tokens of a step up to which its time is kept.
const MAX_TOKENS: usize = 512;

/// Weight of the newest measurement, if it is longer than what was believed and if it is shorter. Whatever comes between makes a step
/// longer, never shorter.
const LONGER: f32 = 0.1;
const SHORTER: f32 = 0.4;
/// What is longer still counts as this many times what was believed.
const LONGEST: f32 = 2.0;

/// Weight of a sequence's newest draft at least; at first it is more, as if this many had been seen before.
const NEWEST_DRAFT: f32 = 0.05;
const SEEN_BEFORE: f32 = 4.0;
/// And among the drafts of all sequences.
const NEWEST_OF_ALL: f32 = 0.0125;
const SEEN_OF_ALL: f32 = 8.0;

/// Drafting steps between two without drafts; the first comes sooner, with as many behind it as it takes to know their time.
const PLAIN_EVERY: u32 = 64;
const FIRST_PLAIN: u32 = 6;

/// Steps after which what did not pay is tried again.
const FORGET_AFTER: u32 = 4096;

/// Steps without drafts before they are given up.
const PATIENCE: u32 = 12;

/// A guess must promise this much of the speed without drafts, what was measured all of it.
const WORTH_A_TRY: f32 = 0.95;

/// Share of drafts that hold before any was seen.
const HOLDS: f32 = 0.7;

pub(crate) struct Policy {
    max_drafts: usize,
    /// Without it, always as many as allowed.
    adaptive: bool,
    /// What a token adds to a step, as a share of a step of one token.
    token_share: f32,
    /// T, by tokens.
    steps: Vec<Time>,
    /// Runs of each number of tokens that take longer than those after them: kernels are loaded, steps are recorded.
    cold_runs: u8,
    /// P, by sequences and drafts.
    proposals: Vec<[Option<f32>; MAX_DRAFTS + 1]>,
    /// How often drafts held, of all sequences: the start of a new one.
    holds: Held,
    until_plain: u32,
    /// Steps without drafts that are due.
    plain_due: u8,
    until_forgotten: u32,
    /// Steps that drafts may yet seem not to pay before they are given up.
    patience: u32,
}

/// By a draft's place, how often it and all before it held.
pub(crate) type Holds = [f32; MAX_DRAFTS];

/// That of one sequence, or of all.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    pub holds: Holds,
    /// Times that drafts were verified.
    seen: f32,
}

/// A time that is measured again and again.
#[derive(Clone, Copy, Debug, Default)]
struct Time {
    seconds: Option<f32>,
    runs: u8,
}

impl Policy {
    /// `token_share` is about 0.4 where multiplying costs most, on a CPU, and next to nothing where reading weights does.
    pub fn new(max_drafts: usize, adaptive: bool, token_share: f32, cold_runs: u8) -> Self {
        let mut holds = [0.0; MAX_DRAFTS];
        let mut share = 1.0;
        for held in &mut holds {
            share *= HOLDS;
            *held = share;
        }
        Policy {
            max_drafts,
            adaptive,
            token_share,
            steps: vec![Time::default(); MAX_TOKENS + 1],
            cold_runs,
            proposals: vec![[None; MAX_DRAFTS + 1]; MAX_TOKENS + 1],
            holds: Held { holds, seen: 0.0 },
            until_plain: FIRST_PLAIN,
            plain_due: 0,
            until_forgotten: FORGET_AFTER,
            patience: PATIENCE,
        }
    }

    /// Begins anew.
    pub fn forget(&mut self) {
        *self = Policy::new(self.max_drafts, self.adaptive, self.token_share, self.cold_runs);
    }

    /// What a new sequence is believed to be like.
    pub fn holds(&self) -> Held {
        Held { seen: 0.0, ..self.holds }
    }

    /// Of `num_drafts` drafts of a sequence, `num_held` held.
    pub fn learn_held(&mut self, of: &mut Held, num_drafts: usize, num_held: usize) {
        if num_drafts == 0 {
            return;
        }
        for (held, least, before) in [(of, NEWEST_DRAFT, SEEN_BEFORE), (&mut self.holds, NEWEST_OF_ALL, SEEN_OF_ALL)] {
            held.seen += 1.0;
            let newest = least.max(1.0 / (held.seen + before));
            for (at, share) in held.holds[..num_drafts.min(MAX_DRAFTS)].iter_mut().enumerate() {
                *share += newest * (f32::from(u8::from(at < num_held)) - *share);
            }
        }
    }

    /// A step of so many tokens, none of them of prompts, took this long.
    pub fn learn_step(&mut self, num_tokens: usize, took: Duration) {
        if let Some(time) = self.steps.get_mut(num_tokens) {
            match time.runs < self.cold_runs {
                true => time.runs += 1,
                false => average(&mut time.seconds, took),
            }
        }
        self.until_forgotten -= 1;
        if self.until_forgotten == 0 {
            self.until_forgotten = FORGET_AFTER;
            self.steps.iter_mut().for_each(|time| time.seconds = None);
        }
    }

    /// Making `num_drafts` drafts for each of `num_seqs` sequences took this long.
    pub fn learn_proposal(&mut self, num_seqs: usize, num_drafts: usize, took: Duration) {
        if let Some(times) = self.proposals.get_mut(num_seqs) {
            average(&mut times[num_drafts.min(MAX_DRAFTS)], took);
        }
    }

    /// Drafts for each of `num_seqs` sequences that are like `holds`; `None`: drafts do not pay.
    pub fn drafts(&mut self, num_seqs: usize, holds: &Holds) -> Option<usize> {
        if !self.adaptive {
            return Some(self.max_drafts);
        }
        let by_gain = |k: &usize, other: &usize| {
            self.gain(num_seqs, *k, holds).0.total_cmp(&self.gain(num_seqs, *other, holds).0)
        };
        let best = (1..=self.max_drafts).max_by(by_gain)?;
        let (gain, is_measured) = self.gain(num_seqs, best, holds);
        if !is_measured && gain < WORTH_A_TRY {
            return None;
        }
        if is_measured && gain < 1.0 {
            // One step may have been slow by chance; those without drafts in between tell how long they take.
            self.patience = self.patience.saturating_sub(1);
            return (self.patience > 0).then_some(0);
        }
        self.patience = PATIENCE;
        self.until_plain -= 1;
        if self.until_plain == 0 {
            self.until_plain = PLAIN_EVERY;
            self.plain_due = if self.step(num_seqs).1 { 1 } else { self.cold_runs + 1 };
        }
        match self.plain_due {
            0 => Some(best),
            _ => {
                self.plain_due -= 1;
                Some(0)
            }
        }
    }

    /// Speed with drafts as a multiple of that without, and whether it was measured.
    fn gain(&self, num_seqs: usize, num_drafts: usize, holds: &Holds) -> (f32, bool) {
        let tokens_each = 1.0 + holds[..num_drafts].iter().sum::<f32>();
        let (plain, verify) = (self.step(num_seqs), self.step(num_seqs * (1 + num_drafts)));
        let times = self.proposals.get(num_seqs);
        let measured = times.and_then(|times| times[num_drafts]);
        let propose = measured.unwrap_or_else(|| {
            let known = (0..).zip(times.into_iter().flatten()).filter_map(|(drafts, time)| Some((drafts, (*time)?)));
            let nearest = known
                .filter(|(drafts, _)| *drafts > 0)
                .min_by_key(|(drafts, _): &(usize, f32)| drafts.abs_diff(num_drafts));
            // A small model's pass for each draft.
            let each = nearest.map_or(plain.0 * 0.08, |(drafts, time)| time / drafts as f32);
            each * num_drafts as f32
        });
        (tokens_each * plain.0 / (verify.0 + propose), plain.1 && verify.1 && measured.is_some())
    }

    /// Seconds of a step, and whether they were measured.
    fn step(&self, num_tokens: usize) -> (f32, bool) {
        if let Some(time) = self.steps.get(num_tokens).and_then(|time| time.seconds) {
            return (time, true);
        }
        let known = || (0..).zip(&self.steps).filter_map(|(tokens, time)| Some((tokens, time.seconds?)));
        let Some((nearest, time)) = known().min_by_key(|(tokens, _): &(usize, f32)| tokens.abs_diff(num_tokens)) else {
            return (1.0 + self.token_share * (num_tokens as f32 - 1.0), false);
        };
        // What a token adds: as the shortest and the longest known say, or as believed.
        let [first, last] = [known().next(), known().last()].map(|end| end.unwrap_or((nearest, time)));
        let slope = match last.0 - first.0 {
            0 => time * self.token_share / (1.0 + self.token_share * (nearest as f32 - 1.0)),
            between => (last.1 - first.1).max(0.0) / between as f32,
        };
        ((time + slope * (num_tokens as f32 - nearest as f32)).max(time / 4.0), false)
    }
}

fn average(mean: &mut Option<f32>, newest: Duration) {
    let newest = newest.as_secs_f32();
    *mean = Some(mean.map_or(newest, |mean| match newest > mean {
        true => mean + LONGER * (newest.min(LONGEST * mean) - mean),
        false => mean + SHORTER * (newest - mean),
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    /// How many of the last hundred steps had how many drafts, by number.
    fn settled(num_seqs: usize, held: f32, step: impl Fn(usize) -> u32, propose: u32) -> Vec<usize> {
        let policy = Policy::new(3, true, 0.4, 2);
        let drafts = run(policy, num_seqs, held, step, propose);
        (0..4).map(|k| drafts[300..].iter().filter(|drafts| **drafts == k).count()).collect()
    }

    /// Runs steps that cost what `step` and `propose` say, in milliseconds, with drafts of which a share holds. The drafts of each.
    fn run(mut policy: Policy, num_seqs: usize, held: f32, step: impl Fn(usize) -> u32, propose: u32) -> Vec<usize> {
        let mut held_before = policy.holds();
        let mut made = Vec::new();
        let mut times_run = vec![0; MAX_TOKENS + 1];
        let mut dice = 0u32;
        for number in 0..400 {
            let drafts = policy.drafts(num_seqs, &held_before.holds);
            let k = drafts.unwrap_or(0);
            let mut num_held = 0;
            while num_held < k {
                dice = dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if (dice >> 8) as f32 / (1 << 24) as f32 >= held {
                    break;
                }
                num_held += 1;
            }
            let num_tokens = num_seqs * (1 + k);
            times_run[num_tokens] += 1;
            // Cold at first, and disturbed now and then.
            let times = if times_run[num_tokens] <= 2 || number % 29 == 28 { 20 } else { 1 };
            policy.learn_step(num_tokens, MILLI * step(num_tokens) * times);
            if drafts.is_some() {
                policy.learn_proposal(num_seqs, k, MILLI * propose * k as u32);
            }
            policy.learn_held(&mut held_before, k, num_held);
            made.push(k);
        }
        made
    }

    #[test]
    fn drafts_are_made_where_they_pay_and_only_there() {
        let flat = |tokens: usize| 100 + tokens as u32;
        let counts = settled(1, 0.8, flat, 5);
        assert!(counts[3] >= 98, "reading weights costs all: {counts:?}");
        let steep = |tokens: usize| 20 + 80 * tokens as u32;
        assert_eq!(settled(1, 0.5, steep, 5)[0], 100, "every token costs");
        assert_eq!(settled(8, 0.5, steep, 5)[0], 100);
        let between = |tokens: usize| 70 + 30 * tokens as u32;
        let counts = settled(1, 0.75, between, 5);
        assert!(counts[0] <= 2, "it pays a little: {counts:?}");
        assert_eq!(settled(1, 0.1, between, 5)[0], 100, "nothing holds");
    }

    #[test]
    fn what_never_holds_costs_little() {
        // As on a GPU: a few tokens cost next to nothing, and drafts that are made before the step's tokens are seen are waited for by the
        // next step.
        for num_seqs in [1, 3, 8] {
            let step = |tokens: usize| 400 + 3 * tokens as u32 + 40 * (tokens / num_seqs - 1) as u32;
            let made = run(Policy::new(3, true, 0.02, 2), num_seqs, 0.0, step, 0);
            let cost: u32 = made[..256].iter().map(|drafts| step(num_seqs * (1 + drafts))).sum();
            let share = f64::from(cost) / f64::from(256 * step(num_seqs));
            assert!(share < 1.04, "{num_seqs} sequences: {share} times as long as without");
        }
    }

    #[test]
    fn without_adapting_there_are_always_as_many_as_allowed() {
        let mut policy = Policy::new(3, false, 0.4, 0);
        policy.learn_step(1, MILLI);
        policy.learn_step(4, 100 * MILLI);
        assert!((0..200).all(|_| policy.drafts(1, &[0.0; MAX_DRAFTS]) == Some(3)));
    }
}
