//! Any bytes: the reader refuses them as an adapter of a small model, or the model can run with it,
//! and what is saved is the same adapter again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ruvllm::Model;
use ruvllm::SessionError;
use ruvllm::SessionOptions;
use ruvllm::kv::KvError;
use ruvllm::lora::Adapter;
use std::sync::{Arc, LazyLock};

static MODEL: LazyLock<Model> = LazyLock::new(|| {
    Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/data/peft/qwen2.gguf"
    ))
    .unwrap()
});

fuzz_target!(|bytes: &[u8]| {
    let adapter = match Adapter::from_bytes(bytes.to_vec(), &MODEL) {
        Ok(adapter) => adapter,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let again = Adapter::from_bytes(adapter.to_bytes().unwrap(), &MODEL).unwrap();
    assert_eq!(again, adapter);
    let options = SessionOptions {
        n_ctx: Some(16),
        ..SessionOptions::default()
    };
    let mut session = MODEL.session_with(&options).unwrap();
    session.adapters().attach(Arc::new(adapter), 1.0).unwrap();
    // Terms may be so large that keys or values are.
    let outcome = session.prefill(&[1, 2, 3]).and_then(|()| session.decode(4));
    assert!(
        matches!(
            outcome,
            Ok(()) | Err(SessionError::Kv(KvError::Overflow { .. }))
        ),
        "{outcome:?}"
    );
});
