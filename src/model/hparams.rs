//! What distinguishes one transformer from another: sizes of the model, and a specification of each
//! layer.

use super::family::Family;
use super::spec::{
    Activation, AttnSpec, Biases, DenseSpec, ExpertGroups, FfnSpec, Gating, LatentSpec, LayerSpec,
    Mamba2Spec, MambaNorms, MambaSpec, Mixer, MoeSpec, Norms, OutputScale, QkNorm, RecurrentSpec,
    SharedSpec, Temperature, TimeMixRanks,
};
use crate::arch::MAX_HEAD_DIM;
use crate::gguf::{Array, Metadata, TensorInfo, Value};
use crate::model::ModelError;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// Most rows of an embedding table.
const MAX_VOCAB: u64 = (1 << 24) - 1;
/// Most tokens that a convolution sees.
const MAX_TAPS: usize = 64;
/// Most residual streams.
pub(crate) const MAX_STREAMS: usize = 8;
/// Most experts of a layer.
pub(crate) const MAX_EXPERT: usize = 1024;

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
pub(crate) struct Finish {
    pub(crate) scale: f32,
    pub(crate) cap: f32,
}

impl Finish {
    /// The logit for a product `raw`.
    pub(crate) fn logit(self, raw: f32) -> f32 {
        let x = self.scale * raw;
        if self.cap > 0.0 {
            self.cap * (x / self.cap).tanh()
        } else {
            x
        }
    }

    /// Derivative of [`Finish::logit`], given its result.
    pub(crate) fn slope(self, logit: f32) -> f32 {
        let x = if self.cap > 0.0 {
            logit / self.cap
        } else {
            0.0
        };
        self.scale * (1.0 - x * x)
    }

    /// Turns a whole row of products into logits, in place.
    pub(crate) fn row(self, logits: &mut [f32]) {
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

/// How the vector of a text is made from the hidden states of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first token's.
    Cls,
    /// The last token's.
    Last,
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

/// Head of a reranker: from the pooled hidden states of a pair of texts to its score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassifierSpec {
    /// How hidden states are pooled.
    pub pooling: Pooling,
    /// Output width of the matrix before the activation; `None`: there is neither.
    pub n_hidden: Option<usize>,
    /// That activation.
    pub activation: ClassifierActivation,
    /// Whether a norm without bias follows it.
    pub norm: bool,
    /// Outputs of the last matrix, of which the first is the score; `None`: there is no such
    /// matrix.
    pub n_label: Option<usize>,
    /// Whether the score is a probability: a softmax over the outputs.
    pub softmax: bool,
}

/// Activation in the head of a reranker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClassifierActivation {
    /// `tanh`.
    Tanh,
    /// GELU by the error function.
    GeluErf,
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

/// Order of the pairs of dimensions that are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeOrder {
    /// Neighbours: `(0, 1), (2, 3), …`
    Norm,
    /// Halves: `(0, n/2), (1, n/2 + 1), …`
    NeoX,
}

/// How rotation frequencies are stretched beyond the trained context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all (or by the factors of the tensor `rope_freqs.weight`, as llama 3 does).
    None,
    /// All by the same factor (arXiv 2306.15595).
    Linear {
        /// Positions are divided by this.
        factor: f32,
    },
    /// Low frequencies interpolated, high ones kept (arXiv 2309.00071).
    Yarn {
        /// Positions are divided by this where frequencies are low.
        factor: f32,
        /// Rotations over the original context above which a dimension is kept.
        beta_fast: f32,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f32,
        /// Whether these bounds are rounded to whole dimensions.
        truncate: bool,
    },
    /// Factors per dimension from the file, one set for short and one for long contexts (arXiv
    /// 2402.13753). Phi 3 files have the factors without naming this scaling; they are used all
    /// the same.
    Long,
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Which dimensions form a pair.
    pub order: RopeOrder,
    /// Dimensions rotated; the rest of the head stays.
    pub n_dims: usize,
    /// Base of the frequencies.
    pub theta: f32,
    /// Scaling beyond the trained context.
    pub scaling: RopeScaling,
    /// Context the frequencies were trained for.
    pub n_ctx_orig: usize,
    /// Factor on the rotated values.
    pub attn_factor: f32,
    /// Whether the divisors in the file (`rope_freqs.weight`) apply.
    pub factors: bool,
    /// Whether YaRN multiplies rotated values by `1 + ln(factor)/10` in addition.
    pub yarn_magnitude: bool,
}

/// Index of a rope in [`Hparams::ropes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeId(usize);

impl RopeId {
    pub(crate) fn index(self) -> usize {
        self.0
    }
}

/// What mixes tokens in a layer, before the sizes of attention are known.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Has {
    Attention,
    Recurrent(RecurrentSpec),
    Both(RecurrentSpec),
    Nothing,
}

/// What to do with metadata keys and tensors of the architecture that this build does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unknown {
    /// Refuse the file: they may change what the model computes.
    #[default]
    Refuse,
    /// Ignore them and list them in [`Model::unknown`](crate::Model::unknown).
    Report,
}

/// Unknown metadata keys and tensors of a file, if they are not refused.
#[derive(Debug, Default)]
pub(crate) struct UnknownNames {
    pub(crate) policy: Unknown,
    pub(crate) names: Vec<String>,
}

