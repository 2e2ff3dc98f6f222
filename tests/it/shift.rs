//! Context shift: keys are turned to their new positions, what is kept stays, the same every time,
//! and nobody else sees it.

use crate::common::emulated;
use crate::mutants::{encoders, models};
use crate::run::{Pass, engine, level};
use crate::tiny::{N_VOCAB, Parts, Tiny};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::engine::{CacheMode, EngineOptions};
use ruvllm::kv::KvTiers;
use ruvllm::model::OpenOptions;
use ruvllm::quant::DType;
use ruvllm::session::StateError;
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Sampler, SamplerOptions, Session, SessionError, StopReason};
use std::collections::BTreeSet;
use std::num::NonZeroUsize;

fn tokens(n: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 31 + i * i % 11) % N_VOCAB) as u32)
        .collect()
}

fn keeping(keep: usize, n_ctx: usize, kind: KvType) -> SessionOptions {
    SessionOptions {
        n_ctx: Some(n_ctx),
        kv_type: kind,
        context_shift: Some(keep),
        ..Default::default()
    }
}

fn open(parts: Parts) -> Model {
    OpenOptions::new()
        .arch(level())
        .open_gguf(parts.gguf())
        .unwrap()
}

/// With its first layer alone, in which keys and values of a token depend on nothing but itself and
/// its position.
fn one_layer(tiny: Tiny, edit: impl FnOnce(&mut Parts)) -> Model {
    let mut parts = tiny.parts(DType::F32);
    parts.set(&format!("{}.block_count", tiny.name()), 1u32);
    parts
        .tensor_names()
        .iter()
        .filter(|name| name.starts_with("blk.1."))
        .for_each(|name| parts.remove_tensor(name));
    edit(&mut parts);
    open(parts)
}

/// Largest distance of logits, against their largest size.
fn off(a: &[f32], b: &[f32]) -> f32 {
    let size = b.iter().fold(0.0f32, |size, x| size.max(x.abs()));
    a.iter()
        .zip(b)
        .fold(0.0f32, |off, (a, b)| off.max((a - b).abs()))
        / size
}

/// In a model of one layer a shifted session is one that holds the tokens that are left, but for
/// rounding: every order and width of ropes, scaled ones (whose factor on keys is not to count
/// twice), and none.
#[test]
fn keys_are_those_of_their_new_positions() {
    let yarn = |parts: &mut Parts| {
        parts.set("llama.rope.scaling.type", "yarn");
        parts.set("llama.rope.scaling.factor", 4.0f32);
        parts.set("llama.rope.scaling.original_context_length", 64u32);
    };
    let models = [
        ("norm", one_layer(Tiny::Llama, |_| ())),
        ("neox", one_layer(Tiny::Phi3, |_| ())),
        ("part of a head", one_layer(Tiny::Phi2, |_| ())),
        ("normed keys", one_layer(Tiny::Qwen3Moe, |_| ())),
        ("yarn", one_layer(Tiny::Llama, yarn)),
    ];
    for (name, model) in models {
        // Angles are products of 24 bits: 2⁻²⁴ of a position of some hundred radians; then the
        // steps of the precisions, half of which is lost twice instead of once, in scores
        // whose softmax is no steeper than e^2.
        for (kind, bound) in [
            (KvType::F32, 1e-4),
            (KvType::F16, 3e-3),
            (KvType::Bf16, 3e-2),
            (KvType::Q8, 5e-2),
        ] {
            for (keep, n) in [(0usize, 256), (64, 256), (1, 250), (128, 300)] {
                let all = tokens(n);
                let first = keep.div_ceil(64);
                let gone = first * 64..(first + (n / 64 - first).div_ceil(2)) * 64;
                let mut session = engine(&model, 2)
                    .session_with(&keeping(keep, 320, kind))
                    .unwrap();
                session.prefill(&all).unwrap();
                assert_eq!(
                    session.cache().shift().unwrap(),
                    gone.len(),
                    "{name} {keep} {n}"
                );
                let left = [&all[..gone.start], &all[gone.end..]].concat();
                assert_eq!(
                    (session.tokens(), session.sequence().n_dropped()),
                    (&left[..], gone.len())
                );
                let fresh = SessionOptions {
                    context_shift: None,
                    ..keeping(keep, 320, kind)
                };
                let mut fresh = engine(&model, 2).session_with(&fresh).unwrap();
                fresh.prefill(&left).unwrap();
                for token in [3, 9, 27] {
                    let off = off(&session.decoded(token), &fresh.decoded(token));
                    assert!(off < bound, "{name} {kind} {keep} {n}: {off}");
                }
            }
        }
    }
}

