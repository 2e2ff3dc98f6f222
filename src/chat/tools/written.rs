//! Calls that are being written: the parts that are certain while their text is incomplete.

use crate::chat::tools::call::{json_len, value_of};
use crate::chat::tools::{Tool, call};
use serde_json::Value;

/// A call with a complete name. Everything reported of the beginning of a text holds for the whole.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) name: String,
    pub(super) id: Option<String>,
    /// JSON of its arguments, as far as it is certain; empty if it is known at the end only.
    pub(super) arguments: String,
}

impl Written {
    /// A call of `name` with the JSON object at the start of `rest`, as far as it is written.
    pub(super) fn of(name: &str, id: Option<&str>, rest: &str) -> Option<Self> {
        let (name, rest) = (name.trim(), rest.trim_start());
        let arguments = match json_len(rest) {
            _ if !rest.starts_with('{') => "",
            Ok(Some(len)) => &rest[..len],
            _ => rest,
        };
        (!name.is_empty()).then(|| Self {
            name: name.to_owned(),
            id: id.map(str::to_owned),
            arguments: arguments.to_owned(),
        })
    }
}

/// Nothing: for calls in a notation of their own, which are reported at their end.
pub(super) fn at_the_end(_: &str, _: &[Tool]) -> Vec<Written> {
    Vec::new()
}

/// Calls in JSON, as [`call::read_json`] reads them: an object, an array of them, or one in an
/// object.
pub(super) fn in_json(block: &str, _: &[Tool]) -> Vec<Written> {
    let mut calls = Vec::new();
    for object in objects(block) {
        let members = members(object);
        match find(&members, &["tool_calls"]).and_then(|value| value.strip_prefix('[')) {
            Some(items) => calls.extend(elements(items).into_iter().filter_map(in_object)),
            None => calls.extend(in_object(object)),
        }
    }
    calls
}

/// Calls in JSON in which the arguments have the function's name as their key.
pub(super) fn in_json_by_name(block: &str, _: &[Tool]) -> Vec<Written> {
    let members = objects(block).into_iter().flat_map(members);
    members
        .filter_map(|(name, arguments)| Written::of(&name, None, arguments))
        .collect()
}

/// The objects of an array, or the one that there is.
fn objects(block: &str) -> Vec<&str> {
    let block = block.trim_start();
    match block.strip_prefix('[') {
        Some(items) => elements(items),
        None => vec![block],
    }
}

fn in_object(object: &str) -> Option<Written> {
    let mut all = members(object);
    if let Some(function) = find(&all, &["function"]).filter(|value| value.starts_with('{')) {
        all.splice(..0, members(function));
    }
    let text = |keys: &[&str]| {
        let found = keys.iter().filter_map(|key| find(&all, &[key]));
        found
            .filter_map(|value| serde_json::from_str::<String>(value).ok())
            .next()
    };
    let name = text(&["name", "tool_name", "function"])?;
    let id = text(&["id", "tool_call_id"]);
    let arguments = find(&all, &["arguments", "parameters"]).unwrap_or_default();
    Written::of(&name, id.as_deref(), arguments)
}

/// The text of the first member with one of these names.
fn find<'a>(members: &[(String, &'a str)], keys: &[&str]) -> Option<&'a str> {
    let found = members.iter().find(|(key, _)| keys.contains(&&key[..]));
    found.map(|(_, value)| *value)
}

/// Members of a JSON object; the last one may be incomplete.
fn members(object: &str) -> Vec<(String, &str)> {
    let mut members = Vec::new();
    let mut rest = object.trim_start().strip_prefix('{').unwrap_or_default();
    loop {
        let key = value(&mut rest);
        let (Ok(key), Some(behind)) = (
            serde_json::from_str(key),
            rest.trim_start().strip_prefix(':'),
        ) else {
            return members;
        };
        rest = behind;
        members.push((key, value(&mut rest)));
        match rest.trim_start().strip_prefix(',') {
            Some(behind) => rest = behind,
            None => return members,
        }
    }
}

/// Elements of a JSON array after its bracket; the last one may be incomplete.
fn elements(mut rest: &str) -> Vec<&str> {
    let mut elements = Vec::new();
    loop {
        match value(&mut rest) {
            "" => return elements,
            element => elements.push(element),
        }
        match rest.trim_start().strip_prefix(',') {
            Some(behind) => rest = behind,
            None => return elements,
        }
    }
}

