//! The families: how each one's configuration and tensors are called at Hugging Face and in GGUF files.
//!
//! Names and values of the GGUF side are those that llama.cpp's `convert_hf_to_gguf.py` writes; `tests/convert.rs` compares
//! with it. Where that leaves out what the configuration says (windows, factors, bases), the key is written only if it says
//! something unusual.

use super::Failure;
use super::config::{Config, MAX_HEAD};
use ruvllm::gguf::{Array, Value};

/// A family of models.
pub(super) struct Family {
    /// What `architectures` of `config.json` says.
    pub(super) hf: &'static [&'static str],
    /// Whether it is this one of several families that Hugging Face calls the same.
    fits: fn(&Config) -> bool,
    /// What `general.architecture` says.
    pub(super) arch: &'static str,
    /// Keys that `config.json` may leave out, as JSON: what transformers' configuration class takes instead.
    pub(super) defaults: &'static str,
    /// Keys that the GGUF file does not tell, as JSON: the values with which the model is what its readers take for granted.
    pub(super) only: &'static str,
    /// Tensors beside those of [`NAMES`], or called differently.
    pub(super) names: &'static [(&'static str, &'static str)],
    /// Keys beside those of [`KEYS`].
    pub(super) keys: &'static [Key],
    /// Keys of [`KEYS`] and of the rope that its files do not have.
    pub(super) no_keys: &'static [&'static str],
    /// Tensors that are not written.
    pub(super) skips: &'static [&'static str],
    /// Whether rows of queries and keys are reordered: Hugging Face rotates value `i` of a head with value `i + n/2`, GGUF
    /// files of this family have them side by side.
    pub(super) pairs: bool,
    /// What happens to the values of a tensor, by its name in the GGUF file.
    pub(super) map: fn(&str) -> Option<Map>,
    /// Changes the shape of a tensor, by its part in the GGUF file (`ssm_norm`).
    pub(super) reshape: fn(&Config, &str, &mut Vec<usize>) -> Result<(), Failure>,
    /// The parts of a tensor that is cut in two, from its number of rows; an expert's, if there are several.
    pub(super) cut: fn(&Config, usize) -> Result<Parts, Failure>,
    /// The tensors whose matrices are transposed.
    pub(super) transpose: fn(&str) -> Option<Transpose>,
    /// The tensors whose rows or columns are reordered.
    pub(super) reorder: fn(&Config, &str) -> Result<Option<Reorder>, Failure>,
    /// Whether the head's width is written even if the file does not say it.
    pub(super) head_dim: bool,
    /// Special tokens that the other files do not tell: their names in GGUF files, and their texts.
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

/// Two lists of rows.
pub(super) type Parts = [Vec<Run>; 2];

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
}

/// How a value of `config.json` becomes one of the GGUF file: its names, of which the first counts that is there, the key
/// behind the architecture, and the type.
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
    (&["intermediate_size", "n_inner", "hidden_dim"], "feed_forward_length", Kind::Count),
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
    (&["scoring_func"], "expert_gating_func", Kind::Gating),
];

/// Modules of most families, without `model.`, `layers.N.` and the ends `.weight` and `.bias`; `*` stands for the number of
/// an expert. What is called `a + b` in the GGUF file is cut
/// in two.
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
    ("mlp.experts.gate_up_proj", "ffn_gate_exps.weight + ffn_up_exps.weight"),
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

/// Norms before and after each part.
const SANDWICH: &[(&str, &str); 3] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// Norms after each part alone.
const AFTER: &[(&str, &str)] =
    &[("post_attention_layernorm", "post_attention_norm"), ("post_feedforward_layernorm", "post_ffw_norm")];

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
    pairs: false,
    map: |_| None,
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

const LLAMA: Family = Family {
    defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-6}"#,
    keys: &[(&["vocab_size"], "vocab_size", Kind::Count)],
    pairs: true,
    spaces: Spaces::Setting,
    more: rope_dimensions,
    ..PLAIN
};

const GRANITE: Family = Family {
    keys: &[
        (&["vocab_size"], "vocab_size", Kind::Count),
        (&["attention_multiplier"], "attention.scale", Kind::Number),
        (&["embedding_multiplier"], "embedding_scale", Kind::Number),
        (&["residual_multiplier"], "residual_scale", Kind::Number),
        (&["logits_scaling"], "logit_scale", Kind::Number),
        (&["shared_intermediate_size"], "expert_shared_feed_forward_length", Kind::Count),
    ],
    no_keys: &["attention.key_length", "attention.value_length"],
    ..LLAMA
};

/// Mixtures without dense layers.
const ALL_SPARSE: &str = r#"{"hidden_act": ["silu", "swish"], "decoder_sparse_step": [1], "mlp_only_layers": [[]]}"#;

/// Keys that name the widths of experts.
const EXPERT_KEYS: &[Key] = &[
    (&["moe_intermediate_size"], "expert_feed_forward_length", Kind::Count),
    (&["shared_expert_intermediate_size"], "expert_shared_feed_forward_length", Kind::Count),
];

const WINDOW: Key = (&["sliding_window"], "attention.sliding_window", Kind::Count);

const WITH_WINDOW: &[Key] = &[LLAMA.keys[0], WINDOW];

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
        (&["linear_num_value_heads"], "ssm.time_step_rank", Kind::Count),
        (&["full_attention_interval"], "full_attention_interval", Kind::Count),
    ],
    map: |name| if name.ends_with("ssm_norm.weight") { None } else { norms_plus_one(name).or(decays(name)) },
    cut: qwen3next_cut,
    more: qwen3next_keys,
    ..PLAIN
};

/// Names of BERT's encoders.
const BERT_NAMES: &[(&str, &str)] = &[
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
    ("classifier.dense", "cls"),
    ("classifier.out_proj", "cls.output"),
    // Of BERT's own rerankers.
    ("pooler.dense", "cls"),
    ("classifier", "cls.output"),
];

const BERT: Family = Family {
    arch: "bert",
    defaults: r#"{"layer_norm_eps": 1e-12, "type_vocab_size": 2}"#,
    only: r#"{"hidden_act": ["gelu"], "position_embedding_type": ["absolute"], "is_decoder": [false]}"#,
    names: BERT_NAMES,
    // What only pre-training needs.
    skips: &["embeddings.position_ids", "cls.predictions.", "cls.seq_relationship.", "pooler."],
    more: bert_keys,
    ..PLAIN
};

/// Its positions count from behind the number of the padding token, so that the first rows belong to none.
const XLM_ROBERTA: Family = Family {
    defaults: r#"{"layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 1}"#,
    reorder: |config, part| match part {
        "position_embd" => Ok(Some(Reorder::RowsFrom(first_position(config)? as usize))),
        _ => Ok(None),
    },
    more: |config, key| {
        let n = config.u32("max_position_embeddings")?.checked_sub(first_position(config)?);
        let n = n.ok_or_else(|| config.refuse("max_position_embeddings is not above pad_token_id"))?;
        key("context_length", n.into());
        bert_keys(config, key)
    },
    ..BERT
};

