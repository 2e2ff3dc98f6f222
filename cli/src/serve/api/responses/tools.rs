//! Tools of Responses as functions, and calls in the form of the tool that the client named.

use crate::serve::api::responses::grammar::{Budget, Grammar};
use crate::serve::http::error::ApiError;
use crate::serve::http::ignored::Ignored;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// The argument of a tool that takes a text.
const INPUT: &str = "input";

/// Most tools of a request, and most bytes of a name.
const MAX_TOOLS: usize = 10_000;
const MAX_NAME: usize = 256;

/// Beginnings of the types of tools that OpenAI's servers, or clients with a model made for them,
/// bring along.
const HOSTED: &[&str] = &[
    "apply_patch",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
];

/// A tool as the client knows it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ClientTool {
    pub(super) name: String,
    pub(super) namespace: Option<String>,
    /// Whether it takes a text instead of arguments.
    pub(super) is_custom: bool,
}

/// A text that a tool takes: what the model is told of it, and what it has to match.
struct Text {
    schema: Value,
    pattern: Option<String>,
}

/// The functions that the model may call, and which tool of the client each is.
#[derive(Default)]
pub(super) struct Tools {
    functions: Vec<Value>,
    /// By the function's name.
    tools: HashMap<String, ClientTool>,
    /// Schemas of the arguments of functions that say more than the model is told: it reads
    /// grammars as they were given.
    narrowed: Vec<(String, Value)>,
    /// What the grammars of all tools may still take.
    budget: Budget,
}

impl Tools {
    /// Adds the tools of a list.
    pub(super) fn add_all(
        &mut self,
        place: &str,
        tools: &[Value],
        ignored: &Ignored,
    ) -> Result<(), ApiError> {
        for (i, tool) in tools.iter().enumerate() {
            self.add(&format!("{place}[{i}]"), tool, None, ignored)?;
        }
        Ok(())
    }

    fn add(
        &mut self,
        place: &str,
        tool: &Value,
        namespace: Option<&str>,
        ignored: &Ignored,
    ) -> Result<(), ApiError> {
        let kind = tool["type"]
            .as_str()
            .ok_or_else(|| ApiError::field(place, "it has no type"))?;
        match (kind, namespace) {
            ("function" | "custom", _) => self.add_function(place, tool, namespace, ignored),
            ("namespace", None) => {
                let (name, tools) = (name_of(place, tool)?, &tool["tools"]);
                let Value::Array(tools) = tools else {
                    return Err(ApiError::field(place, "it has no list of tools"));
                };
                for (i, tool) in tools.iter().enumerate() {
                    self.add(&format!("{place}.tools[{i}]"), tool, Some(name), ignored)?;
                }
                Ok(())
            }
            _ if ignored.is_strict() && !HOSTED.iter().any(|begin| kind.starts_with(begin)) => {
                let message = format!("the server has no tool of the type {kind:?}");
                Err(ApiError::field(place, message))
            }
            _ => {
                ignored.add(place);
                Ok(())
            }
        }
    }

    fn add_function(
        &mut self,
        place: &str,
        tool: &Value,
        namespace: Option<&str>,
        ignored: &Ignored,
    ) -> Result<(), ApiError> {
        let is_custom = tool["type"] == "custom";
        let client = ClientTool {
            name: name_of(place, tool)?.to_owned(),
            namespace: namespace.map(str::to_owned),
            is_custom,
        };
        // A later definition of the same tool says nothing new.
        let name = self.function(namespace, &client.name);
        if self.tools.contains_key(&name) {
            ignored.add(place);
            return Ok(());
        }
        if self.tools.len() == MAX_TOOLS {
            return Err(ApiError::field(
                place,
                format!("expected at most {MAX_TOOLS} tools"),
            ));
        }
        let mut function = Map::new();
        function.insert("name".into(), name.clone().into());
        if let Some(description) = tool["description"].as_str() {
            function.insert("description".into(), description.into());
        }
        if is_custom {
            let text = self.text(&format!("{place}.format"), &tool["format"])?;
            let parameters = |text| {
                json!({"type": "object", "properties": {INPUT: text}, "required": [INPUT],
                    "additionalProperties": false})
            };
            if let Some(pattern) = text.pattern {
                let text = json!({"type": "string", "pattern": pattern});
                self.narrowed.push((name.clone(), parameters(text)));
            }
            function.insert("strict".into(), true.into());
            function.insert("parameters".into(), parameters(text.schema));
        } else {
            for field in ["parameters", "strict"] {
                if let Some(value) = tool.get(field).filter(|value| !value.is_null()) {
                    function.insert(field.into(), value.clone());
                }
            }
        }
        self.functions
            .push(json!({"type": "function", "function": function}));
        self.tools.insert(name, client);
        Ok(())
    }

