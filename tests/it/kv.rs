//! Keys and values in fewer bits: how rows are stored on every level, and sessions that keep them
//! so.

use crate::common::cases;
use crate::run::{OnLevel, Pass, engine};
use crate::tiny::{HEAD, N_LAYER, N_VOCAB, Tiny};
use proptest::prelude::*;
use ruvllm::CancelToken;
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::SessionError;
use ruvllm::SessionOptions;
use ruvllm::arch::{Arch, KV_BLOCK};
use ruvllm::compute::{EvalCallback, HookPoint, TokenKind};
use ruvllm::engine::{Outputs, Slot};
use ruvllm::kv::{KvPolicy, KvTiers};
use ruvllm::model::OpenOptions;
use ruvllm::quant::DType;

/// A block of `kind` with `row` as row `i`.
fn block(arch: Arch, kind: KvType, i: usize, row: &[f32]) -> Vec<u64> {
    let mut block = vec![0u64; kind.block_bytes(row.len()) / 8];
    arch.store_kv(kind, bytemuck::cast_slice_mut(&mut block), i, row);
    block
}

/// Row `i` of a block.
fn row(arch: Arch, kind: KvType, block: &[u64], i: usize, dim: usize) -> Vec<f32> {
    let mut rows = vec![f32::NAN; (i + 1) * dim];
    arch.load_kv(kind, bytemuck::cast_slice(block), dim, &mut rows);
    rows[i * dim..].to_vec()
}

fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed | 1;
    let draw = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(draw).take(n).collect()
}

