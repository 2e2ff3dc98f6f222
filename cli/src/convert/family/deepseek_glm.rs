//! Latent attention: DeepSeek 2 and 3, Mistral 4, MiniCPM 3, Kimi Linear; and GLM 4, of which one
//! has it too.

use super::dense::long_factors;
use super::{
    EXPERT_KEYS, Family, Kind, PLAIN, Put, Run, SHARED_EXPERTS, Transpose, decays, partial_rope,
};
use crate::convert::config::{Config, MAX_HEAD};
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};

const GLM_SPECIAL: &[(&str, &str)] = &[
    ("bos", "[gMASK]"),
    ("eot", "<|user|>"),
    ("unknown", "<|endoftext|>"),
    ("eom", "<|observation|>"),
];

/// Latent attention: keys and values of all heads from one vector per token.
const DEEPSEEK2: Family = Family {
    defaults: r#"{"rms_norm_eps": 1e-6, "n_shared_experts": 0}"#,
    only: r#"{"hidden_act": ["silu", "swish"], "rope_interleave": [true], "moe_layer_freq": [1],
        "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"]}"#,
    names: &[
        SHARED_EXPERTS[0],
        SHARED_EXPERTS[1],
        SHARED_EXPERTS[2],
        SHARED_EXPERTS[3],
        ("self_attn.q_a_proj", "attn_q_a"),
        ("self_attn.q_a_layernorm", "attn_q_a_norm"),
        ("self_attn.q_b_proj", "attn_q_b"),
        ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
        ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
        ("self_attn.kv_b_proj", "attn_k_b + attn_v_b"),
    ],
    keys: &[
        (&["vocab_size"], "vocab_size", Kind::Count),
        (&["q_lora_rank"], "attention.q_lora_rank", Kind::Count),
        (&["kv_lora_rank"], "attention.kv_lora_rank", Kind::Count),
        (&["v_head_dim"], "attention.value_length_mla", Kind::Count),
        (&["qk_rope_head_dim"], "rope.dimension_count", Kind::Count),
        (
            &["moe_intermediate_size", "intermediate_size"],
            "expert_feed_forward_length",
            Kind::Count,
        ),
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
    ],
    reshape: |config, part, shape| {
        // One matrix per head, of the keys' rows and the values'.
        if let ("attn_k_b" | "attn_v_b", [rows, width]) = (part, &shape[..]) {
            let n_head = config.u32("num_attention_heads")?.max(1) as usize;
            *shape = vec![n_head, rows / n_head, *width];
        }
        Ok(())
    },
    cut: |config, n_rows| {
        let n = config.u32("qk_nope_head_dim")? as usize;
        let n_rest = n_rows.checked_sub(n);
        let n_rest = n_rest.ok_or_else(|| {
            config.refuse(format_args!("a head has {n_rows} rows, fewer than {n}"))
        })?;
        Ok(vec![
            vec![Run {
                first: 0,
                n,
                step: 1,
            }],
            vec![Run {
                first: n,
                n: n_rest,
                step: 1,
            }],
        ])
    },
    blocks: true,
    transpose: |part| (part == "attn_k_b").then_some(Transpose::AfterCut),
    more: deepseek2_keys,
    ..PLAIN
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        hf: &["Glm4ForCausalLM"],
        arch: "glm4",
        defaults: r#"{"partial_rotary_factor": 0.5}"#,
        names: &[
            ("post_self_attn_layernorm", "post_attention_norm"),
            ("post_mlp_layernorm", "post_ffw_norm"),
        ],
        special: &[
            ("eos", "<|endoftext|>"),
            ("eot", "<|user|>"),
            ("unknown", "<|endoftext|>"),
            ("bos", "<|endoftext|>"),
        ],
        more: partial_rope,
        ..PLAIN
    },
    Family {
        hf: &["Glm4MoeForCausalLM"],
        arch: "glm4moe",
        defaults: r#"{"partial_rotary_factor": 0.5}"#,
        names: &[
            ("post_attention_layernorm", "post_attention_norm"),
            SHARED_EXPERTS[0],
            SHARED_EXPERTS[1],
            SHARED_EXPERTS[2],
            SHARED_EXPERTS[3],
        ],
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
        special: GLM_SPECIAL,
        blocks: true,
        more: |config, key| {
            key("expert_gating_func", 2u32.into());
            partial_rope(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"],
        arch: "deepseek2",
        ..DEEPSEEK2
    },
    Family {
        hf: &["Glm4MoeLiteForCausalLM"],
        arch: "deepseek2",
        special: GLM_SPECIAL,
        ..DEEPSEEK2
    },
    Family {
        hf: &[
            "Mistral4ForCausalLM",
            "Mistral3ForConditionalGeneration",
            "Ministral3ForCausalLM",
        ],
        fits: |config| {
            config
                .get(&["model_type"])
                .is_some_and(|(_, kind)| kind == "mistral4")
        },
        arch: "mistral4",
        only: r#"{"hidden_act": ["silu", "swish"], "rope_interleave": [true]}"#,
        names: &[
            SHARED_EXPERTS[0],
            SHARED_EXPERTS[1],
            SHARED_EXPERTS[2],
            SHARED_EXPERTS[3],
            DEEPSEEK2.names[4],
            DEEPSEEK2.names[5],
            DEEPSEEK2.names[6],
            DEEPSEEK2.names[7],
            DEEPSEEK2.names[8],
            DEEPSEEK2.names[9],
            ("mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight"),
        ],
        blocks: false,
        more: |config, key| {
            if let Some(scale) = config
                .rope_f32("llama_4_scaling_beta")?
                .filter(|scale| *scale != 0.0)
            {
                key("attention.temperature_scale", scale.into());
            }
            deepseek2_keys(config, key)
        },
        ..DEEPSEEK2
    },
    Family {
        hf: &["MiniCPM3ForCausalLM"],
        arch: "minicpm3",
        defaults: r#"{"rms_norm_eps": 1e-6}"#,
        // Readers know these.
        only: r#"{"hidden_act": ["silu", "swish"], "scale_emb": [12], "scale_depth": [1.4], "dim_model_base": [256]}"#,
        names: &[
            DEEPSEEK2.names[4],
            DEEPSEEK2.names[5],
            DEEPSEEK2.names[6],
            DEEPSEEK2.names[7],
            DEEPSEEK2.names[8],
            ("self_attn.kv_b_proj", "attn_kv_b"),
        ],
        keys: &[
            DEEPSEEK2.keys[0],
            DEEPSEEK2.keys[1],
            DEEPSEEK2.keys[2],
            DEEPSEEK2.keys[4],
        ],
        no_keys: &[
            "attention.value_length",
            "rope.freq_base",
            "rope.scaling.type",
        ],
        more: |config, key| {
            let n = config
                .u32("qk_nope_head_dim")?
                .checked_add(config.u32("qk_rope_head_dim")?);
            let n = n.ok_or_else(|| config.refuse("the widths of heads are too large"))?;
            key("attention.key_length", n.into());
            Ok(())
        },
        extra: |config| long_factors(config, config.u32("qk_rope_head_dim")?),
        ..PLAIN
    },
    Family {
        hf: &["KimiLinearForCausalLM", "KimiLinearModel"],
        arch: "kimi-linear",
        defaults: r#"{"rms_norm_eps": 1e-6}"#,
        only: r#"{"hidden_act": ["silu", "swish"], "moe_renormalize": [true], "mla_use_nope": [true], "moe_layer_freq": [1]}"#,
        names: &[
            DEEPSEEK2.names[4],
            DEEPSEEK2.names[5],
            DEEPSEEK2.names[6],
            DEEPSEEK2.names[7],
            DEEPSEEK2.names[8],
            DEEPSEEK2.names[9],
            ("self_attn.A_log", "ssm_a"),
            ("self_attn.dt_bias", "ssm_dt.bias"),
            ("self_attn.b_proj", "ssm_beta"),
            ("self_attn.f_a_proj", "ssm_f_a"),
            ("self_attn.f_b_proj", "ssm_f_b"),
            ("self_attn.g_a_proj", "ssm_g_a"),
            ("self_attn.g_b_proj", "ssm_g_b"),
            ("self_attn.o_norm", "ssm_norm"),
            ("self_attn.q_conv1d", "ssm_conv1d_q"),
            ("self_attn.k_conv1d", "ssm_conv1d_k"),
            ("self_attn.v_conv1d", "ssm_conv1d_v"),
            ("block_sparse_moe.gate", "ffn_gate_inp"),
            (
                "block_sparse_moe.gate.e_score_correction_bias",
                "exp_probs_b.bias",
            ),
            ("block_sparse_moe.experts.*.w1", "ffn_gate_exps"),
            ("block_sparse_moe.experts.*.w2", "ffn_down_exps"),
            ("block_sparse_moe.experts.*.w3", "ffn_up_exps"),
            (
                "block_sparse_moe.shared_experts.gate_proj",
                "ffn_gate_shexp",
            ),
            ("block_sparse_moe.shared_experts.up_proj", "ffn_up_shexp"),
            (
                "block_sparse_moe.shared_experts.down_proj",
                "ffn_down_shexp",
            ),
        ],
        keys: &[
            DEEPSEEK2.keys[0],
            DEEPSEEK2.keys[1],
            DEEPSEEK2.keys[2],
            DEEPSEEK2.keys[3],
            DEEPSEEK2.keys[4],
            EXPERT_KEYS[0],
            (&["num_shared_experts"], "expert_shared_count", Kind::Count),
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
            (
                &["linear_attn_config.short_conv_kernel_size"],
                "ssm.conv_kernel",
                Kind::Count,
            ),
            (
                &["linear_attn_config.head_dim"],
                "kda.head_dim",
                Kind::Count,
            ),
        ],
        map: decays,
        reshape: |config, part, shape| match (part, &shape[..]) {
            ("ssm_conv1d_q" | "ssm_conv1d_k" | "ssm_conv1d_v", [channels, taps]) => {
                *shape = vec![1, *channels, 1, *taps];
                Ok(())
            }
            _ => (DEEPSEEK2.reshape)(config, part, shape),
        },
        cut: DEEPSEEK2.cut,
        transpose: DEEPSEEK2.transpose,
        more: |config, key| {
            let (latent, rope) = (config.u32("kv_lora_rank")?, config.u32("qk_rope_head_dim")?);
            let sum = |a: u32, b: u32| {
                a.checked_add(b)
                    .ok_or_else(|| config.refuse("the widths of heads are too large"))
            };
            key("attention.key_length", sum(latent, rope)?.into());
            key(
                "attention.key_length_mla",
                sum(config.u32("qk_nope_head_dim")?, rope)?.into(),
            );
            // Latent attention has one head for keys, delta rules have none. Layers count from 1.
            let full = config.opt_counts("linear_attn_config.full_attn_layers")?;
            let full = full.ok_or_else(|| config.missing("linear_attn_config.full_attn_layers"))?;
            let layers = 1..=config.u32("num_hidden_layers")?.min(MAX_HEAD) as i32;
            let heads = layers.map(|i| i32::from(full.contains(&i))).collect();
            key("attention.head_count_kv", Value::Array(Array::I32(heads)));
            Ok(())
        },
        ..PLAIN
    },
];

fn deepseek2_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    // One head reads the latent vector and the rotated part, which all heads share.
    let (latent, rope) = (config.u32("kv_lora_rank")?, config.u32("qk_rope_head_dim")?);
    let sum = |a: u32, b: u32| {
        a.checked_add(b)
            .ok_or_else(|| config.refuse("the widths of heads are too large"))
    };
    key("attention.head_count_kv", 1u32.into());
    key("attention.key_length", sum(latent, rope)?.into());
    key("attention.value_length", latent.into());
    key(
        "attention.key_length_mla",
        sum(config.u32("qk_nope_head_dim")?, rope)?.into(),
    );
    // `mlp_layer_types` counts, if it is there.
    if let Some(kinds) = config.opt_strs("mlp_layer_types")? {
        let n = kinds.iter().take_while(|kind| **kind == "dense").count();
        if kinds[n..].contains(&"dense") {
            return Err(config.refuse("mlp_layer_types has dense layers behind mixtures"));
        }
        key("leading_dense_block_count", (n as u32).into());
    } else if config.opt_u32(&["first_k_dense_replace"])?.is_none() {
        let dense = if config.get(&["n_routed_experts"]).is_some() {
            0
        } else {
            config.u32("num_hidden_layers")?
        };
        key("leading_dense_block_count", dense.into());
    }
    let method = config
        .get(&["topk_method"])
        .and_then(|(_, method)| method.as_str());
    if method == Some("greedy") && config.opt_u32(&["n_group"])?.is_some_and(|n| n > 1) {
        return Err(
            config.refuse("topk_method is greedy, and files with n_group choose experts by group")
        );
    }
    // Of DeepSeek 2, whose published code scales weights or divides them, and transformers only
    // scales.
    let is_2 = matches!(method, Some("greedy" | "group_limited_greedy"));
    if is_2 && config.opt_bool(&["norm_topk_prob"])? == Some(true) {
        return Err(config
            .refuse("norm_topk_prob is true, and the weights of these experts are not divided"));
    }
    if config.opt_bool(&["norm_topk_prob"])? == Some(true) {
        key("expert_weights_norm", true.into());
    }
    if let Some(scale) = config.rope_f32("mscale_all_dim")? {
        key(
            "rope.scaling.yarn_log_multiplier",
            (0.1 * f64::from(scale) as f32).into(),
        );
    }
    Ok(())
}
