//! `ruvllm serve` as clients call it, over sockets, with the built-in model.
#![cfg(feature = "serve")]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

#[path = "../../tests/it/calls.rs"]
mod calls;
#[path = "serve/content.rs"]
mod content;
#[path = "serve/crowd.rs"]
mod crowd;
#[path = "serve/echo.rs"]
mod echo;
#[path = "serve/hostile.rs"]
mod hostile;
#[path = "serve/house.rs"]
mod house;
#[path = "serve/images.rs"]
mod images;
#[path = "serve/load.rs"]
mod load;
#[path = "serve/memory.rs"]
mod memory;
#[path = "serve/messages.rs"]
mod messages;
#[path = "serve/ollama.rs"]
mod ollama;
#[path = "serve/overhead.rs"]
mod overhead;
#[path = "serve/responses.rs"]
mod responses;
#[path = "serve/sharing.rs"]
mod sharing;
#[path = "serve/slots.rs"]
mod slots;
#[path = "serve/strictness.rs"]
mod strictness;
#[path = "serve/templates.rs"]
mod templates;
#[path = "serve/tiny.rs"]
mod tiny;
#[path = "serve/tools.rs"]
mod tools;
#[path = "serve/vectors.rs"]
mod vectors;

/// A server on a free port; ended when dropped.
struct Server {
    child: Child,
    address: String,
    /// What it wrote to stderr since.
    log: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start(flags: &[&str]) -> Server {
        let mut child = Command::new(env!("CARGO_BIN_EXE_ruvllm"))
            .args(["serve", "--port", "0", "-t", "2"])
            .args(flags)
            .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address =
            |line: String| Some(line.split_once("http://")?.1.split('"').next()?.to_owned());
        let address = lines
            .find_map(|line| address(line.unwrap()))
            .expect("the server says where it is");
        // It may write more, and must not wait for a reader.
        let log = Arc::<Mutex<Vec<String>>>::default();
        let all = Arc::clone(&log);
        std::thread::spawn(move || {
            lines
                .map_while(Result::ok)
                .for_each(|line| all.lock().unwrap().push(line))
        });
        Server {
            child,
            address,
            log,
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        stream
    }

    /// Status and body of a request with these headers.
    fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let (status, _, body) = self.exchange(method, path, headers, body);
        (status, body)
    }

    /// As `send`, with the head of the response, in small letters.
    fn exchange(
        &self,
        method: &str,
        path: &str,
        headers: &str,
        body: &str,
    ) -> (u16, String, String) {
        let mut stream = self.connect();
        let host = match headers.contains("host: ") {
            true => "",
            false => "host: x\r\n",
        };
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\n{host}connection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        let (head, body) = response
            .split_once("\r\n\r\n")
            .unwrap_or_else(|| panic!("no head: {response:?}"));
        let (status, head) = (
            head.split(' ').nth(1).unwrap().parse().unwrap(),
            head.to_ascii_lowercase(),
        );
        let body = if head.contains("transfer-encoding: chunked") {
            unchunk(body)
        } else {
            body.to_owned()
        };
        (status, head, body)
    }

