//! Requests of Ollama's API in the words of chat completions.

use crate::serve::api::content::Content;
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::images::base64_part;
use crate::serve::models::Keep;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Options that have the same name and the same sense here.
const SAME: &[&str] = &[
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_last_n",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "seed",
    "stop",
];

/// Options about how a model is loaded, which the server's flags say, and about a text that is
/// longer than the context, which is refused.
const OF_THE_SERVER: &[&str] = &[
    "f16_kv",
    "logits_all",
    "low_vram",
    "main_gpu",
    "num_batch",
    "num_ctx",
    "num_gpu",
    "num_gqa",
    "num_keep",
    "num_thread",
    "numa",
    "penalize_newline",
    "use_mlock",
    "use_mmap",
    "vocab_only",
];

/// What chats and continuations have in common.
pub(super) fn common(fields: &mut Fields) -> Result<(), ApiError> {
    if let Some(mut options) = fields.object("options")? {
        for name in SAME {
            if let Some(value) = options.take::<Value>(name)? {
                fields.set(name, value)?;
            }
        }
        if let Some(n) = options.take::<i64>("num_predict")? {
            // -2 is as many as the context holds, and so is -1 here.
            fields.set("max_tokens", n.max(-1).into())?;
        }
        options.only("tfs_z", 1.0)?;
        options.without_effect(OF_THE_SERVER);
        options.finish()?;
    }
    match fields.take::<Value>("format")? {
        None => {}
        Some(Value::String(text)) if text.is_empty() => {}
        Some(Value::String(text)) if text == "json" => {
            fields.set("response_format", json!({"type": "json_object"}))?;
        }
        Some(Value::Object(schema)) => {
            let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
            fields.set("response_format", format)?;
        }
        Some(other) => {
            let message = format!("expected \"json\" or a schema, found {other}");
            return Err(ApiError::field("format", message));
        }
    }
    think(fields)?;
    if fields.get("stream").is_none_or(Value::is_null) {
        fields.set("stream", true.into())?;
    }
    fields.without_effect(&["truncate", "shift"]);
    Ok(())
}

/// Whether the model thinks first, and how much.
fn think(fields: &mut Fields) -> Result<(), ApiError> {
    let (thinks, effort) = match fields.take::<Value>("think")? {
        None => return Ok(()),
        Some(Value::Bool(thinks)) => (thinks, None),
        Some(Value::String(effort)) if ["low", "medium", "high"].contains(&&effort[..]) => {
            (true, Some(effort))
        }
        Some(other) => {
            let message = format!("expected true, false, low, medium or high, found {other}");
            return Err(ApiError::field("think", message));
        }
    };
    // Under the names that templates have for it.
    let kwargs = json!({"enable_thinking": thinks, "thinking": thinks});
    fields.set("chat_template_kwargs", kwargs)?;
    match effort {
        Some(effort) => fields.set("reasoning_effort", effort.into()),
        None => Ok(()),
    }
}

/// The content of a message: its images, in Base64 without their types, then its text.
fn with_images(place: &str, images: Vec<Value>, text: &str) -> Result<Value, ApiError> {
    let mut content = Content::default();
    for image in &images {
        let data = image
            .as_str()
            .ok_or_else(|| ApiError::field(place, "expected images in Base64"))?;
        content.image(base64_part("", data));
    }
    content.text(text);
    Ok(content.into_value())
}

/// Fields of a continuation that would change the answer, and are not done here.
pub(super) fn refused_of_generate(fields: &mut Fields) -> Result<(), ApiError> {
    let template = fields.take::<String>("template")?;
    if template.is_some_and(|template| !template.is_empty()) {
        let message = "the model's own is used; with \"raw\": true none is";
        return Err(ApiError::field("template", message));
    }
    let context = fields.take::<Vec<Value>>("context")?;
    if context.is_some_and(|context| !context.is_empty()) {
        let message = "nothing is kept between requests: /api/chat takes a whole conversation";
        return Err(ApiError::field("context", message));
    }
    Ok(())
}

