//! Answers as responses and their events.

use crate::io::unix_time;
use crate::serve::api::blocks::{Block, Change, Events};
use crate::serve::api::responses::tools::{ClientTool, Tools, Unquoted};
use crate::serve::app::App;
use crate::serve::http::budget::Share;
use crate::serve::http::error::ApiError;
use crate::serve::ids::new_id;
use crate::serve::jobs::answer::{Answer, Usage, chat_logprob};
use ruvllm::TokenText;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A response as it comes about.
pub(super) struct Response {
    app: Arc<App>,
    id: String,
    created: u64,
    /// What it repeats of the request.
    about: Map<String, Value>,
    tools: Tools,
    /// What those take.
    _share: Share,
    /// Items that are whole.
    items: Vec<Value>,
    /// The one that is being written.
    item: Item,
    n_events: u64,
}

/// An item that is being written.
#[derive(Default)]
struct Item {
    id: String,
    /// What is added to it, in names of events.
    kind: &'static str,
    /// Log-probabilities of its tokens.
    logprobs: Vec<Value>,
    /// The tool that it calls.
    tool: Option<ClientTool>,
    /// Of a tool that takes a text: that text, and what of it was told.
    text: (Unquoted, String),
}

impl Item {
    fn of(block: &Block, tools: &Tools) -> Item {
        let (prefix, kind, tool) = match block {
            Block::Text(_) => ("msg_", "output_text", None),
            Block::Reasoning(_) => ("rs_", "reasoning_text", None),
            Block::Call { name, .. } => match tools.tool(name) {
                tool if tool.is_custom => ("ctc_", "custom_tool_call_input", Some(tool)),
                tool => ("fc_", "function_call_arguments", Some(tool)),
            },
        };
        Item {
            id: new_id(prefix),
            kind,
            logprobs: Vec::new(),
            tool,
            text: Default::default(),
        }
    }

    /// Whether it is text, which comes in parts.
    fn is_text(&self) -> bool {
        self.kind == "output_text"
    }

    /// Whether it calls a tool that takes a text, which is in arguments, which are JSON.
    fn is_custom(&self) -> bool {
        self.kind == "custom_tool_call_input"
    }

    /// The text in `arguments`; of some that were cut, what there is.
    fn input(&self, arguments: &str) -> String {
        let (_, told) = &self.text;
        match serde_json::from_str::<Value>(arguments) {
            Err(_) if !told.is_empty() => told.clone(),
            _ => ClientTool::text(arguments),
        }
    }

    /// As an item of the output. Parts are in it once it is written.
    fn json(&self, block: &Block, status: &str) -> Value {
        let is_written = status != "in_progress";
        let (kind, fields) = match block {
            Block::Text(text) => {
                let content = is_written.then(|| part(text, &self.logprobs));
                let content: Vec<_> = content.into_iter().collect();
                ("message", json!({"role": "assistant", "content": content}))
            }
            Block::Reasoning(text) => {
                let content = is_written.then(|| json!({"type": "reasoning_text", "text": text}));
                let content: Vec<_> = content.into_iter().collect();
                ("reasoning", json!({"summary": [], "content": content}))
            }
            Block::Call { id, arguments, .. } => self.call(id, arguments),
        };
        let mut item = json!({"id": self.id, "type": kind, "status": status});
        if let (Some(item), Value::Object(fields)) = (item.as_object_mut(), fields) {
            item.extend(fields);
        }
        item
    }

    fn call(&self, id: &str, arguments: &str) -> (&'static str, Value) {
        let mut fields = json!({"call_id": id});
        if let Some(tool) = &self.tool {
            fields["name"] = tool.name.clone().into();
            if let Some(namespace) = &tool.namespace {
                fields["namespace"] = namespace.clone().into();
            }
        }
        if self.is_custom() {
            fields["input"] = self.input(arguments).into();
            return ("custom_tool_call", fields);
        }
        fields["arguments"] = arguments.into();
        ("function_call", fields)
    }
}

fn part(text: &str, logprobs: &[Value]) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

impl Response {
    pub(super) fn new(
        app: Arc<App>,
        about: Map<String, Value>,
        tools: Tools,
        share: Share,
    ) -> Response {
        Response {
            app,
            id: new_id("resp_"),
            created: unix_time(),
            about,
            tools,
            _share: share,
            items: Vec::new(),
            item: Item::default(),
            n_events: 0,
        }
    }

