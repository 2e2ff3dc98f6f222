//! Output that obeys a grammar: JSON, JSON Schema, regular expressions, GBNF and Lark.
//!
//! There are three types, from the longest-lived to the shortest. A [`TokenTrie`] has the texts of
//! all tokens and is made once per tokenizer. A [`Grammar`] is compiled once and shared. A
//! [`Matcher`] follows one text: it computes the allowed next tokens, and accepts the chosen one.
//! It is a [`TokenMask`] for a sampler:
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use ruvllm::grammar::Grammar;
//! use ruvllm::{Model, Sampler, SamplerOptions};
//!
//! let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
//! let trie = model.token_trie()?;
//! let schema = r#"{
//!     "type": "object",
//!     "properties": {"borrows": {"enum": ["shared", "mutable"]}, "times": {"type": "integer", "minimum": 0, "maximum": 9}},
//!     "required": ["borrows", "times"],
//!     "additionalProperties": false
//! }"#;
//! let grammar = Grammar::json_schema(&trie, schema)?;
//!
//! let mut sampler = Sampler::new(SamplerOptions { seed: Some(1), ..Default::default() })?;
//! sampler.set_mask(Some(Box::new(grammar.matcher())));
//! let mut session = model.session()?;
//! // Valid JSON, unless the limit cuts it short.
//! let text = session.generate("As JSON: ", &mut sampler)?.max_tokens(100).text()?;
//! assert!(text.trim_start().starts_with('{'));
//! # Ok(()) }
//! ```
//!
//! The engine is `llguidance`: a lexer of regular-expression derivatives below an Earley parser,
//! walking the tree of all tokens. Masks are exact: a token is in the mask if and only if the text
//! with it can be continued to one that the grammar matches, however the text is split into tokens,
//! even inside characters. This module adds:
//!
//! - **Nothing is ignored.** A JSON Schema keyword that is not enforced is an error that names
//!   keyword and path (`schema`), except for annotations and names that are no keyword in any
//!   draft, which have no effect.
//! - **GBNF**, llama.cpp's grammar language, is translated (`gbnf`), and has the same meaning as
//!   there.
//! - **Limits.** A grammar may come from an untrusted source. Its length, its nesting, and the work
//!   and memory of compiling it and of each mask are bounded; exceeding a limit is an error.
//! - **The end.** Where the grammar may end, all tokens that end a generation are allowed; where it
//!   must end, only they are.
//!
//! Properties of JSON objects come in the order of the schema's `properties`, and between two JSON
//! tokens there is at most one space, so that a weak model cannot write blanks up to its limit.
//! Strings without `maxLength` and arrays without `maxItems` are unbounded; a number ends after 32
//! digits in a row, or two of an exponent, if it may end there.

mod digits;
mod error;
mod gbnf;
mod pattern;
mod schema;
#[cfg(feature = "chat")]
pub(crate) mod schema_parts;

pub use error::{GrammarError, Loosened};

use crate::sample::{MaskError, TokenMask};
use crate::system::HAS_THREADS;
use crate::tokenizer::Tokenizer;
use digits::DigitTokens;
use llguidance::api::{GrammarWithLexer, ParserLimits, StopReason, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenizerEnv,
};
use llguidance::{ParserFactory, panic_utils};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Longest grammar or schema, in bytes.
const MAX_SOURCE: usize = 256 << 10;
/// Deepest nesting of brackets in a grammar, or of schemas.
const MAX_DEPTH: usize = 64;
/// Longest compile time. On current machines the limits of the engine are reached long before.
const MAX_TIME: Duration = Duration::from_secs(5);
/// Stack size for compiling, as the compilers recurse where grammars nest. Only the part used takes
/// memory.
const STACK: usize = 64 << 20;
/// Longest text that is forced at once, in bytes. Longer ones, which may be endless, are left to
/// masks.
const MAX_FORCED: usize = 4096;
/// Token texts that addresses, names and codes allow all together or not at all, besides those
/// allowed in strings.
const WORDS: &str = "[a-zA-Z0-9]+";
/// Longest token that can be part of a matching text, in bytes. Longer ones are never allowed.
const MAX_TOKEN: usize = 1000;

