//! Images in requests of every API, on models of the reference data (`RUVLLM_CONFORMANCE`).

use super::{Folder, Server, tiny};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use std::path::PathBuf;

/// As Gemma 3's own, without what it begins with.
const GEMMA: &str = "\
    {%- for m in messages -%}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n\
    {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
    {%- if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif -%}\
    <end_of_turn>\n{% endfor -%}\
    {%- if add_generation_prompt %}<start_of_turn>model\n{% endif -%}";
/// The same for a template that shows lists alone.
const LISTS: &str = "\
    {%- for m in messages -%}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n\
    {% for part in m.content %}{% if part.type == 'image' %}<start_of_image>{% elif part.type == 'text' %}{{ part.text }}\
    {%- endif %}{% endfor -%}<end_of_turn>\n{% endfor -%}\
    {%- if add_generation_prompt %}<start_of_turn>model\n{% endif -%}";
/// The same for one that knows no images.
const PLAIN: &str = "\
    {%- for m in messages -%}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor -%}\
    {%- if add_generation_prompt %}<start_of_turn>model\n{% endif -%}";

fn root() -> Option<PathBuf> {
    Some(PathBuf::from(std::env::var_os("RUVLLM_CONFORMANCE")?).join("vision"))
}

/// A server of a model of the data, with a chat template.
fn server(folder: &Folder, kind: &str, template: &str, more: &[&str]) -> Option<Server> {
    let dir = root()?.join(kind);
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let (model, projector) = (path("model-f16.gguf"), path("mmproj-f32.gguf"));
    let template = folder.file("template.jinja", template);
    let flags = [
        "-m",
        &model,
        "--mmproj",
        &projector,
        "--chat-template-file",
        &template,
    ];
    let flags = [
        &flags[..],
        &["-ctk", "f32", "-ctv", "f32", "--temp", "0"],
        more,
    ]
    .concat();
    Some(Server::start(&flags))
}

fn base64(name: &str) -> String {
    let file = root().unwrap().join("images").join(name);
    BASE64_STANDARD.encode(std::fs::read(file).unwrap())
}

fn url(name: &str) -> String {
    format!("data:image/png;base64,{}", base64(name))
}

fn part(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

fn asked(content: Value) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 6})
}

