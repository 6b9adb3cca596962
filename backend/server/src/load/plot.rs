//! Plots as SVG text: points over two axes.

use std::fmt::Write;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 280.0;
const LEFT: f64 = 60.0;
const BOTTOM: f64 = 40.0;
const TOP: f64 = 28.0;
const RIGHT: f64 = 12.0;
/// More points than this are thinned out, the largest of each place kept.
const MAX_POINTS: usize = 8000;

/// How points are drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    Dots,
    Line,
}

pub(super) struct Series {
    pub(super) name: &'static str,
    pub(super) color: &'static str,
    pub(super) mark: Mark,
    pub(super) points: Vec<(f64, f64)>,
}

/// A plot of `series` with its title and names of the axes; both begin at 0.
pub(super) fn svg(title: &str, x_name: &str, y_name: &str, series: &[Series]) -> String {
    let all = || series.iter().flat_map(|series| &series.points);
    let x_max = round_up(all().map(|point| point.0).fold(0.0, f64::max));
    let y_max = round_up(all().map(|point| point.1).fold(0.0, f64::max));
    let x_at = |x: f64| LEFT + (WIDTH - LEFT - RIGHT) * x / x_max;
    let y_at = |y: f64| HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * y / y_max;

    let mut svg = format!(r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{title}</title>"#);
    // Writing to a String cannot fail.
    let _ = write!(svg, r#"<text x="{LEFT}" y="16" class="title">{title}</text>"#);
    for tick in 0..=4 {
        let (x, y) = (x_max * f64::from(tick) / 4.0, y_max * f64::from(tick) / 4.0);
        let (x_px, y_px) = (x_at(x), y_at(y));
        let _ = write!(
            svg,
            r#"<path class="grid" d="M{LEFT} {y_px:.1}H{:.1}"/><text x="{:.1}" y="{:.1}" text-anchor="end">{}</text><text x="{x_px:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            WIDTH - RIGHT,
            LEFT - 6.0,
            y_px + 4.0,
            short(y),
            HEIGHT - BOTTOM + 16.0,
            short(x),
        );
    }
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    let _ = write!(svg, r#"<text x="{middle}" y="{}" text-anchor="middle">{x_name}</text>"#, HEIGHT - 6.0);
    let _ = write!(svg, r#"<text x="{}" y="16" text-anchor="end">{y_name}</text>"#, WIDTH - RIGHT);
    for (i, series) in series.iter().enumerate() {
        let points = thin_out(&series.points, x_max, y_max);
        let color = series.color;
        if series.mark == Mark::Line {
            let path: Vec<String> = points.iter().map(|&(x, y)| format!("{:.1} {:.1}", x_at(x), y_at(y))).collect();
            let _ = write!(svg, r#"<polyline points="{}" fill="none" stroke="{color}"/>"#, path.join(" "));
        } else {
            // A path of lines without length: round caps make dots of them.
            let path: String = points.iter().map(|&(x, y)| format!("M{:.1} {:.1}h0", x_at(x), y_at(y))).collect();
            let _ = write!(svg, r#"<path class="dots" d="{path}" stroke="{color}"/>"#);
        }
        let y = TOP + 14.0 * (i as f64 + 1.0);
        let _ = write!(svg, r#"<text x="{}" y="{y}" fill="{color}">{}</text>"#, LEFT + 8.0, series.name);
    }
    svg + "</svg>"
}

/// The shares of values that are not above each: a point for each value, percent over value.
pub(super) fn cumulative(mut values: Vec<f64>) -> Vec<(f64, f64)> {
    values.sort_by(f64::total_cmp);
    let count = values.len() as f64;
    values.into_iter().enumerate().map(|(i, value)| (value, (i + 1) as f64 / count * 100.0)).collect()
}

/// The least of 1, 2, 2.5, 5 and 10 times a power of ten that is not below; 1 for nothing.
fn round_up(value: f64) -> f64 {
    if value <= 0.0 || !value.is_finite() {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let round = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|step| step * power);
    round.into_iter().find(|&step| step >= value).unwrap_or(value)
}

fn short(value: f64) -> String {
    let text = if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") };
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Leaves the highest point of each pixel's column and row, if there are too many to draw.
fn thin_out(points: &[(f64, f64)], x_max: f64, y_max: f64) -> Vec<(f64, f64)> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let mut seen = std::collections::HashSet::new();
    let place = |&(x, y): &(f64, f64)| ((x / x_max * WIDTH) as u32, (y / y_max * HEIGHT) as u32);
    points.iter().filter(|point| seen.insert(place(point))).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        let ends: Vec<f64> = [0.0, 0.03, 1.0, 1.2, 2.2, 7.0, 240.0].into_iter().map(round_up).collect();
        assert_eq!(ends, [1.0, 0.05, 1.0, 2.0, 2.5, 10.0, 250.0]);
        assert_eq!([0.0, 0.5, 1.25, 100.0, 1000.0].map(short).join(" "), "0 0.5 1.25 100 1000");
    }

    #[test]
    fn every_value_has_its_share() {
        assert_eq!(cumulative(vec![3.0, 1.0]), [(1.0, 50.0), (3.0, 100.0)]);
    }

    #[test]
    fn a_plot_of_very_many_points_stays_small() {
        let points: Vec<(f64, f64)> = (0..200_000).map(|i| (f64::from(i % 1000), f64::from(i % 7))).collect();
        let series = [Series { name: "all", color: "#000", mark: Mark::Dots, points }];
        let svg = svg("many", "x", "y", &series);
        assert!(svg.len() < 400_000, "{}", svg.len());
        assert!(svg.ends_with("</svg>"));
    }
}
