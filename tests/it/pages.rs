//! Sessions over pages: what they take, what they share, and that windows which left a page can
//! come back.

use crate::run::{OnLevel, Pass, engine};
use crate::tiny::{N_VOCAB, Tiny};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::SessionError;
use ruvllm::arch::{Arch, KV_SPAN};
use ruvllm::engine::EngineOptions;
use ruvllm::kv::KvError;
use ruvllm::kv::KvPart;
use ruvllm::quant::DType;
use ruvllm::{Engine, SessionOptions};

fn options(n_ctx: usize) -> SessionOptions {
    SessionOptions {
        n_ctx: Some(n_ctx),
        kv_type: KvType::F32,
        ..Default::default()
    }
}

fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 31 + seed * 7 + i * i % 11) % N_VOCAB) as u32)
        .collect()
}

/// Scalar, as there a token's bits do not depend on whether it was computed alone.
fn model(tiny: Tiny) -> Model {
    tiny.model(DType::F32).on(Arch::scalar())
}

/// The logits after `tokens` in a session of their own.
fn fresh(model: &Model, tokens: &[u32]) -> Vec<f32> {
    engine(model, 1)
        .session_with(&options(4096))
        .unwrap()
        .prefilled(tokens)
}

#[test]
fn memory_follows_the_length() {
    let model = model(Tiny::Llama);
    let engine = engine(&model, 1);
    let pool = engine.pool();
    let mut session = engine.session_with(&options(131_072)).unwrap();
    assert_eq!(pool.stats().used, 0);
    session.prefill(&tokens(100, 0)).unwrap();
    let of_position = model
        .hparams()
        .attention()
        .map(|a| 4 * (a.n_k() + a.n_v()) as u64)
        .sum::<u64>();
    assert_eq!(
        (pool.stats().used, pool.stats().n_pages),
        (128 * of_position, 2)
    );
    session.rewind(64).unwrap();
    assert_eq!(pool.stats().used, 64 * of_position);
    let fork = session.fork().unwrap();
    assert_eq!(pool.stats().used, 64 * of_position);
    drop(session);
    assert_eq!(pool.stats().used, 64 * of_position);
    drop(fork);
    assert_eq!(
        (pool.stats().used, pool.stats().free),
        (0, 128 * of_position)
    );
}

/// A window of 4 leaves all pages but the last; a rewind computes again what it needs.
#[test]
fn rewinding_behind_a_window_leaves_no_trace() {
    let model = model(Tiny::Gemma2);
    let all = tokens(400, 1);
    for n_batch in [7, 512] {
        let engine = engine(&model, 1);
        let mut session = engine
            .session_with(&SessionOptions {
                n_batch,
                ..options(1024)
            })
            .unwrap();
        session.prefill(&all[..300]).unwrap();
        let page = model
            .hparams()
            .attention()
            .map(|a| 64 * 4 * (a.n_k() + a.n_v()) as u64)
            .max()
            .unwrap();
        // Five pages of the layer that sees all, and of the other one and a few checkpoints'.
        let stats = engine.pool().stats();
        assert!(stats.used <= (5 + 4) * page, "{stats:?}");
        for position in [299, 250, 100, 3, 0] {
            session.rewind(position).unwrap();
            assert_eq!(session.position(), position);
            assert_eq!(session.tokens(), &all[..position]);
            let mut fork = session.fork().unwrap();
            let expected = fresh(&model, &[&all[..position], &[5]].concat());
            assert_eq!(session.decoded(5), expected, "{position}");
            assert_eq!(fork.decoded(5), expected, "{position}");
            session.rewind(position).unwrap();
            assert_eq!(
                session.prefilled(&all[position..400]),
                fresh(&model, &all),
                "{position}"
            );
            assert_eq!(session.position(), 400);
        }
        assert_eq!(
            session.cache().keep(&[&all[..200], &[1, 2, 3]].concat()),
            200
        );
        assert_eq!(
            session.prefilled(&[1, 2, 3]),
            fresh(&model, &[&all[..200], &[1, 2, 3]].concat())
        );
    }
}

/// Contexts of several spans: one token's tasks take a span each, a batch's take them in turn.
#[test]
fn spans_and_threads_change_no_bits() {
    let n = 2 * KV_SPAN + 60;
    for tiny in [Tiny::Llama, Tiny::Gemma2] {
        for arch in Arch::available() {
            let model = tiny.model(DType::F32).on(arch);
            let decode = |n_threads| {
                let mut session = engine(&model, n_threads)
                    .session_with(&options(4096))
                    .unwrap();
                session.prefill(&tokens(n, 2)).unwrap();
                let mut logits = Vec::new();
                (0..4).for_each(|token| logits.extend_from_slice(&session.decoded(token)));
                logits
            };
            let one = decode(1);
            assert!(one == decode(2) && one == decode(3), "{tiny:?} {arch:?}");
            if arch.name() == "scalar" {
                let all = [tokens(n, 2), vec![0, 1, 2, 3]].concat();
                assert_eq!(one[3 * N_VOCAB..], fresh(&model, &all), "{tiny:?}");
            }
        }
    }
}

#[test]
fn a_full_pool_is_an_error_and_changes_nothing() {
    let model = model(Tiny::Llama);
    let first = engine(&model, 1);
    let mut session = first.session_with(&options(1024)).unwrap();
    session.prefill(&tokens(64, 3)).unwrap();
    let page = first.pool().stats().used;
    let engine = Engine::new(
        &model,
        &EngineOptions {
            kv_budget: Some(3 * page),
            ..Default::default()
        },
    )
    .unwrap();
    let pool = engine.pool();
    let mut sessions = [(); 2].map(|()| engine.session_with(&options(1024)).unwrap());
    let [a, b] = &mut sessions;
    a.prefill(&tokens(120, 3)).unwrap();
    b.prefill(&tokens(60, 3)).unwrap();
    let full = b.prefill(&tokens(20, 3)).unwrap_err();
    assert!(
        matches!(full, SessionError::Kv(KvError::PoolFull { need, used, budget }) if (need, used, budget) == (page, 3 * page, 3 * page))
    );
    assert_eq!((b.position(), pool.stats().used), (60, 3 * page));
    // What was given back is taken.
    a.rewind(64).unwrap();
    b.prefill(&tokens(20, 3)).unwrap();
    assert_eq!(pool.stats().used, 3 * page);
}

#[test]
fn a_key_too_large_for_half_precision_is_named() {
    let mut parts = Tiny::Llama.parts(DType::F32);
    parts.edit("blk.1.attn_k.weight", |w| {
        w.iter_mut().for_each(|w| *w *= 1e6)
    });
    let model = Model::from_gguf(parts.gguf()).unwrap();
    let half = SessionOptions {
        kv_type: KvType::F16,
        ..options(64)
    };
    let mut session = model.session_with(&half).unwrap();
    let error = session.prefill(&[1, 2, 3]).unwrap_err();
    assert!(
        matches!(
            error,
            SessionError::Kv(KvError::Overflow {
                layer: 1,
                part: KvPart::Key
            })
        ),
        "{error}"
    );
    assert_eq!(session.position(), 0);
    model
        .session_with(&options(64))
        .unwrap()
        .prefill(&[1, 2, 3])
        .unwrap();
}
