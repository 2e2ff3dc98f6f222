//! Any bytes: the reader refuses them as what was learnt with a small model, or the model can go on
//! learning with it, and what is saved can be read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm_learn::{Learner, Learning};
use std::sync::LazyLock;

static MODEL: LazyLock<Model> = LazyLock::new(|| {
    Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/data/peft/qwen2.gguf"
    ))
    .unwrap()
});

fuzz_target!(|bytes: &[u8]| {
    let learner = match Learner::from_bytes(bytes.to_vec(), &MODEL) {
        Ok(learner) => learner,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let saved = learner.to_bytes().unwrap();
    let again = Learner::from_bytes(saved.clone(), &MODEL).unwrap();
    assert_eq!(again.to_bytes().unwrap(), saved);
    let options = SessionOptions {
        n_ctx: Some(16),
        ..SessionOptions::default()
    };
    let mut session = MODEL.session_with(&options).unwrap();
    session.set_learner(learner).unwrap();
    session.observe(&[1, 2, 3, 1, 2]).unwrap();
    session.decode(4).unwrap();
    let logits = session.logits();
    assert!(logits.iter().all(|x| x.is_finite()));
    let _ = session.feedback(1.0);
    let saved = session.learner().unwrap().to_bytes().unwrap();
    Learner::from_bytes(saved, &MODEL).unwrap();
});