    fn get(&self, path: &str) -> (u16, String) {
        self.send("GET", path, "", "")
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.send("POST", path, "", &body.to_string());
        (
            status,
            serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}")),
        )
    }

    /// The response to a request that has to work.
    #[track_caller]
    fn ask(&self, path: &str, body: &Value) -> Value {
        let (status, response) = self.post(path, body);
        assert_eq!(status, 200, "{response}");
        response
    }

    /// The events of a stream, which has to end well.
    #[track_caller]
    fn stream(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = true.into();
        let (status, events) = self.send("POST", path, "", &body.to_string());
        assert_eq!(status, 200, "{events}");
        let mut data: Vec<_> = events
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{events}");
        data.into_iter()
            .map(|event| serde_json::from_str(event).unwrap())
            .collect()
    }

    /// The value of a metric.
    fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.get("/metrics");
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}"))
            .parse()
            .unwrap()
    }

    /// Waits till nothing runs or waits.
    #[track_caller]
    fn is_idle_soon(&self) {
        let begun = Instant::now();
        while self.metric("llamacpp:requests_processing")
            + self.metric("llamacpp:requests_deferred")
            > 0.0
        {
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "requests nobody waits for are still there"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Ends a program as a system does. Returns its exit code, for which it has a minute.
#[cfg(unix)]
fn ended(child: &mut Child) -> Option<i32> {
    let kill = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if begun.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(unix)]
impl Server {
    /// Ends it, and waits until it has ended.
    fn end(mut self) {
        assert_eq!(ended(&mut self.child), Some(0));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn unchunk(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let n = usize::from_str_radix(size, 16).unwrap();
        whole.push_str(&rest[..n]);
        body = rest[n..].strip_prefix("\r\n").unwrap_or_default();
    }
    whole
}

/// One that most tests share; it ends with the last of them.
fn shared() -> Arc<Server> {
    static SERVER: Mutex<Weak<Server>> = Mutex::new(Weak::new());
    let mut server = SERVER.lock().unwrap();
    server.upgrade().unwrap_or_else(|| {
        let new = Arc::new(Server::start(&["-c", "512", "--temp", "0"]));
        *server = Arc::downgrade(&new);
        new
    })
}

/// A folder that goes when the test ends.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder =
            std::env::temp_dir().join(format!("ruvllm-serve-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn file(&self, name: &str, text: &str) -> String {
        std::fs::write(self.0.join(name), text).unwrap();
        self.path(name)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn model(&self, name: &str, writer: ruvllm::gguf::Writer<'_>) -> String {
        let path = self.path(name);
        writer.write(&path).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What the program writes to stdout, or to stderr if it fails.
fn program(args: &[&str]) -> Result<String, String> {
    let program = Command::new(env!("CARGO_BIN_EXE_ruvllm"))
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if program.status.success() {
        Ok(text(program.stdout))
    } else {
        Err(text(program.stderr))
    }
}

/// The answers to these requests in a batch.
fn batch(folder: &Folder, flags: &[&str], requests: &[(&str, Value)]) -> Vec<Value> {
    let lines = requests.iter().enumerate().map(|(i, (url, body))| {
        json!({"custom_id": i.to_string(), "method": "POST", "url": url, "body": body}).to_string()
            + "\n"
    });
    let (file, results) = (
        folder.file("requests.jsonl", &lines.collect::<String>()),
        folder.path("results.jsonl"),
    );
    let _ = std::fs::remove_file(&results);
    program(&[&["batch", "-f", &file, "-o", &results], flags].concat()).unwrap();
    let mut answers = vec![Value::Null; requests.len()];
    for line in std::fs::read_to_string(results).unwrap().lines() {
        let mut result: Value = serde_json::from_str(line).unwrap();
        let i: usize = result["custom_id"].as_str().unwrap().parse().unwrap();
        answers[i] = result["response"]["body"].take();
    }
    answers
}

fn completion(prompt: &str, n: usize) -> Value {
    json!({"prompt": prompt, "max_tokens": n, "seed": 1})
}

fn text(response: &Value) -> &str {
    response["choices"][0]["text"].as_str().unwrap()
}

#[test]
fn what_it_is() {
    let server = &*shared();
    assert_eq!(server.get("/health"), (200, r#"{"status":"ok"}"#.into()));
    let models: Value = serde_json::from_str(&server.get("/v1/models").1).unwrap();
    assert!(
        models["data"][0]["id"].as_str().unwrap().ends_with(".gguf"),
        "{models}"
    );
    let name = models["data"][0]["id"].as_str().unwrap();
    assert_eq!(
        serde_json::from_str::<Value>(&server.get(&format!("/v1/models/{name}")).1).unwrap(),
        models["data"][0]
    );
    assert_eq!(server.get("/v1/models/another/one").0, 404);
    let props: Value = serde_json::from_str(&server.get("/props").1).unwrap();
    assert_eq!(
        (
            props["default_generation_settings"]["n_ctx"].as_u64(),
            props["total_slots"].as_u64()
        ),
        (Some(512), Some(16))
    );
    let tokens = server.ask(
        "/tokenize",
        &json!({"content": "Ownership is", "add_special": false}),
    );
    assert!(tokens["tokens"].as_array().unwrap().len() >= 2);
    assert_eq!(
        server.ask("/detokenize", &tokens)["content"],
        "Ownership is"
    );
    let prompt = server.ask(
        "/apply-template",
        &json!({"messages": [{"role": "user", "content": "Hello"}]}),
    );
    assert!(prompt["prompt"].as_str().unwrap().contains("Hello"));
}

/// The text is that of `ruvllm generate`; streamed, from tokens, and with others beside it, too.
#[test]
fn completions() {
    let server = &*shared();
    let output = Command::new(env!("CARGO_BIN_EXE_ruvllm"))
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .args([
            "-p",
            "Ownership is",
            "-n",
            "24",
            "--temp",
            "0",
            "-c",
            "512",
            "--no-display-prompt",
        ])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let expected = String::from_utf8(output.stdout).unwrap();
    let expected = expected.trim_end_matches('\n');
    let response = server.ask("/v1/completions", &completion("Ownership is", 24));
    assert_eq!(text(&response).trim_end_matches('\n'), expected);
    assert_eq!(
        (
            response["choices"][0]["finish_reason"].as_str(),
            &response["usage"]["completion_tokens"]
        ),
        (Some("length"), &json!(24))
    );

    let streamed = server.stream("/v1/completions", completion("Ownership is", 24));
    let whole: String = streamed.iter().map(text).collect();
    assert_eq!(whole, text(&response));
    let tokens = server.ask(
        "/tokenize",
        &json!({"content": "Ownership is", "add_special": true}),
    );
    let from_tokens = server.ask(
        "/v1/completions",
        &json!({"prompt": tokens["tokens"], "max_tokens": 24}),
    );
    assert_eq!(text(&from_tokens), text(&response));

    let prompts: Vec<_> = (0..12)
        .map(|i| format!("Number {i} of the trait is"))
        .collect();
    let alone: Vec<_> = prompts
        .iter()
        .map(|prompt| text(&server.ask("/v1/completions", &completion(prompt, 16))).to_owned())
        .collect();
    std::thread::scope(|scope| {
        let all: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| server.ask("/v1/completions", &completion(prompt, 16))))
            .collect();
        for (answer, alone) in all.into_iter().zip(&alone) {
            assert_eq!(text(&answer.join().unwrap()), alone);
        }
    });
    let several = server.ask(
        "/v1/completions",
        &json!({"prompt": prompts[..3], "max_tokens": 16}),
    );
    for (choice, alone) in several["choices"].as_array().unwrap().iter().zip(&alone) {
        assert_eq!(choice["text"], **alone);
    }
}

/// Drafts change no text, and are told.
#[test]
fn drafts() {
    let (with, without) = (
        Server::start(&["-c", "1024"]),
        Server::start(&["-c", "1024", "--no-spec"]),
    );
    let line = "let one = list.iter().map(|x| x + 1).collect();\n";
    let mut n_drafted = 0;
    for (seed, temperature) in [(1, 0.0), (2, 0.0), (3, 0.7), (4, 1.2)] {
        let prompt = line.repeat(6 + seed);
        let body = json!({"prompt": prompt, "max_tokens": 120, "temperature": temperature, "seed": seed, "logprobs": 1});
        let [with, without] = [&with, &without].map(|server| server.ask("/v1/completions", &body));
        assert_eq!(with["choices"], without["choices"]);
        assert!(without["timings"].get("draft_n").is_none(), "{without}");
        let count = |name: &str| with["timings"].get(name).map_or(0, |n| n.as_u64().unwrap());
        assert!(count("draft_n_accepted") <= count("draft_n"), "{with}");
        n_drafted += count("draft_n");
    }
    assert_eq!(
        with.metric("vllm:spec_decode_num_draft_tokens_total"),
        n_drafted as f64
    );
    assert!(
        n_drafted > 0,
        "a text that repeats itself was never guessed"
    );
}

/// What docs/ tell routers to read is there, as the gauges that they expect.
#[test]
fn metrics_for_routers() {
    let server = &*shared();
    let (_, metrics) = server.get("/metrics");
    let docs = [
        include_str!("../../docs/guide/server.md"),
        include_str!("../../docs/guide/kubernetes.yaml"),
    ]
    .concat();
    let is_name = |c: char| c == ':' || c == '_' || c.is_ascii_alphanumeric();
    let names = docs.split(|c| !is_name(c)).filter(|name| {
        name.strip_prefix("vllm:")
            .is_some_and(|rest| !rest.is_empty())
    });
    let names: std::collections::BTreeSet<_> = names.collect();
    for name in &names {
        assert!(
            metrics.contains(&format!("# TYPE {name} gauge\n")),
            "no gauge {name} in {metrics}"
        );
    }
    for name in [
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:lora_requests_info",
    ] {
        assert!(names.contains(name), "{name} is in none of {names:?}");
    }
}

/// A pool of connections keeps one that is idle for longer than a new one may take to ask; one that
/// asks nothing at all is closed.
#[test]
fn idle_connections() {
    // The usual limit for new connections is ten seconds.
    let (timeout, wait) = if load::is_long() {
        ("60", 75)
    } else {
        ("1", 3)
    };
    let server = Server::start(&["-c", "512", "--timeout", timeout]);
    let ask = |stream: &mut TcpStream| {
        stream
            .write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            .unwrap();
        let mut response = Vec::new();
        while !response.ends_with(br#"{"status":"ok"}"#) {
            let mut bytes = [0; 512];
            let n = stream.read(&mut bytes).unwrap();
            assert!(
                n > 0,
                "closed behind {:?}",
                String::from_utf8_lossy(&response)
            );
            response.extend(&bytes[..n]);
        }
    };
    let (mut kept, mut silent) = (server.connect(), server.connect());
    ask(&mut kept);
    std::thread::sleep(Duration::from_secs(wait));
    ask(&mut kept);
    silent
        .set_read_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    assert_eq!(silent.read(&mut [0; 16]).unwrap(), 0, "it is still open");
}

#[test]
fn how_answers_are_chosen_and_end() {
    let server = &*shared();
    let drawn = |seed: u64| {
        server.ask(
            "/v1/completions",
            &json!({"prompt": "A trait", "max_tokens": 16, "temperature": 1.5, "seed": seed, "n": 3}),
        )
    };
    let texts = |response: &Value| {
        response["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| c["text"].clone())
            .collect::<Vec<_>>()
    };
    let (first, again) = (texts(&drawn(7)), texts(&drawn(7)));
    assert_eq!(first, again);
    assert!(
        first[0] != first[1] && first[1] != first[2],
        "answers have luck of their own: {first:?}"
    );

    let free = server.ask("/v1/completions", &completion("Ownership is", 24));
    let word = text(&free).split_whitespace().nth(3).unwrap();
    let stopped = server.ask(
        "/v1/completions",
        &json!({"prompt": "Ownership is", "max_tokens": 24, "stop": [word]}),
    );
    assert!(!text(&stopped).contains(word) && text(&free).starts_with(text(&stopped)));
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");

    let told = server.ask(
        "/v1/completions",
        &json!({"prompt": "Ownership is", "max_tokens": 4, "logprobs": 2}),
    );
    let told = &told["choices"][0]["logprobs"];
    assert_eq!(told["tokens"].as_array().unwrap().len(), 4);
    assert!(
        told["token_logprobs"][0].as_f64().unwrap() <= 0.0
            && told["top_logprobs"][0].as_object().unwrap().len() == 2
    );
}

#[test]
fn chats() {
    let server = &*shared();
    let body = json!({
        "model": "gpt-4o", "max_completion_tokens": 16, "logprobs": true, "top_logprobs": 1,
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "What is a trait?"}]}],
    });
    let response = server.ask("/v1/chat/completions", &body);
    let message = &response["choices"][0]["message"];
    assert_eq!(
        (message["role"].as_str(), response["object"].as_str()),
        (Some("assistant"), Some("chat.completion"))
    );
    let n = response["usage"]["completion_tokens"].as_u64().unwrap();
    assert_eq!(
        response["choices"][0]["logprobs"]["content"]
            .as_array()
            .unwrap()
            .len() as u64,
        n
    );

    let mut body = body;
    body["stream_options"] = json!({"include_usage": true});
    let mut events = server.stream("/v1/chat/completions", body);
    let usage = events.pop().unwrap();
    assert_eq!(
        (
            usage["choices"].as_array().unwrap().len(),
            usage["usage"]["completion_tokens"].as_u64()
        ),
        (0, Some(n))
    );
    assert!(
        usage["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
            > 0,
        "the prompt was computed before: {usage}"
    );
    let deltas: Vec<_> = events
        .iter()
        .map(|event| &event["choices"][0]["delta"])
        .collect();
    assert_eq!(deltas[0]["role"], "assistant");
    let streamed: String = deltas
        .iter()
        .filter_map(|delta| delta["content"].as_str())
        .collect();
    assert_eq!(streamed, message["content"].as_str().unwrap());
    assert_eq!(
        events.last().unwrap()["choices"][0]["finish_reason"],
        response["choices"][0]["finish_reason"]
    );
}

#[test]
fn formats_and_tools() {
    let server = &*shared();
    let schema = json!({
        "type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "color": {"enum": ["red", "blue"]}},
        "required": ["n", "color"], "additionalProperties": false,
    });
    let messages = json!([{"role": "user", "content": "Choose."}]);
    let response = server.ask("/v1/chat/completions", &json!({
        "messages": messages, "temperature": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "choice", "strict": true, "schema": schema}},
    }));
    let value: Value = serde_json::from_str(
        response["choices"][0]["message"]["content"]
            .as_str()
            .unwrap(),
    )
    .unwrap();
    assert!(jsonschema::is_valid(&schema, &value), "{value}");

    let tools = json!([{"type": "function", "function": {"name": "choose", "parameters": schema}}]);
    let body = json!({"messages": messages, "tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "temperature": 1});
    let check = |call: &Value| {
        assert_eq!(
            (call["type"].as_str(), call["function"]["name"].as_str()),
            (Some("function"), Some("choose"))
        );
        let arguments: Value =
            serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(jsonschema::is_valid(&schema, &arguments), "{arguments}");
    };
    let response = server.ask("/v1/chat/completions", &body);
    let choice = &response["choices"][0];
    assert_eq!(
        (
            choice["finish_reason"].as_str(),
            choice["message"]["tool_calls"].as_array().unwrap().len()
        ),
        (Some("tool_calls"), 1)
    );
    check(&choice["message"]["tool_calls"][0]);
    let events = server.stream("/v1/chat/completions", body);
    let calls: Vec<_> = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    assert!(calls.iter().all(|call| call["index"] == 0));
    let arguments = calls
        .iter()
        .map(|call| call["function"]["arguments"].as_str().unwrap());
    let mut streamed = calls[0].clone();
    streamed["function"]["arguments"] = arguments.collect::<String>().into();
    check(&streamed);
    // What was called, and what came of it, goes on.
    let call = &choice["message"]["tool_calls"][0];
    let more = json!([{"role": "user", "content": "Choose."}, {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "done"}]);
    server.ask(
        "/v1/chat/completions",
        &json!({"messages": more, "tools": tools, "max_tokens": 4}),
    );
}

/// What other clients say besides: taken, and named; refused where it would change the answer.
#[test]
fn fields_that_the_server_does_not_know() {
    let server = &*shared();
    let ask = |server: &Server, path: &str, body: &Value| {
        let (status, head, body) = server.exchange("POST", path, "", &body.to_string());
        let name = head
            .lines()
            .find_map(|line| line.strip_prefix("x-ruvllm-ignored: "));
        (status, name.map(str::to_owned), body)
    };
    let user = json!([{"role": "user", "content": "hi"}]);
    for (path, body, ignored) in [
        (
            "/v1/responses",
            json!({"input": "hi", "max_output_tokens": 2, "client_metadata": {"session_id": "x"}}),
            Some("client_metadata"),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": user, "max_tokens": 2, "audio": null, "kv_transfer_params": null}),
            None,
        ),
        (
            "/v1/messages",
            json!({"messages": user, "max_tokens": 2, "billing": {"plan": 1},
                "thinking": {"type": "disabled", "depth": 3}}),
            Some("thinking.depth, billing"),
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "max_tokens": 1, "temprature": 1, "stream": true}),
            Some("temprature"),
        ),
    ] {
        let (status, name, answer) = ask(server, path, &body);
        assert_eq!(
            (status, name.as_deref()),
            (200, ignored),
            "{path}: {answer}"
        );
    }
    // The header stays small, and ASCII.
    let mut body = json!({"prompt": "a", "max_tokens": 1});
    for i in 0..500 {
        body[format!("field {i}, \u{e9}\r\n{}", "x".repeat(i))] = i.into();
    }
    let (status, name, answer) = ask(server, "/v1/completions", &body);
    let names = name.unwrap_or_default();
    assert!(status == 200 && names.len() <= 1024, "{answer}");
    assert!(
        names.starts_with("field%200%2c%20%c3%a9%0d%0a, field%201"),
        "{names}"
    );
    assert!(names.is_ascii() && names.ends_with(", ..."), "{names}");
    let body = json!({"messages": user, "max_tokens": 2, "guided_regex": "a+"});
    let (status, _, answer) = ask(server, "/v1/chat/completions", &body);
    assert!(status == 400 && answer.contains("guided_regex"), "{answer}");
    // Anthropic's words for effort and schema; a thread is refused as its SDK reads it.
    let schema = json!({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "schema": schema});
    for extra in [
        json!({"output_config": {"effort": "low", "format": format}}),
        json!({"output_format": format}),
    ] {
        let mut body = json!({"messages": user, "max_tokens": 32});
        let object = body.as_object_mut().unwrap();
        object.extend(extra.as_object().unwrap().clone());
        let (status, _, answer) = ask(server, "/v1/messages", &body);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let text = answer["content"][0]["text"].as_str().unwrap_or_default();
        let found: Value = serde_json::from_str(text).unwrap_or_default();
        assert_eq!((status, found), (200, json!({"a": 1})), "{answer}");
    }
    let body = json!({"messages": user, "max_tokens": 2, "thread": {"type": "create"}});
    let (status, _, answer) = ask(server, "/v1/messages", &body);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let details = json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]});
    assert_eq!(
        (status, &answer["error"]["details"]),
        (400, &details),
        "{answer}"
    );
    let strict = Server::start(&["-c", "512", "--strict"]);
    let body = json!({"prompt": "a", "max_tokens": 1, "temprature": 1});
    let (status, name, answer) = ask(&strict, "/v1/completions", &body);
    let message = "temprature: this server does not know the field";
    assert!(
        status == 400 && answer.contains(message) && name.is_none(),
        "{answer}"
    );
}

