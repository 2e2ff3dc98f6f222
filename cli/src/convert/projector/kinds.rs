//! The kinds of projectors: how the parts of a model that read images are called at Hugging Face and
//! in a projector's file, and what the file says of them.
//!
//! Names and values are those that llama.cpp's converter writes, but for what `docs/guide/convert.md`
//! lists.

use super::settings::Settings;
use crate::convert::config::Config;
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};

/// What happens to a tensor.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Change {
    /// Nothing; the rows of one that becomes several (`a + b`) are cut into as many parts.
    Same,
    /// Its values are one more.
    PlusOne,
    /// `(out, 3, 2, p, p)`, a convolution over two frames, becomes two over one each.
    Frames,
    /// `(out, p·p·3)`, colours innermost, becomes `(out, 3, p, p)`.
    Patches,
    /// Halves of the rows of each head are interleaved: what Hugging Face rotates in halves the file
    /// has side by side.
    Pairs,
    /// One row, that of a token with this text.
    Token(&'static str),
}

/// A module's name without its end, what it is called in the file, and what happens to it. What is
/// called `a!` has that name, whatever the end.
pub(super) type Name = (&'static str, &'static str, Change);

/// Writes a key behind `clip.`.
type Put<'a> = &'a mut dyn FnMut(&str, Value);

/// A kind of projector.
pub(super) struct Kind {
    /// What `architectures` of `config.json` says.
    pub(super) hf: &'static [&'static str],
    /// Whether it is this one of several kinds that Hugging Face calls the same.
    pub(super) fits: fn(&Settings) -> bool,
    /// `clip.projector_type`.
    pub(super) name: &'static str,
    /// Keys that `vision_config` may leave out, as JSON: what transformers takes instead.
    pub(super) defaults: &'static str,
    /// Modules of the encoder's layers: what is before their numbers, and the modules of one.
    pub(super) layers: (&'static str, &'static [Name]),
    /// Modules beside them.
    pub(super) names: &'static [Name],
    /// Beginnings of names that are not written.
    pub(super) skips: &'static [&'static str],
    /// Whether convolutions over pixels stay F32 in files of 16 bits.
    pub(super) wide_patches: bool,
    /// Keys beside those that all files have.
    pub(super) keys: fn(&Settings, Put<'_>) -> Result<(), Failure>,
}

use Change::{Frames, Pairs, Patches, PlusOne, Same, Token};

/// Layers of SigLIP and CLIP.
const SIGLIP: &[Name] = &[
    ("layer_norm1", "ln1", Same),
    ("layer_norm2", "ln2", Same),
    ("self_attn.q_proj", "attn_q", Same),
    ("self_attn.k_proj", "attn_k", Same),
    ("self_attn.v_proj", "attn_v", Same),
    ("self_attn.out_proj", "attn_out", Same),
    ("mlp.fc1", "ffn_up", Same),
    ("mlp.fc2", "ffn_down", Same),
];

/// CLIP in LLaVA's files, whose names of the two matrices are swapped.
const SWAPPED: &[Name] = &[
    ("layer_norm1", "ln1", Same),
    ("layer_norm2", "ln2", Same),
    ("self_attn.q_proj", "attn_q", Same),
    ("self_attn.k_proj", "attn_k", Same),
    ("self_attn.v_proj", "attn_v", Same),
    ("self_attn.out_proj", "attn_out", Same),
    ("mlp.fc1", "ffn_down", Same),
    ("mlp.fc2", "ffn_up", Same),
];

const SIGLIP_DEFAULTS: &str = r#"{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6}"#;

const PLAIN: Kind = Kind {
    hf: &[],
    fits: |_| true,
    name: "",
    defaults: "{}",
    layers: ("vision_tower.encoder.layers.", SIGLIP),
    names: &[],
    skips: &[],
    wide_patches: false,
    keys: |_, _| Ok(()),
};

/// All kinds; of those that are called the same the first that fits counts.
pub(super) static KINDS: &[Kind] = &[
    GEMMA3, GEMMA4, QWEN2, QWEN25, QWEN3, IDEFICS3, PIXTRAL, LLAVA, INTERNVL, LFM2, GLM4V, MINICPM,
    LLAMA4,
];