/// Limits of compiling and of a mask, as counted work: a million units of fuel take 20 ms, a mask
/// ends after some 15 ms.
fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_items_in_row: 2_000,
        // About 1 kB each.
        max_lexer_states: 30_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Tree of the texts of all tokens of a tokenizer. Cloning is cheap.
#[derive(Clone)]
pub struct TokenTrie(Arc<Trie>);

struct Trie {
    factory: ParserFactory,
    /// Tokens that end a generation, in ascending order. The engine knows only the first.
    eog: Vec<u32>,
    /// `None` if numbers cannot be distinguished from texts.
    digits: Option<DigitTokens>,
}

impl fmt::Debug for TokenTrie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenTrie")
            .field("n_vocab", &self.n_vocab())
            .finish_non_exhaustive()
    }
}

/// The tree as the engine's tokenizer trait.
struct Env(TokTrie);

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, s: &[u8]) -> Vec<u32> {
        self.0.greedy_tokenize(s)
    }

    /// `false`, so that masks allow every way to split a forced text into tokens;
    /// [`TokenMask::forced`] returns the canonical one.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

impl Trie {
    fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        let mut eog: Vec<u32> = tokenizer.eog().collect();
        let end = tokenizer
            .eos()
            .filter(|&eos| tokenizer.is_eog(eos))
            .or(eog.first().copied());
        let end = end.ok_or(GrammarError::NoEnd)?;
        eog.retain(|&id| id != end);
        eog.insert(0, end);

        let n_vocab = tokenizer.n_vocab();
        let refused = |message: String| GrammarError::Vocabulary { n_vocab, message };
        let info = TokRxInfo::new(
            u32::try_from(n_vocab).map_err(|e| refused(e.to_string()))?,
            end,
        );
        let special = TokTrie::SPECIAL_TOKEN_MARKER;
        let words: Vec<Vec<u8>> = (0..info.vocab_size)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id).unwrap_or_default();
                if bytes.len() > MAX_TOKEN {
                    Vec::new()
                } else if tokenizer.is_control(id)
                    || eog.contains(&id)
                    || tokenizer.unknown() == Some(id)
                {
                    [&[special], tokenizer.token_text(id).unwrap_or_default()].concat()
                } else if bytes.first() == Some(&special) {
                    // No UTF-8 text contains this byte; in the tree it marks special tokens.
                    Vec::new()
                } else {
                    bytes
                }
            })
            .collect();
        let factory = panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let env: TokEnv = Arc::new(Env(TokTrie::from(&info, &words)));
            let slices = SlicedBiasComputer::general_slices()
                .into_iter()
                .chain([WORDS.to_owned()]);
            ParserFactory::new(
                &env,
                InferenceCapabilities::default(),
                &slices.collect::<Vec<_>>(),
            )
        }));
        let mut factory = factory.map_err(|e| refused(first_line(&format!("{e:#}"))))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        let digits = DigitTokens::of(factory.tok_env().tok_trie());
        Ok(Self {
            factory,
            eog,
            digits,
        })
    }
}

