//! Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

use crate::serve::api::blocks::{Block, Change, Events, stream, whole};
use crate::serve::api::body::Body;
use crate::serve::app::Shared;
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
use axum::response::Response;
use serde_json::{Map, Value, json};

pub(super) async fn messages(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    body: Result<Body, ApiError>,
) -> Result<Response, ApiError> {
    let run = async {
        let Body(mut fields, share) = body?;
        // The API has no default.
        let max_tokens: i64 = fields.need("max_tokens")?;
        if max_tokens < 1 {
            return Err(ApiError::field(
                "max_tokens",
                format!("expected 1 or more, found {max_tokens}"),
            ));
        }
        fields.set("max_tokens", max_tokens.into())?;
        translate(&mut fields)?;
        let turn = Turn::of(shared.app_with_room()?, caller, &mut fields)?;
        fields.finish()?;
        let (job, answers) = turn.submit().await?;
        drop(share);
        let Some(answer) = answers.into_iter().next() else {
            return Err(ApiError::internal("there is no answer"));
        };
        let (id, model) = (new_id("msg_"), job.app.name.clone());
        let stops = (job.app.stop.len(), job.params.stop.clone());
        let message = Message {
            id,
            model,
            stops,
            n_prompt: answer.n_prompt,
            delta: ("", ""),
        };
        if job.params.stream {
            return Ok(stream(message, answer));
        }
        let (blocks, answer) = whole(answer).await?;
        let content = blocks.into_iter().map(content_block).collect::<Vec<_>>();
        let (reason, stop) = message.end_of(&answer);
        Ok(json_response(
            StatusCode::OK,
            &message.json(content, Some(reason), stop, usage(&answer)),
        ))
    };
    run.await.map_err(ApiError::of_anthropic)
}

pub(super) async fn count_tokens(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    body: Result<Body, ApiError>,
) -> Result<Response, ApiError> {
    let run = async {
        let Body(mut fields, _share) = body?;
        translate(&mut fields)?;
        let turn = Turn::of(shared.app()?, caller, &mut fields)?;
        fields.finish()?;
        Ok(json_response(
            StatusCode::OK,
            &json!({"input_tokens": turn.count_tokens().await?}),
        ))
    };
    run.await.map_err(ApiError::of_anthropic)
}

/// Puts a request into the words of chat completions.
fn translate(fields: &mut Fields) -> Result<(), ApiError> {
    fields.rename("stop_sequences", "stop")?;
    fields.only("n", 1)?;
    if fields.take::<Value>("thread")?.is_some() {
        let message = "nothing is stored here: send the conversation whole";
        let details =
            json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]});
        return Err(ApiError::field("thread", message).with_details(details));
    }
    if let Some(mut output) = fields.object("output_config")? {
        if let Some(effort) = output.take::<String>("effort")? {
            fields.set("reasoning_effort", effort.into())?;
        }
        if let Some(format) = output.take::<Map<String, Value>>("format")? {
            fields.set("response_format", schema_format(format))?;
        }
        output.finish()?;
    }
    if let Some(format) = fields.take::<Map<String, Value>>("output_format")? {
        fields.set("response_format", schema_format(format))?;
    }
    let mut messages = Vec::new();
    if let Some(system) = fields.take::<Value>("system")? {
        messages.push(json!({"role": "system", "content": text_of("system", &system)?}));
    }
    for (i, message) in fields
        .need::<Vec<Value>>("messages")?
        .into_iter()
        .enumerate()
    {
        add_message(&format!("messages[{i}]"), message, &mut messages)?;
    }
    fields.set("messages", messages.into())?;
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
    if let Some(mut choice) = fields.object("tool_choice")? {
        let kind: String = choice.need("type")?;
        let named: Option<String> = choice.take("name")?;
        let choice_json = match (&kind[..], named) {
            ("auto" | "none", None) => json!(kind),
            ("any", None) => json!("required"),
            ("tool", Some(name)) => json!({"type": "function", "function": {"name": name}}),
            _ => {
                return Err(ApiError::field(
                    "tool_choice",
                    "expected auto, any, none, or tool and a name",
                ));
            }
        };
        fields.set("tool_choice", choice_json)?;
        fields.set(
            "parallel_tool_calls",
            (!choice.flag("disable_parallel_tool_use")?).into(),
        )?;
        choice.finish()?;
    }
    if let Some(mut thinking) = fields.object("thinking")? {
        let kind: String = thinking.need("type")?;
        // How long the model thinks is its own affair.
        thinking.ignore(&["budget_tokens", "display"]);
        thinking.finish()?;
        let enable = match &kind[..] {
            "enabled" | "adaptive" => true,
            "disabled" => false,
            other => {
                return Err(ApiError::field(
                    "thinking",
                    format!("the type {other:?} is not known"),
                ));
            }
        };
        fields.set("chat_template_kwargs", json!({"enable_thinking": enable}))?;
    }
    fields.ignore(&[
        "metadata",
        "service_tier",
        "container",
        "context_management",
        "cache_control",
        "betas",
    ]);
    Ok(())
}

