//! Function calling: the calls in a model's text, in the form that the model was trained on.
//!
//! Families write calls in their own ways. A [`ToolFormat`] is one of them, found [by its template](ToolFormat::of). A
//! [`TurnParser`] takes the text of an answer as it comes and tells apart what the model thinks, says and calls; the
//! same text gives the same [`Turn`], however it is cut into pieces, and nothing of it is lost: what looks like a call and
//! is none is text, and a call that was cut off is [`Turn::unfinished`].
//!
//! ```
//! use ruvllm::chat::tools::{ToolFormat, TurnParser};
//! let format = ToolFormat::of("… <tool_call> …");
//! let mut parser = TurnParser::new(format, &[], "");
//! for piece in ["<think>Rain?</think>Let me see. <tool_", "call>\n{\"name\": \"weather\", \"arguments\"", ": {\"city\": \"Oslo\"}}\n</tool_call>"] {
//!     parser.push(piece);
//! }
//! let turn = parser.finish();
//! assert_eq!((&turn.reasoning[..], &turn.text[..]), ("Rain?", "Let me see. "));
//! assert_eq!(turn.calls[0].name, "weather");
//! assert_eq!(turn.calls[0].arguments["city"], "Oslo");
//! ```
//!
//! With the feature `grammar`, `ToolMask` makes the arguments of calls obey the parameters of their tools, and calls
//! themselves forbidden or required.
//!
//! A format is a file with one `Format`, and one line in `FORMATS`.

mod call;
#[cfg(feature = "grammar")]
mod choice;
mod command_r;
mod deepseek;
mod functionary;
mod gemma;
mod generic;
mod glm;
mod granite;
mod harmony;
mod hermes;
mod kimi;
mod lfm2;
mod llama3;
mod minimax;
mod mistral;
mod phi4;
mod qwen3_coder;

use serde_json::{Map, Value};

use crate::ChatError;
#[cfg(feature = "grammar")]
pub use choice::{ToolChoice, ToolMask};

/// All formats. The first whose marks are all in a template is the template's; the last has none.
const FORMATS: &[&Format] = &[
    &harmony::FORMAT,
    &gemma::GEMMA4,
    &gemma::FUNCTION_GEMMA,
    &deepseek::V3,
    &deepseek::V3_1,
    &kimi::FORMAT,
    &minimax::FORMAT,
    &command_r::FORMAT,
    &lfm2::FORMAT,
    &glm::FORMAT,
    &qwen3_coder::FORMAT,
    &functionary::V3_1,
    &functionary::V3_2,
    &mistral::V11,
    &mistral::V3,
    &phi4::FORMAT,
    &granite::FORMAT,
    &hermes::FORMAT,
    &llama3::FORMAT,
    &generic::FORMAT,
];

/// How a family writes calls.
struct Format {
    name: &'static str,
    /// Texts that are all in its templates, and not all in those of formats further down.
    marks: &'static [&'static str],
    /// What encloses reasoning.
    reasoning: (&'static str, &'static str),
    /// Markers that are no text.
    hidden: &'static [&'static str],
    /// What begins calls.
    openings: &'static [Opening],
    /// What ends them; looked for where a call cannot be read.
    close: &'static str,
    /// Where the calls behind an opening end.
    scan: fn(&str) -> Scan,
    /// The calls of what is between an opening and its end; `None` when that is none.
    read: fn(&str, &[Tool]) -> Option<Vec<ToolCall>>,
    /// A Lark grammar for what is between an opening and its end, the end included.
    #[cfg_attr(not(feature = "grammar"), allow(dead_code))]
    grammar: fn(&[Tool], &Marks<'_>) -> Result<String, ChatError>,
}

/// A text that begins calls.
#[derive(Clone, Copy)]
struct Opening {
    text: &'static str,
    /// Only at the beginning of an answer, behind reasoning or behind another call.
    at_start: bool,
    /// Whether the text is part of the call.
    keep: bool,
}

impl Opening {
    /// An opening anywhere, of a marker.
    const fn marker(text: &'static str) -> Opening {
        Opening { text, at_start: false, keep: false }
    }

