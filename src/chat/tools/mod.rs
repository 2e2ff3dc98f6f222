//! Function calling: the calls in a model's text, in the format that the model was trained on.
//!
//! Families write calls in different ways. A [`ToolFormat`] is one of them, chosen [by the
//! template](ToolFormat::of). A [`TurnParser`] takes the text of an answer as it arrives and
//! separates reasoning, text and calls; the same text gives the same [`Turn`], however it is cut
//! into pieces, and nothing is lost: text that looks like a call but is none is kept as text, and
//! an incomplete call is [`Turn::unfinished`]. Without tools nothing is a call, whatever it looks
//! like.
//!
//! ```
//! use ruvllm::chat::tools::{Tool, ToolFormat, TurnParser};
//! let format = ToolFormat::of("… <tool_call> …");
//! let tools = [Tool::new("weather", serde_json::json!({"type": "object"}))];
//! let mut parser = TurnParser::new(format, &tools, "");
//! for piece in ["<think>Rain?</think>Let me see. <tool_", "call>\n{\"name\": \"weather\", \"arguments\"", ": {\"city\": \"Oslo\"}}\n</tool_call>"] {
//!     parser.push(piece);
//! }
//! let turn = parser.finish();
//! assert_eq!((&turn.reasoning[..], &turn.text[..]), ("Rain?", "Let me see. "));
//! assert_eq!(turn.calls[0].name, "weather");
//! assert_eq!(turn.calls[0].arguments["city"], "Oslo");
//! ```
//!
//! With the feature `grammar`, `ToolMask` makes the arguments of calls match the parameters of
//! their tools, and can forbid or require calls.
//!
//! A format is a file with one `Format`, and one line in `FORMATS`.

mod apertus;
mod apriel;
mod call;
#[cfg(feature = "grammar")]
mod choice;
mod command_r;
mod command_r_plus;
mod deepseek;
mod dsml;
#[cfg(feature = "grammar")]
mod enforce;
mod firefunction;
mod functionary;
mod gemma;
mod generic;
mod gigachat;
mod glm;
mod granite;
mod harmony;
mod hermes;
mod hy3;
mod kimi;
mod kimi_k3;
mod lfm2;
mod lfm25;
mod listed;
mod llama3;
mod minicpm5;
mod minimax;
mod minimax_m1;
mod minimax_m3;
mod mistral;
mod muse_glimmer;
mod nemotron_v2;
mod phi4;
mod qwen3_coder;
#[cfg(feature = "grammar")]
mod reasoning;
mod seed_oss;
mod solar_open;
mod tagged;
mod values;
mod written;

use crate::chat::ChatError;
#[cfg(feature = "grammar")]
pub use choice::{ToolChoice, ToolMask};
#[cfg(feature = "grammar")]
pub use reasoning::AfterReasoning;
use serde_json::{Map, Value};
use std::cell::RefCell;
use written::Written;

/// All formats. A template has the first one whose marks it contains; the last format has no marks.
const FORMATS: &[&Format] = &[
    &harmony::FORMAT,
    &gemma::GEMMA4,
    &gemma::FUNCTION_GEMMA,
    &deepseek::V3,
    &deepseek::V3_1,
    &tagged::format::<dsml::V3_2>(),
    &tagged::format::<dsml::V4>(),
    &kimi::FORMAT,
    &tagged::format::<kimi_k3::KimiK3>(),
    &minimax::FORMAT,
    &minimax_m3::FORMAT,
    &command_r::FORMAT,
    &lfm2::FORMAT,
    &lfm25::FORMAT,
    &muse_glimmer::FORMAT,
    &solar_open::FORMAT,
    &tagged::format::<seed_oss::SeedOss>(),
    &tagged::format::<hy3::Hy3>(),
    &tagged::format::<minicpm5::MiniCpm5>(),
    &listed::format::<apertus::Apertus>(),
    &listed::format::<apriel::Apriel>(),
    &listed::format::<minimax_m1::MiniMaxM1>(),
    &listed::format::<nemotron_v2::NemotronV2>(),
    &listed::format::<gigachat::V3_1>(),
    &listed::format::<gigachat::V3>(),
    &listed::format::<firefunction::Firefunction>(),
    &glm::FORMAT,
    &qwen3_coder::FORMAT,
    &functionary::V3_1,
    &functionary::V3_2,
    &mistral::V11,
    &mistral::V3,
    &phi4::FORMAT,
    &granite::FORMAT,
    &listed::format::<command_r_plus::CommandRPlus>(),
    &hermes::FORMAT,
    &llama3::FORMAT,
    &generic::FORMAT,
];

