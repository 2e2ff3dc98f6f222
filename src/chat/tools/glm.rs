//! GLM 4.5 and later: a name, then keys and values in tags, between `<tool_call>` and
//! `</tool_call>`.

use crate::chat::tools::written::{Tags, Written};
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
    written,
    grammar: |tools, marks| {
        let open = |name: &str| format!("<arg_key>{name}</arg_key>\n<arg_value>");
        let before = |tool: &Tool| super::lark_text(&format!("{}\n", tool.name));
        call::tagged_grammar(tools, marks, before, open, "</arg_value>\n", CLOSE)
    },
};

const TAGS: Tags = Tags {
    parameter: ["<arg_key>", "</arg_key>", "</arg_value>"],
    value: "<arg_value>",
    lines: false,
};

fn written(block: &str, tools: &[Tool]) -> Vec<Written> {
    let (text, is_whole) = match block.strip_suffix(CLOSE) {
        Some(text) => (text, true),
        None => (block, false),
    };
    let begin = text.len() - text.trim_start().len();
    let end = text[begin..].find(['\n', '<']).map(|at| begin + at);
    let end = end.or(is_whole.then_some(text.len()));
    let call = end.and_then(|end| TAGS.call(&text[..end], &text[end..], is_whole, tools));
    call.into_iter().collect()
}

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
