//! Gemma 4 and FunctionGemma: `call:name{key:value}` between markers, with special markers around
//! strings.

use crate::chat::ChatError;
use crate::chat::tools::call::{self, Reader};
use crate::chat::tools::values::{Parameter, Schemas};
use crate::chat::tools::written::Written;
use crate::chat::tools::{Format, Marks, Opening, Tool, ToolCall, lark_text};
use serde_json::{Map, Value};
use std::collections::HashMap;

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
    grammar: |tools, marks| grammar(tools, marks, CLOSE_4, QUOTE_4),
};

pub(super) const FUNCTION_GEMMA: Format = Format {
    name: "function-gemma",
    marks: &["<start_function_call>"],
    reasoning: ("", ""),
    openings: &[Opening::marker("<start_function_call>")],
    close: CLOSE_F,
    scan: |text| call::scan_until(text, CLOSE_F),
    read: |block, _| read(block, CLOSE_F, QUOTE_F),
    grammar: |tools, marks| grammar(tools, marks, CLOSE_F, QUOTE_F),
    ..GEMMA4
};

/// The grammar of calls in this notation.
fn grammar(
    tools: &[Tool],
    marks: &Marks<'_>,
    close: &str,
    quote: &str,
) -> Result<String, ChatError> {
    let quote_mark = marks.lark(quote);
    let is_special = quote_mark != lark_text(quote);
    let mut out = format!(
        "text: {}\nkey: /[A-Za-z0-9_.-]{{1,64}}/ \":\"\nany: text | any_scalar | \"[\" (any (\",\" any)*)? \"]\" | \"{{\" (any_pair (\",\" any_pair)*)? \"}}\"\nany_pair: key any\nany_scalar: %json {{\"type\": [\"null\", \"boolean\", \"number\"]}}\n",
        match is_special {
            true => format!("{quote_mark} /(?s:.*)/ {quote_mark}"),
            false => format!("{quote_mark} text_end\ntext_end[suffix={quote_mark}]: /(?s:.*)/"),
        }
    );
    let mut calls = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let mut rules = Rules {
            schemas: Schemas { index, tool, marks },
            quote: (&quote_mark, (!is_special).then_some(quote)),
            out: String::new(),
            n: 0,
            definitions: HashMap::new(),
        };
        let arguments = rules.schemas.arguments()?;
        let body = rules.members(&arguments.parameters, arguments.is_open, "")?;
        out.push_str(&rules.out);
        let name = lark_text(&format!("call:{}{{", tool.name));
        out.push_str(&format!("call{index}: {name} {body} \"}}\"\n"));
        calls.push(format!("call{index}"));
    }
    let close = marks.lark(close);
    Ok(format!("start: ({}) {close}\n{out}", calls.join(" | ")))
}

/// Rules for the values of a tool's parameters.
struct Rules<'a> {
    schemas: Schemas<'a>,
    /// Quote around a string, and its text if it is no special token.
    quote: (&'a str, Option<&'a str>),
    out: String,
    /// Rules so far.
    n: usize,
    /// Names of the rules of schemas, by the references that lead to them.
    definitions: HashMap<&'a str, String>,
}

impl<'a> Rules<'a> {
    fn name(&mut self) -> String {
        self.n += 1;
        format!("rule{}_{}", self.schemas.index, self.n)
    }

    /// The name of a rule with this body.
    fn rule(&mut self, body: &str) -> String {
        let name = self.name();
        self.out.push_str(&format!("{name}: {body}\n"));
        name
    }

