//! The Jinja that chat templates are written in: Jinja2 as transformers sets it up.

mod bounds;

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State};

pub(super) use bounds::{fuel, text_bytes};

/// Stands before what a template says through `raise_exception`.
pub(super) const RAISED: &str = "refused by the chat template: ";

/// How deep calls and inclusions lie in one another, by the engine's count, in which a call is several deep.
const MAX_DEPTH: usize = 300;

/// An environment that renders as `tokenizer.apply_chat_template` does.
pub(super) fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.expect("the delimiters are Jinja's own"));
    env.set_fuel(Some(fuel(0)));
    env.set_recursion_limit(MAX_DEPTH);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(bounds::method);
    env.set_formatter(print_as_python);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", |format: String| strftime(&format, SystemTime::now()));
    env.add_filter("tojson", tojson);
    env.add_filter("join", bounds::join);
    env.add_filter("string", bounds::string);
    env
}

/// Replaces transformers' `{% generation %}` blocks, which mark what to train on, by blocks that do nothing.
pub(super) fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let inside = &rest[start + 2..start + len];
        let word = inside.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        out.push_str(&rest[..start + 2]);
        match word {
            "generation" => out.push_str(&inside.replace(word, "if true")),
            "endgeneration" => out.push_str(&inside.replace(word, "endif")),
            _ => out.push_str(inside),
        }
        out.push_str("%}");
        rest = &rest[start + len + 2..];
    }
    out + rest
}

fn raise_exception(message: &str) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

/// Prints what Python's `str` would.
fn print_as_python(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.write_str("None")?,
        ValueKind::Bool if value.is_true() => out.write_str("True")?,
        ValueKind::Bool => out.write_str("False")?,
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => out.write_str(&bounds::printed(state, value)?)?,
        _ => write!(out, "{value}")?,
    }
    Ok(())
}

/// `json.dumps` with transformers' defaults: characters beyond ASCII stay, a space after each separator.
#[expect(clippy::needless_pass_by_value, reason = "this is how minijinja hands over keywords")]
fn tojson(state: &mut State, value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let mut dump = Dump {
        out: String::new(),
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        // With an indent a line ends after the comma, so no space stands there.
        item: if indent.is_some() { "," } else { ", " }.to_string(),
        key: ": ".to_string(),
    };
    options.assert_all_used()?;
    if let Some([item, key]) = separators.as_deref() {
        (dump.item, dump.key) = (item.clone(), key.clone());
    }
    let json = bounds::json(state, value)?;
    dump.value(&json, 0);
    Ok(dump.out)
}

struct Dump {
    out: String,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<usize>,
    item: String,
    key: String,
}

impl Dump {
    fn value(&mut self, value: &serde_json::Value, depth: usize) {
        match value {
            serde_json::Value::Null => self.out.push_str("null"),
            serde_json::Value::Bool(is) => self.out.push_str(if *is { "true" } else { "false" }),
            serde_json::Value::Number(number) => self.out.push_str(&python_number(number)),
            serde_json::Value::String(text) => self.string(text),
            serde_json::Value::Array(items) => {
                self.out.push('[');
                for (at, item) in items.iter().enumerate() {
                    self.before(at, depth + 1);
                    self.value(item, depth + 1);
                }
                self.after(items.len(), depth);
                self.out.push(']');
            }
            serde_json::Value::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| key.as_str());
                }
                self.out.push('{');
                for (at, (key, item)) in entries.into_iter().enumerate() {
                    self.before(at, depth + 1);
                    self.string(key);
                    self.out.push_str(&self.key);
                    self.value(item, depth + 1);
                }
                self.after(map.len(), depth);
                self.out.push('}');
            }
        }
    }

    fn before(&mut self, at: usize, depth: usize) {
        if at > 0 {
            self.out.push_str(&self.item);
        }
        self.new_line(depth);
    }

    fn after(&mut self, len: usize, depth: usize) {
        if len > 0 {
            self.new_line(depth);
        }
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A number as Python's `repr` has it: whole floats keep `.0`, exponents have a sign and two digits.
fn python_number(number: &serde_json::Number) -> String {
    let Some(float) = number.as_f64().filter(|_| number.is_f64()) else { return number.to_string() };
    let magnitude = float.abs();
    if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) {
        return format!("{float:?}");
    }
    let text = format!("{float:e}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    let (sign, exponent) = exponent.strip_prefix('-').map_or(("+", exponent), |exponent| ("-", exponent));
    format!("{digits}e{sign}{exponent:0>2}")
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// `time` in UTC by a format of C's `strftime`. What is not known here stays as it is.
fn strftime(format: &str, time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days as usize + 4) % 7]);
    let hour_of_12 = (hour + 11) % 12 + 1;
    let year_start = days_before_year(year);

    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = rest.next();
        let padded = code != Some('-');
        if !padded {
            code = rest.next();
        }
        let two = |value: u64| if padded { format!("{value:02}") } else { value.to_string() };
        match code {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&two(year % 100)),
            Some('m') => out.push_str(&two(month)),
            Some('d') => out.push_str(&two(day)),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('H') => out.push_str(&two(hour)),
            Some('I') => out.push_str(&two(hour_of_12)),
            Some('M') => out.push_str(&two(minute)),
            Some('S') => out.push_str(&two(second)),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('j') => out.push_str(&format!("{:03}", days - year_start + 1)),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('Z') => out.push_str("UTC"),
            Some('z') => out.push_str("+0000"),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day, `days` after 1970-01-01.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while days_before_year(year + 1) <= days {
        year += 1;
    }
    let mut day = days - days_before_year(year);
    let leap = days_before_year(year + 1) - days_before_year(year) == 366;
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    (year, month, day + 1)
}

/// Days from 1970-01-01 to the first of January.
fn days_before_year(year: u64) -> u64 {
    let before = year - 1;
    let leap_days = |year: u64| year / 4 - year / 100 + year / 400;
    (year - 1970) * 365 + leap_days(before) - leap_days(1969)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn tells_the_time() {
        let at = |seconds| {
            strftime("%A %d %B %Y, %H:%M:%S %-d %b %y %j %I%p %q%%", UNIX_EPOCH + Duration::from_secs(seconds))
        };
        assert_eq!(at(0), "Thursday 01 January 1970, 00:00:00 1 Jan 70 001 12AM %q%");
        assert_eq!(at(951_826_154), "Tuesday 29 February 2000, 12:09:14 29 Feb 00 060 12PM %q%");
        assert_eq!(at(1_735_689_599), "Tuesday 31 December 2024, 23:59:59 31 Dec 24 366 11PM %q%");
        assert_eq!(at(4_102_444_800), "Friday 01 January 2100, 00:00:00 1 Jan 00 001 12AM %q%");
    }

    #[test]
    fn generation_blocks_do_nothing() {
        let source = "{% if x %}a{%- generation -%} b {% endgeneration %}{% endif %}{{ x }}";
        let want = "{% if x %}a{%- if true -%} b {% endif %}{% endif %}{{ x }}";
        assert_eq!(without_generation_blocks(source), want);
    }
}
