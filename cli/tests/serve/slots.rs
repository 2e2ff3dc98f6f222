//! Texts of slots in files, sockets in the file system, and a log that is JSON alone.

use super::house::change;
use super::{Folder, Server, completion, text, tiny};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

const JSON: &str = "content-type: application/json\r\n";
const SECRET: &str = "content-type: application/json\r\nauthorization: Bearer one\r\n";
const OTHER: &str = "content-type: application/json\r\nauthorization: Bearer two\r\n";

fn act(server: &Server, id: usize, action: &str, headers: &str, name: &str) -> (u16, Value) {
    let path = format!("/slots/{id}?action={action}");
    let (status, body) = change(server, &path, headers, &json!({"filename": name}));
    (status, serde_json::from_str(&body).unwrap())
}

fn prompt() -> String {
    "A text that is long enough to be found again. ".repeat(8)
}

/// A completion in slot 1, and how many of its tokens came from the cache.
fn ask(server: &Server, headers: &str) -> (String, u64) {
    let mut body = completion(&prompt(), 6);
    body["id_slot"] = 1.into();
    let (status, body) = server.send("POST", "/v1/completions", headers, &body.to_string());
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).unwrap();
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    (text(&answer).to_owned(), cached.as_u64().unwrap())
}

/// A text is saved, restored by another server, and gone on with; what is no such file is refused.
#[test]
fn a_text_outlives_its_server() {
    let folder = Folder::new("slots");
    let dir = folder.0.to_str().unwrap();
    let flags = [
        "-c",
        "512",
        "--temp",
        "0",
        "-np",
        "2",
        "--slot-save-path",
        dir,
    ];
    let server = Server::start(&flags);
    assert_eq!(
        act(&server, 1, "save", JSON, "x").0,
        400,
        "there is no text"
    );
    let (first, n) = ask(&server, "");
    assert_eq!(n, 0);
    let (status, saved) = act(&server, 1, "save", JSON, "chat.bin");
    assert!(
        status == 200 && saved["n_written"].as_u64() > Some(1000),
        "{saved}"
    );
    drop(server);

    let server = Server::start(&flags);
    let (status, restored) = act(&server, 1, "restore", JSON, "chat.bin");
    assert!(status == 200, "{restored}");
    assert_eq!(restored["n_restored"], saved["n_saved"]);
    let (again, n_cached) = ask(&server, "");
    assert_eq!(again, first);
    assert!(n_cached > 20, "{n_cached}");
    let (status, erased) = act(&server, 1, "erase", JSON, "");
    assert!(
        status == 200 && erased["n_erased"].as_u64() > Some(20),
        "{erased}"
    );
    assert_eq!(act(&server, 1, "save", JSON, "x").0, 400);
    for name in [
        "../chat.bin",
        "/etc/passwd",
        "a\u{0}b",
        "",
        "a/b",
        ".chat.bin",
    ] {
        assert_eq!(act(&server, 1, "restore", JSON, name).0, 400, "{name:?}");
    }
    assert_eq!(act(&server, 1, "restore", JSON, "none").0, 404);
    assert_eq!(
        act(&server, 2, "restore", JSON, "chat.bin").0,
        400,
        "there are two slots"
    );
    assert_eq!(act(&server, 1, "burn", JSON, "chat.bin").0, 400);
    assert_eq!(act(&server, 1, "restore", "", "chat.bin").0, 415);
    folder.file("broken", "no session");
    assert_eq!(act(&server, 1, "restore", JSON, "broken").0, 400);
    let mut body = completion("a", 1);
    body["id_slot"] = 2.into();
    assert_eq!(server.post("/v1/completions", &body).0, 400);

    let other = folder.model("other.gguf", tiny::base());
    let server = Server::start(&["-m", &other, "-c", "512", "--slot-save-path", dir]);
    let (status, error) = act(&server, 0, "restore", JSON, "chat.bin");
    assert!(status == 400, "{error}");
    let server = Server::start(&["-c", "512"]);
    assert_eq!(act(&server, 0, "restore", JSON, "chat.bin").0, 501);
}

/// Of a text whose context was shifted there are no keys and values to be saved.
#[test]
fn a_shifted_text_is_not_saved() {
    let folder = Folder::new("slots-shift");
    let dir = folder.0.to_str().unwrap();
    let flags = ["-c", "128", "--temp", "0", "--context-shift"];
    let server = Server::start(&[&flags[..], &["--slot-save-path", dir]].concat());
    let ask = |n: usize| {
        let mut body = completion("Ownership is", n);
        body["id_slot"] = 1.into();
        body["ignore_eos"] = true.into();
        let answer = server.ask("/v1/completions", &body);
        assert_eq!(answer["usage"]["completion_tokens"], n);
    };
    ask(40);
    assert_eq!(act(&server, 1, "save", JSON, "short").0, 200);
    ask(300);
    let (status, error) = act(&server, 1, "save", JSON, "long");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("shift"), "{error}");
    assert_eq!(act(&server, 1, "restore", JSON, "short").0, 200);
}

