//! Many requests on one engine: every answer is that of a session alone, and every request ends.

use crate::common::long;
use crate::run::{self, level, open};
use crate::speculate::{Oracle, Scatter, WINDOWED};
use ruvllm::KvType;
use ruvllm::decode::{ModelDrafter, Speculation};
use ruvllm::engine::{CacheMode, EngineOptions};
use ruvllm::gguf::Gguf;
use ruvllm::kv::KvError;
use ruvllm::kv::KvTiers;
use ruvllm::lora::AdapterError;
use ruvllm::lora::{Adapter, AdapterRegistry};
use ruvllm::sample::SampleError;
use ruvllm::scheduler::ScheduleError;
use ruvllm::scheduler::{
    Observer, Request, RequestId, Schedule, ScheduleOptions, Scheduler, Stream,
};
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Finish, TokenText};
use ruvllm::{Model, Sampler, SamplerOptions, SessionError, StopReason};
use std::num::NonZeroUsize;
use std::sync::{Arc, LazyLock, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

pub(crate) static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/ruvllm-rust-6m-q8_0.gguf"
    );
    open(Gguf::open(path).unwrap()).unwrap()
});

const TEXTS: [&str; 5] = [
    "Ownership is",
    "A slice is a reference to a contiguous sequence of elements in a collection rather than the whole collection. A \
     slice is a kind of reference, so it does not have ownership. Here is a small programming problem: write a function",
    "The",
    "fn main() {\n    let mut x = 5;\n    println!(\"The value of x is: {x}\");\n    x = 6;\n",
    "Closures can capture values from their environment in three ways, which directly map to",
];

pub(crate) fn tokens(text: &str) -> Vec<u32> {
    MODEL.tokenizer().unwrap().encode_prompt(text)
}

pub(crate) fn engine(n_threads: usize, kv_budget: Option<u64>) -> Engine {
    let n_threads = NonZeroUsize::new(n_threads);
    Engine::new(
        &MODEL,
        &EngineOptions {
            n_threads,
            kv_budget,
            ..Default::default()
        },
    )
    .unwrap()
}

/// Bytes of the pages of so many positions of one sequence.
pub(crate) fn page_bytes(n: usize) -> u64 {
    let engine = engine(1, None);
    let mut session = engine.session().unwrap();
    session.prefill(&vec![1; n]).unwrap();
    engine.pool().stats().used
}

pub(crate) fn greedy() -> Sampler {
    Sampler::new(SamplerOptions {
        temperature: 0.0,
        ..Default::default()
    })
    .unwrap()
}

pub(crate) fn sampled(seed: u64) -> Sampler {
    Sampler::new(SamplerOptions {
        temperature: 0.9,
        seed: Some(seed),
        repeat_penalty: 1.1,
        ..Default::default()
    })
    .unwrap()
}

pub(crate) fn session_options(n_ctx: usize, n_batch: usize) -> SessionOptions {
    SessionOptions {
        n_ctx: Some(n_ctx),
        n_batch,
        ..Default::default()
    }
}

/// A request in pieces, to be given to a session and to a schedule.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampler: Sampler,
    pub(crate) max_tokens: usize,
    pub(crate) stop: Vec<String>,
    pub(crate) logprobs: Option<usize>,
    pub(crate) adapter: Option<Arc<Adapter>>,
}

pub(crate) type Answer = (Vec<TokenText>, StopReason, usize);

impl Case {
    /// Number `i` of many that differ in all there is.
    pub(crate) fn numbered(i: usize) -> Case {
        let mut prompt = tokens(&TEXTS[i % TEXTS.len()].repeat(1 + i % 3));
        let n = prompt.len();
        prompt.rotate_left(i / 32 % n);
        Case {
            prompt,
            sampler: if i.is_multiple_of(3) {
                greedy()
            } else {
                sampled(i as u64)
            },
            max_tokens: [40, 1, 90, 17, 0, 64][i % 6],
            stop: if i % 4 == 1 {
                vec!["the ".into(), ".\n".into()]
            } else {
                vec![]
            },
            logprobs: (i % 5 == 2).then_some(2),
            adapter: (i % 7 == 3).then(|| Arc::clone(&ADAPTER)),
        }
    }

    pub(crate) fn request(&self) -> Request {
        let mut request = Request::new(self.prompt.clone(), self.sampler.clone())
            .max_tokens(self.max_tokens)
            .stop(self.stop.clone());
        if let Some(n_top) = self.logprobs {
            request = request.logprobs(n_top);
        }
        match &self.adapter {
            Some(adapter) => request.adapter(Arc::clone(adapter), 1.0),
            None => request,
        }
    }

    /// What a session alone answers, computed token by token with another number of threads.
    pub(crate) fn alone(&self, options: &SessionOptions) -> Answer {
        let mut session = engine(1, None).session_with(options).unwrap();
        if let Some(adapter) = &self.adapter {
            session.adapters().attach(Arc::clone(adapter), 1.0).unwrap();
        }
        let mut sampler = self.sampler.clone();
        let mut generation = session.generate(&self.prompt, &mut sampler).unwrap();
        generation = generation
            .max_tokens(self.max_tokens)
            .stop(self.stop.clone());
        if let Some(n_top) = self.logprobs {
            // The first token was sampled already, so that a session tells nothing of it: ask
            // again.
            drop(generation);
            session.clear();
            sampler = self.sampler.clone();
            let mut owned = session
                .into_generation(&self.prompt, sampler)
                .max_tokens(self.max_tokens)
                .stop(self.stop.clone())
                .logprobs(n_top);
            let pieces = owned.by_ref().map(Result::unwrap).collect();
            return (pieces, owned.finish().unwrap().reason, owned.tokens().len());
        }
        let pieces = generation.by_ref().map(Result::unwrap).collect();
        (
            pieces,
            generation.finish().unwrap().reason,
            generation.tokens().len(),
        )
    }
}

/// One that changes every matrix a little.
static ADAPTER: LazyLock<Arc<Adapter>> = LazyLock::new(|| {
    let mut adapter = Adapter::zeros(&MODEL, 2, 1, |_| true).unwrap();
    adapter.terms_mut().for_each(|(i, term)| {
        let (a, b) = term.parts_mut();
        a.iter_mut()
            .chain(b)
            .enumerate()
            .for_each(|(j, x)| *x = ((i + j) % 7) as f32 * 0.01 - 0.03);
    });
    Arc::new(adapter)
});

/// All that comes, without waiting.
fn drain(
    stream: &mut Stream,
    pieces: &mut Vec<TokenText>,
) -> Option<Result<Finish, ScheduleError>> {
    loop {
        match stream.poll_next(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => return None,
            Poll::Ready(None) => return Some(Ok(stream.finish().expect("an end"))),
            Poll::Ready(Some(Ok(piece))) => pieces.push(piece),
            Poll::Ready(Some(Err(error))) => return Some(Err(error)),
        }
    }
}

pub(crate) fn steps(schedule: &mut Schedule, n: usize) {
    for _ in 0..n {
        schedule.step();
    }
}

pub(crate) fn answer(stream: &mut Stream) -> Answer {
    let mut pieces = Vec::new();
    let finish = drain(stream, &mut pieces)
        .expect("the stream has ended")
        .unwrap();
    (pieces, finish.reason, finish.n_generated)
}

/// What an [`Observer`] heard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Event {
    Queued,
    Admitted,
    FirstToken,
    Preempted,
    Ended(Option<StopReason>),
}

#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<(RequestId, Event)>>>);

impl Log {
    fn push(&self, id: RequestId, event: Event) {
        self.0.lock().unwrap().push((id, event));
    }

    fn of(&self, id: RequestId) -> Vec<Event> {
        self.0
            .lock()
            .unwrap()
            .iter()
            .filter(|(i, _)| *i == id)
            .map(|(_, event)| *event)
            .collect()
    }

