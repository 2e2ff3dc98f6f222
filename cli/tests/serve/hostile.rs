//! Requests that were damaged at random: every one is answered, with an error of its own, and the
//! server goes on.

use super::Server;
use super::load::{Rng, is_long};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::Shutdown;

/// The fuzzer's requests with a body, which are all right: their paths and bodies.
fn sound() -> Vec<(String, Value)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/serve");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let request = |path: &std::path::PathBuf| {
        let text = std::fs::read_to_string(path).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let body = serde_json::from_str(body).ok()?;
        Some((head.split(' ').nth(1).unwrap().to_owned(), body))
    };
    files.iter().filter_map(request).collect()
}

/// What programs forget.
fn odd(rng: &mut Rng) -> Value {
    let deep = (0..rng.below(200)).fold(json!(1), |inner, i| {
        if i % 2 == 0 {
            json!([inner])
        } else {
            json!({"a": inner})
        }
    });
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
            let name = fields
                .keys()
                .nth(rng.below(fields.len()))
                .cloned()
                .unwrap_or_default();
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
    let server = Server::start(&["-c", "512", "-np", "4", "-n", "16", "--temp", "0"]);
    let (mut rng, sound) = (Rng(20), sound());
    for (path, body) in &sound {
        let (status, response) = server.send("POST", path, "", &body.to_string());
        // What this model has not, and what needs `--learn`.
        let expected = match &path[..] {
            "/infill" => 501,
            "/v1/rerank" | "/feedback" => 400,
            _ => 200,
        };
        assert_eq!(status, expected, "{path}: {response}");
    }
    for i in 0..if is_long() { 20_000 } else { 400 } {
        let (path, mut body) = sound[rng.below(sound.len())].clone();
        (0..1 + rng.below(3)).for_each(|_| damage(&mut body, &mut rng));
        let (status, response) = server.send("POST", &path, "", &body.to_string());
        assert!(
            [200, 400, 501].contains(&status),
            "case {i}: {path} {body}: {status} {response}"
        );
        if status != 200 {
            let error: Value = serde_json::from_str(&response).unwrap();
            assert!(
                error["error"]["message"]
                    .as_str()
                    .is_some_and(|text| !text.is_empty()),
                "case {i}: {response}"
            );
        }
    }
    // Bytes of a whole request, head and all.
    for i in 0..if is_long() { 20_000 } else { 200 } {
        let (path, body) = &sound[rng.below(sound.len())];
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
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
        let (mut response, sent) = (
            Vec::new(),
            stream
                .write_all(&bytes)
                .and_then(|()| stream.shutdown(Shutdown::Write)),
        );
        let read = stream.read_to_end(&mut response);
        let is_fine = response.is_empty() || response.starts_with(b"HTTP/1.");
        assert!(
            is_fine,
            "case {i}: {sent:?} {read:?} {:?}",
            String::from_utf8_lossy(&response)
        );
        assert!(
            !response.starts_with(b"HTTP/1.1 500"),
            "case {i}: {:?}",
            String::from_utf8_lossy(&bytes)
        );
    }
    server.is_idle_soon();
    assert_eq!(server.get("/health").0, 200);
    let log = server.log.lock().unwrap();
    assert!(log.is_empty(), "{log:?}");
}
