//! Ollama's API: its paths, words and streams, over the same models as the other APIs.

use super::{Folder, Server, completion, shared, text, tiny};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MODEL: &str = "ruvllm-rust-6m-q8_0.gguf";

fn said(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

/// The lines of a stream, which has to end well.
fn lines(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let (status, head, text) = server.exchange("POST", path, "", &body.to_string());
    assert!(
        status == 200 && head.contains("content-type: application/x-ndjson"),
        "{head}\n{text}"
    );
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (last, others) = lines.split_last().unwrap();
    assert_eq!(last["done"], true, "{last}");
    assert!(others.iter().all(|line| line["done"] == false), "{text}");
    lines
}

fn get(server: &Server, path: &str) -> Value {
    let (status, body) = server.get(path);
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

/// Who looks for Ollama finds it, and a browser its page.
#[test]
fn it_is_running() {
    let server = shared();
    for method in ["GET", "HEAD"] {
        let (status, head, body) = server.exchange(method, "/", "accept: */*\r\n", "");
        assert!(
            status == 200 && head.contains("content-length: 17"),
            "{head}"
        );
        let expected = if method == "GET" {
            "Ollama is running"
        } else {
            ""
        };
        assert_eq!(body, expected);
    }
    let accept = "accept: text/html,application/xhtml+xml\r\n";
    let (status, head, _) = server.exchange("GET", "/", accept, "");
    assert!(status == 200 && head.contains("content-type: text/html"));
    let version = get(&server, "/api/version");
    assert!(version["version"].as_str().unwrap().split('.').count() == 3);
    let tags = get(&server, "/api/tags");
    assert_eq!(tags["models"][0]["name"], MODEL);
    assert_eq!(tags["models"][0]["digest"].as_str().unwrap().len(), 64);
    let loaded = get(&server, "/api/ps");
    assert_eq!(loaded["models"][0]["context_length"], 512);
    assert_eq!(loaded["models"][0]["digest"], tags["models"][0]["digest"]);
    let shown = server.ask("/api/show", &json!({"model": MODEL}));
    assert_eq!(shown["details"]["quantization_level"], "Q8_0");
    assert_eq!(shown["model_info"]["general.architecture"], "llama");
    assert!(shown["model_info"]["tokenizer.ggml.tokens"].is_null());
    assert_eq!(shown["capabilities"][0], "completion");
    let verbose = server.ask("/api/show", &json!({"name": MODEL, "verbose": true}));
    assert!(
        verbose["model_info"]["tokenizer.ggml.tokens"]
            .as_array()
            .unwrap()
            .len()
            > 1000
    );
}

/// The text of a chat is that of the other API, whole and as it comes.
#[test]
fn chat() {
    let server = shared();
    let expected = server.ask(
        "/v1/chat/completions",
        &json!({"messages": said("What is a slice?"), "max_tokens": 12}),
    );
    let expected = &expected["choices"][0]["message"]["content"];
    let body = |model: &str, stream: Value| {
        json!({
            "model": model, "messages": said("What is a slice?"), "stream": stream,
            "options": {"num_predict": 12, "num_ctx": 4096, "num_thread": 3}, "keep_alive": "5m",
        })
    };
    for name in [MODEL, &format!("{MODEL}:latest"), "ruvllm-rust-6m-q8_0"] {
        let answer = server.ask("/api/chat", &body(name, json!(false)));
        assert_eq!(&answer["message"]["content"], expected);
        assert_eq!(
            (
                &answer["model"],
                &answer["done_reason"],
                &answer["eval_count"]
            ),
            (&json!(name), &json!("length"), &json!(12))
        );
        assert!(answer["total_duration"].as_u64() >= answer["eval_duration"].as_u64());
        assert!(answer["created_at"].as_str().unwrap().ends_with('Z'));
        for stream in [json!(true), Value::Null] {
            let lines = lines(&server, "/api/chat", &body(name, stream));
            let all: String = lines
                .iter()
                .map(|line| line["message"]["content"].as_str().unwrap())
                .collect();
            assert_eq!(expected, &all);
            assert!(lines.len() > 3 && lines[0]["message"]["role"] == "assistant");
        }
    }
    let (_, head, _) = server.exchange(
        "POST",
        "/api/chat",
        "",
        &body(MODEL, json!(false)).to_string(),
    );
    assert!(
        head.contains("x-ruvllm-ignored: options.num_ctx, options.num_thread"),
        "{head}"
    );
}

/// Continuations: with the template, raw, and between two texts.
#[test]
fn generate() {
    let server = shared();
    let expected = server.ask("/v1/completions", &completion("Ownership is", 8));
    let raw = json!({
        "model": MODEL, "prompt": "Ownership is", "raw": true, "stream": false,
        "options": {"num_predict": 8},
    });
    let answer = server.ask("/api/generate", &raw);
    assert_eq!(answer["response"], text(&expected));
    let mut streamed = raw;
    streamed["stream"] = true.into();
    let all: String = lines(&server, "/api/generate", &streamed)
        .iter()
        .map(|line| line["response"].as_str().unwrap())
        .collect();
    assert_eq!(all, text(&expected));

    let messages =
        json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    let expected = server.ask(
        "/v1/chat/completions",
        &json!({"messages": messages, "max_tokens": 8}),
    );
    let body = json!({
        "model": MODEL, "prompt": "Hi", "system": "Be brief.", "stream": false,
        "options": {"num_predict": 8},
    });
    let answer = server.ask("/api/generate", &body);
    assert_eq!(
        answer["response"],
        expected["choices"][0]["message"]["content"]
    );

    let folder = Folder::new("ollama-infill");
    let model = folder.model("m.gguf", tiny::reranker());
    let server = Server::start(&["-m", &model, "--temp", "0"]);
    let infill = json!({"input_prefix": "ab", "input_suffix": "cd", "n_predict": 6});
    let expected = server.ask("/infill", &infill);
    let body = json!({
        "model": "m", "prompt": "ab", "suffix": "cd", "stream": false, "options": {"num_predict": 6},
    });
    assert_eq!(
        server.ask("/api/generate", &body)["response"],
        expected["content"]
    );
}

/// Options, formats and stop strings have the effect that they have elsewhere.
#[test]
fn options_and_formats() {
    let server = shared();
    let ask = |more: Value| {
        let mut body = json!({"model": MODEL, "messages": said("Go on"), "stream": false});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        server.ask("/api/chat", &body)
    };
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["n"], "additionalProperties": false});
    let answer = ask(json!({"format": schema}));
    let content: Value =
        serde_json::from_str(answer["message"]["content"].as_str().unwrap()).unwrap();
    assert!(
        content["n"].is_u64() && answer["done_reason"] == "stop",
        "{answer}"
    );
    let options = json!({"temperature": 1.5, "seed": 7, "top_k": 50, "num_predict": 10});
    let one = ask(json!({"options": options}));
    assert_eq!(one["message"], ask(json!({"options": options}))["message"]);
    let elsewhere = server.ask(
        "/v1/chat/completions",
        &json!({"messages": said("Go on"), "temperature": 1.5, "seed": 7, "top_k": 50, "max_tokens": 10}),
    );
    assert_eq!(
        one["message"]["content"],
        elsewhere["choices"][0]["message"]["content"]
    );
    let usual = ask(json!({"options": {"num_predict": 20}}));
    let all = usual["message"]["content"].as_str().unwrap();
    let stop = &all[all.len() / 2..all.len() / 2 + 2];
    let cut = ask(json!({"options": {"num_predict": 20, "stop": stop}}));
    let cut_text = cut["message"]["content"].as_str().unwrap();
    assert!(all.starts_with(cut_text) && !cut_text.contains(stop) && cut["done_reason"] == "stop");
    let told = ask(json!({"logprobs": true, "top_logprobs": 2, "options": {"num_predict": 3}}));
    let tokens = told["logprobs"].as_array().unwrap();
    assert!(
        tokens.len() == 3 && tokens[0]["top_logprobs"].as_array().unwrap().len() == 2,
        "{told}"
    );
}

