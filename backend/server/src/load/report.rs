//! The load as one HTML page that needs nothing else.

use std::fmt::Write;

use super::plot::{Mark, Series, cumulative, svg};
use super::{Load, Outcome, Summary};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1340px;margin:2em auto;padding:0 1em;color:#222}\
    table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}\
    svg{width:640px;max-width:100%;font:11px system-ui,sans-serif}.title{font-weight:600;font-size:13px}.grid{stroke:#ddd}\
    .dots{stroke-width:3;stroke-linecap:round;stroke-opacity:.5}pre{background:#f5f5f5;padding:1em;white-space:pre-wrap}";

const BLUE: &str = "#1f6feb";
const RED: &str = "#d1242f";
const GREEN: &str = "#1a7f37";

/// The page. `command` is what was typed.
pub fn html(load: &Load, outcomes: &[Outcome], summary: &Summary, command: &str) -> String {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>drafthorse bench serve</title><style>{STYLE}</style><h1>{} under load</h1><pre>{}</pre>",
        escape(&load.model),
        escape(command)
    );
    // Writing to a String cannot fail.
    let _ = write!(
        page,
        "<p>{} requests in {:.2} s, {} failed; {:.2} requests/s, {:.0} output tokens/s; prompts of {} and answers of {} tokens.</p>",
        summary.requests,
        summary.seconds,
        summary.failed,
        summary.requests_per_second,
        summary.output_tokens_per_second,
        load.prompt_tokens,
        load.output_tokens
    );
    page += "<table><tr><th>ms<th>mean<th>p50<th>p90<th>p95<th>p99<th>max";
    for (name, row) in summary.rows() {
        let _ = write!(page, "<tr><td>{name}");
        for value in [row.mean, row.p50, row.p90, row.p95, row.p99, row.max] {
            let _ = write!(page, "<td>{value:.2}");
        }
    }
    page += "</table>";
    for (error, count) in summary.errors.iter().take(20) {
        let _ = write!(page, "<p>{count} failed: {}</p>", escape(error));
    }
    for plot in plots(outcomes) {
        page += &plot;
    }
    page + "</html>\n"
}

fn plots(outcomes: &[Outcome]) -> Vec<String> {
    let good = || outcomes.iter().filter(|outcome| outcome.error.is_none());
    let short = || good().filter(|outcome| !outcome.is_long);
    let dots = |name, color, points| Series { name, color, mark: Mark::Dots, points };
    let line = |name, color, points| Series { name, color, mark: Mark::Line, points };

    let gaps = short().flat_map(Outcome::gaps).collect();
    let mut over_time = vec![dots("each token", BLUE, gaps)];
    // While the long prompt was computed: a bar at the bottom.
    let long = good().find(|outcome| outcome.is_long);
    if let Some(long) = long {
        let end = long.chunks.first().map_or(long.ended, |(at, _)| *at);
        over_time.push(line(
            "long prompt, from sent to first token",
            RED,
            vec![(long.sent.as_secs_f64(), 0.0), (end.as_secs_f64(), 0.0)],
        ));
    }
    let first = short().filter_map(|outcome| Some((outcome.sent.as_secs_f64(), outcome.ttft_ms()?))).collect();
    let mut tokens: Vec<f64> = good()
        .flat_map(|outcome| outcome.chunks.iter().flat_map(|(at, n)| (0..*n).map(|_| at.as_secs_f64())))
        .collect();
    tokens.sort_by(f64::total_cmp);
    vec![
        svg("Time between tokens", "seconds since the first request", "ms", &over_time),
        svg("Time to first token", "sent, seconds since the first request", "ms", &[dots("each request", BLUE, first)]),
        svg(
            "Requests with a first token within",
            "ms",
            "%",
            &[line("time to first token", BLUE, cumulative(short().filter_map(Outcome::ttft_ms).collect()))],
        ),
        svg(
            "Requests with a time per output token within",
            "ms",
            "%",
            &[line("time per output token", GREEN, cumulative(short().filter_map(Outcome::tpot_ms).collect()))],
        ),
        svg("Output tokens", "seconds since the first request", "tokens/s", &[line("a second", GREEN, rates(&tokens))]),
    ]
}

/// Tokens a second in each hundredth of the time.
fn rates(moments: &[f64]) -> Vec<(f64, f64)> {
    const PARTS: usize = 100;
    let Some(&last) = moments.last() else { return Vec::new() };
    let width = (last / PARTS as f64).max(1e-3);
    let mut counts = vec![0u32; PARTS + 1];
    for moment in moments {
        counts[((moment / width) as usize).min(PARTS)] += 1;
    }
    let rate = |(i, &count): (usize, &u32)| ((i as f64 + 0.5) * width, f64::from(count) / width);
    counts[..PARTS].iter().enumerate().map(rate).collect()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::load::{Lengths, Target};

    #[test]
    fn a_page_shows_what_was_measured_and_no_markup_of_others() {
        let load = Load {
            target: Target::Kserve("localhost:1".into()),
            model: "a<b".into(),
            requests: 1,
            rate: None,
            max_concurrency: None,
            prompt_tokens: Lengths::Fixed(8),
            output_tokens: Lengths::Uniform(1, 2),
            long_prompt: None,
            parameters: crate::load::Parameters::new(),
            seed: 0,
        };
        let at = |ms| Duration::from_millis(ms);
        let held =
            Outcome { chunks: vec![(at(5), 1), (at(9), 1)], ended: at(10), output_tokens: 2, ..Outcome::default() };
        let failed = Outcome { error: Some("<script>".into()), ..Outcome::default() };
        let outcomes = [held, failed];
        let page = html(&load, &outcomes, &Summary::of(&outcomes), "drafthorse bench serve & more");
        for part in [
            "a&lt;b under load",
            "bench serve &amp; more",
            "<td>time to first token<td>5.00",
            "1 failed: &lt;script&gt;",
        ] {
            assert!(page.contains(part), "{part} in {page}");
        }
        assert_eq!(page.matches("<svg").count(), 5);
    }

    #[test]
    fn rates_add_up_to_the_tokens() {
        let moments: Vec<f64> = (1..=1000).map(|i| f64::from(i) / 100.0).collect();
        let rates = rates(&moments);
        assert_eq!(rates.len(), 100);
        let tokens: f64 = rates.iter().map(|(_, rate)| rate * 0.1).sum();
        assert!((tokens - 999.0).abs() < 2.0, "{tokens}");
    }
}
