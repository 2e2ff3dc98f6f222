//! The program as its users and other programs call it: exit codes, the fixed interfaces, bad
//! calls.

use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::gguf::{Array, Gguf, Value, Writer};
use ruvllm::quant::{DType, FileType};
use ruvllm::{Sampler, SamplerOptions};
use ruvllm_benches::{Shape, synthetic};
use ruvllm_learn::{Learner, LearnerOptions, Learning};
use serde_json::json;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
#[cfg(unix)]
use std::time::Instant;

#[path = "cli/chat.rs"]
mod chat;
#[path = "cli/memory.rs"]
mod memory;
#[path = "cli/models.rs"]
mod models;
#[path = "cli/quality.rs"]
mod quality;

/// A folder of its own for each test, gone afterwards.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "ruvllm-cli-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        std::fs::write(self.path(name), bytes).unwrap();
        self.name(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ruvllm"));
    let inherited = std::env::vars_os()
        .map(|(name, _)| name)
        .filter(|name| name.to_string_lossy().starts_with("LLAMA_ARG_"));
    for name in inherited {
        command.env_remove(name);
    }
    command
        .args(args)
        .stdin(Stdio::null())
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn run_with_input(args: &[&str], input: &[u8]) -> Output {
    fed(&mut command(args), input)
}

/// What a call does that finds `input` on stdin.
fn fed(command: &mut Command, input: &[u8]) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What a call that has to work wrote to stdout.
#[track_caller]
fn stdout(output: &Output) -> Vec<u8> {
    assert_eq!(output.status.code(), Some(0), "stderr: {}", stderr(output));
    output.stdout.clone()
}

#[track_caller]
fn text(output: &Output) -> String {
    String::from_utf8(stdout(output)).unwrap()
}

#[track_caller]
fn parsed(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&stdout(output)).unwrap()
}

/// A call that has to fail with `code` and a message that contains all of `parts`.
#[track_caller]
fn fails(args: &[&str], code: i32, parts: &[&str]) {
    let output = run(args);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
    assert!(output.stdout.is_empty(), "{args:?} wrote to stdout");
    for part in parts {
        assert!(
            message.contains(part),
            "{args:?}: {part:?} is not in {message}"
        );
    }
    assert!(!message.contains("panicked"), "{message}");
}

const N_VOCAB: usize = 3 + 256 + 5;

/// A vocabulary of bytes and a few words.
fn vocabulary(writer: &mut Writer<'_>) {
    let bytes = (0..=255).map(|b| format!("<0x{b:02X}>"));
    let words = ["▁", "▁the", "he", "▁t", "t"].map(String::from);
    let tokens = ["<unk>", "<s>", "</s>"]
        .map(String::from)
        .into_iter()
        .chain(bytes)
        .chain(words);
    let kinds = [2, 3, 3]
        .into_iter()
        .chain([6; 256])
        .chain([1; 5])
        .collect();
    let scores = (0..N_VOCAB)
        .map(|i| {
            if i < 259 {
                0.0
            } else {
                [-1.0, -2.0, -3.0, -4.0, -5.0][i - 259]
            }
        })
        .collect();
    writer.metadata("tokenizer.ggml.model", "llama");
    writer.metadata("tokenizer.ggml.tokens", Array::Strings(tokens.collect()));
    writer.metadata("tokenizer.ggml.scores", Array::F32(scores));
    writer.metadata("tokenizer.ggml.token_type", Array::I32(kinds));
    writer.metadata("tokenizer.ggml.bos_token_id", 1u32);
    writer.metadata("tokenizer.ggml.eos_token_id", 2u32);
}

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}\
    {% if add_generation_prompt %}[assistant]{% endif %}";

/// A llama of two layers with pseudo-random weights.
fn tiny_model<'a>(template: Option<&str>) -> Writer<'a> {
    let mut writer = Writer::new();
    writer.metadata("general.architecture", "llama");
    writer.metadata("general.name", "tiny");
    for (key, value) in [
        ("context_length", 128u32),
        ("embedding_length", 64),
        ("block_count", 2),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("rope.dimension_count", 16),
    ] {
        writer.metadata(format!("llama.{key}"), value);
    }
    writer.metadata("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
    vocabulary(&mut writer);
    if let Some(template) = template {
        writer.metadata("tokenizer.chat_template", template);
    }
    let mut state = 1u64;
    let mut random = move |_| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.3
    };
    let mut tensor = |name: &str, dims: &[u64]| {
        let n: u64 = dims.iter().product();
        let norm = name.ends_with("norm.weight");
        let values: Vec<u8> = (0..n)
            .map(|i| if norm { 1.0 } else { random(i) })
            .flat_map(f32::to_le_bytes)
            .collect();
        writer.tensor(name, dims, DType::F32, values);
    };
    tensor("token_embd.weight", &[64, N_VOCAB as u64]);
    for layer in 0..2 {
        for (name, dims) in [
            ("attn_norm", &[64][..]),
            ("attn_q", &[64, 64]),
            ("attn_k", &[64, 32]),
            ("attn_v", &[64, 32]),
            ("attn_output", &[64, 64]),
            ("ffn_norm", &[64]),
            ("ffn_gate", &[64, 96]),
            ("ffn_up", &[64, 96]),
            ("ffn_down", &[96, 64]),
        ] {
            tensor(&format!("blk.{layer}.{name}.weight"), dims);
        }
    }
    tensor("output_norm.weight", &[64]);
    tensor("output.weight", &[64, N_VOCAB as u64]);
    writer
}

fn tiny(folder: &Folder) -> String {
    tiny_model(Some(TEMPLATE))
        .write(folder.path("tiny.gguf"))
        .unwrap();
    folder.name("tiny.gguf")
}

/// What the library computes, in the setting of `ruvllm logits`.
fn library_logits(model: &Model, tokens: &[u32]) -> Vec<Vec<f32>> {
    let options = SessionOptions {
        kv_type: KvType::F32,
        ..Default::default()
    };
    let mut rows = Vec::new();
    model
        .session_with(&options)
        .unwrap()
        .hooks()
        .prefill_each(tokens, 0, |_, logits| rows.push(logits.to_vec()))
        .unwrap();
    rows
}

fn bytes_of(rows: &[Vec<f32>]) -> Vec<u8> {
    rows.iter()
        .flatten()
        .flat_map(|logit| logit.to_le_bytes())
        .collect()
}

#[test]
fn help_and_version() {
    let help = text(&run(&["--help"]));
    for name in [
        "generate",
        "chat",
        "sessions",
        "inspect",
        "tokenize",
        "detokenize",
        "logits",
        "embed",
        "perplexity",
        "learn",
        "memory",
        "quantize",
        "template",
        "doctor",
        "batch",
        "bench",
    ] {
        assert!(
            help.contains(&format!("\n  {name} ")),
            "{name} is not in {help}"
        );
        let own = text(&run(&[name, "--help"]));
        assert!(own.contains("Examples:"), "{name} has no examples");
    }
    let bench = text(&run(&["bench", "--help"]));
    for name in ["speed", "kernels", "formats", "replay", "batch", "learning"] {
        assert!(
            bench.contains(&format!("\n  {name} ")),
            "{name} is not in {bench}"
        );
        let own = text(&run(&["bench", name, "--help"]));
        assert!(own.contains("Examples:"), "{name} has no examples");
    }
    assert_eq!(
        text(&run(&["--version"])),
        format!("ruvllm {}\n", env!("CARGO_PKG_VERSION"))
    );
}

/// The names of the release before are today's, with a note.
#[test]
fn old_names_of_commands() {
    for (old, new) in [
        (&["formats"][..], &["bench", "formats"][..]),
        (&["batched-bench"], &["bench", "batch"]),
        (&["bench", "--kernels"], &["bench", "kernels"]),
        (&["bench", "--replay", "x"], &["bench", "replay"]),
        (&["bench", "--spec-synthetic", "1"], &["bench", "replay"]),
        (&["sona", "log"], &["learn", "log"]),
        (&["calibrate"], &["learn", "calibrate"]),
    ] {
        let out = run(&[old, &["--help"]].concat());
        assert_eq!(stdout(&out), stdout(&run(&[new, &["--help"]].concat())));
        let note = stderr(&out);
        assert_eq!(note.matches("is now `ruvllm ").count(), 1, "{note}");
    }
    assert!(stderr(&run(&["bench", "--help"])).is_empty());
}

#[test]
fn wrong_calls() {
    fails(&["--nonsense"], 2, &["--nonsense"]);
    fails(&["nonsense"], 2, &["nonsense"]);
    fails(&[], 2, &["-p TEXT"]);
    if !cfg!(any(feature = "metal", target_os = "macos")) {
        fails(&["-p", "x", "-ngl", "99"], 2, &["-ngl", "CPU"]);
    }
    fails(
        &["tokenize", "--grammar", "x"],
        2,
        &["--grammar", "only `generate` and `chat`"],
    );
    fails(&["-m", "x.gguf", "chat"], 2, &["ruvllm chat"]);
    fails(&["-p", "x", "-ctk", "q3_0"], 2, &["f32, f16, bf16, q8_0"]);
    fails(&["-p", "x", "--kv-tiers=9"], 2, &["two numbers"]);
    fails(&["-p", "x", "-ctk", "q8_0", "--kv-tiers"], 1, &["f16"]);
    fails(&["-p", "x", "--top-p", "2"], 2, &["top_p"]);
    fails(&["-p", "x", "-t", "100000"], 2, &["1024"]);
    fails(&["-p", "x", "--temp", "nan"], 2, &["temperature"]);
    fails(&["-p", "x", "--samplers", "top_z"], 2, &["top_z"]);
    fails(&["-p", "x", "--logit-bias", "7"], 2, &["15043+1"]);
    fails(&["-p", "x", "-f", "y"], 2, &["cannot be used with"]);
    fails(&["logits", "--tokens", "1,x", "-o", "-"], 2, &["\"x\""]);
    fails(
        &["logits", "--tokens", "1", "--last", "0", "-o", "-"],
        2,
        &["--last"],
    );
    fails(&["quantize", "a", "b", "Q9_Z"], 2, &["Q9_Z", "Q4_K_M"]);
    fails(&["-p", "x", "--override-kv", "a=b"], 2, &["KEY=TYPE:VALUE"]);
    fails(
        &["-p", "x", "--override-kv", "a=word:b"],
        2,
        &["int, float, bool and str"],
    );
    fails(
        &["-p", "x", "--override-kv", "a=int:b"],
        2,
        &["not an integer"],
    );
    fails(
        &["embed", "-p", "x", "--pooling", "rank"],
        2,
        &["none, mean, cls, last"],
    );
    fails(
        &["template", "--messages", "m.json"],
        2,
        &["--chat-template-file"],
    );
    fails(
        &["template", "--messages", "m.json", "--kwargs", "[1]"],
        2,
        &["JSON object"],
    );
    fails(
        &["template", "--messages", "m.json", "--now", "yesterday"],
        2,
        &["yesterday"],
    );
}

/// A key that is given counts in place of the file's, and is judged like it.
#[test]
fn metadata_can_be_overridden() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let logits = |more: &[&str]| {
        run(&[
            &["logits", "-m", &model, "--tokens", "1,5,9", "-o", "-"],
            more,
        ]
        .concat())
        .stdout
    };
    let (plain, scaled) = (
        logits(&[]),
        logits(&["--override-kv", "llama.rope.freq_base=float:100"]),
    );
    assert!(plain.len() == scaled.len() && !plain.is_empty() && plain != scaled);
    assert_eq!(
        logits(&["--override-kv", "llama.rope.freq_base=float:10000"]),
        plain
    );
    for key in ["llama.nonsense", "qwen3.rope.freq_base", "nonsense"] {
        let value = format!("{key}=bool:true");
        fails(
            &[
                "logits",
                "-m",
                &model,
                "--tokens",
                "1",
                "-o",
                "-",
                "--override-kv",
                &value,
            ],
            1,
            &[key, "llama"],
        );
    }
}

#[test]
fn vectors_of_texts() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let embed = |more: &[&str]| text(&run(&[&["embed", "-m", &model], more].concat()));
    let lines = embed(&["-p", "one\ntwo"]);
    let vectors: Vec<Vec<f32>> = lines
        .lines()
        .map(|line| line.split(' ').map(|x| x.parse().unwrap()).collect())
        .collect();
    assert_eq!((vectors.len(), vectors[0].len()), (2, 64));
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    assert!((dot(&vectors[0], &vectors[0]) - 1.0).abs() < 1e-4);
    // Of tokens instead of texts; the last token's is what `last` takes.
    let (tokens, last) = (
        embed(&["-p", "one", "--pooling", "none"]),
        embed(&["-p", "one", "--pooling", "last"]),
    );
    assert!(
        tokens.lines().count() > 1 && tokens.lines().last() == last.lines().next(),
        "{tokens}"
    );
    let answer = embed(&[
        "-p",
        "one#two",
        "--embd-separator",
        "#",
        "--embd-output-format",
        "json+",
    ]);
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    let number = |value: &serde_json::Value| value.as_f64().unwrap() as f32;
    let first: Vec<f32> = answer["data"][0]["embedding"]
        .as_array()
        .unwrap()
        .iter()
        .map(number)
        .collect();
    assert!(
        first
            .iter()
            .zip(&vectors[0])
            .all(|(a, b)| (a - b).abs() <= 1e-6),
        "{first:?} {:?}",
        vectors[0]
    );
    // More than the 128 positions of the model.
    let long = "the ".repeat(200);
    fails(
        &["embed", "-m", &model, "-p", &long],
        1,
        &["text 1", "128", "--embd-truncate"],
    );
    assert_eq!(embed(&["-p", &long, "--truncate"]).lines().count(), 1);
    let cosine = number(&answer["cosineSimilarity"][0][1]);
    assert!((cosine - dot(&vectors[0], &vectors[1])).abs() < 1e-4);
}

/// Drafts change no token, and are told.
#[test]
fn speculation() {
    let prompt = "use std::fmt;\nuse std::io;\nuse std::fmt;\nuse std::io;\nuse std::fmt;\nuse std::io;\nuse";
    for sampling in [&["--temp", "0"][..], &["--temp", "0.8", "-s", "3"]] {
        let [plain, ngram, default] = [&["--no-spec"][..], &["--spec", "ngram"], &[]].map(|more| {
            parsed(&run(&[
                &["-p", prompt, "-n", "80", "--json"],
                sampling,
                more,
            ]
            .concat()))
        });
        let drafts = &plain["drafts"];
        assert_eq!(
            (drafts["passes"].as_u64(), &drafts["drafters"]),
            (Some(79), &json!({}))
        );
        for answer in [&ngram, &default] {
            assert_eq!(
                (&answer["ids"], &answer["text"]),
                (&plain["ids"], &plain["text"])
            );
            let drafts = &answer["drafts"]["drafters"]["ngram"];
            assert!(drafts["accepted"].as_u64().unwrap() <= drafts["drafted"].as_u64().unwrap());
            // The first token comes with the prompt.
            let n =
                answer["drafts"]["passes"].as_u64().unwrap() + drafts["accepted"].as_u64().unwrap();
            assert_eq!(n, 79);
        }
    }
    // The model drafts for itself.
    let demo = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    );
    let call = [
        "-m", demo, "-p", prompt, "-n", "60", "--json", "--temp", "0",
    ];
    let plain = parsed(&run(&[&call[..], &["--no-spec"]].concat()));
    let drafted = parsed(&run(&[&call[..], &["-md", demo]].concat()));
    assert_eq!(drafted["ids"], plain["ids"]);
    assert!(
        drafted["drafts"]["drafters"]["draft"].is_object()
            && drafted["drafts"]["drafters"]["ngram"].is_object()
    );
    let folder = Folder::new();
    let other = tiny(&folder);
    fails(
        &["-m", demo, "-p", "x", "-md", &other],
        1,
        &["tiny", "another vocabulary", "token 0"],
    );
    fails(&["-p", "x", "--spec", "draft"], 2, &["-md FILE"]);
    fails(
        &["-m", demo, "-p", "x", "--spec", "mtp"],
        1,
        &["--spec mtp", "no block for multi-token prediction"],
    );
    fails(
        &["-p", "x", "--spec", "oracle"],
        2,
        &["oracle", "--spec", "ngram"],
    );
    fails(
        &["-p", "x", "--spec", "ngram", "--no-spec"],
        2,
        &["--spec", "--no-spec"],
    );
}

#[test]
fn bad_files() {
    let folder = Folder::new();
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let missing = folder.name("missing.gguf");
    for name in [
        "generate",
        "chat",
        "tokenize",
        "detokenize",
        "perplexity",
        "inspect",
    ] {
        let input = match name {
            "generate" | "tokenize" => &["-p", "x"][..],
            "detokenize" => &["--tokens", "1"],
            "perplexity" => &["-f", readme],
            _ => &[],
        };
        let call = |model| [&[name, "-m", model], input].concat();
        // The rest is in the words of the system.
        let said = if cfg!(windows) {
            "os error 2"
        } else {
            "No such file"
        };
        fails(&call(&missing), 1, &["missing.gguf", said]);
        fails(&call(readme), 1, &["Cargo.toml", "not a GGUF file"]);
    }
    let folder_name = folder.0.to_str().unwrap();
    // A folder may be a checkpoint.
    let lacks = match cfg!(feature = "convert") {
        true => "config.json",
        false => "not a regular file",
    };
    fails(&["-m", folder_name, "-p", "x"], 1, &[lacks]);

    let model = tiny(&folder);
    let whole = std::fs::read(&model).unwrap();
    let cut = folder.file("cut.gguf", &whole[..whole.len() - 1000]);
    fails(&["-m", &cut, "-p", "x"], 1, &["cut.gguf", "incomplete"]);

    fails(&["-m", &model, "-f", &missing], 1, &["missing.gguf"]);
    let binary = folder.file("binary", [0xff, 0xfe]);
    fails(&["-m", &model, "-f", &binary], 1, &["not UTF-8"]);
}