    fn json(&self, status: &str) -> Value {
        let mut response = json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "model": self.app.name, "output": self.items, "error": null, "incomplete_details": null,
            "previous_response_id": null, "store": false, "usage": null,
        });
        for (name, value) in &self.about {
            response[name] = value.clone();
        }
        response
    }

    /// The whole response.
    pub(super) fn ended(&self, answer: &Answer) -> Value {
        let mut response = self.json(if answer.is_cut() {
            "incomplete"
        } else {
            "completed"
        });
        if answer.is_cut() {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        } else {
            response["completed_at"] = unix_time().into();
        }
        let mut usage = Usage::default();
        if let Some(finish) = answer.finish() {
            usage.add(&finish, true);
        }
        response["usage"] = json!({
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": answer.n_reasoning()},
            "total_tokens": usage.prompt + usage.completion,
        });
        response
    }

    /// An event: its type, and the fields of an object.
    fn event(&mut self, kind: &str, mut event: Value) -> Value {
        event["type"] = format!("response.{kind}").into();
        event["sequence_number"] = self.n_events.into();
        self.n_events += 1;
        event
    }

    fn logprob(&self, piece: &TokenText) -> Value {
        let of = |token, logprob| chat_logprob(&self.app, token, logprob);
        let mut logprob = of(piece.token, piece.logprob.unwrap_or(f32::NAN));
        let top = piece.top_logprobs.iter();
        logprob["top_logprobs"] = top.map(|&(token, logprob)| of(token, logprob)).collect();
        logprob
    }

    /// An event of the item that is being written, the `i`-th.
    fn of_item(&mut self, i: usize, what: &str, fields: Value) -> Value {
        let mut event = json!({"item_id": self.item.id, "output_index": i});
        if matches!(self.item.kind, "output_text" | "reasoning_text") {
            event["content_index"] = 0.into();
        }
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        self.event(what, event)
    }

    fn begins(&mut self, i: usize, block: Block) -> Vec<Value> {
        self.item = Item::of(&block, &self.tools);
        let item = self.item.json(&block, "in_progress");
        let item = json!({"output_index": i, "item": item});
        let mut events = vec![self.event("output_item.added", item)];
        if self.item.is_text() {
            let part = json!({"part": part("", &[])});
            events.push(self.of_item(i, "content_part.added", part));
        }
        events
    }

    fn grows(&mut self, i: usize, text: &str, pieces: &[TokenText]) -> Value {
        let mut fields = json!({"delta": text});
        if self.item.is_text() {
            let logprobs: Vec<_> = pieces.iter().map(|piece| self.logprob(piece)).collect();
            self.item.logprobs.extend_from_slice(&logprobs);
            fields["logprobs"] = logprobs.into();
        }
        self.of_item(i, &format!("{}.delta", self.item.kind), fields)
    }

    fn ends(&mut self, i: usize, block: &Block, status: &str) -> Vec<Value> {
        let mut events = Vec::new();
        let done = match block {
            Block::Text(text) => json!({"text": text, "logprobs": self.item.logprobs}),
            Block::Reasoning(text) => json!({"text": text}),
            Block::Call { arguments, .. } if self.item.is_custom() => {
                let text = self.item.input(arguments);
                let rest = text.strip_prefix(&self.item.text.1).map(str::to_owned);
                if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
                    events.push(self.grows(i, &rest, &[]));
                }
                json!({"input": text})
            }
            Block::Call { arguments, .. } => {
                let name = self.item.tool.as_ref().map(|tool| &tool.name);
                json!({"name": name, "arguments": arguments})
            }
        };
        events.push(self.of_item(i, &format!("{}.done", self.item.kind), done));
        if let Block::Text(text) = block {
            let part = json!({"part": part(text, &self.item.logprobs)});
            events.push(self.of_item(i, "content_part.done", part));
        }
        let item = self.item.json(block, status);
        self.items.push(item.clone());
        let item = json!({"output_index": i, "item": item});
        events.push(self.event("output_item.done", item));
        events
    }
}

impl Events for Response {
    fn begin(&mut self) -> Vec<Value> {
        let response = json!({"response": self.json("in_progress")});
        vec![
            self.event("created", response.clone()),
            self.event("in_progress", response),
        ]
    }

    fn change(&mut self, i: usize, change: Change) -> Vec<Value> {
        match change {
            Change::Begin(block) => self.begins(i, block),
            Change::More(more, _) if self.item.is_custom() => {
                let (unquoted, told) = &mut self.item.text;
                let text = unquoted.push(&more);
                told.push_str(&text);
                match text.is_empty() {
                    true => Vec::new(),
                    false => vec![self.grows(i, &text, &[])],
                }
            }
            Change::More(text, pieces) => vec![self.grows(i, &text, &pieces)],
            Change::End(block) => self.ends(i, &block, "completed"),
            Change::Cut(block) => self.ends(i, &block, "incomplete"),
        }
    }

    fn goes_on(&mut self) -> Value {
        let response = json!({"response": self.json("in_progress")});
        self.event("in_progress", response)
    }

    fn end(&mut self, answer: &Answer) -> Vec<Value> {
        let response = self.ended(answer);
        let kind = response["status"].as_str().unwrap_or_default().to_owned();
        vec![self.event(&kind, json!({"response": response}))]
    }

    fn failed(&mut self, error: ApiError) -> Vec<Value> {
        let mut response = self.json("failed");
        response["error"] = error.response_error();
        vec![self.event("failed", json!({"response": response}))]
    }
}
