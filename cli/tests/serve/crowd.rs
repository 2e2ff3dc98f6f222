//! Several models under load: a thousand loads at once, minutes of requests for three models of which
//! two are loaded, and what other models' answers feel of a load. Slots whose server is killed.

use super::house::{JSON, change, models, state, states};
use super::load::{Rng, clients, holds_nothing, is_long};
#[cfg(target_os = "linux")]
use super::load::{baseline, is_as_before};
use super::overhead::vocabulary;
use super::{Folder, Server, completion, text};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A request of which nothing is read yet.
fn begun(server: &Server, path: &str, body: &Value) -> TcpStream {
    let body = body.to_string();
    let mut stream = server.connect();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{JSON}content-length: {}\r\n\r\n{body}",
        server.address,
        body.len()
    )
    .unwrap();
    stream
}

/// A thousand requests to load three models, of which two fit, are all answered: with what they
/// asked for, or with why not. Nothing is left of them.
#[test]
fn a_thousand_loads_at_once() {
    let folder = models("crowd-loads");
    let flags = ["--models-dir", folder.0.to_str().unwrap(), "--temp", "0"];
    let server = Server::start(&[&flags[..], &["--models-max", "2"]].concat());
    let names = ["chat", "embed", "rank"];
    let round = |n: usize| {
        let loads: Vec<TcpStream> = (0..n)
            .map(|i| begun(&server, "/models/load", &json!({"model": names[i % 3]})))
            .collect();
        let mut by_status: HashMap<u16, usize> = HashMap::new();
        for mut load in loads {
            let mut response = String::new();
            load.read_to_string(&mut response).unwrap();
            let (head, body) = response.split_once("\r\n\r\n").expect("an answer");
            let status = head.split(' ').nth(1).unwrap().parse().unwrap();
            let body: Value = serde_json::from_str(body).expect("JSON");
            assert!(
                match status {
                    200 => body["success"] == true,
                    429 | 503 => !body["error"]["message"].as_str().unwrap().is_empty(),
                    _ => false,
                },
                "{status}: {body}"
            );
            *by_status.entry(status).or_default() += 1;
        }
        by_status
    };
    round(30);
    #[cfg(target_os = "linux")]
    let before = baseline(&server);
    let begun = Instant::now();
    let by_status = round(1000);
    let n_loads = server.metric("ruvllm:model_loads_total");
    println!("{by_status:?}, {n_loads} loads, {:?}", begun.elapsed());
    assert!(by_status[&200] > 0);
    let is_loaded = |(_, state): &(String, String)| state == "loaded";
    assert!((1..=2).contains(&states(&server).into_iter().filter(is_loaded).count()));
    let mut body = completion("abc", 4);
    body["model"] = "chat".into();
    assert!(!text(&server.ask("/v1/completions", &body)).is_empty());
    #[cfg(target_os = "linux")]
    is_as_before(&server, before, 48);
}

/// What clients ask of each model, with what it answers alone.
struct Asked {
    path: &'static str,
    body: Value,
    /// Where the answer is.
    field: &'static str,
    answer: Value,
}

fn asked(server: &Server) -> Vec<Asked> {
    let mut all = Vec::new();
    for i in 0..8 {
        let mut body = completion(&format!("abc {i}"), 24);
        body["model"] = "chat".into();
        body["ignore_eos"] = true.into();
        all.push(("/v1/completions", body, "choices"));
        let body = json!({"model": "embed", "input": [format!("a{i}"), "b c d"]});
        all.push(("/v1/embeddings", body, "data"));
        let body = json!({"model": "rank", "query": format!("a {i}"), "documents": ["b", "c d"]});
        all.push(("/v1/rerank", body, "results"));
    }
    let with_answer = |(path, body, field): (&'static str, Value, &'static str)| Asked {
        answer: server.ask(path, &body)[field].clone(),
        path,
        body,
        field,
    };
    all.into_iter().map(with_answer).collect()
}

/// Phases in which clients go away.
const PHASES: usize = 6;

/// Goes away in one of the phases of a request.
fn leave(server: &Server, asked: &Asked, phase: usize, rng: &mut Rng) {
    let mut body = asked.body.clone();
    if asked.field == "choices" && phase == 4 {
        body["stream"] = true.into();
        body["max_tokens"] = 200.into();
    }
    let body = body.to_string();
    let head = format!(
        "POST {} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        asked.path,
        body.len()
    );
    let mut stream = server.connect();
    // Whether the server still reads is its own affair.
    let _ = match phase {
        0 => Ok(()),
        1 => stream.write_all(&head.as_bytes()[..head.len() / 2]),
        2 => stream.write_all((head + &body[..body.len() / 2]).as_bytes()),
        _ => stream.write_all((head + &body).as_bytes()),
    };
    match phase {
        // While its model is loaded, or it waits for that.
        3 => std::thread::sleep(Duration::from_millis(rng.below(30) as u64)),
        // Within its answer.
        4 => drop(stream.read(&mut [0; 300])),
        5 => drop(stream.read(&mut [0; 16])),
        _ => {}
    }
}

