//! The server under more load than it can bear: 64 clients, some of which go away in every phase of
//! a request, some of which are hostile. Nobody gets another's text, nobody who stays is refused
//! but for the queue, and nothing is left behind. `RUVLLM_LONG` makes it ten minutes.

use super::{Server, unchunk};
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Clients at a time.
const CLIENTS: usize = 64;
/// Sequences that are computed side by side.
const PARALLEL: usize = 8;
/// Requests that may run or wait: fewer than there are clients, so that some are refused.
const PLACES: usize = 48;
/// Phases of a request in which clients go away.
const PHASES: usize = 8;
/// Time in which an answer has to be there to be of use.
const USEFUL: Duration = Duration::from_secs(10);

pub(super) fn is_long() -> bool {
    std::env::var_os("RUVLLM_LONG").is_some()
}

/// Numbers that look drawn (SplitMix64).
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

fn post(server: &Server, path: &str, body: &Value) -> io::Result<TcpStream> {
    let mut stream = server.connect();
    let body = body.to_string();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    Ok(stream)
}

/// Status and body of an answer that is not streamed.
fn read_whole(stream: TcpStream) -> (u16, Value) {
    let mut response = String::new();
    BufReader::new(stream)
        .read_to_string(&mut response)
        .expect("the server answers");
    let (head, body) = response.split_once("\r\n\r\n").expect("a head");
    let body = if head.contains("chunked") {
        unchunk(body)
    } else {
        body.to_owned()
    };
    (
        head.split(' ').nth(1).unwrap().parse().unwrap(),
        serde_json::from_str(&body).expect("JSON"),
    )
}

/// Status and text of a streamed completion, of whose events at most `n` are read.
fn read_stream(stream: TcpStream, n: usize) -> io::Result<(u16, String, bool)> {
    let mut lines = BufReader::new(stream).lines();
    let status = lines.next().ok_or(io::ErrorKind::UnexpectedEof)??;
    let status = status
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .unwrap_or(0);
    let (mut text, mut n_events) = (String::new(), 0);
    for line in lines {
        let line = line?;
        let Some(data) = line.strip_prefix("data: ") else {
            continue;
        };
        if data == "[DONE]" {
            return Ok((status, text, true));
        }
        let event: Value = serde_json::from_str(data)?;
        assert!(event.get("error").is_none(), "{event}");
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
        n_events += 1;
        if n_events >= n {
            break;
        }
    }
    Ok((status, text, false))
}

/// What a server holds of the system: descriptors, threads, resident KiB but for the prefix cache,
/// which goes on growing to its limit.
#[cfg(target_os = "linux")]
fn holdings(server: &Server) -> (usize, usize, usize) {
    let pid = server.child.id();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let of = |name: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap();
        line.trim_start_matches(':')
            .trim()
            .trim_end_matches(" kB")
            .parse()
            .unwrap()
    };
    let n_descriptors = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .count();
    let cached = server.metric("ruvllm:prefix_cache_bytes") as usize >> 10;
    (n_descriptors, of("Threads"), of("VmRSS") - cached)
}

/// Prompts with their answers, each computed alone before the load. No answer begins as another
/// does.
struct Known(Vec<(String, String)>);

impl Known {
    const N_TOKENS: usize = 96;

    fn of(server: &Server) -> Known {
        let words = [
            "A trait",
            "The heap",
            "A slice",
            "An iterator",
            "The macro",
            "Error handling",
            "A closure",
            "Threads",
        ];
        let prompts =
            (0..24).map(|i| format!("{} number {i}, in other words,", words[i % words.len()]));
        let answer = |prompt: String| {
            let body = json!({"prompt": prompt, "max_tokens": Self::N_TOKENS, "ignore_eos": true});
            let text = server.ask("/v1/completions", &body)["choices"][0]["text"]
                .as_str()
                .unwrap()
                .to_owned();
            (prompt, text)
        };
        let mut known: Vec<(String, String)> = prompts.map(answer).collect();
        known.sort_by(|(_, a), (_, b)| a.cmp(b));
        known.dedup_by(|(_, a), (_, b)| a.chars().take(24).eq(b.chars().take(24)));
        assert!(known.len() >= 8, "too few different answers: {known:?}");
        Known(known)
    }
}

#[derive(Default)]
struct Counts {
    answered: AtomicUsize,
    refused: AtomicUsize,
    /// Times of answers.
    times: Mutex<Vec<Duration>>,
    /// By phase.
    gone: [AtomicUsize; PHASES],
}

