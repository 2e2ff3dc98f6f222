//! What distinguishes one transformer from another: sizes of the model, and a specification of each
//! layer.

use crate::arch::MAX_HEAD_DIM;
use crate::model::ModelError;
use crate::model::keys::{Has, Keys};
use crate::model::rope::Rope;
use crate::model::spec::{
    Activation, AttnSpec, Biases, ClassifierSpec, FfnSpec, Gating, LayerSpec, Mixer, MoeSpec,
    Norms, OutputScale, Pooling, QkNorm, RecurrentSpec, RopeId, TimeMixRanks,
};

/// Most residual streams.
pub(crate) const MAX_STREAMS: usize = 8;
/// Hyper-parameters of a model, checked and complete: the executor reads nothing else.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Hparams {
    /// `general.architecture`.
    pub arch: String,
    /// Rows of the embedding table.
    pub n_vocab: usize,
    /// Context length the model was trained for.
    pub n_ctx_train: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Number of layers.
    pub n_layer: usize,
    /// Layers that one of the file's blocks consists of: RWKV's are two, a time mix and a channel
    /// mix.
    pub n_part: usize,
    /// Blocks for multi-token prediction after those, which are no part of the model's own passes.
    pub n_mtp: usize,
    /// Whether this is such a block: its tokens come with hidden states.
    pub is_mtp: bool,
    /// Kind of normalisation.
    pub norm: NormKind,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// Factor on embeddings.
    pub embd_scale: f32,
    /// Whether embeddings of token types are added; every token has the first type.
    pub token_types: bool,
    /// Whether the last layer is followed by a norm.
    pub final_norm: bool,
    /// Whether embeddings have a norm.
    pub embd_norm: bool,
    /// Whether embeddings of positions are added to those of tokens: then no position may reach
    /// `n_ctx_train`.
    pub learned_positions: bool,
    /// Factor on logits.
    pub logit_scale: f32,
    /// Soft cap `c` of logits: `c·tanh(x/c)`.
    pub final_softcap: Option<f32>,
    /// Whether the head must have a bias. Otherwise that is up to the file, as is whether the head
    /// is a matrix of its own: where there is none, the embedding table replaces it.
    pub head_bias: bool,
    /// How vectors of texts are pooled from hidden states, if the file says.
    pub pooling: Option<Pooling>,
    /// Head that scores pairs of texts, if the model is a reranker.
    pub classifier: Option<ClassifierSpec>,
    /// Input and output widths of the matrices by which such vectors are then multiplied.
    pub dense: Vec<(usize, usize)>,
    /// Rotary position embeddings; layers refer to them by [`RopeId`].
    pub ropes: Vec<Rope>,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// For each layer, the index of the keys and values that it reads, among the layers that keep
    /// some; 0 for layers without attention.
    pub kv_layers: Vec<usize>,
    /// Several residual streams, if the model has them (Gemma 3n).
    pub streams: Option<StreamsSpec>,
    /// Width of the vector that each layer has for each token, if layers have such vectors (Gemma
    /// 3n, 4).
    pub per_layer_embd: Option<usize>,
}

/// Turns products of the head into logits: `scale`, then `cap·tanh(x/cap)` unless `cap` is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitTransform {
    /// Factor on the products.
    pub scale: f32,
    /// Bound on the absolute value of logits; 0: none.
    pub cap: f32,
}

impl LogitTransform {
    /// The logit for a product `raw`.
    pub fn logit(self, raw: f32) -> f32 {
        let x = self.scale * raw;
        if self.cap > 0.0 {
            self.cap * (x / self.cap).tanh()
        } else {
            x
        }
    }

    /// Derivative of [`LogitTransform::logit`], given its result.
    pub fn slope(self, logit: f32) -> f32 {
        let x = if self.cap > 0.0 {
            logit / self.cap
        } else {
            0.0
        };
        self.scale * (1.0 - x * x)
    }

    /// Turns a whole row of products into logits, in place.
    pub fn row(self, logits: &mut [f32]) {
        if self.scale != 1.0 {
            logits.iter_mut().for_each(|x| *x *= self.scale);
        }
        if self.cap > 0.0 {
            logits
                .iter_mut()
                .for_each(|x| *x = self.cap * (*x / self.cap).tanh());
        }
    }
}

/// Several residual streams (AltUp, arXiv 2301.13310), and in each layer a side path around
/// attention (Laurel).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamsSpec {
    /// Streams.
    pub n_stream: usize,
    /// Width of the middle of a side path.
    pub laurel_rank: usize,
}

/// Kind of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Root mean square, no bias.
    Rms,
    /// Mean and variance, with bias.
    Layer,
    /// Mean and variance, no bias.
    LayerNoBias,
    /// Mean and variance, no weights at all.
    LayerPlain,
}

impl Hparams {
    /// How the head's products become logits.
    pub fn logit_transform(&self) -> LogitTransform {
        LogitTransform {
            scale: self.logit_scale,
            cap: self.final_softcap.unwrap_or(0.0),
        }
    }

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

    /// The attention of every layer that has one, to modify.
    pub(crate) fn attention_mut(&mut self) -> impl Iterator<Item = &mut AttnSpec> {
        self.layers.iter_mut().filter_map(LayerSpec::attention_mut)
    }

