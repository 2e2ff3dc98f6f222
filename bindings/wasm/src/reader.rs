//! What an answer of a conversation says: text for the user, reasoning, calls of tools.

use crate::failure::Failure;
use ruvllm::Tokenizer;
use ruvllm::chat::tools::{ToolMask, TurnParser, TurnPart};
use ruvllm::sample::TokenMask;
use ruvllm::tokenizer::TextStream;
use serde_json::{Value, json};
use std::sync::Arc;

/// Reads an answer, token after token.
pub(crate) struct Reader {
    parser: TurnParser,
    /// Follows an answer that is calls or text, until it is known which.
    either: Option<ToolMask>,
    /// Texts of tokens, special ones included: they tell text from calls.
    stream: TextStream,
    stop: StopTexts,
    /// Tokens it has read.
    n_read: usize,
}

impl Reader {
    /// A reader that ends before any of the texts `stop`.
    pub(crate) fn new(
        tokenizer: &Arc<Tokenizer>,
        parser: TurnParser,
        either: Option<ToolMask>,
        stop: Vec<String>,
    ) -> Reader {
        Reader {
            parser,
            either,
            stream: TextStream::new(tokenizer, true),
            stop: StopTexts::new(stop),
            n_read: 0,
        }
    }

    /// The text for the user in the tokens that are new among `tokens`, those of the whole answer.
    pub(crate) fn read(&mut self, tokens: &[u32]) -> Result<String, Failure> {
        let mut text = String::new();
        for &token in &tokens[self.n_read..] {
            if let Some(mask) = &mut self.either {
                let is_calls = match mask.accept(token) {
                    Ok(()) => mask.is_calls(),
                    // Nothing that it allowed: whatever it is, it is no call.
                    Err(_) => Some(false),
                };
                self.decide(is_calls);
            }
            let piece = self.stream.push(token);
            let parts = self
                .parser
                .push(piece.map_err(Failure::of("SessionError"))?);
            text += &self.shown(parts);
        }
        self.n_read = tokens.len();
        Ok(text)
    }

    /// The text that was held back until the end; `is_cut` if the answer reached a limit.
    pub(crate) fn finish(&mut self, is_cut: bool) -> String {
        let is_calls = self.either.as_mut().map(ToolMask::ends_as_calls);
        self.decide(is_calls);
        let mut parts = self.parser.push(self.stream.finish());
        parts.extend(match is_cut {
            true => self.parser.cut_parts(),
            false => self.parser.finish_parts(),
        });
        self.shown(parts) + &self.stop.finish()
    }

    /// Whether a stop text came.
    pub(crate) fn has_stopped(&self) -> bool {
        self.stop.came
    }

    /// The calls so far, in the form of the OpenAI API.
    pub(crate) fn calls(&self) -> Vec<Value> {
        let calls = self.parser.turn().calls.iter().enumerate();
        let to_json = |(i, call): (usize, &ruvllm::chat::tools::ToolCall)| {
            let id = call.id.clone().unwrap_or_else(|| format!("call_{i}"));
            let arguments = Value::Object(call.arguments.clone()).to_string();
            json!({"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
        };
        calls.map(to_json).collect()
    }

    /// The reasoning before the answer.
    pub(crate) fn reasoning(&self) -> &str {
        &self.parser.turn().reasoning
    }

    fn decide(&mut self, is_calls: Option<bool>) {
        if let Some(is_calls) = is_calls {
            self.either = None;
            self.parser.decide(is_calls);
        }
    }

    fn shown(&mut self, parts: Vec<TurnPart>) -> String {
        let mut shown = String::new();
        for part in parts {
            if let TurnPart::Text(text) = part {
                shown += &self.stop.push(&text);
            }
        }
        shown
    }
}

/// Ends a text before any of some texts.
struct StopTexts {
    texts: Vec<String>,
    /// What may be the beginning of one.
    held: String,
    came: bool,
}

impl StopTexts {
    fn new(mut texts: Vec<String>) -> StopTexts {
        texts.retain(|text| !text.is_empty());
        StopTexts {
            texts,
            held: String::new(),
            came: false,
        }
    }

    /// The text that is certain once `text` follows.
    fn push(&mut self, text: &str) -> String {
        if self.came {
            return String::new();
        }
        self.held += text;
        let found = self
            .texts
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()));
        if let Some(at) = found.min() {
            self.came = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let may_begin = |&(at, _): &(usize, char)| {
            let end = &self.held[at..];
            self.texts.iter().any(|stop| stop.starts_with(end))
        };
        let certain = self.held.char_indices().find(may_begin);
        let certain = certain.map_or(self.held.len(), |(at, _)| at);
        let rest = self.held.split_off(certain);
        std::mem::replace(&mut self.held, rest)
    }

    fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
