//! The engine on tiny models made here: logits against an independent program
//! (`tests/reference.py`), and what sessions promise.

use crate::common::emulated;
use crate::run::{OnLevel, Pass, session_on};
use crate::tiny::{N_EMBD, N_VOCAB, TOKENS, Tiny};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::SessionError;
use ruvllm::SessionOptions;
use ruvllm::arch::Arch;
use ruvllm::compute::HookPoint;
use ruvllm::gguf::{Gguf, StringArray, Value, Writer};
use ruvllm::model::ModelError;
use ruvllm::model::{Hparams, OpenOptions, RopeScaling, Unknown, supported_architectures};
use ruvllm::quant::DType;

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

fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |max, (a, b)| {
        if (a - b).abs() <= max {
            max
        } else {
            (a - b).abs()
        }
    })
}

/// `f32` arithmetic over two layers of width 64: some hundred roundings of 6e-8 on values of order
/// 1 to 10, amplified at most tenfold by the norms.
const TOLERANCE: f32 = 1e-4;

#[test]
fn logits_equal_the_reference_program() {
    let text = include_str!("../data/reference.txt");
    let mut lines = text.lines();
    for tiny in [Tiny::Llama, Tiny::Gemma2, Tiny::Qwen3Moe] {
        assert_eq!(lines.next(), Some(tiny.name()));
        let expected: Vec<f32> = lines
            .by_ref()
            .take(TOKENS.len())
            .flat_map(|l| l.split(' ').map(|x| x.parse().unwrap()))
            .collect();
        for arch in Arch::available() {
            let model = tiny.model(DType::F32).on(arch);
            for n_batch in [1, 5, 64] {
                let ours = logits(&mut session(&model, n_batch, 1), &TOKENS);
                let difference = max_abs(&ours, &expected);
                assert!(
                    difference <= TOLERANCE,
                    "{tiny:?} {arch:?} batch {n_batch}: {difference}"
                );
            }
        }
    }
}

/// A prompt of 100 tokens, which every level multiplies by panels, against the scalar level.
///
/// With F32 and F16 weights levels differ by some hundred roundings of 6e-8: 1e-5 of the logits.
/// Panels of bytes round activations to 1/127 of the largest of 32, some 2.2 times their root mean
/// square: an error of 2.2 / 127 / √12 = 0.5 % of it, and so of each product's output. Seven
/// products in two layers and the head follow each other, √15 · 0.5 % = 2 % of the logits'
/// root mean square; norms may double that. A mixture may choose another expert where two are
/// nearly equal: of those one row in ten need not agree.
#[test]
fn long_prompts_agree_on_every_level() {
    let prompt: Vec<u32> = (0..100u32)
        .map(|i| (i * i * 7 + i * 3) % N_VOCAB as u32)
        .collect();
    let rms =
        |x: &mut dyn Iterator<Item = f32>| (x.map(|x| x * x).sum::<f32>() / N_VOCAB as f32).sqrt();
    for tiny in Tiny::SHAPES
        .into_iter()
        .take(if emulated() { 1 } else { usize::MAX })
    {
        for dtype in [DType::F32, DType::F16, DType::Q8_0, DType::Q4_0] {
            let long = SessionOptions {
                n_ctx: Some(128),
                ..options(128)
            };
            let scalar = tiny.model(dtype).on(Arch::scalar());
            let expected = logits(&mut session_on(&scalar, 1, &long), &prompt);
            for arch in Arch::available() {
                let model = tiny.model(dtype).on(arch);
                let [ours, two, three] =
                    [1, 2, 3].map(|n| logits(&mut session_on(&model, n, &long), &prompt));
                assert!(
                    ours == two && two == three,
                    "{tiny:?} {dtype:?} {arch:?}: threads"
                );
                let mut apart: Vec<f32> = ours
                    .chunks(N_VOCAB)
                    .zip(expected.chunks(N_VOCAB))
                    .map(|(a, b)| {
                        rms(&mut a.iter().zip(b).map(|(a, b)| a - b)) / rms(&mut b.iter().copied())
                    })
                    .collect();
                apart.sort_by(f32::total_cmp);
                let allowed = match dtype {
                    // Tiles take an activation as two bf16 numbers, to 2⁻¹⁷ of its size: 2⁻¹⁷ / √3
                    // · √15, doubled.
                    DType::F16 if arch.name() == "amx" => 4e-5,
                    DType::F32 | DType::F16 => 1e-5,
                    _ => 0.04,
                };
                let most = if matches!(tiny, Tiny::Qwen3Moe | Tiny::Qwen2Moe) {
                    apart[89]
                } else {
                    apart[99]
                };
                println!(
                    "{tiny:?} {dtype:?} {arch:?}: {:.1e} {:.1e} {:.1e}",
                    apart[50], apart[89], apart[99]
                );
                assert!(most <= allowed, "{tiny:?} {dtype:?} {arch:?}: {most}");
            }
        }
    }
}

