//! gpt-oss (harmony): messages in channels. `analysis` is reasoning, `final` is text, and a message
//! to `functions.name` is a call. A call ends with `<|call|>`, which ends the generation.

use crate::chat::tools::written::Written;
use crate::chat::tools::{Format, Opening, Scan, Tool, call, lark_text};

const MESSAGE: &str = "<|message|>";

/// The name, which the channel or the content type follows.
fn name_of(head: &str) -> &str {
    head.split([' ', '<']).next().unwrap_or_default()
}

pub(super) const FORMAT: Format = Format {
    name: "harmony",
    marks: &["<|channel|>", MESSAGE],
    reasoning: ("<|channel|>analysis<|message|>", "<|end|>"),
    hidden: &[
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        "<|channel|>commentary<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ],
    openings: &[
        Opening::marker("<|channel|>commentary to=functions."),
        Opening::marker("<|channel|>analysis to=functions."),
        Opening::marker("<|start|>assistant to=functions."),
        Opening {
            text: "to=functions.",
            at_start: true,
            keep: false,
        },
    ],
    close: "",
    scan: |text| match text.find(MESSAGE) {
        None => Scan::More,
        Some(at) => match call::json_len(&text[at + MESSAGE.len()..]) {
            Err(()) => Scan::Nothing,
            Ok(None) => Scan::More,
            Ok(Some(len)) => Scan::Calls(at + MESSAGE.len() + len),
        },
    },
    read: |block, _| {
        let (head, arguments) = block.split_once(MESSAGE)?;
        Some(vec![call::named_call(name_of(head), arguments)?])
    },
    written: |block, _| {
        let call = block.split_once(MESSAGE);
        call.and_then(|(head, rest)| Written::of(name_of(head), None, rest))
            .into_iter()
            .collect()
    },
    grammar: |tools, marks| {
        let (constrain, message) = (marks.lark("<|constrain|>"), marks.lark(MESSAGE));
        let one = |tool: &Tool, json: &str| {
            format!(
                "{} {constrain} \"json\" {message} {json}",
                lark_text(&format!("{} ", tool.name))
            )
        };
        Ok(call::per_tool("call", tools, one))
    },
};
