//! Requests of Anthropic's API in the words of chat completions.

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
        let text = text_of("system", &system)?;
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

/// A text, or the texts of blocks, one behind the other.
fn text_of(place: &str, value: &Value) -> Result<String, ApiError> {
    let block = |block: &Value| {
        block_text(place, block)?.ok_or_else(|| {
            let kind = &block["type"];
            ApiError::field(
                place,
                format!("blocks of the type {kind} are not supported here, only text"),
            )
        })
    };
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => blocks.iter().map(block).collect(),
        _ => Err(ApiError::field(place, "expected a text or blocks")),
    }
}

/// The text of a block, if it is one of those that are text.
fn block_text(place: &str, block: &Value) -> Result<Option<String>, ApiError> {
    let field = |name: &str| text_field(place, block, name);
    let text = match block["type"].as_str() {
        Some("text") => field("text")?.to_owned(),
        Some("document") => document(place, block)?,
        Some("search_result") => {
            let text = text_of(place, &block["content"])?;
            titled(&[field("title")?, field("source")?], &text)
        }
        // All tools are there already.
        Some("tool_reference") => format!("The tool {} is there.\n", field("tool_name")?),
        // A summary of what was before, unless only Anthropic's servers can read it.
        Some("compaction") => block["content"].as_str().unwrap_or_default().to_owned(),
        _ => return Ok(None),
    };
    Ok(Some(text))
}

fn text_field<'a>(place: &str, block: &'a Value, name: &str) -> Result<&'a str, ApiError> {
    block[name]
        .as_str()
        .ok_or_else(|| ApiError::field(place, format!("a block has no text {name:?}")))
}

fn document(place: &str, block: &Value) -> Result<String, ApiError> {
    let source = &block["source"];
    let text = match source["type"].as_str() {
        Some("text") => text_field(place, source, "data")?.to_owned(),
        Some("content") => text_of(place, &source["content"])?,
        _ => {
            let message = format!(
                "documents of the type {} are not supported, only text",
                source["type"]
            );
            return Err(ApiError::field(place, message));
        }
    };
    let about = ["title", "context"].map(|name| block[name].as_str().unwrap_or_default());
    Ok(titled(&about, &text))
}

/// A text behind what is said about it.
fn titled(about: &[&str], text: &str) -> String {
    let about = about.iter().filter(|about| !about.is_empty());
    let about: String = about.map(|about| format!("{about}\n")).collect();
    let space = if about.is_empty() { "" } else { "\n" };
    format!("{about}{space}{text}\n")
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
        let content = text_of(place, &message["content"])?;
        messages.push(json!({"role": role, "content": content}));
        return Ok(());
    };
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for (i, block) in blocks.iter().enumerate() {
        let field = |name: &str| text_field(place, block, name);
        match block["type"].as_str() {
            Some("thinking") => reasoning.push_str(field("thinking")?),
            Some("redacted_thinking") => {}
            Some("tool_use") => calls.push(json!({
                "id": field("id")?, "type": "function",
                "function": {"name": field("name")?, "arguments": block["input"]},
            })),
            Some("tool_result") => messages.push(json!({
                "role": "tool", "tool_call_id": field("tool_use_id")?,
                "content": result(place, block)?,
            })),
            Some(kind) if is_hosted(kind) => ignored.add(&format!("{place}.content[{i}]")),
            kind => match block_text(place, block)? {
                Some(more) => text.push_str(&more),
                None => {
                    let kind = kind.unwrap_or_default();
                    return Err(ApiError::field(
                        place,
                        format!("blocks of the type {kind:?} are not supported"),
                    ));
                }
            },
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

/// What came of a call, and that it failed, if it did.
fn result(place: &str, block: &Value) -> Result<String, ApiError> {
    let text = match &block["content"] {
        Value::Null => String::new(),
        content => text_of(place, content)?,
    };
    Ok(match block["is_error"].as_bool() {
        Some(true) => format!("Error: {text}"),
        _ => text,
    })
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
