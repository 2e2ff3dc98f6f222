//! Specification of a layer: all that the executor knows about it. Families build specifications
//! from metadata, and weights are bound according to them.

/// One layer: a mixer, then a feed-forward layer, each added to the residual stream.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerSpec {
    /// Token mixer.
    pub mixer: Mixer,
    /// Feed-forward layer.
    pub ffn: FfnSpec,
    /// Where norms are.
    pub norms: Norms,
    /// The matrices that have a bias.
    pub biases: Biases,
    /// Factor on the outputs of mixer and feed-forward layer before they are added to the residual
    /// stream.
    pub residual_scale: f32,
    /// Factor on the residual stream after the layer.
    pub output_scale: OutputScale,
}

/// Factor on the residual stream after a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum OutputScale {
    /// None.
    None,
    /// The file's.
    OfFile,
    /// A half.
    Half,
}

/// Token mixer: the part of a layer in which tokens see each other.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Mixer {
    /// Softmax attention over keys and values of earlier tokens.
    Attention(AttnSpec),
    /// A recurrence, whose state every token changes.
    Recurrent(RecurrentSpec),
    /// Both, of the same input; their outputs are added.
    Both(AttnSpec, RecurrentSpec),
    /// None: the layer is a feed-forward layer alone.
    None,
}

impl LayerSpec {
    /// Its attention, if it has one.
    pub fn attention(&self) -> Option<&AttnSpec> {
        match &self.mixer {
            Mixer::Attention(attn) | Mixer::Both(attn, _) => Some(attn),
            Mixer::Recurrent(_) | Mixer::None => None,
        }
    }

    pub(crate) fn attention_mut(&mut self) -> Option<&mut AttnSpec> {
        match &mut self.mixer {
            Mixer::Attention(attn) | Mixer::Both(attn, _) => Some(attn),
            Mixer::Recurrent(_) | Mixer::None => None,
        }
    }

    /// Its recurrent mixer, if it has one.
    pub fn recurrent(&self) -> Option<&RecurrentSpec> {
        match &self.mixer {
            Mixer::Recurrent(spec) | Mixer::Both(_, spec) => Some(spec),
            Mixer::Attention(_) | Mixer::None => None,
        }
    }
}

/// Recurrent mixer of one layer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RecurrentSpec {
    /// Gated short convolution (LFM2).
    ShortConv(ConvSpec),
    /// Mamba 1 (arXiv 2312.00752).
    Mamba(MambaSpec),
    /// Mamba 2 (arXiv 2405.21060).
    Mamba2(Mamba2Spec),
    /// Gated delta rule (arXiv 2412.06464).
    Delta(DeltaSpec),
    /// Time mix of RWKV (arXiv 2404.05892, 2503.14456).
    TimeMix(TimeMixSpec),
    /// Channel mix of RWKV.
    ChannelMix(ChannelMixSpec),
}

impl RecurrentSpec {
    /// What it is.
    pub fn name(&self) -> &'static str {
        match self {
            RecurrentSpec::ShortConv(_) => "short convolutions",
            RecurrentSpec::Mamba(_) | RecurrentSpec::Mamba2(_) => "state spaces",
            RecurrentSpec::Delta(_) => "delta rules",
            RecurrentSpec::TimeMix(_) | RecurrentSpec::ChannelMix(_) => "RWKV",
        }
    }
}

/// Convolution of each channel with its own values at this token and the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConvSpec {
    /// Channels.
    pub n_channel: usize,
    /// Tokens, this one included.
    pub n_tap: usize,
}

/// Mamba 1: each channel has a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MambaSpec {
    /// Channels.
    pub n_inner: usize,
    /// Values of a channel's state.
    pub n_state: usize,
    /// Width of what time steps are products with.
    pub dt_rank: usize,
    /// Tokens that the convolution sees.
    pub n_tap: usize,
    /// Norms of time steps and of what goes into and out of the state.
    pub norms: MambaNorms,
}

/// Norms of Mamba 1 between its matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MambaNorms {
    /// None.
    None,
    /// With weights (Jamba).
    Weighted,
    /// Without weights (Falcon Mamba).
    Plain,
}

impl MambaSpec {
    /// The convolution before the state.
    pub fn conv(&self) -> ConvSpec {
        ConvSpec {
            n_channel: self.n_inner,
            n_tap: self.n_tap,
        }
    }

