//! The parameters of tools: enforced in the syntax of every format, left out and named, or refused.

use crate::calls::CALLS;
use crate::tools::format;
use crate::tools::grammar::{allowed, setup};
use ruvllm::chat::tools::{Tool, ToolChoice, ToolMask, TurnParser};
use serde_json::{Value, json};

/// A call of `f` with argument `a` in a format that writes values in a syntax of its own.
fn own_call(format: &str, value: &Value) -> String {
    let spaced = value.to_string().replace(',', ", ").replace(':', ": ");
    let text = value.as_str().map_or(spaced, str::to_owned);
    match format {
        "glm" => format!(
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
        ),
        "qwen3-coder" => format!(
            "<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
        ),
        "minimax" => format!(
            "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"a\">{text}</parameter>\n</invoke>\n</minimax:tool_call>"
        ),
        "minimax-m3" => format!(
            "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"f\">]<]minimax[>[<a>{}]<]minimax[>[</a>\
             ]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
            elements(value).unwrap_or(text)
        ),
        "seed-oss" => format!(
            "<seed:tool_call>\n<function=f>\n<parameter=a>{text}</parameter>\n</function>\n</seed:tool_call>"
        ),
        "minicpm5" => format!("<function name=\"f\"><param name=\"a\">{text}</param></function>"),
        "deepseek-v3.2" => format!(
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"{}\">{text}\
             </｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            value.is_string()
        ),
        "kimi-k3" => format!(
            "<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"0\"<|sep|><|open|>argument key=\"a\" type=\"{}\"<|sep|>\
             {text}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
            match value {
                Value::Null => "null",
                Value::Bool(_) => "boolean",
                Value::Number(_) => "number",
                Value::String(_) => "string",
                Value::Array(_) => "array",
                Value::Object(_) => "object",
            }
        ),
        "gemma4" => format!(
            "<|tool_call>call:f{{a:{}}}<tool_call|>",
            gemma(value, "<|\"|>")
        ),
        _ => format!(
            "<start_function_call>call:f{{a:{}}}<end_function_call>",
            gemma(value, "<escape>")
        ),
    }
}

/// A list or an object as MiniMax M3 writes it.
fn elements(value: &Value) -> Option<String> {
    let element = |name: &str, value: &Value| {
        let text = value.as_str().map_or(value.to_string(), str::to_owned);
        let inner = elements(value).unwrap_or(text);
        format!("]<]minimax[>[<{name}>{inner}]<]minimax[>[</{name}>")
    };
    match value {
        Value::Array(items) if !items.is_empty() => {
            Some(items.iter().map(|item| element("item", item)).collect())
        }
        Value::Object(members) => Some(members.iter().map(|(key, of)| element(key, of)).collect()),
        _ => None,
    }
}

fn gemma(value: &Value, quote: &str) -> String {
    match value {
        Value::String(text) => format!("{quote}{text}{quote}"),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(|item| gemma(item, quote)).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(members) => {
            let pairs = members
                .iter()
                .map(|(key, value)| format!("{key}:{}", gemma(value, quote)));
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(","))
        }
        other => other.to_string(),
    }
}

const OWN_SYNTAX: [&str; 10] = [
    "glm",
    "qwen3-coder",
    "minimax",
    "gemma4",
    "function-gemma",
    "seed-oss",
    "minicpm5",
    "deepseek-v3.2",
    "kimi-k3",
    "minimax-m3",
];

