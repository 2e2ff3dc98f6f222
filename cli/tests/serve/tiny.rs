//! Models that compute a token in microseconds.
#![allow(dead_code)] // each test program uses its part

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
    decoder(Some(CHAT_TEMPLATE))
}

/// The same model without a chat template.
pub(crate) fn base() -> Writer<'static> {
    decoder(None)
}

fn decoder(chat_template: Option<&'static str>) -> Writer<'static> {
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
    if let Some(template) = chat_template {
        writer.metadata("tokenizer.chat_template", template);
    }
    writer.metadata("tokenizer.chat_template.rerank", "{query} | {document}");
    let weights = [
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
    ];
    fill(
        &mut writer,
        weights.map(|(name, dims)| (format!("{name}.weight"), dims.to_vec())),
    );
    writer
}

/// An encoder of BERT's architecture with one layer, made-up weights, and a WordPiece vocabulary of
/// letters; with a head that scores pairs, if it is a reranker.
pub(crate) fn encoder(is_reranker: bool) -> Writer<'static> {
    let mut writer = Writer::new();
    writer.metadata("general.architecture", "bert");
    for (key, value) in [
        ("context_length", 128u32),
        ("embedding_length", 64),
        ("block_count", 1),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 4),
        ("pooling_type", if is_reranker { 4 } else { 1 }),
    ] {
        writer.metadata(format!("bert.{key}"), value);
    }
    writer.metadata("bert.attention.layer_norm_epsilon", 1e-6f32);
    writer.metadata("bert.attention.causal", false);
    let controls = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(String::from);
    let begins = ('a'..='z')
        .chain(".,?!".chars())
        .map(|c| format!("\u{2581}{c}"));
    let tokens: Vec<String> = controls
        .into_iter()
        .chain(begins)
        .chain(('a'..='z').map(String::from))
        .collect();
    let n_vocab = tokens.len();
    let types = (0..n_vocab).map(|i| if i < 5 { 3 } else { 1 });
    writer.metadata("tokenizer.ggml.model", "bert");
    writer.metadata(
        "tokenizer.ggml.tokens",
        Array::Strings(tokens.into_iter().collect()),
    );
    writer.metadata("tokenizer.ggml.token_type", Array::I32(types.collect()));
    for (name, id) in [
        ("padding", 0u32),
        ("unknown", 1),
        ("bos", 2),
        ("seperator", 3),
        ("mask", 4),
    ] {
        writer.metadata(format!("tokenizer.ggml.{name}_token_id"), id);
    }
    let layers = [
        ("token_embd_norm", &[64][..]),
        ("blk.0.attn_q", &[64, 64]),
        ("blk.0.attn_k", &[64, 64]),
        ("blk.0.attn_v", &[64, 64]),
        ("blk.0.attn_output", &[64, 64]),
        ("blk.0.attn_output_norm", &[64]),
        ("blk.0.ffn_up", &[64, 96]),
        ("blk.0.ffn_down", &[96, 64]),
        ("blk.0.layer_output_norm", &[64]),
    ];
    let head = [("cls", &[64, 64][..]), ("cls.output", &[64, 1])];
    let tables = [
        ("token_embd", n_vocab as u64),
        ("token_types", 2),
        ("position_embd", 128),
    ];
    fill(
        &mut writer,
        tables.map(|(name, n)| (format!("{name}.weight"), vec![64, n])),
    );
    for (name, dims) in layers.iter().chain(head.iter().filter(|_| is_reranker)) {
        let bias = vec![dims[dims.len() - 1]];
        fill(
            &mut writer,
            [
                (format!("{name}.weight"), dims.to_vec()),
                (format!("{name}.bias"), bias),
            ],
        );
    }
    writer
}

/// Adds tensors with made-up values.
/// A projector with one layer and made-up weights for llamas whose embeddings have `n_embd` values, as
/// the built-in model: an Idefics 3, which cuts images into tiles of 32 pixels.
pub(crate) fn projector(n_embd: u64) -> Writer<'static> {
    let mut writer = Writer::new();
    writer.metadata("general.architecture", "clip");
    writer.metadata("general.type", "mmproj");
    writer.metadata("clip.projector_type", "idefics3");
    writer.metadata("clip.has_vision_encoder", true);
    writer.metadata("clip.use_gelu", true);
    for (key, value) in [
        ("projection_dim", n_embd as u32),
        ("image_size", 32),
        ("patch_size", 8),
        ("embedding_length", 32),
        ("feed_forward_length", 48),
        ("block_count", 1),
        ("attention.head_count", 2),
        ("projector.scale_factor", 2),
        ("preproc_image_size", 96),
    ] {
        writer.metadata(format!("clip.vision.{key}"), value);
    }
    writer.metadata("clip.vision.attention.layer_norm_epsilon", 1e-6f32);
    for key in ["image_mean", "image_std"] {
        writer.metadata(format!("clip.vision.{key}"), Array::F32(vec![0.5; 3]));
    }
    let weights = [
        ("mm.model.fc.weight", &[128, n_embd][..]),
        ("v.patch_embd.weight", &[8, 8, 3, 32]),
        ("v.position_embd.weight", &[32, 16]),
        ("v.blk.0.ln1.weight", &[32]),
        ("v.blk.0.ln1.bias", &[32]),
        ("v.blk.0.ln2.weight", &[32]),
        ("v.blk.0.ln2.bias", &[32]),
        ("v.blk.0.attn_q.weight", &[32, 32]),
        ("v.blk.0.attn_k.weight", &[32, 32]),
        ("v.blk.0.attn_v.weight", &[32, 32]),
        ("v.blk.0.attn_out.weight", &[32, 32]),
        ("v.blk.0.ffn_up.weight", &[32, 48]),
        ("v.blk.0.ffn_down.weight", &[48, 32]),
        ("v.post_ln.weight", &[32]),
        ("v.post_ln.bias", &[32]),
    ];
    fill(
        &mut writer,
        weights.map(|(name, dims)| (name.to_owned(), dims.to_vec())),
    );
    writer
}

fn fill(writer: &mut Writer<'static>, tensors: impl IntoIterator<Item = (String, Vec<u64>)>) {
    for (name, dims) in tensors {
        let mut state = name.bytes().fold(7u64, |state, byte| {
            state.wrapping_mul(31).wrapping_add(byte.into())
        });
        let mut random = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.3
        };
        let n: u64 = dims.iter().product();
        let values = (0..n).map(|_| {
            if name.ends_with("norm.weight") {
                1.0
            } else {
                random()
            }
        });
        let values: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        writer.tensor(name, &dims, DType::F32, values);
    }
}