/// Call format of a family.
struct Format {
    name: &'static str,
    /// Texts that its templates all contain, and templates of later formats do not.
    marks: &'static [&'static str],
    /// Markers around reasoning.
    reasoning: (&'static str, &'static str),
    /// Markers that are dropped from text.
    hidden: &'static [&'static str],
    /// Openings of calls.
    openings: &'static [Opening],
    /// End of the calls; searched for if a call cannot be read.
    close: &'static str,
    /// Finds the end of the calls after an opening.
    scan: fn(&str) -> Scan,
    /// Reads the calls between an opening and its end; `None` if there are none.
    read: fn(&str, &[Tool]) -> Option<Vec<ToolCall>>,
    /// Reads what is certain of the calls between an opening and an end that is still to come.
    written: fn(&str, &[Tool]) -> Vec<Written>,
    /// Lark grammar of the text from an opening to its end, including the end.
    #[cfg_attr(not(feature = "grammar"), allow(dead_code))]
    grammar: fn(&[Tool], &Marks<'_>) -> Result<String, ChatError>,
}

/// A text that begins calls.
#[derive(Clone, Copy)]
struct Opening {
    text: &'static str,
    /// Whether it counts only at the start of an answer, after reasoning or after another call.
    at_start: bool,
    /// Whether the text is part of the call.
    keep: bool,
}

impl Opening {
    /// A marker as an opening, anywhere in the text.
    const fn marker(text: &'static str) -> Opening {
        Opening {
            text,
            at_start: false,
            keep: false,
        }
    }

    /// An opening at the start that is part of the call.
    const fn start(text: &'static str) -> Opening {
        Opening {
            text,
            at_start: true,
            keep: true,
        }
    }
}

/// Result of scanning the text after an opening. It depends only on the bytes that it covers.
#[derive(Debug, PartialEq)]
enum Scan {
    /// Incomplete so far.
    More,
    /// Calls of this many bytes.
    Calls(usize),
    /// No call.
    Nothing,
}

/// Inputs for writing the grammar of a format.
struct Marks<'a> {
    /// The special token with a text.
    special: &'a dyn Fn(&str) -> Option<u32>,
    /// Regular expression, in Lark, of the texts in which a pattern of JSON Schema matches.
    pattern: &'a dyn Fn(&str) -> Option<String>,
    /// The same, of the texts of a format of JSON Schema.
    format: &'a dyn Fn(&str) -> Option<String>,
    /// Parts that the grammars do not enforce.
    loosened: RefCell<Vec<LoosenedTool>>,
}

impl Marks<'_> {
    /// A marker: as a special token if the vocabulary has it, otherwise as text.
    fn lark(&self, text: &str) -> String {
        lark_marker((self.special)(text), text)
    }

    /// Names what the grammar of tool number `index` does not enforce.
    ///
    /// # Errors
    /// [`ChatError::Tool`] if the tool is strict.
    fn loosen(
        &self,
        (index, tool): (usize, &Tool),
        (path, keyword): (&str, &str),
        message: &str,
    ) -> Result<(), ChatError> {
        if tool.strict {
            let name = &tool.name;
            let message = format!("{name:?}, parameters: {keyword:?} at {path:?} {message}");
            return Err(ChatError::Tool { index, message });
        }
        let loosened = LoosenedTool {
            index,
            name: tool.name.clone(),
            keyword: keyword.to_owned(),
            path: path.to_owned(),
            message: message.to_owned(),
        };
        let mut all = self.loosened.borrow_mut();
        if !all.contains(&loosened) {
            all.push(loosened);
        }
        Ok(())
    }
}

/// Something in the parameters of a tool that is not enforced in its calls.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoosenedTool {
    /// Number of the tool.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// The keyword; `schema` for all of them.
    pub keyword: String,
    /// Where the schema with the keyword is in the parameters, as a JSON pointer.
    pub path: String,
    /// Why it is not enforced.
    pub message: String,
}

/// A marker in Lark, which is the special token `id` if the vocabulary has it.
fn lark_marker(id: Option<u32>, text: &str) -> String {
    id.map_or_else(|| lark_text(text), |id| format!("<[{id}]>"))
}

/// A text as a Lark string.
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
    /// Whether parameters that cannot be enforced are an error. If not, calls obey what can be.
    pub strict: bool,
}

