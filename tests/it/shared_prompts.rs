//! Prompts that begin alike and come together: computed once, and every answer is that of a session
//! alone.

use crate::invariance::{self, Shape};
use crate::recurrent::{tokens as letters, with_tokens};
use crate::run::{self, session_on};
use crate::schedule::{MODEL, answer, greedy, session_options, steps, tokens};
use crate::speculate::WINDOWED;
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::StopReason;
use ruvllm::engine::CacheMode;
use ruvllm::quant::DType;
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions, Stream};
use std::sync::LazyLock;

/// Longer than a pass of `N_BATCH` rows, and no whole number of pages.
static BEGINNING: LazyLock<Vec<u32>> =
    LazyLock::new(|| tokens(&"A slice is a reference to a sequence of elements. ".repeat(40)));
const N_BATCH: usize = 128;
const PAGE: usize = 64;

fn options(cache: CacheMode) -> ScheduleOptions {
    ScheduleOptions {
        session: SessionOptions {
            prefix: cache.into(),
            ..session_options(2000, N_BATCH)
        },
        n_parallel: 8,
        n_pieces: 1000,
        ..Default::default()
    }
}

fn schedule(model: &Model, cache: CacheMode) -> Schedule {
    Schedule::new(&run::engine(model, 2), &options(cache)).unwrap()
}

/// The beginning, and what comes after it.
fn prompt(end: &str) -> Vec<u32> {
    [&BEGINNING[..], &tokens(end)[1..]].concat()
}

fn request(prompt: &[u32]) -> Request {
    Request::new(prompt.to_vec(), greedy()).max_tokens(12)
}

fn alone(model: &Model, prompt: &[u32], kv_type: KvType) -> Vec<u32> {
    let options = SessionOptions {
        kv_type,
        ..session_options(2000, 512)
    };
    let mut generation = session_on(model, 1, &options)
        .into_generation(prompt, greedy())
        .max_tokens(12);
    generation.by_ref().for_each(|piece| drop(piece.unwrap()));
    generation.tokens().to_vec()
}

fn generated(stream: &mut Stream) -> Vec<u32> {
    answer(stream).0.iter().map(|piece| piece.token).collect()
}

/// Prompt tokens that were computed for it.
fn computed(stream: &Stream) -> usize {
    stream.finish().unwrap().n_prompt
}

/// The first computes the whole prompt; those behind compute what they alone have, and, where
/// windows and recurrent layers let sequences part at page borders only, the rows behind one.
#[test]
fn what_prompts_share_is_computed_once() {
    let ends = [
        "One",
        "Another end",
        "A third, which is longer than that",
        "One",
    ];
    let texts = ends.map(prompt);
    let of_letters = [1, 2, 3, 1].map(|end| [letters(500, 9), letters(20 + end, end)].concat());
    let recurrent =
        Shape::RECURRENT.map(|shape| with_tokens(&invariance::model(shape, DType::Q8_0)));
    let mut cases = vec![
        (&*MODEL, &texts, BEGINNING.len(), 1),
        (&*WINDOWED, &texts, BEGINNING.len(), PAGE),
    ];
    cases.extend(
        recurrent
            .iter()
            .map(|model| (model, &of_letters, 500, PAGE)),
    );
    for (model, prompts, n_shared, most_again) in cases {
        for cache in [CacheMode::On, CacheMode::Off] {
            let mut schedule = schedule(model, cache);
            let mut streams = prompts
                .each_ref()
                .map(|prompt| schedule.submit(request(prompt)).unwrap());
            while schedule.step() {}
            for (i, (stream, prompt)) in streams.iter_mut().zip(prompts).enumerate() {
                assert_eq!(generated(stream), alone(model, prompt, KvType::F16), "{i}");
                let n = computed(stream);
                if i == 0 || cache == CacheMode::Off {
                    assert_eq!(n, prompt.len());
                } else {
                    let most = prompt.len() - n_shared + most_again;
                    assert!(n <= most, "request {i} computed {n} of {}", prompt.len());
                }
            }
        }
    }
}

/// One that comes while the answer to such a prompt is generated begins with its pages, too.
#[test]
fn a_prompt_that_comes_later_begins_with_that_of_a_running_answer() {
    let mut schedule = schedule(&MODEL, CacheMode::On);
    let (first, second) = (prompt("One"), prompt("Two of them"));
    let mut early = schedule.submit(request(&first).max_tokens(200)).unwrap();
    steps(&mut schedule, 40);
    assert!(early.finish().is_none());
    let mut late = schedule.submit(request(&second)).unwrap();
    while schedule.step() {}
    assert_eq!(generated(&mut late), alone(&MODEL, &second, KvType::F16));
    assert!(computed(&late) <= second.len() - BEGINNING.len() + 1);
    assert_eq!(
        generated(&mut early)[..12],
        alone(&MODEL, &first, KvType::F16)[..]
    );
}

/// Other tenants, precisions and adapters compute their own.
#[test]
fn nothing_is_shared_across_tenants_and_precisions() {
    let prompt = prompt("One");
    let mut schedule = schedule(&MODEL, CacheMode::On);
    let mut submit = |request: Request| schedule.submit(request).unwrap();
    let mut streams = [
        (submit(request(&prompt)), KvType::F16),
        (submit(request(&prompt).salt("another tenant")), KvType::F16),
        (submit(request(&prompt).kv_type(KvType::Q4)), KvType::Q4),
    ];
    while schedule.step() {}
    for (stream, kv_type) in &mut streams {
        assert_eq!(generated(stream), alone(&MODEL, &prompt, *kv_type));
        assert_eq!(computed(stream), prompt.len());
    }
}

