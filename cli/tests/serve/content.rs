//! Text that looks like a call is text where no call may be made: where the request has no tools,
//! or allows none.

use super::calls::CALLS;
use super::{Folder, Server, batch, named_events, tiny};
use ruvllm::chat::tools::ToolFormat;
use serde_json::{Value, json};

/// A template by which a form of calls is recognised.
pub(super) fn template(format: &str) -> String {
    let marks = match format {
        "harmony" => "<|channel|> <|message|>",
        "gemma4" => "<|tool_call>",
        "function-gemma" => "<start_function_call>",
        "deepseek" => "<｜tool▁call▁begin｜> <｜tool▁sep｜> ```json",
        "deepseek-v3.1" => "<｜tool▁call▁begin｜> <｜tool▁sep｜>",
        "kimi" => "<|tool_calls_section_begin|>",
        "minimax" => "<minimax:tool_call> <invoke name=",
        "command-r" => "<|START_ACTION|>",
        "lfm2" => "<|tool_list_start|>",
        "glm" => "<tool_call> <arg_key>",
        "qwen3-coder" => "<tool_call> <function=",
        "functionary-v3.1" => "<function= </function>",
        "functionary-v3.2" => ">>> all",
        "mistral-v11" => "[TOOL_CALLS] [ARGS]",
        "mistral" => "[TOOL_CALLS]",
        "phi4" => "<|tool_call|> <|/tool_call|>",
        "granite" => "<|tool_call|>",
        "hermes" => "<tool_call>",
        "seed-oss" => "<seed:tool_call>",
        "deepseek-v3.2" => "｜DSML｜ function_calls",
        "deepseek-v4" => "｜DSML｜",
        "kimi-k3" => "<|open|> <|close|> <|sep|>",
        "minimax-m3" => "]<]minimax[>[",
        "lfm2.5" => "<|tool_call_start|>",
        "muse-glimmer" => "<atem:function_calls>",
        "solar-open" => "<|tool_call:begin|>",
        "hy3" => "<tool_sep{}> <arg_key{}>",
        "minicpm5" => "<function name= <param name=",
        "apertus" => "<|tools_prefix|> <|tools_suffix|>",
        "apriel" => "<tool_calls>[",
        "minimax-m1" => "<tool_calls> <beginning_of_sentence>",
        "nemotron-v2" => "<TOOLCALL>",
        "gigachat3.1" => "<|role_sep|> <|function_call|>",
        "gigachat3" => "<|role_sep|> function call",
        "firefunction-v2" => "functools[",
        "command-r-plus" => "Action: ```json tool_name",
        "llama3" => "<|start_header_id|> \"parameters\"",
        "generic" => "",
        other => panic!("{other} has no marks here"),
    };
    // As Functionary's own does.
    let open = if format == "functionary-v3.2" {
        ">>>"
    } else {
        ""
    };
    let template = format!(
        "{{# {marks} #}}{{% for message in messages %}}<|im_start|>{{{{ message.role }}}}\n{{{{ message.content }}}}\
         <|im_end|>\n{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{open}{{% endif %}}"
    );
    assert_eq!(ToolFormat::of(&template).name(), format);
    template
}

/// What an answer says: its text, why it ended, and how many calls it has.
fn told(path: &str, answer: &Value) -> (String, String, usize) {
    let string = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let choice = &answer["choices"][0];
    match path {
        "/v1/chat/completions" => {
            let message = &choice["message"];
            (
                string(&message["content"]),
                string(&choice["finish_reason"]),
                list(&message["tool_calls"]).len(),
            )
        }
        "/v1/completions" => (string(&choice["text"]), string(&choice["finish_reason"]), 0),
        "/v1/responses" => {
            let (texts, others): (Vec<_>, Vec<_>) = list(&answer["output"])
                .into_iter()
                .partition(|item| item["type"] == "message");
            let text = texts
                .iter()
                .map(|item| string(&item["content"][0]["text"]))
                .collect();
            (text, string(&answer["status"]), others.len())
        }
        "/v1/messages" => {
            let (texts, others): (Vec<_>, Vec<_>) = list(&answer["content"])
                .into_iter()
                .partition(|block| block["type"] == "text");
            (
                texts.iter().map(|block| string(&block["text"])).collect(),
                string(&answer["stop_reason"]),
                others.len(),
            )
        }
        "/completion" => (string(&answer["content"]), string(&answer["stop_type"]), 0),
        other => panic!("{other}"),
    }
}

