//! The prefix cache: what comes from it has the bits of what is computed, nobody sees what is not
//! theirs, and it stays within its budget.

use crate::common::emulated;
use crate::invariance::{Shape, model};
use crate::run::{OnLevel, Pass, engine, level};
use crate::tiny::{N_VOCAB, Tiny};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::arch::Arch;
use ruvllm::engine::{CacheMode, CachedTokens, EngineOptions, PrefixOptions, Reuse};
use ruvllm::kv::KvError;
use ruvllm::kv::{KvPolicy, KvTiers};
use ruvllm::lora::Adapter;
use ruvllm::quant::DType;
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Sampler, SamplerOptions, Session, SessionError};
use std::sync::Arc;

fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 31 + seed * 7 + i * i % 11) % N_VOCAB) as u32)
        .collect()
}

fn on(policy: KvPolicy) -> SessionOptions {
    let KvPolicy { k, v, tiers, .. } = policy;
    SessionOptions {
        n_ctx: Some(2048),
        kv_type: k,
        kv_type_v: Some(v),
        kv_tiers: tiers,
        prefix: CacheMode::On.into(),
        ..Default::default()
    }
}

pub(crate) fn plain() -> SessionOptions {
    on(KvPolicy::default())
}

fn any(options: SessionOptions) -> SessionOptions {
    SessionOptions {
        prefix: PrefixOptions {
            reuse: Reuse::Any,
            ..options.prefix.clone()
        },
        ..options
    }
}

pub(crate) fn cold(options: &SessionOptions) -> SessionOptions {
    SessionOptions {
        prefix: CacheMode::Off.into(),
        ..options.clone()
    }
}

/// Borders after one page and after three.
const NEAR: KvTiers = KvTiers {
    recent: 64,
    middle: 192,
};

fn policies() -> [KvPolicy; 4] {
    let mixed = KvPolicy {
        k: KvType::Q8,
        v: KvType::Q4,
        tiers: None,
    };
    let tiered = KvPolicy {
        tiers: Some(NEAR),
        ..KvPolicy::default()
    };
    [KvPolicy::default(), KvType::F32.into(), mixed, tiered]
}

fn stored(engine: &Engine, options: &SessionOptions, tokens: &[u32]) {
    engine
        .session_with(options)
        .unwrap()
        .prefill(tokens)
        .unwrap();
}

fn prompt(n: usize) -> CachedTokens {
    CachedTokens {
        prompt: n,
        generated: 0,
    }
}

