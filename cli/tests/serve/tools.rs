//! Tools in OpenAI's, Anthropic's and the first form: what is called, what is told while a call is
//! written, and what becomes of one that is cut off.

use super::content::template;
use super::{Folder, Server, named_events, shared, tiny};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn messages() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

fn parameters() -> Value {
    json!({
        "type": "object", "required": ["s", "n"], "additionalProperties": false,
        "properties": {"s": {"enum": ["alpha", "be ta"], "type": "string"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    })
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "f", "parameters": parameters()}}])
}

/// A server whose model writes calls in this format.
fn server_of(folder: &Folder, format: &str, flags: &[&str]) -> Server {
    let model = folder.path("model.gguf");
    if !std::path::Path::new(&model).exists() {
        folder.model("model.gguf", tiny::reranker());
    }
    let file = folder.file("template.jinja", &template(format));
    let of_format = ["-m", &model[..], "--chat-template-file", &file];
    Server::start(&[&of_format[..], flags].concat())
}

/// What a chat's answer says: its text, the names and arguments of its calls, why it ended.
type Told = (String, Vec<(String, String)>, String);

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn whole(answer: &Value) -> Told {
    let choice = &answer["choices"][0];
    let calls = choice["message"]["tool_calls"].as_array();
    let calls = calls.into_iter().flatten().map(|call| {
        let function = &call["function"];
        (string(&function["name"]), string(&function["arguments"]))
    });
    (
        string(&choice["message"]["content"]),
        calls.collect(),
        string(&choice["finish_reason"]),
    )
}

/// [`whole`] of a stream, in how many parts the arguments came.
fn streamed(server: &Server, body: &Value) -> (Told, usize) {
    let (mut told, mut n_parts) = (Told::default(), 0);
    for event in server.stream(CHAT, body.clone()) {
        let choice = &event["choices"][0];
        told.0 += choice["delta"]["content"].as_str().unwrap_or_default();
        told.2 += choice["finish_reason"].as_str().unwrap_or_default();
        let calls = choice["delta"]["tool_calls"].as_array();
        for call in calls.into_iter().flatten() {
            if let Some(name) = call["function"]["name"].as_str() {
                assert!(call["id"].is_string() && call["type"] == "function");
                told.1.push((name.to_owned(), String::new()));
            }
            assert_eq!(call["index"], told.1.len() - 1);
            let more = call["function"]["arguments"].as_str().unwrap();
            told.1.last_mut().unwrap().1 += more;
            n_parts += usize::from(!more.is_empty());
        }
    }
    (told, n_parts)
}

/// Wherever an answer of calls is cut, it ends for its length and with what there is of a call;
/// nothing of a call is text. A stream tells the arguments as they are written.
#[test]
fn calls_that_are_cut() {
    let folder = Folder::new("cut");
    for format in [
        "hermes",
        "mistral",
        "qwen3-coder",
        "glm",
        "harmony",
        "llama3",
        "gemma4",
        "kimi",
    ] {
        let server = server_of(&folder, format, &[]);
        let mut body = json!({"messages": messages(), "tools": tools(), "tool_choice": "required",
            "parallel_tool_calls": false, "seed": 3, "max_tokens": 400});
        let answer = server.ask(CHAT, &body);
        let (text, calls, reason) = whole(&answer);
        assert_eq!(
            (&text[..], calls.len(), &reason[..]),
            ("", 1, "tool_calls"),
            "{format}: {answer}"
        );
        let arguments: Value = serde_json::from_str(&calls[0].1).unwrap();
        assert!(
            jsonschema::is_valid(&parameters(), &arguments),
            "{format}: {arguments}"
        );
        let (all, n_parts) = streamed(&server, &body);
        assert_eq!(all, (text, calls.clone(), reason), "{format}");
        assert_eq!(n_parts > 1, format != "gemma4", "{format}: {n_parts} parts");
        let n = answer["usage"]["completion_tokens"].as_u64().unwrap();
        for n in 1..n {
            body["max_tokens"] = n.into();
            let (cut, _) = streamed(&server, &body);
            let (text, part, reason) = &cut;
            let is_whole =
                part.first().is_some_and(|call| *call == calls[0]) && reason == "tool_calls";
            assert_eq!(
                (&text[..], is_whole || reason == "length"),
                ("", true),
                "{format}, {n}: {cut:?}"
            );
            for (name, arguments) in part {
                assert_eq!(*name, calls[0].0, "{format}, {n}");
                assert!(
                    calls[0].1.starts_with(arguments),
                    "{format}, {n}: {arguments}"
                );
            }
            if n % 5 == 0 {
                assert_eq!(whole(&server.ask(CHAT, &body)), cut, "{format}, {n}");
            }
        }
    }
}

