//! How many prompt tokens a step may take, so that it stays within its time.
//!
//! Two measurements, taken while running: how long a step without prompts takes, and how long each prompt token adds to
//! it. If both were off by a constant the next chunk is too: chunk' = chunk * (aim - decode) / (time - decode) stands
//! still only where time = aim, so the size finds its place whatever a step costs beside its tokens.

use std::time::Duration;

/// Tokens of the first chunk, and of any chunk when there is no time for one: prompts must get on.
const MIN_CHUNK: usize = 16;

/// How much longer a step may take that no stream waits for.
const QUIET: f64 = 10.0;

/// Share of the time to fill: machines are not as even as clocks, and the bound is one for the longest step.
const AIM: f64 = 0.8;

/// Measures steps and sizes the chunks of the next.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Seconds that a step may take while a stream decodes.
    max_step_time: f64,
    /// Seconds of a step without chunks.
    decode_time: f64,
    /// Seconds that a chunk's token adds; `None` until one was measured.
    token_time: Option<f64>,
}

impl Pace {
    pub(crate) fn new(max_step_time: Duration) -> Self {
        Pace { max_step_time: max_step_time.as_secs_f64(), decode_time: 0.0, token_time: None }
    }

    /// Prompt tokens for the next step; `decoding` if a stream decodes in it.
    pub(crate) fn chunk_tokens(&self, decoding: bool) -> usize {
        let Some(token_time) = self.token_time else { return MIN_CHUNK };
        let time = AIM * self.max_step_time;
        let time = if decoding { time - self.decode_time } else { time * QUIET };
        // A float too large for usize becomes its largest value, a negative one 0.
        ((time / token_time) as usize).max(MIN_CHUNK)
    }

    /// Learns from a step of `decode_tokens` and `chunk_tokens`.
    pub(crate) fn measure(&mut self, decode_tokens: usize, chunk_tokens: usize, time: Duration) {
        // A time of 0 would allow anything for ever.
        let time = time.as_secs_f64().max(1e-9);
        if chunk_tokens == 0 {
            self.decode_time = average(self.decode_time, time);
        } else if chunk_tokens >= MIN_CHUNK {
            let decode_time = if decode_tokens == 0 { 0.0 } else { self.decode_time };
            // At least a tenth: the decodes of this step may have been quicker than those before.
            let chunk_time = (time - decode_time).max(time / 10.0);
            let token_time = chunk_time / chunk_tokens as f64;
            self.token_time = Some(self.token_time.map_or(token_time, |before| average(before, token_time)));
        }
    }
}

/// Slower is believed at once, since streams wait; quicker only by and by.
fn average(before: f64, now: f64) -> f64 {
    if now > before { now } else { (before + now) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chunks of 6 steps in a row and the milliseconds that each takes, of 100 that are aimed at, if a step costs `fixed_ms`
    /// beside its tokens.
    fn chunks(decoding: bool, fixed_ms: f64, token_ms: f64) -> String {
        let mut pace = Pace::new(Duration::from_millis(125));
        let mut log = Vec::new();
        for _ in 0..6 {
            let chunk = pace.chunk_tokens(decoding);
            let ms = fixed_ms + chunk as f64 * token_ms;
            pace.measure(decoding.into(), chunk, Duration::from_secs_f64(ms / 1000.0));
            log.push(format!("{chunk}:{ms:.0}"));
        }
        log.join(" ")
    }

    #[test]
    fn finds_the_chunk_that_fills_the_time() {
        assert_eq!(chunks(true, 0.0, 2.0), "16:32 50:100 50:100 50:100 50:100 50:100");
        assert_eq!(chunks(true, 40.0, 1.0), "16:56 28:68 33:73 38:78 43:83 47:87");
        assert_eq!(chunks(false, 40.0, 1.0), "16:56 285:325 431:471 585:625 720:760 818:858");
    }

    #[test]
    fn a_chunk_keeps_its_least_size_when_there_is_no_time() {
        assert_eq!(chunks(true, 300.0, 1.0), "16:316 16:316 16:316 16:316 16:316 16:316");
    }

    #[test]
    fn leaves_the_decodes_their_time() {
        let mut pace = Pace::new(Duration::from_millis(125));
        pace.measure(0, 100, Duration::from_millis(100));
        assert_eq!(pace.chunk_tokens(true), 100);
        pace.measure(8, 0, Duration::from_millis(60));
        assert_eq!(pace.chunk_tokens(true), 40);
        assert_eq!(pace.chunk_tokens(false), 1000);
    }

    #[test]
    fn slower_is_believed_at_once() {
        let mut pace = Pace::new(Duration::from_millis(125));
        pace.measure(0, 100, Duration::from_millis(100));
        pace.measure(0, 100, Duration::from_millis(400));
        assert_eq!(pace.chunk_tokens(true), 25);
        pace.measure(0, 25, Duration::from_millis(25));
        assert_eq!(pace.chunk_tokens(true), 40);
    }

    #[test]
    fn a_rank_that_takes_no_time_gets_whatever_there_is() {
        let mut pace = Pace::new(Duration::from_millis(125));
        pace.measure(0, 16, Duration::ZERO);
        assert!(pace.chunk_tokens(true) > 1_000_000);
    }
}
