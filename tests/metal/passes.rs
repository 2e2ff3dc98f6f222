//! Whole passes: engines on the emulated GPU, by the runner and the plans that Metal has, against
//! the CPU's scalar level with the same keys and values in half precision.

use crate::all_shaders;
use crate::common::{conformance, long, numbers, read_f32, read_json};
use crate::emulated::Emulated;
use crate::mutants;
use crate::run::{OnLevel, engine};
use crate::tiny::{N_VOCAB, Tiny};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::arch::Arch;
use ruvllm::compute::TokenKind;
use ruvllm::engine::{EngineOptions, Outputs, Slot};
use ruvllm::gpu::GpuError;
use ruvllm::gpu::GpuRunner;
use ruvllm::kv::KvTiers;
use ruvllm::lora::Adapter;
use ruvllm::lora::TargetModule;
use ruvllm::model::OpenOptions;
use ruvllm::quant::DType;
use ruvllm::{CancelToken, Engine, SessionOptions};
use ruvllm::{Session, SessionError};
use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// The last `n_layers` layers of a model on the emulated GPU.
fn on_gpu(model: &Model, n_layers: usize) -> (Engine, Emulated) {
    let gpu = Emulated::start(&all_shaders());
    let runner = GpuRunner::new(gpu.clone(), model, n_layers).unwrap_or_else(|e| panic!("{e}"));
    let options = EngineOptions {
        n_threads: NonZeroUsize::new(1),
        ..Default::default()
    };
    (
        Engine::with_runner(model, &options, Arc::new(runner)).unwrap(),
        gpu,
    )
}

pub(crate) fn options() -> SessionOptions {
    SessionOptions {
        n_ctx: Some(256),
        kv_type: KvType::F16,
        ..Default::default()
    }
}

pub(crate) fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 31 + seed * 7 + i * i % 11) % N_VOCAB) as u32)
        .collect()
}

pub(crate) fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |m, d| if d.is_nan() { f32::NAN } else { d.max(m) })
}

fn rms(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    (a.iter()
        .zip(b)
        .map(|(a, b)| f64::from(a - b).powi(2))
        .sum::<f64>()
        / a.len() as f64)
        .sqrt()
}

/// Logits of all tokens: a prompt of `n_prompt`, then one by one.
pub(crate) fn logits(session: &mut Session, tokens: &[u32], n_prompt: usize) -> Vec<f32> {
    let mut all = Vec::new();
    session
        .hooks()
        .prefill_each(&tokens[..n_prompt], 0, |_, logits| {
            all.extend_from_slice(logits)
        })
        .unwrap();
    for &token in &tokens[n_prompt..] {
        session.decode(token).unwrap();
        all.extend_from_slice(session.logits());
    }
    all
}

fn gpt_oss(dtype: DType) -> (&'static str, Model) {
    (
        "gpt-oss",
        crate::run::open(Tiny::gpt_oss(dtype).gguf()).unwrap(),
    )
}

/// These models and gpt-oss, with their names.
fn models(tiny: &[Tiny], dtype: DType) -> Vec<(&'static str, Model)> {
    tiny.iter()
        .map(|tiny| (tiny.name(), tiny.model(dtype)))
        .chain([gpt_oss(dtype)])
        .collect()
}

/// Tiny models with states.
pub(crate) fn recurrent(dtype: DType) -> Vec<(&'static str, Model)> {
    [("lfm2", Tiny::lfm2(dtype)), ("qwen35", Tiny::qwen35(dtype))]
        .map(|(name, parts)| (name, crate::run::open(parts.gguf()).unwrap()))
        .to_vec()
}

/// Largest difference of logits from the scalar level's, where both keep keys and values in half
/// precision: those of tiny models are below 10, and a key that rounds the other way moves them by
/// some 1e-4.
const CLOSE: f32 = 1e-3;