#[test]
fn logits() {
    let folder = Folder::new();
    let (model, out) = (tiny(&folder), folder.name("logits.f32"));
    let expected = library_logits(&Model::open(&model).unwrap(), &[1, 72, 101, 259]);
    let read = || std::fs::read(&out).unwrap();

    stdout(&run(&[
        "logits",
        "-m",
        &model,
        "--tokens",
        "1,72,101,259",
        "-o",
        &out,
    ]));
    assert_eq!(read(), bytes_of(&expected));
    stdout(&run(&[
        "logits",
        "-m",
        &model,
        "--tokens",
        "1,72,101,259",
        "--last",
        "1",
        "-c",
        "4",
        "-o",
        &out,
    ]));
    assert_eq!(read(), bytes_of(&expected[3..]));
    let piped = stdout(&run(&[
        "logits",
        "-m",
        &model,
        "--tokens",
        "1,72,101,259",
        "--last",
        "9",
        "-ub",
        "4",
        "-o",
        "-",
    ]));
    assert_eq!(piped, bytes_of(&expected));
    // However it is computed, and beside whom.
    for how in [
        &["-ub", "1"][..],
        &["--parallel", "3"],
        &["-ub", "3", "--parallel", "2", "-t", "2"],
    ] {
        let call = [
            &[
                "logits",
                "-m",
                &model,
                "--tokens",
                "1,72,101,259",
                "-o",
                "-",
            ],
            how,
        ]
        .concat();
        assert_eq!(stdout(&run(&call)), piped, "{how:?}");
    }
    let exact = [
        "logits",
        "-m",
        &model,
        "--tokens",
        "1,72,101,259",
        "--exact",
        "-o",
        "-",
    ];
    assert_eq!(
        stdout(&run(&exact)),
        stdout(&run(&[&exact[..], &["-ub", "1"]].concat()))
    );
    // Half the precision of the cache is another result.
    let half = stdout(&run(&[
        "logits",
        "-m",
        &model,
        "--tokens",
        "1,72,101,259",
        "-ctk",
        "f16",
        "-o",
        "-",
    ]));
    assert_eq!(half.len(), piped.len());
    assert_ne!(half, piped);

    // A call that fails leaves the file alone.
    let before = read();
    fails(
        &["logits", "-m", &model, "--tokens", "1,264", "-o", &out],
        1,
        &["264"],
    );
    fails(
        &[
            "logits", "-m", &model, "--tokens", "1,2,3", "-c", "2", "-o", &out,
        ],
        1,
        &["-c 3"],
    );
    assert_eq!(read(), before);
}

#[test]
fn tokens_and_back() {
    let folder = Folder::new();
    let mut writer = Writer::new();
    writer.metadata("general.architecture", "llama");
    vocabulary(&mut writer);
    writer.write(folder.path("vocabulary.gguf")).unwrap();
    let model = folder.name("vocabulary.gguf");

    let input = folder.file("input", b"the</s>\xff\n");
    let id = |byte: u8| u32::from(byte) + 3;
    let the = 260; // "▁the"
    let literal = [&[the][..], &b"</s>\xff\n".map(id)].concat();
    let tokenize = |flags: &[&str]| {
        let args = [&["tokenize", "-m", &model, "--json", "-f", &input], flags].concat();
        serde_json::from_value::<Vec<u32>>(parsed(&run(&args))).unwrap()
    };
    assert_eq!(tokenize(&["--no-bos"]), literal);
    assert_eq!(tokenize(&[]), [&[1], &literal[..]].concat());
    assert_eq!(
        tokenize(&["--parse-special", "--no-bos"]),
        [the, 2, 259, id(0xff), id(b'\n')]
    );
    let json = text(&run(&["tokenize", "-m", &model, "--json", "-f", &input]));
    assert!(
        json.starts_with("[1,260,") && json.ends_with("]\n"),
        "{json}"
    );
    let listed = text(&run(&["tokenize", "-m", &model, "-p", "the"]));
    assert_eq!(listed, "     1 -> \"<s>\"\n   260 -> \" the\"\n");

    // These vocabularies put a space before the text after a special token.
    let (same, spaced) = (&b"the</s>\xff\n"[..], &b"the</s> \xff\n"[..]);
    for (flags, text) in [
        (&[][..], same),
        (&["--no-bos"], same),
        (&["--parse-special"], spaced),
        (&["--parse-special", "--no-bos"], spaced),
    ] {
        let ids = stdout(&run(&[
            &["tokenize", "-m", &model, "--json", "-f", &input],
            flags,
        ]
        .concat()));
        let back = run_with_input(&[&["detokenize", "-m", &model], flags].concat(), &ids);
        assert_eq!(stdout(&back), text, "{flags:?}");
    }
    assert_eq!(
        stdout(&run(&["detokenize", "-m", &model, "--tokens", "1,260"])),
        b"the"
    );
    assert_eq!(
        parsed(&run(&[
            "detokenize",
            "-m",
            &model,
            "--tokens",
            "1,260",
            "--json"
        ])),
        json!("the")
    );
    fails(
        &["detokenize", "-m", &model, "--tokens", "264"],
        1,
        &["264"],
    );
    fails(&["-m", &model, "-p", "x"], 1, &["vocabulary.gguf"]);
}

#[test]
fn templates() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let messages = folder.file("messages.json", r#"[{"role": "user", "content": "hi\n"}]"#);
    let render = |flags: &[&str]| {
        text(&run(
            &[&["template", "--messages", &messages], flags].concat()
        ))
    };
    assert_eq!(render(&["-m", &model]), "<s>[user]hi\n");
    assert_eq!(
        render(&["-m", &model, "--add-generation-prompt", "--bos-token", "-"]),
        "-[user]hi\n[assistant]"
    );

    let template = folder.file(
        "t.jinja",
        "{{ bos_token }}{{ eos_token }}{{ x }}{{ tools | length }}{{ strftime_now('%Y-%m-%d %H:%M') }}",
    );
    let tools = folder.file("tools.json", "[{}, {}]");
    let args = [
        "--bos-token",
        "B",
        "--eos-token",
        "E",
        "--kwargs",
        r#"{"x": 7}"#,
        "--tools",
        &tools,
    ];
    let args = [
        &["--template", &template, "--now", "2025-01-15T09:05:07"],
        &args[..],
    ]
    .concat();
    assert_eq!(render(&args), "BE722025-01-15 09:05");

    // By llama.cpp's name, or as a text; what had to be changed is told.
    let by_name = render(&["--chat-template", "chatml", "--add-generation-prompt"]);
    assert_eq!(
        by_name,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(
        render(&["--chat-template", "{{ messages[0].role }}"]),
        "user"
    );
    fails(
        &[
            "template",
            "--chat-template",
            "nonsense",
            "--messages",
            &messages,
        ],
        2,
        &["chatml, ", "--chat-template-file"],
    );
    let two = folder.file(
        "two.json",
        r#"[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]"#,
    );
    let alone = folder.file(
        "alone.jinja",
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('users') }}{% endif %}{{ m.content }}{% endfor %}",
    );
    let fitted = run(&[
        "template",
        "--chat-template-file",
        &alone,
        "--messages",
        &two,
    ]);
    assert_eq!(text(&fitted), "a\n\nb");
    assert!(
        stderr(&fitted).contains("no system role"),
        "{}",
        stderr(&fitted)
    );

    let refusing = folder.file("r.jinja", "a{{ raise_exception('only users') }}");
    fails(
        &["template", "--template", &refusing, "--messages", &messages],
        1,
        &["only users"],
    );
    let broken = folder.file("b.jinja", "{% if %}");
    fails(
        &["template", "--template", &broken, "--messages", &messages],
        1,
        &["line 1"],
    );
    let nonsense = folder.file("nonsense.json", "[");
    fails(
        &["template", "-m", &model, "--messages", &nonsense],
        1,
        &["nonsense.json"],
    );
}

#[test]
fn generate() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let greedy = [
        "-m", &model, "-p", "the", "-n", "12", "--temp", "0", "-ctk", "f32", "-ctv", "f32",
    ];
    let result = parsed(&run(&[&greedy[..], &["--json"]].concat()));

    // Greedy by hand.
    let library = Model::open(&model).unwrap();
    let mut ids = vec![1u32, 260];
    for _ in 0..12 {
        let row = library_logits(&library, &ids).pop().unwrap();
        ids.push(
            (0..row.len())
                .max_by(|&a, &b| row[a].total_cmp(&row[b]))
                .unwrap() as u32,
        );
    }
    assert!(!ids[2..].contains(&2), "the test model ends its text");
    assert_eq!(result["prompt_ids"], json!([1, 260]));
    assert_eq!(result["ids"], json!(ids[2..]));
    assert_eq!(
        (&result["prompt"], &result["stop_reason"]),
        (&json!("the"), &json!("max_tokens"))
    );
    assert_eq!(
        (
            &result["timings"]["prompt_n"],
            &result["timings"]["predicted_n"]
        ),
        (&json!(2), &json!(12))
    );
    assert_eq!(result["model"], json!(model));
    let generated = result["text"].as_str().unwrap();
    assert!(!generated.is_empty());

    let plain = run(&greedy);
    assert_eq!(
        text(&plain).trim_end_matches('\n'),
        generated.trim_end_matches('\n')
    );
    // A line of its own, where the text does not go on in it.
    assert_eq!(stderr(&plain), "the\n");
    let mut quiet = greedy.to_vec();
    quiet.push("--no-display-prompt");
    assert_eq!(stderr(&run(&quiet)), "");
    assert_eq!(
        text(&run(&[&["generate"], &greedy[..]].concat())),
        text(&plain)
    );

    // A stop string ends the text before itself.
    let last = generated.chars().last().unwrap().to_string();
    let stopped = parsed(&run(&[
        &greedy[..],
        &["--json", "--no-escape", "-r", &last],
    ]
    .concat()));
    assert_eq!(stopped["stop_reason"], json!("stop_string"));
    assert_eq!(
        stopped["text"],
        json!(&generated[..generated.find(&last).unwrap()])
    );

    // The context ends it too: two tokens of prompt, then four fit and the fifth is not computed
    // on.
    let full = parsed(&run(&[
        "-m",
        &model,
        "-p",
        "the",
        "-c",
        "6",
        "--temp",
        "0",
        "--ignore-eos",
        "--json",
    ]));
    assert_eq!(
        (&full["stop_reason"], full["ids"].as_array().unwrap().len()),
        (&json!("context_full"), 5)
    );
    fails(&["-m", &model, "-p", "the the the", "-c", "3"], 1, &["-c"]);

    // Forbidding a token forbids it.
    let bias = format!("{}-inf", ids[2]);
    let biased = parsed(&run(
        &[&greedy[..], &["--json", "--logit-bias", &bias]].concat()
    ));
    assert_ne!(biased["ids"][0], json!(ids[2]));
}

#[test]
fn prompts() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let ids = |output: Output| parsed(&output)["prompt_ids"].clone();
    let fixed = ["-m", &model, "-n", "1", "--json"];
    let with = |args: &[&str]| run(&[&fixed[..], args].concat());
    let newline = json!([1, 259, 3 + 10]);
    assert_eq!(ids(with(&["-p", r"\n"])), newline);
    assert_eq!(
        ids(with(&["-p", r"\n", "--no-escape"])),
        json!([1, 259, 3 + b'\\', 3 + b'n'])
    );
    let file = folder.file("prompt.txt", "\n\n");
    assert_eq!(ids(with(&["-f", &file])), newline);
    assert_eq!(ids(run_with_input(&fixed, b"the")), json!([1, 260]));
    assert_eq!(ids(with(&["-p", ""])), json!([1]));
    assert_eq!(ids(with(&["-p", "-ngl"])).as_array().unwrap().len(), 6);

    let mut from_environment = command(&["-p", "the", "--json", "--ignore-eos"]);
    from_environment
        .env("LLAMA_ARG_MODEL", &model)
        .env("LLAMA_ARG_N_PREDICT", "3");
    assert_eq!(
        parsed(&from_environment.output().unwrap())["ids"]
            .as_array()
            .unwrap()
            .len(),
        3
    );
    from_environment.args(["-n", "2"]);
    assert_eq!(
        parsed(&from_environment.output().unwrap())["ids"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
}

#[test]
fn seeds_repeat() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let with = |seed: &str| {
        parsed(&run(&[
            "-m", &model, "-p", "the", "-n", "16", "-s", seed, "--json",
        ]))
    };
    let first = with("-1");
    let again = with(&first["seed"].to_string());
    assert_eq!(first["ids"], again["ids"]);
    assert_ne!(with("1")["ids"], with("2")["ids"]);
}

#[test]
fn the_file_may_recommend_sampling() {
    let folder = Folder::new();
    let mut writer = tiny_model(None);
    writer.metadata("general.sampling.temp", 0f32);
    writer.write(folder.path("cold.gguf")).unwrap();
    let model = folder.name("cold.gguf");
    let with = |flags: &[&str]| {
        let args = [&["-m", &model, "-p", "the", "-n", "16", "--json"], flags].concat();
        parsed(&run(&args))["ids"].clone()
    };
    assert_eq!(with(&["-s", "1"]), with(&["-s", "2"]));
    assert_ne!(
        with(&["-s", "1", "--temp", "1"]),
        with(&["-s", "2", "--temp", "1"])
    );
}

#[test]
fn demo_model_writes_text() {
    let args = ["-p", "Ownership is", "-n", "24", "-s", "1"];
    let result = parsed(&run(&[&args[..], &["--json"]].concat()));
    let generated = result["text"].as_str().unwrap();
    assert!(generated.split_whitespace().count() >= 5, "{generated}");
    assert_eq!(
        text(&run(&args)).trim_end_matches('\n'),
        generated.trim_end_matches('\n')
    );
}

/// The first command of the README: the same paragraph each time, and nothing but it in a pipe.
#[test]
fn the_first_command() {
    let first = run(&["-p", "Ownership is"]);
    let paragraph = text(&first);
    assert_eq!(stderr(&first), "Ownership is\n");
    assert!(paragraph.split_whitespace().count() >= 10, "{paragraph}");
    assert_eq!(paragraph.lines().count(), 1, "{paragraph}");
    assert_eq!(text(&run(&["-p", "Ownership is"])), paragraph);
    let json = parsed(&run(&["-p", "Ownership is", "--json"]));
    assert_eq!(json["stop_reason"], json!("stop_string"));
    assert_eq!(
        json["text"].as_str().map(str::trim_end),
        Some(paragraph.trim_end())
    );

    // Blank lines before it are not its end.
    let heading = text(&run(&["-p", "# Ownership", "-s", "1"]));
    assert!(!heading.trim().is_empty());
    // Names of other programs' flags are understood.
    let stopped = parsed(&run(&[
        "-p",
        "Ownership is",
        "--max-tokens",
        "60",
        "--stop",
        "the",
        "--json",
    ]));
    assert_eq!(stopped["stop_reason"], json!("stop_string"));
    // Whoever says how long a text gets is heeded, and so is who wants another one.
    let longer = parsed(&run(&[
        "-p",
        "Ownership is",
        "--json",
        "-n",
        "100",
        "--ignore-eos",
    ]));
    assert_eq!(longer["ids"].as_array().unwrap().len(), 100);
    let drawn = || parsed(&run(&["-p", "x", "-s", "-1", "-n", "1", "--json"]))["seed"].clone();
    assert_ne!(drawn(), drawn());
}

/// The commands of `docs/guide/tuning.md`, as they stand there.
#[test]
#[cfg(unix)]
fn commands_of_the_tuning_page_run() {
    let folder = Folder::new();
    std::fs::copy(
        concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../models/ruvllm-rust-6m-q8_0.gguf"
        ),
        folder.path("model.gguf"),
    )
    .unwrap();
    folder.file(
        "text.txt",
        &include_str!("../../models/demo-heldout.txt")[..3000],
    );
    let page = include_str!("../../docs/guide/tuning.md");
    let blocks = page
        .split("```sh\n")
        .skip(1)
        .map(|block| block.split_once("```").unwrap().0);
    let mut n = 0;
    for line in blocks.flat_map(str::lines) {
        let arguments = line.strip_prefix("ruvllm ").unwrap();
        let script = format!("exec \"$0\" {arguments}");
        let program = env!("CARGO_BIN_EXE_ruvllm");
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &script, program])
            .current_dir(&folder.0)
            .stdin(Stdio::null());
        let output = shell.output().unwrap();
        assert!(output.status.success(), "{line}: {}", stderr(&output));
        n += 1;
    }
    assert!(n >= 10, "only {n} commands");
}

