//! A GPU whose memory the CPU cannot access: its pages hold what shared ones do, whatever happens
//! to a sequence, and the CPU goes on where it fails.

use crate::all_shaders;
use crate::emulated::{Emulated, Left};
use crate::passes::{logits, options, recurrent, tokens};
use crate::run::{OnLevel, engine};
use crate::tiny::Tiny;
use ruvllm::Model;
use ruvllm::SessionError;
use ruvllm::arch::Arch;
use ruvllm::engine::{CacheMode, EngineOptions};
use ruvllm::gpu::GpuError;
use ruvllm::gpu::GpuRunner;
use ruvllm::quant::DType;
use ruvllm::{Engine, SessionOptions};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

fn on(
    gpu: Emulated,
    model: &Model,
    n_layers: usize,
    prefix_folder: Option<PathBuf>,
    cpu_fallback: bool,
) -> Engine {
    let runner = GpuRunner::new(gpu, model, n_layers).unwrap_or_else(|e| panic!("{e}"));
    let options = EngineOptions {
        n_threads: NonZeroUsize::new(1),
        prefix_folder,
        cpu_fallback,
        ..Default::default()
    };
    Engine::with_runner(model, &options, Arc::new(runner)).unwrap()
}

/// Logits after everything that happens to pages: forks that write to shared ones, rewinds, saved
/// sessions, the prefix cache in memory and in its folder.
fn life(engine: &Engine, prompt: &[u32]) -> Vec<f32> {
    let mut all = Vec::new();
    let options = SessionOptions {
        prefix: CacheMode::On.into(),
        ..options()
    };
    let mut session = engine.session_with(&options).unwrap();
    session.prefill(&prompt[..70]).unwrap();
    let mut fork = session.fork().unwrap();
    for token in [3, 4] {
        session.decode(token).unwrap();
        all.extend_from_slice(session.logits());
    }
    // On a copy of the shared page.
    fork.prefill(&prompt[70..]).unwrap();
    all.extend_from_slice(fork.logits());
    fork.rewind(68).unwrap();
    fork.decode(5).unwrap();
    all.extend_from_slice(fork.logits());
    let saved = session.state().to_bytes().unwrap();
    let mut loaded = engine.session_with(&options).unwrap();
    loaded.cache().load_bytes(saved).unwrap();
    assert_eq!(loaded.logits(), session.logits());
    loaded.decode(6).unwrap();
    session.decode(6).unwrap();
    assert_eq!(loaded.logits(), session.logits());
    all.extend_from_slice(session.logits());
    session.clear();
    drop(fork);
    session.cache().reuse(prompt).unwrap();
    let n_cached = session.position();
    session.prefill(&prompt[n_cached..]).unwrap();
    all.extend_from_slice(session.logits());
    all.push(n_cached as f32);
    all
}

#[test]
fn pages_in_memory_of_its_own_hold_the_same() {
    let folder = |name: &str| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("prefixes-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        folder
    };
    let plain = [Tiny::Llama, Tiny::Gemma2].map(|tiny| (tiny.name(), tiny.model(DType::Q8_0)));
    let all: Vec<_> = plain.into_iter().chain(recurrent(DType::Q8_0)).collect();
    for ((name, model), n_layers) in [usize::MAX, 1]
        .into_iter()
        .flat_map(|n| all.iter().map(move |model| (model, n)))
    {
        let model = model.on(Arch::scalar());
        let prompt = tokens(140, 3);
        let (ours, theirs) = (folder("separate"), folder("shared"));
        let run = |gpu: Emulated, folder: &PathBuf| {
            let engine = on(gpu, &model, n_layers, Some(folder.clone()), false);
            let first = life(&engine, &prompt);
            drop(engine);
            first
        };
        let separate = run(Emulated::separate(&all_shaders()), &ours);
        let shared = run(Emulated::start(&all_shaders()), &theirs);
        assert_eq!(separate, shared, "{name}, {n_layers} layers");
        // What the folder has of the process before.
        let again = run(Emulated::separate(&all_shaders()), &ours);
        let cached = |all: &[f32]| all[all.len() - 1];
        println!(
            "{name}: {} and {} cached",
            cached(&separate),
            cached(&again)
        );
        assert!(cached(&separate) >= 64.0, "{name}: nothing was cached");
        let n = separate.len() - 1;
        assert_eq!(again[..n], separate[..n], "{name}, {n_layers} layers");
        for folder in [ours, theirs] {
            std::fs::remove_dir_all(folder).unwrap();
        }
    }
}

/// A device that is lost in any pass, or has no memory for any page: an error of the call, after
/// which nothing has changed; or the CPU goes on, with the bits of one that computed everything.
#[test]
fn the_cpu_goes_on_after_a_failure() {
    let model = Tiny::Gemma2.model(DType::Q8_0).on(Arch::scalar());
    let all = tokens(76, 4);
    let cpu = engine(&model, 1);
    let mut session = cpu.session_with(&options()).unwrap();
    let expected = logits(&mut session, &all, 70);
    let n_vocab = model.hparams().n_vocab;
    let none = usize::MAX;
    let kinds = [(3, none), (1, none), (none, 0), (none, 2)];
    for (n_layers, (passes, pages)) in [none, 1].into_iter().flat_map(|n| kinds.map(|k| (n, k))) {
        for cpu_fallback in [false, true] {
            let gpu = Emulated::separate(&all_shaders());
            let engine = on(gpu.clone(), &model, n_layers, None, cpu_fallback);
            gpu.limit(Left { passes, pages });
            let (mut session, mut other) = (
                engine.session_with(&options()).unwrap(),
                engine.session_with(&options()).unwrap(),
            );
            let _ = other.prefill(&all[..20]);
            let mut failed = 0;
            for (i, piece) in [&all[..70], &all[70..71], &all[71..72], &all[72..]]
                .into_iter()
                .enumerate()
            {
                let before = session.position();
                let outcome = match piece {
                    [token] => session.decode(*token),
                    tokens => session.prefill(tokens),
                };
                match outcome {
                    Ok(()) => continue,
                    Err(SessionError::Gpu(GpuError::Lost { .. })) if passes != none => {}
                    Err(SessionError::OutOfMemory { what, .. }) if pages != none => {
                        assert!(what.contains("page"), "{what}");
                    }
                    Err(error) => panic!("{i}: {error}"),
                }
                assert!(!cpu_fallback);
                assert_eq!(session.position(), before);
                failed += 1;
            }
            assert_eq!(failed > 0, !cpu_fallback, "{passes} {pages}");
            assert_eq!(engine.gpu_failure().is_some(), cpu_fallback);
            if cpu_fallback {
                // The last tokens are a prompt's here; the CPU's logits of those before.
                assert_eq!(session.tokens(), all);
                session.rewind(71).unwrap();
                session.decode(all[71]).unwrap();
                assert_eq!(
                    session.logits(),
                    &expected[71 * n_vocab..72 * n_vocab],
                    "{passes} {pages}"
                );
                // A session that was not in the pass that failed.
                if other.position() > 0 {
                    other.decode(all[20]).unwrap();
                    let mut same = cpu.session_with(&options()).unwrap();
                    same.prefill(&all[..20]).unwrap();
                    same.decode(all[20]).unwrap();
                    assert_eq!(other.logits(), same.logits());
                }
                assert!(engine.runner().is_none());
            }
        }
    }
}
