//! What distinguishes one transformer from another: sizes, and the few choices families make.

use crate::arch::MAX_HEAD_DIM;
use crate::error::ModelError;
use crate::gguf::{Array, Metadata, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;

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
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads.
    pub n_head_kv: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub head_dim_v: usize,
    /// Width of the feed-forward layer (of one expert, in a mixture).
    pub n_ff: usize,
    /// Kind of normalisation.
    pub norm: NormKind,
    /// Its epsilon.
    pub norm_eps: f32,
    /// Activation of the feed-forward layer.
    pub activation: Activation,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Layer `i` is not rotated if `no_rope_step > 0` and `(i + 1) % no_rope_step == 0`.
    pub no_rope_step: usize,
    /// Sliding window, if some layers have one.
    pub window: Option<Window>,
    /// Factor on `q·k`.
    pub attn_scale: f32,
    /// Soft cap of attention scores; 0 means none.
    pub attn_softcap: f32,
    /// Soft cap of logits; 0 means none.
    pub final_softcap: f32,
    /// Factor on embeddings.
    pub embd_scale: f32,
    /// Factor on what a layer adds to the residual stream.
    pub residual_scale: f32,
    /// Factor on logits.
    pub logit_scale: f32,
    /// Attention and feed-forward read the same normed input and are added together (GPT-J style).
    pub parallel_residual: bool,
    /// Normalisation of queries and keys.
    pub qk_norm: QkNorm,
    /// Mixture of experts.
    pub experts: Option<Experts>,
}

/// From the head's product to the logits: `scale`, then `cap·tanh(x/cap)` unless `cap` is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Finish {
    pub(crate) scale: f32,
    pub(crate) cap: f32,
}

impl Finish {
    /// The logit of a product.
    pub(crate) fn logit(self, raw: f32) -> f32 {
        let x = self.scale * raw;
        if self.cap > 0.0 { self.cap * (x / self.cap).tanh() } else { x }
    }

    /// Derivative of [`Finish::logit`], from its value.
    pub(crate) fn slope(self, logit: f32) -> f32 {
        let x = if self.cap > 0.0 { logit / self.cap } else { 0.0 };
        self.scale * (1.0 - x * x)
    }

    /// All of a row, in place.
    pub(crate) fn row(self, logits: &mut [f32]) {
        if self.scale != 1.0 {
            logits.iter_mut().for_each(|x| *x *= self.scale);
        }
        if self.cap > 0.0 {
            logits.iter_mut().for_each(|x| *x = self.cap * (*x / self.cap).tanh());
        }
    }
}

/// Kind of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Root mean square, no bias.
    Rms,
    /// Mean and variance, with bias.
    Layer,
}

/// Activation of the feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `silu(gate)·up`.
    Silu,
    /// `gelu(gate)·up`, or `gelu(up)` where there is no gate: nothing else goes without.
    Gelu,
}

/// What the weights of a q/k norm span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// There is none.
    None,
    /// Each head by itself.
    PerHead,
    /// All heads together.
    Full,
}

/// Layers that only see the last `size` positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Positions seen, the current one included.
    pub size: usize,
    /// Every `pattern`-th layer sees everything; 0: none does.
    pub pattern: usize,
}

impl Window {
    /// Whether layer `layer` has the window.
    pub fn covers(&self, layer: usize) -> bool {
        self.pattern == 0 || layer % self.pattern < self.pattern - 1
    }
}

/// Mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts per layer.
    pub n_expert: usize,
    /// Experts each token uses.
    pub n_used: usize,
    /// Whether the weights of the used experts are scaled to sum to one.
    pub normalise: bool,
    /// Width of the expert that every token uses; 0 if there is none.
    pub n_ff_shared: usize,
}

/// Order of the pairs that are rotated.
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
    },
    /// Factors per dimension from the file, one set for short and one for long contexts
    /// (arXiv 2402.13753). Phi 3 files have the factors without saying so; they count all the same.
    Long,
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Which dimensions make a pair.
    pub order: RopeOrder,
    /// Dimensions rotated; the rest of the head stays.
    pub n_dims: usize,
    /// Base of the frequencies.
    pub theta: f32,
    /// Base in layers with a sliding window, which are never scaled; `None`: all layers alike.
    pub theta_window: Option<f32>,
    /// Stretching.
    pub scaling: RopeScaling,
    /// Context the frequencies were trained for.
    pub n_ctx_orig: usize,
    /// Factor on the rotated values.
    pub attn_factor: f32,
}

