//! Grammars over a small vocabulary: what may come, what may not, where it ends.

use drafthorse_control::{Grammar, TokenId};

use super::{GrammarError, Grammars, Matcher, TokenBytes};

const END: TokenId = 0;

/// An end, the printable characters and the line break one by one, then a few longer tokens.
const WORDS: [&str; 6] = ["true", "{\"", "\":", "ab", "abc", "12"];

fn vocabulary() -> TokenBytes {
    let mut tokens = TokenBytes::new(vec![END]);
    tokens.push_special(b"<|end|>");
    for byte in (b' '..=b'~').chain([b'\n']) {
        tokens.push(&[byte]);
    }
    WORDS.iter().for_each(|word| tokens.push(word.as_bytes()));
    tokens
}

/// The longest tokens first.
fn tokens(mut text: &str) -> Vec<TokenId> {
    let table = vocabulary();
    let mut tokens = Vec::new();
    while !text.is_empty() {
        let fits = |(_, word): &(usize, &Vec<u8>)| !word.is_empty() && text.as_bytes().starts_with(word);
        let (id, word) = table.words().iter().enumerate().filter(fits).max_by_key(|(_, word)| word.len()).unwrap();
        tokens.push(id as TokenId);
        text = &text[word.len()..];
    }
    tokens
}

fn regex(text: &str) -> Grammar {
    Grammar::Regex(text.into())
}

fn schema(text: &str) -> Grammar {
    Grammar::JsonSchema(text.into())
}

fn refused(grammar: &Grammar) -> String {
    Grammars::new(vocabulary()).compile(grammar).unwrap_err().to_string()
}

/// After `text`: the tokens that may come, an end as `.`; `done` if nothing may.
fn next(grammar: &Grammar, text: &str) -> String {
    let compiled = Grammars::new(vocabulary()).compile(grammar).unwrap();
    let mut matcher = Matcher::new(&compiled, &tokens(text)).unwrap();
    if matcher.is_done() {
        return "done".into();
    }
    let table = vocabulary();
    let mut mask = vec![u32::MAX; table.len().div_ceil(32)];
    let words = mask.len();
    matcher.fill(&[], words, &mut mask).unwrap();
    let allowed = (0..table.len()).filter(|token| mask[token / 32] >> (token % 32) & 1 == 1);
    let shown = allowed.map(|token| match token as TokenId {
        END => ".".to_owned(),
        _ => String::from_utf8(table.words()[token].clone()).unwrap(),
    });
    shown.collect::<Vec<_>>().join(" ")
}

#[test]
fn a_regex_says_what_may_come_and_where_it_ends() {
    let grammar = regex("(ab|abd|x{2})");
    assert_eq!(next(&grammar, ""), "a x ab");
    assert_eq!(next(&grammar, "a"), "b");
    assert_eq!(next(&grammar, "ab"), ". d");
    assert_eq!(next(&grammar, "abd"), "done");
    assert_eq!(next(&grammar, "xx"), "done");
}

#[test]
fn a_schema_is_followed_to_its_end() {
    let grammar = schema(
        r#"{"type":"object","properties":{"ab":{"type":"boolean"}},"required":["ab"],
        "additionalProperties":false}"#,
    );
    assert_eq!(next(&grammar, ""), "{ {\"");
    assert_eq!(next(&grammar, "{\""), "a ab");
    assert_eq!(next(&grammar, "{\"ab"), "\" \":");
    assert_eq!(next(&grammar, "{\"ab\":"), "  f t \n true");
    assert_eq!(next(&grammar, "{\"ab\":true"), "  } \n");
    assert_eq!(next(&grammar, "{\"ab\":true}"), "done");
    let spaces = format!("{{{}", " ".repeat(40));
    assert_eq!(next(&grammar, &spaces), "\"", "white space has an end");
}

#[test]
fn a_lark_grammar_recurs() {
    let grammar = Grammar::Lark("start: expr\nexpr: term (\"+\" term)*\nterm: /[0-9]/ | \"(\" expr \")\"".into());
    assert_eq!(next(&grammar, "((1+2"), ") +");
    assert_eq!(next(&grammar, "(1)"), ". +");
}

#[test]
fn a_draft_is_cut_where_the_grammar_refuses_it() {
    let compiled = Grammars::new(vocabulary()).compile(&regex("a{3}b?")).unwrap();
    let mut matcher = Matcher::new(&compiled, &tokens("a")).unwrap();
    let mut allowed = |text: &str, end: bool| {
        let mut drafts: Vec<i32> = text.chars().map(|c| tokens(&c.to_string())[0] as i32).collect();
        if end {
            drafts.push(END as i32);
        }
        matcher.num_allowed(&drafts)
    };
    assert_eq!(allowed("aa", true), 3);
    assert_eq!(allowed("a", true), 1);
    assert_eq!(allowed("aabb", false), 3);
    assert_eq!(allowed("b", false), 0);
    assert_eq!(allowed("aab", false), 3, "and it stands where it stood");
}

