//! Gradients of adapters against finite differences of an independent forward pass in 64 bits, for
//! tiny models of every family and every matrix that an adapter can change.
//!
//! A gradient `g` is compared with the truth `t` along random directions `r` of independent normal
//! values: `E[(r·(t − g))²] = |t − g|²`.

use crate::common::{emulated, long};
use crate::run::{OnLevel, session_on};
use crate::tiny::Tiny;
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::SessionError;
use ruvllm::SessionOptions;
use ruvllm::arch::Arch;
use ruvllm::gguf::Writer;
use ruvllm::lora::AdapterError;
use ruvllm::lora::TargetModule;
use ruvllm::lora::{Adam, Adapter, Gradients, Sgd, change_norm};
use ruvllm::model::{
    Activation, AttnSpec, FfnSpec, Gating, Hparams, Mixer, MoeSpec, NormKind, Norms, QkNorm,
    RopeOrder,
};
use ruvllm::quant::DType;
use ruvllm::session::GradientError;
use ruvllm::session::{Task, cross_entropy};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

const N_EMBD: usize = 32;
const N_HEAD: usize = 4;
const HEAD: usize = 8;
const N_FF: usize = 48;
const N_VOCAB: usize = 40;
const TOKENS: [u32; 11] = [1, 17, 4, 39, 9, 9, 33, 0, 28, 5, 12];
const TARGETS: [u32; 11] = [17, 4, 39, 9, 9, 33, 0, 28, 5, 12, 3];

struct Noise(u64);

impl Noise {
    /// Uniform in −1..1.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// Standard normal, nearly.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.next()).sum::<f64>() / 2.0
    }
}

/// What is in a model's file besides what all have.
struct Family {
    arch: &'static str,
    keys: &'static [(&'static str, f32)],
    parts: &'static [Part],
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Biases,
    LayerNorms,
    /// Layer norms without bias.
    NoNormBias,
    NoNormWeights,
    HeadNorms,
    FullNorms,
    PostNorms,
    NoPreNorms,
    NoFfnNorm,
    Ungated,
    FusedQkv,
    FusedGate,
    Experts,
    SelectionBias,
    SharedExpert,
    SharedGate,
    Head,
}
use Part::*;

const MOE: &[(&str, f32)] = &[
    ("expert_count", 4.0),
    ("expert_used_count", 2.0),
    ("expert_feed_forward_length", N_FF as f32),
];
/// In every layer.
const ALL_MOE: &[(&str, f32)] = &[
    ("expert_count", 4.0),
    ("expert_used_count", 2.0),
    ("expert_feed_forward_length", N_FF as f32),
    ("leading_dense_block_count", 0.0),
];
const SWA: &[(&str, f32)] = &[
    ("attention.sliding_window", 3.0),
    ("rope.freq_base", 5000.0),
];
const FAMILIES: &[Family] = &[
    Family {
        arch: "llama",
        keys: &[],
        parts: &[Biases, Head],
    },
    Family {
        arch: "llama",
        keys: MOE,
        parts: &[Experts, Head],
    },
    Family {
        arch: "mistral",
        keys: &[("attention.sliding_window", 3.0)],
        parts: &[Head],
    },
    Family {
        arch: "qwen2",
        keys: &[],
        parts: &[Biases],
    },
    Family {
        arch: "qwen2moe",
        keys: &[
            ("expert_count", 4.0),
            ("expert_used_count", 2.0),
            ("expert_feed_forward_length", N_FF as f32),
            ("expert_shared_feed_forward_length", 56.0),
        ],
        parts: &[Experts, SharedExpert, SharedGate, Biases, Head],
    },
    Family {
        arch: "qwen3",
        keys: &[],
        parts: &[HeadNorms],
    },
    Family {
        arch: "qwen3moe",
        keys: MOE,
        parts: &[HeadNorms, Experts, Head],
    },
    // All that a mixture can have.
    Family {
        arch: "hy_v3",
        keys: &[
            ("leading_dense_block_count", 0.0),
            ("expert_count", 4.0),
            ("expert_used_count", 2.0),
            ("expert_feed_forward_length", N_FF as f32),
            ("expert_gating_func", 2.0),
            ("expert_group_count", 2.0),
            ("expert_group_used_count", 1.0),
            ("expert_weights_scale", 1.5),
            ("expert_shared_feed_forward_length", 56.0),
        ],
        parts: &[HeadNorms, Experts, SelectionBias, SharedExpert, Head],
    },
    Family {
        arch: "qwen2moe",
        keys: &[
            ("expert_count", 4.0),
            ("expert_used_count", 3.0),
            ("expert_feed_forward_length", N_FF as f32),
            ("expert_gating_func", 3.0),
            ("expert_weights_scale", 0.7),
        ],
        parts: &[Experts, SelectionBias, Biases, Head],
    },
    Family {
        arch: "phi2",
        keys: &[("rope.dimension_count", 4.0)],
        parts: &[LayerNorms, NoFfnNorm, Ungated, Biases, FusedQkv, Head],
    },
    Family {
        arch: "phi3",
        keys: &[
            ("rope.dimension_count", 6.0),
            ("attention.sliding_window", 5.0),
        ],
        parts: &[FusedQkv, FusedGate, Head],
    },
    Family {
        arch: "gemma2",
        keys: &[
            ("attention.sliding_window", 4.0),
            ("attn_logit_softcapping", 3.0),
            ("final_logit_softcapping", 4.0),
        ],
        parts: &[PostNorms],
    },
    Family {
        arch: "gemma3",
        keys: &[
            ("attention.sliding_window", 4.0),
            ("rope.freq_base", 5000.0),
            ("rope.freq_base_swa", 100.0),
        ],
        parts: &[PostNorms, HeadNorms],
    },
    Family {
        arch: "granite",
        keys: &[
            ("attention.scale", 0.25),
            ("embedding_scale", 3.0),
            ("residual_scale", 0.4),
            ("logit_scale", 1.5),
        ],
        parts: &[],
    },
    Family {
        arch: "olmo2",
        keys: &[],
        parts: &[FullNorms, PostNorms, NoPreNorms, NoFfnNorm, Head],
    },
    // OLMo 3.
    Family {
        arch: "olmo2",
        keys: &[
            ("attention.sliding_window", 3.0),
            ("rope.freq_base", 5000.0),
            ("rope.freq_base_swa", 100.0),
        ],
        parts: &[FullNorms, PostNorms, NoPreNorms, NoFfnNorm, Head],
    },
    Family {
        arch: "smollm3",
        keys: &[],
        parts: &[Head],
    },
    Family {
        arch: "internlm2",
        keys: &[],
        parts: &[Head],
    },
    Family {
        arch: "baichuan",
        keys: &[],
        parts: &[Head],
    },
    Family {
        arch: "ernie4_5",
        keys: &[],
        parts: &[],
    },
    Family {
        arch: "ernie4_5-moe",
        keys: MOE,
        parts: &[Experts, SelectionBias],
    },
    Family {
        arch: "qwen2vl",
        keys: &[],
        parts: &[Biases],
    },
    Family {
        arch: "qwen3vl",
        keys: &[],
        parts: &[HeadNorms],
    },
    Family {
        arch: "qwen3vlmoe",
        keys: MOE,
        parts: &[HeadNorms, Experts, Head],
    },
    Family {
        arch: "seed_oss",
        keys: &[],
        parts: &[Biases, Head],
    },
    Family {
        arch: "gemma",
        keys: &[],
        parts: &[],
    },
    Family {
        arch: "grok",
        keys: &[
            ("expert_count", 4.0),
            ("expert_used_count", 2.0),
            ("expert_feed_forward_length", N_FF as f32),
            ("embedding_scale", 3.0),
            ("logit_scale", 0.6),
            ("attention.output_scale", 0.25),
            ("attn_logit_softcapping", 3.0),
        ],
        parts: &[PostNorms, Experts],
    },
    Family {
        arch: "granitemoe",
        keys: MOE,
        parts: &[Experts],
    },
    Family {
        arch: "minicpm",
        keys: &[
            ("embedding_scale", 3.0),
            ("residual_scale", 0.4),
            ("logit_scale", 1.5),
        ],
        parts: &[],
    },
    Family {
        arch: "olmoe",
        keys: MOE,
        parts: &[FullNorms, Experts, Head],
    },
    Family {
        arch: "arcee",
        keys: &[],
        parts: &[Ungated, Head],
    },
    Family {
        arch: "chatglm",
        keys: &[],
        parts: &[FusedGate, Biases, Head],
    },
    Family {
        arch: "glm4",
        keys: &[],
        parts: &[PostNorms, FusedGate, Head],
    },
    Family {
        arch: "glm4moe",
        keys: ALL_MOE,
        parts: &[HeadNorms, Biases, Experts, Head],
    },
    Family {
        arch: "exaone4",
        keys: SWA,
        parts: &[HeadNorms, PostNorms, NoPreNorms, NoFfnNorm, Head],
    },
    Family {
        arch: "exaone-moe",
        keys: ALL_MOE,
        parts: &[HeadNorms, Experts, SelectionBias, Head],
    },
    Family {
        arch: "command-r",
        keys: &[("logit_scale", 0.5)],
        parts: &[NoNormBias, NoFfnNorm],
    },
    Family {
        arch: "cohere2",
        keys: SWA,
        parts: &[NoNormBias, NoFfnNorm],
    },
    Family {
        arch: "cohere2moe",
        keys: MOE,
        parts: &[NoNormBias, NoFfnNorm, Experts],
    },
    Family {
        arch: "dots1",
        keys: ALL_MOE,
        parts: &[HeadNorms, Experts, Head],
    },
    Family {
        arch: "hy_v3",
        keys: ALL_MOE,
        parts: &[HeadNorms, Experts, Head],
    },
    Family {
        arch: "bailingmoe2",
        keys: ALL_MOE,
        parts: &[HeadNorms, FusedQkv, Experts, Head],
    },
    Family {
        arch: "minimax-m2",
        keys: MOE,
        parts: &[FullNorms, Experts, Head],
    },
    Family {
        arch: "stablelm",
        keys: &[],
        parts: &[LayerNorms, Head],
    },
    Family {
        arch: "starcoder2",
        keys: &[],
        parts: &[LayerNorms, Ungated, Biases],
    },
    Family {
        arch: "nemotron",
        keys: &[],
        parts: &[LayerNorms, Ungated, Head],
    },
    Family {
        arch: "jais2",
        keys: &[],
        parts: &[LayerNorms, Ungated, Biases, Head],
    },
    Family {
        arch: "xverse",
        keys: &[],
        parts: &[Head],
    },
    Family {
        arch: "exaone",
        keys: &[],
        parts: &[],
    },
    Family {
        arch: "pangu-embedded",
        keys: &[],
        parts: &[Biases, Head],
    },
    Family {
        arch: "paddleocr",
        keys: &[],
        parts: &[Head],
    },
    Family {
        arch: "openelm",
        keys: &[],
        parts: &[HeadNorms, FusedQkv],
    },
    Family {
        arch: "plamo",
        keys: &[],
        parts: &[NoFfnNorm, Head],
    },
    Family {
        arch: "plamo3",
        keys: &[
            ("attention.sliding_window", 3.0),
            ("rope.freq_base", 5000.0),
            ("rope.freq_base_swa", 100.0),
        ],
        parts: &[HeadNorms, PostNorms, FusedQkv, FusedGate, Head],
    },
    Family {
        arch: "deci",
        keys: &[],
        parts: &[Head],
    },
    Family {
        arch: "qwen",
        keys: &[("feed_forward_length", 96.0)],
        parts: &[Biases, FusedQkv, Head],
    },
    Family {
        arch: "deepseek",
        keys: ALL_MOE,
        parts: &[Experts, Head],
    },
    Family {
        arch: "deepseek2-ocr",
        keys: ALL_MOE,
        parts: &[Experts, Head],
    },
    Family {
        arch: "bailingmoe",
        keys: ALL_MOE,
        parts: &[Experts, Head],
    },
    Family {
        arch: "mellum",
        keys: &[
            ("expert_count", 4.0),
            ("expert_used_count", 2.0),
            ("expert_feed_forward_length", N_FF as f32),
            ("attention.sliding_window", 3.0),
            ("rope.freq_base", 5000.0),
        ],
        parts: &[HeadNorms, Experts, Head],
    },
    Family {
        arch: "orion",
        keys: &[],
        parts: &[LayerNorms, Head],
    },
    Family {
        arch: "codeshell",
        keys: &[],
        parts: &[LayerNorms, Ungated, Biases],
    },
    // Without what gradients do not go through.
    Family {
        arch: "mistral3",
        keys: &[],
        parts: &[Head],
    },
    Family {
        arch: "granite_swa",
        keys: SWA,
        parts: &[],
    },
    Family {
        arch: "mimo2",
        keys: MOE,
        parts: &[Experts, Head],
    },
    Family {
        arch: "dbrx",
        keys: MOE,
        parts: &[NoNormBias, Experts, Head],
    },
    Family {
        arch: "olmo",
        keys: &[],
        parts: &[NoNormBias, NoNormWeights, NoPreNorms, NoFfnNorm, Head],
    },
];