/// Takes a JSON value, or its beginning, off the start of `rest`.
fn value<'a>(rest: &mut &'a str) -> &'a str {
    let text = rest.trim_start();
    let end = match text.bytes().next() {
        Some(b'{' | b'[') => json_len(text).ok().flatten(),
        Some(b'"') => {
            let mut escaped = false;
            let close = text.bytes().skip(1).position(|b| {
                let is_close = b == b'"' && !escaped;
                escaped = b == b'\\' && !escaped;
                is_close
            });
            close.map(|at| at + 2)
        }
        _ => text.find([',', '}', ']', ':']),
    };
    let (value, behind) = text.split_at(end.unwrap_or(text.len()));
    *rest = behind;
    value
}

/// Arguments written one by one between tags, strings without quotes.
pub(super) struct Tags {
    /// Marks before a name, after it, and after the value.
    pub(super) parameter: [&'static str; 3],
    /// Mark before the value, following the one after the name.
    pub(super) value: &'static str,
    /// Whether a line end on each side of a value is none of it.
    pub(super) lines: bool,
}

impl Tags {
    /// Calls in a block; `function` has the marks before a name, after it, and after the arguments.
    pub(super) fn calls(&self, block: &str, function: [&str; 3], tools: &[Tool]) -> Vec<Written> {
        let [open, middle, close] = function;
        let mut calls = Vec::new();
        let mut rest = block;
        while let Some((name, behind)) = call::between(rest, open, middle) {
            let whole = behind.split_once(close);
            let arguments = whole.map_or(behind, |(arguments, _)| arguments);
            calls.extend(self.call(name, arguments, whole.is_some(), tools));
            rest = whole.map_or("", |(_, behind)| behind);
        }
        calls
    }

    /// The call of `name` with the arguments in `text`; all of them if it `is_whole`.
    pub(super) fn call(
        &self,
        name: &str,
        text: &str,
        is_whole: bool,
        tools: &[Tool],
    ) -> Option<Written> {
        let [open, middle, close] = self.parameter;
        let name = name.trim();
        let mut arguments = String::from("{");
        let mut rest = text;
        while let Some((key, behind)) = call::between(rest, open, middle) {
            let key = key.trim();
            let Some((_, behind)) = behind.split_once(self.value) else {
                break;
            };
            let comma = if arguments.len() > 1 { "," } else { "" };
            let begin = format!("{comma}{}:", Value::from(key));
            match behind.split_once(close) {
                Some((value, behind)) => {
                    let value = value_of(tools, name, key, self.inner(value, true));
                    arguments += &format!("{begin}{value}");
                    rest = behind;
                }
                None => {
                    if call::is_text(tools, name, key) {
                        let value = Value::from(self.inner(certain(behind, close), false));
                        arguments += &begin;
                        // Without the quote that ends it.
                        let text = value.to_string();
                        arguments += &text[..text.len() - 1];
                    }
                    break;
                }
            }
        }
        if is_whole {
            arguments.push('}');
        }
        (!name.is_empty()).then(|| Written {
            name: name.to_owned(),
            id: None,
            arguments,
        })
    }

    /// A value without the line ends around it.
    fn inner<'a>(&self, value: &'a str, is_whole: bool) -> &'a str {
        if !self.lines {
            return value;
        }
        let value = value.strip_prefix('\n').unwrap_or(value);
        match value.strip_suffix('\n') {
            Some(inner) if is_whole => inner,
            _ => value,
        }
    }
}

/// The part of `text` that cannot be the beginning of `close`, nor of a line end before it.
fn certain<'a>(text: &'a str, close: &str) -> &'a str {
    let starts = text.char_indices().map(|(i, _)| i);
    let may_end = |i: &usize| {
        let rest = &text[*i..];
        close.starts_with(rest)
            || rest
                .strip_prefix('\n')
                .is_some_and(|r| close.starts_with(r))
    };
    // A closing tag and a line end cannot begin before their length from the end.
    let first = text.len().saturating_sub(close.len() + 1);
    let end = starts.filter(|&i| i >= first).find(may_end);
    &text[..end.unwrap_or(text.len())]
}