    /// A text in this format.
    fn text(&mut self, place: &str, format: &Value) -> Result<Text, ApiError> {
        let wrong = |message: String| ApiError::field(place, message);
        let free = Text {
            schema: json!({"type": "string"}),
            pattern: None,
        };
        match format["type"].as_str() {
            None if format.is_null() => Ok(free),
            Some("text") => Ok(free),
            Some("grammar") => {
                let (syntax, definition) =
                    (format["syntax"].as_str(), format["definition"].as_str());
                let (Some(syntax), Some(definition)) = (syntax, definition) else {
                    return Err(wrong("a grammar has a syntax and a definition".into()));
                };
                let grammar = match syntax {
                    "lark" => Grammar::lark(definition, &mut self.budget),
                    "regex" => Grammar::regex(definition),
                    other => Err(format!("the syntax {other:?} is neither lark nor regex")),
                };
                let Grammar { pattern, max_depth } = grammar.map_err(wrong)?;
                let mut description = format!("A text of this grammar ({syntax}):\n{definition}");
                if let Some(depth) = max_depth {
                    description += &format!("\nRules that contain themselves nest {depth} deep.");
                }
                Ok(Text {
                    schema: json!({"type": "string", "description": description}),
                    pattern: Some(pattern),
                })
            }
            _ => Err(wrong("its type is neither text nor grammar".into())),
        }
    }

    /// The name of a tool's function: with the namespace in front, and a number behind it where
    /// another tool has that name.
    pub(super) fn function(&self, namespace: Option<&str>, name: &str) -> String {
        let Some(namespace) = namespace else {
            return self.free_name(name.to_owned(), None, name);
        };
        let joint = if namespace.ends_with("__") { "" } else { "__" };
        self.free_name(format!("{namespace}{joint}{name}"), Some(namespace), name)
    }

    fn free_name(&self, function: String, namespace: Option<&str>, name: &str) -> String {
        let is_of_other = |function: &String| {
            self.tools.get(function).is_some_and(|tool| {
                (tool.namespace.as_deref(), &tool.name[..]) != (namespace, name)
            })
        };
        if !is_of_other(&function) {
            return function;
        }
        let mut numbered = (2..).map(|i| format!("{function}_{i}"));
        numbered
            .find(|function| !is_of_other(function))
            .unwrap_or(function)
    }

    /// The tool of a call; of one that was never there, a function of that name.
    pub(super) fn tool(&self, function: &str) -> ClientTool {
        self.tools.get(function).cloned().unwrap_or(ClientTool {
            name: function.to_owned(),
            namespace: None,
            is_custom: false,
        })
    }

    /// The functions whose arguments obey more than the model is told, with their schemas.
    pub(super) fn take_narrowed(&mut self) -> Vec<(String, Value)> {
        std::mem::take(&mut self.narrowed)
    }

    /// In the form of chat completions.
    pub(super) fn take_functions(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.functions)
    }

    /// The choice of a tool in the form of chat completions.
    pub(super) fn choice(&self, choice: Value) -> Result<Value, ApiError> {
        let place = "tool_choice";
        let Value::Object(fields) = &choice else {
            return Ok(choice);
        };
        match fields.get("type").and_then(Value::as_str) {
            Some("function" | "custom") => self.named(place, &choice),
            Some("allowed_tools") => {
                let Some(Value::Array(allowed)) = fields.get("tools") else {
                    return Err(ApiError::field(place, "it has no list of tools"));
                };
                let known = allowed
                    .iter()
                    .filter(|tool| tool["type"] == "function" || tool["type"] == "custom");
                let tools = known
                    .map(|tool| self.named(place, tool))
                    .collect::<Result<Value, _>>()?;
                let mode = fields.get("mode").cloned().unwrap_or("auto".into());
                Ok(
                    json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}),
                )
            }
            kind => {
                let kind = kind.unwrap_or_default();
                let message = format!("the server has no tool of the type {kind:?}");
                Err(ApiError::field(place, message))
            }
        }
    }

    fn named(&self, place: &str, tool: &Value) -> Result<Value, ApiError> {
        let name = self.function(tool["namespace"].as_str(), name_of(place, tool)?);
        Ok(json!({"type": "function", "function": {"name": name}}))
    }
}

impl ClientTool {
    /// A text as the arguments of the function.
    pub(super) fn arguments(text: &str) -> Value {
        json!({INPUT: text})
    }

    /// The text in the arguments of a call; whatever they are if there is none.
    pub(super) fn text(arguments: &str) -> String {
        match serde_json::from_str::<Map<String, Value>>(arguments) {
            Ok(mut fields) => match fields.shift_remove(INPUT) {
                Some(Value::String(text)) => text,
                _ => arguments.to_owned(),
            },
            Err(_) => arguments.to_owned(),
        }
    }
}

/// The text in the arguments of a call that is being written.
#[derive(Default)]
pub(super) struct Unquoted {
    /// What of the arguments is not read yet.
    rest: String,
    is_begun: bool,
    is_over: bool,
}

