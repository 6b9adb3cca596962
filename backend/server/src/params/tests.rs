use drafthorse_control::Grammar;

use super::*;

fn parse(json: &str) -> Result<GenerateParams> {
    GenerateParams::from_json("sampling_parameters", json)
}

/// The error's text.
fn refused(json: &str) -> String {
    parse(json).unwrap_err().to_string()
}

#[test]
fn numbers_may_be_strings() {
    let params = parse(
        r#"{"n": "1", "temperature": "0.1", "top_p": "0.9", "top_k": "-1", "max_tokens": "32", "min_tokens": 4.0,
           "ignore_eos": "True", "seed": "-3", "stop": "END", "stop_token_ids": ["7", 8], "logit_bias": {"5": "-1.5"},
           "logprobs": 2, "skip_special_tokens": "false", "min_p": null, "length_penalty": 1.0}"#,
    );
    let want = GenerateParams {
        temperature: Some(0.1),
        top_p: Some(0.9),
        top_k: Some(0),
        max_tokens: Some(32),
        min_tokens: 4,
        ignore_eos: true,
        seed: Some((-3i64).cast_unsigned()),
        stop: vec!["END".into()],
        stop_token_ids: vec![7, 8],
        logit_bias: vec![(5, -1.5)],
        logprobs: Some(2),
        keep_special_tokens: true,
        ..GenerateParams::default()
    };
    assert_eq!(params.unwrap(), want);
    assert_eq!(parse(r#"{"seed": 18446744073709551615}"#).unwrap().seed, Some(u64::MAX));
    assert_eq!(parse(r#"{"seed": -1}"#).unwrap().seed, None, "a fresh one");
    assert_eq!(parse("null").unwrap(), GenerateParams::default());
}

#[test]
fn a_value_out_of_range_is_named_with_its_limit() {
    assert_eq!(refused(r#"{"temperature": -1}"#), "temperature: must be 0 or more, is -1");
    assert_eq!(refused(r#"{"temperature": "NaN"}"#), r#"temperature: must be 0 or more, is "NaN""#);
    assert_eq!(refused(r#"{"temperature": "warm"}"#), r#"temperature: must be a number 0 or more, is "warm""#);
    assert_eq!(refused(r#"{"temperature": 1e300}"#), "temperature: must be 0 or more, is 1e+300");
    assert_eq!(refused(r#"{"top_p": 0}"#), "top_p: must be in (0, 1], is 0");
    assert_eq!(refused(r#"{"top_p": 1.5}"#), "top_p: must be in (0, 1], is 1.5");
    assert_eq!(refused(r#"{"top_k": -2}"#), "top_k: must be at least -1, is -2");
    assert_eq!(refused(r#"{"min_p": 2}"#), "min_p: must be in [0, 1], is 2");
    assert_eq!(refused(r#"{"max_tokens": 0}"#), "max_tokens: must be at least 1, is 0");
    assert_eq!(refused(r#"{"max_tokens": "-1"}"#), r#"max_tokens: must be at least 1, is "-1""#);
    assert_eq!(refused(r#"{"max_tokens": 1.5}"#), "max_tokens: must be a whole number of at least 1, is 1.5");
    assert_eq!(refused(r#"{"max_tokens": 9999999999}"#), "max_tokens: must be at most 2147483647, is 9999999999");
    assert_eq!(
        refused(r#"{"min_tokens": 9, "max_tokens": 8}"#),
        "min_tokens: must be at most max_tokens, which is 8, is 9"
    );
    assert_eq!(refused(r#"{"presence_penalty": 3}"#), "presence_penalty: must be in [-2, 2], is 3");
    assert_eq!(refused(r#"{"repetition_penalty": 0}"#), "repetition_penalty: must be in [0.01, 100], is 0");
    assert_eq!(refused(r#"{"repetition_penalty": 1e-38}"#), "repetition_penalty: must be in [0.01, 100], is 1e-38");
    assert_eq!(refused(r#"{"logprobs": 21}"#), "logprobs: must be at most 20, is 21");
    assert_eq!(refused(r#"{"stop": [""]}"#), "stop: has an empty string, which would stop everything");
    assert_eq!(refused(r#"{"stop": 3}"#), "stop: must be a string or a list of strings, is 3");
    assert_eq!(refused(r#"{"stop_token_ids": [-1]}"#), "stop_token_ids[0]: must be a token id, is -1");
    assert_eq!(refused(r#"{"stop": ["a", 3]}"#), "stop[1]: must be a string, is 3");
    assert_eq!(
        refused(r#"{"bad_words": ["a", [1, "b"]]}"#),
        "bad_words[1]: must be a string or a list of token ids, is a list of 2"
    );
    assert_eq!(refused(r#"{"logit_bias": {"1": 101}}"#), "logit_bias[1]: must be a number in [-100, 100], is 101");
    assert_eq!(refused(r#"{"logit_bias": {"7": 1, "3": 1, " 7": 2}}"#), "logit_bias: names token 7 twice");
    assert_eq!(refused(r#"{"logit_bias": {"x": 1}}"#), r#"logit_bias: must have token ids as keys, one is "x""#);
    assert_eq!(refused(r#"{"ignore_eos": "maybe"}"#), r#"ignore_eos: must be true or false, is "maybe""#);
    let many = serde_json::json!({"stop": vec!["x"; 17]}).to_string();
    assert_eq!(refused(&many), "stop: has 17 strings, at most 16 may be given");
}

#[test]
fn broken_json_is_refused_with_its_position() {
    assert_eq!(
        refused("{\"max_tokens\": 1,\n x}"),
        "sampling_parameters is not valid JSON at line 2 column 2: key must be a string"
    );
    assert_eq!(
        refused(r#"{"temperature": NaN}"#),
        "sampling_parameters is not valid JSON at line 1 column 17: expected value"
    );
    assert_eq!(refused("[1]"), "sampling_parameters: must be a JSON object, is a list of 1");
}

#[test]
fn a_typo_is_noted_or_refused_when_strict() {
    let json = r#"{"max_token": 5, "top_p": 0.5}"#;
    let params = parse(json).unwrap();
    assert_eq!((params.top_p, params.max_tokens), (Some(0.5), None));
    assert_eq!(params.warnings, ["max_token: no such parameter; did you mean max_tokens?"]);
    let strict = params.check_strict().unwrap_err();
    assert_eq!(strict.to_string(), "max_token: no such parameter; did you mean max_tokens?");
}

#[test]
fn what_is_not_there_yet_is_refused_by_name() {
    assert_eq!(refused(r#"{"lora_name": "x"}"#), "parameter lora_name is not supported");
    assert!(parse(r#"{"use_beam_search": false, "guided_json": null, "bad_words": []}"#).is_ok());
}

#[test]
fn several_choices_have_rules() {
    let params = parse(r#"{"n": "3", "best_of": 5}"#).unwrap();
    assert_eq!((params.n, params.num_candidates()), (3, 5));
    assert_eq!(parse("{}").unwrap().num_candidates(), 1);
    assert_eq!(refused(r#"{"n": 0}"#), "n: must be at least 1, is 0");
    assert_eq!(refused(r#"{"n": 129}"#), "n: must be at most 128, is 129");
    assert_eq!(refused(r#"{"n": 3, "best_of": 2}"#), "best_of: must be at least n, which is 3, is 2");
    assert_eq!(
        refused(r#"{"n": 2, "temperature": 0}"#),
        "n: must be 1 at temperature 0, where all choices are the same, is 2"
    );
    assert_eq!(
        refused(r#"{"best_of": 2, "temperature": 0}"#),
        "best_of: must be 1 at temperature 0, where all choices are the same, is 2"
    );
    let streamed = parse(r#"{"best_of": 2}"#).unwrap().check_stream().unwrap_err().to_string();
    assert_eq!(streamed, "best_of: must be n, which is 1, for a stream, is 2: which are best is known at the end");
    assert!(parse(r#"{"best_of": 2, "n": 2}"#).unwrap().check_stream().is_ok());
    let streamed = parse(r#"{"prompt_logprobs": 0}"#).unwrap().check_stream().unwrap_err().to_string();
    assert_eq!(streamed, "prompt_logprobs: does not go with a stream, where they have no place");
}

#[test]
fn drafts_may_be_fewer_or_none() {
    let drafts = |json: &str| {
        let params = parse(json).unwrap();
        (params.max_drafts, params.no_drafts)
    };
    assert_eq!(drafts("{}"), (None, false));
    assert_eq!(drafts(r#"{"speculate_max_draft_token_num": "2"}"#), (Some(2), false));
    assert_eq!(drafts(r#"{"speculate_method": "none", "speculate_max_draft_token_num": 1}"#), (Some(1), true));
    assert_eq!(
        refused(r#"{"speculate_max_draft_token_num": -1}"#),
        "speculate_max_draft_token_num: must be at least 0, is -1"
    );
    assert_eq!(
        refused(r#"{"speculate_method": "mtp"}"#),
        "speculate_method: must be none, which turns drafts off: how they are made is a setting of the model, is \"mtp\""
    );
    let typo = parse(r#"{"speculate_max_draft_token": 1}"#).unwrap().warnings;
    assert_eq!(typo, ["speculate_max_draft_token: no such parameter; did you mean speculate_max_draft_token_num?"]);
}

#[test]
fn words_and_tokens_may_be_shut_out() {
    let params = parse(r#"{"bad_words": ["no", [1, "2"]], "allowed_token_ids": [7, 3, 7], "typical_p": 0.5}"#).unwrap();
    assert_eq!(params.bad_words, [BadWord::Text("no".into()), BadWord::Tokens(vec![1, 2])]);
    assert_eq!((params.allowed_token_ids, params.typical_p), (vec![3, 7], Some(0.5)));
    assert_eq!(refused(r#"{"bad_words": [1]}"#), "bad_words[0]: must be a string or a list of token ids, is 1");
    assert_eq!(
        refused(r#"{"bad_words": [""]}"#),
        "bad_words: has an entry that is empty or all white space, or longer than 256"
    );
    assert_eq!(
        refused(r#"{"bad_words": " "}"#),
        "bad_words: has an entry that is empty or all white space, or longer than 256"
    );
    assert_eq!(refused(r#"{"allowed_token_ids": []}"#), "allowed_token_ids: is empty, which would allow nothing");
    assert_eq!(refused(r#"{"typical_p": 0}"#), "typical_p: must be in (0, 1], is 0");
    assert_eq!(parse(r#"{"truncate_prompt_tokens": -1}"#).unwrap().truncate_prompt_tokens, Some(Truncate::ToFit));
    assert_eq!(parse(r#"{"truncate_prompt_tokens": 9}"#).unwrap().truncate_prompt_tokens, Some(Truncate::ToLast(9)));
    assert_eq!(
        refused(r#"{"truncate_prompt_tokens": 0}"#),
        "truncate_prompt_tokens: must be -1, for as many as fit, or at least 1, is 0"
    );
}

/// The grammar of a request, its text last.
fn guided(json: &str) -> (String, String, String) {
    let guided = parse(json).unwrap().guided.unwrap();
    let (kind, text) = match guided.grammar {
        Grammar::JsonSchema(text) => ("schema", text),
        Grammar::Regex(text) => ("regex", text),
        Grammar::Lark(text) => ("lark", text),
    };
    (guided.field, kind.into(), text)
}

#[test]
fn grammars_come_under_all_names_that_are_used() {
    let is = |json: &str, field: &str, kind: &str, text: &str| {
        assert_eq!(guided(json), (field.into(), kind.into(), text.into()));
    };
    is(r#"{"guided_json": {"type": "null"}}"#, "guided_json", "schema", r#"{"type":"null"}"#);
    is(r#"{"guided_json": "{\"type\": 1"}"#, "guided_json", "schema", r#"{"type": 1"#);
    is(r#"{"guided_regex": "a+"}"#, "guided_regex", "regex", "a+");
    is(r#"{"guided_choice": ["a.b", "c|d"]}"#, "guided_choice", "regex", r"(?:a\.b|c\|d)");
    is(r#"{"guided_grammar": "start: /a/"}"#, "guided_grammar", "lark", "start: /a/");
    is(r#"{"guided_grammar": "root ::= \"a\""}"#, "guided_grammar", "lark", "start: P0\nT0: /a/\nP0: T0\n");
    is(r#"{"guided_json_object": true}"#, "guided_json_object", "schema", r#"{"type":"object"}"#);
    is(r#"{"structured_outputs": {"regex": "a"}}"#, "structured_outputs.regex", "regex", "a");
    is(r#"{"guided_decoding": {"choice": ["x"], "backend": "auto"}}"#, "guided_decoding.choice", "regex", "(?:x)");
    is(
        r#"{"structured_outputs": "{\"json_object\": true}"}"#,
        "structured_outputs.json_object",
        "schema",
        r#"{"type":"object"}"#,
    );
    is(r#"{"response_format": {"type": "json_object"}}"#, "response_format", "schema", r#"{"type":"object"}"#);
    is(
        r#"{"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}}"#,
        "response_format.json_schema.schema",
        "schema",
        r#"{"type":"null"}"#,
    );
    is(
        r#"{"guided_json": {"type": "null"}, "guided_whitespace_pattern": " ?"}"#,
        "guided_json",
        "schema",
        r#"{"type":"null","x-guidance":{"whitespace_pattern":" ?"}}"#,
    );
    for none in [
        r#"{"response_format": {"type": "text"}}"#,
        r#"{"guided_json": null, "guided_json_object": false}"#,
        r#"{"structured_outputs": {}}"#,
    ] {
        assert_eq!(parse(none).unwrap().guided, None, "{none}");
    }
}

#[test]
fn a_grammar_of_the_wrong_form_is_refused_by_its_field() {
    for (json, said) in [
        (r#"{"guided_json": 3}"#, "guided_json: must be a JSON schema, as an object or as text, is 3"),
        (r#"{"guided_regex": ""}"#, "guided_regex: must be a text that is not empty, is \"\""),
        (r#"{"guided_choice": []}"#, "guided_choice: must be a list of texts, one at least, is a list of 0"),
        (
            r#"{"guided_regex": "a", "guided_choice": ["b"]}"#,
            "guided_choice: does not go with guided_regex: the answer can follow only one",
        ),
        (
            r#"{"structured_outputs": {"regex": "a", "json": {}}}"#,
            "structured_outputs.json: does not go with structured_outputs.regex: the answer can follow only one",
        ),
        (
            r#"{"structured_outputs": {"regexp": "a"}}"#,
            "structured_outputs.regexp: no such constraint; did you mean regex?",
        ),
        (
            r#"{"structured_outputs": {"structural_tag": "[]"}}"#,
            "structured_outputs.structural_tag: must be an object with structures and triggers, is a list of 0",
        ),
        (
            r#"{"response_format": {"type": "xml"}}"#,
            "response_format.type: must be text, json_object, json_schema or structural_tag, is \"xml\"",
        ),
        (r#"{"response_format": {"type": "json_schema"}}"#, "response_format.json_schema.schema: is missing"),
        (
            r#"{"structured_outputs": {"grammar": "root ::= \"a\" |\n  (b)"}}"#,
            "structured_outputs.grammar: line 2 column 4: there is no rule b",
        ),
        (r#"{"guided_whitespace_pattern": " "}"#, "guided_whitespace_pattern: needs a JSON schema"),
    ] {
        assert_eq!(refused(json), said);
    }
}

#[test]
fn a_structural_tag_is_a_grammar_whose_schemas_are_looked_at_one_by_one() {
    let tag = r#"{"structures": [{"begin": "<f=a>", "schema": {"type": "null"}, "end": "</f>"}, {"begin": "[", "end": ""}],
        "triggers": ["<f=", "["]}"#;
    let schema = r#"{"type":"null","x-guidance":{"whitespace_pattern":"[\\x20\\x0A\\x0D\\x09]{1,40}"}}"#;
    let any = r#"{"x-guidance":{"whitespace_pattern":"[\\x20\\x0A\\x0D\\x09]{1,40}"}}"#;
    let text = format!(
        "start: tag* TEXT?\n\
         tag: until0 (/a\\x{{3e}}/ %json {schema} /\\x{{3c}}\\x{{2f}}f\\x{{3e}}/) | until1 (\"\" %json {any} \"\")\n\
         until0[lazy]: /(?s:.)*/ /\\x{{3c}}f\\x{{3d}}/\n\
         until1[lazy]: /(?s:.)*/ /\\x{{5b}}/\n\
         TEXT: /(?s:.)+/ & ~(/(?s:.)*/ (/\\x{{3c}}f\\x{{3d}}/ | /\\x{{5b}}/) /(?s:.)*/)\n"
    );
    for (json, field) in [
        (format!(r#"{{"structural_tag": {tag}}}"#), "structural_tag"),
        (format!(r#"{{"structural_tag": {}}}"#, serde_json::json!(tag)), "structural_tag"),
        (format!(r#"{{"structured_outputs": {{"structural_tag": {tag}}}}}"#), "structured_outputs.structural_tag"),
        (format!(r#"{{"response_format": {{"type": "structural_tag", {}}}"#, &tag[1..]), "response_format"),
    ] {
        let guided = parse(&json).unwrap().guided.unwrap();
        assert_eq!((guided.field.as_str(), guided.grammar), (field, Grammar::Lark(text.clone())));
        let schemas: Vec<_> =
            [(0, schema), (1, any)].map(|(i, schema)| (format!("{field}.structures[{i}].schema"), schema)).into();
        let parts: Vec<_> =
            schemas.into_iter().map(|(field, schema)| (field, Grammar::JsonSchema(schema.into()))).collect();
        assert_eq!(guided.parts, parts);
    }
}

#[test]
fn a_structural_tag_of_the_wrong_form_is_refused_by_its_field() {
    for (tag, said) in [
        (r#"{"structures": []}"#, "triggers: is missing"),
        (r#"{"triggers": ["<"], "structures": []}"#, "structures: must be a list of 1 to 256 entries, is a list of 0"),
        (r#"{"triggers": ["<", ""], "structures": []}"#, "triggers[1]: must be a text that is not empty, is \"\""),
        (
            r#"{"triggers": ["<f", "a", "<"], "structures": []}"#,
            "triggers[2]: and triggers[0] lie in one another: keep the shorter one",
        ),
        (r#"{"triggers": ["<"], "structures": [{"begin": "<"}]}"#, "structures[0].end: is missing"),
        (
            r#"{"triggers": ["<"], "structures": [{"begin": "a<", "end": ""}]}"#,
            "structures[0].begin: starts with none of the triggers, is \"a<\"",
        ),
        (
            r#"{"triggers": ["<", "["], "structures": [{"begin": "<a", "end": ""}]}"#,
            "triggers[1]: no structure's begin starts with it, which is \"[\"",
        ),
        (
            r#"{"triggers": ["<"], "structures": [{"begin": "<a", "end": "", "schema": 1}]}"#,
            "structures[0].schema: must be a JSON schema, an object, is 1",
        ),
        (
            r#"{"triggers": ["<"], "structures": [{"begin": "<a", "end": "", "json": {}}]}"#,
            "structures[0].json: is no part of a structure: begin, schema, end",
        ),
        (r#"{"format": {"type": "triggered_tags"}}"#, "format: is not supported: give structures and triggers"),
        (r#"{"tags": []}"#, "tags: is no part of a structural tag"),
    ] {
        assert_eq!(refused(&format!(r#"{{"structural_tag": {tag}}}"#)), format!("structural_tag.{said}"));
    }
}