/// Architectures all of whose models have something that gradients do not go through.
const REFUSED: &[&str] = &[
    "afmoe",
    "apertus",
    "arctic",
    "arwkv7",
    "bailingmoe3",
    "bert",
    "bitnet",
    "bloom",
    "deepseek2",
    "deepseek32",
    "deepseek4",
    "dots3note",
    "dream",
    "eurobert",
    "falcon",
    "falcon-h1",
    "gemma-embedding",
    "gemma3n",
    "gemma4",
    "glm-dsa",
    "glm5-next",
    "gpt-oss",
    "gpt2",
    "gptneox",
    "granitehybrid",
    "graniteswitch",
    "grovemoe",
    "hrm_text",
    "hunyuan-dense",
    "hunyuan-moe",
    "hunyuan_vl",
    "hy_v4",
    "jais",
    "jamba",
    "jina-bert-v2",
    "jina-bert-v3",
    "kimi-k3",
    "kimi-linear",
    "laguna",
    "lfm2",
    "lfm2moe",
    "llada",
    "llada-moe",
    "llama-embed",
    "llama4",
    "maincoder",
    "mamba",
    "mamba2",
    "maple",
    "minicpm3",
    "minimax-01",
    "minimax-m3",
    "mistral4",
    "modern-bert",
    "mpt",
    "muse-glimmer",
    "nanbeige",
    "nemotron_h",
    "nemotron_h_moe",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "phimoe",
    "plamo2",
    "plm",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "qwen4exp",
    "refact",
    "rnd1",
    "rwkv6",
    "rwkv6qwen2",
    "rwkv7",
    "smallthinker",
    "spark2_5",
    "starcoder",
    "step35",
    "t5",
    "t5encoder",
    "talkie",
];

/// Writes a tensor of this name and shape with values in `shift ± scale`.
type Put<'a> = dyn FnMut(&str, &[usize], f64, f64) + 'a;