impl Unquoted {
    /// What is certain of the text with `more` of the arguments.
    pub(super) fn push(&mut self, more: &str) -> String {
        if self.is_over {
            return String::new();
        }
        self.rest.push_str(more);
        if !self.is_begun {
            let marks = ["{", &format!("\"{INPUT}\""), ":", "\""];
            let value = marks.iter().try_fold(&self.rest[..], |rest, mark| {
                rest.trim_start().strip_prefix(mark)
            });
            let Some(value) = value.map(str::to_owned) else {
                return String::new();
            };
            (self.rest, self.is_begun) = (value, true);
        }
        let mut len = 0;
        while let Some(c) = self.rest[len..].chars().next() {
            len += match c {
                '"' => {
                    self.is_over = true;
                    break;
                }
                '\\' => match escape_len(&self.rest[len..]) {
                    Some(len) => len,
                    None => break,
                },
                c => c.len_utf8(),
            };
        }
        let quoted = format!("\"{}\"", &self.rest[..len]);
        self.rest.drain(..len);
        serde_json::from_str(&quoted).unwrap_or_default()
    }
}

/// Length of the escape at the start of a text, once it is whole; two may be one character.
fn escape_len(text: &str) -> Option<usize> {
    if *text.as_bytes().get(1)? != b'u' {
        return Some(2);
    }
    let code = u16::from_str_radix(text.get(2..6)?, 16).ok()?;
    let len = if (0xd800..0xdc00).contains(&code) {
        12
    } else {
        6
    };
    (text.len() >= len).then_some(len)
}

fn name_of<'a>(place: &str, tool: &'a Value) -> Result<&'a str, ApiError> {
    tool["name"]
        .as_str()
        .filter(|name| (1..=MAX_NAME).contains(&name.len()))
        .ok_or_else(|| ApiError::field(place, format!("expected a name of 1 to {MAX_NAME} bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_one_tool() {
        let function = |name: &str| json!({"type": "function", "name": name});
        let tools = json!([
            function("f"),
            function("a__f"),
            {"type": "namespace", "name": "a", "tools": [function("f"), function("b__f"), {"type": "custom", "name": "t"}]},
            {"type": "namespace", "name": "a__b", "tools": [function("f")]},
            {"type": "namespace", "name": "mcp__", "tools": [function("f")]},
            function("f"),
            {"type": "web_search"},
            {"type": "web_search_of_tomorrow"},
            {"type": "tool_of_tomorrow"},
        ]);
        let (mut all, ignored) = (Tools::default(), Ignored::default());
        all.add_all("tools", tools.as_array().unwrap(), &ignored)
            .unwrap();
        let of = |function: &str| {
            let ClientTool {
                name, namespace, ..
            } = all.tool(function);
            (namespace.unwrap_or_default(), name)
        };
        for (function, namespace, name) in [
            ("f", "", "f"),
            ("a__f", "", "a__f"),
            ("a__f_2", "a", "f"),
            ("a__b__f", "a", "b__f"),
            ("a__b__f_2", "a__b", "f"),
            ("mcp__f", "mcp__", "f"),
            ("unknown", "", "unknown"),
        ] {
            assert_eq!(
                of(function),
                (namespace.to_owned(), name.to_owned()),
                "{function}"
            );
            let namespace = Some(namespace).filter(|namespace| !namespace.is_empty());
            assert_eq!(all.function(namespace, name), function);
        }
        assert!(all.tool("a__t").is_custom && !all.tool("f").is_custom);
        assert_eq!(all.functions.len(), 7);
        let mut strict = Tools::default();
        let error = strict
            .add_all("tools", tools.as_array().unwrap(), &Ignored::strict())
            .unwrap_err();
        assert_eq!(error.json()["error"]["param"], "tools[8]");
    }

    #[test]
    fn texts_and_arguments() {
        for text in ["", "a\n\"b\"", "{}"] {
            assert_eq!(
                ClientTool::text(&ClientTool::arguments(text).to_string()),
                text
            );
        }
        assert_eq!(ClientTool::text("{\"inp"), "{\"inp");
    }

    #[test]
    fn a_text_comes_as_its_arguments_do() {
        let text = "*** \"a\"\n\t\\ é 東 \u{1f600} end";
        let escaped = r#""*** \"a\"\n\t\\ \u00e9 東 \ud83d\ude00 end""#;
        for arguments in [
            ClientTool::arguments(text).to_string(),
            format!(" {{ \"{INPUT}\" :  {escaped} }} "),
        ] {
            for size in [1, 2, 5, 100] {
                let (mut unquoted, mut told) = (Unquoted::default(), String::new());
                let chars: Vec<char> = arguments.chars().collect();
                for piece in chars.chunks(size) {
                    told += &unquoted.push(&piece.iter().collect::<String>());
                    assert!(text.starts_with(&told), "{told}");
                }
                assert_eq!(told, text, "{arguments}, {size}");
            }
        }
        let mut unquoted = Unquoted::default();
        assert_eq!(unquoted.push("[1, 2]"), "");
    }
}