/// Metadata of one architecture: keys are given without their prefix. Remembers which were asked for, so that
/// none is ignored.
pub(crate) struct Keys<'a> {
    pub(crate) arch: &'a str,
    metadata: &'a Metadata,
    asked: RefCell<BTreeSet<String>>,
}

/// Keys that logits do not depend on, and sizes that the shapes of tensors repeat.
const HARMLESS: &[&str] = &[
    "attention.layer_norm_epsilon", // one of the two is read: `finish`
    "attention.layer_norm_rms_epsilon",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "pooling_type",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "vocab_size",
];

/// Keys that change what is computed, and the values that say what is computed here anyway.
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
    ("nextn_predict_layers", &[0.0]),
    ("rope.scaling.yarn_attn_factor", &[1.0]),
    ("rope.scaling.yarn_ext_factor", &[1.0]),
    ("rope.scaling.yarn_log_multiplier", &[0.0]),
];

impl<'a> Keys<'a> {
    pub(crate) fn new(arch: &'a str, metadata: &'a Metadata) -> Keys<'a> {
        Keys { arch, metadata, asked: RefCell::default() }
    }

    /// Its name in the file; it counts as asked for.
    fn name(&self, key: &str) -> String {
        let name = format!("{}.{key}", self.arch);
        self.asked.borrow_mut().insert(name.clone());
        name
    }

    /// Refuses a key unless it is absent or one of `values`; booleans count as 0 and 1.
    pub(crate) fn only(&self, key: &str, values: &[f64]) -> Result<(), ModelError> {
        let name = self.name(key);
        let Some(value) = self.metadata.get(&name) else { return Ok(()) };
        let number = match value {
            Value::Bool(yes) => Some(f64::from(u8::from(*yes))),
            Value::F64(x) => Some(*x),
            Value::F32(x) => Some(f64::from(*x)),
            _ => value.integer().map(|n| n as f64),
        };
        if number.is_some_and(|n| values.contains(&n)) {
            return Ok(());
        }
        let shown = |n: f64| if let Value::Bool(_) = value { (n != 0.0).to_string() } else { n.to_string() };
        Err(ModelError::OutOfRange {
            key: name,
            value: number.map_or_else(|| format!("of type {}", value.type_name()), shown),
            expected: values.iter().map(|&n| shown(n)).collect::<Vec<_>>().join(" or "),
        })
    }

    /// Refuses the keys of the architecture that nobody asked for, but for those that change nothing.
    pub(crate) fn none_ignored(&self) -> Result<(), ModelError> {
        let asked = self.asked.take();
        for (name, _) in self.metadata.iter().filter(|(name, _)| !asked.contains(*name)) {
            let Some(key) = name.strip_prefix(self.arch).and_then(|rest| rest.strip_prefix('.')) else { continue };
            if let Some((key, values)) = FIXED.iter().find(|(fixed, _)| *fixed == key) {
                self.only(key, values)?;
            } else if !HARMLESS.contains(&key) {
                return Err(ModelError::UnknownKey { key: name.to_owned(), arch: self.arch.to_owned() });
            }
        }
        Ok(())
    }

    /// A count, refused outside `1..=max`.
    pub(crate) fn count(&self, key: &str, max: usize) -> Result<usize, ModelError> {
        let value = self.opt_count(key, max)?;
        value.ok_or_else(|| ModelError::MissingKey { key: self.name(key) })
    }

    pub(crate) fn opt_count(&self, key: &str, max: usize) -> Result<Option<usize>, ModelError> {
        let name = self.name(key);
        let Some(value) = self.uniform_u64(&name)? else { return Ok(None) };
        match usize::try_from(value) {
            Ok(n) if (1..=max).contains(&n) => Ok(Some(n)),
            _ => Err(ModelError::OutOfRange { key: name, value: value.to_string(), expected: format!("1 to {max}") }),
        }
    }

    /// An integer, or an array that repeats one (some converters write one value per layer).
    fn uniform_u64(&self, name: &str) -> Result<Option<u64>, ModelError> {
        if !matches!(self.metadata.get(name), Some(Value::Array(_))) {
            return Ok(self.metadata.opt_u64(name)?);
        }
        let values = self.metadata.u32s(name)?;
        let first = values.first().copied().unwrap_or(0);
        if values.iter().any(|&v| v != first) {
            return Err(ModelError::VariesByLayer { key: name.to_owned() });
        }
        Ok(Some(first.into()))
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

    /// The sliding window: `default` positions unless the file says, none if it says 0; in the layers that
    /// `pattern` covers unless it names another pattern.
    pub(crate) fn window(&self, default: Option<usize>, pattern: usize) -> Result<Option<Window>, ModelError> {
        let size = self.uniform_u64(&self.name("attention.sliding_window"))?;
        let size = size.map_or(default, |n| Some(usize::try_from(n).unwrap_or(usize::MAX)));
        let key = self.name("attention.sliding_window_pattern");
        let by_layer = match self.metadata.get(&key) {
            Some(Value::Array(Array::Bool(by_layer))) => by_layer.as_slice(),
            _ => &[],
        };
        let pattern = match by_layer {
            [] => self.metadata.opt_u32(&key)?.map_or(pattern, |n| n as usize),
            _ => pattern,
        };
        let window = size.filter(|&n| n > 0).map(|size| Window { size, pattern });
        if window.is_some_and(|w| (0..).zip(by_layer).any(|(layer, &covered)| w.covers(layer) != covered)) {
            return Err(ModelError::VariesByLayer { key });
        }
        Ok(window)
    }

    pub(crate) fn opt_str(&self, key: &str) -> Result<Option<&str>, ModelError> {
        Ok(self.metadata.opt_str(&self.name(key))?)
    }
}