/// Experts that every token uses, and the bias that experts are chosen with.
const SHARED_EXPERTS: [(&str, &str); 4] = [
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
];

const GLM_SPECIAL: &[(&str, &str)] =
    &[("bos", "[gMASK]"), ("eot", "<|user|>"), ("unknown", "<|endoftext|>"), ("eom", "<|observation|>")];

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
        (&["moe_intermediate_size", "intermediate_size"], "expert_feed_forward_length", Kind::Count),
        (&["n_shared_experts"], "expert_shared_count", Kind::Count),
        (&["first_k_dense_replace"], "leading_dense_block_count", Kind::Count),
        (&["routed_scaling_factor"], "expert_weights_scale", Kind::Number),
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
        let n_rest = n_rest.ok_or_else(|| config.refuse(format_args!("a head has {n_rows} rows, fewer than {n}")))?;
        Ok([vec![Run { first: 0, n, step: 1 }], vec![Run { first: n, n: n_rest, step: 1 }]])
    },
    transpose: |part| (part == "attn_k_b").then_some(Transpose::AfterCut),
    more: deepseek2_keys,
    ..PLAIN
};

/// ERNIE 4.5.
const ERNIE: Family = Family {
    defaults: r#"{"rope_theta": 500000.0, "rms_norm_eps": 1e-5}"#,
    only: r#"{"hidden_act": ["silu", "swish"], "moe_layer_interval": [1]}"#,
    spaces: Spaces::Setting,
    ..PLAIN
};

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

/// Mixtures of Granite.
const GRANITE_MOE_NAMES: &[(&str, &str)] = &[
    ("block_sparse_moe.router.layer", "ffn_gate_inp"),
    ("block_sparse_moe.input_linear", "ffn_gate_exps + ffn_up_exps"),
    ("block_sparse_moe.output_linear", "ffn_down_exps"),
    ("shared_mlp.input_linear", "ffn_gate_shexp + ffn_up_shexp"),
    ("shared_mlp.output_linear", "ffn_down_shexp"),
];

