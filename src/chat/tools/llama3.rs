//! Llama 3.1 to 3.3: a JSON object with `name` and `parameters` as the whole answer, or behind `<|python_tag|>`; several
//! with `;` between them.

use super::{Format, Opening, call};

pub(super) const FORMAT: Format = Format {
    name: "llama3",
    marks: &["<|start_header_id|>", "\"parameters\""],
    reasoning: ("<think>", "</think>"),
    hidden: &[],
    openings: &[Opening::marker("<|python_tag|>"), Opening::start("{"), Opening::start("; {")],
    close: "",
    scan: |text| call::scan_json(text.trim_start_matches("; "), "").shifted(text),
    read: |block, tools| call::read_json(block.trim_start_matches("; "), tools),
    grammar: |tools, marks| {
        Ok(call::json_grammar(&call::call_schema(tools, "name", "parameters"), ("", ""), "", marks))
    },
};

impl super::Scan {
    /// The end counted in `text`, of which the `; ` before the second call was left out.
    fn shifted(self, text: &str) -> Self {
        match self {
            super::Scan::Calls(len) => super::Scan::Calls(len + text.len() - text.trim_start_matches("; ").len()),
            other => other,
        }
    }
}