/// Maximum number of tools.
const MAX_TOOLS: usize = 256;

/// Refuses too many tools.
fn check_number(n: usize) -> Result<(), ChatError> {
    if n <= MAX_TOOLS {
        return Ok(());
    }
    Err(ChatError::Tool {
        index: MAX_TOOLS,
        message: format!("there are {n} tools; the limit is {MAX_TOOLS}"),
    })
}

impl Tool {
    /// Makes a tool that is not strict.
    pub fn new(name: impl Into<String>, parameters: Value) -> Self {
        Self {
            name: name.into(),
            parameters,
            strict: false,
        }
    }

    /// Parses the tools of [`ChatInputs::tools`](super::ChatInputs::tools): an array in the OpenAI
    /// form, with or without `{"type": "function", "function": …}` around each.
    ///
    /// # Errors
    /// [`ChatError::Tool`], with the position of the error.
    pub fn from_json(tools: &Value) -> Result<Vec<Self>, ChatError> {
        let wrong = |index, message: &str| ChatError::Tool {
            index,
            message: message.to_owned(),
        };
        let tools = tools
            .as_array()
            .ok_or_else(|| wrong(0, "the tools are not an array"))?;
        // Before anything else reads them.
        check_number(tools.len())?;
        (tools.iter().enumerate())
            .map(|(i, tool)| {
                let outer = tool;
                let tool = tool.get("function").unwrap_or(tool);
                let name = tool
                    .get("name")
                    .and_then(Value::as_str)
                    .filter(|name| !name.is_empty());
                let name = name.ok_or_else(|| wrong(i, "it has no name"))?;
                let parameters = match tool.get("parameters") {
                    // A function without parameters takes no arguments.
                    None | Some(Value::Null) => serde_json::json!({
                        "type": "object", "properties": {}, "additionalProperties": false,
                    }),
                    Some(parameters) if parameters.is_object() => parameters.clone(),
                    Some(_) => return Err(wrong(i, "its parameters are not a JSON Schema")),
                };
                let strict = tool.get("strict").or(outer.get("strict"));
                Ok(Tool {
                    strict: strict.and_then(Value::as_bool).unwrap_or(false),
                    ..Tool::new(name, parameters)
                })
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
    /// Id of the call, if the model gave one.
    pub id: Option<String>,
}

/// The parts of an answer, each in order of appearance.
#[derive(Clone, Debug, PartialEq, Default)]
#[non_exhaustive]
pub struct Turn {
    /// Reasoning of the model.
    pub reasoning: String,
    /// Text for the user.
    pub text: String,
    /// Calls of tools.
    pub calls: Vec<ToolCall>,
    /// An incomplete call at the end, or in a text that was [cut](TurnParser::cut_parts) what may
    /// be the beginning of one, as the model wrote it.
    pub unfinished: Option<String>,
}

/// An addition to a [`Turn`] by a chunk of text.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TurnPart {
    /// More of [`Turn::reasoning`].
    Reasoning(String),
    /// More of [`Turn::text`].
    Text(String),
    /// Beginning of a call, if calls are reported [as they are written](TurnParser::eager).
    CallBegins {
        /// The function's name.
        name: String,
        /// Id of the call, if the model gave one.
        id: Option<String>,
    },
    /// More of the JSON text of the arguments of the call that has begun.
    Arguments(String),
    /// One more of [`Turn::calls`].
    Call(ToolCall),
}

/// Call format of a family of models.
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
    /// The format in which a chat template writes calls. If it has none, a JSON object with `name`
    /// and `arguments`.
    pub fn of(template: &str) -> Self {
        let found = FORMATS
            .iter()
            .find(|format| format.marks.iter().all(|mark| template.contains(mark)));
        Self(found.copied().unwrap_or(&generic::FORMAT))
    }

    /// The format with this [name](Self::name).
    pub fn by_name(name: &str) -> Option<Self> {
        FORMATS
            .iter()
            .find(|format| format.name == name)
            .map(|format| Self(format))
    }

    /// The names of all formats.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FORMATS.iter().map(|format| format.name)
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.0.name
    }

