//! MiniMax M3: elements named after the parameters, with a special mark at the start of each tag;
//! objects and arrays are elements in elements.

use crate::chat::ChatError;
use crate::chat::tools::tagged::{marked, text_rules};
use crate::chat::tools::values::{self, Parameter, Schemas, Text};
use crate::chat::tools::{Format, Opening, Tool, ToolCall, call, written};
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
        for (index, tool) in tools.iter().enumerate() {
            let schemas = Schemas { index, tool, marks };
            let mut body = mark(&format!("{MARK}<invoke name=\"{}\">", tool.name));
            for (k, parameter) in schemas.arguments()?.parameters.iter().enumerate() {
                let rule = format!("argument{index}_{k}");
                let optional = if parameter.required { "" } else { "?" };
                body += &format!(" {rule}{optional}");
                rules += &argument(&schemas, parameter, &rule)?;
            }
            let end = mark(&format!("{MARK}</invoke>"));
            rules += &format!("call{index}: {body} {end} \"\\n\"\n");
            calls.push(format!("call{index}"));
        }
        Ok(format!(
            "start: \"\\n\" call+ {}\ncall: {}\n{rules}",
            mark(CLOSE),
            calls.join(" | ")
        ))
    },
};

/// Rules of one argument. Elements in elements are free up to the end of the outermost.
fn argument(
    schemas: &Schemas<'_>,
    parameter: &Parameter<'_>,
    rule: &str,
) -> Result<String, ChatError> {
    let mark = |text: &str| marked(&[MARK], text, schemas.marks);
    let (name, path) = (parameter.name, format!("/properties/{}", parameter.name));
    let (open, close) = (mark(&format!("{MARK}<{name}>")), format!("{MARK}</{name}>"));
    let end = mark(&close);
    let (mut texts, mut json) = (Vec::new(), Vec::new());
    for schema in schemas.alternatives(parameter.schema) {
        if values::may_be_text(&schema) {
            texts.push(schemas.text(&schema, &path)?);
        }
        let is_nested = |kind: &&str| values::of_type(&schema, kind).is_some();
        if !values::is_text(&schema) && ["object", "array"].iter().any(is_nested) {
            let keys = schema.as_object().into_iter().flatten().map(|(key, _)| key);
            for key in keys.filter(|key| *key != "type") {
                schemas.loosen(&path, key, "cannot be enforced in the model's format")?;
            }
            texts.push(Text::default());
        } else {
            json.extend(values::without_texts(schema));
        }
    }
    if texts.iter().any(Text::is_free) {
        let rules = text_rules(&Text::default(), &format!("{rule}_text"), &close, &end);
        return Ok(format!("{rule}: {open} {rule}_text\n{rules}"));
    }
    let (mut rules, mut names) = (String::new(), Vec::new());
    for (n, text) in texts.iter().enumerate() {
        names.push(format!("{rule}_text{n}"));
        rules += &text_rules(text, &names[n], &close, &end);
    }
    if !json.is_empty() {
        let schema = schemas.alone(&values::any_of(json));
        names.push(format!("{rule}_json {end}"));
        rules += &format!("{rule}_json: %json {schema}\n");
    }
    Ok(format!("{rule}: {open} ({})\n{rules}", names.join(" | ")))
}

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
