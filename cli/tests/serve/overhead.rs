//! What the server costs over the library: one streamed request against a session in this process, in turns, with a model
//! of 1B whose weights and texts are made up.

use super::Server;
use ruvllm::bench::{Shape, synthetic_with_tokens};
use ruvllm::exec::{Engine, EngineOptions, SessionOptions};
use ruvllm::gguf::{Array, Gguf, Writer};
use ruvllm::quant::FileType;
use ruvllm::{Model, Sampler};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::time::{Duration, Instant};

/// Generated tokens of a request.
const N_TOKENS: usize = 96;
/// Turns whose medians are compared: of whole answers, and of single tokens.
const TURNS: (usize, usize) = (7, 25);

/// A vocabulary of words, bytes, and what ends a text.
fn vocabulary(n: usize) -> Writer<'static> {
    let words = (0..n - 259).map(|i| format!("\u{2581}w{i}"));
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let tokens = words.chain(bytes).chain(["<unk>", "<s>", "</s>"].map(String::from));
    let types = std::iter::repeat_n(1, n - 259).chain([6; 256]).chain([2, 3, 3]);
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
    let options = SessionOptions { n_ctx: Some(512), ..SessionOptions::default() };
    let mut session = engine.session_with(&options).unwrap();
    let eog = engine.model().tokenizer().unwrap().eog().map(|id| (id, f32::NEG_INFINITY));
    let mut sampler = Sampler::builder().temperature(0.0).logit_bias(eog).build().unwrap();
    let pieces = session.generate(prompt, &mut sampler).unwrap().max_tokens(n);
    let times: Times = pieces.map(|piece| piece.map(|_| begun.elapsed()).unwrap()).collect();
    assert_eq!(times.len(), n);
    times
}

fn served(server: &Server, prompt: &str, n: usize) -> Times {
    let begun = Instant::now();
    let mut stream = server.connect();
    stream.set_nodelay(true).unwrap();
    let body = json!({"prompt": prompt, "max_tokens": n, "ignore_eos": true, "stream": true}).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).unwrap();
    let mut times = Times::new();
    for line in BufReader::new(stream).lines() {
        let line = line.unwrap();
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            assert_eq!(times.len(), n);
            return times;
        }
        let event: Value = serde_json::from_str(data).unwrap();
        if !event["choices"][0]["text"].as_str().unwrap().is_empty() {
            times.push(begun.elapsed());
        }
    }
    panic!("no end behind {} tokens", times.len());
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// At most 1 % of the tokens per second, and 1 ms to the first token. For a quiet machine: docs/server.md has the numbers.
#[test]
#[ignore = "a measurement"]
fn overhead() {
    let folder = std::env::temp_dir().join(format!("ruvllm-overhead-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("1b.gguf");
    let vocabulary = Gguf::from_bytes(vocabulary(32000).to_bytes().unwrap()).unwrap();
    let shape = Shape::from_name("llama-1b").unwrap();
    let file = synthetic_with_tokens(shape, FileType::Q4_K_M, vocabulary.metadata()).unwrap();
    let mut writer = Writer::new();
    for (key, value) in file.metadata().iter() {
        writer.metadata(key, value.clone());
    }
    for tensor in file.tensors() {
        writer.tensor(&tensor.name, &tensor.dims, tensor.dtype, file.data(tensor));
    }
    writer.write(&path).unwrap();
    // Both from the same pages of memory.
    let server = Server::start(&["-m", path.to_str().unwrap(), "--mmap", "-c", "512", "--temp", "0"]);
    let model = Model::open(&path).unwrap();
    let engine = Engine::new(&model, &EngineOptions { n_threads: 2.try_into().ok(), ..Default::default() }).unwrap();

    // Other prompts each time, as the server would find them in its cache.
    let mut n = 0;
    let mut turns = |n_turns: usize, n_tokens: usize| {
        let (mut of_library, mut of_server) = (Vec::new(), Vec::new());
        for turn in 0..=n_turns {
            n += 1;
            let prompt = format!("{n} to go");
            let pair = if turn % 2 == 0 {
                let library = library(&engine, &prompt, n_tokens);
                (library, served(&server, &prompt, n_tokens))
            } else {
                let served = served(&server, &prompt, n_tokens);
                (library(&engine, &prompt, n_tokens), served)
            };
            // The first one warms both up.
            if turn > 0 {
                of_library.push(pair.0);
                of_server.push(pair.1);
            }
        }
        (of_library, of_server)
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let first = |all: &[Times]| median(all.iter().map(|times| ms(times[0])).collect());
    let (of_library, of_server) = turns(TURNS.1, 1);
    let (first_library, first_server) = (first(&of_library), first(&of_server));
    println!("to the first token: {first_library:.2} ms in the library, {first_server:.2} ms through the server");

    let (of_library, of_server) = turns(TURNS.0, N_TOKENS);
    let rate = |times: &Times| (N_TOKENS - 1) as f64 / (times[N_TOKENS - 1] - times[0]).as_secs_f64();
    let rates = |all: &[Times]| median(all.iter().map(rate).collect());
    let (rate_library, rate_server) = (rates(&of_library), rates(&of_server));
    let share =
        median(of_server.iter().zip(&of_library).map(|(server, library)| rate(server) / rate(library)).collect());
    println!(
        "tokens per second: {rate_library:.2} in the library, {rate_server:.2} through the server, {share:.4} of it in pairs"
    );
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
    assert!(first_server <= first_library + 1.0, "{first_server} ms, not {first_library} ms, to the first token");
    assert!(share >= 0.99, "{share} of the library's tokens per second");
}
