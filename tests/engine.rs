//! The engine on tiny models made here: logits against an independent program
//! (`tests/reference.py`), and what sessions promise.

mod tiny;

use ruvllm::arch::Arch;
use ruvllm::bench;
use ruvllm::exec::{CancelToken, KvType, MemoryEstimate, Session, SessionOptions, Team};
use ruvllm::gguf::{Gguf, StringArray, Value};
use ruvllm::model::{Model, supported_architectures};
use ruvllm::quant::DType;
use ruvllm::{ModelError, SessionError};
use std::sync::Arc;
use tiny::{N_EMBD, N_VOCAB, TOKENS, Tiny};

fn options(n_batch: usize, n_threads: usize) -> SessionOptions {
    SessionOptions { n_ctx: Some(64), n_batch, kv_type: KvType::F32, n_threads, ..Default::default() }
}

fn logits(session: &mut Session<'_>, tokens: &[u32]) -> Vec<f32> {
    let mut all = Vec::new();
    session.prefill_each(tokens, 0, |_, logits| all.extend_from_slice(logits)).unwrap();
    all
}

fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |max, (a, b)| if (a - b).abs() <= max { max } else { (a - b).abs() })
}

/// `f32` arithmetic over two layers of width 64: some hundred roundings of 6e-8 on values of order
/// 1 to 10, amplified at most tenfold by the norms.
const TOLERANCE: f32 = 1e-4;

#[test]
fn logits_equal_the_reference_program() {
    let text = include_str!("data/reference.txt");
    let mut lines = text.lines();
    for tiny in [Tiny::Llama, Tiny::Gemma2, Tiny::Qwen3Moe] {
        assert_eq!(lines.next(), Some(tiny.name()));
        let expected: Vec<f32> =
            lines.by_ref().take(TOKENS.len()).flat_map(|l| l.split(' ').map(|x| x.parse().unwrap())).collect();
        for arch in Arch::available() {
            let model = tiny.model(DType::F32).with_arch(arch);
            for n_batch in [1, 5, 64] {
                let ours = logits(&mut model.session_with(&options(n_batch, 1)).unwrap(), &TOKENS);
                let difference = max_abs(&ours, &expected);
                assert!(difference <= TOLERANCE, "{tiny:?} {arch:?} batch {n_batch}: {difference}");
            }
        }
    }
}

