//! Models with the shapes of published ones and random weights, to measure without a download.

use ruvllm::gguf::{Gguf, GgufError, Metadata, Writer};
use ruvllm::quant::{DType, FileType, ModelShape};

/// Sizes of a published model; of the largest, of some of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Name on the command line.
    pub name: &'static str,
    arch: &'static str,
    n_layer: usize,
    n_embd: usize,
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    n_ff: usize,
    n_vocab: usize,
    tied: bool,
    experts: Option<Experts>,
    delta: Option<Delta>,
    window: Option<usize>,
    layered: Option<Layered>,
}

/// Experts in place of a dense feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Experts {
    n: usize,
    n_used: usize,
    n_ff: usize,
    /// Width of the expert that all tokens share; 0: none.
    n_ff_shared: usize,
    /// Type of their matrices, if it is not the file's.
    dtype: Option<DType>,
}

/// Gated delta rules in place of attention, in all layers but every fourth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Delta {
    n_head_k: usize,
    n_head_v: usize,
    head_dim: usize,
}

/// Layers of two kinds, values of each of them for a token, and keys and values that some share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layered {
    /// Every so many layers one has no window, and heads twice as wide as the others'.
    interval: usize,
    /// Values for a token that each layer has.
    n_values: usize,
    /// Of so many layers (the second number) the last ones (the first) read the keys and values of
    /// others.
    shared: (usize, usize),
}

/// Every so many layers one attends where the others have delta rules.
const ATTENTION_INTERVAL: usize = 4;
/// Width of the convolution before a delta rule.
const CONV: usize = 4;

impl Shape {
    /// A Llama; the other shapes name what differs.
    const LLAMA_1B: Shape = Shape {
        name: "llama-1b",
        arch: "llama",
        n_layer: 16,
        n_embd: 2048,
        n_head: 32,
        n_head_kv: 8,
        head_dim: 64,
        n_ff: 8192,
        n_vocab: 32000,
        tied: false,
        experts: None,
        delta: None,
        window: None,
        layered: None,
    };
    const LLAMA_8B: Shape = Shape {
        name: "llama-8b",
        n_layer: 32,
        n_embd: 4096,
        head_dim: 128,
        n_ff: 14336,
        n_vocab: 128_256,
        ..Shape::LLAMA_1B
    };
    const QWEN3_NEXT: Shape = Shape {
        name: "qwen3-next-80b-a3b",
        arch: "qwen3next",
        n_layer: 8,
        n_head: 16,
        n_head_kv: 2,
        head_dim: 256,
        n_vocab: 151_936,
        experts: Some(Experts {
            n: 512,
            n_used: 10,
            n_ff: 512,
            n_ff_shared: 512,
            dtype: None,
        }),
        delta: Some(Delta {
            n_head_k: 16,
            n_head_v: 32,
            head_dim: 128,
        }),
        ..Shape::LLAMA_1B
    };