/// Generates `n` tokens without end.
fn generated(session: &mut Session, prompt: &[u32], n: usize) -> (Vec<u32>, Vec<f32>) {
    let mut out = Vec::new();
    session.prefill(prompt).unwrap();
    for _ in 0..n {
        let best = session
            .logits()
            .iter()
            .enumerate()
            .max_by(|a, b| a.1.total_cmp(b.1))
            .unwrap()
            .0;
        if session.position() == session.sequence().n_ctx() {
            assert!(session.cache().shift().unwrap() > 0);
        }
        session.decode(best as u32).unwrap();
        out.push(best as u32);
    }
    (out, session.logits().to_vec())
}

#[test]
fn shifts_are_the_same_every_time() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let run = |n_threads: usize, n_batch: usize| {
        let options = SessionOptions {
            n_batch,
            ..keeping(70, 256, KvType::F16)
        };
        let mut session = engine(&model, n_threads).session_with(&options).unwrap();
        let out = generated(
            &mut session,
            &tokens(200),
            if emulated() { 100 } else { 400 },
        );
        assert_eq!(session.tokens()[..128], tokens(200)[..128]);
        out
    };
    let first = run(1, 512);
    for (n_threads, n_batch) in [(3, 512), (2, 33), (1, 64)] {
        assert_eq!(
            run(n_threads, n_batch),
            first,
            "{n_threads} threads, batches of {n_batch}"
        );
    }
}

/// What shares pages with a session does not see that they were turned, and pages are given back.
#[test]
fn forks_do_not_see_it() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let engine = engine(&model, 2);
    let mut session = engine.session_with(&keeping(64, 320, KvType::F16)).unwrap();
    session.prefill(&tokens(310)).unwrap();
    let (mut fork, mut other) = (session.fork().unwrap(), session.fork().unwrap());
    session.cache().shift().unwrap();
    assert_eq!(other.cache().shift().unwrap(), 128);
    assert_eq!(session.decoded(5), other.decoded(5));
    let mut cold = engine.session_with(&keeping(64, 320, KvType::F16)).unwrap();
    cold.prefill(&tokens(310)).unwrap();
    assert_eq!(fork.decoded(5), cold.decoded(5));
    // Back to what was kept, it is as if nothing had been.
    session.rewind(64).unwrap();
    cold.rewind(64).unwrap();
    assert_eq!(
        (session.sequence().n_dropped(), session.prefilled(&[7, 8])),
        (0, cold.prefilled(&[7, 8]))
    );
    drop((session, fork, other, cold));
    assert_eq!(engine.pool().stats().used, 0);
}

