//! Any bytes: the reader refuses them as a session of a small model, or the session can be used,
//! and what is saved is what was loaded.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::gguf::{Gguf, Value, Writer};
use std::sync::LazyLock;

static MODEL: LazyLock<Model> = LazyLock::new(|| {
    Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/data/peft/qwen2.gguf"
    ))
    .unwrap()
});

/// `session.checksum`: of names and bytes, by words.
fn checksum(gguf: &Gguf) -> u64 {
    let step = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x100_0000_01b3).rotate_left(23);
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for bytes in gguf
        .tensors()
        .iter()
        .flat_map(|t| [t.name.as_bytes(), gguf.data(t)])
    {
        let (words, rest) = bytes.as_chunks::<8>();
        hash = words
            .iter()
            .fold(hash, |hash, word| step(hash, u64::from_le_bytes(*word)));
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        hash = step(step(hash, u64::from_le_bytes(last)), bytes.len() as u64);
    }
    hash
}

/// The same tensors under what this model's sessions have in their metadata, and the right
/// checksum, which no fuzzer guesses.
fn signed(bytes: &[u8]) -> Option<Vec<u8>> {
    let gguf = Gguf::from_bytes(bytes.to_vec()).ok()?;
    let own = Gguf::from_bytes(session().state().to_bytes().unwrap()).unwrap();
    let mut writer = Writer::new();
    for (key, value) in own.metadata().iter() {
        let value = if key == "session.checksum" {
            Value::U64(checksum(&gguf))
        } else {
            value.clone()
        };
        writer.metadata(key, value);
    }
    for t in gguf.tensors() {
        writer.tensor(t.name.clone(), &t.dims, t.dtype, gguf.data(t));
    }
    writer.to_bytes().ok()
}

fn session() -> ruvllm::Session {
    MODEL
        .session_with(&SessionOptions {
            n_ctx: Some(256),
            ..SessionOptions::default()
        })
        .unwrap()
}

fuzz_target!(|bytes: &[u8]| {
    for bytes in [Some(bytes.to_vec()), signed(bytes)].into_iter().flatten() {
        let mut session = session();
        if let Err(error) = session.cache().load_bytes(bytes) {
            assert!(!error.to_string().is_empty());
            assert_eq!(session.position(), 0);
            continue;
        }
        let saved = session.state().to_bytes().unwrap();
        let mut again = self::session();
        again.cache().load_bytes(saved.clone()).unwrap();
        assert_eq!(again.state().to_bytes().unwrap(), saved);
        session.rewind(session.position() / 2).unwrap();
        session.decode(1).unwrap();
    }
});