    pub(crate) fn count(&self, event: Event) -> usize {
        self.0
            .lock()
            .unwrap()
            .iter()
            .filter(|(_, e)| *e == event)
            .count()
    }

    /// Requests in the order in which they ended.
    fn ends(&self) -> Vec<RequestId> {
        let log = self.0.lock().unwrap();
        log.iter()
            .filter(|(_, event)| matches!(event, Event::Ended(_)))
            .map(|(id, _)| *id)
            .collect()
    }
}

impl Observer for Log {
    fn queued(&self, id: RequestId, n_prompt: usize) {
        assert!(n_prompt > 0);
        self.push(id, Event::Queued);
    }
    fn admitted(&self, id: RequestId) {
        self.push(id, Event::Admitted);
    }
    fn first_token(&self, id: RequestId) {
        self.push(id, Event::FirstToken);
    }
    fn preempted(&self, id: RequestId) {
        self.push(id, Event::Preempted);
    }
    fn ended(&self, id: RequestId, outcome: Result<&Finish, &ScheduleError>) {
        self.push(id, Event::Ended(outcome.ok().map(|finish| finish.reason)));
    }
}

/// Answers of sessions alone, of the requests numbered from 0 on.
fn answers_alone(n: usize, options: &SessionOptions) -> Vec<Answer> {
    (0..n).map(|i| Case::numbered(i).alone(options)).collect()
}

#[track_caller]
pub(crate) fn all_are(expected: &[Answer], streams: &mut [Stream], what: &str) {
    for (i, (stream, expected)) in streams.iter_mut().zip(expected).enumerate() {
        assert_eq!(answer(stream), *expected, "request {i}, {what}");
    }
}

/// llama.cpp #22756: a request got the keys and values of another's sequence.
#[test]
fn answers_are_those_of_sessions_alone() {
    let n = 32;
    // The last is exact, and its contexts are full soon.
    let tiers = SessionOptions {
        kv_tiers: Some(KvTiers {
            recent: 64,
            middle: 128,
        }),
        ..session_options(600, 512)
    };
    let exact = SessionOptions {
        exact: true,
        ..session_options(150, 64)
    };
    for (session, sizes) in [
        (session_options(600, 512), &[1, 2, 3, 8, 16][..]),
        (session_options(600, 7), &[5]),
        (tiers, &[16]),
        (exact, &[7]),
    ] {
        let fits = |i: &usize| Case::numbered(*i).prompt.len() <= session.n_ctx.unwrap();
        let cases: Vec<Case> = (0..n).filter(fits).map(Case::numbered).collect();
        let expected: Vec<Answer> = cases.iter().map(|case| case.alone(&session)).collect();
        for &n_parallel in sizes {
            let engine = engine(2, None);
            let options = ScheduleOptions {
                session: session.clone(),
                n_parallel,
                n_pieces: 1000,
                // Chunks of all sizes, whatever the machine's pace.
                max_itl: (n_parallel % 2 == 0).then_some(Duration::from_millis(2)),
                ..Default::default()
            };
            let mut schedule = Schedule::new(&engine, &options).unwrap();
            let mut streams: Vec<Stream> = Vec::new();
            for (i, case) in cases.iter().enumerate() {
                streams.push(schedule.submit(case.request()).unwrap());
                // Some come while others run.
                steps(&mut schedule, i % 5);
            }
            while schedule.step() {
                assert!(schedule.n_running() <= n_parallel);
            }
            assert!(schedule.is_empty());
            all_are(
                &expected,
                &mut streams,
                &format!("{n_parallel} side by side, {session:?}"),
            );
            assert_eq!(engine.pool().stats().n_pages, 0);
        }
    }
}

/// On a pool that is far too small requests lose their pages again and again, and answer the same.
#[test]
fn who_was_preempted_answers_the_same() {
    let n = 24;
    let expected = answers_alone(n, &session_options(600, 512));
    let longest = (0..n)
        .map(|i| Case::numbered(i).prompt.len() + 90)
        .max()
        .unwrap();
    let pooling = |n_batch| SessionOptions {
        pooled_layer: Some(1),
        ..session_options(600, n_batch)
    };
    let mut pooled = Vec::new();
    for i in 0..n {
        let options = ScheduleOptions {
            session: pooling(512),
            n_pieces: 1000,
            ..Default::default()
        };
        let mut schedule = Schedule::new(&engine(2, None), &options).unwrap();
        let mut stream = schedule.submit(Case::numbered(i).request()).unwrap();
        while schedule.step() {}
        answer(&mut stream);
        pooled.push(stream.take_pooled());
    }
    let cases = [
        (1, 512, CacheMode::Off),
        (1, 9, CacheMode::Off),
        (2, 64, CacheMode::Off),
        (2, 32, CacheMode::On),
    ];
    for (n_longest, n_batch, cache) in cases {
        let budget = n_longest * page_bytes(longest);
        let (engine, log) = (engine(2, Some(budget)), Log::default());
        let session = SessionOptions {
            prefix: cache.into(),
            ..pooling(n_batch)
        };
        let options = ScheduleOptions {
            session,
            n_pieces: 1000,
            ..Default::default()
        };
        let mut schedule = Schedule::observed(&engine, &options, log.clone()).unwrap();
        let mut streams = Vec::new();
        for i in 0..n {
            // Priorities, so that pages are taken from those that run.
            streams.push(
                schedule
                    .submit(Case::numbered(i).request().priority((i % 4) as i32))
                    .unwrap(),
            );
            steps(&mut schedule, 3);
        }
        while schedule.step() {}
        all_are(
            &expected,
            &mut streams,
            &format!("pool of {budget} bytes, {cache:?}"),
        );
        // What came from the prefix cache was not pooled.
        for (i, (stream, pooled)) in streams
            .iter_mut()
            .zip(&pooled)
            .enumerate()
            .filter(|_| cache == CacheMode::Off)
        {
            assert_eq!(
                stream.take_pooled(),
                *pooled,
                "request {i}, pool of {budget} bytes"
            );
        }
        let hits = engine.pool().prefixes().hits;
        assert_eq!(hits > 0, cache == CacheMode::On, "{hits}");
        engine.pool().clear_prefixes();
        assert_eq!(engine.pool().stats().n_pages, 0);
        assert!(
            log.count(Event::Preempted) > n / 6,
            "{} of {n}",
            log.count(Event::Preempted)
        );
    }
}

/// The logarithm of the softmax of `logits` at `token`.
fn log_probability(logits: &[f32], token: u32) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - max).exp()).sum();
    f64::from(logits[token as usize]) - max - sum.ln()
}

