//! Decoders without experts that belong to no other file.

use super::{
    Extra, Family, Kind, PLAIN, Put, Spaces, WINDOW, no_scaling, norms_plus_one, partial_rope,
    rope_dimensions, window_pattern,
};
use crate::convert::config::Config;
use crate::io::Failure;

/// Norms after each part alone.
const AFTER: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// ERNIE 4.5.
pub(super) const ERNIE: Family = Family {
    defaults: r#"{"rope_theta": 500000.0, "rms_norm_eps": 1e-5}"#,
    only: r#"{"hidden_act": ["silu", "swish"], "moe_layer_interval": [1]}"#,
    spaces: Spaces::Setting,
    ..PLAIN
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        hf: &["SeedOssForCausalLM"],
        arch: "seed_oss",
        names: &[("post_attention_layernorm", "post_attention_norm")],
        ..PLAIN
    },
    Family {
        hf: &["Phi3ForCausalLM"],
        arch: "phi3",
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096,
            "sliding_window": 0}"#,
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
        hf: &["Olmo2ForCausalLM", "Olmo3ForCausalLM"],
        arch: "olmo2",
        defaults: r#"{"rms_norm_eps": 1e-5}"#,
        names: &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        ],
        keys: &[
            WINDOW,
            (
                &["layer_types"],
                "attention.sliding_window_pattern",
                Kind::Sliding,
            ),
        ],
        ..PLAIN
    },
    Family {
        hf: &["OlmoForCausalLM", "OLMoForCausalLM"],
        arch: "olmo",
        keys: &[(&["clip_qkv"], "attention.clamp_kqv", Kind::Number)],
        pairs: true,
        more: |_, key| {
            key("attention.layer_norm_epsilon", 1e-5f32.into());
            Ok(())
        },
        ..PLAIN
    },
    Family {
        hf: &["CohereForCausalLM"],
        arch: "command-r",
        defaults: r#"{"rope_theta": 10000.0, "layer_norm_eps": 1e-5, "logit_scale": 0.0625}"#,
        keys: &[
            // The models were trained on more positions than this key of `KEYS` tells.
            (&["model_max_length"], "context_length", Kind::Count),
            (&["logit_scale"], "logit_scale", Kind::Number),
        ],
        more: no_scaling,
        ..PLAIN
    },
    Family {
        hf: &["Cohere2ForCausalLM"],
        arch: "cohere2",
        defaults: r#"{"rope_theta": 10000.0, "layer_norm_eps": 1e-5, "logit_scale": 0.0625}"#,
        keys: &[
            (&["vocab_size"], "vocab_size", Kind::Count),
            (&["logit_scale"], "logit_scale", Kind::Number),
            WINDOW,
        ],
        more: |config, key| {
            partial_rope(config, key)?;
            window_pattern(config, key, 4)?;
            no_scaling(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["Exaone4ForCausalLM"],
        arch: "exaone4",
        names: AFTER,
        keys: &[
            (&["vocab_size"], "vocab_size", Kind::Count),
            WINDOW,
            (
                &["layer_types"],
                "attention.sliding_window_pattern",
                Kind::Sliding,
            ),
        ],
        more: |config, _| {
            // Beside layers with windows the others are not rotated; readers rotate all where there
            // is none.
            let windows = config
                .opt_strs("layer_types")?
                .is_none_or(|layers| layers.contains(&"sliding_attention"));
            match config.opt_u32(&["sliding_window"])? {
                Some(_) if !windows => {
                    Err(config
                        .refuse("sliding_window is there, and layer_types has no layer with one"))
                }
                _ => Ok(()),
            }
        },
        ..PLAIN
    },
    Family {
        hf: &["Starcoder2ForCausalLM"],
        arch: "starcoder2",
        only: r#"{"hidden_act": ["gelu_pytorch_tanh"]}"#,
        keys: &[WINDOW],
        names: &[("mlp.c_fc", "ffn_up"), ("mlp.c_proj", "ffn_down")],
        ..PLAIN
    },
    Family {
        hf: &["StableLmForCausalLM"],
        arch: "stablelm",
        defaults: r#"{"use_parallel_residual": true, "partial_rotary_factor": 0.25}"#,
        keys: &[(
            &["use_parallel_residual"],
            "use_parallel_residual",
            Kind::Flag,
        )],
        no_keys: &["rope.freq_base"],
        more: partial_rope,
        ..PLAIN
    },
    Family {
        hf: &["Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"],
        arch: "ernie4_5",
        ..ERNIE
    },
    Family {
        hf: &["HunYuanDenseV1ForCausalLM"],
        arch: "hunyuan-dense",
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-5}"#,
        names: &[
            ("self_attn.query_layernorm", "attn_q_norm"),
            ("self_attn.key_layernorm", "attn_k_norm"),
        ],
        more: hunyuan_rope,
        ..PLAIN
    },
    Family {
        hf: &["NemotronForCausalLM"],
        arch: "nemotron",
        defaults: r#"{"rope_theta": 10000.0, "norm_eps": 1e-5, "partial_rotary_factor": 0.5}"#,
        only: r#"{"hidden_act": ["relu2"]}"#,
        keys: &[
            (&["vocab_size"], "vocab_size", Kind::Count),
            (&["norm_eps"], "attention.layer_norm_epsilon", Kind::Number),
        ],
        map: norms_plus_one,
        special: &[],
        more: |config, key| {
            partial_rope(config, key)?;
            no_scaling(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["Jais2ForCausalLM"],
        arch: "jais2",
        defaults: r#"{"rope_theta": 500000.0, "layer_norm_eps": 1e-5}"#,
        only: r#"{"hidden_act": ["relu2"]}"#,
        more: rope_dimensions,
        ..PLAIN
    },
    // GLM 4 of 2024, which llama.cpp calls as its predecessor.
    Family {
        hf: &["GlmForCausalLM"],
        arch: "chatglm",
        defaults: r#"{"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}"#,
        no_keys: &["attention.key_length", "attention.value_length"],
        special: &[
            ("eos", "<|endoftext|>"),
            ("eot", "<|user|>"),
            ("unknown", "<|endoftext|>"),
        ],
        more: |config, key| {
            partial_rope(config, key)?;
            key(
                "rope.freq_base",
                config.rope_f32("rope_theta")?.unwrap_or(10000.0).into(),
            );
            Ok(())
        },
        ..PLAIN
    },
];

/// The part of a head that Phi 3 rotates.
fn phi3_dimensions(config: &Config) -> Result<u32, Failure> {
    let share = config.rope_f32("partial_rotary_factor")?.unwrap_or(1.0);
    let heads = config.u32("num_attention_heads")?.max(1);
    Ok((f64::from(share) * f64::from(config.u32("hidden_size")?)) as u32 / heads)
}

pub(super) fn phi3_rope(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let first = config
        .rope_f32("original_max_position_embeddings")?
        .unwrap_or_default();
    key(
        "rope.scaling.original_context_length",
        (first as u32).into(),
    );
    key("rope.dimension_count", phi3_dimensions(config)?.into());
    if config.rope_factors("long_factor")?.is_some() {
        let scale = f64::from(config.u32("max_position_embeddings")?) / f64::from(first);
        let attention = match config.rope_type() {
            _ if scale <= 1.0 => 1.0,
            Some("su" | "longrope") => (1.0 + scale.ln() / f64::from(first).ln()).sqrt(),
            Some("yarn") => 0.1 * scale.ln() + 1.0,
            other => return Err(config.refuse(format_args!("rope type {other:?} is not known"))),
        };
        let attention = config
            .rope_f32("attention_factor")?
            .unwrap_or(attention as f32);
        key("rope.scaling.attn_factor", attention.into());
    } else if let Some(kind) = config.rope_type().filter(|kind| *kind != "dynamic") {
        return Err(config.refuse(format_args!(
            "rope type {kind} without long_factor, of which files of phi3 say nothing"
        )));
    }
    Ok(())
}

pub(super) fn phi3_factors(config: &Config) -> Result<Vec<Extra>, Failure> {
    long_factors(config, phi3_dimensions(config)?)
}

/// Factors of the frequencies of `n_rot` values, for texts above and below the first context.
pub(super) fn long_factors(config: &Config, n_rot: u32) -> Result<Vec<Extra>, Failure> {
    let (long, short) = (
        config.rope_factors("long_factor")?,
        config.rope_factors("short_factor")?,
    );
    let (Some(long), Some(short)) = (long, short) else {
        return Ok(Vec::new());
    };
    let n = n_rot as usize / 2;
    if long.len() != n || short.len() != n {
        let found = (long.len(), short.len());
        return Err(config.refuse(format_args!(
            "long_factor and short_factor have {found:?} numbers, not {n}"
        )));
    }
    Ok(vec![
        ("rope_factors_long.weight", long),
        ("rope_factors_short.weight", short),
    ])
}

/// A longer context by a larger base; of how long a context nothing is said that is true.
pub(super) fn hunyuan_rope(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    if let Some(alpha) = config
        .rope_f32("alpha")?
        .filter(|_| config.rope_type() == Some("dynamic"))
    {
        let (n, base) = (
            f64::from(config.head_dim()?),
            config.rope_f32("rope_theta")?.unwrap_or(10000.0),
        );
        let base = f64::from(base) * f64::from(alpha).powf(n / (n - 2.0));
        key("rope.freq_base", (base as f32).into());
        key("rope.scaling.type", "none".into());
        key("rope.scaling.factor", 1.0f32.into());
        key(
            "rope.scaling.original_context_length",
            (256u32 << 10).into(),
        );
        key("context_length", (256u32 << 10).into());
    }
    Ok(())
}
