//! OpenAI's Responses as their clients use them: tools and items of every kind, fields, events.

use super::{Folder, Server, choose_schema, ignored, named_events, shared, tiny, types};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::time::{Duration, Instant};

const PATH: &str = "/v1/responses";

/// The text of chat completions, in the words of Responses; streamed, too.
#[test]
fn answers() {
    let server = &*shared();
    let messages = json!([{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a trait?"}]);
    let chat = server.ask(
        "/v1/chat/completions",
        &json!({"messages": messages, "max_tokens": 12}),
    );
    let text = chat["choices"][0]["message"]["content"].as_str().unwrap();
    let body = json!({"model": "m", "instructions": "Be short.", "input": "What is a trait?", "max_output_tokens": 12});
    let response = server.ask("/v1/responses", &body);
    assert_eq!(response["output"][0]["content"][0]["text"], *text);
    assert_eq!(
        (response["status"].as_str(), response["object"].as_str()),
        (Some("incomplete"), Some("response"))
    );
    assert_eq!(response["usage"]["output_tokens"], 12);
    let parts = json!([{"type": "message", "role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "What is a "}, {"type": "input_text", "text": "trait?"}]}]);
    let events = named_events(
        server,
        "/v1/responses",
        json!({"input": parts, "max_output_tokens": 12}),
    );
    let streamed: String = events
        .iter()
        .filter_map(|event| event["delta"].as_str())
        .collect();
    assert_eq!(streamed, text);
    let kinds = types(&events);
    assert_eq!(
        kinds[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );
    assert_eq!(
        kinds[kinds.len() - 4..],
        [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete"
        ]
    );
    assert!(
        events
            .iter()
            .enumerate()
            .all(|(i, event)| event["sequence_number"] == i),
        "{events:?}"
    );
    assert_eq!(
        events.last().unwrap()["response"]["output"][0]["content"][0]["text"],
        *text
    );

    let tools = json!([{"type": "function", "name": "choose", "parameters": choose_schema()}]);
    let body = json!({"input": "Choose.", "tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "temperature": 1});
    let response = server.ask("/v1/responses", &body);
    let call = &response["output"].as_array().unwrap().last().unwrap();
    assert_eq!(
        (call["type"].as_str(), response["status"].as_str()),
        (Some("function_call"), Some("completed"))
    );
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(
        jsonschema::is_valid(&choose_schema(), &arguments),
        "{arguments}"
    );
    let events = named_events(server, "/v1/responses", body);
    let done = events
        .iter()
        .find(|event| event["type"] == "response.function_call_arguments.done")
        .unwrap();
    assert!(
        serde_json::from_str::<Value>(done["arguments"].as_str().unwrap()).unwrap()["n"].is_u64()
    );
    let input = json!([{"role": "user", "content": "Choose."}, call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}]);
    server.ask(
        "/v1/responses",
        &json!({"input": input, "tools": tools, "max_output_tokens": 4}),
    );

    let format = json!({"format": {"type": "json_schema", "name": "n", "schema": choose_schema(), "strict": true}});
    let response = server.ask(
        "/v1/responses",
        &json!({"input": "Choose.", "text": format, "temperature": 1}),
    );
    let value = serde_json::from_str(
        response["output"][0]["content"][0]["text"]
            .as_str()
            .unwrap(),
    )
    .unwrap();
    assert!(jsonschema::is_valid(&choose_schema(), &value), "{value}");
    for (body, message) in [
        (
            json!({"input": "a", "previous_response_id": "resp_1"}),
            "nothing is stored",
        ),
        (json!({"input": [{"type": "computer_call"}]}), "input[0]"),
        (
            json!({"input": "a", "tool_choice": {"type": "web_search_preview"}}),
            "tool_choice",
        ),
        (json!({"input": 1}), "input"),
    ] {
        let (status, response) = server.post("/v1/responses", &body);
        assert!(
            status == 400
                && response["error"]["message"]
                    .as_str()
                    .unwrap()
                    .contains(message),
            "{response}"
        );
    }
}

/// The items of an answer, whole and streamed, which have to be of one form.
fn items(server: &Server, body: &Value) -> [Vec<Value>; 2] {
    let whole = server.ask(PATH, body);
    let events = named_events(server, PATH, body.clone());
    let last = &events.last().unwrap()["response"];
    let done: Vec<_> = events
        .iter()
        .filter(|event| event["type"] == "response.output_item.done")
        .map(|event| event["item"].clone())
        .collect();
    assert_eq!(last["output"], json!(done));
    let numbers = events.iter().map(|event| event["sequence_number"].as_u64());
    assert!(numbers.eq((0..).map(Some).take(events.len())), "{events:?}");
    [whole["output"].as_array().unwrap().clone(), done]
}

/// A forced call of a tool that takes a text, whole and streamed.
fn texts(format: Value) -> [String; 2] {
    let tool =
        json!({"type": "custom", "name": "write", "description": "Writes.", "format": format});
    let body = json!({"input": "Write.", "tools": [tool], "tool_choice": {"type": "custom", "name": "write"},
        "parallel_tool_calls": false, "temperature": 1, "max_output_tokens": 300});
    items(&shared(), &body).map(|items| {
        let call = items.last().unwrap();
        assert_eq!(
            (
                call["type"].as_str(),
                call["name"].as_str(),
                call["status"].as_str()
            ),
            (Some("custom_tool_call"), Some("write"), Some("completed")),
            "{items:?}"
        );
        assert!(call["call_id"].is_string() && call["arguments"].is_null());
        call["input"].as_str().unwrap().to_owned()
    })
}

/// Texts obey the grammars of their tools.
#[test]
fn tools_that_take_a_text() {
    let grammar = |syntax: &str, definition: &str| json!({"type": "grammar", "syntax": syntax, "definition": definition});
    let is_word = |text: &str| {
        (1..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_lowercase())
    };
    let patch = "start: \"*** Begin \\\"Patch\\\"\" LF hunk~1..2 \"*** End\" LF?\n\
                 hunk: \"+\" /[a-z]{1,4}/ LF // added\n    | \"-\" WORD LF -> removed\n\
                 WORD: /[a-z]/~1..4\n%import common.LF";
    for text in texts(grammar("lark", patch)) {
        let lines: Vec<_> = text.trim_end().split('\n').collect();
        let [first, hunks @ .., last] = &lines[..] else {
            panic!("{text:?}")
        };
        assert_eq!(
            (*first, *last),
            ("*** Begin \"Patch\"", "*** End"),
            "{text:?}"
        );
        assert!((1..=2).contains(&hunks.len()), "{text:?}");
        assert!(
            hunks
                .iter()
                .all(|hunk| hunk.starts_with(['+', '-']) && is_word(&hunk[1..])),
            "{text:?}"
        );
    }
    for text in texts(grammar("regex", r"^\d{4}-(?:0[1-9]|1[0-2])$")) {
        let (year, month) = text.split_once('-').unwrap();
        assert!(year.len() == 4 && year.parse::<u32>().is_ok(), "{text:?}");
        assert!(
            month.len() == 2 && (1..=12).contains(&month.parse::<u32>().unwrap()),
            "{text:?}"
        );
    }
    // A rule that contains itself.
    for text in texts(grammar("lark", "start: \"(\" start \")\" | /[a-z]{1,4}/")) {
        let inner = text.trim_matches(['(', ')']);
        let depth = text.find(inner).unwrap();
        assert!(is_word(inner), "{text:?}");
        assert_eq!(
            text,
            format!("{}{inner}{}", "(".repeat(depth), ")".repeat(depth))
        );
    }
    for (format, message) in [
        (grammar("lark", "start: ("), "tools[0].format"),
        (grammar("lark", "start: a"), "no rule \"a\""),
        (grammar("gbnf", "root ::= \"a\""), "neither lark nor regex"),
        (grammar("regex", "(?=a)"), "ahead"),
        (json!({"type": "image"}), "neither text nor grammar"),
    ] {
        let tool = json!({"type": "custom", "name": "write", "format": format});
        let (status, response) = shared().post(PATH, &json!({"input": "a", "tools": [tool]}));
        let told = response["error"]["message"].as_str().unwrap();
        assert!(status == 400 && told.contains(message), "{response}");
    }
}

/// The text of a call comes as it is written; of one that is cut there is what was told.
#[test]
fn a_text_comes_in_parts() {
    let format = json!({"type": "grammar", "syntax": "regex", "definition": "(a\\\\\"b\n){8}"});
    let tool = json!({"type": "custom", "name": "write", "format": format});
    let mut body = json!({"input": "Write.", "tools": [tool], "tool_choice": {"type": "custom", "name": "write"},
        "parallel_tool_calls": false, "temperature": 0, "max_output_tokens": 200});
    let told = |body: &Value| {
        let events = named_events(&shared(), PATH, body.clone());
        let of = |kind: &str| {
            let kind = format!("response.custom_tool_call_input.{kind}");
            events
                .iter()
                .filter(move |event| event["type"] == kind[..])
                .collect::<Vec<_>>()
        };
        let deltas: Vec<String> = (of("delta").iter())
            .map(|event| event["delta"].as_str().unwrap().to_owned())
            .collect();
        let done = of("done")[0]["input"].as_str().unwrap().to_owned();
        assert_eq!(deltas.concat(), done);
        let usage = &events.last().unwrap()["response"]["usage"];
        (done, deltas.len(), usage["output_tokens"].as_u64().unwrap())
    };
    let (whole, n, n_tokens) = told(&body);
    assert_eq!(whole, "a\\\"b\n".repeat(8));
    assert!(n > 1, "{n} parts");
    // How many tokens close the call depends on the level, so the limit goes down until text is missing.
    let cut = (1..n_tokens).rev().find_map(|limit| {
        body["max_output_tokens"] = limit.into();
        let (cut, ..) = told(&body);
        assert!(whole.starts_with(&cut), "{limit} tokens: {cut:?}");
        (cut.len() < whole.len()).then_some(cut)
    });
    assert!(cut.is_some_and(|cut| !cut.is_empty()), "never cut");
}

/// A tool of a namespace is called by its own name, and its results find it.
#[test]
fn tools_of_a_namespace() {
    let server = &*shared();
    let function = json!({"type": "function", "name": "f", "parameters": choose_schema()});
    let namespace =
        json!({"type": "namespace", "name": "agents", "description": "d", "tools": [function]});
    let body = json!({"input": "Choose.", "tools": [function, namespace], "parallel_tool_calls": false, "temperature": 1,
        "tool_choice": {"type": "function", "name": "f", "namespace": "agents"}});
    for items in items(server, &body) {
        let call = items.last().unwrap();
        assert_eq!(
            (&call["type"], &call["name"], &call["namespace"]),
            (&json!("function_call"), &json!("f"), &json!("agents"))
        );
        let arguments = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(
            jsonschema::is_valid(&choose_schema(), &arguments),
            "{arguments}"
        );
        let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "done"}]});
        let more = json!({"input": [{"role": "user", "content": "Choose."}, call, output], "tools": [namespace]});
        assert_eq!(
            tokens(server, &more),
            chat_tokens(
                server,
                "agents__f",
                call["arguments"].as_str().unwrap(),
                &call["call_id"]
            )
        );
    }
    let mut other = body;
    other["tool_choice"] = json!({"type": "function", "name": "f"});
    let call = server.ask(PATH, &other)["output"]
        .as_array()
        .unwrap()
        .last()
        .unwrap()
        .clone();
    assert_eq!(
        (&call["name"], &call["namespace"]),
        (&json!("f"), &Value::Null)
    );
}

/// The tokens of a prompt.
fn tokens(server: &Server, body: &Value) -> Value {
    server.ask("/v1/responses/input_tokens", body)["input_tokens"].take()
}

/// Those of a conversation with a call and its result, as chat completions have it.
fn chat_tokens(server: &Server, name: &str, arguments: &str, id: &Value) -> Value {
    let call =
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let messages = json!([{"role": "user", "content": "Choose."}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": "done"}]);
    let tools =
        json!([{"type": "function", "function": {"name": name, "parameters": choose_schema()}}]);
    let body = json!({"messages": messages, "tools": tools});
    server.ask("/v1/chat/completions/input_tokens", &body)["input_tokens"].take()
}

/// Calls of every kind are in the prompt, and what only OpenAI's servers can read is said to be left
/// out.
#[test]
fn items_of_every_kind() {
    let folder = Folder::new("items");
    let model = folder.model("model.gguf", tiny::reranker());
    let server = &Server::start(&["-m", &model, "--temp", "0"]);
    let user = json!({"role": "user", "content": "Go."});
    let chat = |name: &str, arguments: Value| {
        let call = json!({"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}});
        let messages = json!([user, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "done"}]);
        let body = json!({"messages": messages});
        server.ask("/v1/chat/completions/input_tokens", &body)["input_tokens"].take()
    };
    let action = json!({"type": "exec", "command": ["ls"], "env": {}});
    let operation = json!({"type": "delete_file", "path": "a"});
    for (call, output, expected) in [
        (
            json!({"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{\"a\": 1}"}),
            "function_call_output",
            chat("n__f", json!({"a": 1})),
        ),
        (
            json!({"type": "custom_tool_call", "call_id": "c", "name": "write", "input": "a\n\"b\""}),
            "custom_tool_call_output",
            chat("write", json!({"input": "a\n\"b\""})),
        ),
        (
            json!({"type": "local_shell_call", "id": "c", "call_id": "c", "status": "completed", "action": action}),
            "local_shell_call_output",
            chat("local_shell", action),
        ),
        (
            json!({"type": "apply_patch_call", "call_id": "c", "status": "completed", "operation": operation}),
            "apply_patch_call_output",
            chat("apply_patch", operation),
        ),
    ] {
        let output = json!({"type": output, "call_id": "c", "id": "o", "output": "done"});
        let input = json!([user, call, output]);
        assert_eq!(tokens(server, &json!({"input": input})), expected, "{call}");
    }
    // Left out, and said.
    let skipped = json!([user, {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "tool_search_call", "arguments": {}}, {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "item_reference", "id": "rs_1"}, {"type": "item_reference", "id": "m1"},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAA"},
        {"type": "message", "id": "m1", "role": "user", "content": "On."}]);
    let body = json!({"input": skipped, "max_output_tokens": 1});
    let (names, _) = ignored(server, PATH, &body);
    assert_eq!(names, "input[1], input[2], input[3], input[4]");
    let plain = json!({"input": [user, {"role": "user", "content": "On."}]});
    assert_eq!(tokens(server, &body), tokens(server, &plain));
    // Tools that a search found, or that come later, are there.
    let tool = json!({"type": "function", "name": "f", "parameters": choose_schema()});
    for kind in ["tool_search_output", "additional_tools"] {
        let late = json!({"input": [user, {"type": kind, "role": "developer", "tools": [tool]}]});
        let early = json!({"input": [user], "tools": [tool]});
        assert_eq!(tokens(server, &late), tokens(server, &early), "{kind}");
    }
    // The model reads a grammar as it is, not the pattern that is made of it.
    let definition = "start: a a\na: /[a-z]+/~3";
    let format = json!({"type": "grammar", "syntax": "lark", "definition": definition});
    let custom = json!({"type": "custom", "name": "write", "format": format});
    let description = format!("A text of this grammar (lark):\n{definition}");
    let parameters = json!({"type": "object", "properties": {"input": {"type": "string", "description": description}},
        "required": ["input"], "additionalProperties": false});
    let function =
        json!({"type": "function", "name": "write", "strict": true, "parameters": parameters});
    let n = |tool: Value| tokens(server, &json!({"input": [user], "tools": [tool]}));
    assert_eq!(n(custom), n(function));
    for (input, message) in [
        (
            json!([user, {"type": "item_reference", "id": "msg_1"}]),
            "`store: false`",
        ),
        (json!([user, {"id": "fc_1"}]), "input[1]: the item \"fc_1\""),
        (
            json!([user, {"type": "compaction_trigger"}]),
            "compaction_trigger",
        ),
        (
            json!([{"type": "custom_tool_call", "call_id": "c", "name": "f"}]),
            "input[0]",
        ),
        (
            json!([{"type": "function_call_output", "output": "a"}]),
            "call_id",
        ),
        (
            json!([{"type": "local_shell_call", "call_id": "c"}]),
            "no action",
        ),
    ] {
        let (status, response) = server.post(PATH, &json!({"input": input}));
        let told = response["error"]["message"].as_str().unwrap();
        assert!(status == 400 && told.contains(message), "{response}");
    }
}

/// Fields and tools that describe, hint or bill are taken and named, also with `--strict`.
#[test]
fn what_has_no_effect() {
    let folder = Folder::new("no-effect");
    let model = folder.model("model.gguf", tiny::reranker());
    let tools = json!([{"type": "function", "name": "f", "parameters": choose_schema()},
        {"type": "web_search", "external_web_access": false}, {"type": "image_generation"}, {"type": "local_shell"},
        {"type": "tool_search", "execution": "client", "parameters": {}}, {"type": "mcp", "server_label": "m"}]);
    let body = json!({"input": "hi", "max_output_tokens": 2, "tools": tools, "tool_choice": "auto", "store": false,
        "client_metadata": {"session_id": "x"}, "context_management": [{"type": "compaction"}], "moderation": {"model": "m"},
        "prompt_cache_options": {"mode": "implicit"}, "prompt_cache_key": "k", "reasoning": {"effort": "low", "summary": "auto", "context": "all_turns"},
        "text": {"verbosity": "low"}, "include": ["reasoning.encrypted_content"], "truncation": "auto", "parallel_tool_calls": null,
        "metadata": {"a": "b"}});
    for flags in [&["-m", &model][..], &["-m", &model, "--strict"]] {
        let server = Server::start(flags);
        let (names, response) = ignored(&server, PATH, &body);
        for name in [
            "client_metadata",
            "context_management",
            "moderation",
            "prompt_cache_options",
            "reasoning.context",
            "text.verbosity",
            "include[0]",
            "tools[1]",
            "tools[2]",
            "tools[3]",
            "tools[4]",
            "tools[5]",
        ] {
            assert!(
                names.split(", ").any(|told| told == name),
                "{name} is not in {names}"
            );
        }
        let has_effect = |name: &str| ["tools[0]", "metadata", "store"].contains(&name);
        assert!(!names.split(", ").any(has_effect), "{names}");
        assert_eq!(response["parallel_tool_calls"], true);
        assert_eq!(response["metadata"], json!({"a": "b"}));
    }
    let strict = Server::start(&["-m", &model, "--strict"]);
    let body = json!({"input": "hi", "tools": [{"type": "telepathy"}]});
    let (status, response) = strict.post(PATH, &body);
    assert!(
        status == 400 && response["error"]["param"] == "tools[0]",
        "{response}"
    );
}

/// Log-probabilities of the text, in the whole answer and with every piece of a streamed one.
#[test]
fn logprobs() {
    let server = &*shared();
    let messages = json!([{"role": "user", "content": "What is a trait?"}]);
    let chat = server.ask(
        "/v1/chat/completions",
        &json!({"messages": messages, "max_tokens": 8, "logprobs": true, "top_logprobs": 2}),
    );
    let expected = &chat["choices"][0]["logprobs"]["content"];
    assert_eq!(expected.as_array().map(Vec::len), Some(8));
    let body = json!({"input": "What is a trait?", "max_output_tokens": 8, "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    for output in items(server, &body) {
        assert_eq!(&output[0]["content"][0]["logprobs"], expected);
    }
    let events = named_events(server, PATH, body);
    let deltas = events
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta");
    let told: Vec<_> = deltas
        .flat_map(|event| event["logprobs"].as_array().unwrap())
        .cloned()
        .collect();
    assert_eq!(json!(told), *expected);
    let without = server.ask(
        PATH,
        &json!({"input": "What is a trait?", "max_output_tokens": 8}),
    );
    assert_eq!(without["output"][0]["content"][0]["logprobs"], json!([]));
}

/// As many calls as may be made, and none if none may.
#[test]
fn numbers_of_calls() {
    let server = &*shared();
    let tools = json!([{"type": "function", "name": "choose", "parameters": choose_schema()}]);
    let mut body = json!({"input": "Choose.", "tools": tools, "tool_choice": "required", "max_tool_calls": 1, "temperature": 1});
    let response = server.ask(PATH, &body);
    let kinds: Vec<_> = response["output"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| &item["type"])
        .collect();
    assert_eq!(
        (kinds, &response["status"]),
        (vec![&json!("function_call")], &json!("completed"))
    );
    body["max_tool_calls"] = 0.into();
    let (status, response) = server.post(PATH, &body);
    assert!(
        status == 400 && response["error"]["param"] == "max_tool_calls",
        "{response}"
    );
    body["tool_choice"] = "auto".into();
    body["max_output_tokens"] = 8.into();
    let response = server.ask(PATH, &body);
    assert_eq!(response["usage"]["output_tokens"], 8);
    assert_eq!(response["output"][0]["type"], "message");
    assert_eq!(response["output"][0]["status"], "incomplete");
    assert_eq!(
        response["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
}

/// Tokens of reasoning are counted, in both APIs of blocks.
#[test]
fn tokens_of_reasoning() {
    let folder = Folder::new("reasoning");
    let template = folder.file(
        "template.jinja",
        "{# <tool_call> #}{% for m in messages %}{{ m.content }}\n{% endfor %}",
    );
    let server = &Server::start(&[
        "--chat-template-file",
        &template,
        "-c",
        "512",
        "--temp",
        "0",
    ]);
    let grammar = "root ::= \"<think>Rain or sun, who knows?</think>Sun.\"";
    let response = server.ask(PATH, &json!({"input": "Rain?", "grammar": grammar}));
    let usage = &response["usage"];
    let n = usage["output_tokens_details"]["reasoning_tokens"]
        .as_u64()
        .unwrap();
    let n_text = server.ask("/tokenize", &json!({"content": "Rain or sun, who knows?"}))["tokens"]
        .as_array()
        .unwrap()
        .len();
    assert!(
        n >= n_text as u64 / 2 && n < usage["output_tokens"].as_u64().unwrap(),
        "{usage}"
    );
    assert_eq!(
        response["output"][0]["content"][0]["text"],
        "Rain or sun, who knows?"
    );
    let message = json!({"messages": [{"role": "user", "content": "Rain?"}], "max_tokens": 200, "grammar": grammar});
    let message = server.ask("/v1/messages", &message);
    assert_eq!(
        message["usage"]["output_tokens_details"]["thinking_tokens"],
        n
    );
    let plain = server.ask(PATH, &json!({"input": "Rain?", "max_output_tokens": 4}));
    assert_eq!(
        plain["usage"]["output_tokens_details"]["reasoning_tokens"],
        0
    );
}

/// A stream says that it goes on while its answer waits: `response.in_progress`, and `ping` in
/// Anthropic's API.
#[test]
fn streams_that_wait() {
    let folder = Folder::new("waits");
    let model = folder.model("model.gguf", tiny::reranker());
    let server = &Server::start(&["-m", &model, "-c", "400000", "-np", "1", "--temp", "0"]);
    // Nothing else is computed beside this one.
    let long = json!({"prompt": "a", "ignore_eos": true, "n": 16}).to_string();
    let open = |path: &str, body: &str| {
        let mut stream = server.connect();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        BufReader::new(stream)
    };
    let first = open("/v1/completions", &long);
    while server.metric("llamacpp:requests_processing") == 0.0 {}
    let messages =
        json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stream": true});
    let waiting = [
        (
            PATH,
            json!({"input": "a", "stream": true}),
            "response.in_progress",
            2,
        ),
        ("/v1/messages", messages, "ping", 1),
    ];
    let begun = Instant::now();
    let waiting = waiting.map(|(path, body, name, n)| (open(path, &body.to_string()), name, n));
    for (stream, name, n) in waiting {
        let mut lines = stream.lines().map_while(Result::ok);
        let found = lines
            .by_ref()
            .filter(|line| *line == format!("event: {name}"))
            .take(n)
            .count();
        assert_eq!(found, n, "{name}");
        assert!(
            begun.elapsed() > Duration::from_secs(9),
            "{name}: {:?}",
            begun.elapsed()
        );
    }
    assert!(
        begun.elapsed() < Duration::from_secs(60),
        "{:?}",
        begun.elapsed()
    );
    drop(first);
}