impl TokenTrie {
    /// Builds the tree of `tokenizer`'s tokens, which takes a second for a vocabulary of 262,144.
    /// [`Model::token_trie`](crate::Model::token_trie) keeps it.
    ///
    /// Control tokens are no text: a grammar matches them only where it names them, which in Lark
    /// is `<name>` or `<[id]>`.
    ///
    /// # Errors
    /// [`GrammarError::NoEnd`] when no token ends a generation, [`GrammarError::Vocabulary`] when
    /// the engine refuses the vocabulary.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        Ok(Self(Arc::new(Trie::new(tokenizer)?)))
    }

    /// Number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.tree().vocab_size()
    }

    /// The text of a token, including special tokens; empty if it cannot be part of a text.
    #[cfg(feature = "chat")]
    pub(crate) fn text(&self, token: u32) -> &[u8] {
        let bytes = self.tree().token(token);
        bytes
            .strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER])
            .unwrap_or(bytes)
    }

    /// The special token with this text.
    #[cfg(feature = "chat")]
    pub(crate) fn special(&self, text: &str) -> Option<u32> {
        self.tree().get_special_token(text)
    }

    /// Some tokenisation of `text`.
    #[cfg(feature = "chat")]
    pub(crate) fn cut(&self, text: &[u8]) -> Vec<u32> {
        self.tree().greedy_tokenize(text)
    }

    /// Tokens that end a generation.
    #[cfg(feature = "chat")]
    pub(crate) fn eog(&self) -> &[u32] {
        &self.0.eog
    }

    /// Whether a token ends a generation.
    #[cfg(feature = "chat")]
    pub(crate) fn is_eog(&self, token: u32) -> bool {
        self.0.eog.contains(&token)
    }

    fn tree(&self) -> &TokTrie {
        self.0.factory.tok_env().tok_trie()
    }
}

/// The language a grammar is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Syntax {
    /// JSON Schema; drafts 4 to 2020-12.
    JsonSchema,
    /// A regular expression that matches the whole text, in the syntax of the crate `regex`,
    /// without assertions.
    Regex,
    /// GBNF, llama.cpp's grammar language.
    Gbnf,
    /// llguidance's dialect of Lark: rules, terminals as strings and regular expressions, `%json
    /// {…}`.
    Lark,
}

impl Syntax {
    /// Name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Syntax::JsonSchema => "JSON Schema",
            Syntax::Regex => "regular expression",
            Syntax::Gbnf => "GBNF grammar",
            Syntax::Lark => "Lark grammar",
        }
    }
}

impl fmt::Display for Syntax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A grammar over the tokens of a [`TokenTrie`]. Cloning is cheap, and all matchers share the
/// states that they compute.
#[derive(Clone)]
pub struct Grammar {
    trie: TokenTrie,
    /// State at the start of the text.
    start: Arc<llguidance::Matcher>,
    loosened: Arc<[Loosened]>,
    /// Whether it is a schema's: then numbers have to end.
    ends_numbers: bool,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar")
            .field("trie", &self.trie)
            .finish_non_exhaustive()
    }
}

