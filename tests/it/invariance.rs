//! One arithmetic per token: whatever is computed beside it, in batches of whatever size, on
//! however many threads, and whoever wants logits, a token's logits, keys and values are the same
//! bits. All levels, formats, dense, windowed and mixture models.

use crate::common::{emulated, long};
use crate::mutants::{Shapes, models};
use crate::run::{OnLevel, engine};
use crate::tiny::{N_VOCAB, Parts};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::arch::Arch;
use ruvllm::compute::{EvalCallback, HookPoint, TokenKind};
use ruvllm::engine::{Outputs, Sequence, Slot};
use ruvllm::gguf::Array;
use ruvllm::lora::Adapter;
use ruvllm::quant::{DType, FORMATS};
use ruvllm::{CancelToken, SessionOptions};
use std::sync::Arc;

/// Knuth's MMIX generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }

    fn tokens(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(N_VOCAB) as u32).collect()
    }
}

/// Models as small as blocks of 256 weights allow, with heads that all attention kernels take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Shape {
    Dense,
    /// With a window of 70 in every second layer.
    Windowed,
    Mixture,
    /// With windows, sinks in all layers, and a factor on values; a mixture, too.
    Sinks,
    /// With a router that reads the layer's input.
    EarlyRouter,
    /// With gated attention, windows and norms on both sides; a mixture, too.
    Gated,
    /// With ALiBi, layer norms and biases, and a norm of embeddings.
    Alibi,
    /// With latent attention, absorbed; a mixture, too.
    Latent,
    /// With sinks, windows and biases everywhere; a mixture, too.
    Oss,
    /// Whose second layer reads the first one's keys and values, with vectors of layers for tokens.
    SharedKeys,
    /// The same with three residual streams, a side path and a sparse activation.
    Streams,
    /// Whose first layer is a short convolution.
    ShortConv,
    /// Whose first layer is Mamba 1.
    Mamba,
    /// With Mamba 2 beside attention.
    Beside,
    /// With a gated delta rule behind gated attention.
    Delta,
    /// With a delta rule by channel behind latent attention; a mixture, too.
    DeltaByChannel,
    /// With time and channel mixes, and no attention.
    Rwkv,
}

impl Shape {
    /// Those with recurrent layers.
    pub(crate) const RECURRENT: [Shape; 6] = [
        Shape::ShortConv,
        Shape::Mamba,
        Shape::Beside,
        Shape::Delta,
        Shape::DeltaByChannel,
        Shape::Rwkv,
    ];

    pub(crate) const ALL: [Shape; 17] = {
        use Shape::*;
        [
            Dense,
            Windowed,
            Mixture,
            Sinks,
            EarlyRouter,
            Gated,
            Alibi,
            Latent,
            Oss,
            SharedKeys,
            Streams,
            ShortConv,
            Mamba,
            Beside,
            Delta,
            DeltaByChannel,
            Rwkv,
        ]
    };

    fn is_mixture(self) -> bool {
        use Shape::{DeltaByChannel, EarlyRouter, Gated, Latent, Mixture, Oss, Sinks};
        matches!(
            self,
            Mixture | Sinks | EarlyRouter | Gated | Latent | Oss | DeltaByChannel
        )
    }
}

/// What latent attention has besides queries.
fn latent(p: &mut Parts, name: &dyn Fn(&str) -> String, dtype: DType) {
    p.matrix(&name("attn_kv_a_mqa"), 256, &[96], dtype);
    p.norm(&name("attn_kv_a_norm"), 64);
    p.matrix(&name("attn_k_b"), 32, &[64, 8], dtype);
    p.matrix(&name("attn_v_b"), 64, &[32, 8], dtype);
    p.matrix(&name("attn_output"), 256, &[256], dtype);
}