/// Granite 4 without a mixture.
const GRANITE_HYBRID: Family = Family {
    hf: &["GraniteMoeHybridForCausalLM"],
    arch: "granitehybrid",
    only: r#"{"hidden_act": ["silu", "swish"], "position_embedding_type": ["nope"]}"#,
    names: &[("shared_mlp.input_linear", "ffn_gate + ffn_up"), ("shared_mlp.output_linear", "ffn_down")],
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

/// Nomic's encoders, by their own names.
const NOMIC_BERT: Family = Family {
    only: r#"{"activation_function": ["gelu"], "prenorm": [false], "causal": [false], "rotary_emb_fraction": [1.0],
        "rotary_emb_interleaved": [false], "rotary_emb_scale_base": []}"#,
    names: &[
        ("embeddings.word_embeddings", "token_embd"),
        ("embeddings.token_type_embeddings", "token_types"),
        ("emb_ln", "token_embd_norm"),
        ("attn.Wqkv", "attn_qkv"),
        ("attn.out_proj", "attn_output"),
        ("norm1", "attn_output_norm"),
        ("norm2", "layer_output_norm"),
        ("mlp.fc11", "ffn_up"),
        ("mlp.fc12", "ffn_gate"),
        ("mlp.fc1", "ffn_up"),
        ("mlp.fc2", "ffn_down"),
        ("mlp.router.layer", "ffn_gate_inp"),
        ("mlp.experts.mlp.w1", "ffn_up_exps.weight"),
        ("mlp.experts.mlp.w2", "ffn_down_exps.weight"),
    ],
    // The last is added to no expert's output in the published code.
    skips: &["cls.", "pooler.", "mlp.experts.bias"],
    more: |config, key| {
        // Of these positions the models have seen so many.
        let n = match (config.u32("n_positions")?, config.opt_u32(&["max_trained_positions"])?.unwrap_or(2048)) {
            (8192, 2048) => 2048u32,
            (2048, 2048) => 512,
            (n, trained) => {
                return Err(config.refuse(format_args!("n_positions {n} with max_trained_positions {trained}")));
            }
        };
        key("context_length", n.into());
        bert_keys(config, key)
    },
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

const LFM2_KEYS: &[Key] =
    &[(&["vocab_size"], "vocab_size", Kind::Count), (&["conv_L_cache"], "shortconv.l_cache", Kind::Count)];

/// Every family that can be converted.
pub(super) static FAMILIES: &[Family] = &[
    Family { hf: &["LlamaForCausalLM"], arch: "llama", head_dim: true, ..LLAMA },
    Family { hf: &["MistralForCausalLM"], arch: "llama", head_dim: true, keys: WITH_WINDOW, ..LLAMA },
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
    Family { hf: &["ArceeForCausalLM"], arch: "arcee", only: r#"{"hidden_act": ["relu2"]}"#, head_dim: true, ..LLAMA },
    Family { hf: &["GraniteForCausalLM"], arch: "granite", ..GRANITE },
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
        hf: &["SeedOssForCausalLM"],
        arch: "seed_oss",
        names: &[("post_attention_layernorm", "post_attention_norm")],
        ..PLAIN
    },
    Family {
        hf: &["Gemma2ForCausalLM"],
        arch: "gemma2",
        defaults: r#"{"rms_norm_eps": 1e-6, "head_dim": 256, "sliding_window": 4096}"#,
        only: r#"{"hidden_activation": ["gelu_pytorch_tanh"], "tie_word_embeddings": [true],
            "use_bidirectional_attention": [false]}"#,
        names: SANDWICH,
        keys: &[
            WINDOW,
            (&["attn_logit_softcapping"], "attn_logit_softcapping", Kind::Number),
            (&["final_logit_softcapping"], "final_logit_softcapping", Kind::Number),
        ],
        no_keys: &["rope.freq_base"],
        skips: &["lm_head"],
        map: norms_plus_one,
        spaces: Spaces::Never,
        more: |config, key| {
            // Readers have bounds where the file says none.
            for bound in ["attn_logit_softcapping", "final_logit_softcapping"] {
                if config.is_null(bound) {
                    return Err(config.refuse(format_args!("{bound} is null, and files of gemma2 always have it")));
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
        keys: &[WINDOW, (&["final_logit_softcapping"], "final_logit_softcapping", Kind::Number)],
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
            (&["layer_types"], "attention.sliding_window_pattern", Kind::Sliding),
            (&["num_kv_shared_layers"], "attention.shared_kv_layers", Kind::Count),
            (&["hidden_size_per_layer_input"], "embedding_length_per_layer_input", Kind::Count),
            (&["top_k_experts"], "expert_used_count", Kind::Count),
            (&["expert_intermediate_size", "moe_intermediate_size"], "expert_feed_forward_length", Kind::Count),
            (&["final_logit_softcapping"], "final_logit_softcapping", Kind::Number),
        ],
        spaces: Spaces::Never,
        more: gemma4_keys,
        extra: gemma4_factors,
        ..PLAIN
    },
    Family { hf: &["BertModel", "BertForMaskedLM"], ..BERT },
    Family { hf: &["BertForSequenceClassification"], skips: &["embeddings.position_ids"], ..BERT },
    Family { hf: &["XLMRobertaModel", "XLMRobertaForSequenceClassification"], ..XLM_ROBERTA },
    Family {
        hf: &["Phi3ForCausalLM"],
        arch: "phi3",
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096,
            "sliding_window": 0}"#,
        keys: &[WINDOW],
        no_keys: &["rope.scaling.type", "attention.key_length", "attention.value_length"],
        more: phi3_rope,
        extra: phi3_factors,
        ..PLAIN
    },
    Family {
        hf: &["Olmo2ForCausalLM", "Olmo3ForCausalLM"],
        arch: "olmo2",
        defaults: r#"{"rms_norm_eps": 1e-5}"#,
        names: &[("post_attention_layernorm", "post_attention_norm"), ("post_feedforward_layernorm", "post_ffw_norm")],
        keys: &[WINDOW, (&["layer_types"], "attention.sliding_window_pattern", Kind::Sliding)],
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
        hf: &["OlmoeForCausalLM"],
        arch: "olmoe",
        defaults: r#"{"rms_norm_eps": 1e-5}"#,
        only: r#"{"hidden_act": ["silu", "swish"], "clip_qkv": [], "sliding_window": []}"#,
        more: |config, key| normalised(config, key, false),
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
        keys: &[(&["vocab_size"], "vocab_size", Kind::Count), (&["logit_scale"], "logit_scale", Kind::Number), WINDOW],
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
            (&["layer_types"], "attention.sliding_window_pattern", Kind::Sliding),
        ],
        more: |config, _| {
            // Beside layers with windows the others are not rotated; readers rotate all where there is none.
            let windows = config.opt_strs("layer_types")?.is_none_or(|layers| layers.contains(&"sliding_attention"));
            match config.opt_u32(&["sliding_window"])? {
                Some(_) if !windows => {
                    Err(config.refuse("sliding_window is there, and layer_types has no layer with one"))
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
        keys: &[(&["use_parallel_residual"], "use_parallel_residual", Kind::Flag)],
        no_keys: &["rope.freq_base"],
        more: partial_rope,
        ..PLAIN
    },
    Family {
        hf: &["GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"],
        arch: "granitemoe",
        names: GRANITE_MOE_NAMES,
        ..GRANITE
    },
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
            (&["layer_norm_epsilon", "rms_norm_eps"], "attention.layer_norm_rms_epsilon", Kind::Number),
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
        hf: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
        arch: "qwen35moe",
        reorder: tile_heads,
        more: qwen35_keys,
        ..QWEN3_NEXT
    },
    Family {
        hf: &["Glm4ForCausalLM"],
        arch: "glm4",
        defaults: r#"{"partial_rotary_factor": 0.5}"#,
        names: &[("post_self_attn_layernorm", "post_attention_norm"), ("post_mlp_layernorm", "post_ffw_norm")],
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
            (&["first_k_dense_replace"], "leading_dense_block_count", Kind::Count),
            (&["routed_scaling_factor"], "expert_weights_scale", Kind::Number),
            (&["norm_topk_prob"], "expert_weights_norm", Kind::Flag),
        ],
        special: GLM_SPECIAL,
        more: |config, key| {
            key("expert_gating_func", 2u32.into());
            partial_rope(config, key)
        },
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
            ("mlp.experts.gate_up_proj_bias", "ffn_gate_exps.bias + ffn_up_exps.bias"),
            ("mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
        ],
        keys: &[WINDOW, (&["intermediate_size"], "expert_feed_forward_length", Kind::Count)],
        // Gate and up take turns; matrices that are not quantised are input by output.
        cut: |config, n_rows| {
            halves(config, n_rows)?;
            Ok([0, 1].map(|first| vec![Run { first, n: n_rows / 2, step: 2 }]))
        },
        transpose: |part| part.ends_with("_exps").then_some(Transpose::BeforeCut),
        more: |config, key| window_pattern(config, key, 2),
        ..PLAIN
    },
    Family { hf: &["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"], arch: "deepseek2", ..DEEPSEEK2 },
    Family { hf: &["Glm4MoeLiteForCausalLM"], arch: "deepseek2", special: GLM_SPECIAL, ..DEEPSEEK2 },
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
            (&["layer_norm_epsilon", "rms_norm_eps"], "attention.layer_norm_rms_epsilon", Kind::Number),
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
            (&["layer_types"], "attention.sliding_window_pattern", Kind::Sliding),
            (&["num_kv_shared_layers"], "attention.shared_kv_layers", Kind::Count),
            (&["hidden_size_per_layer_input"], "embedding_length_per_layer_input", Kind::Count),
            (&["altup_active_idx"], "altup.active_idx", Kind::Count),
            (&["altup_num_inputs"], "altup.num_inputs", Kind::Count),
            (&["final_logit_softcapping"], "final_logit_softcapping", Kind::Number),
        ],
        spaces: Spaces::Never,
        more: |config, key| {
            // Standard deviations above the mean below which so large a share of gates is.
            if let Some(shares) = config.opt_numbers("activation_sparsity_pattern")? {
                let scales = shares.iter().map(|&share| normal_quantile(share));
                key("activation_sparsity_scale", Value::Array(Array::F32(scales.collect())));
            }
            Ok(())
        },
        ..PLAIN
    },
    Family {
        hf: &["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"],
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
    Family {
        hf: &["Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"],
        fits: |config| config.get(&["model_type"]).is_none_or(|(_, kind)| kind != "mistral4"),
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
            ("feed_forward.experts.gate_up_proj", "ffn_gate_exps.weight + ffn_up_exps.weight"),
            ("feed_forward.experts.down_proj", "ffn_down_exps.weight"),
            ("feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"),
            ("feed_forward.shared_expert.up_proj", "ffn_up_shexp"),
            ("feed_forward.shared_expert.down_proj", "ffn_down_shexp"),
        ],
        keys: &[
            // Not the width of experts, as it is in `KEYS`.
            (&["intermediate_size_mlp"], "feed_forward_length", Kind::Count),
            (&["intermediate_size"], "expert_feed_forward_length", Kind::Count),
            (&["interleave_moe_layer_step"], "interleave_moe_layer_step", Kind::Count),
            (&["vocab_size"], "vocab_size", Kind::Count),
        ],
        transpose: |part| part.ends_with("_exps").then_some(Transpose::BeforeCut),
        more: |config, key| {
            smollm3_keys(config, key)?;
            // Readers know the models with norms by their number of experts.
            let (norms, many) = (config.opt_bool(&["use_qk_norm"])?, config.u32("num_local_experts")? == 128);
            match norms.is_some_and(|norms| norms == many) {
                true => Err(config.refuse("use_qk_norm is not that of models with so many experts")),
                false => Ok(()),
            }
        },
        ..PLAIN
    },
    Family { hf: &["Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"], arch: "ernie4_5", ..ERNIE },
    Family {
        hf: &["Ernie4_5_MoeForCausalLM"],
        arch: "ernie4_5-moe",
        names: &[
            SHARED_EXPERTS[0],
            SHARED_EXPERTS[1],
            SHARED_EXPERTS[2],
            ("mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias"),
        ],
        keys: &[
            (&["moe_num_experts"], "expert_count", Kind::Count),
            (&["moe_k"], "expert_used_count", Kind::Count),
            (&["moe_layer_interval"], "interleave_moe_layer_step", Kind::Count),
            (&["moe_layer_start_index"], "leading_dense_block_count", Kind::Count),
            (&["moe_intermediate_size"], "expert_feed_forward_length", Kind::Count),
            (&["moe_num_shared_experts"], "expert_shared_count", Kind::Count),
        ],
        // Its blocks for multi-token prediction.
        skips: &["mtp_block.", "mtp_emb_norm.", "mtp_hidden_norm.", "mtp_linear_proj."],
        more: |config, key| {
            if let Some(n) = config.opt_u32(&["moe_num_shared_experts"])?.filter(|n| *n > 0) {
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
            (&["first_k_dense_replace"], "leading_dense_block_count", Kind::Count),
            (&["routed_scaling_factor"], "expert_weights_scale", Kind::Number),
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
            ("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"),
        ],
        keys: &[
            (&["intermediate_size"], "expert_feed_forward_length", Kind::Count),
            (&["rotary_dim"], "rope.dimension_count", Kind::Count),
        ],
        ..PLAIN
    },
    Family {
        hf: &["HunYuanDenseV1ForCausalLM"],
        arch: "hunyuan-dense",
        defaults: r#"{"rope_theta": 10000.0, "rms_norm_eps": 1e-5}"#,
        names: &[("self_attn.query_layernorm", "attn_q_norm"), ("self_attn.key_layernorm", "attn_k_norm")],
        more: |config, key| {
            // A longer context by a larger base, and of how long a context nothing is said that is true.
            if let Some(alpha) = config.rope_f32("alpha")?.filter(|_| config.rope_type() == Some("dynamic")) {
                let (n, base) = (f64::from(config.head_dim()?), config.rope_f32("rope_theta")?.unwrap_or(10000.0));
                let base = f64::from(base) * f64::from(alpha).powf(n / (n - 2.0));
                key("rope.freq_base", (base as f32).into());
                key("rope.scaling.type", "none".into());
                key("rope.scaling.factor", 1.0f32.into());
                key("rope.scaling.original_context_length", (256u32 << 10).into());
                key("context_length", (256u32 << 10).into());
            }
            Ok(())
        },
        ..PLAIN
    },
    Family { fits: |config| has_recurrent(config) && !has_experts(config), ..GRANITE_HYBRID },
    Family { fits: |config| has_recurrent(config), names: GRANITE_MOE_NAMES, ..GRANITE_HYBRID },
    // Granite 4 without state spaces.
    Family {
        hf: GRANITE_HYBRID.hf,
        fits: |config| !has_experts(config),
        arch: "granite",
        names: GRANITE_HYBRID.names,
        more: granite4_keys,
        ..GRANITE
    },
    Family { hf: GRANITE_HYBRID.hf, arch: "granitemoe", names: GRANITE_MOE_NAMES, more: granite4_keys, ..GRANITE },
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
            (&["num_dense_layers"], "leading_dense_block_count", Kind::Count),
        ],
        more: |config, key| {
            heads_by_layer(config, key)?;
            key("expert_gating_func", 2u32.into());
            Ok(())
        },
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
            (&["num_dense_layers"], "leading_dense_block_count", Kind::Count),
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
            (&["layer_types"], "attention.sliding_window_pattern", Kind::Sliding),
            EXPERT_KEYS[0],
            (&["num_shared_experts"], "expert_shared_count", Kind::Count),
            (&["routed_scaling_factor"], "expert_weights_scale", Kind::Number),
            (&["norm_topk_prob"], "expert_weights_norm", Kind::Flag),
            (&["first_k_dense_replace"], "leading_dense_block_count", Kind::Count),
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
            (&["router_scaling_factor"], "expert_weights_scale", Kind::Number),
        ],
        more: |config, key| {
            shared_width(config, key, config.u32("num_shared_experts")?)?;
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
            (&["moe_shared_expert_intermediate_size"], "expert_shared_feed_forward_length", Kind::Count),
            (&["n_shared_experts"], "expert_shared_count", Kind::Count),
            (&["norm_topk_prob"], "expert_weights_norm", Kind::Flag),
            (&["routed_scaling_factor"], "expert_weights_scale", Kind::Number),
            (&["moe_latent_size"], "moe_latent_size", Kind::Count),
        ],
        ..NEMOTRON_H
    },
    NEMOTRON_H,
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
            let inner = width.checked_mul(expand).ok_or_else(|| config.refuse("hidden_size is too large"))?;
            key("ssm.inner_size", inner.into());
            key("ssm.time_step_rank", config.opt_u32(&["mamba_dt_rank"])?.unwrap_or(width.div_ceil(16)).into());
            let n_head_kv = config.u32("num_key_value_heads")? as i32;
            let (period, offset) = (config.u32("attn_layer_period")?.max(1), config.u32("attn_layer_offset")?);
            let layers = 0..config.u32("num_hidden_layers")?.min(MAX_HEAD);
            let heads = layers.map(|i| if i % period == offset { n_head_kv } else { 0 }).collect();
            key("attention.head_count_kv", Value::Array(Array::I32(heads)));
            Ok(())
        },
        ..PLAIN
    },
    Family {
        hf: &["ModernBertModel", "ModernBertForMaskedLM"],
        arch: "modern-bert",
        defaults: r#"{"norm_eps": 1e-5, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "local_attention": 128}"#,
        only: r#"{"hidden_activation": ["gelu"], "global_attn_every_n_layers": [3]}"#,
        names: &[
            ("embeddings.tok_embeddings", "token_embd"),
            ("embeddings.norm", "token_embd_norm"),
            ("final_norm", "output_norm"),
            ("attn_norm", "attn_norm"),
            ("attn.Wqkv", "attn_qkv"),
            ("attn.Wo", "attn_output"),
            ("mlp_norm", "ffn_norm"),
            ("mlp.Wi", "ffn_up"),
            ("mlp.Wo", "ffn_down"),
        ],
        keys: &[
            (&["local_attention"], "attention.sliding_window", Kind::Count),
            (&["vocab_size"], "vocab_size", Kind::Count),
        ],
        // What only pre-training needs.
        skips: &["head.", "decoder."],
        more: |config, key| {
            bert_keys(config, key)?;
            match config.get(&["classifier_pooling"]).map(|(_, pooling)| pooling.as_str()) {
                Some(Some("mean")) => key("classifier.pooling_type", 1u32.into()),
                Some(Some("cls")) => key("classifier.pooling_type", 2u32.into()),
                Some(_) => return Err(config.refuse("classifier_pooling is neither mean nor cls")),
                None => {}
            }
            if let Some((_, kind)) = config.get(&["hidden_activation"]).filter(|(_, kind)| kind.is_string()) {
                key("hidden_activation", kind.as_str().unwrap_or_default().into());
            }
            no_scaling(config, key)
        },
        ..PLAIN
    },
    Family {
        hf: &["NomicBertModel"],
        fits: |config| !has_experts(config),
        arch: "nomic-bert",
        only: r#"{"activation_function": ["swiglu"], "prenorm": [false], "causal": [false], "rotary_emb_fraction": [1.0],
            "rotary_emb_interleaved": [false], "rotary_emb_scale_base": []}"#,
        ..NOMIC_BERT
    },
    Family {
        hf: &["NomicBertModel"],
        fits: has_experts,
        arch: "nomic-bert-moe",
        keys: &[
            (&["moe_every_n_layers"], "moe_every_n_layers", Kind::Count),
            (&["moe_top_k"], "expert_used_count", Kind::Count),
        ],
        reshape: |config, part, shape| {
            if let ("ffn_up_exps" | "ffn_down_exps", [rows, width]) = (part, &shape[..]) {
                let n_expert = config.u32("num_experts")?.max(1) as usize;
                *shape = vec![n_expert, rows / n_expert, *width];
            }
            Ok(())
        },
        transpose: |part| (part == "ffn_down_exps").then_some(Transpose::BeforeCut),
        ..NOMIC_BERT
    },
];