    /// The first call of `name` in a text, with its marks.
    pub(super) fn call_in<'a>(&self, text: &'a str, name: &str) -> Option<&'a str> {
        let openings = self.0.openings.iter();
        let all = openings.flat_map(|opening| {
            text.match_indices(opening.text)
                .map(move |(at, _)| (at, opening))
        });
        let call = |(at, opening): (usize, &Opening)| {
            let begin = if opening.keep {
                at
            } else {
                at + opening.text.len()
            };
            match (self.0.scan)(&text[begin..]) {
                Scan::Calls(len) => Some(&text[at..begin + len]),
                _ => None,
            }
        };
        all.filter_map(call).find(|call| call.contains(name))
    }
}

impl Format {
    /// The opening with which `prompt` ends, where messages for the user begin with it as calls do.
    fn opened_by(&self, prompt: &str) -> Option<&'static Opening> {
        self.openings.iter().find(|opening| {
            prompt.ends_with(opening.text) && self.texts_behind(opening).next().is_some()
        })
    }

    /// What makes an opening the mark of a message for the user.
    fn texts_behind(&self, opening: &Opening) -> impl Iterator<Item = &'static str> {
        let rests = self
            .hidden
            .iter()
            .filter_map(|mark| mark.strip_prefix(opening.text));
        rests.filter(|rest| !rest.is_empty())
    }
}

/// Whether `prompt` ends inside the markers `reasoning`.
fn ends_in_reasoning(prompt: &str, reasoning: (&str, &str)) -> bool {
    !reasoning.0.is_empty() && prompt.trim_end().ends_with(reasoning.0.trim_end())
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Text,
    Reasoning,
    /// After this opening.
    Call(&'static str),
}

/// Reading of text other than reasoning.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reading {
    /// Markers are searched for.
    Free,
    /// As it is: markers are searched for only at the start.
    Verbatim,
    /// Not yet: it is one of the two.
    Undecided,
}

/// Parses the text of an answer, including special tokens, into a [`Turn`].
#[derive(Clone, Debug)]
pub struct TurnParser {
    format: ToolFormat,
    tools: Vec<Tool>,
    turn: Turn,
    state: State,
    reading: Reading,
    /// Whether calls are reported as they are written.
    eager: bool,
    /// In the block that is being written: number of calls reported so far, and reported bytes of
    /// the last one's arguments.
    told: (usize, usize),
    /// Whether the text was cut off.
    is_cut: bool,
    /// Whether only white space came since the start, the reasoning or the last call.
    at_start: bool,
    /// Pending text: a possible start of a marker, or an incomplete call.
    held: String,
    parts: Vec<TurnPart>,
}

impl TurnParser {
    /// A parser of the answer to `prompt`, the rendered template, which may end inside the model's
    /// reasoning. `tools` are those that the model may call: if there are none, nothing is read
    /// as a call.
    pub fn new(format: ToolFormat, tools: &[Tool], prompt: &str) -> Self {
        let state = if ends_in_reasoning(prompt, format.0.reasoning) {
            State::Reasoning
        } else {
            State::Text
        };
        let opened = format.0.opened_by(prompt);
        Self {
            format,
            tools: tools.to_vec(),
            turn: Turn::default(),
            state,
            reading: Reading::Free,
            eager: false,
            told: (0, 0),
            is_cut: false,
            at_start: true,
            held: opened.map_or(String::new(), |opening| opening.text.to_owned()),
            parts: Vec::new(),
        }
    }

    /// For an answer that obeys a grammar: reasoning may come first, and all text after it is kept
    /// unchanged, whatever markers it contains.
    #[must_use]
    pub fn verbatim(mut self) -> Self {
        self.reading = Reading::Verbatim;
        // The grammar does not cover what the prompt opened.
        self.held.clear();
        self
    }

    /// For an answer with calls enforced by a grammar, so that the beginning of a call is certain:
    /// calls are reported as they are written, with [`TurnPart::CallBegins`] and
    /// [`TurnPart::Arguments`].
    #[must_use]
    pub fn eager(mut self) -> Self {
        self.eager = true;
        self
    }

    /// For an answer that is calls or a text that obeys a grammar: the text after reasoning is kept
    /// until it is [known](TurnParser::decide) which of the two it is.
    #[must_use]
    pub fn undecided(mut self) -> Self {
        self.reading = Reading::Undecided;
        self.held.clear();
        self
    }

    /// For an answer that is calls and nothing else, each with its opening, after reasoning.
    #[must_use]
    pub fn calls(mut self) -> Self {
        self.held.clear();
        self
    }

    /// Says whether an [undecided](TurnParser::undecided) answer is calls; otherwise it is
    /// [verbatim](TurnParser::verbatim).
    pub fn decide(&mut self, is_calls: bool) {
        self.reading = if is_calls {
            Reading::Free
        } else {
            Reading::Verbatim
        };
    }