    /// All shapes. Of the mixtures' layers there are as many as fit into 8 GiB with 4 bits: of Qwen
    /// 3 30B-A3B 16 of 48, of Qwen3-Next 8 of 48, of gpt-oss 12 of 24.
    pub const ALL: &'static [Shape] = &[
        Shape::LLAMA_1B,
        Shape::LLAMA_8B,
        Shape {
            name: "llama2-7b",
            n_head_kv: 32,
            n_ff: 11008,
            n_vocab: 32000,
            ..Shape::LLAMA_8B
        },
        Shape {
            name: "llama2-13b",
            n_layer: 40,
            n_embd: 5120,
            n_head: 40,
            n_head_kv: 40,
            n_ff: 13824,
            n_vocab: 32000,
            ..Shape::LLAMA_8B
        },
        Shape {
            name: "mistral-7b",
            n_vocab: 32000,
            ..Shape::LLAMA_8B
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
            ..Shape::LLAMA_1B
        },
        Shape {
            name: "qwen3-8b",
            arch: "qwen3",
            n_layer: 36,
            n_ff: 12288,
            n_vocab: 151_936,
            ..Shape::LLAMA_8B
        },
        Shape {
            name: "qwen3-30b-a3b",
            arch: "qwen3moe",
            n_head_kv: 4,
            head_dim: 128,
            n_vocab: 151_936,
            experts: Some(Experts {
                n: 128,
                n_used: 8,
                n_ff: 768,
                n_ff_shared: 0,
                dtype: None,
            }),
            ..Shape::LLAMA_1B
        },
        Shape::QWEN3_NEXT,
        Shape {
            name: "qwen3.5-4b",
            arch: "qwen35",
            n_layer: 32,
            n_embd: 2560,
            n_head_kv: 4,
            n_ff: 9216,
            n_vocab: 248_320,
            tied: true,
            experts: None,
            ..Shape::QWEN3_NEXT
        },
        Shape {
            name: "gpt-oss-20b",
            arch: "gpt-oss",
            n_layer: 12,
            n_embd: 2880,
            n_head: 64,
            n_vocab: 201_088,
            experts: Some(Experts {
                n: 32,
                n_used: 4,
                n_ff: 2880,
                n_ff_shared: 0,
                dtype: Some(DType::MXFP4),
            }),
            window: Some(128),
            ..Shape::LLAMA_1B
        },
        Shape {
            name: "gemma3-4b",
            arch: "gemma3",
            n_layer: 34,
            n_embd: 2560,
            n_head: 8,
            n_head_kv: 4,
            head_dim: 256,
            n_ff: 10240,
            n_vocab: 262_144,
            tied: true,
            window: Some(1024),
            ..Shape::LLAMA_1B
        },
        Shape {
            name: "gemma4-e4b",
            arch: "gemma4",
            n_layer: 42,
            n_embd: 2560,
            n_head: 8,
            n_head_kv: 2,
            head_dim: 256,
            n_ff: 10240,
            n_vocab: 262_144,
            tied: true,
            window: Some(512),
            layered: Some(Layered {
                interval: 6,
                n_values: 256,
                shared: (3, 7),
            }),
            ..Shape::LLAMA_1B
        },
    ];

    /// The same shape with another number of layers.
    #[must_use]
    pub fn with_layers(self, n_layer: usize) -> Shape {
        Shape { n_layer, ..self }
    }

    /// A layer of each kind that it has, narrow, with few experts and tokens: opened in no time.
    #[must_use]
    pub fn reduced(self) -> Shape {
        let experts = self.experts.map(|x| Experts {
            n: 16,
            n_ff: 256,
            ..x
        });
        let n_layer = self.layered.map_or(ATTENTION_INTERVAL, |x| 2 * x.interval);
        Shape {
            n_layer,
            n_ff: 256,
            n_vocab: 64,
            experts,
            ..self
        }
    }

    /// The shape called `name`.
    pub fn from_name(name: &str) -> Option<Shape> {
        Shape::ALL.iter().copied().find(|s| s.name == name)
    }
}

/// Number of rows that are actually quantised; a matrix repeats them, to save time.
const ROWS: usize = 16;
/// The same of embeddings, so that so many tokens of a prompt differ.
const EMBEDDINGS: usize = 1024;

/// A model of this shape and file type, in memory, always the same.
///
/// # Errors
/// If the model exceeds the limits of a GGUF file, which no listed shape does.
pub fn synthetic(shape: Shape, file_type: FileType) -> Result<Gguf, GgufError> {
    Gguf::from_bytes(synthetic_file(shape, file_type).to_bytes()?)
}

/// The same as a file to be written, which other engines open, too.
pub fn synthetic_file(shape: Shape, file_type: FileType) -> Writer<'static> {
    let mut file = Writer::new();
    file.metadata("tokenizer.ggml.model", "none");
    build(shape, file_type, &mut file);
    file
}

