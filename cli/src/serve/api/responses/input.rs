//! Items of Responses as messages of chat completions: calls and reasoning belong to messages of
//! the assistant there.

use crate::serve::api::content::Content;
use crate::serve::api::responses::tools::{ClientTool, Tools};
use crate::serve::http::error::ApiError;
use crate::serve::http::ignored::Ignored;
use crate::serve::http::images::image_part;
use serde_json::{Value, json};
use std::collections::HashSet;

/// Items of what OpenAI's servers did by themselves, and of what only they can read.
const HOSTED: &[&str] = &[
    "code_interpreter_call",
    "compaction",
    "compaction_summary",
    "context_compaction",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "tool_search_call",
    "web_search_call",
];

/// Beginnings of the names of items of which an answer needs none.
const NOT_NEEDED: &[&str] = &["rs_", "ws_", "ig_", "ci_", "fs_", "mcp", "cmp_", "tsc_"];

/// The conversation so far.
pub(super) struct Messages<'a> {
    pub(super) messages: Vec<Value>,
    /// Items may bring more of them.
    pub(super) tools: &'a mut Tools,
    pub(super) ignored: &'a Ignored,
}

impl Messages<'_> {
    pub(super) fn push(&mut self, role: &str, content: impl Into<Value>) {
        let content: Value = content.into();
        self.messages
            .push(json!({"role": role, "content": content}));
    }

    pub(super) fn add_all(&mut self, items: &[Value]) -> Result<(), ApiError> {
        let ids: HashSet<&str> = items
            .iter()
            .filter(|item| !is_reference(item))
            .filter_map(|item| item["id"].as_str())
            .collect();
        for (i, item) in items.iter().enumerate() {
            let place = format!("input[{i}]");
            if is_reference(item) {
                self.refer(&place, item["id"].as_str().unwrap_or_default(), &ids)?;
            } else {
                self.add(&place, item)?;
            }
        }
        Ok(())
    }

    /// A reference to an item that was to be stored: fine if it is here as well, or not needed.
    fn refer(&self, place: &str, id: &str, ids: &HashSet<&str>) -> Result<(), ApiError> {
        if ids.contains(id) {
            return Ok(());
        }
        if NOT_NEEDED.iter().any(|begin| id.starts_with(begin)) {
            self.ignored.add(place);
            return Ok(());
        }
        let message = format!(
            "the item {id:?} is not here, as nothing is stored: set `store: false`, so that the client sends items whole"
        );
        Err(ApiError::field(place, message))
    }

    fn add(&mut self, place: &str, item: &Value) -> Result<(), ApiError> {
        let field = |name: &str| {
            item[name]
                .as_str()
                .ok_or_else(|| ApiError::field(place, format!("it has no text {name:?}")))
        };
        let function = |tools: &Tools| {
            Ok::<_, ApiError>(tools.function(item["namespace"].as_str(), field("name")?))
        };
        match item["type"].as_str() {
            None | Some("message") => {
                let content = content_of(place, &item["content"])?.into_value();
                self.message(field("role")?, content);
            }
            Some("reasoning") => {
                let texts = item["content"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(|part| part["text"].as_str());
                let text = texts.collect::<String>();
                if !text.is_empty() {
                    self.messages.push(
                        json!({"role": "assistant", "content": "", "reasoning_content": text}),
                    );
                }
            }
            Some("function_call") => {
                let name = function(self.tools)?;
                self.call(field("call_id")?, &name, field("arguments")?.into());
            }
            Some("custom_tool_call") => {
                let (name, arguments) = (
                    function(self.tools)?,
                    ClientTool::arguments(field("input")?),
                );
                self.call(field("call_id")?, &name, arguments.to_string().into());
            }
            // Calls of tools that clients bring along; what is done is in one of these fields.
            Some(kind @ ("local_shell_call" | "shell_call" | "apply_patch_call")) => {
                let done = [&item["action"], &item["operation"]];
                let done = done.into_iter().find(|done| done.is_object());
                let done = done.ok_or_else(|| ApiError::field(place, "it has no action"))?;
                let id = item["call_id"].as_str().or(item["id"].as_str());
                let id = id.ok_or_else(|| ApiError::field(place, "it has no text \"call_id\""))?;
                let name = kind.trim_end_matches("_call");
                self.call(id, name, done.to_string().into());
            }
            Some(
                "function_call_output"
                | "custom_tool_call_output"
                | "local_shell_call_output"
                | "shell_call_output"
                | "apply_patch_call_output",
            ) => {
                let id = item["call_id"].as_str().or(item["id"].as_str());
                let id = id.ok_or_else(|| ApiError::field(place, "it has no text \"call_id\""))?;
                let (text, images) = output_of(place, item)?;
                self.messages
                    .push(json!({"role": "tool", "tool_call_id": id, "content": text}));
                // Templates show images of users alone.
                if !images.is_empty() {
                    self.push("user", images);
                }
            }
            Some("additional_tools" | "tool_search_output") => {
                let tools = item["tools"].as_array().map_or(&[][..], Vec::as_slice);
                self.tools
                    .add_all(&format!("{place}.tools"), tools, self.ignored)?;
            }
            Some(kind) if HOSTED.contains(&kind) => self.ignored.add(place),
            Some(kind) => {
                let message = format!("items of the type {kind:?} are not supported");
                return Err(ApiError::field(place, message));
            }
        }
        Ok(())
    }

    /// Adds a message; one of the assistant goes with the reasoning before it.
    fn message(&mut self, role: &str, content: Value) {
        let last = self.messages.last_mut().filter(|last| {
            role == "assistant"
                && last["role"] == role
                && last["content"] == ""
                && last["tool_calls"].is_null()
        });
        match last {
            Some(last) => last["content"] = content,
            None => self.push(role, content),
        }
    }

    fn call(&mut self, id: &str, name: &str, arguments: Value) {
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let is_assistant = |last: &Value| last["role"] == "assistant";
        if !self.messages.last().is_some_and(is_assistant) {
            self.push("assistant", "");
        }
        match self.messages.last_mut().map(|last| &mut last["tool_calls"]) {
            Some(Value::Array(calls)) => calls.push(call),
            Some(calls) => *calls = json!([call]),
            None => {}
        }
    }
}