/// mistral.rs !2311: a prompt that is in the cache as a whole was off by one. Prompts that agree
/// with a cached one of 200 tokens in 1, 63, 64, 65, 127 to 129, 199, 200 tokens, and in all of
/// them.
#[test]
fn hits_of_any_length_have_the_bits_of_a_cold_run() {
    let others = [Arch::scalar()].into_iter().filter(|_| !emulated());
    for arch in [level()].into_iter().chain(others) {
        for tiny in Tiny::ALL {
            let model = tiny.model(DType::Q8_0).on(arch);
            for policy in policies().into_iter().take(if emulated() { 1 } else { 4 }) {
                let options = on(policy);
                let by_checkpoint = tiny == Tiny::Gemma2 || policy.tiers.is_some();
                let engine = engine(&model, 2);
                let all = tokens(200, 1);
                for n in [0, 1, 63, 64, 65, 127, 128, 129, 199, 200] {
                    for n_more in [0, 1, 90] {
                        engine.pool().clear_prefixes();
                        stored(&engine, &options, &all);
                        let mut text = all[..n].to_vec();
                        text.extend(tokens(n_more, 3).iter().map(|t| (t + 1) % N_VOCAB as u32));
                        if text.is_empty() {
                            continue;
                        }
                        let same = all
                            .iter()
                            .zip(&text)
                            .take_while(|(a, b)| a == b)
                            .count()
                            .min(text.len() - 1);
                        let name = format!("{arch:?} {tiny:?} {policy:?} {n}+{n_more}");
                        let mut session = engine.session_with(&options).unwrap();
                        let logits = session.prefilled(&text);
                        let cached = session.sequence().cached_tokens();
                        match by_checkpoint {
                            false => assert_eq!(cached, prompt(same), "{name}"),
                            // The end of the cached prompt, and its newest page border.
                            true => {
                                let expected =
                                    [200, 192].into_iter().find(|&pos| pos <= same).unwrap_or(0);
                                assert!(
                                    cached.prompt >= expected && cached.prompt <= same,
                                    "{name}: {cached:?}"
                                );
                            }
                        }
                        let mut cold = engine.session_with(&cold(&options)).unwrap();
                        assert_eq!(logits, cold.prefilled(&text), "{name}");
                        assert_eq!(
                            (cold.sequence().cached_tokens(), session.tokens()),
                            (prompt(0), &text[..]),
                            "{name}"
                        );
                        assert_eq!(session.decoded(3), cold.decoded(3), "{name}");
                        // A rewind into what was reused.
                        [&mut session, &mut cold]
                            .into_iter()
                            .for_each(|s| s.rewind(text.len() / 2).unwrap());
                        assert_eq!(
                            session.prefilled(&[9, 8]),
                            cold.prefilled(&[9, 8]),
                            "{name}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn logits_of_tokens_in_the_middle_are_computed() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let engine = engine(&model, 1);
    let all = tokens(150, 2);
    stored(&engine, &plain(), &all);
    let each = |options: &SessionOptions| {
        let mut session = engine.session_with(options).unwrap();
        let mut rows = Vec::new();
        session
            .hooks()
            .prefill_each(&all, 100, |i, logits| rows.push((i, logits.to_vec())))
            .unwrap();
        (rows, session.sequence().cached_tokens())
    };
    let (warm, of_cold) = (each(&plain()), each(&cold(&plain())));
    assert_eq!(
        warm.0.iter().map(|row| row.0).collect::<Vec<_>>(),
        (100..150).collect::<Vec<_>>()
    );
    assert_eq!((warm.0, warm.1), (of_cold.0, prompt(100)));
}

/// llama.cpp #27148: requests saw others' prompts in `cached_tokens`.
#[test]
fn salts_keep_tenants_apart() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let engine = engine(&model, 1);
    let canary = tokens(150, 1);
    let of = |salt: &str| {
        let prefix = PrefixOptions {
            salt: salt.into(),
            reuse: Reuse::Any,
            ..CacheMode::On.into()
        };
        SessionOptions { prefix, ..plain() }
    };
    stored(&engine, &of("a"), &canary);
    for salt in ["b", "", "A", "a "] {
        let mut session = engine
            .session_with(&SessionOptions {
                prefix: PrefixOptions {
                    cache: CacheMode::ReadOnly,
                    ..of(salt).prefix
                },
                ..plain()
            })
            .unwrap();
        session.prefill(&canary).unwrap();
        assert_eq!(session.sequence().cached_tokens().total(), 0, "{salt:?}");
    }
    assert_eq!(
        (
            engine.pool().prefixes().lookups,
            engine.pool().prefixes().hits
        ),
        (5, 0)
    );
    let mut session = engine.session_with(&of("a")).unwrap();
    session.prefill(&canary).unwrap();
    assert_eq!(session.sequence().cached_tokens(), prompt(149));
}

/// Everything that bits depend on is a key of its own.
#[test]
fn what_bits_depend_on_is_not_mixed() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let engine = engine(&model, 1);
    let all = tokens(100, 1);
    stored(&engine, &plain(), &all);
    let variants = [
        SessionOptions {
            exact: true,
            ..plain()
        },
        SessionOptions {
            kv_type: KvType::F32,
            ..plain()
        },
        SessionOptions {
            kv_type_v: Some(KvType::Q8),
            ..plain()
        },
        SessionOptions {
            kv_tiers: Some(NEAR),
            ..plain()
        },
        SessionOptions {
            kv_tiers: Some(KvTiers::default()),
            ..plain()
        },
    ];
    for options in variants {
        let mut session = engine.session_with(&options).unwrap();
        session.prefill(&all).unwrap();
        assert_eq!(session.sequence().cached_tokens(), prompt(0), "{options:?}");
        // Its own it finds.
        drop(session);
        let mut session = engine.session_with(&options).unwrap();
        let logits = session.prefilled(&all);
        assert!(
            session.sequence().cached_tokens().total() > 0,
            "{options:?}"
        );
        assert_eq!(
            logits,
            engine
                .session_with(&cold(&options))
                .unwrap()
                .prefilled(&all),
            "{options:?}"
        );
    }
    // Sizes of batches are none.
    let mut session = engine
        .session_with(&SessionOptions {
            n_batch: 7,
            ..plain()
        })
        .unwrap();
    session.prefill(&all).unwrap();
    assert_eq!(session.sequence().cached_tokens(), prompt(99));
}

/// Phi 3's long rope has other factors for long contexts.
#[test]
fn ropes_are_not_mixed() {
    let mut parts = Tiny::Phi3.parts(DType::F32);
    parts.set("phi3.rope.scaling.original_context_length", 128u32);
    parts.vector("rope_factors_short.weight", &[1.0; 8]);
    parts.vector("rope_factors_long.weight", &[1.5; 8]);
    let model = crate::run::open(parts.gguf()).unwrap();
    let engine = engine(&model, 1);
    let all = tokens(90, 1);
    let of = |n_ctx| SessionOptions {
        n_ctx: Some(n_ctx),
        ..plain()
    };
    stored(&engine, &of(128), &all);
    for (n_ctx, hit) in [(256, 0), (100, 89)] {
        let mut session = engine.session_with(&of(n_ctx)).unwrap();
        let logits = session.prefilled(&all);
        assert_eq!(session.sequence().cached_tokens(), prompt(hit), "{n_ctx}");
        assert_eq!(
            logits,
            engine
                .session_with(&cold(&of(n_ctx)))
                .unwrap()
                .prefilled(&all),
            "{n_ctx}"
        );
    }
}

/// A conversation: 70 tokens of a prompt, 80 generated ones, 30 of a prompt.
fn converse(session: &mut Session, text: &[u32]) -> Vec<f32> {
    session.prefill(&text[..70]).unwrap();
    text[70..150]
        .iter()
        .for_each(|&token| session.decode(token).unwrap());
    session.prefilled(&text[150..])
}

#[test]
fn generated_tokens_match_where_it_is_asked_for() {
    let differs = level().name() != "scalar";
    for policy in policies() {
        let model = Tiny::Llama.model(DType::Q8_0).on(level());
        let engine = engine(&model, 1);
        let text = tokens(180, 4);
        let mut first = engine.session_with(&on(policy)).unwrap();
        let generated = converse(&mut first, &text);
        drop(first);
        let read_only = |options: SessionOptions| {
            let prefix = PrefixOptions {
                cache: CacheMode::ReadOnly,
                ..options.prefix.clone()
            };
            SessionOptions { prefix, ..options }
        };
        // The prompt alone, and the bits of a cold run.
        let mut session = engine.session_with(&read_only(on(policy))).unwrap();
        let logits = session.prefilled(&text);
        let cold = engine
            .session_with(&cold(&on(policy)))
            .unwrap()
            .prefilled(&text);
        assert!(
            session.sequence().cached_tokens().prompt <= 70
                && session.sequence().cached_tokens().generated == 0
        );
        assert_eq!(logits, cold, "{policy:?}");
        assert!(
            !differs || cold != generated,
            "kinds have the same bits: nothing is tested"
        );
        // All but the last, and the bits of the run that generated.
        let mut session = engine.session_with(&any(read_only(on(policy)))).unwrap();
        let logits = session.prefilled(&text);
        let cached = session.sequence().cached_tokens();
        match policy.tiers {
            None => assert_eq!(
                cached,
                CachedTokens {
                    prompt: 70 + 29,
                    generated: 80
                }
            ),
            Some(_) => assert!(cached.generated > 0, "{cached:?}"),
        }
        assert_eq!(logits, generated, "{policy:?}");
    }
}

/// The same tokens as a prompt and as generated ones are two entries, and `exact` makes them one.
#[test]
fn kinds_are_kept_apart() {
    let model = Tiny::Llama.model(DType::Q8_0).on(level());
    let engine = engine(&model, 1);
    let text = tokens(180, 4);
    converse(&mut engine.session_with(&plain()).unwrap(), &text);
    stored(&engine, &plain(), &text);
    let mut session = engine.session_with(&plain()).unwrap();
    session.prefill(&text).unwrap();
    assert_eq!(session.sequence().cached_tokens(), prompt(179));
    drop(session);
    let exact = SessionOptions {
        exact: true,
        ..plain()
    };
    let generated = converse(&mut engine.session_with(&exact).unwrap(), &text);
    let mut session = engine.session_with(&exact).unwrap();
    assert_eq!(session.prefilled(&text), generated);
    assert_eq!(session.sequence().cached_tokens(), prompt(179));
}

#[test]
fn modes_and_least_lengths() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let engine = engine(&model, 1);
    let pool = engine.pool();
    let all = tokens(100, 1);
    let of = |cache, min_cache_tokens| SessionOptions {
        prefix: PrefixOptions {
            cache,
            min_cache_tokens,
            ..PrefixOptions::default()
        },
        ..plain()
    };
    for options in [
        of(CacheMode::Off, 0),
        of(CacheMode::ReadOnly, 0),
        of(CacheMode::On, 101),
    ] {
        stored(&engine, &options, &all);
        assert_eq!(
            (pool.prefixes().bytes, pool.stats().used),
            (0, 0),
            "{options:?}"
        );
    }
    stored(&engine, &of(CacheMode::On, 100), &all);
    assert_eq!(pool.prefixes().bytes, pool.stats().used);
    for (cache, min, n_text, hit) in [
        (CacheMode::Off, 0, 100, 0),
        (CacheMode::ReadOnly, 0, 100, 99),
        (CacheMode::ReadOnly, 99, 100, 99),
        (CacheMode::ReadOnly, 100, 100, 0),
        (CacheMode::ReadOnly, 10, 11, 10),
        (CacheMode::ReadOnly, 11, 11, 0),
    ] {
        let mut session = engine.session_with(&of(cache, min)).unwrap();
        session.prefill(&all[..n_text]).unwrap();
        assert_eq!(
            session.sequence().cached_tokens(),
            prompt(hit),
            "{cache:?} {min} {n_text}"
        );
        // What comes later in a session is not looked up.
        session.prefill(&all[..20]).unwrap();
        assert_eq!(session.sequence().cached_tokens(), prompt(0));
    }
    let stats = pool.prefixes();
    assert_eq!(
        (stats.hits, stats.tokens_reused, stats.evictions),
        (3, 99 + 99 + 10, 0)
    );
    pool.clear_prefixes();
    assert_eq!((pool.prefixes().bytes, pool.stats().used), (0, 0));
}

/// Bytes of a page of the tiny llama: two layers, keys and values, two heads of 16, 64 rows, 2
/// bytes.
const PAGE: u64 = 2 * 2 * 2 * 16 * 64 * 2;

/// Prompts of two pages each that differ from the first token on.
fn apart(i: usize) -> Vec<u32> {
    [vec![i as u32], tokens(127, i)].concat()
}

#[test]
fn the_least_recently_used_goes_first_and_from_its_end() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let options = EngineOptions {
        prefix_budget: Some(6 * PAGE),
        ..Default::default()
    };
    let engine = Engine::new(&model, &options).unwrap();
    let hit = |i: usize| {
        let prefix = CacheMode::ReadOnly.into();
        let mut session = engine
            .session_with(&SessionOptions { prefix, ..plain() })
            .unwrap();
        session.prefill(&[&apart(i)[..], &[1]].concat()).unwrap();
        session.sequence().cached_tokens().prompt
    };
    (0..3).for_each(|i| stored(&engine, &plain(), &apart(i)));
    assert_eq!(engine.pool().prefixes().bytes, 6 * PAGE);
    assert_eq!([0, 1, 2].map(hit), [128; 3]);
    assert_eq!(hit(0), 128);
    // One page more: the second page of the second prompt goes.
    stored(&engine, &plain(), &apart(3)[..64]);
    assert_eq!(engine.pool().prefixes().evictions, 1);
    assert_eq!([0, 1, 2].map(hit), [128, 64, 128]);
    stored(&engine, &plain(), &apart(4));
    // The fourth prompt was used least recently, then the first.
    assert_eq!([3, 0, 1, 2, 4].map(hit), [0, 64, 64, 128, 128]);
    assert!(engine.pool().prefixes().bytes <= 6 * PAGE);
    engine.pool().set_prefix_budget(PAGE);
    assert_eq!(engine.pool().prefixes().bytes, PAGE);
    engine.pool().set_prefix_budget(0);
    stored(&engine, &plain(), &apart(5));
    assert_eq!(
        (engine.pool().prefixes().bytes, engine.pool().stats().used),
        (0, 0)
    );
}

/// Cached pages count in the pool's budget, and go when a sequence needs pages, but never those in
/// use. Of 20 pages the high mark is 17, the low one 14.
#[test]
fn sequences_take_the_room_of_the_cache() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let engine = Engine::new(
        &model,
        &EngineOptions {
            kv_budget: Some(20 * PAGE),
            ..Default::default()
        },
    )
    .unwrap();
    let pool = engine.pool();
    let pages = || {
        (
            pool.stats().used / PAGE,
            pool.prefixes().bytes / PAGE,
            pool.prefixes().evictions,
        )
    };
    (0..8).for_each(|i| stored(&engine, &plain(), &apart(i)));
    assert_eq!(pages(), (16, 16, 0));
    let mut user = engine.session_with(&plain()).unwrap();
    user.prefill(&[&apart(0)[..100], &[1]].concat()).unwrap();
    assert_eq!(user.sequence().cached_tokens(), prompt(100));
    // Its first page is in use; of its second it has a copy.
    assert_eq!(pages(), (17, 16, 0));
    let mut other = engine.session_with(&cold(&plain())).unwrap();
    other.prefill(&tokens(64, 9)).unwrap();
    // It is one of 14 pages.
    assert_eq!(pages(), (14, 12, 4));
    other.prefill(&tokens(17 * 64, 9)).unwrap();
    assert_eq!(pages(), (20, 1, 15));
    // All that is left is in use.
    let full = other.prefill(&[1]).unwrap_err();
    assert!(
        matches!(full, SessionError::Kv(KvError::PoolFull { need: PAGE, .. })),
        "{full}"
    );
    let logits = user.decoded(7);
    let mut cold = engine.session_with(&cold(&plain())).unwrap();
    drop(other);
    cold.prefill(&[&apart(0)[..100], &[1]].concat()).unwrap();
    assert_eq!(logits, cold.decoded(7));
}

/// An adapter counts once, for as long as a sequence has it, and cached pages make room for it.
#[test]
fn adapters_take_room_of_the_pool() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let of_rank = |rank| Arc::new(Adapter::zeros(&model, rank, 1, |_| true).unwrap());
    let (adapter, small) = (of_rank(8), of_rank(1));
    let bytes = adapter.bytes();
    let budget = 10 * PAGE + bytes;
    let engine = Engine::new(
        &model,
        &EngineOptions {
            kv_budget: Some(budget),
            ..Default::default()
        },
    )
    .unwrap();
    let adapters = || engine.pool().stats().adapters;
    while engine.pool().stats().used + PAGE <= budget * 85 / 100 {
        let i = (engine.pool().stats().used / PAGE) as u32;
        stored(&engine, &plain(), &[&[i][..], &tokens(63, 1)].concat());
    }
    assert_eq!(engine.pool().prefixes().evictions, 0);
    let mut one = engine.session_with(&cold(&plain())).unwrap();
    let id = one.adapters().attach(Arc::clone(&adapter), 1.0).unwrap();
    assert!(engine.pool().prefixes().evictions > 0);
    assert!(engine.pool().stats().used + bytes <= budget * 70 / 100);
    let mut other = engine.session_with(&cold(&plain())).unwrap();
    other.adapters().attach(Arc::clone(&adapter), 0.5).unwrap();
    let fork = other.fork().unwrap();
    assert_eq!(
        (
            adapters(),
            engine.memory().adapters,
            engine.pool().stats().left()
        ),
        (bytes, bytes, 10 * PAGE - engine.pool().stats().used)
    );
    // What is left is ten pages.
    let full = one.prefill(&tokens(10 * 64 + 1, 1)).unwrap_err();
    assert!(
        matches!(full, SessionError::Kv(KvError::PoolFull { .. })),
        "{full}"
    );
    one.prefill(&tokens(10 * 64 - one.position(), 1)).unwrap();
    assert_eq!(engine.pool().stats().left(), 0);
    // Training puts another in its place; others keep the old one.
    one.adapters().update(id, |_| ()).unwrap();
    assert_eq!(adapters(), 2 * bytes);
    one.adapters().attach(Arc::clone(&small), 1.0).unwrap();
    assert_eq!(adapters(), 2 * bytes + small.bytes());
    drop((other, fork));
    one.adapters().detach(id).unwrap();
    assert_eq!(adapters(), small.bytes());
    drop(one);
    assert_eq!(
        (adapters(), engine.pool().stats().left()),
        (0, budget - engine.pool().stats().used)
    );
}