/// [`synthetic`] with the tokenizer in `metadata`, whose vocabulary is not larger than the shape's.
///
/// # Errors
/// As [`synthetic`].
pub fn synthetic_with_tokens(
    shape: Shape,
    file_type: FileType,
    metadata: &Metadata,
) -> Result<Gguf, GgufError> {
    let mut file = Writer::new();
    for (key, value) in metadata
        .iter()
        .filter(|(key, _)| key.starts_with("tokenizer."))
    {
        file.metadata(key, value.clone());
    }
    build(shape, file_type, &mut file);
    Gguf::from_bytes(file.to_bytes()?)
}

/// What a tensor is filled with.
#[derive(Clone, Copy)]
enum Fill {
    Noise,
    Value(f32),
}

/// A tensor's name, its dimensions (row length first), and its values.
type Tensor = (String, Vec<usize>, Fill);

impl Shape {
    /// Whether `layer` has no window where others have one, and wider heads.
    fn is_global(&self, layer: usize) -> bool {
        self.layered
            .is_some_and(|x| (layer + 1).is_multiple_of(x.interval))
    }

    /// Last layers that read the keys and values of others.
    fn n_shared(&self) -> usize {
        self.layered
            .map_or(0, |x| self.n_layer * x.shared.0 / x.shared.1)
    }

    fn attends(&self, layer: usize) -> bool {
        self.delta.is_none() || (layer + 1).is_multiple_of(ATTENTION_INTERVAL)
    }

    /// Metadata besides the sizes that all have.
    fn write_metadata(&self, file: &mut Writer<'_>) {
        let Shape {
            arch,
            n_layer,
            head_dim,
            experts,
            delta,
            window,
            layered,
            ..
        } = *self;
        let mut count = |key: &str, n: usize| {
            file.metadata(format!("{arch}.{key}"), n as u32);
        };
        let widest = if layered.is_some() {
            2 * head_dim
        } else {
            head_dim
        };
        count("attention.key_length", widest);
        count("attention.value_length", widest);
        if let Some(x) = experts {
            count("expert_count", x.n);
            count("expert_used_count", x.n_used);
            count("expert_feed_forward_length", x.n_ff);
            if x.n_ff_shared > 0 {
                count("expert_shared_feed_forward_length", x.n_ff_shared);
            }
        }
        if let Some(x) = delta {
            count("ssm.conv_kernel", CONV);
            count("ssm.state_size", x.head_dim);
            count("ssm.group_count", x.n_head_k);
            count("ssm.time_step_rank", x.n_head_v);
            count("ssm.inner_size", x.n_head_v * x.head_dim);
            count("full_attention_interval", ATTENTION_INTERVAL);
            count("rope.dimension_count", head_dim / 4);
        }
        if let Some(window) = window {
            count("attention.sliding_window", window);
        }
        if let Some(x) = layered {
            count("attention.key_length_swa", head_dim);
            count("attention.value_length_swa", head_dim);
            count("rope.dimension_count", widest);
            count("rope.dimension_count_swa", head_dim);
            count("embedding_length_per_layer_input", x.n_values);
            count("attention.shared_kv_layers", self.n_shared());
            let windowed: Vec<bool> = (0..n_layer).map(|i| !self.is_global(i)).collect();
            file.metadata(format!("{arch}.attention.sliding_window_pattern"), windowed);
            file.metadata(format!("{arch}.rope.freq_base"), 1e6f32);
            file.metadata(format!("{arch}.rope.freq_base_swa"), 1e4f32);
            file.metadata(format!("{arch}.final_logit_softcapping"), 30f32);
        }
        if arch == "qwen35" {
            file.metadata(
                format!("{arch}.rope.dimension_sections"),
                vec![11i32, 11, 10, 0],
            );
        }
        if arch == "gpt-oss" {
            file.metadata(format!("{arch}.rope.freq_base"), 150_000f32);
            file.metadata(format!("{arch}.rope.scaling.type"), "yarn");
            file.metadata(format!("{arch}.rope.scaling.factor"), 32f32);
            file.metadata(
                format!("{arch}.rope.scaling.original_context_length"),
                4096u32,
            );
        }
    }

