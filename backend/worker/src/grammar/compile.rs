//! From the text of a grammar to what matchers start from, once for all that have the same text.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use drafthorse_control::Grammar;
use llguidance::ParserFactory;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokRxInfo, TokTrie};
use serde_json::{Value, json};

use super::place;
use super::tokens::TokenBytes;

/// Longest text of a grammar.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;

/// Compiled grammars that are kept though nobody uses them.
const NUM_KEPT: usize = 64;

/// White space between the parts of a JSON text where a schema does not say: enough for a line break and deep indentation, and an
/// end to it, for small models like to go on.
pub const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,40}";

/// Bounds on what one grammar may cost; a unit of fuel is about 20 ns of compiling and 70 ns of filling a mask.
fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 2_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 50_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Why a grammar cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    #[error("has {bytes} bytes, at most {max} may be given")]
    TooLong { bytes: usize, max: usize },
    #[error("is not valid JSON at line {line} column {column}: {reason}")]
    Json { line: usize, column: usize, reason: String },
    /// What the compiler says, with the place where it knows one.
    #[error("{reason}")]
    Bad { reason: String },
    /// The table of tokens itself does not do.
    #[error("the vocabulary is of no use for grammars: {reason}")]
    Vocabulary { reason: String },
}

/// Compiles grammars for one vocabulary and remembers them.
pub struct Grammars {
    tokens: TokenBytes,
    /// Made for the first grammar: many models never see one.
    factory: OnceLock<Result<ParserFactory, String>>,
    cache: Mutex<Cache>,
}

#[derive(Default)]
struct Cache {
    /// All that somebody holds, or that is kept.
    compiled: HashMap<Grammar, Weak<Compiled>>,
    /// The last used ones, the latest at the back.
    kept: VecDeque<Arc<Compiled>>,
}

/// A grammar, ready for a sequence.
pub struct Compiled {
    /// Never fed: a sequence starts with a copy that shares nothing, so that no sequence's limits depend on others.
    fresh: Mutex<llguidance::Matcher>,
    end_tokens: Vec<u32>,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grammars({} tokens)", self.tokens.len())
    }
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compiled")
    }
}

impl Grammars {
    pub fn new(tokens: TokenBytes) -> Self {
        Grammars { tokens, factory: OnceLock::new(), cache: Mutex::default() }
    }

    /// The grammar compiled, now or earlier. Takes up to a few hundred milliseconds of this thread, more for the first one.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn compile(&self, grammar: &Grammar) -> Result<Arc<Compiled>, GrammarError> {
        if let Some(known) = self.known(grammar) {
            return Ok(known);
        }
        let compiled = Arc::new(self.compile_now(grammar)?);
        let mut cache = self.cache();
        cache.compiled.insert(grammar.clone(), Arc::downgrade(&compiled));
        cache.keep(Arc::clone(&compiled));
        Ok(compiled)
    }

    /// The grammar, if it was compiled before.
    pub fn known(&self, grammar: &Grammar) -> Option<Arc<Compiled>> {
        let mut cache = self.cache();
        let known = cache.compiled.get(grammar)?.upgrade()?;
        cache.keep(Arc::clone(&known));
        Some(known)
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn compile_now(&self, grammar: &Grammar) -> Result<Compiled, GrammarError> {
        let (Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text)) = grammar;
        if text.len() > MAX_GRAMMAR_BYTES {
            return Err(GrammarError::TooLong { bytes: text.len(), max: MAX_GRAMMAR_BYTES });
        }
        let parsed = match grammar {
            Grammar::JsonSchema(text) => TopLevelGrammar::from_json_schema(schema(text)?),
            Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
            Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        };
        let factory = self.factory.get_or_init(|| factory(&self.tokens).map_err(|error| error.to_string()));
        let factory = factory.as_ref().map_err(|reason| GrammarError::Vocabulary { reason: reason.clone() })?;
        let bad = |error: &dyn fmt::Display| GrammarError::Bad { reason: tidy(&error.to_string()) };
        let parser = factory.create_parser(parsed).map_err(|error| {
            let reason = tidy(&format!("{error:#}"));
            let place = match grammar {
                Grammar::JsonSchema(text) => place::of_error(factory, text, &error),
                Grammar::Regex(_) | Grammar::Lark(_) => None,
            };
            GrammarError::Bad { reason: place.map_or(reason.clone(), |place| format!("at {place}: {reason}")) }
        })?;
        let mut fresh = llguidance::Matcher::new(Ok(parser));
        // What can match nothing is found now, not when a slot is taken.
        let may_end = fresh.is_accepting().map_err(|error| bad(&error))?;
        match fresh.compute_mask() {
            Err(error) if !may_end => return Err(bad(&format_args!("matches no text of this vocabulary: {error}"))),
            _ => {}
        }
        Ok(Compiled { fresh: Mutex::new(fresh), end_tokens: self.tokens.end_tokens().to_vec() })
    }
}

