//! Any bytes: the loader refuses them, or every byte of every tensor and string can be read, a
//! header parsed from a prefix is the same, and the writer's copy of the file is the same model
//! again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ruvllm::gguf::GgufError;
use ruvllm::gguf::{Array, Gguf, Header, Value, Writer};

fn touch(bytes: &[u8]) -> u64 {
    bytes.iter().map(|&byte| u64::from(byte)).sum()
}

fn touch_array(array: &Array) -> u64 {
    match array {
        Array::Strings(strings) => strings.iter().map(touch).sum(),
        Array::Arrays(arrays) => arrays.iter().map(touch_array).sum(),
        other => other.len() as u64,
    }
}

fuzz_target!(|bytes: &[u8]| {
    let prefix = Header::parse(&bytes[..bytes.len() / 2], bytes.len() as u64);
    let gguf = match Gguf::from_bytes(bytes.to_vec()) {
        Ok(gguf) => gguf,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    match prefix {
        Ok(header) => assert_eq!(header.tensors, gguf.tensors()),
        Err(error) => assert!(
            matches!(error, GgufError::HeaderIncomplete { .. }),
            "{error:?}"
        ),
    }

    let mut writer = Writer::new();
    for (key, value) in gguf.metadata().iter() {
        if let Value::Array(array) = value {
            std::hint::black_box(touch_array(array));
        }
        assert_eq!(
            gguf.metadata().get(key).map(Value::type_name),
            Some(value.type_name())
        );
        let _ = (
            gguf.metadata().u32(key),
            gguf.metadata().i32s(key).map(drop),
            gguf.metadata().str(key),
        );
        writer.metadata(key, value.clone());
    }
    for t in gguf.tensors() {
        let data = gguf.data(t);
        std::hint::black_box(touch(data));
        assert_eq!(data.as_ptr().addr() % 8, 0);
        assert_eq!(gguf.tensor(&t.name), Some(t));
        writer.tensor(&t.name, &t.dims, t.dtype, data);
    }
    let copy = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
    assert_eq!(copy.metadata().len(), gguf.metadata().len());
    for (t, original) in copy.tensors().iter().zip(gguf.tensors()) {
        assert_eq!(
            (&t.name, &t.dims, t.dtype),
            (&original.name, &original.dims, original.dtype)
        );
        assert_eq!(copy.data(t), gguf.data(original));
    }
});
