//! A server with several models: which are loaded, when one goes, who may say so; adapters that
//! come and go; what requests say of the prefix cache.

use super::{Folder, Server, completion, program, text, tiny};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

pub(super) const JSON: &str = "content-type: application/json\r\n";

/// A folder with a chat, an embedding and a rerank model.
pub(super) fn models(name: &str) -> Folder {
    let folder = Folder::new(name);
    folder.model("chat.gguf", tiny::base());
    folder.model("embed.gguf", tiny::encoder(false));
    folder.model("rank.gguf", tiny::reranker());
    folder
}

fn house(folder: &Folder, flags: &[&str]) -> Server {
    let of_folder = ["--models-dir", folder.0.to_str().unwrap(), "--temp", "0"];
    Server::start(&[&of_folder[..], flags].concat())
}

/// Status and body of a request to a path that changes the server.
pub(super) fn change(server: &Server, path: &str, headers: &str, body: &Value) -> (u16, String) {
    let body = body.to_string();
    let host = match headers.contains("host: ") {
        true => String::new(),
        false => format!("host: {}\r\n", server.address),
    };
    let mut stream = server.connect();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\n{host}connection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (
        head.split(' ').nth(1).unwrap().parse().unwrap(),
        body.to_owned(),
    )
}

pub(super) fn states(server: &Server) -> Vec<(String, String)> {
    let list: Value = serde_json::from_str(&server.get("/v1/models").1).unwrap();
    let list = list["data"].as_array().unwrap().clone();
    let string = |value: &Value| value.as_str().unwrap().to_owned();
    list.iter()
        .map(|model| (string(&model["id"]), string(&model["status"]["value"])))
        .collect()
}

pub(super) fn state(server: &Server, name: &str) -> String {
    let states = states(server);
    states.into_iter().find(|(id, _)| id == name).unwrap().1
}

fn ask_each(server: &Server) -> [Value; 3] {
    let mut chat = completion("abc", 4);
    chat["model"] = "chat".into();
    [
        server.ask("/v1/completions", &chat)["choices"].clone(),
        server.ask(
            "/v1/embeddings",
            &json!({"model": "embed.gguf", "input": "abc"}),
        )["data"]
            .clone(),
        server.ask(
            "/v1/rerank",
            &json!({"model": "rank", "query": "a", "documents": ["b", "c"]}),
        )["results"]
            .clone(),
    ]
}

/// Three models, two of which are loaded at a time: each answers as it does alone.
#[test]
fn the_one_used_least_recently_goes() {
    let folder = models("house");
    let server = house(&folder, &["--models-max", "2"]);
    let unloaded = |name: &str| (format!("{name}.gguf"), "unloaded".to_owned());
    assert_eq!(states(&server), ["chat", "embed", "rank"].map(unloaded));
    assert_eq!(server.get("/health").0, 200);
    let answers = ask_each(&server);
    assert_eq!(state(&server, "chat.gguf"), "unloaded");
    assert_eq!(state(&server, "embed.gguf"), "loaded");
    assert_eq!(ask_each(&server), answers);
    assert_eq!(server.metric("ruvllm:model_loads_total"), 6.0);
    for (name, i) in [("chat.gguf", 0), ("embed.gguf", 1), ("rank.gguf", 2)] {
        let alone = Server::start(&["-m", &folder.path(name), "--temp", "0"]);
        assert_eq!(ask_each_of(&alone, i), answers[i], "{name}");
    }
    // Which one has to be said, and there are no others.
    let (status, error) = server.post("/v1/completions", &completion("a", 1));
    assert!(
        status == 400 && error["error"]["param"] == "model",
        "{error}"
    );
    for name in [
        "other",
        "../chat.gguf",
        "chat.gguf/",
        "/etc/passwd",
        "chat\u{0}",
        "",
    ] {
        let body = json!({"model": name, "prompt": "a"});
        assert_eq!(server.post("/v1/completions", &body).0, 404, "{name:?}");
    }
}