/// Neither the prefix cache, nor its folder, nor a saved session holds keys that were turned.
#[test]
fn nothing_of_it_is_kept() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let folder = std::env::temp_dir().join(format!("ruvllm-shift-{}", std::process::id()));
    let options = EngineOptions {
        prefix_folder: Some(folder.clone()),
        ..Default::default()
    };
    let engine = Engine::new(&model, &options).unwrap();
    let options = SessionOptions {
        prefix: CacheMode::On.into(),
        ..keeping(0, 320, KvType::F16)
    };
    let mut session = engine.session_with(&options).unwrap();
    session.prefill(&tokens(300)).unwrap();
    session.cache().shift().unwrap();
    let left = session.tokens().to_vec();
    let refused = session.state().save(folder.join("state.gguf")).unwrap_err();
    assert!(
        matches!(refused, StateError::Shifted { n_dropped: 128 }),
        "{refused}"
    );
    assert!(session.state().to_bytes().is_err());
    drop(session);
    assert_eq!(
        (engine.pool().prefixes().bytes, engine.pool().stats().used),
        (0, 0)
    );
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    let mut cold = engine.session_with(&options).unwrap();
    cold.prefill(&left).unwrap();
    assert_eq!(cold.sequence().cached_tokens().total(), 0);
    // A session that begins with cached pages turns copies of its own.
    drop(cold);
    let mut warm = engine.session_with(&options).unwrap();
    warm.prefill(&left).unwrap();
    assert_eq!(warm.sequence().cached_tokens().total(), left.len() - 1);
    warm.cache().shift().unwrap();
    let mut again = engine.session_with(&options).unwrap();
    again.prefill(&left).unwrap();
    let plain = SessionOptions {
        prefix: CacheMode::Off.into(),
        ..options
    };
    let mut plain = engine.session_with(&plain).unwrap();
    assert_eq!(
        (again.logits().to_vec(), again.decoded(4)),
        (plain.prefilled(&left), plain.decoded(4))
    );
    std::fs::remove_dir_all(&folder).unwrap();
}

/// llama.cpp #5652, #9743: a shift of keys of four bits ended the program, when the context was
/// full.
#[test]
fn refused_by_name() {
    let llama = Tiny::Llama.model(DType::Q8_0);
    let mut long = Tiny::Phi3.parts(DType::F32);
    long.vector("rope_factors_short.weight", &[1.0; 8]);
    long.vector("rope_factors_long.weight", &[1.5; 8]);
    let of_family = |name: &str| {
        open(
            models()
                .iter()
                .find(|model| model.name == name)
                .unwrap()
                .parts(),
        )
    };
    let tiered = SessionOptions {
        kv_tiers: Some(KvTiers::default()),
        ..keeping(0, 256, KvType::F16)
    };
    for (model, options, what) in [
        (
            open(Tiny::gpt2()),
            keeping(0, 256, KvType::F16),
            "learned positions",
        ),
        (
            open(long),
            keeping(0, 256, KvType::F16),
            "learned rope factors",
        ),
        (
            Tiny::Gemma2.model(DType::F32),
            keeping(0, 256, KvType::F16),
            "sliding windows",
        ),
        (
            of_family("deepseek2-lite"),
            keeping(0, 256, KvType::F16),
            "latent attention",
        ),
        (
            of_family("hunyuan-dense"),
            keeping(0, 256, KvType::F16),
            "norms of keys after their rotation",
        ),
        (llama.clone(), tiered, "precision by age"),
        (
            llama.clone(),
            keeping(0, 256, KvType::Q6),
            "keys of fewer than 8 bits",
        ),
    ] {
        let refused = model.session_with(&options).map(drop).unwrap_err();
        assert!(
            matches!(refused, SessionError::NoShift { what: found } if found == what),
            "{what}: {refused}"
        );
    }
    // Values are not turned.
    let values = SessionOptions {
        kv_type_v: Some(KvType::Q4),
        ..keeping(0, 256, KvType::F16)
    };
    llama.session_with(&values).unwrap();
    for (keep, n_ctx) in [(129, 256), (1, 128), (0, 127), (usize::MAX, 256)] {
        let refused = llama
            .session_with(&keeping(keep, n_ctx, KvType::F16))
            .map(drop)
            .unwrap_err();
        assert!(
            matches!(
                refused,
                SessionError::Option {
                    option: "context_shift",
                    ..
                }
            ),
            "{keep}: {refused}"
        );
    }
    llama.session_with(&keeping(128, 256, KvType::F16)).unwrap();
    let plain = SessionOptions {
        context_shift: None,
        ..keeping(0, 256, KvType::F16)
    };
    assert!(matches!(
        llama.session_with(&plain).unwrap().cache().shift(),
        Err(SessionError::NoShift { .. })
    ));
    // Too short to drop anything of.
    let mut short = llama.session_with(&keeping(64, 256, KvType::F16)).unwrap();
    short.prefill(&tokens(100)).unwrap();
    assert_eq!((short.cache().shift().unwrap(), short.position()), (0, 100));
}

