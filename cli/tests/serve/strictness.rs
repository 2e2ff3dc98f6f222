//! Schemas and grammars of requests: what cannot be enforced is named in the answer's header, or
//! refused where the request is strict.

use super::{choose_schema, shared};
use serde_json::{Value, json};

/// Status, ignored names and body of the answer to a chat.
fn chat(fields: Value) -> (u16, String, Value) {
    let mut body = json!({
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 80, "seed": 3,
    });
    let all = body.as_object_mut().unwrap();
    all.extend(fields.as_object().unwrap().clone());
    let path = "/v1/chat/completions";
    let (status, head, body) = shared().exchange("POST", path, "", &body.to_string());
    let mut lines = head.lines();
    let ignored = lines.find_map(|line| line.strip_prefix("x-ruvllm-ignored: "));
    let ignored = ignored.unwrap_or_default().to_owned();
    (status, ignored, serde_json::from_str(&body).unwrap())
}

fn tool(schema: Value, strict: Option<bool>) -> Value {
    let parameters = json!({"type": "object", "properties": {"a": schema}});
    json!({"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}})
}

#[test]
fn tools_are_refused_only_if_they_are_strict() {
    for (schema, name) in [
        (json!({"type": "integer", "format": "int32"}), ""),
        (
            json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}),
            "",
        ),
        (json!({"type": "string", "minLength": 1}), ""),
        (
            json!({"type": "array", "uniqueItems": true}),
            "tools[0]/properties/a/uniqueitems",
        ),
        (
            json!({"not": {"type": "null"}}),
            "tools[0]/properties/a/not",
        ),
    ] {
        for strict in [None, Some(false)] {
            let (status, ignored, body) = chat(json!({"tools": [tool(schema.clone(), strict)]}));
            assert_eq!((status, &ignored[..]), (200, name), "{body}");
        }
        let strict = json!([tool(schema, Some(true))]);
        let (status, _, body) = chat(json!({"tools": strict}));
        assert_eq!(status, if name.is_empty() { 200 } else { 400 }, "{body}");
        let message = body["error"]["message"].as_str().unwrap_or_default();
        assert!(
            name.is_empty() || message.contains("\"f\"") && message.contains("/properties/a"),
            "{body}"
        );
        let (status, ..) = chat(json!({"tools": strict, "tool_choice": "none"}));
        assert_eq!(status, 200, "nothing is compiled");
    }
}

#[test]
fn formats_are_refused_only_if_they_are_strict() {
    let format = |schema: &Value, strict: Option<bool>| {
        let described = json!({"name": "s", "schema": schema, "strict": strict});
        json!({"response_format": {"type": "json_schema", "json_schema": described}})
    };
    let schema =
        json!({"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": true});
    for strict in [None, Some(false)] {
        let (status, ignored, body) = chat(format(&schema, strict));
        assert_eq!(
            (status, &ignored[..]),
            (200, "response_format/uniqueitems"),
            "{body}"
        );
    }
    let (status, _, body) = chat(format(&schema, Some(true)));
    assert_eq!(
        (status, &body["error"]["param"]),
        (400, &json!("response_format"))
    );
    // An object ends after its properties.
    let person = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
    });
    let (_, _, body) = chat(format(&person, None));
    let content = body["choices"][0]["message"]["content"].as_str().unwrap();
    let value: Value = serde_json::from_str(content).unwrap_or_else(|e| panic!("{e}: {body}"));
    assert_eq!(value.as_object().unwrap().len(), 2, "{body}");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
}

#[test]
fn grammars_in_both_languages() {
    for grammar in [
        "%llguidance {}\nstart: \"yes\" | \"no\"",
        "root ::= \"yes\" | \"no\"",
    ] {
        let (status, _, body) = chat(json!({"grammar": grammar}));
        let content = &body["choices"][0]["message"]["content"];
        assert!(
            status == 200 && (content == "yes" || content == "no"),
            "{body}"
        );
    }
    let (status, _, body) = chat(json!({"grammar": "%llguidance {}\nstart: missing"}));
    assert_eq!((status, &body["error"]["param"]), (400, &json!("grammar")));
}

/// Requests that are too large for anything are answered at once, and harm nobody.
#[test]
fn huge_tools_and_schemas() {
    let server = &*shared();
    let of_tools = |n: usize| -> Vec<Value> {
        let name = |i: usize| json!({"type": "function", "function": {"name": format!("t{i}"), "parameters": choose_schema()}});
        (0..n).map(name).collect()
    };
    let wide: serde_json::Map<String, Value> = (0..40_000)
        .map(|i| (format!("p{i}"), json!({"type": "integer"})))
        .collect();
    let wide = json!({"type": "object", "properties": wide});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": wide}});
    let start = std::time::Instant::now();
    for (more, words) in [
        (json!({"tools": of_tools(10_000)}), "the limit is 256"),
        (
            json!({"tools": of_tools(10_000), "tool_choice": "none"}),
            "the limit is 256",
        ),
        (
            json!({"tools": [tool(wide, Some(true))], "tool_choice": "required"}),
            "",
        ),
        (json!({"response_format": format}), ""),
    ] {
        let (status, _, error) = chat(more);
        let message = error["error"]["message"].as_str().unwrap_or_default();
        assert!(
            status == 400 && message.contains(words),
            "{status}: {error}"
        );
        assert!(message.len() < 4096, "{}", message.len());
    }
    let (status, _, answer) = chat(json!({"tools": of_tools(200)}));
    assert!(
        status == 200 || answer["error"]["code"] == "context_length_exceeded",
        "{answer}"
    );
    let limit = std::time::Duration::from_secs(60);
    assert!(start.elapsed() < limit, "{:?}", start.elapsed());
    assert_eq!(server.get("/health").0, 200);
}