/// One token at a time gives what a batch gives: to the bit where both take the same path, which
/// the scalar level always does.
#[test]
fn prefill_equals_decodes() {
    for tiny in Tiny::ALL {
        for dtype in [DType::F32, DType::F16, DType::Q8_0, DType::Q4_0] {
            let model = tiny.model(dtype).on(Arch::scalar());
            let batch = logits(&mut session(&model, 64, 1), &TOKENS);
            let single = logits(&mut session(&model, 1, 1), &TOKENS);
            assert_eq!(batch, single, "{tiny:?} {dtype:?}");
        }
    }
}

#[test]
fn rewinding_and_forking_leave_no_trace() {
    for tiny in Tiny::ALL {
        let model = tiny.model(DType::Q8_0);
        let mut straight = session(&model, 64, 2);
        let expected = logits(&mut straight, &TOKENS[..6]);
        let expected_next = straight.decoded(TOKENS[6]);

        let mut session = session(&model, 64, 2);
        session.prefill(&[7, 7, 7, 7]).unwrap();
        session.clear();
        assert_eq!(logits(&mut session, &TOKENS[..6]), expected);
        session.prefill(&[3, 1, 4, 1, 5]).unwrap();
        session.rewind(6).unwrap();
        let mut fork = session.fork().unwrap();
        assert_eq!(session.decoded(TOKENS[6]), expected_next);
        session.prefill(&[9, 9]).unwrap();
        assert_eq!(fork.position(), 6);
        assert_eq!(fork.decoded(TOKENS[6]), expected_next);
    }
}

#[test]
fn half_precision_cache_is_close() {
    let model = Tiny::Llama.model(DType::F32);
    let exact = logits(&mut session(&model, 64, 1), &TOKENS);
    let half = SessionOptions {
        kv_type: KvType::F16,
        ..options(64)
    };
    let ours = logits(&mut model.session_with(&half).unwrap(), &TOKENS);
    // Keys and values lose 2^-11 of their size; scores and outputs are of order 1.
    assert!(max_abs(&ours, &exact) < 2e-2, "{}", max_abs(&ours, &exact));
    assert_ne!(ours, exact);
}

#[test]
fn misuse_is_a_typed_error_and_changes_nothing() {
    let model = Tiny::Llama.model(DType::F32);
    let mut session = model
        .session_with(&SessionOptions {
            n_ctx: Some(8),
            ..options(64)
        })
        .unwrap();
    assert!(matches!(session.prefill(&[]), Err(SessionError::NoTokens)));
    let outside = N_VOCAB as u32;
    assert!(
        matches!(session.prefill(&[1, outside]), Err(SessionError::TokenOutOfRange { token, .. }) if token == outside)
    );
    assert!(matches!(
        session.prefill(&[u32::MAX]),
        Err(SessionError::TokenOutOfRange { .. })
    ));
    session.prefill(&[1; 6]).unwrap();
    assert!(matches!(
        session.prefill(&[1; 3]),
        Err(SessionError::ContextFull {
            n_ctx: 8,
            n_past: 6,
            n_new: 3
        })
    ));
    assert!(matches!(
        session.rewind(7),
        Err(SessionError::RewindAhead {
            position: 7,
            n_past: 6
        })
    ));
    assert_eq!(session.position(), 6);
    session.prefill(&[1; 2]).unwrap();
    assert!(matches!(
        session.decode(1),
        Err(SessionError::ContextFull { .. })
    ));
    let none = SessionOptions {
        n_batch: 0,
        ..options(1)
    };
    assert!(matches!(
        model.session_with(&none),
        Err(SessionError::Option {
            option: "n_batch",
            ..
        })
    ));
    // What is not filled takes no memory.
    let huge = SessionOptions {
        n_ctx: Some((1 << 31) - 1),
        ..options(64)
    };
    assert_eq!(
        logits(&mut session_on(&model, 1, &huge), &[1, 2]),
        logits(&mut self::session(&model, 64, 1), &[1, 2])
    );
}