/// The first of `hf` that is known.
pub(super) fn by_name(config: &Config) -> Result<&'static Family, Failure> {
    let names = config.opt_strs("architectures")?.unwrap_or_default();
    let fits = |name: &str, family: &Family| family.hf.contains(&name) && (family.fits)(config);
    let family = names.iter().find_map(|name| FAMILIES.iter().find(|family| fits(name, family)));
    family.ok_or_else(|| {
        let known: Vec<&str> = FAMILIES.iter().flat_map(|family| family.hf).copied().collect();
        config.refuse(format_args!("architectures is {names:?}, and there are {}", known.join(", ")))
    })
}

fn halves(config: &Config, n_rows: usize) -> Result<Parts, Failure> {
    match n_rows.is_multiple_of(2) {
        true => Ok([0, n_rows / 2].map(|first| vec![Run { first, n: n_rows / 2, step: 1 }])),
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
    key("rope.dimension_count", ((share * config.head_dim()? as f32) as u32).into());
    Ok(())
}

/// SmolLM 3 rotates all but every fourth layer; files cannot say otherwise.
fn smollm3_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let rotated = config.get(&["no_rope_layers"]).and_then(|(_, list)| list.as_array());
    if rotated.is_none() && config.opt_u32(&["no_rope_layer_interval"])?.is_some_and(|n| n != 4) {
        return Err(config.refuse("no_rope_layer_interval is not 4"));
    }
    let other = |(i, rotated): (usize, &serde_json::Value)| *rotated != u32::from(i % 4 != 3);
    if rotated.is_some_and(|list| list.iter().enumerate().any(other)) {
        return Err(config.refuse("no_rope_layers is not every fourth layer"));
    }
    rope_dimensions(config, key)
}

