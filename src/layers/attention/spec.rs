//! Attention of one layer.

use crate::layers::attention::latent::spec::LatentSpec;
use crate::layers::attention::relative::spec::RelativeSpec;
use crate::layers::indexer::spec::IndexSpec;
use crate::layers::rope::spec::RopeId;

/// Attention of one layer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct AttnSpec {
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads.
    pub n_head_kv: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub head_dim_v: usize,
    /// Factor on `q·k`.
    pub scale: f32,
    /// Soft cap `c` of scores: `c·tanh(s/c)`.
    pub softcap: Option<f32>,
    /// Positions seen, the current one included; `None`: all.
    pub window: Option<usize>,
    /// Whether tokens see only earlier ones. Otherwise they see the whole text, or half a window
    /// on each side.
    pub causal: bool,
    /// Whether positions are cut into chunks of the window's size instead: a token sees its chunk
    /// from the start.
    pub chunked: bool,
    /// How queries and keys are rotated; `None`: not at all.
    pub rope: Option<RopeId>,
    /// Norm of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Whether each query head is multiplied by a factor of the file behind its norm.
    pub q_gains: bool,
    /// Bound of queries, keys and values: they are clamped to `-clip..=clip`.
    pub clip: Option<f32>,
    /// Factor on values.
    pub value_scale: f32,
    /// Whether each head of values has a norm, without weights.
    pub value_norm: bool,
    /// Whether the value matrix is the key matrix: values are keys before their norm and rotation.
    pub keys_as_values: bool,
    /// Whether keys and values are those of another layer, see
    /// [`Hparams::kv_layers`](crate::layers::hparams::Hparams::kv_layers).
    pub shares_kv: bool,
    /// ALiBi instead of a rope: a key `n` positions back has its score reduced by `n·slope` (arXiv
    /// 2108.12409); this is the base-2 logarithm of the last head's slope, negated.
    pub alibi: Option<f32>,
    /// Biases of scores by the distance of positions, instead of a rope.
    pub relative: Option<RelativeSpec>,
    /// Whether each head has an attention sink: an extra score, of no key, in the softmax (arXiv
    /// 2309.17453).
    pub sinks: bool,
    /// Factor on queries that grows with the position.
    pub temperature: Option<Temperature>,
    /// Whether the output of all heads is multiplied by the sigmoid of a product with the layer's
    /// normed input.
    pub gated: bool,
    /// Whether the gate is part of the query matrix: for each head its queries, then its part of
    /// the gate.
    pub gate_in_q: bool,
    /// Whether the gate has one factor for each head instead of one for each value.
    pub gate_by_head: bool,
    /// Whether the gate is `ln(1 + eˣ)` of that product instead of its sigmoid.
    pub gate_softplus: bool,
    /// Whether the output of all heads together has a norm; such heads have no gate.
    pub sub_norm: bool,
    /// Latent attention, from which the other sizes follow.
    pub latent: Option<LatentSpec>,
    /// Choice of the positions that are seen.
    pub index: Option<IndexSpec>,
}

impl Default for AttnSpec {
    /// Causal attention to all earlier tokens, rotated by the model's first rope; without heads.
    fn default() -> AttnSpec {
        AttnSpec {
            n_head: 0,
            n_head_kv: 0,
            head_dim: 0,
            head_dim_v: 0,
            scale: 1.0,
            softcap: None,
            window: None,
            causal: true,
            chunked: false,
            rope: Some(RopeId(0)),
            qk_norm: None,
            q_gains: false,
            clip: None,
            value_scale: 1.0,
            value_norm: false,
            keys_as_values: false,
            shares_kv: false,
            alibi: None,
            relative: None,
            sinks: false,
            temperature: None,
            gated: false,
            gate_in_q: false,
            gate_by_head: false,
            gate_softplus: false,
            sub_norm: false,
            latent: None,
            index: None,
        }
    }
}

