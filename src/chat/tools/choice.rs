//! Enforcing valid calls: a mask that lets the model write freely until it begins a call.

use crate::chat::ChatError;
use crate::chat::tools::enforce::grammar_of_calls;
use crate::chat::tools::{
    Format, LoosenedTool, Opening, Tool, ToolFormat, ends_in_reasoning, lark_marker, lark_text,
};
use crate::grammar::{Grammar, Matcher, TokenTrie};
use crate::sample::{MaskError, TokenMask};
use serde_json::Value;
use std::collections::HashSet;
use std::sync::Arc;

/// Maximum bytes of white space after reasoning.
const MAX_WHITE: usize = 20;
/// White space before and between calls.
const WHITE: &str = "WHITE: /[ \\t\\r\\n]{0,20}/\n";

/// Whether the model may or must call tools.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ToolChoice {
    /// Calls are allowed.
    Auto,
    /// Calls are forbidden.
    None,
    /// Calls, at least one, and nothing else, but after reasoning that has already begun.
    Required,
    /// Calls of this tool, otherwise like `Required`.
    Named(String),
    /// Calls of these tools alone.
    Allowed {
        /// The names of the tools.
        names: Vec<String>,
        /// Whether they are required, as in `Required`; otherwise they are allowed, as in `Auto`.
        required: bool,
    },
}

impl ToolChoice {
    /// The `tool_choice` of the OpenAI API: `"auto"`, `"none"`, `"required"`,
    /// `{"type": "function", "function": {"name": …}}` or `{"type": "allowed_tools", "allowed_tools":
    /// {"mode": "auto", "tools": […]}}`; what is in the inner objects may be in the outer one.
    ///
    /// # Errors
    /// [`ChatError::Tool`] for anything else.
    pub fn from_json(choice: &Value) -> Result<Self, ChatError> {
        match choice.as_str() {
            Some("auto") => Ok(Self::Auto),
            Some("none") => Ok(Self::None),
            Some("required") => Ok(Self::Required),
            _ => Self::from_object(choice).ok_or_else(|| ChatError::Tool {
                index: 0,
                message: format!(
                    "the tool choice {choice} is none of auto, none, required, a function and \
                     allowed_tools with a mode"
                ),
            }),
        }
    }

    fn from_object(choice: &Value) -> Option<Self> {
        let name_of = |tool: &Value| {
            let function = tool.get("function").unwrap_or(tool);
            Some(function.get("name")?.as_str()?.to_owned())
        };
        if choice.get("type")? != "allowed_tools" {
            return Some(Self::Named(name_of(choice)?));
        }
        let allowed = choice.get("allowed_tools").unwrap_or(choice);
        let tools = allowed.get("tools")?.as_array()?;
        Some(Self::Allowed {
            names: tools.iter().map(name_of).collect::<Option<_>>()?,
            required: match allowed.get("mode")?.as_str()? {
                "auto" => false,
                "required" => true,
                _ => return None,
            },
        })
    }

    /// Whether an answer has to be calls.
    pub fn is_required(&self) -> bool {
        match self {
            Self::Auto | Self::None => false,
            Self::Required | Self::Named(_) => true,
            Self::Allowed { required, .. } => *required,
        }
    }

    /// The tools of `tools` that may be called.
    ///
    /// # Errors
    /// [`ChatError::Tool`] for a tool that is not among them, or if a call is required, and none
    /// may be called.
    pub fn allowed(&self, tools: &[Tool]) -> Result<Vec<Tool>, ChatError> {
        let wrong = |message: String| ChatError::Tool { index: 0, message };
        let known: HashSet<&str> = tools.iter().map(|tool| &tool.name[..]).collect();
        let names: HashSet<&str> = match self {
            Self::None => HashSet::new(),
            Self::Auto | Self::Required => known.clone(),
            Self::Named(name) => HashSet::from([&name[..]]),
            Self::Allowed { names, .. } => names.iter().map(|name| &name[..]).collect(),
        };
        if let Some(name) = names.difference(&known).next() {
            return Err(wrong(format!("there is no tool {name:?}")));
        }
        let is_allowed = |tool: &&Tool| names.contains(&tool.name[..]);
        let allowed: Vec<Tool> = tools.iter().filter(is_allowed).cloned().collect();
        if allowed.is_empty() && self.is_required() {
            return Err(wrong("a call is required, and there are no tools".into()));
        }
        Ok(allowed)
    }
}

