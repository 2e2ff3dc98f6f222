//! GLM 4.5 and later: a name, then keys and values in tags, between `<tool_call>` and
//! `</tool_call>`.

use crate::chat::tools::{Format, Opening, Tool, ToolCall, call};
use serde_json::Map;

const CLOSE: &str = "</tool_call>";

pub(super) const FORMAT: Format = Format {
    name: "glm",
    marks: &["<tool_call>", "<arg_key>"],
    reasoning: ("<think>", "</think>"),
    hidden: &[],
    openings: &[Opening::marker("<tool_call>")],
    close: CLOSE,
    scan: |text| call::scan_until(text, CLOSE),
    read,
    grammar: |tools, marks| {
        let open = |name: &str| format!("<arg_key>{name}</arg_key>\n<arg_value>");
        let before = |tool: &Tool| super::lark_text(&format!("{}\n", tool.name));
        call::tagged_grammar(tools, marks, before, open, "</arg_value>\n", CLOSE)
    },
};

fn read(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let block = block.strip_suffix(CLOSE)?;
    let (name, mut rest) = block.split_at(block.find("<arg_key>").unwrap_or(block.len()));
    let name = name.trim();
    let mut arguments = Map::new();
    while let Some((key, behind)) = call::between(rest, "<arg_key>", "</arg_key>") {
        let (value, behind) = call::between(behind, "<arg_value>", "</arg_value>")?;
        arguments.insert(
            key.trim().to_owned(),
            call::value_of(tools, name, key.trim(), value),
        );
        rest = behind;
    }
    let is_call = !name.is_empty() && !name.contains(['<', '{', '\n']) && rest.trim().is_empty();
    is_call.then(|| {
        vec![ToolCall {
            name: name.to_owned(),
            arguments,
            id: None,
        }]
    })
}