impl Grammar {
    /// A grammar of any JSON object, known as JSON mode.
    ///
    /// # Errors
    /// As [`Grammar::new`].
    pub fn json(trie: &TokenTrie) -> Result<Self, GrammarError> {
        Self::json_schema(trie, r#"{"type": "object"}"#)
    }

    /// A grammar of the JSON values that a schema describes.
    ///
    /// # Errors
    /// As [`Grammar::new`]; [`GrammarError::Keyword`] for keywords that cannot be enforced.
    pub fn json_schema(trie: &TokenTrie, schema: &str) -> Result<Self, GrammarError> {
        Self::new(trie, Syntax::JsonSchema, schema)
    }

    /// A grammar of JSON values that a schema describes, as far as it can be enforced:
    /// [`Grammar::loosened`] says what is not.
    ///
    /// # Errors
    /// As [`Grammar::new`], but not for keywords.
    pub fn lenient_json_schema(trie: &TokenTrie, schema: &str) -> Result<Self, GrammarError> {
        let lenient = Source::Schema(Strictness::Lenient);
        Self::of_source(trie, lenient, schema)
    }

    /// A grammar of the texts that a regular expression matches as a whole.
    ///
    /// # Errors
    /// As [`Grammar::new`].
    pub fn regex(trie: &TokenTrie, regex: &str) -> Result<Self, GrammarError> {
        Self::new(trie, Syntax::Regex, regex)
    }

    /// A GBNF grammar, which matches the texts of its rule `root`.
    ///
    /// # Errors
    /// As [`Grammar::new`].
    pub fn gbnf(trie: &TokenTrie, grammar: &str) -> Result<Self, GrammarError> {
        Self::new(trie, Syntax::Gbnf, grammar)
    }

    /// A Lark grammar, which matches the texts of its rule `start`.
    ///
    /// # Errors
    /// As [`Grammar::new`].
    pub fn lark(trie: &TokenTrie, grammar: &str) -> Result<Self, GrammarError> {
        Self::new(trie, Syntax::Lark, grammar)
    }

    /// Compiles `source`.
    ///
    /// # Errors
    /// [`GrammarError::TooLong`], [`GrammarError::TooDeep`] and [`GrammarError::OutOfTime`] at the
    /// limits, [`GrammarError::Invalid`] with the compiler's message, which includes its limits
    /// of work and memory, [`GrammarError::Keyword`] for schema keywords that cannot be
    /// enforced.
    pub fn new(trie: &TokenTrie, syntax: Syntax, source: &str) -> Result<Self, GrammarError> {
        Self::of_source(trie, syntax.into(), source)
    }

    /// A Lark grammar of tool calls, with JSON in the layout of chat templates.
    #[cfg(feature = "chat")]
    pub(crate) fn calls(trie: &TokenTrie, grammar: &str) -> Result<Self, GrammarError> {
        Self::of_source(trie, Source::Calls, grammar)
    }

    /// Parts of a JSON Schema that the grammar does not enforce.
    pub fn loosened(&self) -> &[Loosened] {
        &self.loosened
    }

    fn of_source(trie: &TokenTrie, of: Source, source: &str) -> Result<Self, GrammarError> {
        let limit = of.max_len();
        if source.len() > limit {
            let len = source.len();
            return Err(GrammarError::TooLong { len, limit });
        }
        let syntax = of.syntax();
        let (job_trie, source) = (trie.clone(), source.to_owned());
        let compiled = in_time(syntax, move || compile(&job_trie, of, &source))?;
        Ok(Self {
            trie: trie.clone(),
            start: Arc::new(compiled.0),
            loosened: compiled.1.into(),
            ends_numbers: matches!(of, Source::Schema(_) | Source::Calls),
        })
    }

    /// A matcher at the start of a text.
    pub fn matcher(&self) -> Matcher {
        let (inner, grammar) = ((*self.start).clone(), self.clone());
        Matcher {
            inner,
            grammar,
            mask: None,
            tokens: Vec::new(),
            n_ends: 0,
            forces: true,
        }
    }
}

/// Language and purpose of a grammar.
#[derive(Clone, Copy)]
enum Source {
    Schema(Strictness),
    Regex,
    Gbnf,
    Lark,
    /// Lark with JSON in the layout of chat templates.
    #[cfg_attr(not(feature = "chat"), expect(dead_code))]
    Calls,
}

impl From<Syntax> for Source {
    fn from(syntax: Syntax) -> Self {
        match syntax {
            Syntax::JsonSchema => Source::Schema(Strictness::Strict),
            Syntax::Regex => Source::Regex,
            Syntax::Gbnf => Source::Gbnf,
            Syntax::Lark => Source::Lark,
        }
    }
}

impl Source {
    fn syntax(self) -> Syntax {
        match self {
            Source::Schema(_) => Syntax::JsonSchema,
            Source::Regex => Syntax::Regex,
            Source::Gbnf => Syntax::Gbnf,
            Source::Lark | Source::Calls => Syntax::Lark,
        }
    }

    /// Greatest length in bytes. Most of a schema may be descriptions.
    fn max_len(self) -> usize {
        match self {
            Source::Schema(_) => 4 * MAX_SOURCE,
            _ => MAX_SOURCE,
        }
    }
}

/// Result of `work` on a thread with a large stack; the thread is abandoned if it takes too long.
/// Without threads it works here, as long as it takes.
fn in_time<T: Send + 'static>(
    syntax: Syntax,
    work: impl FnOnce() -> Result<T, GrammarError> + Send + 'static,
) -> Result<T, GrammarError> {
    if !HAS_THREADS {
        return work();
    }
    let (send, receive) = sync_channel(1);
    let failed = |message: String| GrammarError::Invalid {
        syntax: syntax.name(),
        message,
    };
    std::thread::Builder::new()
        .name("grammar".into())
        .stack_size(STACK)
        // The result of an abandoned thread is dropped.
        .spawn(move || drop(send.send(work())))
        .map_err(|e| failed(format!("no thread to compile it: {e}")))?;
    match receive.recv_timeout(MAX_TIME) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => Err(GrammarError::OutOfTime {
            seconds: MAX_TIME.as_secs(),
        }),
        Err(RecvTimeoutError::Disconnected) => Err(failed("its compiler panicked".into())),
    }
}