/// A [`TokenMask`] for an answer with tools.
///
/// The model writes freely until it begins a call in its format; the call then follows the format's
/// grammar, with the name of a tool and arguments that match its parameters; after the call the
/// text is free again. A token that would begin a call and continue it in an invalid way is
/// forbidden, so every call can be completed, and is then valid. Where calls are required the
/// answer is calls and nothing else; [where text has a grammar](Self::with_text) it is calls and
/// nothing else, or a text of that grammar.
#[derive(Clone, Debug)]
pub struct ToolMask {
    shared: Arc<Shared>,
    start: Phase,
    phase: Phase,
    /// All accepted tokens.
    tokens: Vec<u32>,
    words: Vec<u32>,
}

#[derive(Debug)]
struct Shared {
    trie: TokenTrie,
    reasoning: (&'static str, &'static str),
    /// Openings of calls in free text.
    triggers: Vec<Trigger>,
    /// Constraint on the answer; `None` if it is free.
    bound: Option<Bound>,
    /// Parts that are not enforced.
    loosened: Vec<LoosenedTool>,
    /// Tokens that extend beyond the end of some opening, or of reasoning that a bound answer
    /// follows.
    overrun: Vec<u32>,
    /// Tokens of white space.
    white: Vec<u32>,
}

/// Opening of a call, and the grammar after it.
#[derive(Debug)]
struct Trigger {
    text: &'static str,
    at_start: bool,
    /// Bytes at its end that are part of the call.
    n_kept: usize,
    /// `None` if calls are forbidden.
    grammar: Option<Grammar>,
}

#[derive(Clone, Debug)]
enum Phase {
    /// Free text: its last bytes since the last boundary, and whether only white space came since
    /// then.
    Free { tail: Vec<u8>, at_start: bool },
    /// Reasoning, in which no call can begin.
    Reasoning { tail: Vec<u8> },
    /// A call in free text, and the number of tokens since it began.
    Call {
        matcher: Box<Matcher>,
        n_tokens: usize,
    },
    /// All that is left of the answer.
    Bound(Bound),
}

impl ToolMask {
    /// A mask for the answer to `prompt`, the rendered template.
    ///
    /// # Errors
    /// [`ChatError::Tool`] for parameters of a strict tool that cannot be enforced, a named tool
    /// that does not exist, no tools although a call is required, or more than 256;
    /// [`GrammarError`](crate::grammar::GrammarError) for a grammar beyond the limits of compiling.
    pub fn new(
        trie: &TokenTrie,
        format: ToolFormat,
        tools: &[Tool],
        choice: &ToolChoice,
        prompt: &str,
    ) -> Result<Self, ChatError> {
        Self::build(trie, format, (tools, choice), prompt, None)
    }

    /// As [`ToolMask::new`], for an answer that is calls, or a text that `text` allows; reasoning
    /// that `prompt` has opened comes before either. Where calls are required there is no such
    /// text.
    ///
    /// # Errors
    /// As [`ToolMask::new`].
    pub fn with_text(
        trie: &TokenTrie,
        format: ToolFormat,
        tools: &[Tool],
        choice: &ToolChoice,
        prompt: &str,
        text: Box<dyn TokenMask>,
    ) -> Result<Self, ChatError> {
        Self::build(trie, format, (tools, choice), prompt, Some(text))
    }