impl Family {
    fn has(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    fn model(&self, n_layer: usize) -> Model {
        let mut writer = Writer::new();
        let mut noise = Noise(self.arch.len() as u64 + self.parts.len() as u64);
        let n_kv = 2;
        writer.metadata("general.architecture", self.arch);
        for (key, n) in [
            ("context_length", 64),
            ("embedding_length", N_EMBD),
            ("block_count", n_layer),
            ("attention.head_count", N_HEAD),
            ("attention.head_count_kv", n_kv),
            ("attention.key_length", HEAD),
            ("attention.value_length", HEAD),
            ("feed_forward_length", N_FF),
        ] {
            writer.metadata(format!("{}.{key}", self.arch), n as u32);
        }
        let eps = if self.has(LayerNorms) || self.has(NoNormBias) {
            "layer_norm_epsilon"
        } else {
            "layer_norm_rms_epsilon"
        };
        writer.metadata(format!("{}.attention.{eps}", self.arch), 1e-3f32);
        let counts = ["_count", "_length", "_func", "sliding_window"];
        for &(key, value) in self.keys {
            let name = format!("{}.{key}", self.arch);
            if counts.iter().any(|c| key.ends_with(c)) {
                writer.metadata(name, value as u32);
            } else {
                writer.metadata(name, value);
            }
        }
        let mut put = |name: &str, dims: &[usize], scale: f64, shift: f64| {
            let n = dims.iter().product();
            let values: Vec<f32> = (0..n)
                .map(|_| (shift + scale * noise.next()) as f32)
                .collect();
            let dims: Vec<u64> = dims.iter().map(|&n| n as u64).collect();
            writer.tensor(
                name,
                &dims,
                DType::F32,
                bytemuck::cast_slice(&values).to_vec(),
            );
        };
        let matrix_scale = |n_in: usize| 2.0 / (n_in as f64).sqrt();
        put("token_embd.weight", &[N_EMBD, N_VOCAB], 1.0, 0.0);
        let norm = |put: &mut Put<'_>, name: &str, n: usize| {
            put(&format!("{name}.weight"), &[n], 0.5, 1.0);
            if self.has(LayerNorms) {
                put(&format!("{name}.bias"), &[n], 0.3, 0.0);
            }
        };
        if !self.has(NoNormWeights) {
            norm(&mut put, "output_norm", N_EMBD);
        }
        if self.has(Head) {
            put(
                "output.weight",
                &[N_EMBD, N_VOCAB],
                matrix_scale(N_EMBD),
                0.0,
            );
        }
        if self.has(LayerNorms) && self.has(Biases) && self.has(Head) {
            put("output.bias", &[N_VOCAB], 0.3, 0.0);
        }
        for i in 0..n_layer {
            let name = |part: &str| format!("blk.{i}.{part}");
            if !self.has(NoPreNorms) {
                norm(&mut put, &name("attn_norm"), N_EMBD);
            }
            if !self.has(NoFfnNorm) {
                norm(&mut put, &name("ffn_norm"), N_EMBD);
            }
            if self.has(PostNorms) {
                norm(&mut put, &name("post_attention_norm"), N_EMBD);
                norm(&mut put, &name("post_ffw_norm"), N_EMBD);
            }
            let (q, k) = (N_HEAD * HEAD, n_kv * HEAD);
            for (part, n) in [("attn_q_norm.weight", q), ("attn_k_norm.weight", k)] {
                if self.has(HeadNorms) {
                    put(&name(part), &[HEAD], 0.5, 1.0);
                } else if self.has(FullNorms) {
                    put(&name(part), &[n], 0.5, 1.0);
                }
            }
            let mut linear = |part: &str, n_in: usize, n_out: usize| {
                put(
                    &name(&format!("{part}.weight")),
                    &[n_in, n_out],
                    matrix_scale(n_in),
                    0.0,
                );
                if self.has(Biases) && !part.contains("shexp") {
                    put(&name(&format!("{part}.bias")), &[n_out], 0.3, 0.0);
                }
            };
            if self.has(FusedQkv) {
                linear("attn_qkv", N_EMBD, q + 2 * k);
            } else {
                linear("attn_q", N_EMBD, q);
                linear("attn_k", N_EMBD, k);
                linear("attn_v", N_EMBD, k);
            }
            linear("attn_output", q, N_EMBD);
            if self.has(Experts) {
                put(
                    &name("ffn_gate_inp.weight"),
                    &[N_EMBD, 4],
                    matrix_scale(N_EMBD),
                    0.0,
                );
                put(
                    &name("ffn_gate_exps.weight"),
                    &[N_EMBD, N_FF, 4],
                    matrix_scale(N_EMBD),
                    0.0,
                );
                put(
                    &name("ffn_up_exps.weight"),
                    &[N_EMBD, N_FF, 4],
                    matrix_scale(N_EMBD),
                    0.0,
                );
                put(
                    &name("ffn_down_exps.weight"),
                    &[N_FF, N_EMBD, 4],
                    matrix_scale(N_FF),
                    0.0,
                );
                if self.has(SelectionBias) {
                    put(&name("exp_probs_b.bias"), &[4], 0.5, 0.0);
                }
                if self.has(SharedGate) {
                    put(
                        &name("ffn_gate_inp_shexp.weight"),
                        &[N_EMBD],
                        matrix_scale(N_EMBD),
                        0.0,
                    );
                }
                if self.has(SharedExpert) {
                    for (part, n_in, n_out) in [
                        ("gate", N_EMBD, 56),
                        ("up", N_EMBD, 56),
                        ("down", 56, N_EMBD),
                    ] {
                        let part = name(&format!("ffn_{part}_shexp.weight"));
                        put(&part, &[n_in, n_out], matrix_scale(n_in), 0.0);
                    }
                }
            } else {
                if self.has(FusedGate) {
                    linear("ffn_up", N_EMBD, 2 * N_FF);
                } else {
                    if !self.has(Ungated) {
                        linear("ffn_gate", N_EMBD, N_FF);
                    }
                    linear("ffn_up", N_EMBD, N_FF);
                }
                linear("ffn_down", N_FF, N_EMBD);
            }
        }
        let gguf = ruvllm::gguf::Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
        Model::from_gguf(gguf).unwrap()
    }
}

/// One low-rank term in 64 bits.
#[derive(Clone)]
struct Term64 {
    rank: usize,
    a: Vec<f64>,
    b: Vec<f64>,
}

/// A forward pass written from the formulas.
struct Reference<'a> {
    h: &'a Hparams,
    sites: &'a [TargetModule],
    tensors: HashMap<String, Vec<f64>>,
}

/// Keys and values of every layer and token.
type Past = Vec<Vec<(Vec<f64>, Vec<f64>)>>;