const GEMMA3: Kind = Kind {
    hf: &["Gemma3ForConditionalGeneration"],
    name: "gemma3",
    defaults: SIGLIP_DEFAULTS,
    names: &[
        (
            "vision_tower.embeddings.patch_embedding",
            "v.patch_embd",
            Same,
        ),
        (
            "vision_tower.embeddings.position_embedding",
            "v.position_embd",
            Same,
        ),
        ("vision_tower.post_layernorm", "v.post_ln", Same),
        (
            "multi_modal_projector.mm_input_projection_weight",
            "mm.input_projection.weight!",
            Same,
        ),
        (
            "multi_modal_projector.mm_soft_emb_norm",
            "mm.soft_emb_norm",
            PlusOne,
        ),
    ],
    skips: &["vision_tower.head."],
    wide_patches: true,
    keys: |of, put| {
        epsilon(of, "layer_norm_eps", put)?;
        put("use_gelu", true.into());
        let n_side = of.count("image_size")? / of.count("patch_size")?.max(1);
        let n_tokens = of.model.opt_u32(&["mm_tokens_per_image"])?.unwrap_or(256);
        let factor = n_side / n_tokens.isqrt().max(1);
        if factor != 4 {
            put("vision.projector.scale_factor", factor.into());
        }
        Ok(())
    },
    ..PLAIN
};

const GEMMA4: Kind = Kind {
    hf: &["Gemma4ForConditionalGeneration"],
    name: "gemma4v",
    defaults: r#"{"image_size": 224, "rms_norm_eps": 1e-6, "pooling_kernel_size": 3}"#,
    layers: (
        "vision_tower.encoder.layers.",
        &[
            ("input_layernorm", "ln1", Same),
            ("post_attention_layernorm", "attn_post_norm", Same),
            ("pre_feedforward_layernorm", "ln2", Same),
            ("post_feedforward_layernorm", "ffn_post_norm", Same),
            ("self_attn.q_proj", "attn_q", Same),
            ("self_attn.k_proj", "attn_k", Same),
            ("self_attn.v_proj", "attn_v", Same),
            ("self_attn.o_proj", "attn_out", Same),
            ("self_attn.q_norm", "attn_q_norm", Same),
            ("self_attn.k_norm", "attn_k_norm", Same),
            ("mlp.gate_proj", "ffn_gate", Same),
            ("mlp.up_proj", "ffn_up", Same),
            ("mlp.down_proj", "ffn_down", Same),
        ],
    ),
    names: &[
        (
            "vision_tower.patch_embedder.input_proj",
            "v.patch_embd",
            Patches,
        ),
        (
            "vision_tower.patch_embedder.position_embedding_table",
            "v.position_embd.weight!",
            Same,
        ),
        (
            "embed_vision.embedding_projection",
            "mm.input_projection",
            Same,
        ),
    ],
    keys: |of, put| {
        epsilon(of, "rms_norm_eps", put)?;
        // Without it readers take the other form of GELU.
        put("use_gelu", true.into());
        let factor = of.count("pooling_kernel_size")?;
        if factor != 3 {
            put("vision.projector.scale_factor", factor.into());
        }
        Ok(())
    },
    ..PLAIN
};

/// What Qwen's encoders have in common.
const QWEN: Kind = Kind {
    defaults: r#"{"image_size": 560, "layer_norm_eps": 1e-6}"#,
    ..PLAIN
};

const QWEN_NAMES: &[Name] = &[
    ("visual.patch_embed.proj", "v.patch_embd", Frames),
    ("visual.merger.ln_q", "v.post_ln", Same),
    ("visual.merger.mlp.0", "mm.0", Same),
    ("visual.merger.mlp.2", "mm.2", Same),
];

const QWEN2: Kind = Kind {
    hf: &["Qwen2VLForConditionalGeneration"],
    name: "qwen2vl_merger",
    layers: (
        "visual.blocks.",
        &[
            ("norm1", "ln1", Same),
            ("norm2", "ln2", Same),
            ("attn.qkv", "attn_q + attn_k + attn_v", Same),
            ("attn.proj", "attn_out", Same),
            ("mlp.fc1", "ffn_up", Same),
            ("mlp.fc2", "ffn_down", Same),
        ],
    ),
    names: QWEN_NAMES,
    keys: |of, put| epsilon(of, "layer_norm_eps", put),
    ..QWEN
};