#[test]
fn bad_requests() {
    let server = &*shared();
    let refused = |body: Value, status: u16, text: &str| {
        let (found, response) = server.post("/v1/completions", &body);
        let message = response["error"]["message"].as_str().unwrap();
        assert!(
            found == status && message.contains(text),
            "{found} {response}"
        );
    };
    refused(json!({}), 400, "prompt");
    refused(json!({"prompt": 1}), 400, "prompt");
    refused(
        json!({"prompt": "a", "temperature": -1}),
        400,
        "temperature",
    );
    refused(
        json!({"prompt": "a", "temperature": 1e300}),
        400,
        "temperature",
    );
    refused(json!({"prompt": "a", "n": 0}), 400, "n:");
    refused(json!({"prompt": "a", "n": 100_000}), 400, "n:");
    refused(json!({"prompt": "a", "max_tokens": -7}), 400, "max_tokens");
    refused(
        json!({"prompt": "a", "logit_bias": {"99999999": 1}}),
        400,
        "logit_bias",
    );
    refused(json!({"prompt": [4_000_000_000u32]}), 400, "vocabulary");
    refused(json!({"prompt": vec![5; 600]}), 400, "context");
    refused(
        json!({"prompt": "a", "grammar": "root ::= ("}),
        400,
        "grammar",
    );
    refused(json!({"prompt": "a", "suffix": "b"}), 400, "suffix");
    // What is wrong is not sent back whole.
    let (status, response) = server.send(
        "POST",
        "/v1/completions",
        "",
        &json!({"prompt": "a", "n": "9".repeat(5000)}).to_string(),
    );
    assert!(
        status == 400 && response.contains("999") && response.len() < 2000,
        "{status} {response}"
    );
    // What each answer that waits has for itself.
    refused(
        json!({"prompt": "a", "stop": "a".repeat(20_000)}),
        400,
        "stop",
    );
    refused(
        json!({"prompt": "a", "user": "a".repeat(1000)}),
        400,
        "user",
    );
    refused(
        json!({"prompt": "a", "logit_bias": vec![(1, 0.5); 20_000]}),
        400,
        "logit_bias",
    );
    refused(
        json!({"prompt": "a", "samplers": ["top_k", "nonsense"]}),
        400,
        "nonsense",
    );
    refused(
        json!({"prompt": "a", "dry_sequence_breakers": ["."]}),
        400,
        "dry_sequence_breakers",
    );
    refused(json!({"prompt": []}), 400, "");
    let chat = server.post(
        "/v1/chat/completions",
        &json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    );
    assert!(
        chat.0 == 400
            && chat.1["error"]["message"]
                .as_str()
                .unwrap()
                .contains("messages[0]"),
        "{chat:?}"
    );
    for (method, path, body, status) in [
        ("POST", "/v1/completions", "{", 400),
        ("POST", "/v1/completions", "[]", 400),
        ("POST", "/v1/completions", &"[".repeat(100_000), 400),
        ("GET", "/v1/completions", "", 405),
        ("POST", "/health", "", 405),
        ("GET", "/v1/models/%FF", "", 400),
        ("GET", "/v2", "", 404),
    ] {
        let (found, response) = server.send(method, path, "", body);
        assert_eq!(found, status, "{method} {path}: {response}");
        assert!(
            serde_json::from_str::<Value>(&response).unwrap()["error"]["message"].is_string(),
            "{response}"
        );
    }
    // A head that is too large. The answer may be lost as the server closes before everything is
    // read.
    let mut stream = server.connect();
    let _ = write!(
        stream,
        "GET /health HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n",
        "a".repeat(150_000)
    );
    let mut status = [0; 12];
    if stream.read_exact(&mut status).is_ok() {
        assert_eq!(&status, b"HTTP/1.1 431");
    }
    // A body that is too large is refused before it is read.
    let mut stream = server.connect();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2000000000\r\n\r\n"
    )
    .unwrap();
    let mut status = [0; 12];
    stream.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 413");
}

