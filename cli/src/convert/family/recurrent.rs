//! Models with state spaces or short convolutions, alone or beside attention.

use super::{EXPERT_KEYS, Factor, Family, Key, Kind, PLAIN, Put, decays, has_experts};
use crate::convert::config::{Config, MAX_HEAD};
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};

/// NVIDIA's Nemotron-H.
const NEMOTRON_H: Family = Family {
    hf: &["NemotronHForCausalLM"],
    arch: "nemotron_h",
    defaults: r#"{"layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 8, "ssm_state_size": 128}"#,
    only: r#"{"mlp_hidden_act": ["relu2"], "mamba_hidden_act": ["silu"]}"#,
    names: &[
        ("embeddings", "token_embd"),
        ("norm_f", "output_norm"),
        ("norm", "attn_norm"),
        ("mixer.A_log", "ssm_a"),
        ("mixer.D", "ssm_d"),
        ("mixer.conv1d", "ssm_conv1d"),
        ("mixer.dt_bias", "ssm_dt.bias"),
        ("mixer.in_proj", "ssm_in"),
        ("mixer.norm", "ssm_norm"),
        ("mixer.out_proj", "ssm_out"),
        ("mixer.q_proj", "attn_q"),
        ("mixer.k_proj", "attn_k"),
        ("mixer.v_proj", "attn_v"),
        ("mixer.o_proj", "attn_output"),
        ("mixer.up_proj", "ffn_up"),
        ("mixer.down_proj", "ffn_down"),
        ("mixer.gate", "ffn_gate_inp"),
        ("mixer.gate.e_score_correction_bias", "exp_probs_b.bias"),
        ("mixer.experts.*.up_proj", "ffn_up_exps"),
        ("mixer.experts.*.down_proj", "ffn_down_exps"),
        ("mixer.shared_experts.up_proj", "ffn_up_shexp"),
        ("mixer.shared_experts.down_proj", "ffn_down_shexp"),
        ("mixer.fc1_latent_proj", "ffn_latent_down"),
        ("mixer.fc2_latent_proj", "ffn_latent_up"),
    ],
    keys: &[
        (&["vocab_size"], "vocab_size", Kind::Count),
        (&["conv_kernel"], "ssm.conv_kernel", Kind::Count),
        (&["ssm_state_size"], "ssm.state_size", Kind::Count),
        (&["n_groups"], "ssm.group_count", Kind::Count),
    ],
    no_keys: &["rope.freq_base"],
    // As those of Granite, though it rotates nothing.
    pairs: true,
    map: decays,
    reshape: mamba2_shapes,
    more: nemotron_h_keys,
    ..PLAIN
};