impl UnknownNames {
    /// Records the unknown `name`, or returns `error`.
    pub(crate) fn found(&mut self, name: &str, error: ModelError) -> Result<(), ModelError> {
        match self.policy {
            Unknown::Refuse => Err(error),
            Unknown::Report => {
                self.names.push(name.to_owned());
                Ok(())
            }
        }
    }
}

/// Metadata of one architecture: keys are given without their prefix. Remembers which were read, so
/// that none is ignored unnoticed.
pub(crate) struct Keys<'a> {
    pub(crate) arch: &'a str,
    /// Number of layers, without those of multi-token prediction, which are not run.
    pub(crate) n_layer: usize,
    n_mtp: usize,
    n_vocab: usize,
    metadata: &'a Metadata,
    tensors: &'a [TensorInfo],
    asked: RefCell<BTreeSet<String>>,
}

/// Keys that do not affect logits, and sizes that the shapes of tensors repeat.
const HARMLESS: &[&str] = &[
    "attention.layer_norm_epsilon", // one of the two is read: `finish`
    "attention.layer_norm_rms_epsilon",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "vocab_size",
];

/// Keys that would change the computation, with the values for which it is the one implemented
/// here.
const FIXED: &[(&str, &[f64])] = &[
    ("attention.causal", &[1.0]),
    ("attention.clamp_kqv", &[0.0]),
    ("attention.max_alibi_bias", &[0.0]),
    ("attention.sliding_window", &[0.0]),
    ("attn_logit_softcapping", &[0.0]),
    ("expert_count", &[0.0]),
    ("expert_gating_func", &[1.0]),
    ("expert_group_count", &[0.0, 1.0]),
    ("expert_group_used_count", &[0.0, 1.0]),
    ("expert_used_count", &[0.0]),
    ("expert_weights_scale", &[0.0, 1.0]),
    ("final_logit_softcapping", &[0.0]),
    ("leading_dense_block_count", &[0.0]),
    ("rope.scaling.yarn_attn_factor", &[1.0]),
    ("rope.scaling.yarn_ext_factor", &[1.0]),
];