/// Handling of the parts of a JSON Schema that a grammar cannot enforce.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strictness {
    /// A keyword that cannot be enforced is an error.
    Strict,
    /// A keyword that cannot be enforced is left out and [named](Grammar::loosened), so that the
    /// grammar accepts more than the schema. Objects that list properties and say nothing of others
    /// have only those that are listed, as small models do not end otherwise.
    Lenient,
}

/// Layout of JSON.
#[derive(Clone, Copy)]
enum Layout {
    /// At most one space wherever JSON allows white space.
    Free,
    /// One space after commas and colons, none elsewhere: the layout of calls in chat templates, so
    /// that it is forced.
    Template,
}

fn compile(
    trie: &TokenTrie,
    of: Source,
    source: &str,
) -> Result<(llguidance::Matcher, Vec<Loosened>), GrammarError> {
    let syntax = of.syntax();
    let lark = match of {
        Source::Schema(strictness) => {
            let value = schema::parse(source)?;
            let build = |schema| build(trie, syntax, from_schema(schema));
            let enforced = schema::compile(&value, strictness, Layout::Free, build)?;
            return Ok((enforced.built, enforced.loosened));
        }
        Source::Regex => {
            check_depth(source, "([", ")]", true)?;
            let regex = llguidance::regex_to_lark(source, "");
            format!("start: /{regex}/")
        }
        Source::Gbnf => gbnf::to_lark(source, trie.tree())?,
        Source::Lark | Source::Calls => {
            check_depth(source, "([{", ")]}", true)?;
            let layout = match of {
                Source::Calls => Layout::Template,
                _ => Layout::Free,
            };
            schema::check_in_lark(source, layout)?
        }
    };
    Ok((build(trie, syntax, from_lark(lark))?, Vec::new()))
}

fn from_lark(lark: String) -> GrammarWithLexer {
    GrammarWithLexer {
        lark_grammar: Some(lark),
        ..Default::default()
    }
}

fn from_schema(schema: serde_json::Value) -> GrammarWithLexer {
    GrammarWithLexer {
        json_schema: Some(schema),
        ..Default::default()
    }
}

fn build(
    trie: &TokenTrie,
    syntax: Syntax,
    grammar: GrammarWithLexer,
) -> Result<llguidance::Matcher, GrammarError> {
    let failed = |message| GrammarError::Invalid {
        syntax: syntax.name(),
        message,
    };
    let parser = trie
        .0
        .factory
        .create_parser(TopLevelGrammar::from_grammar(grammar));
    let parser = parser.map_err(|e| failed(first_line(&format!("{e:#}"))))?;
    let matcher = llguidance::Matcher::new(Ok(parser));
    match matcher.get_error() {
        Some(e) => Err(failed(e)),
        None => Ok(matcher),
    }
}

/// The first line of the engine's message, without the states and source lines that may follow.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

/// Refuses brackets that nest too deep for recursive parsers. With `escapes`, brackets after `\`
/// are not counted.
fn check_depth(source: &str, open: &str, close: &str, escapes: bool) -> Result<(), GrammarError> {
    let mut depth = 0usize;
    let mut chars = source.chars();
    while let Some(c) = chars.next() {
        if escapes && c == '\\' {
            chars.next();
        } else if open.contains(c) {
            depth += 1;
        } else if close.contains(c) {
            depth = depth.saturating_sub(1);
        }
        // Unclosed brackets in strings are counted, too: hence the margin.
        if depth > 4 * MAX_DEPTH {
            return Err(GrammarError::TooDeep {
                limit: 4 * MAX_DEPTH,
            });
        }
    }
    Ok(())
}

