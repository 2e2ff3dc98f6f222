//! MiniMax 01: lightning attention, softmax attention in every so manieth layer, mixtures; the
//! residual stream goes through the norms.

use crate::arch::MAX_HEAD_DIM;
use crate::layers::hparams::Hparams;
use crate::layers::lightning::spec::LightningSpec;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::model::ModelError;
use crate::model::keys::{Keys, MixerKind};

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let n_head = keys.count("attention.head_count", 1024)?;
    let head_dim = keys.count("attention.key_length", MAX_HEAD_DIM)?;
    keys.only("attention.value_length", &[head_dim as f64])?;
    let interval = keys
        .opt_count("full_attention_interval", 1024)?
        .unwrap_or(8);
    let recurrent = keys.bools("attention.recurrent_layers")?;
    let last = (keys.n_layer - 1).max(1) as f32;
    let mixer = |i: usize| {
        let is_recurrent = recurrent
            .as_ref()
            .map_or(i % interval < interval - 1, |layers| layers[i]);
        if !is_recurrent {
            return MixerKind::Attention;
        }
        MixerKind::Recurrent(RecurrentSpec::Lightning(LightningSpec {
            n_head,
            head_dim,
            rate: 1.0 - i as f32 / last + 1e-5,
        }))
    };
    let mixers = (0..keys.n_layer).map(mixer).collect();
    let mut h = Hparams::hybrid(keys, NormKind::Rms, keys.mixture(0, true)?, mixers)?;
    h.set_norms(Norms::OfStream);
    let scale = keys.positive("residual_scale")?.unwrap_or(1.0);
    h.layers
        .iter_mut()
        .for_each(|layer| layer.residual_scale = scale);
    Ok(h)
}
