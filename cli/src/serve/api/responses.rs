//! OpenAI's Responses: `/v1/responses`. Nothing is stored: a conversation is sent whole each time.

use crate::io::unix_time;
use crate::serve::api::blocks::{Block, Change, Events, stream, whole};
use crate::serve::api::body::Body;
use crate::serve::api::openai::input_tokens;
use crate::serve::app::Shared;
use crate::serve::http::budget::Share;
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::response::json_response;
use crate::serve::ids::{Caller, new_id};
use crate::serve::jobs::answer::{Answer, Usage};
use crate::serve::jobs::params::schema_format;
use crate::serve::jobs::turn::Turn;
use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response as HttpResponse;
use serde_json::{Map, Value, json};

pub(super) async fn responses(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, share): Body,
) -> Result<HttpResponse, ApiError> {
    let app = shared.app_with_room()?;
    let about = translate(&mut fields)?;
    let turn = Turn::of(app, caller, &mut fields)?;
    fields.finish()?;
    let (job, answers) = turn.submit().await?;
    let Some(answer) = answers.into_iter().next() else {
        return Err(ApiError::internal("there is no answer"));
    };
    let (id, created, model) = (new_id("resp_"), unix_time(), job.app.name.clone());
    let response = Response {
        id,
        created,
        model,
        about,
        _share: share,
        items: Vec::new(),
        item: String::new(),
        kind: "",
        n_events: 0,
    };
    if job.params.stream {
        return Ok(stream(response, answer));
    }
    let (blocks, answer) = whole(answer).await?;
    let items = blocks
        .into_iter()
        .map(|block| item(&item_id(&block), block, "completed"))
        .collect();
    let response = Response { items, ..response };
    Ok(json_response(StatusCode::OK, &response.ended(&answer)))
}

pub(super) async fn count_tokens(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, _share): Body,
) -> Result<HttpResponse, ApiError> {
    translate(&mut fields)?;
    let turn = Turn::of(shared.app()?, caller, &mut fields)?;
    fields.finish()?;
    Ok(input_tokens(turn.count_tokens().await?))
}