    /// An opening at the beginning, which is part of the call.
    const fn start(text: &'static str) -> Opening {
        Opening { text, at_start: true, keep: true }
    }
}

/// What a text that follows an opening is. It only depends on the text up to the number of bytes it says.
#[derive(Debug, PartialEq)]
enum Scan {
    /// Not whole yet.
    More,
    /// Calls of this many bytes.
    Calls(usize),
    /// No call, but text behind so many bytes of markup.
    Text(usize),
    /// No call.
    Nothing,
}

/// Writes markers into grammars: as the special token they are in a vocabulary, or as text.
struct Marks<'a>(&'a dyn Fn(&str) -> Option<u32>);

impl Marks<'_> {
    fn lark(&self, text: &str) -> String {
        self.0(text).map_or_else(|| lark_text(text), |id| format!("<[{id}]>"))
    }
}

/// A text as Lark writes it.
fn lark_text(text: &str) -> String {
    Value::from(text).to_string()
}

/// A function that a model may call.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// JSON Schema of its arguments, an object.
    pub parameters: Value,
}

impl Tool {
    /// A tool.
    pub fn new(name: impl Into<String>, parameters: Value) -> Self {
        Self { name: name.into(), parameters }
    }

    /// The tools of [`ChatInputs::tools`](super::ChatInputs::tools): an array in the OpenAI form, with or without
    /// `{"type": "function", "function": …}` around each.
    ///
    /// # Errors
    /// [`ChatError::Tool`] with the place that is wrong.
    pub fn from_json(tools: &Value) -> Result<Vec<Self>, ChatError> {
        let wrong = |index, message: &str| ChatError::Tool { index, message: message.to_owned() };
        let tools = tools.as_array().ok_or_else(|| wrong(0, "the tools are not an array"))?;
        (tools.iter().enumerate())
            .map(|(i, tool)| {
                let tool = tool.get("function").unwrap_or(tool);
                let name = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
                let name = name.ok_or_else(|| wrong(i, "it has no name"))?;
                let parameters = match tool.get("parameters") {
                    None | Some(Value::Null) => serde_json::json!({"type": "object", "properties": {}}),
                    Some(parameters) if parameters.is_object() => parameters.clone(),
                    Some(_) => return Err(wrong(i, "its parameters are not a JSON Schema")),
                };
                Ok(Tool::new(name, parameters))
            })
            .collect()
    }
}

/// A call of a function.
#[derive(Clone, Debug, PartialEq, Default)]
#[non_exhaustive]
pub struct ToolCall {
    /// The function's name, as the model wrote it.
    pub name: String,
    /// The arguments by name.
    pub arguments: Map<String, Value>,
    /// The model's own name for the call, if it gave one.
    pub id: Option<String>,
}

/// What an answer is made of. All parts are in the order they came.
#[derive(Clone, Debug, PartialEq, Default)]
#[non_exhaustive]
pub struct Turn {
    /// What the model thought.
    pub reasoning: String,
    /// What it said.
    pub text: String,
    /// What it calls.
    pub calls: Vec<ToolCall>,
    /// A call that was cut off, as the model wrote it.
    pub unfinished: Option<String>,
}

/// What a piece of text adds to a [`Turn`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TurnPart {
    /// More of [`Turn::reasoning`].
    Reasoning(String),
    /// More of [`Turn::text`].
    Text(String),
    /// One more of [`Turn::calls`].
    Call(ToolCall),
}

/// How a family of models writes calls.
#[derive(Clone, Copy)]
pub struct ToolFormat(&'static Format);

impl std::fmt::Debug for ToolFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ToolFormat").field(&self.0.name).finish()
    }
}

impl PartialEq for ToolFormat {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
    }
}

impl ToolFormat {
    /// The format that a chat template writes calls in. For a template that knows none, a JSON object with `name` and
    /// `arguments`.
    pub fn of(template: &str) -> Self {
        let found = FORMATS.iter().find(|format| format.marks.iter().all(|mark| template.contains(mark)));
        Self(found.copied().unwrap_or(&generic::FORMAT))
    }

    /// The format with this [name](Self::name).
    pub fn by_name(name: &str) -> Option<Self> {
        FORMATS.iter().find(|format| format.name == name).map(|format| Self(format))
    }

