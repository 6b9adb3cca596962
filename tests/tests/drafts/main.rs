//! Drafters against some that are written out in torch: the table in `PARITY_DRAFTS.md`.
//!
//! `DRAFTHORSE_PARITY=write cargo test -p drafthorse-tests --test drafts` writes it anew.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod eagle;
mod mtp;

use std::fmt::Write;
use std::path::Path;

use drafthorse_tests::close::{self, distance};
use drafthorse_tests::drafts::DraftGolden;

/// How far a drafter is off where something is left out: the drafter, what, how far.
type Without = (&'static str, &'static str, f64);

/// `PARITY_DRAFTS.md`.
fn table() -> String {
    let mut text = String::from(
        "# Parity of drafters with torch\n\n\
         Largest difference of f32 logits, as a part of the largest logit, on tiny random modules that are written out in torch, in f64\n\
         (`goldens/make.py`, `goldens/deepseek_mtp.py`, `goldens/eagle.py`); 1e-4 is allowed. An EAGLE head reads hidden states that a tiny base\n\
         made of the tokens, here and there. Written by `DRAFTHORSE_PARITY=write cargo test -p drafthorse-tests --test drafts`.\n\n\
         | drafter | after the base's hidden states | after its own |\n|---|---|---|\n",
    );
    for (name, got) in mtp::logits_of_all().into_iter().chain(eagle::logits_of_all()) {
        let golden = DraftGolden::read(name);
        let (given, own) = (golden.floats("logits"), golden.floats("chain"));
        let [given, own] = [(&got[..given.len()], &given), (&got[given.len()..], &own)]
            .map(|(got, want)| distance(got, want).relative);
        assert!(given <= close::F32 && own <= close::F32, "{name}: {given:e}, {own:e}");
        writeln!(text, "| {name} | {given:.0e} | {own:.0e} |").unwrap();
    }
    text.push_str("\nWith something left out, which each must show at a hundred times the bound or more:\n\n");
    text.push_str("| drafter | without | difference |\n|---|---|---|\n");
    for (name, what, far) in mtp::without().into_iter().chain(eagle::without()) {
        assert!(far > 100.0 * close::F32, "{name} without {what} is only {far:e} away");
        writeln!(text, "| {name} | {what} | {far:.2} |").unwrap();
    }
    text
}

#[test]
fn every_drafter_has_the_logits_of_torch_and_the_table_is_kept() {
    let table = table();
    println!("{table}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("PARITY_DRAFTS.md");
    if std::env::var("DRAFTHORSE_PARITY").is_ok_and(|what| what == "write") {
        std::fs::write(&path, &table).unwrap();
    }
    // Last digits may differ from one CPU to the next; drafters and checks may not.
    let kept = std::fs::read_to_string(&path).unwrap();
    let rows = |text: &str| -> Vec<String> {
        let rows = text.lines().filter(|line| line.starts_with('|')).map(|line| {
            line.split('|').map(str::trim).filter(|cell| cell.parse::<f64>().is_err()).collect::<Vec<_>>().join("|")
        });
        rows.collect()
    };
    assert_eq!(rows(&table), rows(&kept), "PARITY_DRAFTS.md is of other drafters or checks");
}