/// A session needs no larger stack than threads commonly have, whatever the products of its level
/// need.
#[test]
fn small_stacks_suffice() {
    const STACK: usize = 256 << 10;
    let tokens: Vec<u32> = (0..60).map(|i| i * 7 % N_VOCAB as u32).collect();
    for dtype in [DType::F32, DType::F16, DType::Q8_0, DType::Q4_0] {
        for arch in Arch::available() {
            let model = Tiny::Llama.model(dtype).on(arch);
            let expected = logits(&mut session(&model, 64, 1), &tokens);
            std::thread::scope(|s| {
                let run = || logits(&mut session(&model, 64, 1), &tokens);
                let thread = std::thread::Builder::new()
                    .stack_size(STACK)
                    .spawn_scoped(s, run)
                    .unwrap();
                assert_eq!(thread.join().unwrap(), expected, "{dtype:?} {arch:?}");
            });
        }
    }
}

/// Activations below the normal numbers, whose reciprocals are infinite, round to nothing worse
/// than zeros: every product of every level gives the zeros that exact arithmetic gives, within the
/// smallest normal number.
#[test]
fn denormal_activations_stay_finite_and_small() {
    for dtype in [DType::F32, DType::F16, DType::Q8_0, DType::Q4_0] {
        let mut parts = Tiny::Phi3.parts(dtype);
        for name in [
            "blk.0.attn_norm",
            "blk.0.ffn_norm",
            "blk.1.attn_norm",
            "blk.1.ffn_norm",
            "output_norm",
        ] {
            parts.edit(&format!("{name}.weight"), |w| w.fill(1e-40));
        }
        let bytes = parts.bytes();
        for arch in Arch::available() {
            let model = Model::from_gguf(Gguf::from_bytes(bytes.clone()).unwrap()).unwrap();
            let model = model.on(arch);
            for n_batch in [1, 5, 64] {
                let one = logits(&mut session(&model, n_batch, 1), &TOKENS);
                assert!(
                    one.iter().all(|x| x.abs() < f32::MIN_POSITIVE),
                    "{dtype:?} {arch:?} batch {n_batch}"
                );
                assert_eq!(one, logits(&mut session(&model, n_batch, 2), &TOKENS));
            }
        }
    }
}

/// What nobody reads of the last layer is left out, and is missed nowhere.
#[test]
fn tokens_without_logits_count_all_the_same() {
    for tiny in Tiny::ALL {
        let model = tiny.model(DType::Q8_0).on(Arch::scalar());
        let expected = logits(&mut session(&model, 64, 1), &TOKENS);
        for (n_batch, n_threads) in [(1, 1), (5, 2), (64, 1)] {
            for first in 0..TOKENS.len() {
                let mut session = session(&model, n_batch, n_threads);
                let mut seen = Vec::new();
                let last = TOKENS.len() - 1;
                session
                    .hooks()
                    .prefill_each(&TOKENS[..last], first, |_, logits| {
                        seen.extend_from_slice(logits)
                    })
                    .unwrap();
                seen.extend_from_slice(&session.decoded(TOKENS[last]));
                assert_eq!(
                    seen,
                    expected[first * N_VOCAB..],
                    "{tiny:?} in batches of {n_batch} from {first} on"
                );
            }
        }
    }
}

/// The same on every level, whose products of few rows may round differently: keys and values do
/// not depend on who sees the rest.
#[test]
fn keys_and_values_do_not_depend_on_who_wants_logits() {
    struct All;
    impl ruvllm::compute::EvalCallback for All {
        fn tensor(&mut self, _: HookPoint, _: usize, _: &[f32]) {}
    }
    for tiny in Tiny::ALL {
        for arch in Arch::available() {
            let model = tiny.model(DType::Q8_0).on(arch);
            let (last, n) = (TOKENS[TOKENS.len() - 1], TOKENS.len() - 1);
            for n_batch in [5, 64] {
                let (mut some, mut all) = [(); 2].map(|()| session(&model, n_batch, 1)).into();
                some.hooks()
                    .prefill_each(&TOKENS[..n], n, |_, _| unreachable!())
                    .unwrap();
                all.hooks()
                    .prefill_probed(&TOKENS[..n], n, &mut All, |_, _| unreachable!())
                    .unwrap();
                assert_eq!(
                    some.decoded(last),
                    all.decoded(last),
                    "{tiny:?} {arch:?} {n_batch}"
                );
            }
        }
    }
}

