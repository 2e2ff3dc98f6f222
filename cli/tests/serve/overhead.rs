//! What the server costs over the library: one streamed request against a session in this process,
//! in turns, with a model of 1B whose weights and texts are made up.

use super::Server;
use super::load::Rng;
use ruvllm::engine::EngineOptions;
use ruvllm::gguf::{Array, Gguf, Writer};
use ruvllm::quant::FileType;
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Model, Sampler, SamplerOptions};
use ruvllm_benches::{Shape, synthetic_with_tokens};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A vocabulary of words, bytes, and what ends a text.
pub(super) fn vocabulary(n: usize) -> Writer<'static> {
    let words = (0..n - 259).map(|i| format!("\u{2581}w{i}"));
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let tokens = words
        .chain(bytes)
        .chain(["<unk>", "<s>", "</s>"].map(String::from));
    let types = std::iter::repeat_n(1, n - 259)
        .chain([6; 256])
        .chain([2, 3, 3]);
    let mut writer = Writer::new();
    writer.metadata("general.architecture", "llama");
    writer.metadata("tokenizer.ggml.model", "llama");
    writer.metadata("tokenizer.ggml.tokens", Array::Strings(tokens.collect()));
    writer.metadata("tokenizer.ggml.scores", Array::F32(vec![0.0; n]));
    writer.metadata("tokenizer.ggml.token_type", Array::I32(types.collect()));
    for (name, back) in [("unknown", 3), ("bos", 2), ("eos", 1)] {
        writer.metadata(format!("tokenizer.ggml.{name}_token_id"), (n - back) as u32);
    }
    writer
}

/// When each token of an answer came.
type Times = Vec<Duration>;

fn library(engine: &Engine, prompt: &str, n: usize) -> Times {
    let begun = Instant::now();
    let options = SessionOptions {
        n_ctx: Some(512),
        ..SessionOptions::default()
    };
    let mut session = engine.session_with(&options).unwrap();
    let eog = engine
        .model()
        .tokenizer()
        .unwrap()
        .eog()
        .map(|id| (id, f32::NEG_INFINITY));
    let mut sampler = Sampler::new(SamplerOptions {
        temperature: 0.0,
        logit_bias: eog.into_iter().collect(),
        ..Default::default()
    })
    .unwrap();
    let pieces = session
        .generate(prompt, &mut sampler)
        .unwrap()
        .max_tokens(n);
    let times: Times = pieces
        .map(|piece| piece.map(|_| begun.elapsed()).unwrap())
        .collect();
    assert_eq!(times.len(), n);
    times
}

