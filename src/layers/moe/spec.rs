//! Mixture of experts.

use crate::layers::activation::spec::Activation;

/// Most experts of a layer.
pub(crate) const MAX_EXPERT: usize = 1024;

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
    /// Whether the file says which experts each token uses, instead of their scores.
    pub by_token: bool,
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
    /// Whether the sum of what experts write as shorter vectors has a norm.
    pub latent_norm: bool,
    /// Smaller experts behind the others, if there are some; then no expert is shared.
    pub adjugate: Option<AdjugateSpec>,
    /// The expert that every token uses.
    pub shared: Option<SharedSpec>,
}

impl Default for MoeSpec {
    /// `silu(gate)·up`, weights by a softmax over all experts; without experts.
    fn default() -> MoeSpec {
        MoeSpec {
            n_expert: 0,
            n_used: 0,
            n_ff: 0,
            activation: Activation::SwiGlu,
            gating: Gating::Softmax,
            by_token: false,
            bias: false,
            groups: None,
            normalise: false,
            scale: 1.0,
            routes_early: false,
            router_norm: false,
            output_scales: false,
            weighs_inputs: false,
            fused: false,
            latent: None,
            latent_norm: false,
            adjugate: None,
            shared: None,
        }
    }
}

/// How a router's outputs become weights of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gating {
    /// Softmax over all experts.
    #[default]
    Softmax,
    /// Softmax over the used experts alone.
    SoftmaxAfterTopK,
    /// Sigmoid of each.
    Sigmoid,
    /// Root of `ln(1 + eˣ)` of each.
    SqrtSoftplus,
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

/// Adjugate experts (GroveMoE, arXiv 2508.07785), each shared by a group of adjacent experts: they
/// read the sum of what a token's experts write, and what they make of it is added.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AdjugateSpec {
    /// Experts that share one.
    pub n_group: usize,
    /// Width of the hidden layer of one.
    pub n_ff: usize,
    /// Factor on their sum.
    pub scale: f32,
}

/// The expert of a mixture that every token uses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SharedSpec {
    /// Width of its hidden layer.
    pub n_ff: usize,
    /// Whether its output is multiplied by the sigmoid of a product with the input.
    pub gated: bool,
    /// Its activation, if it is not that of the other experts.
    pub activation: Option<Activation>,
}