/// What Hugging Face calls layers with attention, and recurrent ones.
const ATTENTION: &[&str] = &["attention", "full_attention"];
const RECURRENT: &[&str] = &["mamba", "linear_attention"];

/// Whether some layer is recurrent.
fn has_recurrent(config: &Config) -> bool {
    let layers = config.opt_strs("layer_types").ok().flatten();
    layers.is_some_and(|layers| layers.iter().any(|kind| RECURRENT.contains(kind)))
}

/// Whether there are mixtures.
fn has_experts(config: &Config) -> bool {
    let n = config.opt_u32(&["num_local_experts", "moe_every_n_layers", "num_experts_per_tok"]);
    n.is_ok_and(|n| n.is_some_and(|n| n > 0))
}

/// Heads of keys by layer: none where there is no attention.
fn heads_by_layer(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let layers = config.opt_strs("layer_types")?.ok_or_else(|| config.missing("layer_types"))?;
    let n_head_kv = config.u32("num_key_value_heads")? as i32;
    let heads = layers.iter().map(|kind| if ATTENTION.contains(kind) { n_head_kv } else { 0 }).collect();
    key("attention.head_count_kv", Value::Array(Array::I32(heads)));
    Ok(())
}

/// Width of the experts that every token uses, `n` in one.
fn shared_width(config: &Config, key: Put<'_>, n: u32) -> Result<(), Failure> {
    let n_ff = config.u32("moe_intermediate_size")?.checked_mul(n);
    key(
        "expert_shared_feed_forward_length",
        n_ff.ok_or_else(|| config.refuse("moe_intermediate_size is too large"))?.into(),
    );
    Ok(())
}

/// Granite 4's sizes of state spaces, which files say even of models that have none, and its heads by layer.
fn granite_hybrid_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    rope_dimensions(config, key)?;
    heads_by_layer(config, key)?;
    for (from, to) in
        [("mamba_d_conv", "conv_kernel"), ("mamba_d_state", "state_size"), ("mamba_n_groups", "group_count")]
    {
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

/// Which layers are what: a letter each (`M`, `*`, `-`, `E`), or a list of texts.
fn nemotron_h_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let letters = config.get(&["hybrid_override_pattern"]).and_then(|(_, pattern)| pattern.as_str());
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
        let values = layers.iter().map(|layer| if letters.contains(layer) { n as i32 } else { 0 });
        Value::Array(Array::I32(values.collect()))
    };
    let n_ff = match config.opt_u32(&["moe_intermediate_size"])?.filter(|_| layers.contains(&'E')) {
        Some(n_ff) if layers.contains(&'-') => {
            return Err(config.refuse(format_args!("dense layers beside mixtures of {n_ff}")));
        }
        n_ff => n_ff,
    };
    key("feed_forward_length", by_layer(&['E', '-'], n_ff.map_or_else(|| config.u32("intermediate_size"), Ok)?));
    key("attention.head_count_kv", by_layer(&['*'], config.u32("num_key_value_heads")?));
    let n = config.u32("hidden_size")?.checked_div(config.u32("num_attention_heads")?);
    key("rope.dimension_count", n.ok_or_else(|| config.refuse("num_attention_heads is 0"))?.into());
    key("context_length", (1u32 << 20).into());
    key("rope.scaling.finetuned", false.into());
    key("ssm.inner_size", mamba2_inner(config)?.into());
    key("ssm.time_step_rank", config.u32("mamba_num_heads")?.into());
    Ok(())
}

/// How a head's pairs are divided among the three parts of a position in a picture.
fn sections(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let sections = config.rope_counts("mrope_section")?;
    let mut sections = sections.ok_or_else(|| config.missing("mrope_section"))?;
    sections.resize(4, 0);
    key("rope.dimension_sections", Value::Array(Array::I32(sections)));
    Ok(())
}

/// Layers that also get features of pictures.
fn qwen3vl_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let indices = config
        .get(&["vision_config"])
        .and_then(|(_, vision)| vision.get("deepstack_visual_indexes")?.as_array().map(Vec::len));
    key("n_deepstack_layers", (indices.unwrap_or(0) as u32).into());
    sections(config, key)
}