/// One request of a client that stays: a canary that only its own answer has, or a text that is
/// known. If it is refused, it waits for `patience`. Returns the tokens of a text that came in
/// time.
fn stay(
    server: &Server,
    known: &Known,
    rng: &mut Rng,
    counts: &Counts,
    patience: Duration,
) -> usize {
    let begun = Instant::now();
    let streams = rng.below(2) == 0;
    let (body, expected, n_tokens) = match rng.below(3) {
        0 => {
            let canary = format!("canary-{:016x}", rng.below(usize::MAX));
            (
                json!({"prompt": "The word is", "grammar": format!("root ::= \"{canary}\"")}),
                canary,
                0,
            )
        }
        _ => {
            let (prompt, text) = &known.0[rng.below(known.0.len())];
            let body = json!({"prompt": prompt, "max_tokens": Known::N_TOKENS, "ignore_eos": true});
            (body, text.clone(), Known::N_TOKENS)
        }
    };
    let mut body = body;
    body["stream"] = streams.into();
    let stream = post(server, "/v1/completions", &body).expect("the server takes requests");
    let (status, text) = if streams {
        let (status, text, is_whole) = read_stream(stream, usize::MAX).expect("the server answers");
        assert!(
            is_whole || status == 429,
            "a stream without an end: {status} {text:?}"
        );
        (status, text)
    } else {
        let (status, body) = read_whole(stream);
        (
            status,
            body["choices"][0]["text"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
        )
    };
    match status {
        200 => {
            assert_eq!(text, expected, "the text of another request");
            counts.answered.fetch_add(1, Relaxed);
            counts.times.lock().unwrap().push(begun.elapsed());
            if begun.elapsed() <= USEFUL {
                n_tokens
            } else {
                0
            }
        }
        429 => {
            counts.refused.fetch_add(1, Relaxed);
            std::thread::sleep(patience);
            0
        }
        status => panic!("status {status}: {text}"),
    }
}

/// One request of a client that goes away, in one of all phases.
fn leave(server: &Server, known: &Known, rng: &mut Rng, counts: &Counts) {
    let (prompt, expected) = &known.0[rng.below(known.0.len())];
    let body = json!({"prompt": prompt, "max_tokens": 400, "ignore_eos": true, "stream": rng.below(4) > 0});
    let phase = rng.below(PHASES);
    counts.gone[phase].fetch_add(1, Relaxed);
    let mut stream = server.connect();
    // Whatever is written may meet a server that has closed already.
    let _ = match phase {
        // Before, in the head, in the body.
        0 => Ok(()),
        1 => write!(stream, "POST /v1/completions HT"),
        2 => write!(stream, "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{\"prompt\": "),
        // Reset in the body: what was sent to the client is not read.
        3 => write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 100\r\n\r\n{{\"prompt\": "
        )
        .map(|()| std::thread::sleep(Duration::from_millis(5))),
        // As soon as everything is sent, half-closed, while it waits, in the stream.
        _ => post(server, "/v1/completions", &body).and_then(|stream| match phase {
            4 => Ok(()),
            5 => stream.shutdown(Shutdown::Both),
            6 => {
                std::thread::sleep(Duration::from_millis(rng.below(50) as u64));
                Ok(())
            }
            _ => {
                let (status, text, _) = read_stream(stream, 1 + rng.below(40))?;
                let n = text.len().min(expected.len());
                assert!(status == 429 || text[..n] == expected[..n], "the text of another request: {text:?}");
                Ok(())
            }
        }),
    };
}

/// A chunked body without an end is refused once it is too large.
fn endless_chunks(server: &Server) {
    let mut stream = server.connect();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    .unwrap();
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
    let n_sent = (0..2000)
        .take_while(|_| stream.write_all(chunk.as_bytes()).is_ok())
        .count();
    assert!(n_sent < 1000, "the server read {n_sent} chunks of 64 KiB");
    // The answer may be lost as the server closes before everything is read.
    let mut status = [0; 12];
    if stream.read_exact(&mut status).is_ok() {
        assert_eq!(&status, b"HTTP/1.1 413");
    }
}

/// Whoever sends a byte now and then is sent away in time.
fn slow_loris(server: &Server, head: &str, limit: Duration) {
    let mut stream = server.connect();
    stream
        .set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    let begun = Instant::now();
    loop {
        match stream.read(&mut [0; 512]) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error)
                if [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut].contains(&error.kind()) => {
            }
            Err(_) => break,
        }
        assert!(
            begun.elapsed() < limit,
            "a client that sends a byte now and then is still there"
        );
        if stream.write_all(b"a").is_err() {
            break;
        }
    }
}

/// Runs `n` clients for a time; each does `act` again and again.
pub(super) fn clients(n: usize, seed: u64, time: Duration, act: impl Fn(&mut Rng) + Sync) {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for i in 0..n {
            let act = &act;
            scope.spawn(move || {
                let mut rng = Rng(seed + i as u64);
                while begun.elapsed() < time {
                    act(&mut rng);
                }
            });
        }
    });
}

