//! Kimi K2: a section of calls, each named `functions.name:number`, with the arguments after a
//! marker.

use crate::chat::tools::written::Written;
use crate::chat::tools::{Format, Opening, Tool, ToolCall, call, lark_text};

const CLOSE: &str = "<|tool_calls_section_end|>";
const CALL: &str = "<|tool_call_begin|>";
const CALL_END: &str = "<|tool_call_end|>";
const ARGUMENTS: &str = "<|tool_call_argument_begin|>";

pub(super) const FORMAT: Format = Format {
    name: "kimi",
    marks: &["<|tool_calls_section_begin|>"],
    reasoning: ("<think>", "</think>"),
    hidden: &[],
    openings: &[Opening::marker("<|tool_calls_section_begin|>")],
    close: CLOSE,
    scan: |text| call::scan_until(text, CLOSE),
    read,
    written,
    grammar: |tools, marks| {
        let [call, arguments, end, close] =
            [CALL, ARGUMENTS, CALL_END, CLOSE].map(|mark| marks.lark(mark));
        let one = |tool: &Tool, json: &str| {
            let name = lark_text(&format!("functions.{}:", tool.name));
            format!("{call} {name} /[0-9]{{1,3}}/ {arguments} {json} {end}")
        };
        Ok(call::per_tool(&format!("call+ {close}"), tools, one))
    },
};

fn read(block: &str, _: &[Tool]) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    for part in block.split(CALL).skip(1) {
        let (id, rest) = part.split_once(ARGUMENTS)?;
        let len = call::json_len(rest).ok()??;
        calls.push(ToolCall {
            id: Some(id.trim().to_owned()),
            ..call::named_call(name_of(id), &rest[..len])?
        });
    }
    (!calls.is_empty()).then_some(calls)
}

/// The name in an id.
fn name_of(id: &str) -> &str {
    let id = id.trim();
    let name = id.strip_prefix("functions.").unwrap_or(id);
    name.rsplit_once(':').map_or(name, |(name, _)| name)
}

fn written(block: &str, _: &[Tool]) -> Vec<Written> {
    let call = |part: &str| {
        let (id, rest) = part.split_once(ARGUMENTS)?;
        Written::of(name_of(id), Some(id.trim()), rest)
    };
    block.split(CALL).skip(1).filter_map(call).collect()
}
