//! Hermes 2 Pro, Qwen 2.5, Qwen 3 and many others: JSON between `<tool_call>` and `</tool_call>`,
//! one call each.

use crate::chat::tools::{Format, Opening, call, written};

const CLOSE: &str = "</tool_call>";

pub(super) const FORMAT: Format = Format {
    name: "hermes",
    marks: &["<tool_call>"],
    reasoning: ("<think>", "</think>"),
    hidden: &[],
    openings: &[Opening::marker("<tool_call>")],
    close: CLOSE,
    scan: |text| call::scan_json(text, CLOSE),
    read: call::read_json,
    written: written::in_json,
    grammar: |tools, marks| {
        Ok(call::json_grammar(
            &call::call_schema(tools, "name", "arguments"),
            ("\n", "\n"),
            CLOSE,
            marks,
        ))
    },
};