/// Bodies together have a limit: who finds no room is told to come again, others are answered, and
/// what bodies that did not come to their ends held is there again.
#[test]
fn bodies_together() {
    let server = Server::start(&["-c", "512", "--temp", "0", "--body-budget", "1M"]);
    let body =
        json!({"prompt": "Ownership is", "max_tokens": 2}).to_string() + &" ".repeat(300_000);
    let (begun, mut wait) = (Instant::now(), Duration::from_millis(20));
    let (first, head) = loop {
        let mut first = server.connect();
        write!(
            first,
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n{body}"
        )
        .unwrap();
        // While it is on its way, it may be the one that finds no room.
        std::thread::sleep(wait);
        let (status, head, _) = server.exchange("POST", "/v1/completions", "", &body);
        if status != 200 {
            break (first, head);
        }
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "there is room for both of them"
        );
        wait *= 2;
    };
    assert!(
        head.starts_with("http/1.1 429") && head.contains("retry-after: 1"),
        "{head}"
    );
    server.ask("/v1/completions", &completion("Ownership is", 2));
    drop(first);
    let begun = Instant::now();
    while server.send("POST", "/v1/completions", "", &body).0 != 200 {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "what the first one had is not there again"
        );
    }
    // What never finds room, as bytes or as what they become.
    for body in ["1".repeat(700_000), format!("[{}0]", "[0],".repeat(5_000))] {
        assert_eq!(
            server.send("POST", "/tokenize", "", &body).0,
            413,
            "{} bytes",
            body.len()
        );
    }
}

/// Whoever stops reading is sent away: neither a place nor the end of the server waits for them.
#[cfg(unix)]
#[test]
fn a_client_that_reads_nothing() {
    let mut server = Server::start(&["-c", "512", "--temp", "0", "-to", "1"]);
    let body =
        json!({"prompt": "A trait", "ignore_eos": true, "stream": true, "n": 40, "logprobs": 20})
            .to_string();
    let mut stream = server.connect();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let begun = Instant::now();
    while server.metric("llamacpp:requests_processing") == 0.0 {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "it does not begin"
        );
    }
    assert_eq!(ended(&mut server.child), Some(0));
    drop(stream);
}

