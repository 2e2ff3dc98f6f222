//! Encoders: BERT (and XLM-RoBERTa), Nomic BERT and its mixture, Jina BERT 2 and 3, ModernBERT,
//! EuroBERT, NeoBERT, Llama-Embed. Their tokens see the whole text.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::classifier::{ClassifierActivation, Pooling};
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{Biases, FfnSpec};
use crate::layers::norm::spec::{NormKind, Norms};
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::keys::Keys;

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

/// Nomic's mixture (nomic-embed-text-v2-moe): of each `moe_every_n_layers` layers the second has
/// experts.
pub(super) fn nomic_moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut layers = keys.dense(Activation::GeluErf)?;
    let every = keys.opt_u64("moe_every_n_layers")?.unwrap_or(0);
    if every > 0 {
        let mixtures = keys
            .mixture(0, false)?
            .into_iter()
            .enumerate()
            .zip(&mut layers);
        for ((_, mut mixture), layer) in mixtures.filter(|((i, _), _)| *i as u64 % every == 1) {
            mixture
                .moe_mut()
                .into_iter()
                .for_each(|moe| moe.activation = Activation::GeluErf);
            *layer = mixture;
        }
    }
    post_norms(keys, layers)
}

/// Jina BERT 3. The adapters of its tasks are files of their own.
pub(super) fn jina3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    post_norms(keys, keys.dense(Activation::GeluErf)?)
}

/// Jina BERT 2, with ALiBi on both sides, whose exponent is not in the file (Hugging Face
/// `_build_alibi_tensor`). Of its models, those of code have norms of queries and keys.
pub(super) fn jina2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = post_norms(keys, keys.dense_fused(Activation::GeGluErf)?)?;
    h.set_alibi(keys.number("attention.max_alibi_bias")?.unwrap_or(8.0));
    if keys.has_in_layer(0, "attn_q_norm.weight") {
        h.attention_mut()
            .for_each(|attn| attn.qk_norm = Some(QkNorm::LayerFull));
    }
    Ok(h)
}

fn post_norms(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = encoder(keys, NormKind::Layer, ffn)?;
    h.set_norms(Norms::Residual);
    (h.token_types, h.final_norm) = (true, false);
    Ok(h)
}

/// ModernBERT. The first of every three layers sees the whole text, the others windows with a rope
/// of their own; the first layer has no norm before attention, as embeddings have one.
pub(super) fn modern(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.ignore("hidden_activation");
    let mut h = encoder(
        keys,
        NormKind::LayerNoBias,
        keys.dense_fused(Activation::GeGluErf)?,
    )?;
    h.set_windows(keys, None, 0)?;
    h.attention_mut()
        .step_by(3)
        .for_each(|attn| attn.window = None);
    h.set_window_rope(
        keys.positive("rope.freq_base_swa")?
            .unwrap_or(h.ropes[0].theta),
    );
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

/// EuroBERT, NeoBERT and Llama-Embed: llamas whose tokens see the whole text.
pub(super) fn euro(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    encoder_llama(keys, keys.dense(Activation::SwiGlu)?)
}

pub(super) fn neo(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = encoder_llama(keys, keys.dense_fused(Activation::SwiGlu)?)?;
    h.ropes[0].order = RopeOrder::Norm;
    Ok(h)
}

pub(super) fn llama(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = euro(keys)?;
    h.ropes[0].order = RopeOrder::Norm;
    Ok(h)
}

fn encoder_llama(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = encoder(keys, NormKind::Rms, ffn)?;
    h.embd_norm = false;
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
