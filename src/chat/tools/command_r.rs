//! Command R7B and Command A: a JSON array of calls between `<|START_ACTION|>` and
//! `<|END_ACTION|>`.

use crate::chat::tools::{Format, Opening, Tool, call, lark_text, written};
use serde_json::{Value, json};

const CLOSE: &str = "<|END_ACTION|>";

pub(super) const FORMAT: Format = Format {
    name: "command-r",
    marks: &["<|START_ACTION|>"],
    reasoning: ("<|START_THINKING|>", "<|END_THINKING|>"),
    hidden: &["<|START_RESPONSE|>", "<|END_RESPONSE|>"],
    openings: &[Opening::marker("<|START_ACTION|>")],
    close: CLOSE,
    scan: |text| call::scan_json(text, CLOSE),
    read: call::read_json,
    written: written::in_json,
    grammar: |tools, marks| {
        let one = |tool: &Tool| {
            json!({
                "type": "object",
                "properties": {
                    "tool_call_id": {"type": "string", "pattern": "^[0-9]{1,3}$"},
                    "tool_name": {"const": tool.name},
                    "parameters": call::parameters(tool),
                },
                "required": ["tool_call_id", "tool_name", "parameters"],
                "additionalProperties": false,
            })
        };
        let any: Vec<Value> = tools.iter().map(one).collect();
        let call = json!({"anyOf": any});
        let [open, between, end] = ["[\n    ", ",\n    ", "\n]"].map(lark_text);
        let close = marks.lark(CLOSE);
        Ok(format!(
            "start: {open} call ({between} call)* {end} {close}\ncall: %json {call}\n"
        ))
    },
};