    fn build(
        trie: &TokenTrie,
        format: ToolFormat,
        (tools, choice): (&[Tool], &ToolChoice),
        prompt: &str,
        text: Option<Box<dyn TokenMask>>,
    ) -> Result<Self, ChatError> {
        super::check_number(tools.len())?;
        let (format, callable) = (format.0, choice.allowed(tools)?);
        let in_reasoning = ends_in_reasoning(prompt, format.reasoning);
        // Where calls are forbidden, their grammar is not needed.
        let calls = match callable.is_empty() {
            true => None,
            false => Some(grammar_of_calls(trie, format, &callable)?),
        };
        let text = text.filter(|_| !choice.is_required());
        let (mut triggers, mut bound) = (Vec::new(), None);
        if choice.is_required() || text.is_some() {
            let calls = calls.as_ref();
            let larks = calls.map(|calls| only_calls(trie, format, &calls.lark, in_reasoning));
            let grammar = larks.map(|lark| Grammar::calls(trie, &lark)).transpose()?;
            bound = Some(Bound {
                calls: grammar.map(|grammar| Box::new(grammar.matcher())),
                text,
                n_white: if in_reasoning { MAX_WHITE } else { 0 },
                n_tokens: 0,
            });
        } else if !tools.is_empty() {
            for opening in format.openings {
                let or_text = calls.as_ref().and_then(|calls| {
                    let lark = calls_or_text(format, opening, &callable, &calls.lark)?;
                    Some(Grammar::calls(trie, &lark))
                });
                triggers.push(Trigger {
                    text: opening.text,
                    at_start: opening.at_start,
                    n_kept: if opening.keep {
                        first_opening(format).text.len()
                    } else {
                        0
                    },
                    grammar: match or_text {
                        Some(grammar) => Some(grammar?),
                        None => calls.as_ref().map(|calls| calls.grammar.clone()),
                    },
                });
            }
        }
        let opened = format.opened_by(prompt).and_then(|opening| {
            let mut triggers = triggers.iter();
            let trigger = triggers.find(|trigger: &&Trigger| trigger.text == opening.text)?;
            trigger.grammar.clone()
        });
        let mut texts: Vec<&str> = triggers.iter().map(|trigger| trigger.text).collect();
        texts.extend((!format.reasoning.1.is_empty()).then_some(format.reasoning.1));
        let forbidden = triggers.iter().any(|trigger| trigger.grammar.is_none());
        let ids = || 0..trie.n_vocab() as u32;
        let start = match &bound {
            _ if in_reasoning => Phase::Reasoning { tail: Vec::new() },
            Some(bound) => Phase::Bound(bound.clone()),
            None => match &opened {
                Some(grammar) => Phase::Call {
                    matcher: Box::new(grammar.matcher()),
                    n_tokens: 0,
                },
                None => Phase::Free {
                    tail: Vec::new(),
                    at_start: true,
                },
            },
        };
        let shared = Shared {
            trie: trie.clone(),
            reasoning: format.reasoning,
            triggers,
            overrun: ids()
                .filter(|&id| reaches(trie.text(id), &texts, forbidden))
                .collect(),
            white: ids().filter(|&id| is_white(trie.text(id))).collect(),
            bound,
            loosened: calls.map(|calls| calls.loosened).unwrap_or_default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            phase: start.clone(),
            start,
            tokens: Vec::new(),
            words: Vec::new(),
        })
    }

    /// Parts of the tools' parameters that are not enforced.
    pub fn loosened(&self) -> &[LoosenedTool] {
        &self.shared.loosened
    }

    /// Whether an answer that may be calls or text is calls; `None` while both are possible.
    pub fn is_calls(&self) -> Option<bool> {
        match &self.phase {
            Phase::Bound(bound) => bound.is_calls(),
            _ => None,
        }
    }

    /// Whether an answer that may be either and ends here, or is cut off, is calls.
    pub fn ends_as_calls(&mut self) -> bool {
        let end = self.shared.trie.eog()[0];
        match &mut self.phase {
            Phase::Bound(bound) => bound.ends_as_calls(end),
            _ => true,
        }
    }

    /// The phase after `token` in `phase`, which is neither a call nor bound; `None` if the token
    /// is forbidden.
    fn next(&self, phase: &Phase, token: u32) -> Option<Phase> {
        let shared = &*self.shared;
        let text = shared.trie.text(token);
        match phase {
            Phase::Call { .. } | Phase::Bound(_) => None,
            Phase::Reasoning { tail } => {
                let mut tail = [&tail[..], text].concat();
                let close = shared.reasoning.1.as_bytes();
                let Some(at) = find(&tail, close) else {
                    // The required calls or text must come before the end.
                    if shared.bound.is_some() && shared.trie.is_eog(token) {
                        return None;
                    }
                    let kept = tail.len() - tail.len().min(close.len() - 1);
                    tail.drain(..kept);
                    return Some(Phase::Reasoning { tail });
                };
                let rest = &tail[at + close.len()..];
                match &shared.bound {
                    Some(bound) => {
                        let mut bound = bound.clone();
                        bound.take_text(&shared.trie, rest)?;
                        Some(Phase::Bound(bound))
                    }
                    None => self.next_free(Vec::new(), true, rest),
                }
            }
            Phase::Free { tail, at_start } => self.next_free(tail.clone(), *at_start, text),
        }
    }

    /// [`Self::next`] in free text.
    fn next_free(&self, mut tail: Vec<u8>, at_start: bool, text: &[u8]) -> Option<Phase> {
        let shared = &*self.shared;
        tail.extend_from_slice(text);
        let white = tail.iter().take_while(|b| b.is_ascii_whitespace()).count();
        let openings = shared.triggers.iter().filter_map(|trigger| {
            let at = match trigger.at_start {
                true => (at_start && tail[white..].starts_with(trigger.text.as_bytes()))
                    .then_some(white)?,
                false => find(&tail, trigger.text.as_bytes())?,
            };
            Some((at, trigger.text.len(), Some(trigger)))
        });
        let (open, close) = shared.reasoning;
        let reasoning = (!open.is_empty())
            .then(|| find(&tail, open.as_bytes()))
            .flatten()
            .map(|at| (at, open.len(), None));
        // The earliest opening; if several start there, the longest.
        let first = openings
            .chain(reasoning)
            .min_by_key(|&(at, len, _)| (at, std::cmp::Reverse(len)));
        match first {
            Some((at, len, Some(trigger))) => self.begin(
                trigger.grammar.as_ref()?,
                &tail[at + len - trigger.n_kept..],
            ),
            Some((at, len, None)) => {
                let rest = tail[at + len..].to_vec();
                match find(&rest, close.as_bytes()) {
                    Some(at) => self.next_free(Vec::new(), true, &rest[at + close.len()..]),
                    None => Some(Phase::Reasoning { tail: rest }),
                }
            }
            None => {
                let at_start = at_start && (white == tail.len() || self.may_begin(&tail[white..]));
                let longest = shared
                    .triggers
                    .iter()
                    .map(|t| t.text.len())
                    .chain([open.len()])
                    .max()
                    .unwrap_or(0);
                if at_start {
                    tail.drain(..white);
                } else {
                    let kept = tail.len() - tail.len().min(longest.saturating_sub(1));
                    tail.drain(..kept);
                }
                Some(Phase::Free { tail, at_start })
            }
        }
    }

    /// Whether `text` is a prefix of an opening that only counts at the start.
    fn may_begin(&self, text: &[u8]) -> bool {
        self.shared
            .triggers
            .iter()
            .any(|trigger| trigger.at_start && trigger.text.as_bytes().starts_with(text))
    }

    /// State of a call that begins with `text`.
    fn begin(&self, grammar: &Grammar, text: &[u8]) -> Option<Phase> {
        let mut matcher = grammar.matcher();
        for token in self.shared.trie.cut(text) {
            matcher.accept(token).ok()?;
        }
        Some(Phase::Call {
            matcher: Box::new(matcher),
            n_tokens: 0,
        })
    }
}

