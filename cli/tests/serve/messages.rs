//! Anthropic's API as its clients use it: content and tools of every kind, fields, errors, models.

use super::{Folder, Server, choose_schema, ignored, named_events, shared, tiny, types};
use serde_json::{Value, json};

const PATH: &str = "/v1/messages";

/// The text of chat completions, in the words of Anthropic's API; streamed, too.
#[test]
fn answers() {
    let server = &*shared();
    let messages = json!([{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a trait?"}]);
    let chat = server.ask(
        "/v1/chat/completions",
        &json!({"messages": messages, "max_tokens": 12}),
    );
    let text = chat["choices"][0]["message"]["content"].as_str().unwrap();
    let body = json!({"model": "m", "system": [{"type": "text", "text": "Be short."}], "max_tokens": 12,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is a trait?"}]}]});
    let message = server.ask("/v1/messages", &body);
    assert_eq!(message["content"], json!([{"type": "text", "text": text}]));
    assert_eq!(
        (message["stop_reason"].as_str(), message["role"].as_str()),
        (Some("max_tokens"), Some("assistant"))
    );
    let n_prompt = message["usage"]["input_tokens"].as_u64().unwrap()
        + message["usage"]["cache_read_input_tokens"]
            .as_u64()
            .unwrap();
    let mut count = body.clone();
    count.as_object_mut().unwrap().shift_remove("max_tokens");
    assert_eq!(
        server.ask("/v1/messages/count_tokens", &count)["input_tokens"],
        n_prompt
    );
    let events = named_events(server, "/v1/messages", body);
    let streamed: String = events
        .iter()
        .filter_map(|event| event["delta"]["text"].as_str())
        .collect();
    assert_eq!(streamed, text);
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], n_prompt);
    let kinds = types(&events);
    assert_eq!(
        kinds[..3],
        [
            "message_start",
            "content_block_start",
            "content_block_delta"
        ]
    );
    assert_eq!(
        kinds[kinds.len() - 3..],
        ["content_block_stop", "message_delta", "message_stop"]
    );

    let tools =
        json!([{"name": "choose", "description": "A number.", "input_schema": choose_schema()}]);
    let choice = json!({"type": "tool", "name": "choose", "disable_parallel_tool_use": true});
    let user = json!({"role": "user", "content": "Choose."});
    let body = json!({"messages": [user], "max_tokens": 200, "tools": tools, "tool_choice": choice, "temperature": 1});
    let message = server.ask("/v1/messages", &body);
    let call = message["content"].as_array().unwrap().last().unwrap();
    assert_eq!(
        (call["type"].as_str(), message["stop_reason"].as_str()),
        (Some("tool_use"), Some("tool_use"))
    );
    assert!(
        jsonschema::is_valid(&choose_schema(), &call["input"]),
        "{call}"
    );
    let events = named_events(server, "/v1/messages", body);
    let arguments: String = events
        .iter()
        .filter_map(|event| event["delta"]["partial_json"].as_str())
        .collect();
    assert!(
        jsonschema::is_valid(&choose_schema(), &serde_json::from_str(&arguments).unwrap()),
        "{arguments}"
    );
    let result = json!({"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "done"}]});
    let more = json!([user, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]);
    server.ask(
        "/v1/messages",
        &json!({"messages": more, "max_tokens": 4, "tools": tools}),
    );

    let user = json!([{"role": "user", "content": "What is a trait?"}]);
    let free = server.ask("/v1/messages", &json!({"messages": user, "max_tokens": 12}));
    let word = free["content"][0]["text"]
        .as_str()
        .unwrap()
        .split_whitespace()
        .nth(1)
        .unwrap();
    let stopped = server.ask(
        "/v1/messages",
        &json!({"messages": user, "max_tokens": 12, "stop_sequences": [word]}),
    );
    assert_eq!(
        (
            stopped["stop_reason"].as_str(),
            stopped["stop_sequence"].as_str()
        ),
        (Some("stop_sequence"), Some(word))
    );
    for (body, message) in [
        (json!({"messages": user}), "max_tokens"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}),
            "messages[0]",
        ),
        (json!({"messages": user, "max_tokens": 0}), "max_tokens"),
        (
            json!({"messages": user, "max_tokens": 1, "thinking": {"type": "some"}}),
            "thinking",
        ),
        (json!({"messages": user, "max_tokens": 1, "n": 2}), "n: "),
        (json!("messages"), "not a JSON object"),
    ] {
        let (status, response) = server.post("/v1/messages", &body);
        assert!(status == 400 && response["type"] == "error", "{response}");
        assert!(
            response["error"]["message"]
                .as_str()
                .unwrap()
                .contains(message),
            "{response}"
        );
    }
}

/// The tokens of a prompt.
fn tokens(server: &Server, body: Value) -> Value {
    server.ask("/v1/messages/count_tokens", &body)["input_tokens"].take()
}

/// What is said of an error: status, headers, and the object.
fn refused(server: &Server, method: &str, path: &str, headers: &str, body: &str) -> (u16, Value) {
    let (status, head, body) = server.exchange(method, path, headers, body);
    let error: Value = serde_json::from_str(&body).unwrap_or_else(|_| panic!("{body}"));
    let header = |name: &str| {
        let line = head
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name}: ")));
        line.unwrap_or_else(|| panic!("no {name} in {head}"))
            .to_owned()
    };
    assert_eq!(error["type"], "error", "{error}");
    assert!(error["error"]["message"].is_string(), "{error}");
    assert_eq!(error["request_id"], header("request-id"));
    assert_eq!(header("request-id"), header("x-request-id"));
    (status, error["error"].clone())
}

/// Whatever refuses a request says so in the API's form.
#[test]
fn errors() {
    let folder = Folder::new("messages-errors");
    let model = folder.model("model.gguf", tiny::reranker());
    let server = &Server::start(&["-m", &model, "--api-key", "secret", "--body-budget", "1M"]);
    let key = "x-api-key: secret\r\n";
    let user = json!([{"role": "user", "content": "a"}]);
    let large =
        json!({"messages": [{"role": "user", "content": "a".repeat(3 << 20)}], "max_tokens": 1})
            .to_string();
    let long =
        json!({"messages": [{"role": "user", "content": "a".repeat(5000)}], "max_tokens": 1})
            .to_string();
    for (method, path, headers, body, status, kind) in [
        ("POST", PATH, "", "{}", 401, "authentication_error"),
        ("POST", PATH, key, "{}", 400, "invalid_request_error"),
        ("POST", PATH, key, "[", 400, "invalid_request_error"),
        ("GET", PATH, key, "", 405, "invalid_request_error"),
        (
            "POST",
            "/v1/messages/batches",
            key,
            "{}",
            404,
            "not_found_error",
        ),
        ("POST", PATH, key, &large, 413, "request_too_large"),
        ("POST", PATH, key, &long, 400, "invalid_request_error"),
        (
            "GET",
            "/v1/models/other",
            &format!("{key}anthropic-version: 2023-06-01\r\n"),
            "",
            404,
            "not_found_error",
        ),
    ] {
        let (found, error) = refused(server, method, path, headers, body);
        assert_eq!(
            (found, &error["type"]),
            (status, &json!(kind)),
            "{method} {path}: {error}"
        );
        if body == long {
            let message = error["message"].as_str().unwrap();
            let words = message
                .strip_prefix("prompt is too long: ")
                .and_then(|rest| rest.strip_suffix(" tokens > 1024 maximum"));
            assert!(
                words.is_some_and(|n| n.parse::<usize>().unwrap() > 5000),
                "{message}"
            );
        }
    }
    // Good answers have the name, too; others' errors keep their form.
    let body = json!({"messages": user, "max_tokens": 1}).to_string();
    let (status, head, _) = server.exchange("POST", PATH, key, &body);
    assert!(
        status == 200 && head.contains("\r\nrequest-id: req_"),
        "{head}"
    );
    let bearer = "authorization: Bearer secret\r\n";
    for path in ["/v1/chat/completions", "/v1/responses"] {
        let body = json!({"messages": [{"role": "user", "content": "a".repeat(5000)}], "input": "a".repeat(5000)});
        let mut body = body;
        body.as_object_mut()
            .unwrap()
            .shift_remove(if path == "/v1/responses" {
                "messages"
            } else {
                "input"
            });
        let (status, _, response) = server.exchange("POST", path, bearer, &body.to_string());
        let error = &serde_json::from_str::<Value>(&response).unwrap()["error"];
        assert_eq!(
            (status, &error["code"]),
            (400, &json!("context_length_exceeded")),
            "{error}"
        );
        assert!(
            error["message"]
                .as_str()
                .unwrap()
                .contains("maximum context length is 1024"),
            "{error}"
        );
    }
}

/// A server that is full says when to come again.
#[test]
fn a_full_server() {
    let folder = Folder::new("messages-full");
    let model = folder.model("model.gguf", tiny::reranker());
    let server = &Server::start(&[
        "-m",
        &model,
        "-c",
        "100000",
        "-np",
        "1",
        "--max-requests",
        "1",
    ]);
    let long = json!({"prompt": "a", "ignore_eos": true, "max_tokens": 90_000}).to_string();
    let mut stream = server.connect();
    std::io::Write::write_all(
        &mut stream,
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{long}",
            long.len()
        )
        .as_bytes(),
    )
    .unwrap();
    while server.metric("llamacpp:requests_processing") == 0.0 {}
    let body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).to_string();
    let (status, error) = refused(server, "POST", PATH, "", &body);
    assert_eq!((status, &error["type"]), (429, &json!("rate_limit_error")));
}

