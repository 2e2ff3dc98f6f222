//! Mistral: after `[TOOL_CALLS]`, a JSON array of calls (tokenizers v3 to v7), or for each call its
//! name and, after `[ARGS]`, its arguments (v11 on).

use crate::chat::tools::written::{self, Written};
use crate::chat::tools::{Format, Opening, Scan, Tool, ToolCall, call};
use serde_json::{Value, json};

const OPEN: &str = "[TOOL_CALLS]";
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

pub(super) const V3: Format = Format {
    name: "mistral",
    marks: &[OPEN],
    reasoning: ("[THINK]", "[/THINK]"),
    hidden: &[],
    openings: &[Opening::marker(OPEN)],
    close: "",
    scan,
    read,
    written,
    grammar: |tools, marks| {
        let one = |tool: &Tool| {
            json!({
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "arguments": call::parameters(tool),
                    "id": {"type": "string", "pattern": "^[a-zA-Z0-9]{9}$"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": false,
            })
        };
        let any: Vec<Value> = tools.iter().map(one).collect();
        let calls = json!({"type": "array", "minItems": 1, "items": {"anyOf": any}});
        Ok(call::json_grammar(&calls, ("", ""), "", marks))
    },
};

pub(super) const V11: Format = Format {
    name: "mistral-v11",
    marks: &[OPEN, ARGS],
    grammar: |tools, marks| {
        let args = marks.lark(ARGS);
        Ok(call::per_tool("call", tools, |tool, json| {
            format!("{} {args} {json}", super::lark_text(&tool.name))
        }))
    },
    ..V3
};

/// Position at which the name ends and the arguments begin, in the newer layout. It does not depend
/// on the text after that.
fn arguments_at(text: &str) -> Option<usize> {
    // Some templates omit the marker.
    let brace = text.find('{').filter(|&at| !text[..at].contains('['));
    brace.or_else(|| text.find(ARGS).map(|at| at + ARGS.len()))
}

fn scan(text: &str) -> Scan {
    if text.trim_start().starts_with(['[', '{']) && !text.trim_start().starts_with(ARGS) {
        return call::scan_json(text, "");
    }
    match arguments_at(text) {
        None => Scan::More,
        Some(at) => match call::json_len(&text[at..]) {
            Err(()) => Scan::Nothing,
            Ok(None) => Scan::More,
            Ok(Some(len)) => Scan::Calls(at + len),
        },
    }
}

fn read(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    if block.trim_start().starts_with(['[', '{']) {
        return call::read_json(block, tools);
    }
    let (head, arguments) = block.split_at(arguments_at(block)?);
    let (name, id) = name_of(head);
    let id = id.map(str::to_owned);
    let call = call::named_call(name, arguments)?;
    Some(vec![ToolCall { id, ..call }])
}

/// Name and id before the arguments of the newer layout.
fn name_of(head: &str) -> (&str, Option<&str>) {
    let head = head.trim_end_matches(ARGS);
    head.split_once(CALL_ID)
        .map_or((head, None), |(name, id)| (name, Some(id.trim())))
}

fn written(block: &str, tools: &[Tool]) -> Vec<Written> {
    if block.trim_start().starts_with(['[', '{']) {
        return written::in_json(block, tools);
    }
    let call = arguments_at(block).and_then(|at| {
        let (name, id) = name_of(&block[..at]);
        Written::of(name, id, &block[at..])
    });
    call.into_iter().collect()
}
