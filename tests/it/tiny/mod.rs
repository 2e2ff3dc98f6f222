//! Tiny seeded models; those in [`Tiny::ALL`] are the same as those of `tests/reference.py`.
//!
//! [`Tiny::parts`] is a file in pieces: a test sets keys, edits or renames tensors, and opens
//! `parts.gguf()` by `run::open`. [`Tiny::granite_swa`] shows how one family's file becomes another's.
#![allow(dead_code)] // each test file uses its part

use ruvllm::Model;
use ruvllm::gguf::{Array, Gguf, Value, Writer};
use ruvllm::quant::{DType, MXFP4_VALUES};

pub(crate) const N_EMBD: usize = 64;
pub(crate) const N_VOCAB: usize = 50;
pub(crate) const TOKENS: [u32; 12] = [1, 17, 4, 42, 9, 9, 33, 0, 28, 5, 49, 12];
const N_HEAD: usize = 4;
const N_KV: usize = 2;
pub(crate) const HEAD: usize = 16;
const N_FF: usize = 96;
pub(crate) const N_LAYER: usize = 2;
const N_EXPERT: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Tiny {
    Llama,
    Gemma2,
    Qwen3Moe,
    /// With an expert that every token uses.
    Qwen2Moe,
    /// One matrix of queries, keys and values, one of gate and up.
    Phi3,
    /// Layer norms with biases, no gate, attention and feed-forward beside each other.
    Phi2,
}

/// A model file in pieces, so that tests can break it.
pub(crate) struct Parts {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<u64>, DType, Vec<u8>)>,
}

impl Parts {
    pub(crate) fn new() -> Parts {
        Parts {
            metadata: Vec::new(),
            tensors: Vec::new(),
        }
    }

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

    /// Removes the attention of all layers.
    fn without_attention(&mut self) {
        let of_attention = |part: &str| part.starts_with("attn_") && part != "attn_norm.weight";
        self.tensors
            .retain(|t| !t.0.splitn(3, '.').nth(2).is_some_and(of_attention));
    }

    pub(crate) fn rename_tensor(&mut self, from: &str, to: &str) {
        self.tensors
            .iter_mut()
            .filter(|t| t.0 == from)
            .for_each(|t| t.0 = to.to_owned());
    }