fn shipped() -> Model {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/ruvllm-rust-6m-q8_0.gguf"
    );
    OpenOptions::new().arch(level()).open(path).unwrap()
}

/// A generation goes on where it would end, stop strings and all, and holds what it handed out.
#[test]
fn generations_go_on() {
    let model = shipped();
    let n = 600;
    let sampler = || {
        Sampler::new(SamplerOptions {
            temperature: 0.8,
            seed: Some(7),
            logit_bias: vec![(model.tokenizer().unwrap().eos().unwrap_or(0), -1e9)],
            ..Default::default()
        })
    };
    let run = |options: &SessionOptions, n: usize| {
        let mut session = engine(&model, 2).session_with(options).unwrap();
        let mut sampler = sampler().unwrap();
        let mut generation = session
            .generate("Ownership is", &mut sampler)
            .unwrap()
            .max_tokens(n);
        let text: String = generation
            .by_ref()
            .map(|piece| piece.unwrap().text)
            .collect();
        let (ids, reason) = (
            generation.tokens().to_vec(),
            generation.finish().unwrap().reason,
        );
        drop(generation);
        (text, ids, reason, session)
    };
    let options = keeping(0, 128, KvType::F16);
    let (_, ids, reason, session) = run(&options, n);
    assert_eq!((reason, ids.len()), (StopReason::MaxTokens, n));
    // 64 go whenever 128 are there; the session holds the last ones.
    assert_eq!(session.tokens(), &ids[ids.len() - session.position()..]);
    assert!(session.sequence().n_dropped() >= n - 128 && session.sequence().n_dropped() % 64 == 0);
    // Until the first shift it is the text of a session that ends there.
    let (_, ended, reason, _) = run(
        &SessionOptions {
            context_shift: None,
            ..options.clone()
        },
        n,
    );
    assert_eq!(
        (reason, &ended[..]),
        (StopReason::ContextFull, &ids[..ended.len()])
    );

    // A stop string behind the first shift takes its tokens out, but for one that it begins inside.
    let (text, ids, ..) = run(&options, n / 2);
    let prompt = model
        .tokenizer()
        .unwrap()
        .encode_prompt("Ownership is")
        .len();
    let at = |i: usize| {
        model
            .tokenizer()
            .unwrap()
            .decode_lossy(&ids[..i], false)
            .unwrap()
            .len()
    };
    let begin = (at(n / 2 - 40)..text.len())
        .find(|&i| text.is_char_boundary(i))
        .unwrap();
    let stop: String = text[begin..].chars().take(20).collect();
    assert!(
        at(128 - prompt) < text.find(&stop).unwrap(),
        "it stands before the first shift, too: {stop:?}"
    );
    let mut session = engine(&model, 2).session_with(&options).unwrap();
    let mut sampler = sampler().unwrap();
    let stopped = session
        .generate("Ownership is", &mut sampler)
        .unwrap()
        .stop([stop.clone()])
        .text()
        .unwrap();
    assert_eq!(stopped, text[..text.find(&stop).unwrap()]);
    let held = session.tokens();
    let end = ids
        .windows(held.len())
        .position(|window| window == held)
        .expect("it holds what was handed out")
        + held.len();
    assert!(
        at(end) <= stopped.len() && at(end + 1) > stopped.len(),
        "{} of {}",
        at(end),
        stopped.len()
    );
}

