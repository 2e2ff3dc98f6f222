//! Answers as messages of the model and their events.

use crate::serve::api::blocks::{Block, Change, Events, arguments_of};
use crate::serve::http::error::ApiError;
use crate::serve::ids::new_id;
use crate::serve::jobs::answer::{Answer, Usage};
use crate::serve::jobs::turn::Job;
use serde_json::{Value, json};

/// A message of the model.
pub(super) struct Message {
    id: String,
    model: String,
    /// The texts that end it; the first ones, so many, are the server's own.
    stops: (usize, Vec<String>),
    /// Tokens of its prompt.
    n_prompt: usize,
    /// Blocks that are whole.
    content: Vec<Value>,
    /// Type and field of what is added to the block that is being written.
    delta: (&'static str, &'static str),
}

impl Message {
    pub(super) fn new(job: &Job, answer: &Answer) -> Message {
        Message {
            id: new_id("msg_"),
            model: job.app.name.clone(),
            stops: (job.app.stop.len(), job.params.stop.clone()),
            n_prompt: answer.n_prompt,
            content: Vec::new(),
            delta: ("", ""),
        }
    }

    fn json(&self, reason: Option<&str>, stop: Option<&str>, usage: Value) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": self.content, "stop_reason": reason, "stop_sequence": stop, "usage": usage,
        })
    }

    /// The whole message.
    pub(super) fn ended(&self, answer: &Answer) -> Value {
        let (reason, stop) = self.end_of(answer);
        self.json(Some(reason), stop, usage(answer))
    }

    /// Why it ended, and by which text.
    fn end_of(&self, answer: &Answer) -> (&'static str, Option<&str>) {
        match answer.finish_reason() {
            "tool_calls" => ("tool_use", None),
            "length" => ("max_tokens", None),
            _ => match answer
                .finish()
                .and_then(|finish| finish.stop)
                .filter(|&i| i >= self.stops.0)
            {
                Some(i) => ("stop_sequence", Some(&self.stops.1[i])),
                None => ("end_turn", None),
            },
        }
    }
}

impl Events for Message {
    fn begin(&mut self) -> Vec<Value> {
        // How many of them come from the cache is told at the end.
        let usage = json!({"input_tokens": self.n_prompt, "output_tokens": 0});
        vec![json!({"type": "message_start", "message": self.json(None, None, usage)})]
    }

    fn change(&mut self, i: usize, change: Change) -> Vec<Value> {
        let value = match change {
            Change::Begin(block) => {
                self.delta = match &block {
                    Block::Text(_) => ("text_delta", "text"),
                    Block::Reasoning(_) => ("thinking_delta", "thinking"),
                    Block::Call { .. } => ("input_json_delta", "partial_json"),
                };
                json!({"type": "content_block_start", "index": i, "content_block": content_block(block)})
            }
            Change::More(more, _) => {
                let (kind, field) = self.delta;
                json!({"type": "content_block_delta", "index": i, "delta": {"type": kind, field: more}})
            }
            Change::End(block) | Change::Cut(block) => {
                self.content.push(content_block(block));
                json!({"type": "content_block_stop", "index": i})
            }
        };
        vec![value]
    }

    fn goes_on(&mut self) -> Value {
        json!({"type": "ping"})
    }

    fn end(&mut self, answer: &Answer) -> Vec<Value> {
        let (reason, stop) = self.end_of(answer);
        let delta = json!({"stop_reason": reason, "stop_sequence": stop});
        vec![
            json!({"type": "message_delta", "delta": delta, "usage": usage(answer)}),
            json!({"type": "message_stop"}),
        ]
    }

    fn failed(&mut self, error: ApiError) -> Vec<Value> {
        vec![error.anthropic_json()]
    }
}

fn content_block(block: Block) -> Value {
    match block {
        Block::Text(text) => json!({"type": "text", "text": text}),
        Block::Reasoning(thinking) => {
            json!({"type": "thinking", "thinking": thinking, "signature": ""})
        }
        Block::Call {
            id,
            name,
            arguments,
        } => {
            json!({"type": "tool_use", "id": id, "name": name, "input": arguments_of(&arguments)})
        }
    }
}

/// Tokens of the prompt that came from the cache are told apart from the others.
fn usage(answer: &Answer) -> Value {
    let mut usage = Usage::default();
    if let Some(finish) = answer.finish() {
        usage.add(&finish, true);
    }
    json!({
        "input_tokens": usage.prompt - usage.cached, "output_tokens": usage.completion,
        "cache_read_input_tokens": usage.cached, "cache_creation_input_tokens": 0,
        "output_tokens_details": {"thinking_tokens": answer.n_reasoning()},
    })
}
