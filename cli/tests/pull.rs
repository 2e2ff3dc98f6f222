//! `ruvllm pull`, `list`, `rm` and `-hf` against a hub of this process's own, which breaks off,
//! lies and leads elsewhere.
#![cfg(feature = "pull")]

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
#[cfg(unix)]
use std::path::Path;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the hub misbehaves.
#[derive(Clone, Copy, Default)]
struct Faults {
    /// Bytes of a body after which a connection ends, if more were asked for.
    breaks_after: Option<usize>,
    /// Added to the size that the file server tells.
    size_lie: i64,
    /// Bytes that come too many.
    surplus: usize,
    /// Does not know ranges.
    no_ranges: bool,
    /// Tells another sum than that of the bytes.
    wrong_sum: bool,
    /// Where requests for files are led.
    elsewhere: Option<&'static str>,
    needs_token: bool,
}

/// A hub with one model, `a/b`.
struct Hub {
    address: String,
    files: Vec<(&'static str, Vec<u8>)>,
    faults: Mutex<Faults>,
    /// Paths and ranges that were asked for, and whether with a token.
    asked: Mutex<Vec<(String, Option<usize>, bool)>>,
}

fn model() -> Vec<u8> {
    std::fs::read(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    ))
    .unwrap()
}

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// As git names a file.
fn blob_id(bytes: &[u8]) -> String {
    let hash = Sha1::new_with_prefix(format!("blob {}\0", bytes.len())).chain_update(bytes);
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

impl Hub {
    fn start(files: Vec<(&'static str, Vec<u8>)>) -> Arc<Hub> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let hub = Arc::new(Hub {
            address,
            files,
            faults: Mutex::default(),
            asked: Mutex::default(),
        });
        let server = Arc::clone(&hub);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // Whoever hangs up has enough.
                let _ = server.answer(stream);
            }
        });
        hub
    }

    fn set(&self, faults: Faults) {
        *self.faults.lock().unwrap() = faults;
    }

    /// What was asked for since the last time.
    fn asked(&self) -> Vec<(String, Option<usize>, bool)> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    fn answer(&self, stream: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let mut out = stream;
        let request = lines.next().unwrap_or(Ok(String::new()))?;
        let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
        let (mut range, mut has_token) = (None, false);
        for line in lines {
            let line = line?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(asked) = line.strip_prefix("range: bytes=") {
                let (from, to) = asked.split_once('-').unwrap();
                range = Some((from.parse::<usize>().unwrap(), to.parse::<usize>().ok()));
            }
            has_token |= line == "authorization: bearer secret";
        }
        let faults = *self.faults.lock().unwrap();
        self.asked
            .lock()
            .unwrap()
            .push((path.clone(), range.map(|(from, _)| from), has_token));
        let mut head = |status: &str, headers: &str| {
            write!(
                out,
                "HTTP/1.1 {status}\r\nconnection: close\r\n{headers}\r\n"
            )
        };
        if faults.needs_token && !has_token && !path.starts_with("/cdn/") {
            return head("401 Unauthorized", "content-length: 0\r\n");
        }
        if path.starts_with("/api/models/a/b/revision/main") {
            let file = |(name, bytes): &(&str, Vec<u8>)| {
                let bytes_of_sum: &[u8] = if faults.wrong_sum { b"other" } else { bytes };
                if !name.ends_with(".gguf") && !name.ends_with(".safetensors") {
                    let id = blob_id(bytes_of_sum);
                    return json!({"rfilename": name, "size": bytes.len(), "blobId": id});
                }
                let sum = sum(bytes_of_sum);
                json!({"rfilename": name, "size": bytes.len(), "lfs": {"sha256": sum, "size": bytes.len()}})
            };
            let mut siblings: Vec<Value> = self.files.iter().map(file).collect();
            siblings.push(json!({"rfilename": "README.md", "size": 3}));
            let body = json!({"sha": COMMIT, "siblings": siblings}).to_string();
            head("200 OK", &format!("content-length: {}\r\n", body.len()))?;
            return out.write_all(body.as_bytes());
        }
        if let Some(file) = path.strip_prefix(&format!("/a/b/resolve/{COMMIT}/")) {
            let to = faults
                .elsewhere
                .map_or_else(|| format!("/cdn/{file}"), str::to_owned);
            return head(
                "302 Found",
                &format!("location: {to}\r\ncontent-length: 0\r\n"),
            );
        }
        let name = path.strip_prefix("/cdn/").unwrap_or_default();
        let Some((_, bytes)) = self.files.iter().find(|(known, _)| *known == name) else {
            return head("404 Not Found", "content-length: 0\r\n");
        };
        let (from, to) = match range.filter(|_| !faults.no_ranges) {
            Some((from, to)) => (from, to.map_or(bytes.len(), |to| (to + 1).min(bytes.len()))),
            None => (0, bytes.len()),
        };
        let length = to - from + faults.surplus;
        if range.is_some() && !faults.no_ranges {
            let total = bytes.len() as i64 + faults.size_lie;
            let range = format!(
                "content-range: bytes {from}-{}/{total}\r\ncontent-length: {length}\r\n",
                to - 1
            );
            head("206 Partial Content", &range)?;
        } else {
            let length = (length as i64 + faults.size_lie) as usize;
            head("200 OK", &format!("content-length: {length}\r\n"))?;
        }
        let n = faults.breaks_after.map_or(to - from, |n| n.min(to - from));
        out.write_all(&bytes[from..from + n])?;
        out.write_all(&vec![b'x'; if n == to - from { faults.surplus } else { 0 }])
    }
}