#[test]
fn a_probe_sees_every_layer_and_changes_nothing() {
    #[derive(Default)]
    struct Seen(Vec<(String, usize, Vec<f32>)>);
    impl ruvllm::compute::EvalCallback for Seen {
        fn tensor(&mut self, tap: HookPoint, layer: usize, values: &[f32]) {
            self.0.push((tap.name().to_owned(), layer, values.to_vec()));
        }
    }
    for tiny in Tiny::ALL {
        let model = tiny.model(DType::F32);
        let (mut seen, mut probed) = (Seen::default(), Vec::new());
        session(&model, 64, 1)
            .hooks()
            .prefill_probed(&TOKENS, 0, &mut seen, |_, logits| {
                probed.extend_from_slice(logits)
            })
            .unwrap();
        assert_eq!(probed, logits(&mut session(&model, 64, 1), &TOKENS));
        let of = |name: &str| seen.0.iter().filter(|t| t.0 == name).collect::<Vec<_>>();
        assert_eq!(of("result_output")[0].2, probed);
        for name in [
            "attn_norm",
            "k",
            "v",
            "kqv_out",
            "attn_out",
            "ffn_inp",
            "ffn_norm",
            "ffn_out",
            "l_out",
        ] {
            assert_eq!(
                of(name).iter().map(|t| t.1).collect::<Vec<_>>(),
                [0, 1],
                "{tiny:?} {name}"
            );
        }
    }
}

#[test]
fn a_window_is_honoured_beyond_its_length() {
    // Of its two layers the first has a window of 4: alone it shows the first token to positions 0
    // to 3 only.
    let mut parts = Tiny::Gemma2.parts(DType::F32);
    parts.set("gemma2.block_count", 1u32);
    parts
        .tensor_names()
        .iter()
        .filter(|name| name.starts_with("blk.1."))
        .for_each(|name| parts.remove_tensor(name));
    let mut other = TOKENS;
    other[0] = 40;
    let (mut one, mut two) = (open(parts).unwrap(), Tiny::Gemma2.model(DType::F32));
    for arch in Arch::available() {
        (one, two) = (one.on(arch), two.on(arch));
        for n_batch in [1, 5, 64] {
            let of =
                |model: &Model, tokens: &[u32]| logits(&mut session(model, n_batch, 1), tokens);
            let (a, b) = (of(&one, &TOKENS), of(&one, &other));
            for i in 0..4 {
                assert!(
                    max_abs(&a[i * N_VOCAB..][..N_VOCAB], &b[i * N_VOCAB..][..N_VOCAB]) > 1e-4,
                    "{arch:?} {i}"
                );
            }
            assert!(
                a[4 * N_VOCAB..] == b[4 * N_VOCAB..],
                "{arch:?} batch {n_batch}: seen beyond the window"
            );
            // The second layer hands it on.
            let (a, b) = (of(&two, &TOKENS), of(&two, &other));
            assert!(
                max_abs(&a[11 * N_VOCAB..], &b[11 * N_VOCAB..]) > 1e-4,
                "{arch:?} batch {n_batch}"
            );
        }
    }
}

