//! Metadata keys of an architecture, each of which is read, or refused.

use crate::gguf::{Array, Metadata, TensorInfo, Value};
use crate::layers::activation::spec::Activation;
use crate::layers::classifier::{ClassifierActivation, ClassifierSpec, Pooling};
use crate::layers::dense_ffn::spec::DenseSpec;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::mamba::spec::{MambaNorms, MambaSpec};
use crate::layers::mamba2::spec::Mamba2Spec;
use crate::layers::moe::spec::{ExpertGroups, Gating, MAX_EXPERT, MoeSpec, SharedSpec};
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::model::ModelError;
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// Most tokens that a convolution sees.
pub(crate) const MAX_TAPS: usize = 64;

/// What mixes tokens in a layer, before the sizes of attention are known.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MixerKind {
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
    /// Records all.
    pub(crate) fn reporting() -> UnknownNames {
        UnknownNames {
            policy: Unknown::Report,
            names: Vec::new(),
        }
    }

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
    pub(super) n_mtp: usize,
    pub(super) n_vocab: usize,
    pub(super) metadata: &'a Metadata,
    pub(super) tensors: &'a [TensorInfo],
    pub(super) asked: RefCell<BTreeSet<String>>,
}

/// Keys that do not affect logits, and sizes that the shapes of tensors repeat.
pub(super) const HARMLESS: &[&str] = &[
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
pub(super) const FIXED: &[(&str, &[f64])] = &[
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
    pub(super) fn new(
        arch: &'a str,
        metadata: &'a Metadata,
        tensors: &'a [TensorInfo],
        n_vocab: usize,
    ) -> Result<Keys<'a>, ModelError> {
        let keys = Keys::of_blocks(arch, metadata, tensors, n_vocab)?;
        let n_block = keys.n_layer;
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

    /// Those of a file whose blocks are layers, all of them.
    pub(super) fn of_blocks(
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
        Ok(Keys {
            n_layer: keys.count("block_count", 1024)?,
            ..keys
        })
    }

    /// What `read` reads for another number of layers.
    pub(crate) fn with_layers<T>(
        &self,
        n_layer: usize,
        read: impl FnOnce(&Keys<'a>) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        let keys = Keys {
            n_layer,
            asked: RefCell::default(),
            ..*self
        };
        let found = read(&keys)?;
        self.asked.borrow_mut().append(&mut keys.asked.take());
        Ok(found)
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
    pub(super) fn name(&self, key: &str) -> String {
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

    /// Whether the file has a key; does not count it as read.
    pub(crate) fn has_key(&self, key: &str) -> bool {
        self.metadata.get(&format!("{}.{key}", self.arch)).is_some()
    }

    /// Counts a key as read.
    pub(crate) fn ignore(&self, key: &str) {
        self.name(key);
    }

    /// Refuses or reports the architecture's keys that nothing has read, except the harmless ones.
    pub(super) fn none_ignored(&self, unknown: &mut UnknownNames) -> Result<(), ModelError> {
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

    pub(super) fn in_range(
        name: &str,
        value: u64,
        range: RangeInclusive<usize>,
    ) -> Result<usize, ModelError> {
        let count = usize::try_from(value).ok().filter(|n| range.contains(n));
        count.ok_or_else(|| ModelError::OutOfRange {
            key: name.to_owned(),
            value: value.to_string(),
            expected: format!("{} to {}", range.start(), range.end()),
        })
    }

    /// An integer, or an array that repeats one (some converters write one value per layer).
    pub(super) fn uniform_u64(&self, name: &str) -> Result<Option<u64>, ModelError> {
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

    /// An array of whole numbers, of 64 bits or fewer.
    pub(crate) fn u64s(&self, key: &str) -> Result<Vec<u64>, ModelError> {
        let name = self.name(key);
        match self.metadata.get(&name) {
            Some(Value::Array(Array::U64(all))) => Ok(all.clone()),
            Some(Value::Array(Array::I64(all))) => Ok(all.iter().map(|&n| n as u64).collect()),
            _ => Ok(self
                .metadata
                .u32s(&name)?
                .iter()
                .map(|&n| n.into())
                .collect()),
        }
    }

    /// Rows of a table, if it is there.
    pub(crate) fn n_rows(&self, name: &str) -> Option<u64> {
        let tensor = self.tensors.iter().find(|t| t.name == name)?;
        tensor.dims.get(1).copied()
    }

    /// A token.
    pub(crate) fn token(&self, key: &str) -> Result<u32, ModelError> {
        let token = self.opt_u64(key)?.ok_or_else(|| self.missing(key))?;
        match u32::try_from(token) {
            Ok(id) if (id as usize) < self.n_vocab => Ok(id),
            _ => Err(ModelError::OutOfRange {
                key: self.name(key),
                value: token.to_string(),
                expected: format!("a token below {}", self.n_vocab),
            }),
        }
    }

    /// An array of tokens, `max` at most.
    pub(crate) fn tokens(&self, key: &str, max: usize) -> Result<Vec<u32>, ModelError> {
        let name = self.name(key);
        let tokens = self.metadata.u32s(&name)?;
        if tokens.is_empty() || tokens.len() > max {
            return Err(ModelError::Inconsistent {
                what: format!("{name} has {} values, not 1 to {max}", tokens.len()),
            });
        }
        match tokens.iter().find(|&&t| t as usize >= self.n_vocab) {
            Some(token) => Err(ModelError::OutOfRange {
                key: name,
                value: token.to_string(),
                expected: format!("tokens below {}", self.n_vocab),
            }),
            None => Ok(tokens.to_vec()),
        }
    }

    pub(super) fn one_per_layer(&self, name: &str, n: usize) -> Result<(), ModelError> {
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

    /// A list of numbers of any length.
    pub(crate) fn list(&self, key: &str) -> Result<Option<Vec<u32>>, ModelError> {
        let name = self.name(key);
        Ok(self.metadata.opt_u32s(&name)?.map(Cow::into_owned))
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
    pub(crate) fn attention_or(&self, spec: &RecurrentSpec) -> Result<Vec<MixerKind>, ModelError> {
        let n_head_kv = self.opt_counts("attention.head_count_kv", 0..=1024)?;
        let n_head_kv = n_head_kv.ok_or_else(|| self.missing("attention.head_count_kv"))?;
        let mixer = |n| {
            if n > 0 {
                MixerKind::Attention
            } else {
                MixerKind::Recurrent(spec.clone())
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
    pub(super) fn windows(
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

    pub(super) fn all_dense(
        &self,
        activation: Activation,
        fused: bool,
    ) -> Result<Vec<FfnSpec>, ModelError> {
        let n_ff = self.opt_counts("feed_forward_length", 1..=1 << 20)?;
        let n_ff = n_ff.ok_or_else(|| self.missing("feed_forward_length"))?;
        Ok(n_ff
            .into_iter()
            .map(|n_ff| {
                FfnSpec::Dense(DenseSpec {
                    n_ff,
                    activation,
                    fused,
                    ..DenseSpec::default()
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
            gating: match self.opt_u64("expert_gating_func")? {
                None | Some(1) => Gating::Softmax,
                Some(2) => Gating::Sigmoid,
                Some(3) => Gating::SoftmaxAfterTopK,
                Some(4) => Gating::SqrtSoftplus,
                Some(n) => {
                    return Err(ModelError::OutOfRange {
                        key: self.name("expert_gating_func"),
                        value: n.to_string(),
                        expected: "1 to 4".into(),
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
            fused: self.has_part("ffn_gate_up_exps.weight"),
            shared: shared.map(|n_ff| SharedSpec {
                n_ff,
                ..SharedSpec::default()
            }),
            ..MoeSpec::default()
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

    pub(super) fn expert_groups(
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

    pub(super) fn pooling(&self) -> Result<Option<Pooling>, ModelError> {
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
