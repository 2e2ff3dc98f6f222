//! Qwen 2 to 3.5, with mixtures, gated delta rules, and the text part of those that see.

use super::{
    EXPERT_KEYS, Family, Kind, PLAIN, Parts, Put, Reorder, Run, Transpose, decays, normalised,
    norms_plus_one, partial_rope,
};
use crate::convert::config::{Config, MAX_HEAD};
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};

/// Mixtures without dense layers.
const ALL_SPARSE: &str =
    r#"{"hidden_act": ["silu", "swish"], "decoder_sparse_step": [1], "mlp_only_layers": [[]]}"#;

/// Gated delta rules. Qwen 3.5 has the inputs of Qwen3-Next's in several matrices.
const QWEN3_NEXT: Family = Family {
    defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "head_dim": 256, "partial_rotary_factor": 0.25,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4}"#,
    names: &[
        ("post_attention_layernorm", "post_attention_norm"),
        ("linear_attn.A_log", "ssm_a"),
        ("linear_attn.conv1d", "ssm_conv1d"),
        ("linear_attn.dt_bias", "ssm_dt.bias"),
        ("linear_attn.in_proj_ba", "ssm_ba"),
        ("linear_attn.in_proj_qkvz", "attn_qkv + attn_gate"),
        ("linear_attn.in_proj_qkv", "attn_qkv"),
        ("linear_attn.in_proj_z", "attn_gate"),
        ("linear_attn.in_proj_a", "ssm_alpha"),
        ("linear_attn.in_proj_b", "ssm_beta"),
        ("linear_attn.norm", "ssm_norm"),
        ("linear_attn.out_proj", "ssm_out"),
    ],
    keys: &[
        EXPERT_KEYS[0],
        EXPERT_KEYS[1],
        (&["linear_conv_kernel_dim"], "ssm.conv_kernel", Kind::Count),
        (&["linear_key_head_dim"], "ssm.state_size", Kind::Count),
        (&["linear_num_key_heads"], "ssm.group_count", Kind::Count),
        (
            &["linear_num_value_heads"],
            "ssm.time_step_rank",
            Kind::Count,
        ),
        (
            &["full_attention_interval"],
            "full_attention_interval",
            Kind::Count,
        ),
    ],
    map: |name| {
        if name.ends_with("ssm_norm.weight") {
            None
        } else {
            norms_plus_one(name).or(decays(name))
        }
    },
    blocks: true,
    cut: qwen3next_cut,
    more: qwen3next_keys,
    ..PLAIN
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        hf: &["Qwen2ForCausalLM", "Qwen2Model"],
        arch: "qwen2",
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-6}"#,
        more: qwen_windows,
        ..PLAIN
    },
    Family {
        hf: &["Qwen2MoeForCausalLM"],
        arch: "qwen2moe",
        only: ALL_SPARSE,
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-6}"#,
        keys: EXPERT_KEYS,
        more: |config, key| {
            normalised(config, key, false)?;
            qwen_windows(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["Qwen3ForCausalLM", "Qwen3Model"],
        arch: "qwen3",
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "head_dim": 128}"#,
        more: qwen_windows,
        ..PLAIN
    },
    Family {
        hf: &["Qwen3MoeForCausalLM"],
        arch: "qwen3moe",
        only: ALL_SPARSE,
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-6}"#,
        keys: EXPERT_KEYS,
        more: |config, key| {
            normalised(config, key, true)?;
            qwen_windows(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["Qwen3NextForCausalLM"],
        arch: "qwen3next",
        only: ALL_SPARSE,
        more: |config, key| {
            normalised(config, key, true)?;
            qwen3next_keys(config, key)
        },
        ..QWEN3_NEXT
    },
    Family {
        hf: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
        arch: "qwen35",
        reorder: tile_heads,
        more: qwen35_keys,
        ..QWEN3_NEXT
    },
    Family {
        hf: &[
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ],
        arch: "qwen35moe",
        reorder: tile_heads,
        more: qwen35_keys,
        ..QWEN3_NEXT
    },
    Family {
        hf: &[
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
        ],
        arch: "qwen2vl",
        defaults: r#"{"rope_theta": 1000000.0, "rms_norm_eps": 1e-6}"#,
        more: |config, key| {
            sections(config, key)?;
            qwen_windows(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["Qwen3VLForConditionalGeneration"],
        arch: "qwen3vl",
        defaults: r#"{"rope_theta": 5000000.0, "rms_norm_eps": 1e-6, "head_dim": 128}"#,
        more: qwen3vl_keys,
        ..PLAIN
    },
    Family {
        hf: &["Qwen3VLMoeForConditionalGeneration"],
        arch: "qwen3vlmoe",
        defaults: r#"{"rope_theta": 5000000.0, "rms_norm_eps": 1e-6, "head_dim": 128}"#,
        only: ALL_SPARSE,
        keys: EXPERT_KEYS,
        transpose: |part| part.ends_with("_exps").then_some(Transpose::BeforeCut),
        more: |config, key| {
            normalised(config, key, true)?;
            qwen3vl_keys(config, key)
        },
        ..PLAIN
    },
];

/// How a head's pairs are divided among the three parts of a position in a picture.
fn sections(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let sections = config.rope_counts("mrope_section")?;
    let mut sections = sections.ok_or_else(|| config.missing("mrope_section"))?;
    sections.resize(4, 0);
    key(
        "rope.dimension_sections",
        Value::Array(Array::I32(sections)),
    );
    Ok(())
}

/// Layers that also get features of pictures.
fn qwen3vl_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let indices = config.get(&["vision_config"]).and_then(|(_, vision)| {
        vision
            .get("deepstack_visual_indexes")?
            .as_array()
            .map(Vec::len)
    });
    key("n_deepstack_layers", (indices.unwrap_or(0) as u32).into());
    sections(config, key)
}

/// Windows of Qwen 2 and 3, if they are used.
fn qwen_windows(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    if config.opt_bool(&["use_sliding_window"])? != Some(true) {
        return Ok(());
    }
    key(
        "attention.sliding_window",
        config.u32("sliding_window")?.into(),
    );
    let windows: Vec<bool> = match config.opt_strs("layer_types")? {
        Some(layers) => layers
            .iter()
            .map(|kind| *kind == "sliding_attention")
            .collect(),
        None => {
            let first = config.opt_u32(&["max_window_layers"])?.unwrap_or(0);
            (0..config.u32("num_hidden_layers")?.min(MAX_HEAD))
                .map(|i| i >= first)
                .collect()
        }
    };
    key(
        "attention.sliding_window_pattern",
        Value::Array(Array::Bool(windows)),
    );
    Ok(())
}

fn qwen3next_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let inner = config
        .u32("linear_value_head_dim")?
        .checked_mul(config.u32("linear_num_value_heads")?);
    key(
        "ssm.inner_size",
        inner
            .ok_or_else(|| config.refuse("linear_value_head_dim is too large"))?
            .into(),
    );
    if let Some(layers) = config.opt_strs("layer_types")? {
        let recurrent = layers
            .iter()
            .map(|kind| *kind == "linear_attention")
            .collect();
        key(
            "attention.recurrent_layers",
            Value::Array(Array::Bool(recurrent)),
        );
    }
    partial_rope(config, key)
}