/// A prompt that the model's template is put around.
pub(super) fn prompt_as_messages(fields: &mut Fields, prompt: String) -> Result<(), ApiError> {
    let system = fields.take::<String>("system")?;
    let system = system.filter(|text| !text.is_empty());
    let system = system.map(|text| json!({"role": "system", "content": text}));
    let images = fields.take("images")?.unwrap_or_default();
    let content = with_images("images", images, &prompt)?;
    let user = json!({"role": "user", "content": content});
    fields.set("messages", system.into_iter().chain([user]).collect())
}

/// Messages whose calls have no names: results come in the order of the calls.
pub(super) fn messages(fields: &mut Fields) -> Result<(), ApiError> {
    let (mut messages, mut open) = (Vec::new(), Vec::new());
    for (i, message) in fields
        .need::<Vec<Value>>("messages")?
        .into_iter()
        .enumerate()
    {
        let place = format!("messages[{i}]");
        let Value::Object(mut message) = message else {
            return Err(ApiError::field(&place, "expected an object"));
        };
        let images = match message.shift_remove("images") {
            None | Some(Value::Null) => None,
            Some(Value::Array(images)) => Some(images),
            Some(_) => return Err(ApiError::field(&place, "its images are no list")),
        };
        if let Some(images) = images.filter(|images| !images.is_empty()) {
            let text = message.get("content").and_then(Value::as_str);
            let content =
                with_images(&format!("{place}.images"), images, text.unwrap_or_default())?;
            message.insert("content".into(), content);
        }
        if let Some(thinking) = message
            .shift_remove("thinking")
            .filter(|text| *text != "" && !text.is_null())
        {
            message.insert("reasoning_content".into(), thinking);
        }
        calls(&place, &mut message, &mut open)?;
        if message.get("role").is_some_and(|role| role == "tool") {
            result(&mut message, &mut open);
        }
        messages.push(Value::Object(message));
    }
    fields.set("messages", messages.into())
}

/// Gives each call of a message a name, which its result will have, too.
fn calls(
    place: &str,
    message: &mut Map<String, Value>,
    open: &mut Vec<(String, String)>,
) -> Result<(), ApiError> {
    let calls = match message.shift_remove("tool_calls") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Array(calls)) if calls.is_empty() => return Ok(()),
        Some(Value::Array(calls)) => calls,
        Some(_) => return Err(ApiError::field(place, "its tool_calls are no list")),
    };
    let mut named = Vec::new();
    open.clear();
    for (n, call) in calls.into_iter().enumerate() {
        let function = &call["function"];
        let Some(name) = function["name"].as_str() else {
            return Err(ApiError::field(place, "a call has no function with a name"));
        };
        let id = call["id"].as_str().filter(|id| !id.is_empty());
        let id = id.map_or_else(|| format!("call_{place}_{n}"), str::to_owned);
        let arguments = match &function["arguments"] {
            Value::Null => json!({}),
            arguments => arguments.clone(),
        };
        open.push((id.clone(), name.to_owned()));
        named.push(json!({
            "id": id, "type": "function", "function": {"name": name, "arguments": arguments},
        }));
    }
    message.insert("tool_calls".into(), named.into());
    Ok(())
}

/// Gives a result the name of its call: the first one that is open, of its function if it says
/// which.
fn result(message: &mut Map<String, Value>, open: &mut Vec<(String, String)>) {
    let name = message.shift_remove("tool_name");
    let name = name.as_ref().and_then(Value::as_str);
    if let Some(name) = name {
        message.entry("name").or_insert_with(|| name.into());
    }
    let of_name = |(_, function): &(String, String)| name.is_none_or(|name| name == function);
    let given = message.contains_key("tool_call_id");
    if let Some(i) = open.iter().position(of_name).filter(|_| !given) {
        let (id, _) = open.remove(i);
        message.insert("tool_call_id".into(), id.into());
    }
}