const QWEN25: Kind = Kind {
    hf: &["Qwen2_5_VLForConditionalGeneration"],
    name: "qwen2.5vl_merger",
    layers: (
        "visual.blocks.",
        &[
            ("norm1", "ln1", Same),
            ("norm2", "ln2", Same),
            ("attn.qkv", "attn_q + attn_k + attn_v", Same),
            ("attn.proj", "attn_out", Same),
            ("mlp.gate_proj", "ffn_gate", Same),
            ("mlp.up_proj", "ffn_up", Same),
            ("mlp.down_proj", "ffn_down", Same),
        ],
    ),
    names: QWEN_NAMES,
    keys: |of, put| {
        activation(of, "hidden_act", put)?;
        if let Some(n) = of.vision.opt_u32(&["window_size"])?.filter(|&n| n != 112) {
            return Err(of.refuse(format_args!("windows of {n} pixels, and files mean 112")));
        }
        let whole = of.vision.opt_counts("fullatt_block_indexes")?;
        let whole = whole.ok_or_else(|| of.vision.missing("fullatt_block_indexes"))?;
        let every = whole.first().map_or(1, |first| first.saturating_add(1));
        let n_layer = i64::from(of.n_layer()?);
        let expected = (1..).map(|i| i * i64::from(every) - 1);
        let expected = expected.take_while(|&i| i < n_layer);
        if every > 0 && expected.eq(whole.iter().map(|&i| i64::from(i))) {
            put("vision.n_wa_pattern", (every as u32).into());
        } else {
            put(
                "vision.fullatt_block_indexes",
                Value::Array(Array::I32(whole)),
            );
        }
        epsilon(of, "layer_norm_eps", put)
    },
    ..QWEN
};

const QWEN3: Kind = Kind {
    hf: &[
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ],
    name: "qwen3vl_merger",
    defaults: r#"{"layer_norm_eps": 1e-6, "num_position_embeddings": 2304, "spatial_merge_size": 2}"#,
    layers: (
        "visual.blocks.",
        &[
            ("norm1", "ln1", Same),
            ("norm2", "ln2", Same),
            ("attn.qkv", "attn_qkv", Same),
            ("attn.proj", "attn_out", Same),
            ("mlp.linear_fc1", "ffn_up", Same),
            ("mlp.linear_fc2", "ffn_down", Same),
        ],
    ),
    names: &[
        ("visual.patch_embed.proj", "v.patch_embd", Frames),
        ("visual.pos_embed", "v.position_embd", Same),
        ("visual.merger.norm", "v.post_ln", Same),
        ("visual.merger.linear_fc1", "mm.0", Same),
        ("visual.merger.linear_fc2", "mm.2", Same),
        ("visual.deepstack.norm", "norm", Same),
        ("visual.deepstack.linear_fc1", "fc1", Same),
        ("visual.deepstack.linear_fc2", "fc2", Same),
    ],
    keys: |of, put| {
        put("use_gelu", true.into());
        put(
            "vision.spatial_merge_size",
            of.count("spatial_merge_size")?.into(),
        );
        epsilon(of, "layer_norm_eps", put)?;
        let mut flags = vec![false; of.n_layer()? as usize];
        for i in of.deepstack()? {
            let n = flags.len();
            *flags.get_mut(i as usize).ok_or_else(|| {
                of.refuse(format_args!(
                    "deepstack_visual_indexes has {i}, of {n} layers"
                ))
            })? = true;
        }
        put(
            "vision.is_deepstack_layers",
            Value::Array(Array::Bool(flags)),
        );
        Ok(())
    },
    ..QWEN
};

const IDEFICS3: Kind = Kind {
    hf: &[
        "Idefics3ForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
    ],
    name: "idefics3",
    defaults: r#"{"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 16, "image_size": 224, "patch_size": 32, "layer_norm_eps": 1e-6}"#,
    layers: ("vision_model.encoder.layers.", SIGLIP),
    names: &[
        (
            "vision_model.embeddings.patch_embedding",
            "v.patch_embd",
            Same,
        ),
        (
            "vision_model.embeddings.position_embedding",
            "v.position_embd",
            Same,
        ),
        ("vision_model.post_layernorm", "v.post_ln", Same),
        ("connector.modality_projection.proj", "mm.model.fc", Same),
    ],
    wide_patches: true,
    keys: |of, put| {
        epsilon(of, "layer_norm_eps", put)?;
        let factor = of.model.opt_u32(&["scale_factor"])?.unwrap_or(2);
        put("vision.projector.scale_factor", factor.into());
        put("use_gelu", true.into());
        if let Some(n) = of.pictures.opt_u32(&["size.longest_edge"])? {
            put("vision.preproc_image_size", n.into());
        }
        Ok(())
    },
    ..PLAIN
};