/// Follows one text through a [`Grammar`]. A clone is independent.
#[derive(Clone)]
pub struct Matcher {
    grammar: Grammar,
    inner: llguidance::Matcher,
    /// The mask at this position, once it was computed.
    mask: Option<SimpleVob>,
    /// Accepted tokens, except those that end the text.
    tokens: Vec<u32>,
    /// Number of accepted tokens that end the text.
    n_ends: usize,
    /// Whether the engine is asked for forced text.
    forces: bool,
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n_tokens = self.tokens.len() + self.n_ends;
        f.debug_struct("Matcher")
            .field("n_tokens", &n_tokens)
            .finish_non_exhaustive()
    }
}

impl Matcher {
    /// Whether the grammar matches the text so far: it may end here.
    ///
    /// # Errors
    /// [`MaskError::TooComplex`].
    pub fn is_accepting(&mut self) -> Result<bool, MaskError> {
        Ok(
            self.n_ends > 0 || self.inner.is_stopped() && self.inner.stop_reason().is_ok() || {
                let accepting = self.inner.is_accepting();
                accepting.map_err(|e| self.failed(&e))?
            },
        )
    }

    /// Whether the text is complete: only its end can follow.
    pub fn is_finished(&self) -> bool {
        self.n_ends > 0 || self.inner.is_stopped() && self.inner.stop_reason().is_ok()
    }

    /// The error for a failure of the engine.
    fn failed(&self, error: &impl fmt::Display) -> MaskError {
        let n_tokens = self.tokens.len();
        match self.inner.stop_reason() {
            StopReason::NoExtension | StopReason::NoExtensionBias => {
                MaskError::NothingAllowed { n_tokens }
            }
            _ => MaskError::TooComplex {
                n_tokens,
                limit: first_line(&error.to_string()),
            },
        }
    }

    fn compute(&mut self) -> Result<SimpleVob, MaskError> {
        let eog = &self.grammar.trie.0.eog;
        let mut mask = if self.is_finished() {
            self.grammar.trie.tree().eos_token_set()
        } else {
            match self.inner.compute_mask() {
                Ok(mask) => mask,
                // The engine reports a mask without tokens only in its message.
                Err(e) if format!("{e}").contains("NoExtension") => {
                    return Err(MaskError::NothingAllowed {
                        n_tokens: self.tokens.len(),
                    });
                }
                Err(e) => return Err(self.failed(&e)),
            }
        };
        if let Some(digits) = self.digits() {
            digits.end_number(self.grammar.trie.tree(), &self.tokens, &mut mask);
        }
        if mask.is_allowed(eog[0]) {
            eog.iter().for_each(|&id| mask.allow_token(id));
        }
        Ok(mask)
    }

    /// Tokens that end long numbers.
    fn digits(&self) -> Option<&DigitTokens> {
        let digits = self.grammar.trie.0.digits.as_ref();
        digits.filter(|_| self.grammar.ends_numbers)
    }
}

/// Number of `tokens` from the start that match `text` and, if its end is `open`, stay the same
/// whatever follows: those before the first position from which the text is a prefix of a longer
/// token.
fn settled(tree: &TokTrie, tokens: &[u32], text: &[u8], open: bool) -> usize {
    let mut at = 0;
    for (i, &token) in tokens.iter().enumerate() {
        let bytes = tree.token(token);
        // Not all tokenizers can represent incomplete characters.
        let is_text = !bytes.is_empty() && text[at..].starts_with(bytes);
        let end = at + bytes.len();
        if !is_text || open && (at..end).any(|from| tree.has_extensions(&text[from..])) {
            return i;
        }
        at = end;
    }
    tokens.len()
}

/// The special token at the start of a forced text, after its marker by id or by name, and its
/// length there.
fn special(tree: &TokTrie, text: &[u8]) -> Option<(u32, usize)> {
    if let Some((len, token)) = llguidance::toktrie::parse_numeric_token(&text[1..]) {
        return Some((token, 1 + len));
    }
    let len = text.iter().position(|&b| b == b'>')? + 1;
    Some((tree.token_id_at_bytes(&text[..len])?, len))
}

