//! Models with the shapes of published ones and random weights, to measure without a download.

use crate::error::GgufError;
use crate::gguf::{Gguf, Metadata, Writer};
use crate::quant::{DType, FileType, ModelShape};

/// Sizes of a published model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Name on the command line.
    pub name: &'static str,
    arch: &'static str,
    n_layer: usize,
    n_embd: usize,
    n_head: usize,
    n_head_kv: usize,
    n_ff: usize,
    n_vocab: usize,
    tied: bool,
}

impl Shape {
    /// All shapes.
    pub const ALL: &'static [Shape] = &[
        Shape {
            name: "llama-1b",
            arch: "llama",
            n_layer: 16,
            n_embd: 2048,
            n_head: 32,
            n_head_kv: 8,
            n_ff: 8192,
            n_vocab: 32000,
            tied: false,
        },
        Shape {
            name: "llama-8b",
            arch: "llama",
            n_layer: 32,
            n_embd: 4096,
            n_head: 32,
            n_head_kv: 8,
            n_ff: 14336,
            n_vocab: 128_256,
            tied: false,
        },
        Shape {
            name: "llama2-7b",
            arch: "llama",
            n_layer: 32,
            n_embd: 4096,
            n_head: 32,
            n_head_kv: 32,
            n_ff: 11008,
            n_vocab: 32000,
            tied: false,
        },
        Shape {
            name: "mistral-7b",
            arch: "llama",
            n_layer: 32,
            n_embd: 4096,
            n_head: 32,
            n_head_kv: 8,
            n_ff: 14336,
            n_vocab: 32000,
            tied: false,
        },
        Shape {
            name: "qwen2-0.5b",
            arch: "qwen2",
            n_layer: 24,
            n_embd: 896,
            n_head: 14,
            n_head_kv: 2,
            n_ff: 4864,
            n_vocab: 151_936,
            tied: true,
        },
    ];

    /// The same shape with another number of layers.
    #[must_use]
    pub fn with_layers(self, n_layer: usize) -> Shape {
        Shape { n_layer, ..self }
    }

    /// The shape called `name`.
    pub fn from_name(name: &str) -> Option<Shape> {
        Shape::ALL.iter().copied().find(|s| s.name == name)
    }
}

/// Number of rows that are actually quantised; a matrix repeats them, to save time.
const ROWS: usize = 16;

/// A model of this shape and file type, in memory, always the same.
///
/// # Errors
/// If the model exceeds the limits of a GGUF file, which no listed shape does.
pub fn synthetic(shape: Shape, file_type: FileType) -> Result<Gguf, GgufError> {
    build(shape, file_type, Writer::new())
}

/// [`synthetic`] with the tokenizer in `metadata`, whose vocabulary is not larger than the shape's.
///
/// # Errors
/// As [`synthetic`].
pub fn synthetic_with_tokens(shape: Shape, file_type: FileType, metadata: &Metadata) -> Result<Gguf, GgufError> {
    let mut file = Writer::new();
    for (key, value) in metadata.iter().filter(|(key, _)| key.starts_with("tokenizer.")) {
        file.metadata(key, value.clone());
    }
    build(shape, file_type, file)
}

fn build(shape: Shape, file_type: FileType, mut file: Writer<'_>) -> Result<Gguf, GgufError> {
    let Shape { arch, n_layer, n_embd, n_head, n_head_kv, n_ff, n_vocab, .. } = shape;
    let head_dim = n_embd / n_head;
    file.metadata("general.architecture", arch);
    file.metadata("general.name", shape.name);
    file.metadata("general.file_type", file_type as u32);
    for (key, n) in [
        ("context_length", 8192),
        ("embedding_length", n_embd),
        ("block_count", n_layer),
        ("feed_forward_length", n_ff),
        ("attention.head_count", n_head),
        ("attention.head_count_kv", n_head_kv),
    ] {
        file.metadata(format!("{arch}.{key}"), n as u32);
    }
    file.metadata(format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5f32);

    let sizes = ModelShape { n_layer, n_head, n_head_kv, n_expert: 0, tied_embeddings: shape.tied };
    let mut matrix = |name: String, n_in: usize, n_out: usize| {
        let dims = [n_in as u64, n_out as u64];
        let dtype = file_type.tensor_type(&name, &dims, &sizes).unwrap_or(DType::F32);
        let rows = quantised_rows(dtype, n_in);
        let row = rows.len() / ROWS;
        file.tensor_with(name, &dims, dtype, move |out| {
            for first in (0..n_out).step_by(ROWS) {
                out.write_all(&rows[..row * ROWS.min(n_out - first)])?;
            }
            Ok(())
        });
    };
    matrix("token_embd.weight".into(), n_embd, n_vocab);
    if !shape.tied {
        matrix("output.weight".into(), n_embd, n_vocab);
    }
    for i in 0..n_layer {
        for (part, n_in, n_out) in [
            ("attn_q", n_embd, n_embd),
            ("attn_k", n_embd, n_head_kv * head_dim),
            ("attn_v", n_embd, n_head_kv * head_dim),
            ("attn_output", n_embd, n_embd),
            ("ffn_gate", n_embd, n_ff),
            ("ffn_up", n_embd, n_ff),
            ("ffn_down", n_ff, n_embd),
        ] {
            matrix(format!("blk.{i}.{part}.weight"), n_in, n_out);
        }
    }
    // All Qwen 2 models have biases.
    if arch == "qwen2" {
        for i in 0..n_layer {
            for (part, n_out) in
                [("attn_q", n_embd), ("attn_k", n_head_kv * head_dim), ("attn_v", n_head_kv * head_dim)]
            {
                file.tensor(format!("blk.{i}.{part}.bias"), &[n_out as u64], DType::F32, vec![0; 4 * n_out]);
            }
        }
    }
    let ones: Vec<u8> = std::iter::repeat_n(1f32.to_le_bytes(), n_embd).flatten().collect();
    file.tensor("output_norm.weight", &[n_embd as u64], DType::F32, ones.clone());
    for i in 0..n_layer {
        for part in ["attn_norm", "ffn_norm"] {
            file.tensor(format!("blk.{i}.{part}.weight"), &[n_embd as u64], DType::F32, ones.clone());
        }
    }
    Gguf::from_bytes(file.to_bytes()?)
}

/// [`ROWS`] rows of noise, scaled to preserve the magnitude of activations.
fn quantised_rows(dtype: DType, n_in: usize) -> Vec<u8> {
    let format = dtype.float_format();
    let mut state = n_in as u32;
    let scale = 1.0 / (n_in as f32).sqrt();
    let values: Vec<f32> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * 1.7 * scale
    })
    .take(ROWS * n_in)
    .collect();
    let mut bytes = vec![0; values.len() / format.block_elems * format.block_bytes];
    match format.quantize {
        Some(quantize) => quantize(&values, None, &mut bytes),
        None => bytes.copy_from_slice(bytemuck::cast_slice(&values)),
    }
    bytes
}