/// Prompts whose tokens' log-probabilities are wanted get those of a session that computes all
/// rows, beside others, in a pool too small for all, with and without the prefix cache; and go on
/// as without.
#[test]
fn log_probabilities_of_prompts() {
    let prompts: Vec<Vec<u32>> = (0..8)
        .map(|i| tokens(&TEXTS[i % 5].repeat(2 + i)))
        .collect();
    let longest = prompts.iter().map(Vec::len).max().unwrap();
    let n_new = 12;
    let of_prompt = |prompt: &[u32]| {
        let mut session = engine(1, None)
            .session_with(&session_options(1024, 64))
            .unwrap();
        let mut all = Vec::new();
        session
            .hooks()
            .prefill_each(prompt, 0, |i, logits| {
                all.extend(prompt.get(i + 1).map(|&next| log_probability(logits, next)));
            })
            .unwrap();
        all
    };
    let expected: Vec<Vec<f64>> = prompts.iter().map(|prompt| of_prompt(prompt)).collect();
    for (budget, cache) in [
        (None, CacheMode::Off),
        (None, CacheMode::On),
        (Some(page_bytes(longest + n_new)), CacheMode::Off),
        (Some(2 * page_bytes(longest + n_new)), CacheMode::On),
    ] {
        let (engine, log) = (engine(2, budget), Log::default());
        let options = ScheduleOptions {
            session: SessionOptions {
                prefix: cache.into(),
                ..session_options(1024, 64)
            },
            n_pieces: 4096,
            ..Default::default()
        };
        let mut schedule = Schedule::observed(&engine, &options, log.clone()).unwrap();
        let mut streams = Vec::new();
        for (i, prompt) in prompts.iter().enumerate() {
            let request = Request::new(prompt.clone(), greedy())
                .max_tokens(n_new)
                .priority((i % 4) as i32);
            let told = request.clone().logprobs(2).prompt_logprobs();
            streams.push((
                schedule.submit(told).unwrap(),
                schedule.submit(request).unwrap(),
            ));
            steps(&mut schedule, 2);
        }
        while schedule.step() {}
        for (i, (told, plain)) in streams.into_iter().enumerate() {
            let (prompt, expected) = (&prompts[i], &expected[i]);
            let mut pieces: Vec<TokenText> = told.map(Result::unwrap).collect();
            let new = pieces.split_off(prompt.len());
            let ids: Vec<u32> = pieces.iter().map(|piece| piece.token).collect();
            assert_eq!(&ids, prompt, "request {i}, {budget:?}");
            assert_eq!((pieces[0].logprob, pieces[0].top_logprobs.len()), (None, 0));
            for (piece, expected) in pieces[1..].iter().zip(expected) {
                let found = f64::from(piece.logprob.unwrap());
                assert!(
                    (found - expected).abs() < 1e-4,
                    "request {i}: {found}, {expected}"
                );
                assert!(piece.text.is_empty() && piece.top_logprobs.len() == 2);
            }
            let plain: Vec<u32> = plain.map(|piece| piece.unwrap().token).collect();
            let new: Vec<u32> = new.iter().map(|piece| piece.token).collect();
            assert_eq!(new, plain, "request {i}, {budget:?}");
        }
        assert!(
            budget.is_none() || log.count(Event::Preempted) > 0,
            "{budget:?}"
        );
    }
}

/// Drafts, right ones and wrong ones, change no answer, side by side, preempted, ended inside a run
/// of accepted ones; and they leave nothing in the prefix cache.
#[test]
fn drafts_change_no_answer() {
    let (n, n_parallel): (_, &[usize]) = if long() {
        (1000, &[1, 2, 4, 8, 16, 32, 64])
    } else {
        (32, &[16])
    };
    let expected = answers_alone(n, &session_options(600, 512));
    let longest = (0..n)
        .map(|i| Case::numbered(i).prompt.len() + 90)
        .max()
        .unwrap();
    let budget = Some(page_bytes(longest) + ADAPTER.bytes());
    let speculation = |i: usize| {
        let text = || {
            [
                Case::numbered(i).prompt,
                expected[i].0.iter().map(|piece| piece.token).collect(),
            ]
            .concat()
        };
        // All of them with all limits.
        match (i + i / 6) % 6 {
            0 => Speculation::default(),
            1 => Speculation::default().fixed_length(1 + i % 15),
            2 => Speculation::by(Scatter(i as u64)).fixed_length(15),
            3 => Speculation::by(Oracle::new(text(), 1000)).fixed_length(4),
            4 => Speculation::by(Oracle::new(text(), 100)).fixed_length(15),
            _ => Speculation::by(Oracle::new(text(), 50)).and(Scatter(2)),
        }
    };
    let of_sizes = n_parallel
        .iter()
        .map(|&n_parallel| (None, 512, CacheMode::Off, n_parallel));
    for (kv_budget, n_batch, cache, n_parallel) in of_sizes.chain([
        (None, 512, CacheMode::On, 16),
        (budget, 512, CacheMode::Off, 16),
        (budget, 9, CacheMode::Off, 16),
        (budget.map(|budget| 2 * budget), 32, CacheMode::On, 16),
    ]) {
        for drafts in [false, true] {
            let (engine, log) = (engine(2, kv_budget), Log::default());
            let session = SessionOptions {
                prefix: cache.into(),
                ..session_options(600, n_batch)
            };
            // Prompts are read as fast as they come, or whether there is time to draft would depend
            // on the machine.
            let max_itl = Some(Duration::from_secs(3600));
            let options = ScheduleOptions {
                session,
                n_parallel,
                n_pieces: 1000,
                max_itl,
                ..Default::default()
            };
            let mut schedule = Schedule::observed(&engine, &options, log.clone()).unwrap();
            let mut streams = Vec::new();
            for i in 0..n {
                let request = Case::numbered(i).request().priority((i % 4) as i32);
                let request = if drafts {
                    request.speculate(speculation(i))
                } else {
                    request
                };
                streams.push(schedule.submit(request).unwrap());
                // Where many are to run at once, they come at once; and as long as prompts come,
                // nobody drafts.
                steps(&mut schedule, if n_parallel > 16 { 0 } else { 3 });
                while i % 64 == 63 && schedule.step() {}
            }
            while schedule.step() {}
            all_are(
                &expected,
                &mut streams,
                &format!("{kv_budget:?} {cache:?} {n_parallel} {drafts}"),
            );
            let stats: Vec<_> = streams
                .iter()
                .map(|stream| stream.finish().unwrap().drafts)
                .collect();
            let n_accepted: usize = stats.iter().map(|stats| stats.n_accepted).sum();
            let n_drafted: usize = stats.iter().map(|stats| stats.n_drafted).sum();
            assert_eq!(
                drafts,
                n_accepted > n && n_drafted > n_accepted + n,
                "{n_accepted} of {n_drafted}"
            );
            assert!(kv_budget.is_none() || log.count(Event::Preempted) > n / 8);
            engine.pool().clear_prefixes();
            assert_eq!(engine.pool().stats().n_pages, 0);
        }
    }
    // Each alone, so that who ends first does not count: what it leaves to others.
    for i in 0..n.min(100) {
        let left = |request: Request| {
            let engine = engine(1, None);
            let session = SessionOptions {
                prefix: CacheMode::On.into(),
                ..session_options(600, 512)
            };
            let mut schedule = Schedule::new(
                &engine,
                &ScheduleOptions {
                    session,
                    ..Default::default()
                },
            )
            .unwrap();
            let mut stream = schedule.submit(request).unwrap();
            while !schedule.is_empty() {
                schedule.step();
                drain(&mut stream, &mut Vec::new());
            }
            engine.pool().prefixes()
        };
        let plain = Case::numbered(i).request();
        assert_eq!(
            left(plain.clone().speculate(speculation(i))),
            left(plain),
            "request {i}"
        );
    }
}

/// A model drafts for several requests in one pass, whatever the length of their prompts and
/// drafts: its engine has measured passes over a row of each. A text that its context does not hold
/// gets no drafts, and the others theirs.
#[test]
fn a_model_drafts_for_all_at_once() {
    let n = 6;
    let case = |i: usize| Case {
        max_tokens: 60,
        ..Case::numbered(i)
    };
    let expected: Vec<Answer> = (0..n)
        .map(|i| case(i).alone(&session_options(600, 512)))
        .collect();
    for (n_ctx, n_batch) in [(600, 512), (80, 7)] {
        let of_drafts = run::engine(&WINDOWED, 1);
        let drafter =
            ModelDrafter::new(&of_drafts, &MODEL, &session_options(n_ctx, n_batch)).unwrap();
        let options = ScheduleOptions {
            session: session_options(600, 512),
            n_pieces: 1000,
            ..Default::default()
        };
        let mut schedule = Schedule::new(&engine(1, None), &options).unwrap();
        let speculation = |i: usize| match i % 3 {
            2 => Speculation::default().and(drafter.clone()),
            _ => Speculation::by(drafter.clone()).fixed_length(3 + i),
        };
        let mut streams: Vec<Stream> = (0..n)
            .map(|i| {
                schedule
                    .submit(case(i).request().speculate(speculation(i)))
                    .unwrap()
            })
            .collect();
        while schedule.step() {}
        all_are(&expected, &mut streams, &format!("{n_ctx} {n_batch}"));
        let n_accepted: usize = streams
            .iter()
            .map(|stream| stream.finish().unwrap().drafts.n_accepted)
            .sum();
        let most = of_drafts
            .row_times()
            .iter()
            .map(|(n, _)| *n)
            .max()
            .unwrap_or(0);
        assert!(
            n_accepted > 4 * n && most >= 4,
            "{n_accepted} accepted, {most} rows in a pass"
        );
    }
}