/// The opening of calls that are required.
fn first_opening(format: &Format) -> &'static Opening {
    let kept = format.openings.iter().find(|opening| opening.keep);
    kept.unwrap_or(&format.openings[0])
}

/// The grammar of what follows an opening that begins messages for the user, too: a call, or what
/// makes it such a message, behind which the text is free. `lark` is that of a call.
fn calls_or_text(format: &Format, opening: &Opening, tools: &[Tool], lark: &str) -> Option<String> {
    // A tool of that name wins.
    let is_tool = |rest: &str| tools.iter().any(|tool| tool.name == rest.trim_end());
    let texts = format.texts_behind(opening).filter(|rest| !is_tool(rest));
    let texts: Vec<String> = texts.map(lark_text).collect();
    let start = format!("start: called | {}\ncalled: ", texts.join(" | "));
    (!texts.is_empty()).then(|| lark.replacen("start: ", &start, 1))
}

/// The grammar of calls, each with its opening, that are all of an answer; `lark` is that of one
/// without.
fn only_calls(trie: &TokenTrie, format: &Format, lark: &str, in_reasoning: bool) -> String {
    let first = first_opening(format);
    // An opening that is part of the call is contained in its grammar.
    let opening = if first.keep {
        "\"\"".to_owned()
    } else {
        lark_marker(trie.special(first.text), first.text)
    };
    let white = if in_reasoning { "WHITE " } else { "" };
    // Separators between two calls, besides white space.
    let between = format.openings.iter().filter(|opening| opening.keep);
    let between = between.filter_map(|opening| opening.text.strip_suffix(first.text));
    let between: String = between
        .filter(|text| !text.is_empty())
        .map(|text| format!(" | {}", lark_text(text)))
        .collect();
    let start = format!(
        "{WHITE}start: {white}opened (between opened)*\nbetween: WHITE{between}\n\
         opened: {opening} body\nbody: "
    );
    lark.replacen("start: ", &start, 1)
}

