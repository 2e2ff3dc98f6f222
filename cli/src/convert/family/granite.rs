//! IBM's Granite 3 and 4: attention, mixtures, and state spaces beside both.

use super::llama::LLAMA;
use super::recurrent::{has_recurrent, heads_by_layer, mamba2_inner, mamba2_shapes};
use super::{Family, Kind, Put, decays, has_experts, rope_dimensions};
use crate::convert::config::{Config, MAX_HEAD};
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};

const GRANITE: Family = Family {
    keys: &[
        (&["vocab_size"], "vocab_size", Kind::Count),
        (&["attention_multiplier"], "attention.scale", Kind::Number),
        (&["embedding_multiplier"], "embedding_scale", Kind::Number),
        (&["residual_multiplier"], "residual_scale", Kind::Number),
        (&["logits_scaling"], "logit_scale", Kind::Number),
        (
            &["shared_intermediate_size"],
            "expert_shared_feed_forward_length",
            Kind::Count,
        ),
    ],
    no_keys: &["attention.key_length", "attention.value_length"],
    ..LLAMA
};

/// Mixtures of Granite.
const GRANITE_MOE_NAMES: &[(&str, &str)] = &[
    ("block_sparse_moe.router.layer", "ffn_gate_inp"),
    (
        "block_sparse_moe.input_linear",
        "ffn_gate_exps + ffn_up_exps",
    ),
    ("block_sparse_moe.output_linear", "ffn_down_exps"),
    ("shared_mlp.input_linear", "ffn_gate_shexp + ffn_up_shexp"),
    ("shared_mlp.output_linear", "ffn_down_shexp"),
];

/// Granite 4 without a mixture.
const GRANITE_HYBRID: Family = Family {
    hf: &["GraniteMoeHybridForCausalLM"],
    arch: "granitehybrid",
    only: r#"{"hidden_act": ["silu", "swish"], "position_embedding_type": ["nope"]}"#,
    names: &[
        ("shared_mlp.input_linear", "ffn_gate + ffn_up"),
        ("shared_mlp.output_linear", "ffn_down"),
    ],
    map: decays,
    reshape: mamba2_shapes,
    more: |config, key| {
        granite_hybrid_keys(config, key)?;
        key("context_length", (1u32 << 20).into());
        key("rope.scaling.finetuned", false.into());
        Ok(())
    },
    ..GRANITE
};

const SINKS: (&str, &str) = ("self_attn.sinks", "attn_sinks.weight");

/// Granite with windows, with and without a mixture.
const GRANITE_SWA: Family = Family {
    arch: "granite_swa",
    defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "sliding_window": 128}"#,
    only: r#"{"hidden_act": ["silu", "swish"], "no_rope_layers": []}"#,
    keys: &[
        GRANITE.keys[0],
        GRANITE.keys[1],
        GRANITE.keys[2],
        GRANITE.keys[3],
        GRANITE.keys[4],
        (&["sliding_window"], "attention.sliding_window", Kind::Count),
        (
            &["layer_types"],
            "attention.sliding_window_pattern",
            Kind::Sliding,
        ),
    ],
    more: granite_swa_keys,
    ..GRANITE
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        hf: &["GraniteForCausalLM"],
        arch: "granite",
        ..GRANITE
    },
    Family {
        hf: &["GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"],
        arch: "granitemoe",
        names: GRANITE_MOE_NAMES,
        ..GRANITE
    },
    Family {
        fits: |config| has_recurrent(config) && !has_experts(config),
        ..GRANITE_HYBRID
    },
    Family {
        fits: |config| has_recurrent(config),
        names: GRANITE_MOE_NAMES,
        ..GRANITE_HYBRID
    },
    // Granite 4 without state spaces.
    Family {
        hf: GRANITE_HYBRID.hf,
        fits: |config| !has_experts(config),
        arch: "granite",
        names: GRANITE_HYBRID.names,
        more: granite4_keys,
        ..GRANITE
    },
    Family {
        hf: GRANITE_HYBRID.hf,
        arch: "granitemoe",
        names: GRANITE_MOE_NAMES,
        more: granite4_keys,
        ..GRANITE
    },
    Family {
        hf: &["GraniteSWAForCausalLM"],
        names: &[SINKS],
        ..GRANITE_SWA
    },
    Family {
        hf: &["GraniteMoeSWAForCausalLM"],
        names: &[
            SINKS,
            ("block_sparse_moe.router", "ffn_gate_inp"),
            ("block_sparse_moe.router.layer", "ffn_gate_inp"),
            (
                "block_sparse_moe.experts.gate_up_proj",
                "ffn_gate_up_exps.weight",
            ),
            ("block_sparse_moe.experts.down_proj", "ffn_down_exps.weight"),
            ("block_sparse_moe.input_linear", "ffn_gate_up_exps"),
            ("block_sparse_moe.output_linear", "ffn_down_exps"),
            ("shared_mlp.input_linear", "ffn_up_shexp"),
            ("shared_mlp.output_linear", "ffn_down_shexp"),
        ],
        ..GRANITE_SWA
    },
];

/// Granite 4's sizes of state spaces, which files say even of models that have none, and its heads
/// by layer.
fn granite_hybrid_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    rope_dimensions(config, key)?;
    heads_by_layer(config, key)?;
    for (from, to) in [
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_d_state", "state_size"),
        ("mamba_n_groups", "group_count"),
    ] {
        key(&format!("ssm.{to}"), config.u32(from)?.into());
    }
    key("ssm.inner_size", mamba2_inner(config)?.into());
    key("ssm.time_step_rank", config.u32("mamba_n_heads")?.into());
    Ok(())
}

/// Granite 4 without state spaces, which rotates.
fn granite4_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    key("rope.scaling.finetuned", true.into());
    granite_hybrid_keys(config, key)
}

/// Windows in all but every fourth layer, unless a list says otherwise.
fn granite_swa_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    rope_dimensions(config, key)?;
    if config.opt_strs("layer_types")?.is_none() {
        let windows = (0..config.u32("num_hidden_layers")?.min(MAX_HEAD))
            .map(|i| i % 4 != 0)
            .collect();
        key(
            "attention.sliding_window_pattern",
            Value::Array(Array::Bool(windows)),
        );
    }
    let thetas = config.opt_numbers("layer_rope_theta")?.unwrap_or_default();
    if thetas.iter().any(|theta| *theta != thetas[0]) {
        return Err(config.refuse("layer_rope_theta has several bases, and files have one"));
    }
    Ok(())
}