/// What fills the pool above 85 of its 100 pages takes it down to 70 at once, and so seldom: by
/// hand, the 86th page makes room for itself below the mark, and from then on every sixteenth.
#[test]
fn a_pool_at_its_limit_gives_back_many_pages_at_a_time() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let engine = Engine::new(
        &model,
        &EngineOptions {
            kv_budget: Some(100 * PAGE),
            ..Default::default()
        },
    )
    .unwrap();
    for i in 0..300 {
        let text = [&[i % 47, i / 47][..], &tokens(126, 1)].concat();
        stored(&engine, &plain(), &text);
        assert!(engine.pool().stats().used <= 85 * PAGE);
    }
    let stats = engine.pool().prefixes();
    assert_eq!(
        (stats.hits, stats.rounds, stats.evictions),
        (0, 33, 33 * 16)
    );
}

/// Two prompts that part inside a page, inside an edge and at their ends; the tree holds what they
/// share once.
#[test]
fn partial_edges_match_and_split() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let engine = engine(&model, 1);
    let all = tokens(300, 1);
    let branch = |n: usize, seed: u32| [&all[..n], &[seed; 40]].concat();
    stored(&engine, &plain(), &all);
    let pages = |n: u64| assert_eq!(engine.pool().prefixes().bytes, n * PAGE);
    pages(5);
    // By hand: page 1 with its own rows from 100 on, and page 2; pages 2 and 3; page 4, of which
    // the tree has 44 rows.
    let more = [
        (branch(100, 3), 100, 2),
        (branch(128, 4), 128, 1),
        (branch(300, 5), 299 + 1, 2),
        (branch(100, 3), 139, 0),
    ];
    let mut total = 5;
    for (text, hit, new) in more {
        let mut session = engine.session_with(&plain()).unwrap();
        let logits = session.prefilled(&text);
        assert_eq!(session.sequence().cached_tokens(), prompt(hit), "{text:?}");
        assert_eq!(
            logits,
            engine
                .session_with(&cold(&plain()))
                .unwrap()
                .prefilled(&text)
        );
        drop(session);
        total += new;
        pages(total);
    }
    // A prefix of what is there adds nothing.
    stored(&engine, &plain(), &all[..77]);
    pages(total);
    assert_eq!(engine.pool().stats().used, total * PAGE);
    assert_eq!(engine.pool().stats().n_pages as u64, total);
}