/// Output that obeys, and what is said of grammars that are none.
#[cfg(feature = "grammar")]
#[test]
fn grammars() {
    let folder = Folder::new();
    let schema = r#"{"type": "object", "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "kind": {"enum": ["struct", "enum"]}}, "required": ["name", "kind"], "additionalProperties": false}"#;
    let gbnf = "root ::= \"fn \" [a-z]{1,5} \"()\"";
    let lark = "%llguidance {}\nstart: \"yes\" | \"no\"\n";
    let (schema_file, grammar_file) = (
        folder.file("schema.json", schema),
        folder.file("grammar.gbnf", gbnf),
    );
    let generated = |flags: &[&str]| {
        let args = ["-p", "The answer is ", "-n", "120", "-s", "1", "--json"];
        let result = parsed(&run(&[&args[..], flags].concat()));
        assert_eq!(
            result["stop_reason"], "end_of_generation",
            "{flags:?}: {result}"
        );
        result["text"].as_str().unwrap().to_owned()
    };
    for flags in [
        &["--json-schema", schema],
        &["-j", schema],
        &["--json-schema-file", &schema_file],
        &["-jf", &schema_file],
    ] {
        let text = generated(&flags[..]);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(
            value["name"].is_string() && (value["kind"] == "struct" || value["kind"] == "enum"),
            "{text}"
        );
    }
    for flags in [&["--grammar", gbnf], &["--grammar-file", &grammar_file]] {
        let text = generated(&flags[..]);
        let name = text
            .strip_prefix("fn ")
            .and_then(|rest| rest.strip_suffix("()"));
        assert!(
            name.is_some_and(|name| name.bytes().all(|b| b.is_ascii_lowercase())),
            "{text}"
        );
    }
    assert!(["yes", "no"].contains(&&generated(&["--grammar", lark])[..]));
    assert_eq!(generated(&["--regex", "[0-9]{3}"]).len(), 3);
    fails(
        &["-p", "x", "--json-schema", r#"{"not": {"const": 1}}"#],
        2,
        &["--json-schema", "\"not\"", "not enforced"],
    );
    fails(
        &["-p", "x", "--json-schema", "{"],
        2,
        &["--json-schema", "not JSON"],
    );
    fails(
        &["-p", "x", "--grammar", "root ::= x"],
        2,
        &["--grammar", "line 1", "\"x\""],
    );
    fails(&["-p", "x", "--regex", "("], 2, &["--regex"]);
    fails(
        &["-p", "x", "--regex", "a", "--grammar", gbnf],
        2,
        &["cannot be used"],
    );
    fails(
        &["-p", "x", "--grammar-file", "missing.gbnf"],
        1,
        &["missing.gbnf"],
    );
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let mut child = command(&[
        "-m",
        &model,
        "-p",
        "the",
        "-c",
        "20000",
        "-s",
        "1",
        "--ignore-eos",
    ])
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 4]).unwrap();
    drop(out);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let message = stderr(&output);
    assert!(
        !message.contains("error") && !message.contains("panic"),
        "{message}"
    );
}

/// Perplexity by llama.cpp's rule, from the library's logits.
fn reference_perplexity(model: &Model, tokens: &[u32], n_ctx: usize) -> (f64, f64) {
    let mut losses = Vec::new();
    for chunk in tokens.chunks_exact(n_ctx) {
        let mut chunk = chunk.to_vec();
        chunk[0] = 1;
        let options = SessionOptions {
            n_ctx: Some(n_ctx),
            kv_type: KvType::F32,
            ..Default::default()
        };
        let mut session = model.session_with(&options).unwrap();
        let each = |i: usize, logits: &[f32]| {
            if i + 1 < n_ctx {
                let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
                losses.push(sum.ln() - f64::from(logits[chunk[i + 1] as usize]));
            }
        };
        session
            .hooks()
            .prefill_each(&chunk, n_ctx / 2, each)
            .unwrap();
    }
    let n = losses.len() as f64;
    let mean = losses.iter().sum::<f64>() / n;
    let variance = losses.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / n;
    (mean.exp(), (variance / (n - 1.0)).sqrt() * mean.exp())
}

#[test]
fn perplexity() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let input = folder.file(
        "input.txt",
        "the cat sat on the mat and the rat sat on the cat\n".repeat(2),
    );
    let ids: Vec<u32> = serde_json::from_value(parsed(&run(&[
        "tokenize", "-m", &model, "--json", "-f", &input,
    ])))
    .unwrap();
    let n_ctx = 16;
    // The last line end is not part of the text.
    let (ppl, error) =
        reference_perplexity(&Model::open(&model).unwrap(), &ids[..ids.len() - 1], n_ctx);

    let args = [
        "perplexity",
        "-m",
        &model,
        "-f",
        &input,
        "-c",
        "16",
        "-ctk",
        "f32",
        "-ctv",
        "f32",
    ];
    let result = parsed(&run(&[&args[..], &["--json"]].concat()));
    // The same f32 logits, but exponentials in f32: relative errors of some 2^-23.
    let close =
        |got: &serde_json::Value, want: f64| (got.as_f64().unwrap() / want - 1.0).abs() < 1e-5;
    assert!(
        close(&result["ppl"], ppl),
        "{} instead of {ppl}",
        result["ppl"]
    );
    assert!(
        close(&result["ppl_error"], error),
        "{} instead of {error}",
        result["ppl_error"]
    );
    assert_eq!(result["n_chunks"], json!((ids.len() - 1) / n_ctx));
    assert_eq!(
        result["n_scored"],
        json!((ids.len() - 1) / n_ctx * (n_ctx / 2 - 1))
    );

    let plain = text(&run(&args));
    let (chunks, last) = plain.trim_end().split_once('\n').unwrap();
    assert!(
        chunks.starts_with("[1]") && chunks.contains(",[2]") && chunks.ends_with(','),
        "{plain}"
    );
    let (ppl, error) = (
        result["ppl"].as_f64().unwrap(),
        result["ppl_error"].as_f64().unwrap(),
    );
    assert_eq!(
        last,
        format!("Final estimate: PPL = {ppl:.4} +/- {error:.5}")
    );
    fails(
        &["perplexity", "-m", &model, "-f", &input, "-c", "100"],
        1,
        &["-c"],
    );
}

#[test]
fn quantize() {
    let folder = Folder::new();
    let (model, out) = (tiny(&folder), folder.name("q4.gguf"));
    let ok = run(&["quantize", &model, &out, "q4_0"]);
    assert!(stdout(&ok).is_empty());
    assert!(stderr(&ok).contains("bits per weight"));
    let (before, after) = (Gguf::open(&model).unwrap(), Gguf::open(&out).unwrap());
    for (key, value) in before.metadata().iter() {
        assert_eq!(after.metadata().get(key), Some(value), "{key}");
    }
    assert_eq!(
        after.metadata().get("general.file_type"),
        Some(&Value::U32(2))
    );
    assert_eq!(
        after.metadata().get("general.quantization_version"),
        Some(&Value::U32(2))
    );
    let dtype = |gguf: &Gguf, name: &str| gguf.tensor(name).unwrap().dtype;
    assert_eq!(dtype(&after, "blk.0.attn_q.weight"), DType::Q4_0);
    assert_eq!(dtype(&after, "blk.0.attn_norm.weight"), DType::F32);
    let q = after.tensor("blk.1.ffn_down.weight").unwrap();
    assert_eq!(q.dims, [96, 64]);
    let mut expected = vec![0; q.n_bytes as usize];
    let source = before.tensor("blk.1.ffn_down.weight").unwrap();
    let values: Vec<f32> = before
        .data(source)
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect();
    ruvllm::quant::quantize_row(DType::Q4_0, &values, None, &mut expected).unwrap();
    assert_eq!(after.data(q), expected);
    assert!(
        !parsed(&run(&["-m", &out, "-p", "the", "-n", "4", "--json"]))["ids"]
            .as_array()
            .unwrap()
            .is_empty()
    );

    drop(after);
    let written = std::fs::read(&out).unwrap();
    fails(
        &["quantize", &model, &out, "Q8_0"],
        1,
        &["q4.gguf", "--overwrite"],
    );
    assert_eq!(std::fs::read(&out).unwrap(), written);
    stdout(&run(&[
        "quantize",
        &model,
        &out,
        "Q8_0",
        "--overwrite",
        "-t",
        "1",
    ]));
    assert_eq!(
        dtype(&Gguf::open(&out).unwrap(), "blk.0.attn_q.weight"),
        DType::Q8_0
    );
    let again = folder.name("again.gguf");
    fails(
        &["quantize", &out, &again, "Q4_0"],
        1,
        &["--allow-requantize"],
    );
    assert!(!Path::new(&again).exists());
    stdout(&run(&[
        "quantize",
        &out,
        &again,
        "Q4_0",
        "--allow-requantize",
    ]));
    let left: Vec<_> = std::fs::read_dir(&folder.0)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

/// The table has the sizes of the types and the losses of files that `quantize` writes.
#[test]
fn formats() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let input = folder.file(
        "input.txt",
        "the cat sat on the mat and the rat sat on the cat\n".repeat(2),
    );
    let picture = folder.name("types.svg");
    let args = [
        "bench",
        "formats",
        "-m",
        &model,
        "-f",
        &input,
        "-c",
        "16",
        "--types",
        "Q8_0,Q4_0",
        "--svg",
        &picture,
    ];
    let speed = [
        "--shape",
        "qwen2-0.5b",
        "-p",
        "2",
        "-n",
        "1",
        "-r",
        "1",
        "-o",
        "json",
    ];
    let table = parsed(&run(&[&args[..], &speed].concat()));
    let rows = table.as_array().unwrap();
    let types: Vec<_> = rows
        .iter()
        .map(|row| row["type"].as_str().unwrap())
        .collect();
    assert_eq!(types, ["Q8_0", "Q4_0"]);
    for row in rows {
        let (name, out) = (row["type"].as_str().unwrap(), folder.name("out.gguf"));
        stdout(&run(&["quantize", &model, &out, name, "--overwrite"]));
        let alone = parsed(&run(&[
            "perplexity",
            "-m",
            &out,
            "-f",
            &input,
            "-c",
            "16",
            "--json",
        ]));
        assert_eq!(row["ppl"], alone["ppl"], "{name}");
        assert!(row["prompt_ts"].as_f64().unwrap() > 0.0 && row["gen_ts"].as_f64().unwrap() > 0.0);
    }
    assert!(rows[1]["size"].as_u64() < rows[0]["size"].as_u64());
    let kl = |i: usize| rows[i]["kl"].as_f64().unwrap();
    assert!(0.0 < kl(0) && kl(0) < kl(1), "{} {}", kl(0), kl(1));
    let picture = std::fs::read_to_string(folder.path("types.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains(">Q4_0<"));
    fails(
        &["bench", "formats", "-f", &input, "--types", "Q9_Z"],
        2,
        &["Q9_Z", "Q4_K_M"],
    );
    fails(
        &["bench", "formats", "-f", &input, "--shape", "llama-9b"],
        2,
        &["llama-1b"],
    );
    fails(
        &["bench", "formats", "-f", &input, "-c", "5000"],
        1,
        &["at least two chunks"],
    );
}

/// Text of a hundred tokens or so.
fn cats(folder: &Folder) -> String {
    let text = "the cat sat on the mat and the rat sat on the cat\n".repeat(4);
    folder.file("cats.txt", text)
}

/// Sums and counts of a tensor in an importance matrix.
fn sums_of(path: &str, name: &str) -> (Vec<f32>, Vec<f32>) {
    let gguf = Gguf::open(path).unwrap();
    let floats = |suffix: &str| -> Vec<f32> {
        let tensor = gguf.tensor(&format!("{name}.{suffix}")).unwrap();
        let words = gguf.data(tensor).chunks_exact(4);
        words
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    };
    (floats("in_sum2"), floats("counts"))
}

#[test]
fn imatrix() {
    let folder = Folder::new();
    let (model, text) = (tiny(&folder), cats(&folder));
    let (whole, parts) = (folder.name("whole.gguf"), folder.name("parts.gguf"));
    let compute = |out: &str, more: &[&str]| {
        let line = ["imatrix", "-m", &model, "-f", &text, "-c", "16", "-o", out];
        run(&[&line[..], more].concat())
    };
    stdout(&compute(&whole, &["--chunks", "2"]));
    // Both read the same inputs, of two chunks of 16 tokens.
    let (q, counts) = sums_of(&whole, "blk.0.attn_q.weight");
    assert_eq!((q.len(), &counts[..]), (64, &[32.0][..]));
    assert_eq!(q, sums_of(&whole, "blk.0.attn_k.weight").0);
    assert!(q.iter().all(|&x| x > 0.0));
    assert_eq!(sums_of(&whole, "blk.1.ffn_down.weight").0.len(), 96);
    let gguf = Gguf::open(&whole).unwrap();
    assert!(gguf.tensor("output.weight.in_sum2").is_none());
    assert_eq!(gguf.metadata().u32("imatrix.chunk_count").unwrap(), 2);

    // A run that was ended after a chunk, and goes on.
    stdout(&compute(&parts, &["--chunks", "1"]));
    stdout(&compute(&parts, &["--chunks", "2", "--resume"]));
    for name in ["blk.0.attn_q.weight", "blk.1.ffn_down.weight"] {
        let ((a, counts_a), (b, counts_b)) = (sums_of(&whole, name), sums_of(&parts, name));
        assert_eq!(counts_a, counts_b);
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * a.abs();
        assert!(a.iter().zip(&b).all(close), "{name}");
    }
    fails(
        &[
            "imatrix", "-m", &model, "-f", &text, "-c", "32", "-o", &parts, "--resume",
        ],
        1,
        &["-c 16"],
    );
    let line = [
        "imatrix", "-m", &model, "-f", &text, "-c", "16", "-o", &whole,
    ];
    fails(&line, 1, &["--overwrite"]);

    // Added up, in the older format.
    let both = folder.name("both.dat");
    let line = [
        "imatrix",
        "--in-file",
        &whole,
        "--in-file",
        &parts,
        "-o",
        &both,
    ];
    stdout(&run(&[&line[..], &["--output-format", "dat"]].concat()));
    let [plain, guided, older] = ["plain", "guided", "older"].map(|name| folder.name(name));
    stdout(&run(&["quantize", &model, &plain, "Q4_0"]));
    stdout(&run(&[
        "quantize",
        &model,
        &guided,
        "Q4_0",
        "--imatrix",
        &whole,
    ]));
    stdout(&run(&[
        "quantize",
        &model,
        &older,
        "Q4_0",
        "--imatrix",
        &both,
    ]));
    let read = |path: &str| std::fs::read(path).unwrap();
    assert_ne!(read(&plain), read(&guided));
    assert_eq!(read(&plain).len(), read(&older).len());
    // Nothing is converted where the types are those already: no tensor lacks importance.
    let again = folder.name("again");
    let line = ["quantize", &plain, &again, "Q4_0", "--allow-requantize"];
    stdout(&run(&[&line[..], &["--imatrix", &whole]].concat()));
    assert_eq!(read(&again).len(), read(&plain).len());
    // A part of the tensors.
    let part = folder.name("part");
    let line = ["quantize", &model, &part, "Q4_0", "--imatrix", &whole];
    let none = [&line[..], &["--include-weights", "nothing"]].concat();
    fails(&none, 1, &["another model"]);
    stdout(&run(&[&line[..], &["--exclude-weights", "ffn"]].concat()));
    let (part, plain) = (Gguf::open(&part).unwrap(), Gguf::open(&plain).unwrap());
    let same = |name: &str| {
        part.data(part.tensor(name).unwrap()) == plain.data(plain.tensor(name).unwrap())
    };
    assert!(same("blk.0.ffn_up.weight") && !same("blk.0.attn_q.weight"));

    let cut = folder.file("cut.dat", &read(&both)[..100]);
    let out = folder.name("out.gguf");
    fails(
        &["quantize", &model, &out, "Q4_0", "--imatrix", &cut],
        1,
        &["cut.dat", "middle"],
    );
    fails(
        &["quantize", &model, &out, "Q4_0", "--imatrix", &model],
        1,
        &["no sums"],
    );
    assert!(!Path::new(&out).exists());
}

#[test]
fn types_by_tensor() {
    let folder = Folder::new();
    let (model, out) = (tiny(&folder), folder.name("out.gguf"));
    let quantize = |more: &[&str]| {
        let line = ["quantize", &model, &out, "Q4_0", "--overwrite"];
        stdout(&run(&[&line[..], more].concat()));
        // Not mapped: Windows replaces no file that is.
        let gguf = Gguf::from_bytes(std::fs::read(&out).unwrap()).unwrap();
        move |name: &str| gguf.tensor(name).unwrap().dtype
    };
    let types = quantize(&[
        "--tensor-type",
        "ffn_down=q8_0",
        "--tensor-type",
        "blk\\.0\\.=q5_0",
    ]);
    assert_eq!(types("blk.0.ffn_down.weight"), DType::Q8_0);
    assert_eq!(types("blk.0.ffn_up.weight"), DType::Q5_0);
    assert_eq!(types("blk.1.ffn_up.weight"), DType::Q4_0);
    assert_eq!(types("blk.0.attn_norm.weight"), DType::F32);
    let types = quantize(&["--token-embedding-type", "q5_1", "--leave-output-tensor"]);
    assert_eq!(types("token_embd.weight"), DType::Q5_1);
    // Rows of 64 are no whole blocks of 256.
    let types = quantize(&["--tensor-type", "attn_q=IQ2_S"]);
    assert_eq!(types("blk.0.attn_q.weight"), DType::IQ4_NL);
    let types = quantize(&["--pure"]);
    assert_eq!(types("token_embd.weight"), DType::Q4_0);
    let line = [
        "quantize",
        &model,
        &out,
        "Q4_0",
        "--overwrite",
        "--tensor-type",
    ];
    fails(
        &[&line[..], &["ffn_dawn=Q8_0"]].concat(),
        2,
        &["ffn_dawn", "ffn_down"],
    );
    fails(
        &[&line[..], &["ffn_down=Q9"]].concat(),
        2,
        &["Q9", "IQ2_XXS"],
    );
    fails(&[&line[..], &["ffn_(=Q8_0"]].concat(), 2, &["ffn_("]);

    // What is quantised may become floats, and no file replaces itself.
    let floats = folder.name("f16.gguf");
    stdout(&run(&["quantize", &out, &floats, "F16"]));
    let link = folder.name("link.gguf");
    std::fs::hard_link(&floats, &link).unwrap();
    let line = ["quantize", &floats, &link, "Q8_0", "--overwrite"];
    fails(&line, 2, &["the input itself"]);
    // A process that was killed has left this behind.
    let left = folder.file(".new.gguf.4194304.0.tmp", "half");
    stdout(&run(&[
        "quantize",
        &floats,
        &folder.name("new.gguf"),
        "Q8_0",
    ]));
    assert!(!Path::new(&left).exists());
}

#[test]
fn kl_divergence() {
    let folder = Folder::new();
    let (model, text) = (tiny(&folder), cats(&folder));
    let (base, small) = (folder.name("base.bin"), folder.name("small.gguf"));
    let line = ["perplexity", "-m", &model, "-f", &text, "-c", "16"];
    stdout(&run(&[&line[..], &["--kl-divergence-base", &base]].concat()));
    stdout(&run(&["quantize", &model, &small, "Q2_K"]));
    let compare = |model: &str| {
        let line = ["perplexity", "-m", model, "--kl-divergence-base", &base];
        parsed(&run(&[&line[..], &["--kl-divergence", "--json"]].concat()))
    };
    let (itself, worse) = (compare(&model), compare(&small));
    // Codes of 16 bits: half a step is 1.2e-4 of a log-probability.
    assert!(itself["kl"].as_f64().unwrap().abs() < 1e-4, "{itself}");
    assert!(itself["same_top"].as_f64().unwrap() > 0.9);
    assert!(worse["kl"].as_f64().unwrap() > 1e-4, "{worse}");
    assert!(worse["kl_99"].as_f64() >= worse["kl_median"].as_f64());
    let cut = std::fs::read(&base).unwrap();
    let cut = folder.file("cut.bin", &cut[..cut.len() - 1]);
    let line = [
        "perplexity",
        "-m",
        &model,
        "--kl-divergence",
        "--kl-divergence-base",
    ];
    fails(
        &[&line[..], &[&cut]].concat(),
        1,
        &["cut.bin", "ends before"],
    );
    fails(&[&line[..], &[&text]].concat(), 1, &["log-probabilities"]);
}

#[test]
fn quantize_refuses_damaged_weights() {
    let folder = Folder::new();
    let mut writer = tiny_model(None);
    writer.tensor(
        "blk.0.damaged.weight",
        &[32, 2],
        DType::F32,
        [[0u8; 4], f32::NAN.to_le_bytes()].concat().repeat(32),
    );
    writer.write(folder.path("nan.gguf")).unwrap();
    fails(
        &[
            "quantize",
            &folder.name("nan.gguf"),
            &folder.name("out.gguf"),
            "Q8_0",
        ],
        1,
        &["blk.0.damaged.weight", "NaN"],
    );
    assert!(!folder.path("out.gguf").exists());
}

#[test]
fn inspect() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let whole = parsed(&run(&["inspect", &model, "--json"]));
    assert_eq!(whole["architecture"], json!("llama"));
    assert_eq!(
        (
            &whole["runnable"],
            &whole["complete"],
            &whole["chat_template"]
        ),
        (&json!(true), &json!(true), &json!(true))
    );
    assert_eq!(
        (&whole["n_layer"], &whole["n_ctx_train"]),
        (&json!(2), &json!(128))
    );
    assert_eq!(whole["tokenizer"]["n_vocab"], json!(N_VOCAB));
    let n_params = 2 * 64 * N_VOCAB + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96);
    assert_eq!(whole["n_params"], json!(n_params));
    assert_eq!(
        whole["types"],
        json!({"F32": {"tensors": 21, "params": n_params, "bytes": 4 * n_params}})
    );
    assert!(text(&run(&["inspect", "-m", &model])).contains("runs here      yes\n"));

    // The header is enough.
    let bytes = std::fs::read(&model).unwrap();
    let header = Gguf::open(&model).unwrap().header().data_offset as usize;
    let cut = folder.file("cut.gguf", &bytes[..header + 100]);
    let cut = parsed(&run(&[
        "inspect",
        &cut,
        "--json",
        "--tensors",
        "--metadata",
    ]));
    assert_eq!(
        (&cut["runnable"], &cut["complete"]),
        (&json!(true), &json!(false))
    );
    assert_eq!(
        (&cut["n_params"], &cut["expected_size"]),
        (&json!(n_params), &json!(bytes.len()))
    );
    assert_eq!(cut["tensors"].as_array().unwrap().len(), 21);
    assert_eq!(cut["metadata"]["general.name"], json!("tiny"));

    let mut writer = Writer::new();
    writer.metadata("general.architecture", "gptj");
    writer.tensor("a.weight", &[32], DType::Q8_0, vec![0; 34]);
    writer.write(folder.path("gptj.gguf")).unwrap();
    let other = parsed(&run(&["inspect", &folder.name("gptj.gguf"), "--json"]));
    assert_eq!(other["runnable"], json!(false));
    let obstacle = other["obstacle"].as_str().unwrap();
    assert!(
        obstacle.contains("gptj") && obstacle.contains("qwen3"),
        "{obstacle}"
    );
}

