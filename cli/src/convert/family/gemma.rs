//! Google's Gemma 1 to 4 and 3n, and its embedding model.

use super::{Extra, Family, Kind, PLAIN, Put, Spaces, WINDOW, norms_plus_one, window_pattern};
use crate::convert::config::{Config, MAX_HEAD};
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};

/// Norms before and after each part.
const SANDWICH: &[(&str, &str); 3] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// Gemma 3n.
const GEMMA3N_NAMES: &[(&str, &str)] = &[
    SANDWICH[0],
    SANDWICH[1],
    SANDWICH[2],
    ("embed_tokens_per_layer", "per_layer_token_embd"),
    ("per_layer_model_projection", "per_layer_model_proj"),
    ("per_layer_projection_norm", "per_layer_proj_norm"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
    ("altup_projections.*", "altup_proj"),
    ("altup_unembed_projections.*", "altup_unembd_proj"),
    ("altup.correct_output_scale", "altup_correct_scale.weight"),
    ("altup.correction_coefs", "altup_correct_coef"),
    ("altup.prediction_coefs", "altup_predict_coef"),
    ("altup.modality_router", "altup_router"),
    ("altup.router_norm", "altup_router_norm"),
    ("laurel.linear_left", "laurel_l"),
    ("laurel.linear_right", "laurel_r"),
    ("laurel.post_laurel_norm", "laurel_post_norm"),
];

pub(super) const FAMILIES: &[Family] = &[
    Family {
        hf: &["Gemma2ForCausalLM"],
        arch: "gemma2",
        defaults: r#"{"rms_norm_eps": 1e-6, "head_dim": 256, "sliding_window": 4096}"#,
        only: r#"{"hidden_activation": ["gelu_pytorch_tanh"], "tie_word_embeddings": [true],
            "use_bidirectional_attention": [false]}"#,
        names: SANDWICH,
        keys: &[
            WINDOW,
            (
                &["attn_logit_softcapping"],
                "attn_logit_softcapping",
                Kind::Number,
            ),
            (
                &["final_logit_softcapping"],
                "final_logit_softcapping",
                Kind::Number,
            ),
        ],
        no_keys: &["rope.freq_base"],
        skips: &["lm_head"],
        map: norms_plus_one,
        spaces: Spaces::Never,
        more: |config, key| {
            // Readers have bounds where the file says none.
            for bound in ["attn_logit_softcapping", "final_logit_softcapping"] {
                if config.is_null(bound) {
                    return Err(config.refuse(format_args!(
                        "{bound} is null, and files of gemma2 always have it"
                    )));
                }
            }
            window_pattern(config, key, 2)?;
            gemma_scale(config, key, 46)
        },
        ..PLAIN
    },
    Family {
        hf: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        arch: "gemma3",
        defaults: r#"{"vocab_size": 262208, "max_position_embeddings": 131072, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "sliding_window": 4096,
            "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}"#,
        only: r#"{"hidden_activation": ["gelu_pytorch_tanh"], "attn_logit_softcapping": [],
            "use_bidirectional_attention": [false]}"#,
        names: SANDWICH,
        keys: &[
            WINDOW,
            (
                &["final_logit_softcapping"],
                "final_logit_softcapping",
                Kind::Number,
            ),
        ],
        map: norms_plus_one,
        spaces: Spaces::Never,
        more: |config, key| {
            window_pattern(config, key, 6)?;
            gemma_scale(config, key, 62)
        },
        ..PLAIN
    },
    Family {
        hf: &["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
        arch: "gemma4",
        defaults: r#"{"vocab_size": 262144, "max_position_embeddings": 131072, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "sliding_window": 512,
            "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0,
            "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention":
                {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}}}"#,
        only: r#"{"hidden_activation": ["gelu_pytorch_tanh"], "use_bidirectional_attention": ["vision", false]}"#,
        names: &[
            SANDWICH[0],
            SANDWICH[1],
            SANDWICH[2],
            ("embed_tokens_per_layer", "per_layer_token_embd"),
            ("per_layer_model_projection", "per_layer_model_proj"),
            ("per_layer_projection_norm", "per_layer_proj_norm"),
            ("per_layer_input_gate", "inp_gate"),
            ("per_layer_projection", "proj"),
            ("post_per_layer_input_norm", "post_norm"),
            ("layer_scalar", "layer_output_scale.weight"),
            ("router.proj", "ffn_gate_inp"),
            ("router.scale", "ffn_gate_inp.scale"),
            ("router.per_expert_scale", "ffn_down_exps.scale"),
            ("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
            ("experts.down_proj", "ffn_down_exps.weight"),
            ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
            ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
            ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
        ],
        keys: &[
            WINDOW,
            (
                &["layer_types"],
                "attention.sliding_window_pattern",
                Kind::Sliding,
            ),
            (
                &["num_kv_shared_layers"],
                "attention.shared_kv_layers",
                Kind::Count,
            ),
            (
                &["hidden_size_per_layer_input"],
                "embedding_length_per_layer_input",
                Kind::Count,
            ),
            (&["top_k_experts"], "expert_used_count", Kind::Count),
            (
                &["expert_intermediate_size", "moe_intermediate_size"],
                "expert_feed_forward_length",
                Kind::Count,
            ),
            (
                &["final_logit_softcapping"],
                "final_logit_softcapping",
                Kind::Number,
            ),
        ],
        spaces: Spaces::Never,
        more: gemma4_keys,
        extra: gemma4_factors,
        ..PLAIN
    },
    Family {
        hf: &["Gemma3TextModel"],
        arch: "gemma-embedding",
        defaults: r#"{"max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}"#,
        only: r#"{"hidden_activation": ["gelu_pytorch_tanh"], "attn_logit_softcapping": []}"#,
        names: &[
            SANDWICH[0],
            SANDWICH[1],
            SANDWICH[2],
            // Of sentence-transformers.
            ("dense_2.linear", "dense_2"),
            ("dense_3.linear", "dense_3"),
        ],
        keys: &[WINDOW],
        map: norms_plus_one,
        spaces: Spaces::Never,
        more: |config, key| {
            if config.opt_bool(&["use_bidirectional_attention"])? != Some(true) {
                return Err(
                    config.refuse("use_bidirectional_attention is not true, and files of gemma-embedding are encoders")
                );
            }
            window_pattern(config, key, 6)?;
            gemma_scale(config, key, 62)
        },
        ..PLAIN
    },
    Family {
        hf: &["GemmaForCausalLM"],
        arch: "gemma",
        defaults: r#"{"rms_norm_eps": 1e-6, "head_dim": 256}"#,
        only: r#"{"hidden_act": ["gelu", "gelu_pytorch_tanh"], "hidden_activation": ["gelu_pytorch_tanh"],
            "tie_word_embeddings": [true], "use_bidirectional_attention": [false]}"#,
        skips: &["lm_head"],
        no_keys: &["rope.freq_base"],
        map: norms_plus_one,
        spaces: Spaces::Never,
        ..PLAIN
    },
    Family {
        hf: &["Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"],
        arch: "gemma3n",
        defaults: r#"{"vocab_size": 262400, "max_position_embeddings": 32768, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-6, "sliding_window": 512, "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0, "hidden_size_per_layer_input": 256, "altup_active_idx": 0,
            "altup_num_inputs": 4, "num_kv_shared_layers": 15, "final_logit_softcapping": 30.0}"#,
        only: r#"{"hidden_activation": ["gelu_pytorch_tanh"], "tie_word_embeddings": [true], "altup_correct_scale": [true],
            "altup_active_idx": [0]}"#,
        names: GEMMA3N_NAMES,
        keys: &[
            WINDOW,
            (
                &["layer_types"],
                "attention.sliding_window_pattern",
                Kind::Sliding,
            ),
            (
                &["num_kv_shared_layers"],
                "attention.shared_kv_layers",
                Kind::Count,
            ),
            (
                &["hidden_size_per_layer_input"],
                "embedding_length_per_layer_input",
                Kind::Count,
            ),
            (&["altup_active_idx"], "altup.active_idx", Kind::Count),
            (&["altup_num_inputs"], "altup.num_inputs", Kind::Count),
            (
                &["final_logit_softcapping"],
                "final_logit_softcapping",
                Kind::Number,
            ),
        ],
        spaces: Spaces::Never,
        more: |config, key| {
            // Standard deviations above the mean below which so large a share of gates is.
            if let Some(shares) = config.opt_numbers("activation_sparsity_pattern")? {
                let scales = shares.iter().map(|&share| normal_quantile(share));
                key(
                    "activation_sparsity_scale",
                    Value::Array(Array::F32(scales.collect())),
                );
            }
            Ok(())
        },
        ..PLAIN
    },
];