#[test]
fn values_in_a_syntax_of_their_own() {
    let (tokenizer, trie) = setup();
    for (schema, yes, no) in [
        (
            json!({"type": "string", "minLength": 2, "maxLength": 5}),
            vec![json!("abc"), json!("a<b")],
            vec![json!("a"), json!("abcdef")],
        ),
        (
            json!({"type": "string", "pattern": "^[a-z]+-[0-9]{2}$"}),
            vec![json!("ab-12")],
            vec![json!("ab-1"), json!("ab-123")],
        ),
        (
            json!({"type": "string", "pattern": "b"}),
            vec![json!("abc"), json!("b")],
            vec![json!("ac")],
        ),
        (
            json!({"type": "string", "format": "date"}),
            vec![json!("2024-02-29")],
            vec![json!("2026-02-30")],
        ),
        (
            json!({"$ref": "#/$defs/unit"}),
            vec![json!("kelvin")],
            vec![json!("rankine")],
        ),
        (
            json!({"anyOf": [{"type": "integer"}, {"enum": ["auto", null]}]}),
            vec![json!(5), json!("auto"), json!(null)],
            vec![json!("other"), json!(5.5)],
        ),
        (
            json!({"type": ["string", "null"]}),
            vec![json!("any text"), json!(null)],
            vec![],
        ),
        (
            json!({"type": ["string", "null"], "maxLength": 3}),
            vec![json!("abc"), json!(null)],
            vec![json!("abcd"), json!(17_000)],
        ),
        (
            json!({"type": "array", "items": {"type": "integer"}, "maxItems": 1}),
            vec![json!([]), json!([1])],
            vec![json!([1, 2])],
        ),
        (
            json!({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}),
            vec![json!([1]), json!([1, 2])],
            vec![json!([]), json!([1, 2, 3]), json!(["a"])],
        ),
        (
            json!({"type": "object", "properties": {"x": {"enum": ["y"]}, "n": {"type": "integer"}}, "required": ["x"]}),
            vec![json!({"x": "y"}), json!({"x": "y", "n": 1})],
            vec![
                json!({"n": 1}),
                json!({"x": "z"}),
                json!({"x": "y", "z": 1}),
            ],
        ),
    ] {
        let parameters = json!({
            "type": "object", "properties": {"a": schema}, "required": ["a"],
            "$defs": {"unit": {"enum": ["celsius", "kelvin"]}},
        });
        let mut tool = Tool::new("f", parameters);
        for strict in [false, true] {
            tool.strict = strict;
            let tools = [tool.clone()];
            // A strict object is as open as the standard says; Gemma's other keys have any value.
            let no = if strict && schema["type"] == "object" {
                &no[..2]
            } else {
                &no[..]
            };
            // MiniMax M3's elements in elements are free, so that no strict tool has them.
            let is_nested = ["array", "object"]
                .iter()
                .any(|kind| schema["type"] == *kind);
            for name in OWN_SYNTAX {
                if name == "minimax-m3" && is_nested {
                    let mask =
                        ToolMask::new(&trie, format(name), &tools, &ToolChoice::Required, "");
                    assert_eq!(mask.is_err(), strict, "{schema}");
                    assert!(mask.is_err() || !mask.unwrap().loosened().is_empty());
                    continue;
                }
                let mask = ToolMask::new(&trie, format(name), &tools, &ToolChoice::Required, "");
                let mask = mask.unwrap_or_else(|e| panic!("{name}: {schema}: {e}"));
                assert_eq!(mask.loosened(), [], "{name}: {schema}");
                for value in &yes {
                    let call = own_call(name, value);
                    let n = allowed(&mut mask.clone(), &tokenizer, &call);
                    assert_eq!(n, call.len(), "{name}: {schema}: {}", &call[n..]);
                    let mut parser = TurnParser::new(format(name), &tools, "");
                    parser.push(&call);
                    let turn = parser.finish();
                    assert_eq!(turn.calls[0].arguments["a"], *value, "{name}: {schema}");
                }
                for value in no {
                    let call = own_call(name, value);
                    let n = allowed(&mut mask.clone(), &tokenizer, &call);
                    assert!(n < call.len(), "{name}: {schema}: {call}");
                }
            }
        }
    }
}