/// If the first goes away, at any time, the next goes on from where it was, and the others wait for
/// that one.
#[test]
fn others_go_on_when_the_first_goes_away() {
    let prompts = ["One", "Two", "Three"].map(prompt);
    let n_passes = BEGINNING.len().div_ceil(N_BATCH);
    for n_steps in 0..n_passes + 2 {
        let mut schedule = schedule(&MODEL, CacheMode::On);
        let mut streams = prompts
            .each_ref()
            .map(|prompt| schedule.submit(request(prompt)).unwrap());
        steps(&mut schedule, n_steps);
        streams[0].cancel();
        while schedule.step() {}
        assert_eq!(answer(&mut streams[0]).1, StopReason::Cancelled);
        for (stream, prompt) in streams.iter_mut().zip(&prompts).skip(1) {
            assert_eq!(generated(stream), alone(&MODEL, prompt, KvType::F16));
        }
        let n: usize = streams[1..].iter().map(computed).sum();
        let own: usize = prompts[1..]
            .iter()
            .map(|p| p.len() - BEGINNING.len() + 1)
            .sum();
        let rest = BEGINNING
            .len()
            .saturating_sub(n_steps.saturating_sub(1) * N_BATCH);
        assert!(n <= own + rest, "{n} computed after {n_steps} steps");
    }
}

/// A request of higher priority does not wait for one of lower.
#[test]
fn who_goes_first_waits_for_nobody() {
    let prompt = prompt("One");
    let mut schedule = schedule(&MODEL, CacheMode::On);
    let mut low = schedule.submit(request(&prompt)).unwrap();
    steps(&mut schedule, 1);
    let mut high = schedule.submit(request(&prompt).priority(1)).unwrap();
    while schedule.step() {}
    let expected = alone(&MODEL, &prompt, KvType::F16);
    assert_eq!(generated(&mut high), expected);
    assert_eq!(generated(&mut low), expected);
    assert!(computed(&high) + N_BATCH <= prompt.len());
}

/// A request that keeps away from the cache neither finds others nor is found, also among those
/// that run side by side; one that only reads is not found.
#[test]
fn requests_choose_what_they_share() {
    let model: &Model = &MODEL;
    let prompt = prompt(" An array");
    let expected = alone(model, &prompt, KvType::F16);
    let mut schedule = schedule(model, CacheMode::On);
    let mut ask = |modes: &[Option<CacheMode>]| {
        let requests = modes.iter().map(|mode| match mode {
            Some(mode) => request(&prompt).cache(*mode),
            None => request(&prompt),
        });
        let mut streams: Vec<_> = requests.map(|of| schedule.submit(of).unwrap()).collect();
        while schedule.step() {}
        let of = |stream: &mut Stream| {
            assert_eq!(generated(stream), expected);
            computed(stream)
        };
        streams.iter_mut().map(of).collect::<Vec<_>>()
    };
    use CacheMode::{Off, On, ReadOnly};
    let all = prompt.len();
    assert_eq!(ask(&[Some(Off), Some(Off)]), [all, all]);
    assert_eq!(ask(&[Some(ReadOnly)]), [all], "nothing was stored");
    assert_eq!(ask(&[Some(ReadOnly)]), [all], "nor is what only reads");
    assert_eq!(ask(&[Some(On)]), [all]);
    assert_eq!(ask(&[Some(Off), Some(ReadOnly), None]), [all, 1, 1]);
    let mut long = schedule
        .submit(request(&prompt).min_cache_tokens(all + 1))
        .unwrap();
    while schedule.step() {}
    assert_eq!((generated(&mut long), computed(&long)), (expected, all));
}

/// Engines of two models on the same threads compute what they compute alone, side by side.
#[test]
fn models_share_threads() {
    use ruvllm::Engine;
    use ruvllm::engine::EngineOptions;
    let (model, other): (&Model, &Model) = (&MODEL, &MODEL);
    let first = run::engine(model, 2);
    let options = EngineOptions {
        threads: Some(first.threads()),
        ..Default::default()
    };
    let second = Engine::new(other, &options).unwrap();
    assert_eq!(second.n_threads(), 2);
    let prompts = [prompt(" One"), prompt(" Two")];
    let expected = [0, 1].map(|i| alone(model, &prompts[i], KvType::F16));
    std::thread::scope(|scope| {
        let engines = [&first, &second];
        for i in 0..2 {
            let (engine, prompt, expected) = (engines[i], &prompts[i], &expected[i]);
            scope.spawn(move || {
                let session = engine.session_with(&session_options(2000, 128)).unwrap();
                let mut generation = session.into_generation(prompt, greedy()).max_tokens(12);
                generation.by_ref().for_each(|piece| drop(piece.unwrap()));
                assert_eq!(generation.tokens(), expected);
            });
        }
    });
    // The threads outlive the engine that had them first.
    drop(first);
    second.session().unwrap().prefill(&prompts[1]).unwrap();
}