/// LFM2.
const LFM2_NAMES: &[(&str, &str)] = &[
    ("embedding_norm", "token_embd_norm"),
    ("operator_norm", "attn_norm"),
    ("ffn_norm", "ffn_norm"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("conv.conv", "shortconv.conv"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.out_proj", "shortconv.out_proj"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w2", "ffn_down"),
    ("feed_forward.w3", "ffn_up"),
    ("feed_forward.gate", "ffn_gate_inp"),
    ("feed_forward.expert_bias", "exp_probs_b.bias"),
    ("feed_forward.experts.*.w1", "ffn_gate_exps"),
    ("feed_forward.experts.*.w2", "ffn_down_exps"),
    ("feed_forward.experts.*.w3", "ffn_up_exps"),
];

const LFM2_KEYS: &[Key] = &[
    (&["vocab_size"], "vocab_size", Kind::Count),
    (&["conv_L_cache"], "shortconv.l_cache", Kind::Count),
];

/// What Hugging Face calls layers with attention, and recurrent ones.
const ATTENTION: &[&str] = &["attention", "full_attention"];

const RECURRENT: &[&str] = &["mamba", "linear_attention"];

pub(super) const FAMILIES: &[Family] = &[
    Family {
        hf: &["Lfm2ForCausalLM"],
        arch: "lfm2",
        defaults: r#"{"block_auto_adjust_ff_dim": true, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
            "conv_L_cache": 3, "norm_eps": 1e-5}"#,
        names: LFM2_NAMES,
        keys: LFM2_KEYS,
        more: lfm2_keys,
        ..PLAIN
    },
    Family {
        hf: &["MambaForCausalLM", "FalconMambaForCausalLM"],
        arch: "mamba",
        defaults: r#"{"state_size": 16, "conv_kernel": 4, "layer_norm_epsilon": 1e-5}"#,
        only: r#"{"hidden_act": ["silu", "swish"], "mixer_rms_eps": [1e-6]}"#,
        names: &[
            ("embeddings", "token_embd"),
            ("norm_f", "output_norm"),
            ("norm", "attn_norm"),
            ("mixer.A_log", "ssm_a"),
            ("mixer.D", "ssm_d"),
            ("mixer.conv1d", "ssm_conv1d"),
            ("mixer.dt_proj", "ssm_dt"),
            ("mixer.in_proj", "ssm_in"),
            ("mixer.out_proj", "ssm_out"),
            ("mixer.x_proj", "ssm_x"),
        ],
        keys: &[
            (
                &["layer_norm_epsilon", "rms_norm_eps"],
                "attention.layer_norm_rms_epsilon",
                Kind::Number,
            ),
            (&["conv_kernel"], "ssm.conv_kernel", Kind::Count),
            (&["intermediate_size"], "ssm.inner_size", Kind::Count),
            (&["state_size"], "ssm.state_size", Kind::Count),
            (&["time_step_rank"], "ssm.time_step_rank", Kind::Count),
        ],
        no_keys: &["attention.head_count_kv", "attention.layer_norm_epsilon"],
        map: decays,
        more: mamba_keys,
        ..PLAIN
    },
    Family {
        hf: &["Mamba2ForCausalLM"],
        arch: "mamba2",
        defaults: r#"{"state_size": 128, "conv_kernel": 4, "layer_norm_epsilon": 1e-5, "head_dim": 64, "n_groups": 1,
            "expand": 2}"#,
        // Without a limit, as Python and as transformers 5 write it.
        only: r#"{"hidden_act": ["silu", "swish"], "time_step_limit": [[0, null], [0, {"__float__": "Infinity"}]]}"#,
        names: &[
            ("embeddings", "token_embd"),
            ("norm_f", "output_norm"),
            ("norm", "attn_norm"),
            ("mixer.A_log", "ssm_a"),
            ("mixer.D", "ssm_d"),
            ("mixer.conv1d", "ssm_conv1d"),
            ("mixer.dt_bias", "ssm_dt.bias"),
            ("mixer.in_proj", "ssm_in"),
            ("mixer.norm", "ssm_norm"),
            ("mixer.out_proj", "ssm_out"),
        ],
        keys: &[
            (
                &["layer_norm_epsilon", "rms_norm_eps"],
                "attention.layer_norm_rms_epsilon",
                Kind::Number,
            ),
            (&["conv_kernel"], "ssm.conv_kernel", Kind::Count),
            (&["state_size"], "ssm.state_size", Kind::Count),
            (&["n_groups"], "ssm.group_count", Kind::Count),
        ],
        no_keys: &[
            "attention.head_count_kv",
            "attention.layer_norm_epsilon",
            "attention.key_length",
            "attention.value_length",
        ],
        map: decays,
        reshape: mamba2_shapes,
        more: mamba2_keys,
        ..PLAIN
    },
    Family {
        hf: &["Lfm2MoeForCausalLM"],
        arch: "lfm2moe",
        defaults: r#"{"conv_L_cache": 3, "norm_eps": 1e-5}"#,
        only: r#"{"hidden_act": ["silu", "swish"], "use_expert_bias": [true], "norm_topk_prob": [true], "routed_scaling_factor": [1.0], "conv_bias": [false]}"#,
        names: LFM2_NAMES,
        keys: &[
            LFM2_KEYS[0],
            LFM2_KEYS[1],
            EXPERT_KEYS[0],
            (
                &["num_dense_layers"],
                "leading_dense_block_count",
                Kind::Count,
            ),
        ],
        more: |config, key| {
            heads_by_layer(config, key)?;
            key("expert_gating_func", 2u32.into());
            Ok(())
        },
        ..PLAIN
    },
    Family {
        hf: &["NemotronHForCausalLM"],
        fits: has_experts,
        arch: "nemotron_h_moe",
        keys: &[
            NEMOTRON_H.keys[0],
            NEMOTRON_H.keys[1],
            NEMOTRON_H.keys[2],
            NEMOTRON_H.keys[3],
            EXPERT_KEYS[0],
            (
                &["moe_shared_expert_intermediate_size"],
                "expert_shared_feed_forward_length",
                Kind::Count,
            ),
            (&["n_shared_experts"], "expert_shared_count", Kind::Count),
            (&["norm_topk_prob"], "expert_weights_norm", Kind::Flag),
            (
                &["routed_scaling_factor"],
                "expert_weights_scale",
                Kind::Number,
            ),
            (&["moe_latent_size"], "moe_latent_size", Kind::Count),
        ],
        ..NEMOTRON_H
    },
    NEMOTRON_H,
    Family {
        hf: &["JambaForCausalLM"],
        arch: "jamba",
        defaults: r#"{"rms_norm_eps": 1e-6, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}"#,
        names: &[
            ("final_layernorm", "output_norm"),
            ("pre_ff_layernorm", "ffn_norm"),
            ("feed_forward.gate_proj", "ffn_gate"),
            ("feed_forward.up_proj", "ffn_up"),
            ("feed_forward.down_proj", "ffn_down"),
            ("feed_forward.router", "ffn_gate_inp"),
            ("feed_forward.experts.*.gate_proj", "ffn_gate_exps"),
            ("feed_forward.experts.*.up_proj", "ffn_up_exps"),
            ("feed_forward.experts.*.down_proj", "ffn_down_exps"),
        ],
        keys: &[
            (&["mamba_d_conv"], "ssm.conv_kernel", Kind::Count),
            (&["mamba_d_state"], "ssm.state_size", Kind::Count),
        ],
        map: decays,
        more: |config, key| {
            let (width, expand) = (config.u32("hidden_size")?, config.u32("mamba_expand")?);
            let inner = width
                .checked_mul(expand)
                .ok_or_else(|| config.refuse("hidden_size is too large"))?;
            key("ssm.inner_size", inner.into());
            key(
                "ssm.time_step_rank",
                config
                    .opt_u32(&["mamba_dt_rank"])?
                    .unwrap_or(width.div_ceil(16))
                    .into(),
            );
            let n_head_kv = config.u32("num_key_value_heads")? as i32;
            let (period, offset) = (
                config.u32("attn_layer_period")?.max(1),
                config.u32("attn_layer_offset")?,
            );
            let layers = 0..config.u32("num_hidden_layers")?.min(MAX_HEAD);
            let heads = layers
                .map(|i| if i % period == offset { n_head_kv } else { 0 })
                .collect();
            key("attention.head_count_kv", Value::Array(Array::I32(heads)));
            Ok(())
        },
        ..PLAIN
    },
    Family {
        hf: &["FalconH1ForCausalLM"],
        arch: "falcon-h1",
        defaults: r#"{"rms_norm_eps": 1e-5}"#,
        only: r#"{"hidden_act": ["silu", "swish"]}"#,
        names: &[
            ("final_layernorm", "output_norm"),
            // Without an end, as llama.cpp's converter has it.
            ("pre_ff_layernorm", "ffn_norm!"),
            ("feed_forward.gate_proj", "ffn_gate"),
            ("feed_forward.up_proj", "ffn_up"),
            ("feed_forward.down_proj", "ffn_down"),
        ],
        keys: &[
            (&["vocab_size"], "vocab_size", Kind::Count),
            (&["mamba_d_conv"], "ssm.conv_kernel", Kind::Count),
            (&["mamba_d_ssm"], "ssm.inner_size", Kind::Count),
            (&["mamba_d_state"], "ssm.state_size", Kind::Count),
            (&["mamba_n_heads"], "ssm.time_step_rank", Kind::Count),
            (&["mamba_n_groups"], "ssm.group_count", Kind::Count),
        ],
        map: decays,
        factors: falcon_h1_factors,
        reshape: mamba2_shapes,
        more: |config, _| {
            let is = |name: &str| Ok::<_, Failure>(config.opt_bool(&[name])? == Some(true));
            match is("mamba_rms_norm")? && is("mamba_norm_before_gate")? {
                true => Err(config.refuse(
                    "mamba_norm_before_gate is true, and files have a norm behind the gate",
                )),
                false => Ok(()),
            }
        },
        ..PLAIN
    },
];