/// The models in the form of the caller's API, with the size of the context.
#[test]
fn models() {
    let server = &*shared();
    let get = |path: &str, headers: &str| {
        let (status, body) = server.send("GET", path, headers, "");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str::<Value>(&body).unwrap()
    };
    let version = "anthropic-version: 2023-06-01\r\n";
    let list = get("/v1/models", version);
    let model = &list["data"][0];
    let id = model["id"].as_str().unwrap();
    assert_eq!(
        (
            &list["has_more"],
            list["first_id"].as_str(),
            list["last_id"].as_str()
        ),
        (&json!(false), Some(id), Some(id))
    );
    assert_eq!(
        (
            &model["type"],
            &model["display_name"],
            &model["max_input_tokens"]
        ),
        (&json!("model"), &json!(id), &json!(512))
    );
    assert_eq!(get("/v1/models?limit=20&beta=true", version), list);
    let after = get(&format!("/v1/models?after_id={id}"), version);
    assert_eq!(
        (&after["data"], &after["has_more"]),
        (&json!([]), &json!(false))
    );
    let (status, _) = server.send("GET", "/v1/models?after_id=other", version, "");
    assert_eq!(status, 400);
    let created = model["created_at"].as_str().unwrap();
    assert!(
        created.len() == 20 && created.starts_with("20") && created.ends_with('Z'),
        "{created}"
    );
    assert_eq!(get(&format!("/v1/models/{id}"), version), *model);
    let list = get("/v1/models", "");
    let model = &list["data"][0];
    assert_eq!(
        (
            &list["object"],
            &model["object"],
            &model["max_model_len"],
            &model["meta"]["n_ctx"]
        ),
        (&json!("list"), &json!("model"), &json!(512), &json!(512))
    );
    assert_eq!(get(&format!("/v1/models/{id}"), ""), *model);
}