/// What a recurrent layer `i` has in place of what others have, or besides.
fn recurrent(p: &mut Parts, shape: Shape, i: usize, dtype: DType) {
    const N: usize = 256;
    let name = |part: &str| format!("blk.{i}.{part}");
    let matrices = |p: &mut Parts, of: &[(&str, usize, usize)]| {
        of.iter()
            .for_each(|&(part, n_in, n_out)| p.matrix(&name(part), n_in, &[n_out], dtype));
    };
    // Something between -0.1 and -1.
    let rates = |n: usize| {
        (0..n)
            .map(|i| -0.1 * (1 + i * 7 % 10) as f32)
            .collect::<Vec<f32>>()
    };
    let conv = |p: &mut Parts, part: &str, n_tap: usize, n: usize| {
        p.matrix(&name(part), n_tap, &[n], DType::F32)
    };
    let attention =
        ["attn_q", "attn_k", "attn_v", "attn_output"].map(|part| name(&format!("{part}.weight")));
    match shape {
        Shape::ShortConv => {
            conv(p, "shortconv.conv", 3, N);
            matrices(
                p,
                &[
                    ("shortconv.in_proj", N, 3 * N),
                    ("shortconv.out_proj", N, N),
                ],
            );
        }
        Shape::Mamba => {
            conv(p, "ssm_conv1d", 4, N);
            p.vector(&name("ssm_conv1d.bias"), &[0.25; N]);
            matrices(
                p,
                &[
                    ("ssm_in", N, 2 * N),
                    ("ssm_x", N, 64),
                    ("ssm_dt", 32, N),
                    ("ssm_out", N, N),
                ],
            );
            p.vector(&name("ssm_dt.bias"), &[-1.0; N]);
            p.vector(&name("ssm_a"), &rates(16 * N));
            p.reshape(&name("ssm_a"), &[16, N as u64]);
            p.vector(&name("ssm_d"), &[0.5; N]);
            [("ssm_dt_norm", 32), ("ssm_b_norm", 16), ("ssm_c_norm", 16)]
                .iter()
                .for_each(|(part, n)| p.norm(&name(part), *n));
        }
        Shape::Beside => {
            conv(p, "ssm_conv1d", 4, N + 64);
            p.vector(&name("ssm_conv1d.bias"), &[0.25; N + 64]);
            matrices(p, &[("ssm_in", N, N + N + 64 + 8), ("ssm_out", N, N)]);
            p.vector(&name("ssm_dt.bias"), &[-1.0; 8]);
            for (part, values) in [("ssm_a", rates(8)), ("ssm_d", vec![0.5; 8])] {
                p.vector(&name(part), &values);
                p.reshape(&name(part), &[1, 8]);
            }
            return;
        }
        Shape::Delta => {
            conv(p, "ssm_conv1d", 4, N);
            matrices(
                p,
                &[
                    ("attn_qkv", N, N),
                    ("attn_gate", N, 128),
                    ("ssm_out", 128, N),
                ],
            );
            matrices(p, &[("ssm_alpha", N, 4), ("ssm_beta", N, 4)]);
            p.vector(&name("ssm_dt.bias"), &[-1.0; 4]);
            p.vector(&name("ssm_a"), &rates(4));
            p.norm(&name("ssm_norm"), 32);
        }
        Shape::DeltaByChannel => {
            attention.iter().for_each(|part| p.remove_tensor(part));
            for part in ["q", "k", "v"] {
                conv(p, &format!("ssm_conv1d_{part}"), 4, N);
                p.reshape(
                    &name(&format!("ssm_conv1d_{part}.weight")),
                    &[4, 1, N as u64],
                );
                matrices(p, &[(&format!("attn_{part}"), N, N)]);
            }
            matrices(
                p,
                &[
                    ("ssm_beta", N, 8),
                    ("ssm_f_a", N, 32),
                    ("ssm_f_b", 32, N),
                    ("ssm_g_a", N, 32),
                ],
            );
            matrices(p, &[("ssm_g_b", 32, N), ("attn_output", N, N)]);
            p.vector(&name("ssm_dt.bias"), &[-1.0; N]);
            p.vector(&name("ssm_a"), &rates(8));
            p.reshape(&name("ssm_a"), &[1, 8]);
            p.norm(&name("ssm_norm"), 32);
            return;
        }
        _ => unreachable!(),
    }
    attention.iter().for_each(|part| p.remove_tensor(part));
}