/// Who is cancelled while drafts are computed is gone within a pass, and what others write stays.
#[test]
fn drafting_requests_can_be_cancelled() {
    let engine = engine(1, None);
    let options = ScheduleOptions {
        session: session_options(600, 512),
        ..Default::default()
    };
    let mut schedule = Schedule::new(&engine, &options).unwrap();
    let case = Case {
        stop: vec![],
        logprobs: None,
        adapter: None,
        ..Case::numbered(2)
    };
    let request = || {
        case.request()
            .speculate(Speculation::default().fixed_length(7))
    };
    let (first, mut other) = (
        schedule.submit(request()).unwrap(),
        schedule.submit(request()).unwrap(),
    );
    steps(&mut schedule, 5);
    first.cancel();
    schedule.step();
    assert_eq!(schedule.n_running(), 1);
    while schedule.step() {
        other
            .poll_next(&mut Context::from_waker(Waker::noop()))
            .is_pending();
    }
    assert!(schedule.is_empty() && engine.pool().stats().n_pages == 0);
}

/// Windows give pages back: a prompt longer than the pool is read in chunks for which there is
/// room, alone and beside others, with drafts and without.
#[test]
fn prompts_longer_than_the_pool_of_a_windowed_model() {
    let options = session_options(2000, 512);
    let n_page = {
        let mut session = crate::run::session_on(&WINDOWED, 1, &options);
        session.prefill(&[1]).unwrap();
        session.engine().pool().stats().used
    };
    let prompts = [
        tokens(&TEXTS[1].repeat(20)),
        tokens(TEXTS[3]),
        tokens(&TEXTS[4].repeat(15)),
    ];
    assert!(prompts[0].len() > 64 * 8);
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .enumerate()
        .map(|(i, prompt)| {
            let session = crate::run::session_on(&WINDOWED, 1, &options);
            let mut generation = session
                .into_generation(prompt, sampled(i as u64))
                .max_tokens(70);
            generation.by_ref().for_each(|piece| drop(piece.unwrap()));
            generation.tokens().to_vec()
        })
        .collect();
    for n_pages in [4, 8] {
        for drafts in [false, true] {
            let budget = Some(n_pages * n_page);
            let engine = Engine::new(
                &WINDOWED,
                &EngineOptions {
                    kv_budget: budget,
                    ..Default::default()
                },
            )
            .unwrap();
            let options = ScheduleOptions {
                session: options.clone(),
                n_pieces: 1000,
                ..Default::default()
            };
            let mut schedule = Schedule::new(&engine, &options).unwrap();
            let mut streams = Vec::new();
            for (i, prompt) in prompts.iter().enumerate() {
                let mut request = Request::new(prompt.clone(), sampled(i as u64)).max_tokens(70);
                if drafts {
                    let text = [&prompt[..], &alone[i]].concat();
                    request =
                        request.speculate(Speculation::by(Oracle::new(text, 300)).fixed_length(7));
                }
                streams.push(schedule.submit(request).unwrap());
            }
            while schedule.step() {}
            for (i, stream) in streams.into_iter().enumerate() {
                let tokens: Vec<u32> = stream.map(|piece| piece.unwrap().token).collect();
                assert_eq!(tokens, alone[i], "{i}, {n_pages} pages, {drafts}");
            }
        }
    }
    let engine = Engine::new(
        &WINDOWED,
        &EngineOptions {
            kv_budget: Some(n_page),
            ..Default::default()
        },
    )
    .unwrap();
    let mut schedule = Schedule::new(
        &engine,
        &ScheduleOptions {
            session: options,
            ..Default::default()
        },
    )
    .unwrap();
    let refused = schedule
        .submit(Request::new(prompts[0].clone(), greedy()))
        .unwrap_err();
    assert!(
        matches!(refused, ScheduleError::PoolTooSmall { need, .. } if need <= 3 * n_page),
        "{refused}"
    );
}