/// Content of every kind is in the prompt, as the text that says it.
#[test]
fn content_of_every_kind() {
    let folder = Folder::new("messages-content");
    let model = folder.model("model.gguf", tiny::reranker());
    let server = &Server::start(&["-m", &model, "--temp", "0"]);
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let same = |content: Value, text: &str| {
        assert_eq!(
            tokens(server, user(json!([content]))),
            tokens(server, user(json!(text))),
            "{content}"
        );
    };
    let source = json!({"type": "text", "media_type": "text/plain", "data": "Rain."});
    same(json!({"type": "document", "source": source}), "Rain.\n");
    same(
        json!({"type": "document", "title": "Sky", "context": "Today", "source": {"type": "content", "content": [{"type": "text", "text": "Rain."}]}}),
        "Sky\nToday\n\nRain.\n",
    );
    same(
        json!({"type": "search_result", "title": "Sky", "source": "a.org", "content": [{"type": "text", "text": "Rain."}]}),
        "Sky\na.org\n\nRain.\n",
    );
    same(
        json!({"type": "compaction", "content": "It rained."}),
        "It rained.",
    );
    // Results of calls.
    let call = json!({"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]});
    let result = |content: Value, is_error: bool| {
        let result = json!({"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": is_error});
        tokens(
            server,
            json!({"messages": [{"role": "user", "content": "Go."}, call, {"role": "user", "content": [result]}]}),
        )
    };
    assert_eq!(
        result(json!("No rain."), true),
        result(json!("Error: No rain."), false)
    );
    assert_ne!(
        result(json!("No rain."), true),
        result(json!("No rain."), false)
    );
    let reference = json!([{"type": "tool_reference", "tool_name": "f"}]);
    assert_eq!(
        result(reference, false),
        result(json!("The tool f is there.\n"), false)
    );
    assert_eq!(
        result(json!([{"type": "document", "source": source}]), false),
        result(json!("Rain.\n"), false)
    );
    // The line for the bill is no part of the prompt; another text like it is.
    let system = |blocks: Value| {
        tokens(
            server,
            json!({"system": blocks, "messages": [{"role": "user", "content": "Go."}]}),
        )
    };
    let block = |text: &str| json!({"type": "text", "text": text});
    let bill = block("x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;");
    assert_eq!(
        system(json!([bill, block("Be short.")])),
        system(json!("Be short."))
    );
    assert_eq!(system(json!([bill])), tokens(server, user(json!("Go."))));
    assert_ne!(
        system(json!([block("Be short."), bill])),
        system(json!("Be short."))
    );
    // So another conversation finds its prompt in the cache.
    let cached = |bill: &str| {
        let bill = block(&format!("x-anthropic-billing-header: cch={bill};"));
        let body = json!({"system": [bill, block(&"Be short. ".repeat(20))], "max_tokens": 1,
            "messages": [{"role": "user", "content": "Go."}]});
        server.ask(PATH, &body)["usage"]["cache_read_input_tokens"]
            .as_u64()
            .unwrap()
    };
    let (first, second) = (cached("1"), cached("2"));
    assert!(first < 10 && second > 200, "{first}, {second}");
    // What Anthropic's servers did is left out, and said.
    let body = json!({"max_tokens": 1, "messages": [{"role": "user", "content": "Go."},
        {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, {"type": "text", "text": "Rain."}]},
        {"role": "user", "content": "So?"}]});
    let (names, _) = ignored(server, PATH, &body);
    assert_eq!(names, "messages[1].content[0], messages[1].content[1]");
    for content in [
        json!({"type": "image", "source": {"type": "url", "url": "a"}}),
        json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}),
        json!({"type": "tool_reference"}),
    ] {
        let mut body = user(json!([content]));
        body["max_tokens"] = 1.into();
        let (status, response) = server.post(PATH, &body);
        let message = response["error"]["message"].as_str().unwrap();
        assert!(
            status == 400 && message.starts_with("messages[0]"),
            "{response}"
        );
    }
}