/// RWKV 7.
fn rwkv(dtype: DType) -> Model {
    const N: usize = 256;
    let mut p = Parts::new();
    p.set("general.architecture", "rwkv7");
    for (key, n) in [
        ("context_length", 512),
        ("embedding_length", N),
        ("block_count", 2),
        ("wkv.head_size", 32),
    ] {
        p.set(&format!("rwkv7.{key}"), n as u32);
    }
    p.set("rwkv7.feed_forward_length", 512u32);
    p.set("rwkv7.attention.head_count", 0u32);
    p.set("rwkv7.attention.layer_norm_epsilon", 1e-5f32);
    for rank in ["decay", "iclr", "value_residual_mix", "gate"] {
        p.set(&format!("rwkv7.attention.{rank}_lora_rank"), 32u32);
    }
    let norm = |p: &mut Parts, name: &str| {
        ["weight", "bias"]
            .iter()
            .for_each(|s| p.hashed(&format!("{name}.{s}"), &[N]))
    };
    ["token_embd", "output"]
        .iter()
        .for_each(|name| p.matrix(name, N, &[N_VOCAB], dtype));
    ["token_embd_norm", "output_norm"]
        .iter()
        .for_each(|name| norm(&mut p, name));
    for i in 0..2 {
        let name = |part: &str| format!("blk.{i}.{part}");
        ["attn_norm", "attn_norm_2", "time_mix_ln"]
            .iter()
            .for_each(|part| norm(&mut p, &name(part)));
        p.hashed(&name("time_mix_lerp_fused.weight"), &[N, 1, 1, 6]);
        for part in ["w0", "a0", "v0", "k_k", "k_a", "r_k"] {
            p.hashed(&name(&format!("time_mix_{part}.weight")), &[N]);
        }
        for part in ["w", "a", "v", "g"] {
            p.matrix(&name(&format!("time_mix_{part}1")), N, &[32], dtype);
            p.matrix(&name(&format!("time_mix_{part}2")), 32, &[N], dtype);
        }
        for part in ["receptance", "key", "value", "output"] {
            p.matrix(&name(&format!("time_mix_{part}")), N, &[N], dtype);
        }
        p.hashed(&name("channel_mix_lerp_k.weight"), &[N]);
        p.matrix(&name("channel_mix_key"), N, &[512], dtype);
        p.matrix(&name("channel_mix_value"), 512, &[N], dtype);
    }
    crate::mtp::set_vocabulary(&mut p, N_VOCAB);
    crate::run::open(p.gguf()).unwrap()
}