    /// The tensors of layer `i`, without those of the feed-forward part.
    fn mixer(&self, i: usize) -> Vec<Tensor> {
        let Shape {
            arch,
            n_embd,
            n_head,
            n_head_kv,
            head_dim,
            ..
        } = *self;
        let at = |part: &str, dims: &[usize], fill: Fill| {
            (format!("blk.{i}.{part}"), dims.to_vec(), fill)
        };
        if let Some(Delta {
            n_head_k,
            n_head_v,
            head_dim,
        }) = self.delta.filter(|_| !self.attends(i))
        {
            let (n_v, n_qkv) = (n_head_v * head_dim, (2 * n_head_k + n_head_v) * head_dim);
            let mut tensors = vec![
                at("attn_qkv.weight", &[n_embd, n_qkv], Fill::Noise),
                at("attn_gate.weight", &[n_embd, n_v], Fill::Noise),
                at("ssm_conv1d.weight", &[CONV, n_qkv], Fill::Noise),
                at("ssm_a", &[n_head_v], Fill::Value(-1.0)),
                at("ssm_dt.bias", &[n_head_v], Fill::Value(0.0)),
                at("ssm_norm.weight", &[head_dim], Fill::Value(1.0)),
                at("ssm_out.weight", &[n_v, n_embd], Fill::Noise),
            ];
            if arch == "qwen3next" {
                tensors.push(at("ssm_ba.weight", &[n_embd, 2 * n_head_v], Fill::Noise));
            } else {
                tensors.push(at("ssm_alpha.weight", &[n_embd, n_head_v], Fill::Noise));
                tensors.push(at("ssm_beta.weight", &[n_embd, n_head_v], Fill::Noise));
            }
            return tensors;
        }
        let head_dim = if self.is_global(i) {
            2 * head_dim
        } else {
            head_dim
        };
        let (n_q, n_kv) = (n_head * head_dim, n_head_kv * head_dim);
        // With delta rules, gates of the outputs come with the queries.
        let n_wq = if self.delta.is_some() { 2 * n_q } else { n_q };
        let mut tensors = vec![
            at("attn_q.weight", &[n_embd, n_wq], Fill::Noise),
            at("attn_k.weight", &[n_embd, n_kv], Fill::Noise),
            at("attn_v.weight", &[n_embd, n_kv], Fill::Noise),
            at("attn_output.weight", &[n_q, n_embd], Fill::Noise),
        ];
        if matches!(arch, "qwen2" | "gpt-oss") {
            for (part, n) in [
                ("attn_q.bias", n_q),
                ("attn_k.bias", n_kv),
                ("attn_v.bias", n_kv),
            ] {
                tensors.push(at(part, &[n], Fill::Value(0.0)));
            }
        }
        if arch == "gpt-oss" {
            tensors.push(at("attn_output.bias", &[n_embd], Fill::Value(0.0)));
            tensors.push(at("attn_sinks.weight", &[n_head], Fill::Value(0.0)));
        }
        if matches!(arch, "qwen3" | "qwen3moe" | "gemma3")
            || self.delta.is_some()
            || self.layered.is_some()
        {
            tensors.push(at("attn_q_norm.weight", &[head_dim], Fill::Value(1.0)));
            tensors.push(at("attn_k_norm.weight", &[head_dim], Fill::Value(1.0)));
        }
        if let Some(x) = self.layered {
            tensors.push(at("layer_output_scale.weight", &[1], Fill::Value(1.0)));
            tensors.push(at("inp_gate.weight", &[n_embd, x.n_values], Fill::Noise));
            tensors.push(at("proj.weight", &[x.n_values, n_embd], Fill::Noise));
        }
        if i >= self.n_layer - self.n_shared() {
            tensors.retain(|(name, ..)| !name.contains("attn_k") && !name.contains("attn_v"));
        }
        tensors
    }