/// A cache of a test's own.
struct Cache(PathBuf);

impl Cache {
    fn new(name: &str) -> Cache {
        let path = std::env::temp_dir().join(format!("ruvllm-pull-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Cache(path)
    }

    fn run(&self, hub: &Hub, args: &[&str], variables: &[(&str, &str)]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ruvllm"));
        for name in [
            "HF_TOKEN",
            "HF_TOKEN_PATH",
            "HF_HUB_CACHE",
            "http_proxy",
            "HTTP_PROXY",
            "ALL_PROXY",
            "all_proxy",
        ] {
            command.env_remove(name);
        }
        command
            .args(args)
            .env("HF_HOME", &self.0)
            .env("HF_ENDPOINT", format!("http://{}", hub.address));
        command
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    #[track_caller]
    fn pulls(&self, hub: &Hub, name: &str) -> PathBuf {
        let output = self.run(hub, &["pull", name], &[]);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        PathBuf::from(String::from_utf8(output.stdout).unwrap().trim_end())
    }

    /// That a call fails, with `text` in what it says.
    #[track_caller]
    fn fails(&self, hub: &Hub, args: &[&str], text: &str) {
        let output = self.run(hub, args, &[]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(text), "{said}");
        assert!(!said.contains("panicked"), "{said}");
    }

    fn repo(&self) -> PathBuf {
        self.0.join("hub").join("models--a--b")
    }

    /// Names of what is in a folder of the model.
    fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.repo().join(folder))
            .map(|all| all.flatten().collect::<Vec<_>>())
            .unwrap_or_default();
        entries
            .iter()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn models_come_by_name_and_go() {
    let hub = Hub::start(vec![("m-Q8_0.gguf", model()), ("mmproj-m.gguf", vec![1])]);
    let cache = Cache::new("whole");
    let path = cache.pulls(&hub, "a/b:q8_0");
    assert_eq!(std::fs::read(&path).unwrap(), model());
    let expected = cache
        .repo()
        .join("snapshots")
        .join(COMMIT)
        .join("m-Q8_0.gguf");
    assert_eq!(path, expected, "where other tools look");
    assert_eq!(cache.names("blobs"), [sum(&model())]);
    assert_eq!(
        std::fs::read_to_string(cache.repo().join("refs/main")).unwrap(),
        COMMIT
    );
    #[cfg(unix)]
    assert_eq!(
        std::fs::read_link(&path).unwrap(),
        Path::new("../../blobs").join(sum(&model()))
    );

    // What is there is not downloaded again; -hf does not even ask.
    hub.asked();
    cache.pulls(&hub, "a/b");
    assert!(
        hub.asked()
            .iter()
            .all(|(path, from, _)| !path.starts_with("/cdn/m-") || *from == Some(0)),
        "only its header"
    );
    let said = cache.run(
        &hub,
        &["-hf", "a/b", "-p", "Ownership is", "-n", "4", "--temp", "0"],
        &[],
    );
    assert!(said.status.success() && said.stdout.len() > 4, "{said:?}");
    assert!(hub.asked().is_empty());

    let list: Value =
        serde_json::from_slice(&cache.run(&hub, &["list", "--json"], &[]).stdout).unwrap();
    assert_eq!(
        (list[0]["repo"].as_str(), list[0]["file"].as_str()),
        (Some("a/b"), Some("m-Q8_0.gguf"))
    );
    assert_eq!(list[0]["bytes"].as_u64(), Some(model().len() as u64));
    cache.fails(&hub, &["rm", "a/b:Q4_0"], "no such model");
    cache.fails(&hub, &["rm", "../b"], "OWNER/NAME");
    assert!(cache.run(&hub, &["rm", "a/b"], &[]).status.success());
    assert!(!cache.repo().exists());
    assert_eq!(cache.run(&hub, &["list"], &[]).stdout, b"");
    // -hf gets what is not there.
    let said = cache.run(&hub, &["tokenize", "-hf", "a/b:Q8_0", "-p", "Hello"], &[]);
    assert!(
        said.status.success(),
        "{}",
        String::from_utf8_lossy(&said.stderr)
    );
}

#[test]
fn downloads_that_break_off_go_on() {
    let hub = Hub::start(vec![("m.gguf", model())]);
    let cache = Cache::new("broken");
    let third = model().len() / 3;
    hub.set(Faults {
        breaks_after: Some(third),
        ..Faults::default()
    });
    // The header comes whole, as it is shorter.
    let path = cache.pulls(&hub, "a/b:m");
    assert_eq!(std::fs::read(path).unwrap(), model());
    let froms: Vec<_> = hub
        .asked()
        .into_iter()
        .filter(|(path, ..)| path.starts_with("/cdn/"))
        .map(|(_, from, _)| from)
        .collect();
    assert!(
        froms.contains(&Some(third)) && froms.contains(&Some(2 * third)),
        "{froms:?}"
    );

    // Another process goes on where one was killed; a part that is too long, or wrong, is no part
    // of it.
    for (left, ends_well) in [
        (&model()[..third], true),
        (&[0; 100][..], false),
        (&vec![0; model().len() + 1][..], true),
    ] {
        assert!(cache.run(&hub, &["rm", "a/b"], &[]).status.success() || !ends_well);
        std::fs::create_dir_all(cache.repo().join("blobs")).unwrap();
        let partial = cache
            .repo()
            .join("blobs")
            .join(format!("{}.incomplete", sum(&model())));
        std::fs::write(&partial, left).unwrap();
        hub.set(Faults::default());
        hub.asked();
        if ends_well {
            cache.pulls(&hub, "a/b:m");
        } else {
            cache.fails(&hub, &["pull", "a/b:m"], "SHA-256");
            assert!(!partial.exists(), "what is wrong is not gone on with");
            cache.pulls(&hub, "a/b:m");
        }
        assert_eq!(cache.names("blobs"), [sum(&model())]);
    }
}

#[test]
fn servers_that_lie() {
    let hub = Hub::start(vec![("m.gguf", model())]);
    let cache = Cache::new("lies");
    let with = |faults: Faults| hub.set(faults);
    with(Faults {
        size_lie: 1,
        ..Faults::default()
    });
    cache.fails(&hub, &["pull", "a/b:m"], "another size");
    with(Faults {
        size_lie: -1000,
        no_ranges: true,
        ..Faults::default()
    });
    cache.fails(&hub, &["pull", "a/b:m"], "another size");
    with(Faults {
        wrong_sum: true,
        ..Faults::default()
    });
    cache.fails(&hub, &["pull", "a/b:m"], "SHA-256");
    assert!(cache.names("blobs").is_empty() && cache.names("snapshots").is_empty());
    with(Faults {
        elsewhere: Some("http://127.0.0.2:9/m.gguf"),
        ..Faults::default()
    });
    cache.fails(&hub, &["pull", "a/b:m"], "not its own");
    with(Faults {
        elsewhere: Some("https://example.com/m.gguf"),
        ..Faults::default()
    });
    cache.fails(&hub, &["pull", "a/b:m"], "--allow-host");
    with(Faults {
        elsewhere: Some("file:///etc/passwd"),
        ..Faults::default()
    });
    cache.fails(&hub, &["pull", "a/b:m"], "");
    let loops: &'static str = Box::leak(format!("/a/b/resolve/{COMMIT}/m.gguf").into_boxed_str());
    with(Faults {
        elsewhere: Some(loops),
        ..Faults::default()
    });
    cache.fails(&hub, &["pull", "a/b:m"], "from address to address");
    with(Faults {
        surplus: 5000,
        ..Faults::default()
    });
    cache.fails(&hub, &["pull", "a/b:m"], "another size");
    // One without ranges serves, too.
    with(Faults {
        no_ranges: true,
        ..Faults::default()
    });
    assert_eq!(std::fs::read(cache.pulls(&hub, "a/b:m")).unwrap(), model());
}

#[test]
fn tokens_are_for_the_hub_alone() {
    let hub = Hub::start(vec![("m.gguf", model())]);
    let cache = Cache::new("token");
    hub.set(Faults {
        needs_token: true,
        ..Faults::default()
    });
    cache.fails(&hub, &["pull", "a/b"], "HF_TOKEN");
    hub.asked();
    let output = cache.run(&hub, &["pull", "a/b:m"], &[("HF_TOKEN", "secret")]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(hub.asked().iter().any(|(.., has_token)| *has_token));
    // A file server elsewhere does not get it.
    let cdn = Hub::start(vec![("m.gguf", model())]);
    let to: &'static str = Box::leak(format!("http://{}/cdn/m.gguf", cdn.address).into_boxed_str());
    hub.set(Faults {
        elsewhere: Some(to),
        ..Faults::default()
    });
    assert!(cache.run(&hub, &["rm", "a/b"], &[]).status.success());
    cache.fails(&hub, &["pull", "a/b:m"], "not its own");
    assert!(cdn.asked().is_empty());
}

#[test]
fn the_largest_that_runs_here() {
    // Of another architecture, of the same length.
    let strange = {
        let mut bytes = model();
        let at = bytes
            .windows(5)
            .position(|w| w == b"llama")
            .expect("the architecture");
        bytes[at..at + 5].copy_from_slice(b"xxxxx");
        bytes.extend(vec![0; 4096]);
        bytes
    };
    let hub = Hub::start(vec![
        ("m-F16.gguf", strange),
        ("m-Q8_0.gguf", model()),
        ("m-Q4_0.gguf", model()[..4_000_000].to_vec()),
    ]);
    let cache = Cache::new("largest");
    let path = cache.pulls(&hub, "a/b");
    assert!(path.ends_with("m-Q8_0.gguf"), "{path:?}");
    hub.asked();
    cache.fails(&hub, &["pull", "a/b:F16"], "cannot run");
    let large = hub
        .asked()
        .into_iter()
        .filter(|(path, from, _)| path.starts_with("/cdn/") && *from != Some(0));
    assert_eq!(large.count(), 0, "it is refused before it is downloaded");
    cache.fails(&hub, &["pull", "a/b:Q5_0"], "m-Q8_0.gguf");
    cache.fails(&hub, &["pull", "a/b:m"], "several");
    cache.fails(&hub, &["pull", "a/c"], "no such thing");
}

#[test]
fn checkpoints_come_whole_and_checked() {
    let hub = Hub::start(vec![
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{ }".to_vec()),
        ("model.safetensors", vec![7; 100_000]),
        ("consolidated.safetensors", vec![8; 1000]),
        ("onnx/config.json", b"{}".to_vec()),
        ("1_Pooling/config.json", b"{  }".to_vec()),
        (".gitattributes", b"x".to_vec()),
    ]);
    let cache = Cache::new("checkpoint");
    hub.set(Faults {
        wrong_sum: true,
        ..Faults::default()
    });
    cache.fails(&hub, &["pull", "a/b"], "it was removed");
    hub.set(Faults {
        breaks_after: Some(60_000),
        ..Faults::default()
    });
    let folder = cache.pulls(&hub, "a/b");
    assert_eq!(folder, cache.repo().join("snapshots").join(COMMIT));
    let read = |name: &str| std::fs::read(folder.join(name)).ok();
    assert_eq!(read("config.json").unwrap(), b"{}");
    assert_eq!(read("tokenizer.json").unwrap(), b"{ }");
    assert_eq!(read("1_Pooling/config.json").unwrap(), b"{  }");
    assert_eq!(read("model.safetensors").unwrap(), [7; 100_000]);
    for name in [
        "consolidated.safetensors",
        "onnx/config.json",
        ".gitattributes",
    ] {
        assert_eq!(read(name), None, "{name}");
    }
    assert!(cache.names("blobs").contains(&blob_id(b"{ }")));
    cache.fails(&hub, &["pull", "a/b:Q8_0"], "is a type of GGUF files");
}

#[test]
fn headers_are_inspected_where_they_are() {
    let hub = Hub::start(vec![("m-Q8_0.gguf", model()), ("m-F16.gguf", model())]);
    let cache = Cache::new("inspected");
    let output = cache.run(&hub, &["inspect", "hf://a/b:Q8_0", "--json"], &[]);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    let local = cache.run(
        &hub,
        &[
            "inspect",
            concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../models/ruvllm-rust-6m-q8_0.gguf"
            ),
            "--json",
        ],
        &[],
    );
    let local: Value = serde_json::from_slice(&local.stdout).unwrap();
    for key in ["architecture", "parameters", "tensors", "file_size"] {
        assert_eq!(said[key], local[key], "{key}");
    }
    assert!(cache.names("blobs").is_empty(), "nothing is downloaded");
    cache.fails(&hub, &["inspect", "hf://a/b"], "m-F16.gguf");
    cache.fails(&hub, &["inspect", "hf://a"], "expected OWNER/NAME");
}

#[test]
fn without_the_hub_what_is_here_counts() {
    let hub = Hub::start(vec![("m-Q8_0.gguf", model())]);
    let cache = Cache::new("offline");
    let run = |args: &[&str]| cache.run(&hub, args, &[("HF_HUB_OFFLINE", "1")]);
    let output = run(&["pull", "a/b:q8_0"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("the hub is not asked"),
        "{said}"
    );
    cache.pulls(&hub, "a/b:q8_0");
    hub.asked();
    let output = run(&["-hf", "a/b:q8_0", "-p", "Ownership is", "-n", "2"]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(hub.asked().is_empty());
}
