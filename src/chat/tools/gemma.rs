//! Gemma 4 and FunctionGemma: `call:name{key:value}` between markers, with special markers around
//! strings.

use crate::chat::ChatError;
use crate::chat::tools::call::{self, Parameter, Reader};
use crate::chat::tools::written::Written;
use crate::chat::tools::{Format, Opening, Tool, ToolCall, lark_text};
use serde_json::{Map, Value};

const CLOSE_4: &str = "<tool_call|>";
const QUOTE_4: &str = "<|\"|>";
const CLOSE_F: &str = "<end_function_call>";
const QUOTE_F: &str = "<escape>";

pub(super) const GEMMA4: Format = Format {
    name: "gemma4",
    marks: &["<|tool_call>"],
    reasoning: ("<|channel>thought\n", "<channel|>"),
    hidden: &[],
    openings: &[Opening::marker("<|tool_call>")],
    close: CLOSE_4,
    scan: |text| call::scan_until(text, CLOSE_4),
    read: |block, _| read(block, CLOSE_4, QUOTE_4),
    written,
    grammar: |tools, marks| grammar(tools, &marks.lark(CLOSE_4), &marks.lark(QUOTE_4)),
};

pub(super) const FUNCTION_GEMMA: Format = Format {
    name: "function-gemma",
    marks: &["<start_function_call>"],
    reasoning: ("", ""),
    openings: &[Opening::marker("<start_function_call>")],
    close: CLOSE_F,
    scan: |text| call::scan_until(text, CLOSE_F),
    read: |block, _| read(block, CLOSE_F, QUOTE_F),
    grammar: |tools, marks| grammar(tools, &marks.lark(CLOSE_F), &marks.lark(QUOTE_F)),
    ..GEMMA4
};

/// A rule for each parameter. Keys have no quotes and strings have special ones, so only types with
/// a rule here are enforced: strings, lists of values, numbers, booleans and arrays of these.
fn grammar(tools: &[Tool], close: &str, quote: &str) -> Result<String, ChatError> {
    let mut rules = format!("TEXT: /[^<]*/\ntext: {quote} TEXT {quote}\n");
    let mut calls = Vec::new();
    for (i, tool) in tools.iter().enumerate() {
        let parameters = call::parameters_of(i, tool)?;
        for (k, Parameter { name, schema, .. }) in parameters.iter().enumerate() {
            let value = value_rule(schema, quote, &format!("item{i}_{k}"), &mut rules).ok_or_else(
                || {
                    let message =
                        format!("parameter {name:?} cannot be enforced in the model's format");
                    ChatError::Tool { index: i, message }
                },
            )?;
            rules.push_str(&format!(
                "arg{i}_{k}: {} ({value})\n",
                lark_text(&format!("{name}:"))
            ));
        }
        rules.push_str(&call::comma_rules(i, &parameters, ","));
        rules.push_str(&format!(
            "call{i}: {} args{i}_0_0 \"}}\"\n",
            lark_text(&format!("call:{}{{", tool.name))
        ));
        calls.push(format!("call{i}"));
    }
    Ok(format!("start: ({}) {close}\n{rules}", calls.join(" | ")))
}

/// The body of a rule for a value of this schema; `name` is available as the name of a helper rule.
fn value_rule(schema: &Value, quote: &str, name: &str, rules: &mut String) -> Option<String> {
    let members = schema.as_object()?;
    let only = |known: &[&str]| {
        let known = |key: &str| {
            known.contains(&key) || ["type", "description", "title", "default"].contains(&key)
        };
        members.keys().all(|key| known(key))
    };
    if let Some(Value::Array(values)) = members.get("enum").filter(|_| only(&["enum"])) {
        let one = |value: &Value| match value {
            Value::String(text) => Some(format!("{quote} {} {quote}", lark_text(text))),
            Value::Object(_) | Value::Array(_) => None,
            other => Some(lark_text(&other.to_string())),
        };
        let values: Option<Vec<String>> = values.iter().map(one).collect();
        return values.map(|values| values.join(" | "));
    }
    match members.get("type")?.as_str()? {
        "string" if only(&[]) => Some("text".into()),
        "number" | "integer" | "boolean" | "null" => {
            rules.push_str(&format!("{name}: %json {schema}\n"));
            Some(name.into())
        }
        "array" if only(&["items"]) => {
            let item = value_rule(members.get("items")?, quote, &format!("{name}i"), rules)?;
            rules.push_str(&format!(
                "{name}: \"[\" (({item}) (\",\" ({item}))*)? \"]\"\n"
            ));
            Some(name.into())
        }
        _ => None,
    }
}

fn read(block: &str, close: &str, quote: &str) -> Option<Vec<ToolCall>> {
    let body = block.strip_suffix(close)?.trim().strip_prefix("call:")?;
    let (name, rest) = body.split_at(body.find('{')?);
    let mut reader = Arguments { rest, quote };
    let Value::Object(arguments) = reader.value(0)? else {
        return None;
    };
    let whole = reader.rest.trim().is_empty() && !name.trim().is_empty();
    whole.then(|| {
        vec![ToolCall {
            name: name.trim().to_owned(),
            arguments,
            id: None,
        }]
    })
}

/// Its name: the arguments are no JSON, and told at its end.
fn written(block: &str, _: &[Tool]) -> Vec<Written> {
    let name = block.trim_start().strip_prefix("call:");
    let name = name.and_then(|text| Some(text.split_once('{')?.0));
    name.and_then(|name| Written::of(name, None, ""))
        .into_iter()
        .collect()
}

/// Reader of this notation: JSON with unquoted keys, and `quote` around strings.
struct Arguments<'a> {
    rest: &'a str,
    quote: &'a str,
}

impl<'a> Reader<'a> for Arguments<'a> {
    fn rest(&mut self) -> &mut &'a str {
        &mut self.rest
    }
}

impl<'a> Arguments<'a> {
    fn quoted(&mut self) -> Option<&'a str> {
        self.eat(self.quote).then_some(())?;
        let (text, rest) = self.rest.split_once(self.quote)?;
        self.rest = rest;
        Some(text)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > 64 {
            return None;
        }
        if let Some(text) = self.quoted() {
            return Some(text.into());
        }
        if self.eat("{") {
            let mut members = Map::new();
            self.items("}", |reader| {
                let key = match reader.quoted() {
                    Some(key) => key,
                    None => {
                        let (key, rest) = reader.rest.split_at(reader.rest.find(':')?);
                        reader.rest = rest;
                        key.trim()
                    }
                };
                reader.eat(":").then_some(())?;
                members.insert(key.to_owned(), reader.value(depth + 1)?);
                Some(())
            })?;
            return Some(members.into());
        }
        if self.eat("[") {
            let mut items = Vec::new();
            self.items("]", |reader| {
                items.push(reader.value(depth + 1)?);
                Some(())
            })?;
            return Some(items.into());
        }
        let (word, rest) = self.rest.split_at(self.rest.find([',', '}', ']'])?);
        self.rest = rest;
        // A word that is no JSON is a string whose quotes are missing.
        Some(serde_json::from_str(word.trim()).unwrap_or_else(|_| word.trim().into()))
    }
}