/// Whatever is in their parameters, tools that are not strict are taken, and what is not enforced
/// is named; strict ones are refused by name and path.
#[test]
fn tools_that_cannot_be_enforced() {
    let (_, trie) = setup();
    let inside = |schema: Value| json!({"type": "object", "properties": {"a": schema}});
    for (parameters, path, keyword) in [
        (
            inside(json!({"not": {"type": "null"}})),
            "/properties/a",
            "not",
        ),
        (
            inside(json!({"type": "array", "uniqueItems": true})),
            "/properties/a",
            "uniqueItems",
        ),
        (
            inside(json!({"type": "string", "pattern": "\\bx"})),
            "/properties/a",
            "pattern",
        ),
        (
            inside(json!({"$ref": "#/nowhere"})),
            "/properties/a",
            "$ref",
        ),
        (
            inside(json!({"type": "object", "patternProperties": {"a": {}, "aa": {}}})),
            "",
            "",
        ),
        (
            json!({"type": "object", "anyOf": [{"required": ["b"]}, {"minProperties": 1}]}),
            "",
            "",
        ),
        (
            json!({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1, "minProperties": 1}),
            "",
            "",
        ),
        (
            json!({"type": "object", "properties": {"a": {"minLength": 9, "maxLength": 1, "type": "string"}}, "required": ["a"]}),
            "",
            "",
        ),
    ] {
        for (name, ..) in CALLS {
            let mut tools = [
                Tool::new("first", json!({"type": "object"})),
                Tool::new("second", parameters.clone()),
            ];
            let mask =
                |tools: &[Tool], choice| ToolMask::new(&trie, format(name), tools, &choice, "");
            let lenient = mask(&tools, ToolChoice::Auto);
            let lenient = lenient.unwrap_or_else(|e| panic!("{name}: {parameters}: {e}"));
            tools[1].strict = true;
            // Nothing is compiled.
            mask(&tools, ToolChoice::None).unwrap();
            if keyword.is_empty() {
                continue;
            }
            let found = &lenient.loosened()[0];
            assert_eq!(
                (&found.name[..], &found.path[..], &found.keyword[..]),
                ("second", path, keyword)
            );
            let error = mask(&tools, ToolChoice::Auto).unwrap_err().to_string();
            for part in ["second", path, keyword] {
                assert!(error.contains(part), "{name}: {error}");
            }
        }
    }
}

/// A tool without parameters takes no arguments; one that says nothing of them takes any.
#[test]
fn tools_without_parameters() {
    let (tokenizer, trie) = setup();
    let tools = Tool::from_json(&json!([{"type": "function", "function": {"name": "f"}}])).unwrap();
    let open = [Tool::new("f", json!({"type": "object"}))];
    for (name, none, some) in [
        (
            "hermes",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
        ),
        (
            "qwen3-coder",
            "<tool_call>\n<function=f>\n</function>\n</tool_call>",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "gemma4",
            "<|tool_call>call:f{}<tool_call|>",
            "<|tool_call>call:f{a:1}<tool_call|>",
        ),
        (
            "lfm2",
            "<|tool_call_start|>[f()]<|tool_call_end|>",
            "<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
        ),
    ] {
        let mask = |tools: &[Tool]| {
            ToolMask::new(&trie, format(name), tools, &ToolChoice::Required, "").unwrap()
        };
        assert_eq!(
            allowed(&mut mask(&tools), &tokenizer, none),
            none.len(),
            "{name}"
        );
        assert!(
            allowed(&mut mask(&tools), &tokenizer, some) < some.len(),
            "{name}"
        );
        assert_eq!(
            allowed(&mut mask(&open), &tokenizer, some),
            some.len(),
            "{name}"
        );
    }
    let many: Vec<Tool> = (0..10_000)
        .map(|i| Tool::new(format!("f{i}"), json!({})))
        .collect();
    let error = ToolMask::new(&trie, format("hermes"), &many, &ToolChoice::Auto, "").unwrap_err();
    assert!(error.to_string().contains("10000 tools"), "{error}");
    // As many as there may be, each with a text that is longer than all grammars may be.
    let long = "A long story. ".repeat(2000);
    let described =
        json!({"type": "object", "properties": {"a": {"type": "integer", "description": long}}});
    let tools: Vec<Tool> = (0..200)
        .map(|i| Tool::new(format!("f{i}"), described.clone()))
        .collect();
    let mask = ToolMask::new(&trie, format("hermes"), &tools, &ToolChoice::Auto, "").unwrap();
    assert_eq!(mask.loosened(), []);
}