/// A registry's adapters leave memory and change their files while requests run: each is computed
/// with what it began with.
#[test]
fn adapters_change_while_requests_run() {
    let folder = std::env::temp_dir().join(format!("ruvllm-registry-test-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str, salt: usize| {
        let mut adapter = Adapter::zeros(&MODEL, 2, 1, |site| site.part() == "ffn_down").unwrap();
        for (_, term) in adapter.terms_mut() {
            let b = term.parts_mut().1;
            b.iter_mut()
                .enumerate()
                .for_each(|(i, b)| *b = ((i * i + 7 * salt * i) % 31) as f32 * 0.02 - 0.3);
        }
        let path = folder.join(name);
        adapter.save(&path).unwrap();
        (path, adapter)
    };
    let files = [file("a.gguf", 1), file("b.gguf", 2), file("c.gguf", 3)];
    let one = files[0].1.bytes();
    let registry = AdapterRegistry::new(&MODEL, 2 * one);
    files
        .iter()
        .enumerate()
        .for_each(|(i, (path, _))| registry.set(format!("{i}"), path));
    let options = session_options(300, 128);
    let alone = |adapter: &Arc<Adapter>| {
        let mut session = engine(1, None).session_with(&options).unwrap();
        session.adapters().attach(Arc::clone(adapter), 1.0).unwrap();
        let mut generation = session
            .into_generation(&tokens(TEXTS[0]), greedy())
            .max_tokens(40);
        generation.by_ref().for_each(|piece| drop(piece.unwrap()));
        generation.tokens().to_vec()
    };
    let expected = files
        .each_ref()
        .map(|(_, adapter)| alone(&Arc::new(adapter.clone())));
    assert!(expected[0] != expected[1] && expected[1] != expected[2]);

    let mut schedule = Schedule::new(
        &engine(1, None),
        &ScheduleOptions {
            session: options.clone(),
            ..Default::default()
        },
    )
    .unwrap();
    let ask = |schedule: &mut Schedule, name: &str| {
        let request = Request::new(tokens(TEXTS[0]), greedy()).max_tokens(40);
        schedule
            .submit(request.adapter(registry.get(name).unwrap(), 1.0))
            .unwrap()
    };
    let mut streams = Vec::new();
    for i in 0..3 {
        streams.push((i, ask(&mut schedule, &i.to_string())));
        assert!(registry.bytes() <= 2 * one);
        steps(&mut schedule, 5);
    }
    // The name of one that runs gets another file, and one that runs is forgotten.
    registry.set("0", &files[2].0);
    assert!(registry.remove("1") && !registry.remove("1"));
    streams.push((2, ask(&mut schedule, "0")));
    while schedule.step() {}
    for (i, stream) in streams {
        let tokens: Vec<u32> = stream.map(|piece| piece.unwrap().token).collect();
        assert_eq!(tokens, expected[i], "{i}");
    }

    // The least recently used goes; who is there is not read again.
    registry.set("1", &files[1].0);
    let first = registry.get("0").unwrap();
    registry.get("1").unwrap();
    assert!(Arc::ptr_eq(&first, &registry.get("0").unwrap()));
    registry.get("2").unwrap();
    assert!(Arc::ptr_eq(&first, &registry.get("0").unwrap()) && registry.bytes() == 2 * one);
    std::fs::remove_file(&files[1].0).unwrap();
    assert!(
        matches!(registry.get("1"), Err(AdapterError::Gguf(_))),
        "it had to go, and its file is gone"
    );
    assert!(matches!(registry.get("4"), Err(AdapterError::UnknownName { name }) if name == "4"));
    let small = AdapterRegistry::new(&MODEL, one - 1);
    small.set("0", &files[0].0);
    assert!(matches!(small.get("0"), Err(AdapterError::OverBudget { bytes, .. }) if bytes == one));
    assert_eq!(small.bytes(), 0);
    std::fs::remove_dir_all(folder).unwrap();
}

/// Cached prompts are found by who has the same salt.
#[test]
fn tenants_do_not_see_each_other() {
    let session = SessionOptions {
        prefix: CacheMode::On.into(),
        ..session_options(600, 512)
    };
    let options = ScheduleOptions {
        session,
        ..Default::default()
    };
    let mut schedule = Schedule::new(&engine(1, None), &options).unwrap();
    let mut cached = |salt: &str| {
        let request = Request::new(
            tokens("What one tenant asks is no other's business"),
            greedy(),
        )
        .max_tokens(4);
        let mut stream = schedule.submit(request.salt(salt)).unwrap();
        while schedule.step() {}
        stream.by_ref().for_each(|piece| drop(piece.unwrap()));
        stream.finish().unwrap().n_cached.total()
    };
    assert_eq!((cached("one"), cached("other"), cached("")), (0, 0, 0));
    assert!(cached("one") > 0 && cached("") > 0);
}

/// One row for each that decodes, and between them a piece of a layer of some rows of a prompt:
/// nobody waits for a whole prompt.
#[test]
fn prompts_do_not_stop_who_decodes() {
    let engine = engine(1, None);
    let options = ScheduleOptions {
        session: session_options(1000, 512),
        // No time at all: the least rows, a piece of a layer at a time.
        max_itl: Some(Duration::ZERO),
        ..Default::default()
    };
    let mut schedule = Schedule::new(&engine, &options).unwrap();
    let mut decoding = schedule
        .submit(Request::new(tokens("The"), greedy()))
        .unwrap();
    let mut pieces = Vec::new();
    (0..10).for_each(|_| assert!(schedule.step()));
    assert!(drain(&mut decoding, &mut pieces).is_none());
    let prompt = tokens(&TEXTS[1].repeat(2));
    // Five parts of each layer, or more pieces of them, but of the last, which is one.
    let n_least = prompt.len().div_ceil(64) * (5 * (MODEL.hparams().n_layer - 1) + 1);
    let mut long = schedule
        .submit(Request::new(prompt, greedy()).max_tokens(1))
        .unwrap();
    pieces.clear();
    let (mut n_passes, mut ended) = (0, None);
    while ended.is_none() {
        schedule.step();
        n_passes += 1;
        ended = drain(&mut long, &mut Vec::new());
        assert!(drain(&mut decoding, &mut pieces).is_none());
    }
    assert!(n_passes >= n_least, "{n_passes} passes, at least {n_least}");
    assert!(
        pieces.len() + 3 >= n_passes - 1,
        "{} pieces in {n_passes} passes",
        pieces.len()
    );
    assert!(matches!(ended, Some(Ok(finish)) if finish.reason == StopReason::MaxTokens));
}

/// In models of every architecture prompts that are computed in pieces, two at once, end as
/// sessions alone do; and if one of them goes away in the middle, the other begins anew.
#[test]
fn prompts_are_computed_in_pieces() {
    let mut n = 0;
    for shapes in crate::mutants::models() {
        let bare = open(shapes.parts().gguf()).unwrap();
        let h = bare.hparams();
        if h.attention().any(|attn| !attn.causal) || h.classifier.is_some() || h.n_layer < 2 {
            continue;
        }
        let mut parts = shapes.parts();
        crate::mtp::set_vocabulary(&mut parts, bare.hparams().n_vocab);
        let model = open(parts.gguf()).unwrap_or_else(|e| panic!("{}: {e}", shapes.name));
        let n_vocab = model.hparams().n_vocab as u32;
        let session = session_options(model.hparams().n_ctx_train.min(120), 512);
        let prompt = |seed: u32, n: u32| {
            (0..n)
                .map(|i| (i * i + seed) % n_vocab)
                .collect::<Vec<u32>>()
        };
        let prompts = [prompt(1, 3), prompt(2, 37), prompt(3, 22), prompt(4, 19)];
        let alone = |prompt: &[u32]| {
            let mut session = run::engine(&model, 1).session_with(&session).unwrap();
            let mut sampler = sampled(1);
            let generation = session
                .generate(prompt, &mut sampler)
                .unwrap()
                .max_tokens(60);
            generation
                .map(|piece| piece.unwrap().token)
                .collect::<Vec<u32>>()
        };
        let options = ScheduleOptions {
            session: session.clone(),
            max_itl: Some(Duration::ZERO),
            n_pieces: 100,
            ..Default::default()
        };
        let mut schedule = Schedule::new(&run::engine(&model, 2), &options).unwrap();
        let submit = |schedule: &mut Schedule, i: usize| {
            schedule
                .submit(Request::new(prompts[i].clone(), sampled(1)).max_tokens(60))
                .unwrap()
        };
        let first = submit(&mut schedule, 0);
        steps(&mut schedule, 4);
        let (second, third) = (submit(&mut schedule, 1), submit(&mut schedule, 2));
        steps(&mut schedule, 1);
        let fourth = submit(&mut schedule, 3);
        steps(&mut schedule, model.hparams().n_layer * 2 + 1);
        third.cancel();
        while schedule.step() {}
        for (i, stream) in [(0, first), (1, second), (3, fourth)] {
            let tokens: Vec<u32> = stream.map(|piece| piece.unwrap().token).collect();
            assert_eq!(tokens, alone(&prompts[i]), "{} {i}", shapes.name);
        }
        drop(third);
        n += 1;
    }
    assert!(n > 80, "{n}");
}

#[test]
fn who_is_cancelled_is_gone_within_a_pass() {
    let engine = engine(1, None);
    for drops in [false, true] {
        let log = Log::default();
        let options = ScheduleOptions {
            session: session_options(600, 16),
            n_parallel: 2,
            ..Default::default()
        };
        let mut schedule = Schedule::observed(&engine, &options, log.clone()).unwrap();
        let request = || Request::new(tokens(TEXTS[1]), greedy());
        let (decoding, mut stays) = (
            schedule.submit(request()).unwrap(),
            schedule.submit(request()).unwrap(),
        );
        while log.count(Event::FirstToken) < 2 {
            schedule.step();
        }
        // In a decoding state, while queued, and in the middle of a prompt.
        let queued = schedule.submit(request()).unwrap();
        assert_eq!((schedule.n_running(), schedule.n_queued()), (2, 1));
        let cancelled = Mutex::new(Vec::new());
        let cancel = |stream: Stream| {
            if drops {
                return drop(stream);
            }
            stream.cancel();
            cancelled.lock().unwrap().push(stream);
        };
        cancel(queued);
        cancel(decoding);
        schedule.step();
        assert_eq!((schedule.n_running(), schedule.n_queued()), (1, 0));
        let in_prompt = schedule.submit(request()).unwrap();
        schedule.step();
        assert_eq!((schedule.n_running(), log.count(Event::FirstToken)), (2, 2));
        let pages = engine.pool().stats().n_pages;
        cancel(in_prompt);
        schedule.step();
        assert!(schedule.n_running() == 1 && engine.pool().stats().n_pages < pages);
        assert_eq!(log.count(Event::Ended(Some(StopReason::Cancelled))), 3);
        assert!(
            drain(&mut stays, &mut Vec::new()).is_none(),
            "the others go on"
        );
        stays.cancel();
        schedule.step();
        assert!(
            matches!(drain(&mut stays, &mut Vec::new()), Some(Ok(f)) if f.reason == StopReason::Cancelled)
        );
        assert!(
            matches!(
                stays.poll_next(&mut Context::from_waker(Waker::noop())),
                Poll::Ready(None)
            ),
            "an end is an end"
        );
        assert!(schedule.is_empty() && engine.pool().stats().n_pages == 0);
    }
}

#[test]
fn slow_readers_pause_themselves_alone() {
    let case = |seed| Case {
        max_tokens: 60,
        stop: vec![],
        logprobs: None,
        adapter: None,
        ..Case::numbered(seed)
    };
    let session = session_options(600, 512);
    let (slow, fast) = (case(1), case(4));
    let n_pieces = 6;
    // With a pool that holds both, and with one that each needs for itself.
    let budget = page_bytes(slow.prompt.len().max(fast.prompt.len()) + 60);
    for kv_budget in [None, Some(budget)] {
        let (engine, log) = (engine(2, kv_budget), Log::default());
        let options = ScheduleOptions {
            session: session.clone(),
            n_pieces,
            ..Default::default()
        };
        let mut schedule = Schedule::observed(&engine, &options, log.clone()).unwrap();
        let mut one = schedule.submit(slow.request()).unwrap();
        steps(&mut schedule, 20);
        assert!(!schedule.step(), "it waits for its reader");
        let mut other = schedule.submit(fast.request()).unwrap();
        let (mut pieces, mut ended) = (Vec::new(), None);
        while ended.is_none() {
            assert!(schedule.step());
            ended = drain(&mut other, &mut pieces);
        }
        let finish = ended.unwrap().unwrap();
        assert_eq!(
            (pieces, finish.reason, finish.n_generated),
            fast.alone(&session)
        );
        assert!(!schedule.step() && !schedule.is_empty());
        assert_eq!(
            log.count(Event::Preempted),
            usize::from(kv_budget.is_some())
        );
        let (mut pieces, mut ended) = (Vec::new(), None);
        while ended.is_none() {
            let n = pieces.len();
            ended = drain(&mut one, &mut pieces);
            assert!(pieces.len() - n <= n_pieces);
            while schedule.step() {}
        }
        let finish = ended.unwrap().unwrap();
        assert_eq!(
            (pieces, finish.reason, finish.n_generated),
            slow.alone(&session)
        );
    }
}

/// With both texts the pool has room to spare, but more than 85 % of it in use: who waits for its
/// reader leaves its pages to the prefix cache, and answers the same.
#[test]
fn who_waits_for_its_reader_gives_pages_back() {
    let case = |seed| Case {
        max_tokens: 60,
        stop: vec![],
        logprobs: None,
        adapter: None,
        ..Case::numbered(seed)
    };
    let (slow, fast) = (case(1), case(4));
    let page = page_bytes(1);
    let of_slow = page_bytes(slow.prompt.len() + 8);
    let budget = of_slow + page_bytes(fast.prompt.len() + 60);
    for (cache, n) in [(CacheMode::On, 1), (CacheMode::Off, 0)] {
        let (engine, log) = (engine(2, Some(budget)), Log::default());
        let session = SessionOptions {
            prefix: cache.into(),
            ..session_options(600, 512)
        };
        let options = ScheduleOptions {
            session: session.clone(),
            n_pieces: 6,
            ..Default::default()
        };
        let mut schedule = Schedule::observed(&engine, &options, log.clone()).unwrap();
        let mut one = schedule.submit(slow.request()).unwrap();
        while schedule.step() {}
        assert_eq!(engine.pool().stats().used, of_slow);
        let mut other = schedule.submit(fast.request()).unwrap();
        let (mut pieces, mut ended) = (Vec::new(), None);
        while ended.is_none() {
            assert!(schedule.step());
            ended = drain(&mut other, &mut pieces);
            assert!(n == 0 || engine.pool().stats().used <= budget * 85 / 100 + page);
        }
        assert_eq!(log.count(Event::Preempted), n, "{cache:?}");
        let alone = SessionOptions {
            prefix: CacheMode::Off.into(),
            ..session
        };
        assert_eq!(pieces, fast.alone(&alone).0);
        let (mut pieces, mut ended) = (Vec::new(), None);
        while ended.is_none() {
            ended = drain(&mut one, &mut pieces);
            while schedule.step() {}
        }
        assert_eq!(pieces, slow.alone(&alone).0);
    }
}

/// Requests that choose their precision are, on a small pool among others, what a session of that
/// precision alone answers, also when they were preempted or begin in the prefix cache.
#[test]
fn requests_choose_the_precision_of_their_keys_and_values() {
    let n = 24;
    let chosen = [None, Some(KvType::Q4), Some(KvType::F32)];
    let expected = chosen.map(|kind| {
        let options = SessionOptions {
            kv_type: kind.unwrap_or_default(),
            ..session_options(600, 512)
        };
        answers_alone(n, &options)
    });
    for i in 0..2 {
        assert_ne!(
            expected[i],
            expected[i + 1],
            "precisions cannot be told apart"
        );
    }
    for cache in [CacheMode::Off, CacheMode::On] {
        let log = Log::default();
        let session = SessionOptions {
            prefix: cache.into(),
            ..session_options(600, 64)
        };
        let options = ScheduleOptions {
            session,
            n_pieces: 1000,
            ..Default::default()
        };
        let engine = engine(2, Some(2 * page_bytes(300)));
        let mut schedule = Schedule::observed(&engine, &options, log.clone()).unwrap();
        // Who is preempted depends on time: rounds go on until some were.
        for round in 0.. {
            let kind = |i: usize| (i + round) % chosen.len();
            let mut streams = Vec::new();
            for i in 0..n {
                let request = Case::numbered(i).request();
                let request = match chosen[kind(i)] {
                    Some(kind) => request.kv_type(kind),
                    None => request,
                };
                streams.push(schedule.submit(request).unwrap());
            }
            while schedule.step() {}
            for (i, stream) in streams.iter_mut().enumerate() {
                assert_eq!(
                    answer(stream),
                    expected[kind(i)][i],
                    "{cache:?}, request {i}"
                );
            }
            let n_preempted = log.count(Event::Preempted);
            if round >= 2 && n_preempted > 2 {
                break;
            }
            assert!(round < 50, "{cache:?}: {n_preempted} preempted");
        }
        drop(schedule);
        engine.pool().clear_prefixes();
        assert_eq!(engine.pool().stats().n_pages, 0);
    }
}

#[test]
fn deadlines_end_what_there_is() {
    let engine = engine(1, None);
    let mut schedule = Schedule::new(
        &engine,
        &ScheduleOptions {
            n_parallel: 1,
            ..Default::default()
        },
    )
    .unwrap();
    let long = || Request::new(tokens("The"), greedy());
    let mut running = schedule
        .submit(
            long()
                .deadline(Duration::from_millis(60))
                .max_tokens(100_000),
        )
        .unwrap();
    let mut queued = schedule.submit(long().deadline(Duration::ZERO)).unwrap();
    let mut patient = schedule
        .submit(long().deadline(Duration::MAX).max_tokens(3))
        .unwrap();
    let (mut pieces, mut ended) = (Vec::new(), None);
    while ended.is_none() && schedule.step() {
        ended = drain(&mut running, &mut pieces);
    }
    // A very fast machine may come to the end of the context.
    let finish = ended.unwrap().unwrap();
    assert!(matches!(
        finish.reason,
        StopReason::Deadline | StopReason::ContextFull | StopReason::EndOfGeneration
    ));
    let case = Case {
        prompt: tokens("The"),
        max_tokens: finish.n_generated,
        stop: vec![],
        ..Case::numbered(0)
    };
    let alone = case.alone(&SessionOptions::default()).0;
    let text = |pieces: &[TokenText]| pieces.iter().map(|piece| &*piece.text).collect::<String>();
    assert_eq!(text(&pieces), text(&alone));
    while schedule.step() {}
    let (pieces, reason, n) = answer(&mut queued);
    assert_eq!((pieces.len(), reason, n), (0, StopReason::Deadline, 0));
    assert_eq!(answer(&mut patient).1, StopReason::MaxTokens);
}

#[test]
fn priority_goes_first_and_age_before_it() {
    let engine = engine(1, None);
    let options = ScheduleOptions {
        n_parallel: 1,
        ..Default::default()
    };
    let log = Log::default();
    let mut schedule = Schedule::observed(&engine, &options, log.clone()).unwrap();
    let request = |priority| {
        Request::new(tokens("The"), greedy())
            .max_tokens(4)
            .priority(priority)
    };
    let ids: Vec<Stream> = [0, 0, 2, 1, 2]
        .into_iter()
        .map(|p| schedule.submit(request(p)).unwrap())
        .collect();
    while schedule.step() {}
    assert_eq!(log.ends(), [2, 4, 3, 0, 1].map(|i: usize| ids[i].id()));
    // The last to run is the first to make room: one that runs gives way to a better one that
    // comes.
    let running = schedule.submit(request(0).max_tokens(50)).unwrap();
    steps(&mut schedule, 3);
    let better = schedule.submit(request(1)).unwrap();
    while schedule.step() {}
    assert_eq!(log.ends()[5..], [better.id(), running.id()]);
    assert_eq!(
        log.of(running.id())[3..5],
        [Event::Preempted, Event::Admitted]
    );
    // In an endless stream of better ones everyone has their turn.
    let old = schedule.submit(request(0)).unwrap();
    let mut others = Vec::new();
    let mut n_steps = 0;
    while !matches!(log.of(old.id()).last(), Some(Event::Ended(_))) {
        while schedule.n_queued() + schedule.n_running() < 4 {
            others.push(schedule.submit(request(1)).unwrap());
        }
        schedule.step();
        n_steps += 1;
        assert!(n_steps < 2000, "the old request starves");
    }
    assert!(n_steps > 400, "priority counts for nothing: {n_steps}");
}

/// What fails fails alone.
#[test]
fn one_that_fails_harms_nobody() {
    let session = session_options(600, 64);
    let options = ScheduleOptions {
        session: session.clone(),
        n_pieces: 1000,
        ..Default::default()
    };
    let mut schedule = Schedule::new(&engine(2, None), &options).unwrap();
    let n_vocab = MODEL.hparams().n_vocab as u32;
    let wrong = Sampler::new(SamplerOptions {
        logit_bias: vec![(n_vocab + 7, 1.0)],
        ..Default::default()
    })
    .unwrap();
    let mut good = schedule.submit(Case::numbered(2).request()).unwrap();
    let mut bad = schedule.submit(Request::new(tokens("The"), wrong)).unwrap();
    while schedule.step() {}
    let error = drain(&mut bad, &mut Vec::new()).unwrap().unwrap_err();
    assert!(
        matches!(
            error,
            ScheduleError::Sample(SampleError::BiasOutsideVocabulary { .. })
        ),
        "{error}"
    );
    assert!(
        matches!(
            bad.poll_next(&mut Context::from_waker(Waker::noop())),
            Poll::Ready(None)
        ) && bad.finish().is_none()
    );
    assert_eq!(answer(&mut good), Case::numbered(2).alone(&session));

    // A pool that the answer outgrows, though it held the prompt: that request ends, and the next
    // one has its turn.
    let prompt = tokens(TEXTS[4]);
    let engine = engine(1, Some(page_bytes(64)));
    let mut schedule = Schedule::new(&engine, &ScheduleOptions::default()).unwrap();
    let mut long = schedule
        .submit(Request::new(prompt.clone(), greedy()).max_tokens(300))
        .unwrap();
    let mut short = schedule
        .submit(Request::new(prompt, greedy()).max_tokens(5))
        .unwrap();
    while schedule.step() {}
    let mut pieces = Vec::new();
    let error = drain(&mut long, &mut pieces).unwrap().unwrap_err();
    assert!(
        matches!(
            error,
            ScheduleError::Session(SessionError::Kv(KvError::PoolFull { .. }))
        ),
        "{error}"
    );
    assert!(pieces.len() > 5);
    assert_eq!(answer(&mut short).1, StopReason::MaxTokens);
}

#[test]
fn what_could_never_be_computed_is_refused() {
    let engine = engine(1, Some(page_bytes(64)));
    let options = ScheduleOptions {
        session: session_options(200, 64),
        max_requests: 2,
        ..Default::default()
    };
    let mut schedule = Schedule::new(&engine, &options).unwrap();
    let mut refused =
        |tokens: Vec<u32>| schedule.submit(Request::new(tokens, greedy())).unwrap_err();
    assert!(matches!(
        refused(vec![]),
        ScheduleError::Session(SessionError::NoTokens)
    ));
    assert!(matches!(
        refused(vec![1; 201]),
        ScheduleError::Session(SessionError::ContextFull { n_new: 201, .. })
    ));
    assert!(matches!(
        refused(vec![u32::MAX]),
        ScheduleError::Session(SessionError::TokenOutOfRange { .. })
    ));
    assert!(
        matches!(refused(vec![1; 65]), ScheduleError::PoolTooSmall { need, budget } if need > budget)
    );
    let adapted = Request::new(vec![1], greedy()).adapter(Arc::clone(&ADAPTER), f32::NAN);
    assert!(matches!(
        schedule.submit(adapted),
        Err(ScheduleError::Adapter(_))
    ));
    let request = || Request::new(vec![1], greedy()).max_tokens(1);
    let places = [
        schedule.submit(request()).unwrap(),
        schedule.submit(request()).unwrap(),
    ];
    assert!(matches!(
        schedule.submit(request()),
        Err(ScheduleError::QueueFull { max: 2 })
    ));
    while schedule.step() {}
    drop(places);
    assert!(
        schedule.submit(request()).is_ok(),
        "who ended leaves a place"
    );
    for option in ["n_parallel", "n_batch", "n_pieces", "max_requests"] {
        let mut options = ScheduleOptions::default();
        match option {
            "n_parallel" => options.n_parallel = 0,
            "n_batch" => options.session.n_batch = 0,
            "n_pieces" => options.n_pieces = 0,
            _ => options.max_requests = 0,
        }
        let error = Scheduler::new(&engine, &options).unwrap_err();
        assert!(
            matches!(error, ScheduleError::Session(SessionError::Option { option: o, .. }) if o == option)
        );
    }
}

#[test]
fn observers_hear_of_a_whole_life() {
    let (engine, log) = (engine(1, None), Log::default());
    let mut schedule =
        Schedule::observed(&engine, &ScheduleOptions::default(), log.clone()).unwrap();
    let stream = schedule
        .submit(Request::new(tokens("The"), greedy()).max_tokens(3))
        .unwrap();
    assert_eq!(log.of(stream.id()), [Event::Queued]);
    while schedule.step() {}
    let ended = Event::Ended(Some(StopReason::MaxTokens));
    assert_eq!(
        log.of(stream.id()),
        [Event::Queued, Event::Admitted, Event::FirstToken, ended]
    );
}

/// Numbers that look random, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }
}

