//! Answers as objects of Ollama's API: one for each stretch of a stream, and a last one with counts
//! and times.

use crate::serve::api::blocks::{Block, Change, Events, arguments_of};
use crate::serve::app::App;
use crate::serve::http::error::ApiError;
use crate::serve::jobs::answer::{Answer, chat_logprob};
use ruvllm::TokenText;
use ruvllm::chat::LocalTime;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The model that a request names, and what is said of it besides.
pub(super) struct Asked {
    pub(super) app: Arc<App>,
    /// By which name.
    pub(super) name: String,
    pub(super) begun: Instant,
    /// Time until it was loaded.
    pub(super) load: Duration,
}

/// Which path the answer is for.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Form {
    Chat,
    Generate,
}

impl Form {
    /// A part with these texts and calls.
    fn part(self, model: &str, content: &str, thinking: &str, calls: &[Value]) -> Value {
        let created_at = LocalTime::now_utc().strftime("%Y-%m-%dT%H:%M:%SZ");
        let mut part = json!({"model": model, "created_at": created_at});
        let texts = match self {
            Form::Chat => {
                part["message"] = json!({"role": "assistant", "content": content});
                &mut part["message"]
            }
            Form::Generate => {
                part["response"] = content.into();
                &mut part
            }
        };
        if !thinking.is_empty() {
            texts["thinking"] = thinking.into();
        }
        if !calls.is_empty() {
            texts["tool_calls"] = calls.into();
        }
        part["done"] = false.into();
        part
    }

    /// The answer to a request that asks for none.
    pub(super) fn empty(self, model: &str, reason: &str) -> Value {
        let mut part = self.part(model, "", "", &[]);
        part["done"] = true.into();
        part["done_reason"] = reason.into();
        part
    }
}

/// A time in Ollama's unit.
pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What a block is.
#[derive(Clone, Copy, PartialEq)]
enum Open {
    Text,
    Reasoning,
    Call,
}

/// An answer.
pub(super) struct Reply {
    asked: Asked,
    form: Form,
    /// The block that is being written.
    open: Open,
    n_calls: usize,
    /// What is whole.
    content: String,
    thinking: String,
    calls: Vec<Value>,
    logprobs: Vec<Value>,
}

impl Reply {
    pub(super) fn new(asked: Asked, form: Form) -> Reply {
        Reply {
            asked,
            form,
            open: Open::Text,
            n_calls: 0,
            content: String::new(),
            thinking: String::new(),
            calls: Vec::new(),
            logprobs: Vec::new(),
        }
    }

    /// The whole answer at once.
    pub(super) fn whole(&self, answer: &Answer) -> Value {
        let name = &self.asked.name;
        let mut whole = self
            .form
            .part(name, &self.content, &self.thinking, &self.calls);
        if !self.logprobs.is_empty() {
            whole["logprobs"] = self.logprobs.clone().into();
        }
        self.finish(&mut whole, answer);
        whole
    }

    fn finish(&self, part: &mut Value, answer: &Answer) {
        part["done"] = true.into();
        part["done_reason"] = match answer.finish_reason() {
            "length" => "length",
            _ => "stop",
        }
        .into();
        part["total_duration"] = nanoseconds(self.asked.begun.elapsed()).into();
        part["load_duration"] = nanoseconds(self.asked.load).into();
        part["prompt_eval_count"] = answer.n_prompt.into();
        if let Some(finish) = answer.finish() {
            part["prompt_eval_duration"] = nanoseconds(finish.timings.prefill).into();
            part["eval_count"] = finish.n_generated.into();
            part["eval_duration"] = nanoseconds(finish.timings.decode).into();
        }
    }

    fn token(&self, piece: &TokenText) -> Value {
        let app = &self.asked.app;
        let mut token = chat_logprob(app, piece.token, piece.logprob.unwrap_or(f32::NAN));
        let top = piece.top_logprobs.iter();
        let top = top.map(|&(token, logprob)| chat_logprob(app, token, logprob));
        token["top_logprobs"] = top.collect();
        token
    }

    fn call(&mut self, id: String, name: String, arguments: &str) -> Value {
        let index = self.n_calls;
        self.n_calls += 1;
        let arguments = arguments_of(arguments);
        json!({"id": id, "function": {"index": index, "name": name, "arguments": arguments}})
    }
}

impl Events for Reply {
    fn begin(&mut self) -> Vec<Value> {
        Vec::new()
    }

    fn change(&mut self, _: usize, change: Change) -> Vec<Value> {
        let name = self.asked.name.clone();
        match change {
            Change::Begin(block) => {
                self.open = match block {
                    Block::Text(_) => Open::Text,
                    Block::Reasoning(_) => Open::Reasoning,
                    Block::Call { .. } => Open::Call,
                };
                Vec::new()
            }
            // Calls are told when they are whole.
            Change::More(..) if self.open == Open::Call => Vec::new(),
            Change::More(more, pieces) => {
                let (content, thinking) = match self.open {
                    Open::Reasoning => ("", &more[..]),
                    _ => (&more[..], ""),
                };
                let mut part = self.form.part(&name, content, thinking, &[]);
                let tokens: Vec<_> = pieces.iter().map(|piece| self.token(piece)).collect();
                if !tokens.is_empty() {
                    part["logprobs"] = tokens.clone().into();
                    self.logprobs.extend(tokens);
                }
                vec![part]
            }
            Change::End(block) | Change::Cut(block) => match block {
                Block::Text(text) => {
                    self.content += &text;
                    Vec::new()
                }
                Block::Reasoning(text) => {
                    self.thinking += &text;
                    Vec::new()
                }
                Block::Call {
                    id,
                    name: function,
                    arguments,
                } => {
                    let call = self.call(id, function, &arguments);
                    self.calls.push(call.clone());
                    vec![self.form.part(&name, "", "", &[call])]
                }
            },
        }
    }

    fn goes_on(&mut self) -> Value {
        self.form.part(&self.asked.name, "", "", &[])
    }

    fn end(&mut self, answer: &Answer) -> Vec<Value> {
        let mut part = self.form.part(&self.asked.name, "", "", &[]);
        self.finish(&mut part, answer);
        vec![part]
    }

    fn failed(&mut self, error: ApiError) -> Vec<Value> {
        vec![error.ollama_json()]
    }
}
