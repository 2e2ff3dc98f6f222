//! Llama 1 to 4, Mistral, and models of their making.

use super::{
    Family, Key, Kind, PLAIN, Parts, Put, Run, Spaces, Transpose, WINDOW, rope_dimensions,
};
use crate::convert::config::Config;
use crate::io::Failure;

pub(super) const LLAMA: Family = Family {
    defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-6}"#,
    keys: &[(&["vocab_size"], "vocab_size", Kind::Count)],
    pairs: true,
    spaces: Spaces::Setting,
    more: rope_dimensions,
    ..PLAIN
};

const WITH_WINDOW: &[Key] = &[LLAMA.keys[0], WINDOW];

pub(super) const FAMILIES: &[Family] = &[
    Family {
        hf: &["LlamaForCausalLM"],
        arch: "llama",
        head_dim: true,
        ..LLAMA
    },
    Family {
        hf: &["MistralForCausalLM"],
        arch: "llama",
        head_dim: true,
        keys: WITH_WINDOW,
        ..LLAMA
    },
    Family {
        hf: &["MixtralForCausalLM"],
        arch: "llama",
        names: &[
            ("block_sparse_moe.gate", "ffn_gate_inp"),
            ("block_sparse_moe.experts.*.w1", "ffn_gate_exps"),
            ("block_sparse_moe.experts.*.w2", "ffn_down_exps"),
            ("block_sparse_moe.experts.*.w3", "ffn_up_exps"),
        ],
        keys: WITH_WINDOW,
        ..LLAMA
    },
    Family {
        hf: &["SmolLM3ForCausalLM"],
        arch: "smollm3",
        only: r#"{"hidden_act": ["silu", "swish"], "use_sliding_window": [false]}"#,
        more: smollm3_keys,
        ..LLAMA
    },
    Family {
        hf: &["ArceeForCausalLM"],
        arch: "arcee",
        only: r#"{"hidden_act": ["relu2"]}"#,
        head_dim: true,
        ..LLAMA
    },
    Family {
        hf: &["Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"],
        fits: |config| {
            config
                .get(&["model_type"])
                .is_none_or(|(_, kind)| kind != "mistral4")
        },
        arch: "mistral3",
        only: r#"{"hidden_act": ["silu", "swish"], "sliding_window": []}"#,
        head_dim: true,
        more: |config, key| {
            rope_dimensions(config, key)?;
            if let Some(scale) = config.rope_f32("mscale_all_dim")? {
                key("rope.scaling.yarn_log_multiplier", scale.into());
            }
            if let Some(scale) = config.rope_f32("llama_4_scaling_beta")? {
                key("attention.temperature_scale", scale.into());
            }
            Ok(())
        },
        ..LLAMA
    },
    Family {
        hf: &["Llama4ForCausalLM", "Llama4ForConditionalGeneration"],
        arch: "llama4",
        defaults: r#"{"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "head_dim": 128, "interleave_moe_layer_step": 1}"#,
        only: r#"{"hidden_act": ["silu", "swish"], "attention_chunk_size": [8192], "floor_scale": [8192], "attn_scale": [0.1],
            "attn_temperature_tuning": [true, 4]}"#,
        names: &[
            ("feed_forward.gate_proj", "ffn_gate"),
            ("feed_forward.up_proj", "ffn_up"),
            ("feed_forward.down_proj", "ffn_down"),
            ("feed_forward.router", "ffn_gate_inp"),
            (
                "feed_forward.experts.gate_up_proj",
                "ffn_gate_exps.weight + ffn_up_exps.weight",
            ),
            ("feed_forward.experts.down_proj", "ffn_down_exps.weight"),
            ("feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"),
            ("feed_forward.shared_expert.up_proj", "ffn_up_shexp"),
            ("feed_forward.shared_expert.down_proj", "ffn_down_shexp"),
        ],
        keys: &[
            // Not the width of experts, as it is in `KEYS`.
            (
                &["intermediate_size_mlp"],
                "feed_forward_length",
                Kind::Count,
            ),
            (
                &["intermediate_size"],
                "expert_feed_forward_length",
                Kind::Count,
            ),
            (
                &["interleave_moe_layer_step"],
                "interleave_moe_layer_step",
                Kind::Count,
            ),
            (&["vocab_size"], "vocab_size", Kind::Count),
        ],
        transpose: |part| part.ends_with("_exps").then_some(Transpose::BeforeCut),
        more: |config, key| {
            smollm3_keys(config, key)?;
            // Readers know the models with norms by their number of experts.
            let (norms, many) = (
                config.opt_bool(&["use_qk_norm"])?,
                config.u32("num_local_experts")? == 128,
            );
            match norms.is_some_and(|norms| norms == many) {
                true => {
                    Err(config.refuse("use_qk_norm is not that of models with so many experts"))
                }
                false => Ok(()),
            }
        },
        ..PLAIN
    },
    Family {
        hf: &["ApertusForCausalLM"],
        arch: "apertus",
        only: r#"{"hidden_act": ["xielu"]}"#,
        names: &[
            ("attention_layernorm", "attn_norm"),
            ("feedforward_layernorm", "ffn_norm"),
        ],
        scalars: &[
            ("mlp.act_fn.alpha_n", "xielu.alpha_n"),
            ("mlp.act_fn.alpha_p", "xielu.alpha_p"),
            ("mlp.act_fn.beta", "xielu.beta"),
            ("mlp.act_fn.eps", "xielu.eps"),
        ],
        pairs: false,
        ..LLAMA
    },
    Family {
        hf: &["InternLM2ForCausalLM"],
        arch: "internlm2",
        only: r#"{"hidden_act": ["silu", "swish"], "bias": [false]}"#,
        names: &[
            ("tok_embeddings", "token_embd"),
            ("output", "output"),
            ("attention.wqkv", "attn_q + attn_k + attn_v"),
            ("attention.wo", "attn_output"),
            ("attention_norm", "attn_norm"),
            ("ffn_norm", "ffn_norm"),
            ("feed_forward.w1", "ffn_gate"),
            ("feed_forward.w2", "ffn_down"),
            ("feed_forward.w3", "ffn_up"),
        ],
        cut: internlm2_cut,
        spaces: Spaces::Trained,
        ..PLAIN
    },
    Family {
        hf: &["InternLM3ForCausalLM"],
        arch: "llama",
        only: r#"{"hidden_act": ["silu", "swish"], "bias": [false], "qkv_bias": [false]}"#,
        head_dim: true,
        ..LLAMA
    },
    Family {
        hf: &["BaichuanForCausalLM", "BaiChuanForCausalLM"],
        arch: "baichuan",
        names: &[("self_attn.W_pack", "attn_q + attn_k + attn_v")],
        cut: |config, n_rows| {
            let n_head = config.u32("num_attention_heads")?.max(1) as usize;
            let (width, head) = (n_rows / 3, n_rows / 3 / n_head);
            let heads = |first: usize| {
                (0..n_head)
                    .flat_map(move |i| pairs(first + i * head, head))
                    .collect()
            };
            Ok(vec![
                heads(0),
                heads(width),
                vec![Run {
                    first: 2 * width,
                    n: width,
                    step: 1,
                }],
            ])
        },
        more: |config, key| {
            key("tensor_data_layout", "Meta AI original pth".into());
            rope_dimensions(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["MiniCPMForCausalLM"],
        arch: "minicpm",
        defaults: r#"{"rms_norm_eps": 1e-6}"#,
        keys: &[(&["scale_emb"], "embedding_scale", Kind::Number)],
        pairs: true,
        more: |config, key| {
            let depth = f64::from(config.u32("num_hidden_layers")?).sqrt();
            key(
                "residual_scale",
                ((config.f64("scale_depth")? / depth) as f32).into(),
            );
            let width = f64::from(config.u32("hidden_size")?);
            key(
                "logit_scale",
                ((width / config.f64("dim_model_base")?) as f32).into(),
            );
            Ok(())
        },
        ..PLAIN
    },
];

/// SmolLM 3 rotates all but every fourth layer; files cannot say otherwise.
fn smollm3_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let rotated = config
        .get(&["no_rope_layers"])
        .and_then(|(_, list)| list.as_array());
    if rotated.is_none()
        && config
            .opt_u32(&["no_rope_layer_interval"])?
            .is_some_and(|n| n != 4)
    {
        return Err(config.refuse("no_rope_layer_interval is not 4"));
    }
    let other = |(i, rotated): (usize, &serde_json::Value)| *rotated != u32::from(i % 4 != 3);
    if rotated.is_some_and(|list| list.iter().enumerate().any(other)) {
        return Err(config.refuse("no_rope_layers is not every fourth layer"));
    }
    rope_dimensions(config, key)
}