    /// Changes the values of an F32 tensor.
    pub(crate) fn edit(&mut self, name: &str, change: impl FnOnce(&mut [f32])) {
        let tensor = self.tensors.iter_mut().find(|t| t.0 == name).unwrap();
        assert_eq!(tensor.2, DType::F32);
        change(bytemuck::cast_slice_mut(&mut tensor.3));
    }

    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.tensors.iter().any(|t| t.0 == name)
    }

    pub(crate) fn copy_tensor(&mut self, from: &str, to: &str) {
        let mut tensor = self.tensors.iter().find(|t| t.0 == from).unwrap().clone();
        tensor.0 = to.to_owned();
        self.tensors.push(tensor);
    }

    pub(crate) fn tensor_names(&self) -> Vec<String> {
        self.tensors.iter().map(|t| t.0.clone()).collect()
    }

    /// Changes the shape of a tensor, of as many elements.
    pub(crate) fn reshape(&mut self, name: &str, dims: &[u64]) {
        self.tensors
            .iter_mut()
            .filter(|t| t.0 == name)
            .for_each(|t| t.1 = dims.to_vec());
    }

    /// Makes an F32 tensor smaller, of its first elements.
    pub(crate) fn cut(&mut self, name: &str, dims: &[u64]) {
        let tensor = self.tensors.iter_mut().find(|t| t.0 == name).unwrap();
        assert_eq!(tensor.2, DType::F32);
        tensor.3.truncate(4 * dims.iter().product::<u64>() as usize);
        tensor.1 = dims.to_vec();
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.metadata.iter().map(|(key, _)| key.clone()).collect()
    }

    /// Changes a dimension of an F32 tensor, which then has its first elements, or more zeros.
    pub(crate) fn resize(&mut self, name: &str, dimension: usize, n: usize) {
        if let Some(tensor) = self
            .tensors
            .iter_mut()
            .find(|t| t.0 == name && t.2 == DType::F32)
        {
            let dimension = dimension % tensor.1.len();
            tensor.1[dimension] = n.max(1) as u64;
            tensor
                .3
                .resize(4 * tensor.1.iter().product::<u64>() as usize, 0);
        }
    }

    /// Stores the bytes of a tensor, or the first of them, as of another type.
    pub(crate) fn retype(&mut self, name: &str, dtype: DType) {
        let (elems, bytes) = dtype.block();
        if let Some(tensor) = self.tensors.iter_mut().find(|t| t.0 == name) {
            let n = tensor.1.iter().product::<u64>();
            if tensor.1[0].is_multiple_of(elems) {
                tensor.2 = dtype;
                tensor.3.resize((n / elems * bytes) as usize, 0x35);
            }
        }
    }

    /// Rounds the matrices to another type, where its blocks fit their rows.
    pub(crate) fn retype_all(&mut self, dtype: DType) {
        let elems = dtype.block().0;
        let fits = |t: &&(String, Vec<u64>, DType, Vec<u8>)| {
            t.1.len() > 1
                && t.2 == DType::F32
                && t.1[0].is_multiple_of(elems)
                && !t.0.contains("_inp")
                && !t.0.contains("conv")
        };
        let matrices: Vec<_> = self.tensors.iter().filter(fits).cloned().collect();
        for (name, dims, _, bytes) in matrices {
            self.remove_tensor(&name);
            let dims: Vec<usize> = dims.iter().map(|&n| n as usize).collect();
            let values: Vec<f32> = bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect();
            self.put(name, &dims, dtype, &values);
        }
    }

    /// Sets all values of an F32 tensor.
    pub(crate) fn fill(&mut self, name: &str, value: f32) {
        if let Some(tensor) = self
            .tensors
            .iter_mut()
            .find(|t| t.0 == name && t.2 == DType::F32)
        {
            tensor
                .3
                .chunks_exact_mut(4)
                .for_each(|bytes| bytes.copy_from_slice(&value.to_le_bytes()));
        }
    }

    /// Adds an F32 vector.
    pub(crate) fn vector(&mut self, name: &str, values: &[f32]) {
        self.put(name.to_owned(), &[values.len()], DType::F32, values);
    }

    /// Adds an F32 tensor of values as in `tests/reference_values.py`: a bias, a rate, a vector
    /// near 1, or a matrix.
    pub(crate) fn hashed(&mut self, name: &str, dims: &[usize]) {
        let (scale, shift) = match dims {
            _ if name.ends_with("bias") => (0.5, 0.0),
            _ if name.ends_with("ssm_a") => (0.5, -1.0),
            [_] => (0.25, 1.0),
            _ => ((1.5 / (dims[0] as f64).sqrt()) as f32, 0.0),
        };
        self.put(
            name.to_owned(),
            dims,
            DType::F32,
            &values(name, dims.iter().product(), scale, shift),
        );
    }

    /// Adds an I32 tensor of the numbers below `end`, over and over.
    pub(crate) fn numbers(&mut self, name: &str, dims: &[usize], end: i32) {
        let numbers = (0..end).cycle().take(dims.iter().product());
        let dims = dims.iter().map(|&n| n as u64).collect();
        let bytes = numbers.flat_map(i32::to_le_bytes).collect();
        self.tensors
            .push((name.to_owned(), dims, DType::I32, bytes));
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
            DType::MXFP4 => mxfp4(values, &mut bytes),
            _ => format.quantize.unwrap()(values, None, &mut bytes),
        }
        self.tensors
            .push((name, dims.iter().map(|&n| n as u64).collect(), dtype, bytes));
    }

    pub(crate) fn matrix(&mut self, name: &str, n_in: usize, n_out: &[usize], dtype: DType) {
        let name = format!("{name}.weight");
        let values = values(
            &name,
            n_in * n_out.iter().product::<usize>(),
            (1.5 / (n_in as f64).sqrt()) as f32,
            0.0,
        );
        self.put(name, &[&[n_in], n_out].concat(), dtype, &values);
    }

    fn bias(&mut self, name: &str, n: usize) {
        let name = format!("{name}.bias");
        let values = values(&name, n, 0.5, 0.0);
        self.put(name, &[n], DType::F32, &values);
    }

    pub(crate) fn norm(&mut self, name: &str, n: usize) {
        let name = format!("{name}.weight");
        let values = values(&name, n, 0.25, 1.0);
        self.put(name, &[n], DType::F32, &values);
    }
}

/// Blocks of 32 values, each rounded to the nearest code; the library makes no such blocks.
fn mxfp4(values: &[f32], bytes: &mut [u8]) {
    for (block, values) in bytes.chunks_exact_mut(17).zip(values.chunks_exact(32)) {
        let largest = values
            .iter()
            .fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
        let exponent = (largest / 6.0).log2().ceil();
        block[0] = (exponent as i32 + 127) as u8;
        let code = |x: f32| {
            let apart =
                |code: usize| (f32::from(MXFP4_VALUES[code]) / 2.0 * exponent.exp2() - x).abs();
            (0..16)
                .min_by(|&a, &b| apart(a).total_cmp(&apart(b)))
                .unwrap() as u8
        };
        let (low, high) = values.split_at(16);
        block[1..]
            .iter_mut()
            .zip(low.iter().zip(high))
            .for_each(|(to, (&a, &b))| *to = code(a) | code(b) << 4);
    }
}