pub(crate) fn model(shape: Shape, dtype: DType) -> Model {
    const N: usize = 256;
    if shape == Shape::Rwkv {
        return rwkv(dtype);
    }
    let arch = match shape {
        Shape::Dense => "llama",
        Shape::Windowed => "gemma2",
        Shape::Mixture => "qwen3moe",
        Shape::Sinks => "mimo2",
        Shape::EarlyRouter => "smallthinker",
        Shape::Gated => "afmoe",
        Shape::Alibi => "bloom",
        Shape::Latent => "deepseek2",
        Shape::Oss => "gpt-oss",
        Shape::SharedKeys => "gemma4",
        Shape::Streams => "gemma3n",
        Shape::Rwkv => unreachable!("made by itself"),
        Shape::ShortConv => "lfm2",
        Shape::Mamba => "jamba",
        Shape::Beside => "falcon-h1",
        Shape::Delta => "qwen35",
        Shape::DeltaByChannel => "kimi-linear",
    };
    let mut p = Parts::new();
    p.set("general.architecture", arch);
    for (key, n) in [
        ("context_length", 512),
        ("embedding_length", N),
        ("block_count", 2),
        ("attention.head_count", 8),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("feed_forward_length", 512),
    ] {
        p.set(&format!("{arch}.{key}"), n as u32);
    }
    if shape == Shape::Alibi {
        p.set("bloom.attention.head_count_kv", 8u32);
    }
    p.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5f32);
    match shape {
        Shape::Dense | Shape::Alibi => {}
        Shape::ShortConv => {
            p.set("lfm2.attention.head_count_kv", Array::U32(vec![0, 2]));
            p.set("lfm2.shortconv.l_cache", 3u32);
        }
        Shape::Mamba | Shape::Beside | Shape::Delta => {
            let (heads, n_state) = match shape {
                Shape::Mamba => (32, 16),
                Shape::Beside => (8, 32),
                _ => (4, 32),
            };
            let n_inner = if shape == Shape::Delta { 128 } else { N };
            for (key, n) in [
                ("conv_kernel", 4),
                ("inner_size", n_inner),
                ("state_size", n_state),
            ] {
                p.set(&format!("{arch}.ssm.{key}"), n as u32);
            }
            p.set(&format!("{arch}.ssm.time_step_rank"), heads as u32);
            match shape {
                Shape::Mamba => p.set("jamba.attention.head_count_kv", Array::U32(vec![0, 2])),
                Shape::Beside => p.set("falcon-h1.ssm.group_count", 1u32),
                _ => {
                    p.set("qwen35.ssm.group_count", 2u32);
                    p.set(
                        "qwen35.attention.recurrent_layers",
                        Array::Bool(vec![false, true]),
                    );
                }
            }
        }
        Shape::SharedKeys | Shape::Streams => {
            p.set(&format!("{arch}.attention.sliding_window"), 70u32);
            p.set(&format!("{arch}.attention.shared_kv_layers"), 1u32);
            p.set(&format!("{arch}.embedding_length_per_layer_input"), 64u32);
            if shape == Shape::Streams {
                p.set("gemma3n.altup.num_inputs", 3u32);
                p.set("gemma3n.altup.active_idx", 0u32);
                p.set(
                    "gemma3n.activation_sparsity_scale",
                    Array::F32(vec![0.5, f32::NEG_INFINITY]),
                );
            }
        }
        Shape::Windowed => {
            p.set("gemma2.attention.sliding_window", 70u32);
            p.set("gemma2.attn_logit_softcapping", 5.0f32);
        }
        _ => {
            p.set(&format!("{arch}.expert_count"), 5u32);
            p.set(&format!("{arch}.expert_used_count"), 2u32);
            p.set(&format!("{arch}.expert_feed_forward_length"), 256u32);
            if shape == Shape::DeltaByChannel {
                p.set(
                    "kimi-linear.attention.head_count_kv",
                    Array::U32(vec![1, 0]),
                );
                p.set("kimi-linear.kda.head_dim", 32u32);
                p.set("kimi-linear.ssm.conv_kernel", 4u32);
                p.set("kimi-linear.leading_dense_block_count", 0u32);
            }
            if shape == Shape::Latent {
                p.set("deepseek2.attention.q_lora_rank", 64u32);
            }
            if matches!(shape, Shape::Latent | Shape::DeltaByChannel) {
                for (key, n) in [
                    ("kv_lora_rank", 64u32),
                    ("key_length_mla", 64),
                    ("value_length_mla", 32),
                    ("key_length", 96),
                    ("value_length", 64),
                ] {
                    p.set(&format!("{arch}.attention.{key}"), n);
                }
                p.set(&format!("{arch}.rope.dimension_count"), 32u32);
            } else if shape != Shape::Mixture {
                p.set(&format!("{arch}.attention.sliding_window"), 70u32);
            }
            if matches!(shape, Shape::Sinks | Shape::EarlyRouter | Shape::Gated) {
                p.set(&format!("{arch}.expert_gating_func"), 2u32);
            }
            if shape == Shape::Sinks {
                p.set("mimo2.attention.value_scale", 0.7f32);
            }
        }
    }
    p.matrix("token_embd", N, &[N_VOCAB], dtype);
    p.norm("output_norm", N);
    if shape != Shape::Windowed {
        p.matrix("output", N, &[N_VOCAB], dtype);
    }
    if shape == Shape::Alibi {
        p.norm("token_embd_norm", N);
        p.vector("token_embd_norm.bias", &[0.25; N]);
        p.vector("output_norm.bias", &[0.25; N]);
    }
    if shape == Shape::Streams {
        ["altup_proj", "altup_unembd_proj"]
            .iter()
            .for_each(|name| p.matrix(name, N, &[N, 2], dtype));
    }
    if matches!(shape, Shape::SharedKeys | Shape::Streams) {
        p.matrix("per_layer_token_embd", 2 * 64, &[N_VOCAB], dtype);
        p.matrix("per_layer_model_proj", N, &[2 * 64], dtype);
        p.norm("per_layer_proj_norm", 64);
    }
    for i in 0..2 {
        let name = |part: &str| format!("blk.{i}.{part}");
        let n_kv = if shape == Shape::Alibi { N } else { 64 };
        let plain = [
            ("attn_q", N),
            ("attn_k", n_kv),
            ("attn_v", n_kv),
            ("attn_output", N),
        ];
        for (part, n_out) in plain.into_iter().filter(|_| shape != Shape::Latent) {
            p.matrix(&name(part), N, &[n_out], dtype);
        }
        match shape {
            Shape::SharedKeys | Shape::Streams => {
                if shape == Shape::Streams {
                    p.matrix(&name("altup_router"), N, &[3], dtype);
                    p.hashed(&name("altup_predict_coef.weight"), &[3, 9]);
                    p.hashed(&name("altup_correct_coef.weight"), &[3, 3]);
                    p.hashed(&name("altup_correct_scale.weight"), &[N]);
                    p.matrix(&name("laurel_l"), N, &[32], dtype);
                    p.matrix(&name("laurel_r"), 32, &[N], dtype);
                    ["altup_router_norm", "laurel_post_norm"]
                        .iter()
                        .for_each(|part| p.norm(&name(part), N));
                }
                p.matrix(&name("inp_gate"), N, &[64], dtype);
                p.matrix(&name("proj"), 64, &[N], dtype);
                p.norm(&name("post_norm"), N);
                p.norm(&name("attn_q_norm"), 32);
                if i == 0 {
                    p.norm(&name("attn_k_norm"), 32);
                } else {
                    ["attn_k", "attn_v"]
                        .iter()
                        .for_each(|part| p.remove_tensor(&name(&format!("{part}.weight"))));
                }
            }
            Shape::Sinks => p.vector(
                &name("attn_sinks.weight"),
                &[-1.0, 0.0, 1.0, 2.0, 0.5, -2.0, 3.0, 0.0],
            ),
            Shape::Latent => {
                p.matrix(&name("attn_q_a"), N, &[64], dtype);
                p.norm(&name("attn_q_a_norm"), 64);
                p.matrix(&name("attn_q_b"), 64, &[8 * 64], dtype);
                latent(&mut p, &name, dtype);
            }
            Shape::Oss => {
                p.vector(
                    &name("attn_sinks.weight"),
                    &[-1.0, 0.0, 1.0, 2.0, 0.5, -2.0, 3.0, 0.0],
                );
                for (part, n) in [
                    ("attn_q", N),
                    ("attn_k", 64),
                    ("attn_v", 64),
                    ("attn_output", N),
                    ("ffn_gate_inp", 5),
                ] {
                    p.vector(&name(&format!("{part}.bias")), &vec![0.25; n]);
                }
                for (part, n) in [
                    ("ffn_gate_exps", 256),
                    ("ffn_up_exps", 256),
                    ("ffn_down_exps", N),
                ] {
                    let values: Vec<f32> = (0..5 * n).map(|i| (i % 7) as f32 / 8.0).collect();
                    p.vector(&name(&format!("{part}.bias")), &values);
                    p.reshape(&name(&format!("{part}.bias")), &[n as u64, 5]);
                }
            }
            Shape::Gated => p.matrix(&name("attn_gate"), N, &[N], dtype),
            Shape::Delta if i == 0 => {
                p.remove_tensor(&name("attn_q.weight"));
                p.matrix(&name("attn_q"), N, &[2 * N], dtype);
                ["attn_q_norm", "attn_k_norm"]
                    .iter()
                    .for_each(|part| p.norm(&name(part), 32));
            }
            Shape::ShortConv | Shape::Mamba if i == 0 => recurrent(&mut p, shape, i, dtype),
            Shape::Beside | Shape::Delta => recurrent(&mut p, shape, i, dtype),
            Shape::DeltaByChannel if i == 1 => recurrent(&mut p, shape, i, dtype),
            Shape::DeltaByChannel => {
                plain
                    .iter()
                    .for_each(|(part, _)| p.remove_tensor(&name(&format!("{part}.weight"))));
                latent(&mut p, &name, dtype);
                p.matrix(&name("attn_q"), N, &[8 * 64], dtype);
            }
            Shape::ShortConv => ["attn_q_norm", "attn_k_norm"]
                .iter()
                .for_each(|part| p.norm(&name(part), 32)),
            Shape::Alibi => {
                for (part, n) in [
                    ("attn_norm", N),
                    ("attn_q", N),
                    ("attn_k", N),
                    ("attn_v", N),
                    ("attn_output", N),
                    ("ffn_norm", N),
                    ("ffn_up", 512),
                    ("ffn_down", N),
                ] {
                    p.vector(&name(&format!("{part}.bias")), &vec![0.25; n]);
                }
            }
            _ => {}
        }
        p.norm(&name("attn_norm"), N);
        p.norm(&name("ffn_norm"), N);
        if matches!(
            shape,
            Shape::Windowed | Shape::Gated | Shape::SharedKeys | Shape::Streams
        ) {
            p.norm(&name("post_attention_norm"), N);
            p.norm(&name("post_ffw_norm"), N);
        }
        if matches!(shape, Shape::Mixture | Shape::Gated) {
            p.norm(&name("attn_q_norm"), 32);
            p.norm(&name("attn_k_norm"), 32);
        }
        if shape.is_mixture() {
            p.matrix(&name("ffn_gate_inp"), N, &[5], DType::F32);
            p.matrix(&name("ffn_gate_exps"), N, &[256, 5], dtype);
            p.matrix(&name("ffn_up_exps"), N, &[256, 5], dtype);
            p.matrix(&name("ffn_down_exps"), 256, &[N, 5], dtype);
        } else {
            if shape != Shape::Alibi {
                p.matrix(&name("ffn_gate"), N, &[512], dtype);
            }
            p.matrix(&name("ffn_up"), N, &[512], dtype);
            p.matrix(&name("ffn_down"), 512, &[N], dtype);
        }
    }
    crate::mtp::set_vocabulary(&mut p, N_VOCAB);
    crate::run::open(p.gguf()).unwrap()
}

