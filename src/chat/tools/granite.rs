//! Granite 3: `<|tool_call|>` and a JSON array of calls. Granite 4 writes Hermes' format.

use crate::chat::tools::{Format, Opening, call, written};
use serde_json::json;

pub(super) const FORMAT: Format = Format {
    name: "granite",
    marks: &["<|tool_call|>"],
    reasoning: ("<think>", "</think>"),
    hidden: &["<response>", "</response>"],
    openings: &[Opening::marker("<|tool_call|>")],
    close: "",
    scan: |text| call::scan_json(text, ""),
    read: call::read_json,
    written: written::in_json,
    grammar: |tools, marks| {
        let calls = json!({"type": "array", "minItems": 1, "items": call::call_schema(tools, "name", "arguments")});
        Ok(call::json_grammar(&calls, ("", ""), "", marks))
    },
};