/// The number below which a share `p` of a normal distribution lies; −∞ for 0. Newton's method, with the distribution as the
/// series `1/2 + density·(x + x³/3 + x⁵/(3·5) + …)`.
fn normal_quantile(p: f64) -> f32 {
    if !(p > 0.0 && p < 1.0) {
        return if p > 0.0 { f32::INFINITY } else { f32::NEG_INFINITY };
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

/// Whether the weights of experts are divided by their sum, where it is not what files of the architecture mean without.
fn normalised(config: &Config, key: Put<'_>, usual: bool) -> Result<(), Failure> {
    if config.opt_bool(&["norm_topk_prob"])? == Some(!usual) {
        key("expert_weights_norm", (!usual).into());
    }
    Ok(())
}

/// Windows of Qwen 2 and 3, if they are used.
fn qwen_windows(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    if config.opt_bool(&["use_sliding_window"])? != Some(true) {
        return Ok(());
    }
    key("attention.sliding_window", config.u32("sliding_window")?.into());
    let windows: Vec<bool> = match config.opt_strs("layer_types")? {
        Some(layers) => layers.iter().map(|kind| *kind == "sliding_attention").collect(),
        None => {
            let first = config.opt_u32(&["max_window_layers"])?.unwrap_or(0);
            (0..config.u32("num_hidden_layers")?.min(MAX_HEAD)).map(|i| i >= first).collect()
        }
    };
    key("attention.sliding_window_pattern", Value::Array(Array::Bool(windows)));
    Ok(())
}

/// Which layers have windows, where it is not all but every `n`-th one, as readers take for granted.
fn window_pattern(config: &Config, key: Put<'_>, n: usize) -> Result<(), Failure> {
    let Some(layers) = config.opt_strs("layer_types")? else {
        if let Some(other) = config.opt_u32(&["sliding_window_pattern"])?.filter(|&other| other as usize != n) {
            key("attention.sliding_window_pattern", other.into());
        }
        return Ok(());
    };
    let windows: Vec<bool> = layers.iter().map(|kind| *kind == "sliding_attention").collect();
    if windows.iter().enumerate().any(|(i, &window)| window != (i % n < n - 1)) {
        key("attention.sliding_window_pattern", Value::Array(Array::Bool(windows)));
    }
    Ok(())
}

/// The factor on scores, where it is not what readers take for granted: they know models with `n_layer` layers.
fn gemma_scale(config: &Config, key: Put<'_>, n_layer: u32) -> Result<(), Failure> {
    let Some(squared) = config.opt_f32(&["query_pre_attn_scalar"])? else { return Ok(()) };
    let usual = match config.u32("num_hidden_layers")? {
        n if n == n_layer => config.u32("hidden_size")? / config.u32("num_attention_heads")?.max(1),
        _ => config.head_dim()?,
    };
    if squared != usual as f32 {
        key("attention.scale", (1.0 / squared.sqrt()).into());
    }
    Ok(())
}

fn no_scaling(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    if let Some(kind) = config.rope_type().filter(|kind| *kind != "dynamic") {
        return Err(config.refuse(format_args!("rope type {kind}, and files of this family say that there is none")));
    }
    key("rope.scaling.type", "none".into());
    Ok(())
}

/// Heads of keys by layer, and the width that the feed-forward layers are rounded to.
fn lfm2_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    heads_by_layer(config, key)?;
    let n_ff =
        config.opt_u32(&["block_ff_dim", "intermediate_size"])?.ok_or_else(|| config.missing("intermediate_size"))?;
    let n_ff = match config.opt_bool(&["block_auto_adjust_ff_dim"])? {
        Some(true) => {
            let factor = config.opt_f32(&["block_ffn_dim_multiplier"])?.unwrap_or(1.0);
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
        key("ssm.time_step_rank", config.u32("hidden_size")?.div_ceil(16).into());
    }
    key("ssm.dt_b_c_rms", (config.get(&["model_type"]).is_some_and(|(_, kind)| kind == "falcon_mamba")).into());
    Ok(())
}

/// Gemma 4's number for layers that see everything: a key of its own, or one of a layer's.
fn of_full_layers(config: &Config, name: &str, of_layer: &str) -> Result<Option<u32>, Failure> {
    if let Some(n) = config.opt_u32(&[name])? {
        return Ok(Some(n));
    }
    let layers = config.opt_strs("layer_types")?.unwrap_or_default();
    let full = layers.iter().position(|kind| *kind == "full_attention").map(|i| i.to_string());
    let by_layer = config.get(&["per_layer_config"]).and_then(|(_, by_layer)| by_layer.get(full?)?.get(of_layer));
    by_layer.map(|n| n.as_u64()?.try_into().ok()).map_or(Ok(None), |n: Option<u32>| {
        n.map(Some).ok_or_else(|| config.refuse(format_args!("per_layer_config has a {of_layer} that is no number")))
    })
}

fn gemma4_head(config: &Config) -> Result<u32, Failure> {
    let n = of_full_layers(config, "global_head_dim", "head_dim")?.unwrap_or(512);
    if n <= MAX_HEAD { Ok(n) } else { Err(config.refuse(format_args!("global_head_dim is {n}, more than {MAX_HEAD}"))) }
}

fn gemma4_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let layers = config.opt_strs("layer_types")?.ok_or_else(|| config.missing("layer_types"))?;
    let (full, of_window) = (gemma4_head(config)?, config.u32("head_dim")?);
    for part in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
        key(part, full.into());
        key(&format!("{part}_swa"), of_window.into());
    }
    if config.opt_bool(&["use_double_wide_mlp"])? == Some(true) {
        let n_ff = config.u32("intermediate_size")? as i32;
        let n_own = layers.len().saturating_sub(config.u32("num_kv_shared_layers")? as usize);
        let widths = (0..layers.len()).map(|i| if i < n_own { n_ff } else { n_ff.saturating_mul(2) });
        key("feed_forward_length", Value::Array(Array::I32(widths.collect())));
    }
    if let Some(full) = of_full_layers(config, "num_global_key_value_heads", "num_key_value_heads")? {
        let of_window = config.u32("num_key_value_heads")?;
        let heads = layers.iter().map(|kind| if *kind == "sliding_attention" { of_window } else { full } as i32);
        key("attention.head_count_kv", Value::Array(Array::I32(heads.collect())));
    }
    Ok(())
}

/// A proportional rope, which Gemma 4's full layers have, turns the first pairs of a head only: the others are slowed down to
/// a stand.
fn gemma4_factors(config: &Config) -> Result<Vec<Extra>, Failure> {
    let n = gemma4_head(config)?;
    let share = match config.rope_type() {
        Some("proportional") => config.rope_f32("partial_rotary_factor")?.unwrap_or(1.0),
        _ => 1.0,
    };
    let turned = (f64::from(n) * f64::from(share) / 2.0) as u32;
    Ok(vec![("rope_freqs.weight", (0..n / 2).map(|i| if i < turned { 1.0 } else { 1e30 }).collect())])
}

fn first_position(config: &Config) -> Result<u32, Failure> {
    let first = config.u32("pad_token_id")?.checked_add(1);
    first.ok_or_else(|| config.refuse("pad_token_id is too large"))
}

