//! End tokens that a grammar names itself. The answer ends with one, whatever the grammar wants after it.

use std::collections::{HashMap, HashSet};

use llguidance::earley::{CGrammar, CSymIdx};

/// What a grammar says of end tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    /// Nothing: they may come where its text may end.
    Unnamed,
    /// They are among tokens of which any may come, such as `<[*]>`.
    AmongOthers,
    /// It names them, and ends with them.
    Named,
    /// It names this one, and wants something after it.
    Followed(u32),
}

/// Looks at all that can be come to from the grammar's start.
pub(super) fn ends_of(grammar: &CGrammar, end_tokens: &[u32], vocab_size: u32) -> Ends {
    let symbols = reachable(grammar);
    let mut named: HashMap<CSymIdx, u32> = HashMap::new();
    let mut among_others = false;
    for &symbol in &symbols {
        let Some(lexeme) = grammar.sym_data(symbol).lexeme else { continue };
        let spec = grammar.lexer_spec().lexeme_spec(lexeme);
        let Some(&end) = end_tokens.iter().find(|&&end| spec.contains_token(end)) else { continue };
        match (0..vocab_size).filter(|token| !end_tokens.contains(token)).any(|token| spec.contains_token(token)) {
            true => among_others = true,
            false => _ = named.insert(symbol, end),
        }
    }
    if named.is_empty() {
        return if among_others { Ends::AmongOthers } else { Ends::Unnamed };
    }

    // Who has which symbols in its rules, to come from the end tokens to all that may contain them.
    let mut users: HashMap<CSymIdx, Vec<CSymIdx>> = HashMap::new();
    for &symbol in &symbols {
        for part in parts(grammar, symbol).flatten() {
            users.entry(*part).or_default().push(symbol);
        }
    }
    let mut contain = named.clone();
    let mut next: Vec<CSymIdx> = named.keys().copied().collect();
    while let Some(symbol) = next.pop() {
        let end = contain[&symbol];
        for &user in users.get(&symbol).into_iter().flatten() {
            if contain.insert(user, end).is_none() {
                next.push(user);
            }
        }
    }
    for &symbol in &symbols {
        for rule in parts(grammar, symbol) {
            let last_needed = rule.iter().rposition(|part| !may_be_empty(grammar, *part)).unwrap_or(0);
            if let Some(end) = rule[..last_needed].iter().find_map(|part| contain.get(part)) {
                return Ends::Followed(*end);
            }
        }
    }
    Ends::Named
}

fn reachable(grammar: &CGrammar) -> Vec<CSymIdx> {
    let mut seen = HashSet::from([grammar.start()]);
    let mut symbols = vec![grammar.start()];
    let mut at = 0;
    while let Some(&symbol) = symbols.get(at) {
        at += 1;
        for &part in parts(grammar, symbol).flatten() {
            if seen.insert(part) {
                symbols.push(part);
            }
        }
    }
    symbols
}

/// The right-hand sides of a symbol's rules.
fn parts(grammar: &CGrammar, symbol: CSymIdx) -> impl Iterator<Item = &[CSymIdx]> {
    grammar.rules_of(symbol).iter().map(|rule| grammar.rule_rhs(*rule).0)
}

fn may_be_empty(grammar: &CGrammar, symbol: CSymIdx) -> bool {
    let data = grammar.sym_data(symbol);
    data.is_nullable || !data.cond_nullable.is_empty()
}
