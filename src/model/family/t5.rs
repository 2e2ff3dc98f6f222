//! T5 and Flan-T5: an encoder, and a decoder that reads what it leaves (arXiv 1910.10683). Scores
//! are not scaled, and biased by the distance of positions.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::relative::spec::RelativeSpec;
use crate::layers::cross::spec::EncoderSpec;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::NormKind;
use crate::model::ModelError;
use crate::model::keys::Keys;

/// Distance from which on all keys have one bias, which files lack (Hugging Face
/// `relative_attention_max_distance`, llama.cpp's `llama_relative_position_bucket`).
const MAX_DISTANCE: usize = 128;

/// Encoder and decoder. A head that is the embedding table multiplies by `1/√n_embd`, as in Hugging
/// Face; llama.cpp leaves that out.
pub(super) fn t5(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let n_decoder = keys.opt_count("decoder_block_count", 1024)?;
    let mut h = keys.with_layers(n_decoder.unwrap_or(keys.n_layer), |keys| half(keys, "dec."))?;
    h.layers.iter_mut().for_each(|layer| layer.cross = true);
    h.encoder = Some(EncoderSpec {
        n_layer: keys.n_layer,
        start: match keys.has_key("decoder_start_token_id") {
            true => keys.token("decoder_start_token_id")?,
            false => 0,
        },
    });
    if !keys.has("output.weight") {
        h.logit_scale = 1.0 / (h.n_embd as f32).sqrt();
    }
    Ok(h)
}

/// The encoder alone.
pub(super) fn encoder(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.only("attention.causal", &[0.0])?;
    let mut h = half(keys, "enc.")?;
    h.attention_mut().for_each(|attn| attn.causal = false);
    Ok(h)
}

fn half(keys: &Keys<'_>, prefix: &'static str) -> Result<Hparams, ModelError> {
    let is_gated = keys.has(&format!("{prefix}blk.0.ffn_gate.weight"));
    let activation = match is_gated {
        true => Activation::GeGlu,
        false => Activation::Relu,
    };
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(activation)?)?;
    h.prefix = prefix;
    let key = "attention.relative_buckets_count";
    let n_bucket = keys.count(key, MAX_DISTANCE)?;
    if n_bucket < 4 || n_bucket % 2 == 1 {
        return Err(ModelError::OutOfRange {
            key: format!("{}.{key}", keys.arch),
            value: n_bucket.to_string(),
            expected: format!("an even number from 4 to {MAX_DISTANCE}"),
        });
    }
    for attn in h.attention_mut() {
        (attn.rope, attn.scale) = (None, 1.0);
        attn.relative = Some(RelativeSpec {
            n_bucket,
            max_distance: MAX_DISTANCE,
        });
    }
    Ok(h)
}