    /// Channels whose states lie side by side: the largest power of two that divides them, within
    /// what a kernel computes together, so that it reads memory from front to back.
    pub(crate) fn n_block(&self) -> usize {
        (1 << self.n_inner.trailing_zeros()).min(64)
    }
}

/// Mamba 2: each head of channels has a state for each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mamba2Spec {
    /// Channels of all heads.
    pub n_inner: usize,
    /// Heads.
    pub n_head: usize,
    /// Groups of heads that share what goes into and out of the state.
    pub n_group: usize,
    /// Values of a channel's state.
    pub n_state: usize,
    /// Tokens that the convolution sees.
    pub n_tap: usize,
    /// Whether the output of each group has a norm.
    pub norm: bool,
}

impl Mamba2Spec {
    /// The convolution before the state.
    pub fn conv(&self) -> ConvSpec {
        ConvSpec {
            n_channel: self.n_inner + 2 * self.n_group * self.n_state,
            n_tap: self.n_tap,
        }
    }
}

/// Gated delta rule: each head has a matrix from keys to values, which a token corrects by as much
/// as it errs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeltaSpec {
    /// Heads of values.
    pub n_head: usize,
    /// Heads of queries and keys.
    pub n_head_k: usize,
    /// Width of a query or key head.
    pub head_dim_k: usize,
    /// Width of a value head.
    pub head_dim_v: usize,
    /// Tokens that the convolution sees.
    pub n_tap: usize,
    /// Which heads of values share one of keys: with `n_head_k` of them, every `n_head_k`-th;
    /// otherwise neighbours.
    pub tiled: bool,
    /// Whether each key dimension forgets at a rate of its own (arXiv 2510.26692), and the
    /// output's gate is a sigmoid.
    pub by_channel: bool,
    /// Whether strengths and rates are products with one matrix, by key head.
    pub fused: bool,
}

impl DeltaSpec {
    /// The convolution of queries, keys and values.
    pub fn conv(&self) -> ConvSpec {
        ConvSpec {
            n_channel: 2 * self.n_head_k * self.head_dim_k + self.n_out(),
            n_tap: self.n_tap,
        }
    }

    /// Width of the output of all heads.
    pub fn n_out(&self) -> usize {
        self.n_head * self.head_dim_v
    }

    /// Rates at which the heads forget.
    pub fn n_rate(&self) -> usize {
        if self.by_channel {
            self.n_head * self.head_dim_k
        } else {
            self.n_head
        }
    }
}

/// Time mix of RWKV: each head has a matrix as state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimeMixSpec {
    /// Heads.
    pub n_head: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The version, by the ranks of its products of low rank.
    pub ranks: TimeMixRanks,
}

/// Versions of RWKV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TimeMixRanks {
    /// RWKV 6.
    Six {
        /// Of the blends of each of five inputs.
        blend: usize,
        /// Of decays.
        decay: usize,
    },
    /// RWKV 7.
    Seven {
        /// Of decays.
        decay: usize,
        /// Of learning rates.
        rate: usize,
        /// Of the blends with the first layer's values; `None`: this is the first layer.
        residual: Option<usize>,
        /// Of gates.
        gate: usize,
    },
}

impl TimeMixSpec {
    /// Width of all heads.
    pub fn n_embd(&self) -> usize {
        self.n_head * self.head_dim
    }

    /// Width of the widest product of low rank.
    pub(crate) fn most_rank(&self) -> usize {
        match self.ranks {
            TimeMixRanks::Six { blend, decay } => decay.max(5 * blend),
            TimeMixRanks::Seven {
                decay,
                rate,
                residual,
                gate,
            } => decay.max(rate).max(residual.unwrap_or(0)).max(gate),
        }
    }

    /// Values that feed a token into the states.
    pub(crate) fn n_feed(&self) -> usize {
        self.n_embd()
            * if let TimeMixRanks::Six { .. } = self.ranks {
                4
            } else {
                6
            }
    }
}