/// One token at a time gives what a batch gives: to the bit where both take the same path, which the
/// scalar level always does.
#[test]
fn prefill_equals_decodes() {
    for tiny in Tiny::ALL {
        for dtype in [DType::F32, DType::F16, DType::Q8_0, DType::Q4_0] {
            let model = tiny.model(dtype).with_arch(Arch::scalar());
            let batch = logits(&mut model.session_with(&options(64, 1)).unwrap(), &TOKENS);
            let single = logits(&mut model.session_with(&options(1, 1)).unwrap(), &TOKENS);
            assert_eq!(batch, single, "{tiny:?} {dtype:?}");
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for tiny in Tiny::ALL {
        for dtype in [DType::F32, DType::Q8_0, DType::Q4_0] {
            for arch in Arch::available() {
                let model = tiny.model(dtype).with_arch(arch);
                for n_batch in [1, 64] {
                    let [one, two, three] =
                        [1, 2, 3].map(|n| logits(&mut model.session_with(&options(n_batch, n)).unwrap(), &TOKENS));
                    assert!(one == two && two == three, "{tiny:?} {dtype:?} {arch:?} batch {n_batch}");
                }
            }
        }
    }
}

#[test]
fn rewinding_and_forking_leave_no_trace() {
    for tiny in Tiny::ALL {
        let model = tiny.model(DType::Q8_0);
        let mut straight = model.session_with(&options(64, 2)).unwrap();
        let expected = logits(&mut straight, &TOKENS[..6]);
        let expected_next = straight.decode(TOKENS[6]).unwrap().to_vec();

        let mut session = model.session_with(&options(64, 2)).unwrap();
        session.prefill(&[7, 7, 7, 7]).unwrap();
        session.clear();
        assert_eq!(logits(&mut session, &TOKENS[..6]), expected);
        session.prefill(&[3, 1, 4, 1, 5]).unwrap();
        session.rewind(6).unwrap();
        let mut fork = session.fork().unwrap();
        assert_eq!(session.decode(TOKENS[6]).unwrap(), expected_next);
        session.prefill(&[9, 9]).unwrap();
        assert_eq!(fork.position(), 6);
        assert_eq!(fork.decode(TOKENS[6]).unwrap(), expected_next);
    }
}

#[test]
fn half_precision_cache_is_close() {
    let model = Tiny::Llama.model(DType::F32);
    let exact = logits(&mut model.session_with(&options(64, 1)).unwrap(), &TOKENS);
    let half = SessionOptions { kv_type: KvType::F16, ..options(64, 1) };
    let ours = logits(&mut model.session_with(&half).unwrap(), &TOKENS);
    // Keys and values lose 2^-11 of their size; scores and outputs are of order 1.
    assert!(max_abs(&ours, &exact) < 2e-2, "{}", max_abs(&ours, &exact));
    assert_ne!(ours, exact);
}

#[test]
fn misuse_is_a_typed_error_and_changes_nothing() {
    let model = Tiny::Llama.model(DType::F32);
    let mut session = model.session_with(&SessionOptions { n_ctx: Some(8), ..options(64, 1) }).unwrap();
    assert!(matches!(session.prefill(&[]), Err(SessionError::NoTokens)));
    let outside = N_VOCAB as u32;
    assert!(
        matches!(session.prefill(&[1, outside]), Err(SessionError::TokenOutOfRange { token, .. }) if token == outside)
    );
    assert!(matches!(session.prefill(&[u32::MAX]), Err(SessionError::TokenOutOfRange { .. })));
    session.prefill(&[1; 6]).unwrap();
    assert!(matches!(session.prefill(&[1; 3]), Err(SessionError::ContextFull { n_ctx: 8, n_past: 6, n_new: 3 })));
    assert!(matches!(session.rewind(7), Err(SessionError::RewindAhead { position: 7, n_past: 6 })));
    assert_eq!(session.position(), 6);
    session.prefill(&[1; 2]).unwrap();
    assert!(matches!(session.decode(1), Err(SessionError::ContextFull { .. })));
    let none = SessionOptions { n_batch: 0, ..options(1, 1) };
    assert!(matches!(model.session_with(&none), Err(SessionError::Option { option: "n_batch", .. })));
    let huge = SessionOptions { n_ctx: Some((1 << 31) - 1), ..options(1, 1) };
    assert!(matches!(model.session_with(&huge), Ok(_) | Err(SessionError::OutOfMemory { .. })));
}

#[test]
fn cancelling_ends_a_prefill_and_keeps_whole_batches() {
    let model = Tiny::Llama.model(DType::F32);
    let cancel = CancelToken::default();
    let mut session = model.session_with(&options(4, 2)).unwrap();
    session.set_cancel_token(cancel.clone());
    let seen = session.prefill_each(&TOKENS, 0, |i, _| {
        if i == 5 {
            cancel.cancel();
        }
    });
    assert!(matches!(seen, Err(SessionError::Cancelled)));
    assert_eq!(session.position(), 8);
    cancel.reset();
    let expected = logits(&mut model.session_with(&options(64, 1)).unwrap(), &TOKENS);
    assert_eq!(session.prefill(&TOKENS[8..]).unwrap(), &expected[11 * N_VOCAB..]);
}

#[test]
fn sessions_share_a_model_and_a_team() {
    let model = Tiny::Gemma2.model(DType::Q8_0);
    let expected = logits(&mut model.session_with(&options(1, 1)).unwrap(), &TOKENS);
    let team = Arc::new(Team::new(2).unwrap());
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                let shared = SessionOptions { team: Some(Arc::clone(&team)), ..options(1, 0) };
                for _ in 0..20 {
                    assert_eq!(logits(&mut model.session_with(&shared).unwrap(), &TOKENS), expected);
                }
            });
        }
    });
}

