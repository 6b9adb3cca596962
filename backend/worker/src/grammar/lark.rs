//! What the compiler says of a Lark grammar, in one line with its place: lines and columns count from 1, columns in characters.
//!
//! The compiler knows the place of a rule's body at best, and counts bytes. Where it quotes what is wrong, that is looked for there.

use super::compile::regex_fault;

/// What ends each of these: they are no places for names.
const QUOTED: [(&str, &str); 4] = [("//", "\n"), ("#", "\n"), ("\"", "\""), ("/", "/")];

/// `reason` for a reader who has `text` before them.
pub(super) fn told(text: &str, reason: &str) -> String {
    let line = reason.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let line = line.strip_prefix("at ").unwrap_or(line);
    let (begin, fault) = match (placed(text, line), line.strip_prefix("EOF: ")) {
        (Some((begin, fault)), _) => (Some(begin), fault),
        (None, Some(fault)) => (Some(text.trim_end().len()), fault),
        (None, None) => (None, line),
    };
    let (at, fault) = closer(text, begin, fault, reason);
    match at {
        Some(at) => format!("{}: {fault}", place(text, at)),
        None => fault,
    }
}

/// `line 3 column 7`, of a byte of the text.
pub(super) fn place(text: &str, at: usize) -> String {
    let before = &text[..text.floor_char_boundary(at)];
    let line_begin = before.rfind('\n').map_or(0, |end| end + 1);
    format!("line {} column {}", before.matches('\n').count() + 1, before[line_begin..].chars().count() + 1)
}

/// Where `name` stands, at `from` or after it, outside of strings, regular expressions and comments.
pub(super) fn find(text: &str, from: usize, name: &str) -> Option<usize> {
    let is_of_name = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    let ends_in_name = name.chars().all(is_of_name);
    let mut at = 0;
    while at < text.len() {
        if let Some((_, close)) = QUOTED.iter().find(|(open, _)| text[at..].starts_with(open)) {
            at = close_of(text, at, close).unwrap_or(text.len());
            continue;
        }
        if let Some(rest) = text[at..].strip_prefix(name).filter(|_| at >= from) {
            let is_part = text[..at].ends_with(is_of_name) || rest.starts_with(is_of_name);
            if !is_part || !ends_in_name {
                return Some(at);
            }
        }
        at += text[at..].chars().next().map_or(1, char::len_utf8);
    }
    None
}

/// The byte after what is quoted from `open` on; `None` if it does not end.
fn close_of(text: &str, open: usize, close: &str) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in text[open..].char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' if close != "\n" => escaped = true,
            '\n' if close == "\"" => return None,
            c if close.starts_with(c) => return Some(open + at + c.len_utf8()),
            _ => {}
        }
    }
    None
}

/// `3(7): what is wrong`: the byte, and the rest.
fn placed<'a>(text: &str, line: &'a str) -> Option<(usize, &'a str)> {
    let (row, rest) = line.split_once('(')?;
    let (column, fault) = rest.split_once("): ")?;
    let (row, column): (usize, usize) = (row.parse().ok()?, column.parse().ok()?);
    let row_begin: usize = text.split_inclusive('\n').take(row.checked_sub(1)?).map(str::len).sum();
    Some((text.floor_char_boundary(row_begin + column.checked_sub(1)?), fault))
}