/// The number below which a share `p` of a normal distribution lies; −∞ for 0. Newton's method,
/// with the distribution as the series `1/2 + density·(x + x³/3 + x⁵/(3·5) + …)`.
fn normal_quantile(p: f64) -> f32 {
    if !(p > 0.0 && p < 1.0) {
        return if p > 0.0 {
            f32::INFINITY
        } else {
            f32::NEG_INFINITY
        };
    }
    let mut x = 0.0f64;
    for _ in 0..100 {
        let (mut sum, mut term, mut n) = (x, x, 3.0);
        while term.abs() > 1e-17 * sum.abs() {
            term *= x * x / n;
            sum += term;
            n += 2.0;
        }
        let density = (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
        x += ((p - 0.5 - density * sum) / density).clamp(-1.0, 1.0);
    }
    x as f32
}

/// The factor on scores, where it is not what readers take for granted: they know models with
/// `n_layer` layers.
fn gemma_scale(config: &Config, key: Put<'_>, n_layer: u32) -> Result<(), Failure> {
    let Some(squared) = config.opt_f32(&["query_pre_attn_scalar"])? else {
        return Ok(());
    };
    let usual = match config.u32("num_hidden_layers")? {
        n if n == n_layer => config.u32("hidden_size")? / config.u32("num_attention_heads")?.max(1),
        _ => config.head_dim()?,
    };
    if squared != usual as f32 {
        key("attention.scale", (1.0 / squared.sqrt()).into());
    }
    Ok(())
}

/// Gemma 4's number for layers that see everything: a key of its own, or one of a layer's.
fn of_full_layers(config: &Config, name: &str, of_layer: &str) -> Result<Option<u32>, Failure> {
    if let Some(n) = config.opt_u32(&[name])? {
        return Ok(Some(n));
    }
    let layers = config.opt_strs("layer_types")?.unwrap_or_default();
    let full = layers
        .iter()
        .position(|kind| *kind == "full_attention")
        .map(|i| i.to_string());
    let by_layer = config
        .get(&["per_layer_config"])
        .and_then(|(_, by_layer)| by_layer.get(full?)?.get(of_layer));
    by_layer
        .map(|n| n.as_u64()?.try_into().ok())
        .map_or(Ok(None), |n: Option<u32>| {
            n.map(Some).ok_or_else(|| {
                config.refuse(format_args!(
                    "per_layer_config has a {of_layer} that is no number"
                ))
            })
        })
}

fn gemma4_head(config: &Config) -> Result<u32, Failure> {
    let n = of_full_layers(config, "global_head_dim", "head_dim")?.unwrap_or(512);
    if n <= MAX_HEAD {
        Ok(n)
    } else {
        Err(config.refuse(format_args!("global_head_dim is {n}, more than {MAX_HEAD}")))
    }
}

fn gemma4_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let layers = config
        .opt_strs("layer_types")?
        .ok_or_else(|| config.missing("layer_types"))?;
    let (full, of_window) = (gemma4_head(config)?, config.u32("head_dim")?);
    for part in [
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
    ] {
        key(part, full.into());
        key(&format!("{part}_swa"), of_window.into());
    }
    if config.opt_bool(&["use_double_wide_mlp"])? == Some(true) {
        let n_ff = config.u32("intermediate_size")? as i32;
        let n_own = layers
            .len()
            .saturating_sub(config.u32("num_kv_shared_layers")? as usize);
        let widths = (0..layers.len()).map(|i| {
            if i < n_own {
                n_ff
            } else {
                n_ff.saturating_mul(2)
            }
        });
        key(
            "feed_forward_length",
            Value::Array(Array::I32(widths.collect())),
        );
    }
    if let Some(full) = of_full_layers(config, "num_global_key_value_heads", "num_key_value_heads")?
    {
        let of_window = config.u32("num_key_value_heads")?;
        let heads = layers.iter().map(|kind| if *kind == "sliding_attention" { of_window } else { full } as i32);
        key(
            "attention.head_count_kv",
            Value::Array(Array::I32(heads.collect())),
        );
    }
    Ok(())
}

/// A proportional rope, which Gemma 4's full layers have, turns the first pairs of a head only: the
/// others are slowed down to a stand.
fn gemma4_factors(config: &Config) -> Result<Vec<Extra>, Failure> {
    let n = gemma4_head(config)?;
    let share = match config.rope_type() {
        Some("proportional") => config.rope_f32("partial_rotary_factor")?.unwrap_or(1.0),
        _ => 1.0,
    };
    let turned = (f64::from(n) * f64::from(share) / 2.0) as u32;
    Ok(vec![(
        "rope_freqs.weight",
        (0..n / 2)
            .map(|i| if i < turned { 1.0 } else { 1e30 })
            .collect(),
    )])
}