/// Fields and tools that describe, hint or bill are taken and named, also with `--strict`.
#[test]
fn what_has_no_effect() {
    let folder = Folder::new("messages-no-effect");
    let model = folder.model("model.gguf", tiny::reranker());
    let tools = json!([{"name": "f", "input_schema": choose_schema(), "defer_loading": true, "cache_control": {"type": "ephemeral"}},
        {"type": "web_search_20250305", "name": "web_search"}, {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "computer_20250124", "name": "computer"}, {"type": "custom", "name": "g", "input_schema": choose_schema()}]);
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "tools": tools, "metadata": {"user_id": "u"},
        "speed": "fast", "inference_geo": "eu", "mcp_servers": [{"name": "m"}], "context_management": {"edits": []}, "compaction": {"type": "auto"},
        "billing_policy": {"a": 1}, "user_profile_id": "u", "fallbacks": [{"model": "n"}], "diagnostics": {"a": 1},
        "thinking": {"type": "enabled", "budget_tokens": 1024}});
    for flags in [&["-m", &model][..], &["-m", &model, "--strict"]] {
        let server = Server::start(flags);
        let (names, _) = ignored(&server, PATH, &body);
        let mut names: Vec<_> = names.split(", ").collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "billing_policy",
                "compaction",
                "context_management",
                "diagnostics",
                "fallbacks",
                "inference_geo",
                "mcp_servers",
                "speed",
                "thinking.budget_tokens",
                "tools[1]",
                "tools[2]",
                "tools[3]",
                "user_profile_id"
            ]
        );
        // Tools that a search would load are there.
        let two = json!([tools[0], tools[4]]);
        assert_eq!(
            tokens(
                &server,
                json!({"messages": body["messages"], "tools": tools})
            ),
            tokens(&server, json!({"messages": body["messages"], "tools": two}))
        );
    }
    let strict = Server::start(&["-m", &model, "--strict"]);
    let mut body = body;
    body["tools"] = json!([{"type": "telepathy_20300101", "name": "t"}]);
    let (status, response) = strict.post(PATH, &body);
    let message = response["error"]["message"].as_str().unwrap();
    assert!(
        status == 400 && message.starts_with("tools[0]"),
        "{response}"
    );
}

/// An answer whose beginning is given goes on behind it.
#[test]
fn begun_by_the_caller() {
    let folder = Folder::new("begun");
    let template = "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}";
    let template = folder.file("template.jinja", template);
    let server = &Server::start(&[
        "--chat-template-file",
        &template,
        "-c",
        "512",
        "--temp",
        "0",
    ]);
    let user = json!({"role": "user", "content": "What is a trait?"});
    let prompt = server.ask("/apply-template", &json!({"messages": [user]}))["prompt"]
        .as_str()
        .unwrap()
        .to_owned();
    for begin in ["A trait is", "A trait is \n", "{\"a\": "] {
        let whole = server.ask(
            "/v1/completions",
            &json!({"prompt": format!("{prompt}{begin}"), "max_tokens": 12}),
        );
        let expected = whole["choices"][0]["text"].as_str().unwrap();
        let messages =
            json!([user, {"role": "assistant", "content": [{"type": "text", "text": begin}]}]);
        let body = json!({"messages": messages, "max_tokens": 12});
        let message = server.ask(PATH, &body);
        assert_eq!(message["content"][0]["text"], expected, "{begin:?}");
        let streamed: String = named_events(server, PATH, body)
            .iter()
            .filter_map(|event| event["delta"]["text"].as_str())
            .collect();
        assert_eq!(streamed, expected, "{begin:?}");
    }
    // A call is not gone on with.
    let call = json!({"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "c", "name": "f", "input": {}}]});
    server.ask(PATH, &json!({"messages": [user, call], "max_tokens": 1}));
}