/// The fault in plain words, and a closer place if there is one.
fn closer(text: &str, begin: Option<usize>, fault: &str, reason: &str) -> (Option<usize>, String) {
    let from = begin.unwrap_or(0);
    if let Some(pattern) = quoted(fault, "invalid regex ") {
        let find = |pattern: &str| text[from..].find(&format!("/{pattern}/")).map(|at| from + at);
        // Flags stand before the expression for the compiler, and behind it in the text.
        let bare = pattern.strip_prefix("(?").and_then(|rest| rest.split_once(')')).map_or(&*pattern, |(_, bare)| bare);
        let at = find(&pattern);
        let num_flags = if at.is_none() { pattern.chars().count() - bare.chars().count() } else { 0 };
        if let Some(of_regex) = regex_fault(reason, num_flags) {
            return (at.or_else(|| find(bare)).or(begin), of_regex);
        }
    }
    if fault.starts_with("lexer ") {
        return unreadable(text, from);
    }
    if fault.starts_with("no start rule found") {
        return (Some(0), "there is no rule start, with which a grammar begins".into());
    }
    if let Some(name) = quoted(fault, "unknown special token: ") {
        return (find(text, from, &name).or(begin), format!("the vocabulary has no special token {name}"));
    }
    for (opening, closing) in
        [("unknown name: ", ""), ("circular reference in token ", " definition"), ("special tokens (like ", ")")]
    {
        if let Some(name) = quoted(fault, opening) {
            let fault = match closing {
                ")" => format!("special tokens like {name} cannot be used in terminals"),
                "" => format!("there is no rule or terminal {name}"),
                _ => format!("the terminal {name} leads back to itself"),
            };
            return (find(text, from, &name).or(begin), fault);
        }
    }
    if let Some(name) = fault.strip_prefix("unknown grammar ") {
        return (find(text, 0, name), format!("there is no grammar {name}"));
    }
    (begin, expected(fault))
}

/// A name in quotes behind `opening`, at the beginning of a fault.
fn quoted(fault: &str, opening: &str) -> Option<String> {
    let rest = fault.strip_prefix(opening)?;
    let mut strings = serde_json::Deserializer::from_str(rest).into_iter::<String>();
    strings.next()?.ok()
}

/// `Expected X, found Y (at TEXT (Y))` in our words.
fn expected(fault: &str) -> String {
    let (said, found) = match fault.rsplit_once(" (at ") {
        Some((said, at)) => (said, quoted(at, "")),
        None => (fault, None),
    };
    let found = match found.as_deref() {
        Some(text) if text.contains('\n') => "the end of the line".to_owned(),
        Some(text) => text.to_owned(),
        None => "the end".to_owned(),
    };
    let Some(wanted) = said.strip_prefix("Expected ").or_else(|| said.strip_prefix("expecting ")) else {
        return said.to_owned();
    };
    let wanted = wanted.split(", found ").next().unwrap_or_default();
    let wanted = wanted.strip_prefix("token ").unwrap_or(wanted);
    let wanted = if wanted == "value" { "a name, a string, a regular expression or (" } else { wanted };
    format!("expected {wanted}, found {found}")
}

/// What the compiler could not cut into words, at or before a byte.
fn unreadable(text: &str, at: usize) -> (Option<usize>, String) {
    let mut open = 0;
    while open < at {
        let Some((_, close)) = QUOTED.iter().find(|(quote, _)| text[open..].starts_with(quote)) else {
            open += text[open..].chars().next().map_or(1, char::len_utf8);
            continue;
        };
        match close_of(text, open, close) {
            Some(end) if end <= at => open = end,
            // It fails in here.
            inside => {
                let what = if *close == "/" { "regular expression" } else { "string" };
                let escape = text[..text.floor_char_boundary(at)].ends_with('\\') && *close == "\"";
                return match (escape, inside) {
                    (true, _) => {
                        let escape: String = text[at - 1..].chars().take(2).collect();
                        let known = r#"\" \\ \/ \b \f \n \r \t \uHHHH \xHH"#;
                        (Some(at - 1), format!("no such escape in a string: {escape}; there are {known}"))
                    }
                    (false, None) => (Some(open), format!("the {what} does not end on its line")),
                    (false, Some(_)) => {
                        (Some(at), format!("this character may not stand in a {what}, write it as an escape"))
                    }
                };
            }
        }
    }
    let here = text[at.min(text.len())..].chars().next().map_or("the end".to_owned(), |c| format!("{c:?}"));
    (Some(at), format!("nothing of a grammar begins with {here}: expected a name, a string, a regular expression or ("))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_outside_of_strings_and_comments() {
        let text = "start: \"c\" /c\\/c/ abc # c\n  c-d é c";
        assert_eq!(find(text, 0, "c").map(|at| place(text, at)), Some("line 2 column 9".into()));
        assert_eq!(find(text, 0, "abc").map(|at| place(text, at)), Some("line 1 column 19".into()));
        assert_eq!(find(text, 30, "abc"), None);
        assert_eq!(find("a: <|x|>b", 0, "<|x|>"), Some(3));
    }
}
