//! An answer as it comes: text, reasoning and calls, and how it ended.

use crate::serve::app::App;
use crate::serve::http::error::ApiError;
use crate::serve::jobs::recorder::Recorder;
use crate::serve::slots::SlotText;
use ruvllm::chat::tools::{ToolMask, TurnParser, TurnPart};
use ruvllm::sample::TokenMask;
use ruvllm::scheduler::Stream;
use ruvllm::{Finish, StopReason, TokenText};
use serde_json::{Value, json};
use std::future::poll_fn;

/// What a piece adds.
pub(crate) enum Delta {
    Reasoning(String),
    Text(String),
    /// A call begins.
    Call {
        /// The name under which its result is given.
        id: String,
        /// That of the function.
        name: String,
    },
    /// More of the JSON text of the arguments of the last call.
    Arguments(String),
}

/// One answer to a prompt.
pub(crate) struct Answer {
    /// Which of the answers to its request.
    pub(crate) index: usize,
    /// Tokens of its prompt.
    pub(crate) n_prompt: usize,
    stream: Stream,
    /// Of chats.
    reader: Option<Reader>,
    echo: Echo,
    /// Tokens of it so far.
    pub(crate) n_generated: usize,
    /// Tokens of its reasoning.
    n_reasoning: usize,
    /// Tokens since the last addition.
    n_pending: usize,
    is_over: bool,
    /// Records it at its end.
    recorder: Option<Recorder>,
    /// Keeps its text in a slot.
    slot: Option<SlotText>,
}

/// A piece, if there was one, and what it adds.
pub(crate) struct Step {
    pub(crate) piece: Option<TokenText>,
    pub(crate) deltas: Vec<Delta>,
}

/// Reader of a chat's answer: tells reasoning and calls from text.
#[derive(Clone)]
pub(crate) struct Reader {
    parser: TurnParser,
    /// As long as it is not known whether the answer is calls or a text of some form: what the
    /// tokens so far allow.
    either: Option<ToolMask>,
    /// It ends behind so many calls, if there are any.
    max_calls: usize,
    /// Calls that have begun, and those that are whole.
    n_begun: usize,
    n_whole: usize,
}

impl Reader {
    pub(crate) fn new(parser: TurnParser, either: Option<ToolMask>, max_calls: usize) -> Reader {
        Reader {
            parser,
            either,
            max_calls,
            n_begun: 0,
            n_whole: 0,
        }
    }

    /// Whether nothing may follow.
    fn is_done(&self) -> bool {
        self.n_whole > 0 && self.n_whole >= self.max_calls
    }

    /// What a piece adds.
    fn push(&mut self, piece: &TokenText) -> Vec<Delta> {
        if let Some(mask) = &mut self.either {
            let is_calls = match mask.accept(piece.token) {
                Ok(()) => mask.is_calls(),
                // Nothing that it allowed: whatever it is, it is no call.
                Err(_) => Some(false),
            };
            self.decide(is_calls);
        }
        let parts = self.parser.push(&piece.text);
        self.deltas(parts)
    }

    /// What the end adds.
    fn end(&mut self, is_cut: bool) -> Vec<Delta> {
        let is_calls = self.either.as_mut().map(ToolMask::ends_as_calls);
        self.decide(is_calls);
        let mut parts = if is_cut {
            self.parser.cut_parts()
        } else {
            self.parser.finish_parts()
        };
        let is_text = !is_cut && self.n_begun == self.n_whole;
        if let Some(text) = self.parser.turn().unfinished.clone().filter(|_| is_text) {
            parts.push(TurnPart::Text(text));
        }
        self.deltas(parts)
    }

    fn decide(&mut self, is_calls: Option<bool>) {
        if let Some(is_calls) = is_calls {
            self.either = None;
            self.parser.decide(is_calls);
        }
    }

