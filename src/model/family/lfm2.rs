//! Liquid's LFM2, dense and mixture of experts: short convolutions, attention between them.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::conv::spec::ConvSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::NormKind;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn lfm2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    both(keys, keys.dense(Activation::SwiGlu)?)
}

pub(super) fn lfm2moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    both(keys, keys.mixture(0, true)?)
}

fn both(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let (n_channel, n_tap) = (
        keys.count("embedding_length", 1 << 17)?,
        keys.taps("shortconv.l_cache")?,
    );
    let mixers = keys.attention_or(&RecurrentSpec::ShortConv(ConvSpec { n_channel, n_tap }))?;
    let mut h = Hparams::hybrid(keys, NormKind::Rms, ffn, mixers)?;
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    Ok(h)
}
