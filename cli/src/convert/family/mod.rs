//! The families: how each one's configuration and tensors are called at Hugging Face and in GGUF
//! files.
//!
//! Names and values of the GGUF side are those that llama.cpp's `convert_hf_to_gguf.py` writes;
//! `tests/convert.rs` compares with it. Where that leaves out what the configuration says (windows,
//! factors, bases), the key is written only if it says something unusual.

mod deepseek_glm;
mod dense;
mod encoders;
mod gemma;
mod gpt;
mod granite;
mod llama;
mod mixtures;
mod qwen;
mod recurrent;
mod rwkv;

use super::config::Config;
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};
use std::ops::Range;

/// A family of models.
pub(super) struct Family {
    /// What `architectures` of `config.json` says.
    pub(super) hf: &'static [&'static str],
    /// Whether it is this one of several families that Hugging Face calls the same.
    fits: fn(&Config) -> bool,
    /// What `general.architecture` says.
    pub(super) arch: &'static str,
    /// Keys that `config.json` may leave out, as JSON: what transformers' configuration class
    /// takes instead.
    pub(super) defaults: &'static str,
    /// Keys that the GGUF file does not tell, as JSON: the values with which the model is what its
    /// readers take for granted.
    pub(super) only: &'static str,
    /// Tensors beside those of [`NAMES`], or called differently.
    pub(super) names: &'static [(&'static str, &'static str)],
    /// Keys beside those of [`KEYS`].
    pub(super) keys: &'static [Key],
    /// Keys of [`KEYS`] and of the rope that its files do not have.
    pub(super) no_keys: &'static [&'static str],
    /// Tensors that are not written.
    pub(super) skips: &'static [&'static str],
    /// The name of a second tensor with the same values, by the first one's name in the GGUF file.
    pub(super) copy: fn(&str) -> Option<String>,
    /// Whether rows of queries and keys are reordered: Hugging Face rotates value `i` of a head
    /// with value `i + n/2`, GGUF files of this family have them side by side.
    pub(super) pairs: bool,
    /// What happens to the values of a tensor, by its name in the GGUF file.
    pub(super) map: fn(&str) -> Option<Map>,
    /// What values of a tensor are multiplied by, by its name in the GGUF file.
    pub(super) factors: fn(&Config, &str) -> Result<Vec<Factor>, Failure>,
    /// Modules with one number in each layer, and the keys that have them all.
    pub(super) scalars: &'static [(&'static str, &'static str)],
    /// Whether blocks for multi-token prediction are written.
    pub(super) blocks: bool,
    /// Changes the shape of a tensor, by its part in the GGUF file (`ssm_norm`).
    pub(super) reshape: fn(&Config, &str, &mut Vec<usize>) -> Result<(), Failure>,
    /// The parts of a tensor that is cut, from its number of rows; an expert's, if there are
    /// several.
    pub(super) cut: fn(&Config, usize) -> Result<Parts, Failure>,
    /// The tensors whose matrices are transposed.
    pub(super) transpose: fn(&str) -> Option<Transpose>,
    /// The tensors whose rows or columns are reordered.
    pub(super) reorder: fn(&Config, &str) -> Result<Option<Reorder>, Failure>,
    /// Whether the head's width is written even if the file does not say it.
    pub(super) head_dim: bool,
    /// Special tokens that the other files do not tell: their names in GGUF files, and their
    /// texts.
    pub(super) special: &'static [(&'static str, &'static str)],
    /// What the files say about a space before a text.
    pub(super) spaces: Spaces,
    /// Keys that are more than a copied value.
    pub(super) more: fn(&Config, Put<'_>) -> Result<(), Failure>,
    /// Tensors made from the configuration, such as factors of the rope.
    pub(super) extra: fn(&Config) -> Result<Vec<Extra>, Failure>,
}

/// `n` rows or columns from `first` on, every `step`.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Run {
    pub(super) first: usize,
    pub(super) n: usize,
    pub(super) step: usize,
}

/// A list of rows for each part.
pub(super) type Parts = Vec<Vec<Run>>;

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Transpose {
    BeforeCut,
    AfterCut,
}

/// All of a tensor's rows, or all values of each.
pub(super) enum Reorder {
    Rows(Vec<Run>),
    /// With steps of 1.
    Columns(Vec<Run>),
    /// All rows from one on.
    RowsFrom(usize),
}

