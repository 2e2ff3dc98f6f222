//! Fallback for templates without tools: a JSON object with `name` and `arguments`, or with
//! `tool_calls`, an array of them, as the whole answer. The messages must contain the instruction
//! to write that.

use crate::chat::tools::{Format, Opening, call, written};

pub(super) const FORMAT: Format = Format {
    name: "generic",
    marks: &[],
    reasoning: ("<think>", "</think>"),
    hidden: &[],
    openings: &[Opening::start("{")],
    close: "",
    scan: |text| call::scan_json(text, ""),
    read: call::read_json,
    written: written::in_json,
    grammar: |tools, marks| {
        Ok(call::json_grammar(
            &call::call_schema(tools, "name", "arguments"),
            ("", ""),
            "",
            marks,
        ))
    },
};
