//! Context shift of requests: each answers what a session alone does, also where it lost its pages
//! after its context was shifted.

use crate::schedule::{
    Case, Event, Log, MODEL, all_are, answer, engine, greedy, page_bytes, steps, tokens,
};
use crate::speculate::Oracle;
use ruvllm::KvType;
use ruvllm::SessionOptions;
use ruvllm::decode::Speculation;
use ruvllm::engine::CacheMode;
use ruvllm::scheduler::ScheduleError;
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions, Stream};
use ruvllm::{Sampler, SamplerOptions, SessionError, StopReason};

fn keeping(keep: usize, n_ctx: usize) -> SessionOptions {
    SessionOptions {
        n_ctx: Some(n_ctx),
        context_shift: Some(keep),
        ..Default::default()
    }
}

/// Without end: nothing but the number of tokens or a stop string ends it.
fn endless(i: usize) -> Sampler {
    let eos = MODEL.tokenizer().unwrap().eos().unwrap_or(0);
    let options = match i % 3 {
        0 => SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        },
        _ => SamplerOptions {
            temperature: 0.9,
            seed: Some(i as u64),
            repeat_penalty: 1.1,
            ..Default::default()
        },
    };
    Sampler::new(SamplerOptions {
        logit_bias: vec![(eos, -1e9)],
        ..options
    })
    .unwrap()
}

/// Number `i` of many, whose text is longer than a context of 192 tokens.
fn case(i: usize) -> Case {
    Case {
        sampler: endless(i),
        max_tokens: 150 + 60 * (i % 5),
        stop: match i % 4 {
            1 => vec![[" let mut", "ownership", "```"][i / 4 % 3].into()],
            _ => vec![],
        },
        ..Case::numbered(i)
    }
}

fn cases(n: usize, n_ctx: usize) -> Vec<Case> {
    let cases = (0..n).map(case);
    cases.filter(|case| case.prompt.len() <= n_ctx).collect()
}

fn options(session: &SessionOptions, n_parallel: usize) -> ScheduleOptions {
    ScheduleOptions {
        session: session.clone(),
        n_parallel,
        n_pieces: 10_000,
        ..Default::default()
    }
}

#[test]
fn requests_go_on_as_sessions_do() {
    for (keep, n_ctx) in [(0, 128), (70, 256)] {
        let session = keeping(keep, n_ctx);
        let cases = cases(20, n_ctx);
        let expected: Vec<_> = cases.iter().map(|case| case.alone(&session)).collect();
        let is_shifted = |answer: &&(Vec<_>, StopReason, usize)| answer.2 > n_ctx;
        assert!(expected.iter().filter(is_shifted).count() > 5);
        for n_parallel in [1, 6] {
            let mut schedule =
                Schedule::new(&engine(2, None), &options(&session, n_parallel)).unwrap();
            let mut streams: Vec<Stream> = Vec::new();
            for (i, case) in cases.iter().enumerate() {
                let mut request = case.request();
                if i % 2 == 1 {
                    // Half of them with guesses that come true.
                    let text = expected[i].0.iter().map(|piece| piece.token);
                    let text = case.prompt.iter().copied().chain(text).collect();
                    let oracle = Oracle::new(text, 150);
                    request = request.speculate(Speculation::by(oracle).fixed_length(3));
                }
                streams.push(schedule.submit(request).unwrap());
                steps(&mut schedule, i % 5);
            }
            while schedule.step() {}
            all_are(
                &expected,
                &mut streams,
                &format!("{n_parallel} of {session:?}"),
            );
        }
    }
}

/// Requests on a pool of two contexts lose their pages again and again, before and after they were
/// shifted.
#[test]
fn who_was_preempted_after_a_shift_answers_the_same() {
    let n_ctx = 192;
    let session = SessionOptions {
        pooled_layer: Some(1),
        ..keeping(10, n_ctx)
    };
    let cases = cases(14, n_ctx);
    let expected: Vec<_> = cases.iter().map(|case| case.alone(&session)).collect();
    let mut pooled = Vec::new();
    for case in &cases {
        let mut schedule = Schedule::new(&engine(2, None), &options(&session, 1)).unwrap();
        let mut stream = schedule.submit(case.request()).unwrap();
        while schedule.step() {}
        answer(&mut stream);
        pooled.push(stream.take_pooled());
    }
    for (n_batch, cache) in [(64, CacheMode::Off), (512, CacheMode::On)] {
        let session = SessionOptions {
            n_batch,
            prefix: cache.into(),
            ..session.clone()
        };
        let log = Log::default();
        let engine = engine(2, Some(2 * page_bytes(n_ctx)));
        let mut schedule = Schedule::observed(&engine, &options(&session, 8), log.clone()).unwrap();
        let mut streams: Vec<Stream> = Vec::new();
        for (i, case) in cases.iter().enumerate() {
            let request = case.request().priority((i % 4) as i32);
            streams.push(schedule.submit(request).unwrap());
            // Most are shifted before the next one, of higher priority, comes.
            steps(&mut schedule, 90);
        }
        while schedule.step() {}
        all_are(&expected, &mut streams, &format!("{cache:?}"));
        for (i, stream) in streams.iter_mut().enumerate() {
            if cache == CacheMode::Off {
                assert_eq!(stream.take_pooled(), pooled[i], "request {i}");
            }
        }
        let n_preempted = log.count(Event::Preempted);
        assert!(n_preempted > 2, "{n_preempted} preempted");
        drop(schedule);
        engine.pool().clear_prefixes();
        assert_eq!(engine.pool().stats().n_pages, 0);
    }
}