/// llama.cpp #25566: a full cache ended all generations. Requests of random length, priority,
/// deadline and patience on a pool of a few pages, from several threads: all of them end or are
/// refused with a type, in order, and nothing is left.
#[test]
fn random_requests_on_a_tiny_pool_all_end() {
    let n = if long() { 10_000 } else { 160 };
    let page = page_bytes(1);
    let (engine, log) = (engine(2, Some(40 * page)), Log::default());
    let options = ScheduleOptions {
        session: session_options(64 * 41, 128),
        n_parallel: 12,
        max_requests: 100,
        n_pieces: 8,
        ..Default::default()
    };
    let scheduler = Scheduler::observed(&engine, &options, log.clone()).unwrap();
    let n_ended = Mutex::new([0; 3]);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (scheduler, n_ended) = (scheduler.clone(), &n_ended);
            scope.spawn(move || {
                let mut random = Random(thread);
                for i in 0..n / 4 {
                    let prompt: Vec<u32> = (0..1 + random.below(300))
                        .map(|_| random.below(500) as u32)
                        .collect();
                    let prompt = if random.below(30) == 0 {
                        prompt.repeat(20)
                    } else {
                        prompt
                    };
                    let mut request =
                        Request::new(prompt, sampled(i)).priority(random.below(3) as i32);
                    request = request.max_tokens(random.below(100));
                    if random.below(10) == 0 {
                        request = request.deadline(Duration::from_millis(random.below(50) as u64));
                    }
                    let kind = match scheduler.submit(request) {
                        Err(ScheduleError::PoolTooSmall { .. } | ScheduleError::Session(_)) => 0,
                        Err(error) => panic!("{error}"),
                        Ok(stream) if random.below(4) == 0 => {
                            stream.take(random.below(8)).for_each(drop);
                            1
                        }
                        Ok(mut stream) => {
                            let error = stream.by_ref().find_map(Result::err);
                            assert_eq!(stream.finish().is_some(), error.is_none());
                            // Its answer outgrew the pool.
                            let outgrown = |e: &ScheduleError| {
                                matches!(
                                    e,
                                    ScheduleError::Session(SessionError::Kv(
                                        KvError::PoolFull { .. }
                                    ))
                                )
                            };
                            assert!(error.iter().all(outgrown), "{error:?}");
                            2
                        }
                    };
                    n_ended.lock().unwrap()[kind] += 1;
                }
            });
        }
    });
    while scheduler.n_requests() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let n_ended = n_ended.into_inner().unwrap();
    assert!(n_ended.iter().all(|&n| n > 0), "{n_ended:?}");
    assert_eq!(
        (n_ended.iter().sum::<u64>(), engine.pool().stats().n_pages),
        (n / 4 * 4, 0)
    );
    let mut lives = std::collections::BTreeMap::<RequestId, Vec<Event>>::new();
    log.0
        .lock()
        .unwrap()
        .iter()
        .for_each(|&(id, event)| lives.entry(id).or_default().push(event));
    assert_eq!(lives.len() as u64, n_ended[1] + n_ended[2]);
    for (id, life) in lives {
        assert_eq!(life[0], Event::Queued, "{id:?}");
        assert!(
            matches!(life[life.len() - 1], Event::Ended(_)),
            "{id:?}: {life:?}"
        );
        assert!(
            life.iter()
                .filter(|&&event| event == Event::FirstToken)
                .count()
                <= 1,
            "{id:?}: {life:?}"
        );
        let mut is_running = false;
        for event in &life[1..life.len() - 1] {
            assert_eq!(is_running, *event != Event::Admitted, "{id:?}: {life:?}");
            is_running = *event != Event::Preempted;
        }
    }
}