const PIXTRAL: Kind = Kind {
    hf: &[
        "LlavaForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
    ],
    fits: |of| of.vision.is("model_type", "pixtral"),
    name: "pixtral",
    defaults: r#"{"layer_norm_eps": 1e-5, "hidden_act": "silu"}"#,
    layers: (
        "vision_tower.transformer.layers.",
        &[
            ("attention_norm", "ln1", Same),
            ("ffn_norm", "ln2", Same),
            ("attention.q_proj", "attn_q", Pairs),
            ("attention.k_proj", "attn_k", Pairs),
            ("attention.v_proj", "attn_v", Same),
            ("attention.o_proj", "attn_out", Same),
            ("feed_forward.gate_proj", "ffn_gate", Same),
            ("feed_forward.up_proj", "ffn_up", Same),
            ("feed_forward.down_proj", "ffn_down", Same),
        ],
    ),
    names: &[
        ("vision_tower.patch_conv", "v.patch_embd", Same),
        ("vision_tower.ln_pre", "v.pre_ln", Same),
        ("multi_modal_projector.linear_1", "mm.1", Same),
        ("multi_modal_projector.linear_2", "mm.2", Same),
        ("multi_modal_projector.norm", "mm.input_norm", Same),
        (
            "multi_modal_projector.patch_merger.merging_layer",
            "mm.patch_merger",
            Same,
        ),
        (
            "language_model.embed_tokens",
            "v.token_embd.img_break!",
            Token("[IMG_BREAK]"),
        ),
    ],
    keys: |of, put| {
        epsilon(of, "layer_norm_eps", put)?;
        activation(of, "hidden_act", put)?;
        if let Some(n) = of.model.opt_u32(&["spatial_merge_size"])? {
            put("vision.spatial_merge_size", n.into());
        }
        Ok(())
    },
    ..PLAIN
};

const LLAVA: Kind = Kind {
    hf: &[
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
    ],
    name: "mlp",
    defaults: r#"{"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}"#,
    layers: ("vision_tower.encoder.layers.", SWAPPED),
    names: &[
        (
            "vision_tower.embeddings.class_embedding",
            "v.class_embd!",
            Same,
        ),
        (
            "vision_tower.embeddings.patch_embedding",
            "v.patch_embd",
            Same,
        ),
        (
            "vision_tower.embeddings.position_embedding",
            "v.position_embd",
            Same,
        ),
        ("vision_tower.pre_layrnorm", "v.pre_ln", Same),
        ("multi_modal_projector.linear_1", "mm.0", Same),
        ("multi_modal_projector.linear_2", "mm.2", Same),
        ("image_newline", "model.image_newline!", Same),
    ],
    skips: &["vision_tower.post_layernorm."],
    keys: |of, put| {
        put("has_text_encoder", false.into());
        put("has_llava_projector", true.into());
        epsilon(of, "layer_norm_eps", put)?;
        let act = ["gelu", "quick_gelu"]
            .iter()
            .find(|act| of.vision.is("hidden_act", act));
        let act = act.ok_or_else(|| of.refuse("hidden_act is neither gelu nor quick_gelu"))?;
        put("use_gelu", (*act == "gelu").into());
        let Some(points) = of.pinpoints()? else {
            return Ok(());
        };
        put(
            "vision.image_grid_pinpoints",
            Value::Array(Array::I32(points)),
        );
        put("vision.mm_patch_merge_type", "spatial_unpad".into());
        put("vision.image_aspect_ratio", "anyres".into());
        Ok(())
    },
    ..PLAIN
};

