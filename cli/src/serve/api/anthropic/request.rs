//! Requests of Anthropic's API in the words of chat completions.

use crate::serve::api::content::{Content, image_of_block};
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::ignored::Ignored;
use crate::serve::jobs::params::schema_format;
use serde_json::{Map, Value, json};

/// Beginnings of the types of tools that Anthropic's servers, or clients with a model made for
/// them, bring along.
const HOSTED: &[&str] = &[
    "advisor_",
    "bash_",
    "browser_",
    "code_execution_",
    "computer_",
    "mcp_toolset",
    "memory_",
    "text_editor_",
    "tool_search_tool_",
    "web_fetch_",
    "web_search_",
];

/// What a client's program writes at the start of the system's text for the bill: it differs from
/// one conversation to the next, so that no prompt would begin like another.
const BILLING: &str = "x-anthropic-billing-header:";

pub(super) fn translate(fields: &mut Fields) -> Result<(), ApiError> {
    fields.rename("stop_sequences", "stop")?;
    fields.only("n", 1)?;
    if fields.take::<Value>("thread")?.is_some() {
        let message = "nothing is stored here: send the conversation whole";
        let details =
            json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]});
        return Err(ApiError::field("thread", message).with_details(details));
    }
    output_format(fields)?;
    messages(fields)?;
    tools(fields)?;
    thinking(fields)?;
    fields.ignore(&["metadata", "service_tier", "cache_control", "betas"]);
    fields.without_effect(&[
        "billing_policy",
        "compaction",
        "container",
        "context_management",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "mcp_servers",
        "speed",
        "user_profile_id",
        "workspace_id",
    ]);
    Ok(())
}

fn output_format(fields: &mut Fields) -> Result<(), ApiError> {
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
    Ok(())
}

fn messages(fields: &mut Fields) -> Result<(), ApiError> {
    let ignored = fields.ignored().clone();
    let mut messages = Vec::new();
    if let Some(mut system) = fields.take::<Value>("system")? {
        let is_billing = |block: &Value| {
            let text = block["text"].as_str();
            text.is_some_and(|text| text.starts_with(BILLING))
        };
        if let Value::Array(blocks) = &mut system
            && blocks.first().is_some_and(is_billing)
        {
            blocks.remove(0);
        }
        let (text, images) = content_of("system", &system)?.split();
        if !images.is_empty() {
            let message = "images belong into messages of the user";
            return Err(ApiError::field("system", message));
        }
        if !text.is_empty() {
            messages.push(json!({"role": "system", "content": text}));
        }
    }
    for (i, message) in fields
        .need::<Vec<Value>>("messages")?
        .into_iter()
        .enumerate()
    {
        add_message(&format!("messages[{i}]"), &message, &mut messages, &ignored)?;
    }
    // What the assistant has begun goes on.
    let is_begun = messages.last().is_some_and(|last| {
        last["role"] == "assistant" && last["content"] != "" && last["tool_calls"].is_null()
    });
    if is_begun {
        if fields.get("response_format").is_some() {
            let message = "what the assistant has begun cannot go on as a schema says";
            return Err(ApiError::field("messages", message));
        }
        fields.set("continue_final_message", true.into())?;
        fields.set("add_generation_prompt", false.into())?;
    }
    fields.set("messages", messages.into())
}

/// A text, or the texts and images of blocks, one behind the other.
fn content_of(place: &str, value: &Value) -> Result<Content, ApiError> {
    let mut content = Content::default();
    match value {
        Value::String(text) => content.text(text),
        Value::Array(blocks) => {
            for block in blocks {
                if !add_block(place, block, &mut content)? {
                    let kind = &block["type"];
                    return Err(ApiError::field(
                        place,
                        format!(
                            "blocks of the type {kind} are not supported here, only text and images"
                        ),
                    ));
                }
            }
        }
        _ => return Err(ApiError::field(place, "expected a text or blocks")),
    }
    Ok(content)
}

