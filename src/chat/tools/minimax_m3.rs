//! MiniMax M3: elements named after the parameters, with a special mark at the start of each tag;
//! objects and arrays are elements in elements.

use crate::chat::tools::tagged::marked;
use crate::chat::tools::values::Parameter;
use crate::chat::tools::{Format, Opening, Tool, ToolCall, call, lark_text, written};
use serde_json::{Map, Value};

const MARK: &str = "]<]minimax[>[";
const CLOSE: &str = "]<]minimax[>[</tool_call>";
/// Deepest nesting of elements that is read.
const MAX_DEPTH: usize = 64;

pub(super) const FORMAT: Format = Format {
    name: "minimax-m3",
    marks: &[MARK],
    reasoning: ("<mm:think>", "</mm:think>"),
    hidden: &["</mm:think>"],
    openings: &[Opening::marker("]<]minimax[>[<tool_call>")],
    close: CLOSE,
    scan: |text| call::scan_until(text, CLOSE),
    read,
    written: written::at_the_end,
    grammar: |tools, marks| {
        let mark = |text: &str| marked(&[MARK], text, marks);
        let mut rules = String::new();
        let mut calls = Vec::new();
        for (i, tool) in tools.iter().enumerate() {
            let begin = format!("{MARK}<invoke name=\"{}\">", tool.name);
            let mut body = mark(&begin);
            for (k, parameter) in Parameter::listed(&tool.parameters).enumerate() {
                let Parameter {
                    name,
                    schema,
                    required,
                } = parameter;
                let optional = if required { "" } else { "?" };
                body += &format!(" argument{i}_{k}{optional}");
                let open = mark(&format!("{MARK}<{name}>"));
                let close = format!("{MARK}</{name}>");
                let kind = schema.get("type").and_then(Value::as_str);
                // Elements in elements are free up to the end of the outermost.
                rules += &match kind {
                    Some("integer" | "number" | "boolean") => format!(
                        "argument{i}_{k}: {open} json{i}_{k} {}\njson{i}_{k}: %json {schema}\n",
                        mark(&close)
                    ),
                    _ => format!(
                        "argument{i}_{k}: {open} text{i}_{k}\ntext{i}_{k}[suffix={}]: /(?s:.*)/\n",
                        lark_text(&close)
                    ),
                };
            }
            rules += &format!(
                "call{i}: {body} {} \"\\n\"\n",
                mark(&format!("{MARK}</invoke>"))
            );
            calls.push(format!("call{i}"));
        }
        Ok(format!(
            "start: \"\\n\" call+ {}\ncall: {}\n{rules}",
            mark(CLOSE),
            calls.join(" | ")
        ))
    },
};

fn read(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let mut rest = block.strip_suffix(CLOSE)?.trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let (tag, inner, behind) = element(rest)?;
        let name = tag.strip_prefix("invoke name=\"")?.strip_suffix('"')?;
        let mut arguments = Map::new();
        let mut inner = inner.trim();
        while !inner.is_empty() {
            let (key, text, behind) = element(inner)?;
            let value = if text.trim_start().starts_with(MARK) {
                nested(text, 0)?
            } else {
                call::value_of(tools, name, key, text)
            };
            arguments.insert(key.to_owned(), value);
            inner = behind.trim();
        }
        calls.push(ToolCall {
            name: name.to_owned(),
            arguments,
            id: None,
        });
        rest = behind.trim();
    }
    (!calls.is_empty()).then_some(calls)
}

/// First element of a text: its tag, its content, and the text after it.
fn element(text: &str) -> Option<(&str, &str, &str)> {
    let (tag, rest) = text
        .strip_prefix(MARK)?
        .strip_prefix('<')?
        .split_once('>')?;
    let name = tag.split(' ').next()?;
    let (open, close) = (format!("{MARK}<{name}"), format!("{MARK}</{name}>"));
    let (mut depth, mut from) = (1, 0);
    loop {
        let end = from + rest[from..].find(&close)?;
        depth += rest[from..end].matches(&open).count();
        depth -= 1;
        from = end + close.len();
        if depth == 0 {
            return Some((tag, &rest[..end], &rest[from..]));
        }
    }
}

/// The value of nested elements: an array of those called `item`, otherwise an object.
fn nested(text: &str, depth: usize) -> Option<Value> {
    if depth > MAX_DEPTH {
        return None;
    }
    let mut rest = text.trim();
    if !rest.starts_with(MARK) {
        return Some(serde_json::from_str(rest).unwrap_or_else(|_| text.into()));
    }
    let (mut items, mut members) = (Vec::new(), Map::new());
    while !rest.is_empty() {
        let (key, inner, behind) = element(rest)?;
        let value = nested(inner, depth + 1)?;
        match key {
            "item" => items.push(value),
            key => drop(members.insert(key.to_owned(), value)),
        }
        rest = behind.trim();
    }
    Some(if members.is_empty() {
        items.into()
    } else {
        members.into()
    })
}