impl<'a> Reference<'a> {
    fn new(model: &'a Model) -> Reference<'a> {
        let gguf = model.gguf();
        let mut tensors: HashMap<String, Vec<f64>> = HashMap::new();
        for t in gguf.tensors() {
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(gguf.data(t));
            tensors.insert(t.name.clone(), values.into_iter().map(f64::from).collect());
        }
        if !tensors.contains_key("output.weight") {
            tensors.insert("output.weight".into(), tensors["token_embd.weight"].clone());
        }
        Reference {
            h: model.hparams(),
            sites: model.sites(),
            tensors,
        }
    }

    /// Adds `factor·s·B·A` of a term to its matrix.
    fn change(&mut self, site: usize, term: &Term64, factor: f64) {
        let site = &self.sites[site];
        let (n_in, n_out) = (site.n_in, site.n_out);
        let w = self.tensors.get_mut(&*site.tensor).unwrap();
        let first = site.expert.unwrap_or(0) * n_out * n_in;
        for r in 0..n_out {
            for c in 0..n_in {
                let sum: f64 = (0..term.rank)
                    .map(|j| term.b[j * n_out + r] * term.a[j * n_in + c])
                    .sum();
                let at = if site.is_embedding() {
                    c * n_out + r
                } else {
                    first + r * n_in + c
                };
                w[at] += factor * sum;
            }
        }
    }

    fn opt(&self, name: &str) -> Option<&[f64]> {
        self.tensors.get(name).map(Vec::as_slice)
    }

    /// Rows `rows` of a matrix and its bias, times `x`.
    fn linear(&self, name: &str, rows: std::ops::Range<usize>, x: &[f64]) -> Vec<f64> {
        let w = &self.tensors[&format!("{name}.weight")];
        let b = self.opt(&format!("{name}.bias"));
        let row = |r: usize| {
            w[r * x.len()..][..x.len()]
                .iter()
                .zip(x)
                .map(|(w, x)| w * x)
                .sum::<f64>()
        };
        rows.map(|r| row(r) + b.map_or(0.0, |b| b[r])).collect()
    }

    fn rms(&self, x: &[f64], w: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(self.h.norm_eps)).sqrt();
        x.iter().zip(w).map(|(x, w)| x * scale * w).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Option<Vec<f64>> {
        let ones = vec![1.0; x.len()];
        let plain = self.h.norm == NormKind::LayerPlain && !name.contains("post_");
        let w = self
            .opt(&format!("{name}.weight"))
            .or(plain.then_some(&ones))?;
        if self.h.norm == NormKind::Rms {
            return Some(self.rms(x, w));
        }
        let zeros = vec![0.0; w.len()];
        let b = self.opt(&format!("{name}.bias")).unwrap_or(&zeros);
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let centred: Vec<f64> = x.iter().map(|x| x - mean).collect();
        let variance = centred.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (variance + f64::from(self.h.norm_eps)).sqrt();
        Some(
            centred
                .iter()
                .zip(w.iter().zip(b))
                .map(|(x, (w, b))| x * scale * w + b)
                .collect(),
        )
    }

    fn rotate(&self, spec: &AttnSpec, position: usize, x: &mut [f64]) {
        let Some(rope) = spec.rope.map(|id| self.h.rope(id)) else {
            return;
        };
        let n = rope.n_dims;
        for i in 0..n / 2 {
            // The engine's frequencies are f32.
            let frequency = f64::from(rope.theta.powf(-2.0 * i as f32 / n as f32));
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (p, q) = match rope.order {
                RopeOrder::Norm => (2 * i, 2 * i + 1),
                RopeOrder::NeoX => (i, i + n / 2),
            };
            (x[p], x[q]) = (x[p] * cos - x[q] * sin, x[p] * sin + x[q] * cos);
        }
    }

    fn feed_forward(
        &self,
        act: Activation,
        parts: [(&str, usize); 3],
        n_ff: usize,
        x: &[f64],
    ) -> Vec<f64> {
        let [gate, up, down] = parts;
        let activate = |x: f64| match act {
            Activation::SwiGlu => x / (1.0 + (-x).exp()),
            Activation::SquaredRelu => x.max(0.0).powi(2),
            Activation::GeGlu | Activation::Gelu => {
                0.5 * x
                    * (1.0
                        + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
            }
            other => panic!("{other:?}"),
        };
        let u = self.linear(up.0, up.1..up.1 + n_ff, x);
        let inner: Vec<f64> = if self.opt(&format!("{}.weight", gate.0)).is_some() {
            let g = self.linear(gate.0, gate.1..gate.1 + n_ff, x);
            g.into_iter().zip(u).map(|(g, u)| activate(g) * u).collect()
        } else {
            u.into_iter().map(activate).collect()
        };
        self.linear(down.0, down.1..down.1 + self.h.n_embd, &inner)
    }

    fn ffn(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let h = self.h;
        let name = |part: &str| format!("blk.{layer}.{part}");
        let spec = match &h.layers[layer].ffn {
            FfnSpec::Moe(spec) => spec,
            FfnSpec::Dense(ffn) => {
                let up = name("ffn_up");
                let fused = self.tensors[&format!("{up}.weight")].len() == 2 * ffn.n_ff * h.n_embd;
                let gate = if fused { up.clone() } else { name("ffn_gate") };
                let first = if fused { ffn.n_ff } else { 0 };
                let parts = [(&*gate, 0), (&*up, first), (&*name("ffn_down"), 0)];
                return self.feed_forward(ffn.activation, parts, ffn.n_ff, x);
            }
            other => panic!("{other:?}"),
        };
        let mut y = vec![0.0; h.n_embd];
        for (i, weight) in self.choice(layer, spec, x) {
            let parts = [
                name("ffn_gate_exps"),
                name("ffn_up_exps"),
                name("ffn_down_exps"),
            ];
            let parts = [
                (&*parts[0], i * spec.n_ff),
                (&*parts[1], i * spec.n_ff),
                (&*parts[2], i * h.n_embd),
            ];
            let out = self.feed_forward(spec.activation, parts, spec.n_ff, x);
            y.iter_mut()
                .zip(out)
                .for_each(|(y, out)| *y += weight * out);
        }
        if let Some(shared) = spec.shared {
            let gate = name("ffn_gate_inp_shexp");
            let strength = if shared.gated {
                1.0 / (1.0 + (-self.linear(&gate, 0..1, x)[0]).exp())
            } else {
                1.0
            };
            let parts = [
                name("ffn_gate_shexp"),
                name("ffn_up_shexp"),
                name("ffn_down_shexp"),
            ];
            let parts = [(&*parts[0], 0), (&*parts[1], 0), (&*parts[2], 0)];
            let out = self.feed_forward(spec.activation, parts, shared.n_ff, x);
            y.iter_mut()
                .zip(out)
                .for_each(|(y, out)| *y += strength * out);
        }
        y
    }

    /// The experts of a token and their weights.
    fn choice(&self, layer: usize, spec: &MoeSpec, x: &[f64]) -> Vec<(usize, f64)> {
        let outputs = self.linear(&format!("blk.{layer}.ffn_gate_inp"), 0..spec.n_expert, x);
        let softmax = |x: &[f64]| {
            let sum: f64 = x.iter().map(|x| x.exp()).sum();
            x.iter().map(|x| x.exp() / sum).collect::<Vec<f64>>()
        };
        let scores = match spec.gating {
            Gating::Softmax => softmax(&outputs),
            Gating::Sigmoid => outputs.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
            _ => outputs,
        };
        let bias = self
            .opt(&format!("blk.{layer}.exp_probs_b.bias"))
            .filter(|_| spec.bias);
        let biased: Vec<f64> = (0..spec.n_expert)
            .map(|e| scores[e] + bias.map_or(0.0, |b| b[e]))
            .collect();
        let best = |mut items: Vec<usize>, n: usize, score: &dyn Fn(usize) -> f64| {
            items.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
            items.truncate(n);
            items
        };
        let mut open: Vec<usize> = (0..spec.n_expert).collect();
        if let Some(groups) = spec.groups {
            let size = spec.n_expert / groups.n_group;
            let score = |group: usize| {
                let two = best((group * size..(group + 1) * size).collect(), 2, &|e| {
                    biased[e]
                });
                two.into_iter().map(|e| biased[e]).sum()
            };
            let groups = best((0..groups.n_group).collect(), groups.n_used, &score);
            open.retain(|e| groups.contains(&(e / size)));
        }
        let chosen = best(open, spec.n_used, &|e| biased[e]);
        let mut weights: Vec<f64> = chosen.iter().map(|&e| scores[e]).collect();
        if spec.gating == Gating::SoftmaxAfterTopK {
            weights = softmax(&weights);
        }
        let total: f64 = if spec.normalise {
            weights.iter().sum()
        } else {
            1.0
        };
        chosen
            .into_iter()
            .zip(
                weights
                    .into_iter()
                    .map(|w| f64::from(spec.scale) * w / total),
            )
            .collect()
    }

    /// Logits of every token, and its keys and values; those of the tokens that `past` has are
    /// taken from there.
    fn forward(&self, tokens: &[u32], past: &Past) -> (Vec<Vec<f64>>, Past) {
        let h = self.h;
        let embd = &self.tensors["token_embd.weight"];
        let scale = f64::from(h.embd_scale);
        let mut xs: Vec<Vec<f64>> = tokens
            .iter()
            .map(|&t| {
                embd[t as usize * h.n_embd..][..h.n_embd]
                    .iter()
                    .map(|x| x * scale)
                    .collect()
            })
            .collect();
        let mut kept = Past::new();
        for (layer, spec) in h.layers.iter().enumerate() {
            let Mixer::Attention(attn) = &spec.mixer else {
                panic!("{:?}", spec.mixer)
            };
            let name = |part: &str| format!("blk.{layer}.{part}");
            let add = |x: &mut Vec<f64>, branch: Vec<f64>, post: &str| {
                let branch = self.norm(&name(post), &branch).unwrap_or(branch);
                x.iter_mut()
                    .zip(branch)
                    .for_each(|(x, b)| *x += f64::from(spec.residual_scale) * b);
            };
            let (n_q, n_k, n_v) = (attn.n_q(), attn.n_k(), attn.n_v());
            let mut kv: Vec<(Vec<f64>, Vec<f64>)> = Vec::new();
            let mut queries = Vec::new();
            let normed: Vec<Vec<f64>> = xs
                .iter()
                .map(|x| {
                    self.norm(&name("attn_norm"), x)
                        .unwrap_or_else(|| x.clone())
                })
                .collect();
            for (t, x) in normed.iter().enumerate() {
                let fused = self.opt(&name("attn_qkv.weight")).is_some();
                let part = |p: &str, first: usize, n: usize| match fused {
                    true => self.linear(&name("attn_qkv"), first..first + n, x),
                    false => self.linear(&name(p), 0..n, x),
                };
                let mut q = part("attn_q", 0, n_q);
                let mut k = part("attn_k", n_q, n_k);
                let v = part("attn_v", n_q + n_k, n_v);
                for (x, norm) in [
                    (&mut q, "attn_q_norm.weight"),
                    (&mut k, "attn_k_norm.weight"),
                ] {
                    let Some(w) = self.opt(&name(norm)) else {
                        continue;
                    };
                    let width = if attn.qk_norm == Some(QkNorm::Full) {
                        x.len()
                    } else {
                        attn.head_dim
                    };
                    *x = x.chunks(width).flat_map(|x| self.rms(x, w)).collect();
                }
                q.chunks_mut(attn.head_dim)
                    .for_each(|q| self.rotate(attn, t, q));
                k.chunks_mut(attn.head_dim)
                    .for_each(|k| self.rotate(attn, t, k));
                queries.push(q);
                kv.push(match past.get(layer).and_then(|p| p.get(t)) {
                    Some(old) => old.clone(),
                    None => (k, v),
                });
            }
            for t in 0..tokens.len() {
                let start = attn.window.map_or(0, |size| (t + 1).saturating_sub(size));
                let mut out = Vec::new();
                for head in 0..attn.n_head {
                    let kv_head = head / attn.n_group();
                    let q = &queries[t][head * attn.head_dim..][..attn.head_dim];
                    let scores: Vec<f64> = (start..=t)
                        .map(|j| {
                            let k = &kv[j].0[kv_head * attn.head_dim..][..attn.head_dim];
                            let s = f64::from(attn.scale)
                                * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                            attn.softcap
                                .map(f64::from)
                                .map_or(s, |cap| cap * (s / cap).tanh())
                        })
                        .collect();
                    let sum: f64 = scores.iter().map(|s| s.exp()).sum();
                    for c in 0..attn.head_dim_v {
                        let values = (start..=t).map(|j| kv[j].1[kv_head * attn.head_dim_v + c]);
                        out.push(
                            scores
                                .iter()
                                .zip(values)
                                .map(|(s, v)| s.exp() / sum * v)
                                .sum(),
                        );
                    }
                }
                let branch = self.linear(&name("attn_output"), 0..h.n_embd, &out);
                add(&mut xs[t], branch, "post_attention_norm");
                let x = match spec.norms == Norms::Shared {
                    true => normed[t].clone(),
                    false => self
                        .norm(&name("ffn_norm"), &xs[t])
                        .unwrap_or_else(|| xs[t].clone()),
                };
                let branch = self.ffn(layer, &x);
                add(&mut xs[t], branch, "post_ffw_norm");
            }
            kept.push(kv);
        }
        let logits = xs.iter().map(|x| {
            let logits = self.linear(
                "output",
                0..h.n_vocab,
                &self.norm("output_norm", x).unwrap(),
            );
            let cap = h.final_softcap.map(f64::from);
            let scaled = logits.into_iter().map(|x| x * f64::from(h.logit_scale));
            scaled
                .map(|x| cap.map_or(x, |cap| cap * (x / cap).tanh()))
                .collect()
        });
        (logits.collect(), kept)
    }

    fn loss(&self, tokens: &[u32], past: &Past, targets: &[u32], weights: &[f32]) -> f64 {
        let (logits, _) = self.forward(tokens, past);
        let outputs = &logits[tokens.len() - targets.len()..];
        let nll =
            |l: &Vec<f64>, t: u32| l.iter().map(|x| x.exp()).sum::<f64>().ln() - l[t as usize];
        outputs
            .iter()
            .zip(targets.iter().zip(weights))
            .map(|(l, (&t, &w))| f64::from(w) * nll(l, t))
            .sum()
    }
}

fn session(model: &Model, n_threads: usize) -> Session {
    session_on(
        model,
        n_threads,
        &SessionOptions {
            n_ctx: Some(48),
            kv_type: KvType::F32,
            ..Default::default()
        },
    )
}

/// An adapter of everything, with a `B` that is not zero.
fn adapter(model: &Model, rank: usize, targets: impl Fn(&TargetModule) -> bool) -> Adapter {
    let mut adapter = Adapter::zeros(model, rank, 7, targets).unwrap();
    let mut noise = Noise(3);
    for (_, term) in adapter.terms_mut() {
        term.parts_mut()
            .1
            .iter_mut()
            .for_each(|b| *b = 0.2 * noise.next() as f32);
    }
    adapter.set_alpha(3.0).unwrap();
    adapter
}

/// The gradient over `TOKENS[n_past..]`, after the others, and the loss.
fn gradient(
    model: &Model,
    adapter: &Arc<Adapter>,
    n_past: usize,
    weights: &[f32],
    n_threads: usize,
    targets: impl Fn(&TargetModule) -> bool,
) -> (Gradients, f64) {
    let mut session = session(model, n_threads);
    let id = session.adapters().attach(Arc::clone(adapter), 0.5).unwrap();
    if n_past > 0 {
        session.prefill(&TOKENS[..n_past]).unwrap();
    }
    let mut gradients = Gradients::for_terms(adapter, targets);
    let (tokens, targets) = (&TOKENS[n_past..], &TARGETS[n_past..]);
    let loss = session
        .training()
        .nll_gradient(id, tokens, targets, &weights[n_past..], &mut gradients)
        .unwrap();
    assert_eq!(session.position(), TOKENS.len());
    (gradients, loss)
}

const DIRECTIONS: usize = 6;
/// Third derivatives are of order 10 at most, and sums of order 100 are exact to 1e-14: a
/// difference is off by less than 1e-8.
const STEP: f64 = 1e-4;

/// Compares the gradients of every term with finite differences.
fn check(name: &str, model: &Model, n_past: usize, rank: usize) {
    let adapter = Arc::new(adapter(model, rank, |_| true));
    // Signs of weights make tokens likelier and less likely; some do not count.
    let weights: Vec<f32> = (0..TOKENS.len())
        .map(|i| [1.0, 0.5, -0.7, 0.0][i % 4])
        .collect();
    let factor = |term: &ruvllm::lora::Term| 0.5 * f64::from(adapter.scale(term));

    let mut reference = Reference::new(model);
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let terms: HashMap<usize, (Term64, f64)> = adapter
        .terms()
        .map(|(i, t)| {
            (
                i,
                (
                    Term64 {
                        rank: t.rank(),
                        a: wide(t.a()),
                        b: wide(t.b()),
                    },
                    factor(t),
                ),
            )
        })
        .collect();
    for (&site, (term, factor)) in &terms {
        reference.change(site, term, *factor);
    }
    let (expected, mut past) = reference.forward(&TOKENS, &Past::new());
    past.iter_mut().for_each(|layer| layer.truncate(n_past));
    let loss = |r: &Reference<'_>| r.loss(&TOKENS, &past, &TARGETS[n_past..], &weights[n_past..]);

    let mut session = session(model, 1);
    session
        .adapters()
        .attach(Arc::clone(&adapter), 0.5)
        .unwrap();
    session
        .hooks()
        .prefill_each(&TOKENS, 0, |i, logits| {
            for (a, b) in logits.iter().zip(&expected[i]) {
                assert!(
                    (f64::from(*a) - b).abs() < 1e-4,
                    "{name}: the passes differ, {a} and {b}"
                );
            }
        })
        .unwrap();

    let (gradients, ours) = gradient(model, &adapter, n_past, &weights, 2, |_| true);
    assert!(
        (ours - loss(&reference)).abs() < 1e-4,
        "{name}: loss {ours}, expected {}",
        loss(&reference)
    );
    let mut noise = Noise(5);
    for (site, gradient) in gradients.terms() {
        let (term, factor) = &terms[&site];
        for of_b in [false, true] {
            let g = if of_b { gradient.b() } else { gradient.a() };
            let norm = g
                .iter()
                .map(|&g| f64::from(g) * f64::from(g))
                .sum::<f64>()
                .sqrt();
            let mut squares = 0.0;
            for _ in 0..DIRECTIONS {
                let direction: Vec<f64> = g.iter().map(|_| noise.normal()).collect();
                let shifted = |step: f64| {
                    let mut shifted = term.clone();
                    let values = if of_b { &mut shifted.b } else { &mut shifted.a };
                    values
                        .iter_mut()
                        .zip(&direction)
                        .for_each(|(x, d)| *x += step * d);
                    shifted
                };
                let mut at = |step: f64| {
                    let kept = reference.tensors[&*model.sites()[site].tensor].clone();
                    reference.change(site, term, -factor);
                    reference.change(site, &shifted(step), *factor);
                    let loss = loss(&reference);
                    *reference
                        .tensors
                        .get_mut(&*model.sites()[site].tensor)
                        .unwrap() = kept;
                    loss
                };
                let truth = (at(STEP) - at(-STEP)) / (2.0 * STEP);
                let along: f64 = direction
                    .iter()
                    .zip(g)
                    .map(|(d, g)| d * f64::from(*g))
                    .sum();
                squares += (truth - along) * (truth - along) / DIRECTIONS as f64;
            }
            let at = format!(
                "{name} {} {:?} {}",
                model.sites()[site].tensor,
                model.sites()[site].expert,
                if of_b { "B" } else { "A" }
            );
            let error = squares.sqrt();
            assert!(
                error <= 1e-3 * norm + 1e-7,
                "{at}: off by {error:e}, the gradient is {norm:e}"
            );
            let unused = model.sites()[site].expert.is_some();
            assert!(norm > 1e-6 || unused, "{at}: no gradient");
        }
    }
}

fn family(arch: &str) -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().filter(move |f| f.arch == arch)
}

/// One layer of each kind, and more layers, on the best level; `.ci/long` on all. (Every level's
/// kernels of gradients are compared with scalar in `kernels_backward`.)
fn check_family(arch: &str) {
    if emulated() && !["llama", "phi2", "gemma3"].contains(&arch) {
        return;
    }
    for family in family(arch).take(if emulated() { 1 } else { usize::MAX }) {
        for level in Arch::available().take(if long() { usize::MAX } else { 1 }) {
            let model = family.model(2).on(level);
            check(&format!("{} {}", family.arch, level.name()), &model, 0, 2);
        }
        if !emulated() {
            check(
                &format!("{} after a context", family.arch),
                &family.model(2),
                4,
                3,
            );
        }
    }
}

macro_rules! families {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            check_family(stringify!($name));
        }
    )*};
}