/// Whether some layer is recurrent.
pub(super) fn has_recurrent(config: &Config) -> bool {
    let layers = config.opt_strs("layer_types").ok().flatten();
    layers.is_some_and(|layers| layers.iter().any(|kind| RECURRENT.contains(kind)))
}

/// Heads of keys by layer: none where there is no attention.
pub(super) fn heads_by_layer(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let layers = config
        .opt_strs("layer_types")?
        .ok_or_else(|| config.missing("layer_types"))?;
    let n_head_kv = config.u32("num_key_value_heads")? as i32;
    let heads = layers
        .iter()
        .map(|kind| {
            if ATTENTION.contains(kind) {
                n_head_kv
            } else {
                0
            }
        })
        .collect();
    key("attention.head_count_kv", Value::Array(Array::I32(heads)));
    Ok(())
}

/// Which layers are what: a letter each (`M`, `*`, `-`, `E`), or a list of texts.
fn nemotron_h_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let letters = config
        .get(&["hybrid_override_pattern"])
        .and_then(|(_, pattern)| pattern.as_str());
    let layers: Vec<char> = match (config.opt_strs("layers_block_type")?, letters) {
        (Some(layers), _) => {
            let letter = |kind: &&str| match *kind {
                kind if RECURRENT.contains(&kind) => 'M',
                kind if ATTENTION.contains(&kind) => '*',
                "moe" => 'E',
                _ => '-',
            };
            layers.iter().map(letter).collect()
        }
        (None, Some(letters)) => letters.chars().collect(),
        (None, None) => return Err(config.missing("hybrid_override_pattern")),
    };
    let by_layer = |letters: &[char], n: u32| {
        let values = layers
            .iter()
            .map(|layer| if letters.contains(layer) { n as i32 } else { 0 });
        Value::Array(Array::I32(values.collect()))
    };
    let n_ff = match config
        .opt_u32(&["moe_intermediate_size"])?
        .filter(|_| layers.contains(&'E'))
    {
        Some(n_ff) if layers.contains(&'-') => {
            return Err(config.refuse(format_args!("dense layers beside mixtures of {n_ff}")));
        }
        n_ff => n_ff,
    };
    key(
        "feed_forward_length",
        by_layer(
            &['E', '-'],
            n_ff.map_or_else(|| config.u32("intermediate_size"), Ok)?,
        ),
    );
    key(
        "attention.head_count_kv",
        by_layer(&['*'], config.u32("num_key_value_heads")?),
    );
    let n = config
        .u32("hidden_size")?
        .checked_div(config.u32("num_attention_heads")?);
    key(
        "rope.dimension_count",
        n.ok_or_else(|| config.refuse("num_attention_heads is 0"))?
            .into(),
    );
    key("context_length", (1u32 << 20).into());
    key("rope.scaling.finetuned", false.into());
    key("ssm.inner_size", mamba2_inner(config)?.into());
    key("ssm.time_step_rank", config.u32("mamba_num_heads")?.into());
    Ok(())
}