    /// For an answer whose beginning is in the prompt: white space at its start is part of the text.
    #[must_use]
    pub fn within_text(mut self) -> Self {
        self.at_start = false;
        self
    }

    /// Takes the next chunk of text; returns its additions to the turn.
    pub fn push(&mut self, text: &str) -> Vec<TurnPart> {
        self.held.push_str(text);
        while self.step(false) {}
        std::mem::take(&mut self.parts)
    }

    /// The turn, once no more text comes.
    pub fn finish(mut self) -> Turn {
        self.finish_parts();
        self.turn
    }

    /// Ends the text: returns what that adds, except [`Turn::unfinished`], and completes
    /// [`Self::turn`].
    pub fn finish_parts(&mut self) -> Vec<TurnPart> {
        while self.step(true) {}
        std::mem::take(&mut self.parts)
    }

    /// As [`Self::finish_parts`], for a text that was cut off: what may be the beginning of a call
    /// is [`Turn::unfinished`], not text.
    pub fn cut_parts(&mut self) -> Vec<TurnPart> {
        self.is_cut = true;
        self.finish_parts()
    }

    /// The turn so far.
    pub fn turn(&self) -> &Turn {
        &self.turn
    }

    /// Processes the start of the pending text; returns whether there is more to process. `last`
    /// means that no more text comes.
    fn step(&mut self, last: bool) -> bool {
        match self.state {
            State::Text => self.step_text(last),
            State::Reasoning => self.step_reasoning(last),
            State::Call(opening) => self.step_call(opening, last),
        }
    }

    fn step_text(&mut self, last: bool) -> bool {
        if self.reading == Reading::Undecided {
            return false;
        }
        let (format, verbatim) = (self.format.0, self.reading == Reading::Verbatim);
        if self.at_start {
            let white = self.held.len() - self.held.trim_start().len();
            self.held.drain(..white);
        }
        // Finds the earliest marker, the longest if several start there; and the position from
        // which a marker may still be completed.
        let mut found: Option<(usize, &'static str)> = None;
        let mut kept = self.held.len();
        let hidden = if verbatim { &[][..] } else { format.hidden };
        let openings = self.openings();
        let markers = [(format.reasoning.0, verbatim)].into_iter();
        let markers = markers.chain(hidden.iter().map(|&marker| (marker, false)));
        let markers = markers.chain(
            openings
                .iter()
                .map(|opening| (opening.text, opening.at_start)),
        );
        for (marker, only_at_start) in markers.filter(|(marker, _)| !marker.is_empty()) {
            let at = match only_at_start {
                false => self.held.find(marker),
                true => (self.at_start && self.held.starts_with(marker)).then_some(0),
            };
            if let Some(at) = at
                && found.is_none_or(|(first, longest)| {
                    at < first || at == first && marker.len() > longest.len()
                })
            {
                found = Some((at, marker));
            }
            let mut begins = self
                .held
                .char_indices()
                .map(|(i, _)| i)
                .filter(|&i| !only_at_start || i == 0 && self.at_start);
            let begin = begins.find(|&i| {
                marker.len() > self.held.len() - i && marker.starts_with(&self.held[i..])
            });
            kept = begin.map_or(kept, |begin| kept.min(begin));
        }
        if !last && found.is_none_or(|(at, _)| kept <= at) {
            let more = kept > 0;
            self.emit_text(kept);
            // The rest may become a marker: wait.
            return more && kept == self.held.len() && !self.held.is_empty();
        }
        let Some((at, marker)) = found else {
            let end = self.begun_opening().filter(|_| self.is_cut);
            self.emit_text(end.unwrap_or(self.held.len()));
            if end.is_some() {
                self.turn.unfinished = Some(std::mem::take(&mut self.held));
            }
            return false;
        };
        self.emit_text(at);
        if let Some(opening) = format.openings.iter().find(|o| o.text == marker) {
            self.held
                .drain(..if opening.keep { 0 } else { marker.len() });
            self.state = State::Call(opening.text);
        } else {
            self.held.drain(..marker.len());
            if marker == format.reasoning.0 {
                self.state = State::Reasoning;
            }
        }
        true
    }

    /// The openings of calls that are searched for.
    fn openings(&self) -> &'static [Opening] {
        if self.reading == Reading::Free && !self.tools.is_empty() {
            self.format.0.openings
        } else {
            &[]
        }
    }