fn options(kv_type: KvType, n_batch: usize, exact: bool) -> SessionOptions {
    SessionOptions {
        n_ctx: Some(512),
        n_batch,
        kv_type,
        exact,
        ..Default::default()
    }
}

/// A text: a prompt, then generated tokens; and the logits that follow each token.
struct Text {
    prompt: Vec<u32>,
    generated: Vec<u32>,
    logits: Vec<f32>,
}

impl Text {
    /// Computed alone on one thread, the prompt as a whole, the other tokens one by one.
    fn new(
        model: &Model,
        options: &SessionOptions,
        n_prompt: usize,
        n_generated: usize,
        random: &mut Random,
    ) -> Text {
        let (prompt, generated) = (random.tokens(n_prompt), random.tokens(n_generated));
        let mut session = engine(model, 1)
            .session_with(&SessionOptions {
                n_batch: 512,
                ..options.clone()
            })
            .unwrap();
        let mut logits = all_logits(&mut session, &prompt);
        for &token in &generated {
            session.decode(token).unwrap();
            logits.extend_from_slice(session.logits());
        }
        Text {
            prompt,
            generated,
            logits,
        }
    }

    /// The logits that follow the tokens from `first` on.
    fn after(&self, first: usize) -> &[f32] {
        &self.logits[first * N_VOCAB..]
    }

