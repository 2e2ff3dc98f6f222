//! Parts shared by the formats: the end of a JSON value in a text, calls in JSON, values in
//! XML-like tags, and their grammars.

use crate::chat::ChatError;
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

/// The schema of a tool's arguments, to be embedded in another schema; its references still resolve
/// within it.
pub(super) fn parameters(tool: &Tool) -> Value {
    let mut schema = tool.parameters.clone();
    if let Some(members) = schema.as_object_mut() {
        if !members.contains_key("$id") {
            members.insert("$id".into(), format!("urn:tool:{}", tool.name).into());
        }
        members.entry("type").or_insert_with(|| "object".into());
    }
    schema
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

/// A parameter of a tool, for formats that write arguments one by one.
pub(super) struct Parameter<'a> {
    pub(super) name: &'a str,
    pub(super) schema: &'a Value,
    pub(super) required: bool,
}

/// The parameters of `tool`, number `i`, in the order of its schema.
///
/// # Errors
/// [`ChatError::Tool`] for a schema that restricts the object by more than its properties and which
/// of them are required.
pub(super) fn parameters_of(i: usize, tool: &Tool) -> Result<Vec<Parameter<'_>>, ChatError> {
    let wrong = |message: String| ChatError::Tool { index: i, message };
    let known = [
        "$schema",
        "additionalProperties",
        "description",
        "properties",
        "required",
        "title",
        "type",
    ];
    let schema = tool
        .parameters
        .as_object()
        .ok_or_else(|| wrong("its parameters are no schema".into()))?;
    if let Some(key) = schema.keys().find(|key| !known.contains(&&key[..])) {
        return Err(wrong(format!(
            "{key:?} in its parameters cannot be enforced in the model's format"
        )));
    }
    let properties = schema
        .get("properties")
        .map(|value| value.as_object().ok_or(value))
        .transpose();
    let properties =
        properties.map_err(|value| wrong(format!("its properties are {value}, not an object")))?;
    let required = schema
        .get("required")
        .map(|value| value.as_array().ok_or(value))
        .transpose();
    let required = required
        .map_err(|value| wrong(format!("its required parameters are {value}, not a list")))?;
    let is_required = |name: &str| required.is_some_and(|names| names.iter().any(|n| n == name));
    let is_property = |name: &Value| {
        properties
            .zip(name.as_str())
            .is_some_and(|(members, n)| members.contains_key(n))
    };
    if let Some(name) = required
        .into_iter()
        .flatten()
        .find(|name| !is_property(name))
    {
        return Err(wrong(format!(
            "the required parameter {name} is not among its properties"
        )));
    }
    let members = properties.into_iter().flatten();
    Ok(members
        .map(|(name, schema)| Parameter {
            name,
            schema,
            required: is_required(name),
        })
        .collect())
}

/// Rules for arguments separated by `comma`: `args<i>_0_0` is the whole list, `arg<i>_<k>` one
/// argument.
pub(super) fn comma_rules(i: usize, parameters: &[Parameter<'_>], comma: &str) -> String {
    let mut rules = String::new();
    // args{i}_{k}_{c}: the arguments from k on; c is 1 if one came before, so that a comma is
    // needed.
    for k in 0..=parameters.len() {
        for c in 0..2 {
            let body = match parameters.get(k) {
                None => "\"\"".to_owned(),
                Some(parameter) => {
                    let due = if c == 1 {
                        lark_text(comma)
                    } else {
                        String::new()
                    };
                    let with = format!("{due} arg{i}_{k} args{i}_{}_1", k + 1);
                    if parameter.required {
                        with
                    } else {
                        format!("{with} | args{i}_{}_{c}", k + 1)
                    }
                }
            };
            rules.push_str(&format!("args{i}_{k}_{c}: {body}\n"));
        }
    }
    rules
}

/// The grammar of calls whose arguments are written one by one, strings without quotes: for each
/// tool `before`, the arguments in the order of the schema, each between `open` and `close`, then
/// `after`.
///
/// # Errors
/// As [`parameters_of`], and for a schema that restricts strings by more than a list of values:
/// without quotes only the end of such a text can be recognised.
pub(super) fn tagged_grammar(
    tools: &[Tool],
    before: impl Fn(&Tool) -> String,
    open: impl Fn(&str) -> String,
    close: &str,
    after: &str,
) -> Result<String, ChatError> {
    let mut rules = String::new();
    let mut calls = Vec::new();
    for (i, tool) in tools.iter().enumerate() {
        let mut call = before(tool);
        for (
            k,
            Parameter {
                name,
                schema,
                required,
            },
        ) in parameters_of(i, tool)?.into_iter().enumerate()
        {
            let value = format!("value{i}_{k}");
            let optional = if required { "" } else { "?" };
            call.push_str(&format!(" ({} {value}){optional}", lark_text(&open(name))));
            rules.push_str(&match (is_text(schema), schema.get("enum").or(schema.get("const"))) {
                (false, _) => format!("{value}: {value}_json {}\n{value}_json: %json {schema}\n", lark_text(close)),
                (true, Some(values)) => {
                    let values = values.as_array().cloned().unwrap_or_else(|| vec![values.clone()]);
                    let texts: Vec<String> = values.iter().filter_map(Value::as_str).map(lark_text).collect();
                    format!("{value}: ({}) {}\n", texts.join(" | "), lark_text(close))
                }
                (true, None) => {
                    let others = ["description", "type", "title", "default", "examples"];
                    let members = schema.as_object().into_iter().flatten();
                    if let Some((key, _)) = members.into_iter().find(|(key, _)| !others.contains(&&key[..])) {
                        let message = format!("{key:?} of parameter {name:?} cannot be enforced in the model's format");
                        return Err(ChatError::Tool { index: i, message });
                    }
                    format!("{value}[suffix={}]: /(?s:.*)/\n", lark_text(close))
                }
            });
        }
        rules.push_str(&format!("call{i}: {call} {}\n", lark_text(after)));
        calls.push(format!("call{i}"));
    }
    Ok(format!("start: {}\n{rules}", calls.join(" | ")))
}

/// Whether a parameter can only be a string, so that it is written without quotes.
pub(super) fn is_text(property: &Value) -> bool {
    property.get("type").is_some_and(|kind| kind == "string")
}

/// The value of parameter `name` of function `function`, written as `text`: a string if the
/// parameter is one, otherwise parsed as JSON, or a string if it is no JSON.
pub(super) fn value_of(tools: &[Tool], function: &str, name: &str, text: &str) -> Value {
    let tool = tools.iter().find(|tool| tool.name == function);
    let property = tool.and_then(|tool| tool.parameters.get("properties")?.get(name));
    if property.is_some_and(is_text) {
        return text.into();
    }
    serde_json::from_str(text.trim()).unwrap_or_else(|_| text.into())
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