/// For how long the load lasts: `RUVLLM_LONG=SECONDS`, or ten minutes for `RUVLLM_LONG=1`.
fn time() -> Duration {
    let seconds = std::env::var("RUVLLM_LONG").map(|text| text.parse().unwrap_or(1));
    Duration::from_secs(match seconds {
        Err(_) => 4,
        Ok(0 | 1) => 600,
        Ok(seconds) => seconds,
    })
}

/// Three models, of which two are loaded at most, and sixteen clients, some of which go away in each
/// phase: who stays has the answer that the model gives alone, and nothing is left behind.
#[test]
fn three_models_under_load() {
    let folder = models("crowd-load");
    let flags = ["--models-dir", folder.0.to_str().unwrap(), "--temp", "0"];
    let server = &Server::start(&[&flags[..], &["--models-max", "2", "-np", "4"]].concat());
    let all = &asked(server);
    let (n_answered, n_busy) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let gone: [AtomicUsize; PHASES] = Default::default();
    let times = Mutex::new(Vec::new());
    let act = |rng: &mut Rng| {
        let asked = &all[rng.below(all.len())];
        if rng.below(3) == 0 {
            let phase = rng.below(PHASES);
            leave(server, asked, phase, rng);
            gone[phase].fetch_add(1, Relaxed);
            return;
        }
        let begun = Instant::now();
        let (status, answer) = server.post(asked.path, &asked.body);
        if status == 503 || status == 429 {
            n_busy.fetch_add(1, Relaxed);
            return;
        }
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer[asked.field], asked.answer, "{}", asked.body);
        n_answered.fetch_add(1, Relaxed);
        times.lock().unwrap().push(begun.elapsed());
    };
    clients(
        16,
        500,
        Duration::from_secs(if is_long() { 10 } else { 1 }),
        act,
    );
    server.is_idle_soon();
    #[cfg(target_os = "linux")]
    let before = baseline(server);
    let before_loads = server.metric("ruvllm:model_loads_total");
    let is_over = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while is_over.load(Relaxed) == 0 {
                let states = states(server);
                let n = states.iter().filter(|(_, state)| state == "loaded").count();
                assert!(n <= 2, "{states:?}");
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        clients(16, 1, time(), act);
        is_over.store(1, Relaxed);
    });
    let gone = gone.map(AtomicUsize::into_inner);
    let (n_answered, n_busy) = (n_answered.into_inner(), n_busy.into_inner());
    let n_loads = server.metric("ruvllm:model_loads_total") - before_loads;
    let mut times = times.into_inner().unwrap();
    times.sort_unstable();
    println!(
        "{:?}: {n_answered} answered (half within {:?}, all within {:?}), {n_busy} told to come again, \
         {n_loads} loads, went away by phase: {gone:?}",
        time(),
        times.get(times.len() / 2),
        times.last()
    );
    let least = if is_long() { 100 } else { 1 };
    assert!(n_answered >= least && n_loads >= least as f64);
    assert!(gone.iter().all(|&n| n >= least), "{gone:?}");
    for _ in 0..2 {
        for asked in all {
            assert_eq!(
                server.ask(asked.path, &asked.body)[asked.field],
                asked.answer
            );
        }
    }
    holds_nothing(server);
    #[cfg(target_os = "linux")]
    is_as_before(server, before, 48);
}

/// A killed server leaves the last file of a slot whole, or the new one.
#[test]
fn killed_while_a_slot_is_saved() {
    let folder = Folder::new("crowd-kill");
    let dir = folder.0.to_str().unwrap();
    let flags = ["-c", "2048", "--temp", "0", "--slot-save-path", dir];
    let act = |server: &Server, action: &str| {
        let path = format!("/slots/1?action={action}");
        let (status, body) = change(server, &path, JSON, &json!({"filename": "chat"}));
        assert_eq!(status, 200, "{body}");
        serde_json::from_str::<Value>(&body).unwrap()
    };
    let ask = |server: &Server| {
        let prompt = "A text that is long enough to take a while. ".repeat(100);
        let mut body = completion(&prompt, 6);
        body["id_slot"] = 1.into();
        let answer = server.ask("/v1/completions", &body);
        let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
        (text(&answer).to_owned(), cached.as_u64().unwrap())
    };
    let server = Server::start(&flags);
    let (expected, _) = ask(&server);
    let begun = Instant::now();
    let saved = act(&server, "save");
    let time = begun.elapsed();
    drop(server);
    let n = 6;
    let mut n_cut = 0;
    for i in 0..n {
        let mut server = Server::start(&flags);
        assert_eq!(act(&server, "restore")["n_restored"], saved["n_saved"]);
        let (again, n_cached) = ask(&server);
        assert_eq!(again, expected);
        assert!(n_cached > 100, "{n_cached}");
        let body = json!({"filename": "chat"});
        let mut save = self::begun(&server, "/slots/1?action=save", &body);
        std::thread::sleep(time * i / n);
        server.child.kill().unwrap();
        server.child.wait().unwrap();
        let mut response = Vec::new();
        let _ = save.read_to_end(&mut response);
        n_cut += usize::from(response.is_empty());
    }
    println!("{n_cut} of {n} killed before they answered");
    assert!(n_cut > 0);
    // What the killed ones left goes with the next one that is saved.
    let server = Server::start(&flags);
    act(&server, "restore");
    act(&server, "save");
    let names: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["chat"]);
}