/// Whether a text is white space.
fn is_white(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(u8::is_ascii_whitespace)
}

/// Constraint on the rest of an answer: calls and nothing else, a text that a grammar allows, or
/// either while both are possible.
#[derive(Clone, Debug)]
struct Bound {
    calls: Option<Box<Matcher>>,
    text: Option<Box<dyn TokenMask>>,
    /// Bytes of white space that may still come before it.
    n_white: usize,
    /// Tokens since it began, or since one of the two was ruled out.
    n_tokens: usize,
}

impl Bound {
    /// The alternatives that are still possible.
    fn each(&mut self) -> impl Iterator<Item = &mut dyn TokenMask> {
        let calls = self
            .calls
            .as_mut()
            .map(|calls| &mut **calls as &mut dyn TokenMask);
        let text = self
            .text
            .as_mut()
            .map(|text| &mut **text as &mut dyn TokenMask);
        calls.into_iter().chain(text)
    }

    fn is_calls(&self) -> Option<bool> {
        match (&self.calls, &self.text) {
            (Some(_), Some(_)) => None,
            (calls, _) => Some(calls.is_some()),
        }
    }

    fn ends_as_calls(&mut self, end: u32) -> bool {
        let is_text = |text: &mut Box<dyn TokenMask>| text.allows(end).unwrap_or(false);
        match (&mut self.calls, &mut self.text) {
            (Some(calls), Some(text)) => calls.is_accepting().unwrap_or(false) || !is_text(text),
            (calls, _) => calls.is_some(),
        }
    }