impl Cache {
    /// Makes `used` the last one to be dropped.
    fn keep(&mut self, used: Arc<Compiled>) {
        self.kept.retain(|kept| !Arc::ptr_eq(kept, &used));
        self.kept.push_back(used);
        if self.kept.len() > NUM_KEPT {
            self.kept.pop_front();
            self.compiled.retain(|_, compiled| compiled.strong_count() > 0);
        }
    }
}

impl Compiled {
    /// A matcher before its first token.
    pub(super) fn start(&self) -> llguidance::Matcher {
        self.fresh.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()
    }

    pub(super) fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }
}

/// A schema's text as JSON, with our white space where it has no word on it.
fn schema(text: &str) -> Result<Value, GrammarError> {
    let mut schema: Value = serde_json::from_str(text).map_err(|error| {
        let reason = error.to_string();
        let reason = reason.rsplit_once(" at line ").map_or(reason.as_str(), |(reason, _)| reason).to_owned();
        GrammarError::Json { line: error.line(), column: error.column(), reason }
    })?;
    if schema == true {
        schema = json!({});
    }
    let Value::Object(keys) = &mut schema else {
        return Err(GrammarError::Bad { reason: "must be a JSON schema: an object, or true".into() });
    };
    if !keys.contains_key("x-guidance") {
        keys.insert("x-guidance".into(), json!({"whitespace_pattern": WHITESPACE}));
    }
    Ok(schema)
}

fn factory(tokens: &TokenBytes) -> Result<ParserFactory, Box<dyn std::error::Error + Send + Sync>> {
    let vocab_size = u32::try_from(tokens.len())?;
    let known = tokens.end_tokens().iter().copied().filter(|&token| token < vocab_size);
    let end_tokens: Vec<u32> = known.collect();
    let first_end = end_tokens.first().copied().unwrap_or(INVALID_TOKEN);
    let mut trie = TokTrie::from(&TokRxInfo::new(vocab_size, first_end), tokens.words());
    if !end_tokens.is_empty() {
        trie = trie.with_eos_tokens(&end_tokens);
    }
    // The bytes of tokens are known and nothing of how text is cut into them: the model chooses among all ways.
    let env = Arc::new(ApproximateTokEnv::new(trie));
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    let mut factory = ParserFactory::new(&(env as _), InferenceCapabilities::default(), &slices)?;
    factory.quiet();
    *factory.limits_mut() = limits();
    Ok(factory)
}

/// What the compiler says, in one line, with the place as a reader counts it.
fn tidy(reason: &str) -> String {
    if let Some((_, parsing)) = reason.split_once("regex parse error:")
        && let Some(fault) = parsing.lines().find_map(|line| line.strip_prefix("error: "))
        && let Some(caret) = parsing.lines().find(|line| line.trim_start().starts_with('^'))
    {
        // The expression stands above the caret, four columns in.
        let column = caret.find('^').unwrap_or_default().saturating_sub(3);
        return format!("character {column} of the regular expression: {fault}");
    }
    const MAX: usize = 400;
    let line = reason.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let line = line.strip_prefix("at ").unwrap_or(line);
    let mut text = match place_in_lark(line) {
        Some((row, column, rest)) => format!("line {row} column {column}: {rest}"),
        None => line.to_owned(),
    };
    if let Some((end, _)) = text.char_indices().nth(MAX) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}

/// `3(7): what is wrong`, in its parts.
fn place_in_lark(line: &str) -> Option<(u32, u32, &str)> {
    let (row, rest) = line.split_once('(')?;
    let (column, rest) = rest.split_once("): ")?;
    Some((row.parse().ok()?, column.parse().ok()?, rest))
}