/// [`told`] of a streamed answer.
fn streamed(server: &Server, path: &str, body: &Value) -> (String, String, usize) {
    let (mut text, mut reason, mut n_calls) = (String::new(), String::new(), 0);
    if path.ends_with("/completions") {
        for event in server.stream(path, body.clone()) {
            let choice = &event["choices"][0];
            text += choice["text"]
                .as_str()
                .or(choice["delta"]["content"].as_str())
                .unwrap_or_default();
            reason += choice["finish_reason"].as_str().unwrap_or_default();
            n_calls += usize::from(!choice["delta"]["tool_calls"].is_null());
        }
        return (text, reason, n_calls);
    }
    for event in named_events(server, path, body.clone()) {
        match event["type"].as_str().unwrap() {
            "response.output_text.delta" => text += event["delta"].as_str().unwrap(),
            "response.completed" => {
                let whole = told(path, &event["response"]);
                assert_eq!(whole.0, text);
                (reason, n_calls) = (whole.1, whole.2);
            }
            "content_block_start" => {
                n_calls += usize::from(event["content_block"]["type"] != "text")
            }
            "content_block_delta" => text += event["delta"]["text"].as_str().unwrap_or_default(),
            "message_delta" => event["delta"]["stop_reason"]
                .as_str()
                .unwrap()
                .clone_into(&mut reason),
            _ => {}
        }
    }
    (text, reason, n_calls)
}

/// Requests in the words of each API, without tools and with tools that may not be called; and how
/// each ends.
fn requests(wish: &Value) -> Vec<(&'static str, Value, &'static str)> {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let function = json!({"name": "get_weather", "parameters": schema});
    let messages = json!([{"role": "user", "content": "Rain?"}]);
    let chat = json!({"messages": messages});
    let chat_none = json!({"messages": messages, "tools": [{"type": "function", "function": function}], "tool_choice": "none"});
    let chat_empty = json!({"messages": messages, "tools": [], "tool_choice": "auto"});
    let response = json!({"input": "Rain?"});
    let response_none = json!({"input": "Rain?", "tool_choice": "none",
        "tools": [{"type": "function", "name": "get_weather", "parameters": schema}]});
    let message = json!({"messages": messages, "max_tokens": 800});
    let message_none = json!({"messages": messages, "max_tokens": 800, "tool_choice": {"type": "none"},
        "tools": [{"name": "get_weather", "input_schema": schema}]});
    let requests = [
        ("/v1/chat/completions", chat, "stop"),
        ("/v1/chat/completions", chat_none, "stop"),
        ("/v1/chat/completions", chat_empty, "stop"),
        ("/v1/responses", response, "completed"),
        ("/v1/responses", response_none, "completed"),
        ("/v1/messages", message, "end_turn"),
        ("/v1/messages", message_none, "end_turn"),
        ("/v1/completions", json!({"prompt": "Rain?"}), "stop"),
        ("/completion", json!({"prompt": "Rain?"}), "eos"),
    ];
    let with_wish = |(path, mut body, end): (_, Value, _)| {
        body.as_object_mut()
            .unwrap()
            .extend(wish.as_object().unwrap().clone());
        (path, body, end)
    };
    requests.map(with_wish).into()
}

/// A schema of this object alone.
fn schema_of(value: &Value) -> Value {
    match value {
        Value::Object(members) => json!({
            "type": "object", "properties": members.iter().map(|(name, of)| (name.clone(), schema_of(of))).collect::<Value>(),
            "required": members.keys().collect::<Vec<_>>(), "additionalProperties": false,
        }),
        other => json!({"const": other}),
    }
}

