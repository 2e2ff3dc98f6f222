//! Threads on one engine: what they share changes no bit. A program of its own, as the thread sanitiser runs it with
//! everything built anew.

#[path = "it/run/mod.rs"]
mod run;
#[path = "it/tiny/mod.rs"]
mod tiny;

use run::{OnLevel, Pass, engine, session_on};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::arch::Arch;
use ruvllm::engine::{CacheMode, EngineOptions};
use ruvllm::kv::KvError;
use ruvllm::quant::DType;
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Session, SessionError};
use tiny::{N_VOCAB, TOKENS, Tiny};

fn options(n_batch: usize) -> SessionOptions {
    SessionOptions {
        n_ctx: Some(64),
        n_batch,
        kv_type: KvType::F32,
        ..Default::default()
    }
}

fn session(model: &Model, n_batch: usize, n_threads: usize) -> Session {
    session_on(model, n_threads, &options(n_batch))
}

fn logits(session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    let mut all = Vec::new();
    session
        .hooks()
        .prefill_each(tokens, 0, |_, logits| all.extend_from_slice(logits))
        .unwrap();
    all
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for tiny in Tiny::ALL {
        for dtype in [DType::F32, DType::Q8_0, DType::Q4_0] {
            for arch in Arch::available() {
                let model = tiny.model(dtype).on(arch);
                for n_batch in [1, 64] {
                    let [one, two, three] =
                        [1, 2, 3].map(|n| logits(&mut session(&model, n_batch, n), &TOKENS));
                    assert!(
                        one == two && two == three,
                        "{tiny:?} {dtype:?} {arch:?} batch {n_batch}"
                    );
                }
            }
        }
    }
}

#[test]
fn cancelling_ends_a_prefill_and_keeps_whole_batches() {
    let model = Tiny::Llama.model(DType::F32);
    let mut cancelled = session(&model, 4, 2);
    let cancel = cancelled.cancel_token();
    let seen = cancelled.hooks().prefill_each(&TOKENS, 0, |i, _| {
        if i == 5 {
            cancel.cancel();
        }
    });
    assert!(matches!(seen, Err(SessionError::Cancelled)));
    assert_eq!(cancelled.position(), 8);
    cancel.reset();
    let expected = logits(&mut session(&model, 64, 1), &TOKENS);
    assert_eq!(cancelled.prefilled(&TOKENS[8..]), &expected[11 * N_VOCAB..]);
}

#[test]
fn sessions_share_an_engine() {
    let model = Tiny::Gemma2.model(DType::Q8_0);
    let expected = logits(&mut session(&model, 1, 1), &TOKENS);
    let engine = engine(&model, 2);
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                for _ in 0..20 {
                    assert_eq!(
                        logits(&mut engine.session_with(&options(1)).unwrap(), &TOKENS),
                        expected
                    );
                }
            });
        }
    });
}

/// Bytes of a page of the tiny llama: two layers, keys and values, two heads of 16, 64 rows, 2
/// bytes.
const PAGE: u64 = 2 * 2 * 2 * 16 * 64 * 2;

/// Eight threads on one engine with little room; prompts share prefixes, and are cancelled at
/// random. Whoever finishes has the bits of a cold run, and in the end nothing is left but the
/// cache.
#[test]
fn many_threads_on_one_engine() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let budget = 40 * PAGE;
    let options = EngineOptions {
        kv_budget: Some(budget),
        prefix_budget: Some(20 * PAGE),
        ..Default::default()
    };
    let engine = Engine::new(&model, &options).unwrap();
    let tokens = |n: usize, seed: usize| {
        (0..n).map(move |i| ((i * 31 + seed * 7 + i * i % 11) % N_VOCAB) as u32)
    };
    let texts: Vec<Vec<u32>> = (0..12)
        .map(|i| {
            let shared = tokens(40 * (i % 4), 1);
            shared.chain(tokens(30 + 11 * i, i)).collect()
        })
        .collect();
    let with = |prefix: CacheMode, n_batch| SessionOptions {
        n_ctx: Some(2048),
        n_batch,
        prefix: prefix.into(),
        ..Default::default()
    };
    let expected: Vec<_> = texts
        .iter()
        .map(|text| {
            engine
                .session_with(&with(CacheMode::Off, 512))
                .unwrap()
                .prefilled(text)
        })
        .collect();
    let n_rounds = match std::env::var_os("RUVLLM_EMULATED") {
        Some(_) => 5,
        None => 60,
    };
    std::thread::scope(|scope| {
        for thread in 0..8usize {
            let (engine, texts, expected) = (&engine, &texts, &expected);
            scope.spawn(move || {
                let mut random = 77 * thread + 5;
                for _ in 0..n_rounds {
                    random = random.wrapping_mul(1_103_515_245).wrapping_add(12345) & 0x7fff_ffff;
                    let i = (random >> 8) % texts.len();
                    let options = with(CacheMode::On, 16 + (random >> 12) % 100);
                    let mut session = engine.session_with(&options).unwrap();
                    let cancel = session.cancel_token();
                    let outcome = std::thread::scope(|inner| {
                        if (random >> 16) % 3 == 0 {
                            inner.spawn(move || cancel.cancel());
                        }
                        session.prefill(&texts[i])
                    });
                    match outcome {
                        Ok(()) => assert_eq!(session.logits(), expected[i], "{i}"),
                        Err(
                            SessionError::Cancelled | SessionError::Kv(KvError::PoolFull { .. }),
                        ) => {
                            assert_eq!(session.tokens(), &texts[i][..session.position()]);
                        }
                        Err(e) => panic!("{e}"),
                    }
                    assert!(engine.pool().stats().used <= budget);
                    assert!(engine.pool().prefixes().bytes <= 20 * PAGE);
                }
            });
        }
    });
    let stats = engine.pool().prefixes();
    assert!(stats.hits > 0 && stats.evictions > 0, "{stats:?}");
    assert_eq!(stats.bytes, engine.pool().stats().used);
    engine.pool().clear_prefixes();
    assert_eq!(
        (engine.pool().stats().used, engine.pool().stats().n_pages),
        (0, 0)
    );
}