fn bert_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    key("attention.causal", false.into());
    let labels = config.get(&["id2label"]).and_then(|(_, labels)| labels.as_object());
    let mut labels: Vec<(u64, &str)> =
        labels.into_iter().flatten().filter_map(|(n, label)| Some((n.parse().ok()?, label.as_str()?))).collect();
    labels.sort_unstable();
    // Two labels without a name of their own are those that every configuration has.
    if !labels.is_empty() && !matches!(labels[..], [(0, "LABEL_0"), _]) {
        let labels = labels.iter().map(|(_, label)| *label).collect();
        key("classifier.output_labels", Value::Array(Array::Strings(labels)));
    }
    Ok(())
}

fn qwen3next_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let inner = config.u32("linear_value_head_dim")?.checked_mul(config.u32("linear_num_value_heads")?);
    key("ssm.inner_size", inner.ok_or_else(|| config.refuse("linear_value_head_dim is too large"))?.into());
    if let Some(layers) = config.opt_strs("layer_types")? {
        let recurrent = layers.iter().map(|kind| *kind == "linear_attention").collect();
        key("attention.recurrent_layers", Value::Array(Array::Bool(recurrent)));
    }
    partial_rope(config, key)
}

fn qwen35_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let mut sections = config.rope_counts("mrope_section")?.unwrap_or(vec![11, 11, 10]);
    sections.resize(4, 0);
    key("rope.dimension_sections", Value::Array(Array::I32(sections)));
    qwen3next_keys(config, key)
}

/// A number of heads, or the width of one.
fn delta_size(config: &Config, name: &str) -> Result<usize, Failure> {
    match config.u32(name)? {
        n if n <= MAX_HEAD => Ok(n as usize),
        n => Err(config.refuse(format_args!("{name} is {n}, more than {MAX_HEAD}"))),
    }
}

/// Value heads of the checkpoint are sorted by the key head that they share; those of GGUF files have the first of each key
/// head before the second ones.
fn tile_heads(config: &Config, part: &str) -> Result<Option<Reorder>, Failure> {
    let number = |name: &str| delta_size(config, name);
    let (n_k, n_v) = (number("linear_num_key_heads")?, number("linear_num_value_heads")?);
    let (dim_k, dim_v) = (number("linear_key_head_dim")?, number("linear_value_head_dim")?);
    let n_shared = n_v.checked_div(n_k).unwrap_or(0);
    let tiled = |first: usize, n: usize| {
        let heads = (0..n_shared).flat_map(move |i| (0..n_k).map(move |head| head * n_shared + i));
        heads.map(move |head| Run { first: first + head * n, n, step: 1 }).collect::<Vec<Run>>()
    };
    Ok(match part {
        "attn_qkv" | "ssm_conv1d" => {
            // After the rows of queries and keys.
            let first = 2 * n_k * dim_k;
            Some(Reorder::Rows([vec![Run { first: 0, n: first, step: 1 }], tiled(first, dim_v)].concat()))
        }
        "attn_gate" => Some(Reorder::Rows(tiled(0, dim_v))),
        "ssm_alpha" | "ssm_beta" | "ssm_a" | "ssm_dt" => Some(Reorder::Rows(tiled(0, 1))),
        "ssm_out" => Some(Reorder::Columns(tiled(0, dim_v))),
        _ => None,
    })
}

fn deepseek2_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    // One head reads the latent vector and the rotated part, which all heads share.
    let (latent, rope) = (config.u32("kv_lora_rank")?, config.u32("qk_rope_head_dim")?);
    let sum = |a: u32, b: u32| a.checked_add(b).ok_or_else(|| config.refuse("the widths of heads are too large"));
    key("attention.head_count_kv", 1u32.into());
    key("attention.key_length", sum(latent, rope)?.into());
    key("attention.value_length", latent.into());
    key("attention.key_length_mla", sum(config.u32("qk_nope_head_dim")?, rope)?.into());
    // `mlp_layer_types` counts, if it is there.
    if let Some(kinds) = config.opt_strs("mlp_layer_types")? {
        let n = kinds.iter().take_while(|kind| **kind == "dense").count();
        if kinds[n..].contains(&"dense") {
            return Err(config.refuse("mlp_layer_types has dense layers behind mixtures"));
        }
        key("leading_dense_block_count", (n as u32).into());
    } else if config.opt_u32(&["first_k_dense_replace"])?.is_none() {
        let dense = if config.get(&["n_routed_experts"]).is_some() { 0 } else { config.u32("num_hidden_layers")? };
        key("leading_dense_block_count", dense.into());
    }
    let method = config.get(&["topk_method"]).and_then(|(_, method)| method.as_str());
    if method == Some("greedy") && config.opt_u32(&["n_group"])?.is_some_and(|n| n > 1) {
        return Err(config.refuse("topk_method is greedy, and files with n_group choose experts by group"));
    }
    // Of DeepSeek 2, whose published code scales weights or divides them, and transformers only scales.
    let is_2 = matches!(method, Some("greedy" | "group_limited_greedy"));
    if is_2 && config.opt_bool(&["norm_topk_prob"])? == Some(true) {
        return Err(config.refuse("norm_topk_prob is true, and the weights of these experts are not divided"));
    }
    if config.opt_bool(&["norm_topk_prob"])? == Some(true) {
        key("expert_weights_norm", true.into());
    }
    if let Some(scale) = config.rope_f32("mscale_all_dim")? {
        key("rope.scaling.yarn_log_multiplier", (0.1 * f64::from(scale) as f32).into());
    }
    Ok(())
}

/// Width of Mamba 2's inner vectors.
fn mamba2_inner(config: &Config) -> Result<u32, Failure> {
    let heads = config.opt_u32(&["mamba_num_heads", "mamba_n_heads"])?;
    let n = match (heads, config.opt_u32(&["mamba_head_dim", "mamba_d_head"])?, config.opt_u32(&["intermediate_size"])?)
    {
        (Some(n_head), Some(head_dim), _) => n_head.checked_mul(head_dim),
        (.., Some(n)) => Some(n),
        _ => config.u32("expand")?.checked_mul(config.u32("hidden_size")?),
    };
    n.ok_or_else(|| config.refuse("hidden_size is too large"))
}

fn mamba2_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let inner = mamba2_inner(config)?;
    let n_head = inner.checked_div(config.u32("head_dim")?).ok_or_else(|| config.refuse("head_dim is 0"))?;
    key("context_length", (1u32 << 20).into());
    key("feed_forward_length", 0u32.into());
    key("attention.head_count", 0u32.into());
    key("ssm.inner_size", inner.into());
    key("ssm.time_step_rank", n_head.into());
    Ok(())
}

/// Decays and skips are columns, norms have a row per group.
fn mamba2_shapes(config: &Config, part: &str, shape: &mut Vec<usize>) -> Result<(), Failure> {
    match part {
        "ssm_a" | "ssm_d" => shape.push(1),
        "ssm_norm" => {
            let n_group = config.opt_u32(&["n_groups", "mamba_n_groups"])?.unwrap_or(1).max(1) as usize;
            *shape = vec![n_group, mamba2_inner(config)? as usize / n_group];
        }
        _ => {}
    }
    Ok(())
}