    fn deltas(&mut self, parts: Vec<TurnPart>) -> Vec<Delta> {
        let mut deltas = Vec::new();
        for part in parts {
            // Where one begins, those before it are whole.
            if matches!(part, TurnPart::CallBegins { .. } | TurnPart::Call(_)) {
                self.n_whole = self.n_begun;
            }
            if self.is_done() {
                break;
            }
            deltas.push(match part {
                TurnPart::Reasoning(text) => Delta::Reasoning(text),
                TurnPart::Text(text) => Delta::Text(text),
                TurnPart::CallBegins { name, id } => {
                    self.n_begun += 1;
                    Delta::Call {
                        id: call_id(id),
                        name,
                    }
                }
                TurnPart::Arguments(text) => Delta::Arguments(text),
                _ => continue,
            });
        }
        deltas
    }
}

impl Answer {
    pub(crate) fn new(
        index: usize,
        n_prompt: usize,
        stream: Stream,
        reader: Option<Reader>,
        echo: Echo,
    ) -> Answer {
        Answer {
            index,
            n_prompt,
            stream,
            reader,
            echo,
            n_generated: 0,
            n_reasoning: 0,
            n_pending: 0,
            is_over: false,
            recorder: None,
            slot: None,
        }
    }

    /// The same, which is recorded at its end, and in a slot then.
    pub(crate) fn recorded(self, recorder: Option<Recorder>, slot: Option<SlotText>) -> Answer {
        Answer {
            recorder,
            slot,
            ..self
        }
    }

    /// What comes next; nothing behind the end.
    pub(crate) async fn next(&mut self) -> Option<Result<Step, ApiError>> {
        if self.is_over {
            return None;
        }
        if let Echo::Text(text) = &mut self.echo {
            let deltas = vec![Delta::Text(std::mem::take(text))];
            self.echo = Echo::None;
            let piece = None;
            return Some(Ok(Step { piece, deltas }));
        }
        let piece = match poll_fn(|cx| self.stream.poll_next(cx)).await {
            Some(Ok(mut piece)) => {
                if let Some(text) = self.echo.next() {
                    piece.text.clone_from(&text);
                    let deltas = vec![Delta::Text(text)];
                    let piece = Some(piece);
                    return Some(Ok(Step { piece, deltas }));
                }
                Some(piece)
            }
            Some(Err(error)) => {
                self.is_over = true;
                return Some(Err(error.into()));
            }
            None => None,
        };
        self.is_over = piece.is_none();
        self.n_generated += usize::from(piece.is_some());
        match (&piece, &mut self.slot) {
            (Some(piece), Some(slot)) => slot.push(piece.token),
            (None, slot) => drop(slot.take()),
            (Some(_), None) => {}
        }
        match (&piece, &mut self.recorder) {
            (Some(piece), Some(recorder)) => recorder.push(piece.token),
            (None, recorder) => {
                if let Some(recorder) = recorder.take() {
                    recorder.finish(self.stream.take_pooled());
                }
            }
            (Some(_), None) => {}
        }
        let is_cut = !matches!(
            self.finish().map(|finish| finish.reason),
            Some(StopReason::EndOfGeneration | StopReason::StopString)
        );
        let deltas = match (&mut self.reader, &piece) {
            (None, Some(piece)) if !piece.text.is_empty() => vec![Delta::Text(piece.text.clone())],
            (None, _) => Vec::new(),
            (Some(reader), Some(piece)) => reader.push(piece),
            (Some(reader), None) => reader.end(is_cut),
        };
        self.count(piece.is_some(), &deltas);
        if !self.is_over && self.reader.as_ref().is_some_and(Reader::is_done) {
            self.stream.cancel();
        }
        Some(Ok(Step { piece, deltas }))
    }

    /// Counts a token for what it adds to; one that adds nothing yet, as a part of a marker, for what
    /// comes next.
    fn count(&mut self, is_token: bool, deltas: &[Delta]) {
        self.n_pending += usize::from(is_token);
        if let Some(first) = deltas.first() {
            let n = std::mem::take(&mut self.n_pending);
            self.n_reasoning += if matches!(first, Delta::Reasoning(_)) {
                n
            } else {
                0
            };
        }
    }

    /// Tokens of its reasoning so far.
    pub(crate) fn n_reasoning(&self) -> usize {
        self.n_reasoning
    }

