//! Hyper-parameters of a llama with the sizes of a file, from which families start.

use crate::arch::MAX_HEAD_DIM;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{FfnSpec, LayerSpec, Mixer};
use crate::layers::norm::spec::NormKind;
use crate::layers::rope::spec::Rope;
use crate::model::ModelError;
use crate::model::keys::{Keys, MixerKind};

impl Hparams {
    /// A plain llama with the sizes of the file, which families then modify.
    pub(crate) fn llama(
        keys: &Keys<'_>,
        norm: NormKind,
        ffn: Vec<FfnSpec>,
    ) -> Result<Hparams, ModelError> {
        Hparams::hybrid(keys, norm, ffn, vec![MixerKind::Attention; keys.n_layer])
    }

    /// The same, but that not all layers have attention.
    pub(crate) fn hybrid(
        keys: &Keys<'_>,
        norm: NormKind,
        ffn: Vec<FfnSpec>,
        mixers: Vec<MixerKind>,
    ) -> Result<Hparams, ModelError> {
        let n_embd = keys.count("embedding_length", 1 << 17)?;
        let heads = Heads::of(keys, &mixers, n_embd)?;
        let Heads {
            head_dim,
            n_ctx_train,
            ..
        } = heads;
        let layers = mixers.iter().zip(ffn).enumerate();
        let layers = layers.map(|(i, (mixer, ffn))| LayerSpec {
            mixer: match mixer {
                MixerKind::Attention => Mixer::Attention(heads.attention(i)),
                MixerKind::Both(spec) => Mixer::Both(heads.attention(i), spec.clone()),
                MixerKind::Recurrent(spec) => Mixer::Recurrent(spec.clone()),
                MixerKind::Nothing => Mixer::None,
            },
            ffn,
            ..LayerSpec::default()
        });
        let kv_layers = mixers.iter().enumerate().map(|(i, mixer)| {
            if has_attention(mixer) {
                mixers[..i].iter().filter(|m| has_attention(m)).count()
            } else {
                0
            }
        });
        let first = mixers.iter().find(|mixer| has_attention(mixer));
        Ok(Hparams {
            arch: keys.arch.to_owned(),
            n_vocab: keys.n_vocab,
            n_ctx_train,
            n_embd,
            n_layer: keys.n_layer,
            n_mtp: keys.n_mtp,
            norm,
            norm_eps: norm_eps(keys, norm)?,
            pooling: keys.pooling()?,
            ropes: first
                .map(|_| Rope::of(keys, head_dim, n_ctx_train))
                .transpose()?
                .into_iter()
                .collect(),
            layers: layers.collect(),
            kv_layers: kv_layers.collect(),
            ..Hparams::default()
        })
    }
}

fn has_attention(mixer: &MixerKind) -> bool {
    matches!(mixer, MixerKind::Attention | MixerKind::Both(_))
}

/// Epsilon of all norms, under the key of their kind or of the other one.
fn norm_eps(keys: &Keys<'_>, norm: NormKind) -> Result<f32, ModelError> {
    let rms = "attention.layer_norm_rms_epsilon";
    let layer = "attention.layer_norm_epsilon";
    let (eps, other) = match norm {
        NormKind::Rms | NormKind::RmsPlain => (rms, layer),
        NormKind::Layer | NormKind::LayerNoBias | NormKind::LayerPlain => (layer, rms),
    };
    keys.positive(eps)?
        .or(keys.positive(other)?)
        .ok_or_else(|| keys.missing(eps))
}

/// Heads of each layer, with their widths.
struct Heads {
    n_head: Vec<usize>,
    n_head_kv: Vec<usize>,
    head_dim: usize,
    head_dim_v: usize,
    n_ctx_train: usize,
}

impl Heads {
    fn of(keys: &Keys<'_>, mixers: &[MixerKind], n_embd: usize) -> Result<Heads, ModelError> {
        // Files say 0 of layers that have no attention.
        let range = usize::from(mixers.iter().all(has_attention))..=1024;
        let n_head = keys.opt_counts("attention.head_count", range.clone())?;
        let n_head = n_head.ok_or_else(|| keys.missing("attention.head_count"))?;
        let n_head_kv = keys
            .opt_counts("attention.head_count_kv", range)?
            .unwrap_or_else(|| n_head.clone());
        let n_ctx_train = keys.count("context_length", 1 << 28)?;
        let first = mixers.iter().position(has_attention);
        let head_dim = match (keys.opt_count("attention.key_length", MAX_HEAD_DIM)?, first) {
            (Some(n), _) => n,
            // No layer has heads.
            (None, None) => 1,
            (None, Some(first)) => {
                let n = n_head[first].max(1);
                if !n_embd.is_multiple_of(n) || n_embd / n > MAX_HEAD_DIM {
                    return Err(ModelError::Inconsistent {
                        what: format!(
                            "embedding_length {n_embd} does not divide into {n} heads of at most {MAX_HEAD_DIM}",
                        ),
                    });
                }
                n_embd / n
            }
        };
        let head_dim_v = keys
            .opt_count("attention.value_length", MAX_HEAD_DIM)?
            .unwrap_or(head_dim);
        let layers = n_head.iter().zip(&n_head_kv).zip(mixers);
        for ((&n, &n_kv), _) in layers.filter(|(_, mixer)| has_attention(mixer)) {
            if n == 0 || n_kv == 0 || !n.is_multiple_of(n_kv) {
                return Err(ModelError::Inconsistent {
                    what: format!("{n} heads cannot share {n_kv} key/value heads"),
                });
            }
        }
        Ok(Heads {
            n_head,
            n_head_kv,
            head_dim,
            head_dim_v,
            n_ctx_train,
        })
    }

    /// Attention of layer `i`.
    fn attention(&self, i: usize) -> AttnSpec {
        AttnSpec {
            n_head: self.n_head[i],
            n_head_kv: self.n_head_kv[i],
            head_dim: self.head_dim,
            head_dim_v: self.head_dim_v,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            ..AttnSpec::default()
        }
    }
}
