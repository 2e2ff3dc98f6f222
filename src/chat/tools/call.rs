//! Parts shared by the formats: the end of a JSON value in a text, calls in JSON, values in
//! XML-like tags, and their grammars.

use crate::chat::ChatError;
use crate::chat::tools::values::{Parameter, Schemas, Text, any_of, may_be_text, without_texts};
use crate::chat::tools::{Marks, Scan, Tool, ToolCall, lark_text};
use serde_json::{Map, Value, json};

/// The length of white space and the JSON array or object after it; `None` if that is incomplete,
/// an error if there is none.
pub(super) fn json_len(text: &str) -> Result<Option<usize>, ()> {
    let begin = text.len() - text.trim_start().len();
    match text[begin..].chars().next() {
        Some('{' | '[') => {}
        Some(_) => return Err(()),
        None => return Ok(None),
    }
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for (i, b) in text.bytes().enumerate().skip(begin) {
        match b {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => depth += 1,
            b'}' | b']' if !in_string => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return Ok(Some(i + 1));
                }
            }
            _ => {}
        }
    }
    Ok(None)
}

/// Scans a JSON value, then `close`, which may be missing if other text follows.
pub(super) fn scan_json(text: &str, close: &str) -> Scan {
    match json_len(text) {
        Err(()) => Scan::Nothing,
        Ok(None) => Scan::More,
        Ok(Some(len)) => scan_close(text, len, close),
    }
}

/// The end of calls of `len` bytes, including `close` if it follows.
pub(super) fn scan_close(text: &str, len: usize, close: &str) -> Scan {
    let rest = &text[len..];
    let behind = rest.trim_start();
    if close.is_empty() {
        Scan::Calls(len)
    } else if behind.starts_with(close) {
        Scan::Calls(len + rest.len() - behind.len() + close.len())
    } else if close.starts_with(behind) {
        Scan::More
    } else {
        Scan::Calls(len)
    }
}

/// Scans up to and including `close`.
pub(super) fn scan_until(text: &str, close: &str) -> Scan {
    text.find(close)
        .map_or(Scan::More, |at| Scan::Calls(at + close.len()))
}

/// The JSON value at the start of `block`.
pub(super) fn leading_json(block: &str) -> Option<Value> {
    let len = json_len(block).ok()??;
    serde_json::from_str(&block[..len]).ok()
}

/// Reads calls in JSON: an object with a name and arguments, or an array of them.
pub(super) fn read_json(block: &str, _: &[Tool]) -> Option<Vec<ToolCall>> {
    calls_of(&leading_json(block)?)
}

/// The calls that a JSON value describes.
pub(super) fn calls_of(value: &Value) -> Option<Vec<ToolCall>> {
    match value {
        Value::Array(items) if !items.is_empty() => items.iter().map(call_of).collect(),
        Value::Object(members) => match members.get("tool_calls") {
            Some(Value::Array(items)) => items.iter().map(call_of).collect(),
            _ => call_of(value).map(|call| vec![call]),
        },
        _ => None,
    }
}

fn call_of(value: &Value) -> Option<ToolCall> {
    let function = value
        .get("function")
        .filter(|f| f.is_object())
        .unwrap_or(value);
    let any = |keys: &[&str]| {
        keys.iter()
            .find_map(|key| function.get(key).or(value.get(key)))
    };
    let name = any(&["name", "tool_name", "function"])?
        .as_str()?
        .to_owned();
    let arguments = any(&["arguments", "parameters"]).map_or(Some(Map::new()), arguments_of)?;
    let id = any(&["id", "tool_call_id"]).and_then(|id| id.as_str().map(str::to_owned));
    Some(ToolCall {
        name,
        arguments,
        id,
    })
}

/// Arguments, given as an object or as its JSON in a string.
pub(super) fn arguments_of(value: &Value) -> Option<Map<String, Value>> {
    match value {
        Value::Object(members) => Some(members.clone()),
        Value::String(text) => serde_json::from_str(text).ok(),
        Value::Null => Some(Map::new()),
        _ => None,
    }
}

/// A call with this name and the JSON of its arguments, which only white space may follow.
pub(super) fn named_call(name: &str, arguments: &str) -> Option<ToolCall> {
    let name = name.trim();
    let arguments = arguments_of(&serde_json::from_str(arguments).ok()?)?;
    (!name.is_empty()).then(|| ToolCall {
        name: name.to_owned(),
        arguments,
        id: None,
    })
}

/// The schema of a tool's arguments, to be embedded in another schema.
pub(super) fn parameters(tool: &Tool) -> Value {
    tool.parameters.clone()
}

/// The schema of a call as a JSON object, with the given keys for name and arguments.
pub(super) fn call_schema(tools: &[Tool], name_key: &str, arguments_key: &str) -> Value {
    let call = |tool: &Tool| {
        let mut properties = Map::new();
        properties.insert(name_key.into(), json!({"const": tool.name}));
        properties.insert(arguments_key.into(), parameters(tool));
        let required = [name_key, arguments_key];
        json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
    };
    match tools {
        [tool] => call(tool),
        _ => json!({"anyOf": tools.iter().map(call).collect::<Vec<_>>()}),
    }
}