fn ask_each_of(server: &Server, i: usize) -> Value {
    match i {
        0 => server.ask("/v1/completions", &completion("abc", 4))["choices"].clone(),
        1 => server.ask("/v1/embeddings", &json!({"input": "abc"}))["data"].clone(),
        _ => server.ask(
            "/v1/rerank",
            &json!({"query": "a", "documents": ["b", "c"]}),
        )["results"]
            .clone(),
    }
}

/// Requests for one model load it once; many over all of them are all answered, also where clients
/// go away.
#[test]
fn many_ask_at_once() {
    let folder = models("house-many");
    let server = &house(&folder, &["--models-max", "2"]);
    let body = json!({"model": "chat", "prompt": "abc", "max_tokens": 2});
    std::thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| server.ask("/v1/completions", &body));
        }
    });
    assert_eq!(server.metric("ruvllm:model_loads_total"), 1.0);
    let answers = &ask_each(server);
    std::thread::scope(|scope| {
        for i in 0..6 {
            scope.spawn(move || {
                for _ in 0..5 {
                    if i == 5 {
                        // Sends and goes.
                        let body = r#"{"model": "rank", "query": "a", "documents": ["b"]}"#;
                        let mut stream = server.connect();
                        write!(
                            stream,
                            "POST /v1/rerank HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
                            body.len()
                        )
                        .unwrap();
                        std::thread::sleep(Duration::from_millis(20));
                        continue;
                    }
                    assert_eq!(&ask_each(server), answers);
                }
            });
        }
    });
    server.is_idle_soon();
    let loaded = states(server)
        .iter()
        .filter(|(_, state)| state == "loaded")
        .count();
    assert!(loaded <= 2, "{loaded}");
}

/// A context for all of them is longer than what some have: those have their own.
#[test]
fn one_context_for_all() {
    let folder = models("house-context");
    let server = house(&folder, &["-c", "4096"]);
    let answers = ask_each(&server);
    assert_eq!(ask_each(&house(&folder, &[])), answers);
    let refused = program(&[
        "serve",
        "--port",
        "0",
        "-c",
        "4096",
        "-m",
        &folder.path("embed.gguf"),
    ]);
    let said = refused.unwrap_err();
    assert!(said.contains("so many positions"), "{said}");
}

