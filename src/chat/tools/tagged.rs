//! Calls in tags: a name, then each argument between marks. A format of this kind is a table.

use crate::chat::ChatError;
use crate::chat::tools::values::{Parameter, Schemas, Text};
use crate::chat::tools::{
    Format, Marks, Opening, Scan, Tool, ToolCall, call, lark_text, values, written,
};
use serde_json::{Map, Value};
use std::cmp::Reverse;

/// Kind of the texts that are read, but never asked for, between `<![CDATA[` and `]]>`.
pub(super) const CDATA: &str = "cdata";

/// A format with calls in tags.
pub(super) trait Tagged {
    const TAGS: Tags;
}

/// The marks of a format. White space at their ends may be missing in a text.
pub(super) struct Tags {
    pub(super) name: &'static str,
    /// As [`Format::marks`].
    pub(super) marks: &'static [&'static str],
    pub(super) reasoning: (&'static str, &'static str),
    pub(super) hidden: &'static [&'static str],
    /// Around all calls; `open` is empty if each call stands alone.
    pub(super) open: &'static str,
    pub(super) close: &'static str,
    /// Marks before a call's name, between name and arguments, and after these.
    pub(super) call: [&'static str; 3],
    /// Lark grammar of attributes after a name, which may differ from call to call; the name ends
    /// there when calls are read.
    pub(super) attributes: &'static str,
    /// Marks before an argument's name, and after its value.
    pub(super) argument: [&'static str; 2],
    /// Marks between an argument's name and its value, each with the JSON type that it means: the
    /// first that fits is written. `""` leaves the type to the tool's parameters.
    pub(super) values: &'static [(&'static str, &'static str)],
    /// Parts of marks that are special tokens, in vocabularies that have them.
    pub(super) special: &'static [&'static str],
}

impl Tags {
    /// Values that most formats share.
    pub(super) const COMMON: Tags = Tags {
        name: "",
        marks: &[],
        reasoning: ("<think>", "</think>"),
        hidden: &[],
        open: "",
        close: "",
        call: ["", "", ""],
        attributes: "",
        argument: ["", ""],
        values: &[],
        special: &[],
    };
}

/// The format that a table describes.
pub(super) const fn format<T: Tagged>() -> Format {
    Format {
        name: T::TAGS.name,
        marks: T::TAGS.marks,
        reasoning: T::TAGS.reasoning,
        hidden: T::TAGS.hidden,
        openings: const {
            &[Opening {
                text: if T::TAGS.open.is_empty() {
                    T::TAGS.call[0]
                } else {
                    T::TAGS.open
                },
                at_start: false,
                keep: T::TAGS.open.is_empty(),
            }]
        },
        close: if T::TAGS.open.is_empty() {
            T::TAGS.call[2]
        } else {
            T::TAGS.close
        },
        scan: |text| scan(&T::TAGS, text),
        read: |block, tools| read(&T::TAGS, block, tools),
        written: written::at_the_end,
        grammar: |tools, marks| grammar(&T::TAGS, tools, marks),
    }
}

fn scan(tags: &Tags, text: &str) -> Scan {
    let close = if tags.open.is_empty() {
        tags.call[2]
    } else {
        tags.close
    };
    call::scan_until(text, close.trim())
}

fn read(tags: &Tags, block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let mut rest = block.trim();
    if !tags.open.is_empty() {
        rest = rest.strip_suffix(tags.close.trim())?;
    }
    let mut calls = Vec::new();
    while !rest.trim().is_empty() {
        let (call, behind) = read_call(tags, rest, tools)?;
        calls.push(call);
        rest = behind;
    }
    (!calls.is_empty()).then_some(calls)
}

fn read_call<'a>(tags: &Tags, text: &'a str, tools: &[Tool]) -> Option<(ToolCall, &'a str)> {
    let [open, named, close] = tags.call.map(str::trim);
    let rest = text.trim_start().strip_prefix(open)?;
    let ends = [named, tags.argument[0].trim(), close].into_iter();
    let end = ends
        .filter(|end| !end.is_empty())
        .filter_map(|end| rest.find(end))
        .min()?;
    let (name, rest) = rest.split_at(end);
    let name = name.trim();
    let name = if tags.attributes.is_empty() {
        name
    } else {
        name.split('"').next()?
    };
    let mut rest = rest.strip_prefix(named).unwrap_or(rest);
    let mut arguments = Map::new();
    loop {
        rest = rest.trim_start();
        if let Some(behind) = rest.strip_prefix(close) {
            let call = ToolCall {
                name: name.to_owned(),
                arguments,
                id: None,
            };
            return (!name.is_empty()).then_some((call, behind));
        }
        let argument = rest.strip_prefix(tags.argument[0].trim())?;
        let found = |(mark, kind): &(&'static str, &'static str)| {
            argument.find(mark.trim()).map(|at| (at, *mark, *kind))
        };
        let found = tags.values.iter().filter_map(found);
        // The first; of several at one place the longest.
        let (at, mark, kind) = found.min_by_key(|(at, mark, _)| (*at, Reverse(mark.len())))?;
        let (key, value) = (argument[..at].trim(), &argument[at + mark.trim().len()..]);
        let close = tags.argument[1].trim();
        let (value, behind) = match kind {
            CDATA => value.split_once(&format!("]]>{close}"))?,
            _ => value.split_once(close)?,
        };
        let value = if mark.ends_with('\n') {
            without_line_ends(value)
        } else {
            value
        };
        let value = match kind {
            "" => call::value_of(tools, name, key, value),
            "string" | CDATA => value.into(),
            _ => serde_json::from_str(value.trim()).unwrap_or_else(|_| value.into()),
        };
        arguments.insert(key.to_owned(), value);
        rest = behind;
    }
}