#[test]
fn what_cannot_run_is_refused_by_name() {
    let refuse = |change: &dyn Fn(&mut crate::tiny::Parts)| {
        let mut parts = Tiny::Llama.parts(DType::F32);
        change(&mut parts);
        Model::from_gguf(parts.gguf()).map(|_| ()).unwrap_err()
    };
    let e = refuse(&|p| p.set("general.architecture", "gptj"));
    assert!(matches!(&e, ModelError::UnsupportedArchitecture { arch, .. } if arch == "gptj"));
    for arch in supported_architectures() {
        assert!(e.to_string().contains(arch), "{e}");
    }
    assert!(matches!(
        refuse(&|p| p.set("llama.attention.head_count", 0u32)),
        ModelError::OutOfRange { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.set("llama.attention.head_count_kv", 3u32)),
        ModelError::Inconsistent { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.set("llama.attention.key_length", 100_000u32)),
        ModelError::OutOfRange { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.set("llama.rope.dimension_count", 7u32)),
        ModelError::Inconsistent { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.set("llama.rope.dimension_count", 18u32)),
        ModelError::Inconsistent { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.set("llama.block_count", u32::MAX)),
        ModelError::OutOfRange { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.set("llama.block_count", 3u32)),
        ModelError::MissingTensor { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.set("llama.block_count", 1u32)),
        ModelError::UnknownTensor { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.set("llama.context_length", 0u32)),
        ModelError::OutOfRange { .. }
    ));
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(
            refuse(&|p| p.set("llama.attention.layer_norm_rms_epsilon", eps)),
            ModelError::OutOfRange { .. }
        ));
        assert!(matches!(
            refuse(&|p| p.set("llama.rope.freq_base", eps)),
            ModelError::OutOfRange { .. }
        ));
    }
    assert!(matches!(
        refuse(&|p| p.set("llama.rope.scaling.type", "dynamic")),
        ModelError::OutOfRange { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.remove("llama.embedding_length")),
        ModelError::MissingKey { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.set("llama.feed_forward_length", 97u32)),
        ModelError::TensorShape { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.remove_tensor("blk.1.attn_k.weight")),
        ModelError::MissingTensor { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.rename_tensor("blk.1.attn_k.bias", "blk.1.attn_k.extra")),
        ModelError::UnknownTensor { .. }
    ));
    assert!(matches!(
        refuse(&|p| p.set("general.type", "adapter")),
        ModelError::NotAModel { .. }
    ));
    let e = OpenOptions::new()
        .progress(|_, _| false)
        .open_gguf(Tiny::Llama.parts(DType::F32).gguf())
        .map(drop)
        .unwrap_err();
    assert!(matches!(e, ModelError::Cancelled));
}

fn open(parts: crate::tiny::Parts) -> Result<Model, ModelError> {
    Model::from_gguf(parts.gguf())
}

/// Of every family's file every tensor is needed, but for a head that the embedding table can
/// replace.
#[test]
fn a_missing_tensor_is_named() {
    for tiny in Tiny::SHAPES {
        for name in tiny.parts(DType::F32).tensor_names() {
            let mut parts = tiny.parts(DType::F32);
            parts.remove_tensor(&name);
            let result = open(parts);
            // The embedding table replaces it.
            if name == "output.weight" {
                assert!(result.is_ok(), "{tiny:?}");
                continue;
            }
            // A layer without its fused matrix should have three.
            let expected = name.replace("attn_qkv.weight", "attn_q.weight");
            match result.map(|_| ()).unwrap_err() {
                ModelError::MissingTensor { name: found } => {
                    assert_eq!(found, expected, "{tiny:?}")
                }
                ModelError::MissingInLayer {
                    name: found,
                    present,
                } => {
                    assert_eq!(found, name, "{tiny:?}");
                    assert_eq!(
                        present.replace("blk.1", "blk.0"),
                        name.replace("blk.1", "blk.0"),
                        "{tiny:?}"
                    );
                }
                other => panic!("{tiny:?} without {name}: {other}"),
            }
        }
    }
}

/// Parts that some families have do not count in others, even if all layers have them.
#[test]
fn tensors_of_other_families_are_refused() {
    let mut parts = Tiny::Llama.parts(DType::F32);
    for i in 0..2 {
        parts.copy_tensor(
            &format!("blk.{i}.ffn_norm.weight"),
            &format!("blk.{i}.post_ffw_norm.weight"),
        );
    }
    assert!(
        matches!(open(parts), Err(ModelError::UnknownTensor { name, .. }) if name.contains("post_ffw_norm"))
    );
    let mut parts = Tiny::Phi2.parts(DType::F32);
    for i in 0..2 {
        parts.copy_tensor(
            &format!("blk.{i}.ffn_up.weight"),
            &format!("blk.{i}.ffn_gate.weight"),
        );
    }
    assert!(
        matches!(open(parts), Err(ModelError::UnknownTensor { name, .. }) if name.contains("ffn_gate"))
    );
}

/// A model has as many learned positions as its table has rows.
#[test]
fn learned_positions_end() {
    let model = open(Tiny::gpt2()).unwrap();
    let options = |n_ctx| SessionOptions {
        n_ctx: Some(n_ctx),
        ..Default::default()
    };
    let mut session = model.session_with(&options(256)).unwrap();
    session.prefill(&[7; 256]).unwrap();
    let refused = model.session_with(&options(257)).unwrap_err();
    assert!(
        matches!(
            refused,
            SessionError::Option {
                option: "n_ctx",
                value: 257,
                ..
            }
        ),
        "{refused}"
    );
}