/// Loading and unloading by hand; an idle model goes by itself.
#[test]
fn by_hand_and_when_idle() {
    let folder = models("house-hand");
    let server = house(&folder, &["--sleep-idle-seconds", "1"]);
    let by_hand = |what: &str, name: &str| {
        change(
            &server,
            &format!("/models/{what}"),
            JSON,
            &json!({"model": name}),
        )
    };
    assert_eq!(
        by_hand("load", "chat.gguf"),
        (200, "{\"success\":true}".into())
    );
    assert_eq!(state(&server, "chat.gguf"), "loaded");
    assert_eq!(by_hand("unload", "chat").0, 200);
    assert_eq!(by_hand("unload", "chat").0, 400);
    assert_eq!(by_hand("load", "none").0, 404);
    assert_eq!(by_hand("load", "embed").0, 200);
    let begun = Instant::now();
    while state(&server, "embed.gguf") == "loaded" {
        assert!(begun.elapsed() < Duration::from_secs(20), "it stays");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(begun.elapsed() >= Duration::from_millis(700));
}

/// A model that has to stay makes no room: the refusal says what there is.
#[test]
fn no_room() {
    let folder = models("house-room");
    folder.file("broken.gguf", "GGUF and no more");
    folder.model("more.gguf", tiny::base());
    let server = house(&folder, &["--models-max", "1"]);
    let stay = json!({"model": "chat", "prompt": "", "keep_alive": -1});
    assert_eq!(server.ask("/api/generate", &stay)["done_reason"], "load");
    let (status, error) = server.post("/v1/embeddings", &json!({"model": "embed", "input": "a"}));
    let message = error["error"]["message"].as_str().unwrap();
    assert!(
        status == 503
            && message.contains("embed.gguf takes")
            && message.contains("at most 1 models"),
        "{error}"
    );
    assert_eq!(state(&server, "chat.gguf"), "loaded");
    server.ask("/api/generate", &json!({"model": "chat", "keep_alive": 0}));
    server.ask("/v1/embeddings", &json!({"model": "embed", "input": "a"}));

    let (status, error) = server.post(
        "/v1/completions",
        &json!({"model": "broken", "prompt": "a"}),
    );
    let message = error["error"]["message"].as_str().unwrap();
    assert!(
        status == 500 && message.contains("broken.gguf cannot be loaded"),
        "{error}"
    );
    let list: Value = serde_json::from_str(&server.get("/v1/models").1).unwrap();
    let of = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .find(|of| of["id"] == "broken.gguf")
        .unwrap();
    assert_eq!(
        (&of["status"]["value"], &of["status"]["failed"]),
        (&json!("unloaded"), &json!(true))
    );
    // A file that vanishes fails only who asks for it.
    std::fs::remove_file(folder.path("rank.gguf")).unwrap();
    let (status, _) = server.post(
        "/v1/rerank",
        &json!({"model": "rank", "query": "a", "documents": ["b"]}),
    );
    assert_eq!(status, 500);
    server.ask("/v1/embeddings", &json!({"model": "embed", "input": "a"}));

    // By memory: what all take together is planned, and either takes as much as the other.
    let refused = (1..24).any(|i| {
        let limit = format!("{}K", (400.0 * 1.4f64.powi(i)) as u64);
        let server = house(&folder, &["--memory-limit", &limit]);
        let stay = json!({"model": "chat", "prompt": "", "keep_alive": -1});
        if server.post("/api/generate", &stay).0 != 200 {
            return false;
        }
        let (status, error) =
            server.post("/v1/completions", &json!({"model": "more", "prompt": "a"}));
        let message = error["error"]["message"].as_str().unwrap_or_default();
        let is_told = message.contains("more.gguf takes") && message.contains("stay loaded take");
        assert!(status == 503 && is_told, "{limit}: {error}");
        true
    });
    assert!(refused, "one of these limits has room for one model");
}

/// Flags of each model from a file; what is wrong with it is told with its line.
#[test]
fn presets() {
    let folder = models("house-preset");
    let file = folder.file(
        "preset.ini",
        &format!(
            "version = 1\n[*]\nparallel = 2\n[small]\nmodel = {}\nctx-size = 64\nload-on-startup = 1\n\
             [large]\nm = {}\nctx-size = 256\n",
            folder.path("chat.gguf"),
            folder.path("chat.gguf")
        ),
    );
    let server = Server::start(&["--models-preset", &file, "--temp", "0"]);
    let loaded = ("small".to_owned(), "loaded".to_owned());
    assert_eq!(
        states(&server),
        [loaded, ("large".into(), "unloaded".into())]
    );
    let n_ctx = |name: &str| {
        let props: Value =
            serde_json::from_str(&server.get(&format!("/props?model={name}")).1).unwrap();
        (
            props["default_generation_settings"]["n_ctx"].clone(),
            props["total_slots"].clone(),
        )
    };
    assert_eq!(n_ctx("small"), (json!(64), json!(2)));
    assert_eq!(n_ctx("large"), (json!(256), json!(2)));
    let wrong = folder.file("wrong.ini", "[a]\nmodel = x\nctx-sise = 3\n");
    let said = program(&["serve", "--port", "0", "--models-preset", &wrong]).unwrap_err();
    assert!(
        said.contains("line 3, [a]: \"ctx-sise\" is no flag"),
        "{said}"
    );
    let said =
        program(&["serve", "--port", "0", "--models-dir", &folder.path("none")]).unwrap_err();
    assert!(said.contains("none"), "{said}");
    // Several files, each by its name.
    let server = Server::start(&[
        "-m",
        &folder.path("chat.gguf"),
        "-m",
        &folder.path("embed.gguf"),
    ]);
    assert_eq!(state(&server, "chat.gguf"), "loaded");
    assert_eq!(state(&server, "embed.gguf"), "loaded");
}

/// A link that leads out of the folder is no model.
#[cfg(unix)]
#[test]
fn links_lead_nowhere() {
    let (folder, other) = (models("house-links"), Folder::new("house-elsewhere"));
    let target = other.model("secret.gguf", tiny::base());
    std::os::unix::fs::symlink(target, folder.path("link.gguf")).unwrap();
    let server = house(&folder, &[]);
    assert!(!states(&server).iter().any(|(id, _)| id.contains("link")));
}

/// Paths that change the server want JSON, the key, and no foreign page.
#[test]
fn who_may_change() {
    let folder = models("house-guard");
    let server = house(&folder, &[]);
    let body = &json!({"model": "chat"});
    let load = |headers: &str| change(&server, "/models/load", headers, body).0;
    assert_eq!(load("content-type: text/plain\r\n"), 415);
    assert_eq!(load(""), 415);
    assert_eq!(
        load(&format!("{JSON}origin: https://evil.example\r\n")),
        403
    );
    assert_eq!(load(&format!("{JSON}origin: null\r\n")), 403);
    assert_eq!(load(&format!("{JSON}host: evil.example\r\n")), 403);
    assert_eq!(state(&server, "chat.gguf"), "unloaded");
    assert_eq!(
        load(&format!("{JSON}origin: http://{}\r\n", server.address)),
        200
    );
    let server = house(&folder, &["--api-key", "secret"]);
    let load = |headers: &str| change(&server, "/models/load", headers, body).0;
    assert_eq!(load(JSON), 401);
    assert_eq!(load(&format!("{JSON}authorization: Bearer other\r\n")), 401);
    assert_eq!(
        load(&format!("{JSON}authorization: Bearer secret\r\n")),
        200
    );
    for path in [
        "/lora-adapters",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ] {
        assert_eq!(change(&server, path, JSON, body).0, 401, "{path}");
    }
}

/// Adapters come from one folder by name, change their scale, and go.
#[test]
fn live_adapters() {
    use ruvllm::lora::Adapter;
    let folder = Folder::new("live-adapters");
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    );
    let model = ruvllm::Model::open(path).unwrap();
    for name in ["one.gguf", "two.gguf"] {
        let adapter = Adapter::zeros(&model, 1, 1, |_| true).unwrap();
        adapter.save(folder.path(name)).unwrap();
    }
    folder.file("bad.gguf", "no adapter");
    let dir = folder.0.to_str().unwrap();
    let server = Server::start(&["-c", "512", "--temp", "0", "-a", "m", "--lora-dir", dir]);
    let load = |name: &str, file: &str| {
        let body = json!({"lora_name": name, "lora_path": file});
        change(&server, "/v1/load_lora_adapter", JSON, &body)
    };
    let list = || -> Value { serde_json::from_str(&server.get("/lora-adapters").1).unwrap() };
    let (status, said) = load("a", "one.gguf");
    assert!(
        status == 200 && said.contains("'a' added successfully"),
        "{said}"
    );
    assert_eq!(load("a", "two.gguf").0, 400, "there is one of that name");
    assert_eq!(load("b", "two.gguf").0, 200);
    for (name, file) in [
        ("c", "../one.gguf"),
        ("c", "/etc/passwd"),
        ("c", "a\u{0}"),
        ("c", ""),
        ("c", "bad.gguf"),
        ("", "one.gguf"),
        ("x/y", "one.gguf"),
        ("x:y", "one.gguf"),
    ] {
        assert_eq!(load(name, file).0, 400, "{name:?} {file:?}");
    }
    assert_eq!(load("c", "none.gguf").0, 404);
    assert_eq!(
        (list().as_array().unwrap().len(), &list()[0]["scale"]),
        (2, &json!(0.0))
    );
    let models = server.get("/v1/models").1;
    assert!(
        models.contains("\"m:a\"") && models.contains("\"m:b\""),
        "{models}"
    );
    // Zeros change no text, but the weights are others: a prompt is computed again.
    let prompt = "A prompt that is long enough to be found again. ".repeat(4);
    let ask = |model: &str| {
        let mut body = completion(&prompt, 4);
        body["model"] = model.into();
        let answer = server.ask("/v1/completions", &body);
        let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
        (text(&answer).to_owned(), cached.as_u64().unwrap())
    };
    let (plain, _) = ask("m");
    assert!(ask("m").1 > 20);
    assert_eq!(ask("m:a"), (plain.clone(), 0));
    assert!(ask("m:a").1 > 20);
    let scale = |list: Value| change(&server, "/lora-adapters", JSON, &list).0;
    assert_eq!(scale(json!([{"id": 1, "scale": 0.5}])), 200);
    assert_eq!(
        (&list()[0]["scale"], &list()[1]["scale"]),
        (&json!(0.0), &json!(0.5))
    );
    assert_eq!(ask("m"), (plain, 0), "now with the second one");
    for wrong in [
        json!([{"id": 2, "scale": 1}]),
        json!([{"id": 0}]),
        json!({"id": 0, "scale": 1}),
    ] {
        assert_eq!(scale(wrong.clone()), 400, "{wrong}");
    }
    assert_eq!(scale(json!([])), 200);
    let unload = |name: &str| {
        change(
            &server,
            "/v1/unload_lora_adapter",
            JSON,
            &json!({"lora_name": name}),
        )
        .0
    };
    assert_eq!((unload("a"), unload("a"), unload("b")), (200, 404, 200));
    assert_eq!(list(), json!([]));
    assert!(ask("m").1 > 20, "without adapters, as at the start");
}