/// Goodput for `n` clients that stay: tokens per second of answers that end within `time`, each of
/// them within [`USEFUL`]. Who is refused comes back after the time that `Retry-After` says.
fn goodput(server: &Server, known: &Known, n: usize, time: Duration) -> f64 {
    let (counts, n_tokens, begun) = (Counts::default(), AtomicUsize::new(0), Instant::now());
    clients(n, 77, time, |rng| {
        let n = stay(server, known, rng, &counts, Duration::from_secs(1));
        n_tokens.fetch_add(if begun.elapsed() <= time { n } else { 0 }, Relaxed);
    });
    n_tokens.into_inner() as f64 / time.as_secs_f64()
}

/// Goodput of a server that is just full, and at four times that load. In turns, as the machine has
/// others to serve.
fn goodputs(server: &Server, known: &Known, n_turns: usize, time: Duration) -> (f64, f64) {
    let (mut full, mut four_times) = (0.0, 0.0);
    for _ in 0..n_turns {
        full += goodput(server, known, 2 * PARALLEL, time) / n_turns as f64;
        four_times += goodput(server, known, 8 * PARALLEL, time) / n_turns as f64;
    }
    println!(
        "goodput: {full:.0} tokens/s with {} clients, {four_times:.0} with {}",
        2 * PARALLEL,
        8 * PARALLEL
    );
    (full, four_times)
}

fn overloaded() -> Server {
    let (n, places) = (PARALLEL.to_string(), PLACES.to_string());
    Server::start(&[
        "-c",
        "512",
        "-np",
        &n,
        "--max-requests",
        &places,
        "--temp",
        "0",
    ])
}

/// The goodput alone, for a quiet machine: docs/guide/server.md has the numbers.
#[test]
#[ignore = "a measurement"]
fn goodput_when_overloaded() {
    let server = overloaded();
    let known = Known::of(&server);
    let (full, four_times) = goodputs(&server, &known, 4, Duration::from_secs(5));
    assert!(four_times >= 0.95 * full, "{four_times} of {full} tokens/s");
}

#[test]
fn load() {
    let server = overloaded();
    let known = Known::of(&server);
    let seconds = |short, long| Duration::from_secs(if is_long() { long } else { short });
    let mixed = |seed, time| {
        let counts = Counts::default();
        clients(CLIENTS, seed, time, |rng| match rng.below(3) {
            0 => leave(&server, &known, rng, &counts),
            // It does not wait as long as it is told to.
            _ => drop(stay(
                &server,
                &known,
                rng,
                &counts,
                Duration::from_millis(20),
            )),
        });
        counts
    };
    // What all the clients of the system do once, for a baseline.
    mixed(1000, seconds(2, 20));
    server.is_idle_soon();
    #[cfg(target_os = "linux")]
    let before = baseline(&server);

    let counts = std::thread::scope(|scope| {
        let hostile = [
            scope.spawn(|| endless_chunks(&server)),
            scope.spawn(|| {
                slow_loris(
                    &server,
                    "POST /v1/completions HTTP/1.1\r\nhost: ",
                    Duration::from_secs(60),
                )
            }),
        ];
        if is_long() {
            let body = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n";
            slow_loris(&server, body, Duration::from_secs(90));
            // A connection that had an answer.
            let second = "GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\n";
            slow_loris(&server, second, Duration::from_secs(150));
        }
        let counts = mixed(1, seconds(8, 600));
        hostile
            .into_iter()
            .for_each(|hostile| hostile.join().unwrap());
        counts
    });
    let (answered, refused) = (counts.answered.into_inner(), counts.refused.into_inner());
    let gone = counts.gone.map(AtomicUsize::into_inner);
    let mut times = counts.times.into_inner().unwrap();
    times.sort_unstable();
    let percentile = |p: usize| times.get(times.len() * p / 100);
    println!("{answered} answered, {refused} refused, went away by phase: {gone:?}");
    println!(
        "times of answers: half within {:?}, 99 % within {:?}",
        percentile(50),
        percentile(99)
    );
    let n = if is_long() { 1000 } else { 1 };
    assert!(answered >= n && refused >= n && gone.iter().all(|&gone| gone >= n));
    holds_nothing(&server);
    #[cfg(target_os = "linux")]
    // What allocators keep of 64 clients' bodies and answers.
    is_as_before(&server, before, 48);

    if is_long() {
        // At four times the load as much is answered as when the server is just full.
        let (full, four_times) = goodputs(&server, &known, 4, Duration::from_secs(15));
        assert!(four_times >= 0.95 * full, "{four_times} of {full} tokens/s");
    }
    server.is_idle_soon();
}