/// The other two APIs: what is cut says so there, too.
#[test]
fn calls_that_are_cut_elsewhere() {
    let folder = Folder::new("cut2");
    let server = server_of(&folder, "hermes", &[]);
    let response = |n: usize| {
        json!({"input": "hi", "tool_choice": "required", "seed": 3, "max_output_tokens": n,
            "parallel_tool_calls": false, "tools": [{"type": "function", "name": "f", "parameters": parameters()}]})
    };
    let message = |n: usize| {
        json!({"messages": messages(), "tool_choice": {"type": "any", "disable_parallel_tool_use": true}, "seed": 3,
            "max_tokens": n, "tools": [{"name": "f", "input_schema": parameters()}]})
    };
    let of_response = |n: usize| {
        let (mut arguments, mut n_parts, mut end) = (String::new(), 0, Value::Null);
        for event in named_events(&server, "/v1/responses", response(n)) {
            match event["type"].as_str().unwrap() {
                "response.function_call_arguments.delta" => {
                    arguments += event["delta"].as_str().unwrap();
                    n_parts += 1;
                }
                "response.completed" | "response.incomplete" => end = event["response"].clone(),
                other => assert!(!other.contains("text"), "{event}"),
            }
        }
        (arguments, n_parts, end)
    };
    let of_message = |n: usize| {
        let (mut arguments, mut n_parts, mut end) = (String::new(), 0, String::new());
        for event in named_events(&server, "/v1/messages", message(n)) {
            match event["type"].as_str().unwrap() {
                "content_block_start" => assert_eq!(event["content_block"]["type"], "tool_use"),
                "content_block_delta" => {
                    arguments += event["delta"]["partial_json"].as_str().unwrap();
                    n_parts += 1;
                }
                "message_delta" => end = string(&event["delta"]["stop_reason"]),
                _ => {}
            }
        }
        (arguments, n_parts, end)
    };
    let (all, n_parts, end) = of_response(400);
    assert!(
        jsonschema::is_valid(&parameters(), &serde_json::from_str(&all).unwrap()),
        "{all}"
    );
    assert_eq!(
        (n_parts > 2, end["status"].as_str()),
        (true, Some("completed"))
    );
    let (same, n_parts, end) = of_message(400);
    assert_eq!((n_parts > 2, &end[..]), (true, "tool_use"));
    assert!(
        jsonschema::is_valid(&parameters(), &serde_json::from_str(&same).unwrap()),
        "{same}"
    );
    for n in (1..60).step_by(6) {
        let (part, _, end) = of_response(n);
        assert!(all.starts_with(&part), "{part} of {all}");
        assert_eq!(
            end["incomplete_details"]["reason"], "max_output_tokens",
            "{end}"
        );
        let (part, _, end) = of_message(n);
        assert!(same.starts_with(&part), "{part} of {same}");
        assert_eq!(end, "max_tokens");
    }
}

/// With `tool_choice` required the answer is calls, from its beginning to its end.
#[test]
fn nothing_follows_the_last_call() {
    let folder = Folder::new("required");
    let server = server_of(&folder, "hermes", &[]);
    let n = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"], "additionalProperties": false});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": n}}]);
    let mut most = 0;
    for seed in 0..6 {
        let body = json!({"messages": messages(), "tools": tools, "tool_choice": "required", "seed": seed, "max_tokens": 250});
        let (text, calls, reason) = whole(&server.ask(CHAT, &body));
        assert_eq!(text, "");
        assert!(["length", "tool_calls"].contains(&&reason[..]) && !calls.is_empty());
        most = most.max(calls.len());
        let (_, last) = &calls[calls.len() - 1];
        let is_whole = serde_json::from_str::<Value>(last).is_ok();
        assert!(is_whole || reason == "length", "{last:?}, {reason}");
    }
    assert!(most > 1, "several calls in one answer");
}

/// A function without parameters takes none.
#[test]
fn no_parameters() {
    let server = shared();
    for function in [
        json!({"name": "list_files"}),
        json!({"name": "list_files", "parameters": null}),
    ] {
        let body = json!({"messages": messages(), "max_tokens": 60, "tool_choice": "required", "parallel_tool_calls": false,
            "temperature": 1, "seed": 5, "tools": [{"type": "function", "function": function}]});
        let (_, calls, reason) = whole(&server.ask(CHAT, &body));
        assert_eq!(
            (&calls[..], &reason[..]),
            (&[("list_files".into(), "{}".into())][..], "tool_calls")
        );
    }
}

