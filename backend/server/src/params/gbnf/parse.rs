//! GBNF text to rules.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::{Expr, Fault, Grammar, Rule};

/// Parentheses in one another.
const MAX_DEPTH: usize = 100;
/// Times that a part may be asked for by a number.
const MAX_TIMES: u32 = 10_000;

pub(super) fn parse(text: &str) -> Result<Grammar, Fault> {
    let mut parser = Parser {
        chars: text.chars().collect(),
        at: 0,
        line: 1,
        column: 1,
        depth: 0,
        names: HashMap::new(),
        rules: Vec::new(),
    };
    parser.skip();
    while parser.peek().is_some() {
        parser.rule()?;
    }
    parser.finish()
}

/// A rule that was named and perhaps is defined.
struct Slot {
    name: String,
    /// Where it was defined, else where it was first named.
    place: (usize, usize),
    body: Option<Expr>,
}

struct Parser {
    chars: Vec<char>,
    at: usize,
    line: usize,
    column: usize,
    depth: usize,
    names: HashMap<String, usize>,
    rules: Vec<Slot>,
}

impl Parser {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += 1;
        (self.line, self.column) = if c == '\n' { (self.line + 1, 1) } else { (self.line, self.column + 1) };
        Some(c)
    }

    fn take(&mut self, c: char) -> bool {
        let there = self.peek() == Some(c);
        if there {
            self.next();
        }
        there
    }

    fn place(&self) -> (usize, usize) {
        (self.line, self.column)
    }

    fn fault<T>(&self, reason: impl Into<String>) -> Result<T, Fault> {
        fault(self.place(), reason)
    }

    /// What stands here, as it is named in messages.
    fn here(&self) -> String {
        match self.peek() {
            None => "the end".into(),
            Some('\n') => "the end of the line".into(),
            Some(c) => format!("{c:?}"),
        }
    }

    /// White space and comments.
    fn skip(&mut self) {
        while let Some(c) = self.peek() {
            match c {
                '#' => while self.peek().is_some_and(|c| c != '\n') && self.next().is_some() {},
                c if c.is_whitespace() => _ = self.next(),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<String> {
        let begin = self.at;
        while self.peek().is_some_and(is_of_name) {
            self.next();
        }
        (self.at > begin).then(|| self.chars[begin..self.at].iter().collect())
    }

    fn slot(&mut self, name: String, place: (usize, usize)) -> usize {
        let rules = &mut self.rules;
        *self.names.entry(name).or_insert_with_key(|name| {
            rules.push(Slot { name: name.clone(), place, body: None });
            rules.len() - 1
        })
    }

    fn rule(&mut self) -> Result<(), Fault> {
        let place = self.place();
        let Some(name) = self.name() else {
            let here = self.here();
            return self.fault(format!("a rule's name should stand here, not {here}"));
        };
        self.skip();
        if !self.defines() {
            let here = self.here();
            return self.fault(format!("::= should follow the rule's name {name}, not {here}"));
        }
        (0..3).for_each(|_| _ = self.next());
        let slot = self.slot(name, place);
        if self.rules[slot].body.is_some() {
            return fault(place, format!("rule {} is defined twice", self.rules[slot].name));
        }
        self.skip();
        let body = self.either()?;
        if self.peek() == Some(')') {
            return self.fault("there is no parenthesis to close");
        }
        let rule = &mut self.rules[slot];
        (rule.body, rule.place) = (Some(body), place);
        Ok(())
    }

    fn defines(&self) -> bool {
        self.chars[self.at..].starts_with(&[':', ':', '='])
    }

    /// Whether the next rule begins here: a rule may go on over lines, so only `NAME ::=` ends it.
    fn rule_begins(&self) -> bool {
        let rest = &self.chars[self.at..];
        let name = rest.iter().take_while(|&&c| is_of_name(c)).count();
        let space = rest[name..].iter().take_while(|c| c.is_whitespace()).count();
        name > 0 && rest[name + space..].starts_with(&[':', ':', '='])
    }

    fn either(&mut self) -> Result<Expr, Fault> {
        let mut ways = vec![self.sequence()?];
        while self.take('|') {
            self.skip();
            ways.push(self.sequence()?);
        }
        Ok(if ways.len() == 1 { ways.remove(0) } else { Expr::Either(ways) })
    }

    fn sequence(&mut self) -> Result<Expr, Fault> {
        let mut parts = Vec::new();
        loop {
            self.skip();
            match self.peek() {
                None | Some('|' | ')') => break,
                _ if self.rule_begins() => break,
                _ => {}
            }
            let mut part = self.part()?;
            self.skip();
            let mut num_times = 0;
            while let Some((least, most)) = self.times()? {
                num_times += 1;
                if num_times > MAX_DEPTH {
                    return self.fault(format!("more than {MAX_DEPTH} repetitions of one another"));
                }
                part = match most {
                    Some(0) => Expr::Literal(String::new()),
                    _ => Expr::Repeat(Box::new(part), least, most),
                };
                self.skip();
            }
            parts.push(part);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Expr::Sequence(parts) })
    }

    fn part(&mut self) -> Result<Expr, Fault> {
        let place = self.place();
        match self.peek() {
            Some('"' | '\'') => self.literal(),
            Some('[') => self.class(),
            Some('.') => {
                self.next();
                Ok(Expr::Any)
            }
            Some('(') => {
                self.next();
                self.depth += 1;
                if self.depth > MAX_DEPTH {
                    return fault(place, format!("more than {MAX_DEPTH} parentheses are open"));
                }
                self.skip();
                let inner = self.either()?;
                if !self.take(')') {
                    return fault(place, "the parenthesis is not closed");
                }
                self.depth -= 1;
                Ok(inner)
            }
            Some('<' | '!') => self.fault("single tokens are not supported: write the token's text as a literal"),
            Some('*' | '+' | '?' | '{') => self.fault("there is nothing before it to repeat"),
            _ => match self.name() {
                Some(name) => Ok(Expr::Rule(self.slot(name, place))),
                None => {
                    let here = self.here();
                    self.fault(format!("a literal, a class, a rule's name or ( should stand here, not {here}"))
                }
            },
        }
    }

    /// How often the part before may come, if that is said here.
    fn times(&mut self) -> Result<Option<(u32, Option<u32>)>, Fault> {
        let place = self.place();
        let times = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => {
                self.next();
                let least = self.number()?;
                let comma = self.take(',');
                let most = if comma { self.number()? } else { least };
                if least.is_none() && most.is_none() || self.peek() != Some('}') {
                    return fault(place, "a repetition is {n}, {n,}, {,m} or {n,m}");
                }
                let least = least.unwrap_or(0);
                if most.is_some_and(|most| most < least) {
                    return fault(place, "the first number is above the second");
                }
                (least, most)
            }
            _ => return Ok(None),
        };
        self.next();
        Ok(Some(times))
    }

    /// A number with the white space around it, if there is one.
    fn number(&mut self) -> Result<Option<u32>, Fault> {
        self.skip();
        let place = self.place();
        let mut number = None;
        while let Some(digit) = self.peek().and_then(|c| c.to_digit(10)) {
            self.next();
            number = Some(number.unwrap_or(0) * 10 + digit);
            if number > Some(MAX_TIMES) {
                return fault(place, format!("is above {MAX_TIMES}, the most that may be asked for"));
            }
        }
        self.skip();
        Ok(number)
    }

    fn literal(&mut self) -> Result<Expr, Fault> {
        let place = self.place();
        let quote = self.next();
        let mut text = String::new();
        loop {
            match self.peek() {
                None | Some('\n') => return fault(place, "the literal does not end on its line"),
                c if c == quote => break,
                _ => text.push(self.character()?),
            }
        }
        self.next();
        Ok(Expr::Literal(text))
    }

    fn class(&mut self) -> Result<Expr, Fault> {
        let place = self.place();
        self.next();
        let mut class = String::new();
        if self.take('^') {
            class.push('^');
        }
        let empty = class.len();
        loop {
            let begin = self.place();
            match self.peek() {
                None | Some('\n') => return fault(place, "the class does not end on its line"),
                Some(']') => break,
                _ => {}
            }
            let first = self.character()?;
            let is_range =
                self.peek() == Some('-') && self.chars.get(self.at + 1).is_some_and(|&c| c != ']' && c != '\n');
            let last = if is_range {
                self.next();
                self.character()?
            } else {
                first
            };
            if last < first {
                return fault(begin, format!("the range goes backwards: {last:?} comes before {first:?}"));
            }
            // By number, whatever a regular expression takes the character for.
            _ = write!(class, r"\x{{{:x}}}", u32::from(first));
            if is_range {
                _ = write!(class, r"-\x{{{:x}}}", u32::from(last));
            }
        }
        self.next();
        match class.len() == empty {
            true if empty == 0 => fault(place, "the class has no character"),
            true => Ok(Expr::Any),
            false => Ok(Expr::Class(class)),
        }
    }

    /// A character of a literal or a class, perhaps escaped.
    fn character(&mut self) -> Result<char, Fault> {
        let place = self.place();
        let c = self.next();
        if c != Some('\\') {
            return c.map_or_else(|| fault(place, "a character should stand here"), Ok);
        }
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('\\' | '"' | '\'' | '[' | ']' | '-' | '^' | '/')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => {
                return fault(
                    place,
                    r#"no such escape: there are \n \r \t \\ \" \' \[ \] \- \^ \/ \xHH \uHHHH \UHHHHHHHH"#,
                );
            }
        };
        let mut code = 0;
        for _ in 0..digits {
            let Some(digit) = self.peek().and_then(|c| c.to_digit(16)) else {
                return fault(place, format!("the escape needs {digits} hexadecimal digits"));
            };
            code = code << 4 | digit;
            self.next();
        }
        char::from_u32(code).map_or_else(|| fault(place, format!("{code:x} is no character of Unicode")), Ok)
    }

    fn finish(self) -> Result<Grammar, Fault> {
        let Some(&root) = self.names.get("root") else {
            return fault((1, 1), "there is no rule root, with which a grammar begins");
        };
        let mut rules = Vec::with_capacity(self.rules.len());
        for Slot { name, place, body } in self.rules {
            let Some(body) = body else {
                return fault(place, format!("there is no rule {name}"));
            };
            rules.push(Rule { name, place, body });
        }
        Ok(Grammar { rules, root })
    }
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

fn fault<T>((line, column): (usize, usize), reason: impl Into<String>) -> Result<T, Fault> {
    Err(Fault { line, column, reason: reason.into() })
}