/// Adds a block, if it is one of those that are text or an image; whether it is.
fn add_block(place: &str, block: &Value, content: &mut Content) -> Result<bool, ApiError> {
    let field = |name: &str| text_field(place, block, name);
    match block["type"].as_str() {
        Some("text") => content.text(field("text")?),
        Some("image") => content.image(image_of_block(place, &block["source"])?),
        Some("document") => document(place, block, content)?,
        Some("search_result") => {
            titled(&[field("title")?, field("source")?], content);
            let (text, images) = content_of(place, &block["content"])?.split();
            content.text(&format!("{text}\n"));
            images.into_iter().for_each(|image| content.image(image));
        }
        // All tools are there already.
        Some("tool_reference") => {
            content.text(&format!("The tool {} is there.\n", field("tool_name")?));
        }
        // A summary of what was before, unless only Anthropic's servers can read it.
        Some("compaction") => content.text(block["content"].as_str().unwrap_or_default()),
        _ => return Ok(false),
    }
    Ok(true)
}

fn text_field<'a>(place: &str, block: &'a Value, name: &str) -> Result<&'a str, ApiError> {
    block[name]
        .as_str()
        .ok_or_else(|| ApiError::field(place, format!("a block has no text {name:?}")))
}

/// Adds a document: its title, what is said about it, and its texts and images.
fn document(place: &str, block: &Value, content: &mut Content) -> Result<(), ApiError> {
    let source = &block["source"];
    let about = ["title", "context"].map(|name| block[name].as_str().unwrap_or_default());
    titled(&about, content);
    match (source["type"].as_str(), source["media_type"].as_str()) {
        (Some("text"), _) => content.text(text_field(place, source, "data")?),
        (Some("content"), _) => match &source["content"] {
            Value::String(text) => content.text(text),
            Value::Array(blocks) => {
                for block in blocks {
                    if !add_block(place, block, content)? {
                        let message = "a document has texts and images";
                        return Err(ApiError::field(place, message));
                    }
                }
            }
            _ => return Err(ApiError::field(place, "expected a text or blocks")),
        },
        (Some("base64"), Some("application/pdf")) | (Some("url" | "file"), _) => {
            let message =
                "PDF documents are not read here: send their text, or their pages as images";
            return Err(ApiError::field(place, message));
        }
        _ => {
            let message = format!(
                "documents of the type {} are not supported, only texts and images",
                source["type"]
            );
            return Err(ApiError::field(place, message));
        }
    }
    content.text("\n");
    Ok(())
}

/// Adds what is said about the text that follows.
fn titled(about: &[&str], content: &mut Content) {
    let about = about.iter().filter(|about| !about.is_empty());
    let about: String = about.map(|about| format!("{about}\n")).collect();
    if !about.is_empty() {
        content.text(&format!("{about}\n"));
    }
}

/// Whether a block tells what Anthropic's servers did by themselves.
fn is_hosted(kind: &str) -> bool {
    matches!(
        kind,
        "container_upload" | "fallback" | "mcp_tool_listing" | "mcp_tool_use" | "server_tool_use"
    ) || kind.ends_with("_tool_result")
}