/// Heads of keys by layer, and the width that the feed-forward layers are rounded to.
fn lfm2_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    heads_by_layer(config, key)?;
    let n_ff = config
        .opt_u32(&["block_ff_dim", "intermediate_size"])?
        .ok_or_else(|| config.missing("intermediate_size"))?;
    let n_ff = match config.opt_bool(&["block_auto_adjust_ff_dim"])? {
        Some(true) => {
            let factor = config
                .opt_f32(&["block_ffn_dim_multiplier"])?
                .unwrap_or(1.0);
            let multiple = config.u32("block_multiple_of")?.max(1);
            let n_ff = f64::from(factor) * f64::from((2 * u64::from(n_ff) / 3) as u32);
            (n_ff as u32).div_ceil(multiple).saturating_mul(multiple)
        }
        _ => n_ff,
    };
    key("feed_forward_length", n_ff.into());
    Ok(())
}

/// What Mamba's files say about parts that it lacks.
fn mamba_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    key("context_length", (1u32 << 20).into());
    key("feed_forward_length", 0u32.into());
    key("attention.head_count", 0u32.into());
    if config.opt_u32(&["time_step_rank"])?.is_none() {
        key(
            "ssm.time_step_rank",
            config.u32("hidden_size")?.div_ceil(16).into(),
        );
    }
    key(
        "ssm.dt_b_c_rms",
        (config
            .get(&["model_type"])
            .is_some_and(|(_, kind)| kind == "falcon_mamba"))
        .into(),
    );
    Ok(())
}

