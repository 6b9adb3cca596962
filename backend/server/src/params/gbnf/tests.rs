//! GBNF in, Lark or the fault out.

use drafthorse_worker::grammar::{Grammars, TokenBytes};
use proptest::prelude::*;

use super::{is_gbnf, to_lark};

fn lark(text: &str) -> String {
    to_lark(text).unwrap()
}

fn refused(text: &str) -> String {
    to_lark(text).unwrap_err().to_string()
}

#[test]
fn what_does_not_recur_is_one_terminal() {
    assert_eq!(
        lark("root ::= \"a\" digit+ | [^x\\n-] # more\ndigit ::= [0-9]"),
        "start: P0\nT0: (/a/ (T1)+ | /[^\\x{78}\\x{a}\\x{2d}]/)\nT1: /[\\x{30}-\\x{39}]/\nP0: T0\n"
    );
    assert_eq!(
        lark("root ::= 'it''s'{2,3} .{2} \"\" [\"\\\\]?"),
        "start: P0\nT0: /it/ (/s/){2,3} (/(?s:.)/){2,2} \"\" (/[\\x{22}\\x{5c}]/)?\nP0: T0\n"
    );
}

#[test]
fn what_recurs_is_a_rule_of_terminals() {
    let text = "root ::= ws list\nlist ::= \"(\" ws (list\n  | \"x\") \")\" ws\nws ::= \" \"*";
    assert_eq!(
        lark(text),
        "start: r0\nr0: P0? r2\nT1: (/\\x{20}/)*\nr2: P1 (r2 | P2) P3\n\
         P0: (T1) & /(?s:.)+/\nP1: /\\x{28}/ T1\nP2: /x/\nP3: /\\x{29}/ T1\n"
    );
    assert_eq!(lark("root::=\"a\"?"), "start: P0?\nT0: (/a/)?\nP0: (T0) & /(?s:.)+/\n");
}

#[test]
fn it_is_told_from_lark() {
    for text in ["root ::= \"a\"", "# a: b\nroot\n::= x", "a ::= \"b\nroot ::= a", "root ::= [\"] \"x\" '\"'"] {
        assert!(is_gbnf(text), "{text}");
    }
    for text in ["start: /a/", "start: \"::=\"", "// root ::= x\nstart: A", "start: /[::=]/ ", "start: \"\\\"::=\"", ""]
    {
        assert!(!is_gbnf(text), "{text}");
    }
}

#[test]
fn what_is_wrong_is_said_with_its_place() {
    for (text, said) in [
        ("rot ::= \"a\"", "line 1 column 1: there is no rule root, with which a grammar begins"),
        ("root ::= a\n b", "line 1 column 10: there is no rule a"),
        ("root ::= \"a\"\nb ::= \"c\"\nroot ::= b", "line 3 column 1: rule root is defined twice"),
        ("root ::= (\"a\"\n | \"b\"", "line 1 column 10: the parenthesis is not closed"),
        ("root ::= \"a\")", "line 1 column 13: there is no parenthesis to close"),
        ("root ::= \"ab\n", "line 1 column 10: the literal does not end on its line"),
        ("root ::= [a-\n", "line 1 column 10: the class does not end on its line"),
        ("root ::= [z-a]", "line 1 column 11: the range goes backwards: 'a' comes before 'z'"),
        ("root ::= []", "line 1 column 10: the class has no character"),
        ("root ::= \"\\d\"", "line 1 column 11: no such escape: there are"),
        ("root ::= \"\\u00g0\"", "line 1 column 11: the escape needs 4 hexadecimal digits"),
        ("root ::= \"\\ud800\"", "line 1 column 11: d800 is no character of Unicode"),
        ("root ::= \"a\"{3,2}", "line 1 column 13: the first number is above the second"),
        ("root ::= \"a\"{x}", "line 1 column 13: a repetition is {n}, {n,}, {,m} or {n,m}"),
        ("root ::= \"a\"{10001}", "line 1 column 14: is above 10000, the most that may be asked for"),
        ("root ::= *", "line 1 column 10: there is nothing before it to repeat"),
        ("root ::= <think>", "line 1 column 10: single tokens are not supported"),
        ("root ::= \"é\" ;", "line 1 column 14: a literal, a class, a rule's name or ( should stand here, not ';'"),
        ("root = \"a\"\nb ::= \"c\"", "line 1 column 6: ::= should follow the rule's name root, not '='"),
        ("ws ::= \"a\"\nroot ::= \"x\" root", "line 2 column 1: rule root never ends"),
    ] {
        let fault = refused(text);
        assert!(fault.starts_with(said), "{text:?}: {fault}");
    }
    assert!(refused(&format!("root ::= {}", "(".repeat(300_000))).ends_with("more than 100 parentheses are open"));
    assert!(
        refused(&format!("root ::= \"a\"{}", "?".repeat(300_000)))
            .ends_with("more than 100 repetitions of one another")
    );
}

#[test]
fn many_rules_take_no_long() {
    let chain: String = (0..8000).map(|i| format!("a{i} ::= a{} | \"x\"\n", i + 1)).collect();
    let began = std::time::Instant::now();
    lark(&format!("{chain}a8000 ::= \"y\"\nroot ::= a0"));
    let chain: String = (0..8000).map(|i| format!("a{} ::= a{i} | \"x\"\n", i + 1)).collect();
    lark(&format!("root ::= a8000\na0 ::= \"y\"\n{chain}"));
    assert!(began.elapsed().as_secs() < 10, "{:?}", began.elapsed());
}

/// Bodies of rules r0 to r3, of few letters.
fn body() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("\"ab\"".to_owned()),
        Just("[a-c]".to_owned()),
        Just("[^a]".to_owned()),
        Just("\"\"".to_owned()),
        Just(".".to_owned()),
        (0..4).prop_map(|rule| format!("r{rule}")),
    ];
    leaf.prop_recursive(4, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 2..4).prop_map(|parts| parts.join(" ")),
            prop::collection::vec(inner.clone(), 2..4).prop_map(|ways| format!("({})", ways.join(" | "))),
            (inner, prop_oneof![Just("*"), Just("+"), Just("?"), Just("{1,2}"), Just("{0}"), Just("{2,}")])
                .prop_map(|(part, times)| format!("({part}){times}")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// The compiler understands all that is written: what it may refuse is a grammar that matches nothing or costs too much.
    #[test]
    fn what_is_written_is_lark(bodies in prop::collection::vec(body(), 4), root in body()) {
        let rules: String = bodies.iter().enumerate().map(|(i, body)| format!("r{i} ::= {body} | \"c\"\n")).collect();
        let text = to_lark(&format!("{rules}root ::= {root} \"b\"")).unwrap();
        let mut tokens = TokenBytes::new(vec![0]);
        tokens.push_special(b"<|end|>");
        (b' '..=b'~').for_each(|byte| tokens.push(&[byte]));
        let compiled = Grammars::new(tokens).compile(&drafthorse_control::Grammar::Lark(text.clone()));
        prop_assert!(compiled.is_ok(), "{}: {}", compiled.unwrap_err(), text);
    }

    #[test]
    fn no_text_is_too_odd(text in "[a-z\"'\\[\\]()*+?{}|:=^.#\\\\0-9 \n-]{0,60}") {
        _ = is_gbnf(&text);
        _ = to_lark(&format!("root ::= {text}"));
    }
}