    /// The body of a rule for members of an object; `path` is that of their schema.
    fn members(
        &mut self,
        parameters: &[Parameter<'a>],
        is_open: bool,
        path: &str,
    ) -> Result<String, ChatError> {
        let (list, item) = (self.name(), self.name());
        let mut required = Vec::new();
        for (k, parameter) in parameters.iter().enumerate() {
            let path = format!("{path}/properties/{}", parameter.name);
            let value = self.value(parameter.schema, &path)?;
            let key = lark_text(&format!("{}:", parameter.name));
            self.out.push_str(&format!("{item}_{k}: {key} ({value})\n"));
            required.push(parameter.required);
        }
        let rest = if is_open { "any_pair" } else { "" };
        self.out
            .push_str(&call::comma_rules((&list, &item), &required, ",", rest));
        Ok(format!("{list}_0_0"))
    }

    /// The body of a rule for a value of this schema.
    fn value(&mut self, schema: &'a Value, path: &str) -> Result<String, ChatError> {
        let Some(reference) = schema.get("$ref").and_then(Value::as_str) else {
            return self.alternatives(schema, path);
        };
        if let Some(name) = self.definitions.get(reference) {
            return Ok(name.clone());
        }
        // The name first: the schema may refer to itself.
        let name = self.name();
        self.definitions.insert(reference, name.clone());
        let body = self.alternatives(self.schemas.resolve(schema), path)?;
        self.out.push_str(&format!("{name}: {body}\n"));
        Ok(name)
    }

    fn alternatives(&mut self, schema: &'a Value, path: &str) -> Result<String, ChatError> {
        let map = match schema {
            Value::Object(map) if !map.is_empty() => map,
            _ => return Ok("any".to_owned()),
        };
        if let Some(any) = map.get("anyOf").and_then(Value::as_array) {
            if let Some(other) = map.keys().find(|key| *key != "anyOf" && *key != "type") {
                let message = "beside anyOf cannot be enforced in the model's format";
                self.schemas.loosen(path, other, message)?;
            }
            let bodies: Result<Vec<_>, _> = any.iter().map(|one| self.value(one, path)).collect();
            return Ok(bodies?.join(" | "));
        }
        let values = map.get("enum").and_then(Value::as_array).map(Vec::as_slice);
        if let Some(values) = values.or(map.get("const").map(std::slice::from_ref)) {
            let values: Vec<String> = values.iter().map(|value| self.literal(value)).collect();
            return Ok(values.join(" | "));
        }
        match map.get("type") {
            Some(Value::Array(kinds)) => {
                let kinds = kinds.iter().filter_map(Value::as_str);
                let bodies: Result<Vec<_>, _> =
                    kinds.map(|kind| self.of_type(kind, schema, path)).collect();
                Ok(bodies?.join(" | "))
            }
            Some(Value::String(kind)) => self.of_type(kind, schema, path),
            _ => {
                let message = "without a type cannot be enforced in the model's format";
                for key in map.keys() {
                    self.schemas.loosen(path, key, message)?;
                }
                Ok("any".to_owned())
            }
        }
    }

    /// The body of a rule for values of type `kind`.
    fn of_type(&mut self, kind: &str, schema: &'a Value, path: &str) -> Result<String, ChatError> {
        const MESSAGE: &str = "cannot be enforced in the model's format";
        let enforced: &[&str] = match kind {
            "string" => {
                let text = self.schemas.text(schema, path)?;
                if text.is_free() {
                    return Ok("text".to_owned());
                }
                let (quote, as_text) = self.quote;
                let name = self.name();
                if let Some(close) = as_text {
                    self.out.push_str(&text.rules(&name, close));
                    return Ok(format!("{quote} {name}"));
                }
                let (name, terminal) = (name.to_uppercase(), text.terminal());
                self.out.push_str(&format!("{name}: {terminal}\n"));
                return Ok(format!("{quote} {name} {quote}"));
            }
            "array" => &["type", "items", "minItems", "maxItems"],
            "object" => &["type", "properties", "required", "additionalProperties"],
            _ => {
                let mut one = schema.clone();
                one["type"] = kind.into();
                return Ok(self.rule(&format!("%json {one}")));
            }
        };
        let members = schema.as_object().into_iter().flatten();
        for (key, _) in members.filter(|(key, _)| !enforced.contains(&&key[..])) {
            self.schemas.loosen(path, key, MESSAGE)?;
        }
        if kind == "array" {
            let item = match schema.get("items") {
                Some(Value::Bool(false)) => return Ok("\"[]\"".to_owned()),
                Some(items) => self.value(items, &format!("{path}/items"))?,
                None => "any".to_owned(),
            };
            let item = self.rule(&item);
            let count = |key| schema.get(key).and_then(Value::as_u64);
            let (least, most) = (count("minItems").unwrap_or(0), count("maxItems"));
            let items = match most {
                Some(0) => return Ok("\"[]\"".to_owned()),
                Some(1) => item,
                _ => {
                    let most = most.map_or(String::new(), |most| (most - 1).to_string());
                    let least = least.saturating_sub(1);
                    format!("{item} (\",\" {item}){{{least},{most}}}")
                }
            };
            return Ok(match least {
                0 => format!("\"[\" ({items})? \"]\""),
                _ => format!("\"[\" {items} \"]\""),
            });
        }
        let parameters: Vec<_> = Parameter::listed(schema)
            .filter(Parameter::is_possible)
            .collect();
        let is_open = match schema.get("additionalProperties") {
            None | Some(Value::Bool(true)) => true,
            Some(Value::Bool(false)) => false,
            Some(_) => {
                self.schemas.loosen(path, "additionalProperties", MESSAGE)?;
                true
            }
        };
        let body = self.members(&parameters, is_open, path)?;
        Ok(format!("\"{{\" {body} \"}}\""))
    }

    /// A value in this notation.
    fn literal(&self, value: &Value) -> String {
        let (quote, _) = self.quote;
        match value {
            Value::String(text) => format!("{quote} {} {quote}", lark_text(text)),
            Value::Array(items) => {
                let items: Vec<String> = items.iter().map(|item| self.literal(item)).collect();
                format!("\"[\" {} \"]\"", items.join(" \",\" "))
            }
            Value::Object(members) => {
                let pairs = members.iter().map(|(key, value)| {
                    format!("{} {}", lark_text(&format!("{key}:")), self.literal(value))
                });
                format!(
                    "\"{{\" {} \"}}\"",
                    pairs.collect::<Vec<_>>().join(" \",\" ")
                )
            }
            other => lark_text(&other.to_string()),
        }
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

/// Name of the call; the arguments are no JSON and are reported at its end.
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
        // A word that is no JSON is a string without quotes.
        Some(serde_json::from_str(word.trim()).unwrap_or_else(|_| word.trim().into()))
    }
}
