//! Mixtures of experts that belong to no other file.

use super::dense::{ERNIE, hunyuan_rope, phi3_factors, phi3_rope};
use super::{
    EXPERT_KEYS, Family, Kind, PLAIN, Put, Run, SHARED_EXPERTS, Transpose, WINDOW, halves,
    no_scaling, normalised, partial_rope, rope_dimensions, window_pattern,
};
use crate::convert::config::Config;
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};

/// Mixtures as Mixtral's.
const BLOCK_SPARSE: &[(&str, &str)] = &[
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("block_sparse_moe.experts.*.w1", "ffn_gate_exps"),
    ("block_sparse_moe.experts.*.w2", "ffn_down_exps"),
    ("block_sparse_moe.experts.*.w3", "ffn_up_exps"),
];

pub(super) const FAMILIES: &[Family] = &[
    Family {
        hf: &["OlmoeForCausalLM"],
        arch: "olmoe",
        defaults: r#"{"rms_norm_eps": 1e-5}"#,
        only: r#"{"hidden_act": ["silu", "swish"], "clip_qkv": [], "sliding_window": []}"#,
        more: |config, key| normalised(config, key, false),
        ..PLAIN
    },
    Family {
        hf: &["GptOssForCausalLM"],
        arch: "gpt-oss",
        defaults: r#"{"sliding_window": 128}"#,
        only: r#"{"swiglu_alpha": [1.702], "swiglu_limit": [7]}"#,
        names: &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("self_attn.sinks", "attn_sinks.weight"),
            ("mlp.router", "ffn_gate_inp"),
            (
                "mlp.experts.gate_up_proj_bias",
                "ffn_gate_exps.bias + ffn_up_exps.bias",
            ),
            ("mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
        ],
        keys: &[
            WINDOW,
            (
                &["intermediate_size"],
                "expert_feed_forward_length",
                Kind::Count,
            ),
        ],
        // Gate and up take turns; matrices that are not quantised are input by output.
        cut: |config, n_rows| {
            halves(config, n_rows)?;
            Ok([0, 1]
                .map(|first| {
                    vec![Run {
                        first,
                        n: n_rows / 2,
                        step: 2,
                    }]
                })
                .into())
        },
        transpose: |part| part.ends_with("_exps").then_some(Transpose::BeforeCut),
        more: |config, key| window_pattern(config, key, 2),
        ..PLAIN
    },
    Family {
        hf: &["Ernie4_5_MoeForCausalLM"],
        arch: "ernie4_5-moe",
        names: &[
            SHARED_EXPERTS[0],
            SHARED_EXPERTS[1],
            SHARED_EXPERTS[2],
            (
                "mlp.moe_statics.e_score_correction_bias",
                "exp_probs_b.bias",
            ),
        ],
        keys: &[
            (&["moe_num_experts"], "expert_count", Kind::Count),
            (&["moe_k"], "expert_used_count", Kind::Count),
            (
                &["moe_layer_interval"],
                "interleave_moe_layer_step",
                Kind::Count,
            ),
            (
                &["moe_layer_start_index"],
                "leading_dense_block_count",
                Kind::Count,
            ),
            (
                &["moe_intermediate_size"],
                "expert_feed_forward_length",
                Kind::Count,
            ),
            (
                &["moe_num_shared_experts"],
                "expert_shared_count",
                Kind::Count,
            ),
        ],
        // Its blocks for multi-token prediction.
        skips: &[
            "mtp_block.",
            "mtp_emb_norm.",
            "mtp_hidden_norm.",
            "mtp_linear_proj.",
        ],
        more: |config, key| {
            if let Some(n) = config
                .opt_u32(&["moe_num_shared_experts"])?
                .filter(|n| *n > 0)
            {
                shared_width(config, key, n)?;
            }
            Ok(())
        },
        ..ERNIE
    },
    Family {
        hf: &["Dots1ForCausalLM"],
        arch: "dots1",
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-6}"#,
        names: &SHARED_EXPERTS,
        keys: &[
            EXPERT_KEYS[0],
            (&["n_shared_experts"], "expert_shared_count", Kind::Count),
            (
                &["first_k_dense_replace"],
                "leading_dense_block_count",
                Kind::Count,
            ),
            (
                &["routed_scaling_factor"],
                "expert_weights_scale",
                Kind::Number,
            ),
            (&["norm_topk_prob"], "expert_weights_norm", Kind::Flag),
        ],
        ..PLAIN
    },
    Family {
        hf: &["MiniMaxM2ForCausalLM"],
        arch: "minimax-m2",
        defaults: r#"{"rope_theta": 5000000.0, "rms_norm_eps": 1e-6, "head_dim": 128}"#,
        names: &[
            ("block_sparse_moe.gate", "ffn_gate_inp"),
            ("block_sparse_moe.experts.*.w1", "ffn_gate_exps"),
            ("block_sparse_moe.experts.*.w2", "ffn_down_exps"),
            ("block_sparse_moe.experts.*.w3", "ffn_up_exps"),
            (
                "block_sparse_moe.e_score_correction_bias",
                "exp_probs_b.bias",
            ),
        ],
        keys: &[
            (
                &["intermediate_size"],
                "expert_feed_forward_length",
                Kind::Count,
            ),
            (&["rotary_dim"], "rope.dimension_count", Kind::Count),
        ],
        ..PLAIN
    },
    Family {
        hf: &["AfmoeForCausalLM"],
        arch: "afmoe",
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "num_dense_layers": 1, "mup_enabled": false}"#,
        only: r#"{"hidden_act": ["silu", "swish"], "mup_enabled": [true], "global_attn_every_n_layers": [4], "n_group": [1]}"#,
        names: &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("pre_mlp_layernorm", "ffn_norm"),
            ("post_mlp_layernorm", "post_ffw_norm"),
            ("self_attn.gate_proj", "attn_gate"),
            ("mlp.router.gate", "ffn_gate_inp"),
            ("mlp.expert_bias", "exp_probs_b.bias"),
            SHARED_EXPERTS[0],
            SHARED_EXPERTS[1],
            SHARED_EXPERTS[2],
        ],
        keys: &[
            (&["vocab_size"], "vocab_size", Kind::Count),
            (&["num_shared_experts"], "expert_shared_count", Kind::Count),
            EXPERT_KEYS[0],
            (
                &["num_dense_layers"],
                "leading_dense_block_count",
                Kind::Count,
            ),
            (&["route_norm"], "expert_weights_norm", Kind::Flag),
            (&["route_scale"], "expert_weights_scale", Kind::Number),
            WINDOW,
        ],
        head_dim: true,
        more: rope_dimensions,
        ..PLAIN
    },
    Family {
        hf: &["ExaoneMoeForCausalLM"],
        arch: "exaone-moe",
        defaults: r#"{"rope_theta": 1000000.0, "rms_norm_eps": 1e-5}"#,
        names: &[
            SHARED_EXPERTS[0],
            SHARED_EXPERTS[1],
            SHARED_EXPERTS[2],
            ("mlp.e_score_correction_bias", "exp_probs_b.bias"),
        ],
        keys: &[
            (&["vocab_size"], "vocab_size", Kind::Count),
            WINDOW,
            (
                &["layer_types"],
                "attention.sliding_window_pattern",
                Kind::Sliding,
            ),
            EXPERT_KEYS[0],
            (&["num_shared_experts"], "expert_shared_count", Kind::Count),
            (
                &["routed_scaling_factor"],
                "expert_weights_scale",
                Kind::Number,
            ),
            (&["norm_topk_prob"], "expert_weights_norm", Kind::Flag),
            (
                &["first_k_dense_replace"],
                "leading_dense_block_count",
                Kind::Count,
            ),
        ],
        more: |config, key| {
            key("nextn_predict_layers", 0u32.into());
            shared_width(config, key, config.u32("num_shared_experts")?)?;
            no_scaling(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["HYV3ForCausalLM"],
        arch: "hy_v3",
        defaults: r#"{"rms_norm_eps": 1e-5, "num_shared_experts": 1, "route_norm": true, "router_scaling_factor": 1.0}"#,
        only: r#"{"hidden_act": ["silu", "swish"], "first_k_dense_replace": [1]}"#,
        names: &[
            ("mlp.router.gate", "ffn_gate_inp"),
            ("mlp.expert_bias", "exp_probs_b"),
            ("mlp.shared_mlp.gate_proj", "ffn_gate_shexp"),
            ("mlp.shared_mlp.up_proj", "ffn_up_shexp"),
            ("mlp.shared_mlp.down_proj", "ffn_down_shexp"),
        ],
        keys: &[
            EXPERT_KEYS[0],
            (&["route_norm"], "expert_weights_norm", Kind::Flag),
            (
                &["router_scaling_factor"],
                "expert_weights_scale",
                Kind::Number,
            ),
        ],
        more: |config, key| {
            shared_width(config, key, config.u32("num_shared_experts")?)?;
            key("expert_gating_func", 2u32.into());
            Ok(())
        },
        ..PLAIN
    },
    Family {
        hf: &["PhiMoEForCausalLM", "PhimoeForCausalLM"],
        arch: "phimoe",
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "sliding_window": 0}"#,
        names: BLOCK_SPARSE,
        keys: &[WINDOW],
        no_keys: &[
            "rope.scaling.type",
            "attention.key_length",
            "attention.value_length",
        ],
        more: phi3_rope,
        extra: phi3_factors,
        ..PLAIN
    },
    Family {
        hf: &["HunYuanMoEV1ForCausalLM"],
        arch: "hunyuan-moe",
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-5}"#,
        only: r#"{"hidden_act": ["silu"], "use_cla": [false]}"#,
        names: &[
            ("self_attn.query_layernorm", "attn_q_norm"),
            ("self_attn.key_layernorm", "attn_k_norm"),
            ("mlp.gate.wg", "ffn_gate_inp"),
            ("mlp.shared_mlp.gate_proj", "ffn_gate_shexp"),
            ("mlp.shared_mlp.up_proj", "ffn_up_shexp"),
            ("mlp.shared_mlp.down_proj", "ffn_down_shexp"),
        ],
        keys: &[(
            &["intermediate_size"],
            "expert_shared_feed_forward_length",
            Kind::Count,
        )],
        more: |config, key| {
            // A number, or a list of as many equal ones as there are layers.
            let equal = |name: &str, default: u32| match config.get(&[name]) {
                Some((_, value)) if value.is_array() => {
                    let counts = config.opt_counts(name)?.unwrap_or_default();
                    let first = counts
                        .first()
                        .filter(|first| counts.iter().all(|n| n == *first));
                    first
                        .map(|n| *n as u32)
                        .ok_or_else(|| config.refuse(format_args!("{name} differs between layers")))
                }
                _ => Ok(config.opt_u32(&[name])?.unwrap_or(default)),
            };
            let n_ff = equal("moe_intermediate_size", config.u32("intermediate_size")?)?;
            key("expert_feed_forward_length", n_ff.into());
            key("expert_used_count", equal("moe_topk", 1)?.into());
            key("expert_shared_count", equal("num_shared_expert", 1)?.into());
            hunyuan_rope(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["Cohere2MoeForCausalLM"],
        arch: "cohere2moe",
        defaults: r#"{"rope_theta": 10000.0, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "norm_topk_prob": false}"#,
        only: r#"{"hidden_act": ["silu"], "num_shared_experts": [0]}"#,
        keys: &[
            (&["vocab_size"], "vocab_size", Kind::Count),
            (&["logit_scale"], "logit_scale", Kind::Number),
            WINDOW,
            (
                &["layer_types"],
                "attention.sliding_window_pattern",
                Kind::Sliding,
            ),
            (
                &["intermediate_size"],
                "expert_feed_forward_length",
                Kind::Count,
            ),
            (&["norm_topk_prob"], "expert_weights_norm", Kind::Flag),
        ],
        more: |config, key| {
            let dense = match config.opt_strs("mlp_layer_types")? {
                Some(kinds) => kinds.iter().take_while(|kind| **kind == "dense").count() as u32,
                None => config.opt_u32(&["first_k_dense_replace"])?.unwrap_or(0),
            };
            key("leading_dense_block_count", dense.into());
            rope_dimensions(config, key)?;
            no_scaling(config, key)
        },
        ..PLAIN
    },
    // Ling and Ring 2.
    Family {
        hf: &["BailingMoeV2ForCausalLM"],
        arch: "bailingmoe2",
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "partial_rotary_factor": 0.5}"#,
        names: &[
            ("word_embeddings", "token_embd"),
            ("attention.query_key_value", "attn_qkv"),
            ("attention.dense", "attn_output"),
            ("attention.query_layernorm", "attn_q_norm"),
            ("attention.key_layernorm", "attn_k_norm"),
            ("mlp.gate.expert_bias", "exp_probs_b.bias"),
            SHARED_EXPERTS[0],
            SHARED_EXPERTS[1],
            SHARED_EXPERTS[2],
        ],
        keys: &[
            (
                &["first_k_dense_replace"],
                "leading_dense_block_count",
                Kind::Count,
            ),
            (&["vocab_size"], "vocab_size", Kind::Count),
            EXPERT_KEYS[0],
            (
                &["moe_shared_expert_intermediate_size"],
                "expert_shared_feed_forward_length",
                Kind::Count,
            ),
            (
                &["routed_scaling_factor"],
                "expert_weights_scale",
                Kind::Number,
            ),
            (&["num_shared_experts"], "expert_shared_count", Kind::Count),
            (&["norm_topk_prob"], "expert_weights_norm", Kind::Flag),
        ],
        more: |config, key| {
            if config
                .opt_u32(&["moe_shared_expert_intermediate_size"])?
                .is_none()
            {
                shared_width(config, key, config.u32("num_shared_experts")?)?;
            }
            if config.opt_u32(&["num_nextn_predict_layers"])?.is_some() {
                key("nextn_predict_layers", 0u32.into());
            }
            partial_rope(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"],
        arch: "mimo2",
        defaults: r#"{"layernorm_epsilon": 1e-5}"#,
        only: r#"{"hidden_act": ["silu", "swish"], "topk_method": ["noaux_tc"]}"#,
        names: &[
            ("self_attn.attention_sink_bias", "attn_sinks.weight"),
            SHARED_EXPERTS[3],
        ],
        keys: &[
            WINDOW,
            (
                &["hybrid_layer_pattern"],
                "attention.sliding_window_pattern",
                Kind::Count,
            ),
            (&["v_head_dim"], "attention.value_length", Kind::Count),
            EXPERT_KEYS[0],
            (
                &["layernorm_epsilon"],
                "attention.layer_norm_rms_epsilon",
                Kind::Number,
            ),
            (
                &["attention_value_scale"],
                "attention.value_scale",
                Kind::Number,
            ),
        ],
        more: |config, key| {
            for part in ["head_dim", "v_head_dim", "num_attention_heads"] {
                let of_window = config.opt_u32(&[&format!("swa_{part}")])?;
                if of_window.is_some_and(|n| config.opt_u32(&[part]).ok().flatten() != Some(n)) {
                    return Err(config.refuse(format_args!("{part} and swa_{part} differ")));
                }
            }
            let windows = config.opt_counts("hybrid_layer_pattern")?;
            let windows = windows.ok_or_else(|| config.missing("hybrid_layer_pattern"))?;
            let (n, n_of_window) = (
                config.u32("num_key_value_heads")?,
                config.u32("swa_num_key_value_heads")?,
            );
            let heads = windows
                .iter()
                .map(|&window| if window == 1 { n_of_window } else { n } as i32)
                .collect();
            key("attention.head_count_kv", Value::Array(Array::I32(heads)));
            partial_rope(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["SmallThinkerForCausalLM"],
        arch: "smallthinker",
        names: &[
            ("block_sparse_moe.primary_router", "ffn_gate_inp"),
            ("block_sparse_moe.experts.*.gate", "ffn_gate_exps"),
            ("block_sparse_moe.experts.*.up", "ffn_up_exps"),
            ("block_sparse_moe.experts.*.down", "ffn_down_exps"),
        ],
        keys: &[
            (&["moe_num_primary_experts"], "expert_count", Kind::Count),
            (
                &["moe_num_active_primary_experts"],
                "expert_used_count",
                Kind::Count,
            ),
            (
                &["moe_ffn_hidden_size"],
                "expert_feed_forward_length",
                Kind::Count,
            ),
            (&["moe_ffn_hidden_size"], "feed_forward_length", Kind::Count),
        ],
        more: |config, key| {
            let softmax = config.opt_bool(&["moe_primary_router_apply_softmax"])? == Some(true);
            key("expert_gating_func", if softmax { 1u32 } else { 2 }.into());
            // The first of every four layers sees everything and is not rotated, or all do.
            let windows = config
                .opt_counts("sliding_window_layout")?
                .unwrap_or_default();
            let usual = |(i, window): (usize, &i32)| (*window == 1) == (i % 4 != 0);
            let some = windows.contains(&1);
            let same = config.opt_counts("rope_layout")?.unwrap_or_default() == windows;
            if some && !(same && windows.iter().enumerate().all(usual)) {
                return Err(config.refuse(
                    "sliding_window_layout or rope_layout is not all but every fourth layer",
                ));
            }
            if some {
                key(
                    "attention.sliding_window",
                    config.u32("sliding_window_size")?.into(),
                );
            }
            Ok(())
        },
        ..PLAIN
    },
    Family {
        hf: &["DbrxForCausalLM"],
        arch: "dbrx",
        only: r#"{"ffn_config.ffn_act_fn": [{"name": "silu"}], "ffn_config.moe_normalize_expert_weights": [1]}"#,
        names: &[
            ("wte", "token_embd"),
            ("norm_f", "output_norm"),
            ("norm_attn_norm.attn.Wqkv", "attn_qkv"),
            ("norm_attn_norm.attn.out_proj", "attn_output"),
            ("norm_attn_norm.norm_1", "attn_norm"),
            ("norm_attn_norm.norm_2", "attn_output_norm"),
            ("ffn.router.layer", "ffn_gate_inp"),
            ("ffn.experts.mlp.w1", "ffn_gate_exps.weight"),
            ("ffn.experts.mlp.v1", "ffn_up_exps.weight"),
            ("ffn.experts.mlp.w2", "ffn_down_exps.weight"),
        ],
        keys: &[
            (&["max_seq_len"], "context_length", Kind::Count),
            (
                &["ffn_config.ffn_hidden_size"],
                "feed_forward_length",
                Kind::Count,
            ),
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
            (&["ffn_config.moe_num_experts"], "expert_count", Kind::Count),
            (&["ffn_config.moe_top_k"], "expert_used_count", Kind::Count),
        ],
        reshape: |config, part, shape| {
            if let (true, [rows, width]) = (part.ends_with("_exps"), &shape[..]) {
                let n_expert = config
                    .opt_u32(&["ffn_config.moe_num_experts"])?
                    .unwrap_or(1)
                    .max(1) as usize;
                *shape = vec![n_expert, rows / n_expert, *width];
            }
            Ok(())
        },
        transpose: |part| (part == "ffn_down_exps").then_some(Transpose::BeforeCut),
        more: |config, key| {
            key("attention.layer_norm_epsilon", 1e-5f32.into());
            key(
                "rope.freq_base",
                config
                    .opt_f32(&["attn_config.rope_theta"])?
                    .unwrap_or(10000.0)
                    .into(),
            );
            Ok(())
        },
        ..PLAIN
    },
];

/// Width of the experts that every token uses, `n` in one.
fn shared_width(config: &Config, key: Put<'_>, n: u32) -> Result<(), Failure> {
    let n_ff = config.u32("moe_intermediate_size")?.checked_mul(n);
    key(
        "expert_shared_feed_forward_length",
        n_ff.ok_or_else(|| config.refuse("moe_intermediate_size is too large"))?
            .into(),
    );
    Ok(())
}