    /// Whether `token` is white space before it begins.
    fn is_white(&self, trie: &TokenTrie, token: u32) -> bool {
        let text = trie.text(token);
        (1..=self.n_white).contains(&text.len()) && is_white(text)
    }

    fn allows(&mut self, trie: &TokenTrie, token: u32) -> Result<bool, MaskError> {
        let mut is_allowed = self.is_white(trie, token);
        for mask in self.each() {
            is_allowed = is_allowed || mask.allows(token)?;
        }
        Ok(is_allowed)
    }

    /// Accepts a token that is allowed; whichever does not allow it is ruled out.
    fn accept(&mut self, trie: &TokenTrie, token: u32) -> Result<(), MaskError> {
        if self.is_white(trie, token) {
            self.n_white -= trie.text(token).len();
            self.n_tokens = 0;
            return Ok(());
        }
        let calls = self.calls.as_mut().map(|calls| calls.accept(token));
        let text = self.text.as_mut().map(|text| text.accept(token));
        let n_before = self.each().count();
        match (calls, text) {
            (Some(Err(error)), None | Some(Err(_))) | (None, Some(Err(error))) => {
                return Err(error);
            }
            (Some(Err(_)), _) => self.calls = None,
            (_, Some(Err(_))) => self.text = None,
            _ => {}
        }
        let is_decided = self.each().count() < n_before;
        self.n_tokens = if self.n_white > 0 || is_decided {
            0
        } else {
            self.n_tokens + 1
        };
        self.n_white = 0;
        Ok(())
    }

    /// Accepts a text, if it is allowed.
    fn take_text(&mut self, trie: &TokenTrie, text: &[u8]) -> Option<()> {
        for token in trie.cut(text) {
            self.accept(trie, token).ok()?;
        }
        self.n_tokens = 0;
        Some(())
    }

    /// Rewinds tokens, if none of them excluded an alternative.
    fn rollback(&mut self, n: usize) -> Result<bool, MaskError> {
        if n > self.n_tokens {
            return Ok(false);
        }
        for mask in self.each() {
            mask.rollback(n)?;
        }
        self.n_tokens -= n;
        Ok(true)
    }

    /// Writes what is allowed into `words`.
    fn write(
        &mut self,
        white: &[u32],
        trie: &TokenTrie,
        words: &mut Vec<u32>,
    ) -> Result<(), MaskError> {
        words.clear();
        words.resize(trie.n_vocab().div_ceil(32), 0);
        for mask in self.each() {
            let allowed = mask.mask()?;
            words
                .iter_mut()
                .zip(allowed)
                .for_each(|(word, bits)| *word |= bits);
        }
        for &id in white.iter().filter(|&&id| self.is_white(trie, id)) {
            words[id as usize / 32] |= 1 << (id % 32);
        }
        Ok(())
    }

    fn forced(&mut self, encode: &dyn Fn(&[u8]) -> Vec<u32>) -> Vec<u32> {
        let is_open = self.n_white > 0 || self.is_calls().is_none();
        let mut each = self.each();
        match each.next() {
            Some(only) if !is_open => only.forced(encode),
            _ => Vec::new(),
        }
    }
}

/// The first position of `text` in `bytes`.
fn find(bytes: &[u8], text: &[u8]) -> Option<usize> {
    (!text.is_empty())
        .then(|| bytes.windows(text.len()).position(|window| window == text))
        .flatten()
}

/// Whether a token with this text can contain the end of one of `texts` and continue after it, or
/// contain the whole of one; with `exact`, also if it ends there.
fn reaches(token: &[u8], texts: &[&str], exact: bool) -> bool {
    texts.iter().map(|text| text.as_bytes()).any(|text| {
        (1..=token.len()).any(|end| {
            let overlap = end.min(text.len());
            let goes_on = exact || end < token.len() || overlap == text.len();
            goes_on && token[end - overlap..end] == text[text.len() - overlap..]
        })
    })
}

