//! Solar Open: calls with an id, a name and JSON, each between special tokens.

use crate::chat::tools::written::Written;
use crate::chat::tools::{Format, Opening, Scan, Tool, ToolCall, call, lark_text};

const CALL: &str = "<|tool_call:begin|>";
const NAME: &str = "<|tool_call:name|>";
const ARGUMENTS: &str = "<|tool_call:args|>";
const END: &str = "<|tool_call:end|>";

pub(super) const FORMAT: Format = Format {
    name: "solar-open",
    marks: &[CALL],
    reasoning: ("<|think|>", "<|end|>"),
    hidden: &[
        "<|begin|>assistant",
        "<|content|>",
        "<|tool_calls|>",
        "<|calls|>",
        "<|flush|>",
    ],
    openings: &[Opening::marker(CALL)],
    close: END,
    scan: |text| match text.split_once(ARGUMENTS) {
        None => Scan::More,
        Some((head, rest)) => match call::json_len(rest) {
            Err(()) => Scan::Nothing,
            Ok(None) => Scan::More,
            Ok(Some(len)) => call::scan_close(text, head.len() + ARGUMENTS.len() + len, END),
        },
    },
    read: |block, _| {
        let (head, rest) = block.split_once(ARGUMENTS)?;
        let (id, name) = head.split_once(NAME)?;
        let len = call::json_len(rest).ok()??;
        let id = Some(id.trim().to_owned()).filter(|id| !id.is_empty());
        let call = call::named_call(name, &rest[..len])?;
        Some(vec![ToolCall { id, ..call }])
    },
    written: |block, _| {
        let call = block.split_once(ARGUMENTS).and_then(|(head, rest)| {
            let (id, name) = head.split_once(NAME)?;
            let id = Some(id.trim()).filter(|id| !id.is_empty());
            Written::of(name, id, rest)
        });
        call.into_iter().collect()
    },
    grammar: |tools, marks| {
        let [name, arguments, end] = [NAME, ARGUMENTS, END].map(|mark| marks.lark(mark));
        let one = |tool: &Tool, json: &str| {
            let tool = lark_text(&tool.name);
            format!("/[A-Za-z0-9_-]{{1,32}}/ {name} {tool} {arguments} {json} {end}")
        };
        Ok(call::per_tool("call", tools, one))
    },
};