/// Activations below the normal numbers, whose reciprocals are infinite, round to nothing worse than zeros:
/// every product of every level gives the zeros that exact arithmetic gives, within the smallest normal number.
#[test]
fn denormal_activations_stay_finite_and_small() {
    for dtype in [DType::F32, DType::F16, DType::Q8_0, DType::Q4_0] {
        let mut parts = Tiny::Phi3.parts(dtype);
        for name in ["blk.0.attn_norm", "blk.0.ffn_norm", "blk.1.attn_norm", "blk.1.ffn_norm", "output_norm"] {
            parts.edit(&format!("{name}.weight"), |w| w.fill(1e-40));
        }
        let bytes = parts.bytes();
        for arch in Arch::available() {
            let model = Model::from_gguf(Gguf::from_bytes(bytes.clone()).unwrap(), &mut |_| true).unwrap();
            let model = model.with_arch(arch);
            for n_batch in [1, 5, 64] {
                let one = logits(&mut model.session_with(&options(n_batch, 1)).unwrap(), &TOKENS);
                assert!(one.iter().all(|x| x.abs() < f32::MIN_POSITIVE), "{dtype:?} {arch:?} batch {n_batch}");
                assert_eq!(one, logits(&mut model.session_with(&options(n_batch, 2)).unwrap(), &TOKENS));
            }
        }
    }
}

/// What nobody reads of the last layer is left out, and is missed nowhere.
#[test]
fn tokens_without_logits_count_all_the_same() {
    for tiny in Tiny::ALL {
        let model = tiny.model(DType::Q8_0).with_arch(Arch::scalar());
        let expected = logits(&mut model.session_with(&options(64, 1)).unwrap(), &TOKENS);
        for (n_batch, n_threads) in [(1, 1), (5, 2), (64, 1)] {
            for first in 0..TOKENS.len() {
                let mut session = model.session_with(&options(n_batch, n_threads)).unwrap();
                let mut seen = Vec::new();
                let last = TOKENS.len() - 1;
                session.prefill_each(&TOKENS[..last], first, |_, logits| seen.extend_from_slice(logits)).unwrap();
                seen.extend_from_slice(session.decode(TOKENS[last]).unwrap());
                assert_eq!(seen, expected[first * N_VOCAB..], "{tiny:?} in batches of {n_batch} from {first} on");
            }
        }
    }
}

/// The same on every level, whose products of few rows may round differently: keys and values do not depend on
/// who sees the rest.
#[test]
fn keys_and_values_do_not_depend_on_who_wants_logits() {
    struct All;
    impl ruvllm::exec::Probe for All {
        fn tensor(&mut self, _: &str, _: usize, _: &[f32]) {}
    }
    for tiny in Tiny::ALL {
        for arch in Arch::available() {
            let model = tiny.model(DType::Q8_0).with_arch(arch);
            let (last, n) = (TOKENS[TOKENS.len() - 1], TOKENS.len() - 1);
            for n_batch in [5, 64] {
                let (mut some, mut all) = [(); 2].map(|()| model.session_with(&options(n_batch, 1)).unwrap()).into();
                some.prefill_each(&TOKENS[..n], n, |_, _| unreachable!()).unwrap();
                all.prefill_probed(&TOKENS[..n], n, &mut All, |_, _| unreachable!()).unwrap();
                assert_eq!(some.decode(last).unwrap(), all.decode(last).unwrap(), "{tiny:?} {arch:?} {n_batch}");
            }
        }
    }
}

