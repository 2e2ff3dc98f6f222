//! Embedding models and rerankers that read a text from both sides: BERT and its kin.

use super::{Family, Kind, PLAIN, Put, Reorder, Transpose, has_experts, no_scaling};
use crate::convert::config::Config;
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};

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
    skips: &[
        "embeddings.position_ids",
        "cls.predictions.",
        "cls.seq_relationship.",
        "pooler.",
    ],
    more: bert_keys,
    ..PLAIN
};

/// Its positions count from behind the number of the padding token, so that the first rows belong
/// to none.
const XLM_ROBERTA: Family = Family {
    defaults: r#"{"layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 1}"#,
    reorder: |config, part| match part {
        "position_embd" => Ok(Some(Reorder::RowsFrom(first_position(config)? as usize))),
        _ => Ok(None),
    },
    more: |config, key| {
        let n = config
            .u32("max_position_embeddings")?
            .checked_sub(first_position(config)?);
        let n =
            n.ok_or_else(|| config.refuse("max_position_embeddings is not above pad_token_id"))?;
        key("context_length", n.into());
        bert_keys(config, key)
    },
    ..BERT
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
        let n = match (
            config.u32("n_positions")?,
            config.opt_u32(&["max_trained_positions"])?.unwrap_or(2048),
        ) {
            (8192, 2048) => 2048u32,
            (2048, 2048) => 512,
            (n, trained) => {
                return Err(config.refuse(format_args!(
                    "n_positions {n} with max_trained_positions {trained}"
                )));
            }
        };
        key("context_length", n.into());
        bert_keys(config, key)
    },
    ..PLAIN
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        hf: &["BertModel", "BertForMaskedLM"],
        ..BERT
    },
    Family {
        hf: &["BertForSequenceClassification"],
        skips: &["embeddings.position_ids"],
        ..BERT
    },
    Family {
        hf: &["XLMRobertaModel", "XLMRobertaForSequenceClassification"],
        ..XLM_ROBERTA
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
            (
                &["local_attention"],
                "attention.sliding_window",
                Kind::Count,
            ),
            (&["vocab_size"], "vocab_size", Kind::Count),
        ],
        // What only pre-training needs.
        skips: &["head.", "decoder."],
        more: |config, key| {
            bert_keys(config, key)?;
            match config
                .get(&["classifier_pooling"])
                .map(|(_, pooling)| pooling.as_str())
            {
                Some(Some("mean")) => key("classifier.pooling_type", 1u32.into()),
                Some(Some("cls")) => key("classifier.pooling_type", 2u32.into()),
                Some(_) => return Err(config.refuse("classifier_pooling is neither mean nor cls")),
                None => {}
            }
            if let Some((_, kind)) = config
                .get(&["hidden_activation"])
                .filter(|(_, kind)| kind.is_string())
            {
                key(
                    "hidden_activation",
                    kind.as_str().unwrap_or_default().into(),
                );
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
    Family {
        hf: &["JinaBertModel", "JinaBertForMaskedLM"],
        arch: "jina-bert-v2",
        only: r#"{"hidden_act": ["gelu"], "position_embedding_type": ["alibi"], "feed_forward_type": ["geglu"]}"#,
        names: &[
            BERT_NAMES[0],
            BERT_NAMES[2],
            BERT_NAMES[3],
            BERT_NAMES[4],
            BERT_NAMES[5],
            BERT_NAMES[6],
            BERT_NAMES[7],
            BERT_NAMES[8],
            ("attention.self.layer_norm_q", "attn_q_norm"),
            ("attention.self.layer_norm_k", "attn_k_norm"),
            ("mlp.gated_layers", "ffn_up"),
            ("mlp.up_gated_layer", "ffn_up"),
            ("mlp.wo", "ffn_down"),
            ("mlp.down_layer", "ffn_down"),
            ("mlp.layernorm", "layer_output_norm"),
        ],
        ..BERT
    },
];

fn first_position(config: &Config) -> Result<u32, Failure> {
    let first = config.u32("pad_token_id")?.checked_add(1);
    first.ok_or_else(|| config.refuse("pad_token_id is too large"))
}

fn bert_keys(config: &Config, key: Put<'_>) -> Result<(), Failure> {
    key("attention.causal", false.into());
    let labels = config
        .get(&["id2label"])
        .and_then(|(_, labels)| labels.as_object());
    let mut labels: Vec<(u64, &str)> = labels
        .into_iter()
        .flatten()
        .filter_map(|(n, label)| Some((n.parse().ok()?, label.as_str()?)))
        .collect();
    labels.sort_unstable();
    // Two labels without a name of their own are those that every configuration has.
    if !labels.is_empty() && !matches!(labels[..], [(0, "LABEL_0"), _]) {
        let labels = labels.iter().map(|(_, label)| *label).collect();
        key(
            "classifier.output_labels",
            Value::Array(Array::Strings(labels)),
        );
    }
    Ok(())
}