/// A text, or the texts of blocks, one behind the other.
fn text_of(place: &str, value: &Value) -> Result<String, ApiError> {
    let block = |block: &Value| match (block["type"].as_str(), block["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        (kind, _) => Err(ApiError::field(
            place,
            format!("blocks of the type {kind:?} are not supported here, only text"),
        )),
    };
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => blocks.iter().map(block).collect(),
        _ => Err(ApiError::field(place, "expected a text or blocks")),
    }
}

/// Adds a message as those of chat completions are: results of calls are messages of their own
/// there.
fn add_message(place: &str, message: Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = message["role"]
        .as_str()
        .filter(|role| ["user", "assistant", "system"].contains(role));
    let role = role
        .ok_or_else(|| ApiError::field(place, "the role is none of user, assistant and system"))?;
    let Value::Array(blocks) = &message["content"] else {
        let content = text_of(place, &message["content"])?;
        messages.push(json!({"role": role, "content": content}));
        return Ok(());
    };
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for block in blocks {
        let field = |name: &str| {
            block[name]
                .as_str()
                .ok_or_else(|| ApiError::field(place, format!("a block has no text {name:?}")))
        };
        match block["type"].as_str() {
            Some("text") => text.push_str(field("text")?),
            Some("thinking") => reasoning.push_str(field("thinking")?),
            Some("redacted_thinking") => {}
            Some("tool_use") => calls.push(json!({
                "id": field("id")?, "type": "function",
                "function": {"name": field("name")?, "arguments": block["input"]},
            })),
            Some("tool_result") => {
                let content = match &block["content"] {
                    Value::Null => String::new(),
                    content => text_of(place, content)?,
                };
                messages.push(json!({"role": "tool", "tool_call_id": field("tool_use_id")?, "content": content}));
            }
            _ => {
                let kind = &block["type"];
                return Err(ApiError::field(
                    place,
                    format!("blocks of the type {kind} are not supported"),
                ));
            }
        }
    }
    let only_results = text.is_empty() && blocks.iter().any(|block| block["type"] == "tool_result");
    if !only_results {
        let mut message = json!({"role": role, "content": text});
        if !reasoning.is_empty() {
            message["reasoning_content"] = reasoning.into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        messages.push(message);
    }
    Ok(())
}

fn tool((i, tool): (usize, Value)) -> Result<Value, ApiError> {
    let place = format!("tools[{i}]");
    let Value::Object(mut tool) = tool else {
        return Err(ApiError::field(&place, "expected an object"));
    };
    if let Some(kind) = tool
        .get("type")
        .and_then(Value::as_str)
        .filter(|&kind| kind != "custom")
    {
        return Err(ApiError::field(
            &place,
            format!("the server has no tool of the type {kind:?}"),
        ));
    }
    let mut function = Map::new();
    for (name, elsewhere) in [
        ("name", "name"),
        ("description", "description"),
        ("input_schema", "parameters"),
    ] {
        function.extend(tool.remove(name).map(|value| (elsewhere.to_owned(), value)));
    }
    Ok(json!({"type": "function", "function": function}))
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
            let input: Value = serde_json::from_str(&arguments).unwrap_or_else(|_| json!({}));
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
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
    })
}

/// A message of the model.
struct Message {
    id: String,
    model: String,
    /// The texts that end it; the first ones, so many, are the server's own.
    stops: (usize, Vec<String>),
    /// Tokens of its prompt.
    n_prompt: usize,
    /// Type and field of what is added to the block that is being written.
    delta: (&'static str, &'static str),
}

impl Message {
    fn json(
        &self,
        content: Vec<Value>,
        reason: Option<&str>,
        stop: Option<&str>,
        usage: Value,
    ) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": reason, "stop_sequence": stop, "usage": usage,
        })
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
        vec![json!({"type": "message_start", "message": self.json(Vec::new(), None, None, usage)})]
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
            Change::More(more) => {
                let (kind, field) = self.delta;
                json!({"type": "content_block_delta", "index": i, "delta": {"type": kind, field: more}})
            }
            Change::End(_) => json!({"type": "content_block_stop", "index": i}),
        };
        vec![value]
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
        vec![error.of_anthropic().json()]
    }
}