#[test]
fn the_masks_after_drafts_are_those_of_the_tokens_themselves() {
    let compiled =
        Grammars::new(vocabulary()).compile(&schema(r#"{"type":"array","items":{"type":"integer"}}"#)).unwrap();
    let text = tokens("[1, 12 , 0]");
    let words = vocabulary().len().div_ceil(32);
    for at in 0..text.len() {
        let mut matcher = Matcher::new(&compiled, &text[..at]).unwrap();
        let drafts: Vec<i32> = text[at..].iter().take(4).map(|&token| token as i32).collect();
        let mut masks = vec![u32::MAX; (1 + drafts.len()) * words];
        matcher.fill(&drafts, words, &mut masks).unwrap();
        for (after, mask) in masks.chunks(words).enumerate() {
            let mut alone = Matcher::new(&compiled, &text[..at + after]).unwrap();
            if alone.is_done() {
                continue;
            }
            let mut want = vec![u32::MAX; words];
            alone.fill(&[], words, &mut want).unwrap();
            assert_eq!(mask, want, "{after} drafts after {at} tokens");
        }
        // It stands where it stood.
        let mut again = vec![u32::MAX; words];
        matcher.fill(&[], words, &mut again).unwrap();
        assert_eq!(again, masks[..words]);
    }
}

#[test]
fn what_cannot_be_compiled_is_refused_with_its_place() {
    for (grammar, said) in [
        (schema("{\"type\": \n strin}"), "is not valid JSON at line 2 column 2: expected value"),
        (schema("[1]"), "must be a JSON schema: an object, or true"),
        (schema(r#"{"type": "strin"}"#), "Invalid type: strin"),
        (
            schema(r#"{"properties": {"a": {"type": "string", "minLength": "x"}}}"#),
            "at /properties/a: Expected positive integer for 'minLength', got \"x\"",
        ),
        (
            schema(r#"{"properties": {"a/b": {"anyOf": [{}, {"if": {}}]}}}"#),
            "at /properties/a~1b/anyOf/1: Unimplemented keys: [\"if\"]",
        ),
        (schema(r##"{"items": {"$ref": "#/$defs/none"}}"##), "at /items: Pointer '/$defs/none' does not exist"),
        (
            schema(r#"{"items": {"type": "string", "pattern": "(["}}"#),
            "at /items: character 2 of the regular expression: unclosed character class",
        ),
        (regex("a(b"), "character 2 of the regular expression: unclosed group"),
        (
            regex("(?=a)b"),
            "character 1 of the regular expression: look-around, including look-ahead and look-behind, is not supported",
        ),
    ] {
        assert_eq!(refused(&grammar), said);
    }
    let long = " ".repeat(300_000);
    assert_eq!(refused(&regex(&long)), "has 300000 bytes, at most 262144 may be given");
}

#[test]
fn what_is_wrong_with_a_lark_grammar_has_its_line_and_column() {
    for (grammar, said) in [
        ("", "line 1 column 1: there is no rule start, with which a grammar begins"),
        ("START: \"a\"", "line 1 column 1: there is no rule start, with which a grammar begins"),
        ("start: \"a\"\n\nother \"b\"", "line 3 column 7: expected ':', found \"b\""),
        ("a", "line 1 column 2: expected ':', found the end of the line"),
        ("start: (\"a\"", "line 1 column 12: expected ')', found the end of the line"),
        ("start: \"a\" |* \"b\"", "line 1 column 13: expected a name, a string, a regular expression or (, found *"),
        ("start: \"b\" abc b", "line 1 column 12: there is no rule or terminal abc"),
        ("start: \"é\" x\nx: \"x\" // no y\n  | y", "line 3 column 5: there is no rule or terminal y"),
        ("start: \"a\"\nstart: \"b\"", "line 2 column 8: duplicate rule: \"start\""),
        ("start: A\nA: \"b\" A", "line 2 column 8: the terminal A leads back to itself"),
        ("start: \"a\"\n  | \"b\" /a(/", "line 2 column 9: character 2 of the regular expression: unclosed group"),
        ("start: A\nA: /[/i", "line 2 column 4: character 1 of the regular expression: unclosed character class"),
        ("start: \"a\" @sub", "line 1 column 12: there is no grammar @sub"),
        ("start: \"a\" <|nothing|>", "line 1 column 12: the vocabulary has no special token <|nothing|>"),
        ("start: T\nT: \"a\" <|end|>", "line 2 column 8: special tokens like <|end|> cannot be used in terminals"),
        ("start: \"é\" \"a\nx", "line 1 column 12: the string does not end on its line"),
        (
            r#"start: "a\q""#,
            r#"line 1 column 10: no such escape in a string: \q; there are \" \\ \/ \b \f \n \r \t \uHHHH \xHH"#,
        ),
        (
            "start: é",
            "line 1 column 8: nothing of a grammar begins with 'é': expected a name, a string, a regular expression or (",
        ),
        ("start: a{3,1}\na: \"x\"", "line 1 column 8: range end must be >= start, got (3, 1)"),
        ("start: x\nx: x", "no text of this vocabulary matches it"),
    ] {
        assert_eq!(refused(&Grammar::Lark(grammar.into())), said, "{grammar:?}");
    }
}

#[test]
fn whatever_a_lark_grammar_has_wrong_is_said_in_one_line() {
    const PARTS: [&str; 22] = [
        "start", ":", " ", "\n", "\"", "a", "é", "🦀", "/", "\\", "(", ")", "|", "<|end|>", "<", "[", "@x", "%json {",
        "//", "#", "*", "..",
    ];
    let grammars = Grammars::new(vocabulary());
    let mut seed = 7u64;
    for _ in 0..300 {
        let mut text = "start: ".to_owned();
        for _ in 0..8 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            text.push_str(PARTS[(seed >> 33) as usize % PARTS.len()]);
        }
        if let Err(error) = grammars.compile(&Grammar::Lark(text.clone())) {
            let said = error.to_string();
            assert!(!said.is_empty() && !said.contains('\n') && !said.contains("at 1("), "{text:?}: {said}");
        }
    }
}

#[test]
fn an_end_token_that_a_grammar_names_ends_it_or_is_refused() {
    let followed = "<|end|> ends the answer, so nothing can follow it, but the grammar wants more";
    for (grammar, at) in [
        ("start: <|end|> \"a\"", "line 1 column 8: "),
        ("start: \"<|end|>\" (\"b\" | x)* \"c\"\nx: <|end|>", "line 2 column 4: "),
        ("start: (<[0]> | \"b\") \"a\"", "line 1 column 9: "),
    ] {
        assert_eq!(refused(&Grammar::Lark(grammar.into())), format!("{at}{followed}"), "{grammar}");
    }
    let next = |grammar: &str, text: &str| next(&Grammar::Lark(grammar.into()), text);
    assert_eq!(next("start: \"a\" <|end|>", ""), "a");
    assert_eq!(next("start: \"a\" <|end|>", "a"), ".");
    assert_eq!(next("start: \"a\" (<|end|> \"b\"?)?", "a"), ".", "what may follow need not");
    let any = next("start: <[*]> \"b\"", "");
    assert_eq!(any.matches('.').count(), 1, "the character, and no end before its b: {any}");
}

#[test]
fn a_costly_grammar_is_compiled_or_refused_in_bounded_time() {
    let started = std::time::Instant::now();
    let deep = "[".repeat(100_000);
    assert!(refused(&schema(&deep)).ends_with("recursion limit exceeded"));
    let part = |i| format!(r#"{{"properties":{{"k{i}":{{"type":"integer","minimum":{i}}}}}}},"#);
    let wide: String = (0..2000).map(part).collect();
    assert_eq!(refused(&schema(&format!(r#"{{"allOf":[{wide}true]}}"#))), "schema too large");
    for text in ["((a{1,1000}){1,1000}){1,1000}", "(a|b)*a(a|b){300}c", "(.*a.*b.*c.*){20}"] {
        // These are lazy: they cost as they are used.
        let compiled = Grammars::new(vocabulary()).compile(&regex(text));
        assert!(compiled.is_ok(), "{compiled:?}");
    }
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

#[test]
fn a_grammar_is_compiled_once() {
    let grammars = Grammars::new(vocabulary());
    let first = grammars.compile(&regex("ab?")).unwrap();
    assert!(std::sync::Arc::ptr_eq(&first, &grammars.compile(&regex("ab?")).unwrap()));
    for i in 0..100 {
        grammars.compile(&regex(&format!("a{{{}}}", i + 1))).unwrap();
    }
    assert!(std::sync::Arc::ptr_eq(&first, &grammars.compile(&regex("ab?")).unwrap()), "somebody holds it");
    assert_eq!(GrammarError::TooLong { bytes: 2, max: 1 }.to_string(), "has 2 bytes, at most 1 may be given");
}