/// Of a value.
pub(super) type Map = fn(f32) -> f32;

/// Rows, and what their values are multiplied by.
pub(super) type Factor = (Range<usize>, f32);
/// Writes a key behind the architecture.
type Put<'a> = &'a mut dyn FnMut(&str, Value);

/// A vector by its name in the GGUF file.
type Extra = (&'static str, Vec<f32>);

/// What `tokenizer.ggml.add_space_prefix` says.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Spaces {
    /// The key is not there.
    Unsaid,
    /// What `add_prefix_space` of `tokenizer_config.json` says, if it is there.
    Setting,
    /// That texts get none.
    Never,
    /// What the model of SentencePiece was trained with.
    Trained,
}

/// How a value of `config.json` becomes one of the GGUF file: its names, of which the first counts
/// that is there, the key behind the architecture, and the type.
pub(super) type Key = (&'static [&'static str], &'static str, Kind);

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Count,
    Number,
    Flag,
    /// A list with a text per layer: whether it is `sliding_attention`.
    Sliding,
    /// A function's name: 1 for `softmax`, 2 for `sigmoid`.
    Gating,
}

/// Keys of most families.
#[rustfmt::skip]
pub(super) const KEYS: &[Key] = &[
    (&["max_position_embeddings", "n_ctx", "n_positions", "max_length", "max_sequence_length", "model_max_length"],
     "context_length", Kind::Count),
    (&["hidden_size", "n_embd", "dim"], "embedding_length", Kind::Count),
    (&["prefix_dense_intermediate_size", "intermediate_size", "n_inner", "hidden_dim"], "feed_forward_length", Kind::Count),
    (&["num_attention_heads", "n_head", "n_heads"], "attention.head_count", Kind::Count),
    (&["num_key_value_heads", "n_kv_heads"], "attention.head_count_kv", Kind::Count),
    (&["head_dim"], "attention.key_length", Kind::Count),
    (&["head_dim"], "attention.value_length", Kind::Count),
    (&["rms_norm_eps", "norm_eps"], "attention.layer_norm_rms_epsilon", Kind::Number),
    (&["layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"], "attention.layer_norm_epsilon", Kind::Number),
    (&["num_local_experts", "num_experts", "n_routed_experts"], "expert_count", Kind::Count),
    (&["num_experts_per_tok", "num_experts_per_token"], "expert_used_count", Kind::Count),
    (&["n_group"], "expert_group_count", Kind::Count),
    (&["topk_group"], "expert_group_used_count", Kind::Count),
    (&["score_function", "scoring_func", "moe_router_activation_func", "expert_selection_fn"], "expert_gating_func", Kind::Gating),
];

