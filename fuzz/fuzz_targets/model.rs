//! A tiny model with changed metadata and bytes: the model is refused, or computes a prompt and a token with it.

#![no_main]

#[path = "../../tests/it/run/mod.rs"]
mod run;
#[path = "../../tests/it/tiny/mod.rs"]
mod tiny;

use libfuzzer_sys::fuzz_target;
use ruvllm::exec::SessionOptions;
use ruvllm::gguf::Gguf;
use ruvllm::model::Model;
use ruvllm::quant::DType;
use tiny::{N_VOCAB, Tiny};

/// What hyper-parameters are read from, behind the architecture's name.
const KEYS: [&str; 30] = [
    "context_length", "embedding_length", "block_count", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "feed_forward_length", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.freq_base_swa", "expert_count",
    "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_weights_norm",
    "expert_weights_scale", "attention.scale", "logit_scale", "residual_scale", "vocab_size",
];

const TEXTS: [&str; 8] = ["none", "linear", "yarn", "longrope", "llama3", "", "\u{fffd}", "llama"];

// One change per 6 bytes: what, where, and a number.
fuzz_target!(|bytes: &[u8]| {
    let [shape, dtype, changes @ ..] = bytes else { return };
    let dtype = [DType::F32, DType::F16, DType::Q8_0, DType::Q4_0][usize::from(*dtype) % 4];
    let (arch, mut parts) = match usize::from(*shape) % (Tiny::SHAPES.len() + 2) {
        0 => ("granite_swa", Tiny::granite_swa()),
        1 => ("gpt2", Tiny::gpt2()),
        i => (Tiny::SHAPES[i - 2].name(), Tiny::SHAPES[i - 2].parts(dtype)),
    };
    let mut flips = Vec::new();
    for change in changes.chunks_exact(6).take(8) {
        let number = u32::from_le_bytes(change[2..].try_into().unwrap());
        let key = format!("{arch}.{}", KEYS[usize::from(change[1]) % KEYS.len()]);
        match change[0] % 8 {
            0 | 1 => parts.set(&key, number),
            // Numbers of the order that files have.
            2 | 3 => parts.set(&key, number % 300),
            4 => parts.set(&key, f32::from_bits(number)),
            5 => parts.set(&key, TEXTS[number as usize % TEXTS.len()]),
            6 => parts.remove(&key),
            _ => flips.push((number as usize, change[1])),
        }
    }
    let mut file = parts.bytes();
    let n = file.len();
    for (place, flip) in flips {
        file[place % n] ^= flip;
    }
    let model = match Gguf::from_bytes(file).map(|gguf| Model::from_gguf(gguf)) {
        Ok(Ok(model)) => model,
        Ok(Err(error)) => return assert!(!error.to_string().is_empty()),
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let options = SessionOptions { n_ctx: Some(48), ..SessionOptions::default() };
    let mut session = match model.session_with(&options) {
        Ok(session) => session,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    // Enough rows for panels.
    let prompt: Vec<u32> = (0..40).map(|i| i * 7 % N_VOCAB as u32).collect();
    if session.prefill(&prompt).is_ok() {
        session.decode(1).map(|_| ()).unwrap();
    }
});
