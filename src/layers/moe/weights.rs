//! Weights of mixtures of experts.

use crate::compute::weight::{Linear, Weight};
use crate::layers::dense_ffn::weights::Ffn;
use crate::layers::moe::spec::MoeSpec;
use crate::layers::norm::weights::Norm;

/// Mixture of experts: a router, the experts, and a shared one that every token uses.
#[derive(Clone, Debug)]
pub(crate) struct Moe {
    pub(crate) spec: MoeSpec,
    pub(crate) router: Linear,
    /// Norm of the router's input, if it has one of its own.
    pub(crate) router_norm: Option<Norm>,
    /// Makes the vectors that experts read, and those of the residual stream of what they write.
    pub(crate) latent: Option<(Linear, Linear)>,
    /// Norm of the sum of what they write.
    pub(crate) latent_norm: Option<Vec<f32>>,
    /// Factors on the outputs of experts.
    pub(crate) output_scales: Option<Vec<f32>>,
    /// Experts of each token, `(n_vocab, n_used)`, if the file says them.
    pub(crate) by_token: Option<Vec<u32>>,
    /// Bias added to the experts' scores for the selection only.
    pub(crate) bias: Option<Vec<f32>>,
    /// Matrices of all experts, one after the other; `up` contains the gates, too, if they are
    /// fused.
    pub(crate) stacked: Ffn,
    /// The experts behind the others, whose router is the same.
    pub(crate) adjugate: Option<Box<Moe>>,
    pub(crate) shared: Option<Ffn>,
    /// Gate of the shared expert, whose output is multiplied by the sigmoid of this matrix's
    /// product.
    pub(crate) shared_gate: Option<Weight>,
}

impl Moe {
    /// Expert `e`.
    pub(crate) fn expert(&self, e: usize) -> Ffn {
        let one = |all: &Linear| all.matrix(e, self.spec.n_expert);
        let Ffn {
            activation,
            sparsity,
            sub_norm,
            gate,
            up,
            down,
        } = &self.stacked;
        let (gate, up) = if self.spec.fused {
            let (both, n_ff) = (one(up), self.spec.n_ff);
            (Some(both.rows(0..n_ff)), both.rows(n_ff..2 * n_ff))
        } else {
            (gate.as_ref().map(one), one(up))
        };
        Ffn {
            activation: *activation,
            sparsity: *sparsity,
            sub_norm: sub_norm.clone(),
            gate,
            up,
            down: one(down),
        }
    }
}