/// Modules of most families, without `model.`, `layers.N.` and the ends `.weight` and `.bias`; `*`
/// stands for the number of an expert; a name with its number and end counts first. What is called
/// `a + b` in the GGUF file is cut; what is called `a[2]` is the third piece of `a`, what is called
/// `a!` has that name, whatever the end, and `/a` is no part of a layer.
pub(super) const NAMES: &[(&str, &str)] = &[
    ("embed_tokens", "token_embd"),
    ("norm", "output_norm"),
    ("lm_head", "output"),
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.experts.*.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.*.up_proj", "ffn_up_exps"),
    ("mlp.experts.*.down_proj", "ffn_down_exps"),
    (
        "mlp.experts.gate_up_proj",
        "ffn_gate_exps.weight + ffn_up_exps.weight",
    ),
    ("mlp.experts.down_proj", "ffn_down_exps.weight"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mamba.A_log", "ssm_a"),
    ("mamba.D", "ssm_d"),
    ("mamba.b_layernorm", "ssm_b_norm"),
    ("mamba.c_layernorm", "ssm_c_norm"),
    ("mamba.conv1d", "ssm_conv1d"),
    ("mamba.dt_bias", "ssm_dt.bias"),
    ("mamba.dt_layernorm", "ssm_dt_norm"),
    ("mamba.dt_proj", "ssm_dt"),
    ("mamba.in_proj", "ssm_in"),
    ("mamba.norm", "ssm_norm"),
    ("mamba.out_proj", "ssm_out"),
    ("mamba.x_proj", "ssm_x"),
];

const SILU: &str = r#"{"hidden_act": ["silu", "swish"]}"#;

/// A family whose tensors and keys are the usual ones.
const PLAIN: Family = Family {
    hf: &[],
    fits: |_| true,
    arch: "",
    defaults: "{}",
    only: SILU,
    names: &[],
    keys: &[],
    no_keys: &[],
    skips: &[],
    copy: |_| None,
    pairs: false,
    map: |_| None,
    factors: |_, _| Ok(Vec::new()),
    scalars: &[],
    blocks: false,
    reshape: |_, _, _| Ok(()),
    cut: halves,
    transpose: |_| None,
    reorder: |_, _| Ok(None),
    head_dim: false,
    special: &[],
    spaces: Spaces::Unsaid,
    more: |_, _| Ok(()),
    extra: llama3_factors,
};

/// Keys that name the widths of experts.
const EXPERT_KEYS: &[Key] = &[
    (
        &["moe_intermediate_size"],
        "expert_feed_forward_length",
        Kind::Count,
    ),
    (
        &["shared_expert_intermediate_size"],
        "expert_shared_feed_forward_length",
        Kind::Count,
    ),
];

const WINDOW: Key = (&["sliding_window"], "attention.sliding_window", Kind::Count);

/// Experts that every token uses, and the bias that experts are chosen with.
const SHARED_EXPERTS: [(&str, &str); 4] = [
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
];

/// Every family that can be converted, a list for each file; of those that are called the same the
/// first that fits counts.
static FAMILIES: &[&[Family]] = &[
    llama::FAMILIES,
    granite::FAMILIES,
    qwen::FAMILIES,
    gemma::FAMILIES,
    deepseek_glm::FAMILIES,
    dense::FAMILIES,
    gpt::FAMILIES,
    mixtures::FAMILIES,
    recurrent::FAMILIES,
    rwkv::FAMILIES,
    encoders::FAMILIES,
];

/// The first of `hf` that is known.
pub(super) fn by_name(config: &Config) -> Result<&'static Family, Failure> {
    let names = config.opt_strs("architectures")?.unwrap_or_default();
    let all = || FAMILIES.iter().copied().flatten();
    let fits = |name: &str, family: &Family| family.hf.contains(&name) && (family.fits)(config);
    let family = names
        .iter()
        .find_map(|name| all().find(|family| fits(name, family)));
    family.ok_or_else(|| {
        let known: Vec<&str> = all().flat_map(|family| family.hf).copied().collect();
        config.refuse(format_args!(
            "architectures is {names:?}, and there are {}",
            known.join(", ")
        ))
    })
}

fn halves(config: &Config, n_rows: usize) -> Result<Parts, Failure> {
    match n_rows.is_multiple_of(2) {
        true => Ok([0, n_rows / 2]
            .map(|first| {
                vec![Run {
                    first,
                    n: n_rows / 2,
                    step: 1,
                }]
            })
            .into()),
        false => Err(config.refuse(format_args!("{n_rows} rows have no halves"))),
    }
}

/// Weights of norms are stored less one.
fn norms_plus_one(name: &str) -> Option<Map> {
    name.ends_with("norm.weight").then_some(|x| x + 1.0)
}

/// Decays are stored as logarithms of what is negated.
fn decays(name: &str) -> Option<Map> {
    name.ends_with(".ssm_a").then_some(|x| -x.exp())
}

fn rope_dimensions(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    key("rope.dimension_count", config.head_dim()?.into());
    Ok(())
}

fn partial_rope(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let share = config.rope_f32("partial_rotary_factor")?.unwrap_or(1.0);
    key(
        "rope.dimension_count",
        ((share * config.head_dim()? as f32) as u32).into(),
    );
    Ok(())
}

/// Whether there are mixtures.
fn has_experts(config: &Config) -> bool {
    let n = config.opt_u32(&[
        "num_local_experts",
        "moe_every_n_layers",
        "num_experts_per_tok",
    ]);
    n.is_ok_and(|n| n.is_some_and(|n| n > 0))
}

/// Whether the weights of experts are divided by their sum, where it is not what files of the
/// architecture mean without.
fn normalised(config: &Config, key: Put<'_>, usual: bool) -> Result<(), Failure> {
    if config.opt_bool(&["norm_topk_prob"])? == Some(!usual) {
        key("expert_weights_norm", (!usual).into());
    }
    Ok(())
}