/// A call is told whole, its arguments an object.
#[test]
fn calls() {
    let folder = Folder::new("ollama-calls");
    let model = folder.model("m.gguf", tiny::reranker());
    let server = Server::start(&["-m", &model, "--temp", "0"]);
    let parameters = json!({"type": "object", "properties": {"s": {"enum": ["alpha"]}},
        "required": ["s"], "additionalProperties": false});
    let body = json!({
        "model": "m", "messages": said("hi"), "stream": false, "tool_choice": "required",
        "parallel_tool_calls": false,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
    });
    let answer = server.ask("/api/chat", &body);
    let call = &answer["message"]["tool_calls"][0]["function"];
    assert_eq!(
        (&call["name"], &call["arguments"]),
        (&json!("f"), &json!({"s": "alpha"})),
        "{answer}"
    );
    let mut streamed = body;
    streamed["stream"] = true.into();
    let lines = lines(&server, "/api/chat", &streamed);
    let told: Vec<_> = lines
        .iter()
        .filter_map(|line| line["message"]["tool_calls"].as_array())
        .flatten()
        .collect();
    assert_eq!((told.len(), &told[0]["function"]), (1, call));
    // What came of it goes back in, without names of calls.
    let next = json!({
        "model": "m", "stream": false, "options": {"num_predict": 4}, "think": false,
        "messages": [said("hi")[0], answer["message"], {"role": "tool", "tool_name": "f", "content": "1"}],
    });
    assert_eq!(server.ask("/api/chat", &next)["done"], true);
}