#[test]
fn passes_of_every_shape_of_a_layer() {
    for (dtype, shapes) in [
        (DType::F32, &Tiny::SHAPES[..]),
        (DType::Q8_0, &Tiny::SHAPES),
        (DType::MXFP4, &[]),
    ] {
        let with_states = if shapes.is_empty() {
            vec![]
        } else {
            recurrent(dtype)
        };
        for (name, model) in models(shapes, dtype).into_iter().chain(with_states) {
            let model = model.on(Arch::scalar());
            let (gpu, _) = on_gpu(&model, usize::MAX);
            let tokens = tokens(41, 3);
            let ours = logits(&mut gpu.session_with(&options()).unwrap(), &tokens, 37);
            let expected = logits(
                &mut engine(&model, 1).session_with(&options()).unwrap(),
                &tokens,
                37,
            );
            let difference = max_abs(&ours, &expected);
            println!("{name} {dtype}: {difference:.1e}");
            assert!(difference <= CLOSE, "{name} {dtype}: {difference}");
        }
    }
}

/// What layers of the tiny models do not have: ALiBi, gates, chunks, clamped and normed heads, latent
/// attention in both forms, groups of experts, parallel branches.
#[test]
fn passes_of_other_layers() {
    for name in [
        "bloom",
        "afmoe",
        "llama4",
        "mpt",
        "gptneox",
        "smallthinker",
        "bitnet",
        "deepseek2-lite-legacy",
        "deepseek3",
    ] {
        let family = mutants::models().iter().find(|family| family.name == name);
        let parts = family.unwrap().parts();
        let model = crate::run::open(parts.gguf()).unwrap().on(Arch::scalar());
        let (gpu, _) = on_gpu(&model, usize::MAX);
        let tokens = tokens(25, 3);
        let ours = logits(&mut gpu.session_with(&options()).unwrap(), &tokens, 21);
        let cpu = engine(&model, 1);
        let expected = logits(&mut cpu.session_with(&options()).unwrap(), &tokens, 21);
        let difference = max_abs(&ours, &expected);
        println!("{name}: {difference:.1e}");
        assert!(difference <= CLOSE, "{name}: {difference}");
    }
}