/// A request may leave no trace in the prefix cache, or read it alone.
#[test]
fn what_the_cache_keeps() {
    let server = Server::start(&["-c", "512", "--temp", "0"]);
    let prompt = |word: &str| format!("{word} is long enough to be found again. ").repeat(8);
    let ask = |word: &str, more: Value| {
        let mut body = completion(&prompt(word), 4);
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let answer = server.ask("/v1/completions", &body);
        let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
        (text(&answer).to_owned(), cached.as_u64().unwrap())
    };
    let off = json!({"cache_prompt": false});
    let (first, n) = ask("Alpha", off.clone());
    assert_eq!((n, ask("Alpha", off.clone())), (0, (first.clone(), 0)));
    let read = json!({"cache_prompt": "read"});
    assert_eq!(ask("Alpha", read.clone()), (first.clone(), 0));
    assert_eq!(
        ask("Alpha", json!({})),
        (first.clone(), 0),
        "none of them stored it"
    );
    assert_eq!(server.metric("ruvllm:prefix_cache_hits_total"), 0.0);
    assert!(ask("Alpha", read).1 > 20);
    assert!(ask("Alpha", json!({"cache_prompt": true})).1 > 20);
    assert_eq!(ask("Alpha", off), (first, 0), "what is there is not read");
    assert_eq!(ask("Alpha", json!({"min_cache_tokens": 5000})).1, 0);
    assert!(server.metric("ruvllm:prefix_cache_lookups_total") >= 4.0);
    assert!(server.metric("ruvllm:prefix_cache_tokens_saved_total") > 40.0);
    for wrong in [json!("write"), json!(1)] {
        let mut body = completion("a", 1);
        body["cache_prompt"] = wrong;
        assert_eq!(server.post("/v1/completions", &body).0, 400);
    }
}