    /// The logits that follow `n` tokens from `first` on.
    fn rows(&self, first: usize, n: usize) -> &[f32] {
        &self.after(first)[..n * N_VOCAB]
    }
}

fn all_logits(session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    let mut logits = Vec::new();
    session
        .hooks()
        .prefill_each(tokens, 0, |_, row| logits.extend_from_slice(row))
        .unwrap();
    logits
}

#[track_caller]
fn assert_same(expected: &[f32], got: &[f32], what: &str) {
    assert_eq!(expected.len(), got.len(), "{what}");
    let differs = expected
        .iter()
        .zip(got)
        .position(|(a, b)| a.to_bits() != b.to_bits());
    if let Some(i) = differs {
        panic!(
            "{what}: row {} of {}: {} instead of {}",
            i / N_VOCAB,
            got.len() / N_VOCAB,
            got[i],
            expected[i]
        );
    }
}

/// Threads, sizes of batches, and which rows' logits are wanted.
fn batches_and_threads(model: &Model, kv_type: KvType, text: &Text, exact: bool, what: &str) {
    let sizes: &[usize] = if short(model.arch()) {
        &[33, 512]
    } else {
        &[1, 7, 32, 64, 512]
    };
    for (i, &n_batch) in sizes.iter().enumerate() {
        let n_threads = 1 + (i + text.prompt.len()) % 3;
        let what = format!("{what}, {n_threads} threads, batches of {n_batch}");
        let engine = engine(model, n_threads);
        let mut session = engine
            .session_with(&options(kv_type, n_batch, exact))
            .unwrap();
        let mut last = session.fork().unwrap();
        assert_same(
            text.rows(0, text.prompt.len()),
            &all_logits(&mut session, &text.prompt),
            &what,
        );
        last.prefill(&text.prompt).unwrap();
        for session in [&mut session, &mut last] {
            assert_same(text.rows(text.prompt.len() - 1, 1), session.logits(), &what);
            for (j, &token) in text.generated.iter().enumerate().take(2) {
                session.decode(token).unwrap();
                assert_same(text.rows(text.prompt.len() + j, 1), session.logits(), &what);
            }
        }
    }
}

/// The text's tokens, some at a time, among those of other sequences, in any order; drafts are
/// verified together.
fn neighbours(model: &Model, kv_type: KvType, text: &Text, random: &mut Random, what: &str) {
    let engine = engine(model, 1 + random.below(3));
    let new = || engine.sequence(&options(kv_type, 512, false)).unwrap();
    let (mut outputs, cancel) = (Outputs::default(), CancelToken::default());
    let n_others = [1, 3, 8, 15, 63][random.below(if short(model.arch()) { 2 } else { 5 })];
    let mut others: Vec<Sequence> = (0..n_others).map(|_| new()).collect();
    let mut adapter = Adapter::zeros(model, 2, 1, |_| true).unwrap();
    adapter.terms_mut().for_each(|(i, term)| {
        let (a, b) = term.parts_mut();
        a.iter_mut()
            .chain(b)
            .enumerate()
            .for_each(|(j, x)| *x = ((i + j) % 7) as f32 * 0.01 - 0.03);
    });
    others[0].attach(Arc::new(adapter), 1.0).unwrap();
    let mut seq = new();
    while seq.position() < text.prompt.len() + text.generated.len() {
        let begin = seq.position();
        let (rest, kind, most) = match begin.checked_sub(text.prompt.len()) {
            None => (&text.prompt[begin..], TokenKind::Prompt, 80),
            Some(done) => (&text.generated[done..], TokenKind::Generated, 8),
        };
        let tokens = &rest[..rest.len().min(1 + random.below(most))];
        let theirs: Vec<(Vec<u32>, TokenKind)> = (0..n_others)
            .map(|i| match random.below(3) {
                0 if i < 8 => {
                    let n = 1 + random.below(20);
                    (random.tokens(n), TokenKind::Prompt)
                }
                1 if i < 8 => (random.tokens(3), TokenKind::Generated),
                _ => (random.tokens(1), TokenKind::Generated),
            })
            .collect();
        let first = random.below(tokens.len() + 1);
        let mut slots = vec![Slot::new(&mut seq, tokens, kind).outputs_from(first)];
        slots.extend(
            others
                .iter_mut()
                .zip(&theirs)
                .map(|(seq, (tokens, kind))| Slot::new(seq, tokens, *kind)),
        );
        let at = random.below(slots.len());
        slots.swap(0, at);
        engine.step(&mut slots, &mut outputs, &cancel).unwrap();
        drop(slots);
        let expected = text.rows(begin + first, tokens.len() - first);
        assert_same(
            expected,
            outputs.logits(at),
            &format!("{what}, from {begin} on, slot {at} of {}", n_others + 1),
        );
        others
            .iter_mut()
            .filter(|other| other.position() > 400)
            .for_each(|other| *other = new());
    }
}