/// For how long a model stays: seconds, or a time as in `"5m"` or `"1h30m"`; below 0 for ever.
pub(super) fn keep_alive(value: Option<Value>) -> Result<Option<Keep>, ApiError> {
    let Some(value) = value else {
        return Ok(None);
    };
    let seconds = match &value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => duration(text),
        _ => None,
    };
    let seconds = seconds
        .filter(|seconds| seconds.is_finite())
        .ok_or_else(|| {
            let message = format!("expected seconds, or a time as in \"5m\", found {value}");
            ApiError::field("keep_alive", message)
        })?;
    Ok(Some(match seconds < 0.0 {
        true => Keep::Always,
        false => Keep::For(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)),
    }))
}

/// The seconds of a time as Go writes it: numbers with units, the largest first.
fn duration(text: &str) -> Option<f64> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    if rest.is_empty() {
        return None;
    }
    if let Ok(seconds) = rest.parse::<f64>() {
        return Some(sign * seconds);
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let n = rest.find(|c: char| c != '.' && !c.is_ascii_digit())?;
        let (number, behind) = rest.split_at(n);
        let end = behind
            .find(|c: char| c == '.' || c.is_ascii_digit())
            .unwrap_or(behind.len());
        let (unit, behind) = behind.split_at(end);
        let unit = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        seconds += number.parse::<f64>().ok()? * unit;
        rest = behind;
    }
    Some(sign * seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let keep = |value: Value| keep_alive(Some(value)).ok().flatten();
        let seconds = |n| Some(Keep::For(Duration::from_secs_f64(n)));
        for (value, expected) in [
            (json!(0), seconds(0.0)),
            (json!("0"), seconds(0.0)),
            (json!(90), seconds(90.0)),
            (json!(1.5), seconds(1.5)),
            (json!("5m"), seconds(300.0)),
            (json!("1h30m"), seconds(5400.0)),
            (json!("1.5h"), seconds(5400.0)),
            (json!("300ms"), seconds(0.3)),
            (json!(-1), Some(Keep::Always)),
            (json!("-1"), Some(Keep::Always)),
            (json!("-1m"), Some(Keep::Always)),
            (json!(1e300), Some(Keep::For(Duration::MAX))),
        ] {
            assert_eq!(keep(value.clone()), expected, "{value}");
        }
        for wrong in [
            json!(""),
            json!("-"),
            json!("5 minutes"),
            json!("m"),
            json!("5m3"),
            json!("1..5s"),
            json!("nan"),
            json!("inf"),
            json!([5]),
            json!(true),
        ] {
            assert!(keep_alive(Some(wrong.clone())).is_err(), "{wrong}");
        }
        assert!(keep_alive(None).unwrap().is_none());
    }

    #[test]
    fn results_find_their_calls() {
        let body = json!({"messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [
                {"function": {"name": "a", "arguments": {"n": 1}}}, {"function": {"name": "b"}},
            ]},
            {"role": "tool", "tool_name": "b", "content": "2"},
            {"role": "tool", "content": "1"},
        ]});
        let ignored = crate::serve::http::ignored::Ignored::default();
        let mut fields = Fields::parse(body.to_string().as_bytes(), ignored).unwrap();
        messages(&mut fields).unwrap();
        let messages: Vec<Value> = fields.need("messages").unwrap();
        let calls = &messages[1]["tool_calls"];
        assert_eq!(messages[1]["reasoning_content"], "t");
        assert_eq!(calls[0]["function"]["arguments"], json!({"n": 1}));
        assert_eq!(calls[1]["function"]["arguments"], json!({}));
        assert_eq!(messages[2]["tool_call_id"], calls[1]["id"]);
        assert_eq!(messages[2]["name"], "b");
        assert_eq!(messages[3]["tool_call_id"], calls[0]["id"]);
    }
}
