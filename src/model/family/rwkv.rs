//! RWKV 6 and 7: each block of the file is two layers here, a time mix and a channel mix. Qwen 2 with
//! RWKV's time mixes instead of attention.

use crate::arch::MAX_HEAD_DIM;
use crate::layers::activation::spec::Activation;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{FfnSpec, OutputScale};
use crate::layers::norm::spec::NormKind;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::rwkv::spec::{ChannelMixSpec, TimeMixRanks, TimeMixSpec};
use crate::model::ModelError;
use crate::model::keys::{Keys, MixerKind};

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
    let (decay, rate, gate) = (rank("decay")?, rank("iclr")?, Some(rank("gate")?));
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
            norm: true,
        })
    };
    let mixers = (0..keys.n_layer)
        .map(|i| MixerKind::Recurrent(time(i)))
        .collect();
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

/// ARWKV 7: a Qwen 2 with the time mix of RWKV 7, without its norm and, mostly, its gate.
pub(super) fn arwkv7(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let rank = |key: &str| keys.count(&format!("attention.{key}_lora_rank"), 1 << 12);
    let (decay, rate) = (rank("decay")?, rank("iclr")?);
    let residual = rank("value_residual_mix")?;
    let gate = match keys.opt_u64("attention.gate_lora_rank")? {
        None | Some(0) => None,
        Some(_) => Some(rank("gate")?),
    };
    let of = |i: usize| TimeMixRanks::Seven {
        decay,
        rate,
        residual: (i > 0).then_some(residual),
        gate,
    };
    qwen2(keys, of)
}

/// RWKV 6 Qwen 2 (QRWKV): a Qwen 2 with RWKV 6 as linear attention.
pub(super) fn rwkv6qwen2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let rank = |key: &str| keys.count(key, 1 << 12);
    let n_head_kv = keys.count("attention.head_count_kv", 1024)?;
    let n_embd = keys.count("embedding_length", 1 << 17)?;
    let head_dim = keys.count("wkv.head_size", MAX_HEAD_DIM)?;
    keys.divides("embedding_length", n_embd, "wkv.head_size", head_dim)?;
    keys.divides(
        "heads",
        n_embd / head_dim,
        "attention.head_count_kv",
        n_head_kv,
    )?;
    let ranks = TimeMixRanks::Linear {
        blend: rank("time_mix_extra_dim")?,
        decay: rank("time_decay_extra_dim")?,
        n_head_kv,
    };
    qwen2(keys, |_| ranks)
}

fn qwen2(keys: &Keys<'_>, ranks: impl Fn(usize) -> TimeMixRanks) -> Result<Hparams, ModelError> {
    let n_embd = keys.count("embedding_length", 1 << 17)?;
    let head_dim = keys.count("wkv.head_size", MAX_HEAD_DIM)?;
    keys.divides("embedding_length", n_embd, "wkv.head_size", head_dim)?;
    keys.only("token_shift_count", &[1.0])?;
    let time = |i| {
        RecurrentSpec::TimeMix(TimeMixSpec {
            n_head: n_embd / head_dim,
            head_dim,
            ranks: ranks(i),
            norm: false,
        })
    };
    let mixers = (0..keys.n_layer)
        .map(|i| MixerKind::Recurrent(time(i)))
        .collect();
    Hparams::hybrid(keys, NormKind::Rms, keys.dense(Activation::SwiGlu)?, mixers)
}