const INTERNVL: Kind = Kind {
    hf: &["InternVLForConditionalGeneration"],
    name: "internvl",
    defaults: r#"{"layer_norm_eps": 1e-6, "hidden_act": "gelu"}"#,
    layers: (
        "vision_tower.encoder.layer.",
        &[
            ("layernorm_before", "ln1", Same),
            ("layernorm_after", "ln2", Same),
            ("attention.q_proj", "attn_q", Same),
            ("attention.k_proj", "attn_k", Same),
            ("attention.v_proj", "attn_v", Same),
            ("attention.projection_layer", "attn_out", Same),
            ("attention.q_norm", "attn_q_norm", Same),
            ("attention.k_norm", "attn_k_norm", Same),
            ("lambda_1", "ls1.weight!", Same),
            ("lambda_2", "ls2.weight!", Same),
            ("mlp.fc1", "ffn_up", Same),
            ("mlp.fc2", "ffn_down", Same),
        ],
    ),
    names: &[
        ("vision_tower.embeddings.cls_token", "v.class_embd!", Same),
        (
            "vision_tower.embeddings.patch_embeddings.projection",
            "v.patch_embd",
            Same,
        ),
        (
            "vision_tower.embeddings.position_embeddings",
            "v.position_embd.weight!",
            Same,
        ),
        ("multi_modal_projector.layer_norm", "mm.model.mlp.0", Same),
        ("multi_modal_projector.linear_1", "mm.model.mlp.1", Same),
        ("multi_modal_projector.linear_2", "mm.model.mlp.3", Same),
    ],
    keys: |of, put| {
        epsilon(of, "layer_norm_eps", put)?;
        activation(of, "hidden_act", put)?;
        let factor = inverse(&of.model, "downsample_ratio")?;
        put("vision.projector.scale_factor", factor.into());
        for end in ["min", "max"] {
            if let Some(n) = of.pictures.opt_u32(&[&format!("{end}_patches")])? {
                put(&format!("vision.preproc_{end}_tiles"), n.into());
            }
        }
        Ok(())
    },
    ..PLAIN
};

const LFM2: Kind = Kind {
    hf: &["Lfm2VlForConditionalGeneration"],
    name: "lfm2",
    defaults: r#"{"layer_norm_eps": 1e-6, "image_size": 256, "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 16}"#,
    names: &[
        (
            "vision_tower.embeddings.patch_embedding",
            "v.patch_embd",
            Patches,
        ),
        (
            "vision_tower.embeddings.position_embedding",
            "v.position_embd",
            Same,
        ),
        ("vision_tower.post_layernorm", "v.post_ln", Same),
        ("multi_modal_projector.layer_norm", "mm.input_norm", Same),
        ("multi_modal_projector.linear_1", "mm.1", Same),
        ("multi_modal_projector.linear_2", "mm.2", Same),
    ],
    skips: &["vision_tower.head."],
    keys: |of, put| {
        epsilon(of, "layer_norm_eps", put)?;
        let factor = of.model.opt_u32(&["downsample_factor"])?.unwrap_or(2);
        put("vision.projector.scale_factor", factor.into());
        put("use_gelu", true.into());
        Ok(())
    },
    ..PLAIN
};

const GLM4V: Kind = Kind {
    hf: &["Glm4vForConditionalGeneration"],
    name: "glm4v",
    defaults: r#"{"rms_norm_eps": 1e-5, "hidden_act": "silu", "image_size": 336}"#,
    layers: (
        "visual.blocks.",
        &[
            ("norm1", "ln1", Same),
            ("norm2", "ln2", Same),
            ("attn.qkv", "attn_qkv", Same),
            ("attn.proj", "attn_out", Same),
            ("mlp.gate_proj", "ffn_gate", Same),
            ("mlp.up_proj", "ffn_up", Same),
            ("mlp.down_proj", "ffn_down", Same),
        ],
    ),
    names: &[
        ("visual.patch_embed.proj", "v.patch_embd", Frames),
        (
            "visual.embeddings.position_embedding",
            "v.position_embd",
            Same,
        ),
        ("visual.post_conv_layernorm", "v.norm_embd", Same),
        ("visual.post_layernorm", "v.post_ln", Same),
        ("visual.downsample", "mm.patch_merger", Same),
        ("visual.merger.proj", "mm.model.fc", Same),
        ("visual.merger.post_projection_norm", "mm.post_norm", Same),
        ("visual.merger.gate_proj", "mm.gate", Same),
        ("visual.merger.up_proj", "mm.up", Same),
        ("visual.merger.down_proj", "mm.down", Same),
    ],
    keys: |of, put| {
        activation(of, "hidden_act", put)?;
        epsilon(of, "rms_norm_eps", put)
    },
    ..PLAIN
};