/// The grammar of a JSON value with this schema between two texts, then the marker `close`.
pub(super) fn json_grammar(
    schema: &Value,
    around: (&str, &str),
    close: &str,
    marks: &Marks<'_>,
) -> String {
    let (before, after) = (lark_text(around.0), lark_text(around.1));
    let close = if close.is_empty() {
        String::new()
    } else {
        marks.lark(close)
    };
    format!("start: {before} json {after} {close}\njson: %json {schema}\n")
}

/// A grammar with `start` as the body of its start rule, in which `call` is a call of any tool.
/// `body` writes the rule for one tool; it may refer to `args<number>`, the JSON of the arguments.
pub(super) fn per_tool(
    start: &str,
    tools: &[Tool],
    body: impl Fn(&Tool, &str) -> String,
) -> String {
    let names: Vec<String> = (0..tools.len()).map(|i| format!("call{i}")).collect();
    let mut out = format!("start: {start}\ncall: {}\n", names.join(" | "));
    for (i, tool) in tools.iter().enumerate() {
        let arguments = format!("args{i}");
        out.push_str(&format!(
            "call{i}: {}\n{arguments}: %json {}\n",
            body(tool, &arguments),
            parameters(tool)
        ));
    }
    out
}

/// Rules for arguments separated by `comma`: `<list>_0_0` is the whole list, `<item>_<k>` one
/// argument, `required` says which must be there, and `rest`, if it is not empty, is the rule of a
/// further argument.
pub(super) fn comma_rules(
    (list, item): (&str, &str),
    required: &[bool],
    comma: &str,
    rest: &str,
) -> String {
    let mut rules = String::new();
    let comma = lark_text(comma);
    // {list}_{k}_{c}: the arguments from k on; c is 1 if one came before, so that a comma is
    // needed.
    for k in 0..=required.len() {
        for c in 0..2 {
            let due = if c == 1 { &comma[..] } else { "" };
            let body = match required.get(k) {
                None if rest.is_empty() => "\"\"".to_owned(),
                None => format!("({due} {rest} ({comma} {rest})*)?"),
                Some(is_required) => {
                    let with = format!("{due} {item}_{k} {list}_{}_1", k + 1);
                    match is_required {
                        true => with,
                        false => format!("{with} | {list}_{}_{c}", k + 1),
                    }
                }
            };
            rules.push_str(&format!("{list}_{k}_{c}: {body}\n"));
        }
    }
    rules
}

/// Grammar of calls with arguments written one by one, strings without quotes: for each tool
/// `before`, the arguments in the order of the schema, each between `open` and `close`, then
/// `after`.
///
/// # Errors
/// [`ChatError::Tool`] for a strict tool that restricts more than can be enforced so.
pub(super) fn tagged_grammar(
    tools: &[Tool],
    marks: &Marks<'_>,
    before: impl Fn(&Tool) -> String,
    open: impl Fn(&str) -> String,
    close: &str,
    after: &str,
) -> Result<String, ChatError> {
    const NAME: &str = "\u{1}";
    let mut rules = String::new();
    let mut calls = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let schemas = Schemas { index, tool, marks };
        let arguments = schemas.arguments()?;
        let mut call = before(tool);
        for (k, parameter) in arguments.parameters.iter().enumerate() {
            let value = format!("value{index}_{k}");
            let optional = if parameter.required { "" } else { "?" };
            let open = lark_text(&open(parameter.name));
            call.push_str(&format!(" ({open} {value}){optional}"));
            rules.push_str(&tagged_value(&schemas, parameter, &value, close)?);
        }
        if arguments.is_open {
            let opening = open(NAME);
            let (start, end) = opening.split_once(NAME).unwrap_or((&opening, ""));
            let (start, end) = (lark_text(start), lark_text(end));
            call.push_str(&format!(
                " ({start} /[A-Za-z0-9_.-]{{1,64}}/ {end} any{index})*"
            ));
            rules.push_str(&Text::default().rules(&format!("any{index}"), close));
        }
        rules.push_str(&format!("call{index}: {call} {}\n", lark_text(after)));
        calls.push(format!("call{index}"));
    }
    Ok(format!("start: {}\n{rules}", calls.join(" | ")))
}

/// Rules of one value and the text `close` after it: a text without quotes, or JSON.
fn tagged_value(
    schemas: &Schemas<'_>,
    parameter: &Parameter<'_>,
    value: &str,
    close: &str,
) -> Result<String, ChatError> {
    let path = format!("/properties/{}", parameter.name);
    let (texts, mut json): (Vec<_>, Vec<_>) =
        (schemas.alternatives(parameter.schema).into_iter()).partition(may_be_text);
    let mut rules = String::new();
    let mut names = Vec::new();
    for (n, schema) in texts.into_iter().enumerate() {
        let text = schemas.text(&schema, &path)?;
        if text.is_free() {
            // All other values are such texts, too.
            return Ok(text.rules(value, close));
        }
        names.push(format!("{value}_text{n}"));
        rules.push_str(&text.rules(&format!("{value}_text{n}"), close));
        json.extend(without_texts(schema));
    }
    if !json.is_empty() {
        let schema = schemas.alone(&any_of(json));
        let close = lark_text(close);
        names.push(format!("{value}_value"));
        rules.push_str(&format!(
            "{value}_value: {value}_json {close}\n{value}_json: %json {schema}\n"
        ));
    }
    rules.push_str(&format!("{value}: {}\n", names.join(" | ")));
    Ok(rules)
}