#[test]
fn forks_and_unloaded_sessions_come_back() {
    for (tiny, policy) in [
        (Tiny::Llama, policies()[0]),
        (Tiny::Gemma2, policies()[0]),
        (Tiny::Llama, policies()[3]),
    ] {
        let model = tiny.model(DType::Q8_0);
        for cache in [CacheMode::On, CacheMode::Off] {
            let engine = engine(&model, 1);
            let options = SessionOptions {
                prefix: cache.into(),
                ..on(policy)
            };
            let text = tokens(180, 1);
            let mut session = engine.session_with(&options).unwrap();
            let logits = converse(&mut session, &text);
            let mut fork = session.fork().unwrap();
            session.cache().unload();
            assert_eq!(
                (session.logits(), session.tokens()),
                (&logits[..], &text[..])
            );
            assert_eq!(session.state().memory().kv.total(), 0);
            let next = fork.decoded(4);
            drop(fork);
            assert_eq!(session.decoded(4), next, "{tiny:?} {cache:?}");
            assert_eq!(
                engine.pool().prefixes().hits,
                u64::from(cache == CacheMode::On)
            );
            // What was dropped meanwhile is computed again, each token with its own arithmetic.
            session.cache().unload();
            engine.pool().clear_prefixes();
            assert_eq!(engine.pool().stats().used, 0);
            session.rewind(180).unwrap();
            assert_eq!(session.decoded(4), next, "{tiny:?} {cache:?}");
        }
    }
}