#[test]
fn a_probe_sees_every_layer_and_changes_nothing() {
    #[derive(Default)]
    struct Seen(Vec<(String, usize, Vec<f32>)>);
    impl ruvllm::exec::Probe for Seen {
        fn tensor(&mut self, name: &str, layer: usize, values: &[f32]) {
            self.0.push((name.to_owned(), layer, values.to_vec()));
        }
    }
    for tiny in Tiny::ALL {
        let model = tiny.model(DType::F32);
        let (mut seen, mut probed) = (Seen::default(), Vec::new());
        let mut session = model.session_with(&options(64, 1)).unwrap();
        session.prefill_probed(&TOKENS, 0, &mut seen, |_, logits| probed.extend_from_slice(logits)).unwrap();
        assert_eq!(probed, logits(&mut model.session_with(&options(64, 1)).unwrap(), &TOKENS));
        let of = |name: &str| seen.0.iter().filter(|t| t.0 == name).collect::<Vec<_>>();
        assert_eq!(of("result_output")[0].2, probed);
        for name in ["attn_norm", "k", "v", "kqv_out", "attn_out", "ffn_inp", "ffn_norm", "ffn_out", "l_out"] {
            assert_eq!(of(name).iter().map(|t| t.1).collect::<Vec<_>>(), [0, 1], "{tiny:?} {name}");
        }
    }
}

#[test]
fn a_window_is_honoured_beyond_its_length() {
    // With a window of 4, layer 0 of 2 forgets; a change of the first token must fade from the
    // windowed layer, yet still reach the last position through the other.
    let model = Tiny::Gemma2.model(DType::F32);
    let mut other = TOKENS;
    other[0] = 40;
    let a = logits(&mut model.session_with(&options(64, 1)).unwrap(), &TOKENS);
    let b = logits(&mut model.session_with(&options(64, 1)).unwrap(), &other);
    assert!(max_abs(&a[11 * N_VOCAB..], &b[11 * N_VOCAB..]) > 1e-4);
}

#[test]
fn what_cannot_run_is_refused_by_name() {
    let refuse = |change: &dyn Fn(&mut tiny::Parts)| {
        let mut parts = Tiny::Llama.parts(DType::F32);
        change(&mut parts);
        Model::from_gguf(parts.gguf(), &mut |_| true).map(|_| ()).unwrap_err()
    };
    let e = refuse(&|p| p.set("general.architecture", "mamba"));
    assert!(matches!(&e, ModelError::UnsupportedArchitecture { arch, .. } if arch == "mamba"));
    for arch in supported_architectures() {
        assert!(e.to_string().contains(arch), "{e}");
    }
    assert!(matches!(refuse(&|p| p.set("llama.attention.head_count", 0u32)), ModelError::OutOfRange { .. }));
    assert!(matches!(refuse(&|p| p.set("llama.attention.head_count_kv", 3u32)), ModelError::Inconsistent { .. }));
    assert!(matches!(refuse(&|p| p.set("llama.attention.key_length", 100_000u32)), ModelError::OutOfRange { .. }));
    assert!(matches!(refuse(&|p| p.set("llama.rope.dimension_count", 7u32)), ModelError::Inconsistent { .. }));
    assert!(matches!(refuse(&|p| p.set("llama.rope.dimension_count", 18u32)), ModelError::Inconsistent { .. }));
    assert!(matches!(refuse(&|p| p.set("llama.block_count", u32::MAX)), ModelError::OutOfRange { .. }));
    assert!(matches!(refuse(&|p| p.set("llama.block_count", 3u32)), ModelError::MissingTensor { .. }));
    assert!(matches!(refuse(&|p| p.set("llama.block_count", 1u32)), ModelError::UnknownTensor { .. }));
    assert!(matches!(refuse(&|p| p.set("llama.context_length", 0u32)), ModelError::OutOfRange { .. }));
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(
            refuse(&|p| p.set("llama.attention.layer_norm_rms_epsilon", eps)),
            ModelError::OutOfRange { .. }
        ));
        assert!(matches!(refuse(&|p| p.set("llama.rope.freq_base", eps)), ModelError::OutOfRange { .. }));
    }
    assert!(matches!(refuse(&|p| p.set("llama.rope.scaling.type", "dynamic")), ModelError::OutOfRange { .. }));
    assert!(matches!(refuse(&|p| p.remove("llama.embedding_length")), ModelError::MissingKey { .. }));
    assert!(matches!(refuse(&|p| p.set("llama.feed_forward_length", 97u32)), ModelError::TensorShape { .. }));
    assert!(matches!(refuse(&|p| p.remove_tensor("blk.1.attn_k.weight")), ModelError::MissingTensor { .. }));
    assert!(matches!(
        refuse(&|p| p.rename_tensor("blk.1.attn_k.bias", "blk.1.attn_k.extra")),
        ModelError::UnknownTensor { .. }
    ));
    assert!(matches!(refuse(&|p| p.set("general.type", "adapter")), ModelError::NotAModel { .. }));
    let e = Model::from_gguf(Tiny::Llama.parts(DType::F32).gguf(), &mut |_| false).map(|_| ()).unwrap_err();
    assert!(matches!(e, ModelError::Cancelled));
}