/// Pages of other origins may ask if they are named, and only then.
#[test]
fn origins() {
    let question = "origin: https://a.example\r\naccess-control-request-method: POST\r\n\
                    access-control-request-headers: authorization,content-type\r\n";
    let (status, head, _) = shared().exchange("OPTIONS", "/v1/completions", question, "");
    assert!(status == 405 && !head.contains("access-control"), "{head}");

    let server = Server::start(&[
        "-c",
        "512",
        "--api-key",
        "secret",
        "--cors-origins",
        "https://a.example,http://b:1",
    ]);
    let (status, head, _) = server.exchange("OPTIONS", "/v1/completions", question, "");
    assert_eq!(status, 204);
    for line in [
        "origin: https://a.example",
        "headers: authorization,content-type",
        "methods: get, post",
    ] {
        assert!(
            head.contains(&format!("access-control-allow-{line}")),
            "no {line} in {head}"
        );
    }
    // The answer without a key is told, too, so that the page can say why.
    let (status, head, _) = server.exchange("GET", "/v1/models", "origin: http://b:1\r\n", "");
    assert!(
        status == 401 && head.contains("access-control-allow-origin: http://b:1"),
        "{head}"
    );
    for origin in [
        "https://b.example",
        "https://a.example.evil",
        "http://a.example",
        "null",
    ] {
        let (_, head, _) = server.exchange("GET", "/health", &format!("origin: {origin}\r\n"), "");
        assert!(
            !head.contains("access-control") && head.contains("vary: origin"),
            "{origin}: {head}"
        );
    }
}