#[test]
fn a_scheduler_outlives_its_handles_but_not_a_panic() {
    fn anywhere<T: Send + Sync + 'static>(_: &T) {}
    fn to_a_thread<T: Send + 'static>(_: &T) {}
    let engine = engine(1, None);
    let scheduler = Scheduler::new(&engine, &ScheduleOptions::default()).unwrap();
    anywhere(&scheduler);
    let stream = scheduler
        .submit(Request::new(tokens("The"), greedy()).max_tokens(20))
        .unwrap();
    to_a_thread(&stream);
    to_a_thread(&Schedule::new(&engine, &ScheduleOptions::default()).unwrap());
    drop(scheduler);
    assert!(!stream.text().unwrap().is_empty());

    struct Panics;
    impl Observer for Panics {
        fn first_token(&self, _: RequestId) {
            panic!("an observer of a test");
        }
    }
    let scheduler = Scheduler::observed(&engine, &ScheduleOptions::default(), Panics).unwrap();
    let mut stream = scheduler
        .submit(Request::new(tokens("The"), greedy()))
        .unwrap();
    assert!(matches!(stream.next(), Some(Err(ScheduleError::Ended))));
    assert!(stream.next().is_none());
    while scheduler
        .submit(Request::new(tokens("The"), greedy()))
        .is_ok()
    {
        std::thread::yield_now();
    }
    assert_eq!(level().name(), MODEL.arch().name());
}

