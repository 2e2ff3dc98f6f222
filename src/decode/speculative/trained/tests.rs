//! Drafters beside another engine's numbers (`models3` of the conformance data).

use super::TrainedDrafter;
use crate::arch::KvType;
use crate::compute::hook::TokenKind;
use crate::decode::speculative::Drafter;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::engine_options::EngineOptions;
use crate::engine::options::{CancelToken, SessionOptions};
use crate::engine::sequence::Sequence;
use crate::gguf::Gguf;
use crate::layers::outputs::Outputs;
use crate::model::Model;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// That of the manifests.
const TOLERANCE: f32 = 1e-3;

fn folder(name: &str) -> Option<PathBuf> {
    let root = std::env::var_os("RUVLLM_CONFORMANCE")?;
    Some(PathBuf::from(root).join("models3").join(name))
}

fn floats(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |max, d| if d.is_nan() { d } else { d.max(max) })
}

/// A case of a manifest.
struct Case {
    engine: Engine,
    drafter: TrainedDrafter,
    dir: PathBuf,
    test: Value,
    tokens: Vec<u32>,
}

impl Case {
    /// All cases of a folder.
    fn of(name: &str) -> Vec<Case> {
        let Some(dir) = folder(name) else {
            return Vec::new();
        };
        let manifest = std::fs::read(dir.join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let model = Model::open(dir.join("target-f16.gguf")).unwrap();
        let options = EngineOptions {
            n_threads: 2.try_into().ok(),
            ..Default::default()
        };
        let engine = Engine::new(&model, &options).unwrap();
        let draft = Gguf::open(dir.join("draft-f16.gguf")).unwrap();
        let drafter = TrainedDrafter::open(draft, &engine).unwrap().unwrap();
        let case = |test: &Value| Case {
            engine: engine.clone(),
            drafter: drafter.clone(),
            dir: dir.clone(),
            test: test.clone(),
            tokens: test["tokens"]
                .as_array()
                .unwrap()
                .iter()
                .map(|id| id.as_u64().unwrap() as u32)
                .collect(),
        };
        manifest["tests"]
            .as_array()
            .unwrap()
            .iter()
            .map(case)
            .collect()
    }

    /// The file of this case with that ending.
    fn file(&self, what: &str) -> Vec<f32> {
        floats(
            &self
                .dir
                .join(format!("{}.{what}.f32", self.test["id"].as_str().unwrap())),
        )
    }

    /// The model reads all tokens but the last, in pieces of `n`; the drafter reads behind each piece
    /// if it `follows`.
    fn read(&mut self, n: usize, follows: bool) -> Sequence {
        let options = SessionOptions {
            n_ctx: Some(256),
            kv_type: KvType::F32,
            ..Default::default()
        };
        let mut seq = self.engine.sequence(&options).unwrap();
        if self.drafter.reads_states() {
            seq.keep_states().unwrap();
        }
        seq.keep_inputs(self.drafter.reads_inputs()).unwrap();
        self.drafter = self.drafter.clone();
        self.drafter.text.clear();
        let (mut outputs, cancel) = (Outputs::default(), CancelToken::default());
        let last = self.tokens.len() - 1;
        for piece in self.tokens[..last].chunks(n) {
            let slot = Slot::new(&mut seq, piece, TokenKind::Prompt);
            self.engine
                .step(&mut [slot], &mut outputs, &cancel)
                .unwrap();
            let end = seq.position();
            if follows && end < last {
                let text = &self.tokens[self.drafter.text.len()..end + 1];
                self.drafter.push(&text.to_vec());
                self.drafter.read(2, &seq, end + 1);
            }
        }
        let rest = self.tokens[self.drafter.text.len()..].to_vec();
        self.drafter.push(&rest);
        seq
    }

    /// Guesses `n` tokens; those and the last logits.
    fn guess(&mut self, seq: &Sequence, n: usize) -> (Vec<u32>, Vec<f32>) {
        self.drafter.read(n, seq, self.tokens.len());
        assert!(!self.drafter.has_failed);
        let mut guesses = Vec::new();
        self.drafter.draft(n, &mut guesses);
        assert_eq!(guesses.len(), n);
        let tokens = guesses.iter().map(|guess| guess.token).collect();
        (tokens, self.drafter.work.logits.clone())
    }

    /// The tokens that the reference drafts.
    fn drafted(&self) -> Vec<u32> {
        let ids = self.test["drafted"].as_array().unwrap().iter();
        ids.map(|id| id.as_u64().unwrap() as u32).collect()
    }
}

/// Ways to read a text.
const WAYS: [(usize, bool); 5] = [(512, false), (1, true), (7, true), (7, false), (64, true)];

#[test]
fn eagle3_is_the_references() {
    for mut case in Case::of("eagle3") {
        let [features, logits, states] =
            ["features", "logits", "state"].map(|what| case.file(what));
        for (n, follows) in WAYS {
            let seq = case.read(n, follows);
            let last = case.tokens.len() - 1;
            let layers = case.drafter.reads_inputs();
            let difference = largest_difference(seq.inputs_before(layers, last), &features);
            assert!(
                difference <= TOLERANCE,
                "{n} {follows}: features {difference}"
            );
            let (n_vocab, n_embd) = (logits.len() / (states.len() / 64), 64);
            for i in 1..=6 {
                let (drafted, ours) = case.guess(&seq, i);
                assert_eq!(drafted, case.drafted()[..i]);
                let row = last + i - 2;
                let expected = &logits[row * n_vocab..][..n_vocab];
                let tokens = case.drafter.model.weights.tokens.as_ref().unwrap();
                let of_tokens: Vec<f32> = tokens.iter().map(|&id| expected[id as usize]).collect();
                let difference = largest_difference(&ours, &of_tokens);
                assert!(
                    difference <= TOLERANCE,
                    "{n} {follows} {i}: logits {difference}"
                );
                let state = &states[row * n_embd..][..n_embd];
                let difference = largest_difference(&case.drafter.work.state, state);
                assert!(
                    difference <= TOLERANCE,
                    "{n} {follows} {i}: state {difference}"
                );
            }
        }
    }
}

#[test]
fn dflash_is_the_references() {
    for mut case in Case::of("dflash") {
        let [features, logits] = ["features", "logits"].map(|what| case.file(what));
        for (n, follows) in WAYS {
            let seq = case.read(n, follows);
            let layers = case.drafter.reads_inputs();
            let kept = seq.inputs_before(layers, case.tokens.len() - 1);
            assert!(largest_difference(kept, &features) <= TOLERANCE);
            let n_vocab = logits.len() / 6;
            for i in [5, 2, 5] {
                let (drafted, ours) = case.guess(&seq, i);
                assert_eq!(drafted, case.drafted()[..i]);
                let difference = largest_difference(&ours, &logits[n_vocab..][..i * n_vocab]);
                assert!(difference <= TOLERANCE, "{n} {follows} {i}: {difference}");
            }
        }
    }
}

/// Windows as llama.cpp has them, whose logits are beside Hugging Face's where the two differ.
#[test]
fn gemmas_assistant_is_the_references() {
    for mut case in Case::of("gemma4-assistant") {
        let states = case.file("state");
        let (logits, drafted) = match &case.test["alternative"] {
            Value::Null => (case.file("logits"), case.drafted()),
            other => {
                let ids = other["drafted"].as_array().unwrap().iter();
                let drafted = ids.map(|id| id.as_u64().unwrap() as u32).collect();
                (case.file("logits.shorter"), drafted)
            }
        };
        let is_alternative = !case.test["alternative"].is_null();
        for (n, follows) in WAYS {
            let seq = case.read(n, follows);
            let n_vocab = logits.len() / 5;
            for i in 1..=5 {
                let (ours, values) = case.guess(&seq, i);
                assert_eq!(ours, drafted[..i]);
                let expected = &logits[(i - 1) * n_vocab..][..n_vocab];
                let difference = largest_difference(&values, expected);
                assert!(difference <= TOLERANCE, "{n} {follows} {i}: {difference}");
                if !is_alternative {
                    let state = &states[i * 64..][..64];
                    let difference = largest_difference(&case.drafter.work.state, state);
                    assert!(
                        difference <= TOLERANCE,
                        "{n} {follows} {i}: state {difference}"
                    );
                }
            }
        }
    }
}