/// No request runs or waits, and none holds pages.
pub(super) fn holds_nothing(server: &Server) {
    server.is_idle_soon();
    let idle: Value = serde_json::from_str(&server.get("/slots").1).unwrap();
    assert!(
        idle.as_array()
            .unwrap()
            .iter()
            .all(|slot| slot["is_processing"] == false),
        "{idle}"
    );
    let [all, cached] =
        ["ruvllm:kv_cache_bytes", "ruvllm:prefix_cache_bytes"].map(|name| server.metric(name));
    assert_eq!(all, cached, "pages that nobody holds");
}

/// Descriptors and threads are those of `before`, and resident memory is at most `mib` more.
#[cfg(target_os = "linux")]
pub(super) fn is_as_before(server: &Server, before: (usize, usize, usize), mib: usize) {
    let after = settled(server, (before.0, before.1, before.2 + (mib << 10)));
    println!("descriptors, threads, resident KiB: {before:?}, then {after:?}");
    assert!(
        after.0 <= before.0 && after.1 <= before.1,
        "descriptors, threads: {before:?}, then {after:?}"
    );
    assert!(
        after.2 <= before.2 + (mib << 10),
        "resident KiB: {before:?}, then {after:?}"
    );
}

/// Ten thousand sequences wait (outside `.ci/long` a tenth): those of clients that go away are
/// forgotten at once, all others have their own text, and then nothing is left.
#[test]
fn a_long_queue() {
    const N: usize = 64;
    let n_clients = if is_long() { 160 } else { 16 };
    let places = (n_clients * N).to_string();
    let server = Server::start(&[
        "-c",
        "128",
        "-np",
        "8",
        "--max-requests",
        &places,
        "--temp",
        "0",
    ]);
    let ask = |i: usize| {
        let canary = format!("canary-{:016x}", Rng(i as u64).below(usize::MAX));
        let body =
            json!({"prompt": "The word is", "grammar": format!("root ::= \"{canary}\""), "n": N});
        (
            post(&server, "/v1/completions", &body).expect("the server takes requests"),
            canary,
        )
    };
    let check = |(stream, canary): (TcpStream, String)| {
        let (status, body) = read_whole(stream);
        assert_eq!(status, 200, "{body}");
        let choices = body["choices"].as_array().unwrap();
        assert!(
            choices.len() == N && choices.iter().all(|choice| choice["text"] == *canary),
            "not {canary}: {body}"
        );
    };
    let n_left = || {
        server.metric("llamacpp:requests_processing") + server.metric("llamacpp:requests_deferred")
    };
    let round = || {
        let begun = Instant::now();
        let mut asked: Vec<_> = (0..n_clients).map(ask).collect();
        let mut most = 0.0f64;
        while most < 0.8 * (n_clients * N) as f64 {
            most = most.max(n_left());
            assert!(
                begun.elapsed() < Duration::from_secs(120),
                "only {most} wait"
            );
        }
        #[cfg(target_os = "linux")]
        println!(
            "{most} run or wait after {:?}; {:?}",
            begun.elapsed(),
            holdings(&server)
        );
        // Every second one goes away.
        asked = asked.into_iter().step_by(2).collect();
        let gone = Instant::now();
        while n_left() > (asked.len() * N) as f64 {
            assert!(
                gone.elapsed() < Duration::from_secs(10),
                "those of clients that went away still wait"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        println!(
            "{} run or wait {:?} after half of the clients went away",
            n_left(),
            gone.elapsed()
        );
        asked.into_iter().for_each(check);
        println!("all answered after {:?}", begun.elapsed());
        holds_nothing(&server);
    };
    // The allocator keeps what so many took at once: that is the baseline.
    round();
    #[cfg(target_os = "linux")]
    let before = baseline(&server);
    round();
    #[cfg(target_os = "linux")]
    // Of the 10 KiB that each sequence took while it waited, less than 8 are left.
    is_as_before(&server, before, (n_clients * N * 8) >> 10);
}

/// Holdings once idle threads have ended and closed connections are noticed, which takes a while.
#[cfg(target_os = "linux")]
pub(super) fn baseline(server: &Server) -> (usize, usize, usize) {
    std::thread::sleep(Duration::from_secs(4));
    holdings(server)
}

/// Holdings once none is more than `expected`, or the time for that is over.
#[cfg(target_os = "linux")]
fn settled(server: &Server, expected: (usize, usize, usize)) -> (usize, usize, usize) {
    let begun = Instant::now();
    loop {
        let now = holdings(server);
        let is_settled = now.0 <= expected.0 && now.1 <= expected.1 && now.2 <= expected.2;
        if is_settled || begun.elapsed() > Duration::from_secs(60) {
            return now;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
