//! Any vocabulary and any text: the vocabulary is refused, or every id that encoding gives is a
//! token, any ids decode or are refused, and a stream gives what all bytes joined give.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ruvllm::Tokenizer;
use ruvllm::gguf::{Gguf, StringArray, Writer};
use ruvllm::tokenizer::TextStream;
use ruvllm::tokenizer::TokenizerError;

const PRE: [&str; 16] = [
    "default",
    "llama-bpe",
    "qwen2",
    "qwen35",
    "gpt-2",
    "falcon",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "gpt-4o",
    "tekken",
    "tiny_aya",
    "exaone-moe",
    "superbpe",
    "bloom",
    "jais-2",
];

/// The next strings of the input: each behind a byte with its length (low bits) and kind (high
/// bits).
fn strings<'a>(rest: &mut &'a [u8], n: usize) -> Vec<(&'a [u8], i32)> {
    let mut strings = Vec::new();
    while let Some((&head, tail)) = rest.split_first().filter(|_| strings.len() < n) {
        let (text, tail) = tail.split_at(usize::from(head & 31).min(tail.len()));
        strings.push((text, i32::from(head >> 5)));
        *rest = tail;
    }
    strings
}

fuzz_target!(|bytes: &[u8]| {
    let [kind, n_tokens, n_merges, flags, rest @ ..] = bytes else {
        return;
    };
    let mut rest = rest;
    let tokens = strings(&mut rest, usize::from(*n_tokens));
    let merges = strings(&mut rest, usize::from(*n_merges));

    let mut writer = Writer::new();
    writer.metadata(
        "tokenizer.ggml.model",
        ["llama", "gpt2", "gemma4"][usize::from(kind >> 4) % 3],
    );
    writer.metadata("tokenizer.ggml.pre", PRE[usize::from(kind & 15)]);
    writer.metadata(
        "tokenizer.ggml.tokens",
        tokens.iter().map(|t| t.0).collect::<StringArray>(),
    );
    writer.metadata(
        "tokenizer.ggml.token_type",
        tokens.iter().map(|t| t.1).collect::<Vec<i32>>(),
    );
    writer.metadata(
        "tokenizer.ggml.scores",
        tokens
            .iter()
            .map(|t| t.0.len() as f32)
            .collect::<Vec<f32>>(),
    );
    writer.metadata(
        "tokenizer.ggml.merges",
        merges.iter().map(|t| t.0).collect::<StringArray>(),
    );
    writer.metadata("tokenizer.ggml.add_bos_token", flags & 1 == 0);
    writer.metadata("tokenizer.ggml.add_space_prefix", flags & 2 == 0);
    writer.metadata("tokenizer.ggml.bos_token_id", u32::from(flags >> 4));
    writer.metadata(
        "general.name",
        if flags & 4 == 0 {
            "phi-3"
        } else {
            "modern-bert"
        },
    );
    let gguf = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
    let t = match Tokenizer::from_metadata(gguf.metadata()) {
        Ok(t) => t,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };

    let t = std::sync::Arc::new(t);
    for parse_special in [false, true] {
        let ids = t.encode_bytes(rest, true, parse_special);
        assert!(ids.iter().all(|&id| (id as usize) < t.n_vocab()));
        t.decode_lossy(&ids, parse_special).unwrap();

        let mut stream = TextStream::new(&t, true);
        let mut text: String = ids
            .iter()
            .map(|&id| stream.push(id).unwrap().to_owned())
            .collect();
        text.push_str(stream.finish());
        let joined: Vec<u8> = ids
            .iter()
            .flat_map(|&id| t.token_bytes(id).unwrap())
            .collect();
        assert_eq!(text, String::from_utf8_lossy(&joined));
    }
    let arbitrary: Vec<u32> = rest.iter().map(|&b| u32::from(b)).collect();
    match t.decode(&arbitrary, true) {
        Ok(_) => assert!(arbitrary.iter().all(|&id| (id as usize) < t.n_vocab())),
        Err(e) => assert!(matches!(e, TokenizerError::UnknownToken { .. })),
    }
});