/// Each key head of the checkpoint has its rows of queries, keys, values and gates; GGUF files have all queries, then all
/// keys, then all values, and the gates for themselves.
fn qwen3next_cut(config: &Config, n_rows: usize) -> Result<Parts, Failure> {
    let number = |name: &str| delta_size(config, name);
    let (n_head, dim_k) = (number("linear_num_key_heads")?, number("linear_key_head_dim")?);
    let dim_v = number("linear_num_value_heads")?.checked_div(n_head).unwrap_or(0) * number("linear_value_head_dim")?;
    let whole = 2 * (dim_k + dim_v);
    if n_head == 0 || n_rows != n_head * whole {
        return Err(config.refuse(format_args!("in_proj_qkvz has {n_rows} rows, and {n_head} heads of {whole}")));
    }
    let part = |start: usize, n: usize| (0..n_head).map(move |head| Run { first: head * whole + start, n, step: 1 });
    let qkv = part(0, dim_k).chain(part(dim_k, dim_k)).chain(part(2 * dim_k, dim_v));
    Ok([qkv.collect(), part(2 * dim_k + dim_v, dim_v).collect()])
}

/// Factors of Llama 3.1's rope: periods that are long against the first context are stretched, short ones are not, and in
/// between there is a passage (transformers' `_compute_llama3_parameters`).
fn llama3_factors(config: &Config) -> Result<Vec<Extra>, Failure> {
    if config.rope_type() != Some("llama3") {
        return Ok(Vec::new());
    }
    let number = |name: &str, default: f32| Ok::<_, Failure>(config.rope_f32(name)?.unwrap_or(default));
    let (theta, factor) = (number("rope_theta", 10000.0)?, number("factor", 8.0)?);
    let (low, high) = (number("low_freq_factor", 1.0)?, number("high_freq_factor", 4.0)?);
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

/// The part of a head that Phi 3 rotates.
fn phi3_dimensions(config: &Config) -> Result<u32, Failure> {
    let share = config.rope_f32("partial_rotary_factor")?.unwrap_or(1.0);
    let heads = config.u32("num_attention_heads")?.max(1);
    Ok((f64::from(share) * f64::from(config.u32("hidden_size")?)) as u32 / heads)
}

fn phi3_rope(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    let first = config.rope_f32("original_max_position_embeddings")?.unwrap_or_default();
    key("rope.scaling.original_context_length", (first as u32).into());
    key("rope.dimension_count", phi3_dimensions(config)?.into());
    if config.rope_factors("long_factor")?.is_some() {
        let scale = f64::from(config.u32("max_position_embeddings")?) / f64::from(first);
        let attention = match config.rope_type() {
            _ if scale <= 1.0 => 1.0,
            Some("su" | "longrope") => (1.0 + scale.ln() / f64::from(first).ln()).sqrt(),
            Some("yarn") => 0.1 * scale.ln() + 1.0,
            other => return Err(config.refuse(format_args!("rope type {other:?} is not known"))),
        };
        let attention = config.rope_f32("attention_factor")?.unwrap_or(attention as f32);
        key("rope.scaling.attn_factor", attention.into());
    } else if let Some(kind) = config.rope_type().filter(|kind| *kind != "dynamic") {
        return Err(
            config.refuse(format_args!("rope type {kind} without long_factor, of which files of phi3 say nothing"))
        );
    }
    Ok(())
}

fn phi3_factors(config: &Config) -> Result<Vec<Extra>, Failure> {
    let (long, short) = (config.rope_factors("long_factor")?, config.rope_factors("short_factor")?);
    let (Some(long), Some(short)) = (long, short) else { return Ok(Vec::new()) };
    let n = phi3_dimensions(config)? as usize / 2;
    if long.len() != n || short.len() != n {
        let found = (long.len(), short.len());
        return Err(config.refuse(format_args!("long_factor and short_factor have {found:?} numbers, not {n}")));
    }
    Ok(vec![("rope_factors_long.weight", long), ("rope_factors_short.weight", short)])
}

/// YaRN's settings that only some models have.
fn yarn_keys(family: &Family, config: &Config, key: Put<'_>) -> Result<(), Failure> {
    // The file has a factor on scores for latent attention only, and no rope's factor beside it.
    let number = |name: &str| Ok::<_, Failure>(config.rope_f32(name)?.filter(|x| *x != 0.0));
    let (of_rope, of_scores) = (number("mscale")?, number("mscale_all_dim")?);
    let known = match (of_rope, of_scores) {
        (_, None) => true,
        (of_rope, Some(of_scores)) if matches!(family.arch, "deepseek2" | "mistral3") => of_rope == Some(of_scores),
        (of_rope, _) => of_rope.is_none() || config.rope_f32("attention_factor")?.is_some(),
    };
    if !known {
        return Err(config.refuse("mscale and mscale_all_dim of the rope are something that the file cannot say"));
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
        if let Some((_, found)) = config.get(&[name]).filter(|(_, found)| !known.iter().any(|known| same(known, found)))
        {
            return Err(config.refuse(format_args!("{name} is {found}, of which files of {} say nothing", family.arch)));
        }
    }
    match config.rope_type_swa() {
        None => Ok(()),
        Some(kind) => Err(config.refuse(format_args!("rope type {kind} of layers with windows is not known"))),
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

/// Writes the keys of `family`, in the order of the tables; behind the layers are `n_block` blocks for multi-token
/// prediction.
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
                Some((name, value)) if value.is_array() => {
                    config.opt_counts(&name)?.map(|counts| Value::Array(Array::I32(counts)))
                }
                _ => config.opt_u32(names)?.map(Value::from),
            },
            Kind::Number => config.opt_f32(names)?.map(Value::from),
            Kind::Flag => config.opt_bool(names)?.map(Value::from),
            Kind::Gating => match config.get(names).map(|(name, value)| (name, value.as_str())) {
                None => None,
                Some((_, Some("softmax"))) => Some(1u32.into()),
                Some((_, Some("sigmoid"))) => Some(2u32.into()),
                Some((name, _)) => return Err(config.refuse(format_args!("{name} is neither softmax nor sigmoid"))),
            },
            Kind::Sliding => {
                let list = config.opt_strs(names[0])?;
                list.map(|list| {
                    Value::Array(Array::Bool(list.iter().map(|kind| *kind == "sliding_attention").collect()))
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
        // `dynamic` changes nothing within the context that the model was trained on. The factors of the others are tensors.
        None | Some("dynamic") => {}
        Some("llama3") if !matches!(family.arch, "phi3" | "gemma4") => {}
        Some("proportional") if family.arch == "gemma4" => {}
        Some("su" | "longrope") if family.arch == "phi3" => key("rope.scaling.type", "longrope".into()),
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
            return Err(config.refuse(format_args!("rope type {kind} is not known for {}", family.arch)));
        }
    }
    (family.more)(config, &mut key)
}