/// Forks, and what was taken back or has left a window and is computed again.
fn forks_and_rewinds(model: &Model, kv_type: KvType, text: &Text, random: &mut Random, what: &str) {
    let engine = engine(model, 2);
    let mut session = engine.session_with(&options(kv_type, 33, false)).unwrap();
    session.prefill(&text.prompt).unwrap();
    let n_prompt = text.prompt.len();
    for _ in 0..2 {
        let mut fork = session.fork().unwrap();
        for (j, &token) in text.generated.iter().enumerate() {
            fork.decode(token).unwrap();
            assert_same(text.rows(n_prompt + j, 1), fork.logits(), what);
        }
        // Some generated tokens stay, behind a window that may have to be computed again.
        fork.rewind(n_prompt + 2).unwrap();
        fork.decode(text.generated[2]).unwrap();
        assert_same(text.rows(n_prompt + 2, 1), fork.logits(), what);
        let position = random.below(n_prompt);
        session.rewind(position).unwrap();
        session.prefill(&text.prompt[position..]).unwrap();
        assert_same(text.rows(n_prompt - 1, 1), session.logits(), what);
    }
}

/// Keys and values of each layer.
#[derive(Default)]
struct KeysValues(Vec<Vec<f32>>);

impl EvalCallback for KeysValues {
    fn tensor(&mut self, tap: HookPoint, layer: usize, values: &[f32]) {
        let i = match tap {
            HookPoint::K => 2 * layer,
            HookPoint::V => 2 * layer + 1,
            _ => return,
        };
        if self.0.len() <= i {
            self.0.resize_with(i + 1, Vec::new);
        }
        self.0[i].extend_from_slice(values);
    }
}

/// Keys and values themselves, and that looking at them changes nothing.
fn keys_and_values(model: &Model, kv_type: KvType, text: &Text, what: &str) {
    let last = text.prompt.len() - 1;
    let [whole, parts] = [512, 41].map(|n_batch| {
        let mut session = engine(model, 2)
            .session_with(&options(kv_type, n_batch, false))
            .unwrap();
        let mut seen = KeysValues::default();
        session
            .hooks()
            .prefill_probed(&text.prompt, last, &mut seen, |_, _| ())
            .unwrap();
        assert_same(text.rows(last, 1), session.logits(), what);
        seen.0
    });
    for (whole, parts) in whole.iter().zip(&parts) {
        assert!(
            whole
                .iter()
                .map(|x| x.to_bits())
                .eq(parts.iter().map(|x| x.to_bits())),
            "{what}: keys or values"
        );
    }
}

/// With `exact`, prompts are computed as if they had been generated.
fn exact(model: &Model, kv_type: KvType, random: &mut Random, what: &str) {
    let what = format!("{what}, exact");
    let options = options(kv_type, 512, true);
    let all = Text::new(
        model,
        &options,
        if short(model.arch()) { 70 } else { 90 },
        2,
        random,
    );
    batches_and_threads(model, kv_type, &all, true, &what);
    let one = engine(model, 1);
    let mut session = one.session_with(&options).unwrap();
    let mut not_exact = one
        .session_with(&SessionOptions {
            exact: false,
            ..options
        })
        .unwrap();
    for (i, &token) in all.prompt.iter().chain(&all.generated).enumerate() {
        session.decode(token).unwrap();
        not_exact.decode(token).unwrap();
        assert_same(all.rows(i, 1), session.logits(), &what);
        assert_same(all.rows(i, 1), not_exact.logits(), &what);
    }
}

