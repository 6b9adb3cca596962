//! From the text of a grammar to what matchers start from, once for all that have the same text.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use drafthorse_control::Grammar;
use llguidance::ParserFactory;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokRxInfo, TokTrie};
use serde_json::{Value, json};

use super::ends::{Ends, ends_of};
use super::tokens::TokenBytes;
use super::{lark, place};

/// Longest text of a grammar.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;

/// Compiled grammars that are kept though nobody uses them.
const NUM_KEPT: usize = 64;

/// White space between the parts of a JSON text where a schema does not say: enough for a line break and deep indentation, and an
/// end to it, for small models like to go on.
pub const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,40}";

/// In the compiler's word for a place where no token can come.
const NOTHING_FOLLOWS: &str = "NoExtension";

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
    ends: Ends,
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
        let bad = |error: &dyn fmt::Display| GrammarError::Bad { reason: shortened(tidy(&error.to_string())) };
        let parser = factory.create_parser(parsed).map_err(|error| {
            let whole = format!("{error:#}");
            let reason = match grammar {
                Grammar::JsonSchema(text) => match place::of_error(factory, text, &error) {
                    Some(place) => format!("at {place}: {}", tidy(&whole)),
                    None => tidy(&whole),
                },
                Grammar::Regex(_) => tidy(&whole),
                Grammar::Lark(text) => lark::told(text, &whole),
            };
            GrammarError::Bad { reason: shortened(reason) }
        })?;
        let end_tokens = self.tokens.end_tokens();
        let vocab_size = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
        let ends = ends_of(parser.parser.grammar(), end_tokens, vocab_size);
        if let Ends::Followed(end) = ends {
            return Err(self.ends_too_early(text, end));
        }
        let mut fresh = llguidance::Matcher::new(Ok(parser));
        // What can match nothing is found now, not when a slot is taken.
        let may_end = fresh.is_accepting().map_err(|error| bad(&error))?;
        let nothing = "no text of this vocabulary matches it";
        match fresh.compute_mask() {
            Ok(mask) if mask.is_zero() && !may_end => return Err(bad(&nothing)),
            Err(error) if !may_end && error.to_string().contains(NOTHING_FOLLOWS) => return Err(bad(&nothing)),
            Err(error) if !may_end => return Err(bad(&error)),
            _ => {}
        }
        Ok(Compiled { fresh: Mutex::new(fresh), end_tokens: end_tokens.to_vec(), ends })
    }

    /// What is said of an end token that something has to follow.
    fn ends_too_early(&self, text: &str, end: u32) -> GrammarError {
        let name = self.tokens.words().get(end as usize).and_then(|word| word.get(1..)).unwrap_or_default();
        let name = String::from_utf8_lossy(name);
        let at = lark::find(text, 0, &name).or_else(|| lark::find(text, 0, &format!("<[{end}]>")));
        let place = at.map(|at| format!("{}: ", lark::place(text, at))).unwrap_or_default();
        GrammarError::Bad {
            reason: format!("{place}{name} ends the answer, so nothing can follow it, but the grammar wants more"),
        }
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

    /// Whether end tokens may come where its text may not end, without being meant.
    pub(super) fn ends_among_others(&self) -> bool {
        self.ends == Ends::AmongOthers
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
    if let Some(fault) = regex_fault(reason, 0) {
        return fault;
    }
    let line = reason.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    line.strip_prefix("at ").unwrap_or(line).to_owned()
}

/// What is wrong with a regular expression, and where in it, counted without the `skipped` first characters.
pub(super) fn regex_fault(reason: &str, skipped: usize) -> Option<String> {
    let (_, parsing) = reason.split_once("regex parse error:")?;
    let fault = parsing.lines().find_map(|line| line.strip_prefix("error: "))?;
    let caret = parsing.lines().find(|line| line.trim_start().starts_with('^'))?;
    // The expression stands above the caret, four columns in.
    let column = caret.find('^').unwrap_or_default().saturating_sub(3 + skipped);
    Some(format!("character {column} of the regular expression: {fault}"))
}

fn shortened(mut text: String) -> String {
    const MAX: usize = 400;
    if let Some((end, _)) = text.char_indices().nth(MAX) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}
