//! Calls in JSON between marks: an object, several, or an array of them. A format of this kind is a
//! table.

use crate::chat::tools::{Format, Marks, Opening, Scan, Tool, ToolCall, call, written};
use serde_json::{Value, json};

/// A format with calls in JSON between marks.
pub(super) trait Listed {
    const LIST: List;
}

/// The marks of a format.
pub(super) struct List {
    pub(super) name: &'static str,
    /// As [`Format::marks`].
    pub(super) marks: &'static [&'static str],
    pub(super) reasoning: (&'static str, &'static str),
    pub(super) hidden: &'static [&'static str],
    pub(super) open: &'static str,
    pub(super) close: &'static str,
    /// Text between the marks and the JSON.
    pub(super) around: (&'static str, &'static str),
    /// Whether the JSON is an array of calls.
    pub(super) is_array: bool,
    /// Keys of a call's name and arguments; empty if the name is the key of the arguments.
    pub(super) keys: (&'static str, &'static str),
}

impl List {
    /// Values that most formats share.
    pub(super) const COMMON: List = List {
        name: "",
        marks: &[],
        reasoning: ("<think>", "</think>"),
        hidden: &[],
        open: "",
        close: "",
        around: ("", ""),
        is_array: true,
        keys: ("name", "arguments"),
    };
}

/// The format that a table describes.
pub(super) const fn format<T: Listed>() -> Format {
    Format {
        name: T::LIST.name,
        marks: T::LIST.marks,
        reasoning: T::LIST.reasoning,
        hidden: T::LIST.hidden,
        openings: const { &[Opening::marker(T::LIST.open)] },
        close: T::LIST.close,
        scan: |text| scan(text, T::LIST.close),
        read: |block, tools| read(&T::LIST, block, tools),
        written: if T::LIST.keys.0.is_empty() {
            written::in_json_by_name
        } else {
            written::in_json
        },
        grammar: |tools, marks| Ok(grammar(&T::LIST, tools, marks)),
    }
}

/// Scans JSON values, and the mark after them.
fn scan(text: &str, close: &str) -> Scan {
    let mut len = 0;
    loop {
        match call::json_len(&text[len..]) {
            Ok(Some(more)) => len += more,
            Err(()) if len == 0 => return Scan::Nothing,
            Err(()) => return call::scan_close(text, len, close),
            // Another value has begun, or there is none yet.
            Ok(None) if len == 0 || !text[len..].trim().is_empty() => return Scan::More,
            Ok(None) => return call::scan_close(text, len, close),
        }
        // Without a mark at the end there is one value.
        if close.is_empty() {
            return Scan::Calls(len);
        }
    }
}

fn read(list: &List, block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = block;
    while let Ok(Some(len)) = call::json_len(rest) {
        let value: Value = serde_json::from_str(&rest[..len]).ok()?;
        rest = &rest[len..];
        match call::calls_of(&value) {
            Some(more) => calls.extend(more),
            None if list.keys.0.is_empty() => calls.extend(keyed(&value, tools)?),
            None => return None,
        }
    }
    // At the end of a text the mark may be incomplete.
    let is_whole = list.close.starts_with(rest.trim());
    (is_whole && !calls.is_empty()).then_some(calls)
}

/// Calls written as `{"name": {…arguments}}`.
fn keyed(value: &Value, _: &[Tool]) -> Option<Vec<ToolCall>> {
    let objects = match value {
        Value::Array(items) => &items[..],
        one => std::slice::from_ref(one),
    };
    let members = objects
        .iter()
        .map(Value::as_object)
        .collect::<Option<Vec<_>>>()?;
    let call = |(name, arguments): (&String, &Value)| {
        Some(ToolCall {
            name: name.clone(),
            arguments: call::arguments_of(arguments)?,
            id: None,
        })
    };
    members.into_iter().flatten().map(call).collect()
}

fn grammar(list: &List, tools: &[Tool], marks: &Marks<'_>) -> String {
    let call = if list.keys.0.is_empty() {
        let one = |tool: &Tool| {
            json!({
                "type": "object",
                "properties": {tool.name.clone(): call::parameters(tool)},
                "required": [tool.name],
                "additionalProperties": false,
            })
        };
        json!({"anyOf": tools.iter().map(one).collect::<Vec<_>>()})
    } else {
        call::call_schema(tools, list.keys.0, list.keys.1)
    };
    let schema = if list.is_array {
        json!({"type": "array", "minItems": 1, "items": call})
    } else {
        call
    };
    call::json_grammar(&schema, list.around, list.close, marks)
}