#[test]
fn doctor() {
    let result = parsed(&run(&["doctor", "--json"]));
    let levels = result["levels"].as_array().unwrap();
    assert_eq!(levels.last(), Some(&json!("scalar")));
    assert!(levels.contains(&result["level"]));
    assert!(result["threads"].as_u64().unwrap() >= 1);
    assert!(
        result["features"]
            .as_array()
            .unwrap()
            .contains(&json!("demo-model"))
    );
    assert!(text(&run(&["doctor"])).contains("level used"));

    let forced = command(&["doctor", "--json"])
        .env("RUVLLM_ARCH", "scalar")
        .output()
        .unwrap();
    assert_eq!(parsed(&forced)["level"], json!("scalar"));
    let unknown = command(&["doctor"])
        .env("RUVLLM_ARCH", "nonsense")
        .output()
        .unwrap();
    assert_eq!(unknown.status.code(), Some(1));
    assert!(stderr(&unknown).contains("nonsense"));
}

#[cfg(feature = "serve")]
/// The results of a batch by their ids.
fn results(path: &Path) -> std::collections::BTreeMap<String, serde_json::Value> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    let by_id = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        (value["custom_id"].as_str().unwrap().to_owned(), value)
    };
    let all: std::collections::BTreeMap<_, _> = text.lines().map(by_id).collect();
    assert_eq!(all.len(), text.lines().count(), "every id once");
    all
}

#[test]
#[cfg(feature = "serve")]
fn batches() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let line = |id: &str, url: &str, body: serde_json::Value| {
        json!({"custom_id": id, "method": "POST", "url": url, "body": body}).to_string() + "\n"
    };
    let completion =
        |i: u64| json!({"prompt": "the the", "max_tokens": 4 + i % 9, "seed": i, "model": "m"});
    let mut requests: String = (0..20)
        .map(|i| line(&format!("r{i}"), "/v1/completions", completion(i)))
        .collect();
    let chat = json!({"messages": [{"role": "user", "content": "the"}], "max_completion_tokens": 5, "stop": "t", "seed": 7});
    requests += &line("chat", "/v1/chat/completions", chat);
    requests += &line(
        "both",
        "/v1/completions",
        json!({"prompt": "the", "n": 2, "max_tokens": 2, "logprobs": 1, "seed": 7}),
    );
    requests += &line("vector", "/v1/embeddings", json!({"input": "the the"}));
    let file = folder.file("requests.jsonl", &requests);
    let (out, output) = (folder.path("results.jsonl"), folder.name("results.jsonl"));
    let flags = [
        "batch",
        "-m",
        &model,
        "-f",
        &file,
        "-o",
        &output,
        "--ignore-eos",
    ];
    let first = run(&flags);
    assert_eq!(
        (&*text(&first), &*stderr(&first)),
        ("", ""),
        "silent in a pipe"
    );
    let all = results(&out);
    assert_eq!(all.len(), requests.lines().count());
    for i in 0..20 {
        let n = (4 + i % 9).to_string();
        let alone = [
            "-m",
            &model,
            "-p",
            "the the",
            "-n",
            &n,
            "-s",
            &i.to_string(),
            "--ignore-eos",
            "--json",
        ];
        let alone = parsed(&run(&alone));
        let body = &all[&format!("r{i}")]["response"]["body"];
        assert_eq!(body["choices"][0]["text"], alone["text"], "request {i}");
        assert_eq!(body["usage"]["prompt_tokens"], alone["timings"]["prompt_n"]);
        assert_eq!(
            (&body["usage"]["completion_tokens"], &body["model"]),
            (&json!(4 + i % 9), &json!("tiny.gguf"))
        );
        assert_eq!(body["choices"][0]["finish_reason"], "length");
    }
    let body = &all["chat"]["response"]["body"];
    assert_eq!(
        (&body["object"], &body["choices"][0]["message"]["role"]),
        (&json!("chat.completion"), &json!("assistant"))
    );
    let choices = all["both"]["response"]["body"]["choices"]
        .as_array()
        .unwrap();
    assert_eq!(choices.len(), 2);
    assert!(
        choices
            .iter()
            .all(|choice| choice["logprobs"]["tokens"].as_array().unwrap().len() == 2)
    );
    assert!(
        all["vector"]["response"]["body"]["data"][0]["embedding"]
            .as_array()
            .unwrap()
            .len()
            > 1
    );

    // Nothing is left to do.
    let before = std::fs::read(&out).unwrap();
    text(&run(&flags));
    assert_eq!(std::fs::read(&out).unwrap(), before);
    // Interrupted in the middle of a line: that result is computed again, the same, and no other.
    let cut = before.len() - 40;
    std::fs::write(&out, &before[..cut]).unwrap();
    text(&run(&flags));
    let again = results(&out);
    let kept = before[..cut].iter().rposition(|&b| b == b'\n').unwrap() + 1;
    assert!(std::fs::read(&out).unwrap().starts_with(&before[..kept]));
    let texts = |all: &std::collections::BTreeMap<String, serde_json::Value>| -> Vec<String> {
        all.values()
            .map(|value| value["response"]["body"]["choices"].to_string())
            .collect()
    };
    assert_eq!(texts(&again), texts(&all));

    // What a request asks and is not understood fails that request alone.
    let wrong = [
        ("key", json!({"prompt": "the", "tools": []}), "tools"),
        (
            "type",
            json!({"prompt": "the", "temperature": "hot"}),
            "temperature",
        ),
        (
            "many",
            json!({"prompt": "the", "n": 65}),
            "n: expected 1 to 64",
        ),
        (
            "none",
            json!({"max_tokens": 3}),
            "prompt: this field is required",
        ),
        ("stream", json!({"prompt": "the", "stream": true}), "stream"),
        ("long", json!({"prompt": "the ".repeat(500)}), "context"),
    ];
    let lines = wrong
        .iter()
        .map(|(id, body, _)| line(id, "/v1/completions", body.clone()))
        .collect::<String>();
    let lines = lines
        + &line("path", "/health", json!({}))
        + &line("good", "/v1/completions", completion(1));
    let file = folder.file("wrong.jsonl", lines);
    let (out, output) = (folder.path("wrong.out"), folder.name("wrong.out"));
    fails(
        &[
            "batch",
            "-m",
            &model,
            "-f",
            &file,
            "-o",
            &output,
            "--ignore-eos",
        ],
        1,
        &["7 of 8 requests failed"],
    );
    let all = results(&out);
    for (id, _, part) in &wrong {
        assert_eq!(all[*id]["response"]["status_code"], 400);
        let message = all[*id]["error"]["message"].as_str().unwrap();
        assert!(message.contains(*part), "{id}: {message}");
    }
    assert_eq!(all["path"]["response"]["status_code"], 405);
    assert_eq!(all["path"]["error"]["message"], "this path takes no POST");
    assert!(all["good"]["error"].is_null());

    // Called again: nothing is computed, and the failures are told again. Asked to try again:
    // those that failed, and no other.
    let again = [
        "batch",
        "-m",
        &model,
        "-f",
        &file,
        "-o",
        &output,
        "--ignore-eos",
    ];
    let before = std::fs::read(&out).unwrap();
    fails(&again, 1, &["7 of 8 requests failed"]);
    assert_eq!(std::fs::read(&out).unwrap(), before);
    let fixed = wrong
        .iter()
        .map(|(id, ..)| line(id, "/v1/completions", completion(2)))
        .collect::<String>();
    let fixed = fixed
        + &line("path", "/v1/completions", completion(3))
        + &line(
            "good",
            "/v1/completions",
            json!({"prompt": "not asked again", "n": 0}),
        );
    let file = folder.file("wrong.jsonl", fixed);
    let again = [
        "batch",
        "-m",
        &model,
        "-f",
        &file,
        "-o",
        &output,
        "--ignore-eos",
    ];
    fails(&again, 1, &["7 of 8 requests failed"]);
    text(&run(&[&again[..], &["--retry-failed"]].concat()));
    let now = results(&out);
    assert_eq!(now.len(), 8);
    assert!(now.values().all(|result| result["error"].is_null()));
    assert_eq!(now["good"], all["good"]);
    text(&run(&again));

    // What is no batch is refused before anything is computed.
    for (name, bytes, part) in [
        ("json", "{\n", "line 1"),
        ("id", "{\"method\": \"POST\"}\n", "custom_id"),
        (
            "twice",
            &line("a", "/v1/completions", json!({})).repeat(2),
            "twice",
        ),
    ] {
        let file = folder.file(name, bytes);
        let output = folder.name("never.jsonl");
        fails(
            &["batch", "-m", &model, "-f", &file, "-o", &output],
            1,
            &[part],
        );
        assert!(!folder.path("never.jsonl").exists());
    }
    let foreign = folder.file("notes.txt", "not a result\n");
    fails(
        &["batch", "-m", &model, "-f", &file, "-o", &foreign],
        1,
        &["line 1", "another -o"],
    );
    assert_eq!(std::fs::read(&foreign).unwrap(), b"not a result\n");
}

#[test]
fn batched_benches() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let flags = [
        "bench", "batch", "-m", &model, "-npp", "5,40", "-ntg", "3", "-npl", "1,4", "-ub", "16",
    ];
    let table = text(&run(&flags));
    assert_eq!(table.lines().count(), 2 + 4, "{table}");
    assert!(
        table.starts_with("|    PP |     TG |    B |   N_KV |"),
        "{table}"
    );
    let rows = text(&run(
        &[&flags[..], &["--output-format", "jsonl", "-pps"]].concat()
    ));
    let rows: Vec<serde_json::Value> = rows
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let n_kv: Vec<u64> = rows
        .iter()
        .map(|row| row["n_kv"].as_u64().unwrap())
        .collect();
    assert_eq!(n_kv, [8, 17, 43, 52]);
    assert!(
        rows.iter()
            .all(|row| row["speed_tg"].as_f64().unwrap() > 0.0)
    );
    fails(
        &["bench", "batch", "-m", &model, "-npl", "0"],
        2,
        &["--n-sequences"],
    );
    let flags = [
        "bench",
        "batch",
        "-m",
        &model,
        "-npp",
        "5",
        "-ntg",
        "4",
        "-npl",
        "1,3",
        "--arriving",
        "60",
    ];
    let table = text(&run(&flags));
    assert_eq!(table.lines().count(), 2 + 2, "{table}");
    for row in text(&run(&[&flags[..], &["--output-format", "jsonl"]].concat())).lines() {
        let row: serde_json::Value = serde_json::from_str(row).unwrap();
        assert!(
            row["p99_ratio"].as_f64().unwrap() > 0.0 && row["prompt_share"].as_f64().unwrap() > 0.0,
            "{row}"
        );
    }
}

/// Drafts that are all right, or all wrong, and recorded answers; the shipped model has their
/// tokens.
#[test]
fn benches_of_drafts() {
    let demo = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    );
    let recorded = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/replay.jsonl");
    let flags = [
        "bench", "replay", "-m", demo, "-t", "1", "-r", "1", "-o", "json",
    ];
    let rows = |more: &[&str]| -> Vec<serde_json::Value> {
        serde_json::from_str(&text(&run(&[&flags[..], more].concat()))).unwrap()
    };
    let synthetic = rows(&["--spec-synthetic", "0,1", "-n", "200", "-d", "30"]);
    let [none, all] = &synthetic[..] else {
        panic!("{synthetic:?}")
    };
    let count =
        |row: &serde_json::Value, what: &str| row["drafters"]["synthetic"][what].as_u64().unwrap();
    assert_eq!(
        (count(none, "accepted"), none["passes"].as_u64()),
        (0, Some(199))
    );
    assert_eq!(count(all, "accepted"), count(all, "drafted"));
    // Each token but the first, which comes with the prompt, and the last, which is not computed,
    // is drafted or has a pass.
    assert_eq!(
        all["passes"].as_u64().unwrap() + count(all, "accepted"),
        199
    );
    assert_eq!(
        (all["n_prompt"].as_u64(), all["n_gen"].as_u64()),
        (Some(30), Some(200))
    );

    let folder = Folder::new();
    let picture = folder.name("drafts.svg");
    let replayed = rows(&["-f", recorded, "--svg", &picture]);
    assert_eq!(replayed.len(), 10);
    let picture = std::fs::read_to_string(&picture).unwrap();
    assert_eq!(picture.matches("<rect x=").count(), 10);
    for row in &replayed {
        let accepted = row["drafters"]["ngram"]["accepted"].as_u64().unwrap();
        assert_eq!(
            row["passes"].as_u64().unwrap() + accepted + 1,
            row["n_gen"].as_u64().unwrap(),
            "{row}"
        );
        assert!(row["speedup"].as_f64().unwrap() > 0.0);
    }

    for (line, part) in [
        (
            "{\"name\": \"a\", \"prompt\": \"b\"}",
            "line 2: answer must be a text",
        ),
        (
            "{\"name\": \"a\", \"prompt\": \"b\", \"answer\": \"\"}",
            "line 2: answer must be a text",
        ),
        (
            "{\"name\": \"a\", \"prompt\": \"b\", \"answer\": \"c\", \"n\": 1}",
            "line 2: unknown key \"n\"",
        ),
        ("[]", "line 2"),
    ] {
        let file = folder.file("wrong.jsonl", format!("\n{line}\n"));
        fails(&[&flags[..], &["-f", &file]].concat(), 1, &[part]);
    }
    fails(
        &[&flags[..], &["--spec-synthetic", "1.5"]].concat(),
        2,
        &["from 0 to 1"],
    );
    fails(
        &[&flags[..], &["-f", recorded, "-p", "5"]].concat(),
        2,
        &["-p"],
    );
    fails(&flags, 2, &["-f FILE", "--spec-synthetic"]);
    fails(
        &[&flags[..], &["--spec-synthetic", "1", "--no-spec"]].concat(),
        2,
        &["-f FILE"],
    );
}