/// Fields of a request that its response repeats, with the values that they have if they are not
/// there.
fn repeated() -> [(&'static str, Value); 11] {
    [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("reasoning", Value::Null),
        ("temperature", Value::Null),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_p", Value::Null),
        ("truncation", json!("disabled")),
    ]
}

/// Puts a request into the words of chat completions; what the response repeats of it.
fn translate(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let mut about = Map::new();
    for (name, value) in repeated() {
        about.insert(name.to_owned(), fields.get(name).cloned().unwrap_or(value));
    }
    for name in ["previous_response_id", "conversation", "prompt"] {
        if fields.take::<Value>(name)?.is_some() {
            return Err(ApiError::field(
                name,
                "nothing is stored here: send the conversation whole",
            ));
        }
    }
    if fields.flag("background")? {
        return Err(ApiError::field("background", "nothing is stored here"));
    }
    fields.only("truncation", "disabled")?;
    fields.only("n", 1)?;
    let mut messages = Messages(Vec::new());
    if let Some(instructions) = fields.take::<String>("instructions")? {
        messages
            .0
            .push(json!({"role": "system", "content": instructions}));
    }
    match fields.need("input")? {
        Value::String(text) => messages.0.push(json!({"role": "user", "content": text})),
        Value::Array(items) => {
            for (i, item) in items.into_iter().enumerate() {
                messages.add(&format!("input[{i}]"), &item)?;
            }
        }
        _ => return Err(ApiError::field("input", "expected a text or items")),
    }
    fields.set("messages", messages.0.into())?;
    fields.rename("max_output_tokens", "max_tokens")?;
    if let Some(mut reasoning) = fields.object("reasoning")? {
        if let Some(effort) = reasoning.take::<String>("effort")? {
            fields.set("reasoning_effort", effort.into())?;
        }
        // The reasoning itself is told.
        reasoning.ignore(&["summary", "generate_summary"]);
        reasoning.finish()?;
    }
    if let Some(mut text) = fields.object("text")? {
        if let Some(format) = text.take::<Map<String, Value>>("format")? {
            fields.set("response_format", schema_format(format))?;
        }
        text.ignore(&["verbosity"]);
        text.finish()?;
    }
    if let Some(tools) = fields.take::<Vec<Value>>("tools")? {
        fields.set(
            "tools",
            tools
                .into_iter()
                .enumerate()
                .map(tool)
                .collect::<Result<Value, _>>()?,
        )?;
    }
    match fields.take::<Value>("tool_choice")? {
        Some(Value::Object(choice)) => {
            let choice = json!({"type": "function", "function": {"name": choice.get("name")}});
            fields.set("tool_choice", choice)?;
        }
        Some(choice) => fields.set("tool_choice", choice)?,
        None => {}
    }
    fields.ignore(&["include", "prompt_cache_retention", "max_tool_calls"]);
    Ok(about)
}

fn tool((i, tool): (usize, Value)) -> Result<Value, ApiError> {
    let Value::Object(mut tool) = tool else {
        return Err(ApiError::field(
            &format!("tools[{i}]"),
            "expected an object",
        ));
    };
    match tool.shift_remove("type") {
        Some(kind) if kind == "function" => Ok(json!({"type": "function", "function": tool})),
        kind => {
            let kind = kind.unwrap_or_default();
            Err(ApiError::field(
                &format!("tools[{i}]"),
                format!("the server has no tool of the type {kind}"),
            ))
        }
    }
}

/// Messages as those of chat completions are: calls and reasoning belong to messages of the
/// assistant there.
struct Messages(Vec<Value>);

impl Messages {
    fn add(&mut self, place: &str, item: &Value) -> Result<(), ApiError> {
        let field = |name: &str| {
            item[name]
                .as_str()
                .ok_or_else(|| ApiError::field(place, format!("it has no text {name:?}")))
        };
        match item["type"].as_str() {
            None | Some("message") => {
                let (role, content) = (field("role")?, text_of(place, &item["content"])?);
                let last = self.0.last_mut().filter(|last| {
                    role == "assistant"
                        && last["role"] == role
                        && last["content"] == ""
                        && last["tool_calls"].is_null()
                });
                match last {
                    Some(last) => last["content"] = content.into(),
                    None => self.0.push(json!({"role": role, "content": content})),
                }
            }
            Some("reasoning") => {
                let texts = item["content"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(|part| part["text"].as_str());
                let text = texts.collect::<String>();
                if !text.is_empty() {
                    self.0.push(
                        json!({"role": "assistant", "content": "", "reasoning_content": text}),
                    );
                }
            }
            Some("function_call") => {
                let call = json!({
                    "id": field("call_id")?, "type": "function",
                    "function": {"name": field("name")?, "arguments": field("arguments")?},
                });
                if self.0.last().is_none_or(|last| last["role"] != "assistant") {
                    self.0.push(json!({"role": "assistant", "content": ""}));
                }
                let calls = self.0.last_mut().map(|last| &mut last["tool_calls"]);
                match calls {
                    Some(Value::Array(calls)) => calls.push(call),
                    Some(calls) => *calls = json!([call]),
                    None => {}
                }
            }
            Some("function_call_output") => {
                let content = text_of(place, &item["output"])?;
                self.0.push(
                    json!({"role": "tool", "tool_call_id": field("call_id")?, "content": content}),
                );
            }
            Some(kind) => {
                return Err(ApiError::field(
                    place,
                    format!("items of the type {kind:?} are not supported"),
                ));
            }
        }
        Ok(())
    }
}

/// A text, or the texts of parts, one behind the other.
fn text_of(place: &str, value: &Value) -> Result<String, ApiError> {
    let part = |part: &Value| match (
        part["type"].as_str(),
        part["text"].as_str(),
        part["refusal"].as_str(),
    ) {
        (Some("input_text" | "output_text" | "text"), Some(text), _)
        | (Some("refusal"), _, Some(text)) => Ok(text.to_owned()),
        _ => Err(ApiError::field(
            place,
            format!(
                "parts of the type {} are not supported, only text",
                part["type"]
            ),
        )),
    };
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => parts.iter().map(part).collect(),
        _ => Err(ApiError::field(place, "expected a text or parts")),
    }
}

fn item_id(block: &Block) -> String {
    new_id(match block {
        Block::Text(_) => "msg_",
        Block::Reasoning(_) => "rs_",
        Block::Call { .. } => "fc_",
    })
}

/// A block as an item of the output.
fn item(id: &str, block: Block, status: &str) -> Value {
    match block {
        Block::Text(text) => {
            let content = if status == "completed" {
                vec![part(&text)]
            } else {
                Vec::new()
            };
            json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
        }
        Block::Reasoning(text) => {
            let content = if status == "completed" {
                vec![json!({"type": "reasoning_text", "text": text})]
            } else {
                vec![]
            };
            json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
        }
        Block::Call {
            id: call_id,
            name,
            arguments,
        } => json!({
            "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
            "arguments": arguments,
        }),
    }
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

/// A response as it comes about.
struct Response {
    id: String,
    created: u64,
    model: String,
    /// What it repeats of the request.
    about: Map<String, Value>,
    /// What that takes.
    _share: Share,
    /// Those that are whole.
    items: Vec<Value>,
    /// The identifier of the one that is being written.
    item: String,
    /// What is added to it, in names of events.
    kind: &'static str,
    n_events: u64,
}

impl Response {
    fn json(&self, status: &str) -> Value {
        let mut response = json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model,
            "output": self.items, "error": null, "incomplete_details": null, "previous_response_id": null,
            "store": false, "usage": null,
        });
        for (name, value) in &self.about {
            response[name] = value.clone();
        }
        response
    }

    fn ended(&self, answer: &Answer) -> Value {
        let is_cut = answer.finish_reason() == "length";
        let mut response = self.json(if is_cut { "incomplete" } else { "completed" });
        if is_cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let mut usage = Usage::default();
        if let Some(finish) = answer.finish() {
            usage.add(&finish, true);
        }
        response["usage"] = json!({
            "input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion, "output_tokens_details": {"reasoning_tokens": 0},
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
        let place = |id: &str| json!({"item_id": id, "output_index": i});
        let in_part = |id: &str| json!({"item_id": id, "output_index": i, "content_index": 0});
        let with = |mut event: Value, name: &str, value: Value| {
            event[name] = value;
            event
        };
        let mut events: Vec<(String, Value)> = Vec::new();
        match change {
            Change::Begin(block) => {
                self.item = item_id(&block);
                self.kind = match &block {
                    Block::Text(_) => "output_text",
                    Block::Reasoning(_) => "reasoning_text",
                    Block::Call { .. } => "function_call_arguments",
                };
                let is_text = matches!(block, Block::Text(_));
                let item = item(&self.item, block, "in_progress");
                events.push((
                    "output_item.added".into(),
                    json!({"output_index": i, "item": item}),
                ));
                if is_text {
                    events.push((
                        "content_part.added".into(),
                        with(in_part(&self.item), "part", part("")),
                    ));
                }
            }
            Change::More(delta) => {
                let event = if self.kind == "function_call_arguments" {
                    place(&self.item)
                } else {
                    in_part(&self.item)
                };
                let event = if self.kind == "output_text" {
                    with(event, "logprobs", json!([]))
                } else {
                    event
                };
                events.push((
                    format!("{}.delta", self.kind),
                    with(event, "delta", delta.into()),
                ));
            }
            Change::End(block) => {
                let done = match &block {
                    Block::Call {
                        name, arguments, ..
                    } => with(
                        with(place(&self.item), "name", json!(name)),
                        "arguments",
                        json!(arguments),
                    ),
                    Block::Reasoning(text) => with(in_part(&self.item), "text", json!(text)),
                    Block::Text(text) => with(
                        with(in_part(&self.item), "text", json!(text)),
                        "logprobs",
                        json!([]),
                    ),
                };
                events.push((format!("{}.done", self.kind), done));
                if let Block::Text(text) = &block {
                    events.push((
                        "content_part.done".into(),
                        with(in_part(&self.item), "part", part(text)),
                    ));
                }
                let item = item(&self.item, block, "completed");
                self.items.push(item.clone());
                events.push((
                    "output_item.done".into(),
                    json!({"output_index": i, "item": item}),
                ));
            }
        }
        events
            .into_iter()
            .map(|(kind, event)| self.event(&kind, event))
            .collect()
    }

    fn end(&mut self, answer: &Answer) -> Vec<Value> {
        let response = self.ended(answer);
        let kind = response["status"].as_str().unwrap_or_default().to_owned();
        vec![self.event(&kind, json!({"response": response}))]
    }

    fn failed(&mut self, error: ApiError) -> Vec<Value> {
        let mut response = self.json("failed");
        response["error"] =
            json!({"code": "server_error", "message": error.json()["error"]["message"]});
        vec![self.event("failed", json!({"response": response}))]
    }
}