/// Vectors are those of the other API.
#[test]
fn vectors() {
    let folder = Folder::new("ollama-vectors");
    let model = folder.model("e.gguf", tiny::encoder(false));
    let server = Server::start(&["-m", &model]);
    let expected = server.ask("/v1/embeddings", &json!({"input": ["a", "hello world"]}));
    let found = server.ask(
        "/api/embed",
        &json!({"model": "e", "input": ["a", "hello world"]}),
    );
    for i in 0..2 {
        assert_eq!(found["embeddings"][i], expected["data"][i]["embedding"]);
    }
    assert_eq!(
        found["prompt_eval_count"],
        expected["usage"]["prompt_tokens"]
    );
    let one = server.ask(
        "/api/embed",
        &json!({"model": "e", "input": "a", "options": {"num_ctx": 8}}),
    );
    assert_eq!(one["embeddings"][0], expected["data"][0]["embedding"]);
    let older = server.ask(
        "/api/embeddings",
        &json!({"model": "e:latest", "prompt": "a"}),
    );
    assert_eq!(older["embedding"], expected["data"][0]["embedding"]);
    let none = server.ask("/api/embed", &json!({"model": "e", "input": []}));
    assert_eq!(none["embeddings"], json!([]));
    // Too long: shortened unless the request says otherwise.
    let long = "a ".repeat(500);
    server.ask("/api/embed", &json!({"model": "e", "input": long}));
    let (status, error) = server.post(
        "/api/embed",
        &json!({"model": "e", "input": long, "truncate": false}),
    );
    assert!(status == 400 && error["error"].is_string(), "{error}");
    let shown = server.ask("/api/show", &json!({"model": "e"}));
    assert_eq!(shown["capabilities"], json!(["embedding"]));
    let (status, error) = server.post(
        "/api/chat",
        &json!({"model": "e", "messages": said("a"), "stream": false}),
    );
    assert!(status == 400 && error["error"].is_string(), "{error}");
}

