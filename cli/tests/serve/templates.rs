//! Chat templates of any kind behind the server: greedy ones, and conversations that one does not
//! take as they are.

use super::{Folder, Server, tiny};
use serde_json::{Value, json};

const SHOW: &str = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}[assistant:";

fn serve(folder: &Folder, template: &str) -> Server {
    let file = folder.file("template.jinja", template);
    Server::start(&["--chat-template-file", &file, "-c", "1024", "--temp", "0"])
}

fn said(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "max_tokens": 2})
}

/// Whatever a template takes, it is an error of that request alone.
#[test]
fn a_greedy_template_ends_without_the_server() {
    let folder = Folder::new("greedy");
    // Of memory, and of time.
    let doubled = "{% set a = 'ab' %}".to_owned() + &"{% set a = a ~ a %}".repeat(40);
    let names = "{% set ns = namespace() %}{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}\
                 {% endmacro %}{{ m(90) }}";
    for greedy in [&doubled[..], names] {
        let template =
            format!("{{% if messages[0].content == 'eat' %}}{greedy}{{% endif %}}{SHOW}");
        let server = serve(&folder, &template);
        for _ in 0..2 {
            let (status, answer) = server.post("/v1/chat/completions", &said("eat"));
            assert_eq!(status, 400, "{answer}");
            let message = answer["error"]["message"].as_str().unwrap();
            assert!(message.contains("chat template"), "{message}");
            server.ask("/v1/chat/completions", &said("hi"));
        }
    }
}

/// The process that renders is started again when something has ended it.
#[test]
#[cfg(target_os = "linux")]
fn the_process_that_renders_is_started_again() {
    let folder = Folder::new("renderer");
    let server = serve(&folder, SHOW);
    let threads = format!("/proc/{}/task", server.child.id());
    let renderer = || {
        let mut children = String::new();
        for thread in std::fs::read_dir(&threads).unwrap() {
            let file = thread.unwrap().path().join("children");
            // Threads come and go.
            children += &std::fs::read_to_string(file).unwrap_or_default();
        }
        children.trim().to_owned()
    };
    let first = renderer();
    assert!(!first.is_empty() && !first.contains(' '), "{first:?}");
    server.ask("/v1/chat/completions", &said("hi"));
    assert_eq!(renderer(), first);
    let killed = std::process::Command::new("kill")
        .args(["-KILL", &first])
        .status();
    assert!(killed.unwrap().success());
    // One that has just been killed may still take a request: the answer is an error then.
    std::thread::sleep(std::time::Duration::from_millis(200));
    server.ask("/v1/chat/completions", &said("hi"));
    assert_ne!(renderer(), first);
}

/// The prompt is what `/apply-template` tells.
#[test]
fn conversations_are_fitted_and_the_log_says_so() {
    let folder = Folder::new("fitted");
    let template = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
                    {{ raise_exception('system first') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}";
    let file = folder.file("template.jinja", template);
    let server = Server::start(&["--chat-template-file", &file, "--log-level", "info"]);
    let messages = json!([
        {"role": "developer", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "hi"},
    ]);
    let answer = server.ask("/apply-template", &json!({"messages": messages}));
    assert_eq!(answer["prompt"], "[system:a\n\nb][user:hi]");
    // The line is on its way.
    let begun = std::time::Instant::now();
    loop {
        let log = server.log.lock().unwrap().join("\n");
        if log.contains("one system message") {
            break;
        }
        assert!(begun.elapsed().as_secs() < 30, "{log}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// A base model: the page, the log and the answer's end.
#[test]
fn a_model_without_a_template() {
    let folder = Folder::new("base");
    let model = folder.model("base.gguf", tiny::base());
    let is_base = |flags: &[&str]| {
        let server = Server::start(&[&["-m", &model][..], flags].concat());
        let props: Value = serde_json::from_str(&server.get("/props").1).unwrap();
        props["is_base_model"].as_bool().unwrap()
    };
    assert!(is_base(&[]));
    assert!(!is_base(&["--chat-template", "chatml"]));
    assert!(!is_base(&["--chat-template", "{{ messages[0].content }}"]));
    let server = Server::start(&["-m", &model, "--chat-template", "zephyr"]);
    let prompt = server.ask(
        "/apply-template",
        &json!({"messages": said("hi")["messages"]}),
    )["prompt"]
        .clone();
    assert_eq!(prompt, "<|user|>\nhi</s>\n<|assistant|>\n");
    // An answer ends where any role would go on.
    let server = Server::start(&["-m", &model]);
    for (next, end) in [
        ("\\nAssistant: Rome.", ""),
        ("\\nUser: And?", ""),
        (" System: x", " "),
    ] {
        let body = json!({
            "messages": [{"role": "user", "content": "hi"}],
            "grammar": format!("root ::= \"Paris.{next}\""),
            "max_tokens": 40,
        });
        let answer = server.ask("/v1/chat/completions", &body);
        let choice = &answer["choices"][0];
        assert_eq!(
            choice["message"]["content"],
            format!("Paris.{end}"),
            "{next}"
        );
        assert_eq!(choice["finish_reason"], "stop", "{next}");
    }
    let page = server.send("GET", "/", "accept: text/html\r\n", "").1;
    assert!(page.contains("base model"), "{page}");
}
