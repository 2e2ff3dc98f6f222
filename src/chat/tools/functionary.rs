//! Functionary: `<function=name>{…}</function>` (v3.1), or messages that begin with `>>>` and the
//! name of a function, or with `all` for the user (v3.2).

use crate::chat::tools::written::Written;
use crate::chat::tools::{Format, Opening, Scan, call, lark_text};

const OPEN: &str = ">>>";
const CLOSE: &str = "</function>";

pub(super) const V3_1: Format = Format {
    name: "functionary-v3.1",
    marks: &["<function=", CLOSE],
    reasoning: ("<think>", "</think>"),
    hidden: &[],
    openings: &[Opening::marker("<function=")],
    close: CLOSE,
    scan: |text| match text.find('>') {
        None => Scan::More,
        Some(at) => match call::json_len(&text[at + 1..]) {
            Err(()) => Scan::Nothing,
            Ok(None) => Scan::More,
            Ok(Some(len)) => call::scan_close(text, at + 1 + len, CLOSE),
        },
    },
    read: |block, _| {
        let (name, rest) = block.split_once('>')?;
        let len = call::json_len(rest).ok()??;
        Some(vec![call::named_call(name, &rest[..len])?])
    },
    written: |block, _| {
        let call = block.split_once('>');
        call.and_then(|(name, rest)| Written::of(name, None, rest))
            .into_iter()
            .collect()
    },
    grammar: |tools, marks| {
        let one = |tool: &super::Tool, json: &str| {
            format!("{} {json}", lark_text(&format!("{}>", tool.name)))
        };
        Ok(call::per_tool(
            &format!("call {}", marks.lark(CLOSE)),
            tools,
            one,
        ))
    },
};

pub(super) const V3_2: Format = Format {
    name: "functionary-v3.2",
    marks: &[OPEN, "all"],
    hidden: &[">>>all\n"],
    openings: &[Opening::marker(OPEN)],
    close: "",
    scan: |text| match text.split_once('\n') {
        None if text.len() < 100 => Scan::More,
        None => Scan::Nothing,
        Some((name, rest)) => match call::json_len(rest) {
            Err(()) => Scan::Nothing,
            Ok(None) => Scan::More,
            Ok(Some(len)) => Scan::Calls(name.len() + 1 + len),
        },
    },
    read: |block, _| {
        let (name, arguments) = block.split_once('\n')?;
        Some(vec![call::named_call(name, arguments)?])
    },
    written: |block, _| {
        let call = block.split_once('\n');
        call.and_then(|(name, rest)| Written::of(name, None, rest))
            .into_iter()
            .collect()
    },
    grammar: |tools, _| {
        let one = |tool: &super::Tool, json: &str| {
            format!("{} {json}", lark_text(&format!("{}\n", tool.name)))
        };
        Ok(call::per_tool("call", tools, one))
    },
    ..V3_1
};