#[test]
fn keys_are_understood_or_refused() {
    let with = |tiny: Tiny, key: &str, value: Value| {
        let mut parts = tiny.parts(DType::F32);
        parts.set(&format!("{}.{key}", tiny.name()), value);
        open(parts).map(|_| ())
    };
    for (key, value) in [
        ("attention.causal", Value::Bool(false)),
        ("rope.scaling.yarn_attn_factor", Value::F32(3.0)), // without YaRN
        ("rope.scaling.yarn_ext_factor", Value::F32(0.5)),
        ("attention.clamp_kqv", Value::F32(f32::NAN)),
        ("attention.causal", Value::String("no".into())),
        ("expert_gating_func", Value::U32(5)),
        ("expert_weights_scale", Value::F32(f32::INFINITY)),
    ] {
        let refused = with(Tiny::Qwen2Moe, key, value.clone()).unwrap_err();
        assert!(
            matches!(&refused, ModelError::OutOfRange { key: k, .. } if k.ends_with(key)),
            "{key} {value:?}"
        );
    }
    for (key, value) in [
        ("attention.causal", Value::Bool(true)),
        ("rope.scaling.yarn_attn_factor", Value::F32(1.0)),
        ("rope.scaling.yarn_beta_fast", Value::F32(16.0)),
        ("expert_gating_func", Value::U32(1)),
        ("vocab_size", Value::U32(7)),
        ("attention.layer_norm_epsilon", Value::F32(1e-5)),
    ] {
        with(Tiny::Qwen2Moe, key, value).unwrap_or_else(|e| panic!("{key}: {e}"));
    }
    for key in ["rope.dimension_sections", "logit_scale", "something"] {
        let refused = with(Tiny::Llama, key, Value::F32(2.0));
        assert!(
            matches!(refused, Err(ModelError::UnknownKey { key: k, .. }) if k == format!("llama.{key}"))
        );
    }
    // Other architectures' keys mean nothing here.
    let mut parts = Tiny::Llama.parts(DType::F32);
    parts.set("llamas.attention.causal", false);
    open(parts).unwrap();
}

#[test]
fn windows_are_those_of_the_file() {
    let logits_with = |keys: &[(&str, Value)]| {
        let mut parts = Tiny::Gemma2.parts(DType::F32);
        for (key, value) in keys {
            parts.set(&format!("gemma2.attention.{key}"), value.clone());
        }
        open(parts).map(|model| logits(&mut session(&model, 64, 1), &TOKENS))
    };
    let (size, pattern) = ("sliding_window", "sliding_window_pattern");
    let by_layer = |layers: [bool; 2]| Value::from(layers.to_vec());
    let plain = logits_with(&[]).unwrap();
    let none = logits_with(&[(size, 1000u32.into())]).unwrap();
    assert_ne!(plain, none);
    assert_eq!(logits_with(&[(size, 0u32.into())]).unwrap(), none);
    assert_eq!(logits_with(&[(pattern, 1u32.into())]).unwrap(), none);
    assert_eq!(logits_with(&[(pattern, 2u32.into())]).unwrap(), plain);
    assert_eq!(
        logits_with(&[(pattern, by_layer([true, false]))]).unwrap(),
        plain
    );
    assert_ne!(logits_with(&[(pattern, 0u32.into())]).unwrap(), plain);
    let turned = logits_with(&[(pattern, by_layer([false, true]))]).unwrap();
    assert!(turned != plain && turned != none);
    let long = logits_with(&[(pattern, vec![true, false, true].into())]);
    assert!(matches!(long, Err(ModelError::Inconsistent { .. })));
}

#[test]
fn rope_factors_that_give_no_angles_are_refused() {
    for value in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-30] {
        for names in [
            &["rope_freqs"][..],
            &["rope_factors_short", "rope_factors_long"],
        ] {
            let mut parts = Tiny::Llama.parts(DType::F32);
            for name in names {
                parts.vector(
                    &format!("{name}.weight"),
                    &[1.0, 1.0, 1.0, value, 1.0, 1.0, 1.0, 1.0],
                );
            }
            assert!(
                matches!(open(parts), Err(ModelError::TensorValue { index: 3, .. })),
                "{value} in {names:?}"
            );
        }
    }
}

