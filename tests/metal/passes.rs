//! Whole passes: engines on the emulated GPU, by the runner and the plans that Metal has, against the CPU's scalar level
//! with the same keys and values in half precision.

use crate::all_shaders;
use crate::common::{conformance, numbers, read_f32, read_json};
use crate::emulated::Emulated;
use crate::run::{OnLevel, engine};
use crate::tiny::{N_VOCAB, Tiny};
use ruvllm::arch::Arch;
use ruvllm::exec::{CancelToken, Engine, EngineOptions, KvType, Outputs, SessionOptions, Slot, TokenKind};
use ruvllm::lora::Adapter;
use ruvllm::metal::MetalRunner;
use ruvllm::model::{Model, OpenOptions, Site};
use ruvllm::quant::DType;
use ruvllm::{MetalError, Session, SessionError};
use std::num::NonZeroUsize;
use std::sync::Arc;

/// The last `n_layers` layers of a model on the emulated GPU.
fn on_gpu(model: &Model, n_layers: usize) -> (Engine, Emulated) {
    let gpu = Emulated::start(&all_shaders());
    let runner = MetalRunner::new(gpu.clone(), model, n_layers).unwrap_or_else(|e| panic!("{e}"));
    let options = EngineOptions { n_threads: NonZeroUsize::new(1), ..Default::default() };
    (Engine::with_runner(model, &options, Arc::new(runner)).unwrap(), gpu)
}

fn options() -> SessionOptions {
    SessionOptions { n_ctx: Some(256), kv_type: KvType::F16, ..Default::default() }
}

fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 31 + seed * 7 + i * i % 11) % N_VOCAB) as u32).collect()
}

fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d.is_nan() { f32::NAN } else { d.max(m) })
}

fn rms(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    (a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / a.len() as f64).sqrt()
}

/// Logits of all tokens: a prompt of `n_prompt`, then one by one.
fn logits(session: &mut Session, tokens: &[u32], n_prompt: usize) -> Vec<f32> {
    let mut all = Vec::new();
    session.prefill_each(&tokens[..n_prompt], 0, |_, logits| all.extend_from_slice(logits)).unwrap();
    for &token in &tokens[n_prompt..] {
        session.decode(token).unwrap();
        all.extend_from_slice(session.logits());
    }
    all
}

/// These models and gpt-oss, with their names.
fn models(tiny: &[Tiny], dtype: DType) -> Vec<(&'static str, Model)> {
    let oss = crate::run::open(Tiny::gpt_oss(dtype).gguf()).unwrap();
    tiny.iter().map(|tiny| (tiny.name(), tiny.model(dtype))).chain([("gpt-oss", oss)]).collect()
}

/// Largest difference of logits from the scalar level's, where both keep keys and values in half precision: those of
/// tiny models are below 10, and a key that rounds the other way moves them by some 1e-4.
const CLOSE: f32 = 1e-3;

#[test]
fn passes_of_every_shape_of_a_layer() {
    for dtype in [DType::F32, DType::Q8_0] {
        for (name, model) in models(&Tiny::SHAPES, dtype) {
            let model = model.on(Arch::scalar());
            let (gpu, _) = on_gpu(&model, usize::MAX);
            let tokens = tokens(41, 3);
            let ours = logits(&mut gpu.session_with(&options()).unwrap(), &tokens, 37);
            let expected = logits(&mut engine(&model, 1).session_with(&options()).unwrap(), &tokens, 37);
            let difference = max_abs(&ours, &expected);
            println!("{name} {dtype}: {difference:.1e}");
            assert!(difference <= CLOSE, "{name} {dtype}: {difference}");
        }
    }
}