/// Types of the values of parameter `name` of function `function`.
fn types_of_parameter(tools: &[Tool], function: &str, name: &str) -> Types {
    let tool = tools.iter().find(|tool| tool.name == function);
    let root = tool.map(|tool| &tool.parameters);
    let property = root.and_then(|root| root.get("properties")?.get(name));
    match (root, property) {
        (Some(root), Some(property)) => types_of(root, property, 0),
        _ => Types::ALL,
    }
}

/// Whether a parameter can only be a string.
pub(super) fn is_text(tools: &[Tool], function: &str, name: &str) -> bool {
    types_of_parameter(tools, function, name) == Types::TEXT
}

/// The value of parameter `name` of function `function`, written as `text` without quotes: JSON of a
/// type that the parameter has, or else a string.
pub(super) fn value_of(tools: &[Tool], function: &str, name: &str, text: &str) -> Value {
    let types = types_of_parameter(tools, function, name);
    if types == Types::TEXT {
        return text.into();
    }
    match serde_json::from_str(text.trim()) {
        Ok(value) if types.contain(&value) || !types.contain(&Value::String(String::new())) => {
            value
        }
        _ => text.into(),
    }
}

/// Types of JSON values, as bits.
#[derive(Clone, Copy, PartialEq)]
struct Types(u8);

impl Types {
    const ALL: Self = Self(63);
    const TEXT: Self = Self(1);

    fn named(name: &str) -> Self {
        Self(match name {
            "string" => 1,
            "number" | "integer" => 2,
            "boolean" => 4,
            "null" => 8,
            "array" => 16,
            "object" => 32,
            _ => 63,
        })
    }

    fn of(value: &Value) -> Self {
        Self::named(match value {
            Value::String(_) => "string",
            Value::Number(_) => "number",
            Value::Bool(_) => "boolean",
            Value::Null => "null",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        })
    }

    fn any(all: impl Iterator<Item = Self>) -> Self {
        Self(all.fold(0, |all, types| all | types.0))
    }

    fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    fn contain(self, value: &Value) -> bool {
        self.and(Self::of(value)) != Self(0)
    }
}

/// Types of the values that a schema in the document `root` describes.
fn types_of(root: &Value, schema: &Value, depth: usize) -> Types {
    const MAX_DEPTH: usize = 16;
    if depth > MAX_DEPTH {
        return Types::ALL;
    }
    let list = |key: &str| schema.get(key).and_then(Value::as_array).map(Vec::as_slice);
    let inside = |schema: &Value| types_of(root, schema, depth + 1);
    let mut types = match schema.get("type") {
        Some(Value::String(name)) => Types::named(name),
        Some(Value::Array(names)) => {
            Types::any(names.iter().filter_map(Value::as_str).map(Types::named))
        }
        _ => Types::ALL,
    };
    let values = list("enum").or(schema.get("const").map(std::slice::from_ref));
    if let Some(values) = values {
        types = types.and(Types::any(values.iter().map(Types::of)));
    }
    for schemas in ["anyOf", "oneOf"].into_iter().filter_map(list) {
        types = types.and(Types::any(schemas.iter().map(inside)));
    }
    for part in list("allOf").into_iter().flatten() {
        types = types.and(inside(part));
    }
    let reference = schema.get("$ref").and_then(Value::as_str);
    let target = reference.and_then(|name| root.pointer(name.strip_prefix('#')?));
    target.map_or(types, |target| types.and(inside(target)))
}

/// Reader for a notation of values.
pub(super) trait Reader<'a> {
    /// The text not yet read.
    fn rest(&mut self) -> &mut &'a str;

    /// Skips white space and then `text`, if it is there.
    fn eat(&mut self, text: &str) -> bool {
        let rest = self.rest();
        *rest = rest.trim_start();
        let found = rest.strip_prefix(text);
        *rest = found.unwrap_or(rest);
        found.is_some()
    }

    /// Reads items separated by commas up to `close`; a trailing comma is allowed.
    fn items(&mut self, close: &str, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        while !self.eat(close) {
            item(self)?;
            if !self.eat(",") {
                return self.eat(close).then_some(());
            }
        }
        Some(())
    }
}

/// The text between the next `open` and `close` in `text`, and the text after that.
pub(super) fn between<'a>(text: &'a str, open: &str, close: &str) -> Option<(&'a str, &'a str)> {
    let (_, rest) = text.split_once(open)?;
    rest.split_once(close)
}