    /// How it ended.
    pub(crate) fn finish(&self) -> Option<Finish> {
        self.stream.finish()
    }

    /// Whether a limit ended it.
    pub(crate) fn is_cut(&self) -> bool {
        self.finish_reason() == "length"
    }

    /// Why it ended, in the OpenAI API's words.
    pub(crate) fn finish_reason(&self) -> &'static str {
        let reader = self.reader.as_ref();
        match self.finish().map(|finish| finish.reason) {
            _ if reader.is_some_and(Reader::is_done) => "tool_calls",
            Some(StopReason::EndOfGeneration | StopReason::StopString) => {
                match reader.is_some_and(|reader| reader.n_whole > 0) {
                    true => "tool_calls",
                    false => "stop",
                }
            }
            _ => "length",
        }
    }
}

/// What of the prompt an answer begins with.
pub(crate) enum Echo {
    None,
    /// Its text.
    Text(String),
    /// The texts of its tokens, whose pieces come first.
    Tokens(std::vec::IntoIter<String>),
}

impl Echo {
    /// The text of the next token.
    fn next(&mut self) -> Option<String> {
        match self {
            Echo::Tokens(texts) => texts.next(),
            _ => None,
        }
    }
}

/// Numbers of tokens of the answers to a request.
#[derive(Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    pub(crate) completion: usize,
    pub(crate) cached: usize,
}

impl Usage {
    /// Adds an answer; answers to one prompt have it in common.
    pub(crate) fn add(&mut self, finish: &Finish, is_first: bool) {
        let cached = finish.n_cached.total();
        if is_first {
            self.prompt += finish.n_prompt + cached;
            self.cached += cached;
        }
        self.completion += finish.n_generated;
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt, "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

/// Where the time went, in llama-server's words.
pub(crate) fn timings(finish: &Finish) -> Value {
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    let rate = |n: usize, ms: f64| if ms > 0.0 { n as f64 * 1e3 / ms } else { 0.0 };
    let (prompt, decode) = (ms(finish.timings.prefill), ms(finish.timings.decode));
    let each = |n: usize, ms: f64| if n > 0 { ms / n as f64 } else { 0.0 };
    let (n_prompt, n) = (finish.n_prompt, finish.n_generated);
    let mut timings = json!({
        "cache_n": finish.n_cached.total(),
        "prompt_n": n_prompt, "prompt_ms": prompt,
        "prompt_per_token_ms": each(n_prompt, prompt), "prompt_per_second": rate(n_prompt, prompt),
        "predicted_n": n, "predicted_ms": decode,
        "predicted_per_token_ms": each(n, decode), "predicted_per_second": rate(n, decode),
    });
    if finish.drafts.n_drafted > 0 {
        timings["draft_n"] = finish.drafts.n_drafted.into();
        timings["draft_n_accepted"] = finish.drafts.n_accepted.into();
    }
    timings
}

/// The name of a call: the model's own, if it gave one.
fn call_id(id: Option<String>) -> String {
    id.unwrap_or_else(crate::serve::ids::short_id)
}

/// A token as lists of log-probabilities tell it: what is no text in bytes, so that no two tokens
/// look the same.
pub(crate) fn token_text(app: &App, token: u32) -> String {
    let bytes = app.tokenizer.token_bytes(token).unwrap_or_default();
    String::from_utf8(bytes).unwrap_or_else(|error| {
        let bytes = error.as_bytes().iter();
        let escapes = bytes.map(|byte| format!("\\x{byte:02x}"));
        format!("bytes:{}", escapes.collect::<String>())
    })
}

/// A log-probability in JSON, which has no infinities; the OpenAI API's own smallest is -9999.
pub(crate) fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() {
        logprob
    } else {
        -9999.0
    }
}

/// The log-probability of a token, in the form of chats.
pub(crate) fn chat_logprob(app: &App, token: u32, logprob: f32) -> Value {
    let bytes = app.tokenizer.token_bytes(token).unwrap_or_default();
    json!({"token": String::from_utf8_lossy(&bytes), "logprob": finite(logprob), "bytes": bytes})
}