/// A key reaches neither the slots nor the files of another.
#[test]
fn each_key_has_its_own() {
    let folder = Folder::new("slots-keys");
    let dir = folder.0.to_str().unwrap();
    let keys = ["--api-key", "one,two", "--slot-save-path", dir];
    let server = Server::start(&[&keys[..], &["-c", "512", "--temp", "0"]].concat());
    ask(&server, SECRET);
    assert_eq!(
        act(&server, 1, "save", OTHER, "a").0,
        400,
        "its slot is empty"
    );
    assert_eq!(act(&server, 1, "save", SECRET, "a").0, 200);
    assert_eq!(act(&server, 1, "restore", OTHER, "a").0, 404);
    assert_eq!(act(&server, 1, "restore", JSON, "a").0, 401);
    assert_eq!(act(&server, 1, "erase", OTHER, "a").1["n_erased"], 0);
    assert_eq!(act(&server, 1, "restore", SECRET, "a").0, 200);
    assert_eq!(
        ask(&server, OTHER).1,
        0,
        "its text is not in the other's cache"
    );
    let names: Vec<_> = std::fs::read_dir(dir).unwrap().collect();
    let name = names[0]
        .as_ref()
        .unwrap()
        .file_name()
        .into_string()
        .unwrap();
    assert!(names.len() == 1 && !name.contains("one"), "{name}");
}

/// A socket in the file system: what a killed server left is taken over, one in use is not.
#[cfg(unix)]
#[test]
fn sockets_in_the_file_system() {
    use super::ended;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    let folder = Folder::new("socket");
    let path = folder.path("s.sock");
    let start = |host: &str| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_ruvllm"))
            .args(["serve", "--host", host, "-t", "1", "-c", "128"])
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let ready = lines
            .map_while(Result::ok)
            .any(|line| line.contains("is ready on unix:"));
        (child, ready)
    };
    let health = || {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream
            .write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.starts_with("HTTP/1.1 200")
    };
    let (mut first, ready) = start(&path);
    assert!(ready && health());
    let (mut second, ready) = start(&path);
    assert!(!ready && !second.wait().unwrap().success() && health());
    first.kill().unwrap();
    first.wait().unwrap();
    let (mut third, ready) = start(&format!("unix:{path}"));
    assert!(ready && health());
    assert_eq!(ended(&mut third), Some(0));
    assert!(!std::path::Path::new(&path).exists());
}

/// With `--log-format json` every line is JSON, from the start to a failure.
#[test]
fn every_line_of_a_json_log_is_json() {
    let folder = Folder::new("json-log");
    let model = folder.model("base.gguf", tiny::base());
    let broken = folder.file("broken.gguf", "GGUF and no more");
    for (flags, is_ready) in [
        (["-m", &model[..]], true),
        (["-m", &broken[..]], false),
        (["--models-dir", folder.0.to_str().unwrap()], true),
    ] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_ruvllm"))
            .args(["serve", "--port", "0", "-c", "128", "--log-format", "json"])
            .args(flags)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut n = 0;
        for line in BufReader::new(child.stderr.take().unwrap()).lines() {
            let line = line.unwrap();
            let _: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line}"));
            n += 1;
            if line.contains("is ready on") {
                child.kill().unwrap();
            }
        }
        let failed = child.wait().unwrap().code() == Some(1);
        // One that is killed has this code on Windows, too.
        if !(is_ready && cfg!(windows)) {
            assert_eq!(failed, !is_ready);
        }
        assert!(n > 0);
    }
}

/// Encrypted connections, with a certificate that the client knows; without TLS nobody is answered.
#[cfg(all(feature = "tls", not(any(windows, target_vendor = "apple"))))]
#[test]
fn encrypted() {
    use super::ended;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::Arc;
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
    use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
    let file = |name: &str| format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"));
    let (key, certificate) = (file("localhost.key"), file("localhost.crt"));
    let start = |key: &str| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_ruvllm"))
            .args([
                "serve",
                "--port",
                "0",
                "-c",
                "128",
                "-t",
                "1",
                "--timeout",
                "2",
            ])
            .args(["--ssl-key-file", key, "--ssl-cert-file", &certificate])
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = lines
            .map_while(Result::ok)
            .find_map(|line| Some(line.split_once("is ready on https://")?.1.to_owned()));
        (child, address)
    };
    let (mut child, address) = start(&key);
    let address = address.unwrap();
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(&certificate).unwrap())
        .unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = StreamOwned::new(client, TcpStream::connect(&address).unwrap());
    let body = json!({"prompt": "a", "max_tokens": 4}).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    // Some ends of connections are no ends of TLS.
    let _ = stream.read_to_string(&mut answer);
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("text_completion"),
        "{answer}"
    );
    // Who speaks no TLS, or nothing, is not answered, and harms nobody.
    let mut plain = TcpStream::connect(&address).unwrap();
    plain
        .write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        .unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
    let mut silent = TcpStream::connect(&address).unwrap();
    assert_eq!(silent.read(&mut [0; 8]).unwrap_or(0), 0, "it is closed");
    assert_eq!(ended(&mut child), Some(0));
    let (mut child, address) = start(&certificate);
    assert!(
        address.is_none() && child.wait().unwrap().code() == Some(1),
        "that is no key"
    );
}