/// The families of the lists that have no name of their own below.
#[test]
fn further_families() {
    let mut archs: Vec<&str> = FAMILIES
        .iter()
        .map(|family| family.arch)
        .skip_while(|&a| a != "internlm2")
        .collect();
    archs.dedup();
    for arch in archs {
        check_family(arch);
    }
}

families! { llama mistral qwen2 qwen2moe qwen3 qwen3moe phi2 phi3 gemma2 gemma3 granite olmo2 smollm3 }

#[test]
fn every_family_is_checked() {
    for arch in ruvllm::model::supported_architectures() {
        assert_eq!(
            family(arch).count() == 0,
            REFUSED.contains(&arch),
            "{arch} has no gradient check"
        );
    }
}

/// Gradients of some sites are those of all, to the bit: what is not differentiated changes
/// nothing.
#[test]
fn gradients_of_some_sites_are_those_of_all() {
    for family in FAMILIES
        .iter()
        .take(if emulated() { 2 } else { usize::MAX })
    {
        let model = family.model(3);
        let adapter = Arc::new(adapter(&model, 2, |_| true));
        let weights = [1.0; TOKENS.len()];
        let (all, loss) = gradient(&model, &adapter, 0, &weights, 1, |_| true);
        let some: [&dyn Fn(&TargetModule) -> bool; 7] = [
            &|s| s.layer() == Some(2),
            &|s| s.layer() == Some(1) && s.part().starts_with("ffn"),
            &|s| s.layer() == Some(1) && s.part() == "ffn_down",
            &|s| s.layer() == Some(1) && s.part() == "attn_output",
            &|s| s.layer() == Some(2) && matches!(s.part(), "attn_q" | "attn_qkv"),
            &|s| s.part() == "output",
            &|s| s.is_embedding() || s.layer() == Some(2),
        ];
        for targets in some {
            for n_threads in [1, 3] {
                let (part, part_loss) = gradient(&model, &adapter, 0, &weights, n_threads, targets);
                assert_eq!(loss, part_loss);
                for (site, term) in part.terms() {
                    assert_eq!(
                        Some(term),
                        all.term(site),
                        "{} {}",
                        family.arch,
                        model.sites()[site].tensor
                    );
                }
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for family in FAMILIES
        .iter()
        .take(if emulated() { 2 } else { usize::MAX })
    {
        let model = family.model(2);
        let adapter = Arc::new(adapter(&model, 2, |_| true));
        let [one, two, three] =
            [1, 2, 3].map(|n| gradient(&model, &adapter, 2, &[1.0; 11], n, |_| true));
        for other in [two, three] {
            assert_eq!(one.1, other.1);
            assert!(one.0.terms().eq(other.0.terms()), "{}", family.arch);
        }
    }
}

/// Texts that share a pass have the losses and, in sum, the gradients that they have one after the
/// other: to the bit, but for the `A` of a matrix whose parts are products of their own, to which a
/// pass adds part by part. These are sums of up to 90 terms in another order: rounding errors of
/// 6e-8 of the terms add up like random numbers, to 6e-7, and terms cancel to no less than a tenth.
#[test]
fn texts_of_one_pass_have_the_gradients_of_each() {
    let texts = [(3..11, 2), (5..9, 0), (4..5, 0), (2..10, 6), (1..2, 1)];
    for family in FAMILIES
        .iter()
        .take(if emulated() { 2 } else { usize::MAX })
    {
        let model = family.model(2);
        let adapter = Arc::new(adapter(&model, 2, |_| true));
        for (n_past, n_threads) in [(0, 1), (0, 3), (2, 2)] {
            let tasks = texts.clone().map(|(range, first)| {
                let weights: Vec<f32> = (0..range.len())
                    .map(|i| if i < first { 0.0 } else { 0.5 + i as f32 })
                    .collect();
                (&TOKENS[range.clone()], &TARGETS[range], weights)
            });
            let mut session = session(&model, n_threads);
            let id = session
                .adapters()
                .attach(Arc::clone(&adapter), 0.5)
                .unwrap();
            if n_past > 0 {
                session.prefill(&TOKENS[..n_past]).unwrap();
            }
            let mut one_by_one = Gradients::zeros(&adapter);
            let losses = tasks.each_ref().map(|(tokens, targets, weights)| {
                let mut session = session.fork().unwrap();
                session
                    .training()
                    .nll_gradient(id, tokens, targets, weights, &mut one_by_one)
                    .unwrap()
            });
            let mut together = Gradients::zeros(&adapter);
            let tasks = tasks.each_ref().map(|(tokens, targets, weights)| Task {
                tokens,
                targets,
                weights,
            });
            assert_eq!(
                session
                    .training()
                    .nll_gradients(id, &tasks, &mut together)
                    .unwrap(),
                losses,
                "{}",
                family.arch
            );
            assert_eq!(session.position(), n_past);
            for ((site, together), (_, one_by_one)) in together.terms().zip(one_by_one.terms()) {
                let site = &model.sites()[site];
                let name = format!("{} {}", family.arch, site.tensor);
                assert_eq!(together.b(), one_by_one.b(), "{name}");
                let has_fused_gate = family.parts.contains(&FusedGate);
                if site.part() == "attn_qkv" || (site.part() == "ffn_up" && has_fused_gate) {
                    let norm =
                        |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
                    let apart =
                        norm(&mut together.a().iter().zip(one_by_one.a()).map(|(a, b)| a - b));
                    assert!(
                        apart <= 6e-6 * norm(&mut one_by_one.a().iter().copied()),
                        "{name}: {apart:e}"
                    );
                } else {
                    assert_eq!(together.a(), one_by_one.a(), "{name}");
                }
            }
        }
    }
}

/// The divergence from the model without its adapter is 0 at strength 0, and has the loss and the
/// gradients of its formula: that of whole rows of logits in 64 bits. Logarithms of sums are rounded
/// to 1e-7, two per token. Probabilities are rounded to 6e-8 some ten times, so to 6e-7, of which
/// `√(2·KL)` is what they differ by; terms of what follows from them cancel to no less than a tenth
/// in all, and to a twentieth in a single matrix (measured: 1/10.5 in Gemma's first one, on AVX2).
#[test]
fn divergence_has_the_gradient_of_its_formula() {
    for family in FAMILIES
        .iter()
        .take(if emulated() { 2 } else { usize::MAX })
    {
        let model = family.model(2);
        let adapter = Arc::new(adapter(&model, 2, |_| true));
        let mut session = session(&model, 2);
        let id = session
            .adapters()
            .attach(Arc::clone(&adapter), 0.0)
            .unwrap();
        let rows = Mutex::new(vec![Vec::new(); TOKENS.len()]);
        let keep = |i: usize, logits: &mut [f32]| {
            rows.lock().unwrap()[i] = log_softmax(logits);
            logits.fill(0.0);
            0.0
        };
        let mut found = Gradients::zeros(&adapter);
        session
            .training()
            .gradient(id, &TOKENS, 0, &keep, &mut found, None)
            .unwrap();
        session.clear();
        let reference = session.training().reference(&TOKENS).unwrap();
        session.clear();
        let loss = session
            .training()
            .divergence_gradient(id, &TOKENS, &reference, 2.0, &mut found, None)
            .unwrap();
        assert_eq!(loss, 0.0, "{}", family.arch);
        let rounding = found.norm();
        found.clear();

        session.clear();
        session.adapters().set_scale(id, 0.5).unwrap();
        let loss = session
            .training()
            .divergence_gradient(id, &TOKENS, &reference, 2.0, &mut found, None)
            .unwrap();
        session.clear();
        let rows = rows.into_inner().unwrap();
        let formula = |i: usize, logits: &mut [f32]| {
            let mut sum = 0.0;
            let log_q = log_softmax(logits);
            for ((logit, q), p) in logits.iter_mut().zip(log_q).zip(&rows[i]) {
                sum += 2.0 * p.exp() * (p - q);
                *logit = (2.0 * (q.exp() - p.exp())) as f32;
            }
            sum
        };
        let mut expected = Gradients::zeros(&adapter);
        let expected_loss = session
            .training()
            .gradient(id, &TOKENS, 0, &formula, &mut expected, None)
            .unwrap();
        let n = 2.0 * TOKENS.len() as f64;
        let error = (loss - expected_loss).abs();
        let name = family.arch;
        assert!(error < 2e-7 * n, "{name}: {loss} {expected_loss}");
        let room = 6e-6 / (2.0 * expected_loss / n).sqrt();
        let size = expected.norm();
        assert!(rounding < room * size, "{name}: {rounding} {size}");
        let mut all_apart = 0.0;
        for ((site, found), (_, expected)) in found.terms().zip(expected.terms()) {
            let name = format!("{} {}", family.arch, model.sites()[site].tensor);
            for (found, expected) in [(found.a(), expected.a()), (found.b(), expected.b())] {
                let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
                let apart = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
                let size = norm(&mut expected.iter().copied());
                all_apart += f64::from(apart).powi(2);
                assert!(
                    f64::from(apart) <= (2.0 * room).max(1e-5) * f64::from(size),
                    "{name}: {apart:e} of {size:e}, {room:e}"
                );
            }
        }
        let apart = all_apart.sqrt();
        assert!(
            apart <= room.max(1e-5) * size,
            "{name}: {apart:e} of {size:e}, {room:e}"
        );
    }
}

/// An adapter that changes nothing leads nowhere, with activations of 8 bits as well: both sides have
/// the same arithmetic.
#[test]
fn an_adapter_of_zeros_has_no_divergence() {
    for dtype in [DType::F32, DType::Q8_0, DType::Q4_0] {
        let model = Tiny::SHAPES[0].model(dtype);
        let adapter = Arc::new(Adapter::zeros(&model, 2, 7, |_| true).unwrap());
        let mut session = session(&model, 2);
        let id = session
            .adapters()
            .attach(Arc::clone(&adapter), 0.0)
            .unwrap();
        let reference = session.training().reference(&TOKENS).unwrap();
        session.clear();
        session.adapters().set_scale(id, 1.0).unwrap();
        let mut none = Gradients::for_terms(&adapter, |_| false);
        let divergence = session
            .training()
            .divergence_gradient(id, &TOKENS, &reference, 1.0, &mut none, None)
            .unwrap();
        assert_eq!(divergence, 0.0, "{dtype}");
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    logits.iter().map(|&x| f64::from(x) - sum.ln()).collect()
}

/// Quantised weights: the gradient is that of the model with the values that its blocks have, up to
/// how products of such formats round.
#[test]
fn quantised_weights_have_the_gradient_of_their_values() {
    let gguf = |dtype: DType, values_only: bool| {
        let source = Family {
            arch: "llama",
            keys: &[],
            parts: &[Head],
        }
        .model(2);
        let mut writer = Writer::new();
        source.gguf().metadata().iter().for_each(|(k, v)| {
            writer.metadata(k, v.clone());
        });
        for t in source.gguf().tensors() {
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(source.gguf().data(t));
            let format = dtype.format().unwrap();
            if t.dims.len() == 1 || t.dims[0] % format.block_elems as u64 != 0 {
                writer.tensor(
                    t.name.clone(),
                    &t.dims,
                    DType::F32,
                    bytemuck::cast_slice(&values).to_vec(),
                );
                continue;
            }
            let mut bytes = vec![0; values.len() / format.block_elems * format.block_bytes];
            format.quantize.unwrap()(&values, None, &mut bytes);
            if values_only {
                let mut values = vec![0.0f32; values.len()];
                (dtype.float_format().dequantize)(&bytes, &mut values);
                writer.tensor(
                    t.name.clone(),
                    &t.dims,
                    DType::F32,
                    bytemuck::cast_slice(&values).to_vec(),
                );
            } else {
                writer.tensor(t.name.clone(), &t.dims, dtype, bytes);
            }
        }
        let gguf = ruvllm::gguf::Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
        Model::from_gguf(gguf).unwrap()
    };
    for dtype in [DType::Q4_0, DType::Q8_0, DType::F16] {
        for level in Arch::available() {
            let (quantised, plain) = (gguf(dtype, false).on(level), gguf(dtype, true).on(level));
            let all = |model: &Model| {
                gradient(
                    model,
                    &Arc::new(adapter(model, 2, |_| true)),
                    0,
                    &[1.0; 11],
                    1,
                    |_| true,
                )
                .0
            };
            let (ours, truth) = (all(&quantised), all(&plain));
            let (mut difference, mut size) = (0.0, 0.0);
            for ((_, a), (_, b)) in ours.terms().zip(truth.terms()) {
                for (a, b) in a.a().iter().chain(a.b()).zip(b.a().iter().chain(b.b())) {
                    difference += f64::from(a - b).powi(2);
                    size += f64::from(*b).powi(2);
                }
            }
            // A factor rounded to a byte, one of 32 (going back, of 64) whose largest is about
            // twice their typical size, is off by 2/254/√3 of that, a product by √2 of
            // it; 15 products there and 15 back, one behind the other, make √30 of
            // that, or twice as much where errors are not independent. The scalar level
            // rounds to `f32` alone, as F16 does everywhere.
            let exact = level.name() == "scalar" || dtype == DType::F16;
            let bound = if exact {
                1e-5
            } else {
                2.0 * (30.0f64 * 2.0 / 3.0).sqrt() * 2.0 / 254.0
            };
            let error = (difference / size).sqrt();
            assert!(error <= bound, "{dtype} {}: {error}", level.name());
        }
    }
}

#[test]
fn cross_entropy_is_the_logarithm_and_its_gradient() {
    for arch in Arch::available() {
        let logits: Vec<f32> = (0..37).map(|i| (i * 7 % 11) as f32 - 3.0).collect();
        let mut gradient = logits.clone();
        let loss = cross_entropy(arch, &mut gradient, 5, -0.5);
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        assert!((loss + 0.5 * (sum.ln() - f64::from(logits[5]))).abs() < 1e-6);
        for (i, (g, x)) in gradient.iter().zip(&logits).enumerate() {
            let truth = -0.5 * (f64::from(*x).exp() / sum - if i == 5 { 1.0 } else { 0.0 });
            assert!((f64::from(*g) - truth).abs() < 1e-6);
        }
        // A target that is out of reach has a loss, not infinity.
        let mut far = vec![0.0, 200.0];
        assert!((cross_entropy(arch, &mut far, 0, 1.0) - 200.0).abs() < 1e-4);
    }
}

#[test]
fn learning_a_text_makes_it_likelier() {
    let model = family("llama").next().unwrap().model(2);
    for sgd in [true, false] {
        let adapter =
            Arc::new(Adapter::zeros(&model, 2, 1, |s| s.part().starts_with("ffn")).unwrap());
        let mut session = session(&model, 2);
        let id = session
            .adapters()
            .attach(Arc::clone(&adapter), 1.0)
            .unwrap();
        let mut gradients = Gradients::zeros(&adapter);
        let (mut descent, mut adam) = (Sgd::new(model.site_norms()), Adam::new());
        (descent.rate, descent.clip, adam.rate) = (0.03, 0.1, 0.02);
        let mut losses = Vec::new();
        for _ in 0..40 {
            let optimiser: &mut dyn ruvllm::lora::Optimiser =
                if sgd { &mut descent } else { &mut adam };
            losses.push(
                session
                    .training()
                    .learn(id, &TOKENS, optimiser, &mut gradients)
                    .unwrap(),
            );
            assert_eq!(session.position(), 0);
        }
        assert!(losses[39] < 0.7 * losses[0], "{losses:?}");
        // The caller's copy is its own.
        assert!(adapter.terms().all(|(_, term)| change_norm(term) == 0.0));
    }
}

#[test]
fn steps_are_clipped_and_decay() {
    let model = family("qwen2").next().unwrap().model(2);
    let norms = model.site_norms();
    for (site, norm) in model.sites().iter().zip(&norms) {
        let tensor = model
            .gguf()
            .tensor(&site.tensor)
            .or(model.gguf().tensor("token_embd.weight"))
            .unwrap();
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(model.gguf().data(tensor));
        let truth = values.iter().map(|x| x * x).sum::<f32>().sqrt();
        assert!(
            (norm - truth).abs() < 0.2 * truth,
            "{}: {norm}, {truth}",
            site.tensor
        );
    }
    let mut trained = adapter(&model, 2, |s| s.part() == "ffn_up");
    let (gradients, _) = gradient(&model, &Arc::new(trained.clone()), 0, &[1.0; 11], 1, |_| {
        true
    });
    let before = trained.clone();
    let mut sgd = Sgd::new(norms.clone());
    (sgd.rate, sgd.clip) = (1.0, 1e-3);
    ruvllm::lora::Optimiser::step(&mut sgd, &mut trained, &gradients);
    for (site, term) in trained.terms() {
        let old = before.term(site).unwrap();
        // ΔW of both together, as one term of twice the rank, would need a constructor; the first
        // order is enough for a small step.
        let moved: f32 = term
            .a()
            .iter()
            .zip(old.a())
            .chain(term.b().iter().zip(old.b()))
            .map(|(x, y)| (x - y).abs())
            .sum();
        assert!(moved > 0.0);
        let change = (change_norm(term) - change_norm(old)).abs() * f64::from(trained.scale(term));
        assert!(change <= 1.1e-3 * f64::from(norms[site]), "{change}");
    }
    // Without a gradient's length nothing moves, and decay shrinks what a step touches.
    let mut zero = Gradients::zeros(&trained);
    zero.clear();
    let kept = trained.clone();
    ruvllm::lora::Optimiser::step(&mut sgd, &mut trained, &zero);
    assert_eq!(kept, trained);
    (sgd.rate, sgd.decay) = (1e-9, 0.5);
    ruvllm::lora::Optimiser::step(&mut sgd, &mut trained, &gradients);
    for (site, term) in trained.terms() {
        assert!((change_norm(term) / change_norm(kept.term(site).unwrap()) - 0.25).abs() < 1e-3);
    }
}

#[test]
fn misuse_is_a_typed_error() {
    let model = family("llama").next().unwrap().model(1);
    let other = family("qwen2").next().unwrap().model(1);
    let adapter = Arc::new(adapter(&model, 2, |s| s.part() == "ffn_up"));
    let mut session = session(&model, 1);
    let id = session
        .adapters()
        .attach(Arc::clone(&adapter), 1.0)
        .unwrap();
    let mut gradients = Gradients::zeros(&adapter);
    let mut foreign = Gradients::zeros(&self::adapter(&other, 2, |_| true));
    let mut wide = Gradients::zeros(&self::adapter(&model, 3, |s| s.part() == "ffn_up"));
    for gradients in [&mut foreign, &mut wide] {
        let refused = session
            .training()
            .nll_gradient(id, &TOKENS, &TARGETS, &[1.0; 11], gradients);
        assert!(
            matches!(
                refused,
                Err(GradientError::Adapter(AdapterError::OtherModel { .. }))
            ),
            "{refused:?}"
        );
    }
    let outside =
        session
            .training()
            .nll_gradient(id, &[1], &[N_VOCAB as u32], &[1.0], &mut gradients);
    assert!(matches!(
        outside,
        Err(GradientError::Session(SessionError::TokenOutOfRange { .. }))
    ));
    let outside =
        session
            .training()
            .nll_gradient(id, &[N_VOCAB as u32], &[1], &[1.0], &mut gradients);
    assert!(matches!(
        outside,
        Err(GradientError::Session(SessionError::TokenOutOfRange { .. }))
    ));
    assert!(matches!(
        session
            .training()
            .nll_gradient(id, &[], &[], &[], &mut gradients),
        Err(GradientError::Session(SessionError::NoTokens))
    ));
    let long = [1; 49];
    let full = session
        .training()
        .nll_gradient(id, &long, &long, &[1.0; 49], &mut gradients);
    assert!(matches!(
        full,
        Err(GradientError::Session(SessionError::ContextFull { .. }))
    ));
    assert_eq!(gradients.norm(), 0.0);
    assert!(matches!(
        session
            .training()
            .learn(id, &[1], &mut Adam::new(), &mut gradients),
        Err(GradientError::Session(SessionError::NoTokens))
    ));
    assert_eq!(
        session
            .training()
            .nll_gradients(id, &[], &mut gradients)
            .unwrap(),
        [0.0; 0]
    );
    let (good, none) = (
        (&TOKENS[..], &TARGETS[..], &[1.0; 11][..]),
        (&TOKENS[..0], &TARGETS[..0], &[1.0; 0][..]),
    );
    let tasks = [good, none].map(|(tokens, targets, weights)| Task {
        tokens,
        targets,
        weights,
    });
    let refused = session.training().nll_gradients(id, &tasks, &mut gradients);
    assert!(
        matches!(refused, Err(GradientError::Session(SessionError::NoTokens))),
        "{refused:?}"
    );
    assert_eq!(gradients.norm(), 0.0);
    let cancel = session.cancel_token();
    cancel.cancel();
    let cancelled =
        session
            .training()
            .nll_gradient(id, &TOKENS, &TARGETS, &[1.0; 11], &mut gradients);
    assert!(matches!(
        cancelled,
        Err(GradientError::Session(SessionError::Cancelled))
    ));
    cancel.reset();
    session.clear();
    session
        .training()
        .nll_gradient(id, &TOKENS, &TARGETS, &[1.0; 11], &mut gradients)
        .unwrap();
    assert!(gradients.norm() > 0.0);
    session.adapters().detach(id).unwrap();
    assert!(matches!(
        session.adapters().update(id, |_| ()),
        Err(AdapterError::NotAttached)
    ));
}

/// What only the forward pass computes is refused on the way back, by name.
#[test]
fn gradients_of_what_has_none_are_refused() {
    let model = crate::run::open(Tiny::granite_swa().gguf()).unwrap();
    let adapter = Arc::new(adapter(&model, 2, |s| s.part() == "ffn_up"));
    let mut session = session(&model, 1);
    let id = session
        .adapters()
        .attach(Arc::clone(&adapter), 1.0)
        .unwrap();
    let refused = session.training().nll_gradient(
        id,
        &[1, 2],
        &[2, 3],
        &[1.0; 2],
        &mut Gradients::zeros(&adapter),
    );
    assert!(
        matches!(
            refused,
            Err(GradientError::Session(SessionError::NoGradient {
                what: "attention sinks"
            }))
        ),
        "{refused:?}"
    );
    assert_eq!(session.position(), 0);
}