impl<'a> Keys<'a> {
    fn new(
        arch: &'a str,
        metadata: &'a Metadata,
        tensors: &'a [TensorInfo],
        n_vocab: usize,
    ) -> Result<Keys<'a>, ModelError> {
        let keys = Keys {
            arch,
            n_layer: 0,
            n_mtp: 0,
            n_vocab,
            metadata,
            tensors,
            asked: RefCell::default(),
        };
        let n_block = keys.count("block_count", 1024)?;
        let n_mtp = match keys.opt_u64("nextn_predict_layers")? {
            Some(n) if n >= n_block as u64 => {
                return Err(ModelError::OutOfRange {
                    key: keys.name("nextn_predict_layers"),
                    value: n.to_string(),
                    expected: format!("fewer than the {n_block} blocks"),
                });
            }
            n => n.unwrap_or(0) as usize,
        };
        Ok(Keys {
            n_layer: n_block - n_mtp,
            n_mtp,
            ..keys
        })
    }

    /// Whether layer `i` has a tensor of this name.
    pub(crate) fn has_in_layer(&self, i: usize, part: &str) -> bool {
        self.has(&format!("blk.{i}.{part}"))
    }

    /// Array of one number per layer; `name` is the full key, without the architecture.
    pub(crate) fn numbers(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let values = self.metadata.f32s(name)?;
        self.one_per_layer(name, values.len())?;
        Ok(values.to_vec())
    }

    /// Whether there is a tensor of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.iter().any(|t| t.name == name)
    }

    /// Output width of a matrix, if it is there; what is too large for one is refused when it is
    /// bound.
    pub(crate) fn n_out(&self, name: &str) -> Option<usize> {
        let tensor = self.tensors.iter().find(|t| t.name == name)?;
        Some(tensor.dims.get(1).map_or(1, |&n| n.min(1 << 17) as usize))
    }

    /// Whether a layer has a tensor of this name.
    pub(crate) fn has_part(&self, part: &str) -> bool {
        let is_it = |t: &TensorInfo| {
            t.name
                .strip_suffix(part)
                .is_some_and(|layer| layer.ends_with('.'))
        };
        self.tensors.iter().any(is_it)
    }

    /// Full key in the file; counts it as read.
    fn name(&self, key: &str) -> String {
        let name = format!("{}.{key}", self.arch);
        self.asked.borrow_mut().insert(name.clone());
        name
    }

    /// Refuses a key unless it is absent or one of `values`; booleans count as 0 and 1.
    pub(crate) fn only(&self, key: &str, values: &[f64]) -> Result<(), ModelError> {
        let name = self.name(key);
        let Some(value) = self.metadata.get(&name) else {
            return Ok(());
        };
        let number = match value {
            Value::Bool(yes) => Some(f64::from(u8::from(*yes))),
            Value::F64(x) => Some(*x),
            Value::F32(x) => Some(f64::from(*x)),
            _ => value.integer().map(|n| n as f64),
        };
        if number.is_some_and(|n| values.contains(&n)) {
            return Ok(());
        }
        let shown = |n: f64| {
            if let Value::Bool(_) = value {
                (n != 0.0).to_string()
            } else {
                n.to_string()
            }
        };
        Err(ModelError::OutOfRange {
            key: name,
            value: number.map_or_else(|| format!("of type {}", value.type_name()), shown),
            expected: values
                .iter()
                .map(|&n| shown(n))
                .collect::<Vec<_>>()
                .join(" or "),
        })
    }

    /// Counts a key as read.
    pub(crate) fn ignore(&self, key: &str) {
        self.name(key);
    }

    /// Refuses or reports the architecture's keys that nothing has read, except the harmless ones.
    fn none_ignored(&self, unknown: &mut UnknownNames) -> Result<(), ModelError> {
        let asked = self.asked.take();
        for (name, _) in self
            .metadata
            .iter()
            .filter(|(name, _)| !asked.contains(*name))
        {
            let Some(key) = name
                .strip_prefix(self.arch)
                .and_then(|rest| rest.strip_prefix('.'))
            else {
                continue;
            };
            if let Some((key, values)) = FIXED.iter().find(|(fixed, _)| *fixed == key) {
                self.only(key, values)?;
            } else if !HARMLESS.contains(&key) {
                let error = ModelError::UnknownKey {
                    key: name.to_owned(),
                    arch: self.arch.to_owned(),
                };
                unknown.found(name, error)?;
            }
        }
        Ok(())
    }

    /// A count, refused outside `1..=max`.
    pub(crate) fn count(&self, key: &str, max: usize) -> Result<usize, ModelError> {
        self.opt_count(key, max)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn opt_count(&self, key: &str, max: usize) -> Result<Option<usize>, ModelError> {
        let name = self.name(key);
        self.uniform_u64(&name)?
            .map(|value| Self::in_range(&name, value, 1..=max))
            .transpose()
    }

    fn in_range(name: &str, value: u64, range: RangeInclusive<usize>) -> Result<usize, ModelError> {
        let count = usize::try_from(value).ok().filter(|n| range.contains(n));
        count.ok_or_else(|| ModelError::OutOfRange {
            key: name.to_owned(),
            value: value.to_string(),
            expected: format!("{} to {}", range.start(), range.end()),
        })
    }

    /// An integer, or an array that repeats one (some converters write one value per layer).
    fn uniform_u64(&self, name: &str) -> Result<Option<u64>, ModelError> {
        if !matches!(self.metadata.get(name), Some(Value::Array(_))) {
            return Ok(self.metadata.opt_u64(name)?);
        }
        let values = self.metadata.u32s(name)?;
        let first = values.first().copied().unwrap_or(0);
        if values.iter().any(|&v| v != first) {
            return Err(ModelError::VariesByLayer {
                key: name.to_owned(),
            });
        }
        Ok(Some(first.into()))
    }

    /// Counts per layer, refused outside `range`: one number for all, or an array.
    pub(crate) fn opt_counts(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<Vec<usize>>, ModelError> {
        let name = self.name(key);
        let values: Vec<u64> = match self.metadata.get(&name) {
            Some(Value::Array(_)) => self
                .metadata
                .u32s(&name)?
                .iter()
                .map(|&n| n.into())
                .collect(),
            _ => match self.metadata.opt_u64(&name)? {
                Some(n) => vec![n; self.n_layer],
                None => return Ok(None),
            },
        };
        self.one_per_layer(&name, values.len())?;
        values
            .into_iter()
            .take(self.n_layer)
            .map(|value| Self::in_range(&name, value, range.clone()))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    fn one_per_layer(&self, name: &str, n: usize) -> Result<(), ModelError> {
        if n == self.n_layer || n == self.n_layer + self.n_mtp {
            return Ok(());
        }
        Err(ModelError::Inconsistent {
            what: format!("{name} has {n} values for {} layers", self.n_layer),
        })
    }

    pub(crate) fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey {
            key: format!("{}.{key}", self.arch),
        }
    }

    /// A boolean for each layer.
    pub(crate) fn bools(&self, key: &str) -> Result<Option<Vec<bool>>, ModelError> {
        let name = self.name(key);
        let values: Vec<bool> = match self.metadata.get(&name) {
            None => return Ok(None),
            Some(Value::Array(Array::Bool(values))) => values.clone(),
            Some(_) => self.metadata.u32s(&name)?.iter().map(|&n| n != 0).collect(),
        };
        self.one_per_layer(&name, values.len())?;
        Ok(Some(values))
    }

    /// Tokens that a convolution sees.
    pub(crate) fn taps(&self, key: &str) -> Result<usize, ModelError> {
        let name = self.name(key);
        let value = self.uniform_u64(&name)?.ok_or_else(|| self.missing(key))?;
        Self::in_range(&name, value, 2..=MAX_TAPS)
    }

    /// Mamba 2 by the sizes of the file.
    pub(crate) fn mamba2(&self) -> Result<RecurrentSpec, ModelError> {
        let spec = Mamba2Spec {
            n_inner: self.count("ssm.inner_size", 1 << 17)?,
            n_head: self.count("ssm.time_step_rank", 1 << 12)?,
            n_group: self.opt_count("ssm.group_count", 1 << 12)?.unwrap_or(1),
            n_state: self.count("ssm.state_size", 1 << 12)?,
            n_tap: self.taps("ssm.conv_kernel")?,
            norm: self.has_part("ssm_norm.weight"),
        };
        self.divides(
            "ssm.inner_size",
            spec.n_inner,
            "ssm.time_step_rank",
            spec.n_head,
        )?;
        self.divides(
            "ssm.time_step_rank",
            spec.n_head,
            "ssm.group_count",
            spec.n_group,
        )?;
        Ok(RecurrentSpec::Mamba2(spec))
    }

    /// Mamba 1 by the sizes of the file.
    pub(crate) fn mamba(&self) -> Result<RecurrentSpec, ModelError> {
        Ok(RecurrentSpec::Mamba(MambaSpec {
            n_inner: self.count("ssm.inner_size", 1 << 17)?,
            n_state: self.count("ssm.state_size", 1 << 12)?,
            dt_rank: self.count("ssm.time_step_rank", 1 << 12)?,
            n_tap: self.taps("ssm.conv_kernel")?,
            norms: match self.opt_bool("ssm.dt_b_c_rms")? {
                Some(true) => MambaNorms::Plain,
                _ if self.has_part("ssm_dt_norm.weight") => MambaNorms::Weighted,
                _ => MambaNorms::None,
            },
        }))
    }

    /// Refuses sizes of which one is no multiple of the other.
    pub(crate) fn divides(
        &self,
        key: &str,
        n: usize,
        by_key: &str,
        by: usize,
    ) -> Result<(), ModelError> {
        if n.is_multiple_of(by) {
            return Ok(());
        }
        Err(ModelError::Inconsistent {
            what: format!("{key} {n} is no multiple of {by_key} {by}"),
        })
    }

    /// Attention in the layers with key/value heads, `spec` in the others.
    pub(crate) fn attention_or(&self, spec: &RecurrentSpec) -> Result<Vec<Has>, ModelError> {
        let n_head_kv = self.opt_counts("attention.head_count_kv", 0..=1024)?;
        let n_head_kv = n_head_kv.ok_or_else(|| self.missing("attention.head_count_kv"))?;
        let mixer = |n| {
            if n > 0 {
                Has::Attention
            } else {
                Has::Recurrent(spec.clone())
            }
        };
        Ok(n_head_kv.into_iter().map(mixer).collect())
    }

    /// A finite number.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let name = self.name(key);
        match self.metadata.opt_f32(&name)? {
            Some(v) if !v.is_finite() => Err(ModelError::OutOfRange {
                key: name,
                value: v.to_string(),
                expected: "a finite number".into(),
            }),
            v => Ok(v),
        }
    }

    /// A finite positive number.
    pub(crate) fn positive(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let name = self.name(key);
        match self.metadata.opt_f32(&name)? {
            Some(v) if !(v.is_finite() && v > 0.0) => Err(ModelError::OutOfRange {
                key: name,
                value: v.to_string(),
                expected: "a finite number above 0".into(),
            }),
            v => Ok(v),
        }
    }

    /// Sliding window of every layer: `default` positions unless the file says otherwise; 0 in the
    /// file means none. Every `pattern`-th layer sees everything, or no layer does if that is
    /// 0, unless the file gives another pattern.
    fn windows(
        &self,
        default: Option<usize>,
        pattern: usize,
    ) -> Result<Vec<Option<usize>>, ModelError> {
        let size = self.uniform_u64(&self.name("attention.sliding_window"))?;
        let size = size
            .map_or(default, |n| Some(usize::try_from(n).unwrap_or(usize::MAX)))
            .filter(|&n| n > 0);
        let key = self.name("attention.sliding_window_pattern");
        let covered: Vec<bool> = match self.metadata.get(&key) {
            Some(Value::Array(Array::Bool(by_layer))) => by_layer.clone(),
            Some(Value::Array(_)) => self.metadata.u32s(&key)?.iter().map(|&n| n != 0).collect(),
            _ => {
                let pattern = self.metadata.opt_u32(&key)?.map_or(pattern, |n| n as usize);
                (0..self.n_layer)
                    .map(|i| pattern == 0 || i % pattern < pattern - 1)
                    .collect()
            }
        };
        self.one_per_layer(&key, covered.len())?;
        Ok(covered
            .into_iter()
            .map(|covered| size.filter(|_| covered))
            .collect())
    }

    /// Dense feed-forward layers.
    pub(crate) fn dense(&self, activation: Activation) -> Result<Vec<FfnSpec>, ModelError> {
        self.all_dense(activation, false)
    }

    /// Dense feed-forward layers whose gate is the first half of `ffn_up`.
    pub(crate) fn dense_fused(&self, activation: Activation) -> Result<Vec<FfnSpec>, ModelError> {
        self.all_dense(activation, true)
    }

    fn all_dense(&self, activation: Activation, fused: bool) -> Result<Vec<FfnSpec>, ModelError> {
        let n_ff = self.opt_counts("feed_forward_length", 1..=1 << 20)?;
        let n_ff = n_ff.ok_or_else(|| self.missing("feed_forward_length"))?;
        Ok(n_ff
            .into_iter()
            .map(|n_ff| {
                FfnSpec::Dense(DenseSpec {
                    n_ff,
                    activation,
                    fused,
                    sparsity: None,
                })
            })
            .collect())
    }

    /// Feed-forward layers: `n_dense` dense ones, then mixtures of experts, unless the file says
    /// otherwise: `silu(gate)·up`, the weights of the chosen experts divided by their sum if
    /// `normalise`, the shared expert without a gate.
    pub(crate) fn mixture(
        &self,
        n_dense: usize,
        normalise: bool,
    ) -> Result<Vec<FfnSpec>, ModelError> {
        let n_expert = self.count("expert_count", MAX_EXPERT)?;
        let n_used = self.count("expert_used_count", n_expert)?;
        // The width of dense layers, if there are any.
        self.ignore("feed_forward_length");
        let n_ff = match self.opt_count("expert_feed_forward_length", 1 << 20)? {
            Some(n) => n,
            None => self.count("feed_forward_length", 1 << 20)?,
        };
        let n_shared = self.opt_u64("expert_shared_count")?.unwrap_or(0) as usize;
        let shared = match self.opt_count("expert_shared_feed_forward_length", 1 << 20)? {
            None if (1..=n_expert).contains(&n_shared) => Some(n_shared * n_ff),
            n => n,
        };
        let moe = MoeSpec {
            n_expert,
            n_used,
            n_ff,
            activation: Activation::SwiGlu,
            gating: match self.opt_u64("expert_gating_func")? {
                None | Some(1) => Gating::Softmax,
                Some(2) => Gating::Sigmoid,
                Some(3) => Gating::SoftmaxAfterTopK,
                Some(n) => {
                    return Err(ModelError::OutOfRange {
                        key: self.name("expert_gating_func"),
                        value: n.to_string(),
                        expected: "1 to 3".into(),
                    });
                }
            },
            bias: self.has_part("exp_probs_b.bias") || self.has_part("exp_probs_b"),
            groups: self.expert_groups(n_expert, n_used)?,
            normalise: self.opt_bool("expert_weights_norm")?.unwrap_or(normalise),
            // 0 in a file means no factor.
            scale: self
                .number("expert_weights_scale")?
                .filter(|&s| s != 0.0)
                .unwrap_or(1.0),
            routes_early: false,
            router_norm: false,
            output_scales: false,
            weighs_inputs: false,
            fused: self.has_part("ffn_gate_up_exps.weight"),
            latent: None,
            shared: shared.map(|n_ff| SharedSpec { n_ff, gated: false }),
        };
        let n_dense = self
            .opt_u64("leading_dense_block_count")?
            .map_or(n_dense, |n| n as usize)
            .min(self.n_layer);
        let mut layers = vec![FfnSpec::Moe(moe); self.n_layer];
        if n_dense > 0 {
            layers[..n_dense].clone_from_slice(&self.dense(Activation::SwiGlu)?[..n_dense]);
        }
        Ok(layers)
    }

    /// As [`Keys::mixture`], with sigmoids unless the file says otherwise.
    pub(crate) fn sigmoid_mixture(
        &self,
        n_dense: usize,
        normalise: bool,
    ) -> Result<Vec<FfnSpec>, ModelError> {
        let mut layers = self.mixture(n_dense, normalise)?;
        if self.opt_u64("expert_gating_func")?.is_none() {
            layers
                .iter_mut()
                .filter_map(FfnSpec::moe_mut)
                .for_each(|moe| moe.gating = Gating::Sigmoid);
        }
        Ok(layers)
    }

    fn expert_groups(
        &self,
        n_expert: usize,
        n_used: usize,
    ) -> Result<Option<ExpertGroups>, ModelError> {
        let (count, used) = (
            self.opt_u64("expert_group_count")?,
            self.opt_u64("expert_group_used_count")?,
        );
        let (count, used) = (count.unwrap_or(1).max(1), used.unwrap_or(0));
        if count == 1 || used == 0 || used == count {
            return Ok(None);
        }
        let fits = |count: usize, used: usize| {
            n_expert.is_multiple_of(count) && used < count && n_used <= used * (n_expert / count)
        };
        match (usize::try_from(count), usize::try_from(used)) {
            (Ok(n_group), Ok(used)) if fits(n_group, used) => Ok(Some(ExpertGroups {
                n_group,
                n_used: used,
            })),
            _ => Err(ModelError::Inconsistent {
                what: format!("{n_used} of {n_expert} experts from {used} of {count} groups"),
            }),
        }
    }

    pub(crate) fn opt_u64(&self, key: &str) -> Result<Option<u64>, ModelError> {
        Ok(self.metadata.opt_u64(&self.name(key))?)
    }

    fn pooling(&self) -> Result<Option<Pooling>, ModelError> {
        match self.opt_u64("pooling_type")? {
            // 0 means no pooling: one vector per token. 4 is the score of a pair, see `classifier`.
            None | Some(0 | 4) => Ok(None),
            Some(1) => Ok(Some(Pooling::Mean)),
            Some(2) => Ok(Some(Pooling::Cls)),
            Some(3) => Ok(Some(Pooling::Last)),
            Some(n) => Err(ModelError::OutOfRange {
                key: self.name("pooling_type"),
                value: n.to_string(),
                expected: "0 to 4 (none, mean, cls, last, rank)".into(),
            }),
        }
    }

    /// Head of a reranker, if the file says that its pooling is a score or has one: a matrix and
    /// tanh, then another matrix, as far as the file has them, on hidden states that are pooled
    /// by `pooling`.
    pub(crate) fn classifier(
        &self,
        n_embd: usize,
        pooling: Pooling,
    ) -> Result<Option<ClassifierSpec>, ModelError> {
        let labels = self.name("classifier.output_labels");
        let n_label = match self.metadata.get(&labels) {
            Some(Value::Array(Array::Strings(labels))) => labels.len().max(1),
            _ => 1,
        };
        let is_reranker = self.opt_u64("pooling_type")? == Some(4);
        if !is_reranker && !self.has("cls.weight") && !self.has("cls.output.weight") {
            return Ok(None);
        }
        let n_label = self.has("cls.output.weight").then_some(n_label);
        // Without a second matrix the first one makes the score.
        let n_hidden = self
            .has("cls.weight")
            .then_some(if n_label.is_some() { n_embd } else { 1 });
        if n_hidden.is_none() && n_label.is_none() {
            return Err(ModelError::MissingTensor {
                name: "cls.output.weight".into(),
            });
        }
        let (activation, norm) = (ClassifierActivation::Tanh, self.has("cls.norm.weight"));
        Ok(Some(ClassifierSpec {
            pooling,
            n_hidden,
            activation,
            norm,
            n_label,
            softmax: false,
        }))
    }

    pub(crate) fn opt_bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        Ok(self.metadata.opt_bool(&self.name(key))?)
    }

    pub(crate) fn opt_str(&self, key: &str) -> Result<Option<&str>, ModelError> {
        Ok(self.metadata.opt_str(&self.name(key))?)
    }
}

