//! What users have had remembered: `/memory`, and what conversations are told of it.

use super::{Folder, Server, program};
use ruvllm::Model;
use ruvllm::gguf::{Array, Value as Field, Writer};
use serde_json::{Value, json};

const FACT: &str = "The gauge at Ossen Weir is read by Talvo Renning.";

/// The model that a server has that is named none.
const MODEL: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../models/ruvllm-rust-6m-q8_0.gguf"
);

/// Without keys a server wants to be asked for under a name that is nobody else's.
const LOCAL: &str = "host: localhost\r\n";

fn call(server: &Server, key: &str, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let key = match key {
        "" => LOCAL.to_owned(),
        key => format!("authorization: Bearer {key}\r\n"),
    };
    let (kind, body) = match body {
        Value::Null => ("", String::new()),
        body => ("content-type: application/json\r\n", body.to_string()),
    };
    let (status, text) = server.send(method, path, &format!("{key}{kind}"), &body);
    (status, serde_json::from_str(&text).unwrap_or(Value::Null))
}

/// Tokens of the prompt of a conversation that ends with `question`, which may be parts.
fn n_prompt(server: &Server, key: &str, question: Value, more: &Value) -> u64 {
    let mut body = json!({"max_tokens": 1, "messages": [
        {"role": "user", "content": "Good day"}, {"role": "assistant", "content": "Good day"},
        {"role": "user", "content": question},
    ]});
    let fields = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(fields);
    let (status, answer) = call(server, key, "POST", "/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    answer["usage"]["prompt_tokens"].as_u64().unwrap()
}

/// Each key's is told to that key alone, in every API and within 96 tokens, until it is forgotten.
#[test]
fn each_key_has_its_own() {
    let folder = Folder::new("memory");
    let mine = folder.path("mine");
    // Given twice, a key is one user.
    let flags = ["--api-key", "a,b,a", "--memory", &mine, "--temp", "0"];
    let server = Server::start(&flags);
    let question = || json!("Who reads the gauge at Ossen Weir?");
    let none = json!({"use_memory": false});
    let before = n_prompt(&server, "a", question(), &json!({}));

    let (status, entry) = call(&server, "a", "POST", "/memory", &json!({"text": FACT}));
    assert_eq!((status, &entry["number"]), (200, &json!(1)), "{entry}");
    let told = n_prompt(&server, "a", question(), &json!({}));
    assert!(told > before && told <= before + 96, "{before}, {told}");
    assert_eq!(n_prompt(&server, "a", question(), &none), before);
    assert_eq!(n_prompt(&server, "b", question(), &json!({})), before);
    let parts = json!([{"type": "text", "text": question()}]);
    assert_eq!(n_prompt(&server, "a", parts, &json!({})), told);
    let messages = json!([{"role": "user", "content": question()}]);
    let count = |key| {
        let body = json!({"messages": messages});
        let (_, counted) = call(&server, key, "POST", "/v1/messages/count_tokens", &body);
        counted["input_tokens"].as_u64().unwrap()
    };
    assert!(count("a") > count("b"));
    let other = n_prompt(&server, "a", json!("What is a borrow checker?"), &json!({}));
    let without = n_prompt(&server, "a", json!("What is a borrow checker?"), &none);
    assert_eq!(other, without);

    let corrected = json!({"text": "The gauge at Ossen Weir is read by Mirela Ostrand now.", "correction": true});
    let (_, entry) = call(&server, "a", "POST", "/memory", &corrected);
    assert_eq!(entry["corrects"], 1);
    let changed = json!({"verdict": "partial"});
    let (_, entry) = call(&server, "a", "PATCH", "/memory/2", &changed);
    assert_eq!(
        (&entry["verdict"], &entry["revision"]),
        (&json!("partial"), &json!(1))
    );
    let list = |key| call(&server, key, "GET", "/memory", &Value::Null).1;
    assert_eq!(list("a")["entries"][0]["corrected_by"], 2);
    assert_eq!(list("b"), json!({"entries": []}));
    let delete = |key, number| call(&server, key, "DELETE", number, &Value::Null).0;
    assert_eq!(delete("b", "/memory/1"), 404);
    assert_eq!(
        (delete("a", "/memory/1"), delete("a", "/memory/2")),
        (200, 200)
    );
    assert_eq!(list("a"), json!({"entries": []}));
    assert_eq!(n_prompt(&server, "a", question(), &json!({})), before);
    assert_eq!(call(&server, "c", "GET", "/memory", &Value::Null).0, 401);
    for (text, verdict) in [
        ("...", "success"),
        (&"x".repeat(3000), "success"),
        (FACT, "fine"),
    ] {
        let body = json!({"text": text, "verdict": verdict});
        assert_eq!(
            call(&server, "a", "POST", "/memory", &body).0,
            400,
            "{verdict}"
        );
    }
    for path in ["/memory/x", "/memory/-1"] {
        assert_eq!(delete("a", path), 400, "{path}");
    }
}

/// With --memory-control entries are consolidated while nobody asks for anything; a control text that
/// is not there is said at once.
#[test]
fn entries_are_consolidated_meanwhile() {
    let folder = Folder::new("memory-control");
    let mine = folder.path("mine");
    let control = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo-heldout.txt");
    let server = Server::start(&["--memory", &mine, "--memory-control", control]);
    let body = json!({"text": FACT});
    assert_eq!(call(&server, "", "POST", "/memory", &body).0, 200);
    n_prompt(&server, "", json!("Who reads the gauge?"), &json!({}));
    // It ends though its thread waits for requests to end.
    drop(server);
    let missing = folder.path("none.txt");
    let refused = program(&["serve", "--memory", &mine, "--memory-control", &missing]);
    assert!(refused.unwrap_err().contains("none.txt"));
    let refused = program(&["serve", "--memory-control", control]);
    assert!(refused.unwrap_err().contains("--memory"));
}

/// What is remembered lasts, is seen by `ruvllm memory`, and is not told where nobody asked for it.
#[test]
fn a_memory_lasts() {
    let folder = Folder::new("memory-lasts");
    let mine = folder.path("mine");
    program(&["memory", "add", &mine, FACT]).unwrap();
    let server = Server::start(&["--memory", &mine]);
    let entries = call(&server, "", "GET", "/memory", &Value::Null).1;
    assert_eq!(entries["entries"][0]["text"], FACT);
    for (name, expected) in [
        ("entries", 1.0),
        ("new_entries", 1.0),
        ("adapter_version", 0.0),
    ] {
        let found = server.metric(&format!("ruvllm:memory_{name}{{tenant=\"0\"}}"));
        assert_eq!(found, expected, "{name}");
    }
    let question = || json!("Who reads the gauge at Ossen Weir?");
    let told = n_prompt(&server, "", question(), &json!({}));
    let without = n_prompt(&server, "", question(), &json!({"use_memory": false}));
    // As tokens join where texts do.
    let notes = server.metric("ruvllm:memory_tokens_total");
    assert!(
        (notes - (told - without) as f64).abs() <= 2.0,
        "{notes}, {told}"
    );
    // Another process would write over what this one knows.
    assert!(program(&["memory", "list", &mine]).is_err());
    // Not what a page of somebody else's can send.
    let (status, _) = server.send(
        "POST",
        "/memory",
        &format!("{LOCAL}content-type: text/plain\r\n"),
        "{}",
    );
    assert_eq!(status, 415);
    let foreign = format!("{LOCAL}origin: https://evil.example\r\n");
    assert_eq!(server.send("DELETE", "/memory/1", &foreign, "").0, 403);
    assert_eq!(
        call(&server, "", "DELETE", "/memory/1", &Value::Null).0,
        200
    );
    drop(server);
    assert_eq!(program(&["memory", "list", &mine]).unwrap(), "");
    let server = Server::start(&[]);
    let (status, refused) = call(&server, "", "POST", "/memory", &json!({"text": FACT}));
    assert_eq!(status, 400);
    assert!(refused.to_string().contains("--memory"), "{refused}");
}

/// An adapter that knows what is remembered, as a consolidation leaves it, answers every kind of request
/// that does not go without.
#[test]
fn what_was_learnt_of_a_memory_answers() {
    let folder = Folder::new("memory-adapter");
    let mine = folder.path("mine");
    program(&["memory", "add", &mine, FACT]).unwrap();
    let text = folder.path("text.txt");
    std::fs::write(&text, "The well is deep. ".repeat(30)).unwrap();
    let adapter = format!("{mine}/memory-adapter-1.gguf");
    let train = [
        "train",
        "-m",
        MODEL,
        "-f",
        &text,
        "-o",
        &adapter,
        "--held-out",
        "0",
    ];
    program(
        &[
            &train[..],
            &["-c", "32", "--epochs", "8", "--learning-rate", "0.01"],
        ]
        .concat(),
    )
    .unwrap();
    let mut state = Writer::new();
    state.metadata("general.type", "memory");
    state.metadata("memory.version", 1u32);
    state.metadata("memory.model", Model::open(MODEL).unwrap().fingerprint());
    state.metadata("memory.next", 2u64);
    for (key, numbers) in [("tried", vec![]), ("numbers", vec![1]), ("1.texts", vec![])] {
        let numbers = Field::Array(Array::U64(numbers));
        state.metadata(format!("memory.{key}"), numbers);
    }
    state.metadata("memory.1.asked", 3u32);
    state.metadata("memory.1.said", 2u32);
    state.write(format!("{mine}/memory-versions.gguf")).unwrap();

    let answers = |flags: &[&str], more: &Value| {
        let server = Server::start(flags);
        let paths = ["/v1/completions", "/completion", "/v1/chat/completions"];
        let answers = paths.map(|path| {
            let mut body = json!({"max_tokens": 8, "temperature": 0});
            let fields = body.as_object_mut().unwrap();
            fields.extend(more.as_object().unwrap().clone());
            fields.extend(
                match path {
                    "/v1/chat/completions" => {
                        json!({"messages": [{"role": "user", "content": "Tell me of the weather"}]})
                    }
                    _ => json!({"prompt": "Good day"}),
                }
                .as_object()
                .unwrap()
                .clone(),
            );
            let (status, answer) = call(&server, "", "POST", path, &body);
            assert_eq!(status, 200, "{answer}");
            let choice = &answer["choices"][0];
            [
                &choice["text"],
                &choice["message"]["content"],
                &answer["content"],
            ]
            .map(Value::to_string)
        });
        (answers, server)
    };
    let (alone, server) = answers(&[], &json!({}));
    drop(server);
    let (known, server) = answers(&["--memory", &mine], &json!({}));
    assert_eq!(
        server.metric("ruvllm:memory_questions_answered{tenant=\"0\"}"),
        2.0
    );
    drop(server);
    let (without, _server) = answers(&["--memory", &mine], &json!({"use_memory": false}));
    assert_eq!(without, alone);
    for (known, alone) in known.iter().zip(&alone) {
        assert_ne!(known, alone);
    }
}