impl TokenMask for ToolMask {
    fn mask(&mut self) -> Result<&[u32], MaskError> {
        let mut words = std::mem::take(&mut self.words);
        let shared = Arc::clone(&self.shared);
        match &mut self.phase {
            Phase::Call { .. } => {}
            Phase::Bound(bound) => bound.write(&shared.white, &shared.trie, &mut words)?,
            phase => {
                let phase = phase.clone();
                words.clear();
                words.resize(shared.trie.n_vocab().div_ceil(32), u32::MAX);
                let mut forbid = |id: u32| words[id as usize / 32] &= !(1 << (id % 32));
                for &id in &shared.overrun {
                    if self.next(&phase, id).is_none() {
                        forbid(id);
                    }
                }
                if matches!(phase, Phase::Reasoning { .. }) && shared.bound.is_some() {
                    shared.trie.eog().iter().for_each(|&id| forbid(id));
                }
            }
        }
        self.words = words;
        match &mut self.phase {
            Phase::Call { matcher, .. } => matcher.mask(),
            _ => Ok(&self.words),
        }
    }

    fn allows(&mut self, token: u32) -> Result<bool, MaskError> {
        let shared = Arc::clone(&self.shared);
        match &mut self.phase {
            Phase::Call { matcher, .. } => matcher.allows(token),
            _ if token as usize >= shared.trie.n_vocab() => Ok(false),
            Phase::Bound(bound) => bound.allows(&shared.trie, token),
            phase => {
                let phase = phase.clone();
                Ok(self.next(&phase, token).is_some())
            }
        }
    }

    fn forced(&mut self, encode: &dyn Fn(&[u8]) -> Vec<u32>) -> Vec<u32> {
        match &mut self.phase {
            Phase::Call { matcher, .. } => matcher.forced(encode),
            Phase::Bound(bound) => bound.forced(encode),
            _ => Vec::new(),
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), MaskError> {
        let refused = MaskError::Refused {
            token,
            n_tokens: self.tokens.len(),
        };
        let shared = Arc::clone(&self.shared);
        match &mut self.phase {
            Phase::Call { matcher, n_tokens } => {
                matcher.accept(token)?;
                *n_tokens += 1;
                // After a call the text is free again, unless the call ended it.
                if matcher.is_finished() && !shared.trie.is_eog(token) {
                    self.phase = Phase::Free {
                        tail: Vec::new(),
                        at_start: true,
                    };
                }
            }
            _ if token as usize >= shared.trie.n_vocab() => return Err(refused),
            Phase::Bound(bound) => bound.accept(&shared.trie, token)?,
            phase => {
                let phase = phase.clone();
                self.phase = self.next(&phase, token).ok_or(refused)?;
            }
        }
        self.tokens.push(token);
        Ok(())
    }

    fn rollback(&mut self, n: usize) -> Result<(), MaskError> {
        let kept = self.tokens.len().checked_sub(n);
        let kept = kept.ok_or(MaskError::Rollback {
            n,
            n_tokens: self.tokens.len(),
        })?;
        let is_inside = match &mut self.phase {
            Phase::Call { matcher, n_tokens } if *n_tokens >= n => {
                matcher.rollback(n)?;
                *n_tokens -= n;
                true
            }
            Phase::Bound(bound) => bound.rollback(n)?,
            _ => false,
        };
        if is_inside {
            self.tokens.truncate(kept);
            return Ok(());
        }
        // The rollback crosses a boundary: starts again from the beginning.
        let tokens = std::mem::take(&mut self.tokens);
        self.phase = self.start.clone();
        tokens[..kept]
            .iter()
            .try_for_each(|&token| self.accept(token))
    }

    fn reset(&mut self) {
        self.phase = self.start.clone();
        self.tokens.clear();
    }

    fn boxed_clone(&self) -> Box<dyn TokenMask> {
        Box::new(self.clone())
    }
}