/// What a run measured is there for the next one and for `doctor`; what is damaged, foreign or old
/// is ignored.
#[test]
fn measurements_are_kept_and_never_needed() {
    let folder = Folder::new();
    let within = |args: &[&str]| {
        command(args)
            .env("XDG_CACHE_HOME", &folder.0)
            .output()
            .unwrap()
    };
    let generate = ["-p", "Ownership is", "-n", "20", "--temp", "0", "-t", "1"];
    let doctor = || -> serde_json::Value {
        serde_json::from_str(&text(&within(&["doctor", "--json"]))).unwrap()
    };
    assert_eq!(doctor()["measured"].as_array().unwrap().len(), 0);
    let first = within(&generate);
    let measured = doctor()["measured"].clone();
    assert_eq!(
        (
            measured[0]["threads"].as_u64(),
            measured.as_array().unwrap().len()
        ),
        (Some(1), 1),
        "{measured}"
    );
    assert!(measured[0]["rows_us"]["1"].as_f64().unwrap() > 0.0);
    assert!(text(&within(&["doctor"])).contains("best at -t 1"));
    // What `bench` adds is kept when others measure again.
    assert!(measured[0]["bandwidth"].is_null());
    let demo = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    );
    text(&within(&[
        "bench", "-m", demo, "-p", "0", "-n", "4", "-r", "1", "-t", "1",
    ]));
    let bandwidth = doctor()["measured"][0]["bandwidth"].clone();
    assert!(bandwidth.as_f64().unwrap() > 1e6, "{bandwidth}");
    text(&within(&generate));
    assert_eq!(doctor()["measured"][0]["bandwidth"], bandwidth);
    assert!(text(&within(&["doctor"])).contains("GB/s read from memory"));
    // Of two numbers of threads the faster one is told.
    text(&within(&[&generate[..], &["-t", "2"]].concat()));
    assert_eq!(doctor()["measured"].as_array().unwrap().len(), 1);

    let path = folder.path("ruvllm/measured.json");
    let good = std::fs::read_to_string(&path).unwrap();
    let changed = |from: &str, to: &str| {
        assert!(good.contains(from), "{good}");
        good.replacen(from, to, 1)
    };
    for (content, word) in [
        ("{".to_owned(), "not JSON"),
        ("[1]".to_owned(), "another version"),
        ("\u{0}".repeat(300 << 10), "not a file of measurements"),
        (
            changed("\"version\": \"", "\"version\": \"9"),
            "another version",
        ),
        (changed("\"threads\": 1", "\"threads\": -1"), "damaged"),
        (changed("\"threads\": 1", "\"threads\": 99999"), "damaged"),
        (changed("\"1\": ", "\"1\": 1e300, \"2\": "), "damaged"),
        (
            changed("\"bandwidth\": ", "\"bandwidth\": 1e300, \"old\": "),
            "damaged",
        ),
        (
            changed("\"entries\"", "\"entrees\""),
            "without measurements",
        ),
    ] {
        std::fs::write(&path, &content).unwrap();
        assert!(text(&within(&["doctor"])).contains(word), "{word}");
        assert_eq!(doctor()["measured"].as_array().unwrap().len(), 0);
        let again = within(&generate);
        assert_eq!(
            (&again.stdout, again.status.code()),
            (&first.stdout, Some(0))
        );
        assert!(stderr(&again).contains(word), "{}", stderr(&again));
        assert_eq!(
            doctor()["measured"].as_array().unwrap().len(),
            1,
            "it was written again"
        );
    }
    // Too old, or of the future.
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    for time in [0, now - 31 * 24 * 3600, now + 3600] {
        let mut file: serde_json::Value = serde_json::from_str(&good).unwrap();
        file["entries"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .for_each(|entry| entry["time"] = time.into());
        std::fs::write(&path, file.to_string()).unwrap();
        assert_eq!(doctor()["measured"].as_array().unwrap().len(), 0);
    }
    // A folder that cannot be: nothing is kept, and nothing fails.
    let file = folder.file("file", "");
    let out = command(&generate)
        .env("XDG_CACHE_HOME", &file)
        .output()
        .unwrap();
    assert_eq!((out.stdout, out.status.code()), (first.stdout, Some(0)));
}

#[test]
fn bench_of_the_prefix_cache() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let flags = [
        "bench",
        "-m",
        &model,
        "-r",
        "2",
        "--scenario",
        "chat,rag,batch",
    ];
    let rows: Vec<serde_json::Value> =
        serde_json::from_str(&text(&run(&[&flags[..], &["-o", "json"]].concat()))).unwrap();
    assert_eq!(rows.len(), 3 * 3 + 3);
    let number = |row: &serde_json::Value, name: &str| row[name].as_f64().unwrap();
    for row in &rows[..9] {
        assert!(
            number(row, "seconds_suffix") > 0.0 && number(row, "seconds_with") > 0.0,
            "{row}"
        );
    }
    // One token instead of 4,001.
    assert!(
        number(&rows[6], "seconds_with") < number(&rows[6], "seconds_without") / 4.0,
        "{}",
        rows[6]
    );
    // Of conversations, all but a system prompt and the messages themselves was there before; of
    // prompts with documents, 80 % of what could be found is a great deal.
    for (row, (name, n_prompt, least)) in rows[9..].iter().zip([
        ("chat", 4 * (240 + 304 + 368 + 432), 0.98),
        ("rag", 24 * 430, 0.8),
        ("batch", 12 * 532, 1.0),
    ]) {
        assert_eq!(
            (row["scenario"].as_str(), row["n_prompt"].as_u64()),
            (Some(name), Some(n_prompt))
        );
        let reused = number(row, "n_reused") / number(row, "n_reusable");
        assert!((least..=1.0).contains(&reused), "{row}");
        assert!(
            number(row, "n_evicted") < 0.1 * number(row, "n_pages"),
            "{row}"
        );
    }
    assert_eq!(
        rows[9]["n_reusable"].as_u64(),
        Some(3 * 200 + 4 * (264 + 328 + 392))
    );
    assert_eq!(rows[11]["n_reusable"].as_u64(), Some(11 * 500));
    let tables = text(&run(&flags));
    let (first, second) = tables.split_once("\n\n").unwrap();
    assert_eq!(
        (first.lines().count(), second.lines().count()),
        (2 + 9, 2 + 3),
        "{tables}"
    );
    fails(
        &["bench", "-m", &model, "--scenario", "chatter"],
        2,
        &["chat, rag or batch"],
    );
    fails(
        &["bench", "-m", &model, "--scenario", "chat", "-p", "5"],
        2,
        &["cannot be used with"],
    );
}

/// A second run begins with what the first one left; a damaged folder only takes longer.
#[test]
fn prompts_are_cached_in_a_folder() {
    let folder = Folder::new();
    let cache = folder.name("cache");
    let prompt = "A lifetime says how long a reference is valid. ".repeat(12);
    let flags = ["-p", &prompt, "-n", "8", "--temp", "0", "--json"];
    let with = [&flags[..], &["--prompt-cache", &cache]].concat();
    let (cold, first) = (parsed(&run(&flags)), parsed(&run(&with)));
    let blocks: Vec<_> = std::fs::read_dir(&cache)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    assert!(blocks.len() > 1, "{blocks:?}");
    let second = parsed(&run(&with));
    let n = |run: &serde_json::Value, key: &str| run["timings"][key].as_u64().unwrap();
    for run in [&first, &second] {
        assert_eq!(
            (&run["ids"], n(run, "prompt_n") + n(run, "cache_n")),
            (&cold["ids"], n(&cold, "prompt_n"))
        );
    }
    assert_eq!((n(&first, "cache_n"), n(&second, "cache_n") % 64), (0, 0));
    assert!(n(&second, "cache_n") >= 64);
    for block in blocks {
        std::fs::write(block, "torn").unwrap();
    }
    let third = parsed(&run(&with));
    assert_eq!((&third["ids"], n(&third, "cache_n")), (&cold["ids"], 0));
    fails(
        &["-p", "x", "--prompt-cache-size", "9"],
        2,
        &["--prompt-cache <DIR>"],
    );
    let file = folder.file("file", "");
    fails(
        &["-p", "x", "--prompt-cache", &file],
        1,
        &["file", "folder"],
    );
}

/// One that fails with the file size limit has SIGXFSZ ignored, so that a write past it is an
/// error, as on a full disk.
#[cfg(unix)]
fn command_on_a_full_disk(args: &[&str]) -> Command {
    let mut shell = Command::new("sh");
    let script = "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"";
    shell
        .args(["-c", script, env!("CARGO_BIN_EXE_ruvllm")])
        .args(args)
        .stdin(Stdio::null());
    shell
}