/// A generation tells how much of its prompt came from the cache.
#[test]
fn generations_tell_what_they_reused() {
    let model = Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/ruvllm-rust-6m-q8_0.gguf"
    ))
    .unwrap();
    let engine = engine(&model, 2);
    let prefix: PrefixOptions = CacheMode::On.into();
    let generate = || {
        let options = SessionOptions {
            prefix: prefix.clone(),
            ..Default::default()
        };
        let mut session = engine.session_with(&options).unwrap();
        let mut sampler = Sampler::new(SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        })
        .unwrap();
        let mut generation = session
            .generate("Ownership is", &mut sampler)
            .unwrap()
            .max_tokens(8);
        let text: String = generation
            .by_ref()
            .map(|piece| piece.unwrap().text)
            .collect();
        let finish = generation.finish().unwrap();
        (text, finish.n_prompt, finish.n_cached)
    };
    let (first, second) = (generate(), generate());
    assert_eq!((first.0, first.2), (second.0, prompt(0)));
    assert_eq!((second.1, second.2), (1, prompt(first.1 - 1)));
}

/// What a thread leaves that panics is not trusted.
#[test]
fn panicking_threads_leave_nothing() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let engine = engine(&model, 1);
    let mut session = engine.session_with(&plain()).unwrap();
    session.prefill(&tokens(100, 1)).unwrap();
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _session = session;
        std::panic::resume_unwind(Box::new(()));
    }))
    .unwrap_err();
    assert_eq!(
        (engine.pool().prefixes().bytes, engine.pool().stats().used),
        (0, 0)
    );
}