/// The engine's step with these slots, `(sequence, tokens, generated, first output)`; logits by
/// slot.
fn step(engine: &Engine, slots: &mut [Slot<'_>]) -> Vec<Vec<f32>> {
    let mut outputs = Outputs::default();
    engine
        .step(slots, &mut outputs, &CancelToken::default())
        .unwrap_or_else(|e| panic!("{e}"));
    (0..slots.len())
        .map(|slot| outputs.logits(slot).to_vec())
        .collect()
}

/// A row's bits depend on its kind and the tokens before it: not on who is computed beside it, on
/// how many rows there are, on pages that are shared, or on the order of threads.
#[test]
fn several_sequences_in_one_pass() {
    let in_f16 = models(&Tiny::ALL, DType::Q8_0)
        .into_iter()
        .chain(recurrent(DType::Q8_0))
        .map(|(_, model)| (model, options()));
    let quantised = SessionOptions {
        kv_type: KvType::Q4,
        kv_type_v: Some(KvType::Q5),
        ..options()
    };
    for (model, options) in in_f16.chain([(Tiny::Gemma2.model(DType::Q8_0), quantised)]) {
        let (engine, gpu) = on_gpu(&model, usize::MAX);
        let (prompt, other) = (tokens(70, 1), tokens(21, 2));
        let draft = [7, 8, 9];
        let sequence = || engine.sequence(&options).unwrap();
        use TokenKind::{Generated, Prompt};

        // Alone: a prompt in one piece, then token by token; another prompt.
        let (mut a, mut b) = (sequence(), sequence());
        let of_prompt = step(
            &engine,
            &mut [Slot::new(&mut a, &prompt, Prompt).outputs_from(60)],
        )
        .remove(0);
        let mut shared = a.fork().unwrap();
        let one_by_one: Vec<f32> = draft
            .iter()
            .flat_map(|t| step(&engine, &mut [Slot::new(&mut a, &[*t], Generated)]).remove(0))
            .collect();
        let of_other = step(&engine, &mut [Slot::new(&mut b, &other, Prompt)]).remove(0);

        // Together: the same prompt in two pieces, the draft on shared pages, one of which is
        // copied, the other prompt.
        gpu.shuffle(99);
        let (mut c, mut d, mut e) = (sequence(), sequence(), shared.fork().unwrap());
        step(
            &engine,
            &mut [Slot::new(&mut c, &prompt[..33], Prompt).outputs_from(33)],
        );
        let together = step(
            &engine,
            &mut [
                Slot::new(&mut c, &prompt[33..], Prompt).outputs_from(60 - 33),
                Slot::new(&mut shared, &draft, Generated).outputs_from(0),
                Slot::new(&mut d, &other, Prompt),
                Slot::new(&mut e, &draft[..1], Generated),
            ],
        );
        gpu.shuffle(0);
        assert_eq!(
            together,
            [
                of_prompt,
                one_by_one.clone(),
                of_other,
                one_by_one[..model.hparams().n_vocab].to_vec()
            ]
        );

        // A draft of which one token is accepted: what follows is computed again, with other
        // tokens.
        let mut rejected = e.fork().unwrap();
        step(
            &engine,
            &mut [Slot::new(&mut rejected, &[30, 31, 32, 33, 34], Generated)],
        );
        drop(rejected);
        let rest = step(
            &engine,
            &mut [Slot::new(&mut e, &draft[1..], Generated).outputs_from(0)],
        )
        .remove(0);
        assert_eq!(rest, one_by_one[model.hparams().n_vocab..]);
        let mut session = engine.session_with(&options).unwrap();
        session.prefill(&prompt).unwrap();
        session.decode(draft[0]).unwrap();
        session.decode(40).unwrap();
        session.rewind(prompt.len() + 1).unwrap();
        session.decode(draft[1]).unwrap();
        let n_vocab = model.hparams().n_vocab;
        assert_eq!(session.logits(), &one_by_one[n_vocab..2 * n_vocab]);
    }
}

/// The first layers on the CPU, the others on the GPU.
#[test]
fn layers_are_split() {
    for tiny in Tiny::ALL {
        let model = tiny.model(DType::F32).on(Arch::scalar());
        let tokens = tokens(70, 5);
        let whole = logits(
            &mut engine(&model, 1).session_with(&options()).unwrap(),
            &tokens,
            66,
        );
        let (split, _) = on_gpu(&model, 1);
        assert_eq!(
            split.runner().unwrap().first_layer(),
            model.hparams().n_layer - 1
        );
        // The second layer's matrices, and the head.
        let of_gpu = |name: &str| {
            !name.starts_with("blk.0.") && !name.ends_with("norm.weight") && !name.ends_with("bias")
        };
        let tied = model
            .gguf()
            .tensors()
            .iter()
            .all(|tensor| tensor.name != "output.weight");
        let tensors = model
            .gguf()
            .tensors()
            .iter()
            .filter(|t| of_gpu(&t.name) && (tied || t.name != "token_embd.weight"));
        assert_eq!(
            split.runner().unwrap().copied_bytes(),
            tensors.map(|tensor| tensor.n_bytes).sum::<u64>()
        );
        let mut session = split.session_with(&options()).unwrap();
        let ours = logits(&mut session, &tokens, 66);
        let difference = max_abs(&ours, &whole);
        println!("{}: {difference:.1e}", tiny.name());
        assert!(difference <= CLOSE, "{}: {difference}", tiny.name());
        // A copied page, of whose layers some are the CPU's.
        let mut fork = session.fork().unwrap();
        fork.decode(3).unwrap();
        session.decode(3).unwrap();
        assert_eq!(fork.logits(), session.logits());
    }
}

/// Keys and values in 8 to 4 bits, in any combination with f16: the logits differ from the scalar
/// level's by a part of what that precision costs there, as the same rows are rounded to the same
/// codes but for those near a border. The second engine leaves the first layer to the CPU.
#[test]
fn quantised_pages() {
    use KvType::{F16, Q4, Q5, Q6, Q8};
    let cases = if long() {
        &[(Q8, Q8), (Q6, F16), (Q5, Q4), (Q4, Q5)][..]
    } else {
        &[(Q8, Q8), (Q4, Q5)]
    };
    // The CPU stores keys below 8 bits without what they have in common, but for models that cap their
    // scores.
    let of_values = &[(Q8, Q8), (F16, Q5), (Q8, Q4)][..];
    for (tiny, cases) in [(Tiny::Llama, of_values), (Tiny::Gemma2, cases)] {
        let model = tiny.model(DType::F32).on(Arch::scalar());
        let tokens = tokens(70, 6);
        let of = |engine: &Engine, options: &SessionOptions| {
            logits(&mut engine.session_with(options).unwrap(), &tokens, 66)
        };
        let cpu = engine(&model, 1);
        let exact = of(
            &cpu,
            &SessionOptions {
                kv_type: KvType::F32,
                ..options()
            },
        );
        for &(k, v) in cases {
            let options = SessionOptions {
                kv_type: k,
                kv_type_v: Some(v),
                ..options()
            };
            let scalar = of(&cpu, &options);
            let cost = rms(&scalar, &exact);
            for n_layers in [usize::MAX, 1] {
                let apart = rms(&of(&on_gpu(&model, n_layers).0, &options), &scalar);
                println!(
                    "{} {k} {v}: rms {apart:.1e} apart, {cost:.1e} from f32",
                    tiny.name()
                );
                assert!(
                    cost > 0.0 && apart <= 0.25 * cost,
                    "{} {k} {v}: {apart:e} apart, cost {cost:e}",
                    tiny.name()
                );
            }
        }
    }
}

/// Every barrier of a plan is needed: without any one of them the emulator finds a hazard. So none
/// is missing either, for passes run without such reports.
#[test]
fn passes_need_each_of_their_barriers() {
    let plain = [Tiny::Gemma2, Tiny::Qwen2Moe, Tiny::Phi2]
        .map(|tiny| ((tiny.name(), tiny.model(DType::F32)), options(), 0));
    // Sinks, biases of experts, transformed keys, and terms of two adapters at every site.
    let quantised = SessionOptions {
        kv_type: KvType::Q4,
        ..options()
    };
    let with_states = recurrent(DType::F32)
        .into_iter()
        .map(|model| (model, options(), 0));
    for ((name, model), options, n_adapters) in plain
        .into_iter()
        .chain([(gpt_oss(DType::MXFP4), quantised, 2)])
        .chain(with_states)
    {
        let (engine, gpu) = on_gpu(&model, usize::MAX);
        let adapters: Vec<_> = (0..n_adapters)
            .map(|i| adapter(&model, 2, i, |_| true))
            .collect();
        for (kind, n) in [(TokenKind::Prompt, 5), (TokenKind::Generated, 2)] {
            let tokens = tokens(n, 1);
            let run = || {
                let mut seq = engine.sequence(&options).unwrap();
                for adapter in &adapters {
                    seq.attach(Arc::clone(adapter), 1.0).unwrap();
                }
                let slot = Slot::new(&mut seq, &tokens, kind);
                engine.step(
                    &mut [slot],
                    &mut Outputs::default(),
                    &CancelToken::default(),
                )
            };
            run().unwrap();
            let barriers = gpu.barriers();
            println!("{name} {kind:?}: {} barriers", barriers.len());
            assert!(barriers.len() > 20, "{name}: {} barriers", barriers.len());
            for barrier in barriers {
                gpu.leave_out(Some(barrier));
                match run() {
                    Err(SessionError::Gpu(GpuError::Pass { message }))
                        if message.contains("hazard") => {}
                    other => panic!("{name} {kind:?}: barrier before call {barrier}: {other:?}"),
                }
            }
            gpu.leave_out(None);
            run().unwrap();
        }
    }
}

/// An adapter of every matrix that `targets` selects, with terms that change logits by about their
/// own size.
fn adapter(
    model: &Model,
    rank: usize,
    seed: u64,
    targets: fn(&TargetModule) -> bool,
) -> Arc<Adapter> {
    let mut adapter = Adapter::zeros(model, rank, seed, targets).unwrap();
    for (site, term) in adapter.terms_mut() {
        let b = term.parts_mut().1;
        b.iter_mut()
            .enumerate()
            .for_each(|(i, b)| *b = ((i * 7 + site * 5 + seed as usize) % 11) as f32 / 50.0 - 0.1);
    }
    Arc::new(adapter)
}

/// Adapters of all matrices, of some experts, two at a time, and none: several sequences in one
/// pass have the bits of each alone, and the logits of the scalar level, also with layers split. A
/// changed adapter is used at once.
#[test]
fn sequences_have_their_own_adapters() {
    let phi3 = ("phi3", Tiny::Phi3.model(DType::F32));
    for (name, model) in models(&[Tiny::Gemma2], DType::F32)
        .into_iter()
        .chain([phi3])
    {
        let model = model.on(Arch::scalar());
        let (engine, _) = on_gpu(&model, usize::MAX);
        let cpu = crate::run::engine(&model, 1);
        let all = adapter(&model, 2, 1, |_| true);
        // Of a stack of experts only the second.
        let some = adapter(&model, 3, 2, |site| {
            site.expert.is_none_or(|e| e == 1) && site.part() != "token_embd"
        });
        let attached = [vec![], vec![&all], vec![&some, &all], vec![&all]];
        let prompts = [tokens(9, 1), tokens(5, 2), tokens(7, 3), tokens(3, 4)];
        let sequence = |engine: &Engine, adapters: &[&Arc<Adapter>]| {
            let mut sequence = engine.sequence(&options()).unwrap();
            for (i, adapter) in adapters.iter().enumerate() {
                sequence
                    .attach(Arc::clone(adapter), 1.0 - i as f32 / 4.0)
                    .unwrap();
            }
            sequence
        };
        let run = |engine: &Engine, which: &[usize]| -> Vec<Vec<f32>> {
            let mut sequences: Vec<_> = which
                .iter()
                .map(|&i| sequence(engine, &attached[i]))
                .collect();
            let slots = sequences.iter_mut().zip(which);
            let prompt = |(s, &i): (_, &usize)| {
                Slot::new(s, &prompts[i][..], TokenKind::Prompt).outputs_from(1)
            };
            let mut logits = step(engine, &mut slots.map(prompt).collect::<Vec<_>>());
            let slots = sequences
                .iter_mut()
                .map(|s| Slot::new(s, &[4, 5], TokenKind::Generated).outputs_from(0));
            let next = step(engine, &mut slots.collect::<Vec<_>>());
            logits
                .iter_mut()
                .zip(next)
                .for_each(|(logits, next)| logits.extend(next));
            logits
        };
        let together = run(&engine, &[0, 1, 2, 3]);
        for (i, together) in together.iter().enumerate() {
            assert_eq!(run(&engine, &[i])[0], *together, "{name} {i}");
            let difference = max_abs(together, &run(&cpu, &[i])[0]);
            println!("{name} {i}: {difference:.1e}");
            assert!(difference <= CLOSE, "{name} {i}: {difference}");
        }
        // The CPU adds the terms of the first layer and of the embeddings, the GPU the others.
        let (split, _) = on_gpu(&model, 1);
        let difference = max_abs(&run(&split, &[2])[0], &run(&cpu, &[2])[0]);
        assert!(difference <= CLOSE, "{name}, split: {difference}");

        let changed = |engine: &Engine| {
            let mut session = engine.session_with(&options()).unwrap();
            let id = session.adapters().attach(Arc::clone(&all), 1.0).unwrap();
            session.prefill(&prompts[1]).unwrap();
            let before = session.logits().to_vec();
            let negate = |term: &mut [f32]| term.iter_mut().for_each(|b| *b = -*b);
            session
                .adapters()
                .update(id, |all| {
                    all.terms_mut().for_each(|(_, t)| negate(t.parts_mut().1))
                })
                .unwrap();
            session.clear();
            session.prefill(&prompts[1]).unwrap();
            (before, session.logits().to_vec())
        };
        let (before, after) = changed(&engine);
        let (_, expected) = changed(&cpu);
        assert!(
            max_abs(&after, &expected) <= CLOSE,
            "{name}: {}",
            max_abs(&after, &expected)
        );
        assert!(
            max_abs(&before, &after) > 100.0 * CLOSE,
            "{name}: the change has no effect"
        );
    }
}

#[test]
fn what_the_gpu_does_without_is_refused() {
    let model = Tiny::Llama.model(DType::F32);
    let (engine, gpu) = on_gpu(&model, usize::MAX);
    let refused = |outcome: Result<(), SessionError>, what: &str| match outcome {
        Err(SessionError::NotOnDevice {
            what: found,
            device,
        }) => {
            assert!(
                found.contains(what) && device.contains("emulated"),
                "{found} {device}"
            )
        }
        other => panic!("{what}: {other:?}"),
    };
    for (kv_type, what) in [(KvType::F32, "f32"), (KvType::Bf16, "bf16")] {
        let values = SessionOptions {
            kv_type_v: Some(kv_type),
            ..options()
        };
        refused(
            engine
                .session_with(&SessionOptions {
                    kv_type,
                    ..options()
                })
                .map(|_| ()),
            what,
        );
        refused(engine.session_with(&values).map(|_| ()), what);
    }
    let tiers = SessionOptions {
        kv_tiers: Some(KvTiers::default()),
        ..options()
    };
    refused(engine.session_with(&tiers).map(|_| ()), "age");
    struct Look;
    impl ruvllm::compute::EvalCallback for Look {
        fn tensor(&mut self, _: ruvllm::compute::HookPoint, _: usize, _: &[f32]) {}
    }
    let mut session = engine.session_with(&options()).unwrap();
    refused(
        session
            .hooks()
            .prefill_probed(&[1], 0, &mut Look, |_, _| ()),
        "probes",
    );
    // Nothing has happened, and the session goes on.
    assert_eq!(session.position(), 0);
    session.prefill(&[1, 2]).unwrap();

    let odd = Tiny::Llama.model(DType::Q4_1);
    match GpuRunner::new(gpu, &odd, usize::MAX) {
        Err(GpuError::Unsupported { what }) => {
            assert!(what.contains("Q4_1 of token_embd.weight"), "{what}")
        }
        _ => panic!("Q4_1"),
    }
}

/// Logits of other engines: prompts, and tokens one by one, as far from them as the scalar level
/// with keys and values in the same precision.
#[test]
fn conformance_models() {
    use KvType::{F16, Q8};
    let Some(root) = conformance() else { return };
    for (name, kv_type) in [
        ("llama-gqa-tied-rope3", F16),
        ("llama-gqa-tied-rope3", Q8),
        ("qwen3-tied", F16),
        ("gemma2", F16),
        ("gemma3", F16),
        ("gemma3", Q8),
        ("qwen3moe", F16),
        ("gpt-oss", F16),
        ("q-gpt-oss-mxfp4", F16),
    ] {
        let (folder, file, logits_of) = match name {
            "gpt-oss" => ("models2", "model-f16.gguf", "logits.f32"),
            "q-gpt-oss-mxfp4" => ("models2/quantised", "model-mxfp4.gguf", "logits.mxfp4.f32"),
            _ => ("models", "model-f16.gguf", "logits.f32"),
        };
        let dir = root.join(folder).join(name);
        let manifest = read_json(&dir.join("manifest.json"));
        let mut open = OpenOptions::new();
        if name == "q-gpt-oss-mxfp4" {
            // As its reference, see `conformance_logits.rs`.
            open = open.override_kv("gpt-oss.rope.scaling.yarn_truncate", true);
        }
        let model = open.open(dir.join(file)).unwrap().on(Arch::scalar());
        let n_vocab = model.hparams().n_vocab;
        let (gpu, _) = on_gpu(&model, usize::MAX);
        for id in ["len17", "len150"] {
            let test = manifest["tests"]
                .as_array()
                .unwrap()
                .iter()
                .find(|test| test["id"] == id)
                .unwrap();
            let (tokens, positions) = (
                numbers::<u32>(&test["tokens"]),
                numbers::<usize>(&test["positions"]),
            );
            let golden = read_f32(&dir.join(format!("{id}.{logits_of}")));
            let n_prompt = tokens.len() - 4;
            let of = |engine: &Engine| {
                let options = SessionOptions {
                    kv_type,
                    ..options()
                };
                let all = logits(
                    &mut engine.session_with(&options).unwrap(),
                    &tokens,
                    n_prompt,
                );
                positions
                    .iter()
                    .flat_map(|&p| all[p * n_vocab..][..n_vocab].to_vec())
                    .collect::<Vec<_>>()
            };
            let (ours, scalar) = (of(&gpu), of(&engine(&model, 2)));
            let (cost, allowed) = (rms(&ours, &golden), rms(&scalar, &golden));
            let apart = rms(&ours, &scalar);
            println!(
                "{name} {kv_type} {id}: rms {cost:.2e} (scalar {allowed:.2e}), {apart:.2e} apart"
            );
            assert!(
                cost <= 1.125 * allowed,
                "{name} {kv_type} {id}: {cost:e}, scalar {allowed:e}"
            );
            // Most of that cost is the same: few keys and values round the other way.
            assert!(
                apart <= 0.25 * allowed,
                "{name} {kv_type} {id}: {apart:e} apart from scalar, which costs {allowed:e}"
            );
        }
    }
}

/// Architectures of which some models compute on a GPU; docs/guide/models.md shows them
/// (`tests/docs.py`).
#[rustfmt::skip]
const COMPUTED: &[&str] = &[
    "afmoe", "apertus", "arcee", "arctic", "baichuan", "bailingmoe", "bailingmoe2", "bailingmoe3",
    "bitnet", "bloom", "chatglm", "codeshell", "cohere2", "cohere2moe", "command-r", "dbrx", "deci",
    "deepseek", "deepseek2", "deepseek2-ocr", "dots1", "ernie4_5", "ernie4_5-moe", "exaone",
    "exaone-moe", "exaone4", "falcon", "falcon-h1", "gemma", "gemma2", "gemma3", "gemma4", "glm4",
    "glm4moe", "gpt-oss", "gpt2", "gptneox", "granite", "granite_swa", "granitehybrid", "granitemoe",
    "grok", "hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "hy_v3", "internlm2", "jais", "jais2",
    "jamba", "kimi-linear", "laguna", "lfm2", "lfm2moe", "llama", "llama4", "maincoder", "mamba",
    "mamba2", "maple", "mellum", "mimo2", "minicpm", "minicpm3", "minimax-m2", "mistral3", "mistral4",
    "mpt", "muse-glimmer", "nanbeige", "nemotron", "nemotron_h", "nemotron_h_moe", "olmo", "olmo2",
    "olmoe", "openelm", "orion", "paddleocr", "pangu-embedded", "phi2", "phi3", "plamo", "plamo2",
    "plamo3", "plm", "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe",
    "qwen3next", "qwen3vl", "qwen3vlmoe", "refact", "seed_oss", "smallthinker", "smollm3", "spark2_5",
    "stablelm", "starcoder", "starcoder2", "step35", "xverse",
];

#[test]
fn architectures_with_kernels() {
    let gpu = Emulated::start(&all_shaders());
    let mut computed = BTreeSet::new();
    for model in mutants::models().iter().chain(mutants::encoders()) {
        let opened = OpenOptions::new().open_gguf(model.parts().gguf()).unwrap();
        match GpuRunner::new(gpu.clone(), &opened, usize::MAX) {
            Ok(_) => drop(computed.insert(model.arch.as_str())),
            Err(GpuError::Unsupported { .. }) => {}
            Err(error) => panic!("{}: {error}", model.name),
        }
    }
    assert_eq!(Vec::from_iter(computed), COMPUTED);
}