impl Hparams {
    /// Hyper-parameters of a file, from its header alone.
    ///
    /// # Errors
    /// If its architecture is not supported or a parameter is invalid.
    pub fn of(metadata: &Metadata, tensors: &[TensorInfo]) -> Result<Hparams, ModelError> {
        Hparams::of_with(metadata, tensors, &mut UnknownNames::default())
    }

    /// As [`Hparams::of`]; `unknown` decides what happens to keys that this build does not know.
    pub(crate) fn of_with(
        metadata: &Metadata,
        tensors: &[TensorInfo],
        unknown: &mut UnknownNames,
    ) -> Result<Hparams, ModelError> {
        if let Some(kind) = metadata.opt_str("general.type")?.filter(|&t| t != "model") {
            let what = match kind {
                "adapter" => "an adapter (give it with --lora, besides its model)".into(),
                "learned" => "what was learnt with a model (give its folder with --learn)".into(),
                other => format!("something of type {other:?}"),
            };
            return Err(ModelError::NotAModel { what });
        }
        let arch =
            metadata
                .opt_str("general.architecture")?
                .ok_or_else(|| ModelError::MissingKey {
                    key: "general.architecture".into(),
                })?;
        let family = Family::of(arch)?;
        if tensors.is_empty() {
            return Err(ModelError::NotAModel {
                what: "a vocabulary without weights".into(),
            });
        }
        let Some(embd) = tensors.iter().find(|t| t.name == "token_embd.weight") else {
            return Err(ModelError::MissingTensor {
                name: "token_embd.weight".into(),
            });
        };
        // Binding checks the other dimensions.
        let n_vocab = embd.dims.get(1).copied().unwrap_or(1);
        if n_vocab > MAX_VOCAB {
            return Err(ModelError::TensorShape {
                name: embd.name.clone(),
                found: embd.dims.clone(),
                expected: vec![embd.dims[0], MAX_VOCAB],
            });
        }
        let keys = Keys::new(arch, metadata, tensors, n_vocab as usize)?;
        let hparams = (family.hparams)(&keys)?;
        if hparams.classifier.is_none() {
            keys.only("pooling_type", &[0.0, 1.0, 2.0, 3.0])?;
        }
        keys.none_ignored(unknown)?;
        Ok(hparams)
    }