impl TokenMask for Matcher {
    fn mask(&mut self) -> Result<&[u32], MaskError> {
        if self.mask.is_none() {
            self.mask = Some(self.compute()?);
        }
        Ok(self.mask.as_ref().map_or(&[], SimpleVob::as_slice))
    }

    fn allows(&mut self, token: u32) -> Result<bool, MaskError> {
        if token as usize >= self.grammar.trie.n_vocab() {
            return Ok(false);
        }
        let may_end =
            |digits: &DigitTokens| digits.may_end(self.grammar.trie.tree(), &self.tokens, token);
        let is_end = self.grammar.trie.0.eog.contains(&token);
        if is_end || self.mask.is_some() || self.digits().is_some_and(may_end) {
            self.mask()?;
            return Ok(self
                .mask
                .as_ref()
                .is_some_and(|mask| mask.is_allowed(token)));
        }
        if self.is_finished() {
            return Ok(false);
        }
        let n = self.inner.validate_tokens(&[token]);
        n.map(|n| n == 1).map_err(|e| self.failed(&e))
    }

    /// The last tokens of a forced text are left out if they might merge with the text that
    /// follows. If only the end can follow, returns a token that ends the text.
    fn forced(&mut self, encode: &dyn Fn(&[u8]) -> Vec<u32>) -> Vec<u32> {
        if self.is_finished() {
            return vec![self.grammar.trie.0.eog[0]];
        }
        if !self.forces {
            return Vec::new();
        }
        let bytes = self.inner.compute_ff_bytes();
        if bytes.len() > MAX_FORCED {
            // The engine may have reached its limits on the way: starts again.
            self.forces = false;
            self.inner = (*self.grammar.start).clone();
            // An error will be reported again with the next mask.
            let _ = self.inner.consume_tokens(&self.tokens);
            return Vec::new();
        }
        let tree = self.grammar.trie.tree();
        let marker = TokTrie::SPECIAL_TOKEN_MARKER;
        let mut tokens = Vec::new();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let text = &rest[..rest.iter().position(|&b| b == marker).unwrap_or(rest.len())];
            rest = &rest[text.len()..];
            if !text.is_empty() {
                let found = encode(text);
                let kept = settled(tree, &found, text, rest.is_empty());
                tokens.extend(&found[..kept]);
                if kept < found.len() {
                    break;
                }
            }
            if !rest.is_empty() {
                match special(tree, rest) {
                    Some((token, len)) => {
                        tokens.push(token);
                        rest = &rest[len..];
                    }
                    None => break,
                }
            }
        }
        tokens
    }

    fn accept(&mut self, token: u32) -> Result<(), MaskError> {
        if !self.allows(token)? {
            return Err(MaskError::Refused {
                token,
                n_tokens: self.tokens.len() + self.n_ends,
            });
        }
        if self.grammar.trie.0.eog.contains(&token) && self.is_accepting()? {
            self.n_ends += 1;
            // From here on only the end is allowed.
            self.mask = None;
            return Ok(());
        }
        self.mask = None;
        let taken = self.inner.consume_token(token);
        taken.map_err(|e| self.failed(&e))?;
        self.tokens.push(token);
        Ok(())
    }

    fn rollback(&mut self, n: usize) -> Result<(), MaskError> {
        let n_tokens = self.tokens.len() + self.n_ends;
        if n > n_tokens {
            return Err(MaskError::Rollback { n, n_tokens });
        }
        if n == 0 {
            return Ok(());
        }
        self.mask = None;
        let ends = n.min(self.n_ends);
        self.n_ends -= ends;
        if n > ends {
            self.inner.rollback(n - ends).map_err(|e| self.failed(&e))?;
            self.tokens.truncate(n_tokens - n);
        }
        Ok(())
    }

    fn reset(&mut self) {
        *self = self.grammar.matcher();
    }

    fn boxed_clone(&self) -> Box<dyn TokenMask> {
        Box::new(self.clone())
    }
}