/// The engine's step with these slots, `(sequence, tokens, generated, first output)`; logits by slot.
fn step(engine: &Engine, slots: &mut [Slot<'_>]) -> Vec<Vec<f32>> {
    let mut outputs = Outputs::default();
    engine.step(slots, &mut outputs, &CancelToken::default()).unwrap_or_else(|e| panic!("{e}"));
    (0..slots.len()).map(|slot| outputs.logits(slot).to_vec()).collect()
}

/// A row's bits depend on its kind and the tokens before it: not on who is computed beside it, on how many rows there
/// are, on pages that are shared, or on the order of threads.
#[test]
fn several_sequences_in_one_pass() {
    for (_, model) in models(&Tiny::ALL, DType::Q8_0) {
        let (engine, gpu) = on_gpu(&model, usize::MAX);
        let (prompt, other) = (tokens(70, 1), tokens(21, 2));
        let draft = [7, 8, 9];
        let sequence = || engine.sequence(&options()).unwrap();
        use TokenKind::{Generated, Prompt};

        // Alone: a prompt in one piece, then token by token; another prompt.
        let (mut a, mut b) = (sequence(), sequence());
        let of_prompt = step(&engine, &mut [Slot::new(&mut a, &prompt, Prompt).outputs_from(60)]).remove(0);
        let mut shared = a.fork().unwrap();
        let one_by_one: Vec<f32> =
            draft.iter().flat_map(|t| step(&engine, &mut [Slot::new(&mut a, &[*t], Generated)]).remove(0)).collect();
        let of_other = step(&engine, &mut [Slot::new(&mut b, &other, Prompt)]).remove(0);

        // Together: the same prompt in two pieces, the draft on shared pages, one of which is copied, the other prompt.
        gpu.shuffle(99);
        let (mut c, mut d, mut e) = (sequence(), sequence(), shared.fork().unwrap());
        step(&engine, &mut [Slot::new(&mut c, &prompt[..33], Prompt).outputs_from(33)]);
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
        assert_eq!(together, [of_prompt, one_by_one.clone(), of_other, one_by_one[..model.hparams().n_vocab].to_vec()]);

        // A draft of which one token is accepted: what follows is computed again, with other tokens.
        let mut rejected = e.fork().unwrap();
        step(&engine, &mut [Slot::new(&mut rejected, &[30, 31, 32, 33, 34], Generated)]);
        drop(rejected);
        let rest = step(&engine, &mut [Slot::new(&mut e, &draft[1..], Generated).outputs_from(0)]).remove(0);
        assert_eq!(rest, one_by_one[model.hparams().n_vocab..]);
        let mut session = engine.session_with(&options()).unwrap();
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
        let whole = logits(&mut engine(&model, 1).session_with(&options()).unwrap(), &tokens, 66);
        let (split, _) = on_gpu(&model, 1);
        assert_eq!(split.runner().unwrap().first_layer(), model.hparams().n_layer - 1);
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

/// Every barrier of a plan is needed: without any one of them the emulator finds a hazard. So none is missing either,
/// for passes run without such reports.
#[test]
fn passes_need_each_of_their_barriers() {
    for tiny in [Tiny::Gemma2, Tiny::Qwen2Moe, Tiny::Phi2] {
        let (engine, gpu) = on_gpu(&tiny.model(DType::F32), usize::MAX);
        for (kind, n) in [(TokenKind::Prompt, 5), (TokenKind::Generated, 2)] {
            let tokens = tokens(n, 1);
            let run = || {
                let mut seq = engine.sequence(&options()).unwrap();
                let slot = Slot::new(&mut seq, &tokens, kind);
                engine.step(&mut [slot], &mut Outputs::default(), &CancelToken::default())
            };
            run().unwrap();
            let barriers = gpu.barriers();
            assert!(barriers.len() > 20, "{}: {} barriers", tiny.name(), barriers.len());
            for barrier in barriers {
                gpu.leave_out(Some(barrier));
                match run() {
                    Err(SessionError::Metal(MetalError::Pass { message })) if message.contains("hazard") => {}
                    other => panic!("{} {kind:?}: barrier before call {barrier}: {other:?}", tiny.name()),
                }
            }
            gpu.leave_out(None);
            run().unwrap();
        }
    }
}

/// An adapter of every matrix that `targets` selects, with terms that change logits by about their own size.
fn adapter(model: &Model, rank: usize, seed: u64, targets: fn(&Site) -> bool) -> Arc<Adapter> {
    let mut adapter = Adapter::zeros(model, rank, seed, targets).unwrap();
    for (site, term) in adapter.terms_mut() {
        let b = term.parts_mut().1;
        b.iter_mut().enumerate().for_each(|(i, b)| *b = ((i * 7 + site * 5 + seed as usize) % 11) as f32 / 50.0 - 0.1);
    }
    Arc::new(adapter)
}

/// Adapters of all matrices, of some experts, two at a time, and none: several sequences in one pass have the bits of
/// each alone, and the logits of the scalar level, also with layers split. A changed adapter is used at once.
#[test]
fn sequences_have_their_own_adapters() {
    let phi3 = ("phi3", Tiny::Phi3.model(DType::F32));
    for (name, model) in models(&[Tiny::Gemma2], DType::F32).into_iter().chain([phi3]) {
        let model = model.on(Arch::scalar());
        let (engine, _) = on_gpu(&model, usize::MAX);
        let cpu = crate::run::engine(&model, 1);
        let all = adapter(&model, 2, 1, |_| true);
        // Of a stack of experts only the second.
        let some = adapter(&model, 3, 2, |site| site.expert.is_none_or(|e| e == 1) && site.part() != "token_embd");
        let attached = [vec![], vec![&all], vec![&some, &all], vec![&all]];
        let prompts = [tokens(9, 1), tokens(5, 2), tokens(7, 3), tokens(3, 4)];
        let sequence = |engine: &Engine, adapters: &[&Arc<Adapter>]| {
            let mut sequence = engine.sequence(&options()).unwrap();
            for (i, adapter) in adapters.iter().enumerate() {
                sequence.attach(Arc::clone(adapter), 1.0 - i as f32 / 4.0).unwrap();
            }
            sequence
        };
        let run = |engine: &Engine, which: &[usize]| -> Vec<Vec<f32>> {
            let mut sequences: Vec<_> = which.iter().map(|&i| sequence(engine, &attached[i])).collect();
            let slots = sequences.iter_mut().zip(which);
            let prompt = |(s, &i): (_, &usize)| Slot::new(s, &prompts[i][..], TokenKind::Prompt).outputs_from(1);
            let mut logits = step(engine, &mut slots.map(prompt).collect::<Vec<_>>());
            let slots = sequences.iter_mut().map(|s| Slot::new(s, &[4, 5], TokenKind::Generated).outputs_from(0));
            let next = step(engine, &mut slots.collect::<Vec<_>>());
            logits.iter_mut().zip(next).for_each(|(logits, next)| logits.extend(next));
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
            let id = session.attach(Arc::clone(&all), 1.0).unwrap();
            session.prefill(&prompts[1]).unwrap();
            let before = session.logits().to_vec();
            let negate = |term: &mut [f32]| term.iter_mut().for_each(|b| *b = -*b);
            session.update_adapter(id, |all| all.terms_mut().for_each(|(_, t)| negate(t.parts_mut().1))).unwrap();
            session.clear();
            session.prefill(&prompts[1]).unwrap();
            (before, session.logits().to_vec())
        };
        let (before, after) = changed(&engine);
        let (_, expected) = changed(&cpu);
        assert!(max_abs(&after, &expected) <= CLOSE, "{name}: {}", max_abs(&after, &expected));
        assert!(max_abs(&before, &after) > 100.0 * CLOSE, "{name}: the change has no effect");
    }
}

#[test]
fn what_the_gpu_does_without_is_refused() {
    let model = Tiny::Llama.model(DType::F32);
    let (engine, gpu) = on_gpu(&model, usize::MAX);
    let refused = |outcome: Result<(), SessionError>, what: &str| match outcome {
        Err(SessionError::NotOnDevice { what: found, device }) => {
            assert!(found.contains(what) && device.contains("emulated"), "{found} {device}")
        }
        other => panic!("{what}: {other:?}"),
    };
    let exact = SessionOptions { kv_type: KvType::F32, ..options() };
    refused(engine.session_with(&exact).map(|_| ()), "f16");
    struct Look;
    impl ruvllm::exec::Probe for Look {
        fn tensor(&mut self, _: ruvllm::exec::Tap, _: usize, _: &[f32]) {}
    }
    let mut session = engine.session_with(&options()).unwrap();
    refused(session.prefill_probed(&[1], 0, &mut Look, |_, _| ()), "probes");
    // Nothing has happened, and the session goes on.
    assert_eq!(session.position(), 0);
    session.prefill(&[1, 2]).unwrap();

    let odd = Tiny::Llama.model(DType::Q4_1);
    match MetalRunner::new(gpu, &odd, usize::MAX) {
        Err(MetalError::Unsupported { what }) => assert!(what.contains("Q4_1 of token_embd.weight"), "{what}"),
        _ => panic!("Q4_1"),
    }
}

/// Logits of other engines: prompts, and tokens one by one, as far from them as the scalar level with keys and values
/// in half precision.
#[test]
fn conformance_models() {
    let Some(root) = conformance() else { return };
    for name in ["llama-gqa-tied-rope3", "qwen3-tied", "gemma2", "gemma3", "qwen3moe", "gpt-oss", "q-gpt-oss-mxfp4"] {
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
            let test = manifest["tests"].as_array().unwrap().iter().find(|test| test["id"] == id).unwrap();
            let (tokens, positions) = (numbers::<u32>(&test["tokens"]), numbers::<usize>(&test["positions"]));
            let golden = read_f32(&dir.join(format!("{id}.{logits_of}")));
            let n_prompt = tokens.len() - 4;
            let of = |engine: &Engine| {
                let all = logits(&mut engine.session_with(&options()).unwrap(), &tokens, n_prompt);
                positions.iter().flat_map(|&p| all[p * n_vocab..][..n_vocab].to_vec()).collect::<Vec<_>>()
            };
            let (ours, scalar) = (of(&gpu), of(&engine(&model, 2)));
            let (cost, allowed) = (rms(&ours, &golden), rms(&scalar, &golden));
            println!("{name} {id}: rms {cost:.2e} (scalar {allowed:.2e}), max {:.2e}", max_abs(&ours, &golden));
            assert!(cost <= 1.125 * allowed, "{name} {id}: {cost:e}, scalar {allowed:e}");
            // Most of that cost is the same: few keys and values round the other way.
            let apart = rms(&ours, &scalar);
            assert!(apart <= 0.25 * allowed, "{name} {id}: {apart:e} apart from scalar, which costs {allowed:e}");
        }
    }
}
