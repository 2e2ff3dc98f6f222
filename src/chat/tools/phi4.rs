//! Phi-4-mini: JSON between `<|tool_call|>` and `<|/tool_call|>`, an object or an array of calls.

use crate::chat::tools::{Format, Opening, call, written};

const CLOSE: &str = "<|/tool_call|>";

pub(super) const FORMAT: Format = Format {
    name: "phi4",
    marks: &["<|tool_call|>", CLOSE],
    reasoning: ("<think>", "</think>"),
    hidden: &[],
    openings: &[Opening::marker("<|tool_call|>")],
    close: CLOSE,
    scan: |text| call::scan_json(text, CLOSE),
    read: call::read_json,
    written: written::in_json,
    grammar: |tools, marks| {
        Ok(call::json_grammar(
            &call::call_schema(tools, "name", "arguments"),
            ("", ""),
            CLOSE,
            marks,
        ))
    },
};
