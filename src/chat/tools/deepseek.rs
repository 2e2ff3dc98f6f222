//! DeepSeek R1, V3 and V3.1: calls between markers, each a name, a separator and the arguments,
//! which R1 and V3 write in a code block.

use crate::chat::tools::written::Written;
use crate::chat::tools::{Format, Opening, Tool, ToolCall, call, lark_text};

const CLOSE: &str = "<｜tool▁calls▁end｜>";
const CALL: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";

pub(super) const V3_1: Format = Format {
    name: "deepseek-v3.1",
    marks: &[CALL, SEPARATOR],
    reasoning: ("<think>", "</think>"),
    // The prompt ends like this if the model does not think, and some models repeat it.
    hidden: &[],
    openings: &[Opening::marker("<｜tool▁calls▁begin｜>")],
    close: CLOSE,
    scan: |text| call::scan_until(text, CLOSE),
    read,
    written,
    grammar: |tools, marks| {
        let [call, separator, end, close] =
            [CALL, SEPARATOR, CALL_END, CLOSE].map(|mark| marks.lark(mark));
        let one = |tool: &Tool, json: &str| {
            format!("{call} {} {separator} {json} {end}", lark_text(&tool.name))
        };
        // One block can contain several calls.
        Ok(call::per_tool(&format!("call+ {close}"), tools, one))
    },
};

pub(super) const V3: Format = Format {
    name: "deepseek",
    marks: &[CALL, SEPARATOR, "```json"],
    grammar: |tools, marks| {
        let [call, separator, end, close] =
            [CALL, SEPARATOR, CALL_END, CLOSE].map(|mark| marks.lark(mark));
        let one = |tool: &Tool, json: &str| {
            let name = lark_text(&format!("{}\n```json\n", tool.name));
            format!("{call} \"function\" {separator} {name} {json} \"\\n```\" {end}")
        };
        Ok(call::per_tool(
            &format!("call (\"\\n\" call)* {close}"),
            tools,
            one,
        ))
    },
    ..V3_1
};

fn read(block: &str, _: &[Tool]) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    for part in block.split(CALL).skip(1) {
        let (head, rest) = part.split_once(SEPARATOR)?;
        // The arguments end where their JSON ends: strings in it may look like a marker.
        let begin = rest.find('{')?;
        let len = call::json_len(&rest[begin..]).ok()??;
        let name = name_of(head, &rest[..begin]);
        calls.push(call::named_call(name, &rest[begin..begin + len])?);
    }
    (!calls.is_empty()).then_some(calls)
}

/// Name of a call: after the separator in the older layout, before it in the newer one.
fn name_of<'a>(head: &'a str, before_arguments: &'a str) -> &'a str {
    match before_arguments.trim().trim_end_matches("```json").trim() {
        "" => head,
        name => name,
    }
}

fn written(block: &str, _: &[Tool]) -> Vec<Written> {
    let call = |part: &str| {
        let (head, rest) = part.split_once(SEPARATOR)?;
        let begin = rest.find('{')?;
        Written::of(name_of(head, &rest[..begin]), None, &rest[begin..])
    };
    block.split(CALL).skip(1).filter_map(call).collect()
}
