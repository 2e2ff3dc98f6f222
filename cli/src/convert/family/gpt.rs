//! GPT-2 and its successors before Llama: learned positions or slopes by distance, and queries,
//! keys and values in one matrix.

use super::{Family, Kind, PLAIN, Put, Reorder, Run, Transpose, partial_rope};
use crate::convert::config::Config;
use crate::io::Failure;

/// Of BLOOM, GPT-NeoX and Falcon.
const DENSE: [(&str, &str); 2] = [
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
];

const GPT2_NAMES: &[(&str, &str)] = &[
    ("wte", "token_embd"),
    ("wpe", "position_embd"),
    ("ln_f", "output_norm"),
    ("ln_1", "attn_norm"),
    ("ln_2", "ffn_norm"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
];

pub(super) const FAMILIES: &[Family] = &[
    Family {
        hf: &["GPT2LMHeadModel"],
        arch: "gpt2",
        only: r#"{"activation_function": ["gelu_new", "gelu_pytorch_tanh"], "scale_attn_weights": [true],
            "scale_attn_by_inverse_layer_idx": [false]}"#,
        names: GPT2_NAMES,
        skips: &["attn.bias", "attn.masked_bias"],
        // Its matrices are input by output.
        transpose: |part| match part {
            "attn_qkv" | "attn_output" | "ffn_up" | "ffn_down" => Some(Transpose::BeforeCut),
            _ => None,
        },
        more: four_times,
        ..PLAIN
    },
    Family {
        hf: &["GPTBigCodeForCausalLM"],
        arch: "starcoder",
        only: r#"{"activation_function": ["gelu_pytorch_tanh", "gelu_new"], "multi_query": [true], "scale_attn_weights": [true]}"#,
        names: GPT2_NAMES,
        skips: &["attn.bias", "attn.masked_bias"],
        more: |config, key| {
            key("attention.head_count_kv", 1u32.into());
            four_times(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["BloomForCausalLM", "BloomModel"],
        arch: "bloom",
        only: r#"{"apply_residual_connection_post_layernorm": [false]}"#,
        names: &[
            ("word_embeddings", "token_embd"),
            ("word_embeddings_layernorm", "token_embd_norm"),
            ("ln_f", "output_norm"),
            ("self_attention.query_key_value", "attn_qkv"),
            ("self_attention.dense", "attn_output"),
            DENSE[0],
            DENSE[1],
        ],
        reorder: by_part,
        more: |config, key| {
            let n = config.opt_u32(&["seq_length", "hidden_size"])?;
            key(
                "context_length",
                n.ok_or_else(|| config.missing("hidden_size"))?.into(),
            );
            key(
                "attention.head_count_kv",
                config.u32("num_attention_heads")?.into(),
            );
            four_times(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["GPTNeoXForCausalLM"],
        arch: "gptneox",
        defaults: r#"{"use_parallel_residual": true, "layer_norm_eps": 1e-5}"#,
        only: r#"{"hidden_act": ["gelu"]}"#,
        names: &[
            ("embed_in", "token_embd"),
            ("embed_out", "output"),
            ("final_layer_norm", "output_norm"),
            ("attention.query_key_value", "attn_qkv"),
            ("attention.dense", "attn_output"),
            DENSE[0],
            DENSE[1],
        ],
        keys: &[(
            &["use_parallel_residual"],
            "use_parallel_residual",
            Kind::Flag,
        )],
        no_keys: &["rope.freq_base", "attention.head_count_kv"],
        reorder: by_part,
        more: partial_rope,
        ..PLAIN
    },
    Family {
        hf: &["MPTForCausalLM", "MptForCausalLM"],
        arch: "mpt",
        only: r#"{"expansion_ratio": [4], "attn_config.qk_ln": [false], "attn_config.softmax_scale": []}"#,
        names: &[
            ("wte", "token_embd"),
            ("norm_f", "output_norm"),
            ("norm_1", "attn_norm"),
            ("norm_2", "ffn_norm"),
            ("attn.Wqkv", "attn_qkv"),
            ("attn.out_proj", "attn_output"),
            ("ffn.up_proj", "ffn_up"),
            ("ffn.down_proj", "ffn_down"),
        ],
        keys: &[
            (&["max_seq_len"], "context_length", Kind::Count),
            (
                &["attn_config.kv_n_heads"],
                "attention.head_count_kv",
                Kind::Count,
            ),
            (
                &["attn_config.clip_qkv"],
                "attention.clamp_kqv",
                Kind::Number,
            ),
        ],
        more: |config, key| {
            key("attention.layer_norm_epsilon", 1e-5f32.into());
            let bias = match config.opt_bool(&["attn_config.alibi"])? {
                Some(true) => config
                    .opt_f32(&["attn_config.alibi_bias_max"])?
                    .unwrap_or(8.0),
                _ => 0.0,
            };
            key("attention.max_alibi_bias", bias.into());
            four_times(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["FalconForCausalLM", "RWForCausalLM"],
        arch: "falcon",
        only: r#"{"alibi": [false], "bias": [false], "parallel_attn": [true], "activation": ["gelu"]}"#,
        names: &[
            ("word_embeddings", "token_embd"),
            ("ln_f", "output_norm"),
            ("ln_attn", "attn_norm_2"),
            ("ln_mlp", "attn_norm"),
            ("self_attention.query_key_value", "attn_qkv"),
            ("self_attention.dense", "attn_output"),
            DENSE[0],
            DENSE[1],
        ],
        no_keys: &["rope.freq_base"],
        reorder: |config, part| {
            let (n_head, n_head_kv) = (
                config.u32("num_attention_heads")? as usize,
                falcon_heads(config)? as usize,
            );
            Ok((part == "attn_qkv").then(|| {
                let n = config.head_dim().unwrap_or(0) as usize;
                let n_shared = n_head.checked_div(n_head_kv).unwrap_or(0);
                // Each key head has its queries, its keys and its values.
                let of = move |from: usize, heads: usize| {
                    (0..n_head_kv).map(move |i| Run {
                        first: (i * (n_shared + 2) + from) * n,
                        n: heads * n,
                        step: 1,
                    })
                };
                Reorder::Rows(
                    of(0, n_shared)
                        .chain(of(n_shared, 1))
                        .chain(of(n_shared + 1, 1))
                        .collect(),
                )
            }))
        },
        more: |config, key| {
            key("context_length", 2048u32.into());
            key("tensor_data_layout", "jploski".into());
            key("attention.head_count_kv", falcon_heads(config)?.into());
            four_times(config, key)
        },
        ..PLAIN
    },
];

/// Feed-forward layers of four times the width, unless the configuration says otherwise.
fn four_times(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let n = match config.opt_u32(&["n_inner", "ffn_hidden_size"])? {
        None => config.u32("hidden_size")?.checked_mul(4),
        n => n,
    };
    key(
        "feed_forward_length",
        n.ok_or_else(|| config.refuse("hidden_size is too large"))?
            .into(),
    );
    Ok(())
}

/// Each head of the checkpoint has its queries, keys and values; GGUF files have all queries first.
fn by_part(config: &Config, part: &str) -> Result<Option<Reorder>, Failure> {
    let (n_head, n) = (
        config.u32("num_attention_heads")? as usize,
        config.head_dim()? as usize,
    );
    let heads = (0..3).flat_map(|part| {
        (0..n_head).map(move |head| Run {
            first: (3 * head + part) * n,
            n,
            step: 1,
        })
    });
    Ok((part == "attn_qkv").then(|| Reorder::Rows(heads.collect())))
}

/// Falcon's heads of keys.
fn falcon_heads(config: &Config) -> Result<u32, Failure> {
    let shared = config.opt_bool(&["multi_query"])? == Some(true);
    if shared && config.opt_bool(&["new_decoder_architecture"])? != Some(true) {
        return Ok(1);
    }
    Ok(config
        .opt_u32(&["num_kv_heads", "n_head_kv", "num_attention_heads"])?
        .unwrap_or(1))
}
