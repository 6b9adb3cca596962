//! Rules to Lark text.
//!
//! `rN` is the rule of that number, `TN` it as a terminal; `PN` are terminals for parts of rules.

use std::fmt::Write as _;

use super::{Expr, Fault, Grammar};

/// Any character, a line break too.
const ANY: &str = "/(?s:.)/";

pub(super) fn write(grammar: &Grammar) -> Result<String, Fault> {
    let known = facts(grammar);
    let root = &grammar.rules[grammar.root];
    if !known[grammar.root].ends {
        let reason = format!("rule {} never ends: whatever way is taken through it leads to itself again", root.name);
        return Err(Fault { line: root.place.0, column: root.place.1, reason });
    }
    let mut writer = Writer { facts: &known, parts: String::new(), num_parts: 0 };
    let mut text = String::new();
    let start = writer.rule(&Expr::Rule(grammar.root));
    _ = writeln!(text, "start: {start}");
    for (number, rule) in grammar.rules.iter().enumerate() {
        if known[number].regular {
            _ = writeln!(text, "T{number}: {}", terminal(&rule.body));
        } else {
            let body = writer.rule(&rule.body);
            _ = writeln!(text, "r{number}: {body}");
        }
    }
    Ok(text + &writer.parts)
}

/// What is known of a rule.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Facts {
    /// It does not lead back to itself, nor does any rule that it leads to.
    regular: bool,
    /// It has a text that is finite.
    ends: bool,
    /// The empty text is one of its texts.
    empty: bool,
}

/// Each fact is false until it is seen to hold, and then stays: a rule is looked at again when one that it uses has changed.
fn facts(grammar: &Grammar) -> Vec<Facts> {
    let mut users = vec![Vec::new(); grammar.rules.len()];
    for (number, rule) in grammar.rules.iter().enumerate() {
        add_user(&rule.body, number, &mut users);
    }
    let mut facts = vec![Facts::default(); grammar.rules.len()];
    let mut open: Vec<usize> = (0..grammar.rules.len()).collect();
    while let Some(number) = open.pop() {
        let body = &grammar.rules[number].body;
        let now =
            Facts { regular: is_regular(body, &facts), ends: ends(body, &facts), empty: may_be_empty(body, &facts) };
        if now != facts[number] {
            facts[number] = now;
            open.extend(&users[number]);
        }
    }
    facts
}

/// Puts `user` down at each rule that its body uses.
fn add_user(expr: &Expr, user: usize, users: &mut [Vec<usize>]) {
    match expr {
        Expr::Class(_) | Expr::Any | Expr::Literal(_) => {}
        Expr::Rule(number) if users[*number].last() == Some(&user) => {}
        Expr::Rule(number) => users[*number].push(user),
        Expr::Sequence(parts) | Expr::Either(parts) => parts.iter().for_each(|part| add_user(part, user, users)),
        Expr::Repeat(part, ..) => add_user(part, user, users),
    }
}

fn is_regular(expr: &Expr, facts: &[Facts]) -> bool {
    match expr {
        Expr::Class(_) | Expr::Any | Expr::Literal(_) => true,
        Expr::Rule(number) => facts[*number].regular,
        Expr::Sequence(parts) | Expr::Either(parts) => parts.iter().all(|part| is_regular(part, facts)),
        Expr::Repeat(part, ..) => is_regular(part, facts),
    }
}

fn ends(expr: &Expr, facts: &[Facts]) -> bool {
    match expr {
        Expr::Class(_) | Expr::Any | Expr::Literal(_) => true,
        Expr::Rule(number) => facts[*number].ends,
        Expr::Sequence(parts) => parts.iter().all(|part| ends(part, facts)),
        Expr::Either(ways) => ways.iter().any(|way| ends(way, facts)),
        Expr::Repeat(part, least, _) => *least == 0 || ends(part, facts),
    }
}

fn may_be_empty(expr: &Expr, facts: &[Facts]) -> bool {
    match expr {
        Expr::Class(_) | Expr::Any => false,
        Expr::Literal(text) => text.is_empty(),
        Expr::Rule(number) => facts[*number].empty,
        Expr::Sequence(parts) => parts.iter().all(|part| may_be_empty(part, facts)),
        Expr::Either(ways) => ways.iter().any(|way| may_be_empty(way, facts)),
        Expr::Repeat(part, least, _) => *least == 0 || may_be_empty(part, facts),
    }
}

struct Writer<'a> {
    facts: &'a [Facts],
    /// Terminals that stand for parts of rules.
    parts: String,
    num_parts: usize,
}

impl Writer<'_> {
    /// An expression in a rule.
    fn rule(&mut self, expr: &Expr) -> String {
        if is_regular(expr, self.facts) {
            return self.part(&terminal(expr), may_be_empty(expr, self.facts));
        }
        match expr {
            Expr::Rule(number) => format!("r{number}"),
            Expr::Either(ways) => {
                let ways: Vec<String> = ways.iter().map(|way| self.rule(way)).collect();
                format!("({})", ways.join(" | "))
            }
            Expr::Repeat(part, least, most) => format!("({}){}", self.rule(part), times(*least, *most)),
            Expr::Sequence(parts) => {
                let mut written = Vec::new();
                // What stands together and is regular is one terminal.
                for run in parts.chunk_by(|a, b| is_regular(a, self.facts) && is_regular(b, self.facts)) {
                    if is_regular(&run[0], self.facts) {
                        let text: Vec<String> = run.iter().map(terminal).collect();
                        let empty = run.iter().all(|part| may_be_empty(part, self.facts));
                        written.push(self.part(&text.join(" "), empty));
                    } else {
                        written.extend(run.iter().map(|part| self.rule(part)));
                    }
                }
                written.join(" ")
            }
            Expr::Class(_) | Expr::Any | Expr::Literal(_) => terminal(expr),
        }
    }

    /// A terminal for a part. One that may be empty is one that is not, or nothing.
    fn part(&mut self, terminal: &str, may_be_empty: bool) -> String {
        let number = self.num_parts;
        self.num_parts += 1;
        if may_be_empty {
            _ = writeln!(self.parts, "P{number}: ({terminal}) & /(?s:.)+/");
            return format!("P{number}?");
        }
        _ = writeln!(self.parts, "P{number}: {terminal}");
        format!("P{number}")
    }
}

/// An expression in a terminal.
fn terminal(expr: &Expr) -> String {
    match expr {
        Expr::Class(inside) => format!("/[{inside}]/"),
        Expr::Any => ANY.into(),
        Expr::Literal(text) => literal(text),
        Expr::Rule(number) => format!("T{number}"),
        Expr::Sequence(parts) if parts.is_empty() => "\"\"".into(),
        Expr::Sequence(parts) => parts.iter().map(terminal).collect::<Vec<_>>().join(" "),
        Expr::Either(ways) => format!("({})", ways.iter().map(terminal).collect::<Vec<_>>().join(" | ")),
        Expr::Repeat(part, least, most) => format!("({}){}", terminal(part), times(*least, *most)),
    }
}

pub(super) fn literal(text: &str) -> String {
    if text.is_empty() {
        return "\"\"".into();
    }
    let escaped: String = text.chars().map(escaped).collect();
    format!("/{escaped}/")
}

fn escaped(c: char) -> String {
    if c.is_ascii_alphanumeric() { c.into() } else { format!(r"\x{{{:x}}}", u32::from(c)) }
}

fn times(least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => "*".into(),
        (1, None) => "+".into(),
        (0, Some(1)) => "?".into(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}