    /// The attention of every layer that has one.
    pub fn attention(&self) -> impl Iterator<Item = &AttnSpec> {
        self.layers.iter().filter_map(LayerSpec::attention)
    }

    /// The recurrent mixer of every layer that has one.
    pub fn recurrent(&self) -> impl Iterator<Item = &RecurrentSpec> {
        self.layers.iter().filter_map(LayerSpec::recurrent)
    }

    /// Whether layers read the first one's values (RWKV 7).
    pub(crate) fn shares_values(&self) -> bool {
        let reads = |spec: &RecurrentSpec| match spec {
            RecurrentSpec::TimeMix(spec) => matches!(spec.ranks, TimeMixRanks::Seven { .. }),
            _ => false,
        };
        self.recurrent().any(reads)
    }

    /// Names a feature of the model without an implemented gradient, if it has one.
    pub(crate) fn without_gradient(&self) -> Option<&'static str> {
        if self.attention().any(|attn| attn.sinks) {
            return Some("attention sinks");
        }
        if self.activates(|activation| activation == Activation::SwiGluOai) {
            return Some("clamped SwiGLU");
        }
        self.forward_only()
    }

    /// Names a feature of the model that only the CPU's forward pass implements, neither its
    /// gradient nor a GPU, if it has one.
    pub(crate) fn forward_only(&self) -> Option<&'static str> {
        let attn = |is: fn(&AttnSpec) -> bool| self.attention().any(is);
        let moe = |is: fn(&MoeSpec) -> bool| self.mixtures().any(is);
        let activations = self.activates(|activation| {
            use Activation::{GeGluErf, GeluErf, ReGlu, Xielu};
            matches!(activation, ReGlu | GeGluErf | GeluErf | Xielu { .. })
        });
        if let Some(spec) = self.recurrent().next() {
            return Some(spec.name());
        }
        let all = [
            (
                self.layers
                    .iter()
                    .any(|layer| layer.mixer == Mixer::None || layer.ffn == FfnSpec::None),
                "half layers",
            ),
            (self.is_mtp, "multi-token prediction"),
            (self.embd_norm, "a norm of embeddings"),
            (self.token_types, "types of tokens"),
            (self.learned_positions, "learned positions"),
            (
                self.layers
                    .iter()
                    .any(|layer| layer.norms == Norms::Parallel),
                "two norms of one residual stream",
            ),
            (
                self.layers
                    .iter()
                    .any(|layer| layer.norms == Norms::Residual),
                "norms of the residual stream",
            ),
            (
                attn(|a| {
                    matches!(
                        a.qk_norm,
                        Some(QkNorm::PerHeadRotated | QkNorm::PlainRotated)
                    )
                }),
                "norms of rotated queries and keys",
            ),
            (
                attn(|a| a.qk_norm == Some(QkNorm::LayerByHead)),
                "layer norms of queries and keys",
            ),
            (
                attn(|a| a.clip.is_some()),
                "clamped queries, keys and values",
            ),
            (attn(|a| a.value_scale != 1.0), "a factor on values"),
            (attn(|a| a.value_norm), "norms of values"),
            (attn(|a| a.keys_as_values), "keys that serve as values"),
            (attn(|a| a.shares_kv), "keys and values of other layers"),
            (self.streams.is_some(), "several residual streams"),
            (self.per_layer_embd.is_some(), "embeddings for each layer"),
            (
                self.layers
                    .iter()
                    .any(|layer| layer.output_scale != OutputScale::None),
                "factors behind layers",
            ),
            (attn(|a| a.alibi.is_some()), "ALiBi"),
            (attn(|a| a.temperature.is_some()), "attention temperature"),
            (attn(|a| a.gated), "gated attention"),
            (attn(|a| !a.causal), "attention to later tokens"),
            (attn(|a| a.chunked), "attention in chunks"),
            (attn(|a| a.latent.is_some()), "latent attention"),
            (
                self.layers
                    .iter()
                    .any(|layer| matches!(layer.ffn, FfnSpec::Both(..))),
                "mixtures beside dense layers",
            ),
            (
                moe(|x| x.routes_early),
                "a router that reads the layer's input",
            ),
            (moe(|x| x.weighs_inputs), "experts with weighed inputs"),
            (moe(|x| x.fused), "experts whose gate and up are one matrix"),
            (moe(|x| x.latent.is_some()), "experts of a latent vector"),
            (
                moe(|x| x.gating == Gating::SparseMixer),
                "the SparseMixer router",
            ),
            (
                activations,
                "the activation ReGLU, xIELU, or GELU by the error function",
            ),
        ];
        all.into_iter().find_map(|(is, what)| is.then_some(what))
    }

    /// Whether a dense layer, or a mixture without one beside it, has such an activation.
    fn activates(&self, is: impl Fn(Activation) -> bool) -> bool {
        self.layers.iter().any(|layer| match &layer.ffn {
            FfnSpec::Dense(ffn) => is(ffn.activation),
            FfnSpec::Moe(moe) => is(moe.activation),
            FfnSpec::Both(..) | FfnSpec::None => false,
        })
    }

    /// The mixtures of experts among the layers.
    pub fn mixtures(&self) -> impl Iterator<Item = &MoeSpec> {
        self.layers.iter().filter_map(|layer| layer.ffn.moe())
    }

    /// The rope that a layer refers to.
    pub fn rope(&self, id: RopeId) -> &Rope {
        &self.ropes[id.0]
    }
}