/// Tools and a format, in a field or of the server: the answer is a call, or text that obeys.
#[test]
fn a_call_or_a_text_that_obeys() {
    let folder = Folder::new("either");
    let schema = json!({"type": "object", "properties": {"name": {"const": "f"}, "a": {"enum": [1, 2, 3]}},
        "required": ["name", "a"], "additionalProperties": false});
    for format in ["hermes", "llama3", "generic", "mistral-v11"] {
        let of_fields = server_of(&folder, format, &[]);
        let text = schema.to_string();
        let of_flags = server_of(&folder, format, &["--json-schema", &text]);
        let wish = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
        let (mut n_calls, mut n_texts) = (0, 0);
        for seed in 0..30 {
            let mut body = json!({"messages": messages(), "tools": tools(), "seed": seed, "max_tokens": 300, "temperature": 1.5});
            let plain = body.clone();
            body["response_format"] = wish.clone();
            let told = whole(&of_fields.ask(CHAT, &body));
            assert_eq!(whole(&of_flags.ask(CHAT, &plain)), told, "{format}");
            assert_eq!(streamed(&of_fields, &body).0, told, "{format}");
            let (text, calls, reason) = told;
            if calls.is_empty() {
                let value: Value = serde_json::from_str(&text)
                    .unwrap_or_else(|error| panic!("{format}: {text}: {error}"));
                assert!(
                    jsonschema::is_valid(&schema, &value) && reason == "stop",
                    "{format}: {value}"
                );
                n_texts += 1;
            } else {
                assert_eq!(text, "", "{format}");
                n_calls += 1;
            }
            if n_calls > 1 && n_texts > 1 {
                break;
            }
        }
        assert!(n_texts > 0, "{format}: {n_calls} calls, {n_texts} texts");
        // Required: no text.
        let body = json!({"messages": messages(), "tools": tools(), "tool_choice": "required", "seed": 1, "max_tokens": 300,
            "response_format": wish, "parallel_tool_calls": false});
        let (text, calls, _) = whole(&of_fields.ask(CHAT, &body));
        assert_eq!((&text[..], calls.len()), ("", 1), "{format}");
    }
}

/// `allowed_tools`: the others are shown, and never called.
#[test]
fn allowed_tools() {
    let server = shared();
    let tools = json!([{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]);
    let choice = |mode: &str, name: &str| {
        json!({"type": "allowed_tools", "allowed_tools": {"mode": mode,
            "tools": [{"type": "function", "function": {"name": name}}]}})
    };
    for seed in 0..4 {
        let body = json!({"messages": messages(), "tools": tools, "tool_choice": choice("required", "g"), "temperature": 1,
            "seed": seed, "max_tokens": 80, "parallel_tool_calls": false});
        let (text, calls, _) = whole(&server.ask(CHAT, &body));
        assert_eq!(
            (&text[..], &calls[..]),
            ("", &[("g".into(), "{}".into())][..])
        );
    }
    let body = json!({"messages": messages(), "tools": tools, "tool_choice": choice("auto", "f"), "max_tokens": 8});
    server.ask(CHAT, &body);
    for wrong in [
        choice("auto", "h"),
        choice("any", "f"),
        json!({"type": "allowed_tools"}),
    ] {
        let body = json!({"messages": messages(), "tools": tools, "tool_choice": wrong});
        let (status, error) = server.post(CHAT, &body);
        assert_eq!(
            (status, &error["error"]["param"]),
            (400, &json!("tool_choice")),
            "{error}"
        );
    }
}

/// The API's first form of tools: functions, one call, and how it went on.
#[test]
fn functions() {
    let server = shared();
    let functions = json!([{"name": "f", "parameters": parameters()}, {"name": "g"}]);
    let body = json!({"messages": messages(), "functions": functions, "function_call": {"name": "f"}, "temperature": 1, "seed": 2});
    let answer = server.ask(CHAT, &body);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "function_call");
    let message = &choice["message"];
    let call = &message["function_call"];
    assert!(
        message["content"].is_null() && message.get("tool_calls").is_none() && call["name"] == "f"
    );
    let arguments = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(
        jsonschema::is_valid(&parameters(), &arguments),
        "{arguments}"
    );
    let (mut name, mut arguments, mut reason) = (String::new(), String::new(), String::new());
    for event in server.stream(CHAT, body) {
        let choice = &event["choices"][0];
        let call = &choice["delta"]["function_call"];
        name += call["name"].as_str().unwrap_or_default();
        arguments += call["arguments"].as_str().unwrap_or_default();
        reason += choice["finish_reason"].as_str().unwrap_or_default();
    }
    assert_eq!(
        (json!(name), json!(arguments), &reason[..]),
        (
            call["name"].clone(),
            call["arguments"].clone(),
            "function_call"
        )
    );
    // What came of it.
    let history = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": null, "function_call": call},
        {"role": "function", "name": "f", "content": "done"}]);
    for choice in [json!("none"), json!("auto"), json!(null)] {
        let body = json!({"messages": history, "functions": functions, "function_call": choice, "max_tokens": 4});
        server.ask(CHAT, &body);
    }
    let (_, prompt) = server.post("/apply-template", &json!({"messages": history}));
    let prompt = prompt["prompt"].as_str().unwrap();
    assert!(prompt.contains("done"), "{prompt}");
    let (status, error) = server.post(
        CHAT,
        &json!({"messages": messages(), "function_call": {"name": "f"}}),
    );
    assert_eq!(
        (status, &error["error"]["param"]),
        (400, &json!("function_call"))
    );
    let (status, error) = server.post(
        CHAT,
        &json!({"messages": messages(), "functions": functions, "function_call": {"name": "h"}}),
    );
    assert_eq!(status, 400, "{error}");
}
