//! What a family is: its names at Hugging Face, its keys and tensors in GGUF files, and what most
//! families have in common.

use crate::convert::config::Config;
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};
use std::ops::Range;

/// A family of models.
pub(in crate::convert) struct Family {
    /// What `architectures` of `config.json` says.
    pub(in crate::convert) hf: &'static [&'static str],
    /// Whether it is this one of several families that Hugging Face calls the same.
    pub(super) fits: fn(&Config) -> bool,
    /// What `general.architecture` says.
    pub(in crate::convert) arch: &'static str,
    /// Keys that `config.json` may leave out, as JSON: what transformers' configuration class
    /// takes instead.
    pub(in crate::convert) defaults: &'static str,
    /// Keys that the GGUF file does not tell, as JSON: the values with which the model is what its
    /// readers take for granted.
    pub(in crate::convert) only: &'static str,
    /// Tensors beside those of [`NAMES`], or called differently.
    pub(in crate::convert) names: &'static [(&'static str, &'static str)],
    /// Keys beside those of [`KEYS`].
    pub(in crate::convert) keys: &'static [Key],
    /// Keys of [`KEYS`] and of the rope that its files do not have.
    pub(in crate::convert) no_keys: &'static [&'static str],
    /// Tensors that are not written.
    pub(in crate::convert) skips: &'static [&'static str],
    /// The name of a second tensor with the same values, by the first one's name in the GGUF file.
    pub(in crate::convert) copy: fn(&str) -> Option<String>,
    /// Whether rows of queries and keys are reordered: Hugging Face rotates value `i` of a head
    /// with value `i + n/2`, GGUF files of this family have them side by side.
    pub(in crate::convert) pairs: bool,
    /// What happens to the values of a tensor, by its name in the GGUF file.
    pub(in crate::convert) map: fn(&str) -> Option<Map>,
    /// What values of a tensor are multiplied by, by its name in the GGUF file.
    pub(in crate::convert) factors: fn(&Config, &str) -> Result<Vec<Factor>, Failure>,
    /// Modules with one number in each layer, and the keys that have them all.
    pub(in crate::convert) scalars: &'static [(&'static str, &'static str)],
    /// Whether blocks for multi-token prediction are written.
    pub(in crate::convert) blocks: bool,
    /// Changes the shape of a tensor, by its part in the GGUF file (`ssm_norm`).
    pub(in crate::convert) reshape: fn(&Config, &str, &mut Vec<usize>) -> Result<(), Failure>,
    /// The parts of a tensor that is cut, from its number of rows; an expert's, if there are
    /// several.
    pub(in crate::convert) cut: fn(&Config, usize) -> Result<Parts, Failure>,
    /// The tensors whose matrices are transposed.
    pub(in crate::convert) transpose: fn(&str) -> Option<Transpose>,
    /// The tensors whose rows or columns are reordered.
    pub(in crate::convert) reorder: fn(&Config, &str) -> Result<Option<Reorder>, Failure>,
    /// Whether the head's width is written even if the file does not say it.
    pub(in crate::convert) head_dim: bool,
    /// Special tokens that the other files do not tell: their names in GGUF files, and their
    /// texts.
    pub(in crate::convert) special: &'static [(&'static str, &'static str)],
    /// What the files say about a space before a text.
    pub(in crate::convert) spaces: Spaces,
    /// Keys that are more than a copied value.
    pub(in crate::convert) more: fn(&Config, Put<'_>) -> Result<(), Failure>,
    /// Tensors made from the configuration, such as factors of the rope.
    pub(in crate::convert) extra: fn(&Config) -> Result<Vec<Extra>, Failure>,
}

/// `n` rows or columns from `first` on, every `step`.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::convert) struct Run {
    pub(in crate::convert) first: usize,
    pub(in crate::convert) n: usize,
    pub(in crate::convert) step: usize,
}

/// A list of rows for each part.
pub(in crate::convert) type Parts = Vec<Vec<Run>>;

#[derive(Clone, Copy, PartialEq)]
pub(in crate::convert) enum Transpose {
    BeforeCut,
    AfterCut,
}

/// All of a tensor's rows, or all values of each.
pub(in crate::convert) enum Reorder {
    Rows(Vec<Run>),
    /// With steps of 1.
    Columns(Vec<Run>),
    /// All rows from one on.
    RowsFrom(usize),
}

/// Of a value.
pub(in crate::convert) type Map = fn(f32) -> f32;

/// Rows, and what their values are multiplied by.
pub(in crate::convert) type Factor = (Range<usize>, f32);
/// Writes a key behind the architecture.
pub(super) type Put<'a> = &'a mut dyn FnMut(&str, Value);

/// A vector by its name in the GGUF file.
pub(in crate::convert) type Extra = (&'static str, Vec<f32>);

/// What `tokenizer.ggml.add_space_prefix` says.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::convert) enum Spaces {
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
pub(in crate::convert) type Key = (&'static [&'static str], &'static str, Kind);

#[derive(Clone, Copy)]
pub(in crate::convert) enum Kind {
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
pub(in crate::convert) const KEYS: &[Key] = &[
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
pub(in crate::convert) const NAMES: &[(&str, &str)] = &[
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

pub(super) const SILU: &str = r#"{"hidden_act": ["silu", "swish"]}"#;

/// A family whose tensors and keys are the usual ones.
pub(super) const PLAIN: Family = Family {
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
pub(super) const EXPERT_KEYS: &[Key] = &[
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

pub(super) const WINDOW: Key = (&["sliding_window"], "attention.sliding_window", Kind::Count);

/// Experts that every token uses, and the bias that experts are chosen with.
pub(super) const SHARED_EXPERTS: [(&str, &str); 4] = [
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
];

pub(super) fn halves(config: &Config, n_rows: usize) -> Result<Parts, Failure> {
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
pub(super) fn norms_plus_one(name: &str) -> Option<Map> {
    name.ends_with("norm.weight").then_some(|x| x + 1.0)
}

/// Decays are stored as logarithms of what is negated.
pub(super) fn decays(name: &str) -> Option<Map> {
    name.ends_with(".ssm_a").then_some(|x| -x.exp())
}

pub(super) fn rope_dimensions(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    key("rope.dimension_count", config.head_dim()?.into());
    Ok(())
}

pub(super) fn partial_rope(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let share = config.rope_f32("partial_rotary_factor")?.unwrap_or(1.0);
    key(
        "rope.dimension_count",
        ((share * config.head_dim()? as f32) as u32).into(),
    );
    Ok(())
}

/// Whether there are mixtures.
pub(super) fn has_experts(config: &Config) -> bool {
    let n = config.opt_u32(&[
        "num_local_experts",
        "moe_every_n_layers",
        "num_experts_per_tok",
    ]);
    n.is_ok_and(|n| n.is_some_and(|n| n > 0))
}

/// Whether the weights of experts are divided by their sum, where it is not what files of the
/// architecture mean without.
pub(super) fn normalised(config: &Config, key: Put<'_>, usual: bool) -> Result<(), Failure> {
    if config.opt_bool(&["norm_topk_prob"])? == Some(!usual) {
        key("expert_weights_norm", (!usual).into());
    }
    Ok(())
}

/// Which layers have windows, where it is not all but every `n`-th one, as readers take for
/// granted.
pub(super) fn window_pattern(config: &Config, key: Put<'_>, n: usize) -> Result<(), Failure> {
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

pub(super) fn no_scaling(config: &Config, key: Put<'_>) -> Result<(), Failure> {
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
pub(super) fn llama3_factors(config: &Config) -> Result<Vec<Extra>, Failure> {
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
