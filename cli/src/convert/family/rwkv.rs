//! RWKV 6 as BlinkDL's code for Hugging Face calls it, and RWKV 7 as flash-linear-attention does.

use super::{Factor, Family, Kind, PLAIN, Put, Transpose};
use crate::convert::config::Config;
use crate::io::Failure;

pub(super) const FAMILIES: &[Family] = &[
    Family {
        hf: &["Rwkv6ForCausalLM"],
        arch: "rwkv6",
        defaults: r#"{"head_size": 64, "layer_norm_epsilon": 1e-5, "rescale_every": 6}"#,
        names: &[
            ("embeddings", "token_embd"),
            ("pre_ln", "/token_embd_norm"),
            ("ln_out", "output_norm"),
            ("head", "output"),
            ("ln1", "attn_norm"),
            ("ln2", "attn_norm_2"),
            ("attention.time_maa_x", "time_mix_lerp_x.weight"),
            ("attention.time_maa_w", "time_mix_lerp_fused.weight[0]"),
            ("attention.time_maa_k", "time_mix_lerp_fused.weight[1]"),
            ("attention.time_maa_v", "time_mix_lerp_fused.weight[2]"),
            ("attention.time_maa_r", "time_mix_lerp_fused.weight[3]"),
            ("attention.time_maa_g", "time_mix_lerp_fused.weight[4]"),
            ("attention.time_maa_w1", "time_mix_w1.weight"),
            ("attention.time_maa_w2", "time_mix_w2.weight"),
            ("attention.time_decay", "time_mix_decay.weight"),
            ("attention.time_decay_w1", "time_mix_decay_w1.weight"),
            ("attention.time_decay_w2", "time_mix_decay_w2.weight"),
            ("attention.time_faaaa", "time_mix_first.weight"),
            ("attention.receptance", "time_mix_receptance"),
            ("attention.key", "time_mix_key"),
            ("attention.value", "time_mix_value"),
            ("attention.gate", "time_mix_gate"),
            ("attention.output", "time_mix_output"),
            ("attention.ln_x", "time_mix_ln"),
            ("feed_forward.time_maa_k", "channel_mix_lerp_k.weight"),
            ("feed_forward.time_maa_r", "channel_mix_lerp_r.weight"),
            ("feed_forward.key", "channel_mix_key"),
            ("feed_forward.value", "channel_mix_value"),
            ("feed_forward.receptance", "channel_mix_receptance"),
        ],
        keys: &[
            (&["head_size"], "wkv.head_size", Kind::Count),
            (&["rescale_every"], "rescale_every_n_layers", Kind::Count),
        ],
        no_keys: &[
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
        ],
        factors: six_factors,
        reshape: shapes,
        transpose: |part| {
            let parts = [
                "time_mix_w1",
                "time_mix_w2",
                "time_mix_decay_w1",
                "time_mix_decay_w2",
            ];
            parts.contains(&part).then_some(Transpose::BeforeCut)
        },
        more: six_keys,
        ..PLAIN
    },
    Family {
        hf: &["RWKV7ForCausalLM"],
        arch: "rwkv7",
        defaults: r#"{"head_dim": 64, "norm_eps": 1e-5}"#,
        only: r#"{"hidden_act": ["sqrelu"], "norm_first": [true], "norm_bias": [true], "tie_word_embeddings": [false]}"#,
        names: &[
            ("embeddings", "token_embd"),
            ("pre_norm", "/token_embd_norm"),
            ("attn_norm", "attn_norm"),
            ("ffn_norm", "attn_norm_2"),
            ("attn.x_x", "time_mix_lerp_fused.weight"),
            ("attn.x_r", "time_mix_lerp_fused.weight[0]"),
            ("attn.x_w", "time_mix_lerp_fused.weight[1]"),
            ("attn.x_k", "time_mix_lerp_fused.weight[2]"),
            ("attn.x_v", "time_mix_lerp_fused.weight[3]"),
            ("attn.x_a", "time_mix_lerp_fused.weight[4]"),
            ("attn.x_g", "time_mix_lerp_fused.weight[5]"),
            ("attn.w_lora.lora.0", "time_mix_w1"),
            ("attn.w_lora.lora.2.weight", "time_mix_w2"),
            ("attn.w_lora.lora.2.bias", "time_mix_w0.weight!"),
            ("attn.a_lora.lora.0", "time_mix_a1"),
            ("attn.a_lora.lora.2.weight", "time_mix_a2"),
            ("attn.a_lora.lora.2.bias", "time_mix_a0.weight!"),
            ("attn.v_lora.lora.0", "time_mix_v1"),
            ("attn.v_lora.lora.2.weight", "time_mix_v2"),
            ("attn.v_lora.lora.2.bias", "time_mix_v0.weight!"),
            ("attn.g_lora.lora.0", "time_mix_g1"),
            ("attn.g_lora.lora.2", "time_mix_g2"),
            ("attn.k_k", "time_mix_k_k.weight"),
            ("attn.k_a", "time_mix_k_a.weight"),
            ("attn.r_k", "time_mix_r_k.weight"),
            ("attn.r_proj", "time_mix_receptance"),
            ("attn.k_proj", "time_mix_key"),
            ("attn.v_proj", "time_mix_value"),
            ("attn.o_proj", "time_mix_output"),
            ("attn.g_norm", "time_mix_ln"),
            ("ffn.x_k", "channel_mix_lerp_k.weight"),
            ("ffn.key", "channel_mix_key"),
            ("ffn.value", "channel_mix_value"),
        ],
        keys: &[
            (&["head_dim"], "wkv.head_size", Kind::Count),
            (&["norm_eps"], "attention.layer_norm_epsilon", Kind::Number),
        ],
        no_keys: &[
            "attention.layer_norm_rms_epsilon",
            "attention.key_length",
            "attention.value_length",
        ],
        skips: &["layers.0.attn.v_lora."],
        // llama.cpp wants what the first layer does not use.
        copy: |name| {
            name.strip_prefix("blk.0.time_mix_a")
                .map(|rest| format!("blk.0.time_mix_v{rest}"))
        },
        reshape: shapes,
        more: seven_keys,
        ..PLAIN
    },
];