/// Channel mix of RWKV: a feed-forward layer that also reads the token before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChannelMixSpec {
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Width of the hidden layer.
    pub n_ff: usize,
    /// Whether the output is multiplied by the sigmoid of a product with the input (RWKV 6).
    pub gated: bool,
}

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
    /// Bound of queries, keys and values: they are clamped to `-clip..=clip`.
    pub clip: Option<f32>,
    /// Factor on values.
    pub value_scale: f32,
    /// Whether each head of values has a norm, without weights.
    pub value_norm: bool,
    /// Whether the value matrix is the key matrix: values are keys before their norm and rotation.
    pub keys_as_values: bool,
    /// Whether keys and values are those of another layer, see
    /// [`Hparams::kv_layers`](super::Hparams::kv_layers).
    pub shares_kv: bool,
    /// ALiBi instead of a rope: a key `n` positions back has its score reduced by `n·slope` (arXiv
    /// 2108.12409); this is the base-2 logarithm of the last head's slope, negated.
    pub alibi: Option<f32>,
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
    /// Latent attention, from which the other sizes follow.
    pub latent: Option<LatentSpec>,
}

/// Multi-head latent attention (arXiv 2405.04434): keys and values of a token are computed from one
/// short vector, its latent, except for the rotated part of keys, which all heads share. That part
/// comes last in queries and keys.
///
/// In the absorbed form, queries and outputs are multiplied by those matrices instead: there is one
/// key/value head, whose key is the latent and the rotated part, and whose value is the latent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LatentSpec {
    /// Width of the low-rank vector from which queries are computed; `None`: they are computed
    /// from the layer's input.
    pub q_rank: Option<usize>,
    /// Width of the latent.
    pub kv_rank: usize,
    /// Width of a head's part without rotation.
    pub n_plain: usize,
    /// Width of a head's rotated part.
    pub n_rot: usize,
    /// Width of a head's values.
    pub head_dim_v: usize,
    /// Whether the file has the matrices of the absorbed form.
    pub absorbed: bool,
}

impl LatentSpec {
    /// Width of a query head as computed by its matrix.
    pub fn head_dim(&self) -> usize {
        self.n_plain + self.n_rot
    }
}

impl AttnSpec {
    /// Query heads that share one key/value head.
    pub fn n_group(&self) -> usize {
        self.n_head / self.n_head_kv
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
    /// Each head separately with weights of its own, mean and variance, no bias.
    LayerByHead,
}

/// Feed-forward layer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum FfnSpec {
    /// The same weights for every token.
    Dense(DenseSpec),
    /// Mixture of experts.
    Moe(MoeSpec),
    /// Both, each with norms of its own on its input and output; their outputs are added.
    Both(DenseSpec, MoeSpec),
    /// None: the layer is a mixer alone.
    None,
}

impl FfnSpec {
    /// Width of the widest hidden layer.
    pub fn n_ff(&self) -> usize {
        let of_mixture = |moe: &MoeSpec| moe.n_ff.max(moe.shared.map_or(0, |shared| shared.n_ff));
        match self {
            FfnSpec::Dense(ffn) => ffn.n_ff,
            FfnSpec::Moe(moe) => of_mixture(moe),
            FfnSpec::Both(ffn, moe) => of_mixture(moe).max(ffn.n_ff),
            FfnSpec::None => 0,
        }
    }

    pub(crate) fn moe_mut(&mut self) -> Option<&mut MoeSpec> {
        match self {
            FfnSpec::Moe(moe) | FfnSpec::Both(_, moe) => Some(moe),
            FfnSpec::Dense(_) | FfnSpec::None => None,
        }
    }

    /// The mixture of experts, if it has one.
    pub fn moe(&self) -> Option<&MoeSpec> {
        match self {
            FfnSpec::Moe(moe) | FfnSpec::Both(_, moe) => Some(moe),
            FfnSpec::Dense(_) | FfnSpec::None => None,
        }
    }
}

/// Dense feed-forward layer: `down(act(x))`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DenseSpec {
    /// Width of the hidden layer.
    pub n_ff: usize,
    /// `act`.
    pub activation: Activation,
    /// Whether gate and up are one matrix, the gate first.
    pub fused: bool,
    /// Standard deviations above their mean below which gates are 0; what is left is reduced by as
    /// much (Gemma 3n).
    pub sparsity: Option<f32>,
}