/// What a shift costs: the loss of held-out text behind it, against a session that computed the
/// same tokens anew, and one that was never full.
#[test]
fn error_against_recomputation() {
    let model = shipped();
    let text = include_str!("../../models/demo-heldout.txt");
    let all = model.tokenizer().unwrap().encode(
        &text[..if emulated() { 4000 } else { 24000 }],
        false,
        false,
    );
    let (n_ctx, n_more) = (256, 64);
    let threads = EngineOptions {
        n_threads: NonZeroUsize::new(2),
        ..Default::default()
    };
    let engine = Engine::new(&model, &threads).unwrap();
    let mut sums = [0.0f64; 3];
    let mut divergence = 0.0;
    let mut n = 0;
    for piece in all.chunks_exact(n_ctx + n_more) {
        let (head, tail) = piece.split_at(n_ctx);
        let mut shifted = engine
            .session_with(&keeping(64, n_ctx, KvType::F16))
            .unwrap();
        shifted.prefill(head).unwrap();
        shifted.cache().shift().unwrap();
        let plain = SessionOptions {
            context_shift: None,
            ..keeping(64, 512, KvType::F16)
        };
        let mut anew = engine.session_with(&plain).unwrap();
        anew.prefill(shifted.tokens()).unwrap();
        let mut whole = engine.session_with(&plain).unwrap();
        whole.prefill(head).unwrap();
        for pair in tail.windows(2) {
            let logits = [&mut shifted, &mut anew, &mut whole]
                .map(|session| log_softmax(&session.decoded(pair[0])));
            for (sum, logits) in sums.iter_mut().zip(&logits) {
                *sum -= f64::from(logits[pair[1] as usize]);
            }
            divergence += logits[1]
                .iter()
                .zip(&logits[0])
                .map(|(p, q)| f64::from(p.exp() * (p - q)))
                .sum::<f64>();
            n += 1;
        }
    }
    let [shifted, anew, whole] = sums.map(|sum| sum / n as f64);
    divergence /= n as f64;
    eprintln!(
        "nats per token: shifted {shifted:.4}, computed anew {anew:.4}, never full {whole:.4}; KL {divergence:.5}"
    );
    // Keys and values of deeper layers remember what was dropped: the text is predicted no worse
    // than without it.
    assert!(
        shifted < 1.01 * anew && divergence < 0.05,
        "{shifted} {anew} {divergence}"
    );
}

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = logits.iter().map(|x| (x - max).exp()).sum();
    logits.iter().map(|x| x - max - sum.ln()).collect()
}

/// Architectures of which no model can be shifted; docs/guide/models.md shows them
/// (`tests/docs.py`).
#[rustfmt::skip]
const REFUSED: &[&str] = &[
    "afmoe", "arwkv7", "bailingmoe3", "bert", "cohere2", "cohere2moe", "deepseek2", "deepseek32",
    "deepseek4", "dots3note", "exaone-moe", "exaone4", "falcon-h1", "gemma-embedding", "gemma2", "gemma3",
    "gemma3n", "gemma4", "glm-dsa", "glm5-next", "gpt-oss", "gpt2", "granite_swa", "granitehybrid",
    "graniteswitch", "hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "hy_v4", "jamba", "kimi-k3", "kimi-linear",
    "laguna", "lfm2", "lfm2moe", "llama4", "maincoder", "mamba", "mamba2", "maple",
    "mellum", "mimo2", "minicpm3", "minimax-01", "minimax-m3", "mistral4", "modern-bert", "muse-glimmer",
    "nemotron_h", "nemotron_h_moe", "plamo2", "plamo3", "plm", "qwen35", "qwen35moe", "qwen3next",
    "qwen4exp", "rwkv6", "rwkv6qwen2", "rwkv7", "smallthinker", "spark2_5", "starcoder", "step35",
];

#[test]
fn architectures_that_cannot_be_shifted() {
    let all = ruvllm::model::supported_architectures().filter(|arch| *arch != "mistral");
    let mut refused: BTreeSet<&str> = all.collect();
    for model in models().iter().chain(encoders()) {
        let opened = open(model.parts());
        match opened.session_with(&keeping(0, 256, KvType::F32)) {
            Ok(_) => drop(refused.remove(model.arch.as_str())),
            // Learned positions are as many as the model has; an encoder has no session.
            Err(
                SessionError::NoShift { .. }
                | SessionError::Option {
                    option: "n_ctx", ..
                }
                | SessionError::Encoder,
            ) => {}
            Err(error) => panic!("{}: {error}", model.name),
        }
    }
    assert_eq!(Vec::from_iter(refused), REFUSED);
}