/// A grammar forces the text of a call, a schema an object with the members of one or with such a
/// text in it: all of it is the answer's text, in every API, streamed or not, and in batches.
#[test]
fn what_looks_like_a_call_is_text() {
    let folder = Folder::new("content");
    let model = folder.model("model.gguf", tiny::reranker());
    for (format, open, rest) in CALLS {
        let file = folder.file("template.jinja", &template(format));
        let flags = ["-m", &model, "--chat-template-file", &file, "--temp", "0"];
        let server = Server::start(&flags);
        let call = format!("{open}{rest}");
        let arguments = json!({"city": "Oslo"});
        let members = json!({"name": "get_weather", "arguments": arguments, "parameters": arguments, "tool_calls": call, "n": 1});
        let inside = json!({"note": call, "thoughts": "<think>a</think>"});
        // What is asked for, and the text or the object that makes.
        for (wish, expected) in [
            (
                json!({"grammar": format!("root ::= {}", json!(call))}),
                json!(call),
            ),
            (json!({"json_schema": schema_of(&members)}), members),
            (json!({"json_schema": schema_of(&inside)}), inside),
        ] {
            let is_right = |text: &str| match &expected {
                Value::String(call) => text == call,
                object => serde_json::from_str::<Value>(text).is_ok_and(|found| found == *object),
            };
            let requests = requests(&wish);
            let in_batch: Vec<_> = requests
                .iter()
                .map(|(path, body, _)| (*path, body.clone()))
                .collect();
            for ((path, body, end), of_batch) in
                requests.iter().zip(batch(&folder, &flags, &in_batch))
            {
                let check = |how: &str, (text, reason, n_calls): (String, String, usize)| {
                    assert!(
                        is_right(&text),
                        "{format}, {path}, {how}: {text:?} by {body}"
                    );
                    assert_eq!(
                        (&reason[..], n_calls),
                        (*end, 0),
                        "{format}, {path}, {how}: {body}"
                    );
                };
                check("whole", told(path, &server.ask(path, body)));
                check("in a batch", told(path, &of_batch));
                if *path != "/completion" {
                    check("streamed", streamed(&server, path, body));
                }
            }
        }
    }
}

/// The case that clients met: a schema with a property `name`, as OpenAI's two APIs write it.
#[test]
fn a_schema_with_a_name() {
    let server = super::shared();
    let schema = json!({
        "type": "object", "required": ["name", "n", "k"], "additionalProperties": false,
        "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "k": {"enum": ["a", "b"]}},
    });
    let format = json!({"name": "s", "strict": true, "schema": schema});
    let chat = json!({"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 200, "seed": 0,
        "response_format": {"type": "json_schema", "json_schema": format}});
    let mut format = format;
    format["type"] = "json_schema".into();
    let response =
        json!({"input": "Say something.", "max_output_tokens": 200, "text": {"format": format}});
    for (path, body, end) in [
        ("/v1/chat/completions", chat, "stop"),
        ("/v1/responses", response, "completed"),
    ] {
        for (text, reason, n_calls) in [
            told(path, &server.ask(path, &body)),
            streamed(&server, path, &body),
        ] {
            let value = serde_json::from_str(&text)
                .unwrap_or_else(|error| panic!("{path}: {text:?}: {error}"));
            assert!(jsonschema::is_valid(&schema, &value), "{value}");
            assert_eq!((&reason[..], n_calls), (end, 0), "{path}: {text}");
        }
    }
}

/// A prompt that begins the model's reasoning: JSON that a schema describes is no reasoning.
#[test]
fn json_behind_an_open_thought() {
    let folder = Folder::new("thought");
    let file = folder.file(
        "template.jinja",
        "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n",
    );
    let server = Server::start(&["--chat-template-file", &file, "-c", "512", "--temp", "0"]);
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "json_schema": {"const": {"a": 1}}});
    for (text, reason, _) in [
        told(
            "/v1/chat/completions",
            &server.ask("/v1/chat/completions", &body),
        ),
        streamed(&server, "/v1/chat/completions", &body),
    ] {
        assert_eq!(
            (serde_json::from_str(&text).ok(), &reason[..]),
            (Some(json!({"a": 1})), "stop"),
            "{text:?}"
        );
    }
}