/// What a grammar forces is computed in one pass with the token before it, beside others.
#[cfg(feature = "grammar")]
#[test]
fn forced_tokens_are_those_of_a_session_alone() {
    use ruvllm::grammar::{Grammar, TokenTrie};
    let regex = "The owner of the value is (moved|borrowed) and then it is dropped by (the caller|nobody)\\. It ends\\.";
    let trie = TokenTrie::new(MODEL.tokenizer().unwrap()).unwrap();
    let masked = |mut sampler: Sampler| {
        sampler.set_mask(Some(Box::new(
            Grammar::regex(&trie, regex).unwrap().matcher(),
        )));
        sampler
    };
    let prompt = tokens("Ownership is");
    let case = |i: usize| Case {
        prompt: prompt.clone(),
        sampler: masked(if i.is_multiple_of(2) {
            greedy()
        } else {
            sampled(i as u64)
        }),
        max_tokens: [100, i][i % 2],
        stop: if i.is_multiple_of(3) {
            vec![["then", "call", "is"][i / 3 % 3].into()]
        } else {
            vec![]
        },
        logprobs: (i % 4 > 1).then_some(1),
        adapter: None,
    };
    for n_ctx in [200, prompt.len() + 9] {
        let (engine, session) = (engine(2, None), session_options(n_ctx, 512));
        let options = ScheduleOptions {
            session: session.clone(),
            n_parallel: 5,
            ..Default::default()
        };
        let n = 30;
        // With drafts, too, that are right mostly: of what is forced, and of what is not.
        let mut schedule = Schedule::new(&engine, &options).unwrap();
        let mut streams: Vec<_> = (0..n)
            .map(|i| {
                let text = case(i)
                    .alone(&session)
                    .0
                    .into_iter()
                    .map(|piece| piece.token);
                let oracle = Oracle::new(prompt.iter().copied().chain(text).collect(), 150);
                schedule
                    .submit(
                        case(i)
                            .request()
                            .speculate(Speculation::by(oracle).fixed_length(1 + i % 15)),
                    )
                    .unwrap()
            })
            .collect();
        while schedule.step() {}
        let expected: Vec<_> = (0..n).map(|i| case(i).alone(&session)).collect();
        all_are(
            &expected,
            &mut streams,
            &format!("drafts in a context of {n_ctx}"),
        );
        let mut schedule = Schedule::new(&engine, &options).unwrap();
        let mut streams: Vec<_> = (0..n)
            .map(|i| schedule.submit(case(i).request()).unwrap())
            .collect();
        let mut n_steps = 0;
        while schedule.step() {
            n_steps += 1;
        }
        all_are(&expected, &mut streams, &format!("context of {n_ctx}"));
        let n_tokens: usize = expected.iter().map(|(_, _, n)| n).sum();
        assert!(
            5 * n_steps < 4 * n_tokens,
            "{n_steps} steps of five for {n_tokens} tokens"
        );
    }
}
