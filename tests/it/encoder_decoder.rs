//! T5 against Hugging Face's numbers (`RUVLLM_CONFORMANCE`), to the tolerance of the reference data;
//! and what must not change a bit of a text beside an encoder's.

use crate::common::{conformance, emulated, numbers, read_f32, read_json};
use crate::mutants::family;
use crate::run::{OnLevel, Pass, engine};
use crate::tiny::Tiny;
use ruvllm::Embedder;
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::arch::Arch;
use ruvllm::compute::NoCallback;
use ruvllm::quant::DType;
use ruvllm::session::StateError;
use ruvllm::{SessionError, SessionOptions};
use std::path::PathBuf;

/// Of logits and of hidden states, as the manifests say.
const MAX_ABS: f32 = 1e-3;

fn folder(name: &str) -> Option<PathBuf> {
    Some(conformance()?.join("models3").join(name))
}

fn open(name: &str) -> Option<Model> {
    let path = folder(name)?.join("model-f16.gguf");
    Some(Model::open(path).unwrap_or_else(|e| panic!("{name}: {e}")))
}

fn session(model: &Model, n_threads: usize, n_batch: usize) -> Session {
    let options = SessionOptions {
        n_batch,
        kv_type: KvType::F32,
        ..Default::default()
    };
    engine(model, n_threads).session_with(&options).unwrap()
}

fn logits(session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    let mut all = Vec::new();
    session
        .hooks()
        .prefill_each(tokens, 0, |_, logits| all.extend_from_slice(logits))
        .unwrap();
    all
}

fn check(what: &str, ours: &[f32], expected: &[f32]) {
    assert_eq!(ours.len(), expected.len(), "{what}");
    let differences = ours.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let most = differences.fold(0.0, |m, d| if d.is_nan() { f32::NAN } else { d.max(m) });
    assert!(most <= MAX_ABS, "{what}: {most}");
}

#[test]
fn logits_and_states_of_the_reference() {
    let (Some(root), Some(model)) = (folder("t5"), open("t5")) else {
        return;
    };
    let manifest = read_json(&root.join("manifest.json"));
    for arch in Arch::available() {
        let model = model.on(arch);
        for test in manifest["tests"].as_array().unwrap() {
            let id = format!("{} {}", arch.name(), test["id"]);
            let [read, text]: [Vec<u32>; 2] =
                ["encoder_tokens", "decoder_tokens"].map(|key| numbers(&test[key]));
            let golden = |key: &str| read_f32(&root.join(test[key].as_str().unwrap()));
            let embedder = Embedder::new(&engine(&model, 2)).unwrap();
            let states = embedder.states_of(&read, &mut NoCallback).unwrap();
            check(&id, &states, &golden("encoder_states_file"));
            for n_batch in [512, 64, 7, 1] {
                let mut session = session(&model, 2, n_batch);
                session.cache().encode(&read).unwrap();
                check(&id, &logits(&mut session, &text), &golden("logits_file"));
                if emulated() {
                    break;
                }
            }
        }
        let greedy = &manifest["greedy"];
        let mut session = session(&model, 1, 64);
        session
            .cache()
            .encode(&numbers(&greedy["encoder_tokens"]))
            .unwrap();
        let mut logits = session.prefilled(&[model.hparams().encoder.unwrap().start]);
        for expected in numbers::<u32>(&greedy["generated"]) {
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            assert_eq!(best, Some(expected as usize), "{}", arch.name());
            logits = session.decoded(expected);
        }
    }
}