/// Names in a folder; none if it is not there.
#[cfg(unix)]
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// Kills `child` after `delay`, or as soon as `begun` says that it writes.
#[cfg(unix)]
fn kill_after(mut child: std::process::Child, delay: Option<Duration>, begun: impl Fn() -> bool) {
    let start = Instant::now();
    while child.try_wait().unwrap().is_none()
        && delay.map_or(!begun(), |delay| start.elapsed() < delay)
    {
        std::thread::sleep(Duration::from_micros(50));
    }
    // That of a process that has ended meanwhile is no error.
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A process that is killed while it computes or writes leaves whole blocks, or what is removed and
/// written anew.
#[cfg(unix)]
#[test]
fn killed_processes_leave_the_cache_sound() {
    let folder = Folder::new();
    let cache = folder.name("cache");
    let prompt = "A lifetime says how long a reference is valid. ".repeat(30);
    let flags = ["-p", &prompt, "-n", "4", "--temp", "0", "--json"];
    let with = [&flags[..], &["--prompt-cache", &cache]].concat();
    let start = Instant::now();
    let cold = parsed(&run(&flags))["ids"].clone();
    let whole = start.elapsed();
    for i in 0..12u32 {
        let before = names(folder.path("cache").as_path()).len();
        let child = command(&with)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Every other one at the first, second, … file that it writes.
        let delay = (i % 2 == 0).then(|| whole * (i + 1) / 12);
        kill_after(child, delay, || {
            names(folder.path("cache").as_path()).len() > before + i as usize / 2
        });
        let again = run(&with);
        assert_eq!(parsed(&again)["ids"], cold, "{i}");
        if i % 3 == 2 {
            // Half of what is there is torn, as by a power failure; the rest goes, so that there is
            // something to write.
            for (j, name) in names(folder.path("cache").as_path()).iter().enumerate() {
                let path = folder.path("cache").join(name);
                let bytes = std::fs::read(&path).unwrap();
                match j % 2 {
                    0 => std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap(),
                    _ => std::fs::remove_file(&path).unwrap(),
                }
            }
        }
    }
    let last = parsed(&run(&with));
    assert_eq!(last["ids"], cold);
    let n_cached = parsed(&run(&with))["timings"]["cache_n"].as_u64().unwrap();
    assert!(n_cached >= 64, "{n_cached}");
}

/// A conversation whose process is killed goes on from the last message that was kept; its state is
/// used, or computed again.
#[cfg(unix)]
#[test]
fn killed_conversations_go_on() {
    let folder = Folder::new();
    let model = tiny(&folder);
    // With exact arithmetic what is computed again has the bits of what was generated.
    let flags = [
        "chat",
        "-m",
        &model,
        "-n",
        "6",
        "--temp",
        "0",
        "--ignore-eos",
        "--exact",
        "--session",
        "trip",
    ];
    let within = |state: &str| {
        let mut command = command(&flags);
        command
            .env("XDG_STATE_HOME", folder.path(state))
            .stdin(Stdio::piped());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let says = |state: &str, input: &[u8]| {
        let mut child = within(state).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        child.wait_with_output().unwrap()
    };
    let start = Instant::now();
    text(&says("timed", b"the\n"));
    let whole = start.elapsed();
    for i in 0..8u32 {
        let (state, copy) = (format!("state{i}"), format!("copy{i}"));
        text(&says(&state, b"the\n"));
        let of = |state: &str| folder.path(state).join("ruvllm/sessions/trip");
        let before = names(&of(&state)).len();
        let mut child = within(&state).spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"the the\n").unwrap();
        // Files are written under other names first.
        kill_after(child, (i % 2 == 0).then(|| whole * (i + 2) / 8), || {
            names(&of(&state)).len() > before
        });
        std::fs::create_dir_all(of(&copy)).unwrap();
        std::fs::copy(
            of(&state).join("messages.json"),
            of(&copy).join("messages.json"),
        )
        .unwrap();
        assert_eq!(
            text(&says(&state, b"the\n")),
            text(&says(&copy, b"the\n")),
            "{i}"
        );
    }
}

/// Processes that read and write one folder at the same time get what they would compute alone.
#[test]
fn processes_share_a_cache() {
    let folder = Folder::new();
    let cache = folder.name("cache");
    let texts: Vec<String> = (0..3)
        .map(|i| "A slice borrows part of an array. ".repeat(12 + i))
        .collect();
    let flags =
        |text: &str| ["-p", text, "-n", "4", "--temp", "0", "--json", "-t", "1"].map(str::to_owned);
    let ids = |out: &Output| parsed(out)["ids"].clone();
    let cold: Vec<_> = texts
        .iter()
        .map(|text| ids(&run(&flags(text).each_ref().map(String::as_str))))
        .collect();
    for _ in 0..3 {
        let children: Vec<_> = texts
            .iter()
            .map(|text| {
                let mut command = command(&flags(text).each_ref().map(String::as_str));
                command
                    .args(["--prompt-cache", &cache])
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let found: Vec<_> = children
            .into_iter()
            .map(|child| ids(&child.wait_with_output().unwrap()))
            .collect();
        assert_eq!(found, cold);
    }
    let left = std::fs::read_dir(&cache)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    assert!(
        left.into_iter()
            .all(|path| path.extension().is_some_and(|extension| extension == "kv"))
    );
}

/// On a full disk, and in a folder that cannot be written to, prompts are computed as without a
/// cache; conversations say which file it was, and keep what they had.
#[cfg(unix)]
#[test]
fn full_disks_and_read_only_folders() {
    let folder = Folder::new();
    let cache = folder.name("cache");
    let prompt = "A lifetime says how long a reference is valid. ".repeat(12);
    let flags = ["-p", &prompt, "-n", "4", "--temp", "0", "--json"];
    let with = [&flags[..], &["--prompt-cache", &cache]].concat();
    let cold = parsed(&run(&flags))["ids"].clone();
    let full = command_on_a_full_disk(&with).output().unwrap();
    assert_eq!(parsed(&full)["ids"], cold);
    assert_eq!(names(folder.path("cache").as_path()), [""; 0]);
    if cfg!(target_os = "linux") {
        // A folder that nobody can write to, whoever runs this.
        let with = [&flags[..], &["--prompt-cache", "/proc/self/task"]].concat();
        assert_eq!(parsed(&run(&with))["ids"], cold);
    }
    // What lies in a folder without the right to write is used.
    parsed(&run(&with));
    let mode = |bits: u32| std::os::unix::fs::PermissionsExt::from_mode(bits);
    std::fs::set_permissions(&cache, mode(0o555)).unwrap();
    let read = parsed(&run(&with));
    std::fs::set_permissions(&cache, mode(0o755)).unwrap();
    assert_eq!(read["ids"], cold);
    assert!(read["timings"]["cache_n"].as_u64().unwrap() >= 64);

    let model = tiny(&folder);
    let chat = [
        "chat",
        "-m",
        &model,
        "-n",
        "6",
        "--temp",
        "0",
        "--ignore-eos",
        "--session",
        "trip",
    ];
    let says = |mut command: Command, state: &Path| {
        command
            .env("XDG_STATE_HOME", state)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // One that refuses does not wait for it.
        let _ = child.stdin.take().unwrap().write_all(b"the\n");
        child.wait_with_output().unwrap()
    };
    let state = folder.path("state");
    text(&says(command(&chat), &state));
    let saved = state.join("ruvllm/sessions/trip/state.gguf");
    let before = std::fs::read(&saved).unwrap();
    let full = says(command_on_a_full_disk(&chat), &state);
    assert_eq!(full.status.code(), Some(1));
    assert!(stderr(&full).contains("state.gguf"), "{}", stderr(&full));
    assert_eq!(std::fs::read(&saved).unwrap(), before);
    let left = names(saved.parent().unwrap());
    assert!(
        left.iter()
            .all(|name| ["lock", "messages.json", "state.gguf"].contains(&name.as_str())),
        "{left:?}"
    );
    text(&says(command(&chat), &state));
    if cfg!(target_os = "linux") {
        let refused = says(command(&chat), Path::new("/proc/self/task"));
        assert_eq!(refused.status.code(), Some(1));
        assert!(
            stderr(&refused).contains("/proc/self/task/ruvllm/sessions/trip"),
            "{}",
            stderr(&refused)
        );
    }
}

/// A full context ends a text, or half of it goes and the text goes on; so does a conversation.
#[test]
fn contexts_are_shifted() {
    let flags = [
        "-p",
        "Ownership is",
        "-c",
        "128",
        "--temp",
        "0.8",
        "-s",
        "3",
        "--ignore-eos",
        "-n",
        "300",
        "--json",
    ];
    let ended = parsed(&run(&flags));
    assert_eq!(ended["stop_reason"], json!("context_full"));
    let shifted = parsed(&run(&[&flags[..], &["--context-shift"]].concat()));
    assert_eq!(
        (
            &shifted["stop_reason"],
            shifted["ids"].as_array().unwrap().len()
        ),
        (&json!("max_tokens"), 300)
    );
    let n = ended["ids"].as_array().unwrap().len();
    assert_eq!(
        shifted["ids"].as_array().unwrap()[..n],
        ended["ids"].as_array().unwrap()[..]
    );
    for (more, code, part) in [
        (&["--keep", "9"][..], 2, "--context-shift"),
        (&["--context-shift", "--learn", "x"], 2, "--learn"),
        (
            &["--context-shift", "--keep", "65"],
            1,
            "context_shift is 65",
        ),
        (&["--context-shift", "--kv-tiers"], 1, "precision by age"),
        (
            &["--context-shift", "--preset", "long-chat"],
            1,
            "precision by age",
        ),
        (&["--preset", "poem"], 2, "long-chat"),
    ] {
        fails(&[&flags[..], more].concat(), code, &[part]);
    }
    let kinds = |more: &[&str]| {
        let out = parsed(&run(&[&["-p", "x", "-n", "1", "--json"], more].concat()));
        out["kv_bytes"]
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect::<Vec<_>>()
    };
    assert_eq!(kinds(&["--preset", "code"]), ["f16", "q8_0"]);
    assert_eq!(kinds(&["--preset", "document"]), ["q8_0"]);
    assert_eq!(
        kinds(&["--preset", "document", "-ctk", "f16", "-ctv", "f16"]),
        ["f16"]
    );

    let folder = Folder::new();
    let model = tiny(&folder);
    let chat = [
        "chat",
        "-m",
        &model,
        "-c",
        "128",
        "-n",
        "40",
        "--temp",
        "0",
        "--ignore-eos",
        "--context-shift",
        "-v",
    ];
    let said = run_with_input(&chat, &b"the\n".repeat(8));
    assert_eq!(said.status.code(), Some(0), "{}", stderr(&said));
    let (notes, lines) = (stderr(&said), text(&said));
    assert!(lines.lines().count() >= 8, "{notes}");
    assert!(notes.contains(" of 128 in context"), "{notes}");
}

/// What a context takes is known before it is computed.
#[test]
fn memory_is_planned() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let inspected = parsed(&run(&["inspect", &model, "--json"]))["memory"].clone();
    let doctor = parsed(&run(&["doctor", "-m", &model, "--json"]))["model"]["memory"].clone();
    assert_eq!(inspected["total"], doctor["total"]);
    let parts = ["weights", "kv_cache", "buffers", "rest", "vocabulary"]
        .map(|part| inspected[part].as_u64().unwrap());
    assert_eq!(
        parts.iter().sum::<u64>(),
        inspected["total"].as_u64().unwrap()
    );
    // Two layers, keys and values of two heads of 16, 128 tokens, two bytes.
    assert_eq!(parts[1], 2 * 2 * 2 * 16 * 128 * 2);
    if cfg!(target_os = "linux") {
        assert_eq!(
            (
                &doctor["recommended"]["n_ctx"],
                &doctor["recommended"]["cache_type_k"]
            ),
            (&json!(128), &json!("f16"))
        );
        assert!(text(&run(&["doctor", "-m", &model])).contains("-c 128 -ctk f16 -ctv f16 -t "));
    }
    let flags = ["-m", &model, "-p", "the", "-n", "2"];
    let limited = |limit: &str| run(&[&flags[..], &["--memory-limit", limit]].concat());
    text(&limited("1G"));
    let small = limited("100K");
    assert_eq!(small.status.code(), Some(1));
    assert!(
        stderr(&small).contains("weights take"),
        "{}",
        stderr(&small)
    );
    let long = run(&[&flags[..], &["--memory-limit", "4M", "-c", "1000000"]].concat());
    assert_eq!(long.status.code(), Some(1));
    assert!(
        stderr(&long).contains("a context of 1000000 tokens takes")
            && stderr(&long).contains("fits"),
        "{}",
        stderr(&long)
    );
    fails(
        &[&flags[..], &["--memory-limit", "lots"]].concat(),
        2,
        &["512M"],
    );
}

#[test]
fn adapters() {
    let folder = Folder::new();
    let data = |name: &str| format!("{}/../tests/data/peft/{name}", env!("CARGO_MANIFEST_DIR"));
    let (model, lora) = (data("llama.gguf"), data("llama-adapter.gguf"));
    let half = format!("{lora}:0.5");
    let logits = |model: &str, flags: &[&str]| -> Vec<f32> {
        let file = folder.name("logits.f32");
        let line = [
            &["logits", "-m", model, "--tokens", "1,2,3,4", "-o", &file],
            flags,
        ]
        .concat();
        let out = run(&line);
        assert!(
            out.status.success(),
            "{line:?}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        let bytes = std::fs::read(file).unwrap();
        bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect::<Vec<_>>()
    };
    let apart = |a: &[f32], b: &[f32]| {
        a.iter()
            .zip(b)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max)
    };
    let (base, adapted) = (logits(&model, &[]), logits(&model, &["--lora", &lora]));
    assert!(apart(&base, &adapted) > 0.5);
    assert_eq!(
        logits(&model, &["--lora-scaled", &format!("{lora}:1.0")]),
        adapted
    );
    assert_eq!(
        logits(&model, &["--lora-scaled", &format!("{lora}:0")]),
        base
    );
    // Two halves, in llama.cpp's ways to name several.
    for flags in [
        &["--lora-scaled", &*format!("{half},{half}")][..],
        &["--lora-scaled", &half, "--lora_scaled", &half],
    ] {
        assert!(apart(&logits(&model, flags), &adapted) < 1e-4);
    }

    let merged = folder.name("merged.gguf");
    let merge = |flags: &[&str]| run(&[&["merge", "-m", &model, "-o", &merged], flags].concat());
    assert_eq!(merge(&[]).status.code(), Some(2));
    assert!(merge(&["--lora", &lora]).status.success());
    assert!(apart(&logits(&merged, &[]), &adapted) < 1e-4);
    assert_eq!(merge(&["--lora", &lora]).status.code(), Some(1));
    assert!(
        merge(&["--lora", &lora, "--overwrite", "--type", "f16", "-t", "1"])
            .status
            .success()
    );
    assert_eq!(
        Gguf::open(&merged)
            .unwrap()
            .tensor("output.weight")
            .unwrap()
            .dtype,
        DType::F16
    );
    assert_eq!(
        merge(&["--lora", &lora, "--overwrite", "--type", "q4_k"])
            .status
            .code(),
        Some(1)
    );
    assert_eq!(
        std::fs::read_dir(&folder.0).unwrap().count(),
        2,
        "a temporary file stays behind"
    );

    let stderr = |out: &Output| String::from_utf8_lossy(&out.stderr).into_owned();
    for (flags, code, says) in [
        (["--lora-scaled", &*lora], 2, "FILE:SCALE"),
        (["--lora-scaled", &format!("{lora}:much")], 2, "FILE:SCALE"),
        (["--lora-scaled", &format!("{lora}:inf")], 2, "finite"),
        (["--lora", "/no/such.gguf"], 1, "/no/such.gguf"),
        (["--lora", &data("qwen2-adapter.gguf")], 1, "qwen2"),
        (["--lora", &model], 1, "general.type"),
    ] {
        let out = run(&[
            &["logits", "-m", &model, "--tokens", "1", "-o", "-"],
            &flags[..],
        ]
        .concat());
        assert_eq!(out.status.code(), Some(code), "{flags:?}");
        assert!(stderr(&out).contains(says), "{flags:?}: {}", stderr(&out));
    }
}

/// A folder for `--learn` that has read some control text with the model that ships.
fn calibrated(folder: &Folder) -> String {
    let heldout = include_str!("../../models/demo-heldout.txt");
    let control = folder.file("control.txt", &heldout[..8000]);
    let learned = folder.name("learned");
    text(&run(&["learn", "calibrate", &learned, "-f", &control]));
    learned
}

fn demo() -> Model {
    Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    ))
    .unwrap()
}

/// What is in effect in a folder of what is learnt.
fn in_effect(folder: &str) -> u64 {
    parsed(&run(&["learn", "status", folder, "--json"]))["version"]
        .as_u64()
        .unwrap()
}

#[test]
fn ratings_in_a_conversation() {
    let folder = Folder::new();
    let learned = calibrated(&folder);
    let flags = ["chat", "--learn", &learned, "-n", "12", "-s", "1"];
    let out = run_with_input(
        &flags,
        b"/good\nWhat is a crate?\n/good\n/good\nAnd a module?\n/bad\n/exit\n",
    );
    text(&out);
    let said = stderr(&out);
    assert_eq!(said.matches("Learnt.").count(), 2, "{said}");
    assert_eq!(said.matches("Noted.").count(), 1, "rated twice: {said}");
    assert_eq!(said.matches("no answer to rate").count(), 1, "{said}");
    let status = parsed(&run(&["learn", "status", &learned, "--json"]));
    assert_eq!(
        (&status["trajectories"], &status["rated"]),
        (&json!(2), &json!(2))
    );

    // Without a folder there is nobody to learn, and the conversation goes on.
    let out = run_with_input(
        &["chat", "-n", "4", "-s", "1"],
        b"What is a crate?\n/good\nAnd a module?\n",
    );
    text(&out);
    assert!(
        stderr(&out).contains("error:") && !stderr(&out).contains("Learnt."),
        "{}",
        stderr(&out)
    );
}

/// A conversation is recorded and learnt; its owner sees it, trains on it, takes it elsewhere and
/// forgets it.
#[test]
fn what_is_recorded_can_be_seen_and_forgotten() {
    let folder = Folder::new();
    let heldout = include_str!("../../models/demo-heldout.txt");
    let control = folder.file("control.txt", &heldout[..8000]);
    let mine = folder.name("mine");
    let said: String = (0..6)
        .map(|i| format!("The gauge at Ossen Weir reads 1.{i} m and rises by {i} mm.\n"))
        .collect();
    let chat = |session: &str, more: &str| {
        let flags = [
            "chat",
            "--learn",
            &mine,
            "--learn-text",
            "--learn-control",
            &control,
            "-n",
            "6",
            "-s",
            "1",
            "--session",
        ];
        let mut child = command(&[&flags[..], &[session]].concat())
            .env("XDG_STATE_HOME", folder.path("state"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(format!("{said}{more}").as_bytes())
            .unwrap();
        let out = child.wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
        stderr(&out)
    };
    chat("ossen", "");
    assert_eq!(chat("mill", "/good\n").matches("Learnt.").count(), 1);
    let status = || parsed(&run(&["learn", "status", &mine, "--json"]));
    let before = status();
    assert_eq!(
        (
            &before["trajectories"],
            &before["with_tokens"],
            &before["rated"]
        ),
        (&json!(12), &json!(12), &json!(1))
    );
    assert_eq!(
        (&before["sessions"], before["quality"].as_f64()),
        (&json!(2), Some(1.0))
    );
    assert!(text(&run(&["learn", "status", &mine])).contains("12 of 2 sessions"));
    let opened = ruvllm_learn::sona::SonaFolder::open(&mine, &Default::default()).unwrap();
    opened
        .trajectories(|found| {
            assert!(!found.query_embedding.is_empty() && !found.response_embedding.is_empty())
        })
        .unwrap();
    drop(opened);
    let log = parsed(&run(&["learn", "log", &mine, "--json"]));
    assert_eq!(
        (&log[0]["kind"], &log[0]["version"]),
        (&json!("calibrated"), &json!(1))
    );
    let learnt: u64 = log
        .as_array()
        .unwrap()
        .iter()
        .map(|event| event["learnt"]["requests"].as_u64().unwrap())
        .sum();
    assert_eq!(learnt, 12);
    assert!(text(&run(&["learn", "log", &mine])).contains("calibrated"));
    assert_eq!(
        parsed(&run(&["learn", "show", &mine, "1", "--json"]))["made"]["kind"],
        "calibrated"
    );

    let (adapter, exported) = (folder.name("adapter.gguf"), folder.name("exported.gguf"));
    let train = [
        "train",
        "--learn",
        &mine,
        "-o",
        &adapter,
        "--epochs",
        "1",
        "--held-out",
        "0.2",
        "--rank",
        "2",
    ];
    text(&run(&train));
    assert_eq!(status()["quality"], 0.0);
    text(&run(&[
        "learn",
        "export",
        &mine,
        "--version",
        "1",
        "-o",
        &exported,
    ]));
    fails(
        &["learn", "export", &mine, "--version", "1", "-o", &exported],
        1,
        &["--overwrite"],
    );
    text(&run(&["learn", "import", &mine, &exported]));
    let version = status()["version"].as_u64().unwrap();
    assert!(version > 1);
    text(&run(&["learn", "rollback", &mine, "0"]));
    assert_eq!(status()["version"], 0);

    text(&run(&["learn", "forget", &mine, "ossen"]));
    let after = status();
    assert_eq!(
        (
            &after["trajectories"],
            &after["sessions"],
            &after["versions"]
        ),
        (&json!(6), &json!(1), &json!([1]))
    );
    fails(&["learn", "forget", &mine, "nobody"], 1, &["nobody"]);
    fails(&["learn", "rollback", &mine, "7"], 1, &["no version 7"]);
    fails(&["learn", "show", &mine, "0"], 1, &["the model alone"]);
    fails(
        &["learn", "status", &folder.name("none")],
        1,
        &["there is no folder"],
    );
    fails(
        &["chat", "--learn-rate", "2", "-p", "a"],
        2,
        &["--learn <DIR>"],
    );
    for (flag, value, part) in [
        ("--learn-rate", "-1", "rate"),
        ("--learn-quality-threshold", "2", "quality_threshold"),
        ("--learn-min-samples", "0", "background_min_samples"),
        ("--learn-max-pending", "0", "max_pending_samples"),
    ] {
        fails(
            &[
                "chat",
                "--learn",
                &mine,
                &format!("{flag}={value}"),
                "-p",
                "a",
            ],
            1,
            &[part],
        );
    }
    // Rated and stored, one answer is too few to compare with others.
    fails(
        &[
            "train",
            "--learn",
            &mine,
            "-o",
            &folder.name("c"),
            "--loss",
            "kto",
        ],
        1,
        &["at least 2"],
    );
    fails(
        &[
            "train",
            "--learn",
            &folder.name("empty"),
            "-o",
            &folder.name("b"),
        ],
        1,
        &["--learn-text"],
    );
}

#[test]
fn generating_uses_what_was_learnt() {
    let folder = Folder::new();
    let model = demo();
    let encode = |text: &str| model.tokenizer().unwrap().encode(text, true, true);
    let river = include_str!("../../tests/data/river-station.txt");
    let mut session = model.session().unwrap();
    session
        .set_learner(Learner::new(&model, &LearnerOptions::default()).unwrap())
        .unwrap();
    session
        .calibrate(&encode(
            &include_str!("../../models/demo-heldout.txt")[..8000],
        ))
        .unwrap();
    for piece in encode(&river[..8000]).chunks(128) {
        session.clear();
        session.observe(piece).unwrap();
    }
    // As it comes back from a file.
    let bytes = session.take_learner().unwrap().to_bytes().unwrap();
    let learner = Learner::from_bytes(bytes, &model).unwrap();
    assert!(learner.scale() > 0.0);

    let prompt = "The gauge at Ossen";
    let ids_of = |learner: Option<Learner>| -> Vec<u64> {
        let mut session = model.session().unwrap();
        let tokens = encode(prompt);
        let mut read = 0;
        if let Some(learner) = learner {
            // The prompt is learnt from, but for its last token.
            session.set_learner(learner).unwrap();
            read = tokens.len() - 1;
            session.record(&tokens[..read]).unwrap();
        }
        let mut sampler = Sampler::new(SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        })
        .unwrap();
        let mut generation = session
            .generate(&tokens[read..], &mut sampler)
            .unwrap()
            .max_tokens(24);
        (&mut generation).for_each(|piece| drop(piece.unwrap()));
        generation.tokens().iter().map(|&t| t.into()).collect()
    };
    // A folder of an earlier release.
    let (learned, file) = (folder.name("learned"), folder.path("learned/learned.gguf"));
    std::fs::create_dir_all(&learned).unwrap();
    learner.save(&file).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let from_program = |flags: &[&str]| -> (Vec<u64>, String) {
        let plain = [
            "-p",
            prompt,
            "-n",
            "24",
            "--temp",
            "0",
            "--repeat-penalty",
            "1",
            "--json",
        ];
        let out = run(&[&plain[..], flags].concat());
        let ids = parsed(&out)["ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_u64().unwrap())
            .collect();
        (ids, stderr(&out))
    };
    let said = stderr(&run(&["learn", "status", &learned]));
    assert!(said.contains("earlier release"), "{said}");
    let (plain, _) = from_program(&[]);
    let (adapted, said) = from_program(&["--learn", &learned]);
    assert!(said.contains("is version 1 now"), "{said}");
    assert_eq!(
        (in_effect(&learned), std::fs::read(&file).unwrap()),
        (1, bytes)
    );
    let (mixed, said) = from_program(&["--learn", &learned, "--learn-mixture"]);
    assert!(!said.contains("version"), "{said}");
    let exported = folder.name("adapter.gguf");
    let export = ["learn", "export", &learned, "--as-lora", "-o", &exported];
    text(&run(&export));
    fails(&export, 1, &["adapter.gguf", "--overwrite"]);
    assert_eq!(plain, ids_of(None));
    assert_eq!(adapted, ids_of(Some(learner.clone())));
    let mut mixing = learner;
    mixing.set_generate_with_mixture(true);
    assert_eq!(mixed, ids_of(Some(mixing)));
    assert!(mixed != plain && mixed != adapted, "{mixed:?}");
    // Two runs were recorded; gone back to the model alone, nothing of it has an effect.
    let status = parsed(&run(&["learn", "status", &learned, "--json"]));
    assert_eq!(
        (&status["trajectories"], &status["versions"]),
        (&json!(2), &json!([1]))
    );
    text(&run(&["learn", "rollback", &learned, "0"]));
    assert_eq!(from_program(&["--learn", &learned]).0, plain);
    fails(
        &[
            "learn",
            "export",
            &learned,
            "--as-lora",
            "-o",
            &folder.name("none"),
        ],
        1,
        &["the model alone"],
    );
    // As a plain adapter it goes wherever adapters go, into a merged file, too.
    let merged = folder.name("merged.gguf");
    let base = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    );
    text(&run(&[
        "merge", "-m", base, "--lora", &exported, "-o", &merged,
    ]));
    Model::open(&merged).unwrap();
}

/// Sends a signal as a user, or the system, would.
#[cfg(unix)]
fn signal(child: &std::process::Child, name: &str) {
    let sent = Command::new("kill")
        .args([name, &child.id().to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
}

/// Reads `pipe` until it has said `what`.
#[cfg(unix)]
#[track_caller]
fn wait_for(pipe: &mut impl Read, what: &str) {
    let (mut said, mut piece) = (String::new(), [0; 256]);
    while !said.contains(what) {
        let n = pipe.read(&mut piece).unwrap();
        assert!(n > 0, "it ended: {said}");
        said.push_str(&String::from_utf8_lossy(&piece[..n]));
    }
}

#[cfg(unix)]
const ENDLESS: [&str; 6] = ["-p", "Ownership is", "--ignore-eos", "-c", "100000", "-s"];

#[cfg(unix)]
#[test]
fn interrupted_text_is_kept() {
    let folder = Folder::new();
    let learned = folder.name("learned");
    for name in ["-INT", "-TERM"] {
        let mut child = command(&[&ENDLESS[..], &["1", "--learn", &learned]].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        wait_for(child.stderr.as_mut().unwrap(), "Ownership is");
        signal(&child, name);
        let output = child.wait_with_output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(130),
            "{name}: {}",
            stderr(&output)
        );
        assert!(output.stdout.ends_with(b"\n"), "{name}");
        let status = parsed(&run(&["learn", "status", &learned, "--json"]));
        assert_eq!(status["with_tokens"], 1);
        std::fs::remove_dir_all(&learned).unwrap();
    }

    // There is no telling from outside when it begins; one that was too early is tried again,
    // later.
    let killed = |pause: u64| {
        let mut json = command(&[&ENDLESS[..], &["1", "--json"]].concat());
        let child = json
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(pause));
        signal(&child, "-INT");
        child.wait_with_output().unwrap()
    };
    let output = [200, 1000, 5000]
        .into_iter()
        .map(killed)
        .find(|out| out.status.code().is_some());
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(130));
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["stop_reason"], json!("interrupted"));
}