/// Clients that go away in any phase leave nothing behind.
#[test]
fn clients_that_go_away() {
    let server = Server::start(&["-c", "512", "-np", "2", "--temp", "0"]);
    let body =
        json!({"prompt": "Ownership is", "max_tokens": 400, "ignore_eos": true, "stream": true})
            .to_string();
    for i in 0..24 {
        let mut stream = server.connect();
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        match i % 3 {
            0 => stream.shutdown(Shutdown::Both).unwrap(),
            1 => drop(stream.read(&mut [0; 600]).unwrap()),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    server.is_idle_soon();
    let response = server.ask("/v1/completions", &completion("Ownership is", 24));
    assert_eq!(
        text(&response),
        text(&shared().ask("/v1/completions", &completion("Ownership is", 24)))
    );
}

/// Keys are needed, but for `/health`; each sees its own cached prompts alone.
#[test]
fn keys() {
    let server = Server::start(&["-c", "512", "--api-key", "one,other", "--temp", "0"]);
    let body = completion(
        &"A prompt that is long enough to be found again. ".repeat(8),
        1,
    )
    .to_string();
    let status = |headers: &str| server.send("POST", "/v1/completions", headers, &body).0;
    assert_eq!(server.get("/health").0, 200);
    assert_eq!(
        (
            status(""),
            status("authorization: Bearer on\r\n"),
            status("authorization: Bearer one2\r\n")
        ),
        (401, 401, 401)
    );
    let listed = |headers: &str| server.send("GET", "/v1/models", headers, "").0;
    assert_eq!(
        (
            listed("authorization: Basic one\r\n"),
            listed("authorization: bearer other\r\n")
        ),
        (401, 200)
    );
    assert!(
        server
            .exchange("GET", "/v1/models", "", "")
            .1
            .contains("www-authenticate: bearer")
    );
    let cached = |headers: &str| {
        let (status, response) = server.send("POST", "/v1/completions", headers, &body);
        assert_eq!(status, 200);
        let response: Value = serde_json::from_str(&response).unwrap();
        response["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(cached("authorization: Bearer one\r\n"), 0);
    assert!(cached("authorization: Bearer one\r\n") > 0);
    assert_eq!(cached("x-api-key: other\r\n"), 0);

    // Comments in a file of keys are none.
    let file = std::env::temp_dir().join(format!("ruvllm-keys-{}", std::process::id()));
    std::fs::write(&file, "# of the team\n\n  one \n").unwrap();
    let server = Server::start(&["-c", "512", "--api-key-file", file.to_str().unwrap()]);
    let status = |key: &str| {
        server
            .send("GET", "/v1/models", &format!("x-api-key: {key}\r\n"), "")
            .0
    };
    assert_eq!(
        (status("one"), status("# of the team"), status("")),
        (200, 401, 401)
    );
    std::fs::remove_file(file).unwrap();
}

/// A server whose model is still being downloaded says so, and ends when it shall.
#[cfg(all(unix, feature = "pull"))]
#[test]
fn ends_while_loading() {
    // A hub that does not answer.
    let hub = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let folder = std::env::temp_dir().join(format!("ruvllm-loading-{}", std::process::id()));
    let mut child = Command::new(env!("CARGO_BIN_EXE_ruvllm"))
        .args(["serve", "-hf", "a/b:Q8_0", "--port", &port.to_string()])
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .env("HF_HOME", &folder)
        .env(
            "HF_ENDPOINT",
            format!("http://{}", hub.local_addr().unwrap()),
        )
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let asked = hub.accept().unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    write!(
        stream,
        "GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    assert!(
        response.starts_with("HTTP/1.1 503") && response.contains("being loaded"),
        "{response}"
    );
    assert_eq!(ended(&mut child), Some(130));
    drop(asked);
    let _ = std::fs::remove_dir_all(folder);
}

/// What one key's requests teach takes effect for that key alone, and is in its folder alone.
#[cfg(unix)]
#[test]
fn learns_per_user() {
    use ruvllm_learn::sona::{EventKind, FolderOptions, SonaFolder};
    let folder = std::env::temp_dir().join(format!("ruvllm-serve-learn-{}", std::process::id()));
    let users = folder.to_str().unwrap();
    let heldout = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo-heldout.txt");
    let flags = [
        "--temp",
        "0",
        "--learn",
        users,
        "--learn-per-user",
        "--learn-control",
        heldout,
    ];
    let server = Server::start(&[&flags[..], &["-c", "1024", "--api-key", "one,other"]].concat());
    let (one, other) = (
        "authorization: Bearer one\r\n",
        "authorization: Bearer other\r\n",
    );
    let ask = |key: &str, prompt: &str, n: usize| {
        let mut body = completion(prompt, n);
        body["user"] = "u1".into();
        let (status, head, response) =
            server.exchange("POST", "/v1/completions", key, &body.to_string());
        assert_eq!(status, 200, "{response}");
        let response: Value = serde_json::from_str(&response).unwrap();
        let name = head
            .lines()
            .find_map(|line| line.strip_prefix("x-request-id: "))
            .unwrap()
            .to_owned();
        (
            name,
            response["choices"][0]["text"].as_str().unwrap().to_owned(),
        )
    };
    let prompt = "The gauge at Ossen Weir reads";
    let (before, (_, others_before)) = (ask(one, prompt, 24), ask(other, prompt, 24));
    assert_eq!(before.1, others_before);
    let text = include_str!("../../tests/data/river-station.txt");
    let pieces: Vec<&str> = text.split_inclusive("\n\n").collect();
    let pieces: Vec<String> = pieces
        .chunks(pieces.len() / 40)
        .map(<[_]>::concat)
        .collect();
    for piece in &pieces {
        ask(one, &piece.chars().take(800).collect::<String>(), 1);
    }
    // A rating reaches the caller's own requests only.
    let rate = |key: &str| {
        let body = json!({"request_id": before.0, "score": 1.0}).to_string();
        server.send("POST", "/feedback", key, &body).0
    };
    assert_eq!((rate(one), rate(other)), (200, 400));
    let folders: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(folders.len(), 2);
    let begun = Instant::now();
    let versions = || {
        folders
            .iter()
            .map(|path| std::fs::read_dir(path.join("versions")).unwrap().count())
            .sum::<usize>()
    };
    while versions() < 3 {
        assert!(
            begun.elapsed() < Duration::from_secs(240),
            "nothing took effect"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(ask(other, prompt, 24).1, others_before);
    server.end();
    let mut kinds = Vec::new();
    for path in &folders {
        let opened = SonaFolder::open(path, &FolderOptions::default()).unwrap();
        let (mut n, mut learnt) = (0, 0);
        opened
            .trajectories(|found| {
                assert!(
                    found.session_id == "u1"
                        && found.tokens.is_empty()
                        && path.ends_with(&found.tenant)
                );
                // No pass computes the last token of an answer.
                assert!(
                    !found.query_embedding.is_empty()
                        && found.response_embedding.is_empty() == (found.n_answer < 2)
                );
                n += 1;
            })
            .unwrap();
        opened
            .history()
            .iter()
            .for_each(|event| learnt += event.n_learnt[0]);
        kinds.push((
            n,
            learnt > 0,
            opened
                .history()
                .iter()
                .any(|event| event.kind == EventKind::Accepted),
        ));
    }
    kinds.sort_unstable();
    assert_eq!(kinds, [(2, false, false), (1 + pieces.len(), true, true)]);
    std::fs::remove_dir_all(&folder).unwrap();

    // Without keys, or without the flag, users would learn of one another.
    for (flags, why) in [
        (&["--learn", users, "--learn-per-user"][..], "--api-key"),
        (
            &["--learn", users, "--api-key", "one,other"],
            "--learn-per-user",
        ),
    ] {
        let program = env!("CARGO_BIN_EXE_ruvllm");
        let out = Command::new(program)
            .args(["serve", "--port", "0"])
            .args(flags)
            .output()
            .unwrap();
        assert!(
            out.status.code() == Some(2) && String::from_utf8_lossy(&out.stderr).contains(why),
            "{out:?}"
        );
    }
}

/// What was asked before SIGTERM is answered.
#[cfg(unix)]
#[test]
fn drains() {
    let mut server = Server::start(&["-c", "512", "--temp", "0"]);
    let mut stream = server.connect();
    let body =
        json!({"prompt": "Ownership is", "max_tokens": 300, "ignore_eos": true, "stream": true})
            .to_string();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    let kill = Command::new("kill")
        .args(["-TERM", &server.child.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

/// More than there is room for is refused, and told when to come again.
#[test]
fn a_full_queue() {
    let server = Server::start(&[
        "-c",
        "512",
        "-np",
        "1",
        "--max-requests",
        "2",
        "--temp",
        "0",
    ]);
    let body = json!({"prompt": "Ownership is", "max_tokens": 400, "ignore_eos": true}).to_string();
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| server.send("POST", "/v1/completions", "", &body).0))
            .collect();
        all.into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(
        statuses.iter().all(|status| [200, 429].contains(status)),
        "{statuses:?}"
    );
    assert!(
        statuses.contains(&200) && statuses.contains(&429),
        "{statuses:?}"
    );
    server.is_idle_soon();
    // What would never find room is no matter of waiting.
    let (status, response) = server.post(
        "/v1/completions",
        &json!({"prompt": ["a", "b", "c"], "max_tokens": 1}),
    );
    assert!(
        status == 400
            && response["error"]["message"]
                .as_str()
                .unwrap()
                .starts_with("3 answers"),
        "{response}"
    );
}

/// The events of a stream whose events have names, each the field `type` of its object.
#[track_caller]
fn named_events(server: &Server, path: &str, mut body: Value) -> Vec<Value> {
    body["stream"] = true.into();
    let (status, events) = server.send("POST", path, "", &body.to_string());
    assert_eq!(status, 200, "{events}");
    let mut all = Vec::new();
    for event in events
        .split("\n\n")
        .filter(|event| !event.is_empty() && !event.starts_with(':'))
    {
        let (name, data) = event.split_once('\n').unwrap_or_else(|| panic!("{event}"));
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(
            name.strip_prefix("event: "),
            data["type"].as_str(),
            "{event}"
        );
        all.push(data);
    }
    all
}

/// The header that names what had no effect, and the response to a request that has to work.
#[track_caller]
fn ignored(server: &Server, path: &str, body: &Value) -> (String, Value) {
    let (status, head, response) = server.exchange("POST", path, "", &body.to_string());
    assert_eq!(status, 200, "{response}");
    let names = head
        .lines()
        .find_map(|line| line.strip_prefix("x-ruvllm-ignored: "));
    (
        names.unwrap_or_default().to_owned(),
        serde_json::from_str(&response).unwrap(),
    )
}

fn types(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect()
}

fn choose_schema() -> Value {
    json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
        "additionalProperties": false})
}

/// Vectors as `ruvllm embed` makes them, as numbers and as the bytes that openai-python asks for.
#[test]
fn embeddings() {
    let server = &*shared();
    let output = Command::new(env!("CARGO_BIN_EXE_ruvllm"))
        .args([
            "embed",
            "-p",
            "A borrow ends.",
            "--embd-output-format",
            "array",
        ])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let expected: Value = serde_json::from_slice(&output.stdout).unwrap();
    let response = server.ask(
        "/v1/embeddings",
        &json!({"input": ["A trait", "A borrow ends."], "model": "m"}),
    );
    assert_eq!(response["data"][1]["embedding"], expected[0]);
    assert!(response["usage"]["prompt_tokens"].as_u64().unwrap() > 4);
    let response = server.ask(
        "/v1/embeddings",
        &json!({"input": "A borrow ends.", "encoding_format": "base64"}),
    );
    let n = expected[0].as_array().unwrap().len();
    assert_eq!(
        response["data"][0]["embedding"].as_str().unwrap().len(),
        (4 * n).div_ceil(3) * 4
    );
    for body in [
        json!({"input": "a", "dimensions": 7}),
        json!({"input": "a", "encoding_format": "int8"}),
        json!({"input": [[4_000_000_000u32]]}),
        json!({"input": [[]]}),
        json!({"input": "a ".repeat(3000)}),
    ] {
        assert_eq!(server.post("/v1/embeddings", &body).0, 400, "{body}");
    }
}

/// What programs for llama-server ask.
#[test]
fn native() {
    let server = &*shared();
    let expected = server.ask("/v1/completions", &completion("Ownership is", 12));
    let body = json!({"prompt": "Ownership is", "n_predict": 12, "n_probs": 2, "return_tokens": true, "seed": 1});
    let whole = server.ask("/completion", &body);
    assert_eq!(whole["content"], *text(&expected));
    assert_eq!(
        (
            whole["stop_type"].as_str(),
            whole["tokens_predicted"].as_u64()
        ),
        (Some("limit"), Some(12))
    );
    assert_eq!(whole["tokens"].as_array().unwrap().len(), 12);
    assert_eq!(
        whole["completion_probabilities"][0]["top_logprobs"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    let mut body = body;
    body["stream"] = true.into();
    let (_, events) = server.send("POST", "/completion", "", &body.to_string());
    let data = events
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let parts: Vec<Value> = data
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let streamed: String = parts
        .iter()
        .map(|part| part["content"].as_str().unwrap())
        .collect();
    assert_eq!(streamed, *text(&expected));
    let tokens = parts
        .iter()
        .flat_map(|part| part["tokens"].as_array().unwrap().clone());
    assert_eq!(
        tokens.collect::<Vec<_>>(),
        *whole["tokens"].as_array().unwrap()
    );
    assert_eq!(parts.iter().filter(|part| part["stop"] == true).count(), 1);
    assert_eq!(parts.last().unwrap()["stop"], true);
    let two = server.ask(
        "/completion",
        &json!({"prompt": ["Ownership is", "A trait"], "n_predict": 2}),
    );
    assert_eq!(two.as_array().unwrap().len(), 2);
    let slots: Value = serde_json::from_str(&server.get("/slots").1).unwrap();
    assert_eq!(
        (slots.as_array().unwrap().len(), &slots[15]["n_ctx"]),
        (16, &json!(512))
    );
    assert_eq!(server.get("/lora-adapters"), (200, "[]".into()));
    assert_eq!(server.get("/slots?fail_on_no_slot=1").0, 200);
    let body = json!({"prompt": "A", "n_predict": 2, "n_cmpl": 2, "samplers": ["top_k", "temperature"], "n_indent": 0,
        "response_fields": ["content", "timings/predicted_n", "nothing"]});
    let two = server.ask("/completions", &body);
    assert_eq!(
        (two[1].as_object().unwrap().len(), &two[1]["predicted_n"]),
        (2, &json!(2)),
        "{two}"
    );
    // A token may be a part of a character only.
    let tokens = server.ask(
        "/tokenize",
        &json!({"content": "a\u{1f9c0}", "with_pieces": true}),
    );
    let pieces = tokens["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| &token["piece"]);
    let bytes = pieces.flat_map(|piece| match piece.as_str() {
        Some(text) => text.as_bytes().to_vec(),
        None => piece
            .as_array()
            .unwrap()
            .iter()
            .map(|byte| byte.as_u64().unwrap() as u8)
            .collect(),
    });
    assert_eq!(
        String::from_utf8(bytes.collect()).unwrap().trim_start(),
        "a\u{1f9c0}"
    );
    let native = server.ask(
        "/embedding",
        &json!({"content": ["A trait", "A borrow ends."]}),
    );
    let openai = server.ask(
        "/v1/embeddings",
        &json!({"input": ["A trait", "A borrow ends."]}),
    );
    for i in 0..2 {
        assert_eq!(
            (&native[i]["index"], &native[i]["embedding"][0]),
            (&json!(i), &openai["data"][i]["embedding"])
        );
    }
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let n = server.ask(
        "/v1/chat/completions",
        &json!({"messages": messages, "max_tokens": 1}),
    )["usage"]["prompt_tokens"]
        .clone();
    for (path, body) in [
        ("chat/completions", json!({"messages": messages})),
        ("responses", json!({"input": "Hello"})),
    ] {
        assert_eq!(
            server.ask(&format!("/v1/{path}/input_tokens"), &body)["input_tokens"],
            n,
            "{path}"
        );
    }
    assert_eq!(
        server
            .post(
                "/infill",
                &json!({"input_prefix": "fn a(", "input_suffix": ")"})
            )
            .0,
        501
    );
    assert_eq!(
        server
            .post(
                "/completion",
                &json!({"prompt": "a", "lora": [{"id": 0, "scale": 1}]})
            )
            .0,
        400
    );
}

/// The page comes without a key and names nothing elsewhere. `tests/browser.py` uses it.
#[test]
fn page() {
    let server = Server::start(&["-c", "512", "--api-key", "secret"]);
    let mut whole = String::new();
    for (path, kind) in [
        ("/", "text/html"),
        ("/page.css", "text/css"),
        ("/page.js", "text/javascript"),
        ("/markdown.js", "text/javascript"),
        ("/chats.js", "text/javascript"),
    ] {
        let (status, head, body) = server.exchange("GET", path, "accept: text/html\r\n", "");
        assert!(
            status == 200 && head.contains(&format!("content-type: {kind}")),
            "{path}: {head}"
        );
        let policy = head
            .lines()
            .find_map(|line| line.strip_prefix("content-security-policy: "))
            .unwrap();
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'; ")
                && !policy.contains("unsafe"),
            "{policy}"
        );
        assert!(
            !body.contains("//") || path.ends_with(".js"),
            "{path} has a URL"
        );
        assert!(
            !body.contains("http:") && !body.contains("https:"),
            "{path} has a URL"
        );
        whole.push_str(&body);
    }
    assert!(
        !whole.contains("innerHTML") && !whole.contains(" onclick") && !whole.contains("style=\"")
    );
    assert_eq!(server.get("/v1/models").0, 401);
}

/// What the page shows where a setting is left empty is what a request gets.
#[test]
fn defaults_are_told() {
    let flags = [
        "-c", "512", "--temp", "0.3", "--top-k", "7", "--top-p", "0.95", "-n", "20", "-s", "5",
    ];
    let server = Server::start(&flags);
    let props: Value = serde_json::from_str(&server.get("/props").1).unwrap();
    let params = &props["default_generation_settings"]["params"];
    assert_eq!(params["temperature"], json!(0.3));
    assert_eq!(params["top_p"], json!(0.95));
    assert_eq!(params["top_k"], json!(7));
    assert_eq!(
        (&params["max_tokens"], &params["seed"]),
        (&json!(20), &json!(5))
    );
}

/// A line of JSON per request, with the name that its answer has; none unless asked for.
#[test]
fn logs() {
    let server = Server::start(&["-c", "512", "--log-level", "info", "--log-format", "json"]);
    let (_, head, _) = server.exchange(
        "POST",
        "/v1/completions",
        "",
        &completion("Ownership is", 2).to_string(),
    );
    let name = head
        .lines()
        .find_map(|line| line.strip_prefix("x-request-id: "))
        .unwrap();
    server.get("/v2");
    let begun = Instant::now();
    let lines = loop {
        let lines = server.log.lock().unwrap().clone();
        if lines.len() >= 2 {
            break lines;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{lines:?}");
        std::thread::sleep(Duration::from_millis(10));
    };
    let lines: Vec<Value> = lines
        .iter()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |i: usize| {
        (
            lines[i]["method"].as_str(),
            lines[i]["path"].as_str(),
            lines[i]["status"].as_u64(),
        )
    };
    assert_eq!(of(0), (Some("POST"), Some("/v1/completions"), Some(200)));
    assert_eq!(of(1), (Some("GET"), Some("/v2"), Some(404)));
    assert_eq!(
        (lines[0]["request"].as_str(), lines[0]["level"].as_str()),
        (Some(name), Some("INFO"))
    );
    assert!(
        shared()
            .log
            .lock()
            .unwrap()
            .iter()
            .all(|line| line.contains("ending")),
        "it is silent otherwise"
    );
}

/// Every request has its line in the audit log, also one that was cancelled; prompts only if
/// asked.
#[cfg(unix)]
#[test]
fn audit_log() {
    use std::os::unix::fs::PermissionsExt;
    let folder = std::env::temp_dir().join(format!("ruvllm-audit-log-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("log");
    let name = path.to_str().unwrap();
    let lines = |path: &std::path::Path| -> Vec<Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    // What a crash left behind stays by itself.
    std::fs::write(&path, "{\"torn\":true}").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let server = Server::start(&[
        "-c",
        "512",
        "--temp",
        "0",
        "--audit-log",
        name,
        "--api-key",
        "a,b",
    ]);
    let key = "authorization: Bearer b\r\n";
    let (_, head, body) = server.exchange(
        "POST",
        "/v1/completions",
        key,
        &completion("Ownership is", 3).to_string(),
    );
    let first: Value = serde_json::from_str(&body).unwrap();
    let chat = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "n": 2})
        .to_string();
    assert_eq!(
        server.send("POST", "/v1/chat/completions", key, &chat).0,
        200
    );
    let endless =
        json!({"prompt": "A trait", "max_tokens": 400, "ignore_eos": true, "stream": true})
            .to_string();
    let mut stream = server.connect();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\n{key}content-length: {}\r\n\r\n{endless}",
        endless.len()
    )
    .unwrap();
    stream.read_exact(&mut [0; 600]).unwrap();
    drop(stream);
    // A batch is written after a second without being asked.
    let begun = Instant::now();
    while lines(&path).len() < 5 {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "{:?}",
            lines(&path)
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(
        server
            .send(
                "POST",
                "/v1/completions",
                key,
                &completion("Last", 1).to_string()
            )
            .0,
        200
    );
    server.end();
    let lines_now = lines(&path);
    assert_eq!(
        (lines_now.len(), &lines_now[0]),
        (6, &json!({"torn": true}))
    );
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let line = &lines_now[1];
    let of = |name: &str| line[name].as_u64().unwrap();
    assert!(
        head.contains(&format!(
            "x-request-id: {}",
            line["request"].as_str().unwrap()
        )),
        "{head} {line}"
    );
    assert_eq!(
        (line["path"].as_str(), line["tenant"].as_str()),
        (Some("/v1/completions"), Some("1"))
    );
    assert_eq!(
        (line["reason"].as_str(), of("n_generated"), of("seed")),
        (Some("max_tokens"), 3, 1)
    );
    assert_eq!(
        of("n_prompt") + of("n_cached"),
        first["usage"]["prompt_tokens"].as_u64().unwrap()
    );
    assert!(line["total_ms"].as_f64().unwrap() >= line["decode_ms"].as_f64().unwrap());
    assert_eq!(
        lines_now[2]["request"], lines_now[3]["request"],
        "two answers to one request"
    );
    assert_eq!(lines_now[4]["reason"], "cancelled");
    assert!(lines_now.iter().all(|line| line.get("prompt").is_none()));

    // With prompts, on disk, and in several files.
    let server = Server::start(&[
        "-c",
        "512",
        // Its name in the releases before.
        "--witness-log",
        name,
        "--audit-prompts",
        "--audit-fsync",
        "--audit-size",
        "1",
    ]);
    server.ask("/v1/completions", &completion("Ownership is", 3));
    server.end();
    let newest = lines(&path);
    assert!(
        newest.len() == 1
            && newest[0]["prompt"]
                .as_str()
                .unwrap()
                .ends_with("Ownership is"),
        "{newest:?}"
    );
    assert_eq!(lines(&folder.join("log.1")), lines_now);
    std::fs::remove_dir_all(folder).unwrap();
}

/// While a pass takes too long, and only then, the server is not healthy.
#[test]
fn watchdog() {
    let server = Server::start(&[
        "-c",
        "8192",
        "-b",
        "8192",
        "-ub",
        "8192",
        "--watchdog-seconds",
        "0.02",
    ]);
    assert_eq!(server.get("/health").0, 200);
    let prompt = "Ownership is a set of rules. ".repeat(700);
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| server.ask("/v1/completions", &completion(&prompt, 1)));
        let begun = Instant::now();
        loop {
            let (status, body) = server.get("/health");
            if status == 503 {
                assert!(
                    body.contains("the engine has computed one pass for"),
                    "{body}"
                );
                break;
            }
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "the pass is not noticed"
            );
        }
        answer.join().unwrap();
    });
    // The answer is sent before the pass is over.
    let begun = Instant::now();
    while server.get("/health").0 != 200 {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "the pass is over"
        );
    }
}

/// Adapters by name and by number; requests with the same ones find each other's prompts, those
/// with others do not.
#[test]
fn adapters() {
    use ruvllm::lora::Adapter;
    let folder = std::env::temp_dir().join(format!("ruvllm-adapters-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let model = ruvllm::Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    ))
    .unwrap();
    let files = ["one.gguf", "two.gguf"].map(|name| folder.join(name));
    files.iter().for_each(|path| {
        Adapter::zeros(&model, 1, 1, |_| true)
            .unwrap()
            .save(path)
            .unwrap()
    });
    let files = files.map(|path| path.to_str().unwrap().to_owned());
    let server = Server::start(&[
        "-c",
        "512",
        "--temp",
        "0",
        "-a",
        "m",
        "--lora",
        &files.join(","),
    ]);
    let models: Value = serde_json::from_str(&server.get("/v1/models").1).unwrap();
    let names: Vec<_> = models["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["m", "m:one", "m:two"]);
    let (_, metrics) = server.get("/metrics");
    assert!(
        metrics.contains(
            r#"vllm:lora_requests_info{max_lora="2",running_lora_adapters="m:one,m:two","#
        ),
        "{metrics}"
    );
    let prompt = "A prompt that is long enough to be found again. ".repeat(4);
    let cached = |choice: Value| {
        let mut body = completion(&prompt, 1);
        body.as_object_mut()
            .unwrap()
            .extend(choice.as_object().unwrap().clone());
        server.ask("/v1/completions", &body)["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    for choice in [
        json!({}),
        json!({"model": "m:one"}),
        json!({"lora": [{"id": 1, "scale": 0.5}]}),
        json!({"lora": []}),
    ] {
        assert_eq!(
            cached(choice.clone()),
            0,
            "{choice}: others have other weights"
        );
        assert!(cached(choice.clone()) > 20, "{choice}: the same ones");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// Documents in the order of their scores, as `ruvllm rerank` has them; other models say that they
/// are none.
#[test]
fn rerank() {
    let body = json!({"query": "hot?", "documents": ["It rains.", {"text": "It is hot."}, "Cold."], "top_n": 2});
    let (status, response) = shared().post("/v1/rerank", &body);
    assert!(
        status == 400
            && response["error"]["message"]
                .as_str()
                .unwrap()
                .contains("reranker"),
        "{response}"
    );

    let folder = std::env::temp_dir().join(format!("ruvllm-rerank-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let model = folder.join("reranker.gguf");
    tiny::reranker().write(&model).unwrap();
    let model = model.to_str().unwrap();
    let server = Server::start(&["-m", model, "-c", "128"]);
    let response = server.ask("/v1/rerank", &body);
    let results = response["results"].as_array().unwrap();
    assert_eq!(results.len(), 2, "{response}");
    assert!(
        results[0]["relevance_score"].as_f64() > results[1]["relevance_score"].as_f64(),
        "{response}"
    );
    assert!(
        response["usage"]["prompt_tokens"].as_u64().unwrap() > 10,
        "{response}"
    );
    let file = folder.join("documents.txt");
    std::fs::write(&file, "It rains.\nIt is hot.\nCold.\n").unwrap();
    let program = Command::new(env!("CARGO_BIN_EXE_ruvllm"))
        .args([
            "rerank",
            "-m",
            model,
            "-p",
            "hot?",
            "-f",
            file.to_str().unwrap(),
            "--json",
            "--top-n",
            "2",
        ])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let expected: Value = serde_json::from_slice(&program.stdout).unwrap();
    assert_eq!(expected.as_array().unwrap().len(), 2);
    for (result, expected) in results.iter().zip(expected.as_array().unwrap()) {
        assert_eq!(result["index"], expected["index"]);
        assert_eq!(result["relevance_score"], expected["score"]);
    }
    for (wrong, field) in [
        (json!({"documents": ["a"]}), "query"),
        (json!({"query": "a"}), "documents"),
        (json!({"query": "a", "documents": []}), "documents"),
        (json!({"query": "a", "documents": [1]}), "documents"),
    ] {
        let (status, response) = server.post("/v1/rerank", &wrong);
        assert!(
            status == 400
                && response["error"]["message"]
                    .as_str()
                    .unwrap()
                    .contains(field),
            "{response}"
        );
    }
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}
