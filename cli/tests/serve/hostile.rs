//! Requests that were damaged at random: every one is answered, with an error of its own, and the server goes on.

use super::Server;
use super::load::{Rng, is_long};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::Shutdown;

/// Requests that are all right, of every path.
fn sound() -> Vec<(&'static str, Value)> {
    let messages = json!([{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]);
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]});
    let function = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
    vec![
        (
            "/v1/chat/completions",
            json!({
                "model": "m", "messages": messages, "max_tokens": 4, "temperature": 1.0, "top_p": 0.9, "n": 2, "seed": 1, "stop": ["x"],
                "logprobs": true, "top_logprobs": 2, "stream": true, "stream_options": {"include_usage": true}, "logit_bias": {"5": 1},
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "messages": messages, "max_tokens": 8, "tools": [function], "tool_choice": "required", "parallel_tool_calls": false,
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "messages": messages, "max_tokens": 8,
                "response_format": {"type": "json_schema", "json_schema": {"name": "c", "strict": true, "schema": schema}},
            }),
        ),
        (
            "/v1/completions",
            json!({"prompt": ["a", "b"], "max_tokens": 4, "logprobs": 2, "echo": false, "best_of": 1, "suffix": ""}),
        ),
        (
            "/v1/completions",
            json!({"prompt": [5, 6, 7], "max_tokens": 4, "grammar": "root ::= [a-z]+", "mirostat": 2, "lora": []}),
        ),
        (
            "/v1/responses",
            json!({
                "model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}], "max_output_tokens": 4,
                "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "tools": [], "stream": false,
            }),
        ),
        (
            "/v1/messages",
            json!({
                "model": "m", "max_tokens": 4, "system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": "Hello"}],
                "stop_sequences": ["x"], "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "auto"},
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            }),
        ),
        ("/v1/messages/count_tokens", json!({"model": "m", "messages": [{"role": "user", "content": "Hello"}]})),
        ("/v1/embeddings", json!({"input": ["a", [5, 6]], "encoding_format": "base64", "dimensions": 256})),
        (
            "/completion",
            json!({"prompt": "a", "n_predict": 4, "n_probs": 2, "return_tokens": true, "samplers": ["top_k"]}),
        ),
        ("/infill", json!({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "x", "text": "y"}]})),
        ("/tokenize", json!({"content": "a", "with_pieces": true})),
        ("/detokenize", json!({"tokens": [5, 6]})),
        ("/apply-template", json!({"messages": messages, "chat_template_kwargs": {"a": 1}})),
    ]
}

/// What programs forget.
fn odd(rng: &mut Rng) -> Value {
    let deep =
        (0..rng.below(200)).fold(json!(1), |inner, i| if i % 2 == 0 { json!([inner]) } else { json!({"a": inner}) });
    let all = [
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(1),
        json!(0.5),
        json!(-0.0),
        json!(1e308),
        json!(-1e-320),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(2_147_483_648_u64),
        json!(""),
        json!("\u{0}"),
        json!("text"),
        json!("äöü😀\u{202e}"),
        json!("a".repeat(3000)),
        json!([]),
        json!({}),
        json!([[]]),
        json!([null]),
        json!(["a", 1]),
        json!({"type": "text"}),
        json!({"": {}}),
        json!("<|im_start|>"),
        json!({"type": "object", "$ref": "#"}),
        json!({"type": ["string", "null"], "pattern": "(a+)+$"}),
        deep,
    ];
    all[rng.below(all.len())].clone()
}

/// Changes one thing somewhere within a value.
fn damage(value: &mut Value, rng: &mut Rng) {
    match value {
        Value::Object(fields) if !fields.is_empty() && rng.below(5) > 0 => {
            let name = fields.keys().nth(rng.below(fields.len())).cloned().unwrap_or_default();
            match rng.below(6) {
                0 => drop(fields.shift_remove(&name)),
                1 => drop(fields.insert(format!("{name}s"), odd(rng))),
                _ => damage(&mut fields[&name], rng),
            }
        }
        Value::Array(items) if !items.is_empty() && rng.below(5) > 0 => {
            let i = rng.below(items.len());
            match rng.below(6) {
                0 => drop(items.remove(i)),
                1 => items.push(items[i].clone()),
                _ => damage(&mut items[i], rng),
            }
        }
        value => *value = odd(rng),
    }
}

#[test]
fn damaged_requests() {
    let server = Server::start(&["-c", "128", "-np", "4", "--temp", "0"]);
    let mut rng = Rng(20);
    for (path, body) in sound() {
        let (status, response) = server.send("POST", path, "", &body.to_string());
        assert!(
            status == 200 || (path, status) == ("/infill", 501) || response.contains("does not know"),
            "{path} {status}: {response}"
        );
    }
    for i in 0..if is_long() { 20_000 } else { 400 } {
        let all = sound();
        let (path, mut body) = all[rng.below(all.len())].clone();
        (0..1 + rng.below(3)).for_each(|_| damage(&mut body, &mut rng));
        let (status, response) = server.send("POST", path, "", &body.to_string());
        assert!([200, 400, 501].contains(&status), "case {i}: {path} {body}: {status} {response}");
        if status != 200 {
            let error: Value = serde_json::from_str(&response).unwrap();
            assert!(error["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "case {i}: {response}");
        }
    }
    // Bytes of a whole request, head and all.
    for i in 0..if is_long() { 20_000 } else { 200 } {
        let all = sound();
        let (path, body) = &all[rng.below(all.len())];
        let body = body.to_string();
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
        let mut bytes = (head + &body).into_bytes();
        for _ in 0..1 + rng.below(8) {
            let at = rng.below(bytes.len());
            match rng.below(4) {
                0 => bytes.truncate(at + 1),
                1 => bytes.insert(at, rng.below(256) as u8),
                _ => bytes[at] = rng.below(256) as u8,
            }
        }
        let mut stream = server.connect();
        let (mut response, sent) =
            (Vec::new(), stream.write_all(&bytes).and_then(|()| stream.shutdown(Shutdown::Write)));
        let read = stream.read_to_end(&mut response);
        let is_fine = response.is_empty() || response.starts_with(b"HTTP/1.");
        assert!(is_fine, "case {i}: {sent:?} {read:?} {:?}", String::from_utf8_lossy(&response));
        assert!(!response.starts_with(b"HTTP/1.1 500"), "case {i}: {:?}", String::from_utf8_lossy(&bytes));
    }
    server.is_idle_soon();
    assert_eq!(server.get("/health").0, 200);
    let log = server.log.lock().unwrap();
    assert!(log.is_empty(), "{log:?}");
}