#[cfg(unix)]
#[test]
fn one_process_learns_into_a_folder_and_saves_when_asked_to_end() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    let learned = folder.name("learned");
    let mut child = command(&["chat", "--learn", &learned, "-n", "4", "-s", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"What is a crate?\n").unwrap();
    wait_for(child.stdout.as_mut().unwrap(), "\n");
    fails(
        &["-p", "x", "-n", "1", "--learn", &learned],
        1,
        &["another process", "learned"],
    );
    // It waits for the next line, or is about to.
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(input);
    let status = parsed(&run(&["learn", "status", &learned, "--json"]));
    assert_eq!(status["with_tokens"], 1);
    for file in std::fs::read_dir(&learned).unwrap().map(Result::unwrap) {
        let mode = file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{:?} is for its owner", file.path());
    }
    text(&run(&["-p", "x", "-n", "1", "--learn", &learned]));
}

#[test]
fn a_bad_line_ends_a_conversation_but_not_what_was_learnt() {
    let folder = Folder::new();
    let learned = folder.name("learned");
    let flags = [
        "chat", "--learn", &learned, "-n", "4", "-s", "1", "-c", "64",
    ];
    let long = format!("What is a crate?\n{}\n", "word ".repeat(200));
    for (input, says) in [
        (&b"What is a crate?\n\xff\xfe\n"[..], "line 2"),
        (long.as_bytes(), "shorten it"),
    ] {
        let out = run_with_input(&flags, input);
        assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
        assert!(stderr(&out).contains(says), "{}", stderr(&out));
        let status = parsed(&run(&["learn", "status", &learned, "--json"]));
        assert_eq!(status["with_tokens"], 1);
        std::fs::remove_dir_all(&learned).unwrap();
    }
}

/// Requests too few to be judged by one another wait in the folder until there are enough.
#[test]
fn texts_one_by_one_are_learnt_together() {
    let folder = Folder::new();
    let mine = folder.name("mine");
    let river = include_str!("../../tests/data/river-station.txt");
    let events = |folder: &str| parsed(&run(&["learn", "log", folder, "--json"]));
    for i in 0..4 {
        let piece: String = river.chars().skip(i * 400).take(400).collect();
        text(&run(&["-p", &piece, "-n", "1", "--learn", &mine]));
        assert_eq!(events(&mine) == json!([]), i < 3, "{i}");
    }
    let learnt = events(&mine);
    assert_eq!(learnt[0]["learnt"]["requests"], 4);
    assert!(
        learnt[0]["judged"]["tokens"].as_u64().unwrap() > 50,
        "{learnt}"
    );
}

/// Flags of the release before work and say what they are now; those that are gone say what to do.
#[test]
fn old_flags_of_learning() {
    let folder = Folder::new();
    let learned = folder.name("learned");
    let out = run(&["-p", "x", "-n", "1", "--sona", &learned, "--sona_text"]);
    text(&out);
    let said = stderr(&out);
    for new in ["`--learn`", "`--learn-text`"] {
        assert!(said.contains(&format!("is now {new}")), "{said}");
    }
    let status = parsed(&run(&["sona", "status", &learned, "--json"]));
    assert_eq!(status["with_tokens"], 1);
    fails(
        &["chat", "--learn", &learned, "--learn-every", "1"],
        2,
        &["--learn-every", "leave it out"],
    );
    fails(
        &["-p", "x", "--learn", &learned, "--learn-export", "a.gguf"],
        2,
        &["ruvllm learn export DIR --as-lora -o FILE"],
    );
}

/// What another model learnt, or what is no whole file, is refused and stays as it is.
#[test]
fn folders_of_earlier_releases_are_taken_with_care() {
    let folder = Folder::new();
    let model = demo();
    let learned = folder.name("learned");
    std::fs::create_dir_all(&learned).unwrap();
    let bytes = Learner::new(&model, &LearnerOptions::default())
        .unwrap()
        .to_bytes()
        .unwrap();
    let file = folder.file("learned/learned.gguf", &bytes);
    let other = tiny(&folder);
    fails(
        &["-m", &other, "-p", "a", "-n", "1", "--learn", &learned],
        1,
        &["learned.gguf", "another model"],
    );
    std::fs::write(&file, &bytes[..bytes.len() - 100]).unwrap();
    fails(
        &["-p", "x", "-n", "1", "--learn", &learned],
        1,
        &["learned.gguf", "incomplete"],
    );
    assert_eq!(in_effect(&learned), 0);
    std::fs::write(&file, &bytes).unwrap();
    text(&run(&["learn", "import", &learned, &file]));
    assert_eq!(std::fs::read(&file).unwrap(), bytes);
    let little = folder.file("little.txt", "a word");
    fails(
        &["calibrate", "-f", &little, "-o", &learned],
        1,
        &["too short"],
    );
}

#[test]
fn numbers_out_of_range_and_repeated_flags() {
    for (args, part) in [
        (&["-p", "x", "-n", "-5"][..], "-2"),
        (&["-p", "x", "-c", "-1"], "-1 is not in"),
        (&["-p", "x", "-c", "4000000000"], "--ctx-size"),
        (&["-p", "x", "-b", "-1"], "--batch-size"),
        (&["-p", "x", "--logit-bias", "99999+1"], "99999"),
        (&["-p", "x", "--lora-scaled", "f:nan"], "finite"),
        (&["bench", "-b", "0"], "--batch-size"),
        (&["bench", "-r", "0"], "--repetitions"),
        (&["bench", "-m", "x", "-p", "-1"], "-p"),
        (&["bench", "-m", "x", "-p", "64-16"], "backwards"),
        (&["bench", "-m", "x", "-t", "2000"], "1024"),
        (&["bench", "-m", "x", "-ctk", "iq4_nl"], "q4_1"),
        (
            &[
                "perplexity",
                "-f",
                concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md"),
                "--chunks",
                "0",
            ],
            "--chunks 0",
        ),
        (
            &[
                "perplexity",
                "-f",
                concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md"),
                "-c",
                "1",
            ],
            "at least 4",
        ),
        (&["Ownership is"], "-p \"Ownership is\""),
    ] {
        fails(args, 2, &[part]);
    }
    let twice = parsed(&run(&[
        "-p",
        "x",
        "-n",
        "9",
        "-n",
        "2",
        "--json",
        "--ignore-eos",
        "-p",
        "the",
        "--json",
    ]));
    assert_eq!(
        (&twice["prompt"], twice["ids"].as_array().unwrap().len()),
        (&json!("the"), 2)
    );
    // Those that are repeatable still add up.
    let both = parsed(&run(&[
        "-p",
        "x",
        "-n",
        "1",
        "--logit-bias",
        "300+1000",
        "--logit-bias",
        "5-inf",
        "--json",
    ]));
    assert_eq!(both["ids"], json!([300]));
}

#[test]
fn the_environment_is_understood_and_named() {
    let with = |name: &str, value: &str| {
        command(&["-p", "x", "-n", "1"])
            .env(name, value)
            .output()
            .unwrap()
    };
    for (name, value) in [
        ("LLAMA_ARG_MMAP", "1"),
        ("LLAMA_ARG_NO_MMAP", "1"),
        ("LLAMA_ARG_MMAP", "off"),
    ] {
        text(&with(name, value));
    }
    for (name, value) in [
        ("LLAMA_ARG_MMAP", "perhaps"),
        ("LLAMA_ARG_CTX_SIZE", "-7"),
        ("LLAMA_ARG_THREADS", "x"),
    ] {
        let out = with(name, value);
        assert_eq!(out.status.code(), Some(2), "{name}");
        assert!(stderr(&out).contains(name), "{}", stderr(&out));
    }
    let level = with("RUVLLM_ARCH", "nonsense");
    assert!(
        stderr(&level).contains("RUVLLM_ARCH: ") && !stderr(&level).contains(".gguf"),
        "{}",
        stderr(&level)
    );
}

#[test]
fn files_cannot_command_the_terminal() {
    let folder = Folder::new();
    let mut writer = tiny_model(None);
    writer.tensor(
        "blk.0.\x1b[31m\x07.weight",
        &[32, 2],
        DType::Q8_0,
        vec![0; 68],
    );
    writer.write(folder.path("red.gguf")).unwrap();
    let out = run(&[
        "quantize",
        &folder.name("red.gguf"),
        &folder.name("out.gguf"),
        "Q4_0",
    ]);
    assert_eq!(out.status.code(), Some(1));
    let said = stderr(&out);
    assert!(
        said.contains("--allow-requantize") && !said.contains(['\x1b', '\x07']),
        "{said:?}"
    );
}

#[test]
fn text_comes_back_byte_by_byte() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo-heldout.txt");
    let ids = stdout(&run(&["tokenize", "--json", "-f", file]));
    assert_eq!(
        stdout(&run_with_input(&["detokenize"], &ids)),
        std::fs::read(file).unwrap()
    );
    let ids = stdout(&run(&["tokenize", "--json", "-p", "a ."]));
    assert_eq!(stdout(&run_with_input(&["detokenize"], &ids)), b"a .");
    let folder = Folder::new();
    let out = run(&["tokenize", "--json", "-f", &folder.file("binary", b"a\xff")]);
    text(&out);
    assert!(stderr(&out).contains("byte 1"), "{}", stderr(&out));
}

#[test]
fn what_is_no_model_says_so() {
    let folder = Folder::new();
    let learned = folder.name("learned");
    // Fewer wait until they can be judged by one another.
    for prompt in ["one", "two", "three", "four"] {
        text(&run(&["-p", prompt, "-n", "1", "--learn", &learned]));
    }
    let state = folder.path("learned/working.gguf");
    let said = text(&run(&["inspect", state.to_str().unwrap()]));
    assert!(said.contains("holds what was learnt"), "{said}");
    let adapter = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/data/peft/llama-adapter.gguf"
    );
    fails(
        &["-m", adapter, "-p", "x"],
        1,
        &["holds an adapter", "--lora"],
    );
    let whole = std::fs::read(&state).unwrap();
    std::fs::write(&state, &whole[..whole.len() - 100]).unwrap();
    fails(
        &["-p", "x", "-n", "1", "--learn", &learned],
        1,
        &["incomplete", "copying"],
    );
}

#[test]
fn words_after_a_slash_are_not_answered() {
    let out = run_with_input(&["chat", "-n", "4", "-s", "1"], b"/foo\n/good\n");
    assert_eq!(text(&out), "");
    let said = stderr(&out);
    assert!(
        said.contains("/foo is no command") && said.contains("/regen"),
        "{said}"
    );
    assert!(said.contains("--learn DIR"), "{said}");
}

/// In less memory than the measurement of the read bandwidth needs, which is left out then.
#[cfg(target_os = "linux")]
fn run_in_little_memory(args: &[&str]) -> Output {
    run_in_kilobytes("1000000", args)
}

#[cfg(target_os = "linux")]
fn run_in_kilobytes(n: &str, args: &[&str]) -> Output {
    let mut shell = Command::new("sh");
    shell
        .args([
            "-c",
            &format!("ulimit -v {n}; exec \"$0\" \"$@\""),
            env!("CARGO_BIN_EXE_ruvllm"),
        ])
        .args(args);
    shell.output().unwrap()
}

/// Where a pass takes more than there is, for logits and for what lies between, it says so.
#[cfg(target_os = "linux")]
#[test]
fn passes_without_memory() {
    let folder = Folder::new();
    let (tokens, out) = (vec!["1"; 20_000].join(","), folder.name("out"));
    let flags = [
        "logits", "-c", "20000", "-b", "20000", "-ub", "20000", "-t", "1", "-o", &out, "--tokens",
        &tokens,
    ];
    for (more, what) in [
        (&[][..], "no memory for logits"),
        (&["--last", "1"], "no memory for buffers"),
    ] {
        let out = run_in_kilobytes("300000", &[&flags[..], more].concat());
        assert!(
            out.status.code() == Some(1) && stderr(&out).contains(what),
            "{:?} {}",
            out.status,
            stderr(&out)
        );
    }
}

#[cfg(unix)]
#[test]
fn inputs_are_bounded_and_templates_are_files() {
    let folder = Folder::new();
    let model = tiny(&folder);
    for name in ["generate", "perplexity", "tokenize"] {
        fails(
            &[name, "-m", &model, "-f", "/dev/zero"],
            1,
            &["/dev/zero", "more than 1024 MiB"],
        );
    }
    let fifo = folder.name("fifo");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    fails(
        &["chat", "-m", &model, "--template", &fifo],
        1,
        &[&fifo, "not a regular file"],
    );
    let messages = folder.file("messages.json", "[]");
    fails(
        &["template", "--template", &fifo, "--messages", &messages],
        1,
        &[&fifo, "not a regular file"],
    );
    // A prompt may come through a pipe with a name.
    let line = "printf the | \"$0\" generate -m \"$1\" -f /dev/fd/0 -n 1 --temp 0";
    let piped = Command::new("sh")
        .args(["-c", line, env!("CARGO_BIN_EXE_ruvllm"), &model])
        .output()
        .unwrap();
    assert!(!text(&piped).is_empty());
}