/// Adds a message as those of chat completions are: results of calls are messages of their own
/// there.
fn add_message(
    place: &str,
    message: &Value,
    messages: &mut Vec<Value>,
    ignored: &Ignored,
) -> Result<(), ApiError> {
    let role = message["role"]
        .as_str()
        .filter(|role| ["user", "assistant", "system"].contains(role));
    let role = role
        .ok_or_else(|| ApiError::field(place, "the role is none of user, assistant and system"))?;
    let Value::Array(blocks) = &message["content"] else {
        let content = content_of(place, &message["content"])?.into_value();
        messages.push(json!({"role": role, "content": content}));
        return Ok(());
    };
    let (mut content, mut reasoning, mut calls) = (Content::default(), String::new(), Vec::new());
    for (i, block) in blocks.iter().enumerate() {
        let field = |name: &str| text_field(place, block, name);
        match block["type"].as_str() {
            Some("thinking") => reasoning.push_str(field("thinking")?),
            Some("redacted_thinking") => {}
            Some("tool_use") => calls.push(json!({
                "id": field("id")?, "type": "function",
                "function": {"name": field("name")?, "arguments": block["input"]},
            })),
            Some("tool_result") => {
                // Templates show images of users alone.
                let (text, images) = result(place, block)?;
                images.into_iter().for_each(|image| content.image(image));
                messages.push(json!({
                    "role": "tool", "tool_call_id": field("tool_use_id")?, "content": text,
                }));
            }
            Some(kind) if is_hosted(kind) => ignored.add(&format!("{place}.content[{i}]")),
            kind => {
                if !add_block(place, block, &mut content)? {
                    let kind = kind.unwrap_or_default();
                    return Err(ApiError::field(
                        place,
                        format!("blocks of the type {kind:?} are not supported"),
                    ));
                }
            }
        }
    }
    let only_results =
        content.is_empty() && blocks.iter().any(|block| block["type"] == "tool_result");
    if !only_results {
        let mut message = json!({"role": role, "content": content.into_value()});
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

/// What came of a call, and that it failed, if it did: its text and its images.
fn result(place: &str, block: &Value) -> Result<(String, Vec<Value>), ApiError> {
    let (text, images) = match &block["content"] {
        Value::Null => Default::default(),
        content => content_of(place, content)?.split(),
    };
    let text = match block["is_error"].as_bool() {
        Some(true) => format!("Error: {text}"),
        _ => text,
    };
    Ok((text, images))
}

fn tools(fields: &mut Fields) -> Result<(), ApiError> {
    let ignored = fields.ignored().clone();
    if let Some(list) = fields.take::<Vec<Value>>("tools")? {
        let tools = list
            .into_iter()
            .enumerate()
            .map(|(i, tool)| function(&format!("tools[{i}]"), tool, &ignored));
        let tools = tools.filter_map(Result::transpose);
        fields.set("tools", tools.collect::<Result<Value, _>>()?)?;
    }
    let Some(mut choice) = fields.object("tool_choice")? else {
        return Ok(());
    };
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
    choice.finish()
}

/// A tool as a function; `None` if it is none.
fn function(place: &str, tool: Value, ignored: &Ignored) -> Result<Option<Value>, ApiError> {
    let Value::Object(mut tool) = tool else {
        return Err(ApiError::field(place, "expected an object"));
    };
    match tool.get("type").and_then(Value::as_str) {
        None | Some("custom") => {}
        Some(kind)
            if ignored.is_strict() && !HOSTED.iter().any(|begin| kind.starts_with(begin)) =>
        {
            let message = format!("the server has no tool of the type {kind:?}");
            return Err(ApiError::field(place, message));
        }
        Some(_) => {
            ignored.add(place);
            return Ok(None);
        }
    }
    let mut function = Map::new();
    for (name, elsewhere) in [
        ("name", "name"),
        ("description", "description"),
        ("input_schema", "parameters"),
        ("strict", "strict"),
    ] {
        function.extend(
            tool.shift_remove(name)
                .map(|value| (elsewhere.to_owned(), value)),
        );
    }
    Ok(Some(json!({"type": "function", "function": function})))
}

fn thinking(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut thinking) = fields.object("thinking")? else {
        return Ok(());
    };
    let kind: String = thinking.need("type")?;
    // How long the model thinks is its own affair.
    thinking.without_effect(&["budget_tokens"]);
    thinking.ignore(&["display"]);
    thinking.finish()?;
    let enable = match &kind[..] {
        "enabled" | "adaptive" | "between_tools" => true,
        "disabled" => false,
        other => {
            return Err(ApiError::field(
                "thinking",
                format!("the type {other:?} is not known"),
            ));
        }
    };
    fields.set("chat_template_kwargs", json!({"enable_thinking": enable}))
}
