//! LFM2: calls as a Python list, `[name(key="value")]`, between markers; or JSON.

use crate::chat::tools::call::{self, Reader};
use crate::chat::tools::values::Schemas;
use crate::chat::tools::{Format, Opening, Tool, ToolCall, lark_text, written};
use serde_json::{Map, Value};

const CLOSE: &str = "<|tool_call_end|>";

pub(super) const FORMAT: Format = Format {
    name: "lfm2",
    marks: &["<|tool_list_start|>"],
    reasoning: ("<think>", "</think>"),
    hidden: &[],
    openings: &[Opening::marker("<|tool_call_start|>")],
    close: CLOSE,
    scan: |text| call::scan_until(text, CLOSE),
    read,
    written: written::at_the_end,
    grammar: |tools, marks| {
        let close = marks.lark(CLOSE);
        // Values are JSON, which is Python, too, except for three words.
        let mut rules = String::new();
        let mut calls = Vec::new();
        for (i, tool) in tools.iter().enumerate() {
            let schemas = Schemas {
                index: i,
                tool,
                marks,
            };
            let arguments = schemas.arguments()?;
            let mut required = Vec::new();
            for (k, parameter) in arguments.parameters.iter().enumerate() {
                let name = lark_text(&format!("{}=", parameter.name));
                let schema = schemas.alone(parameter.schema);
                rules.push_str(&format!("arg{i}_{k}: {name} value{i}_{k}\n"));
                rules.push_str(&format!("value{i}_{k}: %json {schema}\n"));
                required.push(parameter.required);
            }
            let rest = if arguments.is_open { "any" } else { "" };
            let names = (&*format!("args{i}"), &*format!("arg{i}"));
            rules.push_str(&call::comma_rules(names, &required, ", ", rest));
            rules.push_str(&format!(
                "call{i}: {} args{i}_0_0 \")\"\n",
                lark_text(&format!("{}(", tool.name))
            ));
            calls.push(format!("call{i}"));
        }
        rules.push_str("any: /[A-Za-z_][A-Za-z0-9_]{0,63}/ \"=\" any_value\nany_value: %json {}\n");
        let any = calls.join(" | ");
        Ok(format!(
            "start: \"[\" call (\", \" call)* \"]\" {close}\ncall: {any}\n{rules}"
        ))
    },
};

fn read(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let block = block.strip_suffix(CLOSE)?.trim();
    if let Some(calls) = call::read_json(block, tools) {
        return Some(calls);
    }
    let mut python = Python {
        rest: block.strip_prefix('[')?.strip_suffix(']')?,
    };
    let mut calls = vec![python.call()?];
    while python.eat(",") {
        calls.push(python.call()?);
    }
    python.rest.trim().is_empty().then_some(calls)
}

/// Reader of Python literals.
struct Python<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> for Python<'a> {
    fn rest(&mut self) -> &mut &'a str {
        &mut self.rest
    }
}

impl<'a> Python<'a> {
    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest.trim_start();
        let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == '.' || c == '-';
        let (name, rest) = rest.split_at(rest.find(|c: char| !is_name(c))?);
        self.rest = rest;
        (!name.is_empty()).then_some(name)
    }

    fn call(&mut self) -> Option<ToolCall> {
        let name = self.name()?.to_owned();
        let mut arguments = Map::new();
        self.eat("(").then_some(())?;
        self.items(")", |reader| {
            let key = reader.name()?.to_owned();
            reader.eat("=").then_some(())?;
            arguments.insert(key, reader.value(0)?);
            Some(())
        })?;
        Some(ToolCall {
            name,
            arguments,
            id: None,
        })
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > 64 {
            return None;
        }
        for (word, value) in [
            ("True", Value::Bool(true)),
            ("true", Value::Bool(true)),
            ("False", Value::Bool(false)),
            ("false", Value::Bool(false)),
            ("None", Value::Null),
            ("null", Value::Null),
        ] {
            if self.eat(word) {
                return Some(value);
            }
        }
        match self.rest.chars().next()? {
            quote @ ('"' | '\'') => self.string(quote).map(Value::String),
            '[' => {
                self.eat("[");
                let mut items = Vec::new();
                self.items("]", |reader| {
                    items.push(reader.value(depth + 1)?);
                    Some(())
                })?;
                Some(items.into())
            }
            '{' => {
                self.eat("{");
                let mut members = Map::new();
                self.items("}", |reader| {
                    let Value::String(key) = reader.value(depth + 1)? else {
                        return None;
                    };
                    reader.eat(":").then_some(())?;
                    members.insert(key, reader.value(depth + 1)?);
                    Some(())
                })?;
                Some(members.into())
            }
            _ => {
                let end = self
                    .rest
                    .find(|c: char| !(c.is_ascii_alphanumeric() || "+-._".contains(c)))?;
                let (number, rest) = self.rest.split_at(end);
                self.rest = rest;
                serde_json::from_str(number).ok().filter(Value::is_number)
            }
        }
    }

    fn string(&mut self, quote: char) -> Option<String> {
        let mut chars = self.rest.char_indices().skip(1);
        let mut out = String::new();
        loop {
            match chars.next()? {
                (at, c) if c == quote => {
                    self.rest = &self.rest[at + 1..];
                    return Some(out);
                }
                (_, '\\') => out.push(match chars.next()?.1 {
                    'n' => '\n',
                    't' => '\t',
                    'r' => '\r',
                    'b' => '\u{8}',
                    'f' => '\u{c}',
                    'u' => {
                        let mut unit = || {
                            (0..4).try_fold(0, |v, _| Some(v * 16 + chars.next()?.1.to_digit(16)?))
                        };
                        let high = unit()?;
                        match char::from_u32(high) {
                            Some(c) => c,
                            None => {
                                chars.next().filter(|c| c.1 == '\\')?;
                                chars.next().filter(|c| c.1 == 'u')?;
                                let mut unit = || {
                                    (0..4).try_fold(0u32, |v, _| {
                                        Some(v * 16 + chars.next()?.1.to_digit(16)?)
                                    })
                                };
                                let low = unit()?.checked_sub(0xdc00)?;
                                char::from_u32(0x10000 + (high.checked_sub(0xd800)? << 10) + low)?
                            }
                        }
                    }
                    other => other,
                }),
                (_, c) => out.push(c),
            }
        }
    }
}