    /// The names of all formats.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FORMATS.iter().map(|format| format.name)
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.0.name
    }
}

/// Whether `prompt` ends inside what `reasoning` encloses.
fn ends_in_reasoning(prompt: &str, reasoning: (&str, &str)) -> bool {
    !reasoning.0.is_empty() && prompt.trim_end().ends_with(reasoning.0.trim_end())
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Text,
    Reasoning,
    /// Behind this opening.
    Call(&'static str),
}

/// Takes the text of an answer, special tokens included, and makes a [`Turn`] of it.
#[derive(Debug)]
pub struct TurnParser {
    format: ToolFormat,
    tools: Vec<Tool>,
    turn: Turn,
    state: State,
    /// Whether nothing but white space came since the beginning, the reasoning or the last call.
    at_start: bool,
    /// What may be the beginning of a marker, or is a call that is not whole.
    held: String,
    parts: Vec<TurnPart>,
}

impl TurnParser {
    /// A parser of the answer to `prompt`, the rendered template, which may end inside the model's reasoning.
    pub fn new(format: ToolFormat, tools: &[Tool], prompt: &str) -> Self {
        let state = if ends_in_reasoning(prompt, format.0.reasoning) { State::Reasoning } else { State::Text };
        let mut parser = Self {
            format,
            tools: tools.to_vec(),
            turn: Turn::default(),
            state,
            at_start: true,
            held: String::new(),
            parts: Vec::new(),
        };
        // Such a prompt ends with the opening of the first message.
        if format == ToolFormat(&functionary::V3_2) && prompt.ends_with(functionary::OPEN) {
            parser.state = State::Call(functionary::OPEN);
        }
        parser
    }

    /// Takes the next piece of text; what it adds.
    pub fn push(&mut self, text: &str) -> Vec<TurnPart> {
        self.held.push_str(text);
        while self.step(false) {}
        std::mem::take(&mut self.parts)
    }

    /// The turn, when no more text comes.
    pub fn finish(mut self) -> Turn {
        self.finish_parts();
        self.turn
    }

    /// Ends the text: what that adds besides [`Turn::unfinished`], and [`Self::turn`] is whole.
    pub fn finish_parts(&mut self) -> Vec<TurnPart> {
        while self.step(true) {}
        std::mem::take(&mut self.parts)
    }

    /// The turn so far.
    pub fn turn(&self) -> &Turn {
        &self.turn
    }

    /// Deals with the beginning of what is held; whether there is more to deal with. `last` when no more text comes.
    fn step(&mut self, last: bool) -> bool {
        match self.state {
            State::Text => self.step_text(last),
            State::Reasoning => self.step_reasoning(last),
            State::Call(opening) => self.step_call(opening, last),
        }
    }

    fn step_text(&mut self, last: bool) -> bool {
        let format = self.format.0;
        if self.at_start {
            let white = self.held.len() - self.held.trim_start().len();
            self.held.drain(..white);
        }
        // The earliest marker, of several there the longest; and from where on one may still come.
        let mut found: Option<(usize, &'static str)> = None;
        let mut kept = self.held.len();
        let always = [format.reasoning.0].into_iter().chain(format.hidden.iter().copied());
        let openings = format.openings.iter();
        for (marker, only_at_start) in
            always.map(|m| (m, false)).chain(openings.map(|o| (o.text, o.at_start))).filter(|(m, _)| !m.is_empty())
        {
            let at = match only_at_start {
                false => self.held.find(marker),
                true => (self.at_start && self.held.starts_with(marker)).then_some(0),
            };
            if let Some(at) = at
                && found.is_none_or(|(first, longest)| at < first || at == first && marker.len() > longest.len())
            {
                found = Some((at, marker));
            }
            let mut begins =
                self.held.char_indices().map(|(i, _)| i).filter(|&i| !only_at_start || i == 0 && self.at_start);
            let begin = begins.find(|&i| marker.len() > self.held.len() - i && marker.starts_with(&self.held[i..]));
            kept = begin.map_or(kept, |begin| kept.min(begin));
        }
        if !last && found.is_none_or(|(at, _)| kept <= at) {
            let more = kept > 0;
            self.emit_text(kept);
            // What is left may become a marker: wait.
            return more && kept == self.held.len() && !self.held.is_empty();
        }
        let Some((at, marker)) = found else {
            self.emit_text(self.held.len());
            return false;
        };
        self.emit_text(at);
        if let Some(opening) = format.openings.iter().find(|o| o.text == marker) {
            self.held.drain(..if opening.keep { 0 } else { marker.len() });
            self.state = State::Call(opening.text);
        } else {
            self.held.drain(..marker.len());
            if marker == format.reasoning.0 {
                self.state = State::Reasoning;
            }
        }
        true
    }

    fn step_reasoning(&mut self, last: bool) -> bool {
        let close = self.format.0.reasoning.1;
        if let Some(at) = self.held.find(close) {
            self.emit_reasoning(at);
            self.held.drain(..close.len());
            (self.state, self.at_start) = (State::Text, true);
            return true;
        }
        let begin = self.held.char_indices().map(|(i, _)| i).find(|&i| close.starts_with(&self.held[i..]));
        let kept = if last { self.held.len() } else { begin.unwrap_or(self.held.len()) };
        self.emit_reasoning(kept);
        false
    }

    fn step_call(&mut self, opening: &'static str, last: bool) -> bool {
        let format = self.format.0;
        let keep = format.openings.iter().any(|o| o.text == opening && o.keep);
        let shown = if keep { "" } else { opening };
        match (format.scan)(&self.held) {
            Scan::More if !last => return false,
            Scan::Calls(len) => {
                let calls = (format.read)(&self.held[..len], &self.tools);
                self.end_call(shown, len, calls);
            }
            Scan::Text(len) => {
                self.held.drain(..len);
                (self.state, self.at_start) = (State::Text, true);
            }
            Scan::Nothing => self.end_call(shown, 0, None),
            // The end of the text is the end of a call that lacks only its end.
            Scan::More => match ((format.read)(&self.held, &self.tools), self.held.find(format.close)) {
                (Some(calls), _) => self.end_call(shown, self.held.len(), Some(calls)),
                (None, Some(at)) if !format.close.is_empty() => self.end_call(shown, at + format.close.len(), None),
                _ => {
                    let rest = std::mem::take(&mut self.held);
                    self.turn.unfinished = Some(format!("{shown}{rest}"));
                    self.state = State::Text;
                }
            },
        }
        !self.held.is_empty()
    }

    /// Leaves the call, of which `len` bytes are held: as `calls`, or as text.
    fn end_call(&mut self, shown: &str, len: usize, calls: Option<Vec<ToolCall>>) {
        self.state = State::Text;
        match calls {
            Some(calls) => {
                self.held.drain(..len);
                self.at_start = true;
                for call in calls {
                    self.turn.calls.push(call.clone());
                    self.parts.push(TurnPart::Call(call));
                }
            }
            None => {
                // At least one character, so that an opening that is part of it is not found again.
                let first = self.held.chars().next().map_or(0, char::len_utf8);
                let len = if shown.is_empty() { len.max(first) } else { len };
                self.held.insert_str(0, shown);
                self.at_start = false;
                self.emit_text(shown.len() + len);
            }
        }
    }

    fn emit_text(&mut self, len: usize) {
        if len > 0 {
            let text: String = self.held.drain(..len).collect();
            self.at_start = false;
            self.turn.text.push_str(&text);
            match self.parts.last_mut() {
                Some(TurnPart::Text(before)) => before.push_str(&text),
                _ => self.parts.push(TurnPart::Text(text)),
            }
        }
    }

    fn emit_reasoning(&mut self, len: usize) {
        let mut text: String = self.held.drain(..len).collect();
        if self.turn.reasoning.is_empty() {
            text = text.trim_start().to_owned();
        }
        if !text.is_empty() {
            self.turn.reasoning.push_str(&text);
            match self.parts.last_mut() {
                Some(TurnPart::Reasoning(before)) => before.push_str(&text),
                _ => self.parts.push(TurnPart::Reasoning(text)),
            }
        }
    }
}