/// Which layers have windows, where it is not all but every `n`-th one, as readers take for
/// granted.
fn window_pattern(config: &Config, key: Put<'_>, n: usize) -> Result<(), Failure> {
    let Some(layers) = config.opt_strs("layer_types")? else {
        if let Some(other) = config
            .opt_u32(&["sliding_window_pattern"])?
            .filter(|&other| other as usize != n)
        {
            key("attention.sliding_window_pattern", other.into());
        }
        return Ok(());
    };
    let windows: Vec<bool> = layers
        .iter()
        .map(|kind| *kind == "sliding_attention")
        .collect();
    if windows
        .iter()
        .enumerate()
        .any(|(i, &window)| window != (i % n < n - 1))
    {
        key(
            "attention.sliding_window_pattern",
            Value::Array(Array::Bool(windows)),
        );
    }
    Ok(())
}

fn no_scaling(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    if let Some(kind) = config.rope_type().filter(|kind| *kind != "dynamic") {
        return Err(config.refuse(format_args!(
            "rope type {kind}, and files of this family say that there is none"
        )));
    }
    key("rope.scaling.type", "none".into());
    Ok(())
}

/// Factors of Llama 3.1's rope: periods that are long against the first context are stretched,
/// short ones are not, and in between there is a passage (transformers'
/// `_compute_llama3_parameters`).
fn llama3_factors(config: &Config) -> Result<Vec<Extra>, Failure> {
    if config.rope_type() != Some("llama3") {
        return Ok(Vec::new());
    }
    let number =
        |name: &str, default: f32| Ok::<_, Failure>(config.rope_f32(name)?.unwrap_or(default));
    let (theta, factor) = (number("rope_theta", 10000.0)?, number("factor", 8.0)?);
    let (low, high) = (
        number("low_freq_factor", 1.0)?,
        number("high_freq_factor", 4.0)?,
    );
    let n_ctx = number("original_max_position_embeddings", 8192.0)?;
    let n = config.head_dim()?;
    let factors = (0..n).step_by(2).map(|i| {
        let frequency = 1.0 / theta.powf(i as f32 / n as f32);
        let period = 2.0 * std::f32::consts::PI / frequency;
        if period < n_ctx / high {
            1.0
        } else if period > n_ctx / low {
            factor
        } else {
            let smooth = (n_ctx / period - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    });
    Ok(vec![("rope_freqs.weight", factors.collect())])
}

/// YaRN's settings that only some models have.
fn yarn_keys(family: &Family, config: &Config, key: Put<'_>) -> Result<(), Failure> {
    // The file has a factor on scores for latent attention only, and no rope's factor beside it.
    let number = |name: &str| Ok::<_, Failure>(config.rope_f32(name)?.filter(|x| *x != 0.0));
    let (of_rope, of_scores) = (number("mscale")?, number("mscale_all_dim")?);
    let known = match (of_rope, of_scores) {
        (_, None) => true,
        (of_rope, Some(of_scores))
            if matches!(family.arch, "deepseek2" | "mistral3" | "mistral4") =>
        {
            of_rope == Some(of_scores)
        }
        (of_rope, _) => of_rope.is_none() || config.rope_f32("attention_factor")?.is_some(),
    };
    if !known {
        return Err(config.refuse(
            "mscale and mscale_all_dim of the rope are something that the file cannot say",
        ));
    }
    // Whether the range is rounded, where it is not what readers take for granted.
    let truncate = config.rope_bool("truncate")?.unwrap_or(true);
    if truncate != (family.arch != "gpt-oss") {
        key("rope.scaling.yarn_truncate", truncate.into());
    }
    Ok(())
}

/// Refuses what the files of `family` cannot say.
fn check_only(family: &Family, config: &Config) -> Result<(), Failure> {
    let Ok(serde_json::Value::Object(only)) = serde_json::from_str(family.only) else {
        unreachable!("{}", family.only)
    };
    for (name, known) in &only {
        let known = known.as_array().map_or(&[][..], Vec::as_slice);
        if let Some((_, found)) = config
            .get(&[name])
            .filter(|(_, found)| !known.iter().any(|known| same(known, found)))
        {
            return Err(config.refuse(format_args!(
                "{name} is {found}, of which files of {} say nothing",
                family.arch
            )));
        }
    }
    match config.rope_type_swa() {
        None => Ok(()),
        Some(kind) => Err(config.refuse(format_args!(
            "rope type {kind} of layers with windows is not known"
        ))),
    }
}

/// Whether values are equal; 1 and 1.0 are.
fn same(a: &serde_json::Value, b: &serde_json::Value) -> bool {
    match (a.as_f64(), b.as_f64(), a.as_array(), b.as_array()) {
        (Some(a), Some(b), ..) => a == b,
        (.., Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        _ => a == b,
    }
}

/// Writes the keys of `family`, in the order of the tables; behind the layers are `n_block` blocks
/// for multi-token prediction.
pub(super) fn write_keys(
    family: &Family,
    config: &Config,
    (n_layer, n_block): (u32, u32),
    write: &mut dyn FnMut(String, Value),
) -> Result<(), Failure> {
    check_only(family, config)?;
    let mut key = |name: &str, value: Value| {
        // Readers take this base for granted where the key is left out.
        let is_other_base = name == "rope.freq_base" && !matches!(value, Value::F32(10000.0));
        if !family.no_keys.contains(&name) || is_other_base {
            write(format!("{}.{name}", family.arch), value);
        }
    };
    key("block_count", n_layer.saturating_add(n_block).into());
    if n_block > 0 {
        key("nextn_predict_layers", n_block.into());
    }
    for (names, name, kind) in KEYS.iter().chain(family.keys) {
        let value = match kind {
            Kind::Count => match config.get(names) {
                // A number for each layer.
                Some((name, value)) if value.is_array() => config
                    .opt_counts(&name)?
                    .map(|counts| Value::Array(Array::I32(counts))),
                _ => config.opt_u32(names)?.map(Value::from),
            },
            Kind::Number => config.opt_f32(names)?.map(Value::from),
            Kind::Flag => config.opt_bool(names)?.map(Value::from),
            Kind::Gating => match config
                .get(names)
                .map(|(name, value)| (name, value.as_str()))
            {
                None => None,
                Some((_, Some("softmax"))) => Some(1u32.into()),
                Some((_, Some("sigmoid"))) => Some(2u32.into()),
                Some((name, _)) => {
                    return Err(
                        config.refuse(format_args!("{name} is neither softmax nor sigmoid"))
                    );
                }
            },
            Kind::Sliding => {
                let list = config.opt_strs(names[0])?;
                list.map(|list| {
                    Value::Array(Array::Bool(
                        list.iter()
                            .map(|kind| *kind == "sliding_attention")
                            .collect(),
                    ))
                })
            }
        };
        if let Some(value) = value {
            key(name, value);
        }
    }
    if let Some(theta) = config.rope_f32("rope_theta")? {
        key("rope.freq_base", theta.into());
    }
    if let Some(theta) = config.rope_theta_swa()? {
        key("rope.freq_base_swa", theta.into());
    }
    match config.rope_type() {
        // `dynamic` changes nothing within the context that the model was trained on. The factors
        // of the others are tensors.
        None | Some("dynamic") => {}
        Some("llama3") if !matches!(family.arch, "phi3" | "gemma4") => {}
        Some("proportional") if family.arch == "gemma4" => {}
        Some("su" | "longrope") if family.arch == "phi3" => {
            key("rope.scaling.type", "longrope".into())
        }
        Some(kind @ ("linear" | "yarn")) => {
            key("rope.scaling.type", kind.into());
            let numbers: [(&str, &str); 5] = [
                ("factor", "factor"),
                ("extrapolation_factor", "yarn_ext_factor"),
                ("attention_factor", "yarn_attn_factor"),
                ("beta_fast", "yarn_beta_fast"),
                ("beta_slow", "yarn_beta_slow"),
            ];
            for (from, to) in numbers {
                if let Some(number) = config.rope_f32(from)? {
                    key(&format!("rope.scaling.{to}"), number.into());
                }
            }
            if kind == "yarn" {
                yarn_keys(family, config, &mut key)?;
            }
            if let Some(n) = config.rope_f32("original_max_position_embeddings")? {
                key("rope.scaling.original_context_length", (n as u32).into());
            }
        }
        Some(kind) => {
            return Err(config.refuse(format_args!(
                "rope type {kind} is not known for {}",
                family.arch
            )));
        }
    }
    (family.more)(config, &mut key)
}