#[test]
fn an_embedding_table_may_have_a_third_dimension_of_one() {
    let table = |dims: &[u64]| {
        let mut parts = Tiny::Llama.parts(DType::F32);
        parts.reshape("token_embd.weight", dims);
        open(parts)
    };
    let (n, n_embd) = (N_VOCAB as u64, N_EMBD as u64);
    assert_eq!(table(&[n_embd, n, 1]).unwrap().hparams().n_vocab, N_VOCAB);
    let Err(ModelError::TensorShape { expected, .. }) = table(&[n_embd, n / 2, 2]) else {
        panic!()
    };
    assert_eq!(expected, [n_embd, n / 2]);
}

/// Rows of a padded embedding table are never generated.
#[test]
fn only_tokens_are_generated() {
    let mut parts = Tiny::Llama.parts(DType::F32);
    let tokens = ["<unk>", "<s>", "</s>", "a", "b", "c"];
    parts.set("tokenizer.ggml.model", "llama");
    parts.set(
        "tokenizer.ggml.tokens",
        tokens.iter().collect::<StringArray>(),
    );
    parts.set("tokenizer.ggml.scores", vec![0.0f32; tokens.len()]);
    parts.set("tokenizer.ggml.token_type", vec![2, 3, 3, 1, 1, 1]);
    let model = open(parts).unwrap();
    let mut sampler = ruvllm::Sampler::new(ruvllm::SamplerOptions {
        temperature: 100.0,
        seed: Some(1),
        ..Default::default()
    })
    .unwrap();
    for _ in 0..20 {
        let mut session = session(&model, 64, 1);
        // A history may hold the others.
        let mut generation = session
            .generate(&TOKENS, &mut sampler)
            .unwrap()
            .max_tokens(16);
        generation
            .by_ref()
            .try_for_each(|piece| piece.map(drop))
            .unwrap();
        assert!(
            generation
                .tokens()
                .iter()
                .all(|&t| (t as usize) < tokens.len())
        );
    }
}

/// Layers may differ in what the file has an array for.
#[test]
fn sizes_by_layer() {
    let mut parts = Tiny::Llama.parts(DType::F32);
    parts.set("llama.attention.head_count_kv", vec![2u32, 1]);
    parts.set("llama.feed_forward_length", vec![96u32, 64]);
    assert!(
        matches!(open(parts), Err(ModelError::TensorShape { name, .. }) if name.starts_with("blk.1."))
    );

    let mut parts = Tiny::Llama.parts(DType::F32);
    parts.set("llama.attention.head_count_kv", vec![2u32, 1]);
    for part in ["attn_k", "attn_v"] {
        parts.cut(&format!("blk.1.{part}.weight"), &[N_EMBD as u64, 16]);
        parts.cut(&format!("blk.1.{part}.bias"), &[16]);
    }
    parts.set("llama.feed_forward_length", vec![96u32, 64]);
    for (part, dims) in [
        ("gate", [N_EMBD as u64, 64]),
        ("up", [N_EMBD as u64, 64]),
        ("down", [64, N_EMBD as u64]),
    ] {
        parts.cut(&format!("blk.1.ffn_{part}.weight"), &dims);
    }
    let model = open(parts).unwrap();
    let n_head_kv: Vec<usize> = model
        .hparams()
        .attention()
        .map(|attn| attn.n_head_kv)
        .collect();
    assert_eq!(n_head_kv, [2, 1]);
    // All at once, one by one, and continued from a copy.
    let all = logits(&mut session(&model, 16, 1), &TOKENS);
    let one_by_one = logits(&mut session(&model, 1, 1), &TOKENS);
    assert!(
        all.iter()
            .zip(&one_by_one)
            .all(|(a, b)| (a - b).abs() < 1e-3)
    );
    let mut session = session(&model, 16, 1);
    session.prefill(&TOKENS[..5]).unwrap();
    let mut copy = session.fork().unwrap();
    assert_eq!(
        copy.prefilled(&TOKENS[5..]),
        session.prefilled(&TOKENS[5..])
    );
}

/// What this build does not know can be listed instead of refused.
#[test]
fn unknown_keys_are_reported() {
    let mut parts = Tiny::Llama.parts(DType::F32);
    parts.set("llama.something", 1u32);
    let gguf = parts.gguf();
    assert!(matches!(
        Hparams::of(gguf.metadata(), gguf.tensors()),
        Err(ModelError::UnknownKey { .. })
    ));
    let model = OpenOptions::new()
        .unknown(Unknown::Report)
        .open_gguf(gguf)
        .unwrap();
    assert_eq!(model.unknown(), ["llama.something"]);
}