/// A folder of its own that goes when the test is over.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder =
            std::env::temp_dir().join(format!("ruvllm-prefix-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        Folder(folder)
    }

    /// An engine that has seen nothing but the folder.
    fn engine(&self, model: &Model, budget: u64) -> Engine {
        let (prefix_folder, prefix_folder_budget) = (Some(self.0.clone()), Some(budget));
        Engine::new(
            model,
            &EngineOptions {
                prefix_folder,
                prefix_folder_budget,
                ..Default::default()
            },
        )
        .unwrap()
    }

    fn files(&self) -> Vec<std::path::PathBuf> {
        let mut files: Vec<_> = std::fs::read_dir(&self.0)
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        files.sort();
        files
    }

    fn bytes(&self) -> u64 {
        self.files()
            .iter()
            .filter_map(|file| Some(std::fs::metadata(file).ok()?.len()))
            .sum()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Another process finds whole pages of what this one left, and only what is its own: model,
/// precision, adapters, salt and kinds.
#[test]
fn blocks_outlive_the_engine() {
    let folder = Folder::new("blocks");
    let model = Tiny::Llama.model(DType::Q8_0);
    let all = tokens(200, 1);
    for policy in [policies()[0], policies()[2]] {
        stored(&folder.engine(&model, u64::MAX), &on(policy), &all);
        for (n, more, hit) in [
            (200, 0, 192),
            (193, 0, 192),
            (192, 0, 128),
            (150, 30, 128),
            (63, 0, 0),
            (0, 80, 0),
        ] {
            let text = [&all[..n], &vec![49; more]].concat();
            let engine = folder.engine(&model, u64::MAX);
            let read_only = SessionOptions {
                prefix: CacheMode::ReadOnly.into(),
                ..on(policy)
            };
            let mut session = engine.session_with(&read_only).unwrap();
            let logits = session.prefilled(&text);
            assert_eq!(
                session.sequence().cached_tokens(),
                prompt(hit),
                "{policy:?} {n}"
            );
            assert_eq!(engine.pool().prefixes().tokens_loaded, hit as u64);
            assert_eq!(
                logits,
                engine
                    .session_with(&cold(&on(policy)))
                    .unwrap()
                    .prefilled(&text),
                "{policy:?} {n}"
            );
        }
    }
    assert_eq!(folder.files().len(), 6);
    // A pool that is full ends the search, and the session holds what it found.
    let options = EngineOptions {
        prefix_folder: Some(folder.0.clone()),
        kv_budget: Some(PAGE),
        ..Default::default()
    };
    let mut session = Engine::new(&model, &options)
        .unwrap()
        .session_with(&plain())
        .unwrap();
    assert!(matches!(
        session.prefill(&all),
        Err(SessionError::Kv(KvError::PoolFull { .. }))
    ));
    assert_eq!(
        (session.tokens(), session.sequence().cached_tokens()),
        (&all[..64], prompt(64))
    );
    drop(session);
    let salted = PrefixOptions {
        salt: "b".into(),
        ..CacheMode::ReadOnly.into()
    };
    let others = [
        (
            model.clone(),
            SessionOptions {
                prefix: salted,
                ..plain()
            },
        ),
        (
            model.clone(),
            SessionOptions {
                kv_type: KvType::Q6,
                ..plain()
            },
        ),
        (
            model,
            SessionOptions {
                exact: true,
                ..plain()
            },
        ),
        (Tiny::Llama.model(DType::F32), plain()),
    ];
    for (model, options) in others {
        let engine = folder.engine(&model, u64::MAX);
        let mut session = engine.session_with(&options).unwrap();
        session.prefill(&all).unwrap();
        assert_eq!(session.sequence().cached_tokens(), prompt(0), "{options:?}");
    }
}

/// Whatever gives something back in time, or overwrites it: windows, ages, both, recurrent layers.
pub(crate) fn forgetful() -> Vec<(String, Model, SessionOptions)> {
    let (ages, batches) = (on(policies()[3]), |options| SessionOptions {
        n_batch: 100,
        ..options
    });
    let (llama, gemma) = (
        Tiny::Llama.model(DType::Q8_0),
        Tiny::Gemma2.model(DType::Q8_0),
    );
    let mut all = vec![
        ("windows".to_string(), gemma.clone(), batches(plain())),
        ("ages".into(), llama, batches(ages.clone())),
        ("windows and ages".into(), gemma, batches(ages.clone())),
        (
            "recurrent with ages".into(),
            model(Shape::Delta, DType::Q8_0),
            batches(ages),
        ),
    ];
    let recurrent = Shape::RECURRENT.into_iter();
    all.extend(recurrent.map(|shape| {
        (
            format!("{shape:?}"),
            model(shape, DType::Q8_0),
            batches(plain()),
        )
    }));
    all.truncate(if emulated() { 2 } else { all.len() });
    all
}

/// Who asks the same again, after an answer of any length, computes the prompt's last page at most.
#[test]
fn a_repeated_prompt_is_found() {
    let (n, n_answer) = if emulated() { (150, 70) } else { (700, 300) };
    let all = tokens(n, 1);
    for (name, model, options) in forgetful() {
        let engine = model.engine().unwrap();
        let mut session = engine.session_with(&options).unwrap();
        session.prefill(&all).unwrap();
        (0..n_answer).for_each(|i| session.decode(i % 50).unwrap());
        drop(session);
        let mut again = engine.session_with(&options).unwrap();
        let mut cold = engine.session_with(&cold(&options)).unwrap();
        assert_eq!(again.prefilled(&all), cold.prefilled(&all), "{name}");
        assert!(
            again.sequence().cached_tokens().prompt >= (n - 1) / 64 * 64,
            "{name}: {:?}",
            again.sequence().cached_tokens()
        );
    }
}

/// Another process goes on at the checkpoints of what this one left, with the bits of a cold run,
/// and only at its own.
#[test]
fn checkpoints_outlive_the_engine() {
    let n = if emulated() { 200 } else { 600 };
    let all = tokens(n, 1);
    for (name, model, options) in forgetful() {
        let folder = Folder::new("checkpoints");
        let read_only = SessionOptions {
            prefix: PrefixOptions {
                cache: CacheMode::ReadOnly,
                ..Default::default()
            },
            ..options.clone()
        };
        let first = folder.engine(&model, u64::MAX);
        let mut session = first.session_with(&options).unwrap();
        session.prefill(&all[..n - 150]).unwrap();
        session.prefill(&all[n - 150..]).unwrap();
        (0..70).for_each(|i| session.decode(i % 50).unwrap());
        drop(session);
        let mut n_hits = 0;
        for (same, more) in [(n, 30), (n, 0), (n - 1, 1), (n - 150, 9), (40, 80)] {
            let text = [&all[..same], &vec![49; more]].concat();
            let name = format!("{name}, {same} + {more}");
            // As many as who still has them in memory.
            let expected = first
                .session_with(&read_only)
                .unwrap()
                .cache()
                .reuse(&text)
                .unwrap()
                .prompt;
            n_hits += usize::from(expected > 0);
            let engine = folder.engine(&model, u64::MAX);
            let mut session = engine.session_with(&any(read_only.clone())).unwrap();
            let mut cold = engine.session_with(&cold(&options)).unwrap();
            assert_eq!(session.prefilled(&text), cold.prefilled(&text), "{name}");
            assert_eq!(
                session.sequence().cached_tokens(),
                prompt(expected),
                "{name}"
            );
            assert_eq!(
                engine.pool().prefixes().tokens_loaded,
                expected as u64,
                "{name}"
            );
            assert_eq!(session.decoded(3), cold.decoded(3), "{name}");
            // Both recompute what they have no more.
            [&mut session, &mut cold]
                .into_iter()
                .for_each(|s| s.rewind(text.len() / 2).unwrap());
            assert_eq!(
                session.prefilled(&[9, 8]),
                cold.prefilled(&[9, 8]),
                "{name}"
            );
            // What goes on longer, and is found again.
            let longer = tokens(300, 5);
            assert_eq!(
                session.prefilled(&longer),
                cold.prefilled(&longer),
                "{name}"
            );
        }
        assert!(n_hits > 0, "{name}");
        let salted = PrefixOptions {
            salt: "b".into(),
            ..CacheMode::ReadOnly.into()
        };
        let farther = KvTiers {
            recent: 128,
            middle: 192,
        };
        for others in [
            SessionOptions {
                prefix: salted,
                ..options.clone()
            },
            SessionOptions {
                kv_type: KvType::Q8,
                kv_type_v: None,
                kv_tiers: None,
                ..options.clone()
            },
            SessionOptions {
                kv_tiers: Some(farther),
                ..options.clone()
            },
            SessionOptions {
                exact: true,
                ..options.clone()
            },
        ] {
            let mut session = folder
                .engine(&model, u64::MAX)
                .session_with(&others)
                .unwrap();
            session.prefill(&all).unwrap();
            assert_eq!(
                session.sequence().cached_tokens(),
                prompt(0),
                "{name}: {others:?}"
            );
        }
    }
}

/// A file that is torn anywhere, or of which a bit flips, is a miss or leaves a shorter hit; never
/// another answer. It is written anew.
#[test]
fn damaged_checkpoints_are_misses() {
    let all = tokens(300, 1);
    for (name, model, options) in forgetful() {
        let folder = Folder::new("torn");
        stored(&folder.engine(&model, u64::MAX), &options, &all);
        let expected = engine(&model, 1)
            .session_with(&cold(&options))
            .unwrap()
            .prefilled(&all);
        let whole: Vec<_> = folder
            .files()
            .into_iter()
            .map(|file| (std::fs::read(&file).unwrap(), file))
            .collect();
        let mut state = 7usize;
        for (bytes, file) in &whole {
            for flips in [false, true] {
                state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
                let place = (state >> 33) % bytes.len();
                let mut damaged = bytes.clone();
                if flips {
                    damaged[place] ^= 1 << (place % 8)
                } else {
                    damaged.truncate(place)
                }
                std::fs::write(file, &damaged).unwrap();
                let engine = folder.engine(&model, u64::MAX);
                let mut session = engine.session_with(&options).unwrap();
                assert_eq!(
                    session.prefilled(&all),
                    expected,
                    "{name}: {place} of {}",
                    bytes.len()
                );
                let seen = engine.pool().prefixes().damaged_blocks == 1;
                assert!(
                    seen || session.sequence().cached_tokens() == prompt(256),
                    "{name}: {place} of {}",
                    bytes.len()
                );
                drop(session);
                // What was of no use here is healed by who needs it.
                if seen {
                    assert_eq!(std::fs::metadata(file).unwrap().len(), bytes.len() as u64);
                } else {
                    std::fs::write(file, bytes).unwrap();
                }
                let mut session = folder
                    .engine(&model, u64::MAX)
                    .session_with(&options)
                    .unwrap();
                assert_eq!(
                    (session.prefilled(&all), session.sequence().cached_tokens()),
                    (expected.clone(), prompt(256)),
                    "{name}"
                );
            }
        }
        // Missing blocks and checkpoints, as eviction leaves them.
        for (_, file) in &whole {
            std::fs::remove_file(file).unwrap();
            let mut session = folder
                .engine(&model, u64::MAX)
                .session_with(&options)
                .unwrap();
            assert_eq!(session.prefilled(&all), expected, "{name}");
        }
    }
}

/// Whatever a crash leaves of a block, and whichever bit flips: what is damaged is a miss, and is
/// written anew.
#[test]
fn damaged_blocks_are_misses() {
    let folder = Folder::new("damaged");
    let model = Tiny::Llama.model(DType::Q8_0);
    let all = tokens(130, 1);
    stored(&folder.engine(&model, u64::MAX), &plain(), &all);
    let whole: Vec<_> = folder
        .files()
        .into_iter()
        .map(|file| (std::fs::read(&file).unwrap(), file))
        .collect();
    assert_eq!(whole.len(), 2);
    let expected = engine(&model, 1)
        .session_with(&cold(&plain()))
        .unwrap()
        .prefilled(&all);
    let second = whole.iter().map(|(bytes, _)| bytes.len()).max().unwrap();
    for (bytes, file) in &whole {
        let left = if bytes.len() == second { 64 } else { 0 };
        let step = bytes.len() / if emulated() { 5 } else { 100 };
        let torn = (0..bytes.len())
            .step_by(step)
            .chain([bytes.len() - 1])
            .map(|n| bytes[..n].to_vec());
        let flipped = (0..bytes.len())
            .step_by(step + 1)
            .chain([bytes.len() - 1])
            .map(|i| {
                let mut bytes = bytes.clone();
                bytes[i] ^= 1 << (i % 8);
                bytes
            });
        for damaged in torn.chain(flipped).chain([[&bytes[..], &[0]].concat()]) {
            std::fs::write(file, &damaged).unwrap();
            let engine = folder.engine(&model, u64::MAX);
            let mut session = engine.session_with(&plain()).unwrap();
            assert_eq!(session.prefilled(&all), expected);
            assert_eq!(session.sequence().cached_tokens(), prompt(left));
            assert_eq!(engine.pool().prefixes().damaged_blocks, 1);
            assert!(!file.exists());
            drop(session);
            assert_eq!(std::fs::read(file).unwrap(), *bytes);
        }
    }
    // A temporary file of a process that was killed is no block.
    std::fs::write(folder.0.join(".x.kv.1.0.tmp"), "half a block").unwrap();
    let engine = folder.engine(&model, u64::MAX);
    let mut session = engine.session_with(&plain()).unwrap();
    assert_eq!(
        (session.prefilled(&all), session.sequence().cached_tokens()),
        (expected, prompt(128))
    );
}

/// A folder keeps its size, also with several engines on it; what cannot be written is counted and
/// harms nobody.
#[test]
fn folders_keep_their_size_and_can_be_shared() {
    let folder = Folder::new("shared");
    let model = Tiny::Llama.model(DType::Q8_0);
    let budget = 5 * (PAGE + 2048);
    let texts: Vec<Vec<u32>> = (0..6)
        .map(|i| [&tokens(64, 1)[..], &tokens(70 + i, i)].concat())
        .collect();
    let one = engine(&model, 1);
    let expected: Vec<_> = texts
        .iter()
        .map(|text| one.session_with(&cold(&plain())).unwrap().prefilled(text))
        .collect();
    std::thread::scope(|scope| {
        for thread in 0..3usize {
            let (folder, model, texts, expected) = (&folder, &model, &texts, &expected);
            scope.spawn(move || {
                for round in 0..if emulated() { 2 } else { 10 } {
                    let engine = folder.engine(model, budget);
                    let i = (thread * 5 + round) % texts.len();
                    let mut session = engine.session_with(&plain()).unwrap();
                    assert_eq!(session.prefilled(&texts[i]), expected[i], "{i}");
                }
            });
        }
    });
    drop(folder.engine(&model, budget));
    assert!(
        folder.bytes() <= budget && folder.bytes() > 0,
        "{}",
        folder.bytes()
    );
    // The prefix that all share was used last, or a moment ago.
    let engine = folder.engine(&model, PAGE / 2);
    stored(&engine, &plain(), &texts[0]);
    assert!(engine.pool().prefixes().failed_blocks > 0);
    assert_eq!(folder.bytes(), 0);
    for (name, model, options) in forgetful() {
        let folder = Folder::new("small");
        for budget in [30 << 10, 100 << 10, 300 << 10] {
            for i in 0..3 {
                let engine = folder.engine(&model, budget);
                let text = tokens(200, i);
                let mut session = engine.session_with(&options).unwrap();
                let mut cold = engine.session_with(&cold(&options)).unwrap();
                assert_eq!(session.prefilled(&text), cold.prefilled(&text), "{name}");
                drop(session);
                assert!(
                    folder.bytes() <= budget,
                    "{name}: {} of {budget}",
                    folder.bytes()
                );
            }
        }
        assert!(folder.bytes() > 0);
    }
    let file = folder.0.join("file");
    std::fs::write(&file, "").unwrap();
    let options = EngineOptions {
        prefix_folder: Some(file),
        ..Default::default()
    };
    let error = Engine::new(&model, &options).unwrap_err();
    assert!(
        matches!(&error, SessionError::PrefixFolder { path, .. } if path.ends_with("file")),
        "{error}"
    );
}