const MINICPM: Kind = Kind {
    hf: &["MiniCPMV4_6ForConditionalGeneration"],
    name: "minicpmv4_6",
    defaults: r#"{"layer_norm_eps": 1e-6}"#,
    names: &[
        (
            "vision_tower.embeddings.patch_embedding",
            "v.patch_embd",
            Same,
        ),
        (
            "vision_tower.embeddings.position_embedding",
            "v.position_embd",
            Same,
        ),
        ("vision_tower.post_layernorm", "v.post_ln", Same),
        (
            "vision_tower.vit_merger.layer_norm1",
            "v.vit_merger.ln1",
            Same,
        ),
        (
            "vision_tower.vit_merger.self_attn.q_proj",
            "v.vit_merger.attn_q",
            Same,
        ),
        (
            "vision_tower.vit_merger.self_attn.k_proj",
            "v.vit_merger.attn_k",
            Same,
        ),
        (
            "vision_tower.vit_merger.self_attn.v_proj",
            "v.vit_merger.attn_v",
            Same,
        ),
        (
            "vision_tower.vit_merger.self_attn.out_proj",
            "v.vit_merger.attn_out",
            Same,
        ),
        (
            "vision_tower.vit_merger.pre_norm",
            "v.vit_merger.ds_ln",
            Same,
        ),
        (
            "vision_tower.vit_merger.linear_1",
            "v.vit_merger.ds_ffn_up",
            Same,
        ),
        (
            "vision_tower.vit_merger.linear_2",
            "v.vit_merger.ds_ffn_down",
            Same,
        ),
        ("merger.mlp.0.pre_norm", "mm.input_norm", Same),
        ("merger.mlp.0.linear_1", "mm.up", Same),
        ("merger.mlp.0.linear_2", "mm.down", Same),
    ],
    keys: |of, put| {
        put("vision.projector.scale_factor", 4u32.into());
        let layer = match of.model.opt_u32(&["insert_layer_id"])? {
            Some(layer) => layer,
            None => of.vision.opt_u32(&["insert_layer_id"])?.unwrap_or(6),
        };
        put(
            "vision.wa_layer_indexes",
            Value::Array(Array::I32(vec![layer as i32])),
        );
        put("use_gelu", true.into());
        epsilon(of, "layer_norm_eps", put)
    },
    ..PLAIN
};

const LLAMA4: Kind = Kind {
    hf: &["Llama4ForConditionalGeneration"],
    name: "llama4",
    defaults: r#"{"norm_eps": 1e-5, "pixel_shuffle_ratio": 0.5}"#,
    layers: (
        "vision_model.model.layers.",
        &[
            ("input_layernorm", "ln1", Same),
            ("post_attention_layernorm", "ln2", Same),
            ("self_attn.q_proj", "attn_q", Same),
            ("self_attn.k_proj", "attn_k", Same),
            ("self_attn.v_proj", "attn_v", Same),
            ("self_attn.o_proj", "attn_out", Same),
            ("mlp.fc1", "ffn_up", Same),
            ("mlp.fc2", "ffn_down", Same),
        ],
    ),
    names: &[
        ("vision_model.class_embedding", "v.class_embd!", Same),
        (
            "vision_model.positional_embedding_vlm",
            "v.position_embd.weight!",
            Same,
        ),
        ("vision_model.patch_embedding", "v.patch_embd", Same),
        ("vision_model.layernorm_pre", "v.pre_ln", Same),
        ("vision_model.layernorm_post", "v.post_ln", Same),
        (
            "vision_model.vision_adapter.mlp.fc1",
            "mm.model.mlp.1",
            Same,
        ),
        (
            "vision_model.vision_adapter.mlp.fc2",
            "mm.model.mlp.2",
            Same,
        ),
        ("multi_modal_projector.linear_1", "mm.model.fc", Same),
    ],
    keys: |of, put| {
        epsilon(of, "norm_eps", put)?;
        let factor = inverse(&of.vision, "pixel_shuffle_ratio")?;
        put("vision.projector.scale_factor", factor.into());
        put("use_gelu", true.into());
        Ok(())
    },
    ..PLAIN
};

fn epsilon(of: &Settings, key: &str, put: Put<'_>) -> Result<(), Failure> {
    let epsilon = of.vision.opt_f32(&[key])?;
    let epsilon = epsilon.ok_or_else(|| of.vision.missing(key))?;
    put("vision.attention.layer_norm_epsilon", epsilon.into());
    Ok(())
}

fn activation(of: &Settings, key: &str, put: Put<'_>) -> Result<(), Failure> {
    for (name, flag) in [("silu", "use_silu"), ("gelu", "use_gelu")] {
        if of.vision.is(key, name) {
            put(flag, true.into());
            return Ok(());
        }
    }
    Err(of.refuse(format_args!("{key} is neither silu nor gelu")))
}

/// One over a share of 1.
fn inverse(config: &Config, key: &str) -> Result<u32, Failure> {
    match config.opt_f32(&[key])?.unwrap_or(0.5) {
        share if (0.01..=1.0).contains(&share) => Ok((1.0 / share).round() as u32),
        share => Err(config.refuse(format_args!("{key} is {share}"))),
    }
}