/// Values in `shift ± scale` from a hash of name and index.
fn values(name: &str, n: usize, scale: f32, shift: f32) -> Vec<f32> {
    let seed = name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3)
    });
    let splitmix = |x: u64| {
        let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    };
    let unit =
        |i: usize| (splitmix(seed.wrapping_add(i as u64)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..n).map(|i| shift + scale * unit(i)).collect()
}

impl Tiny {
    pub(crate) const ALL: [Tiny; 3] = [Tiny::Llama, Tiny::Gemma2, Tiny::Qwen3Moe];
    /// One for every shape of a layer.
    pub(crate) const SHAPES: [Tiny; 6] = [
        Tiny::Llama,
        Tiny::Gemma2,
        Tiny::Qwen3Moe,
        Tiny::Qwen2Moe,
        Tiny::Phi3,
        Tiny::Phi2,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Tiny::Llama => "llama",
            Tiny::Gemma2 => "gemma2",
            Tiny::Qwen3Moe => "qwen3moe",
            Tiny::Qwen2Moe => "qwen2moe",
            Tiny::Phi3 => "phi3",
            Tiny::Phi2 => "phi2",
        }
    }

    /// A llama with attention sinks and windows.
    pub(crate) fn granite_swa() -> Parts {
        let mut p = Tiny::Llama.parts(DType::F32);
        p.metadata
            .iter_mut()
            .for_each(|(key, _)| *key = key.replacen("llama.", "granite_swa.", 1));
        p.set("general.architecture", "granite_swa");
        p.set("granite_swa.attention.sliding_window", 4u32);
        (0..N_LAYER).for_each(|i| {
            p.vector(
                &format!("blk.{i}.attn_sinks.weight"),
                &[0.5, -1.0, 2.0, 0.0],
            )
        });
        p
    }

    /// A mixture with attention sinks, a window in the first layer, and biases of everything.
    pub(crate) fn gpt_oss(dtype: DType) -> Parts {
        let mut p = Tiny::Qwen3Moe.parts(dtype);
        p.metadata
            .iter_mut()
            .for_each(|(key, _)| *key = key.replacen("qwen3moe.", "gpt-oss.", 1));
        p.set("general.architecture", "gpt-oss");
        p.set("gpt-oss.attention.sliding_window", 4u32);
        for i in 0..N_LAYER {
            let name = |part: &str| format!("blk.{i}.{part}");
            ["attn_q_norm", "attn_k_norm"]
                .iter()
                .for_each(|part| p.remove_tensor(&name(&format!("{part}.weight"))));
            p.vector(&name("attn_sinks.weight"), &[0.5, -1.0, 2.0, 0.0]);
            let heads = [
                ("attn_q", N_HEAD * HEAD),
                ("attn_k", N_KV * HEAD),
                ("attn_v", N_KV * HEAD),
            ];
            for (part, n) in heads
                .into_iter()
                .chain([("attn_output", N_EMBD), ("ffn_gate_inp", N_EXPERT)])
            {
                p.bias(&name(part), n);
            }
            for (part, n) in [
                ("ffn_gate_exps", N_FF),
                ("ffn_up_exps", N_FF),
                ("ffn_down_exps", N_EMBD),
            ] {
                p.bias(&name(part), n * N_EXPERT);
                p.reshape(&name(&format!("{part}.bias")), &[n as u64, N_EXPERT as u64]);
            }
        }
        p
    }

    /// Attention, and a gated short convolution.
    pub(crate) fn lfm2(dtype: DType) -> Parts {
        let mut p = Tiny::Llama.parts(dtype);
        p.metadata
            .iter_mut()
            .for_each(|(key, _)| *key = key.replacen("llama.", "lfm2.", 1));
        p.set("general.architecture", "lfm2");
        p.set(
            "lfm2.attention.head_count_kv",
            Array::U32(vec![N_KV as u32, 0]),
        );
        p.set("lfm2.shortconv.l_cache", 3u32);
        p.without_attention();
        for part in ["attn_q_norm", "attn_k_norm"] {
            p.norm(&format!("blk.0.{part}"), HEAD);
        }
        for (part, heads) in [("attn_q", N_HEAD), ("attn_k", N_KV), ("attn_v", N_KV)] {
            p.matrix(&format!("blk.0.{part}"), N_EMBD, &[heads * HEAD], dtype);
        }
        p.matrix("blk.0.attn_output", N_HEAD * HEAD, &[N_EMBD], dtype);
        p.matrix("blk.1.shortconv.in_proj", N_EMBD, &[3 * N_EMBD], dtype);
        p.matrix("blk.1.shortconv.conv", 3, &[N_EMBD], DType::F32);
        p.matrix("blk.1.shortconv.out_proj", N_EMBD, &[N_EMBD], dtype);
        p
    }

    /// Gated delta rules alone, whose heads of keys and of values have different widths.
    pub(crate) fn qwen35(dtype: DType) -> Parts {
        let (n_inner, n_key, n_group) = (64, 24, 2);
        let mut p = Tiny::Llama.parts(dtype);
        p.metadata
            .iter_mut()
            .for_each(|(key, _)| *key = key.replacen("llama.", "qwen35.", 1));
        p.set("general.architecture", "qwen35");
        p.set(
            "qwen35.attention.recurrent_layers",
            Array::Bool(vec![true; N_LAYER]),
        );
        for (key, n) in [
            ("conv_kernel", 4),
            ("inner_size", n_inner),
            ("state_size", n_key),
            ("group_count", n_group),
            ("time_step_rank", N_HEAD),
        ] {
            p.set(&format!("qwen35.ssm.{key}"), n as u32);
        }
        p.without_attention();
        for i in 0..N_LAYER {
            let name = |part: &str| format!("blk.{i}.{part}");
            let n_channel = 2 * n_group * n_key + n_inner;
            p.rename_tensor(
                &name("ffn_norm.weight"),
                &name("post_attention_norm.weight"),
            );
            p.matrix(&name("attn_qkv"), N_EMBD, &[n_channel], dtype);
            p.matrix(&name("attn_gate"), N_EMBD, &[n_inner], dtype);
            p.matrix(&name("ssm_conv1d"), 4, &[n_channel], DType::F32);
            p.matrix(&name("ssm_alpha"), N_EMBD, &[N_HEAD], dtype);
            p.matrix(&name("ssm_beta"), N_EMBD, &[N_HEAD], dtype);
            p.matrix(&name("ssm_out"), n_inner, &[N_EMBD], dtype);
            p.vector(&name("ssm_a"), &[-0.2, -0.5, -1.0, -2.0]);
            p.vector(&name("ssm_dt.bias"), &[-1.0, 0.0, 0.5, 1.0]);
            p.norm(&name("ssm_norm"), n_inner / N_HEAD);
        }
        p
    }

    /// Layer norms with biases, learned positions, no gate.
    pub(crate) fn gpt2() -> Parts {
        let mut p = Tiny::Phi2.parts(DType::F32);
        p.metadata
            .iter_mut()
            .for_each(|(key, _)| *key = key.replacen("phi2.", "gpt2.", 1));
        p.remove("gpt2.rope.dimension_count");
        p.set("general.architecture", "gpt2");
        p.matrix("position_embd", N_EMBD, &[256], DType::F32);
        for i in 0..N_LAYER {
            p.norm(&format!("blk.{i}.ffn_norm"), N_EMBD);
            p.bias(&format!("blk.{i}.ffn_norm"), N_EMBD);
        }
        p
    }

    pub(crate) fn model(self, dtype: DType) -> Model {
        crate::run::open(self.parts(dtype).gguf()).unwrap()
    }

    /// The model with matrices of `dtype`.
    pub(crate) fn parts(self, dtype: DType) -> Parts {
        let arch = self.name();
        let mut p = Parts::new();
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
        match self {
            Tiny::Phi2 => p.set("phi2.attention.layer_norm_epsilon", 1e-5f32),
            _ => p.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5f32),
        }
        match self {
            Tiny::Llama | Tiny::Phi3 => {}
            Tiny::Phi2 => p.set("phi2.rope.dimension_count", HEAD as u32 / 2),
            Tiny::Gemma2 => {
                p.set("gemma2.attention.sliding_window", 4u32);
                p.set("gemma2.attn_logit_softcapping", 5.0f32);
                p.set("gemma2.final_logit_softcapping", 10.0f32);
            }
            Tiny::Qwen3Moe | Tiny::Qwen2Moe => {
                p.set(&format!("{arch}.rope.freq_base"), 1000.0f32);
                p.set(&format!("{arch}.expert_count"), N_EXPERT as u32);
                p.set(&format!("{arch}.expert_used_count"), 2u32);
                p.set(&format!("{arch}.expert_feed_forward_length"), N_FF as u32);
            }
        }
        if self == Tiny::Qwen2Moe {
            p.set(
                "qwen2moe.expert_shared_feed_forward_length",
                N_FF as u32 + 32,
            );
        }
        p.matrix("token_embd", N_EMBD, &[N_VOCAB], dtype);
        p.norm("output_norm", N_EMBD);
        if self != Tiny::Gemma2 {
            p.matrix("output", N_EMBD, &[N_VOCAB], dtype);
        }
        if self == Tiny::Phi2 {
            p.bias("output_norm", N_EMBD);
            p.bias("output", N_VOCAB);
        }
        for i in 0..N_LAYER {
            self.layer(&mut p, i, dtype);
        }
        p
    }

    fn layer(self, p: &mut Parts, i: usize, dtype: DType) {
        let name = |part: &str| format!("blk.{i}.{part}");
        p.norm(&name("attn_norm"), N_EMBD);
        if self == Tiny::Phi2 {
            p.bias(&name("attn_norm"), N_EMBD);
        } else {
            p.norm(&name("ffn_norm"), N_EMBD);
        }
        if matches!(self, Tiny::Phi2 | Tiny::Phi3) {
            p.matrix(
                &name("attn_qkv"),
                N_EMBD,
                &[(N_HEAD + 2 * N_KV) * HEAD],
                dtype,
            );
        } else {
            for (part, heads) in [("attn_q", N_HEAD), ("attn_k", N_KV), ("attn_v", N_KV)] {
                p.matrix(&name(part), N_EMBD, &[heads * HEAD], dtype);
                if matches!(self, Tiny::Llama | Tiny::Qwen2Moe) {
                    p.bias(&name(part), heads * HEAD);
                }
            }
        }
        p.matrix(&name("attn_output"), N_HEAD * HEAD, &[N_EMBD], dtype);
        if self == Tiny::Phi2 {
            p.bias(&name("attn_qkv"), (N_HEAD + 2 * N_KV) * HEAD);
            p.bias(&name("attn_output"), N_EMBD);
        }
        if self == Tiny::Gemma2 {
            p.norm(&name("post_attention_norm"), N_EMBD);
            p.norm(&name("post_ffw_norm"), N_EMBD);
        }
        if self == Tiny::Qwen3Moe {
            p.norm(&name("attn_q_norm"), HEAD);
            p.norm(&name("attn_k_norm"), HEAD);
        }
        match self {
            Tiny::Llama | Tiny::Gemma2 => {
                p.matrix(&name("ffn_gate"), N_EMBD, &[N_FF], dtype);
                p.matrix(&name("ffn_up"), N_EMBD, &[N_FF], dtype);
                p.matrix(&name("ffn_down"), N_FF, &[N_EMBD], dtype);
            }
            Tiny::Phi3 => {
                p.matrix(&name("ffn_up"), N_EMBD, &[2 * N_FF], dtype);
                p.matrix(&name("ffn_down"), N_FF, &[N_EMBD], dtype);
            }
            Tiny::Phi2 => {
                p.matrix(&name("ffn_up"), N_EMBD, &[N_FF], dtype);
                p.bias(&name("ffn_up"), N_FF);
                p.matrix(&name("ffn_down"), N_FF, &[N_EMBD], dtype);
                p.bias(&name("ffn_down"), N_EMBD);
            }
            Tiny::Qwen3Moe | Tiny::Qwen2Moe => {
                p.matrix(&name("ffn_gate_inp"), N_EMBD, &[N_EXPERT], DType::F32);
                p.matrix(&name("ffn_gate_exps"), N_EMBD, &[N_FF, N_EXPERT], dtype);
                p.matrix(&name("ffn_up_exps"), N_EMBD, &[N_FF, N_EXPERT], dtype);
                p.matrix(&name("ffn_down_exps"), N_FF, &[N_EMBD, N_EXPERT], dtype);
            }
        }
        if self == Tiny::Qwen2Moe {
            let n_shared = N_FF + 32;
            p.matrix(&name("ffn_gate_inp_shexp"), N_EMBD, &[1], DType::F32);
            p.matrix(&name("ffn_gate_shexp"), N_EMBD, &[n_shared], dtype);
            p.matrix(&name("ffn_up_shexp"), N_EMBD, &[n_shared], dtype);
            p.matrix(&name("ffn_down_shexp"), n_shared, &[N_EMBD], dtype);
        }
    }
}
