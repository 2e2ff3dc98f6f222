//! An answer as it comes: text, reasoning and calls, and how it ended.

use crate::serve::app::App;
use crate::serve::http::error::ApiError;
use crate::serve::jobs::recorder::Recorder;
use ruvllm::chat::tools::{ToolCall, TurnParser, TurnPart};
use ruvllm::decode::{Finish, Piece, StopReason};
use ruvllm::scheduler::Stream;
use serde_json::{Value, json};
use std::future::poll_fn;

/// What a piece adds.
pub(crate) enum Delta {
    Reasoning(String),
    Text(String),
    /// A call, and which of the answer's it is.
    Call(usize, ToolCall),
}

/// One answer to a prompt.
pub(crate) struct Answer {
    /// Which of the answers to its request.
    pub(crate) index: usize,
    /// Tokens of its prompt.
    pub(crate) n_prompt: usize,
    stream: Stream,
    /// Of chats: tells reasoning and calls from text.
    parser: Option<TurnParser>,
    n_calls: usize,
    /// Ends behind the first call.
    one_call: bool,
    is_over: bool,
    /// Records it at its end.
    recorder: Option<Recorder>,
}

/// A piece, if there was one, and what it adds.
pub(crate) struct Step {
    pub(crate) piece: Option<Piece>,
    pub(crate) deltas: Vec<Delta>,
}

impl Answer {
    pub(crate) fn new(
        index: usize,
        n_prompt: usize,
        stream: Stream,
        parser: Option<TurnParser>,
        one_call: bool,
    ) -> Answer {
        Answer {
            index,
            n_prompt,
            stream,
            parser,
            n_calls: 0,
            one_call,
            is_over: false,
            recorder: None,
        }
    }

    /// The same, which is recorded at its end.
    pub(crate) fn recorded(self, recorder: Option<Recorder>) -> Answer {
        Answer { recorder, ..self }
    }

    /// What comes next; nothing behind the end.
    pub(crate) async fn next(&mut self) -> Option<Result<Step, ApiError>> {
        if self.is_over {
            return None;
        }
        let piece = match poll_fn(|cx| self.stream.poll_next(cx)).await {
            Some(Ok(piece)) => Some(piece),
            Some(Err(error)) => {
                self.is_over = true;
                return Some(Err(error.into()));
            }
            None => None,
        };
        self.is_over = piece.is_none();
        match (&piece, &mut self.recorder) {
            (Some(piece), Some(recorder)) => recorder.push(piece.token),
            (None, recorder) => {
                if let Some(recorder) = recorder.take() {
                    recorder.finish(self.stream.take_pooled());
                }
            }
            (Some(_), None) => {}
        }
        let deltas = match (&mut self.parser, &piece) {
            (None, Some(piece)) if !piece.text.is_empty() => vec![Delta::Text(piece.text.clone())],
            (None, _) => Vec::new(),
            (Some(parser), Some(piece)) => {
                let parts = parser.push(&piece.text);
                self.deltas(parts)
            }
            (Some(parser), None) => {
                let mut parts = parser.finish_parts();
                // A call that was cut off is text to whoever asked.
                parts.extend(parser.turn().unfinished.clone().map(TurnPart::Text));
                self.deltas(parts)
            }
        };
        if self.one_call && self.n_calls > 0 && !self.is_over {
            self.stream.cancel();
        }
        Some(Ok(Step { piece, deltas }))
    }

    fn deltas(&mut self, parts: Vec<TurnPart>) -> Vec<Delta> {
        let mut deltas = Vec::new();
        for part in parts {
            if self.one_call && self.n_calls > 0 {
                break;
            }
            deltas.push(match part {
                TurnPart::Reasoning(text) => Delta::Reasoning(text),
                TurnPart::Call(call) => {
                    self.n_calls += 1;
                    Delta::Call(self.n_calls - 1, call)
                }
                TurnPart::Text(text) => Delta::Text(text),
                _ => continue,
            });
        }
        deltas
    }

    /// How it ended.
    pub(crate) fn finish(&self) -> Option<Finish> {
        self.stream.finish()
    }

    /// Why it ended, in the OpenAI API's words.
    pub(crate) fn finish_reason(&self) -> &'static str {
        match self.finish().map(|finish| finish.reason) {
            _ if self.n_calls > 0 => "tool_calls",
            Some(StopReason::EndOfGeneration | StopReason::StopString) => "stop",
            _ => "length",
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
pub(crate) fn call_id(call: &ToolCall) -> String {
    call.id.clone().unwrap_or_else(crate::serve::ids::short_id)
}

/// A token as lists of log-probabilities tell it.
pub(crate) fn token_text(app: &App, token: u32) -> String {
    String::from_utf8_lossy(&app.tokenizer.token_bytes(token).unwrap_or_default()).into_owned()
}

/// The log-probability of a token, in the form of chats.
pub(crate) fn chat_logprob(app: &App, token: u32, logprob: f32) -> Value {
    let bytes = app.tokenizer.token_bytes(token).unwrap_or_default();
    // JSON has no infinities; the OpenAI API's own smallest is -9999.
    let logprob = if logprob.is_finite() {
        logprob
    } else {
        -9999.0
    };
    json!({"token": String::from_utf8_lossy(&bytes), "logprob": logprob, "bytes": bytes})
}