/// On a connection that is kept, as by the clients that programs use.
fn served(stream: &mut BufReader<TcpStream>, prompt: &str, n: usize) -> Times {
    let begun = Instant::now();
    let body =
        json!({"prompt": prompt, "max_tokens": n, "ignore_eos": true, "stream": true}).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream
        .get_mut()
        .write_all((head + &body).as_bytes())
        .unwrap();
    let (mut times, mut line) = (Times::new(), String::new());
    // A chunk of no bytes is the last.
    while line != "0\r\n" {
        line.clear();
        assert!(
            stream.read_line(&mut line).unwrap() > 0,
            "no end behind {} tokens",
            times.len()
        );
        let Some(data) = line
            .strip_prefix("data: ")
            .filter(|data| !data.starts_with("[DONE]"))
        else {
            continue;
        };
        let event: Value = serde_json::from_str(data).unwrap();
        if !event["choices"][0]["text"].as_str().unwrap().is_empty() {
            times.push(begun.elapsed());
        }
    }
    stream.read_line(&mut line).unwrap();
    assert_eq!(times.len(), n);
    times
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Times of answers of `n_tokens` from the library and through the server, with so many layers.
fn measure(n_layer: usize, n_tokens: usize, n_turns: usize) -> [Vec<Times>; 2] {
    let folder = std::env::temp_dir().join(format!("ruvllm-overhead-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(format!("{n_layer}.gguf"));
    let vocabulary = Gguf::from_bytes(vocabulary(32000).to_bytes().unwrap()).unwrap();
    let shape = Shape::from_name("llama-1b").unwrap().with_layers(n_layer);
    let file = synthetic_with_tokens(&shape, FileType::Q4_K_M, vocabulary.metadata()).unwrap();
    let mut writer = Writer::new();
    for (key, value) in file.metadata().iter() {
        writer.metadata(key, value.clone());
    }
    for tensor in file.tensors() {
        writer.tensor(&tensor.name, &tensor.dims, tensor.dtype, file.data(tensor));
    }
    writer.write(&path).unwrap();
    // Both from the same pages of memory.
    // The library's session drafts nothing, either.
    let server = Server::start(&[
        "-m",
        path.to_str().unwrap(),
        "--mmap",
        "-c",
        "512",
        "--temp",
        "0",
        "--no-spec",
    ]);
    let model = Model::open(&path).unwrap();
    let engine = Engine::new(
        &model,
        &EngineOptions {
            n_threads: 2.try_into().ok(),
            ..Default::default()
        },
    )
    .unwrap();

    let mut stream = BufReader::new(server.connect());
    stream.get_ref().set_nodelay(true).unwrap();
    let (mut of_library, mut of_server) = (Vec::new(), Vec::new());
    for turn in 0..=n_turns {
        // Other prompts each time, as the server would find them in its cache.
        let prompt = format!("{turn:03}");
        if turn % 2 == 0 {
            of_library.push(library(&engine, &prompt, n_tokens));
            of_server.push(served(&mut stream, &prompt, n_tokens));
        } else {
            of_server.push(served(&mut stream, &prompt, n_tokens));
            of_library.push(library(&engine, &prompt, n_tokens));
        }
    }
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
    // Both are warm from the second turn on.
    [of_library, of_server].map(|times| times[1..].to_vec())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Milliseconds to the first token.
fn first(times: &Times) -> f64 {
    ms(times[0])
}

/// Mean milliseconds for each other token.
fn each(times: &Times) -> f64 {
    ms(times[times.len() - 1] - times[0]) / (times.len() - 1) as f64
}

/// The median of `compare` over pairs, and the interval of 95 % of the medians of pairs drawn from
/// them.
fn compared(
    [library, server]: &[Vec<Times>; 2],
    compare: impl Fn(&Times, &Times) -> f64,
) -> (f64, [f64; 2]) {
    let values: Vec<f64> = library
        .iter()
        .zip(server)
        .map(|(a, b)| compare(a, b))
        .collect();
    let mut rng = Rng(1);
    let mut drawn = || {
        median(
            values
                .iter()
                .map(|_| values[rng.below(values.len())])
                .collect(),
        )
    };
    let mut medians: Vec<f64> = (0..2000).map(|_| drawn()).collect();
    medians.sort_by(f64::total_cmp);
    (median(values), [medians[50], medians[1949]])
}

/// At most 1 ms to the first token, and at most 1 % of the 20 ms that a token of 1B takes to each
/// other. With one layer, as it is too little to be told from how much those 20 ms vary.
/// docs/guide/server.md has the numbers.
#[test]
#[ignore = "a measurement"]
fn overhead() {
    let times = measure(1, 24, 200);
    for (name, all) in ["the library", "the server"].iter().zip(&times) {
        let of = |one: fn(&Times) -> f64| median(all.iter().map(one).collect());
        println!(
            "one layer, {name}: {:.3} ms to the first token, {:.3} for each other",
            of(first),
            of(each)
        );
    }
    let (first_more, interval) = compared(&times, |library, server| first(server) - first(library));
    println!("the server adds {first_more:.3} ms {interval:.3?} to the first token");
    let (more, interval) = compared(&times, |library, server| each(server) - each(library));
    println!("and {more:.3} ms {interval:.3?} to each other");
    assert!(first_more <= 1.0 && more <= 0.2);
}

/// The same model with all of its layers, compared directly: many short answers.
#[test]
#[ignore = "a measurement"]
fn overhead_1b() {
    let times = measure(16, 9, 60);
    let (ratio, interval) = compared(&times, |library, server| each(server) / each(library));
    let [library, server] = times.map(|all| median(all.iter().map(each).collect()));
    println!("1B: {library:.3} and {server:.3} ms for each token, ratio {ratio:.4} {interval:.4?}");
    assert!(interval[0] <= 1.01);
}