/// Who is preempted long after a shift drops again what it dropped.
#[test]
fn what_was_dropped_is_dropped_again() {
    let session = keeping(10, 192);
    let log = Log::default();
    let engine = engine(2, Some(page_bytes(192)));
    let mut schedule = Schedule::observed(&engine, &options(&session, 4), log.clone()).unwrap();
    let of = |i: usize| Case {
        max_tokens: 600,
        stop: vec![],
        adapter: None,
        ..case(i)
    };
    let mut streams = vec![schedule.submit(of(1).request()).unwrap()];
    for i in 2..5 {
        // Its context is shifted four times meanwhile.
        steps(&mut schedule, 350);
        assert_eq!(log.count(Event::Preempted), i - 2);
        let request = of(i).request().priority(i as i32);
        streams.push(schedule.submit(request).unwrap());
        schedule.step();
        assert_eq!(log.count(Event::Preempted), i - 1);
    }
    while schedule.step() {}
    let expected: Vec<_> = (1..5).map(|i| of(i).alone(&session)).collect();
    all_are(&expected, &mut streams, "one context");
}

/// What a grammar forces where the context is full is computed behind the shift.
#[cfg(feature = "grammar")]
#[test]
fn forced_tokens_behind_a_shift() {
    use ruvllm::grammar::{Grammar, TokenTrie};
    let trie = TokenTrie::new(MODEL.tokenizer().unwrap()).unwrap();
    let regex = "(The owner of the value is (moved|borrowed) and then it is dropped by (the caller|nobody)\\. ){40}";
    let grammar = Grammar::regex(&trie, regex).unwrap();
    let case = |i: usize| {
        let mut sampler = if i.is_multiple_of(2) {
            greedy()
        } else {
            crate::schedule::sampled(i as u64)
        };
        sampler.set_mask(Some(Box::new(grammar.matcher())));
        Case {
            // So that the context is full at each place of the sentence.
            prompt: tokens(&format!("{}is", "Ownership ".repeat(1 + i))),
            sampler,
            max_tokens: 300,
            stop: vec![],
            logprobs: (i % 4 > 1).then_some(1),
            adapter: None,
        }
    };
    let session = keeping(0, 128);
    let expected: Vec<_> = (0..12).map(|i| case(i).alone(&session)).collect();
    for budget in [None, Some(2 * page_bytes(128))] {
        let log = Log::default();
        let mut schedule =
            Schedule::observed(&engine(2, budget), &options(&session, 12), log.clone()).unwrap();
        let mut streams: Vec<Stream> = Vec::new();
        for i in 0..12 {
            let request = case(i).request().priority((i % 5) as i32);
            streams.push(schedule.submit(request).unwrap());
            steps(&mut schedule, 5);
        }
        while schedule.step() {}
        all_are(&expected, &mut streams, &format!("budget {budget:?}"));
        assert_eq!(budget.is_some(), log.count(Event::Preempted) > 0);
    }
}

#[test]
fn refused_by_name() {
    let engine = engine(1, None);
    let wrong = options(&keeping(65, 128), 2);
    let refused = Schedule::new(&engine, &wrong).map(drop).unwrap_err();
    assert!(
        matches!(
            refused,
            SessionError::Option {
                option: "context_shift",
                ..
            }
        ),
        "{refused}"
    );
    let mut schedule = Schedule::new(&engine, &options(&keeping(0, 128), 2)).unwrap();
    let request = || Request::new(tokens("Ownership is"), greedy()).max_tokens(200);
    let refused = schedule.submit(request().kv_type(KvType::Q4)).unwrap_err();
    assert!(
        matches!(
            refused,
            ScheduleError::Session(SessionError::NoShift {
                what: "keys of fewer than 8 bits"
            })
        ),
        "{refused}"
    );
    let mut stream = schedule.submit(request().kv_type(KvType::Q8)).unwrap();
    while schedule.step() {}
    let (_, reason, n) = answer(&mut stream);
    assert!(reason != StopReason::ContextFull && n > 0);
    // A prompt has to fit, and nothing of it is left out.
    let refused = schedule
        .submit(Request::new(vec![1; 129], greedy()))
        .unwrap_err();
    assert!(
        matches!(
            refused,
            ScheduleError::Session(SessionError::ContextFull { .. })
        ),
        "{refused}"
    );
}