/// Width of Mamba 2's inner vectors.
pub(super) fn mamba2_inner(config: &Config) -> Result<u32, Failure> {
    let heads = config.opt_u32(&["mamba_num_heads", "mamba_n_heads"])?;
    let n = match (
        heads,
        config.opt_u32(&["mamba_head_dim", "mamba_d_head"])?,
        config.opt_u32(&["intermediate_size"])?,
    ) {
        (Some(n_head), Some(head_dim), _) => n_head.checked_mul(head_dim),
        (.., Some(n)) => Some(n),
        _ => config
            .u32("expand")?
            .checked_mul(config.u32("hidden_size")?),
    };
    n.ok_or_else(|| config.refuse("hidden_size is too large"))
}

fn mamba2_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let inner = mamba2_inner(config)?;
    let n_head = inner
        .checked_div(config.u32("head_dim")?)
        .ok_or_else(|| config.refuse("head_dim is 0"))?;
    key("context_length", (1u32 << 20).into());
    key("feed_forward_length", 0u32.into());
    key("attention.head_count", 0u32.into());
    key("ssm.inner_size", inner.into());
    key("ssm.time_step_rank", n_head.into());
    Ok(())
}

/// Decays and skips are columns, norms have a row per group.
pub(super) fn mamba2_shapes(
    config: &Config,
    part: &str,
    shape: &mut Vec<usize>,
) -> Result<(), Failure> {
    match part {
        "ssm_a" | "ssm_d" => shape.push(1),
        "ssm_norm" => {
            let n_group = config
                .opt_u32(&["n_groups", "mamba_n_groups"])?
                .unwrap_or(1)
                .max(1) as usize;
            *shape = vec![n_group, mamba2_inner(config)? as usize / n_group];
        }
        _ => {}
    }
    Ok(())
}

/// Falcon-H1's multipliers, which its files have in the weights.
fn falcon_h1_factors(config: &Config, name: &str) -> Result<Vec<Factor>, Failure> {
    let all = |names: &[&str]| -> Result<Vec<Factor>, Failure> {
        names
            .iter()
            .map(|name| Ok((0..usize::MAX, config.opt_f32(&[name])?.unwrap_or(1.0))))
            .collect()
    };
    let of_list = |name: &str, i: usize| -> Result<f32, Failure> {
        Ok(config
            .opt_numbers(name)?
            .and_then(|list| list.get(i).copied())
            .unwrap_or(1.0) as f32)
    };
    let (_, part) = name
        .strip_suffix(".weight")
        .and_then(|name| name.rsplit_once('.'))
        .unwrap_or(("", name));
    Ok(match part {
        "ffn_gate" => vec![(0..usize::MAX, of_list("mlp_multipliers", 0)?)],
        "ffn_down" => vec![(0..usize::MAX, of_list("mlp_multipliers", 1)?)],
        "attn_k" => all(&["key_multiplier", "attention_in_multiplier"])?,
        "attn_q" | "attn_v" => all(&["attention_in_multiplier"])?,
        "attn_output" => all(&["attention_out_multiplier"])?,
        "ssm_out" => all(&["ssm_out_multiplier"])?,
        "ssm_in" => {
            let inner = config.u32("mamba_d_ssm")? as usize;
            let state =
                config.u32("mamba_n_groups")? as usize * config.u32("mamba_d_state")? as usize;
            let mut factors = all(&["ssm_in_multiplier"])?;
            let mut first = 0;
            for (i, n) in [inner, inner, state, state, usize::MAX >> 1]
                .into_iter()
                .enumerate()
            {
                factors.push((first..first + n, of_list("ssm_multipliers", i)?));
                first += n;
            }
            factors
        }
        _ if name == "output.weight" => all(&["lm_head_multiplier"])?,
        _ if name == "token_embd.weight" => all(&["embedding_multiplier"])?,
        _ => Vec::new(),
    })
}