/// A model goes and comes as `keep_alive` says.
#[test]
fn keep_alive() {
    let server = Server::start(&["-c", "128", "--temp", "0"]);
    let loaded = || get(&server, "/api/ps")["models"].as_array().unwrap().len();
    let answer = server.ask("/api/generate", &json!({"model": MODEL, "keep_alive": 0}));
    assert_eq!((&answer["done_reason"], loaded()), (&json!("unload"), 0));
    let answer = server.ask("/api/chat", &json!({"model": MODEL, "messages": []}));
    assert_eq!((&answer["done_reason"], loaded()), (&json!("load"), 1));
    let ask = |keep: Value| {
        let body = json!({"model": MODEL, "prompt": "a", "stream": false, "keep_alive": keep,
            "options": {"num_predict": 2}});
        server.ask("/api/generate", &body)
    };
    let one = ask(json!(-1));
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(loaded(), 1);
    ask(json!("300ms"));
    let begun = Instant::now();
    while loaded() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "it stays");
        std::thread::sleep(Duration::from_millis(50));
    }
    // Whoever asks has it loaded again, and the same answer.
    assert_eq!(ask(json!("1h"))["response"], one["response"]);
    assert_eq!(
        server.ask("/v1/completions", &completion("a", 2))["object"],
        "text_completion"
    );
}

/// What is not there is refused by name, in the form of this API.
#[test]
fn refusals() {
    let server = shared();
    let error = |path: &str, body: Value| {
        let (status, answer) = server.post(path, &body);
        let message = answer["error"]
            .as_str()
            .unwrap_or_else(|| panic!("{path}: {answer}"));
        (status, message.to_owned())
    };
    let (status, message) = error(
        "/api/chat",
        json!({"model": "llama9", "messages": said("a")}),
    );
    assert_eq!((status, &message[..]), (404, "model \"llama9\" not found"));
    for name in ["../x", "a\u{0}b", "/etc/passwd", ""] {
        assert_eq!(
            error("/api/show", json!({"model": name})).0,
            404,
            "{name:?}"
        );
        assert_eq!(
            error("/api/generate", json!({"model": name})).0,
            404,
            "{name:?}"
        );
    }
    for path in ["/api/pull", "/api/push", "/api/create", "/api/copy"] {
        let (status, message) = error(path, json!({"model": "x"}));
        assert!(
            status == 501 && message.contains("ruvllm pull"),
            "{message}"
        );
    }
    assert_eq!(server.send("DELETE", "/api/delete", "", "{}").0, 501);
    assert_eq!(server.send("HEAD", "/api/blobs/sha256:00", "", "").0, 501);
    let image = json!([{"role": "user", "content": "a", "images": ["AA"]}]);
    let chat = |more: Value| {
        let mut body = json!({"model": MODEL, "messages": said("a")});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        error("/api/chat", body)
    };
    for (more, expected) in [
        (json!({"messages": image}), "messages[0].content[0]"),
        (json!({"keep_alive": "soon"}), "keep_alive"),
        (json!({"keep_alive": [1]}), "keep_alive"),
        (json!({"format": "yaml"}), "format"),
        (json!({"think": "hard"}), "think"),
        (json!({"options": {"num_predict": "x"}}), "num_predict"),
        (json!({"options": 5}), "options"),
        (json!({"messages": "x"}), "messages"),
        (json!({"messages": ["x"]}), "messages[0]"),
        (json!({"stream": "x"}), "stream"),
    ] {
        let (status, message) = chat(more.clone());
        assert!(
            status == 400 && message.contains(expected),
            "{more}: {message}"
        );
    }
    for more in [
        json!({"context": [1]}),
        json!({"template": "x"}),
        json!({"images": ["AA"]}),
    ] {
        let mut body = json!({"model": MODEL, "prompt": "a"});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        assert_eq!(error("/api/generate", body).0, 400, "{more}");
    }
    assert_eq!(error("/api/chat", json!({"messages": said("a")})).0, 400);
    assert_eq!(error("/api/nothing", json!({})).0, 404);
    let server = Server::start(&["-c", "128", "--api-key", "secret"]);
    let (status, body) = server.get("/api/tags");
    assert!(
        status == 401 && body.starts_with("{\"error\":\"the key"),
        "{body}"
    );
}