fn check(shape: Shape, dtype: DType, arch: Arch, kv_type: KvType) {
    let what = format!("{shape:?} {dtype:?} {arch:?} {kv_type:?}");
    let seed = dtype as u64 * 31 + shape as u64;
    check_model(&model(shape, dtype).on(arch), kv_type, seed, &what);
}

fn check_model(model: &Model, kv_type: KvType, seed: u64, what: &str) {
    let (arch, mut random) = (model.arch(), Random(seed));
    let n_prompt = random.below(60) + if short(arch) { 70 } else { 140 };
    let text = Text::new(
        model,
        &options(kv_type, 512, false),
        n_prompt,
        9,
        &mut random,
    );
    batches_and_threads(model, kv_type, &text, false, what);
    for _ in 0..if short(arch) { 1 } else { 2 } {
        neighbours(model, kv_type, &text, &mut random, what);
    }
    forks_and_rewinds(model, kv_type, &text, &mut random, what);
    keys_and_values(model, kv_type, &text, what);
    exact(model, kv_type, &mut random, what);
}

/// Whether instructions are emulated, those of a CPU or tiles alone: then a part of all this has to
/// do.
fn few() -> bool {
    emulated() || cfg!(ruvllm_emulate_amx)
}

/// Whether shorter texts and fewer batches have to do on this level, too: the portable one, which
/// is slow and has one code for all shapes, unless time does not matter.
fn short(arch: Arch) -> bool {
    few() || arch.name() == "scalar" && !long()
}

/// Levels this CPU has; under emulation the one that is tested.
fn levels() -> Vec<Arch> {
    if few() {
        vec![crate::run::level()]
    } else {
        Arch::available().collect()
    }
}

#[test]
fn dense() {
    for (level, arch) in levels().into_iter().enumerate() {
        let formats = FORMATS.iter().filter(|f| f.quantize.is_some());
        for (i, format) in formats.enumerate() {
            let common = [DType::F16, DType::Q8_0, DType::Q4_K].contains(&format.dtype);
            // The portable level has one code for all formats. Of the other levels, each format has
            // every second one, and all with `RUVLLM_LONG`.
            let is_chosen = long() || (i + level).is_multiple_of(2);
            if common || is_chosen && !(few() || arch.name() == "scalar") {
                check(Shape::Dense, format.dtype, arch, KvType::F16);
            }
        }
        if !few() {
            check(Shape::Dense, DType::Q4_K, arch, KvType::F32);
        }
    }
}

#[test]
fn windowed() {
    for arch in levels() {
        for dtype in [DType::Q4_K, DType::Q8_0]
            .into_iter()
            .take(if few() { 1 } else { 2 })
        {
            check(Shape::Windowed, dtype, arch, KvType::F16);
        }
    }
}

#[test]
fn mixture() {
    for arch in levels() {
        for dtype in [DType::Q4_K, DType::Q5_0, DType::BF16]
            .into_iter()
            .take(if few() { 1 } else { 3 })
        {
            check(Shape::Mixture, dtype, arch, KvType::F16);
        }
    }
}

#[test]
fn other_mechanisms() {
    for arch in levels() {
        for shape in [
            Shape::Sinks,
            Shape::EarlyRouter,
            Shape::Gated,
            Shape::Alibi,
            Shape::Latent,
            Shape::Oss,
            Shape::SharedKeys,
            Shape::Streams,
        ] {
            check(shape, DType::Q8_0, arch, KvType::F16);
        }
    }
}

/// Tiny models of architectures with mechanisms of which there is no [`Shape`].
#[test]
fn architectures() {
    const ARCHITECTURES: [&str; 15] = [
        "bailingmoe3",
        "deepseek32",
        "deepseek4",
        "dots3note",
        "glm-dsa",
        "glm5-next",
        "graniteswitch",
        "hy_v4",
        "kimi-k3",
        "laguna",
        "minimax-m3",
        "muse-glimmer",
        "qwen4exp",
        "step35",
        "talkie",
    ];
    for arch in ARCHITECTURES {
        let of_arch = |shapes: &&Shapes| shapes.arch == arch;
        let shapes = models().iter().find(of_arch).expect("a tiny model");
        let model = crate::run::open(shapes.parts().gguf()).unwrap();
        check_model(&model, KvType::F16, 7, arch);
        if ["deepseek32", "deepseek4"].contains(&arch) {
            check_model(&model, KvType::Q8, 7, arch);
        }
    }
}

#[test]
fn recurrent_mixers() {
    for arch in levels() {
        for shape in Shape::RECURRENT {
            check(shape, DType::Q8_0, arch, KvType::F16);
        }
    }
}
