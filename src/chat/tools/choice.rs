//! Enforcing valid calls: a mask that lets the model write freely until it begins a call.

use crate::chat::ChatError;
use crate::chat::tools::enforce::{Calls, grammar_of_calls};
use crate::chat::tools::{LoosenedTool, Tool, ToolFormat, ends_in_reasoning, lark_marker};
use crate::grammar::{Grammar, Matcher, TokenTrie};
use crate::sample::{MaskError, TokenMask};
use serde_json::Value;
use std::sync::Arc;

/// Most tools that a mask supports.
const MAX_TOOLS: usize = 256;
/// White space between reasoning and a call.
const WHITE: &str = "WHITE: /[ \\t\\r\\n]{0,20}/\n";

/// Whether the model may or must call tools.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ToolChoice {
    /// Calls are allowed.
    Auto,
    /// Calls are forbidden.
    None,
    /// At least one call, before any other text, but after reasoning that has already begun.
    Required,
    /// A call of this tool, otherwise like `Required`.
    Named(String),
}

impl ToolChoice {
    /// The `tool_choice` of the OpenAI API: `"auto"`, `"none"`, `"required"` or
    /// `{"type": "function", "function": {"name": …}}`.
    ///
    /// # Errors
    /// [`ChatError::Tool`] for anything else.
    pub fn from_json(choice: &Value) -> Result<Self, ChatError> {
        let named = || choice.get("function")?.get("name")?.as_str();
        match choice.as_str() {
            Some("auto") => Ok(Self::Auto),
            Some("none") => Ok(Self::None),
            Some("required") => Ok(Self::Required),
            _ => named()
                .map(|name| Self::Named(name.to_owned()))
                .ok_or_else(|| ChatError::Tool {
                    index: 0,
                    message: format!(
                        "the tool choice {choice} is none of auto, none, required and a function"
                    ),
                }),
        }
    }
}

/// A [`TokenMask`] for an answer with tools.
///
/// The model writes freely until it begins a call in its format; the call then follows the format's
/// grammar, with the name of a tool and arguments that match its parameters; after the call the
/// text is free again. A token that would begin a call and continue it in an invalid way is
/// forbidden, so every call can be completed, and is then valid.
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
    triggers: Vec<Trigger>,
    /// Grammar of a call including its opening, if calls are required.
    required: Option<Grammar>,
    /// What is not enforced.
    loosened: Vec<LoosenedTool>,
    /// Tokens that extend beyond the end of some opening, or of reasoning that must lead to a
    /// call.
    overrun: Vec<u32>,
}

/// Opening of a call, and the grammar of what follows.
#[derive(Debug)]
struct Trigger {
    text: &'static str,
    at_start: bool,
    keep: bool,
    /// `None` if it is forbidden.
    grammar: Option<Grammar>,
}

#[derive(Clone, Debug)]
enum Phase {
    /// Free text: its last bytes since the last boundary, and whether only white space came since
    /// then.
    Free { tail: Vec<u8>, at_start: bool },
    /// Reasoning, in which no call can begin; and whether a call must follow it.
    Reasoning { tail: Vec<u8>, required: bool },
    /// A call, and the number of tokens since it began.
    Call {
        matcher: Box<Matcher>,
        n_tokens: usize,
    },
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
        let wrong = |index, message: String| ChatError::Tool { index, message };
        if tools.len() > MAX_TOOLS {
            return Err(wrong(
                MAX_TOOLS,
                format!("there are {} tools; the limit is {MAX_TOOLS}", tools.len()),
            ));
        }
        let named = match choice {
            ToolChoice::Named(name) => match tools.iter().position(|tool| &tool.name == name) {
                Some(i) => Some(&tools[i..=i]),
                None => return Err(wrong(0, format!("there is no tool {name:?}"))),
            },
            _ => None,
        };
        let tools = named.unwrap_or(tools);
        let required = matches!(choice, ToolChoice::Required | ToolChoice::Named(_));
        let in_reasoning = ends_in_reasoning(prompt, format.0.reasoning);
        if tools.is_empty() && required {
            return Err(wrong(
                0,
                "a call is required, and there are no tools".into(),
            ));
        }

