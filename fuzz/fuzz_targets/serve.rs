//! Any bytes on a connection to the server: they are answered, and what is wrong is never the
//! server.

#![no_main]

#[path = "../../cli/tests/serve/tiny.rs"]
mod tiny;

use libfuzzer_sys::fuzz_target;
use ruvllm_cli::InMemory;
use std::sync::LazyLock;

static SERVER: LazyLock<InMemory> = LazyLock::new(|| {
    let path = std::env::temp_dir().join(format!("ruvllm-fuzz-{}.gguf", std::process::id()));
    tiny::reranker().write(&path).unwrap();
    let flags = [
        "-m",
        path.to_str().unwrap(),
        "-c",
        "512",
        "--parallel",
        "4",
        "-n",
        "8",
        "-t",
        "1",
        "--seed",
        "1",
    ];
    let server = InMemory::start(&flags).unwrap();
    // It is mapped.
    std::fs::remove_file(&path).unwrap();
    server
});

/// The same with the length of its body in its head, unless that says how long it is. So seeds need
/// no length, and a change of their body is not cut off.
fn with_length(sent: &[u8]) -> Option<Vec<u8>> {
    let end = sent.windows(4).position(|bytes| bytes == b"\r\n\r\n")?;
    let (head, body) = (&sent[..end], &sent[end + 4..]);
    let text = String::from_utf8_lossy(head).to_ascii_lowercase();
    if body.is_empty() || text.contains("content-length") || text.contains("transfer-encoding") {
        return None;
    }
    Some(
        [
            head,
            format!("\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes(),
            body,
        ]
        .concat(),
    )
}

fuzz_target!(|sent: &[u8]| {
    let answer = SERVER.answer(with_length(sent).as_deref().unwrap_or(sent));
    let status = answer
        .strip_prefix(b"HTTP/1.1 ")
        .or_else(|| answer.strip_prefix(b"HTTP/1.0 "));
    assert!(
        answer.is_empty() || status.is_some_and(|status| status[0] < b'5'),
        "{}",
        answer.escape_ascii()
    );
    // In the middle of a stream, too. Within texts the marks would be escaped.
    let failed = br#""type":"server_error""#;
    assert!(
        !answer.windows(failed.len()).any(|bytes| bytes == failed),
        "{}",
        answer.escape_ascii()
    );
});
