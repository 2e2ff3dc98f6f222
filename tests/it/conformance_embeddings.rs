//! Vectors of texts against Hugging Face's (`RUVLLM_CONFORMANCE`), to the tolerance of the
//! reference data: 1e-4 of vectors of length 1, and 1e-3 of hidden states, as of logits.

use crate::common::{conformance, emulated, numbers, read_f32, read_json};
use crate::run::OnLevel;
use crate::tiny::Tiny;
use ruvllm::Embedder;
use ruvllm::Model;
use ruvllm::SessionError;
use ruvllm::arch::Arch;
use ruvllm::compute::NoCallback;
use ruvllm::gguf::Gguf;
use ruvllm::model::{Pooling, supported_architectures};
use ruvllm::quant::DType;

fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |m, d| if d.is_nan() { f32::NAN } else { d.max(m) })
}

#[test]
fn f16_models_of_every_family() {
    let Some(root) = conformance() else { return };
    let (mut n_models, mut failures) = (0, Vec::new());
    for dir in crate::common::subdirectories(&root.join("models2")) {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let manifest = dir.join("manifest.json");
        if !manifest.exists() || read_json(&manifest)["kind"] != "embedding" {
            continue;
        }
        let (manifest, path) = (read_json(&manifest), dir.join("model-f16.gguf"));
        let gguf = Gguf::open(&path).unwrap();
        let arch = gguf.metadata().str("general.architecture").unwrap();
        if !supported_architectures().any(|supported| supported == arch) {
            eprintln!("{name}: {arch} is not supported");
            continue;
        }
        n_models += 1;
        let tests = manifest["tests"].as_array().unwrap();
        let texts: Vec<Vec<u32>> = tests.iter().map(|test| numbers(&test["tokens"])).collect();
        for arch in Arch::available() {
            let model = Model::open(&path)
                .unwrap_or_else(|e| panic!("{name}: {e}"))
                .on(arch);
            let embedder = model.embedder().unwrap();
            let ours = embedder.embed_tokens(&texts).unwrap();
            // Neighbours of a text change no bit.
            assert_eq!(
                embedder.clone().n_batch(1).embed_tokens(&texts).unwrap(),
                ours,
                "{name} {arch:?}"
            );
            for ((test, tokens), ours) in tests.iter().zip(&texts).zip(ours) {
                let id = test["id"].as_str().unwrap();
                let golden = |file: &str| test[file].as_str().map(|file| read_f32(&dir.join(file)));
                let mut check = |what: &str, difference: f32, bound: f32| {
                    if difference.is_nan() || difference > bound {
                        failures.push(format!("{name} {arch:?} {id} {what}: {difference}"));
                    }
                };
                check(
                    "vector",
                    max_abs(&ours, &golden("embedding_file").unwrap()),
                    1e-4,
                );
                if let Some(golden) = golden("token_embeddings_file") {
                    check(
                        "states",
                        max_abs(
                            &embedder.states_of(tokens, &mut NoCallback).unwrap(),
                            &golden,
                        ),
                        1e-3,
                    );
                }
            }
            if emulated() {
                break;
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(n_models >= 7, "only {n_models} models found");
}

#[test]
fn poolings_of_the_same_states() {
    let model = Tiny::Llama.model(DType::F32);
    let text = [5, 9, 2, 41];
    let embedder = |pooling| model.embedder().unwrap().normalise(false).pooling(pooling);
    let states = embedder(Pooling::Mean)
        .states_of(&text, &mut NoCallback)
        .unwrap();
    let n = model.hparams().n_embd;
    let vector = |pooling| embedder(pooling).embed_tokens(&[text]).unwrap().remove(0);
    assert_eq!(vector(Pooling::Cls), states[..n]);
    assert_eq!(vector(Pooling::Last), states[3 * n..]);
    let mean: Vec<f32> = (0..n)
        .map(|i| states.chunks(n).map(|row| row[i]).sum::<f32>() / 4.0)
        .collect();
    assert!(max_abs(&vector(Pooling::Mean), &mean) <= 1e-6);
    let unit = embedder(Pooling::Mean)
        .normalise(true)
        .embed_tokens(&[text])
        .unwrap()
        .remove(0);
    assert!((unit.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() <= 1e-6);
}

#[test]
fn texts_that_do_not_fit_are_refused() {
    let model = Tiny::Llama.model(DType::F32);
    let embedder = Embedder::new(&model.engine().unwrap()).unwrap();
    let embed = |text: &[u32]| embedder.embed_tokens(&[text]).unwrap_err();
    assert!(matches!(embed(&[]), SessionError::NoTokens));
    assert!(matches!(
        embed(&[1, 50]),
        SessionError::TokenOutOfRange { token: 50, .. }
    ));
    assert!(matches!(
        embed(&[1; 257]),
        SessionError::ContextFull {
            n_ctx: 256,
            n_new: 257,
            ..
        }
    ));
    assert!(matches!(
        embedder.embed(&["text"]),
        Err(SessionError::NoTokenizer)
    ));
    assert_eq!(
        embedder.embed_tokens::<Vec<u32>>(&[]).unwrap(),
        Vec::<Vec<f32>>::new()
    );
    embedder.cancel_token().cancel();
    assert!(matches!(embed(&[1]), SessionError::Cancelled));
}