fn open(parts: tiny::Parts) -> Result<Model, ModelError> {
    Model::from_gguf(parts.gguf(), &mut |_| true)
}

/// Of every family's file every tensor is needed, but for a head that the embedding table can replace.
#[test]
fn a_missing_tensor_is_named() {
    for tiny in Tiny::SHAPES {
        for name in tiny.parts(DType::F32).tensor_names() {
            let mut parts = tiny.parts(DType::F32);
            parts.remove_tensor(&name);
            let result = open(parts);
            if name == "output.weight" && matches!(tiny, Tiny::Llama | Tiny::Qwen3Moe | Tiny::Phi3) {
                assert!(result.is_ok(), "{tiny:?}");
                continue;
            }
            // A layer without its fused matrix should have three.
            let expected = name.replace("attn_qkv.weight", "attn_q.weight");
            match result.map(|_| ()).unwrap_err() {
                ModelError::MissingTensor { name: found } => assert_eq!(found, expected, "{tiny:?}"),
                ModelError::MissingInLayer { name: found, present } => {
                    assert_eq!(found, name, "{tiny:?}");
                    assert_eq!(present.replace("blk.1", "blk.0"), name.replace("blk.1", "blk.0"), "{tiny:?}");
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
        parts.copy_tensor(&format!("blk.{i}.ffn_norm.weight"), &format!("blk.{i}.post_ffw_norm.weight"));
    }
    assert!(matches!(open(parts), Err(ModelError::UnknownTensor { name, .. }) if name.contains("post_ffw_norm")));
    let mut parts = Tiny::Phi2.parts(DType::F32);
    for i in 0..2 {
        parts.copy_tensor(&format!("blk.{i}.ffn_up.weight"), &format!("blk.{i}.ffn_gate.weight"));
    }
    assert!(matches!(open(parts), Err(ModelError::UnknownTensor { name, .. }) if name.contains("ffn_gate")));
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
        ("rope.scaling.yarn_attn_factor", Value::F32(3.0)),
        ("rope.scaling.yarn_ext_factor", Value::F32(0.5)),
        ("attention.clamp_kqv", Value::F32(f32::NAN)),
        ("expert_gating_func", Value::U32(2)),
        ("expert_gating_func", Value::String("softmax".into())),
    ] {
        let refused = with(Tiny::Qwen2Moe, key, value.clone()).unwrap_err();
        assert!(matches!(&refused, ModelError::OutOfRange { key: k, .. } if k.ends_with(key)), "{key} {value:?}");
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
        assert!(matches!(refused, Err(ModelError::UnknownKey { key: k, .. }) if k == format!("llama.{key}")));
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
        open(parts).map(|model| logits(&mut model.session_with(&options(64, 1)).unwrap(), &TOKENS))
    };
    let (size, pattern) = ("sliding_window", "sliding_window_pattern");
    let by_layer = |layers: [bool; 2]| Value::from(layers.to_vec());
    let plain = logits_with(&[]).unwrap();
    let none = logits_with(&[(size, 1000u32.into())]).unwrap();
    assert_ne!(plain, none);
    assert_eq!(logits_with(&[(size, 0u32.into())]).unwrap(), none);
    assert_eq!(logits_with(&[(pattern, 1u32.into())]).unwrap(), none);
    assert_eq!(logits_with(&[(pattern, 2u32.into())]).unwrap(), plain);
    assert_eq!(logits_with(&[(pattern, by_layer([true, false]))]).unwrap(), plain);
    assert_ne!(logits_with(&[(pattern, 0u32.into())]).unwrap(), plain);
    let turned = logits_with(&[(pattern, by_layer([false, true]))]);
    assert!(matches!(turned, Err(ModelError::VariesByLayer { .. })));
}

#[test]
fn rope_factors_that_give_no_angles_are_refused() {
    for value in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-30] {
        for names in [&["rope_freqs"][..], &["rope_factors_short", "rope_factors_long"]] {
            let mut parts = Tiny::Llama.parts(DType::F32);
            for name in names {
                parts.vector(&format!("{name}.weight"), &[1.0, 1.0, 1.0, value, 1.0, 1.0, 1.0, 1.0]);
            }
            assert!(matches!(open(parts), Err(ModelError::TensorValue { index: 3, .. })), "{value} in {names:?}");
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
    let Err(ModelError::TensorShape { expected, .. }) = table(&[n_embd, n / 2, 2]) else { panic!() };
    assert_eq!(expected, [n_embd, n / 2]);
}

/// Rows of a padded embedding table are never generated.
#[test]
fn only_tokens_are_generated() {
    let mut parts = Tiny::Llama.parts(DType::F32);
    let tokens = ["<unk>", "<s>", "</s>", "a", "b", "c"];
    parts.set("tokenizer.ggml.model", "llama");
    parts.set("tokenizer.ggml.tokens", tokens.iter().collect::<StringArray>());
    parts.set("tokenizer.ggml.scores", vec![0.0f32; tokens.len()]);
    parts.set("tokenizer.ggml.token_type", vec![2, 3, 3, 1, 1, 1]);
    let model = open(parts).unwrap();
    let mut sampler = ruvllm::Sampler::builder().temperature(100.0).seed(1).build().unwrap();
    for _ in 0..20 {
        let mut session = model.session_with(&options(64, 1)).unwrap();
        // A history may hold the others.
        let mut generation = session.generate_from(&TOKENS, &mut sampler).unwrap().max_tokens(16);
        generation.by_ref().try_for_each(|piece| piece.map(drop)).unwrap();
        assert!(generation.tokens().iter().all(|&t| (t as usize) < tokens.len()));
    }
}

/// What nobody could mean is estimated as large, or refused, but never as small.
#[test]
fn absurd_sizes_do_not_wrap() {
    let model = Tiny::Llama.model(DType::F32);
    let h = model.hparams();
    let estimate =
        |n_ctx, n_batch| MemoryEstimate::of(h, &SessionOptions { n_ctx: Some(n_ctx), n_batch, ..Default::default() });
    assert_eq!(estimate(64, usize::MAX), estimate(64, 64));
    assert_eq!(estimate(usize::MAX, usize::MAX).total(), u64::MAX);
    let rows = estimate(64, 64).with_logits(h, 64).compute - estimate(64, 64).compute;
    assert_eq!(rows, 63 * 4 * N_VOCAB as u64);

    let test = bench::Test { n_prompt: usize::MAX, n_gen: 2, depth: 0 };
    assert!(bench::run(&model, &[], test, &options(64, 1), 1).is_err());
    let test = bench::Test { n_prompt: 2, n_gen: 0, depth: 0 };
    let mut outcome = bench::run(&model, &[], test, &options(64, 1), 1).unwrap();
    outcome.rates.clear();
    assert!(outcome.median().is_nan());
}