/// What is one value per channel has other dimensions of 1 in the checkpoint; shares of blends lie
/// in one tensor.
fn shapes(config: &Config, part: &str, shape: &mut Vec<usize>) -> Result<(), Failure> {
    let n: usize = shape.iter().product();
    match part {
        "time_mix_lerp_fused" => {
            let width = config.u32("hidden_size")?.max(1) as usize;
            *shape = if n == width {
                vec![1, 1, n]
            } else {
                vec![n / width, 1, 1, width]
            };
        }
        "time_mix_lerp_x" | "time_mix_decay" | "channel_mix_lerp_k" | "channel_mix_lerp_r" => {
            *shape = vec![n]
        }
        "time_mix_k_k" | "time_mix_k_a" | "time_mix_r_k" => *shape = vec![n],
        _ => {}
    }
    Ok(())
}

/// Weights of outputs are halved after every so many layers, as the residual stream is.
fn six_factors(config: &Config, name: &str) -> Result<Vec<Factor>, Failure> {
    let parsed = name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'));
    let Some((layer, "time_mix_output.weight" | "channel_mix_value.weight")) = parsed else {
        return Ok(Vec::new());
    };
    let every = config.u32("rescale_every")?;
    let n = layer
        .parse::<u32>()
        .ok()
        .and_then(|layer| layer.checked_div(every))
        .unwrap_or(0);
    Ok(if n > 0 {
        vec![(0..usize::MAX, 0.5f32.powi(n.min(64) as i32))]
    } else {
        Vec::new()
    })
}

fn six_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let width = config.u32("hidden_size")?;
    common_keys(key);
    // (3.5 times the width, in steps of 32)
    let n_ff = || (u64::from(width) * 7 / 64 * 32).try_into().ok();
    let n_ff = config.opt_u32(&["intermediate_size"])?.or_else(n_ff);
    key(
        "feed_forward_length",
        n_ff.ok_or_else(|| config.refuse("hidden_size is too large"))?
            .into(),
    );
    let is_wide = width == 4096;
    key(
        "time_mix_extra_dim",
        if is_wide { 64u32 } else { 32 }.into(),
    );
    key(
        "time_decay_extra_dim",
        if is_wide { 128u32 } else { 64 }.into(),
    );
    Ok(())
}

fn seven_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let width = config.u32("hidden_size")?;
    common_keys(key);
    let n_ff = config
        .opt_u32(&["intermediate_size"])?
        .or_else(|| width.checked_mul(4));
    key(
        "feed_forward_length",
        n_ff.ok_or_else(|| config.refuse("hidden_size is too large"))?
            .into(),
    );
    // The ranks that configurations may leave out: a power of the width times a factor, in steps of
    // 32.
    let ranks = [
        ("decay_low_rank_dim", "decay", 0.5, 1.8),
        ("a_low_rank_dim", "iclr", 0.5, 1.8),
        ("v_low_rank_dim", "value_residual_mix", 0.5, 1.3),
        ("gate_low_rank_dim", "gate", 0.8, 0.6),
    ];
    for (name, to, exponent, factor) in ranks {
        let usual = || {
            (f64::from(width).powf(exponent) * factor / 32.0)
                .round_ties_even()
                .max(1.0) as u32
                * 32
        };
        let rank = config.opt_u32(&[name])?.unwrap_or_else(usual);
        key(&format!("attention.{to}_lora_rank"), rank.into());
    }
    Ok(())
}

/// What files of RWKV say about parts that it lacks.
fn common_keys(key: Put<'_>) {
    key("context_length", (1u32 << 20).into());
    key("attention.head_count", 0u32.into());
}
