//! MiniMax M2: a block with an `<invoke name="…">` per call, which contains `<parameter name="…">`
//! tags.

use crate::chat::tools::written::Tags;
use crate::chat::tools::{Format, Opening, Tool, ToolCall, call};
use serde_json::Map;

const CLOSE: &str = "</minimax:tool_call>";

pub(super) const FORMAT: Format = Format {
    name: "minimax",
    marks: &["minimax:tool_call>", "<invoke name="],
    reasoning: ("<think>", "</think>"),
    hidden: &[],
    openings: &[Opening::marker("<minimax:tool_call>")],
    close: CLOSE,
    scan: |text| call::scan_until(text, CLOSE),
    read,
    written: |block, tools| TAGS.calls(block, ["<invoke name=\"", "\">", "</invoke>"], tools),
    grammar: |tools, marks| {
        let open = |name: &str| format!("<parameter name=\"{name}\">");
        let before =
            |tool: &Tool| super::lark_text(&format!("\n<invoke name=\"{}\">\n", tool.name));
        call::tagged_grammar(
            tools,
            marks,
            before,
            open,
            "</parameter>\n",
            &format!("</invoke>\n{CLOSE}"),
        )
    },
};

const TAGS: Tags = Tags {
    parameter: ["<parameter name=\"", "\">", "</parameter>"],
    value: "",
    lines: false,
};

fn read(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = block;
    while let Some((invoke, behind)) = call::between(rest, "<invoke name=\"", "</invoke>") {
        let (name, mut parameters) = invoke.split_once("\">")?;
        let mut arguments = Map::new();
        while let Some((parameter, behind)) =
            call::between(parameters, "<parameter name=\"", "</parameter>")
        {
            let (key, value) = parameter.split_once("\">")?;
            arguments.insert(key.to_owned(), call::value_of(tools, name, key, value));
            parameters = behind;
        }
        calls.push(ToolCall {
            name: name.to_owned(),
            arguments,
            id: None,
        });
        rest = behind;
    }
    (!calls.is_empty() && block.ends_with(CLOSE)).then_some(calls)
}