        let format = format.0;
        let mut loosened = Vec::new();
        let mut triggers = Vec::new();
        let mut first = None;
        // Where calls are forbidden, their grammar is not needed.
        let forbidden = *choice == ToolChoice::None;
        let mut grammar = None;
        if !tools.is_empty() && !forbidden {
            let calls = grammar_of_calls(trie, format, tools)?;
            let Calls { lark, .. } = calls;
            loosened = calls.loosened;
            if required {
                let opening = format
                    .openings
                    .iter()
                    .find(|o| o.keep)
                    .unwrap_or(&format.openings[0]);
                // An opening that is part of the call is contained in its grammar.
                let opening = if opening.keep {
                    "\"\"".to_owned()
                } else {
                    lark_marker(trie.special(opening.text), opening.text)
                };
                let white = if in_reasoning { "WHITE " } else { "" };
                let lark = lark.replacen(
                    "start: ",
                    &format!("{WHITE}start: {white}{opening} body\nbody: "),
                    1,
                );
                first = Some(Grammar::calls(trie, &lark)?);
            }
            grammar = Some(calls.grammar);
        }
        if !tools.is_empty() {
            triggers.extend(format.openings.iter().map(|opening| Trigger {
                text: opening.text,
                at_start: opening.at_start,
                keep: opening.keep,
                grammar: grammar.clone(),
            }));
        }
        let mut texts: Vec<&str> = triggers.iter().map(|trigger| trigger.text).collect();
        texts.extend((!format.reasoning.1.is_empty()).then_some(format.reasoning.1));
        let decides = |id: &u32| reaches(trie.text(*id), &texts, forbidden);
        let overrun = (0..trie.n_vocab() as u32).filter(decides).collect();
        let start = if in_reasoning {
            Phase::Reasoning {
                tail: Vec::new(),
                required,
            }
        } else {
            match &first {
                Some(grammar) => Phase::Call {
                    matcher: Box::new(grammar.matcher()),
                    n_tokens: 0,
                },
                None => Phase::Free {
                    tail: Vec::new(),
                    at_start: true,
                },
            }
        };
        let shared = Shared {
            trie: trie.clone(),
            reasoning: format.reasoning,
            triggers,
            required: first,
            overrun,
            loosened,
        };
        Ok(Self {
            shared: Arc::new(shared),
            phase: start.clone(),
            start,
            tokens: Vec::new(),
            words: Vec::new(),
        })
    }

    /// What of the tools' parameters is not enforced.
    pub fn loosened(&self) -> &[LoosenedTool] {
        &self.shared.loosened
    }

    /// The phase after `token` in `phase`, which is not a call; `None` if the token is forbidden.
    fn next(&self, phase: &Phase, token: u32) -> Option<Phase> {
        let shared = &*self.shared;
        let text = shared.trie.text(token);
        match phase {
            Phase::Call { .. } => None,
            Phase::Reasoning { tail, required } => {
                let mut tail = [&tail[..], text].concat();
                let close = shared.reasoning.1.as_bytes();
                let Some(at) = find(&tail, close) else {
                    // A call must follow before the end.
                    if *required && shared.trie.is_eog(token) {
                        return None;
                    }
                    let kept = tail.len() - tail.len().min(close.len() - 1);
                    tail.drain(..kept);
                    return Some(Phase::Reasoning {
                        tail,
                        required: *required,
                    });
                };
                let rest = &tail[at + close.len()..];
                match shared.required.as_ref().filter(|_| *required) {
                    Some(grammar) => self.begin(grammar, rest),
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
            Some((at, len, Some(trigger))) => {
                let from = if trigger.keep { at } else { at + len };
                self.begin(trigger.grammar.as_ref()?, &tail[from..])
            }
            Some((at, len, None)) => {
                let rest = tail[at + len..].to_vec();
                match find(&rest, close.as_bytes()) {
                    Some(at) => self.next_free(Vec::new(), true, &rest[at + close.len()..]),
                    None => Some(Phase::Reasoning {
                        tail: rest,
                        required: false,
                    }),
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

    /// A call that begins with `text`.
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
        if !matches!(self.phase, Phase::Call { .. }) {
            let trie = &self.shared.trie;
            let mut words = std::mem::take(&mut self.words);
            words.clear();
            words.resize(trie.n_vocab().div_ceil(32), u32::MAX);
            let mut forbid = |id: u32| words[id as usize / 32] &= !(1 << (id % 32));
            for &id in &self.shared.overrun {
                if self.next(&self.phase, id).is_none() {
                    forbid(id);
                }
            }
            if matches!(self.phase, Phase::Reasoning { required: true, .. }) {
                trie.eog().iter().for_each(|&id| forbid(id));
            }
            self.words = words;
        }
        match &mut self.phase {
            Phase::Call { matcher, .. } => matcher.mask(),
            _ => Ok(&self.words),
        }
    }

    fn allows(&mut self, token: u32) -> Result<bool, MaskError> {
        match &mut self.phase {
            Phase::Call { matcher, .. } => matcher.allows(token),
            phase => {
                let phase = phase.clone();
                Ok((token as usize) < self.shared.trie.n_vocab()
                    && self.next(&phase, token).is_some())
            }
        }
    }

    fn forced(&mut self, encode: &dyn Fn(&[u8]) -> Vec<u32>) -> Vec<u32> {
        match &mut self.phase {
            Phase::Call { matcher, .. } => matcher.forced(encode),
            _ => Vec::new(),
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), MaskError> {
        let refused = MaskError::Refused {
            token,
            n_tokens: self.tokens.len(),
        };
        let next = match &mut self.phase {
            Phase::Call { matcher, n_tokens } => {
                matcher.accept(token)?;
                *n_tokens += 1;
                None
            }
            _ if token as usize >= self.shared.trie.n_vocab() => return Err(refused),
            phase => {
                let phase = phase.clone();
                Some(self.next(&phase, token).ok_or(refused)?)
            }
        };
        if let Some(next) = next {
            self.phase = next;
        }
        // After a call the text is free again, unless the call ended it.
        if let Phase::Call { matcher, .. } = &self.phase
            && matcher.is_finished()
            && !self.shared.trie.is_eog(token)
        {
            self.phase = Phase::Free {
                tail: Vec::new(),
                at_start: true,
            };
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
        match &mut self.phase {
            Phase::Call { matcher, n_tokens } if *n_tokens >= n => {
                matcher.rollback(n)?;
                *n_tokens -= n;
                self.tokens.truncate(kept);
                Ok(())
            }
            // The rollback crosses a boundary: starts again from the beginning.
            _ => {
                let tokens = std::mem::take(&mut self.tokens);
                self.phase = self.start.clone();
                tokens[..kept]
                    .iter()
                    .try_for_each(|&token| self.accept(token))
            }
        }
    }

    fn reset(&mut self) {
        self.phase = self.start.clone();
        self.tokens.clear();
    }

    fn boxed_clone(&self) -> Box<dyn TokenMask> {
        Box::new(self.clone())
    }
}