proptest! {
    #![proptest_config(cases(200))]

    /// No value is off by more than half a step. A step of eight bits is the largest magnitude of a group of 32 by
    /// 128, rounded up to 8 bits of precision, so at most by 1/128 of itself.
    #[test]
    fn values_are_off_by_half_a_step_at_most(
        dim in prop_oneof![prop::sample::select(vec![32usize, 64, 80, 96, 128, 512]), 1usize..70],
        i in 0..KV_BLOCK,
        magnitude in -60i32..60,
        seed: u64,
    ) {
        let x: Vec<f32> = numbers(dim, seed).iter().map(|x| x * (f64::from(magnitude) / 3.0).exp2() as f32).collect();
        for kind in KvType::ALL {
            if kind == KvType::F16 && x.iter().any(|x| x.abs() > 65504.0) {
                continue;
            }
            let bytes = block(Arch::scalar(), kind, i, &x);
            for arch in Arch::available() {
                prop_assert_eq!(&bytes, &block(arch, kind, i, &x), "{:?} {}", arch, kind);
                let y = row(arch, kind, &bytes, i, dim);
                prop_assert_eq!(&y, &row(Arch::scalar(), kind, &bytes, i, dim), "{:?} {}", arch, kind);
                for (x, y) in x.chunks(32).zip(y.chunks(32)) {
                    let largest = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                    let step = largest / 128.0 * (1.0 + 1.0 / 128.0) * f32::from(1u16 << 8u32.saturating_sub(kind.bits() as u32));
                    for (x, y) in x.iter().zip(y) {
                        let bound = match kind {
                            KvType::F32 => 0.0,
                            // Half a place, of numbers that are not normal ones half the smallest.
                            KvType::F16 => x.abs() * 2f32.powi(-11) + 2f32.powi(-25),
                            KvType::Bf16 => x.abs() * 2f32.powi(-8),
                            // The quotient is rounded before it is cut.
                            _ => step * 0.5001,
                        };
                        prop_assert!((x - y).abs() <= bound, "{:?} {}: {} became {}", arch, kind, x, y);
                    }
                }
            }
        }
    }

    /// The rows of a block do not touch each other.
    #[test]
    fn rows_are_apart(dim in 1usize..100, seed: u64) {
        let x = numbers(KV_BLOCK * dim, seed);
        for arch in Arch::available() {
            for kind in KvType::ALL {
                let mut bytes = vec![u64::MAX; kind.block_bytes(dim) / 8];
                // In any order: 29 is odd.
                for i in (0..KV_BLOCK).map(|i| i * 29 % KV_BLOCK) {
                    arch.store_kv(kind, bytemuck::cast_slice_mut(&mut bytes), i, &x[i * dim..][..dim]);
                }
                let mut y = vec![f32::NAN; KV_BLOCK * dim];
                arch.load_kv(kind, bytemuck::cast_slice(&bytes), dim, &mut y);
                for (i, x) in x.chunks(dim).enumerate() {
                    let alone = row(arch, kind, &block(arch, kind, 0, x), 0, dim);
                    prop_assert_eq!(&y[i * dim..][..dim], &alone, "{:?} {} row {}", arch, kind, i);
                }
            }
        }
    }

    /// `Σ_j (−1)^{|i ∧ j|}·x_j/√n`; products of two rows stay, twice is nothing; the same bits on all levels.
    #[test]
    fn hadamard_matrices_are_orthonormal(dim in prop_oneof![1usize..260, prop::sample::select(vec![64usize, 128, 256, 512])], seed: u64) {
        let n = dim & dim.wrapping_neg();
        let (x, other) = (numbers(dim, seed), numbers(dim, !seed));
        let mut scalar = x.clone();
        Arch::scalar().hadamard(&mut scalar);
        // A rounding for each of the additions on the way, and for the factor, relative to the 1-norm over √n.
        let unit = f64::from(f32::EPSILON) / 2.0;
        let bound = (f64::from(n.ilog2()) + 3.0) * unit * n as f64 / (n as f64).sqrt();
        for (i, y) in scalar.iter().enumerate() {
            let run = &x[i / n * n..][..n];
            let sign = |j: usize| if ((i % n) & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            let truth: f64 = run.iter().enumerate().map(|(j, x)| sign(j) * f64::from(*x)).sum::<f64>() / (n as f64).sqrt();
            prop_assert!((f64::from(*y) - truth).abs() <= bound, "{} of {}: {} is not {}", i, dim, y, truth);
        }
        for arch in Arch::available() {
            let (mut y, mut z) = (x.clone(), other.clone());
            arch.hadamard(&mut y);
            arch.hadamard(&mut z);
            prop_assert_eq!(&y, &scalar, "{:?}", arch);
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
            let before = dot(&x, &other);
            prop_assert!((dot(&y, &z) - before).abs() <= 4.0 * bound * dim as f64, "{:?}", arch);
            arch.hadamard(&mut y);
            prop_assert!(x.iter().zip(&y).all(|(x, y)| f64::from((x - y).abs()) <= 2.0 * bound * (n as f64).sqrt()), "{:?}", arch);
        }
    }
}

/// Zeros stay zeros, what is not a finite number takes its group with it and no other, and the
/// largest numbers fit.
#[test]
fn zeros_and_numbers_that_are_not_finite() {
    for arch in Arch::available() {
        for kind in KvType::ALL {
            let zeros = row(arch, kind, &block(arch, kind, 5, &[0.0; 80]), 5, 80);
            assert!(zeros.iter().all(|&x| x == 0.0), "{arch:?} {kind}");
            for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = vec![1.0; 80];
                x[40] = broken;
                let y = row(arch, kind, &block(arch, kind, 63, &x), 63, 80);
                assert!(
                    !y[40].is_finite(),
                    "{arch:?} {kind}: {broken} became {}",
                    y[40]
                );
                for (i, y) in y.iter().enumerate() {
                    let lost = if kind.is_quantized() {
                        (32..64).contains(&i)
                    } else {
                        i == 40
                    };
                    assert_eq!(!y.is_finite(), lost, "{arch:?} {kind} {broken} value {i}");
                }
            }
            let mut bytes = vec![0u64; kind.block_bytes(33) / 8];
            let fits = arch.store_kv(kind, bytemuck::cast_slice_mut(&mut bytes), 0, &[-3e38; 33]);
            assert_eq!(fits, kind != KvType::F16, "{arch:?} {kind}");
            if fits {
                let y = row(arch, kind, &bytes, 0, 33);
                assert!(
                    y.iter().all(|y| (y / -3e38 - 1.0).abs() < 0.07),
                    "{arch:?} {kind}: {y:?}"
                );
            }
        }
    }
}

