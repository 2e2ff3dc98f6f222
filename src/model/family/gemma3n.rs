//! Gemma 3n: several residual streams with a side path around attention, a vector for each layer
//! and token, sparse activations, and last layers that read the keys and values of others.

use crate::layers::activation::spec::Activation;
use crate::layers::altup::spec::{MAX_STREAMS, StreamsSpec};
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut ffn = keys.dense(Activation::GeGlu)?;
    keys.ignore("activation_sparsity_scale");
    let scales = keys.numbers("gemma3n.activation_sparsity_scale")?;
    for (ffn, scale) in ffn.iter_mut().zip(scales) {
        if let FfnSpec::Dense(ffn) = ffn {
            // Files say −∞ of layers that are not sparse.
            ffn.sparsity = scale.is_finite().then_some(scale);
        }
    }
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.embd_scale = (h.n_embd as f32).sqrt();
    h.set_norms(Norms::Both);
    h.set_windows(keys, None, 5)?;
    h.set_window_rope(keys.positive("rope.freq_base_swa")?.unwrap_or(10000.0));
    for attn in h.attention_mut() {
        (attn.qk_norm, attn.value_norm, attn.scale) = (Some(QkNorm::PerHead), true, 1.0);
    }
    h.share_kv(keys.opt_u64("attention.shared_kv_layers")?.unwrap_or(0) as usize)?;
    h.per_layer_embd = Some(keys.count("embedding_length_per_layer_input", 1 << 16)?);
    keys.only("altup.active_idx", &[0.0])?;
    let n_stream = keys.count("altup.num_inputs", MAX_STREAMS)?;
    let laurel_rank = keys.n_out("blk.0.laurel_l.weight").unwrap_or(1);
    h.streams = Some(StreamsSpec {
        n_stream,
        laurel_rank,
    });
    h.final_softcap = keys.positive("final_logit_softcapping")?;
    Ok(h)
}