/// T5's first version: ReLU, and a head that is the embedding table (`tests/reference_encoders.py`).
#[test]
fn the_first_version() {
    let all: serde_json::Value =
        serde_json::from_str(include_str!("../data/encoder_decoder.json")).unwrap();
    let model = crate::run::open(family(&all, "t5").gguf()).unwrap();
    let tokens: Vec<u32> = numbers(&all["about"]["tokens"]);
    let read: Vec<u32> = tokens.iter().rev().copied().collect();
    let rows = all["t5"]["logits"].as_array().unwrap().iter();
    let values = rows.flat_map(|row| row.as_array().unwrap());
    let expected: Vec<f32> = values.map(|x| x.as_f64().unwrap() as f32).collect();
    for arch in Arch::available() {
        let model = model.on(arch);
        let n_vocab = model.hparams().n_vocab;
        let mut session = session(&model, 2, 7);
        session.cache().encode(&read).unwrap();
        let ours = logits(&mut session, &tokens);
        let positions: Vec<usize> = numbers(&all["about"]["positions"]);
        let row = |&i: &usize| ours[i * n_vocab..][..n_vocab].to_vec();
        let ours: Vec<f32> = positions.iter().flat_map(row).collect();
        check(arch.name(), &ours, &expected);
    }
}

#[test]
fn states_of_the_encoder_alone() {
    let (Some(root), Some(model)) = (folder("t5encoder"), open("t5encoder")) else {
        return;
    };
    let manifest = read_json(&root.join("manifest.json"));
    for arch in Arch::available() {
        let embedder = Embedder::new(&engine(&model.on(arch), 2)).unwrap();
        for test in manifest["tests"].as_array().unwrap() {
            let id = format!("{} {}", arch.name(), test["id"]);
            let states = embedder
                .states_of(&numbers(&test["tokens"]), &mut NoCallback)
                .unwrap();
            let golden = read_f32(&root.join(test["states_file"].as_str().unwrap()));
            check(&id, &states, &golden);
        }
    }
    assert!(matches!(
        session(&model, 1, 64).prefill(&[1]),
        Err(SessionError::Encoder)
    ));
}

/// Logits after `text` do not depend on batches, threads, forks, rewinds or neighbours, but they do
/// on what was read.
#[test]
fn what_changes_no_bit() {
    let Some(model) = open("t5") else { return };
    let (read, text) = ([5, 9, 2, 41, 7], [0, 3, 11, 5, 8, 200, 31]);
    let mut first = session(&model, 1, 512);
    first.cache().encode(&read).unwrap();
    let expected = logits(&mut first, &text);
    for (n_threads, n_batch) in [(2, 512), (2, 3), (1, 1)] {
        let mut other = session(&model, n_threads, n_batch);
        other.cache().encode(&[1, 2, 3]).unwrap();
        other.prefill(&[0, 9]).unwrap();
        // What it has read replaces the text before, and what went on with it.
        other.cache().encode(&read).unwrap();
        assert_eq!(other.position(), 0);
        assert_eq!(logits(&mut other, &text), expected);
    }
    let mut fork = first.fork().unwrap();
    fork.rewind(2).unwrap();
    let n_vocab = model.hparams().n_vocab;
    assert_eq!(logits(&mut fork, &text[2..]), expected[2 * n_vocab..]);
    first.cache().encode(&[5, 9, 2, 41, 8]).unwrap();
    assert_ne!(logits(&mut first, &text), expected);
    fork.rewind(0).unwrap();
    assert_eq!(logits(&mut fork, &text), expected);
}

#[test]
fn what_is_refused() {
    let llama = Tiny::Llama.model(DType::F32);
    assert!(matches!(
        llama.session().unwrap().cache().encode(&[1]),
        Err(SessionError::NoEncoder)
    ));
    let Some(model) = open("t5") else { return };
    let mut session = session(&model, 1, 64);
    assert!(matches!(
        session.prefill(&[0]),
        Err(SessionError::NotEncoded)
    ));
    assert!(matches!(
        session.cache().encode(&[]),
        Err(SessionError::NoTokens)
    ));
    let n_ctx = model.hparams().n_ctx_train;
    assert!(matches!(
        session.cache().encode(&vec![1; n_ctx + 1]),
        Err(SessionError::ContextFull { .. })
    ));
    assert!(matches!(
        session.cache().encode(&[1, 400]),
        Err(SessionError::TokenOutOfRange { token: 400, .. })
    ));
    session.cache().encode(&[1, 2]).unwrap();
    session.prefill(&[0]).unwrap();
    assert!(matches!(
        session.state().to_bytes(),
        Err(StateError::HasMemory)
    ));
}