/// Mixture of experts: a router scores them, each token uses the best.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MoeSpec {
    /// Number of experts.
    pub n_expert: usize,
    /// Experts each token uses.
    pub n_used: usize,
    /// Width of the hidden layer of one expert.
    pub n_ff: usize,
    /// Activation of the experts.
    pub activation: Activation,
    /// How the router's outputs become weights of experts.
    pub gating: Gating,
    /// Whether the file has a bias per expert that is added to the scores for the selection only.
    pub bias: bool,
    /// Restricts the selection to some groups of experts.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of the used experts are divided by their sum.
    pub normalise: bool,
    /// Factor on the weights of the used experts.
    pub scale: f32,
    /// Whether the router reads the layer's input instead of the experts' input.
    pub routes_early: bool,
    /// Whether the router reads the residual stream through a norm of its own instead.
    pub router_norm: bool,
    /// Whether the file has a factor on each expert's output.
    pub output_scales: bool,
    /// Whether the weights of the used experts are factors on their inputs instead of their
    /// outputs.
    pub weighs_inputs: bool,
    /// Whether gate and up of an expert are one matrix, gate rows first.
    pub fused: bool,
    /// Width of the vectors that experts read and write, if a matrix before and one behind all of
    /// them make shorter ones; router and shared expert read whole ones.
    pub latent: Option<usize>,
    /// The expert that every token uses.
    pub shared: Option<SharedSpec>,
}

/// How a router's outputs become weights of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the used experts alone.
    SoftmaxAfterTopK,
    /// Sigmoid of each.
    Sigmoid,
    /// For each pick, a softmax over the experts that are left and whose scores are close to it
    /// (arXiv 2409.12136).
    SparseMixer,
}

/// Experts in groups of equal size. A group's score is the sum of its two best experts' scores;
/// only experts of the best groups can be chosen (arXiv 2412.19437).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExpertGroups {
    /// Number of groups.
    pub n_group: usize,
    /// Groups that a token chooses from.
    pub n_used: usize,
}

/// The expert of a mixture that every token uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedSpec {
    /// Width of its hidden layer.
    pub n_ff: usize,
    /// Whether its output is multiplied by the sigmoid of a product with the input.
    pub gated: bool,
}

/// Activation of a feed-forward layer, from the products `gate` and `up` with its input.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `silu(gate)·up`.
    SwiGlu,
    /// `gelu(gate)·up`, by the tanh formula.
    GeGlu,
    /// `gelu(up)`, by the tanh formula; there is no gate.
    Gelu,
    /// `max(up, 0)²`; there is no gate.
    SquaredRelu,
    /// `gelu(gate)·up`, by the error function.
    GeGluErf,
    /// `max(gate, 0)·up`.
    ReGlu,
    /// `g·σ(1.702·g)·(u + 1)` with `g = min(gate, 7)` and `u` = `up` clamped to ±7 (gpt-oss).
    SwiGluOai,
    /// `gelu(up)`, by the error function; there is no gate.
    GeluErf,
    /// `up²·alpha_p + up·beta` for positive values, `(e^min(up, eps) − 1 − up)·alpha_n + up·beta`
    /// for others; there is no gate (arXiv 2411.13010).
    Xielu {
        /// Curvature above 0.
        alpha_p: f32,
        /// Curvature below 0.
        alpha_n: f32,
        /// Slope at 0.
        beta: f32,
        /// Upper bound of the exponent, below 0.
        eps: f32,
    },
}

impl Activation {
    /// Whether there is a gate.
    pub fn is_gated(self) -> bool {
        matches!(
            self,
            Activation::SwiGlu
                | Activation::GeGlu
                | Activation::ReGlu
                | Activation::GeGluErf
                | Activation::SwiGluOai
        )
    }
}

/// Placement of the norms of mixer and feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Norms {
    /// On the inputs of both.
    Before,
    /// On the feed-forward layer's input only.
    BeforeFfn,
    /// On the residual stream, after each output was added to it (BERT style).
    Residual,
    /// On the outputs of both.
    After,
    /// On inputs and outputs of both.
    Both,
    /// One norm on the input that both share: their outputs are added to the same residual stream
    /// (GPT-J style).
    Shared,
    /// A norm each on the input that both share, the same residual stream (GPT-NeoX style).
    Parallel,
}

/// Matrices of a layer that have a bias in every file. Other biases are up to the file, but must be
/// the same in all layers with equal specifications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Biases {
    /// None.
    Optional,
    /// Those of queries, keys and values.
    Qkv,
    /// All, except the matrices of a mixture.
    All,
    /// All, including those of a mixture.
    Everywhere,
}

#[cfg(test)]
mod tests {
    use crate::model::spec::*;

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

/// Index of a rope in [`Hparams::ropes`](crate::model::Hparams::ropes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeId(pub(super) usize);

impl RopeId {
    pub(crate) fn index(self) -> usize {
        self.0
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

/// Most experts of a layer.
pub(crate) const MAX_EXPERT: usize = 1024;