/// Whether an item says no more than another's name.
fn is_reference(item: &Value) -> bool {
    match item["type"].as_str() {
        Some(kind) => kind == "item_reference",
        None => item["role"].is_null() && item["id"].is_string(),
    }
}

/// What came of a call: its text and its images.
fn output_of(place: &str, item: &Value) -> Result<(String, Vec<Value>), ApiError> {
    let text = match &item["output"] {
        Value::Null => item["status"].as_str().unwrap_or_default().to_owned(),
        Value::Array(parts) if item["type"] == "shell_call_output" => {
            Value::from(parts.as_slice()).to_string()
        }
        output => return Ok(content_of(place, output)?.split()),
    };
    Ok((text, Vec::new()))
}

/// A text, or the texts and images of parts, one behind the other.
fn content_of(place: &str, value: &Value) -> Result<Content, ApiError> {
    let mut content = Content::default();
    let parts = match value {
        Value::String(text) => {
            content.text(text);
            &[][..]
        }
        Value::Array(parts) => parts,
        _ => return Err(ApiError::field(place, "expected a text or parts")),
    };
    for part in parts {
        match (
            part["type"].as_str(),
            part["text"].as_str(),
            part["refusal"].as_str(),
        ) {
            (Some("input_text" | "output_text" | "text"), Some(text), _)
            | (Some("refusal"), _, Some(text)) => content.text(text),
            (Some("input_image"), ..) => content.image(image_of(place, part)?),
            _ => {
                return Err(ApiError::field(
                    place,
                    format!(
                        "parts of the type {} are not supported, only text and images",
                        part["type"]
                    ),
                ));
            }
        }
    }
    Ok(content)
}

/// The image of a part.
fn image_of(place: &str, part: &Value) -> Result<Value, ApiError> {
    match part["image_url"].as_str() {
        Some(url) => Ok(image_part(url, part.get("detail"))),
        None => Err(ApiError::field(
            place,
            "an image is told by its image_url: no files are stored here",
        )),
    }
}
