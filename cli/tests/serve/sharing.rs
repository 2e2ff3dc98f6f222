//! What requests share and choose: prompts that begin alike, the server's context, the precision of
//! keys and values.

use super::{Folder, Server, completion, program, shared, text, tiny};
use serde_json::{Value, json};

fn metric(server: &Server, name: &str) -> f64 {
    let (_, metrics) = server.get("/metrics");
    let line = metrics.lines().find(|line| line.starts_with(name)).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// With --context-shift a request goes on when its context is full, as `generate` does; what that
/// cannot be is refused at the start.
#[test]
fn contexts_that_are_full_go_on() {
    let shift = [
        "-c",
        "192",
        "--temp",
        "0",
        "--context-shift",
        "--keep",
        "10",
    ];
    let server = Server::start(&shift);
    let mut body = completion("Ownership is", 400);
    body["ignore_eos"] = true.into();
    let answer = server.ask("/v1/completions", &body);
    assert_eq!(answer["usage"]["completion_tokens"], 400);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let flags = [
        "generate",
        "-p",
        "Ownership is",
        "-n",
        "400",
        "--ignore-eos",
        "--seed",
        "1",
    ];
    let alone = program(&[&flags[..], &shift].concat()).unwrap();
    assert_eq!(alone.trim_end(), text(&answer).trim_end());
    // Without it the answer ends.
    let server = Server::start(&["-c", "192", "--temp", "0"]);
    let ended = server.ask("/v1/completions", &body);
    assert!(ended["usage"]["completion_tokens"].as_u64() < Some(192));
    let begin = text(&ended).len();
    assert_eq!(text(&ended), &text(&answer)[..begin]);
    for (flags, said) in [
        (&["--context-shift", "--kv-tiers"][..], "precision by age"),
        (&["--context-shift", "-ctk", "q4_0"], "fewer than 8 bits"),
        (
            &["--context-shift", "--keep", "500", "-c", "128"],
            "context_shift is 500",
        ),
        (&["--keep", "5"], "--context-shift"),
        (&["--context-shift", "--learn", "nowhere"], "--learn"),
    ] {
        let refused = program(&[&["serve", "--port", "0"], flags].concat()).unwrap_err();
        assert!(refused.contains(said), "{flags:?}: {refused}");
    }
}

/// Four answers to one prompt, and four requests whose prompts begin alike, compute it once.
#[test]
fn prompts_that_begin_alike_are_computed_once() {
    let server = Server::start(&["-c", "512", "--temp", "0"]);
    let computed = || metric(&server, "llamacpp:prompt_tokens_total");
    let long = "A slice is a reference to a sequence of elements. ".repeat(20);
    let tokens = server.ask("/tokenize", &json!({"content": long, "add_special": true}));
    let n_shared = tokens["tokens"].as_array().unwrap().len() as f64;
    let answer = server.ask(
        "/v1/completions",
        &json!({"prompt": long, "n": 4, "max_tokens": 4}),
    );
    let choices = answer["choices"].as_array().unwrap();
    assert!(
        choices
            .iter()
            .all(|choice| choice["text"] == choices[0]["text"])
    );
    assert!(computed() < n_shared + 8.0, "{} of {n_shared}", computed());

    let before = computed();
    let long = long.replace("slice", "vector");
    let ends = ["Ownership", "Lifetimes", "Traits", "Closures"];
    std::thread::scope(|scope| {
        let server = &server;
        for end in ends {
            let prompt = format!("{long}{end}");
            scope.spawn(move || server.ask("/v1/completions", &completion(&prompt, 4)));
        }
    });
    let most = n_shared + 4.0 * 10.0;
    assert!(
        computed() - before < most,
        "{} of {n_shared}",
        computed() - before
    );
}

/// Keys and values of all requests are bounded by the memory that there is, also without a limit.
#[test]
fn the_pool_has_a_budget() {
    let server = shared();
    server.ask("/v1/completions", &completion("Ownership is", 4));
    let usage = metric(&server, "llamacpp:kv_cache_usage_ratio");
    assert!(usage > 0.0 && usage < 1.0, "{usage}");
}

/// A server has the model's own context, as far as its memory allows; elsewhere it is shorter.
#[test]
fn the_context_is_the_models_own() {
    let folder = Folder::new("context");
    let model = folder.model("model.gguf", tiny::reranker());
    let n_ctx = |flags: &[&str]| {
        let trained = [
            "-m",
            &model,
            "--override-kv",
            "qwen3.context_length=int:40000",
        ];
        let server = Server::start(&[&trained, flags].concat());
        let props: Value = serde_json::from_str(&server.get("/props").1).unwrap();
        props["default_generation_settings"]["n_ctx"].as_u64()
    };
    assert_eq!(n_ctx(&[]), Some(40_000));
    assert_eq!(n_ctx(&["-c", "5000"]), Some(5000));
    assert_eq!(n_ctx(&["-c", "0"]), Some(40_000));
    // Keys and values of 40,000 tokens take 4.9 MiB.
    assert_eq!(n_ctx(&["--memory-limit", "6M"]), Some(20_000));
}

/// A request chooses the precision of its keys and values, and has the text of that precision.
#[test]
fn requests_choose_the_precision() {
    let server = shared();
    let prompt = "Ownership is";
    let with = |kv_type: &str| {
        let body = json!({"prompt": prompt, "max_tokens": 60, "kv_type": kv_type});
        server.post("/v1/completions", &body)
    };
    let of_program = program(&[
        "-p",
        prompt,
        "-n",
        "60",
        "--temp",
        "0",
        "-c",
        "512",
        "--no-display-prompt",
        "-ctk",
        "q4_0",
        "-ctv",
        "q4_0",
    ]);
    let (status, answer) = with("q4_0");
    assert_eq!(status, 200, "{answer}");
    assert_eq!(
        text(&answer).trim_end_matches('\n'),
        of_program.unwrap().trim_end_matches('\n')
    );
    assert_ne!(text(&with("f16").1), text(&answer));
    let (status, answer) = with("q3");
    assert_eq!(
        (status, &answer["error"]["param"]),
        (400, &json!("kv_type"))
    );
}