/// The rows of a head as GGUF files have them: row `i` of its first half, then row `i` of the
/// second.
fn pairs(first: usize, n: usize) -> impl Iterator<Item = Run> {
    (0..n / 2).map(move |i| Run {
        first: first + i,
        n: 2,
        step: n / 2,
    })
}

/// Each key head of the checkpoint has the queries that share it, its keys and its values.
fn internlm2_cut(config: &Config, n_rows: usize) -> Result<Parts, Failure> {
    let (n_head, n_head_kv) = (
        config.u32("num_attention_heads")?,
        config.u32("num_key_value_heads")?,
    );
    let n_shared = n_head.checked_div(n_head_kv).unwrap_or(0) as usize;
    let n_head_kv = n_head_kv as usize;
    let group = n_shared + 2;
    if n_head_kv == 0 || n_shared == 0 || !n_rows.is_multiple_of(2 * n_head_kv * group) {
        return Err(config.refuse(format_args!(
            "wqkv has {n_rows} rows, and {n_head_kv} groups of {group} heads"
        )));
    }
    let n = n_rows / n_head_kv / group;
    let heads = |from: usize, to: usize| {
        (0..n_head_kv).flat_map(move |i| (from..to).map(move |j| (i * group + j) * n))
    };
    let queries = heads(0, n_shared).flat_map(|first| pairs(first, n));
    let keys = heads(n_shared, n_shared + 1).flat_map(|first| pairs(first, n));
    let values = heads(n_shared + 1, group).map(|first| Run { first, n, step: 1 });
    Ok(vec![queries.collect(), keys.collect(), values.collect()])
}
