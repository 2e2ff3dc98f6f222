//! Encoders: BERT, Nomic BERT, Jina BERT 2, ModernBERT. Their tokens see the whole text.

use crate::error::ModelError;
use crate::model::hparams::{ClassifierActivation, Hparams, Keys, NormKind, Pooling};
use crate::model::spec::{Activation, Biases, FfnSpec, Norms};

/// BERT. GELU uses the error function, as in Hugging Face; llama.cpp uses the tanh formula.
pub(super) fn bert(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = post_norms(keys, keys.dense(Activation::GeluErf)?)?;
    h.set_biases(Biases::All);
    h.attention_mut().for_each(|attn| attn.rope = None);
    h.learned_positions = true;
    Ok(h)
}

pub(super) fn nomic(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    post_norms(keys, keys.dense(Activation::SwiGlu)?)
}

/// Jina BERT 2, with ALiBi on both sides, whose exponent is not in the file (Hugging Face `_build_alibi_tensor`).
pub(super) fn jina2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = post_norms(keys, keys.dense_fused(Activation::GeGluErf)?)?;
    h.set_alibi(keys.number("attention.max_alibi_bias")?.unwrap_or(8.0))?;
    Ok(h)
}

fn post_norms(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = encoder(keys, NormKind::Layer, ffn)?;
    h.set_norms(Norms::Residual);
    (h.token_types, h.final_norm) = (true, false);
    Ok(h)
}

/// ModernBERT. The first of every three layers sees the whole text, the others windows with a rope of their own; the
/// first layer has no norm before attention, as embeddings have one.
pub(super) fn modern(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.ignore("hidden_activation");
    let mut h = encoder(keys, NormKind::LayerNoBias, keys.dense_fused(Activation::GeGluErf)?)?;
    h.set_windows(keys, None, 0)?;
    h.attention_mut().step_by(3).for_each(|attn| attn.window = None);
    h.set_window_rope(keys.positive("rope.freq_base_swa")?.unwrap_or(h.ropes[0].theta));
    let pooling = keys.opt_u64("classifier.pooling_type")?;
    if let Some(classifier) = &mut h.classifier {
        classifier.activation = ClassifierActivation::GeluErf;
        if pooling == Some(1) {
            classifier.pooling = Pooling::Mean;
        }
    }
    if !keys.has_in_layer(0, "attn_norm.weight") {
        h.layers[0].norms = Norms::BeforeFfn;
    }
    Ok(h)
}

fn encoder(keys: &Keys<'_>, norm: NormKind, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    keys.only("attention.causal", &[0.0])?;
    let mut h = Hparams::llama(keys, norm, ffn)?;
    h.embd_norm = true;
    h.classifier = keys.classifier(h.n_embd, Pooling::Cls)?;
    h.attention_mut().for_each(|attn| attn.causal = false);
    Ok(h)
}