/// A text without one line end on each side.
fn without_line_ends(text: &str) -> &str {
    let text = text.strip_prefix('\n').unwrap_or(text);
    text.strip_suffix('\n').unwrap_or(text)
}

fn grammar(tags: &Tags, tools: &[Tool], marks: &Marks<'_>) -> Result<String, ChatError> {
    let mark = |text: &str| marked(tags.special, text, marks);
    let [open, named, close] = tags.call;
    let mut rules = String::new();
    let mut calls = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let schemas = Schemas { index, tool, marks };
        let arguments = schemas.arguments()?;
        let head = mark(&format!("{open}{}", tool.name));
        let mut body = format!("{head} {} {}", tags.attributes, mark(named));
        for (k, parameter) in arguments.parameters.iter().enumerate() {
            let rule = format!("argument{index}_{k}");
            let optional = if parameter.required { "" } else { "?" };
            body += &format!(" {rule}{optional}");
            rules += &argument(tags, &schemas, parameter, &rule)?;
        }
        let of_text = tags.values.iter().find(|(_, kind)| is_of_text(kind));
        if let Some((between, _)) = of_text.filter(|_| arguments.is_open) {
            let (before, between) = (mark(tags.argument[0]), mark(between));
            body += &format!(" ({before} /[A-Za-z0-9_.-]{{1,64}}/ {between} any{index})*");
            let (close, end) = (tags.argument[1], mark(tags.argument[1]));
            rules += &text_rules(&Text::default(), &format!("any{index}"), close, &end);
        }
        rules += &format!("call{index}: {body} {}\n", mark(close));
        calls.push(format!("call{index}"));
    }
    let calls = calls.join(" | ");
    Ok(if tags.open.is_empty() {
        format!("start: {calls}\n{rules}")
    } else {
        format!("start: call+ {}\ncall: {calls}\n{rules}", mark(tags.close))
    })
}

/// Rules of one argument: its name, and its value in each notation that may have it.
fn argument(
    tags: &Tags,
    schemas: &Schemas<'_>,
    parameter: &Parameter<'_>,
    rule: &str,
) -> Result<String, ChatError> {
    let mark = |text: &str| marked(tags.special, text, schemas.marks);
    let path = format!("/properties/{}", parameter.name);
    let (close, end) = (tags.argument[1], mark(tags.argument[1]));
    let (mut texts, mut json) = (Vec::new(), Vec::new());
    for schema in schemas.alternatives(parameter.schema) {
        if values::may_be_text(&schema) {
            texts.push(schemas.text(&schema, &path)?);
        }
        json.extend(values::without_texts(schema));
    }
    // Texts of which one may be any are that one.
    if let Some(free) = texts.iter().position(Text::is_free) {
        texts = vec![texts.swap_remove(free)];
    }
    let is_free = texts.first().is_some_and(Text::is_free);
    let (mut rules, mut alternatives) = (String::new(), Vec::new());
    for (n, (between, kind)) in tags.values.iter().enumerate() {
        let mut names = Vec::new();
        if is_of_text(kind) {
            for (m, text) in texts.iter().enumerate() {
                names.push(format!("{rule}_{n}_text{m}"));
                rules += &text_rules(text, &names[m], close, &end);
            }
        }
        let of_kind = json
            .iter()
            .filter_map(|schema| values::of_type(schema, kind));
        let of_kind: Vec<Value> = match *kind {
            "string" | CDATA => Vec::new(),
            // All other values are such texts, too.
            "" if is_free => Vec::new(),
            _ => of_kind.collect(),
        };
        if !of_kind.is_empty() {
            let (name, schema) = (format!("{rule}_{n}_value"), values::any_of(of_kind));
            let schema = schemas.alone(&schema);
            rules += &format!("{name}: {name}_json {end}\n{name}_json: %json {schema}\n");
            names.push(name);
        }
        if !names.is_empty() {
            let open = mark(&format!("{}{}{between}", tags.argument[0], parameter.name));
            alternatives.push(format!("{open} ({})", names.join(" | ")));
        }
    }
    Ok(format!("{rule}: {}\n{rules}", alternatives.join(" | ")))
}

/// Whether texts are written without quotes where a value is of this kind.
fn is_of_text(kind: &str) -> bool {
    matches!(kind, "" | "string")
}

/// Rules for a text up to and with `close`, which `end` matches; `rule` is a name for them.
pub(super) fn text_rules(text: &Text, rule: &str, close: &str, end: &str) -> String {
    // Text without special tokens ends where one comes.
    if end.starts_with("<[") {
        let name = rule.to_uppercase();
        return format!("{rule}: {name} {end}\n{name}: {}\n", text.terminal());
    }
    text.rules(rule, close)
}

/// A mark in a grammar, its special tokens as such.
pub(super) fn marked(special: &[&str], text: &str, marks: &Marks<'_>) -> String {
    let mut parts = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let found = special
            .iter()
            .filter_map(|token| rest.find(token).map(|at| (at, *token)));
        let (at, token) = found.min().unwrap_or((rest.len(), ""));
        if at > 0 {
            parts.push(lark_text(&rest[..at]));
        }
        if !token.is_empty() {
            parts.push(marks.lark(token));
        }
        rest = &rest[at + token.len()..];
    }
    match &parts[..] {
        [] => "\"\"".to_owned(),
        _ => parts.join(" "),
    }
}