#[test]
fn names_are_those_of_llama_cpp() {
    for kind in KvType::ALL {
        assert_eq!(kind.name().parse(), Ok(kind));
    }
    for (name, kind) in [
        ("q5_1", KvType::Q5),
        ("q4_1", KvType::Q4),
        ("q8", KvType::Q8),
    ] {
        assert_eq!(name.parse(), Ok(kind));
    }
    for name in ["", "f64", "q3_0", "iq4_nl", "Q8_0"] {
        assert!(name.parse::<KvType>().is_err(), "{name}");
    }
    // By hand: 128 values are four groups; 16 bytes of upper bits, 2 of a scale, and 16, 8, 4 or 0
    // of lower ones each.
    let bytes = KvType::ALL.map(|kind| kind.block_bytes(128) / KV_BLOCK);
    assert_eq!(bytes, [512, 256, 256, 4 * 34, 4 * 26, 4 * 22, 4 * 18]);
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

fn options(policy: KvPolicy) -> SessionOptions {
    let KvPolicy { k, v, tiers, .. } = policy;
    SessionOptions {
        n_ctx: Some(4096),
        kv_type: k,
        kv_type_v: Some(v),
        kv_tiers: tiers,
        ..Default::default()
    }
}

/// Borders after one page and after three.
const NEAR: KvTiers = KvTiers {
    recent: 64,
    middle: 192,
};

fn policies() -> impl Iterator<Item = KvPolicy> {
    let tiered = KvPolicy {
        tiers: Some(NEAR),
        ..KvPolicy::default()
    };
    let mixed = KvPolicy {
        k: KvType::Q8,
        v: KvType::Q4,
        tiers: None,
    };
    KvType::ALL
        .into_iter()
        .map(KvPolicy::from)
        .chain([mixed, tiered])
}

/// The logits after `tokens` in a session of their own.
fn fresh(model: &Model, policy: KvPolicy, tokens: &[u32]) -> Vec<f32> {
    engine(model, 1)
        .session_with(&options(policy))
        .unwrap()
        .prefilled(tokens)
}

/// mlx-vlm#1310: a prompt in chunks over a quantised cache was another prompt. Chunks of any size,
/// single tokens and any number of threads give the same bits, also where chunks and borders
/// between precisions cross.
#[test]
fn chunks_change_no_bits() {
    for tiny in [Tiny::Llama, Tiny::Gemma2] {
        let model = model(tiny);
        let all = tokens(400, 1);
        for policy in policies() {
            let expected = fresh(&model, policy, &all);
            for (n_batch, n_threads) in [(7, 1), (64, 2), (100, 1)] {
                let options = SessionOptions {
                    n_batch,
                    ..options(policy)
                };
                let mut session = engine(&model, n_threads).session_with(&options).unwrap();
                session.prefill(&all[..330]).unwrap();
                all[330..399]
                    .iter()
                    .for_each(|&token| session.decode(token).unwrap());
                assert_eq!(
                    session.decoded(all[399]),
                    expected,
                    "{tiny:?} {policy:?} by {n_batch}"
                );
            }
        }
    }
}

/// Fewer bits are other logits, but not very: a bound of the largest change by the largest logit,
/// which mistakes in scales, planes, signs or transforms exceed.
#[test]
fn fewer_bits_change_little() {
    for tiny in Tiny::ALL {
        let model = tiny.model(DType::F32).on(Arch::detect());
        let all = tokens(200, 3);
        let exact = fresh(&model, KvType::F32.into(), &all);
        let largest = exact.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        for policy in policies() {
            let logits = fresh(&model, policy, &all);
            let apart = exact
                .iter()
                .zip(&logits)
                .fold(0.0f32, |max, (a, b)| max.max((a - b).abs()))
                / largest;
            let bits = if policy.tiers.is_some() {
                4
            } else {
                policy.k.bits().min(policy.v.bits())
            };
            let bound = 3.0 * 0.5f32.powi(bits.min(9) as i32);
            assert!(apart <= bound, "{tiny:?} {policy:?}: {apart} of {bound}");
        }
    }
}

/// Factors on a norm of keys that one of queries takes back change no score, so they may cost no
/// precision either: bits are the same in every type, however large they make some dimensions.
#[test]
fn factors_that_cancel_in_scores_change_no_bits() {
    let mut lopsided = Tiny::Qwen3Moe.parts(DType::F32);
    for layer in 0..N_LAYER {
        // A rotated pair has one factor.
        let factor = |i: usize| ((i % (HEAD / 2) % 7) as f32 - 3.0).exp2();
        let scale = |w: &mut [f32], sign: i32| {
            let each = w.iter_mut().enumerate();
            each.for_each(|(i, w)| *w *= factor(i).powi(sign));
        };
        lopsided.edit(&format!("blk.{layer}.attn_k_norm.weight"), |w| scale(w, 1));
        lopsided.edit(&format!("blk.{layer}.attn_q_norm.weight"), |w| scale(w, -1));
    }
    let lopsided = crate::run::open(lopsided.gguf()).unwrap();
    let all = tokens(200, 3);
    for arch in [Arch::scalar(), Arch::detect()] {
        let plain = Tiny::Qwen3Moe.model(DType::F32).on(arch);
        let lopsided = lopsided.clone().on(arch);
        for policy in policies() {
            let [plain, lopsided] = [&plain, &lopsided].map(|model| fresh(model, policy, &all));
            assert_eq!(plain, lopsided, "{policy:?} on {}", arch.name());
        }
    }
}

/// Llama with keys that have much in common: in each head a long vector in dimensions that are not
/// rotated.
fn alike() -> Model {
    let mut parts = Tiny::Llama.parts(DType::F32);
    parts.set("llama.rope.dimension_count", HEAD as u32 / 2);
    for layer in 0..N_LAYER {
        parts.edit(&format!("blk.{layer}.attn_k.bias"), |bias| {
            let heads = bias.chunks_exact_mut(HEAD);
            heads.for_each(|head| head[HEAD - 4..].copy_from_slice(&[40.0, -60.0, 80.0, 50.0]));
        });
    }
    crate::run::open(parts.gguf()).unwrap()
}

/// What keys have in common takes no bits: errors are not those of keys ten times as long.
#[test]
fn what_keys_have_in_common_costs_little() {
    for arch in [Arch::scalar(), Arch::detect()] {
        let model = alike().on(arch);
        let all = tokens(200, 3);
        let exact = fresh(&model, KvType::F32.into(), &all);
        let largest = exact.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        for (kind, bound) in [(KvType::Q6, 0.02), (KvType::Q5, 0.04), (KvType::Q4, 0.08)] {
            let logits = fresh(&model, kind.into(), &all);
            let each = exact.iter().zip(&logits);
            let apart = each.fold(0.0f32, |max, (a, b)| max.max((a - b).abs())) / largest;
            assert!(apart <= bound, "{kind} on {}: {apart}", arch.name());
        }
    }
}

/// A span of 1,024 positions has centres of its own: a token that reads two has the same bits in a
/// prompt's chunk of any size, alone, and beside tokens that were drafted.
#[test]
fn spans_have_centres_of_their_own() {
    let policies = [
        KvType::Q4.into(),
        KvPolicy {
            tiers: Some(NEAR),
            ..KvPolicy::default()
        },
    ];
    let all = tokens(1060, 5);
    for (arch, policy) in [Arch::scalar(), Arch::detect()]
        .into_iter()
        .flat_map(|arch| policies.map(|policy| (arch, policy)))
    {
        let model = alike().on(arch);
        let engine = engine(&model, 2);
        let begun = || {
            let mut seq = engine.sequence(&options(policy)).unwrap();
            for chunk in all[..1016].chunks(100) {
                let slot = Slot::new(&mut seq, chunk, TokenKind::Prompt);
                engine
                    .step(
                        &mut [slot],
                        &mut Outputs::default(),
                        &CancelToken::default(),
                    )
                    .unwrap();
            }
            seq
        };
        let logits = |n_rows: usize| {
            let (mut seq, mut found, mut outputs) = (begun(), Vec::new(), Outputs::default());
            for chunk in all[1016..].chunks(n_rows) {
                let slot = Slot::new(&mut seq, chunk, TokenKind::Generated).outputs_from(0);
                engine
                    .step(&mut [slot], &mut outputs, &CancelToken::default())
                    .unwrap();
                found.extend_from_slice(outputs.logits(0));
            }
            found
        };
        let alone = logits(1);
        for n_rows in [2, 7] {
            assert!(
                alone == logits(n_rows),
                "{policy:?} on {}: {n_rows}",
                arch.name()
            );
        }
        let whole = fresh(&alike().on(Arch::scalar()), policy, &all);
        if arch.name() == Arch::scalar().name() {
            assert!(alone.ends_with(&whole), "{policy:?}: a prompt");
        }
    }
}

/// A rewind across a border computes again what is no longer there in the precision it is read in.
#[test]
fn rewinding_across_borders_leaves_no_trace() {
    let model = model(Tiny::Llama);
    let all = tokens(700, 1);
    for policy in policies().filter(|policy| policy.tiers.is_some() || policy.k == KvType::Q4) {
        let whole = fresh(&model, policy, &all);
        let mut sessions = [50, 512].map(|n_batch| {
            let mut session = engine(&model, 1)
                .session_with(&SessionOptions {
                    n_batch,
                    ..options(policy)
                })
                .unwrap();
            session.prefill(&all[..600]).unwrap();
            session
        });
        for position in [599, 576, 575, 450, 200, 64, 3, 0] {
            let expected = fresh(&model, policy, &[&all[..position], &[5]].concat());
            for session in &mut sessions {
                session.rewind(position).unwrap();
                assert_eq!(session.tokens(), &all[..position]);
                let mut fork = session.fork().unwrap();
                assert_eq!(session.decoded(5), expected, "{policy:?} {position}");
                assert_eq!(fork.decoded(5), expected, "{policy:?} {position}");
                session.rewind(position).unwrap();
                assert_eq!(
                    session.prefilled(&all[position..]),
                    whole,
                    "{policy:?} {position}"
                );
            }
        }
    }
}

#[test]
fn policies_that_make_no_sense_are_refused() {
    let model = model(Tiny::Llama);
    let mut wrong = options(KvPolicy {
        k: KvType::Q8,
        v: KvType::F16,
        tiers: Some(KvTiers::default()),
    });
    let error = model.session_with(&wrong).unwrap_err();
    assert!(
        matches!(
            error,
            SessionError::TiersNeedF16 {
                k: KvType::Q8,
                v: KvType::F16
            }
        ),
        "{error}"
    );
    wrong = options(KvPolicy {
        tiers: Some(KvTiers {
            recent: 300,
            middle: 200,
        }),
        ..KvPolicy::default()
    });
    let error = model.session_with(&wrong).unwrap_err();
    assert!(
        matches!(
            error,
            SessionError::Option {
                option: "kv_tiers.middle",
                value: 200,
                ..
            }
        ),
        "{error}"
    );
}

/// By hand: two layers of two KV heads of 16, which are one group of 32. A row takes 32 bytes in
/// f16, 34 in q8 (16 of upper bits, 16 of lower ones, a scale) and 18 in q4; a page `2·2·64` rows
/// of keys and as many of values.
#[test]
fn memory_is_counted_by_precision() {
    let page = |row: u64| 2 * 2 * 2 * 64 * row;
    let model = model(Tiny::Llama);
    let mixed = KvPolicy {
        k: KvType::Q8,
        v: KvType::Q4,
        tiers: None,
    };
    let engine_of = engine(&model, 1);
    let mut session = engine_of.session_with(&options(mixed)).unwrap();
    assert_eq!(session.state().memory().kv.total(), 0);
    session.prefill(&tokens(100, 1)).unwrap();
    let of_session = session.state().memory().kv;
    assert_eq!(of_session.of(KvType::Q8), 2 * page(34) / 2);
    assert_eq!(of_session.of(KvType::Q4), 2 * page(18) / 2);
    assert_eq!(of_session.iter().count(), 2);
    // Another session of the engine, with a fork that shares its pages.
    let mut other = engine_of
        .session_with(&options(KvType::F16.into()))
        .unwrap();
    other.prefill(&tokens(130, 1)).unwrap();
    let fork = other.fork().unwrap();
    assert_eq!(fork.state().memory().kv, other.state().memory().kv);
    let all = engine_of.memory();
    assert_eq!(
        (all.kv.of(KvType::F16), all.kv.of(KvType::Q8)),
        (3 * page(32), 2 * page(34) / 2)
    );
    assert_eq!(all.kv.total(), engine_of.pool().stats().used);
    assert!(all.weights > 0 && all.buffers > 0 && all.total() > all.kv.total() + all.buffers);
    drop((session, other, fork));
    assert_eq!(
        (engine_of.memory().kv.total(), engine_of.memory().kv_free),
        (0, 3 * page(32) + page(34) + page(18))
    );

    // At position 700 queries belong to page 10. They read pages 0, 9 and 10 in f16, 7 and 8 in q8,
    // 1 to 6 in q4.
    let policy = KvPolicy {
        tiers: Some(NEAR),
        ..KvPolicy::default()
    };
    let options = SessionOptions {
        n_batch: 1024,
        ..options(policy)
    };
    let mut session = engine(&model, 1).session_with(&options).unwrap();
    session.prefill(&tokens(700, 1)).unwrap();
    let kv = session.state().memory().kv;
    let expected = [
        (KvType::F16, 3 * page(32)),
        (KvType::Q8, 2 * page(34)),
        (KvType::Q4, 6 * page(18)),
    ];
    assert_eq!(kv.iter().collect::<Vec<_>>(), expected);
    assert_eq!(session.engine().memory().kv, kv);
}

/// How far attention's outputs are from those over keys and values in `f32`, for the last 64 of
/// 16,384 tokens of text: in the first layer, where queries, keys and values are the same until
/// they are stored, and in all, where errors of the layers below add up. The shipped model has seen
/// 512 positions; its rotations go on. `cargo test --release -p ruvllm --test it -- --ignored
/// --nocapture kv::errors_far_back`.
#[test]
#[ignore = "measures"]
fn errors_far_back() {
    const N: usize = 16_384;
    const LAST: usize = 64;
    #[derive(Default)]
    struct Outputs(Vec<Vec<f32>>);
    impl EvalCallback for Outputs {
        fn tensor(&mut self, tap: HookPoint, _: usize, values: &[f32]) {
            if tap == HookPoint::KqvOut {
                self.0.push(values.to_vec());
            }
        }
    }
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let open = OpenOptions::new().override_kv("llama.context_length", N as u32);
    let model = open
        .open(root.join("models/ruvllm-rust-6m-q8_0.gguf"))
        .unwrap();
    let texts = [
        "models/demo-heldout.txt",
        "tests/data/project-docs.txt",
        "tests/data/bakery-papers.txt",
    ];
    let text: String = texts
        .iter()
        .map(|file| std::fs::read_to_string(root.join(file)).unwrap())
        .collect();
    let tokens = model.tokenizer().unwrap().encode(&text, true, false);
    let (before, last) = tokens[..N].split_at(N - LAST);
    let outputs = |k: KvType, v: KvType, kv_tiers: Option<KvTiers>| {
        let options = SessionOptions {
            n_ctx: Some(N),
            kv_type: k,
            kv_type_v: Some(v),
            kv_tiers,
            ..Default::default()
        };
        let mut session = model.session_with(&options).unwrap();
        session.prefill(before).unwrap();
        let mut outputs = Outputs::default();
        session
            .hooks()
            .prefill_probed(last, LAST, &mut outputs, |_, _| ())
            .unwrap();
        outputs.0
    };
    let exact = outputs(KvType::F32, KvType::F32, None);
    let mut policies: Vec<(String, KvType, KvType, Option<KvTiers>)> = [
        KvType::F16,
        KvType::Bf16,
        KvType::Q8,
        KvType::Q6,
        KvType::Q5,
        KvType::Q4,
    ]
    .map(|kind| (format!("{kind:?}"), kind, kind, None))
    .into();
    policies.push(("keys Q8, values Q4".into(), KvType::Q8, KvType::Q4, None));
    policies.push((
        "tiers, 256 and 2048".into(),
        KvType::F16,
        KvType::F16,
        Some(KvTiers::default()),
    ));
    for (name, k, v, tiers) in policies {
        let of_layer = outputs(k, v, tiers)
            .into_iter()
            .zip(&exact)
            .map(|(found, exact)| {
                let off: f64 = found
                    .iter()
                    .zip(exact)
                    .map(|(x, y)| f64::from(x - y).powi(2))
                    .sum();
                (off / exact.iter().map(|y| f64::from(*y).powi(2)).sum::<f64>()).sqrt()
            });
        let of_layer: Vec<f64> = of_layer.collect();
        let worst = of_layer.iter().copied().fold(0.0, f64::max);
        println!(
            "{name}: {:.2e} in the first layer, at most {worst:.2e} in one of {}",
            of_layer[0],
            of_layer.len()
        );
    }
}

/// What a pass takes longer in which pages come to their next precisions, one to 8 bits and one to
/// 4, than those after it that convert nothing: of a 1B shape, two threads. `cargo test --release
/// -p ruvllm --test it -- --ignored --nocapture kv::migrations`.
#[test]
#[ignore = "measures"]
fn migrations() {
    use ruvllm::quant::FileType;
    use ruvllm_benches::{Shape, synthetic};
    let gguf = synthetic(
        &Shape::from_name("llama-1b").unwrap(),
        FileType::from_name("Q4_K_M").unwrap(),
    )
    .unwrap();
    let model = Model::from_gguf(gguf).unwrap();
    let policy = KvPolicy {
        tiers: Some(NEAR),
        ..KvPolicy::default()
    };
    let mut session = engine(&model, 2).session_with(&options(policy)).unwrap();
    let (mut border, mut after) = (Vec::new(), Vec::new());
    session.prefill(&tokens(5 * KV_BLOCK - 1, 1)).unwrap();
    for _ in 0..24 {
        // Ends a page; then the first two tokens of the next.
        session.decode(1).unwrap();
        for times in [&mut border, &mut after] {
            let start = std::time::Instant::now();
            session.decode(1).unwrap();
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        session.prefill(&tokens(KV_BLOCK - 3, 1)).unwrap();
    }
    let mut added: Vec<f64> = border.iter().zip(&after).map(|(a, b)| a - b).collect();
    for times in [&mut border, &mut after, &mut added] {
        times.sort_by(f64::total_cmp);
        println!(
            "{:.2} ms, from {:.2} to {:.2}",
            times[times.len() / 2],
            times[0],
            times[times.len() - 1]
        );
    }
}