    /// The tensors of the feed-forward part of layer `i`.
    fn feed_forward(&self, i: usize) -> Vec<Tensor> {
        let Shape {
            arch, n_embd, n_ff, ..
        } = *self;
        let at = |part: &str, dims: &[usize], fill: Fill| {
            (format!("blk.{i}.{part}"), dims.to_vec(), fill)
        };
        let dense = |suffix: &str, n_ff: usize| {
            let ins = ["gate", "up"].map(|part| {
                at(
                    &format!("ffn_{part}{suffix}.weight"),
                    &[n_embd, n_ff],
                    Fill::Noise,
                )
            });
            ins.into_iter().chain([at(
                &format!("ffn_down{suffix}.weight"),
                &[n_ff, n_embd],
                Fill::Noise,
            )])
        };
        let Some(Experts {
            n,
            n_used: _,
            n_ff,
            n_ff_shared,
            dtype: _,
        }) = self.experts
        else {
            return dense("", n_ff).collect();
        };
        let mut tensors = vec![
            at("ffn_gate_inp.weight", &[n_embd, n], Fill::Noise),
            at("ffn_gate_exps.weight", &[n_embd, n_ff, n], Fill::Noise),
            at("ffn_up_exps.weight", &[n_embd, n_ff, n], Fill::Noise),
            at("ffn_down_exps.weight", &[n_ff, n_embd, n], Fill::Noise),
        ];
        if n_ff_shared > 0 {
            tensors.extend(dense("_shexp", n_ff_shared));
            tensors.push(at("ffn_gate_inp_shexp.weight", &[n_embd, 1], Fill::Noise));
        }
        if arch == "gpt-oss" {
            tensors.push(at("ffn_gate_inp.bias", &[n], Fill::Value(0.0)));
            for (part, width) in [("gate", n_ff), ("up", n_ff), ("down", n_embd)] {
                tensors.push(at(
                    &format!("ffn_{part}_exps.bias"),
                    &[width, n],
                    Fill::Value(0.0),
                ));
            }
        }
        tensors
    }

    /// Names of a layer's norms.
    fn norms(&self) -> &'static [&'static str] {
        match self.arch {
            "gemma3" => &[
                "attn_norm",
                "post_attention_norm",
                "ffn_norm",
                "post_ffw_norm",
            ],
            "gemma4" => &[
                "attn_norm",
                "post_attention_norm",
                "ffn_norm",
                "post_ffw_norm",
                "post_norm",
            ],
            "gpt-oss" | "qwen3next" | "qwen35" => &["attn_norm", "post_attention_norm"],
            _ => &["attn_norm", "ffn_norm"],
        }
    }

    fn tensors(&self) -> Vec<Tensor> {
        let n = self.n_embd;
        let mut tensors = vec![(
            "token_embd.weight".into(),
            vec![n, self.n_vocab],
            Fill::Noise,
        )];
        if !self.tied {
            tensors.push(("output.weight".into(), vec![n, self.n_vocab], Fill::Noise));
        }
        tensors.push(("output_norm.weight".into(), vec![n], Fill::Value(1.0)));
        if let Some(x) = self.layered {
            let width = x.n_values * self.n_layer;
            tensors.push((
                "per_layer_token_embd.weight".into(),
                vec![width, self.n_vocab],
                Fill::Noise,
            ));
            tensors.push((
                "per_layer_model_proj.weight".into(),
                vec![n, width],
                Fill::Noise,
            ));
            tensors.push((
                "per_layer_proj_norm.weight".into(),
                vec![x.n_values],
                Fill::Value(1.0),
            ));
            tensors.push((
                "rope_freqs.weight".into(),
                vec![self.head_dim],
                Fill::Value(1.0),
            ));
        }
        for i in 0..self.n_layer {
            tensors.extend(self.mixer(i));
            tensors.extend(self.feed_forward(i));
            let norms = self.norms().iter();
            tensors.extend(
                norms.map(|norm| (format!("blk.{i}.{norm}.weight"), vec![n], Fill::Value(1.0))),
            );
        }
        tensors
    }
}

