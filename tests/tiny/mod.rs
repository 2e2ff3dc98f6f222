//! Tiny seeded models, the same as those of `tests/reference.py`.
#![allow(dead_code)] // each test file uses its part

use ruvllm::gguf::{Gguf, Value, Writer};
use ruvllm::model::Model;
use ruvllm::quant::DType;

pub(crate) const N_EMBD: usize = 64;
pub(crate) const N_VOCAB: usize = 50;
pub(crate) const TOKENS: [u32; 12] = [1, 17, 4, 42, 9, 9, 33, 0, 28, 5, 49, 12];
const N_HEAD: usize = 4;
const N_KV: usize = 2;
const HEAD: usize = 16;
const N_FF: usize = 96;
const N_LAYER: usize = 2;
const N_EXPERT: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Tiny {
    Llama,
    Gemma2,
    Qwen3Moe,
}

/// A model file in pieces, so that tests can break it.
pub(crate) struct Parts {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<u64>, DType, Vec<u8>)>,
}

impl Parts {
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.remove(key);
        self.metadata.push((key.to_owned(), value.into()));
    }

    pub(crate) fn remove(&mut self, key: &str) {
        self.metadata.retain(|(k, _)| k != key);
    }

    pub(crate) fn remove_tensor(&mut self, name: &str) {
        self.tensors.retain(|t| t.0 != name);
    }

    pub(crate) fn rename_tensor(&mut self, from: &str, to: &str) {
        self.tensors.iter_mut().filter(|t| t.0 == from).for_each(|t| t.0 = to.to_owned());
    }

    pub(crate) fn bytes(self) -> Vec<u8> {
        let mut writer = Writer::new();
        for (key, value) in self.metadata {
            writer.metadata(key, value);
        }
        for (name, dims, dtype, bytes) in self.tensors {
            writer.tensor(name, &dims, dtype, bytes);
        }
        writer.to_bytes().unwrap()
    }

    pub(crate) fn gguf(self) -> Gguf {
        Gguf::from_bytes(self.bytes()).unwrap()
    }

    fn put(&mut self, name: String, dims: &[usize], dtype: DType, values: &[f32]) {
        let format = dtype.format().unwrap();
        let mut bytes = vec![0; values.len() / format.block_elems * format.block_bytes];
        match dtype {
            DType::F32 => bytes.copy_from_slice(bytemuck::cast_slice(values)),
            _ => format.quantize.unwrap()(values, None, &mut bytes),
        }
        self.tensors.push((name, dims.iter().map(|&n| n as u64).collect(), dtype, bytes));
    }

    fn matrix(&mut self, name: &str, n_in: usize, n_out: &[usize], dtype: DType) {
        let name = format!("{name}.weight");
        let values = values(&name, n_in * n_out.iter().product::<usize>(), (1.5 / (n_in as f64).sqrt()) as f32, 0.0);
        self.put(name, &[&[n_in], n_out].concat(), dtype, &values);
    }

    fn norm(&mut self, name: &str, n: usize) {
        let name = format!("{name}.weight");
        let values = values(&name, n, 0.25, 1.0);
        self.put(name, &[n], DType::F32, &values);
    }
}

/// Values in `shift ± scale` from a hash of name and index.
fn values(name: &str, n: usize, scale: f32, shift: f32) -> Vec<f32> {
    let seed = name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3));
    let splitmix = |x: u64| {
        let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    };
    let unit = |i: usize| (splitmix(seed.wrapping_add(i as u64)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..n).map(|i| shift + scale * unit(i)).collect()
}

impl Tiny {
    pub(crate) const ALL: [Tiny; 3] = [Tiny::Llama, Tiny::Gemma2, Tiny::Qwen3Moe];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Tiny::Llama => "llama",
            Tiny::Gemma2 => "gemma2",
            Tiny::Qwen3Moe => "qwen3moe",
        }
    }

    pub(crate) fn model(self, dtype: DType) -> Model {
        Model::from_gguf(self.parts(dtype).gguf(), &mut |_| true).unwrap()
    }

    /// The model with matrices of `dtype`.
    pub(crate) fn parts(self, dtype: DType) -> Parts {
        let arch = self.name();
        let mut p = Parts { metadata: Vec::new(), tensors: Vec::new() };
        p.set("general.architecture", arch);
        for (key, n) in [
            ("context_length", 256),
            ("embedding_length", N_EMBD),
            ("block_count", N_LAYER),
            ("attention.head_count", N_HEAD),
            ("attention.head_count_kv", N_KV),
            ("attention.key_length", HEAD),
            ("attention.value_length", HEAD),
            ("feed_forward_length", N_FF),
        ] {
            p.set(&format!("{arch}.{key}"), n as u32);
        }
        p.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5f32);
        match self {
            Tiny::Llama => {}
            Tiny::Gemma2 => {
                p.set("gemma2.attention.sliding_window", 4u32);
                p.set("gemma2.attn_logit_softcapping", 5.0f32);
                p.set("gemma2.final_logit_softcapping", 10.0f32);
            }
            Tiny::Qwen3Moe => {
                p.set("qwen3moe.rope.freq_base", 1000.0f32);
                p.set("qwen3moe.expert_count", N_EXPERT as u32);
                p.set("qwen3moe.expert_used_count", 2u32);
                p.set("qwen3moe.expert_feed_forward_length", N_FF as u32);
            }
        }
        p.matrix("token_embd", N_EMBD, &[N_VOCAB], dtype);
        p.norm("output_norm", N_EMBD);
        if self != Tiny::Gemma2 {
            p.matrix("output", N_EMBD, &[N_VOCAB], dtype);
        }
        for i in 0..N_LAYER {
            let name = |part: &str| format!("blk.{i}.{part}");
            p.norm(&name("attn_norm"), N_EMBD);
            p.norm(&name("ffn_norm"), N_EMBD);
            for (part, heads) in [("attn_q", N_HEAD), ("attn_k", N_KV), ("attn_v", N_KV)] {
                p.matrix(&name(part), N_EMBD, &[heads * HEAD], dtype);
                if self == Tiny::Llama {
                    let bias = name(&format!("{part}.bias"));
                    let values = values(&bias, heads * HEAD, 0.5, 0.0);
                    p.put(bias, &[heads * HEAD], DType::F32, &values);
                }
            }
            p.matrix(&name("attn_output"), N_HEAD * HEAD, &[N_EMBD], dtype);
            if self == Tiny::Gemma2 {
                p.norm(&name("post_attention_norm"), N_EMBD);
                p.norm(&name("post_ffw_norm"), N_EMBD);
            }
            if self == Tiny::Qwen3Moe {
                p.norm(&name("attn_q_norm"), HEAD);
                p.norm(&name("attn_k_norm"), HEAD);
                p.matrix(&name("ffn_gate_inp"), N_EMBD, &[N_EXPERT], DType::F32);
                p.matrix(&name("ffn_gate_exps"), N_EMBD, &[N_FF, N_EXPERT], dtype);
                p.matrix(&name("ffn_up_exps"), N_EMBD, &[N_FF, N_EXPERT], dtype);
                p.matrix(&name("ffn_down_exps"), N_FF, &[N_EMBD, N_EXPERT], dtype);
            } else {
                p.matrix(&name("ffn_gate"), N_EMBD, &[N_FF], dtype);
                p.matrix(&name("ffn_up"), N_EMBD, &[N_FF], dtype);
                p.matrix(&name("ffn_down"), N_FF, &[N_EMBD], dtype);
            }
        }
        p
    }
}