    /// Position of an incomplete opening at the end of the pending text.
    fn begun_opening(&self) -> Option<usize> {
        let mut ends = self.held.char_indices().map(|(at, _)| at);
        ends.find(|&at| {
            let rest = &self.held[at..];
            self.openings().iter().any(|opening| {
                (!opening.at_start || at == 0 && self.at_start) && opening.text.starts_with(rest)
            })
        })
    }

    fn step_reasoning(&mut self, last: bool) -> bool {
        let close = self.format.0.reasoning.1;
        if let Some(at) = self.held.find(close) {
            self.emit_reasoning(at);
            self.held.drain(..close.len());
            (self.state, self.at_start) = (State::Text, true);
            return true;
        }
        let begin = self
            .held
            .char_indices()
            .map(|(i, _)| i)
            .find(|&i| close.starts_with(&self.held[i..]));
        let kept = if last {
            self.held.len()
        } else {
            begin.unwrap_or(self.held.len())
        };
        self.emit_reasoning(kept);
        false
    }

    fn step_call(&mut self, opening: &'static str, last: bool) -> bool {
        let format = self.format.0;
        let keep = format.openings.iter().any(|o| o.text == opening && o.keep);
        let shown = if keep { "" } else { opening };
        match (format.scan)(&self.held) {
            Scan::More if !last => {
                if self.eager {
                    self.tell_written((format.written)(&self.held, &self.tools));
                }
                return false;
            }
            Scan::Calls(len) => {
                let calls = (format.read)(&self.held[..len], &self.tools);
                self.end_call(shown, len, calls);
            }
            Scan::Nothing => self.end_call(shown, 0, None),
            // At the end of the text, a call may lack only its end marker.
            Scan::More => match (
                (format.read)(&self.held, &self.tools),
                self.held.find(format.close),
            ) {
                (Some(calls), _) => self.end_call(shown, self.held.len(), Some(calls)),
                (None, Some(at)) if !format.close.is_empty() => {
                    self.end_call(shown, at + format.close.len(), None)
                }
                _ => {
                    if self.eager {
                        self.tell_written((format.written)(&self.held, &self.tools));
                    }
                    let rest = std::mem::take(&mut self.held);
                    self.turn.unfinished = Some(format!("{shown}{rest}"));
                    self.state = State::Text;
                }
            },
        }
        !self.held.is_empty()
    }

    /// Tells what is new of the calls in the block that is being written.
    fn tell_written(&mut self, calls: Vec<Written>) {
        let (mut n_begun, mut n_bytes) = self.told;
        for (i, call) in calls.into_iter().enumerate().skip(n_begun.max(1) - 1) {
            let Written {
                name,
                id,
                arguments,
            } = call;
            if i == n_begun {
                (n_begun, n_bytes) = (i + 1, 0);
                self.parts.push(TurnPart::CallBegins { name, id });
            }
            let more = arguments.get(n_bytes..).unwrap_or_default();
            n_bytes += more.len();
            if !more.is_empty() {
                self.parts.push(TurnPart::Arguments(more.to_owned()));
            }
        }
        self.told = (n_begun, n_bytes);
    }

    /// [`Self::tell_written`] of a block of `len` bytes that is whole.
    fn tell_whole(&mut self, len: usize, calls: &[ToolCall]) {
        let mut written = (self.format.0.written)(&self.held[..len], &self.tools).into_iter();
        let whole = calls.iter().map(|call| {
            let written = written.next().filter(|call| !call.arguments.is_empty());
            written.unwrap_or_else(|| Written {
                name: call.name.clone(),
                id: call.id.clone(),
                arguments: Value::Object(call.arguments.clone()).to_string(),
            })
        });
        let whole = whole.collect();
        self.tell_written(whole);
    }

    /// Ends the call, with `len` pending bytes, as `calls` or as text.
    fn end_call(&mut self, shown: &str, len: usize, calls: Option<Vec<ToolCall>>) {
        self.state = State::Text;
        if let Some(calls) = calls.as_ref().filter(|_| self.eager) {
            self.tell_whole(len, calls);
        }
        self.told = (0, 0);
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
                // At least one character, so that an opening that is part of the text is not found
                // again.
                let first = self.held.chars().next().map_or(0, char::len_utf8);
                let len = if shown.is_empty() {
                    len.max(first)
                } else {
                    len
                };
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
