//! Answers as messages of the model and their events.

use crate::serve::api::blocks::{Block, Change, Events};
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
            json!({"type": "tool_use", "id": id, "name": name, "input": input(&arguments)})
        }
    }
}

/// The arguments of a call; of one that was cut, the values that are whole.
fn input(arguments: &str) -> Value {
    // Up to which byte values are whole, and the brackets that are open there.
    let (mut whole, mut open) = ((0, String::new()), String::new());
    let (mut is_text, mut is_escaped) = (false, false);
    for (at, c) in arguments.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_text => is_escaped = true,
            '"' => is_text = !is_text,
            _ if is_text => {}
            '{' | '[' => {
                open.insert(0, if c == '{' { '}' } else { ']' });
                whole = (at + 1, open.clone());
            }
            '}' | ']' => {
                open = open.chars().skip(1).collect();
                whole = (at + 1, open.clone());
            }
            ',' => whole = (at, open.clone()),
            _ => {}
        }
    }
    // The last value may be whole without a comma behind it; a number might go on.
    let ends_in_digit = arguments.ends_with(|c: char| c.is_ascii_digit());
    let all = (!ends_in_digit).then(|| format!("{arguments}{open}"));
    let (len, open) = whole;
    let certain = format!("{}{open}", &arguments[..len]);
    let parsed = all.into_iter().chain([certain]);
    let mut parsed = parsed.filter_map(|text| serde_json::from_str(&text).ok());
    parsed.next().unwrap_or_else(|| json!({}))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_call_has_the_values_that_are_whole() {
        let arguments = r#"{"path": "a\"}{,b", "n": [1, {"x": true}, 25], "o": {"p": null}}"#;
        let whole: Value = serde_json::from_str(arguments).unwrap();
        assert_eq!(input(arguments), whole);
        for (n, expected) in [
            (0, json!({})),
            (1, json!({})),
            (6, json!({})),
            (15, json!({})),
            (20, json!({"path": "a\"}{,b"})),
            (26, json!({"path": "a\"}{,b", "n": []})),
            (27, json!({"path": "a\"}{,b", "n": []})),
            (28, json!({"path": "a\"}{,b", "n": [1]})),
            (38, json!({"path": "a\"}{,b", "n": [1, {}]})),
            (39, json!({"path": "a\"}{,b", "n": [1, {"x": true}]})),
            (44, json!({"path": "a\"}{,b", "n": [1, {"x": true}]})),
            (45, json!({"path": "a\"}{,b", "n": [1, {"x": true}, 25]})),
        ] {
            assert_eq!(input(&arguments[..n]), expected, "{}", &arguments[..n]);
        }
        // Whatever is cut, what is left of it is in the whole, or stands empty.
        for n in 0..arguments.len() {
            let cut = input(&arguments[..n]);
            assert!(cut.is_object(), "{n}");
            for (key, value) in cut.as_object().unwrap() {
                let of_whole = &whole[key];
                assert!(
                    value == of_whole || value.is_array() || value.is_object(),
                    "{n}"
                );
            }
        }
    }
}
