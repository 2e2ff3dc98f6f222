//! Llama 3.1 to 3.3: a JSON object with `name` and `parameters` as the whole answer, or after
//! `<|python_tag|>`; several are separated by `;`.

use crate::chat::tools::{Format, Opening, call, written};

pub(super) const FORMAT: Format = Format {
    name: "llama3",
    marks: &["<|start_header_id|>", "\"parameters\""],
    reasoning: ("<think>", "</think>"),
    hidden: &[],
    openings: &[
        Opening::marker("<|python_tag|>"),
        Opening::start("{"),
        Opening::start("; {"),
    ],
    close: "",
    scan: |text| call::scan_json(text.trim_start_matches("; "), "").shifted(text),
    read: |block, tools| call::read_json(block.trim_start_matches("; "), tools),
    written: |block, tools| written::in_json(block.trim_start_matches("; "), tools),
    grammar: |tools, marks| {
        Ok(call::json_grammar(
            &call::call_schema(tools, "name", "parameters"),
            ("", ""),
            "",
            marks,
        ))
    },
};

impl super::Scan {
    /// Converts offsets to those in `text`, which still has the `; ` before the second call.
    fn shifted(self, text: &str) -> Self {
        match self {
            super::Scan::Calls(len) => {
                super::Scan::Calls(len + text.len() - text.trim_start_matches("; ").len())
            }
            other => other,
        }
    }
}
