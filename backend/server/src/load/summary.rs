//! Outcomes as a few numbers.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::Outcome;

/// Of one quantity, over requests or tokens; milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

impl Percentiles {
    /// Of nearest rank: the least value that so many percent do not exceed. All 0 of nothing.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |percent: usize| {
            let rank = (values.len() * percent).div_ceil(100).max(1);
            values.get(rank - 1).copied().unwrap_or(0.0)
        };
        let mean = if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 };
        Percentiles { mean, p50: at(50), p90: at(90), p95: at(95), p99: at(99), max: at(100) }
    }
}

/// What a load came to.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub requests: usize,
    pub failed: usize,
    /// Why, and how often, the most frequent first.
    pub errors: Vec<(String, usize)>,
    /// From the first request's moment to the last answer's end.
    pub seconds: f64,
    pub requests_per_second: f64,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    pub output_tokens_per_second: f64,
    /// Time to first token: from sending a request to the first of its tokens.
    pub ttft_ms: Percentiles,
    /// Time per output token of each request after its first.
    pub tpot_ms: Percentiles,
    /// Between tokens, over all tokens of all requests; those that came together are 0 apart.
    pub itl_ms: Percentiles,
    /// From sending a request to its end.
    pub e2e_ms: Percentiles,
    /// How late the load generator sent: its numbers are its own if this is not small.
    pub late_ms: Percentiles,
}

impl Summary {
    pub fn of(outcomes: &[Outcome]) -> Self {
        let good: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.error.is_none()).collect();
        let seconds = outcomes.iter().map(|outcome| outcome.ended).max().unwrap_or_default().as_secs_f64();
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let output_tokens = good.iter().map(|outcome| u64::from(outcome.output_tokens)).sum();
        let over = |value: &dyn Fn(&Outcome) -> Option<f64>| {
            Percentiles::of(good.iter().filter_map(|outcome| value(outcome)).collect())
        };
        Summary {
            requests: outcomes.len(),
            failed: outcomes.len() - good.len(),
            errors: errors(outcomes),
            seconds,
            requests_per_second: per_second(good.len() as f64),
            prompt_tokens: good.iter().filter_map(|outcome| outcome.prompt_tokens).map(u64::from).sum(),
            output_tokens,
            output_tokens_per_second: per_second(output_tokens as f64),
            ttft_ms: over(&Outcome::ttft_ms),
            tpot_ms: over(&Outcome::tpot_ms),
            itl_ms: Percentiles::of(good.iter().flat_map(|outcome| outcome.gaps()).map(|(_, ms)| ms).collect()),
            e2e_ms: over(&|outcome| Some(millis(outcome.ended - outcome.sent))),
            late_ms: over(&|outcome| Some(millis(outcome.late))),
        }
    }
}

impl Outcome {
    pub(super) fn ttft_ms(&self) -> Option<f64> {
        self.chunks.first().map(|(at, _)| millis(*at - self.sent))
    }

    pub(super) fn tpot_ms(&self) -> Option<f64> {
        let ((first, _), (last, _)) = (self.chunks.first()?, self.chunks.last()?);
        let tokens = self.output_tokens.checked_sub(self.chunks[0].1).filter(|&tokens| tokens > 0)?;
        Some(millis(*last - *first) / f64::from(tokens))
    }

    /// When each token after the first came, in seconds, and how long after the one before, in milliseconds.
    pub(super) fn gaps(&self) -> Vec<(f64, f64)> {
        let mut gaps = Vec::new();
        for pair in self.chunks.windows(2) {
            let [(before, _), (at, count)] = pair else { continue };
            gaps.push((at.as_secs_f64(), millis(*at - *before)));
            gaps.extend((1..*count).map(|_| (at.as_secs_f64(), 0.0)));
        }
        gaps
    }
}

fn errors(outcomes: &[Outcome]) -> Vec<(String, usize)> {
    let mut errors: Vec<(String, usize)> = Vec::new();
    for error in outcomes.iter().filter_map(|outcome| outcome.error.as_ref()) {
        match errors.iter_mut().find(|(known, _)| known == error) {
            Some((_, count)) => *count += 1,
            None => errors.push((error.clone(), 1)),
        }
    }
    errors.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    errors
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} requests in {:.2} s, {} failed: {:.2} requests/s, {:.0} output tokens/s ({} prompt and {} output tokens)\n",
            self.requests,
            self.seconds,
            self.failed,
            self.requests_per_second,
            self.output_tokens_per_second,
            self.prompt_tokens,
            self.output_tokens
        )?;
        let head = ["ms", "mean", "p50", "p90", "p95", "p99", "max"];
        writeln!(
            f,
            "{:26} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
            head[0], head[1], head[2], head[3], head[4], head[5], head[6]
        )?;
        for (name, Percentiles { mean, p50, p90, p95, p99, max }) in self.rows() {
            writeln!(f, "{name:26} {mean:9.2} {p50:9.2} {p90:9.2} {p95:9.2} {p99:9.2} {max:9.2}")?;
        }
        for (error, count) in self.errors.iter().take(5) {
            writeln!(f, "{count} failed: {error}")?;
        }
        Ok(())
    }
}

impl Summary {
    pub(super) fn rows(&self) -> [(&'static str, Percentiles); 5] {
        [
            ("time to first token", self.ttft_ms),
            ("time per output token", self.tpot_ms),
            ("between tokens", self.itl_ms),
            ("end to end", self.e2e_ms),
            ("sent late", self.late_ms),
        ]
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let hundred = Percentiles::of((1..=100).rev().map(f64::from).collect());
        assert_eq!(hundred, Percentiles { mean: 50.5, p50: 50.0, p90: 90.0, p95: 95.0, p99: 99.0, max: 100.0 });
        let two = Percentiles::of(vec![1.0, 3.0]);
        assert_eq!((two.p50, two.p90, two.max), (1.0, 3.0, 3.0));
        assert_eq!(Percentiles::of(Vec::new()), Percentiles::default());
    }

    #[test]
    fn times_are_those_of_the_requests_that_held() {
        let held = Outcome {
            sent: ms(10),
            chunks: vec![(ms(50), 1), (ms(60), 1), (ms(90), 2)],
            ended: ms(100),
            output_tokens: 4,
            prompt_tokens: Some(7),
            ..Outcome::default()
        };
        let failed = Outcome { ended: ms(400), error: Some("busy".into()), output_tokens: 9, ..Outcome::default() };
        let summary = Summary::of(&[held, failed.clone(), failed]);
        assert_eq!((summary.requests, summary.failed, summary.output_tokens, summary.prompt_tokens), (3, 2, 4, 7));
        assert_eq!(summary.errors, [("busy".to_owned(), 2)]);
        assert_eq!((summary.ttft_ms.max, summary.e2e_ms.max), (40.0, 90.0));
        assert!((summary.tpot_ms.max - 40.0 / 3.0).abs() < 1e-9);
        assert_eq!((summary.itl_ms.p50, summary.itl_ms.max), (10.0, 30.0));
        assert!((summary.output_tokens_per_second - 10.0).abs() < 1e-9);
    }
}