fn build(shape: Shape, file_type: FileType, file: &mut Writer<'_>) {
    let Shape {
        arch,
        n_layer,
        n_embd,
        n_head,
        n_head_kv,
        n_ff,
        experts,
        ..
    } = shape;
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
        ("vocab_size", shape.n_vocab),
    ] {
        file.metadata(format!("{arch}.{key}"), n as u32);
    }
    file.metadata(format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5f32);
    shape.write_metadata(file);

    let n_expert = experts.map_or(0, |x| x.n);
    let sizes = ModelShape {
        n_layer,
        n_head,
        n_head_kv,
        n_expert,
        tied_embeddings: shape.tied,
        importance: false,
    };
    for (name, dims, fill) in shape.tensors() {
        let (n_in, n_rows) = (dims[0], dims[1..].iter().product::<usize>());
        let dims: Vec<u64> = dims.iter().map(|&n| n as u64).collect();
        let dtype = match fill {
            // Converters leave it in 16 bits, quantisers alone.
            Fill::Noise if name == "per_layer_model_proj.weight" => DType::F16,
            Fill::Noise => file_type
                .tensor_type(&name, &dims, &sizes)
                .unwrap_or(DType::F32),
            Fill::Value(_) => DType::F32,
        };
        let dtype = experts
            .and_then(|x| x.dtype)
            .filter(|_| name.ends_with("_exps.weight"))
            .unwrap_or(dtype);
        // Routers whose rows repeat would choose equal experts, and the same ones for tokens whose
        // rows do.
        let n_own = match &*name {
            "token_embd.weight" | "per_layer_token_embd.weight" => EMBEDDINGS,
            name if name.ends_with("ffn_gate_inp.weight") => n_rows,
            _ => ROWS,
        };
        let rows = match fill {
            Fill::Noise => quantised_rows(dtype, n_in, n_own),
            Fill::Value(x) => std::iter::repeat_n(x.to_le_bytes(), n_in * n_own)
                .flatten()
                .collect(),
        };
        let row = rows.len() / n_own;
        file.tensor_with(name, &dims, dtype, move |out| {
            for first in (0..n_rows).step_by(n_own) {
                out.write_all(&rows[..row * n_own.min(n_rows - first)])?;
            }
            Ok(())
        });
    }
}

/// Rows of noise, scaled to preserve the magnitude of activations.
fn quantised_rows(dtype: DType, n_in: usize, n_rows: usize) -> Vec<u8> {
    let format = dtype.float_format();
    let mut state = n_in as u32;
    let scale = 1.0 / (n_in as f32).sqrt();
    let values: Vec<f32> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * 1.7 * scale
    })
    .take(n_rows * n_in)
    .collect();
    let mut bytes = vec![0; values.len() / format.block_elems * format.block_bytes];
    match format.quantize {
        Some(quantize) => quantize(&values, None, &mut bytes),
        // Nothing is quantised to MXFP4: an exponent whose largest value is about that of the
        // noise, and any codes.
        None if dtype == DType::MXFP4 => {
            let exponent = (127.0 + (1.7 * scale / 6.0).log2()) as u8;
            for (block, values) in bytes
                .chunks_exact_mut(format.block_bytes)
                .zip(values.chunks_exact(format.block_elems))
            {
                block[0] = exponent;
                block[1..]
                    .iter_mut()
                    .zip(values)
                    .for_each(|(codes, x)| *codes = x.to_bits() as u8);
            }
        }
        None => bytes.copy_from_slice(bytemuck::cast_slice(&values)),
    }
    bytes
}
