//! Grammars in GBNF, llama.cpp's notation (`root ::= "a" [0-9]+`), turned into Lark.
//!
//! A rule that does not lead back to itself becomes a terminal: one regular expression, exact whatever is ambiguous in it. In rules
//! that recur the largest such parts become terminals. Of two terminals that both go on, as in any Lark grammar, the longer one is
//! taken: no text comes that the grammar does not have, but where it is ambiguous there, some that it has may not come.
//!
//! Taken, too, are `'` around a literal, `_` in a name, and a rule over several lines without parentheses, as in W3C's EBNF.

mod lark;
mod parse;
#[cfg(test)]
mod tests;

use std::fmt;

/// What is wrong, and where: lines and columns count from 1, columns in characters.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub line: usize,
    pub column: usize,
    pub reason: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {} column {}: {}", self.line, self.column, self.reason)
    }
}

/// Whether a text is GBNF and not Lark: it has `::=` outside of literals, classes and comments. Lark defines by `:`.
pub(super) fn is_gbnf(text: &str) -> bool {
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '#' => while chars.next_if(|&c| c != '\n').is_some() {},
            // A comment of Lark's.
            '/' if chars.peek() == Some(&'/') => while chars.next_if(|&c| c != '\n').is_some() {},
            '"' | '\'' | '[' | '/' => {
                let close = if c == '[' { ']' } else { c };
                // On its own line, else it was none.
                let mut ahead = chars.clone();
                while let Some(c) = ahead.next_if(|&c| c != '\n') {
                    if c == '\\' {
                        ahead.next();
                    } else if c == close {
                        chars = ahead;
                        break;
                    }
                }
            }
            ':' if chars.next_if_eq(&':').is_some() && chars.peek() == Some(&'=') => return true,
            _ => {}
        }
    }
    false
}

/// The grammar in Lark.
///
/// # Errors
/// The first thing that is wrong with it.
pub(super) fn to_lark(text: &str) -> Result<String, Fault> {
    lark::write(&parse::parse(text)?)
}

/// A text as the terminal that is it alone.
pub(super) fn terminal_of(text: &str) -> String {
    lark::literal(text)
}

/// A grammar; its rules refer to one another by number.
#[derive(Debug)]
struct Grammar {
    rules: Vec<Rule>,
    /// The rule `root`.
    root: usize,
}

#[derive(Debug)]
struct Rule {
    name: String,
    /// Where its name stands at its definition.
    place: (usize, usize),
    body: Expr,
}

#[derive(Debug)]
enum Expr {
    /// One of some characters, as the inside of a regular expression's class.
    Class(String),
    /// Any character.
    Any,
    Literal(String),
    Rule(usize),
    Sequence(Vec<Expr>),
    Either(Vec<Expr>),
    /// So many times, without an end if there is no second number.
    Repeat(Box<Expr>, u32, Option<u32>),
}
