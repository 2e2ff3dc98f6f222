//! Qwen3-Coder: `<function=name>` with `<parameter=name>` in it, between `<tool_call>` and
//! `</tool_call>`.

use crate::chat::tools::written::Tags;
use crate::chat::tools::{Format, Opening, Tool, ToolCall, call};
use serde_json::Map;

const CLOSE: &str = "</tool_call>";

pub(super) const FORMAT: Format = Format {
    name: "qwen3-coder",
    marks: &["<tool_call>", "<function="],
    reasoning: ("<think>", "</think>"),
    hidden: &[],
    openings: &[Opening::marker("<tool_call>")],
    close: CLOSE,
    scan: |text| call::scan_until(text, CLOSE),
    read,
    written: |block, tools| TAGS.calls(block, ["<function=", ">", "</function>"], tools),
    grammar: |tools, marks| {
        let open = |name: &str| format!("<parameter={name}>\n");
        let before = |tool: &Tool| super::lark_text(&format!("\n<function={}>\n", tool.name));
        call::tagged_grammar(
            tools,
            marks,
            before,
            open,
            "\n</parameter>\n",
            &format!("</function>\n{CLOSE}"),
        )
    },
};

const TAGS: Tags = Tags {
    parameter: ["<parameter=", ">", "</parameter>"],
    value: "",
    lines: true,
};

fn read(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = block;
    while let Some((function, behind)) = call::between(rest, "<function=", "</function>") {
        let (name, mut parameters) = function.split_once('>')?;
        let mut arguments = Map::new();
        while let Some((parameter, behind)) =
            call::between(parameters, "<parameter=", "</parameter>")
        {
            let (key, value) = parameter.split_once('>')?;
            // One line end on each side is not part of the value.
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            arguments.insert(
                key.trim().to_owned(),
                call::value_of(tools, name.trim(), key.trim(), value),
            );
            parameters = behind;
        }
        calls.push(ToolCall {
            name: name.trim().to_owned(),
            arguments,
            id: None,
        });
        rest = behind;
    }
    (!calls.is_empty() && block.ends_with(CLOSE)).then_some(calls)
}
