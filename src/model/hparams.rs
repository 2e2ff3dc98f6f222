//! Hyper-parameters of a llama with the sizes of a file, from which families start.

use crate::arch::MAX_HEAD_DIM;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{Biases, FfnSpec, LayerSpec, Mixer, OutputScale};
use crate::layers::norm::spec::{NormKind, Norms};
use crate::layers::rope::spec::{Rope, RopeId};
use crate::model::ModelError;
use crate::model::keys::{Has, Keys};

impl Hparams {
    /// A plain llama with the sizes of the file, which families then modify.
    pub(crate) fn llama(
        keys: &Keys<'_>,
        norm: NormKind,
        ffn: Vec<FfnSpec>,
    ) -> Result<Hparams, ModelError> {
        Hparams::hybrid(keys, norm, ffn, vec![Has::Attention; keys.n_layer])
    }

    /// The same, but that not all layers have attention.
    pub(crate) fn hybrid(
        keys: &Keys<'_>,
        norm: NormKind,
        ffn: Vec<FfnSpec>,
        mixers: Vec<Has>,
    ) -> Result<Hparams, ModelError> {
        let n_embd = keys.count("embedding_length", 1 << 17)?;
        let has_attention = |mixer: &Has| matches!(mixer, Has::Attention | Has::Both(_));
        // Files say 0 of layers that have no attention.
        let heads = usize::from(mixers.iter().all(has_attention))..=1024;
        let n_head = keys.opt_counts("attention.head_count", heads.clone())?;
        let n_head = n_head.ok_or_else(|| keys.missing("attention.head_count"))?;
        let n_head_kv = keys
            .opt_counts("attention.head_count_kv", heads)?
            .unwrap_or_else(|| n_head.clone());
        let n_ctx_train = keys.count("context_length", 1 << 28)?;
        let first = mixers.iter().position(has_attention);
        let heads_of_first = first.map_or(1, |i| n_head[i].max(1));
        let head_dim = match keys.opt_count("attention.key_length", MAX_HEAD_DIM)? {
            Some(n) => n,
            // Nobody asks.
            None if first.is_none() => 1,
            None if n_embd % heads_of_first == 0 && n_embd / heads_of_first <= MAX_HEAD_DIM => {
                n_embd / heads_of_first
            }
            None => {
                return Err(ModelError::Inconsistent {
                    what: format!(
                        "embedding_length {n_embd} does not divide into {heads_of_first} heads of at most {MAX_HEAD_DIM}",
                    ),
                });
            }
        };
        let head_dim_v = keys
            .opt_count("attention.value_length", MAX_HEAD_DIM)?
            .unwrap_or(head_dim);
        let of_attention = n_head
            .iter()
            .zip(&n_head_kv)
            .zip(&mixers)
            .filter(|(_, mixer)| has_attention(mixer));
        let unfit = |n: usize, n_kv: usize| n == 0 || n_kv == 0 || !n.is_multiple_of(n_kv);
        if let Some((n, n_kv)) = of_attention
            .map(|(heads, _)| heads)
            .find(|(n, n_kv)| unfit(**n, **n_kv))
        {
            return Err(ModelError::Inconsistent {
                what: format!("{n} heads cannot share {n_kv} key/value heads"),
            });
        }
        let (rms, layer) = (
            "attention.layer_norm_rms_epsilon",
            "attention.layer_norm_epsilon",
        );
        let (eps, other) = if norm == NormKind::Rms {
            (rms, layer)
        } else {
            (layer, rms)
        };
        let attention = |(n_head, n_head_kv): (usize, usize)| AttnSpec {
            n_head,
            n_head_kv,
            head_dim,
            head_dim_v,
            scale: 1.0 / (head_dim as f32).sqrt(),
            softcap: None,
            window: None,
            causal: true,
            chunked: false,
            rope: Some(RopeId(0)),
            qk_norm: None,
            clip: None,
            value_scale: 1.0,
            value_norm: false,
            keys_as_values: false,
            shares_kv: false,
            alibi: None,
            sinks: false,
            temperature: None,
            gated: false,
            gate_in_q: false,
            latent: None,
        };
        let layers =
            n_head
                .into_iter()
                .zip(n_head_kv)
                .zip(&mixers)
                .zip(ffn)
                .map(|((heads, mixer), ffn)| LayerSpec {
                    mixer: match mixer {
                        Has::Attention => Mixer::Attention(attention(heads)),
                        Has::Both(spec) => Mixer::Both(attention(heads), spec.clone()),
                        Has::Recurrent(spec) => Mixer::Recurrent(spec.clone()),
                        Has::Nothing => Mixer::None,
                    },
                    ffn,
                    norms: Norms::Before,
                    biases: Biases::Optional,
                    residual_scale: 1.0,
                    output_scale: OutputScale::None,
                });
        let kv_layers = mixers.iter().enumerate().map(|(i, mixer)| {
            if has_attention(mixer) {
                mixers[..i]
                    .iter()
                    .filter(|mixer| has_attention(mixer))
                    .count()
            } else {
                0
            }
        });
        Ok(Hparams {
            arch: keys.arch.to_owned(),
            n_vocab: keys.n_vocab,
            n_ctx_train,
            n_embd,
            n_layer: keys.n_layer,
            n_part: 1,
            n_mtp: keys.n_mtp,
            is_mtp: false,
            norm,
            norm_eps: keys
                .positive(eps)?
                .or(keys.positive(other)?)
                .ok_or_else(|| keys.missing(eps))?,
            embd_scale: 1.0,
            token_types: false,
            final_norm: true,
            embd_norm: false,
            learned_positions: false,
            logit_scale: 1.0,
            final_softcap: None,
            head_bias: false,
            pooling: keys.pooling()?,
            classifier: None,
            dense: Vec::new(),
            ropes: first
                .map(|_| Rope::of(keys, head_dim, n_ctx_train))
                .transpose()?
                .into_iter()
                .collect(),
            layers: layers.collect(),
            kv_layers: kv_layers.collect(),
            streams: None,
            per_layer_embd: None,
        })
    }
}