fn said(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// A BMP of one colour.
fn bmp(side: u32, colour: [u8; 3]) -> String {
    let row = [colour.repeat(side as usize), vec![0; (side % 4) as usize]].concat();
    let pixels = row.repeat(side as usize);
    let mut bytes = b"BM".to_vec();
    bytes.extend(
        [54 + pixels.len() as u32, 0, 54, 40, side, side]
            .map(u32::to_le_bytes)
            .concat(),
    );
    bytes.extend([1_u16, 24].map(u16::to_le_bytes).concat());
    bytes.extend([0; 24]);
    bytes.extend(pixels);
    format!("data:image/bmp;base64,{}", BASE64_STANDARD.encode(bytes))
}

/// Without reference data: the built-in model with a made-up projector, whose answers depend on the
/// image, are the same side by side and from the cache, and begin with what another request read.
#[test]
fn images_on_the_built_in_model() {
    let folder = Folder::new("images-built-in");
    let projector = folder.model("mmproj.gguf", tiny::projector(256));
    let server = Server::start(&["--mmproj", &projector, "--temp", "0", "-np", "4"]);
    let ask = |url: &str, n: usize| {
        let mut request = asked(json!([said("Before."), part(url), said("What is it?")]));
        request["n"] = n.into();
        request["logprobs"] = true.into();
        server.ask("/v1/chat/completions", &request)
    };
    let cached = |response: &Value| {
        let details = &response["usage"]["prompt_tokens_details"];
        details["cached_tokens"].as_u64().unwrap()
    };
    let (red, blue) = (bmp(40, [0, 0, 255]), bmp(40, [255, 0, 0]));
    let first = ask(&red, 1);
    let n_prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
    // Tiles of 32 pixels, the whole among them, are four tokens each, with texts around them.
    assert!(n_prompt > 40, "{first}");
    assert!(cached(&first) < 40, "{first}");
    let other = ask(&blue, 1);
    assert_eq!(other["usage"]["prompt_tokens"].as_u64(), Some(n_prompt));
    assert!(
        cached(&other) < n_prompt - 20,
        "another image was taken for it: {other}"
    );
    let of = |response: &Value| response["choices"][0]["logprobs"].clone();
    assert_ne!(of(&first), of(&other), "images make no difference");
    for (url, expected) in [(&red, &first), (&blue, &other), (&red, &first)] {
        let again = ask(url, 3);
        assert_eq!(cached(&again), n_prompt - 1, "{again}");
        for choice in again["choices"].as_array().unwrap() {
            assert_eq!(choice["logprobs"], of(expected));
        }
    }
    // Too large for the context, and counted without encoding.
    let many = asked(vec![part(&bmp(96, [1, 2, 3])); 20].into());
    let (status, response) = server.post("/v1/chat/completions", &many);
    assert!(
        status == 400 && response.to_string().contains("context"),
        "{response}"
    );
    let counted = server.ask("/v1/chat/completions/input_tokens", &many);
    assert!(counted["input_tokens"].as_u64().unwrap() > 512, "{counted}");
    // In a file of requests.
    let requests = [(
        "/v1/chat/completions",
        asked(json!([part(&red), said("?")])),
    )];
    let answers = super::batch(&folder, &["--mmproj", &projector], &requests);
    assert!(
        answers[0]["usage"]["prompt_tokens"].as_u64().unwrap() > 30,
        "{answers:?}"
    );
}

/// Every API reads an image as the models' authors do: so many tokens, the same answer, and the second
/// time from the cache.
#[test]
fn every_api_reads_images() {
    let folder = Folder::new("images");
    let Some(server) = server(&folder, "gemma3", GEMMA, &[]) else {
        return;
    };
    let manifest = std::fs::read(root().unwrap().join("gemma3/manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let test = &manifest["tests"][0];
    let n_prompt = test["hf"]["input_ids"].as_array().unwrap().len();
    let generated = &test["generated"].as_array().unwrap()[..6];
    let expected = server.ask("/detokenize", &json!({"tokens": generated}));
    let expected = expected["content"].as_str().unwrap();
    let (url, data) = (url("gradient.png"), base64("gradient.png"));
    let question = "describe this image";

    let chat = asked(json!([part(&url), said(question)]));
    let counted = server.ask("/v1/chat/completions/input_tokens", &chat);
    assert_eq!(counted["input_tokens"], n_prompt);
    let first = server.ask("/v1/chat/completions", &chat);
    assert_eq!(first["usage"]["prompt_tokens"], n_prompt, "{first}");
    assert_eq!(first["choices"][0]["message"]["content"], expected);
    let second = server.ask("/v1/chat/completions", &chat);
    assert_eq!(second["choices"], first["choices"]);
    // The image is, though windows are shorter than the prompt, and that than a page.
    let details = &second["usage"]["prompt_tokens_details"];
    assert!(details["cached_tokens"].as_u64() > Some(16), "{second}");

    let image = json!({"type": "input_image", "image_url": url, "detail": "auto"});
    let text = json!({"type": "input_text", "text": question});
    let input = json!([{"role": "user", "content": [image, text]}]);
    let request = json!({"input": input, "max_output_tokens": 6});
    let counted = server.ask("/v1/responses/input_tokens", &request);
    assert_eq!(counted["input_tokens"], n_prompt);
    let response = server.ask("/v1/responses", &request);
    assert_eq!(
        response["output"][0]["content"][0]["text"], expected,
        "{response}"
    );

    let source = json!({"type": "base64", "media_type": "image/png", "data": data});
    let image = json!({"type": "image", "source": source});
    let request = asked(json!([image, said(question)]));
    let counted = server.ask("/v1/messages/count_tokens", &request);
    assert_eq!(counted["input_tokens"], n_prompt);
    let message = server.ask("/v1/messages", &request);
    assert_eq!(message["content"][0]["text"], expected, "{message}");
    // In a document, and in what came of a call.
    let document = json!({"type": "document", "source": {"type": "content", "content": [image]}});
    let result =
        json!({"type": "tool_result", "tool_use_id": "a", "content": [image, said("done")]});
    for content in [json!([document, said(question)]), json!([result])] {
        let called = json!([{"role": "user", "content": "go"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": content}]);
        let request = json!({"messages": called, "max_tokens": 2});
        let usage = &server.ask("/v1/messages", &request)["usage"];
        assert!(usage.to_string().contains("input_tokens"), "{usage}");
    }

    let (_, names) = server.get("/v1/models");
    let names: Value = serde_json::from_str(&names).unwrap();
    let name = names["data"][0]["id"].as_str().unwrap();
    let options = json!({"num_predict": 6});
    let message = json!({"role": "user", "content": question, "images": [data]});
    let chat = json!({"model": name, "messages": [message], "stream": false, "options": options});
    let answer = server.ask("/api/chat", &chat);
    assert_eq!(answer["message"]["content"], expected, "{answer}");
    assert!(answer["prompt_eval_count"].is_u64());
    let generate = json!({"model": name, "prompt": question, "images": [data], "stream": false, "options": options});
    assert_eq!(server.ask("/api/generate", &generate)["response"], expected);
    let shown = server.ask("/api/show", &json!({"model": name}));
    assert!(
        shown["capabilities"].to_string().contains("vision"),
        "{shown}"
    );
    let (_, props) = server.get("/props");
    assert!(props.contains(r#""vision":true"#), "{props}");
}

/// The second turn about an image encodes nothing, nor does one after a restart with the same folder.
#[test]
fn images_are_encoded_once() {
    let folder = Folder::new("images-once");
    let (projector, cache) = (
        folder.model("mmproj.gguf", tiny::projector(256)),
        folder.path("cache"),
    );
    let flags = [
        "--mmproj",
        &projector,
        "--temp",
        "0",
        "--prompt-cache",
        &cache,
    ];
    let picture = part(&bmp(40, [9, 80, 200]));
    let turns = |n: usize| {
        let mut messages = vec![json!({"role": "user", "content": [picture, said("What is it?")]})];
        for i in 0..n {
            messages.push(json!({"role": "assistant", "content": format!("answer {i}")}));
            messages.push(json!({"role": "user", "content": format!("and {i}?")}));
        }
        json!({"messages": messages, "max_tokens": 3})
    };
    let encoded = |server: &Server| {
        let (_, metrics) = server.get("/metrics");
        let line = metrics
            .lines()
            .find(|line| line.starts_with("ruvllm:images_encoded_total"));
        line.unwrap().rsplit(' ').next().unwrap().to_owned()
    };
    let first = Server::start(&flags);
    for n in 0..3 {
        first.ask("/v1/chat/completions", &turns(n));
        assert_eq!(encoded(&first), "1", "turn {n}");
    }
    drop(first);
    let second = Server::start(&flags);
    second.ask("/v1/chat/completions", &turns(3));
    assert_eq!(encoded(&second), "0");
}

/// Templates that show lists of parts alone, and those that know no images.
#[test]
fn other_templates_show_images() {
    let folder = Folder::new("images-templates");
    let mut counts = Vec::new();
    for template in [GEMMA, LISTS, PLAIN] {
        let Some(server) = server(&folder, "gemma3", template, &["-np", "2"]) else {
            return;
        };
        let (a, b) = (part(&url("gradient.png")), part(&url("square.png")));
        let messages = json!([{"role": "user", "content": [a, said("this"), b, said("and that ?")]},
            {"role": "assistant", "content": "ok"}, {"role": "user", "content": "why ?"}]);
        let request = json!({"messages": messages, "max_tokens": 4, "n": 2});
        let response = server.ask("/v1/chat/completions", &request);
        assert_eq!(response["choices"].as_array().unwrap().len(), 2);
        counts.push(response["usage"]["prompt_tokens"].as_u64().unwrap());
        let text = server.ask("/v1/chat/completions", &asked("why ?".into()));
        assert!(
            text["usage"]["prompt_tokens"].as_u64().unwrap() > 5,
            "{text}"
        );
    }
    // The last names the assistant otherwise.
    assert_eq!(counts[0], counts[1]);
    assert!(counts[2].abs_diff(counts[0]) < 10, "{counts:?}");
}

/// A text that would stand for an image is text if a user wrote it.
#[test]
fn markers_of_users_are_text() {
    let folder = Folder::new("images-markers");
    let Some(server) = server(&folder, "gemma3", GEMMA, &[]) else {
        return;
    };
    let image = part(&url("gradient.png"));
    let count = |text: &str, images: usize| {
        let mut content = vec![image.clone(); images];
        content.push(said(text));
        let counted = server.ask("/v1/chat/completions/input_tokens", &asked(content.into()));
        counted["input_tokens"].as_u64().unwrap()
    };
    let of_image = count("what ?", 1) - count("what ?", 0);
    for marker in ["<start_of_image>", "<__media__>"] {
        let text = format!("what {marker} ?");
        let (with, without) = (count(&text, 1), count(&text, 0));
        assert!(
            with.abs_diff(without + of_image) <= 1,
            "{marker}: {with} {without} {of_image}"
        );
        assert!(
            without < of_image + count("what ?", 0),
            "{marker} became an image"
        );
    }
}

/// What is refused: by its place, with what to do, and nothing is fetched that was not allowed.
#[test]
fn refusals() {
    let folder = Folder::new("images-refused");
    let hosts = [
        "--allow-image-urls",
        "127.0.0.1,localhost,example.invalid",
        "-c",
        "512",
    ];
    let Some(server) = server(&folder, "gemma3", GEMMA, &hosts) else {
        return;
    };
    let refused = |path: &str, body: &Value| {
        let (status, response) = server.post(path, body);
        assert_eq!(status, 400, "{response}");
        response["error"]["message"].as_str().unwrap().to_owned()
    };
    let chat = |part: Value| refused("/v1/chat/completions", &asked(json!([part])));
    for (address, expected) in [
        ("https://127.0.0.1/a.png", "not of the open network"),
        ("https://localhost/a.png", "not of the open network"),
        ("https://169.254.169.254/latest", "none of the hosts"),
        ("http://example.invalid/a.png", "only https"),
        ("file:///etc/passwd", "only https"),
        ("https://user@example.invalid/a.png", "name or password"),
        ("data:image/png,abc", "Base64"),
        ("data:image/png;base64,%%", "Base64"),
        ("data:image/png;base64,aGVsbG8=", "no PNG"),
        ("", "messages[0].content[0]"),
    ] {
        let message = chat(part(address));
        assert!(message.contains(expected), "{address}: {message}");
    }
    // A picture of 65,535 × 65,535 in the header of a BMP.
    let mut bomb = b"BM".to_vec();
    bomb.extend(
        [54_u32, 0, 54, 40, 65_535, 65_535]
            .map(u32::to_le_bytes)
            .concat(),
    );
    bomb.extend([1_u16, 24].map(u16::to_le_bytes).concat());
    bomb.extend([0; 24]);
    let bomb = format!("data:image/bmp;base64,{}", BASE64_STANDARD.encode(bomb));
    assert!(chat(part(&bomb)).contains("65535 × 65535"));
    let truncated = &url("gradient.png")[..200];
    assert!(chat(part(truncated)).contains("messages[0].content[0]"));
    let thousands = vec![part(&url("gradient.png")); 1000];
    let message = refused("/v1/chat/completions", &asked(thousands.into()));
    assert!(message.contains("at most 64 images"), "{message}");
    // More tokens than the context holds, found before anything is encoded.
    let many = vec![part(&url("gradient.png")); 60];
    let message = refused("/v1/chat/completions", &asked(many.into()));
    assert!(
        message.contains("maximum context length is 512"),
        "{message}"
    );
    let odd =
        json!({"type": "image_url", "image_url": {"url": url("gradient.png"), "detail": "huge"}});
    assert!(chat(odd).contains("detail"));
    assert!(chat(json!({"type": "input_audio", "input_audio": {}})).contains("input_audio"));
    let pdf = json!({"type": "base64", "media_type": "application/pdf", "data": ""});
    let pdf = asked(json!([{"type": "document", "source": pdf}]));
    assert!(refused("/v1/messages", &pdf).contains("PDF"));
    let file = asked(json!([{"type": "image", "source": {"type": "file", "file_id": "f"}}]));
    assert!(refused("/v1/messages", &file).contains("only base64 and url"));
    let file =
        json!({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]});
    assert!(refused("/v1/responses", &file).contains("image_url"));
    // The server goes on.
    server.ask(
        "/v1/chat/completions",
        &asked(json!([part(&url("gradient.png")), said("?")])),
    );
}

/// Without the flag no address is asked; another model's projector is refused at the start, and one
/// beside the model is found.
#[test]
fn projectors_beside_models() {
    let Some(root) = root() else { return };
    let folder = Folder::new("images-beside");
    let copy = |from: &str, to: &str| {
        std::fs::copy(root.join(from), folder.0.join(to)).unwrap();
        folder.path(to)
    };
    let model = copy("gemma3/model-f16.gguf", "model.gguf");
    copy("qwen2vl/mmproj-f32.gguf", "mmproj-other.gguf");
    let template = folder.file("template.jinja", GEMMA);
    let flags = ["-m", &model, "--chat-template-file", &template];
    let image = asked(json!([part(&url("gradient.png"))]));
    let text_alone = Server::start(&flags);
    let (status, response) = text_alone.post("/v1/chat/completions", &image);
    assert!(
        status == 400 && response.to_string().contains("--mmproj"),
        "{response}"
    );
    drop(text_alone);
    copy("gemma3/mmproj-q8_0.gguf", "mmproj-q8_0.gguf");
    let server = Server::start(&flags);
    server.ask("/v1/chat/completions", &image);
    let remote = asked(json!([part("https://example.com/a.png")]));
    let (status, response) = server.post("/v1/chat/completions", &remote);
    assert!(
        status == 400 && response.to_string().contains("--allow-image-urls"),
        "{response}"
    );
    drop(server);
    let none = Server::start(&[&flags[..], &["--no-mmproj"]].concat());
    assert_eq!(none.post("/v1/chat/completions", &image).0, 400);
}