/// A template that computes for ever does not keep a conversation from ending.
#[cfg(unix)]
#[test]
fn an_endless_template_can_be_interrupted() {
    let folder = Folder::new();
    let endless = "{% set ns=namespace(s=[1],t=[1]) %}{% for i in range(60) %}{% set ns.s=[ns.s,ns.s] %}\
                   {% set ns.t=[ns.t,ns.t] %}{% endfor %}{{ ns.s == ns.t }}";
    tiny_model(Some(endless))
        .write(folder.path("endless.gguf"))
        .unwrap();
    let model = folder.name("endless.gguf");
    let mut child = command(&["chat", "-m", &model, "-p", "the"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for(child.stderr.as_mut().unwrap(), "> the");
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[cfg(target_os = "linux")]
#[test]
fn bench_without_threads_and_in_columns() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let flags = ["bench", "-m", &model, "-p", "4", "-n", "0", "-r", "1", "-t"];
    let threads = [&flags[..], &["1000"]].concat();
    // Those that have started allocate, too: one of them may meet the end of memory first, which no
    // Rust program survives.
    let said: Vec<String> = (0..5)
        .map(|_| stderr(&run_in_little_memory(&threads)))
        .collect();
    let is_told = |said: &String| said.contains("cannot start 1000 threads");
    assert!(said.iter().any(is_told), "{said:?}");

    let table = text(&run_in_little_memory(
        &[
            &flags[..],
            &["1", "-o", "csv", "-ctk", "f32", "-ctv", "f32"],
        ]
        .concat(),
    ));
    let (names, row) = table.trim_end().split_once('\n').unwrap();
    let cells: Vec<(&str, &str)> = names.split(',').zip(row.split(',')).collect();
    assert_eq!(cells.len(), row.split(',').count());
    let cell = |name: &str| {
        cells
            .iter()
            .find(|(n, _)| *n == format!("\"{name}\""))
            .unwrap()
            .1
    };
    assert_eq!(
        (cell("model"), cell("n_prompt"), cell("n_threads")),
        ("\"tiny.gguf\"", "4", "1")
    );
    assert!(
        cell("avg_ts").parse::<f64>().unwrap() > 0.0
            && cell("model_size").parse::<u64>().unwrap() > 0
    );
}

#[test]
fn bench_writes_the_model_that_it_would_measure() {
    let folder = Folder::new();
    let path = folder.name("shape.gguf");
    let write = ["bench", "--synthetic", "qwen2-0.5b:Q4_0", "--write", &path];
    for option in [
        &["-p", "16"][..],
        &["-n", "0"],
        &["-t", "2"],
        &["-ctk", "f32"],
        &["--mmap"],
        &["-o", "json"],
    ] {
        fails(
            &[&write, option].concat(),
            2,
            &["--write", "cannot be used with"],
        );
    }
    fails(
        &["bench", "-m", "x", "--write", &path],
        2,
        &["--write", "--model"],
    );
    fails(
        &["bench", "--synthetic", "llama-1b", "--overwrite"],
        2,
        &["--write"],
    );
    fails(
        &[
            "bench",
            "--synthetic",
            "llama-1b,qwen2-0.5b",
            "--write",
            &path,
        ],
        2,
        &["one shape"],
    );
    assert!(!Path::new(&path).exists());

    assert!(stdout(&run(&write)).is_empty());
    let written = Model::open(&path).unwrap();
    let shape = Shape::from_name("qwen2-0.5b").unwrap();
    let made = Model::from_gguf(synthetic(&shape, FileType::Q4_0).unwrap()).unwrap();
    assert_eq!(
        library_logits(&written, &[1, 500, 7]),
        library_logits(&made, &[1, 500, 7])
    );
    drop(written);

    std::fs::write(&path, "something else").unwrap();
    fails(&write, 1, &["shape.gguf", "--overwrite"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"something else");
    stdout(&run(&[&write[..], &["--overwrite"]].concat()));
    Model::open(&path).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn half_written_logits_are_removed() {
    let folder = Folder::new();
    let (model, out) = (tiny(&folder), folder.name("logits.f32"));
    let mut shell = Command::new("sh");
    let limit = "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\"";
    shell.args([
        "-c",
        limit,
        env!("CARGO_BIN_EXE_ruvllm"),
        "logits",
        "-m",
        &model,
        "--tokens",
        "1,2",
        "-o",
        &out,
    ]);
    let output = shell.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
}

#[cfg(unix)]
#[test]
fn only_files_are_replaced() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let _socket = std::os::unix::net::UnixListener::bind(folder.path("socket")).unwrap();
    let quantize = |out: &str| ["quantize", &model, out, "Q8_0", "--overwrite"].map(String::from);
    for (out, says) in [
        (&*folder.name("socket"), "not a regular file"),
        ("-", "standard output"),
    ] {
        let line = quantize(out);
        fails(&line.each_ref().map(|arg| &**arg), 1, &[says]);
    }
    assert!(!std::fs::metadata(folder.path("socket")).unwrap().is_file());
    assert!(!Path::new("-").exists());
}

#[test]
fn adapters_are_merged() {
    let folder = Folder::new();
    let data = |name: &str| format!("{}/../tests/data/peft/{name}", env!("CARGO_MANIFEST_DIR"));
    let (model, x, y) = (
        data("llama.gguf"),
        data("llama-adapter.gguf"),
        data("llama-second.gguf"),
    );
    let out = folder.name("both.gguf");
    let line = ["merge-adapters", "-m", &model, &x, &y, "-o", &out];
    assert!(stderr(&run(&line)).contains("rank 5"));
    fails(&line, 1, &["both.gguf", "--overwrite"]);
    for method in [
        "linear",
        "svd",
        "ties",
        "dare",
        "slerp",
        "task-arithmetic",
        "task_arithmetic",
    ] {
        let rank = [
            "--overwrite",
            "--method",
            method,
            "--rank",
            "2",
            "--weights",
            "1,-0.5",
            "--density",
            "0.4",
        ];
        stdout(&run(&[&line[..], &rank].concat()));
        let (model, path) = (Model::open(&model).unwrap(), &out);
        assert_eq!(
            ruvllm::lora::Adapter::open(path, &model)
                .unwrap()
                .max_rank(),
            2,
            "{method}"
        );
    }
    let with = |flags: &[&str], code, parts: &[&str]| {
        fails(&[&line[..], &["--overwrite"], flags].concat(), code, parts)
    };
    with(&["--method", "mean"], 2, &["task-arithmetic"]);
    with(&["--weights", "1"], 2, &["1 numbers", "2 adapters"]);
    with(
        &["--weights", "1,-1", "--method", "linear"],
        1,
        &["sum of the weights"],
    );
    with(&["--density", "2"], 1, &["density"]);
    fails(
        &["merge-adapters", "-m", &model, &x, "-o", &out],
        2,
        &["ADAPTER"],
    );
    fails(
        &[
            "merge-adapters",
            "-m",
            &model,
            &x,
            &data("qwen2-adapter.gguf"),
            "-o",
            &out,
            "--overwrite",
        ],
        1,
        &["qwen2"],
    );
}

/// Preferences become an adapter, as texts and as messages; flags and lines that do not fit are
/// refused.
#[test]
fn training_on_preferences() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let lines = |line: &dyn Fn(usize) -> String| (0..24).map(line).collect::<String>();
    let train = |name: &str, contents: &str, flags: &[&str]| {
        let (file, out) = (folder.file(name, contents), folder.name("p.gguf"));
        let line = [
            "train",
            "-m",
            &model,
            "-f",
            &file,
            "-o",
            &out,
            "--overwrite",
            "--rank",
            "2",
            "--lr",
            "0.02",
        ];
        [&line[..], flags]
            .concat()
            .iter()
            .map(|&arg| arg.to_owned())
            .collect::<Vec<String>>()
    };
    let report = folder.name("p.json");
    let dpo = [
        "--loss",
        "dpo",
        "--beta",
        "0.5",
        "--held-out",
        "0.2",
        "--epochs",
        "4",
        "--report",
        &report,
    ];
    let kto = [
        "--loss",
        "kto",
        "--undesirable-weight",
        "1.2",
        "--held-out",
        "0.2",
        "--epochs",
        "4",
    ];
    let pairs = lines(&|i| {
        format!("{{\"prompt\":\"the t{i}\",\"chosen\":\" he{i}\",\"rejected\":\" the\"}}\n")
    });
    let labelled = lines(&|i| {
        let (text, label) = if i % 2 == 0 {
            (" he", true)
        } else {
            (" the", false)
        };
        format!("{{\"prompt\":\"the t{i}\",\"completion\":\"{text}\",\"label\":{label}}}\n")
    });
    let messages = lines(&|i| {
        let [user, good, bad] = [
            ("user", "the t"),
            ("assistant", " he"),
            ("assistant", " the"),
        ]
        .map(|(role, text)| format!("[{{\"role\":\"{role}\",\"content\":\"{text}{i}\"}}]"));
        format!("{{\"prompt\":{user},\"chosen\":{good},\"rejected\":{bad}}}\n")
    });
    for (contents, flags) in [(&pairs, &dpo[..]), (&messages, &dpo), (&labelled, &kto)] {
        let args = train("preferences.jsonl", contents, flags);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let said = text(&run(&args));
        assert!(
            said.contains(": -") && said.contains("in the direction asked for: 5 of 5"),
            "{said}"
        );
    }
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&report).unwrap()).unwrap();
    assert_eq!(
        (&report["loss"], &report["unit"]),
        (&json!("dpo"), &json!("nats/pair"))
    );
    let first = report["steps"][0]["loss"].as_f64().unwrap();
    assert!((first - std::f64::consts::LN_2).abs() < 1e-9);
    let wrong = |contents: &str, flags: &[&str], code: i32, parts: &[&str]| {
        let args = train("wrong.jsonl", contents, flags);
        fails(
            &args.iter().map(String::as_str).collect::<Vec<_>>(),
            code,
            parts,
        );
    };
    wrong(
        &pairs,
        &[],
        1,
        &["line 1", "chosen, prompt, rejected", "expected `text`"],
    );
    wrong(
        &labelled,
        &dpo,
        1,
        &["line 1", "expected `prompt`, `chosen`"],
    );
    wrong(
        &labelled.replace("true", "1"),
        &kto,
        1,
        &["line 1", "`label` is not true or false"],
    );
    wrong(
        &messages.replace(
            ":[{\"role\":\"assistant\",\"content\":\" he0\"}]",
            ":\"he\"",
        ),
        &dpo,
        1,
        &["`chosen`", "array"],
    );
    wrong(&pairs, &["--beta", "0.2"], 2, &["--beta", "--loss sft"]);
    wrong(
        &pairs,
        &["--loss", "dpo", "--desirable-weight", "2"],
        2,
        &["--desirable-weight", "--loss dpo"],
    );
    wrong(&pairs, &["--loss", "ppo"], 2, &["sft, dpo, kto"]);
    wrong(
        &pairs,
        &[&dpo[..], &["--ewc-lambda", "1"]].concat(),
        1,
        &["ewc_lambda", "no control text"],
    );
    fails(
        &[
            "train",
            "-m",
            &model,
            "--learn",
            &folder.name("s"),
            "-o",
            &folder.name("q"),
            "--loss",
            "dpo",
        ],
        2,
        &["--loss kto"],
    );
}

/// Texts, completions and answers become an adapter; a training that was killed ends as one that
/// was not.
#[test]
fn training() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let pairs: String = (0..24)
        .map(|i| {
            format!(
                "{{\"prompt\": \"the t{}\", \"completion\": \" he{} the\"}}\n",
                i % 6,
                i % 6
            )
        })
        .collect();
    let file = folder.file("pairs.jsonl", &pairs);
    let (out, svg, report) = (
        folder.name("a.gguf"),
        folder.name("a.svg"),
        folder.name("a.json"),
    );
    let line = [
        "train", "-m", &model, "-f", &file, "--rank", "2", "--lr", "0.02", "--batch", "4",
        "--seed", "3",
    ];
    let whole = [
        &line[..],
        &[
            "-o", &out, "--svg", &svg, "--report", &report, "--epochs", "4",
        ],
    ]
    .concat();
    let said = text(&run(&whole));
    assert!(
        said.contains("held out: ") && said.contains(": -"),
        "{said}"
    );
    assert!(std::fs::read_to_string(&svg).unwrap().contains("polyline"));
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&report).unwrap()).unwrap();
    assert_eq!(report["steps"].as_array().unwrap().len(), 22);
    assert_eq!(report["n_held_out"], 2);
    let adapter = std::fs::read(&out).unwrap();
    assert!(ruvllm::lora::Adapter::open(&out, &Model::open(&model).unwrap()).is_ok());
    assert!(!folder.path("a.gguf.checkpoint").exists());
    fails(&whole, 1, &["a.gguf", "--overwrite"]);

    // The same, killed again and again.
    let (other, checkpoint) = (folder.name("b.gguf"), folder.path("b.gguf.checkpoint"));
    let line = [
        &line[..],
        &["-o", &other, "--epochs", "4", "--save-every", "1"],
    ]
    .concat();
    for _ in 0..3 {
        let before = std::fs::metadata(&checkpoint)
            .and_then(|m| m.modified())
            .ok();
        let mut child = command(&line)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        while child.try_wait().unwrap().is_none()
            && std::fs::metadata(&checkpoint)
                .and_then(|m| m.modified())
                .ok()
                == before
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let last = run(&[&line[..], &["--overwrite"]].concat());
    assert!(
        stderr(&last).contains("continuing after step"),
        "{}",
        stderr(&last)
    );
    stdout(&last);
    assert_eq!(std::fs::read(&other).unwrap(), adapter);

    let with = |name: &str, contents: &str, parts: &[&str]| {
        let file = folder.file(name, contents);
        fails(
            &[
                "train",
                "-m",
                &model,
                "-f",
                &file,
                "-o",
                &folder.name("c.gguf"),
            ],
            1,
            parts,
        );
    };
    with(
        "bad.jsonl",
        "{\"text\": \"the\"}\n{\"text\": 3}\n",
        &["line 2", "`text` is not a string"],
    );
    with(
        "bad.jsonl",
        "{\"text\": \"the\", \"label\": 1}\n",
        &["line 1", "label", "expected"],
    );
    with(
        "bad.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"t\"}]}\n",
        &["line 1", "assistant"],
    );
    with("bad.jsonl", "[1]\n", &["line 1", "not an object"]);
    with("bad.jsonl", "{\n", &["line 1"]);
    with("empty.jsonl", "\n", &["too few"]);
    std::fs::write(&checkpoint, &adapter).unwrap();
    fails(
        &[&line[..], &["--overwrite"]].concat(),
        1,
        &["b.gguf.checkpoint", "no checkpoint"],
    );

    // Of a conversation, answers alone are learnt: one of them, once with a long question, has the
    // same loss.
    let loss = |messages: &str| {
        let file = folder.file("chat.jsonl", messages.repeat(2));
        let report = folder.name("chat.json");
        let flags = [
            "--held-out",
            "0",
            "--epochs",
            "1",
            "--overwrite",
            "--report",
            &report,
        ];
        stdout(&run(&[
            &[
                "train",
                "-m",
                &model,
                "-f",
                &file,
                "-o",
                &folder.name("d.gguf"),
            ],
            &flags[..],
        ]
        .concat()));
        let report: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&report).unwrap()).unwrap();
        report["steps"][0]["loss"].as_f64().unwrap()
    };
    let asked = "{\"messages\":[{\"role\":\"user\",\"content\":\"t\"},{\"role\":\"assistant\",\"content\":\"he the\"}]}\n";
    let text = "{\"prompt\":\"<s>[user]t[assistant]\",\"completion\":\"he the\"}\n";
    // The completion ends with the end of the text, which the template leaves out.
    assert!((loss(asked) - loss(text)).abs() > 1e-6);
    let model = Model::open(&model).unwrap();
    let tokenizer = model.tokenizer().unwrap();
    let prompt = tokenizer.encode_prompt("<s>[user]t[assistant]");
    let answer = tokenizer.encode_continuation("he the", *prompt.last().unwrap());
    let all = [&prompt[..], &answer].concat();
    let rows = library_logits(&model, &all);
    let nll = |i: usize| {
        let row: Vec<f64> = rows[i - 1].iter().map(|&x| f64::from(x)).collect();
        row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[all[i] as usize]
    };
    let expected = (prompt.len()..all.len()).map(nll).sum::<f64>() / answer.len() as f64;
    // Keys and values are in half precision there.
    assert!(
        (loss(asked) - expected).abs() < 2e-3,
        "{} {expected}",
        loss(asked)
    );
}

#[test]
#[cfg(feature = "completions")]
fn completions_and_manual_pages() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = text(&run(&["completions", shell]));
        assert!(script.contains("merge-adapters"), "{shell}");
        assert!(script.contains("max-divergence"), "{shell}");
    }
    assert_eq!(run(&["completions", "tcsh"]).status.code(), Some(2));
    let page = text(&run(&["man"]));
    assert!(page.contains(".TH") && page.contains("ruvllm"));
    let folder = Folder::new();
    let pages = folder.name("man1");
    text(&run(&["man", &pages]));
    for (name, says) in [
        ("ruvllm.1", "Exit codes"),
        ("ruvllm-train.1", "learning"),
        ("ruvllm-bench-speed.1", "speed"),
    ] {
        let page = std::fs::read_to_string(format!("{pages}/{name}")).unwrap();
        assert!(page.contains(says), "{name}: {page:.400}");
    }
    // What is hidden has no page.
    assert!(std::fs::metadata(format!("{pages}/ruvllm-render-templates.1")).is_err());
    // A folder that cannot be made is named.
    let file = folder.name("file");
    std::fs::write(&file, "").unwrap();
    let out = run(&["man", &format!("{file}/man1")]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("man1"));
}

#[test]
#[cfg(feature = "serve")]
fn health_of_no_server() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = port.local_addr().unwrap().port().to_string();
    let out = run(&["health", "--port", &port]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains(&port));
}