impl AttnSpec {
    /// Query heads that share one key/value head.
    pub fn n_group(&self) -> usize {
        self.n_head / self.n_head_kv
    }

    /// Query heads whose scores are computed together: those that share a key/value head or, where
    /// each has a slope or biases of its own, one.
    pub(crate) fn n_together(&self) -> usize {
        if self.alibi.is_some() || self.relative.is_some() {
            1
        } else {
            self.n_group()
        }
    }

    /// Sets of heads that are computed together.
    pub(crate) fn n_set(&self) -> usize {
        self.n_head / self.n_together()
    }

    /// The key/value head that a set of query heads reads.
    pub(crate) fn kv_head(&self, set: usize) -> usize {
        set * self.n_together() / self.n_group()
    }

    /// Width of the queries of a token.
    pub fn n_q(&self) -> usize {
        self.n_head * self.head_dim
    }

    /// Width of the keys of a token.
    pub fn n_k(&self) -> usize {
        self.n_head_kv * self.head_dim
    }

    /// Width of the values of a token.
    pub fn n_v(&self) -> usize {
        self.n_head_kv * self.head_dim_v
    }

    /// Width of the output of all heads.
    pub fn n_out(&self) -> usize {
        self.n_head * self.head_dim_v
    }

    /// Width of the output matrix's input.
    pub fn n_mixed(&self) -> usize {
        self.n_head
            * self
                .latent
                .map_or(self.head_dim_v, |latent| latent.head_dim_v)
    }

    /// Width of the gate's product.
    pub fn n_gate(&self) -> usize {
        match (self.gated, self.gate_by_head) {
            (false, _) => 0,
            (true, true) => self.n_head,
            (true, false) => self.n_mixed(),
        }
    }

    /// ALiBi slope of a head; 0 without ALiBi. If the number of heads is no power of two, those
    /// beyond the largest power take every other slope of a model with twice as many.
    pub fn slope(&self, head: usize) -> f32 {
        let Some(max_bias) = self.alibi else {
            return 0.0;
        };
        let n = 1 << self.n_head.ilog2();
        let exponent = if head < n {
            (head + 1) as f32
        } else {
            (2 * (head - n) + 1) as f32 / 2.0
        };
        (-max_bias * exponent / n as f32).exp2()
    }
}

/// Temperature of attention: a factor `1 + scale·ln(1 + ⌊(position + offset) / length⌋)` on
/// queries.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Temperature {
    /// Factor on the logarithm.
    pub scale: f32,
    /// Positions per step of the temperature.
    pub length: usize,
    /// Added to positions.
    pub offset: usize,
}

impl Temperature {
    /// The factor at a position.
    pub fn at(self, position: usize) -> f32 {
        1.0 + self.scale * (1.0 + ((position + self.offset) / self.length) as f32).ln()
    }
}

/// Placement and span of the norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QkNorm {
    /// Each head separately.
    PerHead,
    /// Each head separately, after rotation.
    PerHeadRotated,
    /// Each head separately, after rotation, without weights.
    PlainRotated,
    /// All heads together.
    Full,
    /// All heads together, mean and variance, with a bias (Jina BERT 2 of code).
    LayerFull,
    /// Each head separately with weights of its own, mean and variance, no bias.
    LayerByHead,
    /// Each head separately with weights of its own (PLaMo 2).
    RmsByHead,
}

#[cfg(test)]
mod tests {
    use crate::layers::attention::spec::Temperature;

    #[test]
    fn temperature_rises_by_steps() {
        let temperature = Temperature {
            scale: 0.5,
            length: 8,
            offset: 1,
        };
        assert_eq!(temperature.at(6), 1.0);
        assert_eq!(temperature.at(7), 1.0 + 0.5 * 2f32.ln());
        assert_eq!(temperature.at(14), temperature.at(7));
        assert_eq!(temperature.at(31), 1.0 + 0.5 * 5f32.ln());
    }
}