impl Hparams {
    /// From the head's product to the logits.
    pub(crate) fn logit_finish(&self) -> Finish {
        Finish { scale: self.logit_scale, cap: self.final_softcap }
    }

    /// What all families read alike: a llama with the sizes of the file.
    pub(crate) fn base(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
        let n_embd = keys.count("embedding_length", 1 << 17)?;
        let n_layer = keys.count("block_count", 1024)?;
        let n_head = keys.count("attention.head_count", 1024)?;
        let n_head_kv = keys.opt_count("attention.head_count_kv", 1024)?.unwrap_or(n_head);
        let n_ctx_train = keys.count("context_length", 1 << 28)?;
        let head_dim = match keys.opt_count("attention.key_length", MAX_HEAD_DIM)? {
            Some(n) => n,
            None if n_embd % n_head == 0 && n_embd / n_head <= MAX_HEAD_DIM => n_embd / n_head,
            None => {
                return Err(ModelError::Inconsistent {
                    what: format!(
                        "embedding_length {n_embd} does not divide into {n_head} heads of at most {MAX_HEAD_DIM}"
                    ),
                });
            }
        };
        let head_dim_v = keys.opt_count("attention.value_length", MAX_HEAD_DIM)?.unwrap_or(head_dim);
        if n_head % n_head_kv != 0 {
            return Err(ModelError::Inconsistent {
                what: format!("{n_head} heads cannot share {n_head_kv} key/value heads"),
            });
        }
        let n_dims = keys.opt_count("rope.dimension_count", MAX_HEAD_DIM)?.unwrap_or(head_dim);
        if n_dims % 2 != 0 || n_dims > head_dim {
            return Err(ModelError::Inconsistent {
                what: format!("rope rotates {n_dims} dimensions of heads of {head_dim}"),
            });
        }
        let n_ctx_orig = keys.opt_count("rope.scaling.original_context_length", 1 << 28)?.unwrap_or(n_ctx_train);
        let linear = keys.positive("rope.scale_linear")?;
        let factor = keys.positive("rope.scaling.factor")?.or(linear);
        let beta_fast = keys.positive("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0);
        let beta_slow = keys.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0);
        let scaling = match (keys.opt_str("rope.scaling.type")?, factor) {
            (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
            (None | Some("none" | "linear"), _) => RopeScaling::None,
            (Some("yarn"), Some(factor)) => RopeScaling::Yarn { factor, beta_fast, beta_slow },
            (Some("longrope" | "su"), _) => RopeScaling::Long,
            (Some(other), _) => {
                return Err(ModelError::OutOfRange {
                    key: format!("{}.rope.scaling.type", keys.arch),
                    value: other.to_owned(),
                    expected: "none, linear, yarn (with a factor) or longrope".into(),
                });
            }
        };
        Ok(Hparams {
            arch: keys.arch.to_owned(),
            n_vocab: 0, // the embedding table's rows, known when tensors are bound
            n_ctx_train,
            n_embd,
            n_layer,
            n_head,
            n_head_kv,
            head_dim,
            head_dim_v,
            n_ff: keys.opt_count("feed_forward_length", 1 << 20)?.unwrap_or(0),
            norm: NormKind::Rms,
            norm_eps: 0.0, // which key holds it depends on the kind: `finish`
            activation: Activation::Silu,
            rope: Rope {
                order: RopeOrder::NeoX,
                n_dims,
                theta: keys.positive("rope.freq_base")?.unwrap_or(10000.0),
                theta_window: None,
                scaling,
                n_ctx_orig,
                attn_factor: keys.positive("rope.scaling.attn_factor")?.unwrap_or(1.0),
            },
            no_rope_step: 0,
            window: None,
            attn_scale: 1.0 / (head_dim as f32).sqrt(),
            attn_softcap: 0.0,
            final_softcap: 0.0,
            embd_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            parallel_residual: false,
            qk_norm: QkNorm::None,
            experts: None,
        })
    }

    /// Reads what depends on the family's choices.
    pub(crate) fn finish(mut self, keys: &Keys<'_>) -> Result<Hparams, ModelError> {
        let key = match self.norm {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            NormKind::Layer => "attention.layer_norm_epsilon",
        };
        self.norm_eps =
            keys.positive(key)?.ok_or_else(|| ModelError::MissingKey { key: format!("{}.{key}", keys.arch) })?;
        if self.n_ff == 0 {
            return Err(ModelError::MissingKey { key: format!("{}.feed_forward_length", keys.arch) });
        }
        Ok(self)
    }

    /// Query heads that share one key/value head.
    pub fn n_group(&self) -> usize {
        self.n_head / self.n_head_kv
    }

    /// Whether layer `layer` only sees a window, and how large it is.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        self.window.filter(|w| w.covers(layer)).map(|w| w.size)
    }