fn qwen35_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let mut sections = config
        .rope_counts("mrope_section")?
        .unwrap_or(vec![11, 11, 10]);
    sections.resize(4, 0);
    key(
        "rope.dimension_sections",
        Value::Array(Array::I32(sections)),
    );
    qwen3next_keys(config, key)
}

/// A number of heads, or the width of one.
fn delta_size(config: &Config, name: &str) -> Result<usize, Failure> {
    match config.u32(name)? {
        n if n <= MAX_HEAD => Ok(n as usize),
        n => Err(config.refuse(format_args!("{name} is {n}, more than {MAX_HEAD}"))),
    }
}

/// Value heads of the checkpoint are sorted by the key head that they share; those of GGUF files
/// have the first of each key head before the second ones.
fn tile_heads(config: &Config, part: &str) -> Result<Option<Reorder>, Failure> {
    let number = |name: &str| delta_size(config, name);
    let (n_k, n_v) = (
        number("linear_num_key_heads")?,
        number("linear_num_value_heads")?,
    );
    let (dim_k, dim_v) = (
        number("linear_key_head_dim")?,
        number("linear_value_head_dim")?,
    );
    let n_shared = n_v.checked_div(n_k).unwrap_or(0);
    let tiled = |first: usize, n: usize| {
        let heads = (0..n_shared).flat_map(move |i| (0..n_k).map(move |head| head * n_shared + i));
        heads
            .map(move |head| Run {
                first: first + head * n,
                n,
                step: 1,
            })
            .collect::<Vec<Run>>()
    };
    Ok(match part {
        "attn_qkv" | "ssm_conv1d" => {
            // After the rows of queries and keys.
            let first = 2 * n_k * dim_k;
            Some(Reorder::Rows(
                [
                    vec![Run {
                        first: 0,
                        n: first,
                        step: 1,
                    }],
                    tiled(first, dim_v),
                ]
                .concat(),
            ))
        }
        "attn_gate" => Some(Reorder::Rows(tiled(0, dim_v))),
        "ssm_alpha" | "ssm_beta" | "ssm_a" | "ssm_dt" => Some(Reorder::Rows(tiled(0, 1))),
        "ssm_out" => Some(Reorder::Columns(tiled(0, dim_v))),
        _ => None,
    })
}

/// Each key head of the checkpoint has its rows of queries, keys, values and gates; GGUF files have
/// all queries, then all keys, then all values, and the gates for themselves.
fn qwen3next_cut(config: &Config, n_rows: usize) -> Result<Parts, Failure> {
    let number = |name: &str| delta_size(config, name);
    let (n_head, dim_k) = (
        number("linear_num_key_heads")?,
        number("linear_key_head_dim")?,
    );
    let dim_v = number("linear_num_value_heads")?
        .checked_div(n_head)
        .unwrap_or(0)
        * number("linear_value_head_dim")?;
    let whole = 2 * (dim_k + dim_v);
    if n_head == 0 || n_rows != n_head * whole {
        return Err(config.refuse(format_args!(
            "in_proj_qkvz has {n_rows} rows, and {n_head} heads of {whole}"
        )));
    }
    let part = |start: usize, n: usize| {
        (0..n_head).map(move |head| Run {
            first: head * whole + start,
            n,
            step: 1,
        })
    };
    let qkv = part(0, dim_k)
        .chain(part(dim_k, dim_k))
        .chain(part(2 * dim_k, dim_v));
    Ok(vec![
        qkv.collect(),
        part(2 * dim_k + dim_v, dim_v).collect(),
    ])
}
