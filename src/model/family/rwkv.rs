//! RWKV 6 and 7: each block of the file is two layers here, a time mix and a channel mix.

use crate::arch::MAX_HEAD_DIM;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{FfnSpec, OutputScale};
use crate::layers::norm::spec::NormKind;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::rwkv::spec::{ChannelMixSpec, TimeMixRanks, TimeMixSpec};
use crate::model::ModelError;
use crate::model::keys::{Has, Keys};

/// RWKV 6. Converters divide weights by two after every so many layers, and halve the residual
/// stream there.
pub(super) fn six(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let rank = |key: &str| keys.count(key, 1 << 12);
    let ranks = TimeMixRanks::Six {
        blend: rank("time_mix_extra_dim")?,
        decay: rank("time_decay_extra_dim")?,
    };
    let mut h = mixes(keys, true, |_| ranks)?;
    let every = keys
        .opt_u64("rescale_every_n_layers")?
        .unwrap_or(0)
        .min(1 << 16) as usize;
    for (i, layer) in h.layers.iter_mut().enumerate() {
        if every > 0 && (i + 1) % (2 * every) == 0 {
            layer.output_scale = OutputScale::Half;
        }
    }
    Ok(h)
}

pub(super) fn seven(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let rank = |key: &str| keys.count(&format!("attention.{key}_lora_rank"), 1 << 12);
    let (decay, rate, gate) = (rank("decay")?, rank("iclr")?, rank("gate")?);
    let residual = rank("value_residual_mix")?;
    let of = |i: usize| TimeMixRanks::Seven {
        decay,
        rate,
        residual: (i > 0).then_some(residual),
        gate,
    };
    mixes(keys, false, of)
}

fn mixes(
    keys: &Keys<'_>,
    gated: bool,
    ranks: impl Fn(usize) -> TimeMixRanks,
) -> Result<Hparams, ModelError> {
    let n_embd = keys.count("embedding_length", 1 << 17)?;
    let head_dim = keys.count("wkv.head_size", MAX_HEAD_DIM)?;
    keys.divides("embedding_length", n_embd, "wkv.head_size", head_dim)?;
    let n_ff = keys.count("feed_forward_length", 1 << 20)?;
    let time = |i| {
        RecurrentSpec::TimeMix(TimeMixSpec {
            n_head: n_embd / head_dim,
            head_dim,
            ranks: ranks(i),
        })
    };
    let mixers = (0..keys.n_layer).map(|i| Has::Recurrent(time(i))).collect();
    let mut h = Hparams::hybrid(
        keys,
        NormKind::Layer,
        vec![FfnSpec::None; keys.n_layer],
        mixers,
    )?;
    h.embd_norm = true;
    let channel = RecurrentSpec::ChannelMix(ChannelMixSpec {
        n_embd,
        n_ff,
        gated,
    });
    h.split_blocks(&channel);
    Ok(h)
}
