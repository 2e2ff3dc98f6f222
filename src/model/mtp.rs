//! Blocks for multi-token prediction ("MTP", in files "nextn"): a layer behind the model's own that
//! guesses the token after the next one from the model's hidden state and the next token (arXiv
//! 2404.19737, 2412.19437).
//!
//! Its input is `proj·[norm(embedding of the next token); norm(hidden state)]`, the embedding
//! first. The hidden state is the one that the model's head reads, after the last norm; and what
//! the block's own last norm leaves takes its place where the block guesses further. So llama.cpp's
//! `graph_mtp` and SGLang have it for all of these families but Step 3.5, whose states are those before
//! the norms. vLLM has it for Qwen; of GLM and
//! DeepSeek it hands on the state before the block's norm, with which ik_llama.cpp's second guesses
//! came true far less often (its #1814, #1815).

use crate::arch::Arch;
use crate::gguf::Gguf;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::LayerSpec;
use crate::model::weights::Weights;
use crate::model::{Inner, Model, ModelError};
use crate::tokenizer::Tokenizer;
use std::sync::Arc;

/// Families whose blocks are as described above, and like a layer with attention of the model.
const FAMILIES: &[&str] = &[
    "bailingmoe3",
    "deepseek2",
    "deepseek32",
    "glm-dsa",
    "glm4moe",
    "qwen3next",
    "qwen35",
    "qwen35moe",
    "step35",
];

impl Hparams {
    /// The first block for multi-token prediction as a model of one layer, if there is one.
    fn mtp(&self) -> Result<Option<Hparams>, ModelError> {
        let layer = self
            .layers
            .iter()
            .rfind(|layer| layer.attention().is_some());
        match layer {
            _ if self.n_mtp == 0 => Ok(None),
            Some(layer) if FAMILIES.contains(&self.arch.as_str()) => Ok(Some(Hparams {
                layers: vec![dense(layer.clone())],
                n_layer: 1,
                n_mtp: 0,
                is_mtp: true,
                pooling: None,
                classifier: None,
                kv_layers: vec![0],
                ..self.clone()
            })),
            _ => Err(ModelError::UnknownMtp {
                arch: self.arch.clone(),
            }),
        }
    }
}

/// The layer without a choice of positions: blocks attend to all, though their files have an index
/// (llama.cpp's `graph_mtp`).
fn dense(mut layer: LayerSpec) -> LayerSpec {
    if let Some(attn) = layer.attention_mut() {
        attn.index = None;
    }
    layer
}

/// Binds the block of a model with these weights. Names of its tensors leave `unknown`.
pub(super) fn bind(
    gguf: &Gguf,
    h: &Hparams,
    weights: &Weights,
    tokenizer: Option<&Arc<Tokenizer>>,
    arch: Arch,
    unknown: &mut Vec<String>,
) -> Result<Option<Model>, ModelError> {
    let Some(block) = h.mtp()? else {
        return Ok(None);
    };
    let bound = Weights::bind_mtp(gguf, &block, h.n_layer, weights)?;
    let prefix = format!("blk.{}.", h.n_layer);
    unknown.retain(|name| !name.starts_with(&prefix));
    let block = Inner::part(gguf, block, bound, tokenizer.cloned(), arch);
    Ok(Some(Model(Arc::new(block))))
}