/// OLMo 3: three of four layers have a window and are rotated without the scaling of the others.
#[test]
fn windowed_layers_of_olmo_3_are_not_scaled() {
    let mut writer = Writer::new();
    writer.metadata("general.architecture", "olmo2");
    for (key, n) in [
        ("block_count", 5u32),
        ("context_length", 256),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.sliding_window", 16),
        ("rope.scaling.original_context_length", 64),
    ] {
        writer.metadata(format!("olmo2.{key}"), n);
    }
    for (key, x) in [
        ("attention.layer_norm_rms_epsilon", 1e-5f32),
        ("rope.freq_base", 5e5),
        ("rope.scaling.factor", 4.0),
    ] {
        writer.metadata(format!("olmo2.{key}"), x);
    }
    // As the published files have it, with another value than YaRN's own, 1 + ln(4)/10.
    writer.metadata("olmo2.rope.scaling.yarn_attn_factor", 1.25f32);
    writer.metadata("olmo2.rope.scaling.type", "yarn");
    writer.tensor(
        "token_embd.weight",
        &[64, 8],
        DType::F32,
        vec![0; 64 * 8 * 4],
    );
    let gguf = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
    let h = Hparams::of(gguf.metadata(), gguf.tensors()).unwrap();
    let windows: Vec<bool> = h.attention().map(|attn| attn.window == Some(16)).collect();
    assert_eq!(windows, [true, true, true, false, true]);
    for attn in h.attention() {
        let rope = h.rope(attn.rope.unwrap());
        assert_eq!(rope.theta, 5e5);
        assert_eq!(rope.scaling == RopeScaling::None, attn.window.is_some());
        let factor = if attn.window.is_some() { 1.0 } else { 1.25 };
        assert_eq!((rope.attn_factor, rope.yarn_magnitude), (factor, false));
    }
}

#[test]
fn a_level_is_there_or_refused() {
    let x86 = ["amx", "avx512_bf16", "avx512", "avx_vnni", "avx2"];
    let arm = ["neon_i8mm", "neon_dotprod", "neon"];
    for name in x86.into_iter().chain(arm).chain(["scalar"]) {
        let built = name == "scalar"
            || if cfg!(target_arch = "x86_64") {
                x86.contains(&name)
            } else {
                arm.contains(&name)
            };
        match Arch::named(name) {
            Ok(arch) => assert!(built && arch.name() == name),
            Err(e) => assert!(e.known == built && !e.available.contains(&name)),
        }
    }
    let e = Arch::named("sse9").unwrap_err();
    assert!(!e.known && e.available.last() == Some(&"scalar"), "{e}");
}

/// Hugging Face's `build_alibi_tensor` for 6 heads: the slopes of 4 heads, then every other one of
/// 8.
#[test]
fn slopes_of_heads_that_are_no_power_of_two() {
    let model = Tiny::Llama.model(DType::F32);
    let mut attn = model.hparams().attention().next().unwrap().clone();
    (attn.n_head, attn.n_head_kv, attn.alibi) = (6, 6, Some(8.0));
    let slopes: Vec<f32> = (0..6).map(|head| attn.slope(head).log2()).collect();
    assert_eq!(slopes, [-2.0, -4.0, -6.0, -8.0, -1.0, -3.0]);
    attn.alibi = None;
    assert_eq!(attn.slope(3), 0.0);
}

/// An error stays what it is, wherever it comes through.
#[test]
fn errors_that_come_through_others() {
    use ruvllm::Error;
    use ruvllm::decode::DecodeError;
    use ruvllm::kv::KvError;
    use ruvllm::scheduler::ScheduleError;
    use ruvllm::session::GradientError;
    let full = || SessionError::ContextFull {
        n_ctx: 1,
        n_past: 1,
        n_new: 1,
    };
    for error in [
        Error::from(full()),
        DecodeError::from(full()).into(),
        GradientError::from(full()).into(),
        ScheduleError::from(DecodeError::from(full())).into(),
    ] {
        assert!(
            matches!(error, Error::Session(SessionError::ContextFull { .. })),
            "{error:?}"
        );
    }
    let no_memory = KvError::OutOfMemory {
        what: "a page",
        bytes: 1,
    };
    assert!(matches!(
        SessionError::from(no_memory),
        SessionError::OutOfMemory { bytes: 1, .. }
    ));
}