/// When each token of a stream came.
fn arrivals(stream: TcpStream) -> Vec<Instant> {
    let mut times = Vec::new();
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        if line.starts_with("data: {") {
            times.push(Instant::now());
        }
    }
    times
}

/// While a model of 262,144 tokens is loaded, the time between tokens of another is at most one and a
/// half of what it is otherwise.
#[test]
#[ignore = "a measurement"]
fn tokens_come_while_another_model_is_loaded() {
    use ruvllm::quant::FileType;
    use ruvllm_benches::{Shape, synthetic_with_tokens};
    let folder = Folder::new("crowd-itl");
    for (name, shape, n_layer, n_vocab) in [
        ("writes", "llama-1b", 2, 32_000),
        ("comes", "gemma3-4b", 1, 262_144),
    ] {
        let vocabulary =
            ruvllm::gguf::Gguf::from_bytes(vocabulary(n_vocab).to_bytes().unwrap()).unwrap();
        let shape = Shape::from_name(shape).unwrap().with_layers(n_layer);
        let file = synthetic_with_tokens(&shape, FileType::Q4_K_M, vocabulary.metadata()).unwrap();
        let mut writer = ruvllm::gguf::Writer::new();
        for (key, value) in file.metadata().iter() {
            writer.metadata(key, value.clone());
        }
        for tensor in file.tensors() {
            writer.tensor(&tensor.name, &tensor.dims, tensor.dtype, file.data(tensor));
        }
        writer.write(folder.path(&format!("{name}.gguf"))).unwrap();
    }
    let dir = folder.0.to_str().unwrap();
    let server = Server::start(&[
        "--models-dir",
        dir,
        "-c",
        "4096",
        "--temp",
        "0",
        "--no-spec",
    ]);
    let mut body = completion("abc", 3000);
    body.as_object_mut().unwrap().extend([
        ("model".to_owned(), "writes".into()),
        ("stream".to_owned(), true.into()),
        ("ignore_eos".to_owned(), true.into()),
    ]);
    let stream = begun(&server, "/v1/completions", &body);
    let reader = std::thread::spawn(move || arrivals(stream));
    std::thread::sleep(Duration::from_secs(4));
    let by_hand = |what: &str| {
        let path = format!("/models/{what}");
        let (status, body) = change(&server, &path, JSON, &json!({"model": "comes"}));
        assert_eq!(status, 200, "{body}");
    };
    let mut loads = Vec::new();
    for _ in 0..5 {
        let begun = Instant::now();
        by_hand("load");
        // The tree of its tokens is still being built.
        std::thread::sleep(Duration::from_secs(1));
        loads.push((begun, Instant::now()));
        by_hand("unload");
        std::thread::sleep(Duration::from_secs(1));
    }
    assert_eq!(state(&server, "writes.gguf"), "loaded");
    drop(server);
    let times = reader.join().unwrap();
    let (mut beside, mut quiet) = (Vec::new(), Vec::new());
    for pair in times.windows(2) {
        let is_beside = loads
            .iter()
            .any(|(from, to)| (from..=to).contains(&&pair[1]));
        let gaps = if is_beside { &mut beside } else { &mut quiet };
        gaps.push((pair[1] - pair[0]).as_secs_f64() * 1e3);
    }
    let of = |gaps: &mut Vec<f64>, share: f64| {
        gaps.sort_by(f64::total_cmp);
        gaps[((gaps.len() - 1) as f64 * share) as usize]
    };
    let loads: Vec<_> = loads.iter().map(|(from, to)| *to - *from).collect();
    for (name, gaps) in [("quiet", &mut quiet), ("beside a load", &mut beside)] {
        println!(
            "{name}: {} tokens, ms between them: median {:.2}, 90 % {:.2}, 99 % {:.2}, all {:.2}",
            gaps.len(),
            of(gaps, 0.5),
            of(gaps, 0.9),
            of(gaps, 0.99),
            of(gaps, 1.0)
        );
    }
    println!("loads, with a second each: {loads:?}");
    assert!(of(&mut beside, 0.5) <= 1.5 * of(&mut quiet, 0.5));
}