    /// Whether layer `layer` rotates queries and keys.
    pub fn has_rope(&self, layer: usize) -> bool {
        self.no_rope_step == 0 || !(layer + 1).is_multiple_of(self.no_rope_step)
    }
}

impl Rope {
    /// Frequencies of the pairs, and the factor on cosines and sines. `factors` divides each
    /// frequency.
    pub(crate) fn frequencies(&self, in_window: bool, factors: Option<&[f32]>) -> (Vec<f32>, f32) {
        let (theta, scaling) = match self.theta_window {
            Some(theta) if in_window => (theta, RopeScaling::None),
            _ => (self.theta, self.scaling),
        };
        let n = self.n_dims as f32;
        let base = |i: usize| theta.powf(-2.0 * i as f32 / n);
        let divide = |i: usize, f: f32| f / factors.map_or(1.0, |x| x[i]);
        let pairs = 0..self.n_dims / 2;
        match scaling {
            RopeScaling::None | RopeScaling::Long => (pairs.map(|i| divide(i, base(i))).collect(), self.attn_factor),
            RopeScaling::Linear { factor } => (pairs.map(|i| divide(i, base(i) / factor)).collect(), self.attn_factor),
            RopeScaling::Yarn { factor, beta_fast, beta_slow } => {
                // The pair that turns `beta` times over the original context.
                let pair = |beta: f32| {
                    n * (self.n_ctx_orig as f32 / (beta * 2.0 * std::f32::consts::PI)).ln() / (2.0 * theta.ln())
                };
                let low = pair(beta_fast).floor().max(0.0);
                let high = pair(beta_slow).ceil().min(n - 1.0);
                let frequencies = pairs.map(|i| {
                    let kept = 1.0 - ((i as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    divide(i, base(i) * (kept + (1.0 - kept) / factor))
                });
                (frequencies.collect(), self.attn_factor * (1.0 + 0.1 * factor.ln()))
            }
        }
    }
}
