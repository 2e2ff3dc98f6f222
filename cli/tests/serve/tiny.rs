//! A model that computes a token in microseconds.

use ruvllm::gguf::{Array, Writer};
use ruvllm::quant::DType;

/// ChatML, with calls as Hermes writes them.
const CHAT_TEMPLATE: &str = "\
    {% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }} {% endfor %}<|im_end|>\n{% endif %}\
    {% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\
    {% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\
    <|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A reranker of Qwen 3's architecture with one layer, made-up weights, and a vocabulary of bytes
/// and control tokens. It generates text as well, and vectors.
pub(crate) fn reranker() -> Writer<'static> {
    let mut writer = Writer::new();
    writer.metadata("general.architecture", "qwen3");
    for (key, value) in [
        ("context_length", 1024u32),
        ("embedding_length", 64),
        ("block_count", 1),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("pooling_type", 4),
    ] {
        writer.metadata(format!("qwen3.{key}"), value);
    }
    writer.metadata("qwen3.attention.layer_norm_rms_epsilon", 1e-6f32);
    writer.metadata(
        "qwen3.classifier.output_labels",
        Array::Strings(["yes", "no"].map(String::from).into_iter().collect()),
    );
    let controls = [
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
    ];
    let bytes = (0..256u32).map(|byte| format!("<0x{byte:02X}>"));
    let tokens: Vec<String> = ["<unk>"]
        .iter()
        .chain(&controls)
        .map(|text| text.to_string())
        .chain(bytes)
        .collect();
    let n_vocab = tokens.len();
    let types = std::iter::once(2).chain([3; 7]).chain([6; 256]);
    writer.metadata("tokenizer.ggml.model", "llama");
    writer.metadata(
        "tokenizer.ggml.tokens",
        Array::Strings(tokens.into_iter().collect()),
    );
    writer.metadata("tokenizer.ggml.scores", Array::F32(vec![0.0; n_vocab]));
    writer.metadata("tokenizer.ggml.token_type", Array::I32(types.collect()));
    writer.metadata("tokenizer.ggml.bos_token_id", 1u32);
    writer.metadata("tokenizer.ggml.eos_token_id", 2u32);
    writer.metadata("tokenizer.chat_template", CHAT_TEMPLATE);
    writer.metadata("tokenizer.chat_template.rerank", "{query} | {document}");
    let mut state = 7u64;
    let mut random = move || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.3
    };
    for (name, dims) in [
        ("token_embd", &[64, n_vocab as u64][..]),
        ("blk.0.attn_norm", &[64]),
        ("blk.0.attn_q", &[64, 64]),
        ("blk.0.attn_k", &[64, 32]),
        ("blk.0.attn_v", &[64, 32]),
        ("blk.0.attn_q_norm", &[16]),
        ("blk.0.attn_k_norm", &[16]),
        ("blk.0.attn_output", &[64, 64]),
        ("blk.0.ffn_norm", &[64]),
        ("blk.0.ffn_gate", &[64, 96]),
        ("blk.0.ffn_up", &[64, 96]),
        ("blk.0.ffn_down", &[96, 64]),
        ("output_norm", &[64]),
        ("cls.output", &[64, 2]),
    ] {
        let n: u64 = dims.iter().product();
        let values = (0..n).map(|_| {
            if name.ends_with("norm") {
                1.0
            } else {
                random()
            }
        });
        let values: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        writer.tensor(format!("{name}.weight"), dims, DType::F32, values);
    }
    writer
}