    /// How the head's products become logits.
    pub(crate) fn logit_finish(&self) -> Finish {
        Finish {
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

    /// Sets the placement of norms in all layers.
    pub(crate) fn set_norms(&mut self, norms: Norms) {
        self.layers.iter_mut().for_each(|layer| layer.norms = norms);
    }

    /// Sets which matrices have a bias, in all layers.
    pub(crate) fn set_biases(&mut self, biases: Biases) {
        self.layers
            .iter_mut()
            .for_each(|layer| layer.biases = biases);
    }

    /// Sets the layers' sliding windows: `default` positions unless the file says otherwise; 0 in
    /// the file means none. Every `pattern`-th layer sees everything, or no layer does if that
    /// is 0, unless the file gives another pattern.
    pub(crate) fn set_windows(
        &mut self,
        keys: &Keys<'_>,
        default: Option<usize>,
        pattern: usize,
    ) -> Result<(), ModelError> {
        let windows = keys.windows(default, pattern)?;
        let layers = self.layers.iter_mut().zip(windows);
        layers
            .filter_map(|(layer, window)| Some((layer.attention_mut()?, window)))
            .for_each(|(attn, window)| {
                attn.window = window;
            });
        Ok(())
    }

    /// Sets the bound on queries, keys and values, if the file has one.
    pub(crate) fn set_clip(&mut self, keys: &Keys<'_>) -> Result<(), ModelError> {
        // 0 in a file means no bound.
        let clip = keys
            .number("attention.clamp_kqv")?
            .filter(|&clip| clip > 0.0);
        self.attention_mut().for_each(|attn| attn.clip = clip);
        Ok(())
    }

    /// Gives attention ALiBi instead of a rope.
    pub(crate) fn set_alibi(&mut self, max_bias: f32) -> Result<(), ModelError> {
        for attn in self.attention_mut() {
            if attn.n_group() > 1 {
                let what = format!(
                    "ALiBi with {} query heads for each key/value head is not supported",
                    attn.n_group()
                );
                return Err(ModelError::Inconsistent { what });
            }
            (attn.rope, attn.alibi) = (None, Some(max_bias));
        }
        Ok(())
    }

    /// Sets the attention temperature, if the file has one; `default` is scale and length if the
    /// file lacks them.
    pub(crate) fn set_temperature(
        &mut self,
        keys: &Keys<'_>,
        default: (f32, usize),
        offset: usize,
    ) -> Result<(), ModelError> {
        let length = keys
            .opt_count("attention.temperature_length", 1 << 28)?
            .unwrap_or(default.1);
        let scale = keys
            .number("attention.temperature_scale")?
            .unwrap_or(default.0);
        let temperature = (scale != 0.0).then_some(Temperature {
            scale,
            length,
            offset,
        });
        self.attention_mut()
            .for_each(|attn| attn.temperature = temperature);
        Ok(())
    }

    /// Makes attention latent (MLA), with the sizes and tensors of the file.
    pub(crate) fn set_latent(&mut self, keys: &Keys<'_>) -> Result<(), ModelError> {
        let q_rank = keys.opt_count("attention.q_lora_rank", 1 << 17)?;
        let kv_rank = keys.count("attention.kv_lora_rank", MAX_HEAD_DIM)?;
        let Some(n_rot) = self.ropes.first().map(|rope| rope.n_dims) else {
            return Err(ModelError::Inconsistent {
                what: "latent attention in no layer".into(),
            });
        };
        let absorbed = keys.has_part("attn_k_b.weight");
        let head_dim = match keys.opt_count("attention.key_length_mla", MAX_HEAD_DIM)? {
            None if absorbed => return Err(keys.missing("attention.key_length_mla")),
            None => self.attention().next().map_or(0, |attn| attn.head_dim),
            Some(n) => n,
        };
        let head_dim_v = match keys.opt_count("attention.value_length_mla", MAX_HEAD_DIM)? {
            None if absorbed => return Err(keys.missing("attention.value_length_mla")),
            None => keys.opt_count("attention.value_length", MAX_HEAD_DIM)?,
            n => n,
        };
        if n_rot >= head_dim || kv_rank + n_rot > MAX_HEAD_DIM {
            return Err(ModelError::Inconsistent {
                what: format!(
                    "latent attention with {n_rot} of {head_dim} dimensions rotated, and a latent of {kv_rank}"
                ),
            });
        }
        let n_embd = self.n_embd;
        for attn in self.attention_mut() {
            let head_dim_v = head_dim_v.unwrap_or((n_embd / attn.n_head).clamp(1, MAX_HEAD_DIM));
            attn.latent = Some(LatentSpec {
                q_rank,
                kv_rank,
                n_plain: head_dim - n_rot,
                n_rot,
                head_dim_v,
                absorbed,
            });
            (attn.n_head_kv, attn.head_dim, attn.head_dim_v) = if absorbed {
                (1, kv_rank + n_rot, kv_rank)
            } else {
                (attn.n_head, head_dim, head_dim_v)
            };
            attn.scale = 1.0 / (head_dim as f32).sqrt();
        }
        Ok(())
    }

    /// Makes each of the last `n` layers read the keys and values of the last layer before them of
    /// its kind, with a window or without.
    pub(crate) fn share_kv(&mut self, n: usize) -> Result<(), ModelError> {
        let windows: Vec<bool> = self.attention().map(|attn| attn.window.is_some()).collect();
        let own = self.n_layer.saturating_sub(n);
        for i in own..self.n_layer {
            let source = (0..own).rev().find(|&source| windows[source] == windows[i]);
            self.kv_layers[i] = source.ok_or_else(|| ModelError::Inconsistent {
                what: format!(
                    "layer {i} shares keys and values, but no layer of its kind has some"
                ),
            })?;
        }
        self.attention_mut()
            .skip(own)
            .for_each(|attn| attn.shares_kv = true);
        Ok(())
    }

    /// Puts a layer with `mixer` alone behind each layer: the second half of a block of the file.
    pub(crate) fn split_blocks(&mut self, mixer: &RecurrentSpec) {
        let second = |layer: &LayerSpec| LayerSpec {
            mixer: Mixer::Recurrent(mixer.clone()),
            ..layer.clone()
        };
        self.layers = self
            .layers
            .iter()
            .flat_map(|layer| [layer.clone(), second(layer)])
            .collect();
        self.kv_layers = vec![0; self.layers.len()];
        (self.n_layer, self.n_part) = (self.layers.len(), 2);
    }

    /// Adds attention sinks to the layers that have the tensor.
    pub(crate) fn set_sinks(&mut self, keys: &Keys<'_>) {
        for (i, layer) in self.layers.iter_mut().enumerate() {
            if let Some(attn) = layer.attention_mut() {
                attn.sinks = keys.has_in_layer(i, "attn_sinks.weight");
            }
        }
    }

    /// Removes the rope from layers without a window.
    pub(crate) fn rotate_in_windows_alone(&mut self) {
        self.attention_mut()
            .filter(|attn| attn.window.is_none())
            .for_each(|attn| attn.rope = None);
    }

    /// Gives layers with a window a rope of their own, with base `theta` and no scaling.
    pub(crate) fn set_window_rope(&mut self, theta: f32) {
        let id = RopeId(self.ropes.len());
        self.ropes.push(Rope {
            theta,
            scaling: RopeScaling::None,
            attn_factor: 1.0,
            ..self.ropes[0]
        });
        self.attention_mut()
            .filter(|attn| attn.window.is_some())
            .for_each(|attn| attn.rope = Some(id));
    }
}

impl Rope {
    /// Rope of a file, for heads of `head_dim`.
    fn of(keys: &Keys<'_>, head_dim: usize, n_ctx_train: usize) -> Result<Rope, ModelError> {
        let n_dims = keys
            .opt_count("rope.dimension_count", MAX_HEAD_DIM)?
            .unwrap_or(head_dim);
        if n_dims % 2 != 0 || n_dims > head_dim {
            return Err(ModelError::Inconsistent {
                what: format!("rope rotates {n_dims} dimensions of heads of {head_dim}"),
            });
        }
        let linear = keys.positive("rope.scale_linear")?;
        let factor = keys.positive("rope.scaling.factor")?.or(linear);
        let beta_fast = keys
            .positive("rope.scaling.yarn_beta_fast")?
            .unwrap_or(32.0);
        let beta_slow = keys.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0);
        // No converter writes this key; Hugging Face's configuration of gpt-oss sets it to false.
        let truncate = keys
            .opt_bool("rope.scaling.yarn_truncate")?
            .unwrap_or(keys.arch != "gpt-oss");
        let scaling = match (keys.opt_str("rope.scaling.type")?, factor) {
            (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
            (None | Some("none" | "linear"), _) => RopeScaling::None,
            (Some("yarn"), Some(factor)) => RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
            },
            (Some("longrope" | "su"), _) => RopeScaling::Long,
            (Some(other), _) => {
                return Err(ModelError::OutOfRange {
                    key: format!("{}.rope.scaling.type", keys.arch),
                    value: other.to_owned(),
                    expected: "none, linear, yarn (with a factor) or longrope".into(),
                });
            }
        };
        // Hugging Face's `attention_factor`, in place of YaRN's magnitude.
        let magnitude = match scaling {
            RopeScaling::Yarn { .. } => keys.positive("rope.scaling.yarn_attn_factor")?,
            _ => None,
        };
        Ok(Rope {
            order: RopeOrder::NeoX,
            n_dims,
            theta: keys.positive("rope.freq_base")?.unwrap_or(10000.0),
            scaling,
            n_ctx_orig: keys
                .opt_count("rope.scaling.original_context_length", 1 << 28)?
                .unwrap_or(n_ctx_train),
            attn_factor: keys.positive("rope.scaling.attn_factor")?.unwrap_or(1.0)
                * magnitude.unwrap_or(1.0),
            factors: true,
            // Models with a multiplier of YaRN's logarithm (DeepSeek) divide the factor on rotated
            // values by itself, so it is omitted.
            yarn_magnitude: keys
                .number("rope.scaling.yarn_log_multiplier")?
                .is_none_or(|x| x == 0.0)
                && magnitude.is_none(),
        })
    }

    /// Frequencies of the pairs, and the factor on cosines and sines; `factors` are divisors of the
    /// frequencies.
    pub(crate) fn frequencies(&self, factors: Option<&[f32]>) -> (Vec<f32>, f32) {
        let Rope { theta, scaling, .. } = *self;
        let n = self.n_dims as f32;
        let base = |i: usize| theta.powf(-2.0 * i as f32 / n);
        let divide = |i: usize, f: f32| f / factors.map_or(1.0, |x| x[i]);
        let pairs = 0..self.n_dims / 2;
        match scaling {
            RopeScaling::None | RopeScaling::Long => (
                pairs.map(|i| divide(i, base(i))).collect(),
                self.attn_factor,
            ),
            RopeScaling::Linear { factor } => (
                pairs.map(|i| divide(i, base(i) / factor)).collect(),
                self.attn_factor,
            ),
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
            } => {
                // Index of the pair that makes `beta` turns over the original context.
                let pair = |beta: f32| {
                    n * (self.n_ctx_orig as f32 / (beta * 2.0 * std::f32::consts::PI)).ln()
                        / (2.0 * theta.ln())
                };
                let (low, high) = (pair(beta_fast), pair(beta_slow));
                let (low, high) = if truncate {
                    (low.floor(), high.ceil())
                } else {
                    (low, high)
                };
                let (low, high) = (low.max(0.0), high.min(n - 1.0));
                let frequencies = pairs.map(|i| {
                    let kept = 1.0 - ((i as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    divide(i, base(i) * (kept + (1.0 - kept) / factor))
                });
                let magnitude = if self.yarn_magnitude {
                    1.0 + 0.1 * factor.ln()
                } else {
                    1.0
                };
                (frequencies.collect(), self.attn_factor * magnitude)
            }
        }
    }
}
